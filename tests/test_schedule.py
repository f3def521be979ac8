"The batch-size schedule: a pure function of training progress"
import pytest
from hypothesis import given, strategies as st

from common import *

def sizes(learn): return learn.recorder.accum_bs

def scheduled(*args, n=128, n_epoch=4, remainder='carry', start_epoch=0, **kwargs):
    "A fit of 16 micro-batches an epoch under a schedule"
    learn = make_learner(8, n=n, cbs=GradientAccumulationSchedule(*args, remainder=remainder, **kwargs))
    return fit(learn, n_epoch, start_epoch=start_epoch)

def expected(size_at, n_micro, micro=8):
    "Window sizes when each window asks `size_at` its first micro-batch's fraction of training"
    res,i = [],0
    while i < n_micro:
        size = size_at(i/n_micro)
        i += size//micro
        if i <= n_micro: res.append(size)
    return res

def nearest(x, micro=8): return int((x/micro + 0.5)//1)*micro

annealers = dict(
    cos=SchedCos, lin=SchedLin, exp=SchedExp, poly=partial(SchedPoly, power=2), plain=lambda a,b: lambda pos: a+(b-a)*pos,
    jumps=lambda a,b: lambda pos: a if pos < 1/3 else (a+b)/2, combined=lambda a,b: combine_scheds([.5,.5], [SchedLin(a, 32), SchedCos(32, b)]))

@pytest.mark.parametrize('name', [o for o in annealers if o != 'jumps'])
@pytest.mark.parametrize('ends', [(16, 64), (64, 16)])
def test_any_annealer(name, ends):
    (a,b),sched = ends,annealers[name]
    learn = scheduled(a, b, 0.25, 0.75, schedule=sched)
    def size_at(pct):
        if pct < .25: return a
        return b if pct >= .75 else nearest(float(sched(a, b)((pct-.25)/.5))+1e-9)
    assert sizes(learn) == expected(size_at, 64)
    assert len(set(sizes(learn))) > 3

def test_int_counts_epochs_and_float_is_a_fraction():
    with pytest.warns(match='=1 means after 1 of the 4'):
        assert sizes(scheduled(16, 64, start=1, finish=1)) == [16]*8 + [64]*6
        assert sizes(scheduled(16, 64, start=.25, finish=.25)) == [16]*8 + [64]*6
        assert sizes(scheduled(16, 64, start=1, finish=1)) == sizes(scheduled(16, 64, start=1, finish=.25))
    assert sizes(scheduled(64, 8, start=4, finish=1.0)) == [64]*8
    assert sizes(scheduled(16, 64, start=1, finish=3)) == sizes(scheduled(16, 64, start=.25, finish=.75)) != sizes(scheduled(16, 64))

@pytest.mark.parametrize('n_epoch,name,kwargs', [
    (4, 'finish', dict(finish=1)), (2, 'finish', dict(start=1, finish=1)), (4, 'start', dict(start=1, finish=.5)),
    (1, None, dict(finish=1)), (4, None, dict(finish=1.)), (4, None, dict(start=0, finish=2)), (4, None, dict(start=1, finish=2)), (4, None, {}),
    (4, None, {k:v for k,v in SchedSteps({0: 16, 1: 64}).items() if not k.endswith('_bs')})])
def test_a_one_warns_which_it_is(n_epoch, name, kwargs):
    "1 epoch or, as 1.0, all of training: once in each fit, and not while a learning rate is looked for"
    learn = make_learner(8, cbs=GradientAccumulationSchedule(16, 64, **kwargs))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter('always')
        with learn.no_bar(): learn.lr_find(num_it=20, show_plot=False)
        assert not [o for o in warned if 'end of training' in str(o.message)]
        fit(learn, n_epoch)
        fit(learn, n_epoch)
    warned = [str(o.message) for o in warned if 'end of training' in str(o.message)]
    assert warned == ([f'{name}=1 means after 1 of the {n_epoch} epochs; {name}=1.0 means the end of training']*2 if name else [])

def test_ties_go_up():
    def at(pct): return GradientAccumulationSchedule(16, 64, 0., 1., SchedLin).size_at(pct, n_epoch=1, loader_bs=16)
    assert [at(o) for o in (0., 1/6-1e-4, 1/6, .5, 5/6-1e-4, 5/6, 1.)] == [16, 16, 32, 48, 48, 64, 64]

@pytest.mark.parametrize('remainder', ['step', 'drop', 'carry'])
def test_second_fit_starts_over(remainder):
    learn = scheduled(16, 64, remainder=remainder)
    first = sizes(learn)
    assert first == sizes(fit(learn, 4)) and first[0] == 16 and 64 in first

def test_resumed_fit_has_the_same_sizes():
    whole = sizes(scheduled(16, 64, finish=.9, remainder='step'))
    resumed = sizes(scheduled(16, 64, finish=.9, remainder='step', start_epoch=2))
    assert resumed == whole[-len(resumed):]
    assert sum(resumed) == 2*128 and sum(whole) == 4*128

def test_preview_resolves_the_default_remainder_as_training_does():
    "`remainder=None` is 'drop' for a loader that drops its last batch, else 'step'"
    for drop_last,n in (False, 20), (True, 24):
        learn = make_learner(8, n=n, drop_last=drop_last, cbs=GradientAccumulationSchedule(16, 16, remainder=None))
        planned = [o for _,o in learn.gradient_accumulation_schedule.preview(2, learn.dls)]
        fit(learn, 2)
        assert planned == sizes(learn) and len(planned) == (4 if not drop_last else 2)

def test_the_windows_size_is_the_current_one():
    class Probe(Callback):
        order = 7
        def before_fit(self): self.seen = []
        def before_step(self): self.seen.append(self.learn.gradient_accumulation_schedule.window.size)
    learn = make_learner(8, n=128, cbs=[GradientAccumulationSchedule(16, 64, remainder='carry'), Probe()])
    fit(learn, 4)
    assert learn.probe.seen == sizes(learn)

@draws
@given(a=st.integers(1, 9), b=st.integers(1, 9), micro=st.integers(1, 33), start=st.floats(0, 1), width=st.floats(0, 1),
       pct=st.floats(0, 1), sched=st.sampled_from([SchedCos, SchedLin, SchedExp, SchedNo]))
def test_size_is_a_multiple_between_the_ends(a, b, micro, start, width, pct, sched):
    finish = min(1., start+width)
    size = GradientAccumulationSchedule(a*micro, b*micro, start, finish, sched).size_at(pct, n_epoch=1, loader_bs=micro)
    assert size % micro == 0 and min(a, b)*micro <= size <= max(a, b)*micro
    if pct >= finish: assert size == b*micro
    if pct < start-1e-5: assert size == a*micro

def test_windows_of_a_schedule_are_exact():
    "Each window as one batch, in plain PyTorch"
    learn = make_learner(8, n=128, cbs=GradientAccumulationSchedule(16, 64, finish=.6))
    fit(learn, 4)
    steps,i = [],0
    for size in sizes(learn): steps.append((list(range(i, i+size)), 0)); i = (i+size)%128
    assert i == 0 and len(steps) > 8
    assert_same(weights(learn), reference(steps, 128, sgd)[0], 1e-12)

# The preview

@pytest.mark.thin(5)
@pytest.mark.parametrize('name', annealers)
@pytest.mark.parametrize('remainder', ['step', 'drop', 'carry'])
@pytest.mark.parametrize('n,drop_last', [(128, False), (124, False), (124, True)])
def test_preview_is_what_training_does(name, remainder, n, drop_last):
    accum = GradientAccumulationSchedule(16, 64, 0.1, 0.9, schedule=annealers[name], remainder=remainder)
    learn = make_learner(8, n=n, cbs=accum, drop_last=drop_last)
    preview = accum.preview(6, learn.dls)
    fit(learn, 6)
    assert [size for _,size in preview] == sizes(learn)
    assert len(set(sizes(learn))) > (1 if name == 'jumps' else 3)
    opened = [o for o,_ in preview]
    assert opened[0] == 0 and all(a < b < 6 for a,b in zip(opened, opened[1:]))

@draws
@given(a=st.integers(1, 9), b=st.integers(1, 9), start=st.floats(0, 1), width=st.floats(0, 1), n=st.integers(8, 80), n_epoch=st.integers(1, 3),
       remainder=st.sampled_from(['step', 'drop', 'carry']), sched=st.sampled_from([SchedCos, SchedLin, SchedExp, SchedNo]))
def test_any_preview_is_what_training_does(a, b, start, width, n, n_epoch, remainder, sched):
    accum = GradientAccumulationSchedule(a*8, b*8, start, min(1., start+width), sched, remainder=remainder)
    learn = make_learner(8, n=n, cbs=accum)
    preview = [size for _,size in accum.preview(n_epoch, learn.dls)]
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # no window was filled
        assert preview == sizes(fit(learn, n_epoch))

def test_plots_show_the_preview_and_the_record():
    accum = GradientAccumulationSchedule(16, 64, finish=.9)
    learn = make_learner(8, n=128, cbs=accum)
    ax = accum.plot(4, learn.dls)
    (before,) = ax.patches
    fit(learn, 4)
    after = learn.recorder.plot_accum_bs(plt.subplots()[1])
    assert list(before.get_data().values) == sizes(learn) == list(after.patches[0].get_data().values)
    assert list(before.get_data().edges) == [*(o for o,_ in accum.preview(4, learn.dls)), 4]
    assert ax.get_title() == f'{accum.opt_steps} optimizer steps' and (ax.get_xlabel(), after.get_xlabel()) == ('epochs', 'optimizer steps')

def test_preview_loads_nothing_and_leaves_nothing():
    class Untouchable(list):
        def __getitem__(self, i): raise AssertionError('data was loaded')
    accum = GradientAccumulationSchedule(16, 64)
    before = {k:v for k,v in vars(accum).items()}
    for DL in DataLoader,torch.utils.data.DataLoader:
        dl = DL(Untouchable(range(44)), **({'bs':8} if DL is DataLoader else {'batch_size':8}))
        assert sum(size for _,size in accum.preview(3, DataLoaders(dl))) == 3*44
    assert vars(accum) == before

def test_preview_refuses_what_training_refuses():
    dls = make_learner(8).dls
    for accum in GradientAccumulationSchedule(20, 64), GradientAccumulationSchedule(16, 64, finish=3), GradientAccumulationSchedule(16, 64, 2, .1):
        with pytest.raises(ValueError) as preview: accum.plot(2, dls)
        with pytest.raises(ValueError) as training: fit(make_learner(8, cbs=accum), 2)
        assert str(preview.value) in str(training.value)

def test_preview_of_a_fit_without_a_step():
    dls = make_learner(8, n=24).dls
    accum = GradientAccumulationSchedule(64, 64, remainder='drop')
    assert accum.preview(2, dls) == [] and accum.plot(2, dls).get_title() == '0 optimizer steps'

def test_no_record_no_plot():
    learn = fit(make_learner(8, cbs=GradientAccumulationSchedule(16, 64, log_accum_batch=False)))
    with pytest.raises(ValueError, match='log_accum_batch=True'): learn.recorder.plot_accum_bs()

def test_no_fit_no_plot():
    rec = make_learner(8, cbs=GradientAccumulation(16)).recorder
    with pytest.raises(ValueError, match='has no batch sizes: fit'): rec.plot_accum_bs()

def test_an_earlier_fit_is_not_plotted():
    "The last fit, without the callback, has recorded nothing"
    learn = fit(make_learner(8, cbs=GradientAccumulation(32)), 1)
    learn.recorder.plot_accum_bs()
    learn.remove_cb(GradientAccumulation)
    fit(learn, 1)
    with pytest.raises(ValueError): learn.recorder.plot_accum_bs()
