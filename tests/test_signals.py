"SIGTERM and Ctrl-C: the fit is saved at the end of the running batch, so that none is lost"
import signal

import pytest

from common import *
from fastxtend_accum.resuming.signals import HeldSignals
from resumed import N_STEPS, Stops, assert_same_end, learner, new_process, train, whole


class Terminates(Callback):
    "Sends a signal to this process, as SLURM does"
    at = None
    def after_step(self):
        if Stops.n+1 == Terminates.at: signal.raise_signal(signal.SIGTERM)

    def after_pred(self):
        is_due = not self.training and self.epoch == 1 and Terminates.at == 'validation'
        if is_due: signal.raise_signal(signal.SIGTERM)


def script(): return train(learner(Terminates()))


def ends_by_signal(at):
    Terminates.at = at
    script()


@pytest.mark.parametrize('at,n_run', [(6, 6), (18, 18), ('validation', 26)])
def test_no_batch_is_lost(at, n_run):
    expected = whole(script)
    new_process(seed=1)
    assert forked(ends_by_signal, at) == -signal.SIGTERM
    new_process()
    learn = script()
    assert Stops.n == N_STEPS-n_run
    assert_same_end(learn, expected)


def test_a_handler_that_was_there_is_called_after_the_save():
    seen = []
    def handler(number, frame): seen.append(Path('models/resume/0.pth').exists())
    before = signal.signal(signal.SIGTERM, handler)
    Terminates.at = 6
    try: script()
    finally:
        Terminates.at = None
        assert signal.signal(signal.SIGTERM, before) is handler
    assert seen == [True]


def test_a_second_signal_does_not_wait():
    held = HeldSignals()
    held.begin()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt): signal.raise_signal(signal.SIGINT)
    held.end()


def test_fits_within_each_other_hold_signals_until_the_outer_one_ends():
    held = HeldSignals()
    held.begin()
    held.begin()
    held.end()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt): held.end()
