"Mixed precision, and weights in bfloat16 or float16, whose gradients are summed in float32"
from unittest.mock import Mock

import pytest
from hypothesis import given, strategies as st

from common import *
from fastxtend_accum.windows.gradients import add_in_float32, average_gradients, half, params_in

# Mixed precision, on the CPU

def scaled(mode='fp16'): return CpuMixedPrecision(mode, init_scale=2.**10)

def mixed(bs, *cbs, n_epoch=2, lr=.1, **kwargs):
    return fit(make_learner(bs, m=model().float(), loss_func=MSELossFlat(), cbs=[*cbs], **kwargs), n_epoch, lr)

@pytest.mark.parametrize('mode', ['fp16','bf16'])
def test_close_to_the_large_batch(mode):
    "Both round their products to half precision: as close to each other as each is to float32"
    exact,big,small = mixed(32),mixed(32, scaled(mode)),mixed(8, scaled(mode), GradientAccumulation(32))
    rounding = (weights(big)-weights(exact)).abs().max()
    assert 0 < (weights(small)-weights(big)).abs().max() < 2*rounding < 0.02

def test_the_scaler_acts_once_a_window():
    calls = {}
    class Count(Callback):
        order = MixedPrecision.order+1
        def before_fit(self):
            for o in 'unscale_','_maybe_opt_step','update': calls[o] = Mock(wraps=getattr(self.learn.scaler, o))
            vars(self.learn.scaler).update(calls)
    mixed(8, scaled(), GradientAccumulation(32), Count(), n=88)
    assert [o.call_count for o in calls.values()] == [6]*3

class Overflow(Callback):
    "The losses of these training batches overflow"
    order,run_valid = MixedPrecision.order+1,False
    def __init__(self, *batches): self.batches,self.n = batches,-1
    def before_backward(self):
        self.n += 1
        if self.n in self.batches: self.learn.loss_grad = self.learn.loss_grad*math.inf

@pytest.mark.parametrize('struck', [(0,), (1, 2), (0, 1, 2), range(6)])
def test_overflows_are_logged_as_in_the_large_batch(struck):
    "A whole epoch of them, too, which `SaveModelCallback` monitors"
    def run(bs, *cbs): return mixed(bs, scaled(), SaveModelCallback(monitor='train_loss'), *cbs, lr=.01)
    big,small = run(32, Overflow(*struck)),run(8, GradientAccumulation(32), Overflow(*[4*o+1 for o in struck]))
    assert small.gradient_accumulation.opt_steps == 6-len(struck) and small.gradient_accumulation.n_skipped == 0
    assert len(losses(small)) == len(losses(big)) == 6 and small.recorder.accum_bs == [32]*6
    assert_same(losses(small), losses(big), 1e-3)  # float16
    assert_same(floats(small.recorder.values), floats(big.recorder.values), 1e-3)
    assert_same(weights(small), weights(big), 1e-4)
    assert ((weights(big)-weights(model().float())).abs().max() > 1e-3) == (len(struck) < 6)

def test_skip_nonfinite_leaves_an_overflow_to_the_scaler_and_counts_it():
    scale = []
    see = Callback(after_train=lambda self: scale.append(self.scaler.get_scale()))
    with pytest.warns(UserWarning, match='NaN or infinity'):
        learn = mixed(8, Overflow(5), GradientAccumulation(32, skip_nonfinite=True), scaled(), see, n_epoch=1)
    assert [learn.gradient_accumulation.n_skipped, learn.gradient_accumulation.opt_steps, *scale] == [1, 2, 2.**9]

# Weights in half precision: a plain loop adds up in float32

class KeepGrads(Callback):
    "The gradients that the optimizer gets"
    order,run_valid = GradientClip.order+1,False
    def before_fit(self): self.grads = []
    def before_step(self): self.grads.append(flat(self.learn.model))

def flat(m): return torch.cat([p.grad.flatten().double() for p in m.parameters() if p.grad is not None])

def loss_func(pred, targ): return F.mse_loss(pred.float(), targ.float())

def half_learner(bs, *cbs, dtype=torch.bfloat16, n=96):
    return make_learner(bs, n=n, m=model().to(dtype), loss_func=loss_func, cbs=[*cbs])

def by_hand(steps, micro, dtype=torch.bfloat16, n=96, m=None):
    "Gradients and weights of each step; micro-batches begin at multiples of `micro`, and where an epoch does"
    m,(x,y) = model().to(dtype) if m is None else m,data(n)
    x,y = x.to(dtype),y.to(dtype)
    opt,res = sgd(m.parameters()),[]
    for idxs,_ in steps:
        starts = [i for i,o in enumerate(idxs) if i == 0 or o%micro == 0]
        parts = [idxs[i:j] for i,j in zip(starts, [*starts[1:], None])]
        unit = 2.**math.floor(math.log2(len(parts[0]))) if len(parts) > 1 else len(idxs)
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in m.parameters()]
        for o in parts:
            opt.zero_grad()
            (loss_func(m(x[o]), y[o])*(len(o)/unit)).backward()
            for s,p in zip(sums, m.parameters()): s += p.grad
        for s,p in zip(sums, m.parameters()): p.grad = (s/(len(idxs)/unit)).to(p.dtype)
        res.append(flat(m))
        opt.step()
    return res,weights(m)

@draws
@given(n=st.integers(2, 40), micro=st.integers(1, 9), k=st.integers(1, 6), dtype=st.sampled_from(half),
       remainder=st.sampled_from(['step','carry']))
def test_any_window_is_bit_for_bit_a_loop_that_adds_up_in_float32(n, micro, k, dtype, remainder):
    "Short loader batches, incomplete windows, windows that go on in the next epoch"
    if n < k*micro: return
    cb = GradientAccumulation(k*micro, remainder=remainder)
    learn = fit(half_learner(micro, cb, KeepGrads(), dtype=dtype, n=n), 2)
    expected,w = by_hand(windows(n, micro, k*micro, remainder, 2), micro, dtype, n)
    assert not torch.equal(w, weights(model().to(dtype)))
    for a,b in zip(learn.keep_grads.grads, expected, strict=True): assert_same(a, b)
    assert_same(weights(learn), w)

@pytest.mark.parametrize('bs, micro', [(1, None), (8, None), (512, 1)])
def test_512_gradients_of_1(bs, micro):
    "In bfloat16, 256 + 1 is 256"
    m = nn.Linear(1, 1, bias=False).bfloat16()
    for _ in range(512): m(torch.ones(1, 1).bfloat16()).sum().backward()
    assert m.weight.grad.item() == 256
    dls = DataLoaders(*[DataLoader([(torch.ones(1).bfloat16(), torch.zeros(1))]*512, bs=bs)]*2)
    cbs = [GradientAccumulation(512, micro_batch_size=micro), KeepGrads()]
    learn = fit(Learner(dls, m, lambda pred, targ: pred.float().mean(), opt_func=SGD, cbs=cbs), 1, 0.)
    assert learn.keep_grads.grads[0].item() == 1

@pytest.mark.thin(3)
@pytest.mark.parametrize('dtype', half, ids=str)
def test_the_error_is_that_of_one_batch(dtype):
    "Of 64 samples, at once, 8 and 1 at a time: medians over 12 networks"
    def error(bs, seed):
        torch.manual_seed(seed)
        m,(x,y) = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1)).to(dtype),data(64, seed)
        x,y,truth = x.to(dtype),y.to(dtype),deepcopy(m).double()
        F.mse_loss(truth(x.double()), y.double()).backward()
        dls = DataLoaders(DataLoader([*zip(x, y)], bs=bs), DataLoader([(x[0], y[0])], bs=1))
        learn = fit(Learner(dls, m, loss_func, opt_func=SGD, cbs=[GradientAccumulation(64), KeepGrads()]), 1, 0.)
        return float((learn.keep_grads.grads[0]-flat(truth)).norm()/flat(truth).norm())
    at_once,*others = (np.median([error(bs, seed) for seed in range(12)]) for bs in (64, 8, 1))
    assert all(.1*torch.finfo(dtype).eps < o < 1.2*at_once for o in others)

class Mixed(nn.Module):
    "A head in float32 on a body in bfloat16"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body,self.head = nn.Linear(5, 8).bfloat16(),nn.Linear(8, 1)
    def forward(self, x): return self.head(self.body(x.bfloat16()).float().tanh())

def test_some_weights_in_float32():
    learn = fit(make_learner(8, m=Mixed(), loss_func=loss_func, cbs=[GradientAccumulation(32), KeepGrads()]), 2)
    expected,_ = by_hand(windows(96, 8, 32, 'step', 2), 8, m=Mixed())
    for a,b in zip(learn.keep_grads.grads, expected, strict=True):
        assert_same(a[:48], b[:48])
        assert_same(a[48:], b[48:], 1e-7)

class Fault(Fault): run_valid = False

@pytest.mark.thin(7)
@pytest.mark.parametrize('order', [-5, 7])
@pytest.mark.parametrize('event', EVENTS[3:8])
@pytest.mark.parametrize('exc', [CancelBatchException, CancelTrainException, CancelEpochException, KeyboardInterrupt])
def test_nothing_of_a_lost_window_stays(exc, event, order):
    "The fit after a fault in the third batch"
    learn = half_learner(8, GradientAccumulation(32))
    try: fit(learn, 1, cbs=Fault(exc, event, 3, order))
    except KeyboardInterrupt: assert learn.gradient_accumulation.window.float32_grads is None
    learn.model.load_state_dict(model().bfloat16().state_dict())
    fit(learn, 1, reset_opt=True)
    assert_same(weights(learn), by_hand(windows(96, 8, 32, 'step', 1), 8)[1])

@pytest.mark.parametrize('cb, left_out', [
    (lambda: Fault(CancelBatchException, 'after_loss', 3, -5), range(16, 24)),
    (lambda: Fault(CancelBatchException, 'after_backward', 3, -5), ()), (lambda: Overflow(4), range(32, 64))])
@pytest.mark.filterwarnings('ignore:skipped a step')
def test_what_is_left_out(cb, left_out):
    "A loader batch that is cancelled before its backward pass, but not after it; a window with an infinity"
    learn = fit(half_learner(8, GradientAccumulation(32, skip_nonfinite=True), cb()), 1)
    kept = [i for i in range(96) if i not in left_out]
    assert_same(weights(learn), by_hand([(kept[i:i+32], 0) for i in range(0, len(kept), 32)], 8)[1])

def test_gradients_that_are_sparse_or_come_in_some_batches_only():
    "A weight that the last micro-batch does not use keeps the gradient of the others"
    m,w = nn.Embedding(10, 2, sparse=True).bfloat16(),nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    opt,sums = SGD([m.weight, w], lr=.1),{}
    for i in range(512):
        loss = m(tensor([3, 3, 7])).sum()
        (loss if i%2 else loss+2*w).backward()
        add_in_float32(params_in(opt), sums)
        assert m.weight.grad is None and w.grad is None
    average_gradients(params_in(opt), 512, sums)
    assert m.weight.grad.to_dense()[[3, 7]].tolist() == [[2., 2.], [1., 1.]] and w.grad.item() == 1. and not sums
