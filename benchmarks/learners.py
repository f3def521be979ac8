"""A training step of fastai's learners, of each kind: the most bytes alive, and time. Weights are random: nothing is
downloaded"""
import time
from contextlib import ExitStack
from unittest.mock import patch

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

from .cases import Batches
from .counts import LiveBytes
from .fits import random_table
from .report import learner_kinds, learner_names

kinds = 'whole', *learner_kinds
bs = 16
pixels = 64
n_words = 144  # of a text
seq_len = 72  # fastai's default
n_vocab = 2000


# Batches, which wait in memory, so that the model is timed and not a loader

def loaders(inputs, targets):
    "Returns DataLoaders with a batch to train on, and none to validate"
    samples = list(zip(inputs, targets))
    train = DataLoader(samples, bs=len(samples))
    return DataLoaders(train, DataLoader([], bs=len(samples)))


def random_images(): return torch.randn(bs, 3, pixels, pixels)
def random_words(*shape): return torch.randint(2, n_vocab, shape)
def vocab(): return [f'w{i}' for i in range(n_vocab)]


# Learners, by `report.learner_names`

def classifier(arch, **kwargs):
    dls = loaders(random_images(), torch.arange(bs)%10)
    return vision_learner(dls, arch, n_out=10, pretrained=False, loss_func=CrossEntropyLossFlat(), **kwargs)


def resnet34(**kwargs): return classifier(models.resnet34, **kwargs)
def convnext(**kwargs): return classifier('convnext_atto', **kwargs)


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
    dls = DataLoaders(dl, dl)
    dls.vocab = vocab()
    return language_learner(dls, AWD_LSTM, pretrained=False, **kwargs)


def tabular(**kwargs):
    n = bs*64
    table = random_table(n)
    dls = TabularDataLoaders.from_df(
        table, procs=[Categorify, Normalize], cat_names=['kind'], cont_names=['a', 'b'],
        y_names='y', y_block=CategoryBlock(), valid_idx=[0], bs=n-1, device='cpu')
    return tabular_learner(dls, **kwargs)


class TwoViews(nn.Module):
    "The features of both views of each image"
    def __init__(self):
        super().__init__()
        import timm  # which the tests do without
        self.encoder = timm.create_model('convnext_atto', num_classes=128)

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
    learn.unfreeze()
    learn.add_cbs(callbacks(kind, learn.dls.train.bs))
    for p in learn.model.parameters(): p.grad = torch.zeros_like(p)
    return learn


# Steps: all begin with the same weights, which a learning rate of 0 leaves as they are

def fit_batch(learn, n=1, *cbs):
    "An epoch of `n` times the same batch"
    set_seed(0)
    loaders = learn.dls.loaders
    batch = next(iter(loaders[0]))
    learn.dls.loaders = [Batches([batch], n), *loaders[1:]]
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 0., cbs=cbs)
    learn.dls.loaders = loaders


class BatchTimes(Callback):
    "Notes the CPU seconds of each batch"
    def __init__(self): self.seconds = []
    def before_batch(self): self.begin = time.process_time()
    def after_batch(self): self.seconds.append(time.process_time()-self.begin)


def seconds(learn):
    "Returns the time of a batch: of the fourth in a row, in which nothing is checked, as in most of an epoch"
    times = BatchTimes()
    fit_batch(learn, 4, times)
    return times.seconds[3]


def search(learn, mb):
    "Lets ActivationCheckpointing find how many blocks the batch takes where activations have room for `mb` MB"
    learn.add_cb(Activations(mb))
    n_recomputed = None
    while learn.activation_checkpointing.n_recomputed != n_recomputed:
        n_recomputed = learn.activation_checkpointing.n_recomputed
        fit_batch(learn)
    learn.remove_cb(Activations)


# Figures

def as_on_a_gpu(live):
    "In this context, what `offload` moves to the CPU does not count, and what comes back is a copy, as on a GPU"
    def to_cpu(t):
        with _disable_current_modes(): copied = torch.empty_like(t)
        live.count(copied, 0)
        return copied.copy_(t)
    def save_on_cpu(): return torch.autograd.graph.saved_tensors_hooks(to_cpu, torch.clone)
    return patch.object(checkpointing, 'save_on_cpu', save_on_cpu)


class SecondBatch(Callback):
    "Forgets the peak when the second batch begins: what adapts keeps room for the optimizer's state in the first"
    def __init__(self, reset_peak): self.reset_peak = reset_peak

    def before_batch(self):
        if self.iter == 1: self.reset_peak()


def peak(learn):
    "Returns the most bytes that are alive in a step, without the weights, their gradients and the buffers"
    live = LiveBytes(learn.model)
    def reset_peak(): live.peak = live.now
    with ExitStack() as stack:
        stack.enter_context(live)
        stack.enter_context(as_on_a_gpu(live))
        fit_batch(learn, 2, SecondBatch(reset_peak))
    return live.peak


def measure_learner(name, rounds):
    "Returns the figures of each kind of training: peak bytes, and seconds once a round"
    learners = {kind: make(name, kind) for kind in kinds}
    learners['whole'].add_cb(Activations())
    fit_batch(learners['whole'])
    room = learners['whole'].activations.mb/2
    learners['whole'].remove_cb(Activations)
    search(learners['checkpointing'], room)
    for learn in learners.values(): fit_batch(learn)  # the first step is slower
    live = {kind: peak(learn) for kind, learn in learners.items()}
    times = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, learn in learners.items(): times[kind].append(seconds(learn))
    return dict(live=live, time=times)


def measure(rounds):
    return dict(models={name: measure_learner(name, rounds) for name in learner_names})
