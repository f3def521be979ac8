"A small task, and a function for each way of training on it, with the same model and the same batches"
import torch
from fastai.basics import DataLoaders, Learner
from fastai.callback.all import *
from torch import nn
from fastxtend_accum.all import GradientAccumulation, GradientAccumulationSchedule, GradientCache


# The task

def do_nothing(): pass


class Batches:
    "A loader whose batches wait in memory, so that the loop is timed and not a loader"
    def __init__(self, batches, n):
        self.batches = batches
        self.n_batches = n  # in an epoch, before `join`
        self.joined = 1  # batches that are yielded as one
        self.bs = len(batches[0][1]) if batches else 1
        self.on_request = do_nothing  # called for each batch, and once more at the end

    def join(self, k):
        "Yields `k` batches as one from now on, and calls `on_request` once for each of them"
        n = len(self.batches)
        joined = []
        for first in range(0, n, k):
            group = [self.batches[(first+i)%n] for i in range(k)]
            joined.append(tuple(map(torch.cat, zip(*group))))
        self.batches = joined
        self.joined = k
        self.bs *= k

    def to(self, device): "Does nothing, since they are made on the CPU"

    def __len__(self): return self.n_batches//self.joined

    def __iter__(self):
        for i in range(len(self)):
            for _ in range(self.joined): self.on_request()
            yield self.batches[i%len(self.batches)]
        self.on_request()


class Task:
    "What is learned: three linear layers, a loss function, and `n` batches of 16 samples"
    def __init__(self, n, seed=0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(32, 64), nn.ReLU(),
            nn.Linear(64, 64), nn.ReLU(),
            nn.Linear(64, 10))
        self.loss_func = nn.CrossEntropyLoss()
        batches = [(torch.randn(16, 32), torch.randint(10, (16,))) for _ in range(64)]
        self.batches = Batches(batches, n)


# Ways of training: each takes the task, and the number of its batches in a window

def learner(task, *cbs, **kwargs):
    "Returns a Learner with its defaults, Adam among them, and nothing to validate on"
    dls = DataLoaders(task.batches, Batches([], 0), device='cpu')
    return Learner(dls, task.model, task.loss_func, cbs=cbs, **kwargs)


def training(task, *cbs, **kwargs):
    "Returns a function that trains for one epoch, in silence"
    learn = learner(task, *cbs, **kwargs)
    def train():
        with learn.no_bar(), learn.no_logging(): learn.fit(1)
    return train


def plain(task, k): return training(task)


def ours(task, k): return training(task, GradientAccumulation(k*task.batches.bs))


def ours_split(task, k):
    "The loader yields the whole window, which is split"
    bs = task.batches.bs
    task.batches.join(k)
    return training(task, GradientAccumulation(micro_batch_size=bs))


def ours_cache(task, k):
    "The same micro-batches, and one loss over all of them"
    bs = task.batches.bs
    task.batches.join(k)
    return training(task, GradientCache(bs))


def ours_schedule(task, k):
    "The schedule is asked for a size at every window, but keeps to one: the windows are those of the others"
    size = k*task.batches.bs
    return training(task, GradientAccumulationSchedule(size, size, finish=1.))


cases = {f.__name__: f for f in (plain, ours, ours_split, ours_cache, ours_schedule)}
