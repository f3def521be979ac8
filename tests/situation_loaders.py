"Loaders as other people write them, each in a few lines"
from functools import cache

from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import WeightedRandomSampler
from fastai.data.core import TfmdDL
from fastai.data.load import DataLoader as FastaiLoader

from situations import *

SAMPLES = list(zip(*data(N)))


class OfForm:
    "A loader of PyTorch whose batches have another form, and a model that takes them"
    def __init__(self, collate, make_model):
        self.collate = collate
        self.make_model = make_model

    def learner(self, bs, cbs):
        train = TorchLoader(SAMPLES, bs, collate_fn=self.collate)
        valid = TorchLoader(SAMPLES[:20], 16, collate_fn=self.collate)
        dls = DataLoaders(train, valid)
        return Learner(dls, self.make_model(), loss_func=mse, opt_func=SGD, cbs=cbs)


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


# Loaders of PyTorch

def center(samples):
    "Takes the mean of the batch from the inputs"
    inputs, targets = stacked(samples)
    return inputs-inputs.mean(0), targets


def centered_by_collate(bs): return TorchLoader(SAMPLES, bs, collate_fn=center)


def drawn_by_weight(bs):
    generator = torch.Generator().manual_seed(4)
    chances = [1+i%3 for i in range(N)]
    sampler = WeightedRandomSampler(chances, 60, generator=generator)
    return TorchLoader(SAMPLES, bs, sampler=sampler, collate_fn=stacked)


# Loaders of fastai

def shuffled_by_fastai(bs): return FastaiLoader(SAMPLES, bs=bs, shuffle=True)


class CentersBatch(ItemTransform):
    "Takes the mean of the batch from the inputs"
    def encodes(self, batch):
        return batch[0]-batch[0].mean(0), batch[1]


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


def of_batches(bs): return TorchLoader([*Own(bs)], None)
