"The adaptive batch: follows what was measured, in exact windows"
import pytest
from hypothesis import given, strategies as st

from common import *
from fastxtend_accum.adaptive import adapted_bs

def adaptive(*args, beta=.5, cbs=(), n=128, seed=0, opt_func=SGD, **kwargs):
    "A Learner whose batch moves after two windows"
    cb = AdaptiveGradientAccumulation(*args, **dict(min_windows=2, remainder='carry') | kwargs)
    return make_learner(8, n=n, cbs=[cb, GradientNoiseScale(beta), *cbs], opt_func=opt_func, seed=seed)

class Say(Callback):
    "Puts a noise scale in the place of what was measured"
    order = GradientAccumulation.order-.2
    def __init__(self, scales): self.scales = scales
    def after_step(self):
        cb = self.learn.gradient_noise_scale
        step = self.learn.adaptive_gradient_accumulation.opt_steps
        cb.averages.noise,cb.averages.signal,cb.averages.beta = self.scales[min(step, len(self.scales)-1)],1.,0.

@draws
@given(bs=st.integers(1, 20), wanted=st.floats(0, 1e4) | st.just(math.inf), micro=st.integers(1, 33), lo=st.integers(1, 20), hi=st.integers(1, 20),
       hysteresis=st.floats(.01, 1), shrink=st.booleans())
def test_any_size(bs, wanted, micro, lo, hi, hysteresis, shrink):
    lo,hi = sorted((lo, hi))
    bs = min(max(bs, lo), hi)*micro
    new = adapted_bs(bs, wanted, micro, lo*micro, hi*micro, hysteresis, shrink)
    assert new % micro == 0 and lo*micro <= new <= hi*micro
    if not shrink or wanted == math.inf: assert new >= bs
    if new != bs: assert new in (lo*micro, hi*micro, 2*bs) or wanted < bs/2 <= new < bs/2+micro or new >= wanted > new-micro
    assert bs/2 <= new <= bs*2
    if bs <= wanted <= bs*(1+hysteresis): assert new == bs
    if wanted < math.inf and wanted > bs*(1+hysteresis): assert new >= min(wanted, hi*micro, 2*bs)

def test_follows_what_is_measured():
    "It waits for two windows after each change"
    said = [10,10,30,10,34,70,math.inf,math.inf,500,500,20,20,20,20]
    assert fit(adaptive(16, 64, cbs=[Say(said)]), 8).recorder.accum_bs == [16]*3 + [32]*3 + [64]*13
    assert fit(adaptive(16, 64, shrink=True, cbs=[Say(said)]), 8).recorder.accum_bs == [16]*3 + [32]*3 + [64]*5 + [32]*2 + [24]*20

def test_eta():
    for eta,size in (1., 24), (.5, 80), (2., 16):
        learn = fit(adaptive(16, 128, eta=eta, cbs=[Say([20])], hysteresis=.01), 4)
        assert learn.recorder.accum_bs[-1] == size and learn.recorder.accum_bs[:2] == [16,16]

def test_waits_for_enough_windows():
    for n in 1,3,5: assert fit(adaptive(16, 128, min_windows=n, cbs=[Say([100])]), 4).recorder.accum_bs[:n+1] == [16]*n+[32]

def test_windows_are_exact():
    "Whatever sizes it came to, in plain PyTorch"
    learn = fit(adaptive(16, 96, scale=dict(lr=sqrt_scale)), 4)
    sizes,lrs = learn.recorder.accum_bs,learn.recorder.lrs
    assert len(set(sizes)) > 2 and sizes == sorted(sizes)
    assert_same(lrs, [.1*(o/16)**.5 for o in sizes], 1e-12)
    m,(x,y),i = model(),data(128),0
    opt = torch.optim.SGD(m.parameters(), lr=.1)
    for size,lr in zip(sizes, lrs):
        idxs,i = [o % 128 for o in range(i, i+size)],i+size
        opt.param_groups[0]['lr'] = lr
        opt.zero_grad()
        ((m(x[idxs])-y[idxs])**2).mean().backward()
        opt.step()
    assert_moved(learn)
    assert_same(weights(learn), weights(m), 1e-12)

def test_resumed_equals_uninterrupted(tmp_path):
    "The state travels beside the model and the optimizer"
    class Stop(Callback):
        order = 8
        def before_epoch(self):
            if self.epoch == 2: raise CancelFitException
    def learner():
        learn = adaptive(16, 96, beta=.9, remainder='step', opt_func=Adam)
        learn.path = tmp_path
        return learn
    whole,half,rest,fresh = (learner() for _ in range(4))
    fit(whole, 5, lr=.01), fit(half, 5, lr=.01, cbs=Stop())
    half.save('half')
    torch.save(half.adaptive_gradient_accumulation.state_dict(), tmp_path/'adaptive.pth')
    for learn in rest,fresh: learn.create_opt(); learn.load('half')
    rest.adaptive_gradient_accumulation.load_state_dict(torch.load(tmp_path/'adaptive.pth'))
    with rest.no_bar(): rest.lr_find(num_it=5, show_plot=False)  # uses nothing of it up
    for learn in rest,fresh: fit(learn, 5, lr=.01, start_epoch=2)
    assert_same(weights(rest), weights(whole))
    assert half.recorder.accum_bs+rest.recorder.accum_bs == whole.recorder.accum_bs and half.recorder.accum_bs[-1] != 16
    assert half.recorder.noise_scale+rest.recorder.noise_scale == whole.recorder.noise_scale
    assert fresh.recorder.accum_bs != rest.recorder.accum_bs  # without the state it is another fit
    assert fit(rest, 1).recorder.accum_bs[0] == 16            # a further fit starts over

def test_lr_find_keeps_to_the_smallest_size():
    learn = adaptive(16, 96)
    with learn.no_bar(): learn.lr_find(num_it=20, show_plot=False)
    assert set(learn.recorder.accum_bs) == {16} and len(learn.recorder.lrs) == 20

@pytest.mark.parametrize('args, kwargs, words', [
    ((64, 32), {}, 'more than max_accum_bs'), ((0, 32), {}, 'min_accum_bs'), ((16, 32.5), {}, 'max_accum_bs'), ((16, 32), dict(eta=0), 'eta'),
    ((16, 32), dict(eta='x'), 'eta'), ((16, 32), dict(hysteresis=math.inf), 'hysteresis'), ((16, 32), dict(min_windows=0), 'min_windows'),
    ((16, 36), {}, 'max_accum_bs=36 is not a multiple'), ((8, 32), {}, 'a single micro-batch'), ((16, 32), dict(scale=dict(x=sqrt_scale)), "'x'")])
def test_bad_arguments(args, kwargs, words):
    with pytest.raises((TypeError, ValueError), match=words): fit(adaptive(*args, **kwargs))

def test_needs_somebody_who_measures():
    with pytest.raises(ValueError, match=r'add GradientNoiseScale\(\)'): fit(make_learner(8, cbs=AdaptiveGradientAccumulation(16, 64)))

def test_a_loaded_size_must_fit_the_micro_batch():
    learn = adaptive(16, 64)
    learn.adaptive_gradient_accumulation.load_state_dict(dict(accum_bs=20, noise=learn.gradient_noise_scale.state_dict()))
    with pytest.raises(ValueError, match='accum_bs=20 is not a multiple'): fit(learn)
