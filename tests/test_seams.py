"Seam: what a fit lends. After an interrupt, an error or `remove_cb`, wherever it strikes, the Learner works and nothing stays replaced"
import cloudpickle, io, pickle
from contextlib import redirect_stdout
from itertools import cycle
import pytest
from fastai.optimizer import sgd_step

from common import *
from test_life import EVENTS, Fault, Pick

# Faults inside the training itself, not in a callback

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
    def __init__(self): super().__init__(); torch.manual_seed(0); self.body,self.head = nn.Sequential(nn.Linear(5, 8), nn.Tanh()),nn.Linear(8, 1)
    def forward(self, x):
        h = self.body(x)
        if self.training: strike('forward'); h = Strikes.apply(h)
        return self.head(h)

class Loss(BaseLoss):
    def __init__(self): super().__init__(nn.MSELoss, floatify=True, is_2d=False)
    def __call__(self, *args, **kwargs): strike('loss'); return super().__call__(*args, **kwargs)

def strike_in_step(p, **kwargs): strike('step')
def opt_func(params, lr=.1, **kwargs): return Optimizer(params, [strike_in_step, sgd_step], lr=lr)
def one_block(m): return m.body
def rows_of(learn): return len(learn.y)

class NeedsBlocks(Callback):
    "Memory runs out, unless blocks are recomputed"
    def after_loss(self):
        if self.training and 0 in [o.level for o in self.learn._grab_cbs(ActivationCheckpointing)]: raise torch.OutOfMemoryError('out of memory')

PLACES = 'forward','loss','backward','step'
WAYS = dict(
    accum=lambda: [GradientAccumulation(32, num_items=rows_of)],
    pieces=lambda: [GradientAccumulation(32, micro_batch_size=3)],
    auto=lambda: [GradientAccumulation(16, micro_batch_size='auto')],
    schedule=lambda: [GradientAccumulationSchedule(8, 32)],
    exact=lambda: [NeedsBlocks(), ActivationCheckpointing()],
    checkpointing=lambda: [GradientAccumulation(16), all_blocks(blocks=one_block)],
    cache=lambda: [GradientCache(3), all_blocks(blocks=one_block)],
    cache_of_part=lambda: [GradientAccumulation(16), GradientCache(3, part=one_block)])

def learner(cbs=None):
    "A Learner with all that fastai offers: splits, test sets, export; 64 samples to train on, in batches of 8"
    dsets = Datasets(list(range(80)), [[Pick(0)], [Pick(1)]], splits=[list(range(64)), list(range(64, 80))])
    return Learner(dsets.dataloaders(bs=8, shuffle=False, num_workers=0), Net(), loss_func=Loss(), opt_func=opt_func, cbs=cbs)

def lent(learn):
    "What of the Learner and all that belongs to it hides a method of its class, or is not the Learner's own"
    assert isinstance(learn.dls.train, TfmdDL) and type(learn.dls.train) is type(learn.dls.valid) is TfmdDL
    everything = [learn, *learn.cbs, *learn.model.modules(), *([learn.opt] if learn.opt else [])]
    hidden = {f'{type(o).__name__}.{k}' for o in everything for k in vars(o) if inspect.isfunction(getattr(type(o), k, None))}
    return hidden | {f'{k}: {o}' for k,o in dict(logger=learn.logger, loss=learn.loss_func).items() if o is not print and not isinstance(o, Loss)}

@contextmanager
def noted(faults, note):
    "Adds what goes wrong in this context to `faults`: a sweep tells all of them"
    try: yield
    except BaseException as e: faults.append(f'{note}: {type(e).__name__}: {" ".join(str(e).split())[:150]}')

def again(learn, cbs=()):
    "A fit from the first weights; `cbs` are for this fit alone"
    learn.model.load_state_dict(Net().state_dict())
    return weights(fit(learn, 1, cbs=cbs, reset_opt=True))

@pytest.fixture(scope='module')
def fresh():
    "A fit of new Learners, by way"
    with redirect_stdout(io.StringIO()): return {k:again(learner(make())) for k,make in dict(WAYS, plain=lambda: []).items()}

# What must work afterwards, each on a Learner of its own

def without_what_fastai_leaves(learn):
    "A plain Learner, too, keeps its DataLoader's generator, the graph and the gradients of an interrupted batch, and cannot be copied with them"
    for dl in learn.dls: vars(dl).pop('it', None)
    learn._end_cleanup()
    learn.loss_grad = None
    return learn

def works(learn, expected, whole=None):
    "Validation, prediction, and the next fit; of a Learner that was loaded: with the loaders of `whole`"
    if whole: learn.dls = whole.dls
    with quiet(learn):
        preds,n_valid = learn.get_preds()[0],learn.validate()
        with torch.no_grad(): assert_same(preds, learn.model.eval()(data(96)[0].float()[64:80]), 1e-6)
        assert len(n_valid) == 1
        assert_same(learn.predict(70)[2], preds[6], 1e-6)
    assert_same(again(learn), expected)
    return learn

def exported(learn, expected, plain):
    learn.export('learner.pkl')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        other = load_learner('learner.pkl')
    with quiet(other), quiet(learn): assert_same(other.predict(3)[2], learn.predict(3)[2])
    works(other, expected, learn)
    assert not lent(other)

def exported_and_removed(learn, expected, plain):
    learn.export('learner.pkl')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        other = load_learner('learner.pkl')
    other.remove_cbs(ours(other))
    works(other, plain, learn)

def copied(learn, expected, plain):
    without_what_fastai_leaves(learn)
    works(deepcopy(learn), expected); works(learn, expected)
def pickled(learn, expected, plain):
    without_what_fastai_leaves(learn)
    m = pickle.loads(pickle.dumps(learn.model))
    assert_same(weights(m), weights(learn))
    for cb in ours(learn):
        other = pickle.loads(cloudpickle.dumps(cb)).learn
        other.remove_cbs(ours(other))
        works(other, plain)
    learn.model = m
    works(learn, expected)
def removed(learn, expected, plain): works(learn.remove_cbs(ours(learn)), plain)
def fitted(learn, expected, plain): works(learn, expected)

def ours(learn): return [cb for cb in learn.cbs if type(cb).__module__.startswith('fastxtend_accum')]
UNDO = exported,exported_and_removed,copied,pickled,removed,fitted

@pytest.mark.thin(5)
@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('order', [-100, 5.5, 6.5, 99, math.inf])
def test_after_an_interrupt_all_works(fresh, way, order, capsys):
    "At every event, early and late in the fit, and inside the model, the loss, the backward pass and the step"
    undos,excs,faults = cycle(UNDO),cycle([KeyboardInterrupt, RuntimeError, ValueError]),[]
    for i,where in enumerate(EVENTS+list(PLACES)):
        for nth in 1,7+i%2:  # first, and in mid-window or at its end
            learn,exc,undo = learner(WAYS[way]()),next(excs),next(undos)
            fault = Fault(exc, where, nth, order) if where in EVENTS else None
            if fault is None: struck.where,struck.exc,struck.nth = where,exc,nth
            try: fit(learn, 1, cbs=fault)
            except BaseException as e: assert isinstance(e, exc) and 'on purpose' in str(e)
            else:
                if nth > 1: break  # it comes once an epoch, or once a window
            finally: struck.where = None
            with noted(faults, f'{exc.__name__} in {where}, number {nth}, then {undo.__name__}'):
                # an error in another callback's `before_fit` leaves a `Fit` that holds nothing
                stays = lent(learn) - ({'Learner._with_events'} if where == 'before_fit' else set())
                assert not stays, f'after the fit, these stay: {stays}'
                if not hasattr(learn, 'gradient_accumulation') and learn.opt: learn.opt.zero_grad()  # a plain Learner leaves them
                undo(learn, fresh[way], fresh['plain'])
                assert not lent(learn), f'in the end, these stay: {lent(learn)}'
    if faults: pytest.fail(f'{len(faults)} faults:\n' + '\n'.join(faults), pytrace=False)

# Removed in the middle of a fit

class Removes(Callback):
    "Removes `cb` at the `nth` time that `event` fires in training"
    def __init__(self, cb, event, nth, order): self.cb,self.order,self.nth,self.n_after = cb,order,nth,0; setattr(self, event, self.remove)
    def remove(self):
        self.nth -= 1
        if self.nth == 0: self.learn.remove_cb(self.cb)

PER_BATCH = EVENTS[3:10]+['after_batch']

@pytest.mark.thin(5)
@pytest.mark.parametrize('way', ['accum', 'pieces', 'schedule', 'exact', 'checkpointing', 'cache', 'cache_of_part'])
@pytest.mark.parametrize('order', [-100, 5.5, 6.5, 99, math.inf])
def test_removed_in_the_middle_of_a_fit(fresh, way, order):
    "At every event: the fit ends, nothing stays replaced, and the next one is plain"
    faults = []
    for event in [o for o in EVENTS if o not in ('after_cancel_batch', 'after_fit')]:
        for which in range(len(ours(learner(WAYS[way]())))):
            learn = learner(WAYS[way]())
            cb = ours(learn)[which]
            with noted(faults, f'{type(cb).__name__} removed in {event}'):
                fit(learn, 1, cbs=Removes(cb, event, 6 if event in PER_BATCH else 1, order))
                assert not lent(learn), f'these stay: {lent(learn)}'
                learn.remove_cbs(ours(learn))
                assert_same(again(learn), fresh['plain'])
    if faults: pytest.fail(f'{len(faults)} faults:\n' + '\n'.join(faults), pytrace=False)

@pytest.mark.parametrize('order', [-100, 5.5, 6.5, 99])
@pytest.mark.parametrize('event, nth', [('before_batch', 10), ('after_batch', 9), ('before_batch', 9), ('after_batch', 8), ('before_batch', 12), ('after_batch', 11)])
def test_the_rest_of_the_fit_is_plain(event, nth, order):
    "96 samples in batches of 8 and windows of 32: the open window is dropped, and each batch after it has a step of its own"
    learn,stepped = make_learner(8, cbs=GradientAccumulation(32)),[]
    fit(learn, 1, cbs=[Removes(learn.gradient_accumulation, event, nth, order), Callback(after_step=lambda self: stepped.append(self.iter))])
    next_batch = nth-1 if event == 'before_batch' else nth
    steps = [list(range(i, i+32)) for i in (0, 32)]+[list(range(i, i+8)) for i in range(8*next_batch, 96, 8)]
    assert stepped == [3,7,*range(next_batch, 12)]
    assert_same(weights(learn), reference([(o, 0) for o in steps], 96, sgd)[0], ROUNDING)

@pytest.mark.parametrize('event', ['before_epoch', 'before_train', 'before_validate', 'after_epoch'])
@pytest.mark.parametrize('order', [-100, 5.5, 6.5, 99])
def test_an_epoch_after_it_is_plain(event, order):
    "Removed between epochs, or at the beginning of the second one: this has a step for each batch, and its losses are logged"
    learn = make_learner(8, cbs=GradientAccumulation(32))
    fit(learn, 2, cbs=Removes(learn.gradient_accumulation, event, 2 if event in ('before_epoch', 'before_train') else 1, order))
    steps = [list(range(i, i+32)) for i in (0, 32, 64)]+[list(range(i, i+8)) for i in range(0, 96, 8)]
    assert_same(weights(learn), reference([(o, 0) for o in steps], 96, sgd)[0], ROUNDING)
    assert len(losses(learn)) == 15 and len(learn.recorder.values) == 2

# One callback, two Learners

@pytest.mark.parametrize('way', ['accum', 'pieces', 'exact', 'checkpointing', 'cache'])
@pytest.mark.parametrize('calls', ['b', 'a', 'ab', 'ba', 'aab'])
def test_one_callback_in_two_learners(fresh, way, calls):
    "It works, or an error says what to do; afterwards both are as they were"
    cbs = WAYS[way]()
    learners = dict(a=learner(cbs), b=learner(cbs))
    for o in calls:
        try: assert_same(again(learners[o]), fresh[way])
        except (ValueError, RuntimeError) as e: assert 'each Learner a callback of its own' in str(e), e
        for learn in learners.values(): assert not lent(learn)
    assert_same(again(learners['b'].remove_cbs(ours(learners['b']))), fresh['plain'])
    assert_same(again(learner(WAYS[way]())), fresh[way])
