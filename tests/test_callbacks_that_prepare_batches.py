"Inputs, targets and losses that callbacks set are those of the large batch; whoever sets them too late is named"
import pytest

from callback_fits import *
from our_warnings import warnings_of


# Whoever has the targets, or the loss, in after_loss only

def use_own_loss(cb):
    cb.learn.loss_grad = mse(cb.pred, cb.y)
    cb.learn.loss = cb.learn.loss_grad.clone()


class HidesTargets(Callback):
    "Hides the targets from the loss function, and computes the loss by itself"
    per_sample = 'kept',
    def before_batch(self):
        self.kept = self.yb
        self.learn.yb = ()

    def after_loss(self):
        self.learn.yb = self.kept
        use_own_loss(self)


class GivesTargetsToModel(Callback):
    "Gives the targets to the model, which returns outputs and loss, as detectors and language models do"
    def before_batch(self):
        self.learn.xb = *self.xb, *self.yb
        self.learn.yb = ()

    def after_pred(self):
        self.learn.pred, self.learn.loss_grad = self.pred

    def after_loss(self):
        _, *self.learn.yb = self.xb
        self.learn.loss = self.learn.loss_grad.clone()


class ReturnsLoss(nn.Module):
    "Returns its loss beside its outputs"
    def __init__(self):
        super().__init__()
        self.model = model()

    def forward(self, inputs, targets):
        outputs = self.model(inputs)
        return outputs, mse(outputs, targets)


class Reconstructs(Callback):
    "Makes a target of the inputs, of a loader that yields nothing else"
    def after_loss(self):
        self.learn.yb = self.x[:, :1],
        use_own_loss(self)


def learner_of_inputs(bs, cbs):
    samples = [(x,) for x in data(100)[0]]
    dls = DataLoaders(DataLoader(samples, bs=bs), DataLoader(samples[:20], bs=16))
    return Learner(dls, model(), loss_func=mse, opt_func=SGD, cbs=cbs)


WHO_HAS_THE_LOSS = dict(
    callback=lambda bs, cbs: make_learner(bs, n=100, cbs=[HidesTargets(), *cbs]),
    model=lambda bs, cbs: make_learner(bs, n=100, m=ReturnsLoss(), cbs=[GivesTargetsToModel(), *cbs]),
    inputs=lambda bs, cbs: learner_of_inputs(bs, [Reconstructs(), *cbs]))


def fit_large(who):
    big = fit(WHO_HAS_THE_LOSS[who](32, []), 2)
    assert_moved(big)
    return big


@pytest.mark.parametrize('bs,args', [
    (8, dict(accum_bs=32)), (32, dict(micro_batch_size=8)), (16, dict(accum_bs=32, micro_batch_size=5))])
@pytest.mark.parametrize('who', WHO_HAS_THE_LOSS)
def test_targets_and_losses_that_come_in_after_loss_train_as_with_the_large_batch(who, bs, args):
    """Their weights are rows. A warning says so where a callback sets the loss in after_loss, unless `num_items` is
    given"""
    big = fit_large(who)
    is_set_in_after_loss = who in ('callback', 'inputs')
    for num_items in (None, lambda learn: len(learn.y)):
        learn = WHO_HAS_THE_LOSS[who](bs, [GradientAccumulation(num_items=num_items, **args)])
        said = [o for o in warnings_of(learn, 2, .1) if 'replaces the loss' in o]
        assert len(said) == int(is_set_in_after_loss and num_items is None)
        assert_same_weights(learn, big, ROUNDING)
        assert_same(losses(learn), losses(big), FLOAT32)


@pytest.mark.parametrize('who', ['callback', 'inputs'])
def test_in_a_window_of_one_micro_batch_a_loss_that_is_replaced_has_no_weight_and_no_warning(who):
    learn = WHO_HAS_THE_LOSS[who](32, [GradientAccumulation(32)])
    assert warnings_of(learn, 2, .1) == []
    assert_same_weights(learn, fit_large(who))


# Late callbacks, which see the first loader batch of a window only

class RestoresInputs(Callback):
    "Changes the inputs, and puts them back after the batch"
    def before_batch(self):
        self.kept = self.xb
        self.learn.xb = self.x*2-1,

    def after_batch(self):
        self.learn.xb = self.kept


def test_with_the_order_that_the_warning_advises_the_batches_are_prepared_as_the_large_one():
    "And nothing is said"
    prepares = RestoresInputs()
    prepares.order = 45
    learn = fit(make_learner(8, cbs=[prepares, GradientAccumulation(32)]))
    big = fit(make_learner(32, cbs=prepares))
    assert_trained_as(learn, big)
