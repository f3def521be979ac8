"""tsai: a time series Learner, its callbacks that change the batch or the loss

    python -m venv tsai
    tsai/bin/pip install fastai==2.8.7 'fastcore<2' tsai pyts==0.13.0 pytest pytest-xdist hypothesis
    RECORD=1 tsai/bin/python -m pytest -m libraries tests/libraries/test_tsai.py"""
import tsai.all as ts, tsai.utils
from large_batch import *

def maker(callback=noop, arch='ResNetPlus', is_class=True):
    "A Learner with a loss function of its own: tsai's share one, which WeightedPerSampleLoss changes until a fit ends"
    def make(bs):
        g = np.random.default_rng(1)
        X,y = g.standard_normal((128, 3, 24), dtype=np.float32),g.integers(3, size=128).astype(str)
        kind,target,loss_func = ts.TSClassifier,ts.TSClassification(),CrossEntropyLossFlat()
        if not is_class: kind,target,loss_func,y = ts.TSRegressor,ts.TSRegression(),None,X.mean((1, 2))
        config = dict(nf=8) if arch == 'ResNetPlus' else {}
        learn = kind(X, y, splits=(list(range(96)), list(range(96, 128))), tfms=[None, target], bs=[bs, 32], metrics=[],
                     arch=getattr(ts, arch), arch_config=config, opt_func=SGD, loss_func=loss_func, cbs=callback())
        plain(learn.model)
        return learn
    return make

mvp = partial(ts.MVP, dropout=0., save_best=False)  # values are masked, and predicted; the loss averages over them
count = dict(num_items=lambda learn: learn.MVP.mask.sum())

def subsample():
    tsai.utils.rng = np.random.default_rng(3)  # which `set_seed` does not reach
    return ts.BatchSubsampler(sample_pct=.5)
def weighted(): return ts.WeightedPerSampleLoss(torch.linspace(.1, 3, 96))

cases = {
    **{f'TSClassifier, {o}':(maker(arch=o), kinds, {}) for o in ('InceptionTimePlus','TSTPlus','LSTM')},
    'TSRegressor':(maker(arch='TSTPlus', is_class=False), kinds, {}),
    'MVP, micro_batch_size=8':(maker(mvp), [split], count),
    'MVP, GradientCache(8)':(maker(mvp), [cache], {}),
    'WeightedPerSampleLoss':(maker(weighted), [cache], {}),
    'IntraClassCutMix1d':(maker(ts.IntraClassCutMix1d), [split, cache], {}),
    'BatchSubsampler':(maker(subsample), [split, cache], {})}  # 16 samples of 32

@pytest.fixture
def per_sample(monkeypatch): monkeypatch.setattr(ts.MVP, 'per_sample', ('mask',), raising=False)

@pytest.mark.parametrize('name', cases)
def test_exact(name, per_sample):
    make,names,kwargs = cases[name]
    measured('tsai', name, difference(make, *names, **kwargs))
