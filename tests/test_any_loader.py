"""The promise of the large batch for DataLoaders whose batches have another number of rows than samples, and for sizes
that change between epochs; for other loaders, see test_situations_loaders.py"""
import pytest
import torch.utils.data as tud

from common import *
from same_fit import assert_same_fit

INPUTS, TARGETS = data(50)
SAMPLES = list(zip(INPUTS, TARGETS))
SAME_POSITIONS = 1e-15  # windows add up the same fractions in another order


# Loaders that state a batch size. A batch may have another number of rows

def stacked(samples):
    return [torch.stack(values) for values in zip(*samples)]


def two_views(samples):
    return [torch.cat([values, values*0.9]) for values in stacked(samples)]


def one_to_four_rows(samples):
    "Makes one row of the first sample, two of the second and so on, like the nodes of graphs"
    counts = [1+i%4 for i in range(len(samples))]
    return [values.repeat_interleave(tensor(counts), 0) for values in stacked(samples)]


def without_broken(samples):
    whole = [sample for sample in samples if sample[0][0] > -0.5]
    return stacked(whole or samples[:1])


def fastai_loader(bs, collate=stacked):
    return DataLoader(SAMPLES, bs=bs, create_batch=lambda samples: tuple(collate(samples)))


def torch_loader(bs, collate=stacked):
    return tud.DataLoader(SAMPLES, batch_size=bs, collate_fn=lambda samples: tuple(collate(samples)))


# Fits

class NotesPositions(Callback):
    "Notes the position in training where each epoch begins and ends, after all other callbacks"
    order = Recorder.order+10
    def before_fit(self):
        self.seen = []

    def before_train(self):
        self.seen.append(self.learn.pct_train)

    def after_epoch(self):
        self.seen.append(self.learn.pct_train)


def fit_on(loader, *cbs):
    "Trains on `loader` for three epochs, and returns the Learner"
    dls = DataLoaders(loader, DataLoader(SAMPLES[:16], bs=8))
    opt_func = partial(SGD, mom=0.9)
    learn = Learner(dls, model(), mse, opt_func=opt_func, cbs=[NotesPositions(), *cbs])
    fit(learn, method='fit_one_cycle')
    assert_moved(learn)
    return learn


def assert_same_fit_and_positions(small, large):
    assert_same_fit(small, large, rate_tol=SAME_POSITIONS)
    assert_same(small.notes_positions.seen, large.notes_positions.seen, SAME_POSITIONS)


# What runs a loader batch in parts, or computes it again

# Loaders of a batch that has another number of rows than samples
SIZABLE = {}
for collate in (two_views, one_to_four_rows, without_broken):
    SIZABLE[f'fastai_{collate.__name__}'] = partial(fastai_loader, collate=collate)
    SIZABLE[f'torch_{collate.__name__}'] = partial(torch_loader, collate=collate)


@pytest.mark.thin(2)
@pytest.mark.parametrize('loader,micro_batch_size', paired(SIZABLE, [None, 3, 4]))
def test_four_batches_of_any_kind_are_a_window(loader, micro_batch_size):
    "Samples are what the loader counts, also at the end of an epoch of another length than was announced"
    make_loader = SIZABLE[loader]
    small = fit_on(make_loader(4), GradientAccumulation(16, micro_batch_size=micro_batch_size))
    large = fit_on(make_loader(16))
    assert_same_fit_and_positions(small, large)


def test_carried_batches_move_the_next_epoch_back_by_their_samples_not_their_rows():
    "Three windows of 16 samples leave 2 of 50, with two rows each"
    learn = fit_on(fastai_loader(4, two_views), GradientAccumulation(16, remainder='carry'))
    assert learn.notes_positions.seen[2] == pytest.approx((1-2/50)/3)


# Sizes that change between epochs

class SetsSize(Callback):
    "Changes the batch size of the DataLoader"
    order = -100
    def __init__(self, sizes):
        self.sizes = sizes

    def before_epoch(self):
        self.dls.train.bs = self.sizes[self.epoch]


class SwapsLoaders(SetsSize):
    "Gives the Learner other DataLoaders"
    def before_epoch(self):
        train = torch_loader(self.sizes[self.epoch])
        self.learn.dls = DataLoaders(train, self.dls.valid)


class SwapsLoader(SetsSize):
    "Gives the epoch another DataLoader"
    before_epoch = noop
    def before_train(self):
        self.learn.dl = torch_loader(self.sizes[self.epoch])


@pytest.mark.thin(2)
@pytest.mark.parametrize('sizes,micro_batch_size,change', [
    ((4, 8, 16), None, SetsSize),
    ((16, 8, 4), 2, SetsSize),
    ((16, 8, 4), None, SwapsLoaders),
    ((4, 4, 2), 2, SwapsLoader)])
def test_windows_stay_as_large_as_they_are(sizes, micro_batch_size, change):
    accum = GradientAccumulation(16, micro_batch_size=micro_batch_size)
    small = fit_on(fastai_loader(sizes[0]), change(sizes), accum)
    large = fit_on(fastai_loader(16))
    assert_same_fit_and_positions(small, large)


# Batches that differ in size, of a loader that states none

@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'before_backward'])
def test_smaller_batches_take_the_place_of_a_cancelled_one(event):
    "The first batch would have filled its window by itself; two take its place"
    batches = [[0, 1, 2, 3], [4, 5], [6, 7], [8, 9, 10, 11]]
    accum = GradientAccumulation(4, micro_batch_size=4)
    learn = make_learner(4, n=50, cbs=[Fault(CancelBatchException, event, 1, 5), accum])
    use_batches(learn, [batches])
    fit(learn, 1)
    steps = [(batches[1]+batches[2], 0), (batches[3], 0)]
    assert accum.opt_steps == 2
    assert_steps(learn, steps, 50)
