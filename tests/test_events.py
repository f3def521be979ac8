"""windows/events.py: each event of a training batch goes to the callbacks that have it, as fastai's Learner sends it.

Callbacks that record their events record the same in a plain Learner and with windows of one batch. In windows of
several batches, they record what the table at the head of windows/loop.py says"""
import itertools

import pytest
from fastai.callback.training import GradientAccumulation as FastaiAccumulation

from common import *
from fastxtend_accum.windows import events

# Late callbacks that see windows are the point here
pytestmark = pytest.mark.filterwarnings('ignore:before_batch of .* is called once per window')

ALL_EVENTS = [name for name in vars(event) if not name.startswith('_')]
IN_A_FIT = [name for name in EVENTS if name not in ('after_cancel_batch', 'after_fit')]
PASSES = ['after_pred', 'after_loss', 'before_backward', 'after_backward']
STEP = ['before_step', 'after_step']
IN_A_BATCH = ['before_batch', *PASSES, *STEP, 'after_batch']


# Callbacks that record their events

class Records(Callback):
    "Notes its label, the event and the position in training, in a list that it shares with others"
    def __init__(self, label, log, order=0):
        self.label = label
        self.log = log
        self.order = order

    def record(self, name):
        position = [getattr(self.learn, o, None) for o in ('training', 'iter', 'train_iter', 'pct_train')]
        self.log.append((self.label, name, *position))


def recording(name):
    "Returns a method that records the event `name`"
    def method(self): self.record(name)
    return method


class ByClass(Records):
    "Has a method for each event"


for name in ALL_EVENTS:
    setattr(ByClass, name, recording(name))


class ByInstance(Records):
    "Has its events as attributes of the object"
    def __init__(self, label, log, order=0, names=ALL_EVENTS):
        super().__init__(label, log, order)
        for name in names:
            setattr(self, name, partial(self.record, name))


class ByCall(Records):
    "Gets all events by a `__call__` of its own"
    def __call__(self, name): self.record(name)


class ByGetattr(Records):
    "Makes its methods up when they are looked for"
    def __getattr__(self, name):
        if name in ALL_EVENTS: return partial(self.record, name)
        return super().__getattr__(name)


def small_learner(cbs, n=32):
    "Returns a Learner with loader batches of 8 samples"
    dls = make_learner(8, n=n).dls
    return Learner(dls, model(), mse, opt_func=SGD, cbs=cbs)


def one_batch_windows(**kwargs):
    return GradientAccumulation(8, verbose=False, **kwargs)


def fit_until_error(learn):
    "Trains two epochs; returns the class of the error that ends the fit, or None"
    try: fit(learn, 2)
    except Exception as e: return type(e)
    return None


# Windows of one batch, and a plain Learner

@pytest.mark.parametrize('kind, make', paired(
    [ByClass, ByInstance, ByCall, ByGetattr],
    [one_batch_windows, partial(one_batch_windows, log_accum_batch=False), all_blocks]))
def test_windows_of_one_batch_send_what_a_plain_learner_sends(kind, make):
    "To callbacks of any kind and order, in training and in validation"
    def recorded(*cbs):
        log = []
        recorders = [kind(order, log, order) for order in (-20, 12, 60)]
        fit(small_learner([*recorders, *cbs]), 2)
        return log
    plain = recorded()
    assert len(plain) > 200
    assert recorded(make()) == plain


class Changes(Callback):
    "Does `change` to another callback when `event` comes for the first time"
    order = 5

    def __init__(self, event, change, other):
        self.change = change
        self.other = other
        self.is_done = False
        setattr(self, event, self.act)

    def act(self):
        if self.is_done: return
        self.is_done = True
        self.change(self.learn, self.other)


def add(learn, other): learn.add_cb(other)
def remove(learn, other): learn.remove_cb(other)
def switch_off(learn, other): other.run = False
def switch_off_in_training(learn, other): other.run_train = False
def switch_off_in_validation(learn, other): other.run_valid = False


CHANGES = [add, remove, switch_off, switch_off_in_training, switch_off_in_validation]


def recorded_with_change(event, change, *cbs):
    "Returns what callbacks record, of which one is changed when `event` comes for the first time"
    log = []
    first = ByClass('first', log, -10)
    other = ByClass('other', log, 20)
    last = ByClass('last', log, 60)
    present = [first, last]
    if change is not add: present.append(other)
    fit(small_learner([*present, Changes(event, change, other), *cbs], n=16), 2)
    return log


@pytest.mark.parametrize('event,change', paired(IN_A_FIT, CHANGES))
def test_a_callback_that_is_changed_in_an_event(event, change):
    "Added, removed or switched off: with windows of one batch this counts when it counts in a plain Learner"
    plain = recorded_with_change(event, change)
    assert 'other' in [label for label, *_ in plain]
    assert recorded_with_change(event, change, one_batch_windows()) == plain


# Exceptions

def recorded_with_fault(exc, event, *cbs):
    "Returns what ends a fit, and what callbacks record, if one raises `exc` the second time that `event` comes"
    log = []
    recorders = [ByClass('early', log, 0), ByClass('late', log, 60)]
    learn = small_learner([*recorders, Fault(exc, event, 2, 5), *cbs])
    return fit_until_error(learn), log


ALL_RAISED = [*CANCELS, CancelBackwardException, CancelStepException, ValueError]
RAISED = list(itertools.product(IN_A_BATCH, ALL_RAISED))


@pytest.mark.parametrize('event,exc', RAISED[::5])
def test_what_a_callback_raises_in_an_event(event, exc):
    "In windows of one batch: it ends the same events as in a plain Learner"
    plain = recorded_with_fault(exc, event)
    assert recorded_with_fault(exc, event, one_batch_windows()) == plain


# Errors

def message_of_error(event, *cbs):
    with pytest.raises(ValueError) as e:
        fit(small_learner([Fault(ValueError, event, 2, 5), *cbs]))
    return str(e.value)


@pytest.mark.parametrize('event, log_accum_batch', paired(IN_A_BATCH, [True, False]))
def test_an_error_names_the_callback_and_the_event(event, log_accum_batch):
    "As in fastai's Learner, in windows of one batch and of several"
    message = f'Exception occured in `Fault` when calling event `{event}`:\n\ton purpose'
    assert message_of_error(event) == message
    for size in (8, 16):
        accum = GradientAccumulation(size, log_accum_batch=log_accum_batch)
        assert message_of_error(event, accum) == message


# Windows of several batches: the table at the head of windows/loop.py

GOES_ON = ['after_cancel_batch', 'after_batch']
BATCH = ['before_batch', *PASSES]
ENDS = [*STEP, 'after_batch']
# Of a window of three batches, and of the two that are left at the end of an epoch
PREPARING = [*BATCH, *GOES_ON, *BATCH, *GOES_ON, *BATCH, *ENDS,
             *BATCH, *GOES_ON, *BATCH, *ENDS]
WINDOWS = [*BATCH, *PASSES, *PASSES, *ENDS,
           *BATCH, *PASSES, *ENDS]
BATCHES = [*BATCH, 'after_batch', *BATCH, 'after_batch', *BATCH, *ENDS,
           *BATCH, 'after_batch', *BATCH, *ENDS]


OF_A_BATCH = [*BATCH, *STEP, *GOES_ON, 'after_cancel_backward', 'after_cancel_step']


def events_of_an_epoch(order, but=(), cb=None, also=(), **kwargs):
    "Returns the events that a callback gets of five batches in windows of three, if it has all `but` some"
    log = []
    names = [name for name in OF_A_BATCH if name not in but]
    accum = cb or GradientAccumulation(24, verbose=False, **kwargs)
    fit(small_learner([ByInstance('', log, order, names), accum, *also], n=40), 1)
    return [name for _, name, training, *_ in log if training]


@pytest.mark.parametrize('order, log_accum_batch, expected', [
    (-20, True, PREPARING),
    (49, True, PREPARING),
    (50, True, WINDOWS),
    (-20, False, BATCHES),
    (50, False, BATCHES)])
def test_a_callback_that_prepares_batches_sees_each_and_a_late_one_windows(order, log_accum_batch, expected):
    "All see loader batches if those are logged"
    assert events_of_an_epoch(order, log_accum_batch=log_accum_batch) == expected


def test_a_callback_without_before_batch_sees_windows_and_one_without_after_batch_each_beginning():
    "The first is a logger: nothing of it is to be taken back. The second sees no end that a cancelled batch could have"
    of_logger = [name for name in WINDOWS if name != 'before_batch']
    assert events_of_an_epoch(0, but=['before_batch']) == of_logger
    beginnings = [name for name in PREPARING if name not in GOES_ON]
    assert events_of_an_epoch(0, but=['after_batch']) == beginnings


@pytest.mark.parametrize('order', [7, 49])
def test_a_callback_that_prepares_batches_sees_what_it_sees_beside_fastais_accumulation(order):
    "Which cancels the batches without a step in before_step, and is the reference for their events"
    fastais = events_of_an_epoch(order, cb=FastaiAccumulation(24))
    whole_window = PREPARING[:PREPARING.index('before_step')+len(ENDS)]
    assert fastais[:len(whole_window)] == whole_window
    assert events_of_an_epoch(order)[:len(whole_window)] == whole_window


@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'after_loss'])
@pytest.mark.parametrize('nth', [2, 3, 5])
def test_a_late_callback_sees_nothing_of_a_cancelled_batch(nth, event):
    "In the middle of a window, before its last batch and at the end of an epoch: to it, the window is one batch"
    fault = Fault(CancelBatchException, event, nth, 5)
    windows_of_3_and_1 = [*BATCH, *PASSES, *PASSES, *ENDS, *BATCH, *ENDS]
    seen = events_of_an_epoch(60, but=PASSES[:2], also=[fault])
    assert seen == [name for name in windows_of_3_and_1 if name not in PASSES[:2]]


@pytest.mark.parametrize('event, nth, batches_of_rounds', [
    ('before_batch', 1, [4, 1]),
    ('after_pred', 2, [4, 1]),
    ('after_pred', 5, [3, 2])])
def test_a_cancelled_batch_looks_like_any_batch_without_a_step_to_what_prepares_batches(event, nth, batches_of_rounds):
    "The first one of a window, or the second, or the second one of the last window, which steps with the first alone"
    fault = Fault(CancelBatchException, event, nth, 5)
    expected = []
    for n_batches in batches_of_rounds:
        expected += ['before_batch', *GOES_ON]*(n_batches-1)
        expected += ['before_batch', 'after_batch']
    assert events_of_an_epoch(0, but=[*PASSES, *STEP], also=[fault]) == expected


# The questions that the module asks


class OwnRecorder(Recorder):
    "Inherits `after_batch` from fastai's, and has a `before_batch` of its own"
    def before_batch(self): pass


def test_what_comes_with_fastai_is_known_by_where_the_function_of_an_event_comes_from():
    "An inherited event is fastai's; one that is overridden is not, nor a function, nor what handles any event"
    assert events.is_from_fastai(Recorder(), 'after_batch')
    assert events.is_from_fastai(OwnRecorder(), 'after_batch')
    assert not events.is_from_fastai(OwnRecorder(), 'before_batch')
    assert not events.is_from_fastai(ByCall('', []), 'after_loss')
    assert not events.is_from_fastai(Callback(after_loss=noop), 'after_loss')


def test_autocast_that_is_left_in_a_pass_is_entered_again_before_the_next():
    "In its own type: on a CPU the default is bfloat16"
    context = torch.autocast('cpu', torch.float16)
    context.__enter__()
    before = events.Autocast(torch.device('cpu'))
    for _ in range(2):
        before.enter_again()
        before.enter_again()  # the second time there is nothing to do
        assert events.autocast_depth() == 1
        assert torch.is_autocast_enabled('cpu')
        assert torch.get_autocast_dtype('cpu') == torch.float16
        context.__exit__(None, None, None)
        assert not torch.is_autocast_enabled('cpu')
    assert events.autocast_depth() == 0
