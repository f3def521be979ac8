"What models, callbacks and loaders of other libraries do: each was a fault"
import pytest
from fastai.distributed import DistributedDL
from torch.ao.quantization import PerChannelMinMaxObserver

from common import *
from fastxtend_accum.windows.loader import loader_info

FLOAT32 = 1e-6  # rounding of float32 weights, and of the Recorder's losses


def in_windows(): return GradientAccumulation(32)
def in_cache(): return GradientCache(8)


ADAPTING = dict(
    auto=lambda: GradientAccumulation(micro_batch_size='auto'),
    cache=lambda: GradientCache('auto'),
    checkpointing=ActivationCheckpointing)


def runs_out(): return Fault(torch.OutOfMemoryError, 'after_loss', 1, 0)


def assert_same_buffers(a, b, tol=0):
    for one, other in zip(a.model.buffers(), b.model.buffers(), strict=True): assert_same(one, other, tol)


# What a pass moves

class Observed(nn.Module):
    "A buffer gets its shape in the first forward pass, as in fasterai's QuantizeCallback"
    def __init__(self):
        super().__init__()
        self.observer = PerChannelMinMaxObserver(ch_axis=1)
        self.m = model().float()

    def forward(self, x): return self.m(self.observer(x))


@pytest.mark.parametrize('name', ADAPTING)
def test_buffers_without_a_shape(name):
    "The pass that runs out of memory gives one"
    def train(*cbs):
        learn = make_learner(8, m=Observed(), loss_func=MSELossFlat(), cbs=cbs)
        return fit(learn, 1)
    plain = train()
    ours = train(runs_out(), ADAPTING[name]())
    assert ours.fault.count > 3
    assert len(ours.model.observer.min_val) == 5
    assert_same_buffers(ours, plain)
    tol = 0 if name == 'checkpointing' else FLOAT32
    assert_same_weights(ours, plain, tol)


class Masked(Callback):
    "A pretext task, as tsai's MVP, with a loss of its own: reconstruct what is masked"
    order = 60

    def before_fit(self):
        self.learn.loss_func = self.loss_of_masked
        self.n_seen = 0

    def before_batch(self):
        self.n_seen += 1
        self.mask = torch.rand_like(self.x) < .3
        self.learn.yb = (self.x,)
        self.learn.xb = (self.x.masked_fill(self.mask, 0),)

    def loss_of_masked(self, pred, targ):
        errors = (pred-targ)**2
        return (errors*self.mask).mean().float()


def pretext_learner(*cbs):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5))
    return make_learner(32, m=m.double(), cbs=[Masked(), *cbs])


def fit_pretext(*cbs):
    learn = pretext_learner(*cbs)
    torch.manual_seed(1)
    return fit(learn, 2)


def assert_fits_pretext(tol, *cbs):
    plain = fit_pretext()
    ours = fit_pretext(*cbs)
    assert ours.masked.n_seen == plain.masked.n_seen == 2*(3+2)
    assert_same_weights(ours, plain, tol)
    assert_apart(plain, pretext_learner())


@pytest.mark.parametrize('name,tol', [('cache', ROUNDING), ('checkpointing', 0)])
def test_a_late_callback_sees_a_batch_once_that_takes_several_passes(name, tol):
    assert_fits_pretext(tol, runs_out(), ADAPTING[name]())


# What works in place

class InPlace(nn.Module):
    "Its first layer works in place, as tsai's TSTPlus sets missing values to 0"
    def __init__(self):
        super().__init__()
        self.m = model()

    def forward(self, x): return self.m(x.mul_(.5))


def shift(self): self.learn.x.sub_(1)


def expand(self):
    "Grey images as three channels: elements that share one place in memory"
    self.learn.xb = (self.x[:, :1].expand(-1, 5),)
    self.learn.yb = (self.y[:1].expand(len(self.y), -1),)


@pytest.mark.parametrize('name,make_model,change', [
    ('auto', InPlace, noop),
    ('cache', InPlace, noop),
    ('auto', model, shift),
    ('cache', model, expand)])
def test_auto_leaves_the_batch_alone(name, make_model, change):
    "Should memory run out, it has what no pass has changed"
    def train(*cbs):
        changes = Callback(before_batch=change)
        learn = make_learner(32, m=make_model(), cbs=[*cbs, changes])
        return fit(learn, 2)
    plain = train()
    assert_same_weights(train(ADAPTING[name]()), plain)
    assert_apart(plain, fit(make_learner(32), 2))


@pytest.mark.parametrize('n', [96, 88])
def test_a_cache_of_a_model_that_works_in_place(n):
    "Its micro-batches are views of one batch"
    def train(*cbs):
        learn = make_learner(32, n=n, m=InPlace(), cbs=cbs)
        return fit(learn, 2)
    plain = train()
    cached = train(in_cache())
    assert_same_weights(cached, plain, ROUNDING)
    assert_same(losses(cached), losses(plain), FLOAT32)
    assert_moved(plain)


# What callbacks and hooks see of a batch


class Crops(nn.Module):
    "Two rows for each sample, as in SwAV and DINO"
    def __init__(self):
        super().__init__()
        self.m = model()

    def forward(self, x): return self.m(torch.cat([x, x.flip(1)]))


def loss_of_pairs(pred, targ):
    one, other = pred.chunk(2)
    return ((one-other)**2).mean().float()


def fit_crops(loss_func, *cbs):
    learn = make_learner(32, m=Crops(), loss_func=loss_func, cbs=cbs)
    return fit(learn, 2)


@pytest.mark.parametrize('micro_batch_size', [32, 'auto'])
def test_a_cache_that_splits_nothing_does_not_join_several_rows_of_a_sample(micro_batch_size):
    plain = fit_crops(loss_of_pairs)
    cached = fit_crops(loss_of_pairs, GradientCache(micro_batch_size))
    assert_same_weights(cached, plain)
    assert_moved(plain)


# Objects that look like fastai's

def test_a_recorder_without_train_metrics(monkeypatch):
    "fastxtend's has none"
    def forget(self): del self.learn.recorder.train_metrics
    monkeypatch.setattr(Recorder, '_train_mets', property(lambda self: L(self.smooth_loss)))
    learn = make_learner(8, cbs=in_windows())
    fit(learn, 1, cbs=Callback(before_train=forget))
    assert learn.recorder.accum_bs == [32, 32, 32]


class OtherLoaders:
    "fastMONAI's MedPatchDataLoaders: no `loaders`"
    device = torch.device('cpu')
    bs = 8

    def __init__(self, *dls): self._dls = dls
    def __getitem__(self, i): return self._dls[i]
    def to(self, device): return self

    @property
    def train(self): return self._dls[0]

    @property
    def valid(self): return self._dls[1]


def test_loaders_of_another_kind():
    learn = make_learner(8, cbs=in_windows())
    learn.dls = OtherLoaders(*learn.dls)
    fit(learn, 1)
    large = fit(make_learner(32), 1)
    assert_moved(large)
    assert_same_weights(learn, large, ROUNDING)
    with quiet(learn): learn.lr_find(show_plot=False)


# What runs events outside of a fit

def summarize(learn):
    "Does what `learn.summary` does"
    with learn: pass


def predict_as_tta(learn):
    learn([event.before_fit, event.before_epoch])
    learn.get_preds(inner=True, reorder=False)
    learn(event.after_fit)


EACH_RUN = pytest.mark.parametrize('run', [summarize, predict_as_tta, Learner.validate])


@EACH_RUN
def test_what_is_no_fit_leaves_what_is_known_of_the_last_one(run):
    learn = fit(make_learner(8, cbs=in_windows()), 2)
    with quiet(learn): run(learn)
    assert learn.gradient_accumulation.opt_steps == 6
    assert Counter(learn.recorder.accum_bs) == {32: 6}


@EACH_RUN
def test_what_is_no_fit_needs_no_sizes_that_fit(run):
    learn = make_learner(12, cbs=GradientAccumulation(16))
    learn.create_opt()
    with quiet(learn): run(learn)
    with pytest.raises(ValueError, match='not a multiple'): fit(learn, 1)


def test_a_batch_by_hand():
    "After a fit it is fastai's: a step on this batch"
    def train(bs, *cbs):
        learn = fit(make_learner(bs, cbs=cbs), 1)
        before = weights(learn)
        batch = [o[:8] for o in learn.dls.one_batch()]
        learn.training = True
        with quiet(learn): learn.one_batch(0, batch)
        difference = weights(learn)-before
        assert difference.abs().max() > 1e-3
        return weights(learn)
    assert_same(train(8, in_windows()), train(32), ROUNDING)


# Loaders

@pytest.fixture
def in_one_process(monkeypatch):
    "A DistributedDL asks the other processes for the order of the samples, and here there are none"
    monkeypatch.setattr(DistributedDL, '_broadcast', lambda self, order, rank: list(order))


def shared_loader(samples, bs, n_processes, drop_last):
    return DistributedDL(DataLoader(samples, bs=bs, drop_last=drop_last), 0, n_processes)


EACH_NUMBER = pytest.mark.parametrize('n_processes', [2, 3, 4])


@pytest.mark.usefixtures('in_one_process')
@pytest.mark.parametrize('drop_last', [False, True])
@EACH_NUMBER
def test_the_samples_of_a_shared_loader_are_known(n_processes, drop_last):
    "Although with `drop_last` the length of fastai's DistributedDL rounds up"
    n_wrong_lengths = 0
    for n, bs in itertools.product(range(8, 40), (2, 3, 8)):
        dl = shared_loader(range(n), bs, n_processes, drop_last)
        sizes = [len(batch) for batch in dl]
        info = loader_info(dl)
        assert info.has_exact_length
        assert info.n_planned == sum(sizes), (n, bs)
        if len(dl) != len(sizes): n_wrong_lengths += 1
    if drop_last: assert n_wrong_lengths > 10
    else: assert n_wrong_lengths == 0
