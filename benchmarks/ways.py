"What exact=True costs under a limit of memory: the time of a training step relative to the whole batch, and that of the search in such steps"
import time
from statistics import median

import torch

shares = .9,.75,.5

def make(name):
    "A model, and a batch for it"
    from fastai.vision.learner import create_unet_model, create_vision_model
    from fastai.vision.models import resnet18, resnet34
    torch.manual_seed(0)
    if name == 'resnet34': return create_vision_model(resnet34, 10, pretrained=False),torch.randn(32, 3, 64, 64)
    if name == 'unet': return create_unet_model(resnet18, 3, (64, 64), pretrained=False),torch.randn(16, 3, 64, 64)
    import timm
    return timm.create_model('vit_tiny_patch16_224', img_size=64, patch_size=8, num_classes=10, drop_path_rate=.1),torch.randn(32, 3, 64, 64)

def learner(name, *cbs):
    "A Learner whose epoch is one batch"
    from fastai.basics import SGD, DataLoader, DataLoaders, Learner
    model,x = make(name)
    dls = DataLoaders(DataLoader([(o,0) for o in x], bs=len(x)), [])
    return Learner(dls, model, lambda pred, targ: pred.square().mean(), opt_func=SGD, cbs=[*cbs])

def step(learn):
    "Seconds of CPU time of one step"
    start = time.process_time()
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-6)
    return time.process_time()-start

def measure(name, rounds):
    "Seconds of a step of each way, once a round, and of each search; and what was found"
    from fastxtend_accum.all import ActivationCheckpointing, GradientAccumulation
    from fastxtend_accum.demo import Activations
    whole = learner(name, Activations())
    step(whole)
    learners,search,found = dict(whole=learner(name), blocks=learner(name, ActivationCheckpointing())),{},{}
    for share in shares:
        learn = learners[str(share)] = learner(name, Activations(whole.activations.mb*share), GradientAccumulation(exact=True))
        search[str(share)] = step(learn)
        accum,n = learn.gradient_accumulation,len(learn.dls.train_ds)
        found[str(share)] = accum.way.how(n)
        learn.remove_cb(Activations)  # it would take time
    for o in learners.values(): step(o)  # the first step is slower
    times = {k:[] for k in learners}
    for _ in range(rounds):
        for k,o in learners.items(): times[k].append(step(o))
    for k in search: search[k] -= median(times[k])
    return dict(times=times, search=search, found=found)
