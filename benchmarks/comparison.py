"""8 x 32 samples in a step against batches of 256: with this package's callback, fastai's, fastxtend's, and one of
one's own. `report.comparison_labels` says what each figure is"""
import os
import re
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist
from fastai.basics import *
from fastai.callback.all import *
from fastai.callback.training import GradientAccumulation as Fastais
from fastxtend.callback.gradaccum import GradientAccumulation as Fastxtends
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
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
    "Returns the callback `name` for `accum_bs` samples of each process in a window, and a loader that yields `bs`"
    if name == 'ours': return GradientAccumulation(accum_bs*max(num_distrib(), 1))
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


class Times(nn.Module):
    "One bfloat16 weight, whose gradient is the mean of the inputs"
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    def forward(self, x): return self.w*x


def mean_of_outputs(pred, targ): return pred.float().mean()


def ones(name):
    "Returns the mean of 512 bfloat16 gradients of 1"
    sample = torch.ones(1, dtype=torch.bfloat16), torch.zeros(1)
    samples = [sample for _ in range(512)]
    cbs = [KeepGrad(), callback(name, 512, 1)]
    learn = make_learner(samples, 1, cbs, Times, mean_of_outputs, SGD)
    return fit(learn, lr=0.).keep_grad.grad.item()


class Log(Callback):
    "A logger of one's own"
    order, run_valid = 60, False
    n = 0
    def after_batch(self): self.n += 1


def entries(name):
    "Returns how often a logger writes in 15 steps"
    cbs = [Log(), callback(name, 256, 32)]
    return fit(make_learner(regression(1280), 32, cbs), 3).log.n


# Two processes

def syncs(name):
    "Returns how often two processes average their gradients in a step of 8 x 32 samples, four batches from each"
    torchrun = f'{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2'
    command = f'{torchrun} -m benchmarks.comparison {name}'
    env = dict(os.environ, OMP_NUM_THREADS='1')
    root = Path(__file__).parents[1]
    run = subprocess.run(command.split(), cwd=root, env=env, timeout=600, capture_output=True, text=True)
    found = re.search(r'syncs: (\S+)', run.stdout)
    if not found: raise RuntimeError(run.stderr[-2000:])
    return float(found[1])


def count_syncs(name):
    "What each of the two processes does"
    dist.init_process_group('gloo')
    n_syncs = 0
    def count(state, bucket):
        nonlocal n_syncs
        n_syncs += 1
        return allreduce_hook(None, bucket)
    def model():
        model = nn.parallel.DistributedDataParallel(nn.Linear(5, 1))
        model.register_comm_hook(None, count)
        return model
    samples = regression(1280)[rank_distrib()::2]
    fit(make_learner(samples, 32, callback(name, 128, 32), model))
    n_steps = 5
    if rank_distrib() == 0: print(f'syncs: {n_syncs/n_steps}', flush=True)
    time.sleep(1)  # https://github.com/pytorch/pytorch/issues/190489
    dist.destroy_process_group()


def figures(name):
    "Returns the figures of one callback, by `report.comparison_labels`"
    return dict(
        whole=weights_off(name, 1280),
        ragged=weights_off(name, 1400),
        padded=padded(name),
        ones=ones(name),
        syncs=syncs(name),
        entries=entries(name))


def measure(): return {name: figures(name) for name in contestants}


if __name__ == '__main__': count_syncs(*sys.argv[1:])
