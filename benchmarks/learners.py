"""A training step of fastai's learners, of each kind: the most bytes alive, time, and how far the gradient is off

On a GPU if there is one, of 12 GB, with larger inputs. Weights are random: nothing is downloaded."""
from contextlib import nullcontext
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .counts import LiveBytes
from .ways import fit_batch, seconds, settle, step as fit_step

names = 'resnet34','convnext','unet','text','language','tabular','contrastive'
kinds = 'whole','checkpointing','all_blocks','offloaded','split'
on_gpu = torch.cuda.is_available()
device = torch.device('cuda' if on_gpu else 'cpu')
size = dict(bs=32, pixels=224, words=400) if on_gpu else dict(bs=16, pixels=64, words=144)

def loaders(*parts):
    "A batch of samples to train on, none to validate; on the device, so that the model is timed and not a loader"
    from fastai.basics import DataLoader, DataLoaders
    samples = [*zip(*(o.to(device) for o in parts))]
    return DataLoaders(*(DataLoader(o, bs=len(samples)) for o in (samples, [])), device=device)

def images(n_out=None):
    "Random images, whose targets are classes or, with `n_out`, masks"
    bs,px = size['bs'],size['pixels']
    ys = torch.randint(n_out, (bs, px, px)) if n_out else torch.arange(bs)%10
    return loaders(torch.randn(bs, 3, px, px), ys)

def classifier(arch, **kwargs):
    from fastai.vision.all import CrossEntropyLossFlat, vision_learner
    return vision_learner(images(), arch, n_out=10, pretrained=False, loss_func=CrossEntropyLossFlat(), **kwargs)

def resnet34(**kwargs):
    from fastai.vision.all import models
    return classifier(models.resnet34, **kwargs)

def convnext(**kwargs):
    return classifier('convnext_tiny' if on_gpu else 'convnext_atto', **kwargs)

def unet(**kwargs):
    from fastai.vision.all import CrossEntropyLossFlat, models, unet_learner
    loss_func = CrossEntropyLossFlat(axis=1)
    return unet_learner(images(3), models.resnet34, n_out=3, pretrained=False, loss_func=loss_func, **kwargs)

def vocab(): return [f'w{i}' for i in range(2000)]

def text(**kwargs):
    from fastai.text.all import AWD_LSTM, CrossEntropyLossFlat, text_classifier_learner
    bs,n = size['bs'],size['words']
    xs = torch.randint(2, 2000, (bs, n))
    dls = loaders(xs, torch.arange(bs)%2)
    dls.vocab = vocab()
    loss_func = CrossEntropyLossFlat()
    return text_classifier_learner(dls, AWD_LSTM, seq_len=72, n_out=2, pretrained=False, loss_func=loss_func, **kwargs)

def language(**kwargs):
    from fastai.text.all import AWD_LSTM, DataLoaders, LMDataLoader, TensorText, language_model_learner
    bs,n = size['bs'],72  # fastai's default
    dl = LMDataLoader([TensorText(torch.randint(2, 2000, (bs*(n+1),)))], bs=bs, seq_len=n)
    dls = DataLoaders(dl, dl, device=device)
    dls.vocab = vocab()
    return language_model_learner(dls, AWD_LSTM, pretrained=False, **kwargs)

def tabular(**kwargs):
    import numpy as np, pandas as pd
    from fastai.tabular.all import Categorify, CategoryBlock, Normalize, TabularDataLoaders, tabular_learner
    rng,n = np.random.default_rng(0),size['bs']*64
    df = pd.DataFrame({'kind':rng.choice(list('abcdef'), n), 'a':rng.normal(size=n), 'b':rng.normal(size=n),
                       'y':rng.choice(list('uv'), n)})
    dls = TabularDataLoaders.from_df(df, procs=[Categorify, Normalize], cat_names=['kind'], cont_names=['a', 'b'],
                                     y_names='y', y_block=CategoryBlock(), valid_idx=[0], bs=n-1, device=device)
    return tabular_learner(dls, **kwargs)

def contrastive(**kwargs):
    "Both views of an image are a sample; its partner is to be found among those of all samples"
    import timm
    from fastai.basics import Learner, Module
    from torch.nn import functional as F
    class TwoViews(Module):
        def __init__(self):
            self.encoder = timm.create_model('convnext_tiny' if on_gpu else 'convnext_atto', num_classes=128)
        def forward(self, x): return F.normalize(self.encoder(x.flatten(0, 1)), dim=-1).unflatten(0, x.shape[:2])
    def info_nce(pred, targ):
        logits = pred[:,0] @ pred[:,1].T/.1
        return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))
    bs,px = size['bs'],size['pixels']
    return Learner(loaders(torch.randn(bs, 2, 3, px, px), torch.zeros(bs)), TwoViews(), info_nce, **kwargs)

def as_on_a_gpu(live):
    "What `offload` moves to the CPU does not count, and what comes back is a copy: as `live` would see it on a GPU"
    def to_cpu(t):
        with _disable_current_modes(): copied = torch.empty_like(t)
        live.count(copied, 0)
        return copied.copy_(t)
    from fastxtend_accum import checkpointing
    return patch.multiple(checkpointing, to_cpu=to_cpu, from_cpu=torch.clone)

def callbacks(kind, bs):
    from fastxtend_accum.all import ActivationCheckpointing, GradientAccumulation
    return dict(whole=lambda: [], checkpointing=lambda: [ActivationCheckpointing()],
                all_blocks=lambda: [ActivationCheckpointing(adapt=False)],
                offloaded=lambda: [ActivationCheckpointing(offload=True, adapt=False)],
                split=lambda: [GradientAccumulation(micro_batch_size=-(-bs//4))])[kind]()

def make(name, kind):
    "A Learner whose epoch is one batch, the same weights each time, all of them trained"
    from fastai.basics import SGD, set_seed
    set_seed(0)
    learn = globals()[name](opt_func=SGD)
    learn.model.to(device)
    learn.unfreeze()
    learn.add_cbs(callbacks(kind, learn.dls.train.bs))
    for p in learn.model.parameters(): p.grad = torch.zeros_like(p)
    return learn

def step(learn):
    "A fit of one batch; all steps begin with the same weights"
    from fastai.basics import set_seed
    set_seed(0)
    fit_step(learn, 0.)

def gradient(learn):
    "The gradient with which the optimizer would step"
    res = []
    def keep(): res.extend(p.grad.detach().flatten().cpu().double() for p in learn.model.parameters())
    with patch.object(learn.opt, 'step', keep): step(learn)
    return torch.cat(res)

def peak(learn):
    """The most bytes that are alive in a step, without the weights, their gradients and the buffers: in the second one,
    since what adapts keeps room for the optimizer's state in the first"""
    from fastai.basics import Callback
    def begin(self):
        if on_gpu and self.iter == 1: torch.cuda.reset_peak_memory_stats()
        elif self.iter == 1: live.peak = live.now
    before = torch.cuda.memory_allocated() if on_gpu else 0
    with nullcontext() if on_gpu else LiveBytes(learn.model) as live, nullcontext() if on_gpu else as_on_a_gpu(live):
        fit_batch(learn, 2, 0., Callback(before_batch=begin))
    return torch.cuda.max_memory_allocated()-before if on_gpu else live.peak

def search(learn, mb):
    """Let ActivationCheckpointing find how many blocks the batch takes where activations have room for `mb` MB, which
    holds afterwards as well; returns that in words"""
    from fastxtend_accum.demo import Activations
    learn.add_cb(Activations(mb))
    settle(learn, step)
    learn.remove_cb(Activations)
    return learn.activation_checkpointing.how()

def kept(learn):
    "MB that the forward pass keeps for the backward pass"
    from fastxtend_accum.demo import Activations
    learn.add_cb(Activations())
    step(learn)
    mb = learn.activations.mb
    learn.remove_cb(Activations)
    return mb

def measure(name, rounds):
    """The figures of each kind: peak bytes, seconds once a round, and how far the gradient is off, relative to the
    whole batch"""
    learners = {kind:make(name, kind) for kind in kinds}
    how = search(learners['checkpointing'], kept(learners['whole'])/2)
    for o in learners.values(): step(o)  # the first step is slower
    whole = gradient(learners['whole'])
    off = {kind:float((gradient(o)-whole).norm()/whole.norm()) for kind,o in learners.items()}
    live = {kind:peak(o) for kind,o in learners.items()}
    times = {kind:[] for kind in kinds}
    for _ in range(rounds):
        for kind,o in learners.items(): times[kind].append(seconds(o, 0.))
    return dict(bs=learners['whole'].dls.train.bs, how=how, off=off, live=live, time=times)
