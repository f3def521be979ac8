"fastai's applications on small data in float32, each against its large batch"
import pytest
import torch.utils.data as tud
from fastai.callback.rnn import RNNRegularizer, rnn_cbs
from fastai.collab import CollabDataLoaders, EmbeddingDotBias
from fastai.tabular.all import Categorify, Normalize, TabularDataLoaders, TabularLearner, TabularModel
from fastai.text.all import AWD_LSTM, TensorText, awd_lstm_clas_config, awd_lstm_lm_config
from fastai.text.all import get_language_model, get_text_classifier
from fastai.vision.all import TensorImage, TensorMask

from common import *

FLOAT32 = 2e-5

def both(make, tol=FLOAT32):
    "Weights, losses and metrics of the large batch and of windows agree, and those of the small batch alone do not"
    big,small,alone = (make(b, cbs) for b,cbs in ((32, []), (8, [GradientAccumulation(32)]), (8, [])))
    for o in big,small,alone: fit(o, 2, .01, method='fit_one_cycle')
    assert_same(weights(small), weights(big), tol)
    assert (weights(alone)-weights(big)).abs().max() > 20*tol
    assert len(losses(big)) > 3
    assert_same(losses(small), losses(big), 1e-4)
    assert_same(floats(small.recorder.values), floats(big.recorder.values), 1e-3)

def seeded(make, *args, **kwargs):
    torch.manual_seed(0)
    return make(*args, **kwargs)

def without_batchnorm(m):
    "GroupNorm for every BatchNorm, whose statistics are those of a micro-batch"
    for o in list(m.modules()):
        for k,v in list(o.named_children()):
            if isinstance(v, nn.BatchNorm1d): setattr(o, k, nn.GroupNorm(1, v.num_features))
    return m

def loaders(ds, bs, kind=DataLoader): return DataLoaders(kind(ds[:96], bs), kind(ds[96:], bs))

# Vision: see also test_large_batch

def test_segmentation():
    "Pixels, some of them ignored; a different number in each picture"
    g = torch.Generator().manual_seed(0)
    x,y = torch.randn(128, 3, 8, 8, generator=g),torch.randint(4, (128, 8, 8), generator=g)
    for i in range(128): y[i,:i%7] = 255
    tfms = [[lambda i: TensorImage(x[i])], [lambda i: TensorMask(y[i])]]
    dsets = Datasets(list(range(128)), tfms, splits=[list(range(96)), list(range(96, 128))])
    def make(bs, cbs):
        m = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)))
        dls = dsets.dataloaders(bs=bs, shuffle=False, num_workers=0)
        return Learner(dls, m, CrossEntropyLossFlat(axis=1, ignore_index=255), cbs=cbs)
    both(make)

# Text

lm_config = merge(awd_lstm_lm_config, dict(emb_sz=8, n_hid=12, n_layers=2))
clas_config = {k:v for k,v in lm_config.items() if k in awd_lstm_clas_config}

def no_dropout(m):
    "A weight_p of exactly 0 would make fastai's WeightDropout fail"
    for o in m.modules():
        for k in 'p','embed_p','weight_p':
            if isinstance(getattr(o, k, None), float): setattr(o, k, 1e-12 if k == 'weight_p' else 0.)
    return m

def language_model(): return no_dropout(seeded(get_language_model, AWD_LSTM, 20, config=lm_config, drop_mult=0.))

def test_language_model():
    "Its state is carried on; windows are those of a loop in plain PyTorch over the same micro-batches"
    g = torch.Generator().manual_seed(0)
    stream = [torch.randint(20, (2, 4, 7), generator=g).unbind() for _ in range(12)]
    m = language_model().train()
    m.reset()
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    for i,(x,y) in enumerate(stream):
        (F.cross_entropy(m(x)[0].flatten(0, 1), y.flatten())/3).backward()
        if i%3 == 2: opt.step(); opt.zero_grad()
    dls = DataLoaders(*[tud.DataLoader(stream, batch_size=None)]*2)
    cbs = [*rnn_cbs(), GradientAccumulation(12, micro_batch_size=4)]
    learn = fit(Learner(dls, language_model(), CrossEntropyLossFlat(), opt_func=SGD, cbs=cbs), 1)
    assert learn.recorder.accum_bs == [12]*4
    assert_same(weights(learn), weights(m), FLOAT32)
    assert (weights(learn)-weights(language_model())).abs().max() > 1e-3

def text_classifier(bs, cbs, **kwargs):
    "AWD-LSTM's encoder over sentences of one length (its padding goes by the longest of a batch), and its regularizer"
    g = torch.Generator().manual_seed(0)
    x,y = torch.randint(2, 20, (128, 16), generator=g),torch.randint(3, (128,), generator=g)
    m = seeded(get_text_classifier, AWD_LSTM, 20, 3, seq_len=8, config=clas_config, drop_mult=0., lin_ftrs=[10])
    return Learner(loaders([*zip(map(TensorText, x), y)], bs), no_dropout(without_batchnorm(m)), CrossEntropyLossFlat(),
                   cbs=[*rnn_cbs(alpha=2., beta=1.), *cbs], metrics=accuracy, **kwargs)

def test_text_classifier(): both(text_classifier, tol=1e-4)

@pytest.mark.parametrize('make', [lambda: GradientAccumulation(micro_batch_size=7), lambda: GradientCache(7)])
def test_text_classifier_in_micro_batches(make):
    "The regularizer acts on each, and adds up to that of the batch"
    big,small,without = (text_classifier(32, cbs, opt_func=SGD) for cbs in ([], [make()], []))
    without.remove_cb(RNNRegularizer)
    for o in big,small,without: fit(o, 2)
    assert_same(weights(small), weights(big), 5e-6)
    assert_same(floats(small.recorder.values), floats(big.recorder.values), 5e-6)
    assert (weights(without)-weights(big)).abs().max() > 1e-3

# Tabular and collab

def in_order(dls): return DataLoaders(dls.train.new(shuffle=False, drop_last=False), dls.valid)

def test_tabular():
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(a=rng.normal(size=128), b=rng.normal(size=128), c=rng.choice(list('xyz'), 128),
                           y=rng.choice(['no','yes'], 128)))
    def make(bs, cbs):
        dls = TabularDataLoaders.from_df(df, procs=[Categorify, Normalize], cat_names=['c'], cont_names=['a','b'],
                                         y_names='y', bs=bs, valid_idx=list(range(96, 128)), num_workers=0)
        m = seeded(TabularModel, [(4, 3)], 2, 2, [8], use_bn=False, bn_cont=False)
        return TabularLearner(in_order(dls), m, CrossEntropyLossFlat(), metrics=accuracy, cbs=cbs)
    both(make)

def test_collab():
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(user=rng.integers(8, size=128), item=rng.integers(9, size=128), rating=rng.random(128)*5))
    def make(bs, cbs):
        dls = CollabDataLoaders.from_df(df, bs=bs, seed=1, valid_pct=.25, num_workers=0)
        return Learner(in_order(dls), seeded(EmbeddingDotBias, 4, 10, 11, y_range=(0, 5.5)), MSELossFlat(), cbs=cbs)
    both(make)

# Several inputs and targets

class TwoInTwoOut(nn.Module):
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(5, 3),nn.Linear(2, 3)
    def forward(self, x, z): h = torch.tanh(self.a(x)+self.b(z)); return h[:,:1],h[:,1:]

@pytest.mark.parametrize('kind', [DataLoader, tud.DataLoader])
def test_several_inputs_and_targets(kind):
    g = torch.Generator().manual_seed(0)
    ds = list(zip(*(torch.randn(128, o, generator=g) for o in (5, 2, 1, 2))))
    def loss_func(pred, y1, y2): return F.mse_loss(pred[0], y1) + F.l1_loss(pred[1], y2)
    def make(bs, cbs):
        dls = loaders(ds, bs, kind)
        dls.n_inp = 2
        return Learner(dls, seeded(TwoInTwoOut), loss_func, cbs=cbs)
    both(make)
