"Beside others' callbacks, a fit is that of the large batch, or a warning, an error or a page says why not"
from situation_callbacks import *

# Where `before_batch` comes once a window, the fit says so for some that it does not matter to
pytestmark = pytest.mark.filterwarnings('ignore:.* is called once per window')

SAME = [
    MasksInputs, DropsEasySamples, Repeats, ChoosesBatches, CountsCorrect]

# In split batches these see the whole batch; of windows, see below
SAME_IF_SPLIT = [MixesNeighbours, SharpnessAware, SchedulesByLoader, NotesHits]

# Where batches are not split, each event of a pass comes once for what before_batch has seen
SAME_IN_WINDOWS = [KeepsMasked, PerturbsWeights]

CASES = [
    *paired(SAME, WAYS), *[(cls, 'split') for cls in SAME_IF_SPLIT], *[(cls, 'windows') for cls in SAME_IN_WINDOWS]]


@pytest.mark.parametrize('cls,way', CASES)
def test_the_fit_is_that_of_the_large_batch(cls, way): assert_as_large(cls.learner, way)


# Warnings

REPLACES_LOSS = 'a callback replaces the loss .*, but micro-batches keep the weights'


@pytest.mark.parametrize('way', WAYS)
def test_a_loss_that_a_callback_changes_is_that_of_the_large_batch_and_a_warning_says_what_is_assumed(way):
    with pytest.warns(match=REPLACES_LOSS): assert_as_large(PenalizesSlope.learner, way)


@pytest.mark.parametrize('cls,way,warning', [
    (BalancesBatch, 'windows', REPLACES_LOSS),
    (HooksGradientsLater, 'split', 'parameters have hooks')])
def test_the_fit_is_another_one_and_a_warning_says_so(cls, way, warning):
    with pytest.warns(match=warning): assert_other_weights(cls.learner, way)


def test_outputs_that_a_callback_cuts_down_are_an_error_if_batches_are_split():
    fit_large(KeepsMasked.learner)
    with pytest.raises(ValueError, match='its first dimension must index the samples'):
        fit_small(KeepsMasked.learner, 'split')


# Limits that the pages name. If one of these tests fails, that limit is gone: take it off its page, too

@pytest.mark.parametrize('cls', [MixesNeighbours, SharpnessAware, ClassCounts, SchedulesByLoader])
def test_limit_on_the_page_a_callback_that_acts_by_the_batch_or_its_number_sees_loader_batches(cls):
    assert_other_weights(cls.learner, 'windows')


def test_limit_on_the_page_what_a_callback_takes_back_in_a_pass_is_lost_to_the_next_micro_batch():
    "`check_accum` finds it"
    assert_other_weights(PerturbsWeights.learner, 'split')


@pytest.mark.parametrize('cls,way', [(NotesHits, 'windows'), (NotesNorms, 'split')])
def test_limit_on_the_page_events_of_a_pass_come_once_a_micro_batch_and_the_batch_is_the_last_one(cls, way):
    assert_other_notes(cls.learner, way)
