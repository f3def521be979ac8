"A fit on a loader as other people write it is that of the large batch, or a warning, an error or a page says why not"
from situation_loaders import *

FORMS = dict(
    lists=OfForm(as_list, model),
    mappings=OfForm(as_mapping, OfMapping),
    names=OfForm(with_names, IgnoresNames),
    setting=OfForm(with_setting, UsesSetting),
    two_views=OfForm(two_views, model),
    records=OfForm(as_record, model, TakesRecords))

SAME = [
    dropping, by_batch_sampler, shuffled, drawn_by_weight, of_subset, streamed, stream_that_announces_less,
    stream_that_announces_more, of_fastai, shuffled_by_fastai, dropping_by_fastai, transformed, Own, ReusesBuffers,
    ReadsAhead, GoesOn, EndsEarly, GoesOnLonger, Wrapped, Sorted, Undersampled, HalfInSecondEpoch, SkipsBad]

WITHOUT_BATCH_SIZE = [by_own_batch_sampler, of_batches, Without]
WITH_UNANNOUNCED = [Oversampled, by_long_sampler]
OF_WHOLE_BATCHES = [centered_by_collate, scaled_by_collate, centered_by_transform]


def name_of(o): return getattr(o, '__name__', None)


@pytest.mark.parametrize('name,way', paired(FORMS, WAYS))
def test_batches_of_another_form_train_as_the_large_batch(name, way): assert_as_large(FORMS[name].learner, way)


@pytest.mark.parametrize('make_loader,way', paired(SAME, WAYS), ids=name_of)
def test_the_fit_is_that_of_the_large_batch(make_loader, way): assert_as_large(learner_on(make_loader), way)


@pytest.mark.parametrize('make_loader', [
    drawn_by_weight, stream_that_announces_less, dropping_by_fastai, EndsEarly, SkipsBad])
def test_where_loader_batches_are_logged_the_weights_are_those_of_the_large_batch(make_loader):
    situation = learner_on(make_loader)
    small = fit_small(situation, 'windows', log_accum_batch=False)
    assert_same_weights(small, fit_large(situation), ROUNDING)


SAME_IF_SPLIT = [*WITHOUT_BATCH_SIZE, *OF_WHOLE_BATCHES]


@pytest.mark.parametrize('make_loader', SAME_IF_SPLIT, ids=name_of)
def test_the_fit_is_that_of_the_large_batch_if_it_is_split(make_loader):
    assert_as_large(learner_on(make_loader), 'split')


@pytest.mark.parametrize('make_loader', WITHOUT_BATCH_SIZE, ids=name_of)
def test_a_loader_that_does_not_state_its_batch_size_is_an_error(make_loader):
    situation = learner_on(make_loader)
    with pytest.raises(ValueError, match='cannot find the batch size of'): fit_small(situation, 'windows')


@pytest.mark.parametrize('make_loader', WITHOUT_BATCH_SIZE, ids=name_of)
def test_with_the_size_that_the_error_asks_for_the_fit_is_that_of_the_large_batch(make_loader):
    situation = learner_on(make_loader)
    small = fit_situation(situation, 8, [GradientAccumulation(LARGE, micro_batch_size=8)])
    assert_equal_fits(small, fit_large(situation))


@pytest.mark.parametrize('way', ['plain', *WAYS])
def test_a_loader_without_a_length_is_the_error_of_fastai(way):
    cbs = []
    if way != 'plain': _, cbs = WAYS[way]()
    situation = learner_on(WithoutLength)
    with pytest.raises(TypeError, match='has no len'): fit_situation(situation, 8, cbs)


YIELDS_MORE = 'the DataLoader yields more than the .* samples that its length announces'


@pytest.mark.parametrize('make_loader', WITH_UNANNOUNCED, ids=name_of)
def test_batches_beyond_the_length_of_a_loader_are_windows_of_their_own_and_a_warning_says_so(make_loader):
    assert_says_that_it_differs(learner_on(make_loader), 'windows', YIELDS_MORE)


@pytest.mark.parametrize('make_loader', WITH_UNANNOUNCED, ids=name_of)
def test_if_they_are_split_the_fit_is_that_of_the_large_batch_and_the_warning_comes_too(make_loader):
    with pytest.warns(match=YIELDS_MORE): assert_as_large(learner_on(make_loader), 'split')


# A limit that a page names. If this test fails, it is gone: take it off the page, too

@pytest.mark.parametrize('make_loader', OF_WHOLE_BATCHES[:1], ids=name_of)
def test_limit_on_the_page_a_loader_that_lets_samples_act_on_each_other_makes_other_batches(make_loader):
    assert_other_weights(learner_on(make_loader), 'windows')
