"The demo; and Activations: what it measures, and that it leaves nothing behind"
import pytest

from common import *
from fastxtend_accum import demo
from fastxtend_accum.demo import Activations

@pytest.mark.parametrize('in_terminal', [True, False])
def test_demo(monkeypatch, capsys, in_terminal):
    "Its table, comparison and picture; a progress bar only in a terminal"
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: in_terminal)
    learners = demo.run_demo(1)
    assert ('[5/5 ' in capsys.readouterr().out) is in_terminal
    monkeypatch.setattr(demo, 'run_demo', lambda: learners)
    demo.main()
    said,sizes = capsys.readouterr().out,learners['32 to 512'].recorder.accum_bs
    n,rows = len(sizes),demo.results(learners).values[:,1:5].T.tolist()
    assert rows == [[32, 512, 32, 32, 32], [48, 3, 48, 48, 48], [48, 3, 3, n, n], [48, 3, 3, n, 48]]
    assert sizes[0] == 32 and sizes[-2] == 512 and sum(sizes) == 1536 and ' '.join(map(str, sizes)) in said
    assert demo.weight_difference(learners['16 x 32'], learners['batches of 512']) < 1e-5  # float32
    assert demo.weight_difference(learners['batches of 32'], learners['batches of 512']) > 1e-3
    assert all(o in said for o in learners) and Path('accumulation.png').stat().st_size > 10_000
    assert [*demo.plot_results(learners).axes[0].patches[0].get_data().values] == sizes

def test_what_a_forward_pass_keeps():
    "Inputs, outputs of tanh, once, and what the loss compares: 15 numbers a sample"
    for bs in 32,8: assert fit(make_learner(bs, cbs=Activations()), 1).activations.mb == bs*15*8/2**20

def is_clean():
    "Whether nobody looks at what autograd keeps or modules get"
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is None and not nn.modules.module._global_forward_pre_hooks

@pytest.fixture
def cleaned():
    yield
    nn.modules.module._global_forward_pre_hooks.clear()
    while not is_clean(): torch._C._autograd._pop_saved_tensors_default_hooks()

kinds = dict(plain=lambda: [], windows=lambda: [GradientAccumulation(16)],
             split=lambda: [GradientAccumulation(16, micro_batch_size=4)])

@pytest.mark.thin(11)
@pytest.mark.parametrize('kind', kinds)
@pytest.mark.parametrize('exc', [ZeroDivisionError, KeyboardInterrupt, *CANCELS])
@pytest.mark.parametrize('event', [*EVENTS[2:10], *EVENTS[11:], 'in the model', 'in the loss'])
def test_nothing_is_left_after_a_fault(cleaned, event, exc, kind):
    "Nor in the model, once a fit has ended"
    def fail(*args):
        calls.append(args)
        if len(calls) == 1: raise exc('on purpose')
    calls,learn = [],make_learner(8, loss_func=MSELossFlat(), cbs=[Activations(), *kinds[kind]()])
    if event in EVENTS: learn.add_cb(Callback(**{event:fail}))
    else: (learn.model[1] if 'model' in event else learn.loss_func.func).register_forward_hook(fail)
    try: fit(learn, 2)
    except (exc, *CANCELS) as e: assert 'on purpose' in str(e)
    assert is_clean()
    fit(learn, 1)
    assert len(calls) > 1 and learn.activations.mb > 0 and is_clean() and not learn.model._forward_pre_hooks

def test_nothing_is_left_when_it_is_removed_or_its_limit_is_reached():
    learn = make_learner(8, cbs=Activations())
    fit(learn, 1, cbs=Callback(after_pred=lambda self: self.learn.remove_cb(Activations)))
    assert is_clean() and not learn.model._forward_pre_hooks
    with pytest.raises(torch.OutOfMemoryError, match='more than 0'): fit(make_learner(8, cbs=Activations(0)), 1)
    assert is_clean()
