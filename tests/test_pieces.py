"""Windows smaller than a loader batch, which is cut into pieces: the fit is the one of a plain Learner with a smaller
loader, bit for bit, whatever the loader, the form of its batches, the schedule and the end of an epoch"""
import pytest
import torch.utils.data as tud

from numbered_batches import *


def fastai_loader(n, bs, collate=None, **kwargs):
    set_seed(2)  # a loader that shuffles draws its seed here
    return DataLoader(samples(n), bs=bs, create_batch=collate, **kwargs)


def torch_loader(n, bs, shuffle=False):
    generator = torch.Generator().manual_seed(4)
    return tud.DataLoader(samples(n), bs, shuffle, generator=generator)


def stream(n, bs): return tud.DataLoader(Stream(n), bs)


class SeesBatches(Callback):
    "Notes the number of batches, and in each event of a training batch its size and the position"
    order = 40
    run_valid = False
    def before_fit(self): self.seen = []
    def note(self, event): self.seen.append((event, len(self.learn.yb[0]), self.train_iter, self.learn.pct_train))

    def before_batch(self):
        self.seen.append((len(self.learn.dl), self.n_iter))
        self.note('before_batch')

    def after_pred(self): self.note('after_pred')
    def before_step(self): self.note('before_step')
    def after_batch(self): self.note('after_batch')


def learner_on(train, *cbs, **kwargs):
    valid = DataLoader(samples(8), bs=8)
    return Learner(DataLoaders(train, valid), model(), mse, cbs=[SeesBatches(), *cbs], **kwargs)


def fitted(train, *cbs):
    "Trains on a loader, with a momentum and a rate that change, and returns the Learner"
    learn = learner_on(train, *cbs, opt_func=partial(SGD, mom=.9))
    set_seed(1)
    return fit(learn, 2, method='fit_one_cycle')


def assert_bit_for_bit(ours, plain):
    "Asserts the same weights, rates, losses and events"
    assert len(losses(plain)) > 1
    assert_same_weights(ours, plain)
    assert ours.recorder.lrs == plain.recorder.lrs
    assert losses(ours) == losses(plain)
    assert ours.sees_batches.seen == plain.sees_batches.seen


# The fit with the small loader

@pytest.mark.parametrize('bs, size, n, loader, log', [
    (24, 8, 96, fastai_loader, True),
    (24, 24, 100, torch_loader, False),
    (32, 4, 103, torch_loader, True),
    (32, 16, 103, fastai_loader, False),
    (32, 16, 100, fastai_loader, True),
    (96, 12, 100, torch_loader, False)])
def test_the_fit_is_the_one_with_the_small_loader(bs, size, n, loader, log):
    "Also where the last loader batch is smaller, or has fewer samples than a piece"
    plain = fitted(loader(n, size))
    ours = fitted(loader(n, bs), GradientAccumulation(size, log_accum_batch=log))
    assert_moved(plain)
    assert_bit_for_bit(ours, plain)


@pytest.mark.parametrize('loader', [fastai_loader, torch_loader])
def test_shuffled_samples_are_those_of_the_small_loader(loader):
    plain = fitted(loader(96, 8, shuffle=True))
    assert_apart(plain, fitted(loader(96, 8)))
    assert_bit_for_bit(fitted(loader(96, 32, shuffle=True), GradientAccumulation(8)), plain)


@pytest.mark.filterwarnings('ignore:Length of IterableDataset')
@pytest.mark.parametrize('n', [96, 100])
def test_a_stream_is_cut(n):
    "Also its last loader batch, of which nobody knows how large it is"
    plain = fit(learner_on(stream(n, 8), opt_func=SGD))
    ours = fit(learner_on(stream(n, 32), GradientAccumulation(8), opt_func=SGD))
    assert_moved(plain)
    assert len(losses(ours)) == len(losses(plain))
    assert_same_weights(ours, plain, ROUNDING)  # nobody knows that the last piece is the last one


@pytest.mark.parametrize('event, exc', paired(
    ['before_batch', 'after_pred', 'before_backward', 'after_backward', 'before_step'],
    [CancelBatchException, CancelBackwardException, CancelStepException]))
def test_a_piece_is_cancelled_as_a_batch_of_the_small_loader(event, exc):
    "fastai's own rules hold, and its own errors"
    def run(bs, *cbs):
        learn = learner_on(fastai_loader(96, bs), Fault(exc, event, 4, 5), *cbs, opt_func=SGD)
        try: fit(learn, 2)
        except exc: pass
        return learn
    assert_bit_for_bit(run(32, GradientAccumulation(8)), run(8))


# Batches that can be cut

def as_set(samples): return set(samples), None
def with_time_first(samples): return torch.zeros(9, 32, 5), torch.zeros(9, 32)


@pytest.mark.parametrize('collate, says', [
    (as_set, 'cannot split a set: use dense tensors'),
    (with_time_first, 'shape (9, 32, 5) for 32 samples')])
def test_a_batch_that_cannot_be_sliced_is_an_error_before_training(collate, says):
    learn = learner_on(fastai_loader(96, 32, collate), GradientAccumulation(8))
    with pytest.raises(ValueError, match=re.escape(says)): fit(learn)
    assert learn.sees_batches.seen == []


def as_dict(samples):
    x, y = tud.default_collate(samples)
    return dict(x=x, y=y)


class OfDicts(Learner):
    def _split(self, b): self.xb, self.yb = (b['x'],), (b['y'],)


def test_a_batch_may_be_a_dict():
    def train(bs, *cbs):
        learn = learner_on(fastai_loader(96, bs, as_dict), *cbs, opt_func=SGD)
        learn.__class__ = OfDicts
        learn.dls.valid = learn.dls.train
        return fit(learn)
    plain = train(8)
    assert_moved(plain)
    assert_bit_for_bit(train(32, GradientAccumulation(8)), plain)


def test_a_loader_that_states_no_batch_size_is_cut():
    "Every sample is used, also if batches are larger or smaller than `micro_batch_size` says"
    def train(sizes, *cbs): return fit(learner_on(list_of_batches(sizes), *cbs, opt_func=SGD), 2)
    pieces = [8, 8, 12, 12, 8, 2]
    ours = train([16, 24, 10], GradientAccumulation(8, micro_batch_size=16))
    plain = train(pieces)
    assert ours.recorder.accum_bs == pieces*2
    assert ours.pct_train == 1
    assert losses(ours) == losses(plain)
    assert_same_weights(ours, plain)


# Pieces of any size, against plain PyTorch


@pytest.mark.parametrize('size, n_pieces', [(45, 2), (48, 1), (5, 13), (1, 64)])
def test_a_size_that_does_not_divide_the_batch_is_rounded(size, n_pieces):
    "To pieces of nearly equal size: 5 of 64 makes 13 windows of 4 or 5 samples"
    accum = GradientAccumulation(size)
    learn = fit(make_learner(64, n=128, cbs=accum), 1)
    sizes = learn.recorder.accum_bs
    assert len(sizes) == accum.opt_steps == 2*n_pieces
    assert sum(sizes) == 128
    assert max(sizes)-min(sizes) <= 1
    assert accum.micro_bs == max(sizes)


# Schedules that cross the loader's batch

@pytest.mark.parametrize('sizes, remainder, log', [
    ((8, 32, 64), 'step', True),
    ((8, 32, 64), 'carry', False),
    ((64, 16, 32), 'carry', True),
    ((64, 16, 32), 'drop', False),
    ((4, 8, 16), 'drop', True)])
def test_a_schedule_goes_below_and_above_the_batch(sizes, remainder, log):
    first, second, third = sizes
    def size_at(pct):
        if pct < 1/3-1e-9: return first
        return second if pct < 2/3-1e-9 else third
    steps = windows(96, 4, size_at, remainder, 2)
    accum = GradientAccumulationSchedule(
        **SchedSteps({0: first, 1/3: second, 2/3: third}), remainder=remainder, log_accum_batch=log)
    learn = make_learner(32, cbs=accum)
    previewed = [size for _, size in accum.preview(2, learn.dls)]
    fit(learn, 2)
    assert previewed == [len(samples) for samples, _ in steps]
    assert_steps(learn, steps)


def test_all_pieces_of_a_batch_have_the_size_that_the_schedule_has_where_it_begins():
    "The size changes after a quarter of the first batch, and counts from the second one on"
    accum = GradientAccumulationSchedule(**SchedSteps({0: 16, 1/8: 32}))
    learn = fit(make_learner(64, n=128, cbs=accum), 1)
    assert learn.recorder.accum_bs == [16, 16, 16, 16, 32, 32]


def test_batches_that_were_carried_do_not_move_the_size_of_pieces():
    "The first epoch leaves 32 samples. The second one has batches of 32 at 1/2, 2/3 and 5/6 of the fit"
    accum = GradientAccumulationSchedule(**SchedSteps({0: 64, 2/3: 16}), remainder='carry')
    learn = make_learner(32, n=96, cbs=accum)
    sizes = [64, 64, 16, 16, 16, 16]
    assert [samples for _, samples in accum.preview(2, learn.dls)] == sizes
    fit(learn, 2)
    assert learn.recorder.accum_bs == sizes


def test_a_last_piece_that_is_smaller_is_dropped_on_demand():
    "Of the last batch of 24 samples, 8 do not fill a window of 16"
    learn = fit(make_learner(32, n=120, cbs=GradientAccumulation(16, remainder='drop')), 2)
    assert learn.recorder.accum_bs == [16]*14
    assert_steps(learn, windows(120, 8, 16, 'drop', 2), 120)
