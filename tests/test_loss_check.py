"The check of the loss: it warns of losses that no weights make exact, of no others, and leaves no trace"
import random
from collections import deque

import pytest
from fastai.callback.mixup import MixUp
from fastai.losses import *

from common import *
from labels import *
from loss_table import *
from our_warnings import warnings_of
from fastxtend_accum.windows.losses import loss_rules


# What it says of the table of losses

@pytest.mark.parametrize('autocasts', [False, True], ids=['float32', 'autocast'])
@pytest.mark.parametrize('sizes', [(8, 8), (8, 5), (3, 2)], ids=str)
def test_it_tells_exact_losses_from_others_by_a_wide_margin(sizes, autocasts):
    "In micro-batches of even, odd and small sizes, their errors are ten times below its tolerance, or ten times above"
    for name, row in (EXACT | INEXACT).items():
        pred = row.pred
        if autocasts:
            pred = pred.bfloat16().float()  # as the model gives it, and fastai makes it float32
        with autocast('cpu', dtype=torch.bfloat16, enabled=autocasts):
            found = check_loss(row.loss_func, parts_of(pred, row.targets, sizes))
        if name in EXACT:
            assert found.verdict == 'same', name
            assert found.error < LossCheck.tolerance/10, name
        else:
            assert found.verdict == 'differs', name
            assert not found.error < LossCheck.tolerance*10, name  # it may be NaN


def test_a_loss_that_works_in_place_gets_copies():
    logits = LOGITS.clone()
    labels = SOME_IGNORED.clone()
    assert check_loss(in_place, parts_of(logits, [labels])).verdict == 'same'
    assert_same(logits, LOGITS)
    assert_same(labels, SOME_IGNORED)


@pytest.mark.parametrize('weight', [1e-2, 1e-5, 1e-8])
@pytest.mark.parametrize('nested', [False, True], ids=['columns', 'output'])
@pytest.mark.parametrize('loss_of_head, verdict', [
    (lambda scores: info_nce(scores, scores), 'differs'),
    (lambda scores: scores.pow(2).mean(), 'same')], ids=['compares', 'mean'])
def test_a_small_head_is_seen_beside_a_large_loss(loss_of_head, verdict, nested, weight):
    "In an output of its own, or in columns of the same"
    def loss_func(pred, targ):
        if nested:
            body, head = pred['body'], pred['heads'][0]
        else:
            body, head = pred.split([7, 5], 1)
        return F.mse_loss(body, targ) + weight*loss_of_head(head)

    parts = []
    for body, head, targ in parts_of(VALUES, [LOGITS, TARGETS]):
        pred = torch.cat([body, head], 1)
        if nested: pred = dict(body=body, heads=(head,))
        parts.append((pred, targ))
    assert check_loss(loss_func, parts).verdict == verdict


# What it cannot compare

def mean_square(pred, targ):
    return (pred**2).mean()


def under_autocast(pred, targ):
    if torch.is_autocast_enabled('cpu'):
        return F.mse_loss(pred, targ)
    raise TypeError('autocast is off')


def mean_of_boxes(pred, targ):
    "Of a list with the boxes of each image"
    return sum(boxes.mean() for boxes in pred)/len(pred)


TWO_IMAGES = [torch.ones(3, 4), torch.ones(1, 4)]


@pytest.mark.parametrize('loss_func, preds, why', [
    (mean_square, [tensor(1.), tensor(2.)], 'cannot join'),
    (mean_square, [torch.zeros(2, 5), torch.zeros(2, 5)/0], 'NaN'),
    (mean_square, [torch.zeros(2, 5)], 'only one micro-batch'),
    (mean_of_boxes, [TWO_IMAGES, TWO_IMAGES], 'cannot be joined by samples'),
    (OwnWeights(torch.mul), [VALUES[:2], VALUES[2:4]], 'scalar'),
    (under_autocast, [VALUES[:2], VALUES[2:4]], 'autocast is off')])
def test_what_it_cannot_compare_is_unknown(loss_func, preds, why):
    "For a reason that it states"
    targets = TARGETS[:4].split(2)
    with autocast('cpu', dtype=torch.bfloat16):
        found = check_loss(loss_func, list(zip(preds, targets)))
    assert found.verdict == 'unknown'
    assert why in found.reason


def test_what_has_no_rows_is_unknown():
    check = LossCheck(mean_square)
    learn = SimpleNamespace(loss_func=mean_square, loss_grad=None, xb=(), pred=tensor(1.), yb=(tensor(2.),))
    for _ in range(2): check.add(learn, 1, None)
    check.compare()
    assert check.results[0].verdict == 'unknown'
    assert 'have rows' in check.results[0].reason


@pytest.mark.parametrize('loss_func', [
    nn.CrossEntropyLoss(),
    CrossEntropyLossFlat(weight=CLASS_WEIGHTS),
    partial(F.cross_entropy, ignore_index=-100)], ids=['class', 'weights', 'function'])
def test_a_window_whose_labels_are_all_ignored_is_unknown(loss_func):
    labels = torch.full_like(LABELS, -100)
    found = check_loss(loss_func, parts_of(LOGITS, [labels]))
    assert found.verdict == 'unknown'
    assert 'NaN' in found.reason


# Losses that have a state, or draw

class Holds:
    "A loss that counts its calls, keeps what it has seen, and holds a Learner"
    def __init__(self):
        self.calls = 0
        self.sums = deque(maxlen=2)
        self.buffer = torch.zeros(2)
        self.learn = make_learner(8)
        self.generator = torch.Generator()
        self.expanded = torch.ones(1).expand(7)  # PyTorch does not copy into it

    def __call__(self, pred, targ):
        self.calls += 1
        self.sums.append(pred.sum().item())
        self.buffer += 1
        return F.mse_loss(pred[:, 0], targ)

    def method(self, pred, targ):
        return self(pred, targ)

    def by_calls(self, pred, targ):
        return self(pred, targ)*self.calls

    def by_generator(self, pred, targ):
        return self(pred, targ)*torch.rand(1, generator=self.generator).item()

    def state(self):
        return str(vars(self)), self.generator.get_state().tolist()


def dropped_out(pred, targ):
    errors = F.dropout(pred[:, 0]-targ, 0.5)
    return errors.pow(2).mean().float()


def by_python(pred, targ):
    return F.mse_loss(pred[:, 0], targ)*random.random()


def random_states():
    numpy_state = np.random.get_state()[1]
    return torch.get_rng_state().tolist(), random.getstate(), numpy_state.tolist()


@pytest.mark.parametrize('loss_of, verdict', [
    (noop, 'same'),
    (partial, 'same'),
    (lambda holds: holds.method, 'same'),
    (lambda holds: partial(holds.method), 'same'),
    (lambda holds: holds.by_calls, 'unknown'),
    (lambda holds: holds.by_generator, 'unknown'),
    (lambda holds: dropped_out, 'unknown'),
    (lambda holds: by_python, 'unknown')])
def test_it_leaves_no_trace(loss_of, verdict):
    "In attributes and generators of the loss, in those of the process, in autocast, and in the graph of the outputs"
    layer = nn.Linear(5, 5)
    holds = Holds()
    with autocast('cpu', dtype=torch.bfloat16):
        pred = layer(LOGITS)
        state_before = holds.state()
        random_before = random_states()
        version_before = pred._version
        found = check_loss(loss_of(holds), parts_of(pred, [TARGETS[:, 0]]))
        assert torch.is_autocast_enabled('cpu')
    assert holds.state() == state_before
    assert random_states() == random_before
    assert pred._version == version_before
    assert found.verdict == verdict
    if verdict == 'unknown':
        assert 'called again' in found.reason
    pred.sum().backward()
    assert layer.weight.grad is not None


# In a fit

def conv():
    torch.manual_seed(0)
    return nn.Conv2d(3, 3, 3, padding=1)


def learner_of_maps(row, bs, cbs):
    return learner_of((row.pred, *row.targets), bs, cbs, row.loss_func, conv())


ON_MAPS = [
    lambda: (4, GradientAccumulation(16)),
    lambda: (16, GradientAccumulation(16, micro_batch_size=6)),
    lambda: (4, GradientAccumulationSchedule(4, 16)),
    lambda: (4, [GradientAccumulation(16), CpuMixedPrecision()])]


@pytest.mark.parametrize('make', ON_MAPS, ids=['windows', 'split', 'schedule', 'mixed'])
@pytest.mark.parametrize('name', ['combined', 'batch_dice', 'wrapped_sum', 'wrapped_weights'])
def test_a_fit_warns_once_of_a_loss_that_is_not_exact(name, make):
    said = warnings_of(learner_of_maps(INEXACT[name], *make()), 2)
    assert len(said) == 1
    assert said[0].startswith('accumulation is not exact for this loss')
    assert 'GradientCache' in said[0]


@pytest.mark.parametrize('make', ON_MAPS, ids=['windows', 'split', 'schedule', 'mixed'])
@pytest.mark.parametrize('name', ['focal', 'dice', 'wrapped'])
def test_a_fit_does_not_warn_of_a_loss_that_is_exact(name, make):
    assert warnings_of(learner_of_maps(EXACT[name], *make()), 2) == []


def stacked(views):
    return views.flatten(0, 1)


def scores(views):
    return views[0]@views[1].T


def compare_two(views, targ):
    return info_nce(*views).float()


def compare_stacked(pred, targ):
    return info_nce(*pred.chunk(2)).float()


def cross_entropy(pred, targ):
    return F.cross_entropy(pred, targ).float()


def square(pred, targ):
    return mean_square(pred, targ).float()


@pytest.mark.parametrize('join_views, loss_func, starts', [
    (tuple, compare_two, ['accumulation is']),
    (stacked, compare_stacked, ['could not check']),
    (scores, cross_entropy, [])])
def test_losses_that_compare_samples(join_views, loss_func, starts):
    "Nothing can be said of rows in an unknown order; nor, by mistake, is it of scores that have a loss for each row"
    small, big = learners_of_views(join_views, loss_func)
    assert [o[:15] for o in warnings_of(small, 1, 0.1)] == starts
    assert_apart(weights(small), weights(fit(big, 1)))


def test_rows_in_an_unknown_order_may_be_exact():
    small, big = learners_of_views(stacked, square)
    assert [o[:15] for o in warnings_of(small, 1, 0.1)] == ['could not check']
    assert_apart(weights(small), weights(classifier_model()))
    assert_same(weights(small), weights(fit(big, 1)), ROUNDING)


def learners_of_views(join_views, loss_func):
    "Returns an accumulating Learner, and one with the large batch, of a model that sees two views of each sample"
    def two_views(inputs):
        return torch.stack([inputs, inputs.flip(1)])

    inputs, _ = labelled(64)
    res = []
    for bs, cb in ((8, GradientAccumulation(32)), (32, None)):
        m = nn.Sequential(Lambda(two_views), *classifier_model(), Lambda(join_views))
        positions = torch.arange(64)%bs
        res.append(learner_of((inputs, positions), bs, cb, loss_func, m))
    return res


def of_kept(pred, targ):
    return F.cross_entropy(pred, targ.long()).float()


def of_all(pred, targ):
    return F.mse_loss(pred[:, 0], targ).float()


def sqrt_of_mean(pred, targ):
    return of_all(pred, targ).sqrt()


def nothing(pred, targ):
    return (pred*0).sum().float()


def of_known(pred, targ):
    errors = (pred[:, 0]-targ)**2
    return errors[targ >= 0].mean().float()


def train_checked(loss_func, samples, accum_bs=16, bs=8, n_epoch=1, **settings):
    "Returns the weights after a fit, and what is said of the loss"
    learn = learner_of(samples, bs, GradientAccumulation(accum_bs, **settings), loss_func)
    said = warnings_of(learn, n_epoch)
    return weights(learn), [o for o in said if 'exact for this loss' in o]


@pytest.mark.parametrize('loss_func, missing_share, accum_bs', [
    (of_kept, 0.02, 16),
    (of_known, 0.1, 32),
    (sqrt_of_mean, 0., 16)])
def test_each_inexact_fit_is_announced_once(loss_func, missing_share, accum_bs):
    "Of 8 fits of 128 samples, all that differ from a fit on large batches"
    n_inexact = 0
    for seed in range(8):
        samples = labelled(128, missing_share, seed)
        big, _ = train_checked(loss_func, samples, accum_bs, bs=accum_bs)
        small, said = train_checked(loss_func, samples, accum_bs)
        is_inexact = (small-big).abs().max() > 1e-9
        if is_inexact:
            assert len(said) == 1, f'seed {seed}'
        assert len(said) <= 1
        n_inexact += int(is_inexact)
    assert n_inexact > 4


@pytest.mark.parametrize('n_alike', [1, 7, 15])
def test_windows_that_are_alike_hide_nothing(n_alike):
    "The first label that is ignored comes after `n_alike` windows, up to the 16th, which is the last one compared"
    inputs, labels = labelled(16*16)
    assert train_checked(of_kept, (inputs, labels))[1] == []
    labels[16*n_alike+3] = MISSING
    assert len(train_checked(of_kept, (inputs, labels))[1]) == 1


@pytest.mark.parametrize('loss_func, why', [
    (dropped_out, 'called again'),
    (nothing, '0, NaN or infinite')])
def test_a_loss_that_cannot_be_checked_is_announced_once(loss_func, why):
    "At the end of the fit, with the reason"
    _, said = train_checked(loss_func, labelled(64), n_epoch=3)
    assert len(said) == 1
    assert said[0].startswith('could not check')
    assert why in said[0]


def test_nothing_is_announced_where_it_does_not_matter(monkeypatch):
    "In windows of one micro-batch, with `num_items`, and of a loss that has a rule"
    samples = labelled(64)
    assert train_checked(dropped_out, samples, bs=16)[1] == []
    assert train_checked(dropped_out, samples, num_items=lambda learn: 8)[1] == []
    monkeypatch.setitem(loss_rules, dropped_out, lambda settings, pred, targ: len(targ))
    assert train_checked(dropped_out, samples)[1] == []


def test_one_window_that_can_tell_is_enough():
    "The gradient of the first windows is 0"
    def loss_func(pred, targ):
        errors = pred[:, 0]-targ
        return errors.where(targ != 7, 0).pow(2).mean().float()

    inputs, labels = labelled(64)
    labels[:32] = 7
    assert train_checked(loss_func, (inputs, labels))[1] == []


def calls_in_20_windows():
    "Returns the samples in each call of the loss in 20 windows of two micro-batches, and what is said of it"
    calls = []

    def loss_func(pred, targ):
        calls.append(len(pred))
        return of_all(pred, targ)

    said = train_checked(loss_func, labelled(20*16))[1]
    return calls, said


def test_it_calls_the_loss_in_the_first_16_windows():
    "Twice for the window, and once for each micro-batch"
    calls, said = calls_in_20_windows()
    n_checked = 16*6
    for i in range(0, n_checked, 6):
        assert calls[i:i+6] == [8, 8, 16, 16, 8, 8]
    assert calls[n_checked:] == [8, 8, 8, 8, 8, 8, 8, 8]
    assert said == []


def test_it_does_not_call_the_loss_for_large_outputs(monkeypatch):
    monkeypatch.setattr(LossCheck, 'max_bytes', 100)
    calls, said = calls_in_20_windows()
    assert len(calls) == 40
    assert set(calls) == {8}
    assert len(said) == 1
    assert 'too large' in said[0]


def test_the_fit_is_the_same_without_the_check(monkeypatch):
    "Weights, losses and random numbers"
    def train():
        set_seed(3)
        m = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.3))
        cbs = [GradientAccumulation(16), MixUp()]
        learn = learner_of((LOGITS, LABELS), 4, cbs, CrossEntropyLossFlat(), m)
        fit(learn, 2)
        return weights(learn), losses(learn), random_states()

    checked = train()
    monkeypatch.setattr(LossCheck, 'n_windows', 0)
    unchecked = train()
    assert_same(unchecked[0], checked[0])
    assert unchecked[1:] == checked[1:]


@pytest.mark.parametrize('next_name, starts', [('axis', []), ('combined', ['accumulation is'])])
def test_the_fit_after_an_interrupt_or_lr_find_checks_its_own_loss(next_name, starts):
    "These say nothing of theirs, or it would be an error here"
    learn = learner_of_maps(INEXACT['combined'], 4, GradientAccumulation(16))
    with pytest.raises(KeyboardInterrupt):
        fit(learn, 1, cbs=Fault(KeyboardInterrupt, 'after_pred', 2, 0))
    with quiet(learn):
        learn.lr_find(num_it=12, show_plot=False)
    learn.loss_func = (EXACT | INEXACT)[next_name].loss_func
    assert [o[:15] for o in warnings_of(learn)] == starts


# What it says

@pytest.mark.parametrize('factor, size', [
    (1.5, 'off by 0.5 of its size'),
    (1e9, 'another one altogether'),
    (math.nan, 'another one altogether')])
def test_a_message_states_no_error_above_the_size_of_the_loss(factor, size):
    "Neither 'off by nan' nor 'off by 1e+09'. Only the loss of micro-batches is multiplied by `factor`"
    def loss_func(pred, targ):
        loss = of_all(pred, targ)
        return loss*factor if len(pred) == 8 else loss

    said = warnings_of(learner_of(labelled(16), 8, GradientAccumulation(16), loss_func))
    assert len(said) == 1
    assert f"a window's loss or gradient is {size}." in said[0]


def test_a_change_of_the_loss_is_announced_once_of_each_kind():
    "Also if they alternate"
    check = LossCheck(of_all)
    with pytest.warns(UserWarning) as caught:
        for how in ['replaced', 'added', 'replaced', 'added']:
            check.note_changed(how)
    assert [str(o.message).split(' in after_loss')[0] for o in caught] == [
        'a callback replaces the loss',
        'a callback adds to the loss']
    assert check.windows_left == 0, 'there is nothing to compare any more'


@pytest.mark.parametrize('how', ['replaced', 'added'])
def test_a_retry_does_not_warn_again(how):
    "It restores the state from before the batch, in which nothing had been said"
    check = LossCheck(of_all)
    state = check.state()
    with pytest.warns(UserWarning, match='in after_loss'):
        check.note_changed(how)
    check.restore(state)
    check.note_changed(how)  # a second warning would be an error
    assert check.verdict() == how
