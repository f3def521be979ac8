"A batch stays a batch: with `micro_batch_size` only the model runs in pieces. Against the same Learner without the callback"
import functools
import pytest
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.progress import ProgressCallback

from common import *
from fastxtend_accum.windows.nested import join

from test_gradient_cache import TwoOutputs, info_nce
from test_life import CANCELS, EVENTS, Fault

FLOAT32 = 5e-6

def images(n=96):
    g = torch.Generator().manual_seed(3)
    return list(zip(torch.randn(n, 3, 8, 8, generator=g), torch.randint(4, (n,), generator=g)))

def classifier(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4))

def vision(cbs, bs=32, n=96, m=None, **kwargs):
    ds = images(n+24)
    return Learner(DataLoaders(DataLoader(ds[:n], bs=bs), DataLoader(ds[n:], bs=24)), classifier() if m is None else m, CrossEntropyLossFlat(),
                   opt_func=SGD, cbs=cbs, **kwargs)

def seeded_fit(learn, n_epoch=2, **kwargs):
    set_seed(5)
    return fit(learn, n_epoch, **kwargs)

splits = pytest.mark.parametrize('make', [lambda: GradientAccumulation(micro_batch_size=8), lambda: GradientAccumulation(32, micro_batch_size=7), lambda: GradientAccumulation(32, micro_batch_size='auto'),
                                          lambda: GradientAccumulationSchedule(32, 32, micro_batch_size=5), lambda: GradientCache(8)])

# What acts once a batch

class OwnNoise(Callback):
    "A user's own augmentation, with draws of its own"
    run_valid = False
    def before_batch(self): self.learn.xb = (self.x + torch.randn(1, 3, 1, 1) + torch.randn_like(self.x),)

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
        return F.cross_entropy(pred, targ, reduction='none').lerp(F.cross_entropy(pred, self.partner, reduction='none'), self.share).mean()
    def after_fit(self): self.learn.loss_func = self.old

@splits
@pytest.mark.parametrize('mix', [MixUp, CutMix, OwnNoise, OwnMix])
def test_what_draws_once_a_batch(mix, make):
    big,small = (seeded_fit(vision([mix(), *o])) for o in ([], [make()]))
    assert (weights(big)-weights(classifier())).abs().max() > 1e-3
    assert_same(weights(small), weights(big), FLOAT32)
    assert_same(losses(small), losses(big), FLOAT32)
    assert_same(floats(small.recorder.values), floats(big.recorder.values), FLOAT32)

@pytest.mark.parametrize('loss', [MSELossFlat, lambda: mse])
def test_mixed_targets(loss):
    "Where the loss takes no labels, MixUp mixes the targets"
    def run(cbs):
        learn = make_learner(32, cbs=[MixUp(), *cbs], m=model().float(), loss_func=loss())
        return seeded_fit(learn)
    assert_same(weights(run([GradientAccumulation(32, micro_batch_size=5)])), weights(run([])), FLOAT32)

class Sees(Callback):
    "What each event sees: samples of the inputs, the targets and the output, and how many values the loss has"
    order = 99
    def __init__(self): self.seen = []
    def note(self, event): self.seen.append((event, len(self.x), len(self.y), len(p) if (p := vars(self.learn).get('pred')) is not None else None, *((self.iter, self.n_iter) if event == 'after_batch' else ())))
for o in 'before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step','after_batch':
    setattr(Sees, o, lambda self, o=o: self.training and self.note(o))

def test_events():
    "33 samples in pieces of at most 16, two batches a window"
    sees = Sees()
    learn = make_learner(33, n=66, cbs=[GradientAccumulation(66, micro_batch_size=16), sees])
    fit(learn, 1)
    pieces = [(o, 11, 11, 11) for o in ('after_pred','after_loss','before_backward','after_backward')]*3
    batch = [o for o in sees.seen if o[0] != 'before_batch']
    assert batch == [*pieces, ('after_batch', 33, 33, 33, 0, 2), *pieces, ('before_step', 33, 33, 33), ('after_step', 33, 33, 33), ('after_batch', 33, 33, 33, 1, 2)]
    assert [o[1:3] for o in sees.seen if o[0] == 'before_batch'] == [(33, 33)]*2

def test_a_backward_pass_each_piece_and_a_step_each_window():
    calls = []
    learn = make_learner(32, cbs=GradientAccumulation(32, micro_batch_size=8))
    learn.model[-1].bias.register_hook(lambda grad: calls.append('backward'))
    learn.create_opt()
    step = learn.opt.step
    learn.opt.step = lambda *args: calls.append('step') or step(*args)
    fit(learn, 1)
    assert calls == (['backward']*4+['step'])*3

@pytest.mark.parametrize('accum, event', [(32, 'before_step'), (32, 'after_step'), (32, 'after_batch'), (96, 'after_batch')])
def test_the_loss_and_the_outputs_of_the_batch(accum, event):
    seen = {}
    for name,cbs in dict(big=[], small=[GradientAccumulation(accum, micro_batch_size=5)]).items():
        seen[name] = []
        learn = make_learner(32, cbs=[*cbs, Callback(**{event: lambda self, o=seen[name]: self.training and o.append((float(self.loss), self.pred.detach()))})], lr=0)
        fit(learn, 1, lr=0.)
    assert len(seen['big']) == 3
    assert_same([o for o,_ in seen['small']], [o for o,_ in seen['big']], FLOAT32)
    assert_same(torch.cat([o for _,o in seen['small']]), torch.cat([o for _,o in seen['big']]), ROUNDING)

def spread(pred, targ): return (pred-targ).abs().max()-(pred-targ).abs().min()

@splits
def test_training_metrics_that_are_no_means(make):
    rows = []
    for cbs in [],[make()]:
        learn = make_learner(32, n=100, metrics=[spread, AccumMetric(lambda p,t: (p*t).sum().float(), flatten=False)], cbs=cbs)
        learn.recorder.train_metrics = True
        rows.append(floats(fit(learn, 2).recorder.values))
    assert len(rows[0]) == 2 and len(rows[0][0]) >= 5
    assert_same(rows[1], rows[0], FLOAT32)

def test_the_position_is_that_of_loader_batches():
    def run(cbs):
        seen = []
        learn = make_learner(32, n=100, cbs=[*cbs, Callback(before_batch=lambda self: seen.append((self.iter, self.n_iter, self.train_iter, self.learn.pct_train)))])
        fit(learn, 2)
        return seen
    big,small = run([]),run([GradientAccumulation(32, micro_batch_size=8)])
    assert small == big and len(big) == 2*(4+2)

def test_mixed_precision_and_regularizer():
    "Autocast is on in every forward pass and off in every backward pass; the penalty of RNNRegularizer is weighted"
    class Penalty(Callback):
        order,run_valid = 1,False
        def after_loss(self): self.learn.loss_grad = self.learn.loss_grad + .01*self.pred.float().pow(2).mean()
    def run(cbs): return seeded_fit(make_learner(32, m=model().float(), loss_func=MSELossFlat(), cbs=[Penalty(), *cbs]), 2)
    assert_same(weights(run([GradientAccumulation(32, micro_batch_size=8)])), weights(run([])), FLOAT32)
    on = []
    class Looks(nn.Sequential):
        def forward(self, x): on.append(torch.is_autocast_enabled('cpu')); return super().forward(x)
    learn = make_learner(32, m=Looks(*model().float()), loss_func=MSELossFlat(), cbs=[CpuMixedPrecision('bf16'), GradientAccumulation(64, micro_batch_size=8),
                         Callback(before_backward=lambda self: on.append(not torch.is_autocast_enabled('cpu')))])
    fit(learn, 1)
    assert all(on) and len(on) == 12*2+3 and not torch.is_autocast_enabled('cpu')

# Validation and prediction

class Largest(nn.Module):
    "Notes the largest batch it has seen; runs out of memory above `limit`"
    def __init__(self, m, limit=math.inf): super().__init__(); self.m,self.limit,self.sizes = m,limit,[]
    def forward(self, x):
        self.sizes.append(len(x))
        if len(x) > self.limit: raise torch.OutOfMemoryError('CUDA out of memory')
        return self.m(x)

@pytest.mark.parametrize('make, limit, sizes', [(lambda: GradientAccumulation(micro_batch_size=8), math.inf, [8,8,8]), (lambda: GradientAccumulation(micro_batch_size='auto'), math.inf, [24]),
                                                (lambda: GradientAccumulation(micro_batch_size='auto'), 9, [24,12,6,6,6,6]), (lambda: GradientCache('auto'), 9, [24,12,6,6,6,6])])
def test_validation_and_prediction(make, limit, sizes):
    "A loss over the batch, metrics, predictions: those of whole batches; out of memory halves"
    def over_batch(pred, targ): return (pred.softmax(1).std(0).sum() + F.cross_entropy(pred, targ))
    def run(cbs, limit):
        learn = vision(cbs, m=Largest(classifier(), limit), metrics=[accuracy, AccumMetric(lambda p,t: p.std(), flatten=False)])
        learn.loss_func = over_batch
        res = []
        with quiet(learn):
            res.append(list(learn.validate()))
            first = list(learn.model.sizes)
            res += [learn.get_preds(act=noop)[0], learn.get_preds(with_input=True, act=noop)[0], learn.get_preds(dl=[learn.dls.valid.one_batch()], act=noop)[0]]
            assert 'forward' not in vars(learn.model) and '_do_one_batch' not in vars(learn)
            fit(learn, 1, lr=0.)
            res += [floats(learn.recorder.values)[0][1:]]  # the loss over the batch is another one in training
        return first,res
    (_,big),(first,small) = run([], math.inf),run([make()], limit)
    assert first == sizes
    for a,b in zip(small, big, strict=True): assert_same(a, b, FLOAT32)

class Elementwise(nn.Module):
    "Its arithmetic is the same for any number of samples"
    def __init__(self): super().__init__(); torch.manual_seed(0); self.scale,self.shift = nn.Parameter(torch.randn(5)),nn.Parameter(torch.randn(5))
    def forward(self, x): return (x.float()*self.scale+self.shift).tanh().cumsum(1)[:,-1:]

@pytest.mark.parametrize('make', [lambda: GradientAccumulation(micro_batch_size=3), lambda: GradientCache(3), lambda: GradientAccumulation(micro_batch_size='auto'), lambda: GradientCache('auto')])
def test_bit_for_bit_where_the_arithmetic_allows_it(make):
    def run(limit, cbs):
        learn = make_learner(32, m=Largest(Elementwise(), limit), loss_func=MSELossFlat(), metrics=[spread, AccumMetric(lambda p,t: (p*t).sum(), flatten=False)], cbs=cbs)
        with quiet(learn): return list(learn.validate()),*learn.get_preds(with_loss=True),learn.get_preds(0)[0],max(learn.model.sizes)
    cb = make()
    (*whole,n),(*pieces,m) = run(math.inf, []),run(3 if cb.micro_batch_size == 'auto' else math.inf, [cb])
    assert (n, m) == (32, 16 if cb.micro_batch_size == 'auto' else 3) and len(whole) == 5 and len(whole[0]) == 3
    for a,b in zip(pieces, whole, strict=True): assert_same(a, b)

@pytest.mark.parametrize('f', [lambda o: o.validate(), lambda o: o.get_preds(), lambda o: o.fit(1)])
@pytest.mark.parametrize('make', [lambda: GradientAccumulation(micro_batch_size=8), lambda: GradientAccumulation(micro_batch_size='auto'), lambda: GradientCache(8)])
def test_an_interrupt_in_a_piece_of_validation_leaves_nothing(make, f):
    "With the error kept, as a notebook keeps the last one"
    class Stops(Largest):
        def forward(self, x):
            if not self.training and len(self.sizes) > 1: raise KeyboardInterrupt
            return super().forward(x)
    learn = vision([make()], m=Stops(classifier()))
    learn.model.sizes = [0]*2
    with quiet(learn), pytest.raises(KeyboardInterrupt) as kept: f(learn)
    assert '_do_one_batch' not in vars(learn) and 'forward' not in vars(learn.model) and kept.value.__traceback__
    learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, (Way,GradientAccumulation))])
    learn.model = classifier()
    assert_same(weights(seeded_fit(learn, 1, reset_opt=True)), weights(seeded_fit(vision([]), 1)))

@pytest.mark.parametrize('micro, limit', [(3, math.inf), ('auto', 3)])
def test_tta_and_predict(micro, limit):
    from fastai.vision.all import CategoryBlock, DataBlock, ImageBlock, PILImage, Resize, aug_transforms, ColReader
    ims = [PILImage.create(np.uint8(np.random.RandomState(i).rand(24, 24, 3)*255)) for i in range(24)]
    def run(cbs, limit=math.inf):
        block = DataBlock((ImageBlock, CategoryBlock), get_x=lambda i: ims[i], get_y=lambda i: 'ab'[i%2], splitter=lambda o: (list(range(16)), list(range(16, 24))), batch_tfms=aug_transforms(size=16))
        learn = Learner(block.dataloaders(list(range(24)), bs=8, val_bs=8, num_workers=0), Largest(nn.Sequential(nn.Flatten(), nn.Linear(3*16*16, 2)), limit), CrossEntropyLossFlat(), cbs=cbs)
        for p in learn.model.parameters(): p.data = torch.linspace(-.1, .1, p.numel()).view_as(p)
        with quiet(learn):
            set_seed(0)
            res = learn.tta(n=2)[0],learn.predict(3)[2]
        return res,max(learn.model.sizes)
    (a,n),(b,m) = run([GradientAccumulation(micro_batch_size=micro)], limit),run([])
    assert n == (8 if micro == 'auto' else 3) and m == 8
    for x,y in zip(a, b, strict=True): assert_same(x, y, FLOAT32)

def test_outputs_are_freed_as_they_are_joined():
    "Two outputs for each sample, 8 pieces: what is alive when the loss is computed is the joined outputs alone"
    import weakref
    made,alive = [],[]
    class Two(nn.Module):
        def __init__(self): super().__init__(); self.m = nn.Linear(5, 1).double()
        def forward(self, x):
            o = self.m(x),self.m(-x)
            if not self.training: made.extend(map(weakref.ref, o))
            return o
    def loss(pred, targ): alive.append(sum(o() is not None for o in made)); return mse(pred[0], targ)
    learn = make_learner(8, m=Two(), loss_func=loss, cbs=GradientAccumulation(8, micro_batch_size=2))
    with quiet(learn): learn.validate()
    assert len(made) == 20 and max(alive) == 0

def test_each_output_is_freed_once_it_is_joined(monkeypatch):
    "Three outputs of four pieces: with the first one joined, its pieces are gone, and with the last one all are"
    import weakref
    parts = [{'a':torch.rand(2, 3), 'bc':(torch.rand(2), torch.rand(2))} for _ in range(4)]
    whole = [torch.cat(o) for o in zip(*((o['a'], *o['bc']) for o in parts))]
    refs,alive,cat = [weakref.ref(t) for o in parts for t in (o['a'], *o['bc'])],[],torch.cat
    def counts(*args): alive.append(sum(o() is not None for o in refs)); return cat(*args)
    monkeypatch.setattr(torch, 'cat', counts)
    res = join(parts, [2]*4)
    assert alive == [12, 8, 4] and not parts and not any(o() is not None for o in refs)
    for a,b in zip((res['a'], *res['bc']), whole, strict=True): assert_same(a, b)

@pytest.mark.parametrize('two', [False, True])
def test_no_output_is_there_twice_at_the_step(two):
    "Those of the pieces are gone, the joined one is there: 32 samples"
    import gc
    class Wide(nn.Linear):
        def forward(self, x): o = super().forward(x); return (o, o+1) if two else o
    alive = []
    def count(self): alive.append(sum(len(o) for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and o.shape[1:] == (77,)))
    torch.manual_seed(0)
    fit(make_learner(32, m=Wide(5, 77).double(), loss_func=lambda p,t: mse(p[0] if two else p, t.expand(-1, 77)), cbs=[GradientAccumulation(32, micro_batch_size=8), Callback(before_step=count)]), 1)
    assert alive == [64 if two else 32]*3

def test_a_loss_from_the_model_is_validated_whole():
    "Such outputs cannot be joined"
    class Own(nn.Module):
        def __init__(self): super().__init__(); self.m = model()
        def forward(self, x): p = self.m(x); return {'loss':p.pow(2).mean(), 'pred':p}
    def run(cbs): return fit(make_learner(32, m=Own(), loss_func=lambda p,t: p['loss'].float(), cbs=cbs), 1)
    big = run([])
    with pytest.warns(UserWarning, match=r'validation batches are not split: cannot join outputs of shape \(\) .* such as val_bs=8'): small = run([GradientAccumulation(32, micro_batch_size=8)])
    assert_same(weights(small), weights(big), ROUNDING)
    assert_same(floats(small.recorder.values), floats(big.recorder.values), FLOAT32)

# The search

def test_callbacks_that_set_up_before_training(capsys):
    "They are ready when sizes are tried, and see the batch once; the inputs are as they were, though the model works in place"
    class SetsUp(Callback):
        order,run_valid = 60,False
        def before_train(self): self.scale,self.batches = 2.,0
        def before_batch(self): self.batches += 1; self.learn.xb = (self.x*self.scale,)
        def after_pred(self): self.learn.pred = self.pred/self.scale
    class InPlace(nn.Sequential):
        def forward(self, x): return super().forward(x.mul_(.5))
    def run(micro):
        learn = make_learner(32, m=InPlace(*model()), cbs=[SetsUp(), GradientAccumulation(32, micro_batch_size=micro)])
        fit(learn, 1)
        return learn
    auto,given = run('auto'),run(32)
    assert auto.sets_up.batches == 3
    assert_same(weights(auto), weights(given))

def test_what_is_printed_for_a_schedule(capsys):
    learn = make_learner(32, n=1024, cbs=GradientAccumulationSchedule(32, 512, micro_batch_size='auto'))
    fit_aloud(learn, 1)
    assert capsys.readouterr().out == "micro_batch_size='auto': each batch of 32 fits in memory; 32 to 512 samples, 32 at a time\n"

def test_sizes_that_are_no_powers_of_two(capsys):
    fit_aloud(make_learner(48, n=96, cbs=GradientAccumulation(48, micro_batch_size='auto'), m=Largest(model(), 30)), 1)
    assert capsys.readouterr().out == "micro_batch_size='auto': each batch of 48 is split into 2 micro-batches of 24; losses are averaged as in one batch\n"
    fit_aloud(make_learner(48, n=96, cbs=GradientAccumulation(48, micro_batch_size='auto'), m=Largest(model(), 9)), 1)
    assert capsys.readouterr().out == "micro_batch_size='auto': each batch of 48 is split into 8 micro-batches of 6; losses are averaged as in one batch\n"
    fit_aloud(make_learner(50, n=100, cbs=GradientAccumulation(50, micro_batch_size='auto'), m=Largest(model(), 20)), 1)
    assert capsys.readouterr().out == "micro_batch_size='auto': each batch of 50 is split into 4 micro-batches of up to 13; losses are averaged as in one batch\n"

def test_the_first_error_stays_the_cause():
    class Broken(Largest):
        def forward(self, x): raise RuntimeError('cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.')
    for cb in GradientAccumulation(micro_batch_size='auto'),GradientCache('auto'):
        with pytest.raises(RuntimeError, match='out of memory with a single sample') as e: fit(make_learner(32, m=Broken(model()), cbs=cb), 1)
        assert 'non-contiguous input' in str(e.value.__cause__)
        with quiet(make_learner(32, m=Broken(model()), cbs=cb)) as learn, pytest.raises(RuntimeError, match='out of memory with a single sample') as e: learn.validate()
        assert 'non-contiguous input' in str(e.value.__cause__)

def test_an_error_of_the_step_stays_what_it_is():
    "Memory that runs out in the step says nothing about the batch"
    learn = make_learner(32, cbs=GradientAccumulation(32, micro_batch_size='auto'))
    learn.create_opt()
    def full(*args, **kwargs): raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')
    learn.opt.step = full
    with pytest.raises(torch.OutOfMemoryError, match='2.00 GiB'): fit(learn, 1)

@pytest.mark.parametrize('norm, limit, size', [(nn.BatchNorm1d, 9, 8), (nn.BatchNorm1d, 17, 16), (nn.BatchNorm1d, 32, None), (nn.LayerNorm, 9, None)])
def test_what_batchnorm_sees(capsys, norm, limit, size):
    m = Largest(nn.Sequential(nn.Linear(5, 4), norm(4), nn.Linear(4, 1)).double(), limit)
    fit_aloud(make_learner(32, m=m, cbs=GradientAccumulation(32, micro_batch_size='auto')), 1)
    said = capsys.readouterr().out
    assert ('BatchNorm' in said) == (size is not None)
    if size: assert f'; statistics are of {size} at a time in 1 BatchNorm1d; ActivationCheckpointing() avoids this' in said

def test_the_line_on_batchnorm_is_about_layers_that_see_pieces(capsys):
    "It is not said of layers that do not train, nor under a GradientCache of layers outside of its `part`"
    def body(): torch.manual_seed(0); return Largest(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), 9)
    def said(body, head, cb, *cbs):
        capsys.readouterr()
        fit_aloud(make_learner(32, m=nn.Sequential(body, head).double(), cbs=[*cbs, cb]), 1)
        return 'statistics are of 8 at a time in 1 BatchNorm1d' in capsys.readouterr().out
    class Frozen(Callback):
        order = GradientAccumulation.order-1
        def before_train(self): self.model[0].eval()
    head,with_norm,without = nn.Linear(4, 1),nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)),Largest(nn.Linear(5, 4), 9)
    accum = partial(GradientAccumulation, 32, micro_batch_size='auto')
    assert said(body(), head, accum()) and not said(body(), head, accum(), Frozen())
    assert said(without, with_norm, GradientCache('auto')) and not said(without, with_norm, GradientCache('auto', part=lambda m: m[0]))
    assert said(body(), head, GradientCache('auto', part=lambda m: m[0]))

def test_the_cache_takes_part_in_searches(capsys):
    "With it, the batch of 32 fits; halving it would change the loss"
    class Both(TwoOutputs):
        def forward(self, x):
            if self.training and len(x) > 9: raise torch.OutOfMemoryError('CUDA out of memory')
            return super().forward(x)
    def run(m, *cbs): return fit(make_learner(32, m=m, loss_func=lambda p,*t: info_nce(p), cbs=cbs), 1)
    big = run(TwoOutputs())
    for cache in 8,'auto':
        small = run(Both(), GradientAccumulation(32, micro_batch_size='auto'), GradientCache(cache))
        assert small.gradient_accumulation.micro_bs == 32 and small.gradient_cache.micro_bs == 8
        assert_same(weights(small), weights(big), ROUNDING)

# Memory that runs out later

class RunsOut(Callback):
    "In batch `at`, only `to` samples fit from piece `piece` on"
    order,run_valid = 98,False
    def __init__(self, at, to, event='after_pred'): self.at,self.to,self.batches,self.preds,self.seen = at,to,0,[],[]; setattr(self, event, self.check)
    def before_batch(self): self.batches += 1; self.draw = random.random(); self.seen.append(self.draw)
    def check(self):
        self.preds.append(None if self.learn.pred is None else len(self.learn.pred))
        if self.batches > self.at and len(self.x) > self.to: raise torch.OutOfMemoryError('CUDA out of memory')
    def after_batch(self): assert self.learn.pred is not None and len(self.learn.pred) == len(self.y)

@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'before_backward'])
@pytest.mark.parametrize('accum', [32, 64])
@pytest.mark.parametrize('make', [lambda accum: [GradientAccumulation(accum, micro_batch_size='auto')]])
def test_no_callback_sees_that_memory_ran_out(make, accum, event):
    big = seeded_fit(vision([MixUp(), *([GradientAccumulation(accum)] if accum > 32 else [])], n=128), 2)
    probe = RunsOut(5, 8, event)
    with pytest.warns(UserWarning, match='out of memory in training: from now on, micro-batches have 8 samples'):
        small = seeded_fit(vision([MixUp(), *make(accum), probe], n=128), 2)
    assert probe.batches == 8 and None not in probe.preds and len(set(probe.seen)) == 8
    assert_same(weights(small), weights(big), FLOAT32)
    assert_same(losses(small), losses(big), FLOAT32)

@pytest.mark.parametrize('with_accum', [False, True])
def test_the_cache_halves_too(with_accum):
    "And not the accumulation beside it: half of a batch has another loss"
    class Squeezed(TwoOutputs):
        limit = 99
        def forward(self, x):
            if self.training and len(x) > self.limit: raise torch.OutOfMemoryError('CUDA out of memory')
            return super().forward(x)
    def run(m, *cbs): return fit(make_learner(32, m=m, loss_func=lambda p,*t: info_nce(p), cbs=cbs), 1)
    big = run(TwoOutputs())
    with pytest.warns(UserWarning, match='micro-batches have 8 samples'):
        small = run(Squeezed(), *[GradientAccumulation(32, micro_batch_size='auto')]*with_accum, GradientCache('auto'), Callback(before_batch=lambda self: setattr(self.model, 'limit', 99 if self.train_iter < 1 else 9)))
    assert small.gradient_cache.micro_bs == 8 and not (with_accum and small.gradient_accumulation.micro_bs < 32)
    assert_same(weights(small), weights(big), ROUNDING)

# The size of a batch

def collated(samples, targets): return torch.stack([a for a,_ in samples]),targets([b for _,b in samples])

def of_targets(bs, targets, loss, cbs, n=64, m=None):
    ds = list(zip(*data(n)))
    dl = torch.utils.data.DataLoader(ds, batch_size=bs, collate_fn=partial(collated, targets=targets))
    learn = Learner(DataLoaders(dl, dl), model() if m is None else m, loss, opt_func=SGD, cbs=[*cbs, Callback(before_validate=lambda self: stop(CancelValidException()))])
    return fit(learn, 1)

@pytest.mark.parametrize('micro', [None, 3])
def test_a_target_without_a_batch_dimension(micro):
    def targets(ys): return {'y':torch.stack(ys), 'temperature':torch.ones(1).double()}
    if micro:
        m,called = model(),[]
        m.register_forward_pre_hook(lambda *args: called.append(args))
        with pytest.raises(ValueError, match=r'cannot split a tensor of shape \(1,\) in a batch of 8 samples'):
            of_targets(8, targets, lambda p,t: mse(p, t['y']), [GradientAccumulation(16, micro_batch_size=micro)], m=m)
        assert not called
        return
    big,small = (of_targets(bs, targets, lambda p,t: mse(p, t['y']*t['temperature']), cbs) for bs,cbs in ((16, []), (8, [GradientAccumulation(16)])))
    assert small.recorder.accum_bs == [16]*4
    assert_same(weights(small), weights(big), ROUNDING)

@pytest.mark.parametrize('n_boxes', [4, 'ragged'])
@pytest.mark.parametrize('bs, accum, micro', [(4, 8, None), (8, 16, None), (4, 4, 2), (8, 16, 3)])
def test_targets_that_are_lists_of_boxes(bs, accum, micro, n_boxes):
    "Four boxes for each of four images may be four inputs of four samples: an error says so, where the batch is split"
    def targets(ys): return [y.expand(4 if n_boxes == 4 else 1+i%5, 4) for i,y in enumerate(ys)]
    def loss(pred, boxes): return torch.stack([(p-b).pow(2).mean() for p,b in zip(pred, boxes, strict=True)]).mean().float()
    if (bs, micro, n_boxes) == (4, 2, 4):
        with pytest.raises(ValueError, match='may have an entry for each sample, or be 4 inputs'):
            of_targets(bs, targets, loss, [GradientAccumulation(accum, micro_batch_size=micro)])
        return
    big,small = (of_targets(b, targets, loss, cbs) for b,cbs in ((accum, []), (bs, [GradientAccumulation(accum, micro_batch_size=micro)])))
    assert small.recorder.accum_bs == [accum]*(64//accum)
    assert_same(weights(small), weights(big), ROUNDING)

@pytest.mark.parametrize('micro', [3, 'auto'])
def test_as_many_boxes_as_images_in_a_full_batch(micro):
    "The last batch has 5 images, one of them with 8 boxes; a full batch has 8 images"
    def targets(ys): return [y.expand(8 if i == 2 else 1+i%5, 4) for i,y in enumerate(ys)]
    def loss(pred, boxes): return torch.stack([(p-b).pow(2).mean() for p,b in zip(pred, boxes, strict=True)]).mean().float()
    def run(*cbs, m=None): return of_targets(8, targets, loss, cbs, n=61, m=m)
    big,small = run(),run(GradientAccumulation(8, micro_batch_size=micro), m=Largest(model(), 3 if micro == 'auto' else math.inf))
    assert small.recorder.accum_bs == [8]*7+[5]
    assert_same(weights(small), weights(big), ROUNDING)

def test_outputs_that_are_the_same_in_all_pieces():
    class Named(nn.Module):
        def __init__(self): super().__init__(); self.m = model()
        def forward(self, x): return {'pred':self.m(x), 'kind':'regression', 'n':3, 'nothing':None}
    def run(cbs): return fit(make_learner(32, m=Named(), loss_func=lambda p,t: mse(p['pred'], t)*p['n'], cbs=cbs), 1, lr=.01)
    for cb in GradientCache(8),GradientAccumulation(32, micro_batch_size=8): assert_same(weights(run(cb)), weights(run([])), ROUNDING)

@pytest.mark.parametrize('micro', [8, 'auto'])
def test_a_window_smaller_than_the_loaders_batch(micro):
    with pytest.raises(ValueError, match="accum_bs=16 is not a multiple of the DataLoader's batch of 32 samples: use 32, or change its batch size to 16"):
        fit(make_learner(32, cbs=GradientAccumulation(16, micro_batch_size=micro)), 1)

# Nothing is left

@pytest.mark.thin(29)
@pytest.mark.parametrize('order', [-5, 7, 99])
@pytest.mark.parametrize('event', EVENTS)
@pytest.mark.parametrize('exc', [KeyboardInterrupt, ZeroDivisionError, *CANCELS, CancelStepException, CancelBackwardException])
def test_a_fault_leaves_nothing(exc, event, order):
    for nth in 1,3:
        learn = make_learner(32, cbs=[GradientAccumulation(32, micro_batch_size=8), Fault(exc, event, nth, order)])
        try: fit(learn, 1)
        except BaseException: pass
        assert '_do_one_batch' not in vars(learn) and 'forward' not in vars(learn.model)
        learn.remove_cb(Fault)
        learn.model.load_state_dict(model().state_dict())
        assert_same(weights(fit(learn, 1, reset_opt=True)), weights(fit(make_learner(32), 1)), ROUNDING)

@pytest.mark.thin(7)
@pytest.mark.parametrize('nth', range(1, 13))
@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'before_backward'])
@pytest.mark.parametrize('order', [-5, 7, 99])
def test_a_cancelled_batch_is_left_out_whole(event, order, nth):
    "In which of its pieces it may be: as where batches are not split; 96 samples in pieces of 8"
    def run(nth, cbs): return fit(make_learner(32, cbs=[Fault(CancelBatchException, event, nth, order), *cbs], opt_func=partial(SGD, mom=.9)), 1)
    big,small = run(-(-nth//4), []),run(nth, [GradientAccumulation(32, micro_batch_size=8)])
    assert_same(weights(small), weights(big), ROUNDING)
    assert len(losses(small)) == len(losses(big))
