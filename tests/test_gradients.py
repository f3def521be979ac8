"The gradients of a window: summed, averaged, and guarded against whoever else makes or changes them"
import pytest
from fastai.vision.gan import AdaptiveGANSwitcher, FixedGANSwitcher, GANLearner

from common import *
from labels import SkipValidation
from layouts import each_layout
from fastxtend_accum.windows.gradients import GradientSums, WindowParams, divide_gradients, is_finite

TORCH_SGD = partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9)


# Sums

def sums_of(m):
    learn = make_learner(8, m=m)
    learn.create_opt()
    return GradientSums(WindowParams(learn))


class EmbeddingAndWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 2, sparse=True)
        self.weight = nn.Parameter(torch.zeros(1))
        self.bfloat16()


def test_sums_in_float32_of_gradients_that_are_sparse_or_come_in_some_batches_only():
    "In bfloat16, 256 + 1 is 256"
    m = EmbeddingAndWeight()
    sums = sums_of(m)
    for i in range(512):
        loss = m.embedding(tensor([3, 3, 7])).sum()
        if i%2 == 0:
            loss = loss+2*m.weight
        loss.backward()
    assert m.weight.grad.dtype is torch.float32
    divide_gradients(m.parameters(), 512)
    sums.end()
    dense = m.embedding.weight.grad.to_dense()
    assert dense[[3, 7]].tolist() == [[2., 2.], [1., 1.]]
    assert m.weight.grad.item() == 1
    assert m.weight.grad.dtype is dense.dtype is torch.bfloat16


@pytest.mark.parametrize('value, expected', [(3e38, True), (math.inf, False), (math.nan, False)])
@pytest.mark.parametrize('is_sparse', [False, True])
def test_whether_gradients_are_finite(is_sparse, value, expected):
    "Also of a parameter without elements, and of one without a gradient"
    params = [nn.Parameter(torch.zeros(n)) for n in (2, 0, 1)]
    grad = tensor([1., value])
    params[0].grad = grad.to_sparse() if is_sparse else grad
    params[1].grad = torch.zeros(0)
    assert is_finite(params) == expected


# Changes in the middle of a window

class ChangesGradient(Callback):
    "Calls `change(learn)` after the backward pass, of the `nth` micro-batch or of each"
    def __init__(self, change, nth=None):
        self.change = change
        self.nth = nth
        self.n = 0

    def after_backward(self):
        self.n += 1
        if self.nth in (None, self.n):
            self.change(self.learn)


def zero(learn):
    learn.opt.zero_grad()
def clip(learn):
    nn.utils.clip_grad_norm_(learn.model.parameters(), 1e-3)
def attack(learn):
    F.mse_loss(learn.model(learn.x+.01), learn.y).backward()
def freeze(learn):
    learn.model[0].requires_grad_(False)


def replace_by_centred(learn):
    for p in learn.model.parameters():
        if p.ndim > 1:
            p.grad = p.grad-p.grad.mean(0)


CHANGES = [zero, replace_by_centred, clip, attack, freeze]


def test_a_gradient_that_is_replaced_is_noticed():
    "Neither the old one nor the new one was ever changed in place"
    m = nn.Linear(2, 1)
    m.weight.grad = torch.ones(1, 2)
    sums = sums_of(m)
    sums.check()
    m.weight.grad = torch.zeros(1, 2)
    with pytest.raises(RuntimeError, match='replaced'): sums.check()


SEVERAL_MICRO_BATCHES = [
    (8, lambda: [GradientAccumulation(32)]),
    (32, lambda: [GradientAccumulation(micro_batch_size=8)]),
    # Gradients of earlier batches are set aside while a batch runs that may run again. They must not hide the change
    (8, lambda: [GradientAccumulation(32, micro_batch_size='auto')]),
    (8, lambda: [GradientAccumulation(32), ActivationCheckpointing()])]


@pytest.mark.parametrize('change', CHANGES)
@pytest.mark.parametrize('bs, make_cbs', SEVERAL_MICRO_BATCHES)
def test_a_gradient_changed_in_mid_window_is_an_error(change, bs, make_cbs):
    "In the first window, which says what to do"
    learn = make_learner(bs, cbs=[*make_cbs(), ChangesGradient(change)], opt_func=TORCH_SGD)
    assert_refused(learn, RuntimeError, 'zeroed, replaced or changed.*in before_step, or use windows of one batch')


@each_layout
def test_a_gradient_changed_after_the_last_micro_batch_is_an_error(bs, settings):
    "It is not averaged yet: a sum of four would be clipped as if it were the mean"
    cbs = [GradientAccumulation(**settings), ChangesGradient(clip, nth=4)]
    assert_refused(make_learner(bs, cbs=cbs), RuntimeError, 'in the middle of a window')


@pytest.mark.parametrize('change', CHANGES)
def test_a_gradient_changed_in_a_window_of_one_batch_is_the_plain_fit(change):
    def train(*cbs):
        learn = make_learner(32, cbs=[*cbs, ChangesGradient(change)], opt_func=TORCH_SGD)
        return weights(fit(learn, 1))
    plain = train()
    for cb in (GradientAccumulation(32), ActivationCheckpointing()):
        assert_same(train(cb), plain)


# Hooks on parameters

def masked(grad):
    return grad if grad.ndim > 1 else torch.zeros_like(grad)


def train_with_hooks(bs, cb=None):
    "Trains weight matrices only"
    m = model()
    for p in m.parameters():
        p.register_hook(masked)
    return fit(make_learner(bs, m=m, cbs=cb), 1)


@each_layout
def test_a_warning_of_hooks_that_act_on_several_micro_batches(bs, settings):
    "Masks are exact; where a window is one batch there is nothing to warn of, and a warning would be an error here"
    with pytest.warns(UserWarning, match='parameters have hooks'):
        learn = train_with_hooks(bs, GradientAccumulation(**settings))
    big = train_with_hooks(32)
    assert_trained_as(learn, big)
    for cb in (GradientAccumulation(32), ActivationCheckpointing()):
        assert_same_weights(train_with_hooks(32, cb), big)


# Networks that take turns

def network(n_out):
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, n_out))


def gan(bs, *cbs, switcher):
    "Returns a GANLearner of 96 samples"
    inputs, _ = data(96)
    targets, _ = data(96, seed=2)
    torch.manual_seed(1)
    generator = network(5)
    critic = network(1)
    samples = list(zip(inputs.float(), targets.float()+1))
    dl = DataLoader(samples, bs=bs)
    settings = dict(switcher=switcher(), clip=.05, opt_func=SGD, show_img=False)
    learn = GANLearner.wgan(DataLoaders(dl, dl), generator, critic, cbs=L(cbs), **settings)
    learn.recorder.train_metrics = False
    return learn


@pytest.mark.parametrize('bs, settings, tol, switcher', [
    (32, dict(micro_batch_size='auto'), 0., partial(FixedGANSwitcher, 1, 2)),
    (8, dict(accum_bs=32), 1e-7, partial(AdaptiveGANSwitcher, .7, .7))])  # float32
def test_networks_of_a_gan_take_turns_by_windows(bs, settings, tol, switcher):
    "As by batches of that size"
    before = weights(gan(32, switcher=switcher))
    big = fit(gan(32, switcher=switcher), 2)
    learn = fit(gan(bs, GradientAccumulation(**settings), switcher=switcher), 2)
    assert_apart(big, before)
    assert_same_weights(learn, big, tol)
    assert len(losses(learn)) == len(losses(big)) == 6


# Models of other kinds

class Bag(nn.Module):
    "A sparse embedding, a frozen parameter, and some without any gradient"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 4, sparse=True)
        self.head = nn.Linear(4, 1)
        self.unused = nn.Linear(3, 3)
        self.double()
        self.head.bias.requires_grad_(False)

    def forward(self, inputs):
        ids = (inputs.abs()*6).long().clamp(max=19)
        return self.head(self.embedding(ids).mean(1))


def lazy():
    torch.manual_seed(0)
    m = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))
    return m.double()


def train_other(make, bs, cb=None):
    cbs = [SkipValidation(), *L(cb)]
    learn = make_learner(bs, n=88, cbs=cbs, opt_func=TORCH_SGD, m=make())
    return weights(fit(learn, 2))


@pytest.mark.parametrize('bs, settings, tol', [
    (8, dict(accum_bs=32), ROUNDING),
    (32, dict(micro_batch_size=8), ROUNDING),
    (32, dict(accum_bs=32), 0.)])
@pytest.mark.parametrize('make', [Bag, lazy])
def test_models_of_other_kinds_equal_the_large_batch(make, bs, settings, tol):
    big = train_other(make, 32)
    assert_apart(train_other(make, 8), big)
    assert_same(train_other(make, bs, GradientAccumulation(**settings)), big, tol)


def prune(self):
    "Replaces a parameter and the optimizer after the first step"
    if not self.training or self.train_iter != 1: return
    layer = self.model[0]
    layer.weight = nn.Parameter(layer.weight.detach()*.5)
    self.learn.create_opt()
    self.opt.set_hyper('lr', .1)


def test_parameters_that_a_callback_replaces_in_mid_epoch():
    "In windows of 24 samples, whose weights add up to 1.5, so that each sum is divided"
    large = fit(make_learner(24, cbs=Callback(after_batch=prune)), 1)
    small = fit(make_learner(8, cbs=[GradientAccumulation(24), Callback(after_batch=prune)]), 1)
    assert_apart(large, fit(make_learner(24), 1))
    assert_same_weights(small, large, ROUNDING)
