"What the FAQ says of callbacks and models that are not ours: EMA, SAM, L-BFGS, DataParallel, torch.compile, Dice"
import pytest
from fastai.callback.mixup import MixUp
from fastai.distributed import *

from common import *
from fastai.losses import *
from fastxtend_accum.demo import Activations
from fastxtend_accum.memory.out_of_memory import NothingFits

class EMA(Callback):
    "A running average of the weights, taken at `event`"
    order,run_valid = 70,False
    def __init__(self, event): setattr(self, event, self.update)
    def before_fit(self): self.avg,self.n = weights(self.learn),0
    def update(self): self.n += 1; self.avg.lerp_(weights(self.learn), .1)

class SAM(Callback):
    "Takes the step with the gradient at weights that are moved along the first one"
    order,run_valid = 10,False
    def before_step(self):
        params = list(self.model.parameters())
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        moves = [.5*p.grad/norm for p in params]
        self.move(params, moves)
        self.opt.zero_grad()
        self.loss_func(self.model(*self.xb), *self.yb).backward()
        self.move(params, [-o for o in moves])
    def move(self, params, moves):
        with torch.no_grad(): [p.add_(o) for p,o in zip(params, moves)]

class ClosureStep(Callback):
    "L-BFGS, which computes loss and gradient several times a step"
    order,run_valid = 10,False
    def before_step(self):
        def closure():
            self.opt.zero_grad()
            loss = self.loss_func(self.model(*self.xb), *self.yb)
            loss.backward()
            return loss
        self.opt.opt.step(closure)
        raise CancelStepException

lbfgs = partial(OptimWrapper, opt=torch.optim.LBFGS, max_iter=3)
second_pass = pytest.mark.parametrize('cb,opt_func', [(SAM, SGD), (ClosureStep, lbfgs)])

def run(bs, *cbs, **kwargs): return fit(make_learner(bs, cbs=list(cbs), **kwargs), 2)

@second_pass
def test_a_second_pass_over_a_batch_that_is_split_is_the_large_batchs(cb, opt_func):
    big,split = run(32, cb(), opt_func=opt_func),run(32, cb(), GradientAccumulation(micro_batch_size=8), opt_func=opt_func)
    assert_same(weights(split), weights(big), ROUNDING)
    assert (weights(big)-weights(run(32))).abs().max() > 1e-3

@second_pass
@pytest.mark.parametrize('bs,size', [(8, None), (16, 8)])
def test_a_second_pass_over_a_window_of_several_loader_batches_sees_the_last_one(cb, opt_func, bs, size):
    "Not what one wants: the FAQ says so"
    big,small = run(32, cb(), opt_func=opt_func),run(bs, cb(), GradientAccumulation(32, micro_batch_size=size), opt_func=opt_func)
    assert (weights(small)-weights(big)).abs().max() > 1e-3

def test_fastai_steps_without_a_closure():
    "L-BFGS as an `opt_func` fails in fastai alone"
    for cbs in [], [GradientAccumulation(32)]:
        with pytest.raises(TypeError, match='closure'): run(8, *cbs, opt_func=lbfgs)

@pytest.mark.parametrize('event', ['after_step', 'after_batch'])
@pytest.mark.parametrize('bs,cb', [(8, GradientAccumulation(32)), (32, GradientAccumulation(micro_batch_size=8))])
def test_an_ema_moves_once_a_step(bs, cb, event):
    "Whichever event moves it"
    big,small = run(32, EMA(event)),run(bs, EMA(event), cb)
    assert big.ema.n == 6 and (big.ema.avg-weights(model())).abs().max() > 1e-3
    assert small.ema.n == 6
    assert_same(small.ema.avg, big.ema.avg, ROUNDING)

def test_to_parallel_counts_the_loaders_samples():
    "One process, without a GPU"
    plain,parallel = make_learner(8, cbs=GradientAccumulation(32)),make_learner(8, cbs=GradientAccumulation(32)).to_parallel()
    fit(plain); fit(parallel)
    assert parallel.recorder.accum_bs == plain.recorder.accum_bs == [32]*9
    assert_same(weights(parallel), weights(plain))

@pytest.mark.parametrize('n,bs,cbs,kwargs,compiled', [
    (96, 8, [GradientAccumulation(32)], {}, 2), (96, 32, [GradientAccumulation(micro_batch_size=8)], {}, 2),
    (90, 8, [GradientAccumulation(32)], {}, 3), (96, 32, [GradientAccumulation(micro_batch_size=12)], {}, 3),
    (90, 8, [GradientAccumulation(32)], dict(dynamic=True), 2)])
def test_another_size_compiles_again(n, bs, cbs, kwargs, compiled):
    "Once for training and once for validation; then for the first micro-batch of another size, unless it is `dynamic`"
    graphs = []
    def backend(graph, inputs): graphs.append(graph); return graph.forward
    torch._dynamo.reset()
    def learner(bs, m, cbs=None):
        ds = list(zip(*data(n)))
        return Learner(DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds[:bs], bs=bs)), m, mse, opt_func=SGD, cbs=cbs)
    small = fit(learner(bs, torch.compile(model(), backend=backend, **kwargs), cbs))
    assert len(graphs) == compiled
    assert_same(weights(small), weights(fit(learner(32, model()))), ROUNDING)
    assert_moved(small)

def test_exact_cannot_recompute_a_compiled_model():
    "It trains one that fits"
    def run(*cbs):
        torch._dynamo.reset()
        return fit(make_learner(32, m=torch.compile(model(), backend=lambda graph, inputs: graph.forward), cbs=[*cbs]))
    exact = run(ActivationCheckpointing(), memory := Activations())
    assert_same(weights(exact), weights(run()))
    with pytest.raises(NothingFits, match="compiled.*micro_batch_size='auto'.* splits it"): run(ActivationCheckpointing(), Activations(memory.mb/2))

def both(dice): return lambda pred,targ: CrossEntropyLossFlat(axis=1)(pred, targ) + dice(pred, targ)

@pytest.mark.parametrize('loss_func,says', [(DiceLoss(), 'same'), (DiceLoss(reduction='mean'), 'same'), (both(DiceLoss(reduction='mean')), 'same'), (both(DiceLoss()), 'differs')])
def test_dice(loss_func, says):
    "fastai's is a sum over samples and classes, which cross-entropy is not"
    g = torch.Generator().manual_seed(0)
    pred,targ = torch.randn(13, 3, 6, 6, generator=g),torch.randint(3, (13, 6, 6), generator=g)
    found = check_loss(loss_func, [(pred[:8], targ[:8]), (pred[8:], targ[8:])])
    assert found.verdict == says and (says == 'same' or f'{found.error:.0%}' == '48%')

@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_mixup_in_half_precision(mode):
    "A batch that is split, and the whole batch: as close as half precision allows"
    def run(*cbs):
        learn = make_learner(32, n=96, m=model().float(), loss_func=MSELossFlat(), cbs=[MixUp(), CpuMixedPrecision(mode, **({'init_scale':2.**10} if mode == 'fp16' else {})), *cbs])
        torch.manual_seed(1)
        return fit(learn, 2)
    big,split,plain = run(),run(GradientAccumulation(micro_batch_size=8)),fit(make_learner(32, m=model().float(), loss_func=MSELossFlat()), 2)
    far = (weights(big)-weights(plain)).abs().max()
    assert (weights(split)-weights(big)).abs().max() < far/10 and far > 1e-3
