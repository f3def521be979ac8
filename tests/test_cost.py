"What the callbacks cost, counted and never timed: a change that adds a host sync, an operation, a Python call or a buffer fails here"
from collections import Counter

import pytest
from benchmarks import costs, report
from benchmarks.cases import Task, cases, training
from benchmarks.counts import Copies, LiveBytes, Operations, count_bytes, count_calls, count_operations

from common import *
from fastxtend_accum.learner.loss_check import LossCheck

K = 8

class Bare(Callback):
    "The least that accumulates in a Learner: no weighing, no check, no logging, a gradient that is too large"
    order,run_valid = GradientAccumulation.order,False
    def after_backward(self):
        if (self.train_iter+1)%K: raise CancelBatchException

def bare(task, k): return training(task, Bare())

ours = pytest.mark.parametrize('case', ['ours', 'ours_schedule'])

@pytest.mark.parametrize('case', ['ours', 'ours_schedule', 'ours_pieces', 'ours_cache'])
def test_host_syncs(case):
    "One a window, for the loss and the items together; a Learner without accumulation copies every loss"
    assert count_operations(cases['plain'], 1)['syncs'] == 1
    for k in 1,K: assert count_operations(cases[case], k)['syncs'] == 1/k

@pytest.mark.parametrize('loss_func', [nn.CrossEntropyLoss(), F.cross_entropy, nn.CrossEntropyLoss(reduction='sum')])
@pytest.mark.parametrize('case', ['ours', 'ours_pieces'])
def test_the_check_of_the_loss_adds_no_sync(case, loss_func, monkeypatch):
    "In a whole fit of 4 windows: its numbers come with those of the window"
    checks = []
    def syncs():
        task,counts = Task(4*K),Counter()
        task.loss_func = loss_func
        with monkeypatch.context() as m:
            m.setattr('fastxtend_accum.window.losses.as_count', lambda o: o)  # as on a GPU
            train = cases[case](task, K)
            with Operations(counts, task),Copies(counts): train()
        return counts
    judge = LossCheck.judge
    monkeypatch.setattr(LossCheck, 'judge', lambda self, *o: checks.append((judge(self, *o), self.found[-1].says)))
    checked = syncs()
    assert checks == [(None, 'same')]*4
    monkeypatch.setattr(LossCheck, 'windows', 0)
    unchecked = syncs()
    assert checked['ops'] > unchecked['ops'] and 4 <= checked['syncs'] <= unchecked['syncs']  # of a sum, the fetch saves one

@ours
def test_operations(case):
    "As on a GPU: beyond those of a Learner without accumulation, and beyond the least that accumulates"
    assert count_operations(cases[case], 1)['ops']-count_operations(cases['plain'], 1)['ops'] == 13
    assert count_operations(cases[case], K)['ops']-count_operations(bare, K)['ops'] == 14

@ours
def test_python_calls(case):
    "Functions of the package itself per micro-batch; all functions are fewer than with the least that accumulates, which logs more often"
    counts = count_calls(cases[case], K)
    assert counts['our_calls'] == {'ours':34.0, 'ours_schedule':34.875}[case]  # 7 more a window: the schedule is asked for a size
    assert counts['calls'] < count_calls(bare, K)['calls'] < count_calls(cases['plain'], K)['calls']

# Calls of Python and C functions in one micro-batch, relative to the plain Learner, by K: with torch's SGD, with fastai's Adam. `exact` is one micro-batch a window in a loop
# of its own, which notes the state of the random generators in each batch (and here, in a short epoch, all that the model holds in every 20th), so that memory may run out later:
# 1.08 of it are the window's. Goals are 1.08 for K=1, .75 for K=8, .78 for a schedule and 1.03 for `exact`. With SGD, K=8 misses them, since fastai calls the events of all callbacks for
# each micro-batch: the least that accumulates, `bare`, has .96 and .83
limits = dict(windows={1:(1.08, 1.08), 8:(.80, .71), 64:(.75, .66)}, pieces={8:(.60, .53), 64:(.51, .45)}, schedule={8:(.80, .72)}, exact={1:(1.14, 1.13)})

@pytest.mark.parametrize('opt', costs.opts)
@pytest.mark.parametrize('way,k', [(way, k) for way,ks in costs.sizes.items() for k in ks])
def test_calls_of_a_micro_batch(way, k, opt): assert costs.calls(way, k, opt) <= limits[way][k][opt == 'adam']

# In windows' worth of later ones. Those of a loader batch cost a third less, and their check is the same; `exact` looks at the batches 1, 2, 3, 5, 9 ...
first_limits = dict(windows=(2.1, .16), pieces=(2.8, .3), exact=(.1, 2.85))

@pytest.mark.parametrize('way', first_limits)
def test_calls_of_the_first_windows(way):
    "Of the first 16: those of the check of the loss, and those of the looks at what a pass moves; at most three windows' worth in all, but for the looks of `exact`"
    check,looks = costs.first_calls(way).values()
    assert check <= first_limits[way][0] and looks <= first_limits[way][1] and check+looks <= 3.03

def test_nothing_is_searched(monkeypatch):
    "What fastai asks the callback for in the loop is found on it: as many searches of the Learner and its model for 4 micro-batches as for 16"
    searches = []
    def search(self, name):
        searches.append(name)
        return Callback.__getattr__(self, name)
    monkeypatch.setattr(GradientAccumulation, '__getattr__', search, raising=False)
    def searched(n):
        searches.clear()
        learn = fit(make_learner(8, n=n, cbs=GradientAccumulation(16)), 1)
        assert learn.train_iter == n//8
        return list(searches)
    assert searched(32) == searched(128) != []

@ours
def test_bytes_kept(case):
    "The last predictions, 16 times 10 numbers, and seven numbers beside them"
    counts = count_bytes(cases[case], K)
    assert counts['kept'] == 4*(16*10 + 7) < counts['parameters']

def test_pieces_of_a_batch():
    """Beside micro-batches from the loader: views of inputs, targets and the output without its graph, and twice a batch, to join the outputs and to keep the batch;
    what is kept is the batch's output, as without the callback. Fewer functions are called, since most events come once a batch"""
    from_loader,pieces = (count_operations(cases[o], K)|count_calls(cases[o], K)|count_bytes(cases[o], K) for o in ('ours', 'ours_pieces'))
    assert pieces['ops']-from_loader['ops'] == 3+2/K and pieces['our_calls']-from_loader['our_calls'] == 22.125
    assert pieces['kept'] == 4*(K*16*10 + 15) and pieces['calls'] < .8*from_loader['calls']

class Wasteful(GradientAccumulation):
    "Costs a host sync with its operation, a call, and a buffer"
    def after_loss(self):
        super().after_loss()
        self.learn.loss.item()
        if 'buffer' not in vars(self): vars(self)['buffer'] = torch.zeros(10_000)

def test_live_bytes_without_the_weights():
    m = nn.Linear(10, 10)
    with LiveBytes(m) as live: m(torch.zeros(2, 10))
    assert live.peak == 80+80

def test_live_bytes_count_a_storage_once_and_until_it_is_freed():
    with LiveBytes() as live:
        a = torch.zeros(100)  # 400 bytes
        b = a[:50].view(5, 10)
        c = a+1
        assert live.now == 800
        del c
        d = a.double()
    assert (live.now, live.peak) == (400+800, 400+800)
    assert b.sum() == d.sum() == 0

def test_the_counts_see_what_is_added():
    "The guard itself: each count rises by just what was added"
    def wasteful(task, k): return training(task, Wasteful(k*task.batches.bs))
    a,b = count_operations(cases['ours'], K),count_operations(wasteful, K)
    assert b['syncs']-a['syncs'] == 1 and b['ops']-a['ops'] == 1
    assert count_calls(wasteful, K)['calls']-count_calls(cases['ours'], K)['calls'] >= 1
    assert count_bytes(wasteful, K)['kept']-count_bytes(cases['ours'], K)['kept'] == 40_000

def test_a_label_for_every_contestant(): assert list(report.labels) == list(cases)

def test_the_division_can_be_measured():
    from benchmarks.measure import time_division
    times = time_division('ours', 10**4)
    assert times['parameters'] > 9000 and 0 < times['division'] < times['backward']
