"Memory that runs out on purpose"
from common import *


def run_out_of_memory(*args):
    "Raises the error of PyTorch. It may stand for a forward pass, a hook or an event"
    raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')


def split_auto(accum_bs=None): return GradientAccumulation(accum_bs, micro_batch_size='auto')


auto_cache = partial(GradientCache, 'auto')


class MemoryLimit:
    """Lets memory run out in passes of `m` with more than `samples` samples, and notes the sizes of all passes, also of
    those that fail. A retry would undo what `m` itself noted"""
    def __init__(self, m, samples=math.inf):
        self.samples = samples
        self.in_training = []
        self.in_validation = []
        m.register_forward_pre_hook(self.check)

    def check(self, m, args):
        n = len(args[0])
        sizes = self.in_training if m.training else self.in_validation
        sizes.append(n)
        if n > self.samples: run_out_of_memory()


class OutOfMemory(Fault):
    "Lets memory run out at these times that `event` fires in training; unlike a Fault, several times"
    run_valid = False

    def __init__(self, event, *times, order=0):
        super().__init__(None, event, 0, order)
        self.times = times

    def strike(self):
        self.count += 1
        if self.count in self.times: run_out_of_memory()
