"The rows of the page `When is it exact?`: equal to rounding, equal in distribution only, and not equal"
import pytest
from fastai.callback.training import BnFreeze
from fastai.tabular.all import Categorify, FillMissing, Normalize, TabularDataLoaders, tabular_learner
from fastai.text.all import AWD_LSTM, awd_lstm_clas_config, TextBlock, language_model_learner, text_classifier_learner
from fastai.vision.all import CategoryBlock, ImageBlock, PILImage, aug_transforms, resnet18, vision_learner

from common import *
from test_applications import digit_images, seeded, small_awd, without_batchnorm

# Equal in distribution: the draws are others, their mean is not

def gradients_of(bs, seeds, before=lambda: None, m=None, cbs=()):
    "The gradient of the first step of 32 samples, for each seed"
    res = []
    class First(Callback):
        order = 20
        def before_step(self): res.append(torch.cat([p.grad.flatten().clone() for p in self.model.parameters()])); raise CancelFitException
    for seed in seeds:
        learn = make_learner(bs, n=32, m=deepcopy(m), cbs=[First(), *cbs(), *([] if bs == 32 else [GradientAccumulation(32)])])
        torch.manual_seed(seed)
        fit(learn, 1)
    return torch.stack(res)

def assert_same_distribution(a, b):
    "Means, element by element, within 5 of their standard errors, and variances within a fifth; while single draws differ"
    error = (a.var(0)/len(a)+b.var(0)/len(b)).sqrt()
    assert ((a.mean(0)-b.mean(0)).abs() <= 5*error+1e-12).all()
    assert .8 < a.var(0).sum()/b.var(0).sum() < 1.25
    assert (a[0]-b[0]).abs().max() > 1e-3

def test_dropout():
    m = nn.Sequential(nn.Dropout(.2), nn.Linear(5, 8), nn.Dropout(.5), nn.Tanh(), nn.Linear(8, 1)).double()
    assert_same_distribution(*(gradients_of(bs, range(400), m=m, cbs=lambda: []) for bs in (8, 32)))

@pytest.mark.parametrize('seed', [0, 1])
def test_a_shuffled_epoch(seed):
    "The order comes from the loader's own generator: with the same seed it is that of the large batch"
    def shuffled(bs, seed, cbs=None):
        set_seed(seed)
        x,y = data(100)
        dls = DataLoaders(DataLoader(list(zip(x, y)), bs=bs, shuffle=True, drop_last=True), make_learner(8).dls.valid)
        return fit(Learner(dls, model(), mse, opt_func=SGD, cbs=cbs), 2, method='fit_one_cycle')
    big = shuffled(32, seed)
    assert_same(weights(shuffled(8, seed, GradientAccumulation(32))), weights(big), ROUNDING)
    assert (weights(shuffled(8, seed+2, GradientAccumulation(32)))-weights(big)).abs().max() > 1e-3

# Not equal

def test_batchnorm_sees_the_micro_batch():
    m = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    big,small = (fit(make_learner(bs, m=deepcopy(m), cbs=cbs)) for bs,cbs in ((32, None), (8, GradientAccumulation(32))))
    assert (weights(small)-weights(big)).abs().max() > 1e-3

def test_bn_freeze_acts_on_layers_without_gradient_only():
    "A frozen body with `train_bn=False` is exact; with fastai's default, and after `unfreeze`, BatchNorm trains on"
    def run(bs, cbs, train_bn, unfrozen):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)), nn.Sequential(nn.Tanh(), nn.Linear(8, 1))).double()
        learn = make_learner(bs, m=m, cbs=[BnFreeze(), *cbs], train_bn=train_bn, splitter=lambda m: [params(m[0]), params(m[1])])
        if unfrozen: learn.unfreeze()
        else: learn.freeze()
        return fit(learn, 2)
    for train_bn,unfrozen,exact in (False, False, True), (True, False, False), (False, True, False):
        big,small = (run(bs, cbs, train_bn, unfrozen) for bs,cbs in ((32, []), (8, [GradientAccumulation(32)])))
        difference = (weights(big)-weights(small)).abs().max()
        assert difference < ROUNDING if exact else difference > 1e-4

def test_bfloat16_models_accumulate_in_bfloat16():
    "512 gradients of 1 have a mean of .5: from 256 on, one more changes nothing"
    class Weight(nn.Module):
        def __init__(self): super().__init__(); self.w = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        def forward(self, x): return x*self.w
    means = []
    ds = [(torch.ones(1, dtype=torch.bfloat16), torch.zeros(1))]*512
    learn = Learner(DataLoaders(DataLoader(ds, bs=1), DataLoader(ds[:1], bs=1)), Weight(), lambda p,t: p.float().mean(), opt_func=SGD,
                    cbs=[GradientAccumulation(512), Callback(before_step=lambda self: means.append(float(self.model.w.grad)))])
    fit(learn, 1, 0.)
    assert means == [.5]

# Applications as they come: augmentation, dropout, BatchNorm, shuffled, drop_last

def as_it_comes(make, bs, micro, fit_it, tol=None):
    "With the large batch and accumulated: as many steps, the same learning rates and momenta; the weights if `tol`; and it learns"
    big,small = make(bs, []),make(micro, [GradientAccumulation(bs)])
    for o in big,small:
        torch.manual_seed(0)
        with quiet(o): fit_it(o)
    assert len(losses(small)) == len(losses(big)) > 3
    assert_same(small.recorder.lrs, big.recorder.lrs)
    assert_same(small.recorder.hps['mom'], big.recorder.hps['mom'])
    assert small.recorder.accum_bs == [bs]*len(losses(big))
    assert [len(o) for o in small.recorder.values] == [len(o) for o in big.recorder.values]
    for o in big,small: assert losses(o)[-1] < losses(o)[0]
    difference = (weights(big)-weights(small)).abs().max()
    assert difference <= tol if tol else difference > 1e-4
    return small

def image_block(**kwargs):
    images,labels = digit_images(200)
    return DataBlock((ImageBlock, CategoryBlock), get_x=lambda i: images[i], get_y=lambda i: labels[i], splitter=IndexSplitter(range(150, 200)), **kwargs)

def test_vision_learner():
    "resnet18 with augmentation, `fine_tune`: 150 samples, so that its loader drops 22 and ours, too"
    block = image_block(batch_tfms=aug_transforms(do_flip=False, size=32))
    def make(bs, cbs):
        dls = block.dataloaders(list(range(200)), bs=bs, num_workers=0)
        return seeded(lambda: vision_learner(dls, resnet18, pretrained=False, metrics=accuracy, cbs=cbs))
    as_it_comes(make, 32, 8, lambda learn: learn.fine_tune(2, 1e-3))

def test_vision_learner_is_exact_where_nothing_is_drawn():
    "The same without augmentation, dropout and BatchNorm, but shuffled and with `drop_last`"
    def make(bs, cbs):
        set_seed(3)
        dls = image_block().dataloaders(list(range(200)), bs=bs, num_workers=0)
        learn = seeded(lambda: vision_learner(dls, resnet18, pretrained=False, metrics=accuracy, cbs=cbs, opt_func=SGD, ps=0., bn_final=False))
        without_batchnorm(learn.model)
        learn.create_opt()
        return learn
    as_it_comes(make, 32, 8, lambda learn: learn.fit_one_cycle(2, 1e-3), tol=1e-5)  # float32

words = 'a learner has data a model and a loss each batch goes through the model once and its loss is a mean'.split()

def texts(n):
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(text=[' '.join(rng.choice(words, rng.integers(5, 30))) for _ in range(n)]))
    return df.assign(label=np.where(df.text.str.contains('loss'), 'yes', 'no'))

clas_config = {k:v for k,v in small_awd().items() if k in awd_lstm_clas_config}

def test_language_model_learner():
    "The recurrent state is carried on, so a large batch reads other text"
    df = texts(200)
    def make(bs, cbs):
        dls = DataBlock(TextBlock.from_df('text', is_lm=True, seq_len=8, min_freq=1), get_x=ColReader('text'), splitter=RandomSplitter(.1, seed=0)).dataloaders(df, bs=bs, num_workers=0)
        return seeded(lambda: language_model_learner(dls, AWD_LSTM, config=small_awd(), pretrained=False, drop_mult=.3, cbs=cbs))
    as_it_comes(make, 16, 4, lambda learn: learn.fit_one_cycle(1, 1e-2))

def test_text_classifier_learner():
    df = texts(120)
    def make(bs, cbs):
        dls = DataBlock((TextBlock.from_df('text', seq_len=8, min_freq=1), CategoryBlock), get_x=ColReader('text'), get_y=ColReader('label'),
                        splitter=RandomSplitter(.2, seed=0)).dataloaders(df, bs=bs, num_workers=0)
        return seeded(lambda: text_classifier_learner(dls, AWD_LSTM, config=clas_config, pretrained=False, drop_mult=.3, metrics=accuracy, cbs=cbs))
    as_it_comes(make, 16, 4, lambda learn: learn.fit_one_cycle(6, 1e-2))

def test_tabular_learner():
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(a=rng.normal(size=200), b=rng.normal(size=200), c=rng.choice(list('xyz'), 200)))
    df['y'] = np.where(df.a+df.b > 0, 'yes', 'no')
    def make(bs, cbs):
        dls = TabularDataLoaders.from_df(df, procs=[Categorify, FillMissing, Normalize], cat_names=['c'], cont_names=['a','b'], y_names='y', bs=bs,
                                         valid_idx=list(range(160, 200)), num_workers=0)
        return seeded(lambda: tabular_learner(dls, n_out=2, metrics=accuracy, cbs=cbs))
    as_it_comes(make, 32, 8, lambda learn: learn.fit_one_cycle(3, 1e-2))
