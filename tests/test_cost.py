"What the callbacks cost, counted and never timed: host syncs, operations, calls of functions, and bytes that are kept"
import pytest
from benchmarks import costs
from benchmarks.cases import cases, training
from benchmarks.counts import (
    Copies, Operations, Task, count, count_bytes, count_operations, counts_stay_tensors)

from common import *

K = 8


class Bare(Callback):
    "The least that accumulates in a Learner: it weighs and checks nothing, and the loss of each batch is logged"
    order, run_valid = GradientAccumulation.order, False
    def after_backward(self):
        if (self.train_iter+1)%K: raise CancelBatchException


def bare(task, k): return training(task, Bare())


def auto(task, k):
    "Batches that fit are not split"
    return training(task, GradientAccumulation(micro_batch_size='auto'))


def checkpointing(task, k):
    "Of batches that fit, no block runs again"
    return training(task, ActivationCheckpointing())


adapting = pytest.mark.parametrize('make', [auto, checkpointing])
windows_and_schedule = pytest.mark.parametrize('case', ['ours', 'ours_schedule'])


# Host syncs

@pytest.mark.parametrize('case', ['ours', 'ours_schedule', 'ours_split', 'ours_cache'])
def test_host_syncs(case):
    "One a window, for the loss and the items together; a Learner without accumulation copies every loss"
    plain = count_operations(cases['plain'], 1)
    one = count_operations(cases[case], 1)
    eight = count_operations(cases[case], K)
    assert plain['syncs'] == one['syncs'] == 1
    assert eight['syncs'] == 1/K


def syncs_of_windows(case, loss_func, n):
    "Returns the host syncs of each of the first `n` windows of a fit"
    task = Task(n*K)
    task.loss_func = loss_func
    counts = Counter()
    marks = []
    def mark(): marks.append(counts['syncs'])
    task.batches.on_request = mark
    train = cases[case](task, K)
    with counts_stay_tensors(), Operations(counts), Copies(counts): train()
    ends = marks[::K]
    return [end-start for start, end in zip(ends, ends[1:])]


@pytest.mark.parametrize('case, loss_func, first', [
    ('ours', F.cross_entropy, 6),
    ('ours_split', nn.CrossEntropyLoss(reduction='sum'), 5)])
def test_host_syncs_of_the_first_windows(case, loss_func, first, monkeypatch):
    """The check of the loss waits for its results, in each window that it compares; then a window has one sync. The
    first one also waits for the items of a sample, unless the loss is a sum"""
    monkeypatch.setattr(LossCheck, 'n_windows', 3)
    assert syncs_of_windows(case, loss_func, 5) == [first, 5, 5, 1, 1]


# Operations

@windows_and_schedule
def test_operations(case):
    """A window of one has at most 16 beyond those of a Learner without accumulation: it counts items, makes the loss 0
    where there are none, in the sum, too, and copies three numbers at once. In a window of eight, a batch also has a
    weight, and at most 17 beyond the least that accumulates"""
    plain = count_operations(cases['plain'], 1)
    one = count_operations(cases[case], 1)
    assert plain['ops'] < one['ops'] <= plain['ops']+16
    least = count_operations(bare, K)
    eight = count_operations(cases[case], K)
    assert least['ops'] < eight['ops'] <= least['ops']+17


def test_operations_and_bytes_of_a_split_batch():
    """A micro-batch has 3 operations beyond those of a loader batch: views of inputs and targets, and the output with
    no graph; a window has 8, for the sums of the batch, their mean and the joined output, which is kept"""
    loader_batches = count_operations(cases['ours'], K)
    split = count_operations(cases['ours_split'], K)
    assert split['ops'] == loader_batches['ops']+3+8/K
    n_outputs = K*16*10
    counts = count_bytes(cases['ours_split'], K)
    assert counts['kept'] == 4*(n_outputs+6)


@adapting
def test_what_fits(make):
    """What adapts to memory has the syncs and operations of windows, and keeps one number more than a plain Learner:
    the loss of the last window"""
    windows = count_operations(cases['ours'], 1)
    assert count_operations(make, 1) == windows
    plain = count_bytes(cases['plain'], 1)
    ours = count_bytes(make, 1)
    assert ours == plain|dict(kept=plain['kept']+4)


# Calls of Python and C functions per micro-batch, relative to the plain Learner: with torch's SGD, with fastai's Adam

# With windows of one, fastai's optimizer, callbacks and loader alone make .34 of the calls with SGD
limits = [
    ('windows', 1, 'sgd', .45),
    ('windows', 8, 'sgd', .245),
    pytest.param('schedule', 8, 'sgd', .245, marks=pytest.mark.long),  # it is asked for the size of each window
    pytest.param('split', 8, 'adam', .215, marks=pytest.mark.long),
    pytest.param('checkpointing', 1, 'adam', .88, marks=pytest.mark.long)]


@pytest.mark.parametrize('kind,k,opt,limit', limits)
def test_calls_of_a_micro_batch(kind, k, opt, limit):
    assert costs.calls(kind, k, opt) <= limit


@pytest.mark.long
def test_calls_of_the_first_windows():
    "In the first 16 windows of a fit, of which four are checked, too, a micro-batch takes much less than a plain batch"
    first = costs.first_calls('windows', 'sgd')
    assert costs.calls('windows', K, 'sgd') < first <= .38


# Bytes

@pytest.mark.long
@windows_and_schedule
def test_bytes_kept(case):
    "The last outputs, 16 times 10 numbers, and seven numbers beside them"
    counts = count_bytes(cases[case], K)
    assert counts['kept'] == 4*(16*10+7)
    assert counts['kept'] < counts['parameters']


# The counts themselves

class Wasteful(GradientAccumulation):
    "Costs a host sync with its operation, a call, and a buffer"
    buffer = None
    def after_loss(self):
        self.learn.loss.item()
        if self.buffer is None: self.buffer = torch.zeros(10_000)


def wasteful(task, k): return training(task, Wasteful(k*task.batches.bs))


@pytest.mark.long
def test_the_counts_see_what_is_added():
    ours = count(cases['ours'], K)
    more = count(wasteful, K)
    assert more['syncs'] == ours['syncs']+1
    assert more['ops'] == ours['ops']+1
    assert more['calls'] >= ours['calls']+1
    assert more['kept'] == ours['kept']+40_000
