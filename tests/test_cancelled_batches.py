"Batches, steps and fits that callbacks cancel are left out, logged and counted as with the large batch"
import itertools

import pytest

from callback_fits import *
from our_warnings import warnings_of

N = 160  # samples in 20 loader batches
BEFORE_PASS = ['before_batch', 'after_pred', 'after_loss', 'before_backward']  # events before the backward pass


# Whatever is cancelled, once

PLACES = [  # event, whether in training, and the order of the callback
    ('before_batch', True, 55),  # a late callback, since others see each loader batch: see below
    ('before_step', True, 0),
    ('after_step', True, 8),
    ('after_batch', True, -20),
    ('before_batch', False, 90),
    ('after_pred', False, -20),
    ('after_loss', False, 0),
    ('after_batch', False, 8),
    ('before_epoch', None, 55),
    ('before_train', None, 90),
    ('after_train', None, -20),
    ('before_validate', None, 0),
    ('after_validate', None, 8),
    ('after_epoch', None, 55)]


def is_as_large(exc, event, training, order, layout):
    "Returns whether what is cancelled is the same with the large batch"
    if training is False and layout in ('split', 'both'):
        return False  # there, validation has smaller batches
    if exc is not CancelBatchException:
        return True
    is_step_of_sum = event.endswith('_step')
    takes_next = event == 'before_batch' and training  # its window takes the next batch in its place
    return not is_step_of_sum and not takes_next


CASES = []
for exc, place, layout in itertools.product(CANCELLED, PLACES, CONSTANT):
    if is_as_large(exc, *place, layout):
        CASES.append((exc, *place, layout))


class Cancels(Callback):
    "Raises `exc` the second time that `event` comes in training, in validation, or, with None, at all"
    def __init__(self, exc, event, training, order):
        self.exc = exc
        self.is_for_training = training
        self.order = order
        self.n = 0
        setattr(self, event, self.strike)

    def strike(self):
        if self.is_for_training not in (None, self.learn.training):
            return
        self.n += 1
        if self.n == 2:
            raise self.exc


@pytest.mark.filterwarnings('ignore:before_batch of .* is called once per window')
@pytest.mark.parametrize('exc,event,training,order,layout', CASES[::11])
def test_what_a_callback_cancels_ends_as_with_the_large_batch(exc, event, training, order, layout):
    "What fastai does not catch comes out of the fit"
    small, _ = fit_both(layout, partial(Cancels, exc, event, training, order), moves=None)
    assert small.others[0].n >= 2


# Loader batches

def number_of(inputs):
    "Returns the place of a loader batch of 8 samples in the data"
    first_inputs = data(N)[0][::8, 0]
    return int((first_inputs == inputs[0, 0]).nonzero())


class CancelsBatches(Callback):
    "Cancels the loader batches of these numbers, at `event`"
    run_valid = False
    def __init__(self, event, numbers, order=0):
        self.numbers = numbers
        self.order = order
        setattr(self, event, self.cancel)

    def cancel(self):
        if number_of(self.x) in self.numbers:
            raise CancelBatchException


def fit_batches(windows, cbs):
    "Trains for an epoch with large batches of these loader batches"
    samples = []
    for numbers in windows:
        samples.append(samples_of(numbers))
    learn = make_learner(8, n=N, cbs=cbs)
    train = torch.utils.data.DataLoader(learn.dls.train.dataset, batch_sampler=samples)
    learn.dls = DataLoaders(train, learn.dls.valid)
    return fit(learn, 1)


def samples_of(numbers):
    "Returns the samples of these loader batches"
    res = []
    for i in numbers:
        res += range(8*i, 8*i+8)
    return res


def windows_without(cancelled):
    "Returns the numbers of the loader batches of each window of four, if these are cancelled"
    kept = [i for i in range(20) if i not in cancelled]
    return [kept[i:i+4] for i in range(0, len(kept), 4)]


FIRST_IN_WINDOW = [0, 9]
IN_THE_MIDDLE = [2, 3, 7]
THE_LAST = [3, 18, 19]
MORE_THAN_A_WINDOW_BUT_ONE = [1, 2, 3, 4, 5]


@pytest.mark.parametrize('event', BEFORE_PASS)
@pytest.mark.parametrize('cancelled', [FIRST_IN_WINDOW, IN_THE_MIDDLE, THE_LAST, MORE_THAN_A_WINDOW_BUT_ONE])
def test_the_batches_that_are_not_cancelled_fill_the_windows(cancelled, event):
    "The cancelled ones neither count nor leave an entry in the log"
    learn = make_learner(8, n=N, cbs=[accumulation(), CancelsBatches(event, cancelled)])
    fit(learn, 1)
    windows = windows_without(cancelled)
    big = fit_batches(windows, [])
    assert_moved(big)
    assert_same(weights(learn), weights(big), ROUNDING)
    assert_same(losses(learn), losses(big), FLOAT32)
    assert learn.recorder.accum_bs == [8*len(o) for o in windows]
    assert learn.train_iter == big.train_iter


def fit_without_two_windows(event, order=0):
    "Returns a fit in which all batches of the second and the fourth window are cancelled, and the large batch's"
    numbers = [4, 5, 6, 7, 12, 13, 14, 15]
    learn = make_learner(8, n=N, cbs=[accumulation(), CancelsBatches(event, numbers, order)])
    big = fit_batches(windows_without([]), CancelsBatches(event, [4, 12]))
    assert_moved(big)
    return fit(learn, 1), big


EARLY_OR_LATE = [(event, order) for event in BEFORE_PASS for order in (0, 55)]
EARLY_OR_LATE.remove(('before_batch', 55))  # a late callback cancels a round, in which no other batch takes its place


@pytest.mark.filterwarnings('ignore:before_batch of .* is called once per window')
@pytest.mark.parametrize('event,order', EARLY_OR_LATE)
def test_a_window_all_of_whose_batches_are_cancelled_counts_as_one_cancelled_batch(event, order):
    "Before it has a loss, it is logged as one, too. After that, the loss in the log is that of its last loader batch"
    learn, big = fit_without_two_windows(event, order)
    assert_same(weights(learn), weights(big), ROUNDING)
    assert learn.recorder.accum_bs == [32, 0, 32, 0, 32]
    assert learn.train_iter == big.train_iter == 5
    assert len(losses(learn)) == len(losses(big)) == 5
    if event in ('before_batch', 'after_pred'):
        assert_same(losses(learn), losses(big), FLOAT32)


@pytest.mark.parametrize('event', BEFORE_PASS)
def test_where_loader_batches_are_logged_a_cancelled_one_is_logged_as_in_fastai(event):
    "With the loss that `learn` has at this moment"
    cancelled = FIRST_IN_WINDOW
    cb = GradientAccumulation(32, log_accum_batch=False)
    learn = fit(make_learner(8, n=N, cbs=[cb, CancelsBatches(event, cancelled)]), 1)
    assert_same(weights(learn), weights(fit_batches(windows_without(cancelled), [])), ROUNDING)
    plain = fit(make_learner(8, n=N, cbs=CancelsBatches(event, cancelled)), 1)
    assert len(losses(learn)) == len(losses(plain)) == learn.train_iter == 20


class NotesNumbers(Callback):
    "Notes the numbers of the batches that run in the second epoch"
    run_valid = False
    order = 45
    def __init__(self): self.numbers = []
    def after_pred(self):
        if self.epoch == 1:
            self.numbers.append(number_of(self.x))


class CancelsInFirstEpoch(CancelsBatches):
    def cancel(self):
        if self.epoch == 0:
            super().cancel()


@pytest.mark.parametrize('cancelled,carried,event,log_accum_batch', [
    ([16], [19], 'before_batch', True),
    ([15, 16, 17], [12, 13, 14, 18, 19], 'after_pred', False),
    ([12, 17, 18], [13, 14, 15, 16, 19], 'before_batch', False),
    ([12, 17, 18], [13, 14, 15, 16, 19], 'before_backward', True)])
def test_a_cancelled_batch_is_not_carried_into_the_next_epoch(cancelled, carried, event, log_accum_batch):
    "Of 20 batches, windows of 6 leave two; in place of one that is cancelled, the last window takes one of these"
    cb = GradientAccumulation(48, remainder='carry', log_accum_batch=log_accum_batch)
    notes = NotesNumbers()
    fit(make_learner(8, n=N, cbs=[cb, CancelsInFirstEpoch(event, cancelled), notes]), 2)
    assert notes.numbers == [*carried, *range(20)]


class CountsCancelled(Callback):
    "Counts the batches that were cancelled"
    order = 10
    n = 0
    def after_cancel_batch(self): self.n += 1


@pytest.mark.parametrize('event', BEFORE_PASS)
@pytest.mark.parametrize('cancelled', [[3], [18, 19], [3, 19]])
def test_who_prepares_batches_hears_of_each_that_is_cancelled(cancelled, event):
    counts = CountsCancelled()
    fit(make_learner(8, n=N, cbs=[accumulation(), CancelsBatches(event, cancelled), counts]), 1)
    assert counts.n == len(cancelled)


@pytest.mark.parametrize('remainder,last_position', [('step', 1), ('carry', 1), ('drop', .925)])
@pytest.mark.parametrize('event', BEFORE_PASS)
def test_a_schedule_reaches_its_end_although_batches_are_cancelled(event, remainder, last_position):
    "They advance the position by their samples. Of 'drop', it is the end of the last window that is full"
    cbs = [GradientAccumulation(32, remainder=remainder), CancelsBatches(event, [1, 2, 7, 8, 9, 19])]
    learn = fit(make_learner(8, n=N, cbs=cbs), 2, method='fit_one_cycle')
    assert learn.pct_train == pytest.approx(last_position)
    assert learn.recorder.hps['lr'][-1] < .02


# After the backward pass, in a window of one batch: the gradient stays, as in fastai

@pytest.mark.parametrize('event', ['after_backward', 'before_step', 'after_step'])
def test_a_window_of_one_batch_that_is_cancelled_leaves_its_gradient_to_the_next(event):
    big = fit(make_learner(32, n=N, cbs=Fault(CancelBatchException, event, 2, order=0)), 1)
    for cb in (GradientAccumulation(32), ActivationCheckpointing()):
        one = fit(make_learner(32, n=N, cbs=[cb, Fault(CancelBatchException, event, 2, order=0)]), 1)
        assert_same(weights(one), weights(big))
        assert_same(losses(one), losses(big))
    assert_moved(big)
    assert_apart(big, fit(make_learner(32, n=N), 1))


class DividesLoss(Callback):
    "Accumulates over four batches: divides the loss, and cancels what follows the backward pass of three of them"
    run_valid = False
    n = 0
    def before_backward(self): self.learn.loss_grad = self.learn.loss_grad/4
    def after_backward(self):
        self.n += 1
        if self.n%4:
            raise CancelBatchException


WHOLE_BATCHES = dict(
    alone=list,
    all_blocks=lambda: [all_blocks()],
    cache=lambda: [GradientCache(4)],
    auto=lambda: [GradientAccumulation(micro_batch_size='auto')],
    windows_of_one=lambda: [GradientAccumulation(8)])


@pytest.mark.parametrize('way', WHOLE_BATCHES)
def test_somebodys_own_accumulator_is_exact_where_batches_run_whole(way):
    learn = fit(make_learner(8, cbs=[DividesLoss(), *WHOLE_BATCHES[way]()]))
    big = fit(make_learner(32))
    assert_moved(big)
    assert_same(weights(learn), weights(big), ROUNDING)


# After the backward pass, in a window of several

SEVERAL = pytest.mark.parametrize('args,bs', [(dict(accum_bs=32), 8), (dict(micro_batch_size=8), 32)])


@SEVERAL
@pytest.mark.parametrize('nth', [1, 4])
def test_a_batch_that_is_cancelled_after_its_backward_pass_is_an_error_that_names_the_callback(args, bs, nth):
    learn = make_learner(bs, cbs=[GradientAccumulation(**args), Fault(CancelBatchException, 'after_backward', nth, 0)])
    with pytest.raises(RuntimeError, match='Fault cancels a batch after its backward pass .*use windows of one'):
        fit(learn, 1)
    assert_same(weights(learn), weights(model()))


@pytest.mark.filterwarnings('ignore:.* changes the loss, but micro-batches keep')
@pytest.mark.parametrize('args,bs', [(dict(accum_bs=8), 4), (dict(micro_batch_size=4), 8)])
def test_somebodys_own_accumulator_is_an_error_in_a_window_of_several(args, bs):
    learn = make_learner(bs, cbs=[DividesLoss(), GradientAccumulation(**args)])
    with pytest.raises(RuntimeError, match='DividesLoss cancels a batch after its backward pass'):
        fit(learn, 1)


def test_an_accumulator_with_run_false_accumulates_nothing():
    "As in fastai: others run beside it as if it were not there"
    off = DividesLoss()
    off.run = False
    small = fit(make_learner(8, cbs=[off, GradientAccumulation(32)]))
    big = fit(make_learner(32))
    assert_moved(big)
    assert_same(weights(small), weights(big), ROUNDING)


@SEVERAL
@pytest.mark.parametrize('event', ['before_step', 'after_step'])
def test_a_window_that_is_cancelled_at_its_step_drops_its_gradient_with_one_warning(event, args, bs):
    "The others are as without it; with a step that was taken, all are"
    cb = GradientAccumulation(**args)
    learn = make_learner(bs, n=N, cbs=[cb, Fault(CancelBatchException, event, 2, order=0)])
    said = warnings_of(learn, 1, .1)
    assert len(said) == 1
    assert said[0].startswith('Fault cancels a window at its step (CancelBatchException): its gradient is dropped')
    steps = windows(N, 32, 32, 'step', 1)
    if event == 'before_step':
        del steps[1]
    assert_same(weights(learn), reference(steps, N, sgd)[0], ROUNDING)
    assert cb.opt_steps == len(steps)


class CountsBatches(Callback):
    order, run_valid = 60, False
    n = 0
    def before_batch(self): self.n += 1


class CancelsFirst(Callback):
    order = 70
    def before_batch(self):
        if self.train_iter == 0 and self.counts_batches.n == 1: raise CancelBatchException


def test_a_late_callback_sees_each_round_once_beside_one_that_cancels():
    learn = make_learner(8, n=64, cbs=[GradientAccumulation(16), CountsBatches(), CancelsFirst()])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of an order of 50 or more
        fit(learn, 1)
    n_rounds = learn.gradient_accumulation.loop.progress.n_rounds
    assert learn.counts_batches.n == n_rounds > 1
