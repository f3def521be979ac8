"""A training step of fastai's learners, of each kind: the most bytes alive, time, and how far the gradient is off

On a GPU if there is one, of 12 GB, with larger inputs. Weights are random: nothing is downloaded."""
from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from fastai.basics import SGD, Callback, DataLoader, DataLoaders, Learner, set_seed
from fastai.tabular.all import CategoryBlock, Categorify, Normalize, TabularDataLoaders, tabular_learner
from fastai.text.all import (AWD_LSTM, LMDataLoader, TensorText, language_model_learner as language_learner,
                             text_classifier_learner)
from fastai.vision.all import CrossEntropyLossFlat, models, unet_learner, vision_learner
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from fastxtend_accum import checkpointing
from fastxtend_accum.all import ActivationCheckpointing, GradientAccumulation
from fastxtend_accum.demo import Activations

from .counts import LiveBytes
from .report import learner_kinds, learner_names
from .ways import fit_batch, seconds, settle, step as fit_step

kinds = 'whole', *learner_kinds
on_gpu = torch.cuda.is_available()
device = torch.device('cuda' if on_gpu else 'cpu')
bs = 32 if on_gpu else 16
pixels = 224 if on_gpu else 64
n_words = 400 if on_gpu else 144  # of a text
seq_len = 72  # fastai's default
n_vocab = 2000


# Batches, which wait on the device, so that the model is timed and not a loader

def loaders(inputs, targets):
    "Returns DataLoaders with a batch to train on, and none to validate"
    samples = list(zip(inputs.to(device), targets.to(device)))
    train = DataLoader(samples, bs=len(samples))
    return DataLoaders(train, DataLoader([], bs=len(samples)), device=device)


def random_images(): return torch.randn(bs, 3, pixels, pixels)
def random_words(*shape): return torch.randint(2, n_vocab, shape)
def vocab(): return [f'w{i}' for i in range(n_vocab)]


# Learners, by `report.learner_names`

def classifier(arch, **kwargs):
    dls = loaders(random_images(), torch.arange(bs)%10)
    return vision_learner(dls, arch, n_out=10, pretrained=False, loss_func=CrossEntropyLossFlat(), **kwargs)


def resnet34(**kwargs): return classifier(models.resnet34, **kwargs)
def convnext(**kwargs): return classifier('convnext_tiny' if on_gpu else 'convnext_atto', **kwargs)


def unet(**kwargs):
    masks = torch.randint(3, (bs, pixels, pixels))
    dls = loaders(random_images(), masks)
    loss_func = CrossEntropyLossFlat(axis=1)
    return unet_learner(dls, models.resnet34, n_out=3, pretrained=False, loss_func=loss_func, **kwargs)


def text(**kwargs):
    dls = loaders(random_words(bs, n_words), torch.arange(bs)%2)
    dls.vocab = vocab()
    return text_classifier_learner(
        dls, AWD_LSTM, seq_len=seq_len, n_out=2, pretrained=False, loss_func=CrossEntropyLossFlat(), **kwargs)


def language(**kwargs):
    words = TensorText(random_words(bs*(seq_len+1)))
    dl = LMDataLoader([words], bs=bs, seq_len=seq_len)
    dls = DataLoaders(dl, dl, device=device)
    dls.vocab = vocab()
    return language_learner(dls, AWD_LSTM, pretrained=False, **kwargs)


def tabular(**kwargs):
    n = bs*64
    rng = np.random.default_rng(0)
    table = pd.DataFrame({
        'kind': rng.choice(list('abcdef'), n),
        'a': rng.normal(size=n),
        'b': rng.normal(size=n),
        'y': rng.choice(list('uv'), n)})
    dls = TabularDataLoaders.from_df(
        table, procs=[Categorify, Normalize], cat_names=['kind'], cont_names=['a', 'b'],
        y_names='y', y_block=CategoryBlock(), valid_idx=[0], bs=n-1, device=device)
    return tabular_learner(dls, **kwargs)


class TwoViews(nn.Module):
    "The features of both views of each image"
    def __init__(self):
        super().__init__()
        import timm  # which the tests do without
        name = 'convnext_tiny' if on_gpu else 'convnext_atto'
        self.encoder = timm.create_model(name, num_classes=128)

    def forward(self, x):
        features = self.encoder(x.flatten(0, 1))
        return F.normalize(features, dim=-1).unflatten(0, x.shape[:2])


def info_nce(pred, targ):
    "The partner of each view is to be found among those of all samples"
    logits = pred[:,0] @ pred[:,1].T/.1
    partners = torch.arange(len(logits), device=logits.device)
    return F.cross_entropy(logits, partners)


def contrastive(**kwargs):
    views = torch.randn(bs, 2, 3, pixels, pixels)
    return Learner(loaders(views, torch.zeros(bs)), TwoViews(), info_nce, **kwargs)


makers = dict(zip(learner_names, (resnet34, convnext, unet, text, language, tabular, contrastive)))


# Kinds of training

def callbacks(kind, bs):
    if kind == 'checkpointing': return [ActivationCheckpointing()]
    if kind == 'all_blocks': return [ActivationCheckpointing(adapt=False)]
    if kind == 'offloaded': return [ActivationCheckpointing(offload=True, adapt=False)]
    quarter = -(-bs//4)
    if kind == 'split': return [GradientAccumulation(micro_batch_size=quarter)]
    return []


def make(name, kind):
    "Returns a Learner whose epoch is one batch, with the same weights each time, all of them trained"
    set_seed(0)
    learn = makers[name](opt_func=SGD)
    learn.model.to(device)
    learn.unfreeze()
    learn.add_cbs(callbacks(kind, learn.dls.train.bs))
    for p in learn.model.parameters(): p.grad = torch.zeros_like(p)
    return learn


def step(learn):
    "A fit of one batch. All steps begin with the same weights, which a learning rate of 0 leaves as they are"
    set_seed(0)
    fit_step(learn, 0.)


def kept(learn):
    "Returns the MB that the forward pass keeps for the backward pass"
    learn.add_cb(Activations())
    step(learn)
    mb = learn.activations.mb
    learn.remove_cb(Activations)
    return mb


def search(learn, mb):
    """Lets ActivationCheckpointing find how many blocks the batch takes where activations have room for `mb` MB, which
    holds afterwards as well; returns that in words"""
    learn.add_cb(Activations(mb))
    settle(learn, step)
    learn.remove_cb(Activations)
    return learn.activation_checkpointing.describe_level()


# Figures

def gradient(learn):
    "Returns the gradient with which the optimizer would step"
    grads = []
    def keep():
        for p in learn.model.parameters():
            grads.append(p.grad.detach().flatten().cpu().double())
    with patch.object(learn.opt, 'step', keep): step(learn)
    return torch.cat(grads)


def as_on_a_gpu(live):
    "In this context, what `offload` moves to the CPU does not count, and what comes back is a copy, as on a GPU"
    def to_cpu(t):
        with _disable_current_modes(): copied = torch.empty_like(t)
        live.count(copied, 0)
        return copied.copy_(t)
    return patch.multiple(checkpointing, to_cpu=to_cpu, from_cpu=torch.clone)


class SecondBatch(Callback):
    "Forgets the peak when the second batch begins: what adapts keeps room for the optimizer's state in the first"
    def __init__(self, reset_peak): self.reset_peak = reset_peak

    def before_batch(self):
        if self.iter == 1: self.reset_peak()


def peak(learn):
    "Returns the most bytes that are alive in a step, without the weights, their gradients and the buffers"
    if on_gpu:
        before = torch.cuda.memory_allocated()
        fit_batch(learn, 2, 0., SecondBatch(torch.cuda.reset_peak_memory_stats))
        return torch.cuda.max_memory_allocated()-before
    live = LiveBytes(learn.model)
    def reset_peak(): live.peak = live.now
    with ExitStack() as stack:
        stack.enter_context(live)
        stack.enter_context(as_on_a_gpu(live))
        fit_batch(learn, 2, 0., SecondBatch(reset_peak))
    return live.peak


def measure(name, rounds):
    """Returns the figures of each kind: peak bytes, seconds once a round, and how far the gradient is off, relative to
    the whole batch"""
    learners = {kind: make(name, kind) for kind in kinds}
    room = kept(learners['whole'])/2
    how = search(learners['checkpointing'], room)
    for learn in learners.values(): step(learn)  # the first step is slower
    whole = gradient(learners['whole'])
    off = {}
    for kind, learn in learners.items():
        difference = (gradient(learn)-whole).norm()
        off[kind] = float(difference/whole.norm())
    live = {kind: peak(learn) for kind, learn in learners.items()}
    times = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, learn in learners.items(): times[kind].append(seconds(learn, 0.))
    return dict(bs=learners['whole'].dls.train.bs, how=how, off=off, live=live, time=times)
