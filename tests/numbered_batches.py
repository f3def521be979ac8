"""Loader batches by their number in an epoch, a digit. A window is a text of such digits: '012' has the first three.

Who cancels some of them, which ones have run, and what their windows make of the weights"""
from common import *

BS = 8  # samples in a loader batch
BEFORE_THE_PASS = ['before_batch', 'after_pred', 'after_loss', 'before_backward']


def number_of(learn):
    "Returns the number of the loader batch that `learn` holds, by its first sample"
    samples = learn.dls.train.dataset
    first_inputs = torch.stack([inputs for inputs, _ in samples[::BS]])
    is_this = (first_inputs == learn.x[0]).all(1)
    return str(is_this.nonzero().item())


class CancelsBatches(Callback):
    "Cancels the loader batches of these numbers in `event`, in all epochs or in one"
    run_valid = False
    exc = CancelBatchException

    def __init__(self, numbers, event='before_batch', order=5, epoch=None):
        self.numbers = numbers
        self.order = order
        self.in_epoch = epoch
        setattr(self, event, self.cancel)

    def cancel(self):
        if self.in_epoch not in (None, self.epoch): return
        if number_of(self.learn) in self.numbers: raise self.exc


class NotesBatches(Callback):
    "Notes the numbers of the loader batches that have run, by epoch"
    order = -30

    def before_fit(self): self.epochs = []
    def before_train(self): self.epochs.append('')
    def after_backward(self): self.epochs[-1] += number_of(self.learn)


def list_of_batches(sizes):
    "Returns batches of these sizes, as of a loader that states none"
    inputs, targets = data(sum(sizes))
    return list(zip(inputs.split(sizes), targets.split(sizes)))


def samples_of(window, n):
    "Returns the samples of the loader batches in a window, of `n` samples in an epoch"
    res = []
    for number in window:
        start = int(number)*BS
        res += range(start, min(start+BS, n))
    return res


def assert_trained_on(learn, n, windows):
    "Asserts the weights of plain PyTorch after a step on each of the windows, which are a text with blanks between"
    steps = [(samples_of(window, n), 0) for window in windows.split()]
    assert_steps(learn, steps, n)


def accumulated_learner(n, cbs=(), k=4, **kwargs):
    "Returns a Learner with windows of `k` loader batches"
    accum = GradientAccumulation(k*BS, verbose=False, **kwargs)
    return make_learner(BS, n=n, cbs=[*cbs, accum])
