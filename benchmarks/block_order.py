"""Which blocks `ActivationCheckpointing('auto')` should recompute first: those at the beginning of the model, or those that keep most bytes?

For a share of the bytes that all blocks keep for the backward pass beside their inputs, the share of the blocks' FLOPs that is computed twice:
python -m benchmarks.block_order"""
from statistics import median
from fastai.vision.all import *
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import DistilBertConfig, DistilBertForSequenceClassification
import torchvision.models as tv

from fastxtend_accum.checkpointing import *

def storage(o): return o.untyped_storage().data_ptr()

def bytes_and_flops(model, x):
    "What each block of `model` keeps beside its inputs and weights, and its FLOPs, in a forward pass"
    blocks,groups = find_blocks(model)
    weights,kept_bytes,flops = {*map(storage, model.parameters())},[0]*len(blocks),[0]*len(blocks)
    def measured(i, forward):
        def run(*args, **kwargs):
            kept = {}
            def keep(t):
                kept[storage(t)] = t.untyped_storage().nbytes()
                return t
            with FlopCounterMode(display=False) as counter, saved_tensors_hooks(keep, noop): res = forward(*args, **kwargs)
            flops[i] += counter.get_total_flops()
            kept_bytes[i] += sum(kept[o] for o in kept.keys()-weights-{*map(storage, all_tensors((args, kwargs)))})
            return res
        return run
    for m,o in groups.items(): m.forward = o.forward
    for i,m in enumerate(blocks): m.forward = measured(i, m.forward)
    model.train()(x)
    return kept_bytes,flops

def recomputed(order, kept_bytes, flops, share):
    "The share of `flops` in the first blocks in `order` that keep this share of the bytes"
    saved,res = 0,0
    for i in order:
        if saved >= share*sum(kept_bytes): break
        saved,res = saved+kept_bytes[i],res+flops[i]
    return res/sum(flops)

if __name__ == '__main__':
    x,ratios = torch.randn(2, 3, 128, 128),[]
    for name,model,x in (
        ('resnet34', tv.resnet34(), x), ('efficientnet_b0', tv.efficientnet_b0(), x), ('densenet121', tv.densenet121(), x),
        ('convnext_tiny', tv.convnext_tiny(), x), ('swin_t', tv.swin_t(), x), ('vit_b_16', tv.vit_b_16(image_size=128), x),
        ('DistilBERT', DistilBertForSequenceClassification(DistilBertConfig()), torch.randint(0, 100, (2, 64))),
        ('U-Net of resnet34', create_unet_model(resnet34, 2, (128, 128), pretrained=False), x)):
        sizes,flops = bytes_and_flops(model, x)
        n = len(sizes)
        cells = []
        for share in .25,.5,.75:
            a,b = (recomputed(o, sizes, flops, share) for o in (range(n), sorted(range(n), key=lambda i: -sizes[i])))
            ratios.append(b/a)
            cells.append(f'{a:.2f} / {b:.2f}')
        print(f'| {name} | {n} |', ' | '.join(cells), '|')
    print(f'by bytes over in order: median {median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}')
