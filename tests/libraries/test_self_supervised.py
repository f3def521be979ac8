"""KeremTurgutlu's self_supervised: losses over the batch

    python -m venv selfsup && selfsup/bin/pip install fastai kornia timm pytest pytest-xdist hypothesis
    selfsup/bin/pip install --no-deps self-supervised
    RECORD=1 selfsup/bin/python -m pytest -m libraries tests/libraries/test_self_supervised.py"""
from self_supervised.layers import create_mlp_module
from self_supervised.vision.barlow_twins import BarlowTwins, BarlowTwinsModel
from self_supervised.vision.moco import MOCO, MoCoModel
from self_supervised.vision.simclr import SimCLR, SimCLRModel

from large_batch import *

KINDS = dict(
    simclr=(SimCLRModel, SimCLR),
    moco=(MoCoModel, partial(MOCO, K=64)),
    barlow=(BarlowTwinsModel, BarlowTwins))


def noisy(scale):
    def add_noise(x): return x+scale*torch.randn_like(x)
    return Pipeline([add_noise], split_idx=0)


def maker(kind):
    make_model, make_cb = KINDS[kind]
    def make(bs):
        encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        m = make_model(encoder, create_mlp_module(32, 16, 8))
        cb = make_cb([noisy(.1), noisy(.2)])
        return Learner(random_loaders(bs, 64, (3, 16, 16)), m, nn.MSELoss(), opt_func=SGD, cbs=cb)
    return make


@pytest.mark.parametrize('kind', KINDS)
def test_gradient_cache_is_exact(kind):
    measured('self-supervised', f'{kind}, GradientCache', difference(maker(kind), cache, lr=1e-3), 1e-6)


@pytest.mark.parametrize('kind', ['simclr', 'moco'])
def test_accumulation_is_another_task_and_says_so(kind):
    "The loss compares the samples of a micro-batch"
    with pytest.warns(UserWarning, match='accumulation is not exact'):
        assert difference(maker(kind), small, lr=1e-3) > 1e-4
