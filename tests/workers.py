"""What one of several processes does in `test_processes.py`: `torchrun --nproc-per-node 2 tests/workers.py FOLDER [CASE]`

Each case trains a Learner and saves what came of it, for the test to compare with a reference"""
import contextlib, os, sys, unittest.mock

import torch.distributed as dist
from accelerate import DistributedDataParallelKwargs
from fastai.distributed import *
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce as all_reduce_with_grad
from torch.nn.parallel import DistributedDataParallel

from common import *
from fastai.callback.training import GradientAccumulation as FastaiGradientAccumulation
from fastxtend_accum.ways.cache import GradientCache
from fastxtend_accum.ways.checkpointing import ActivationCheckpointing
from fastxtend_accum.demo import Activations
from fastxtend_accum.window.processes import Processes

def broadcast_on_cpu(self, t, rank):
    "fastai moves the order of the samples to the GPU, since NCCL knows nothing else. Gloo does"
    t = LongTensor(t)
    dist.broadcast(t, rank)
    return t.tolist()
DistributedDL._broadcast = broadcast_on_cpu

class Traffic(Callback):
    "Counts what the processes tell each other while they train: DDP's buckets by a communication hook, the rest by a wrapper"
    order = DistributedTrainer.order+1
    def before_fit(self):
        self.buckets,self.scalars,self.gathers,self.silent = [],[],[],[]
        if isinstance(self.model, DistributedDataParallel): self.model.register_comm_hook(None, self.bucket)
        self.original,dist.all_reduce = dist.all_reduce,self.all_reduce
        self.original_gather,dist.all_gather = dist.all_gather,self.all_gather

    def bucket(self, state, bucket):
        self.buckets.append((self.learn.train_iter, bucket.buffer().nbytes))
        return allreduce_hook(state, bucket)

    def all_reduce(self, o, *args, async_op=False, **kwargs):
        if not async_op: self.scalars.append(o.nbytes)  # the communication hook's are
        return self.original(o, *args, async_op=async_op, **kwargs)

    def all_gather(self, res, o, *args, **kwargs):
        if self.learn.training: self.gathers.append(o.nbytes)
        return self.original_gather(res, o, *args, **kwargs)

    def after_fit(self): dist.all_reduce,dist.all_gather = self.original,self.original_gather

class SkipBatch(Callback):
    "Cancels the second micro-batch of each epoch, at `event`"
    def __init__(self, event): setattr(self, event, self.skip)
    def skip(self):
        if self.learn.training and self.learn.iter == 1: raise CancelBatchException

def token_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 4)).double()

def token_learner(cbs, loss_func):
    x,y = tokens()
    ds = list(zip(x, y))
    dls = DataLoaders(DataLoader(ds, bs=4), DataLoader(ds[:8], bs=4))
    def flat(pred, targ): return loss_func(pred.flatten(0, 1), targ.flatten()).float()
    def n_items(learn): return loss_items(loss_func, learn.pred.flatten(0, 1), learn.y.flatten())
    cbs.append(GradientAccumulation(8*num_distrib(), num_items=n_items))
    return Learner(dls, token_model(), flat, opt_func=SGD, cbs=cbs)

def whole_weights(m): return torch.cat([getattr(p, 'full_tensor', lambda: p)().detach().flatten().clone() for p in m.parameters()])

def train(learn, n_epoch=2, sync_bn=True, in_ctx=True, **kwargs):
    "Train, and tell what came of it"
    traffic = learn.cbs[-1] if isinstance(learn.cbs[-1], Traffic) else Traffic()
    learn.add_cb(traffic)
    handlers = [DistributedDataParallelKwargs(**kwargs)] if kwargs else None
    context = learn.distrib_ctx(cpu=True, sync_bn=sync_bn, kwargs_handlers=handlers) if in_ctx else learn.no_bar()
    with quiet(learn), context: learn.fit(n_epoch, 0.1)
    return dict(weights=whole_weights(learn.model), losses=losses(learn), accum_bs=getattr(learn.recorder, 'accum_bs', None),
                buckets=traffic.buckets, scalars=traffic.scalars, gathers=traffic.gathers, grads=sum(float(g.abs().sum()) for g in grads(learn)))

def fit_small(accum, cbs=(), n=96, bs=4, **kwargs):
    args = {k:kwargs.pop(k) for k in ('opt_func','m','loss_func') if k in kwargs}
    return train(make_learner(bs, n=n, cbs=[accum, *cbs], **args), **kwargs)

W = num_distrib()
cases = {}
def case(f): cases[f.__name__] = f; return f

@case
def constant(): return fit_small(GradientAccumulation(16*W))
@case
def float32(): return fit_small(GradientAccumulation(16*W), m=model().float(), loss_func=MSELossFlat())
@case
def adam(): return fit_small(GradientAccumulation(16*W), opt_func=partial(Adam, wd=0.))
@case
def scheduled(): return fit_small(GradientAccumulationSchedule(4*W, 16*W, finish=1.0))
@case
def ragged(): return fit_small(GradientAccumulation(12*W), n=101)
@case
def carry(): return fit_small(GradientAccumulation(12*W, remainder='carry'), n=101)
@case
def drop(): return fit_small(GradientAccumulation(12*W, remainder='drop'), n=101)
@case
def verdicts():
    "What the first step prints, where that is process 0"
    said = []
    for cb,m in ((GradientAccumulation(16*W), model()), (GradientAccumulation(4*W), normed()), (GradientAccumulation(4*W, micro_batch_size=2), normed())):
        learn = make_learner(4, cbs=cb, m=m)
        with learn.no_bar(), replaced(learn, 'logger', lambda o: isinstance(o, str) and said.append(o)), learn.distrib_ctx(cpu=True, sync_bn=False): learn.fit(1, .1)
    return said
@case
def verdicts_sharded():
    "The same, where the weights are shared out: gathering them is no difference"
    said = []
    for m in model(),normed():
        learn = make_learner(4, cbs=GradientAccumulation(4*W, micro_batch_size=2), m=fully_shard(m, mesh=init_device_mesh('cpu', (W,))))
        learn.dls.loaders = [DistributedDL(dl) for dl in learn.dls.loaders]
        with learn.no_bar(), replaced(learn, 'logger', lambda o: isinstance(o, str) and said.append(o)): learn.fit(1, .1)
    return said
@case
def pieces(): return fit_small(GradientAccumulation(16*W, micro_batch_size=4), bs=8)
@case
def ragged_pieces(): return fit_small(GradientAccumulation(12*W, micro_batch_size=5), bs=12, n=101)
class Limited(nn.Module):
    "Process 0 has memory for 9 samples, the others for 5"
    def __init__(self): super().__init__(); self.m = model()
    def forward(self, x):
        if self.training and len(x) > (5 if rank_distrib() else 9): raise torch.OutOfMemoryError('CUDA out of memory')
        return self.m(x)
@case
def auto():
    accum = GradientAccumulation(16*W, micro_batch_size='auto')
    return fit_small(accum, bs=16, m=Limited()) | dict(micro_bs=accum.micro_bs)
@case
def one_cycle():
    learn = make_learner(4, n=101, cbs=GradientAccumulation(12*W))
    with quiet(learn), learn.distrib_ctx(cpu=True): learn.fit_one_cycle(2, .1)
    return dict(lrs=list(map(float, learn.recorder.lrs)))
@case
def one_micro_batch(): return fit_small(GradientAccumulation(4*W))
class SumLoss(nn.MSELoss):
    def forward(self, pred, targ): return super().forward(pred, targ).float()/64
@case
def sums(): return fit_small(GradientAccumulation(16*W), loss_func=SumLoss(reduction='sum'))
@case
def tokens_ignored(): return train(token_learner([], nn.CrossEntropyLoss()))
@case
def tokens_weighted(): return train(token_learner([], nn.CrossEntropyLoss(weight=tensor([1., 2., 3., 0.5]).double())))
@case
def cut_short(): return fit_small(GradientAccumulation(16*W), [ShortEpochCallback(pct=0.4, short_valid=False)])
@case
def cut_short_adam(): return fit_small(GradientAccumulation(16*W), [ShortEpochCallback(pct=0.4, short_valid=False)], opt_func=partial(Adam, wd=0.))
@case
def skip_before(): return fit_small(GradientAccumulation(8*W), [SkipBatch('after_pred')])
@case
def skip_after(): return fit_small(GradientAccumulation(8*W), [SkipBatch('before_step')])
@case
def clip(): return fit_small(GradientAccumulation(16*W), [GradientClip(0.05)])
@case
def static_graph(): return fit_small(GradientAccumulation(16*W), static_graph=True)
@case
def find_unused_parameters(): return fit_small(GradientAccumulation(16*W), find_unused_parameters=True)
@case
def gradient_as_bucket_view():
    opt_func = partial(OptimWrapper, opt=torch.optim.SGD)
    return fit_small(GradientAccumulation(16*W), opt_func=opt_func, gradient_as_bucket_view=True)
class SyncNorm(nn.Module):
    "What nn.SyncBatchNorm does in training, which PyTorch only has for GPUs: its forward and its backward pass talk"
    def forward(self, x):
        mean,sqr_mean = (all_reduce_with_grad(o.mean(0))/W for o in (x, x**2))
        return (x-mean)/(sqr_mean-mean**2+1e-5).sqrt()

def norm_model(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), norm, nn.Linear(8, 1)).double()
@case
def norm_with_sync(): return fit_small(GradientAccumulation(16*W), m=norm_model(SyncNorm()))
@case
def norm_without_sync(): return fit_small(GradientAccumulation(16*W), m=norm_model(nn.BatchNorm1d(8, affine=False)), sync_bn=False)
@case
def fastai(): return fit_small(FastaiGradientAccumulation(16), m=model().float(), loss_func=MSELossFlat())
def fit_by_hand(m, loss_func=mse, **kwargs):
    "A model that was wrapped by its user, outside of `distrib_ctx`"
    learn = make_learner(4, cbs=GradientAccumulation(16*W, **kwargs), m=m, loss_func=loss_func)
    learn.dls.loaders = [DistributedDL(dl) for dl in learn.dls.loaders]
    return train(learn, in_ctx=False)
@case
def by_hand(): return fit_by_hand(DistributedDataParallel(model()))
@case
def interrupted():
    "Whether DDP averages in each backward pass of a fit that is interrupted in mid-window, and afterwards"
    m,seen = DistributedDataParallel(model()),[]
    class Stop(Callback):
        def after_backward(self):
            seen.append(m.require_backward_grad_sync)
            if self.iter == 5: raise KeyboardInterrupt
    try: train(make_learner(4, cbs=[GradientAccumulation(16*W), Stop()], m=m), in_ctx=False)
    except KeyboardInterrupt: pass
    return seen,m.require_backward_grad_sync
def fit_sharded(**kwargs):
    m,mesh = model(),init_device_mesh('cpu', (W,))
    for o in m: fully_shard(o, mesh=mesh)
    return fit_by_hand(fully_shard(m, mesh=mesh), **kwargs)
@case
def sharded(): return fit_sharded()
def spread(pred, targ): return ((pred-pred.mean(0))**2).mean().float() + mse(pred, targ)  # compares the samples of a process
@case
def whole_batch(): return train(make_learner(16, loss_func=spread))
@case
def gradient_cache(): return train(make_learner(16, loss_func=spread, cbs=GradientCache(5)))
class Carries(nn.Module):
    "Continues each row where the batch before stopped"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn,self.out = nn.GRU(5, 8, batch_first=True).double(),nn.Linear(8, 1).double()
        self.reset()
    def reset(self): self.state = None
    def forward(self, x):
        fit_rows(self, len(x))
        y,state = self.rnn(x[:,None], self.state)
        self.state = state.detach()
        return self.out(y[:,0])

@hidden_state.register(Carries)
def fit_rows(m, n):
    if m.state is not None and m.state.shape[1] != n: m.reset()
    return dict(state=1)

@case
def carries_whole(): return train(make_learner(16, m=Carries(), cbs=ModelResetter()))
@case
def carries_pieces(): return train(make_learner(16, m=Carries(), cbs=[ModelResetter(), GradientAccumulation(micro_batch_size=5)]))
@case
def carries_cache(): return train(make_learner(16, m=Carries(), cbs=[ModelResetter(), GradientCache(5)]))
@case
def forgets(): return train(make_learner(16, m=Carries(), cbs=Callback(before_batch=lambda self: self.learn.model.module.reset())))
@case
def gradient_cache_sharded():
    try: fit(make_learner(16, m=fully_shard(model(), mesh=init_device_mesh('cpu', (W,))), cbs=GradientCache(5)), 1)
    except ValueError as e: return str(e)
@case
def auto_sharded():
    try: fit(make_learner(16, m=fully_shard(model(), mesh=init_device_mesh('cpu', (W,))), cbs=GradientAccumulation(16*W, micro_batch_size='auto')), 1)
    except ValueError as e: return str(e)
def normed():
    torch.manual_seed(0)
    def block(): return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(.2), nn.Linear(8, 5), nn.Tanh())
    return nn.Sequential(block(), block(), nn.Linear(5, 1)).double()
def train_normed(*cbs):
    learn = make_learner(16, m=normed(), opt_func=Adam, cbs=[*cbs])
    torch.manual_seed(5)
    return dict(train(learn, sync_bn=False), buffers=[o.clone() for o in learn.model.buffers()])
@case
def whole_normed(): return train_normed()
@case
def checkpointed(): return train_normed(all_blocks())
@case
def checkpointed_sharded():
    try: fit(make_learner(16, m=fully_shard(normed(), mesh=init_device_mesh('cpu', (W,))), cbs=all_blocks()), 1)
    except ValueError as e: return str(e)
@case
def exact_sharded():
    try: fit(make_learner(16, m=fully_shard(normed(), mesh=init_device_mesh('cpu', (W,))), cbs=GradientAccumulation(exact=True)), 1)
    except ValueError as e: return str(e)
def kept():
    whole = Activations()
    train_normed(whole)
    return whole.mb
@case
def exact():
    "Process 0 has nine tenths of the memory that a batch takes, the others half of it"
    accum = GradientAccumulation(exact=True)
    return train_normed(Activations(kept()*(.5 if rank_distrib() else .9)), accum) | dict(blocks=accum.way.level)
class Shrinks(Callback):
    "From the third batch on, the last process has less memory"
    order = Activations.order-1
    def __init__(self, mb): self.mb = mb
    def before_batch(self):
        if self.training and self.train_iter == 2 and rank_distrib() == W-1: self.activations.limit = self.mb
@case
def exact_later():
    mb = kept()
    return train_normed(Activations(mb*1.1), Shrinks(mb*.6), GradientAccumulation(exact=True))
@case
def blocks_alone():
    cb = ActivationCheckpointing()
    return train_normed(Activations(kept()*(.5 if rank_distrib() else 1.1)), cb) | dict(blocks=cb.level)
class LaterLimited(Limited):
    "The last process has memory for 5 samples from its third pass on, the others for 16"
    passes = 0
    def forward(self, x):
        LaterLimited.passes += self.training
        if self.training and len(x) > (5 if rank_distrib() == W-1 and LaterLimited.passes > 2 else 16): raise torch.OutOfMemoryError('CUDA out of memory')
        return self.m(x)
@case
def auto_later():
    accum = GradientAccumulation(16*W, micro_batch_size='auto')
    return fit_small(accum, bs=16, m=LaterLimited()) | dict(micro_bs=accum.micro_bs)
def over_processes(*tensors):
    o = torch.stack([t.mean(0) for t in tensors])
    dist.all_reduce(o)
    return o/W
class Synced(torch.autograd.Function):
    "As PyTorch's function of nn.SyncBatchNorm, which CPUs do not have: it talks, and keeps its tensors afterwards"
    @staticmethod
    def forward(ctx, x):
        mean,sqr_mean = over_processes(x, x**2)
        std = (sqr_mean-mean**2+1e-5).sqrt()
        res = (x-mean)/std
        ctx.save_for_backward(res, std)
        return res.clone()
    @staticmethod
    def backward(ctx, grad):
        res,std = ctx.saved_tensors
        a,b = over_processes(grad, grad*res)
        return (grad-a-res*b)/std
class GlooSyncNorm(nn.SyncBatchNorm):
    def forward(self, x): return Synced.apply(x) if self.training else x
def train_synced(*cbs):
    torch.manual_seed(0)
    m = nn.Sequential(*[nn.Sequential(nn.Linear(5, 8), GlooSyncNorm(8, affine=False), nn.ReLU(inplace=True), nn.Linear(8, 5), nn.Tanh()) for _ in range(2)], nn.Linear(5, 1)).double()
    with unittest.mock.patch.object(DistributedDataParallel, '_passing_sync_batchnorm_handle'):  # which wants a GPU
        return train(make_learner(16, m=m, opt_func=Adam, cbs=[*cbs]), sync_bn=False)
@case
def synced_whole(): return train_synced()
@case
def synced_exact():
    "The last process runs out of memory in mid-pass, where the others wait for its statistics"
    whole,accum = Activations(),GradientAccumulation(exact=True)
    train_synced(whole)
    return train_synced(Activations(whole.mb*(.6 if rank_distrib() == W-1 else 1.1)), accum) | dict(blocks=accum.way.level)
class NanOnce:
    "A loss that is NaN in one process, at its sixth batch"
    def __init__(self): self.n = 0
    def __call__(self, pred, targ):
        self.n += 1
        return mse(pred, targ)*(math.nan if rank_distrib() == 1 and self.n == 6 else 1)
@case
def nonfinite(): return fit_small(GradientAccumulation(16*W, skip_nonfinite=True), loss_func=NanOnce())
@case
def sharded_nonfinite(): return fit_sharded(loss_func=NanOnce(), skip_nonfinite=True)

@case
def float16(): return fit_small(GradientAccumulation(16*W), [CpuMixedPrecision(init_scale=256.)], m=model().float(), loss_func=MSELossFlat())
def half_loss(pred, targ): return F.mse_loss(pred.float(), targ.float())
@case
def bfloat16(): return fit_small(GradientAccumulation(16*W), m=model().bfloat16(), loss_func=half_loss)
@case
def bfloat16_cut_short():
    return fit_small(GradientAccumulation(16*W), [ShortEpochCallback(pct=0.4, short_valid=False)], m=model().bfloat16(), loss_func=half_loss)
@case
def bfloat16_one_micro_batch(): return fit_small(GradientAccumulation(4*W), m=model().bfloat16(), loss_func=half_loss)
@case
def bfloat16_ones():
    "The gradient of the mean of 512 micro-batches with a gradient of 1 each, of a model that is wrapped and of one in shards"
    res = []
    for wrap in DistributedDataParallel,partial(fully_shard, mesh=init_device_mesh('cpu', (W,))):
        m = nn.Linear(1, 1, bias=False).bfloat16()
        with torch.no_grad(): m.weight.zero_()
        ds = [(torch.ones(1).bfloat16(), torch.zeros(1))]*512*W
        learn = Learner(DataLoaders(DataLoader(ds, bs=1), DataLoader(ds[:1], bs=1)), wrap(m), lambda pred, targ: pred.float().mean(), opt_func=SGD, cbs=GradientAccumulation(512*W))
        learn.dls.loaders = [DistributedDL(dl) for dl in learn.dls.loaders]
        with quiet(learn): learn.fit(1, 1.)
        w = m.weight
        res.append((w.full_tensor() if hasattr(w, 'full_tensor') else w).item())
    return res
@case
def bfloat16_static_graph():
    return error(GradientAccumulation(16*W), m=model().bfloat16(), loss_func=half_loss, static_graph=True)
def error(accum, **kwargs):
    try: fit_small(accum, **kwargs)
    except ValueError as e: return str(e).splitlines()[-1].strip()
@case
def errors():
    return [error(GradientAccumulation(4)), error(GradientAccumulationSchedule(4*W, 4*W+4)),
            error(GradientAccumulation(4*W), gradient_as_bucket_view=True)]

@case
def some_without_gradient():
    "The first parameter has a gradient everywhere, the second in one process, the third nowhere"
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    params[0].grad = torch.full((2,), float(rank_distrib()))
    if rank_distrib() == 1: params[1].grad = torch.ones(2)
    learn = make_learner(8, m=DistributedDataParallel(model()))
    learn.opt = SGD(params, lr=0.1)
    Processes(learn).average()
    return [p.grad for p in params]

def one_fails():
    "The last process fails in the middle of a window; nobody may wait for it for ever"
    class Fail(Callback):
        def after_backward(self):
            if rank_distrib() == W-1 and self.learn.iter == 2: raise OSError('the disk is full')
    fit_small(GradientAccumulation(16*W), [Fail()])

if __name__ == '__main__':
    torch.set_num_threads(1)
    folder,*names = sys.argv[1:]
    results = {}
    for name in names or cases: results[name] = globals()[name]()
    torch.save(results, Path(folder)/f'{rank_distrib()}.pt')
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort a Python that ends: https://github.com/pytorch/pytorch/issues/190489
