"exact=True: under a limit of memory, the fit of the whole batch, bit for bit. Against the plain Learner, which knows no limit"
import re

import pytest, timm
from fastai.callback.mixup import MixUp
from fastai.tabular.all import Categorify, Normalize, TabularDataLoaders, TabularModel
from fastai.text.all import AWD_LSTM, SortedDL, TensorText, awd_lstm_clas_config, pad_input_chunk, text_classifier_learner
from fastai.vision.all import create_vision_model, resnet18, resnet34, vision_learner

from common import *
from benchmarks.cases import training
from benchmarks.counts import count_calls
from fastxtend_accum.cache import GradientCache
from fastxtend_accum.checkpointing import ActivationCheckpointing
from fastxtend_accum.demo import Activations
from fastxtend_accum.memory import NothingFits
from test_applications import text_classifier
from test_checkpointing import assert_same_state, image_dls, narrow_unet, state, unet

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
    "A mean and a sum"
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

class Weighs(nn.Module):
    "Keeps more of its weight than of a batch"
    def __init__(self): super().__init__(); self.weight = nn.Parameter(torch.randn(20, 20)/5)
    def forward(self, x): return F.linear(x, self.weight.repeat(8, 1).tanh()).unflatten(1, (8, 20)).mean(1)

def mlp(*extra, loss=None, bs=32, n=64, depth=4, **kwargs):
    "Layers with what `extra` makes after each"
    g = torch.Generator().manual_seed(0)
    ds = list(zip(torch.randn(n, 20, generator=g), torch.randint(4, (n,), generator=g)))
    layers = [nn.Sequential(nn.Linear(20, 20), *[o() for o in extra], nn.ReLU()) for _ in range(depth)]
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
weighs = partial(mlp, Weighs)

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

def assert_same_fit(small, big, tol=0.):
    "Weights, buffers, losses, metrics"
    if not tol: assert_same_state(small, big)
    for k,v in state(big).items(): assert_same(state(small)[k].double(), v.double(), tol)
    assert_same(losses(small), losses(big), tol)
    assert len(losses(small)) == len(losses(big)) > 1
    assert_same(floats(small.recorder.values), floats(big.recorder.values), tol)

def accum(learn): return first(learn._grab_cbs(GradientAccumulation))
def level(learn): return accum(learn).blocks.level

all_learners = [resnet, pytest.param(resnet_34, marks=pytest.mark.long), narrow_unet, pytest.param(unet, marks=pytest.mark.long), tabular, contrastive_resnet, vit, convnext, awd_lstm,
                segmentation, plain, dropped, centered, normed, contrastive, contrastive_dropped, weighs]

@pytest.mark.thin(5)
@pytest.mark.parametrize('share', [.85, .6, .5])
@pytest.mark.parametrize('make', all_learners)
def test_bit_for_bit(make, share):
    big,small = limited(make, share, n_epoch=1)
    assert_same_fit(small, big)
    assert level(small) > 0

@pytest.mark.thin(3)
@pytest.mark.parametrize('make,cbs,kwargs', [
    (normed_images, [MixUp], dict(method='fine_tune', n_epoch=1, splitter=halves)),
    (resnet, [MixUp], dict(method='fine_tune', n_epoch=1)),  # a frozen body, then all of it
    (normed_images, [partial(CpuMixedPrecision, 'bf16')], dict(n_epoch=1)),
    (normed_images, [MixUp, partial(CpuMixedPrecision, 'bf16')], dict(n_epoch=1)),
    (dropped, [MixUp, partial(CpuMixedPrecision, 'bf16')], {}),
    (dropped, [MixUp], dict(opt_func=SGD)),
    (plain, [partial(CpuMixedPrecision, 'fp16')], {})])
def test_beside_others(make, cbs, kwargs):
    big,small = limited(make, .6, *cbs, **kwargs)
    assert_same_fit(small, big)
    assert level(small) > 0

@pytest.mark.parametrize('bs', [2, 3, 5])
@pytest.mark.parametrize('make', [plain, dropped, normed])
def test_small_batches(make, bs):
    big,small = limited(partial(make, bs=bs, n=4*bs), .85)
    assert_same_fit(small, big)
    assert level(small) > 0

# What no trial on a few samples, or at the beginning of a fit, would have shown

class Experts(nn.Module):
    "Each takes the quarter of the batch that it prefers, as with expert choice routing"
    def __init__(self):
        super().__init__()
        self.gate,self.experts = nn.Linear(20, 2),nn.ModuleList(nn.Linear(20, 20) for _ in range(2))
    def forward(self, x):
        p = self.gate(x).softmax(1)
        for i,o in enumerate(self.experts):
            top = p[:,i].topk(len(x)//4).indices
            x = x.index_add(0, top, o(x[top]).tanh()*p[top,i,None])
        return x

class Capacity(nn.Module):
    "Of 4 experts, each takes the first samples that come to it: a quarter of the batch, and 4 at least. Of 4 samples or fewer, none is left out"
    def __init__(self): super().__init__(); self.gate,self.experts = nn.Linear(20, 4),nn.ModuleList(nn.Linear(20, 20) for _ in range(4))
    def forward(self, x):
        p = self.gate(x).softmax(1)
        chosen = p.argmax(1)
        one = F.one_hot(chosen, 4)
        kept = (one.cumsum(0)*one).sum(1) <= max(len(x)//4, 4)
        return x+torch.stack([o(x).tanh() for o in self.experts], 1)[range(len(x)),chosen]*p.amax(1)[:,None]*kept[:,None]

class InDict(nn.Module):
    "Counts its passes in a dict, and what it computes depends on the count"
    def __init__(self): super().__init__(); self.seen = dict(n=0)
    def forward(self, x):
        self.seen['n'] += self.training
        return x/(1+.01*self.seen['n'])

class RunningMax(nn.Module):
    "Divides by the largest value so far, which a frozen parameter holds"
    def __init__(self): super().__init__(); self.most = nn.Parameter(torch.full((20,), .1), requires_grad=False)
    def forward(self, x):
        if self.training: self.most.data.copy_(torch.maximum(self.most, x.detach().abs().amax(0)))
        return x/self.most

class Paths(nn.Module):
    "Stochastic depth that drops one path in 33"
    def forward(self, x): return x*torch.bernoulli(torch.full((len(x), 1), .97)).div(.97) if self.training else x

def spectral(): return nn.utils.parametrizations.spectral_norm(nn.Linear(20, 20))

class Hardest(nn.Module):
    "The mean over the harder half of the batch"
    def forward(self, pred, targ): return F.cross_entropy(pred, targ, reduction='none').topk(len(pred)//2).values.mean()

class HardExamples(Callback):
    "Trains on the harder half of each batch"
    run_valid = False
    def before_batch(self):
        with torch.no_grad(): hard = F.cross_entropy(self.model(self.x), self.y, reduction='none').topk(len(self.x)//2).indices
        self.learn.xb,self.learn.yb = (self.x[hard],),(self.y[hard],)

class Thaws(Callback):
    "BatchNorm trains from the second epoch on"
    def before_train(self):
        for m in self.model.modules():
            if isinstance(m, nn.BatchNorm1d): m.train(self.epoch > 0)

class Rises(Callback):
    "The rate of dropout rises in the fit, from 0"
    def before_batch(self):
        for m in self.model.modules():
            if isinstance(m, nn.Dropout): m.p = .5*self.pct_train

class OtherLoss(Callback):
    "A loss that compares the samples of the batch, from the second epoch on"
    def before_train(self): self.learn.loss_func = Contrast() if self.epoch else CrossEntropyLossFlat()

cases = dict(experts=(partial(mlp, Experts), []), capacity=(partial(mlp, Capacity), []), dict=(partial(mlp, InDict), []), running_max=(partial(mlp, RunningMax), []), paths=(partial(mlp, Paths), []),
             dropout=(dropped, []), spectral=(partial(mlp, spectral), []), hardest=(partial(mlp, loss=Hardest()), []), hard_examples=(plain, [HardExamples]), thaws=(normed, [Thaws]),
             rises=(dropped, [Rises]), other_loss=(plain, [OtherLoss]))

@pytest.mark.parametrize('share', [.8, .5])
@pytest.mark.parametrize('name', cases)
def test_whatever_the_model_does(name, share):
    make,cbs = cases[name]
    big,small = limited(partial(make, n=160), share, *cbs, n_epoch=3)
    assert_same_fit(small, big)
    assert level(small) > 0

@pytest.mark.parametrize('name', [o for o in cases if o != 'hard_examples'])  # chosen before the batch is split
def test_micro_batches_would_be_another_fit(name):
    "In these cases: the test above can fail"
    make,cbs = cases[name]
    big,split = (run(partial(make, n=160), *[o() for o in cbs], *ours, n_epoch=3, opt_func=SGD, lr=.1) for ours in ([], [GradientAccumulation(micro_batch_size=8)]))
    assert (weights(big)-weights(split)).abs().max() > 1e-5

@pytest.mark.parametrize('shares', [(.5, 1.), (1., .5), (.8, .5)])
def test_one_callback_in_two_learners_one_after_the_other(shares):
    "What it has found is of no use for another model"
    cb = exact()
    for make,share,is_new in (normed, shares[0], True), (partial(mlp, dropout, depth=7), shares[1], False):
        big,small = limited(make, share, ours=lambda: cb)
        assert_same_fit(small, big)
        assert (cb.blocks.level > 0) == (share < 1)

class Unsteady(nn.Module):
    "Differs from run to run, by what is no part of the model"
    n = 0
    def forward(self, x):
        Unsteady.n += 1
        return x*(1+Unsteady.n%7/10)

def test_a_model_that_differs_from_run_to_run():
    with pytest.raises(RuntimeError, match='gives other outputs when it is run again'): limited(partial(mlp, Unsteady), .6)

# What it costs

class Passes(Callback):
    "Counts the forward passes of training, those that run out of memory included, and what each leaves of the random generators"
    order = -100
    def before_fit(self):
        self.n,self.states = 0,[]
        self.hook = self.model.register_forward_pre_hook(self.count)
    def count(self, m, args): self.n += m.training
    def after_batch(self): self.states.append((self.training, torch.get_rng_state().sum().item(), float(np.random.get_state()[1].sum()), random.getstate()))
    def after_fit(self): self.hook.remove()

class Draws(Callback):
    "Draws numbers, and keeps them"
    def before_fit(self): self.seen = []
    def before_batch(self): self.seen += [random.random(), np.random.rand(), float(torch.rand(()))]

adapting = dict(exact=exact, auto=lambda: GradientAccumulation(micro_batch_size='auto'), checkpointing=ActivationCheckpointing, cache=lambda: GradientCache('auto'))

@pytest.mark.parametrize('name', adapting)
@pytest.mark.parametrize('make', [plain, dropped, normed, contrastive_dropped, tabular, awd_lstm])
def test_the_plain_fit_where_all_fits(make, name):
    "Bit for bit, in as many forward passes, which draw the same numbers"
    big,ours = (run(make, Passes(), Draws(), *cbs) for cbs in ([], [adapting[name]()]))
    assert_same_fit(ours, big)
    assert ours.passes.n == big.passes.n == len(losses(big)) and ours.passes.states == big.passes.states and len(big.passes.states) > 2
    assert ours.draws.seen == big.draws.seen

@pytest.mark.parametrize('make', [plain, dropped, normed, contrastive, contrastive_dropped])
def test_it_says_that_all_fits(make, capsys):
    limited(make, 1., aloud=True)
    assert capsys.readouterr().out == 'exact=True: each batch of 32 fits in memory\n'

@pytest.mark.parametrize('share,says', [(.8, r'[123] of 4 blocks are recomputed'), (.4, 'and what they keep is on the CPU')])
def test_it_says_once_how_a_batch_fits(share, says, capsys):
    "As soon as it is certain, and not while it looks"
    make = partial(normed, n=160)
    big = run(make, Activations())
    run(make, Activations(big.activations.mb*share), exact(), aloud=True)
    assert re.fullmatch(rf'exact=True: each batch of 32 fits if .*{says}\n', capsys.readouterr().out)
    run(make, Activations(big.activations.mb*share), exact(verbose=False), aloud=True)
    assert capsys.readouterr().out == ''

@pytest.mark.parametrize('share', [.9, .6, .5])
@pytest.mark.parametrize('make', [plain, dropped, normed, contrastive_dropped, tabular])
def test_passes_that_fail_leave_no_trace(make, share):
    "Callbacks draw what they draw in the plain fit, and the generators are where they are there, after each batch"
    mix = [MixUp] if make in (plain, dropped, normed) else []
    big,small = limited(make, share, Passes, Draws, *mix)
    assert_same_fit(small, big)
    assert small.passes.n > big.passes.n and small.passes.states == big.passes.states and small.draws.seen == big.draws.seen
    assert not small._grab_cbs(ActivationCheckpointing) and not any('forward' in vars(m) for m in small.model.modules())

@pytest.mark.thin(5)
@pytest.mark.parametrize('share', [.95, .7, .4, .05])
@pytest.mark.parametrize('make', [partial(mlp, nn.Tanh, depth=12), partial(normed, depth=9), partial(dropped, depth=7), partial(contrastive_dropped, depth=5), vit])
def test_as_few_blocks_as_fit(make, share):
    "Room for a `share` of what all blocks save. Against all numbers of blocks, beginning with none; at most log2 of them passes fail, and one"
    from fastxtend_accum.checkpointing import find_blocks
    make = make if make is vit else partial(make, bs=16, n=160)
    big,all_of_them = run(make, Activations(), n_epoch=4),run(make, Activations(), all_blocks(), n_epoch=1)
    limit = share*big.activations.mb+(1-share)*all_of_them.activations.mb
    n = len(find_blocks(big.model)[0])
    def fits(k):
        try: run(make, Activations(limit), *([all_blocks(lambda m: find_blocks(m)[0][:k])] if k else []), n_epoch=1)
        except torch.OutOfMemoryError: return False
        return True
    least = next(k for k in range(n+1) if fits(k))
    small = run(make, Activations(limit), Passes(), exact(), n_epoch=4)
    assert 0 < least == level(small) <= n == len(accum(small).blocks.found)
    assert 1 <= small.passes.n-len(losses(small)) <= math.log2(n)+1
    assert_same_fit(small, big)

def recomputed(share, make=resnet): return level(limited(make, share)[1])

def test_less_memory_takes_more_blocks():
    few,many = (recomputed(o, partial(mlp, batchnorm, nn.Tanh, nn.Tanh)) for o in (.9, .6))
    assert 0 < few < many

def test_a_second_fit_knows_what_fits():
    "No pass fails in it; an unfrozen model is another one"
    make = partial(normed, n=160)
    big = run(make, Activations())
    learn = seeded(partial(make, cbs=[Activations(big.activations.mb*.5), Passes(), exact()], splitter=halves))
    def failed(): fit(learn, 1); return learn.passes.n-len(losses(learn))
    learn.freeze()
    assert failed() > 0 == failed()
    learn.unfreeze()
    assert failed() > 0 == failed()

def test_it_costs_what_auto_costs():
    "Python calls per batch where all fits; as many as before in a fit that needs no pieces"
    def case(**kwargs): return lambda task, k: training(task, GradientAccumulation(**kwargs))
    ours,auto = (count_calls(case(**o), 8) for o in (dict(exact=True), dict(micro_batch_size='auto')))
    assert 0 < ours['our_calls'] <= 1.05*auto['our_calls'] and ours['calls'] <= 1.1*auto['calls']

# Texts of many lengths

class Sizes(Callback):
    "Of each training batch: its words with padding, the passes it has taken, the samples in each, the MB kept and the blocks that run again"
    order,run_valid = 100,False
    def before_fit(self): self.seen,self.passes = [],[]; self.hook = self.model.register_forward_pre_hook(lambda m, args: self.passes.append(len(args[0])) if m.training else None)
    def before_batch(self): self.passes.clear()
    def after_batch(self):
        blocks = getattr(accum(self), 'blocks', None)
        self.seen.append(SimpleNamespace(words=self.x.numel(), passes=[*self.passes], mb=sum(self.activations.kept.values()), level=blocks and blocks.level))
    def after_fit(self): self.hook.remove()

def texts(*cbs, **kwargs):
    "512 texts of 8 to 800 words, sorted into batches of 64; a small classifier with all of its dropout"
    lengths = np.clip(np.random.default_rng(0).lognormal(4.2, .8, 512), 8, 800).astype(int)
    g = torch.Generator().manual_seed(0)
    ds = [(TensorText(torch.randint(3, 50, (int(n),), generator=g)), TensorCategory(i%2)) for i,n in enumerate(lengths)]
    def dl(ds, **kwargs): return SortedDL(ds, bs=64, sort_func=lambda o: len(o[0]), res=[len(o[0]) for o in ds], before_batch=partial(pad_input_chunk, pad_idx=1, seq_len=72), **kwargs)
    dls = DataLoaders(dl(ds, shuffle=True, drop_last=True), dl(ds[:32]))
    dls.vocab = [str(i) for i in range(50)]
    config = awd_lstm_clas_config | dict(emb_sz=8, n_hid=16, n_layers=2)
    return text_classifier_learner(dls, AWD_LSTM, config=config, seq_len=72, n_out=2, pretrained=False, loss_func=CrossEntropyLossFlat(), cbs=[Activations(), Sizes(), *cbs], **kwargs)

def texts_limited(limit, *cbs):
    "Two epochs of 8 batches"
    learn = seeded(lambda: texts(*cbs))
    learn.activations.limit = limit
    set_seed(7)
    return fit(learn, 2, 1e-2)

def test_texts_of_many_lengths():
    "With room for 30% of the longest batch. Short batches are not split, and recompute nothing: what fits is known by elements"
    whole = texts_limited(math.inf)
    limit = .3*whole.activations.mb
    mb = [o.mb for o in whole.sizes.seen][8:]
    assert len(mb) == 8 and 3 < sum(o <= limit for o in mb) < 8
    split = texts_limited(limit, GradientAccumulation(micro_batch_size='auto'))
    assert [o.words for o in split.sizes.seen] == [o.words for o in whole.sizes.seen]  # the same batches
    passes = [o.passes for o in split.sizes.seen[8:]]
    assert sum(map(len, passes)) <= 20 and all(sum(o) == 64 for o in passes)
    for o,n in zip(passes, mb): assert len(o) <= (1 if n <= limit/2 else 2*math.ceil(n/limit))  # sizes are halved
    ours = texts_limited(limit, exact())
    assert [o.level == 0 for o in ours.sizes.seen[8:]] == [o <= limit for o in mb] and {n for o in ours.sizes.seen for n in o.passes} == {64}
    assert sum(len(o.passes)-1 for o in ours.sizes.seen) <= len(accum(ours).blocks.found)+1
    assert_same_fit(ours, whole)

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
    (plain, 1., .6, r'\d of 4 blocks are recomputed'), (normed, 1., .6, r'\d of 4 blocks are recomputed'), (normed, .85, .6, '[34] of 4 blocks are recomputed'),
    (normed, 1., .4, 'and what they keep is on the CPU'), (contrastive_dropped, 1., .6, r'\d of 4 blocks are recomputed')])
@pytest.mark.parametrize('at', [2, 6, 8])
def test_memory_runs_out_later(make, first, later, says, at):
    "More blocks run again from then on, with a warning for each number of them that does not fit; the fit stays that of whole batches"
    make = partial(make, n=160)
    big = run(make, Activations())
    mb = big.activations.mb
    with pytest.warns(UserWarning, match=f'out of memory in training: from now on, .*({says})') as said:
        small = run(make, Activations(mb*first), Shrinks(at, mb*later), Passes(), exact())
    warned = [str(o.message) for o in said if 'out of memory' in str(o.message)]
    assert 1 <= len(warned) == len({*warned}) <= small.passes.n-10 <= 6
    assert_same_fit(small, big)

def test_no_other_warnings(recwarn):
    "Not of a search, since there is none, nor of a loss that compares samples"
    limited(contrastive, .6)
    class Named(nn.Sequential):
        "Attributes of a model that a callback might have, too"
        grads,buffer,start,seconds,size,budget,blocks,level = 1,2,3,4,5,6,7,8
    def named(**kwargs):
        learn = mlp(batchnorm, **kwargs)
        learn.model = Named(*learn.model)
        return learn
    limited(named, .6)
    assert not [o for o in recwarn if any(w in str(o.message) for w in ('accumulation is not exact', 'shadowing', 'out of memory'))]

# What cannot be

def test_its_arguments():
    for o in 1,'auto',None:
        with pytest.raises(TypeError, match='exact must be True or False, not'): GradientAccumulation(exact=o)
    for size in 8,'auto':
        with pytest.raises(ValueError, match=f'exact=True runs whole batches, and micro_batch_size={size!r} splits them: pass one of them'): exact(micro_batch_size=size)
        with pytest.raises(ValueError, match='exact=True'): GradientAccumulationSchedule(32, 64, micro_batch_size=size, exact=True)
    with pytest.raises(ValueError, match='a schedule has larger ones'): GradientAccumulationSchedule(32, 64, exact=True)
    with pytest.raises(TypeError, match='same_draws'): exact(same_draws=True)

def test_windows_of_several_batches():
    "Also where they would be exact: nothing is tried"
    for make in normed,plain:
        with pytest.raises(ValueError, match='exact=True: 2 batches of 32 are not one batch of 64, since BatchNorm, dropout or a loss over the batch see 32 samples at a time: set bs=64 in the DataLoader'):
            run(partial(make, n=128), exact(accum_bs=64))
    assert_same_fit(run(normed, exact(accum_bs=32)), run(normed))

def test_another_callback_that_splits():
    with pytest.raises(ValueError, match='exact=True runs whole batches, and GradientCache splits them: leave one of them out'): run(normed, exact(), GradientCache(8))

@pytest.mark.parametrize('blocks', [None, lambda m: m[:4], lambda m: [m[1], m[2]]])
def test_beside_an_activation_checkpointing(blocks):
    "It is the one that is used, and stays"
    own = None if blocks is None else lambda m: [*blocks(m)] if isinstance(blocks(m), nn.Sequential) else blocks(m)
    big = run(normed, Activations())
    small = run(normed, Activations(big.activations.mb*.8), cb := ActivationCheckpointing(own), exact())
    assert_same_fit(small, big)
    assert small._grab_cbs(ActivationCheckpointing) == [cb] and 0 < cb.level <= len(cb.found) == (2 if blocks and not isinstance(blocks(big.model), nn.Sequential) else 4)

def test_a_batch_that_does_not_fit():
    "The error names what would, and what that changes"
    with pytest.raises(NothingFits, match=r"exact=True: a batch of 32 does not fit in memory, not even with all 4 blocks recomputed and their inputs on the CPU: micro_batch_size='auto' splits it \(.+") as e:
        run(partial(mlp, batchnorm, dropout), Activations(1e-6), exact())
    assert isinstance(e.value.__cause__, torch.OutOfMemoryError)
    assert re.search(r'BatchNorm', str(e.value)) and re.search('dropout|random', str(e.value))
    with pytest.raises(NothingFits, match="micro_batch_size='auto' splits it$"): run(plain, Activations(1e-6), exact())

class NoList(nn.Module):
    "Its layers are in no list"
    def __init__(self): super().__init__(); self.a,self.b,self.c = nn.Linear(20, 60),nn.Linear(60, 20),nn.Linear(20, 4)
    def forward(self, x): return self.c(self.b(self.a(x).tanh()).tanh())

def no_list(**kwargs):
    learn = plain(**kwargs)
    learn.model = NoList()
    return learn

def test_a_model_without_blocks():
    "It trains where it fits; else the error says how to name blocks, and that helps"
    big = run(no_list, Activations())
    assert_same_fit(run(no_list, exact()), big)
    limit = big.activations.mb*.9
    with pytest.raises(NothingFits, match=r'finds no blocks in NoList: .* name the modules with blocks=lambda model: \[...\]'): run(no_list, Activations(limit), exact())
    small = run(no_list, Activations(limit), cb := ActivationCheckpointing(blocks=lambda m: [m.a, m.b]), exact())
    assert_same_fit(small, big)
    assert cb.level > 0

def test_errors_come_before_the_first_step_and_leave_nothing():
    learn = seeded(partial(normed, cbs=[Activations(1e-6), exact()]))
    before = state(learn)
    with pytest.raises(NothingFits): fit(learn, 1)
    assert all(torch.equal(a, b) for a,b in zip(before.values(), state(learn).values()))
    assert not any('forward' in vars(m) for m in learn.model.modules()) and '_with_events' not in vars(learn) and not learn._grab_cbs(ActivationCheckpointing)

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
    assert_same_fit(ours, plain_)

def test_export(tmp_path):
    big,small = limited(normed_images, .6)
    small.path = tmp_path
    small.export('ours.pkl')
    loaded,x = load_learner(tmp_path/'ours.pkl'),torch.randn(4, 3, 32, 32)
    assert_same(loaded.model.eval()(x), small.model.eval()(x))
    loaded.dls = small.dls
    for learn in loaded,big:
        set_seed(1)
        fit(learn, 1, reset_opt=True)
    assert_same_state(loaded, big)
    assert level(loaded) == level(small) > 0

def test_the_size_in_use_is_that_of_the_batch():
    "Also where blocks are recomputed"
    for bs in 16,32: assert fit(make_learner(bs, cbs=(accum := GradientAccumulation(exact=True))), 1) and accum.micro_bs == bs
    assert accum_of_limited().micro_bs == 32

def accum_of_limited(): return accum(limited(normed, .6)[1])
