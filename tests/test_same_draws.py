"`same_draws=True`: a fit in pieces is the fit of the whole batch, with dropout and noise in the model"
import random

import pytest
from hypothesis import given, strategies as st

from common import *
from test_draws import F_again, N, errors, F_, layers, own
from test_life import whole_learner

class DropPath(nn.Module):
    "Stochastic depth"
    def forward(self, x): return x*torch.empty(len(x), 1, 1, dtype=x.dtype, device=x.device).bernoulli_(.8)/.8 if self.training else x

class Noisy(nn.Module):
    "Attention dropout, dropout of features, tokens and channels, stochastic depth, noise"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inp,self.enc,self.path = nn.Linear(5, 8),nn.TransformerEncoderLayer(8, 2, 16, .2, batch_first=True),DropPath()
        self.again = F_again(nn.TransformerEncoderLayer(8, 2, 16, .2))
        self.d1,self.d2,self.drop,self.out = nn.Dropout1d(.2),nn.Dropout2d(.2),nn.Dropout(.3),nn.Linear(8, 1)
    def forward(self, x):
        x = self.inp(x[:, None]*torch.linspace(-1, 1, 4, dtype=x.dtype, device=x.device)[:, None])
        if self.training: x = x+.1*torch.randn_like(x)
        x = self.again(self.path(self.enc(x)).transpose(0, 1)).transpose(0, 1)
        return self.out(self.drop(self.d2(self.d1(x).unsqueeze(3)).flatten(2).mean(1)))

def noisy(bs, cbs=None, n=100, m=Noisy, **kwargs): return make_learner(bs, n=n, m=m().double(), cbs=cbs, **kwargs)

def run(learn, n_epoch=2, lr=.1):
    "Fitted from seed 0, and where the random generators stand afterwards"
    set_seed(0)
    own.manual_seed(0)
    fit(learn, n_epoch, lr, method='fit_one_cycle')
    return learn,(random.random(), np.random.rand(), torch.rand(3).tolist())

def assert_equal(a, b, tol=ROUNDING):
    "Fits, with where they leave the random generators"
    (a,stands),(b,stand) = a,b
    assert_same(weights(a), weights(b), tol)
    assert_same(losses(a), losses(b), 1e-5)
    assert_same(floats(a.recorder.values), floats(b.recorder.values), 1e-5)
    assert stands == stand
    assert (weights(a)-weights(type(a.model)())).abs().max() > 1e-3

def accum(accum_bs=32, micro=5, **kwargs): return GradientAccumulation(accum_bs, micro_batch_size=micro, same_draws=True, **kwargs)

@pytest.mark.thin(3)
@pytest.mark.parametrize('drop_last', [False, True])
@pytest.mark.parametrize('micro', [16, 8, 7, 5, 4, 2, 'auto'])
def test_a_fit_in_pieces_is_the_fit_of_the_batch(micro, drop_last):
    "100 samples in batches of 32: a ragged one at the end, or none"
    a,b = run(noisy(32, accum(micro=micro), drop_last=drop_last)),run(noisy(32, drop_last=drop_last))
    assert_equal(a, b)

def test_without_it_the_fits_differ():
    a,b = run(noisy(32, GradientAccumulation(32, micro_batch_size=8)))[0],run(noisy(32))[0]
    assert (weights(a)-weights(b)).abs().max() > 1e-3

@draws
@given(n=st.integers(8, 40), bs=st.integers(3, 20), micro=st.integers(4, 20), k=st.integers(1, 3))
def test_any_fit(n, bs, micro, k):
    "Windows of several loader batches: as without pieces"
    if micro >= bs or n < k*bs: return
    a,b = (run(noisy(bs, o, n=n), 1) for o in (accum(k*bs, micro), GradientAccumulation(k*bs)))
    assert_same(weights(a[0]), weights(b[0]), ROUNDING)
    assert a[1] == b[1]

@pytest.mark.parametrize('cb', [lambda: GradientAccumulation(64), lambda: GradientAccumulationSchedule(32, 64)])
def test_windows_of_several_loader_batches(cb):
    kwargs = {k:getattr(cb(), k) for k in ('start_accum_bs','final_accum_bs') if hasattr(cb(), k)} or dict(accum_bs=64)
    assert_equal(run(noisy(32, type(cb())(**kwargs, micro_batch_size=5, same_draws=True), n=200)), run(noisy(32, cb(), n=200)))

@pytest.mark.parametrize('mix', [MixUp, CutMix])
def test_mixup_too(mix):
    "Its partners and shares are drawn once a batch anyway"
    def images(cbs):
        x,y = (o.float() for o in data(100))
        ds = list(zip(x[:, :, None, None].expand(-1, -1, 4, 4).contiguous(), y))
        m = nn.Sequential(nn.Conv2d(5, 8, 3), nn.Dropout2d(.3), nn.Flatten(), nn.Dropout(.3), nn.Linear(32, 1))
        for i,p in enumerate(m.parameters()): nn.init.normal_(p, std=.1, generator=torch.Generator().manual_seed(i))
        return Learner(DataLoaders(DataLoader(ds, bs=32), DataLoader(ds[:20], bs=16)), m, mse_of_samples, opt_func=SGD, cbs=[mix(), *cbs])
    a,b = run(images([accum()])),run(images([]))
    assert_same(weights(a[0]), weights(b[0]), 1e-6)  # fastai mixes in float32
    assert a[1] == b[1]

mse_of_samples = type('MSE', (), dict(y_int=True, reduction='mean', __call__=lambda self, pred, targ: (l.float() if (l := ((pred-targ)**2).squeeze(1)).ndim and self.reduction == 'none' else l.mean().float())))()

@pytest.mark.parametrize('name', ['lstm','gru','images','sequence_first','weight_drop','layer_drop','own_generator','choice'])
def test_layers(name):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inp,self.layer,self.out = nn.Linear(5, 48),layers[name](),nn.Linear(48, 1)
        def forward(self, x): return self.out(self.layer(self.inp(x).unflatten(1, (6, 8))).flatten(1))
    a,b = run(noisy(32, accum(micro=9), m=Net)),run(noisy(32, m=Net))
    assert_same(weights(a[0]), weights(b[0]), ROUNDING)
    assert a[1] == b[1]

def test_adam_and_clipping():
    kwargs = dict(opt_func=partial(Adam, wd=.01))
    assert_equal(run(noisy(32, [accum(), GradientClip(.1)], **kwargs)), run(noisy(32, GradientClip(.1), **kwargs)), 1e-9)

@pytest.mark.parametrize('mode', ['bf16','fp16'])
def test_mixed_precision(mode):
    "As close to the batch as the rounding of half precision, whose sums have another order; without it an order of magnitude away"
    def half(*cbs): return run(make_learner(32, n=96, m=Noisy(), loss_func=MSELossFlat(), cbs=[CpuMixedPrecision(mode, init_scale=1.), *cbs]), 1, .01)
    whole,same,other = half(),half(accum()),half(GradientAccumulation(32, micro_batch_size=5))
    near,far = ((weights(o[0])-weights(whole[0])).norm() for o in (same, other))
    assert 0 < 10*near < far and same[1] == whole[1]

@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=str)
def test_convnext(dtype, layout):
    "timm's, narrow, with stochastic depth and dropout before the head, as it comes; both memory layouts of images"
    timm = pytest.importorskip('timm')
    def fitted(*cbs):
        torch.manual_seed(0)
        m = timm.create_model('convnext_atto', num_classes=10, drop_path_rate=.3, drop_rate=.4, depths=(2, 2, 2, 2), dims=(8, 16, 24, 32)).to(dtype=dtype, memory_format=layout)
        x = torch.randn(24, 3, 32, 32, dtype=dtype).contiguous(memory_format=layout)
        dls = DataLoaders(DataLoader(list(zip(x, torch.randint(10, (24,)))), bs=12), DataLoader([(x[0], tensor(0))], bs=1))
        learn = Learner(dls, m, lambda pred, targ: F.cross_entropy(pred, targ).float(), opt_func=SGD, cbs=list(cbs))
        before = weights(m)
        learn,stands = run(learn, 1)
        return weights(learn)-before,stands
    (whole,stands),(same,stand),(other,_) = fitted(),fitted(GradientAccumulation(12, micro_batch_size=5, same_draws=True)),fitted(GradientAccumulation(12, micro_batch_size=5))
    off,far = ((o-whole).norm()/whole.norm() for o in (same, other))
    assert off < {torch.float32:1e-3, torch.float64:1e-11}[dtype] and far > .1 and stand == stands

class Limited(Noisy):
    "Out of memory with more than 9 samples"
    def forward(self, x):
        if self.training and len(x) > self.limit: raise torch.OutOfMemoryError('CUDA out of memory')
        return super().forward(x)
    limit = 9

def test_auto_finds_pieces():
    a,b = run(noisy(32, accum(micro='auto'), m=Limited)),run(noisy(32))
    assert a[0].gradient_accumulation.micro_bs == 8
    assert_equal(a, b)

@pytest.mark.filterwarnings('ignore:out of memory in training')
@pytest.mark.parametrize('at', [0, 1, 2])
def test_out_of_memory_in_a_batch(at):
    "The memory shrinks in the second batch: its pieces come again, with the same numbers"
    class Shrinks(Callback):
        order,run_valid = 99,False
        def before_fit(self): self.seen = 0
        def after_pred(self):
            if self.learn.train_iter >= 1 and self.learn.training:
                if self.seen == at: Limited.limit = 5
                self.seen += 1
    try: a = run(noisy(32, [accum(micro='auto'), Shrinks()], m=Limited))
    finally: Limited.limit = 9
    assert a[0].gradient_accumulation.micro_bs == 4
    assert_equal(a, run(noisy(32)))

def test_lr_find_and_the_next_fit():
    "A search changes no later fit"
    found = []
    for cbs in [], [accum()]:
        learn = noisy(32, cbs)
        set_seed(0)
        with learn.no_bar(): found.append((learn.lr_find(num_it=20, stop_div=False, show_plot=False).valley, losses(learn)))
        found[-1] += run(learn),
    assert_same(found[0][1], found[1][1], 1e-4)
    assert_equal(found[0][2], found[1][2])

# Dimensions that look like the samples

class Weights(nn.Module):
    "AWD-LSTM's kinds of dropout, on weights of 24 and 80 rows, with masks for `fixed` positions that no parameter has"
    fixed = 12
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.b,self.out = nn.Linear(5, 24),nn.Linear(24, 80),nn.Linear(80, 1)
    def forward(self, x):
        p = .3*self.training
        x = F.linear(x, F.dropout(self.a.weight, p)).tanh()
        if self.training: x = x*torch.rand(self.fixed, 2, dtype=x.dtype).flatten()
        rows = torch.bernoulli(torch.full((80, 1), 1-p, dtype=x.dtype)) if self.training else 1
        x = F.linear(F.dropout(x, p), F.dropout(self.b.weight, p)*rows).tanh()
        return self.out(F.dropout(x, p))

@pytest.mark.parametrize('cb', [accum, lambda **k: GradientCache(k['micro'], same_draws=True)], ids=['accumulation','cache'])
@pytest.mark.parametrize('n', [32, 35])
@pytest.mark.parametrize('micro', [2, 3, 4, 5, 6, 7])
def test_what_looks_like_the_samples(micro, n, cb):
    "The batch starts over once its second piece shows which dimension is the samples; the last of 35 samples are a batch of 3"
    a,b = run(noisy(32, cb(micro=micro), n=n, m=Weights)),run(noisy(32, n=n, m=Weights))
    assert_equal(a, b)

@pytest.mark.parametrize('micro', [3, 4, 5, 6, 8, 12])
def test_text_classifier(micro):
    "fastai's AWD_LSTM, with all of its kinds of dropout; windows of two loader batches"
    from fastai.text.models.core import get_text_classifier
    from fastai.text.models.awdlstm import AWD_LSTM
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            config = dict(emb_sz=8, n_hid=20, n_layers=2, pad_token=1, bidir=False, output_p=.4, hidden_p=.3, input_p=.4, embed_p=.1, weight_p=.5)
            self.m = get_text_classifier(AWD_LSTM, 60, 1, seq_len=72, config=config, lin_ftrs=[10], ps=[.1])
            self.m[1].layers = nn.Sequential(*[o for l in self.m[1].layers for o in l if not isinstance(o, nn.BatchNorm1d)])
        def forward(self, x): return self.m((x.abs()*20+2).long().clamp(max=59))[0]
    a,b = (run(noisy(16, GradientAccumulation(32, **k), n=64, m=Classifier), 1, 5.) for k in (dict(micro_batch_size=micro, same_draws=True), {}))
    assert_equal(a, b)

# Attention whose dropout a fused kernel would draw, as on a GPU

class Fused(nn.Module):
    "Attention with dropout as CUDA has it; on the CPU, no fused kernel draws its dropout"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inp,self.attend,self.out = nn.Linear(5, 24),F_(self.attention),nn.Linear(24, 1)
    def attention(self, x):
        if not self.training: return F.scaled_dot_product_attention(x, x, x)
        is_fused = torch.backends.cuda.flash_sdp_enabled()
        return (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, .3)[0] if is_fused else F.scaled_dot_product_attention(x, x, x, dropout_p=.3))
    def forward(self, x): return self.out(self.attend(F.dropout(self.inp(x), .2, self.training).view(-1, 2, 4, 3)).flatten(1))

@pytest.mark.parametrize('accum_bs,cbs', [(32, lambda: accum(micro=7)), (64, lambda: accum(64, 7)), (32, lambda: [ActivationCheckpointing(lambda m: m.attend), accum(micro=7)]),
                                 (32, lambda: GradientCache(7, same_draws=True)), (32, lambda: [ActivationCheckpointing(lambda m: m.attend), GradientCache(7, same_draws=True)])],
                         ids=['pieces','windows','checkpoints','cache','both'])
def test_attention_runs_in_the_math_kernel(accum_bs, cbs):
    "As the whole batch does if you let it"
    a = run(noisy(32, cbs(), n=128, m=Fused))
    assert torch.backends.cuda.flash_sdp_enabled()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert_equal(a, run(noisy(32, GradientAccumulation(accum_bs), n=128, m=Fused)))

# GradientCache

def spread(pred, targ): return (((pred-pred.mean(0))**2).mean() + ((pred-targ)**2).mean()).float()  # compares the samples

@pytest.mark.thin(5)
@pytest.mark.parametrize('micro', ['auto', 16, 7, 4])
@pytest.mark.parametrize('part', [None, lambda m: m.enc, lambda m: m.drop], ids=['all','body','dropout'])
def test_gradient_cache(micro, part):
    "Also where only a part of the model runs in pieces"
    m = Limited if micro == 'auto' and part is None else Noisy
    a,b = run(noisy(32, GradientCache(micro, part=part, same_draws=True), m=m, loss_func=spread)),run(noisy(32, loss_func=spread))
    assert_equal(a, b)

def test_gradient_cache_in_pieces_of_a_batch():
    "Both split: the cache a forward pass of the accumulation's pieces"
    a = run(noisy(32, [accum(micro=16), GradientCache(5, same_draws=True)]))
    assert_equal(a, run(noisy(32)))

# What cannot be

@pytest.mark.parametrize('make', [lambda **k: GradientAccumulation(32, **k), lambda **k: GradientAccumulationSchedule(16, 32, **k), lambda **k: GradientCache(8, **k)])
def test_it_is_a_flag(make):
    with pytest.raises(TypeError, match="same_draws must be True or False, not 'yes'"): make(same_draws='yes')

def test_it_takes_pieces():
    for cb in GradientAccumulation,partial(GradientAccumulationSchedule, 16):
        with pytest.raises(ValueError, match='same_draws=True is for batches that are split: set micro_batch_size'): cb(32, same_draws=True)
    for make in lambda: accum(micro=1), lambda: GradientCache(1, same_draws=True):
        with pytest.raises(ValueError, match='same_draws=True needs a micro_batch_size of 2 or more, not 1'): make()

@pytest.mark.parametrize('cb', [lambda: accum(), lambda: GradientCache(5, same_draws=True)])
def test_a_compiled_model_is_an_error_before_training(cb):
    learn = noisy(32, cb(), m=lambda: torch.compile(Noisy(), backend='eager'))
    with pytest.raises(ValueError, match='same_draws=True cannot repeat the random numbers of a compiled model'): run(learn)
    assert_same(weights(learn), weights(Noisy().double()))

@pytest.mark.parametrize('name', ['poisson','pairs_of_samples','samples_shuffled','compiled'])
def test_what_cannot_be_repeated_stops_the_fit(name):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp,self.layer,self.out = nn.Linear(5, 48),F_(errors[name][0]),nn.Linear(48, 1)
        def forward(self, x): return self.out(self.layer(self.inp(x).unflatten(1, (6, 8))).flatten(1))
    learn = noisy(22, accum(22, 15), n=22, m=Net)
    with pytest.raises(ValueError, match='same_draws=True'): run(learn)

# Without it

def test_off_it_costs_nothing(monkeypatch):
    def fails(*args): raise AssertionError
    monkeypatch.setattr('fastxtend_accum.same_draws.SameDraws.__init__', fails)
    for cbs in GradientAccumulation(32, micro_batch_size=8),GradientCache(8): run(noisy(32, cbs, n=96))

def test_a_batch_in_one_piece_costs_nothing(monkeypatch):
    def fails(*args): raise AssertionError
    monkeypatch.setattr('fastxtend_accum.same_draws.saved', fails)
    for cbs in accum(micro=32),GradientCache(32, same_draws=True): run(noisy(32, cbs, n=96))

# Parts that run twice, generators of the user's own, further backward passes, files

class Siamese(nn.Module):
    "A body that runs twice in a forward pass"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.Dropout(.3), nn.Tanh(), nn.Linear(5, 5)) for _ in range(2)])
        self.head = nn.Linear(5, 1)
    def forward(self, x): return self.head(self.body(x)*self.body(-x))

def test_a_part_that_runs_twice_and_has_checkpoints():
    "Each of its calls has draws of its own, which the checkpointed modules in it repeat"
    def fitted(*cbs): return run(noisy(32, [*cbs], n=32, m=Siamese, loss_func=spread))
    whole = fitted()
    for cbs in [], [ActivationCheckpointing()]:
        assert_equal(fitted(*cbs, GradientCache(8, part=lambda m: m.body, same_draws=True)), whole)

class OwnDraws(nn.Module):
    "Draws from a generator of its own"
    def __init__(self): super().__init__(); self.m = model()
    def forward(self, x): return self.m(x*torch.rand(x.shape, generator=own, dtype=x.dtype) if self.training else x)

class Holds(nn.Module):
    "Draws features, or layers to leave out, from a generator that it holds"
    def __init__(self, kind, place):
        super().__init__()
        torch.manual_seed(0)
        g = dict(numpy=np.random.default_rng, mersenne=lambda s: np.random.Generator(np.random.MT19937(s)), legacy=np.random.RandomState,
                 python=random.Random, torch=lambda s: torch.Generator().manual_seed(s))[kind](7)
        self.inp,self.layer,self.out = nn.Linear(5, 8),nn.Linear(8, 8),nn.Linear(8, 1)
        self.kind,holder = kind,self.layer if place == 'submodule' else self
        holder.g = [g] if place == 'list' else dict(mine=(g,)) if place == 'dict' else g
        self.get = dict(list=lambda: self.g[0], dict=lambda: self.g['mine'][0], submodule=lambda: self.layer.g, attribute=lambda: self.g)[place]
    def numbers(self, n):
        g = self.get()
        if self.kind == 'torch': return torch.rand(n, generator=g, dtype=torch.float64)
        return tensor([g.random() for _ in range(n)] if self.kind == 'python' else g.random(n) if self.kind != 'legacy' else g.rand(n)).double()
    def forward(self, x):
        x = self.inp(x).tanh()
        if self.training:
            x = F.dropout(x, .3)*self.numbers(8)
            if self.numbers(1) < .5: x = self.layer(x)
        return self.out(x)

@pytest.mark.parametrize('cbs', [accum, lambda: GradientCache(5, same_draws=True), lambda: [accum(micro=16), GradientCache(5, same_draws=True)]], ids=['accumulation','cache','both'])
@pytest.mark.parametrize('place', ['attribute','submodule','list','dict'])
@pytest.mark.parametrize('kind', ['numpy','mersenne','legacy','python','torch'])
def test_generators_that_the_model_holds(kind, place, cbs):
    "They stand at the same place in each piece, and afterwards where the whole batch leaves them"
    def fitted(*cbs):
        class M(Holds):
            def __init__(self): super().__init__(kind, place)
        learn,stands = run(noisy(32, list(cbs), m=M))
        return learn,(stands, learn.model.numbers(3).tolist())
    assert_equal(fitted(*L(cbs())), fitted())

@pytest.mark.parametrize('kind', ['numpy','legacy','python'])
def test_numbers_for_each_sample_from_a_generator_that_the_model_holds(kind):
    class M(Holds):
        def __init__(self): super().__init__(kind, 'attribute')
        def forward(self, x): return super().forward(x*self.numbers(len(x))[:, None] if self.training else x)
    with pytest.raises(ValueError, match='in a different state than earlier samples'): run(noisy(32, accum(), m=M))

def test_a_loss_that_draws_from_the_models_own_generator():
    "The generator goes on from where the forward pass left it, also after the pieces have run again"
    def loss(pred, targ): return ((pred-targ)**2*torch.rand(pred.shape, generator=own, dtype=pred.dtype)).mean().float() if pred.requires_grad else mse(pred, targ)
    def fitted(*cbs):
        res = run(noisy(32, [*cbs], m=OwnDraws, loss_func=loss))
        return res,own.get_state()
    (ours,our_state),(whole,state) = fitted(GradientCache(8, same_draws=True)),fitted()
    assert_equal(ours, whole)
    assert torch.equal(our_state, state)

class Twice(Callback):
    "Looks at the gradients before fastai's backward pass, as a callback that balances losses does"
    def before_backward(self):
        if self.training: self.norms = [o.norm() for o in torch.autograd.grad(self.learn.loss_grad, list(self.model.parameters()), retain_graph=True)]

@pytest.mark.parametrize('cbs', [lambda: GradientCache(8), lambda: GradientCache(8, same_draws=True), ActivationCheckpointing,
                                 lambda: [ActivationCheckpointing(), GradientCache(8, same_draws=True)]], ids=['cache','same_draws','checkpoint','both'])
def test_a_second_backward_pass(cbs):
    "The pieces, and the checkpointed modules, run again in each"
    def fitted(*more): return run(noisy(22, [*L(cbs()), *more], n=44, m=Siamese, loss_func=spread))  # in pieces of 7, 8 and 7
    looked,plain = fitted(Twice()),fitted()
    assert_equal(looked, plain, 0.)
    assert len(looked[0].twice.norms) == 10 and all(o > 0 for o in looked[0].twice.norms)

def test_export_and_fit_again():
    "The numbers of the last batch are not exported"
    def learner():
        m = nn.Sequential(nn.Dropout(.3), *model().float())
        return whole_learner(GradientCache(4, same_draws=True), m)
    learn = learner()
    fit(learn, 1).export('learner.pkl')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        loaded = load_learner('learner.pkl')
    loaded.dls = learn.dls
    before = weights(learn)
    for o in loaded,learn:
        set_seed(0)
        fit(o, 1, reset_opt=True)
        o.export('again.pkl')
    assert_same(weights(loaded), weights(learn))
    assert (weights(learn)-before).abs().max() > 1e-3

class FitsOne(Noisy):
    def forward(self, x):
        if self.training and len(x) > 1: raise torch.OutOfMemoryError('CUDA out of memory')
        return super().forward(x)

@pytest.mark.parametrize('cb', [lambda: accum(micro='auto'), lambda: GradientCache('auto', same_draws=True)])
def test_one_sample_fits_and_is_too_few(cb):
    with pytest.raises(ValueError, match='same_draws=True needs a micro_batch_size of 2 or more, not 1'): run(noisy(32, cb(), m=FitsOne))
