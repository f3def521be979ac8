"The reasons of several differences"
from common import *
from fastxtend_accum.checking.comparison import find_reasons


class Trained:
    "Has differences, each by the name of the suspect that makes it; without it, rounding is left"
    def __init__(self, names): self.names = names

    def distances(self, double, without): return self.differences(without)

    def differences(self, without):
        if 'needed' in without: raise RuntimeError('nothing trains without it')
        return {name: .01 if name in without else 1. for name in self.names}


def reasons(names, suspected):
    trained = Trained(names)
    return find_reasons(trained, trained.differences([]), suspected)


def test_suspects_that_change_nothing_are_no_reasons():
    assert reasons('ab', ['x', 'a', 'needed', 'y', 'b', 'z']) == (['a', 'b'], ['needed'])


def test_differences_without_a_reason_leave_the_reasons_of_others():
    assert reasons('abc', ['a', 'x']) == (['a'], [])
    assert reasons('abc', ['x']) == ([], [])
