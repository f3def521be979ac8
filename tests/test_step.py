"The hyper-parameters of a step: scaled by rules for its length, and put back"
import pytest

from common import *
from fastxtend_accum.windows.step import scaled_hypers, has_grad_scaler


def two_groups(params):
    params = list(params)
    return [params[:2], params[2:]]


def fastai_sgd(): return SGD(two_groups(model().parameters()), lr=.1, mom=.9)


def torch_sgd():
    groups = two_groups(model().parameters())
    return OptimWrapper(groups, torch.optim.SGD, lr=.1, momentum=.9)


each_optimizer = pytest.mark.parametrize('make_opt', [fastai_sgd, torch_sgd])


def hypers_of(opt):
    "Returns the rates and momenta of each parameter group"
    return [(group['lr'], group['mom']) for group in opt.hypers]


@each_optimizer
def test_rules_scale_each_group_for_the_length_of_a_step(make_opt):
    opt = make_opt()
    opt.set_hyper('lr', [.1, .2])
    with scaled_hypers(opt, dict(lr=linear_scale, mom=half_life_scale), ratio=2):
        assert hypers_of(opt) == [(.2, .9**2), (.4, .9**2)]
    assert hypers_of(opt) == [(.1, .9), (.2, .9)]


# In a fit

class NotesRate(Callback):
    "Notes the learning rate in `before_step`, and multiplies it by `factor`"
    def __init__(self, factor=1):
        self.factor = factor
        self.seen = []

    def before_step(self):
        rate = self.opt.hypers[-1]['lr']
        self.seen.append(rate)
        self.opt.set_hyper('lr', rate*self.factor)


def fit_scaled(*cbs):
    "Trains in windows of 32, which have four times the rate of those of 8"
    accum = GradientAccumulationSchedule(8, 32, finish=0, scale=dict(lr=linear_scale))
    learn = make_learner(8, cbs=accum)
    try: fit(learn, 1, cbs=cbs)
    except (KeyboardInterrupt, CancelStepException): pass  # the second one, since fastai catches none after a step
    return learn


@pytest.mark.parametrize('exc', [CancelStepException, CancelBatchException, CancelFitException, KeyboardInterrupt])
@pytest.mark.parametrize('event', ['before_step', 'after_step'])
@pytest.mark.filterwarnings('ignore:Fault cancels a window at its step')
def test_a_scaled_rate_ends_with_its_step_however_that_ends(event, exc):
    fault = Fault(exc, event, nth=3, order=0)
    notes = NotesRate()
    learn = fit_scaled(notes, fault)
    assert fault.count == 3
    assert notes.seen[:2] == [.4, .4]
    assert learn.opt.hypers[-1]['lr'] == .1


def test_a_rate_that_a_callback_sets_in_before_step_is_not_scaled_again():
    notes = NotesRate(factor=2)
    learn = fit_scaled(notes)
    assert notes.seen == [.4, .4, .4]
    assert learn.opt.hypers[-1]['lr'] == .1


class SetsRate(Callback):
    "Sets the rate after each step"
    def after_step(self): self.opt.set_hyper('lr', .02)


class CancelsAndSetsRate(SetsRate):
    "Cancels each step, and sets the rate after it"
    def before_step(self): raise CancelStepException


@pytest.mark.parametrize('kind', [SetsRate, CancelsAndSetsRate])
def test_a_rate_that_a_callback_sets_after_a_step_stays(kind):
    learn = fit_scaled(kind())
    assert learn.opt.hypers[-1]['lr'] == .02


# A GradScaler

@pytest.mark.parametrize('mode, scales', [('fp16', True), ('bf16', False)])
def test_the_scaler_of_mixed_precision(mode, scales):
    "In float16 it scales; bfloat16 needs none"
    found = []
    def look(self): found.append(has_grad_scaler(self.learn))
    cbs = [GradientAccumulation(32), CpuMixedPrecision(mode), Callback(before_step=look)]
    fit(make_learner(8, m=model().float(), loss_func=MSELossFlat(), cbs=cbs), 1)
    assert found == [scales, scales, scales]
