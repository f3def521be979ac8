"The sums of a window: how much each micro-batch weighs, the mean of all, and what becomes of a window"
import pytest
from hypothesis import given, strategies as st

from common import *
from fastxtend_accum.windows.window import (
    Contribution, LossSums, Outcome, Window, power_of_two, scaled, zero_grads_if_empty, zero_if_empty)


# Weights

@pytest.mark.parametrize('items, samples, expected', [
    (1, 8, 1.),
    (7, 8, 4.),
    (8, 4, 8.),
    (0.3, 8, 0.25),
    (0, 12, 8.),
    (0, 0, 1.)])
def test_a_unit_is_the_power_of_two_below_the_items(items, samples, expected):
    "Or below the samples, if there are no items; as a number, and as a tensor, which is not read"
    assert power_of_two(items, samples) == expected
    assert power_of_two(tensor(float(items)), samples).item() == expected


def test_a_weight_of_1_leaves_the_loss_as_it_is():
    loss = tensor(3.)
    assert scaled(loss, 1) is loss
    assert scaled(loss, tensor(1.)) is not loss  # to find out would be to wait for the GPU
    assert scaled(loss, 0.5) == 1.5


@pytest.mark.parametrize('items', [0, tensor(0)], ids=['number', 'tensor'])
def test_the_mean_of_nothing_is_0(items):
    assert zero_if_empty(items, tensor(math.nan)) == 0
    assert zero_if_empty(items+1, tensor(3.)) == 3
    assert zero_if_empty(items+1, tensor(math.nan)).isnan(), 'that of something is NaN nevertheless'


@pytest.mark.parametrize('weight', [0, tensor(0.)], ids=['number', 'tensor'])
def test_the_gradient_of_the_mean_of_nothing_is_0(weight):
    def mean_of_none(output):
        return (output*0).sum()/0

    pred = torch.ones(3, requires_grad=True)
    output = pred*2
    with zero_grads_if_empty([output], weight):
        loss = mean_of_none(output)*weight
        loss.backward(retain_graph=True)
    assert_same(pred.grad, torch.zeros(3))
    loss.backward()
    assert pred.grad.isnan().all(), 'it is NaN without the context'


# Sums over micro-batches

LOSS = st.floats(-1e3, 1e3)
ITEMS = st.integers(0, 10**6)


@draws
@given(
    parts=st.lists(st.tuples(LOSS, ITEMS), min_size=2, max_size=8),
    as_tensor=st.booleans())
def test_any_weighted_mean(parts, as_tensor):
    "Is that of all items, whatever the unit; and the first weight is near 1, so that float16 does not overflow"
    sums = LossSums()
    for loss, n in parts:
        items = torch.tensor(n) if as_tensor else n
        new = sums.weigh(torch.tensor(loss, dtype=torch.float64), items, 8, False)
        if not sums.n_micro:
            assert new.weight < 2
        sums = sums.plus(new)
    total = sum(n for _, n in parts)
    expected = 0.
    if total: expected = sum(loss*n for loss, n in parts)/total
    assert_same(sums.mean, expected, 1e-9)
    assert_same(sums.on_host().mean, expected, 1e-9)
    assert sums.samples == 8*len(parts)
    assert sums.items == total


def test_losses_that_are_sums_are_added_up():
    sums = LossSums()
    for loss in (2., 3.):
        sums = sums.plus(sums.weigh(tensor(loss), None, 8, False))
    assert sums.weight == 1
    assert sums.mean == 5


@pytest.mark.parametrize('items', [0, 7, None])
def test_a_micro_batch_that_is_the_whole_window_has_weight_1(items):
    "It is computed as in fastai"
    contribution = LossSums().weigh(tensor(3.), items, 8, is_alone=True)
    assert contribution.weight == 1


def test_sums_since_an_earlier_state_are_those_of_the_micro_batches_in_between():
    none = LossSums()
    first = none.plus(none.weigh(tensor(5.), 6, 8, False))
    second = first.plus(first.weigh(tensor(2.), 4, 8, False))
    third = second.plus(second.weigh(tensor(7.), 12, 8, False))
    between = third.since(first)
    assert (between.n_micro, between.samples, between.items) == (2, 16, 16)
    assert between.mean == (2*4 + 7*12)/16
    assert third.since(none) == third


@pytest.mark.parametrize('class_weights', [
    None,
    torch.ones(4, device='meta')], ids=['count', 'weights'])
def test_counts_on_another_device_stay_tensors(class_weights):
    "So that nothing waits for a GPU. The meta device has no values at all: whatever read one would raise an error"
    targ = torch.zeros(4, 6, dtype=torch.long, device='meta')
    pred = torch.zeros(4, 4, 6, device='meta')
    items = loss_items(nn.CrossEntropyLoss(weight=class_weights), pred, targ)
    sums = LossSums()
    for _ in range(3):
        loss = torch.zeros([], device='meta')
        sums = sums.plus(sums.weigh(loss, items, 4, False))
    assert sums.n_micro == 3
    for o in (items, sums.items, sums.unit, sums.loss, sums.mean):
        assert o.device.type == 'meta'


# A window

def batch_of(samples):
    return SimpleNamespace(samples=samples, missing=0, copied=lambda: f'a copy of {samples} samples')


def test_a_window_is_open_then_full_then_closed():
    window = Window(16)
    assert not window.is_open
    window.add_without_loss(8)
    assert window.is_open
    assert not window.is_full
    window.add_without_loss(8)
    assert window.is_full
    window.close(Outcome.NO_TARGETS)
    assert not window.is_open


def test_a_window_counts_the_samples_that_were_cancelled():
    "They do not make it open or full"
    window = Window(16)
    window.note_cancelled(batch_of(8))
    window.note_cancelled(batch_of(8))
    assert window.cancelled == 16
    assert not window.is_open
    assert not window.is_full


@pytest.mark.parametrize('keeps_batches, expected', [(True, ['a copy of 8 samples']), (False, [])])
def test_a_window_keeps_copies_of_its_batches_if_they_may_be_carried(keeps_batches, expected):
    "Until it is closed"
    window = Window(16, keeps_batches)
    window.keep(batch_of(8))
    assert window.batches == expected
    window.close(Outcome.STEPPED)
    assert window.batches == []


# What becomes of a window, in a fit

class NoteOutcomes(Callback):
    "Notes the outcome of each window at the end of its round"
    order = 90

    run_valid = False

    def __init__(self, accum):
        self.accum = accum
        self.outcomes = []

    def after_batch(self):
        self.outcomes.append(self.accum.window.outcome)


def train_96(*cbs, accum=None, n_epoch=1, lr=0.1, **kwargs):
    "Trains on 96 samples in batches of 8 and windows of 32"
    if accum is None:
        accum = GradientAccumulation(32)
    learn = make_learner(8, cbs=[accum, NoteOutcomes(accum), *cbs], **kwargs)
    return fit(learn, n_epoch, lr)


class MultiplyLoss(Callback):
    "Multiplies the loss by `value` in the backward pass of these batches"
    run_valid = False

    def __init__(self, value, struck):
        self.value = value
        self.struck = struck
        self.n = -1

    def before_backward(self):
        self.n += 1
        if self.n in self.struck:
            self.learn.loss_grad = self.loss_grad*self.value


class WithoutTargets(Callback):
    "Takes the targets of the first four batches away"
    run_valid = False

    def before_batch(self):
        if self.train_iter == 0:
            self.learn.yb = ()


class MissingTargets(Callback):
    "Makes all targets of the second window NaN, which `mse_of_known` leaves out"
    run_valid = False

    def before_batch(self):
        if self.train_iter == 1:
            self.learn.yb = (torch.full_like(self.y, torch.nan),)


class CancelledStep(Callback):
    "Cancels the last batch of the second window, after its backward pass"
    run_valid = False

    def after_backward(self):
        ends_window = self.learn.gradient_accumulation.window.is_full
        if ends_window and self.train_iter == 1:
            raise CancelBatchException


STEPPED = Outcome.STEPPED


def test_windows_are_stepped():
    learn = train_96()
    assert learn.note_outcomes.outcomes == [STEPPED, STEPPED, STEPPED]


def test_a_window_without_targets_has_neither_loss_nor_step():
    "As in fastai: it is no step, and nothing is logged of it, but the round counts"
    learn = train_96(WithoutTargets())
    assert learn.note_outcomes.outcomes == [Outcome.NO_TARGETS, STEPPED, STEPPED]
    assert learn.gradient_accumulation.opt_steps == len(losses(learn)) == 2
    assert learn.train_iter == 3
    steps = windows(96, 8, 32, 'step', 1)
    assert_same(weights(learn), reference(steps[1:], 96, sgd)[0], ROUNDING)


def mse_of_known(pred, targ):
    is_known = ~targ.isnan()
    return F.mse_loss(pred[is_known], targ[is_known]).float()


def n_known(learn):
    return (~learn.y.isnan()).sum()


def test_a_window_without_items_is_skipped():
    "With a warning. To loggers it is a cancelled batch without a loss; its batches are not joined with the next window"
    with pytest.warns(UserWarning, match='nothing to average over') as caught:
        accum = GradientAccumulation(32, num_items=n_known)
        learn = train_96(MissingTargets(), accum=accum, loss_func=mse_of_known)
    assert len(caught) == 1
    assert learn.note_outcomes.outcomes == [STEPPED, Outcome.NO_ITEMS, STEPPED]
    assert learn.gradient_accumulation.n_skipped == 1
    assert learn.recorder.accum_bs == [32, 32]
    steps = windows(96, 8, 32, 'step', 1)
    expected, step_losses = reference([steps[0], steps[2]], 96, sgd)
    assert_same(weights(learn), expected, ROUNDING)
    assert_same(losses(learn), smoothed(step_losses), 1e-6)  # float32


def test_a_window_of_a_cancelled_batch_has_no_step():
    "If it is cancelled after its backward pass; as in fastai, its gradient stays, and is added to that of the next one"
    learn = train_96(CancelledStep())
    assert learn.note_outcomes.outcomes == [STEPPED, Outcome.CANCELLED, STEPPED]
    assert learn.gradient_accumulation.opt_steps == 2
    big = fit(make_learner(32, cbs=CancelSecond()), 1)
    assert_moved(big)
    assert_same(weights(learn), weights(big), ROUNDING)


class CancelSecond(Callback):
    "As `CancelledStep`, with the large batch"
    run_valid = False

    def after_backward(self):
        if self.train_iter == 1:
            raise CancelBatchException


# Gradients that are no numbers

@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize('make', [GradientAccumulation, partial(GradientAccumulationSchedule, 32)])
def test_windows_with_nan_or_infinity_are_skipped_on_demand(make, value):
    "Two of six are struck, one of them twice; the others are as ever, and it is said once"
    cb = make(32, skip_nonfinite=True, remainder='step')
    with pytest.warns(UserWarning, match='NaN or infinity') as caught:
        learn = train_96(MultiplyLoss(value, [4, 6, 19]), accum=cb, n_epoch=2)
    assert len(caught) == 1
    skipped = Outcome.NONFINITE
    assert learn.note_outcomes.outcomes == [STEPPED, skipped, STEPPED, STEPPED, skipped, STEPPED]
    assert cb.n_skipped == 2
    assert cb.opt_steps == len(losses(learn)) == 4
    steps = windows(96, 8, 32, 'step', 2)
    kept = [steps[i] for i in (0, 2, 3, 5)]
    assert_same(weights(learn), reference(kept, 96, sgd)[0], ROUNDING)
    fit(learn, 1)
    assert cb.n_skipped == 0, 'the next fit counts anew'


def test_without_skip_nonfinite_a_step_with_nan_is_taken_as_in_fastai():
    assert weights(train_96(MultiplyLoss(math.nan, [4]))).isnan().any()


@pytest.fixture
def looks(monkeypatch):
    "The looks at the gradient of a window"
    res = []
    total_norm = torch.nn.utils.get_total_norm

    def noted(*args):
        res.append(1)
        return total_norm(*args)

    monkeypatch.setattr(torch.nn.utils, 'get_total_norm', noted)
    return res


def test_skip_nonfinite_looks_once_a_window(looks):
    "And changes nothing"
    plain = train_96(n_epoch=3)
    assert len(looks) == 0
    looking = train_96(accum=GradientAccumulation(32, skip_nonfinite=True), n_epoch=3)
    assert len(looks) == 9
    assert_moved(plain)
    assert_same(weights(looking), weights(plain))


def test_large_gradients_are_no_infinities():
    "Although their squares are, in float32"
    cb = GradientAccumulation(32, skip_nonfinite=True)
    in_float32 = dict(m=model().float(), loss_func=MSELossFlat())
    large = train_96(MultiplyLoss(1e30, [2]), accum=cb, lr=1e-30, **in_float32)
    assert cb.n_skipped == 0
    assert cb.opt_steps == 3
    assert_moved(large)


def test_the_mean_of_nothing_is_no_nan_in_the_sums():
    "If a callback puts it into `learn.loss`, where the loop had set 0"
    empty = Contribution(loss=tensor(math.nan), weight=0, items=0, samples=8, unit=8)
    full = Contribution(loss=tensor(2.), weight=1., items=8, samples=8, unit=8)
    sums = LossSums().plus(full).plus(empty)
    assert sums.mean == 2
