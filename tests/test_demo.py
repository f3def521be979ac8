"The demo, and Activations: what it measures, and that it leaves nothing behind"
import pytest

from common import *
from fastxtend_accum import demo
from fastxtend_accum.demo import Activations


# The demo

@pytest.fixture(scope='module')
def learners(): return demo.run_demo()


@pytest.fixture(scope='module')
def table(learners): return demo.results(learners)


@pytest.mark.long
def test_the_table_counts_passes_and_steps(table):
    counts = table[['forward passes', 'optimizer steps']].values.tolist()
    assert dict(zip(table.index, counts)) == {
        'batches of 32': [1024, 1024],
        'batches of 64': [512, 512],
        'batches of 123': [267, 267],
        'batches of 512': [64, 64],
        '32 to 512': [266, 266],
        '16 x 32': [1024, 64]}
    assert table['seconds'].min() > 0


@pytest.mark.long
def test_growing_has_the_loss_of_small_batches_in_a_quarter_of_their_steps(table):
    "And a constant batch with as many steps has not"
    loss = table['validation loss']
    assert loss['32 to 512'] < loss['batches of 32']*1.1
    assert loss['batches of 123'] > loss['32 to 512']*1.25
    assert loss['batches of 512'] > loss['32 to 512']*10


@pytest.mark.long
def test_the_command_prints_its_table_and_saves_its_picture(learners, monkeypatch, capsys):
    monkeypatch.setattr(demo, 'run_demo', lambda: learners)
    demo.main()
    said = capsys.readouterr().out
    for name in learners: assert name in said
    assert 'This is one seed.' in said
    assert Path('accumulation.png').stat().st_size > 10_000


# What Activations measures

MB = 2**20


@pytest.mark.parametrize('bs', [8, 32])
def test_a_forward_pass_in_training_keeps_inputs_and_outputs_of_tanh(bs):
    "5 numbers of a sample, and 8, which the next layer keeps, too; not weights, and not those of validation"
    learn = fit(make_learner(bs, cbs=Activations()), 1)
    assert learn.activations.mb == bs*(5+8)*8/MB


def test_a_micro_batch_keeps_its_own_outputs():
    "Its inputs are a part of the batch, which is in memory anyway"
    learn = fit(make_learner(32, cbs=[Activations(), GradientAccumulation(micro_batch_size=4)]), 1)
    assert learn.activations.mb == (32*5+4*8)*8/MB


def test_memory_runs_out_as_soon_as_the_limit_is_reached():
    "The input and two outputs are 21 numbers of a sample: no further layer runs. The next fit has its memory again"
    m = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), *[nn.Tanh() for _ in range(4)], nn.Linear(8, 1)).double()
    called = []
    for i, layer in enumerate(m): layer.register_forward_hook(lambda *args, i=i: called.append(i))
    limit = 8*20*8/MB
    cb = Activations(limit)
    learn = make_learner(8, m=m, cbs=cb)
    with pytest.raises(torch.OutOfMemoryError, match='out of memory: more than .* MB of activations'): fit(learn, 1)
    assert called == [0, 1, 2]
    assert_clean()
    cb.limit = math.inf
    fit(learn, 1)
    assert cb.mb > limit


# What Activations leaves

def assert_clean():
    "Asserts that nobody looks at what autograd keeps, or at what modules get"
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert not nn.modules.module._global_forward_pre_hooks


class FailsOnce(nn.Module):
    "A layer that fails in its first pass"
    n_calls = 0
    def forward(self, x):
        self.n_calls += 1
        if self.n_calls == 1: raise ValueError('on purpose')
        return x


def test_an_error_in_a_layer_leaves_nothing():
    "And the next fit measures as ever"
    m = nn.Sequential(FailsOnce(), *model())
    learn = make_learner(8, m=m, cbs=[Activations(), GradientAccumulation(16)])
    with pytest.raises(ValueError, match='on purpose'): fit(learn, 1)
    assert_clean()
    fit(learn, 1)
    assert learn.activations.mb > 0
    assert_clean()
    assert 'forward' not in vars(m)
