"A batch in which memory runs out is undone, and runs again in less memory (memory/retry.py)"
import weakref
from collections import Counter

import pytest
from fastai.callback.mixup import MixUp

from common import *
from fastxtend_accum.memory.out_of_memory import NothingFits, is_out_of_memory
from fastxtend_accum.memory.retry import MemorySaver
from limited_memory import MemoryLimit, OutOfMemory, run_out_of_memory

FLOAT32 = 5e-6  # rounding of float32 weights, and of the Recorder
warns_later = pytest.mark.filterwarnings('ignore:out of memory in training')
each_place = pytest.mark.parametrize('place', ['start', 'forward', 'loss', 'backward'])


def split_auto(accum_bs=None): return GradientAccumulation(accum_bs, micro_batch_size='auto')


# Memory runs out anywhere: the fit is that of a plain loop which splits batches from there on

class Fragile(nn.Module):
    "A pass moves on its BatchNorm, its flag, and the random generators of its own and of all"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(.5)
        self.head = nn.Linear(8, 1)
        self.register_buffer('flag', torch.zeros(1, dtype=torch.bool))
        self.torch_rng = torch.Generator()
        self.rngs = [np.random.default_rng(3), random.Random(3), np.random, random]
        self.double()

    def forward(self, x):
        h = self.norm(self.body(x))
        if self.training: h = self.dropout(h*self.noise())
        return self.head(h)

    def noise(self):
        self.flag.logical_not_()
        res = torch.rand(1, generator=self.torch_rng)
        for rng in self.rngs: res += rng.random()
        return res.double()+self.flag.double()


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


def split_by_hand(at, accum_bs):
    """Trains two epochs of 160 samples in batches of 32, in plain PyTorch. From each batch of `at` on, half as many
    samples run at a time. Returns the model, and the random numbers that come after each batch"""
    m = Fragile()
    inputs, targets = data(160)
    opt = torch.optim.SGD(m.parameters(), lr=.03)
    drawn = []
    for batch in range(10):
        set_seed(batch)
        start = batch*32%160
        end = start+32
        window_start = start//accum_bs*accum_bs
        n_window = min(accum_bs, 160-window_start)
        n_halvings = sum(o <= batch for o in at)
        size = 32 >> n_halvings
        for i in range(start, end, size):
            errors = m(inputs[i:i+size])-targets[i:i+size]
            loss = (errors**2).sum()/n_window
            loss.backward()
        drawn.append(random_numbers())
        if end == window_start+n_window:
            opt.step()
            opt.zero_grad()
    return m, drawn


def assert_as_split_by_hand(saver, place, at, accum_bs, *cbs):
    strikes = Strikes(place, at)
    learn = fit(make_learner(32, n=160, m=Fragile(), cbs=[strikes, saver, *cbs]), 2, .03)
    assert all(strikes.counts[batch] >= nth for batch, nth in at.items())
    assert saver.micro_bs == 32 >> len(at)
    plain, drawn = split_by_hand(at, accum_bs)
    assert_apart(plain, Fragile())
    assert_same(weights(learn), weights(plain), ROUNDING)
    for a, b in zip(learn.model.buffers(), plain.buffers(), strict=True):
        assert_same(a.double(), b.double(), ROUNDING)
    assert strikes.drawn == drawn


@warns_later
@pytest.mark.thin(3)
@pytest.mark.parametrize('accum_bs', [32, 64])
@pytest.mark.parametrize('at', [
    {0: 1},
    {1: 1},
    {2: 1},
    {1: 1, 3: 1},
    {1: 1, 3: 2}])
@each_place
def test_a_batch_runs_again_as_if_it_had_been_split(place, at, accum_bs):
    "Weights, buffers and random numbers are those of a loop which splits from that batch on"
    assert_as_split_by_hand(split_auto(accum_bs), place, at, accum_bs)


@warns_later
@pytest.mark.parametrize('accum_bs', [32, 64])
@each_place
def test_a_batch_of_the_cache_runs_again(place, accum_bs):
    assert_as_split_by_hand(GradientCache('auto'), place, {3: 1}, accum_bs, GradientAccumulation(accum_bs))


# What the failed pass has changed is put back

class Remembers(nn.Module):
    "Adds to its input what it has kept of earlier passes, in several ways"
    def __init__(self):
        super().__init__()
        self.register_buffer('mean', torch.zeros(5, dtype=torch.float64))
        self.means = [self.mean]
        self.n = 0

    def forward(self, x):
        if not self.training: return x
        mean = x.detach().mean(0)
        self.mean.lerp_(mean, .1)
        self.means.append(mean)
        self.n += 1
        return x+self.mean+torch.stack(self.means).mean(0)/self.n


class Grows(nn.Module):
    "Adds the mean of a buffer whose data get longer in each pass, as a queue of samples does"
    def __init__(self):
        super().__init__()
        self.register_buffer('queue', torch.ones(5, dtype=torch.float64))

    def forward(self, x):
        if self.training: self.queue.data = torch.cat([self.queue, x.detach().mean(0)])
        return x+self.queue.mean()


class MovesFrozen(nn.Module):
    "Adds a frozen parameter, which it changes in place"
    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(2000, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        self.mean.add_(.1)
        return x+self.mean[:5]


def counting_loss(pred, targ, seen, counts):
    "Is scaled by the number of its calls, which its partial keeps"
    if pred.requires_grad:
        seen.append(len(pred))
        counts['n'] += 1
    return mse(pred, targ)*(1+1/len(seen)+1/counts['n'])


def fit_with_state(first_layer, *cbs):
    set_seed(0)
    m = nn.Sequential(first_layer, *model()).double()
    loss_func = partial(counting_loss, seen=[1], counts=dict(n=1))
    return fit(make_learner(8, n=64, m=m, loss_func=loss_func, cbs=cbs), 2, .01)


def recompute_all_but_the_first_layer():
    "Runs whole batches again, bit for bit"
    return ActivationCheckpointing(lambda m: [*m[1:]])


@warns_later
@pytest.mark.parametrize('nth', [1, 4, 12])
@pytest.mark.parametrize('first_layer', [Remembers, Grows])
def test_what_a_failed_pass_has_changed_is_put_back(first_layer, nth):
    "The model's state and that of the loss function: the fit is the same, bit for bit"
    saver = recompute_all_but_the_first_layer()
    plain = fit_with_state(first_layer())
    ours = fit_with_state(first_layer(), OutOfMemory('after_loss', nth), saver)
    assert saver.level
    assert_apart(plain.model[1:], model())
    assert_same(weights(ours), weights(plain))
    assert_same(losses(ours), losses(plain))
    buffer = first(plain.model[0].buffers())
    assert buffer.any()
    assert_same(first(ours.model[0].buffers()), buffer)


def test_a_frozen_parameter_that_a_pass_has_changed_is_an_error():
    "A copy of each would take the memory that it takes"
    with pytest.raises(NothingFits, match='cannot be undone, since it has changed .* frozen parameter'):
        fit_with_state(MovesFrozen(), OutOfMemory('after_loss', 4), recompute_all_but_the_first_layer())


def test_an_input_that_is_changed_in_place_is_an_error():
    def shifted(pred, targ): return mse(pred, targ.sub_(1))
    learn = make_learner(16, loss_func=shifted, cbs=[split_auto(), OutOfMemory('before_backward', 2)])
    with pytest.raises(NothingFits, match='has changed its input .* set micro_batch_size to a number'): fit(learn, 1)


@warns_later
@pytest.mark.parametrize('nth', [1, 2, 3, 4])
def test_sums_of_half_precision_weights_stand_aside(nth):
    "They are in float32, beside `.grad`. Memory runs out in the nth of four batches of the first window"
    def run(*cbs):
        return fit(make_learner(8, m=model().bfloat16(), cbs=[GradientAccumulation(32), *cbs]))
    saver = ActivationCheckpointing(lambda m: [*m])
    plain = run()
    ours = run(OutOfMemory('after_loss', nth), saver)
    assert saver.level
    assert_apart(plain, model().bfloat16())
    assert_same(weights(ours), weights(plain))


@warns_later
@pytest.mark.parametrize('saver', [split_auto, ActivationCheckpointing, partial(GradientCache, 'auto')])
def test_targets_that_a_callback_replaces_in_the_failed_pass_are_put_back(saver):
    def smooth(self): self.learn.yb = (self.y*.9,)

    def run(*cbs): return fit(make_learner(16, n=48, m=blocks_of_layers(), cbs=cbs), 1)
    smooths = Callback(after_pred=smooth)
    plain = run(smooths)
    assert_apart(plain, run())
    fails = OutOfMemory('after_loss', 2, order=5)
    ours = run(smooths, fails, saver())
    assert fails.count > 3
    assert_same(weights(ours), weights(plain), ROUNDING)


def blocks_of_layers():
    "Returns a model in which ActivationCheckpointing finds four blocks"
    torch.manual_seed(0)
    m = nn.Sequential()
    for _ in range(4):
        block = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        m.append(block)
    m.append(nn.Linear(5, 1))
    return m.double()


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


# Callbacks

class DrawsOnce(Callback):
    "Draws a random number for each batch, and sees the whole of it at its end"
    run_valid = False

    def __init__(self): self.drawn = []
    def before_batch(self): self.drawn.append(random.random())
    def after_batch(self): assert len(self.pred) == len(self.y) == 32


def float_learner(bs, *cbs):
    return make_learner(bs, n=256, m=model().float(), loss_func=MSELossFlat(), cbs=cbs)


@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'before_backward'])
def test_no_callback_sees_that_memory_ran_out(event):
    "Each batch begins and ends once, with random numbers of its own, also for MixUp; a warning says what is done"
    draws_once = DrawsOnce()

    def fail(self):
        is_later = len(draws_once.drawn) > 5
        if is_later and self.training and len(self.x) > 8: run_out_of_memory()

    def run(*cbs):
        set_seed(5)
        return fit(float_learner(32, MixUp(), *cbs), 1)
    with pytest.warns(match='^out of memory in training: from now on, micro-batches have 8 samples$'):
        ours = run(split_auto(), draws_once, Callback(**{event: fail}))
    assert len(set(draws_once.drawn)) == 8
    plain = run(DrawsOnce())
    assert_apart(plain, model().float())
    assert_same(weights(ours), weights(plain), FLOAT32)
    assert_same(losses(ours), losses(plain), FLOAT32)


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


@pytest.mark.parametrize('saver,nth', [
    (split_auto, 3),
    (split_auto, 4),  # once the first half of the batch has run again
    (ActivationCheckpointing, 3),
    (partial(GradientCache, 'auto'), 3)])
@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'before_backward'])
def test_a_batch_that_is_cancelled_as_it_runs_again_is_left_out(event, saver, nth):
    "The fit goes on, and has as many log entries as the plain fit in which the callback cancels the batch"
    def run(*cbs): return fit(make_learner(8, n=32, m=blocks_of_layers(), cbs=[CountsEvents(), *cbs]), 1)
    plain = run(Fault(CancelBatchException, event, 2, order=20))
    ours = run(RunsOutThenCancels(event, nth), saver())
    assert_apart(plain, run())  # the cancelled batch has no step
    assert_same(weights(ours), weights(plain), ROUNDING)
    assert len(losses(ours)) == len(losses(plain)) == 4
    assert ours.counts_events.counts == plain.counts_events.counts == dict(cancelled=1, ended=4)


@pytest.mark.parametrize('nth', [3, 4])
@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'before_backward'])
def test_the_window_of_a_batch_that_is_cancelled_as_it_runs_again_goes_on(event, nth):
    "It keeps the batch before, and takes the one after"
    learn = fit(make_learner(8, n=32, cbs=[split_auto(16), RunsOutThenCancels(event, nth)]), 1)
    first_window = [*range(0, 8), *range(16, 24)]
    last_window = [*range(24, 32)]
    expected, _ = reference([(first_window, 0), (last_window, 0)], 32, sgd)
    assert_moved(learn)
    assert_same(weights(learn), expected, ROUNDING)
    assert learn.recorder.accum_bs == [16, 8]


# Errors stay what they are

def raises(error):
    def f(*args, **kwargs): raise error
    return f


each_auto = pytest.mark.parametrize('saver', [split_auto, partial(GradientCache, 'auto')])


@each_auto
def test_the_error_of_a_single_sample_names_the_one_that_led_to_it(saver):
    unfit = RuntimeError('cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. Non-contiguous?')
    learn = make_learner(32, cbs=saver())
    learn.model.forward = raises(unfit)
    with pytest.raises(NothingFits, match='out of memory with a single sample: use smaller inputs') as e: fit(learn, 1)
    assert e.value.__cause__ is unfit
    assert not is_out_of_memory(e.value)
    assert_same(weights(learn), weights(model()))


@each_auto
def test_an_error_in_validation_is_that_of_the_model(saver):
    learn = make_learner(32, cbs=saver())
    learn.model.forward = raises(RuntimeError('CUDNN_STATUS_NOT_SUPPORTED. Non-contiguous?'))
    with quiet(learn), pytest.raises(RuntimeError, match='Non-contiguous'): learn.validate()


@each_auto
def test_another_error_is_raised_at_once(saver):
    learn = make_learner(32, cbs=saver())
    learn.model.forward = raises(KeyError('no such key'))
    with pytest.raises(KeyError, match='no such key'): fit(learn, 1)


@each_auto
def test_memory_that_runs_out_in_the_step_is_an_error(saver):
    "Nothing that is saved in the passes would help"
    learn = make_learner(32, cbs=saver())
    learn.create_opt()
    learn.opt.step = run_out_of_memory
    with pytest.raises(torch.OutOfMemoryError, match='2.00 GiB'): fit(learn, 1)


# Room for the first step of the optimizer

def test_a_batch_that_fits_without_room_for_the_optimizer_is_not_given_up(monkeypatch):
    "SGD has no state, and takes none of the room that is kept free for Adam's"
    room = [1]

    def check(*args):
        if room: run_out_of_memory()
    monkeypatch.setattr('fastxtend_accum.memory.retry.reserve_for_step', lambda opt: room)
    m = blocks_of_layers()
    m.register_forward_pre_hook(check)
    saver = ActivationCheckpointing()
    ours = fit(make_learner(16, n=32, m=m, cbs=saver), 1)
    plain = fit(make_learner(16, n=32, m=blocks_of_layers()), 1)
    assert saver.level == saver.levels[-1]
    assert_same(weights(ours), weights(plain))


def test_where_there_is_no_such_room_the_batch_runs_all_the_same(monkeypatch):
    monkeypatch.setattr(torch, 'empty_like', run_out_of_memory)
    saver = ActivationCheckpointing()
    ours = fit(make_learner(16, n=32, m=blocks_of_layers(), cbs=saver), 1)
    plain = fit(make_learner(16, n=32, m=blocks_of_layers()), 1)
    assert saver.level == 0
    assert_same(weights(ours), weights(plain))


# What saves memory

class CountsResets(MemorySaver):
    n_resets = 0
    def reset(self): self.n_resets += 1


def test_a_saver_begins_anew_if_more_or_fewer_weights_are_trained():
    saver = CountsResets()
    for n_trained in (10, 10, 30, 30, 10): saver.note_trained(n_trained)
    assert saver.n_resets == 3


@warns_later
def test_blocks_are_recomputed_before_batches_are_split():
    "Batches are split once all blocks are recomputed"
    m = blocks_of_layers()
    splits = split_auto()
    recomputes = ActivationCheckpointing()
    levels = []

    def note(self): levels.append((recomputes.level, len(self.x)))
    fails = OutOfMemory('after_pred', 1, 2, 3, 4, 5, order=5)
    fit(make_learner(16, n=32, m=m, cbs=[splits, recomputes, fails, Callback(after_pred=note)]), 1)
    levels, sizes = zip(*levels[:6])
    assert levels == (0, 1, 2, 4, 5, 5)
    assert sizes == (16, 16, 16, 16, 16, 8)
