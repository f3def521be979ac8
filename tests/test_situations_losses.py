"A fit with a loss as other people write it is that of the large batch, or a warning says that it is another one"
from situation_losses import *


def unevenly_ignored():
    "Returns labels of which most of the first ones are ignored"
    labels = LABELS.clone()
    labels[:50:2] = -100
    return labels


def unevenly_unknown():
    targets = TARGETS.clone()
    targets[::3] = math.nan
    targets[:40:2] = math.nan
    return targets


IMPORTANCE = torch.linspace(.1, 3, N).double()[:, None]
VIEWS = CONTINUOUS[:, :3]
OTHER_VIEWS = VIEWS.roll(1, 0)
TEXTS = torch.randint(1, 4, (N, 3), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.arange(N)%3+1
of_classes = torch.tensor([1., 2., .5]).double()

SAME = dict(
    two_tasks=Case(InTwoTasks, LABELS, TARGETS, make_model=TwoHeads),
    gaussian=of_function(gaussian, TARGETS, make_model=partial(net, 2)),
    triplets=of_function(triplets, VIEWS, OTHER_VIEWS, make_model=classifier),
    ctc=Case(Ctc, TEXTS, LENGTHS, make_model=reader),
    weighted_classes=Case(
        partial(CrossEntropy, weight=of_classes, label_smoothing=.1), unevenly_ignored(), make_model=classifier),
    with_parameters=Case(Balanced),
    sum_that_says_so=Case(partial(StatesThatItSums, reduction='sum')))

# Exact with num_items; without, a warning asks for it
COUNTED = dict(
    over_positives=of_function(over_positives, num_items=positives),
    over_observed=of_function(over_observed, unevenly_unknown(), num_items=observed),
    by_importance=of_function(by_importance, TARGETS, IMPORTANCE, num_items=importance))

# Exact with GradientCache
PAIRS = dict(
    ranking=of_function(ranking),
    decorrelated=of_function(decorrelated, VIEWS, make_model=classifier))

INEXACT = dict(
    **COUNTED,
    **PAIRS,
    tasks_over_other_labels=Case(InTwoTasks, unevenly_ignored(), TARGETS, make_model=TwoHeads),
    worst=of_function(worst),
    diverse=of_function(diverse, LABELS, make_model=classifier))


def assert_same_steps(case, way, tol=ROUNDING, **kwargs):
    """Asserts the weights and training losses of the large batch. The validation of a split batch has smaller batches,
    and fastai averages their losses by samples, whatever they are means over"""
    small = fit_small(case.learner, way, **kwargs)
    large = fit_large(case.learner)
    assert_same_weights(small, large, tol)
    assert_same(losses(small), losses(large), FLOAT32)


@pytest.mark.parametrize('name,way', paired(SAME, WAYS))
def test_a_mean_over_samples_or_what_is_known_is_that_of_the_large_batch(name, way):
    assert_same_steps(SAME[name], way)


@pytest.mark.parametrize('name,way', paired(COUNTED, WAYS))
def test_a_mean_over_what_num_items_counts_is_that_of_the_large_batch(name, way):
    case = COUNTED[name]
    assert_same_steps(case, way, 1e-8, num_items=case.num_items)  # float32 losses times weights of 1/3


@pytest.mark.parametrize('name,way', paired(INEXACT, WAYS))
def test_a_loss_that_is_no_sum_of_its_parts_is_named_in_a_warning(name, way):
    assert_says_that_it_differs(INEXACT[name].learner, way, 'accumulation is not exact for this loss')


@pytest.mark.parametrize('name', PAIRS)
def test_with_gradient_cache_a_loss_of_pairs_is_that_of_the_large_batch(name):
    situation = PAIRS[name].learner
    cached = fit_situation(situation, LARGE, [GradientCache(micro_batch_size=8)])
    assert_equal_fits(cached, fit_large(situation))
