"What each process of `test_processes.py` does: `torchrun --nproc-per-node 2 tests/workers.py FOLDER [CASE]`"
import os, sys, unittest.mock
from datetime import timedelta

import torch.distributed as dist
from accelerate import DistributedDataParallelKwargs
from fastai.distributed import *
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from common import *
from fastxtend_accum.demo import Activations
from fastxtend_accum.windows.gradients import GradientSums, WindowParams
from fastxtend_accum.windows.processes import Processes

W,rank = num_distrib(),rank_distrib()

def broadcast_on_cpu(self, t, rank):
    "fastai moves the order of the samples to the GPU"
    t = LongTensor(t)
    dist.broadcast(t, rank)
    return t.tolist()
DistributedDL._broadcast = broadcast_on_cpu

class Traffic(Callback):
    "What the processes exchange in training: DDP's buckets, and the rest"
    order = DistributedTrainer.order+1
    def before_fit(self):
        self.buckets,self.others,self.held,self.passes = [],[],[],0
        if isinstance(self.model, DistributedDataParallel): self.model.register_comm_hook(None, self.bucket)
        self.original,dist.all_reduce = dist.all_reduce,self.all_reduce
    def before_backward(self): self.passes += 1
    def bucket(self, state, bucket):
        self.buckets.append((self.passes, bucket.buffer().nbytes))
        return allreduce_hook(state, bucket)
    def all_reduce(self, o, *args, async_op=False, **kwargs):
        if not async_op: self.others.append(o.nbytes)  # the communication hook's are
        return self.original(o, *args, async_op=async_op, **kwargs)
    def after_train(self): self.held += [o.clone() for o in self.model.buffers()]
    after_validate = after_train
    def after_fit(self): dist.all_reduce = self.original

@contextmanager
def together(learn, in_ctx=True, **kwargs):
    "DDP by fastai, with these arguments; `in_ctx=False`: a model that was wrapped by its user"
    handlers = [DistributedDataParallelKwargs(**kwargs)] if kwargs else None
    if not in_ctx: learn.dls.loaders = [DistributedDL(dl) for dl in learn.dls.loaders]
    context = learn.distrib_ctx(cpu=True, sync_bn=False, kwargs_handlers=handlers) if in_ctx else learn.no_bar()
    with learn.no_bar(), context: yield

def whole_weights(m):
    return torch.cat([getattr(p, 'full_tensor', lambda: p)().detach().flatten().clone() for p in m.parameters()])

def train(learn, method='fit', **kwargs):
    "Train, and give what came of it"
    learn.add_cb(traffic := Traffic())
    before = whole_weights(learn.model)
    with learn.no_logging(), together(learn, **kwargs): getattr(learn, method)(2, .1)
    rec,adapted = learn.recorder,[getattr(cb, o) for cb in learn.cbs for o in ('micro_bs','level') if hasattr(cb, o)]
    weights = whole_weights(learn.model)
    return dict(weights=weights, moved=(weights-before).abs().max(), buffers=traffic.held,
                losses=losses(learn), lrs=rec.lrs, accum_bs=getattr(rec, 'accum_bs', None), adapted=adapted,
                grads=sum(float(g.abs().sum()) for g in grads(learn)), buckets=traffic.buckets, others=traffic.others)

def accum(n=16, **kwargs): return GradientAccumulation(n*W, **kwargs)

def small(*cbs, n=96, bs=4, opt_func=SGD, m=None, loss_func=mse, **kwargs):
    return train(make_learner(bs, n=n, cbs=[*cbs], opt_func=opt_func, m=m, loss_func=loss_func), **kwargs)

def error(*cbs, **kwargs):
    try: small(*cbs, **kwargs)
    except ValueError as e: return str(e).splitlines()[-1].strip()

TorchSGD = partial(OptimWrapper, opt=torch.optim.SGD)

def shard(m): return fully_shard(m, mesh=init_device_mesh('cpu', (W,)))

def sharded(cb, m):
    for o in m: shard(o)
    return small(cb, m=shard(m), in_ctx=False)

class SkipBatch(Callback):
    "Cancels loader batch `nth` of each epoch, at `event`"
    def __init__(self, event, nth=2): self.nth,_ = nth,setattr(self, event, self.skip)
    def before_epoch(self): self.n = 0
    def before_batch(self): self.n += 1
    def skip(self):
        if self.training and self.n == self.nth: raise CancelBatchException

class Limited(nn.Module):
    "Memory for `most(passes)` samples"
    passes = 0
    def __init__(self, most, m=None):
        super().__init__()
        self.m,self.most = m or model(),most
    def forward(self, x):
        self.passes += self.training
        if len(x) > self.most(self.passes): raise torch.OutOfMemoryError('CUDA out of memory')
        return self.m(x)

def unequal(*args): return Limited(lambda n: 5 if rank else 9, *args)
def later(): return Limited(lambda n: 5 if rank == W-1 and n > 2 else 16)
def auto(n=16, **kwargs): return accum(n, micro_batch_size='auto', **kwargs)

def token_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 4)).double()

def on_tokens(loss_func, bs=4, m=None, n_ignored=0, **kwargs):
    "Labels of which most are ignored, and unevenly; in each process the first `n_ignored` samples have none"
    x,y = tokens()
    for o in y.chunk(W): o[:n_ignored] = -100
    ds = list(zip(x, y))
    def flat(pred, targ): return loss_func(pred.flatten(0, 1), targ.flatten()).float()
    def items(learn): return loss_items(loss_func, learn.pred.flatten(0, 1), learn.y.flatten())
    dls = DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds[:8], bs=4))
    return train(Learner(dls, m or token_model(), flat, opt_func=SGD, cbs=accum(8, num_items=items, **kwargs)))

def limited_tokens(**kwargs):
    return on_tokens(nn.CrossEntropyLoss(), 8, Limited(lambda n: 8 if rank else 4, token_model()),
                     micro_batch_size='auto', **kwargs)

class SumLoss(nn.MSELoss):
    def forward(self, pred, targ): return super().forward(pred, targ).float()/64

def nan_once():
    "A model with a NaN in the gradient of one row, in one process, at its sixth batch"
    m,n = model(),itertools.count(1)
    def hook(m, args, out):
        if m.training and rank == 1 and next(n) == 6: out.register_hook(lambda g: g*tensor([math.nan] + [1]*7))
    m[0].register_forward_hook(hook)
    return m

def spread(pred, targ):
    "Compares samples"
    return ((pred-pred.mean(0))**2).mean().float() + mse(pred, targ)

def whole(*cbs, **kwargs): return small(*cbs, bs=16, loss_func=spread, **kwargs)

def norm_model(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), norm, nn.Linear(8, 1)).double()

class Carries(nn.Module):
    "Continues each row where the batch before stopped"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn,self.out = nn.GRU(5, 8, batch_first=True).double(),nn.Linear(8, 1).double()
        self.reset()
    def reset(self): self.state = None
    def forward(self, x):
        y,state = self.rnn(x[:,None], self.state)
        self.state = state.detach()
        return self.out(y[:,0])

def carries(*cbs): return small(ModelResetter(), *cbs, bs=16, m=Carries())

def normed(norm=nn.BatchNorm1d):
    torch.manual_seed(0)
    def block(): return nn.Sequential(nn.Linear(5, 8), norm(8), nn.Dropout(.2), nn.Linear(8, 5), nn.Tanh())
    return nn.Sequential(block(), block(), nn.Linear(5, 1)).double()

def train_normed(*cbs):
    m = normed()
    torch.manual_seed(5)
    return small(*cbs, bs=16, m=m, opt_func=Adam)

class Shrinks(Callback):
    "From the third batch on, the last process has less memory"
    order = Activations.order-1
    def __init__(self, mb): self.mb = mb
    def before_batch(self):
        if self.training and self.train_iter == 2 and rank == W-1: self.activations.limit = self.mb

def with_blocks(first, others, later):
    "With memory for these shares of what a batch takes: in process 0, in the others, and in the last one later"
    train_normed(whole := Activations())
    limit = Activations(whole.mb*(others if rank else first))
    return train_normed(limit, Shrinks(whole.mb*later), ActivationCheckpointing())

def over_processes(*tensors):
    o = torch.stack([t.mean(0) for t in tensors])
    dist.all_reduce(o)
    return o/W

class Synced(torch.autograd.Function):
    "As nn.SyncBatchNorm's: in both passes, the processes wait for each other"
    @staticmethod
    def forward(ctx, x):
        mean,sqr_mean = over_processes(x, x**2)
        std = (sqr_mean-mean**2+1e-5).sqrt()
        res = (x-mean)/std
        ctx.save_for_backward(res.clone(), std)
        return res
    @staticmethod
    def backward(ctx, grad):
        res,std = ctx.saved_tensors
        a,b = over_processes(grad, grad*res)
        return (grad-a-res*b)/std

class GlooSyncNorm(nn.SyncBatchNorm):
    def forward(self, x): return Synced.apply(x) if self.training else x

sync_norm = partial(GlooSyncNorm, affine=False)

def synced(f, *cbs, bs=16, m=None, opt_func=Adam):
    "With SyncBatchNorm, for which DDP wants a GPU"
    m = m or normed(sync_norm)
    torch.manual_seed(5)
    with unittest.mock.patch.object(DistributedDataParallel, '_passing_sync_batchnorm_handle'):
        return f(*cbs, bs=bs, m=m, opt_func=opt_func)

def half_loss(pred, targ): return F.mse_loss(pred.float(), targ.float())
def half(n): return small(accum(n), m=model().bfloat16(), loss_func=half_loss)

def ones(wrap):
    "The weight after the mean of 512 loader batches with a gradient of 1 each"
    m = nn.Linear(1, 1, bias=False).bfloat16()
    with torch.no_grad(): m.weight.zero_()
    ds = [(torch.ones(1).bfloat16(), torch.zeros(1))]*512*W
    dls = DataLoaders(DataLoader(ds, bs=1), DataLoader(ds[:1], bs=1))
    learn = Learner(dls, wrap(m), lambda pred, targ: pred.float().mean(), opt_func=SGD, cbs=accum(512))
    with learn.no_logging(), together(learn, in_ctx=False): learn.fit(1, 1.)
    return whole_weights(learn.model).item()

def lines(m, **kwargs):
    "What the first window prints"
    said,learn = [],make_learner(4, cbs=accum(4, micro_batch_size=2), m=m)
    with together(learn, **kwargs), override_attr(learn, 'logger', lambda o: isinstance(o, str) and said.append(o)):
        learn.fit(1)
    return said

def interrupted():
    "Whether DDP averages in each backward pass of a fit interrupted in mid-window, and afterwards"
    m,seen = DistributedDataParallel(model()),[]
    class Stop(Callback):
        def after_backward(self):
            seen.append(m.require_backward_grad_sync)
            if len(seen) == 6: raise KeyboardInterrupt
    try: small(accum(), Stop(), m=m, in_ctx=False)
    except KeyboardInterrupt: return seen,m.require_backward_grad_sync

def some_without_gradient():
    "The first parameter has a gradient everywhere, the second in one process, the third nowhere"
    m = nn.ParameterList([torch.zeros(2) for _ in range(3)])
    params = list(m)
    params[0].grad = torch.full((2,), float(rank))
    if rank == 1: params[1].grad = torch.ones(2)
    learn = make_learner(8, m=DistributedDataParallel(m))
    learn.create_opt()
    Processes(learn).average_grads(GradientSums(WindowParams(learn)))
    return [p.grad for p in params]

def errors():
    def of_shards(cb): return error(cb, m=shard(normed()), in_ctx=False)
    return [error(GradientAccumulation(4)), error(GradientAccumulationSchedule(4*W, 4*W+4)),
            error(accum(), static_graph=True), of_shards(GradientCache(5)), of_shards(auto()),
            of_shards(ActivationCheckpointing()), synced(error, ActivationCheckpointing()), synced(error, auto())]

def one_fails():
    "One process fails in mid-window"
    class Fail(Callback):
        n = 0
        def after_backward(self):
            self.n += 1
            if rank == W-1 and self.n == 3: raise OSError('the disk is full')
    small(accum(), Fail())

def no_items():
    "The first window has no labels, and one process splits it"
    return limited_tokens(n_ignored=8)

def validation():
    "With too little memory for a validation batch in one process, of a model with buffers"
    m = Limited(lambda n: 16 if rank else 9, norm_model(nn.BatchNorm1d(8)))
    learn = make_learner(16, cbs=auto(), m=m)
    with learn.no_logging(), together(learn): return [*learn.validate()]

cases = dict(
    constant=lambda: small(accum()),
    float16=lambda: small(accum(), CpuMixedPrecision(init_scale=256.), m=model().float(), loss_func=MSELossFlat()),
    ragged=lambda: small(accum(12), n=101), carry=lambda: small(accum(12, remainder='carry'), n=101),
    drop=lambda: small(accum(12, remainder='drop'), n=101), one_batch=lambda: small(accum(4)),
    loader_batches=lambda: small(accum(log_accum_batch=False)),
    ragged_split=lambda: small(accum(12, micro_batch_size=5), bs=12, n=101),
    auto=lambda: small(auto(), bs=16, m=unequal()), auto_later=lambda: small(auto(), bs=16, m=later()),
    find_unused_parameters=lambda: small(accum(), find_unused_parameters=True),
    bucket_view=lambda: small(accum(), opt_func=TorchSGD, gradient_as_bucket_view=True),
    by_hand=lambda: small(accum(), m=DistributedDataParallel(model()), in_ctx=False),
    sharded=lambda: sharded(accum(), model()),
    scheduled=lambda: small(GradientAccumulationSchedule(4*W, 16*W, finish=1.)),
    skip_before=lambda: small(accum(8), SkipBatch('after_pred')),
    skip_step=lambda: small(accum(8), SkipBatch('before_step')),
    skip_last=lambda: small(accum(), SkipBatch('after_pred', 96//W//4)),
    nonfinite=lambda: small(accum(skip_nonfinite=True), m=nan_once()),
    nonfinite_sharded=lambda: sharded(accum(skip_nonfinite=True), nan_once()),
    one_cycle=lambda: small(accum(12), n=101, method='fit_one_cycle'),
    sums=lambda: small(accum(), loss_func=SumLoss(reduction='sum')), tokens=lambda: on_tokens(nn.CrossEntropyLoss()),
    tokens_weighted=lambda: on_tokens(nn.CrossEntropyLoss(weight=tensor([1., 2., 3., .5]).double())),
    tokens_auto=limited_tokens, clip=lambda: small(accum(), GradientClip(.05)),
    norm=lambda: small(accum(), m=norm_model(nn.BatchNorm1d(8, affine=False))),
    norm_synced=lambda: synced(small, accum(), bs=4, m=norm_model(sync_norm(8)), opt_func=SGD),
    bfloat16=lambda: half(16), bfloat16_one_batch=lambda: half(4),
    ones=lambda: [ones(DistributedDataParallel), ones(shard)],
    whole=whole, cached=lambda: whole(GradientCache(5)), cached_auto=lambda: whole(GradientCache('auto'), m=unequal()),
    carries=carries, carries_split=lambda: carries(GradientAccumulation(micro_batch_size=5)),
    carries_cached=lambda: carries(GradientCache(5)),
    forgets=lambda: carries(Callback(before_batch=lambda self: self.learn.model.module.reset())),
    normed=train_normed, all_blocks=lambda: train_normed(all_blocks()), blocks=lambda: with_blocks(.9, .5, .5),
    blocks_later=lambda: with_blocks(1.1, 1.1, .6),
    synced=lambda: synced(small), synced_blocks=lambda: synced(small, all_blocks()),
    lines=lambda: lines(model()) + lines(normed()),
    lines_sharded=lambda: [o for m in (model(), normed()) for o in lines(shard(m), in_ctx=False)],
    interrupted=interrupted, some_without_gradient=some_without_gradient, errors=errors)

if __name__ == '__main__':
    torch.set_num_threads(1)
    dist.init_process_group('gloo', timeout=timedelta(seconds=90))
    folder,*names = sys.argv[1:]
    results = {name:cases.get(name, globals().get(name))() for name in names or cases}
    torch.save(results, Path(folder)/f'{rank}.pt')
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort a Python that ends: https://github.com/pytorch/pytorch/issues/190489
