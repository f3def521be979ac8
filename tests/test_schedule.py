"A batch that changes in training: its sizes, its steps, its preview, and the rules that scale hyper-parameters with it"
import pickle
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from common import *
from fastxtend_accum.schedule import fraction_of_fit
from same_fit import FLOAT32


def sizes(learn):
    "Returns the samples of each step of the last fit"
    return learn.recorder.accum_bs


def learner_of_128(*cbs, **kwargs):
    "Returns a Learner whose epoch has 16 batches of 8 samples"
    return make_learner(8, n=128, cbs=cbs, **kwargs)


def scheduled_fit(*args, start_epoch=0, **kwargs):
    "Trains for 4 epochs of 128 samples under a schedule, and returns the samples of each step"
    learn = learner_of_128(GradientAccumulationSchedule(*args, **kwargs))
    return sizes(fit(learn, 4, start_epoch=start_epoch))


# The same fit by a plain Learner, whose batches have the sizes of the schedule

def jumps(start, end):
    def size_at(position): return start if position < 1/3 else (start+end)/2
    return size_at


def by_way_of_32(start, end):
    return combine_scheds([0.5, 0.5], [SchedLin(start, 32), SchedCos(32, end)])


ANNEALERS = dict(cos=SchedCos, lin=SchedLin, exp=SchedExp, jumps=jumps, combined=by_way_of_32)


def by_epoch(steps, n_epoch):
    "Returns the steps that are taken in each epoch"
    epochs = [[] for _ in range(n_epoch)]
    for samples, pct in steps:
        epoch = int(pct*n_epoch+1e-9)
        goes_on = samples[-1] < samples[0]  # with the first samples of the next epoch
        if goes_on: epoch += 1
        epochs[epoch].append(samples)
    return epochs


class SetsRates(Callback):
    "Sets the learning rates of one training batch after the other"
    run_valid = False
    def __init__(self, rates):
        self.rates = iter(rates)

    def before_batch(self):
        self.opt.set_hyper('lr', next(self.rates))


def plain_fit(steps, n, n_epoch, rate):
    "Trains a Learner without our callbacks on the samples of each step, with the rate at its position"
    rates = [rate(pct) for _, pct in steps]
    learn = make_learner(8, n=n, cbs=SetsRates(rates))
    use_batches(learn, by_epoch(steps, n_epoch))
    return fit(learn, n_epoch)


@pytest.mark.parametrize('start, end, n, drop_last, remainder, annealer', [
    (16, 64, 128, False, 'step', 'cos'),
    (64, 16, 124, False, 'carry', 'lin'),
    (16, 64, 124, True, 'drop', 'exp'),
    (64, 16, 128, False, 'drop', 'jumps'),
    (16, 64, 124, False, 'carry', 'combined'),
    (64, 16, 124, True, 'step', 'exp')])
def test_a_fit_is_that_of_a_learner_with_these_batches(start, end, n, drop_last, remainder, annealer):
    "The same samples in each step, learning rates, losses and weights; and the preview says so before"
    curve = ANNEALERS[annealer](start, end)
    def size_at(pct):
        "Returns the multiple of 8 that is nearest to the curve, from a quarter to three quarters of training"
        if pct >= 0.75: return end
        position = max(pct-0.25, 0)*2
        return 8*int(curve(position)/8+0.5+1e-9)
    rate = SchedCos(0.1, 0.01)
    steps = windows(n, 8, size_at, remainder, 5, drop_last)
    accum = GradientAccumulationSchedule(start, end, 0.25, 0.75, ANNEALERS[annealer], remainder=remainder)
    learn = make_learner(8, n=n, cbs=accum, drop_last=drop_last)
    preview = accum.preview(5, learn.dls)
    fit(learn, 5, cbs=ParamScheduler({'lr': rate}))
    plain = plain_fit(steps, n, 5, rate)
    assert len(set(sizes(learn))) > 2
    expected_sizes = [len(samples) for samples, _ in steps]
    expected_starts = [pct*5 for _, pct in steps]
    assert sizes(learn) == expected_sizes
    assert [size for _, size in preview] == expected_sizes
    assert_same([start for start, _ in preview], expected_starts, 1e-9)
    assert_trained_as(learn, plain)
    assert_same(learn.recorder.lrs, plain.recorder.lrs, ROUNDING)
    assert_same_logs(learn, plain, FLOAT32)


def test_an_int_counts_epochs_and_a_float_is_a_fraction():
    in_epochs = scheduled_fit(16, 64, start=1, finish=3)
    in_fractions = scheduled_fit(16, 64, start=0.25, finish=0.75)
    assert in_epochs == in_fractions
    to_the_end = scheduled_fit(64, 8, start=4, finish=1.0)
    assert set(to_the_end) == {64}
    jump = scheduled_fit(16, 64, start=0.25, finish=0.25)
    assert Counter(jump) == {16: 8, 64: 6}
    assert jump == sorted(jump)


def test_a_resumed_fit_has_the_same_sizes():
    whole = scheduled_fit(16, 64, finish=0.9, remainder='step')
    resumed = scheduled_fit(16, 64, finish=0.9, remainder='step', start_epoch=2)
    assert sum(whole) == 4*128
    assert sum(resumed) == 2*128
    assert whole[-len(resumed):] == resumed


class Stateful(nn.Sequential):
    "Carries a state from batch to batch, as far as fastai can tell"
    def reset(self):
        pass


@pytest.mark.parametrize('kind, expected', [
    (nn.Sequential, [48, 48, 48, 48, 48]),
    (Stateful, [48, 48, 24, 48, 48, 24])])
def test_an_incomplete_window_is_carried_unless_the_model_carries_a_state(kind, expected):
    "That is the default, and the preview says so"
    accum = GradientAccumulationSchedule(48, 48)
    learn = make_learner(8, n=120, m=kind(*model()), cbs=accum)
    preview = accum.preview(2, learn.dls)
    fit(learn, 2)
    assert [size for _, size in preview] == expected
    assert sizes(learn) == expected


# Where a point lies, and what is an error

@pytest.mark.parametrize('point, error, says', [
    (True, TypeError, r'start must be a float \(fraction of training\) or an int \(epochs\), not True'),
    ('half', TypeError, "not 'half'"),
    (-1, ValueError, 'start=-1 is outside of training: use .* a number of epochs'),
    (1.5, ValueError, 'a float from 0.0 to 1.0'),
    (math.nan, ValueError, 'start=nan is outside of training'),
    (5, ValueError, 'start=5 is outside of training: .* the first fit of fine_tune has one epoch')])
def test_a_point_outside_of_training_is_an_error(point, error, says):
    with pytest.raises(error, match=says): fraction_of_fit('start', point, 4)


def curve_through(size):
    "Returns an annealer that is `size` in the middle"
    return lambda start, end: lambda position: size


@pytest.mark.parametrize('kwargs, says', [
    (dict(start_accum_bs=20), 'start_accum_bs=20 .* not a multiple'),
    (dict(start=0, finish=3), 'finish=3 is outside of training'),
    (dict(start=2, finish=0.1), 'start=2 is after finish=0.1'),
    (dict(schedule=curve_through(0.5)), 'the schedule gives a batch size of 0.5'),
    (dict(schedule=curve_through(math.nan)), 'the schedule gives a batch size of nan'),
    (SchedSteps({0: 16, 2: 32, 5: 64}), 'finish=5 is outside of training'),
    (SchedSteps({0: 16, 0.5: 20, 0.75: 64}), r'steps\[0.5\]=20 .*not a multiple')])
def test_a_preview_and_training_refuse_the_same(kwargs, says):
    kwargs = dict(start_accum_bs=16, final_accum_bs=64) | kwargs
    accum = GradientAccumulationSchedule(**kwargs)
    learn = make_learner(8, cbs=accum)
    with pytest.raises(ValueError, match=says): accum.plot(2, learn.dls)
    with pytest.raises(ValueError, match=says): fit(learn, 2)
    assert_same_weights(learn, model())


# The preview


@pytest.mark.parametrize('n, kwargs', [(128, {}), (24, dict(remainder='drop'))])  # of which no epoch fills a window
def test_the_plot_shows_the_preview(n, kwargs):
    accum = GradientAccumulationSchedule(32, 64, finish=0.9, **kwargs)
    dls = make_learner(8, n=n).dls
    windows = accum.preview(4, dls)
    ax = accum.plot(4, dls)
    drawn = ax.patches[0].get_data()
    assert [*zip(drawn.edges, drawn.values)] == windows
    assert drawn.edges[-1] == 4
    assert ax.get_title() == f'{len(windows)} optimizer steps'
    assert ax.get_xlabel() == 'epochs'


# Rules that scale hyper-parameters, against loops by hand

RATE_AND_MOMENTUM = dict(lr=sqrt_scale, mom=half_life_scale)


def jumps_with(scale=None, **kwargs):
    "Returns a schedule from 16 to 64 samples in the middle of training, with rules"
    return GradientAccumulationSchedule(16, 64, start=0.5, finish=0.5, scale=scale, **kwargs)


def train_by_hand(opt, m, set_hypers):
    """Trains `m` for 4 epochs of 128 samples on the batches of `jumps_with`; before each step it calls
    `set_hypers(group, pct, ratio)` for each parameter group"""
    inputs, targets = data(128)
    def size_at(pct): return 16 if pct < 0.5 else 64
    for samples, pct in windows(128, 8, size_at, 'step', 4):
        for group in opt.param_groups: set_hypers(group, pct, len(samples)/16)
        opt.zero_grad()
        errors = m(inputs[samples])-targets[samples]
        errors.pow(2).mean().backward()
        opt.step()
    return weights(m)


torch_sgd = partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=0.9))
ROUNDING_THAT_ADDS_UP = 1e-9


@pytest.mark.parametrize('opt_func', [torch_sgd, partial(SGD, mom=0.9)])
def test_a_scaled_rate_and_momentum(opt_func):
    "Beside a scheduler of both: the rules act on what it sets"
    rate = SchedCos(0.1, 0.01)
    momentum = SchedLin(0.9, 0.8)
    scheduler = ParamScheduler(dict(lr=rate, mom=momentum))
    learn = learner_of_128(jumps_with(RATE_AND_MOMENTUM), scheduler, opt_func=opt_func)
    fit(learn, 4)
    rates = []
    def set_hypers(group, pct, ratio):
        group['lr'] = rate(pct)*ratio**0.5
        group['momentum'] = momentum(pct)**ratio
        rates.append(group['lr'])
    m = model()
    expected = train_by_hand(torch.optim.SGD(m.parameters(), lr=0.1), m, set_hypers)
    assert_moved(learn)
    assert_same(weights(learn), expected, ROUNDING_THAT_ADDS_UP)
    assert_same(learn.recorder.lrs, rates, ROUNDING)


def test_the_ratio_is_of_the_samples_in_the_step():
    "Of a short window, too, down to less than the start; and nothing compounds over fits with rates of their own"
    accum = GradientAccumulationSchedule(
        16, 64, finish=0.9, schedule=SchedLin, scale=RATE_AND_MOMENTUM, remainder='step')
    learn = make_learner(8, n=124, cbs=accum)
    for lr in (0.1, 0.1, 0.03):
        fit(learn, 4, lr=lr)
        assert len(set(sizes(learn))) > 4
        assert min(sizes(learn)) < 16
        expected_rates = [lr*(size/16)**0.5 for size in sizes(learn)]
        assert_same(learn.recorder.lrs, expected_rates, ROUNDING)
        assert learn.opt.hypers[0]['lr'] == lr


def test_lr_find_has_the_starting_size_and_rate():
    plain = make_learner(8, cbs=jumps_with())
    scaled = make_learner(8, cbs=jumps_with(RATE_AND_MOMENTUM))
    large = make_learner(16)
    expected = find_rate(large, 20)
    for learn in (plain, scaled):
        assert find_rate(learn, 20) == expected
        assert_same(learn.recorder.lrs, large.recorder.lrs)


# Steps

@draws
@given(
    points=st.lists(st.integers(1, 15), max_size=4, unique=True),
    n_batches=st.lists(st.integers(1, 9), min_size=5, max_size=5),
    in_epochs=st.booleans())
def test_any_steps(points, n_batches, in_epochs):
    "At each position of 16 epochs a window has the size of the last point before it; also after pickle"
    points = [0, *points]
    named = points if in_epochs else [point/16 for point in points]
    size_of = {point: 8*n for point, n in zip(points, n_batches)}
    steps = dict(zip(named, size_of.values()))
    kwargs = pickle.loads(pickle.dumps(SchedSteps(steps)))
    accum = GradientAccumulationSchedule(**kwargs)
    for quarter in range(64):
        point = max(o for o in points if o <= quarter/4)
        assert accum.window_size_at(quarter/64, n_epoch=16) == size_of[point]


def test_a_step_that_is_shorter_than_a_percent_of_the_fit_is_taken():
    accum = GradientAccumulationSchedule(**SchedSteps({0: 8, 1: 32, 2: 8}))
    preview = accum.preview(300, learner_of_128().dls)
    assert Counter(size for _, size in preview) == {8: 16*299, 32: 4}


@pytest.mark.parametrize('steps, error, says', [
    ({0.5: 64}, ValueError, 'begins at 0'),
    ([64], ValueError, 'must be a dict'),
    ({0: 64, 0.5: 128, 3: 8}, ValueError, 'not both'),
    ({0: 64, 1.5: 128}, ValueError, '0.0 to 1.0'),
    ({0: 64, -1: 128}, ValueError, 'outside of training'),
    ({0: 64, 0.5: 0}, ValueError, r'steps\[0.5\] must be at least 1'),
    ({0: 64, 'x': 8}, TypeError, 'must be a float')])
def test_steps_that_are_none_are_an_error(steps, error, says):
    with pytest.raises(error, match=says): SchedSteps(steps)


def test_one_argument_instead_of_two_is_an_error():
    "SchedSteps returns several, so it needs asterisks"
    with pytest.raises(TypeError, match='final_accum_bs'): GradientAccumulationSchedule(SchedSteps({0: 16, 0.5: 32}))


@pytest.mark.parametrize('name', ['accum_bs', 'n_acc', 'start_accum_bs'])
def test_a_size_that_is_set_before_a_fit_is_the_size_at_the_start(name):
    cb = GradientAccumulationSchedule(8, 32, finish=1., schedule=SchedNo)
    setattr(cb, name, 16)
    learn = fit(make_learner(8, n=64, cbs=cb), 1)
    assert sizes(learn) == [16, 16, 16, 16]


@pytest.mark.parametrize('middle', [64, 4])
def test_a_curve_may_leave_the_range_between_start_and_final(middle):
    "Above both, and below the loader's batch"
    def there_and_back(start, final): return lambda pos: start + (middle-start)*math.sin(math.pi*pos)
    accum = GradientAccumulationSchedule(16, 16, finish=1., schedule=there_and_back, remainder='step')
    learn = fit(make_learner(16, n=320, cbs=accum), 2)
    assert sizes(learn)[0] == 16
    assert middle in sizes(learn)
    assert sizes(learn) == [size for _, size in accum.preview(2, learn.dls)]
