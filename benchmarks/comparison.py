"""8 x 32 samples in a step against batches of 256: with this package's callback, fastai's, fastxtend's, and one of
one's own. `report.comparison_labels` says what each figure is"""
import os, re, subprocess, sys
from pathlib import Path

from fastai.basics import *
from fastai.callback.all import *
from fastai.callback.training import GradientAccumulation as Fastais
from fastxtend.callback.gradaccum import GradientAccumulation as Fastxtends
from fastxtend_accum.all import *
from fastxtend_accum.demo import weight_difference

from .report import contestants

class TwentyLines(Callback):
    """What people write who need no package: one learning rate a window, the loss divided by `k`, a step for what an
    epoch has left"""
    order,run_valid = ParamScheduler.order+1,False
    def __init__(self, k): self.k = k
    def before_train(self): self.n = 0
    def before_batch(self):
        if self.n%self.k == 0: self.hypers = [dict(o) for o in self.opt.hypers]
        else:
            for now,o in zip(self.opt.hypers, self.hypers): now.update(o)
        self.n += 1
    def after_loss(self): self.learn.loss_grad = self.loss_grad/self.k
    def after_backward(self):
        if self.n%self.k and self.n < self.n_iter: raise CancelBatchException

def callback(name, accum_bs, bs):
    "The callback `name` for `accum_bs` samples of each process in a window, and a loader that yields `bs`"
    return dict(ours=lambda: GradientAccumulation(accum_bs*max(num_distrib(), 1)), fastai=lambda: Fastais(accum_bs),
                fastxtend=lambda: Fastxtends(accum_bs, drop_last=False), own=lambda: TwentyLines(accum_bs//bs))[name]()

def small_model(): return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

def fit(samples, bs, cbs, n_epoch=1, model=small_model, loss_func=F.mse_loss, lr=1e-2, method='fit', opt_func=Adam):
    torch.manual_seed(42)
    dls = DataLoaders(DataLoader(samples, bs=bs), DataLoader(samples[:bs], bs=bs))
    learn = Learner(dls, model(), loss_func, opt_func=opt_func, cbs=cbs)
    with learn.no_bar(), learn.no_logging(): getattr(learn, method)(n_epoch, lr)
    return learn

def regression(n):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=g)
    return list(zip(x, x.sum(1, keepdim=True)+torch.randn(n, 1, generator=g)))

def weights_off(name, n):
    "The largest difference of a weight from batches of 256, after three epochs of `n` samples"
    def run(bs, cb): return fit(regression(n), bs, cb, 3, method='fit_one_cycle')
    return weight_difference(run(256, None), run(32, callback(name, 256, 32)))

class KeepGrad(Callback):
    "Keeps the gradient of the last step"
    order = 70
    def before_step(self): self.grad = torch.cat([p.grad.flatten().float() for p in self.model.parameters()])

def padded(name):
    "The relative error of the gradient of four texts with 5, 123, 6 and 125 tokens, one at a time"
    g = torch.Generator().manual_seed(42)
    inputs,targets = (torch.randint(n, (4, 125), generator=g) for n in (20, 10))
    for row,n in zip(targets, (5, 123, 6, 125)): row[n:] = -100
    def model(): return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 10))
    def grad(bs, *cbs):
        samples,cbs = list(zip(inputs, targets)),[KeepGrad(), *cbs]
        return fit(samples, bs, cbs, model=model, loss_func=CrossEntropyLossFlat()).keep_grad.grad
    whole,one_at_a_time = grad(4),grad(1, callback(name, 4, 1))
    return ((whole-one_at_a_time).norm()/whole.norm()).item()

class Times(nn.Module):
    "One bfloat16 weight, whose gradient is the mean of the inputs"
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    def forward(self, x): return self.w*x

def ones(name):
    "The mean of 512 bfloat16 gradients of 1"
    samples = [(torch.ones(1, dtype=torch.bfloat16), torch.zeros(1))]*512
    learn = fit(samples, 1, [KeepGrad(), callback(name, 512, 1)], model=Times, lr=0., opt_func=SGD,
                loss_func=lambda pred, targ: pred.float().mean())
    return learn.keep_grad.grad.item()

class Log(Callback):
    "A logger of one's own"
    order,n,run_valid = 60,0,False
    def after_batch(self): self.n += 1

def entries(name):
    "How often a logger writes in 15 steps"
    return fit(regression(1280), 32, [Log(), callback(name, 256, 32)], 3).log.n

def syncs(name):
    "How often two processes average their gradients in a step of 8 x 32 samples, four batches from each"
    torchrun = ['torch.distributed.run', '--standalone', '--nproc-per-node', '2', '-m', 'benchmarks.comparison', name]
    run = subprocess.run([sys.executable, '-m', *torchrun], cwd=Path(__file__).parents[1], timeout=600,
                         capture_output=True, text=True, env=os.environ | {'OMP_NUM_THREADS':'1'})
    if not (found := re.search(r'syncs: (\S+)', run.stdout)): raise RuntimeError(run.stderr[-2000:])
    return float(found[1])

def count_syncs(name):
    "What each of the two processes does"
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    dist.init_process_group('gloo')
    n = []
    def count(state, bucket):
        n.append(1)
        return allreduce_hook(None, bucket)
    def model():
        model = nn.parallel.DistributedDataParallel(nn.Linear(5, 1))
        model.register_comm_hook(None, count)
        return model
    fit(regression(1280)[rank_distrib()::2], 32, callback(name, 128, 32), model=model)
    if not rank_distrib(): print(f'syncs: {len(n)/5}', flush=True)
    time.sleep(1)  # https://github.com/pytorch/pytorch/issues/190489
    dist.destroy_process_group()

def measure():
    "All figures, by callback"
    return {name:dict(whole=weights_off(name, 1280), ragged=weights_off(name, 1400), padded=padded(name),
                      ones=ones(name), syncs=syncs(name), entries=entries(name)) for name in contestants}

if __name__ == '__main__': count_syncs(*sys.argv[1:])
