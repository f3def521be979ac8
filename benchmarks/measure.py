"One measurement in a process of its own: `python -m benchmarks.measure KIND CASE [SIZE]` prints one line of JSON"
import json, statistics, sys, time, warnings
from functools import partial, wraps
from unittest.mock import patch

import torch
from torch import nn

from .cases import Batches, Stack, Task, cases, learner, training

def window_times(case, k, n, make=Task):
    """Microseconds of CPU time per micro-batch: the median over spans of `k` (8 if that is more) in an epoch of `n`,
    after a short one"""
    for size in min(64, n), n:
        task,asked = make(size),[]
        task.batches.ask = lambda: asked.append(time.process_time())
        cases[case](task, k)()
    span = max(k, 8)
    ends = asked[span::span]  # the first window is not counted
    return statistics.median((b-a)/span for a,b in zip(ends, ends[1:]))*1e6

def time_case(case, size):
    "At 1, 8 and 64 micro-batches a window; the plain Learner has no windows"
    return {k:window_times(case, k, 1024) for k in ([1] if case == 'plain' else [1, 8, 64])}

def unchecked_times(case, k, n, make=Task):
    "The same without the check of the loss in the first windows of a fit"
    from fastxtend_accum.windows.loss_check import LossCheck
    with patch.object(LossCheck, 'n_windows', 0): return window_times(case, k, n, make)

def time_windows(case, size):
    "From 1 to 1024 micro-batches a window"
    return {k:unchecked_times(case, k, max(512, 3*k)) for k in (1, 4, 16, 64, 256, 1024)}

def time_stack(case, n_params):
    "The same for a `Stack`, at 8 micro-batches a window"
    return unchecked_times(case, 8, 40, partial(Stack, n_params))

def time_loading(case, bs):
    """Microseconds of CPU time per micro-batch of 16 samples, 8 a window, where fastai's DataLoader yields `bs` samples
    at a time"""
    from fastai.basics import DataLoader
    from fastxtend_accum.all import GradientAccumulation
    task = Task(0)
    samples = [o for batch in task.batches.batches for o in zip(*batch)]
    for n in 1,8:  # a short epoch first
        task.batches = DataLoader(samples*n, bs=bs)
        train = training(task, GradientAccumulation(8*16, micro_batch_size=16))
        start = time.process_time()
        train()
    return (time.process_time()-start)/(len(samples)*n/16)*1e6

def time_division(case, n_params):
    "Milliseconds of the division that ends a window, and of one backward pass of a `Stack`"
    from fastai.basics import SGD, Learner
    from fastxtend_accum.all import GradientAccumulation
    from fastxtend_accum.windows import loop
    task = Stack(n_params, 32 if n_params <= 1e6 else 8 if n_params <= 1e7 else 4)
    learn = learner(task, GradientAccumulation(2*16), opt_func=SGD)
    times = dict(division=[], backward=[])
    def timed(name, f):
        @wraps(f)
        def g(*args):
            start = time.perf_counter()
            f(*args)
            times[name].append((time.perf_counter()-start)*1e3)
        return g
    division = patch.object(loop, "average_gradients", timed("division", loop.average_gradients))
    backward = patch.object(Learner, '_backward', timed('backward', Learner._backward))
    with division, backward, learn.no_bar(), learn.no_logging(): learn.fit(1)
    n_params = sum(p.numel() for p in task.model.parameters())
    return dict(parameters=n_params, **{k:statistics.median(v[1:]) for k,v in times.items()})

def peak_memory(case, effective):
    """MB that training on batches of `effective` samples needs beyond what was there before: at once ('plain'), or 16
    at a time"""
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    task = Task(0, device)
    bs = effective if case == 'plain' else 16
    layers = [nn.Sequential(nn.Conv2d(16 if i else 3, 16, 3, padding=1), nn.ReLU()) for i in range(8)]
    task.model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).to(device)
    for pixels in 8,64:  # small images first, for what is imported when it is first used
        batch = torch.randn(bs, 3, pixels, pixels, device=device),torch.randint(10, (bs,), device=device)
        task.batches = Batches([batch], 2*effective//bs)
        train = cases[case](task, effective//bs)
        before = used_memory()
        train()
    return dict(megabytes=used_memory(peak=True)-before, device=device)

def used_memory(peak=False):
    "MB in use by this process, or the most so far: of the GPU if there is one, else of the machine"
    allocated = torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated
    if torch.cuda.is_available(): return allocated()/1e6
    import psutil
    if not peak: return psutil.Process().memory_info().rss/1e6
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*(1 if sys.platform == 'darwin' else 1024)/1e6

def count_case(case, size):
    from .counts import count
    return {k:count(cases[case], k) for k in (1, 8)}

def device(case, size):
    "What `learners` runs on"
    gpu = torch.cuda.is_available()
    return dict(kind='gpu' if gpu else 'cpu', device=torch.cuda.get_device_name() if gpu else 'CPU')

def learners(case, rounds):
    from .learners import measure
    return measure(case, rounds)

def ways(case, rounds):
    from .ways import measure
    return measure(case, rounds)

def comparison(case, size):
    from .comparison import measure
    return measure()

def costs(case, rounds):
    from .costs import measure
    return measure(rounds)

def lengths(case, rounds):
    from .lengths import measure
    return measure(rounds)

kinds = dict(ways=ways, comparison=comparison, costs=costs, lengths=lengths, device=device, learners=learners,
             time=time_case, windows=time_windows, stack=time_stack, loading=time_loading, division=time_division,
             memory=peak_memory, counts=count_case)

def main(kind, case, size='0'):
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)  # the models are so small that threads only wait for each other
    print(json.dumps(kinds[kind](case, int(size))))

if __name__ == '__main__': main(*sys.argv[1:])
