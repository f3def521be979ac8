"What a fit leaves behind, compared with that of another: all that the tests of the large batch have in common"
from common import *

FLOAT32 = 1e-5  # the Recorder averages losses in float32


def assert_same_fit(small, large, tol=ROUNDING, rate_tol=0.):
    "Asserts that two fits have left the same weights, and the same curves"
    assert_same_weights(small, large, tol)
    assert_same_curves(small.recorder, large.recorder, rate_tol)


def assert_same_curves(small, large, rate_tol=0.):
    "Asserts that two Recorders have the same losses, hyper-parameters and values of epochs"
    assert_same(small.lrs, large.lrs, rate_tol)
    assert_same(small.losses, large.losses, FLOAT32)
    assert small.iters == large.iters
    assert len(small.values) == len(large.values)
    for row, expected in zip(floats(small.values), floats(large.values)): assert_same(row, expected, FLOAT32)
    # A ParamScheduler leaves the hyper-parameters that it has set
    expected_hypers = getattr(large, 'hps', {})
    assert getattr(small, 'hps', {}).keys() == expected_hypers.keys()
    for name, values in expected_hypers.items(): assert_same(small.hps[name], values, rate_tol)

