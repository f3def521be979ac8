"Batches, steps and fits that callbacks cancel are left out, logged and counted as with the large batch"
import pytest

from callback_fits import *
from same_fit import TrainingFault

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


class Cancels(Callback):
    "Raises `exc` the second time that `event` comes in training, in validation, or, with None, at all"
    def __init__(self, exc, event, training, order):
        self.exc = exc
        self.is_for_training = training
        self.order = order
        self.n = 0
        setattr(self, event, self.strike)

    def strike(self):
        if self.is_for_training not in (None, self.learn.training): return
        self.n += 1
        if self.n == 2: raise self.exc


@pytest.mark.thin(13)
@pytest.mark.filterwarnings('ignore:before_batch of .* is called once per window')
@pytest.mark.parametrize('layout', CONSTANT)
@pytest.mark.parametrize('event,training,order', PLACES)
@pytest.mark.parametrize('exc', CANCELLED)
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
        if number_of(self.x) in self.numbers: raise CancelBatchException


class CancelsRounds(Callback):
    "Cancels all batches before the `n`th one, by a counter of the Learner: resumes in the middle of an epoch"
    run_valid = False
    def __init__(self, event, counter, n, order=0):
        self.counter = counter
        self.n = n
        self.order = order
        setattr(self, event, self.cancel)

    def cancel(self):
        if self.epoch == 0 and getattr(self.learn, self.counter) < self.n: raise CancelBatchException


def fit_batches(windows, cbs):
    "Trains for an epoch with large batches of these loader batches"
    samples = []
    for numbers in windows: samples.append(samples_of(numbers))
    learn = make_learner(8, n=N, cbs=cbs)
    train = torch.utils.data.DataLoader(learn.dls.train.dataset, batch_sampler=samples)
    learn.dls = DataLoaders(train, learn.dls.valid)
    return fit(learn, 1)


def samples_of(numbers):
    "Returns the samples of these loader batches"
    res = []
    for i in numbers: res += range(8*i, 8*i+8)
    return res


FIRST_IN_WINDOW = [0, 9], [[1, 2, 3, 4], [5, 6, 7, 8], [10, 11, 12, 13], [14, 15, 16, 17], [18, 19]]
IN_THE_MIDDLE = [2, 3, 7], [[0, 1, 4, 5], [6, 8, 9, 10], [11, 12, 13, 14], [15, 16, 17, 18], [19]]
THE_LAST = [3, 18, 19], [[0, 1, 2, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16], [17]]
MORE_THAN_A_WINDOW_BUT_ONE = [1, 2, 3, 4, 5], [[0, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16], [17, 18, 19]]


@pytest.mark.parametrize('order', ORDERS[:3])
@pytest.mark.parametrize('event', BEFORE_PASS)
@pytest.mark.parametrize('cancelled,windows', [
    FIRST_IN_WINDOW, IN_THE_MIDDLE, THE_LAST, MORE_THAN_A_WINDOW_BUT_ONE])
def test_the_batches_that_are_not_cancelled_fill_the_windows(cancelled, windows, event, order):
    "The cancelled ones neither count nor leave an entry in the log"
    learn = make_learner(8, n=N, cbs=[accumulation(), CancelsBatches(event, cancelled, order)])
    fit(learn, 1)
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
    windows = [range(i, i+4) for i in range(0, 20, 4)]
    first_numbers = [4, 12]
    big = fit_batches(windows, CancelsBatches(event, first_numbers))
    assert_moved(big)
    return fit(learn, 1), big


@pytest.mark.filterwarnings('ignore:before_batch of .* is called once per window')
@pytest.mark.parametrize('order', ORDERS)
@pytest.mark.parametrize('event', BEFORE_PASS)
def test_a_window_all_of_whose_batches_are_cancelled_counts_as_one_cancelled_batch(event, order):
    learn, big = fit_without_two_windows(event, order)
    assert_same(weights(learn), weights(big), ROUNDING)
    assert learn.recorder.accum_bs == [32, 0, 32, 0, 32]
    assert learn.train_iter == big.train_iter == 5
    assert len(losses(learn)) == len(losses(big)) == 5


@pytest.mark.parametrize('event', ['before_batch', 'after_pred'])
def test_a_window_all_of_whose_batches_are_cancelled_is_logged_as_one_cancelled_batch(event):
    "Before it has a loss. After that, the loss that is logged is that of the last loader batch, and not the mean"
    learn, big = fit_without_two_windows(event)
    assert_same(losses(learn), losses(big), FLOAT32)


@pytest.mark.parametrize('event', BEFORE_PASS)
def test_where_loader_batches_are_logged_a_cancelled_one_is_logged_as_in_fastai(event):
    "With the loss that `learn` has at this moment"
    cancelled, windows = FIRST_IN_WINDOW
    cb = GradientAccumulation(32, log_accum_batch=False)
    learn = fit(make_learner(8, n=N, cbs=[cb, CancelsBatches(event, cancelled)]), 1)
    assert_same(weights(learn), weights(fit_batches(windows, [])), ROUNDING)
    plain = fit(make_learner(8, n=N, cbs=CancelsBatches(event, cancelled)), 1)
    assert len(losses(learn)) == len(losses(plain)) == learn.train_iter == 20


@pytest.mark.filterwarnings('ignore:before_batch of .* is called once per window')
@pytest.mark.parametrize('order', [0, 55])
@pytest.mark.parametrize('layout', CONSTANT)
@pytest.mark.parametrize('event,counter', [
    ('before_batch', 'iter'), ('before_batch', 'train_iter'), ('after_pred', 'iter')])
def test_whoever_skips_batches_by_a_counter_skips_as_many_windows(event, counter, layout, order):
    small, big = fit_both(layout, partial(CancelsRounds, event, counter, 2, order))
    assert len(losses(small.learn)) == len(losses(big.learn)) > 2


class NotesNumbers(Callback):
    "Notes the numbers of the batches that run in the second epoch"
    run_valid = False
    order = 45
    def __init__(self): self.numbers = []
    def after_pred(self):
        if self.epoch == 1: self.numbers.append(number_of(self.x))


class CancelsInFirstEpoch(CancelsBatches):
    def cancel(self):
        if self.epoch == 0: super().cancel()


@pytest.mark.parametrize('log_accum_batch', [True, False])
@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'before_backward'])
@pytest.mark.parametrize('cancelled,carried', [
    ([16], [19]), ([15, 16, 17], [12, 13, 14, 18, 19]), ([12, 17, 18], [13, 14, 15, 16, 19])])
def test_a_cancelled_batch_is_not_carried_into_the_next_epoch(cancelled, carried, event, log_accum_batch):
    "Of 20 batches, windows of 6 leave two; in place of one that is cancelled, the last window takes one of these"
    cb = GradientAccumulation(48, remainder='carry', log_accum_batch=log_accum_batch)
    notes = NotesNumbers()
    fit(make_learner(8, n=N, cbs=[cb, CancelsInFirstEpoch(event, cancelled), notes]), 2)
    assert notes.numbers == [*carried, *range(20)]


# After the backward pass: no step is taken, and the gradient stays, as in fastai

@pytest.mark.parametrize('nth', [5, 6, 8])
def test_a_window_that_is_cancelled_in_or_after_a_backward_pass_adds_its_gradient_to_the_next(nth):
    "Its other batches run as well, so that it is the gradient of the window"
    learn = make_learner(8, n=N, cbs=[accumulation(), Fault(CancelBatchException, 'after_backward', nth, order=0)])
    fit(learn, 1)
    big = make_learner(32, n=N, cbs=Fault(CancelBatchException, 'after_backward', 2, order=0))
    fit(big, 1)
    assert_moved(big)
    assert_same(weights(learn), weights(big), ROUNDING)
    assert_same(losses(learn), losses(big), FLOAT32)


@pytest.mark.parametrize('event', BEFORE_PASS)
@pytest.mark.parametrize('cancelled', [[8], [8, 9], [8, 11]])
def test_the_gradient_that_stays_is_not_lost_if_the_next_window_begins_with_cancelled_batches(cancelled, event):
    "The batch 7 ends the second window of four"
    cbs = [accumulation(), CancelsBatches('after_backward', [7]), CancelsBatches(event, cancelled)]
    learn = fit(make_learner(8, n=N, cbs=cbs), 1)
    left = [i for i in range(8, 20) if i not in cancelled]
    windows = [[0, 1, 2, 3], [4, 5, 6, 7], left[:4], left[4:8], left[8:]]
    big = fit_batches(windows, CancelsBatches('after_backward', [4]))
    assert_moved(big)
    assert_same(weights(learn), weights(big), ROUNDING)


def fit_that_ends_an_epoch(bs, n_batches, *cbs):
    """Three epochs: a callback cancels the last batch of the first one in `after_backward`, so that its gradient stays,
    and another one ends the second epoch in its first pass"""
    cancels = Fault(CancelBatchException, 'after_backward', n_batches, order=0)
    ends = TrainingFault(CancelEpochException, 'after_pred', n_batches+1, order=0)
    learn = make_learner(bs, n=N, cbs=[cancels, ends, *cbs])
    return fit(learn, 3)


def test_the_gradient_that_stays_is_not_lost_if_the_next_epoch_ends_in_its_first_pass():
    learn = fit_that_ends_an_epoch(8, 20, accumulation())
    big = fit_that_ends_an_epoch(32, 5)
    assert_moved(big)
    assert_same(weights(learn), weights(big), ROUNDING)


class CountsCancelled(Callback):
    "Counts the batches that were cancelled"
    order = 10
    n = 0
    def after_cancel_batch(self): self.n += 1


@pytest.mark.parametrize('event', BEFORE_PASS)
@pytest.mark.parametrize('cancelled', [[3], [19], [18, 19], [3, 19], [16, 17, 18, 19]])
def test_who_prepares_batches_hears_of_each_that_is_cancelled(cancelled, event):
    counts = CountsCancelled()
    fit(make_learner(8, n=N, cbs=[accumulation(), CancelsBatches(event, cancelled), counts]), 1)
    assert counts.n == len(cancelled)


class DividesLoss(Callback):
    "Accumulates over four batches: divides the loss, and cancels what follows the backward pass of three of them"
    run_valid = False
    n = 0
    def before_backward(self): self.learn.loss_grad = self.learn.loss_grad/4
    def after_backward(self):
        self.n += 1
        if self.n%4: raise CancelBatchException


class WeighsLoss(Callback):
    "Accumulates over four batches: weighs the loss where it is computed, and cancels the steps of three of them"
    run_valid = False
    n = 0
    def after_loss(self): self.learn.loss_grad = .25*self.learn.loss_grad
    def before_step(self):
        self.n += 1
        if self.n%4: raise CancelBatchException


class DividesGradients(Callback):
    "Accumulates until there are 32 samples, then divides the gradients by the number of batches"
    run_valid = False
    def before_fit(self):
        self.n = 0
        self.n_samples = 0

    def after_backward(self):
        self.n += 1
        self.n_samples += len(self.x)
        if self.n_samples < 32: raise CancelBatchException

    def before_step(self):
        for p in self.model.parameters(): p.grad /= self.n
        self.before_fit()


class SumsElsewhere(Callback):
    "Keeps the sum of gradients in a place of its own, with a step after every fourth batch"
    run_valid = False
    def before_fit(self): self.sums = []

    def after_backward(self):
        self.sums.append([p.grad.clone() for p in self.model.parameters()])
        self.opt.zero_grad()
        if len(self.sums) < 4: raise CancelBatchException
        for p, *grads in zip(self.model.parameters(), *self.sums): p.grad = sum(grads)/4
        self.sums = []


WHOLE_BATCHES = dict(
    alone=list,
    checkpointing=lambda: [ActivationCheckpointing()],
    all_blocks=lambda: [all_blocks()],
    cache=lambda: [GradientCache(4)],
    auto=lambda: [GradientAccumulation(micro_batch_size='auto')],
    windows_of_one=lambda: [GradientAccumulation(8)])


def assert_accumulates_to_large_batch(accumulator, cbs, bs=8):
    learn = fit(make_learner(bs, cbs=[accumulator(), *cbs]))
    big = fit(make_learner(32))
    assert_moved(big)
    assert_same(weights(learn), weights(big), ROUNDING)


@pytest.mark.parametrize('way', WHOLE_BATCHES)
@pytest.mark.parametrize('accumulator', [DividesLoss, WeighsLoss, DividesGradients, SumsElsewhere])
def test_somebodys_own_accumulator_is_exact_where_batches_run_whole(accumulator, way):
    assert_accumulates_to_large_batch(accumulator, WHOLE_BATCHES[way]())


@pytest.mark.filterwarnings('ignore:a callback replaces the loss in after_loss')
@pytest.mark.parametrize('accumulator', [DividesLoss, WeighsLoss])
def test_somebodys_own_accumulator_is_exact_where_batches_are_split(accumulator):
    "Unless it counts samples in `after_backward`, where it finds those of a micro-batch"
    assert_accumulates_to_large_batch(accumulator, [GradientAccumulation(micro_batch_size=4)])


@pytest.mark.filterwarnings('ignore:a callback replaces the loss in after_loss')
@pytest.mark.parametrize('micro_batch_size', [None, 3])
@pytest.mark.parametrize('accumulator', [DividesLoss, WeighsLoss])
def test_to_somebodys_own_accumulator_a_window_is_one_batch(accumulator, micro_batch_size):
    """It accumulates over four windows of two loader batches; unless it counts samples in `after_backward`, where it
    finds those of a part of the window"""
    cb = GradientAccumulation(8, micro_batch_size=micro_batch_size)
    assert_accumulates_to_large_batch(accumulator, [cb], bs=4)


@pytest.mark.parametrize('args,bs', [(dict(micro_batch_size=4), 8), (dict(accum_bs=8), 4)])
def test_an_accumulator_that_takes_the_gradients_away_is_an_error_in_the_middle_of_a_window(args, bs):
    learn = make_learner(bs, cbs=[SumsElsewhere(), GradientAccumulation(**args)])
    with pytest.raises(RuntimeError, match='a gradient was zeroed, replaced or changed'): fit(learn, 1)


class OwnEvents(Learner):
    "Sends events in a way of its own, as a profiler does"
    def __call__(self, event_name): super().__call__(event_name)


@pytest.mark.parametrize('accumulator', [DividesLoss, SumsElsewhere])
def test_a_learner_with_its_own_events_names_the_accumulator_that_it_cannot_hold_back(accumulator):
    plain = make_learner(8)
    learn = OwnEvents(plain.dls, model(), mse, opt_func=SGD, cbs=[accumulator(), GradientAccumulation(16)])
    with pytest.raises(RuntimeError, match=f'{accumulator.__name__} cancels batches after their backward pass'):
        fit(learn, 1)
