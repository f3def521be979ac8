"""windows/loop.py: windows in the place of fastai's loop over batches. What becomes of batches that callbacks cancel,
of steps that are left out and of interrupted fits, and who may not have a loop of their own"""
import functools
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import *
from fastxtend_accum.windows.loop import replaced_method
from numbered_batches import *
from own_learners import *

FLOAT32 = 1e-6  # losses, which the Recorder averages in float32
BOTH_LOGS = pytest.mark.parametrize('log', [True, False])


# Batches that a callback cancels

def kept_windows(n, k, cancelled, remainder, n_epoch):
    "Returns the windows of `k` loader batches in a text, if some batches are cancelled in all epochs"
    n_batches = math.ceil(n/BS)
    kept = [str(i) for i in range(n_batches) if str(i) not in cancelled]
    res = []
    window = ''
    for epoch in range(n_epoch):
        for number in kept:
            window += number
            if len(samples_of(window, n)) < k*BS: continue
            res.append(window)
            window = ''
        is_last = epoch+1 == n_epoch
        if remainder == 'carry' and not is_last: continue
        if window and remainder != 'drop': res.append(window)
        window = ''
    return ' '.join(res)


@draws
@given(
    n=st.integers(1, 80),
    k=st.integers(1, 4),
    cancelled=st.text('0123456789', max_size=9),
    remainder=st.sampled_from(['step', 'carry', 'drop']),
    n_epoch=st.integers(1, 3),
    log=st.booleans(),
    event=st.sampled_from(BEFORE_THE_PASS),
    order=st.sampled_from([-20, 5, 45]))
def test_any_batches_that_are_cancelled(n, k, cancelled, remainder, n_epoch, log, event, order):
    "The others fill the windows, and no batch runs twice, or after it was cancelled"
    if remainder == 'drop' and n < k*BS: return  # an error: no window is filled
    windows = kept_windows(n, k, cancelled, remainder, n_epoch)
    cancels = CancelsBatches(cancelled, event, order)
    learn = accumulated_learner(n, [cancels], k, remainder=remainder, log_accum_batch=log)
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'no optimizer step was taken')
        fit(learn, n_epoch)
    assert_trained_on(learn, n, windows)
    sizes = [len(samples_of(window, n)) for window in windows.split()]
    assert learn.gradient_accumulation.opt_steps == len(sizes)
    if not log: return
    logged = [size for size in learn.recorder.accum_bs if size]  # 0 for a window that is cancelled as a whole
    assert logged == sizes


@pytest.mark.parametrize('cancelled, event, log, windows', [
    ('5', 'before_batch', True, '0123 4678 9012 3456 789'),
    ('5678', 'after_pred', False, '0123 4901 2345 6789'),
    ('289', 'before_backward', True, '0134 5670 1234 5678 9')])
def test_a_batch_that_is_cancelled_is_not_carried_into_the_next_epoch(cancelled, event, log, windows):
    "In which nobody cancels it"
    cancels = CancelsBatches(cancelled, event, epoch=0)
    learn = accumulated_learner(80, [cancels], remainder='carry', log_accum_batch=log)
    fit(learn, 2)
    assert_trained_on(learn, 80, windows)


def test_a_batch_of_which_a_part_has_run_leaves_out_its_window():
    "The sum cannot be undone. The window starts over with the next batch, and a warning says so"
    n = 64
    fault = Fault(CancelBatchException, 'after_pred', 6, 5)  # the second of two micro-batches of batch 2
    learn = accumulated_learner(n, [fault], micro_batch_size=4)
    with pytest.warns(UserWarning, match='cancelled a part of a batch: its whole window is left out'): fit(learn, 1)
    assert_trained_on(learn, n, '3456 7')


@BOTH_LOGS
@pytest.mark.parametrize('event, windows', [('before_step', '0123'), ('after_step', '0123 4567')])
def test_a_window_that_is_cancelled_at_its_step_leaves_nothing(event, windows, log):
    "A warning names who cancels it, unless the step was taken"
    learn = accumulated_learner(64, [Fault(CancelBatchException, event, 2, 20)], log_accum_batch=log)
    expected = pytest.warns(UserWarning, match='Fault cancels a window at its step .* is dropped')
    if event == 'after_step': expected = suppress()
    with expected: fit(learn, 1)
    assert_trained_on(learn, 64, windows)
    assert_no_gradients(learn)


@pytest.mark.parametrize('exc', [CancelTrainException, CancelEpochException])
def test_an_epoch_that_ends_at_a_step_leaves_nothing_to_the_next_one(exc):
    "The first epoch ends before its first step"
    learn = make_learner(8, n=96, cbs=[GradientAccumulation(24), Fault(exc, 'before_step', 1, 20)])
    fit(learn, 2)
    large = fit(make_learner(24, n=96), 1)
    assert_trained_as(learn, large)


@pytest.mark.filterwarnings('ignore:Fault cancels a window at its step')
def test_a_window_that_the_last_round_has_left_open_may_be_cancelled_at_its_step():
    "No batch is left that could be cancelled"
    cancels = [CancelsBatches('9'), Fault(CancelBatchException, 'before_step', 3, 20)]
    learn = fit(accumulated_learner(80, cancels, remainder='step', log_accum_batch=False), 1)
    assert_trained_on(learn, 80, '0123 4567')


# What loggers and schedulers see of cancelled batches

class SeesRounds(Callback):
    "Notes the loss and the position at the end of each round"
    run_valid = False
    order = 60

    def before_fit(self): self.rows = []

    def after_batch(self):
        counters = self.iter, self.n_iter, self.train_iter
        self.rows.append([self.loss.item(), *counters, self.learn.pct_train])


def test_n_iter_leaves_out_batches_that_do_not_run_in_the_epoch():
    "Two of ten run in the next epoch"
    learn = fit(accumulated_learner(80, [SeesRounds()], remainder='carry', log_accum_batch=False), 2)
    assert {row[2] for row in learn.sees_rounds.rows} == {8, 12}


def assert_same_fit(small, large, n_columns):
    "Asserts equal weights, logs, and first columns of what SeesRounds notes"
    assert_trained_as(small, large)
    assert_same(small.recorder.lrs, large.recorder.lrs)
    assert_same(losses(small), losses(large), FLOAT32)
    assert small.recorder.iters == large.recorder.iters
    assert small.train_iter == large.train_iter
    rows, expected = [[row[:n_columns] for row in learn.sees_rounds.rows] for learn in (small, large)]
    assert_same(rows, expected, FLOAT32)


@pytest.mark.parametrize('event, cancelled', paired(BEFORE_THE_PASS, ['0', '3', '7', '01', '25', '047']))
def test_a_window_without_its_cancelled_batches_is_one_batch_to_loggers(event, cancelled):
    "Wherever the cancelled ones stand: they have no entry, and do not count"
    n = 64
    windows = kept_windows(n, 4, cancelled, 'step', 1)
    large = make_learner(BS, n=n, cbs=SeesRounds())
    batches = [samples_of(window, n) for window in windows.split()]
    use_batches(large, [batches, batches])
    small = accumulated_learner(n, [CancelsBatches(cancelled, event), SeesRounds()])
    for learn in (small, large): fit(learn, 2)
    # All columns but the position, in which the cancelled samples were read
    assert_same_fit(small, large, n_columns=4)


@pytest.mark.parametrize('event', ['before_batch', 'after_pred'])
def test_a_window_of_cancelled_batches_is_one_cancelled_batch(event):
    "It counts, and is logged, as fastai logs a batch that is cancelled"
    n = 80
    large = make_learner(4*BS, n=n, cbs=[Fault(CancelBatchException, event, 2, 5), SeesRounds()])
    small = accumulated_learner(n, [CancelsBatches('4567', event, epoch=0), SeesRounds()])
    for learn in (small, large): fit(learn, 2, method='fit_one_cycle')
    assert_same_fit(small, large, n_columns=5)


class CountsCancelled(Callback):
    "Counts the cancelled batches of which a logger hears"
    run_valid = False
    order = 60
    n = 0
    def after_cancel_batch(self): self.n += 1


@pytest.mark.filterwarnings('ignore:skipped a step')
@pytest.mark.parametrize('make_cb', [
    partial(CancelsBatches, '4567', 'before_batch'),
    partial(CancelsBatches, '4567', 'after_pred'),
    partial(MultiplyLoss, math.nan, [5])])
def test_a_window_that_is_cancelled_or_skipped_is_one_cancelled_batch_to_loggers(make_cb):
    counts = CountsCancelled()
    fit(accumulated_learner(80, [counts, make_cb()], skip_nonfinite=True), 1)
    assert counts.n == 1


class SkipsBackward(CancelsBatches): exc = CancelBackwardException


@pytest.mark.filterwarnings('ignore:a callback cancels backward passes')
def test_a_window_whose_backward_passes_are_all_cancelled_is_one_round():
    learn = fit(accumulated_learner(80, [SkipsBackward('4567', 'before_backward')]), 1)
    assert learn.train_iter == 3
    assert_trained_on(learn, 80, '0123 89')


# Windows without a step

class SpoilsCenter(Callback):
    "Makes the gradient of the loss's own parameter NaN, once"
    def after_backward(self):
        if number_of(self.learn) == '7': self.loss_func.center.grad *= math.nan


@pytest.mark.filterwarnings('ignore:skipped a step')
def test_a_window_is_skipped_if_the_gradient_of_the_loss_is_nan():
    "Else the parameter of the loss is NaN from then on, and so is the loss"
    learn = accumulated_learner(80, [TrainsLoss(), SpoilsCenter()], skip_nonfinite=True)
    learn.loss_func = CenterLoss()
    fit(learn, 1)
    assert learn.gradient_accumulation.n_skipped == 1
    assert learn.loss_func.center.isfinite().all()


class NoTargets(Callback):
    "Takes the targets out of some loader batches, as where a callback has the loss"
    def before_batch(self):
        if number_of(self.learn) in '4567': self.learn.yb = ()


@pytest.mark.parametrize('log, n_logged', [(True, 2), (False, 6)])
def test_a_window_without_targets_has_no_step(log, n_logged):
    "As in fastai, a batch without a loss has none; and it is not logged, but its round counts"
    n = 80
    learn = fit(accumulated_learner(n, [NoTargets()], log_accum_batch=log), 1)
    assert_trained_on(learn, n, '0123 89')
    assert len(losses(learn)) == n_logged
    assert learn.train_iter == (3 if log else 10)


# The end of a round

class NotesRates(Callback):
    "Notes the learning rates that the optimizer has in its steps"
    order = 1000

    def before_fit(self): self.lrs = []
    def before_step(self): self.lrs.append(self.opt.hypers[-1]['lr'])


def scaled_learner(cbs, **kwargs):
    "Returns a Learner whose windows of 32 have twice the rate of the one of 16, with which it begins"
    scale = dict(lr=linear_scale)
    accum = GradientAccumulationSchedule(16, 32, start=0., finish=.01, scale=scale, verbose=False, **kwargs)
    return make_learner(BS, n=80, cbs=[accum, NotesRates(), *cbs])


def assert_logs_its_own_rates(learn):
    "Asserts that a fit without this package logs the rates that it has"
    learn.remove_cb(learn.gradient_accumulation_schedule)
    fit(learn, 1, .03)
    assert len(learn.recorder.lrs) == 10
    assert set(learn.recorder.lrs) == {.03}


ENDS_TRAINING = [CancelTrainException, CancelEpochException, CancelFitException, KeyboardInterrupt, ValueError]


@pytest.mark.parametrize('order, sizes, rates', [(20, [16], [.01]), (60, [16, 32], [.01, .02])])
@pytest.mark.parametrize('exc', ENDS_TRAINING)
def test_a_round_ends_also_if_after_batch_raises(exc, order, sizes, rates):
    "The size of its window stands beside its loss, if the Recorder has logged that, and loggers read the optimizer"
    learn = scaled_learner([])
    try: fit(learn, 1, .01, cbs=Fault(exc, 'after_batch', 2, order))
    except (KeyboardInterrupt, ValueError): pass
    assert learn.notes_rates.lrs == [.01, .02]
    assert learn.recorder.accum_bs == sizes
    assert learn.recorder.lrs == rates
    assert_logs_its_own_rates(learn)


@pytest.mark.parametrize('cancelled, last_rate', [('', .02), ('9', .015)])
def test_loggers_read_the_optimizer_again_after_a_window_that_the_last_round_left_open(cancelled, last_rate):
    learn = scaled_learner([CancelsBatches(cancelled)], log_accum_batch=False, remainder='step')
    fit(learn, 1, .01)
    assert_same(learn.notes_rates.lrs, [.01, .02, last_rate], ROUNDING)
    assert_logs_its_own_rates(learn)


# Who has a loop of their own

def own_method(name):
    "Returns a method for the place of fastai's `name`, which calls that one"
    fastais = getattr(Learner, name)
    def method(self, *args): return fastais(self, *args)
    return method


NAMES = ['_do_epoch_train', 'one_batch', 'all_batches', '_do_one_batch', '_do_grad_opt', '_backward', '_call_one']


def assert_error_before_training(learn, name, cb='GradientAccumulation'):
    assert_refused(learn, ValueError, f'has its own {name}, which {cb} would overrule')


@pytest.mark.parametrize('name, place', paired(NAMES, PLACES))
def test_a_loop_of_ones_own_is_an_error_before_training(name, place, monkeypatch):
    "Windows of several batches would pass over it"
    learn = accumulated_learner(64)
    place(learn, name, own_method(name), monkeypatch)
    assert replaced_method(learn) == name
    assert_error_before_training(learn, name)


@pytest.mark.parametrize('name', ['all_batches', 'one_batch'])
def test_a_patch_that_looks_like_the_method_before_it_is_an_error_too(name, monkeypatch):
    "`wraps` copies the module, the name and the attributes of that method"
    wrapper = functools.wraps(getattr(Learner, name))(own_method(name))
    monkeypatch.setattr(Learner, name, wrapper)
    assert_error_before_training(accumulated_learner(64), name)


@pytest.mark.parametrize('make', [partial(GradientAccumulation, BS), all_blocks, partial(GradientCache, 4)])
def test_a_loop_of_ones_own_is_an_error_where_each_batch_is_a_window_too(make):
    cb = make()
    learn = make_learner(BS, cbs=cb)
    in_object(learn, '_backward', own_method('_backward'), None)
    assert_error_before_training(learn, '_backward', type(cb).__name__)


def patch_loop_before_import(name):
    package = import_after_patch(name, own_method(name))
    assert_error_before_training(make_learner(BS, cbs=package.GradientAccumulation(4*BS)), name)


@pytest.mark.parametrize('name', ['all_batches', '_do_one_batch'])
def test_a_loop_that_was_patched_before_the_import_is_an_error_too(name):
    assert forked(patch_loop_before_import, name) == 0
