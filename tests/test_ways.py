"exact=True: under a limit of memory, the fit of the whole batch, bit for bit. Against the plain Learner, which knows no limit"
import pytest, timm
from fastai.callback.mixup import MixUp
from fastai.tabular.all import Categorify, Normalize, TabularDataLoaders, TabularModel
from fastai.vision.all import create_vision_model, resnet18, resnet34, unet_learner, vision_learner

from common import *
from fastxtend_accum.cache import GradientCache
from fastxtend_accum.checkpointing import ActivationCheckpointing
from fastxtend_accum.demo import Activations
from test_applications import text_classifier
from test_checkpointing import Runs, assert_same_state, image_dls, narrow_unet, state, unet

# Learners as they come

def seeded(make, seed=0):
    set_seed(seed)
    return make()

def of_images(m, loss=None, **kwargs): return Learner(image_dls(), m(), loss or CrossEntropyLossFlat(), **kwargs)
def resnet(**kwargs): return vision_learner(image_dls(), resnet18, pretrained=False, **kwargs)
def resnet_34(**kwargs): return vision_learner(image_dls(), resnet34, pretrained=False, **kwargs)
class Contrast(nn.Module):
    "Compares each sample with all others of the batch"
    def forward(self, pred, targ):
        z = F.normalize(pred, dim=1)
        return F.cross_entropy(z@z.T*2, torch.arange(len(z)).roll(1))
def contrastive_resnet(**kwargs): return of_images(lambda: create_vision_model(resnet18, 8, pretrained=False), Contrast(), **kwargs)
def vit(**kwargs):
    def m(): return timm.create_model('vit_tiny_patch16_224', img_size=32, patch_size=8, embed_dim=24, depth=4, num_heads=2, num_classes=3, drop_rate=.2, proj_drop_rate=.2)
    return of_images(m, **kwargs)
def convnext(**kwargs):
    def m(): return timm.create_model('convnext_atto', num_classes=3, drop_path_rate=.3, depths=(1,1,2,1), dims=(8,16,24,32))
    return of_images(m, **kwargs)
def normed_images(**kwargs):
    def block(n): return nn.Sequential(nn.Conv2d(n, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    return of_images(lambda: nn.Sequential(*map(block, (3,8,8,8)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)), **kwargs)
class CrossEntropyAndDice:
    "A mean and a sum: micro-batches have no weight that suits both"
    def __init__(self): self.ce,self.dice = CrossEntropyLossFlat(axis=1),DiceLoss()
    def __call__(self, pred, targ): return self.ce(pred, targ)+.1*self.dice(pred, targ)
def segmentation(**kwargs):
    g = torch.Generator().manual_seed(0)
    ds = list(zip(torch.randn(64, 3, 8, 8, generator=g), torch.randint(3, (64, 8, 8), generator=g)))
    layers = [nn.Sequential(nn.Conv2d(i, 8, 3, padding=1), nn.ReLU()) for i in (3,8,8,8)]
    dls = DataLoaders(DataLoader(ds, bs=32), DataLoader(ds[:16], bs=16))
    return Learner(dls, nn.Sequential(*layers, nn.Conv2d(8, 3, 1)), CrossEntropyAndDice(), **kwargs)
def halves(m): return [params(m[:2]), params(m[2:])]
def tabular(**kwargs):
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(a=rng.normal(size=96), b=rng.normal(size=96), c=rng.choice(list('xyz'), 96), y=rng.choice(['no','yes'], 96)))
    dls = TabularDataLoaders.from_df(df, procs=[Categorify, Normalize], cat_names=['c'], cont_names=['a','b'], y_names='y', bs=32,
                                     valid_idx=list(range(64, 96)), num_workers=0)
    return Learner(dls, TabularModel([(4, 3)], 2, 2, [32, 24, 16]), CrossEntropyLossFlat(), **kwargs)
def awd_lstm(cbs=(), **kwargs): return text_classifier(32, cbs, **kwargs)

class Center(nn.Module):
    "Normalizes over the batch, and is no BatchNorm"
    def forward(self, x): return x-x.mean(0)

def mlp(*extra, loss=None, bs=32, n=64, **kwargs):
    "Four layers with what `extra` makes after each"
    g = torch.Generator().manual_seed(0)
    ds = list(zip(torch.randn(n, 20, generator=g), torch.randint(4, (n,), generator=g)))
    layers = [nn.Sequential(nn.Linear(20, 20), *[o() for o in extra], nn.ReLU()) for _ in range(4)]
    dls = DataLoaders(DataLoader(ds, bs=bs, shuffle=True), DataLoader(ds[:16], bs=16))
    return Learner(dls, nn.Sequential(*layers, nn.Linear(20, 4)), loss or CrossEntropyLossFlat(), **kwargs)

def dropout(): return nn.Dropout(.3)
def batchnorm(): return nn.BatchNorm1d(20)
plain = partial(mlp)
dropped = partial(mlp, dropout)
normed = partial(mlp, batchnorm)
centered = partial(mlp, Center)
contrastive = partial(mlp, loss=Contrast())
contrastive_dropped = partial(mlp, dropout, loss=Contrast())

# Fits

def run(make, *cbs, method='fit_one_cycle', n_epoch=2, lr=1e-2, aloud=False, **kwargs):
    learn = seeded(partial(make, cbs=[*cbs], **kwargs))
    before = state(learn)
    set_seed(7, reproducible=False)
    (fit_aloud if aloud else fit)(learn, n_epoch, lr, method=method)
    assert sum(not torch.equal(a, b) for a,b in zip(before.values(), state(learn).values())) > 3
    return learn

def exact(**kwargs): return GradientAccumulation(**kwargs, exact=True)

def limited(make, share, *cbs, whole=None, ours=exact, **kwargs):
    "The whole batch, and the fit in `share` of its memory"
    big = whole or run(make, Activations(), *[o() for o in cbs], **kwargs)
    small = run(make, Activations(big.activations.mb*share), *[o() for o in cbs], ours(), **kwargs)
    assert 0 < small.activations.mb <= share*big.activations.mb < math.inf
    return big,small

def assert_equal_fits(small, big):
    "Weights, buffers, losses, metrics"
    assert_same_state(small, big)
    assert losses(small) == losses(big) and len(losses(big)) > 1
    assert_same(floats(small.recorder.values), floats(big.recorder.values))

def blocks(learn): return learn.gradient_accumulation.way

# Bit for bit

learners = [resnet, pytest.param(resnet_34, marks=pytest.mark.long), narrow_unet, pytest.param(unet, marks=pytest.mark.long), tabular, contrastive_resnet, centered,
            normed, plain, dropped, vit, convnext, contrastive, contrastive_dropped, awd_lstm, segmentation]

@pytest.mark.thin(5)
@pytest.mark.parametrize('share', [.85, .6, .5])
@pytest.mark.parametrize('make', learners)
def test_bit_for_bit(make, share):
    big,small = limited(make, share, n_epoch=1)
    assert_equal_fits(small, big)
    assert blocks(small).level > 0

@pytest.mark.thin(3)
@pytest.mark.parametrize('make,cbs,kwargs', [
    (normed_images, [MixUp], dict(method='fine_tune', n_epoch=1, splitter=halves)), (resnet, [MixUp], dict(method='fine_tune', n_epoch=1)),  # a frozen body, then all of it
    (normed_images, [partial(CpuMixedPrecision, 'bf16')], dict(n_epoch=1)), (normed_images, [MixUp, partial(CpuMixedPrecision, 'bf16')], dict(n_epoch=1)),
    (dropped, [MixUp], dict(opt_func=SGD)), (plain, [partial(CpuMixedPrecision, 'bf16')], dict(opt_func=SGD))])
def test_beside_others(make, cbs, kwargs):
    big,small = limited(make, .6, *cbs, **kwargs)
    assert_equal_fits(small, big)
    assert blocks(small).level > 0

# What a trial on a few samples, in one batch, could not have seen

class Hidden(nn.Module):
    "Adds what `make` makes to the second of four layers of 20"
    def __init__(self, make): super().__init__(); self.inner = make()
    def forward(self, x): return self.inner(x)

class Experts(nn.Module):
    "Each takes the 8 samples of the batch that fit it best"
    def __init__(self): super().__init__(); self.gate,self.experts = nn.Linear(20, 4),nn.ModuleList(nn.Linear(20, 20) for _ in range(4))
    def forward(self, x):
        scores,y = self.gate(x).softmax(1),x
        for i,o in enumerate(self.experts):
            weight,rows = scores[:,i].topk(min(8, len(x)))
            y = y.index_add(0, rows, weight[:,None]*o(x[rows]))
        return y
class CountInDict(nn.Module):
    "Scales by a count that it keeps in a dict"
    def __init__(self): super().__init__(); self.seen = dict(batches=0)
    def forward(self, x):
        self.seen['batches'] += self.training
        return x*(1+1/(1+self.seen['batches']))
class FrozenMaximum(nn.Module):
    "A running maximum, in a parameter that is not trained"
    def __init__(self): super().__init__(); self.top = nn.Parameter(torch.ones(20), requires_grad=False)
    def forward(self, x):
        if self.training:
            with torch.no_grad(): self.top.copy_(torch.maximum(self.top, x.detach().abs().amax(0)))
        return x/self.top
class Depth(nn.Module):
    "Leaves a layer out for three of a hundred samples"
    def __init__(self): super().__init__(); self.m = nn.Linear(20, 20)
    def forward(self, x): return x+self.m(x)*((torch.rand(len(x), 1) > .03) if self.training else 1)
class ThawingNorm(nn.BatchNorm1d):
    "Normalizes over the batch from the second epoch on"
    thawed = False
    def forward(self, x): return super().forward(x) if self.thawed or not self.training else F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)
class Rising(Callback):
    "The rate of dropout rises from 0, and BatchNorm thaws"
    run_valid = False
    def before_batch(self):
        for m in self.model.modules():
            if isinstance(m, nn.Dropout): m.p = .1*self.train_iter
            if isinstance(m, ThawingNorm): m.thawed = self.epoch > 0
class LaterContrast(Callback):
    "Another loss from the second epoch on"
    def before_epoch(self):
        if self.epoch: self.learn.loss_func = Contrast()
class HardLoss(nn.Module):
    "The quarter of the batch with the largest losses; counts its calls"
    def __init__(self): super().__init__(); self.calls = 0
    def forward(self, pred, targ):
        self.calls += pred.requires_grad
        return F.cross_entropy(pred, targ, reduction='none').topk(max(len(targ)//4, 1)).values.mean()*(1+1/(1+self.calls))
class HardExamples(Callback):
    "The same, by a callback"
    run_valid = False
    def after_loss(self):
        self.learn.loss_grad = F.cross_entropy(self.pred, self.y, reduction='none').topk(len(self.y)//4).values.mean()
        self.learn.loss = self.learn.loss_grad.clone()
def with_layer(make, **kwargs): return partial(mlp, lambda: Hidden(make), n=128, **kwargs)
def spectral(): return nn.utils.parametrizations.spectral_norm(nn.Linear(20, 20))
def old_spectral(): return nn.utils.spectral_norm(nn.Linear(20, 20))

kinds = dict(experts=(with_layer(Experts), []), count=(with_layer(CountInDict), []), maximum=(with_layer(FrozenMaximum), []), depth=(with_layer(Depth), []),
             dropout=(with_layer(dropout), []), thaw=(with_layer(lambda: ThawingNorm(20)), [Rising]), rate=(with_layer(lambda: nn.Dropout(0.)), [Rising]),
             loss=(with_layer(nn.Tanh), [LaterContrast]), hard_loss=(partial(mlp, nn.Tanh, loss=HardLoss(), n=128), []), hard=(with_layer(nn.Tanh), [HardExamples]),
             spectral=(with_layer(spectral), []), old_spectral=(with_layer(old_spectral), []), mixed=(with_layer(dropout), [MixUp, partial(CpuMixedPrecision, 'bf16')]))

@pytest.mark.thin(3)
@pytest.mark.parametrize('share', [.8, .5])
@pytest.mark.parametrize('kind', kinds)
def test_whatever_changes(kind, share):
    "Later epochs, rare draws, state of the model and the loss; the loss begins anew for each fit"
    make,cbs = kinds[kind]
    def fresh(**kwargs):
        learn = make(**kwargs)
        learn.loss_func = deepcopy(learn.loss_func)
        return learn
    big,small = limited(fresh, share, *cbs)
    assert_equal_fits(small, big)
    assert blocks(small).level > 0
    if kind == 'hard_loss': assert small.loss_func.calls == big.loss_func.calls == 8

def test_one_callback_in_two_learners():
    "What was found for the first one is forgotten"
    accum = exact()
    for make in dropped,normed:
        big = run(make, Activations())
        for share in .6,1.1:
            small = run(make, Activations(big.activations.mb*share), accum)
            assert_equal_fits(small, big)
            assert (accum.way.level > 0) == (share < 1) and not small._grab_cbs(ActivationCheckpointing)

# Counted

class Passes:
    "Counts the forward passes of the model in training, those that fail included, and notes the samples of each"
    def __init__(self, learn): self.sizes = []; learn.model.register_forward_pre_hook(self.count)
    def count(self, m, args):
        if m.training: self.sizes.append(len(args[0]))

autos = [exact, partial(GradientAccumulation, micro_batch_size='auto'), ActivationCheckpointing, partial(GradientCache, 'auto')]

@pytest.mark.parametrize('cb', autos)
@pytest.mark.parametrize('make', [plain, dropped, normed, contrastive_dropped, resnet])
def test_the_plain_fit_where_all_fits(make, cb):
    "As many passes, the same random numbers afterwards, and the fit bit for bit"
    res = []
    for cbs in [],[cb()]:
        learn = seeded(partial(make, cbs=cbs))
        passes = Passes(learn)
        set_seed(7)
        fit(learn, 2, 1e-2)
        res.append((learn, passes.sizes, torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()))
    (big,*a),(small,*b) = res
    assert_equal_fits(small, big)
    assert a[0] == b[0] and torch.equal(a[1], b[1]) and a[2:] == b[2:]

deep_mlp = partial(mlp, batchnorm, nn.Tanh, n=512)

@pytest.mark.parametrize('share', [.9, .75, .6, .5])
def test_as_few_blocks_as_memory_requires(share):
    "Those with which the batch fits, and without the last of which it does not; found with few passes that fail"
    big,small = limited(deep_mlp, share, n_epoch=1, lr=1e-3)
    n,level = len(blocks(small).found),blocks(small).level
    def fits(k):
        cbs = [Activations(big.activations.mb*share), ActivationCheckpointing(lambda m: [o for o in m][:k], adapt=False)] if k else [Activations(big.activations.mb*share)]
        try: return run(deep_mlp, *cbs, n_epoch=1, lr=1e-3)
        except torch.OutOfMemoryError: return None
    assert 0 < level <= n and fits(level) and not fits(level-1)
    learn = seeded(partial(deep_mlp, cbs=[Activations(big.activations.mb*share), exact()]))
    passes = Passes(learn)
    fit(learn, 1, 1e-3)
    assert len(passes.sizes)-16 <= math.log2(n)+1 and len(losses(learn)) == 16

def test_texts_of_many_lengths():
    "Batches of 32 texts of 4 to 64 words, in a third of the memory of the longest: short ones run whole, and without recomputation"
    lengths = [64, 8, 32, 4, 16, 64, 8, 4]
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.e,self.layers,self.o = nn.Embedding(50, 16),nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(8)]),nn.Linear(16, 3)
        def forward(self, x): return self.o(self.layers(self.e(x)).mean(1))
    def make(**kwargs):
        g = torch.Generator().manual_seed(0)
        batches = [(torch.randint(50, (32, n), generator=g), torch.randint(3, (32,), generator=g)) for n in lengths]
        dls = DataLoaders(*[torch.utils.data.DataLoader(batches, batch_size=None)]*2)
        for o in dls.loaders: o.bs = 32
        return Learner(dls, Words(), CrossEntropyLossFlat(), opt_func=SGD, **kwargs)
    big = run(make, Activations())
    limit,sizes = big.activations.mb/3,[]
    auto = seeded(partial(make, cbs=[Activations(limit), GradientAccumulation(micro_batch_size='auto')]))
    passes = Passes(auto)
    for _ in range(2):
        passes.sizes.clear()
        fit(auto, 1)
    assert passes.sizes.count(32) == 4 and len(passes.sizes) == 4+2+3+2*4  # whole up to 8 words, two pieces of 16, three of 32, four of 64
    levels = []
    small = run(make, Activations(limit*1.4), accum := exact(), Callback(after_loss=lambda self: self.training and levels.append((self.x.shape[1], accum.way.level))))
    assert_equal_fits(small, big)
    assert all(k == 0 for n,k in levels if n <= 16) and any(k > 0 for n,k in levels if n == 64)

def test_a_second_fit_does_not_search_again():
    "An unfrozen model is another one"
    big = run(normed, Activations())
    learn = seeded(partial(normed, cbs=[Activations(big.activations.mb*.6), exact()], splitter=halves))
    passes = Passes(learn)
    def failed():
        passes.sizes.clear()
        fit(learn, 3)
        return len(passes.sizes)-6
    learn.freeze()
    failed()
    assert failed() == 0
    learn.unfreeze()
    assert failed() > 0 and failed() == 0
    assert not learn._grab_cbs(ActivationCheckpointing) and not any('forward' in vars(m) for m in learn.model.modules())

# What it says

@pytest.mark.parametrize('share,says', [(1.1, 'fits in memory'), (.6, r'fits if \d of 4 blocks are recomputed'), (.3, 'fits if 4 of 4 blocks are recomputed, and what they keep is on the CPU')])
def test_one_line(share, says, capsys):
    big = run(normed, Activations())
    run(normed, Activations(big.activations.mb*share), exact(), n_epoch=4, aloud=True)
    assert re.fullmatch(f'exact=True: each batch of 32 {says}\n', capsys.readouterr().out)

def test_a_short_fit_says_it_at_its_end(capsys):
    big = run(normed, Activations())
    run(partial(normed, n=32), Activations(big.activations.mb*.6), exact(), n_epoch=1, aloud=True)
    assert re.fullmatch(r'exact=True: each batch of 32 fits if \d of 4 blocks are recomputed\n', capsys.readouterr().out)

def test_blocks_of_ones_own(capsys):
    "Those of an ActivationCheckpointing in the same Learner, as few of them as memory requires"
    big = run(normed, Activations())
    own = ActivationCheckpointing(lambda m: [m[2], m[3]])
    small = run(normed, Activations(big.activations.mb*.9), exact(), own, aloud=True)
    assert_equal_fits(small, big)
    assert own.level == 1 and 'ActivationCheckpointing: each batch of 32 fits if 1 of 2 blocks are recomputed' in capsys.readouterr().out

# Memory that runs out later

class Shrinks(Callback):
    "From batch `at` on, there is a `share` of the memory"
    order = Activations.order-1
    def __init__(self, at, limit): self.at,self.limit,self.batches = at,limit,0
    def before_fit(self): self.batches = 0
    def before_batch(self):
        if not self.training: return
        self.batches += 1
        if self.batches == self.at: self.activations.limit = self.limit

@pytest.mark.parametrize('make,first,later,says', [
    (plain, 1.1, .6, r'\d of 4 blocks are recomputed'), (normed, 1.1, .6, r'\d of 4 blocks are recomputed'), (normed, .85, .6, r'\d of 4 blocks are recomputed'),
    (normed, 1.1, .3, 'and what they keep is on the CPU'), (contrastive_dropped, 1.1, .6, r'\d of 4 blocks are recomputed')])
def test_memory_runs_out_later(make, first, later, says):
    "More blocks in mid-fit, with a warning, and the fit stays that of whole batches"
    make = partial(make, n=128)
    big = run(make, Activations(), opt_func=SGD)
    mb = big.activations.mb
    with pytest.warns(UserWarning, match=f'out of memory in training: from now on, .*({says})'):
        small = run(make, Activations(mb*first), Shrinks(3, mb*later), exact(), opt_func=SGD)
    assert_equal_fits(small, big)

# What cannot be

def test_errors():
    for o in 1,'auto',None:
        with pytest.raises(TypeError, match='exact must be True or False, not'): GradientAccumulation(exact=o)
    for size in 8,'auto':
        with pytest.raises(ValueError, match=f'exact=True runs whole batches, and micro_batch_size={size!r} splits them: use one of them'): run(normed, exact(micro_batch_size=size))
    with pytest.raises(ValueError, match='exact=True is for windows of one loader batch, and a schedule has larger ones'): GradientAccumulationSchedule(32, 64, exact=True)
    with pytest.raises(ValueError, match=r'exact=True: 2 batches of 32 are not one batch of 64, since BatchNorm, dropout .*: set bs=64 in the DataLoader'):
        run(partial(plain, n=128), exact(accum_bs=64))
    with pytest.raises(ValueError, match='exact=True runs whole batches, and GradientCache splits them: leave one of them out'): run(normed, exact(), GradientCache(8))

@pytest.mark.parametrize('make,differs', [(plain, ''), (normed, r' \(.*BatchNorm.*\)'), (dropped, r' \(.*(dropout|random numbers).*\)')])
def test_what_does_not_fit_even_so(make, differs):
    "The error names what does, and what that changes; it comes before the first step and leaves nothing"
    learn = seeded(partial(make, cbs=[Activations(1e-6), exact()]))
    before = state(learn)
    with pytest.raises(RuntimeError, match=rf"^exact=True: a batch of 32 does not fit in memory, not even with all blocks recomputed .*: micro_batch_size='auto' splits it{differs}$") as e: fit(learn, 1)
    assert type(e.value.__cause__) is torch.OutOfMemoryError
    assert all(torch.equal(a, b) for a,b in zip(before.values(), state(learn).values()))
    assert not any('forward' in vars(m) for m in learn.model.modules()) and '_with_events' not in vars(learn)
    learn.activations.limit = 1.
    learn.remove_cb(GradientAccumulation)
    learn.add_cb(exact())
    fit(learn, 1)
    assert blocks(learn).level == 0

class Flat(nn.Module):
    "No list of blocks"
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(20, 20),nn.Linear(20, 4)
    def forward(self, x): return self.b(self.a(x).tanh())

def test_a_model_without_blocks():
    "It runs where it fits; else the error says how to name blocks"
    def make(**kwargs):
        learn = mlp(**kwargs)
        torch.manual_seed(0)
        learn.model = Flat()
        return learn
    big,small = limited(make, 1.)
    assert_equal_fits(small, big)
    with pytest.raises(RuntimeError, match=r"finds no blocks in Flat.*blocks=lambda model: \[\.\.\.\]; or micro_batch_size='auto' splits it"): limited(make, .6)

class Unsteady(nn.Module):
    "Differs from run to run, by what is no part of the model"
    n = 0
    def forward(self, x):
        Unsteady.n += 1
        return x*(1+Unsteady.n%7/10)

def test_a_model_that_differs_from_run_to_run():
    with pytest.raises(RuntimeError, match='gives other outputs when it is run again'): limited(partial(mlp, Unsteady), .6)

@pytest.mark.parametrize('at', [3, 4, 6, 7, 8, 9, 12])
def test_windows_beside_blocks(at):
    "Memory runs out in any batch of windows of four, whose last batches are not among those that are looked at"
    def windows(): return GradientAccumulation(128, verbose=False)
    make = partial(mlp, batchnorm, dropout, n=512)
    big = run(make, Activations(), windows())
    mb = big.activations.mb
    with pytest.warns(UserWarning, match='out of memory in training'):
        small = run(make, Activations(mb), Shrinks(at, mb*.6), windows(), ActivationCheckpointing())
    assert_equal_fits(small, big)
    assert small.activation_checkpointing.level > 0 and {*small.recorder.accum_bs} == {128}

# Beside a fit

class LimitsValidation(nn.Module):
    "A validation batch has 8 samples at most"
    def __init__(self, m): super().__init__(); self.m = m
    def forward(self, x):
        if not self.training and len(x) > 8: raise torch.OutOfMemoryError('CUDA out of memory')
        return self.m(x)

def test_validation_and_prediction():
    def make(**kwargs):
        learn = normed(**kwargs)
        learn.model = nn.Sequential(LimitsValidation(learn.model))
        return learn
    big,small = run(normed, Activations()),run(make, exact())
    assert_same(weights(small), weights(big))
    assert_same(floats(small.recorder.values), floats(big.recorder.values), 1e-6)
    with quiet(small), quiet(big):
        assert_same(small.get_preds()[0], big.get_preds()[0], 1e-6)
        assert_same(tensor(small.validate()[0]), tensor(big.validate()[0]), 1e-6)

def test_lr_find():
    "It finds what it finds in memory that suffices"
    big = run(normed, Activations())
    plain_,ours = (seeded(partial(normed, cbs=cbs)) for cbs in ([], [Activations(big.activations.mb*.6), exact()]))
    for learn in plain_,ours:
        torch.manual_seed(3)
        with quiet(learn): learn.lr_find(num_it=6, show_plot=False)
    assert losses(plain_) == losses(ours)
    assert_same_state(ours, plain_)
    for learn in plain_,ours:
        set_seed(3)
        fit(learn, 1)
    assert_equal_fits(ours, plain_)

def test_export(tmp_path):
    big,small = limited(normed_images, .6)
    small.path = tmp_path
    small.export('ours.pkl')
    loaded,x = load_learner(tmp_path/'ours.pkl'),torch.randn(4, 3, 32, 32)
    assert_same(loaded.model.eval()(x), small.model.eval()(x))
    loaded.dls = small.dls
    fit(loaded, 1)
    assert len(losses(loaded)) > 0

def test_the_size_in_use_is_that_of_the_batch():
    "Where nothing is split, also where blocks are recomputed"
    for bs in 16,32: assert fit(make_learner(bs, cbs=(accum := ActivationCheckpointing())), 1) and accum.micro_bs == bs
