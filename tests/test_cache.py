"GradientCache: the loss compares all samples of a batch, while the model sees a micro-batch at a time"
import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.counts import LiveBytes
from common import *
from limited_memory import MemoryLimit, OutOfMemory
from stateful import *
from fastxtend_accum.windows.nested import NotBySample

FLOAT32_LOSS = 1e-7  # the Recorder averages losses in float32
ADAM_ROUNDING = 1e-9  # Adam's first steps are as large for gradients that are nothing but rounding


# Losses over the batch

def info_nce(pred, *targ, scale=10.):
    "Each row of one output is to find its partner in the other"
    first_view, second_view = [F.normalize(o, dim=1) for o in pred]
    similarity = scale*first_view@second_view.T
    return F.cross_entropy(similarity, torch.arange(len(similarity))).float()


class ClipLoss(nn.Module):
    "Both directions, with a temperature that only the loss has"
    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(1., dtype=torch.float64))

    def forward(self, pred, *targ):
        scale = self.logit_scale.exp()
        there = info_nce(pred, scale=scale)
        back = info_nce(pred[::-1], scale=scale)
        return (there+back)/2


def barlow_twins(pred, *targ):
    "The correlation matrix of the outputs is to be the identity"
    centered = pred-pred.mean(0)
    normed = centered/(pred.std(0)+1e-3)
    correlation = normed.T@normed/len(normed)
    off = correlation-torch.eye(len(correlation), device=pred.device)
    return (off**2).sum()


BATCH_LOSSES = dict(
    info_nce=lambda: info_nce,
    clip=ClipLoss)


# Models

def encoder(dropout=0., norm=nn.LayerNorm):
    torch.manual_seed(0)
    first_layer = nn.Linear(5, 8)
    last_layer = nn.Linear(8, 4)
    m = nn.Sequential(first_layer, norm(8), nn.Tanh(), nn.Dropout(dropout), last_layer)
    return m.double()


class TwoOutputs(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.a = encoder(**kwargs)
        self.b = encoder(**kwargs)
        nn.init.normal_(self.b[0].weight)  # not the same as `a`

    def forward(self, x): return self.a(x), self.b(x)


def learner_of_views(m, *cbs): return make_learner(32, m=m, loss_func=info_nce, cbs=cbs)


def trained(cbs=None, loss='info_nce', make_model=TwoOutputs, n=100, bs=32, n_epoch=2, lr=.05, **kwargs):
    "Returns a Learner that has trained its model, and the weights of its loss, if it has any"
    loss_func = BATCH_LOSSES[loss]()

    def all_params(m):
        return [[*m.parameters(), *getattr(loss_func, 'parameters', list)()]]

    learn = make_learner(bs, n=n, m=make_model(), loss_func=loss_func, cbs=cbs, splitter=all_params, **kwargs)
    return fit(learn, n_epoch, lr, method='fit_one_cycle')


def trained_weights(learn):
    "Returns all that the optimizer has trained, in one vector"
    params = L(learn.opt.param_lists).concat()
    return torch.cat([p.detach().flatten() for p in params])


def buffers(learn):
    return torch.cat([o.double().flatten() for o in learn.model.buffers()])


# The whole batch

@pytest.mark.parametrize('loss,micro,opt_func,lr,tol', [
    *[(loss, 10, SGD, .05, ROUNDING) for loss in BATCH_LOSSES],
    *[('info_nce', micro, SGD, .05, ROUNDING) for micro in (1, 32, 100)],
    ('info_nce', 10, Adam, .001, ADAM_ROUNDING)])
def test_training_equals_that_of_whole_batches(loss, micro, opt_func, lr, tol):
    "Weights of model and loss, and all that is logged"
    plain = trained(None, loss, opt_func=opt_func, lr=lr)
    ours = trained(GradientCache(micro), loss, opt_func=opt_func, lr=lr)
    assert_apart(plain, TwoOutputs())
    assert_same(trained_weights(ours), trained_weights(plain), tol)
    assert len(losses(ours)) == 8
    assert_same_logs(ours, plain, FLOAT32_LOSS)
    assert_same(ours.recorder.lrs, plain.recorder.lrs)
    assert ours.recorder.iters == plain.recorder.iters
    assert ours.gradient_cache.micro_bs == micro


@draws
@given(
    n=st.integers(2, 40),
    bs=st.integers(2, 20),
    micro=st.integers(1, 24),
    loss=st.sampled_from(list(BATCH_LOSSES)))
def test_any_sizes_and_clipped_gradients(n, bs, micro, loss):
    sizes = dict(n=n, bs=bs, n_epoch=1)
    plain = trained([GradientClip(.1)], loss, **sizes)
    ours = trained([GradientClip(.1), GradientCache(micro)], loss, **sizes)
    assert_same(trained_weights(ours), trained_weights(plain), ROUNDING)


def test_a_window_has_the_mean_of_the_losses_of_its_batches():
    "The last one has 36 of 64 samples"
    cbs = [GradientAccumulation(64), GradientCache(4)]
    ours = make_learner(16, n=100, m=TwoOutputs(), loss_func=info_nce, cbs=cbs)
    with pytest.warns(UserWarning, match='accumulation is not exact for this loss'): fit(ours, 1)
    m = TwoOutputs()
    opt = sgd(m.parameters())
    inputs, _ = data(100)
    for sizes in ([16, 16, 16, 16], [16, 16, 4]):
        opt.param_groups[0]['lr'] = .1/sum(sizes)  # instead of a division of the loss, which is in float32
        opt.zero_grad()
        for size in sizes:
            batch, inputs = inputs[:size], inputs[size:]
            (info_nce(m(batch))*size).backward()
        opt.step()
    assert_same_weights(ours, m, ROUNDING)
    assert ours.recorder.accum_bs == [64, 36]
    assert_apart(ours, TwoOutputs())


# Structures


class Body(nn.Module):
    "A body that sees two views of each sample, one after the other, and a head with BatchNorm"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8))
        self.head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.double()

    def views(self, x):
        return self.body(x), self.body(-x)

    def forward(self, x):
        first_view, second_view = self.views(x)
        return self.head(first_view), self.head(second_view)


class TogetherBody(Body):
    "The body sees both views in one tensor"
    def views(self, x):
        both = torch.cat([x, -x])
        return self.body(both).chunk(2)


class KeywordBody(Body):
    "The body is given a nested input by name"
    def __init__(self):
        super().__init__()
        self.body = TakesKeyword(self.body)

    def views(self, x): return self.body(inputs=dict(pair=(x, -x)))


class TakesKeyword(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, inputs): return [self.layers(o) for o in inputs['pair']]


def body(m): return m.body


@pytest.mark.parametrize('make_model', [Body, TogetherBody, KeywordBody])
def test_a_head_with_batch_norm_is_not_split_if_the_body_is_the_part(make_model):
    plain = trained(make_model=make_model, n=96)
    ours = trained(GradientCache(8, part=body), make_model=make_model, n=96)
    assert_apart(plain, Body())
    assert_same_weights(ours, plain, ROUNDING)
    assert_same(buffers(ours), buffers(plain), ROUNDING)
    assert not [m for m in ours.model.modules() if 'forward' in vars(m)]
    assert_apart(trained(GradientCache(8), make_model=make_model, n=96), plain, 1e-4)  # the whole model is split


def test_views_that_a_callback_puts_into_the_batch_count(capsys):
    "As for SimCLR"
    def two_views(cb):
        cb.learn.xb = (torch.cat([cb.x*1.1, cb.x*.9]),)
        cb.learn.yb = (torch.cat([cb.y, cb.y]),)

    def loss_of_views(pred, *targ): return info_nce(pred.chunk(2))

    def simclr(size, *cbs):
        cbs = [Callback(before_batch=two_views), GradientCache(size), *cbs]
        return fit_aloud(make_learner(32, loss_func=loss_of_views, m=encoder(), cbs=cbs))

    whole = simclr(64)
    assert 'Sequential sees at most 64 of 64 samples at a time' in capsys.readouterr().out
    assert_same_weights(simclr('auto', OutOfMemory('after_loss', 1)), whole, ROUNDING)
    assert 'Sequential sees at most 32 of 64 samples at a time' in capsys.readouterr().out
    assert_apart(whole, encoder())


# What a forward pass draws and changes

class InPieces(nn.Module):
    "Runs `m` in pieces, and keeps the activations of all of them for the backward pass"
    def __init__(self, m, most):
        super().__init__()
        self.m = m
        self.most = most

    def forward(self, x):
        if not self.training: return self.m(x)
        # Copies, as micro-batches are: products of matrices are rounded otherwise at another alignment in memory
        n = len(x)
        n_pieces = math.ceil(n/self.most)
        edges = [math.ceil(n*i/n_pieces) for i in range(1, n_pieces)]
        pieces = [o.clone() for o in x.tensor_split(edges)]
        return torch.cat([self.m(o) for o in pieces])


LAYERS = [
    partial(nn.Dropout, .5),
    partial(nn.BatchNorm1d, 5),
    lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5)),
    NewBuffer,
    PythonNoise]
FLOAT32_LAYERS = LAYERS[:3]  # which have no numbers in float64


def state_after_fit(make_layer, micro, amp, is_cached):
    "Returns weights, buffers and losses after a fit, and the next random numbers"
    set_seed(0)
    first_layer = nn.Linear(5, 5)
    last_layer = nn.Linear(5, 4)
    m = nn.Sequential(first_layer, make_layer(), nn.Tanh(), last_layer)
    m = m.float() if amp else m.double()
    before = weights(m)
    cbs = [CpuMixedPrecision(amp, init_scale=256.)] if amp else []
    if is_cached: cbs.append(GradientCache(micro))
    def loss_func(pred, *targ): return info_nce((pred, pred.roll(1, 0)))
    trained = m if is_cached else InPieces(m, micro)
    learn = make_learner(32, m=trained, loss_func=loss_func, cbs=cbs)
    set_seed(3)
    fit(learn, 2, .05)
    assert_apart(m, before)
    next_numbers = [torch.rand(1).item(), random.random(), np.random.rand()]
    return [*m.state_dict().values(), losses(learn), next_numbers]


@pytest.mark.parametrize('make_layer,micro,amp', [
    *[(layer, 7, None) for layer in LAYERS],  # in micro-batches of 6 and 7 samples
    *[(layer, 8, 'bf16') for layer in FLOAT32_LAYERS],
    *[(layer, 7, 'fp16') for layer in FLOAT32_LAYERS]])
def test_a_micro_batch_that_runs_twice_counts_once(make_layer, micro, amp):
    "Bit for bit as where the activations of all micro-batches are kept"
    ours = state_after_fit(make_layer, micro, amp, is_cached=True)
    kept = state_after_fit(make_layer, micro, amp, is_cached=False)
    for a, b in zip(ours, kept, strict=True): assert_same(a, b)


@pytest.mark.long
def test_a_compiled_model_keeps_its_own_forward():
    def compiled(): return torch.compile(TwoOutputs(), backend='eager')
    m = compiled()
    own = vars(m)['forward']
    ours = trained(GradientCache(8), make_model=lambda: m, n_epoch=1)
    plain = trained(n_epoch=1)
    assert_apart(plain, TwoOutputs())
    assert_same_weights(ours, plain, ROUNDING)
    assert vars(m)['forward'] is own


# Memory

def long_chain():
    torch.manual_seed(0)
    layers = []
    for _ in range(20): layers += [nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16*64, 8))


class Peak(Callback):
    "The most bytes that are alive in the last batch, until its step"
    run_valid = False

    def before_batch(self):
        self.live = LiveBytes(self.model)
        self.live.__enter__()

    def before_step(self): self.live.__exit__(None, None, None)


def peak_bytes(*cbs):
    inputs = torch.randn(256, 16, 64)
    samples = list(zip(inputs, torch.zeros(256, 1)))
    train = DataLoader(samples, bs=256)
    valid = DataLoader(samples[:2], bs=2)
    learn = Learner(DataLoaders(train, valid), long_chain(), barlow_twins, opt_func=SGD, cbs=[Peak(), *cbs])
    fit(learn, 1, 1e-3)
    return learn.peak.live.peak


@pytest.mark.filterwarnings('ignore:accumulation is not exact')
@pytest.mark.parametrize('n,at_most', [(16, .15), (64, .5)])
def test_memory_is_that_of_a_micro_batch(n, at_most):
    "Within 5% of that of accumulation in the same micro-batches, where the loss sees each on its own"
    cached = peak_bytes(GradientCache(n))
    accumulated = peak_bytes(GradientAccumulation(micro_batch_size=n))
    assert abs(cached/accumulated-1) < .05
    assert cached < at_most*peak_bytes()


def test_the_size_may_change_between_fits():
    "'auto' keeps what it finds"
    learn = learner_of_views(TwoOutputs(), GradientCache('auto'))
    cb = learn.gradient_cache
    inner = MemoryLimit(learn.model.a)
    fit(learn, 1)
    assert set(inner.in_training) == {32}
    assert cb.micro_bs is None
    fit(learn, 1, cbs=OutOfMemory('after_pred', 1))
    assert cb.micro_bs == 16
    fit(learn, 1)
    assert cb.micro_bs == 16
    cb.micro_batch_size = 8
    inner.in_training.clear()
    fit(learn, 1)
    assert set(inner.in_training) == {8}


@pytest.mark.parametrize('exc,event', [(KeyboardInterrupt, 'after_pred'), (ValueError, 'before_backward')])
def test_nothing_is_alive_after_an_error_between_forward_and_backward_pass(exc, event):
    "The graph refers to what runs a micro-batch again, which Python's garbage collector cannot see"
    learn = learner_of_views(TwoOutputs(), GradientCache(8), Fault(exc, event, nth=1, order=100))
    of_learner = weakref.ref(learn)
    of_model = weakref.ref(learn.model)
    with pytest.raises(exc): fit(learn, 1)
    del learn
    gc.collect()
    assert of_learner() is None
    assert of_model() is None


# Errors

class Returns(nn.Module):
    "Returns `output(views)`"
    def __init__(self, output):
        super().__init__()
        self.m = TwoOutputs()
        self.output = output

    def forward(self, x): return self.output(self.m(x))


def with_a_scale(views): return views[0], views[1].mean().reshape(1)
def with_a_random_number(views): return *views, 7+views[0].numel()*torch.rand(1).item()


@pytest.mark.parametrize('output,micro,says', [
    (info_nce, 8, 'cannot join a Tensor: use dense tensors with a row for each sample'),  # one number for all rows
    (with_a_random_number, 8, 'cannot join a float'),
    (torch.stack, 8, r'shape \(2, 8, 4\) for 8 samples: its first dimension'),
    (torch.stack, 2, r'shape \(2, 3, 4\) for 3 samples'),  # the shape of two views is that of two samples
    (with_a_scale, 2, r'shape \(1,\) for 3 samples: its first dimension')])  # as many outputs as samples
def test_outputs_that_cannot_be_joined_are_an_error_before_the_first_step(output, micro, says):
    assert_refused(learner_of_views(Returns(output), GradientCache(micro)), NotBySample, says)


def one_for_each_sample(views): return views[0].unbind()
def losses_of_samples(pred, *targ): return barlow_twins(torch.stack([*pred])).float()


@pytest.mark.parametrize('micro', [1, 8, 3])
def test_a_model_may_return_a_tensor_for_each_sample(micro):
    "The last batch has 4 samples"
    def train(*cbs):
        m = Returns(one_for_each_sample)
        return fit(make_learner(32, n=68, m=m, loss_func=losses_of_samples, cbs=cbs))
    plain = train()
    assert_same_weights(train(GradientCache(micro)), plain, ROUNDING)
    assert_apart(plain, TwoOutputs())


def test_a_part_that_is_not_in_the_model_is_an_error_before_the_first_step():
    learn = learner_of_views(TwoOutputs(), GradientCache(8, lambda m: nn.Tanh()))
    assert_refused(learn, ValueError, 'part must return modules of the model, not a Tanh')


def test_only_one_callback_may_split_batches():
    learn = learner_of_views(TwoOutputs(), GradientCache(8), GradientAccumulation(micro_batch_size=4))
    assert_refused(learn, ValueError, 'GradientCache and the micro_batch_size of another callback both split batches')


class TokensFirst(nn.Module):
    "Its body sees [tokens, samples, 5]"
    def __init__(self, n_tokens):
        super().__init__()
        torch.manual_seed(0)
        self.n_tokens = n_tokens
        self.body = nn.TransformerEncoderLayer(5, 1, 8, dropout=0.).double()

    def forward(self, x):
        tokens = torch.stack([x.roll(i, 1) for i in range(self.n_tokens)])
        return self.body(tokens).mean(0), x


@pytest.mark.parametrize('n_tokens', [3, 16])
def test_tokens_come_first_inside_a_model_that_is_split_but_not_in_its_part(n_tokens):
    plain = TokensFirst(n_tokens)
    ours = fit(learner_of_views(TokensFirst(n_tokens), GradientCache(8)))
    whole = fit(learner_of_views(TokensFirst(n_tokens)))
    assert_same_weights(ours, whole, ROUNDING)
    assert_apart(whole, plain)
    learn = learner_of_views(TokensFirst(n_tokens), GradientCache(2, body))
    assert_refused(learn, ValueError, 'cannot split a tensor of shape')
