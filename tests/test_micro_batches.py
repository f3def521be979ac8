"A loader batch in micro-batches of a fixed size: to all but the model and the loss it stays whole"
import collections, weakref
from dataclasses import dataclass

import pytest
from fastai.callback.mixup import CutMix, MixUp
from hypothesis import given, strategies as st
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

from common import *
from fastxtend_accum.windows.nested import CannotJoin, slice_batch as cut, each_tensor, join, n_rows, tensors_in

FLOAT32 = 5e-6  # rounding, and that of the Recorder
kinds = dict(split=lambda n: GradientAccumulation(micro_batch_size=n), cache=GradientCache)
each_kind = pytest.mark.parametrize('kind', kinds)
splits = pytest.mark.parametrize('make', [
    partial(GradientAccumulation, micro_batch_size=8), partial(GradientAccumulation, 32, micro_batch_size=7),
    partial(GradientAccumulationSchedule, 32, 32, micro_batch_size=5), partial(GradientCache, 8)])

def images(n):
    g = torch.Generator().manual_seed(3)
    return list(zip(torch.randn(n, 3, 8, 8, generator=g), torch.randint(4, (n,), generator=g)))

def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4))

def vision(*cbs, n=96, m=None):
    dls = DataLoaders(DataLoader(images(n), bs=32), DataLoader(images(24), bs=24))
    return Learner(dls, classifier() if m is None else m, CrossEntropyLossFlat(), opt_func=SGD, cbs=cbs)

def seeded(learn, n_epoch=2):
    set_seed(5)
    return fit(learn, n_epoch)

def validated(learn):
    with quiet(learn): return list(learn.validate())

def assert_other(learn, m): assert (weights(learn)-weights(m)).abs().max() > 1e-3
def assert_nothing_left(learn): assert '_do_one_batch' not in vars(learn) and 'forward' not in vars(learn.model)

# Weights, rates, logs

@draws
@pytest.mark.filterwarnings('ignore:micro_batch_size=')
@given(n=st.integers(2, 60), bs=st.integers(1, 12), micro=st.integers(1, 14), k=st.integers(1, 4),
       drop_last=st.booleans())
def test_any_split_equals_the_large_batch(n, bs, micro, k, drop_last):
    "Weights, rates, losses, positions; micro-batches are as equal in size as possible"
    if drop_last and n < k*bs: return
    def run(bs, *cbs):
        seen,sizes = [],[]
        def at_end(self): seen.append((self.n_iter, self.iter, self.train_iter, self.learn.pct_train))
        see = Callback(after_pred=lambda self: self.training and sizes.append(len(self.x)), after_train=at_end)
        learn = make_learner(bs, n=n, drop_last=drop_last, cbs=[*cbs, see], opt_func=partial(SGD, mom=.9))
        return fit(learn, 2, .01, method='fit_one_cycle'),seen,sizes
    cb = GradientAccumulation(k*bs if k > 1 else None, micro_batch_size=micro)
    (big,position,_),(small,same,sizes) = run(k*bs),run(bs, cb)
    assert_same(weights(small), weights(big), ROUNDING)
    assert_same(small.recorder.lrs, big.recorder.lrs)
    assert_same(losses(small), losses(big), FLOAT32)
    assert_same(same, position, ROUNDING)
    first = sizes[:-(-min(n, bs)//micro)]
    assert max(sizes) <= micro and max(first)-min(first) <= 1 and sum(sizes) == sum(small.recorder.accum_bs)
    assert cb.micro_bs == min(micro, bs)

@pytest.mark.parametrize('micro', [8, 5, 1])
def test_a_schedule(micro):
    "The same windows as of whole loader batches"
    cbs = [GradientAccumulationSchedule(16, 64, finish=.8, micro_batch_size=o) for o in (micro, None)]
    split,whole = (fit(make_learner(16, n=100, cbs=o), 3, method='fit_one_cycle') for o in cbs)
    assert split.recorder.accum_bs == whole.recorder.accum_bs and len({*whole.recorder.accum_bs}) > 3
    assert_same(split.recorder.lrs, whole.recorder.lrs)
    assert_same(weights(split), weights(whole), ROUNDING)

@pytest.mark.parametrize('remainder,sizes', [('step', [64,24]*2), ('carry', [64,24+64,24]), ('drop', [64]*2)])
def test_remainders(remainder, sizes):
    "A window ends with a loader batch"
    cbs = [GradientAccumulation(64, micro_batch_size=o, remainder=remainder) for o in (8, None)]
    learn,whole = (fit(make_learner(32, n=88, cbs=o), 2) for o in cbs)
    assert learn.recorder.accum_bs == whole.recorder.accum_bs == sizes
    assert_same(weights(learn), weights(whole), ROUNDING)

def test_left_out_the_window_is_the_loaders_batch():
    learn = make_learner(32, cbs=GradientAccumulation(micro_batch_size=8))
    assert fit(learn, 1).recorder.accum_bs == [32]*3
    learn.dls = make_learner(48).dls
    assert fit(learn, 1).recorder.accum_bs == [48]*2
    learn.gradient_accumulation.accum_bs = 16
    with pytest.raises(ValueError, match='accum_bs=16 .* not a multiple .* batch of 48: .* to 16'): fit(learn, 1)

# A batch to all but the model and the loss

class OwnMix(Callback):
    "Partners and shares of a user's own, which the loss needs"
    run_valid,per_sample = False,('share','partner')
    def before_fit(self): self.old,self.learn.loss_func = self.learn.loss_func,self.loss
    def before_batch(self):
        order = torch.randperm(len(self.y))
        self.share,self.partner = torch.rand(len(self.y)),self.y[order]
        self.learn.xb = (self.x.lerp(self.x[order], self.share[:,None,None,None]),)
    def loss(self, pred, targ):
        if not self.training: return self.old(pred, targ)
        own,other = (F.cross_entropy(pred, o, reduction='none') for o in (targ, self.partner))
        return own.lerp(other, self.share).mean()
    def after_fit(self): self.learn.loss_func = self.old

@splits
@pytest.mark.parametrize('mix', [MixUp, CutMix, OwnMix])
def test_what_draws_once_a_batch(mix, make):
    big,small = seeded(vision(mix())),seeded(vision(mix(), make()))
    assert_other(big, classifier())
    assert_same(weights(small), weights(big), FLOAT32)
    assert_same(losses(small), losses(big), FLOAT32)
    assert_same(floats(small.recorder.values), floats(big.recorder.values), FLOAT32)

class Sees(Callback):
    "Samples of the inputs, the targets and the output in each event"
    def __init__(self, order): self.order,self.seen = order,[]
    def note(self, event):
        sizes = [len(o) for o in (self.x, self.y)] + [len(self.pred) for _ in range(event != 'before_batch')]
        if self.training: self.seen.append((event, *sizes))
passes = 'after_pred','after_loss','before_backward','after_backward'
for o in 'before_batch',*passes,'before_step','after_step','after_batch':
    setattr(Sees, o, lambda self, o=o: self.note(o))

@pytest.mark.parametrize('order', [5, 99])
def test_events(order):
    "A window of two batches of 33 samples, in micro-batches of at most 16; before the Recorder, a callback sees both"
    fit(make_learner(33, n=66, cbs=[GradientAccumulation(66, micro_batch_size=16), sees := Sees(order)]), 1)
    batch,step = [(o, 11, 11, 11) for o in passes]*3,[(o, 33, 33, 33) for o in ('before_step','after_step')]
    start,end = ('before_batch', 33, 33),('after_batch', 33, 33, 33)
    assert sees.seen == [start, *batch, *[end, start]*(order < 50), *batch, *step, end]

@pytest.mark.parametrize('accum,log,event', [
    *[(32, True, o) for o in ('before_step','after_step','after_batch')], (96, False, 'after_batch')])
def test_the_loss_and_the_outputs_of_the_batch(accum, log, event):
    def run(*cbs):
        seen = []
        see = Callback(**{event: lambda self: self.training and seen.append((self.loss.item(), self.pred.detach()))})
        fit(make_learner(32, cbs=[*cbs, see]), 1, lr=0.)
        return [o for o,_ in seen],torch.cat([o for _,o in seen])
    (loss,pred),(same,outputs) = run(),run(GradientAccumulation(accum, None, log, 5))
    assert len(loss) == 3
    assert_same(same, loss, FLOAT32)
    assert_same(outputs, pred, ROUNDING)

def spread(pred, targ): return (pred-targ).abs().max()-(pred-targ).abs().min()
def over_all(): return AccumMetric(lambda p, t: (p*t).sum().float(), flatten=False)

@splits
def test_metrics_that_are_no_means_and_the_position(make):
    def run(*cbs):
        seen = []
        def see(self): seen.append((self.iter, self.n_iter, self.train_iter, self.learn.pct_train))
        learn = make_learner(32, metrics=[spread, over_all()], cbs=[*cbs, Callback(before_batch=see)])
        learn.recorder.train_metrics = True
        return floats(fit(learn, 2).recorder.values),seen
    (big,at),(small,same) = run(),run(make())
    assert_same(small, big, FLOAT32)
    assert_same(same, at, ROUNDING)  # a schedule counts samples
    assert len(at) == 2*(3+2) and len(big[0]) == 6

@splits
def test_batches_without_targets(make):
    "The same log and position as in fastai, and no warning"
    def run(*cbs):
        seen,logged = [],[]
        see = Callback(after_batch=lambda self: seen.append((len(self.x), self.train_iter, self.pct_train)))
        dls = DataLoaders(*[DataLoader([(o,) for o in data(96)[0]], bs=32)]*2)
        learn = Learner(dls, model(), mse, opt_func=SGD, cbs=[see, *cbs])
        learn.logger = lambda o: logged.append(str(o[:3]))
        with warnings.catch_warnings(), learn.no_bar():
            warnings.simplefilter('error')
            learn.fit(2)
        assert_same(weights(learn), weights(model()))
        return seen,logged
    (big,logged),(small,same) = run(),run(make())
    assert same == logged and len(big) == 12
    assert_same(small, big, ROUNDING)

# Validation and prediction

class Largest(nn.Module):
    "Notes the sizes of batches it has seen; runs out of memory above `limit`"
    def __init__(self, m, limit=math.inf): super().__init__(); self.m,self.limit,self.sizes = m,limit,[]
    def forward(self, x):
        self.sizes.append(len(x))
        if len(x) > self.limit: raise torch.OutOfMemoryError('CUDA out of memory')
        return self.m(x)

class Elementwise(nn.Module):
    "Its arithmetic is the same for any number of samples"
    def __init__(self): super().__init__(); torch.manual_seed(0); self.scale = nn.Parameter(torch.randn(2, 5))
    def forward(self, x): return (x.float()*self.scale[0]+self.scale[1]).tanh().cumsum(1)[:,-1:]

@pytest.mark.filterwarnings('ignore:accumulation is not exact')
@pytest.mark.parametrize('kind,micro,limit,sizes', [
    ('split', 8, math.inf, [8,8,4]), ('split', 'auto', math.inf, [16,4]), *[(o, 'auto', 9, [16,8,8,4]) for o in kinds]])
def test_validation_and_prediction(kind, micro, limit, sizes):
    "A loss over the batch, metrics, predictions: bit for bit those of whole batches; out of memory halves"
    def loss(pred, targ, reduction='mean'): return F.mse_loss(pred, targ.float(), reduction=reduction)*pred.std()
    def run(limit, *cbs):
        learn = make_learner(32, m=Largest(Elementwise(), limit), loss_func=loss, metrics=[spread, over_all()], cbs=cbs)
        res,first = validated(learn),[*learn.model.sizes]
        with quiet(learn):
            for dl in (*learn.dls, [learn.dls[1].one_batch()]): res += learn.get_preds(dl=dl, with_input=True, act=noop)
        assert_nothing_left(learn)
        return first,res + floats(fit(learn, 1, lr=0.).recorder.values)[0][1:]  # over micro-batches, it is another loss
    (_,big),(first,small) = run(math.inf),run(limit, kinds[kind](micro))
    assert first == sizes and len(big) == 3+9+3
    for a,b in zip(small, big, strict=True): assert_same(torch.as_tensor(a), torch.as_tensor(b))

@pytest.mark.parametrize('f', ['validate', 'get_preds', 'fit'])
@pytest.mark.parametrize('kind,micro', [('split', 8), ('split', 'auto'), ('cache', 8)])
def test_an_interrupt_in_validation_leaves_nothing(kind, micro, f):
    "With the error kept, as in a notebook"
    class Stops(Largest):
        def forward(self, x):
            self.left -= not self.training
            if not self.left: raise KeyboardInterrupt
            return super().forward(x)
    learn = vision(cb := kinds[kind](micro), m=Stops(classifier()))
    learn.model.left = 1 if micro == 'auto' else 2
    with quiet(learn), pytest.raises(KeyboardInterrupt) as kept: getattr(learn, f)(*[1]*(f == 'fit'))
    assert_nothing_left(learn)
    assert kept.value.__traceback__
    learn.remove_cb(cb)
    learn.model,learn.opt = classifier(),None
    assert_same(weights(seeded(learn, 1)), weights(seeded(vision(), 1)))

# Nested batches

class Encoding(collections.UserDict): "As Hugging Face's BatchEncoding: a mapping that is no dict"
Pair = collections.namedtuple('Pair', 'a b')
def part(b, start, end): return cut((b,), start, end, n_rows(b))[0]

def test_cut():
    x,y = torch.arange(12.).reshape(6, 2),torch.arange(6)
    b = [Encoding(ids=x, deep=[x, (y,)]), Pair(x, y), [*'abcdef'], 'name', None, 3, tensor(1.), [{'box':[1.]}]*6]
    p = part(b, 2, 5)
    assert type(p) is list and type(p[0]) is Encoding and type(p[1]) is Pair
    for o,whole in (p[0]['ids'], x), (p[0]['deep'][1][0], y), (p[1].b, y): assert_same(o, whole[2:5])
    assert p[2:6] == [['c','d','e'], 'name', None, 3] and p[6] == 1. and p[7] == [{'box':[1.]}]*3
    x,y = part([torch.zeros(2, 3), torch.arange(2)], 0, 1)  # a pair, though it is as long as it has samples
    assert x.shape == (1, 3) and y.tolist() == [0]

@pytest.mark.parametrize('b,says', [
    (torch.zeros(3), r'split a tensor of shape \(3,\) in a batch of 6 samples'), (object(), 'split a object'),
    (pack_sequence([torch.ones(2)]*6), 'split a PackedSequence'), (torch.eye(6).to_sparse(), 'split a Tensor')])
def test_what_cannot_be_cut(b, says):
    with pytest.raises(ValueError, match='cannot '+says): part((b, torch.zeros(6, 2)), 0, 3)
    with pytest.raises(ValueError, match='cannot find the samples of a batch without tensors'): n_rows(('a', None))

def test_join(monkeypatch):
    "Each output is freed once it is joined"
    whole,cat = {'a':torch.rand(8, 3), 'b':Pair(torch.rand(8), [torch.rand(8), None]), 'c':'kind'},torch.cat
    parts = [each_tensor(torch.clone, part(whole, i, i+2)) for i in range(0, 8, 2)]
    refs,alive = [weakref.ref(t) for t in tensors_in(parts)],[]
    def count(*args): alive.append(sum(o() is not None for o in refs)); return cat(*args)
    monkeypatch.setattr(torch, 'cat', count)
    res = join(parts, [2]*4)
    assert alive == [12, 8, 4] and not parts and not any(o() is not None for o in refs)
    for a,b in zip(tensors_in(res), tensors_in(whole), strict=True): assert_same(a, b)
    assert type(res['b']) is Pair and res['b'].b[1] is None and res['c'] == 'kind'
    for n in 1,2,3:
        assert join([Pair(tensor(1.), tensor(2.)) for _ in range(2)], [n, n]) == Pair(1., 2.)  # one for all samples
        assert join([[{'box':torch.zeros(i, 4)} for i in range(n)] for _ in range(2)], [n, n])[n]['box'].shape == (0, 4)
    for bad in [tensor(1.), tensor(2.)],[torch.zeros(2)]*2,['a','b'],[Pair(tensor(1.), tensor(o)) for o in (1., 2.)]:
        with pytest.raises(CannotJoin, match='cannot join'): join(bad, [1, 2])

# Layouts

class Views(nn.Module):
    "Sums over its views, however they come; those after the first are divided"
    def __init__(self): super().__init__(); torch.manual_seed(0); self.lin = nn.Linear(5, 1).double()
    def one(self, o):
        if isinstance(o, Tensor): return self.lin(o).tanh()
        return sum(self.one(v)/(i+1) for i,v in enumerate(o.values() if isinstance(o, dict) else o))
    def forward(self, *xs): return self.one(xs)

layouts = dict(
    list=lambda v, x: (v,), tuple=lambda v, x: (tuple(v),), inputs=lambda v, x: tuple(v), two=lambda v, x: (v, x),
    dict=lambda v, x: ({str(j):o for j,o in enumerate(v)},), nested=lambda v, x: ({'views':v, 'one':x},))

@pytest.mark.thin(5)
@each_kind
@pytest.mark.parametrize('layout', layouts)
@pytest.mark.parametrize('k,bs,micro', [(2, 8, 1), (3, 8, 2), (4, 6, 3), (2, 2, 1), (4, 4, 3), (3, 3, 1)])
def test_as_many_views_as_samples(layout, kind, k, bs, micro):
    "In the last batch: the views stay, and each is cut along its samples. In every batch: the same, or an error"
    x,y = data(2*bs+k)
    samples = [(*layouts[layout]([o.roll(j)/(1+j) for j in range(k)], o), t) for o,t in zip(x, y)]
    def run(*cbs):
        dls = DataLoaders(*[DataLoader(samples, bs=bs)]*2)
        dls.n_inp = len(samples[0])-1
        learn = Learner(dls, Views(), mse, opt_func=SGD, cbs=cbs)
        res = validated(learn)+validated(fit(learn, 2))
        with quiet(learn): return learn,res,learn.get_preds()[0]
    big,valid,preds = run()
    assert_other(big, Views())
    try: small,same,p = run(kinds[kind](micro))
    except ValueError as e: assert bs == k and 'samples' in str(e) and str(k) in str(e)
    else:
        assert_same(weights(small), weights(big), ROUNDING)
        assert_same(p, preds, ROUNDING)
        assert_same(same, valid, 1e-6)

@pytest.mark.filterwarnings('ignore:accumulation is not exact')  # the check joins them as lists of inputs
@pytest.mark.parametrize('n,bs,micro,boxes', [
    (64, 8, 3, lambda i: 4), (64, 4, 2, lambda i: 1+i%5), (61, 8, 3, lambda i: 8 if i == 2 else 1+i%5)])
def test_targets_that_are_lists_of_boxes(n, bs, micro, boxes):
    "In the last case, one image has as many boxes as a full batch has images"
    def collate(b): return torch.stack([x for x,_ in b]),[y.expand(boxes(i), 4) for i,(_,y) in enumerate(b)]
    def loss(pred, targ):
        return (sum((p-b).pow(2).mean() for p,b in zip(pred, targ, strict=True))/len(pred)).float()
    def run(*cbs):
        dl = torch.utils.data.DataLoader(list(zip(*data(n))), batch_size=bs, collate_fn=collate)
        return fit(Learner(DataLoaders(dl, dl), model(), loss, opt_func=SGD, cbs=cbs), 1)
    big,small = run(),run(GradientAccumulation(bs, micro_batch_size=micro))
    assert small.recorder.accum_bs == [bs]*(n//bs)+[5]*(n == 61)
    assert_moved(big)
    assert_same(weights(small), weights(big), ROUNDING)

# Time first

BS,MICRO = 16,4

def text_learner(T, m, collate, loss, *cbs, ragged=False, **kwargs):
    "A Learner of texts of `T` steps and their labels; `ragged`: most are shorter, and padded"
    g = torch.Generator().manual_seed(1)
    x,n_steps = torch.randn(48, T, 5, generator=g),torch.tensor([2+i%3 if ragged and i%8 else T for i in range(48)])
    y = (x[...,0] > 0).long()+2*(x[...,1] > 0).long()
    ds = list(zip(x, n_steps, torch.where(torch.arange(T) < n_steps[:,None], y, -100)))
    dls = DataLoaders(*[DataLoader(o, bs=BS, create_batch=collate) for o in (ds, ds[:BS])])
    return Learner(dls, m, loss, opt_func=SGD, cbs=cbs, **kwargs)

class Tagger(nn.Module):
    "Gives `wrap` of the scores as [samples, steps, 4] and the last states as [layers, samples, 4]"
    def __init__(self, wrap, layers=1):
        super().__init__()
        torch.manual_seed(0)
        self.r,self.o,self.wrap = nn.GRU(5, 4, layers, batch_first=True),nn.Linear(4, 4),wrap
    def forward(self, b):
        h,last = self.r(pack_padded_sequence(b['x'], b['n'].cpu(), batch_first=True, enforce_sorted=False))
        return self.wrap(self.o(pad_packed_sequence(h, batch_first=True)[0]), last)

def hugging_face(h, loss):
    from transformers.modeling_outputs import TokenClassifierOutput
    return TokenClassifierOutput(loss=loss, logits=h, hidden_states=(h, h*2))
def steps(h): return h.transpose(0, 1)
outputs = dict(  # and how the loss reads the scores
    samples_first=(lambda h, last: h, noop), steps=(lambda h, last: list(steps(h)), lambda p: torch.stack(p, 1)),
    time_first=(lambda h, last: steps(h), steps), per_sample=(lambda h, last: [*h], torch.stack),
    hugging_face=(lambda h, last: hugging_face(h, None), lambda p: p.logits),
    with_loss=(lambda h, last: hugging_face(h, h.mean()), lambda p: p.logits),
    states=(lambda h, last: (h, last), lambda p: p[0]))
joined = 'samples_first','steps','hugging_face','per_sample'  # with texts of one length

@pytest.mark.thin(5)
@pytest.mark.filterwarnings('ignore:validation batches are not', 'ignore:could not check', 'ignore:accumulation is')
@each_kind
@pytest.mark.parametrize('output,ragged,T', [
    (o, ragged, T) for o in outputs for ragged in (False, True) for T in (MICRO, 6)
    if not (o == 'per_sample' and ragged or T == MICRO and o in ('per_sample', 'time_first'))])
def test_outputs(output, ragged, kind, T):
    "Those of the whole batch, or not joined: an error where loss or metric need them. As many steps can be samples"
    (wrap,scores),is_joined = outputs[output],output in joined and not ragged
    layers = 4 if output == 'states' and T == 4 else 2
    def collate(b):
        x,n,y = map(torch.stack, zip(*b))
        return {'x':x, 'n':n},y
    def loss(pred, targ): return F.cross_entropy(scores(pred).flatten(0, 1), targ[:,:scores(pred).shape[1]].flatten())
    def right(pred, targ): return (scores(pred).argmax(2) == targ[:,:scores(pred).shape[1]]).float().mean()
    def run(metric, *cbs):
        learn = text_learner(T, Tagger(wrap, layers), collate, loss, *cbs, ragged=ragged, metrics=right)
        learn.recorder.train_metrics = metric
        return fit(learn, 2, .5)
    def cb():
        if kind == 'cache': return GradientCache(MICRO)
        return GradientAccumulation(None, None, True, MICRO, num_items=lambda learn: (learn.y != -100).sum())
    if not is_joined and kind == 'split' and T == 6:
        with pytest.raises(ValueError, match='training metrics need outputs that can be joined'): run(True, cb())
    whole = run(is_joined)
    try: learn = run(is_joined, cb())
    except ValueError as e: assert kind == 'cache' and not is_joined and 'cannot join outputs' in str(e)
    else:
        assert_other(learn, Tagger(None, layers))
        assert_same(weights(learn), weights(whole), 1e-6)
        assert_same(floats(learn.recorder.values), floats(whole.recorder.values), 1e-6)

class TimeFirst(nn.Module):
    "Takes [steps, samples, 5], and gives scores for each sample, or for each step"
    def __init__(self, per_step):
        super().__init__()
        torch.manual_seed(0)
        self.r,self.o,self.per_step = nn.GRU(5, 8),nn.Linear(8, 4),per_step
    def forward(self, x): return self.o(self.r(x)[0]) if self.per_step else self.o(self.r(x)[0])[-1]

@pytest.mark.filterwarnings('ignore:validation batches are not split')
@pytest.mark.parametrize('T', [6, BS])
@pytest.mark.parametrize('per_step', [False, True])
@each_kind
def test_time_first_is_not_split(kind, per_step, T):
    "An error, unless the whole batch fits; in validation it may run whole"
    def collate(b):
        x,_,y = map(torch.stack, zip(*b))
        return x.transpose(0, 1),y.T if per_step else y[:,-1]
    def learner(*cbs): return text_learner(T, TimeFirst(per_step), collate, CrossEntropyLossFlat(), *cbs)
    with pytest.raises(ValueError, match='cannot split a tensor of shape'): fit(learner(kinds[kind](MICRO)), 1)
    big = fit(learner(), 2)
    assert_other(big, TimeFirst(per_step))
    for size in BS,'auto': assert_same(weights(fit(learner(kinds[kind](size)), 2)), weights(big), 1e-6)
    try: valid = validated(learner(kinds[kind](MICRO)))
    except ValueError as e: assert 'cannot split a tensor of shape' in str(e)
    else: assert_same(valid, validated(learner()), 1e-6)

# A Learner of one's own, and faults

class OwnBatch(Learner):
    def _do_one_batch(self): super()._do_one_batch(); [p.data.mul_(.9) for p in self.model.parameters()]
class OwnBackward(Learner):
    def _backward(self): (self.loss_grad+.3*self.model(*self.xb).square().mean()).backward()
class OwnStep(Learner):
    def _do_grad_opt(self): super()._do_grad_opt(); [p.data.mul_(.9) for p in self.model.parameters()]

def blocks(*args): return all_blocks(blocks=lambda m: [m[0]])

def a_learner(cls, *cbs, name=None):
    learn = cls(make_learner(32).dls, model(), mse, opt_func=SGD, cbs=cbs)
    if name: setattr(learn, name, partial(getattr(cls, name), learn))
    return learn

@pytest.mark.parametrize('make', [
    *splits.args[1], partial(GradientAccumulation, 64), partial(kinds['split'], 'auto'), blocks])
@pytest.mark.parametrize('name,cls', dict(_do_one_batch=OwnBatch, _backward=OwnBackward, _do_grad_opt=OwnStep).items())
def test_a_learner_with_a_loop_of_its_own(cls, name, make):
    "Of its class, or set in it: an error that names it. Windows of one whole batch are fine"
    plain = fit(a_learner(cls))
    assert_other(plain, fit(a_learner(Learner)).model)
    for learn in a_learner(cls, make()),a_learner(Learner, make(), name=name):
        with pytest.raises(ValueError, match=rf'{name}\b'): fit(learn, 1)
        assert_same(weights(learn), weights(model()))
    assert_same(weights(fit(a_learner(cls, GradientAccumulation(32)))), weights(plain))

@pytest.mark.parametrize('make', [*kinds.values(), lambda n: GradientAccumulation(8*n), blocks])
def test_fastais_preview_of_mixup(make):
    "`with learn: learn('before_train')` on a new Learner; the fit after it is as without it"
    def learner(): return make_learner(32, m=model().float(), loss_func=MSELossFlat(), cbs=[MixUp(1.), make(8)])
    with learner() as learn:
        learn.epoch,learn.training,learn.dl = 0,True,learn.dls.train
        learn._split(first(learn.dl))
        for o in 'before_train','before_batch': learn(o)
    learn.training = False
    assert_nothing_left(learn)
    assert learn.opt is None and learn.dl is learn.dls.train
    assert_same(weights(seeded(learn)), weights(seeded(learner())))

@pytest.mark.thin(11)
@pytest.mark.parametrize('accum', [32, 64])
@pytest.mark.parametrize('nth', range(1, 13))
@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'before_backward'])
@pytest.mark.parametrize('order', [-5, 7, 99])
def test_a_cancelled_batch_is_left_out_whole(order, event, nth, accum):
    "Once there are gradients of it, its window begins again"
    cb = GradientAccumulation(accum, micro_batch_size=8)
    learn = fit(make_learner(32, n=160, cbs=[cb, Fault(CancelBatchException, event, nth, order)]), 1)
    cancelled,has_gradients = (nth-1)//4,nth%4 != 1
    restarted = [cancelled-1]*(accum == 64 and has_gradients and cancelled%2)
    idxs = [i for i in range(160) if i//32 not in (cancelled, *restarted)]
    steps = [(idxs[i:i+accum], 0) for i in range(0, len(idxs), accum)]
    assert_moved(learn)
    assert_same(weights(learn), reference(steps, 160, sgd)[0], ROUNDING)
    if accum == 64: assert learn.recorder.accum_bs == [len(o) for o,_ in steps]
    assert len(losses(learn)) == len(steps) + (accum == 32)  # fastai logs a batch that is cancelled
