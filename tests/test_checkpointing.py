"ActivationCheckpointing: which blocks it recomputes, when, what it says, and that it leaves nothing behind"
import gc
import weakref

import pytest
from fastai.text.models.awdlstm import WeightDropout

from benchmarks.counts import LiveBytes
from common import *
from library_models import *
from limited_memory import OutOfMemory
from recomputed import *
from fastxtend_accum.checkpointing import configs_with_cache


def test_configurations_with_a_cache_are_found():
    keeps = SimpleNamespace(use_cache=True)
    m = nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Tanh())
    for layer, config in zip(m, (keeps, keeps, SimpleNamespace(use_cache=False), dict(use_cache=True))):
        setattr(layer, 'config', config)
    assert configs_with_cache(m) == [keeps, keeps]


# What is refused

@pytest.mark.parametrize('name', ['blocks', 'offload', 'adapt'])
def test_an_argument_of_another_type_is_an_error(name):
    with pytest.raises(TypeError, match=f'{name} must be .*, not 3'):
        ActivationCheckpointing(**{name: 3})


def flat():
    "Returns a model without blocks"
    return nn.Linear(5, 1).double()


def compiled_in_place():
    m = Deep()
    m.compile()
    return m


@pytest.mark.parametrize('make_model,blocks,says', [
    (flat, None, r'finds no blocks in Linear: choose modules with blocks=lambda model: \[...\]'),
    (Deep, lambda m: [], 'finds no blocks in Deep'),
    (Deep, lambda m: [nn.Linear(1, 1)], 'blocks must return modules of the model, not a Linear'),
    (lambda: nn.DataParallel(Deep()), None, 'replicated DataParallel again: .* use DistributedDataParallel'),
    (lambda: torch.compile(Deep()), None, 'compiled, .* OptimizedModule again: leave out torch.compile'),
    (compiled_in_place, None, 'compiled, .* Deep again: leave out torch.compile')])
def test_a_model_whose_blocks_cannot_run_again_is_an_error_before_training(make_model, blocks, says):
    learn = regression(make_model)(cbs=ActivationCheckpointing(blocks, adapt=False))
    assert_refused(learn, ValueError, says)


def test_a_model_without_blocks_trains_if_its_batches_fit():
    def train(*cbs):
        set_seed(0)
        return fit(regression(flat)(cbs=cbs), 1)

    plain = train()
    ours = train(ActivationCheckpointing())
    set_seed(0)
    assert_apart(plain, flat())
    assert_same_weights(ours, plain)


def test_a_model_without_blocks_whose_batches_do_not_fit_runs_once():
    "Nothing can be moved to the CPU either"
    fails = OutOfMemory('after_pred', 1)
    learn = regression(flat)(cbs=[fails, ActivationCheckpointing()])
    with pytest.raises(RuntimeError, match='no way left .* ActivationCheckpointing.blocks='): fit(learn, 1)
    assert not learn.activation_checkpointing.offload


# Which blocks run again

def deep_in_lists():
    torch.manual_seed(0)
    layers = [Residual(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(3)]
    return nn.Sequential(Residual(*layers), nn.Linear(5, 1)).double()


@pytest.mark.parametrize('make_model,blocks', [
    (Deep, layers),
    (Deep, lambda m: [m.layers[0], m.layers[1][3], *m.layers[1:3]]),  # one inside another
    (deep_in_lists, None)])
def test_blocks_that_a_user_names_or_that_are_found(make_model, blocks):
    make = regression(make_model)
    ours = trained(make, all_blocks(blocks))
    assert ours.activation_checkpointing.n_recomputed
    assert_same_fit(ours, trained(make))


@pytest.mark.parametrize('trains,n_runs', [(True, 2), (False, 1)])
def test_a_block_runs_twice_unless_it_is_frozen(trains, n_runs):
    learn = deep(cbs=all_blocks(layers))
    learn.model.stem.requires_grad_(trains)
    learn.model.layers.requires_grad_(trains)
    runs = []

    def note(module, *args):
        if module.training: runs.append(module)

    for layer in learn.model.layers: layer[0].register_forward_hook(note)
    fit(learn, 1)
    n_batches = 3
    assert len(runs) == 4*n_batches*n_runs


def test_other_blocks_in_the_next_fit():
    "It recomputes no more of them than there are"
    cb = ActivationCheckpointing()
    learn = mlp(cbs=cb, n_layers=8)
    fit(learn, 1, cbs=OutOfMemory('after_loss', 1, 2, 3, 4))
    assert (cb.n_recomputed, len(cb.found)) == (8, 8)

    def first_two(m): return m[:2].children()
    cb.blocks = first_two
    fit(learn, 1)
    assert (cb.n_recomputed, len(cb.found)) == (2, 2)


# As few as memory requires

STEPS = [0, 1, 2, 4, 8, 16, 20]  # blocks that are recomputed of 20


@pytest.mark.parametrize('share', [.97, .6, .2])
def test_the_first_number_of_blocks_that_suffices_is_found(share):
    "After a pass that fails for each number below it, and then it is kept; at last, inputs are on the CPU"
    make = partial(mlp, batch_norm, nn.Tanh, n_layers=20)
    plain, ours = trained_in_less(make, share, Passes)
    assert_same_fit(ours, plain)
    cb = ours.activation_checkpointing
    n_failed = STEPS.index(cb.n_recomputed)+cb.offload
    n_batches = 2
    assert len(plain.passes.sizes) == n_batches
    assert len(ours.passes.sizes) == n_batches+n_failed
    assert n_failed > 0
    assert cb.offload == (share == .2)


@pytest.mark.parametrize('make_cb', [ActivationCheckpointing, split_auto, auto_cache])
def test_where_all_fits_nothing_changes(make_cb):
    "As many passes as in the plain fit, and the same random numbers afterwards"
    def fitted(*cbs):
        learn = trained(contrastive, Passes(), *cbs, n_epoch=2)
        return learn, [torch.rand(1).item(), random.random(), np.random.rand()]

    plain, next_numbers = fitted()
    ours, next_numbers_of_ours = fitted(make_cb())
    assert_same_fit(ours, plain)
    assert next_numbers_of_ours == next_numbers
    assert ours.passes.sizes == plain.passes.sizes
    assert len(plain.passes.sizes) == 4


# What it says

def said(learn, capsys):
    fit_aloud(learn, 2)
    return capsys.readouterr().out


@pytest.mark.parametrize('share,blocks,says', [
    (1.1, None, 'fits with 0 of 4 blocks recomputed'),
    (.6, None, 'fits with [24] of 4 blocks recomputed'),
    (.9, lambda m: [m[2], m[3]], 'fits with 1 of 2 blocks recomputed'),
    (.3, None, 'fits with 4 of 4 blocks recomputed, and what they keep moved to the CPU')])
def test_one_line_says_how_a_batch_fits(share, blocks, says, capsys):
    "A further fit tries nothing, and says nothing"
    limit = share*trained(with_batch_norm, Activations()).activations.mb
    passes = Passes()
    learn = with_batch_norm(cbs=[Activations(limit), ActivationCheckpointing(blocks), passes])
    assert re.fullmatch(f'ActivationCheckpointing: each batch of 32 {says}\n', said(learn, capsys))
    assert (len(passes.sizes) > 4) == (share < 1)
    assert said(learn, capsys) == ''
    assert len(passes.sizes) == 4


def test_an_error_says_what_else_makes_a_batch_fit():
    "It comes before the first step, and leaves nothing behind"
    learn = with_batch_norm(cbs=[Activations(1e-6), ActivationCheckpointing()])
    before = state(learn)
    with pytest.raises(RuntimeError, match=r"GradientAccumulation\(micro_batch_size='auto'\)") as error:
        fit(learn, 1)
    assert 'The error was OutOfMemoryError(' in str(error.value)
    for name, value in state(learn).items(): assert torch.equal(value, before[name])
    learn.activations.after_fit()  # after an error it has a forward pass of its own until the next fit
    assert_own_forward(learn)


# What it keeps

class LiveAfterForward(Callback):
    "Bytes alive after a forward pass, `now`, and the most in it, `peak`, without those of the model"
    run_valid = False

    def before_batch(self):
        self.live = LiveBytes(self.model)
        self.live.__enter__()

    def after_loss(self):
        self.now = self.live.now
        self.peak = self.live.peak
        self.live.__exit__(None, None, None)
        raise CancelFitException


@pytest.mark.parametrize('make,at_most', [(resnet, .25), (densenet, .3)])
def test_a_forward_pass_keeps_a_share_of_the_bytes(make, at_most):
    plain = fit(make(cbs=LiveAfterForward()), 1).live_after_forward
    ours = fit(make(cbs=[LiveAfterForward(), all_blocks()]), 1).live_after_forward
    assert 0 < ours.now < at_most*plain.now
    assert ours.peak < plain.peak


class KeywordBlock(nn.Module):
    "Takes its inputs by name, in a dict"
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, *, inputs): return self.layer(inputs['x']).tanh()


class ChainOfKeywords(Chain):
    def call_layer(self, layer, x): return layer(inputs=dict(x=x))


def input_of(args, kwargs): return kwargs['inputs']['x'] if kwargs else args[0]


@pytest.mark.parametrize('offload', [False, True])
@pytest.mark.parametrize('make', [deep, regression(partial(ChainOfKeywords, KeywordBlock))])
def test_offloaded_inputs_are_not_on_the_device(make, offload, monkeypatch):
    "Nothing refers to what a block was given but its copy on the CPU. Here this is the device, so PyTorch makes none"
    def save_copies(): return torch.autograd.graph.saved_tensors_hooks(torch.clone, noop)
    monkeypatch.setattr('fastxtend_accum.checkpointing.save_on_cpu', save_copies)
    inputs = []
    is_alive = []

    def note(module, args, kwargs):
        inputs.append(weakref.ref(input_of(args, kwargs).untyped_storage()))

    def look(cb):
        is_alive.extend(o() is not None for o in inputs)
        raise CancelFitException

    learn = make(cbs=[all_blocks(layers, offload), Callback(after_loss=look)])
    for layer in learn.model.layers: layer.register_forward_pre_hook(note, with_kwargs=True)
    fit(learn, 1)
    assert len(is_alive) == len(learn.model.layers)
    assert set(is_alive) == {not offload}


class Recurrent(nn.Module):
    "Makes a new weight in each forward pass"
    def __init__(self):
        super().__init__()
        self.rnn = WeightDropout(nn.LSTM(5, 5, batch_first=True), .5)

    def forward(self, x):
        return self.rnn(x[:, None])[0][:, 0]


class MadeWeights(Callback):
    "Counts how many weights of earlier passes are alive after each pass"
    run_valid = False

    def before_fit(self):
        self.weights = []
        self.n_alive = []

    def after_pred(self):
        gc.collect()
        self.n_alive.append(sum(o() is not None for o in self.weights))
        for m in self.model.modules():
            if isinstance(m, nn.LSTM): self.weights.append(weakref.ref(m.weight_hh_l0))


def recurrent(**kwargs):
    "Returns a Learner with two layers of which each makes a weight"
    m = nn.Sequential(nn.Sequential(Recurrent(), Recurrent()), nn.Linear(5, 1)).double()
    return make_learner(8, n=64, m=m, **kwargs)


def both_layers(m):
    return list(m[0])


@pytest.mark.parametrize('make_cb', [
    ActivationCheckpointing,
    partial(all_blocks, both_layers),
    split_auto,
    auto_cache,
    partial(GradientCache, 4),
    partial(GradientAccumulation, micro_batch_size=4),
    partial(GradientAccumulation, 16)])
def test_nothing_of_earlier_passes_is_kept(make_cb):
    "But for a weight of each layer, to put back; also after an error, once the Learner has let go of the batch"
    gc.freeze()  # or each `gc.collect` goes through all of PyTorch
    learn = trained(recurrent, make_cb(), MadeWeights())
    made = learn.made_weights
    assert len(made.n_alive) >= 8
    assert max(made.n_alive) <= 2
    with pytest.raises(ValueError): fit(learn, 1, cbs=Fault(ValueError, 'after_loss', nth=5, order=100))
    learn.pred = None
    learn.loss = None
    learn.loss_grad = None
    made.after_pred()
    assert len(made.weights) > 10
    assert made.n_alive[-1] <= 4  # those of the last pass, too
