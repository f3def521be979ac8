"What the FAQ says of callbacks and models that are not ours: EMA, L-BFGS, torch.compile, Dice"
import pytest

from common import *
from fastai.losses import *
from fastxtend_accum.demo import Activations
from fastxtend_accum.memory.out_of_memory import NothingFits


def run(bs, *cbs, **kwargs):
    return fit(make_learner(bs, cbs=list(cbs), **kwargs), 2)


# Callbacks that run a second pass in the step

class ClosureStep(Callback):
    "L-BFGS, which computes loss and gradient several times a step"
    order = 10
    run_valid = False

    def before_step(self):
        def closure():
            self.opt.zero_grad()
            loss = self.loss_func(self.model(*self.xb), *self.yb)
            loss.backward()
            return loss
        self.opt.opt.step(closure)
        raise CancelStepException


def test_a_second_pass_over_a_split_batch_is_that_over_the_large_batch():
    lbfgs = partial(OptimWrapper, opt=torch.optim.LBFGS, max_iter=3)
    large = run(32, ClosureStep(), opt_func=lbfgs)
    split = run(32, ClosureStep(), GradientAccumulation(micro_batch_size=8), opt_func=lbfgs)
    assert_same_weights(split, large, ROUNDING)
    assert_apart(large, run(32))


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


@pytest.mark.parametrize('event', ['after_step', 'after_batch'])
@pytest.mark.parametrize('bs,accum', [
    (8, GradientAccumulation(32)),
    (32, GradientAccumulation(micro_batch_size=8))], ids=['windows', 'split'])
def test_an_average_of_the_weights_is_updated_once_per_step(bs, accum, event):
    large = run(32, EMA(event))
    small = run(bs, EMA(event), accum)
    assert large.ema.n == small.ema.n == 6
    assert_same(small.ema.average, large.ema.average, ROUNDING)
    assert (large.ema.average-weights(model())).abs().max() > 1e-3


# Compiled models


class CountingBackend:
    "Compiles nothing, and counts how often torch.compile asks for it"
    def __init__(self): self.n_graphs = 0

    def __call__(self, graph, inputs):
        self.n_graphs += 1
        return graph.forward


def compiled_learner(n, bs, m, cbs=None):
    samples = list(zip(*data(n)))
    dls = DataLoaders(DataLoader(samples, bs=bs), DataLoader(samples[:bs], bs=bs))
    return Learner(dls, m, mse, opt_func=SGD, cbs=cbs)


@pytest.mark.thin(2)
@pytest.mark.parametrize('n,bs,accum,kwargs,n_graphs', [
    (96, 8, GradientAccumulation(32), {}, 2),
    (96, 32, GradientAccumulation(micro_batch_size=12), {}, 3),
    (90, 8, GradientAccumulation(32), dict(dynamic=True), 2)])
def test_another_size_compiles_again_unless_it_is_dynamic(n, bs, accum, kwargs, n_graphs):
    "Once for training, once for validation, and once for the first micro-batch of a different size"
    torch._dynamo.reset()
    backend = CountingBackend()
    compiled = torch.compile(model(), backend=backend, **kwargs)
    small = fit(compiled_learner(n, bs, compiled, accum))
    large = fit(compiled_learner(n, 32, model()))
    assert backend.n_graphs == n_graphs
    assert_same_weights(small, large, ROUNDING)
    assert_moved(small)


def run_compiled(*cbs):
    torch._dynamo.reset()
    compiled = torch.compile(model(), backend=CountingBackend())
    return fit(make_learner(32, m=compiled, cbs=list(cbs)))


@pytest.mark.long
def test_activation_checkpointing_trains_a_compiled_model_that_fits():
    memory = Activations()
    learn = run_compiled(ActivationCheckpointing(), memory)
    assert_same_weights(learn, run_compiled())
    with pytest.raises(NothingFits, match="compiled.*micro_batch_size='auto'.* splits it"):
        run_compiled(ActivationCheckpointing(), Activations(memory.mb/2))


# Dice

class CrossEntropyPlus:
    "Cross-entropy plus another loss"
    def __init__(self, other):
        self.other = other
        self.cross_entropy = CrossEntropyLossFlat(axis=1)

    def __call__(self, pred, targ): return self.cross_entropy(pred, targ)+self.other(pred, targ)


def test_the_gradient_of_cross_entropy_and_dice_in_micro_batches_is_as_far_off_as_the_faq_says():
    "fastai's DiceLoss is a sum by default. The check of the loss finds it"
    loss_func = CrossEntropyPlus(DiceLoss())
    generator = torch.Generator().manual_seed(0)
    pred = torch.randn(13, 3, 6, 6, generator=generator)
    targ = torch.randint(3, (13, 6, 6), generator=generator)
    def gradient(rows):
        outputs = pred[rows].clone().requires_grad_()
        loss_func(outputs, targ[rows]).backward()
        return outputs.grad*len(outputs)/13
    first, second = slice(8), slice(8, 13)
    joint = gradient(slice(13))
    difference = joint-torch.cat([gradient(first), gradient(second)])
    assert f'{difference.norm()/joint.norm():.0%}' == '45%'
    assert check_loss(loss_func, [(pred[first], targ[first]), (pred[second], targ[second])])
