"What models, callbacks and loaders of other libraries do: each was a fault"
import pytest
from fastai.distributed import DistributedDL
from torch.ao.quantization import PerChannelMinMaxObserver

from common import *
from fastxtend_accum.windows.loader import epoch_samples

adapting = dict(auto=lambda: GradientAccumulation(micro_batch_size='auto'), cache=lambda: GradientCache('auto'),
                checkpointing=ActivationCheckpointing)
kinds = dict(none=(32, list), windows=(8, lambda: GradientAccumulation(32)),
             split=(32, lambda: GradientAccumulation(micro_batch_size=8)), cache=(32, lambda: GradientCache(8)))

def runs_out(): return Fault(torch.OutOfMemoryError, 'after_loss', 1, 0)

# What a pass moves

class Observed(nn.Module):
    "A buffer gets its shape in the first forward pass, as in fasterai's QuantizeCallback"
    def __init__(self):
        super().__init__()
        self.observer,self.m = PerChannelMinMaxObserver(ch_axis=1),model().float()
    def forward(self, x): return self.m(self.observer(x))

@pytest.mark.parametrize('name', adapting)
def test_buffers_without_a_shape(name):
    "The pass that runs out of memory gives one"
    plain,ours = (fit(make_learner(8, m=Observed(), loss_func=MSELossFlat(), cbs=cbs), 1)
                  for cbs in (None, [runs_out(), adapting[name]()]))
    assert ours.fault.count > 3 and len(ours.model.observer.min_val) == 5
    for a,b in zip(ours.model.buffers(), plain.model.buffers(), strict=True): assert_same(a, b)
    assert_same(weights(ours), weights(plain), 0. if name == 'checkpointing' else 1e-6)  # float32

class Masked(Callback):
    "A pretext task, as tsai's MVP, with a loss of its own: reconstruct what is masked"
    order,per_sample = 60,('mask',)
    def before_fit(self): self.learn.loss_func,self.seen = self.lf,0
    def before_batch(self):
        self.seen += 1
        self.mask = torch.rand_like(self.x) < .3
        self.learn.yb,self.learn.xb = (self.x,),(self.x.masked_fill(self.mask, 0),)
    def lf(self, pred, targ): return ((pred-targ)**2*self.mask).mean().float()

@pytest.mark.filterwarnings('ignore:could not check whether accumulation is exact')  # its loss wants the whole mask
@pytest.mark.parametrize('name', adapting)
@pytest.mark.parametrize('fails', [False, True])
def test_a_late_callback(name, fails):
    "Sees each batch once, also if that takes several passes"
    def pretext(*cbs):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5)).double()
        return make_learner(32, m=m, cbs=[Masked(), *cbs])
    plain,ours = pretext(),pretext(*[runs_out()]*fails, adapting[name]())
    for learn in plain,ours: torch.manual_seed(1); fit(learn, 2)
    assert ours.masked.seen == plain.masked.seen == 2*(3+2)
    assert_same(weights(ours), weights(plain), ROUNDING if fails and name != 'checkpointing' else 0.)
    assert (weights(ours)-weights(pretext())).abs().max() > 1e-4

# What works in place

class InPlace(nn.Module):
    "Its first layer works in place, as tsai's TSTPlus sets missing values to 0"
    def __init__(self): super().__init__(); self.m = model()
    def forward(self, x): return self.m(x.mul_(.5))

def shift(self): self.learn.x.sub_(1)
def expand(self):
    "Grey images as three channels: elements that share one place in memory"
    self.learn.xb,self.learn.yb = (self.x[:,:1].expand(-1, 5),),(self.y[:1].expand(len(self.y), -1),)

@pytest.mark.parametrize('make', [lambda size: GradientAccumulation(32, micro_batch_size=size), GradientCache])
@pytest.mark.parametrize('m,change', [(InPlace, None), (model, shift), (model, expand)])
def test_auto_leaves_the_batch_alone(make, m, change):
    "Should memory run out, it has what no pass has changed"
    def run(*cbs): return fit(make_learner(32, m=m(), cbs=[*cbs, *[Callback(before_batch=change)]*bool(change)]), 2)
    big = weights(run())
    assert_same(weights(run(make('auto'))), big)
    if change: assert (big-weights(fit(make_learner(32), 2))).abs().max() > 1e-3

@pytest.mark.parametrize('n', [96, 88])
def test_a_cache_of_a_model_that_works_in_place(n):
    "Its micro-batches are views of one batch"
    big,small = (fit(make_learner(32, n=n, m=InPlace(), cbs=cbs), 2) for cbs in (None, GradientCache(8)))
    assert_same(weights(small), weights(big), ROUNDING)
    assert_same(losses(small), losses(big), 1e-6)
    assert_moved(big)

# What callbacks and hooks see of a batch

@pytest.mark.parametrize('kind,rows', zip(kinds, ([32]*3, [8]*12, [8]*12, [8]*(4+3)*3)))
def test_what_hooks_and_after_step_see(kind, rows):
    "Hooks see micro-batches, of a cache all but the last again; `after_step` sees the last loader batch, as in MoCo"
    (bs,make),hooked,seen = kinds[kind],[],[]
    learn = make_learner(bs, cbs=make())
    learn.model[0].register_forward_hook(lambda m, args, out: hooked.append(len(out)) if m.training else None)
    def see(self): seen.append((len(self.x), len(self.pred)))
    fit(learn, 1, cbs=Callback(after_step=see))
    assert hooked == rows and seen == [(bs, bs)]*3

class GhostBatchNorm(nn.Module):
    "fast_tabnet's GBN, in short: BatchNorm of each 8 samples of a batch"
    def __init__(self): super().__init__(); self.bn = nn.BatchNorm1d(8, momentum=.02)
    def forward(self, x): return torch.cat([self.bn(o) for o in x.split(8)])

@pytest.mark.parametrize('kind', [*kinds][1:])
def test_ghost_batchnorm_is_exact(kind):
    "In micro-batches of its size. Running means and variances, too"
    def run(bs, cbs=None, norm=GhostBatchNorm):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(5, 8), norm(), nn.Tanh(), nn.Linear(8, 1)).double()
        learn = fit(make_learner(bs, m=m, cbs=cbs), 2)
        return torch.cat([weights(learn), *(o.double().flatten() for o in m.buffers())])
    bs,make = kinds[kind]
    assert_same(run(bs, make()), run(32), ROUNDING)
    assert (run(32)[:20]-run(32, norm=partial(nn.BatchNorm1d, 8, momentum=.02))[:20]).abs().max() > 1e-4

class Crops(nn.Module):
    "Two rows for each sample, as in SwAV and DINO"
    def __init__(self): super().__init__(); self.m = model()
    def forward(self, x): return self.m(torch.cat([x, x.flip(1)]))

def of_pairs(pred, targ): a,b = pred.chunk(2); return ((a-b)**2).mean().float()
def of_rows(pred, targ): return (pred**2).mean().float()

not_joined = pytest.mark.filterwarnings(
    'ignore:validation batches are not split. cannot join', 'ignore:could not check whether .* is exact')


@pytest.mark.parametrize('loss_func,make,tol', [
    (of_pairs, lambda: GradientCache(32), 0.), (of_pairs, adapting['cache'], 0.),
    pytest.param(of_rows, kinds['split'][1], ROUNDING, marks=not_joined)])
def test_several_rows_of_a_sample(loss_func, make, tol):
    "A cache that splits nothing joins nothing; if the loss is a mean over rows, their order cannot matter"
    big,small = (fit(make_learner(32, m=Crops(), loss_func=loss_func, cbs=cbs), 2) for cbs in (None, make()))
    assert_same(weights(small), weights(big), tol)
    assert_moved(big)

# Objects that look like fastai's

def test_a_recorder_without_train_metrics(monkeypatch):
    "fastxtend's has none"
    monkeypatch.setattr(Recorder, '_train_mets', property(lambda self: L(self.smooth_loss)))
    learn = make_learner(8, cbs=GradientAccumulation(32))
    fit(learn, 1, cbs=Callback(before_train=lambda self: vars(self.learn.recorder).pop('train_metrics')))
    assert learn.recorder.accum_bs == [32]*3

class OtherLoaders:
    "fastMONAI's MedPatchDataLoaders: no `loaders`"
    def __init__(self, *dls): self._dls = dls
    train,valid = property(lambda self: self._dls[0]),property(lambda self: self._dls[1])
    device,bs = torch.device('cpu'),8
    def __getitem__(self, i): return self._dls[i]
    def to(self, device): return self

def test_loaders_of_another_kind():
    learn = make_learner(8)
    learn.dls = OtherLoaders(*learn.dls)
    assert_same(weights(fit(learn, 1, cbs=GradientAccumulation(32))), weights(fit(make_learner(32), 1)), ROUNDING)
    with quiet(learn): learn.lr_find(show_plot=False)

# What runs events outside of a fit

def summary(learn):
    with learn: pass  # what `learn.summary` does
def tta(learn):
    learn([event.before_fit, event.before_epoch])
    learn.get_preds(inner=True, reorder=False)
    learn(event.after_fit)

@pytest.mark.parametrize('f', [summary, tta, Learner.validate])
def test_what_is_no_fit(f):
    "Leaves what is known of the last fit, and needs no sizes that fit"
    learn = fit(make_learner(8, cbs=GradientAccumulation(32)), 2)
    with quiet(learn): f(learn)
    assert (learn.gradient_accumulation.opt_steps, learn.recorder.accum_bs) == (6, [32]*6)
    learn = make_learner(12, cbs=GradientAccumulation(16))
    learn.create_opt()
    with quiet(learn): f(learn)
    with pytest.raises(ValueError, match='not a multiple'): fit(learn, 1)

def test_a_batch_by_hand():
    "After a fit it is fastai's: a step on this batch"
    def run(bs, *cbs):
        learn = fit(make_learner(bs, cbs=cbs), 1)
        before = weights(learn)
        learn.training = True
        with quiet(learn): learn.one_batch(0, [o[:8] for o in learn.dls.one_batch()])
        assert (weights(learn)-before).abs().max() > 1e-3
        return weights(learn)
    assert_same(run(8, GradientAccumulation(32)), run(32), ROUNDING)

# Loaders

@pytest.mark.parametrize('drop_last', [False, True])
@pytest.mark.parametrize('n_processes', [2, 3, 4])
def test_batches_of_a_shared_loader(n_processes, drop_last, monkeypatch):
    "The length of fastai's DistributedDL rounds up; learning rates follow its samples"
    monkeypatch.setattr(DistributedDL, '_broadcast', lambda self, t, rank: list(t))
    def shared(ds, bs): return DistributedDL(DataLoader(ds, bs=bs, drop_last=drop_last), 0, n_processes)
    wrong = 0
    for n,bs in itertools.product(range(8, 60), (2, 3, 4, 8)):
        dl = shared(list(range(n)), bs)
        sizes = [len(b) for b in dl]
        assert epoch_samples(dl, bs) == (sum(sizes), True), (n, bs)
        wrong += len(dl) != len(sizes)
    assert wrong > 20 if drop_last else wrong == 0
    learn,lrs = make_learner(4, cbs=GradientAccumulation(8, remainder='step')),[]
    learn.dls = DataLoaders(shared(list(zip(*data(18*n_processes))), 4), learn.dls.valid)
    def see(self): lrs.append(self.opt.hypers[-1]['lr'])
    fit(learn, 2, cbs=[ParamScheduler(dict(lr=SchedLin(.1, 0.))), Callback(before_step=see)])
    n = 2 if drop_last else 3
    assert_same(lrs, np.linspace(.1, 0, 2*n, endpoint=False), ROUNDING)

@pytest.mark.parametrize('remainder,micro', [('step', None), ('drop', None), ('drop', 4), ('carry', 4)])
def test_after_iter_is_called(remainder, micro):
    "In every complete epoch"
    ended = []
    class Ends(DataLoader):
        def after_iter(self): ended.append(1)
    learn = make_learner(8, cbs=GradientAccumulation(32, remainder=remainder, micro_batch_size=micro))
    learn.dls = DataLoaders(Ends(list(zip(*data(96))), bs=8), learn.dls.valid)
    fit(learn, 3)
    assert len(ended) == 3 and learn.gradient_accumulation.opt_steps == 9

def test_a_micro_batch_larger_than_the_batch():
    learn = make_learner(8, cbs=GradientAccumulation(32, micro_batch_size=16))
    with pytest.warns(UserWarning, match='micro_batch_size=16 is more than the 8 samples'): fit(learn, 1)
