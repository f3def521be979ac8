"Ordinary Learners, each with what a check of it has to name as reasons: none if windows train like whole batches"
import wandb
from fastai.callback.wandb import WandbCallback
from fastai.tabular.all import Categorify, CategoryBlock, Normalize, TabularDataLoaders, tabular_learner

from common import *
from test_what_differs import classifier, language_learner, learner_with_plain_head


def learner(*cbs, bs=8, layers=(), loss=None, **kwargs):
    set_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), *layers, nn.Tanh(), nn.Linear(8, 1))
    samples = list(zip(torch.randn(64, 5), torch.randn(64, 1)))
    dls = DataLoaders(DataLoader(samples, bs=bs, shuffle=True), DataLoader(samples[:20], bs=16))
    return Learner(dls, net, loss or MSELossFlat(), cbs=cbs, **kwargs)


def adamw_of_torch(params, **kwargs): return OptimWrapper(params, torch.optim.AdamW, **kwargs)


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


ORDINARY = {
    'windows': lambda: learner(GradientAccumulation(32)),
    'one batch': lambda: learner(GradientAccumulation(8)),
    'smaller windows': lambda: learner(GradientAccumulation(8), bs=32),
    'micro-batches': lambda: learner(GradientAccumulation(micro_batch_size=8), bs=32),
    'windows of micro-batches': lambda: learner(GradientAccumulation(32, micro_batch_size=4)),
    'auto': lambda: learner(GradientAccumulation(micro_batch_size='auto'), bs=32),
    'schedule': lambda: learner(GradientAccumulationSchedule(8, 32)),
    'gradient cache': lambda: learner(GradientCache(8), bs=32),
    'recomputed dropout': lambda: learner(all_blocks(lambda m: [m[0]]), bs=32, layers=[nn.Dropout()]),
    'optimizer of torch': lambda: learner(GradientAccumulation(32), opt_func=adamw_of_torch),
    'AutoResume': lambda: learner(GradientAccumulation(32), AutoResume()),
    'W&B': with_wandb,
    'bfloat16': lambda: learner(GradientAccumulation(32)).to_bf16(),
    'after lr_find': after_lr_find,
    'fine_tune': frozen_with_discriminative_rates,
    'MixUp in micro-batches': lambda: learner(MixUp(), GradientAccumulation(micro_batch_size=8), bs=32),
    'tabular': tabular,
    'vision': lambda: learner_with_plain_head(8, [GradientAccumulation(32)]),
    'text classifier': lambda: classifier(8, [GradientAccumulation(32)]),
    'language model': lambda: language_learner(8, [GradientAccumulation(32)])}

BATCHNORM = 'BatchNorm1d can only see 3 samples at a time'
MODEL = 'the model in training mode, for example dropout'
REASONS = {
    'tabular': [BATCHNORM],
    'text classifier': [BATCHNORM, MODEL],
    'language model': [MODEL]}
