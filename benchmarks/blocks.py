"Live bytes and time of one training step, with all activations kept, checkpointed, offloaded, or in pieces of an eighth of the batch"
import time
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from .counts import LiveBytes

bs,pixels,tokens,width = 16,128,128,256

class Transformer(nn.Module):
    "Six of PyTorch's encoder layers"
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4*width, batch_first=True, norm_first=True)
        self.encoder,self.head = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False),nn.Linear(width, 10)
    def forward(self, x): return self.head(self.encoder(x).mean(1))

def make(name):
    "A model, and a batch for it"
    from fastai.vision.learner import create_unet_model, create_vision_model
    from fastai.vision.models import resnet18, resnet50
    torch.manual_seed(0)
    if name == 'transformer': return Transformer(),torch.randn(bs, tokens, width)
    x = torch.randn(bs, 3, pixels, pixels)
    if name == 'unet': return create_unet_model(resnet18, 3, (pixels//2, pixels//2), pretrained=False),x[..., ::2, ::2].contiguous()
    return create_vision_model(dict(resnet18=resnet18, resnet50=resnet50)[name], 10, pretrained=False),x


def callbacks(way):
    from fastxtend_accum.all import ActivationCheckpointing, GradientAccumulation
    return dict(plain=[], checkpointed=[ActivationCheckpointing()], offloaded=[ActivationCheckpointing(offload=True)],
                pieces=[GradientAccumulation(micro_batch_size=bs//8)])[way]

ways = 'plain','checkpointed','offloaded','pieces'

def train(model, x, way):
    "A Learner takes one step of SGD on one batch"
    from fastai.basics import SGD, DataLoader, DataLoaders, Learner
    dls = DataLoaders(DataLoader([(o,0) for o in x], bs=bs), [])
    learn = Learner(dls, model, lambda pred, targ: pred.square().mean(), opt_func=SGD, cbs=callbacks(way))
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-6)

def as_on_a_gpu(live):
    "Copies on the CPU do not count as bytes of the device, and what comes back is a copy on the device: `offload` as `live` would see it on a GPU"
    def to_cpu(t):
        with _disable_current_modes(): copied = torch.empty_like(t)
        live.count(copied, 0)
        return copied.copy_(t)
    from fastxtend_accum import checkpointing
    return patch.multiple(checkpointing, to_cpu=to_cpu, from_cpu=torch.clone)

def live_bytes(name):
    "The most bytes that are alive in a step, without the weights, their gradients and the buffers"
    def peak(way):
        model,x = make(name)
        for p in model.parameters(): p.grad = torch.zeros_like(p)
        with LiveBytes(model) as live, as_on_a_gpu(live): train(model, x, way)
        return live.peak
    return {way:peak(way) for way in ways}

def times(name, rounds):
    "Seconds of CPU time of a step, each way once a round"
    model,x = make(name)
    train(model, x, 'plain')  # the first step is slower
    res = {way:[] for way in ways}
    for _ in range(rounds):
        for way in ways:
            start = time.process_time()
            train(model, x, way)
            res[way].append(time.process_time()-start)
    return res
