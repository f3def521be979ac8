"Loaders as other people write them, each in a few lines"
from functools import cache

from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import BatchSampler
from torch.utils.data import IterableDataset
from torch.utils.data import SequentialSampler
from torch.utils.data import Subset
from torch.utils.data import WeightedRandomSampler
from fastai.data.core import TfmdDL
from fastai.data.load import DataLoader as FastaiLoader

from situations import *

SAMPLES = list(zip(*data(N)))


class OfForm:
    "A loader of PyTorch whose batches have another form, a model that takes them, and callbacks that help it"
    def __init__(self, collate, make_model, *make_others):
        self.collate = collate
        self.make_model = make_model
        self.make_others = make_others

    def learner(self, bs, cbs):
        train = TorchLoader(SAMPLES, bs, collate_fn=self.collate)
        valid = TorchLoader(SAMPLES[:20], 16, collate_fn=self.collate)
        others = [make() for make in self.make_others]
        dls = DataLoaders(train, valid)
        return Learner(dls, self.make_model(), loss_func=mse, opt_func=SGD, cbs=[*others, *cbs])


@cache
def learner_on(make_loader):
    "Returns a situation: a Learner that trains on the loader that `make_loader(bs)` returns"
    def learner(bs, cbs):
        valid = TorchLoader(SAMPLES[:20], 16, collate_fn=stacked)
        dls = DataLoaders(make_loader(bs), valid)
        return Learner(dls, model(), loss_func=mse, opt_func=SGD, cbs=list(cbs))
    return learner


# Batches of another form

def stacked(samples):
    inputs, targets = zip(*samples)
    return torch.stack(inputs), torch.stack(targets)


def as_list(samples): return list(stacked(samples))


def as_mapping(samples):
    inputs, targets = stacked(samples)
    return dict(inputs=inputs), targets


class OfMapping(nn.Module):
    "Takes its inputs out of a mapping"
    def __init__(self):
        super().__init__()
        self.model = model()

    def forward(self, batch): return self.model(batch['inputs'])


def with_names(samples):
    "Puts the names of samples between inputs and targets"
    inputs, targets = stacked(samples)
    return inputs, [f'sample {float(o):.3f}' for o in targets], targets


class IgnoresNames(OfMapping):
    def forward(self, inputs, names): return self.model(inputs)


def with_setting(samples):
    "Puts a number for the whole batch beside the inputs"
    inputs, targets = stacked(samples)
    return inputs, torch.tensor(.5), targets


class UsesSetting(OfMapping):
    def forward(self, inputs, setting): return self.model(inputs)*setting


def two_views(samples):
    "Returns two rows of each sample"
    inputs, targets = stacked(samples)
    return torch.cat([inputs, -inputs]), torch.cat([targets, targets])


@dataclass
class Record:
    inputs: Tensor
    targets: Tensor


def as_record(samples): return (Record(*stacked(samples)),)


class TakesRecords(Callback):
    "Takes inputs and targets out of a record"
    def before_batch(self):
        record, = self.learn.xb+self.learn.yb
        self.learn.xb = (record.inputs,)
        self.learn.yb = (record.targets,)


# Loaders of PyTorch

def center(samples):
    "Takes the mean of the batch from the inputs"
    inputs, targets = stacked(samples)
    return inputs-inputs.mean(0), targets


def scale(samples):
    "Divides by the largest input of the batch"
    inputs, targets = stacked(samples)
    return inputs/inputs.abs().max(), targets


def centered_by_collate(bs): return TorchLoader(SAMPLES, bs, collate_fn=center)
def scaled_by_collate(bs): return TorchLoader(SAMPLES, bs, collate_fn=scale)
def dropping(bs): return TorchLoader(SAMPLES, bs, collate_fn=stacked, drop_last=True)


def by_batch_sampler(bs):
    sampler = BatchSampler(SequentialSampler(SAMPLES), bs, drop_last=False)
    return TorchLoader(SAMPLES, batch_sampler=sampler, collate_fn=stacked)


def shuffled(bs):
    generator = torch.Generator().manual_seed(4)
    return TorchLoader(SAMPLES, bs, shuffle=True, generator=generator, collate_fn=stacked)


def drawn_by_weight(bs):
    generator = torch.Generator().manual_seed(4)
    chances = [1+i%3 for i in range(N)]
    sampler = WeightedRandomSampler(chances, 60, generator=generator)
    return TorchLoader(SAMPLES, bs, sampler=sampler, collate_fn=stacked)


def of_subset(bs):
    return TorchLoader(Subset(SAMPLES, range(5, 77)), bs, collate_fn=stacked)


class Stream(IterableDataset):
    "Yields samples one after the other"
    def __init__(self, announced=N): self.announced = announced
    def __iter__(self): return iter(SAMPLES)
    def __len__(self): return self.announced


def streamed(bs): return TorchLoader(Stream(), bs, collate_fn=stacked)
def stream_that_announces_less(bs): return TorchLoader(Stream(50), bs, collate_fn=stacked)
def stream_that_announces_more(bs): return TorchLoader(Stream(200), bs, collate_fn=stacked)


class OwnBatchSampler:
    "Draws batches in an order of its own, which changes with the epoch"
    def __init__(self, bs):
        self.batch_size = bs
        self.epoch = 0

    def __len__(self): return math.ceil(N/self.batch_size)

    def __iter__(self):
        self.epoch += 1
        order = [(i*7*self.epoch)%N for i in range(N)]
        for start in range(0, N, self.batch_size): yield order[start:start+self.batch_size]


class TooLongSampler(SequentialSampler):
    "Yields some samples twice, and announces none of that"
    def __iter__(self):
        return iter([*range(N), *range(60)])


def by_long_sampler(bs):
    return TorchLoader(SAMPLES, bs, sampler=TooLongSampler(SAMPLES), collate_fn=stacked)


def by_own_batch_sampler(bs):
    return TorchLoader(SAMPLES, batch_sampler=OwnBatchSampler(bs), collate_fn=stacked)


# Loaders of fastai

def of_fastai(bs): return FastaiLoader(SAMPLES, bs=bs)
def shuffled_by_fastai(bs): return FastaiLoader(SAMPLES, bs=bs, shuffle=True)
def dropping_by_fastai(bs): return FastaiLoader(SAMPLES, bs=bs, drop_last=True)


class Scales(ItemTransform):
    "Scales inputs"
    def encodes(self, batch):
        return batch[0]*.9, batch[1]


class CentersBatch(ItemTransform):
    "Takes the mean of the batch from the inputs"
    def encodes(self, batch):
        return batch[0]-batch[0].mean(0), batch[1]


def transformed(bs): return TfmdDL(SAMPLES, bs=bs, after_batch=Scales())
def centered_by_transform(bs): return TfmdDL(SAMPLES, bs=bs, after_batch=CentersBatch())


class OfSamples(FastaiLoader):
    "A loader of fastai"
    def __init__(self, bs): super().__init__(SAMPLES, bs=bs)


class Sorted(OfSamples):
    "Yields samples by the size of their first input"
    def get_idxs(self):
        return sorted(range(N), key=lambda i: SAMPLES[i][0][0].item())


class Oversampled(OfSamples):
    "Yields the first samples twice, and announces none of that"
    def get_idxs(self):
        return [*range(N), *range(60)]


class Undersampled(OfSamples):
    "Leaves out every third sample, and announces all"
    def get_idxs(self):
        return [i for i in range(N) if i%3]


class HalfInSecondEpoch(OfSamples):
    "Announces half the samples in its second epoch"
    n_begun = 0
    def before_iter(self):
        self.n_begun += 1
        if self.n_begun == 2: self.n = N//2
        super().before_iter()


class SkipsBad(OfSamples):
    "Leaves out samples that cannot be read"
    def create_batches(self, samps):
        good = [i for i in samps if i%10]
        return super().create_batches(good)


# Loaders of one's own

class Own:
    "Yields batches that it cuts out of two tensors"
    def __init__(self, bs):
        self.bs = bs
        self.inputs, self.targets = data(N)

    def __len__(self): return math.ceil(N/self.bs)

    def __iter__(self):
        batches = zip(self.inputs.split(self.bs), self.targets.split(self.bs))
        yield from batches


class ReusesBuffers(Own):
    "Writes each batch into the memory of the one before"
    def __iter__(self):
        buffers = self.inputs[:self.bs].clone(), self.targets[:self.bs].clone()
        for batch in super().__iter__():
            views = [buffer[:len(o)] for buffer, o in zip(buffers, batch)]
            for view, o in zip(views, batch): view.copy_(o)
            yield tuple(views)


class ReadsAhead(Own):
    "Holds the next batch while one is used"
    def __iter__(self):
        batches = super().__iter__()
        ahead = next(batches)
        for batch in batches:
            yield ahead
            ahead = batch
        yield ahead


class GoesOn(Own):
    "Takes 64 samples an epoch from a stream without an end"
    def __init__(self, bs):
        super().__init__(bs)
        self.start = 0

    def __len__(self): return 64//self.bs

    def __iter__(self):
        for _ in range(len(self)):
            rows = [(self.start+i)%96 for i in range(self.bs)]
            self.start += self.bs
            yield self.inputs[rows], self.targets[rows]


class EndsEarly(Own):
    "Ends after 64 samples, and announces all"
    def __iter__(self):
        return itertools.islice(super().__iter__(), 64//self.bs)


class GoesOnLonger(Own):
    "Announces 32 samples, and yields all"
    def __len__(self): return math.ceil(32/self.bs)


class Without(Own):
    "Does not say how large its batches are"
    def __init__(self, bs):
        super().__init__(bs)
        self.rows = bs
        del self.bs

    def __len__(self): return math.ceil(N/self.rows)

    def __iter__(self):
        batches = zip(self.inputs.split(self.rows), self.targets.split(self.rows))
        yield from batches


class WithoutLength:
    "Has no length"
    def __init__(self, bs): self.own = Own(bs)
    def __iter__(self): return iter(self.own)


class Wrapped(GetAttr):
    "Hands on what another loader yields, in float64"
    _default = 'dl'
    def __init__(self, bs): self.dl = Own(bs)
    def __len__(self): return len(self.dl)

    def __iter__(self):
        return ((x.double(), y.double()) for x, y in self.dl)


def of_batches(bs): return TorchLoader([*Own(bs)], None)
