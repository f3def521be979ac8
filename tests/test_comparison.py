"The reasons of several differences"
from fastxtend_accum.checking.comparison import find_reasons


def reasons(names, suspected):
    "Returns the reasons of differences, each by the name of the suspect that makes it; without it, rounding is left"
    def compare(without, double=False):
        if 'needed' in without: raise RuntimeError('nothing trains without it')
        return {name: .01 if name in without else 1. for name in names}
    return find_reasons(compare, dict.fromkeys(names, 1.), [(name, name) for name in suspected])


def test_suspects_that_change_nothing_are_no_reasons():
    assert reasons('ab', ['x', 'a', 'needed', 'y', 'b', 'z']) == ['a', 'b']


def test_differences_without_a_reason_leave_the_reasons_of_others():
    assert reasons('abc', ['a', 'x']) == ['a']
    assert reasons('abc', ['x']) == []
