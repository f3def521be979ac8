"What only a GPU can show: `pytest -m gpu`, on a machine with CUDA and timm; not run by default"
import gc, statistics
import pytest

from common import *
from fastxtend_accum.ways.cache import in_pieces
from fastxtend_accum.ways.checkpointing import BlockState
from fastxtend_accum.window.gradients import add_in_float32, average_gradients
from test_gradient_cache import TwoOutputs, correlations, deep
from test_memory import Limited, limited, state

pytestmark = pytest.mark.gpu

@pytest.fixture(scope='module', autouse=True)
def cuda():
    "Without a GPU there is one message, and nothing that looks like success"
    if not torch.cuda.is_available(): pytest.exit('pytest -m gpu needs a GPU, and torch.cuda.is_available() is False here', returncode=1)
    torch.backends.cudnn.deterministic,torch.backends.cudnn.benchmark = True,False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False

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

def on(device, learn):
    learn.dls.device = torch.device(device)
    learn.model.to(device)
    return learn

# A micro-batch size that fits

def image_learner(name, cbs, device='cuda', bs=256, pixels=128):
    "Two batches of random images, and a model of timm without weights"
    timm = pytest.importorskip('timm')
    torch.manual_seed(0)
    samples = list(zip(torch.randn(2*bs, 3, pixels, pixels), torch.randint(10, (2*bs,))))
    dls = DataLoaders(DataLoader(samples, bs=bs), DataLoader(samples[:32], bs=16))
    return on(device, Learner(dls, timm.create_model(name, num_classes=10), CrossEntropyLossFlat(), opt_func=SGD, cbs=cbs))

def fit_with(name, *cbs, device='cuda', **kwargs):
    "The Learner after an epoch, and the most memory that the allocator has held"
    learn = image_learner(name, [*cbs], device, **kwargs)
    forget()
    return fit(learn, 1, 1e-3),torch.cuda.max_memory_reserved()

def fit_images(name, micro, device='cuda', cbs=(), **kwargs):
    return fit_with(name, GradientAccumulation(256, micro_batch_size=micro), *cbs, device=device, **kwargs)

def assert_same_fit(a, b):
    "As equal as float32 on a GPU can be: the order of its sums depends on the memory that cuDNN finds"
    assert_same(losses(a), losses(b), 1e-3)
    assert ((weights(a)-weights(b)).norm()/weights(b).norm()) < 1e-4

def memory_for(name, n):
    "Bytes that hold micro-batches of `n` samples, 32 <= n <= 64"
    small,large = (fit_images(name, o)[1] for o in (32, 64))
    assert large > 1.1*small
    return small + (large-small)*(n-32)//32

models = 'resnet50','convnext_tiny'

@pytest.mark.parametrize('name', models)
def test_the_largest_half_that_fits(name):
    "A batch of 256 where 40 samples fit: micro-batches of 32, within the limit, and the fit without a limit"
    free,_ = fit_images(name, 32)
    moved = weights(free)-weights(image_learner(name, None))
    assert moved.abs().max() > 1e-5
    limit = memory_for(name, 40)
    limit_memory(limit)
    tight,peak = fit_images(name, 'auto')
    assert tight.gradient_accumulation.micro_bs == 32 and peak <= limit
    assert_same_fit(tight, free)

@pytest.mark.parametrize('name', models)
def test_without_the_callback_it_is_out_of_memory(name):
    "The check above can fail"
    limit_memory(memory_for(name, 40))
    with pytest.raises(torch.OutOfMemoryError, match='CUDA out of memory'): fit_images(name, 256)

def test_another_program_takes_memory():
    "Micro-batches are halved in the second window, and the fit stays the same"
    class Another(Callback):
        run_valid = False
        def before_batch(self):
            if self.epoch == 0 and self.gradient_accumulation.opt_steps == 1 and not hasattr(self, 'taken'):
                self.taken = torch.empty(taken, dtype=torch.uint8, device='cuda')
    free,_ = fit_images('convnext_tiny', 16)
    holds_40,holds_64 = memory_for('convnext_tiny', 40),memory_for('convnext_tiny', 64)
    taken = (holds_64-holds_40)*2  # from room for 72 samples to room for 24
    limit_memory(holds_64+(holds_64-holds_40)//3)
    with pytest.warns(UserWarning, match='out of memory in training: from now on, micro-batches have'): tight,_ = fit_images('convnext_tiny', 'auto', cbs=[Another()])
    assert tight.gradient_accumulation.micro_bs < 64 and len(losses(tight)) == 2
    assert_same_fit(tight, free)

# Whole batches, with as few blocks recomputed as memory requires

@pytest.mark.parametrize('name', models)
def test_exact_takes_as_few_blocks_as_fit(name):
    "Room for half of what recomputing all blocks saves: some are recomputed, within the limit, and it is the fit without a limit"
    (free,most),(_,least) = fit_with(name),fit_with(name, all_blocks())
    moved = weights(free)-weights(image_learner(name, None))
    assert moved.abs().max() > 1e-5 and least < .8*most
    limit = (most+least)//2
    limit_memory(limit)
    tight,peak = fit_with(name, cb := GradientAccumulation(exact=True))
    assert 0 < cb.way.level < len(cb.way.found) and peak <= limit
    assert_same_fit(tight, free)

class RunsOut(Callback):
    "Memory runs out in the first pass, in its backward pass"
    done = False
    def fail(self, grad):
        if self.done: return
        self.done = True
        raise torch.OutOfMemoryError('CUDA out of memory')
    def after_pred(self):
        if self.training and not self.done: self.learn.pred.register_hook(self.fail)

class Drops(nn.Module):
    "A model of timm with dropout before and after it, all of it recomputable"
    def __init__(self, m): super().__init__(); self.layers = nn.Sequential(nn.Dropout(.3), m, nn.Dropout(.3))
    def forward(self, x): return self.layers(x)

@pytest.mark.parametrize('amp', [None, 'fp16', 'bf16'])
@pytest.mark.parametrize('runs_out', [False, True])
def test_exact_is_the_plain_fit_bit_for_bit(amp, runs_out):
    "Weights, buffers and the GPU's random numbers, also where a pass with its draws is undone"
    def run(*cbs):
        learn = image_learner('convnext_atto', [*([MixedPrecision(amp, init_scale=1.)] if amp else []), *cbs], pixels=64)
        learn.model = Drops(learn.model)
        set_seed(1)
        fit(learn, 1, 1e-2)
        return learn,[o.cpu() for o in learn.model.state_dict().values()],torch.cuda.get_rng_state()
    _,plain,rng = run()
    ours,state,end = run(*([RunsOut()] if runs_out else []), cb := GradientAccumulation(exact=True))
    assert (cb.way.level > 0) == runs_out and (not runs_out or ours.runs_out.done)
    for a,b in zip(state, plain, strict=True): assert torch.equal(a, b)
    assert torch.equal(end, rng) and (weights(ours)-weights(image_learner('convnext_atto', None, pixels=64))).abs().max() > 1e-5

# Mixed precision

@pytest.mark.parametrize('amp', ['fp16', 'bf16'])
def test_mixed_precision(amp):
    "fastai's own callback, with its GradScaler for float16: 'auto' is the size given, and sizes are tried under autocast"
    seen = []
    class Looks(Limited):
        def forward(self, x):
            if self.training: seen.append((len(x), torch.is_autocast_enabled('cuda')))
            return super().forward(x)
    def run(micro):
        learn = on('cuda', limited(9, micro, cbs=[MixedPrecision(amp)]))
        learn.model.__class__ = Looks
        seen.clear()
        return fit(learn, 2, .01, method='fit_one_cycle')
    a = run('auto')
    assert seen[:5] == [(32, True), (16, True), (8, True), (8, True), (8, True)] and all(o for _,o in seen)
    for o,p in zip(state(a), state(run(8)), strict=True): assert_same(o.cpu(), p.cpu(), 1e-5)

@pytest.mark.parametrize('amp', ['fp16', 'bf16'])
def test_half_precision_fits_more(amp):
    "Where 40 samples fit in float32, 64 do in half of the bytes: sizes are tried in the precision that is trained"
    limit_memory(memory_for('resnet50', 40))
    tight,_ = fit_images('resnet50', 'auto', cbs=[MixedPrecision(amp)])
    assert tight.gradient_accumulation.micro_bs >= 64

@pytest.mark.parametrize('amp', ['fp16', 'bf16'])
def test_gradient_cache_in_mixed_precision(amp):
    "Bit for bit the same pieces without recomputation, with dropout drawn on the GPU"
    def gradients(forward_of):
        m = TwoOutputs(.5).float().cuda()
        x = torch.randn(32, 5, generator=torch.Generator().manual_seed(1)).cuda()
        torch.manual_seed(2)
        with torch.autocast('cuda', dtype=dict(fp16=torch.float16, bf16=torch.bfloat16)[amp]): a,b = forward_of(m)(x)
        (F.normalize(a.float(), dim=1)@F.normalize(b.float(), dim=1).T).logsumexp(1).sum().backward()
        return torch.cat([p.grad.flatten() for p in m.parameters()]).cpu()
    def kept(m): return lambda x: tuple(map(torch.cat, zip(*map(m.forward, x.split(8)))))
    a,b = gradients(lambda m: in_pieces(m.forward, BlockState(m), 8, 32)),gradients(kept)
    assert b.abs().max() > 1e-3
    assert_same(a, b)

def test_bfloat16_weights_on_the_gpu():
    "512 gradients of 1 in bfloat16: a mean of 1"
    w,sums = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16, device='cuda')),{}
    for _ in range(512):
        w.sum().backward()
        add_in_float32([w], sums)
    average_gradients([w], 512, sums)
    assert w.grad.item() == 1

# GradientCache: memory and time

def cache_and_accumulate(n=64):
    "A step on 1024 samples in pieces of `n`, cached and accumulated, and at once"
    m,x = deep(),torch.randn(1024, 16, 64, device='cuda')
    m(torch.zeros(1, 16, 64))
    m.cuda()
    def accumulate(n=n):
        m.zero_grad()
        for o in x.split(n): correlations_on_cuda(m(o)).backward()
    def cache():
        m.zero_grad()
        correlations_on_cuda(in_pieces(m.forward, BlockState(m), n, len(x))(x)).backward()
    return cache,accumulate,lambda: accumulate(len(x))

def correlations_on_cuda(z):
    with torch.device('cuda'): return correlations(z)

def peak_of(f):
    f()
    forget()
    before = torch.cuda.memory_allocated()
    f()
    return torch.cuda.max_memory_allocated()-before

def test_memory_of_the_cache():
    cached,accumulated,whole = map(peak_of, cache_and_accumulate())
    assert cached < 1.05*accumulated + 2**20 and cached < .25*whole, (cached, accumulated, whole)

def test_time_of_the_cache():
    "At most 1.40 of the time of accumulating the same pieces; the limit is 4/3"
    def seconds(f):
        start,end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(); f(); end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)
    cache,accumulate,_ = cache_and_accumulate(256)
    for f in cache,accumulate: f()
    ratios = [seconds(cache)/seconds(accumulate) for _ in range(30)]
    print(f'cached / accumulated: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})')
    assert statistics.median(ratios) <= 1.4

def test_auto_of_the_cache():
    "Pieces as large as fit, with the loss over all of them"
    def run(micro):
        learn = image_learner('convnext_tiny', [GradientCache(micro)])
        learn.loss_func = lambda z, y: F.cross_entropy(F.normalize(z, dim=1)@F.normalize(z, dim=1).T/.1, torch.arange(len(z), device=z.device).roll(1))
        forget()
        return fit(learn, 1, 1e-3),torch.cuda.max_memory_reserved()
    (free,small),(_,large) = run(32),run(64)
    limit = small+(large-small)//4
    limit_memory(limit)
    tight,peak = run('auto')
    assert tight.gradient_cache.micro_bs == 32 and peak <= limit
    assert_same_fit(tight, free)

# Activation checkpointing

@pytest.mark.parametrize('arch', ['resnet18', 'convnext_tiny'])
def test_checkpointing_is_the_plain_fit_in_less_memory(arch):
    "Weights and buffers bit for bit, with dropout's masks of the GPU; what is offloaded takes still less"
    def run(*cbs):
        forget()
        torch.manual_seed(0)
        learn = fit(image_learner(arch, [*cbs]), 1, 1e-3)
        return {k:v.cpu() for k,v in learn.model.state_dict().items()},torch.cuda.max_memory_allocated()
    (plain,most),(ours,less),(offloaded,least) = run(),run(all_blocks()),run(all_blocks(offload=True))
    for o in ours,offloaded:
        for k in plain: assert torch.equal(o[k], plain[k]), k
    print(f'{arch}: {most/2**20:.0f} MB plain, {less/2**20:.0f} checkpointed, {least/2**20:.0f} offloaded')
    assert least < less < most
