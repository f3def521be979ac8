"What a micro-batch costs beside that of a plain Learner, with two optimizers: functions that are called, and CPU time"
import time
from functools import partial
from unittest.mock import patch

import torch
from fastai.optimizer import Adam, OptimWrapper
from fastxtend_accum.all import ActivationCheckpointing, GradientAccumulation, GradientAccumulationSchedule
from fastxtend_accum.windows.loss_check import LossCheck

from .cases import Task, training
from .counts import checked_once, count_calls, count_first_calls

# torch's SGD costs so little that what is added weighs more; reading its hyper-parameters is slow in fastai
opts = dict(sgd=partial(OptimWrapper, opt=torch.optim.SGD), adam=Adam)
kinds = dict(windows=lambda bs, k: GradientAccumulation(k*bs),
             split=lambda bs, k: GradientAccumulation(micro_batch_size=bs//k),
             schedule=lambda bs, k: GradientAccumulationSchedule(k*bs, k*bs, finish=1.),
             checkpointing=lambda bs, k: ActivationCheckpointing())
sizes = dict(windows=(1, 8, 64), split=(8, 64), schedule=(8,), checkpointing=(1,))  # micro-batches in a window

def make(kind, opt):
    "The function of a task and `k` that makes the training; the plain Learner's if `kind` is None"
    def f(task, k):
        if kind == 'split': task.batches.join(k)
        cbs = [kinds[kind](task.batches.bs, k)] if kind else []
        return training(task, *cbs, opt_func=opts[opt])
    return f

def calls(kind, k, opt):
    "Calls of Python and C functions per micro-batch, relative to the plain Learner, which logs and steps once for each"
    ours,plain = count_calls(make(kind, opt), k, {1:160, 8:20, 64:6}[k]),count_calls(make(None, opt), 1, 160)
    return ours['with_c']/plain['with_c']

def first_calls(kind, opt='sgd'):
    """Calls of the check of the loss, and of the looks at what a pass moves, in the first 16 windows (K=8;
    checkpointing: K=1): in windows' worth of later ones"""
    def first(): return count_first_calls(make(kind, opt), min(sizes[kind][-1], 8))
    with patch.object(LossCheck, 'n_windows', 0): looks = first()
    return dict(check=first()-looks, looks=looks)

def measure(rounds, n=512):
    "Microseconds of CPU time per micro-batch, once a round, and the calls: of each optimizer, by kind and K"
    cells = [(None, 1), *((kind, k) for kind,ks in sizes.items() for k in ks)]
    trains = {(opt, kind, k):make(kind, opt)(Task(n), k) for opt in opts for kind,k in cells}
    times = {o:[] for o in trains}
    with checked_once:
        for i in range(rounds+1):
            for o,train in trains.items():
                start = time.process_time()
                train()
                if i: times[o].append((time.process_time()-start)/n*1e6)  # the first epoch is slower
    def figures(opt, kind, k): return dict(time=times[opt, kind, k], calls=1. if kind is None else calls(kind, k, opt))
    by_opt = {opt:{f'{kind or "plain"} {k}':figures(opt, kind, k) for kind,k in cells} for opt in opts}
    return dict(by_opt=by_opt, first={o:first_calls(o) for o in sizes})
