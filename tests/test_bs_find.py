"`bs_find` and `bs_schedule`: what they find, and that the Learner is afterwards as it was"
import itertools, random
from collections import deque
import pytest
from fastprogress.fastprogress import ProgressBar
from torch.utils.data import DataLoader as TorchDataLoader

from common import *
from fastai.text.data import LMDataLoader
from fastxtend_accum.demo import digits_learner
from fastxtend_accum.snapshot import unchanged

# Everything as it was

EVENTS = ['before_fit','before_epoch','before_train','before_batch','after_pred','after_loss','before_backward','after_backward',
          'before_step','after_step','after_cancel_batch','after_batch','after_cancel_train','after_train','before_validate',
          'after_validate','after_epoch','after_fit']

class Counts(Callback):
    "Changes itself, collections and a generator of its own at every batch, and the recorder"
    def __init__(self): self.n,self.seen,self.last,self.kinds,self.sums,self.rng = 0,[],deque(maxlen=3),set(),np.zeros(2),np.random.default_rng(1)
    def after_batch(self):
        self.n += 1
        self.sums += self.n
        for f in self.seen.append,self.last.append,self.kinds.add: f(self.rng.random())
        self.learn.recorder.counted = self.n

def strike(exc, event, order):
    "A callback that raises `exc` when `event` fires for the second time; it counts where no snapshot reaches"
    times = itertools.count(1)
    def f(cb):
        if next(times) == 2: raise exc('on purpose')
    cb = Callback(**{event:f})
    cb.order = order
    return cb

def norm_model(): return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(.2), nn.Linear(8, 1))

def trained_learner(*cbs, opt_func=Adam, epochs=1):
    "With buffers, dropout, metrics, shuffled samples, and an accumulation in the middle of its callbacks"
    set_seed(3)
    ds = list(zip(*(o.float() for o in data(96))))
    dls = DataLoaders(DataLoader(ds, bs=4, shuffle=True), DataLoader(ds[:20], bs=16))
    learn = Learner(dls, norm_model(), loss_func=MSELossFlat(), opt_func=opt_func, metrics=mae,
                    cbs=[Counts(), GradientAccumulation(8), GradientNoiseScale(), GradientClip(1.), *cbs])
    learn.remove_cb(ProgressCallback)  # no_bar would put another in its place
    return fit(learn, epochs, .01) if epochs else learn

def walk(o, path='learn', seen=()):
    "All that `o` holds, by path, as comparable values: tensors as bytes, other objects by their identity and attributes"
    if id(o) in seen: return
    seen = (*seen, id(o))
    parts = {}
    if isinstance(o, Tensor):
        value = str(o.dtype),o.requires_grad,o.detach().numpy().tobytes()
        if o.is_leaf: parts = {'grad':o.grad}
    elif isinstance(o, dict): value,parts = [id(k) if isinstance(k, Tensor) else k for k in o],{str(k)[:20]:v for k,v in o.items()}
    elif isinstance(o, (list,tuple,deque,set)): value,parts = len(o),dict(enumerate(o))
    elif isinstance(o, np.ndarray): value = o.tobytes()
    elif isinstance(o, random.Random): value = o.getstate()
    elif isinstance(o, np.random.Generator): value = str(o.bit_generator.state)
    elif isinstance(o, (str,int,float,type(None))): value = repr(o)
    elif isinstance(o, (GetAttr,nn.Module,Metric,Optimizer,OptimWrapper,torch.optim.Optimizer)) or type(o).__module__.startswith('fastxtend_accum'):
        value,parts = id(o),{k:v for k,v in vars(o).items() if k not in ('dataset','learn')}
    else: value = id(o)
    yield path,value
    for k,v in parts.items(): yield from walk(v, f'{path}.{k}', seen)

def everything(learn):
    "All there is, before and after, by name"
    return dict(walk(learn), random=random.getstate(), numpy=str(np.random.get_state()), torch=torch.get_rng_state().tolist(),
                autocast=torch.is_autocast_enabled('cpu'))

def changed(a, b): return [k for k in a.keys() | b.keys() if k not in a or k not in b or a[k] != b[k]]

def assert_as_it_was(learn, before, twin):
    "Nothing has changed, and the next fit is that of a twin that was left alone"
    assert changed(everything(learn), before) == []
    for o in learn,twin: set_seed(5); fit(o, 1, .01)
    assert_same(weights(learn), weights(twin))
    assert_same(losses(learn), losses(twin))

def find(learn, sizes=(4, 8), n_epoch=.5, n_seeds=2, lr=.05, **kwargs):
    with quiet(learn): return learn.bs_find(sizes, n_epoch, n_seeds, lr, show_plot=False, **kwargs)

@pytest.mark.parametrize('opt_func', [Adam, partial(SGD, mom=.9), partial(OptimWrapper, opt=torch.optim.AdamW)])
@pytest.mark.parametrize('epochs', [0, 1])
def test_it_leaves_everything_as_it_was(opt_func, epochs):
    learn,twin = (trained_learner(MixUp(), BnFreeze(), opt_func=opt_func, epochs=epochs) for _ in range(2))
    before = everything(learn)
    assert len(set(sum(find(learn).losses.values(), []))) == 4  # it has trained: no two branches are the same
    assert_as_it_was(learn, before, twin)

def test_whatever_happens_inside():
    "More than `bs_find` does: the Recorder and the metrics take part, the body is frozen, there is another optimizer"
    learn,twin = trained_learner(),trained_learner()
    before = everything(learn)
    with pytest.raises(ZeroDivisionError), unchanged(learn):
        fit(learn, 1, 10.)
        for p in learn.model[0].parameters(): p.requires_grad_(False)
        learn.create_opt()
        learn.model[3].weight.grad = None
        del learn.recorder.losses
        assert len(changed(everything(learn), before)) > 100
        1/0
    assert_as_it_was(learn, before, twin)

def test_the_schedule_leaves_everything_as_it_was():
    learn,twin = trained_learner(),trained_learner()
    before = everything(learn)
    with quiet(learn): learn.bs_schedule((0, 1), n_epoch=.5, lr=.05, sizes=[4, 8], n_seeds=1)
    assert_as_it_was(learn, before, twin)

@pytest.mark.parametrize('event', EVENTS)
@pytest.mark.parametrize('exc,order', [(KeyboardInterrupt, -15), (KeyboardInterrupt, 7), (KeyboardInterrupt, 49), (ZeroDivisionError, 7)])
def test_everything_is_as_it_was_after_an_interrupt(exc, event, order):
    if event == 'after_backward' and order > 6: event = 'before_step'  # the accumulation has cancelled the batch by then
    learn,twin = trained_learner(),trained_learner()
    cb = strike(exc, event, order)
    learn.add_cb(cb)
    before = everything(learn)
    with pytest.raises(exc): find(learn)
    assert changed(everything(learn), before) == []
    learn.remove_cb(cb)
    assert_as_it_was(learn, everything(learn), twin)

@pytest.mark.parametrize('event', ['before_batch','after_pred','after_batch'])
def test_an_interrupt_leaves_no_autocast(event):
    "fastai's MixedPrecision is between two of its events then; the fit that follows is right only if PyTorch forgets the cast weights"
    def learner(): return fit(make_learner(4, m=model().float(), loss_func=MSELossFlat(), cbs=CpuMixedPrecision(amp_mode=AMPMode.BF16)), 1)
    learn,twin = learner(),learner()
    cb = strike(KeyboardInterrupt, event, 20)
    learn.add_cb(cb)
    with pytest.raises(KeyboardInterrupt): find(learn)
    learn.remove_cb(cb)
    assert_as_it_was(learn, everything(learn), twin)

def test_loggers_trackers_and_bars_stand_aside():
    "And nothing is written"
    learn = make_learner(4, cbs=[CSVLogger(), SaveModelCallback(), ShowGraphCallback(), EarlyStoppingCallback(patience=1), ReduceLROnPlateau()])
    learn.fit(1, .1)
    cbs,logger,files = list(learn.cbs),learn.logger,{o:o.read_bytes() for o in Path().rglob('*') if o.is_file()}
    learn.bs_find([4, 8], n_seeds=1, lr=.1)
    assert list(learn.cbs) == cbs and learn.logger == logger
    assert files == {o:o.read_bytes() for o in Path().rglob('*') if o.is_file()} and len(files) == 2

class Texts(list):
    "Documents of a few tokens each"

def test_order_of_documents():
    "LMDataLoader shuffles its documents where they are"
    ds = Texts([tensor(range(10*i, 10*i+10)).remainder(50) for i in range(40)])
    dls = DataLoaders(LMDataLoader(ds, bs=2, seq_len=8, shuffle=True), LMDataLoader(ds[:8], bs=2, seq_len=8))
    learn = Learner(dls, nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)), CrossEntropyLossFlat())
    with quiet(learn): learn.fit(1)
    before = list(dls.train.items.idxs)
    found = find(learn, n_seeds=2)
    assert found.losses[4][0] != found.losses[4][1] and list(dls.train.items.idxs) == before != sorted(before)

def test_pytorchs_data_loader_and_its_generator():
    g = torch.Generator().manual_seed(7)
    ds = list(zip(*(o.float() for o in data(96))))
    dls = DataLoaders(TorchDataLoader(ds, 4, shuffle=True, generator=g), TorchDataLoader(ds[:20], 16))
    learn = Learner(dls, model().float(), loss_func=MSELossFlat())
    before = g.get_state()
    a,b = find(learn).losses[4]
    assert a != b and (g.get_state() == before).all()

def test_a_module_that_is_replaced_or_adds_hooks():
    "As SyncBatchNorm.convert_sync_batchnorm and callbacks with hooks do, which clean up too late if they are interrupted"
    learn = trained_learner()
    norm,hooks = learn.model[1],dict(learn.model[0]._forward_hooks)
    with unchanged(learn):
        learn.model[1] = nn.Identity()
        learn.model[0].register_forward_hook(noop)
    assert learn.model[1] is norm and learn.model[0]._forward_hooks == hooks

# What a branch is

def watched(learn, **kwargs):
    "The samples of each optimizer step and its learning rates, by branch, and what `bs_find` says"
    branches,seen = [],[]  # where no snapshot reaches
    def before_fit(cb): branches.append([]); seen.clear()
    def before_batch(cb):
        if cb.training: seen.extend(cb.xb[0][:,0].tolist())
    def before_step(cb): branches[-1].append((tuple(seen), tuple(h['lr'] for h in cb.opt.hypers))); seen.clear()
    learn.add_cb(Callback(before_fit=before_fit, before_batch=before_batch, before_step=before_step))
    return branches,find(learn, **kwargs)

@pytest.mark.parametrize('n_epoch,epochs', [(.5, [48]), (1, [96]), (1.5, [96, 48]), (2, [96, 96])])
def test_loss_of_a_branch_is_that_of_the_large_batch(n_epoch, epochs):
    "Trained by plain PyTorch, with a learning rate of its own; float32 losses"
    found = find(make_learner(4, opt_func=SGD), (4, 8, 32), n_epoch, 1, lr=.1, scale=linear_scale, stop_div=False)
    assert list(found.losses) == [4, 8, 32]
    for size,losses in found.losses.items():
        steps,m = [o for n in epochs for o in windows(n, 4, size, 'step', 1)],model()
        torch.nn.utils.vector_to_parameters(reference(steps, 96, sgd, lambda pct: .1*size/4)[0], m.parameters())
        x,y = data(96)
        assert_same(losses, [F.mse_loss(m(x[:20]), y[:20]).item()], 1e-6)

def test_branches_share_their_samples_and_order():
    "The same seed, the same samples in the same order, whatever the size; another seed, another order"
    branches,_ = watched(trained_learner(epochs=0), sizes=(4, 8, 16), stop_div=False)
    orders = [sum((samples for samples,_ in steps), ()) for steps in branches]
    assert [[len(samples) for samples,_ in steps] for steps in branches] == [[4]*12]*2 + [[8]*6]*2 + [[16]*3]*2
    assert orders[0] == orders[2] == orders[4] != orders[1] == orders[3] == orders[5]

def test_the_same_twice_and_not_with_another_seed():
    learn = trained_learner()
    a,b,other = find(learn),find(learn),find(learn, seed=2)
    assert a == b and not set(sum(a.losses.values(), [])) & set(sum(other.losses.values(), []))

def test_learning_rates():
    "The smallest size has that of `fit`, group by group; without `lr` the Learner's; it is constant, whatever schedules the Learner has"
    m = model()
    for lr,expected in (.2, (.2, .2)),(slice(.2), (.02, .2)),(slice(.1, .4), (.1, .4)),(None, (.3, .3)):
        learn = make_learner(4, m=m, splitter=lambda m: [params(m[0]), params(m[2])], lr=.3, cbs=ParamScheduler({'lr':SchedLin(1, 0)}))
        branches,_ = watched(learn, sizes=(4, 16), n_epoch=.25, n_seeds=1, lr=lr)
        for steps,ratio in zip(branches, (1, 2), strict=True):
            assert len(steps) > 1
            for _,lrs in steps: assert_same(lrs, [o*ratio for o in expected], 1e-9)

def test_an_accumulation_stands_aside_and_its_settings_hold():
    weighed = []  # where no snapshot reaches
    def num_items(learn): weighed.append(len(learn.y)); return len(learn.y)
    for accum in GradientAccumulation(48, num_items=num_items), GradientAccumulationSchedule(4, 48, num_items=num_items), \
                 AdaptiveGradientAccumulation(8, 48, num_items=num_items):
        weighed.clear()
        learn = make_learner(4, cbs=[accum, GradientNoiseScale()])
        branches,_ = watched(learn, sizes=(4, 8))
        assert [[len(samples) for samples,_ in steps] for steps in branches] == [[4]*12]*2 + [[8]*6]*2 and len(weighed) == 48
        assert learn.gradient_accumulation is accum if type(accum) is GradientAccumulation else accum in learn.cbs
        fit(learn, 1)

class Limited(nn.Module):
    "Memory for two samples at a time"
    def __init__(self): super().__init__(); self.m = model()
    def forward(self, x):
        if self.training and len(x) > 2: raise torch.OutOfMemoryError('CUDA out of memory')
        return self.m(x)

@pytest.mark.parametrize('micro_batch_size', [2, 'auto'])
def test_batches_are_split_in_branches_too(micro_batch_size, capsys):
    "And the size that fits is looked up once, not in every branch"
    learn = make_learner(4, m=Limited(), cbs=GradientAccumulation(8, micro_batch_size=micro_batch_size))
    found = find(learn, (4, 8))
    assert found == find(make_learner(4), (4, 8)) and capsys.readouterr().out == ''

def test_fastais_accumulation_stands_aside():
    from fastai.callback.training import GradientAccumulation as Fastais
    learn = make_learner(4, m=model().float(), loss_func=MSELossFlat(), cbs=Fastais(16))
    branches,_ = watched(learn, sizes=(4, 8))
    assert [len(steps) for steps in branches] == [12, 12, 6, 6]

@pytest.mark.parametrize('valid', ['empty', 'missing'])
@pytest.mark.parametrize('n_epoch,counted', [(1, range(72, 96)), (2, range(48, 96)), (.5, range(36, 48))])
def test_without_a_validation_set_the_last_quarter_of_the_branch_counts(valid, n_epoch, counted):
    "At a learning rate of 0 the loss of each sample stays what it was"
    learn = make_learner(4)
    learn.dls.loaders = learn.dls.loaders[:1] + ([DataLoader([], bs=4)] if valid == 'empty' else [])
    found,(x,y) = find(learn, (4, 32), n_epoch, 1, lr=0.),data(96)
    expected = F.mse_loss(model()(x[list(counted)]), y[list(counted)]).item()
    for losses in found.losses.values(): assert_same(losses, [expected], 1e-6)

def test_sizes():
    "As many doublings as get five steps a branch; given ones in any order"
    assert list(find(make_learner(4), None, 1, 1, stop_div=False).losses) == [4, 8, 16]
    assert list(find(make_learner(4), None, 4, 1, stop_div=False).losses) == [4, 8, 16, 32, 64]
    with quiet(learn := make_learner(4)):
        assert list(learn.bs_find(n_epoch=1, show_plot=False).losses) == [4, 8, 16]
        assert list(learn.bs_find([12, 4, 12], show_plot=False).losses) == [4, 12]

# What it finds

def test_the_spread_of_the_seeds_counts():
    "A mean rise of .05: with a standard error of .04 it may be one of .01, which is within two percent"
    noise = np.array([-.07, 0., .07])
    assert critical_size({16: [1., 1., 1.], 32: [1.05, 1.05, 1.05]}) == 16
    assert critical_size({16: [1., 1., 1.], 32: list(1.05+noise)}) == 32
    assert critical_size({16: list(1+noise), 32: list(1.05+noise)}) == 16  # pairs do not differ
    assert critical_size({16: [-1., -1.], 32: [-.99, -.99], 64: [-.97, -.97]}) == 32  # a loss below 0
    assert critical_size({16: [0.], 32: [0.], 64: [1e-9]}) == 32

def test_two_sizes_that_are_worse_end_it():
    losses = {4:1., 8:1., 16:1.05, 32:1.01, 64:1.1, 128:1.1, 256:.5}
    def find_of(**kwargs):
        with pytest.MonkeyPatch.context() as m:
            m.setattr('fastxtend_accum.bs_find.train_branch', lambda learn, size, *args, **kwargs: losses[size])
            return find(make_learner(4, n=256), list(losses), 1, **kwargs)
    assert find_of() == (32, {k:[v]*2 for k,v in losses.items() if k <= 128})
    assert find_of(stop_div=False) == (256, {k:[v]*2 for k,v in losses.items()})
    assert find_of(tolerance=.2).critical == 256

def test_the_bar_comes_to_its_end():
    "A bar that is left by its loop stays where it was; fastprogress takes it away at its end"
    ended,sizes = [],[4, 8, 16, 32, 64, 128]
    class Bar(ProgressBar):
        def on_iter_end(self): ended.append(self.total)
    learn = make_learner(4, n=256)
    with pytest.MonkeyPatch.context() as m, learn.no_logging():
        m.setattr('fastxtend_accum.bs_find.train_branch', lambda learn, size, *args, **kwargs: float(size))
        m.setattr('fastxtend_accum.bs_find.progress_bar', Bar)
        assert list(learn.bs_find(sizes, show_plot=False).losses) == [4, 8, 16] and ended == [3*len(sizes)]

class Point(nn.Module):
    "A point in space, whatever the input"
    def __init__(self, at): super().__init__(); self.at = nn.Parameter(at.clone())
    def forward(self, x): return self.at.expand_as(x)

def half_square(pred, targ): return (pred-targ).square().sum(1).mean()/2

def expected_loss(size, noise_scale, n, d, bs, lr):
    "See the test"
    lr,left = lr*(size/bs)**.5,(1-lr*(size/bs)**.5)**(2*n/size)
    return (left*d/noise_scale + lr**2*d/size*(1-left)/(1-(1-lr)**2))/2

@pytest.mark.parametrize('noise_scale', [8, 64, 256])
def test_a_quadratic_with_known_noise(noise_scale):
    """The loss of sample x is |w-x|²/2, with x from a normal distribution around 0 with variance 1 in each of d directions. So the true loss is
    |w|²/2, its gradient w, the noise of one sample's gradient d, and the gradient noise scale d/|w|². SGD with a rate r and batches of B moves w to (1-r)w + r*x̄, where
    x̄ has the variance 1/B and is new each time, since no sample comes twice. After n/B steps from w0 the mean of |w|² is therefore a geometric sum,

        (1-r)^(2n/B) |w0|² + r² (d/B) (1-(1-r)^(2n/B)) / (1-(1-r)²),

    with r = lr*sqrt(B/bs). The critical size is the largest B at which half of this is within the tolerance of its minimum. It grows with the noise scale"""
    n,d,bs,lr = 2048,1024,8,.02
    sizes = bs*2**np.arange(0, 6, .01)
    losses = expected_loss(sizes, noise_scale, n, d, bs, lr)
    critical = sizes[losses <= 1.02*losses.min()].max()

    g = torch.Generator().manual_seed(0)
    x,w0 = torch.randn(n, d, generator=g),torch.full((d,), noise_scale**-.5)
    dls = DataLoaders(DataLoader(list(zip(x, x)), bs=bs, shuffle=True), DataLoader([(torch.zeros(d), torch.zeros(d))], bs=1))
    found = find(Learner(dls, Point(w0), half_square, opt_func=SGD), bs*2**np.arange(6), 1, 2, lr=lr)
    assert critical/2 <= found.critical <= critical*2
    for size,losses in found.losses.items(): assert_same(np.mean(losses), expected_loss(size, noise_scale, n, d, bs, lr), .1*np.mean(losses))

def test_critical_sizes_of_the_quadratic_differ():
    "So that no constant answer passes the test above"
    sizes = 8*2**np.arange(0, 6, .01)
    critical = [sizes[o <= 1.02*o.min()].max() for noise_scale in (8, 64, 256) for o in [expected_loss(sizes, noise_scale, 2048, 1024, 8, .02)]]
    assert critical[2] > 4*critical[0]

def test_the_digits_want_a_larger_batch_later():
    learn = digits_learner(16)
    early = find(learn, (16, 32, 64, 128, 256), 1, 3, lr=4e-3).critical
    fit(learn, 6, 4e-3)
    assert early < find(learn, (16, 32, 64, 128, 256), 1, 3, lr=4e-3).critical

def test_schedule_never_shrinks_and_is_scaled_from_the_smallest_size():
    "What is found is said by the test; the short fit, too, trains at the rates of its sizes"
    answers,trained = iter([64, 32, 128]),[]
    with pytest.MonkeyPatch.context() as m, quiet(learn := make_learner(4, n=512)):
        m.setattr(Learner, 'bs_find', lambda self, sizes, n_epoch, **kwargs: SuggestedBS(next(answers), {}))
        m.setattr('fastxtend_accum.bs_find.train_branch', lambda learn, size, n_epoch, lrs, **kwargs: trained.append((size, n_epoch, *lrs)))
        schedule = learn.bs_schedule((0, 1, 3), lr=.1)
    assert trained == [(64, 1, .4), (64, 2, .4)]
    fit(learn, 4, .1, cbs=GradientAccumulationSchedule(**schedule, remainder='drop'))
    assert learn.recorder.accum_bs == [64]*24 + [128]*4
    assert_same(learn.recorder.lrs, [.1*4]*24 + [.1*32**.5]*4, 1e-9)

def test_schedule_keeps_to_the_largest_size_allowed():
    learn = trained_learner()
    with quiet(learn): schedule = learn.bs_schedule((0, 1), 8, [4, 8, 16], .5, lr=0., n_seeds=1)
    assert schedule['start_accum_bs'] == schedule['final_accum_bs'] == 8  # at a rate of 0 no size is worse
    with pytest.raises(ValueError, match='max_bs=3 is smaller than all sizes'): learn.bs_schedule(max_bs=3)

@pytest.mark.parametrize('n_seeds', [1, 3])
def test_plot(n_seeds):
    learn = make_learner(4)
    plt.close('all')
    find(learn, n_seeds=n_seeds)
    assert not plt.get_fignums()
    with quiet(learn): found = learn.bs_find([4, 8, 16], n_epoch=.5, n_seeds=n_seeds, lr=.05)
    [ax] = plt.gcf().axes
    assert [o.get_text() for o in ax.get_xticklabels()] == [str(o) for o in found.losses]
    assert f'suggested: {found.critical}' in [o.get_text() for o in ax.get_legend().get_texts()]
    plt.close('all')

# Error messages

@pytest.mark.parametrize('kwargs,said', [
    (dict(sizes=[4, 6]), "sizes=6 is not a multiple of the DataLoader's batch of 4 samples"), (dict(sizes=[4, 8.]), 'sizes counts samples'), (dict(sizes=[]), 'sizes is empty'),
    (dict(sizes=[4, 128], n_epoch=3), 'a batch of 128 samples in sizes is more than the 96'), (dict(sizes=[4, 64], n_epoch=.5), 'more than the 48'),
    (dict(sizes=None, n_epoch=.1), '0.1 epochs of 96 samples are too few for 5 steps'), (dict(n_epoch=0), 'n_epoch must be more than 0'),
    (dict(n_seeds=0), 'n_seeds must be at least 1'), (dict(tolerance=-1), 'tolerance must be 0 or more'), (dict(scale=None), 'scale must be a rule')])
def test_errors_before_training(kwargs, said):
    trained = []
    learn = make_learner(4, cbs=Callback(before_fit=lambda cb: trained.append(1)))
    with pytest.raises((ValueError, TypeError), match=said) as e: find(learn, **kwargs)
    assert not trained and len(str(e.value).splitlines()) == 1

@pytest.mark.parametrize('cbs', [[], [TerminateOnNaNCallback()]])
def test_a_loss_that_is_not_finite(cbs):
    learn,twin = trained_learner(),trained_learner()
    learn.add_cbs(cbs)
    before = everything(learn)
    with pytest.raises(ValueError, match=r'batch of 4 samples and a learning rate of 1e\+30 is nan: use a lower lr'): find(learn, lr=1e30)
    learn.remove_cbs(cbs)
    if not cbs: assert_as_it_was(learn, before, twin)

def test_a_model_in_shards():
    learn = make_learner(4)
    learn.model.set_requires_gradient_sync = noop
    with pytest.raises(ValueError, match='bs_find cannot put the shards of a Sequential back'): find(learn)
