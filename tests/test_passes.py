"""Callbacks in the passes of a loader batch that runs in several: it is split, or memory runs out and it runs again. To
them it is one batch, as in the plain Learner (windows/events.py, memory/micro_batches.py)"""
import pytest

from callback_fits import At, Scaled
from common import *
from limited_memory import OutOfMemory
from fastxtend_accum.windows.events import autocast_depth

BFLOAT16 = 5e-3  # rounding of sums in bfloat16, which are others in micro-batches


def in_micro_batches(): return [GradientAccumulation(micro_batch_size=8)]
def in_split_windows(): return [GradientAccumulation(32, micro_batch_size=5)]


def after_memory_ran_out():
    "In the second batch, after its passes and before its step"
    return [GradientAccumulation(micro_batch_size='auto'), OutOfMemory('after_backward', 2, order=99)]


# Autocast, which is entered in `before_batch` and left in the pass

class OwnAutocast(Callback):
    "Leaves in `event` what it has entered in `before_batch`"
    run_valid = False

    def __init__(self, event):
        setattr(self, event, self.leave)

    def before_batch(self):
        self.autocast = torch.autocast('cpu', torch.bfloat16)
        self.autocast.__enter__()

    def leave(self):
        self.autocast.__exit__(None, None, None)


def mse_in_float32(pred, targ):
    return F.mse_loss(pred.float(), targ)


def fit_noting_dtypes(*cbs):
    "Returns a fit, and the types of the outputs of a layer in training and in validation"
    dtypes = {True: [], False: []}
    learn = make_learner(32, m=model().float(), loss_func=mse_in_float32, cbs=cbs)
    learn.model[0].register_forward_hook(lambda m, args, output: dtypes[m.training].append(output.dtype))
    return fit(learn, 2), dtypes[True], dtypes[False]


@pytest.mark.filterwarnings('ignore:out of memory in training')
@pytest.mark.parametrize('several_passes', [in_micro_batches, in_split_windows, after_memory_ran_out])
@pytest.mark.parametrize('event', ['after_pred', 'after_loss'])
def test_own_autocast_holds_in_each_pass(event, several_passes):
    "No pass in training runs in float32, and all in validation do"
    plain, expected, _ = fit_noting_dtypes(OwnAutocast(event))
    ours, in_training, in_validation = fit_noting_dtypes(OwnAutocast(event), *several_passes())
    assert len(expected) == 6
    assert len(in_training) >= 12
    assert set(in_training) == {torch.bfloat16}
    assert set(in_validation) == {torch.float32}
    assert autocast_depth() == 0
    assert_same_weights(ours, plain, BFLOAT16)


@pytest.mark.filterwarnings('ignore:CUDA is not available', 'ignore:torch.cuda.amp.GradScaler is enabled')
def test_mixed_precision_leaves_as_many_contexts_as_it_enters_where_batches_are_split():
    "Without a GPU its autocast does nothing, but PyTorch counts it"
    fit(make_learner(32, cbs=[MixedPrecision(), *in_micro_batches()]), 1)
    assert autocast_depth() == 0


# Whatever else a callback sets up

class OwnFactor(Callback):
    "Sets a factor in `before_batch`, and takes it back in `after_batch`"
    run_valid = False
    n_set_up = 0

    def before_batch(self):
        self.n_set_up += 1
        self.model.scale = 2.

    def after_batch(self):
        self.model.scale = 1.


@pytest.mark.parametrize('several_passes', [in_micro_batches, in_split_windows])
def test_what_a_callback_sets_up_for_a_batch_holds_in_each_pass(several_passes):
    "It is set up once; there is nothing to warn of, and a warning would be an error here"
    def train(*cbs): return fit(make_learner(32, m=Scaled(*model()), cbs=cbs), 2)
    plain = train(OwnFactor())
    ours = train(OwnFactor(), *several_passes())
    assert ours.own_factor.n_set_up == 6
    assert_apart(plain, train())
    assert_same_weights(ours, plain, ROUNDING)


# Inputs, targets and outputs after the passes

class SeesBatches(Callback):
    "Keeps what a logger sees at the end of each batch"
    order = 60
    run_valid = False

    def __init__(self):
        self.seen = []

    def after_batch(self):
        self.seen.append((self.x, self.y, self.learn.pred.detach()))


class SoftensTargets(Callback):
    "Replaces the targets of each pass"
    run_valid = False

    def after_pred(self):
        self.learn.yb = (self.y*.9,)


@pytest.mark.parametrize('micro_batch_size', [8, 5])
def test_loggers_see_the_whole_batch_whatever_callbacks_leave_in_a_pass(micro_batch_size):
    "Inputs and targets are those from before the passes; the passes use the changed ones, as in the plain fit"
    def run(*cbs):
        sees = SeesBatches()
        return fit(make_learner(32, cbs=[SoftensTargets(), sees, *cbs]), 1), sees.seen
    plain, expected = run()
    ours, seen = run(GradientAccumulation(micro_batch_size=micro_batch_size))
    assert_trained_as(ours, plain)
    for i, ((inputs, targets, outputs), of_plain) in enumerate(zip(seen, expected, strict=True)):
        assert_same(inputs, of_plain[0])
        assert_same(targets, data(96)[1][32*i:32*i+32])
        assert_same(outputs, of_plain[2], ROUNDING)


def test_inputs_and_outputs_of_the_samples_that_a_callback_keeps():
    "It takes samples out of each batch before the passes"
    def keep(self):
        self.learn.xb = (self.x[:20],)
        self.learn.yb = (self.y[:20],)
    keeps = At('before_batch', keep)
    sees = SeesBatches()
    fit(make_learner(32, cbs=[keeps, sees, *in_micro_batches()]), 1)
    assert len(sees.seen) == 3
    for seen in sees.seen:
        assert [len(o) for o in seen] == [20, 20, 20]
