"""An epoch of texts of many lengths, with memory for a part of the longest batch: passes of the model, and CPU time,
for each kind of run"""
import time

import torch
from torch import nn
from torch.nn import functional as F

from .cases import Batches

n_texts,share = 32,.47  # in a batch; of the memory that the activations of the longest batch take
lengths = [4, 8, 16, 32, 64, 128]*8
fixed = 8  # texts of the longest batch that fit, if batches are halved

class Words(nn.Module):
    "Eight layers of two, on each word; the mean of the words is classified"
    def __init__(self, width=128):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(8)]
        self.embed,self.layers,self.out = nn.Embedding(50, width),nn.Sequential(*layers),nn.Linear(width, 3)
    def forward(self, x): return self.out(self.layers(self.embed(x)).mean(1))

def learner(*cbs):
    "A Learner for batches of random words, which are equally long in a batch, in random order"
    from fastai.basics import SGD, DataLoaders, Learner
    torch.manual_seed(0)
    order = torch.randperm(len(lengths)).tolist()
    batches = [(torch.randint(50, (n_texts, lengths[i])), torch.randint(3, (n_texts,))) for i in order]
    dls = DataLoaders(Batches(batches, len(batches)), Batches([], 0))
    return Learner(dls, Words(), F.cross_entropy, lr=1e-3, opt_func=SGD, cbs=[*cbs])

def epoch(learn):
    "CPU seconds of an epoch, and the passes of the model"
    passes = []
    hook = learn.model.register_forward_pre_hook(lambda *_: passes.append(1))
    start = time.process_time()
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    hook.remove()
    return time.process_time()-start,len(passes)

def measure(rounds):
    "Seconds of an epoch, once a round, and its passes in the first epoch, which searches, and in a later one; by kind"
    from fastxtend_accum.all import ActivationCheckpointing, GradientAccumulation
    from fastxtend_accum.demo import Activations
    whole = learner(limit := Activations())
    epoch(whole)
    def limited(cb): return learner(Activations(limit.mb*share), cb)
    def split(size): return limited(GradientAccumulation(micro_batch_size=size, verbose=False))
    blocks = limited(ActivationCheckpointing())
    learners = dict(auto=split('auto'), checkpointing=blocks, fixed=split(fixed), whole=whole)
    first = {k:epoch(o)[1] for k,o in learners.items()}
    for o in learners.values():
        epoch(o)
        o.remove_cb(Activations)  # it would take time; what fits is known by now
        epoch(o)
    times,passes = {k:[] for k in learners},{}
    for _ in range(rounds):
        for k,o in learners.items():
            seconds,passes[k] = epoch(o)
            times[k].append(seconds)
    return dict(times=times, first=first, passes=passes, batches=len(lengths))
