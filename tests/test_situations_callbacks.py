"Beside callbacks as other people write them, a fit is that of the large batch; or it warns, or ends in an error"
from situation_callbacks import *

# Where events come once a micro-batch, the fit says so for some that it does not matter to
pytestmark = pytest.mark.filterwarnings('ignore:.* is called once per micro-batch')

SAME = [
    AddsNoise, SmoothsLabels, MasksInputs, KeepsMasked, DropsEasySamples, DoublesBatch, Repeats, Attacks,
    AddsUnlabelled, GivesTeacher, ChangesLossLate, ScalesLoss, ShowsOtherLoss, AdaptiveClip, StepsTwice, FreezesAt,
    UnfreezesHalfway, DecaysByPosition, AveragesWeights, StopsAtLoss, StopsAtNaN, FewBatches, SkipsStep, SwitchesOff,
    ChoosesBatches, NotesBatches, NotesEpochs, NotesProgress, NotesNormsBeforeStep, CountsCorrect,
    KeepsOutputsOfPasses, Times]

# In split batches these see the whole batch; of windows, see below
SAME_IF_SPLIT = [
    AttacksByBackward, MixesNeighbours, Standardizes, AttacksWholeBatch, WeighsByRank, DropsSamplesOfAnyLoss,
    DoublesBatchOfAnyLoss, ZeroesGradients, SharpnessAware, SchedulesByLoader, SchedulesAndTimes, CountsSamples,
    KeepsOutputs, NotesHits]

BATCH_OF_CALLBACK = 'a callback that lets samples of a batch act on each other sees a loader batch'
LAST_BATCH = 'after the backward pass, the Learner holds the last loader batch of the window; the page says so'
ONCE_A_PASS = 'these come once a micro-batch; the page says so'
LARGER_SLOPE = 'the loss of a micro-batch has a larger gradient by each output than that of the window'
SILENT = [
    *silent(MixesNeighbours, BATCH_OF_CALLBACK, ['windows']),
    *silent(Standardizes, BATCH_OF_CALLBACK, ['windows']),
    *silent(AttacksWholeBatch, BATCH_OF_CALLBACK, ['windows']),
    *silent(WeighsByRank, BATCH_OF_CALLBACK, ['windows']),
    *silent(SharpnessAware, LAST_BATCH, ['windows']),
    *silent(ClassCounts, LAST_BATCH, ['windows']),
    *silent(CountsSamples, LAST_BATCH, ['windows']),
    *silent(KeepsOutputs, LAST_BATCH, ['windows']),
    *silent(NotesHits, LAST_BATCH, ['windows']),
    *silent(SchedulesByLoader, 'len(learn.dls.train) counts loader batches', ['windows']),
    *silent(SchedulesAndTimes, 'before_batch and after_batch of one callback come once a loader batch', ['windows']),
    *silent(ReplacesLossLate, 'nobody looks whether before_backward has replaced the loss'),
    *silent(LimitsSlopeOfOutputs, LARGER_SLOPE),
    *silent(HooksGradientsLater, 'hooks on weights are looked for before training only'),
    *silent(NotesNorms, ONCE_A_PASS),
    *silent(NotesLossOfPass, ONCE_A_PASS),
    *silent(WatchesActivations, ONCE_A_PASS)]


def name_of(o): return o.__name__ if isinstance(o, type) else None


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('cls', SAME, ids=name_of)
def test_the_fit_is_that_of_the_large_batch(cls, way): assert_as_large(cls.learner, way)


@pytest.mark.parametrize('cls', SAME_IF_SPLIT, ids=name_of)
def test_the_fit_is_that_of_the_large_batch_if_it_is_split(cls): assert_as_large(cls.learner, 'split')


@pytest.mark.parametrize('cls,way', SILENT, ids=name_of)
def test_the_fit_is_another_one_and_nobody_says_so(cls, way): assert_as_large(cls.learner, way)


def test_weights_of_classes_that_change_after_each_batch_are_those_of_the_large_batch_if_it_is_split():
    float32 = 1e-8  # the loss is rounded before it is multiplied by the weight of a micro-batch
    assert_as_large(ClassCounts.learner, 'split', float32)


# Warnings

ADDS = 'adds to the loss in after_loss'
REPLACES = 'replaces the loss in after_loss'
UNCHECKED = 'could not check whether accumulation is exact'
SAME_WITH_WARNING = {
    RunsTwice: ADDS, Distils: ADDS, PenalizesWeights: ADDS, PenalizesActivations: ADDS, PenalizesSlope: ADDS,
    MeanTeacher: ADDS, PenalizesRarely: ADDS, MixesInTeacher: REPLACES, RewardsEntropy: REPLACES, Reduces: REPLACES}


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('cls', SAME_WITH_WARNING, ids=name_of)
def test_a_loss_that_a_callback_changes_is_that_of_the_large_batch_and_a_warning_says_what_is_assumed(cls, way):
    with pytest.warns(match=SAME_WITH_WARNING[cls]): assert_as_large(cls.learner, way)


def test_a_penalty_that_follows_the_loss_is_that_of_the_large_batch_and_a_warning_says_what_is_assumed():
    float32 = 1e-8  # the callback reads the mean loss, which is a float32
    with pytest.warns(match=ADDS): assert_as_large(DualVariable.learner, 'windows', float32)


def test_rows_that_a_callback_appends_are_those_of_the_large_batch_and_a_warning_says_what_is_unknown():
    with pytest.warns(match=UNCHECKED): assert_as_large(DoublesBatchOfAnyLoss.learner, 'windows')


@pytest.mark.parametrize('cls,way,warning', [
    (BalancesBatch, 'windows', ADDS),
    (BalancesBatch, 'split', ADDS),
    (MinesHardSamples, 'windows', REPLACES),
    (MinesHardSamples, 'split', REPLACES),
    (NormalizesLoss, 'windows', REPLACES),
    (NormalizesLoss, 'split', REPLACES),
    (KeepsMaskedOfAnyLoss, 'windows', UNCHECKED),
    (KeepsMaskedOfAnyLoss, 'split', UNCHECKED),
    (DropsSamplesOfAnyLoss, 'windows', UNCHECKED),
    (HooksGradients, 'windows', 'parameters have hooks'),
    (HooksGradients, 'split', 'parameters have hooks'),
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
