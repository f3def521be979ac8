"""KeremTurgutlu's self_supervised: losses over the batch, and callbacks that read the batch after the step

    python -m venv selfsup && selfsup/bin/pip install fastai kornia timm pytest hypothesis && selfsup/bin/pip install --no-deps self-supervised
    RECORD=1 selfsup/bin/python -m pytest -m libraries tests/libraries/test_self_supervised.py"""
import pytest
from large_batch import *

pytestmark = pytest.mark.libraries
lib = 'self-supervised'

@pytest.fixture
def images(): return torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(1))

def encoder(): return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
def augmentations(n=2): return [Pipeline([lambda x, s=s: x + s*torch.randn_like(x)], split_idx=0) for s in [.1, .2, .3][:n]]

def make(images, model, callback, bs):
    ds = [(o, 0) for o in images]
    dls = DataLoaders(DataLoader(ds, bs=bs, drop_last=True), DataLoader(ds[:16], bs=16))
    return Learner(dls, model(), nn.MSELoss(), opt_func=SGD, cbs=callback())

def simclr(images):
    from self_supervised.vision.simclr import SimCLR, SimCLRModel
    from self_supervised.layers import create_mlp_module
    return partial(make, images, lambda: SimCLRModel(encoder(), create_mlp_module(32, 16, 8)), lambda: SimCLR(augmentations()))

def moco(images):
    from self_supervised.vision.moco import MOCO, MoCoModel
    from self_supervised.layers import create_mlp_module
    return partial(make, images, lambda: MoCoModel(encoder(), create_mlp_module(32, 16, 8)), lambda: MOCO(augmentations(), K=64))

def barlow(images):
    from self_supervised.vision.barlow_twins import BarlowTwins, BarlowTwinsModel
    from self_supervised.layers import create_mlp_module
    return partial(make, images, lambda: BarlowTwinsModel(encoder(), create_mlp_module(32, 16, 8)), lambda: BarlowTwins(augmentations()))

@pytest.mark.parametrize('kind', [simclr, moco, barlow])
def test_gradient_cache_is_exact(kind, images):
    d = difference(kind(images), 'GradientCache(8)', lr=1e-3)
    record(lib, f'{kind.__name__}, GradientCache', d)
    assert d < 1e-6

@pytest.mark.parametrize('kind,says', [(moco, 'accumulation is not exact'), (simclr, 'could not check'), (barlow, 'could not check')])
def test_accumulation_is_another_task_and_says_so(kind, says, images):
    "The loss compares the samples of a micro-batch. With two views of each in a batch, micro-batches cannot be joined, so nothing more can be said"
    with pytest.warns(UserWarning, match=says): d = difference(kind(images), 'loader of 8', lr=1e-3)
    assert d > 1e-4

@pytest.mark.parametrize('kind,error', [(simclr, IndexError), (barlow, ValueError)])
def test_a_batch_that_a_callback_enlarges_is_not_split(kind, error, images):
    "SimCLR's targets point outside of the piece, and Barlow Twins' inputs have more rows than there are samples"
    with pytest.raises(error): train(kind(images), *ways['micro_batch_size=8']())

def test_what_reads_the_batch_after_the_step_sees_a_micro_batch(images):
    "MoCo's queue gets 8 keys in a step, not 32"
    large,small = (train(moco(images), *o, lr=1e-3) for o in ((32,), ways['loader of 8']()))
    assert large.moco.queue_ptr == 0 and small.moco.queue_ptr == 8*4 % 64 and len(large.recorder.losses) == len(small.recorder.losses) == 4
