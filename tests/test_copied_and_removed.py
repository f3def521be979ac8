"Saved, copied, removed, fitted again, in the middle of a fit or after it: the Learner stays whole"
import pickle

import pytest

from all_kinds import *
from callback_fits import At

# A callback of this file comes late on purpose
pytestmark = pytest.mark.filterwarnings('ignore:before_batch of .* is called once per window')


class InBoth(At): run_valid = True


# Saved and copied in the middle of a fit: each returns a model

def saved(learn):
    learn.save('learner', with_opt=True)
    return new_learner().load('learner', with_opt=False).model


def pickled(learn):
    return pickle.loads(pickle.dumps(deepcopy(learn.model)))


def exported(learn):
    learn.export('learner.pkl')
    return load_exported().model


def assert_forward_of_class(m):
    "Asserts that `m` runs the forward pass of its class, and not that of the module that it was copied from"
    assert m.forward.__func__ is type(m).forward
    assert m.forward.__self__ is m


IN_TRAINING = ['before_train', 'before_batch', 'after_backward', 'after_batch', 'after_train']
IN_VALIDATION = ['before_batch', 'after_epoch']
MOMENTS = [(event, True) for event in IN_TRAINING]+[(event, False) for event in IN_VALIDATION]
COPIES = []
for event, training in MOMENTS:
    COPIES.append((event, training, saved))
    # In a pass, the model may have a forward pass that cannot be pickled
    if (event, training) != ('after_backward', True): COPIES.append((event, training, pickled))
    # Elsewhere an export ends the fit, since it empties the batch that fastai goes on with
    if event in ('after_batch', 'after_train', 'after_epoch'):
        COPIES.append((event, training, exported))


@pytest.mark.parametrize('moment,kind', paired(COPIES, KINDS))
def test_a_copy_that_is_made_in_a_fit_is_whole_and_the_fit_ends_as_without_it(fresh, moment, kind):
    event, training, copy = moment
    found = []
    def copy_twice(self):
        if self.training == training and len(found) < 2:
            found.append((copy(self.learn), weights(self.learn)))
    learn = new_learner(kind)
    fit(learn, 1, method='fit_one_cycle', cbs=InBoth(event, copy_twice, order=100))
    w = weights(learn)
    assert_same(w, fresh[kind][:len(w)])
    assert_whole(learn)
    assert found
    for copied, weights_then in found:
        assert_same(weights(copied), weights_then)
        for m in copied.modules():
            assert_forward_of_class(m)


# Removed in the middle of a fit

class Removes(Callback):
    "Removes `cb` at the `nth` time that `event` comes"
    def __init__(self, cb, event, nth, order):
        self.cb = cb
        self.nth = nth
        self.order = order
        self.n = 0
        setattr(self, event, self.remove)

    def remove(self):
        self.n += 1
        if self.n == self.nth:
            self.learn.remove_cb(self.cb)


@pytest.mark.filterwarnings('ignore:.* was removed from its Learner')  # which a removal in before_fit causes
@pytest.mark.parametrize('event,kind,order,nth', paired(
    [o for o in EVENTS if o not in ('after_cancel_batch', 'after_fit')], OURS, [-100, 6.5, 99], [1, 6]))
def test_after_a_removal_in_a_fit_nothing_stays_replaced_and_the_next_fit_is_plain(fresh, kind, order, event, nth):
    for i in range(len(our_callbacks(new_learner(kind)))):
        learn = new_learner(kind)
        cb = our_callbacks(learn)[i]
        fit(learn, 1, cbs=Removes(cb, event, nth, order))
        assert_whole(learn)
        learn.remove_cbs(our_callbacks(learn))
        assert_same(fit_from_start(learn), fresh['plain'])


@pytest.mark.parametrize('event,nth,order', [
    ('before_batch', 2, 5.5), ('after_backward', 6, 99), ('before_step', 2, 5.5), ('after_batch', 2, 99),
    ('before_train', 1, 99), ('before_epoch', 2, -100), ('before_train', 2, -100)])
def test_a_removal_in_an_epoch_acts_from_the_next_one_on(event, nth, order):
    "The first epoch keeps its windows of 32, and in the second one each loader batch has a step of its own"
    learn = make_learner(8, cbs=GradientAccumulation(32))
    fit(learn, 2, cbs=Removes(learn.gradient_accumulation, event, nth, order))
    steps = windows(96, 8, 32, 'step', 1)+windows(96, 8, 8, 'step', 1)
    assert_steps(learn, steps)
    assert len(learn.recorder.values) == 2


# One fit after the other

@pytest.mark.parametrize('kind', ['windows', 'auto', 'schedule', 'part'])
def test_before_the_first_fit_what_is_no_training_is_plain_and_an_export_fits(fresh, kind):
    plain = new_learner()
    learn = new_learner(kind)
    with quiet(learn), quiet(plain):
        assert_same(learn.validate(), plain.validate(), 1e-6)
        assert_same(learn.tta()[0], plain.tta()[0], 1e-6)
    go_on_with_exports(learn, fresh[kind], fresh['plain'])


@pytest.mark.parametrize('make', [
    lambda: GradientAccumulation(32, micro_batch_size='auto'),
    lambda: GradientAccumulationSchedule(16, 32),
    lambda: GradientCache(4),
    all_blocks])
def test_a_model_may_have_attributes_of_the_same_names_as_the_callback(make):
    "fastai would warn that they are shadowed"
    def fit_model(names):
        m = model()
        for name in names:
            setattr(m, name, 'of the model')
        return weights(fit(make_learner(8, m=m, cbs=make()), 1))
    names = [o for o in vars(make()) if o not in ('learn', 'training')]
    names = [o for o in names if not hasattr(model(), o) and not hasattr(make_learner(8), o)]
    assert len(names) > 2
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        found = fit_model(names)
    assert_same(found, fit_model([]))


# Switched off, or with attributes of other kinds

def test_a_recorder_that_is_switched_off_records_nothing_in_that_fit():
    "The fit is that of the large batch. fastai switches it on again after each fit"
    learn = make_learner(8, cbs=GradientAccumulation(32))
    big = make_learner(32)
    for _ in range(2):
        learn.recorder.run = False
        big.recorder.run = False
        fit(learn, 1)
        fit(big, 1)
        assert not hasattr(learn.recorder, 'losses')
    assert_trained_as(learn, big)
    assert len(losses(fit(learn, 1))) == 3


@pytest.mark.parametrize('event', ['before_batch', 'after_loss', 'before_step', 'after_train'])
def test_an_event_of_a_callback_may_be_none(event):
    "fastai takes None for no method"
    small = fit(make_learner(8, cbs=[GradientAccumulation(32), Callback(**{event: None})]))
    big = fit(make_learner(32))
    assert_trained_as(small, big)


@pytest.mark.parametrize('name', ['scaler', 'lr_finder', 'window', 'batches'])
def test_a_model_may_have_attributes_of_names_that_a_learner_may_have(name):
    "fastai finds those of the model if the Learner has none"
    def fit_with(bs, *cbs):
        m = model()
        setattr(m, name, 'of the model')
        return weights(fit(make_learner(bs, m=m, cbs=cbs)))
    assert_same(fit_with(8, GradientAccumulation(32, skip_nonfinite=True)), fit_with(32), ROUNDING)
    plain = fit(make_learner(8, cbs=GradientAccumulationSchedule(8, 32)))
    assert_moved(plain)
    assert_same(fit_with(8, GradientAccumulationSchedule(8, 32, skip_nonfinite=True)), weights(plain))
