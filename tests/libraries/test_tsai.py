"""tsai: a time series Learner, its callbacks that change the batch or the loss, and its graph

    python -m venv tsai && tsai/bin/pip install fastai==2.8.7 'fastcore<2' tsai pyts==0.13.0 pytest hypothesis
    RECORD=1 tsai/bin/python -m pytest -m libraries tests/libraries/test_tsai.py"""
import pytest
from large_batch import *

pytestmark = pytest.mark.libraries

def series():
    "96 series for training and 32 for validation: 3 variables, 24 steps, 3 classes"
    g = np.random.default_rng(1)
    return g.standard_normal((128, 3, 24), dtype=np.float32),g.integers(3, size=128).astype(str),(list(range(96)), list(range(96, 128)))

def make(bs, callback=list, batch_tfms=None, arch=None):
    """Shuffled, as is tsai's default: the order of an epoch does not depend on the batch size. The loss function is the Learner's own: tsai's
    Learners share one, which WeightedPerSampleLoss changes until the fit ends"""
    from tsai.all import ResNetPlus, TSClassification, TSClassifier
    X,y,splits = series()
    learn = TSClassifier(X, y, splits=splits, tfms=[None, TSClassification()], batch_tfms=batch_tfms, bs=[bs, 32], arch=arch or ResNetPlus,
                         arch_config={} if arch else dict(nf=8), loss_func=CrossEntropyLossFlat(), opt_func=SGD, metrics=[], cbs=callback())
    plain(learn.model)
    return learn

def measured(what, d, tol=1e-5):
    record('tsai', what, d)
    assert d < tol

def architecture(name):
    import tsai.all
    return getattr(tsai.all, name)

@pytest.mark.parametrize('arch', ['InceptionTimePlus', 'TSTPlus', 'LSTM'])
def test_classifier(arch): measured(f'TSClassifier, {arch}', difference(partial(make, arch=architecture(arch)), *kinds))

def test_regressor():
    from tsai.all import TSRegression, TSRegressor
    def make(bs):
        X,_,splits = series()
        learn = TSRegressor(X, X.mean((1, 2)), splits=splits, tfms=[None, TSRegression()], bs=[bs, 32], arch=architecture('TSTPlus'), opt_func=SGD, metrics=[])
        plain(learn.model)
        return learn
    measured('TSRegressor', difference(make, *kinds))

# MVP: values are masked, and the model predicts them. The loss averages over the masked values

def mvp(**kwargs):
    from tsai.all import MVP
    return MVP(dropout=0., save_best=False, **kwargs)

def masked(learn): return learn.MVP.mask.sum()
def by_value(x): return x.abs() > x.mean((1, 2), keepdim=True)+.5  # depends on the series alone, not on a draw

def test_mvp_from_the_loader():
    "With a mask that does not depend on the batch"
    make_one = partial(make, callback=partial(mvp, custom_mask=by_value, subsequence_mask=False))
    measured('MVP, loader of 8', difference(make_one, 'loader of 8', num_items=masked))

def test_mvp_in_pieces(monkeypatch):
    "The mask is drawn for the whole batch, and is split with it"
    from tsai.all import MVP
    monkeypatch.setattr(MVP, 'per_sample', ('mask',), raising=False)
    measured('MVP, micro_batch_size=8', difference(partial(make, callback=mvp), 'micro_batch_size=8', num_items=masked))

def test_mvp_with_a_cache():
    "Nothing to pass: the loss is computed on the whole batch"
    measured('MVP, GradientCache(8)', difference(partial(make, callback=mvp), 'GradientCache(8)'))

@pytest.mark.parametrize('kind', ['micro_batch_size=8', 'GradientCache(8)'])
def test_mvp_and_a_model_that_draws(kind, monkeypatch):
    "InceptionTimePlus, tsai's default, draws from Python's generator in each forward pass, as MVP does for its masks: in pieces the masks are others, and nothing else"
    from tsai.all import MVP
    monkeypatch.setattr(MVP, 'per_sample', ('mask',), raising=False)
    kwargs = dict(num_items=masked) if kind == 'micro_batch_size=8' else {}
    def run(**mask): return difference(partial(make, arch=architecture('InceptionTimePlus'), callback=partial(mvp, **mask)), kind, **kwargs)
    measured(f'MVP, InceptionTimePlus, a mask without draws, {kind}', run(custom_mask=by_value, subsequence_mask=False))
    assert run() > 1e-4

def test_the_mask_of_mvp_cannot_be_compared():
    "The loss reads the mask of the last micro-batch, which does not fit two of them, so the fit can only say that. Without `num_items` it is not exact"
    make_one = partial(make, callback=partial(mvp, custom_mask=by_value, subsequence_mask=False))
    with pytest.warns(UserWarning, match='could not check'): assert difference(make_one, 'loader of 8') > 1e-5

def test_mvp_in_pieces_needs_the_name_of_its_mask():
    "Without `per_sample` the mask of 32 series meets the output for 8"
    with pytest.raises(IndexError, match='mask'): train(partial(make, callback=mvp), *kinds['micro_batch_size=8'](num_items=masked))

# Weights and mixtures

def weighted():
    from tsai.all import WeightedPerSampleLoss
    return WeightedPerSampleLoss(torch.linspace(.1, 3, 96))

def test_weights_of_samples():
    "It asks the loader for the indices of the batch that it has yielded last"
    measured('WeightedPerSampleLoss', difference(partial(make, callback=weighted), 'loader of 8', 'GradientCache(8)'))

def test_weights_of_samples_are_not_split():
    with pytest.raises(RuntimeError, match='size of tensor'): train(partial(make, callback=weighted), *kinds['micro_batch_size=8']())

def cutmix():
    from tsai.all import IntraClassCutMix1d
    return IntraClassCutMix1d()

def test_partners_come_from_the_whole_batch():
    measured('IntraClassCutMix1d', difference(partial(make, callback=cutmix), 'micro_batch_size=8', 'GradientCache(8)'))

def test_partners_come_from_the_micro_batch(): assert difference(partial(make, callback=cutmix), 'loader of 8') > 1e-5

def subsample():
    from tsai.all import BatchSubsampler
    import tsai.utils
    tsai.utils.rng = np.random.default_rng(3)  # what it draws with, and `set_seed` does not reach
    return BatchSubsampler(sample_pct=.5)

def test_a_batch_that_shrinks():
    "16 samples are drawn of a batch of 32, and trained on in 2 pieces"
    measured('BatchSubsampler', difference(partial(make, callback=subsample), 'micro_batch_size=8', 'GradientCache(8)'))

# What follows the batches of the loader

def scheduled():
    from tsai.all import TransformScheduler
    return TransformScheduler(SchedLin(1., 0.))

def noise():
    from tsai.all import TSGaussianNoise
    return [TSGaussianNoise(.5, ex=None)]

def test_a_schedule_of_the_large_loader():
    make_one = lambda bs: make(bs, scheduled, batch_tfms=noise())
    measured('TransformScheduler', difference(make_one, 'micro_batch_size=8', 'GradientCache(8)'))

def test_a_schedule_of_the_small_loader_has_a_value_for_each_micro_batch():
    large,small = (train(lambda bs: make(bs, scheduled, batch_tfms=noise()), *o) for o in ((32,), kinds['loader of 8']()))
    assert len(large.transform_scheduler.mult) == 6 and len(small.transform_scheduler.mult) == 24

def test_graph():
    "It shows the losses of the large batch, at the same iterations"
    from IPython.core.interactiveshell import InteractiveShell
    from tsai.all import ShowGraph
    InteractiveShell.instance()  # without one, `display` returns nothing that the callback could update
    def graph(bs, *cbs):
        learn = train(lambda bs: make(bs, partial(ShowGraph, plot_metrics=False)), bs, *cbs)
        return learn.show_graph.nb_batches,[o.get_xydata() for o in learn.show_graph.graph_ax.lines]
    points,lines = graph(32)
    assert points == [2, 5] and [len(o) for o in lines] == [6, 2]
    for o in kinds.values():
        points2,lines2 = graph(*o())
        assert points2 == points
        for a,b in zip(lines, lines2, strict=True): np.testing.assert_allclose(a, b, atol=1e-5)
