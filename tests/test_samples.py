"The samples that check_accum keeps"
import pytest

from common import *
from fastxtend_accum.checking.samples import read_samples


def test_a_batch_that_cannot_be_sliced_is_an_error():
    with pytest.raises(ValueError, match='first dimension must index the samples'):
        read_samples([(torch.zeros(3, 4), torch.zeros(4))], 8)
