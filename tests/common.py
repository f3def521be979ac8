"What the tests share: small data, a Learner for it, and a reference in plain PyTorch that knows neither fastai nor this package"
import multiprocessing, os
from contextlib import contextmanager

import torch
from hypothesis import settings
from torch.amp import GradScaler, autocast
from fastai.basics import *
from fastai.callback.all import *
from fastxtend_accum.all import *
from fastxtend_accum.memory.override import override_attr as replaced
from fastxtend_accum.windows.loss_check import LossCheck
from fastxtend_accum.windows.nested import n_rows


def data(n, seed=1):
    "`n` samples of a small regression, in float64"
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 5, generator=g, dtype=torch.float64), torch.randn(n, 1, generator=g, dtype=torch.float64)

def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()

def tokens():
    "24 sequences of 5 tokens and their labels; most are ignored, whole sequences of them, and unevenly"
    g = torch.Generator().manual_seed(2)
    x,y = torch.randint(11, (24, 5), generator=g),torch.randint(4, (24, 5), generator=g)
    y[torch.rand(24, 5, generator=g) < torch.linspace(0, 1, 24)[:,None]] = -100
    return x,y

SECONDS = 1800  # that a process may take, on a machine that does other work too

ROUNDING = 1e-12  # float64: the sums of a window are added up in another order than those of one batch

def mse(pred, targ): return F.mse_loss(pred, targ).float()  # fastai's Recorder can only average float32

def make_learner(bs, n=96, cbs=None, opt_func=SGD, drop_last=False, seed=0, m=None, loss_func=mse, **kwargs):
    "A Learner that sees `n` samples in order, `bs` at a time"
    m = model(seed) if m is None else m
    ds = list(zip(*(o.to(next(m.parameters()).dtype) for o in data(n))))
    dls = DataLoaders(DataLoader(ds, bs=bs, drop_last=drop_last), DataLoader(ds[:20], bs=16))
    return Learner(dls, m, loss_func=loss_func, opt_func=opt_func, cbs=cbs, **kwargs)

@contextmanager
def quiet(learn):
    with learn.no_bar(), learn.no_logging(): yield learn

def fit(learn, n_epoch=3, lr=0.1, method='fit', **kwargs):
    "Fit without a word"
    with quiet(learn): getattr(learn, method)(n_epoch, lr, **kwargs)
    return learn

def fit_aloud(learn, n_epoch=3, lr=0.1, method='fit', **kwargs):
    "Fit with what this package prints, but without fastai's table"
    with learn.no_bar(), replaced(learn, 'logger', lambda o: isinstance(o, str) and print(o)): getattr(learn, method)(n_epoch, lr, **kwargs)
    return learn

def weights(learn): return torch.cat([p.detach().flatten().clone() for p in getattr(learn, 'model', learn).parameters()])
def grads(learn): return [p.grad for p in learn.model.parameters() if p.grad is not None]
def losses(learn): return [float(o) for o in learn.recorder.losses]
def floats(o): return [[float(v) for v in row if not isinstance(v, str)] for row in o]

def assert_same(a, b, tol=0.):
    "Equal lengths, and no difference above `tol`"
    a,b = (o if isinstance(o, torch.Tensor) else torch.tensor(o, dtype=torch.float64) for o in (a, b))
    assert a.shape == b.shape, f'{a.shape} is not {b.shape}'
    diff = (a-b).abs()
    assert not diff.isnan().any() and (diff <= tol).all(), f'largest difference {diff.max()}, mean {diff.mean()}, allowed {tol}'

def assert_moved(learn, seed=0): assert (weights(learn)-weights(model(seed))).abs().max() > 1e-3

def forked(f, *args):
    "The exit code of a copy of this process that calls `f`; below 0, the signal that ended it. A process that imports fastai once more takes seconds"
    process = multiprocessing.get_context('fork').Process(target=f, args=args)
    process.start()
    process.join()
    return process.exitcode

def all_blocks(*args, **kwargs):
    "Recomputes all blocks, also where memory suffices"
    return ActivationCheckpointing(*args, adapt=False, **kwargs)

class CpuMixedPrecision(MixedPrecision):
    "fastai's callback has 'cuda' written into it"
    def before_fit(self):
        super().before_fit()
        dtype = torch.float16 if self.amp_mode == AMPMode.FP16 else torch.bfloat16
        self.autocast,self.learn.scaler = autocast('cpu', dtype=dtype),GradScaler('cpu', **self.kwargs)

# `DRAWS=10000 pytest -k any_` draws more cases than the profile has, and new ones each time
draws = settings(deadline=None, derandomize='DRAWS' not in os.environ)


def check_loss(loss_func, parts, items=None):
    "What the check of the loss says of micro-batches, which are tuples of outputs and targets"
    check = LossCheck(loss_func)
    for (pred,*targ),n in itertools.zip_longest(parts, items or ()):
        check.add(SimpleNamespace(loss_func=loss_func, pred=pred, yb=targ), n_rows((pred,*targ)), n)
    check.compare()
    return check.results[0]

# Faults

EVENTS = ['before_fit','before_epoch','before_train','before_batch','after_pred','after_loss','before_backward','after_backward',
          'before_step','after_step','after_cancel_batch','after_batch','after_train','before_validate','after_validate','after_epoch',
          'after_fit']
CANCELS = [CancelBatchException, CancelTrainException, CancelEpochException, CancelFitException]

class Fault(Callback):
    "Raises `exc` at the `nth` time that `event` fires"
    def __init__(self, exc, event, nth, order):
        self.exc,self.event,self.nth,self.order,self.count = exc,event,nth,order,0
        setattr(self, event, self.strike)
    def strike(self):
        self.count += 1
        if self.count == self.nth: raise self.exc('on purpose')


# The reference

def windows(n, micro, accum, remainder, n_epoch, drop_last=False):
    "Sample ranges of each optimizer step, and its fraction of training: the large batch's, or in samples where windows change in size or go on in the next epoch"
    n_micro = n//micro if drop_last else -(-n//micro)
    n_used = min(n, n_micro*micro)
    n_large = None if callable(accum) or remainder == 'carry' else n_used//accum if remainder == 'drop' else -(-n_used//accum)
    res,window = [],[]
    for epoch in range(n_epoch):
        if remainder != 'carry': window = []
        for i in range(n_micro):
            if not window:
                pct = (epoch + (i*micro//accum/n_large if n_large else i*micro/n_used))/n_epoch
                size = accum(pct) if callable(accum) else accum
            window += range(i*micro, min((i+1)*micro, n))
            if len(window) >= size: res.append((window, pct)); window = []
        if window and (remainder == 'step' or remainder == 'carry' and epoch+1 == n_epoch): res.append((window, pct))
    return res

def sgd(params): return torch.optim.SGD(params, lr=0.1)

def reference(steps, n, make_opt, lr=lambda pct: 0.1, seed=0, skipped=()):
    "Weights and losses after an optimizer step on each of `steps`, every window as ONE batch; those in `skipped` have a loss and no step"
    m,(x,y),losses = model(seed),data(n),[]
    opt = make_opt(m.parameters())
    for i,(idxs,pct) in enumerate(steps):
        for g in opt.param_groups: g['lr'] = lr(pct)
        opt.zero_grad()
        loss = ((m(x[idxs])-y[idxs])**2).mean()
        loss.backward()
        if i not in skipped: opt.step()
        losses.append(loss.item())
    return torch.cat([p.detach().flatten() for p in m.parameters()]), losses

def smoothed(losses):
    "What the Recorder makes of the losses of steps"
    smooth,res = AvgSmoothLoss(),[]
    smooth.reset()  # fastai 2.8.7 does not begin with it
    for o in losses:
        smooth.accumulate(SimpleNamespace(loss=tensor(o)))
        res.append(float(smooth.value))
    return res

__all__ = [o for o in globals() if not o.startswith(('_', 'test'))]  # fastcore's test_eq and the like are no tests
