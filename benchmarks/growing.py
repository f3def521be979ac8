"""A batch that grows from 32 to 512, on a loader of 512 and on one of 32, beside constant batches: the linear model of
the demo, whose loss can be computed without sampling, and a convolutional network on the digits, with Adam"""
from functools import partial

import numpy as np
from fastai.callback.all import *
from fastxtend_accum.all import GradientAccumulationSchedule
from fastxtend_accum.demo import demo_runs, digits_learner, linear_learner, train

n_seeds = 10  # at least; each is a round
on_small_loader = '32 to 512, loader of 32'


def growing(): return GradientAccumulationSchedule(32, 512, finish=1.)


def linear_runs():
    "Returns functions of a seed that train a linear model"
    runs = demo_runs()
    del runs['16 x 32']
    runs[on_small_loader] = partial(train, linear_learner, 32, .85, .75, growing())
    runs['batches of 32, constant rate'] = partial(train, linear_learner, 32, .15, 1.)
    return runs


def digits_runs():
    "The same for the digits, all at one learning rate"
    def run(bs, cb=None): return partial(train, digits_learner, bs, 1e-2, cb=cb, n_epoch=12)
    return {
        'batches of 32': run(32),
        'batches of 128': run(128),
        'batches of 512': run(512),
        '32 to 512': run(512, growing()),
        on_small_loader: run(32, growing())}


def measure_runs(make_runs, seeds):
    "Returns for each run its steps, its passes, and its losses, accuracies and CPU seconds by seed"
    res = {name: dict(loss=[], accuracy=[], seconds=[]) for name in make_runs()}
    for seed in seeds:
        for name, run in make_runs().items():  # anew, since a callback belongs to one Learner
            learn = run(seed=seed)
            counts = learn.counts.n
            figures = res[name]
            figures['steps'] = counts['optimizer steps']
            figures['passes'] = counts['forward passes']
            figures['seconds'].append(counts['seconds'])
            figures['loss'].append(counts['validation loss'])
            figures['accuracy'].extend(learn.recorder.values[-1][2:])
    return res


# The loss of the linear model that can be expected

def expected_losses(sizes, rates, pct_start):
    """Returns the mean of the validation loss over all sets of samples, for steps of these sizes, at each of the
    learning rates. For normal inputs, the squared errors of the weights after a step follow from those before"""
    variances = 1/np.arange(1, 201)
    errors = np.full((len(rates), 200), 1+1/600)  # the weights begin at random around 0, and are to become 1
    falls = SchedCos(1., 1e-5)
    starts = np.cumsum([0, *sizes])/sum(sizes)
    for size, start in zip(sizes, starts):
        has_fallen = max(start-pct_start, 0)/max(1-pct_start, 1e-9)
        rate = 2*np.array(rates)[:,None]*falls(has_fallen)  # the gradient of a square is twice its root
        loss = (variances*errors).sum(1, keepdims=True)
        noise = variances*(variances*errors+loss+1)/size
        errors = errors*(1-rate*variances)**2 + rate**2*noise
    return (variances*errors).sum(1)


def step_sizes(bs, cb=None):
    "Returns the samples in each step of a run of the linear model"
    dls = linear_learner(bs).dls
    if cb: return [size for _, size in cb.preview(1, dls)]
    return [min(bs, dls.train.n-first) for first in range(0, dls.train.n, bs)]


def expected():
    "Returns for each run of the linear model the expected loss, and the least one over many rates and ways to fall"
    rates = np.arange(1, 25)*.05
    fractions = np.arange(20)*.05  # of training, before the rate falls
    res = {}
    for name, run in linear_runs().items():
        _, bs, rate, pct_start, *cbs = run.args
        sizes = step_sizes(bs, *cbs)
        with np.errstate(over='ignore', invalid='ignore'):  # a rate may be too high
            losses = [expected_losses(sizes, rates, o) for o in fractions]
        loss = expected_losses(sizes, [rate], pct_start)
        res[name] = dict(loss=loss.item(), least=np.nanmin(losses))
    return res


def measure(rounds):
    seeds = range(max(rounds, n_seeds))
    return dict(
        linear=measure_runs(linear_runs, seeds),
        digits=measure_runs(digits_runs, seeds),
        expected=expected())
