"""What can be counted and need not be timed: operations, host syncs and calls of functions per micro-batch, and bytes
that are kept. It is the same on every machine"""
import gc
import sys
import weakref
from collections import Counter
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from fastai.optimizer import Optimizer
from fastxtend_accum.windows import losses
from fastxtend_accum.windows.loss_check import LossCheck

from .cases import Task

# The check of the loss ends after 16 windows of a fit, and the counts are those of later ones
checked_once = patch.object(LossCheck, 'n_windows', 1)


# Operations and host syncs, as they would be on a GPU

copies = torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist


def is_here(o):
    "Returns whether `o` would be on the CPU on a machine with a GPU, too"
    return getattr(o, 'here', False)


class Operations(TorchDispatchMode):
    "Counts what PyTorch dispatches, which is a kernel each, but for views"
    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts['ops'] += 1
        reads_number = func.overloadpacket.__name__ == '_local_scalar_dense'  # item, float, bool, if
        if reads_number and not is_here(args[0]): self.counts['syncs'] += 1
        return func(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Counts copies to the CPU, where only the call shows them. What was copied is on the CPU, and so is what was made
    of numbers, or computed from such tensors alone"""
    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = [o for o in args if isinstance(o, torch.Tensor)]
        is_made_of_numbers = func is torch.tensor and kwargs.get('device') is None
        here = all(map(is_here, tensors)) if tensors else is_made_of_numbers
        is_copy = func in copies and not here
        if is_copy: self.counts['syncs'] += 1
        if not isinstance(out, torch.Tensor): return out
        if is_copy:
            with _disable_current_modes(): out = out.clone()  # `cpu` has returned the tensor itself
        if is_copy or here: out.here = True
        return out


def in_windows(train, batches, k, start, stop):
    """Trains, with `start` called after the first window of `k` micro-batches, and `stop` before the last one. Returns
    the number of micro-batches between them"""
    n_requested = 0
    last = batches.n_batches//k*k - k  # first micro-batch of the last window
    def on_request():
        nonlocal n_requested
        if n_requested == k: start()
        if n_requested == last: stop()
        n_requested += 1
    batches.on_request = on_request
    train()
    return last-k


def count_operations(make, k):
    "Returns operations and host syncs per micro-batch"
    task = Task(6*k)
    counts = Counter()
    marks = []
    def mark(): marks.append(Counter(counts))
    with counts_stay_tensors(), checked_once:
        train = make(task, k)
        with Operations(counts), Copies(counts): n = in_windows(train, task.batches, k, mark, mark)
    before, after = marks
    return {name: (after[name]-before[name])/n for name in ('ops', 'syncs')}


def counts_stay_tensors():
    "In this context, numbers of items are tensors, as on a GPU; on a CPU, `item` waits for nothing"
    def as_on_a_gpu(o): return o
    return patch.object(losses, 'as_count', as_on_a_gpu)


# Calls of functions

def profiler(counts):
    "Returns a profiler that counts calls of functions: in Python, and with those in C"
    def profile(frame, event, arg):
        if event not in ('call', 'c_call'): return
        code = frame.f_code
        if code.co_name.endswith('comp>'): return  # since Python 3.12 a comprehension is no call
        counts['with_c'] += 1
        if event == 'call': counts['calls'] += 1
    return profile


def count_calls(make, k, n=6):
    "Returns the calls per micro-batch in `n` windows"
    task = Task(n*k)
    counts = Counter()
    profile = profiler(counts)
    def start(): sys.setprofile(profile)
    def stop(): sys.setprofile(None)
    with checked_once:
        train = make(task, k)
        train()  # once before, for what is cached
        n_counted = in_windows(train, task.batches, k, start, stop)
    return {name: counts[name]/n_counted for name in ('calls', 'with_c')}


def count_first_calls(make, k, n=16):
    "Returns the calls per micro-batch, with those in C, in the first `n` windows of a fit"
    make(Task(2*k), k)()  # a short fit before, for what is cached
    task = Task((n+1)*k)
    counts = Counter()
    marks = []
    def mark(): marks.append(counts['with_c'])
    task.batches.on_request = mark
    train = make(task, k)
    sys.setprofile(profiler(counts))
    try: train()
    finally: sys.setprofile(None)
    return (marks[n*k]-marks[0])/(n*k)


# Bytes

class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made in this context and still alive, `now`, and the most at a time, `peak`.
    The weights of `model`, their gradients and its buffers do not count"""
    def __init__(self, model=None):
        super().__init__()
        self.sizes = {}  # bytes, by storage
        self.peak = 0
        own = model.state_dict(keep_vars=True).values() if model else ()
        for o in own:
            self.count(o, 0)
            if o.grad is not None: self.count(o.grad, 0)

    def count(self, o, n_bytes):
        "Counts the storage of `o` as `n_bytes`, until it is freed"
        storage = o.untyped_storage()
        key = storage._cdata
        if key not in self.sizes: weakref.finalize(storage, self.sizes.pop, key, None)
        self.sizes[key] = n_bytes

    @property
    def now(self): return sum(self.sizes.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        outputs = out if isinstance(out, (tuple, list)) else [out]
        for o in outputs:
            if not isinstance(o, torch.Tensor): continue
            storage = o.untyped_storage()
            if storage._cdata not in self.sizes: self.count(o, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out


def storages(tensors):
    "Returns the bytes of each storage"
    res = {}
    for o in tensors:
        if o.layout != torch.strided or isinstance(o, FakeTensor): continue
        storage = o.untyped_storage()
        res[storage.data_ptr()] = storage.nbytes()
    return res


def state_tensors(opt):
    "Returns the tensors in the state of an optimizer"
    res = []
    for state in opt.state.values():
        res += [o for o in state.values() if isinstance(o, torch.Tensor)]
    return res


def kept_bytes():
    "Returns the bytes of all live tensors but parameters, their gradients and the state of optimizers"
    gc.collect()
    tensors = []
    known = []
    for o in gc.get_objects():
        kind = type(o)
        if issubclass(kind, (torch.optim.Optimizer, Optimizer)): known += state_tensors(o)
        if not issubclass(kind, torch.Tensor): continue
        tensors.append(o)
        if not issubclass(kind, torch.nn.Parameter): continue
        known.append(o)
        if o.grad is not None: known.append(o.grad)
    known = storages(known)
    return sum(n for address, n in storages(tensors).items() if address not in known)


def count_bytes(make, k):
    """Returns the bytes that training keeps from one micro-batch to the next, the most of a window, beyond parameters,
    gradients, the optimizer's state and the data; and those of the parameters"""
    task = Task(4*k)
    before = kept_bytes()
    most = 0
    n_requested = 0
    def on_request():
        nonlocal most, n_requested
        is_in_second_window = k < n_requested <= 2*k
        if is_in_second_window: most = max(most, kept_bytes()-before)
        n_requested += 1
    with checked_once:
        train = make(task, k)
        task.batches.on_request = on_request
        train()
    return dict(kept=most, parameters=sum(p.nbytes for p in task.model.parameters()))


def count(make, k):
    return {**count_operations(make, k), **count_calls(make, k), **count_bytes(make, k)}
