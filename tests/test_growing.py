"A batch that grows on a loader of its final size: as many steps as on a small loader, and far fewer forward passes"
import pytest

from common import *
from fastxtend_accum.demo import Counts

N = 16_384  # samples in an epoch


def grown(bs, schedule=SchedCos):
    "Trains for two epochs with a batch that grows from 32 to 512, on a loader of `bs`"
    accum = GradientAccumulationSchedule(32, 512, finish=1., schedule=schedule)
    return fit(make_learner(bs, n=N, cbs=[Counts(), accum]), 2)


@pytest.mark.thin(3, 1)
@pytest.mark.parametrize('schedule', [SchedCos, SchedLin])
def test_a_large_loader_takes_as_many_steps_in_a_third_of_the_passes(schedule):
    small = grown(32, schedule).counts.n
    large = grown(512, schedule).counts.n
    assert small['forward passes'] == 2*N/32
    assert large['forward passes'] == large['optimizer steps']
    assert large['optimizer steps'] == pytest.approx(small['optimizer steps'], rel=.1)
    assert large['forward passes'] <= .35*small['forward passes']


@pytest.mark.thin(3, 1)
@pytest.mark.parametrize('bs', [32, 512])
def test_each_sample_is_in_one_step(bs):
    sizes = grown(bs).recorder.accum_bs
    assert sum(sizes) == 2*N
    assert sizes[0] == 32
    assert max(sizes) == 512
