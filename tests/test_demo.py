"The demo, and Activations: what it measures, and that it leaves nothing behind"
import pytest

from common import *
from fastxtend_accum import demo
from fastxtend_accum.demo import Activations


# The demo

@pytest.fixture(scope='module')
def learners():
    "Those of a demo of one epoch"
    return demo.run_demo(1)


def test_the_table_counts_passes_steps_and_entries(learners):
    table = demo.results(learners).set_index('run')
    sizes = learners['32 to 512'].recorder.accum_bs
    n = len(sizes)
    expected = {  # loader batch, forward passes, optimizer steps, log entries
        'batches of 32': [32, 48, 48, 48],
        'batches of 32, rate falls': [32, 48, 48, 48],
        'batches of 512': [512, 3, 3, 3],
        '16 x 32': [32, 48, 3, 3],
        '32 to 512': [32, 48, n, n],
        'log_accum_batch=False': [32, 48, n, 48]}
    counts = table[['loader batch', 'forward passes', 'optimizer steps', 'log entries']]
    assert dict(zip(table.index, counts.values.tolist())) == expected
    assert 3 < n < 48


def test_a_window_grows_from_32_to_512_samples(learners):
    sizes = learners['32 to 512'].recorder.accum_bs
    assert sum(sizes) == 1536
    *full, last = sizes
    assert full == sorted(full)
    assert full[0] == 32
    assert 256 < max(full) <= 512
    assert last <= 512


def test_accumulated_batches_give_the_weights_of_the_large_batch(learners):
    float32 = 1e-5
    large = learners['batches of 512']
    assert demo.weight_difference(learners['16 x 32'], large) < float32
    assert demo.weight_difference(learners['batches of 32'], large) > 1e-3
    assert demo.weight_difference(learners['32 to 512'], learners['log_accum_batch=False']) == 0


def test_the_learning_rate_falls_in_one_run_only(learners):
    for name, learn in learners.items():
        rates = learn.recorder.lrs
        if name == 'batches of 32, rate falls':
            assert rates == sorted(rates, reverse=True)
            assert rates[0] == 1e-2 > rates[-1]
        else: assert set(rates) == {1e-2}


def test_the_picture_shows_sizes_and_losses(learners):
    sizes, compared, logs = demo.plot_results(learners).axes
    steps = sizes.patches[0].get_data().values
    assert list(steps) == learners['32 to 512'].recorder.accum_bs
    large, small = [line.get_ydata() for line in compared.lines]
    assert_same(large, small, 1e-5)
    assert len(small) == 3
    of_batches, of_windows = [len(line.get_ydata()) for line in logs.lines]
    assert of_batches == 48
    assert of_windows == len(steps)


def test_the_command_prints_its_table_and_saves_its_picture(learners, monkeypatch, capsys):
    monkeypatch.setattr(demo, 'run_demo', lambda: learners)
    demo.main()
    said = capsys.readouterr().out
    for name in learners: assert name in said
    sizes = ' '.join(str(o) for o in learners['32 to 512'].recorder.accum_bs)
    assert f'samples in each step of 32 to 512: {sizes}\n' in said
    assert Path('accumulation.png').stat().st_size > 10_000


@pytest.mark.parametrize('in_terminal', [True, False])
def test_a_terminal_shows_a_progress_bar(in_terminal, monkeypatch, capsys):
    one_run = {'batches of 512': (512, None)}
    monkeypatch.setattr(demo, 'demo_runs', lambda: one_run)
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: in_terminal)
    demo.run_demo(2)
    said = capsys.readouterr().out
    assert ('[2/2 ' in said) == in_terminal
    assert in_terminal or said == ''


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


def test_it_measures_the_model_inside_of_a_wrapper():
    "Ours runs without the wrapper, in which processes communicate"
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = model()

        def forward(self, x): return self.module(x)

    learn = fit(make_learner(8, m=Wrapper(), cbs=Activations()), 1)
    assert learn.activations.mb == 8*(5+8)*8/MB


def chain(n_layers):
    layers = []
    for _ in range(n_layers): layers += [nn.Linear(5, 5), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(5, 1)).double()


def test_memory_runs_out_as_soon_as_the_limit_is_reached():
    "No further layer runs; the next fit has its memory again"
    m = chain(6)
    called = []
    for i, layer in enumerate(m): layer.register_forward_hook(lambda *args, i=i: called.append(i))
    cb = Activations(limit=8*12*8/MB)
    learn = make_learner(8, m=m, cbs=cb)
    with pytest.raises(torch.OutOfMemoryError, match='out of memory: more than .* MB of activations'): fit(learn, 1)
    assert called == [0, 1, 2, 3], 'the input and two outputs are 15 numbers of a sample'
    assert_clean()
    cb.limit = math.inf
    fit(learn, 1)
    assert cb.mb > 8*12*8/MB


def test_a_pass_that_does_not_fit_is_not_the_most_memory():
    "If that shows after its last layer"
    limit = 8*5*8/MB
    cb = Activations(limit)
    m = nn.Sequential(nn.Linear(5, 1), nn.Tanh()).double()
    with pytest.raises(torch.OutOfMemoryError): fit(make_learner(8, m=m, cbs=cb), 1)
    assert cb.mb <= limit


# What Activations leaves

def assert_clean():
    "Asserts that nobody looks at what autograd keeps, or at what modules get"
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert not nn.modules.module._global_forward_pre_hooks


def assert_own_forward(m):
    assert not m._forward_pre_hooks
    assert not m._forward_hooks
    assert 'forward' not in vars(m)


@pytest.fixture(autouse=True)
def cleaned():
    "No test finds what another one has left"
    yield
    nn.modules.module._global_forward_pre_hooks.clear()
    while torch._C._autograd._top_saved_tensors_default_hooks(False):
        torch._C._autograd._pop_saved_tensors_default_hooks()


KINDS = dict(
    plain=lambda: [],
    windows=lambda: [GradientAccumulation(16)],
    split=lambda: [GradientAccumulation(16, micro_batch_size=4)])


@pytest.mark.thin(7)
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('exc', [ValueError, KeyboardInterrupt, CancelBatchException, CancelFitException])
@pytest.mark.parametrize('event', [*EVENTS[2:10], 'in a layer'])
def test_a_fault_leaves_nothing(event, exc, kind):
    "Once it has ended the pass; and nothing in the model, once the next fit has ended"
    n_calls = itertools.count(1)

    def fail_once(*args):
        if next(n_calls) == 1: raise exc('on purpose')

    learn = make_learner(8, cbs=[Activations(), *KINDS[kind]()])
    if event in EVENTS: learn.add_cb(Callback(**{event: fail_once}))
    else: learn.model[1].register_forward_hook(fail_once)
    try: fit(learn, 2)
    except exc as error: assert 'on purpose' in str(error)
    assert_clean()
    fit(learn, 1)
    assert next(n_calls) > 2
    assert learn.activations.mb > 0
    assert_clean()
    assert_own_forward(learn.model)


def test_it_may_be_removed_in_the_middle_of_a_fit():
    learn = make_learner(8, cbs=Activations())
    fit(learn, 1, cbs=Callback(after_pred=lambda cb: cb.learn.remove_cb(Activations)))
    assert_clean()
    assert_own_forward(learn.model)
