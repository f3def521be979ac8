"Mixed precision, on the CPU: fp16 with a GradScaler, and bf16"
from collections import Counter

import pytest

from common import *

class Count(Callback):
    "How often the scaler unscales, steps and updates"
    order = MixedPrecision.order+1
    def before_fit(self):
        self.calls = Counter()
        for name in 'unscale_','_maybe_opt_step','update':
            def counted(*args, _f=getattr(self.learn.scaler, name), _name=name, **kwargs): self.calls[_name] += 1; return _f(*args, **kwargs)
            setattr(self.learn.scaler, name, counted)

class Overflow(Callback):
    "The sixth micro-batch overflows"
    order = MixedPrecision.order+1
    def before_backward(self):
        if self.training and self.train_iter == 5: self.learn.loss_grad = self.learn.loss_grad*float('inf')

def learner(bs, cbs, **kwargs): return make_learner(bs, m=model().float(), loss_func=MSELossFlat(), cbs=cbs, **kwargs)

@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_close_to_the_large_batch(mode):
    "Both round their products to half precision: as close to each other as each is to float32"
    exact = fit(learner(32, None), 2)
    big = fit(learner(32, CpuMixedPrecision(mode, init_scale=2.**10)), 2)
    small = fit(learner(8, [CpuMixedPrecision(mode, init_scale=2.**10), GradientAccumulation(32)]), 2)
    rounding = (weights(big)-weights(exact)).abs().max()
    assert 0 < (weights(small)-weights(big)).abs().max() < 2*rounding < 0.02
    assert len(losses(small)) == len(losses(big)) == 6

def test_the_scaler_acts_once_a_window():
    learn = fit(learner(8, [CpuMixedPrecision('fp16', init_scale=2.**10), GradientAccumulation(32), Count()], n=88), 2)
    assert dict(learn.count.calls) == dict.fromkeys(['unscale_','_maybe_opt_step','update'], 6)

def test_an_overflow_drops_its_window_and_nothing_else():
    def run(*cbs): return fit(learner(8, [*cbs, GradientAccumulation(32), CpuMixedPrecision('fp16', init_scale=2.**10)]), 1)
    plain,struck = run(),run(Overflow())
    assert plain.gradient_accumulation.opt_steps == 3
    assert struck.gradient_accumulation.opt_steps == 2 and len(losses(struck)) == 3  # its loss is logged, as fastai does
    assert not weights(struck).isnan().any()
    steps = [(list(range(i, i+32)), 0) for i in (0, 64)]
    expected,_ = reference(steps, 96, sgd)
    assert_same(weights(struck).double(), expected, 0.01)

def test_skip_nonfinite_leaves_an_overflow_to_the_scaler_and_counts_it():
    learn = learner(8, [Overflow(), GradientAccumulation(32, skip_nonfinite=True), CpuMixedPrecision('fp16', init_scale=2.**10)])
    scale = []
    learn.add_cb(Callback(after_train=lambda self: scale.append(self.scaler.get_scale())))
    with pytest.warns(UserWarning, match='NaN or infinity'): fit(learn, 1)
    assert learn.gradient_accumulation.n_skipped == 1 and learn.gradient_accumulation.opt_steps == 2 and scale == [2.**9]
