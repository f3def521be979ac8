"What only a GPU can show: `pytest -m gpu`, on a machine with CUDA and timm; not run by default"
import gc

import pytest

from common import *
from limited_memory import run_out_of_memory
from test_cache import barlow_twins

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures('cuda')]
gpu = torch.device('cuda')


@pytest.fixture(autouse=True)
def all_memory():
    "Each test begins with an empty cache and no limit, and leaves none"
    forget()
    yield
    torch.cuda.set_per_process_memory_fraction(1.)


def forget():
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def limit_memory(n_bytes):
    "What this process may take of the GPU from now on"
    forget()
    torch.cuda.set_per_process_memory_fraction(n_bytes/torch.cuda.get_device_properties(0).total_memory)


def on_gpu(learn):
    setattr(learn.dls, 'device', gpu)
    learn.model.to(gpu)
    return learn


def image_learner(name, *cbs, bs=256, pixels=128, loss_func=None):
    "Returns a Learner with two batches of random images, and a model of timm without weights"
    import timm
    torch.manual_seed(0)
    samples = list(zip(torch.randn(2*bs, 3, pixels, pixels), torch.randint(10, (2*bs,))))
    dls = DataLoaders(DataLoader(samples, bs=bs), DataLoader(samples[:32], bs=16))
    m = timm.create_model(name, num_classes=10)
    return on_gpu(Learner(dls, m, loss_func or CrossEntropyLossFlat(), opt_func=SGD, cbs=cbs))


def fit_with(name, *cbs, **kwargs):
    "Returns the Learner after an epoch, and the most memory that the allocator has held"
    learn = image_learner(name, *cbs, **kwargs)
    forget()
    fit(learn, 1, 1e-3)
    return learn, torch.cuda.max_memory_reserved()


def split(name, size, *cbs): return fit_with(name, GradientAccumulation(256, micro_batch_size=size), *cbs)


def assert_same_fit(a, b):
    "In float32: the order of sums depends on the memory that cuDNN finds"
    assert_same(losses(a), losses(b), 1e-3)
    difference = weights(a)-weights(b)
    assert difference.norm() < 1e-4*weights(b).norm()


def assert_moved(name, learn, **kwargs): assert_apart(learn, image_learner(name, **kwargs), 1e-5)


def memory_for(name, n):
    "Returns the bytes that hold micro-batches of `n` samples, 32 <= n <= 64"
    _, small = split(name, 32)
    _, large = split(name, 64)
    assert large > 1.1*small
    return small + (large-small)*(n-32)//32


# Micro-batches that fit

models = pytest.mark.parametrize('name', ['resnet50', 'convnext_tiny'])


@models
def test_the_largest_part_that_fits(name):
    "Where 40 samples fit: micro-batches of 29, within the limit, and the fit without a limit. 43 would be more than 40"
    free, _ = split(name, 29)
    assert_moved(name, free)
    limit = memory_for(name, 40)
    limit_memory(limit)
    tight, peak = split(name, 'auto')
    assert tight.gradient_accumulation.micro_bs == 29
    assert peak <= limit
    assert_same_fit(tight, free)


@models
def test_without_the_callback_it_is_out_of_memory(name):
    "The check above can fail"
    limit_memory(memory_for(name, 40))
    with pytest.raises(torch.OutOfMemoryError, match='CUDA out of memory'): split(name, 256)


def test_another_program_takes_memory():
    "Micro-batches get smaller in the second window, and the fit stays the same"
    class Another(Callback):
        run_valid = False

        def before_batch(self):
            if self.iter == 1: self.taken = torch.empty(taken, dtype=torch.uint8, device=gpu)
    free, _ = split('convnext_tiny', 16)
    holds_40 = memory_for('convnext_tiny', 40)
    holds_64 = memory_for('convnext_tiny', 64)
    taken = (holds_64-holds_40)*2  # from room for 72 samples to room for 24
    limit_memory(holds_64+(holds_64-holds_40)//3)
    tight, _ = split('convnext_tiny', 'auto', Another())
    assert tight.gradient_accumulation.micro_bs < 64
    assert len(losses(tight)) == 2
    assert_same_fit(tight, free)


# Recomputed blocks

@models
def test_as_few_blocks_as_fit(name):
    "With room for half of what all blocks save: some, within the limit, and the fit without a limit"
    free, most = fit_with(name)
    _, least = fit_with(name, all_blocks())
    assert_moved(name, free)
    assert least < .8*most
    limit = (most+least)//2
    limit_memory(limit)
    cb = ActivationCheckpointing()
    tight, peak = fit_with(name, cb)
    assert 0 < cb.n_recomputed < len(cb.found)
    assert peak <= limit
    assert_same_fit(tight, free)


class RunsOut(Callback):
    "Memory runs out in the first backward pass"
    run_valid = False

    def __init__(self): self.has_run_out = False

    def fail(self, grad):
        self.has_run_out = True
        run_out_of_memory()

    def after_pred(self):
        if not self.has_run_out: self.learn.pred.register_hook(self.fail)


def state_after(*cbs, amp=None, n_epoch=1, bs=256):
    "Returns weights, buffers and the GPU's random numbers after a fit with dropout"
    precision = [MixedPrecision(amp, init_scale=1.)] if amp else []
    learn = image_learner('convnext_atto', *precision, *cbs, pixels=64, bs=bs)
    learn.model = nn.Sequential(nn.Dropout(.3), learn.model, nn.Dropout(.3))
    set_seed(1)
    fit(learn, n_epoch, 1e-2)
    state = [*[o.cpu() for o in learn.model.state_dict().values()], torch.cuda.get_rng_state()]
    assert_moved('convnext_atto', learn, pixels=64)  # seeds
    return state


def assert_equal_states(a, b):
    for value, other in zip(a, b, strict=True): assert torch.equal(value, other)


@pytest.mark.parametrize('amp', [None, 'fp16', 'bf16'])
@pytest.mark.parametrize('fails', [[], [RunsOut]])
def test_blocks_are_the_plain_fit_bit_for_bit(amp, fails):
    "Also where a pass with its draws is undone"
    cb = ActivationCheckpointing()
    ours = state_after(*[cls() for cls in fails], cb, amp=amp)
    assert cb.n_recomputed == len(fails)
    assert_equal_states(ours, state_after(amp=amp))


@pytest.mark.parametrize('name', ['resnet18', 'convnext_tiny'])
def test_all_blocks_are_the_plain_fit_in_less_memory(name):
    "Weights and buffers bit for bit; what is offloaded takes still less"
    states = []
    peaks = []
    for cbs in ([], [all_blocks()], [all_blocks(offload=True)]):
        forget()
        learn = fit(image_learner(name, *cbs), 1, 1e-3)
        states.append([o.cpu() for o in learn.model.state_dict().values()])
        peaks.append(torch.cuda.max_memory_allocated())
    plain, recomputed, offloaded = states
    assert_equal_states(recomputed, plain)
    assert_equal_states(offloaded, plain)
    assert peaks == sorted(set(peaks), reverse=True)


# Mixed precision

@pytest.mark.parametrize('amp', ['fp16', 'bf16'])
def test_mixed_precision(amp):
    "'auto' is the size that fits; all sizes run under autocast"
    seen = []

    class Room(Callback):
        run_valid = False

        def after_pred(self):
            seen.append((len(self.pred), torch.is_autocast_enabled('cuda')))
            if len(self.pred) > 9: run_out_of_memory()

    def run(size, *cbs):
        return state_after(GradientAccumulation(64, micro_batch_size=size), *cbs, amp=amp, bs=32, n_epoch=2)
    auto = run('auto', Room())
    sized = run(8)
    sizes, are_mixed = zip(*seen)
    assert sizes[:7] == (32, 16, 11, 8, 8, 8, 8)
    assert all(are_mixed)
    for a, b in zip(auto, sized, strict=True): assert_same(a.double(), b.double(), 1e-5)


# GradientCache

class Peak(Callback):
    "The most bytes in the last batch"
    run_valid = False

    def before_batch(self): torch.cuda.reset_peak_memory_stats()
    def after_batch(self): self.bytes = torch.cuda.max_memory_allocated()


def bytes_of_fit(*cbs):
    "Returns the bytes of the second batch of 1024"
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(20)]
    m = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 8))
    dl = DataLoader([(o, 0) for o in torch.randn(2048, 16, 64)], bs=1024)
    learn = on_gpu(Learner(DataLoaders(dl, dl), m, barlow_twins, opt_func=SGD, cbs=[Peak(), *cbs]))
    forget()
    before = torch.cuda.memory_allocated()
    fit(learn, 1, 1e-3)
    return learn.peak.bytes-before


def test_memory_of_the_cache(monkeypatch):
    monkeypatch.setattr(LossCheck, 'n_windows', 0)  # it would take memory in the first windows
    cached = bytes_of_fit(GradientCache(64))
    accumulated = bytes_of_fit(GradientAccumulation(micro_batch_size=64))
    whole = bytes_of_fit()
    assert cached < 1.05*accumulated + 2**20
    assert cached < .25*whole
