"""Callbacks and losses in the passes of a loader batch that runs in several: it is split, or memory runs out and it
runs again. To them it is one batch, as in the plain Learner (windows/events.py, memory/micro_batches.py)"""
import pytest
from fastai.metrics import LossMetrics
from torch.utils._pytree import tree_flatten

from common import *
from limited_memory import OutOfMemory

FLOAT32 = 5e-6  # rounding of float32 weights, and of the Recorder
PARTS = 1e-4  # rounding of float32 sums over 32 samples
BFLOAT16 = 5e-3  # rounding of sums in bfloat16, which are others in micro-batches

# Asserted in a section of its own; elsewhere it is known
warns_of_set_up = pytest.mark.filterwarnings('ignore:.* is called once per micro-batch, before_batch once per')
warns_later = pytest.mark.filterwarnings('ignore:out of memory in training')


def in_micro_batches(): return [GradientAccumulation(micro_batch_size=8)]
def in_unequal_micro_batches(): return [GradientAccumulation(micro_batch_size=5)]
def in_split_windows(): return [GradientAccumulation(32, micro_batch_size=5)]


def after_memory_ran_out():
    "In the second batch, after its passes and before its step"
    return [GradientAccumulation(micro_batch_size='auto'), OutOfMemory('after_backward', 2, order=99)]


def with_blocks_recomputed():
    return [ActivationCheckpointing(lambda m: [m[2]]), OutOfMemory('after_backward', 2, order=99)]


# What a callback sets up in `before_batch`, and takes back once a pass has used it

class ScalesOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 1.

    def forward(self, x): return x*self.factor


def scaled_model():
    "Returns a model whose last layer is a factor"
    m = model()
    m.append(ScalesOutput())
    return m


class SetsUp(Callback):
    "Sets something up in `before_batch`, and takes it back in an `event` of the pass"
    run_valid = False

    def __init__(self, event): setattr(self, event, self.take_back)
    def before_batch(self): self.set_up()


class OwnHook(SetsUp):
    def set_up(self): self.handle = self.model[0].register_forward_hook(lambda m, args, output: output*2)
    def take_back(self): self.handle.remove()


class OwnFactor(SetsUp):
    def set_up(self): self.model[-1].factor = 2.
    def take_back(self): self.model[-1].factor = 1.


class OwnFlag(SetsUp):
    "Its hook, which is there all the time, acts if its flag is set"
    def before_fit(self):
        self.is_active = False
        self.model[0].register_forward_hook(self.double)

    def double(self, m, args, output): return output*2 if self.is_active else output
    def set_up(self): self.is_active = True
    def take_back(self): self.is_active = False


class OwnLayer(SetsUp):
    def set_up(self): self.model[1] = nn.Sigmoid()
    def take_back(self): self.model[1] = nn.Tanh()


class OwnLoss(SetsUp):
    def set_up(self): self.learn.loss_func = huber
    def take_back(self): self.learn.loss_func = mse


def huber(pred, targ): return F.huber_loss(pred, targ, delta=.1).float()


class OwnGradientHook(SetsUp):
    "It forgets the hook once it has removed it"
    def set_up(self): self.handle = self.model[0].weight.register_hook(lambda grad: grad*2)

    def take_back(self):
        self.handle.remove()
        self.handle = None


set_ups = [
    (OwnHook, 'after_pred'),
    (OwnHook, 'after_loss'),
    (OwnFactor, 'after_pred'),
    (OwnFactor, 'after_backward'),
    (OwnFlag, 'before_backward'),
    (OwnLayer, 'after_pred'),
    (OwnLoss, 'after_loss'),
    (OwnLoss, 'after_backward'),
    (OwnGradientHook, 'after_backward')]


@warns_of_set_up
@warns_later
@pytest.mark.filterwarnings('ignore:could not check')
@pytest.mark.parametrize('several_passes', [
    in_micro_batches,
    in_split_windows,
    after_memory_ran_out,
    with_blocks_recomputed])
@pytest.mark.parametrize('sets_up,event', set_ups)
def test_what_a_callback_sets_up_holds_in_each_pass(sets_up, event, several_passes):
    """It takes it back in an event that comes once a pass. The fit is that of whole batches, unless its class has the
    value that it takes back, its hook of a parameter leaves a handle, or it replaces the batch: so that a warning
    before training names all such callbacks"""
    def run(*cbs): return fit(make_learner(32, m=scaled_model(), cbs=cbs), 2)
    plain = run(sets_up(event))
    ours = run(sets_up(event), *several_passes())
    assert_apart(plain, run())
    assert_same(weights(ours), weights(plain), ROUNDING)
    assert_same(losses(ours), losses(plain), FLOAT32)


warns_of_cache = pytest.mark.filterwarnings('ignore:GradientCache runs micro-batches again in the backward pass')


@warns_of_cache
@pytest.mark.parametrize('sets_up,event', [
    (OwnFactor, 'after_pred'),
    (OwnFactor, 'after_loss'),
    (OwnLayer, 'after_pred'),
    (OwnHook, 'after_backward'),
    (OwnFlag, 'after_backward')])
def test_what_a_callback_sets_up_holds_where_the_cache_runs_again(sets_up, event):
    """In the backward pass, in which micro-batches run again. Of what it takes back before that, attributes and modules
    of the model hold; what else may not, so that a warning before training names all such callbacks"""
    plain = fit(make_learner(32, m=scaled_model(), cbs=sets_up(event)), 2)
    ours = fit(make_learner(32, m=scaled_model(), cbs=[sets_up(event), GradientCache(8)]), 2)
    assert_apart(plain, fit(make_learner(32, m=scaled_model()), 2))
    assert_same(weights(ours), weights(plain), ROUNDING)


class OwnAutocast(SetsUp):
    def set_up(self):
        self.autocast = torch.autocast('cpu', torch.bfloat16)
        self.autocast.__enter__()

    def take_back(self): self.autocast.__exit__(None, None, None)


@warns_of_set_up
@warns_later
@pytest.mark.parametrize('several_passes', [in_micro_batches, in_split_windows, after_memory_ran_out])
@pytest.mark.parametrize('event', ['after_pred', 'after_loss'])
def test_own_autocast_holds_in_each_pass(event, several_passes):
    "No pass in training runs in float32, and all in validation do"
    dtypes = dict(training=[], validation=[])

    def note(m, args, output):
        kind = 'training' if m.training else 'validation'
        dtypes[kind].append(output.dtype)

    def run(*cbs):
        learn = make_learner(32, m=model().float(), loss_func=mse_in_float32, cbs=[OwnAutocast(event), *cbs])
        learn.model[0].register_forward_hook(note)
        return fit(learn, 2)
    plain = run()
    n_passes = len(dtypes['training'])
    ours = run(*several_passes())
    assert n_passes == 6
    assert len(dtypes['training']) > 2*n_passes
    assert set(dtypes['training']) == {torch.bfloat16}
    assert set(dtypes['validation']) == {torch.float32}
    assert not torch.is_autocast_enabled('cpu')
    assert_same(weights(ours), weights(plain), BFLOAT16)


def mse_in_float32(pred, targ): return F.mse_loss(pred.float(), targ)


class CountsBatches(Callback):
    "Draws a random number for each batch, and has an event in its passes, in which it takes nothing back"
    run_valid = False

    def __init__(self):
        self.n_batches = 0
        self.n_passes = 0

    def before_batch(self): self.n_batches += 1
    def after_pred(self): self.n_passes += 1


class MixesOnce(CountsBatches):
    "Replaces the inputs, and takes back what it has set up for that"
    is_mixed = False

    def before_batch(self):
        super().before_batch()
        self.is_mixed = True
        self.learn.xb = (self.x.lerp(self.x.flip(0), .3),)

    def after_pred(self):
        super().after_pred()
        self.is_mixed = False


@warns_of_set_up
@pytest.mark.parametrize('counts', [CountsBatches, MixesOnce])
def test_before_batch_comes_once_if_nothing_is_taken_back_or_the_batch_is_replaced(counts):
    cb = counts()
    plain = fit(make_learner(32, cbs=counts()), 1)
    ours = fit(make_learner(32, cbs=[cb, *in_micro_batches()]), 1)
    assert (cb.n_batches, cb.n_passes) == (3, 12)
    assert_moved(ours)
    assert_same(weights(ours), weights(plain), ROUNDING)


# The warning before training

def act(self): pass


def class_with(*events):
    "Returns a class of callbacks that have these events"
    return type('Mine', (Callback,), dict.fromkeys(events, act))


@pytest.mark.parametrize('events', [
    ('after_pred',),
    ('after_loss',),
    ('before_backward',),
    ('after_backward',),
    ('after_pred', 'after_backward')])
def test_a_warning_before_training_names_who_may_set_something_up(events):
    "Here it is an error, so that no batch runs"
    cls = class_with('before_batch', *events)
    learn = make_learner(32, cbs=[cls(), *in_micro_batches()])
    says = f"{', '.join(events)} of Mine is called once per micro-batch, before_batch once per loader batch"
    with pytest.raises(UserWarning, match=says): fit(learn)
    assert_same(weights(learn), weights(model()))


def test_the_warning_names_a_callback_that_is_made_of_functions():
    cb = Callback(before_batch=act, after_pred=act)
    learn = make_learner(32, cbs=[cb, *in_micro_batches()])
    with pytest.raises(UserWarning, match='after_pred of Callback is called once per micro-batch'): fit(learn)


@pytest.mark.parametrize('events,named', [
    (['after_pred'], 'after_pred'),
    (['after_loss'], 'after_loss'),
    (['before_backward'], 'before_backward'),
    (['after_pred', 'before_backward', 'after_backward'], 'after_pred, before_backward')])
def test_the_warning_of_a_cache_names_who_may_take_something_back_too_early(events, named):
    "Here it is an error, so that no batch runs"
    cls = class_with('before_batch', *events)
    learn = make_learner(32, cbs=[cls(), GradientCache(8)])
    says = (f'GradientCache runs micro-batches again in the backward pass, after {named} of Mine: '
            'if it takes back there what it sets up in before_batch, do that in after_backward')
    with pytest.raises(UserWarning, match=says): fit(learn)
    assert_same(weights(learn), weights(model()))


def in_whole_batches(): return [GradientAccumulation(64)]
def in_cache(): return [GradientCache(8)]


class DerivedPrecision(MixedPrecision):
    "Has the events of fastai's own"


@pytest.mark.parametrize('make_cb,several_passes', [
    (class_with('before_batch'), in_micro_batches),
    (class_with('after_pred', 'after_loss', 'before_backward', 'after_backward'), in_micro_batches),
    (class_with('before_batch', 'after_batch', 'before_step', 'after_step'), in_micro_batches),
    (class_with('before_batch', 'after_pred'), in_whole_batches),
    (class_with('before_batch'), in_cache),
    (class_with('before_batch', 'after_backward'), in_cache),
    (class_with('after_pred', 'after_loss'), in_cache),
    (MixedPrecision, in_cache),
    (MixedPrecision, in_micro_batches),
    (DerivedPrecision, in_micro_batches)])
@pytest.mark.filterwarnings('ignore:CUDA is not available', 'ignore:torch.cuda.amp.GradScaler is enabled')
def test_others_are_not_warned_of(make_cb, several_passes):
    assert_moved(fit(make_learner(32, cbs=[make_cb(), *several_passes()]), 1))


# Inputs and targets that callbacks change in the passes

def in_training(order=0, **events):
    "Returns a callback with these events, in training only"
    cb = Callback(**events)
    cb.order = order
    cb.run_valid = False
    return cb


class SeesBatches(Callback):
    "Keeps what a logger sees at the end of each batch"
    order = 60
    run_valid = False

    def __init__(self): self.seen = []

    def after_batch(self):
        learn = self.learn
        self.seen.append((learn.xb, learn.yb, learn.pred.detach()))


def assert_same_structure(a, b, tol):
    "Asserts that nested batches have the same types, and tensors that differ by `tol` at most"
    leaves_a, spec_a = tree_flatten(a)
    leaves_b, spec_b = tree_flatten(b)
    assert spec_a == spec_b
    for leaf_a, leaf_b in zip(leaves_a, leaves_b, strict=True): assert_same(leaf_a.double(), leaf_b.double(), tol)


def soften(self): self.learn.yb = (self.y*.9,)
def keep_errors(self): self.learn.yb = (self.y-self.pred.detach(),)
def weigh_targets(self): self.learn.yb = (self.y, self.y.abs())


def name_inputs(self):
    named = dict(x=self.x, powers=[self.x**2, self.x**3])
    self.learn.xb = (named,)


def change_both(self):
    self.learn.xb = (self.x, self.pred.detach())
    self.learn.yb = (self.y[:, 0],)


def mse_of_first(pred, targ, *others): return mse(pred, targ)


@pytest.mark.parametrize('several_passes', [in_micro_batches, in_unequal_micro_batches])
@pytest.mark.parametrize('event,change', [
    ('after_pred', soften),
    ('after_pred', weigh_targets),
    ('after_pred', name_inputs),
    ('after_loss', keep_errors),
    ('after_backward', change_both)])
def test_loggers_see_the_whole_batch_as_callbacks_have_left_it(event, change, several_passes):
    "Inputs and targets that they have put in place of those of each micro-batch"
    def run(*cbs):
        sees = SeesBatches()
        changes = in_training(**{event: change})
        learn = make_learner(32, loss_func=mse_of_first, cbs=[changes, sees, *cbs])
        return fit(learn, 1), sees.seen
    plain, expected = run()
    ours, seen = run(*several_passes())
    assert len(expected) == 3
    assert_moved(ours)
    assert_same(weights(ours), weights(plain), ROUNDING)
    assert_same_structure(seen, expected, ROUNDING)


@pytest.mark.parametrize('several_passes', [in_micro_batches, in_unequal_micro_batches])
def test_training_metrics_read_targets_as_callbacks_have_left_them(several_passes):
    def largest_error(pred, targ): return (pred-targ).abs().max()

    def run(*cbs):
        learn = make_learner(32, metrics=largest_error, cbs=[Callback(after_pred=soften), *cbs])
        learn.recorder.train_metrics = True
        return floats(fit(learn, 2).recorder.values)
    assert_same(run(*several_passes()), run(), FLOAT32)


@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'after_backward'])
@pytest.mark.parametrize('nth', [1, 2, 4])
def test_targets_that_a_callback_replaces_in_one_micro_batch_only(nth, event):
    "The batch has those, and its own in the others"
    def soften_nth(self):
        passes.append(len(self.y))
        if len(passes) == nth: soften(self)
    passes = []
    sees = SeesBatches()
    cbs = [in_training(**{event: soften_nth}), sees, *in_micro_batches()]
    learn = make_learner(32, n=32, cbs=cbs)
    fit(learn, 1)
    _, targets = data(32)
    end = nth*8
    targets[end-8:end] *= .9
    assert passes == [8, 8, 8, 8]
    _, (seen,), _ = sees.seen[0]
    assert_same(seen, targets)


def test_what_cannot_be_joined_is_that_of_the_last_micro_batch():
    "Here, a callback leaves three rows of each"
    def keep_some(self): self.learn.yb = (self.y[:3],)
    sees = SeesBatches()
    fit(make_learner(32, n=32, cbs=[in_training(after_backward=keep_some), sees, *in_micro_batches()]), 1)
    _, targets = data(32)
    _, (seen,), _ = sees.seen[0]
    assert_same(seen, targets[-8:][:3])


# What the loss keeps of its last call

class KeepsParts(nn.Module):
    "A loss of two parts, which it keeps for LossMetrics"
    def __init__(self, reduction):
        super().__init__()
        self.reduction = reduction

    def forward(self, pred, targ):
        self.error = F.mse_loss(pred, targ, reduction=self.reduction).float()
        self.deviation = F.l1_loss(pred, targ, reduction=self.reduction).float()
        return self.error+self.deviation


class KeepsMean(KeepsParts):
    def __init__(self): super().__init__('mean')


class KeepsSum(KeepsParts):
    def __init__(self): super().__init__('sum')


class KeepsMeanOfLabels(nn.CrossEntropyLoss):
    "Most labels are ignored, unevenly: the micro-batches have different weights"
    def forward(self, pred, targ):
        flat_pred, flat_targ = pred.flatten(0, 1), targ.flatten()
        self.error = super().forward(flat_pred, flat_targ)
        is_kept = flat_targ != -100
        self.deviation = flat_pred[is_kept].var(1).mean()
        return self.error+self.deviation


class KeepsNumbers(KeepsMean):
    def forward(self, pred, targ):
        loss = super().forward(pred, targ)
        self.error = self.error.item()
        self.deviation = self.deviation.item()
        return loss


def keeps_as_function():
    def loss(pred, targ):
        loss.error = mse(pred, targ)
        loss.deviation = F.l1_loss(pred, targ).float()
        return loss.error+loss.deviation
    return loss


def regression(*cbs, **kwargs): return make_learner(32, cbs=cbs, **kwargs)


def tagging(*cbs, **kwargs):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 4))
    samples = list(zip(*tokens()))
    dl = DataLoader(samples, bs=12)
    return Learner(DataLoaders(dl, dl), m, opt_func=SGD, cbs=cbs, **kwargs)


@pytest.mark.filterwarnings('ignore:accumulation is not exact', 'ignore:could not check')
@pytest.mark.parametrize('several_passes', [in_micro_batches, in_unequal_micro_batches])
@pytest.mark.parametrize('make_learner_of,make_loss', [
    (regression, KeepsMean),
    (regression, KeepsSum),
    (tagging, KeepsMeanOfLabels),
    (regression, KeepsNumbers),
    (regression, keeps_as_function)])
def test_parts_of_the_loss_are_those_of_the_batch(make_learner_of, make_loss, several_passes):
    "As LossMetrics and loggers see them: means over the micro-batches; or sums, if the loss is a sum"
    seen = []

    def see(self):
        loss_func = self.learn.loss_func
        seen.append([float(loss_func.error), float(loss_func.deviation)])

    def run(*cbs):
        seen.clear()
        sees = in_training(after_batch=see, order=60)
        learn = make_learner_of(sees, *cbs, loss_func=make_loss(), metrics=LossMetrics('error,deviation'))
        learn.recorder.train_metrics = True
        fit(learn, 1, lr=0.)
        return [*seen], floats(learn.recorder.values)
    expected, plain_log = run()
    parts, log = run(*several_passes())
    assert len(expected) > 1
    assert_same(parts, expected, PARTS)
    assert_same(log, plain_log, PARTS)


def test_numbers_that_the_loss_does_not_renew_stay_as_they_are():
    class Tempered(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature = tensor(2.)

        def forward(self, pred, targ): return mse(pred/self.temperature, targ)
    loss_func = Tempered()
    temperature = loss_func.temperature
    assert_moved(fit(make_learner(32, loss_func=loss_func, cbs=in_micro_batches()), 1))
    assert loss_func.temperature is temperature
