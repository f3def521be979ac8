"How the scripts in this folder compare: the same fit with the large batch, and accumulated"
import json, os, random, warnings
from importlib.metadata import version
from pathlib import Path

import numpy as np, torch
from fastai.basics import *
from fastai.callback.all import *
from fastxtend_accum.all import *

kinds = {'loader of 8':lambda **kwargs: (8, GradientAccumulation(32, **kwargs)),
         'micro_batch_size=8':lambda **kwargs: (32, GradientAccumulation(32, micro_batch_size=8, **kwargs)),
         'GradientCache(8)':lambda **kwargs: (32, GradientCache(8, **kwargs))}

def plain(model):
    "`model` without dropout, and with GroupNorm for BatchNorm: with them, micro-batches are another computation"
    for m in model.modules():
        for name,o in m.named_children():
            if isinstance(o, nn.modules.dropout._DropoutNd): o.p = 0.
            if isinstance(o, nn.modules.batchnorm._BatchNorm): setattr(m, name, nn.GroupNorm(1, o.num_features))
    return model

def weights(learn): return torch.cat([p.detach().flatten().double() for p in learn.model.parameters()])

def seed(n):
    set_seed(n)
    random.seed(n)

def train(make, bs, *cbs, n_epoch=2, lr=1e-2):
    "`make(bs)` is a Learner that yields its samples in order; returns it after a fit"
    seed(42)
    learn = make(bs)
    start = weights(learn)
    seed(7)
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(n_epoch, lr, cbs=list(cbs))
    end = weights(learn)
    assert len(end) != len(start) or (end-start).abs().max() > 1e-4  # it moved, or was pruned
    return learn

def difference(make, *names, lr=1e-2, **kwargs):
    "Largest difference of a weight between the large batch of 32 and `kinds`, after the fit"
    large = weights(train(make, 32, lr=lr))
    runs = [weights(train(make, *kinds[o](**kwargs), lr=lr)) for o in names or ('loader of 8', 'micro_batch_size=8')]
    return max(float((o-large).abs().max()) for o in runs)

def record(library, what, value):
    "With RECORD=1, write what was measured to results.json"
    if not os.environ.get('RECORD'): return
    path = Path(__file__).parent/'results.json'
    results = json.loads(path.read_text())
    entry = results.setdefault(library, {})
    entry['versions'] = {o:version(o) for o in (library, 'fastai', 'torch')}
    entry.setdefault('differences', {})[what] = value
    path.write_text(json.dumps(results, indent=1, sort_keys=True)+'\n')

__all__ = [o for o in globals() if not o.startswith(('_', 'test'))]  # fastcore's test_eq and the like are no tests
