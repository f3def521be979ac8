"Beside others' callbacks, a fit is that of the large batch, or a warning, an error or a page says why not"
from situation_callbacks import *

# Where `before_batch` comes once a window, the fit says so for some that it does not matter to
pytestmark = pytest.mark.filterwarnings('ignore:.* is called once per window')

SAME = [
    AddsNoise, MasksInputs, DropsEasySamples, Repeats, Attacks, GivesTeacher,
    ShowsOtherLoss, AdaptiveClip, StepsTwice, DecaysByPosition, FewBatches, SkipsStep,
    SwitchesOff, ChoosesBatches, CountsCorrect, Times]

# In split batches these see the whole batch; of windows, see below
SAME_IF_SPLIT = [
    MixesNeighbours, Standardizes, SharpnessAware, SchedulesByLoader, SchedulesAndTimes, CountsSamples, NotesHits]

CASES = [*paired(SAME, WAYS), (KeepsMasked, 'windows'), *[(cls, 'split') for cls in SAME_IF_SPLIT]]


def name_of(o): return o.__name__ if isinstance(o, type) else None


@pytest.mark.parametrize('cls,way', CASES, ids=name_of)
def test_the_fit_is_that_of_the_large_batch(cls, way): assert_as_large(cls.learner, way)


def test_weights_of_classes_that_change_after_each_batch_are_those_of_the_large_batch_if_it_is_split():
    "The loss of validation is a mean over batches, which are smaller there"
    small, large = fit_small(ClassCounts.learner, 'split'), fit_large(ClassCounts.learner)
    float32 = 1e-8  # the loss is rounded before it is multiplied by the weight of a micro-batch
    assert_same_weights(small, large, float32)
    assert_same(losses(small), losses(large), FLOAT32)


def test_weights_that_a_callback_moves_for_each_batch_are_those_of_the_large_batch():
    "Where batches are not split, both of its events come once a batch"
    assert_as_large(PerturbsWeights.learner, 'windows')


# Warnings

CHANGES_LOSS = 'changes the loss, but micro-batches keep the weights'


@pytest.mark.parametrize('cls,way', paired([
    RunsTwice, Distils, PenalizesActivations, PenalizesSlope, MeanTeacher, Reduces, ChangesLossLate, ScalesLoss
], WAYS), ids=name_of)
def test_a_loss_that_a_callback_changes_is_that_of_the_large_batch_and_a_warning_says_what_is_assumed(cls, way):
    with pytest.warns(match=f'{cls.__name__} {CHANGES_LOSS}'): assert_as_large(cls.learner, way)


def test_a_penalty_that_follows_the_loss_is_that_of_the_large_batch_and_a_warning_says_what_is_assumed():
    float32 = 1e-8  # the callback reads the mean loss, which is a float32
    with pytest.warns(match=CHANGES_LOSS): assert_as_large(DualVariable.learner, 'windows', float32)


@pytest.mark.parametrize('cls,way,warning', [
    (BalancesBatch, 'windows', CHANGES_LOSS),
    (MinesHardSamples, 'split', CHANGES_LOSS),
    (NormalizesLoss, 'windows', CHANGES_LOSS),
    (ReplacesLossLate, 'split', CHANGES_LOSS),
    (HooksGradientsLater, 'windows', 'parameters have hooks'),
    (HooksGradientsLater, 'split', 'parameters have hooks'),
    (ChoosesBatchesLate, 'windows', 'nothing was accumulated')], ids=name_of)
def test_the_fit_is_another_one_and_a_warning_says_so(cls, way, warning):
    assert_says_that_it_differs(cls.learner, way, warning)


def test_outputs_that_a_callback_cuts_down_are_an_error_if_batches_are_split():
    fit_large(KeepsMasked.learner)
    with pytest.raises(ValueError, match='its first dimension must index the samples, so that'):
        fit_small(KeepsMasked.learner, 'split')


# Limits that the pages name. If one of these tests fails, that limit is gone: take it off its page, too

@pytest.mark.parametrize('cls', [
    MixesNeighbours, Standardizes, SharpnessAware, ClassCounts, SchedulesAndTimes, SchedulesByLoader], ids=name_of)
def test_limit_on_the_page_a_callback_that_acts_by_the_batch_or_its_number_sees_loader_batches(cls):
    assert_other_weights(cls.learner, 'windows')


def test_limit_on_the_page_what_a_callback_takes_back_in_a_pass_is_lost_to_the_next_micro_batch():
    "`check_accum` finds it"
    assert_other_weights(PerturbsWeights.learner, 'split')


@pytest.mark.parametrize('cls,way', [
    (CountsSamples, 'windows'), (NotesHits, 'windows'), (NotesNorms, 'windows'), (NotesNorms, 'split'),
    (WatchesActivations, 'windows'), (WatchesActivations, 'split')], ids=name_of)
def test_limit_on_the_page_events_of_a_pass_and_hooks_come_once_a_micro_batch_and_the_batch_is_the_last_one(cls, way):
    assert_other_notes(cls.learner, way)
