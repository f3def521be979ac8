"The gradient noise scale, against per-sample gradients that know nothing of it"
import pickle
import pytest, wandb
from fastai.callback.tensorboard import TensorBoardCallback
from fastai.callback.wandb import WandbCallback
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader as TorchDataLoader

from common import *
from fastxtend_accum.window import MicroBatch,Window
from fastxtend_accum.noise import NoiseAverages,WindowSquares,grad_norm,sum_of_squares
from test_life import whole_learner
from test_logging import scalars, wandb_history

def population(n=64):
    "Samples with a signal in them"
    x,y = data(n)
    return x, y+2

def sample_gradients(m, x, y):
    "One row a sample: the gradient of its loss, by torch.func"
    params = dict(m.named_parameters())
    def loss(params, x, y): return ((functional_call(m, params, x)-y)**2).mean()
    return torch.cat([o.flatten(1) for o in vmap(grad(loss), (None, 0, 0))(params, x, y).values()], 1).detach()

def drawn(sizes, n_windows, n=64):
    "Indices of micro-batches of `sizes`, window after window, drawn with replacement"
    g = torch.Generator().manual_seed(3)
    return [torch.randint(n, (size,), generator=g).tolist() for _ in range(n_windows) for size in sizes]

def measured(batches, accum, *cbs, micro=4, memory=1e-9, lr=0., m=None, loss_func=mse, opt_func=SGD, **kwargs):
    "A Learner that was fitted on `batches` of the population; with a `memory` of nothing every entry is its own window's"
    x,y = population()
    dls = DataLoaders(TorchDataLoader(list(zip(x, y)), batch_sampler=batches), DataLoader(list(zip(x, y))[:8], bs=8))
    cbs = [GradientAccumulation(accum, micro_batch_size=micro, **kwargs), GradientNoiseScale(memory), *cbs]
    return fit(Learner(dls, model() if m is None else m, loss_func=loss_func, opt_func=opt_func, cbs=cbs), 1, lr)

def noises(learn): return torch.tensor([(o.noise, o.signal) for o in learn.recorder.noise_scale], dtype=torch.float64)

def by_hand(grads, sizes, units):
    "tr(S) and |G|^2 of a window: `grads` are its micro-batches' mean gradients, `sizes` their items; `units` are the window's samples"
    f = torch.tensor(sizes, dtype=torch.float64)/sum(sizes)
    grads = torch.stack(grads).double()
    mean = (f[:,None]*grads).sum(0)
    noise = units*((f*grads.square().sum(1)).sum()-mean.square().sum())/(len(f)-1)
    return [float(noise), float(mean.square().sum()-noise/units)]

# Without bias

@pytest.mark.long
@pytest.mark.parametrize('sizes', [(24, 8), (16, 16), (4, 8, 4, 16)])
def test_unbiased(sizes):
    "2,200 windows against the truth, within 2%; estimators that forget something fail the same check"
    accum,batches = sum(sizes),drawn(sizes, 2200)
    g = sample_gradients(model(), *population())
    truth = torch.stack([(g-g.mean(0)).square().sum(1).mean(), g.mean(0).square().sum()])
    def is_right(estimates): return bool(((estimates.mean(0)/truth-1).abs() < .02).all())

    found = noises(measured(batches, accum))
    assert found.shape == (2200, 2) and is_right(found)

    k,f = len(sizes),torch.tensor(sizes, dtype=torch.float64)/accum
    micro = torch.stack([g[o].mean(0) for o in batches]).reshape(2200, k, -1)
    mean = (f[:,None]*micro).sum(1).square().sum(1)
    squares = (f*micro.square().sum(2)).sum(1)
    noise = accum*(squares-mean)/(k-1)
    assert_same(found, torch.stack([noise, mean-noise/accum], 1), 1e-5*float(noise.max()))
    assert not is_right(torch.stack([noise, mean], 1))                          # the square of the mean as the signal
    assert not is_right(torch.stack([noise*(k-1)/k, mean-noise*(k-1)/k/accum], 1)) # K for K-1
    if len(set(sizes)) > 1:                                                     # micro-batches as if they had one size
        plain = accum*(micro.square().sum(2).mean(1)-micro.mean(1).square().sum(1))/(k-1)
        assert not is_right(torch.stack([plain, micro.mean(1).square().sum(1)-plain/accum], 1))

def test_a_known_noise_scale():
    "The gradient is the data, from a normal distribution: within 5%"
    class Products(nn.Module):
        def __init__(self): super().__init__(); self.w = nn.Parameter(torch.zeros(20))
        def forward(self, x): return x@self.w
    mean,sd = torch.linspace(-1, 1, 20),torch.linspace(.5, 4, 20)
    x = mean+torch.randn(32_000, 20)*sd
    ds = list(zip(x, torch.zeros(len(x))))
    dls = DataLoaders(DataLoader(ds, bs=16), DataLoader(ds[:4], bs=4))
    learn = Learner(dls, Products(), lambda pred,targ: pred.mean(), opt_func=SGD, cbs=[GradientAccumulation(64), GradientNoiseScale(math.inf)])
    fit(learn, 1, 1e-3)
    truth = float(sd.square().sum()/mean.square().sum())
    assert abs(learn.recorder.noise_scale[-1].noise_scale/truth-1) < .05 and truth > 10

# Window by window, against gradients of a plain backward pass each

def plain_gradient(m, loss):
    "The gradient of `loss` in the parameters that are trained; dense"
    params = [p for p in m.parameters() if p.requires_grad]
    return torch.cat([o.to_dense().flatten() for o in torch.autograd.grad(loss, params)]).detach()

def windows_by_hand(batches, n_windows, m, loss_of, items=len):
    "What `by_hand` says of windows of equally many `batches`"
    x,y = population()
    k = len(batches)//n_windows
    return torch.tensor([by_hand([plain_gradient(m, loss_of(m(x[o]), y[o])) for o in batches[i:i+k]], [items(o) for o in batches[i:i+k]],
                                 sum(map(len, batches[i:i+k]))) for i in range(0, len(batches), k)], dtype=torch.float64)

batches = drawn((4, 8, 4), 6)

@pytest.mark.parametrize('frozen', [False, True])
def test_windows_of_samples(frozen):
    m = model()
    for p in m[0].parameters(): p.requires_grad_(not frozen); p.grad = torch.ones_like(p) if frozen else None  # a stale gradient
    assert_same(noises(measured(batches, 16, m=m)), windows_by_hand(batches, 6, m, mse), 1e-4)

def test_windows_of_a_summed_loss():
    class Sum:
        reduction = 'sum'
        def __call__(self, pred, targ): return ((pred-targ)**2).sum().float()
    assert_same(noises(measured(batches, 16, loss_func=Sum())), windows_by_hand(batches, 6, model(), mse), 1e-4)

@pytest.mark.parametrize('as_tensor', [False, True])
def test_windows_of_weighed_items(as_tensor):
    "Items that are not the samples: 4-sample micro-batches weigh 3, 8-sample ones 2; one in the middle has none"
    def count(n): return {4:3, 8:2}[n]
    def n_items(learn): return tensor(float(count(len(learn.y)))) if as_tensor else count(len(learn.y))
    assert_same(noises(measured(batches, 16, num_items=n_items)), windows_by_hand(batches, 6, model(), mse, lambda o: count(len(o))), 1e-4)
    def some(learn): return n_items(learn)*(len(learn.y) == 4)
    (x,y),m = population(),model()
    expected = [by_hand([plain_gradient(m, mse(m(x[o]), y[o])) for o in (a,c)], [3,3], 16)
                for a,_,c in zip(*[iter(batches)]*3)]
    assert_same(noises(measured(batches, 16, num_items=some)), expected, 1e-4)

class Table(nn.Module):
    "An embedding that is looked up several times a sample"
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 3, sparse=sparse)
    def forward(self, x): return self.table((x.abs()*2).long().clamp(max=5)).square().sum((1, 2))[:,None]

def test_windows_with_sparse_gradients():
    class Plain(Callback):
        "fastai's optimizers have no sparse step"
        def before_step(self):
            for p in self.model.parameters(): p.grad = p.grad.to_dense()
    found = [noises(measured(batches, 16, *[Plain()]*sparse, m=Table(sparse))) for sparse in (False, True)]
    expected = windows_by_hand(batches, 6, Table(False), mse)
    for o in found: assert_same(o/expected, torch.ones_like(expected), 1e-4)  # float32

@pytest.mark.parametrize('mode, tol', [(AMPMode.FP16, .01), (AMPMode.BF16, .05)])
def test_mixed_precision(mode, tol):
    "The loss scale is undone, and an overflown window is not measured"
    def loss(pred, targ): return F.mse_loss(pred.float(), targ.float())
    x,y = population()
    ds = list(zip(x.float(), y.float()))
    dls = DataLoaders(TorchDataLoader(ds, batch_sampler=batches), DataLoader(ds[:8], bs=8))
    class Overflow(Callback):
        def after_loss(self):
            if self.training and self.train_iter == 4 and mode == AMPMode.FP16: self.learn.loss_grad = self.learn.loss_grad*float('inf')
    learn = Learner(dls, model().float(), loss, opt_func=SGD, cbs=[GradientAccumulation(16, micro_batch_size=4), GradientNoiseScale(1e-9),
                                                                  CpuMixedPrecision(amp_mode=mode, init_scale=2.**8), Overflow(), GradientClip(1e-3)])
    fit(learn, 1, 0.)
    expected = windows_by_hand(batches, 6, model(), mse)
    if mode == AMPMode.FP16: expected = torch.cat([expected[:1], expected[2:]])
    assert_same(noises(learn)/expected, torch.ones_like(expected), tol)
    assert [o.windows for o in learn.recorder.noise_scale] == list(range(1, len(expected)+1))

@pytest.mark.parametrize('event', ['before_batch', 'after_loss', 'before_backward', 'after_backward', 'before_step'])
def test_cancelled_micro_batches_do_not_count(event):
    "The fourth micro-batch, the first of the second window: the ones after it fill that window; cancelled in its step, a window is lost"
    class Cancel(Callback):
        order = 5.7 if event == 'after_backward' else 8
        def cancel(self):
            if self.training and self.iter == (5 if event == 'before_step' else 3): raise CancelBatchException
    same = drawn((8,), 9)
    cancel = Cancel()
    setattr(Cancel, event, Cancel.cancel)
    learn = measured(same, 24, cancel, micro=8)
    kept = same[:3]+same[6:] if event == 'before_step' else same[:3]+same[4:7]
    assert_same(noises(learn)[:2], windows_by_hand(kept, 2, model(), mse), 1e-4)
    assert len(losses(learn)) == len(noises(learn)) + (event == 'before_step') and not hooked(learn)  # a skipped step is logged, not measured

@pytest.mark.parametrize('remainder', ['step', 'carry', 'drop'])
def test_an_entry_for_each_step(remainder):
    learn = make_learner(8, n=92, cbs=[GradientAccumulation(24, remainder=remainder), GradientNoiseScale()])
    fit(learn, 3)
    assert len(learn.recorder.noise_scale) == len(losses(learn)) == len(learn.recorder.accum_bs) > 8
    assert not np.isnan(np.array([o[:4] for o in learn.recorder.noise_scale])).any()
    assert learn.recorder.noise_scale[-1].windows == len(losses(learn))

def test_measuring_changes_nothing():
    a,b = (fit(make_learner(8, cbs=[GradientAccumulation(32), *cbs], opt_func=Adam), 3) for cbs in ([], [GradientNoiseScale()]))
    assert_same(weights(a), weights(b))
    assert losses(a) == losses(b)

# In the optimizer's metric

def torch_adam(params, lr=.1, **kwargs): return OptimWrapper(params, torch.optim.AdamW, lr=lr, eps=1e-5)
def sparse_adam(params, lr=.1, **kwargs): return OptimWrapper(params, torch.optim.SparseAdam, lr=lr, eps=1e-5)
def rms(params, lr=.1, **kwargs): return RMSProp(params, lr, sqr_mom=.9, eps=1e-5)

@pytest.mark.parametrize('opt_func,sqr_mom,debias', [(Adam, .99, True), (torch_adam, .999, True), (rms, .9, False), (sparse_adam, .999, True)])
def test_windows_in_adams_metric(opt_func, sqr_mom, debias):
    "With the mean of squares by hand, from the windows before; nothing of the first five counts"
    (x,y),m,batches = population(),Table(True) if opt_func is sparse_adam else model(),drawn((4, 8, 4), 9)
    v,expected = 0,[]
    for t,window in enumerate(zip(*[iter(batches)]*3)):
        grads = [plain_gradient(m, mse(m(x[o]), y[o])).double() for o in window]
        root = ((v/(1-sqr_mom**t) if debias else v)**.5+1e-5)**.5 if t else None
        if t >= 5: expected.append(by_hand([g/root for g in grads], list(map(len, window)), 16))
        v = sqr_mom*v+(1-sqr_mom)*(sum(len(o)*g for o,g in zip(window, grads))/16)**2
    learn = measured(batches, 16, m=m, opt_func=opt_func)
    assert [(o.windows, o.metric) for o in learn.recorder.noise_scale] == [(0, 'Adam')]*5+[(i, 'Adam') for i in range(1, 5)]
    expected = torch.tensor(expected, dtype=torch.float64)
    assert_same(noises(learn)[5:]/expected, torch.ones_like(expected), 1e-3)  # float32 losses, over small means of squares
    plain = noises(measured(batches, 16, m=m))
    assert ((plain[5:]/expected-1).abs() > .1).any()

def test_the_metric_of_a_trained_optimizer_counts_from_the_first_window():
    learn = make_learner(8, cbs=[GradientAccumulation(32), GradientNoiseScale()], opt_func=Adam)
    assert [o.windows for o in fit(learn, 3).recorder.noise_scale] == [0]*5+[1,2,3,4]
    assert [o.windows for o in fit(learn, 1).recorder.noise_scale] == [1,2,3]
    assert learn.recorder.plot_noise_scale().get_legend().get_texts()[0].get_text() == 'gradient noise scale, Adam'
    learn = fit(make_learner(8, cbs=[GradientAccumulation(32), GradientNoiseScale()]), 1)
    assert learn.recorder.noise_scale[-1].metric == 'plain'

def squares_without_momentum(has_step, has_eps):
    "An optimizer like fastxtend's adan: its state has a `sqr_avg`, its hyper-parameters have another name than `sqr_mom`"
    def average(p, lr, beta3=.9, sqr_avg=None, step=0, **kwargs):
        sqr_avg = p.grad**2 if sqr_avg is None else sqr_avg*beta3+p.grad**2*(1-beta3)
        return dict(sqr_avg=sqr_avg, **({'step':step+1} if has_step else {}))
    def move(p, lr, sqr_avg, eps=1e-5, **kwargs): p.data.addcdiv_(p.grad, sqr_avg.sqrt()+eps, value=-lr)
    if has_eps: move.defaults = dict(eps=1e-5)
    average.defaults = dict(beta3=.9)
    return partial(Optimizer, cbs=[average, move])

@pytest.mark.parametrize('has_step', [False, True])
@pytest.mark.parametrize('has_eps', [False, True])
def test_windows_in_a_metric_without_sqr_mom(has_step, has_eps):
    "Nothing says how to correct the mean of squares for its start, so it counts as it is; the first window, which is measured plainly, is not mixed with the others"
    (x,y),m,batches = population(),model(),drawn((4, 8, 4), 9)
    v,expected,eps = None,[],1e-5*has_eps
    for t,window in enumerate(zip(*[iter(batches)]*3)):
        grads = [plain_gradient(m, mse(m(x[o]), y[o])).double() for o in window]
        if t >= 5: expected.append(by_hand([g/(v**.5+eps)**.5 for g in grads], list(map(len, window)), 16))
        square = (sum(len(o)*g for o,g in zip(window, grads))/16)**2
        v = square if v is None else .9*v+.1*square
    learn = measured(batches, 16, m=m, opt_func=squares_without_momentum(has_step, has_eps))
    assert [(o.windows, o.metric) for o in learn.recorder.noise_scale] == [(1, 'plain')]+[(0, 'Adam')]*4+[(i, 'Adam') for i in range(1, 5)]
    expected = torch.tensor(expected, dtype=torch.float64)
    assert_same(noises(learn)[5:]/expected, torch.ones_like(expected), 1e-3)  # float32 losses

# Memory in samples

class Products(nn.Module):
    "Its gradient is the data"
    def __init__(self): super().__init__(); self.w = nn.Parameter(torch.zeros(20))
    def forward(self, x): return x@self.w

def known(accum, memory, noise=(1., 3.), n=64_000):
    "The last estimate over a stream of samples whose noise scale goes from the first `noise` to the second half-way"
    g = torch.Generator().manual_seed(1)
    x = torch.ones(n, 20)+torch.randn(n, 20, generator=g)*torch.tensor(noise).repeat_interleave(n//2)[:,None]
    ds = list(zip(x, torch.zeros(n)))
    learn = Learner(DataLoaders(DataLoader(ds, bs=32), DataLoader(ds[:4], bs=4)), Products(), lambda pred,targ: pred.mean(), opt_func=SGD, cbs=[accum, GradientNoiseScale(memory)])
    return fit(learn, 1, 1e-3).gradient_noise_scale.estimate().noise_scale

@pytest.mark.long
def test_memory_is_in_samples():
    """The noise of a sample goes from 20 to 180, its signal is 20; an average that goes back M samples has after 32,000 of them seen exp(-32,000/M) of the first. The same for
    windows of 64, of 256, and for those that grow; in windows, the larger ones would have gone back four times as far"""
    M = 32_000
    share = (math.exp(-1)-math.exp(-2))/(1-math.exp(-2))
    truth = share+(1-share)*9
    for accum in GradientAccumulation(64), GradientAccumulation(256), GradientAccumulationSchedule(64, 256, start=.5, finish=.5, remainder='carry'):
        assert abs(known(accum, M)/truth-1) < .05
    assert abs(known(GradientAccumulation(256), 4*M)/truth-1) > .2

def test_memory_of_averages():
    "Four windows of 64, or one of 256 with their mean; without a memory it is that of 50 windows like the first"
    a,b = NoiseAverages(1e4),NoiseAverages(1e4)
    for i in range(100):
        for _ in range(4): a.add(i, 2*i, 64)
        b.add(i, 2*i, 256)
    assert_same(a.estimate()[1:3], b.estimate()[1:3], 1e-9)
    c = NoiseAverages(None)
    c.add(1., 1., 32); c.add(0., 0., 32)
    assert_same(c.estimate().noise, math.exp(-1/50)/(1+math.exp(-1/50)), 1e-12)

# One micro-batch a window

@pytest.mark.parametrize('accum_bs,n,windows', [(8, 64, [0]*8), (16, 64, [1, 2, 3, 4]), (16, 40, [1, 2, 2])])
def test_a_window_of_one_is_not_measured(accum_bs, n, windows):
    "A warning says so, unless it is what an epoch has left over"
    learn = make_learner(8, n=n, cbs=[GradientAccumulation(accum_bs), GradientNoiseScale()])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter('always')
        fit(learn, 1)
    assert [o.windows for o in learn.recorder.noise_scale] == windows
    said = [str(o.message) for o in warned if 'GradientNoiseScale' in str(o.message)]
    assert said == ['GradientNoiseScale cannot measure a window of 8 samples in a single micro-batch: use a smaller micro_batch_size, or a larger accum_bs']*(accum_bs == 8)

# What it costs: counts

def test_one_look_at_numbers_a_window(monkeypatch):
    "Whatever would wait for a GPU is counted: with the callback there is one more of it for each window"
    n = [0]
    def count(name):
        real = getattr(torch.Tensor, name)
        def counted(self, *args): n[0] += 1; return real(self, *args)
        monkeypatch.setattr(torch.Tensor, name, counted)
    for name in 'item','tolist','__bool__','__float__','__int__','cpu','numpy': count(name)
    def looks(*cbs):
        n[0] = 0
        fit(make_learner(8, cbs=[GradientAccumulation(32), *cbs]), 3)
        return n[0]
    assert looks(GradientNoiseScale()) == looks()+9

def under_way():
    "A window with a micro-batch that is before its backward pass"
    window = Window()
    window.micro = MicroBatch(8)
    window.weigh(8, torch.ones(()))
    return window

@pytest.mark.parametrize('opt_func', [SGD, Adam])
def test_no_copy_of_the_gradient(opt_func):
    "What is made while gradients are measured is no larger than a number for each parameter; in Adam's metric, than the one parameter at hand"
    from torch.utils._python_dispatch import TorchDispatchMode
    class Largest(TorchDispatchMode):
        n = 0
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor): self.n = max(self.n, out.numel())
            return out
    opt,squares = opt_func([nn.Parameter(torch.ones(1000)) for _ in range(7)], lr=.1),WindowSquares(SimpleNamespace(window=under_way()))
    params = opt.param_lists[0]
    for _ in range(2):
        for p in params: p.grad = torch.ones(1000)
        opt.step()
        squares.watch(opt)
        loss = sum((p*2).sum() for p in params)
        with Largest() as largest:
            for p in params: squares.norms.append(grad_norm(p.grad, opt.state[p], opt.hypers[0]))
            sum_of_squares(squares.norms)
        loss.backward()
        assert len(squares.norms) == 14
        assert 0 < largest.n <= (7 if opt_func is SGD else 1000)
        squares.ignore()

# Nothing is left behind

def hooked(learn): return [p for p in learn.model.parameters() if p._backward_hooks]

@pytest.mark.thin(7)
@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward', 'before_step', 'after_step', 'after_batch'])
@pytest.mark.parametrize('error', [KeyboardInterrupt, RuntimeError, CancelFitException, CancelEpochException, CancelTrainException])
def test_no_hooks_after_a_fit_that_ended(event, error):
    class Fail(Callback):
        order = 8
        def fail(self):
            if self.training and self.train_iter >= 3: raise error('x')
    setattr(Fail, event, Fail.fail)
    learn = make_learner(8, cbs=[GradientAccumulation(32), GradientNoiseScale(), Fail()])
    try: fit(learn, 1)
    except (KeyboardInterrupt, RuntimeError): pass
    assert not hooked(learn)
    learn.remove_cb(Fail)
    expected = fit(make_learner(8, cbs=[GradientAccumulation(32), GradientNoiseScale()]), 1, 0.)
    learn.model.load_state_dict(expected.model.state_dict())
    fit(learn, 1, 0.)
    assert_same(noises(learn), noises(expected))
    assert not hooked(learn)

def test_interrupted_in_the_middle_of_a_backward_pass():
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x
        @staticmethod
        def backward(ctx, g): raise KeyboardInterrupt
    learn = make_learner(8, cbs=[GradientAccumulation(32), GradientNoiseScale()])
    learn.model.register_forward_hook(lambda m,x,pred: Fail.apply(pred))
    with pytest.raises(KeyboardInterrupt): fit(learn)
    assert not hooked(learn) and learn.gradient_noise_scale.squares is None

@pytest.mark.parametrize('order', [-99, GradientNoiseScale.order, 99])
@pytest.mark.parametrize('event', [*(f'before_{o}' for o in ('fit','epoch','train','batch','backward','step')), 'after_pred', 'after_loss',
                                   *(f'after_{o}' for o in ('backward','step','batch','train','epoch','fit')), 'after_cancel_batch'])
def test_removed_in_any_event(event, order):
    "At its second time, or its first, by a callback before or after it: the fit goes on as without it, and a fit with it again measures as ever"
    def learner(): return make_learner(8, cbs=[GradientAccumulation(32), GradientNoiseScale()])
    class Remove(Callback):
        run_valid,n = False,0
        def remove(self):
            self.n += 1
            if self.n == (1 if event in ('before_fit','after_fit') else 2): self.learn.remove_cb(GradientNoiseScale)
    Remove.order = order
    setattr(Remove, event, Remove.remove)
    learn,expected = learner(),learner()
    noise = learn.gradient_noise_scale
    for o in learn,expected: fit(o, 2, cbs=Remove() if o is learn else None)
    assert noise.learn is None and not learn._grab_cbs(GradientNoiseScale) and not hooked(learn)
    assert_same(weights(learn), weights(expected))
    assert losses(learn) == losses(expected)
    assert_moved(learn)
    learn.add_cb(noise)
    for o in learn,expected: fit(o, 1)
    assert_same(noises(learn), noises(expected))
    assert not hooked(learn)

def test_pickled_with_hooks_on():
    cb = GradientNoiseScale()
    cb.squares = WindowSquares(SimpleNamespace(window=under_way()))
    cb.squares.watch(SGD(model().parameters(), lr=.1))
    assert len(cb.squares.hooks) == 4 and pickle.loads(pickle.dumps(cb)).squares is None

def test_export():
    learn = whole_learner([GradientAccumulation(32), GradientNoiseScale(320)])
    fit(learn, 1).export('learner.pkl')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        loaded = load_learner('learner.pkl')
    with quiet(loaded): loaded.predict(3)
    loaded.dls = learn.dls
    assert [o.windows for o in fit(loaded, 3, reset_opt=True).recorder.noise_scale] == [0]*5+[1]  # Adam's metric begins anew

# Logged, refused

def test_lr_find_measures_nothing_and_uses_nothing_up():
    learn = make_learner(8, cbs=[GradientAccumulation(32), GradientNoiseScale()])
    fit(learn, 2)
    with learn.no_bar(): learn.lr_find(num_it=10, show_plot=False)
    assert learn.gradient_noise_scale.estimate().windows == 6
    fit(learn, 1)
    assert [o.windows for o in learn.recorder.noise_scale] == [1,2,3]

def test_micro_bs_find_measures_nothing():
    learn = make_learner(8, cbs=[GradientAccumulation(32), GradientNoiseScale()])
    with quiet(learn): assert learn.micro_bs_find() == 8

def test_loggers(monkeypatch):
    "Each step that has an estimate, the same in all"
    learn = make_learner(8, cbs=[GradientAccumulation(32), GradientNoiseScale(), WandbCallback(log_preds=False),
                                 TensorBoardCallback('tb', trace_model=False, log_preds=False)])
    rows,_ = wandb_history(monkeypatch, learn)
    expected = [o.noise_scale for o in learn.recorder.noise_scale]
    finite = [o for o in expected if o < math.inf]
    assert len(expected) == len(rows) == 6 and len(finite) > 2
    assert [o.get('gradient_noise_scale', math.inf) for o in rows.values()] == expected
    assert [o['accumulation_batch_size'] for o in rows.values()] == [32]*6
    assert_same([v for _,v in scalars('tb', 'gradient_noise_scale')], finite, 1e-4*max(finite))

def test_what_is_refused():
    with pytest.raises(ValueError, match='add a GradientAccumulation'): fit(make_learner(8, cbs=GradientNoiseScale()))
    for memory in 0, -.1, 'x':
        with pytest.raises(ValueError, match='memory must be more than 0 samples'): GradientNoiseScale(memory)
    with pytest.raises(ValueError, match='add GradientNoiseScale'): fit(make_learner(8)).recorder.plot_noise_scale()

def test_plot():
    learn = fit(make_learner(8, cbs=[GradientAccumulation(32), GradientNoiseScale()]))
    ax = learn.recorder.plot_noise_scale()
    assert [len(o.get_xdata()) for o in ax.lines] == [9,9]
    learn = fit(make_learner(8, cbs=[GradientAccumulation(32, log_accum_batch=False), GradientNoiseScale()]))
    learn.recorder.plot_noise_scale()
    learn.validate(); learn.get_preds()

class FailsBackward(nn.Module):
    "Out of memory in the backward pass of 32 samples, and in that of the `nth` piece of 16"
    def __init__(self, nth): super().__init__(); self.m,self.nth,self.n = model(),nth,0
    def forward(self, x):
        n,x = len(x),self.m[1](self.m[0](x))
        self.n += self.training and n == 16
        if self.training and (n == 32 or n == 16 and self.n == self.nth): x.register_hook(self.fail)
        return self.m[2](x)
    def fail(self, g): raise torch.OutOfMemoryError('CUDA out of memory')

def test_pieces_of_a_batch_that_ran_out_of_memory_do_not_count():
    "The first piece of the second window fits, and the second does not: the window starts over in smaller pieces"
    def fitted(micro, nth=None):
        return fit(make_learner(32, m=FailsBackward(nth), cbs=[GradientAccumulation(32, micro_batch_size=micro), GradientNoiseScale(1e-9)]), 1)
    starts_over,halves,quarters = fitted('auto', nth=4),fitted(16),fitted(8)
    assert starts_over.gradient_accumulation.micro_bs == 8 and starts_over.model.n == 4  # one to find the size, two in the first window
    assert_same(noises(starts_over), torch.cat([noises(halves)[:1], noises(quarters)[1:]]), 1e-6)
    assert (noises(halves)-noises(quarters)).abs().min() > 1e-3
