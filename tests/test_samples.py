"The samples that check_accum keeps"
import pytest

from common import *
from fastxtend_accum.checking.samples import KeptLoader, equal_bounds, read_samples


@pytest.mark.parametrize('bs', [1, 3, 4, 7])
def test_batches_of_any_size_have_the_same_samples(bs):
    loader = make_learner(4, n=20).dls.train
    kept = read_samples(loader, 10)
    inputs = torch.cat([x for x, _ in KeptLoader(kept, equal_bounds(10, bs), bs)])
    assert_same(inputs, data(20)[0][:10])


def test_a_batch_that_cannot_be_sliced_is_an_error():
    with pytest.raises(ValueError, match='first dimension must be the samples'):
        read_samples([(torch.zeros(3, 4), torch.zeros(4))], 8)
