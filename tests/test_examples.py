"What other libraries' guides and exercises show of gradient accumulation, against the loop that they write, in plain PyTorch"
import inspect
import pytest

from common import *

def linear(seed=0): torch.manual_seed(seed); return nn.Linear(5, 1).double()

def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)).double()

def train(m, ds, bs, cbs=None, loss_func=mse, n_epoch=1, lr=.1):
    return fit(Learner(DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds, bs=bs)), m, loss_func, opt_func=SGD, cbs=cbs), n_epoch, lr)

def cross_entropy(pred, targ): return F.cross_entropy(pred, targ).float()

def test_optax_nine_images_in_three_micro_batches():
    """Nine images, at once or 3x3, with a rate of 1e-4 for the first step and .1 for the second: a schedule that counts micro-batches would take
    the first step at .1 (https://optax.readthedocs.io/en/latest/_collections/examples/gradient_accumulation.html)"""
    torch.manual_seed(0)
    images,labels = torch.rand(9, 28, 28, 1, dtype=torch.float64),torch.randint(10, (9,))
    single = mlp()
    for lr in 1e-4, .1:
        opt = torch.optim.SGD(single.parameters(), lr=lr)
        F.cross_entropy(single(images), labels).backward()
        opt.step(); opt.zero_grad()
    cbs = [GradientAccumulation(9), ParamScheduler({'lr':lambda pct: 1e-4 if pct < .5 else .1})]
    learn = train(mlp(), list(zip(images, labels)), 3, cbs, cross_entropy, n_epoch=2)
    assert learn.recorder.lrs == [1e-4, .1]
    assert_same(weights(learn), weights(single), ROUNDING)
    assert (weights(learn)-weights(mlp())).abs().max() > 1e-3

def gradient(m, loss): return torch.autograd.grad(loss, m.weight)[0]

def test_a_backward_pass_each_or_one_for_all():
    "5+5+5+5+2 samples: the gradient of all predictions at once is that of neither the sum nor the mean of the five losses, and ours"
    x,y = data(22)
    m,parts = linear(),list(zip(x.split(5), y.split(5)))
    at_once = gradient(m, F.mse_loss(torch.cat([m(xb) for xb,_ in parts]), y))
    summed = sum(gradient(m, F.mse_loss(m(xb), yb)) for xb,yb in parts)
    learn = train(linear(), list(zip(x, y)), 5, GradientAccumulation(25))
    assert_same((m.weight-learn.model.weight).detach()/.1, at_once, ROUNDING)
    for other in summed, summed/5: assert (other-at_once).norm()/at_once.norm() > .01

def test_keras_accumulating_one_batch_changes_nothing():
    ds = list(zip(*data(20)))
    plain,one,four = train(linear(), ds, 5),train(linear(), ds, 5, GradientAccumulation(5)),train(linear(), ds, 5, GradientAccumulation(20))
    assert_same(weights(one), weights(plain))
    assert [four.train_iter, four.gradient_accumulation.opt_steps] == [4, 1]

@pytest.mark.parametrize('sizes', [(5, 5), (8, 2)])
def test_jax_the_mean_of_two_gradients(sizes):
    "Average the gradients of micro-batches A and B, weighted if their sizes differ, and take one step"
    x,y = data(10)
    m = linear()
    grads_of = [torch.autograd.grad(F.mse_loss(m(xb), yb), m.parameters()) for xb,yb in zip(x.split(sizes), y.split(sizes))]
    with torch.no_grad():
        for p,a,b in zip(m.parameters(), *grads_of, strict=True): p -= .1*(a*sizes[0]+b*sizes[1])/10
    learn = train(linear(), list(zip(x, y)), sizes[0], GradientAccumulation(2*sizes[0]))
    assert_same(weights(learn), weights(m), ROUNDING)
    assert F.mse_loss(learn.model(x), y) < F.mse_loss(linear()(x), y)

@pytest.mark.parametrize('cb,names', [
    (GradientAccumulation, 'accum_bs n_acc log_accum_batch micro_batch_size'),
    (GradientAccumulationSchedule, 'start_accum_bs final_accum_bs start finish schedule log_accum_batch micro_batch_size')])
def test_fastxtend_arguments(cb, names):
    "Its arguments, by position and by name; new ones by name only"
    ps = inspect.signature(cb).parameters.values()
    assert [o.name for o in ps if o.kind == o.POSITIONAL_OR_KEYWORD] == names.split()
