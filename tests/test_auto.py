"micro_batch_size='auto': as many samples at a time as fit in memory (memory/auto.py)"
import sys

import pytest
from fastai.callback.mixup import MixUp
from hypothesis import given
from hypothesis import strategies as st

from common import *
from fastxtend_accum.memory.auto import Halving
from limited_memory import MemoryLimit, run_out_of_memory

FLOAT32 = 5e-6  # rounding of float32 weights, and of the Recorder


def split_auto(accum_bs=None): return GradientAccumulation(accum_bs, micro_batch_size='auto')


each_auto = pytest.mark.parametrize('saver', [split_auto, partial(GradientCache, 'auto')])


# The size

@draws
@given(samples=st.integers(1, 300), elements_per_sample=st.fractions(1, 50))
def test_halving_takes_half_of_any_batch_until_one_sample_is_left(samples, elements_per_sample):
    "A batch of as many samples and elements then runs in that size, exactly"
    batch = SimpleNamespace(samples=samples)
    loop = SimpleNamespace(batches=SimpleNamespace(current=batch))
    elements = math.ceil(samples*elements_per_sample)
    halving = Halving()
    expected = samples
    assert halving.size_for(samples, elements) == samples
    while expected > 1:
        expected = math.ceil(expected/2)
        assert halving.reduce_memory(loop, elements) == f'micro-batches have {expected} samples'
        assert halving.size_for(samples, elements) == expected
    assert halving.reduce_memory(loop, elements) is None


def test_batches_of_other_sizes_run_as_many_elements_at_a_time():
    "A batch of 32 samples has 320 elements, of which 160 fit"
    halving = Halving()
    halving.max_elements = 160
    assert halving.size_for(32, 320) == 16
    assert halving.size_for(16, 160) == 16
    assert halving.size_for(64, 640) == 16
    assert halving.size_for(32, 640) == 8
    assert halving.size_for(32, 64000) == 1
    halving.reset()
    assert halving.size_for(32, 640) == 32


# The fit

def shuffled_learner(*cbs):
    "Returns a float32 Learner with BatchNorm, dropout and shuffled data; it draws the same random numbers each time"
    set_seed(0)
    inputs, targets = data(128)
    samples = list(zip(inputs.float(), targets.float()))
    dls = DataLoaders(DataLoader(samples, bs=32, shuffle=True), DataLoader(samples[:8], bs=8))
    m = nn.Sequential(
        nn.Linear(5, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(.3),
        nn.Tanh(),
        nn.Dropout(.3),
        nn.Linear(8, 1))
    return Learner(dls, m, MSELossFlat(), opt_func=Adam, cbs=cbs)


def state_of(learn):
    "Returns weights, buffers, losses and rates, and what all random generators draw next"
    drawn = [torch.rand(1).item(), np.random.rand(), random.random()]
    drawn.append(learn.dls.train.rng.random())
    buffers = [o.double() for o in learn.model.buffers()]
    return [weights(learn), *buffers, losses(learn), learn.recorder.lrs, drawn]


@pytest.mark.thin(7)
@pytest.mark.filterwarnings('ignore:after_pred, after_loss, before_backward of CpuMixedPrecision is called once per')
@pytest.mark.parametrize('amp', [None, 'bf16', 'fp16'])
@pytest.mark.parametrize('mixes', [False, True])
@pytest.mark.parametrize('limit,size', [
    (100, 32),
    (32, 32),
    (31, 16),
    (9, 8),
    (1, 1)])
def test_auto_is_the_fit_with_the_size_given(limit, size, mixes, amp):
    "Bit for bit, also with mixed precision, BatchNorm and MixUp; but these need more than one sample"
    def run(micro_batch_size):
        accum = GradientAccumulation(32, micro_batch_size=micro_batch_size)
        learn = shuffled_learner(accum)
        if size == 1: learn.model[1] = nn.Identity()
        if mixes and size > 1: learn.add_cb(MixUp())
        if amp: learn.add_cb(CpuMixedPrecision(amp, init_scale=2.**8))
        learn.model.register_forward_pre_hook(note_precision)
        memory = MemoryLimit(learn.model[0], limit)
        fit(learn, 2, .01, method='fit_one_cycle')
        assert accum.micro_bs == size
        assert memory.in_training[-1] == size
        return state_of(learn)

    def note_precision(*args): is_mixed.append(torch.is_autocast_enabled('cpu'))
    is_mixed = []
    auto = run('auto')
    given = run(size)
    assert len(is_mixed) > 16
    assert set(is_mixed) == {amp is not None}
    assert not torch.is_autocast_enabled('cpu')
    for a, b in zip(auto, given, strict=True): assert_same(a, b)


def test_an_interrupted_search_goes_on(recwarn):
    "The pass that fits is a training pass, so that nothing is tried twice, nor warned of"
    accum = split_auto(64)
    learn = shuffled_learner(accum, Fault(KeyboardInterrupt, 'after_pred', 1, 0))
    memory = MemoryLimit(learn.model[0], 9)
    with pytest.raises(KeyboardInterrupt): fit(learn, 1)
    fit(learn, 1)
    of_fit = [8 for _ in range(16)]
    assert memory.in_training == [32, 16, 8, *of_fit]
    assert accum.micro_bs == 8
    assert not any('out of memory in training' in str(o.message) for o in recwarn)


@each_auto
def test_the_logger_gets_what_is_found(saver, capsys):
    m = model()
    MemoryLimit(m[0], 9)
    lines = []

    def log(o):
        if isinstance(o, str): lines.append(o)
    learn = make_learner(50, m=m, cbs=saver())
    learn.logger = log
    with learn.no_bar(): learn.fit(2)
    line, = lines
    assert 'each batch of 50 is split' in line
    assert capsys.readouterr().out == ''


def test_it_looks_again_if_more_weights_are_trained():
    "With a frozen body, more samples fit; after `unfreeze` fewer do. A further fit tries nothing"
    accum = split_auto(64)
    learn = shuffled_learner(accum)

    def splitter(m): return [params(m[0]), params(m[-1])]
    learn.splitter = splitter
    memory = MemoryLimit(learn.model[0])
    found = []

    def limit(self):
        is_trained = self.model[0].weight.requires_grad
        memory.samples = 9 if is_trained else 32

    def note(self): found.append(accum.micro_bs)
    learn.add_cb(Callback(before_batch=limit, after_train=note))
    with quiet(learn): learn.fine_tune(2)
    assert found == [32, 8, 8]
    n_passes = len(memory.in_training)
    fit(learn, 1)
    assert found == [32, 8, 8, 8]
    assert len(memory.in_training) == n_passes+128//8


# Batches whose samples differ in size

class MeanOfLayer(nn.Module):
    "Takes sequences of any length, of whose numbers it can hold `most` in training"
    def __init__(self, most):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(1, 1).double()
        self.most = most

    def forward(self, x):
        if self.training and x.numel() > self.most: run_out_of_memory()
        return self.layer(x[..., None]).mean(1)


def sequences(length):
    "Returns a batch of 32 sequences, and their targets"
    inputs = torch.randn(32, length, dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True)


def test_texts_of_many_lengths():
    "Of 320 numbers that fit, there are 32 samples of 10, 16 of 20, 8 of 40, and no size is tried twice"
    batches = [sequences(o) for o in (10, 10, 20, 20, 40, 40, 15, 10)]

    def run(most, *cbs):
        dl = torch.utils.data.DataLoader(batches, batch_size=None)
        dl.bs = 32
        learn = Learner(DataLoaders(dl, dl), MeanOfLayer(most), mse, opt_func=SGD, cbs=cbs)
        memory = MemoryLimit(learn.model)
        return fit(learn, 1), memory.in_training
    plain, _ = run(math.inf)
    ours, sizes = run(320, split_auto())
    assert_apart(plain, MeanOfLayer(0))
    assert_same(weights(ours), weights(plain), ROUNDING)
    of_20 = [32, 16, 16, 16, 16]  # the first batch is too large, and its halves fit
    of_40 = [8, 8, 8, 8, 8, 8, 8, 8]
    assert sizes == [32, 32, *of_20, *of_40, 16, 16, 32]


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


def of_inputs(inputs, m, loss_func, *cbs):
    "A Learner of any 32 inputs"
    _, targets = data(32)
    samples = list(zip(inputs, targets))
    dl = DataLoader(samples, bs=16)
    return Learner(DataLoaders(dl, dl), m, loss_func, opt_func=SGD, cbs=cbs)


texts = ['a' if i%2 else 'abc' for i in range(32)]


def test_inputs_without_tensors_are_split_by_samples():
    def run(most, *cbs): return fit(of_inputs(texts, OfTexts(most), mse, *cbs), 1, .01)
    plain = run(16)
    assert_apart(plain, OfTexts(0))
    ours = run(5, split_auto())
    assert_same(weights(ours), weights(plain), ROUNDING)


@each_auto
def test_inputs_without_tensors_of_which_not_one_fits_are_an_error(saver):
    with pytest.raises((RuntimeError, ValueError), match='single sample|cannot split'):
        fit(of_inputs(texts, OfTexts(0), mse, saver()), 1)


# Validation

class Summed(nn.Module):
    "Returns a number in validation, and then has no memory for more than 8 samples"
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 1).double()
        self.n_calls = 0

    def forward(self, x):
        if not isinstance(x, Tensor):
            lengths = torch.tensor([[len(o)] for o in x])
            x = lengths.expand(-1, 5).double()
        if self.training: return self.layer(x)
        self.n_calls += 1
        assert self.n_calls < 20, 'it does not end'
        if len(x) > 8: run_out_of_memory()
        return self.layer(x).sum()


@pytest.mark.filterwarnings('ignore:validation batches are not split')
@pytest.mark.parametrize('inputs', [data(32)[0], texts])
def test_validation_that_cannot_be_split_ends_with_the_error_of_the_whole_batch(inputs):
    "Its outputs cannot be joined, or no tensor shows the samples"
    def loss(pred, targ): return (pred-targ).pow(2).mean().float()
    learn = of_inputs(inputs, Summed(), loss, split_auto())
    with pytest.raises(torch.OutOfMemoryError): fit(learn, 1)
    assert learn.model.n_calls > 0


# Without it

@pytest.mark.parametrize('cb', [GradientAccumulation(32), GradientAccumulationSchedule(16, 32)])
def test_without_auto_a_warning_names_it(cb):
    learn = make_learner(16, loss_func=run_out_of_memory, cbs=cb)
    with pytest.warns(match="out of memory with batches of 16 samples: .* micro_batch_size='auto' or"):
        with pytest.raises(torch.OutOfMemoryError): fit(learn, 1)


# A real allocator

@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='RLIMIT_AS')
def test_the_allocator_itself_fails():
    "512 samples take some 330 MB: with 50 MB to spare, a half of them or less fits, and the fit is the same"
    assert forked(fit_in_50_mb) == 0
    n, ours = torch.load('ours.pt')
    assert 8 <= n <= 256
    plain = fit(large_learner(), 1, .1)
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
    fit(learn, 1, .1)
    torch.save([accum.micro_bs, weights(learn)], 'ours.pt')
