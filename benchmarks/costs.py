"""What a micro-batch costs beside that of a plain Learner, which logs and takes a step for each: functions that are
called, and CPU time, with two optimizers"""
import time
from functools import cache, partial

import torch
from fastai.optimizer import Adam, OptimWrapper
from fastxtend_accum.all import ActivationCheckpointing, GradientAccumulation, GradientAccumulationSchedule

from .cases import Task, training
from .counts import checked_once, count_calls, count_first_calls

# torch's SGD costs so little that what is added weighs more; reading its hyper-parameters is slow in fastai
opts = dict(
    sgd=partial(OptimWrapper, opt=torch.optim.SGD),
    adam=Adam)
sizes = dict(  # micro-batches in a window
    windows=(1, 8, 64),
    split=(8, 64),
    schedule=(8,),
    checkpointing=(1,))
n_windows = {1: 160, 8: 20, 64: 6}  # in which calls are counted


def callback(kind, bs, k):
    "Returns a callback for a loader that yields `bs` samples, and windows of `k` micro-batches"
    if kind == 'windows': return GradientAccumulation(k*bs)
    if kind == 'split': return GradientAccumulation(micro_batch_size=bs//k)
    if kind == 'schedule': return GradientAccumulationSchedule(k*bs, k*bs, finish=1.)
    return ActivationCheckpointing()


def make(kind, opt):
    "Returns the function of a task and `k` that makes the training; that of a plain Learner if `kind` is 'plain'"
    def make_training(task, k):
        if kind == 'split': task.batches.join(k)
        cbs = [] if kind == 'plain' else [callback(kind, task.batches.bs, k)]
        return training(task, *cbs, opt_func=opts[opt])
    return make_training


# Calls of Python and C functions per micro-batch, relative to the plain Learner

@cache
def plain_calls(opt):
    return count_calls(make('plain', opt), 1, n_windows[1])['with_c']


def calls(kind, k, opt):
    return count_calls(make(kind, opt), k, n_windows[k])['with_c']/plain_calls(opt)


def first_calls(kind, opt='sgd', k=8):
    "Those in the first 16 windows of a fit, in which the loss is checked, and the first pass is observed"
    return count_first_calls(make(kind, opt), k)/plain_calls(opt)


# CPU time

def time_in_rounds(trains, rounds, n):
    "Returns the microseconds per micro-batch in epochs of `n`, once a round, by the keys of `trains`"
    times = {key: [] for key in trains}
    for i in range(rounds+1):
        for key, train in trains.items():
            start = time.process_time()
            train()
            seconds = time.process_time()-start
            if i > 0: times[key].append(seconds/n*1e6)  # the first epoch is slower
    return times


def measure_cells(opt, rounds, n):
    "Returns times and calls of a micro-batch by kind and K"
    cells = [('plain', 1)]
    for kind, ks in sizes.items():
        cells += [(kind, k) for k in ks]
    trains = {}
    for kind, k in cells:
        trains[kind, k] = make(kind, opt)(Task(n), k)
    with checked_once:
        times = time_in_rounds(trains, rounds, n)
    res = {}
    for kind, k in cells:
        n_calls = 1. if kind == 'plain' else calls(kind, k, opt)
        res[f'{kind} {k}'] = dict(time=times[kind, k], calls=n_calls)
    return res


def measure(rounds, n=512):
    return dict(by_opt={opt: measure_cells(opt, rounds, n) for opt in opts})
