"Batches, steps and fits that callbacks cancel are left out, logged and counted as with the large batch"
import itertools

import pytest

from callback_fits import *

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
    if event.endswith('_step'):
        return exc not in (CancelBatchException, CancelTrainException, CancelEpochException)  # they leave no gradient
    takes_next = event == 'before_batch' and training  # its window takes the next batch in its place
    return exc is not CancelBatchException or not takes_next


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
@pytest.mark.parametrize('exc,event,training,order,layout', CASES[::17])
def test_what_a_callback_cancels_ends_as_with_the_large_batch(exc, event, training, order, layout):
    "What fastai does not catch comes out of the fit"
    small, _ = fit_both(layout, partial(Cancels, exc, event, training, order), moves=None)
    assert small.others[0].n >= 2


# Loader batches

@pytest.mark.parametrize('event', BEFORE_PASS)
def test_where_loader_batches_are_logged_a_cancelled_one_is_logged_as_in_fastai(event):
    "With the loss that `learn` has at this moment"
    accum = GradientAccumulation(32, log_accum_batch=False)
    learn = fit(make_learner(8, cbs=[accum, Fault(CancelBatchException, event, 6, 0)]), 1)
    plain = fit(make_learner(8, cbs=Fault(CancelBatchException, event, 6, 0)), 1)
    assert len(losses(learn)) == len(losses(plain)) == learn.train_iter == 12


# After the backward pass, in a window of one batch: the gradient stays, as in fastai


class DividesLoss(Callback):
    "Accumulates over four batches: divides the loss, and cancels what follows the backward pass of three of them"
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
    assert_trained_as(learn, big)


# After the backward pass, in a window of several

@pytest.mark.parametrize('args,bs', [(dict(accum_bs=8), 4), (dict(micro_batch_size=4), 8)])
def test_somebodys_own_accumulator_is_an_error_in_a_window_of_several(args, bs):
    learn = make_learner(bs, cbs=[DividesLoss(), GradientAccumulation(**args)])
    with pytest.raises(RuntimeError, match='DividesLoss cancels a batch after its backward pass'):
        fit(learn, 1)
