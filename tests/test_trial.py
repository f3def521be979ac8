"A short training of check_accum"
import pytest

from common import *
from fastxtend_accum.checking.trial import copy_learner, small_learner, small_sizes

SPLIT = dict(micro_batch_size=8)


@pytest.mark.parametrize('cb,window,bs', [
    (GradientAccumulation(128), 6, 3),
    (GradientAccumulation(32), 3, 3),
    (GradientAccumulation(8), 3, 6),
    (GradientAccumulation(128, **SPLIT), 12, 6),
    (GradientAccumulation(**SPLIT), 6, 6),
    (GradientCache(8), 6, 6),
    (GradientAccumulationSchedule(8, 128, start=5, finish=9), 6, 3),
    (GradientAccumulationSchedule(128, 32), 6, 3)])
def test_small_sizes_relate_to_each_other_as_those_of_the_user(cb, window, bs):
    assert small_sizes(make_learner(32, cbs=[cb]), 3) == (window, bs)


@pytest.mark.parametrize('remainder', ['step', 'drop', 'carry'])
def test_the_windows_of_an_epoch_have_its_samples(remainder):
    "Also of a schedule, which keeps one size"
    cb = GradientAccumulationSchedule(8, 32, remainder=remainder, start=3, finish=4)
    learn = make_learner(8, cbs=[cb])
    small = small_learner(learn, [learn.progress], n_windows=2, size=3)
    sizes = []
    class Notes(Callback):
        def before_step(self): sizes.append(self.learn.gradient_accumulation_schedule.window.losses.samples)
    small.fit(2, cbs=Notes())
    assert sizes == [6, 5, 6, 5]


def test_a_copy_can_be_in_float64():
    "With the same values"
    learn = make_learner(8)
    learn.model.float()
    before = weights(learn)
    copied = copy_learner(learn, learn.dls.loaders, double=True)
    assert before.dtype == torch.float32
    assert weights(copied).dtype == torch.float64
    assert_same(weights(copied), before.double())


def test_a_copy_shares_no_tensor():
    learn = fit(make_learner(8), 1)  # a fit leaves tensors with a graph
    learn.loss_grad = learn.model(data(4)[0]).sum()
    learn.sums = [learn.loss_grad*i for i in range(4)]
    copied = copy_learner(learn, learn.dls.loaders, double=True)
    assert copied.loss_grad == learn.loss_grad
    assert copied.sums == learn.sums
    assert copied.loss_grad.grad_fn is None
    assert copied.dls.train.dataset is learn.dls.train.dataset
    for copied_one, one in zip(copied.model.parameters(), learn.model.parameters(), strict=True):
        assert copied_one.data_ptr() != one.data_ptr()
