"Every other callback sees windows as it sees the batches of a large batch"
import pytest

from callback_fits import *

LOSS_EVENTS = ['before_step', 'after_step', 'after_batch']  # that come once a window, when its loss is known
SPLIT = ['split', 'both']  # layouts in which validation has smaller batches, too
CANCEL_EVENTS = ['after_cancel_backward', 'after_cancel_step', 'after_cancel_train', 'after_cancel_epoch']
ALL_EVENTS = [*EVENTS, *CANCEL_EVENTS]

# Whoever has `before_batch` late may prepare batches, and is warned; for others it is no mistake
pytestmark = pytest.mark.filterwarnings('ignore:before_batch of .* is called once per window')


# What each event sees

class Moment(NamedTuple):
    "What a callback finds at an event"
    position: tuple
    hypers: tuple
    weights: float

    @property
    def is_training(self):
        return self.position[0]


class Sees(Callback):
    "Notes the moments of `events`, and the losses"
    def __init__(self, order, events):
        self.order = order
        self.moments = {event: [] for event in events}
        self.losses = []  # in training
        for event in events:
            setattr(self, event, partial(self.note, event))

    def note(self, event):
        learn = self.learn
        names = 'training', 'epoch', 'iter', 'n_iter', 'train_iter', 'pct_train'
        counters = [getattr(learn, name, -1) for name in names]
        position = *counters, self.n_iter_of_loader(event)
        moment = Moment(position, tuple(hypers(learn)), weights(learn).abs().sum().item())
        self.moments[event].append(moment)
        if event in LOSS_EVENTS and learn.training:
            self.losses.append([learn.loss.item(), float(getattr(learn, 'smooth_loss', 0.))])

    def n_iter_of_loader(self, event):
        "Returns the length of `learn.dl`, which before our callback is still that of the DataLoader"
        is_early = event == 'before_train' and self.order < GradientAccumulation.order
        dl = getattr(self.learn, 'dl', None)
        return -1 if is_early or dl is None else len(dl)


def see_all():
    """Returns callbacks of each order with all events but `after_batch` or `before_batch`: for one with both, see
    test_events.py"""
    res = []
    for order in ORDERS:
        for left_out in ('before_batch', 'after_batch'):
            res.append(Sees(order, [o for o in ALL_EVENTS if o != left_out]))
    return res


def without_repeats(moments):
    """Leaves out what is as the moment before, but for hyper-parameters: in the middle of a window nothing moves once a
    scheduler has set the rate"""
    res = []
    for o in moments:
        last = res[-1] if res else None
        is_repeated = last and o.position == last.position and o.weights == last.weights
        if not is_repeated: res.append(o)
    return res


@pytest.mark.parametrize('layout', LAYOUTS)
def test_each_event_finds_the_position_rates_and_weights_of_the_large_batch(layout):
    small, big = fit_both(layout, see_all, method='fit_one_cycle')
    for a, b in zip(small.others, big.others):
        assert_same(flat(a.losses), flat(b.losses), FLOAT32)
        for event in b.moments:
            found = without_repeats(a.moments[event])
            expected = without_repeats(b.moments[event])
            if layout in SPLIT and event == 'before_train':
                continue  # counters are those of validation
            if layout in SPLIT:
                found = [o for o in found if o.is_training]
                expected = [o for o in expected if o.is_training]
            assert len(found) == len(expected), (event, a.order)
            assert_same(flat(o.position for o in found), flat(o.position for o in expected), ROUNDING)
            assert_same(flat(o.hypers for o in found), flat(o.hypers for o in expected), ROUNDING)
            assert_same([o.weights for o in found], [o.weights for o in expected], ROUNDING)
            # The position of a schedule goes by samples, and is a sum in another order
            if LAYOUTS[layout].is_constant:
                assert [o.position for o in found] == [o.position for o in expected]


# What they note

def note_losses(self):
    "After every second batch: what the Recorder has logged, too, to those that come after it"
    if self.train_iter%2 == 0:
        return
    row = [self.train_iter, self.iter, self.loss.item()]
    if self.order > Recorder.order:
        row += [self.learn.smooth_loss, self.recorder.losses[-1], self.recorder.lrs[-1]]
    self.rows.append(row)


def note_epoch(self):
    self.rows.append([self.train_iter, self.learn.pct_train, self.loss, len(self.recorder.losses)])


class WandbCallback(At):
    "Has the name of a class of fastai's, to which it is not related"
    def __init__(self): super().__init__('after_batch', note_losses, 51)


class AnotherRecorder(Recorder):
    "A second Recorder, such as ClearML adds"
    def __init__(self):
        super().__init__(train_metrics=True)
        self.rows = []

    def after_batch(self):
        super().after_batch()
        if self.training:
            self.rows.append([m.value for m in self._train_mets])


def count_samples(self):
    "Reads the loader by itself"
    self.rows.append([sum(len(batch[0]) for batch in self.learn.dl)])


NOTES = {
    'losses, as by default': partial(At, 'after_batch', note_losses, 0),
    'losses, after the Recorder': partial(At, 'after_batch', note_losses, 55),
    'losses after the step': partial(At, 'after_step', note_losses, 20),
    'the epoch at its end': partial(At, 'after_epoch', note_epoch, 60),
    'own class of the name WandbCallback': WandbCallback,
    'another Recorder': AnotherRecorder,
    'reads the loader after a batch': partial(At, 'after_batch', count_samples, 60)}


@pytest.mark.parametrize('name,layout', paired(NOTES, LAYOUTS))
def test_what_a_callback_notes_is_what_it_notes_of_the_large_batch(name, layout):
    "Whether it belongs to the Learner or to the fit"
    is_in_fit = layout in ('ragged', 'split', 'step')
    small, _ = fit_both(layout, NOTES[name], in_fit=is_in_fit)
    assert small.others[0].rows


# log_accum_batch=False


@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'after_batch'])
def test_where_loader_batches_are_logged_a_fit_that_is_stopped_has_the_steps_of_full_windows(event):
    def stop_early(self):
        if self.train_iter == 6:
            raise CancelFitException
    learn = make_learner(8, cbs=[GradientAccumulation(32, log_accum_batch=False), At(event, stop_early)])
    fit(learn, 2)
    assert_steps(learn, [(range(32), 0)])
    n_logged = 5 if event == 'after_batch' else 6
    assert len(losses(learn)) == n_logged
    assert_no_gradients(learn)
