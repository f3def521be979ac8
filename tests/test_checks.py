"Mistakes are errors in one line before training, and nothing else is one; loaders that lie; a callback and its Learner"
import importlib

import pytest
from fastai.callback.training import GradientAccumulation as FastaiAccumulation

import fastxtend_accum.all as ours
from common import *
from fastxtend_accum.windows.checks import (
    accumulates_gradients, check_multiple, check_rules, check_size, uses_cuda_graphs)

NAN = float('nan')
Schedule = partial(GradientAccumulationSchedule, 16, 64)


# Arguments

@pytest.mark.parametrize('make, says', [
    (lambda: GradientAccumulation(0), 'accum_bs must be at least 1 sample, not 0'),
    (lambda: GradientAccumulation(32.), 'accum_bs counts samples, so it must be an int, not 32.0'),
    (lambda: GradientAccumulation(True), 'not True'),
    (lambda: GradientAccumulation(64, 8), 'accum_bs=64 and n_acc=8 both set'),
    (lambda: GradientAccumulation(32, False), 'n_acc=False both set'),  # log_accum_batch, one place too early
    (lambda: GradientAccumulation(n_acc=32.), 'n_acc counts samples, so it must be an int, not 32.0'),
    (lambda: GradientAccumulation(32, None, 16), 'log_accum_batch must be True or False, not 16'),
    (lambda: GradientAccumulation(micro_batch_size='half'), "a number of samples or 'auto', not 'half'"),
    (lambda: GradientAccumulation(32, remainder='keep'), "('step', 'carry', 'drop') or None, not 'keep'"),
    (lambda: GradientAccumulation(micro_batch_size=8, remainder='carry'), 'is for windows of several batches'),
    (lambda: GradientAccumulation(32, skip_nonfinite=1), 'skip_nonfinite must be True or False'),
    (lambda: GradientAccumulation(32, num_items=5), 'num_items must be a function of the Learner'),
    (lambda: GradientCache(0), 'micro_batch_size must be at least 1'),
    (lambda: GradientCache(None), 'not None'),
    (lambda: GradientCache(8, rows=0), 'rows must be at least 1'),
    (lambda: GradientCache(8, 'body'), "part must be a function of the model, not 'body'"),
    (lambda: GradientAccumulationSchedule(16, 64.), 'final_accum_bs counts samples'),
    (lambda: GradientAccumulationSchedule(SchedSteps({0: 32})), 'write GradientAccumulationSchedule(**SchedSteps('),
    (lambda: Schedule(0.25, 0.75, SchedCos, 32), 'log_accum_batch must be True'),  # fastxtend's order
    (lambda: Schedule(start=-1), 'start=-1 is outside of training: use a fraction'),
    (lambda: Schedule(finish=NAN), 'finish=nan is outside of training: use a fraction'),
    (lambda: Schedule(start=None), 'start must be a float'),
    (lambda: Schedule(start=0.5, finish=0.2), 'start=0.5 is after finish=0.2'),
    (lambda: Schedule(schedule={1: 2}), 'sizes by point as GradientAccumulationSchedule(**SchedSteps('),
    (lambda: Schedule(schedule=lambda a, b: b), 'must return a function of the position, not 64')])
def test_a_wrong_argument_is_an_error_at_once(make, says):
    with pytest.raises((TypeError, ValueError)) as caught:
        make()
    message = str(caught.value)
    assert says in message
    assert '\n' not in message


@pytest.mark.parametrize('cls', [GradientAccumulation, Schedule])
def test_an_unknown_argument_is_the_error_of_python(cls):
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'drop_last'"):
        cls(drop_last=True)


@pytest.mark.parametrize('name, value, says', [
    ('accum_bs', 0, 'accum_bs must be at least 1 sample'),
    ('n_acc', 20, 'is not a multiple of'),
    ('micro_batch_size', 'half', 'micro_batch_size must be'),
    ('num_items', 5, 'num_items must be a function'),
    ('remainder', 'keep', 'remainder must be one of')])
def test_a_wrong_setting_after_construction_is_an_error_before_training(name, value, says):
    cb = GradientAccumulation(32)
    setattr(cb, name, value)
    assert_error_before_training(make_learner(8, cbs=cb), says)


def test_calls_of_fastai_and_numbers_of_numpy_are_no_mistakes():
    assert GradientAccumulation().accum_bs == 32
    assert GradientAccumulation(n_acc=64).accum_bs == 64
    assert GradientAccumulation(np.int64(64)).accum_bs == 64
    learn = learner_on(Unsized(), GradientAccumulation(np.int32(16), micro_batch_size=np.int64(8)))
    assert fit(learn, 1).recorder.accum_bs == [16, 16]


# Sizes and rules

@pytest.mark.parametrize('size, expected', [(64, 64), (np.int64(8), 8)])
def test_a_size_is_a_whole_number(size, expected):
    found = check_size('accum_bs', size)
    assert found == expected
    assert type(found) is int


@pytest.mark.parametrize('args, advice', [
    (('accum_bs', 100, 64), 'use 64 or 128, or change its batch size to 100, with micro_batch_size=64 to split it'),
    (('accum_bs', 4, 64), 'for 4 batches of 64, write 256, or change its batch size to 4'),
    (('n_acc', 100, 16, 2), 'use 96 or 128, or change its batch size to 50, with micro_batch_size=16 to split it'),
    (('n_acc', 33, 16, 2), 'use 32 or 64'),
    (('final_accum_bs', 100, 64), 'use 64 or 128'),
    (('start_accum_bs', 8, 32), 'use 32 or more, or a DataLoader with bs=8')])
def test_a_size_that_is_no_multiple_of_the_batch_is_an_error_that_names_others(args, advice):
    "Sizes are not advised if they cannot be meant, or do not go into the processes"
    with pytest.raises(ValueError) as caught:
        check_multiple(*args)
    assert str(caught.value).endswith(f': {advice}')


@pytest.mark.parametrize('rules, says', [
    (linear_scale, 'scale must be a dict'),
    (dict(rate=linear_scale), "no hyper-parameter 'rate': use one of ["),
    (dict(lr=2), "scale['lr'] must be a rule"),
    (dict(lr=lambda value, ratio: 'large'), "must return a number, not 'large'")])
def test_wrong_rules_for_hyper_parameters_are_errors(rules, says):
    opt = SGD(model().parameters(), lr=0.1)
    with pytest.raises((TypeError, ValueError)) as caught:
        check_rules(rules, opt)
    assert says in str(caught.value)
    check_rules(dict(lr=linear_scale), opt)


# The Learner and its data

class Unsized:
    "Batches of 8. It does not say so, and may say another length"
    def __init__(self, n=32, says=None):
        self.data = [o.split(8) for o in data(n)]
        self.says = says

    def __iter__(self):
        return zip(*self.data)

    def __len__(self):
        return self.says or len(self.data[0])


def learner_on(train, cb):
    return Learner(DataLoaders(train, Unsized()), model(), mse, opt_func=SGD, cbs=cb)


class OldFp16(NonNativeMixedPrecision):
    "Without its check for a GPU"
    before_fit = noop


def hooked():
    learn = make_learner(8, cbs=GradientAccumulation(32))
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


def on_44(cb):
    return make_learner(8, n=44, cbs=cb)


def on_96(*cbs):
    return make_learner(8, cbs=cbs)


def minus_one(learn): return -1


def no_size(start, end):
    return lambda position: NAN


@pytest.mark.parametrize('make, says', [
    (lambda: on_96(GradientAccumulation(20)), "accum_bs=20 counts samples, and is not a multiple of the DataLoader's"),
    (lambda: on_96(GradientAccumulationSchedule(16, 60)), 'final_accum_bs=60'),
    (lambda: on_96(Schedule(finish=3)), 'finish=3 is outside of training in a fit of 2 epochs'),
    (lambda: on_96(Schedule(schedule=no_size)), 'batch size of nan'),
    (lambda: on_96(GradientAccumulation(32, num_items=minus_one)), 'num_items must return a count'),
    (lambda: on_96(GradientAccumulation(32), FastaiAccumulation(32)), 'training.GradientAccumulation accumulates, too'),
    (lambda: on_96(GradientAccumulation(32), Schedule()), 'GradientAccumulationSchedule accumulates, too: remove it'),
    (lambda: on_96(GradientAccumulation(32), OldFp16()), 'use learn.to_fp16()'),
    (lambda: on_44(GradientAccumulation(48, remainder='drop')), 'an epoch has 44 samples, which do not fill'),
    (lambda: make_learner(8, n=5, cbs=GradientAccumulation(8), drop_last=True), 'an epoch has 0 samples'),
    (lambda: learner_on(Unsized(), GradientAccumulation(32)), 'cannot find the batch size of Unsized'),
    (hooked, 'parameters have post-accumulate-grad hooks'),
    (lambda: make_learner(8, m=compiled_layer(), cbs=GradientAccumulation(32)), 'compiled with CUDA graphs'),
    (lambda: make_learner(8, m=compiled_in_place(), cbs=GradientAccumulation(32)), 'compiled with CUDA graphs')])
def test_what_does_not_fit_the_learner_is_an_error_before_training(make, says):
    assert_error_before_training(make(), says)


def assert_error_before_training(learn, says):
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


@pytest.mark.parametrize('cb, expected', [
    (GradientAccumulation(32), True),
    (FastaiAccumulation(32), True),
    (Schedule(), True),
    (ActivationCheckpointing(), False),
    (GradientCache(8), False)])
def test_which_callbacks_accumulate_gradients(cb, expected):
    assert accumulates_gradients(cb) == expected


@pytest.mark.parametrize('module', ['vision', 'text', 'tabular'])
def test_the_only_name_of_fastai_that_is_replaced_is_gradient_accumulation(module):
    theirs = vars(importlib.import_module(f'fastai.{module}.all'))
    own = vars(ours)
    replaced = [name for name in ours.__all__ if theirs.get(name, own[name]) is not own[name]]
    assert replaced == ['GradientAccumulation']


# Loaders that lie

@pytest.mark.parametrize('says', [1, 5, 40])
@pytest.mark.parametrize('remainder', ['step', 'carry', 'drop'])
def test_a_loader_whose_length_lies_yields_its_windows(says, remainder):
    "It yields 11 batches"
    train = Unsized(88, says)
    train.bs = 8
    learn = fit(learner_on(train, GradientAccumulation(32, remainder=remainder)), 2)
    steps = windows(88, 8, 32, remainder, 2)
    assert learn.recorder.accum_bs == [len(samples) for samples, _ in steps]
    assert_same(weights(learn), reference(steps, 88, sgd)[0], ROUNDING)


@pytest.mark.parametrize('remainder', ['step', 'carry'])
def test_an_empty_loader_is_the_plain_fit(remainder):
    def train(cb):
        return fit(make_learner(8, n=5, drop_last=True, cbs=cb), 2)

    plain = train(None)
    learn = train(GradientAccumulation(32, remainder=remainder))
    assert losses(learn) == losses(plain) == []
    assert repr(learn.recorder.values) == repr(plain.recorder.values)  # with NaN
    assert_same(weights(learn), weights(model()))


# Callbacks that see the first batch of a window only

def idle_callback(order, *events):
    "Returns a callback that does nothing at these events"
    cb = Callback(**dict.fromkeys(events, noop))
    cb.order = order
    return cb


def test_a_late_callback_that_may_prepare_batches_is_named_in_a_warning():
    cb = idle_callback(65, 'before_batch')
    with pytest.warns(UserWarning, match='before_batch of Callback is called once per window') as caught:
        fit(make_learner(8, cbs=[cb, GradientAccumulation(32)]), 1)
    assert len(caught) == 1


@pytest.mark.parametrize('bs, cb', [
    (8, idle_callback(45, 'before_batch')),
    (32, idle_callback(65, 'before_batch')),
    (8, idle_callback(65, 'before_batch', 'after_batch'))], ids=['early', 'one', 'logger'])
def test_no_other_callback_is_named(bs, cb):
    "A warning would be an error here"
    learn = make_learner(bs, cbs=[cb, GradientAccumulation(32)])
    fit(learn, 1)
    assert len(losses(learn)) == 3


# The callback and its Learner

@pytest.mark.parametrize('event', ['before_train', 'before_batch', 'after_backward', 'after_batch', 'after_epoch'])
def test_windows_of_a_callback_that_is_added_in_a_fit_begin_with_the_next_epoch(event):
    def add(self):
        if not self.learn._grab_cbs(GradientAccumulation):
            self.learn.add_cb(GradientAccumulation(32))

    learn = fit(make_learner(8), 3, cbs=Callback(**{event: add}))
    steps = windows(96, 8, 8, 'step', 1) + windows(96, 8, 32, 'step', 2)
    assert_same(weights(learn), reference(steps, 96, sgd)[0], ROUNDING)


def test_a_callback_that_another_learner_has_taken_says_that_it_does_nothing():
    "A fit of that Learner, to which it was passed; fastai leaves it in the list of the first"
    cb = GradientAccumulation(32)
    first = make_learner(8, cbs=cb)
    fit(make_learner(8), 1, cbs=cb)
    with pytest.warns(UserWarning, match='GradientAccumulation was removed from its Learner, and does nothing'):
        fit(first, 1)


@pytest.mark.parametrize('in_fit', [False, True])
def test_a_callback_that_is_added_twice_is_an_error(in_fit):
    cb = GradientAccumulation(32)
    learn = make_learner(8, cbs=cb)
    if not in_fit:
        learn.add_cb(cb)
    with pytest.raises(ValueError, match='was added to its Learner twice'):
        fit(learn, 1, cbs=cb if in_fit else None)


@pytest.mark.parametrize('name, n_calls', [
    ('_do_one_batch', 3+2),  # two in validation
    ('_backward', 3),
    ('_do_grad_opt', 3)])
def test_a_patch_of_the_learner_is_not_ignored(name, n_calls, monkeypatch):
    "It is an error beside windows of several batches, and runs in windows of one"
    method = getattr(Learner, name)
    calls = []

    def patched(self):
        calls.append(name)
        method(self)

    monkeypatch.setattr(Learner, name, patched)
    with pytest.raises(ValueError, match=f'Learner has its own {name}'):
        fit(make_learner(8, cbs=GradientAccumulation(32)), 1)
    fit(make_learner(32, cbs=GradientAccumulation(32)), 1)
    assert len(calls) == n_calls


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


class OwnStep(Learner):
    def _do_grad_opt(self):
        super()._do_grad_opt()


def make_nan(self):
    self.learn.loss_grad = self.learn.loss_grad*NAN


def cancel_step(self): raise CancelStepException


@pytest.mark.filterwarnings('ignore:skipped a step')
@pytest.mark.parametrize('cls, events', [
    (OwnStep, {}),
    (Learner, dict(before_backward=make_nan)),
    (Learner, dict(before_step=cancel_step))], ids=['own', 'nan', 'cancelled'])
def test_windows_without_a_step_are_not_said_to_be_none(cls, events):
    "The warning of a fit in which no window was filled would be an error here"
    cb = GradientAccumulation(32, skip_nonfinite=True)
    dls = make_learner(32, drop_last=True).dls
    learn = cls(dls, model(), mse, opt_func=SGD, cbs=[cb, Callback(**events)])
    fit(learn, 1)
    assert cb.opt_steps == 0


def test_layers_without_a_shape_get_it_in_the_first_pass():
    def train(cb=None):
        m = model()
        m[1] = nn.LazyBatchNorm1d(dtype=torch.float64)
        return fit(make_learner(32, m=m, cbs=cb), 1)

    plain = train()
    assert len(losses(plain)) == 3
    assert_same(weights(train(GradientAccumulation(32))), weights(plain))
