"A fit with a loss as other people write it is that of the large batch, or a warning says that it is another one"
from situation_losses import *


def unevenly_ignored():
    "Returns labels of which most of the first ones are ignored"
    labels = LABELS.clone()
    labels[:50:2] = -100
    return labels


def unevenly_unknown(targets):
    targets = targets.clone()
    targets[::3] = math.nan
    targets[:40:2] = math.nan
    return targets


def unknown_later():
    "Returns targets of 50 windows, of which those in the first 25 are all known"
    _, targets = data(1600)
    return torch.cat([targets[:800], unevenly_unknown(targets[800:])])


IMPORTANCE = torch.linspace(.1, 3, N).double()[:, None]
MASKS = (torch.sin(50*CONTINUOUS[:, :4]) > 0).double()
VIEWS = CONTINUOUS[:, :3]
OTHER_VIEWS = VIEWS.roll(1, 0)
SHARES = VIEWS.softmax(1)
TEXTS = torch.randint(1, 4, (N, 3), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.arange(N)%3+1
of_classes = torch.tensor([1., 2., .5]).double()
of_positives = torch.tensor([3.]).double()

SAME = dict(
    two_tasks=Case(InTwoTasks, LABELS, TARGETS, make_model=TwoHeads),
    focal=of_labels(focal),
    margin=of_labels(margin),
    pinball=of_function(pinball),
    log_cosh=of_function(log_cosh),
    huber=Case(partial(HuberLoss, delta=.3)),
    gaussian=of_function(gaussian, TARGETS, make_model=partial(net, 2)),
    dice_of_samples=of_function(dice_of_samples, MASKS, make_model=partial(net, 4)),
    triplets=of_function(triplets, VIEWS, OTHER_VIEWS, make_model=classifier),
    ctc=Case(Ctc, TEXTS, LENGTHS, make_model=ReadsText),
    weighted_positives=Case(partial(BCEWithLogits, pos_weight=of_positives), (TARGETS > 0).double()),
    batchmean=Case(partial(KLDiv, reduction='batchmean'), SHARES, make_model=LogShares),
    divergence=Case(KLDiv, SHARES, make_model=LogShares),
    weighted_classes=Case(
        partial(CrossEntropy, weight=of_classes, label_smoothing=.1), unevenly_ignored(), make_model=classifier),
    with_parameters=CaseOfTrainedLoss(Balanced),
    sum_that_says_so=Case(partial(StatesThatItSums, reduction='sum')))

# Exact with num_items; without, a warning asks for it
COUNTED = dict(
    over_positives=of_function(over_positives, num_items=positives),
    over_observed=of_function(over_observed, unevenly_unknown(TARGETS), num_items=observed),
    by_importance=of_function(by_importance, TARGETS, IMPORTANCE, num_items=importance))

INEXACT = dict(
    COUNTED,
    sum_that_does_not_say_so=of_function(total),
    tasks_over_other_labels=Case(InTwoTasks, unevenly_ignored(), TARGETS, make_model=TwoHeads),
    root_of_mean=of_function(root_of_mean),
    perplexity=of_labels(perplexity),
    dice_of_batch=of_function(dice_of_batch, MASKS, make_model=partial(net, 4)),
    correlation=of_function(correlation),
    hardest=of_function(hardest),
    worst=of_function(worst),
    ranking=of_function(ranking),
    diverse=of_labels(diverse),
    info_nce=of_function(info_nce, VIEWS, make_model=classifier),
    decorrelated=of_function(decorrelated, VIEWS, make_model=classifier),
    standardized=of_function(standardized))

# Called again, they return something else, so nothing can be compared
VARYING = dict(
    by_moving_average=Case(ByMovingAverage),
    counts_calls=Case(CountsCalls),
    draws_negatives=Case(DrawsNegatives),
    keeps_center=Case(KeepsCenter))


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('name', SAME)
def test_a_mean_over_samples_or_what_is_known_is_that_of_the_large_batch(name, way):
    assert_as_large(SAME[name].learner, way)


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('name', COUNTED)
def test_a_mean_over_what_num_items_counts_is_that_of_the_large_batch(name, way):
    case = COUNTED[name]
    assert_as_large(case.learner, way, 1e-8, num_items=case.num_items)  # float32 losses times weights of 1/3


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('name', INEXACT)
def test_a_loss_that_is_no_sum_of_its_parts_is_named_in_a_warning(name, way):
    assert_says_that_it_differs(INEXACT[name].learner, way, 'accumulation is not exact for this loss')


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('name', VARYING)
def test_a_loss_that_changes_from_call_to_call_is_named_in_a_warning(name, way):
    assert_says_that_it_differs(VARYING[name].learner, way, 'could not check whether accumulation is exact')


PAIRS = dict(info_nce=INEXACT['info_nce'], decorrelated=INEXACT['decorrelated'], ranking=INEXACT['ranking'])


@pytest.mark.parametrize('name', PAIRS)
def test_with_gradient_cache_a_loss_of_pairs_is_that_of_the_large_batch(name):
    situation = PAIRS[name].learner
    cached = fit_situation(situation, LARGE, [GradientCache(micro_batch_size=8)])
    assert_equal_fits(cached, fit_large(situation))


LATER = of_function(over_observed, unknown_later())


@pytest.mark.parametrize('way', WAYS)
def test_a_loss_that_averages_over_something_else_later_is_named_in_a_warning(way):
    "After the first 16 windows, none is compared until 64 more are over: here in the second half of the second epoch"
    assert_says_that_it_differs(LATER.learner, way, 'accumulation is not exact for this loss')
