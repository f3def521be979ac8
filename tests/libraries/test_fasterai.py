"""fasterai: callbacks that change the loss, and that follow a schedule

    python -m venv fasterai && fasterai/bin/pip install fastai fasterai pytest pytest-xdist hypothesis
    RECORD=1 fasterai/bin/python -m pytest -m libraries tests/libraries/test_fasterai.py"""
import pytest
from large_batch import *

pytestmark = pytest.mark.libraries

def net():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(8, 4))

def make(bs, callback):
    g = torch.Generator().manual_seed(1)
    ds = list(zip(torch.randn(96, 3, 10, 10, generator=g), torch.randint(4, (96,), generator=g)))
    dls = DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds[:16], bs=16))
    return Learner(dls, net(), CrossEntropyLossFlat(), opt_func=SGD, cbs=callback())

def regularize():
    from fasterai.regularize.all import RegularizeCallback
    from fasterai.core.criteria import large_final
    return RegularizeCallback(large_final, 'filter', weight=.01)

def distill():
    from fasterai.distill.all import KnowledgeDistillationCallback
    seed(5)
    def loss(pred, teacher_pred, **kwargs): return F.mse_loss(pred, teacher_pred)
    return KnowledgeDistillationCallback(net(), loss)

def sparsify():
    from fasterai.sparse.all import SparsifyCallback
    from fasterai.core.criteria import large_final
    from fasterai.core.schedule import one_cycle
    return SparsifyCallback(.5, 'weight', 'local', large_final, one_cycle)

@pytest.mark.parametrize('callback', [regularize, distill, sparsify])
def test_exact(callback):
    d = difference(partial(make, callback=callback))
    record('fasterai', callback.__name__, d)
    assert d < 1e-5

def prune():
    "It plans its steps by the length of the training loader, and replaces the parameters before each of them"
    from fasterai.prune.all import PruneCallback
    from fasterai.core.criteria import large_final
    from fasterai.core.schedule import one_cycle
    return PruneCallback(.5, one_cycle, 'local', large_final)

def test_pruning_from_the_large_loader():
    d = difference(partial(make, callback=prune), 'micro_batch_size=8')
    record('fasterai', 'prune, micro_batch_size', d)
    assert d < 1e-5

def test_pruning_from_the_small_loader_stops_early():
    "24 steps are planned, and 6 taken: fewer filters are gone"
    large,small = (train(partial(make, callback=prune), *o) for o in ((32,), kinds['loader of 8']()))
    assert len(weights(large)) < len(weights(small)) < sum(p.numel() for p in net().parameters())
