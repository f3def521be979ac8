"The samples that check_accum keeps"
import pytest

from common import *
from fastxtend_accum.checking.samples import first_samples


def test_a_batch_that_cannot_be_sliced_is_an_error():
    with pytest.raises(ValueError, match='first dimension must index the samples'):
        first_samples([(torch.zeros(3, 4), torch.zeros(4))], 8)


def test_batches_that_differ_in_shape_leave_the_first_one_as_often_as_needed():
    batches = [(torch.zeros(8, length), torch.arange(8)) for length in (5, 7)]
    samples = first_samples(batches, 12)
    assert samples.rows == 16
    assert samples.data[1].tolist() == [*range(8), *range(8)]


def test_batches_without_samples_are_an_error():
    with pytest.raises(ValueError, match='needs samples'): first_samples([(torch.zeros(0, 4), torch.zeros(0))], 8)
