"""The time of a fit with windows of one loader batch and of eight, beside that of a plain Learner, which takes a step
for each loader batch. What a fit does once, such as the check of the loss in its first windows, is a part of it"""
import time

import numpy as np
import pandas as pd
import torch
from fastai.basics import CrossEntropyLossFlat, DataLoaders, Learner
from fastai.tabular.all import CategoryBlock, Categorify, Normalize, TabularDataLoaders, tabular_learner
from fastai.vision.learner import create_vision_model
from fastai.vision.models import resnet34
from fastxtend_accum.all import GradientAccumulation

from .cases import Batches, Task, learner
from .report import fit_models, fit_sizes

n_batches = dict(linear=1024, tabular=256, resnet34=16)  # in a fit, which is an epoch


def linear_learner(n):
    "Three linear layers, so that the time is little more than that of the loop"
    return learner(Task(n))


def random_table(n):
    "Returns `n` rows with a category, two numbers and a class"
    rng = np.random.default_rng(0)
    return pd.DataFrame({
        'kind': rng.choice(list('abcdef'), n),
        'a': rng.normal(size=n),
        'b': rng.normal(size=n),
        'y': rng.choice(list('uv'), n)})


def make_tabular_learner(n, bs=64):
    "fastai's tabular learner and DataLoaders, with their defaults"
    table = random_table((n+1)*bs)
    dls = TabularDataLoaders.from_df(
        table, procs=[Categorify, Normalize], cat_names=['kind'], cont_names=['a', 'b'],
        y_names='y', y_block=CategoryBlock(), valid_idx=list(range(bs)), bs=bs, device='cpu')
    return tabular_learner(dls)


def resnet34_learner(n, bs=16):
    "A resnet34 on images of 32x32 pixels, which wait in memory"
    torch.manual_seed(0)
    batch = torch.randn(bs, 3, 32, 32), torch.arange(bs)%10
    dls = DataLoaders(Batches([batch], n), Batches([batch], 1))
    return Learner(dls, create_vision_model(resnet34, 10, pretrained=False), CrossEntropyLossFlat())


makers = dict(zip(fit_models, (linear_learner, make_tabular_learner, resnet34_learner)))


def seconds(learn):
    "Returns the CPU time of a fit"
    start = time.process_time()
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3)
    return time.process_time()-start


def measure_model(name, rounds, n):
    "Returns the seconds of a fit of `n` loader batches, once a round: plain, and by loader batches in a window"
    learners = {'plain': makers[name](n)}
    for k in fit_sizes:
        learn = makers[name](n)
        learn.add_cb(GradientAccumulation(k*learn.dls.train.bs))
        learners[str(k)] = learn
    for learn in learners.values(): seconds(learn)  # the first fit is slower
    times = {kind: [] for kind in learners}
    for _ in range(rounds):
        for kind, learn in learners.items(): times[kind].append(seconds(learn))
    return dict(batches=n, times=times)


def measure(rounds):
    return dict(models={name: measure_model(name, rounds, n) for name, n in n_batches.items()})
