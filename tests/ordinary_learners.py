"Ordinary Learners, each with what a check of it has to name as reasons: none if windows train like whole batches"
import wandb
from fastai.callback.wandb import WandbCallback
from fastai.collab import CollabDataLoaders, collab_learner
from fastai.tabular.all import Categorify, CategoryBlock, Normalize, TabularDataLoaders, tabular_learner
from fastai.vision.all import TensorImage, TensorMask

from common import *
from test_what_differs import classifier, language_learner, learner_with_plain_head


def regression(n=64, n_out=1):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(n, 5, generator=generator)
    targets = torch.randn(n, n_out, generator=generator)
    return list(zip(inputs, targets))


def learner(*cbs, bs=8, layers=(), loss=None, samples=None, n_out=1, **kwargs):
    set_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), *layers, nn.Tanh(), nn.Linear(8, n_out))
    samples = samples or regression()
    dls = DataLoaders(DataLoader(samples, bs=bs, shuffle=True), DataLoader(samples[:20], bs=16))
    return Learner(dls, net, loss or MSELossFlat(), cbs=cbs, **kwargs)


def adamw_of_torch(params, **kwargs): return OptimWrapper(params, torch.optim.AdamW, **kwargs)


def ignores_and_weighs():
    "Some labels count nothing, others more"
    inputs = [x for x, _ in regression()]
    labels = torch.tensor([-100, 0, 1, 2]).repeat(16)
    samples = list(zip(inputs, labels))
    loss = CrossEntropyLossFlat(weight=tensor([1., 2., 3.]))
    return learner(GradientAccumulation(32), samples=samples, n_out=3, loss=loss)


def after_lr_find():
    learn = learner(GradientAccumulation(32))
    with quiet(learn): learn.lr_find(show_plot=False, num_it=8)
    return learn


def frozen_with_discriminative_rates():
    "As `fine_tune` makes it for its first epoch"
    def in_two(m): return [params(m[0]), params(m[1:])]
    learn = learner(GradientAccumulation(32), splitter=in_two, lr=slice(1e-4, 1e-2))
    learn.freeze()
    return learn


def with_wandb():
    wandb.init(mode='offline')
    return learner(WandbCallback(log_preds=False), GradientAccumulation(32))


def tabular():
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(
        a=rng.normal(size=64),
        kind=rng.choice(list('xyz'), 64),
        y=rng.choice(['no', 'yes'], 64)))
    dls = TabularDataLoaders.from_df(
        df,
        procs=[Categorify, Normalize],
        cat_names=['kind'],
        cont_names=['a'],
        y_names='y',
        y_block=CategoryBlock(),
        bs=8)
    return tabular_learner(dls, layers=[8], metrics=accuracy, cbs=GradientAccumulation(32))


def collab():
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(
        user=rng.integers(8, size=64),
        item=rng.integers(9, size=64),
        rating=rng.random(64)*5))
    dls = CollabDataLoaders.from_df(df, bs=8, num_workers=0)
    return collab_learner(dls, n_factors=4, y_range=(0, 5.5), cbs=GradientAccumulation(32))


def segmentation():
    "Pixels, of which some are ignored: a different number in each picture"
    images = torch.randn(64, 3, 8, 8)
    masks = torch.randint(4, (64, 8, 8))
    for i in range(64): masks[i, :i%7] = 255
    tfms = [[lambda i: TensorImage(images[i])], [lambda i: TensorMask(masks[i])]]
    datasets = Datasets(list(range(64)), tfms, splits=[list(range(48)), list(range(48, 64))])
    m = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    loss = CrossEntropyLossFlat(axis=1, ignore_index=255)
    return Learner(datasets.dataloaders(bs=8, num_workers=0), m, loss, cbs=GradientAccumulation(32))


ORDINARY = {
    'windows': lambda: learner(GradientAccumulation(32)),
    'one batch': lambda: learner(GradientAccumulation(8)),
    'smaller windows': lambda: learner(GradientAccumulation(8), bs=32),
    'micro-batches': lambda: learner(GradientAccumulation(micro_batch_size=8), bs=32),
    'windows of micro-batches': lambda: learner(GradientAccumulation(32, micro_batch_size=4)),
    'auto': lambda: learner(GradientAccumulation(micro_batch_size='auto'), bs=32),
    'carry': lambda: learner(GradientAccumulation(32, remainder='carry')),
    'drop': lambda: learner(GradientAccumulation(32, remainder='drop')),
    'schedule': lambda: learner(GradientAccumulationSchedule(8, 32)),
    'gradient cache': lambda: learner(GradientCache(8), bs=32),
    'recomputed dropout': lambda: learner(all_blocks(lambda m: [m[0]]), bs=32, layers=[nn.Dropout()]),
    'clipping': lambda: learner(GradientClip(.1), GradientAccumulation(32), opt_func=SGD),
    'optimizer of torch': lambda: learner(GradientAccumulation(32), opt_func=adamw_of_torch),
    'ignored and weighted labels': ignores_and_weighs,
    'AutoResume': lambda: learner(GradientAccumulation(32), AutoResume()),
    'early stopping': lambda: learner(EarlyStoppingCallback(patience=2), GradientAccumulation(32)),
    'W&B': with_wandb,
    'bfloat16': lambda: learner(GradientAccumulation(32)).to_bf16(),
    'after lr_find': after_lr_find,
    'fine_tune': frozen_with_discriminative_rates,
    'MixUp in micro-batches': lambda: learner(MixUp(), GradientAccumulation(micro_batch_size=8), bs=32),
    'tabular': tabular,
    'collaborative filtering': collab,
    'segmentation': segmentation,
    'vision': lambda: learner_with_plain_head(8, [GradientAccumulation(32)]),
    'text classifier': lambda: classifier(8, [GradientAccumulation(32)]),
    'language model': lambda: language_learner(8, [GradientAccumulation(32)])}

BATCHNORM = 'BatchNorm1d sees 3 samples at a time'
MODEL = 'the model in training mode, for example dropout'
REASONS = {
    'tabular': [BATCHNORM],
    'text classifier': [BATCHNORM, MODEL],
    'language model': [MODEL]}
