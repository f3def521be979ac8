"""fastMONAI: segmentation of volumes with its two kinds of DataLoaders, its loss functions, and a network of MONAI

    python -m venv monai
    monai/bin/pip install fastai monai torchio scikit-image mlflow-skinny pytest pytest-xdist hypothesis
    monai/bin/pip install --no-deps fastMONAI imagedata
    RECORD=1 monai/bin/python -m pytest -m libraries tests/libraries/test_fastmonai.py"""
import fastMONAI.vision_all as fm
import nibabel
from monai.losses import DiceCELoss, DiceFocalLoss, DiceLoss
from monai.networks.nets import UNet

from large_batch import *


def save_volume(o, path):
    nibabel.save(nibabel.Nifti1Image(o.astype(np.float32), np.eye(4)), path)
    return str(path)


@pytest.fixture(scope='module')
def table(tmp_path_factory):
    "Files of 40 volumes with a ball in each, of different sizes"
    folder = tmp_path_factory.mktemp('volumes')
    rng = np.random.default_rng(1)
    axis = np.arange(16)
    grid = np.stack(np.meshgrid(axis, axis, axis, indexing='ij'))
    rows = []
    for i in range(40):
        center = rng.integers(5, 11, (3, 1, 1, 1))
        radius = 1+i%32/6
        inside = ((grid-center)**2).sum(0) < radius**2
        image = save_volume(inside+rng.standard_normal(inside.shape), folder/f'image{i}.nii.gz')
        mask = save_volume(inside, folder/f'mask{i}.nii.gz')
        rows.append((image, mask, i >= 32))
    return pd.DataFrame(rows, columns=['image', 'mask', 'is_valid'])


def learner(dls, make_loss):
    net = UNet(3, 1, 1, channels=(4, 8), strides=(2,), num_res_units=1, norm='instance')
    return Learner(dls, net, fm.CustomLoss(make_loss(sigmoid=True)), opt_func=SGD)


def whole(table, make_loss, bs):
    "Whole volumes, in fastai's DataLoaders, shuffled"
    block = fm.MedDataBlock(
        (fm.ImageBlock(cls=fm.MedImage), fm.MedMaskBlock()),
        splitter=fm.ColSplitter('is_valid'),
        get_x=fm.ColReader('image'),
        get_y=fm.ColReader('mask'))
    return learner(block.dataloaders(table, bs=bs, val_bs=8, num_workers=0), make_loss)


def patches(table, make_loss, bs):
    "Three patches of each volume, drawn as they are asked for"
    config = fm.PatchConfig(
        patch_size=[8, 8, 8], samples_per_volume=3, queue_length=96, queue_num_workers=0, sampler_type='uniform',
        apply_reorder=False)
    dls = fm.MedPatchDataLoaders.from_df(
        table, 'image', 'mask', valid_col='is_valid', patch_config=config, pre_patch_tfms=[fm.ZNormalization()], bs=bs,
        device='cpu')
    return learner(dls, make_loss)


EXACT = {
    'DiceLoss': DiceLoss,
    'DiceCELoss': DiceCELoss,
    'DiceFocalLoss': DiceFocalLoss,
    'TverskyFocalLoss, gamma=1': partial(fm.TverskyFocalLoss, gamma=1)}
INEXACT = {
    'DiceLoss over the batch': partial(DiceLoss, batch=True),
    'DiceCELoss over the batch': partial(DiceCELoss, batch=True),
    'TverskyFocalLoss': partial(fm.TverskyFocalLoss, gamma=2),
    'DiceLoss, a sum': partial(DiceLoss, reduction='sum')}


@pytest.mark.parametrize('loss', EXACT)
@pytest.mark.parametrize('make', [whole, patches])
def test_exact(make, loss, table, recwarn):
    largest = difference(partial(make, table, EXACT[loss]), small, split, cache, lr=.1)
    measured('fastMONAI', f'{loss}, {make.__name__}', largest)
    assert not [o for o in recwarn if 'not exact' in str(o.message)]


@pytest.mark.parametrize('loss', INEXACT)
def test_inexact_losses_are_found_and_a_cache_computes_them_exactly(loss, table):
    make = partial(patches, table, INEXACT[loss])
    with pytest.warns(UserWarning, match='not exact.*GradientCache'): assert difference(make, small) > 1e-5
    measured('fastMONAI', f'{loss}, GradientCache', difference(make, cache))
