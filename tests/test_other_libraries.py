"What models, callbacks and loaders of other libraries do: each was a fault"
import pytest
from fastai.distributed import DistributedDL
from torch.ao.quantization import PerChannelMinMaxObserver

from common import *
from fastxtend_accum.windows.loader import loader_info

FLOAT32 = 1e-6  # rounding of float32 weights, and of the Recorder's losses


def in_windows(): return GradientAccumulation(32)


# What a pass moves

class Observed(nn.Module):
    "A buffer gets its shape in the first forward pass, as in fasterai's QuantizeCallback"
    def __init__(self):
        super().__init__()
        self.observer = PerChannelMinMaxObserver(ch_axis=1)
        self.m = model().float()

    def forward(self, x): return self.m(self.observer(x))


@pytest.mark.parametrize('make_cb', [lambda: GradientAccumulation(micro_batch_size='auto'), ActivationCheckpointing])
def test_buffers_without_a_shape(make_cb):
    "The pass that runs out of memory gives one"
    def train(*cbs): return fit(make_learner(8, m=Observed(), loss_func=MSELossFlat(), cbs=cbs), 1)
    plain = train()
    ours = train(Fault(torch.OutOfMemoryError, 'after_loss', 1, 0), make_cb())
    assert ours.fault.count > 3
    assert len(ours.model.observer.min_val) == 5
    for one, other in zip(ours.model.buffers(), plain.model.buffers(), strict=True): assert_same(one, other)
    assert_same_weights(ours, plain, FLOAT32)


# What works in place, and what makes several rows of each sample

class InPlace(nn.Sequential):
    "Its first layer works in place, as tsai's TSTPlus sets missing values to 0"
    def forward(self, x): return super().forward(x.mul_(.5))


class Crops(nn.Sequential):
    "Two rows for each sample, as in SwAV and DINO"
    def forward(self, x): return super().forward(torch.cat([x, x.flip(1)]))


def loss_of_pairs(pred, targ):
    one, other = pred.chunk(2)
    return ((one-other)**2).mean().float()


@pytest.mark.parametrize('kind, loss_func, size, tol', [
    (InPlace, mse, 8, ROUNDING),  # its micro-batches are views of one batch
    (Crops, loss_of_pairs, 32, 0.)])  # nothing is split, so the rows of a sample are not joined
def test_a_cache_equals_the_plain_fit(kind, loss_func, size, tol):
    def train(*cbs): return fit(make_learner(32, n=88, m=kind(*model()), loss_func=loss_func, cbs=cbs), 2)
    plain = train()
    cached = train(GradientCache(size))
    assert_same_weights(cached, plain, tol)
    assert_same(losses(cached), losses(plain), FLOAT32)
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
    assert_trained_as(learn, large)
    with quiet(learn): learn.lr_find(show_plot=False)


# What runs events outside of a fit

def summarize(learn):
    "Does what `learn.summary` does"
    with learn: pass


def predict_as_tta(learn):
    learn([event.before_fit, event.before_epoch])
    learn.get_preds(inner=True, reorder=False)
    learn(event.after_fit)


@pytest.mark.parametrize('run', [summarize, predict_as_tta, Learner.validate])
def test_what_is_no_fit_leaves_what_is_known_of_the_last_one_and_needs_no_sizes_that_fit(run):
    learn = fit(make_learner(8, cbs=in_windows()), 2)
    accum = learn.gradient_accumulation
    accum.accum_bs = 12
    with quiet(learn): run(learn)
    assert accum.opt_steps == 6
    assert learn.recorder.accum_bs == [32]*6
    with pytest.raises(ValueError, match='not a multiple'): fit(learn, 1)


# Loaders

@pytest.mark.parametrize('drop_last', [False, True])
def test_the_samples_of_a_shared_loader_are_known(drop_last, monkeypatch):
    "Although with `drop_last` the length of fastai's DistributedDL rounds up"
    monkeypatch.setattr(DistributedDL, '_broadcast', lambda self, order, rank: list(order))  # there is one process
    for n in range(8, 40):
        dl = DistributedDL(DataLoader(range(n), bs=3, drop_last=drop_last), 0, 4)
        assert loader_info(dl).n_expected == sum(map(len, dl)), n
