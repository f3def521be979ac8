"The callback that runs the batches: which one does, what it reads before a fit and refuses, how validation is split"
import pytest
from fastai.callback.hook import Hook

from common import *
from fastxtend_accum.callback import WindowCallback


class Counts(Callback):
    "Counts the times that `event` comes in training"
    run_valid = False
    def __init__(self, event, order=0):
        self.order = order
        self.n = 0
        setattr(self, event, self.count)

    def count(self): self.n += 1


class Sizes(nn.Module):
    "Notes how many samples it sees at a time"
    def __init__(self):
        super().__init__()
        self.inner = model()
        self.sizes = []

    def forward(self, x):
        self.sizes.append(len(x))
        return self.inner(x)


# Which callback runs the batches

def test_without_windows_a_loader_batch_is_a_window_and_the_fit_is_fastais():
    "Bit for bit"
    learn = fit(make_learner(8, n=100, cbs=WindowCallback()))
    plain = fit(make_learner(8, n=100))
    assert_moved(learn)
    assert_same(weights(learn), weights(plain))
    assert losses(learn) == losses(plain)
    assert learn.recorder.values == plain.recorder.values


@pytest.mark.parametrize('cbs,leader', [
    ([GradientAccumulation(32)], 0),
    ([ActivationCheckpointing(), GradientAccumulation(32)], 1),
    ([GradientAccumulation(32), ActivationCheckpointing()], 0),
    ([ActivationCheckpointing(), GradientCache(4)], 0),
    ([GradientCache(4), ActivationCheckpointing()], 0),
    ([GradientCache(4), ActivationCheckpointing(), GradientAccumulation(micro_batch_size='auto')], 2)])
def test_the_first_callback_that_sets_windows_leads_or_else_the_first_one(cbs, leader):
    make_learner(8, cbs=cbs)
    assert [o.is_leader() for o in cbs] == [i == leader for i in range(len(cbs))]


def test_a_callback_that_does_not_run_does_not_lead():
    "`run` is fastai's switch, which it turns on again after the fit"
    accumulation = GradientAccumulation(32)
    blocks = all_blocks()
    learn = make_learner(8, cbs=[accumulation, blocks])
    accumulation.run = False
    assert blocks.is_leader()
    fit(learn, 1)
    assert len(losses(learn)) == 12
    assert accumulation.is_leader()
    fit(learn, 1)
    assert len(losses(learn)) == 3


def test_a_callback_without_a_learner_does_not_lead():
    cb = GradientAccumulation(32)
    assert not cb.is_leader()
    learn = make_learner(8, cbs=cb)
    assert cb.is_leader()
    learn.remove_cb(cb)
    assert not cb.is_leader()


def test_of_what_saves_memory_that_which_splits_batches_comes_last():
    "Since recomputed blocks leave results as they are, they are tried first"
    cache = GradientCache('auto')
    blocks = ActivationCheckpointing()
    learn = make_learner(8, cbs=[cache, blocks])
    assert cache.memory_savers() == [blocks, cache]
    auto = GradientAccumulation(32, micro_batch_size='auto')
    learn.remove_cb(cache)
    learn.add_cb(auto)
    assert auto.memory_savers() == [blocks, auto.strategy]


# To whom it belongs

def test_a_callback_that_was_given_to_a_second_learner_says_so_in_the_first():
    cb = GradientAccumulation(32)
    first = make_learner(8, cbs=cb)
    second = make_learner(8, cbs=cb)
    assert len(losses(fit(second, 1))) == 3
    with pytest.raises(RuntimeError, match='this GradientAccumulation belongs to another Learner'): fit(first, 1)


@pytest.mark.parametrize('add', [
    lambda learn, cb: fit(learn.add_cb(cb), 1),
    lambda learn, cb: fit(learn, 1, cbs=cb)])
def test_a_callback_that_was_added_twice_says_so(add):
    cb = GradientAccumulation(32)
    with pytest.raises(ValueError, match='this GradientAccumulation was added to its Learner twice'):
        add(make_learner(8, cbs=cb), cb)


@pytest.mark.parametrize('make', [
    partial(GradientAccumulation, 32), ActivationCheckpointing, partial(GradientCache, 4)])
def test_a_callback_that_was_removed_by_the_fit_of_another_learner_says_so(make):
    "fastai leaves it in the list of the first one"
    cb = make()
    first = make_learner(8, cbs=cb)
    fit(make_learner(8), 1, cbs=cb)
    with pytest.warns(UserWarning, match=f'{type(cb).__name__} was removed from its Learner, and does nothing'):
        fit(first, 1)
    assert_same(weights(first), weights(fit(make_learner(8), 1)))


# Its own events

def counted(learn): learn.n_counted = getattr(learn, 'n_counted', 0)+1


class OwnEvents(GradientAccumulation):
    "Has events in its class"
    def after_pred(self): counted(self.learn)
    def before_step(self): counted(self.learn)
    def after_batch(self): counted(self.learn)


class Patched(GradientAccumulation): "Gets events by fastcore's `patch`"


@patch
def after_pred(self:Patched): counted(self.learn)
@patch
def before_step(self:Patched): counted(self.learn)
@patch
def after_batch(self:Patched): counted(self.learn)


class OwnEventsOfBlocks(ActivationCheckpointing):
    def after_pred(self): counted(self.learn)
    def before_step(self): counted(self.learn)
    def after_batch(self): counted(self.learn)


def with_events_of_its_own():
    cb = GradientAccumulation(32)
    for event in ('after_pred', 'before_step', 'after_batch'):
        setattr(cb, event, lambda: counted(cb.learn))
    return cb


@pytest.mark.parametrize('make,n_expected', [
    (partial(OwnEvents, 32), 12+3+3),
    (partial(Patched, 32), 12+3+3),
    (with_events_of_its_own, 12+3+3),
    (OwnEventsOfBlocks, 12+12+12)])
def test_batch_events_of_a_subclass_or_of_the_object_come_in_training(make, n_expected):
    "12 loader batches, 3 windows"
    learn = fit(make_learner(8, cbs=make()), 1)
    assert learn.n_counted == n_expected
    assert_moved(learn)


# Settings, which a fit reads when it begins

G = GradientAccumulation
S = GradientAccumulationSchedule


@pytest.mark.parametrize('cb,changes,new', [
    (G(32), dict(accum_bs=16), G(16)),
    (G(32), dict(n_acc=48), G(48)),
    (G(32), dict(micro_batch_size=3), G(32, micro_batch_size=3)),
    (G(32, micro_batch_size=3), dict(micro_batch_size=None), G(32)),
    (G(32), dict(log_accum_batch=False), G(32, log_accum_batch=False)),
    (G(32), dict(remainder='drop'), G(32, remainder='drop')),
    (S(8, 32), dict(start_accum_bs=16), S(16, 32)),
    (S(8, 32), dict(final_accum_bs=24, finish=1.), S(8, 24, finish=1.))])
def test_settings_that_were_changed_since_the_last_fit_are_those_of_a_new_callback(cb, changes, new):
    learn = fit(make_learner(8, n=88, cbs=cb), 1)
    for name, value in changes.items(): setattr(cb, name, value)
    learn.model.load_state_dict(model().state_dict())
    fit(learn, 2)
    expected = fit(make_learner(8, n=88, cbs=new), 2)
    assert_moved(learn)
    assert_same(weights(learn), weights(expected))
    assert losses(learn) == losses(expected)
    assert cb.micro_bs == new.micro_bs


@pytest.mark.parametrize('cb,changes,says', [
    (G(32), dict(accum_bs=0), 'accum_bs must be at least 1 sample, not 0'),
    (G(32), dict(accum_bs=20), 'accum_bs=20 counts samples, and is not a multiple'),
    (G(n_acc=32), dict(n_acc=-8), 'n_acc must be at least 1 sample, not -8'),
    (G(32), dict(micro_batch_size='half'), "micro_batch_size must be a number of samples or 'auto'"),
    (G(32), dict(remainder='keep'), "remainder must be one of"),
    (G(32), dict(log_accum_batch=1), 'log_accum_batch must be True or False'),
    (S(8, 32), dict(start=.5), 'start=0.5 is after finish=0.3'),
    (all_blocks(), dict(blocks='body'), "blocks must be a function of the model, or 'auto'"),
    (GradientCache(4), dict(rows=0), 'rows must be at least 1')])
def test_settings_that_were_changed_are_checked_before_training(cb, changes, says):
    learn = fit(make_learner(8, cbs=cb), 1)
    before = weights(learn)
    for name, value in changes.items(): setattr(cb, name, value)
    with pytest.raises((TypeError, ValueError)) as e: fit(learn, 1)
    assert says in str(e.value)
    assert_same(weights(learn), before)


@pytest.mark.parametrize('cb,large_bs', [(G(32), 32), (G(micro_batch_size=4), 8), (all_blocks(), 8)])
def test_a_fit_begins_without_the_gradients_that_are_there(cb, large_bs):
    learn = fit(make_learner(8, cbs=cb), 0)
    inputs, targets = data(96)
    mse(learn.model(inputs), targets).backward()
    assert all(g.any() for g in grads(learn))
    fit(learn, 1)
    assert_moved(learn)
    expected = fit(make_learner(large_bs), 1)
    assert_same(weights(learn), weights(expected), ROUNDING)


# lr_find

@pytest.mark.parametrize('num_it', [6, 20])
@pytest.mark.parametrize('make', [partial(G, 32), partial(G, 32, remainder='carry'), partial(G, micro_batch_size=4)])
def test_lr_find_takes_as_many_windows_as_asked_for(make, num_it):
    steps = Counts('after_step')
    learn = make_learner(8, n=88, cbs=[make(), steps])
    with learn.no_bar(): learn.lr_find(num_it=num_it, stop_div=False, show_plot=False)
    assert steps.n == num_it


@pytest.mark.parametrize('n_epoch,num_it', [(2, 100), (3, 20)])
@pytest.mark.parametrize('is_in_fit', [True, False])
def test_a_fit_with_an_lr_finder_has_the_epochs_that_were_asked_for(n_epoch, num_it, is_in_fit):
    "Unless these happen to be as many as `lr_find` would ask for with its number of iterations"
    finder = LRFinder(num_it=num_it, stop_div=False)
    epochs = Counts('before_epoch')
    learn = make_learner(8, cbs=[G(32), epochs])
    if not is_in_fit: learn.add_cb(finder)
    fit(learn, n_epoch, cbs=finder if is_in_fit else None)
    assert epochs.n == n_epoch


# What a plan is made of

class Unsized:
    "Yields batches of 8, and does not say so"
    def __init__(self, n=32): self.batches = [*zip(*[o.split(8) for o in data(n)])]
    def __iter__(self): return iter(self.batches)
    def __len__(self): return len(self.batches)


def unsized_learner(cb):
    return Learner(DataLoaders(Unsized(), Unsized()), model(), mse, opt_func=SGD, cbs=cb)


@pytest.mark.parametrize('cb,batch_size', [
    (G(16, micro_batch_size=8), 8),  # taken for what the loader yields
    (G(micro_batch_size=4), None),  # each loader batch is a window, of whatever size
    (WindowCallback(), None)])
def test_the_batch_size_of_a_loader_that_states_none(cb, batch_size):
    learn = fit(unsized_learner(cb), 1)
    assert cb.loader_info_of(learn.dls.train).batch_size == batch_size
    n_samples = cb.accum_bs or 8
    assert len(losses(learn)) == 32//n_samples


@pytest.mark.parametrize('cb', [G(16), G(16, micro_batch_size='auto')])
def test_without_a_batch_size_windows_of_several_batches_are_an_error(cb):
    with pytest.raises(ValueError, match='cannot find the batch size of Unsized, .* pass micro_batch_size'):
        fit(unsized_learner(cb), 1)


@pytest.mark.parametrize('cb,joins,counts_samples', [
    (G(32), True, False),
    (G(8), False, False),
    (G(micro_batch_size=4), False, False),
    (G(32, remainder='carry'), True, True),
    (S(8, 32), True, True),
    (S(8, 8), False, True),
    (all_blocks(), False, False)])
def test_a_plan_tells_whether_windows_join_batches_and_differ_in_size(cb, joins, counts_samples):
    fit(make_learner(8, cbs=cb), 1)
    plan = cb.loop.batches.plan
    assert cb.joins_batches(plan) == joins
    assert cb.counts_samples(plan) == counts_samples


def test_a_loader_that_is_replaced_between_epochs_is_checked_again():
    learn = make_learner(8, cbs=G(32))
    other = make_learner(20).dls.train
    def replace(self):
        if self.epoch == 1: self.learn.dls = DataLoaders(other, self.dls.valid)
    steps = Counts('after_step')
    learn.add_cbs([Callback(before_epoch=replace), steps])
    with pytest.raises(ValueError, match="accum_bs=32 .* is not a multiple of the DataLoader's batch of 20"):
        fit(learn, 2)
    assert steps.n == 3


# What it refuses, or warns of, before training

class OwnBatch(Learner):
    def one_batch(self, i, b): super().one_batch(i, b)


class OwnStep(Learner):
    def _do_grad_opt(self): super()._do_grad_opt()


@pytest.mark.parametrize('cls,name', [(OwnBatch, 'one_batch'), (OwnStep, '_do_grad_opt')])
@pytest.mark.parametrize('cb', [G(32), G(micro_batch_size=4), all_blocks()])
def test_a_learner_with_a_loop_of_its_own_is_refused_where_it_would_be_overruled(cls, name, cb):
    learn = cls(make_learner(8).dls, model(), mse, opt_func=SGD, cbs=cb)
    says = f'{cls.__name__} has its own {name}, which {type(cb).__name__} would overrule'
    with pytest.raises(ValueError, match=says):
        fit(learn, 1)
    assert_same(weights(learn), weights(model()))


@pytest.mark.parametrize('cls', [OwnBatch, OwnStep])
def test_a_learner_with_a_loop_of_its_own_runs_whole_batches_by_it(cls):
    learn = fit(cls(make_learner(8).dls, model(), mse, opt_func=SGD, cbs=G(8)))
    plain = fit(make_learner(8))
    assert_moved(learn)
    assert_same(weights(learn), weights(plain))


class Prepares(Callback):
    def before_batch(self): pass


class Logs(Prepares):
    def after_batch(self): pass


class SetsUpPasses(Prepares):
    def after_loss(self): pass


def warnings_of_fit(cb, order, bs=8, **args):
    "Returns what is said before training about `cb`"
    cb.order = order
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        fit(make_learner(bs, cbs=[cb, G(32, **args)]), 1)
    return [str(o.message) for o in said if type(cb).__name__ in str(o.message)]


def test_a_late_callback_that_may_prepare_batches_is_named():
    said, = warnings_of_fit(Prepares(), order=50)
    assert said.startswith('before_batch of Prepares is called once per window, since its order is 50 or more')


class ReadsOutputs(Callback):
    def after_batch(self): self.n_outputs = len(self.pred)


class ReadsTargets(Callback):
    def after_step(self): self.mean = self.y.mean()


class ReadsInputsEarly(ReadsOutputs):
    def before_batch(self): self.n_inputs = len(self.x)


def count_inputs(self): self.n_inputs = len(self.x)
def count_batches(self): self.n = self.iter


@pytest.mark.parametrize('cb,order,event', [
    (ReadsOutputs(), 60, 'after_batch'),
    (ReadsOutputs(), 0, 'after_batch'),
    (ReadsTargets(), 60, 'after_step'),
    (Callback(after_batch=count_inputs), 60, 'after_batch'),
    (ReadsInputsEarly(), 60, 'after_batch')])
def test_a_callback_that_reads_the_last_loader_batch_of_a_window_is_named(cb, order, event):
    said, = warnings_of_fit(cb, order)
    assert said.startswith(f'{event} of {type(cb).__name__} reads the batch, which there is the last loader batch')


@pytest.mark.parametrize('cb,order,args', [
    (ReadsInputsEarly(), 49, {}),  # both of its events come for each loader batch
    (ReadsOutputs(), 60, dict(bs=32)),
    (ReadsOutputs(), 60, dict(bs=32, micro_batch_size=8)),
    (ReadsOutputs(), 60, dict(log_accum_batch=False)),
    (Callback(after_batch=count_batches), 60, {})])
def test_who_reads_each_loader_batch_or_nothing_is_not_named(cb, order, args):
    assert warnings_of_fit(cb, order, **args) == []


@pytest.mark.parametrize('cb,order,bs', [(Prepares(), 49, 8), (Prepares(), 50, 32), (Logs(), 50, 8)])
def test_who_comes_early_or_logs_or_sees_each_loader_batch_anyway_is_not_named(cb, order, bs):
    assert not warnings_of_fit(cb, order, bs)


@pytest.mark.parametrize('micro_batch_size', [4, 'auto'])
def test_a_callback_that_may_take_back_in_a_pass_what_it_sets_up_is_named(micro_batch_size):
    said, = warnings_of_fit(SetsUpPasses(), 0, micro_batch_size=micro_batch_size)
    expected = 'after_loss of SetsUpPasses is called once per micro-batch, before_batch once per loader batch'
    assert said.startswith(expected)


@pytest.mark.parametrize('cb,args', [(SetsUpPasses(), {}), (Logs(), dict(micro_batch_size=4))])
def test_without_micro_batches_or_such_an_event_it_is_not_named(cb, args):
    assert not warnings_of_fit(cb, 10, **args)


# The end of an epoch

def test_training_metrics_of_an_epoch_without_a_batch_are_nan():
    "Trackers cannot compare None"
    recorder = Recorder(train_metrics=True)
    learn = make_learner(8, n=5, drop_last=True, metrics=[mse], cbs=G(32, remainder='carry'))
    learn.remove_cb(learn.recorder)
    learn.add_cb(recorder)
    fit(learn, 1)
    row, = recorder.values
    n_train = 2  # the loss and the metric
    assert all(math.isnan(o) for o in row[:n_train])
    assert not any(math.isnan(o) for o in row[n_train:])


class RunsOut(nn.Module):
    "Runs out of memory in training with more than `limit` samples"
    def __init__(self, limit, message='out of memory'):
        super().__init__()
        self.inner = model()
        self.limit = limit
        self.message = message

    def forward(self, x):
        if self.training and len(x) > self.limit: raise torch.OutOfMemoryError(self.message)
        return self.inner(x)


@pytest.mark.parametrize('cb', [G(32), WindowCallback()])
def test_a_remedy_is_named_where_whole_batches_run_out_of_memory(cb):
    says = "out of memory with batches of 8 samples: a smaller bs, micro_batch_size='auto'"
    with pytest.warns(UserWarning, match=says):
        with pytest.raises(torch.OutOfMemoryError): fit(make_learner(8, m=RunsOut(4), cbs=cb), 1)


def test_a_remedy_is_named_for_batches_of_an_unknown_size_too():
    learn = unsized_learner(WindowCallback())
    learn.model = RunsOut(4)
    with pytest.warns(UserWarning, match='out of memory with these batches: a smaller bs'):
        with pytest.raises(torch.OutOfMemoryError): fit(learn, 1)


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model()

    def forward(self, x): raise RuntimeError('on purpose')


@pytest.mark.parametrize('cb,m,error', [
    (G(32), Fails(), 'on purpose'), (G(micro_batch_size=4), RunsOut(2), 'out of memory')])
def test_no_remedy_is_named_for_another_error_or_where_batches_are_split_already(cb, m, error):
    "A warning would be an error here"
    with pytest.raises(RuntimeError, match=error): fit(make_learner(8, m=m, cbs=cb), 1)


# Validation

@pytest.mark.parametrize('cb,sizes', [
    (G(micro_batch_size=6), [6, 5, 5, 4]),  # validation batches have 16 and 4 samples
    (GradientCache(6), [6, 5, 5, 4]),
    (G(micro_batch_size='auto'), [16, 4]),
    (all_blocks(lambda m: [m.inner]), [16, 4]),
    (G(32), [16, 4])])
def test_validation_runs_in_micro_batches_where_training_does(cb, sizes):
    learn = make_learner(8, m=Sizes(), cbs=cb)
    with quiet(learn): loss, = learn.validate()
    assert learn.model.sizes == sizes
    with quiet(make_learner(8)) as plain: expected, = plain.validate()
    assert loss == pytest.approx(expected, rel=1e-6)


def test_only_the_part_is_split_in_validation():
    m = nn.Sequential(Sizes(), Sizes())
    m[1].inner = nn.Tanh()
    learn = make_learner(8, m=m, cbs=GradientCache(6, part=lambda m: m[0]))
    with quiet(learn): learn.validate()
    assert m[0].sizes == [6, 5, 5, 4]
    assert m[1].sizes == [16, 4]


def test_hooks_on_layers_see_whole_validation_batches():
    "As `hook_outputs` needs it; they are split only if memory runs out"
    learn = make_learner(8, m=Sizes(), cbs=G(micro_batch_size=6))
    seen = []
    with Hook(learn.model.inner, lambda m, i, o: seen.append(len(o))):
        with quiet(learn): learn.validate()
    assert seen == [16, 4]
    with quiet(learn): learn.validate()
    assert learn.model.sizes == [16, 4, 6, 5, 5, 4]
