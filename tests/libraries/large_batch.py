"The same fit with the large batch, and accumulated"
import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest
from fastai.basics import *
from fastai.callback.all import *
from fastxtend_accum.all import *

pytestmark = pytest.mark.libraries


# Ways to see 32 samples a step, 8 at a time: the batch size, and a callback

def small(**kwargs): return 8, GradientAccumulation(32, **kwargs)
def split(**kwargs): return 32, GradientAccumulation(32, micro_batch_size=8, **kwargs)
def cache(**kwargs): return 32, GradientCache(8, **kwargs)


def random_loaders(bs, n, shape):
    "Returns DataLoaders of `n` samples in 4 classes, and of 16 of them"
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(n, *shape, generator=generator)
    labels = torch.randint(4, (n,), generator=generator)
    samples = list(zip(inputs, labels))
    return DataLoaders(DataLoader(samples, bs=bs), DataLoader(samples[:16], bs=16))


def weights(learn):
    return torch.cat([p.detach().flatten().double() for p in learn.model.parameters()])


def train(make, bs, *cbs, lr=1e-2):
    "`make(bs)` is a Learner that yields its samples in order; returns its weights after a fit"
    set_seed(42)
    learn = make(bs)
    start = weights(learn)
    set_seed(7)
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(2, lr, cbs=list(cbs))
    end = weights(learn)
    was_pruned = len(end) != len(start)
    assert was_pruned or (end-start).abs().max() > 1e-4
    return end


def difference(make, *ways, lr=1e-2, **kwargs):
    "Returns the largest difference of a weight between the large batch of 32 and these ways, after the fit"
    large = train(make, 32, lr=lr)
    differences = []
    for way in ways:
        accumulated = train(make, *way(**kwargs), lr=lr)
        differences.append((accumulated-large).abs().max().item())
    return max(differences)


def measured(library, what, value, tol=1e-5):
    "Asserts that a difference is below `tol`; with RECORD=1, it is written to results.json"
    assert value <= tol
    if not os.environ.get('RECORD'): return
    path = Path(__file__).with_name('results.json')
    results = json.loads(path.read_text())
    entry = results.setdefault(library, dict(differences={}))
    entry['versions'] = {o: version(o) for o in (library, 'fastai', 'torch')}
    entry['differences'][what] = value
    path.write_text(json.dumps(results, indent=1, sort_keys=True)+'\n')
