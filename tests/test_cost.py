"What the callbacks cost, counted and never timed: host syncs, operations, calls of functions, bytes that are kept"
from collections import Counter

import pytest
from benchmarks import costs, report
from benchmarks.cases import Task, cases, training
from benchmarks.counts import Copies, LiveBytes, Operations, count_bytes, count_calls, count_operations

from common import *
from fastxtend_accum.windows.loss_check import LossCheck

K = 8

class Bare(Callback):
    "The least that accumulates in a Learner: no weighing, no check, and the loss of each batch is logged"
    order,run_valid = GradientAccumulation.order,False
    def after_backward(self):
        if (self.train_iter+1)%K: raise CancelBatchException

def bare(task, k): return training(task, Bare())

def fits(cb):
    "The training of batches that fit, beside a callback that adapts to memory"
    return lambda task, k: training(task, cb())

adapting = [fits(lambda: GradientAccumulation(micro_batch_size='auto')), fits(ActivationCheckpointing)]
ours = pytest.mark.parametrize('case', ['ours', 'ours_schedule'])

@pytest.mark.parametrize('case', ['ours', 'ours_schedule', 'ours_split', 'ours_cache'])
def test_host_syncs(case):
    "One a window, for the loss and the items together; a Learner without accumulation copies every loss"
    assert count_operations(cases['plain'], 1)['syncs'] == 1
    for k in 1,K: assert count_operations(cases[case], k)['syncs'] == 1/k

@pytest.mark.parametrize('loss_func', [nn.CrossEntropyLoss(), F.cross_entropy, nn.CrossEntropyLoss(reduction='sum')])
@pytest.mark.parametrize('case', ['ours', 'ours_split'])
def test_the_check_of_the_loss_adds_no_sync(case, loss_func, monkeypatch):
    "In a whole fit of 4 windows: its numbers come with those of the window"
    checks = []
    def syncs():
        task,counts = Task(4*K),Counter()
        task.loss_func = loss_func
        with monkeypatch.context() as m:
            m.setattr('fastxtend_accum.windows.losses.as_count', lambda o: o)  # as on a GPU
            train = cases[case](task, K)
            with Operations(counts, task),Copies(counts): train()
        return counts
    compare = LossCheck.compare
    monkeypatch.setattr(LossCheck, 'compare', lambda self: checks.append((compare(self), self.results[-1].verdict)))
    checked = syncs()
    assert checks == [(None, 'same')]*4
    monkeypatch.setattr(LossCheck, 'n_windows', 0)
    unchecked = syncs()
    assert checked['ops'] > unchecked['ops'] and 4 <= checked['syncs'] <= unchecked['syncs']  # of a sum, one fewer

@ours
def test_operations(case):
    "Beyond those of a Learner without accumulation, and beyond the least that accumulates"
    assert count_operations(cases[case], 1)['ops']-count_operations(cases['plain'], 1)['ops'] == 13
    assert count_operations(cases[case], K)['ops']-count_operations(bare, K)['ops'] == 14

def test_a_split_batch():
    "Views of inputs, targets and the output without its graph beside loader batches; the joined output is kept"
    windows,split = (count_operations(cases[o], K)|count_bytes(cases[o], K) for o in ('ours', 'ours_split'))
    assert split['ops']-windows['ops'] == 4 and split['kept'] == 4*(K*16*10 + 6)

@pytest.mark.parametrize('make', adapting)
def test_what_fits(make):
    "No more syncs and operations than windows, and no more bytes are kept than without a callback"
    assert count_operations(make, 1) == count_operations(cases['ours'], 1)
    assert count_bytes(make, 1)['kept'] == count_bytes(cases['plain'], 1)['kept']

# Calls of Python and C functions per micro-batch, relative to the plain Learner: with torch's SGD, with fastai's Adam

limits = dict(windows={1:(1.06, 1.06), 8:(.68, .64), 64:(.63, .56)}, split={8:(.57, .52), 64:(.50, .44)},
              checkpointing={1:(1.41, 1.37)})

@pytest.mark.parametrize('opt', costs.opts)
@pytest.mark.parametrize('kind,k', [(kind, k) for kind,ks in limits.items() for k in ks])
def test_calls_of_a_micro_batch(kind, k, opt):
    assert costs.calls(kind, k, opt) <= limits[kind][k][opt == 'adam']

@pytest.mark.parametrize('opt', costs.opts)
def test_calls_of_a_schedule(opt):
    "It is asked for the size of each window"
    assert 0 < costs.calls('schedule', K, opt)-costs.calls('windows', K, opt) <= .04

def test_calls_are_fewer_than_with_the_least_that_accumulates():
    "Which logs each loader batch"
    a,b,c = (count_calls(o, K)['with_c'] for o in (cases['ours'], bare, cases['plain']))
    assert a < b < c

@pytest.mark.parametrize('kind,most', [('windows', 3.), ('split', 3.6)])
def test_calls_of_the_first_windows(kind, most):
    "In windows' worth of later ones: those of the check of the loss in 16 windows, and of the look at what moves"
    check,looks = costs.first_calls(kind).values()
    assert 0 < check <= most and 0 < looks <= .1

def test_nothing_is_searched(monkeypatch):
    "What fastai asks for in each batch is found on the callback, and not by a search of Learner and model"
    searches = []
    def search(self, name):
        searches.append(name)
        return Callback.__getattr__(self, name)
    monkeypatch.setattr(GradientAccumulation, '__getattr__', search, raising=False)
    def searched(n):
        searches.clear()
        learn = fit(make_learner(8, n=n, cbs=GradientAccumulation(16)), 1)
        assert learn.train_iter == n//16
        return list(searches)
    assert searched(32) == searched(128) != []

@ours
def test_bytes_kept(case):
    "The last predictions, 16 times 10 numbers, and seven numbers beside them"
    counts = count_bytes(cases[case], K)
    assert counts['kept'] == 4*(16*10 + 7) < counts['parameters']

# The counts themselves

class Wasteful(GradientAccumulation):
    "Costs a host sync with its operation, a call, and a buffer"
    def after_loss(self):
        self.learn.loss.item()
        if 'buffer' not in vars(self): vars(self)['buffer'] = torch.zeros(10_000)

def test_the_counts_see_what_is_added():
    def wasteful(task, k): return training(task, Wasteful(k*task.batches.bs))
    a,b = count_operations(cases['ours'], K),count_operations(wasteful, K)
    assert b['syncs']-a['syncs'] == 1 and b['ops']-a['ops'] == 1
    assert count_calls(wasteful, K)['calls']-count_calls(cases['ours'], K)['calls'] >= 1
    assert count_bytes(wasteful, K)['kept']-count_bytes(cases['ours'], K)['kept'] == 40_000

def test_live_bytes():
    "A storage counts once, until it is freed, and the weights do not"
    m = nn.Linear(10, 10)
    with LiveBytes(m) as live: m(torch.zeros(2, 10))
    assert live.peak == 80+80
    with LiveBytes() as live:
        a = torch.zeros(100)  # 400 bytes
        b = a[:50].view(5, 10)
        c = a+1
        assert live.now == 800
        del c
        d = a.double()
    assert (live.now, live.peak) == (400+800, 400+800) and b.sum() == d.sum() == 0

def test_a_label_for_every_contestant(): assert list(report.labels) == list(cases)

def test_the_division_can_be_measured():
    from benchmarks.measure import time_division
    times = time_division('ours', 10**4)
    assert times['parameters'] > 9000 and 0 < times['division'] < times['backward']
