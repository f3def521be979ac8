"Assertions that several files share, beside those of common.py"
from common import *


def assert_different(a, b):
    "Asserts that two Learners or models have other weights, so that a proof of equal ones proves something"
    difference = weights(a)-weights(b)
    assert difference.abs().max() > 1e-3


__all__ = ['assert_different']
