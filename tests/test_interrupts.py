"Interrupts, errors, callbacks that are removed, and copies in mid-fit: the Learner stays whole"
import io, pickle
from contextlib import redirect_stdout
import cloudpickle, pytest
from fastai.optimizer import sgd_step

from common import *
from fastxtend_accum.callback import WindowCallback

# A Learner in which something fails

struck = SimpleNamespace(where=None, exc=None, nth=0)

def strike(where):
    if where != struck.where: return
    struck.nth -= 1
    if struck.nth == 0: raise struck.exc('on purpose')

class Strikes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, grad): strike('backward'); return grad

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body,self.head = nn.Sequential(nn.Linear(5, 8), nn.Tanh()),nn.Linear(8, 1)
    def forward(self, x):
        h = self.body(x)
        if self.training: strike('forward'); h = Strikes.apply(h)
        return self.head(h)

class Loss(BaseLoss):
    def __init__(self): super().__init__(nn.MSELoss, floatify=True, is_2d=False)
    def __call__(self, *args, **kwargs): strike('loss'); return super().__call__(*args, **kwargs)

class Pick:
    "The `i`-th input or target, from data that travels with the Learner"
    def __init__(self, which): self.data = data(96)[which].float()
    def __call__(self, i): return self.data[i]

def strike_in_step(p, **kwargs): strike('step')
def opt_func(params, lr=.1, **kwargs): return Optimizer(params, [strike_in_step, sgd_step], lr=lr)
def body(m): return m.body
def rows_of(learn): return len(learn.y)

class NeedsBlocks(Callback):
    def after_loss(self):
        levels = [o.level for o in self.learn._grab_cbs(ActivationCheckpointing)]
        if self.training and 0 in levels: raise torch.OutOfMemoryError('out of memory')

PLACES = 'forward','loss','backward','step'
KINDS = dict(
    plain=list,
    windows=lambda: [GradientAccumulation(32, num_items=rows_of)],
    carry=lambda: [GradientAccumulation(24, remainder='carry')],
    drop=lambda: [GradientAccumulation(24, remainder='drop')],
    raw=lambda: [GradientAccumulation(32, log_accum_batch=False)],
    micro=lambda: [GradientAccumulation(32, micro_batch_size=3)],
    auto=lambda: [GradientAccumulation(16, micro_batch_size='auto')],
    schedule=lambda: [GradientAccumulationSchedule(8, 32)],
    adapts=lambda: [NeedsBlocks(), ActivationCheckpointing()],
    blocks=lambda: [GradientAccumulation(16), all_blocks(body)],
    cache=lambda: [GradientCache(3), all_blocks(body)],
    part=lambda: [GradientAccumulation(16), GradientCache(3, part=body)])
OURS = [o for o in KINDS if o != 'plain']

def learner(kind='plain'):
    "With all that fastai offers; 64 samples to train on, in batches of 8"
    dsets = Datasets(list(range(80)), [[Pick(0)], [Pick(1)]], splits=[list(range(64)), list(range(64, 80))])
    dls = dsets.dataloaders(bs=8, shuffle=False, num_workers=0)
    return Learner(dls, Net(), loss_func=Loss(), opt_func=opt_func, cbs=KINDS[kind]())

def ours(learn): return [cb for cb in learn.cbs if isinstance(cb, WindowCallback)]

def assert_whole(learn):
    "Nothing hides a method of its class, or is not its own"
    assert type(learn.dls.train) is type(learn.dls.valid) is TfmdDL and learn.logger is print
    assert isinstance(learn.loss_func, Loss) and '_do_one_batch' not in vars(learn)
    everything = [learn, *[o for o in learn.cbs if o not in ours(learn)], *learn.model.modules(), *L(learn.opt)]
    assert not [(o, k) for o in everything for k in vars(o) if inspect.isfunction(getattr(type(o), k, None))]

def again(learn):
    "The weights of a fit that begins with the first ones, its losses and learning rates"
    learn.model.load_state_dict(Net().state_dict())
    fit(learn, 1, method='fit_one_cycle', reset_opt=True)
    assert not any(g.any() for g in grads(learn))
    return torch.cat([weights(learn), *map(tensor, (losses(learn), learn.recorder.lrs))])

@pytest.fixture(scope='module')
def fresh():
    "A fit of new Learners, by kind"
    with redirect_stdout(io.StringIO()): return {kind:again(learner(kind)) for kind in KINDS}

def works(learn, expected, dls=None):
    "Validation, prediction and the next fit, as of a new Learner; a loaded one gets these `dls`"
    if dls: learn.dls = dls
    with quiet(learn):
        preds = learn.get_preds()[0]
        with torch.no_grad(): assert_same(preds, learn.model.eval()(data(96)[0].float()[64:80]), 1e-6)
        assert_same(learn.predict(70)[2], preds[6], 1e-6)
    assert_same(again(learn), expected)
    assert_whole(learn)

def loaded():
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return load_learner('learner.pkl')

# What has to work after an interrupt

def removed(learn, expected, plain): works(learn.remove_cbs(ours(learn)), plain)

def exported(learn, expected, plain):
    "With our callbacks, and without"
    learn.export('learner.pkl')
    one,other = loaded(),loaded()
    with quiet(one), quiet(learn): assert_same(one.predict(3)[2], learn.predict(3)[2])
    works(one, expected, learn.dls)
    works(other.remove_cbs(ours(other)), plain, learn.dls)

def copied(learn, expected, plain):
    "By `deepcopy`, and each callback by pickle; without what cannot be copied"
    for dl in learn.dls: vars(dl).pop('it', None)
    learn._end_cleanup()
    learn.loss_grad = None
    works(deepcopy(learn), expected)
    for cb in ours(learn):
        other = pickle.loads(cloudpickle.dumps(cb)).learn
        works(other.remove_cbs(ours(other)), plain)

CHECKS = exported,copied,removed,lambda learn, expected, plain: works(learn, expected)
ERRORS = KeyboardInterrupt,RuntimeError,*CANCELS,CancelStepException,CancelBackwardException

@pytest.mark.thin(37)
@pytest.mark.parametrize('kind', OURS)
@pytest.mark.parametrize('order', [-100, 5.5, 6.5, 99, math.inf])
@pytest.mark.parametrize('where', [*EVENTS, *PLACES])
def test_after_an_interrupt_all_works(fresh, kind, order, where):
    "Of the first pass, in mid-window and at its end"
    for nth in 1,7,8:
        i = len(where)+len(kind)+nth
        learn,exc,check = learner(kind),ERRORS[i%8],CHECKS[i%4]
        fault = Fault(exc, where, nth, order) if where in EVENTS else None
        if not fault: vars(struck).update(where=where, exc=exc, nth=nth)
        try: fit(learn, 1, cbs=fault)
        except BaseException as e: assert exc in ERRORS[2:] or 'on purpose' in str(e)
        struck.where = None
        if fault.count < nth if fault else struck.nth > 0: break  # it comes once an epoch, or once a window
        assert_whole(learn)
        assert not (learn.opt and any(g.any() for g in grads(learn)))
        check(learn, fresh[kind], fresh['plain'])
    assert nth > 1 or where == 'after_cancel_batch'

# Saved and copied in mid-fit

def at(event, order, f):
    "A callback of this order that calls `f(self)` at `event`"
    cb = Callback(**{event:f})
    cb.order = order
    return cb

def saved(learn):
    learn.save('a', with_opt=True)
    return learner().load('a', with_opt=False).model
def pickled(learn): return pickle.loads(pickle.dumps(deepcopy(learn.model)))
def exported_too(learn):
    learn.export('learner.pkl')
    return loaded().model

MOMENTS = [(o, True) for o in ('before_train','before_batch','after_pred','after_backward','after_batch','after_train')]
MOMENTS += [(o, False) for o in ('before_batch','after_pred','after_batch','after_epoch')]
COPIES = [(*o, copy) for o in MOMENTS for copy in (saved, pickled)]
COPIES += [(o, k, exported_too) for o,k in MOMENTS if o in ('after_batch','after_train','after_epoch')]  # else fits end

@pytest.mark.thin(13)
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('event,training,copy', COPIES)
def test_saved_and_copied_in_mid_fit(fresh, kind, event, training, copy):
    "The fit ends as if nobody had, and copies are whole, with the weights of that moment"
    def see(self):
        if self.training == training and len(found) < 2: found.append((copy(self.learn), weights(self.learn)))
    learn,found = learner(kind),[]
    fit(learn, 1, method='fit_one_cycle', cbs=at(event, 100, see))
    assert_same(weights(learn), fresh[kind][:len(weights(learn))])
    assert_whole(learn)
    assert found
    for other,then in found:
        assert_same(weights(other), then)
        assert not [m for m in other.modules() if m.forward != types.MethodType(type(m).forward, m)]

# Removed in mid-fit

def removes(cb, event, nth, order):
    n = itertools.count(1)
    return at(event, order, lambda self: next(n) == nth and self.learn.remove_cb(cb))

@pytest.mark.thin(23)
@pytest.mark.parametrize('kind', OURS)
@pytest.mark.parametrize('order', [-100, 5.5, 6.5, 99, math.inf])
@pytest.mark.parametrize('event', [o for o in EVENTS if o not in ('after_cancel_batch', 'after_fit')])
def test_removed_in_the_middle_of_a_fit(fresh, kind, order, event):
    "The fit ends, nothing stays replaced, and the next one is plain"
    for which,nth in itertools.product(range(len(ours(learner(kind)))), (1, 6)):
        learn = learner(kind)
        fit(learn, 1, cbs=removes(ours(learn)[which], event, nth, order))
        assert_whole(learn)
        assert_same(again(learn.remove_cbs(ours(learn))), fresh['plain'])

@pytest.mark.parametrize('order', [-100, 5.5, 99])
@pytest.mark.parametrize('event,nth,n', [
    ('before_batch', 2, 1), ('after_pred', 5, 2), ('after_backward', 6, 2), ('before_step', 2, 2), ('after_step', 1, 1),
    ('after_batch', 2, 2), ('before_train', 2, 3), ('before_epoch', 2, 3), ('after_train', 1, 3)])
def test_the_rest_of_the_fit_is_plain(event, nth, n, order):
    "After `n` windows of 32: the one that has begun gets its step, and each batch after it has a step of its own"
    if order < 50 and event == 'before_batch': nth,n = 6,2  # such a callback sees each loader batch
    learn,stepped = make_learner(8, cbs=GradientAccumulation(32)),[]
    def see(self): stepped.append(self.epoch)
    fit(learn, 2, cbs=[removes(learn.gradient_accumulation, event, nth, order), Callback(after_step=see)])
    starts = [*range(0, 32*n, 32), *range(32*n, 192, 8), 192]
    steps = [([i%96 for i in range(a, b)], 0) for a,b in zip(starts, starts[1:])]
    assert_same(weights(learn), reference(steps, 96, sgd)[0], ROUNDING)
    assert len(stepped) == len(steps) and len(learn.recorder.values) == 2

@pytest.mark.parametrize('kind', OURS)
@pytest.mark.parametrize('calls', ['b', 'a', 'bab'])
def test_one_callback_in_two_learners(fresh, kind, calls):
    "It works in the one that had it last; in the other an error says what to do"
    a,b = learner(kind),learner()
    b.add_cbs(a.cbs[-len(KINDS[kind]()):])
    for o in calls:
        if o == 'b': assert_same(again(b), fresh[kind])
        else:
            with pytest.raises(RuntimeError, match='belongs to another Learner: give each one of its own'): again(a)
        for learn in a,b: assert_whole(learn)
    assert_same(again(b.remove_cbs(ours(b))), fresh['plain'])

# What is left out

def test_no_gradient_from_before_a_fit():
    learn = fit(make_learner(8, cbs=GradientAccumulation(32)), 0)
    mse(learn.model(data(96)[0]), data(96)[1]).backward()
    assert_same(weights(fit(learn, 1)), weights(fit(make_learner(32), 1)), ROUNDING)

def test_interrupted_after_a_step_hyper_parameters_are_the_large_batchs():
    hypers = []
    for bs,cbs in (32, []), (8, [GradientAccumulation(32)]):
        learn = make_learner(bs, n=88, opt_func=partial(SGD, mom=.9), cbs=cbs)
        fault = Fault(KeyboardInterrupt, 'after_batch', 2, 55)
        with pytest.raises(KeyboardInterrupt): fit(learn, 1, method='fit_one_cycle', cbs=fault)
        hypers.append([dict(h) for h in learn.opt.hypers])
    assert hypers[0] == hypers[1] and hypers[0][0]['mom'] < .95

class Interrupts(random.Random):
    strikes = False
    def setstate(self, state):
        if self.strikes: raise KeyboardInterrupt

class Counts(nn.Module):
    "Draws its noise, and counts its passes"
    def __init__(self): super().__init__(); self.rng,self.n,self.out = Interrupts(0),0,nn.Linear(5, 1).double()
    def forward(self, x):
        self.n += 1
        return self.out(x)*(1+self.rng.random()/self.n)

@pytest.mark.parametrize('make,n', [(lambda: GradientCache(4), 4), (lambda: all_blocks(lambda m: m), 1)])
def test_interrupted_where_the_model_is_put_back_to_run_again(make, n):
    "It is as its first run has left it"
    learn = make_learner(16, m=Counts(), cbs=make())
    def arm(self): self.model.rng.strikes = True
    with pytest.raises(KeyboardInterrupt): fit(learn, 1, cbs=Callback(before_backward=arm))
    assert 'forward' not in vars(learn.model) and learn.model.n == n

@pytest.mark.parametrize('bs,make', [(8, lambda: GradientAccumulation(32)), (32, lambda: GradientCache(8)),
                                     (32, lambda: GradientAccumulation(micro_batch_size=8))])
def test_whoever_loads_an_interrupted_learner_need_not_have_this_package(bs, make):
    "If the callback was that of the fit alone"
    learn = make_learner(bs)
    with pytest.raises(KeyboardInterrupt): fit(learn, 1, cbs=[make(), Fault(KeyboardInterrupt, 'after_pred', 1, 0)])
    learn._end_cleanup()  # as `export` does before it pickles the Learner
    torch.save(learn, 'a.pkl')
    assert b'fastxtend_accum' not in Path('a.pkl').read_bytes()

# One fit after the other

@pytest.mark.parametrize('make', [
    Callback, SaveModelCallback, ActivationStats, lambda: EarlyStoppingCallback(patience=1, min_delta=10.)])
def test_fit_twice_is_the_large_batch_fitted_twice(make):
    "Beside fastai's callbacks, too"
    both = (32, []),(8, [GradientAccumulation(32)])
    big,small = (make_learner(bs, opt_func=Adam, cbs=[make(), *cbs]) for bs,cbs in both)
    for _ in range(2):
        for o in big,small: fit(o, 4, .01, method='fit_one_cycle')
        assert_same(weights(small), weights(big), ROUNDING)
        assert_same(losses(small), losses(big), 1e-6)
        assert small.gradient_accumulation.opt_steps == len(losses(small)) > 3

@pytest.mark.parametrize('remainder,n_steps', [('step', 6), ('carry', 6), ('drop', 4)])
def test_fine_tune(remainder, n_steps):
    "The frozen phase leaves nothing to the second"
    learn = make_learner(8, n=88, cbs=GradientAccumulation(32, remainder=remainder), splitter=lambda m: [*map(params, m[::2])])
    with quiet(learn): learn.fine_tune(2, .1)
    assert learn.gradient_accumulation.opt_steps == n_steps and not any(g.any() for g in grads(learn))

@pytest.mark.parametrize('kind', OURS)
def test_before_the_first_fit(fresh, kind):
    "What is no training is as without a callback; exported, it fits"
    plain,learn = learner(),learner(kind)
    with quiet(learn), quiet(plain):
        assert_same(learn.validate(), plain.validate(), 1e-6)
        assert_same(learn.tta()[0], plain.tta()[0], 1e-6)
    exported(learn, fresh[kind], fresh['plain'])

@pytest.mark.parametrize('make', [
    lambda: GradientAccumulation(32, micro_batch_size='auto'), lambda: GradientAccumulationSchedule(16, 32),
    lambda: GradientCache(4), all_blocks])
def test_a_model_with_attributes_of_the_same_names(make):
    "fastai's warning of shadowed attributes is not for the callback's own"
    def run(*names):
        m = model()
        for o in names: setattr(m, o, 'of the model')
        with warnings.catch_warnings():
            warnings.simplefilter('error', UserWarning)
            return weights(fit(make_learner(8, m=m, cbs=make()), 1))
    common = 'window','runner','passes','blocks','groups','levels','level','part','size','last'
    names = [o for o in common if o in dir(make())]
    assert len(names) > 2
    assert_same(run(*names), run())
