"What running a model or a loss can change is copied and restored"
import pytest

from common import *
from stateful import *
from fastxtend_accum.windows.state import Snapshot, attribute_dicts


def inputs():
    return data(6)[0]


# Layers

def two_runs(kind):
    "Returns a new layer of `kind`, and what it returns in two runs one after the other, as it should"
    set_seed(0)
    layer = kind()
    expected = [layer(inputs()), layer(inputs())]
    assert not torch.equal(*expected), 'nothing has changed'
    set_seed(0)
    return kind(), *expected


@pytest.mark.parametrize('kind', STATEFUL)
def test_a_layer_begins_again_in_a_further_run_which_leaves_no_trace_and_once_its_state_is_restored(kind):
    "However often: PyTorch's `checkpoint` enters the same context in each backward pass"
    layer, first_output, second_output = two_runs(kind)
    snapshot = Snapshot(nn.Sequential(layer))
    assert_same(layer(inputs()), first_output)
    for _ in range(2):
        with snapshot: assert_same(layer(inputs()), first_output)
    assert_same(layer(inputs()), second_output)
    snapshot.restore()
    for expected in (first_output, second_output): assert_same(layer(inputs()), expected)


@pytest.mark.parametrize('kind', OUT_OF_REACH)
def test_the_copy_is_shallow(kind):
    "What an attribute refers to goes on: the items of a tuple or list"
    layer, first_output, second_output = two_runs(kind)
    snapshot = Snapshot(layer)
    assert_same(layer(inputs()), first_output)
    snapshot.restore()
    assert_same(layer(inputs()), second_output)


def test_the_graph_of_the_first_run_outlives_a_further_run():
    "It needs the buffer as the first run has left it, and PyTorch would notice that somebody has written to it"
    layer, *_ = two_runs(KeptForBackward)
    snapshot = Snapshot(layer)
    x = inputs().requires_grad_()
    output = layer(x)
    with snapshot: layer(x).sum().backward()
    expected = x.grad.clone()
    x.grad = None
    output.sum().backward()
    assert_same(x.grad, expected)


# Tensors

def change_shape(t):
    t.data = torch.ones(3)


def change_type(t):
    t.data = t.data.half()


@pytest.mark.parametrize('change', [lambda t: t.add_(1), change_shape, change_type])
def test_a_buffer_is_restored_in_place(change):
    m = nn.Module()
    buffer = torch.zeros(2)
    m.register_buffer('buffer', buffer)
    snapshot = Snapshot(m)
    change(buffer)
    snapshot.restore()
    assert m.buffer is buffer
    assert_same(buffer, torch.zeros(2))


def test_a_backward_pass_may_need_a_buffer_that_is_restored():
    layer = BufferByData()
    snapshot = Snapshot(layer)
    x = inputs().requires_grad_()
    output = x*layer.mean
    layer.mean.data.add_(1)
    snapshot.restore()
    output.sum().backward()
    assert_same(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize('value', [
    tensor(math.nan).expand(3),  # PyTorch refuses to write to it, since several of its numbers are one in memory
    torch.eye(3).to_sparse(),
    nn.Parameter(torch.zeros(3)).exp()])
def test_a_tensor_that_cannot_be_written_to_may_be_an_attribute(value):
    layer = Number()
    layer.kept = value
    snapshot = Snapshot(layer)
    layer(inputs())
    with snapshot: assert layer.n == 0
    assert layer.n == 1
    snapshot.restore()
    assert layer.n == 0
    assert layer.kept is value


def test_trained_weights_are_not_copied():
    layer = nn.Linear(5, 5)
    snapshot = Snapshot(layer)
    with torch.no_grad(): layer.weight.zero_()
    snapshot.restore()
    assert not layer.weight.any()


# Losses

class CountsCalls:
    "A loss with an attribute, one that appears, and one that vanishes"
    def __init__(self):
        self.calls = 0
        self.is_new = True

    def __call__(self):
        self.calls += 1
        self.last = 'call'
        del self.is_new

    def method(self): self()


def in_loss_of_fastai(o):
    loss = BaseLoss(nn.MSELoss)
    loss.func = o
    return loss


def test_the_attributes_of_a_loss_of_fastai_are_restored():
    "Its own, and not only those of the loss of PyTorch inside"
    loss = BaseLoss(nn.MSELoss)
    loss.n = 0
    snapshot = Snapshot(loss)
    loss.n = 1
    with snapshot: assert loss.n == 0


def test_a_loss_of_torch_jit_has_no_state_that_can_be_copied():
    assert attribute_dicts(torch.jit.script(nn.MSELoss())) == []


@pytest.mark.parametrize('wrap', [
    noop,
    partial,
    lambda o: o.method,
    lambda o: partial(o.method),
    lambda o: partial(in_loss_of_fastai(o))])
def test_the_attributes_of_a_loss_are_restored_through_what_wraps_it(wrap):
    loss = CountsCalls()
    snapshot = Snapshot(wrap(loss), mse)
    loss()
    with snapshot: assert vars(loss) == dict(calls=0, is_new=True)
    assert vars(loss) == dict(calls=1, last='call')
    snapshot.restore()
    assert vars(loss) == dict(calls=0, is_new=True)


class ClassOfLosses:
    @classmethod
    def mse(cls, pred, targ): return mse(pred, targ)


def test_the_state_of_a_callback_with_a_function_is_its_own():
    cb = Callback()
    cb.func = mse
    cb.n = 0
    snapshot = Snapshot(cb)
    cb.n = 5
    snapshot.restore()
    assert cb.n == 0


def test_a_class_method_has_no_state():
    snapshot = Snapshot(ClassOfLosses.mse)
    with snapshot: assert ClassOfLosses.mse(tensor(1.), tensor(3.)) == 4
    snapshot.restore()
