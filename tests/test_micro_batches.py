"A loader batch in micro-batches of a fixed size: to all but the model and the loss it stays whole"
from functools import partialmethod

import pytest
from fastai.callback.mixup import CutMix, MixUp
from hypothesis import given
from hypothesis import strategies as st

from common import *
from fastxtend_accum.memory.micro_batches import chunk_bounds, held_rows
from limited_memory import MemoryLimit
from small_learners import image_learner, seeded

FLOAT32 = 5e-6  # rounding of float32 weights, and of the Recorder


def split(n): return GradientAccumulation(micro_batch_size=n)


WAYS_TO_SPLIT = [
    partial(split, 8),
    partial(GradientAccumulation, 32, micro_batch_size=7),
    partial(GradientAccumulationSchedule, 32, 32, micro_batch_size=5),
    partial(GradientCache, 8)]


# The parts of a batch

@draws
@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 3))
def test_micro_batches_are_few_and_of_nearly_equal_size(samples, most, rows):
    "The rows of a sample stay together"
    bounds = chunk_bounds(samples*rows, most, samples)
    starts, ends = zip(*bounds)
    sizes = [(end-start)/rows for start, end in bounds]
    assert [*starts, samples*rows] == [0, *ends]  # each begins where the one before ends
    assert all(o.is_integer() for o in sizes)
    assert max(sizes) <= most
    assert max(sizes)-min(sizes) <= 1
    assert len(bounds) == math.ceil(samples/most)


@pytest.mark.parametrize('n, samples, bounds', [
    (0, 8, [(0, 0)]),  # a callback has left no rows
    (4, 8, [(0, 2), (2, 4)])])  # or half of them
def test_micro_batches_of_fewer_rows_than_samples(n, samples, bounds):
    assert chunk_bounds(n, 2, samples) == bounds


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
    assert_same_weights(small, large, ROUNDING)
    assert_same(small.recorder.lrs, large.recorder.lrs)
    assert_same(losses(small), losses(large), FLOAT32)
    assert_same(notes.positions, notes_of_large.positions, ROUNDING)
    assert max(notes.sizes) <= accum.micro_bs == min(micro, bs)
    assert sum(notes.sizes) == sum(small.recorder.accum_bs)


@pytest.mark.parametrize('make_cb, bs, sizes', [
    (partial(GradientAccumulation, 64, remainder='step'), 32, [64, 24, 64, 24, 64, 24]),
    (partial(GradientAccumulation, 64, remainder='carry'), 32, [64, 24+64, 24+64, 24]),
    (partial(GradientAccumulationSchedule, 16, 64, finish=.8), 16, [16, 16, 16, 16, 40, 32, 56, 64, 8])])
def test_a_window_ends_with_a_loader_batch(make_cb, bs, sizes):
    "What is left at the end of an epoch is that of whole batches"
    def run(micro): return fit(make_learner(bs, n=88, cbs=make_cb(micro_batch_size=micro)), method='fit_one_cycle')
    whole = run(None)
    assert_moved(whole)
    for micro in (5, 1):
        ours = run(micro)
        assert ours.recorder.accum_bs == whole.recorder.accum_bs == sizes
        assert_same(ours.recorder.lrs, whole.recorder.lrs)
        assert_same_weights(ours, whole, ROUNDING)


def test_settings_may_change_between_fits():
    "Also those of a callback that was passed to a fit. Without `accum_bs`, each loader batch is a window"
    learn = make_learner(32)
    memory = MemoryLimit(learn.model)
    cb = split(8)
    for micro_batch_size, expected in [(8, 8), (4, 4), ('auto', 32), (None, 32), (16, 16)]:
        cb.micro_batch_size = micro_batch_size
        memory.in_training.clear()
        fit(learn, 1, cbs=cb)
        assert set(memory.in_training) == {expected}
        assert learn.recorder.accum_bs == [32, 32, 32]
    learn.dls = make_learner(48).dls
    assert fit(learn, 1, cbs=cb).recorder.accum_bs == [48, 48]
    cb.accum_bs = 64
    with pytest.raises(ValueError, match='accum_bs=64 .* not a multiple .* size of 48'): fit(learn, 1, cbs=cb)


# What callbacks draw once a batch

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


@pytest.mark.filterwarnings('ignore:could not check whether accumulation is exact')  # it has no partners for the check
@pytest.mark.parametrize('make_cb, mix', paired(WAYS_TO_SPLIT, [MixUp, CutMix, OwnMix]))
def test_what_callbacks_draw_for_the_batch_is_split_with_it(make_cb, mix):
    plain = seeded(image_learner(mix()))
    ours = seeded(image_learner(mix(), make_cb()))
    assert_apart(plain, seeded(image_learner()))
    assert_same_weights(ours, plain, FLOAT32)
    assert_same_logs(ours, plain, FLOAT32)


class PerSample(Callback):
    per_sample = 'numbers', 'texts', 'setting'

    def __init__(self):
        self.numbers = [1, 2, 3, 4]
        self.texts = [*'abcd']
        self.setting = torch.zeros(2)


def test_what_a_class_says_to_be_per_sample_is_split_whatever_its_type():
    "But a tensor of another length is the same for all samples"
    cb = PerSample()
    setting = cb.setting
    learn = make_learner(4, cbs=cb)
    learn.xb = learn.yb = (torch.arange(4),)
    with held_rows(learn, 1, 3, 4):
        assert (cb.numbers, cb.texts) == ([2, 3], ['b', 'c'])
        assert cb.setting is setting
    assert (cb.numbers, cb.texts) == ([1, 2, 3, 4], [*'abcd'])


class SwitchesMixUpOff(Callback):
    def before_epoch(self): self.learn.mix_up.run = self.epoch == 0


def test_mixup_that_is_switched_off_needs_no_partners():
    "Those that it keeps are of the last batch before, which is smaller"
    def run(*cbs):
        cbs = [MixUp(1.), SwitchesMixUpOff(), *cbs]
        return seeded(make_learner(8, n=44, m=model().float(), loss_func=MSELossFlat(), cbs=cbs))
    plain = run()
    assert_apart(plain, model())
    assert_same_weights(run(split(4)), plain, FLOAT32)


@pytest.mark.parametrize('make_cb', [
    partial(split, 8),
    partial(GradientCache, 8),
    partial(GradientAccumulation, 64),
    partial(all_blocks, lambda m: [m[0]])])
def test_a_preview_of_mixup_shows_mixed_inputs_and_the_fit_after_it_is_as_without_it(make_cb):
    "fastai's documentation shows a batch by `with learn: learn('before_train')`, on a Learner that was not trained"
    def learner():
        return make_learner(32, m=model().float(), loss_func=MSELossFlat(), cbs=[MixUp(1.), make_cb()])
    with learner() as learn:
        learn.epoch = 0
        learn.training = True
        learn.dl = learn.dls.train
        learn._split(first(learn.dl))
        before = learn.x
        learn('before_train')
        learn('before_batch')
    assert_apart(learn.x, before)
    learn.training = False
    assert_nothing_left(learn)
    assert learn.opt is None
    assert learn.dl is learn.dls.train
    assert_same_weights(seeded(learn), seeded(learner()))


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


@pytest.mark.filterwarnings('ignore:.*SeesSizes')
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


class Positions(Callback):
    run_valid = False

    def before_fit(self): self.seen = []

    def before_batch(self):
        learn = self.learn
        self.seen.append((len(self.x), learn.iter, learn.n_iter, learn.train_iter, learn.pct_train))


@pytest.mark.parametrize('make_cb', WAYS_TO_SPLIT)
def test_batches_without_targets_have_no_loss_and_no_step_as_in_fastai(make_cb):
    "Log and position are the same, and there is no warning"
    def run(*cbs):
        lines = []

        def log(row): lines.append(str(row[:3]))
        inputs, _ = data(96)
        dl = DataLoader([(o,) for o in inputs], bs=32)
        learn = Learner(DataLoaders(dl, dl), model(), mse, opt_func=SGD, cbs=[Positions(), *cbs])
        learn.logger = log
        with learn.no_bar(): learn.fit(2)
        assert_same_weights(learn, model())
        return learn.positions.seen, lines
    expected, expected_lines = run()
    positions, lines = run(make_cb())
    assert len(expected) == 6
    assert_same(positions, expected, ROUNDING)
    assert lines == expected_lines


# Cancelled batches

@pytest.mark.filterwarnings('ignore:a callback has cancelled a part of a batch')
@pytest.mark.parametrize('accum_bs,nth,windows_of_batches,n_cancelled,event,order', [
    (32, 7, [[0], [2], [3], [4]], 1, 'before_backward', 99),
    (64, 3, [[1, 2], [3, 4]], 0, 'after_pred', 99),
    (64, 5, [[0, 2], [3, 4]], 0, 'before_backward', 7),  # the window goes on
    # Its sums have a part of the cancelled batch, which cannot be taken out of them
    (64, 7, [[2, 3], [4]], 1, 'after_loss', 99)])
def test_a_batch_that_is_cancelled_in_a_micro_batch_is_left_out_whole(
        order, event, accum_bs, nth, windows_of_batches, n_cancelled):
    "Five batches of 32 samples have four micro-batches each, of which the nth is cancelled"
    cb = GradientAccumulation(accum_bs, micro_batch_size=8)
    learn = fit(make_learner(32, n=160, cbs=[cb, Fault(CancelBatchException, event, nth, order)]), 1)
    batches = torch.arange(160).split(32)
    steps = []
    for window in windows_of_batches:
        samples = torch.cat([batches[i] for i in window])
        steps.append((samples, 0))
    assert_steps(learn, steps, 160)
    assert len(losses(learn)) == len(steps)+n_cancelled  # fastai logs a cancelled batch, which here is a window
