"GradientCache: the loss compares all samples of a batch, while the model sees a micro-batch at a time"
import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.counts import LiveBytes
from common import *
from stateful import *
from fastxtend_accum import cache
from fastxtend_accum.cache import graph_between

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


def hardest_triplets(pred, targ):
    "For each row, the hardest others in the batch. Classes are the signs of the targets"
    rows, _ = pred
    is_positive = targ[:, 0] > 0
    is_same = is_positive[:, None] == is_positive
    distance = torch.cdist(rows, rows)
    farthest = (distance*is_same).max(1).values
    nearest = distance.masked_fill(is_same, 1e9).min(1).values
    return F.relu(farthest-nearest+1).mean().float()


def batch_dice(pred, targ):
    "The ratio of sums over the batch"
    probability = pred[0].sigmoid()
    truth = (targ > 0).double()
    overlap = (probability*truth).sum()
    total = probability.sum()+truth.sum()
    dice = (2*overlap+1)/(total+1)
    return (1-dice).float()


def barlow_twins(pred, *targ):
    "The correlation matrix of the outputs is to be the identity"
    centered = pred-pred.mean(0)
    normed = centered/(pred.std(0)+1e-3)
    correlation = normed.T@normed/len(normed)
    off = correlation-torch.eye(len(correlation))
    return (off**2).sum()


BATCH_LOSSES = dict(
    info_nce=lambda: info_nce,
    clip=ClipLoss,
    triplets=lambda: hardest_triplets,
    dice=lambda: batch_dice)


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


def assert_moved_from(learn, m):
    "Asserts that training has changed the weights of `m`"
    assert (weights(learn)-weights(m)).abs().max() > 1e-3


# The whole batch

@pytest.mark.parametrize('loss,micro,opt_func,lr,tol', [
    *[(loss, 10, SGD, .05, ROUNDING) for loss in BATCH_LOSSES],
    *[('info_nce', micro, SGD, .05, ROUNDING) for micro in (1, 8, 32, 100)],
    ('info_nce', 10, Adam, .001, ADAM_ROUNDING)])
def test_training_equals_that_of_whole_batches(loss, micro, opt_func, lr, tol):
    "Weights of model and loss, and all that is logged"
    plain = trained(None, loss, opt_func=opt_func, lr=lr)
    ours = trained(GradientCache(micro), loss, opt_func=opt_func, lr=lr)
    assert_moved_from(plain, TwoOutputs())
    assert_same(trained_weights(ours), trained_weights(plain), tol)
    assert len(losses(ours)) == 8
    assert_same(losses(ours), losses(plain), FLOAT32_LOSS)
    assert_same(floats(ours.recorder.values), floats(plain.recorder.values), FLOAT32_LOSS)
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
    assert_same(weights(ours), weights(m), ROUNDING)
    assert ours.recorder.accum_bs == [64, 36]
    assert_moved_from(ours, TwoOutputs())


# Structures

class Clip(nn.Module):
    "Two encoders with nested inputs and outputs; the loss reads `logit_scale`, which a callback clamps"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Linear(5, 4)
        self.text = nn.Linear(1, 4)
        self.logit_scale = nn.Parameter(torch.tensor(1.))
        self.sizes = set()
        self.double()

    def forward(self, batch):
        images = batch['images']
        texts = torch.tensor(batch['texts']).double()
        self.sizes.add(len(images))
        pairs = self.image(images), self.text(texts)
        return dict(pairs=pairs, nothing=None)

    def loss(self, pred, *targ):
        return info_nce(pred['pairs'], scale=self.logit_scale.exp())


def clamp_logit_scale(cb):
    cb.model.logit_scale.data.clamp_(0, 1.2)


def trained_clip(*cbs):
    inputs, targets = data(96)
    batches = []
    for images, texts in zip(inputs.split(32), targets.split(32)):
        batches.append((dict(images=images, texts=texts.tolist()), texts))
    dl = torch.utils.data.DataLoader(batches, batch_size=None)
    dl.bs = 32
    m = Clip()
    clamp = Callback(after_step=clamp_logit_scale)
    learn = Learner(DataLoaders(dl, dl), m, m.loss, opt_func=SGD, cbs=[clamp, *cbs])
    return fit(learn)


def test_clip_with_nested_inputs_and_outputs():
    plain = trained_clip()
    ours = trained_clip(GradientCache(8))
    assert_same(weights(ours), weights(plain), ROUNDING)
    assert ours.model.sizes == {8}
    assert_moved_from(plain, Clip())
    assert plain.model.logit_scale != 1
    with pytest.warns(UserWarning, match='accumulation is not exact for this loss'):
        splits_loss = trained_clip(GradientAccumulation(micro_batch_size=8))
    assert_moved_from(splits_loss, plain.model)


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


def body(m): return m.body


@pytest.mark.parametrize('make_model,rows', [(Body, 1), (TogetherBody, 2)])
def test_a_head_with_batch_norm_is_not_split_if_the_body_is_the_part(make_model, rows):
    plain = trained(make_model=make_model, n=96)
    ours = trained(GradientCache(8, part=body, rows=rows), make_model=make_model, n=96)
    assert_moved_from(plain, Body())
    assert_same(weights(ours), weights(plain), ROUNDING)
    assert_same(buffers(ours), buffers(plain), ROUNDING)
    assert not [m for m in ours.model.modules() if 'forward' in vars(m)]


def test_a_head_with_batch_norm_differs_if_the_whole_model_is_split():
    plain = trained(make_model=Body, n=96)
    ours = trained(GradientCache(8), make_model=Body, n=96)
    assert (weights(ours)-weights(plain)).abs().max() > 1e-4


def test_a_callback_may_put_two_views_of_each_sample_into_the_batch():
    "As for SimCLR"
    def two_views(cb):
        both = torch.cat([cb.x*1.1, cb.x*.9])
        cb.learn.xb = (both,)
        cb.learn.yb = (torch.cat([cb.y, cb.y]),)

    def loss_of_views(pred, *targ): return info_nce(pred.chunk(2))

    def simclr(*cbs):
        cbs = [Callback(before_batch=two_views), *cbs]
        return fit(make_learner(32, loss_func=loss_of_views, m=encoder(), cbs=cbs))

    plain = simclr()
    assert_same(weights(simclr(GradientCache(16))), weights(plain), ROUNDING)
    assert_moved_from(plain, encoder())


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
        n_pieces = math.ceil(len(x)/self.most)
        pieces = [o.clone() for o in x.tensor_split(n_pieces)]
        return torch.cat([self.m(o) for o in pieces])


LAYERS = [
    partial(nn.Dropout, .5),
    partial(nn.BatchNorm1d, 5),
    lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5)),
    NewBuffer,
    OnlyInTuple,
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
    assert (weights(m)-before).abs().max() > 1e-3
    next_numbers = [torch.rand(1).item(), random.random(), np.random.rand()]
    return [*m.state_dict().values(), losses(learn), next_numbers]


@pytest.mark.parametrize('make_layer,micro,amp', [
    *[(layer, 8, None) for layer in LAYERS],
    *[(layer, 7, None) for layer in LAYERS],  # 7+7+6+6+6 samples
    *[(layer, 7, 'bf16') for layer in FLOAT32_LAYERS],
    *[(layer, 7, 'fp16') for layer in FLOAT32_LAYERS]])
def test_a_micro_batch_that_runs_twice_counts_once(make_layer, micro, amp):
    "Bit for bit as where the activations of all micro-batches are kept"
    ours = state_after_fit(make_layer, micro, amp, is_cached=True)
    kept = state_after_fit(make_layer, micro, amp, is_cached=False)
    for a, b in zip(ours, kept, strict=True): assert_same(a, b)


def test_a_compiled_model_keeps_its_own_forward():
    def compiled(): return torch.compile(TwoOutputs(), backend='aot_eager')
    m = compiled()
    own = vars(m)['forward']
    ours = trained(GradientCache(8), make_model=lambda: m, n_epoch=1)
    plain = trained(n_epoch=1)
    assert_moved_from(plain, TwoOutputs())
    assert_same(weights(ours), weights(plain), ROUNDING)
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


class Limited(TwoOutputs):
    "Has memory for 9 samples in training"
    def __init__(self):
        super().__init__(dropout=.3, norm=nn.BatchNorm1d)
        self.float()
        self.used_autocast = set()

    def forward(self, x):
        if self.training:
            self.used_autocast.add(torch.is_autocast_enabled('cpu'))
            if len(x) > 9: raise torch.OutOfMemoryError('CUDA out of memory')
        return super().forward(x)


@pytest.mark.parametrize('cb_type,uses_autocast', [(Callback, False), (partial(CpuMixedPrecision, 'bf16'), True)])
def test_auto_finds_the_size_that_fits(cb_type, uses_autocast):
    "Under autocast, if training is; and training is that with this size"
    def trained_with(size):
        return trained([cb_type(), GradientCache(size)], make_model=Limited)

    auto = trained_with('auto')
    fixed = trained_with(8)
    assert auto.gradient_cache.micro_bs == 8
    assert_moved_from(auto, Limited())
    assert_same(weights(auto), weights(fixed))
    assert_same(buffers(auto), buffers(fixed))
    assert auto.model.used_autocast == {uses_autocast}
    assert not torch.is_autocast_enabled('cpu')


@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'before_backward'])
@pytest.mark.parametrize('exc', [KeyboardInterrupt, ValueError])
def test_nothing_is_alive_after_an_error_between_forward_and_backward_pass(exc, event):
    "The graph refers to what runs a micro-batch again, which Python's garbage collector cannot see"
    cbs = [GradientCache(8), Fault(exc, event, nth=1, order=100)]
    learn = make_learner(32, m=TwoOutputs(), loss_func=info_nce, cbs=cbs)
    of_learner = weakref.ref(learn)
    of_model = weakref.ref(learn.model)
    with pytest.raises(exc): fit(learn, 1)
    del learn
    del cbs
    gc.collect()
    assert of_learner() is None
    assert of_model() is None


# Validation

@pytest.mark.parametrize('part,sizes', [(None, [8, 8, 4]), (body, [16, 4])])
def test_validation_and_prediction_give_the_results_of_whole_batches(part, sizes):
    "Of 20 samples in batches of 16. With a part, the model sees them whole, and its part does not"
    seen = []

    class Sees(Body):
        def forward(self, x):
            seen.append(len(x))
            return super().forward(x)

    def results():
        seen.clear()
        with quiet(learn):
            preds, _ = learn.get_preds(act=noop)
            return [*preds, learn.validate()[0]]

    learn = make_learner(32, m=Sees(), loss_func=info_nce, cbs=GradientCache(8, part=part))
    fit(learn, 1)
    ours = results()
    assert seen == [*sizes, *sizes]
    learn.remove_cb(GradientCache)
    plain = results()
    assert seen == [16, 4, 16, 4]
    for a, b in zip(ours, plain, strict=True): assert_same(a, b, FLOAT32_LOSS)


# Outputs that cannot be joined

class MayReturnNumber(TwoOutputs):
    "In training it may return one number for all rows, which is different for each micro-batch"
    returns_number = True

    def __init__(self):
        super().__init__(dropout=.3, norm=nn.BatchNorm1d)

    def forward(self, x):
        views = super().forward(x)
        if self.training and self.returns_number: return info_nce(views)
        return views


def number_or_info_nce(pred, *targ):
    return pred if isinstance(pred, Tensor) else info_nce(pred)


def learner_of_number(*cbs):
    return make_learner(32, m=MayReturnNumber(), loss_func=number_or_info_nce, cbs=cbs)


def test_a_batch_whose_outputs_cannot_be_joined_runs_whole():
    "With one warning, and as if nobody had tried to split it: statistics and random numbers, too"
    plain = learner_of_number()
    ours = learner_of_number(GradientCache(8))
    set_seed(0)
    fit(plain)
    set_seed(0)
    with pytest.warns(UserWarning) as warned: fit(ours)
    assert len(warned) == 1
    says = r'GradientCache does not split batches: cannot join outputs of shape \(\) from a micro-batch of 8 samples'
    assert re.match(says, str(warned[0].message))
    assert_moved_from(plain, MayReturnNumber())
    assert_same(weights(ours), weights(plain))
    assert_same(buffers(ours), buffers(plain))
    assert_same(losses(ours), losses(plain))


@pytest.mark.filterwarnings('ignore:GradientCache does not split batches')
@pytest.mark.parametrize('size', [8, 'auto'])
def test_a_batch_that_runs_whole_is_not_said_to_be_split(size, capsys):
    fit_aloud(learner_of_number(GradientCache(size)), 1)
    assert 'is split into' not in capsys.readouterr().out


sizes_of_runs = []  # not in the model, whose state is put back after a run without success


class NeverFits(MayReturnNumber):
    "Has memory for 9 samples in training, and returns one number for all rows"
    def forward(self, x):
        sizes_of_runs.append(len(x))
        if self.training and len(x) > 9: raise torch.OutOfMemoryError('CUDA out of memory')
        return super().forward(x)


@pytest.mark.filterwarnings('ignore:GradientCache does not split batches')
def test_a_batch_that_cannot_be_split_is_not_split_further_if_memory_runs_out():
    """32 and 16 samples do not fit, and the outputs of micro-batches of 8 cannot be joined. So the batch runs whole,
    and once more without keeping room for the optimizer"""
    sizes_of_runs.clear()
    learn = make_learner(32, m=NeverFits(), loss_func=number_or_info_nce, cbs=GradientCache('auto'))
    says = 'cannot be joined: let the model return a row for each sample'
    with pytest.raises(RuntimeError, match=says): fit(learn, 1)
    assert sizes_of_runs == [32, 16, 8, 8, 8, 8, 32, 32]


class SetsUpForPass(Callback):
    def before_batch(self): "Sets something up"
    def after_pred(self): "Takes it back"


def test_the_warning_of_what_is_set_up_for_a_pass_comes_once_in_a_fit():
    "Also where another callback runs the batches"
    learn = make_learner(32, cbs=[SetsUpForPass(), GradientCache(8), GradientAccumulation(32)])
    with pytest.warns(UserWarning) as warned: fit(learn, 3)
    says = 'GradientCache runs micro-batches again in the backward pass, after after_pred of SetsUpForPass'
    assert len([o for o in warned if says in str(o.message)]) == 1


def test_batches_are_split_again_once_the_model_is_repaired():
    sizes = set()

    def note(module, args):
        if module.training: sizes.add(len(args[0]))

    learn = learner_of_number(GradientCache(8))
    learn.model.a.register_forward_pre_hook(note)
    with pytest.warns(UserWarning, match='does not split batches'): fit(learn, 1)
    assert sizes == {8, 32}
    sizes.clear()
    learn.model.returns_number = False
    fit(learn, 1)
    assert sizes == {8}


# Errors

class BodyInList(Body):
    "A list has no forward"
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([self.body])


@pytest.mark.parametrize('make_model,part,says', [
    (TogetherBody, body, 'if a module sees several rows of each sample, set rows to their number, such as rows=2'),
    (BodyInList, body, 'part must return a module of the model that has a forward, not a ModuleList'),
    (TwoOutputs, lambda m: nn.Tanh(), 'part must return a module of the model that has a forward, not a Tanh')])
def test_a_part_that_cannot_be_split_is_an_error_before_the_first_step(make_model, part, says):
    learn = make_learner(32, m=make_model(), loss_func=info_nce, cbs=GradientCache(8, part))
    before = weights(learn)
    with pytest.raises(ValueError, match=says): fit(learn, 1)
    assert_same(weights(learn), before)


def test_only_one_callback_may_split_batches():
    cbs = [GradientCache(8), GradientAccumulation(micro_batch_size=4)]
    learn = make_learner(32, m=TwoOutputs(), loss_func=info_nce, cbs=cbs)
    says = 'GradientCache and micro_batch_size=4 beside it both split batches: leave one of them out'
    with pytest.raises(ValueError, match=says): fit(learn, 1)


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


def learner_of_tokens(n_tokens, *args):
    return make_learner(32, m=TokensFirst(n_tokens), loss_func=info_nce, cbs=GradientCache(*args))


@pytest.mark.parametrize('n_tokens', [3, 16, 32])
def test_a_model_that_puts_tokens_first_may_be_split(n_tokens):
    ours = fit(learner_of_tokens(n_tokens, 8))
    whole = fit(learner_of_tokens(n_tokens, 32))
    assert_same(weights(ours), weights(whole), ROUNDING)
    assert_moved_from(whole, TokensFirst(n_tokens))


@pytest.mark.parametrize('n_tokens', [3, 16, 32])
def test_a_part_that_sees_tokens_first_is_an_error(n_tokens):
    "Also if they are as many as the samples, in training or in validation"
    learn = learner_of_tokens(n_tokens, 8, body)
    with pytest.raises(ValueError, match='cannot split a tensor of shape'): fit(learn, 1)
    assert_same(weights(learn), weights(TokensFirst(n_tokens)))


@pytest.mark.parametrize('n_tokens', [16, 32])
def test_a_part_that_sees_tokens_first_is_an_error_in_validation(n_tokens):
    learn = learner_of_tokens(n_tokens, 8, body)
    with quiet(learn), pytest.raises(ValueError, match='cannot split a tensor of shape'): learn.validate()


def test_so_few_tokens_that_none_is_split_are_fine_in_validation():
    ours = learner_of_tokens(3, 8, body)
    whole = learner_of_tokens(3, 32)
    with quiet(ours), quiet(whole):
        loss_of_whole = whole.validate()
        assert_same(ours.validate(), loss_of_whole)


# A loss that reads what the model keeps, which is that of a micro-batch

class Keeps(nn.Module):
    "Keeps what it knows of its samples, and a number for all of them"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.double()

    def forward(self, x):
        self.hidden = self.body(x)
        self.scale = self.log_scale.exp()
        self.body.term = self.hidden.pow(2).mean()
        return self.head(self.hidden)*self.scale


def trained_keeping(reads, *cbs):
    def loss(pred, targ):
        error = F.mse_loss(pred, targ)
        return (error*(1+reads(m))).float()

    m = Keeps()
    return fit(make_learner(32, m=m, cbs=cbs, loss_func=loss), 2)


def nothing(m): return 0.
def hidden(m): return m.hidden.pow(2).mean()
def term(m): return m.body.term
def scale(m): return m.scale


class AddsTerm(Callback):
    "As for distillation"
    def before_fit(self): self.hook = hook_output(self.model.body, detach=False)

    def after_loss(self):
        term = self.hook.stored.pow(2).mean()
        self.learn.loss_grad = self.loss_grad+term.float()


@pytest.mark.filterwarnings('ignore:after_loss of AddsTerm')
@pytest.mark.parametrize('reads,cb_type', [(hidden, Callback), (term, Callback), (nothing, AddsTerm)])
def test_a_loss_that_reads_what_the_model_keeps_is_an_error(reads, cb_type):
    "Or to which a callback adds it. Batches that are not split are fine"
    says = 'the loss reads what the model keeps, and GradientCache has that of a micro-batch only'
    with pytest.raises(ValueError, match=says):
        trained_keeping(reads, GradientCache(8), cb_type())
    trained_keeping(reads, GradientCache(32), cb_type())


class TwoRuns(nn.Module):
    "Its body runs twice, and keeps what it knows from the run that is `kept`"
    def __init__(self, kept):
        super().__init__()
        torch.manual_seed(0)
        self.body = KeepsRun(kept)
        self.double()

    def forward(self, x):
        self.body.n_runs = 0
        return self.body(x)+self.body(x.flip(1))


class KeepsRun(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.kept = kept
        self.layer = nn.Linear(5, 1)

    def forward(self, x):
        res = self.layer(x)
        if self.n_runs//4 == self.kept: self.term = res.pow(2).mean()  # of four micro-batches
        self.n_runs += 1
        return res


@pytest.mark.parametrize('kept', [0, 1])
def test_a_loss_that_reads_what_any_run_of_a_module_keeps_is_an_error(kept):
    m = TwoRuns(kept)
    def loss(pred, targ): return (F.mse_loss(pred, targ)+m.body.term).float()
    learn = make_learner(32, m=m, loss_func=loss, cbs=GradientCache(8, part=lambda m: m.body))
    with pytest.raises(ValueError, match='the loss reads what the model keeps'): fit(learn, 1)


@pytest.mark.parametrize('reads', [scale, nothing])
def test_a_loss_may_read_a_number_that_is_the_same_for_all_samples(reads):
    plain = trained_keeping(reads)
    ours = trained_keeping(reads, GradientCache(8))
    assert_same(weights(ours), weights(plain), ROUNDING)
    assert_moved_from(plain, Keeps())


def test_the_graph_between_outputs_and_inputs():
    "Without the operations that have computed the inputs, and without those that stand for weights"
    weight = torch.ones(2, requires_grad=True)
    before = weight*2
    middle = before.exp()
    after = middle.sin()+weight
    names = [type(node).__name__ for node in graph_between([after], [before])]
    assert sorted(names) == ['AddBackward0', 'ExpBackward0', 'SinBackward0']
    assert graph_between([before], [before]) == set()


def test_the_graph_is_searched_in_the_first_batch_of_an_epoch_only(monkeypatch):
    "It has as many operations as the model"
    searched = set()

    def note(*args):
        searched.add((learn.epoch, learn.iter))
        return graph_between(*args)

    monkeypatch.setattr(cache, 'graph_between', note)
    learn = make_learner(32, m=TwoOutputs(), loss_func=info_nce, cbs=GradientCache(8))
    fit(learn, 2)
    assert len(losses(learn)) == 2*3
    assert searched == {(0, 0), (1, 0)}
