"""The promise of the large batch for DataLoaders of any kind: fastai's and PyTorch's, with several rows of a sample or
fewer samples than announced, with batches of any size, and with sizes that change between epochs"""
import pytest
import torch.utils.data as tud

from common import *
from same_fit import assert_same_fit

INPUTS, TARGETS = data(50)
SAMPLES = list(zip(INPUTS, TARGETS))
SAME_POSITIONS = 1e-15  # windows add up the same fractions in another order

pytestmark = pytest.mark.filterwarnings('ignore:Length of IterableDataset')  # PyTorch's, of an announced length


# Loaders that state a batch size. A batch may have another number of rows

def stacked(samples):
    return [torch.stack(values) for values in zip(*samples)]


def two_views(samples):
    return [torch.cat([values, values*0.9]) for values in stacked(samples)]


def three_repeats(samples):
    return [values.repeat_interleave(3, 0) for values in stacked(samples)]


def one_to_four_rows(samples):
    "Makes one row of the first sample, two of the second and so on, like the nodes of graphs"
    counts = [1+i%4 for i in range(len(samples))]
    return [values.repeat_interleave(tensor(counts), 0) for values in stacked(samples)]


def without_broken(samples):
    whole = [sample for sample in samples if sample[0][0] > -0.5]
    return stacked(whole or samples[:1])


def every_second(samples):
    return stacked(samples[::2])


def fastai_loader(bs, collate=stacked):
    return DataLoader(SAMPLES, bs=bs, create_batch=lambda samples: tuple(collate(samples)))


def torch_loader(bs, collate=stacked):
    return tud.DataLoader(SAMPLES, batch_size=bs, collate_fn=lambda samples: tuple(collate(samples)))


def skips_samples(bs):
    "Some items raise fastai's SkipItemException"
    def create_item(i):
        if i%7 == 3: raise SkipItemException
        return SAMPLES[i]
    return DataLoader(SAMPLES, bs=bs, create_item=create_item)


def stream(bs, n_announced=50, **kwargs):
    return tud.DataLoader(Stream(50, n_announced), batch_size=bs, **kwargs)


# Loaders whose batches have any size

class SizedBatches:
    "A batch sampler of all 50 samples in order, 2 to 9 at a time"
    def __init__(self):
        rng = random.Random(0)
        self.batches = []
        start = 0
        while start < 50:
            end = min(50, start+rng.randint(2, 9))
            self.batches.append(list(range(start, end)))
            start = end

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def by_batch_sampler():
    return tud.DataLoader(SAMPLES, batch_sampler=SizedBatches())


def already_batched():
    "A fastai DataLoader whose items are batches"
    batches = list(SizedBatches())
    def create_item(i):
        return INPUTS[batches[i]], TARGETS[batches[i]]
    return DataLoader(batches, bs=None, create_item=create_item)


class OwnLoader:
    "Has no data set and no sampler. It announces a number of batches, and may state a size of them"
    def __init__(self, sizes, n_announced, **stated):
        self.sizes = sizes
        self.n_announced = n_announced
        vars(self).update(stated)

    def __len__(self):
        return self.n_announced

    def __iter__(self):
        rest = 50-sum(self.sizes)
        inputs = INPUTS.split([*self.sizes, rest])
        targets = TARGETS.split([*self.sizes, rest])
        return zip(inputs[:-1], targets[:-1])


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
SAVERS = dict(
    checkpointing=ActivationCheckpointing,
    cache=partial(GradientCache, 4),
    threes=partial(GradientAccumulation, micro_batch_size=3),
    auto=partial(GradientAccumulation, micro_batch_size='auto'))

# Loaders that can be asked for any batch size
SIZABLE = dict(
    skips_samples=skips_samples,
    stream=stream,
    longer_stream=partial(stream, n_announced=64),
    shorter_stream=partial(stream, n_announced=40))
for collate in (two_views, three_repeats, one_to_four_rows, without_broken):
    SIZABLE[f'fastai_{collate.__name__}'] = partial(fastai_loader, collate=collate)
    SIZABLE[f'torch_{collate.__name__}'] = partial(torch_loader, collate=collate)

# And others, each batch of which can be a window
ANY_BATCHES = {name: partial(loader, 8) for name, loader in SIZABLE.items()}
ANY_BATCHES |= dict(
    fastai_every_second=partial(fastai_loader, 8, every_second),
    torch_every_second=partial(torch_loader, 8, every_second),
    stream_that_drops_last=partial(stream, 8, drop_last=True),
    batch_sampler=by_batch_sampler,
    already_batched=already_batched,
    own_loader=partial(OwnLoader, [8, 3, 8, 8, 1, 8], 6),
    own_loader_with_bs=partial(OwnLoader, [8, 3, 8, 8, 1, 8], 6, bs=8),
    own_loader_that_announces_fewer=partial(OwnLoader, [8, 3, 8, 8, 1, 8], 4, batch_size=8))


@pytest.mark.parametrize('loader,saver', paired(ANY_BATCHES, SAVERS))
def test_one_batch_of_any_kind_is_a_window(loader, saver):
    "What saves memory in it changes nothing"
    make_loader = ANY_BATCHES[loader]
    small = fit_on(make_loader(), SAVERS[saver]())
    large = fit_on(make_loader())
    assert_same_fit_and_positions(small, large)


@pytest.mark.parametrize('loader,micro_batch_size', paired(SIZABLE, [None, 3, 4]))
def test_four_batches_of_any_kind_are_a_window(loader, micro_batch_size):
    "Samples are what the loader counts, also at the end of an epoch of another length than was announced"
    make_loader = SIZABLE[loader]
    small = fit_on(make_loader(4), GradientAccumulation(16, micro_batch_size=micro_batch_size))
    large = fit_on(make_loader(16))
    assert_same_fit_and_positions(small, large)


def test_a_window_of_an_own_loader_that_states_a_size():
    "Each batch counts for the size that is stated, however many samples it has"
    small = fit_on(OwnLoader([4, 3, 4, 4, 2], 5, bs=4), GradientAccumulation(16))
    large = fit_on(OwnLoader([15, 2], 2, bs=16))
    assert_same_fit_and_positions(small, large)


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


CHANGES = [SetsSize, SwapsLoaders, SwapsLoader]


@pytest.mark.parametrize('sizes,saver,change', paired([(16, 16, 8), (4, 8, 12)], SAVERS, CHANGES))
def test_each_batch_is_a_window_whatever_its_size(sizes, saver, change):
    small = fit_on(fastai_loader(sizes[0]), change(sizes), SAVERS[saver]())
    large = fit_on(fastai_loader(sizes[0]), change(sizes))
    assert_same_fit_and_positions(small, large)


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
