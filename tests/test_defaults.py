"fastai's own defaults, nothing switched off: against a Learner whose loader yields the large batch"
import pytest
from hypothesis import given, strategies as st

from common import *
from test_large_batch import opt_funcs
from test_life import Fault as AnyFault

class Fault(AnyFault):
    "Strikes in training only"
    run_valid = False

FLOAT32 = 1e-5  # the Recorder averages in float32

def groups(m): return [params(m[0]), params(m[2])]

def run(bs, cbs=None, n=100, drop_last=True, method='fit_one_cycle', n_epoch=2, start_epoch=0, opt='sgd', **kwargs):
    "A Learner after `method`, one of fastai's"
    learn = make_learner(bs, n=n, drop_last=drop_last, opt_func=opt_funcs[opt], cbs=cbs, m=nn.Sequential(*model()), splitter=groups, **kwargs)
    with quiet(learn):
        if method == 'own': learn.fit(n_epoch, .01, start_epoch=start_epoch, cbs=ParamScheduler({'lr':lambda pos: .02 if pos < .5 else .002}))
        elif method == 'fit_sgdr': learn.fit_sgdr(2, n_epoch, .01, start_epoch=start_epoch)
        elif method == 'fine_tune': learn.fine_tune(n_epoch, .01)
        else: getattr(learn, method)(n_epoch, .01, start_epoch=start_epoch)
    return learn

def assert_equal(small, big):
    "Everything that a fit leaves behind"
    assert_same(weights(small), weights(big), ROUNDING)
    for o in 'lrs','iters': assert_same(getattr(small.recorder, o), getattr(big.recorder, o))
    assert_same(losses(small), losses(big), FLOAT32)
    assert_same(floats(small.recorder.values), floats(big.recorder.values), FLOAT32)
    for k,v in getattr(big.recorder, 'hps', {}).items(): assert_same(torch.tensor(np.array(small.recorder.hps[k])), torch.tensor(np.array(v)))
    assert small.gradient_accumulation.opt_steps == small.gradient_accumulation.window.results.total()

def test_the_default_follows_the_loader():
    "1,000 samples in batches of 32 are 31 batches, or 32 of which the last is short"
    for drop_last,n_steps in (True, 93), (False, 96):
        big,small = (run(bs, cbs, n=1000, drop_last=drop_last, n_epoch=3) for bs,cbs in ((32, None), (8, GradientAccumulation(32))))
        assert len(losses(small)) == len(losses(big)) == n_steps
        assert_equal(small, big)
        assert (weights(big)-weights(model())).abs().max() > 1e-2

@pytest.mark.parametrize('remainder, like', [('step', False), ('drop', True)])
@pytest.mark.parametrize('drop_last', [False, True])
def test_an_explicit_remainder_wins(remainder, like, drop_last):
    big,small = run(32, n=96+8, drop_last=like),run(8, GradientAccumulation(32, remainder=remainder), n=96+8, drop_last=drop_last)
    assert len(losses(big)) == (6 if like else 8)
    assert_equal(small, big)

def test_the_schedule_steps_on_every_sample():
    assert GradientAccumulationSchedule(16, 32).remainder == 'step'
    learn = run(8, GradientAccumulationSchedule(16, 32), n=104)
    assert sum(learn.recorder.accum_bs) == 2*104

methods = 'fit','fit_one_cycle','fit_flat_cos','fit_sgdr','fine_tune','own'

@pytest.mark.thin(5)
@pytest.mark.parametrize('method', methods)
@pytest.mark.parametrize('n', [100, 130, 1000])
@pytest.mark.parametrize('drop_last', [False, True])
def test_every_way_to_fit(method, n, drop_last):
    "Learning rates and momenta bit for bit, and the weights to rounding"
    big,small = (run(bs, cbs, n=n, drop_last=drop_last, method=method) for bs,cbs in ((32, None), (8, GradientAccumulation(32))))
    assert_equal(small, big)
    if method != 'fit': assert len(set(big.recorder.lrs)) > 1

@draws
@given(n=st.integers(2, 90), micro=st.integers(1, 9), k=st.integers(1, 5), drop_last=st.booleans(), method=st.sampled_from(methods),
       opt=st.sampled_from(sorted(opt_funcs)), n_epoch=st.integers(1, 3), start=st.integers(0, 1), wd=st.sampled_from([None, .01]))
def test_any_fit(n, micro, k, drop_last, method, opt, n_epoch, start, wd):
    "Samples, sizes, loader, fit method, optimizer, weight decay and resumed fits as they come"
    if drop_last and n < k*micro: return  # no batch at all: an error
    start_epoch = 0 if method in ('fine_tune', 'fit_flat_cos') else min(start, n_epoch-1)  # fastai's ignore it
    kwargs = dict(n=n, drop_last=drop_last, method=method, n_epoch=n_epoch, start_epoch=start_epoch, opt=opt, wd=wd)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # PyTorch's optimizers know no `mom` under fastai's scheduler of it
        assert_equal(run(micro, GradientAccumulation(k*micro), **kwargs), run(k*micro, **kwargs))

@pytest.mark.parametrize('drop_last', [False, True])
@pytest.mark.parametrize('n', [100, 130])
def test_lr_find(n, drop_last):
    found = []
    for bs,cbs in (32, None), (8, GradientAccumulation(32)):
        learn = make_learner(bs, n=n, drop_last=drop_last, cbs=cbs)
        with learn.no_bar(): suggested = learn.lr_find(num_it=30, stop_div=False, show_plot=False)
        found.append((suggested.valley, learn.recorder.lrs, losses(learn)))
    (a,lrs,ls),(b,big_lrs,big_ls) = found
    assert a == b and len(lrs) == 30
    assert_same(lrs, big_lrs, ROUNDING)
    assert_same(torch.tensor(ls)/torch.tensor(big_ls), torch.ones(30), 1e-4)

def test_what_is_dropped_is_not_computed():
    "100 samples, windows of 32: 12 micro-batches, and the rest of the epoch is not even loaded"
    loaded = []
    class Count(Callback):
        run_valid = False
        def before_fit(self): self.n = 0
        def after_pred(self): self.n += 1
    for accum in GradientAccumulation(32, remainder='drop'), GradientAccumulationSchedule(32, 32, remainder='drop'):
        learn = make_learner(8, n=100, cbs=[accum, Count()])
        learn.dls.train.after_batch = lambda b: loaded.append(find_bs(b)) or b
        fit(learn, 2)
        assert learn.count.n == 24 and loaded == [8]*24
        loaded.clear()
    assert learn.train_iter == 24

def test_progress_bar_counts_what_is_computed():
    totals = []
    class Probe(Callback):
        order,run_valid = 61,False
        def after_train(self): totals.append((self.learn.progress.pbar.total, self.learn.n_iter, self.learn.iter+1))
    learn = make_learner(8, n=100, cbs=[GradientAccumulation(32, remainder='drop'), Probe()])
    with learn.no_logging(): learn.fit(1)
    assert totals == [(12, 12, 12)]

class Seen(Callback):
    "What other callbacks read in `after_batch`"
    order,run_valid = 99,False
    def before_fit(self): self.weights,self.pcts = [],[]
    def after_batch(self):
        self.weights.append(weights(self.learn))
        self.pcts.append(self.learn.pct_train)

@pytest.mark.parametrize('drop_last', [False, True])
def test_the_last_window_steps_inside_its_batch(drop_last):
    "So a callback that follows the weights in `after_batch`, such as an exponential moving average, sees every step"
    big,small = (run(bs, [Seen(), *cbs], drop_last=drop_last) for bs,cbs in ((32, []), (8, [GradientAccumulation(32)])))
    assert_same(small.seen.weights[-1], weights(small))
    changed = [b for a,b in zip([weights(model()), *small.seen.weights], small.seen.weights) if not torch.equal(a, b)]
    assert len(changed) == len(big.seen.weights) == (6 if drop_last else 8)
    assert_same(torch.stack(changed), torch.stack(big.seen.weights), ROUNDING)
    ends = [pct for pct,a,b in zip(small.seen.pcts, [weights(model()), *small.seen.weights], small.seen.weights) if not torch.equal(a, b)]
    assert_same(ends, big.seen.pcts)

# Skipped and cancelled steps are logged as the large batch logs them

def logged(bs, cbs, **kwargs):
    "A fit with a learning rate of 0, so that a gradient that fastai does not zero after a fault changes no loss"
    learn = make_learner(bs, cbs=[TrackLoss(), *cbs], **kwargs)
    try: fit(learn, 2, 0.)
    except (CancelBatchException, CancelStepException, CancelTrainException, CancelBackwardException): return None
    return learn

class TrackLoss(Callback):
    order = 98
    def before_fit(self): self.seen = []
    def after_epoch(self): self.seen.append(list(self.recorder.log))

def assert_logged_alike(small, big):
    assert (small is None) == (big is None)
    if big is None: return
    for o in 'losses','lrs','iters': assert_same(list(map(float, getattr(small.recorder, o))), list(map(float, getattr(big.recorder, o))), FLOAT32)
    for a,b in (small.recorder.values, big.recorder.values), (small.track_loss.seen, big.track_loss.seen):
        assert [len(o) for o in a] == [len(o) for o in b]
        assert_same(torch.tensor(sum(floats(a), [])), torch.tensor(sum(floats(b), [])), FLOAT32)

@pytest.mark.thin(7)
@pytest.mark.parametrize('order', [7, 20, 99])
@pytest.mark.parametrize('event', ['before_step', 'after_step', 'after_batch'])
@pytest.mark.parametrize('exc', [CancelStepException, CancelBatchException, CancelTrainException, CancelEpochException, CancelFitException])
def test_a_fault_at_a_step(exc, event, order):
    "96 samples: three windows an epoch; the fault strikes each of the first five"
    for nth in range(1, 6):
        big = logged(32, [Fault(exc, event, nth, order)])
        small = logged(8, [GradientAccumulation(32), Fault(exc, event, 4*nth if event == 'after_batch' else nth, order)])
        assert_logged_alike(small, big)

PER_BATCH = ['before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step','after_batch']

@pytest.mark.thin(7)
@pytest.mark.parametrize('order', [-5, 7, 99])
@pytest.mark.parametrize('event', PER_BATCH)
@pytest.mark.parametrize('exc', [CancelStepException, CancelBatchException, CancelTrainException, CancelEpochException, CancelFitException, CancelBackwardException])
def test_a_fault_anywhere_in_a_window_of_one(exc, event, order):
    for nth in 2, 5:
        big,small = (logged(32, [Fault(exc, event, nth, order), *cbs]) for cbs in ([], [GradientAccumulation(32)]))
        assert_logged_alike(small, big)

class Overflows(Callback):
    "The loss of some windows overflows"
    order,run_valid = MixedPrecision.order+1,False
    def __init__(self, windows, k): self.windows,self.k = windows,k
    def before_backward(self):
        if self.train_iter//self.k in self.windows: self.learn.loss_grad = self.learn.loss_grad*float('inf')

@pytest.mark.parametrize('windows', [(0,), (1, 2), (0, 1, 2), range(6)])
def test_overflows_in_float16(windows):
    "A whole epoch of them, too, which `SaveModelCallback` monitors"
    def fit16(bs, *cbs):
        cbs = [CpuMixedPrecision('fp16', init_scale=2.**10), SaveModelCallback(monitor='train_loss'), Overflows(windows, 32//bs), *cbs]
        return fit(make_learner(bs, m=model().float(), loss_func=MSELossFlat(), cbs=cbs), 2, 0.)
    big,small = fit16(32),fit16(8, GradientAccumulation(32))
    assert small.gradient_accumulation.opt_steps == 6-len(windows)
    assert len(losses(small)) == len(losses(big)) == 6
    assert_same(losses(small), losses(big), 1e-3)  # float16
    assert_same(floats(small.recorder.values), floats(big.recorder.values), 1e-3)

# Sums

def summed(pred, targ): return ((pred-targ)**2).sum().float()
summed.reduction = 'sum'
def mean_or_sum(pred, targ, factor=1.): return factor*((pred-targ)**2).sum().float()
with_attribute = partial(mean_or_sum, factor=.5)
with_attribute.reduction = 'sum'
class Summed:
    reduction = 'sum'
    def __call__(self, pred, targ): return summed(pred, targ)
    def method(self, pred, targ): return summed(pred, targ)

@pytest.mark.parametrize('loss_func', [summed, with_attribute, partial(summed), Summed(), partial(Summed()),
                                       partial(lambda p,t,reduction: summed(p, t), reduction='sum')])
def test_sums_by_their_reduction(loss_func):
    big,small = (fit(make_learner(bs, loss_func=loss_func, cbs=cbs), 2, 1e-3) for bs,cbs in ((32, None), (8, GradientAccumulation(32))))
    assert_moved(big)
    assert_same(weights(small), weights(big), ROUNDING)
    assert_same(torch.tensor(losses(small))/torch.tensor(losses(big)), torch.ones(6), FLOAT32)

def test_a_sum_over_two_targets():
    "Not only where there is one prediction and one target"
    def loss(pred, a, b): return ((pred-a)**2).sum().float() + (pred-b).abs().sum().float()
    loss.reduction = 'sum'
    x,y = data(96)
    def learner(bs, cbs=None):
        ds = list(zip(x, y, y+1))
        dls = DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds[:16], bs=16))
        dls.n_inp = 1
        return fit(Learner(dls, model(), loss_func=loss, opt_func=SGD, cbs=cbs), 2, 1e-3)
    assert_same(weights(learner(8, GradientAccumulation(32))), weights(learner(32)), ROUNDING)

# Compiled models, and gradients that something else would use

def test_a_compiled_model():
    big,small,plain = (fit(make_learner(bs, m=m, cbs=cbs)) for bs,m,cbs in
                       ((32, torch.compile(model(), backend='aot_eager'), None), (8, torch.compile(model(), backend='aot_eager'), GradientAccumulation(32)),
                        (32, model(), None)))
    assert_same(weights(small), weights(big), ROUNDING)
    assert_same(weights(big), weights(plain), ROUNDING)

@pytest.mark.parametrize('kwargs', [dict(mode='reduce-overhead'), dict(mode='max-autotune'), dict(options={'triton.cudagraphs':True})])
@pytest.mark.parametrize('how', ['whole', 'a part', 'in place'])
def test_cuda_graphs_are_an_error(kwargs, how):
    m = model()
    if how == 'whole': m = torch.compile(m, **kwargs)
    elif how == 'a part': m[0] = torch.compile(m[0], **kwargs)
    else: m.compile(**kwargs)
    with pytest.raises(ValueError, match="compiled with CUDA graphs, which can corrupt accumulated gradients: compile it with mode='default'"):
        fit(make_learner(8, m=m, cbs=GradientAccumulation(32)), 1)

def test_an_optimizer_in_the_backward_pass_is_an_error():
    m = model()
    m[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match='parameters have post-accumulate-grad hooks'): fit(make_learner(8, m=m, cbs=GradientAccumulation(32)), 1)
    m[0].weight.requires_grad_(False)  # a frozen one has no gradient
    fit(make_learner(8, m=m, cbs=GradientAccumulation(32)), 1)

# Names

@pytest.mark.parametrize('module', ['vision', 'text', 'tabular'])
def test_the_only_name_that_is_replaced(module):
    import importlib, fastxtend_accum.all as ours
    theirs = vars(importlib.import_module(f'fastai.{module}.all'))
    assert len(ours.__all__) < 25 and all(callable(getattr(ours, o)) or o == 'window_loggers' for o in ours.__all__)
    assert [o for o in ours.__all__ if o in theirs and theirs[o] is not getattr(ours, o)] == ['GradientAccumulation']

def test_an_error_in_a_logger_names_it():
    class MyLogger(ParamScheduler):
        order = 70
        def after_batch(self): raise OSError('the disk is full')
    with pytest.raises(OSError, match='Exception occured in `MyLogger` when calling event `after_batch`'):
        fit(make_learner(8, cbs=[GradientAccumulation(32), MyLogger({})]), 1)
