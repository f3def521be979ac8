"ActivationCheckpointing: which blocks it recomputes, when, what it says, and that it leaves nothing behind"
import gc
import weakref

import pytest
from fastai.callback.rnn import rnn_cbs
from fastai.text.all import AWD_LSTM
from fastai.text.all import awd_lstm_clas_config
from fastai.text.all import get_text_classifier
from fastai.text.models.awdlstm import WeightDropout

from benchmarks.counts import LiveBytes
from common import *
from library_models import *
from recomputed import *
from fastxtend_accum.checkpointing import checked
from fastxtend_accum.checkpointing import checkpointed
from fastxtend_accum.checkpointing import configs_with_cache
from fastxtend_accum.checkpointing import from_cpu
from fastxtend_accum.checkpointing import levels_of
from fastxtend_accum.checkpointing import sample_of
from fastxtend_accum.checkpointing import to_cpu


# A block that runs again

def test_a_block_runs_again_in_the_backward_pass_only():
    n_runs = itertools.count(1)
    layer = nn.Linear(5, 5)

    def forward(x):
        n.append(next(n_runs))
        return layer(x)

    n = []
    run = checkpointed(layer, forward)
    x = torch.randn(4, 5)
    with torch.no_grad(): run(x)
    assert n == [1]
    output = run(x)
    assert n == [1, 2]
    output.sum().backward()
    assert n == [1, 2, 3]


SAME = torch.tensor([1, -3, 0, math.nan, math.inf])


def run_twice(first_output, second_output):
    "Returns two outputs of a block that is checked"
    outputs = iter([first_output, second_output])
    run = checked(nn.Tanh(), lambda: next(outputs))
    run()
    run()


def test_equal_outputs_may_contain_nan_and_infinity():
    run_twice(SAME, SAME.clone())


@pytest.mark.parametrize('other', [
    SAME.nextafter(torch.tensor(9.)),
    SAME.nan_to_num(nan=1.),
    SAME[:3]])
def test_outputs_are_compared_bit_for_bit(other):
    "On the CPU"
    with pytest.raises(RuntimeError, match='Tanh returns other outputs when it is run again'):
        run_twice(SAME, other)


@pytest.mark.parametrize('shape', [(), (3,), (1000, 2), (2000, 4, 8)])
def test_of_a_large_output_a_sample_of_each_column_is_compared(shape):
    columns = torch.zeros(shape)
    if shape: columns += torch.arange(shape[-1])
    sample = sample_of(columns)
    assert len(sample) <= 1000
    assert set(sample.tolist()) == set(columns.flatten().tolist())


@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_a_copy_on_the_cpu_has_the_memory_layout_of_the_input(layout):
    t = torch.randn(2, 3, 4, 5).to(memory_format=layout)
    back = from_cpu(to_cpu(t))
    assert_same(back, t)
    assert back.stride() == t.stride()
    assert back.data_ptr() != t.data_ptr()


@pytest.mark.parametrize('n,offload,levels', [
    (0, False, [0]),
    (1, False, [0, 1, 2]),
    (4, False, [0, 1, 2, 4, 5]),
    (5, False, [0, 1, 2, 4, 5, 6]),
    (5, True, [0, 1, 2, 4, 5])])
def test_levels_double_up_to_all_blocks_and_then_their_inputs_are_on_the_cpu(n, offload, levels):
    assert levels_of(n, offload) == levels


def test_configurations_with_a_cache_are_found_once():
    keeps = SimpleNamespace(use_cache=True)
    m = nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Tanh())
    m[0].config = keeps
    m[1].config = keeps
    m[2].config = SimpleNamespace(use_cache=False)
    m[3].config = dict(use_cache=True)
    assert configs_with_cache(m) == [keeps]


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
    (flat, None, r'finds no blocks in Linear: name modules with blocks=lambda model: \[...\]'),
    (Deep, lambda m: [], 'no blocks in Deep: name modules with blocks='),
    (Deep, lambda m: [nn.Linear(1, 1)], 'blocks must return modules of the model, none inside another, not Linear'),
    (lambda: nn.DataParallel(Deep()), None, 'replicated DataParallel again: use DistributedDataParallel'),
    (lambda: torch.compile(Deep()), None, 'compiled OptimizedModule again: leave out torch.compile'),
    (compiled_in_place, None, 'compiled Deep again: leave out torch.compile')])
def test_a_model_whose_blocks_cannot_run_again_is_an_error_before_training(make_model, blocks, says):
    learn = regression(make_model)(cbs=all_blocks(blocks))
    before = weights(learn)
    with pytest.raises(ValueError, match=says): fit(learn, 1)
    assert_same(weights(learn), before)


class OutsideCount(Block):
    "Depends on a count that is no part of the model, and moves in all epochs from `first_epoch` on"
    count = 0
    first_epoch = 0
    epoch = 0

    def forward(self, x):
        if OutsideCount.epoch >= OutsideCount.first_epoch: OutsideCount.count += 1
        return super().forward(x/(1+OutsideCount.count))


class InPlace(Block):
    "Changes its input, which it adds to its output, too"
    def forward(self, x): return x+super().forward(F.relu_(x))


OTHER_OUTPUTS = ('OutsideCount returns other outputs when it is run again, since it depends on what it changes '
                 'outside of itself: make that a buffer, or leave it out with blocks=')
OTHER_INPUT = ('InPlace cannot be run again, since it changes its input in place: set inplace=False there, or leave '
               'it out with blocks=')


@pytest.mark.parametrize('offload', [False, True])
@pytest.mark.parametrize('kind,says', [(OutsideCount, OTHER_OUTPUTS), (InPlace, OTHER_INPUT)])
def test_a_block_that_does_not_repeat_itself_is_an_error_before_the_first_step(kind, says, offload):
    make = chain(kind)
    trained(make)  # PyTorch can train it
    learn = make(cbs=all_blocks(layers, offload))
    before = weights(learn)
    with pytest.raises(RuntimeError, match=f'^{says}'): fit(learn, 1)
    assert_same(weights(learn), before)


def test_blocks_are_checked_in_each_epoch(monkeypatch):
    monkeypatch.setattr(OutsideCount, 'first_epoch', 1)

    def set_epoch(cb): OutsideCount.epoch = cb.epoch

    learn = chain(OutsideCount)(cbs=[all_blocks(layers), Callback(before_epoch=set_epoch)])
    with pytest.raises(RuntimeError, match=OTHER_OUTPUTS): fit(learn, 3)
    assert learn.epoch == 1
    assert learn.iter == 0
    assert len(losses(learn)) == 3, 'the first epoch has run'


# Which blocks run again

@pytest.mark.parametrize('blocks', [
    layers,
    lambda m: m.layers[1:3],
    lambda m: m,
    lambda m: (layer[0] for layer in m.layers),
    lambda m: nn.ModuleDict(dict(a=m.layers[0], b=m.layers[2]))])
def test_blocks_that_a_user_names(blocks):
    assert_same_fit(trained(deep, all_blocks(blocks)), trained(deep))


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
    "It begins anew, since the levels are others"
    cb = ActivationCheckpointing()
    learn = mlp(cbs=cb, n_layers=8)
    fit(learn, 1, cbs=Fails('after_loss', 0, 1, 2, 3))
    assert (cb.level, len(cb.found)) == (8, 8)

    def first_two(m): return m[:2].children()
    cb.blocks = first_two
    fit(learn, 1, cbs=Fails('after_loss', 0))
    assert (cb.level, len(cb.found)) == (1, 2)


# As few as memory requires

def fits(make, limit, n_blocks):
    "Returns whether a fit that recomputes the first `n_blocks` blocks runs within `limit` MB"
    cbs = [Activations(limit)]
    if n_blocks: cbs.append(all_blocks(lambda m: m[:n_blocks].children()))
    try: trained(make, *cbs)
    except torch.OutOfMemoryError: return False
    return True


@pytest.mark.parametrize('share', [.97, .8, .6, .2])
def test_the_first_level_that_suffices_is_found(share):
    "After a pass that fails for each level below it, and then it is kept"
    make = partial(mlp, batch_norm, nn.Tanh, n_layers=20)
    plain, ours = trained_in_less(make, share, Passes)
    assert_same_fit(ours, plain)
    cb = ours.activation_checkpointing
    assert cb.levels == [0, 1, 2, 4, 8, 16, 20, 21]
    n_failed = cb.levels.index(cb.level)
    n_batches = 2
    assert len(plain.passes.sizes) == n_batches
    assert len(ours.passes.sizes) == n_batches+n_failed
    limit = share*plain.activations.mb
    assert not fits(make, limit, cb.levels[n_failed-1])
    is_on_cpu = cb.level == 21
    assert is_on_cpu == (share == .2)
    assert is_on_cpu or fits(make, limit, cb.level)


@pytest.mark.parametrize('make_cb', [ActivationCheckpointing, auto_micro_batches, auto_cache])
@pytest.mark.parametrize('make', [with_batch_norm, contrastive])
def test_where_all_fits_nothing_changes(make, make_cb):
    "As many passes as in the plain fit, and the same random numbers afterwards"
    def fitted(*cbs):
        learn = trained(make, Passes(), *cbs, n_epoch=2)
        return learn, [torch.rand(1).item(), random.random(), np.random.rand()]

    plain, next_numbers = fitted()
    ours, next_numbers_of_ours = fitted(make_cb())
    assert_same_fit(ours, plain)
    assert next_numbers_of_ours == next_numbers
    assert ours.passes.sizes == plain.passes.sizes
    assert len(plain.passes.sizes) == 4


@pytest.mark.parametrize('make_cb', [auto_micro_batches, auto_cache])
def test_blocks_are_recomputed_before_batches_are_split(make_cb):
    "So that more samples fit at a time, in whichever order the callbacks were added"
    make = regression(partial(Deep, width=64, n=8), bs=64, n=64)

    def micro_bs(*others, comes_first=True):
        cb = make_cb()
        cbs = [cb, *others] if comes_first else [*others, cb]
        trained(make, Activations(limit=.2), *cbs)
        return cb.micro_bs

    size = micro_bs(all_blocks())
    assert micro_bs() < size
    for comes_first in (True, False):
        adapting = ActivationCheckpointing()
        assert micro_bs(adapting, comes_first=comes_first) >= size
        assert adapting.level >= 8


# What it says

def said(learn, capsys):
    fit_aloud(learn, 2)
    return capsys.readouterr().out


@pytest.mark.parametrize('share,blocks,says', [
    (1.1, None, 'fits in memory'),
    (.6, None, 'fits if [24] of 4 blocks are recomputed'),
    (.9, lambda m: [m[2], m[3]], 'fits if 1 of 2 blocks are recomputed'),
    (.3, None, 'fits if 4 of 4 blocks are recomputed, and what they keep is on the CPU')])
def test_one_line_says_how_a_batch_fits(share, blocks, says, capsys):
    limit = share*trained(with_batch_norm, Activations()).activations.mb
    learn = with_batch_norm(cbs=[Activations(limit), ActivationCheckpointing(blocks)])
    assert re.fullmatch(f'ActivationCheckpointing: each batch of 32 {says}\n', said(learn, capsys))
    assert said(learn, capsys) == '', 'nothing has changed'


def test_a_later_fit_searches_again_only_if_other_weights_are_trained(capsys):
    limit = .6*trained(with_batch_norm, Activations()).activations.mb
    passes = Passes()
    learn = with_batch_norm(
        cbs=[Activations(limit), ActivationCheckpointing(), passes],
        splitter=lambda m: [params(m[:2]), params(m[2:])])

    def n_failed():
        fit(learn, 2)
        return len(passes.sizes)-4

    n_searching = n_failed()
    assert n_searching > 0
    assert n_failed() == 0
    learn.freeze()
    assert n_failed() > 0
    assert n_failed() == 0
    learn.unfreeze()
    assert n_failed() == n_searching
    assert n_failed() == 0


@pytest.mark.parametrize('make,says', [
    (with_batch_norm, 'not even with all blocks recomputed and their inputs on the CPU'),
    (regression(flat), 'ActivationCheckpointing finds no blocks in Linear: name modules with blocks=')])
def test_an_error_says_what_else_makes_a_batch_fit(make, says):
    "It comes before the first step, and leaves nothing behind"
    learn = make(cbs=[Activations(1e-6), ActivationCheckpointing()])
    before = state(learn)
    remedy = r"GradientAccumulation\(micro_batch_size='auto'\) splits it"
    with pytest.raises(RuntimeError, match=f'a batch of 32 does not fit in memory: {says}.*; {remedy}') as error:
        fit(learn, 1)
    assert type(error.value.__cause__) is torch.OutOfMemoryError
    for name, value in state(learn).items(): assert torch.equal(value, before[name])
    learn.activations.end()  # after an error it has a forward pass of its own until the next fit
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


@pytest.mark.thin(3)
@pytest.mark.parametrize('make,at_most', [(resnet, .25), (convnext, .3), (regnet, .5), (densenet, .3)])
def test_a_forward_pass_keeps_a_share_of_the_bytes(make, at_most):
    plain = fit(make(cbs=LiveAfterForward()), 1).live_after_forward
    ours = fit(make(cbs=[LiveAfterForward(), all_blocks()]), 1).live_after_forward
    assert 0 < ours.now < at_most*plain.now
    assert ours.peak < plain.peak


@pytest.mark.parametrize('offload', [False, True])
def test_offloaded_inputs_are_not_on_the_device(offload):
    "Nothing refers to what a block was given but its copy on the CPU"
    inputs = []
    is_alive = []

    def note(module, args):
        inputs.append(weakref.ref(args[0].untyped_storage()))

    def look(cb):
        is_alive.extend(o() is not None for o in inputs)
        raise CancelFitException

    learn = deep(cbs=[all_blocks(layers, offload), Callback(after_loss=look)])
    for layer in learn.model.layers: layer.register_forward_pre_hook(note)
    fit(learn, 1)
    assert len(is_alive) == 4
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
    auto_micro_batches,
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


@pytest.mark.parametrize('make_cb', [
    partial(ActivationCheckpointing, both_layers),
    auto_micro_batches,
    auto_cache])
def test_nothing_of_a_pass_is_kept_in_which_memory_ran_out(make_cb):
    gc.freeze()
    learn = trained(recurrent, make_cb(), MadeWeights(), Fails('after_loss', 0, 1))
    n_alive = learn.made_weights.n_alive
    assert n_alive[:3] == [0, 0, 0], 'two passes have failed before the third one'
    assert len(n_alive) >= 8+2
    assert max(n_alive) <= 4


# Faults

def test_an_interrupt_while_a_block_runs_again_leaves_nothing():
    learn = deep(cbs=all_blocks(layers))
    n_runs = itertools.count()

    def interrupt_the_second_run(*args):
        if next(n_runs): raise KeyboardInterrupt

    learn.model.layers[1].register_forward_hook(interrupt_the_second_run)
    with pytest.raises(KeyboardInterrupt): fit(learn, 1)
    assert_own_forward(learn)


IN_A_BATCH = EVENTS[3:10]


class ZeroesGradients(Callback):
    "fastai keeps those of a fit that has ended early"
    def before_fit(self): self.opt.zero_grad()


@pytest.mark.thin(5)
@pytest.mark.parametrize('event', EVENTS)
@pytest.mark.parametrize('exc', [KeyboardInterrupt, *CANCELS, CancelStepException, CancelBackwardException])
def test_a_fault_leaves_nothing_to_the_next_fit(exc, event):
    def fitted_after_a_fault(*cbs):
        set_seed(0)
        make = regression(partial(Deep, p=0., n=2), n=64)
        nth = 2 if event in IN_A_BATCH else 1
        fault = Fault(exc, event, nth, order=7)
        learn = make(cbs=[*cbs, fault])
        try: fit(learn, 1)
        except BaseException: pass
        assert_own_forward(learn)
        assert fault.count >= nth or event == 'after_cancel_batch'
        learn.remove_cb(fault)
        return fit(learn, 1)

    assert_same_fit(fitted_after_a_fault(all_blocks()), fitted_after_a_fault(ZeroesGradients()))


# Validation

def test_validation_batches_are_split_if_memory_runs_out():
    "A text classifier has a `reset`, but puts its own state in order"
    def trained_with_room_for(most):
        def fail_above(module, args):
            tokens = args[0][0]
            if not module.training and len(tokens) > most: raise torch.OutOfMemoryError('CUDA out of memory')

        torch.manual_seed(0)
        texts = torch.randint(2, 20, (32, 12))
        labels = torch.randint(2, (32,))
        samples = list(zip(texts, labels))
        dls = DataLoaders(DataLoader(samples, bs=8), DataLoader(samples, bs=16))
        config = awd_lstm_clas_config | dict(n_layers=1, emb_sz=8, n_hid=12)
        m = get_text_classifier(AWD_LSTM, 20, 2, seq_len=6, config=config)
        m[1].register_forward_pre_hook(fail_above)
        cbs = [*rnn_cbs(2, 1), ActivationCheckpointing()]
        return fit(Learner(dls, m, CrossEntropyLossFlat(), cbs=cbs), 1)

    float32 = 1e-6
    whole = trained_with_room_for(16)
    split = trained_with_room_for(8)
    assert_same(floats(split.recorder.values), floats(whole.recorder.values), float32)
    with quiet(split), quiet(whole):
        assert_same(split.get_preds()[0], whole.get_preds()[0], float32)
