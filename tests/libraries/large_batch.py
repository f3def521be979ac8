"The same fit with the large batch, and accumulated"
import json, os, random
from importlib.metadata import version
from pathlib import Path

import numpy as np, pytest, torch
from fastai.basics import *
from fastai.callback.all import *
from fastxtend_accum.all import *

pytestmark = pytest.mark.libraries

kinds = {'loader of 8':lambda **kwargs: (8, GradientAccumulation(32, **kwargs)),
         'micro_batch_size=8':lambda **kwargs: (32, GradientAccumulation(32, micro_batch_size=8, **kwargs)),
         'GradientCache(8)':lambda **kwargs: (32, GradientCache(8, **kwargs))}
small,split,cache = kinds

def plain(model):
    "`model` without dropout, and with GroupNorm for BatchNorm"
    for m in model.modules():
        for name,o in m.named_children():
            if hasattr(o, 'p') and 'Dropout' in type(o).__name__: o.p = 0.
            if isinstance(o, nn.modules.batchnorm._BatchNorm): setattr(m, name, nn.GroupNorm(1, o.num_features))

def random_loaders(bs, n, shape, *target):
    "Of `n` samples, and of 16 of them; targets are classes, if no shape is given"
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, *shape, generator=g)
    ds = list(zip(x, torch.randn(n, *target, generator=g) if target else torch.randint(4, (n,), generator=g)))
    return DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds[:16], bs=16))

def weights(learn): return torch.cat([p.detach().flatten().double() for p in learn.model.parameters()])

def train(make, bs, *cbs, lr=1e-2):
    "`make(bs)` is a Learner that yields its samples in order; returns it after a fit"
    set_seed(42)
    learn = make(bs)
    start = weights(learn)
    set_seed(7)
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(2, lr, cbs=list(cbs))
    assert len(end := weights(learn)) != len(start) or (end-start).abs().max() > 1e-4  # it moved, or was pruned
    return learn

def both(make, kind, **kwargs): return [train(make, *o, **kwargs) for o in ((32,), kinds[kind]())]

def difference(make, *names, lr=1e-2, **kwargs):
    "Largest difference of a weight between the large batch of 32 and `kinds`, after the fit"
    large = weights(train(make, 32, lr=lr))
    runs = [weights(train(make, *kinds[o](**kwargs), lr=lr)) for o in names or (small, split)]
    return max(float((o-large).abs().max()) for o in runs)

def measured(library, what, value, tol=1e-5):
    "Asserts that a difference is below `tol`; with RECORD=1, it is written to results.json"
    assert value <= tol
    if not os.environ.get('RECORD'): return
    path = Path(__file__).parent/'results.json'
    results = json.loads(path.read_text())
    entry = results.setdefault(library, dict(differences={}))
    entry['versions'] = {o:version(o) for o in (library, 'fastai', 'torch')}
    entry['differences'][what] = value
    path.write_text(json.dumps(results, indent=1, sort_keys=True)+'\n')

__all__ = [o for o in globals() if not o.startswith(('_', 'test'))]  # fastcore's test_eq and the like are no tests
