"Half precision: the GradScaler acts once a window, and gradients of half-precision weights are summed in float32"
from contextlib import suppress
from unittest.mock import Mock

import pytest
from hypothesis import given, strategies as st

from common import *
from numbered_batches import CancelsBatches
from fastxtend_accum.windows.gradients import half
from fastxtend_accum.windows.window import power_of_two


# Mixed precision, on the CPU

def mixed_precision(mode='fp16'):
    return CpuMixedPrecision(mode, init_scale=2.**10)


def train_in_float32(bs, *cbs, n_epoch=2, lr=0.1, **kwargs):
    learn = make_learner(bs, m=model().float(), loss_func=MSELossFlat(), cbs=cbs, **kwargs)
    return fit(learn, n_epoch, lr)


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_mixed_precision_is_as_close_to_the_large_batch_as_that_is_to_float32(mode):
    "Both round their products to half precision"
    exact = weights(train_in_float32(32))
    big = weights(train_in_float32(32, mixed_precision(mode)))
    accum = GradientAccumulation(32)
    small = weights(train_in_float32(8, mixed_precision(mode), accum))
    rounding = (big-exact).abs().max()
    assert rounding < 0.01
    assert 0 < (small-big).abs().max() < 2*rounding


class CountsCalls(Callback):
    "Counts what the GradScaler does"
    order = MixedPrecision.order+1

    def before_fit(self):
        self.calls = {}
        for name in ('unscale_', '_maybe_opt_step', 'update'):
            self.calls[name] = Mock(wraps=getattr(self.learn.scaler, name))
        vars(self.learn.scaler).update(self.calls)


def test_the_scaler_acts_once_a_window():
    "88 samples are three windows of an epoch, of which the last is short"
    counts = CountsCalls()
    train_in_float32(8, mixed_precision(), GradientAccumulation(32), counts, n=88)
    assert [o.call_count for o in counts.calls.values()] == [6, 6, 6]


@pytest.mark.parametrize('struck', [[1, 2], [0, 1, 2], range(6)])
def test_overflows_are_logged_as_in_the_large_batch(struck):
    "A whole epoch of them, too, which `SaveModelCallback` monitors"
    def train(bs, struck, *cbs):
        save = SaveModelCallback(monitor='train_loss')
        return train_in_float32(bs, mixed_precision(), save, MultiplyLoss(math.inf, struck), *cbs, lr=0.01)

    accum = GradientAccumulation(32)
    big = train(32, struck)
    small = train(8, [4*i+1 for i in struck], accum)
    assert accum.opt_steps == 6-len(struck)
    assert accum.n_skipped == 0
    assert small.recorder.accum_bs == [32, 32, 32, 32, 32, 32]
    assert_same_logs(small, big, 1e-3)  # float16
    assert_same_weights(small, big, 1e-4)
    change = weights(big)-weights(model().float())
    has_moved = change.abs().max() > 1e-3
    assert has_moved == (len(struck) < 6)


def test_skip_nonfinite_leaves_an_overflow_to_the_scaler():
    "It skips the step without a word, as in fastai"
    accum = GradientAccumulation(32, skip_nonfinite=True)
    train_in_float32(8, MultiplyLoss(math.inf, [5]), accum, mixed_precision(), n_epoch=1)
    assert accum.n_skipped == 0
    assert accum.opt_steps == 2


# Weights in half precision: a plain loop adds up in float32

class KeepsGradients(Callback):
    "Keeps the gradients that the optimizer gets"
    order = GradientClip.order+1

    def before_fit(self):
        self.grads = []

    def before_step(self):
        self.grads.append(flat_gradients(self.learn.model))


def flat_gradients(m):
    return torch.cat([p.grad.flatten().double() for p in m.parameters()])


def float32_loss(pred, targ):
    return F.mse_loss(pred.float(), targ.float())


def half_learner(bs, *cbs, dtype=torch.bfloat16, n=96):
    return make_learner(bs, n=n, m=model().to(dtype), loss_func=float32_loss, cbs=cbs)


def micro_batches_of(samples, micro):
    "Returns the samples of each micro-batch. They begin at multiples of `micro`, and where an epoch does"
    res = []
    for i in samples:
        if not res or i%micro == 0:
            res.append([])
        res[-1].append(i)
    return res


def add_up_in_float32(m, inputs, targets, parts, size):
    """Returns the sum of gradients of each parameter over the micro-batches of a window of `size` samples, and the
    weight of all together"""
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in m.parameters()]
    unit = power_of_two(size)
    if len(parts) == 1:
        unit = len(parts[0])
    for part in parts:
        m.zero_grad()
        loss = float32_loss(m(inputs[part]), targets[part])
        weight = len(part)/unit
        (loss*weight).backward()
        for total, p in zip(sums, m.parameters()):
            total += p.grad
    return sums, sum(map(len, parts))/unit


def train_by_hand(steps, micro, size=32, dtype=torch.bfloat16, n=96):
    "Returns the gradients of each step, and the weights after the last"
    m = model().to(dtype)
    inputs, targets = [o.to(dtype) for o in data(n)]
    opt = sgd(m.parameters())
    grads = []
    for samples, _ in steps:
        parts = micro_batches_of(samples, micro)
        sums, weight = add_up_in_float32(m, inputs, targets, parts, size)
        for total, p in zip(sums, m.parameters()):
            p.grad = (total/weight).to(p.dtype)
        grads.append(flat_gradients(m))
        opt.step()
    return grads, weights(m)


@draws
@given(
    micro=st.integers(1, 9),
    k=st.integers(1, 6),
    extra=st.integers(0, 30),
    dtype=st.sampled_from(half),
    remainder=st.sampled_from(['step', 'carry']))
def test_any_window_is_bit_for_bit_a_loop_that_adds_up_in_float32(micro, k, extra, dtype, remainder):
    "Short loader batches, incomplete windows, windows that go on in the next epoch"
    n = k*micro+extra
    accum = GradientAccumulation(k*micro, remainder=remainder)
    keeps = KeepsGradients()
    learn = fit(half_learner(micro, accum, keeps, dtype=dtype, n=n), 2)
    steps = windows(n, micro, k*micro, remainder, 2)
    expected, expected_weights = train_by_hand(steps, micro, k*micro, dtype, n)
    assert not torch.equal(expected_weights, weights(model().to(dtype)))
    for found, grad in zip(keeps.grads, expected, strict=True):
        assert_same(found, grad)
    assert_same(weights(learn), expected_weights)


# Windows that are lost, or miss a batch

class TrainingFault(Fault): run_valid = False


@pytest.mark.parametrize('event, exc', [
    ('before_batch', KeyboardInterrupt),
    ('before_batch', CancelBatchException),
    ('after_pred', CancelEpochException),
    ('after_loss', CancelTrainException),
    ('before_backward', CancelBatchException),
    ('after_backward', CancelEpochException),
    ('after_backward', KeyboardInterrupt)])
def test_nothing_of_a_lost_window_stays(event, exc):
    "Not even its sums; the fit after a fault in the third batch is that of a new Learner"
    accum = GradientAccumulation(32)
    learn = half_learner(8, accum)
    with suppress(KeyboardInterrupt):
        fit(learn, 1, cbs=TrainingFault(exc, event, 3, -5))
    assert accum.window.grads is None
    assert all(p.grad_dtype is torch.bfloat16 for p in learn.model.parameters())
    learn.model.load_state_dict(model().bfloat16().state_dict())
    fit(learn, 1, reset_opt=True)
    _, expected = train_by_hand(windows(96, 8, 32, 'step', 1), 8)
    assert_same(weights(learn), expected)


def test_a_window_of_which_all_batches_are_cancelled_gives_gradients_their_type_back():
    "The last window is one batch, and makes no sums"
    learn = half_learner(8, GradientAccumulation(16), CancelsBatches('23', 'after_pred'), n=40)
    fit(learn, 1)
    assert all(p.grad_dtype is torch.bfloat16 for p in learn.model.parameters())


class Large(nn.Module):
    "The gradients of two micro-batches are finite in float16, and so is their sum in float32, but not in float16"
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float16))

    def forward(self, x): return x.half()*self.weight


@pytest.mark.filterwarnings('ignore:skipped a step')
def test_a_sum_that_overflows_when_it_is_rounded_is_skipped():
    samples = [(torch.ones(1), torch.zeros(1))]*16
    def loss_func(pred, targ): return (pred.float()*1e5).mean()
    accum = GradientAccumulation(16, skip_nonfinite=True)
    dls = DataLoaders(DataLoader(samples, bs=8), DataLoader(samples, bs=8))
    learn = fit(Learner(dls, Large(), loss_func, opt_func=SGD, cbs=accum), 1)
    assert accum.n_skipped == 1
    assert learn.model.weight == 0
