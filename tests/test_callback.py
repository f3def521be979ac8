"The callback that runs the batches: which one does, what it reads before a fit, what it refuses and what it warns of"
import pytest

from common import *
from fastxtend_accum.callback import WindowCallback
from our_warnings import warnings_of

G = GradientAccumulation
S = GradientAccumulationSchedule


# Which callback runs the batches

def test_without_windows_a_loader_batch_is_a_window_and_the_fit_is_fastais():
    "Bit for bit"
    learn = fit(make_learner(8, n=100, cbs=WindowCallback()))
    plain = fit(make_learner(8, n=100))
    assert_moved(learn)
    assert_same_weights(learn, plain)
    assert losses(learn) == losses(plain)
    assert learn.recorder.values == plain.recorder.values


@pytest.mark.parametrize('cbs, leader', [
    ([G(32)], 0),
    ([ActivationCheckpointing(), G(32)], 1),
    ([G(32), ActivationCheckpointing()], 0),
    ([ActivationCheckpointing(), GradientCache(4)], 1),
    ([WindowCallback(), WindowCallback()], 0),
    ([GradientCache(4), ActivationCheckpointing(), S(8, 32)], 2)])
def test_the_callback_of_the_lowest_rank_leads(cbs, leader):
    "GradientAccumulation, then GradientCache, then any other; of equals, the first"
    make_learner(8, cbs=cbs)
    assert [o.is_leader() for o in cbs].index(True) == leader
    assert sum(o.is_leader() for o in cbs) == 1


@pytest.mark.parametrize('make_splitting', [partial(GradientCache, 'auto'), partial(G, 32, micro_batch_size='auto')])
def test_of_what_saves_memory_what_splits_batches_comes_last(make_splitting):
    "Since recomputed blocks leave results as they are, they are tried first"
    splitting = make_splitting()
    blocks = ActivationCheckpointing()
    make_learner(8, cbs=[splitting, blocks])
    first_saver, second_saver = splitting.memory_savers()
    assert first_saver is blocks
    assert second_saver in (splitting, splitting.strategy)


# To whom it belongs

def test_a_callback_that_was_given_to_a_second_learner_says_so_in_the_first():
    "Also if the second one has only validated"
    cb = G(32)
    first = make_learner(8, cbs=cb)
    second = make_learner(8, cbs=cb)
    with second.no_bar(): second.validate()
    with pytest.raises(RuntimeError, match='this GradientAccumulation belongs to another Learner'): fit(first, 1)


def test_a_callback_that_is_passed_to_one_fit_after_the_other():
    "Of one Learner, and then of another one: `fit(cbs=...)` adds it, and takes it out at the end"
    cb = G(32, micro_batch_size=4)
    large = make_learner(32)
    learn = make_learner(8)
    for n_epoch in (1, 2):
        fit(learn, n_epoch, cbs=cb)
        fit(large, n_epoch)
        assert cb not in learn.cbs
        assert cb.opt_steps == 3*n_epoch
    assert_same_weights(learn, large, ROUNDING)
    other = fit(make_learner(16), 3, cbs=cb)
    assert_trained_as(other, large)


# Its own events

def counted(learn):
    learn.n_counted = getattr(learn, 'n_counted', 0)+1


class OwnEvents(G):
    "Has events in its class"
    def after_pred(self): counted(self.learn)
    def before_step(self): counted(self.learn)
    def after_batch(self): counted(self.learn)


def test_batch_events_of_a_subclass_come_in_training():
    "12 loader batches, 3 windows"
    learn = fit(make_learner(8, cbs=OwnEvents(32)), 1)
    assert learn.n_counted == 12+3+3
    assert_moved(learn)


# Settings, which a fit reads when it begins

def n_positive(learn): return (learn.y > 0).sum()


@pytest.mark.parametrize('cb, changes, new', [
    (G(32), dict(accum_bs=16), G(16)),
    (G(32, micro_batch_size=3), dict(micro_batch_size=None), G(32)),
    (G(32), dict(num_items=n_positive), G(32, num_items=n_positive)),
    (S(8, 32), dict(final_accum_bs=24, finish=1.), S(8, 24, finish=1.)),
    (all_blocks(), dict(blocks=lambda m: [m[0]]), all_blocks(lambda m: [m[0]]))])
@pytest.mark.filterwarnings('ignore:accumulation is not exact')  # with a count that is not the loss's
def test_settings_that_were_changed_since_the_last_fit_are_those_of_a_new_callback(cb, changes, new):
    learn = fit(make_learner(8, n=88, cbs=cb), 1)
    for name, value in changes.items(): setattr(cb, name, value)
    learn.model.load_state_dict(model().state_dict())
    fit(learn, 2)
    expected = fit(make_learner(8, n=88, cbs=new), 2)
    assert_moved(learn)
    assert_same_weights(learn, expected)
    assert losses(learn) == losses(expected)
    assert cb.strategy.micro_bs == new.strategy.micro_bs


@pytest.mark.parametrize('cb, name, value, says', [
    (G(32), 'accum_bs', 20, 'accum_bs=20 (samples) is not a multiple'),
    (G(32), 'n_acc', 32., 'accum_bs must be an int, not 32.0'),
    (G(32), 'remainder', 'keep', 'remainder must be one of'),
    (S(8, 32), 'start', .5, 'start=0.5 is after finish=0.3'),
    (all_blocks(), 'blocks', 'body', "blocks must be a function of the model, or 'auto'"),
    (GradientCache(4), 'micro_batch_size', 0, 'micro_batch_size must be at least 1')])
def test_settings_that_were_changed_are_checked_before_training(cb, name, value, says):
    "A valid one makes the fit after that"
    learn = fit(make_learner(8, cbs=cb), 1)
    before = weights(learn)
    valid = getattr(cb, name)
    setattr(cb, name, value)
    with pytest.raises((TypeError, ValueError)) as e: fit(learn, 1)
    assert says in str(e.value)
    assert_same(weights(learn), before)
    setattr(cb, name, valid)
    assert_apart(fit(learn, 1), before)


@pytest.mark.parametrize('cb, large_bs', [
    (G(32), 32),
    (G(micro_batch_size=4), 8),
    (all_blocks(), 8)])
def test_a_fit_begins_without_the_gradients_that_are_there(cb, large_bs):
    learn = fit(make_learner(8, cbs=cb), 0)
    inputs, targets = data(96)
    mse(learn.model(inputs), targets).backward()
    assert all(g.any() for g in grads(learn))
    fit(learn, 1)
    assert_moved(learn)
    expected = fit(make_learner(large_bs), 1)
    assert_same_weights(learn, expected, ROUNDING)


# What a plan is made of

class Unsized:
    "Yields 4 batches of 8, and does not say so"
    def __len__(self):
        return 4

    def __iter__(self):
        return zip(*[o.split(8) for o in data(32)])


def unsized_learner(cb):
    return Learner(DataLoaders(Unsized(), Unsized()), model(), mse, opt_func=SGD, cbs=cb)


@pytest.mark.parametrize('cb, batch_size, micro_bs', [
    (G(16, micro_batch_size=8), 8, 8),  # taken for what the loader yields
    (G(micro_batch_size=4), None, 4)])  # each loader batch is a window, of whatever size
def test_the_batch_size_of_a_loader_that_states_none(cb, batch_size, micro_bs):
    learn = fit(unsized_learner(cb), 1)
    assert cb.loader_info_of(learn.dls.train).batch_size == batch_size
    assert cb.micro_bs == micro_bs
    n_samples = cb.accum_bs or 8
    assert len(losses(learn)) == 32//n_samples


@pytest.mark.parametrize('cb', [G(16), G(16, micro_batch_size='auto')])
def test_without_a_batch_size_windows_of_several_batches_are_an_error(cb):
    with pytest.raises(ValueError, match='cannot find the batch size of Unsized, .* pass micro_batch_size'):
        fit(unsized_learner(cb), 1)


def test_a_loader_that_is_replaced_between_epochs_is_checked_again():
    windows = G(32)
    learn = make_learner(8, cbs=windows)
    other = make_learner(20).dls.train
    def replace(self):
        if self.epoch == 1: self.learn.dls = DataLoaders(other, self.dls.valid)
    learn.add_cb(Callback(before_epoch=replace))
    with pytest.raises(ValueError, match="accum_bs=32 .* not a multiple of the DataLoader's batch size of 20"):
        fit(learn, 2)
    assert windows.opt_steps == 3


# What it warns of

class Idle(Callback):
    "Does nothing at these events"
    def __init__(self, order, *events):
        self.order = order
        for event in events: setattr(self, event, self.do_nothing)

    def do_nothing(self): pass


LATE = ['before_batch of Idle is called once per window, because its order is 50 or more: if it prepares batches, set '
        'a lower order, such as cb.order = 45']


@pytest.mark.parametrize('cb, bs, kwargs, says', [
    (Idle(50, 'before_batch'), 8, {}, LATE),
    (Idle(49, 'before_batch'), 8, {}, []),
    (Idle(50, 'after_batch'), 8, {}, []),
    (Idle(50, 'before_batch'), 32, {}, []),
    (Idle(50, 'before_batch'), 8, dict(log_accum_batch=False), []),
    (Idle(0, 'before_batch', 'after_loss'), 8, dict(micro_batch_size=4), [])])
def test_callbacks_that_may_prepare_batches_but_see_windows_are_named(cb, bs, kwargs, says):
    assert warnings_of(make_learner(bs, cbs=[cb, G(32, **kwargs)])) == says


@pytest.mark.parametrize('bs, cb, is_named', [
    (8, G(32), True),
    (8, G(micro_batch_size=4), True),
    (32, G(32), False),
    (32, G(8), False),
    (8, GradientCache(4), False)])
def test_hooks_on_parameters_are_named_once_in_a_fit(bs, cb, is_named):
    "Also if they are registered in a later epoch; not if each step has one micro-batch"
    learn = make_learner(bs, cbs=cb)
    weight = learn.model[0].weight
    def register(self):
        if self.epoch == 1: weight.register_hook(noop)
    learn.add_cb(Callback(before_epoch=register))
    said = warnings_of(learn, n_epoch=3)
    assert len(said) == is_named
    if is_named: assert 'a hook that masks gradients is exact, but one that clips is not' in said[0]


def test_a_callback_that_leads_from_the_second_epoch_on_has_a_loop_of_this_fit():
    "Not that of the fit before, in which it led from the beginning"
    blocks = all_blocks()
    learn = fit(make_learner(8, cbs=blocks), 1)
    windows = GradientAccumulation(32)
    def switch_off(self): windows.run = False
    fit(learn, 2, cbs=[windows, Callback(after_epoch=switch_off)])
    assert windows.opt_steps == 3
    assert blocks.loop.n_steps == 12
