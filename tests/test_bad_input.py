"Every mistake is an error in one line, before training starts"
import pytest
from fastai.callback.training import GradientAccumulation as FastaiAccumulation
import torch.utils.data as tud

from common import *

NAN = float('nan')

@pytest.mark.parametrize('make, says', [
    (lambda: GradientAccumulation(0), 'accum_bs must be at least 1 sample, not 0'),
    (lambda: GradientAccumulation(-8), 'accum_bs must be at least 1 sample, not -8'),
    (lambda: GradientAccumulation(32.), 'accum_bs counts samples, so it must be an int, not 32.0'),
    (lambda: GradientAccumulation('32'), "not '32'"),
    (lambda: GradientAccumulation(True), 'not True'),
    (lambda: GradientAccumulation(n_acc=0), 'n_acc must be at least 1'),
    (lambda: GradientAccumulation(32, False), 'n_acc counts samples'),  # log_accum_batch, one place too early
    (lambda: GradientAccumulation(32, micro_batch_size=0), 'micro_batch_size must be at least 1'),
    (lambda: GradientAccumulation(32, remainder='keep'), "remainder must be one of ('step', 'carry', 'drop') or None, not 'keep'"),
    (lambda: GradientAccumulation(32, None, 16), 'log_accum_batch must be True or False, not 16'),
    (lambda: GradientAccumulation(32, skip_nonfinite=1), 'skip_nonfinite must be True or False, not 1'),
    (lambda: GradientAccumulation(32, drop_last=True), "drop_last=True is fastxtend's name: use remainder='drop'"),
    (lambda: GradientAccumulationSchedule(16, 64, drop_last=False), "drop_last=False is fastxtend's name: use remainder='drop'"),
    (lambda: GradientAccumulation(32, accum=3), 'unexpected arguments: accum'),
    (lambda: GradientAccumulationSchedule(64, 128, .25, .75, SchedCos, 32), 'log_accum_batch must be True or False, not 32'),  # fastxtend's order
    (lambda: GradientAccumulationSchedule(16, 64, schedule={1: 2}), 'sizes by point as GradientAccumulationSchedule(**SchedSteps('),
    (lambda: GradientAccumulation(32, num_items=5), 'num_items must be a function of the Learner, not 5'),
    (lambda: GradientAccumulationSchedule(0, 64), 'start_accum_bs must be at least 1'),
    (lambda: GradientAccumulationSchedule(16, 64.), 'final_accum_bs counts samples'),
    (lambda: GradientAccumulationSchedule(16, 64, start=-.1), 'start=-0.1 is outside of training: use a fraction'),
    (lambda: GradientAccumulationSchedule(16, 64, finish=1.5), 'finish=1.5 is outside of training: use a fraction'),
    (lambda: GradientAccumulationSchedule(16, 64, finish=NAN), 'finish=nan is outside of training: use a fraction'),
    (lambda: GradientAccumulationSchedule(16, 64, start=-1), 'start=-1 is outside of training: use a fraction'),
    (lambda: GradientAccumulationSchedule(16, 64, start=None), 'start must be a float'),
    (lambda: GradientAccumulationSchedule(16, 64, start=.5, finish=.2), 'start=0.5 is after finish=0.2'),
    (lambda: GradientAccumulationSchedule(16, 64, start=2, finish=1), 'start=2 is after finish=1'),
    (lambda: GradientAccumulationSchedule(16, 64, schedule=SchedPoly), 'give other arguments with partial'),
    (lambda: GradientAccumulationSchedule(16, 64, schedule=lambda a,b: b), 'must return a function of the position, not 64'),
])
def test_at_once(make, says):
    with pytest.raises((TypeError, ValueError)) as e: make()
    assert says in str(e.value) and '\n' not in str(e.value)

class Unsized:
    "A loader that does not know its batch size"
    def __init__(self, bs): self.dl = tud.DataLoader(tud.TensorDataset(*data(32)), batch_sampler=tud.BatchSampler(range(32), bs, False))
    def __iter__(self): return iter(self.dl)
    def __len__(self): return len(self.dl)

def unsized(cbs):
    return Learner(DataLoaders(Unsized(8), Unsized(8)), model(), loss_func=mse, opt_func=SGD, cbs=cbs)

@pytest.mark.parametrize('make, says', [
    (lambda: make_learner(8, cbs=GradientAccumulation(20)), "accum_bs=20 is not a multiple of the DataLoader's batch of 8 samples: use 16 or 24, or "
     'change its batch size to 20, with micro_batch_size=8 to split it'),
    (lambda: make_learner(64, cbs=GradientAccumulation(32)), 'use 64, or change'),
    (lambda: make_learner(8, cbs=GradientAccumulationSchedule(20, 64)), 'start_accum_bs=20'),
    (lambda: make_learner(8, cbs=GradientAccumulationSchedule(16, 60)), 'final_accum_bs=60'),
    (lambda: make_learner(8, cbs=GradientAccumulationSchedule(16, 64, finish=3)), 'finish=3 is outside of training: use a fraction of it (a float from 0.0 to 1.0), or a number of epochs (an int from 0 to 2)'),
    (lambda: make_learner(8, cbs=GradientAccumulationSchedule(16, 64, start=1, finish=.3)), 'start=0.5 is after finish=0.3'),
    (lambda: make_learner(8, cbs=GradientAccumulationSchedule(16, 64, schedule=lambda a,b: lambda pos: NAN)), 'batch size of nan'),
    (lambda: make_learner(8, cbs=GradientAccumulationSchedule(16, 64, schedule=lambda a,b: lambda pos: -pos)), 'must be 1 or more'),
    (lambda: unsized(GradientAccumulation(32)), 'cannot find the batch size of Unsized'),
    (lambda: make_learner(8, cbs=[GradientAccumulation(32), FastaiAccumulation(32)]), '2 callbacks that accumulate'),
    (lambda: make_learner(8, cbs=[GradientAccumulation(32), GradientAccumulationSchedule(32, 64)]), '2 callbacks that accumulate'),
    (lambda: make_learner(8, cbs=[GradientAccumulation(32), NonNativeMixedPrecision()]), 'use learn.to_fp16() instead'),
    (lambda: make_learner(8, n=44, cbs=GradientAccumulation(48, remainder='drop')), 'an epoch has 44 samples, which do not fill one window of '
        "accum_bs=48, and incomplete windows are dropped: use a smaller accum_bs, or remainder='step'"),
    (lambda: make_learner(8, n=44, drop_last=True, cbs=GradientAccumulation(48)), 'an epoch has 40 samples'),
    (lambda: make_learner(8, n=5, drop_last=True, cbs=GradientAccumulation(8)), 'an epoch has 0 samples'),
])
def test_before_training(make, says):
    learn = make()
    before = weights(learn)
    with pytest.raises(ValueError) as e: fit(learn, 2)
    assert says in str(e.value) and '\n' not in str(e.value).split(':\n\t')[-1]
    assert_same(weights(learn), before)

def test_num_items_that_is_no_count():
    learn = make_learner(8, cbs=GradientAccumulation(32, num_items=lambda learn: -1))
    with pytest.raises(ValueError, match='num_items must return a count'): fit(learn, 1)

def test_told_the_batch_size_it_works():
    learn = fit(unsized(GradientAccumulation(16, micro_batch_size=8)), 1)
    assert learn.recorder.accum_bs == [16,16] and learn.gradient_accumulation.micro_bs == 8

def test_plain_torch_loaders():
    ds = tud.TensorDataset(*data(96))
    dls = [DataLoaders(*[tud.DataLoader(ds, batch_size=bs)]*2) for bs in (32, 8)]
    big,small = (Learner(dl, model(), loss_func=mse, opt_func=SGD, cbs=cbs) for dl,cbs in zip(dls, (None, GradientAccumulation(32))))
    assert_same(weights(fit(small)), weights(fit(big)), 1e-12)

@pytest.mark.parametrize('call', [lambda: GradientAccumulation(64), lambda: GradientAccumulation(n_acc=64)])
def test_fastai_calls_run_unchanged(call): assert call().accum_bs == 64

def test_default_is_fastais(): assert GradientAccumulation().accum_bs == 32

@pytest.mark.parametrize('make', [lambda n: GradientAccumulation(micro_batch_size=n(8)), lambda n: GradientAccumulation(n(64), micro_batch_size=n(8)), lambda n: GradientAccumulation(n(64)),
                                  lambda n: GradientCache(n(8), rows=n(1)), lambda n: GradientAccumulationSchedule(n(32), n(64))])
@pytest.mark.parametrize('kind', [np.int64, np.int32])
def test_numpys_integers(make, kind, capsys):
    "As in a DataFrame; the fit, and what is printed, are those of Python's"
    res = [(losses(fit_aloud(make_learner(32, cbs=make(n)), 1)), capsys.readouterr().out) for n in (int, kind)]
    assert res[0] == res[1] and len(res[0][0]) > 0
    with pytest.raises(ValueError, match="accum_bs=48 is not a multiple of the DataLoader's batch"): fit(make_learner(32, cbs=GradientAccumulation(kind(48))), 1)
