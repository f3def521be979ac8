"A fit with a loss as other people write it is that of the large batch, or a warning says that it is another one"
from situation_losses import *


def unevenly_ignored():
    "Returns labels of which most of the first ones are ignored"
    labels = LABELS.clone()
    labels[:50:2] = -100
    return labels


TEXTS = torch.randint(1, 4, (N, 3), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.arange(N)%3+1

SAME = dict(
    two_tasks=Case(in_two_tasks, LABELS, TARGETS, make_model=TwoHeads),
    ctc=Case(ctc, TEXTS, LENGTHS, make_model=reader))
POSITIVES = Case(over_positives)
PAIRS = Case(ranking)
INEXACT = dict(
    over_positives=POSITIVES,
    ranking=PAIRS,
    tasks_over_other_labels=Case(in_two_tasks, unevenly_ignored(), TARGETS, make_model=TwoHeads),
    worst=Case(worst))


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


@pytest.mark.parametrize('way', WAYS)
def test_a_mean_over_what_num_items_counts_is_that_of_the_large_batch(way):
    assert_same_steps(POSITIVES, way, 1e-8, num_items=positives)  # float32 losses times weights of 1/3


@pytest.mark.parametrize('name,way', paired(INEXACT, WAYS))
def test_a_loss_that_is_no_sum_of_its_parts_is_named_in_a_warning(name, way):
    assert_says_that_it_differs(INEXACT[name].learner, way, 'accumulation is not exact for this loss')


def test_with_gradient_cache_a_loss_of_pairs_is_that_of_the_large_batch():
    cached = fit_situation(PAIRS.learner, LARGE, [GradientCache(micro_batch_size=8)])
    assert_equal_fits(cached, fit_large(PAIRS.learner))
