"The samples that check_accum keeps"
import pytest

from common import *
from fastxtend_accum.checking.samples import first_samples


def test_a_batch_that_cannot_be_sliced_is_an_error():
    with pytest.raises(ValueError, match='first dimension must index the samples'):
        first_samples([(torch.zeros(3, 4), torch.zeros(4))], 8)
