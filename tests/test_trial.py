"A short training of check_accum, and what it leaves"
import pytest

from common import *
from fastxtend_accum.checking.samples import read_samples
from fastxtend_accum.checking.trial import Sizes, n_samples, train, whole_loaders


@pytest.mark.parametrize('bs', [3, 6, 12, 24])
def test_what_is_carried_leaves_windows_of_one_size(bs):
    sizes = Sizes(window=12, part=3, bs=bs, is_split=False)
    n = n_samples(sizes, 2, drop_last=False, is_carried=True)
    kept = read_samples(make_learner(4, n=96).dls.train, n)
    first, second = whole_loaders(kept, 12, 'carry')
    assert {len(x) for x, _ in first} == {12}
    assert {len(x) for x, _ in second} == {12}
    assert first.n+second.n == 2*n


def test_a_trial_notes_rates_positions_and_logs():
    run = train(make_learner(32), seed=1)
    assert run.n_steps == 6
    assert {'weights', 'logged losses', 'train_loss', 'valid_loss', 'learning rates', 'positions'} <= run.left.keys()
    assert_same(run.left['positions'], torch.arange(6)/6, 1e-9)
