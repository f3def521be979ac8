"The position in training, `pct_train` and `train_iter`, that callbacks find after each round: a window or a loader batch"
from itertools import accumulate

import pytest

from common import *


class NotesPosition(Callback):
    "Notes the position where each epoch begins, and before and after each training batch"
    run_valid = False
    order = 60  # after the Recorder: it sees rounds
    def before_fit(self):
        self.at_epoch = []
        self.before = []
        self.after = []
        self.iterations = []

    def before_train(self):
        self.at_epoch.append(self.learn.pct_train)

    def before_batch(self):
        self.before.append(self.learn.pct_train)

    def after_batch(self):
        self.after.append(self.learn.pct_train)
        self.iterations.append(self.train_iter)


class CancelsRounds(Callback):
    "Cancels the rounds of these numbers at `event`"
    run_valid = False
    def __init__(self, event, rounds, order=0):
        self.rounds = rounds
        self.order = order
        setattr(self, event, self.cancel)

    def cancel(self):
        if self.iter in self.rounds: raise CancelBatchException


def positions_of(bs, n, n_epoch, *cbs, **kwargs):
    "Trains, and returns the positions that were noted"
    notes = NotesPosition()
    fit(make_learner(bs, n=n, cbs=[notes, *cbs], **kwargs), n_epoch)
    return notes


# Windows of the same size

@pytest.mark.parametrize('n, drop_last', [(96, False), (100, False), (100, True)])
def test_windows_advance_as_the_batches_of_fastai(n, drop_last):
    "Bit for bit, since fastai itself counts each window as a batch"
    accum = GradientAccumulation(32)
    large = positions_of(32, n, 3, drop_last=drop_last)
    small = positions_of(8, n, 3, accum, drop_last=drop_last)
    assert accum.loop.progress.fastai_counts_right
    assert small.at_epoch == large.at_epoch
    assert small.before == large.before
    assert small.after == large.after
    assert small.iterations == large.iterations


@pytest.mark.parametrize('remainder, n_windows', [('step', 3), ('drop', 2)])
def test_what_an_epoch_leaves_is_no_window_if_it_is_dropped(remainder, n_windows):
    accum = GradientAccumulation(32, remainder=remainder)
    notes = positions_of(8, 88, 2, accum)
    n = 2*n_windows
    assert_same(notes.after, torch.arange(1, n+1).double()/n, ROUNDING)
    assert notes.iterations == list(range(1, n+1))


# Windows that differ in size: samples count

def test_a_schedule_advances_by_samples():
    accum = GradientAccumulationSchedule(8, 32, start=0.5, finish=0.5, remainder='step')
    learn = make_learner(8, n=64, cbs=[accum, NotesPosition()])
    fit(learn, 2)
    samples = as_tensor(learn.recorder.accum_bs)
    assert samples.tolist() == [8, 8, 8, 8, 8, 8, 8, 8, 32, 32]
    assert_same(learn.notes_position.after, samples.cumsum(0)/128, ROUNDING)
    assert learn.notes_position.iterations == list(range(1, 11))


def test_carried_batches_move_the_beginning_of_an_epoch_back():
    "88 samples, windows of 32: 24 and then 16 of them wait for the next epoch"
    notes = positions_of(8, 88, 3, GradientAccumulation(32, remainder='carry'))
    begins = as_tensor([0, 88-24, 176-16])
    ends_of_windows = as_tensor([32, 64, 96, 128, 160, 192, 224, 256, 264])
    assert_same(notes.at_epoch, begins/264, ROUNDING)
    assert_same(notes.after, ends_of_windows/264, ROUNDING)
    assert notes.iterations == list(range(1, 10))


def test_an_epoch_without_a_window_counts_no_iteration():
    "Two windows of two epochs each"
    notes = positions_of(8, 24, 4, GradientAccumulation(48, remainder='carry'))
    assert_same(notes.at_epoch, [0, 0, 0.5, 0.5], ROUNDING)
    assert_same(notes.after, [0.5, 1], ROUNDING)
    assert notes.iterations == [1, 2]


# Loader batches as rounds: the position is that of the window

def windows_closed(rounds_of_steps, n_rounds):
    "Returns how many windows are closed after each round, if those of `rounds_of_steps` close one"
    closes = [i in rounds_of_steps for i in range(n_rounds)]
    return list(accumulate(closes))


def test_where_loader_batches_are_logged_the_position_moves_with_each_window():
    notes = positions_of(8, 128, 1, GradientAccumulation(32, log_accum_batch=False))
    closed = windows_closed([3, 7, 11, 15], 16)
    assert_same(notes.after, as_tensor(closed)/4, ROUNDING)
    before = [0, *closed[:-1]]
    assert_same(notes.before, as_tensor(before)/4, ROUNDING)
    assert notes.iterations == list(range(1, 17))


@pytest.mark.parametrize('order', [0, 45])
@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'after_loss', 'before_backward'])
@pytest.mark.parametrize('cancelled, rounds_of_steps', [
    ([5], [3, 8, 12, 15]),  # within a window
    ([4], [3, 8, 12, 15]),  # the first one of a window
    ([0], [4, 8, 12, 15]),  # of the fit
    ([7, 8], [3, 9, 13, 15]),  # the last one of a window, and the one that takes its place
    ([15], [3, 7, 11])])  # of the epoch: its window is closed after the last round
def test_the_position_stays_where_a_loader_batch_is_cancelled(cancelled, rounds_of_steps, event, order):
    "A window that has lost a batch takes the next one. Each round is counted"
    cancels = CancelsRounds(event, cancelled, order)
    notes = positions_of(8, 128, 1, GradientAccumulation(32, log_accum_batch=False), cancels)
    closed = windows_closed(rounds_of_steps, 16)
    assert_same(notes.after, as_tensor(closed)/4, ROUNDING)
    assert notes.iterations == list(range(1, 17))


@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'after_loss', 'before_backward'])
def test_a_schedule_passes_the_samples_that_are_cancelled(event):
    "They have been read, though no window has them"
    accum = GradientAccumulationSchedule(32, 64, finish=1., log_accum_batch=False)
    notes = positions_of(8, 128, 1, accum, CancelsRounds(event, [0, 5, 15]))
    batches_read = torch.arange(1, 17).double()
    assert_same(notes.after, batches_read/16, ROUNDING)


# Windows as rounds, of which some are cancelled or left out

@pytest.mark.parametrize('event', ['before_step', 'after_step'])
def test_a_window_whose_step_is_cancelled_counts_as_in_fastai(event):
    cancels = partial(Fault, CancelBatchException, event, nth=2, order=0)
    large = positions_of(32, 96, 2, cancels())
    small = positions_of(8, 96, 2, cancels(), GradientAccumulation(32))
    assert small.after == large.after
    assert small.iterations == large.iterations == [1, 2, 3, 4, 5, 6]


class CancelsBatches(Callback):
    "Cancels the loader batches of 8 samples with these numbers in an epoch"
    run_valid = False
    def __init__(self, event, batches):
        self.batches = batches
        setattr(self, event, self.cancel)

    def cancel(self):
        inputs, _ = data(96)
        for i in self.batches:
            if torch.equal(self.x[0], inputs[8*i]): raise CancelBatchException


@pytest.mark.parametrize('event', ['before_batch', 'after_pred'])
def test_a_window_all_of_whose_batches_are_cancelled_is_a_round(event):
    "As it is one cancelled batch with the large batch"
    notes = positions_of(8, 96, 1, GradientAccumulation(32), CancelsBatches(event, [4, 5, 6, 7]))
    assert notes.iterations == [1, 2, 3]


@pytest.mark.parametrize('event', ['before_batch', 'after_pred'])
def test_a_window_that_its_epoch_no_longer_fills_is_none(event):
    "The last batch is cancelled, and the others of its window are dropped: fastai has counted the round meanwhile"
    accum = GradientAccumulation(32, remainder='drop')
    learn = make_learner(8, cbs=[accum, CancelsBatches(event, [11])])
    fit(learn, 2)
    assert accum.opt_steps == 4
    assert learn.train_iter == 4
    assert len(losses(learn)) == 4
