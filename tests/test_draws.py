"Pieces of a batch with the random numbers of the whole batch: `SameDraws`"
import random, re

import pytest
from hypothesis import given, strategies as st
from torch.utils.checkpoint import checkpoint

from contextlib import nullcontext

from common import *
from fastxtend_accum.loop import is_compiled
from fastxtend_accum.same_draws import SameDraws, StartOver

N = 22

class DropPath(nn.Module):
    "Stochastic depth as timm has it"
    def forward(self, x): return x*x.new_empty((len(x),)+(1,)*(x.ndim-1)).bernoulli_(.8)/.8 if self.training else x

class SequenceFirst(nn.Module):
    "A transformer with its samples in the second dimension, as PyTorch has it without `batch_first`"
    def __init__(self):
        super().__init__()
        self.enc,self.attend = nn.TransformerEncoderLayer(8, 2, 16, .2),nn.MultiheadAttention(8, 2, .3)
    def forward(self, x):
        x = self.enc(x.transpose(0, 1))
        return self.attend(x, x, x)[0].transpose(0, 1)

class WeightDrop(nn.Module):
    "Dropout on the weights, one mask for the whole batch, as in AWD-LSTM"
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8)/3)
    def forward(self, x): return x@F.dropout(self.weight, .3, self.training)

class LayerDrop(nn.Module):
    "Leaves layers out for the whole batch, by a draw of each library"
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
    def forward(self, x):
        for i,layer in enumerate(self.layers):
            if not self.training or [torch.rand([]).item, random.random, np.random.rand][i%3]() < .5: x = F.dropout(layer(x), .2, self.training)
        return x

class Images(nn.Module):
    "Dropout of channels and of pixels, with the memory layout of images on a GPU"
    def forward(self, x):
        x = x.unflatten(2, (2, 4)).contiguous(memory_format=torch.channels_last)
        return F.dropout(F.dropout2d(x, .3)+torch.randn_like(x), .3).flatten(2)

class F_(nn.Module):
    "A function as a module"
    def __init__(self, f): super().__init__(); self.f = f
    def forward(self, x): return self.f(x)

own = torch.Generator()

layers = dict(
    dropout=lambda: nn.Dropout(.3), dropout1d=lambda: nn.Dropout1d(.3), alpha=lambda: nn.AlphaDropout(.3), feature_alpha=lambda: nn.FeatureAlphaDropout(.3),
    stochastic_depth=DropPath, images=Images, sequence_first=SequenceFirst, weight_drop=WeightDrop, layer_drop=LayerDrop,
    transformer=lambda: nn.TransformerEncoderLayer(8, 2, 16, .2, batch_first=True), lstm=lambda: F_first(nn.LSTM(8, 8, 2, dropout=.4, batch_first=True)),
    gru=lambda: F_first(nn.GRU(8, 8, 2, dropout=.4, batch_first=True, bidirectional=True)),
    noise=lambda: F_(lambda x: x+torch.randn_like(x)), noise_of_batch=lambda: F_(lambda x: x+torch.randn(8, dtype=x.dtype)),
    noise_by_shape=lambda: F_(lambda x: x*torch.rand(len(x), 1, 8, dtype=x.dtype)), noise_in_place=lambda: F_(lambda x: x+torch.empty_like(x)[..., :4].normal_().sum(-1, keepdim=True)),
    expanded=lambda: F_(lambda x: x+torch.randn_like(x[:, :1].expand_as(x))+torch.rand_like(x[:1].expand_as(x))),
    columns=lambda: F_(lambda x: x*torch.empty(6, len(x), dtype=x.dtype).exponential_().T[..., None]),
    tokens=lambda: F_(lambda x: F.dropout(x.reshape(-1, 8), .3).view_as(x)), gumbel=lambda: F_(F.gumbel_softmax), normal=lambda: F_(lambda x: torch.normal(x, .1)),
    bernoulli=lambda: F_(lambda x: x*torch.bernoulli(x.detach().sigmoid())), by_tensor=lambda: F_(lambda x: x*torch.empty_like(x).bernoulli_(torch.linspace(0, 1, 8, dtype=x.dtype))),
    distributions=lambda: F_(lambda x: torch.distributions.Normal(x, 1.).rsample()+torch.distributions.Uniform(-x.exp(), x.exp()).rsample()),
    choice=lambda: F_(lambda x: x.gather(2, torch.multinomial(x.detach().mean(1).exp(), 3)[:, None].expand(-1, 6, -1)).repeat(1, 1, 3)[..., :8]),
    integers=lambda: F_(lambda x: x+torch.randint(3, (len(x), 6, 1))), permuted_features=lambda: F_(lambda x: x[..., torch.randperm(8)]),
    own_generator=lambda: F_(lambda x: x+torch.rand(x.shape, generator=own, dtype=x.dtype)),
    own_generator_twice=lambda: F_(lambda x: x+torch.rand(x.shape, generator=own, dtype=x.dtype)*torch.empty_like(x).normal_(generator=own)),
    default_generator=lambda: F_(lambda x: F.dropout(x, .3)+torch.rand(x.shape, generator=torch.default_generator, dtype=x.dtype)),
    new_generator=lambda: F_(lambda x: x+torch.rand(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)),
    native=lambda: F_(lambda x: torch.native_dropout(x, .3, True)[0]+torch.native_dropout(x.transpose(0, 1), .3, True)[0].transpose(0, 1)),
    checkpointed=lambda: F_again(SequenceFirst()), checkpointed_reentrant=lambda: F_again(nn.Dropout(.4), True))

class F_first(nn.Module):
    "The first output of a module"
    def __init__(self, m, n=8): super().__init__(); self.m,self.n = m,n
    def forward(self, x): return self.m(x)[0][..., :self.n]

class F_again(nn.Module):
    "A module that is run again in the backward pass"
    def __init__(self, m, reentrant=False): super().__init__(); self.m,self.reentrant = m,reentrant
    def forward(self, x): return checkpoint(self.m, x, use_reentrant=self.reentrant)

def network(name, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), layers[name](), nn.Dropout(.2), nn.Linear(8, 4)).to(dtype)

def batch(n=N, dtype=torch.float64): return torch.randn(n, 6, 8, generator=torch.Generator().manual_seed(1), dtype=dtype)

def seeded():
    set_seed(2)
    own.manual_seed(2)

def standing(): return random.random(),np.random.rand(),torch.rand(3).tolist(),torch.rand(3, generator=own).tolist()

def trained_on(m, x, sizes=None, around=nullcontext):
    "Gradients of the mean of a loss over the batch, in pieces of `sizes`, or of so many as training makes them; and where the random generators stand then"
    seeded()
    m.zero_grad()
    same,start,done = SameDraws(len(x), m),0,[]
    while start < len(x):
        n = same.next_size(len(x)-start, sizes or len(x)) if not isinstance(sizes, list) else sizes[len(done)]
        try:
            with same.piece(start, start+n), around():
                out = m(x[start:start+n])
                (out if x.dtype == torch.float64 else out.float()).tanh().sum().div(len(x)).backward()
        except StartOver:
            m.zero_grad()
            start,done = 0,[]
        else: start,done = start+n,done+[n]
    return torch.cat([p.grad.flatten().double() for p in m.parameters() if p.grad is not None]),standing()

def split(n, micro_bs):
    "Sizes of pieces as training makes them"
    same,sizes = SameDraws(n, nn.Identity()),[]
    while sum(sizes) < n:
        sizes.append(same.next_size(n-sum(sizes), micro_bs))
        same.sizes.add(sizes[-1])
    return sizes

@pytest.mark.thin(7)
@pytest.mark.parametrize('name', layers)
@pytest.mark.parametrize('micro_bs', [16, 7, 4, 2])
def test_pieces_are_the_whole_batch(name, micro_bs):
    m,x = network(name),batch()
    expected,stands = trained_on(m, x)
    res,stand = trained_on(m, x, micro_bs)
    assert expected.abs().max() > 1e-3
    assert_same(res, expected, ROUNDING)
    assert stand == stands

@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize('name', ['transformer','images','lstm','native','noise','stochastic_depth'])
def test_other_precisions(name, dtype):
    "Draws are made in the precision of the model; in the same pieces without dropout its rounding is as large"
    m,x = network(name, dtype),batch(dtype=dtype)
    expected,stands = trained_on(m, x)
    res,stand = trained_on(m, x, 8)
    assert stand == stands
    assert (res-expected).norm() < 4*torch.finfo(dtype).eps*expected.norm()

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype):
    m,x = network('transformer', torch.float32),batch(dtype=torch.float32)
    around = lambda: torch.autocast('cpu', dtype=dtype)
    expected,stands = trained_on(m, x, None, around)
    res,stand = trained_on(m, x, 8, around)
    assert stand == stands
    assert (res-expected).norm() < 4*torch.finfo(dtype).eps*expected.norm()

@draws
@given(st.integers(2, 40), st.integers(2, 40), st.sampled_from(['transformer','sequence_first','tokens','noise']))
def test_any_split(n, micro_bs, name):
    if micro_bs >= n: return
    m,x = network(name),batch(n)
    sizes = split(n, micro_bs)
    assert sum(sizes) == n and max(sizes) <= micro_bs and sizes[0] > 1 and len({*sizes}) > 1
    expected,stands = trained_on(m, x)
    res,stand = trained_on(m, x, micro_bs)
    assert_same(res, expected, ROUNDING)
    assert stand == stands

# What cannot be repeated is an error

@torch.library.custom_op('fastxtend_accum_test::hidden', mutates_args=())
def hidden(x: torch.Tensor) -> torch.Tensor: return x*torch.rand_like(x)
@hidden.register_fake
def _(x): return torch.empty_like(x)

def reseeded(x):
    torch.manual_seed(0)
    return x*torch.rand_like(x)

def other_operation(x): return F.dropout(x, .5) if len(x) == 7 else x*torch.rand_like(x)
def more_draws(x): return F.dropout(F.dropout(x, .5), .5) if len(x) == 15 else F.dropout(x, .5)
def fewer_draws(x): return F.dropout(F.dropout(x, .5), .5) if len(x) == 7 else F.dropout(x, .5)
def per_sample(x): return torch.stack([F.dropout(o, .5) for o in x])
def numpy_per_sample(x): return x*torch.from_numpy(np.random.rand(len(x), 1, 1))

errors = dict(
    poisson=(lambda x: x*torch.poisson(x.abs()), 'cannot repeat .* aten::poisson'), rrelu=(lambda x: F.rrelu(x, training=True), 'cannot repeat .* aten::rrelu'),
    gamma=(lambda x: x*torch.distributions.Gamma(x.exp(), x.exp()).sample(), 'cannot repeat .* aten::_standard_gamma'),
    binomial=(lambda x: x*torch.binomial(x.abs().ceil(), x.sigmoid()), 'cannot repeat .* aten::binomial'),
    out=(lambda x: x*torch.rand(x.shape, out=torch.empty_like(x)), 'cannot repeat .* aten::rand.out'),
    samples_shuffled=(lambda x: x[torch.randperm(len(x))], 'cannot tell .* aten::randperm'),
    samples_chosen=(lambda x: x[torch.randint(len(x), (len(x),))], 'cannot tell .* aten::randint'),
    samples_drawn=(lambda x: x[torch.multinomial(torch.ones(len(x)), len(x))], 'cannot tell .* aten::multinomial'),
    pairs_of_samples=(lambda x: (torch.rand(len(x), len(x), dtype=x.dtype)@x.flatten(1)).view_as(x), 'cannot tell .* aten::rand'),
    hidden=(lambda x: F.dropout(hidden(x.detach()), .5)*x, 'code that it cannot see'), hidden_at_the_end=(lambda x: x*hidden(x.detach()), 'code that it cannot see'),
    reseeded=(reseeded, 'code that it cannot see'), other_operation=(other_operation, 'which was not called for earlier ones'), more_draws=(more_draws, 'which was not called for earlier ones'), fewer_draws=(fewer_draws, 'in a different state than earlier samples'),
    per_sample=(per_sample, 'which was not called for earlier ones'), numpy_per_sample=(numpy_per_sample, 'in a different state than earlier samples'),
    compiled=(torch.compile(lambda x: F.dropout(x, .5), backend='eager'), 'aten::bernoulli_.float of a compiled function'))

@pytest.mark.parametrize('name', errors)
def test_what_cannot_be_repeated_is_an_error(name):
    f,message = errors[name]
    m = nn.Sequential(nn.Linear(8, 8), F_(f)).double()
    with pytest.raises(ValueError, match='same_draws=True') as e: trained_on(m, batch(), [7, 15])
    assert re.search(message, str(e.value)), e.value

attention = 'flash','efficient','cudnn'

@pytest.mark.parametrize('name', attention)
def test_fused_attention(name):
    "Its dropout is drawn inside of the kernel, so the batch starts over with the MATH kernel; without dropout it draws nothing"
    f = getattr(torch.ops.aten, f'_scaled_dot_product_{name}_attention').default
    x = torch.empty(4, 2, 6, 8, device='meta')
    args = dict(flash=(x, x, x), efficient=(x, x, x, None, False), cudnn=(x, x, x, None, False))[name]
    for more,kwargs in ((), dict(dropout_p=.1)),((.1,), {}):
        same = SameDraws(8, nn.Identity())
        with same.piece(0, 4):
            f(*args)
            f(*args, dropout_p=0.)
            assert torch.backends.cuda.flash_sdp_enabled()
            with pytest.raises(StartOver, match=f'_scaled_dot_product_{name}_attention: use torch.nn.attention.sdpa_kernel'): f(*args, *more, **kwargs)
        for again in same.piece,same.again:
            with again(0, 4):
                assert torch.backends.cuda.math_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled()
                with pytest.raises(ValueError, match=f'_scaled_dot_product_{name}_attention: use another operation') as e: f(*args, *more, **kwargs)
                assert e.type is ValueError
        assert torch.backends.cuda.flash_sdp_enabled()

def test_compiled_models():
    assert not is_compiled(network('dropout')) and is_compiled(torch.compile(network('dropout')))
    m = network('dropout')
    m[1].compile()
    assert is_compiled(m)

def test_pieces_of_one_size_tell_nothing():
    with pytest.raises(ValueError, match='pieces of two sizes'): trained_on(network('dropout'), batch(20), [10, 10])
    trained_on(nn.Linear(8, 4).double(), batch(20), [10, 10])

def test_the_first_piece_has_two_samples():
    with pytest.raises(ValueError, match='2 samples'): trained_on(network('dropout'), batch(20), [1, 19])

def test_a_wrong_guess_starts_over():
    "14 tokens look like the heads of 7 samples"
    m,x = nn.Sequential(nn.Linear(8, 8), F_(lambda x: x*torch.rand(14, 1, dtype=x.dtype))).double(),torch.randn(22, 14, 8, dtype=torch.float64)
    assert_same(trained_on(m, x, [7, 15])[0], trained_on(m, x)[0], ROUNDING)

# Pieces that fail, and pieces that are run again

def test_a_piece_that_failed_is_drawn_again():
    "Out of memory in the first piece and in the second: smaller ones follow"
    m,x = network('transformer'),batch()
    expected,stands = trained_on(m, x)
    seeded()
    m.zero_grad()
    same = SameDraws(N, m)
    def run(start, end, fails=False):
        with same.piece(start, end):
            loss = m(x[start:end]).tanh().sum()/N
            if fails: raise MemoryError
            loss.backward()
    with pytest.raises(MemoryError): run(0, 13, True)
    run(0, 7)
    with pytest.raises(MemoryError): run(7, 22, True)
    run(7, 14)
    run(14, 22)
    assert_same(torch.cat([p.grad.flatten() for p in m.parameters()]), expected, ROUNDING)
    assert standing() == stands

def test_again_leaves_the_generators_where_they_are():
    m,x = network('transformer'),batch()
    seeded()
    with torch.no_grad():
        same,whole = SameDraws(N, m),m(x)
        seeded()
        pieces = []
        for rows in (0, 7), (7, 22):
            with same.piece(*rows): pieces.append(m(x[slice(*rows)]))
        torch.rand(3); random.random()
        states = get_random_states()
        for rows in (0, 7), (7, 22):
            with same.again(*rows): pieces.append(m(x[slice(*rows)]))
        assert random.getstate() == states['random_state'] and torch.equal(torch.get_rng_state(), states['torch_state'])
    assert_same(torch.cat(pieces[:2]), whole, ROUNDING)
    assert_same(torch.cat(pieces[2:]), whole, ROUNDING)

def test_pieces_in_pieces():
    "The pieces of a piece draw its part of the whole batch's numbers"
    m,x = network('transformer'),batch()
    expected,stands = trained_on(m, x)
    seeded()
    m.zero_grad()
    same = SameDraws(N, m)
    for start,end in (0, 13), (13, 22):
        inner = SameDraws(end-start, m)
        with same.piece(start, end):
            for a,b in (start, start+5), (start+5, end):
                with inner.piece(a-start, b-start): (m(x[a:b]).tanh().sum()/N).backward()
    assert_same(torch.cat([p.grad.flatten() for p in m.parameters()]), expected, ROUNDING)
    assert standing() == stands

# What it costs

def test_the_whole_batch_in_one_piece_costs_nothing():
    m,x = network('transformer'),batch()
    same = SameDraws(N, m)
    with same.piece(0, N): m(x)
    assert not same.draws and not same.before

def test_each_piece_draws_the_numbers_of_the_whole_batch():
    "Once: numbers drawn, in pieces of 13 and 9 and in one"
    class Counts(torch.utils._python_dispatch.TorchDispatchMode):
        numbers = 0
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if torch.Tag.nondeterministic_seeded in func.tags: Counts.numbers += args[0].numel()
            return func(*args, **(kwargs or {}))
    m,x = network('dropout'),batch()
    with Counts(): m(x)
    whole,Counts.numbers = Counts.numbers,0
    same = SameDraws(N, m)
    with Counts():
        for rows in (0, 13), (13, 22):
            with same.piece(*rows): m(x[slice(*rows)])
    assert whole == 2*N*6*8 and Counts.numbers == 2*whole
