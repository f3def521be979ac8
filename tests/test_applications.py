"fastai's applications on small data made on the spot, each against its large batch (float32, so differences of rounding remain)"
import pytest
import torch.utils.data as tud
from fastai.callback.rnn import ModelResetter, RNNCallback, RNNRegularizer, rnn_cbs
from fastai.collab import CollabDataLoaders, EmbeddingDotBias
from fastai.tabular.all import Categorify, Normalize, TabularDataLoaders, TabularLearner, TabularModel
from fastai.text.all import (AWD_LSTM, LMTensorText, TensorText, awd_lstm_clas_config, awd_lstm_lm_config, get_language_model,
                             get_text_classifier)
from fastai.vision.all import CategoryBlock, ImageBlock, PILImage, ResBlock, TensorImage, TensorMask, XResNet
from sklearn.datasets import load_digits

from common import *

FLOAT32 = 2e-5

def both(make, bs=32, micro=8, n_epoch=2, lr=.01, method='fit_one_cycle', tol=FLOAT32):
    "Train with the large batch, and with micro-batches; weights, losses and metrics must agree, and the small batch alone must not"
    big,small,alone = (make(b, cbs) for b,cbs in ((bs, []), (micro, [GradientAccumulation(bs)]), (micro, [])))
    for o in big,small,alone: fit(o, n_epoch, lr, method=method)
    assert_same(weights(small), weights(big), tol)
    assert (weights(alone)-weights(big)).abs().max() > 20*tol
    assert len(losses(small)) == len(losses(big)) > 3 and not np.isnan(losses(small)).any()
    assert_same(losses(small), losses(big), 1e-4)
    assert_same(floats(small.recorder.values), floats(big.recorder.values), 1e-3)
    return big,small

def seeded(make):
    torch.manual_seed(0)
    return make()

def without_batchnorm(m):
    "GroupNorm in the place of every BatchNorm: no accumulation can put a large batch's statistics together"
    for o in list(m.modules()):
        for k,v in list(o.named_children()):
            if isinstance(v, (nn.BatchNorm1d, nn.BatchNorm2d)): setattr(o, k, nn.GroupNorm(1, v.num_features))
    return m

# Vision

def digit_images(n=160):
    digits = load_digits()
    return [PILImage.create(np.stack([o*15]*3, -1).astype(np.uint8)) for o in digits.images[:n]],digits.target[:n].tolist()

def test_vision_xresnet():
    "xresnet without BatchNorm, from a DataBlock of real images"
    images,labels = digit_images()
    block = DataBlock((ImageBlock, CategoryBlock), get_x=lambda i: images[i], get_y=lambda i: labels[i], splitter=IndexSplitter(range(128, 160)))
    def make(bs, cbs):
        dls = block.dataloaders(list(range(160)), bs=bs, shuffle=False, num_workers=0)
        m = seeded(lambda: XResNet(ResBlock, 1, [1,1,1,1], n_out=10, stem_szs=(8,8,64), widen=.25))
        return Learner(dls, without_batchnorm(m), metrics=accuracy, opt_func=partial(SGD, mom=.9), cbs=cbs)
    big,small = both(make, tol=1e-5)  # by SGD: Adam makes steps of one size out of gradients that are but rounding
    with quiet(small), quiet(big): assert small.predict(0)[0] == big.predict(0)[0]

def test_segmentation():
    "Pixels, some of them ignored; a different number in each picture"
    g = torch.Generator().manual_seed(0)
    x,y = torch.randn(128, 3, 8, 8, generator=g),torch.randint(4, (128, 8, 8), generator=g)
    for i in range(128): y[i,:i%8] = 255
    dsets = Datasets(list(range(128)), [[lambda i: TensorImage(x[i])], [lambda i: TensorMask(y[i])]], splits=[list(range(96)), list(range(96, 128))])
    def make(bs, cbs):
        m = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)))
        return Learner(dsets.dataloaders(bs=bs, shuffle=False, num_workers=0), m, CrossEntropyLossFlat(axis=1, ignore_index=255), cbs=cbs)
    both(make)

# Text

class ResetEveryBatch(Callback):
    "The hidden state is that of the rows before, which are others in a large batch"
    def before_batch(self): self.model.reset()

def small_awd(**kwargs): return merge(awd_lstm_lm_config, dict(emb_sz=8, n_hid=12, n_layers=2), kwargs)
def no_dropout(m):
    "A weight_p of exactly 0 would make fastai's WeightDropout fail under this torch"
    for o in m.modules():
        for k in 'p','embed_p','weight_p':
            if isinstance(getattr(o, k, None), float): setattr(o, k, 1e-12 if k == 'weight_p' else 0.)
    return m

def test_language_model():
    "AWD-LSTM with its state and its regularizer"
    g = torch.Generator().manual_seed(0)
    x = torch.randint(20, (128, 13), generator=g)
    ds = [(LMTensorText(o[:-1]), TensorText(o[1:])) for o in x]
    def make(bs, cbs):
        dls = DataLoaders(DataLoader(ds[:96], bs=bs), DataLoader(ds[96:], bs=bs))
        m = seeded(lambda: no_dropout(get_language_model(AWD_LSTM, 20, config=small_awd(), drop_mult=0.)))
        rnn = [ModelResetter(), RNNCallback(), RNNRegularizer(2., 1.), ResetEveryBatch()]
        return Learner(dls, m, CrossEntropyLossFlat(), cbs=[*rnn, *cbs])
    both(make, tol=1e-4)

def test_language_model_with_its_state():
    "With the state carried from batch to batch, the window is that of a loop in plain PyTorch over the same micro-batches"
    g = torch.Generator().manual_seed(0)
    stream = [(torch.randint(20, (4, 7), generator=g), torch.randint(20, (4, 7), generator=g)) for _ in range(12)]
    def make(): return seeded(lambda: no_dropout(get_language_model(AWD_LSTM, 20, config=small_awd(), drop_mult=0.)))
    m = make(); m.reset(); m.train()
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    for i,(x,y) in enumerate(stream):
        (F.cross_entropy(m(x)[0].flatten(0, 1), y.flatten())/3).backward()
        if i%3 == 2: opt.step(); opt.zero_grad()
    dls = DataLoaders(*[tud.DataLoader(stream, batch_size=None)]*2)
    learn = Learner(dls, make(), CrossEntropyLossFlat(), opt_func=SGD, cbs=[*rnn_cbs(), GradientAccumulation(12, micro_batch_size=4)])
    fit(learn, 1, .1)
    assert learn.recorder.accum_bs == [12]*4
    assert_same(weights(learn), torch.cat([p.detach().flatten() for p in m.parameters()]), FLOAT32)

def text_classifier(bs, cbs, **kwargs):
    "AWD-LSTM's encoder over sentences of one length (its padding goes by the longest of a batch), with fastai's RNNRegularizer"
    g = torch.Generator().manual_seed(0)
    x,y = torch.randint(2, 20, (128, 16), generator=g),torch.randint(3, (128,), generator=g)
    ds = list(zip(map(TensorText, x), y))
    config = {k:v for k,v in small_awd().items() if k in awd_lstm_clas_config}
    dls = DataLoaders(DataLoader(ds[:96], bs=bs), DataLoader(ds[96:], bs=bs))
    m = seeded(lambda: get_text_classifier(AWD_LSTM, 20, 3, seq_len=8, config=config, drop_mult=0., lin_ftrs=[10]))
    return Learner(dls, no_dropout(without_batchnorm(m)), CrossEntropyLossFlat(), cbs=[*rnn_cbs(alpha=2., beta=1.), *cbs], metrics=accuracy, **kwargs)

def test_text_classifier(): both(text_classifier, tol=1e-4)

@pytest.mark.parametrize('make', [lambda: GradientAccumulation(micro_batch_size=7), lambda: GradientCache(7)])
def test_text_classifier_in_pieces(make):
    "The regularizer acts on each piece, and adds up to that of the batch"
    big,small,without = (fit(text_classifier(32, cbs, opt_func=SGD), 2, .1, cbs=others) for cbs,others in (([], None), ([make()], None), ([], Callback(before_fit=lambda self: self.learn.remove_cb(RNNRegularizer)))))
    assert_same(weights(small), weights(big), 5e-6)
    assert_same(floats(small.recorder.values), floats(big.recorder.values), 5e-6)
    assert (weights(without)-weights(big)).abs().max() > 1e-3

# Tabular and collab

def test_tabular():
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(a=rng.normal(size=128), b=rng.normal(size=128), c=rng.choice(list('xyz'), 128), y=rng.choice(['no','yes'], 128)))
    def make(bs, cbs):
        dls = TabularDataLoaders.from_df(df, procs=[Categorify, Normalize], cat_names=['c'], cont_names=['a','b'], y_names='y', bs=bs,
                                         valid_idx=list(range(96, 128)), num_workers=0)
        dls = DataLoaders(dls.train.new(shuffle=False, drop_last=False), dls.valid)
        m = seeded(lambda: TabularModel([(4, 3)], 2, 2, [8], use_bn=False, bn_cont=False))
        return TabularLearner(dls, m, CrossEntropyLossFlat(), metrics=accuracy, cbs=cbs)
    both(make)

def test_collab():
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(user=rng.integers(8, size=128), item=rng.integers(9, size=128), rating=rng.random(128)*5))
    def make(bs, cbs):
        dls = CollabDataLoaders.from_df(df, bs=bs, seed=1, valid_pct=.25, num_workers=0)
        dls = DataLoaders(dls.train.new(shuffle=False, drop_last=False), dls.valid)
        return Learner(dls, seeded(lambda: EmbeddingDotBias(4, 10, 11, y_range=(0, 5.5))), MSELossFlat(), cbs=cbs)
    both(make)

# Several inputs and targets, and loaders from plain PyTorch

class TwoInTwoOut(nn.Module):
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(5, 3),nn.Linear(2, 3)
    def forward(self, x, z): h = torch.tanh(self.a(x)+self.b(z)); return h[:,:1],h[:,1:]

@pytest.mark.parametrize('kind', [DataLoader, lambda ds, bs: tud.DataLoader(ds, batch_size=bs)])
def test_several_inputs_and_targets(kind):
    g = torch.Generator().manual_seed(0)
    ds = list(zip(*(torch.randn(128, o, generator=g) for o in (5, 2, 1, 2))))
    def loss_func(pred, y1, y2): return F.mse_loss(pred[0], y1) + F.l1_loss(pred[1], y2)
    def make(bs, cbs):
        dls = DataLoaders(kind(ds[:96], bs=bs) , kind(ds[96:], bs=bs))
        dls.n_inp = 2
        return Learner(dls, seeded(TwoInTwoOut), loss_func, cbs=cbs)
    both(make)
