"GradientCache: a loss over the whole batch, while the model sees micro-batches"
import pytest
from hypothesis import given, strategies as st

from common import *
from benchmarks.counts import LiveBytes
from test_checkpointing import Moves, states

def info_nce(pred, *targ, scale=10.):
    "Each row of one output is to find its partner in the other"
    a,b = (F.normalize(o, dim=1) for o in pred)
    return F.cross_entropy(scale*a@b.T, torch.arange(len(a))).float()

class Temperature(nn.Module):
    "CLIP's loss: both directions, with a temperature that only the loss uses"
    def __init__(self): super().__init__(); self.logit_scale = nn.Parameter(torch.tensor(1., dtype=torch.float64))
    def forward(self, pred, *targ): return sum(info_nce(o, scale=self.logit_scale.exp()) for o in (pred, pred[::-1]))/2

def triplet(pred, *targ):
    "The hardest in the batch, by the sign of the target"
    z,label = pred[0],targ[0][:,0] > 0
    d,same = torch.cdist(z, z),label[:,None] == label
    return F.relu((d*same).max(1).values - d.masked_fill(same, 1e9).min(1).values + 1).mean().float()

def batch_dice(pred, *targ):
    p,t = pred[0].sigmoid(),(targ[0] > 0).double()
    return (1-(2*(p*t).sum()+1)/((p+t).sum()+1)).float()

batch_losses = dict(info_nce=lambda: info_nce, clip=Temperature, triplet=lambda: triplet, dice=lambda: batch_dice)

class TwoOutputs(nn.Module):
    def __init__(self, dropout=0., norm=False):
        super().__init__()
        torch.manual_seed(0)
        def encoder():
            middle = nn.BatchNorm1d(8) if norm else nn.LayerNorm(8)
            return nn.Sequential(nn.Linear(5, 8), middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4))
        self.a,self.b = encoder().double(),encoder().double()
    def forward(self, x): return self.a(x),self.b(x)

def all_params(learn): return torch.cat([p.detach().flatten() for pg in learn.opt.param_lists for p in pg])
def assert_moved_from(learn, m): assert (weights(learn)-weights(m)).abs().max() > 1e-3
def buffers(learn): return torch.cat([o.double().flatten() for o in learn.model.buffers()])

def fit_over_batch(cbs=None, loss='info_nce', n=100, bs=32, opt_func=SGD, m=None, n_epoch=2, lr=.05, **kwargs):
    loss_func,m = batch_losses[loss](),TwoOutputs() if m is None else m
    extra = list(loss_func.parameters()) if isinstance(loss_func, nn.Module) else []
    learn = make_learner(bs, n=n, m=m, loss_func=loss_func, opt_func=opt_func, cbs=cbs,
                         splitter=lambda m: [list(m.parameters())+extra], **kwargs)
    return fit(learn, n_epoch, lr, method='fit_one_cycle')

@pytest.mark.thin(3)
@pytest.mark.parametrize('micro,opt_func', [*[(o, SGD) for o in (1, 8, 10, 32, 100)], (10, Adam)])
@pytest.mark.parametrize('loss', batch_losses)
def test_equals_the_whole_batch(loss, micro, opt_func):
    "Weights of model and loss, and all that is logged"
    lr = .05 if opt_func is SGD else .001  # Adam's steps are as large for gradients that are but rounding
    big,small = (fit_over_batch(cbs, loss, opt_func=opt_func, lr=lr) for cbs in (None, GradientCache(micro)))
    assert_moved_from(big, TwoOutputs())
    assert_same(all_params(small), all_params(big), ROUNDING if opt_func is SGD else 1e-9)  # see above
    for o in 'lrs','iters': assert_same(getattr(small.recorder, o), getattr(big.recorder, o))
    assert_same(losses(small), losses(big), 1e-7)
    assert_same(floats(small.recorder.values), floats(big.recorder.values), 1e-7)
    assert len(losses(small)) == 8 and small.gradient_cache.micro_bs == micro

@draws
@given(n=st.integers(2, 40), bs=st.integers(2, 20), micro=st.integers(1, 24), loss=st.sampled_from([*batch_losses]))
def test_any_sizes(n, bs, micro, loss):
    "With clipped gradients"
    def run(*cbs): return all_params(fit_over_batch([GradientClip(.1), *cbs], loss, n, bs, n_epoch=1))
    assert_same(run(GradientCache(micro)), run(), ROUNDING)

def test_windows_of_several_loader_batches():
    "The mean of their losses; the last window has 36 of 64 samples"
    cbs = [GradientAccumulation(64), GradientCache(4)]
    small,m,(x,_) = fit(make_learner(16, n=100, m=TwoOutputs(), loss_func=info_nce, cbs=cbs), 1),TwoOutputs(),data(100)
    opt = sgd(m.parameters())
    for window in [16]*4,[16, 16, 4]:
        opt.param_groups[0]['lr'] = .1/sum(window)  # a loss of float32 would be rounded
        opt.zero_grad()
        for n in window:
            (info_nce(m(x[:n]))*n).backward()
            x = x[n:]
        opt.step()
    assert_same(weights(small), weights(m), ROUNDING)
    assert small.recorder.accum_bs == [64, 36]
    assert_moved_from(small, TwoOutputs())

# Structures

class CLIP(nn.Module):
    "Two encoders; the loss reads `model.logit_scale`, which a callback clamps"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image,self.text = nn.Linear(5, 4).double(),nn.Linear(1, 4).double()
        self.logit_scale,self.sizes = nn.Parameter(torch.tensor(1.).double()),set()
    def forward(self, b):
        self.sizes.add(len(b['image']))
        return {'pairs':(self.image(b['image']), self.text(torch.tensor(b['texts']).double())), 'nothing':None}
    def loss(self, pred, *targ): return info_nce(pred['pairs'], scale=self.logit_scale.exp())

def test_clip_in_nested_structures():
    x,y = data(96)
    batches = [({'image':x[i:i+32], 'texts':y[i:i+32].tolist()}, y[i:i+32]) for i in (0, 32, 64)]
    dls = DataLoaders(*[torch.utils.data.DataLoader(batches, batch_size=None)]*2)
    for o in dls.loaders: o.bs = 32
    def clamp(self): self.model.logit_scale.data.clamp_(0, 1.2)
    def run(*cbs): return fit(Learner(dls, m := CLIP(), m.loss, opt_func=SGD, cbs=[Callback(after_step=clamp), *cbs]))
    big,small = run(),run(GradientCache(8))
    assert_same(weights(small), weights(big), ROUNDING)
    assert_moved_from(big, CLIP())
    assert_moved_from(run(GradientAccumulation(micro_batch_size=8)), big.model)
    assert big.model.logit_scale != 1 and small.model.sizes == {8}

class Body(nn.Module):
    "A body that sees two views, one after the other or `together`, and a head with BatchNorm"
    def __init__(self, together=False):
        super().__init__()
        torch.manual_seed(0)
        self.together,self.body = together,nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8)).double()
        self.head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
    def forward(self, x):
        if self.together: return tuple(map(self.head, self.body(torch.cat([x, -x])).chunk(2)))
        return self.head(self.body(x)),self.head(self.body(-x))

@pytest.mark.parametrize('together,args,same', [(False, dict(part=lambda m: m.body), True), (False, {}, False),
                                                (True, dict(part=lambda m: m.body, rows=2), True)])
def test_only_the_body_is_split(together, args, same):
    big,small = (fit_over_batch(cbs, m=Body(together), n=96) for cbs in (None, GradientCache(8, **args)))
    if not same: assert (all_params(small)-all_params(big)).abs().max() > 1e-4
    else:
        assert_same(all_params(small), all_params(big), ROUNDING)
        assert_same(buffers(small), buffers(big), ROUNDING)
    assert not any('forward' in vars(m) for m in small.model.modules())

def two_views(self):
    "As KeremTurgutlu's SimCLR"
    self.learn.xb,self.learn.yb = ((torch.cat([o*1.1, o*.9]),) for o in (self.x, self.y))

def test_simclr():
    def run(*cbs):
        cbs = [Callback(before_batch=two_views), *cbs]
        return fit(make_learner(32, loss_func=lambda pred, *targ: info_nce(pred.chunk(2)), m=TwoOutputs().a, cbs=cbs))
    assert_same(weights(run(GradientCache(16))), weights(big := run()), ROUNDING)
    assert_moved_from(big, TwoOutputs().a)

# What a forward pass draws and moves

layers = dict(dropout=partial(nn.Dropout, .5), norm=partial(nn.BatchNorm1d, 5), noise=partial(Moves, *states['python']),
              buffer=partial(Moves, *states['new_buffer']),
              spectral=lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5)))

@pytest.mark.thin(5)
@pytest.mark.parametrize('amp', [None, 'bf16', 'fp16'])
@pytest.mark.parametrize('micro', [8, 7])
@pytest.mark.parametrize('kind', layers)
def test_each_micro_batch_counts_once(kind, micro, amp):
    "As where all activations are kept; also of 7+7+6+6+6 samples"
    def run(cached):
        set_seed(0)
        m = nn.Sequential(nn.Linear(5, 5), layers[kind](), nn.Tanh(), nn.Linear(5, 4)).float()
        before,forward = [o.clone() for o in m.buffers()],m.forward
        def kept(x): return torch.cat([forward(o) for o in x.tensor_split(-(-32//micro))]) if m.training else forward(x)
        if not cached: m.forward = kept
        cbs = [GradientCache(micro)]*cached + [CpuMixedPrecision(amp, init_scale=2.**8) for _ in range(bool(amp))]
        learn = make_learner(32, m=m, loss_func=lambda p,*t: info_nce((p, p.roll(1, 0))), cbs=cbs)
        set_seed(3)
        fit(learn, 2, .05)
        assert all((a-b).abs().max() > 1e-3 for a,b in zip(before, m.buffers(), strict=True))
        state = torch.cat([o.double().flatten() for o in m.state_dict().values()])
        return state,torch.tensor(losses(learn)),torch.rand(1),tensor(random.random()),tensor(np.random.rand())
    for a,b in zip(run(True), run(False), strict=True): assert_same(a, b)

def test_a_compiled_model():
    "It keeps its own `forward`"
    m = torch.compile(TwoOutputs(), backend='aot_eager')
    own = vars(m)['forward']
    small,big = fit_over_batch(GradientCache(8), m=m, n_epoch=1),fit_over_batch(n_epoch=1)
    assert_same(all_params(small), all_params(big), ROUNDING)
    assert vars(m)['forward'] is own

# Memory

def correlations(pred, *targ):
    "The outputs' correlation matrix should be the identity (Barlow Twins)"
    z = (pred-pred.mean(0))/(pred.std(0)+1e-3)
    return ((z.T@z/len(z)-torch.eye(z.shape[1]))**2).sum()

def deep():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(20)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16*64, 8))

class Peak(Callback):
    "The most bytes alive in a batch, until its step"
    run_valid = False
    def before_batch(self): self.live = LiveBytes(self.model).__enter__()
    def before_step(self): self.live.__exit__(None, None, None)

def test_live_bytes_are_those_of_a_micro_batch():
    "Within 5% of accumulation in the same micro-batches"
    ds = list(zip(torch.randn(256, 16, 64), torch.randn(256, 1)))
    def peak(*cbs):
        dls = DataLoaders(DataLoader(ds, bs=256), DataLoader(ds[:2], bs=2))
        return fit(Learner(dls, deep(), correlations, opt_func=SGD, cbs=[Peak(), *cbs]), 1, 1e-3).peak.live.peak
    whole = peak()
    for n in 16,32,64:
        cached,accumulated = peak(GradientCache(n)),peak(GradientAccumulation(micro_batch_size=n))
        assert abs(cached/accumulated-1) < .05 and cached < (.15 if n == 16 else .5)*whole

@pytest.mark.parametrize('cbs', [[], [CpuMixedPrecision('bf16')]])
def test_auto(cbs):
    "Sizes are tried under autocast, if training is"
    seen = []
    class Limited(TwoOutputs):
        def forward(self, x):
            seen.extend([torch.is_autocast_enabled('cpu')]*self.training)
            if self.training and len(x) > 9: raise torch.OutOfMemoryError('CUDA out of memory')
            return super().forward(x)
    def run(micro): return fit_over_batch([*cbs, GradientCache(micro)], m=Limited(.3, True).float())
    a,b = run('auto'),run(8)
    assert a.gradient_cache.micro_bs == 8 and {*seen} == {len(cbs) > 0} and not torch.is_autocast_enabled('cpu')
    assert_same(all_params(a), all_params(b))
    assert_same(buffers(a), buffers(b))

@pytest.mark.parametrize('part', [None, lambda m: m.body])
def test_validation_and_prediction(part):
    "The results of whole batches: 20 samples in batches of 16"
    seen,res = [],[]
    class Sees(Body):
        def forward(self, x): seen.append(len(x)); return super().forward(x)
    learn = make_learner(32, m=Sees(), loss_func=info_nce, cbs=GradientCache(8, part=part))
    fit(learn, 1)
    for sizes in ([8,8,4] if part is None else [16,4]),[16,4]:
        seen.clear()
        with quiet(learn): res.append([*learn.get_preds(act=noop)[0], tensor(learn.validate()[0])])
        assert seen == sizes*2
        learn.remove_cb(GradientCache)
    for a,b in zip(*res, strict=True): assert_same(a, b, 1e-7)

# Errors

class Scalar(TwoOutputs):
    def forward(self, x): return super().forward(x)[0].sum()

@pytest.mark.parametrize('m,args,cbs,says', [
    (Scalar, {}, [], r'cannot join outputs of shape \(\) from a micro-batch of 8 samples'),
    (partial(Body, True), dict(part=lambda m: m.body), [], 'several rows of each sample, set rows to their number'),
    (TwoOutputs, dict(part=lambda m: nn.Tanh()), [], 'must return a module of the model that has a forward'),
    (TwoOutputs, {}, [partial(GradientAccumulation, micro_batch_size=8)], 'both split batches: leave one')])
def test_what_is_refused(m, args, cbs, says):
    learn = make_learner(32, m=m(), loss_func=info_nce, cbs=[GradientCache(8, **args), *[o() for o in cbs]])
    before = weights(learn)
    with pytest.raises(ValueError, match=says): fit(learn, 1)
    assert_same(weights(learn), before)

class TokensFirst(nn.Module):
    "Its encoder sees [tokens, samples, 5]"
    def __init__(self, n):
        super().__init__()
        torch.manual_seed(0)
        self.n,self.body = n,nn.TransformerEncoderLayer(5, 1, 8, dropout=0.).double()
    def forward(self, x): return self.body(torch.stack([x.roll(i, 1) for i in range(self.n)])).mean(0),x

@pytest.mark.parametrize('n', [3, 16, 32])
def test_tokens_first(n):
    "The model may be split; a part that sees them is an error, unless it fits whole in validation"
    def learner(*args): return make_learner(32, m=TokensFirst(n), loss_func=info_nce, cbs=GradientCache(*args))
    assert_same(weights(fit(learner(8))), weights(big := fit(learner(32))), ROUNDING)
    assert_moved_from(big, TokensFirst(n))
    for f in (partial(fit, n_epoch=1),Learner.validate)[:1 if n < 8 else 2]:
        learn = learner(8, lambda m: m.body)
        with quiet(learn), pytest.raises(ValueError, match='cannot split a tensor of shape'): f(learn)
        assert_same(weights(learn), weights(TokensFirst(n)))
    if n < 8:
        with quiet(plain := learner(32)), quiet(learn): assert_same([*learn.validate()], [*plain.validate()], 1e-6)

# A loss that reads what the model keeps, which is that of a micro-batch

class Keeps(nn.Module):
    "Keeps what it knows of its samples, and what they share"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body,self.head = nn.Sequential(nn.Linear(5, 8), nn.Tanh()).double(),nn.Linear(8, 1).double()
        self.log_scale = nn.Parameter(torch.zeros(()).double())
    def forward(self, x):
        self.hidden,self.scale = self.body(x),self.log_scale.exp()
        self.body.term = self.hidden.pow(2).mean()
        return self.head(self.hidden)*self.scale

class AddsTerm(Callback):
    "As for distillation"
    def before_fit(self): self.hook = hook_output(self.model.body, detach=False)
    def after_loss(self): self.learn.loss_grad = self.loss_grad+self.hook.stored.pow(2).mean().float()

def keeping(*cbs, reads=lambda m: 1.):
    def loss(pred, targ): return (F.mse_loss(pred, targ)*(1+reads(m))).float()
    m = Keeps()
    return fit(make_learner(32, m=m, cbs=[*cbs], loss_func=loss), 2)

@pytest.mark.parametrize('reads', [lambda m: m.hidden.pow(2).mean(), lambda m: m.body.term, None])
def test_a_loss_that_reads_what_the_model_keeps(reads):
    "Or to which a callback adds it: an error"
    cbs,args = ([], dict(reads=reads)) if reads else ([AddsTerm()], {})
    with pytest.raises(ValueError, match='the loss reads what the model keeps'): keeping(GradientCache(8), *cbs, **args)
    keeping(GradientCache(32), *cbs, **args)

@pytest.mark.parametrize('reads', [lambda m: m.scale, lambda m: 1.])
def test_a_loss_that_reads_what_all_samples_share(reads):
    big,small = keeping(reads=reads),keeping(GradientCache(8), reads=reads)
    assert_same(weights(small), weights(big), ROUNDING)
    assert_moved_from(big, Keeps())
