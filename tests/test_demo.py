"Activations, which the pages use: what it measures, and that it leaves nothing behind"
import pytest

from common import *
from fastxtend_accum.demo import Activations
from test_life import CANCELS, Fault

EVENTS = ['before_train','before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step',
          'after_batch','after_train','before_validate','after_epoch','after_fit']
ways = dict(plain=lambda: [], accumulated=lambda: [GradientAccumulation(16)], pieces=lambda: [GradientAccumulation(16, micro_batch_size=4)])

class Breaks(nn.Module):
    "A model or loss that raises `exc` in its `nth` call in training"
    def __init__(self, f, exc, nth): super().__init__(); self.f,self.exc,self.nth,self.count = f,exc,nth,0
    def forward(self, *args):
        res = self.f(*args)
        self.count += 1
        if self.count == self.nth: raise self.exc('on purpose')
        return res

def saves_tensors(): return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # somebody looks at what autograd keeps

def run(learn):
    try: fit(learn, 2)
    except BaseException as e: assert 'on purpose' in str(e)
    assert not saves_tensors() and not learn.model._forward_pre_hooks

@pytest.mark.thin(3)
@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('exc', [ZeroDivisionError, KeyboardInterrupt, *CANCELS])
@pytest.mark.parametrize('event', EVENTS)
def test_nothing_is_left_after_a_fault_in_an_event(event, exc, way):
    for order in -20,7:
        fault = Fault(exc, event, 1 if event == 'after_fit' else 2, order)
        learn = make_learner(8, cbs=[Activations(), fault, *ways[way]()])
        run(learn)
        assert fault.count >= fault.nth
        learn.remove_cb(fault)
        fit(learn, 1)
        assert learn.activations.mb > 0

@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('exc', [ZeroDivisionError, KeyboardInterrupt, *CANCELS])
@pytest.mark.parametrize('where', ['model', 'loss'])
def test_nothing_is_left_after_a_fault_in_the_forward_pass(where, exc, way):
    m,loss = model(),MSELossFlat()
    nth = 2 if where == 'model' else 1  # the check of the loss calls it more often
    if where == 'model': m = Breaks(m, exc, nth)
    else: loss = Breaks(loss, exc, nth)
    learn = make_learner(8, m=m, loss_func=loss, cbs=[Activations(), *ways[way]()])
    run(learn)
    assert (loss if where == 'loss' else m).count >= nth
    other = fit(make_learner(8, cbs=Activations()), 1)  # another Learner of the same process
    assert other.activations.mb > 0

def test_nothing_is_left_when_it_is_removed_or_its_limit_is_reached():
    learn = make_learner(8, cbs=Activations())
    fit(learn, 1, cbs=Callback(after_pred=lambda self: self.learn.remove_cb(Activations)))
    assert not saves_tensors() and not learn.model._forward_pre_hooks
    learn = make_learner(8, cbs=Activations(1e-4))
    with pytest.raises(torch.OutOfMemoryError, match='more than 0.0001 MB'): fit(learn, 1)
    assert not saves_tensors() and not learn.model._forward_pre_hooks
