"""What ActivationCheckpointing costs under a limit of memory: the time of a training step relative to the whole batch,
and the passes that fail until it has found its blocks"""
import time

import torch
from fastai.basics import SGD, Callback, DataLoader, DataLoaders, Learner
from fastai.vision.learner import create_unet_model, create_vision_model
from fastai.vision.models import resnet18, resnet34
from fastxtend_accum.all import ActivationCheckpointing
from fastxtend_accum.demo import Activations

from .cases import Batches

shares = 0.9, 0.75, 0.5  # of the memory that the activations of the batch take


def make(name):
    "Returns a model and a batch for it"
    torch.manual_seed(0)
    if name == 'resnet34':
        return create_vision_model(resnet34, 10, pretrained=False), torch.randn(32, 3, 64, 64)
    if name == 'unet':
        return create_unet_model(resnet18, 3, (64, 64), pretrained=False), torch.randn(16, 3, 64, 64)
    import timm  # which the tests do without
    vit = timm.create_model('vit_tiny_patch16_224', img_size=64, patch_size=8, num_classes=10, drop_path_rate=.1)
    return vit, torch.randn(32, 3, 64, 64)


def mean_of_squares(pred, targ): return pred.square().mean()


def learner(name, *cbs):
    "Returns a Learner whose epoch is one batch"
    model, inputs = make(name)
    samples = [(o, 0) for o in inputs]
    dls = DataLoaders(DataLoader(samples, bs=len(samples)), [])
    return Learner(dls, model, mean_of_squares, opt_func=SGD, cbs=[*cbs])


def step(learn, lr=1e-6):
    "A fit of one batch"
    with learn.no_bar(), learn.no_logging(): learn.fit(1, lr)


def fit_batch(learn, n, lr, *cbs):
    "An epoch of `n` times the same batch"
    loaders = learn.dls.loaders
    batch = next(iter(loaders[0]))
    learn.dls.loaders = [Batches([batch], n), *loaders[1:]]
    with learn.no_bar(), learn.no_logging(): learn.fit(1, lr, cbs=cbs)
    learn.dls.loaders = loaders


def now():
    "Returns the seconds of the clock on a machine with a GPU, else those of the CPU"
    if not torch.cuda.is_available(): return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class BatchTimes(Callback):
    "Notes when each batch begins and ends"
    def __init__(self):
        self.begins = []
        self.ends = []

    def before_batch(self): self.begins.append(now())
    def after_batch(self): self.ends.append(now())


def seconds(learn, lr=1e-6, n=4):
    "Returns the time of the last of `n` batches: in the fourth, nothing is checked, as in most of an epoch"
    times = BatchTimes()
    fit_batch(learn, n, lr, times)
    return times.ends[n-1]-times.begins[n-1]


def settle(learn, step=step):
    """Takes steps until one recomputes as many blocks as the one before, and no pass fails. Returns how many passes
    have failed"""
    blocks = learn.activation_checkpointing
    n_passes = 0
    def count_pass(m, args):
        nonlocal n_passes
        if m.training: n_passes += 1
    hook = learn.model.register_forward_pre_hook(count_pass)
    n_steps = 0
    n_failed = 0
    level = None
    while True:
        step(learn)
        n_steps += 1
        is_settled = n_passes-n_steps == n_failed and blocks.level == level
        if is_settled: break
        n_failed = n_passes-n_steps
        level = blocks.level
    hook.remove()
    return n_failed


def measure(name, rounds):
    """Returns the seconds of a step, once a round, by kind; and for each share of memory the passes that have failed,
    and what was found"""
    whole = learner(name, Activations())
    step(whole)
    learners = dict(whole=learner(name), blocks=learner(name, ActivationCheckpointing(adapt=False)))
    failed = {}
    found = {}
    for share in shares:
        limit = Activations(whole.activations.mb*share)
        learn = learner(name, limit, ActivationCheckpointing())
        failed[str(share)] = settle(learn)
        found[str(share)] = learn.activation_checkpointing.describe_level()
        learn.remove_cb(Activations)  # it would take time
        learners[str(share)] = learn
    for learn in learners.values(): step(learn)  # the first step is slower
    times = {kind: [] for kind in learners}
    for _ in range(rounds):
        for kind, learn in learners.items(): times[kind].append(seconds(learn))
    return dict(times=times, failed=failed, found=found)
