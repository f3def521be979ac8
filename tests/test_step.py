"The hyper-parameters of a step: set for it, scaled by rules, and put back"
import pytest

from common import *
from fastxtend_accum.windows.step import StepHypers, hypers_of, scaled_hypers, scales_loss, set_hypers


def two_groups(params):
    params = list(params)
    return [params[:2], params[2:]]


def fastai_sgd():
    return SGD(two_groups(model().parameters()), lr=0.1, mom=0.9)


def torch_sgd():
    groups = two_groups(model().parameters())
    return OptimWrapper(groups, torch.optim.SGD, lr=0.1, momentum=0.9)


each_optimizer = pytest.mark.parametrize('make_opt', [fastai_sgd, torch_sgd])


@each_optimizer
def test_hypers_are_listed_by_name(make_opt):
    "A value for each group of parameters"
    opt = make_opt()
    opt.set_hyper('lr', [0.1, 0.2])
    assert hypers_of(opt, ['lr']) == dict(lr=[0.1, 0.2])
    everything = hypers_of(opt)
    assert everything['lr'] == [0.1, 0.2]
    assert everything.keys() == opt.hypers[0].keys()


@each_optimizer
def test_what_is_set_is_returned_as_it_was(make_opt):
    "Only what differs: the rest is not even touched"
    opt = make_opt()
    opt.set_hyper('lr', [0.1, 0.2])
    replaced = set_hypers(opt, dict(lr=[0.3, 0.4], mom=[0.9, 0.9]))
    assert replaced == dict(lr=[0.1, 0.2])
    assert hypers_of(opt, ['lr', 'mom']) == dict(lr=[0.3, 0.4], mom=[0.9, 0.9])
    assert set_hypers(opt, replaced) == dict(lr=[0.3, 0.4])
    assert hypers_of(opt, ['lr']) == dict(lr=[0.1, 0.2])


@each_optimizer
def test_rules_scale_the_present_values_of_each_group(make_opt):
    opt = make_opt()
    opt.set_hyper('lr', [0.1, 0.2])
    scaled = scaled_hypers(opt, {}, dict(lr=linear_scale, mom=half_life_scale), ratio=2)
    assert scaled == dict(lr=[0.2, 0.4], mom=[0.9**2, 0.9**2])
    assert hypers_of(opt, ['lr']) == dict(lr=[0.1, 0.2]), 'nothing is set'


@each_optimizer
def test_rules_scale_the_values_of_the_first_batch(make_opt):
    "Which a scheduler may have changed since; without a rule they are as they were"
    opt = make_opt()
    first = hypers_of(opt)
    opt.set_hyper('lr', 0.05)
    opt.set_hyper('mom', 0.5)
    scaled = scaled_hypers(opt, first, dict(lr=linear_scale), ratio=4)
    assert scaled.pop('lr') == [0.4, 0.4]
    del first['lr']
    assert scaled == first


# For the time of a step

@each_optimizer
def test_values_hold_until_they_are_restored(make_opt):
    opt = make_opt()
    before = hypers_of(opt)
    step_hypers = StepHypers(opt, dict(lr=[0.3, 0.4]))
    step_hypers.apply()
    assert hypers_of(opt, ['lr']) == dict(lr=[0.3, 0.4])
    step_hypers.restore()
    assert hypers_of(opt) == before


@each_optimizer
def test_what_a_callback_sets_meanwhile_stays(make_opt):
    "The others are restored"
    opt = make_opt()
    step_hypers = StepHypers(opt, dict(lr=[0.3, 0.4], mom=[0.8, 0.8]))
    step_hypers.apply()
    opt.set_hyper('lr', 0.05)
    step_hypers.restore()
    assert hypers_of(opt, ['lr', 'mom']) == dict(lr=[0.05, 0.05], mom=[0.9, 0.9])


@each_optimizer
def test_values_are_restored_once(make_opt):
    "What is set after that stays, even if it is the value of the step"
    opt = make_opt()
    step_hypers = StepHypers(opt, dict(lr=[0.3, 0.3]))
    step_hypers.apply()
    step_hypers.restore()
    opt.set_hyper('lr', 0.3)
    step_hypers.restore()
    assert hypers_of(opt, ['lr']) == dict(lr=[0.3, 0.3])


# In a fit

class NotesRate(Callback):
    "Notes the learning rate in these events"
    run_valid = False
    def __init__(self, *events):
        self.seen = {event: [] for event in events}
        for event in events: setattr(self, event, partial(self.note, event))

    def note(self, event):
        self.seen[event].append(self.opt.hypers[-1]['lr'])


class FallsWithEachBatch(Callback):
    "A scheduler that counts loader batches"
    run_valid = False
    def before_batch(self):
        self.opt.set_hyper('lr', falling_rate(self.train_iter))


def falling_rate(batch):
    return 0.1-0.002*batch


def test_a_step_has_the_rate_of_its_first_loader_batch():
    "Where loader batches are logged, schedulers may set others in the middle of a window, and find theirs after the step"
    notes = NotesRate('before_step', 'after_step')
    accum = GradientAccumulation(32, log_accum_batch=False)
    learn = fit(make_learner(8, cbs=[accum, FallsWithEachBatch(), notes]), 2)
    first_batches = [0, 4, 8, 12, 16, 20]
    last_batches = [3, 7, 11, 15, 19, 23]
    assert notes.seen['before_step'] == [falling_rate(i) for i in first_batches]
    assert notes.seen['after_step'] == [falling_rate(i) for i in last_batches]
    def rate_at(pct):
        n_batches = round(pct*24)
        return falling_rate(n_batches)
    steps = windows(96, 8, 32, 'step', 2)
    expected, _ = reference(steps, 96, sgd, rate_at)
    assert_moved(learn)
    assert_same(weights(learn), expected, ROUNDING)


@pytest.mark.parametrize('exc', [CancelStepException, CancelBatchException, CancelFitException, KeyboardInterrupt])
@pytest.mark.parametrize('event', ['before_step', 'after_step'])
def test_a_scaled_rate_ends_with_its_step_however_that_ends(event, exc):
    accum = GradientAccumulationSchedule(8, 32, finish=0, scale={'lr': linear_scale})
    learn = make_learner(8, cbs=accum)
    fault = Fault(exc, event, nth=3, order=0)
    notes = NotesRate('before_step')
    try: fit(learn, 1, cbs=[notes, fault])
    except (KeyboardInterrupt, CancelStepException): pass  # the second one, since fastai catches none after a step
    assert fault.count == 3
    assert notes.seen['before_step'][:2] == [0.4, 0.4]
    assert learn.opt.hypers[-1]['lr'] == 0.1


# A GradScaler

def test_a_scaler_looks_for_infinities_if_it_is_enabled():
    learn = make_learner(8)
    assert not scales_loss(learn)
    learn.scaler = GradScaler('cpu')
    assert scales_loss(learn)
    learn.scaler = GradScaler('cpu', enabled=False)
    assert not scales_loss(learn)


def test_the_scaler_of_mixed_precision():
    "In float16 it scales; bfloat16 needs none"
    found = []
    def look(self): found.append(scales_loss(self.learn))
    for mode in ('fp16', 'bf16'):
        cbs = [GradientAccumulation(32), CpuMixedPrecision(mode)]
        learn = make_learner(8, m=model().float(), loss_func=MSELossFlat(), cbs=cbs)
        fit(learn, 1, cbs=Callback(before_step=look))
    assert found == [True, True, True, False, False, False]
