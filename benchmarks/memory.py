"""The peak memory of a process that trains on batches of 16 to 256 samples, at once or 16 at a time; and the time of
GradientCache beside accumulation"""
import os
import re
import statistics
import time
from pathlib import Path
from unittest.mock import patch

import psutil
import torch
from torch import nn
from fastxtend_accum.windows.loss_check import LossCheck

from .cases import Batches, Task, cases
from .command import in_own_process

batch_sizes = 16, 32, 64, 128, 256
stack_sizes = 10**4, 10**5, 10**6


# Memory

def conv_model():
    layers = []
    for i in range(8):
        layers += [nn.Conv2d(16 if i else 3, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def peak_of_process():
    "Returns the most bytes so far, as Linux counts them"
    status = Path('/proc/self/status').read_text()
    return int(re.search(r'VmHWM:\s+(\d+)', status)[1])*1024


def peak_memory(case, effective):
    "Returns the MB that two steps on `effective` samples need: at once ('plain'), or 16 at a time"
    task = Task(0)
    bs = effective if case == 'plain' else 16
    task.model = conv_model()
    for pixels in 8, 64:  # small images first, for what is imported when it is first used
        images = torch.randn(bs, 3, pixels, pixels)
        targets = torch.randint(10, (bs,))
        task.batches = Batches([(images, targets)], 2*effective//bs)
        train = cases[case](task, effective//bs)
        before = psutil.Process().memory_info().rss
        train()
    return (peak_of_process()-before)/1e6


# Time

class Stack(Task):
    "Four square layers with `n_params` parameters in all, and batches of 16 samples of 64 tokens"
    def __init__(self, n_params, n):
        super().__init__(n)
        width = round((n_params/4)**.5)
        layers = [nn.Linear(width, width, bias=False) for _ in range(4)]
        self.model = nn.Sequential(*layers)
        inputs = torch.randn(16, 64, width)
        targets = torch.randn(16, 64, width)
        self.batches.batches = [(inputs, targets)]
        self.loss_func = nn.MSELoss()


def time_of_window(case, n_params, k=8):
    "Returns the CPU seconds of a window of `k` micro-batches, without the check of the loss: the median of four"
    task = Stack(n_params, 6*k)
    requested = []
    def note(): requested.append(time.process_time())
    task.batches.on_request = note
    with patch.object(LossCheck, 'n_windows', 0): cases[case](task, k)()
    ends = requested[k::k]  # the first window is not counted
    return statistics.median([end-start for start, end in zip(ends, ends[1:])])


def measure(rounds):
    "Returns the MB by case and samples; and seconds by number of parameters and case, once a round"
    os.environ['MALLOC_MMAP_THRESHOLD_'] = '65536'  # no holes in the heap of the processes below
    peaks = {}
    for case in 'plain', 'ours', 'ours_split', 'ours_cache':
        peaks[case] = {n: in_own_process(peak_memory, case, n) for n in batch_sizes}
    times = {n: dict(ours_split=[], ours_cache=[]) for n in stack_sizes}
    for _ in range(rounds):
        for n, by_case in times.items():
            for case, seconds in by_case.items(): seconds.append(time_of_window(case, n))
    return dict(peaks=peaks, times=times)
