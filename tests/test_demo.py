"Activations, which the pages use: what it measures, and that it leaves nothing behind"
import gc,weakref
from copy import deepcopy
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

def nothing_is_left(learn):
    return not (saves_tensors() or learn.model._forward_pre_hooks or nn.modules.module._global_forward_pre_hooks)

def run(learn):
    try: fit(learn, 2)
    except BaseException as e: assert 'on purpose' in str(e)
    assert nothing_is_left(learn)

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
    assert nothing_is_left(learn)
    learn = make_learner(8, cbs=Activations(1e-4))
    with pytest.raises(torch.OutOfMemoryError, match='more than 0.0001 MB'): fit(learn, 1)
    assert nothing_is_left(learn)

@pytest.mark.parametrize('cbs', [lambda: GradientAccumulation(micro_batch_size='auto'), lambda: GradientAccumulation(exact=True)])
def test_the_graph_of_a_pass_that_fails_is_freed(cbs):
    "PyTorch keeps the graph of an operation whose output a hook of saved_tensors_hooks has returned as it is, or for which the hook has failed"
    outputs = []
    def note(m, args, out): outputs.append(weakref.ref(out))
    m = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh()) for _ in range(3)), nn.Linear(5, 1)).double()
    for o in m[2].modules():
        if isinstance(o, nn.Tanh): o.register_forward_hook(note)
    whole = fit(make_learner(32, m=deepcopy(m), cbs=Activations()), 1).activations.mb
    outputs.clear()
    learn = fit(make_learner(32, m=m, cbs=[cbs(), Activations(whole*.7)]), 1)
    assert len(outputs) > 2*len(learn.recorder.losses)  # some passes have failed, or blocks have run again
    learn.pred = learn.loss_grad = learn.loss = None
    gc.collect()
    assert [o for o in outputs if o() is not None] == []
