"Fits beside what other people write, in windows or in split batches: they have to equal those with the large batch"
import random
from functools import cache

import pytest

from callback_fits import *
from fastxtend_accum.callback import WindowCallback

N = 100  # samples: three windows of 32, and one of 4
N_EPOCHS = 2


# Ways to see 32 samples a step, 8 at a time

def in_windows(**kwargs): return 8, [GradientAccumulation(LARGE, **kwargs)]
def in_split_batches(**kwargs): return LARGE, [GradientAccumulation(micro_batch_size=8, **kwargs)]


WAYS = dict(windows=in_windows, split=in_split_batches)


# Learners. A situation is a function of the batch size and our callbacks, which returns one of them

def learner_of(samples, loss_func, m=None, bs=LARGE, cbs=(), **kwargs):
    "Returns a Learner that sees `samples` in order, each a tuple of inputs and targets"
    train = DataLoader(samples, bs=bs)
    valid = DataLoader(samples[:20], bs=16)
    dls = DataLoaders(train, valid)
    dls.n_inp = 1
    args = dict(opt_func=SGD)
    args.update(kwargs)
    return Learner(dls, m or model(), loss_func=loss_func, cbs=list(cbs), **args)


def labelled(n=N, n_classes=3):
    "Returns samples with a label"
    inputs, _ = data(n)
    labels = inputs[:, :n_classes].argmax(1)
    return list(zip(inputs, labels))


def classifier(n_classes=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, n_classes)).double()


class InFloat32:
    "The loss in float32, in which the Recorder averages it"
    def forward(self, *args): return super().forward(*args).float()


class MSE(InFloat32, nn.MSELoss): "The mean over all elements"
class CrossEntropy(InFloat32, nn.CrossEntropyLoss): "The mean over all labels"


# Fits

@cache
def fit_large(situation):
    "Returns the Learner of a fit with the large batch, which knows nothing of our code"
    return fit_situation(situation, LARGE, [])


def fit_small(situation, way, **kwargs):
    bs, cbs = WAYS[way](**kwargs)
    return fit_situation(situation, bs, cbs)


def fit_situation(situation, bs, cbs):
    random.seed(1)
    torch.manual_seed(1)
    learn = situation(bs, cbs)
    before = weights(learn)
    fit(learn, N_EPOCHS)
    assert_apart(learn, before)
    return learn


# Comparisons

def noted(learn):
    "Returns what other callbacks have noted in their `rows`"
    rows = []
    for cb in learn.cbs:
        if not isinstance(cb, WindowCallback): rows += rows_of(cb)
    return flat(rows)


def assert_same_training(small, large, tol=ROUNDING):
    "Asserts the same weights and log"
    assert_same_weights(small, large, tol)
    assert_same_log(small.recorder, large.recorder, 0.)


def assert_equal_fits(small, large, tol=ROUNDING):
    "Asserts the same weights, log, and rows of other callbacks"
    assert_same_training(small, large, tol)
    assert_same(noted(small), noted(large), FLOAT32)


def assert_as_large(situation, way, tol=ROUNDING, **kwargs):
    assert_equal_fits(fit_small(situation, way, **kwargs), fit_large(situation), tol)


def assert_other_weights(situation, way):
    assert_apart(fit_small(situation, way), fit_large(situation), least=1e-6)


def assert_other_notes(situation, way):
    "Asserts that other callbacks note something else than with the large batch, and that the training is the same"
    small, large = fit_small(situation, way), fit_large(situation)
    assert_same_training(small, large)
    with pytest.raises(AssertionError): assert_same(noted(small), noted(large), FLOAT32)
