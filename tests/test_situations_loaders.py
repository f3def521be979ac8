"A fit on a loader as other people write it is that of the large batch, or a warning, an error or a page says why not"
from situation_loaders import *

FORMS = dict(
    names=OfForm(with_names, IgnoresNames),
    setting=OfForm(with_setting, UsesSetting))

SAME = [GoesOn, Undersampled, HalfInSecondEpoch]
OF_WHOLE_BATCHES = [centered_by_collate, centered_by_transform]


@pytest.mark.parametrize('name,way', [*itertools.product(FORMS, WAYS)])
def test_batches_of_another_form_train_as_the_large_batch(name, way): assert_as_large(FORMS[name].learner, way)


@pytest.mark.parametrize('make_loader,way', [*itertools.product(SAME, WAYS)])
def test_the_fit_is_that_of_the_large_batch(make_loader, way): assert_as_large(learner_on(make_loader), way)


def test_where_loader_batches_are_logged_the_weights_are_those_of_the_large_batch():
    situation = learner_on(Undersampled)
    small = fit_small(situation, 'windows', log_accum_batch=False)
    assert_same_weights(small, fit_large(situation), ROUNDING)


@pytest.mark.parametrize('make_loader', [of_batches, *OF_WHOLE_BATCHES])
def test_the_fit_is_that_of_the_large_batch_if_it_is_split(make_loader):
    assert_as_large(learner_on(make_loader), 'split')


def test_a_loader_that_does_not_state_its_batch_size_needs_that_of_the_callback():
    situation = learner_on(of_batches)
    with pytest.raises(ValueError, match='cannot find the batch size of'): fit_small(situation, 'windows')
    small = fit_situation(situation, 8, [GradientAccumulation(LARGE, micro_batch_size=8)])
    assert_equal_fits(small, fit_large(situation))


def test_batches_beyond_the_length_of_a_loader_make_windows_of_their_own():
    "The window before them ends where the length says. If batches are split, the fit is that of the large batch"
    situation = learner_on(Oversampled)
    small = fit_small(situation, 'windows')
    assert small.recorder.accum_bs == [32, 32, 32, 4, 32, 24]*2
    assert small.pct_train == 1
    assert_as_large(situation, 'split')


# A limit that a page names. If this test fails, it is gone: take it off the page, too

def test_limit_on_the_page_a_loader_that_lets_samples_act_on_each_other_makes_other_batches():
    assert_other_weights(learner_on(centered_by_collate), 'windows')
