"SIGTERM and Ctrl-C: the fit is saved at the end of the running batch, so that none is lost"
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from common import *
from fastxtend_accum.resuming.signals import HeldSignals
from resume_layouts import accum, make
from resumed import N_STEPS, Stops, assert_same_end, learner, new_process, steps, train, whole


class Terminates(Callback):
    "Sends a signal to this process, as SLURM does"
    at = None
    def after_step(self):
        if steps.n+1 == Terminates.at: signal.raise_signal(signal.SIGTERM)

    def after_pred(self):
        if self.training or self.iter > 0: return
        if Terminates.at == f'validation {self.epoch}': signal.raise_signal(signal.SIGTERM)

    def after_validate(self):
        if Terminates.at == f'validation {self.epoch}': os._exit(1)  # it has waited

    def after_epoch(self):
        if Terminates.at == f'end of epoch {self.epoch}': signal.raise_signal(signal.SIGTERM)


class Swaps(Callback):
    "Validates with other weights, as a callback that averages them does"
    order = Terminates.order-1
    def before_validate(self):
        self.kept = [p.detach().clone() for p in self.model.parameters()]
        for p in self.model.parameters(): p.data.mul_(.5)

    def after_validate(self):
        for p, kept in zip(self.model.parameters(), self.kept): p.data.copy_(kept)
        if self.epoch == 1: Terminates.at = None  # it should wait


def script(*cbs, **kwargs): return train(learner(Terminates(), *cbs), **kwargs)
def swapping(): return script(Swaps())


def ends_by_signal(at, script=script):
    new_process(seed=1)  # here, since Python seeds `random` in a copy of a process
    Terminates.at = at
    script()


def assert_goes_on_after_signal(at, n_run, script=script, n_steps=N_STEPS):
    expected = whole(script)
    assert steps.n == n_steps
    assert forked(ends_by_signal, at, script) == -signal.SIGTERM
    new_process()
    assert_same_end(script(), expected)
    assert steps.n == n_steps-n_run


@pytest.mark.thin(2)
@pytest.mark.parametrize('at,n_run', [
    (6, 6), (18, 18), ('validation 1', 26), ('validation 2', N_STEPS), ('end of epoch 2', N_STEPS)])
def test_no_batch_is_lost(at, n_run): assert_goes_on_after_signal(at, n_run)


@pytest.mark.long
@pytest.mark.filterwarnings('ignore:AutoResume does not keep')  # `Terminates.at`, which `Swaps` changes
def test_a_signal_waits_while_a_callback_has_swapped_the_weights():
    assert_goes_on_after_signal('validation 1', 26, swapping)


def carrying():
    "Of the 26 loader batches of an epoch, 25 fill windows, and the next epoch takes the last one"
    accumulates = accum(20, remainder='carry')
    learn = make(accumulates, Terminates(), Stops())
    return fit(learn, 3, .02, cbs=AutoResume(8, verbose=False))


@pytest.mark.long
def test_batches_that_are_carried_follow_after_a_signal_in_validation():
    assert_goes_on_after_signal('validation 0', 5, carrying, n_steps=15)


# A copy of this process runs these, in its main thread, where signals are received

def calls_own_handler():
    seen = []
    def handler(number, frame): seen.append(Path('models/resume/0.pth').exists())
    signal.signal(signal.SIGTERM, handler)
    ends_by_signal(6)
    assert seen == [True]
    assert signal.getsignal(signal.SIGTERM) is handler
    assert steps.n == N_STEPS


def second_signal_does_not_wait():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores Ctrl-C
    held = HeldSignals()
    with pytest.raises(KeyboardInterrupt), held.hold():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        os._exit(1)  # it has waited


def outer_fit_holds_signals():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    held = HeldSignals()
    with pytest.raises(KeyboardInterrupt), held.hold():
        with held.hold(): pass
        signal.raise_signal(signal.SIGINT)
        assert held.waiting == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def fits_run_in_other_threads():
    "Where no signal can be held; after a fit in the main thread, in the same folder"
    script()
    with ThreadPoolExecutor(1) as thread: assert len(thread.submit(script).result().recorder.losses) == N_STEPS


@pytest.mark.long
@pytest.mark.parametrize('check', [
    calls_own_handler, second_signal_does_not_wait, outer_fit_holds_signals, fits_run_in_other_threads])
def test_signals_are_held_and_let_through(check): assert forked(check) == 0
