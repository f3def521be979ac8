"The place in the DataLoader"
import pytest

from common import *
from fastxtend_accum.resuming.reader import Reader
from resume_layouts import fastai_data, samples, torch_data, with_valid
from resumed import assert_goes_on, learner, train


yielded = SimpleNamespace(n=0)  # of this process; a global, because no file holds it


class Stateful:
    "Knows its place by itself, as torchdata's loader does. What it has yielded is counted"
    bs = batch_size = 4
    device = None
    def __init__(self):
        self.dataset = samples()
        self.place = 0
        self.num_workers = 0

    def __len__(self): return 25

    def __iter__(self):
        start, self.place = self.place, 0
        for i in range(start, 25):
            self.place = i+1
            yielded.n += 1
            yield default_collate(self.dataset[4*i:4*i+4])
        self.place = 0

    def state_dict(self): return dict(place=self.place)
    def load_state_dict(self, state): self.place = state['place']


@pytest.mark.long
def test_a_loader_with_a_state_dict_goes_to_its_place():
    def script():
        yielded.n = 0
        return train(learner(dls=with_valid(Stateful())))
    assert_goes_on(script)
    assert yielded.n == 75-25-6  # an epoch, and 3 windows of two batches


def test_a_loader_that_has_come_to_its_end_does_not_begin_again():
    dl = Stateful()
    reader = Reader(dl)
    assert len(list(reader(dl))) == 25
    goes_on = Reader(dl, 25, *reader.state())
    assert list(goes_on(dl)) == []


class Stream(torch.utils.data.IterableDataset):
    "Shuffles by a buffer, which its state lacks, as a stream of Hugging Face, in whose module it pretends to be"
    __module__ = 'datasets.iterable_dataset'
    def __len__(self): return 100

    def __iter__(self):
        buffer = []
        for sample in samples():
            buffer.append(sample)
            if len(buffer) == 8: yield buffer.pop(3)
        yield from buffer

    def state_dict(self): return {}
    def load_state_dict(self, state): pass


def test_a_stream_whose_state_lacks_its_buffer_reads_the_epoch_again():
    def script(): return train(learner(dls=with_valid(torch.utils.data.DataLoader(Stream(), 4))))
    assert_goes_on(script)


LOADERS = {
    'torch': torch_data,
    'workers': partial(fastai_data, num_workers=1),
    'torch with a generator': lambda: torch_data(generator=torch.Generator().manual_seed(5))}


@pytest.mark.thin(5)
@pytest.mark.parametrize('name', LOADERS)
def test_the_same_batches_follow(name):
    assert_goes_on(lambda: train(learner(dls=LOADERS[name]())))
