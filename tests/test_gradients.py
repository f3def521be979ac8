"The gradients of a window: summed, averaged, and guarded against whoever else makes or changes them"
import weakref

import pytest
from fastai.vision.gan import AdaptiveGANSwitcher, FixedGANSwitcher, GANLearner

from common import *
from labels import SkipValidation
from layouts import each_layout
from fastxtend_accum.windows.gradients import GradientSums, WindowParams, add_in_float32, average_gradients, is_finite


# Sums

def test_sums_in_float32_of_gradients_that_are_sparse_or_come_in_some_batches_only():
    "A weight that the last micro-batch does not use keeps the gradient of the others"
    embedding = nn.Embedding(10, 2, sparse=True).bfloat16()
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    params = [embedding.weight, weight]
    sums = {}
    for i in range(512):
        loss = embedding(tensor([3, 3, 7])).sum()
        if i%2 == 0:
            loss = loss+2*weight
        loss.backward()
        add_in_float32(params, sums)
        assert embedding.weight.grad is None
        assert weight.grad is None
    average_gradients(params, 512, sums)
    dense = embedding.weight.grad.to_dense()
    assert dense[[3, 7]].tolist() == [[2., 2.], [1., 1.]]
    assert weight.grad.item() == 1
    assert not sums, 'not all exist in both precisions'


@pytest.mark.parametrize('value, expected', [
    (3e38, True),
    (math.inf, False),
    (math.nan, False)])
def test_whether_gradients_are_finite(value, expected):
    "Also of a parameter without elements, and of one without a gradient"
    params = [nn.Parameter(torch.zeros(n)) for n in (2, 0, 1)]
    params[0].grad = tensor([1., value])
    params[1].grad = torch.zeros(0)
    assert is_finite(params) == expected


def sums_of(m, begins_with_grads):
    learn = make_learner(8, m=m)
    learn.create_opt()
    return GradientSums(WindowParams(learn), begins_with_grads)


def test_gradients_from_before_a_window_are_added_to_its_mean():
    "They have no weight, so that they are set aside while it is summed; and they are added once"
    m = nn.Linear(1, 1, bias=False)
    m.weight.grad = tensor([[100.]])
    sums = sums_of(m, begins_with_grads=True)
    assert m.weight.grad is None
    for grad in (1., 3.):
        m(tensor([[grad]])).sum().backward()
    sums.average(2)
    assert m.weight.grad.item() == 100+(1+3)/2
    sums.add_earlier()
    assert m.weight.grad.item() == 102


def test_gradients_from_before_a_window_are_zeros_otherwise():
    m = nn.Linear(1, 1, bias=False)
    m.weight.grad = tensor([[0.]])
    sums = sums_of(m, begins_with_grads=False)
    assert m.weight.grad is not None
    assert not sums.has_earlier()


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


def set_to_none(learn):
    learn.model.zero_grad()


def clip(learn):
    nn.utils.clip_grad_norm_(learn.model.parameters(), 1e-3)


def clip_head_by_value(learn):
    nn.utils.clip_grad_value_(learn.model[-1].parameters(), 1e-3)


def attack(learn):
    F.mse_loss(learn.model(learn.x+0.01), learn.y).backward()


def freeze(learn):
    learn.model[0].requires_grad_(False)


def replace_by_centred(learn):
    for p in learn.model.parameters():
        if p.ndim > 1:
            p.grad = p.grad-p.grad.mean(0)


CHANGES = [zero, set_to_none, replace_by_centred, clip, clip_head_by_value, attack, freeze]
TORCH_SGD = partial(OptimWrapper, opt=torch.optim.SGD, momentum=0.9)


@each_layout
@pytest.mark.parametrize('change', CHANGES)
def test_a_gradient_changed_in_mid_window_is_an_error(change, bs, settings):
    "In the first window, which says what to do"
    cbs = [GradientAccumulation(**settings), ChangesGradient(change)]
    learn = make_learner(bs, cbs=cbs, opt_func=TORCH_SGD)
    with pytest.raises(RuntimeError, match='zeroed, replaced or changed.*in before_step, or use windows of one batch'):
        fit(learn, 1)
    assert_same(weights(learn), weights(model()))


@each_layout
def test_a_gradient_changed_after_the_last_micro_batch_is_an_error(bs, settings):
    "It is not averaged yet: a sum of four would be clipped as if it were the mean"
    cbs = [GradientAccumulation(**settings), ChangesGradient(clip, nth=4)]
    with pytest.raises(RuntimeError, match='in the middle of a window'):
        fit(make_learner(bs, cbs=cbs), 1)


@pytest.mark.parametrize('make', [lambda: GradientAccumulation(32), ActivationCheckpointing])
@pytest.mark.parametrize('change', CHANGES)
def test_a_gradient_changed_in_a_window_of_one_batch_is_the_plain_fit(change, make):
    def train(*cbs):
        learn = make_learner(32, cbs=[*cbs, ChangesGradient(change)], opt_func=TORCH_SGD)
        return weights(fit(learn, 1))

    assert_same(train(make()), train())


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
    "Masks are exact"
    with pytest.warns(UserWarning, match='parameters have hooks'):
        learn = train_with_hooks(bs, GradientAccumulation(**settings))
    big = train_with_hooks(32)
    assert_moved(big)
    assert_same(weights(learn), weights(big), ROUNDING)


@pytest.mark.parametrize('make', [lambda: GradientAccumulation(32), ActivationCheckpointing])
def test_no_warning_of_hooks_that_act_on_whole_windows(make):
    "It would be an error here"
    assert_same(weights(train_with_hooks(32, make())), weights(train_with_hooks(32)))


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
    dls = DataLoaders(dl, dl)
    settings = dict(switcher=switcher(), clip=0.05, opt_func=SGD, show_img=False)
    learn = GANLearner.wgan(dls, generator, critic, cbs=L(cbs), **settings)
    learn.recorder.train_metrics = False
    return learn


@pytest.mark.parametrize('switcher', [
    partial(FixedGANSwitcher, 1, 1),
    partial(FixedGANSwitcher, 1, 2),
    partial(AdaptiveGANSwitcher, 0.7, 0.7)])
@pytest.mark.parametrize('bs, settings, tol', [
    (32, dict(accum_bs=32), 0.),
    (32, dict(micro_batch_size='auto'), 0.),
    (8, dict(accum_bs=32), 1e-7),  # float32
    (32, dict(micro_batch_size=8), 1e-7)], ids=['one', 'auto', 'windows', 'split'])
def test_networks_of_a_gan_take_turns_by_windows(bs, settings, tol, switcher, capsys):
    "As by batches of that size. It is said once how windows are made up"
    before = weights(gan(32, switcher=switcher))
    big = fit(gan(32, switcher=switcher), 2)
    learn = fit_aloud(gan(bs, GradientAccumulation(**settings), switcher=switcher), 2)
    assert (weights(big)-before).abs().max() > 1e-3
    assert_same(weights(learn), weights(big), tol)
    assert len(losses(learn)) == len(losses(big)) == 6
    assert len(capsys.readouterr().out.splitlines()) == 1


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


@pytest.mark.parametrize('bs, settings', [
    (8, dict(accum_bs=32)),
    (32, dict(micro_batch_size=8)),
    (16, dict(accum_bs=32, micro_batch_size=5))], ids=['windows', 'split', 'both'])
@pytest.mark.parametrize('make', [Bag, lazy])
def test_models_of_other_kinds_equal_the_large_batch(make, bs, settings):
    big = train_other(make, 32)
    assert (train_other(make, 8)-big).abs().max() > 1e-3
    assert_same(train_other(make, bs, GradientAccumulation(**settings)), big, ROUNDING)


@pytest.mark.parametrize('make, cb', [
    (Bag, ActivationCheckpointing()),
    (Bag, GradientAccumulation(32)),
    (lazy, GradientAccumulation(32))])
def test_models_of_other_kinds_in_windows_of_one_are_the_plain_fit(make, cb):
    assert_same(train_other(make, 32, cb), train_other(make, 32))


# How long gradients live

class WatchesGradients(Callback):
    "Notes in `after_loss` whether a gradient of an earlier step is alive"
    run_valid = False

    def before_fit(self):
        self.refs = []
        self.alive = []

    def before_step(self):
        self.refs += [weakref.ref(g) for g in grads(self.learn)]

    def after_step(self):
        self.learn.opt.zero_grad()

    def after_loss(self):
        self.alive.append(any(o() is not None for o in self.refs))


@pytest.mark.parametrize('bs, make', [
    (32, noop),
    (8, lambda: GradientAccumulation(32)),
    (32, lambda: GradientAccumulation(micro_batch_size=8))], ids=['plain', 'windows', 'split'])
def test_gradients_are_let_go_after_the_step(bs, make):
    "PyTorch's optimizers set them to None: the next window makes new ones in the memory of the old"
    watches = WatchesGradients()
    learn = fit(make_learner(bs, cbs=make(), opt_func=TORCH_SGD), 1, cbs=watches)
    watches.after_loss()
    assert len(watches.refs) == 3*4
    assert len(watches.alive) > 3
    assert not any(watches.alive)


# Gradients that stay, since a callback has cancelled the step

def train_by_hand(steps):
    "Trains in plain PyTorch on `steps`: samples, and whether a step follows; if not, the gradient stays"
    m = model()
    inputs, targets = data(96)
    opt = sgd(m.parameters())
    for samples, has_step in steps:
        errors = m(inputs[samples])-targets[samples]
        (errors**2).mean().backward()
        if not has_step: continue
        opt.step()
        opt.zero_grad()
    return weights(m)


def cancel(event, nth):
    return Fault(CancelBatchException, event, nth, 0)


@each_layout
@pytest.mark.parametrize('event, n_in_window', [('after_backward', 4), ('before_step', 1), ('after_step', 1)])
def test_a_gradient_that_a_cancelled_step_leaves_is_added_to_the_next_mean(event, n_in_window, bs, settings):
    "As with the large batch, where fastai zeroes no gradients"
    big = fit(make_learner(32, cbs=cancel(event, 2)), 2)
    cbs = [GradientAccumulation(**settings), cancel(event, 2*n_in_window)]
    small = fit(make_learner(bs, cbs=cbs), 2)
    assert_moved(big)
    assert_same(weights(small), weights(big), ROUNDING)


@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'after_loss', 'before_backward'])
def test_a_gradient_that_stays_is_added_once_if_the_next_batch_is_cancelled(event):
    "The second window begins with the sixth batch, since the fifth is cancelled"
    cbs = [GradientAccumulation(32), cancel('after_backward', 4), cancel(event, 5)]
    learn = fit(make_learner(8, cbs=cbs), 1)
    steps = [
        (range(32), False),
        (range(40, 72), True),
        (range(72, 96), True)]
    expected = train_by_hand(steps)
    assert (expected-train_by_hand(steps[1:])).abs().max() > 1e-3
    assert_same(weights(learn), expected, ROUNDING)


class CancelsBatches(Callback):
    "Cancels the batches with these numbers after their forward pass"
    run_valid = False

    def __init__(self, *numbers):
        self.numbers = numbers
        self.n = 0

    def after_pred(self):
        self.n += 1
        if self.n in self.numbers:
            raise CancelBatchException


def test_a_gradient_that_stays_is_added_once_if_the_next_window_is_cancelled():
    cbs = [GradientAccumulation(32), cancel('after_backward', 4), CancelsBatches(5, 6, 7, 8)]
    learn = fit(make_learner(8, cbs=cbs), 1)
    expected = train_by_hand([(range(32), False), (range(64, 96), True)])
    assert_same(weights(learn), expected, ROUNDING)


def steps_after_carry():
    "Returns the steps of an epoch to which the one before has carried its last batch"
    steps = [([*range(72, 80), *range(8)], 0)]
    for start in (8, 24, 40, 56):
        steps.append((range(start, start+16), 0))
    return [*steps, (range(72, 80), 0)]


@pytest.mark.parametrize('remainder, second_epoch', [
    ('drop', windows(80, 8, 16, 'drop', 1)),
    ('carry', steps_after_carry())])
@pytest.mark.parametrize('event', ['before_batch', 'after_pred'])
def test_a_last_batch_whose_neighbour_was_cancelled_leaves_no_gradient(event, remainder, second_epoch):
    "It fills no window, so that it is dropped or carried; the next epoch begins without its gradient"
    cbs = [GradientAccumulation(16, remainder=remainder), cancel(event, 9)]
    learn = fit(make_learner(8, n=80, cbs=[SkipValidation(), *cbs]), 2)
    steps = windows(64, 8, 16, 'drop', 1)+second_epoch
    assert learn.recorder.accum_bs == [len(samples) for samples, _ in steps]
    assert_same(weights(learn), reference(steps, 80, sgd)[0], ROUNDING)


# Gradients of a loss function's own parameters

class LearnedScale(nn.Module):
    "A loss with a parameter of its own, as an uncertainty that is learned"
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros([], dtype=torch.float64))

    def forward(self, pred, targ):
        errors = (pred-targ)**2
        return (errors.mean()*(-self.log_scale).exp() + self.log_scale).float()


class TrainsLoss(Callback):
    "Has an optimizer for the parameters of the loss, as PyTorch Metric Learning advises"
    def before_fit(self):
        self.loss_opt = sgd(self.learn.loss_func.parameters())

    def after_step(self):
        self.loss_opt.step()
        self.loss_opt.zero_grad()


class NaNLoss(Callback):
    "Makes the last loss of the second window NaN"
    run_valid = False

    def before_fit(self): self.n = 0

    def before_backward(self):
        self.n += 1
        if self.n == 8:
            self.learn.loss_grad = self.loss_grad*math.nan


def train_scale(learn):
    "Returns the weights after training, that of the loss last"
    fit(learn, 1, cbs=[TrainsLoss(), SkipValidation()])
    scale = learn.loss_func.log_scale.detach()
    return torch.cat([weights(learn), scale[None]])


def test_gradients_of_a_loss_do_not_outlive_a_window_that_is_skipped():
    "The optimizer of the loss takes no step in it, and zeroes nothing"
    cbs = [GradientAccumulation(32, skip_nonfinite=True), NaNLoss()]
    with pytest.warns(UserWarning, match='its gradient contains NaN'):
        small = train_scale(make_learner(8, cbs=cbs, loss_func=LearnedScale()))
    big = make_learner(32, loss_func=LearnedScale())
    samples = list(zip(*data(96)))
    big.dls.train.dataset = samples[:32]+samples[64:]
    big.dls.train.n = 64
    expected = train_scale(big)
    assert expected[-1].abs() > 1e-3
    assert_same(small, expected, ROUNDING)
