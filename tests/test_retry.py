"A batch in which memory runs out is undone, and runs again in less memory (memory/retry.py)"
import weakref
from collections import Counter

import pytest

from common import *
from limited_memory import *

FAILING_PLACES = ['start', 'forward', 'loss', 'backward']


each_auto = pytest.mark.parametrize('saver', [split_auto, auto_cache])
each_saver = pytest.mark.parametrize('saver', [split_auto, ActivationCheckpointing, auto_cache])


def blocks_of_layers():
    "Returns a model in which ActivationCheckpointing finds four blocks"
    torch.manual_seed(0)
    m = nn.Sequential()
    for _ in range(4): m.append(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)))
    m.append(nn.Linear(5, 1))
    return m.double()


# Memory runs out anywhere: the fit is that of a plain loop which splits batches from there on

class Fragile(nn.Module):
    "A pass moves on its BatchNorm, its flag, its count, and the random generators that all code shares"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(.5)
        self.head = nn.Linear(8, 1)
        self.register_buffer('flag', torch.zeros(1, dtype=torch.bool))
        self.n = 0
        self.double()

    def forward(self, x):
        h = self.norm(self.body(x))
        if self.training: h = self.dropout(h*self.noise())
        return self.head(h)

    def noise(self):
        self.flag.logical_not_()
        self.n += 1
        drawn = torch.rand(1).double()+np.random.rand()+random.random()
        return (drawn+self.flag.double()+1/self.n)/4


class Strikes(Callback):
    """Seeds each batch, and lets memory run out at a `place` in the `at[batch]`th micro-batch of a batch. It notes the
    random numbers that come after each batch"""
    order = -20
    run_valid = False

    def __init__(self, place, at):
        self.place = place
        self.at = at
        self.batch = -1
        self.counts = Counter()
        self.drawn = []

    def before_fit(self):
        m = self.learn.model
        m.body.register_forward_pre_hook(lambda *args: self.strike('start'))
        m.dropout.register_forward_hook(self.after_dropout)
        loss_func = self.learn.loss_func

        def loss(pred, targ):
            self.strike('loss')
            return loss_func(pred, targ)
        self.learn.loss_func = loss

    def before_batch(self):
        self.batch += 1
        set_seed(self.batch)

    def after_dropout(self, m, args, output):
        if not m.training: return
        output.register_hook(lambda grad: self.strike('backward'))
        self.strike('forward')

    def strike(self, place):
        if not self.training or place != self.place or self.batch not in self.at: return
        self.counts[self.batch] += 1
        if self.counts[self.batch] == self.at[self.batch]: run_out_of_memory()

    def after_batch(self): self.drawn.append(random_numbers())


def random_numbers(): return torch.rand(1).item(), np.random.rand(), random.random()


PARTS = [[32], [16, 16], [8, 8, 8, 8]]  # of a batch in which memory has run out never, once, twice


def split_by_hand(at, accum_bs):
    """Trains two epochs of 160 samples in batches of 32, in plain PyTorch. From each batch of `at` on, parts are half
    as large. Returns the model, and the random numbers that come after each batch"""
    m = Fragile()
    inputs, targets = data(160)
    opt = torch.optim.SGD(m.parameters(), lr=.03)
    drawn = []
    for batch in range(10):
        set_seed(batch)
        start = batch*32%160
        window_start = start//accum_bs*accum_bs
        window_end = min(window_start+accum_bs, 160)
        for size in PARTS[sum(o <= batch for o in at)]:
            end = start+size
            errors = m(inputs[start:end])-targets[start:end]
            loss = (errors**2).sum()/(window_end-window_start)
            loss.backward()
            start = end
        drawn.append(random_numbers())
        if end == window_end:
            opt.step()
            opt.zero_grad()
    return m, drawn


def assert_as_split_by_hand(saver, place, at, accum_bs, *cbs):
    strikes = Strikes(place, at)
    learn = fit(make_learner(32, n=160, m=Fragile(), cbs=[strikes, saver, *cbs]), 2, .03)
    assert all(strikes.counts[batch] >= nth for batch, nth in at.items())
    assert saver.micro_bs == max(PARTS[len(at)])
    plain, drawn = split_by_hand(at, accum_bs)
    assert_apart(plain, Fragile())
    assert_same_weights(learn, plain, ROUNDING)
    for a, b in zip(learn.model.buffers(), plain.buffers(), strict=True):
        assert_same(a.double(), b.double(), ROUNDING)
    assert strikes.drawn == drawn


@pytest.mark.parametrize('at,place,accum_bs', paired(
    [{0: 1}, {1: 1}, {2: 1}, {1: 1, 3: 1}, {1: 1, 3: 2}], FAILING_PLACES, [32, 64]))
def test_a_batch_runs_again_as_if_it_had_been_split(place, at, accum_bs):
    "Weights, buffers and random numbers are those of a loop which splits from that batch on"
    assert_as_split_by_hand(split_auto(accum_bs), place, at, accum_bs)


@pytest.mark.parametrize('place,accum_bs', paired(FAILING_PLACES, [32, 64]))
def test_a_batch_of_the_cache_runs_again(place, accum_bs):
    assert_as_split_by_hand(GradientCache('auto'), place, {3: 1}, accum_bs, GradientAccumulation(accum_bs))


# What the failed pass has changed is put back

class Remembers(nn.Module):
    "Adds to its input what it has kept of earlier passes: in a buffer, in a tensor and in a number"
    def __init__(self):
        super().__init__()
        self.register_buffer('mean', torch.zeros(5, dtype=torch.float64))
        self.last = None
        self.n = 0

    def forward(self, x):
        if not self.training: return x
        before = 0. if self.last is None else self.last
        self.last = x.detach().mean(0)
        self.mean.lerp_(self.last, .1)
        self.n += 1
        return x+self.mean+before/self.n


class CountingLoss:
    "Is scaled by the number of its calls in training"
    n_calls = 0

    def __call__(self, pred, targ):
        if pred.requires_grad: self.n_calls += 1
        return mse(pred, targ)*(1+1/(1+self.n_calls))


def fit_with_state(*cbs):
    set_seed(0)
    m = nn.Sequential(Remembers(), *model()).double()
    return fit(make_learner(8, n=64, m=m, loss_func=CountingLoss(), cbs=cbs), 2, .01)


@pytest.mark.parametrize('nth', [1, 12])
def test_what_a_failed_pass_has_changed_is_put_back(nth):
    "The attributes of the model and of the loss function: the fit is the same, bit for bit"
    saver = ActivationCheckpointing(lambda m: [*m[1:]])
    plain = fit_with_state()
    ours = fit_with_state(OutOfMemory('after_loss', nth), saver)
    assert saver.n_recomputed
    assert_apart(plain.model[1:], model())
    assert_same_weights(ours, plain)
    assert_same(losses(ours), losses(plain))
    buffer = first(plain.model[0].buffers())
    assert buffer.any()
    assert_same(first(ours.model[0].buffers()), buffer)
    assert ours.loss_func.n_calls == plain.loss_func.n_calls == 16


@pytest.mark.parametrize('nth', [1, 2, 4])
def test_sums_of_half_precision_weights_are_put_back(nth):
    "They are in float32. Memory runs out in the nth of four batches of the first window"
    def run(*cbs):
        return fit(make_learner(8, m=model().bfloat16(), cbs=[GradientAccumulation(32), *cbs]))
    saver = ActivationCheckpointing(lambda m: [*m])
    plain = run()
    ours = run(OutOfMemory('after_loss', nth), saver)
    assert saver.n_recomputed
    assert_apart(plain, model().bfloat16())
    assert_same_weights(ours, plain)


@each_auto
def test_a_parameter_that_the_optimizer_lacks_keeps_the_gradients_of_earlier_windows(saver):
    "A splitter leaves it out. They count, for example, in the norm by which GradientClip clips"
    def only_last(m): return [[*m[-1].parameters()]]
    def train(*cbs): return fit(make_learner(8, cbs=cbs, splitter=only_last), 1)
    plain = train()
    fails = OutOfMemory('after_backward', 3)
    ours = train(fails, saver())
    assert fails.count > 3
    assert_same(ours.model[0].weight.grad, plain.model[0].weight.grad, ROUNDING)
    assert_apart(ours.model[-1], model()[-1])


class Smooths(Callback):
    "Replaces the targets in each pass"
    def after_pred(self): self.learn.yb = (self.y*.9,)


class AddsUp(Callback):
    "Begins with gradients that are not 0, as AutoResume sets them if fastai's GradientAccumulation has added some up"
    order = 99

    def before_train(self):
        for p in self.model.parameters(): p.grad = torch.ones_like(p)


@each_saver
@pytest.mark.parametrize('make_other, event, nth', [
    # Keeps the optimizer from zeroing a gradient, which is added to that of the next batch, in which memory runs out
    (partial(Fault, CancelBatchException, 'before_step', 2, order=20), 'after_pred', 3),
    (Smooths, 'after_loss', 2),
    (AddsUp, 'after_pred', 1)])
def test_gradients_and_targets_of_a_callback_are_put_back(make_other, event, nth, saver):
    def run(*cbs): return fit(make_learner(8, n=32, m=blocks_of_layers(), cbs=cbs), 1)
    plain = run(make_other())
    assert_apart(plain, run())
    fails = OutOfMemory(event, nth, order=5)
    ours = run(make_other(), fails, saver())
    assert fails.count > 4
    assert_same_weights(ours, plain, ROUNDING)


def test_the_failed_pass_lets_go_of_its_tensors():
    "Each pass begins when the tensors of those before it are gone"
    m = model()
    made = []
    n_alive = []

    def hold(m, args):
        n_alive.append(sum(o() is not None for o in made))
        large = args[0].repeat(1, 3)
        made.append(weakref.ref(large))
        return args[0]+0*large[:, :5]
    m.register_forward_pre_hook(hold)
    MemoryLimit(m[2], 9)
    saver = split_auto()
    fit(make_learner(32, m=m, cbs=saver), 1)
    assert saver.micro_bs == 8
    assert len(n_alive) > 12
    assert max(n_alive) == 0


# Cancelled batches


class RunsOutThenCancels(Fault):
    "Memory runs out in the second batch and, as that runs again, the callback cancels it, at the nth time of `event`"
    def __init__(self, event, nth):
        super().__init__(CancelBatchException, event, nth, order=20)

    def strike(self):
        super().strike()
        if self.count == 2: run_out_of_memory()


class CountsEvents(Callback):
    order = 99
    run_valid = False

    def __init__(self): self.counts = Counter()
    def after_cancel_batch(self): self.counts['cancelled'] += 1
    def after_batch(self): self.counts['ended'] += 1


@pytest.mark.filterwarnings('ignore:a callback has cancelled a part of a batch')
@pytest.mark.parametrize('event,saver,nth', [
    ('after_pred', split_auto, 3),
    ('before_backward', split_auto, 4),  # once the first half of the batch has run again
    ('before_backward', ActivationCheckpointing, 3),
    ('after_pred', auto_cache, 3)])
def test_a_batch_that_is_cancelled_as_it_runs_again_is_left_out(event, saver, nth):
    "The fit goes on, and has as many log entries as the plain fit in which the callback cancels the batch"
    def run(*cbs): return fit(make_learner(8, n=32, m=blocks_of_layers(), cbs=[CountsEvents(), *cbs]), 1)
    plain = run(Fault(CancelBatchException, event, 2, order=20))
    ours = run(RunsOutThenCancels(event, nth), saver())
    assert_apart(plain, run())  # the cancelled batch has no step
    assert_same_weights(ours, plain, ROUNDING)
    assert len(losses(ours)) == len(losses(plain)) == 4
    assert ours.counts_events.counts == plain.counts_events.counts == dict(cancelled=1, ended=4)


@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'before_backward'])
def test_the_window_of_a_batch_that_is_cancelled_as_it_runs_again_goes_on(event):
    "It keeps the batch before, and takes the one after"
    learn = fit(make_learner(8, n=32, cbs=[split_auto(16), RunsOutThenCancels(event, 3)]), 1)
    first_window = [*range(0, 8), *range(16, 24)]
    last_window = [*range(24, 32)]
    assert_steps(learn, [(first_window, 0), (last_window, 0)], 32)
    assert learn.recorder.accum_bs == [16, 8]


# Errors

def fails(error):
    "Returns a model whose forward pass raises `error`"
    def forward(*args): raise error
    m = model()
    m.register_forward_pre_hook(forward)
    return m


UNFIT = RuntimeError('cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. Non-contiguous?')


@pytest.mark.long
@each_auto
def test_the_error_of_a_single_sample_names_the_one_that_led_to_it(saver):
    learn = make_learner(32, m=fails(UNFIT), cbs=saver())
    with pytest.raises(RuntimeError, match='there is no way left to use less: use smaller inputs') as e: fit(learn, 1)
    assert str(e.value).endswith(f'The error was {UNFIT!r}')
    assert_same_weights(learn, model())


@each_auto
def test_other_errors_are_raised_as_they_are(saver):
    "Also those of validation, and if memory runs out in the step: nothing that is saved in the passes would help"
    with pytest.raises(KeyError, match='no such key'):
        fit(make_learner(32, m=fails(KeyError('no such key')), cbs=saver()), 1)
    learn = make_learner(32, m=fails(UNFIT), cbs=saver())
    with quiet(learn), pytest.raises(RuntimeError, match='Non-contiguous'): learn.validate()
    steps = make_learner(32, cbs=[saver(), OutOfMemory('before_step', 1)])
    with pytest.raises(torch.OutOfMemoryError, match='2.00 GiB'): fit(steps, 1)


# Several savers

@pytest.mark.long
def test_blocks_are_recomputed_before_batches_are_split():
    "Batches are split once all blocks are recomputed, and their inputs on the CPU"
    recomputes = ActivationCheckpointing()
    seen = []

    def note(self): seen.append((recomputes.n_recomputed, recomputes.offload, len(self.x)))
    fails = OutOfMemory('after_pred', 1, 2, 3, 4, 5, order=5)
    cbs = [split_auto(), recomputes, fails, Callback(after_pred=note)]
    fit(make_learner(16, n=32, m=blocks_of_layers(), cbs=cbs), 1)
    assert seen[:6] == [
        (0, False, 16),
        (1, False, 16),
        (2, False, 16),
        (4, False, 16),
        (4, True, 16),
        (4, True, 8)]
