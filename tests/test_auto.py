"micro_batch_size='auto': as many samples at a time as fit in memory (memory/auto.py)"
import multiprocessing
import sys

import pytest
from fastai.callback.mixup import MixUp

from common import *
from limited_memory import *

FLOAT32 = 5e-6  # rounding of float32 weights


# The fit

def shuffled_learner(*cbs):
    "Returns a float32 Learner with BatchNorm, dropout and shuffled data; it draws the same random numbers each time"
    set_seed(0)
    inputs, targets = data(128)
    samples = list(zip(inputs.float(), targets.float()))
    dls = DataLoaders(DataLoader(samples, bs=32, shuffle=True), DataLoader(samples[:8], bs=8))
    m = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(.3), nn.Tanh(), nn.Linear(8, 1))
    return Learner(dls, m, MSELossFlat(), opt_func=Adam, cbs=cbs)


def state_of(learn):
    "Returns weights, buffers, losses and rates, and what all random generators draw next"
    drawn = [torch.rand(1).item(), np.random.rand(), random.random()]
    drawn.append(learn.dls.train.rng.random())
    buffers = [o.double() for o in learn.model.buffers()]
    return [weights(learn), *buffers, losses(learn), learn.recorder.lrs, drawn]


@pytest.mark.filterwarnings('ignore:after_pred, after_loss, before_backward of CpuMixedPrecision is called once per')
@pytest.mark.parametrize('limit,size,mixes,amp', [
    (32, 32, False, None),
    (31, 16, False, 'bf16'),
    (13, 8, True, None),
    (9, 8, True, 'fp16'),
    pytest.param(1, 1, False, None, marks=pytest.mark.long)])
def test_auto_is_the_fit_with_the_size_given(limit, size, mixes, amp):
    "Bit for bit, also with mixed precision, BatchNorm and MixUp; but these need more than one sample"
    is_mixed = []
    def note_precision(*args): is_mixed.append(torch.is_autocast_enabled('cpu'))

    def run(micro_batch_size):
        accum = GradientAccumulation(32, micro_batch_size=micro_batch_size)
        learn = shuffled_learner(accum)
        if size == 1: learn.model[1] = nn.Identity()
        if mixes: learn.add_cb(MixUp())
        if amp: learn.add_cb(CpuMixedPrecision(amp, init_scale=2.**8))
        learn.model.register_forward_pre_hook(note_precision)
        memory = MemoryLimit(learn.model[0], limit)
        fit(learn, 2, .01, method='fit_one_cycle')
        assert accum.micro_bs == size
        assert max(memory.in_training[-6:]) == size
        return state_of(learn)

    auto = run('auto')
    given = run(size)
    assert len(is_mixed) > 16
    assert set(is_mixed) == {amp is not None}
    assert not torch.is_autocast_enabled('cpu')
    for a, b in zip(auto, given, strict=True): assert_same(a, b)


def test_an_interrupted_search_goes_on():
    "The pass that fits is a training pass, so that nothing is tried twice; a further fit tries nothing"
    accum = split_auto(64)
    learn = shuffled_learner(accum, Fault(KeyboardInterrupt, 'after_pred', 1, 0))
    memory = MemoryLimit(learn.model[0], 9)
    with pytest.raises(KeyboardInterrupt): fit(learn, 1)
    fit(learn, 1)
    of_fit = [8 for _ in range(16)]
    assert memory.in_training == [32, 16, 8, *of_fit]
    fit(learn, 1)
    assert memory.in_training[19:] == of_fit
    assert accum.micro_bs == 8


@pytest.mark.parametrize('cb', [split_auto(), GradientCache('auto')])
def test_samples_of_two_rows_are_halved_at_once(cb):
    "Batches of 8 samples have 16 rows. After memory ran out once, the model sees 8"
    def double(self):
        self.learn.xb = (self.x.repeat_interleave(2, 0),)
        self.learn.yb = (self.y.repeat_interleave(2, 0),)

    learn = make_learner(8, n=32, cbs=[cb, Callback(before_batch=double), OutOfMemory('after_pred', 1)])
    seen = MemoryLimit(learn.model[0]).in_training
    fit(learn, 1)
    assert_moved(learn)
    assert seen[0] == 16
    assert set(seen[1:]) == {8}


# Inputs without tensors

class OfTexts(nn.Module):
    "Takes a list of strings, of which it can hold `most` in training"
    def __init__(self, most):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(1, 1).double()
        self.most = most

    def forward(self, texts):
        if self.training and len(texts) > self.most: run_out_of_memory()
        lengths = [[len(o)] for o in texts]
        return self.layer(torch.tensor(lengths, dtype=torch.float64))


def fit_texts(most, *cbs):
    texts = ['a' if i%2 else 'abc' for i in range(32)]
    _, targets = data(32)
    dl = DataLoader(list(zip(texts, targets)), bs=16)
    return fit(Learner(DataLoaders(dl, dl), OfTexts(most), mse, opt_func=SGD, cbs=cbs), 1, .01)


def test_inputs_without_tensors_are_split_by_samples():
    plain = fit_texts(16)
    assert_apart(plain, OfTexts(0))
    assert_same_weights(fit_texts(5, split_auto()), plain, ROUNDING)


def test_if_not_one_sample_fits_that_is_an_error():
    with pytest.raises(RuntimeError, match='there is no way left to use less'): fit_texts(0, split_auto())


# A real allocator

@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='RLIMIT_AS')
def test_the_allocator_itself_fails():
    "512 samples take some 330 MB: with 50 MB to spare, a half of them or less fits, and the fit is the same"
    # A new process: a forked one has the memory that earlier tests have left
    process = multiprocessing.get_context('spawn').Process(target=fit_in_50_mb)
    process.start()
    process.join()
    assert process.exitcode == 0
    n, ours = torch.load('ours.pt')
    assert 8 <= n <= 256
    plain = fit(large_learner(), 1)
    assert_apart(plain, large_learner())
    assert_same(ours, weights(plain), FLOAT32)


def large_learner(*cbs):
    torch.manual_seed(0)
    layers = [nn.Tanh() for _ in range(80)]
    m = nn.Sequential(nn.Linear(100, 2000), *layers, nn.Linear(2000, 1))
    samples = list(zip(torch.randn(512, 100), torch.randn(512, 1)))
    dl = DataLoader(samples, bs=512)
    return Learner(DataLoaders(dl, dl), m, MSELossFlat(), opt_func=SGD, cbs=cbs)


def fit_in_50_mb():
    import resource
    accum = split_auto()
    learn = large_learner(accum)
    n_pages = int(Path('/proc/self/statm').read_text().split()[0])
    most = n_pages*resource.getpagesize() + 50*2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    fit(learn, 1)
    torch.save([accum.micro_bs, weights(learn)], 'ours.pt')
