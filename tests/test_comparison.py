"The reasons of several differences"
from common import *
from fastxtend_accum.checking.comparison import find_reasons


class Trained:
    "Differs by the names that no suspect takes away"
    def __init__(self, names): self.names = set(names)

    def differences(self, without):
        if 'needed' in without: raise RuntimeError('nothing trains without it')
        left = self.names.difference(*without)
        return dict.fromkeys(left)


def test_suspects_that_change_nothing_are_no_reasons():
    assert find_reasons(Trained('ab'), ['x', 'a', 'needed', 'y', 'b', 'z'], set()) == (['a', 'b'], ['needed'])


def test_differences_without_a_reason_leave_the_reasons_of_others():
    assert find_reasons(Trained('abc'), ['a', 'x'], {'b'}) == (['a'], [])
    assert find_reasons(Trained('abc'), ['x'], {'b'}) == ([], [])
