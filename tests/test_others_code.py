"What models, losses, callbacks and loaders of other libraries do, in short: each was a fault"
import itertools
import pytest
from fastai.callback.mixup import CutMix
from torch.ao.quantization import PerChannelMinMaxObserver

from common import *

class Observed(nn.Module):
    "A buffer gets its shape in the first forward pass, as in fasterai's QuantizeCallback"
    def __init__(self):
        super().__init__()
        self.observer,self.m = PerChannelMinMaxObserver(ch_axis=1),model().float()
    def forward(self, x): return self.m(self.observer(x))

adapting = {"'auto'":lambda: GradientAccumulation(micro_batch_size='auto'), 'GradientCache':lambda: GradientCache('auto'), 'exact':lambda: ActivationCheckpointing(),
            'checkpointing':lambda: ActivationCheckpointing()}
splitting = "'auto'",'GradientCache'

class RunsOutOnce(Callback):
    "Memory runs out in the first pass"
    done = False
    def after_loss(self):
        if self.training and not self.done:
            self.done = True
            raise torch.OutOfMemoryError('CUDA out of memory')

@pytest.mark.parametrize('name', adapting)
def test_buffers_without_a_shape(name):
    "That the pass which runs out of memory has given one"
    plain,ours = (fit(make_learner(8, m=Observed(), loss_func=MSELossFlat(), cbs=cbs), 1) for cbs in (None, [RunsOutOnce(), adapting[name]()]))
    assert ours.runs_out_once.done and len(ours.model.observer.min_val) == 5
    for a,b in zip(ours.model.buffers(), plain.model.buffers(), strict=True): assert_same(a, b)
    assert_same(weights(ours), weights(plain), 1e-6 if name in splitting else 0.)

# What calls before_fit and after_fit outside of a fit

def summary(learn):
    with learn: pass  # what `learn.summary` does
def tta(learn):
    "What fastai does around its predictions"
    learn([event.before_fit, event.before_epoch])
    learn.get_preds(inner=True, reorder=False)
    learn(event.after_fit)

@pytest.mark.parametrize('f', [summary, tta, lambda learn: learn.validate(), lambda learn: learn.get_preds()])
def test_what_is_no_fit_leaves_the_last_one(f):
    learn = make_learner(8, cbs=GradientAccumulation(32))
    fit(learn, 2)
    accum = learn.gradient_accumulation
    def state(): return accum.opt_steps,learn.recorder.accum_bs
    before = state()
    with quiet(learn): f(learn)
    assert state() == before == (6, [32]*6)

@pytest.mark.parametrize('f', [summary, tta])
def test_sizes_are_checked_in_a_fit_only(f):
    learn = make_learner(12, cbs=GradientAccumulation(16))
    learn.create_opt()
    with quiet(learn): f(learn)
    with pytest.raises(ValueError, match='not a multiple'): fit(learn, 1)

@pytest.mark.parametrize('bs,cb', [(8, lambda: GradientAccumulation(32)), (32, lambda: GradientAccumulation(32, micro_batch_size=8)), (32, lambda: GradientCache(8))])
def test_an_exported_learner_after_an_interrupt(bs, cb, tmp_path):
    "Whoever loads it need not have this package"
    learn = make_learner(bs)
    def stop(self):
        if self.training: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt) as e: fit(learn, 1, cbs=[cb(), Callback(after_pred=stop)])
    learn._end_cleanup()  # as `export` does before it pickles the Learner
    torch.save(learn, tmp_path/'a.pkl')
    assert b'fastxtend_accum' not in (tmp_path/'a.pkl').read_bytes()

# Callbacks that come after this package's

class Masked(Callback):
    "A pretext task, as tsai's MVP: reconstruct what is masked. The loss is the callback's"
    order,per_sample = 60,('mask',)
    def before_fit(self): self.learn.loss_func,self.seen = self.lf,0
    def before_batch(self):
        self.seen += 1
        self.mask = torch.rand_like(self.x) < .3
        self.learn.yb,self.learn.xb = (self.x,),(self.x.masked_fill(self.mask, 0),)
    def lf(self, pred, targ): return ((pred-targ)**2*self.mask).mean().float()

def pretext(bs, *cbs):
    torch.manual_seed(0)
    return make_learner(bs, m=nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5)).double(), cbs=[Masked(), *cbs])

@pytest.mark.parametrize('name', adapting)
@pytest.mark.parametrize('runs_out', [False, True])
def test_a_late_callback(name, runs_out):
    "Sees each batch once, also if that takes several passes: it draws what it draws in the plain fit"
    cbs = [RunsOutOnce()] if runs_out else []
    plain,ours = pretext(32),pretext(32, *cbs, adapting[name]())
    for learn in plain,ours:
        torch.manual_seed(1)
        fit(learn, 2)
    assert ours.masked.seen == plain.masked.seen == 2*(3+2)
    assert_same(weights(ours), weights(plain), ROUNDING if runs_out and name in splitting else 0.)
    assert (weights(ours)-weights(pretext(32))).abs().max() > 1e-4

# What works in place

class InPlace(nn.Module):
    "Its first layer works in place"
    def __init__(self): super().__init__(); self.m = model()
    def forward(self, x): return self.m(x.mul_(.5))

@pytest.mark.parametrize('cb', [GradientAccumulation, GradientCache])
@pytest.mark.parametrize('inside', [False, True])
def test_auto_leaves_the_batch_alone(cb, inside):
    "It has what a pass has not changed in place, should memory run out"
    cbs = [] if inside else [Callback(before_batch=lambda self: self.learn.x.sub_(1) if self.training else None)]
    def run(size):
        accum = GradientAccumulation(32, micro_batch_size=size) if cb is GradientAccumulation else GradientCache(size)
        return weights(fit(make_learner(32, m=InPlace() if inside else model(), cbs=[accum, *cbs]), 2))
    assert_same(run('auto'), run(32))

@pytest.mark.parametrize('cb', [lambda size: GradientAccumulation(32, micro_batch_size=size), GradientCache])
def test_auto_of_an_expanded_batch(cb):
    "Grey images as three channels: elements that share one place in memory"
    def grey(self): self.learn.xb,self.learn.yb = (self.x[:,:1].expand(-1, 5),),(self.y[:1].expand(len(self.y), -1),)
    def run(size): return weights(fit(make_learner(32, cbs=[cb(size), Callback(before_batch=grey)]), 2))
    assert_same(run('auto'), run(32))

@pytest.mark.parametrize('n', [96, 88])
def test_a_cache_of_a_model_that_works_in_place(n):
    "The pieces are views of one batch, and each is needed twice: tsai's TSTPlus sets missing values to 0"
    def run(*cbs): return fit(make_learner(32, n=n, m=InPlace(), cbs=cbs), 2)
    cached,whole = run(GradientCache(8)),run()
    assert_same(weights(cached), weights(whole), ROUNDING)
    assert_same(losses(cached), losses(whole), 1e-6)

class Sees(Callback):
    order = 100
    def __init__(self, seen): self.seen = seen
    def before_batch(self): self.seen.append(self.x.clone())

def test_fastais_cutmix_mixes_the_first_batch_once():
    x,y = torch.randn(64, 3, 8, 8),torch.randint(3, (64,))
    def run(size):
        seen = []
        set_seed(0)
        ds = list(zip(x, y))
        learn = Learner(DataLoaders(DataLoader(ds, bs=32), DataLoader(ds[:8], bs=8)), nn.Sequential(nn.Conv2d(3, 3, 8), nn.Flatten()), CrossEntropyLossFlat(),
                        opt_func=SGD, cbs=[CutMix(), GradientAccumulation(32, micro_batch_size=size), Sees(seen)])
        fit(learn, 1)
        return seen[0],weights(learn)
    for a,b in zip(run('auto'), run(32)): assert_same(a, b)

@pytest.mark.parametrize('inside', [False, True])
def test_a_repeated_micro_batch_is_as_before(inside):
    "Memory runs out once in training, after the model has worked in place"
    class Once(Callback):
        order,done = 1001,False
        def after_pred(self):
            if self.training and self.train_iter == 1 and not Once.done: Once.done = True; raise torch.OutOfMemoryError('CUDA out of memory')
    def run(*cbs): return weights(fit(make_learner(32, m=InPlace() if inside else model(), cbs=[GradientAccumulation(32, micro_batch_size='auto'), *cbs]), 2))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        again = run(Once())
    assert Once.done
    assert_same(again, run(), ROUNDING)

# What callbacks and hooks see of a batch

sizes_seen = {'loader of 8':(8, lambda: GradientAccumulation(32), 8), 'micro_batch_size':(32, lambda: GradientAccumulation(32, micro_batch_size=8), 32),
              'GradientCache':(32, lambda: GradientCache(8), 32), 'no callback':(32, list, 32)}

@pytest.mark.parametrize('way', sizes_seen)
def test_what_after_step_sees(way):
    "The batch that the loader has yielded last, as MoCo's queue and DINO's centre take it up"
    bs,cbs,n = sizes_seen[way]
    seen = []
    fit(make_learner(bs, cbs=cbs()), 2, cbs=Callback(after_step=lambda self: seen.append((len(self.x), len(self.pred)))))
    assert seen == [(n, n)]*6

@pytest.mark.parametrize('way,calls', {'no callback':[32]*3, 'micro_batch_size':[8]*12, 'GradientCache':[8]*(4+3)*3}.items())
def test_hooks_on_a_submodule(way, calls):
    "They see pieces; under a GradientCache all but the last again, in the backward pass"
    bs,cbs,_ = sizes_seen[way]
    learn,seen = make_learner(bs, cbs=cbs()),[]
    learn.model[0].register_forward_hook(lambda m, args, out: seen.append(len(out)) if m.training else None)
    fit(learn, 1)
    assert seen == calls

class GhostBatchNorm(nn.Module):
    "fast_tabnet's GBN, in short: BatchNorm of each 8 samples of a batch"
    def __init__(self): super().__init__(); self.bn = nn.BatchNorm1d(8, momentum=.02)
    def forward(self, x): return torch.cat([self.bn(o) for o in x.split(8)])

@pytest.mark.parametrize('way', ['loader of 8', 'micro_batch_size', 'GradientCache'])
def test_ghost_batchnorm_is_exact(way):
    "In micro-batches of its size. Running means and variances, too"
    def run(bs, cbs, norm=GhostBatchNorm):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(5, 8), norm(), nn.Tanh(), nn.Linear(8, 1)).double()
        learn = fit(make_learner(bs, m=m, cbs=cbs), 2)
        return torch.cat([weights(learn), *(o.double().flatten() for o in m.buffers())])
    bs,cbs,_ = sizes_seen[way]
    assert_same(run(bs, cbs()), run(32, None), ROUNDING)
    assert (run(32, None)[:20]-run(32, None, lambda: nn.BatchNorm1d(8, momentum=.02))[:20]).abs().max() > 1e-4  # else it would say nothing

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
    fit(learn, 1, cbs=GradientAccumulation(32))
    assert len(learn.recorder.losses) == 3
    with quiet(learn): learn.lr_find(show_plot=False)

class ShowGraph(Callback):
    "tsai's, in short: another class than fastai's ShowGraphCallback, with the same events"
    order,run_valid = 65,False
    def before_fit(self): self.points = []
    def after_train(self): self.points.append(self.train_iter)
    def after_epoch(self): pass

def test_the_graph_of_tsai():
    learn = fit(make_learner(8, cbs=[GradientAccumulation(32), ShowGraph()]), 2)
    assert learn.show_graph.points == [3, 6]

class Crops(nn.Module):
    "Two rows for each sample, as SwAV and DINO give"
    def __init__(self): super().__init__(); self.m = model()
    def forward(self, x): return self.m(torch.cat([x, x.flip(1)]))

@pytest.mark.parametrize('size', [32, 'auto'])
def test_a_cache_of_one_piece_joins_nothing(size):
    def loss(pred, targ): a,b = pred.chunk(2); return ((a-b)**2).mean().float()
    cached,whole = (fit(make_learner(32, m=Crops(), loss_func=loss, cbs=cbs), 2) for cbs in (GradientCache(size), None))
    assert_same(weights(cached), weights(whole))

def test_rows_whose_order_cannot_matter_are_joined():
    "Any number of rows for each sample is right in pieces if the loss is a mean over rows"
    def loss(pred, targ): return (pred**2).mean().float()
    accumulated,whole = (fit(make_learner(32, m=Crops(), loss_func=loss, cbs=cbs), 2) for cbs in (GradientAccumulation(32, micro_batch_size=8), None))
    assert_same(weights(accumulated), weights(whole), ROUNDING)

# Epochs

@pytest.fixture
def shared(monkeypatch):
    "Makes fastai's DistributedDL of a DataLoader, for process `rank` of `n`, without any processes"
    from fastai.distributed import DistributedDL
    monkeypatch.setattr(DistributedDL, '_broadcast', lambda self, t, rank: list(t))
    return DistributedDL

@pytest.mark.parametrize('drop_last', [False, True])
@pytest.mark.parametrize('n_processes', [2, 3, 4])
def test_batches_of_a_shared_loader(n_processes, drop_last, shared):
    "Its length rounds up"
    from fastxtend_accum.windows.loader import epoch_samples
    wrong = 0
    for n,bs in itertools.product(range(8, 60), (2, 3, 4, 8)):
        dl = shared(DataLoader(list(range(n)), bs=bs, drop_last=drop_last), 0, n_processes)
        sizes = [len(b) for b in dl]
        assert epoch_samples(dl, bs) == (sum(sizes), True), (n, bs)
        wrong += len(dl) != len(sizes)
    assert wrong > 20 if drop_last else wrong == 0  # fastai's own count

def test_learning_rates_over_a_shared_loader(shared):
    "18 of 36 samples are this process' share: 4 batches, of which its length says 5"
    dl,lrs = shared(DataLoader(list(zip(*data(36))), bs=4, drop_last=True), 0, 2),[]
    learn = make_learner(4, cbs=GradientAccumulation(8, remainder='step'))
    learn.dls = DataLoaders(dl, learn.dls.valid)
    sched = ParamScheduler(dict(lr=SchedLin(.1, 0.)))
    fit(learn, 2, cbs=[sched, Callback(before_step=lambda self: lrs.append(self.opt.hypers[-1]['lr']))])
    assert len(dl) == 5
    assert_same(lrs, [.1, .075, .05, .025], ROUNDING)

def test_after_iter_is_called():
    "In every complete epoch, as without accumulation"
    class Counts(DataLoader):
        ended = 0
        def after_iter(self): Counts.ended += 1
    for kwargs in dict(remainder='step'),dict(remainder='drop'),dict(remainder='drop', micro_batch_size=4):
        Counts.ended = 0
        learn = make_learner(8, cbs=GradientAccumulation(32, **kwargs))
        learn.dls = DataLoaders(Counts(list(zip(*data(96))), bs=8), learn.dls.valid)
        fit(learn, 3)
        assert Counts.ended == 3 and learn.gradient_accumulation.opt_steps == 9, kwargs

# Losses that other callbacks see, or change

def labelled(empty, bs, *cbs, n_epoch=1):
    "A tagger whose samples `empty` have no labels"
    from test_losses import Masked, ToFloat32, tag
    return tag(bs, Masked(32, empty=empty), ToFloat32(), cbs=list(cbs), n_epoch=n_epoch)

@pytest.mark.parametrize('how', [lambda: (4, GradientAccumulation(16)), lambda: (16, GradientAccumulation(16, micro_batch_size=4)), lambda: (8, GradientAccumulation(16, micro_batch_size=4))])
@pytest.mark.parametrize('count', [None, lambda learn: (learn.y != -100).sum()], ids=['number', 'tensor'])
def test_a_micro_batch_without_labels_does_not_end_the_fit(how, count):
    bs,cb = how()
    cb.num_items = count
    learn = labelled(range(8, 16), bs, cb, TerminateOnNaNCallback())
    assert learn.recorder.accum_bs == [16, 16]
    assert_same(weights(learn), weights(labelled(range(8, 16), 16)), 1e-6)

class Penalty(Callback):
    "Adds to the loss after this package's callback"
    def __init__(self, order): self.order = order
    def after_loss(self):
        self.learn.loss_grad = self.learn.loss_grad + .1*sum((p**2).sum() for p in self.model.parameters())
        self.learn.loss = self.learn.loss_grad.clone().float()

@pytest.mark.parametrize('order', [-1, 7, 20, 70])
@pytest.mark.parametrize('n', [96, 88])
def test_a_penalty_of_any_order(order, n):
    "It counts once in a step, with weights too"
    big,small,pieces = (fit(make_learner(bs, n=n, cbs=[*L(cb), Penalty(order)])) for bs,cb in ((32, None), (8, GradientAccumulation(32)), (32, GradientAccumulation(32, micro_batch_size=8))))
    for o in small,pieces:
        assert_same(weights(o), weights(big), ROUNDING)
        assert_same(losses(o), losses(big), 1e-5)
    assert (weights(big)-weights(fit(make_learner(32, n=n)))).abs().max() > 1e-3

# What is refused, or said

def test_two_names_for_one_size():
    with pytest.raises(ValueError, match='accum_bs=64 and n_acc=32.*micro_batch_size=32'): GradientAccumulation(64, 32)
    assert GradientAccumulation(n_acc=64).accum_bs == GradientAccumulation(64, None, False).accum_bs == 64

def test_a_micro_batch_larger_than_the_batch():
    with pytest.warns(UserWarning, match='micro_batch_size=16 is more than the 8 samples'): fit(make_learner(8, cbs=GradientAccumulation(32, micro_batch_size=16)), 1)

def test_a_batch_by_hand():
    learn = make_learner(8, cbs=GradientAccumulation(32))
    for _ in range(2):
        learn.create_opt()
        learn.training = True
        with pytest.raises(RuntimeError, match='one_batch.*removed_cbs'): learn.one_batch(0, learn.dls.one_batch())
        fit(learn, 1)
