"The sums of a window: how much each micro-batch weighs, the mean of all, and what becomes of a window"
import pytest
from hypothesis import given, strategies as st

from common import *
from numbered_batches import number_of
from fastxtend_accum.windows.gradients import WindowParams
from fastxtend_accum.windows.window import LossSums, Outcome, Window, power_of_two, zero_grads_if_empty


# Weights

@pytest.mark.parametrize('weight', [0, tensor(0.)])
def test_the_gradient_of_the_mean_of_nothing_is_0(weight):
    pred = torch.ones(3, requires_grad=True)
    output = pred*2
    mean_of_none = (output*0).sum()/0
    with zero_grads_if_empty([output], weight):
        loss = mean_of_none*weight
        loss.backward(retain_graph=True)
    assert_same(pred.grad, torch.zeros(3))
    loss.backward()
    assert pred.grad.isnan().all(), 'it is NaN without the context'


# Sums over micro-batches

def window_params():
    learn = make_learner(8)
    learn.create_opt()
    return WindowParams(learn)


def window_with(parts, size=16, device=None):
    "Returns a window with micro-batches of 8 samples, which have these losses and items"
    window = Window(size)
    for loss, items in parts:
        loss = torch.tensor(loss, dtype=torch.float64, device=device)
        window.add(LossSums(1, 8, loss*window.weight_of(items), items))
    return window


LOSS = st.floats(-1e3, 1e3)
ITEMS = st.integers(0, 10**6)


@draws
@given(
    parts=st.lists(st.tuples(LOSS, ITEMS), min_size=2, max_size=8),
    as_tensor=st.booleans(),
    size=st.integers(1, 10**6))
def test_any_weighted_mean(parts, as_tensor, size):
    "Is that of all items, whatever the unit"
    total = sum(n for _, n in parts)
    expected = sum(loss*n for loss, n in parts)/total if total else 0.
    if as_tensor: parts = [(loss, torch.tensor(n)) for loss, n in parts]
    window = window_with(parts, size)
    sums = window.losses
    assert_same(window.mean_of(sums), expected, 1e-9)
    assert_same(window.mean_of(sums.on_host()), expected, 1e-9)
    assert sums.samples == 8*len(parts)
    assert sums.items == total


def test_losses_that_are_sums_are_added_up():
    window = window_with([(2., None), (3., None)])
    assert window.weight_of(window.losses.items) == 1
    assert window.mean_of(window.losses) == 5


def test_sums_and_means_in_one_window_are_an_error():
    with pytest.raises(RuntimeError, match='some losses in a window are sums, and others are means'):
        window_with([(2., None), (3., 8)])


def test_the_unit_is_a_power_of_two_by_which_nothing_is_rounded():
    assert [power_of_two(size) for size in (1, 64, 96)] == [1, 64, 64]


@pytest.mark.parametrize('is_single, n_processes, weight', [(True, 1, 1), (True, 2, 7/8), (False, 1, 7/8)])
def test_a_micro_batch_that_is_the_whole_window_has_weight_1(is_single, n_processes, weight):
    "It is computed as in fastai"
    window = Window(8)
    window.begin(window_params(), is_single, n_processes)
    assert window.weight_of(7) == weight


def test_sums_since_an_earlier_state_are_those_of_the_micro_batches_in_between():
    parts = [(5., 6), (2., 4), (7., 12)]
    window = window_with(parts)
    first = window_with(parts[:1]).losses
    third = window.losses
    between = third.since(first)
    assert (between.n_micro, between.samples, between.items) == (2, 16, 16)
    assert window.mean_of(between) == (2*4 + 7*12)/16
    assert third.since(LossSums()) == third
    without_targets = LossSums(samples=5)
    assert third.since(without_targets).samples == third.samples-5


def test_a_batch_that_starts_again_takes_its_micro_batches_out_of_the_window():
    window = window_with([(5., 6), (2., 4), (7., 12)])
    first = window_with([(5., 6)]).losses
    window.kept = [1, 2, 3]
    window.restart_batch(first, n_kept=1)
    assert window.losses == first
    assert window.kept == [1]


def test_a_window_whose_first_batch_starts_again_begins_again():
    window = Window(16)
    window.begin(window_params(), is_single=False)
    assert window.grads is not None
    window.restart_batch(LossSums(), n_kept=0)
    assert window.grads is None


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


def train_96(*cbs, accum=None, n_epoch=1):
    "Trains on 96 samples in batches of 8 and windows of 32"
    accum = accum or GradientAccumulation(32)
    learn = make_learner(8, cbs=[accum, NoteOutcomes(accum), *cbs])
    return fit(learn, n_epoch)


HAS_MEAN = Outcome.HAS_MEAN


# Gradients that are no numbers

@pytest.mark.parametrize('value, make', paired(
    [math.nan, math.inf, -math.inf], [GradientAccumulation, partial(GradientAccumulationSchedule, 32)]))
def test_windows_with_nan_or_infinity_are_skipped_on_demand(make, value):
    "Two of six are struck, one of them twice; the others are as ever, and it is said once"
    cb = make(32, skip_nonfinite=True, remainder='step')
    with pytest.warns(UserWarning, match='NaN or infinity') as caught:
        learn = train_96(MultiplyLoss(value, [4, 6, 19]), accum=cb, n_epoch=2)
    said = [o for o in caught if 'NaN or infinity' in str(o.message)]
    assert len(said) == 1
    skipped = Outcome.NONFINITE
    assert learn.note_outcomes.outcomes == [HAS_MEAN, skipped, HAS_MEAN, HAS_MEAN, skipped, HAS_MEAN]
    assert cb.n_skipped == 2
    assert cb.opt_steps == len(losses(learn)) == 4
    steps = windows(96, 8, 32, 'step', 2)
    kept = [steps[i] for i in (0, 2, 3, 5)]
    assert_steps(learn, kept)
    fit(learn, 1)
    assert cb.n_skipped == 0, 'the next fit counts anew'


class SpoilLoss(Callback):
    "Makes the loss of batch 7 NaN"
    run_valid = False

    def after_loss(self):
        if number_of(self.learn) != '7': return
        self.learn.loss_grad = self.loss_grad*math.nan
        self.learn.loss = self.loss_grad.clone()


def test_a_loss_that_is_nan_in_a_skipped_window_does_not_end_the_fit():
    "After the window, `learn.loss` is the loss from before it, which TerminateOnNaNCallback reads"
    cb = GradientAccumulation(32, skip_nonfinite=True)
    with pytest.warns(UserWarning, match='NaN or infinity'):
        train_96(SpoilLoss(), TerminateOnNaNCallback(), accum=cb)
    assert cb.n_skipped == 1
    assert cb.opt_steps == 2


def last_layer(m): return [list(m[-1].parameters())]


def test_a_nan_in_a_parameter_outside_the_optimizer_does_not_stay():
    "Nothing zeroes its gradient, in which all later windows would find it"
    cb = GradientAccumulation(32, skip_nonfinite=True)
    learn = make_learner(8, cbs=[cb, MultiplyLoss(math.nan, [4])], splitter=last_layer, train_bn=False)
    with pytest.warns(UserWarning, match='NaN or infinity'): fit(learn, 2)
    assert cb.n_skipped == 1
    assert cb.opt_steps == 5


def test_without_skip_nonfinite_a_step_with_nan_is_taken_as_in_fastai():
    assert weights(train_96(MultiplyLoss(math.nan, [4]))).isnan().any()


def test_skip_nonfinite_changes_nothing_else():
    plain = train_96()
    looking = train_96(accum=GradientAccumulation(32, skip_nonfinite=True))
    assert_moved(plain)
    assert_same_weights(looking, plain)
