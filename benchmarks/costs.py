"What a micro-batch costs beside that of a plain Learner, with both kinds of optimizers: the functions that are called, and CPU time"
import time
from functools import partial
from unittest.mock import patch

import torch
from fastai.optimizer import Adam, OptimWrapper
from fastxtend_accum.all import GradientAccumulation, GradientAccumulationSchedule
from fastxtend_accum.learner.loss_check import LossCheck

from .cases import Task, training
from .counts import checked_once, count_calls, count_first_calls

# torch's SGD costs so little that what is added weighs more; reading its hyper-parameters is slow in fastai
opts = dict(sgd=partial(OptimWrapper, opt=torch.optim.SGD), adam=Adam)
ways = dict(windows=lambda bs, k: GradientAccumulation(k*bs), pieces=lambda bs, k: GradientAccumulation(micro_batch_size=bs//k),
            schedule=lambda bs, k: GradientAccumulationSchedule(k*bs, k*bs, finish=1.), exact=lambda bs, k: GradientAccumulation(exact=True, verbose=False))
sizes = dict(windows=(1, 8, 64), pieces=(8, 64), schedule=(8,), exact=(1,))  # micro-batches in a window

def make(way, opt, **kwargs):
    "The function of a task and `k` that makes the training; the plain Learner's if `way` is None"
    def f(task, k):
        if way == 'pieces': task.batches.join(k)
        cbs = [ways[way](task.batches.bs, k)] if way else []
        return training(task, *cbs, opt_func=opts[opt], **kwargs)
    return f

def calls(way, k, opt):
    "Calls of Python and C functions per micro-batch, relative to the plain Learner, which logs and steps once for each"
    ours,plain = count_calls(make(way, opt), k, {1:160, 8:20, 64:6}[k]),count_calls(make(None, opt), 1, 160)
    return ours['with_c']/plain['with_c']

def first_calls(way, opt='sgd'):
    "Calls of the check of the loss, and of the looks at what a pass moves, in the first 16 windows (K=8; exact: K=1): in windows' worth of later ones"
    k = 1 if way == 'exact' else 8
    def first(): return count_first_calls(make(way, opt, logger=lambda log: None), k)  # a Learner that logs nothing is not looked at
    with patch.object(LossCheck, 'windows', 0): looks = first()
    return dict(check=first()-looks, looks=looks)

def measure(rounds, n=512):
    "Microseconds of CPU time per micro-batch, once a round, and the calls: of each optimizer, by way and K"
    cells = [(None, 1), *((way, k) for way,ks in sizes.items() for k in ks)]
    trains = {(opt, way, k):make(way, opt)(Task(n), k) for opt in opts for way,k in cells}
    times = {o:[] for o in trains}
    with checked_once:
        for i in range(rounds+1):
            for o,train in trains.items():
                start = time.process_time()
                train()
                if i: times[o].append((time.process_time()-start)/n*1e6)  # the first epoch is slower
    def figures(opt, way, k): return dict(time=times[opt, way, k], calls=1. if way is None else calls(way, k, opt))
    return dict(by_opt={opt:{f'{way or "plain"} {k}':figures(opt, way, k) for way,k in cells} for opt in opts}, first={o:first_calls(o) for o in sizes})
