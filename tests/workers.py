"What each process of `test_processes.py` does: `torchrun --nproc-per-node 2 tests/workers.py FOLDER [CASE]`"
import io
import os
import sys
from contextlib import redirect_stdout
from datetime import timedelta
from unittest.mock import patch as patched

import torch.distributed as dist
from accelerate import DistributedDataParallelKwargs
from fastai.distributed import *
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from common import *
from fastxtend_accum.demo import Activations
from fastxtend_accum.windows.processes import Processes

W = num_distrib()
rank = rank_distrib()


def broadcast_on_cpu(self, order, rank):
    "fastai moves the order of the samples to the GPU"
    order = LongTensor(order)
    dist.broadcast(order, rank)
    return order.tolist()


DistributedDL._broadcast = broadcast_on_cpu


# Fits

class Traffic(Callback):
    "What the processes exchange in training: DDP's buckets, and the rest; and the buffers after it"
    order = DistributedTrainer.order+1

    def before_fit(self):
        self.buckets = []
        self.others = []
        self.held = []
        self.n_passes = 0
        if isinstance(self.model, DistributedDataParallel):
            self.model.register_comm_hook(None, self.note_bucket)
        self.all_reduce = dist.all_reduce
        dist.all_reduce = self.note_and_reduce

    def before_backward(self):
        self.n_passes += 1

    def note_bucket(self, state, bucket):
        self.buckets.append((self.n_passes, bucket.buffer().nbytes))
        return allreduce_hook(state, bucket)

    def note_and_reduce(self, o, *args, async_op=False, **kwargs):
        if not async_op: self.others.append(o.nbytes)  # the communication hook's are
        return self.all_reduce(o, *args, async_op=async_op, **kwargs)

    def after_train(self):
        self.held += [o.clone() for o in self.model.buffers()]

    def after_fit(self):
        dist.all_reduce = self.all_reduce


@contextmanager
def together(learn, in_ctx=True, **kwargs):
    "DDP by fastai, with these arguments; `in_ctx=False`: a model that was wrapped by its user"
    context = learn.no_bar()
    if in_ctx:
        handlers = [DistributedDataParallelKwargs(**kwargs)] if kwargs else None
        context = learn.distrib_ctx(cpu=True, sync_bn=False, kwargs_handlers=handlers)
    else:
        learn.dls.loaders = [DistributedDL(dl) for dl in learn.dls.loaders]
    with learn.no_bar(), context: yield


def whole_weights(m):
    "Returns all weights in one vector, also of a sharded model"
    res = []
    for p in m.parameters():
        if hasattr(p, 'full_tensor'): p = p.full_tensor()
        res.append(p.detach().flatten().clone())
    return torch.cat(res)


def adapted(learn):
    "Returns the size of micro-batches, and the number of recomputed blocks, that this process has found"
    sizes = [cb.micro_bs for cb in learn.cbs if getattr(cb, 'micro_bs', None)]
    return sizes+[cb.n_recomputed for cb in learn.cbs if hasattr(cb, 'n_recomputed')]


def train(learn, method='fit', **kwargs):
    "Trains, and returns what came of it"
    traffic = Traffic()
    learn.add_cb(traffic)
    before = whole_weights(learn.model)
    with learn.no_logging(), together(learn, **kwargs): getattr(learn, method)(2, .1)
    after = whole_weights(learn.model)
    return dict(
        weights=after,
        moved=(after-before).abs().max(),
        buffers=traffic.held,
        losses=losses(learn),
        lrs=learn.recorder.lrs,
        accum_bs=getattr(learn.recorder, 'accum_bs', None),
        adapted=adapted(learn),
        grads=sum(float(g.abs().sum()) for g in grads(learn)),
        buckets=traffic.buckets,
        others=traffic.others)


def accum(n=16, **kwargs):
    "Accumulates over `n` samples of each process"
    return GradientAccumulation(n*W, **kwargs)


def small(*cbs, n=96, bs=4, opt_func=SGD, m=None, loss_func=mse, **kwargs):
    learn = make_learner(bs, n=n, cbs=[*cbs], opt_func=opt_func, m=m, loss_func=loss_func)
    return train(learn, **kwargs)


def wrapped_small(m, *cbs, **kwargs):
    return small(*cbs, m=m, in_ctx=False, **kwargs)


def shard(m):
    return fully_shard(m, mesh=init_device_mesh('cpu', (W,)))


def sharded_small(m, *cbs):
    for o in m: shard(o)
    return wrapped_small(shard(m), *cbs)


class SkipBatch(Callback):
    "Cancels loader batch `nth` of each epoch"
    def __init__(self, nth):
        self.nth = nth

    def before_epoch(self):
        self.n = 0

    def before_batch(self):
        self.n += 1

    def after_pred(self):
        if self.training and self.n == self.nth: raise CancelBatchException


class OwnBackward(Callback):
    "Runs the backward pass in the place of fastai"
    def before_backward(self):
        self.learn.loss_grad.backward()
        raise CancelBackwardException


def nan_once():
    "Returns a model with a NaN in the gradient of one row, in one process, at its sixth batch"
    m = model()
    n_batches = itertools.count(1)
    factors = torch.ones(8)
    factors[0] = math.nan

    def hook(m, args, out):
        if m.training and rank == 1 and next(n_batches) == 6: out.register_hook(lambda grad: grad*factors)
    m[0].register_forward_hook(hook)
    return m


# Memory

class Limited(nn.Module):
    "Has memory for `most` samples in training; validation, which keeps no graph, needs less"
    def __init__(self, most, m=None):
        super().__init__()
        self.m = m or model()
        self.most = most

    def forward(self, x):
        if self.training and len(x) > self.most: raise torch.OutOfMemoryError('CUDA out of memory')
        return self.m(x)


def unequal():
    return Limited(5 if rank else 9)


def auto(n=16, **kwargs):
    return accum(n, micro_batch_size='auto', **kwargs)


def spread(pred, targ):
    "Compares samples"
    distances = pred-pred.mean(0)
    return (distances**2).mean().float() + mse(pred, targ)


def whole(*cbs, **kwargs):
    return small(*cbs, bs=16, loss_func=spread, **kwargs)


def norm_block(norm):
    return nn.Sequential(nn.Linear(5, 8), norm(8), nn.Dropout(.2), nn.Linear(8, 5), nn.Tanh())


def blocks_model(norm=nn.BatchNorm1d):
    torch.manual_seed(0)
    return nn.Sequential(norm_block(norm), norm_block(norm), nn.Linear(5, 1)).double()


def normed(*cbs):
    m = blocks_model()
    torch.manual_seed(5)
    return small(*cbs, bs=16, m=m, opt_func=Adam)


def blocks():
    "With memory for .9 of what a batch takes in process 0, and for half of it in the others"
    measures = Activations()
    normed(measures)
    share = .5 if rank else .9
    return normed(Activations(measures.mb*share), ActivationCheckpointing())


# Losses

class SumLoss(nn.MSELoss):
    def forward(self, pred, targ):
        return super().forward(pred, targ).float()/64


def token_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 4)).double()


def on_tokens(loss_func, bs=4, m=None, n_ignored=0, **kwargs):
    "Labels of which most are ignored, and unevenly; in each process the first `n_ignored` samples have none"
    x, y = tokens()
    for o in y.chunk(W): o[:n_ignored] = -100
    samples = list(zip(x, y))

    def flat(pred, targ):
        return loss_func(pred.flatten(0, 1), targ.flatten()).float()

    def items(learn):
        return loss_items(loss_func, learn.pred.flatten(0, 1), learn.y.flatten())

    dls = DataLoaders(DataLoader(samples, bs=bs), DataLoader(samples[:8], bs=4))
    cb = accum(8, num_items=items, **kwargs)
    return train(Learner(dls, m or token_model(), flat, opt_func=SGD, cbs=cb))


def tokens_auto(**kwargs):
    "One process splits its batches"
    m = Limited(8 if rank else 4, token_model())
    return on_tokens(nn.CrossEntropyLoss(), 8, m, micro_batch_size='auto', **kwargs)


# Other cases

def lines(m, **kwargs):
    "Returns what a fit prints"
    printed = io.StringIO()
    learn = make_learner(4, cbs=accum(4, micro_batch_size=2), m=m)
    with together(learn, **kwargs), override_attr(learn, 'logger', [].append), redirect_stdout(printed): learn.fit(1)
    return printed.getvalue().splitlines()


def interrupted():
    "Returns whether DDP averages in each backward pass of a fit interrupted in mid-window, and afterwards"
    m = DistributedDataParallel(model())
    seen = []

    def stop_at_sixth(self):
        seen.append(m.require_backward_grad_sync)
        if len(seen) == 6: raise KeyboardInterrupt

    try: wrapped_small(m, accum(), Callback(after_backward=stop_at_sixth))
    except KeyboardInterrupt: return seen, m.require_backward_grad_sync


def some_without_gradient():
    "The first parameter has a gradient everywhere, the second in one process, the third nowhere"
    m = nn.ParameterList([torch.zeros(2) for _ in range(3)])
    params = list(m)
    params[0].grad = torch.full((2,), float(rank))
    if rank == 1: params[1].grad = torch.ones(2)
    Processes(make_learner(8, m=DistributedDataParallel(m))).average_grads()
    return [p.grad for p in params]


def error(*cbs, **kwargs):
    "Returns the error of a fit"
    try: small(*cbs, **kwargs)
    except ValueError as e: return str(e).splitlines()[-1].strip()


def sync_norm_error(cb):
    "DDP wants a GPU for SyncBatchNorm"
    with patched.object(DistributedDataParallel, '_passing_sync_batchnorm_handle'):
        return error(cb, bs=16, m=blocks_model(nn.SyncBatchNorm))


def errors():
    res = [error(accum(6)), error(accum(), static_graph=True)]
    for cb in (GradientCache(5), auto(), ActivationCheckpointing()):
        res.append(error(cb, m=shard(blocks_model()), in_ctx=False))
    half_blocks = shard(blocks_model().bfloat16())
    res.append(error(accum(), m=half_blocks, in_ctx=False))
    return res+[sync_norm_error(ActivationCheckpointing()), sync_norm_error(auto())]


def one_fails():
    "One process fails in mid-window"
    def fail_at_third(self):
        if rank == W-1 and self.train_iter == 0 and self.n_passes == 3: raise OSError('the disk is full')

    def count(self):
        self.n_passes = getattr(self, 'n_passes', 0)+1

    small(accum(), Callback(before_backward=count, after_backward=fail_at_third))


float16_scale = dict(init_scale=256.)

CASES = dict(
    constant=lambda: small(accum()),
    one_batch=lambda: small(accum(4)),
    own_backward=lambda: small(accum(4), OwnBackward()),
    pieces=lambda: small(accum(4), bs=16),
    float16=lambda: small(accum(), CpuMixedPrecision(**float16_scale), m=model().float(), loss_func=MSELossFlat()),
    loader_batches=lambda: small(accum(log_accum_batch=False)),
    scheduled=lambda: small(GradientAccumulationSchedule(4*W, 16*W, finish=1.)),
    one_cycle=lambda: small(accum(12), n=101, method='fit_one_cycle'),
    ragged=lambda: small(accum(12), n=101),
    carry=lambda: small(accum(12, remainder='carry'), n=101),
    skip_before=lambda: small(accum(8), SkipBatch(2)),
    nonfinite=lambda: small(accum(skip_nonfinite=True), m=nan_once()),
    # How the model is wrapped
    find_unused_parameters=lambda: small(accum(), find_unused_parameters=True),
    by_hand=lambda: wrapped_small(DistributedDataParallel(model()), accum()),
    sharded=lambda: sharded_small(model(), accum()),
    nonfinite_sharded=lambda: sharded_small(nan_once(), accum(skip_nonfinite=True)),
    # Memory
    auto=lambda: small(auto(), bs=16, m=unequal()),
    whole=whole,
    cached=lambda: whole(GradientCache(5)),
    normed=normed,
    all_blocks=lambda: normed(all_blocks()),
    blocks=blocks,
    # Losses and gradients
    sums=lambda: small(accum(), loss_func=SumLoss(reduction='sum')),
    tokens=lambda: on_tokens(nn.CrossEntropyLoss()),
    tokens_auto=tokens_auto,
    no_items=lambda: tokens_auto(n_ignored=8),
    clip=lambda: small(accum(), GradientClip(.05)),
    # What else is to be known
    lines=lambda: lines(model()) + lines(blocks_model()),
    interrupted=interrupted,
    some_without_gradient=some_without_gradient,
    errors=errors)


def run_cases():
    "Runs the cases that the command line names, or all of CASES, and writes what each returns"
    folder, *names = sys.argv[1:]
    if names == ['one_fails']: one_fails()
    results = {}
    for name, run in CASES.items():
        is_wanted = not names or name in names
        if is_wanted: results[name] = run()
    torch.save(results, Path(folder)/f'{rank}.pt')


if __name__ == '__main__':
    torch.set_num_threads(1)
    dist.init_process_group('gloo', timeout=timedelta(seconds=90))
    run_cases()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort a Python that ends: https://github.com/pytorch/pytorch/issues/190489
