"A Learner's life with the callback: fit twice, interrupted, cancelled, saved, loaded, fine-tuned, without it again"
import itertools
import pytest

from common import *
from fastxtend_accum.windows.state import Snapshot

EVENTS = ['before_fit','before_epoch','before_train','before_batch','after_pred','after_loss','before_backward','after_backward',
          'before_step','after_step','after_cancel_batch','after_batch','after_train','before_validate','after_validate','after_epoch',
          'after_fit']
PER_BATCH = EVENTS[3:12]
CANCELS = [CancelBatchException, CancelTrainException, CancelEpochException, CancelFitException]

class Fault(Callback):
    "Raises `exc` at the `nth` time that `event` fires in training"
    def __init__(self, exc, event, nth, order):
        self.exc,self.event,self.nth,self.order,self.count = exc,event,nth,order,0
        setattr(self, event, self.strike)
    def strike(self):
        self.count += 1
        if self.count == self.nth: raise self.exc('on purpose')

def clean(cbs=None, **kwargs): return make_learner(8, n=88, opt_func=partial(SGD, mom=0.9), cbs=cbs, **kwargs)
def after_a_fault(learn):
    "The next fit from the same weights, and whether the loggers are as they were"
    learn.model.load_state_dict(model().state_dict())
    fit(learn, 1, method='fit_one_cycle', reset_opt=True)
    for cb in learn.cbs: assert not {'after_batch','before_batch','after_train','after_epoch'} & set(vars(cb)), cb
    assert all((g == 0).all() for g in grads(learn))
    return weights(learn),losses(learn),learn.recorder.lrs,learn.recorder.accum_bs

@pytest.fixture(scope='module')
def undisturbed(): return {o: after_a_fault(clean(GradientAccumulation(32, remainder=o))) for o in ('step','carry','drop')}

@pytest.mark.thin(29)
@pytest.mark.parametrize('order', [-5, 7, 99])
@pytest.mark.parametrize('event', EVENTS)
@pytest.mark.parametrize('exc', [KeyboardInterrupt, ZeroDivisionError, *CANCELS, CancelStepException, CancelBackwardException])
def test_the_fit_after_a_fault_is_clean(undisturbed, exc, event, order):
    "At every micro-batch, the remainders in turn; where fastai does not catch a Cancel, it comes out of the fit"
    once_a_window = event in ('before_step','after_step') or event == 'after_backward' and order > 6
    n_strikes = 2 if once_a_window else 8 if event == 'after_cancel_batch' else 11 if event in PER_BATCH else 1
    nths = range(1, n_strikes+1)
    for remainder,nth in zip(itertools.cycle(undisturbed), nths):
        if remainder == 'drop': nth = min(nth, 6 if event == 'after_cancel_batch' else 8)  # the last three micro-batches are not computed
        learn = clean(GradientAccumulation(32, remainder=remainder))
        fault = Fault(exc, event, nth, order)
        try: fit(learn, 1, cbs=fault)
        except BaseException: pass
        assert fault.count >= nth
        for a,b in zip(after_a_fault(learn), undisturbed[remainder], strict=True): assert_same(a, b)

@pytest.mark.thin(7)
@pytest.mark.parametrize('nth', range(1, 13))
@pytest.mark.parametrize('order', [-5, 7, 99])
@pytest.mark.parametrize('event', ['before_batch','after_pred','after_loss','before_backward'])
def test_a_cancelled_micro_batch_does_not_count(event, order, nth):
    "96 samples in micro-batches of 8, one of them cancelled: the windows close up"
    exc = CancelBackwardException if event == 'before_backward' else CancelBatchException
    learn = make_learner(8, cbs=[GradientAccumulation(32), Fault(exc, event, nth, order)])
    fit(learn, 1)
    idxs = [i for i in range(96) if i//8 != nth-1]
    steps = [(idxs[i:i+32], 0) for i in (0, 32, 64)]
    assert learn.recorder.accum_bs == [32,32,24]
    assert_same(weights(learn), reference(steps, 96, sgd)[0], ROUNDING)

@pytest.mark.parametrize('order', [-5, 7, 99])
def test_a_micro_batch_cancelled_after_its_backward_takes_the_window_with_it(order):
    "Its gradient cannot be told from the others': micro-batches 0 to 2 are gone, 3 opens a window"
    event = 'after_backward' if order < 6 else 'before_step'  # later callbacks see only the window's last micro-batch
    learn = make_learner(8, cbs=[GradientAccumulation(32), Fault(CancelBatchException, event, 3 if order < 6 else 1, order)])
    fit(learn, 1)
    first = 24 if order < 6 else 32
    steps = [(list(range(i, min(i+32, 96))), 0) for i in range(first, 96, 32)]
    assert learn.recorder.accum_bs == ([len(o) for o,_ in steps] if order < 6 else [32,32,32])  # cancelled at the step it is logged, as fastai does
    assert_same(weights(learn), reference(steps, 96, sgd)[0], ROUNDING)

def test_a_cancelled_step_takes_its_window_with_it():
    learn = make_learner(8, cbs=[GradientAccumulation(32), Fault(CancelStepException, 'before_step', 2, 20)])
    fit(learn, 1)
    assert learn.gradient_accumulation.opt_steps == 2 and len(losses(learn)) == 3  # a skipped step is logged, as fastai does
    steps = [(list(range(i, i+32)), 0) for i in (0, 64)]
    assert_same(weights(learn), reference(steps, 96, sgd)[0], ROUNDING)

def test_train_metrics_leave_a_cancelled_micro_batch_out():
    def count(pred, targ): seen.append(len(targ)); return tensor(0.)
    seen = []
    learn = make_learner(8, metrics=count, cbs=[GradientAccumulation(32), Recorder(train_metrics=True),
                                                Fault(CancelBatchException, 'before_batch', 3, 0)])
    learn.remove_cb(learn.cbs.filter(risinstance(Recorder))[0])
    fit(learn, 1, cbs=Callback(before_validate=lambda self: stop(CancelValidException())))
    assert sum(seen) == 88

# Gradients that are left over

def test_no_gradient_from_before_a_fit():
    learn = make_learner(8, cbs=GradientAccumulation(32))
    fit(learn, 0)
    mse(learn.model(data(96)[0]), data(96)[1]).backward()
    fit(learn, 1)
    assert_same(weights(learn), weights(fit(make_learner(32), 1)), ROUNDING)

@pytest.mark.parametrize('remainder', ['step','carry','drop'])
def test_fine_tune(remainder):
    "The frozen phase leaves nothing to the second: each phase against the large batch, 88 samples an epoch"
    def tuned(bs, cbs, n):
        m = nn.Sequential(*model())
        learn = make_learner(bs, n=n, m=m, cbs=cbs, splitter=lambda m: [params(m[0]), params(m[2])])
        with quiet(learn): learn.fine_tune(2, 0.1)
        assert all((g == 0).all() for g in grads(learn))
        return learn
    small = tuned(8, GradientAccumulation(32, remainder=remainder), 96)
    assert_same(weights(small), weights(tuned(32, None, 96)), ROUNDING)
    assert tuned(8, GradientAccumulation(32, remainder=remainder), 88).gradient_accumulation.opt_steps == dict(step=6, carry=5, drop=4)[remainder]

@pytest.mark.parametrize('how', ['removed', 'in fit'])
def test_interrupted_and_then_without_it(how):
    "After a KeyboardInterrupt in mid-window and without the callback, the Learner is as if it had never had it"
    learn = clean()
    accum = GradientAccumulation(32)
    cbs = L(Fault(KeyboardInterrupt, 'after_batch', 6, 55))
    if how == 'in fit': cbs.append(accum)
    else: learn.add_cb(accum)
    with pytest.raises(KeyboardInterrupt): fit(learn, 1, cbs=cbs)
    if how == 'removed': learn.remove_cb(accum)
    assert all((g == 0).all() for g in grads(learn))
    learn.model.load_state_dict(model().state_dict())
    fit(learn, 2, reset_opt=True)
    plain = fit(clean(), 2)
    assert_same(weights(learn), weights(plain))
    assert_same(losses(learn), losses(plain))

def test_interrupted_at_a_step_the_optimizer_is_given_back():
    "The step held the optimizer to the window's first hyper-parameters"
    hypers = []
    for bs,nth,cbs in (32, 2, []), (8, 8, [GradientAccumulation(32)]):
        learn = make_learner(bs, n=88, opt_func=partial(SGD, mom=0.9))
        with pytest.raises(KeyboardInterrupt): fit(learn, 1, method='fit_one_cycle', cbs=[Fault(KeyboardInterrupt, 'after_batch', nth, 55), *cbs])
        hypers.append([dict(h) for h in learn.opt.hypers])
    assert hypers[0] == hypers[1] and hypers[0][0]['mom'] < .95

def test_interrupted_at_its_end():
    "The next fit begins anew"
    def strikes(*args): raise KeyboardInterrupt
    learn = clean(accum := GradientAccumulation(32))
    with pytest.raises(KeyboardInterrupt): fit(learn, 1, cbs=Callback(after_epoch=lambda self: setattr(accum.now.hypers, 'restore', strikes)))
    assert accum.now is None and accum.opt_steps == 3
    learn.model.load_state_dict(model().state_dict())
    assert_same(weights(fit(learn, 2, reset_opt=True)), weights(fit(clean(GradientAccumulation(32)), 2)))

class Interrupts(random.Random):
    "Random numbers; their state cannot be set once it `strikes`"
    strikes = False
    def setstate(self, state):
        if self.strikes: self.strikes = False; raise KeyboardInterrupt
        super().setstate(state)

class Counts(nn.Module):
    "Draws its noise, and counts its passes"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rng,self.n,self.out = Interrupts(0),0,nn.Linear(5, 1).double()
    def forward(self, x):
        self.n += 1
        return self.out(x)*(1+self.rng.random()/self.n)

@pytest.mark.parametrize('cbs', [lambda: GradientCache(4), lambda: ActivationCheckpointing(lambda m: m, adapt=False)])
def test_interrupted_where_the_model_is_put_back_to_run_again(cbs):
    "It is as its first run has left it: nothing stays replaced, and no count goes back"
    learn = make_learner(16, m=Counts(), cbs=cbs())
    strike = Callback(before_backward=lambda self: setattr(self.model.rng, 'strikes', True))
    with pytest.raises(KeyboardInterrupt): fit(learn, 1, cbs=strike)
    assert 'forward' not in vars(learn.model) and learn.model.n == (4 if hasattr(learn, 'gradient_cache') else 1)
    learn.opt.zero_grad()
    before = weights(learn)
    assert (weights(fit(learn, 1))-before).abs().max() > 1e-2

def test_putting_back_empties_no_attributes_and_nothing_that_has_not_moved():
    "An interrupt would leave it empty"
    def clear(self): raise AssertionError('emptied')
    a,b = [type('Keeps', (o,), dict(clear=clear))(dict(a=1, b=2)) for o in (dict, list)]
    saved = Snapshot([a, b])
    a.update(a=3, c=4)
    saved.put_back()
    assert [*a.items()] == [('a', 1), ('b', 2)] and b == ['a','b']
    moved = dict(a=1, b=2)
    saved = Snapshot([moved])
    moved['a'] = moved.pop('a')
    saved.put_back()
    assert [*moved] == ['a','b']

# Everything else

def test_fit_twice_is_the_large_batch_fitted_twice():
    a,b = make_learner(32, opt_func=Adam),make_learner(8, opt_func=Adam, cbs=GradientAccumulation(32))
    for _ in range(2):
        for o in a,b: fit(o, 2, method='fit_one_cycle')
        assert_same(weights(b), weights(a), ROUNDING)
        assert_same(losses(b), losses(a), 1e-6)
        assert b.gradient_accumulation.opt_steps == 6

def test_removed_it_is_as_if_it_had_never_been():
    learn = fit(make_learner(8, cbs=GradientAccumulation(32)), 1)
    learn.model.load_state_dict(model().state_dict())
    learn.remove_cb(GradientAccumulation)
    plain = fit(make_learner(8), 2)
    assert_same(weights(fit(learn, 2, reset_opt=True)), weights(plain))
    assert_same(losses(learn), losses(plain))

class Pick:
    "The `i`-th sample's input or target, from data that travels with the Learner"
    def __init__(self, which): self.data = data(96)[which].float()
    def __call__(self, i): return self.data[i]

def whole_learner(cbs=None, m=None):
    "A Learner with all that fastai offers: splits, test sets, export"
    dsets = Datasets(list(range(96)), [[Pick(0)], [Pick(1)]], splits=[list(range(64)), list(range(64, 96))])
    return Learner(dsets.dataloaders(bs=8, shuffle=False, num_workers=0), m or model().float(), loss_func=MSELossFlat(), opt_func=Adam, cbs=cbs)

@pytest.mark.parametrize('cb', [GradientAccumulation(32), GradientAccumulationSchedule(16, 32), GradientAccumulation(20)])
def test_validate_predict_and_the_rest(cb):
    "Nothing that is no training is touched, not even by a callback that could not train (20 is no multiple of 8)"
    plain,learn = whole_learner(),whole_learner(cb)
    with quiet(learn), quiet(plain):
        assert learn.validate() == plain.validate()
        assert_same(learn.get_preds()[0], plain.get_preds()[0])
        assert_same(learn.tta()[0], plain.tta()[0])
        assert_same(learn.predict(3)[2], plain.predict(3)[2])

def test_export_and_load():
    for when in 'before','after':
        learn = whole_learner(GradientAccumulation(32, num_items=lambda learn: len(learn.y)))
        if when == 'after': fit(learn, 1)
        learn.export('learner.pkl')
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            loaded = load_learner('learner.pkl')
        with quiet(loaded), quiet(learn): assert_same(loaded.predict(3)[2], learn.predict(3)[2])
        loaded.dls = learn.dls
        with quiet(loaded): loaded.validate()
        assert_same(weights(fit(loaded, 1, reset_opt=True)), weights(fit(learn, 1, reset_opt=True)))

def test_save_and_load_with_opt():
    a,b = (make_learner(8, opt_func=Adam, cbs=GradientAccumulation(32)) for _ in range(2))
    fit(a, 1).save('half', with_opt=True)
    fit(b.load('half', with_opt=True), 1)
    assert_same(weights(fit(a, 1)), weights(b))

def test_save_model_and_early_stopping():
    cbs = [SaveModelCallback(fname='best'), EarlyStoppingCallback(patience=1, min_delta=10.)]
    big,small = (fit(make_learner(bs, cbs=[*deepcopy(cbs), *o]), 5) for bs,o in ((32, []), (8, [GradientAccumulation(32)])))
    assert len(small.recorder.values) == len(big.recorder.values) < 5
    assert_same(weights(small), weights(big), ROUNDING)

def test_resume_with_start_epoch():
    def run(n, **kw): return fit(make_learner(8, n=88, opt_func=Adam, cbs=GradientAccumulation(32)), n, method='fit_one_cycle', **kw)
    whole = run(3, cbs=SaveModelCallback(every_epoch=True, with_opt=True))
    resumed = make_learner(8, n=88, opt_func=Adam, cbs=GradientAccumulation(32)).load('model_0', with_opt=True)
    fit(resumed, 3, method='fit_one_cycle', start_epoch=1)
    assert_same(weights(resumed), weights(whole), ROUNDING)
    again = fit(make_learner(8, n=88, cbs=GradientAccumulation(32)), 3, method='fit_flat_cos', start_epoch=1)  # fastai's begins at 0 again
    assert [len(o.recorder.losses) for o in (resumed, again)] == [6, 9]

def test_resume_with_carry_loses_the_open_window():
    "24 of 88 samples are left for the next epoch: the resumed fit begins with none"
    def learner(): return make_learner(8, n=88, cbs=GradientAccumulation(32, remainder='carry'))
    whole = fit(learner(), 3, method='fit_one_cycle', cbs=SaveModelCallback(every_epoch=True, with_opt=True))
    resumed = fit(learner().load('model_0', with_opt=True), 3, method='fit_one_cycle', start_epoch=1)
    assert [sum(o.recorder.accum_bs) for o in (whole, resumed)] == [8*32, 5*32]  # the first epoch had 2 windows

def test_reduce_lr_on_plateau_reaches_a_carried_window():
    "The learning rate that a callback sets between epochs survives the step of a window that began before"
    learn = make_learner(8, n=88, cbs=[GradientAccumulation(32, remainder='carry'), ReduceLROnPlateau(min_delta=10.)])
    fit(learn, 3)
    assert_same(learn.recorder.lrs, [.1]*6+[.01]*2, 1e-9)

@pytest.mark.parametrize('event', ['after_step', 'after_batch'])
def test_a_scheduler_that_moves_after_the_step(event):
    "It multiplies the learning rate where it stands, as PyTorch's schedulers do: the large batch's rates, and nothing of it is undone"
    def halve(cb):
        if cb.training: cb.opt.set_hyper('lr', cb.opt.hypers[0]['lr']/2)
    big,small = (fit(make_learner(bs, cbs=[Callback(**{event:halve}), *cbs])) for bs,cbs in ((32, []), (8, [GradientAccumulation(32)])))
    assert big.recorder.lrs[0] > 100*big.opt.hypers[0]['lr']
    assert_same(small.recorder.lrs, big.recorder.lrs)
    assert small.opt.hypers[0]['lr'] == big.opt.hypers[0]['lr']
    assert_same(weights(small), weights(big), ROUNDING)

@pytest.mark.parametrize('make', [
    partial(GradientClip, 1.), partial(EarlyStoppingCallback, patience=9), ActivationStats, BnFreeze, CSVLogger,
    TerminateOnNaNCallback, ShowGraphCallback, SaveModelCallback, ReduceLROnPlateau])
@pytest.mark.parametrize('bs', [4, 8])
def test_every_callback_at_two_micro_batch_sizes_and_fitted_twice(make, bs):
    learn = make_learner(bs, cbs=[GradientAccumulation(32), make()])
    for _ in range(2):
        learn.fit(2)
        assert len(losses(learn)) == 6 and not np.isnan(losses(learn)).any()

@pytest.mark.parametrize('make', [lambda: GradientAccumulation(32, micro_batch_size='auto'), lambda: GradientAccumulationSchedule(16, 32), lambda: GradientCache(4)])
def test_a_model_with_attributes_of_the_same_names(make):
    "Positions and windows are common in models: fastai's warning of shadowed attributes is not for the callback's own"
    def run(*names):
        m = model()
        for o in names: setattr(m, o, 'of the model')
        with warnings.catch_warnings():
            warnings.simplefilter('error', UserWarning)
            return fit(make_learner(8, m=m, cbs=make()))
    names = [o for o in ('window','now','budget','part','num_items','micro_batch_size','blocks','told','trains') if o in vars(make())]
    assert len(names) > 2
    assert_same(weights(run(*names)), weights(run()))
