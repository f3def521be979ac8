"""KeremTurgutlu's self_supervised: losses over the batch, and callbacks that read the batch after the step

    python -m venv selfsup && selfsup/bin/pip install fastai kornia timm pytest pytest-xdist hypothesis
    selfsup/bin/pip install --no-deps self-supervised
    RECORD=1 selfsup/bin/python -m pytest -m libraries tests/libraries/test_self_supervised.py"""
import pytest
from large_batch import *

pytestmark = pytest.mark.libraries

@pytest.fixture
def images(): return torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(1))

def encoder(): return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())

def augmentations(): return [Pipeline([lambda x, s=s: x + s*torch.randn_like(x)], split_idx=0) for s in (.1, .2)]

def make(images, model, callback, bs):
    from self_supervised.layers import create_mlp_module
    ds = [(o, 0) for o in images]
    dls = DataLoaders(DataLoader(ds, bs=bs, drop_last=True), DataLoader(ds[:16], bs=16))
    m = model(encoder(), create_mlp_module(32, 16, 8))
    return Learner(dls, m, nn.MSELoss(), opt_func=SGD, cbs=callback(augmentations()))

def simclr(images):
    from self_supervised.vision.simclr import SimCLR, SimCLRModel
    return partial(make, images, SimCLRModel, SimCLR)

def moco(images):
    from self_supervised.vision.moco import MOCO, MoCoModel
    return partial(make, images, MoCoModel, partial(MOCO, K=64))

def barlow(images):
    from self_supervised.vision.barlow_twins import BarlowTwins, BarlowTwinsModel
    return partial(make, images, BarlowTwinsModel, BarlowTwins)

@pytest.mark.parametrize('method', [simclr, moco, barlow])
def test_gradient_cache_is_exact(method, images):
    d = difference(method(images), 'GradientCache(8)', lr=1e-3)
    record('self-supervised', f'{method.__name__}, GradientCache', d)
    assert d < 1e-6

@pytest.mark.parametrize('method,says', [
    (moco, 'accumulation is not exact'), (simclr, 'could not check'), (barlow, 'could not check')])
def test_accumulation_is_another_task_and_says_so(method, says, images):
    """The loss compares the samples of a micro-batch. With two views of each in a batch, micro-batches cannot be joined,
    so nothing more can be said"""
    with pytest.warns(UserWarning, match=says): d = difference(method(images), 'loader of 8', lr=1e-3)
    assert d > 1e-4

@pytest.mark.parametrize('method,error', [(simclr, IndexError), (barlow, ValueError)])
def test_a_batch_that_a_callback_enlarges_is_not_split(method, error, images):
    "SimCLR's targets point outside of the micro-batch; Barlow Twins' inputs have more rows than there are samples"
    with pytest.raises(error): train(method(images), *kinds['micro_batch_size=8']())

def test_what_reads_the_batch_after_the_step_sees_the_last_one_of_the_window(images):
    "MoCo's queue gets 8 keys in a step, not 32"
    large,small = (train(moco(images), *o, lr=1e-3) for o in ((32,), kinds['loader of 8']()))
    assert large.moco.queue_ptr == 0 and small.moco.queue_ptr == 8*4%64
    assert len(large.recorder.losses) == len(small.recorder.losses) == 4
