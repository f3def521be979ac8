"What only a GPU can show: `pytest -m gpu`, on a machine with CUDA and timm; not run by default"
import gc, statistics, unittest.mock

import pytest

from common import *

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures('cuda')]
gpu = 'cuda'

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
    learn.dls.device = torch.device(gpu)
    learn.model.to(gpu)
    return learn

def image_learner(name, cbs=None, bs=256, pixels=128, loss_func=None):
    "Two batches of random images, and a model of timm without weights"
    import timm
    torch.manual_seed(0)
    samples = list(zip(torch.randn(2*bs, 3, pixels, pixels), torch.randint(10, (2*bs,))))
    dls = DataLoaders(DataLoader(samples, bs=bs), DataLoader(samples[:32], bs=16))
    model = timm.create_model(name, num_classes=10)
    return on_gpu(Learner(dls, model, loss_func or CrossEntropyLossFlat(), opt_func=SGD, cbs=cbs))

def fit_with(name, *cbs, **kwargs):
    "The Learner after an epoch, and the most memory that the allocator has held"
    learn = image_learner(name, [*cbs], **kwargs)
    forget()
    return fit(learn, 1, 1e-3),torch.cuda.max_memory_reserved()

def split(name, size, *cbs): return fit_with(name, GradientAccumulation(256, micro_batch_size=size), *cbs)

def assert_same_fit(a, b):
    "In float32: the order of sums depends on the memory that cuDNN finds"
    assert_same(losses(a), losses(b), 1e-3)
    assert (weights(a)-weights(b)).norm()/weights(b).norm() < 1e-4

def assert_moved(name, learn, **kwargs):
    assert (weights(learn)-weights(image_learner(name, **kwargs))).abs().max() > 1e-5

def memory_for(name, n):
    "Bytes that hold micro-batches of `n` samples, 32 <= n <= 64"
    small,large = (split(name, o)[1] for o in (32, 64))
    assert large > 1.1*small
    return small + (large-small)*(n-32)//32

# Micro-batches that fit

models = pytest.mark.parametrize('name', ['resnet50','convnext_tiny'])

@models
def test_the_largest_half_that_fits(name):
    "Where 40 samples fit: micro-batches of 32, within the limit, and the fit without a limit"
    free,_ = split(name, 32)
    assert_moved(name, free)
    limit_memory(limit := memory_for(name, 40))
    tight,peak = split(name, 'auto')
    assert tight.gradient_accumulation.micro_bs == 32 and peak <= limit
    assert_same_fit(tight, free)

@models
def test_without_the_callback_it_is_out_of_memory(name):
    "The check above can fail"
    limit_memory(memory_for(name, 40))
    with pytest.raises(torch.OutOfMemoryError, match='CUDA out of memory'): split(name, 256)

def test_another_program_takes_memory():
    "Micro-batches are halved in the second window, and the fit stays the same"
    class Another(Callback):
        run_valid = False
        def before_batch(self):
            if self.iter == 1: self.taken = torch.empty(taken, dtype=torch.uint8, device=gpu)
    free,_ = split('convnext_tiny', 16)
    holds_40,holds_64 = memory_for('convnext_tiny', 40),memory_for('convnext_tiny', 64)
    taken = (holds_64-holds_40)*2  # from room for 72 samples to room for 24
    limit_memory(holds_64+(holds_64-holds_40)//3)
    with pytest.warns(UserWarning, match='out of memory in training: from now on, micro-batches have'):
        tight,_ = split('convnext_tiny', 'auto', Another())
    assert tight.gradient_accumulation.micro_bs < 64 and len(losses(tight)) == 2
    assert_same_fit(tight, free)

# Recomputed blocks

@models
def test_as_few_blocks_as_fit(name):
    "With room for half of what all blocks save: some, within the limit, and the fit without a limit"
    (free,most),(_,least) = fit_with(name),fit_with(name, all_blocks())
    assert_moved(name, free)
    assert least < .8*most
    limit_memory(limit := (most+least)//2)
    tight,peak = fit_with(name, cb := ActivationCheckpointing())
    assert 0 < cb.level < len(cb.found) and peak <= limit
    assert_same_fit(tight, free)

class RunsOut(Callback):
    "Memory runs out in the first backward pass"
    done = False
    def fail(self, grad):
        self.done = True
        raise torch.OutOfMemoryError('CUDA out of memory')
    def after_pred(self):
        if self.training and not self.done: self.learn.pred.register_hook(self.fail)

def state_after(name, *cbs, amp=None, n_epoch=1, **kwargs):
    "Weights, buffers and the GPU's random numbers after a fit with dropout"
    learn = image_learner(name, [*([MixedPrecision(amp, init_scale=1.)] if amp else []), *cbs], pixels=64, **kwargs)
    learn.model = nn.Sequential(nn.Dropout(.3), learn.model, nn.Dropout(.3))
    set_seed(1)
    fit(learn, n_epoch, 1e-2)
    state = [*[o.cpu() for o in learn.model.state_dict().values()], torch.cuda.get_rng_state()]
    assert_moved(name, learn, pixels=64)  # seeds
    return state

@pytest.mark.parametrize('amp', [None,'fp16','bf16'])
@pytest.mark.parametrize('runs_out', [False,True])
def test_blocks_are_the_plain_fit_bit_for_bit(amp, runs_out):
    "Also where a pass with its draws is undone"
    cb,fails = ActivationCheckpointing(),RunsOut()
    plain,ours = state_after('convnext_atto', amp=amp),state_after('convnext_atto', *[fails]*runs_out, cb, amp=amp)
    assert (cb.level > 0) == runs_out == fails.done
    for a,b in zip(ours, plain, strict=True): assert torch.equal(a, b)

@pytest.mark.parametrize('name', ['resnet18','convnext_tiny'])
def test_all_blocks_are_the_plain_fit_in_less_memory(name):
    "Weights and buffers bit for bit; what is offloaded takes still less"
    def run(*cbs):
        forget()
        learn = fit(image_learner(name, [*cbs]), 1, 1e-3)
        return [o.cpu() for o in learn.model.state_dict().values()],torch.cuda.max_memory_allocated()
    (plain,most),(ours,less),(offloaded,least) = run(),run(all_blocks()),run(all_blocks(offload=True))
    for o in ours,offloaded:
        for a,b in zip(o, plain, strict=True): assert torch.equal(a, b)
    assert least < less < most

# Mixed precision

@pytest.mark.parametrize('amp', ['fp16','bf16'])
def test_mixed_precision(amp):
    "'auto' is the size that fits; all sizes run under autocast"
    seen = []
    class Room(Callback):
        def after_pred(self):
            if not self.training: return
            seen.append((len(self.pred), torch.is_autocast_enabled(gpu)))
            if len(self.pred) > 9: raise torch.OutOfMemoryError('CUDA out of memory')
    def run(size, *cbs):
        accum = GradientAccumulation(64, micro_batch_size=size)
        return state_after('convnext_atto', accum, *cbs, amp=amp, bs=32, n_epoch=2)
    auto,sized = run('auto', Room()),run(8)
    assert seen[:7] == [(n, True) for n in (32, 16, 8, 8, 8, 8, 8)] and all(o for _,o in seen)
    for a,b in zip(auto, sized, strict=True): assert_same(a.double(), b.double(), 1e-5)

# GradientCache

def correlations(pred, *targ):
    "The correlation matrix of the outputs should be the identity (Barlow Twins)"
    z = (pred-pred.mean(0))/(pred.std(0)+1e-3)
    return ((z.T@z/len(z)-torch.eye(z.shape[1], device=z.device))**2).sum()

class Splits(nn.Sequential):
    "Runs eight samples at a time, and keeps them all"
    def forward(self, x): return torch.cat([self[0](o) for o in x.split(8)])

@pytest.mark.parametrize('amp', ['fp16','bf16'])
def test_cache_in_mixed_precision(amp):
    "The same micro-batches without recomputation, bit for bit, with dropout"
    def run(wrap, *cbs):
        torch.manual_seed(0)
        m = wrap(nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(.5), nn.Linear(8, 4)))
        ds = list(zip(*[o.float() for o in data(64)]))
        dls = DataLoaders(DataLoader(ds, bs=32), DataLoader(ds[:8], bs=8))
        scaled = MixedPrecision(amp, init_scale=1.)
        learn = on_gpu(Learner(dls, m, lambda *o: correlations(o[0].float()), opt_func=SGD, cbs=[scaled, *cbs]))
        before = weights(learn)
        torch.manual_seed(2)
        fit(learn, 1, 1e-2)
        assert (weights(learn)-before).abs().max() > 1e-3
        return weights(learn).cpu()
    assert_same(run(noop, GradientCache(8)), run(Splits))

def deep_fit(*cbs):
    "Bytes and milliseconds of the second batch of 1024"
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(20)]
    start,end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    class Clock(Callback):
        run_valid = False
        def before_batch(self):
            torch.cuda.reset_peak_memory_stats()
            start.record()
        def after_batch(self):
            end.record()
            self.peak = torch.cuda.max_memory_allocated()
    dl = DataLoader([(o, 0) for o in torch.randn(2048, 16, 64)], bs=1024)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 8))
    learn = on_gpu(Learner(DataLoaders(dl, dl), model, correlations, opt_func=SGD, cbs=[Clock(), *cbs]))
    forget()
    before = torch.cuda.memory_allocated()
    with unittest.mock.patch.object(LossCheck, 'windows', 0): fit(learn, 1, 1e-3)
    torch.cuda.synchronize()
    return learn.clock.peak-before,start.elapsed_time(end)

def both(size): return deep_fit(GradientCache(size)),deep_fit(GradientAccumulation(micro_batch_size=size))

def test_memory_of_the_cache():
    ((cached,_),(accum,_)),(whole,_) = both(64),deep_fit()
    assert cached < 1.05*accum + 2**20 and cached < .25*whole, (cached, accum, whole)

def test_time_of_the_cache():
    "At most 1.40 of the time of accumulating the same micro-batches; the limit is 4/3"
    ratios = [cached/accum for (_,cached),(_,accum) in [both(256) for _ in range(31)][1:]]
    assert statistics.median(ratios) <= 1.4, ratios

def test_auto_of_the_cache():
    "Micro-batches as large as fit, with the loss over all of them"
    def loss_func(z, y):
        z = F.normalize(z, dim=1)
        return F.cross_entropy(z@z.T/.1, torch.arange(len(z), device=z.device).roll(1))
    def run(size): return fit_with('convnext_tiny', GradientCache(size), loss_func=loss_func)
    (free,small),(_,large) = run(32),run(64)
    limit_memory(limit := small+(large-small)//4)
    tight,peak = run('auto')
    assert tight.gradient_cache.micro_bs == 32 and peak <= limit
    assert_moved('convnext_tiny', free)
    assert_same_fit(tight, free)
