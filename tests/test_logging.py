"The promise about loggers: once a window they show what they show of a large batch, or else each loader batch"
import importlib.util
import tempfile
from importlib.metadata import version
from itertools import chain

import pytest
import wandb
from fastai.callback.tensorboard import TensorBoardCallback
from fastai.callback.wandb import WandbCallback
from packaging.version import Version
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common import *
from fastxtend_accum.logging import fix_wandb, plain_args

FLOAT32 = 1e-6  # losses are logged in float32


# What loggers have after a fit

def wandb_rows(train):
    "Calls `train` in a real run of W&B, offline, and returns what it has logged at each step"
    rows = {}
    fix_wandb()  # also for a Learner without our callbacks
    with wandb.init(project='test', dir='.') as run:
        log = wandb.log
        def log_and_keep(row, step=None):
            if step is not None: rows.setdefault(step, {}).update(row)
            log(row, step=step)
        with override_attr(wandb, 'log', log_and_keep): train()
        assert sorted(rows) == list(range(run.step))
    return list(rows.values())


def wandb_values(rows, name):
    "Returns the values of `name` in all rows that have it"
    return [row[name] for row in rows if name in row]


def scalars(folder, name):
    "Returns the steps and the values that TensorBoard has of `name`"
    board = EventAccumulator(folder).Reload()
    if name not in board.Tags()['scalars']: return [], []
    events = board.Scalars(name)
    return [o.step for o in events], [o.value for o in events]


def flat(rows):
    return list(chain(*rows))


def product_sum(pred, targ):
    return (pred*targ).sum().float()


class FitWithAllLoggers:
    "Trains for two epochs with every logger; `shown` has what each of them shows, and `samples` those of the steps"
    def __init__(self, bs, *cbs, n=100):
        folder = tempfile.mkdtemp(dir='.')
        board = TensorBoardCallback(folder, trace_model=False, log_preds=False)
        loggers = [WandbCallback(log_preds=False), board]
        metric = AccumMetric(product_sum, flatten=False)
        learn = make_learner(bs, n=n, cbs=[*loggers, *cbs], metrics=metric)
        valid = learn.dls.valid.new(bs=8)  # so that `micro_batch_size` need not make it smaller
        learn.dls = DataLoaders(learn.dls.train, valid)
        rows = wandb_rows(lambda: learn.fit_one_cycle(2, 0.1))
        recorder = learn.recorder
        self.shown = {
            'values': flat(floats(recorder.values)),
            'losses': losses(learn),
            'lrs': recorder.lrs,
            'iters': recorder.iters}
        for name in ('raw_loss', 'train_loss', 'epoch', 'lr_0'):
            self.shown[f'wandb {name}'] = [float(o) for o in wandb_values(rows, name)]
        for name in ('train_loss', 'valid_loss', 'lr_0'):
            self.shown[f'tensorboard {name}'] = flat(scalars(folder, name))
        self.samples = getattr(recorder, 'accum_bs', [])
        assert wandb_values(rows, 'accumulation_batch_size') == self.samples
        assert scalars(folder, 'accumulation_batch_size')[1] == self.samples


# Windows, and what is split: 32 samples each

KINDS = dict(
    windows=(8, partial(GradientAccumulation, 32, remainder='step')),
    pieces=(96, partial(GradientAccumulation, 32, remainder='step')),
    split=(32, partial(GradientAccumulation, micro_batch_size=8)),
    both=(16, partial(GradientAccumulation, 32, remainder='step', micro_batch_size=8)),
    schedule=(32, partial(GradientAccumulationSchedule, 32, 32, remainder='step', micro_batch_size=5)))


@pytest.mark.long
@pytest.mark.parametrize('kind, log_accum_batch', [
    ('windows', True),
    ('both', True),
    ('pieces', True),
    ('pieces', False),  # a piece is a loader batch to others
    ('split', True),
    ('split', False)])
def test_all_loggers_show_batches_of_32(kind, log_accum_batch):
    "Recorder, W&B and TensorBoard, and the samples of each step; for others, see test_fastai_callbacks.py"
    bs, accum = KINDS[kind]
    large = FitWithAllLoggers(32)
    small = FitWithAllLoggers(bs, accum(log_accum_batch=log_accum_batch))
    for name, values in large.shown.items():
        assert len(values), name
        assert_same(small.shown[name], values, FLOAT32)
    assert len(large.shown['losses']) == 8
    samples = [32, 32, 32, 4, 32, 32, 32, 4]
    assert small.samples == (samples if log_accum_batch else [])


class NotesPartLosses(Callback):
    "Notes the losses of the parts of 8 samples in each training batch"
    run_valid = False
    def before_fit(self):
        self.losses = []

    def after_pred(self):
        outputs = self.pred.detach().split(8)
        targets = self.y.split(8)
        self.losses += map(mse, outputs, targets)


@pytest.mark.long
def test_loggers_of_loader_batches():
    "With log_accum_batch=False each has its own loss and the learning rate of its window; steps are the same"
    parts = NotesPartLosses()
    large = FitWithAllLoggers(32, parts).shown
    fit_of_batches = FitWithAllLoggers(8, GradientAccumulation(32, remainder='step', log_accum_batch=False))
    small = fit_of_batches.shown
    assert_same(small['wandb raw_loss'], parts.losses, FLOAT32)
    assert_same(small['losses'], smoothed(parts.losses), FLOAT32)
    assert_same(small['wandb train_loss'], smoothed(parts.losses), FLOAT32)
    batches_per_step = tensor([4, 4, 4, 1, 4, 4, 4, 1])
    rates = as_tensor(large['lrs']).repeat_interleave(batches_per_step)
    assert_same(small['lrs'], rates, 1e-9)
    assert_same(small['wandb lr_0'], rates, 1e-9)
    valid_losses = slice(1, None, 3)  # of train_loss, valid_loss and product_sum
    assert_same(small['values'][valid_losses], large['values'][valid_losses], FLOAT32)
    assert_same(small['wandb epoch'], torch.arange(1, 27).double()/13, 1e-9)
    assert small['iters'] == [13, 26]
    assert fit_of_batches.samples == []


@pytest.mark.long
def test_loggers_show_the_rate_that_a_rule_has_scaled():
    "It is that of the step, which the optimizer has only while the step is taken"
    schedule = partial(GradientAccumulationSchedule, 32, 64, start=0.5, finish=0.5)
    plain = FitWithAllLoggers(8, schedule(), n=96)
    scaled = FitWithAllLoggers(8, schedule(scale={'lr': linear_scale}), n=96)
    samples = as_tensor(scaled.samples)
    assert scaled.samples == [32, 32, 32, 64, 32]
    rates = as_tensor(plain.shown['lrs'])*samples/32
    assert_same(scaled.shown['lrs'], rates, ROUNDING)
    assert_same(scaled.shown['wandb lr_0'], rates, ROUNDING)
    _, of_board = as_tensor(scaled.shown['tensorboard lr_0']).chunk(2)  # steps and values
    assert_same(of_board.unique(), rates.unique(), FLOAT32)  # in validation, TensorBoard logs the last one again


# W&B and TensorBoard

class Slow(Callback):
    "Takes 20 ms for each loader batch of 8 samples"
    run_valid = False
    def after_pred(self): time.sleep(.02)


def test_wandb_has_the_epoch_the_samples_and_the_speed_of_windows():
    accum = GradientAccumulation(32, remainder='step')
    learn = make_learner(8, n=88, cbs=[WandbCallback(log_preds=False), accum, Slow()])
    rows = wandb_rows(lambda: fit(learn, 2))
    assert 0 < max(wandb_values(rows, 'train_samples_per_sec')) < 8/.02
    assert wandb_values(rows, 'accumulation_batch_size') == [32, 32, 24, 32, 32, 24]
    assert_same(wandb_values(rows, 'epoch'), torch.arange(1, 7).double()/3, 1e-9)


def test_tensorboard_draws_the_model():
    board = TensorBoardCallback('board', log_preds=False)
    fit(make_learner(8, cbs=[GradientAccumulation(32, micro_batch_size=4), board]), 1)
    assert EventAccumulator('board').Reload().Tags()['graph']


def wandb_callback_of_fastai():
    "Returns the module of WandbCallback as fastai has it, without our fix"
    spec = importlib.util.find_spec('fastai.callback.wandb')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class WithArguments:
    "Its arguments are what W&B logs of it"
    def __init__(self, size, net, names):
        store_attr()


def test_fix_wandb_is_needed(monkeypatch):
    "From fastai 2.8.9 on. When this test fails, fastai has fixed its bug: take `fix_wandb` out"
    module = wandb_callback_of_fastai()
    monkeypatch.setitem(sys.modules, 'fastai.callback.wandb', module)
    has_bug = Version(version('fastai')) >= Version('2.8.9')
    if not has_bug:
        before = vars(module).copy()
        fix_wandb()
        assert vars(module) == before
        return
    with pytest.raises(TypeError): module._format_config_value(1)
    fix_wandb()
    assert module._format_config_value(1) == 1
    assert module.init_args is plain_args
    o = WithArguments(3, nn.Linear(1, 1), L('a'))
    assert plain_args(o) == dict(size=3)


def test_the_first_fit_of_a_process_can_log_to_wandb(monkeypatch):
    "WandbCallback and its bug are as they are after an import"
    module = wandb_callback_of_fastai()
    monkeypatch.setitem(sys.modules, 'fastai.callback.wandb', module)
    learn = make_learner(8, cbs=[GradientAccumulationSchedule(32, 32), module.WandbCallback(log_preds=False)])
    with wandb.init(project='test', dir='.') as run:
        fit(learn, 1)
        assert run.config['GradientAccumulationSchedule']['start_accum_bs'] == 32
        assert run.summary['accumulation_batch_size'] == 32


# Plots

def test_plot_accum_bs_shows_the_last_fit():
    learn = fit(make_learner(8, cbs=GradientAccumulation(32)), 1)
    ax = learn.recorder.plot_accum_bs()
    drawn = ax.patches[0].get_data()
    assert list(drawn.values) == [32, 32, 32]
    assert list(drawn.edges) == [0, 1, 2, 3]
    assert ax.get_xlabel() == 'optimizer steps'
    assert ax.get_ylim()[0] == 0
    assert learn.recorder.plot_accum_bs(ax) is ax
    assert len(ax.patches) == 2


@pytest.mark.parametrize('cbs', [[], GradientAccumulation(32, log_accum_batch=False)])
def test_plot_accum_bs_of_a_fit_without_sizes_is_an_error(cbs):
    "Also if the fit before had some, or if there was no fit"
    learn = make_learner(8)
    says = 'has no batch sizes: fit with GradientAccumulation and log_accum_batch=True'
    with pytest.raises(ValueError, match=says): learn.recorder.plot_accum_bs()
    fit(learn, 1, cbs=GradientAccumulation(32))
    fit(learn, 1, cbs=cbs)
    with pytest.raises(ValueError, match=says): learn.recorder.plot_accum_bs()


# lr_find

def exponential(num_it):
    "Returns the learning rates of `lr_find`"
    curve = SchedExp(1e-7, 10)
    return [curve(i/num_it) for i in range(num_it)]


@pytest.mark.parametrize('kind', ['windows', 'pieces', 'split', 'schedule'])
def test_lr_find_is_that_of_the_large_batch(kind):
    "Suggestion, rates and losses; and weights are put back"
    bs, accum = KINDS[kind]
    large = make_learner(32, n=100)
    small = make_learner(bs, n=100, cbs=accum())
    assert find_rate(small, 40, stop_div=False) == find_rate(large, 40, stop_div=False)
    assert len(losses(large)) == 40
    assert_same(small.recorder.lrs, large.recorder.lrs)
    relative_losses = as_tensor(losses(small))/as_tensor(losses(large))  # they grow
    assert_same(relative_losses, torch.ones(40), 1e-4)
    assert_same_weights(small, model())


def test_lr_find_tries_a_rate_for_each_window_even_if_loader_batches_are_logged():
    "20 rates for 20 steps, as if windows were logged"
    accum = GradientAccumulation(32, log_accum_batch=False)
    learn = make_learner(8, n=96, cbs=accum)
    find_rate(learn, 20, stop_div=False)
    assert len(losses(learn)) == 20
    assert accum.opt_steps == 20


@pytest.mark.parametrize('n, bs, accum_bs, num_it, remainder', [
    (44, 8, 16, 5, 'step'),  # the LRFinder makes 6 iterations of 5, but `lr_find` counts epochs for 5
    (88, 2, 32, 20, 'carry'),
    (88, 16, 4, 20, 'carry'),  # windows are parts of a batch
    (24, 8, 48, 20, 'carry'),  # a window needs two epochs
    (60, 8, 32, 20, 'drop'),  # an epoch drops almost as many samples as it uses
    (30, 16, 12, 20, 'drop')])  # also if windows are larger than `accum_bs`, to fit the loader batches
def test_lr_find_has_all_its_iterations(n, bs, accum_bs, num_it, remainder):
    "However many windows an epoch has"
    accum = GradientAccumulation(accum_bs, remainder=remainder)
    learn = make_learner(bs, n=n, cbs=accum)
    find_rate(learn, num_it, stop_div=False)
    rates = exponential(max(num_it, 6))
    assert_same(learn.recorder.lrs, rates, 1e-9)
    assert len(losses(learn)) == len(rates)


@pytest.mark.parametrize('n_epoch, n_losses', [(3, 18), (20, 100)])
def test_a_fit_with_an_lr_finder_of_the_users_has_the_epochs_that_were_asked_for(n_epoch, n_losses):
    learn = make_learner(16, n=96, cbs=GradientAccumulation(16))
    finder = LRFinder(num_it=100, stop_div=False)
    with quiet(learn): learn.fit(n_epoch, cbs=finder)
    assert learn.n_epoch == n_epoch
    assert len(losses(learn)) == n_losses


def items_but_in_the_second_batch(learn):
    "Returns 0 for one of six loader batches"
    inputs, _ = data(44)
    is_second = torch.equal(learn.x[0], inputs[8])
    return 0 if is_second else 8


def test_lr_find_leaves_out_windows_that_are_skipped():
    "Like batches that are cancelled: each is an iteration without a point"
    learn = make_learner(8, n=44, cbs=GradientAccumulation(8, num_items=items_but_in_the_second_batch))
    with pytest.warns(UserWarning, match='skipped a step: its window has nothing to average over'):
        find_rate(learn, 20, stop_div=False)
    kept = [rate for i, rate in enumerate(exponential(20)) if i%6 != 1]
    assert len(kept) == 16
    assert_same(learn.recorder.lrs, kept, 1e-9)
    assert learn.train_iter == 20
