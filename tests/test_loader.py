"""windows/loader.py: what a DataLoader says of its batches, the windows they fill, and which batches come when: of
fastai's loaders and PyTorch's, of batch samplers, streams, and loaders that use the memory of a batch again"""
import gc
import weakref

import pytest
from fastai.callback.data import PartialDL
from fastai.distributed import DistributedDL
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SubsetRandomSampler
from torch.utils.data import DataLoader as TorchDataLoader

from common import *
from fastxtend_accum.windows.loader import *
from numbered_batches import *

EACH_REMAINDER = pytest.mark.parametrize('remainder', ['step', 'carry', 'drop'])


# What a loader says of its batches

SAMPLES = samples(20)


class OwnBatchSampler:
    "Has no batch size"
    def __len__(self): return 4


class Repeated(DataLoader):
    "Announces each batch twice"
    def __len__(self): return 2*super().__len__()


class OfTwoProcesses(DistributedDL):
    "The loader of the second one, which draws its samples without the first"
    def __init__(self, **kwargs):
        super().__init__(sized(**kwargs), rank=1, world_size=2)

    def _broadcast(self, samples, rank): return samples


def subset(n):
    return SubsetRandomSampler(range(n), torch.Generator().manual_seed(0))


def batch_sampler(drop_last=False):
    sampler = BatchSampler(subset(12), 8, drop_last)
    return TorchDataLoader(SAMPLES, batch_sampler=sampler)


sized = partial(DataLoader, SAMPLES, bs=8)
sized_torch = partial(TorchDataLoader, SAMPLES, 8)
stream = partial(DataLoader, Stream(20), bs=8)


def exactly(samples, bs=8):
    return LoaderInfo(bs, states_batch_size=True, n_expected=samples, has_exact_length=True)


def about(samples):
    return LoaderInfo(8, states_batch_size=True, n_expected=samples, has_exact_length=False)


def unknown(batches):
    return LoaderInfo(None, states_batch_size=False, n_expected=batches, has_exact_length=False)


LOADERS = dict(
    fastai=(sized, exactly(20)),
    fastai_drop_last=(partial(sized, drop_last=True), exactly(16)),
    fastai_full_batches=(partial(sized, bs=10), exactly(20, bs=10)),
    partial=(partial(PartialDL, range(100), bs=64, partial_n=70), exactly(70, bs=64)),
    distributed=(OfTwoProcesses, exactly(10)),
    distributed_drop_last=(partial(OfTwoProcesses, drop_last=True), exactly(8)),
    fastai_stream=(stream, about(24)),
    repeated=(partial(Repeated, SAMPLES, bs=8), about(48)),
    torch=(sized_torch, exactly(20)),
    torch_drop_last=(partial(sized_torch, drop_last=True), exactly(16)),
    torch_sampler=(partial(sized_torch, sampler=subset(12)), exactly(12)),
    batch_sampler=(batch_sampler, exactly(12)),
    batch_sampler_drop_last=(partial(batch_sampler, drop_last=True), exactly(8)),
    torch_stream=(partial(TorchDataLoader, Stream(20), 8), about(24)),
    own_batch_sampler=(partial(TorchDataLoader, SAMPLES, batch_sampler=OwnBatchSampler()), unknown(4)),
    list_of_batches=(lambda: [None, None, None, None], unknown(4)))


@pytest.mark.parametrize('name', LOADERS)
def test_what_a_loader_says_of_its_batches(name):
    make, expected = LOADERS[name]
    assert loader_info(make()) == expected


def plan_of(info, size=16, epoch=0, n_epoch=2, remainder='step', carried=()):
    "Returns the plan of an epoch with windows of one size, or of a size that is a function of the position in training"
    size_at_pct = size if callable(size) else lambda pct: size
    bs = info.expected_batch_size
    return EpochPlan(info, size_at_pct, bs/2, bs, epoch, n_epoch, remainder, carried)


# The plan of an epoch

@pytest.mark.parametrize('size, bs, n_batches, n_pieces, samples', [
    (159, 64, 2, 1, 128),
    (160, 64, 3, 1, 192),  # as near to two as to three: the larger one
    (48, 64, 1, 1, 64),  # as near to one piece as to two: the larger one
    (48-1e-9, 64, 1, 1, 64),  # also after a rounding error
    (42, 64, 1, 2, 32),
    (5, 64, 1, 13, 4),
    (1, 64, 1, 64, 1),
    (.5, 64, 1, 64, 1)])  # of a process, if a curve dips below the number of processes
def test_the_shape_of_a_window_comes_nearest_to_its_size(size, bs, n_batches, n_pieces, samples):
    shape = nearest_shape(size, bs)
    assert shape == (n_batches, n_pieces)
    assert shape.samples(bs) == samples


@draws
@given(
    n=st.integers(1, 100),
    bs=st.integers(1, 9),
    k=st.integers(1, 5),
    later_k=st.integers(1, 5),
    n_epoch=st.integers(1, 4),
    remainder=st.sampled_from(['step', 'carry', 'drop']))
def test_any_plan(n, bs, k, later_k, n_epoch, remainder):
    "Its windows have the sizes of those that plain loops make, and begin where they begin"
    def size_at_pct(pct): return k*bs if pct < .37 else later_k*bs
    info = loader_info(DataLoader(range(n), bs=bs))
    sizes = []
    pcts = []
    carried = []
    for epoch in range(n_epoch):
        plan = plan_of(info, size_at_pct, epoch, n_epoch, remainder, carried)
        for start, size in plan.windows:
            sizes.append(size)
            pcts.append(plan.pct_train(plan.position(start)))
        carried = plan.left if plan.remainder == 'carry' else []
    expected = windows(n, bs, size_at_pct, remainder, n_epoch)
    assert sizes == [len(samples) for samples, _ in expected]
    assert_same(pcts, [pct for _, pct in expected], ROUNDING)


def test_a_window_that_begins_with_carried_batches_has_the_size_of_where_it_began():
    "Three fifths of an epoch before the second one"
    def size_at_pct(pct): return 16 if pct < .19 else 8
    plan = plan_of(exactly(20), size_at_pct, epoch=1, remainder='carry', carried=[8, 4])
    assert plan.windows[0] == (-12, 8)


# The batches of an epoch

def test_batches_are_the_loader_to_callbacks():
    "They find and set its attributes, and read its batches; `len` is that of fastai's loop, at least 1"
    dl = sized()
    shown = ShownLoader(dl, None, 2)
    shown.bs = 12
    assert shown.bs == dl.bs == 12
    assert shown.dataset is SAMPLES
    assert [len(inputs) for inputs, _ in shown] == [12, 8]
    assert len(shown) == 2
    assert len(ShownLoader(dl, None, 0)) == 1


# Fits with loaders of all kinds

def with_loader(train, *cbs):
    dls = DataLoaders(train, sized(bs=16))
    return Learner(dls, model(), mse, opt_func=SGD, cbs=cbs)


def assert_fits_windows(learn, n, accum=32, remainder='step', drop_last=False):
    "Trains, and asserts that the windows are those of `n` samples that come in order, eight at a time"
    steps = windows(n, 8, accum, remainder, 3, drop_last)
    fit(learn)
    assert_steps(learn, steps, n)
    assert learn.recorder.accum_bs == [len(samples) for samples, _ in steps]


def torch_loader(n, bs, **kwargs):
    return TorchDataLoader(samples(n), bs, **kwargs)


def torch_subset(n, bs, drop_last=False):
    "Draws the first `n` samples of more"
    sampler = BatchSampler(range(n), bs, drop_last)
    return TorchDataLoader(samples(n)+SAMPLES, batch_sampler=sampler)


@EACH_REMAINDER
@pytest.mark.parametrize('make', [torch_loader, torch_subset])
def test_a_loader_of_pytorch_or_a_batch_sampler(make, remainder):
    """The last window has batches of 8, 8, 8 and 4 samples. Where the loader drops the last batch, incomplete windows
    are dropped, too, unless something else is asked for"""
    learn = with_loader(make(92, 8), GradientAccumulation(32, remainder=remainder))
    assert_fits_windows(learn, 92, remainder=remainder)
    drops = make(92, 8, drop_last=True)
    learn = with_loader(drops, GradientAccumulation(32))
    assert_fits_windows(learn, 92, remainder='drop', drop_last=True)


@pytest.mark.parametrize('accum, ends', [(8, [10, 13]), (2, [4, 7, 9, 12, 13])])
def test_batches_of_many_sizes(accum, ends):
    """With micro_batch_size in place of the batch size that nobody states, a window takes them until it is full; or it
    is half of 4, or of more. An empty batch changes nothing"""
    train = list_of_batches([7, 3, 0, 2, 1])
    learn = fit(with_loader(train, GradientAccumulation(accum, micro_batch_size=4)), 2)
    steps = [(range(*bounds), 0) for bounds in zip([0, *ends], ends)]
    assert_steps(learn, steps+steps, 13)
    assert learn.pct_train == 1


def fastai_stream(n): return DataLoader(Stream(88), bs=np.int64(8), n=n)  # a number of NumPy counts as a number
def torch_stream(n): return TorchDataLoader(Stream(88, n), 8)


@pytest.mark.filterwarnings('ignore:Length of IterableDataset')
@pytest.mark.parametrize('make, n, remainder, n_run', [
    (fastai_stream, 88, 'step', 33),
    (fastai_stream, 104, 'carry', 33),
    (torch_stream, 40, 'step', 33),
    (torch_stream, 88, 'drop', 24),  # what would be dropped does not run
    (torch_stream, 104, 'drop', 24),
    (torch_stream, 104, 'carry', 33)])
def test_a_stream_may_be_shorter_than_it_announces_and_one_of_pytorchs_longer(make, n, remainder, n_run):
    counts = Fault(None, 'after_backward', nth=0, order=0)  # counts passes, and raises nothing
    learn = with_loader(make(n), counts, GradientAccumulation(32, remainder=remainder))
    assert_fits_windows(learn, 88, remainder=remainder)
    assert counts.count == n_run


def test_the_last_batch_of_a_stream_has_the_samples_that_come():
    learn = with_loader(TorchDataLoader(Stream(43), 8), GradientAccumulation(32))
    assert fit(learn, 2).recorder.accum_bs == [32, 11, 32, 11]


# Loaders that use the memory of a batch again

class OneBuffer:
    "Writes each batch into the same tensors"
    bs = 8

    def __init__(self, *data):
        self.data = data  # inputs and targets
        self.n = len(data[0])

    def __len__(self): return math.ceil(self.n/self.bs)

    def __iter__(self):
        buffer = [torch.empty_like(values[:self.bs]) for values in self.data]
        for start in range(0, self.n, self.bs): yield self.written(start, buffer)

    def written(self, start, buffer):
        "Returns `buffer` with the values of a batch, which may be smaller"
        res = []
        for values, memory in zip(self.data, buffer):
            batch = values[start:start+self.bs]
            part = memory[:len(batch)]
            part.copy_(batch)
            res.append(part)
        return tuple(res)


class Erased(OneBuffer):
    "Its buffer means nothing any more once the next batch is asked for"
    def __iter__(self):
        for batch in super().__iter__():
            yield batch
            for o in batch: o.fill_(math.nan)


class Understated(OneBuffer):
    "Announces fewer batches than it has, so that windows are read ahead"
    def __len__(self): return 3


def test_beyond_the_announced_length_pieces_have_the_size_of_their_windows():
    "It is that of the end of the epoch, which is half of the fit"
    dl = Understated(*data(88))
    plan = plan_of(loader_info(dl), lambda pct: 4 if pct <= .5 else 8)
    batches = EpochBatches(dl, plan, [])
    with batches.reading():
        while batches.advance(): assert batches.current.samples == batches.plan.window_size(batches.samples_read) == 4


KINDS_OF_BUFFERS = [OneBuffer, Erased]


@EACH_REMAINDER
@pytest.mark.parametrize('kind', [*KINDS_OF_BUFFERS, Understated])
def test_a_loader_may_use_the_memory_of_a_batch_again(kind, remainder):
    "What is carried or read ahead is a copy"
    dl = kind(*data(88))
    learn = with_loader(dl, GradientAccumulation(32, remainder=remainder))
    assert_fits_windows(learn, 88, remainder=remainder)


class NotesBeginning(OneBuffer):
    "Notes each time that it begins in `events`"
    def __iter__(self):
        self.events.append('begins')
        yield from super().__iter__()


def test_a_loader_begins_before_carried_batches_run():
    "So it draws its order before the model draws random numbers, as in fastai. Of 11 batches, 3 are carried"
    dl = NotesBeginning(*data(88))
    dl.events = []
    def note(self): dl.events.append('runs')
    learn = with_loader(dl, GradientAccumulation(32, remainder='carry'), Callback(after_backward=note))
    fit(learn, 2)
    assert dl.events == ['begins', *['runs']*8, 'begins', *['runs']*14]


@pytest.mark.parametrize('kind', KINDS_OF_BUFFERS)
def test_a_batch_that_has_run_may_be_written_over_before_it_runs_again(kind):
    "In the next epoch, since the last batch of its window was cancelled"
    n = 32
    cancels = Fault(CancelBatchException, 'before_batch', 4, 5)
    accum = GradientAccumulation(32, remainder='carry')
    learn = with_loader(kind(*data(n)), accum, cancels)
    fit(learn, 2)
    assert_trained_on(learn, n, '0120 123')


def n_labels(learn): return (learn.y != -100).sum().item()


def test_the_check_of_the_loss_does_not_depend_on_memory_that_is_used_again():
    "It finds that the loss is exact, and does not warn"
    accum = GradientAccumulation(24, num_items=n_labels)
    learn = with_loader(OneBuffer(*tokens()), accum)
    learn.model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 4))
    learn.loss_func = CrossEntropyLossFlat(ignore_index=-100)
    learn.dls = DataLoaders(learn.dls.train, learn.dls.train)
    fit(learn, 1)
    assert accum.loop.fit.loss_check.windows_left == 3


# Which batches come in the next epoch

@pytest.mark.parametrize('exc', [CancelTrainException, CancelEpochException])
def test_an_epoch_that_a_callback_ends_leaves_nothing(exc):
    "Neither its own batches nor those that it has not run of the epoch before"
    notes = NotesBatches()
    ends = Fault(exc, 'after_backward', 5, 20)  # the first of three batches that were carried
    learn = accumulated_learner(56, [notes, ends], remainder='carry')
    fit(learn)
    assert notes.epochs == ['0123', '4', '0123456']


# What a running loader holds

def n_workers(): return len(multiprocessing.active_children())


class CountsWorkers(Callback):
    "Notes at the end of each epoch how many workers there are"
    def before_fit(self): self.counts = []
    def after_epoch(self): self.counts.append(n_workers())


def fit_without_gc(learn):
    gc.disable()
    try: fit(learn, 2)
    except KeyboardInterrupt: pass
    finally: gc.enable()


ENDS_OF_TRAINING = [(None, [0, 0]),
                    (CancelTrainException, [0, 0]),
                    (KeyboardInterrupt, [0])]


@pytest.mark.thin(2)
@pytest.mark.parametrize('exc, counts', ENDS_OF_TRAINING)
@EACH_REMAINDER
def test_workers_end_with_their_epoch(remainder, exc, counts):
    "Without the garbage collector, which may take seconds to come"
    learn = accumulated_learner(64, [CountsWorkers()], remainder=remainder)
    learn.dls.train = DataLoader(learn.dls.train.dataset, bs=BS, num_workers=1)
    if exc: learn.add_cb(Fault(exc, 'after_step', 3, 0))  # in the second epoch
    fit_without_gc(learn)
    assert learn.counts_workers.counts == counts
    assert n_workers() == 0
    assert learn.gradient_accumulation.opt_steps >= 3


class NotesAlive(Callback):
    "Counts the batches of the loader that still exist"
    run_valid = False

    def before_fit(self):
        self.refs = []
        self.counts = []
        self.learn.dls.train.after_batch = self.note

    def note(self, batch):
        self.refs.append(weakref.ref(batch[0]))
        return batch

    def n_alive(self): return sum(ref() is not None for ref in self.refs)
    def after_batch(self): self.counts.append(self.n_alive())


@pytest.mark.parametrize('remainder, n_read', [('step', 22), ('carry', 22), ('drop', 12)])
def test_batches_are_let_go(remainder, n_read):
    "Also those that the epoch before has carried. What would be dropped is not even read"
    notes = NotesAlive()
    learn = accumulated_learner(88, [notes], 6, remainder=remainder)
    fit(learn, 2)
    gc.collect()
    assert len(notes.refs) == n_read
    assert max(notes.counts) <= 3
    assert notes.n_alive() == 0


class CountsEnds(DataLoader):
    "Counts the epochs that have ended"
    n_ends = 0
    def after_iter(self): self.n_ends += 1


class SkipsEasySamples(CountsEnds):
    "Leaves out a few samples, as if they could not be read"
    def create_item(self, i):
        if i < 12: raise SkipItemException
        return super().create_item(i)


@pytest.mark.parametrize('n, remainder, kind', [
    (88, 'step', CountsEnds),
    (88, 'carry', CountsEnds),
    (96, 'drop', CountsEnds),
    (88, 'drop', CountsEnds),
    (88, 'step', SkipsEasySamples),
    (88, 'carry', SkipsEasySamples),
    (88, 'drop', SkipsEasySamples)])
def test_a_loader_is_told_once_that_its_epoch_has_ended(n, remainder, kind):
    "Also if it still has batches that are dropped"
    learn = accumulated_learner(n, remainder=remainder)
    learn.dls.train = kind(learn.dls.train.dataset, bs=BS)
    fit(learn)
    assert learn.dls.train.n_ends == 3


# Callbacks and `learn.dl`


class Bar(GetAttr):
    "Such as a progress bar around a DataLoader"
    _default = 'dl'
    def __init__(self, dl): self.dl = dl
    def __len__(self): return len(self.dl)
    def __iter__(self): yield from self.dl


class Wraps(Callback):
    order = 11
    def before_train(self): self.learn.dl = Bar(self.learn.dl)


@EACH_REMAINDER
def test_a_loader_that_is_replaced_before_the_windows_begin_is_the_data(remainder):
    learn = fit(accumulated_learner(96, [Wraps()], remainder=remainder))
    assert len(losses(learn)) == 9


# Loaders without a batch size, and without batches

def test_the_line_of_a_loader_that_states_no_size_has_that_of_its_first_batch(capsys):
    accum = GradientAccumulation(micro_batch_size='auto')
    fit_aloud(with_loader(list_of_batches([8, 8, 8, 8]), accum), 1)
    assert '8 samples per step, at most 8 at a time' in capsys.readouterr().out
    assert accum.micro_bs is None
