"""Loader batches by their number in an epoch: which ones run, which ones are cancelled, and a plain Learner whose batches
are windows of them"""
from torch.utils.data import DataLoader as TorchDataLoader

from common import *

BS = 8  # samples in a loader batch


def number_of(learn):
    "Returns which loader batch of the epoch `learn` holds, by its first sample"
    samples = learn.dls.train.dataset
    first_inputs = torch.stack([inputs for inputs, _ in samples[::BS]])
    is_this = (first_inputs == learn.x[0]).all(1)
    return is_this.nonzero().item()


class CancelsBatches(Callback):
    "Cancels the loader batches of these numbers in `event`, in all epochs or in one"
    run_valid = False

    def __init__(self, numbers, event='before_batch', order=5, epoch=None):
        self.numbers = numbers
        self.order = order
        self.in_epoch = epoch
        setattr(self, event, self.cancel)

    def cancel(self):
        if self.in_epoch not in (None, self.epoch): return
        if number_of(self.learn) in self.numbers: raise CancelBatchException


class NotesBatches(Callback):
    "Notes the numbers of the loader batches that have run, by epoch"
    run_valid = False
    order = -30

    def before_fit(self): self.epochs = []
    def before_train(self): self.epochs.append([])
    def after_backward(self): self.epochs[-1].append(number_of(self.learn))


def samples_of(numbers, n):
    "Returns the samples of loader batches, of `n` samples in an epoch"
    res = []
    for number in numbers:
        start = number*BS
        res += range(start, min(start+BS, n))
    return res


def steps_of(windows, n):
    "Returns steps for `reference`, each over the loader batches of a window"
    return [(samples_of(numbers, n), 0) for numbers in windows]


class WindowSampler:
    "A batch sampler that yields the windows of each epoch as batches"
    def __init__(self, epochs):
        self.epochs = epochs
        self.learn = None

    def __len__(self): return len(self.epochs[self.learn.epoch])
    def __iter__(self): return iter(self.epochs[self.learn.epoch])


def learner_of_windows(epochs, n, cbs=None, **kwargs):
    "Returns a plain Learner whose batches are windows: of each epoch a list of windows, which are lists of numbers"
    learn = make_learner(BS, n=n, cbs=cbs, **kwargs)
    sampler = WindowSampler([[samples_of(numbers, n) for numbers in windows] for windows in epochs])
    sampler.learn = learn
    train = TorchDataLoader(learn.dls.train.dataset, batch_sampler=sampler)
    learn.dls = DataLoaders(train, learn.dls.valid)
    return learn


def accumulated_learner(n, cbs=(), size=4*BS, opt_func=SGD, **kwargs):
    "Returns a Learner with loader batches of 8 samples, in windows of four"
    accum = GradientAccumulation(size, verbose=False, **kwargs)
    return make_learner(BS, n=n, cbs=[*cbs, accum], opt_func=opt_func)
