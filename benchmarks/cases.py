"The contestants: one function each, which makes the training of the same model on the same batches"
import logging

import torch
from torch import nn

# Each contestant imports its library itself, so that the others are measured without it


# The task

def do_nothing(): pass


class Batches:
    "A loader whose batches wait in memory, so that the loop is timed and not a loader"
    def __init__(self, batches, n):
        self.batches = batches
        self.n = n  # batches in an epoch, before `join`
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

    def to(self, device): "Does nothing, since they are made on the device"

    def __len__(self): return self.n//self.joined

    def __iter__(self):
        for i in range(len(self)):
            for _ in range(self.joined): self.on_request()
            yield self.batches[i%len(self.batches)]
        self.on_request()


class Task:
    "What is learned: three linear layers, a loss function, and `n` batches of 16 samples"
    def __init__(self, n, device='cpu', seed=0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(32, 64), nn.ReLU(),
            nn.Linear(64, 64), nn.ReLU(),
            nn.Linear(64, 10)).to(device)
        self.loss_func = nn.CrossEntropyLoss()
        self.lr = 1e-3
        self.device = device
        self.opt = None  # PyTorch's, of the contestants without a Learner
        self.batches = Batches([self.random_batch() for _ in range(64)], n)

    def random_batch(self):
        inputs = torch.randn(16, 32, device=self.device)
        targets = torch.randint(10, (16,), device=self.device)
        return inputs, targets

    def torch_adam(self):
        self.opt = torch.optim.Adam(self.model.parameters(), self.lr)
        return self.opt

    def is_step(self, o):
        "Returns whether `o` is a step counter of PyTorch's Adam, which keeps it on the CPU on every machine"
        if self.opt is None: return False
        return any(o is state['step'] for state in self.opt.state.values())


class Stack(Task):
    "Four square layers with `n_params` parameters in all, and batches of 16 samples of 64 tokens"
    def __init__(self, n_params, n):
        super().__init__(n)
        width = round((n_params/4)**.5)
        layers = [nn.Linear(width, width, bias=False) for _ in range(4)]
        self.model = nn.Sequential(*layers)
        inputs = torch.randn(16, 64, width)
        targets = torch.randn(16, 64, width)
        self.batches.batches = [(inputs, targets)]
        self.loss_func = nn.MSELoss()


# Learners

def learner(task, *cbs, **kwargs):
    "Returns a Learner with its defaults, Adam among them; without a progress bar, and nothing to validate on"
    import fastai.callback.progress  # it patches Learner, as the next one does
    import fastai.callback.schedule
    from fastai.basics import DataLoaders, Learner
    dls = DataLoaders(task.batches, Batches([], 0), device=task.device)
    return Learner(dls, task.model, task.loss_func, lr=task.lr, cbs=cbs, **kwargs)


def training(task, *cbs, **kwargs):
    "Returns a function that trains for one epoch, in silence"
    learn = learner(task, *cbs, **kwargs)
    def train():
        with learn.no_bar(), learn.no_logging(): learn.fit(1)
    return train


def plain(task, k): return training(task)


def ours(task, k):
    from fastxtend_accum.all import GradientAccumulation
    return training(task, GradientAccumulation(k*task.batches.bs))


def ours_split(task, k):
    "The loader yields the whole window, which is split"
    from fastxtend_accum.all import GradientAccumulation
    bs = task.batches.bs
    task.batches.join(k)
    return training(task, GradientAccumulation(micro_batch_size=bs))


def ours_cache(task, k):
    "The same micro-batches, and one loss over all of them"
    from fastxtend_accum.all import GradientCache
    bs = task.batches.bs
    task.batches.join(k)
    return training(task, GradientCache(bs))


def ours_schedule(task, k):
    "The schedule is asked for a size at every window, but keeps to one: the windows are those of the others"
    from fastxtend_accum.all import GradientAccumulationSchedule
    size = k*task.batches.bs
    return training(task, GradientAccumulationSchedule(size, size, finish=1.))


def fastai(task, k):
    from fastai.callback.training import GradientAccumulation
    return training(task, GradientAccumulation(k*task.batches.bs))


def fastxtend(task, k):
    from fastxtend.callback.gradaccum import GradientAccumulation
    return training(task, GradientAccumulation(k*task.batches.bs))


# Without fastai

def lightning(task, k):
    import lightning as L
    logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = task.model
        def training_step(self, batch, i):
            inputs, targets = batch
            return task.loss_func(self.model(inputs), targets)
        def configure_optimizers(self): return task.torch_adam()
    settings = dict(
        devices=1,
        accelerator='gpu' if task.device == 'cuda' else 'cpu',
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False)
    def train():
        trainer = L.Trainer(max_epochs=1, accumulate_grad_batches=k, **settings)
        trainer.fit(Module(), task.batches)
    return train


def accelerate(task, k):
    from accelerate import Accelerator
    accelerator = Accelerator(gradient_accumulation_steps=k, cpu=task.device == 'cpu')
    model, opt = accelerator.prepare(task.model, task.torch_adam())
    def train():
        for inputs, targets in task.batches:
            with accelerator.accumulate(model):
                loss = task.loss_func(model(inputs), targets)
                accelerator.backward(loss)
                opt.step()
                opt.zero_grad()
    return train


def by_hand(task, k):
    opt = task.torch_adam()
    def train():
        for i, (inputs, targets) in enumerate(task.batches):
            loss = task.loss_func(task.model(inputs), targets)
            (loss/k).backward()
            if (i+1)%k == 0:
                opt.step()
                opt.zero_grad()
    return train


contestants = plain, ours, ours_split, ours_cache, ours_schedule, fastai, fastxtend, lightning, accelerate, by_hand
cases = {f.__name__: f for f in contestants}
