"""What ActivationCheckpointing costs under a limit of memory: the time of a training step relative to the whole batch,
and the passes that fail until it has found its blocks"""
import time

import torch

from .cases import Batches

shares = .9,.75,.5

def make(name):
    "A model, and a batch for it"
    from fastai.vision.learner import create_unet_model, create_vision_model
    from fastai.vision.models import resnet18, resnet34
    torch.manual_seed(0)
    if name == 'resnet34': return create_vision_model(resnet34, 10, pretrained=False),torch.randn(32, 3, 64, 64)
    if name == 'unet': return create_unet_model(resnet18, 3, (64, 64), pretrained=False),torch.randn(16, 3, 64, 64)
    import timm
    vit = timm.create_model('vit_tiny_patch16_224', img_size=64, patch_size=8, num_classes=10, drop_path_rate=.1)
    return vit,torch.randn(32, 3, 64, 64)

def learner(name, *cbs):
    "A Learner whose epoch is one batch"
    from fastai.basics import SGD, DataLoader, DataLoaders, Learner
    model,x = make(name)
    dls = DataLoaders(DataLoader([(o,0) for o in x], bs=len(x)), [])
    return Learner(dls, model, lambda pred, targ: pred.square().mean(), opt_func=SGD, cbs=[*cbs])

def step(learn, lr=1e-6):
    "A fit of one batch"
    with learn.no_bar(), learn.no_logging(): learn.fit(1, lr)

def seconds(learn, lr=1e-6, n=4):
    """Seconds of the last of `n` batches: in the fourth, nothing is checked, as in most of an epoch. Of the clock on a
    GPU, else of the CPU"""
    from fastai.basics import Callback
    def now():
        if torch.cuda.is_available(): torch.cuda.synchronize()
        return (time.perf_counter if torch.cuda.is_available() else time.process_time)()
    times = []
    def note(self): times.append(now())
    fit_batch(learn, n, lr, Callback(before_batch=note, after_batch=note))
    return times[2*n-1]-times[2*n-2]

def fit_batch(learn, n, lr, *cbs):
    "An epoch of `n` times the same batch"
    loaders = learn.dls.loaders
    learn.dls.loaders = [Batches([next(iter(loaders[0]))], n), *loaders[1:]]
    with learn.no_bar(), learn.no_logging(): learn.fit(1, lr, cbs=cbs)
    learn.dls.loaders = loaders

def settle(learn, step=step):
    """Take steps until they run as many blocks again as the one before, and none fails; returns how many passes have
    failed"""
    blocks,passes,steps,failed,level = learn.activation_checkpointing,[],0,0,None
    hook = learn.model.register_forward_pre_hook(lambda m, args: passes.append(m.training))
    while True:
        step(learn)
        steps += 1
        if sum(passes)-steps == failed and blocks.level == level: break
        failed,level = sum(passes)-steps,blocks.level
    hook.remove()
    return failed

def measure(name, rounds):
    "Seconds of a step, once a round, by kind; the passes that have failed for each share of memory, and what was found"
    from fastxtend_accum.all import ActivationCheckpointing
    from fastxtend_accum.demo import Activations
    whole = learner(name, Activations())
    step(whole)
    learners = dict(whole=learner(name), blocks=learner(name, ActivationCheckpointing(adapt=False)))
    failed,found = {},{}
    for share in shares:
        limit = Activations(whole.activations.mb*share)
        learn = learners[str(share)] = learner(name, limit, ActivationCheckpointing())
        failed[str(share)] = settle(learn)
        found[str(share)] = learn.activation_checkpointing.how()
        learn.remove_cb(Activations)  # it would take time
    for o in learners.values(): step(o)  # the first step is slower
    times = {k:[] for k in learners}
    for _ in range(rounds):
        for k,o in learners.items(): times[k].append(seconds(o))
    return dict(times=times, failed=failed, found=found)
