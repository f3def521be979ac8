"A batch that changes: its sizes, its steps, its preview, and the rules that scale hyper-parameters with it"
import pickle
import pytest
from hypothesis import given, strategies as st

from common import *

def sizes(learn): return learn.recorder.accum_bs

def scheduled(*args, start_epoch=0, **kwargs):
    "A fit of 4 epochs under a schedule"
    return fit(make_learner(8, n=128, cbs=GradientAccumulationSchedule(*args, **kwargs)), 4, start_epoch=start_epoch)

def by_epoch(size_at, n, remainder, n_epoch, drop_last=False, bs=8):
    "Of each epoch the windows that end in it, as (position, samples): each asks `size_at` when its first batch comes"
    res,window,n = [],[],n//bs*bs if drop_last else n
    for epoch in range(n_epoch):
        done,at_end = [],remainder == 'step' or remainder == 'carry' and epoch == n_epoch-1
        for i in range(0, n, bs):
            if not window: pct = (epoch+i/n)/n_epoch
            window += range(i, min(i+bs, n))
            if len(window) >= size_at(pct) or at_end and i+bs >= n:
                done.append((pct, window))
                window = []
        if remainder == 'drop': window = []
        res.append(done)
    return res

# A plain Learner whose batch sampler yields these sizes

class Batches:
    "A batch sampler that yields these batches, others in each epoch"
    def __init__(self, epochs): self.epochs = epochs
    def __len__(self): return len(self.epochs[0])
    def __iter__(self): return iter(self.epochs.pop(0))

def plain(epochs, n, sched):
    "A fit without our callbacks, each window as one batch, with the rate of `sched` at its position"
    positions = [pct for done in epochs for pct,_ in done]
    def set_lr(self): self.training and self.opt.set_hyper('lr', sched(positions.pop(0)))
    learn,batches = make_learner(8, n=n, cbs=Callback(before_batch=set_lr)),[[o for _,o in done] for done in epochs]
    train = torch.utils.data.DataLoader(learn.dls.train.dataset, batch_sampler=Batches(batches))
    learn.dls = DataLoaders(train, learn.dls.valid)
    return fit(learn, len(epochs))

annealers = dict(
    cos=SchedCos, lin=SchedLin, exp=SchedExp, jumps=lambda a,b: lambda pos: a if pos < 1/3 else (a+b)/2,
    combined=lambda a,b: combine_scheds([.5,.5], [SchedLin(a, 32), SchedCos(32, b)]))

@pytest.mark.thin(11)
@pytest.mark.parametrize('name', annealers)
@pytest.mark.parametrize('remainder', ['step', 'drop', 'carry'])
@pytest.mark.parametrize('n,drop_last', [(128, False), (124, False), (124, True)])
@pytest.mark.parametrize('ends', [(16, 64), (64, 16)])
def test_a_fit_is_that_of_a_learner_with_these_batches(ends, n, drop_last, remainder, name):
    "The same samples in each step of each epoch, learning rates, losses and weights; and the preview says so before"
    (a,b),sched = ends,SchedCos(.1, .01)
    def size_at(pct):
        size = annealers[name](a, b)(min(max(pct-.25, 0)*2, 1))
        return b if pct >= .75 else int(size/8 + .5+1e-9)*8  # the nearest
    epochs = by_epoch(size_at, n, remainder, 5, drop_last)
    accum = GradientAccumulationSchedule(a, b, .25, .75, annealers[name], remainder=remainder)
    learn = make_learner(8, n=n, cbs=[accum, ParamScheduler(dict(lr=sched))], drop_last=drop_last)
    preview,planned = accum.preview(5, learn.dls),[(pct*5, len(idxs)) for done in epochs for pct,idxs in done]
    fit(learn, 5)
    assert sizes(learn) == [size for _,size in preview] == [size for _,size in planned]
    assert_same([o for o,_ in preview], [o for o,_ in planned], 1e-9)
    assert len(set(sizes(learn))) > 2 and preview[0][0] == 0
    whole = plain(epochs, n, sched)
    assert_same(weights(learn), weights(whole), ROUNDING)
    assert_moved(learn)
    assert_same(learn.recorder.lrs, whole.recorder.lrs, ROUNDING)
    assert_same(losses(learn), losses(whole), 1e-6)  # in float32
    assert_same(floats(learn.recorder.values), floats(whole.recorder.values), 1e-6)

def test_int_counts_epochs_and_float_is_a_fraction():
    with pytest.warns(match='=1 means after 1 of the 4'):
        assert sizes(scheduled(16, 64, start=1, finish=1)) == [16]*8 + [64]*6
    assert sizes(scheduled(16, 64, start=.25, finish=.25)) == [16]*8 + [64]*6
    assert sizes(scheduled(64, 8, start=4, finish=1.0)) == [64]*8
    assert sizes(scheduled(16, 64, start=1, finish=3)) == sizes(scheduled(16, 64, start=.25, finish=.75))

@pytest.mark.parametrize('n_epoch,name,kwargs', [
    (4, 'finish', dict(finish=1)), (4, 'start', dict(start=1, finish=.5)), (1, None, dict(finish=1)),
    (4, None, dict(finish=1.)), (4, None, dict(start=1, finish=2)), (4, None, SchedSteps({0: 16, 1: 64}))])
def test_a_one_warns_which_it_is(n_epoch, name, kwargs):
    "1 epoch or, as 1.0, all of training: in each fit, and not while a learning rate is looked for"
    learn = make_learner(8, cbs=GradientAccumulationSchedule(**dict(start_accum_bs=16, final_accum_bs=64)|kwargs))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter('always')
        with learn.no_bar(): learn.lr_find(num_it=20, show_plot=False)
        before = len(warned)
        for _ in range(2): fit(learn, n_epoch)
    says = f'{name}=1 means after 1 of the {n_epoch} epochs; {name}=1.0 means the end of training'
    said = [(i >= before, str(o.message)) for i,o in enumerate(warned) if 'end of training' in str(o.message)]
    assert said == [(True, says)]*2*bool(name)

def test_a_resumed_fit_has_the_same_sizes():
    whole,resumed = (sizes(scheduled(16, 64, finish=.9, remainder='step', start_epoch=o)) for o in (0, 2))
    assert resumed == whole[-len(resumed):] and (sum(resumed), sum(whole)) == (2*128, 4*128)

def test_the_last_window_is_carried_unless_a_model_carries_a_state():
    "By default; and that is what the preview says"
    class Stateful(nn.Sequential):
        def reset(self): pass
    for kind,expected in (nn.Sequential, [48]*5), (Stateful, [48, 48, 24]*2):
        accum = GradientAccumulationSchedule(48, 48)
        learn = make_learner(8, n=120, m=kind(*model()), cbs=accum)
        preview = [o for _,o in accum.preview(2, learn.dls)]
        assert preview == sizes(fit(learn, 2)) == expected

scheds = st.sampled_from([SchedCos, SchedLin, SchedExp, SchedNo])

@draws
@given(a=st.integers(1, 9), b=st.integers(1, 9), bs=st.integers(1, 33), start=st.floats(0, 1), width=st.floats(0, 1),
       pct=st.floats(0, 1), sched=scheds)
def test_any_size_is_a_multiple_between_the_ends(a, b, bs, start, width, pct, sched):
    finish = min(1., start+width)
    size = GradientAccumulationSchedule(a*bs, b*bs, start, finish, sched).size_at(pct, n_epoch=1, loader_bs=bs)
    assert size%bs == 0 and min(a, b)*bs <= size <= max(a, b)*bs
    if pct >= finish: assert size == b*bs
    if pct < start-1e-5: assert size == a*bs

# The preview

@draws
@given(a=st.integers(1, 9), b=st.integers(1, 9), start=st.floats(0, 1), width=st.floats(0, 1), n=st.integers(8, 80),
       n_epoch=st.integers(1, 3), remainder=st.sampled_from(['step', 'drop', 'carry']), sched=scheds)
def test_any_preview_is_what_training_does(a, b, start, width, n, n_epoch, remainder, sched):
    "In a second fit, too, which starts over"
    accum = GradientAccumulationSchedule(a*8, b*8, start, min(1., start+width), sched, remainder=remainder)
    learn = make_learner(8, n=n, cbs=accum)
    preview = [size for _,size in accum.preview(n_epoch, learn.dls)]
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # no window was filled
        for _ in range(2): assert preview == sizes(fit(learn, n_epoch))

class Untouchable:
    "So many samples, of which none can be loaded"
    def __init__(self, n): self.n = n
    def __len__(self): return self.n

@pytest.mark.parametrize('dl', [DataLoader, lambda o, bs: torch.utils.data.DataLoader(o, bs)])
def test_preview_of_millions_of_samples(dl):
    "As many bytecodes a window for a million loader batches as for a thousand; and nothing is left behind"
    def run(n):
        accum,count,tracer = GradientAccumulationSchedule(n//100, n//10, finish=1., remainder='step'),0,sys.gettrace()
        dls,before = DataLoaders(dl(Untouchable(n), bs=1)),{**vars(accum)}
        def trace(frame, event, arg):
            nonlocal count
            frame.f_trace_opcodes,count = True,count + (event == 'opcode')
            return trace
        sys.settrace(trace)
        try: windows = accum.preview(4, dls)
        finally: sys.settrace(tracer)
        assert sum(size for _,size in windows) == 4*n and vars(accum) == before
        return count/len(windows)
    assert 100 < run(1_000_000) < 1.05*run(1000)

def test_plot_shows_the_preview():
    accum = GradientAccumulationSchedule(16, 64, finish=.9)
    learn = make_learner(8, n=128, cbs=accum)
    positions,planned = zip(*accum.preview(4, learn.dls))
    ax = accum.plot(4, learn.dls)
    data = ax.patches[0].get_data()
    assert (*data.values,) == planned and (*data.edges,) == (*positions, 4)
    assert (ax.get_title(), ax.get_xlabel()) == (f'{len(planned)} optimizer steps', 'epochs')

def test_preview_refuses_what_training_refuses():
    dls = make_learner(8, n=24).dls
    for args in (20, 64), (16, 64, 0, 3), (16, 64, 2, .1):
        accum = GradientAccumulationSchedule(*args)
        with pytest.raises(ValueError) as preview: accum.plot(2, dls)
        with pytest.raises(ValueError) as training: fit(make_learner(8, cbs=accum), 2)
        assert str(preview.value) in str(training.value)
    assert GradientAccumulationSchedule(64, 64, remainder='drop').plot(2, dls).get_title() == '0 optimizer steps'

# Rules for hyper-parameters, against loops by hand

rules = dict(lr=sqrt_scale, mom=half_life_scale)

def jump(scale=None): return GradientAccumulationSchedule(16, 64, start=.5, finish=.5, scale=scale)

def loop(opt, m, set_hypers):
    "Weights after 4 epochs, one batch a window, each after `set_hypers(group, position, ratio)`"
    x,y = data(128)
    for pct,idxs in sum(by_epoch(lambda pct: 16 if pct < .5 else 64, 128, 'step', 4), []):
        for g in opt.param_groups: set_hypers(g, pct, len(idxs)//16)
        opt.zero_grad()
        ((m(x[idxs])-y[idxs])**2).mean().backward()
        opt.step()
    return weights(m)

torch_sgd = partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=.9))

@pytest.mark.parametrize('opt_func', [torch_sgd, partial(SGD, mom=.9)])
def test_scaled_rate_and_momentum(opt_func):
    "Beside a scheduler of both"
    sched,lrs,m = dict(lr=SchedCos(.1, .01), mom=SchedLin(.9, .8)),[],model()
    learn = fit(make_learner(8, n=128, cbs=[jump(rules), ParamScheduler(sched)], opt_func=opt_func), 4)
    def set_hypers(g, pct, ratio):
        g.update(lr=sched['lr'](pct)*ratio**.5, momentum=sched['mom'](pct)**ratio)
        lrs.append(g['lr'])
    assert_same(weights(learn), loop(torch.optim.SGD(m.parameters(), lr=.1), m, set_hypers), 1e-9)  # rounding adds up
    assert_same(learn.recorder.lrs, lrs, 1e-12)
    assert_moved(learn)

def test_scaled_weight_decay():
    "fastai's Adam with a scaled `wd` is PyTorch's AdamW whose weight decay is multiplied where the batch is"
    scale,m = dict(lr=sqrt_scale, wd=linear_scale),model()
    learn = make_learner(8, n=128, cbs=jump(scale), opt_func=partial(Adam, sqr_mom=.99, eps=1e-5))
    fit(learn, 4, .01, wd=.3)
    groups = [dict(params=[p for p in m.parameters() if (p.ndim > 1) is o], decay=.3*o) for o in (True, False)]
    def set_hypers(g, pct, ratio): g.update(lr=.01*ratio**.5, weight_decay=g['decay']*ratio)
    assert_same(weights(learn), loop(torch.optim.AdamW(groups, betas=(.9, .99), eps=1e-5), m, set_hypers), 1e-9)
    assert_moved(learn)

@pytest.mark.parametrize('opt_func', [Adam, partial(OptimWrapper, opt=torch.optim.AdamW)])
def test_a_scaled_value_is_in_the_optimizer_for_the_step_alone(opt_func):
    seen = {o:[] for o in ('before_batch', 'before_step', 'after_step', 'after_batch')}
    def note(event): return lambda self: self.training and seen[event].append(self.opt.hypers[0]['sqr_mom'])
    probe = Callback(**{o:note(o) for o in seen})
    learn = fit(make_learner(8, n=128, cbs=[jump(dict(sqr_mom=half_life_scale)), probe], opt_func=opt_func), 4)
    beta = learn.opt.hypers[0]['sqr_mom']
    assert beta in (.99, .999)
    assert_same(seen['before_step'], [beta]*16 + [beta**4]*4)
    for o in 'before_batch', 'after_step', 'after_batch': assert set(seen[o]) == {beta} and len(seen[o]) >= 20

def test_the_ratio_is_of_the_samples_in_the_step():
    "Of a short window, too, down to less than the start; and nothing compounds over fits with rates of their own"
    accum = GradientAccumulationSchedule(16, 64, finish=.9, schedule=SchedLin, scale=rules, remainder='step')
    learn = make_learner(8, n=124, cbs=accum)
    for lr in .1,.1,.03:
        fit(learn, 4, lr=lr)
        assert len(set(sizes(learn))) > 4 and min(sizes(learn)) < 16 and learn.opt.hypers[0]['lr'] == lr
        assert_same(learn.recorder.lrs, [lr*(o/16)**.5 for o in sizes(learn)], ROUNDING)

@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'before_step', 'after_step', 'after_batch'])
def test_an_interrupt_leaves_no_scaled_value_for_the_next_fit(event):
    def strike(self):
        if self.train_iter == 18: raise KeyboardInterrupt  # at the larger size
    learn = make_learner(8, n=128, cbs=jump(dict(mom=half_life_scale)), opt_func=partial(SGD, mom=.9))
    with pytest.raises(KeyboardInterrupt): fit(learn, 4, cbs=Callback(**{event:strike}))
    assert fit(learn, 4).opt.hypers[0]['mom'] == .9

def test_lr_find_has_the_starting_size_and_rate():
    def found(*args):
        learn = make_learner(*args)
        with learn.no_bar(): return learn.lr_find(num_it=20, show_plot=False),learn.recorder.lrs
    assert found(8, 96, jump()) == found(8, 96, jump(rules)) == found(16, 96)

@pytest.mark.parametrize('scale,kind,words', [
    (dict(learning_rate=sqrt_scale), ValueError, "no hyper-parameter 'learning_rate'.*'lr'"),
    (sqrt_scale, TypeError, 'must be a dict'), (dict(lr=2.), TypeError, r'scale\[.lr.\] must be a rule'),
    (dict(lr=lambda value,ratio: None), TypeError, 'must return a number')])
def test_bad_rules(scale, kind, words):
    learn = make_learner(8, cbs=jump(scale))
    with pytest.raises(kind, match=words): fit(learn)
    assert_same(weights(learn), weights(model()))

# Steps

@draws
@given(points=st.lists(st.integers(1, 15), min_size=0, max_size=4, unique=True),
       values=st.lists(st.integers(1, 9), min_size=5, max_size=5), epochs=st.booleans())
def test_any_steps(points, values, epochs):
    "At each position the size of the last point before it; also after pickle"
    steps = {0:values[0]*8} | {(o if epochs else o/16):v*8 for o,v in zip(points, values[1:])}
    accum = GradientAccumulationSchedule(**pickle.loads(pickle.dumps(SchedSteps(steps))))
    by_hand = {o/16 if epochs else o:v for o,v in steps.items()}
    for pct in np.arange(64)/64:
        assert accum.size_at(pct, n_epoch=16, loader_bs=8) == by_hand[max(o for o in by_hand if o <= pct)]

def test_steps_in_a_fit():
    def steps(o): return sizes(scheduled(**SchedSteps(o)))
    assert steps({0: 16, .5: 32, .75: 64}) == steps({3: 64, 0: 16, 2: 32}) == [16]*16 + [32]*4 + [64]*2
    assert steps({0: 32}) == [32]*16 and steps({0: 64, 2: 32}) == [64]*4 + [32]*8
    with pytest.raises(ValueError, match='outside'): steps({0: 16, 2: 32, 5: 64})
    for point,bad in (.5, {0: 16, .5: 20, .75: 64}), (1, {0: 16, 2: 32, 1: 20}), (0, {0: 20, .5: 32}):
        with pytest.raises(ValueError, match=rf'steps\[{point}\]=20 .*is not a multiple'): steps(bad)

@pytest.mark.parametrize('steps,words', [
    ({.5: 64}, 'begins at 0'), ([64], 'must be a dict'), ({0: 64, .5: 128, 3: 8}, 'not both'),
    ({0: 64, 1.5: 128}, '0.0 to 1.0'), ({0: 64, -1: 128}, 'an int from 0'), ({0: 64, .5: 0}, r'steps\[0.5\]'),
    ({0: 64, 'x': 8}, 'must be a float')])
def test_bad_steps(steps, words):
    with pytest.raises((TypeError, ValueError), match=words): SchedSteps(steps)

@pytest.mark.parametrize('kwargs,sizes', [
    (dict(start=0, finish=0), [64]*4), (dict(finish=1., schedule=lambda a, b: lambda pos: 40), [40]*6+[16])])
def test_rules_compare_with_the_starting_size(kwargs, sizes):
    "Also where no step has it"
    learn = make_learner(8, n=256, cbs=GradientAccumulationSchedule(16, 64, scale={'lr':linear_scale}, **kwargs))
    fit(learn, 1)
    assert learn.recorder.accum_bs == sizes
    assert_same(learn.recorder.lrs, [.1*n/16 for n in sizes], 1e-12)

@pytest.mark.parametrize('event', ['after_step','after_batch'])
def test_rules_end_with_their_callback(event):
    "The Recorder logs the optimizer's own rate again"
    def remove(self): self.learn.remove_cb(accum)
    accum = GradientAccumulationSchedule(8, 32, finish=0, scale={'lr':linear_scale})
    learn = fit(make_learner(8, cbs=accum), 1, cbs=Callback(**{event:remove}))
    fit(learn, 1, .01)
    assert {*learn.recorder.lrs} == {.01}
