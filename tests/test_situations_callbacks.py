"Beside others' callbacks, a fit is that of the large batch, or a warning, an error or a page says why not"
from situation_callbacks import *

# Where events come once a micro-batch, the fit says so for some that it does not matter to
pytestmark = pytest.mark.filterwarnings('ignore:.* is called once per micro-batch')

SAME = [
    AddsNoise, SmoothsLabels, MasksInputs, KeepsMasked, DropsEasySamples, DropsSamplesOfAnyLoss, DoublesBatch,
    DoublesBatchOfAnyLoss, Repeats, Attacks, AddsUnlabelled, GivesTeacher, ChangesLossLate, ScalesLoss, ShowsOtherLoss,
    AdaptiveClip, StepsTwice, FreezesAt, UnfreezesHalfway, DecaysByPosition, AveragesWeights, StopsAtLoss, StopsAtNaN,
    FewBatches, SkipsStep, SwitchesOff, ChoosesBatches, NotesBatches, NotesEpochs, NotesProgress, NotesNormsBeforeStep,
    CountsCorrect, KeepsOutputsOfPasses, Times]

# In split batches these see the whole batch; of windows, see below
SAME_IF_SPLIT = [
    AttacksByBackward, MixesNeighbours, Standardizes, AttacksWholeBatch, WeighsByRank, ZeroesGradients, SharpnessAware,
    SchedulesByLoader, SchedulesAndTimes, CountsSamples, KeepsOutputs, NotesHits]


def name_of(o): return o.__name__ if isinstance(o, type) else None


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('cls', SAME, ids=name_of)
def test_the_fit_is_that_of_the_large_batch(cls, way): assert_as_large(cls.learner, way)


@pytest.mark.parametrize('cls', SAME_IF_SPLIT, ids=name_of)
def test_the_fit_is_that_of_the_large_batch_if_it_is_split(cls): assert_as_large(cls.learner, 'split')


def test_weights_of_classes_that_change_after_each_batch_are_those_of_the_large_batch_if_it_is_split():
    float32 = 1e-8  # the loss is rounded before it is multiplied by the weight of a micro-batch
    assert_as_large(ClassCounts.learner, 'split', float32)


# Warnings

ADDS = 'adds to the loss in after_loss'
REPLACES = 'replaces the loss in after_loss'
REPLACES_LATE = 'a callback replaces the loss in before_backward'
WEIGHTS_HAVE_HOOKS = 'parameters have hooks'
UNCHECKED = 'could not check whether accumulation is exact'
SAME_WITH_WARNING = {
    RunsTwice: ADDS, Distils: ADDS, PenalizesWeights: ADDS, PenalizesActivations: ADDS, PenalizesSlope: ADDS,
    MeanTeacher: ADDS, PenalizesRarely: ADDS, RewardsEntropy: ADDS, MixesInTeacher: REPLACES, Reduces: REPLACES}


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('cls', SAME_WITH_WARNING, ids=name_of)
def test_a_loss_that_a_callback_changes_is_that_of_the_large_batch_and_a_warning_says_what_is_assumed(cls, way):
    with pytest.warns(match=SAME_WITH_WARNING[cls]): assert_as_large(cls.learner, way)


def test_a_penalty_that_follows_the_loss_is_that_of_the_large_batch_and_a_warning_says_what_is_assumed():
    float32 = 1e-8  # the callback reads the mean loss, which is a float32
    with pytest.warns(match=ADDS): assert_as_large(DualVariable.learner, 'windows', float32)


@pytest.mark.parametrize('cls,way,warning', [
    (BalancesBatch, 'windows', ADDS),
    (BalancesBatch, 'split', ADDS),
    (MinesHardSamples, 'windows', REPLACES),
    (MinesHardSamples, 'split', REPLACES),
    (NormalizesLoss, 'windows', REPLACES),
    (NormalizesLoss, 'split', REPLACES),
    (KeepsMaskedOfAnyLoss, 'windows', UNCHECKED),
    (KeepsMaskedOfAnyLoss, 'split', UNCHECKED),
    (ReplacesLossLate, 'windows', REPLACES_LATE),
    (ReplacesLossLate, 'split', REPLACES_LATE),
    (LimitsSlopeOfOutputs, 'windows', 'outputs have hooks'),
    (LimitsSlopeOfOutputs, 'split', 'outputs have hooks'),
    (HooksGradients, 'windows', WEIGHTS_HAVE_HOOKS),
    (HooksGradients, 'split', WEIGHTS_HAVE_HOOKS),
    (HooksGradientsLater, 'windows', WEIGHTS_HAVE_HOOKS),
    (HooksGradientsLater, 'split', WEIGHTS_HAVE_HOOKS),
    (SharpnessAware, 'windows', 'the model runs during the optimizer step'),
    (PerturbsWeights, 'split', 'after_backward of PerturbsWeights is called once per micro-batch'),
    (ChoosesBatchesLate, 'windows', 'nothing was accumulated')], ids=name_of)
def test_the_fit_is_another_one_and_a_warning_says_so(cls, way, warning):
    assert_says_that_it_differs(cls.learner, way, warning)


def test_weights_that_a_callback_moves_for_each_batch_are_those_of_the_large_batch():
    "Where batches are not split, both of its events come once a batch"
    assert_as_large(PerturbsWeights.learner, 'windows')


# Errors

CHANGED = 'a gradient was zeroed, replaced or changed'
RAN_BACKWARD = 'a callback ran the backward pass itself'


@pytest.mark.parametrize('cls,way,message', [
    (AttacksByBackward, 'windows', CHANGED),
    (ZeroesGradients, 'windows', CHANGED),
    (ClipsInBackward, 'windows', CHANGED),
    (ClipsInBackward, 'split', CHANGED),
    (CentersInBackward, 'windows', CHANGED),
    (CentersInBackward, 'split', CHANGED),
    (SharpnessAwareInBackward, 'windows', CHANGED),
    (SharpnessAwareInBackward, 'split', CHANGED),
    (FreezesInBackward, 'windows', CHANGED),
    (FreezesInBackward, 'split', CHANGED),
    (ProjectsGradients, 'windows', RAN_BACKWARD),
    (ProjectsGradients, 'split', RAN_BACKWARD)], ids=name_of)
def test_what_cannot_be_done_in_a_window_is_an_error(cls, way, message):
    fit_large(cls.learner)
    with pytest.raises(RuntimeError, match=message): fit_small(cls.learner, way)


READS = 'reads the batch, which there is the last loader batch of a window'


# Limits that the pages name. If one of these tests fails, that limit is gone: take it off its page, too

ACTS_ON_BATCH = [MixesNeighbours, Standardizes, AttacksWholeBatch, WeighsByRank]


@pytest.mark.parametrize('cls', ACTS_ON_BATCH, ids=name_of)
def test_limit_on_the_page_a_callback_that_lets_samples_act_on_each_other_sees_a_loader_batch(cls):
    assert_other_weights(cls.learner, 'windows')


@pytest.mark.parametrize('log_accum_batch', [True, False])
@pytest.mark.parametrize('cls', ACTS_ON_BATCH, ids=name_of)
def test_the_line_of_a_fit_names_a_callback_that_changes_each_loader_batch(cls, log_accum_batch, capsys):
    fit_aloud(cls.learner(8, [GradientAccumulation(LARGE, log_accum_batch=log_accum_batch)]), 1)
    differences = f'As in one batch of 32, except: {cls.__name__} changes 8 samples at a time.'
    assert f'32 = 4 x 8 samples. {differences}' in capsys.readouterr().out


@pytest.mark.parametrize('cls', ACTS_ON_BATCH, ids=name_of)
def test_the_line_of_a_fit_does_not_name_a_callback_that_changes_the_whole_batch(cls, capsys):
    "Split batches are whole when a callback changes them"
    fit_aloud(cls.learner(LARGE, [GradientAccumulation(micro_batch_size=8)]), 1)
    said = capsys.readouterr().out
    assert '32 = 4 x 8 samples' in said
    assert cls.__name__ not in said


@pytest.mark.parametrize('cls', [CountsSamples, KeepsOutputs, NotesHits], ids=name_of)
def test_a_warning_says_that_a_callback_notes_the_last_loader_batch_after_the_backward_pass(cls):
    with pytest.warns(match=f'of {cls.__name__} {READS}'): assert_other_notes(cls.learner, 'windows')


def test_a_warning_says_that_a_callback_trains_by_the_last_loader_batch_after_the_backward_pass():
    with pytest.warns(match=f'of ClassCounts {READS}'): assert_other_weights(ClassCounts.learner, 'windows')


def test_limit_on_the_page_before_batch_and_after_batch_of_one_callback_come_once_a_loader_batch():
    assert_other_weights(SchedulesAndTimes.learner, 'windows')


def test_limit_on_the_page_the_length_of_the_loader_counts_loader_batches():
    assert_other_weights(SchedulesByLoader.learner, 'windows')


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('cls', [NotesNorms, NotesLossOfPass, WatchesActivations], ids=name_of)
def test_limit_on_the_page_events_of_a_pass_and_hooks_come_once_a_micro_batch(cls, way):
    assert_other_notes(cls.learner, way)
