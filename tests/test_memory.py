"Memory that runs out: the batch runs again in less; and the words of such errors"
import sys, weakref
from collections import Counter

import pytest
from fastai.callback.mixup import MixUp

from common import *
from fastxtend_accum.memory.out_of_memory import is_out_of_memory
from fastxtend_accum.windows.state import Snapshot
from test_checkpointing import Adds, Fails, buffer, states
from test_micro_batches import Largest, assert_other, seeded, vision

FLOAT32 = 5e-6
OOM = torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')
later = pytest.mark.filterwarnings('ignore:out of memory in training')
each_place = pytest.mark.parametrize('where', ['start', 'forward', 'loss', 'backward'])

def auto(accum=None): return GradientAccumulation(accum, micro_batch_size='auto')

# At any place, in any batch of a window, against a plain loop in micro-batches

class Fragile(nn.Module):
    "Runs out of memory at `where`, once in each batch of `at`, in its `at[batch]`th micro-batch; with BatchNorm and noise"
    struck = Counter()  # of the class, since what a module holds is undone
    def __init__(self, where=None, at=None):
        super().__init__()
        torch.manual_seed(0)
        self.body,self.norm,self.head = nn.Linear(5, 8),nn.BatchNorm1d(8),nn.Linear(8, 1)
        self.register_buffer('flag', torch.zeros(1, dtype=torch.bool))
        self.where,self.at,self.batch = where,at or {},None
        self.own,self.rngs = torch.Generator(),[np.random.default_rng(3), random.Random(3), np.random, random]
        self.double().struck.clear()
    def strike(self, where):
        if not self.training or where != self.where or self.batch not in self.at: return
        self.struck[self.batch] += 1
        if self.struck[self.batch] == self.at[self.batch]: raise OOM
    def forward(self, x):
        self.strike('start')
        if not self.training: return self.head(self.norm(self.body(x)))
        self.flag.logical_not_()
        noise = sum(o.random() for o in self.rngs)+torch.rand(1, generator=self.own).item()
        h = F.dropout(self.norm(self.body(x)), .5)*(noise+self.flag.double())
        h.register_hook(lambda grad: self.strike('backward'))
        self.strike('forward')
        return self.head(h)

def draws(): return torch.rand(1).item(),np.random.rand(),random.random()

class Seeds(Callback):
    "The same random numbers in each batch; and the next ones after it"
    order,run_valid = -20,False
    def before_fit(self): self.drawn,self.i = [],0
    def before_batch(self): self.model.batch = self.i; set_seed(self.i); self.i += 1
    def after_batch(self): self.drawn.append(draws())

def by_hand(at, accum, cached):
    "Two epochs of 160 samples, in batches of 32, with half as many at a time from each batch of `at` on"
    m,(x,y),seen = Fragile(),data(160),[]
    opt = torch.optim.SGD(m.parameters(), lr=.03)
    for i in range(10):
        set_seed(i)
        n = i*32%160
        parts = [*zip(*(t[n:n+32].split(32>>sum(o <= i for o in at)) for t in (x, y)))]
        res = [(m(a), b) for a,b in parts]
        if cached: res = [map(torch.cat, zip(*res))]
        sum(F.mse_loss(a, b)*len(a)/min(accum, 160-n//accum*accum) for a,b in res).backward()
        seen.append(draws())
        if (n+32)%accum and n+32 < 160: continue
        opt.step()
        opt.zero_grad()
    return m,seen

def assert_undone(cb, where, at, accum, *cbs):
    m = Fragile(where, at)
    def loss(pred, targ): m.strike('loss'); return mse(pred, targ)
    learn = fit(make_learner(32, 160, m=m, loss_func=loss, cbs=[Seeds(), cb, *cbs]), 2, .03)
    assert all(Fragile.struck[i] >= n for i,n in at.items()) and cb.micro_bs == 32>>len(at)
    plain,seen = by_hand(at, accum, cbs)
    assert_other(learn, Fragile())
    assert_same(weights(learn), weights(plain), ROUNDING)
    for a,b in zip(m.buffers(), plain.buffers(), strict=True): assert_same(a.double(), b.double(), ROUNDING)
    assert learn.seeds.drawn == seen

@later
@pytest.mark.thin(3)
@pytest.mark.parametrize('accum', [32, 64])
@pytest.mark.parametrize('at', [{0:1}, {1:1}, {2:1}, {1:1, 3:1}, {1:1, 3:2}])
@each_place
def test_a_batch_runs_again_as_if_it_had_been_split(where, at, accum):
    "From that batch on: weights, buffers, random states"
    assert_undone(auto(accum), where, at, accum)

@later
@pytest.mark.parametrize('accum', [32, 64])
@each_place
def test_a_batch_of_the_cache_runs_again(where, accum):
    assert_undone(GradientCache('auto'), where, {3:1}, accum, GradientAccumulation(accum))

# What a failed pass moves

def longer(m, x): m.mean.data = torch.cat([m.mean, x.detach().mean(0)]); return m.mean.mean()

@later
@pytest.mark.parametrize('at', [0, 3, 11])
@pytest.mark.parametrize('is_frozen', [False, True])
def test_what_a_failed_pass_has_moved_is_put_back(is_frozen, at):
    "Bit for bit, where whole batches run again with a recomputed block; a frozen parameter, in its data alone"
    def run(*cbs):
        set_seed(0)
        moves = [Adds(*o) for k,o in states.items() if (k == 'frozen') == is_frozen]+[Adds(buffer, longer)]
        return fit(make_learner(8, n=64, m=nn.Sequential(nn.Sequential(*moves), *model()).double(), cbs=cbs), 2, .01)
    cb = ActivationCheckpointing(lambda m: [*m[1:]])
    if is_frozen:
        with pytest.raises(RuntimeError, match='cannot be undone, since it has changed .* frozen'): run(Fails('after_loss', at), cb)
        return
    whole,ours = run(),run(Fails('after_loss', at), cb)
    assert cb.level and len(losses(whole)) == 16 and not weights(whole).isnan().any()
    assert_other(whole.model[1:], model())
    assert_same(weights(ours), weights(whole))
    assert_same(losses(ours), losses(whole))

@later
def test_sums_of_half_precision_stand_aside():
    "In mid-window"
    def run(*cbs): return fit(make_learner(8, m=model().bfloat16(), cbs=[GradientAccumulation(32), *cbs]))
    whole,ours = run(),run(Fails('after_loss', 2), cb := ActivationCheckpointing(lambda m: [*m]))
    assert cb.level and (weights(whole)-weights(model().bfloat16())).abs().max() > .01
    assert_same(weights(ours), weights(whole))

def test_an_input_that_is_changed_in_place():
    def shifted(pred, targ): return F.mse_loss(pred, targ.sub_(1)).float()
    with pytest.raises(RuntimeError, match='has changed its input .* set micro_batch_size to a number'):
        fit(make_learner(16, loss_func=shifted, cbs=[auto(), Fails('before_backward', 1)]), 1)

# The size that fits

class Limited(nn.Module):
    "Runs out of memory in training with more than `limit` samples; the class notes sizes"
    sizes = []
    def __init__(self, limit):
        super().__init__()
        layers = nn.Linear(5, 8),nn.BatchNorm1d(8),nn.Dropout(.3),nn.Tanh(),nn.Dropout(.3),nn.Linear(8, 1)
        self.m,self.limit = nn.Sequential(*layers),limit
    def forward(self, x):
        if self.training: Limited.sizes.append(len(x))
        if self.training and len(x) > self.limit: raise OOM
        return self.m(x)

def limited(limit, micro, accum=64, cbs=()):
    set_seed(0)
    ds = list(zip(*(o.float() for o in data(128))))
    dls = DataLoaders(DataLoader(ds, bs=32, shuffle=True), DataLoader(ds[:16], bs=16))
    Limited.sizes.clear()
    cbs = [GradientAccumulation(accum, micro_batch_size=micro), *cbs]
    return Learner(dls, Limited(limit), MSELossFlat(), opt_func=Adam, cbs=cbs)

def state(learn):
    drawn = tensor(random.random()),tensor(np.random.rand()),tensor(learn.dls.train.rng.random())
    return [weights(learn), *(b.double() for b in learn.model.buffers()), torch.get_rng_state(), *drawn]

@pytest.mark.thin(7)
@pytest.mark.parametrize('amp', [(), ('bf16',), ('fp16',)])
@pytest.mark.parametrize('mix', [(), (MixUp,)])
@pytest.mark.parametrize('limit,size', [(100, 32), (32, 32), (31, 16), (9, 8), (1.5, 1)])
def test_auto_is_the_size_given(limit, size, mix, amp):
    "Bit for bit, with dropout, shuffled data, mixed precision; and BatchNorm and MixUp, but for single samples"
    seen,res = [],[]
    def look(*args): seen.append(torch.is_autocast_enabled('cpu'))
    for micro in 'auto',size:
        cbs = [o() for o in mix if size > 1]+[CpuMixedPrecision(o, init_scale=2.**8) for o in amp]
        learn = limited(limit, micro, 32, cbs)
        if size == 1: learn.model.m[1] = nn.Identity()
        learn.model.register_forward_pre_hook(look)
        fit(learn, 2, .01, method='fit_one_cycle')
        assert learn.gradient_accumulation.micro_bs == size
        res.append([*state(learn), losses(learn), learn.recorder.lrs])
    assert len(seen) > 16 and all(o == bool(amp) for o in seen) and not torch.is_autocast_enabled('cpu')
    for a,b in zip(*res, strict=True): assert_same(a, b)

def test_an_interrupted_search_goes_on(recwarn):
    "What is tried: the pass that fits is a training pass"
    learn = limited(9, 'auto', cbs=[Fault(KeyboardInterrupt, 'after_pred', 1, 0)])
    with pytest.raises(KeyboardInterrupt): fit(learn, 1)
    fit(learn, 1)
    assert Limited.sizes == [32, 16, 8] + [8]*16 and learn.gradient_accumulation.micro_bs == 8
    assert not [o for o in recwarn if 'out of memory in training' in str(o.message)]

@pytest.mark.parametrize('cb', [auto, partial(GradientCache, 'auto')])
def test_the_logger_gets_what_is_found(cb, capsys):
    learn,lines = make_learner(50, m=Largest(model(), 9), cbs=cb()),[]
    learn.logger = lambda o: lines.append(o) if isinstance(o, str) else None
    with learn.no_bar(): learn.fit(2)
    assert len(lines) == 1 and 'each batch of 50 is split' in lines[0] and capsys.readouterr().out == ''

def test_it_looks_again_after_unfreeze():
    "With a frozen body more samples fit"
    learn,found = limited(32, 'auto'),[]
    learn.splitter = lambda m: [params(m.m[0]), params(m.m[-1])]
    def begin(self): self.model.limit = 9 if self.model.m[0].weight.requires_grad else 32
    def end(self): found.append(self.gradient_accumulation.micro_bs)
    learn.add_cb(Callback(before_batch=begin, after_train=end))
    with quiet(learn): learn.fine_tune(2)
    assert found == [32, 8, 8]
    tried = len(Limited.sizes)
    fit(learn, 1)
    assert found[3:] == [8] and len(Limited.sizes) == tried+16  # known by now: 128 samples, 8 at a time

def test_texts_of_many_lengths():
    "Of 320 numbers that fit: 32 samples of 10, 16 of 20, 8 of 40 without another try"
    class Lengths(nn.Module):
        def __init__(self): super().__init__(); torch.manual_seed(0); self.m = nn.Linear(1, 1).double()
        def forward(self, x):
            if self.training: sizes.append(len(x))
            if x.numel() > limit: raise OOM
            return self.m(x[...,None]).mean((1, 2))[:,None]
    lengths = 10,10,20,20,40,40,15,10
    batches = [[torch.randn(32, o, dtype=torch.float64) for o in (n, 1)] for n in lengths]
    def run(*cbs):
        dls = DataLoaders(*[torch.utils.data.DataLoader(batches, batch_size=None)]*2)
        for o in dls.loaders: o.bs = 32
        return weights(fit(Learner(dls, Lengths(), mse, opt_func=SGD, cbs=cbs), 1))
    limit,sizes = math.inf,[]
    whole = run()
    limit,sizes = 320,[]
    assert_same(run(auto()), whole, ROUNDING)
    assert sizes == [32]*2 + [32, *[16]*4] + [8]*8 + [16]*2 + [32]

# Later on, and where nothing can help

class RunsOut(Callback):
    "After five batches, only 8 samples fit"
    order,run_valid = 20,False
    def __init__(self, event): self.draws = []; setattr(self, event, self.check)
    def before_batch(self): self.draws.append(random.random())
    def check(self):
        if len(self.draws) > 5 and len(self.x) > 8: raise OOM
    def after_batch(self): assert len(self.pred) == len(self.y)

@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'before_backward'])
def test_no_callback_sees_that_memory_ran_out(event):
    "Each batch begins and ends once, with draws of its own; a warning says so"
    def run(*cbs): return seeded(vision(MixUp(), *cbs, n=128))
    with pytest.warns(UserWarning, match='out of memory in training: from now on, micro-batches have 8 samples'):
        split = run(auto(), sees := RunsOut(event))
    assert len({*sees.draws}) == 8
    whole = run()
    assert_same(weights(split), weights(whole), FLOAT32)
    assert_same(losses(split), losses(whole), FLOAT32)

def test_the_failed_pass_lets_go_of_its_tensors():
    made,alive,learn = [],[],limited(9, 'auto')
    def hold(m, args):
        alive.append(sum(o() is not None for o in made))
        h = args[0].repeat(1, 3)
        made.append(weakref.ref(h))
        return args[0]+0*h[:,:5]
    learn.model.register_forward_pre_hook(hold)
    fit(learn, 1)
    assert learn.gradient_accumulation.micro_bs == 8 and len(alive) > 18 and max(alive) == 0

def raises(e):
    def f(*args, **kwargs): raise e
    return f

@pytest.mark.parametrize('cb', [auto, partial(GradientCache, 'auto')])
def test_errors_that_stay_what_they_are(cb):
    "What led to that of a single sample; any other; one in the step; one in validation"
    unfit,learn = RuntimeError('cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. Non-contiguous?'),make_learner(32, cbs=cb())
    learn.model.forward = raises(unfit)
    with pytest.raises(RuntimeError, match='out of memory with a single sample: use smaller inputs') as e: fit(learn, 1)
    assert e.value.__cause__ is unfit and not is_out_of_memory(e.value)
    assert_same(weights(learn), weights(model()))
    with pytest.raises(RuntimeError, match='Non-contiguous'), quiet(learn): learn.validate()
    learn.model.forward = raises(KeyError('no such key'))
    with pytest.raises(KeyError, match='no such key'): fit(learn, 1)
    learn = make_learner(32, cbs=cb())
    learn.create_opt()
    learn.opt.step = raises(OOM)
    with pytest.raises(torch.OutOfMemoryError, match='2.00 GiB'): fit(learn, 1)

@pytest.mark.parametrize('cb', [GradientAccumulation(32), GradientAccumulationSchedule(16, 32)])
def test_without_auto_a_warning_names_it(cb):
    with pytest.warns(UserWarning, match="out of memory with batches of 16 samples: .* micro_batch_size='auto' or"):
        with pytest.raises(torch.OutOfMemoryError): fit(make_learner(16, loss_func=raises(OOM), cbs=cb), 1)

def loaders(inputs): return DataLoaders(*[DataLoader(list(zip(inputs, data(32)[1])), bs=16)]*2)

class Summed(nn.Module):
    "Gives one number in validation, and then has no memory for more than 8 samples"
    def __init__(self): super().__init__(); self.m,self.calls = nn.Linear(5, 1).double(),0
    def forward(self, x):
        if not isinstance(x, Tensor): x = tensor([[float(len(o))]*5 for o in x]).double()
        if self.training: return self.m(x)
        self.calls += 1
        assert self.calls < 20, 'it does not end'
        if len(x) > 8: raise OOM
        return self.m(x).sum()

@pytest.mark.filterwarnings('ignore:validation batches are not split')
@pytest.mark.parametrize('inputs', [data(32)[0], ['a', 'abc']*16])
def test_validation_that_cannot_be_split_ends(inputs):
    "The outputs cannot be joined, or no tensor shows the samples: the error of the whole batch"
    learn = Learner(loaders(inputs), Summed(), lambda pred, targ: (pred-targ).pow(2).mean().float(), cbs=auto())
    with pytest.raises(torch.OutOfMemoryError): fit(learn, 1)
    assert learn.model.calls > 0

# Words

@pytest.mark.parametrize('message', [
    *[o+' out of memory' for o in ('CUDA', 'cuda runtime error (2) :', 'MPS backend', 'Triton Error [CUDA]:')],
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes", 'std::bad_alloc',
    'DefaultCPUAllocator: not enough memory: you tried to allocate 12 bytes', 'cuFFT error: CUFFT_ALLOC_FAILED',
    'cuDNN error: CUDNN_STATUS_NOT_SUPPORTED', 'Unable to find a valid cuDNN algorithm to run convolution',
    'FIND was unable to find an engine to execute this computation', 'could not execute a primitive',
    'could not create a primitive', 'could not create a memory object'])
def test_messages(message):
    e = ValueError('of a callback')
    e.__cause__ = RuntimeError(message)
    assert is_out_of_memory(e) and is_out_of_memory(e.__cause__) and not is_out_of_memory(ValueError(message))

@pytest.mark.parametrize('message', ['CUDA error: device-side assert triggered', 'memory format', 'out of memory with a'])
def test_messages_of_other_errors(message): assert not is_out_of_memory(RuntimeError(message))

@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='RLIMIT_AS')
def test_the_allocator_itself_fails():
    "512 samples take some 330 MB: with 50 MB to spare, a half of them or less fits, and the fit is the same"
    import resource
    def run(*cbs):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(100, 2000), *[nn.Tanh() for _ in range(80)], nn.Linear(2000, 1))
        dls = DataLoaders(*[DataLoader(list(zip(torch.randn(512, 100), torch.randn(512, 1))), bs=512)]*2)
        used = int(Path('/proc/self/statm').read_text().split()[0])*resource.getpagesize()
        if cbs: resource.setrlimit(resource.RLIMIT_AS, (used+50*2**20,)*2)
        learn = fit(Learner(dls, m, MSELossFlat(), opt_func=SGD, cbs=cbs), 1, 1e-3)
        torch.save([cb.micro_bs for cb in cbs]+[weights(learn)], f'{len(cbs)}.pt')
    assert forked(run, auto()) == 0
    run()
    (n,split),(whole,) = torch.load('1.pt'),torch.load('0.pt')
    assert 8 <= n <= 256
    assert_same(split, whole, FLOAT32)

# What a pass leaves behind

def smooth(self): self.learn.yb = (self.y*.9,)

@pytest.mark.parametrize('cb', [auto, ActivationCheckpointing, partial(GradientCache, 'auto')])
def test_targets_that_a_callback_replaces_are_put_back(cb):
    "Once the model has run"
    def run(*cbs): return fit(make_learner(16, n=48, m=chain(), cbs=[*cbs]), 1)
    plain = run(after := Callback(after_pred=smooth))
    assert_other(plain, run().model)
    strikes = Fault(torch.OutOfMemoryError, 'after_loss', 2, 5)
    assert_same(weights(run(after, strikes, cb())), weights(plain), ROUNDING)
    assert strikes.count > 3

def chain():
    "Blocks of two layers each"
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(5, 1)).double()

class OfTexts(nn.Module):
    "Takes a list of strings, of which it can hold `most` in training"
    def __init__(self, most): super().__init__(); torch.manual_seed(0); self.layer,self.most = nn.Linear(1, 1).double(),most
    def forward(self, texts):
        if self.training and len(texts) > self.most: raise OOM
        return self.layer(torch.tensor([[len(o)] for o in texts], dtype=torch.float64))

@pytest.mark.parametrize('cb', [auto, partial(GradientCache, 'auto')])
def test_inputs_without_tensors(cb):
    def run(most, *cbs): return fit(Learner(loaders(['a','abc']*16), OfTexts(most), mse, opt_func=SGD, cbs=cbs), 1, .01)
    if cb is auto: assert_same(weights(run(5, cb())), weights(run(16)), ROUNDING)
    with pytest.raises(RuntimeError, match='single sample|cannot split'): run(0, cb())

@pytest.mark.parametrize('is_made', [True, False])
def test_what_no_optimizer_takes_is_not_kept_free(is_made, monkeypatch):
    "Room for the state of Adam, which SGD has not: a batch that fits without it is not given up"
    m,room = chain(),[1]
    def fail(*args):
        if room: raise OOM
    if is_made:
        monkeypatch.setattr('fastxtend_accum.memory.retry.reserve_for_step', lambda opt: room)
        m.register_forward_pre_hook(fail)
    else: monkeypatch.setattr(torch, 'empty_like', fail)
    learn = fit(make_learner(16, n=32, m=m, cbs=(cb := ActivationCheckpointing())), 1)
    assert cb.level == cb.levels[-1]*is_made
    assert_same(weights(learn), weights(fit(make_learner(16, n=32, m=chain()), 1)))

def test_what_a_partial_holds_is_put_back():
    seen,counts = [1],dict(n=1)
    snapshot = Snapshot(partial(noop, seen, counts=counts))
    seen.append(2)
    counts['n'] = 2
    snapshot.put_back()
    assert (seen, counts) == ([1], dict(n=1))
