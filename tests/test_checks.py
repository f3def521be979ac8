"Mistakes are errors in one line before training, and nothing else is one; a callback and its Learner"
import importlib

import pytest
from fastai.callback.training import GradientAccumulation as FastaiAccumulation

import fastxtend_accum.all as ours
from common import *
from fastxtend_accum.windows.checks import (
    AccumWarning, check_multiple, check_size, uses_cuda_graphs, warn_user)

NAN = float('nan')
Schedule = partial(GradientAccumulationSchedule, 16, 64)


# Arguments

@pytest.mark.parametrize('make, says', [
    (lambda: GradientAccumulation(0), 'accum_bs must be at least 1, not 0'),
    (lambda: GradientAccumulation(32.), 'accum_bs must be an int, not 32.0'),
    (lambda: GradientAccumulation(True), 'not True'),
    (lambda: GradientAccumulation(32, False), 'n_acc=False both set'),  # log_accum_batch, one place too early
    (lambda: GradientAccumulation(32, accum=3), "unexpected keyword argument 'accum'"),
    (lambda: GradientAccumulation(n_acc=32.), 'accum_bs must be an int, not 32.0'),
    (lambda: GradientAccumulation(32, None, 16), 'log_accum_batch must be True or False, not 16'),
    (lambda: GradientAccumulation(micro_batch_size='half'), "a number of samples or 'auto', not 'half'"),
    (lambda: GradientAccumulation(32, remainder='keep'), "('step', 'carry', 'drop') or None, not 'keep'"),
    (lambda: GradientAccumulation(micro_batch_size=8, remainder='carry'), 'is for windows of several batches'),
    (lambda: GradientAccumulation(32, skip_nonfinite=1), 'skip_nonfinite must be True or False'),
    (lambda: GradientAccumulation(32, verbose=1), 'verbose must be True or False'),
    (lambda: GradientAccumulation(32, num_items=5), 'num_items must be a function of the Learner'),
    (lambda: GradientCache(0), 'micro_batch_size must be at least 1'),
    (lambda: GradientCache(None), 'not None'),
    (lambda: GradientCache(8, nn.Tanh()), 'part must be a function of the model, not Tanh()'),
    (lambda: GradientAccumulationSchedule(16, 64.), 'final_accum_bs must be an int'),
    (lambda: GradientAccumulationSchedule(None, 64), 'start_accum_bs must be an int'),  # it has no default
    (lambda: Schedule(n_acc=32), "multiple values for keyword argument 'n_acc'"),
    (lambda: Schedule(0.25, 0.75, SchedCos, 32), 'log_accum_batch must be True'),  # fastxtend's order
    (lambda: Schedule(finish=NAN), 'finish=nan is outside of training: use a fraction'),
    (lambda: Schedule(start=None), 'start must be a float')])
def test_a_wrong_argument_is_an_error_at_once(make, says):
    with pytest.raises((TypeError, ValueError)) as caught:
        make()
    message = str(caught.value)
    assert says in message
    assert '\n' not in message


def test_sizes_may_be_numbers_of_numpy():
    found = check_size('accum_bs', np.int64(8))
    assert found == 8
    assert type(found) is int
    learn = make_learner(8, cbs=GradientAccumulation(np.int32(16), micro_batch_size=np.int64(4)))
    assert fit(learn, 1).recorder.accum_bs == [16, 16, 16, 16, 16, 16]


# Sizes

@pytest.mark.parametrize('args, advice', [
    (('accum_bs', 100, 64), '64: use 64 or 128, or change bs'),
    (('n_acc', 100, 16, 2),
     "32, 2 processes times the DataLoader's batch size of 16: use 96 or 128, or change bs")])
def test_a_window_of_no_whole_number_of_batches_is_an_error_that_names_other_sizes(args, advice):
    with pytest.raises(ValueError) as caught:
        check_multiple(*args)
    assert str(caught.value).endswith(advice)


@pytest.mark.parametrize('size, n_processes', [
    (64, 1),
    (128, 1),
    (40, 1),
    (128, 2),
    (100, 2)])
def test_a_window_may_be_some_batches_or_a_part_of_one(size, n_processes):
    check_multiple('accum_bs', size, 64, n_processes)  # raises no error


# Warnings

@pytest.mark.parametrize('kind', [AccumWarning, UserWarning])
def test_a_class_of_its_own_silences_the_warnings_of_this_package(kind):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        warnings.simplefilter('ignore', kind)
        warn_user('a warning')
        warnings.warn('another one', RuntimeWarning)
    assert [str(o.message) for o in caught] == ['another one']


# The Learner

class OldFp16(NonNativeMixedPrecision):
    "Without its check for a GPU"
    before_fit = noop


def on_96(*cbs):
    return make_learner(8, cbs=cbs)


def hooked():
    learn = on_96(GradientAccumulation(32))
    learn.model[0].weight.register_post_accumulate_grad_hook(noop)
    return learn


def compiled_layer():
    m = model()
    m[0] = torch.compile(m[0], mode='reduce-overhead')
    return m


def compiled_in_place():
    m = model()
    m.compile(options={'triton.cudagraphs': True})
    return m


def minus_one(learn): return -1


@pytest.mark.parametrize('make, says', [
    (lambda: on_96(GradientAccumulation(20)), "accum_bs=20 (samples) is not a multiple of"),
    (lambda: on_96(GradientAccumulationSchedule(16, 60)), 'final_accum_bs=60'),
    (lambda: on_96(Schedule(scale=dict(rate=linear_scale))), "no hyper-parameter 'rate': use one of ["),
    (lambda: on_96(Schedule(scale=sqrt_scale)), 'scale must be a dict, such as'),
    (lambda: on_96(Schedule(scale=dict(lr=2.))), "scale['lr'] must be a rule f(value, ratio), not 2.0"),
    (lambda: on_96(Schedule(schedule=SchedCos(16, 64))), 'schedule must be a fastai annealer, such as SchedCos, or'),
    (lambda: on_96(Schedule(finish=3)), 'finish=3 is outside of training: use a fraction'),
    (lambda: on_96(GradientAccumulation(32, num_items=minus_one)), 'num_items must return a count'),
    (lambda: on_96(GradientAccumulation(32), FastaiAccumulation(32)), 'training.GradientAccumulation also accumulates'),
    (lambda: on_96(GradientAccumulation(micro_batch_size=4), GradientAccumulation(32)), 'also accumulates gradients'),
    (lambda: on_96(GradientAccumulation(32), Schedule()), 'GradientAccumulationSchedule also accumulates gradients'),
    (lambda: on_96(GradientAccumulation(32), OldFp16()), 'use learn.to_fp16()'),
    (hooked, 'parameters have post-accumulate-grad hooks'),
    (lambda: make_learner(8, m=torch.jit.script(model()), cbs=GradientAccumulation(32)), 'script it afterwards'),
    (lambda: make_learner(8, m=compiled_in_place(), cbs=GradientAccumulation(32)), 'compiled with CUDA graphs')])
def test_what_does_not_fit_the_learner_is_an_error_before_training(make, says):
    learn = make()
    before = weights(learn)
    with pytest.raises((TypeError, ValueError)) as caught:
        fit(learn, 2)
    _, _, own_message = str(caught.value).rpartition(':\n\t')  # fastai puts the name of the event before it
    assert says in own_message
    assert '\n' not in own_message
    assert_same(weights(learn), before)


def test_a_hook_on_a_frozen_parameter_is_no_mistake():
    learn = hooked()
    learn.model[0].weight.requires_grad_(False)
    assert len(losses(fit(learn, 1))) == 3


@pytest.mark.parametrize('make, expected', [
    (model, False),
    (compiled_in_place, True),
    (lambda: compiled_layer()[0], True),
    (lambda: torch.compile(model()), False)])
def test_which_models_use_cuda_graphs(make, expected):
    assert uses_cuda_graphs(make()) == expected


@pytest.mark.parametrize('module', ['vision', 'text', 'tabular'])
def test_the_only_name_of_fastai_that_is_replaced_is_gradient_accumulation(module):
    theirs = vars(importlib.import_module(f'fastai.{module}.all'))
    own = vars(ours)
    replaced = [name for name in ours.__all__ if theirs.get(name, own[name]) is not own[name]]
    assert replaced == ['GradientAccumulation']


# The callback and its Learner

@pytest.mark.parametrize('event', ['before_train', 'before_batch', 'after_backward', 'after_batch', 'after_epoch'])
def test_windows_of_a_callback_that_is_added_in_a_fit_begin_with_the_next_epoch(event):
    def add(self):
        if not self.learn._grab_cbs(GradientAccumulation):
            self.learn.add_cb(GradientAccumulation(32))

    learn = fit(make_learner(8), 3, cbs=Callback(**{event: add}))
    steps = windows(96, 8, 8, 'step', 1) + windows(96, 8, 32, 'step', 2)
    assert_steps(learn, steps)


@pytest.mark.parametrize('in_fit', [False, True])
def test_a_callback_that_is_added_twice_is_an_error(in_fit):
    cb = GradientAccumulation(32)
    learn = on_96(cb)
    if not in_fit:
        learn.add_cb(cb)
    with pytest.raises(ValueError, match='was added to its Learner twice'):
        fit(learn, 1, cbs=cb if in_fit else None)


def count_passes(switched_off, *cbs):
    "Returns the forward passes of a block, and the losses that are logged, if one of `cbs` is switched off"
    switched_off.run = False  # fastai switches it on again at the end of the fit
    passes = []
    learn = make_learner(8, m=nn.Sequential(model()), cbs=cbs)

    def note(module, args, output):
        if learn.training:
            passes.append(1)

    learn.model[0][0].register_forward_hook(note)
    fit(learn, 1)
    return len(passes), len(losses(learn))


def test_a_callback_that_is_switched_off_does_nothing_and_others_go_on():
    "12 batches in 3 windows; recomputed blocks run twice, and a GradientCache of two parts runs its first part twice"
    accum = GradientAccumulation(32)
    blocks = all_blocks()
    assert count_passes(accum, accum) == (12, 12)
    assert count_passes(accum, accum, blocks) == (2*12, 12)
    assert count_passes(blocks, accum, blocks) == (12, 3)
    assert count_passes(accum, accum, GradientCache(4)) == (12+2*12, 12)


@pytest.mark.parametrize('make_cb', [partial(GradientAccumulation, 32), ActivationCheckpointing])
def test_layers_without_a_shape_get_it_in_the_first_pass(make_cb):
    def train(*cbs):
        m = model()
        m[1] = nn.LazyBatchNorm1d(dtype=torch.float64)
        return fit(make_learner(32, m=m, cbs=cbs), 1)

    plain = train()
    assert len(losses(plain)) == 3
    assert_same_weights(train(make_cb()), plain)
