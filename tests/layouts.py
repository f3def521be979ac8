"The two ways to make one step of four micro-batches: a window of loader batches, and a loader batch that is split"
import pytest

each_layout = pytest.mark.parametrize('bs, settings', [
    (8, dict(accum_bs=32)),
    (32, dict(micro_batch_size=8))])
