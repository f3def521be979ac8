"Windows of any loss against one large batch, and what the check of the loss says of them"
import random, weakref
from collections import deque

import pytest
from fastai.callback.mixup import CutMix, MixUp
from fastai.losses import *
from hypothesis import given, strategies as st

from common import *
from fastxtend_accum.windows.losses import has_rule,loss_rules
from fastxtend_accum.windows.window import Window,scaled as times

def learner(bs, cbs, m, loss_func, x, y, **kwargs):
    "A Learner that does not validate"
    ds,stops = list(zip(x, y)),Callback(before_validate=lambda self: stop(CancelValidException()))
    dls = DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds[:4], bs=4))
    return Learner(dls, m, loss_func, opt_func=partial(SGD, mom=.9), cbs=[*L(cbs), stops], **kwargs)

def said(learn, n_epoch=1, lr=.01):
    "What the package warns of in a fit"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        fit(learn, n_epoch, lr)
    return [str(o.message) for o in caught if 'fastxtend_accum' in o.filename]

def apart(a, b): return float((a-b).abs().max())

# Labels that are ignored, weighted or smoothed

def some_tokens(n, seed=3, empty=()):
    "`n` sequences of 6 tokens in 4 classes. Some labels of each are ignored, and all of those in `empty`"
    g = torch.Generator().manual_seed(seed)
    x,y = torch.randn(n, 6, 5, generator=g, dtype=torch.float64),torch.randint(4, (n, 6), generator=g)
    for i,kept in enumerate(torch.randint(7, (n,), generator=g)): y[i,0 if i in empty else kept:] = -100
    y[-1,0] = 1
    return x,y

class ToFloat32(nn.CrossEntropyLoss):
    "For a Recorder that averages float32; known by the class it derives from"
    def forward(self, pred, targ): return super().forward(pred.flatten(0, 1), targ.flatten()).float()

def tagger():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()

W = torch.tensor([1.,2.,3.,4.], dtype=torch.float64)
token_losses = dict(
    plain=ToFloat32(), smoothed=ToFloat32(label_smoothing=.1), sum=ToFloat32(reduction='sum'),
    weighted=ToFloat32(weight=W, label_smoothing=.1))

@pytest.mark.parametrize('name', token_losses)
@pytest.mark.parametrize('n,empty', [(36, ()), (29, (0,1,2,3,16,17,18,19))])
def test_tokens(name, n, empty):
    "29 samples leave a window of 5, whose last batch has 1; a batch without labels adds nothing"
    d,lr = some_tokens(n, empty=empty),.01 if name == 'sum' else .1
    def tag(bs, *cbs):
        cbs = [*cbs, TerminateOnNaNCallback()]
        return fit(learner(bs, cbs, tagger(), token_losses[name], *d), 2, lr)
    big,small,split = tag(12),tag(4, GradientAccumulation(12)),tag(12, GradientAccumulation(micro_batch_size=4))
    assert small.recorder.accum_bs == split.recorder.accum_bs == [12,12,n-24]*2
    for o in small,split:  # class weights put numbers into float32, which the loss has for the Recorder's sake
        assert_same(weights(o), weights(big), 1e-6 if name == 'weighted' else ROUNDING)
        assert_same(losses(o), losses(big), 1e-5)
    with pytest.warns(match='not exact'): wrong = tag(4, GradientAccumulation(12, num_items=lambda o: len(o.y)))
    for o in tagger(),wrong: assert apart(weights(big), weights(o)) > 1e-3

@draws
@given(n=st.integers(2, 24), micro=st.integers(1, 5), k=st.integers(1, 4), n_epoch=st.integers(1, 2),
       name=st.sampled_from(['plain','smoothed','sum']), remainder=st.sampled_from(['step','carry','drop']),
       seed=st.integers(0, 10**6), drop_last=st.booleans())
def test_any_tokens(n, micro, k, n_epoch, name, remainder, seed, drop_last):
    "Ragged data and labels: each window as one batch in plain PyTorch; without labels it goes on, which is said once"
    (x,y),n_used,size,sizes,window,without = some_tokens(n, seed, range(seed%n)),n - n%micro*drop_last,k*micro,[],[],[]
    m,kwargs = tagger(),dict(sum=dict(reduction='sum'), smoothed=dict(label_smoothing=.1)).get(name, {})
    opt = torch.optim.SGD(m.parameters(), lr=.01, momentum=.9)
    def step():
        if not window: return
        if name != 'sum' and (y[window] == -100).all(): return without.append(window)  # a sum would be 0
        opt.zero_grad()
        F.cross_entropy(m(x[window]).flatten(0, 1), y[window].flatten(), **kwargs).backward()
        opt.step(); sizes.append(len(window)); window.clear()
    for epoch in range(n_epoch):
        for i in range(0, n_used, micro):
            at = at if window else i
            window += range(i, min(i+micro, n))
            if len(window) >= size: step()
        if remainder == 'step' or remainder == 'carry' and epoch+1 == n_epoch: step()
        if remainder != 'carry' or n_used and n_used-at-size >= micro: window.clear()  # had no label
    if remainder == 'drop' and n_used < size: return  # an error
    learn = learner(micro, GradientAccumulation(size, remainder=remainder), tagger(), token_losses[name], x, y)
    learn.dls.train.drop_last = drop_last
    assert len([o for o in said(learn, n_epoch) if 'nothing to average over' in o]) == bool(without)
    assert learn.recorder.accum_bs == sizes
    assert_same(weights(learn), weights(m), ROUNDING)

# A micro-batch without items whose loss is 0/0, and whose backward pass is, too

def mean_of_known(pred, targ):
    "Of two outputs, and of targets that are not missing"
    known = targ >= 0
    return sum(((o-targ)**2*known).sum()/known.sum() for o in pred.values()).float()

class Scaled(nn.Module):
    "Has a weight of its own"
    def __init__(self): super().__init__(); self.s = nn.Parameter(torch.zeros(()).double())
    def forward(self, pred, targ): return mean_of_known(pred, targ)*self.s.exp().float()

def samples(n, share=0., seed=0, *width):
    "Of `n` targets this share is missing, which is -100"
    g = torch.Generator().manual_seed(seed)
    x,y = torch.randn(n, 5, generator=g, dtype=torch.float64),torch.randint(4, (n, *width), generator=g).double()
    return x,y.masked_fill(torch.rand(y.shape, generator=g) < share, -100)

@pytest.mark.parametrize('as_tensor', [False, True])
@pytest.mark.parametrize('bs,kwargs', [(8, dict(accum_bs=32)), (32, dict(micro_batch_size=8)),
                                       (32, dict(micro_batch_size=5))])
@pytest.mark.parametrize('make', [lambda: mean_of_known, Scaled])
def test_no_nan_from_nothing(make, bs, kwargs, as_tensor, monkeypatch):
    if as_tensor: monkeypatch.setattr('fastxtend_accum.windows.losses.as_count', noop)
    x,y = samples(64, .3, 0, 2)
    y[8:16],y[-8:] = -100,-100
    def run(bs, *cbs):
        m,loss_func = nn.Sequential(*tagger(), Lambda(lambda o: dict(a=o[:,:2], b=o[:,2:]))),make()
        own = list(getattr(loss_func, 'parameters', list)())
        learn = fit(learner(bs, cbs, m, loss_func, x, y, splitter=lambda m: [[*m.parameters(), *own]]), 2)
        return weights(m),losses(learn),[o.item() for o in own]
    def accumulated(): return run(bs, GradientAccumulation(num_items=lambda learn: (learn.y >= 0).sum(), **kwargs))
    big,small = run(32),accumulated()
    for a,b in zip(small, big): assert_same(a, b, 1e-6)  # float32
    assert apart(weights(tagger()), big[0]) > 1e-2 and 0. not in big[2]
    x[0] = math.nan
    assert accumulated()[0].isnan().any(), 'a NaN of items is seen'

# MixUp and CutMix

class Mixed:
    "The same pairs and proportions for loader batches of 8 as for batches of 32"
    def before_batch(self):
        n = len(self.y)
        self.lam,shuffle = tensor([(.5+.5*i/8) for i in range(8)]*(n//8)),tensor([8*(i//8)+7-i%8 for i in range(n)])
        xb1,self.yb1 = self.x[shuffle],(self.y[shuffle],)
        self.learn.xb = (torch.lerp(xb1, self.x, self.lam[:,None]),)
class FixedMixUp(Mixed, MixUp): pass
class FixedCutMix(Mixed, CutMix): pass

@pytest.mark.parametrize('loss_func', [FocalLossFlat, partial(CrossEntropyLossFlat, weight=W.float()),
                                       partial(CrossEntropyLossFlat, reduction='sum')])
@pytest.mark.parametrize('mix', [FixedMixUp, FixedCutMix])
def test_mixup_and_cutmix(mix, loss_func):
    "88 samples: the last window is short"
    x,y = samples(88)
    def run(bs, *cbs):
        return weights(fit(learner(bs, [mix(), *cbs], tagger().float(), loss_func(), x.float(), y.long()), 2, .01))
    big = run(32)
    for small in run(8, GradientAccumulation(32)),run(32, GradientAccumulation(micro_batch_size=8)):
        assert_same(small, big, 1e-5)  # float32
    assert apart(run(8), big) > 1e-4

# What is counted

def test_a_count_on_another_device_stays_a_tensor():
    "So that nothing waits for a GPU. The meta device has no values at all: whatever looked at one would raise"
    targ = torch.zeros(4, 6, dtype=torch.long, device='meta')
    for weight in None, torch.ones(4, device='meta'):
        n,w = loss_items(nn.CrossEntropyLoss(weight=weight), torch.zeros(4, 4, 6, device='meta'), targ),Window(32)
        for _ in range(3):
            weight = w.weigh(n, loss := torch.zeros((), device='meta'), 4, False)
            times(loss, weight); w.count(loss, weight, n, 4)
        assert {o.device.type for o in (n, w.items, w.unit, w.loss_sum)} == {'meta'} and w.n_micro == 3

def test_what_a_partial_holds():
    "Weights need not be hashable, and are not kept alive"
    def weighted(pred, targ, weight): return F.cross_entropy(pred, targ, weight=torch.tensor(weight))
    pred,targ,w = torch.randn(3, 2),torch.tensor([0, 1, 1]),torch.tensor([1.,2.])
    assert loss_items(partial(weighted, weight=[1.,2.]), pred, targ) == 3  # samples
    alive = weakref.ref(w)
    assert loss_items(partial(F.cross_entropy, weight=w), pred, targ) == 5
    del w
    assert alive() is None

def transformer(kind):
    "A small model that takes its dict as one argument"
    import transformers
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    size = dict(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    size |= dict(hidden_dropout_prob=0., attention_probs_dropout_prob=0., resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.)
    config = transformers.GPT2Config if kind[0] == 'G' else transformers.BertConfig
    m = getattr(transformers, kind)(config(num_labels=4, **size))
    f,m.forward = m.forward,lambda batch: f(**batch)
    return m

@pytest.mark.parametrize('kind', ['GPT2LMHeadModel', 'BertForTokenClassification', 'BertForSequenceClassification'])
def test_labels_in_the_input_of_a_transformer(kind):
    "The model computes its loss; its labels count without `num_items`, and the check of the loss has nothing to say"
    x,y = tokens()
    if is_of_texts := kind == 'BertForSequenceClassification': y = x[:,0]%4
    batches = [dict(input_ids=a, labels=b) for a,b in zip(x, y)]
    def run(bs, *cbs):
        assert said(learn := learner(bs, cbs, transformer(kind), lambda out,y: out.loss, batches, y), 2, .1) == []
        return weights(learn)
    accum = partial(GradientAccumulation, 12, micro_batch_size=3)
    big,small,wrong = run(12),run(12, accum()),run(12, accum(num_items=lambda learn: 3))
    assert_same(small, big, 1e-6)  # float32
    for o in weights(transformer(kind)),wrong: assert apart(o, big) > 1e-4 or is_of_texts and o is wrong

# A table of losses that are a mean over samples, or over what `means` says, and of those that no weights make exact:
# PyTorch's, fastai's, and in short those of tsai, MONAI and fastMONAI

g = torch.Generator().manual_seed(3)
def randn(*shape): return torch.randn(*shape, generator=g)
def randint(n, *shape): return torch.randint(n, shape, generator=g)

logits,values,targets,labels = randn(16, 5),randn(16, 7),randn(16, 7),randint(5, 16)
ignored,binary,probs = labels.where(torch.arange(16)%5 > 1, -100),randint(2, 16, 7).float(),randn(16, 5).softmax(1)
maps,masks,rows,others,w = randn(16, 3, 6, 6),randint(3, 16, 6, 6),randn(16, 4),randn(16, 4),randn(5).exp()
rare = (torch.rand(16, 6, 6, generator=g) < torch.linspace(.02, .7, 16)[:,None,None]).long()
holes = targets.where(torch.rand(16, 7, generator=g) > torch.linspace(0, .8, 16)[:,None], torch.nan)
centers,signs,first_row = randn(5, 5),randint(2, 16)*2.-1,(torch.arange(16) < 1)[:,None].expand(16, 7)

def wrapped(f): return lambda pred,targ: f(pred, targ)  # as in fastMONAI's CustomLoss
def monai_dice(pred, targ, axes=(2,3)):
    pred,targ = pred.softmax(1),F.one_hot(targ, 3).movedim(-1, 1)
    return (1 - (2*(pred*targ).sum(axes)+1e-5)/((pred+targ).sum(axes)+1e-5)).mean()
def monai_tversky(pred, targ, exponent=1.):  # with fastMONAI's exponent
    p = pred.softmax(1)[:,1]
    tp,fp,fn = [o.sum((1,2)) for o in (p*targ, p*(1-targ), (1-p)*targ)]
    return (1 - (tp+1)/(tp+.3*fp+.7*fn+1)).mean()**exponent
def combined(pred, targ): return FocalLossFlat(axis=1)(pred, targ) + DiceLoss()(pred, targ)  # of fastai's documentation
def tsai_tweedie(pred, targ): return (2*targ.abs()*(-pred/2).exp() + 2*(pred/2).exp()).mean()
def tsai_center(pred, targ): return ((pred-centers[targ])**2).sum(1).mean()
def tsai_focal(pred, targ): return (w.to(pred.dtype)[targ]*F.cross_entropy(pred, targ, reduction='none')**2).mean()
def tsai_masked(pred, targ): return F.mse_loss(pred[~targ.isnan()], targ[~targ.isnan()])
def info_nce(pred, targ): return F.cross_entropy(pred@targ.T, torch.arange(len(pred)))
def masked(pred, targ): return ((pred-targ)**2*(targ > .5)).sum()/(targ > .5).sum()
def rmse(pred, targ): return F.mse_loss(pred, targ).sqrt()
def pearson(pred, targ): return 1 - torch.corrcoef(torch.stack([pred.flatten(), targ.flatten()]))[0,1]
def hard_examples(pred, targ): return F.cross_entropy(pred, targ, reduction='none').topk(2).values.mean()
def balanced(pred, targ): return F.cross_entropy(pred, targ, 1/(targ.bincount(minlength=5)+1).to(pred.dtype))
def soft_f1(pred, targ): return 1 - 2*(pred.sigmoid()*targ).sum()/(pred.sigmoid()+targ).sum()
def variance(pred, targ): return F.mse_loss(pred, targ) + F.relu(1-pred.std(0)).mean()
def centred(pred, targ): return ((pred-pred.mean(0)-targ)**2).mean()
def batch_hard(pred, targ):
    d,same = torch.cdist(pred, pred),targ[:,None] == targ
    return F.relu(d.masked_fill(~same, 0).amax(1) - d.masked_fill(same, 1e3).amin(1) + 1).mean()
def nan_without(pred, targ): return ((pred**2*targ).sum(0)/targ.sum(0)).mean()
def penalty(pred, targ): return F.mse_loss(pred, targ) + .1*w.pow(2).sum()
def penalized_sum(pred, targ): return plain_sum(pred, targ) + .1*w.pow(2).sum()
penalized_sum.reduction = 'sum'
def plain_sum(pred, targ): return ((pred-targ)**2).sum()
def float32_only(pred, targ): return {torch.float32:F.mse_loss}[pred.dtype](pred, targ)
def in_place(pred, targ):
    targ[targ == -100] = 0
    return F.cross_entropy(pred.mul_(2), targ)

class OwnWeights(nn.MSELoss):
    "Does not average by itself, and so has no rule"
    def __init__(self, f): super().__init__(reduction='none'); self.f = f
    def forward(self, pred, targ): return self.f(super().forward(pred, targ), (targ > .5)+.1)
class OwnRule(OwnWeights): pass
loss_items.register(OwnRule, lambda f, pred, targ: ((targ > .5)+.1).sum())
def weighted_mean(o, w): return (o*w).sum()/w.sum()

CE,Flat,Smoothed = nn.CrossEntropyLoss,CrossEntropyLossFlat,LabelSmoothingCrossEntropyFlat
def of(*args, **named): return {k:(f, *args[:2]) for k,f in ({o.__name__:o for o in args[2:]}|named).items()}
elementwise = 'MSE L1 SmoothL1 Huber BCEWithLogits PoissonNLL SoftMargin HingeEmbedding MultiLabelSoftMargin'.split()
exact = {
    **of(values, binary, **{o:getattr(nn, o+'Loss')() for o in elementwise}, bce_flat=BCEWithLogitsLossFlat()),
    **of(values, targets, tsai_tweedie, penalty, float32_only, unknown=lambda p,t: (p-t).abs().mean(),
         function_sum=partial(F.l1_loss, reduction='sum'), own_rule=OwnRule(weighted_mean),
         own_mean=OwnWeights(lambda o,w: (o*w).mean())),
    **of(logits, ignored, in_place, flat=Flat(), flat_weights=Flat(weight=w), sum=CE(reduction='sum'),
         weights=CE(weight=w, label_smoothing=.1)),
    **of(logits, labels, tsai_center, tsai_focal, smoothed=Smoothed(), nll=nn.NLLLoss(weight=w),
         margin=nn.MultiMarginLoss(), function=partial(F.cross_entropy, weight=w, ignore_index=2)),
    **of(logits, probs, probabilities=CE(), kl_div=nn.KLDivLoss(reduction='batchmean')),
    **of(maps, masks, monai_dice, axis=Flat(axis=1), focal=FocalLossFlat(axis=1), dice=DiceLoss(),
         mean_dice=DiceLoss(reduction='mean'), wrapped=wrapped(CE())),
    **of(maps, rare, wrapped_tversky=wrapped(monai_tversky)), 'cosine':(nn.CosineEmbeddingLoss(), rows, others, signs),
    'triplets':(nn.TripletMarginLoss(), rows, others, randn(16, 4)),
    'gaussian':(nn.GaussianNLLLoss(), values, targets, values.exp())}
inexact = {
    **of(values, targets, masked, rmse, pearson, variance, centred, plain_sum, penalized_sum,
         own_weights=OwnWeights(weighted_mean)), **of(values, binary, soft_f1), **of(values, holes, tsai_masked),
    **of(values, first_row, nan_without), **of(rows, others, info_nce), **of(rows, randint(4, 16), batch_hard),
    **of(logits, labels, hard_examples, balanced, smoothed_weights=Smoothed(weight=w)),
    **of(maps, masks, combined, wrapped_sum=wrapped(CE(reduction='sum')),
         wrapped_weights=wrapped(CE(weight=tensor([1.,9.,45.])))),
    **of(maps, rare, batch_dice=partial(monai_dice, axes=(0,2,3)), wrapped_ignore_index=wrapped(CE(ignore_index=0)),
         tversky_exponent=partial(monai_tversky, exponent=.75))}
def weight_of(targ): return w[targ[targ >= 0]].sum()
means = dict.fromkeys(['sum','function_sum','dice','penalized_sum'])  # sums
means |= dict.fromkeys(['flat_weights','weights','nll'], weight_of)
means |= dict(flat=lambda targ: (targ >= 0).sum(), function=lambda targ: weight_of(targ[targ != 2]),
              own_rule=lambda targ: ((targ > .5)+.1).sum())

def two(args, sizes=(8, 5)): return list(zip(*([o[:sizes[0]], o[sizes[0]:sum(sizes)]] for o in args)))

@pytest.mark.parametrize('name', [*exact, *inexact])
def test_the_table_is_true(name):
    "Whether two micro-batches, weighted by what the table says they are means of, have the loss and gradient of both"
    loss_func,*args = (exact|inexact)[name]
    pred,*targ = [o[:13].clone() for o in args]
    parts,count = two((pred.requires_grad_(), *targ)),means.get(name, len)
    counts = [count(o[1]) for o in parts] if count else [1, 1]
    made = sum(loss_func(p*1, *[o.clone() for o in t])*n for (p,*t),n in zip(parts, counts))
    if count: made = made/sum(counts)
    whole = loss_func(pred*1, *targ)
    pairs = [(made, whole), [torch.autograd.grad(o, pred, retain_graph=True)[0] for o in (made, whole)]]
    off = max(float(((a-b).norm()/b.norm()).detach()) for a,b in pairs)
    assert off < 1e-6 if name in exact else not off < 1e-3

@pytest.mark.parametrize('autocasts', [False, True], ids=['float32', 'autocast'])
@pytest.mark.parametrize('sizes', [(8, 8), (8, 5), (3, 2)])
def test_what_the_check_says(sizes, autocasts):
    "Of all losses of the table, in micro-batches of even, odd and small sizes; a margin of ten around its tolerance"
    found,before,tolerance = {},(logits.clone(),ignored.clone()),LossCheck.tolerance
    for name,(f,pred,*targ) in (exact|inexact).items():
        if autocasts: pred = pred.bfloat16().float()  # as the model gives it, and fastai makes it float32
        parts = two((pred, *targ), sizes)
        with autocast('cpu', dtype=torch.bfloat16, enabled=autocasts): found[name] = check_loss(f, parts)
    assert {k:o.verdict for k,o in found.items()} == dict.fromkeys(exact, 'same') | dict.fromkeys(inexact, 'differs')
    for k,o in found.items(): assert o.error < tolerance/10 if k in exact else not o.error < tolerance*10
    for a,b in zip(before, (logits, ignored)): assert_same(a, b)  # a loss that works in place sees copies

# What the check compares

@pytest.mark.parametrize('weight', [1e-2, 1e-5, 1e-8])
@pytest.mark.parametrize('nested', [False, True])
def test_a_small_head_beside_a_large_loss(nested, weight):
    "In an output or in columns of its own. One that is a mean over samples is exact"
    def says(of_head):
        def f(pred, targ):
            a,b = (pred['a'], pred['b'][0]) if nested else pred.split([7, 5], 1)
            return F.mse_loss(a, targ) + weight*of_head(b)
        parts = two((values, logits, targets))
        return check_loss(f, [(dict(a=a, b=(b,)) if nested else torch.cat([a, b], 1), t) for a,b,t in parts]).verdict
    assert says(lambda z: info_nce(z, z)) == 'differs' and says(lambda z: z.pow(2).mean()) == 'same'

def test_rules():
    for o in partial(nn.MSELoss()),partial(F.l1_loss, reduction='sum'),Flat(),OwnRule(0): assert has_rule(o)
    none = partial(F.l1_loss, reduction='none'),Flat(reduction='none'),OwnWeights(0)
    for o in plain_sum,partial(plain_sum),DiceLoss(),*none: assert not has_rule(o)

def under_autocast(pred, targ):
    if torch.is_autocast_enabled('cpu'): return F.mse_loss(pred, targ)
    raise TypeError('autocast is off')

def square(pred, targ): return (pred**2).mean()
@pytest.mark.parametrize('loss_func,pred,why', [
    (square, (tensor(1.), tensor(2.)), 'cannot'), (square, (torch.zeros(8, 5), torch.zeros(5, 5)*torch.nan), 'NaN'),
    (OwnWeights(torch.mul), (values[:8], values[8:13]), 'scalar'),
    (under_autocast, (values[:8], values[8:13]), 'autocast is off')])
def test_what_cannot_be_compared(loss_func, pred, why):
    with autocast('cpu', dtype=torch.bfloat16): found = check_loss(loss_func, list(zip(pred, targets[:13].split(8))))
    assert found.verdict == 'unknown' and why in found.reason

# Losses that have a state, or draw

class Holds:
    "Counts its calls, keeps what it has seen, and holds a Learner"
    def __init__(self):
        self.calls,self.sums,self.buffer,self.learn = 0,deque(maxlen=2),torch.zeros(2),make_learner(8)
        self.g,self.expanded = torch.Generator(),torch.ones(1).expand(7)  # PyTorch does not copy into it
    def __call__(self, pred, targ):
        self.calls += 1; self.sums.append(pred.sum().item()); self.buffer += 1
        return F.mse_loss(pred[:,0], targ)
    def method(self, pred, targ): return self(pred, targ)
    def by_calls(self, pred, targ): return self(pred, targ)*self.calls
    def by_generator(self, pred, targ): return self(pred, targ)*torch.rand(1, generator=self.g).item()

def dropped(pred, targ): return F.dropout(pred[:,0]-targ, .5).pow(2).mean().float()
def python_random(pred, targ): return F.mse_loss(pred[:,0], targ)*random.random()
def random_states(): return torch.get_rng_state().tolist(),random.getstate(),np.random.get_state()[1].tolist()

@pytest.mark.parametrize('loss_of,says', [
    *[(o, 'same') for o in (noop, partial, attrgetter('method'), lambda o: partial(o.method))],
    *[(o, 'unknown') for o in (attrgetter('by_calls'), attrgetter('by_generator'),
                                   lambda o: dropped, lambda o: python_random)]])
def test_nothing_has_changed(loss_of, says):
    "Attributes and generators of the loss, those of the process, autocast, and the graph of the outputs"
    layer,holds = nn.Linear(5, 5),Holds()
    def state(): return str(vars(holds)),holds.g.get_state().tolist(),random_states()
    with autocast('cpu', dtype=torch.bfloat16):
        before,out = state(),layer(logits)
        version,found = out._version,check_loss(loss_of(holds), two((out, targets[:,0])))
        assert torch.is_autocast_enabled('cpu') and state() == before and out._version == version
    assert found.verdict == says and ('called again' in found.reason) == (says != 'same')
    out.sum().backward()
    assert layer.weight.grad is not None

# The check in a fit

def conv(): torch.manual_seed(0); return nn.Conv2d(3, 3, 3, padding=1)

@pytest.mark.parametrize('make', [
    lambda: (4, GradientAccumulation(16)), lambda: (16, GradientAccumulation(16, micro_batch_size=6)),
    lambda: (4, GradientAccumulationSchedule(4, 16)), lambda: (4, [GradientAccumulation(16), CpuMixedPrecision()])])
def test_a_fit_warns_once_and_only_of_losses_that_are_not_exact(make):
    for name in 'combined','batch_dice','wrapped_sum','wrapped_weights':
        warned = said(learner(*make(), conv(), *inexact[name]), 2)
        assert len(warned) == 1 and 'not exact' in warned[0] and 'GradientCache' in warned[0], (name, warned)
    for name in 'focal','dice','wrapped': assert said(learner(*make(), conv(), *exact[name]), 2) == [], name

def stacked(views): return views.flatten(0, 1)

@pytest.mark.parametrize('joined,loss_func,starts,is_same', [
    (tuple, lambda o,t: info_nce(*o), ['accumulation is'], False),
    (lambda o: o[0]@o[1].T, F.cross_entropy, [], False), (stacked, square, ['could not check'], True),
    (stacked, lambda o,t: info_nce(*o.chunk(2)), ['could not check'], False)])
def test_losses_that_compare_samples(joined, loss_func, starts, is_same):
    "Two views of a sample. Of rows in an unknown order nothing can be said; nor of scores with a loss for each"
    def loss(*args): return loss_func(*args).float()
    def make(bs, *cbs):
        m = nn.Sequential(Lambda(lambda x: torch.stack([x, x.flip(1)])), *tagger(), Lambda(joined))
        return learner(bs, cbs, m, loss, samples(64)[0], torch.arange(64)%bs)
    small,big = make(8, GradientAccumulation(32)),fit(make(32), 1)
    assert [o[:15] for o in said(small, 1, .1)] == starts and apart(weights(big), weights(tagger())) > 1e-3
    if is_same: assert_same(weights(small), weights(big), ROUNDING)
    else: assert apart(weights(small), weights(big)) > 1e-3

def ignores(pred, targ): return F.cross_entropy(pred, targ.long(), ignore_index=-100).float()
def of_positive(pred, targ): return ((pred[:,0]-targ)[targ >= 0]**2).mean().float()
def of_first(pred, targ): return F.mse_loss(pred[:,0], targ).float()
def sqrt_of_mean(pred, targ): return of_first(pred, targ).sqrt()

def checked(loss_func, x, y, accum_bs=16, bs=8, n_epoch=1, **kwargs):
    "The weights after a fit, and what is said of the loss"
    learn = learner(bs, GradientAccumulation(accum_bs, **kwargs), tagger(), loss_func, x, y)
    warned = said(learn, n_epoch)
    return weights(learn),[o for o in warned if 'exact for this loss' in o]

@pytest.mark.parametrize('loss_func,share,accum_bs', [
    (ignores, .02, 16), (of_positive, .1, 32), (sqrt_of_mean, 0., 16)])
def test_inexact_fits_are_announced(loss_func, share, accum_bs):
    "Of 8 fits of 128 samples, all that differ from a fit on large batches; once each"
    n_inexact = 0
    for seed in range(8):
        (small,warned),(big,_) = (checked(loss_func, *samples(128, share, seed), accum_bs, o) for o in (8, accum_bs))
        n_inexact += (is_inexact := apart(small, big) > 1e-9)
        assert len(warned) <= 1 and (len(warned) == 1 or not is_inexact), (seed, warned)
    assert n_inexact > 4

def test_a_rule_for_a_function():
    "Also in a partial of it"
    def kept(pred, targ): return ignores(pred, targ)
    d = samples(100, .3)
    loss_items.register(kept, lambda settings, pred, targ: int((targ != -100).sum()))
    big,_ = checked(kept, *d, bs=16)
    for f in kept,partial(kept):
        small,warned = checked(f, *d)
        assert warned == []
        assert_same(small, big, ROUNDING)
    assert apart(big, weights(tagger())) > 1e-3

def test_windows_that_are_alike_hide_nothing():
    "The labels that are ignored come after the first windows"
    assert checked(ignores, *samples(16*16))[1] == []
    for alike in 1,7,15:
        x,y = samples(16*16)
        y[16*alike+3] = -100
        assert len(checked(ignores, x, y)[1]) == 1

@pytest.mark.parametrize('loss_func,why', [
    (dropped, 'called again'), (lambda p,t: (p*0).sum().float(), '0, NaN or infinite')])
def test_a_check_that_cannot_tell_says_so_once(loss_func, why, monkeypatch):
    "At the end, with the reason; not of a loss with a rule, nor with `num_items`, nor if one window can tell"
    x,y = samples(64)
    warned = checked(loss_func, x, y, n_epoch=3)[1]
    assert len(warned) == 1 and warned[0].startswith('could not check') and why in warned[0], warned
    assert checked(loss_func, x, y, bs=16)[1] == checked(loss_func, x, y, num_items=lambda learn: 8)[1] == []
    monkeypatch.setitem(loss_rules, loss_func, lambda settings, pred, targ: len(targ))
    assert checked(loss_func, x, y)[1] == []
    y[:32] = 7  # the gradient of the first windows is 0
    assert checked(lambda p,t: ((p[:,0]-t)**2*(t != 7)).mean().float(), x, y)[1] == []

def test_how_often_it_calls_the_loss(monkeypatch):
    "Twice for the window, and once for each micro-batch, in the first 16 windows of 20; not for large outputs"
    calls = []
    def loss(pred, targ): calls.append(len(pred)); return of_first(pred, targ)
    for most,expected in (LossCheck.max_bytes, 16*[8,8,16,16,8,8]+8*[8]),(100, 40*[8]):
        monkeypatch.setattr(LossCheck, 'max_bytes', most)
        calls.clear()
        assert ['too large' in o for o in checked(loss, *samples(20*16))[1]] == [True]*(most == 100)
        assert calls == expected

def test_the_fit_is_the_same(monkeypatch):
    "Weights, losses and random numbers, with the check and without it"
    def run():
        set_seed(3)
        m = nn.Sequential(nn.Linear(5, 5), nn.Dropout(.3))
        learn = fit(learner(4, [GradientAccumulation(16), MixUp()], m, CrossEntropyLossFlat(), logits, labels), 2)
        return weights(learn),losses(learn),random_states()
    (a,*rest),_ = run(),monkeypatch.setattr(LossCheck, 'n_windows', 0)
    b,*rest2 = run()
    assert_same(a, b)
    assert rest == rest2

def test_the_fit_after_an_interrupt_or_lr_find_checks_its_own_loss(recwarn):
    for name,expected in ('axis', []),('combined', [True]):
        learn = learner(4, GradientAccumulation(16), conv(), *inexact['combined'])
        with pytest.raises(KeyboardInterrupt): fit(learn, 1, cbs=Fault(KeyboardInterrupt, 'after_pred', 2, 0))
        with quiet(learn): learn.lr_find(num_it=12, show_plot=False)
        assert not [o for o in recwarn if 'exact' in str(o.message)], 'the fit that follows says it'
        learn.loss_func = (exact|inexact)[name][0]
        assert ['not exact' in o for o in said(learn)] == expected
