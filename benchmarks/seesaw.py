"""Does a growing batch replace the falling part of one-cycle, with Adam? Four small tasks at constant batches of many
sizes; with a batch that grows instead, by the rule of Seesaw (https://arxiv.org/abs/2510.14717); and with constant
batches that take as many steps as that one. Each has the best of six learning rates"""
import ast
import inspect
import math
from functools import cache, partial
from importlib import import_module

import numpy as np
import torch
from fastai.basics import DataLoader, DataLoaders, Learner, set_seed
from fastai.callback.all import *
from sklearn.datasets import load_digits, make_classification, make_friedman1
from torch import nn
from torch.nn import functional as F
from fastxtend_accum.all import GradientAccumulationSchedule, sqrt_scale

rates = [2**k*1e-3 for k in range(6)]
n_searches = 2  # seeds that choose the rate; others are reported
modules = 'argparse', 'inspect', 'pickletools', 'subprocess', 'tarfile', 'unittest.mock', 'typing', 'logging'


# Tasks: inputs, targets, samples for validation, a model and a loss function

def layers(*widths):
    res = []
    for n_in, n_out in zip(widths, widths[1:]): res += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*res[:-1])


def pixels():
    "Handwritten digits as 64 numbers"
    x, y = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(y))
    return x[order]/16, y[order], 389, partial(layers, 64, 128, 10), F.cross_entropy


def friedman():
    "A function of ten numbers (Friedman, 1991)"
    x, y = make_friedman1(10240, noise=1., random_state=0)
    y = (y-y.mean())/y.std()
    return x, y[:,None].astype(np.float32), 2048, partial(layers, 10, 64, 64, 1), F.mse_loss


def docstrings():
    "Returns the docstrings of Python's standard library as numbers"
    found = []
    for name in modules:
        for node in ast.walk(ast.parse(inspect.getsource(import_module(name)))):
            has_docstring = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            if has_docstring: found.append(ast.get_docstring(node) or '')
    return list('\n'.join(found).encode('ascii', 'replace'))


def characters():
    "The next character of a docstring, from the eight before"
    windows = torch.tensor(docstrings()).unfold(0, 9, 1)
    order = np.random.RandomState(0).permutation(len(windows))
    chosen = windows[order[:22528]].numpy()
    def model(): return nn.Sequential(nn.Embedding(128, 16), nn.Flatten(), layers(128, 128, 128))
    return chosen[:,:8], chosen[:,8], 2048, model, F.cross_entropy


def table():
    "Two classes of 20 made numbers"
    settings = dict(n_informative=12, n_redundant=4, n_clusters_per_class=8, flip_y=.02)
    x, y = make_classification(10240, 20, random_state=0, **settings)
    return x, y, 2048, partial(layers, 20, 64, 32, 2), F.cross_entropy


tasks = dict(  # and epochs, and sizes of the batch at the start
    pixels=(pixels, 12, (16, 64, 256)),
    friedman=(friedman, 4, (32, 128)),
    characters=(characters, 2, (32, 128)),
    table=(table, 4, (32, 128)))


# Fits

def falls(start, end):
    "Returns the batch size that takes the place of a rate which falls along half a cosine"
    return lambda pos: min(end, 2*start/(1+math.cos(math.pi*pos)))


def one_cycle(bs): return []


def seesaw(bs):
    return [GradientAccumulationSchedule(bs, 8*bs, start=.25, finish=1., schedule=falls, scale={'lr': sqrt_scale})]


class Steps(Callback):
    n = 0
    def after_step(self): self.n += 1


@cache
def data(task):
    "Returns the samples for training, those for validation, a function that makes a model, and the loss function"
    make, *_ = tasks[task]
    x, y, n_valid, model, loss_func = make()
    inputs = torch.tensor(x)
    if inputs.is_floating_point(): inputs = inputs.float()
    samples = [*zip(inputs, torch.tensor(y))]
    return samples[:-n_valid], samples[-n_valid:], model, loss_func


def fit(task, bs, way, lr, seed):
    "Returns the validation loss after one cycle, and the number of steps"
    train, valid, model, loss_func = data(task)
    _, n_epoch, _ = tasks[task]
    set_seed(seed)
    dls = DataLoaders(DataLoader(train, bs=bs, shuffle=True), DataLoader(valid, bs=len(valid)))
    learn = Learner(dls, model(), loss_func, cbs=[Steps(), *way(bs)])
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(n_epoch, lr)
    return learn.recorder.values[-1][1], learn.steps.n


def best(task, bs, way, seeds):
    "Returns the losses by seed, at the learning rate with the least loss over other seeds"
    def searched(lr):
        return np.mean([fit(task, bs, way, lr, 100+seed)[0] for seed in range(n_searches)])
    lr = min(rates, key=searched)
    fits = [fit(task, bs, way, lr, seed) for seed in seeds]
    return dict(bs=bs, lr=lr, steps=fits[0][1], losses=[loss for loss, _ in fits])


def cell(task, bs, seeds):
    "Returns what each way reaches from batches of `bs`"
    small = best(task, bs, one_cycle, seeds)
    grown = best(task, bs, seesaw, seeds)
    n_samples = small['steps']*bs
    as_many = best(task, round(n_samples/grown['steps']), one_cycle, seeds)
    return dict(one_cycle=small, seesaw=grown, as_many=as_many)


def measure(rounds):
    "Returns the cells by task and size; each round is a seed"
    res = {}
    for task, (_, _, task_sizes) in tasks.items():
        res[task] = {bs: cell(task, bs, range(rounds)) for bs in task_sizes}
    return dict(cells=res)
