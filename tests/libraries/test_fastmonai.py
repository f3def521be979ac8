"""fastMONAI: segmentation of volumes with its two kinds of DataLoaders, its loss functions, and a network of MONAI

    python -m venv monai
    monai/bin/pip install fastai monai torchio scikit-image mlflow-skinny pytest pytest-xdist hypothesis
    monai/bin/pip install --no-deps fastMONAI imagedata
    RECORD=1 monai/bin/python -m pytest -m libraries tests/libraries/test_fastmonai.py"""
import monai.losses, nibabel
import fastMONAI.vision_all as fm
from large_batch import *
from monai.networks.nets import UNet

@pytest.fixture(scope='module')
def table(tmp_path_factory):
    "Files of 40 volumes with a ball in each, of different sizes"
    folder,g,rows = tmp_path_factory.mktemp('volumes'),np.random.default_rng(1),[]
    grid = np.stack(np.meshgrid(*[np.arange(16)]*3, indexing='ij'))
    for i in range(40):
        inside = ((grid-g.integers(5, 11, (3, 1, 1, 1)))**2).sum(0) < (1+i%32/6)**2
        paths = [str(folder/f'{kind}{i}.nii.gz') for kind in ('image','mask')]
        for path,o in zip(paths, (inside+g.standard_normal(inside.shape), inside)):
            nibabel.save(nibabel.Nifti1Image(o.astype(np.float32), np.eye(4)), path)
        rows.append((*paths, i >= 32))
    return pd.DataFrame(rows, columns=['image','mask','is_valid'])

def learner(dls, loss_func):
    net = UNet(3, 1, 1, channels=(4, 8), strides=(2,), num_res_units=1, norm='instance')
    return Learner(dls, net, fm.CustomLoss(loss_func(sigmoid=True)), opt_func=SGD)

def whole(table, loss_func, bs):
    "Whole volumes, in fastai's DataLoaders, shuffled"
    block = fm.MedDataBlock((fm.ImageBlock(cls=fm.MedImage), fm.MedMaskBlock()), splitter=fm.ColSplitter('is_valid'),
                         get_x=fm.ColReader('image'), get_y=fm.ColReader('mask'))
    return learner(block.dataloaders(table, bs=bs, val_bs=8, num_workers=0), loss_func)

def patches(table, loss_func, bs):
    "Three patches of each volume, drawn as they are asked for"
    config = fm.PatchConfig(patch_size=[8, 8, 8], samples_per_volume=3, queue_length=96, queue_num_workers=0,
                         sampler_type='uniform', apply_reorder=False)
    dls = fm.MedPatchDataLoaders.from_df(table, 'image', 'mask', valid_col='is_valid', patch_config=config,
                                      pre_patch_tfms=[fm.ZNormalization()], bs=bs, device='cpu')
    return learner(dls, loss_func)

def of(name, **kwargs): return partial(getattr(monai.losses, name), **kwargs)

exact = {**{o:of(o) for o in ('DiceLoss','DiceCELoss','DiceFocalLoss')},
         'TverskyFocalLoss, gamma=1':partial(fm.TverskyFocalLoss, gamma=1)}
inexact = {**{f'{o} over the batch':of(o, batch=True) for o in ('DiceLoss','DiceCELoss')},
           'TverskyFocalLoss':partial(fm.TverskyFocalLoss, gamma=2), 'DiceLoss, a sum':of('DiceLoss', reduction='sum')}

@pytest.mark.parametrize('loss', exact)
@pytest.mark.parametrize('dls', [whole, patches])
def test_exact(dls, loss, table, recwarn):
    measured('fastMONAI', f'{loss}, {dls.__name__}', difference(partial(dls, table, exact[loss]), *kinds, lr=.1))
    assert not [o for o in recwarn if 'not exact' in str(o.message)]

@pytest.mark.parametrize('loss', inexact)
def test_inexact_losses_are_found_and_a_cache_computes_them_exactly(loss, table):
    make = partial(patches, table, inexact[loss])
    with pytest.warns(UserWarning, match='not exact.*GradientCache'): assert difference(make, small) > 1e-5
    measured('fastMONAI', f'{loss}, GradientCache', difference(make, cache))
