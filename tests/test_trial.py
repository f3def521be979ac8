"A short training of check_accum"
import pytest

from common import *
from fastxtend_accum.checking.samples import KeptLoader, equal_bounds, read_samples
from fastxtend_accum.checking.trial import WholeWindows, epoch_plans, whole_bounds


def whole_windows(bs, n, remainder):
    "Returns the inputs of the batches in two epochs that stand for windows of 12"
    kept = read_samples(make_learner(4, n=96).dls.train, n)
    plans = epoch_plans(GradientAccumulation(12, remainder=remainder), KeptLoader(kept, equal_bounds(n, bs), bs))
    loaders = [KeptLoader(kept, whole_bounds(plan, n), 12) for plan in plans]
    batches = []
    class Notes(Callback):
        run_valid = False
        def before_batch(self): batches.append(self.x)
    fit(make_learner(12, cbs=[WholeWindows(loaders, plans), Notes()]), 2)
    return batches


@pytest.mark.parametrize('bs,remainder,expected', [
    (3, 'step', [12, 12, 5, 12, 12, 5]),
    (3, 'drop', [12, 12, 12, 12]),
    (3, 'carry', [12, 12, 14, 12, 8]),
    (24, 'step', [12, 12, 5, 12, 12, 5])])
def test_whole_batches_are_the_windows(bs, remainder, expected):
    batches = whole_windows(bs, 29, remainder)
    assert list(map(len, batches)) == expected
    inputs = data(96)[0][:29]
    epoch = inputs[:24] if remainder == 'drop' else inputs
    assert_same(torch.cat(batches), torch.cat([epoch, epoch]))
