"Losses over the whole batch, in pieces: against the same Learner without the callback"
import itertools, os, subprocess, sys, weakref
from contextlib import nullcontext
import pytest
from fastai.callback.mixup import MixUp
from hypothesis import given, strategies as st

from common import *
from fastxtend_accum.cache import GradientCache

from test_life import EVENTS, Fault

FLOAT32 = 1e-5

# Losses that compare samples

def info_nce(pred, *targ):
    "Each row of the one output is to find its partner among the rows of the other; targets are indices into the batch"
    a,b = (F.normalize(o, dim=1) for o in pred)
    return F.cross_entropy(a@b.T/.1, torch.arange(len(a))).float()

class Temperature(nn.Module):
    "CLIP's loss: both directions, with a temperature that only the loss uses"
    def __init__(self): super().__init__(); self.logit_scale = nn.Parameter(torch.tensor(1., dtype=torch.float64))
    def forward(self, pred, *targ):
        a,b = (F.normalize(o, dim=1) for o in pred)
        logits = self.logit_scale.exp()*a@b.T
        labels = torch.arange(len(a))
        return ((F.cross_entropy(logits, labels)+F.cross_entropy(logits.T, labels))/2).float()

def triplet(pred, *targ):
    "The hardest positive and negative in the batch, by the sign of the target"
    z,label = pred[0],targ[0][:,0] > 0
    d = torch.cdist(z, z)
    same = label[:,None] == label
    return F.relu((d*same).max(1).values - d.masked_fill(same, 1e9).min(1).values + 1).mean().float()

def batch_dice(pred, *targ):
    "One overlap over the whole batch"
    p,t = pred[0].sigmoid(),(targ[0] > 0).double()
    return (1-(2*(p*t).sum()+1)/((p+t).sum()+1)).float()

losses_over_the_batch = dict(info_nce=lambda: info_nce, temperature=Temperature, triplet=lambda: triplet, dice=lambda: batch_dice)

class TwoOutputs(nn.Module):
    "Two encoders of one input"
    def __init__(self, dropout=0., norm=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        def encoder(): return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8) if norm else nn.LayerNorm(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4))
        self.a,self.b = encoder().double(),encoder().double()
    def forward(self, x): return self.a(x),self.b(x)

def all_params(learn): return torch.cat([p.detach().flatten() for pg in learn.opt.param_lists for p in pg])

def fit_over_batch(cbs=None, loss='info_nce', n=100, bs=32, opt_func=SGD, m=None, n_epoch=2, lr=.05, drop_last=False, fit=fit, **kwargs):
    loss_func,m = losses_over_the_batch[loss](),TwoOutputs() if m is None else m
    extra = list(loss_func.parameters()) if isinstance(loss_func, nn.Module) else []
    learn = make_learner(bs, n=n, m=m, loss_func=loss_func, opt_func=opt_func, cbs=cbs, drop_last=drop_last,
                         splitter=lambda m: [list(m.parameters())+extra], **kwargs)
    return fit(learn, n_epoch, lr, method='fit_one_cycle')

@pytest.mark.thin(7)
@pytest.mark.parametrize('opt_func', [SGD, Adam, partial(OptimWrapper, opt=torch.optim.AdamW)])
@pytest.mark.parametrize('loss', losses_over_the_batch)
@pytest.mark.parametrize('micro', [1, 8, 10, 32, 100])
def test_equals_the_whole_batch(loss, micro, opt_func):
    "Sizes that divide the batch, do not, and exceed it; a ragged last batch; weights, also those in the loss, and all that is logged"
    if opt_func is not SGD and micro not in (8, 10): return
    lr = .05 if opt_func is SGD else .001  # Adam's steps are as large for gradients that are but rounding
    big,small = (fit_over_batch(cbs, loss, opt_func=opt_func, lr=lr) for cbs in (None, GradientCache(micro)))
    assert (all_params(big)-all_params(fit_over_batch(None, loss, opt_func=opt_func, n_epoch=0))).abs().max() > 1e-3
    assert_same(all_params(small), all_params(big), ROUNDING if opt_func is SGD else 1e-9)  # see above
    for o in 'lrs','iters': assert_same(getattr(small.recorder, o), getattr(big.recorder, o))
    assert_same(losses(small), losses(big), 1e-7)
    assert_same(floats(small.recorder.values), floats(big.recorder.values), 1e-7)
    assert len(losses(small)) == 8 and small.gradient_cache.micro_bs == micro

def test_accumulation_is_another_question():
    "The check above can fail"
    big,small = fit_over_batch(),fit_over_batch(GradientAccumulation(32, micro_batch_size=8))
    assert (all_params(big)-all_params(small)).abs().max() > 1e-3

@draws
@given(n=st.integers(2, 40), bs=st.integers(2, 20), micro=st.integers(1, 24), loss=st.sampled_from(sorted(losses_over_the_batch)), drop_last=st.booleans())
def test_any_pieces(n, bs, micro, loss, drop_last):
    if drop_last and n < bs: return
    args = dict(loss=loss, n=n, bs=bs, drop_last=drop_last, n_epoch=1)
    assert_same(all_params(fit_over_batch(GradientCache(micro), **args)), all_params(fit_over_batch(**args)), ROUNDING)

@pytest.mark.parametrize('cbs', [lambda: GradientClip(.01), lambda: MixUp(), lambda: ReduceLROnPlateau(), lambda: Recorder(train_metrics=True)])
def test_other_callbacks_do_not_notice(cbs):
    def run(*ours):
        learn = make_learner(32, m=model().float(), loss_func=MSELossFlat(), cbs=[cbs(), *ours], metrics=mae)
        torch.manual_seed(1); random.seed(1); np.random.seed(1)
        return fit(learn)
    big,small = run(),run(GradientCache(8))
    assert_same(weights(small), weights(big), 1e-6)  # float32
    assert_same(floats(small.recorder.values), floats(big.recorder.values), 1e-6)

def mae(pred, targ): return (pred-targ).abs().mean()

def test_windows_of_several_loader_batches():
    "GradientAccumulation adds the losses of whole loader batches up; each is computed in pieces"
    big,small = (fit_over_batch([GradientAccumulation(64), *cbs], bs=16) for cbs in ([], [GradientCache(4)]))
    assert_same(all_params(small), all_params(big), ROUNDING)
    assert small.recorder.accum_bs == [64,36]*2

# Structures

class Nested(nn.Module):
    "Dicts in, dicts and tuples out, and a keyword argument inside"
    def __init__(self): super().__init__(); self.m = TwoOutputs(); self.seen = []
    def forward(self, b): return self.inner(b['x'], mask=b['mask'], kind='text')
    def inner(self, x, mask=None, kind=None):
        a,b = self.m(x*mask)
        return {'embeddings':(a, b), 'nothing':None}

def test_nested_inputs_and_outputs():
    x,y = data(96)
    ds = [({'x':x[i], 'mask':torch.ones(5).double()}, y[i]) for i in range(96)]
    def run(cbs=None): return fit(Learner(DataLoaders(DataLoader(ds, bs=32), DataLoader(ds[:8], bs=8)), Nested(), lambda p,t: info_nce(p['embeddings']), opt_func=SGD, cbs=cbs), 2)
    assert_same(weights(run(GradientCache(8))), weights(run()), ROUNDING)

class Body(nn.Module):
    "A body with LayerNorm, and a head with BatchNorm"
    def __init__(self): super().__init__(); torch.manual_seed(0); self.body,self.head = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8)).double(),nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
    def forward(self, x):
        h = self.body(x)
        return self.head(h),self.head(self.body(-x))  # the body runs twice

@pytest.mark.parametrize('part, exact', [(lambda m: m.body, True), (None, False)])
def test_the_body_in_pieces_and_the_head_on_the_whole_batch(part, exact):
    big,small = (fit_over_batch(cbs, m=Body(), n=96) for cbs in (None, GradientCache(8, part=part)))
    assert 'forward' not in vars(small.model) and 'forward' not in vars(small.model.body)
    if not exact: assert (all_params(small)-all_params(big)).abs().max() > 1e-4
    else:
        assert_same(all_params(small), all_params(big), ROUNDING)
        for a,b in zip(small.model.buffers(), big.model.buffers(), strict=True): assert_same(a, b, ROUNDING)

# As KeremTurgutlu's callbacks write them: targets that index into the batch, and two encoders

class SimCLR(Callback):
    order,run_valid = 9,False
    def before_batch(self):
        x = self.x
        self.learn.xb = (torch.cat([x*1.1, x*.9]),)
        self.learn.yb = (torch.arange(2*len(x)).roll(len(x)),)

def nt_xent(pred, targ):
    z = F.normalize(pred, dim=1)
    sim = (z@z.T/.1).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(sim, targ).float()

def test_simclr():
    def run(*cbs):
        m = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        m.load_state_dict({k:v for k,v in seeded_state(m).items()})
        learn = make_learner(32, n=96, m=m, loss_func=nt_xent, cbs=[SimCLR(), Callback(before_validate=lambda self: stop(CancelValidException())), *cbs])
        return fit(learn, 2)
    big,small = run(),run(GradientCache(16))
    assert_same(weights(small), weights(big), ROUNDING)
    assert_same(losses(small), losses(big), 1e-7)

def seeded_state(m):
    g = torch.Generator().manual_seed(0)
    return {k:torch.randn(v.shape, generator=g, dtype=v.dtype)*.3 for k,v in m.state_dict().items()}

class CLIP(nn.Module):
    "Two encoders with an input each; the loss reads `model.logit_scale`"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image,self.text,self.logit_scale = nn.Linear(5, 4).double(),nn.Linear(1, 4).double(),nn.Parameter(torch.tensor(1.).double())
    def forward(self, image, text): return F.normalize(self.image(image), dim=1),F.normalize(self.text(text), dim=1)

class CLIPTrainer(Callback):
    run_valid = False
    def before_fit(self): self.learn.loss_func = self.loss
    def loss(self, pred, *targ):
        scores = self.model.logit_scale.exp()*pred[0]@pred[1].T
        return F.cross_entropy(scores, torch.arange(len(scores))).float()
    def after_step(self): self.model.logit_scale.data.clamp_(0, 1.2)

def test_clip():
    x,y = data(96)
    def run(*cbs):
        ds = list(zip(x, y, y))
        dls = DataLoaders(DataLoader(ds, bs=32), DataLoader(ds[:8], bs=8))
        dls.n_inp = 2
        return fit(Learner(dls, CLIP(), mse, opt_func=SGD, cbs=[CLIPTrainer(), *cbs]), 2)
    big,small = run(),run(GradientCache(8))
    assert big.model.logit_scale != 1 and (weights(big)-weights(CLIP())).abs().max() > 1e-3
    assert_same(weights(small), weights(big), ROUNDING)

# Random masks, half precision, running statistics: against the same pieces without recomputation

def pieces_without_recomputation(m, sizes):
    "The model's own forward pass on each piece, all activations kept"
    forward = m.forward
    def pieces(x): return tuple(map(torch.cat, zip(*(forward(o) for o in x.split(sizes)))))
    return pieces

@pytest.mark.parametrize('amp', [None, 'bf16', 'fp16'])
@pytest.mark.parametrize('norm', [False, True])
def test_bit_for_bit_with_dropout_and_autocast(amp, norm):
    def run(cached):
        m = TwoOutputs(.5, norm).float()
        if not cached:
            forward = pieces_without_recomputation(m, [8]*4)
            plain = m.forward
            m.forward = lambda x: forward(x) if m.training else plain(x)
        cbs = [CpuMixedPrecision(amp, init_scale=2.**8)] if amp else []
        learn = make_learner(32, n=96, m=m, loss_func=lambda p,*t: info_nce(p), cbs=cbs+[GradientCache(8)]*cached)
        torch.manual_seed(3)
        return fit(learn, 2, .05),torch.get_rng_state()
    (a,rng_a),(b,rng_b) = run(True),run(False)
    assert_same(weights(a), weights(b))
    assert_same(losses(a), losses(b))
    assert_same(rng_a, rng_b)
    for o,p in zip(a.model.buffers(), b.model.buffers(), strict=True): assert_same(o, p)
    assert len(list(a.model.buffers())) == (6 if norm else 0)

# Buffers that a forward pass reads and changes: as with the same pieces whose activations are all kept

class Counter(nn.Module):
    "Counts its calls, and multiplies by a number that falls with them"
    def __init__(self): super().__init__(); self.register_buffer('calls', torch.zeros((), dtype=torch.float64))
    def forward(self, x):
        if self.training: self.calls += 1
        return x/(1+.1*self.calls)
class RunningScale(nn.Module):
    "Puts a new buffer in place of the last one"
    def __init__(self): super().__init__(); self.register_buffer('scale', torch.ones(8, dtype=torch.float64))
    def forward(self, x):
        if self.training: self.scale = .9*self.scale + .1*x.detach().abs().mean(0)
        return x/self.scale
def spectral(): return nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8).double())
def old_spectral(): return nn.utils.spectral_norm(nn.Linear(8, 8).double())

class Kept(nn.Module):
    "Runs on pieces of 8 in training, and keeps their activations"
    def __init__(self, m): super().__init__(); self.m = m
    def forward(self, x): return torch.cat([self.m(o) for o in x.split(8 if self.training else len(x))])

@pytest.mark.parametrize('make', [Counter, RunningScale, spectral, old_spectral])
def test_a_buffer_that_the_forward_pass_reads_and_changes(make, monkeypatch):
    def loss(pred, targ): return ((pred-pred.mean(0)-targ)**2).mean().float()
    def run(wrap, *cbs):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(5, 8), make(), nn.Tanh(), nn.Linear(8, 1)).double()
        before = [o.clone() for o in m.buffers()]
        learn = fit(make_learner(32, m=wrap(m), loss_func=loss, cbs=cbs), 2)
        assert all((a-b).abs().max() > 1e-3 for a,b in zip(before, m.buffers(), strict=True)) and len(before) > 0
        return weights(learn),torch.cat([o.flatten() for o in m.buffers()])
    cached,kept = run(noop, GradientCache(8)),run(Kept)
    for a,b in zip(cached, kept, strict=True): assert_same(a, b)
    monkeypatch.setattr('fastxtend_accum.checkpointing.run_again', lambda *args: nullcontext())
    assert (run(noop, GradientCache(8))[0]-kept[0]).abs().max() > 1e-6  # it is needed

def test_a_compiled_model():
    big,small = (fit_over_batch(cbs, m=torch.compile(TwoOutputs(), backend='aot_eager'), n_epoch=1) for cbs in (None, GradientCache(8)))
    assert_same(all_params(small), all_params(big), ROUNDING)

# Memory

def correlations(pred, *targ):
    "Across the batch, and small: the outputs' correlation matrix should be the identity (Barlow Twins)"
    z = (pred-pred.mean(0))/(pred.std(0)+1e-3)
    return ((z.T@z/len(z)-torch.eye(z.shape[1]))**2).sum()

def deep():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(20)], nn.Flatten(), nn.LazyLinear(8))

def test_live_bytes_are_those_of_a_piece():
    "256 samples: as many as micro-batches of the same size take, within 5%"
    from benchmarks.counts import LiveBytes
    x = torch.randn(256, 16, 64)
    def peak(f):
        m = deep()
        m(x[:1])
        with LiveBytes() as live: f(m)
        return live.peak
    def accumulate(m, n):
        for o in x.split(n): correlations(m(o)).backward()
    whole = peak(lambda m: correlations(m(x)).backward())
    for n in 16,32,64:
        cached,accumulated = peak(lambda m: correlations(in_pieces(m.forward(m), n, 256)(x)).backward()),peak(lambda m: accumulate(m, n))
        assert abs(cached/accumulated-1) < .05 and cached < (.15 if n == 16 else .5)*whole, (cached, accumulated, whole)

SCRIPT = '''
import re, sys, warnings
warnings.simplefilter('ignore')
sys.path.insert(0, {tests!r})
from common import *
from test_gradient_cache import *
torch.set_num_threads(1)
def build(bs, cbs, n=512):
    torch.manual_seed(0)
    ds,m = list(zip(torch.randn(n, 64, 64), torch.randn(n, 1))),deep()
    m(ds[0][0][None])
    return Learner(DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds[:2], bs=2)), m, correlations, opt_func=SGD, cbs=cbs)
def megabytes(name): return int(re.search(name+r':\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1])/1024
def run(*cbs):
    fit(build(8, GradientCache(4), 8), 1)
    Path('/proc/self/clear_refs').write_text('5')  # the peak so far is forgotten
    before = megabytes('VmRSS')
    fit(build(512, cbs), 1, 1e-3)
    print(megabytes('VmHWM')-before, flush=True)
for cbs in [], [GradientCache(16)], [GradientAccumulation(512, micro_batch_size=16)]: assert forked(run, *cbs) == 0
'''

@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='/proc')
def test_peak_memory():
    "512 samples in pieces of 16: 8 MB more than accumulating pieces of 16, and 3 for what generators and attributes hold before each of the 32 pieces; a fraction of the whole batch"
    env = dict(os.environ, MALLOC_MMAP_THRESHOLD_='65536', MALLOC_ARENA_MAX='1', OMP_NUM_THREADS='1')
    out = subprocess.run([sys.executable, '-c', SCRIPT.format(tests=str(Path(__file__).parent))], capture_output=True, text=True, timeout=SECONDS, env=env)
    assert out.returncode == 0, out.stderr[-2000:]
    whole,cached,accumulated = map(float, out.stdout.split())
    assert cached < .2*whole and cached < accumulated + 12  # MB; above, the bytes of tensors are compared

# Nothing is left on the model

@pytest.mark.thin(19)
@pytest.mark.parametrize('order', [-5, 99, math.inf])
@pytest.mark.parametrize('event', EVENTS)
@pytest.mark.parametrize('exc', [KeyboardInterrupt, ZeroDivisionError, CancelBatchException, CancelTrainException, CancelEpochException, CancelFitException,
                                 CancelStepException, CancelBackwardException])
def test_no_fault_leaves_a_changed_model(exc, event, order):
    for nth in 1,2:
        learn = make_learner(32, m=TwoOutputs(), loss_func=info_nce, cbs=GradientCache(8))
        fault = Fault(exc, event, nth, order)
        try: fit(learn, 1, cbs=fault)
        except BaseException: pass
        if event == 'before_batch' and order == math.inf:  # the only place where the forward pass is another one: whoever calls it gets the model
            x = data(32)[0]
            assert_same(learn.model(x)[0], TwoOutputs.forward(learn.model, x)[0], ROUNDING)
        assert not [m for m in learn.model.modules() if 'forward' in vars(m)]

def test_a_failing_forward_pass_leaves_the_model_as_it_was():
    class Fails(TwoOutputs):
        def forward(self, x):
            if self.training and len(x) == 4: raise KeyError('the last piece')
            return super().forward(x)
    learn = make_learner(32, n=100, m=Fails(), loss_func=info_nce, cbs=GradientCache(8))
    with pytest.raises(KeyError): fit(learn, 1)
    assert 'forward' not in vars(learn.model)

def test_a_forward_of_its_own_is_kept():
    "A model whose `forward` was set on the instance, as torch.compile and others do"
    m = TwoOutputs()
    m.forward = own = partial(TwoOutputs.forward, m)
    fit_over_batch(GradientCache(8), m=m)
    assert m.forward is own

@pytest.mark.parametrize('part', [None, lambda m: m.body])
def test_validation_and_prediction_in_pieces(part):
    "Loss and predictions are those of whole batches, of 20 samples in batches of 16"
    seen = []
    class Sees(Body):
        def forward(self, x): seen.append(len(x)); return super().forward(x)
    learn = make_learner(32, n=64, m=Sees(), loss_func=info_nce, cbs=GradientCache(8, part=part))
    fit(learn, 1)
    seen.clear()
    found,preds = [],[]
    for with_it in True,False:
        if not with_it: learn.remove_cb(GradientCache)
        with quiet(learn): found.append(learn.validate()[0]); preds.append(learn.get_preds(act=noop)[0])
    assert seen == ([8,8,4] if part is None else [16,4])*2+[16,4]*2
    assert_same(found[:1], found[1:], 1e-7)
    for a,b in zip(*preds, strict=True): assert_same(a, b, ROUNDING)

# The size that fits

def test_auto(capsys):
    class Limited(TwoOutputs):
        def forward(self, x):
            if self.training and len(x) > 9: raise torch.OutOfMemoryError('CUDA out of memory')
            return super().forward(x)
    a,b = (fit_over_batch(GradientCache(micro), m=Limited(.3, True), n=96, fit=fit_aloud) for micro in ('auto', 8))
    assert a.gradient_cache.micro_bs == 8 and "micro_batch_size='auto': each batch of 32 is split into 4 micro-batches of 8" in capsys.readouterr().out
    assert_same(all_params(a), all_params(b))
    for o,p in zip(a.model.buffers(), b.model.buffers(), strict=True): assert_same(o, p)

def test_auto_in_mixed_precision():
    "Sizes are tried under autocast, as the batches are trained"
    seen = []
    class Limited(TwoOutputs):
        def forward(self, x):
            if self.training:
                seen.append(torch.is_autocast_enabled('cpu'))
                if len(x) > 9: raise torch.OutOfMemoryError('CUDA out of memory')
            return super().forward(x)
    def run(micro): return fit(make_learner(32, m=Limited(.3).float(), loss_func=lambda p,*t: info_nce(p), cbs=[CpuMixedPrecision('bf16'), GradientCache(micro)]), 1)
    a = run('auto')
    assert a.gradient_cache.micro_bs == 8 and all(seen) and not torch.is_autocast_enabled('cpu')
    assert_same(weights(a), weights(run(8)))

# Errors

class Carries(TwoOutputs):
    def reset(self): pass
class Scalar(TwoOutputs):
    def forward(self, x): return super().forward(x)[0].sum()

@pytest.mark.parametrize('make, says', [
    (lambda: GradientCache(0), 'micro_batch_size must be at least 1'), (lambda: GradientCache('all'), "must be a number of samples or 'auto'"),
    (lambda: GradientCache(None), 'not None'), (lambda: GradientCache(8, part='body'), "part must be a function of the model, not 'body'")])
def test_at_once(make, says):
    with pytest.raises((TypeError, ValueError), match=says): make()

@pytest.mark.parametrize('m, cbs, says', [
    (Carries, [], 'Carries carries its state from batch to batch'),
    (Scalar, [], r'cannot join outputs of shape \(\) from a micro-batch of 8 samples')])
def test_what_is_refused(m, cbs, says):
    with pytest.raises(ValueError, match=says): fit(make_learner(32, m=m(), loss_func=info_nce, cbs=[GradientCache(8), *cbs]), 1)

def test_an_input_without_a_batch_dimension():
    x,y = data(32)
    def collate(samples): return (torch.stack([a for a,_ in samples]), torch.ones(1, 5), torch.stack([b for _,b in samples]))
    dls = DataLoaders(*[torch.utils.data.DataLoader(list(zip(x, y)), batch_size=16, collate_fn=collate)]*2)
    dls.n_inp = 2
    class Two(TwoOutputs):
        def forward(self, x, w): return super().forward(x*w)
    with pytest.raises(ValueError, match=r'cannot split a tensor of shape \(1, 5\) in a batch of 16 samples'):
        fit(Learner(dls, Two(), info_nce, opt_func=SGD, cbs=GradientCache(8)), 1)

# A loss that reads what the model keeps: GradientCache has that of a piece only

elsewhere = {}
class Keeps(nn.Module):
    "Keeps something of its hidden values, or of its samples, in one of many places"
    def __init__(self, where):
        super().__init__()
        torch.manual_seed(0)
        self.body,self.head,self.aux = nn.Sequential(nn.Linear(5, 8), nn.Tanh()).double(),nn.Linear(8, 1).double(),nn.Linear(5, 2).double()
        self.where,self.kept,self.n,self.log_scale = where,[],0,nn.Parameter(torch.zeros(()).double())
        self.register_buffer('level', torch.zeros(()).double())
    def forward(self, x):
        h,out = self.body(x),1.
        term = h.pow(2).mean()
        match self.where:
            case 'attribute' | 'unread': self.term = term
            case 'hidden values': self.term = h
            case 'without its graph': self.term = term.detach()
            case 'not on the way to the output': self.term = self.aux(x).pow(2).mean()
            case 'submodule': self.body[0].term = term
            case 'list': self.kept.append(term)
            case 'elsewhere': elsewhere['term'] = term
            case 'buffer': self.level.copy_(term.detach())
            case 'counter': self.n += 1
            case 'scale': self.term = out = self.log_scale.exp()
        return self.head(h)*out

def loss_of(m, hook=None):
    def f(pred, targ):
        loss = F.mse_loss(pred, targ)
        match m.where:
            case 'attribute' | 'without its graph' | 'not on the way to the output' | 'scale': loss = loss*(1+m.term)
            case 'hidden values': loss = loss+m.term.pow(2).mean()
            case 'submodule': loss = loss+m.body[0].term
            case 'list': loss = loss+sum(m.kept); m.kept.clear()
            case 'elsewhere': loss = loss+elsewhere['term']
            case 'buffer': loss = loss*(1+m.level)
            case 'counter': loss = loss*(1+m.n)
            case 'hook': loss = loss+hook.stored.pow(2).mean()
        return loss.float()
    return f

class ReadsHook(Callback):
    "Adds a term to the loss, as a callback for distillation does"
    def before_fit(self): self.hook = hook_output(self.model.body, detach=False)
    def after_loss(self): self.learn.loss_grad = self.loss_grad+self.hook.stored.pow(2).mean().float()

def keeping(where, bs=32, cbs=()):
    m = Keeps(where)
    hook = hook_output(m.body, detach=False) if where == 'hook' else None
    return make_learner(bs, n=64, m=m, loss_func=loss_of(m, hook), cbs=[*cbs, *([ReadsHook()] if where == 'callback' else [])])

@pytest.mark.parametrize('where', ['attribute', 'hidden values', 'without its graph', 'not on the way to the output', 'submodule', 'list', 'elsewhere', 'buffer',
                                   'counter', 'hook', 'callback'])
def test_a_loss_that_reads_what_the_model_keeps(where):
    "An error before the first step"
    learn = keeping(where, cbs=[GradientCache(8)])
    before = weights(learn)
    with pytest.raises(ValueError, match='the loss reads what the model keeps'): fit(learn, 1)
    assert_same(weights(learn), before)
    fit(keeping(where, cbs=[GradientCache(32)]), 1)

@pytest.mark.parametrize('where', ['unread', 'scale', 'nowhere'])
def test_a_loss_that_reads_what_all_samples_share(where):
    big,small = fit(keeping(where), 2),fit(keeping(where, cbs=[GradientCache(8)]), 2)
    assert_same(weights(small), weights(big), ROUNDING)
    assert (weights(big)-weights(Keeps(where))).abs().max() > 1e-3

@pytest.mark.parametrize('model', ['dropout', 'norm', 'stats'])
def test_looking_for_it_leaves_no_trace(model, monkeypatch):
    "Random numbers, buffers, what callbacks and the loss count"
    class Counts:
        def __init__(self): self.calls = 0
        def __call__(self, pred, targ): self.calls += 1; return (F.mse_loss(pred, targ)*(1+torch.rand(()))).float()
    def run():
        torch.manual_seed(0)
        body = [nn.Linear(5, 8), dict(dropout=nn.Dropout(.3), norm=nn.BatchNorm1d(8), stats=nn.Tanh())[model], nn.Linear(8, 1)]
        loss_func,cbs = Counts(),[ActivationStats()]*(model == 'stats')
        learn = make_learner(32, m=nn.Sequential(*body).double(), loss_func=loss_func, cbs=[GradientCache(8), *cbs])
        fit(learn, 2)
        return weights(learn),losses(learn),[o.tolist() for o in learn.model.buffers()],loss_func.calls,torch.get_rng_state().tolist(),len(cbs and cbs[0].stats)
    looked = run()
    monkeypatch.setattr('fastxtend_accum.cache.Kept.is_read', lambda self: False)
    plain = run()
    assert_same(looked[0], plain[0])
    assert looked[1:] == plain[1:]
