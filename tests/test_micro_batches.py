"A loader batch in micro-batches of a fixed size: to all but the model and the loss it stays whole"
from functools import partialmethod

import pytest
from fastai.callback.mixup import CutMix, MixUp
from hypothesis import given
from hypothesis import strategies as st

from common import *
from comparing import assert_nothing_left
from fastxtend_accum.memory.micro_batches import LossParts, MicroBatches, chunk_bounds, per_sample_names
from fastxtend_accum.windows.window import LossSums
from small_learners import image_learner, over_all, seeded, spread

FLOAT32 = 5e-6  # rounding of float32 weights, and of the Recorder


def split(n): return GradientAccumulation(micro_batch_size=n)


each_saver = pytest.mark.parametrize('saver', [split, GradientCache])
each_way_to_split = pytest.mark.parametrize('make_cb', [
    partial(split, 8),
    partial(GradientAccumulation, 32, micro_batch_size=7),
    partial(GradientAccumulationSchedule, 32, 32, micro_batch_size=5),
    partial(GradientCache, 8)])


# The parts of a batch

@draws
@given(st.integers(1, 200), st.integers(1, 50))
def test_micro_batches_are_few_and_of_nearly_equal_size(n, most):
    bounds = chunk_bounds(n, most)
    starts, ends = zip(*bounds)
    sizes = [end-start for start, end in bounds]
    assert [*starts, n] == [0, *ends]  # each begins where the one before ends
    assert max(sizes) <= most
    assert max(sizes)-min(sizes) <= 1
    assert len(bounds) == math.ceil(n/most)


@pytest.mark.parametrize('n,samples,first_end', [
    (32, 32, 8),
    (32, None, 8),
    (64, 32, 16),  # two rows of each sample
    (30, 32, 8)])  # a callback has left samples out
def test_the_size_of_a_micro_batch_counts_samples(n, samples, first_end):
    bounds = MicroBatches(8).bounds(n, samples)
    assert bounds[0] == (0, first_end)
    assert bounds[-1][1] == n


class DrawsForEachSample(Callback):
    per_sample = 'share', 'partner'


def test_callbacks_say_what_they_keep_for_each_sample():
    "Of the names of a class, those that the callback has at the moment"
    cb = DrawsForEachSample()
    assert per_sample_names(cb) == []
    cb.share = tensor([.3, .5])
    assert per_sample_names(cb) == ['share']
    mixup = MixUp()
    mixup.lam = tensor(.3)
    assert per_sample_names(mixup) == ['lam']
    assert per_sample_names(Callback()) == []


def sums(n_micro, loss, items): return LossSums(n_micro, n_micro*8, tensor(loss), items, 1)


def test_parts_of_a_mean_loss_are_weighted_by_the_items_of_each_micro_batch():
    loss_func = SimpleNamespace(setting=tensor(7.))
    parts = LossParts(loss_func)
    loss_func.error = tensor(1.)
    parts.add(sums(0, 0., 0), sums(1, 0., 3))
    loss_func.error = tensor(5.)
    parts.add(sums(1, 0., 3), sums(2, 0., 4))
    parts.set_totals()
    assert loss_func.error == (3*1+1*5)/4
    assert loss_func.setting == 7


def test_parts_of_a_summed_loss_are_added():
    loss_func = SimpleNamespace()
    parts = LossParts(loss_func)
    for n in range(3):
        loss_func.error = tensor(2.)
        parts.add(sums(n, 0., None), sums(n+1, 0., None))
    parts.set_totals()
    assert loss_func.error == 6


# Weights, rates, logs

class NotesSizes(Callback):
    "The samples of each pass in training, and the position of training at the end of each epoch"
    run_valid = False

    def __init__(self):
        self.sizes = []
        self.positions = []

    def after_pred(self): self.sizes.append(len(self.x))

    def after_train(self):
        learn = self.learn
        self.positions.append((learn.n_iter, learn.iter, learn.train_iter, learn.pct_train))


@draws
@pytest.mark.filterwarnings('ignore:micro_batch_size=')
@given(
    n=st.integers(2, 60),
    bs=st.integers(1, 12),
    micro=st.integers(1, 14),
    k=st.integers(1, 4),
    drop_last=st.booleans())
def test_any_split_equals_the_large_batch(n, bs, micro, k, drop_last):
    "Weights, rates, losses and positions are those of batches of `k*bs` samples"
    if drop_last and n < k*bs: return

    def run(bs, *cbs):
        notes = NotesSizes()
        learn = make_learner(bs, n=n, drop_last=drop_last, cbs=[*cbs, notes], opt_func=partial(SGD, mom=.9))
        return fit(learn, 2, .01, method='fit_one_cycle'), notes
    accum_bs = k*bs if k > 1 else None
    accum = GradientAccumulation(accum_bs, micro_batch_size=micro)
    large, notes_of_large = run(k*bs)
    small, notes = run(bs, accum)
    assert_same(weights(small), weights(large), ROUNDING)
    assert_same(small.recorder.lrs, large.recorder.lrs)
    assert_same(losses(small), losses(large), FLOAT32)
    assert_same(notes.positions, notes_of_large.positions, ROUNDING)
    assert max(notes.sizes) <= micro
    assert sum(notes.sizes) == sum(small.recorder.accum_bs)
    assert accum.micro_bs == min(micro, bs)


@pytest.mark.parametrize('micro', [8, 5, 1])
def test_a_schedule_has_the_windows_of_whole_batches(micro):
    def run(micro_batch_size):
        cb = GradientAccumulationSchedule(16, 64, finish=.8, micro_batch_size=micro_batch_size)
        return fit(make_learner(16, n=100, cbs=cb), 3, method='fit_one_cycle')
    whole = run(None)
    ours = run(micro)
    assert len(set(whole.recorder.accum_bs)) > 3
    assert ours.recorder.accum_bs == whole.recorder.accum_bs
    assert_same(ours.recorder.lrs, whole.recorder.lrs)
    assert_same(weights(ours), weights(whole), ROUNDING)


@pytest.mark.parametrize('remainder,sizes', [
    ('step', [64, 24, 64, 24]),
    ('carry', [64, 24+64, 24]),
    ('drop', [64, 64])])
def test_a_window_ends_with_a_loader_batch(remainder, sizes):
    "What is left at the end of an epoch is that of whole batches"
    def run(micro_batch_size):
        cb = GradientAccumulation(64, micro_batch_size=micro_batch_size, remainder=remainder)
        return fit(make_learner(32, n=88, cbs=cb), 2)
    whole = run(None)
    ours = run(8)
    assert ours.recorder.accum_bs == whole.recorder.accum_bs == sizes
    assert_moved(ours)
    assert_same(weights(ours), weights(whole), ROUNDING)


def test_without_accum_bs_each_loader_batch_is_a_window():
    learn = make_learner(32, cbs=split(8))
    assert fit(learn, 1).recorder.accum_bs == [32, 32, 32]
    learn.dls = make_learner(48).dls
    assert fit(learn, 1).recorder.accum_bs == [48, 48]


def test_accum_bs_is_checked_again_when_a_fit_begins():
    learn = make_learner(48, cbs=split(8))
    fit(learn, 1)
    learn.gradient_accumulation.accum_bs = 16
    with pytest.raises(ValueError, match='accum_bs=16 .* not a multiple .* batch of 48: .* to 16'): fit(learn, 1)


# What draws random numbers once a batch


class OwnMix(Callback):
    "Keeps a partner and a share of its own for each sample, which its loss needs"
    run_valid = False
    per_sample = 'share', 'partner'

    def before_fit(self):
        self.old_loss = self.learn.loss_func
        self.learn.loss_func = self.loss

    def before_batch(self):
        order = torch.randperm(len(self.y))
        self.share = torch.rand(len(self.y))
        self.partner = self.y[order]
        mixed = self.x.lerp(self.x[order], self.share[:, None, None, None])
        self.learn.xb = (mixed,)

    def loss(self, pred, targ):
        if not self.training: return self.old_loss(pred, targ)
        own = F.cross_entropy(pred, targ, reduction='none')
        other = F.cross_entropy(pred, self.partner, reduction='none')
        return own.lerp(other, self.share).mean()

    def after_fit(self): self.learn.loss_func = self.old_loss


@each_way_to_split
@pytest.mark.filterwarnings('ignore:could not check whether accumulation is exact')  # it has no partners for the check
@pytest.mark.parametrize('mix', [MixUp, CutMix, OwnMix])
def test_what_callbacks_draw_for_the_batch_is_split_with_it(mix, make_cb):
    plain = seeded(image_learner(mix()))
    ours = seeded(image_learner(mix(), make_cb()))
    assert_apart(plain, seeded(image_learner()))
    assert_same(weights(ours), weights(plain), FLOAT32)
    assert_same(losses(ours), losses(plain), FLOAT32)
    assert_same(floats(ours.recorder.values), floats(plain.recorder.values), FLOAT32)


@pytest.mark.parametrize('make_cb', [
    partial(split, 8),
    partial(GradientCache, 8),
    partial(GradientAccumulation, 64),
    partial(all_blocks, lambda m: [m[0]])])
def test_the_fit_after_fastais_preview_of_mixup_is_as_without_it(make_cb):
    "fastai shows a batch by `with learn: learn('before_train')`, on a Learner that was not trained"
    def learner():
        return make_learner(32, m=model().float(), loss_func=MSELossFlat(), cbs=[MixUp(1.), make_cb()])
    with learner() as learn:
        learn.epoch = 0
        learn.training = True
        learn.dl = learn.dls.train
        learn._split(first(learn.dl))
        learn('before_train')
        learn('before_batch')
    learn.training = False
    assert_nothing_left(learn)
    assert learn.opt is None
    assert learn.dl is learn.dls.train
    assert_same(weights(seeded(learn)), weights(seeded(learner())))


# What callbacks see

class SeesSizes(Callback):
    "Notes the samples of the inputs, the targets and the output in each event"
    run_valid = False

    def __init__(self, order):
        self.order = order
        self.seen = []

    def note(self, event):
        sizes = [len(self.x), len(self.y)]
        if event != 'before_batch': sizes.append(len(self.pred))
        self.seen.append((event, set(sizes)))


pass_events = ['after_pred', 'after_loss', 'before_backward', 'after_backward']
step_events = ['before_step', 'after_step']
for event in ('before_batch', *pass_events, *step_events, 'after_batch'):
    setattr(SeesSizes, event, partialmethod(SeesSizes.note, event))


def with_size(events, n): return [(event, {n}) for event in events]


@pytest.mark.filterwarnings('ignore:.* of SeesSizes is called once per micro-batch, before_batch once per')
@pytest.mark.parametrize('order', [5, 99])
def test_events_of_the_passes_see_micro_batches_and_all_others_the_loader_batch(order):
    "A window of two batches of 33 samples. A callback that comes before the Recorder sees both begin and end"
    sees = SeesSizes(order)
    fit(make_learner(33, n=66, cbs=[GradientAccumulation(66, micro_batch_size=16), sees]), 1)
    passes = 3*with_size(pass_events, 11)
    between = with_size(['after_batch', 'before_batch'], 33) if order == 5 else []
    assert sees.seen == [
        *with_size(['before_batch'], 33),
        *passes,
        *between,
        *passes,
        *with_size(step_events, 33),
        *with_size(['after_batch'], 33)]


@pytest.mark.parametrize('accum_bs,logs_windows,event', [
    (32, True, 'before_step'),
    (32, True, 'after_step'),
    (32, True, 'after_batch'),
    (96, False, 'after_batch')])
def test_after_its_passes_the_learner_has_the_loss_and_the_outputs_of_the_batch(accum_bs, logs_windows, event):
    def run(*cbs):
        seen_losses = []
        seen_outputs = []

        def see(self):
            if not self.training: return
            seen_losses.append(self.loss.item())
            seen_outputs.append(self.pred.detach())
        fit(make_learner(32, cbs=[*cbs, Callback(**{event: see})]), 1, lr=0.)
        return seen_losses, torch.cat(seen_outputs)
    expected_losses, expected_outputs = run()
    seen_losses, seen_outputs = run(GradientAccumulation(accum_bs, None, logs_windows, 5))
    assert len(expected_losses) == 3
    assert_same(seen_losses, expected_losses, FLOAT32)
    assert_same(seen_outputs, expected_outputs, ROUNDING)


@each_way_to_split
def test_metrics_and_the_position_of_training_are_those_of_whole_batches(make_cb):
    "Training metrics, too"
    def run(*cbs):
        positions = []

        def see(self): positions.append((self.iter, self.n_iter, self.train_iter, self.learn.pct_train))
        learn = make_learner(32, metrics=[spread, over_all()], cbs=[*cbs, Callback(before_batch=see)])
        learn.recorder.train_metrics = True
        return floats(fit(learn, 2).recorder.values), positions
    expected, expected_positions = run()
    values, positions = run(make_cb())
    assert len(expected_positions) == 2*(3+2)
    assert len(expected[0]) == 6
    assert_same(values, expected, FLOAT32)
    assert_same(positions, expected_positions, ROUNDING)  # a schedule counts samples


@each_way_to_split
def test_batches_without_targets_have_no_loss_and_no_step_as_in_fastai(make_cb):
    "Log and position are the same, and there is no warning"
    def run(*cbs):
        positions = []
        lines = []

        def see(self): positions.append((len(self.x), self.train_iter, self.pct_train))
        def log(o): lines.append(str(o[:3]))
        inputs, _ = data(96)
        dl = DataLoader([(o,) for o in inputs], bs=32)
        cbs = [Callback(after_batch=see), *cbs]
        learn = Learner(DataLoaders(dl, dl), model(), mse, opt_func=SGD, cbs=cbs)
        learn.logger = log
        with learn.no_bar(): learn.fit(2)
        assert_same(weights(learn), weights(model()))
        return positions, lines
    expected, expected_lines = run()
    positions, lines = run(make_cb())
    assert len(expected) == 12
    assert_same(positions, expected, ROUNDING)
    assert lines == expected_lines


# Cancelled batches

part_is_cancelled = pytest.mark.filterwarnings('ignore:a callback has cancelled a part of a batch')


@part_is_cancelled
@pytest.mark.thin(5)
@pytest.mark.parametrize('accum_bs,nth,windows_of_batches', [
    (32, 1, [[1], [2], [3], [4]]),
    (32, 7, [[0], [2], [3], [4]]),
    (64, 1, [[1, 2], [3, 4]]),
    (64, 3, [[1, 2], [3, 4]]),
    (64, 5, [[0, 2], [3, 4]]),  # the window goes on
    (64, 7, [[2, 3], [4]])])  # its sums have a part of the cancelled batch, which cannot be taken out of them
@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'before_backward'])
@pytest.mark.parametrize('order', [7, 99])
def test_a_batch_that_is_cancelled_in_a_micro_batch_is_left_out_whole(order, event, accum_bs, nth, windows_of_batches):
    "Five batches of 32 samples have four micro-batches each, of which the nth is cancelled"
    cb = GradientAccumulation(accum_bs, micro_batch_size=8)
    learn = fit(make_learner(32, n=160, cbs=[cb, Fault(CancelBatchException, event, nth, order)]), 1)
    inputs, _ = data(160)
    batches = torch.arange(160).split(32)
    steps = []
    for window in windows_of_batches:
        samples = torch.cat([batches[i] for i in window])
        steps.append((samples, 0))
    expected, _ = reference(steps, 160, sgd)
    assert_moved(learn)
    assert_same(weights(learn), expected, ROUNDING)
    n_cancelled = 1 if accum_bs == 32 else 0  # fastai logs a cancelled batch, which here is a window
    assert len(losses(learn)) == len(steps)+n_cancelled


def test_a_warning_says_that_a_window_is_left_out():
    cb = GradientAccumulation(64, micro_batch_size=8)
    learn = make_learner(32, cbs=[cb, Fault(CancelBatchException, 'after_pred', 7, 0)])
    with pytest.warns(match='^a callback has cancelled a part of a batch: its whole window is left out$'):
        fit(learn, 1)


def test_a_last_window_of_fewer_samples_that_is_cancelled_counts_as_in_the_large_batch():
    def run(bs, nth, *cbs):
        fault = Fault(CancelBatchException, 'before_batch', nth, 20)
        return fit(make_learner(bs, n=160, cbs=[*cbs, fault]), 1)
    large = run(64, 3)
    ours = run(32, 5, GradientAccumulation(64, micro_batch_size=8))
    assert len(losses(ours)) == len(losses(large)) == 3
    assert ours.train_iter == large.train_iter


# A Learner with a loop of its own

def shrink(m):
    for p in m.parameters(): p.data.mul_(.9)


class OwnBatch(Learner):
    def _do_one_batch(self):
        super()._do_one_batch()
        shrink(self.model)


class OwnBackward(Learner):
    def _backward(self):
        regularizer = self.model(*self.xb).square().mean()
        (self.loss_grad+.3*regularizer).backward()


class OwnStep(Learner):
    def _do_grad_opt(self):
        super()._do_grad_opt()
        shrink(self.model)


def learner_of(cls, *cbs): return cls(make_learner(32).dls, model(), mse, opt_func=SGD, cbs=cbs)


own_methods = [
    (OwnBatch, '_do_one_batch'),
    (OwnBackward, '_backward'),
    (OwnStep, '_do_grad_opt')]


@pytest.mark.parametrize('make_cb', [
    partial(split, 8),
    partial(split, 'auto'),
    partial(GradientCache, 8),
    partial(GradientAccumulation, 64),
    partial(GradientAccumulationSchedule, 32, 32, micro_batch_size=5),
    partial(all_blocks, lambda m: [m[0]])])
@pytest.mark.parametrize('cls,name', own_methods)
def test_a_learner_with_a_method_of_its_own_is_an_error_that_names_it(cls, name, make_cb):
    "It may be one of its class, or be set in the Learner"
    of_class = learner_of(cls, make_cb())
    of_instance = learner_of(Learner, make_cb())
    method = getattr(cls, name)
    setattr(of_instance, name, partial(method, of_instance))
    for learn in of_class, of_instance:
        with pytest.raises(ValueError, match=rf'{name}\b'): fit(learn, 1)
        assert_same(weights(learn), weights(model()))


@pytest.mark.parametrize('cls,name', own_methods)
def test_a_learner_with_a_method_of_its_own_may_have_windows_of_one_whole_batch(cls, name):
    plain = fit(learner_of(cls))
    assert_apart(plain, fit(learner_of(Learner)))
    assert_same(weights(fit(learner_of(cls, GradientAccumulation(32)))), weights(plain))
