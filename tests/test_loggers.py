"What fastai's loggers are told of each window: metrics, batch sizes and hyper-parameters"
import pytest
from fastai.callback.tensorboard import TensorBoardCallback

from common import *
from fastxtend_accum.windows.loggers import Loggers

FLOAT32 = 1e-6  # losses are computed in float32


# Training metrics

def absolute_error(pred, targ):
    return (pred-targ).abs().mean().float()


class MeanOverSamples(Metric):
    "The mean of what `read` finds in the Learner, over samples"
    def __init__(self, read):
        self.read = read

    def reset(self):
        self.total = 0.
        self.samples = 0

    def accumulate(self, learn):
        samples = len(learn.y)
        self.total += self.read(learn).item()*samples
        self.samples += samples

    @property
    def value(self):
        return self.total/self.samples if self.samples else None

    @property
    def name(self):
        return 'mean'


# By name, a metric; all but the first one read the loss of each batch
METRICS = dict(
    outputs=lambda: AvgMetric(absolute_error),
    avg_loss=AvgLoss,
    loss_grad=lambda: MeanOverSamples(lambda learn: learn.loss_grad))

# By name, samples in a loader batch and in a window, and what makes windows of them
WINDOWS = dict(
    windows=(8, 32, GradientAccumulation(32)),
    uneven_windows=(10, 40, GradientAccumulation(40)),
    split=(32, 32, GradientAccumulation(micro_batch_size=8)),
    uneven_split=(32, 32, GradientAccumulation(micro_batch_size=5)),
    both=(16, 32, GradientAccumulation(32, micro_batch_size=8)),
    schedule=(8, 32, GradientAccumulationSchedule(32, 32, remainder='step')),
    cache=(32, 32, GradientCache(8)))


def epoch_values(bs, metrics, *cbs):
    "Trains on 100 samples for two epochs with training metrics, and returns the values of each"
    recorder = Recorder(train_metrics=True)
    learn = make_learner(bs, n=100, cbs=[recorder, *cbs], metrics=metrics)
    fit(learn, 2)
    assert_moved(learn)
    return floats(learn.recorder.values)


@pytest.mark.parametrize('name,kind', paired(METRICS, WINDOWS))
def test_training_metrics_are_those_of_the_large_batch(name, kind):
    bs, window_bs, cb = WINDOWS[kind]
    make_metrics = METRICS[name]
    small = epoch_values(bs, make_metrics(), deepcopy(cb))
    large = epoch_values(window_bs, make_metrics())
    assert_same(small, large, FLOAT32)


class NotesLosses(Callback):
    "Notes both losses that the Learner has after a training batch"
    run_valid = False
    def before_fit(self):
        self.seen = []

    def after_batch(self):
        self.seen.append([self.learn.loss.item(), self.learn.loss_grad.item()])


@pytest.mark.parametrize('kind, order', paired(WINDOWS, [0, 60]))
def test_both_losses_after_a_window_are_its_mean(kind, order):
    bs, window_bs, cb = WINDOWS[kind]
    notes = NotesLosses()
    notes.order = order
    fit(make_learner(window_bs, n=100, cbs=notes))
    large = notes.seen
    fit(make_learner(bs, n=100, cbs=[notes, deepcopy(cb)]))
    assert_same(notes.seen, large, FLOAT32)


@pytest.mark.parametrize('event', ['before_step', 'after_step', 'after_batch'])
def test_training_metrics_go_on_after_an_interrupt(event):
    "They pause while loggers see the window, of which they have seen each loader batch"
    metric = AvgMetric(absolute_error)
    learn = make_learner(8, cbs=[Recorder(train_metrics=True), GradientAccumulation(32)], metrics=metric)
    fault = Fault(KeyboardInterrupt, event, nth=2, order=20)
    with pytest.raises(KeyboardInterrupt): fit(learn, 1, cbs=fault)
    assert 'accumulate' not in vars(metric)


def test_a_metric_keeps_a_method_of_its_own():
    "As a user may set it on one metric, in the place of that of its class"
    metric = CountsBatches()
    seen = []
    metric.accumulate = seen.append
    learn = fit(make_learner(8, cbs=[Recorder(train_metrics=True), GradientAccumulation(32)], metrics=metric), 2)
    assert metric.accumulate == seen.append
    n_batches = len(learn.dls.train)+2*len(learn.dls.valid)  # each of the two Recorders shows it those of validation
    assert len(seen) == 2*n_batches


class CountsBatches(Metric):
    "The number of batches that it sees"
    def reset(self):
        self.n = 0

    def accumulate(self, learn):
        self.n += 1

    @property
    def value(self):
        return self.n


@pytest.mark.parametrize('bs, cb', [
    (32, None),
    (8, GradientAccumulation(32)),
    (32, GradientAccumulation(micro_batch_size=8))])
def test_training_metrics_do_not_see_a_batch_without_targets(bs, cb):
    "As in fastai: the second window of 32 has none"
    def drop_targets(self):
        if self.training and self.iter == 1: self.learn.yb = ()

    cbs = [Recorder(train_metrics=True), Callback(before_batch=drop_targets), *L(cb)]
    learn = fit(make_learner(bs, cbs=cbs, metrics=CountsBatches()), 1)
    _, n_in_training, _, n_in_validation = floats(learn.recorder.values)[0]
    assert n_in_training == 2*32/bs
    assert n_in_validation >= 2


# Samples in each window

class AnotherRecorder(Recorder): "Some loggers add one of their own"


def test_each_recorder_has_the_samples():
    another = AnotherRecorder()
    learn = fit(make_learner(8, cbs=[another, GradientAccumulation(32)]), 1)
    assert another.accum_bs == learn.recorder.accum_bs == [32, 32, 32]


# Hyper-parameters

def test_loggers_are_shown_other_hyper_parameters_for_a_while():
    "As they were at that time: they may be changed meanwhile"
    learn = make_learner(8, cbs=TensorBoardCallback('board'))
    learn.create_opt()
    loggers = Loggers(learn)
    hypers = [dict(lr=0.5)]
    loggers.show_hypers(hypers)
    hypers[0]['lr'] = 0.1
    for logger in (learn.recorder, learn.tensor_board): assert logger.opt.hypers == [dict(lr=0.5)]
    loggers.end_round()
    for logger in (learn.recorder, learn.tensor_board): assert logger.opt is learn.opt
