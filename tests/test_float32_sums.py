"Weights in bfloat16 and float16: their gradients are added up in float32 and rounded once a window"
from collections import Counter

import pytest
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from common import *
from fastxtend_accum.window.gradients import add_in_float32, average_gradients, half, params_in

class KeepGrads(Callback):
    "The gradients that the optimizer gets"
    order,run_valid = GradientClip.order+1,False
    def before_fit(self): self.grads = []
    def before_step(self): self.grads.append(flat(self.learn.model))

def flat(m): return torch.cat([p.grad.flatten().double() for p in m.parameters() if p.grad is not None])

class Times(nn.Module):
    "A weight whose gradient is the mean of the inputs"
    def __init__(self, dtype):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=dtype))
    def forward(self, x): return self.w*x

def mean_gradient(n, dtype, bs=1, **kwargs):
    "The mean gradient of `n` samples with a gradient of 1 each"
    ds = [(torch.ones(1).to(dtype), torch.zeros(1))]*n
    dls = DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds[:1], bs=1))
    learn = Learner(dls, Times(dtype), lambda pred, targ: pred.float().mean(), opt_func=SGD, cbs=[GradientAccumulation(n, **kwargs), KeepGrads()])
    return fit(learn, 1, 0.).keep_grads.grads[0].item()

@pytest.mark.parametrize('dtype, n', [(torch.bfloat16, 512), (torch.float16, 4096)], ids=str)
def test_gradients_of_1(dtype, n):
    "In bfloat16, 256 + 1 is 256, and in float16, 2048 + 1 is 2048"
    w,sums = nn.Parameter(torch.zeros(1, dtype=dtype)),{}
    for _ in range(n): w.sum().backward()
    assert w.grad.item() == n/2
    w.grad = None
    for _ in range(n):
        w.sum().backward()
        add_in_float32([w], sums)
    assert [(o.dtype, o.item()) for o in sums.values()] == [(torch.float32, n)]
    average_gradients([w], n, sums)
    assert w.grad.item() == 1 and w.grad.dtype == dtype

def test_512_micro_batches_of_1():
    for kwargs in dict(bs=1), dict(bs=8), dict(bs=512, micro_batch_size=1), dict(bs=64, micro_batch_size=1): assert mean_gradient(512, torch.bfloat16, **kwargs) == 1

def loss_func(pred, targ): return F.mse_loss(pred.float(), targ.float())

def half_learner(bs, cbs, dtype=torch.bfloat16, n=96, **kwargs):
    "All weights in `dtype`"
    return make_learner(bs, n=n, m=model().to(dtype), loss_func=loss_func, cbs=cbs, **kwargs)

def micro_batches(idxs, micro):
    "Those of a window: they begin at multiples of `micro`, and where an epoch does"
    starts = [i for i,o in enumerate(idxs) if i == 0 or o%micro == 0]
    return [idxs[i:j] for i,j in zip(starts, [*starts[1:], None])]

def by_hand(dtype, steps, micro, n=96, m=None, lr=.1):
    "A plain loop that adds up in float32: gradients and weights of each step"
    m,(x,y) = model().to(dtype) if m is None else m,data(n)
    x,y = x.to(dtype),y.to(dtype)
    opt,res = torch.optim.SGD(m.parameters(), lr),[]
    for idxs,_ in steps:
        parts = micro_batches(idxs, micro)
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
@given(n=st.integers(2, 60), micro=st.integers(1, 9), k=st.integers(1, 6), dtype=st.sampled_from(half), remainder=st.sampled_from(['step','carry']))
def test_any_window_is_bit_for_bit_a_loop_that_adds_up_in_float32(n, micro, k, dtype, remainder):
    "Short micro-batches, incomplete windows, windows that go on in the next epoch"
    if n < k*micro: return
    learn = fit(half_learner(micro, [GradientAccumulation(k*micro, remainder=remainder), KeepGrads()], dtype, n=n), 2)
    expected,w = by_hand(dtype, windows(n, micro, k*micro, remainder, 2), micro, n)
    assert not torch.equal(w, weights(model().to(dtype)))
    for a,b in zip(learn.keep_grads.grads, expected, strict=True): assert_same(a, b)
    assert_same(weights(learn), w)

@pytest.mark.thin(3)
@pytest.mark.parametrize('dtype', half, ids=str)
def test_the_error_is_that_of_one_batch(dtype):
    "Of 64 samples, at once, 8 and 1 at a time: medians over 20 networks against float64"
    def error(bs, seed):
        torch.manual_seed(seed)
        m = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1)).to(dtype)
        x,y = (o.to(dtype) for o in data(64, seed))
        truth = deepcopy(m).double()
        F.mse_loss(truth(x.double()), y.double()).backward()
        dls = DataLoaders(DataLoader(list(zip(x, y)), bs=bs), DataLoader([(x[0], y[0])], bs=1))
        learn = fit(Learner(dls, m, loss_func, opt_func=SGD, cbs=[GradientAccumulation(64), KeepGrads()]), 1, 0.)
        return float((learn.keep_grads.grads[0]-flat(truth)).norm()/flat(truth).norm())
    at_once,*others = (np.median([error(bs, seed) for seed in range(20)]) for bs in (64, 8, 1))
    assert all(.1*torch.finfo(dtype).eps < o < 1.2*at_once for o in others)  # PyTorch rounds the gradient of each micro-batch

def test_some_weights_in_float32():
    "A head in float32 on a body in bfloat16: each in its own way"
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body,self.head = nn.Linear(5, 8).bfloat16(),nn.Linear(8, 1)
        def forward(self, x): return self.head(self.body(x.bfloat16()).float().tanh())
    learn = fit(make_learner(8, m=Mixed(), loss_func=loss_func, cbs=[GradientAccumulation(32), KeepGrads()], opt_func=SGD), 2)
    expected,w = by_hand(torch.bfloat16, windows(96, 8, 32, 'step', 2), 8, m=Mixed())
    sizes = [p.numel() for p in learn.model.parameters()]
    for a,b in zip(learn.keep_grads.grads, expected, strict=True):
        for i,(o,p) in enumerate(zip(a.split(sizes), b.split(sizes))): assert_same(o, p, 0. if i < 2 else 1e-7)

# Where nothing changes

class Float32Adds(TorchDispatchMode):
    "Counts float32 tensors as large as the weights that are made, and additions to them"
    def __init__(self, numel): super().__init__(); self.numel,self.made,self.added = numel,0,0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        res = func(*args, **(kwargs or {}))
        if isinstance(res, torch.Tensor) and res.dtype == torch.float32 and res.numel() == self.numel:
            if func.overloadpacket is torch.ops.aten.add_: self.added += 1
            elif func.overloadpacket is torch.ops.aten._to_copy: self.made += 1
        return res

class Weights7(nn.Module):
    "Seven weights, a number that nothing else here has"
    def __init__(self, dtype):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(7, dtype=dtype))
    def forward(self, x): return x@self.w[:5, None]+self.w[5:].sum()

def counted(dtype, bs, accum_bs):
    learn = make_learner(bs, m=Weights7(dtype), loss_func=loss_func, cbs=GradientAccumulation(accum_bs))
    with Float32Adds(7) as counts: fit(learn, 1)
    return counts.made,counts.added

@pytest.mark.parametrize('dtype', half, ids=str)
def test_operations_of_a_window(dtype):
    "One float32 buffer a window of four micro-batches, and three additions; none in windows of one"
    assert counted(dtype, 8, 32) == (3, 9)
    assert counted(dtype, 32, 32) == (0, 0)
    assert counted(torch.float32, 8, 32)[0] == 0

@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=str)
def test_other_weights_have_no_sums(dtype):
    seen = []
    see = Callback(after_batch=lambda self: seen.append(self.learn.gradient_accumulation.window.sums))
    fit(make_learner(8, m=model().to(dtype), loss_func=loss_func, cbs=[GradientAccumulation(32), see]), 1)
    assert len(seen) > 3 and set(seen) == {None}

def test_a_window_of_one_micro_batch_is_no_accumulation():
    for kwargs in {}, dict(n=100):
        a,b = fit(half_learner(32, None, **kwargs), 2),fit(half_learner(32, GradientAccumulation(32), **kwargs), 2)
        assert_same(weights(a), weights(b))

# With the other callbacks, and through faults

def test_gradient_clip_acts_on_the_mean():
    learn = fit(half_learner(8, [GradientAccumulation(32), GradientClip(.01), KeepGrads()]), 1)
    assert [o.norm().item() for o in learn.keep_grads.grads] == pytest.approx([.01]*3, rel=.02)

class Strike(Callback):
    "Raises `exc` at the `nth` time that `event` comes in training"
    run_valid = False
    def __init__(self, exc, event, nth, order):
        self.exc,self.nth,self.order,self.n = exc,nth,order,0
        setattr(self, event, self.strike)
    def strike(self):
        self.n += 1
        if self.n == self.nth: raise self.exc

@pytest.mark.thin(7)
@pytest.mark.parametrize('order', [-5, 7])
@pytest.mark.parametrize('event', ['before_batch','after_pred','after_loss','before_backward','after_backward'])
@pytest.mark.parametrize('exc', [CancelBatchException, CancelTrainException, CancelEpochException, KeyboardInterrupt])
def test_nothing_of_a_lost_window_stays(exc, event, order):
    "The fit after a fault in the third micro-batch is as if there had been none"
    learn = half_learner(8, GradientAccumulation(32))
    try: fit(learn, 1, cbs=Strike(exc, event, 3, order))
    except KeyboardInterrupt: pass
    learn.model.load_state_dict(model().bfloat16().state_dict())
    fit(learn, 1, reset_opt=True)
    assert learn.gradient_accumulation.window.sums is None
    assert_same(weights(learn), by_hand(torch.bfloat16, windows(96, 8, 32, 'step', 1), 8)[1])

@pytest.mark.parametrize('event, first', [('after_loss', 0), ('after_backward', 24)])
def test_a_cancelled_micro_batch(event, first):
    "Before its backward pass it is left out; after it, the window with its sums is gone"
    learn = fit(half_learner(8, [GradientAccumulation(32), Strike(CancelBatchException, event, 3, -5)]), 1)
    idxs = [i for i in range(96) if i//8 != 2] if not first else list(range(first, 96))
    steps = [(idxs[i:i+32], 0) for i in range(0, len(idxs), 32)]
    assert_same(weights(learn), by_hand(torch.bfloat16, steps, 8)[1])

def test_skip_nonfinite():
    "The second window has an infinity in its first micro-batch"
    class Infinite(Callback):
        run_valid = False
        def before_backward(self):
            if self.train_iter == 4: self.learn.loss_grad = self.learn.loss_grad*math.inf
    learn = half_learner(8, [GradientAccumulation(32, skip_nonfinite=True), Infinite()])
    with pytest.warns(UserWarning, match='skipped a step: its gradient has NaN or infinity. Later ones .* n_skipped counts them'): fit(learn, 1)
    assert_same(weights(learn), by_hand(torch.bfloat16, [(list(range(i, i+32)), 0) for i in (0, 64)], 8)[1])

def test_an_interrupt_in_mid_window_leaves_no_sums():
    learn,seen = half_learner(8, GradientAccumulation(32)),[]
    look = Callback(before_batch=lambda self: seen.append(len(self.gradient_accumulation.window.sums or [])))
    with pytest.raises(KeyboardInterrupt): fit(learn, 1, cbs=[look, Strike(KeyboardInterrupt, 'before_batch', 3, 99)])
    assert seen[-1] == 4 and learn.gradient_accumulation.window.sums is None and learn.gradient_accumulation.now is None

def test_scaled_losses():
    "A GradScaler and float32 weights beside bfloat16 ones: what it unscales is the rounded mean"
    class Mixed(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            torch.manual_seed(0)
            self.body,self.head = nn.Linear(5, 8).to(dtype),nn.Linear(8, 1)
        def forward(self, x): return self.head(F.linear(x, self.body.weight.float(), self.body.bias.float()).tanh())
    def run(dtype): return fit(make_learner(8, m=Mixed(dtype), loss_func=MSELossFlat(), cbs=[GradientAccumulation(32), CpuMixedPrecision('fp16', init_scale=2.**10)]), 1)
    a,b = run(torch.float32),run(torch.bfloat16)
    assert b.gradient_accumulation.opt_steps == 3
    assert_same(weights(a), torch.cat([p.detach().flatten().float() for p in b.model.parameters()]), .01)

def test_sparse_gradients():
    m = nn.Embedding(10, 2, sparse=True).bfloat16()
    with torch.no_grad(): m.weight.zero_()
    opt,sums = SGD(m.parameters(), lr=.1),{}
    for _ in range(512):
        m(tensor([3, 3, 7])).sum().backward()
        add_in_float32(params_in(opt), sums)
    average_gradients(params_in(opt), 512, sums)
    assert m.weight.grad.to_dense()[[3, 7]].tolist() == [[2., 2.], [1., 1.]]

def test_gradients_that_come_in_some_micro_batches_only():
    "A weight that the last micro-batch does not use keeps the gradient of the others"
    v,w = (nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)) for _ in range(2))
    opt,sums = SGD([v, w], lr=.1),{}
    for i in range(4):
        (v if i%2 else v+2*w).sum().backward()
        add_in_float32(params_in(opt), sums)
        assert v.grad is None and w.grad is None
    average_gradients(params_in(opt), 4, sums)
    assert (v.grad.item(), w.grad.item()) == (1., 1.) and not sums
