"""fastai's segmentation on small data in float32, against the large batch. For its other applications, see
test_what_differs.py, and for what their losses and callbacks do, loss_table.py and test_fastai_callbacks.py"""
from fastai.vision.all import TensorImage, TensorMask

from common import *


def segmentation_learner(bs, *cbs):
    "Pixels, of which some are ignored: a different number in each picture"
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(128, 3, 8, 8, generator=generator)
    masks = torch.randint(4, (128, 8, 8), generator=generator)
    for i in range(128): masks[i, :i%7] = 255
    tfms = [[lambda i: TensorImage(images[i])], [lambda i: TensorMask(masks[i])]]
    datasets = Datasets(range(128), tfms, splits=[range(96), range(96, 128)])
    dls = datasets.dataloaders(bs=bs, shuffle=False, drop_last=False, num_workers=0)
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    return Learner(dls, m, CrossEntropyLossFlat(axis=1, ignore_index=255), cbs=cbs)


def test_segmentation():
    "Weights, losses and values of epochs agree; those of the small batch alone do not"
    large = segmentation_learner(32)
    windows = segmentation_learner(8, GradientAccumulation(32))
    alone = segmentation_learner(8)
    for learn in (large, windows, alone): fit(learn, 2, .01, method='fit_one_cycle')
    assert len(losses(large)) == 6
    assert_same_weights(windows, large, 2e-5)
    assert_same(losses(windows), losses(large), 1e-4)
    assert_same(floats(windows.recorder.values), floats(large.recorder.values), 1e-3)
    assert_apart(alone, large)
