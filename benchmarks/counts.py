"""What can be counted and need not be timed: operations, host syncs and Python calls per micro-batch, bytes kept; the
same on every machine"""
import gc, sys, weakref
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from fastxtend_accum.windows import loss_check
from fastxtend_accum.windows import losses

from .cases import Task

package = str(Path(losses.__file__).parents[1])
copies = {torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist}  # a CPU need not copy: only the call shows

checked_once = patch.object(loss_check.LossCheck, 'n_windows', 1)  # the check ends after some windows: count without it

def is_here(o:torch.Tensor):
    "Whether `o` would be on the CPU on a machine with a GPU too"
    return getattr(o, 'here', False)

class LiveBytes(TorchDispatchMode):
    """A context that counts the bytes of the tensors that are made in it and still alive, `now`, and the most at a
    time, `peak`; not those of the weights of `model`, their gradients and its buffers"""
    def __init__(self, model=None):
        super().__init__()
        self.sizes,self.peak = {},0
        own = model.state_dict(keep_vars=True).values() if model else ()
        for o in [*own, *(o.grad for o in own if o.grad is not None)]: self.count(o, 0)
    def count(self, o, n_bytes):
        "Count the storage of `o` as `n_bytes`, until it is freed"
        storage = o.untyped_storage()
        if storage._cdata not in self.sizes: weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
        self.sizes[storage._cdata] = n_bytes
    @property
    def now(self): return sum(self.sizes.values())
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for o in out if isinstance(out, (tuple,list)) else [out]:
            if not isinstance(o, torch.Tensor) or o.untyped_storage()._cdata in self.sizes: continue
            self.count(o, o.untyped_storage().nbytes())
        self.peak = max(self.peak, self.now)
        return out

class Operations(TorchDispatchMode):
    "Counts what PyTorch dispatches: a kernel each, but for views"
    def __init__(self, counts, task): super().__init__(); self.counts,self.task = counts,task
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts['ops'] += 1
        if name == '_local_scalar_dense':  # item, float, bool, if
            self.counts['syncs'] += not (self.task.is_step(args[0]) or is_here(args[0]))
        return func(*args, **(kwargs or {}))

class Copies(TorchFunctionMode):
    "Counts what copies to the CPU; on it are tensors made of numbers, and what is computed from them alone"
    def __init__(self, counts): super().__init__(); self.counts = counts
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors,out = [o for o in args if isinstance(o, torch.Tensor)],func(*args, **kwargs)
        here = all(map(is_here, tensors)) if tensors else func is torch.tensor and kwargs.get('device') is None
        self.counts['syncs'] += func in copies and not here
        if here and isinstance(out, torch.Tensor): out.here = True
        return out

def in_windows(train, batches, k, start, stop):
    """Train, with `start` called after the first window of `k` micro-batches and `stop` after the last but one;
    micro-batches in between"""
    asked = 0
    last = batches.n//k*k - k
    def ask():
        nonlocal asked
        if asked == k: start()
        if asked == last: stop()
        asked += 1
    batches.ask = ask
    train()
    return last-k

def count_operations(make, k):
    "Operations and host syncs per micro-batch, as they would be on a GPU"
    task,counts,marks = Task(6*k),Counter(),[]
    def mark(): marks.append(Counter(counts))
    # `as_count` as it works on a GPU; on a CPU, item() waits for nothing
    with patch.object(losses, 'as_count', lambda o: o), checked_once:
        train = make(task, k)
        with Operations(counts, task), Copies(counts): n = in_windows(train, task.batches, k, mark, mark)
    return {name:(marks[1][name]-marks[0][name])/n for name in ('ops', 'syncs')}

def profiler(counts):
    "Counts the functions that are called: Python's, those of our package, and Python's with those in C"
    def profile(frame, event, arg):
        if event not in ('call','c_call'): return
        if frame.f_code.co_name.endswith('comp>'): return  # since Python 3.12 a comprehension is no call
        counts['with_c'] += 1
        counts['calls'] += event == 'call'
        counts['our_calls'] += event == 'call' and frame.f_code.co_filename.startswith(package)
    return profile

def count_calls(make, k, n=6):
    "Functions called per micro-batch, in `n` windows"
    task,counts = Task(n*k),Counter()
    profile = profiler(counts)
    with checked_once:
        train = make(task, k)
        train()  # once before, for what is cached
        n = in_windows(train, task.batches, k, lambda: sys.setprofile(profile), lambda: sys.setprofile(None))
    return {name:counts[name]/n for name in ('calls', 'our_calls', 'with_c')}

def count_first_calls(make, k, n=16):
    """Calls of Python and C functions in the first `n` windows of a fit beyond those of as many later ones, in windows'
    worth of these"""
    for windows in 2,n+3:  # a short fit before, for what is cached
        task,counts,marks = Task(windows*k),Counter(),[]
        task.batches.ask = lambda: marks.append(counts['with_c'])
        train = make(task, k)
        sys.setprofile(profiler(counts))
        train()
        sys.setprofile(None)
    first,later = marks[n*k]-marks[0],marks[(n+2)*k]-marks[(n+1)*k]
    return first/later-n

def storages(tensors):
    "Bytes by storage"
    strided = [o for o in tensors if o.layout == torch.strided and not isinstance(o, FakeTensor)]
    return {o.untyped_storage().data_ptr():o.untyped_storage().nbytes() for o in strided}

def kept_bytes():
    "Bytes of all live tensors but parameters, their gradients and the state of optimizers"
    import fastai.optimizer
    gc.collect()
    alive = gc.get_objects()
    tensors = [o for o in alive if issubclass(type(o), torch.Tensor)]
    params = [o for o in tensors if issubclass(type(o), torch.nn.Parameter)]
    states = [o.state for o in alive if issubclass(type(o), (torch.optim.Optimizer, fastai.optimizer.Optimizer))]
    state = [v for s in states for p in s.values() for v in p.values() if isinstance(v, torch.Tensor)]
    known = storages(params + [p.grad for p in params if p.grad is not None] + state)
    return sum(n for ptr,n in storages(tensors).items() if ptr not in known)

def count_bytes(make, k):
    """Bytes that training keeps from one micro-batch to the next, beyond parameters, gradients, optimizer state and the
    data: the most of a window"""
    task = Task(4*k)
    before,most,asked = kept_bytes(),0,0
    with checked_once: train = make(task, k)
    def ask():
        nonlocal most,asked
        if k < asked <= 2*k: most = max(most, kept_bytes()-before)
        asked += 1
    task.batches.ask = ask
    with checked_once: train()
    return dict(kept=most, parameters=sum(p.nbytes for p in task.model.parameters()))

def count(make, k): return {**count_operations(make, k), **count_calls(make, k), **count_bytes(make, k)}
