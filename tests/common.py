"What the tests share: small data, a Learner for it, and a reference in plain PyTorch that does not use this package"
import itertools
import math
import multiprocessing
import os
from contextlib import contextmanager

import pytest
import torch
from hypothesis import settings
from torch.amp import GradScaler, autocast
from fastai.basics import *
from fastai.callback.all import *
from fastxtend_accum.all import *
from fastxtend_accum.memory.override import override_attr
from fastxtend_accum.windows.loss_check import LossCheck

ROUNDING = 1e-12  # float64: the sums of a window are added up in another order than those of one batch

# `DRAWS=10000 pytest -k any_` draws more cases than the profile has, and new ones each time
draws = settings(deadline=None, derandomize='DRAWS' not in os.environ)


# Cases

def paired(*sides):
    """Returns as few cases of a matrix as have each value of each of its sides: cases that differ on one side only find
    the same faults"""
    n = max(len(side) for side in sides)
    endless = [itertools.cycle(side) for side in sides]
    return list(itertools.islice(zip(*endless), n))


# Data and models

def data(n, seed=1):
    "Returns inputs and targets of a small regression with `n` samples, in float64"
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    targets = torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return inputs, targets


def samples(n): return list(zip(*data(n)))


def tokens():
    "Returns 24 sequences of 5 tokens and their labels. Most are ignored: whole sequences of them, and unevenly"
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randint(11, (24, 5), generator=generator)
    labels = torch.randint(4, (24, 5), generator=generator)
    kept_share = torch.linspace(0, 1, 24)[:, None]
    is_ignored = torch.rand(24, 5, generator=generator) < kept_share
    labels[is_ignored] = -100
    return inputs, labels


class Stream(torch.utils.data.IterableDataset):
    "`n` samples, one after the other, of which another number may be announced"
    def __init__(self, n, announced=None):
        self.samples = samples(n)
        self.announced = n if announced is None else announced

    def __len__(self): return self.announced
    def __iter__(self): return iter(self.samples)


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def mse(pred, targ):
    "fastai's Recorder averages the loss in float32"
    return F.mse_loss(pred, targ).float()


# Learners

def make_learner(bs, n=96, cbs=None, opt_func=SGD, drop_last=False, seed=0, m=None, loss_func=mse, **kwargs):
    "Returns a Learner that sees `n` samples in order, `bs` at a time"
    if m is None: m = model(seed)
    dtype = next(m.parameters()).dtype
    inputs, targets = data(n)
    samples = list(zip(inputs.to(dtype), targets.to(dtype)))
    train = DataLoader(samples, bs=bs, drop_last=drop_last)
    valid = DataLoader(samples[:20], bs=16)
    return Learner(DataLoaders(train, valid), m, loss_func=loss_func, opt_func=opt_func, cbs=cbs, **kwargs)


class PlannedBatches:
    "A batch sampler that yields, in each epoch of `learn`, the batches of that epoch: lists of samples"
    def __init__(self, learn, epochs):
        self.learn = learn
        self.epochs = epochs

    def __len__(self): return len(self.epochs[self.learn.epoch])
    def __iter__(self): return iter(self.epochs[self.learn.epoch])


def use_batches(learn, epochs):
    "Lets `learn` train on these batches of its samples, by epoch"
    train = torch.utils.data.DataLoader(learn.dls.train.dataset, batch_sampler=PlannedBatches(learn, epochs))
    learn.dls = DataLoaders(train, learn.dls.valid)


@contextmanager
def quiet(learn):
    with learn.no_bar(), learn.no_logging(): yield learn


def fit(learn, n_epoch=3, lr=0.1, method='fit', **kwargs):
    "Trains without printing anything, and returns the Learner"
    with quiet(learn): getattr(learn, method)(n_epoch, lr, **kwargs)
    return learn


def fit_aloud(learn, n_epoch=3, lr=0.1, method='fit', **kwargs):
    "Trains, and prints what this package says, but not fastai's table"
    with learn.no_bar(), override_attr(learn, 'logger', [].append): getattr(learn, method)(n_epoch, lr, **kwargs)
    return learn


def find_rate(learn, num_it, **kwargs):
    "Returns what `lr_find` suggests after `num_it` steps"
    with quiet(learn): return learn.lr_find(num_it=num_it, show_plot=False, **kwargs)


def weights(learn):
    "Returns all weights of a Learner or a model in one vector"
    m = getattr(learn, 'model', learn)
    return torch.cat([p.detach().flatten().clone() for p in m.parameters()])


def grads(learn):
    return [p.grad for p in learn.model.parameters() if p.grad is not None]


def losses(learn):
    "Returns the smoothed losses that the Recorder has logged"
    return [float(o) for o in learn.recorder.losses]


def floats(rows):
    "Returns rows of values without the texts in them, such as the time of an epoch"
    res = []
    for row in rows: res.append([float(o) for o in row if not isinstance(o, str)])
    return res


def all_blocks(*args, **kwargs):
    "Returns an ActivationCheckpointing that recomputes all blocks, also where memory suffices"
    return ActivationCheckpointing(*args, adapt=False, **kwargs)


class CpuMixedPrecision(MixedPrecision):
    "fastai's callback has 'cuda' written into it"
    def before_fit(self):
        super().before_fit()
        dtype = torch.float16 if self.amp_mode == AMPMode.FP16 else torch.bfloat16
        self.autocast = autocast('cpu', dtype=dtype)
        self.learn.scaler = GradScaler('cpu', **self.kwargs)


class CenterLoss(nn.Module):
    "Has a parameter of its own, which the optimizer of the Learner does not know"
    def __init__(self):
        super().__init__()
        self.center = nn.Parameter(torch.full((1, 1), .5, dtype=torch.float64))

    def forward(self, pred, targ):
        distance = (pred-self.center).square().mean()
        return (F.mse_loss(pred, targ)+.5*distance).float()


class TrainsLoss(Callback):
    "Trains the parameters of the loss by an optimizer of its own"
    run_valid = False
    def __init__(self, event='after_step'):
        self.rows = []
        setattr(self, event, self.step)

    def before_fit(self):
        self.own = torch.optim.SGD(self.loss_func.parameters(), lr=.3)

    def step(self):
        self.own.step()
        self.own.zero_grad()
        self.rows.append([self.loss_func.center.item()])


# Assertions

def as_tensor(o):
    return o if isinstance(o, torch.Tensor) else torch.tensor(o, dtype=torch.float64)


def assert_same(a, b, tol=0.):
    "Asserts equal lengths, and no difference above `tol`"
    a, b = as_tensor(a), as_tensor(b)
    assert a.shape == b.shape, f'{a.shape} is not {b.shape}'
    diff = (a-b).abs()
    assert not diff.isnan().any(), 'there is a NaN'
    assert (diff <= tol).all(), f'largest difference {diff.max()}, mean {diff.mean()}, allowed {tol}'


def assert_same_weights(a, b, tol=0.):
    "Asserts that two Learners or models have the same weights"
    assert_same(weights(a), weights(b), tol)


def assert_same_logs(a, b, tol=0.):
    "Asserts that two Learners have logged the same losses, and the same values of epochs"
    assert_same(losses(a), losses(b), tol)
    assert_same(floats(a.recorder.values), floats(b.recorder.values), tol)


def assert_apart(a, b, least=1e-3):
    """Asserts that two Learners, models or vectors of weights differ by more than `least`, so that a proof of equal
    ones proves something"""
    a, b = [o if isinstance(o, torch.Tensor) else weights(o) for o in (a, b)]
    assert (a-b).abs().max() > least


def assert_nothing_left(learn):
    "Asserts that neither the Learner nor a module has a method of ours any more"
    for name in ('all_batches', 'one_batch', '_do_one_batch', '_do_grad_opt', '_backward'):
        assert name not in vars(learn)
    for m in learn.model.modules(): assert 'forward' not in vars(m)


def assert_no_gradients(learn):
    "Asserts that each gradient is 0, or none"
    assert not any(g.any() for g in grads(learn))


def assert_moved(learn):
    "Asserts that training has changed the weights of `model()`"
    assert_apart(learn, model())


def assert_steps(learn, steps, n=96):
    "Asserts that a fit on `n` samples has left the weights that plain PyTorch has after these steps"
    expected, _ = reference(steps, n, sgd)
    assert_same(weights(learn), expected, ROUNDING)
    if steps: assert_moved(learn)


def assert_trained_as(learn, expected):
    "Asserts that training has changed the weights of `model()`, to those of `expected` but for rounding"
    assert_moved(learn)
    assert_same_weights(learn, expected, ROUNDING)


def assert_refused(learn, error, says):
    "Asserts that a fit ends in an error with this text, before the weights move"
    before = weights(learn)
    with pytest.raises(error, match=says): fit(learn, 1)
    assert_same(weights(learn), before)


# Helpers

def forked(f, *args):
    """Calls `f` in a copy of this process, and returns its exit code; below 0, the signal that ended it. A new process
    would take seconds to import fastai"""
    process = multiprocessing.get_context('fork').Process(target=f, args=args)
    process.start()
    process.join()
    return process.exitcode


# Faults

EVENTS = ['before_fit', 'before_epoch', 'before_train', 'before_batch', 'after_pred', 'after_loss', 'before_backward',
          'after_backward', 'before_step', 'after_step', 'after_cancel_batch', 'after_batch', 'after_train',
          'before_validate', 'after_validate', 'after_epoch', 'after_fit']
CANCELS = [CancelBatchException, CancelTrainException, CancelEpochException, CancelFitException]


class Fault(Callback):
    "Raises `exc` at the `nth` time that `event` fires"
    def __init__(self, exc, event, nth, order):
        self.exc = exc
        self.event = event
        self.nth = nth
        self.order = order
        self.count = 0
        setattr(self, event, self.strike)

    def strike(self):
        self.count += 1
        if self.count == self.nth: raise self.exc('on purpose')


class MultiplyLoss(Callback):
    "Multiplies the loss by `value` in the backward pass of these training batches"
    order = MixedPrecision.order+1

    def __init__(self, value, struck):
        self.value = value
        self.struck = struck
        self.n = -1

    def before_backward(self):
        self.n += 1
        if self.n in self.struck: self.learn.loss_grad = self.loss_grad*self.value


# The reference

def windows(n, micro, accum, remainder, n_epoch, drop_last=False):
    """Returns the samples of each optimizer step, and its fraction of training. `accum` is a size in samples, or a
    function of the fraction. Where windows change in size or go on in the next epoch, samples count the fraction;
    elsewhere it is that of the large batch"""
    n_batches = n//micro if drop_last else math.ceil(n/micro)
    n_used = min(n, n_batches*micro)
    counts_samples = callable(accum) or remainder == 'carry'
    if not counts_samples: n_large = n_used//accum if remainder == 'drop' else math.ceil(n_used/accum)
    steps = []
    window = []
    for epoch in range(n_epoch):
        if remainder != 'carry': window = []
        for i in range(n_batches):
            if not window:
                position = i*micro/n_used if counts_samples else i*micro//accum/n_large
                pct = (epoch+position)/n_epoch
                size = accum(pct) if callable(accum) else accum
            window += range(i*micro, min((i+1)*micro, n))
            if len(window) >= size:
                steps.append((window, pct))
                window = []
        is_last_epoch = epoch+1 == n_epoch
        carries_on = remainder == 'carry' and not is_last_epoch
        has_step = remainder != 'drop' and not carries_on
        if window and has_step: steps.append((window, pct))
    return steps


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def reference(steps, n, make_opt, lr=lambda pct: 0.1, seed=0, skipped=()):
    """Trains on each window of `steps` as ONE batch in plain PyTorch; those whose number is in `skipped` have a loss
    and no step, and the next one adds to their gradients. Returns weights and losses"""
    m = model(seed)
    inputs, targets = data(n)
    opt = make_opt(m.parameters())
    losses = []
    for i, (samples, pct) in enumerate(steps):
        for group in opt.param_groups: group['lr'] = lr(pct)
        errors = m(inputs[samples])-targets[samples]
        loss = (errors**2).mean()
        loss.backward()
        if i not in skipped:
            opt.step()
            opt.zero_grad()
        losses.append(loss.item())
    return weights(m), losses


def smoothed(losses):
    "Returns what the Recorder makes of the losses of steps"
    smooth = AvgSmoothLoss()
    smooth.reset()  # fastai 2.8.7 does not begin with it
    res = []
    for o in losses:
        smooth.accumulate(SimpleNamespace(loss=tensor(o)))
        res.append(float(smooth.value))
    return res
