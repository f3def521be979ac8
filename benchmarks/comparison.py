"""8 x 32 samples in a step against batches of 256: with this package's callback, fastai's, fastxtend's, and one of
one's own. `report.comparison_labels` says what each figure is"""
from fastai.basics import *
from fastai.callback.all import *
from fastai.callback.training import GradientAccumulation as Fastais
from fastxtend.callback.gradaccum import GradientAccumulation as Fastxtends
from fastxtend_accum.all import *
from fastxtend_accum.demo import weight_difference

from .report import contestants


# The callbacks

class TwentyLines(Callback):
    """What people write who need no package: one learning rate a window, the loss divided by `k`, a step for what an
    epoch has left"""
    order, run_valid = ParamScheduler.order+1, False
    def __init__(self, k): self.k = k
    def before_train(self): self.n = 0
    def before_batch(self):
        if self.n%self.k == 0: self.hypers = [dict(o) for o in self.opt.hypers]
        else:
            for now, first in zip(self.opt.hypers, self.hypers): now.update(first)
        self.n += 1
    def after_loss(self): self.learn.loss_grad = self.loss_grad/self.k
    def after_backward(self):
        if self.n%self.k and self.n < self.n_iter: raise CancelBatchException


def callback(name, accum_bs, bs):
    "Returns the callback `name` for `accum_bs` samples in a window, and a loader that yields `bs`"
    if name == 'ours': return GradientAccumulation(accum_bs)
    if name == 'fastai': return Fastais(accum_bs)
    if name == 'fastxtend': return Fastxtends(accum_bs, drop_last=False)
    return TwentyLines(accum_bs//bs)


# Fits

def small_model():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


def make_learner(samples, bs, cbs, model=small_model, loss_func=F.mse_loss, opt_func=Adam):
    torch.manual_seed(42)
    train = DataLoader(samples, bs=bs)
    valid = DataLoader(samples[:bs], bs=bs)
    return Learner(DataLoaders(train, valid), model(), loss_func, opt_func=opt_func, cbs=cbs)


def fit(learn, n_epoch=1, lr=1e-2, method='fit'):
    "Trains in silence, and returns the Learner"
    with learn.no_bar(), learn.no_logging(): getattr(learn, method)(n_epoch, lr)
    return learn


def regression(n):
    "Returns `n` samples"
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(n, 5, generator=generator)
    noise = torch.randn(n, 1, generator=generator)
    return list(zip(inputs, inputs.sum(1, keepdim=True)+noise))


# The figures

def weights_off(name, n):
    "Returns the largest difference of a weight from batches of 256, after three epochs of `n` samples"
    large = make_learner(regression(n), 256, None)
    small = make_learner(regression(n), 32, callback(name, 256, 32))
    for learn in large, small: fit(learn, 3, method='fit_one_cycle')
    return weight_difference(large, small)


class KeepGrad(Callback):
    "Keeps the gradient of the last step"
    order = 70
    def before_step(self):
        grads = [p.grad.flatten().float() for p in self.model.parameters()]
        self.grad = torch.cat(grads)


def padded_texts():
    "Returns four texts of 125 tokens, of which 5, 123, 6 and 125 count"
    generator = torch.Generator().manual_seed(42)
    inputs = torch.randint(20, (4, 125), generator=generator)
    targets = torch.randint(10, (4, 125), generator=generator)
    for row, n in zip(targets, (5, 123, 6, 125)): row[n:] = -100
    return list(zip(inputs, targets))


def token_model(): return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 10))


def padded(name):
    "Returns the relative error of the gradient of padded texts, one at a time"
    def grad(bs, *cbs):
        learn = make_learner(padded_texts(), bs, [KeepGrad(), *cbs], token_model, CrossEntropyLossFlat())
        return fit(learn).keep_grad.grad
    whole = grad(4)
    one_at_a_time = grad(1, callback(name, 4, 1))
    return ((whole-one_at_a_time).norm()/whole.norm()).item()


class Log(Callback):
    "A logger of one's own"
    order, run_valid = 60, False
    n = 0
    def after_batch(self): self.n += 1


def entries(name):
    "Returns how often a logger writes in 15 steps"
    cbs = [Log(), callback(name, 256, 32)]
    return fit(make_learner(regression(1280), 32, cbs), 3).log.n


def figures(name):
    "Returns the figures of one callback, by `report.comparison_labels`"
    return dict(
        whole=weights_off(name, 1280),
        ragged=weights_off(name, 1400),
        padded=padded(name),
        entries=entries(name))


def measure(): return dict(callbacks={name: figures(name) for name in contestants})
