"""tsai: a time series Learner, its callbacks that change the batch or the loss

    python -m venv tsai
    tsai/bin/pip install fastai==2.8.7 'fastcore<2' tsai pyts==0.13.0 pytest pytest-xdist hypothesis
    RECORD=1 tsai/bin/python -m pytest -m libraries tests/libraries/test_tsai.py"""
import tsai.all as ts
import tsai.utils

from large_batch import *


def without_batch_effects(m):
    "Takes dropout out of `m`, and puts GroupNorm in the place of BatchNorm"
    for o in list(m.modules()):
        for name, child in o.named_children():
            if 'Dropout' in type(child).__name__: child.p = 0.
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                setattr(o, name, nn.GroupNorm(1, child.num_features))


def settings(bs):
    "Returns arguments for a Learner of 128 series"
    return dict(splits=(list(range(96)), list(range(96, 128))), bs=[bs, 32], metrics=[], opt_func=SGD)


def random_series(rng):
    return rng.standard_normal((128, 3, 24), dtype=np.float32)


def maker(make_cb=noop, arch=ts.ResNetPlus, **config):
    "With a loss function of its own: tsai's Learners share one, which WeightedPerSampleLoss changes until a fit ends"
    def make(bs):
        rng = np.random.default_rng(1)
        series = random_series(rng)
        labels = rng.integers(3, size=128).astype(str)
        learn = ts.TSClassifier(
            series, labels, tfms=[None, ts.TSClassification()], arch=arch, arch_config=config,
            loss_func=CrossEntropyLossFlat(), cbs=make_cb(), **settings(bs))
        without_batch_effects(learn.model)
        return learn
    return make


def regressor(bs):
    series = random_series(np.random.default_rng(1))
    learn = ts.TSRegressor(series, series.mean((1, 2)), tfms=[None, ts.TSRegression()], arch=ts.TSTPlus, **settings(bs))
    without_batch_effects(learn.model)
    return learn


mvp = partial(ts.MVP, dropout=0., save_best=False)  # values are masked, and predicted; the loss averages over them


def n_masked(learn): return learn.MVP.mask.sum()
def weighted(): return ts.WeightedPerSampleLoss(torch.linspace(.1, 3, 96))


def subsample():
    "16 samples of 32"
    tsai.utils.rng = np.random.default_rng(3)  # which `set_seed` does not reach
    return ts.BatchSubsampler(sample_pct=.5)


CASES = {
    'TSClassifier, InceptionTimePlus': (maker(arch=ts.InceptionTimePlus), small, split, cache),
    'TSClassifier, TSTPlus': (maker(arch=ts.TSTPlus), small, split, cache),
    'TSClassifier, LSTM': (maker(arch=ts.LSTM), small, split, cache),
    'TSRegressor': (regressor, small, split, cache),
    'MVP, micro_batch_size=8': (maker(mvp, nf=8), partial(split, num_items=n_masked)),
    'MVP, GradientCache(8)': (maker(mvp, nf=8), cache),
    'WeightedPerSampleLoss': (maker(weighted, nf=8), cache),
    'IntraClassCutMix1d': (maker(ts.IntraClassCutMix1d, nf=8), split, cache),
    'BatchSubsampler': (maker(subsample, nf=8), split, cache)}


@pytest.mark.parametrize('name', CASES)
def test_exact(name, monkeypatch):
    monkeypatch.setattr(ts.MVP, 'per_sample', ('mask',), raising=False)
    make, *ways = CASES[name]
    measured('tsai', name, difference(make, *ways))
