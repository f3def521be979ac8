"exact=True: under a limit of memory, the fit of the whole batch. Against the plain Learner, which knows no limit"
import pytest, timm
from fastai.callback.mixup import MixUp
from fastai.tabular.all import Categorify, Normalize, TabularDataLoaders, TabularModel
from fastai.vision.all import create_vision_model, resnet18, resnet34, unet_learner, vision_learner

from common import *
from benchmarks.cases import Task, training
from benchmarks.counts import count_calls
from fastxtend_accum.cache import GradientCache
from fastxtend_accum.checkpointing import ActivationCheckpointing
from fastxtend_accum.demo import Activations
from test_applications import text_classifier
from test_checkpointing import Runs, assert_same_state, image_dls, narrow_unet, state, unet

FLOAT32 = 1e-5

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

def assert_close(small, big, tol):
    "Weights, buffers, losses, metrics"
    if not tol: assert_same_state(small, big)
    for k,v in state(big).items(): assert_same(state(small)[k].double(), v.double(), tol)
    assert_same(losses(small), losses(big), tol)
    assert len(losses(small)) == len(losses(big)) > 1
    assert_same(floats(small.recorder.values), floats(big.recorder.values), tol)

def accum(learn): return first(learn._grab_cbs(GradientAccumulation))
def way(learn): return accum(learn).way.name

whole_batches = [resnet, pytest.param(resnet_34, marks=pytest.mark.long), narrow_unet, pytest.param(unet, marks=pytest.mark.long),
                 tabular, contrastive_resnet, centered, normed]

@pytest.mark.thin(5)
@pytest.mark.parametrize('share', [.85, .6, .5])
@pytest.mark.parametrize('make', whole_batches)
def test_bit_for_bit(make, share):
    "What looks at all samples of a batch is run on all of them"
    big,small = limited(make, share, n_epoch=1)
    assert_close(small, big, 0.)
    assert 'recomputed' in way(small)

# Adam, which divides a gradient by its own size, would make a difference of 1e-3 out of one of rounding
@pytest.mark.thin(5)
@pytest.mark.parametrize('share', [.85, .6, .5])
@pytest.mark.parametrize('make', [plain, dropped, vit, convnext, contrastive, contrastive_dropped, awd_lstm, segmentation])
def test_up_to_rounding(make, share):
    "Pieces, where they are exact"
    big,small = limited(make, share, opt_func=SGD, lr=.1)
    assert_close(small, big, FLOAT32)
    assert way(small) != 'the whole batch'

@pytest.mark.thin(3)
@pytest.mark.parametrize('make,cbs,kwargs,tol', [
    (normed_images, [MixUp], dict(method='fine_tune', n_epoch=1, splitter=halves), 0.),
    (resnet, [MixUp], dict(method='fine_tune', n_epoch=1), 0.),  # a frozen body, then all of it
    (normed_images, [partial(CpuMixedPrecision, 'bf16')], dict(n_epoch=1), 0.),
    (normed_images, [MixUp, partial(CpuMixedPrecision, 'bf16')], dict(n_epoch=1), 0.),
    (dropped, [MixUp], dict(opt_func=SGD), FLOAT32),
    (plain, [], dict(opt_func=partial(Adam, eps=1e-2)), FLOAT32),  # with the usual 1e-5, gradients that are but rounding take large steps
    (plain, [partial(CpuMixedPrecision, 'bf16')], dict(opt_func=SGD), 1e-3)])  # the sums of bfloat16 are rounded
def test_beside_others(make, cbs, kwargs, tol):
    big,small = limited(make, .6, *cbs, **kwargs)
    assert_close(small, big, tol)
    assert way(small) != 'the whole batch' and (tol or 'recomputed' in way(small))

def test_a_window_of_several_batches_is_one_batch():
    "Where pieces are exact; 64 samples from batches of 16"
    big = run(partial(plain, bs=64, n=128), opt_func=SGD)
    for share in 2.,.6:
        small = limited(partial(plain, bs=16, n=128), share, ours=partial(exact, accum_bs=64), opt_func=SGD)[1]
        assert len(losses(small)) == len(losses(big)) == 4
        assert {*small.recorder.accum_bs} == {64} and way(small) == ('the whole batch' if share > 1 else 'micro-batches')

def test_a_schedule():
    big,small = limited(plain, .6, opt_func=SGD, ours=lambda: GradientAccumulationSchedule(32, 64, exact=True), n_epoch=2)
    assert small.recorder.accum_bs[-1] == 64 and way(small) == 'micro-batches'
    given = run(plain, GradientAccumulationSchedule(32, 64), opt_func=SGD)
    assert_close(small, given, FLOAT32)

@pytest.mark.parametrize('make,name,size', [(plain, 'micro-batches', 8), (dropped, 'micro-batches with the same draws', 7), (normed, 'the whole batch', 32)])
def test_a_number_is_the_size_of_pieces_that_are_exact(make, name, size):
    "What is not exact in pieces is tried as with 'auto'"
    def sizes(learn): learn.model[0].register_forward_hook(lambda m, args, out: seen.append(len(out)) if m.training else None); return learn
    seen,big = [],run(make, opt_func=SGD)
    for epoch in range(2):
        learn = seeded(lambda: make(cbs=exact(micro_batch_size=8), opt_func=SGD))
        set_seed(7)
        fit(sizes(learn), 1)
        seen.clear()
        fit(learn, 1)
    assert way(learn) == name and max(seen) == size and sum(seen) == 64

class Weighs(nn.Module):
    "Keeps more of its weight than of a batch, so that pieces of one sample save little"
    def __init__(self): super().__init__(); self.weight = nn.Parameter(torch.randn(20, 20)/5)
    def forward(self, x): return F.linear(x, self.weight.repeat(8, 1).tanh()).unflatten(1, (8, 20)).mean(1)

def test_pieces_of_one_sample_that_do_not_fit():
    "Nor do the few samples that would show whether pieces are exact; blocks of the whole batch are recomputed"
    big,small = limited(partial(mlp, Weighs), .5, opt_func=SGD)
    assert_close(small, big, 0.)
    assert way(small) == 'recomputed blocks' and accum(small).ways.set_index('way').difference['micro-batches'] == math.inf

def test_pieces_that_repeat_draws_have_two_samples():
    big,small = limited(dropped, .5, ours=partial(exact, micro_batch_size=1), opt_func=SGD)
    assert_close(small, big, FLOAT32)
    assert way(small) == 'micro-batches with the same draws' and accum(small).micro_bs == 2

class Unsteady(nn.Module):
    "Differs from run to run, by what is no part of the model"
    n = 0
    def forward(self, x):
        Unsteady.n += 1
        return x*(1+Unsteady.n%7/10)

def test_a_model_that_differs_from_run_to_run():
    "It is neither split nor run again"
    with pytest.raises(RuntimeError, match='fits in no way') as e: limited(partial(mlp, Unsteady), .6)
    assert 'gives other outputs when it is run again' in str(e.value.__cause__)

@pytest.mark.parametrize('bs', [2, 3, 5])
@pytest.mark.parametrize('make', [plain, dropped, normed])
def test_small_batches(make, bs):
    "Four samples show what is exact in pieces; of fewer, the whole batch would have to fit"
    big,small = limited(partial(make, bs=bs, n=4*bs), .85, opt_func=SGD)
    assert_close(small, big, FLOAT32 if 'micro' in way(small) else 0.)
    assert (accum(small).ways.difference[1:].min() < FLOAT32) == (bs == 5 and make is not normed)

# What it costs

def freeze_norm(learn):
    for m in learn.model.modules():
        if isinstance(m, nn.BatchNorm1d):
            for p in m.parameters(): p.requires_grad_(False)
    return learn

@pytest.mark.parametrize('make,cbs', [(plain, []), (normed, [BnFreeze])])
def test_nothing_is_recomputed_where_pieces_are_exact(make, cbs):
    "Each sample passes the model once; frozen BatchNorm keeps nothing of a batch"
    def frozen(**kwargs): return freeze_norm(make(**kwargs)) if cbs else make(**kwargs)
    big,small = limited(frozen, .85, *cbs, opt_func=SGD)
    assert_close(small, big, FLOAT32)
    assert_once = Samples(small)
    fit(small, 1)
    assert assert_once.n == 64 and way(small).startswith('micro-batches')

class Samples:
    "Counts the samples that have passed the model in training"
    def __init__(self, learn): self.n = 0; learn.model.register_forward_hook(self.count)
    def count(self, m, args, out): self.n += len(out)*m.training

def recomputed(share, make=resnet):
    small = limited(make, share, n_epoch=1, whole=fits_in.setdefault(make, run(make, Activations(), n_epoch=1)))[1]
    return accum(small).way.cb.fitting.size
fits_in = {}

def test_less_memory_takes_more_blocks():
    "And no more than needed"
    few,many = (recomputed(o, partial(mlp, batchnorm, nn.Tanh, nn.Tanh)) for o in (.9, .6))
    assert 0 < few < many

@pytest.mark.parametrize('make,batches', [(resnet, 7.75), (vit, 8.75), (narrow_unet, 7.75)])
def test_a_search_is_short(make, batches):
    "Samples that it sends to the model, those of passes that run out of memory included"
    big = run(make, Activations(), n_epoch=1)
    learn = seeded(partial(make, cbs=[Activations(big.activations.mb*.6), exact()]))
    sent,bs = [],learn.dls.train.bs
    learn.model.register_forward_pre_hook(lambda m, args: sent.append(len(args[0])*m.training))
    fit(learn, 1, 1e-2)
    searched = sum(sent)/bs-len(losses(learn))
    assert 2 < searched <= batches

@pytest.mark.parametrize('make', [plain, dropped, normed, contrastive, contrastive_dropped])
def test_the_plain_fit_where_all_fits(make, capsys):
    big,small = limited(make, 1., aloud=True)
    assert_close(small, big, 0.)
    assert way(small) == 'the whole batch' and capsys.readouterr().out == 'exact=True: each batch of 32 fits in memory\n'

def test_it_costs_what_auto_costs():
    "Python calls per batch, once the way is found; as many as before in a fit that needs no pieces"
    def case(**kwargs): return lambda task, k: training(task, GradientAccumulation(micro_batch_size='auto', **kwargs))
    assert count_calls(case(exact=True), 8) == count_calls(case(), 8)

# The search

def searches(monkeypatch, before=noop, after=noop):
    "The list of what each search returns"
    from fastxtend_accum import exact
    found,find_way = [],exact.find_way
    def seen(accum, *args):
        before(accum.learn)
        found.append(find_way(accum, *args))
        after(accum.learn)
        return found[-1]
    monkeypatch.setattr(exact, 'find_way', seen)
    return found

class Traces:
    "All that a search could leave behind"
    def __init__(self, learn):
        def copied(o): return o.detach().clone() if isinstance(o, Tensor) else [*o] if isinstance(o, list) else dict(o) if isinstance(o, dict) else o
        self.random = [torch.get_rng_state(), tensor(np.random.get_state()[1]), tensor(random.getstate()[1][:-1]), tensor(learn.dls.train.rng.getstate()[1][:-1])]
        model = learn.model
        self.tensors = [copied(o) for o in [*model.parameters(), *model.buffers(), *learn.xb, *learn.yb]]
        self.grads = [(p.grad, copied(p.grad)) for p in model.parameters()]
        self.same = [*learn.cbs, *learn.dls.loaders, *learn.xb, *learn.yb, learn.opt, learn.model, learn.loss_func, learn.dl]
        self.modules = [(m.training, {*vars(m)}, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
        self.attrs = [{k:copied(v) for k,v in vars(o).items()} for o in [learn, learn.opt, *learn.cbs.filter(lambda cb: not isinstance(cb, GradientAccumulation))]]
        self.hypers = [dict(o) for o in learn.opt.hypers]

    def assert_same(self, other):
        for a,b in zip(self.random+self.tensors, other.random+other.tensors, strict=True): assert torch.equal(a, b)
        for (a,x),(b,y) in zip(self.grads, other.grads, strict=True): assert a is b and (a is None or torch.equal(x, y))
        assert len(self.same) == len(other.same) and all(a is b for a,b in zip(self.same, other.same))
        assert self.modules == other.modules and self.hypers == other.hypers
        for a,b in zip(self.attrs, other.attrs, strict=True):
            assert a.keys() == b.keys()
            for k in a: assert equal(a[k], b[k]), k

def equal(a, b):
    if isinstance(a, Tensor): return torch.equal(a, b)
    if isinstance(a, (list,tuple)): return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict): return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return a is b or a == b

class Draws(Callback):
    "Draws numbers, and keeps them and the batches"
    def before_fit(self): self.seen,self.batches = [],0
    def before_batch(self):
        self.batches += 1
        self.seen += [random.random(), np.random.rand(), float(torch.rand(()))]
        self.last = [o.clone() for o in self.xb]
    def after_pred(self): self.learn.pred = self.learn.pred*1.

@pytest.mark.thin(2)
@pytest.mark.parametrize('share', [2., .6, .5])
@pytest.mark.parametrize('make', [plain, dropped, normed, contrastive_dropped, tabular])
def test_the_search_leaves_no_trace(make, share, monkeypatch):
    traces = []
    def keep(learn): traces.append(Traces(learn))
    found = searches(monkeypatch, keep, keep)
    big,small = limited(make, share, Draws, *([MixUp] if make in (plain, dropped, normed) else []))
    assert len(found) > 0 and len(traces) > 1
    traces[-2].assert_same(traces[-1])
    assert small.draws.seen == big.draws.seen and small.draws.batches == big.draws.batches

def test_the_search_does_not_warn(recwarn):
    "Of a loss that compares samples, in pieces, which are only tried"
    limited(contrastive, .6)
    class Named(nn.Sequential):
        "Attributes of a model that a callback might have, too"
        grads,buffer,start,seconds,size = 1,2,3,4,5
    limited(lambda **kwargs: mlp(batchnorm, **kwargs), .6)
    assert not [o for o in recwarn if 'accumulation is not exact' in str(o.message) or 'shadowing' in str(o.message)]

def test_a_second_fit_does_not_search_again(monkeypatch):
    "An unfrozen model is another one"
    found = searches(monkeypatch)
    big = run(normed, Activations())
    learn = seeded(partial(normed, cbs=[Activations(big.activations.mb*.6), exact()], splitter=halves))
    learn.freeze()
    for n in 1,1: assert [fit(learn, 1) is learn, len(found)] == [True, n]
    learn.unfreeze()
    for n in 2,2: assert [fit(learn, 1) is learn, len(found)] == [True, n]
    assert not learn._grab_cbs(ActivationCheckpointing) and not any('forward' in vars(m) for m in learn.model.modules())

def test_what_was_tried(capsys):
    columns = ['way','difference','fits','time']
    def tried(make, share):
        ways = limited(make, share, aloud=True)[1].gradient_accumulation.ways
        assert isinstance(ways, pd.DataFrame) and list(ways.columns) == columns
        return ways.set_index('way')
    fits = tried(normed, 1.)
    assert list(fits.index) == ['the whole batch'] and fits.fits.all()
    pieces = tried(plain, .6)
    assert list(pieces.index) == ['the whole batch','micro-batches'] and list(pieces.fits) == [False,True]
    assert 0 < pieces.difference['micro-batches'] < 1e-5
    capsys.readouterr()
    blocks = tried(normed, .6)
    assert blocks.difference['micro-batches'] > .01 and blocks.fits['recomputed blocks'] and not blocks.fits['the whole batch']
    out = capsys.readouterr().out
    assert re.search(r'each batch of 32 fits if \d of 4 blocks are recomputed', out) and 'in micro-batches, the gradient would be off by' in out
    assert out.count('\n') == 1

def test_it_says_how_far_the_gradient_is_off(capsys):
    "As a plain backward pass finds it; BatchNorm's counter of batches is off by 100% after two of them"
    torch.manual_seed(0)
    m = nn.Sequential(*[nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20), nn.ReLU()) for _ in range(4)], nn.Linear(20, 4))
    x,y = torch.randn(32, 20),torch.randint(4, (32,))
    def gradient(*parts):
        m.zero_grad()
        for o in parts: (F.cross_entropy(m(x[o]), y[o])/len(parts)).backward()
        return torch.cat([p.grad.flatten() for p in m.parameters()])
    whole = gradient(range(4))
    off = (gradient(range(2), range(2, 4))-whole).norm()/whole.norm()
    dls = DataLoaders(*[DataLoader(list(zip(x, y)), bs=32)]*2)
    def learner(*cbs): return Learner(dls, deepcopy(m), CrossEntropyLossFlat(), cbs=cbs)
    mb = fit(learner(Activations()), 1).activations.mb
    capsys.readouterr()
    fit_aloud(learner(Activations(mb*.6), exact()), 1)
    assert f'in micro-batches, the gradient would be off by {off:.0%}' in capsys.readouterr().out and not .995 < off < 1.005

class Counter(nn.Module):
    "Counts its forward passes in a buffer, and changes nothing else"
    def __init__(self):
        super().__init__()
        self.register_buffer('passes', torch.zeros(()))
    def forward(self, x):
        self.passes += 1
        return x

def test_it_says_that_only_a_buffer_is_off():
    with pytest.raises(ValueError, match=r"\(the model's buffers would be off by 100%\): set bs=64 in the DataLoader"):
        run(partial(mlp, Counter, n=128), exact(accum_bs=64))

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

@pytest.mark.parametrize('make,first,later,n,says', [
    (plain, 1., .6, 1, 'is split into 2 micro-batches of 16'), (normed, 1., .6, 1, r'fits if \d of 4 blocks are recomputed'),
    (normed, .85, .6, 2, r'4 of 4 blocks are recomputed|3 of 4 blocks are recomputed'), (normed, 1., .3, 1, 'and what they keep is on the CPU'),
    (contrastive, 1., .6, 1, 'runs in pieces of')])
def test_memory_runs_out_later(make, first, later, n, says):
    "The way changes in mid-fit, with a warning, and the fit stays that of whole batches"
    make = partial(make, n=128)
    big = run(make, Activations(), opt_func=SGD)
    mb = big.activations.mb
    with pytest.warns(UserWarning, match=f'out of memory in training: from now on, .*({says})') as said:
        small = run(make, Activations(mb*first), Shrinks(3, mb*later), exact(), opt_func=SGD)
    assert sum('out of memory' in str(o.message) for o in said) == n
    assert_close(small, big, 0. if make.func is normed.func and make.args else FLOAT32)

# What cannot be

def test_a_size_of_micro_batches_is_found_unless_given():
    for args,n,size in ((dict(), None, 'auto'), (dict(accum_bs=64), 64, 'auto'), (dict(micro_batch_size='auto'), None, 'auto'), (dict(micro_batch_size=8), None, 8)):
        accum = GradientAccumulation(**args, exact=True)
        assert (accum.accum_bs, accum.micro_batch_size) == (n, size)
    assert GradientAccumulationSchedule(32, 64, exact=True).micro_batch_size == 'auto'

def test_errors(monkeypatch):
    for o in 1,'auto',None:
        with pytest.raises(TypeError, match='exact must be True or False, not'): GradientAccumulation(exact=o)
    with pytest.raises(ValueError, match='leave same_draws out'): exact(same_draws=True)
    with pytest.raises(ValueError, match=r'exact=True: 2 batches of 32 cannot equal one of 64, .* BatchNorm .* off by \d+%\): set bs=64 in the DataLoader'):
        run(partial(normed, n=128), exact(accum_bs=64))
    with pytest.raises(ValueError, match='set bs=64 in the DataLoader'):
        run(partial(normed, n=128), GradientAccumulationSchedule(32, 64, exact=True))
    for cb in GradientCache(8),ActivationCheckpointing():
        with pytest.raises(ValueError, match=f'exact=True uses {type(cb).__name__} itself where it is needed: leave it out'): run(normed, exact(), cb)
    with pytest.raises(RuntimeError, match='a batch of 32 fits in no way, not even with all blocks .* or leave out exact=True') as e:
        run(normed, Activations(1e-6), exact())
    assert isinstance(e.value.__cause__, RuntimeError)

@pytest.mark.parametrize('make,bs,why', [(plain, 2, 'fewer than 3 samples'), (normed, 3, 'Expected more than 1 value per channel when training.*')])
def test_parts_that_cannot_be_compared(make, bs, why):
    "Two samples do not make two parts of two, which some ways need; BatchNorm cannot normalize one"
    with pytest.raises(ValueError, match=rf'2 batches of {bs} may not equal one of {2*bs}, since two parts of a batch could not be compared \({why}\): set bs={2*bs} '):
        run(partial(make, bs=bs, n=4*bs), exact(accum_bs=2*bs))

def test_errors_come_before_the_first_step_and_leave_nothing():
    learn = seeded(partial(normed, cbs=[Activations(1e-6), exact()]))
    before = state(learn)
    with pytest.raises(RuntimeError, match='fits in no way'): fit(learn, 1)
    assert all(torch.equal(a, b) for a,b in zip(before.values(), state(learn).values()))
    assert not any('forward' in vars(m) for m in learn.model.modules()) and '_with_events' not in vars(learn)
    learn.activations.limit = 1.
    fit(learn, 1)
    assert way(learn) == 'the whole batch'

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

def test_finders():
    "`lr_find` finds what it finds in memory that suffices, and `micro_bs_find` leaves the way as it is"
    big = run(normed, Activations())
    plain_,ours = (seeded(partial(normed, cbs=cbs)) for cbs in ([], [Activations(big.activations.mb*.6), exact()]))
    for learn in plain_,ours:
        torch.manual_seed(3)
        with quiet(learn): learn.lr_find(num_it=6, show_plot=False)
    assert losses(plain_) == losses(ours)
    assert_same_state(ours, plain_)
    with quiet(ours): assert ours.micro_bs_find() == 16
    assert_same_state(ours, plain_)
    for learn in plain_,ours:
        set_seed(3)
        fit(learn, 1)
    assert_close(ours, plain_, 0.)

def test_export(tmp_path):
    big,small = limited(normed_images, .6)
    small.path = tmp_path
    small.export('ours.pkl')
    loaded,x = load_learner(tmp_path/'ours.pkl'),torch.randn(4, 3, 32, 32)
    assert_same(loaded.model.eval()(x), small.model.eval()(x))
    loaded.dls = small.dls
    fit(loaded, 1)
    assert way(loaded) == way(small)

def test_the_size_in_use_is_that_of_the_batch():
    "Where nothing is split, also where blocks are recomputed"
    for bs in 16,32: assert fit(make_learner(bs, cbs=(accum := GradientAccumulation(exact=True))), 1) and accum.micro_bs == bs
