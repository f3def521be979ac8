"Loaders as other people write them, each in a few lines"
from functools import cache

from torch.utils.data import DataLoader as TorchLoader
from fastai.data.core import TfmdDL
from fastai.data.load import DataLoader as FastaiLoader

from situations import *

SAMPLES = samples(N)


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


def with_names(samples):
    "Puts the names of samples between inputs and targets"
    inputs, targets = stacked(samples)
    return inputs, [f'sample {float(o):.3f}' for o in targets], targets


class IgnoresNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model()

    def forward(self, inputs, names): return self.model(inputs)


def with_setting(samples):
    "Puts a number for the whole batch beside the inputs"
    inputs, targets = stacked(samples)
    return inputs, torch.tensor(.5), targets


class UsesSetting(IgnoresNames):
    def forward(self, inputs, setting): return self.model(inputs)*setting


# Loaders of PyTorch

def center(samples):
    "Takes the mean of the batch from the inputs"
    inputs, targets = stacked(samples)
    return inputs-inputs.mean(0), targets


def centered_by_collate(bs): return TorchLoader(SAMPLES, bs, collate_fn=center)


# Loaders of fastai

class CentersBatch(ItemTransform):
    "Takes the mean of the batch from the inputs"
    def encodes(self, batch):
        return batch[0]-batch[0].mean(0), batch[1]


def centered_by_transform(bs): return TfmdDL(SAMPLES, bs=bs, after_batch=CentersBatch())


class OfSamples(FastaiLoader):
    "A loader of fastai"
    def __init__(self, bs): super().__init__(SAMPLES, bs=bs)


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
