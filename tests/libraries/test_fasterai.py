"""fasterai: callbacks that change the loss, and that follow a schedule

    python -m venv fasterai && fasterai/bin/pip install fastai fasterai pytest pytest-xdist hypothesis
    RECORD=1 fasterai/bin/python -m pytest -m libraries tests/libraries/test_fasterai.py"""
from fasterai.core.criteria import large_final
from fasterai.core.schedule import one_cycle
from fasterai.distill.all import KnowledgeDistillationCallback
from fasterai.prune.all import PruneCallback
from fasterai.regularize.all import RegularizeCallback
from fasterai.sparse.all import SparsifyCallback

from large_batch import *


def net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def distill():
    set_seed(5)
    def loss(pred, teacher_pred, **kwargs): return F.mse_loss(pred, teacher_pred)
    return KnowledgeDistillationCallback(net(), loss)


def regularize(): return RegularizeCallback(large_final, 'filter', weight=.01)
def sparsify(): return SparsifyCallback(.5, 'weight', 'local', large_final, one_cycle)


def prune():
    "It plans its steps by the length of the training loader, and replaces the parameters before each of them"
    return PruneCallback(.5, one_cycle, 'local', large_final)


CASES = {
    'regularize': (regularize, small, split),
    'distill': (distill, small, split),
    'sparsify': (sparsify, small, split),
    'prune, micro_batch_size': (prune, split)}


@pytest.mark.parametrize('name', CASES)
def test_exact(name):
    make_cb, *ways = CASES[name]
    def make(bs):
        dls = random_loaders(bs, 96, (3, 10, 10))
        return Learner(dls, net(), CrossEntropyLossFlat(), opt_func=SGD, cbs=make_cb())
    measured('fasterai', name, difference(make, *ways))
