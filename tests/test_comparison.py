"Distances between what two trainings leave"
import pytest

from common import *
from fastxtend_accum.checking.comparison import distance, distances


@pytest.mark.parametrize('a,b,expected', [
    ([1., 2.], [1., 2.], 0),
    ([3., 4.], [0., 0.], .5),
    ([math.nan], [math.nan], 0),
    ([math.nan], [1.], math.inf),
    ([1.], [1., 1.], math.inf)])
def test_distance(a, b, expected):
    assert distance(torch.tensor(a), torch.tensor(b), torch.tensor(10.)) == expected


def test_weights_are_relative_to_how_far_they_moved():
    start = torch.tensor([100.])
    found = distances(dict(weights=start+1, rates=start+1), dict(weights=start+2, rates=start+2), start)
    assert found['weights'] == .5
    assert found['rates'] == pytest.approx(1/102)
