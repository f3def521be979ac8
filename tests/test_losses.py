"Windows of any loss against one batch of it: fits, and the weights themselves"
from collections import Counter

import pytest
from fastai.callback.mixup import CutMix, MixUp
from fastai.losses import *
from hypothesis import given, strategies as st

import fastxtend_accum.windows.loss_check
from common import *
from fastxtend_accum.windows.losses import has_rule
from fastxtend_accum.windows.window import Window,times


class Masked:
    "Labels of 4 classes for `n` sequences of 6 tokens; `kept` of each sequence's labels are not ignored"
    def __init__(self, n, seed=3, empty=()):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 6, 5, generator=g, dtype=torch.float64)
        self.y = torch.randint(4, (n, 6), generator=g)
        kept = torch.randint(7, (n,), generator=g)
        for i in range(n): self.y[i,0 if i in empty else kept[i]:] = -100
        if n > 1: self.y[-1,0] = 1

class Float32(nn.Module):
    "A loss in float64 for a Recorder that averages float32"
    def __init__(self, loss): super().__init__(); self.loss = loss
    def forward(self, pred, targ): return self.loss(pred.flatten(0, 1) if pred.ndim == 3 else pred, targ.flatten()).float()
# Teaching it a loss of one's own: ask the loss inside, of what that sees
loss_items.register(Float32, lambda f, pred, targ: loss_items(f.loss, pred.flatten(0, 1), targ.flatten()))

class ToFloat32(nn.CrossEntropyLoss):
    "Known by the class it derives from"
    def forward(self, pred, targ): return super().forward(pred.flatten(0, 1), targ.flatten()).float()

def tagger(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()

def tag(bs, d, loss_func, cbs=None, n_epoch=2, **kwargs):
    ds = list(zip(d.x, d.y))
    learn = Learner(DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds[:4], bs=4)), tagger(), loss_func, opt_func=partial(SGD, mom=.9), cbs=cbs)
    learn.add_cb(Callback(before_validate=lambda self: stop(CancelValidException())))
    return fit(learn, n_epoch, **kwargs)

W = torch.tensor([1.,2.,3.,4.], dtype=torch.float64)
token_losses = dict(plain=lambda: ToFloat32(), weighted=lambda: ToFloat32(weight=W), smoothed=lambda: ToFloat32(label_smoothing=.1),
                    both=lambda: ToFloat32(weight=W, label_smoothing=.1), sum=lambda: ToFloat32(reduction='sum'),
                    wrapped=lambda: Float32(nn.CrossEntropyLoss(weight=W)))

@pytest.mark.parametrize('name', token_losses)
@pytest.mark.parametrize('n', [32, 29])
def test_tokens(name, n):
    d = Masked(n)
    if n == 32 or name == 'sum':
        lr = .01 if name == 'sum' else .1
        big,small = (tag(bs, d, token_losses[name](), cbs, lr=lr) for bs,cbs in ((16, None), (4, GradientAccumulation(16))))
    else: big,small = (tag(bs, d, token_losses[name](), cbs) for bs,cbs in ((12, None), (4, GradientAccumulation(12))))
    assert (weights(big)-weights(tagger())).abs().max() > 1e-2
    # class weights and label counts put numbers into float32, which the loss has for the Recorder's sake
    assert_same(weights(small), weights(big), 1e-6 if name in ('weighted','both','wrapped') else ROUNDING)
    assert_same(losses(small), losses(big), 1e-5)

def test_by_samples_it_would_be_wrong():
    "The check above can fail"
    d = Masked(32)
    big,small = tag(16, d, ToFloat32()),tag(4, d, ToFloat32(), GradientAccumulation(16, num_items=lambda learn: len(learn.y)))
    assert (weights(big)-weights(small)).abs().max() > 1e-3

@pytest.mark.parametrize('how', ['number', 'tensor'])
@pytest.mark.parametrize('empty', [[0,1,2,3], [4,5,6,7], [12,13,14,15], [0,1,2,3,8,9,10,11]])
def test_a_micro_batch_without_labels_adds_nothing(empty, how):
    d = Masked(32, empty=empty)
    count = None if how == 'number' else lambda learn: (learn.y != -100).sum()
    big,small = tag(16, d, ToFloat32()),tag(4, d, ToFloat32(), GradientAccumulation(16, num_items=count))
    assert small.recorder.accum_bs == [16]*4
    assert_same(weights(small), weights(big), ROUNDING if how == 'number' else 1e-6)
    assert_same(losses(small), losses(big), 1e-5)
    assert not any(np.isnan(o[0]) for o in small.recorder.values)

def test_a_whole_window_without_labels_takes_no_step_and_says_so_once():
    d = Masked(32, empty=range(16))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        learn = tag(4, d, ToFloat32(), GradientAccumulation(16), n_epoch=4)
    assert len([o for o in said if 'no item in a whole window' in str(o.message)]) == 1
    assert learn.gradient_accumulation.opt_steps == len(losses(learn)) == 4 and not np.isnan(losses(learn)).any()

@draws
@given(n=st.integers(2, 24), micro=st.integers(1, 5), k=st.integers(1, 4), name=st.sampled_from(['plain','smoothed','sum']),
       remainder=st.sampled_from(['step','carry','drop']), n_epoch=st.integers(1, 2), seed=st.integers(0, 10**6), frozen=st.booleans(),
       final=st.integers(1, 4), opt=st.sampled_from(['sgd','adamw']), sched=st.sampled_from(['jump','linear']), drop_last=st.booleans())
def test_any_tokens(n, micro, k, name, remainder, n_epoch, seed, frozen, final, opt, sched, drop_last):
    "Ragged data and labels, a schedule or none, a frozen layer or none: each window as one batch in plain PyTorch"
    d,make = Masked(n, seed),token_losses[name]
    def freeze(m): m[0].requires_grad_(not frozen); return m
    n_micro = n//micro if drop_last else -(-n//micro)
    start,finish = (.5, .5) if sched == 'jump' else (0., .8)
    def size_at(pct):
        if pct >= finish-1e-9: return final*micro
        return k*micro if pct < start-1e-9 else int(k+(final-k)*(pct-start)/(finish-start)+.5+1e-6)*micro
    # the reference
    m = freeze(tagger())
    make_opt = dict(sgd=lambda ps: torch.optim.SGD(ps, lr=.01, momentum=.9), adamw=lambda ps: torch.optim.AdamW(ps, lr=.01, weight_decay=.01))[opt]
    ref,sizes,window = make_opt([p for p in m.parameters() if p.requires_grad]),[],[]
    def step():
        if name != 'sum' and not (d.y[window] != -100).any(): window.clear(); return  # a sum over no labels is 0, and a step
        ref.zero_grad()
        F.cross_entropy(m(d.x[window]).flatten(0, 1), d.y[window].flatten(), reduction='sum' if name == 'sum' else 'mean',
                        label_smoothing=.1 if name == 'smoothed' else 0.).backward()
        ref.step(); sizes.append(len(window)); window.clear()
    for epoch in range(n_epoch):
        if remainder != 'carry': window.clear()
        for i in range(n_micro):
            if not window: full = size_at((epoch + i*micro/min(n, n_micro*micro))/n_epoch)
            window += range(i*micro, min((i+1)*micro, n))
            if len(window) >= full: step()
        if window and remainder == 'step': step()
    # the Learner
    cb = GradientAccumulationSchedule(k*micro, final*micro, start, finish, SchedLin, remainder=remainder)
    opt_func = dict(sgd=partial(SGD, mom=.9), adamw=partial(OptimWrapper, opt=torch.optim.AdamW, weight_decay=.01))[opt]
    ds = list(zip(d.x, d.y))
    learn = Learner(DataLoaders(DataLoader(ds, bs=micro, drop_last=drop_last), DataLoader(ds[:1], bs=1)), freeze(tagger()), make(),
                    opt_func=opt_func, cbs=cb)
    learn.add_cb(Callback(before_validate=lambda self: stop(CancelValidException())))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', UserWarning)
        fit(learn, n_epoch, lr=.01)
    assert learn.recorder.accum_bs == sizes
    assert_same(weights(learn), weights(m), ROUNDING)

# A micro-batch without items whose loss is 0/0, and whose backward pass is, too

def mean_of_known(pred, targ):
    "Of targets that are not missing, of one output or several"
    if isinstance(pred, dict): pred = list(pred.values())
    if isinstance(pred, (tuple,list)): return sum(mean_of_known(o, targ) for o in pred)
    known = ~targ.isnan()
    return (((pred-targ.nan_to_num())**2*known).sum()/known.sum()).float()

class Scaled(nn.Module):
    "Has a weight of its own"
    def __init__(self): super().__init__(); self.s = nn.Parameter(torch.zeros(()).double())
    def forward(self, pred, targ): return mean_of_known(pred, targ)*self.s.exp().float()

class Heads(nn.Module):
    def __init__(self, like): super().__init__(); self.b,self.h,self.like = nn.Linear(5, 8).double(),nn.Linear(8, 6).double(),like; self.scale = nn.Parameter(torch.ones(6).double())
    def forward(self, x):
        o = self.h(self.b(x).tanh())
        a,b = o[:,:3],o[:,3:]
        return {tuple:(a, b), dict:dict(a=a, b=b), Tensor:a, nn.Parameter:(a*self.scale[:3], self.scale[None].expand(len(x), 6)[:,3:])}[self.like]

def n_known(learn): return (~learn.y.isnan()).sum()

@pytest.mark.parametrize('as_tensor', [False, True], ids=['number', 'as on a GPU'])
@pytest.mark.parametrize('bs,kwargs', [(8, dict(accum_bs=32)), (32, dict(micro_batch_size=8)), (32, dict(micro_batch_size=5))])
@pytest.mark.parametrize('make,like', [(lambda: mean_of_known, Tensor), (lambda: mean_of_known, tuple), (lambda: mean_of_known, dict),
                                       (lambda: mean_of_known, nn.Parameter), (Scaled, Tensor)])
def test_no_nan_from_nothing(make, like, bs, kwargs, as_tensor, monkeypatch):
    if as_tensor: monkeypatch.setattr('fastxtend_accum.windows.losses.as_count', noop)
    g = torch.Generator().manual_seed(0)
    x,y = (torch.randn(64, n, generator=g, dtype=torch.float64) for n in (5, 3))
    y[torch.rand(64, 3, generator=g) < .3] = math.nan
    y[8:16],y[-8:] = math.nan,math.nan
    def run(bs, *cbs):
        torch.manual_seed(0)
        m,loss_func = Heads(like),make()
        own = list(getattr(loss_func, 'parameters', list)())
        learn = Learner(DataLoaders(DataLoader(list(zip(x, y)), bs=bs), DataLoader(list(zip(x[:4], y[:4])), bs=4)), m, loss_func, opt_func=SGD,
                        cbs=[*cbs, Callback(before_validate=lambda self: stop(CancelValidException()))], splitter=lambda m: [[*m.parameters(), *own]])
        start = weights(m)
        fit(learn, 2, .1)
        assert (weights(m)-start).abs().max() > 1e-2
        return torch.cat([weights(m), *[o.detach()[None] for o in own]]),losses(learn)
    big,small = run(32),run(bs, GradientAccumulation(num_items=n_known, **kwargs))
    assert_same(small[0], big[0], 1e-6)  # the losses are float32
    assert_same(small[1], big[1], 1e-6)

@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_a_nan_of_items_is_seen(value):
    "In a micro-batch that has some"
    class Spoil(Callback):
        def before_batch(self):
            if self.training and self.iter == 1: self.learn.xb = (self.x*value,)
    learn = make_learner(8, n=32, cbs=[GradientAccumulation(16, skip_nonfinite=True, num_items=lambda learn: torch.tensor(len(learn.y))),
                                       Spoil()])
    with pytest.warns(match='skipped a step'): fit(learn, 1)
    assert learn.gradient_accumulation.n_skipped == 1 and learn.gradient_accumulation.opt_steps == 1
    assert len(losses(learn)) == 1 and not weights(learn).isnan().any()
    assert_moved(learn)

# MixUp and CutMix

class Mixed:
    "The same pairs and proportions for micro-batches of 8 as for batches of 32"
    def before_batch(self):
        n = len(self.y)
        self.lam = tensor([(.5+.5*i/8) for i in range(8)]*(n//8))
        shuffle = tensor([8*(i//8)+7-i%8 for i in range(n)])
        xb1,self.yb1 = self.x[shuffle],(self.y[shuffle],)
        self.learn.xb = (torch.lerp(xb1, self.x, self.lam[:,None,None,None]),)
class FixedMixUp(Mixed, MixUp): pass
class FixedCutMix(Mixed, CutMix): pass

def pictures(bs, cbs, loss_func, n=96, lr=.1):
    g = torch.Generator().manual_seed(1)
    ds = list(zip(torch.randn(n, 3, 8, 8, generator=g), torch.randint(4, (n,), generator=g)))
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    return fit(Learner(DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds[:16], bs=16)), m, loss_func, opt_func=SGD, cbs=cbs), 2, lr)

@pytest.mark.thin(7)
@pytest.mark.parametrize('loss_func', [CrossEntropyLossFlat, FocalLossFlat, LabelSmoothingCrossEntropyFlat,
                                       partial(CrossEntropyLossFlat, weight=tensor([1.,2.,3.,4.])), partial(CrossEntropyLossFlat, reduction='sum')])
@pytest.mark.parametrize('mix', [FixedMixUp, FixedCutMix])
@pytest.mark.parametrize('n', [96, 88])
def test_mixup_and_cutmix(mix, loss_func, n):
    lr = .001 if getattr(loss_func, 'keywords', {}).get('reduction') == 'sum' else .1
    big,small = (pictures(bs, [mix(), *cbs], loss_func(), n, lr) for bs,cbs in ((32, []), (8, [GradientAccumulation(32)])))
    assert_same(weights(small), weights(big), 1e-5)  # float32

# Nothing waits for the GPU: the counts that would stay on it

def test_a_count_on_another_device_stays_a_tensor(monkeypatch):
    "The meta device has no values at all: whatever looked at one would raise"
    targ = torch.zeros(4, 6, dtype=torch.long, device='meta')
    for weight in None, torch.ones(4, device='meta'):
        n = loss_items(nn.CrossEntropyLoss(weight=weight), torch.zeros(4, 4, 6, device='meta'), targ)
        assert isinstance(n, Tensor) and n.device.type == 'meta'
        w = Window()
        w.open(32)
        for _ in range(3):
            loss = torch.zeros((), device='meta', requires_grad=True)
            w.micro = MicroBatch(4)
            times(loss, w.weigh(n, loss.detach())); w.count(loss.detach())
        assert w.items.device.type == w.unit.device.type == w.loss_sum.device.type == 'meta'

# Partials

@pytest.mark.parametrize('f', [F.mse_loss, F.l1_loss, F.huber_loss])
def test_weights_of_a_partial(f):
    "PyTorch's functions take weights that their modules do not. They fit outputs of one shape only, so that all micro-batches weigh the same"
    pred,targ,w = torch.randn(3, 4),torch.randn(3, 4),torch.rand(3, 4)
    loss_func = partial(f, weight=w)
    assert loss_items(loss_func, pred, targ) == loss_items(loss_func, pred+1, targ) == 12
    with pytest.raises(ValueError, match='same size'): loss_func(pred[:2], targ[:2])

def test_a_list_in_a_partial():
    "It cannot be hashed"
    def weighted(pred, targ, weight): return F.cross_entropy(pred, targ, weight=torch.tensor(weight))
    assert loss_items(partial(weighted, weight=[1.,2.]), torch.randn(3, 2), torch.tensor([0, 1, 1])) == 3

def test_class_weights_are_not_kept_alive():
    import weakref
    w = torch.ones(3)
    alive = weakref.ref(w)
    assert loss_items(partial(F.cross_entropy, weight=w), torch.randn(4, 3), torch.tensor([0, 1, 2, 2])) == 4
    del w
    assert alive() is None

# Models of Transformers, which compute their loss

def transformer(kind):
    "A small model that takes its dict as one argument"
    import transformers
    from transformers.utils import logging
    logging.set_verbosity_error()
    torch.manual_seed(0)
    small = dict(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, pad_token_id=0,
                 hidden_dropout_prob=0., attention_probs_dropout_prob=0., max_position_embeddings=8, num_labels=4)
    gpt = dict(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0., embd_pdrop=0., attn_pdrop=0., bos_token_id=1, eos_token_id=1)
    config = transformers.GPT2Config(**gpt) if kind.startswith('GPT2') else transformers.BertConfig(**small)
    class Model(Module):
        def __init__(self): self.model = getattr(transformers, kind)(config)
        def forward(self, batch): return self.model(**batch)
    return Model()

@pytest.mark.parametrize('kind', ['GPT2LMHeadModel', 'BertForMaskedLM', 'BertForTokenClassification', 'BertForSequenceClassification'])
def test_labels_in_the_input_of_a_transformer(kind):
    "Without `num_items`; before, these counted as samples"
    x,y = tokens()
    if kind == 'BertForSequenceClassification': y = x[:,0]%4
    def collate(b): xs,ys = map(torch.stack, zip(*b)); return dict(input_ids=xs, labels=ys),ys
    def run(bs, cbs=None):
        m,dl = transformer(kind),torch.utils.data.DataLoader(list(zip(x, y)), bs, collate_fn=collate)
        return fit(Learner(DataLoaders(dl, dl), m, lambda out,y: out.loss, opt_func=SGD, cbs=cbs), 2)
    big,small,wrong = run(12),run(12, GradientAccumulation(12, micro_batch_size=3)),run(12, GradientAccumulation(12, micro_batch_size=3, num_items=lambda learn: 3))
    assert (weights(big)-weights(transformer(kind))).abs().max() > 1e-3
    assert_same(weights(small), weights(big), 1e-6)  # float32
    assert kind == 'BertForSequenceClassification' or (weights(wrong)-weights(big)).abs().max() > 1e-4

# The check of the loss in a fit: a loss whose first micro-batches are alike, and what it says if it cannot tell

def ignores(pred, targ): return F.cross_entropy(pred, targ.long(), ignore_index=-100).float()
def weighs(pred, targ): return F.cross_entropy(pred, targ.long(), weight=tensor([1.,2.,5.,9.]).to(pred.dtype)).float()
def masks(pred, targ): return ((pred[:,0]-targ)[targ >= 0]**2).mean().float()
def sqrt_of_mean(pred, targ): return F.mse_loss(pred[:,0], targ).sqrt().float()

def samples(n, ignored, seed):
    g = torch.Generator().manual_seed(seed)
    x,y = torch.randn(n, 5, generator=g, dtype=torch.float64),torch.randint(4, (n,), generator=g).double()
    return x,y.masked_fill(torch.rand(n, generator=g) < ignored, -100)

def checked(loss_func, x, y, accum_bs, bs=8, n_epoch=1, **kwargs):
    "The Learner after a fit, and what the package has warned of"
    ds = list(zip(x, y))
    learn = Learner(DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds[:4], bs=4)), tagger(), loss_func, opt_func=SGD)
    learn.add_cb(Callback(before_validate=lambda self: stop(CancelValidException())))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        fit(learn, n_epoch, .01, cbs=GradientAccumulation(accum_bs, **kwargs))
    return learn,[str(o.message) for o in said if 'exact for this loss' in str(o.message)]

@pytest.mark.parametrize('accum_bs', [16, 32])
@pytest.mark.parametrize('loss_func,ignored', [(ignores, .02), (ignores, .1), (ignores, .5), (weighs, 0.), (masks, .1), (sqrt_of_mean, 0.)])
def test_inexact_fits_are_announced(loss_func, ignored, accum_bs):
    "Of 20 fits of 128 samples, all that differ from a fit on large batches; once each"
    n_inexact = 0
    for seed in range(20):
        x,y = samples(128, ignored, seed)
        small,said = checked(loss_func, x, y, accum_bs)
        big,_ = checked(loss_func, x, y, accum_bs, bs=accum_bs)
        is_inexact = float((weights(small)-weights(big)).abs().max()) > 1e-9
        n_inexact += is_inexact
        assert len(said) <= 1 and (len(said) == 1 or not is_inexact), (seed, said)
    assert n_inexact > 10

@pytest.mark.parametrize('alike', [1, 2, 3, 7, 15])
def test_windows_that_are_alike_hide_nothing(alike):
    "The labels that are ignored come after the first windows"
    x,y = samples(16*16, 0., 0)
    assert checked(ignores, x, y, 16)[1] == []
    y[16*alike+3] = -100
    assert len(checked(ignores, x, y, 16)[1]) == 1

@pytest.mark.parametrize('n', [64, 256, 1024])
def test_a_long_fit_compares_no_more(n):
    calls = Counter()
    def counted(pred, targ): return F.mse_loss(pred[:,0], targ).float()
    real = fastxtend_accum.windows.loss_check.compare
    def compare(*args): calls['compare'] += 1; return real(*args)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(fastxtend_accum.windows.loss_check, 'compare', compare)
        assert checked(counted, *samples(n, 0., 0), 16)[1] == []
    assert calls['compare'] == min(n//16, 16)

def test_exact_losses_are_not_announced():
    "Of samples of any size, ignored or not; the second rule counts what is kept"
    class Ignores(nn.Module):
        def forward(self, pred, targ): return ignores(pred, targ)
    loss_items.register(Ignores, lambda f, pred, targ: int((targ != -100).sum()))
    for seed in range(20):
        x,y = samples(100, .3, seed)
        assert checked(Ignores(), x, y, 32)[1] == []
        assert checked(ignores, x, y, 32, num_items=lambda learn: (learn.y != -100).sum())[1] == []
        assert checked(lambda p,t: (p[:,0]-t.clamp(0)).abs().mean().float(), x, y, 32)[1] == []

@pytest.mark.parametrize('of', [noop, partial])
def test_a_rule_for_a_function(of):
    "Bare or in a `partial`; windows are then as exact as those of a class"
    def kept(pred, targ): return ignores(pred, targ)
    x,y = samples(128, .1, 0)
    assert len(checked(of(kept), x, y, 32)[1]) == 1
    loss_items.register(kept, lambda settings, pred, targ: int((targ != -100).sum()))
    small,said = checked(of(kept), x, y, 32)
    big,_ = checked(of(kept), x, y, 32, bs=32)
    assert said == []
    assert_same(weights(small), weights(big), ROUNDING)
    assert (weights(small)-weights(tagger())).abs().max() > 1e-3

def draws_numbers(pred, targ): return F.dropout(F.mse_loss(pred[:,0], targ, reduction='none')).mean().float()
def zero(pred, targ): return (pred*0).sum().float()
def of_eight(pred, targ): return (F.mse_loss(pred[:8,0], targ[:8], reduction='none')*torch.arange(8).expand(len(pred))).mean().float()

class Known(nn.Module):
    def __init__(self, f): super().__init__(); self.f = f
    def forward(self, pred, targ): return self.f(pred, targ)
loss_items.register(Known, lambda f, pred, targ: len(targ))

@pytest.mark.parametrize('n_epoch', [1, 3])
@pytest.mark.parametrize('loss_func,why', [(draws_numbers, 'called again'), (zero, '0, NaN or infinite'), (of_eight, 'expanded size')])
def test_a_check_that_cannot_tell_says_so_once(loss_func, why, n_epoch):
    "At the end, with the reason; not of a loss with a rule, nor with `num_items`"
    x,y = samples(64, 0., 0)
    said = checked(loss_func, x, y, 16, n_epoch=n_epoch)[1]
    assert len(said) == 1 and said[0].startswith('could not check') and why in said[0], said
    assert checked(Known(loss_func), x, y, 16)[1] == checked(loss_func, x, y, 16, num_items=lambda learn: 8)[1] == []
    if why != 'expanded size': assert checked(loss_func, x, y, 16, bs=16)[1] == [], 'nothing is accumulated'

def test_one_window_that_can_tell_is_enough():
    x,y = samples(64, 0., 0)
    def late(pred, targ): return (F.mse_loss(pred[:,0], targ, reduction='none')*(targ != 7)).mean().float()
    y[:32] = 7  # the gradient of the first windows is 0
    assert checked(late, x, y, 16)[1] == []

# What is said of losses that compare the samples of a batch, as the pages quote it

class Views(Callback):
    "Two views of each sample, and the place of a view's partner: as two inputs, or as SimCLR in one of twice the rows"
    def __init__(self, in_one): self.in_one = in_one
    def before_batch(self):
        n,views = len(self.x),[self.x+.1*torch.randn_like(self.x) for _ in range(2)]
        self.learn.xb,self.learn.yb = ((torch.cat(views),),(torch.arange(2*n).roll(n),)) if self.in_one else (views,(torch.arange(n),))

class Encoder(nn.Module):
    def __init__(self, compares=False): super().__init__(); self.m,self.compares = nn.Linear(5, 4),compares
    def forward(self, *views): out = [self.m(o) for o in views]; return out[0]@out[1].T if self.compares else out if len(out) > 1 else out[0]

def simclr(z, partner): return F.cross_entropy((z@z.T).fill_diagonal_(-1e9), partner)
def clip(out, partner): return F.cross_entropy(out[0]@out[1].T, partner)

@pytest.mark.parametrize('in_one,compares,loss_func,starts,why', [
    (False, False, clip, 'accumulation is not exact', 'use GradientCache'), (True, False, simclr, 'could not check', 'cannot join outputs of shape (16, 4)'),
    (False, True, F.cross_entropy, None, ''), (False, True, lambda p,t: F.cross_entropy(p, t), None, '')])
def test_what_is_said_of_contrastive_losses(in_one, compares, loss_func, starts, why):
    "One row for each sample: not exact. Several rows: it cannot tell. Compared in the model: each row of scores has a loss of its own, and nothing is said"
    ds = [(x.float(), y) for x,y in zip(*samples(64, 0., 0))]
    def learner(bs, *cbs):
        torch.manual_seed(0)
        stops = Callback(before_validate=lambda self: stop(CancelValidException()))
        return Learner(DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds[:4], bs=4)), Encoder(compares), loss_func, opt_func=SGD, cbs=[Views(in_one), stops, *cbs])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        small = fit(learner(8, GradientAccumulation(32)), 1, .1)
    said = [str(o.message) for o in said if 'exact for this loss' in str(o.message)]
    assert len(said) == (starts is not None) and all(o.startswith(starts) and why in o for o in said), said
    assert (weights(small)-weights(fit(learner(32), 1, .1))).abs().max() > 1e-3

@pytest.mark.parametrize('rows,starts', [(1, 'accumulation is not exact'), (2, 'could not check')])
def test_a_loss_that_reads_the_size_of_a_micro_batch(rows, starts):
    "As DINO's reads `self.bs`. It is exact, but the joint loss of several micro-batches reads the size of the last one: a false alarm, unless there are several rows for each sample"
    class Sized(Callback):
        def before_fit(self): self.learn.loss_func = self.lf
        def before_batch(self): self.bs = len(self.x); self.learn.xb = (torch.cat([self.x]*rows),)
        def lf(self, pred, targ): return sum(((o[:,0]-targ)**2).sum()/self.bs for o in pred.chunk(rows)).float()
    x,y = samples(64, 0., 0)
    def run(bs, *cbs):
        ds = list(zip(x, y))
        learn = Learner(DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds[:4], bs=4)), tagger(), noop, opt_func=SGD, cbs=[Sized(), *cbs])
        learn.add_cb(Callback(before_validate=lambda self: stop(CancelValidException())))
        return fit(learn, 1, .01)
    with pytest.warns(UserWarning, match=starts): small = run(8, GradientAccumulation(32))
    assert_same(weights(small), weights(run(32)), ROUNDING)
    assert (weights(small)-weights(tagger())).abs().max() > 1e-3

known = [nn.MSELoss(), partial(nn.MSELoss()), F.mse_loss, partial(F.l1_loss, reduction='sum'), MSELossFlat(), CrossEntropyLossFlat(), FocalLossFlat(), Known(zero)]
@pytest.mark.parametrize('loss_func', known)
def test_losses_with_a_rule(loss_func): assert has_rule(loss_func)
@pytest.mark.parametrize('loss_func', [zero, partial(zero), Float32, lambda p,t: p.mean(), nn.MultiMarginLoss(), DiceLoss()])
def test_losses_without_a_rule(loss_func): assert not has_rule(loss_func)

def test_what_a_loss_holds_comes_back():
    "By whatever it holds it; and nothing of a Learner"
    class Holds:
        def __init__(self): self.calls,self.sums,self.buffer,self.learn = 0,[],torch.zeros(2),make_learner(8)
        def __call__(self, pred, targ):
            self.calls += 1; self.sums.append(float(pred.sum())); self.buffer += 1
            return F.mse_loss(pred[:,0], targ)
        def method(self, pred, targ): return self(pred, targ)
    held = Holds()
    def closed(pred, targ): return held(pred, targ)
    x,y = samples(16, 0., 0)
    for loss_func in held,held.method,closed,partial(held),partial(held.method),Known(held):
        assert check_loss(loss_func, [(x[:8], y[:8]), (x[8:], y[8:])]).says == 'same'
        assert (held.calls, held.sums, held.buffer.tolist()) == (0, [], [0., 0.])

def test_a_loss_that_holds_an_expanded_tensor():
    "Several of its entries share one place in memory, into which PyTorch does not copy"
    weight = torch.ones(1).expand(4)
    def loss_func(pred, targ): return (weight*(pred-targ)**2).mean()
    pred,targ = torch.randn(2, 16, 4)
    assert check_loss(loss_func, [(pred[:8], targ[:8]), (pred[8:], targ[8:])]).says == 'same'
