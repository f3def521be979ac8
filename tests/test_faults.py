"Gradients that are no numbers, loaders that lie"

import pytest
import torch.utils.data as tud

from common import *


# skip_nonfinite

class Poison(Callback):
    "Multiplies the gradient by `value` at some training iterations"
    def __init__(self, value, iters): self.value,self.iters = value,iters
    def before_backward(self):
        if self.train_iter in self.iters: self.learn.loss_grad = self.loss_grad*self.value

@pytest.mark.parametrize('value', [float('nan'), float('inf'), -float('inf')])
@pytest.mark.parametrize('accum', [GradientAccumulation, lambda bs, **kw: GradientAccumulationSchedule(bs, bs, **kw)])
def test_skip_nonfinite(value, accum):
    "Two of six windows are struck, one of them twice: they are dropped, the others are as ever, and it is said once"
    cb = accum(32, skip_nonfinite=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        learn = fit(make_learner(8, cbs=[cb, Poison(value, (4,6,19))]), 2)
    assert cb.n_skipped == 2 and cb.opt_steps == len(losses(learn)) == 4
    assert len([o for o in said if 'NaN or infinity' in str(o.message)]) == 1
    steps = [o for i,o in enumerate(windows(96, 8, 32, 'step', 2)) if i not in (1,4)]
    assert_same(weights(learn), reference(steps, 96, sgd)[0], ROUNDING)
    fit(learn, 1)
    assert cb.n_skipped == 1  # counted anew: iterations 4 and 6 are of one window

def test_without_it_the_step_is_taken_as_fastai_does():
    learn = fit(make_learner(8, cbs=[GradientAccumulation(32), Poison(float('nan'), (4,))]), 1)
    assert weights(learn).isnan().any() and learn.gradient_accumulation.n_skipped == 0

def test_skip_nonfinite_changes_nothing_else():
    a,b = (fit(make_learner(8, cbs=GradientAccumulation(32, skip_nonfinite=o))) for o in (False, True))
    assert_same(weights(a), weights(b))

def test_one_look_at_the_gradient_a_window(monkeypatch):
    looks = []
    monkeypatch.setattr(torch.nn.utils, 'get_total_norm', lambda *args, _f=torch.nn.utils.get_total_norm: looks.append(1) or _f(*args))
    fit(make_learner(8, cbs=GradientAccumulation(32, skip_nonfinite=True)))
    assert len(looks) == 9+6  # in the first window, its size is compared before each of three micro-batches, too

def test_large_gradients_are_no_infinities():
    "A norm of squares would overflow"
    learn = make_learner(8, m=model().float(), loss_func=MSELossFlat(), cbs=[GradientAccumulation(32, skip_nonfinite=True), Poison(1e30, (2,))])
    assert fit(learn, 1, lr=1e-30).gradient_accumulation.n_skipped == 0

# Loaders

class Lying:
    "Says it has `says` batches"
    bs = 8
    def __init__(self, n, says): self.dl,self.says = DataLoader(list(zip(*data(n))), bs=8),says
    def __iter__(self): return iter(self.dl)
    def __len__(self): return self.says

def lying(n, says, remainder):
    learn = make_learner(8, cbs=GradientAccumulation(32, remainder=remainder))
    learn.dls = DataLoaders(Lying(n, says), learn.dls.valid)
    return learn

@pytest.mark.parametrize('says', [1, 5, 40])
@pytest.mark.parametrize('remainder', ['step','carry','drop'])
def test_a_loader_whose_length_lies(says, remainder):
    learn = fit(lying(88, says, remainder), 2)
    steps = [(idxs, 0) for idxs,_ in windows(88, 8, 32, remainder, 2)]
    assert learn.recorder.accum_bs == [len(o) for o,_ in steps]
    assert_same(weights(learn), reference(steps, 88, sgd)[0], ROUNDING)

@pytest.mark.parametrize('remainder', ['step','carry'])
def test_an_empty_loader(remainder):
    learn = fit(make_learner(8, n=5, drop_last=True, cbs=GradientAccumulation(32, remainder=remainder)), 2)
    assert losses(learn) == [] and [o[0] for o in learn.recorder.values] == [None]*2
    assert_same(weights(learn), weights(model()))

class Stream(tud.IterableDataset):
    "44 samples, one after the other"
    def __iter__(self): return zip(*data(44))
class SizedStream(Stream):
    def __len__(self): return 44

def test_an_iterable_dataset():
    def learner(ds): return Learner(DataLoaders(tud.DataLoader(ds, batch_size=8), make_learner(8).dls.valid), model(), mse, opt_func=SGD, cbs=GradientAccumulation(16))
    steps = [(idxs, 0) for idxs,_ in windows(44, 8, 16, 'step', 2)]
    assert_same(weights(fit(learner(SizedStream()), 2)), reference(steps, 44, sgd)[0], ROUNDING)
    with pytest.raises(TypeError, match='has no len'): fit(learner(Stream()), 1)  # fastai's own answer

def test_a_dataset_smaller_than_a_micro_batch():
    learn = fit(make_learner(8, n=3, cbs=GradientAccumulation(32)), 4)
    assert learn.recorder.accum_bs == [3]*4
    assert_same(weights(learn), weights(fit(make_learner(32, n=3), 4)), ROUNDING)

class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb,self.lin,self.unused = nn.EmbeddingBag(20, 5, sparse=True),nn.Linear(5, 1),nn.Linear(3, 3)
    def forward(self, x): return self.lin(self.emb(x))

def test_frozen_and_sparse_parameters():
    "An embedding with sparse gradients, and parameters without any"
    def run(bs, cbs):
        torch.manual_seed(0)
        m = Sparse().double()
        m.lin.bias.requires_grad_(False)
        ds = list(zip(torch.randint(20, (88, 4)), data(88)[1]))
        dls = DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds[:8], bs=8))
        opt_func = partial(OptimWrapper, opt=torch.optim.SGD)
        return fit(Learner(dls, m, mse, opt_func=opt_func, cbs=cbs, splitter=lambda m: [p for p in m.parameters() if p.requires_grad]), 2)
    big,small = run(32, None),run(8, GradientAccumulation(32, skip_nonfinite=True))
    assert (weights(big)-weights(run(8, None))).abs().max() > 1e-3
    assert_same(weights(small), weights(big), ROUNDING)
