"`bs_find`: what it measures, by a clock of the test's own, what it makes of that, and that the Learner is afterwards as it was"
import itertools, random, time
from collections import deque
import pytest
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader as TorchDataLoader

from common import *
from fastai.text.data import LMDataLoader
from fastxtend_accum.demo import digits_learner
import fastxtend_accum.bs_find as module
from fastxtend_accum.bs_find import Costs, advice, suggest
from fastxtend_accum.trial import Snapshot

# Everything as it was

EVENTS = ['before_fit','before_epoch','before_train','before_batch','after_pred','after_loss','before_backward','after_backward',
          'before_step','after_step','after_cancel_batch','after_batch','after_epoch','after_fit']  # an epoch of the trial ends without validation

class Counts(Callback):
    "Changes itself, collections and a generator of its own at every batch, and the recorder"
    def __init__(self): self.n,self.seen,self.last,self.kinds,self.sums,self.rng = 0,[],deque(maxlen=3),set(),np.zeros(2),np.random.default_rng(1)
    def after_batch(self):
        self.n += 1
        self.sums += self.n
        for f in self.seen.append,self.last.append,self.kinds.add: f(self.rng.random())
        self.learn.recorder.counted = self.n

def strike(exc, event, order):
    "A callback that raises `exc` when `event` fires for the second time; it counts where no snapshot reaches"
    times = itertools.count(1)
    def f(cb):
        if next(times) == 2: raise exc('on purpose')
    cb = Callback(**{event:f})
    cb.order = order
    return cb

def norm_model(): return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(.2), nn.Linear(8, 1))

def trained_learner(*cbs, opt_func=Adam, epochs=1):
    "With buffers, dropout, metrics, shuffled samples, and an accumulation in the middle of its callbacks"
    set_seed(3)
    ds = list(zip(*(o.float() for o in data(80))))
    dls = DataLoaders(DataLoader(ds, bs=4, shuffle=True), DataLoader(ds[:20], bs=16))
    learn = Learner(dls, norm_model(), loss_func=MSELossFlat(), opt_func=opt_func, metrics=mae,
                    cbs=[Counts(), GradientAccumulation(8), GradientNoiseScale(), GradientClip(1.), *cbs])
    learn.remove_cb(ProgressCallback)  # no_bar would put another in its place
    return fit(learn, epochs, .01) if epochs else learn

def walk(o, path='learn', seen=()):
    "All that `o` holds, by path, as comparable values: tensors as bytes, other objects by their identity and attributes"
    if id(o) in seen: return
    seen = (*seen, id(o))
    parts = {}
    if isinstance(o, Tensor):
        value = str(o.dtype),o.requires_grad,o.detach().numpy().tobytes()
        if o.is_leaf: parts = {'grad':o.grad}
    elif isinstance(o, dict): value,parts = [id(k) if isinstance(k, Tensor) else k for k in o],{str(k)[:20]:v for k,v in o.items()}
    elif isinstance(o, (list,tuple,deque,set)): value,parts = len(o),dict(enumerate(o))
    elif isinstance(o, np.ndarray): value = o.tobytes()
    elif isinstance(o, random.Random): value = o.getstate()
    elif isinstance(o, np.random.Generator): value = str(o.bit_generator.state)
    elif isinstance(o, (str,int,float,type(None))): value = repr(o)
    elif isinstance(o, (GetAttr,nn.Module,Metric,Optimizer,OptimWrapper,torch.optim.Optimizer)) or type(o).__module__.startswith('fastxtend_accum'):
        value,parts = id(o),{k:v for k,v in vars(o).items() if k not in ('dataset','learn')}
    else: value = id(o)
    yield path,value
    for k,v in parts.items(): yield from walk(v, f'{path}.{k}', seen)

def everything(learn):
    "All there is, before and after, by name"
    return dict(walk(learn), random=random.getstate(), numpy=str(np.random.get_state()), torch=torch.get_rng_state().tolist(),
                autocast=torch.is_autocast_enabled('cpu'))

def changed(a, b): return [k for k in a.keys() | b.keys() if k not in a or k not in b or a[k] != b[k]]

def assert_as_it_was(learn, before, twin):
    "Nothing has changed, and the next fit is that of a twin that was left alone"
    assert changed(everything(learn), before) == []
    for o in learn,twin: set_seed(5); fit(o, 1, .01)
    assert_same(weights(learn), weights(twin))
    assert_same(losses(learn), losses(twin))

def find(learn, lr=.05): return learn.bs_find(lr, show_plot=False)

@pytest.mark.parametrize('opt_func', [Adam, partial(SGD, mom=.9), partial(OptimWrapper, opt=torch.optim.AdamW)])
@pytest.mark.parametrize('epochs', [0, 1])
def test_it_leaves_everything_as_it_was(opt_func, epochs):
    learn,twin = (trained_learner(MixUp(), BnFreeze(), opt_func=opt_func, epochs=epochs) for _ in range(2))
    before = everything(learn)
    assert 0 < find(learn).noise_scale
    assert_as_it_was(learn, before, twin)

def test_whatever_happens_inside():
    "More than `bs_find` does: the Recorder and the metrics take part, the body is frozen, there is another optimizer"
    learn,twin = trained_learner(),trained_learner()
    before = everything(learn)
    with pytest.raises(ZeroDivisionError), Snapshot(learn):
        fit(learn, 1, 10.)
        for p in learn.model[0].parameters(): p.requires_grad_(False)
        learn.create_opt()
        learn.model[3].weight.grad = None
        del learn.recorder.losses
        assert len(changed(everything(learn), before)) > 100
        1/0
    assert_as_it_was(learn, before, twin)

@pytest.mark.thin(11)
@pytest.mark.parametrize('event', EVENTS)
@pytest.mark.parametrize('exc,order', [(KeyboardInterrupt, -15), (KeyboardInterrupt, 7), (KeyboardInterrupt, 49), (ZeroDivisionError, 7)])
def test_everything_is_as_it_was_after_an_interrupt(exc, event, order):
    if event == 'after_backward' and order > 6: event = 'before_step'  # the accumulation has cancelled the batch by then
    learn,twin = trained_learner(),trained_learner()
    cb = strike(exc, event, order)
    learn.add_cb(cb)
    before = everything(learn)
    with pytest.raises(exc): find(learn)
    assert changed(everything(learn), before) == []
    learn.remove_cb(cb)
    assert_as_it_was(learn, everything(learn), twin)

@pytest.mark.parametrize('event', ['before_batch','after_pred','after_batch'])
def test_an_interrupt_leaves_no_autocast(event):
    "fastai's MixedPrecision is between two of its events then; the fit that follows is right only if PyTorch forgets the cast weights"
    def learner(): return fit(make_learner(4, m=model().float(), loss_func=MSELossFlat(), cbs=CpuMixedPrecision(amp_mode=AMPMode.BF16)), 1)
    learn,twin = learner(),learner()
    cb = strike(KeyboardInterrupt, event, 20)
    learn.add_cb(cb)
    with pytest.raises(KeyboardInterrupt): find(learn)
    learn.remove_cb(cb)
    assert_as_it_was(learn, everything(learn), twin)

def test_loggers_trackers_and_bars_stand_aside():
    "And nothing is written"
    learn = make_learner(4, cbs=[CSVLogger(), SaveModelCallback(), ShowGraphCallback(), EarlyStoppingCallback(patience=1), ReduceLROnPlateau()])
    learn.fit(1, .1)
    cbs,logger,files = list(learn.cbs),learn.logger,{o:o.read_bytes() for o in Path().rglob('*') if o.is_file()}
    learn.bs_find(.1)
    assert list(learn.cbs) == cbs and learn.logger == logger
    assert files == {o:o.read_bytes() for o in Path().rglob('*') if o.is_file()} and len(files) == 2

class Texts(list):
    "Documents of a few tokens each"

def test_order_of_documents():
    "LMDataLoader shuffles its documents where they are"
    ds = Texts([tensor(range(10*i, 10*i+10)).remainder(50) for i in range(40)])
    dls = DataLoaders(LMDataLoader(ds, bs=2, seq_len=8, shuffle=True), LMDataLoader(ds[:8], bs=2, seq_len=8))
    learn = Learner(dls, nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)), CrossEntropyLossFlat())
    with quiet(learn): learn.fit(1)
    before = list(dls.train.items.idxs)
    find(learn)
    assert list(dls.train.items.idxs) == before != sorted(before)

def test_pytorchs_data_loader_and_its_generator():
    g = torch.Generator().manual_seed(7)
    ds = list(zip(*(o.float() for o in data(96))))
    dls = DataLoaders(TorchDataLoader(ds, 4, shuffle=True, generator=g), TorchDataLoader(ds[:20], 16))
    learn = Learner(dls, model().float(), loss_func=MSELossFlat())
    before = g.get_state()
    find(learn)
    assert (g.get_state() == before).all()

def test_a_module_that_is_replaced_or_adds_hooks():
    "As SyncBatchNorm.convert_sync_batchnorm and callbacks with hooks do, which clean up too late if they are interrupted"
    learn = trained_learner()
    norm,hooks = learn.model[1],dict(learn.model[0]._forward_hooks)
    with Snapshot(learn):
        learn.model[1] = nn.Identity()
        learn.model[0].register_forward_hook(noop)
    assert learn.model[1] is norm and learn.model[0]._forward_hooks == hooks

# What other callbacks do in a trial

@pytest.mark.parametrize('valid', ['full', 'missing'])
@pytest.mark.parametrize('order', [51, 60, 99])
@pytest.mark.parametrize('read', [lambda cb: cb.recorder.values[-1][0], lambda cb: cb.learn.final_record[0], lambda cb: cb.recorder.log[1]])
def test_callbacks_that_read_what_an_epoch_recorded(read, order, valid):
    "As tsai's MVP does in after_epoch: there is a training loss, as in `lr_find`, also where the trial is longer than an epoch; and no event of a validation"
    seen,events = [],[]
    cb = Callback(after_epoch=lambda cb: seen.append(read(cb)), before_validate=lambda cb: events.append(1), after_validate=lambda cb: events.append(1))
    cb.order = order
    learn = make_learner(8, n=24, cbs=cb)  # three batches
    if valid == 'missing': learn.dls.loaders = learn.dls.loaders[:1]
    find(learn)
    assert len(seen) > 10 and all(isinstance(o, float) and math.isfinite(o) for o in seen) and events == []

def leave(name):
    "A callback that leaves something else in the Learner after each fit: as fasterai's QuantizeCallback, a model without parameters"
    other = dict(model=nn.Identity(), loss_func=None, dls=None, splitter=None, metrics=L(), model_dir='other')[name]
    return Callback(after_fit=lambda cb: setattr(cb.learn, name, other))

@pytest.mark.parametrize('name', ['model', 'loss_func', 'dls', 'splitter', 'metrics', 'model_dir'])
@pytest.mark.parametrize('cbs', [[], [GradientAccumulation(32, micro_batch_size='auto')]])
def test_callbacks_that_leave_something_else_after_a_fit(name, cbs):
    "Each trial begins with the Learner as it was"
    learn = fit(make_learner(16, n=128, cbs=deepcopy(cbs)), 1)
    cb = leave(name)
    learn.add_cb(cb)
    before = getattr(learn, name)
    found = find(learn)
    assert getattr(learn, name) is before and set(found.time) >= {2, 4, 8, 16, 32, 64, 128}
    learn.remove_cb(cb)
    fit(learn, 1)

@pytest.mark.parametrize('has_step', [False, True])
@pytest.mark.parametrize('has_eps', [False, True])
def test_optimizers_without_sqr_mom(has_step, has_eps, capsys):
    "As fastxtend's adan: rates go with the root of the batch size, as for all that divide by a mean of squares"
    from test_noise import squares_without_momentum
    learn = make_learner(16, n=2048, opt_func=squares_without_momentum(has_step, has_eps), cbs=GradientAccumulation(1024))
    rates = []
    learn.add_cb(Callback(before_step=lambda cb: rates.append(cb.opt.hypers[0]['lr'])))
    assert find(learn, .1).noise_scale > 0
    assert_same(sorted(set(rates)), [0., .1*(64/1024)**.5/2], 1e-12)

class Wants(nn.Module):
    "A loss over the batch, which needs all of its samples, and says so in its own way"
    def __init__(self, error): super().__init__(); self.error = error
    def forward(self, pred, targ):
        n = len(pred)
        if self.error == 'index': pred = pred[torch.arange(64)]
        if self.error == 'shape': pred = pred+torch.zeros(64, 1)
        if self.error == 'view': pred = pred.view(2, 32)
        if self.error == 'assert': assert n == 64, 'two\nlines'
        return (pred.mean()**2).float()
    def __reduce__(self): return Wants,(self.error,)

@pytest.mark.parametrize('error', ['index', 'shape', 'view', 'assert'])
@pytest.mark.parametrize('where', ['loss', 'callback'])
def test_losses_that_need_the_whole_batch(error, where):
    "As self_supervised's SimCLR without a GradientCache: one line, which says what to do; the error of the loss is its cause"
    wants = Wants(error)
    if where == 'loss': learn = make_learner(64, n=256, loss_func=wants)
    else: learn = make_learner(64, n=256, cbs=Callback(after_pred=lambda cb: wants(cb.pred, cb.y) if cb.training else None))
    before = weights(learn)
    with pytest.raises(ValueError, match='bs_find also trains on (32|256) samples, which raises .*: if your loss needs a whole batch, compare fits instead$') as e: find(learn)
    assert len(str(e.value).splitlines()) == 1 and isinstance(e.value.__cause__, (IndexError,RuntimeError,AssertionError))
    assert_same(weights(learn), before)

@pytest.mark.parametrize('exc', [IndexError, RuntimeError, ValueError, AssertionError, ZeroDivisionError])
def test_errors_with_the_batch_as_it_is_are_your_own(exc):
    def fails(pred, targ): raise exc('on purpose')
    with pytest.raises(exc, match='^on purpose$'): find(make_learner(64, n=256, loss_func=fails))

@pytest.mark.parametrize('opt_func', [SGD, Adam, partial(OptimWrapper, opt=torch.optim.AdamW)])
@pytest.mark.parametrize('fitted', [False, True])
def test_a_frozen_model(opt_func, fitted):
    learn = make_learner(16, opt_func=opt_func)
    if fitted: fit(learn, 1)
    learn.model.requires_grad_(False)
    with pytest.raises(ValueError, match='all parameters are frozen: call learn.unfreeze'): find(learn)

# A clock of the test's own

class Timed(nn.Module):
    "Time passes as it says: `fixed` seconds a batch, `sample` a sample, and with `step`, `load` those of a step and of loading a sample"
    now,seen = 0.,[]
    def __init__(self, m, fixed=0., sample=0.): super().__init__(); self.m,self.fixed,self.sample = m,fixed,sample
    def forward(self, x):
        if self.training: Timed.seen.append(len(x)); Timed.now += self.fixed+self.sample*len(x)
        return self.m(x)

def slow(opt_func, seconds):
    def make(params, lr, **kwargs):
        opt = opt_func(params, lr=lr, **kwargs)
        step = opt.step
        def slow_step(*args): step(); Timed.now += seconds
        opt.step = slow_step
        return opt
    return make

@pytest.fixture
def clock(monkeypatch):
    Timed.seen,Timed.now = [],0.
    monkeypatch.setattr(module, 'clock', lambda: Timed.now)

class Products(nn.Module):
    "Its gradient is the data"
    def __init__(self, d): super().__init__(); self.w = nn.Parameter(torch.zeros(d))
    def forward(self, x): return x@self.w

def timed_learner(bs, n=2048, noise_scale=100., fixed=0., sample=.001, step=.01, load=0., opt_func=SGD, d=500, cbs=()):
    "A Learner with a known noise scale, and known times; the loader takes `load` seconds a sample"
    g = torch.Generator().manual_seed(1)
    x = torch.ones(n, d)+torch.randn(n, d, generator=g)*noise_scale**.5
    class Samples(list):
        def __getitem__(self, i): Timed.now += load; return super().__getitem__(i)
    ds = Samples(zip(x, torch.zeros(n)))
    dl = DataLoader(ds, bs=bs)
    learn = Learner(DataLoaders(dl, DataLoader(ds[:4], bs=4)), Timed(Products(d), fixed, sample), lambda pred,targ: pred.mean(), opt_func=slow(opt_func, step), cbs=list(cbs), lr=1e-4)
    return learn

def costs_of(learn, monkeypatch):
    "What `bs_find` has measured, and what it says of it"
    kept = []
    monkeypatch.setattr(module, 'suggest', lambda costs, *args: kept.append(costs) or suggest(costs, *args))
    found = learn.bs_find(show_plot=False)
    return kept[0],found

def test_it_costs_no_more_than_lr_find(clock):
    "Samples that go through the model, and with a validation set none of it"
    for n,bs,cbs in (4096, 16, ()),(1024, 64, ()),(4096, 16, [GradientAccumulation(64, micro_batch_size='auto')]),(2048, 64, [GradientAccumulation(256, micro_batch_size=16)]),(96, 32, ()),(101, 32, ()):
        Timed.seen.clear()
        timed_learner(bs, n, fixed=1., cbs=cbs, d=5).bs_find(show_plot=False)  # so that larger batches are tried as far as they go
        assert 46*bs < sum(Timed.seen) <= 100*bs

def test_it_measures_what_it_should(clock, monkeypatch):
    "By micro-batch: 5 ms and 1 a sample; 10 ms a step; loading takes 2 ms a sample; the noise scale is 100"
    costs,found = costs_of(timed_learner(64, fixed=.005, load=.002), monkeypatch)
    assert sorted(costs.batch) == [4, 8, 16, 32, 64, 128, 256]
    assert_same(list(costs.batch.values()), [.005+.001*o for o in costs.batch], 1e-6)
    assert_same([costs.step, costs.load, costs.limit], [.01, .002, 0.], 1e-6)
    assert found.noise_scale == pytest.approx(100, rel=.1)

def test_workers_are_a_limit_where_training_waits_for_them(clock, monkeypatch):
    "5 ms a sample from the loader while the model takes one, so that a sample takes 6 in all; but not where they keep up"
    for load,limit in (.005, .006+.01/64),(.00005, 0.):
        learn = timed_learner(64, load=load)
        learn.dls.train.fake_l = SimpleNamespace(num_workers=2, no_multiproc=learn.dls.train.fake_l.no_multiproc)
        monkeypatch.setattr(type(learn.dls.train), '__iter__', lambda self: self.create_batches(iter(range(len(self.dataset)))))
        costs,_ = costs_of(learn, monkeypatch)
        assert costs.load == 0 and costs.limit == pytest.approx(limit, rel=1e-6)
        monkeypatch.undo()
        monkeypatch.setattr(module, 'clock', lambda: Timed.now)

@pytest.mark.parametrize('opt_func', [SGD, Adam, partial(OptimWrapper, opt=torch.optim.AdamW)])
@pytest.mark.parametrize('noise_scale, step', [(50, .01), (50, .32), (800, .05)])
def test_the_root(clock, opt_func, noise_scale, step):
    "The fastest size is a neighbour of the root of N·s/t; Adam's metric is the plain one where all directions are alike"
    found = timed_learner(64, 4096, noise_scale=noise_scale, step=step, opt_func=opt_func).bs_find(show_plot=False)
    root = (found.noise_scale*step/.001)**.5
    assert found.noise_scale == pytest.approx(noise_scale, rel=.35)
    assert root/2**.5 <= found.fastest <= root*2**.5
    assert min(found.time.values()) == found.time[found.fastest] == 1 and min(found.samples.values()) == 1
    for a,b in itertools.pairwise(found.samples): assert found.samples[b]/found.samples[a] == pytest.approx((1+b/found.noise_scale)/(1+a/found.noise_scale))

# The formula

@draws
@given(noise_scale=st.floats(1, 1e5), step=st.floats(1e-4, 10))
def test_any_root(noise_scale, step):
    "With t seconds a sample at every size, (t + s/B)(1 + B/N) is least at the root of N·s/t"
    root = (noise_scale*step/.001)**.5
    time = suggest(Costs({1:.001}, step), noise_scale, [1, *(root*2**o for o in (-2, -1, -.1, 0, .1, 1, 2) if root*2**o > 1)]).time
    if root > 1: assert min(time, key=time.get) == root
    assert suggest(Costs({1:.001}, step), math.inf, [1, 2, 4]).samples == {1:1., 2:1., 4:1.}

@pytest.mark.thin(3)
@pytest.mark.parametrize('noise_scale', [20, 200])
def test_steps_to_a_loss_of_a_noisy_quadratic(noise_scale):
    """By simulation: the loss is h|w|²/2 in 500 directions with a curvature h of 1, and in 500 with .02. The gradient of a sample is that of the loss, with noise N times as large as it in each half, so that the noise scale is N
    wherever w is. For each batch size the learning rate that gets to 1% of the loss in the fewest steps, of 60; the samples that takes, relative to the smallest, are those of `suggest` within 5%"""
    def steps(bs, lr):
        rng,w,h = np.random.default_rng(0),np.ones((2, 500)),np.array([[1.], [.02]])
        w[1] *= 50**.5  # as much of the loss
        start = (h*w**2).sum()
        for i in range(1, 10**5):
            g = h*w
            w = w-lr*(g+np.linalg.norm(g, axis=1, keepdims=True)*(noise_scale/bs/500)**.5*rng.normal(size=w.shape))
            loss = (h*w**2).sum()/start
            if loss < .01: return i
            if loss > 10: return math.inf
    sizes = [noise_scale*2**i//4 for i in range(6)]
    def fewest(bs): return min(steps(bs, o/(1+noise_scale/bs)) for o in np.geomspace(1., 2.2, 60))
    needed = np.array([bs*fewest(bs) for bs in sizes])
    samples = suggest(Costs({1:1.}, 0.), noise_scale, sizes).samples
    assert_same(needed/needed[0]/np.array(list(samples.values())), np.ones(6), .05)
    assert needed[-1] > 5*needed[0]

def test_a_gpu_that_is_not_full():
    "As long for 16 samples as for 64, and then in proportion: not less than 64, whatever the noise"
    costs = Costs({16:1., 32:1., 64:1., 128:2.}, 0.)
    assert costs.micro_bs == 128 and suggest(costs, 10., [16, 32, 64, 128, 256]).fastest == 64
    assert costs.per_sample(64) == costs.per_sample(256) == 1/64

def test_micro_batches_that_are_faster_than_large_ones():
    "As on a CPU whose cache is full: 256 samples in micro-batches of 32"
    costs = Costs({32:1., 64:3., 128:9.}, 40.)
    found = suggest(costs, 200., [32, 64, 128, 256, 512])
    assert costs.micro_bs == 32 and found.fastest == 512 and found.micro_bs == 32
    assert costs.per_sample(512) == 1/32+40/512 and Costs({32:1.}, 40., load=.5).per_sample(512) == 1/32+40/512+.5 and Costs({32:1.}, 40., limit=7.).per_sample(512) == 7

def test_no_signal():
    "By the time of a sample: the smallest size within 5% of the least"
    found = suggest(Costs({32:3.2, 64:6.4}, 1.), math.inf, [32, 64, 128, 256, 512])
    assert found.fastest == 256 and set(found.samples.values()) == {1.}
    assert '256 samples are fastest, judged by the time per sample alone (the signal of the gradient is lost in its noise)' in advice(found, 32, 64, 1, sqrt_scale)

def test_noise_alone_has_no_signal(clock):
    learn = timed_learner(64, noise_scale=1.)
    for o in learn.dls.train.dataset: o[0].sub_(1.)  # the mean gradient is 0
    assert learn.bs_find(show_plot=False).noise_scale > 1000

@pytest.mark.parametrize('fastest,now,bs,n_proc,rule,words', [
    (64, 256, 256, 1, sqrt_scale, '64 samples are fastest; your 256 would take 2.0 times as long: use bs=64 and lr x 0.5'),
    (64, 256, 256, 4, linear_scale, 'use bs=16 and lr x 0.25'),
    (64, 256, 64, 1, sqrt_scale, 'use bs=64 without accumulation and lr x 0.5'),
    (64, 16, 16, 1, sqrt_scale, 'use bs=64 and lr x 2'),
    (512, 32, 32, 1, linear_scale, 'use bs=64 and GradientAccumulation(512) and lr x 16'),
    (512, 64, 64, 1, sqrt_scale, 'use GradientAccumulation(512) and lr x 2.8'),
    (512, 64, 128, 1, sqrt_scale, 'use GradientAccumulation(512, micro_batch_size=64) and lr x 2.8'),
    (64, 64, 64, 1, sqrt_scale, '64 samples are fastest: nothing to change')])
def test_the_sentence(fastest, now, bs, n_proc, rule, words):
    found = SuggestedBS(fastest, 64//n_proc, 100., {fastest:1., now:1. if now == fastest else 2.}, {})
    assert words in (said := advice(found, now, bs, n_proc, rule)) and len(said.splitlines()) == 1

def test_larger_batches(clock, monkeypatch):
    "With 20 ms a batch a sample takes less in a larger one: up to four batches of the loader, its training set, and memory; not with a `micro_batch_size` of your own"
    def largest(*args, **kwargs): return max(costs_of(timed_learner(*args, fixed=.02, **kwargs), monkeypatch)[0].batch)
    assert [largest(64), largest(64, 300), largest(64, 200), largest(64, 100), largest(64, 64)] == [256, 256, 128, 64, 64]
    assert largest(64, cbs=[GradientAccumulation(64, micro_batch_size=32)]) == 32
    forward = Timed.forward
    def limited(self, x):
        if len(x) > 200: raise torch.OutOfMemoryError('CUDA out of memory')
        return forward(self, x)
    monkeypatch.setattr(Timed, 'forward', limited)
    assert largest(64) == 128

def test_larger_batches_that_take_longer(clock, monkeypatch):
    "A sample takes twice as long in batches of more than 64"
    forward = Timed.forward
    def slow(self, x): Timed.now += .001*len(x)*(len(x) > 64); return forward(self, x)
    monkeypatch.setattr(Timed, 'forward', slow)
    costs,found = costs_of(timed_learner(64, fixed=.001), monkeypatch)
    assert max(costs.batch) == 256 and costs.micro_bs < 128

@pytest.mark.parametrize('micro_batch_size,largest', [(32, 32), (64, 64), ('auto', 32), (None, 256)])
def test_the_largest_batch_that_is_timed(micro_batch_size, largest, clock, monkeypatch):
    "The `micro_batch_size`; with 'auto' what fits in memory, here 32 samples; without one, four batches of the loader"
    forward = Timed.forward
    def limited(self, x):
        if micro_batch_size == 'auto' and len(x) > 32: raise torch.OutOfMemoryError('CUDA out of memory')
        return forward(self, x)
    monkeypatch.setattr(Timed, 'forward', limited)
    learn = timed_learner(64, noise_scale=400., fixed=.02, step=.1, cbs=[GradientAccumulation(128, micro_batch_size=micro_batch_size)])
    costs,found = costs_of(learn, monkeypatch)
    assert found.fastest >= 64 and max(costs.batch) == largest

def test_a_large_gradient_does_not_outweigh_the_trial():
    seen = [(100., 1.)]*40
    assert module.typical_noise_scale(seen) == 100
    assert module.typical_noise_scale([(100., 1e6)]+seen) == 100 and module.typical_noise_scale([(100., -1e6)]+seen) == 100
    assert module.typical_noise_scale([]) == module.typical_noise_scale([(1., -1.)]*8) == math.inf and module.typical_noise_scale([(6., 2.)]) == 3

def test_almost_as_good():
    assert advice(SuggestedBS(64, 64, 100., {64:1., 128:1.03}, {}), 128, 128, 1, sqrt_scale) == '64 samples are fastest, and your 128 take 1.03 times as long: nothing to change'

# Learners

@pytest.mark.parametrize('cbs,now', [([], 16), ([GradientAccumulation(48)], 48), ([GradientAccumulation(n_acc=64)], 64), ([GradientAccumulation(micro_batch_size=4)], 16),
                                     ([GradientAccumulationSchedule(32, 128)], 32), ([GradientAccumulation(64, micro_batch_size='auto'), GradientNoiseScale()], 64)])
def test_the_present_size_is_among_those_compared(cbs, now, clock, capsys):
    learn = timed_learner(16, 512, cbs=cbs, step=10.)
    found = learn.bs_find(show_plot=False)
    micro = 4 if cbs and cbs[0].micro_batch_size == 4 else 16
    assert sorted(found.time) == sorted({*(o for i in range(5) if (o := micro >> i) > 1), now, 16, 32, 64, 128, 256})
    said = capsys.readouterr().out.splitlines()
    assert found.fastest == 256 and said[-1].startswith(f'256 samples are fastest; your {now} would take')
    fit(learn, 1)

def test_fastais_accumulation(clock):
    from fastai.callback.training import GradientAccumulation as Fastais
    assert 48 in timed_learner(16, 512, cbs=[Fastais(48)]).bs_find(show_plot=False).time

def test_no_more_than_the_training_set(clock):
    assert max(timed_learner(16, 100).bs_find(show_plot=False).time) == 64
    assert max(timed_learner(256, 100).bs_find(show_plot=False).time) == 100

def test_settings_of_an_accumulation_hold(clock):
    weighed = []
    def num_items(learn): weighed.append(len(learn.x)); return len(learn.x)
    timed_learner(64, cbs=[GradientAccumulation(256, micro_batch_size=8, num_items=num_items)]).bs_find(show_plot=False)
    assert set(weighed) == {8} and len(weighed) == 46*8

@pytest.mark.parametrize('bs,windows', [(8, 11), (16, 11), (48, 23), (64, 46), (128, 46)])
def test_windows_of_the_noise(bs, windows, monkeypatch, clock):
    "64 samples or more, but at most four batches; those of 64 and more in four pieces"
    seen = []
    monkeypatch.setattr(module, 'typical_noise_scale', lambda o: seen.append(len(o)) or 100.)
    Timed.seen.clear()
    timed_learner(bs, 70*128).bs_find(show_plot=False)
    assert seen == [windows] and max(Timed.seen[-8:]) == (bs//4 if bs >= 64 else bs)

def test_learning_rates():
    "Half of those of `fit`, group by group, scaled from the present size to that of the windows; no schedule"
    m = model()
    for lr,expected in (.2, (.2, .2)),(slice(.2), (.02, .2)),(slice(.1, .4), (.1, .4)),(None, (.3, .3)):
        seen = []
        learn = make_learner(16, n=512, m=m, splitter=lambda m: [params(m[0]), params(m[2])], lr=.3,
                             cbs=[ParamScheduler({'lr':SchedLin(1, 0)}), GradientAccumulation(256), Callback(before_step=lambda cb: seen.append([h['lr'] for h in cb.opt.hypers]))])
        find(learn, lr)
        timing,noise = [o for o in seen if not any(o)],[o for o in seen if any(o)]
        assert len(timing) == 6*6 and len(noise) == 11  # six sizes, six batches each
        for lrs in noise: assert_same(lrs, [o/8 for o in expected], 1e-9)  # SGD: in proportion

class Limited(nn.Module):
    "Memory for two samples at a time"
    def __init__(self): super().__init__(); self.m = model()
    def forward(self, x):
        if self.training and len(x) > 2: raise torch.OutOfMemoryError('CUDA out of memory')
        return self.m(x)

@pytest.mark.parametrize('micro_batch_size', [2, 'auto'])
def test_what_fits(micro_batch_size):
    found = find(make_learner(4, n=512, m=Limited(), cbs=GradientAccumulation(8, micro_batch_size=micro_batch_size)))
    assert found.micro_bs == 2 and set(found.time) == {2, 4, 8, 16, 32, 64}

class Carries(nn.Module):
    "A model whose batch cannot be split"
    def __init__(self): super().__init__(); self.m = model()
    def forward(self, x): return self.m(x)
    def reset(self): pass

def test_batches_that_cannot_be_split():
    found = find(make_learner(64, n=512, m=Carries()))
    assert set(found.time) == {64, 128, 256, 512} and found.noise_scale > 0

def test_mixed_precision():
    learn = make_learner(64, n=1024, m=model().float(), loss_func=lambda pred,targ: F.mse_loss(pred.float(), targ.float()), cbs=CpuMixedPrecision(init_scale=2.**8))
    plain = make_learner(64, n=1024, m=model().float(), loss_func=MSELossFlat())
    assert find(learn, .01).noise_scale == pytest.approx(find(plain, .01).noise_scale, rel=.05)

def test_without_a_recorder(clock):
    learn = timed_learner(64)
    learn.remove_cb(Recorder)
    assert learn.bs_find(show_plot=False).noise_scale == pytest.approx(100, rel=.1) and not learn._grab_cbs(Recorder)

@pytest.mark.parametrize('valid', ['empty', 'missing'])
def test_without_a_validation_set(valid):
    learn = make_learner(16)
    learn.dls.loaders = learn.dls.loaders[:1] + ([DataLoader([], bs=4)] if valid == 'empty' else [])
    assert find(learn).fastest in (2, 4, 8, 16, 32, 64)

def test_plot(clock):
    learn = timed_learner(16, 512)
    plt.close('all')
    learn.bs_find(show_plot=False)
    assert not plt.get_fignums()
    found = learn.bs_find()
    [ax] = plt.gcf().axes
    assert [o.get_text() for o in ax.get_xticklabels()] == [str(o) for o in found.time]
    assert [o.get_text() for o in ax.get_legend().get_texts()] == ['time', 'samples', f'fastest: {found.fastest}']
    assert_same(ax.lines[0].get_ydata(), list(found.time.values()))
    assert_same(ax.lines[1].get_ydata(), list(found.samples.values()))
    plt.close('all')

# Error messages

class NoLength:
    def __iter__(self): return iter(())

def test_errors_before_training():
    trained = []
    def fails(said, change):
        learn = make_learner(4, cbs=Callback(before_fit=lambda cb: trained.append(1)))
        change(learn)
        with pytest.raises(ValueError, match=said) as e: find(learn)
        assert not trained and len(str(e.value).splitlines()) == 1
    fails('cannot restore a sharded Sequential', lambda learn: setattr(learn.model, 'set_requires_gradient_sync', noop))
    fails('with GradientCache the loss depends on the size of a batch', lambda learn: learn.add_cb(GradientCache(2)))
    fails('the training DataLoader has no length', lambda learn: setattr(learn.dls.train, 'n', None))
    fails('the training DataLoader has none', lambda learn: setattr(learn.dls.train, 'n', 0))
