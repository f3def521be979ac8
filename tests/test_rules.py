"Rules for hyper-parameters when the batch changes, and steps: against hand-computed numbers and a hand-written loop"
import pickle
import pytest
from hypothesis import given, strategies as st

from common import *

rules = dict(lr=sqrt_scale, mom=half_life_scale)

def test_rules_by_hand():
    assert [linear_scale(.1, o) for o in (.5, 1, 4)] == [.05, .1, .4]
    assert [sqrt_scale(.1, o) for o in (.25, 1, 4)] == [.05, .1, .2]
    assert_same([half_life_scale(.9, o) for o in (.5, 1, 2, 4)], [.9486832980505138, .9, .81, .6561], 1e-12)

def jump(scale=None, **kwargs): return GradientAccumulationSchedule(16, 64, start=.5, finish=.5, remainder='carry', scale=scale, **kwargs)

def torch_opt(params, lr=.1, **kwargs):
    return OptimWrapper(params, partial(torch.optim.SGD, momentum=.9, dampening=0., nesterov=False), lr=lr)

def by_hand(n_epoch, lr_at, mom_at, scaled):
    "The weights and learning rates of a plain PyTorch loop: SGD with momentum, one batch a window"
    m,(x,y),lrs = model(),data(128),[]
    opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9)
    for idxs,pct in windows(128, 8, lambda pct: 16 if pct < .5 else 64, 'carry', n_epoch):
        k = (1 if pct < .5 else 4) if scaled else 1
        opt.param_groups[0].update(lr=lr_at(pct)*k**.5, momentum=mom_at(pct)**k)
        opt.zero_grad()
        ((m(x[idxs])-y[idxs])**2).mean().backward()
        opt.step()
        lrs.append(opt.param_groups[0]['lr'])
    return weights(m), lrs

@pytest.mark.parametrize('opt_func', [torch_opt, partial(SGD, mom=.9)])
@pytest.mark.parametrize('scheduled', [False, True])
def test_a_fit_equals_a_loop_by_hand(opt_func, scheduled):
    sched = dict(lr=SchedCos(.1, .01), mom=SchedLin(.9, .8)) if scheduled else dict(lr=SchedNo(.1, .1), mom=SchedNo(.9, .9))
    def fitted(scale):
        learn = make_learner(8, n=128, cbs=[jump(scale), *([ParamScheduler(sched)] if scheduled else [])], opt_func=opt_func)
        if not scheduled: learn.create_opt(); learn.opt.set_hyper('mom', .9)
        return fit(learn, 4)
    for scale in None, rules:
        learn = fitted(scale)
        ws,lrs = by_hand(4, sched['lr'], sched['mom'], scale)
        assert_moved(learn)
        assert_same(learn.recorder.lrs, lrs, 1e-12)
        assert_same(weights(learn), ws, 1e-9)  # momentum adds the rounding of many steps up
    assert (by_hand(4, sched['lr'], sched['mom'], False)[0]-ws).abs().max() > 1e-3

def test_adams_second_moment():
    class Probe(Callback):
        order = MixedPrecision.order
        def before_fit(self): self.seen = []
        def before_step(self): self.seen.append(self.opt.hypers[0]['sqr_mom'])
    for opt_func in Adam, partial(OptimWrapper, opt=torch.optim.AdamW):
        learn = make_learner(8, n=128, cbs=[jump(dict(sqr_mom=half_life_scale)), Probe()], opt_func=opt_func)
        fit(learn, 4)
        beta = learn.opt.hypers[0]['sqr_mom']
        assert beta in (.99, .999)
        assert_same(learn.probe.seen, [beta]*16 + [beta**4]*4)

# Weight decay and averages of the weights

@pytest.mark.parametrize('scale,lr,wd', [({'wd':linear_scale}, 1, 4), (dict(lr=sqrt_scale, wd=sqrt_scale), 2, 2)])
def test_weight_decay(scale, lr, wd):
    "fastai's Adam with a scaled `wd` is PyTorch's AdamW whose weight decay is multiplied where the batch is; a weight without a gradient loses as much by the sample as before"
    learn = make_learner(8, n=128, cbs=jump(scale), opt_func=partial(Adam, sqr_mom=.99, eps=1e-5))
    with quiet(learn): learn.fit(4, .01, wd=.3)
    m,(x,y) = model(),data(128)
    bias = [p for p in m.parameters() if p.ndim == 1]
    opt = torch.optim.AdamW([dict(params=[p for p in m.parameters() if p.ndim > 1]), dict(params=bias)], lr=.01, betas=(.9, .99), eps=1e-5)
    for idxs,pct in windows(128, 8, lambda pct: 16 if pct < .5 else 64, 'carry', 4):
        large = pct >= .5
        for g,decay in zip(opt.param_groups, (.3, 0.)): g.update(lr=.01*(lr if large else 1), weight_decay=decay*(wd if large else 1))  # fastai leaves biases alone
        opt.zero_grad()
        ((m(x[idxs])-y[idxs])**2).mean().backward()
        opt.step()
    assert_same(weights(learn), weights(m), 1e-9)
    assert_moved(learn)
    assert learn.opt.hypers[0]['wd'] == .3 and lr*wd == 4

class EMA(Callback):
    "An average of the weights, as users write it"
    def __init__(self, decay, start=None): self.decay,self.start = decay,start
    def before_fit(self): self.average = [p.detach().clone() if self.start is None else torch.full_like(p, self.start) for p in self.model.parameters()]
    def after_step(self):
        for a,p in zip(self.average, self.model.parameters()): a.lerp_(p.detach(), 1-self.decay)

@pytest.mark.parametrize('kwargs', [{}, dict(micro_batch_size=8)])
def test_an_average_of_the_weights_is_the_large_batchs(kwargs):
    "Updated once a window, also where that is left over at the end of the epoch"
    big = fit(make_learner(32, n=112, cbs=EMA(.9), opt_func=Adam))
    small = fit(make_learner(32 if kwargs else 8, n=112, cbs=[GradientAccumulation(32, remainder='step', **kwargs), EMA(.9)], opt_func=Adam))
    for a,b,p in zip(small.ema.average, big.ema.average, big.model.parameters(), strict=True):
        assert_same(a, b, 1e-9)
        assert (b-p).abs().max() > 1e-3

def test_half_life_of_an_average_of_the_weights():
    "Weights that stay where they are, and an average that starts elsewhere: after as many samples it is as far, with a decay for the larger batch"
    def after(accum, decay): return torch.cat([o.flatten() for o in fit(make_learner(8, n=128, cbs=[GradientAccumulation(accum), EMA(decay, 1.)]), 1, 0.).ema.average])
    assert_same(after(64, half_life_scale(.9, 4)), after(16, .9), 1e-12)
    assert (after(64, .9)-after(16, .9)).abs().max() > .1

def test_nothing_compounds():
    "Over many sizes, two fits, and what is set in between"
    learn = make_learner(8, n=128, cbs=GradientAccumulationSchedule(8, 64, finish=.9, schedule=SchedLin, scale=rules))
    for lr in .1,.1,.03:
        fit(learn, 4, lr=lr)
        assert len(set(learn.recorder.lrs)) > 4
        assert learn.opt.hypers[0]['lr'] == lr
        first_of_epoch = [sum(learn.recorder.accum_bs[:i])%128 == 0 for i in range(len(learn.recorder.accum_bs))]
        assert_same(learn.recorder.lrs[0], lr)
        assert max(learn.recorder.lrs) == pytest.approx(lr*8**.5) and any(first_of_epoch)

def test_down_to_one_micro_batch():
    learn = make_learner(8, n=128, cbs=GradientAccumulationSchedule(32, 8, start=.5, finish=.5, scale=dict(lr=sqrt_scale)))
    assert fit(learn, 4).recorder.lrs == [.1]*8 + [.05]*32
    assert learn.opt.hypers[0]['lr'] == .1

def test_an_interrupt_leaves_no_scaled_value_for_the_next_fit():
    class Interrupt(Callback):
        order = 70
        def after_batch(self):
            if self.train_iter == 56: raise KeyboardInterrupt  # after a step, before the next micro-batch
    learn = make_learner(8, n=128, cbs=[jump(dict(mom=half_life_scale)), Interrupt()], opt_func=partial(SGD, mom=.9))
    with pytest.raises(KeyboardInterrupt): fit(learn, 4)
    learn.remove_cb(Interrupt)
    fit(learn, 4)
    assert learn.opt.hypers[0]['mom'] == .9

def test_after_an_interrupt_fit_has_the_last_word():
    "A new optimizer, and a learning rate that happens to be that of the interrupted step"
    class Interrupt(Callback):
        order = 70
        def after_batch(self):
            if self.train_iter == 16: raise KeyboardInterrupt
    for opt_func in SGD,Adam:
        sched = ParamScheduler(dict(lr=lambda pos: .1 if pos < 15/64 else .05))
        learn = make_learner(8, n=128, cbs=GradientAccumulation(16), opt_func=Adam)
        with pytest.raises(KeyboardInterrupt): fit(learn, 4, cbs=[sched, Interrupt()])
        assert learn.opt.hypers[0]['lr'] == .1  # held for the step
        learn.opt_func = opt_func
        fit(learn, 1, lr=.1, reset_opt=opt_func is SGD)
        assert learn.recorder.lrs == [.1]*8

def test_lr_find_is_not_scaled():
    found = []
    for scale in None, rules:
        learn = make_learner(8, cbs=jump(scale))
        with learn.no_bar(): found.append(learn.lr_find(num_it=20, show_plot=False))
        found.append(learn.recorder.lrs)
    assert found[:2] == found[2:]

@pytest.mark.parametrize('scale, kind, words', [
    (dict(learning_rate=sqrt_scale), ValueError, "no hyper-parameter 'learning_rate'.*'lr'"), (sqrt_scale, TypeError, 'must be a dict'),
    (dict(lr=2.), TypeError, r'scale\[.lr.\] must be a rule'), (dict(lr=lambda value,ratio: None), TypeError, 'must return a number')])
def test_bad_rules(scale, kind, words):
    learn = make_learner(8, cbs=jump(scale))
    with pytest.raises(kind, match=words): fit(learn)
    assert_same(weights(learn), weights(model()))

# Steps

def sizes(**kwargs):
    learn = make_learner(8, n=128, cbs=GradientAccumulationSchedule(**kwargs, remainder='carry'))
    return fit(learn, 4).recorder.accum_bs

@draws
@given(points=st.lists(st.integers(1, 15), min_size=0, max_size=4, unique=True), values=st.lists(st.integers(1, 9), min_size=5, max_size=5),
       epochs=st.booleans())
def test_any_steps(points, values, epochs):
    "The size at every micro-batch of 16 epochs of 4, against the last point before it"
    steps = {0:values[0]*8} | {(o if epochs else o/16):v*8 for o,v in zip(points, values[1:])}
    accum = GradientAccumulationSchedule(**SchedSteps(steps))
    by_hand = {o*(1 if not epochs else 1/16):v for o,v in steps.items()}
    for i in range(64):
        pct = i/64
        assert accum.size_at(pct, n_epoch=16, loader_bs=8) == by_hand[max(o for o in by_hand if o <= pct)]

def test_steps_in_a_fit():
    expected = [16]*16 + [32]*4 + [64]*2
    assert sizes(**SchedSteps({0: 16, .5: 32, .75: 64})) == sizes(**SchedSteps({3: 64, 0: 16, 2: 32})) == expected
    assert sizes(**SchedSteps({0: 32})) == [32]*16 and sizes(**SchedSteps({0: 64, 2: 32})) == [64]*4 + [32]*8

@pytest.mark.parametrize('steps, words', [
    ({.5: 64}, 'begins at 0'), ([64], 'must be a dict'), ({0: 64, .5: 128, 3: 8}, 'not both'), ({0: 64, 1.5: 128}, '0.0 to 1.0'),
    ({0: 64, -1: 128}, 'an int from 0'), ({0: 64, .5: 0}, 'steps'), ({0: 64, 'x': 8}, 'must be a float')])
def test_bad_steps(steps, words):
    with pytest.raises((TypeError, ValueError), match=words): SchedSteps(steps)

def test_a_step_in_the_middle_must_fit_the_micro_batch():
    for steps,words in ({0: 16, .5: 20, .75: 64}, r'steps\[0.5\]=20'), ({0: 16, 2: 32, 1: 20}, r'steps\[1\]=20'), ({0: 20, .5: 32}, r'steps\[0\]=20'), ({0: 16, .5: 20}, r'steps\[0.5\]=20'):
        with pytest.raises(ValueError, match=f'{words} is not a multiple'): sizes(**SchedSteps(steps))
    with pytest.raises(ValueError, match='outside'): sizes(**SchedSteps({0: 16, 2: 32, 5: 64}))

def test_steps_survive_pickle():
    args = SchedSteps({0: 16, .5: 32, .75: 64})
    f,g = args['schedule'](16, 128),pickle.loads(pickle.dumps(args))['schedule'](16, 128)
    assert [f(o) for o in np.linspace(0, 1, 50)] == [g(o) for o in np.linspace(0, 1, 50)]
