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
    new_process(seed=1)  # here, since Python seeds `random` in a copy of a process
    Terminates.at = at
    script()


@pytest.mark.thin(3, 1)
@pytest.mark.parametrize('at,n_run', [(6, 6), (18, 18), ('validation', 26)])
def test_no_batch_is_lost(at, n_run):
    expected = whole(script)
    assert forked(ends_by_signal, at) == -signal.SIGTERM
    new_process()
    learn = script()
    assert Stops.n == N_STEPS-n_run
    assert_same_end(learn, expected)


# A copy of this process runs these, in its main thread, where signals are received

def calls_own_handler():
    seen = []
    def handler(number, frame): seen.append(Path('models/resume/0.pth').exists())
    signal.signal(signal.SIGTERM, handler)
    ends_by_signal(6)
    assert seen == [True]
    assert signal.getsignal(signal.SIGTERM) is handler
    assert Stops.n == N_STEPS


def second_signal_does_not_wait():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores Ctrl-C
    held = HeldSignals()
    held.begin()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt): signal.raise_signal(signal.SIGINT)


def outer_fit_holds_signals():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    held = HeldSignals()
    held.begin()
    held.begin()
    held.end()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt): held.end()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.long
@pytest.mark.parametrize('check', [calls_own_handler, second_signal_does_not_wait, outer_fit_holds_signals])
def test_signals_are_held_and_let_through(check): assert forked(check) == 0
