"""GradientAccumulation itself: its arguments and attributes, what it warns of, and how it validates.

That it trains as the large batch does is in test_large_batch.py, what it reads before each fit in test_callback.py"""
import pytest
from fastai.callback.data import WeightedDL
from fastai.text.data import LMDataLoader

from common import *
from fastxtend_accum.accumulation import can_be_smaller
from fastxtend_accum.windows.window import Outcome


# Arguments and attributes

def test_the_arguments_of_fastai():
    "Its callback has the same name, and 32 samples by default; `n_acc` is its name for `accum_bs`"
    assert GradientAccumulation().accum_bs == 32
    assert GradientAccumulation(64).accum_bs == 64
    accum = GradientAccumulation(n_acc=64)
    assert accum.accum_bs == accum.n_acc == 64
    accum.n_acc = 32
    assert accum.accum_bs == 32


def test_before_a_fit_there_is_nothing_to_tell():
    accum = GradientAccumulation(32)
    assert accum.opt_steps == 0
    assert accum.n_skipped == 0
    assert accum.micro_bs is None
    assert not accum.window.is_open


def test_what_other_callbacks_find_in_a_fit():
    "The steps so far, and the samples of the present window"
    accum = GradientAccumulation(32)
    steps = []
    samples = []
    def note(self):
        steps.append(accum.opt_steps)
        samples.append(accum.window.losses.samples)
    fit(make_learner(8, n=88, cbs=[accum, Callback(before_step=note, after_step=note)]), 1)
    assert steps == [0, 1, 1, 2, 2, 3]
    assert samples == [32, 32, 32, 32, 24, 24]
    assert accum.opt_steps == 3


def test_after_an_epoch_the_last_window_stays():
    "Also if the samples that are left fill none"
    accum = GradientAccumulation(32, remainder='drop')
    outcomes = []
    def note(self): outcomes.append(accum.window.outcome)
    learn = make_learner(8, n=88, cbs=[accum, Callback(after_train=note)])
    fit(learn, 2)
    assert outcomes == [Outcome.HAS_MEAN]*2
    assert accum.window.losses.samples == 32


# The end of an epoch

@pytest.mark.parametrize('drop_last, accum, expected', [
    (False, GradientAccumulation(32), 'step'),
    (True, GradientAccumulation(32), 'drop'),
    (True, GradientAccumulation(32, remainder='step'), 'step'),
    (False, GradientAccumulation(32, remainder='carry'), 'carry'),
    (True, GradientAccumulation(micro_batch_size=4), 'step')])  # a window is one batch
def test_an_incomplete_window_follows_the_loader_unless_remainder_says_otherwise(drop_last, accum, expected):
    learn = make_learner(8, drop_last=drop_last)
    assert accum.remainder_for(learn.dls.train) == expected


# Fits without a step

def learner_of_stream(cb):
    learn = make_learner(8, cbs=cb)
    train = torch.utils.data.DataLoader(Stream(40, announced=64), batch_size=8)
    learn.dls = DataLoaders(train, learn.dls.valid)
    return learn


@pytest.mark.parametrize('make', [lambda cb: make_learner(8, n=44, cbs=cb), learner_of_stream])
def test_an_epoch_that_fills_no_window_is_an_error_if_windows_are_dropped(make):
    "Also of a stream, which announces more samples than it has. A loader that has not begun does not end either"
    learn = make(GradientAccumulation(48, remainder='drop'))
    learn.dls.train.after_iter = None  # not called
    assert_refused(learn, ValueError, 'has too few samples for one window of 48, and incomplete windows are dropped')


def test_a_schedule_that_outgrows_the_epoch_is_told_if_windows_are_dropped():
    learn = make_learner(8, n=64, cbs=GradientAccumulationSchedule(8, 128, start=0, finish=.5, remainder='drop'))
    with pytest.warns(UserWarning, match='larger than an epoch') as caught: fit(learn, 4)
    assert len(caught) == 1
    assert learn.gradient_accumulation_schedule.opt_steps > 0


# The strategy, and the line

def test_the_line_is_printed_again_if_it_has_changed(capsys):
    accum = GradientAccumulation(32)
    learn = make_learner(8, cbs=accum)
    said = []
    for size in (32, 32, 48, 4):
        accum.accum_bs = size
        fit_aloud(learn, 1)
        said.append(capsys.readouterr().out)
    assert said == ['32 samples per step, at most 8 at a time\n', '', '48 samples per step, at most 8 at a time\n',
                    '4 samples per step, at most 4 at a time\n']


@pytest.mark.parametrize('run, size', [(True, 2), (False, 8)])
def test_a_gradient_cache_splits_batches_unless_it_is_turned_off(capsys, run, size):
    accum = GradientAccumulation(16)
    learn = make_learner(8, cbs=[accum, GradientCache(2)])
    learn.gradient_cache.run = run
    fit_aloud(learn, 1)
    assert f'16 samples per step, at most {size} at a time\n' in capsys.readouterr().out
    assert accum.micro_bs == size


def test_without_verbose_the_line_has_no_differences(capsys):
    "Nothing has looked for them"
    accum = GradientAccumulation(16, verbose=False)
    fit_aloud(make_learner(8, cbs=accum), 1)
    assert capsys.readouterr().out == ''
    assert accum.description() == '16 samples per step, at most 8 at a time'


# Validation

SAMPLES = samples(20)


class OwnLoader(DataLoader): "Whatever it does, a copy of it might not"


@pytest.mark.parametrize('dl, bs, expected', [
    (DataLoader(SAMPLES, bs=16), 6, True),
    (TfmdDL(SAMPLES, bs=16), 6, True),
    (LMDataLoader([torch.arange(100)], bs=4, seq_len=5), 2, False),  # its batches continue each other
    (DataLoader(SAMPLES, bs=16), 16, False),
    (DataLoader(SAMPLES, bs=16, drop_last=True), 6, False),
    (WeightedDL(SAMPLES, bs=16, wgts=[1]*len(SAMPLES), shuffle=False), 6, False),  # a new one has no weights
    (OwnLoader(SAMPLES, bs=16), 6, False),
    (SAMPLES, 6, False)])
def test_which_loaders_can_be_smaller(dl, bs, expected):
    assert can_be_smaller(dl, bs) == expected


def test_smaller_batches_for_validation_draw_no_random_number():
    "A loader of fastai's draws a seed when it is made"
    seen = []
    def note(self): seen.append(random.random())
    for cbs in ([], [GradientAccumulation(micro_batch_size=4)]):
        random.seed(1)
        fit(make_learner(8, cbs=[*cbs, Callback(after_validate=note)]), 1)
    assert seen[0] == seen[1]


class SetsSize(Callback):
    "Sets a size that the loader cannot make, in the middle of an epoch"
    def before_step(self): self.learn.gradient_accumulation.accum_bs = 20


def test_a_size_that_is_set_in_mid_epoch_waits_for_the_next_one():
    learn = make_learner(8, n=64, cbs=[GradientAccumulation(16), SetsSize()])
    fit(learn, 1)
    assert learn.gradient_accumulation.opt_steps == 4
    learn.gradient_accumulation.accum_bs = 16
    with pytest.raises(ValueError, match='accum_bs=20'): fit(learn, 2)
