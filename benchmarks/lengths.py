"""An epoch of texts of many lengths, with memory for a part of the longest batch: passes of the model, and CPU time,
for each kind of run"""
import time

import torch
from fastai.basics import SGD, DataLoaders, Learner
from torch import nn
from torch.nn import functional as F
from fastxtend_accum.all import ActivationCheckpointing, GradientAccumulation
from fastxtend_accum.demo import Activations

from .cases import Batches

n_texts = 32  # in a batch
share = .47  # of the memory that the activations of the longest batch take
lengths = 8*(4, 8, 16, 32, 64, 128)
fixed = 8  # texts of the longest batch that fit, if batches are halved


class Words(nn.Module):
    "Eight layers of two, on each word; the mean of the words is classified"
    def __init__(self, width=128):
        super().__init__()
        def layer(): return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.embed = nn.Embedding(50, width)
        self.layers = nn.Sequential(*[layer() for _ in range(8)])
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        words = self.layers(self.embed(x))
        return self.out(words.mean(1))


def learner(*cbs):
    "Returns a Learner for batches of random words in random order. The texts of a batch are equally long"
    torch.manual_seed(0)
    batches = []
    for i in torch.randperm(len(lengths)).tolist():
        texts = torch.randint(50, (n_texts, lengths[i]))
        batches.append((texts, torch.randint(3, (n_texts,))))
    dls = DataLoaders(Batches(batches, len(batches)), Batches([], 0))
    return Learner(dls, Words(), F.cross_entropy, lr=1e-3, opt_func=SGD, cbs=[*cbs])


def epoch(learn):
    "Returns the CPU seconds of an epoch, and the passes of the model"
    n_passes = 0
    def count_pass(*args):
        nonlocal n_passes
        n_passes += 1
    hook = learn.model.register_forward_pre_hook(count_pass)
    start = time.process_time()
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    hook.remove()
    return time.process_time()-start, n_passes


def make_learners():
    "Returns the Learners by kind, all but the first with a limit of memory"
    whole = learner(Activations())
    epoch(whole)
    most = whole.activations.mb*share
    def split(size): return GradientAccumulation(micro_batch_size=size, verbose=False)
    return dict(
        whole=whole,
        auto=learner(Activations(most), split('auto')),
        checkpointing=learner(Activations(most), ActivationCheckpointing()),
        fixed=learner(Activations(most), split(fixed)))


def measure(rounds):
    """Returns the seconds of an epoch, once a round, and its passes, by kind: those of the first epoch, which searches,
    and of a later one"""
    learners = make_learners()
    first = {}
    for kind, learn in learners.items(): _, first[kind] = epoch(learn)
    for learn in learners.values():
        epoch(learn)
        learn.remove_cb(Activations)  # it would take time; what fits is known by now
        epoch(learn)
    times = {kind: [] for kind in learners}
    passes = {}
    for _ in range(rounds):
        for kind, learn in learners.items():
            seconds, passes[kind] = epoch(learn)
            times[kind].append(seconds)
    return dict(times=times, first=first, passes=passes, batches=len(lengths))
