"What the FAQ says of callbacks and models that are not ours: EMA, torch.compile, Dice"
import pytest
from fastai.losses import DiceLoss

from common import *


# An average of the weights

class EMA(Callback):
    "A running average of the weights, updated at `event`"
    order = 70
    run_valid = False

    def __init__(self, event):
        self.n = 0
        setattr(self, event, self.update)

    def before_fit(self): self.average = weights(self.learn)

    def update(self):
        self.n += 1
        self.average.lerp_(weights(self.learn), .1)


@pytest.mark.parametrize('event,bs,accum', [
    ('after_step', 32, GradientAccumulation(micro_batch_size=8)),
    ('after_step', 8, GradientAccumulation(32)),
    ('after_batch', 8, GradientAccumulation(32))])
def test_an_average_of_the_weights_is_updated_once_per_step(event, bs, accum):
    large = fit(make_learner(32, cbs=EMA(event)))
    small = fit(make_learner(bs, cbs=[EMA(event), accum]))
    assert large.ema.n == small.ema.n == 9
    assert_same(small.ema.average, large.ema.average, ROUNDING)
    assert_apart(large.ema.average, model())


# Compiled models

class CountingBackend:
    "Compiles nothing, and counts how often torch.compile asks for it"
    def __init__(self): self.n_graphs = 0

    def __call__(self, graph, inputs):
        self.n_graphs += 1
        return graph.forward


def fit_compiled(*cbs, backend='eager', **kwargs):
    torch._dynamo.reset()
    compiled = torch.compile(model(), backend=backend, **kwargs)
    return fit(make_learner(32, n=96, m=compiled, cbs=cbs))


@pytest.mark.parametrize('kwargs,n_graphs', [({}, 3), (dict(dynamic=True), 2)])
def test_another_size_compiles_again_unless_it_is_dynamic(kwargs, n_graphs):
    "Once in training and once in validation; unless it is dynamic, once more for micro-batches of another size"
    backend = CountingBackend()
    small = fit_compiled(GradientAccumulation(micro_batch_size=12), backend=backend, **kwargs)
    assert backend.n_graphs == n_graphs
    assert_same_weights(small, fit(make_learner(32)), ROUNDING)
    assert_moved(small)


# Dice

def test_the_gradient_of_cross_entropy_and_dice_in_micro_batches_is_as_far_off_as_the_faq_says():
    "fastai's DiceLoss is a sum by default"
    dice = DiceLoss()
    cross_entropy = CrossEntropyLossFlat(axis=1)
    def loss_func(pred, targ): return cross_entropy(pred, targ)+dice(pred, targ)
    generator = torch.Generator().manual_seed(0)
    pred = torch.randn(13, 3, 6, 6, generator=generator, requires_grad=True)
    targ = torch.randint(3, (13, 6, 6), generator=generator)
    parts = [(pred[:8], targ[:8]), (pred[8:], targ[8:])]
    summed = sum(loss_func(*part)*len(part[0])/13 for part in parts)
    in_parts, = torch.autograd.grad(summed, pred)
    joint, = torch.autograd.grad(loss_func(pred, targ), pred)
    off = (joint-in_parts).norm()/joint.norm()
    assert f'{off.item():.0%}' == '45%'
