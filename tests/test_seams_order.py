"Seams: what other callbacks cancel, read and add, at any order, is what they do to the large batch"
import pytest

from common import *

ORDERS = [-100, -10, -9, 0, 5.5, 7, 51, 60, 100]
CANCELS = [CancelBatchException, CancelTrainException, CancelEpochException, CancelFitException, CancelValidException, CancelStepException, CancelBackwardException]
IN_BATCH = ['before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step','after_batch']
PER_PIECE = IN_BATCH[1:5]

class Raises(Callback):
    "Raises `exc` when `event` fires in `batch`, in all its pieces or only in the `piece`th one"
    def __init__(self, exc, event, batch, order, piece=None, training=True):
        self.exc,self.batch,self.order,self.piece,self.of_training,self.n = exc,batch,order,piece,training,0
        setattr(self, event, self.strike)
    def strike(self):
        if self.training != self.of_training or self.iter != self.batch: return
        self.n += 1
        if self.piece in (None, self.n): raise self.exc

class Sees(Callback):
    "The loss, position and hyper-parameters after each batch, and the steps that the optimizer has taken"
    order = 101
    def before_fit(self): self.losses,self.pcts = [],[]
    def after_batch(self):
        if not self.training: return
        self.losses.append((self.epoch, self.iter, float(self.loss.detach()) if self.loss is not None else None))
        self.pcts.append(self.pct_train)

def counting(params, lr):
    "SGD with momentum that counts its steps"
    opt = SGD(params, lr=lr, mom=.9)
    opt.n,step = 0,opt.step
    def counted(**kwargs): opt.n += 1; step(**kwargs)
    opt.step = counted
    return opt

ways = dict(
    pieces=lambda: [GradientAccumulation(32, micro_batch_size=8)],
    uneven=lambda: [GradientAccumulation(32, micro_batch_size=10)],
    cache=lambda: [GradientCache(8)],
    both=lambda: [GradientAccumulation(32, micro_batch_size=16), GradientCache(8)],
    checkpointing=lambda: [all_blocks(blocks=lambda m: [m[0]])],
    both_checkpointing=lambda: [GradientAccumulation(32, micro_batch_size=8), all_blocks(blocks=lambda m: [m[0]])])

class Zeroes(Callback):
    "A plain Learner keeps the gradients of a batch that is cancelled after its backward pass, and adds the next ones to them; the package does not"
    order = 1000
    def after_cancel_batch(self): self.opt.zero_grad()
    after_cancel_train = after_cancel_epoch = after_cancel_batch

def keeps_none(way): return [Zeroes()] if way not in ('cache', 'checkpointing') else []

def run(cbs, *args, n_epoch=2, **kwargs):
    "A fit of three batches of 32 an epoch with a canceller: what came of it, and what came out of it"
    learn = make_learner(32, cbs=[Sees(), Raises(*args, **kwargs), *cbs], opt_func=counting)
    try: fit(learn, n_epoch)
    except Exception as e: error = type(e)
    else: error = None
    return learn,error

def same_as_plain(learn, error, plain, plain_error, but=()):
    "`but`: batches whose own loss may be another"
    assert error is plain_error, f'{error} came out, not {plain_error}'
    assert learn.opt.n == plain.opt.n, f'{learn.opt.n} steps, not {plain.opt.n}'
    assert_same(weights(learn), weights(plain), ROUNDING)
    assert len(losses(learn)) == len(losses(plain)), f'{len(losses(learn))} losses are recorded, not {len(losses(plain))}'
    a,b = ([o for o in l.sees.losses if o[1] not in but] for l in (learn, plain))
    assert_same(floats(a), floats(b), 1e-6)
    assert_same(learn.sees.pcts, plain.sees.pcts)
    a,b = (floats(l.recorder.values) for l in (learn, plain))
    assert_same([o[1:] for o in a], [o[1:] for o in b], 1e-6)  # the smoothed training loss has that of the cancelled batch
    if not error: assert 'forward' not in vars(learn.model) and '_with_events' not in vars(learn) and '_do_one_batch' not in vars(learn)

@pytest.fixture(scope='module')
def plain():
    made = {}
    def f(way, *args, **kwargs):
        key = (bool(keeps_none(way)), *args, *kwargs.values())
        if key not in made: made[key] = run(keeps_none(way), *args, **kwargs)
        return made[key]
    return f

def swept(cases):
    "Runs `f(*args)` for each of the `cases`, and tells all that fail"
    faults = []
    for note,f in cases:
        try: f()
        except AssertionError as e: faults.append(f'{note}: {" ".join(str(e).split())[:160]}')
    if faults: pytest.fail(f'{len(faults)} faults:\n' + '\n'.join(faults), pytrace=False)

@pytest.mark.thin(11)
@pytest.mark.parametrize('exc', CANCELS)
@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('order', [-100, 5.5, 6.5, 99, math.inf])
def test_what_is_cancelled_in_a_batch(plain, order, way, exc):
    "At every event, in the first piece, in a later one or in all, it is the whole batch's"
    def case(event, piece):
        def f():
            args = exc, event, 1, order
            learn,error = run(ways[way](), *args, piece=piece)
            same_as_plain(learn, error, *plain(way, *args, piece=1 if piece else None), but=(1,))
            assert learn.raises.n
        return f'{exc.__name__} in {event}, piece {piece}',f
    def pieces(event):
        if way in ('cache', 'checkpointing') or event not in PER_PIECE or exc is CancelBackwardException: return [None]
        return [None, 1, 2]
    swept(case(event, piece) for event in IN_BATCH for piece in pieces(event) if (exc, event) != (CancelBackwardException, 'before_backward'))

@pytest.mark.parametrize('way', ['cache', 'checkpointing'])
def test_a_backward_pass_that_is_cancelled(plain, way):
    "The optimizer steps without a gradient, by its momentum, as a plain Learner's does; a window whose pieces are all cancelled takes no step"
    args = CancelBackwardException, 'before_backward', 1, 0
    same_as_plain(*run(ways[way](), *args), *plain(way, *args))

@pytest.mark.thin(7)
@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('order', [-100, 5.5, 99])
def test_what_is_cancelled_around_batches_and_in_validation(plain, order, way):
    def case(exc, event, training):
        def f(): same_as_plain(*run(ways[way](), *args, training=training), *plain(way, *args, training=training), but=(0,) if training else ())
        batch = 0 if training else 1
        args = exc, event, batch, order
        return f'{exc.__name__} in {event}',f
    cases = [case(exc, event, False) for exc in CANCELS for event in ('before_batch', 'after_pred', 'after_loss', 'after_batch')]
    swept(cases)
    def around(exc, event):
        def f():
            found = []
            for cbs in ways[way](),keeps_none(way):
                learn = make_learner(32, cbs=[Sees(), Callback(**{event:lambda self: stop(exc())}), *cbs], opt_func=counting)
                try: fit(learn, 2)
                except Exception as e: found += [learn, type(e)]
                else: found += [learn, None]
            same_as_plain(*found)
        return f'{exc.__name__} in {event}',f
    events = 'before_epoch','before_train','after_train','before_validate','after_validate','after_epoch'
    swept(around(exc, event) for i,exc in enumerate(CANCELS) for event in events[i%2::2])

# A scheduler of one's own

class Scheduler(Callback):
    "Sets the learning rate by `pct_train`, and with it the next momentum"
    def __init__(self, event, order):
        self.order,self.seen = order,[]
        setattr(self, event, self.set_lr)
    def set_lr(self):
        if not self.training: return
        self.seen.append(self.pct_train)
        self.opt.set_hyper('lr', .1*(1-self.pct_train))
        self.opt.set_hyper('mom', .9*self.pct_train)

layouts = dict(
    windows=(8, 96, {}, lambda: [GradientAccumulation(32)]),
    short_window=(8, 88, {}, lambda: [GradientAccumulation(32)]),
    dropped=(8, 88, dict(drop_last=True), lambda: [GradientAccumulation(32)]),
    uneven_windows=(6, 84, {}, lambda: [GradientAccumulation(24)]),
    pieces=(32, 96, {}, lambda: [GradientAccumulation(32, micro_batch_size=5)]),
    windows_of_pieces=(16, 96, {}, lambda: [GradientAccumulation(32, micro_batch_size=5)]),
    cache=(32, 88, {}, lambda: [GradientCache(8)]),
    checkpointing=(32, 88, {}, lambda: [all_blocks(blocks=lambda m: [m[0]])]),
    by_window=(8, 96, {}, lambda: [GradientAccumulation(32, log_accum_batch=False)]))

class Rates(Callback):
    "The hyper-parameters with which the optimizer steps"
    order = 1000
    def before_fit(self): self.used = []
    def before_step(self): self.used.append([(h['lr'], h['mom']) for h in self.opt.hypers][-1])

@pytest.mark.thin(2)
@pytest.mark.parametrize('event', ['before_batch', 'after_batch', 'after_step'])
@pytest.mark.parametrize('layout', layouts)
def test_a_scheduler_of_ones_own(layout, event):
    "At any order: the large batch's rates bit for bit, at the step, in the recorder and after the fit; and its weights"
    bs,n,kwargs,make = layouts[layout]
    def fitted(bs, order, cbs): return fit(make_learner(bs, n=n, opt_func=partial(SGD, mom=.5), cbs=[Scheduler(event, order), Rates(), *cbs], **kwargs), 2)
    def case(order):
        def f():
            big,small = fitted(24 if bs == 6 else 32, order, []),fitted(bs, order, make())
            assert len({o[0] for o in big.rates.used}) > 1
            assert_same(floats(small.rates.used), floats(big.rates.used))
            if layout != 'by_window': assert_same(small.recorder.lrs, big.recorder.lrs)
            assert floats([small.opt.hypers[-1].values()]) == floats([big.opt.hypers[-1].values()])
            for o in small,big: o.seen = [pct for pct in dict.fromkeys(o.scheduler.seen) if pct]  # in mid-window it stays
            assert_same(small.seen, big.seen)
            assert_same(weights(small), weights(big), ROUNDING)
        return f'order {order}',f
    swept(map(case, ORDERS))

# What callbacks add to the loss

class Adds(Callback):
    "Changes the loss on its way to the backward pass"
    run_valid = False
    def __init__(self, event, order, what):
        self.order,self.what = order,what
        setattr(self, event, self.change)
    def change(self):
        p = next(iter(self.model.parameters()))
        if self.what == 'penalty': self.learn.loss_grad = self.learn.loss_grad + .3*p.square().sum()
        elif self.what == 'in place': self.learn.loss_grad += .3*p.square().sum()
        elif self.what == 'of the outputs': self.learn.loss_grad = self.learn.loss_grad + .3*self.learn.pred.square().mean()
        elif self.what == 'scaled': self.learn.loss_grad = 1.75*self.learn.loss_grad  # exact in the float32 of the loss
        elif self.what == 'another': self.learn.loss_grad = (self.learn.pred-self.learn.y).abs().mean()

@pytest.mark.parametrize('what', ['penalty', 'in place', 'of the outputs', 'scaled', 'another'])
@pytest.mark.parametrize('event', ['before_backward', 'after_loss'])
def test_what_is_added_to_the_loss(event, what):
    "At any order, in pieces that are no powers of two and with a ragged last batch: equals the whole batch's to rounding"
    n = 24*3+7
    def fitted(bs, order, cbs): return fit(make_learner(bs, n=n, cbs=[Adds(event, order, what), *cbs]), 2)
    big = fitted(24, 0, [])
    assert (weights(big)-weights(fit(make_learner(24, n=n), 2))).abs().max() > 1e-3
    def case(order, bs, cbs):
        return f'order {order}, batches of {bs}, {type(cbs[0]).__name__}',lambda: assert_same(weights(fitted(bs, order, cbs)), weights(big), ROUNDING)
    cases = [(6, lambda: [GradientAccumulation(24)]), (3, lambda: [GradientAccumulation(24)]), (24, lambda: [GradientAccumulation(24, micro_batch_size=6)]),
             (24, lambda: [GradientAccumulation(24, micro_batch_size=7)]), (12, lambda: [GradientAccumulation(24, micro_batch_size=5)]), (24, lambda: [GradientCache(7)])]
    swept(case(order, *(o if isinstance(o, int) else o() for o in cases[i%len(cases)])) for i,order in enumerate(ORDERS))
