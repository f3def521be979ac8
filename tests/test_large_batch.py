"The accumulated batch against the large one"
import pytest
from hypothesis import given, strategies as st

from common import *

FLOAT32 = 1e-6    # the Recorder works in float32

opt_funcs = dict(sgd=partial(SGD, mom=0.9), adam=Adam, radam=RAdam, adamw=partial(OptimWrapper, opt=torch.optim.AdamW),
                 torch_sgd=partial(OptimWrapper, opt=torch.optim.SGD, momentum=0.9))
torch_opts = dict(sgd=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
                  adamw=lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.01))


def test_reference_is_deterministic():
    steps = windows(96, 8, 32, 'step', 3)
    assert len(steps) == 9
    assert_same(reference(steps, 96, torch_opts['sgd'])[0], reference(steps, 96, torch_opts['sgd'])[0])

@pytest.mark.parametrize('opt', opt_funcs)
@pytest.mark.parametrize('accum', [GradientAccumulation, lambda bs: GradientAccumulationSchedule(bs, bs)])
def test_one_cycle(opt, accum):
    big = fit(make_learner(32, opt_func=opt_funcs[opt]), method='fit_one_cycle')
    small = fit(make_learner(8, opt_func=opt_funcs[opt], cbs=accum(32)), method='fit_one_cycle')
    assert_moved(big)
    assert_same(weights(small), weights(big), ROUNDING)
    for o in 'lrs','iters': assert_same(getattr(small.recorder, o), getattr(big.recorder, o), ROUNDING)
    for o in 'lr','mom': assert_same(small.recorder.hps[o], big.recorder.hps[o], ROUNDING)
    assert_same(losses(small), losses(big), FLOAT32)
    assert_same(floats(small.recorder.values), floats(big.recorder.values), FLOAT32)
    assert len(losses(small)) == 9 and small.recorder.accum_bs == [32]*9

@pytest.mark.parametrize('n', [96, 100, 93])
@pytest.mark.parametrize('bs', [7, 8])
def test_a_window_of_one_micro_batch_is_no_accumulation(n, bs):
    "Bit for bit, float32, short last micro-batch included"
    def run(cbs):
        learn = make_learner(bs, n=n, m=model().float(), opt_func=Adam, cbs=cbs, loss_func=MSELossFlat())
        return fit(learn, method='fit_one_cycle')
    a,b = run(None),run(GradientAccumulation(bs))
    assert_same(weights(b), weights(a))
    assert_same(losses(b), losses(a))
    assert_same(b.recorder.lrs, a.recorder.lrs)
    assert floats(a.recorder.values) == floats(b.recorder.values) and len(a.recorder.values) == 3
    assert b.gradient_accumulation.opt_steps == len(losses(a)) == 3*-(-n//bs)

@draws
@given(n=st.integers(1, 60), micro=st.integers(1, 9), k=st.integers(1, 6), n_epoch=st.integers(1, 3), drop_last=st.booleans(),
       remainder=st.sampled_from(['step','carry','drop']), opt=st.sampled_from(sorted(torch_opts)), cosine=st.booleans())
def test_any_shape(n, micro, k, n_epoch, drop_last, remainder, opt, cosine):
    "Samples, micro-batch, window, remainder, epochs, optimizer and learning rate as they come"
    if drop_last and n < micro: return
    lr = SchedCos(0.02, 0.001) if cosine else lambda pct: 0.01  # small enough that rounding does not grow
    steps = windows(n, micro, k*micro, remainder, n_epoch, drop_last)
    if not steps and remainder == 'drop': return  # an error: see test_bad_input
    expected,expected_losses = reference(steps, n, torch_opts[opt], lr)
    learn = make_learner(micro, n=n, drop_last=drop_last, opt_func=opt_funcs[opt], cbs=GradientAccumulation(k*micro, remainder=remainder))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', UserWarning)  # no step in the whole fit: said, and counted below
        fit(learn, n_epoch, cbs=ParamScheduler({'lr':lr}))
    assert_same(weights(learn), expected, ROUNDING)
    assert learn.recorder.accum_bs == [len(idxs) for idxs,_ in steps]
    assert learn.gradient_accumulation.opt_steps == len(steps) == len(losses(learn))
    assert_same(learn.recorder.lrs, [lr(pct) for _,pct in steps], ROUNDING)
    assert_same(losses(learn), smoothed(expected_losses), 1e-5)
    assert all((g == 0).all() for g in grads(learn))

def test_what_each_remainder_steps_on():
    "44 samples an epoch, micro-batches of 8, windows of 16, two epochs"
    sizes = dict(step=[16,16,12]*2, carry=[16,16,20,16,16], drop=[16,16]*2)
    for remainder,expected in sizes.items():
        learn = fit(make_learner(8, n=44, cbs=GradientAccumulation(16, remainder=remainder)), 2)
        assert learn.recorder.accum_bs == expected

def test_drop_keeps_a_complete_last_window():
    learn = fit(make_learner(8, n=96, drop_last=True, cbs=GradientAccumulation(32, remainder='drop')), 1)
    assert learn.recorder.accum_bs == [32]*3
    big = fit(make_learner(32, n=100, drop_last=True), 2)
    small = fit(make_learner(8, n=100, cbs=GradientAccumulation(32, remainder='drop')), 2)
    assert_same(weights(small), weights(big), ROUNDING)

def test_a_short_epoch_ends_just_the_same():
    "7 of 12 micro-batches: a full window, and a remainder of three"
    for remainder,expected in dict(step=[32,24]*2, drop=[32]*2, carry=[32,32,32]).items():
        cbs = [GradientAccumulation(32, remainder=remainder), ShortEpochCallback(pct=6/12, short_valid=False)]
        learn = fit(make_learner(8, cbs=cbs), 2)
        assert learn.gradient_accumulation.opt_steps == len(expected)
        assert learn.recorder.accum_bs == expected

def test_weights_move_only_at_the_end_of_a_window():
    class Probe(Callback):
        order = 99
        def before_fit(self): self.seen = []
        def after_batch(self):
            if self.training: self.seen.append(weights(self.learn))
    learn = fit(make_learner(8, cbs=[GradientAccumulation(32), Probe()]), 2, method='fit_one_cycle')
    seen = [weights(model())] + learn.probe.seen
    moved = [not torch.equal(a, b) for a,b in zip(seen, seen[1:])]
    assert moved == [False,False,False,True]*6

@pytest.mark.parametrize('order', [0, 6, 99])
def test_step_callbacks_act_once_a_window_on_its_gradient(order):
    class Probe(Callback):
        def before_fit(self): self.grads,self.after = [],0
        def before_step(self): self.grads.append(torch.cat([p.grad.flatten().clone() for p in self.model.parameters()]))
        def after_step(self): self.after += 1
    Probe.order = order
    big,small = (fit(make_learner(bs, cbs=[Probe(),*cbs]), 2) for bs,cbs in ((32, []), (8, [GradientAccumulation(32)])))
    assert small.probe.after == len(small.probe.grads) == 6
    assert_same(torch.stack(small.probe.grads), torch.stack(big.probe.grads), ROUNDING)

@pytest.mark.parametrize('order', [0, 9])
def test_a_callback_that_changes_the_batch(order):
    "Samples are those of the loader, whether the batch is doubled before or after the accumulation sees it"
    class TwoViews(Callback):
        run_valid = False
        def before_batch(self): self.learn.xb,self.learn.yb = (torch.cat([self.x, self.x*.9]),),(torch.cat([self.y, self.y]),)
    TwoViews.order = order
    big,small = (fit(make_learner(bs, cbs=[TwoViews(), *cbs]), 2) for bs,cbs in ((32, []), (8, [GradientAccumulation(32)])))
    assert small.recorder.accum_bs == [32]*6
    assert_same(weights(small), weights(big), ROUNDING)

def test_gradient_clip():
    big = fit(make_learner(32, cbs=GradientClip(0.1)))
    small = fit(make_learner(8, cbs=[GradientAccumulation(32), GradientClip(0.1)]))
    assert (weights(big)-weights(fit(make_learner(32)))).abs().max() > 1e-3
    assert_same(weights(small), weights(big), ROUNDING)

def test_num_items():
    "A loss that averages over the targets above 0 only"
    def positive(pred, targ): return ((pred-targ)**2)[targ>0].mean().float()
    def n_positive(learn): return int((learn.y>0).sum())
    big = fit(make_learner(32, loss_func=positive))
    for num_items in n_positive, lambda learn: (learn.y>0).sum():
        small = fit(make_learner(8, loss_func=positive, cbs=GradientAccumulation(32, num_items=num_items)))
        assert_same(weights(small), weights(big), 1e-6 if num_items is not n_positive else ROUNDING)
        assert_same(losses(small), losses(big), FLOAT32)
    assert (weights(fit(make_learner(8, loss_func=positive, cbs=GradientAccumulation(32))))-weights(big)).abs().max() > 1e-3

@pytest.mark.parametrize('kind', [int, tensor])
def test_a_window_without_items(kind):
    "The first window has no item: no step, one warning, no NaN"
    def late(pred, targ): return ((pred-targ)**2)[pred.new_tensor([learn.iter >= 4]*len(pred)).bool()].mean().float()
    learn = make_learner(8, loss_func=late, cbs=GradientAccumulation(32, num_items=lambda o: kind(8*(o.iter >= 4))))
    learn.add_cb(Callback(before_validate=lambda self: stop(CancelValidException())))
    with pytest.warns(UserWarning, match='no item in a whole window'): fit(learn, 1)
    assert learn.gradient_accumulation.opt_steps == len(losses(learn)) == 2
    assert not weights(learn).isnan().any() and not np.isnan(losses(learn)).any()
    expected,_ = reference(windows(96, 8, 32, 'step', 1)[1:], 96, sgd)
    assert_same(weights(learn), expected, ROUNDING)
