"The position in training, `pct_train` and `train_iter`, that callbacks find after each window or loader batch"
import pytest

from numbered_batches import *

pytestmark = pytest.mark.filterwarnings('ignore:before_batch of NotesPosition is called once per window')


class NotesPosition(Callback):
    "Notes the position where each epoch begins, and before and after each training batch"
    run_valid = False
    order = 60  # after the Recorder: it sees rounds
    def before_fit(self):
        self.at_epoch = []
        self.before = []
        self.after = []
        self.iterations = []

    def before_train(self): self.at_epoch.append(self.learn.pct_train)
    def before_batch(self): self.before.append(self.learn.pct_train)

    def after_batch(self):
        self.after.append(self.learn.pct_train)
        self.iterations.append(self.train_iter)


def positions_of(bs, n, n_epoch, *cbs, **kwargs):
    "Trains, and returns the positions that were noted"
    notes = NotesPosition()
    fit(make_learner(bs, n=n, cbs=[notes, *cbs], **kwargs), n_epoch)
    return notes


# Windows of the same size

@pytest.mark.parametrize('n, drop_last, bs, size', [
    (96, False, 8, 32),
    (100, False, 8, 32),
    (100, True, 8, 32),
    (100, True, 32, 8),
    (100, False, 32, 32)])
def test_windows_advance_as_the_batches_of_fastai(n, drop_last, bs, size):
    "Bit for bit, since fastai itself counts each window as a batch: of several loader batches, a piece of one, or one"
    plain = positions_of(size, n, 3, drop_last=drop_last)
    ours = positions_of(bs, n, 3, GradientAccumulation(size), drop_last=drop_last)
    assert ours.at_epoch == plain.at_epoch
    assert ours.before == plain.before
    assert ours.after == plain.after
    assert ours.iterations == plain.iterations


# Windows that differ in size: samples count

@pytest.mark.parametrize('bs', [8, 32])
def test_a_schedule_advances_by_samples(bs):
    "Also where its first windows are pieces of a loader batch"
    accum = GradientAccumulationSchedule(8, 32, start=.5, finish=.5, remainder='step')
    learn = make_learner(bs, n=64, cbs=[accum, NotesPosition()])
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
    assert_same(notes.at_epoch, [0, 0, .5, .5], ROUNDING)
    assert_same(notes.after, [.5, 1], ROUNDING)
    assert notes.iterations == [1, 2]


def test_batches_whose_size_nobody_states_count_the_same():
    "A window takes them until it is full: here one of 8 samples, two of 4 and two of 4"
    sizes = [8, 4, 4, 4, 4]
    batches = torch.arange(24).split(sizes)
    notes = NotesPosition()
    learn = make_learner(8, n=24, cbs=[notes, GradientAccumulation(8, micro_batch_size=4)])
    learn.dls.loaders[0] = torch.utils.data.DataLoader(learn.dls.train.dataset, batch_sampler=batches)
    fit(learn, 1)
    assert learn.recorder.accum_bs == [8, 8, 8]
    assert_same(notes.after, [1/5, 3/5, 1], ROUNDING)


# Loader batches as rounds: while a window goes on, the position is where it began

def positions_of_rounds(cancelled):
    "Returns the position after each of 10 loader batches, some of them cancelled. A window of 4 ends with its last"
    res = []
    position = 0
    filled = 0
    for i in range(10):
        counts = str(i) not in cancelled
        if counts: filled += 1
        is_last = counts and i == 9
        if filled == 4 or is_last: filled = 0
        if not filled: position = (i+1)/10
        res.append(position)
    return res


@pytest.mark.parametrize('cancelled,event,order', paired([
    '',
    '5',  # within a window
    '4',  # the first one of a window
    '0',  # of the fit
    '34',  # the last one of a window, and the one that takes its place
    '9'  # of the epoch: its window is closed after the last round
], BEFORE_THE_PASS, [0, 45]))
def test_where_loader_batches_are_logged_the_position_moves_with_each_window(cancelled, event, order):
    "One that has lost a batch takes the next one. A cancelled batch was read, so the next window begins after it"
    # The size would change at the end, so the position goes by samples
    accum = GradientAccumulationSchedule(32, 64, 1., 1., remainder='step', log_accum_batch=False)
    notes = positions_of(8, 80, 1, accum, CancelsBatches(cancelled, event, order))
    after = positions_of_rounds(cancelled)
    assert_same(notes.after, after, ROUNDING)
    if event != 'before_batch': assert_same(notes.before, [0, *after[:-1]], ROUNDING)
    assert notes.iterations == list(range(1, 11))


@pytest.mark.parametrize('cancelled, make, log', [
    ('1', GradientAccumulation, True),
    ('15', partial(GradientAccumulationSchedule, 16), False),
    ('0123', partial(GradientAccumulationSchedule, 16), True),
    ('9', GradientAccumulation, False)])
def test_cancelled_batches_do_not_stop_a_schedule_short(cancelled, make, log):
    "Else `fit_one_cycle` ends at a high rate"
    cancels = CancelsBatches(cancelled, 'after_pred')
    learn = make_learner(8, n=80, drop_last=True, cbs=[make(32, log_accum_batch=log), cancels])
    fit(learn, 3, method='fit_one_cycle')
    assert learn.recorder.lrs[-1] < .03
    assert max(learn.recorder.lrs) > .09


# Windows as rounds, of which some are cancelled or left out

@pytest.mark.filterwarnings('ignore:Fault cancels a window at its step')
@pytest.mark.parametrize('event', ['before_step', 'after_step'])
def test_a_window_whose_step_is_cancelled_counts_as_in_fastai(event):
    cancels = partial(Fault, CancelBatchException, event, nth=2, order=0)
    large = positions_of(32, 96, 2, cancels())
    small = positions_of(8, 96, 2, cancels(), GradientAccumulation(32))
    assert small.after == large.after
    assert small.iterations == large.iterations == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize('event', ['before_batch', 'after_pred'])
def test_a_window_that_its_epoch_no_longer_fills_is_none(event):
    "The last batch is cancelled, and the others of its window are dropped: to loggers that is a cancelled batch"
    accum = GradientAccumulation(32, remainder='drop')
    learn = make_learner(8, n=64, cbs=[accum, CancelsBatches('7', event)])
    fit(learn, 2)
    assert accum.opt_steps == 2
    assert learn.train_iter == 4
    assert len(losses(learn)) == 2


class SkipsBroken(DataLoader):
    "Leaves out the last 16 samples, which cannot be read"
    def create_item(self, i):
        if i is not None and i >= 80: raise SkipItemException
        return super().create_item(i)


def test_broken_samples_that_a_loader_skips_do_not_stop_a_schedule_short():
    "They leave the last window with 16 samples; it is the last of three as ever"
    def trained(bs, *cbs):
        learn = make_learner(bs, cbs=[*cbs])
        learn.dls.train = SkipsBroken(learn.dls.train.dataset, bs=bs)
        return fit(learn, 2, method='fit_one_cycle')
    large = trained(32)
    small = trained(8, GradientAccumulation(32))
    assert len(losses(large)) == 6
    assert small.recorder.lrs == pytest.approx(large.recorder.lrs)
    assert_same_weights(small, large, ROUNDING)
