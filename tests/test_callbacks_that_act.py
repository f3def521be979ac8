"Other callbacks change in windows what they change with the large batch: rates, batches, losses, gradients, weights"
from contextlib import suppress

import pytest
from torch.optim import lr_scheduler

from callback_fits import *


# Where a callback's `before_batch` comes once a window is not the point here
pytestmark = pytest.mark.filterwarnings('ignore:before_batch of .* is called once per window')


# Rates

class SetsRate(At):
    "Sets the learning rate to `rate(self)` at `event`"
    def __init__(self, event, rate, order=0):
        self.n = 0
        super().__init__(event, lambda self: self.opt.set_hyper('lr', rate(self)), order)


def by_position(self):
    return .1-.09*self.learn.pct_train
def by_train_iter(self):
    return .1-.09*self.train_iter/8
def smaller(self):
    return self.opt.hypers[-1]['lr']*.9


def sets_rate(event, rate, order):
    return lambda: [SetsRate(event, rate, order), rates_used()]


RATES = {
    'by position before a batch': sets_rate('before_batch', by_position, -20),
    'by position before a window': sets_rate('before_batch', by_position, 55),
    'by position before the step': sets_rate('before_step', by_position, 90),
    'by position after the step': sets_rate('after_step', by_position, -20),
    'by train_iter in the pass': sets_rate('after_loss', by_train_iter, 90),
    'smaller after each step': sets_rate('after_step', smaller, -20),
    'smaller after each batch': sets_rate('after_batch', smaller, 90)}


@pytest.mark.parametrize('name,layout', paired(RATES, LAYOUTS))
def test_a_rate_that_a_callback_sets_is_the_one_of_the_large_batch(name, layout):
    small, _ = fit_both(layout, RATES[name])
    rates = flat(small.others[-1].rows)
    assert len(set(rates)) > 1


class TorchScheduler(Callback):
    "Advances a scheduler of PyTorch at `event`"
    run_valid = False
    def __init__(self, event, make):
        self.make = make
        setattr(self, event, self.advance)

    def before_fit(self):
        self.scheduler = self.make(self.opt.opt)

    def advance(self):
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(self.loss.item())
        else: self.scheduler.step()


SCHEDULERS = dict(
    cosine=partial(lr_scheduler.CosineAnnealingLR, T_max=100),
    restarts=partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2),
    plateau=partial(lr_scheduler.ReduceLROnPlateau, patience=1, threshold=1.))
torch_sgd = partial(OptimWrapper, opt=torch.optim.SGD)


def fit_scaled(make_scheduler, opt_func, scale):
    "Returns the rates of the steps of a fit with these rules, the sizes of its windows, and its last rate"
    rates = rates_used()
    learn = make_learner(8, n=88, cbs=[make_scheduler(), rates, scheduled(scale=scale)], opt_func=opt_func)
    fit(learn, 2, 1e-4)
    return tensor([row[-1] for row in rates.rows]), learn.recorder.accum_bs, learn.opt.hypers[-1]['lr']


SCALED = {name: (partial(TorchScheduler, 'after_step', make), torch_sgd) for name, make in SCHEDULERS.items()}
SCALED['smaller after each step'] = partial(SetsRate, 'after_step', smaller), SGD
SCALED['smaller after each batch'] = partial(SetsRate, 'after_batch', smaller), SGD


@pytest.mark.parametrize('name', SCALED)
def test_a_scheduler_finds_the_rate_as_it_was_before_the_step_in_which_it_is_scaled(name):
    "Else it would multiply a rate that is scaled already"
    plain, sizes, last = fit_scaled(*SCALED[name], None)
    scaled, _, scaled_last = fit_scaled(*SCALED[name], dict(lr=sqrt_scale))
    ratios = tensor(sizes)/8
    assert_same(scaled/plain, ratios**.5, 1e-5)
    assert scaled_last == last
    assert len(set(plain.tolist())) > 1
    assert len(set(sizes)) > 1


# The batch, the model and the optimizer

class ScalesOutputs(Callback):
    "Changes the model in before_batch, and puts it back in after_batch"
    def __init__(self, order):
        self.order = order

    def before_batch(self):
        assert self.model.scale == 1
        self.model.scale = 1.5

    def after_batch(self):
        self.model.scale = 1.


def sum_of_errors(pred, targ):
    return (pred-targ).abs().mean().float()
def swap_loss(self):
    self.learn.loss_func = sum_of_errors if self.train_iter%2 else mse
def freeze_often(self):
    self.model[0].requires_grad_(self.train_iter%3 > 0)
def replace_optimizer(self):
    self.learn.opt = Adam(self.learn.splitter(self.model), lr=.01)


def add_noise(self):
    generator = torch.Generator().manual_seed(self.train_iter)
    for p in self.model.parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        p.grad += .1*noise


ACTS = {
    'scales outputs, last of all': partial(ScalesOutputs, 90),
    'swaps the loss': partial(At, 'after_batch', swap_loss, -20),
    'freezes a layer': partial(At, 'after_batch', freeze_often, 90),
    'replaces the optimizer': partial(At, 'before_epoch', replace_optimizer),
    'adds noise to gradients': partial(At, 'before_step', add_noise, 8)}


@pytest.mark.parametrize('name,layout', paired(ACTS, LAYOUTS))
def test_what_a_callback_changes_it_changes_as_with_the_large_batch(name, layout):
    "Whether it belongs to the Learner or to the fit"
    is_in_fit = layout in ('ragged', 'split', 'step')
    fit_both(layout, ACTS[name], in_fit=is_in_fit)


# The loss


@pytest.mark.parametrize('layout, event', [('both', 'before_step'), ('carry', 'after_step')])
def test_an_optimizer_of_the_parameters_of_the_loss_gets_their_mean_gradient(event, layout):
    small, _ = fit_both(layout, partial(TrainsLoss, event), make_args=lambda: dict(loss_func=CenterLoss()))
    assert abs(small.learn.loss_func.center-.5) > .1


@pytest.mark.parametrize('bs,nth,make_cb', [
    (8, 6, accumulation), (32, 7, partial(GradientAccumulation, micro_batch_size=8))])
def test_a_window_that_is_cut_off_leaves_no_gradient_in_the_parameters_of_the_loss(bs, nth, make_cb):
    "Nor in the model: the next fit goes on after the first step, as with the large batch"
    def fit_twice(bs, nth, cbs):
        learn = make_learner(bs, cbs=[*cbs, TrainsLoss('after_step')], loss_func=CenterLoss())
        with suppress(KeyboardInterrupt):
            fit(learn, 2, cbs=Fault(KeyboardInterrupt, 'after_loss', nth, order=0))
        assert len(losses(learn)) == 1
        return fit(learn, 2)
    big = fit_twice(32, 2, [])
    small = fit_twice(bs, nth, [make_cb()])
    assert_trained_as(small, big)
    assert_same(small.loss_func.center, big.loss_func.center, ROUNDING)


# A weight in two places

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(5, 8)
        self.decoder = nn.Linear(5, 8)
        self.head = nn.Linear(8, 1)
        self.double()
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        encoded = torch.tanh(self.encoder(x))
        decoded = torch.tanh(self.decoder(x.flip(1)))
        return self.head(encoded*decoded)


def split_tied(m):
    return [params(m.encoder), params(m.decoder)+params(m.head)]


@pytest.mark.parametrize('layout', ['both', 'carry'])
def test_a_weight_in_two_parameter_groups_moves_as_with_the_large_batch(layout):
    fit_both(layout, list, make_args=lambda: dict(m=Tied(), splitter=split_tied))
