"A short training of check_accum, and what it leaves"
import pytest

from common import *
from fastxtend_accum.checking.samples import KeptLoader, equal_bounds, read_samples
from fastxtend_accum.checking.trial import WholeWindows, copy_learner, epoch_plans, train, whole_loader


def whole_windows(bs, n, remainder):
    "Returns the sizes of the batches in two epochs that stand for windows of 12"
    kept = read_samples(make_learner(4, n=96).dls.train, n)
    loader = KeptLoader(kept, equal_bounds(n, bs), bs)
    plans = epoch_plans(GradientAccumulation(12, remainder=remainder), loader)
    loaders = [whole_loader(kept, plan) for plan in plans]
    sizes = []
    class Notes(Callback):
        run_valid = False
        def before_batch(self): sizes.append(len(self.x))
    fit(make_learner(12, cbs=[WholeWindows(loaders, plans), Notes()]), 2)
    return sizes


@pytest.mark.parametrize('bs,remainder,expected', [
    (3, 'step', [12, 12, 5, 12, 12, 5]),
    (3, 'drop', [12, 12, 12, 12]),
    (3, 'carry', [12, 12, 14, 12, 8]),
    (24, 'step', [12, 12, 5, 12, 12, 5])])
def test_whole_batches_are_the_windows(bs, remainder, expected):
    assert whole_windows(bs, 29, remainder) == expected


def test_a_trial_notes_rates_positions_and_logs():
    left = train(make_learner(32), seed=1)
    assert {'weights', 'logged losses', 'train_loss', 'valid_loss', 'learning rates'} <= left.keys()
    assert_same(left['positions'], torch.arange(6)/6, 1e-9)


def test_a_copy_shares_no_tensor():
    learn = fit(make_learner(8, opt_func=Adam), 1)
    copied = copy_learner(learn, [])
    mine = {p.data_ptr() for p in learn.model.parameters()}
    others = {p.data_ptr() for p in copied.model.parameters()}
    assert mine and mine.isdisjoint(others)
    before = weights(learn)
    copied.fit(1, .1)
    assert_same(weights(learn), before)
    assert_apart(weights(copied), before)
