"A loader batch that is split, and a micro-batch size that finds itself"
import collections, itertools, os, re, subprocess, sys
import pytest
from fastai.callback.mixup import MixUp
from fastai.callback.rnn import ModelResetter, RNNCallback
from hypothesis import given, strategies as st

from common import *
from fastxtend_accum.ways.memory import is_out_of_memory, room_for_step
from fastxtend_accum.learner.state import Saved, held
from fastxtend_accum.learner.nested import CannotJoin, n_rows, cut, join
from test_losses import Masked, tag, token_losses

FLOAT32 = 5e-6

# Joining

Output = collections.namedtuple('Output', 'loss aux')

@pytest.mark.parametrize('kind', [Output, lambda *o: o])
@pytest.mark.parametrize('n', [1, 2, 3])
def test_numbers_for_a_piece_are_none_for_each_of_its_samples(kind, n):
    "Two losses, in pieces of 2 samples too"
    with pytest.raises(CannotJoin, match='cannot join outputs of shape'): join([kind(tensor(1.), tensor(2.+i)) for i in range(2)], [n, n])
    assert join([kind(tensor(1.), tensor(2.)) for _ in range(2)], [n, n]) == kind(1., 2.)  # one temperature for all samples
    assert join([[{'boxes':torch.zeros(i, 4)} for i in range(n)] for _ in range(2)], [n, n])[n]['boxes'].shape == (0, 4)

# Splitting

@pytest.mark.thin(5)
@pytest.mark.parametrize('loader, micro, accum', [(32, 8, 32), (32, 8, None), (16, 4, 48), (32, 7, 32), (30, 7, 60), (32, 32, 96), (32, 40, 32), (32, 1, 32)])
@pytest.mark.parametrize('n', [96, 100])
@pytest.mark.parametrize('drop_last', [False, True])
def test_pieces_are_micro_batches(loader, micro, accum, n, drop_last):
    "Weights, learning rates, logs, and the sizes that the model sees"
    sizes = []
    class Sizes(Callback):
        run_valid = False
        def after_pred(self): sizes.append(len(self.x))
    def run(bs, cbs, **kwargs): return fit(make_learner(bs, n=n, drop_last=drop_last, cbs=cbs, opt_func=Adam), 2, .01, method='fit_one_cycle')
    big = run(accum or loader, None)
    small = run(loader, [GradientAccumulation(accum, micro_batch_size=micro, remainder='drop' if drop_last else 'step'), Sizes()])
    assert_same(weights(small), weights(big), ROUNDING)
    assert_same(small.recorder.lrs, big.recorder.lrs)
    assert_same(losses(small), losses(big), FLOAT32)
    first = sizes[:-(-loader//micro)]
    assert max(sizes) <= micro and max(first)-min(first) <= 1 and sum(sizes) == sum(small.recorder.accum_bs)
    n_used = sum(big_n//loader + (big_n%loader > 0) for big_n in [sum(small.recorder.accum_bs)//2]*2)
    assert small.train_iter == n_used and small.gradient_accumulation.micro_bs == min(micro, loader)

@draws
@given(n=st.integers(2, 90), loader=st.integers(1, 12), micro=st.integers(1, 14), k=st.integers(1, 4), drop_last=st.booleans(), n_epoch=st.integers(1, 2))
def test_any_split(n, loader, micro, k, drop_last, n_epoch):
    "Windows of whole loader batches, split into any pieces: the large batch"
    if drop_last and n < k*loader: return
    big = fit(make_learner(k*loader, n=n, drop_last=drop_last), n_epoch, .01, method='fit_one_cycle')
    learn = make_learner(loader, n=n, drop_last=drop_last, cbs=GradientAccumulation(k*loader, micro_batch_size=micro))
    counted = []
    learn.add_cb(Callback(after_train=lambda self: counted.append((self.n_iter, self.iter+1, self.learn.pct_train*self.n_epoch))))
    fit(learn, n_epoch, .01, method='fit_one_cycle')
    assert_same(weights(learn), weights(big), ROUNDING)
    assert_same(learn.recorder.lrs, big.recorder.lrs)
    for i,(n_iter,seen,pct) in enumerate(counted): assert n_iter == seen and abs(pct-i-1) < 1e-9

def test_progress_bar_counts_loader_batches():
    bars = []
    class Probe(Callback):
        order,run_valid = 61,False
        def after_train(self): bars.append((self.learn.progress.pbar.total, self.learn.iter+1))
    learn = make_learner(32, n=100, cbs=[GradientAccumulation(32, micro_batch_size=8), Probe()])
    with learn.no_logging(): learn.fit(1)
    assert bars == [(4, 4)]

@pytest.mark.parametrize('name', ['plain', 'weighted', 'sum'])
def test_pieces_of_tokens(name):
    d,lr = Masked(29),.01 if name == 'sum' else .1
    big,small = (tag(12, d, token_losses[name](), cbs, lr=lr) for cbs in (None, GradientAccumulation(12, micro_batch_size=5)))
    assert_same(weights(small), weights(big), 1e-6 if name == 'weighted' else ROUNDING)

def test_a_schedule_over_pieces():
    "The same windows, whatever they are split into; those that the preview names"
    def run(loader, **kwargs):
        accum = GradientAccumulationSchedule(16, 64, finish=.8, **kwargs)
        learn = make_learner(loader, n=100, cbs=accum)
        preview = [size for _,size in accum.preview(3, learn.dls)]
        fit(learn, 3, method='fit_one_cycle')
        assert preview == learn.recorder.accum_bs
        return learn
    whole = run(16)
    for micro in 16,8,5,1:
        split = run(16, micro_batch_size=micro)
        assert split.recorder.accum_bs == whole.recorder.accum_bs and len(set(whole.recorder.accum_bs)) > 3
        assert_same(split.recorder.lrs, whole.recorder.lrs)
        assert_same(weights(split), weights(whole), ROUNDING)

@pytest.mark.parametrize('remainder', ['step', 'carry', 'drop'])
def test_remainders_of_pieces(remainder):
    "88 samples in batches of 32, in windows of 64 and pieces of 8; a window ends with a batch of the DataLoader"
    learn,whole = (fit(make_learner(32, n=88, cbs=GradientAccumulation(64, micro_batch_size=o, remainder=remainder)), 2) for o in (8, None))
    assert learn.recorder.accum_bs == whole.recorder.accum_bs == dict(step=[64,24]*2, carry=[64,24+64], drop=[64]*2)[remainder]
    assert_same(weights(learn), weights(whole), ROUNDING)

def test_lr_find_over_pieces():
    found = []
    for cbs in None,GradientAccumulation(32, micro_batch_size=8):
        learn = make_learner(32, n=100, cbs=cbs)
        with learn.no_bar(): learn.lr_find(num_it=20, stop_div=False, show_plot=False)
        found.append((learn.recorder.lrs, losses(learn)))
    assert len(found[0][0]) == 20
    assert_same(found[0][0], found[1][0], ROUNDING)
    assert_same(torch.tensor(found[0][1])/torch.tensor(found[1][1]), torch.ones(20), 1e-4)

# Structures

class Encoding(collections.UserDict):
    "As Hugging Face's BatchEncoding: a mapping that is no dict"

Pair = collections.namedtuple('Pair', 'a b')

def piece(b, start, end): return cut((b,), start, end, n_rows(b))[0]

def test_nested_batches():
    x,y = torch.arange(12.).reshape(6, 2),torch.arange(6)
    b = [Encoding(ids=x, deep=[x, (y,)]), Pair(x, y), ['a','b','c','d','e','f'], 'name', None, 3, tensor(1.), [{'box':[1.]}]*6]
    p = piece(b, 2, 5)
    assert type(p) is list and type(p[0]) is Encoding and type(p[1]) is Pair
    assert_same(p[0]['ids'], x[2:5]); assert_same(p[0]['deep'][1][0], y[2:5]); assert_same(p[1].b, y[2:5])
    assert p[2:6] == [['c','d','e'], 'name', None, 3] and p[6] == 1. and p[7] == [{'box':[1.]}]*3
    assert n_rows(b) == 6 and len(b[0]['ids']) == 6  # the batch itself is as it was

def test_a_pair_of_two_samples_is_a_pair():
    "A list of samples and a pair (x, y) look alike if there are two samples"
    x,y = torch.zeros(2, 3),torch.arange(2)
    a,b = piece([x, y], 0, 1)
    assert a.shape == (1, 3) and b.tolist() == [0]

@pytest.mark.parametrize('b, says', [
    ((torch.zeros(3), torch.zeros(6, 2)), r'cannot split a tensor of shape \(3,\) in a batch of 6 samples'),
    ((torch.zeros(6, 2), nn.utils.rnn.pack_sequence([torch.ones(2)]*6)), 'cannot split a PackedSequence'),
    ((torch.zeros(6, 2), torch.zeros(6, 2).to_sparse()), 'cannot split a Tensor'), ((torch.zeros(6, 2), object()), 'cannot split a object'),
    (('a', None), 'cannot find the samples of a batch without tensors')])
def test_what_cannot_be_split(b, says):
    with pytest.raises(ValueError, match=says): piece(b, 0, 3)

def test_joined_pieces_are_the_whole():
    x,y = torch.arange(12.).reshape(6, 2),torch.arange(6)
    whole = {'a':x, 'b':Pair(x, [y, None])}
    parts = [piece(whole, i, j) for i,j in ((0, 2), (2, 5), (5, 6))]
    res = join(parts, [2, 3, 1])
    assert_same(res['a'], x); assert_same(res['b'].b[0], y); assert res['b'].b[1] is None
    for bad in [tensor(1.), tensor(2.)], [torch.zeros(2), torch.zeros(2)], ['a', 'b']:
        with pytest.raises(ValueError, match='cannot join'): join(bad, [1, 2])

class FromDict(nn.Module):
    "A model that takes a dict, as transformers do, and gives one"
    def __init__(self): super().__init__(); self.m = model()
    def forward(self, b): return {'pred':self.m(b['x']*b['mask'])}

def test_a_learner_of_dicts():
    x,y = data(96)
    ds = [({'x':x[i], 'mask':torch.ones(5).double()}, y[i]) for i in range(96)]
    def run(bs, cbs=None):
        torch.manual_seed(0)
        return fit(Learner(DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds[:8], bs=8)), FromDict(), lambda p,t: mse(p['pred'], t), opt_func=SGD, cbs=cbs), 2)
    big = run(32)
    for cbs in GradientAccumulation(32, micro_batch_size=8), GradientAccumulation(32, micro_batch_size='auto'): assert_same(weights(run(32, cbs)), weights(big), ROUNDING)

# Arguments

@pytest.mark.parametrize('make, says', [
    (lambda: GradientAccumulation(32, micro_batch_size='half'), "micro_batch_size must be a number of samples or 'auto', not 'half'"),
    (lambda: GradientAccumulation(32, micro_batch_size=8.), 'micro_batch_size counts samples')])
def test_at_once(make, says):
    with pytest.raises((TypeError, ValueError), match=says): make()

@pytest.mark.parametrize('accum, micro', [(20, 8), (48, 7), (48, 'auto'), (40, 'auto'), (8, 16)])
def test_windows_that_do_not_fit(accum, micro):
    with pytest.raises(ValueError, match=f"accum_bs={accum} is not a multiple of the DataLoader's batch of 32 samples"):
        fit(make_learner(32, cbs=GradientAccumulation(accum, micro_batch_size=micro)), 1)

def test_left_out_the_window_is_the_loaders_batch():
    cb = GradientAccumulation(micro_batch_size=8)
    learn = make_learner(32, cbs=cb)
    assert fit(learn, 1).recorder.accum_bs == [32]*3
    learn.dls = make_learner(48).dls
    assert fit(learn, 1).recorder.accum_bs == [48]*2
    assert GradientAccumulation(n_acc=64, micro_batch_size=8).accum_bs == 64 and GradientAccumulation().accum_bs == 32

class Carries(nn.Sequential):
    def reset(self): pass

def test_a_model_that_carries_its_state_is_an_error():
    for micro in 8,'auto':
        with pytest.raises(ValueError, match='Carries carries its state from batch to batch'):
            fit(make_learner(32, m=Carries(*model()), cbs=GradientAccumulation(32, micro_batch_size=micro)), 1)
    fit(make_learner(8, m=Carries(*model()), cbs=GradientAccumulation(32)), 1)  # whole batches are fine

# The size that fits

class Limited(nn.Module):
    "Runs out of memory with more than `limit` samples, in its forward or only in its backward pass; has dropout and BatchNorm, and counts passes"
    sizes = []
    def __init__(self, limit, where='forward', seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.m = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(.3), nn.Tanh(), nn.Dropout(.3), nn.Linear(8, 1))
        self.limit,self.where = limit,where

    def forward(self, x):
        if self.training: Limited.sizes.append(len(x))
        def check(*args):
            if self.training and len(x) > self.limit: raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')
        if self.where == 'forward': check()
        res = self.m(x)
        if self.where == 'backward' and res.requires_grad: res.register_hook(check)
        return res

def limited(limit, micro, where='forward', n=128, bs=32, accum=64, cbs=(), **kwargs):
    set_seed(0)
    x,y = (o.float() for o in data(n))
    dls = DataLoaders(DataLoader(list(zip(x, y)), bs=bs, shuffle=True), DataLoader(list(zip(x, y))[:16], bs=16))
    Limited.sizes.clear()
    return Learner(dls, Limited(limit, where), MSELossFlat(), opt_func=Adam, cbs=[GradientAccumulation(accum, micro_batch_size=micro), *cbs], **kwargs)

def state(learn): return [weights(learn), *(b.double() for b in learn.model.buffers()), torch.get_rng_state(), tensor(random.random()),
                          tensor(np.random.rand()), tensor(learn.dls.train.rng.random())]

@pytest.mark.thin(5)
@pytest.mark.parametrize('where', ['forward', 'backward'])
@pytest.mark.parametrize('limit, size, mix', [*itertools.product([100, 32, 31, 9], [None], [False, True]), (1.5, 1, False)])
def test_auto_is_the_size_given(where, limit, size, mix, capsys):
    "Bit for bit, with dropout, BatchNorm, shuffled data and MixUp; BatchNorm and MixUp need two samples"
    size = size or max(o for o in (32, 16, 8) if o <= limit)
    if size == 1: limited_model = lambda learn: setattr(learn.model, 'm', nn.Sequential(*[o for o in learn.model.m if not isinstance(o, nn.BatchNorm1d)]))
    else: limited_model = noop
    res = []
    for micro in 'auto',size:
        learn = limited(limit, micro, where, cbs=[MixUp()] if mix else [])
        limited_model(learn)
        fit_aloud(learn, 2, .01, method='fit_one_cycle')
        res.append((learn.gradient_accumulation.micro_bs, state(learn), losses(learn), learn.recorder.lrs))
        if micro == 'auto': said = capsys.readouterr().out
    (a,states,ls,lrs),(b,*given) = res
    assert a == b == size
    for o,p in zip(states, given[0], strict=True): assert_same(o, p)
    assert_same(ls, given[1]); assert_same(lrs, given[2])
    how = 'fits in memory' if size == 32 else f'is split into {32//size} micro-batches of {size}'
    assert said.count('\n') == 1 and f"micro_batch_size='auto': each batch of 32 {how}" in said

def test_the_sizes_that_are_tried():
    learn = limited(9, 'auto')
    fit(learn, 1)
    assert Limited.sizes == [32, 16] + [8]*16  # the pass that fits is a training pass

def test_an_interrupted_search_goes_on(recwarn):
    learn = limited(9, 'auto')
    forward = learn.model.forward
    def interrupt(x):
        if len(x) == 16: raise KeyboardInterrupt
        return forward(x)
    learn.model.forward = interrupt
    with pytest.raises(KeyboardInterrupt): fit(learn, 1)
    assert Limited.sizes == [32]
    del learn.model.forward
    Limited.sizes.clear()
    fit(learn, 1)
    assert Limited.sizes[:4] == [16, 8, 8, 8] and learn.gradient_accumulation.micro_bs == 8
    assert not [o for o in recwarn if 'out of memory in training' in str(o.message)]

@pytest.mark.parametrize('message', [
    'CUDA out of memory. Tried to allocate 2.00 GiB', 'CUDA error: out of memory', 'CUDA driver error: out of memory', 'cuda runtime error (2) : out of memory', 'HIP out of memory',
    'HIP error: out of memory', 'MPS backend out of memory (MPS allocated: 5 GB)', 'XPU out of memory', 'Triton Error [CUDA]: out of memory', 'std::bad_alloc',
    "[enforce fail at alloc_cpu.cpp:73] DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes", 'DefaultCPUAllocator: not enough memory: you tried to allocate 12 bytes',
    'CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`', 'cuDNN error: CUDNN_STATUS_ALLOC_FAILED', 'cuFFT error: CUFFT_ALLOC_FAILED', 'cusolver error: CUSOLVER_STATUS_ALLOC_FAILED',
    'cuDNN error: CUDNN_STATUS_NOT_SUPPORTED', 'Unable to find a valid cuDNN algorithm to run convolution', 'FIND was unable to find an engine to execute this computation',
    'could not create a primitive', 'could not execute a primitive', 'could not create a memory object'])
def test_messages(message):
    assert is_out_of_memory(RuntimeError(message)) and not is_out_of_memory(ValueError(message))
    def wrapped():
        try: raise RuntimeError(message)
        except RuntimeError as e: raise ValueError('of a callback') from e
    with pytest.raises(ValueError) as e: wrapped()
    assert is_out_of_memory(e.value)

@pytest.mark.parametrize('message', ['mat1 and mat2 shapes cannot be multiplied', 'CUDA error: device-side assert triggered', 'Expected all tensors to be on the same device', 'memory format'])
def test_messages_of_other_errors(message): assert not is_out_of_memory(RuntimeError(message))

def test_not_even_one_sample(capsys):
    learn = limited(0, 'auto')
    before = state(limited(0, 'auto'))
    with pytest.raises(RuntimeError, match='out of memory with a single sample: use smaller inputs'): fit(learn, 1)
    assert not is_out_of_memory(RuntimeError('out of memory with a single sample'))
    assert_same(weights(learn), before[0])

def test_other_errors_pass_unchanged():
    class Broken(nn.Module):
        def __init__(self): super().__init__(); self.m = nn.Linear(5, 1).double()
        def forward(self, x): raise KeyError('no such key')
    learn = make_learner(32, cbs=GradientAccumulation(32, micro_batch_size='auto'))
    learn.model = Broken()
    with pytest.raises(KeyError, match='no such key'): fit(learn, 1)

def test_it_looks_again_after_unfreeze():
    "With a frozen body more samples fit"
    learn = limited(32, 'auto')
    learn.splitter = lambda m: [params(m.m[0]), params(m.m[-1])]
    frozen,found = lambda: not learn.model.m[0].weight.requires_grad,[]
    forward = Limited.forward
    def by_training(self, x): self.limit = 32 if frozen() else 9; return forward(self, x)
    learn.model.forward = partial(by_training, learn.model)
    learn.add_cb(Callback(after_train=lambda self: found.append(self.gradient_accumulation.micro_bs)))
    with quiet(learn): learn.fine_tune(2)
    assert found == [32, 8, 8]
    tried = len(Limited.sizes)
    iters = []
    learn.add_cb(Callback(after_train=lambda self: iters.append((self.n_iter, self.iter+1))))
    with quiet(learn): learn.fit(1)
    assert iters == [(4, 4)] and len(Limited.sizes) == tried+16  # known by now: 128 samples, 8 at a time

def test_it_looks_again_when_samples_are_larger():
    "Text of growing length, 320 numbers fit: 32 samples of 10, then 16 of 20, and then, without another try, 8 of 40"
    lengths = [10]*2+[20]*2+[40]*2
    class Lengths(nn.Module):
        def __init__(self): super().__init__(); torch.manual_seed(0); self.m = nn.Linear(1, 1).double()
        def forward(self, x):
            if x.numel() > 320: raise torch.OutOfMemoryError('CUDA out of memory')
            return self.m(x[...,None]).mean((1, 2))[:,None]
    g = torch.Generator().manual_seed(0)
    batches = [(torch.randn(32, n, generator=g, dtype=torch.float64), torch.randn(32, 1, generator=g, dtype=torch.float64)) for n in lengths]
    def run(micro):
        dls = DataLoaders(*[torch.utils.data.DataLoader(batches, batch_size=None)]*2)
        for o in dls.loaders: o.bs = 32
        sizes = []
        learn = Learner(dls, Lengths(), mse, opt_func=SGD, cbs=[GradientAccumulation(64, micro_batch_size=micro),
                        Callback(after_pred=lambda self: self.training and sizes.append((len(self.x), self.n_iter)))])
        learn.add_cb(Callback(before_validate=lambda self: stop(CancelValidException())))
        return fit(learn, 1),sizes
    learn,sizes = run('auto')
    assert [n for n,_ in sizes] == [32]*2+[16]*4+[8]*8 and sizes[-1][1] == 6
    assert_same(weights(learn), weights(run(8)[0]), ROUNDING)

# Out of memory later on

class Squeeze(Callback):
    "Another program takes memory at training iteration `at`: only `to` samples fit from then on"
    run_valid,order = False,5
    def __init__(self, at, to): self.at,self.to = at,to
    def before_batch(self):
        if self.train_iter >= self.at: self.model.limit = self.to

@pytest.mark.parametrize('cb', [GradientAccumulation(32), GradientAccumulationSchedule(16, 32)])
def test_without_a_size_a_warning_names_one(cb):
    "The error stays PyTorch's"
    def full(pred, targ): raise torch.OutOfMemoryError('CUDA out of memory')
    with pytest.warns(UserWarning, match="out of memory with batches of 16 samples: micro_batch_size='auto' splits them"):
        with pytest.raises(torch.OutOfMemoryError): fit(make_learner(16, loss_func=full, cbs=cb), 1)

@pytest.mark.thin(5)
@pytest.mark.parametrize('where', ['forward', 'backward'])
@pytest.mark.parametrize('at', [1, 2, 3])
@pytest.mark.parametrize('to', [8, 5])
def test_memory_that_runs_out_later(where, at, to):
    "128 samples in batches of 32, two windows of 64; the weights are those of the large batch all the same"
    def plain(learn): learn.model.m = nn.Sequential(*[o for o in learn.model.m if not isinstance(o, (nn.BatchNorm1d, nn.Dropout))]); return learn
    learn = plain(limited(16, 'auto', where, accum=32, cbs=[Squeeze(at, to)]))
    big = fit(plain(limited(1000, 32, accum=32)), 1)
    with pytest.warns(UserWarning, match='out of memory in training: from now on, micro-batches have'): fit(learn, 1)
    assert learn.gradient_accumulation.micro_bs == (8 if to == 8 else 4)
    assert_same(weights(learn), weights(big), FLOAT32)
    assert_same(losses(learn), losses(big), FLOAT32)
    assert learn.recorder.accum_bs == [32]*4 and learn.iter+1 == learn.n_iter
    assert '_do_one_batch' not in vars(learn)

def test_what_cannot_be_undone_says_what_to_set():
    "The gradient of an earlier loader batch is mixed with the one that failed"
    learn = limited(16, 'auto', 'backward', cbs=[Squeeze(3, 8)])
    with pytest.raises(RuntimeError, match='out of memory with micro-batches of 16 samples: set micro_batch_size=8'): fit(learn, 1)

def test_never_after_the_step_has_begun():
    learn = limited(16, 'auto')
    learn.create_opt()
    def full(*args, **kwargs): raise torch.OutOfMemoryError('CUDA out of memory')
    learn.opt.step = full
    with pytest.raises(torch.OutOfMemoryError): fit(learn, 1)

def test_without_auto_the_error_is_pytorchs():
    with pytest.raises(torch.OutOfMemoryError, match='Tried to allocate'): fit(limited(16, 32), 1)

def test_recovery_lets_go_of_the_tensors():
    "What the failed pass has made is free before the next one"
    import weakref
    made,alive = [],[]
    class Holds(Limited):
        def forward(self, x):
            alive.append(sum(o() is not None for o in made))
            h = x.repeat(1, 3)
            made.append(weakref.ref(h))
            return super().forward(x+0*h[:,:5])
    learn = limited(16, 'auto', cbs=[Squeeze(3, 8)])
    learn.model.__class__ = Holds
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        fit(learn, 1)
    assert learn.gradient_accumulation.micro_bs == 8 and max(alive) == 0

class OwnNoise(nn.Module):
    "Draws from a generator of its own, and counts what it has seen in a buffer"
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.m,self.rng = nn.Linear(5, 1).double(),dict(torch=lambda: torch.Generator().manual_seed(3), numpy=lambda: np.random.default_rng(3), python=lambda: random.Random(3))[kind]()
        self.register_buffer('seen', torch.zeros(()))
        self.fails,self.held,OwnNoise.n = (),[self.rng],0
    def forward(self, x):
        OwnNoise.n += self.training  # in the class, since what the module holds is undone
        noise = (torch.rand(len(x), generator=self.rng) if isinstance(self.rng, torch.Generator) else
                 tensor([self.rng.random() for _ in range(len(x))])).double()[:,None]
        self.seen += len(x)
        if self.training and OwnNoise.n in self.fails: raise torch.OutOfMemoryError('CUDA out of memory')
        return self.m(x)*noise

@pytest.mark.parametrize('kind', ['torch', 'numpy', 'python'])
@pytest.mark.parametrize('fails', [(2,), (3,), (2, 4)])
def test_a_generator_that_the_model_holds_is_put_back(kind, fails):
    "Samples in the same order draw the same numbers, in however many pieces: memory runs out once the numbers are drawn"
    def run(*fails):
        learn = make_learner(32, m=OwnNoise(kind), cbs=GradientAccumulation(32, micro_batch_size='auto') if fails else None)
        learn.model.fails = fails
        return fit(learn, 1)
    plain,n = run(),OwnNoise.n
    with pytest.warns(UserWarning, match='out of memory in training'): ours = run(*fails)
    assert OwnNoise.n > n
    assert_same(weights(ours), weights(plain), ROUNDING)
    assert ours.model.seen == plain.model.seen

def test_saved_tells_what_has_moved_and_puts_it_back_in_place():
    "Tensors (also expanded, sparse, of a new shape), arrays, containers and generators of all kinds"
    t,wide,sparse,csr,grown = torch.arange(3.),torch.zeros(1).expand(4),torch.eye(2).to_sparse(),torch.eye(2).to_sparse_csr(),torch.zeros(0)
    a,d,l,q,s = np.arange(3.),dict(a=1),[1],collections.deque([1, 2], maxlen=2),{1}
    generators = random.Random(1),np.random.default_rng(1),np.random.RandomState(1),torch.Generator().manual_seed(1),random,np.random
    def draws(): return [torch.rand(2, generator=o).tolist() if isinstance(o, torch.Generator) else o.random() for o in generators]
    state = Saved([t, wide, sparse, csr, grown, a, d, l, q, s, *generators, np.full(1, math.nan)])
    before = draws()
    for _ in range(2):
        t.add_(1); wide.data = torch.ones(4); sparse.mul_(2); csr.mul_(2); grown.data = torch.ones(3); a += 1
        d['b'] = 2; l.append(2); q.append(3); s.add(2)
        assert draws() != before and len(state.moved()) == 16
        state.put_back()
        assert not state.moved()
        assert (t.tolist(), wide.tolist(), grown.tolist(), a.tolist()) == ([0, 1, 2], [0]*4, [], [0, 1, 2])
        for o in sparse,csr: assert_same(o.to_dense(), torch.eye(2))
        assert (d, l, list(q), q.maxlen, s) == (dict(a=1), [1], [1, 2], 2, {1})
        assert draws() == before

def default(n=[0]): n[0] += 1; return n[0]
def keyword(*, n=dict(n=0)): n['n'] += 1; return n['n']
def attribute(): attribute.n += 1; return attribute.n
attribute.n = 0
class Counts:
    __slots__ = 'calls'  # one name
    def __init__(self): self.calls = 0
    def __call__(self): self.calls += 1; return self.calls
def closed(n=0):
    def f():
        nonlocal n
        n += 1
        return n
    return f

@pytest.mark.parametrize('f', [default, keyword, attribute, closed(), Counts(), Counts().__call__, partial(default, [0]), partial(keyword, n=dict(n=0))])
def test_what_a_function_holds_is_put_back(f):
    state,before = Saved(held(f, functions=True)),f()
    assert f() != before and state.moved()
    state.put_back()
    assert not state.moved() and f() == before

def test_a_dict_in_a_module_may_have_a_name_of_the_modules():
    m = nn.Linear(1, 1)
    m.kept = dict(training=torch.zeros(2))
    state = Saved(held(m))
    m.kept['training'] += 1
    assert len(state.moved()) == 1
    state.put_back()
    assert m.kept['training'].tolist() == [0, 0]

class Summed(nn.Module):
    "Gives one number in validation, and then has no memory for more than 8 samples"
    def __init__(self): super().__init__(); self.m,self.calls = nn.Linear(5, 1).double(),0
    def forward(self, x):
        if self.training: return self.m(x)
        self.calls += 1
        assert self.calls < 20, 'it does not end'
        if len(x) > 8: raise torch.OutOfMemoryError('CUDA out of memory')
        return self.m(x).sum()

class Tokenizes(Summed):
    "Takes texts"
    def forward(self, texts): return super().forward(tensor([[float(len(o))]*5 for o in texts]).double())

@pytest.mark.parametrize('make', [Summed, Tokenizes])
def test_validation_that_cannot_be_split_ends(make):
    "The outputs cannot be joined, or no tensor shows the samples: the error of the whole batch"
    learn = make_learner(16, n=32, m=make(), loss_func=lambda pred, targ: (pred-targ).square().mean().float(), cbs=GradientAccumulation(16, micro_batch_size='auto'))
    if make is Tokenizes:
        ds = [('a'*(i%7), torch.zeros(1).double()) for i in range(32)]
        learn.dls = DataLoaders(DataLoader(ds, bs=16), DataLoader(ds, bs=16))
    with pytest.raises(torch.OutOfMemoryError): fit(learn, 1)
    assert learn.model.calls > 0

# Mixed precision

@pytest.mark.parametrize('amp', ['bf16', 'fp16'])
def test_auto_in_mixed_precision(amp):
    "Sizes are tried under autocast, and the fit is bit for bit the one with the size given: weights and random state"
    seen,res = [],[]
    class Looks(Limited):
        def forward(self, x):
            if self.training: seen.append((len(x), torch.is_autocast_enabled('cpu')))
            return super().forward(x)
    for micro in 'auto',8:
        learn = limited(9, micro, cbs=[CpuMixedPrecision(amp, init_scale=2.**8)])
        learn.model.__class__ = Looks
        seen.clear()
        fit(learn, 2, .01, method='fit_one_cycle')
        res.append((state(learn), learn.gradient_accumulation.micro_bs))
        if micro == 'auto': assert seen[:5] == [(32, True), (16, True), (8, True), (8, True), (8, True)]
        assert all(on for _,on in seen) and not torch.is_autocast_enabled('cpu')
    (a,n),(b,m) = res
    assert n == m == 8
    for o,p in zip(a, b, strict=True): assert_same(o, p)

def test_a_loss_that_works_in_place_gets_its_targets_again():
    "Memory runs out in the backward pass of a piece that is the whole batch"
    def shifted(pred, targ): return F.mse_loss(pred, targ.sub_(1)).float()
    class Once(Callback):
        run_valid,done = False,False
        def before_backward(self):
            if self.learn.iter == 1 and not self.done: self.done = True; raise torch.OutOfMemoryError('CUDA out of memory')
    once = Once()
    plain = fit(make_learner(16, loss_func=shifted), 1)
    with pytest.warns(UserWarning, match='out of memory in training'): ours = fit(make_learner(16, loss_func=shifted, cbs=[GradientCache('auto'), once]), 1)
    assert once.done and (weights(plain)-weights(model())).abs().max() > .1
    assert_same(weights(ours), weights(plain), 1e-12)

# On its own

def test_room_for_the_optimizers_state():
    learn = fit(make_learner(8), 0)
    n = sum(p.numel() for p in learn.model.parameters())
    assert sum(o.numel() for o in room_for_step(learn.opt)) == 2*n
    for opt_func,left in (Adam, 0), (partial(OptimWrapper, opt=torch.optim.Adam), 0):
        assert sum(o.numel() for o in room_for_step(fit(make_learner(8, opt_func=opt_func), 1).opt)) == left

# A real limit

SCRIPT = '''
import resource, sys, warnings
warnings.simplefilter('ignore')
sys.path.insert(0, {tests!r})
from common import *
torch.set_num_threads(1)
torch.manual_seed(0)
m = nn.Sequential(nn.Linear(100, 2000), *[nn.Tanh() for _ in range(20)], nn.Linear(2000, 1))
ds = list(zip(torch.randn(1024, 100), torch.randn(1024, 1)))
def run(megabytes):
    fit(make_learner(8), 1)  # whatever is loaded and cached at first
    accum = GradientAccumulation(512, micro_batch_size='auto')
    learn = Learner(DataLoaders(DataLoader(ds, bs=512), DataLoader(ds[:8], bs=8)), m, MSELossFlat(), opt_func=SGD, cbs=accum)
    used = int(open('/proc/self/statm').read().split()[0])*resource.getpagesize()
    if megabytes: resource.setrlimit(resource.RLIMIT_AS, (used+megabytes*2**20,)*2)
    fit(learn, 1, 1e-3)
    print('size', accum.micro_bs, float(losses(learn)[-1]), flush=True)
for megabytes in None,50: assert forked(run, megabytes) == 0
'''

@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='RLIMIT_AS')
def test_the_allocator_itself_fails():
    "512 samples take some 90 MB: with 50 MB to spare, a quarter of them or less fits, and the fit is the same"
    env = dict(os.environ, MALLOC_MMAP_THRESHOLD_='65536', MALLOC_ARENA_MAX='1', OMP_NUM_THREADS='1')
    out = subprocess.run([sys.executable, '-c', SCRIPT.format(tests=str(Path(__file__).parent))], capture_output=True, text=True, timeout=SECONDS, env=env)
    assert out.returncode == 0, out.stderr[-2000:]
    (free,loss),(tight,same) = ((int(size),float(loss)) for size,loss in re.findall(r'^size (\d+) (\S+)$', out.stdout, re.M))
    assert free == 512 and 32 <= tight <= 256
    assert abs(loss-same) < 1e-5
