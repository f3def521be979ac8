"fastai's applications on small data in float32, each against its large batch"
import pytest
from fastai.callback.rnn import rnn_cbs
from fastai.collab import CollabDataLoaders, EmbeddingDotBias
from fastai.text.all import AWD_LSTM, TensorText, awd_lstm_clas_config, awd_lstm_lm_config
from fastai.text.all import get_text_classifier
from fastai.vision.all import TensorImage, TensorMask

from common import *

FLOAT32 = 2e-5


def largest_difference(a, b):
    return (weights(a)-weights(b)).abs().max()


def assert_windows_are_the_large_batch(make, tol=FLOAT32):
    "`make(bs, cbs)` returns a Learner. Weights, losses and metrics agree; those of the small batch alone do not"
    large = make(32, [])
    windows = make(8, [GradientAccumulation(32)])
    alone = make(8, [])
    for learn in (large, windows, alone): fit(learn, 2, .01, method='fit_one_cycle')
    assert len(losses(large)) > 3
    assert_same_weights(windows, large, tol)
    assert_same(losses(windows), losses(large), 1e-4)
    assert_same(floats(windows.recorder.values), floats(large.recorder.values), 1e-3)
    assert largest_difference(alone, large) > 20*tol


def seeded(make, *args, **kwargs):
    torch.manual_seed(0)
    return make(*args, **kwargs)


def loaders(samples, bs, kind=DataLoader):
    return DataLoaders(kind(samples[:96], bs), kind(samples[96:], bs))


# Vision: see also test_large_batch

def test_segmentation():
    "Pixels, of which some are ignored: a different number in each picture"
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(128, 3, 8, 8, generator=generator)
    masks = torch.randint(4, (128, 8, 8), generator=generator)
    for i in range(128): masks[i, :i%7] = 255
    tfms = [[lambda i: TensorImage(images[i])], [lambda i: TensorMask(masks[i])]]
    splits = [list(range(96)), list(range(96, 128))]
    datasets = Datasets(list(range(128)), tfms, splits=splits)

    def make(bs, cbs):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
        dls = datasets.dataloaders(bs=bs, shuffle=False, num_workers=0)
        return Learner(dls, m, CrossEntropyLossFlat(axis=1, ignore_index=255), cbs=cbs)

    assert_windows_are_the_large_batch(make)


# Text

lm_config = merge(awd_lstm_lm_config, dict(emb_sz=8, n_hid=12, n_layers=2))
clas_config = {k: v for k, v in lm_config.items() if k in awd_lstm_clas_config}


def without_dropout(m):
    for o in m.modules():
        if isinstance(getattr(o, 'p', None), float): o.p = 0.
        if isinstance(getattr(o, 'embed_p', None), float): o.embed_p = 0.
        if isinstance(getattr(o, 'weight_p', None), float): o.weight_p = 1e-12  # fastai's WeightDropout fails with 0
    return m


def without_batchnorm(m):
    "GroupNorm takes the place of BatchNorm, whose statistics are those of a micro-batch"
    for o in list(m.modules()):
        for name, child in list(o.named_children()):
            if isinstance(child, nn.BatchNorm1d): setattr(o, name, nn.GroupNorm(1, child.num_features))
    return m


def text_classifier(bs, cbs, **kwargs):
    "The encoder of AWD-LSTM over sentences of one length (it pads to the longest of a batch), and its regularizer"
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(2, 20, (128, 16), generator=generator)
    labels = torch.randint(3, (128,), generator=generator)
    samples = list(zip(map(TensorText, texts), labels))
    kwargs_of_model = dict(seq_len=8, config=clas_config, drop_mult=0., lin_ftrs=[10])
    m = seeded(get_text_classifier, AWD_LSTM, 20, 3, **kwargs_of_model)
    m = without_dropout(without_batchnorm(m))
    all_cbs = [*rnn_cbs(alpha=2., beta=1.), *cbs]
    return Learner(loaders(samples, bs), m, CrossEntropyLossFlat(), cbs=all_cbs, metrics=accuracy, **kwargs)


def test_text_classifier():
    assert_windows_are_the_large_batch(text_classifier, tol=1e-4)


# Tabular and collab

def in_order(dls):
    return DataLoaders(dls.train.new(shuffle=False, drop_last=False), dls.valid)


@pytest.mark.long
def test_collab():
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(
        user=rng.integers(8, size=128),
        item=rng.integers(9, size=128),
        rating=rng.random(128)*5))

    def make(bs, cbs):
        dls = CollabDataLoaders.from_df(df, bs=bs, seed=1, valid_pct=.25, num_workers=0)
        m = seeded(EmbeddingDotBias, 4, 10, 11, y_range=(0, 5.5))
        return Learner(in_order(dls), m, MSELossFlat(), cbs=cbs)

    assert_windows_are_the_large_batch(make)
