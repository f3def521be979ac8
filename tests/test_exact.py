"The rows of the page `When is it exact?`: what differs in micro-batches and not with `exact=True`, and what is equal to rounding or in distribution"
import pytest
from fastai.callback.mixup import MixUp
from fastai.callback.training import BnFreeze
from fastai.tabular.all import Categorify, FillMissing, Normalize, TabularDataLoaders, tabular_learner
from fastai.text.all import AWD_LSTM, awd_lstm_clas_config, TextBlock, language_model_learner, text_classifier_learner
from fastai.vision.all import CategoryBlock, ImageBlock, PILImage, RandomErasing, TensorImage, aug_transforms, resnet18, vision_learner

from common import *
from cells import read, root, source
from fastxtend_accum.demo import Activations
from test_applications import digit_images, seeded, small_awd, without_batchnorm

# What differs in micro-batches, and not with exact=True

class RunningScale(nn.Module):
    "Divides by a running maximum, which each forward pass moves"
    def __init__(self): super().__init__(); self.register_buffer('most', torch.ones(()))
    def forward(self, x):
        if self.training: self.most.lerp_(x.detach().abs().max(), .1)
        return x/self.most

class Center(nn.Module):
    "Normalizes over the batch, and is no BatchNorm"
    def forward(self, x): return x-x.mean(0)

class Capacity(nn.Module):
    "An expert with room for 8 samples of a batch: it takes those with the largest scores"
    def forward(self, x):
        taken = torch.zeros(len(x), 1, dtype=x.dtype)
        taken[x[:,0].topk(min(8, len(x))).indices] = 1
        return x+x.sin()*taken

class StochasticDepth(nn.Module):
    def forward(self, x): return x*(torch.rand(len(x), 1) > .02) if self.training else x

class Noise(nn.Module):
    def forward(self, x): return x+.1*torch.randn_like(x) if self.training else x

def compares(pred, targ):
    "Looks at all pairs of samples"
    return F.mse_loss(pred-pred.T, targ-targ.T).float()

def mean_and_sum(pred, targ):
    "No weight of the micro-batches suits both of its parts"
    return (F.mse_loss(pred, targ)+.1*F.l1_loss(pred, targ, reduction='sum')).float()

def spectral(): return nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

differs = {'BatchNorm': (partial(nn.BatchNorm1d, 8), mse), 'running statistics': (RunningScale, mse), 'spectral norm': (spectral, mse), 'a mean over the batch': (Center, mse),
           'experts with a capacity': (Capacity, mse), 'dropout': (partial(nn.Dropout, .2), mse), 'stochastic depth': (StochasticDepth, mse), 'noise': (Noise, mse),
           'a loss over the batch': (nn.Identity, compares), 'a mean and a sum': (nn.Identity, mean_and_sum)}

@pytest.mark.parametrize('name', differs)
def test_what_differs_in_micro_batches_and_not_with_exact(name):
    "Whole batches, and room for less than they need: bit for bit; batches of 32 in pieces of 8: not"
    layer,loss_func = differs[name]
    def run(*cbs):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(5, 8), *[nn.Sequential(nn.Linear(8, 8), layer(), nn.Tanh()) for _ in range(3)], nn.Linear(8, 1)).double()
        learn = make_learner(32, m=m, loss_func=loss_func, cbs=[*cbs])
        torch.manual_seed(1)
        return fit(learn, 2)
    big = run(memory := Activations())
    exact,small = run(GradientAccumulation(exact=True), less := Activations(memory.mb*.8)),run(GradientAccumulation(micro_batch_size=8))
    for k,v in big.model.state_dict().items(): assert_same(exact.model.state_dict()[k], v)
    assert losses(exact) == losses(big) and 0 < less.mb < memory.mb
    assert (weights(small)-weights(big)).abs().max() > 1e-5

def test_what_callbacks_note_in_a_pass_that_fails_stays():
    "Of the model and the loss all is undone; callbacks are not looked at"
    class Fails(Callback):
        order,failed = 20,False
        def before_backward(self):
            if not self.failed: self.learn.loss_grad.register_hook(self.fail)
        def fail(self, grad): self.failed = True; raise torch.OutOfMemoryError('out of memory')
    class Count(Callback):
        order,run_valid,n = 10,False,0
        def after_pred(self): self.n += 1
    def run(*cbs): return fit(make_learner(32, m=nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)], nn.Linear(5, 1)).double(), cbs=[Count(), *cbs]), 1)
    torch.manual_seed(0); big = run()
    torch.manual_seed(0); small = run(Fails(), GradientAccumulation(exact=True))
    assert_same(weights(small), weights(big))
    assert [big.count.n, small.count.n] == [3, 4]

# Equal in distribution: the draws are others, their mean and their spread are not

def gradients_of(make, bs, seeds):
    "The gradient of the first step of 32 samples, for each seed; `make(bs, cbs)` gives a Learner"
    res = []
    class First(Callback):
        order = 20
        def before_step(self):
            res.append(torch.cat([p.grad.flatten().clone() for p in self.model.parameters()]))
            self.opt.zero_grad()
            raise CancelFitException
    learn = make(bs, [First(), *([] if bs == 32 else [GradientAccumulation(32)])])
    for seed in seeds:  # each fit ends before its step, so all begin with the same weights
        torch.manual_seed(seed); random.seed(seed)
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
    def make(bs, cbs): return make_learner(bs, n=32, m=deepcopy(m), cbs=cbs)
    assert_same_distribution(*(gradients_of(make, bs, range(200)) for bs in (8, 32)))

def images_learner(tfms, bs, cbs, n=32):
    "Random transforms of a batch of images, as fastai's loaders make them"
    torch.manual_seed(0)
    ds,tfms = list(zip(torch.rand(n, 3, 6, 6), torch.randn(n, 1))),Pipeline(tfms, split_idx=0)
    dls = DataLoaders(DataLoader(ds, bs=bs, after_batch=lambda b: (tfms(TensorImage(b[0])), b[1])), DataLoader(ds[:8], bs=8))
    return Learner(dls, nn.Sequential(nn.Flatten(), nn.Linear(108, 1)), loss_func=MSELossFlat(), opt_func=SGD, cbs=cbs)

@pytest.mark.long
def test_augmentation():
    "`aug_transforms` draws for each sample"
    make = partial(images_learner, aug_transforms(max_warp=0.))
    assert_same_distribution(*(gradients_of(make, bs, range(200)) for bs in (8, 32)))

def test_a_batch_that_is_split_was_augmented_as_a_whole():
    "The loader of the large batch draws for it, however it is split afterwards"
    def run(cbs, **kwargs):
        learn = images_learner([*aug_transforms(max_warp=0.), RandomErasing()], 32, cbs, n=96)
        torch.manual_seed(1); random.seed(1)
        return fit(learn, 2)
    big = run(None)
    for cb in GradientAccumulation(micro_batch_size=8), GradientCache(8):
        small = run(cb)
        assert_same(weights(small), weights(big), 1e-6)  # float32
    assert (weights(big)-weights(images_learner([], 32, None))).abs().max() > 1e-2

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

@pytest.mark.long
def test_what_is_drawn_once_a_batch_is_drawn_once_a_micro_batch():
    "A window has four rectangles of `RandomErasing`, so its gradient varies less than that of the large batch with one"
    small,big = (gradients_of(partial(images_learner, [RandomErasing(p=1.)]), bs, range(200)) for bs in (8, 32))
    assert .1 < small.var(0).sum()/big.var(0).sum() < .5

@pytest.mark.long
def test_mixup_mixes_within_the_micro_batch():
    "So one sample in 8, not one in 32, is its own partner; with `GradientCache` it mixes the whole batch"
    def own(bs, *cbs):
        shares = []
        class Count(Callback):
            order,run_valid = MixUp.order+1,False
            def before_batch(self): shares.append(float((self.mix_up.yb1[0] == self.yb[0]).float().mean()))
        torch.manual_seed(0)
        learn = make_learner(bs, n=3200, m=model().float(), loss_func=MSELossFlat(), cbs=[MixUp(), Count(), *cbs])
        fit(learn, 2)
        return np.mean(shares)
    assert abs(own(8, GradientAccumulation(32))-1/8) < .02
    for share in own(32), own(32, GradientCache(8)): assert abs(share-1/32) < .01

def test_batchnorm_sees_the_micro_batch():
    m = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    big,small = (fit(make_learner(bs, m=deepcopy(m), cbs=cbs)) for bs,cbs in ((32, None), (8, GradientAccumulation(32))))
    assert (weights(small)-weights(big)).abs().max() > 1e-3

def test_layer_and_group_norm():
    "They normalize each sample by itself"
    for norm in nn.LayerNorm(8),nn.GroupNorm(2, 8):
        m = nn.Sequential(nn.Linear(5, 8), norm, nn.Tanh(), nn.Linear(8, 1)).double()
        big,small,plain = (fit(make_learner(bs, m=deepcopy(m), cbs=cbs)) for bs,cbs in ((32, None), (8, GradientAccumulation(32)), (8, None)))
        assert_same(weights(small), weights(big), ROUNDING)
        assert (weights(plain)-weights(big)).abs().max() > 1e-3

def test_bn_freeze_acts_on_layers_without_gradient_only():
    "A frozen body with `train_bn=False` is exact; with fastai's default, after `unfreeze`, and in the head, BatchNorm trains on"
    def run(bs, cbs, train_bn, unfrozen, head):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)), nn.Sequential(head(8), nn.Tanh(), nn.Linear(8, 1))).double()
        learn = make_learner(bs, m=m, cbs=[BnFreeze(), *cbs], train_bn=train_bn, splitter=lambda m: [params(m[0]), params(m[1])])
        if unfrozen: learn.unfreeze()
        else: learn.freeze()
        return fit(learn, 2)
    for train_bn,unfrozen,head,exact in ((False, False, nn.LayerNorm, True), (True, False, nn.LayerNorm, False), (False, True, nn.LayerNorm, False),
                                         (False, False, nn.BatchNorm1d, False)):
        big,small = (run(bs, cbs, train_bn, unfrozen, head) for bs,cbs in ((32, []), (8, [GradientAccumulation(32)])))
        difference = (weights(big)-weights(small)).abs().max()
        assert difference < ROUNDING if exact else difference > 1e-4

# Applications out of the box: augmentation, dropout, BatchNorm, shuffled, drop_last

def as_it_comes(make, bs, micro, fit_it, tol=None):
    "With the large batch and accumulated: as many steps, the same learning rates and momenta; the weights if `tol`; and it learns"
    def trained(bs, cbs):
        set_seed(0)  # Python's generator, too: fastai's loaders and augmentation draw from it
        learn = make(bs, cbs)
        with quiet(learn): fit_it(learn)
        return learn
    big,small = trained(bs, []),trained(micro, [GradientAccumulation(bs)])
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
    as_it_comes(make, 32, 8, lambda learn: learn.fine_tune(1, 1e-3))

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

def test_vision_learner_split():
    "ConvNeXt with a linear head, which has neither BatchNorm nor dropout: augmentation, MixUp, `fine_tune`, shuffled; the batch of 128 in pieces of 32"
    block = image_block(batch_tfms=aug_transforms(do_flip=False, size=32))
    def make(cbs):
        set_seed(3)
        dls = block.dataloaders(list(range(200)), bs=128, num_workers=0)
        return seeded(lambda: vision_learner(dls, 'convnext_atto', pretrained=False, depths=(1,1,1,1), dims=(8,8,16,16), lin_ftrs=[], first_bn=False, ps=0., metrics=accuracy,
                                             opt_func=SGD, cbs=[MixUp(), *cbs]))
    fits = []
    for cbs in [],[GradientAccumulation(micro_batch_size=32)],[GradientAccumulation(micro_batch_size=25)]:
        learn = make(cbs)
        set_seed(4)
        with quiet(learn): learn.fine_tune(3, .1)
        fits.append(learn)
    big,*small = fits
    assert (weights(big)-weights(make([]))).abs().max() > 1e-3 and len(losses(big)) == 3
    for o in small:
        assert_same(weights(o), weights(big), 5e-6)
        assert_same(floats(o.recorder.values), floats(big.recorder.values), 5e-6)

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

def test_texts_sorted_by_length():
    "The order of the loader depends on `bs`; a batch that is split keeps it"
    df = texts(120)
    block = DataBlock((TextBlock.from_df('text', seq_len=8, min_freq=1), CategoryBlock), get_x=ColReader('text'), get_y=ColReader('label'), splitter=RandomSplitter(.2, seed=0))
    def order(bs):
        set_seed(0)
        return [tuple(o[o != 1].tolist()) for b in block.dataloaders(df, bs=bs, num_workers=0).train for o in b[0]]
    assert order(32) != order(8)[:len(order(32))]
    class MeanOfWords(nn.Module):
        def __init__(self, n): super().__init__(); torch.manual_seed(0); self.embed,self.head = nn.Embedding(n, 8),nn.Linear(8, 2)
        def forward(self, x): return self.head(self.embed(x).mean(1))
    def run(cbs):
        set_seed(0)
        dls = block.dataloaders(df, bs=32, num_workers=0)
        return fit(Learner(dls, MeanOfWords(len(dls.vocab[0])), CrossEntropyLossFlat(), opt_func=SGD, cbs=cbs), 2)
    assert_same(weights(run([GradientAccumulation(micro_batch_size=8)])), weights(run([])), 5e-6)

def test_tabular_learner():
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(a=rng.normal(size=200), b=rng.normal(size=200), c=rng.choice(list('xyz'), 200)))
    df['y'] = np.where(df.a+df.b > 0, 'yes', 'no')
    def make(bs, cbs):
        dls = TabularDataLoaders.from_df(df, procs=[Categorify, FillMissing, Normalize], cat_names=['c'], cont_names=['a','b'], y_names='y', bs=bs,
                                         valid_idx=list(range(160, 200)), num_workers=0)
        return seeded(lambda: tabular_learner(dls, n_out=2, metrics=accuracy, cbs=cbs))
    as_it_comes(make, 32, 8, lambda learn: learn.fit_one_cycle(3, 1e-2))

# The page

def test_layers_without_a_state_are_not_named(capsys):
    "A limit of the line: nothing moves that a first pass could show"
    fit_aloud(make_learner(32, m=nn.Sequential(nn.Linear(5, 8), Center(), nn.Linear(8, 1)).double(), cbs=GradientAccumulation(micro_batch_size=8)), 1)
    assert 'losses are averaged as in one batch' in (said := capsys.readouterr().out) and 'statistics' not in said

class Penalty(Callback):
    "Adds to the loss, as fastai's RNNRegularizer does"
    run_valid = False
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad+.1*self.learn.pred.pow(2).mean()

def summed(pred, targ): return F.mse_loss(pred, targ, reduction='sum').float()
summed.reduction = 'sum'

@pytest.mark.parametrize('loss_func,is_exact', [(mse, True), (summed, False)])
def test_what_a_callback_adds_to_the_loss(loss_func, is_exact):
    def run(*cbs): return fit(make_learner(32, loss_func=loss_func, cbs=[Penalty(), *cbs]), 3, 1e-3)
    big,exact,small = run(),run(GradientAccumulation(exact=True)),run(GradientAccumulation(micro_batch_size=8))
    assert_same(weights(big), weights(exact))
    assert bool((weights(big)-weights(small)).abs().max() < 1e-12) == is_exact and len(big.recorder.losses) == 9

def test_each_row_of_the_page_has_its_tests():
    "The page lists tests for each row of its tables, in the same order; all that it names exist, and all of this file are among them"
    text = '\n'.join(source(o) for o in read(root/'nbs/reference/00_exact.ipynb') if o['cell_type'] == 'markdown')
    listed = re.findall(r'^- (.+?): (`test_.+)$', text, re.M)
    assert re.findall(r'^\| \[(.+?)\]\(#', text, re.M) == [row for row,_ in listed] and len(listed) > 15
    named = set(re.findall(r'`(\w+)::(\w+)`', text))
    there = {(o.stem, name) for o in (root/'tests').glob('test_*.py') for name in re.findall(r'^def (test_\w+)', o.read_text(), re.M)}
    assert named <= there and {o for o in there-named if o[0] == 'test_exact'} == {('test_exact', 'test_each_row_of_the_page_has_its_tests')}
