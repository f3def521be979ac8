"The check of the loss: it warns of losses that no weights make exact, of no others, and leaves no trace"
import pytest
from fastai.callback.mixup import MixUp
from fastai.losses import *

from callback_fits import At
from common import *
from labels import *
from loss_table import *
from our_warnings import warnings_of
from fastxtend_accum.windows import loss_check
from fastxtend_accum.windows.loss_check import KeptMicroBatch, is_inexact, tolerance
from fastxtend_accum.windows.state import random_states


def kept_parts(loss_func, pred, targets, sizes=(8, 5)):
    "Returns micro-batches of these sizes, with what `loss_items` counts"
    res = []
    for args in parts_of(pred, targets, sizes):
        rows = len(args[0])
        res.append(KeptMicroBatch(args, rows, loss_items(loss_func, *args, rows=rows)))
    return res


# What it says of the table of losses

def test_it_computes_gradients_where_they_are_switched_off():
    row = INEXACT['rmse']
    with torch.no_grad(): assert is_inexact(row.loss_func, kept_parts(row.loss_func, row.pred, row.targets))


@pytest.mark.parametrize('autocasts', [False, True])
@pytest.mark.parametrize('sizes', [(8, 8), (8, 5), (3, 2)])
@pytest.mark.parametrize('margin', [0.1, 10])
def test_it_tells_exact_losses_from_others_by_a_wide_margin(margin, sizes, autocasts, monkeypatch):
    "In micro-batches of even, odd and small sizes, their errors are ten times below its tolerance, or ten times above"
    monkeypatch.setattr(loss_check, 'tolerance', tolerance*margin)
    for name, row in (EXACT | INEXACT).items():
        pred = row.pred
        if autocasts:
            pred = pred.bfloat16().float()  # as the model gives it, and fastai makes it float32
        with autocast('cpu', dtype=torch.bfloat16, enabled=autocasts):
            found = is_inexact(row.loss_func, kept_parts(row.loss_func, pred, row.targets, sizes))
        assert found == (name in INEXACT), name


@pytest.mark.parametrize('weight', [1e-2, 1e-5, 1e-8])
@pytest.mark.parametrize('loss_of_head, expected', [
    (lambda scores: info_nce(scores, scores), True),
    (lambda scores: scores.pow(2).mean(), False)])
def test_a_small_head_in_an_output_of_its_own_is_seen_beside_a_large_loss(loss_of_head, expected, weight):
    def loss_func(pred, targ):
        return F.mse_loss(pred['body'], targ) + weight*loss_of_head(pred['heads'][0])

    micro_batches = []
    for body, head, targ in parts_of(VALUES, [LOGITS, TARGETS]):
        pred = dict(body=body, heads=(head,))
        micro_batches.append(KeptMicroBatch((pred, targ), len(targ), len(targ)))
    assert is_inexact(loss_func, micro_batches) == expected


# What it cannot compare

def mean_square(pred, targ):
    return (pred**2).mean()


@pytest.mark.parametrize('loss_func, preds', [
    (mean_square, [tensor(1.), tensor(2.)]),
    (rmse, [torch.zeros(2, 7), torch.zeros(2, 7)/0]),
    (rmse, [LABELS[:2], LABELS[2:4]]),  # without a gradient
    (OwnWeights(torch.mul), [VALUES[:2], VALUES[2:4]])])  # returns no number
def test_it_is_silent_about_what_it_cannot_compare(loss_func, preds):
    targets = TARGETS[:4].split(2)
    micro_batches = [KeptMicroBatch(args, 2, 2) for args in zip(preds, targets)]
    assert not is_inexact(loss_func, micro_batches)


@pytest.mark.parametrize('as_count', [int, tensor])
def test_a_window_whose_labels_are_all_ignored_is_not_said_to_be_inexact(as_count):
    "There is nothing to average over; on a GPU the counts stay tensors"
    labels = torch.full((2, 8), -100)
    micro_batches = [KeptMicroBatch((LOGITS[:8], o), 8, as_count(0)) for o in labels]
    assert not is_inexact(nn.CrossEntropyLoss(), micro_batches)


@pytest.mark.parametrize('n_kept_in_first', [0, 3])
def test_a_micro_batch_whose_labels_are_all_ignored_adds_nothing(n_kept_in_first):
    labels = LABELS[:13].clone()
    labels[n_kept_in_first:8] = -100
    loss_func = nn.CrossEntropyLoss()
    micro_batches = kept_parts(loss_func, LOGITS, [labels])
    assert [o.items for o in micro_batches] == [n_kept_in_first, 5]
    assert not is_inexact(loss_func, micro_batches)
    by_rows = [o._replace(items=o.rows) for o in micro_batches]
    assert is_inexact(loss_func, by_rows)


# Losses that have a state, or draw

class Counts:
    "A loss that counts its calls, and works in place"
    def __init__(self):
        self.calls = 0
        self.buffer = torch.zeros(2)

    def __call__(self, pred, targ):
        self.calls += 1
        self.buffer += 1
        return F.mse_loss(pred.mul_(2), targ)

    def method(self, pred, targ): return self(pred, targ)
    def by_calls(self, pred, targ): return self(pred, targ)*self.calls


def dropped_out(pred, targ):
    errors = F.dropout(pred[:, 0]-targ, 0.5)
    return errors.pow(2).mean().float()


def by_python(pred, targ):
    return F.mse_loss(pred, targ)*random.random()


@pytest.mark.parametrize('loss_of', [
    noop,
    lambda counts: counts.method,
    lambda counts: counts.by_calls,
    lambda counts: partial(counts),
    lambda counts: by_python])
def test_it_leaves_no_trace_and_gives_no_false_alarm(loss_of):
    "In the loss, in the generators of the process, in autocast, and in the graph of the outputs"
    layer = nn.Linear(5, 5)
    counts = Counts()
    loss_func = loss_of(counts)
    with autocast('cpu', dtype=torch.bfloat16):
        pred = layer(LOGITS)
        before = random_states()
        version_before = pred._version
        micro_batches = [KeptMicroBatch(args, 8, 8) for args in parts_of(pred, [LOGITS], (8, 8))]
        assert not is_inexact(loss_func, micro_batches)
        assert torch.is_autocast_enabled('cpu')
    assert counts.calls == 0
    assert_same(counts.buffer, torch.zeros(2))
    assert str(random_states()) == str(before)
    assert pred._version == version_before
    pred.sum().backward()
    assert layer.weight.grad is not None


# In a fit

def conv():
    torch.manual_seed(0)
    return nn.Conv2d(3, 3, 3, padding=1)


def learner_of_maps(row, bs, cbs):
    return learner_of((row.pred, *row.targets), bs, cbs, row.loss_func, conv())


def in_windows(): return 4, GradientAccumulation(16)
def in_micro_batches(): return 16, GradientAccumulation(16, micro_batch_size=6)
def in_growing_windows(): return 4, GradientAccumulationSchedule(4, 16)
def in_mixed_precision(): return 4, [GradientAccumulation(16), CpuMixedPrecision()]


WAYS = [in_windows, in_micro_batches, in_growing_windows, in_mixed_precision]


INEXACT_IN_FIT = ['combined', 'batch_dice', 'wrapped_weights']
EXACT_IN_FIT = ['focal', 'dice', 'wrapped']


@pytest.mark.parametrize('make, inexact, exact', paired(WAYS, INEXACT_IN_FIT, EXACT_IN_FIT))
def test_a_fit_warns_once_of_a_loss_that_is_not_exact_and_of_no_other(make, inexact, exact):
    said = warnings_of(learner_of_maps(INEXACT[inexact], *make()), 2)
    assert len(said) == 1
    assert said[0].startswith('accumulation is not exact for this loss')
    assert 'GradientCache' in said[0]
    assert warnings_of(learner_of_maps(EXACT[exact], *make()), 2) == []


def of_kept(pred, targ):
    return F.cross_entropy(pred, targ.long()).float()


def of_all(pred, targ):
    return F.mse_loss(pred[:, 0], targ).float()


def sqrt_of_mean(pred, targ):
    return of_all(pred, targ).sqrt()


def said_of(loss_func, samples=None, bs=8, **settings):
    "Returns what a fit in windows of 16 says"
    cb = GradientAccumulation(16, **settings)
    return warnings_of(learner_of(samples or labelled(64), bs, cb, loss_func))


@pytest.mark.parametrize('n_alike, n_warnings', [(0, 1), (3, 1), (4, 0)])
def test_the_first_4_windows_are_compared(n_alike, n_warnings):
    "The first label that is ignored comes after `n_alike` windows in which all are known"
    inputs, labels = labelled(16*6)
    labels[16*n_alike+3] = MISSING
    assert len(said_of(of_kept, (inputs, labels))) == n_warnings


def test_windows_of_one_micro_batch_are_not_counted():
    "The schedule begins with more than four of them"
    learn = learner_of(labelled(640), 8, GradientAccumulationSchedule(8, 32), sqrt_of_mean)
    assert len(warnings_of(learn)) == 1


def test_nothing_is_announced_where_it_does_not_matter():
    "In windows of one micro-batch, of a loss that varies, and of one whose items are known"
    inputs, labels = labelled(64, missing_share=0.3)
    assert len(said_of(of_kept, (inputs, labels))) == 1
    assert said_of(of_kept, (inputs, labels), num_items=lambda learn: n_kept(learn.y)) == []
    assert said_of(sqrt_of_mean, bs=16) == []
    assert len(said_of(sqrt_of_mean)) == 1
    assert said_of(dropped_out) == []


def calls_in_6_windows():
    "Returns the samples in each call of the loss in 6 windows of two micro-batches"
    calls = []

    def loss_func(pred, targ):
        calls.append(len(pred))
        return of_all(pred, targ)

    assert said_of(loss_func, labelled(6*16)) == []
    return calls


def test_it_calls_the_loss_in_the_first_4_windows():
    "Twice for the window, and once for each micro-batch"
    calls = calls_in_6_windows()
    for i in range(4): assert calls[6*i:6*i+6] == [8, 8, 16, 16, 8, 8]
    assert calls[24:] == [8, 8, 8, 8]


def test_it_does_not_call_the_loss_for_large_outputs(monkeypatch):
    monkeypatch.setattr(LossCheck, 'max_bytes', 100)
    calls = calls_in_6_windows()
    assert len(calls) == 12
    assert set(calls) == {8}


def test_it_does_not_copy_large_outputs(monkeypatch):
    "They have 128 bytes with their targets: the copy may not fit in memory"
    copied = []
    monkeypatch.setattr(loss_check, 'copy_of', copied.append)
    monkeypatch.setattr(LossCheck, 'max_bytes', 100)
    kept = []
    LossCheck(mse).keep(kept, mse, data(8), rows=8, items=8)
    assert kept == copied == []


def test_the_fit_is_the_same_without_the_check(monkeypatch):
    "Weights, losses and random numbers"
    def train():
        set_seed(3)
        m = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.3))
        cbs = [GradientAccumulation(16), MixUp()]
        learn = learner_of((LOGITS, LABELS), 4, cbs, CrossEntropyLossFlat(), m)
        fit(learn, 2)
        return weights(learn), losses(learn), str(random_states())

    checked = train()
    monkeypatch.setattr(LossCheck, 'n_windows', 0)
    unchecked = train()
    assert_same(unchecked[0], checked[0])
    assert unchecked[1:] == checked[1:]


@pytest.mark.parametrize('next_name, n_warnings', [('axis', 0), ('combined', 1)])
def test_the_fit_after_an_interrupt_or_lr_find_checks_its_own_loss(next_name, n_warnings):
    "These say nothing of theirs, or it would be an error here"
    learn = learner_of_maps(INEXACT['combined'], 4, GradientAccumulation(16))
    with pytest.raises(KeyboardInterrupt):
        fit(learn, 1, cbs=Fault(KeyboardInterrupt, 'after_pred', 2, 0))
    find_rate(learn, 12)
    learn.loss_func = (EXACT | INEXACT)[next_name].loss_func
    assert len(warnings_of(learn)) == n_warnings


def twice_the_sqrt(pred, targ):
    return 2*sqrt_of_mean(pred, targ)


class OfRoot:
    def loss(self, pred, targ): return sqrt_of_mean(pred, targ)


@pytest.mark.parametrize('loss_of, n_warnings', [
    (lambda owner: partial(owner.loss), 0),  # is another one each time
    (lambda owner: owner.loss, 1)])
def test_micro_batches_are_compared_if_they_have_the_same_loss(loss_of, n_warnings):
    "A callback sets it again for each batch"
    owner = OfRoot()
    def exchange(self): self.learn.loss_func = loss_of(owner)
    cbs = [GradientAccumulation(16), At('before_batch', exchange, 20)]
    learn = learner_of(labelled(16*4), 4, cbs, loss_of(owner))
    assert len(warnings_of(learn)) == n_warnings


@pytest.mark.parametrize('first', [of_all, twice_the_sqrt])
def test_a_loss_that_is_exchanged_in_mid_fit_is_checked_too(first):
    "After the windows in which the first one was compared. A fit warns once"
    def exchange(self):
        if self.train_iter == 24: self.learn.loss_func = sqrt_of_mean

    cbs = [GradientAccumulation(16), Callback(after_batch=exchange)]
    learn = learner_of(labelled(16*40), 8, cbs, first)
    assert len(warnings_of(learn)) == 1
    assert learn.loss_func is sqrt_of_mean
