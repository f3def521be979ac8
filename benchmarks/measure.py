"One measurement in a process of its own: `python -m benchmarks.measure KIND CASE [SIZE]` prints one line of JSON"
import json
import statistics
import sys
import time
import warnings
from functools import partial, wraps
from importlib import import_module
from unittest.mock import patch

import torch
from torch import nn

from .cases import Batches, Stack, Task, cases, learner, training

# What a measurement does not need is not imported here, so that it takes neither its time nor its memory


# Times per micro-batch

def window_times(case, k, n, make=Task):
    """Returns the microseconds of CPU time per micro-batch in an epoch of `n`, with `k` in a window: the median over
    spans of `k`, or 8 if that is more"""
    train_once(case, k, make(min(64, n)))  # a short epoch before, for what is cached
    span = max(k, 8)
    requested = train_once(case, k, make(n))
    ends = requested[span::span]  # the first span is not counted
    times = [(end-start)/span for start, end in zip(ends, ends[1:])]
    return statistics.median(times)*1e6


def train_once(case, k, task):
    "Trains, and returns when each batch was requested"
    requested = []
    def note(): requested.append(time.process_time())
    task.batches.on_request = note
    cases[case](task, k)()
    return requested


def time_case(case, size):
    "At 1, 8 and 64 micro-batches a window; the plain Learner has no windows"
    ks = [1] if case == 'plain' else [1, 8, 64]
    return {k: window_times(case, k, 1024) for k in ks}


def unchecked_times(case, k, n, make=Task):
    "The same without the check of the loss in the first windows of a fit"
    from fastxtend_accum.windows.loss_check import LossCheck
    with patch.object(LossCheck, 'n_windows', 0): return window_times(case, k, n, make)


def time_windows(case, size):
    "From 1 to 1024 micro-batches a window"
    ks = 1, 4, 16, 64, 256, 1024
    return {k: unchecked_times(case, k, max(512, 3*k)) for k in ks}


def time_stack(case, n_params):
    "The same for a `Stack`, at 8 micro-batches a window"
    return unchecked_times(case, 8, 40, partial(Stack, n_params))


def time_loading(case, bs):
    """Microseconds of CPU time per micro-batch of 16 samples, 8 a window, where fastai's DataLoader yields `bs` samples
    at a time"""
    from fastai.basics import DataLoader
    from fastxtend_accum.all import GradientAccumulation
    task = Task(0)
    samples = []
    for batch in task.batches.batches: samples += zip(*batch)
    def epoch(samples):
        task.batches = DataLoader(samples, bs=bs)
        train = training(task, GradientAccumulation(8*16, micro_batch_size=16))
        start = time.process_time()
        train()
        n_micro = len(samples)/16
        return (time.process_time()-start)/n_micro*1e6
    epoch(samples)  # a short one before, for what is cached
    return epoch(8*samples)


# The division at the end of a window

def timed(f, times):
    "Returns `f`, of which the milliseconds of each call are appended to `times`"
    @wraps(f)
    def run(*args):
        start = time.perf_counter()
        f(*args)
        times.append((time.perf_counter()-start)*1e3)
    return run


def n_batches_of_stack(n_params):
    if n_params <= 1e6: return 32
    return 8 if n_params <= 1e7 else 4


def time_division(case, n_params):
    "Milliseconds of the division that ends a window, and of one backward pass of a `Stack`"
    from fastai.basics import SGD, Learner
    from fastxtend_accum.all import GradientAccumulation
    from fastxtend_accum.windows import gradients
    task = Stack(n_params, n_batches_of_stack(n_params))
    learn = learner(task, GradientAccumulation(2*16), opt_func=SGD)
    divisions = []
    passes = []
    division = patch.object(gradients, 'average_gradients', timed(gradients.average_gradients, divisions))
    backward = patch.object(Learner, '_backward', timed(Learner._backward, passes))
    with division, backward, learn.no_bar(), learn.no_logging(): learn.fit(1)
    return dict(
        parameters=sum(p.numel() for p in task.model.parameters()),
        division=statistics.median(divisions[1:]),  # the first ones are slower
        backward=statistics.median(passes[1:]))


# Memory

def conv_model():
    layers = []
    for i in range(8):
        layers += [nn.Conv2d(16 if i else 3, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def peak_memory(case, effective):
    """MB that training on batches of `effective` samples needs beyond what was there before: at once ('plain'), or 16
    at a time"""
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    task = Task(0, device)
    bs = effective if case == 'plain' else 16
    task.model = conv_model().to(device)
    for pixels in 8, 64:  # small images first, for what is imported when it is first used
        images = torch.randn(bs, 3, pixels, pixels, device=device)
        targets = torch.randint(10, (bs,), device=device)
        task.batches = Batches([(images, targets)], 2*effective//bs)
        train = cases[case](task, effective//bs)
        before = used_memory()
        train()
    return dict(megabytes=peak_of_process()-before, device=device)


def used_memory():
    "Returns the MB in use by this process: of the GPU if there is one, else of the machine"
    if torch.cuda.is_available(): return torch.cuda.memory_allocated()/1e6
    import psutil
    return psutil.Process().memory_info().rss/1e6


def peak_of_process():
    "Returns the most MB so far"
    if torch.cuda.is_available(): return torch.cuda.max_memory_allocated()/1e6
    import resource  # which Windows does not have
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bytes_in_unit = 1 if sys.platform == 'darwin' else 1024
    return most*bytes_in_unit/1e6


# Others

def count_case(case, size):
    from .counts import count
    return {k: count(cases[case], k) for k in (1, 8)}


def device(case, size):
    "What `learners` runs on"
    if torch.cuda.is_available(): return dict(kind='gpu', device=torch.cuda.get_device_name())
    return dict(kind='cpu', device='CPU')


def comparison(case, size):
    from .comparison import measure
    return measure()


def growing(case, size):
    from .growing import measure
    return measure()


def one_process(kind, case, rounds):
    "`costs` and `lengths` measure all cases in one process"
    return import_module(f'.{kind}', __package__).measure(rounds)


def one_model(kind, case, rounds):
    "`fits`, `learners` and `ways` measure one model in a process"
    return import_module(f'.{kind}', __package__).measure(case, rounds)


kinds = dict(
    time=time_case,
    windows=time_windows,
    stack=time_stack,
    loading=time_loading,
    division=time_division,
    memory=peak_memory,
    counts=count_case,
    device=device,
    comparison=comparison,
    growing=growing)
kinds.update({kind: partial(one_process, kind) for kind in ('costs', 'lengths')})
kinds.update({kind: partial(one_model, kind) for kind in ('fits', 'learners', 'ways')})


def main(kind, case, size='0'):
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)  # the models are so small that threads only wait for each other
    figures = kinds[kind](case, int(size))
    print(json.dumps(figures))


if __name__ == '__main__': main(*sys.argv[1:])
