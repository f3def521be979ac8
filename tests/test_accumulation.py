"""GradientAccumulation itself: its arguments and attributes, settings that change between fits, and what it warns of.

That it trains as the large batch does is in test_large_batch.py"""
import pytest

from common import *
from fastxtend_accum.memory.auto import AutoMicroBatches
from fastxtend_accum.memory.micro_batches import MicroBatches


class NotesSizes(Callback):
    "Notes the samples of each forward pass in training, and those that loggers see at a time"
    order = 60
    run_valid = False
    def before_fit(self):
        self.passes = []
        self.n_logged = 0

    def after_pred(self):
        self.passes.append(len(self.pred))

    def after_batch(self):
        self.n_logged += 1


# Arguments and attributes

def test_the_arguments_of_fastai():
    "Its callback has the same name, and 32 samples by default"
    assert GradientAccumulation().accum_bs == 32
    assert GradientAccumulation(64).accum_bs == 64
    assert GradientAccumulation(n_acc=64).accum_bs == 64


def test_n_acc_is_another_name_of_accum_bs():
    accum = GradientAccumulation(64)
    assert accum.n_acc == 64
    accum.n_acc = 32
    assert accum.accum_bs == 32


@pytest.mark.parametrize('make, error, says', [
    (lambda: GradientAccumulation(64, 8), ValueError, 'accum_bs=64 and n_acc=8 both set'),
    (lambda: GradientAccumulation(n_acc=0), ValueError, 'n_acc must be at least 1 sample'),
    (lambda: GradientAccumulation(32, accum=3), TypeError, "unexpected keyword argument 'accum'"),
    (lambda: GradientAccumulation(32, remainder='keep'), ValueError, "must be one of .* or None, not 'keep'"),
    (lambda: GradientAccumulation(micro_batch_size=8, remainder='carry'), ValueError, 'windows of several batches')])
def test_arguments_that_are_none_are_an_error(make, error, says):
    with pytest.raises(error, match=says): make()


def test_before_a_fit_there_is_nothing_to_tell():
    accum = GradientAccumulation(32)
    assert accum.opt_steps == 0
    assert accum.n_skipped == 0
    assert accum.micro_bs is None
    assert not accum.window.is_open


def test_what_other_callbacks_find_in_a_fit():
    "The steps so far, and the samples of the present window"
    accum = GradientAccumulation(32)
    seen = []
    def note(self): seen.append([accum.opt_steps, accum.window.total_samples])
    fit(make_learner(8, n=88, cbs=[accum, Callback(before_step=note, after_step=note)]), 1)
    assert seen == [[0, 32], [1, 32], [1, 32], [2, 32], [2, 24], [3, 24]]
    assert accum.opt_steps == 3


@pytest.mark.parametrize('micro_batch_size, expected', [(None, 8), (3, 3), ('auto', 8)])
def test_micro_bs_is_what_the_model_sees_at_a_time(micro_batch_size, expected):
    accum = GradientAccumulation(32, micro_batch_size=micro_batch_size)
    notes = NotesSizes()
    fit(make_learner(8, cbs=[accum, notes]), 1)
    assert accum.micro_bs == expected
    assert max(notes.passes) == expected


def test_micro_bs_of_a_loader_that_states_no_size_is_that_of_its_batches():
    batches = list(zip(*[o.split(8) for o in data(32)]))
    accum = GradientAccumulation(16, micro_batch_size=8)
    fit(Learner(DataLoaders(batches, batches), model(), mse, opt_func=SGD, cbs=accum), 1)
    assert accum.micro_bs == 8
    assert accum.opt_steps == 2


# The end of an epoch

@pytest.mark.parametrize('drop_last, kwargs, expected', [
    (False, {}, 'step'),
    (True, {}, 'drop'),
    (True, dict(remainder='step'), 'step'),
    (False, dict(remainder='carry'), 'carry')])
def test_an_incomplete_window_follows_the_loader_unless_remainder_says_otherwise(drop_last, kwargs, expected):
    learn = make_learner(8, drop_last=drop_last)
    accum = GradientAccumulation(32, **kwargs)
    assert accum.remainder_for(learn.dls.train) == expected


def test_a_window_of_one_batch_has_its_step_whatever_the_loader_drops():
    learn = make_learner(8, drop_last=True)
    accum = GradientAccumulation(micro_batch_size=4)
    assert accum.remainder_for(learn.dls.train) == 'step'


class NotesBars(Callback):
    "Notes how the progress bar and the counters end each epoch"
    order = 61  # after the progress bar
    run_valid = False
    def before_fit(self):
        self.seen = []

    def after_train(self):
        total = self.learn.progress.pbar.total
        self.seen.append([total, self.n_iter, self.iter+1, self.train_iter])


@pytest.mark.parametrize('make', [GradientAccumulation, partial(GradientAccumulationSchedule, 32)])
def test_what_is_dropped_is_neither_loaded_nor_computed(make):
    "100 samples fill three windows of 32, which have 12 loader batches; bars and counters count windows"
    loaded = []
    def note(batch):
        loaded.append(len(batch[0]))
        return batch
    sizes = NotesSizes()
    bars = NotesBars()
    learn = make_learner(8, n=100, cbs=[make(32, remainder='drop'), sizes, bars])
    learn.dls.train.after_batch = note
    with learn.no_logging(): learn.fit(2, 0.1)
    assert len(loaded) == len(sizes.passes) == 24
    assert set(loaded) == set(sizes.passes) == {8}
    assert bars.seen == [[3, 3, 3, 3], [3, 3, 3, 6]]


def test_an_epoch_that_fills_no_window_is_an_error_if_windows_are_dropped():
    learn = make_learner(8, n=44, cbs=GradientAccumulation(48, remainder='drop'))
    with pytest.raises(ValueError, match='an epoch has 44 samples, which do not fill one window of 48'): fit(learn)
    assert_same(weights(learn), weights(model()))


class Stream(torch.utils.data.IterableDataset):
    "40 samples, of which 64 are announced"
    def __len__(self):
        return 64

    def __iter__(self):
        return iter(list(zip(*data(40))))


def test_a_fit_without_a_step_causes_a_warning():
    "If nobody could know before"
    learn = make_learner(8, cbs=GradientAccumulation(48, remainder='drop'))
    train = torch.utils.data.DataLoader(Stream(), batch_size=8)
    learn.dls = DataLoaders(train, learn.dls.valid)
    with pytest.warns(UserWarning, match='no epoch fills a window of 48 samples; use a smaller accum_bs'): fit(learn, 2)
    assert_same(weights(learn), weights(model()))


def test_a_micro_batch_that_is_larger_than_the_loaders_batch_causes_a_warning():
    accum = GradientAccumulation(32, micro_batch_size=16)
    learn = make_learner(8, cbs=accum)
    with pytest.warns(UserWarning, match='micro_batch_size=16 is more than the 8 samples'): fit(learn, 1)
    assert accum.micro_bs == 8


# Settings that are changed between fits

def sizes_after_change(name, value, **kwargs):
    "Trains, sets the attribute of the callback, trains again, and returns what the second fit has shown"
    accum = GradientAccumulation(32, **kwargs)
    notes = NotesSizes()
    learn = fit(make_learner(8, cbs=[accum, notes]), 1)
    setattr(accum, name, value)
    fit(learn, 1)
    return accum, notes


@pytest.mark.parametrize('name', ['accum_bs', 'n_acc'])
def test_another_window_acts_in_the_next_fit(name):
    accum, notes = sizes_after_change(name, 48)
    assert accum.opt_steps == notes.n_logged == 2
    assert accum.learn.recorder.accum_bs == [48, 48]


def test_another_micro_batch_acts_in_the_next_fit():
    accum, notes = sizes_after_change('micro_batch_size', 4)
    assert set(notes.passes) == {4}
    assert accum.opt_steps == 3


def test_no_micro_batch_acts_in_the_next_fit():
    accum, notes = sizes_after_change('micro_batch_size', None, micro_batch_size=4)
    assert set(notes.passes) == {8}
    assert accum.valid_strategy is None


def test_loader_batches_are_logged_in_the_next_fit():
    accum, notes = sizes_after_change('log_accum_batch', False)
    assert notes.n_logged == 12
    assert accum.opt_steps == 3


def test_another_remainder_acts_in_the_next_fit():
    accum = GradientAccumulation(40)
    learn = fit(make_learner(8, cbs=accum), 1)
    assert learn.recorder.accum_bs == [40, 40, 16]
    accum.remainder = 'drop'
    assert fit(learn, 1).recorder.accum_bs == [40, 40]


def test_another_count_of_items_acts_in_the_next_fit():
    accum = GradientAccumulation(32)
    learn = fit(make_learner(8, cbs=accum), 1)
    def none(learn): return 0
    accum.num_items = none
    before = weights(learn)
    with pytest.warns(UserWarning, match='nothing to average over'): fit(learn, 1)
    assert_same(weights(learn), before)
    assert accum.n_skipped == 3


@pytest.mark.parametrize('name, value, error, says', [
    ('accum_bs', 20, ValueError, "accum_bs=20 counts samples, and is not a multiple of the DataLoader's batch of 8"),
    ('accum_bs', 0, ValueError, 'must be at least 1 sample'),
    ('n_acc', 32., TypeError, 'counts samples, so it must be an int'),
    ('micro_batch_size', 'half', ValueError, "micro_batch_size must be a number of samples or 'auto'"),
    ('log_accum_batch', 1, TypeError, 'log_accum_batch must be True or False'),
    ('remainder', 'keep', ValueError, 'remainder must be one of'),
    ('num_items', 5, TypeError, 'num_items must be a function of the Learner')])
def test_another_setting_is_checked_in_the_next_fit(name, value, error, says):
    "Before anything is trained; a valid one makes the fit after that"
    accum = GradientAccumulation(32)
    learn = fit(make_learner(8, cbs=accum), 1)
    before = weights(learn)
    valid = getattr(accum, name)
    setattr(accum, name, value)
    with pytest.raises(error, match=says): fit(learn, 1)
    assert_same(weights(learn), before)
    setattr(accum, name, valid)
    fit(learn, 1)
    assert accum.opt_steps == 3


def test_the_size_that_auto_has_found_is_kept():
    "Unless micro_batch_size changes"
    accum = GradientAccumulation(32, micro_batch_size='auto')
    learn = fit(make_learner(8, cbs=accum), 1)
    strategy = accum.strategy
    assert isinstance(strategy, AutoMicroBatches)
    fit(learn, 1)
    assert accum.strategy is strategy
    accum.micro_batch_size = 4
    fit(learn, 1)
    assert type(accum.strategy) is MicroBatches


def test_the_line_is_printed_again_if_it_has_changed(capsys):
    accum = GradientAccumulation(32)
    learn = make_learner(8, cbs=accum)
    fit_aloud(learn, 1)
    assert capsys.readouterr().out == '32 = 4 x 8 samples\n'
    fit_aloud(learn, 1)
    assert capsys.readouterr().out == ''
    accum.accum_bs = 48
    fit_aloud(learn, 1)
    assert capsys.readouterr().out == '48 = 6 x 8 samples\n'
    assert accum.last_message == '48 = 6 x 8 samples'


def test_the_line_says_what_differs_from_one_batch(capsys):
    layers = [nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1)]
    m = nn.Sequential(*layers).double()
    fit_aloud(make_learner(8, m=m, cbs=GradientAccumulation(32)), 1)
    assert capsys.readouterr().out == (
        '32 = 4 x 8 samples. As in one batch of 32, except: BatchNorm1d (1 layer) sees 8 samples at a time; '
        'dropout draws different random numbers.\n')


# Steps that are skipped

class Spoils(Callback):
    "Makes the loss of each batch NaN from epoch 1 on"
    run_valid = False
    def after_pred(self):
        if self.epoch: self.learn.pred = self.pred*math.nan


def test_skipped_steps_are_counted_and_said_once_in_each_fit():
    accum = GradientAccumulation(32, skip_nonfinite=True)
    learn = make_learner(8, cbs=[accum, Spoils()])
    says = 'skipped a step: its gradient contains NaN or infinity. Later ones are skipped without a warning'
    for n_epoch in (3, 2):
        with pytest.warns(UserWarning, match=says) as said: fit(learn, n_epoch)
        assert len(said) == 1
        assert accum.n_skipped == 3*(n_epoch-1)
        assert accum.opt_steps == 3
    fit(learn, 1)
    assert accum.n_skipped == 0


# Callbacks that come late

class LateAugmentation(Callback):
    "Prepares batches, and has an order of 50 or more, at which callbacks see windows"
    order = 55
    run_valid = False
    def before_batch(self):
        self.learn.xb = (self.x*2,)


def test_a_late_callback_sees_each_loader_batch_where_those_are_logged():
    "So there is nothing to warn of"
    large = fit(make_learner(32, cbs=LateAugmentation()))
    small = fit(make_learner(8, cbs=[LateAugmentation(), GradientAccumulation(32, log_accum_batch=False)]))
    assert_same(weights(small), weights(large), ROUNDING)
