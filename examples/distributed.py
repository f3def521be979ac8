"""The digits on two processes, and the same on one: `torchrun --standalone --nproc-per-node 2 examples/distributed.py`, with or without GPUs

The processes share out every window of 64 samples, in micro-batches of 8. Then each trains a batch of 64 by itself, on the same samples"""
import time
from fastai.basics import *
from fastai.distributed import *
from fastxtend_accum.all import *
from sklearn.datasets import load_digits

def broadcast(self, t, rank):
    "fastai sends the order of the samples by way of the GPU. On a machine without one this takes its place"
    t = torch.tensor(t)
    torch.distributed.broadcast(t, rank)
    return t.tolist()
if not torch.cuda.is_available(): DistributedDL._broadcast = broadcast

digits = load_digits()
x,y = tensor(digits.images/16).float().flatten(1),tensor(digits.target)
train,valid = range(1280),range(1280, 1792)

def learner(bs, idxs, cbs=None):
    torch.manual_seed(42)
    dls = DataLoaders(*(DataLoader([(x[i], y[i]) for i in o], bs=bs) for o in (idxs, valid)))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return Learner(dls, model, CrossEntropyLossFlat(), metrics=accuracy, cbs=cbs)

def fit(learn):
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(5, 0.01)
    return learn

def weights(learn): return torch.cat([p.detach().flatten() for p in learn.model.parameters()])

def one_process_order(n, window=64):
    "Each of `n` processes has a contiguous share of the samples; a window takes some of every share"
    return torch.tensor(train).view(n, -1, window//n).transpose(0, 1).flatten().tolist()

n = max(1, num_distrib())
several = learner(8, train, cbs=GradientAccumulation(64))
with several.distrib_ctx(cpu=not torch.cuda.is_available()): fit(several)
one = fit(learner(64, one_process_order(n)))

if rank_distrib() == 0:
    difference = (weights(several)-weights(one)).abs().max()
    print(f'{n} processes: {several.gradient_accumulation.opt_steps} steps, accuracy {several.final_record[-1]:.3f}')
    print(f'1 process, batch of 64: {len(one.recorder.losses)} steps, accuracy {one.final_record[-1]:.3f}')
    print(f'largest difference of the weights: {difference:.1e}')
    assert difference < 1e-5, 'the weights are not equal'
    print('the weights are equal')
if n > 1:
    time.sleep(1)  # on CPUs gloo is still letting go of what was gathered last, and aborts a Python that ends: https://github.com/pytorch/pytorch/issues/190489
    torch.distributed.destroy_process_group()
