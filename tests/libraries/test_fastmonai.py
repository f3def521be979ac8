"""fastMONAI: segmentation of volumes with its two kinds of DataLoaders, its loss functions, and a network of MONAI

    python -m venv monai && monai/bin/pip install fastai monai torchio scikit-image mlflow-skinny pytest hypothesis
    monai/bin/pip install --no-deps fastMONAI imagedata
    RECORD=1 monai/bin/python -m pytest -m libraries tests/libraries/test_fastmonai.py"""
import pytest
from large_batch import *

pytestmark = pytest.mark.libraries

@pytest.fixture(scope='module')
def table(tmp_path_factory):
    "The files of 40 volumes with a ball in each, which is larger from one to the next"
    import nibabel, pandas as pd
    folder,g,rows = tmp_path_factory.mktemp('volumes'),np.random.default_rng(1),[]
    grid = np.stack(np.meshgrid(*[np.arange(16)]*3, indexing='ij'))
    for i in range(40):
        inside = ((grid-g.integers(5, 11, (3, 1, 1, 1)))**2).sum(0) < (1+i%32/6)**2
        paths = [str(folder/f'{kind}{i}.nii.gz') for kind in ('image','mask')]
        for path,o in zip(paths, (inside+g.standard_normal(inside.shape), inside)): nibabel.save(nibabel.Nifti1Image(o.astype(np.float32), np.eye(4)), path)
        rows.append((*paths, i >= 32))
    return pd.DataFrame(rows, columns=['image','mask','is_valid'])

def net():
    from monai.networks.nets import UNet
    return UNet(3, 1, 1, channels=(4, 8), strides=(2,), num_res_units=1, norm='instance')

def learner(dls, loss_func): return Learner(dls, net(), loss_func(), opt_func=SGD)

def whole(table, bs, loss_func):
    "Whole volumes, in fastai's DataLoaders, shuffled"
    from fastMONAI.vision_all import ColReader, ColSplitter, ImageBlock, MedDataBlock, MedImage, MedMaskBlock
    block = MedDataBlock(blocks=(ImageBlock(cls=MedImage), MedMaskBlock()), splitter=ColSplitter('is_valid'), get_x=ColReader('image'), get_y=ColReader('mask'))
    return learner(block.dataloaders(table, bs=bs, val_bs=8, num_workers=0), loss_func)

def patches(table, bs, loss_func):
    "Three patches of each volume, drawn as they are asked for, in DataLoaders without `loaders`"
    from fastMONAI.vision_all import MedPatchDataLoaders, PatchConfig, ZNormalization
    config = PatchConfig(patch_size=[8, 8, 8], samples_per_volume=3, queue_length=96, queue_num_workers=0, sampler_type='uniform', apply_reorder=False)
    dls = MedPatchDataLoaders.from_df(table, 'image', 'mask', valid_col='is_valid', patch_config=config, pre_patch_tfms=[ZNormalization()], bs=bs, device='cpu')
    assert not hasattr(dls, 'loaders')
    return learner(dls, loss_func)

def custom(name, **kwargs):
    "MONAI's loss `name` as fastMONAI's users pass it"
    def make():
        import monai.losses
        from fastMONAI.vision_all import CustomLoss
        return CustomLoss(getattr(monai.losses, name)(sigmoid=True, **kwargs))
    return make

def tversky(gamma):
    "fastMONAI's own"
    def make():
        from fastMONAI.vision_all import CustomLoss, TverskyFocalLoss
        return CustomLoss(TverskyFocalLoss(sigmoid=True, gamma=gamma))
    return make

exact = {'DiceLoss':custom('DiceLoss'), 'DiceCELoss':custom('DiceCELoss'), 'DiceFocalLoss':custom('DiceFocalLoss'), 'TverskyFocalLoss, gamma=1':tversky(1)}
inexact = {'DiceLoss over the batch':custom('DiceLoss', batch=True), 'DiceCELoss over the batch':custom('DiceCELoss', batch=True), 'TverskyFocalLoss':tversky(2),
           "DiceLoss, a sum":custom('DiceLoss', reduction='sum')}

def measured(what, d, tol=1e-5):
    record('fastMONAI', what, d)
    assert d < tol

@contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings('error', 'accumulation is not exact')
        yield

@pytest.mark.parametrize('loss', exact)
@pytest.mark.parametrize('dls', [whole, patches])
def test_exact(dls, loss, table):
    with no_warning(): measured(f'{loss}, {dls.__name__}', difference(lambda bs: dls(table, bs, exact[loss]), *kinds, lr=.1))

@pytest.mark.parametrize('loss', inexact)
def test_inexact_losses_are_found(loss, table):
    with pytest.warns(UserWarning, match='not exact for this loss.*GradientCache'): assert difference(lambda bs: patches(table, bs, inexact[loss]), 'loader of 8') > 1e-5

@pytest.mark.parametrize('loss', inexact)
def test_a_cache_computes_them_exactly(loss, table):
    measured(f'{loss}, GradientCache', difference(lambda bs: patches(table, bs, inexact[loss]), 'GradientCache(8)'))

@pytest.mark.parametrize('kind', ['loader of 8', 'micro_batch_size=8'])
def test_a_sum_says_so_itself(kind, table):
    "With the attribute reduction='sum' it is exact"
    def summed():
        loss = inexact['DiceLoss, a sum']()
        loss.reduction = 'sum'
        return loss
    with no_warning(): measured(f"DiceLoss, a sum with reduction='sum', {kind}", difference(lambda bs: patches(table, bs, summed), kind, lr=1e-3))

def test_lr_find(table):
    "In DataLoaders without `loaders`"
    learn = patches(table, 8, exact['DiceLoss'])
    with learn.no_bar(), learn.no_logging(): assert learn.lr_find(show_plot=False, num_it=4)
