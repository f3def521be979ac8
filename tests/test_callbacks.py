"Everybody else's callbacks see windows as they see the batches of a large batch"
import ast, contextlib, pkgutil
import fastai.callback, pytest
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.preds import MCDropoutCallback
from fastai.callback.rnn import ModelResetter, RNNCallback, RNNRegularizer
from fastai.callback.tensorboard import TensorBoardCallback
from fastai.callback.training import BnFreeze
from torch.optim import lr_scheduler

from common import *

FLOAT32 = 2e-6  # losses, which the Recorder averages in float32
ORDERS = [-20, 0, 8, 55, 90]
PASSES = ['after_pred','after_loss','before_backward','after_backward']  # of a loader batch or a micro-batch
once_a_window = 'before_batch','before_step','after_step','after_batch'
CANCELLED = *CANCELS,CancelStepException,CancelValidException

# The accumulated batch, and a plain Learner with the large one

schedule = {0: 8, .3: 32, .7: 24}
scheduled = partial(GradientAccumulationSchedule, **SchedSteps(schedule))
layouts = dict(  # samples in a loader batch and in an epoch, loader batches and micro-batches of it, and arguments
    whole=(8, 96, 12, 12, partial(GradientAccumulation, 32), {}),
    ragged=(8, 100, 13, 13, partial(GradientAccumulation, 32), {}),
    dropped=(8, 100, 12, 12, partial(GradientAccumulation, 32), dict(drop_last=True)),
    split=(32, 100, 4, 13, partial(GradientAccumulation, micro_batch_size=8), {}),
    both=(16, 88, 6, 22, partial(GradientAccumulation, 32, micro_batch_size=5), {}),
    carry=(8, 88, 11, 11, scheduled, {}),
    step=(8, 88, 11, 11, partial(scheduled, remainder='step'), {}))
constant = ['whole','ragged','dropped','split','both']

class Sizes:
    "A batch sampler that yields in each epoch the windows of the schedule that end in it"
    def __init__(self, n, remainder):
        self.epochs,self.seen = ([], []),0
        for idxs,_ in windows(n, 8, self.size_at, remainder, 2):
            self.seen += len(idxs)
            self.epochs[(self.seen-1)//n].append(idxs)
    def size_at(self, pct): return [size for at,size in schedule.items() if pct >= at-1e-9][-1]
    def __len__(self): return len(self.epochs[self.learn.epoch])
    def __iter__(self): return iter(self.epochs[self.learn.epoch])

def at(event, f, order=0, run_valid=False, **kwargs):
    "A callback that calls `f` at `event`, and has `rows`"
    res = Callback(**{event:f})
    res.order,res.run_valid,res.rows = order,run_valid,[]
    for k,v in kwargs.items(): setattr(res, k, v)
    return res

def by_samples(n):
    "Lets a plain Learner count its position by samples"
    seen = []
    def begin(self): self.learn.pct_train = sum(seen)/(2*n)
    def advance(self):
        seen.append(len(self.x))
        self.learn.pct_train = sum(seen)/(2*n) - 1/(self.n_iter*self.n_epoch)  # to which fastai adds a step next
    return [at('before_train', begin, 12), at('after_batch', advance, -30)]

class Scaled(nn.Sequential):
    scale = 1.
    def forward(self, x): return super().forward(x)*self.scale

def run(layout, make, is_large=False, in_fit=False, lr=.1, method='fit', accum_kwargs={}, **kwargs):
    "Two epochs with the callbacks that `make` gives; and what comes out of them"
    bs,n,_,_,accum,more = layouts[layout]
    torch.manual_seed(1)
    others,own = [*L(make())],[accum(**accum_kwargs)]
    if is_large: own = []
    kwargs = {k:o() if k in ('m','loss_func') else o for k,o in kwargs.items()}
    kwargs = dict(m=Scaled(*model()), opt_func=partial(SGD, mom=.5)) | kwargs
    learn = make_learner(32 if is_large else bs, n=n, **more, **kwargs)
    if is_large and layout not in constant:
        sizes,own = Sizes(n, layout),own+by_samples(n)
        sizes.learn = learn
        train = torch.utils.data.DataLoader(learn.dls.train.dataset, batch_sampler=sizes)
        learn.dls = DataLoaders(train, learn.dls.valid)
    learn.others,learn.error,learn.began = others,None,weights(learn)
    learn.add_cbs(own if in_fit else [*others, *own])
    try: fit(learn, 2, lr, method, cbs=others if in_fit else None)
    except CANCELLED as e: learn.error = type(e)
    return learn

def flat(rows): return [float(o) for row in rows for o in row if o is not None]

def assert_same_fit(small, big, tol=ROUNDING, rate_tol=0., moves=True):
    "All that a fit leaves behind, and what the other callbacks have noted"
    assert small.error is big.error, f'{small.error} came out, not {big.error}'
    assert_same(weights(small), weights(big), tol)
    assert moves in (None, bool((weights(big)-big.began).abs().max() > 1e-3))
    a,b = small.recorder,big.recorder
    assert_same(a.lrs, b.lrs, rate_tol)
    assert a.iters == b.iters
    for x,y in (a.losses, b.losses), (flat(a.values), flat(b.values)):
        assert_same([float(o) for o in x], [float(o) for o in y], FLOAT32)
    assert_same(*(flat(h.values() for h in o.opt.hypers) for o in (small, big)), rate_tol)
    for x,y in zip(small.others, big.others, strict=True):
        x,y = (getattr(o, 'rows', []) for o in (x, y))
        assert [len(o) for o in x] == [len(o) for o in y]
        assert_same(flat(x), flat(y), FLOAT32)
    if not big.error: assert '_do_one_batch' not in vars(small) and 'forward' not in vars(small.model)

def both(layout, make, moves=True, tol=ROUNDING, **kwargs):
    "The accumulated fit and the one with the large batch, which are the same"
    res = [run(layout, make, is_large, **kwargs) for is_large in (False, True)]
    assert_same_fit(*res, tol, 0. if layout in constant else ROUNDING, moves)  # those of a schedule go by samples
    return res

# What each event sees

class Sees(Callback):
    "Position, counters, hyper-parameters and weights at each of these events"
    def __init__(self, order, events):
        self.order,self.seen,self.losses = order,{o:[] for o in events},[]
        for o in events: setattr(self, o, partial(self.note, o))
    def note(self, event):
        learn = self.learn
        is_early = event == 'before_train' and self.order < 12  # `learn.dl` is still the DataLoader
        dl = None if is_early else getattr(learn, 'dl', None)
        row = [getattr(learn, o, -1) for o in ('training','epoch','iter','n_iter','train_iter','pct_train')]
        hypers = [o for h in learn.opt.hypers for o in h.values()]
        self.seen[event].append((*row, -1 if dl is None else len(dl), *hypers, weights(learn).abs().sum().item()))
        if event not in once_a_window[1:]: return
        self.losses.append((learn.loss.item(), float(getattr(learn, 'smooth_loss', 0.))))

all_events = [*EVENTS,'after_cancel_backward','after_cancel_step','after_cancel_train','after_cancel_epoch']

@pytest.mark.parametrize('layout', layouts)
def test_what_each_event_sees(layout):
    "Before the Recorder, each loader batch begins; the other events of a batch come once a window"
    def make():  # both in one callback are another matter, see below
        return [Sees(o, [e for e in all_events if e != but]) for o in ORDERS for but in ('before_batch','after_batch')]
    small,big = both(layout, make, method='fit_one_cycle')
    n_batches,n_micro,n_valid = *layouts[layout][2:4],2
    for a,b in zip(small.others, big.others):
        assert_same(flat(a.losses), flat(b.losses), FLOAT32)
        for event,rows in b.seen.items():
            seen,n = a.seen[event],len(rows)
            if event == 'before_batch' and a.order < 50: n = 2*(n_batches+n_valid)
            if event in PASSES: n = 2*(n_micro+n_valid*(event in PASSES[:2]))
            assert len(seen) == n and (n > 0) == ('cancel' not in event), (event, a.order)
            if n > len(rows):  # in mid-window nothing moves, once a scheduler has set the rate
                seen = [next(g) for _,g in itertools.groupby(seen, lambda o: (o[:7], o[-1]))]
            assert_same(flat(seen), flat(rows), ROUNDING)
            if layout in constant: assert [o[:7] for o in seen] == [o[:7] for o in rows]

class Pair(Callback):
    "Takes down in after_batch what it sets up in before_batch"
    def __init__(self, order, seen): self.order,self.seen,self.is_set_up = order,seen,False
    def before_batch(self): self.turn('b', True)
    def after_cancel_batch(self): self.seen.append('c')
    def after_batch(self): self.turn('a', False)
    def turn(self, what, to):
        assert self.is_set_up is not to
        self.is_set_up = to
        self.seen.append(what)

@pytest.mark.parametrize('layout', layouts)
def test_who_sets_up_and_takes_down(layout):
    "Each loader batch, which ends as one that is cancelled while its window goes on; or, from the Recorder on, windows"
    for order in ORDERS:
        seen,bs = [],layouts[layout][0]
        learn = run(layout, lambda: Pair(order, seen))
        sizes,end = learn.recorder.accum_bs,learn.recorder.iters[0]
        def expected(epoch): return ''.join('bca'*(order < 50)*(-(-o//bs)-1)+'ba' for o in epoch)+'baba'  # validation
        assert ''.join(seen) == expected(sizes[:end])+expected(sizes[end:]) and len(sizes) > 5

# Callbacks that act: by name, what makes them

cases = {}

def rates_used(): return at('before_step', lambda self: self.rows.append([h['lr'] for h in self.opt.hypers]), 1000)
def sets_rate(event, order, rate):
    def f(self): self.opt.set_hyper('lr', rate(self))
    return lambda: [at(event, f, order, n=0), rates_used()]
positions = dict(pct_train=lambda o: o.learn.pct_train, train_iter=lambda o: o.train_iter/8,
                 iter=lambda o: o.iter/o.n_iter, dl=lambda o: o.iter/len(o.learn.dl))
for i,(event,by) in enumerate(itertools.product([*once_a_window,*PASSES], positions)):
    cases[f'rate by {by} in {event}'] = sets_rate(event, ORDERS[i%5], lambda o, f=positions[by]: .1-.09*f(o))

def counted(self): self.n += 1; return .02*self.n
def falls(self): return self.opt.hypers[-1]['lr']*.9
for event,order in zip(once_a_window*2, [55, 0, 8, -20, 90, 90, 55, 90]):
    cases[f'rate by own count in {event}, {order}'] = sets_rate(event, order, counted)
    cases[f'rate times .9 in {event}, {order}'] = sets_rate(event, order, falls)

def logs(self):
    if self.train_iter%2 == 0: return
    recorded = [self.learn.smooth_loss, self.recorder.losses[-1], self.recorder.lrs[-1]] if self.order > 50 else []
    self.rows.append([self.train_iter, self.iter, self.loss, *recorded])
def logs_epoch(self): self.rows.append([self.train_iter, self.learn.pct_train, self.loss, len(self.recorder.losses)])
def logs_norm(self): self.rows.append([p.grad.norm() for p in self.model.parameters()])
for order in ORDERS: cases[f'logs every second batch, {order}'] = partial(at, 'after_batch', logs, order)
for event in 'before_step','after_step': cases[f'logs the loss in {event}'] = partial(at, event, logs, 20)
for event in 'after_train','after_epoch': cases[f'logs in {event}'] = partial(at, event, logs_epoch, 60)
cases['logs norms'] = partial(at, 'before_step', logs_norm, 20)
for name in 'WandbCallback','TensorBoardCallback','NeptuneCallback','ParamScheduler','SaveModelCallback','Callback':
    def own(name=name): return type(name, (Callback,), dict(order=51, rows=[], run_valid=False, after_batch=logs))()
    cases[f'own {name}'] = own

class AnotherRecorder(Recorder):
    "ClearML adds one"
    def __init__(self): super().__init__(train_metrics=True); self.rows = []
    def after_batch(self):
        super().after_batch()
        if self.training: self.rows.append([m.value for m in self._train_mets])
cases['another Recorder'] = AnotherRecorder

class Average(Callback):
    "A moving average of the weights every `every` times, with which validation runs"
    def __init__(self, event, order, every=1):
        self.order,self.every,self.rows = order,every,[]
        setattr(self, event, self.update)
    def before_fit(self): self.n,self.avg = 0,[p.detach().clone() for p in self.model.parameters()]
    def update(self):
        self.n += self.training
        if not self.training or self.n%self.every: return
        for a,p in zip(self.avg, self.model.parameters()): a.lerp_(p.detach(), .3)
        self.rows.append([a.sum().item() for a in self.avg])
    def swap(self):
        for i,p in enumerate(self.model.parameters()): self.avg[i],p.data = p.data,self.avg[i]
    before_validate = after_validate = after_fit = swap
class AverageOfBoth(Average):
    "fastxtend's leaves out what is cancelled"
    def before_batch(self): self.is_cancelled = False
    def after_cancel_batch(self): self.is_cancelled = True
    def update(self): self.is_cancelled or super().update()
for event,order,every in ('after_step', 0, 1), ('after_step', 90, 3), ('after_batch', -20, 1), ('after_batch', 55, 2):
    cases[f'average in {event}, {order}'] = partial(Average, event, order, every)
for order in 11,90: cases[f'average of both, {order}'] = partial(AverageOfBoth, 'after_batch', order)
def looks_ahead(self):
    ps = [*self.model.parameters()]
    self.slow = getattr(self, 'slow', None) or [p.detach().clone() for p in ps]
    if self.train_iter%3 == 2:
        for p,slow in zip(ps, self.slow): p.data.copy_(slow.lerp_(p.detach(), .5))
cases['looks ahead'] = partial(at, 'after_step', looks_ahead)

def saves(self):
    if self.train_iter%3: return
    path = self.learn.save(f'at_{self.train_iter}', with_opt=True)
    saved = torch.load(path, weights_only=False)
    self.rows.append([self.train_iter, *[o.sum() for o in saved['model'].values()], len(saved['opt'])])
for event,order in ('after_batch', 0), ('after_batch', 90), ('after_step', 0):
    cases[f'saves in {event}, {order}'] = partial(at, event, saves, order)

def validates(self):
    if self.train_iter%4 != 1: return
    learn = self.learn
    kept = {k:vars(learn)[k] for k in 'dl iter n_iter xb yb pred loss epoch train_iter pct_train'.split()}
    recorded = {k:vars(learn.recorder)[k] for k in 'lrs losses iters values log'.split()}
    self.rows.append(learn.validate())
    vars(learn.recorder).update(recorded)
    vars(learn).update(kept, training=True)
    learn.model.train()
for order in 0,90: cases[f'validates, {order}'] = partial(at, 'after_batch', validates, order)

def stops(exc, at_iter): return lambda self: stop(exc) if self.train_iter == at_iter else None
for event,exc,order in itertools.product(['after_step','after_batch'], CANCELS[1:], [0, 90]):
    cases[f'{exc.__name__} after three batches in {event}, {order}'] = partial(at, event, stops(exc, 3), order)

def augments(self): self.learn.xb = (self.x*(1.5-self.learn.pct_train)+.1,)
def mixes_in_targets(self): self.learn.xb,self.learn.yb = (self.x+self.y,),(self.y*.5,)
for order in ORDERS[:3]:
    cases[f'augments, {order}'] = partial(at, 'before_batch', augments, order)
    cases[f'changes targets, {order}'] = partial(at, 'before_batch', mixes_in_targets, order, True)

class CleansUp(Callback):
    "Changes the model for a batch"
    def __init__(self, order): self.order = order
    def before_batch(self):
        assert self.model.scale == 1
        self.model.scale = 1.5
    def after_batch(self): self.model.scale = 1.
for order in 0,90: cases[f'cleans up, {order}'] = partial(CleansUp, order)

def other_loss(pred, targ): return (pred-targ).abs().mean().float()
def swaps_loss(self): self.learn.loss_func = other_loss if self.train_iter%2 else mse
def freezes(self): self.model[0].requires_grad_(self.train_iter%3 > 0)
def scales_layer(self): self.model.scale = 1+.1*self.train_iter
def regroups(self): self.opt.set_hyper('mom', .9 if self.train_iter > 3 else .1)
for f in swaps_loss,freezes,scales_layer,regroups:
    for order in -20,90: cases[f'{f.__name__}, {order}'] = partial(at, 'after_batch', f, order)
def new_optimizer(self): self.learn.opt = Adam(self.learn.splitter(self.model), lr=.01)
cases['another optimizer'] = partial(at, 'before_epoch', new_optimizer)
cases['forgets its state'] = partial(at, 'after_batch', lambda self: self.opt.clear_state())

# Gradients, weights and losses

def clips(self): nn.utils.clip_grad_value_(self.model.parameters(), .05)
def centres(self):
    for p in self.model.parameters(): p.grad = p.grad-p.grad.mean(0)
def adds_noise(self):
    g = torch.Generator().manual_seed(self.train_iter)
    for p in self.model.parameters(): p.grad += .1*torch.randn(p.shape, generator=g, dtype=p.dtype)
def clamps(self):
    for p in self.model.parameters(): p.data.clamp_(-.3, .3)
for f in clips,centres,adds_noise: cases[f.__name__] = partial(at, 'before_step', f, 8)
for event in 'after_step','after_batch': cases[f'clamps in {event}'] = partial(at, event, clamps)

def weight(self): return next(self.model.parameters())
penalties = dict(
    penalty=lambda o: o.learn.loss_grad + .3*weight(o).square().sum(),
    in_place=lambda o: o.learn.loss_grad.add_(.3*weight(o).square().sum()),
    of_outputs=lambda o: o.learn.loss_grad + .3*o.pred.square().mean(),
    scaled=lambda o: 1.75*o.learn.loss_grad,  # exact in the float32 of the loss
    other=lambda o: (o.pred-o.y).abs().mean())
for i,(event,what) in enumerate(itertools.product(['after_loss','before_backward'], penalties)):
    def f(self, new=penalties[what]): self.learn.loss_grad = new(self)
    cases[f'{what} in {event}'] = partial(at, event, f, ORDERS[i%5])

class OwnOptimizer(Callback):
    "Trains a parameter of its own, which adds to the loss"
    run_valid = False
    def __init__(self, event, optimizer):
        self.optimizer,self.rows = optimizer,[]
        setattr(self, event, self.step)
    def before_fit(self):
        self.shift = nn.Parameter(torch.full((1, 1), .5, dtype=torch.float64))
        self.own = self.optimizer([self.shift], lr=.3)
    def after_loss(self):
        self.learn.loss_grad = self.learn.loss_grad + .5*(self.pred-self.shift).pow(2).mean().float()
        self.learn.loss = self.learn.loss_grad.clone()
    def step(self): self.own.step(); self.own.zero_grad(); self.rows.append([self.shift.item()])
for event,optimizer in itertools.product(['before_step','after_step'], [torch.optim.SGD, SGD]):
    cases[f'own {optimizer.__module__} in {event}'] = partial(OwnOptimizer, event, optimizer)

def probes(self):
    "Trains a layer of its own on what the model gives"
    self.probe = getattr(self, 'probe', None) or nn.Linear(1, 1).double()
    self.probe.zero_grad()
    self.probe(self.pred.detach()).pow(2).mean().backward()
    for p in self.probe.parameters(): p.data -= .1*p.grad
for event in 'after_pred','after_loss','after_batch': cases[f'probe in {event}'] = partial(at, event, probes)

def peeks(self): next(iter(self.learn.dl))
def reads(self): self.rows.append([sum(len(o[0]) for o in self.learn.dl)])
for event,f in itertools.product(['before_train','before_batch','after_batch'], [peeks, reads]):
    cases[f'{f.__name__} in {event}'] = partial(at, event, f, 60)

notes = 'rate','logs','own','another R','average','saves','validates','reads'

@pytest.mark.thin(11)
@pytest.mark.parametrize('layout', layouts)
@pytest.mark.parametrize('name', cases)
def test_a_callback_that_no_table_names(name, layout):
    "In the Learner or in the fit"
    small,_ = both(layout, cases[name], in_fit=layout in ('ragged','split','step'))
    assert not name.startswith(notes) or small.others[-1].rows

# What callbacks cancel

def raises(exc, event, order, training=None, nth=2):
    def f(self):
        if training in (None, getattr(self.learn, 'training', None)): self.n += 1; self.n == nth and stop(exc)
    return lambda: at(event, f, order, True, n=0)

@pytest.mark.thin(7)
@pytest.mark.parametrize('layout', constant)
@pytest.mark.parametrize('exc', CANCELLED)
def test_what_is_cancelled(exc, layout):
    "In windows, around them and in validation; what fastai does not catch comes out of the fit"
    cases = [*[(o, True) for o in once_a_window], *[(o, False) for o in ('before_batch',*PASSES[:2],'after_batch')],
             *[(o, None) for o in (*EVENTS[1:3], *EVENTS[12:16])]]
    for i,(event,training) in enumerate(cases):
        if exc is CancelBatchException and (event, training) == ('before_batch', True): continue  # see below
        order = [55, 90][i%2] if event == 'before_batch' else ORDERS[i%5]
        small,_ = both(layout, raises(exc, event, order, training), None)
        assert small.others[0].n >= 2 or small.error

@pytest.mark.parametrize('order', ORDERS)
@pytest.mark.parametrize('event', ['before_batch','after_pred','after_loss','after_backward'])
def test_loader_batches_that_are_cancelled(event, order):
    "The others, and those that have run, fill the windows; counters go by windows"
    cancelled = [0, 5, 6, 7, 8, 14]
    def skip(self):
        if any(self.x[0,0] == data(160)[0][8*i,0] for i in cancelled): raise CancelBatchException
    see = Sees(99, ['after_step'])
    learn = fit(make_learner(8, n=160, cbs=[GradientAccumulation(32), see, at(event, skip, order)]), 1)
    if event == 'before_batch' and order > 50: cancelled.pop()  # in mid-window
    if event == 'after_backward': cancelled.clear()
    kept = [i for i in range(160) if i//8 not in cancelled]
    steps = [(kept[i:i+32], 0) for i in range(0, len(kept), 32)]
    assert_same(weights(learn), reference(steps, 160, sgd)[0], ROUNDING)
    assert sum(learn.recorder.accum_bs) == len(kept)
    assert [o[4] for o in see.seen['after_step']] == [*range(len(steps))] and learn.train_iter == len(steps)

@pytest.mark.parametrize('event', ['before_batch',*PASSES[:2]])
def test_a_batch_that_is_cancelled_by_its_number(event):
    "Leaves out no more than with the large batch"
    def skip(self):
        if self.training and self.iter == 1: raise CancelBatchException
    learn = fit(make_learner(8, n=192, cbs=[GradientAccumulation(32), Callback(**{event:skip})]), 1)
    assert learn.gradient_accumulation.opt_steps >= 5

# fastai's own

def noted(cls, rows, event='after_fit'):
    "A subclass of `cls` that notes its `rows` after `event`"
    def f(self):
        getattr(cls, event, noop)(self)
        self.rows = [*getattr(self, 'rows', ()), *rows(self)]
    return type(cls.__name__, (cls,), {event:f, 'notes':rows})

class Frozen(Scaled):
    "Its BatchNorm is not trained"
    def __init__(self):
        m = model()
        super().__init__(m[0], nn.BatchNorm1d(8).double(), *m[1:])
        self[1].requires_grad_(False)

class DropsInValidation(nn.Dropout):
    def forward(self, x): return F.dropout(x, .5, self.training and not torch.is_grad_enabled())

class Recurrent(nn.Module):
    "As fastai's RNNCallback needs it"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn,self.head,self.n = nn.GRU(1, 4, batch_first=True),nn.Linear(4, 1),0
        self.double()
    def reset(self): self.n += 1
    def forward(self, x): h = self.rnn(x[...,None])[0]; return self.head(h[:,-1]),[h],[h*.9]

def convolves():
    return Scaled(nn.Unflatten(1, (1, 1, 5)), nn.Conv2d(1, 4, (1, 3)), nn.Flatten(), nn.Linear(12, 1)).double()
def drops(): return Scaled(*model(), DropsInValidation())
def in_single(): return Scaled(nn.Flatten(), *model().float())
def images(self): self.learn.xb = (self.x[:,None,None],)
def spoils(self):
    if self.train_iter == 2: self.learn.loss = self.loss*math.nan
def hears():
    heard = []
    hook = HookCallback(hook=lambda m, i, o: heard.append(len(o)), every=2)
    return [hook, at('after_fit', lambda self: self.rows.append([sum(heard)]))]
def seeds(): return at('before_validate', lambda self: torch.manual_seed(0), -30)

in_fit = dict(in_fit=True)  # `no_bar` takes them out of the Learner
any_kind,of_rnn = ['whole','ragged','both','carry'],['whole','ragged','step']  # its state begins with an epoch
single = dict(m=in_single, loss_func=MSELossFlat, tol=FLOAT32)
fastais = dict(
    Callback=(any_kind, lambda: at('after_batch', logs, 60), {}),
    ChannelsLast=(any_kind, ChannelsLast, dict(m=convolves)),
    FetchPredsCallback=(any_kind, noted(FetchPredsCallback, lambda o: [o.preds[0].flatten()], 'after_validate'), {}),
    CollectDataCallback=(any_kind, noted(CollectDataCallback, lambda o: [[b[-1]] for b in o.data]), {}),
    HookCallback=(any_kind, hears, {}),
    ActivationStats=(['whole'], noted(ActivationStats, lambda o: [[np.mean([s[0]['mean'] for s in o.stats])]]), {}),
    MixUp=(['split'], MixUp, single),  # they mix within a loader batch
    CutMix=(['split'], lambda: [CutMix(), at('before_batch', images, -1, True)], single),
    MCDropoutCallback=(any_kind, lambda: [MCDropoutCallback(), seeds()], dict(m=drops)),
    ProgressCallback=(any_kind, noted(ProgressCallback, lambda o: [[o.pbar.total]], 'after_batch'), in_fit),
    ShowGraphCallback=(any_kind, lambda: [ProgressCallback(), ShowGraphCallback()], in_fit),
    CSVLogger=(any_kind, noted(CSVLogger, lambda o: o.read_log().values[:,:3]), {}),
    ModelResetter=(of_rnn, lambda: [noted(ModelResetter, lambda o: [[o.model.n]])(), RNNCallback()], dict(m=Recurrent)),
    RNNCallback=(of_rnn, RNNCallback, dict(m=Recurrent)),
    RNNRegularizer=(of_rnn, lambda: [RNNCallback(), RNNRegularizer(2., 1.)], dict(m=Recurrent, tol=FLOAT32)),
    ParamScheduler=(any_kind, lambda: ParamScheduler(dict(lr=SchedCos(.2, .01))), {}),
    LRFinder=(constant, lambda: LRFinder(1e-3, 1, 5, stop_div=False), dict(moves=False)),
    TensorBoardCallback=(any_kind, lambda: TensorBoardCallback('tb', False, False), {}),
    TerminateOnNaNCallback=(any_kind, lambda: [TerminateOnNaNCallback(), at('after_loss', spoils)], {}),
    TrackerCallback=(any_kind, noted(TrackerCallback, lambda o: [[o.best]]), {}),
    EarlyStoppingCallback=(any_kind, lambda: EarlyStoppingCallback('train_loss', min_delta=10.), {}),
    SaveModelCallback=(any_kind, lambda: SaveModelCallback('train_loss', comp=np.greater), {}),
    ReduceLROnPlateau=(any_kind, lambda: ReduceLROnPlateau(min_delta=10.), {}),
    ShortEpochCallback=(constant, lambda: ShortEpochCallback(.4, short_valid=False), {}),
    GradientClip=(any_kind, lambda: GradientClip(.1), {}),
    BnFreeze=(any_kind, BnFreeze, dict(m=Frozen)))
elsewhere = dict(
    TrainEvalCallback='in every Learner', GatherPredsCallback='in FetchPredsCallback', MixHandler='in MixUp and CutMix',
    TensorBoardBaseCallback='in TensorBoardCallback', TensorBoardProjectorCallback='in prediction only',
    WandbCallback='test_logging', MixedPrecision='test_precision', ModelToHalf='with NonNativeMixedPrecision only',
    NonNativeMixedPrecision='an error: test_checks', GradientAccumulation='an error: test_checks',
    AzureMLCallback='needs its service', CometCallback='needs its service')

def test_every_callback_of_fastai_is_here():
    "Also of modules that are not installed"
    bases = {}
    for o in pkgutil.iter_modules(fastai.callback.__path__):
        for node in ast.parse((Path(fastai.callback.__path__[0])/f'{o.name}.py').read_text()).body:
            if isinstance(node, ast.ClassDef): bases[node.name] = [ast.unparse(b) for b in node.bases]
    def is_callback(name): return name == 'Callback' or any(map(is_callback, bases.get(name, ())))
    assert {o for o in bases if is_callback(o)} == fastais.keys() | elsewhere.keys()
    assert not fastais.keys() & elsewhere.keys()

@pytest.mark.thin(3)
@pytest.mark.parametrize('name,layout', [(k, o) for k,(kinds,*_) in fastais.items() for o in kinds])
def test_a_callback_of_fastai(name, layout, capsys):
    _,make,kwargs = fastais[name]
    small,_ = both(layout, make, **kwargs)
    assert small.others[0].rows if hasattr(type(small.others[0]), 'notes') else small.others

# PyTorch's schedulers, and rates that `scale` changes for the step

class TorchScheduler(Callback):
    run_valid = False
    def __init__(self, event, make): self.make = make; setattr(self, event, self.advance)
    def before_fit(self): self.sched = self.make(self.opt.opt)
    def advance(self): self.sched.step(*[self.loss.item()]*isinstance(self.sched, lr_scheduler.ReduceLROnPlateau))

schedulers = dict(
    exponential=partial(lr_scheduler.ExponentialLR, gamma=.9),
    steps=partial(lr_scheduler.StepLR, step_size=3, gamma=.5),
    cosine=partial(lr_scheduler.CosineAnnealingLR, T_max=100),
    rule=partial(lr_scheduler.LambdaLR, lr_lambda=lambda k: .9**k),
    restarts=partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2),
    plateau=partial(lr_scheduler.ReduceLROnPlateau, patience=1, threshold=1.))
torch_sgd = partial(OptimWrapper, opt=torch.optim.SGD)

@pytest.mark.parametrize('name', schedulers)
def test_a_scheduler_of_pytorch(name):
    for layout,event in zip(any_kind, ['after_step','after_batch']*2):
        small,_ = both(layout, lambda: [TorchScheduler(event, schedulers[name]), rates_used()], opt_func=torch_sgd)
        assert len({*map(tuple, small.others[-1].rows)}) > 1

@pytest.mark.parametrize('name', [*schedulers, 'falls in after_step', 'falls in after_batch'])
def test_a_rate_is_scaled_once(name):
    "Whoever multiplies the present rate finds it as it was before the step"
    def used(scale):
        event = name.rpartition(' ')[2]
        by = TorchScheduler('after_step', schedulers[name]) if name in schedulers else sets_rate(event, 0, falls)()[0]
        cbs = [by, rates := rates_used(), scheduled(scale=scale)]
        learn = fit(make_learner(8, n=88, cbs=cbs, opt_func=torch_sgd if name in schedulers else SGD), 2, 1e-4)
        return tensor([o[-1] for o in rates.rows]),learn.recorder.accum_bs,learn.opt.hypers[-1]['lr']
    (plain,sizes,end),(scaled,_,same_end) = used(None),used(dict(lr=sqrt_scale))
    k = (tensor(sizes)/8)**.5
    assert_same(scaled/plain, k, 1e-5)
    assert end == same_end and len({*plain.tolist()}) > 1 < len({*sizes})

# log_accum_batch=False

@pytest.mark.parametrize('layout', constant)
def test_each_loader_batch_is_logged(layout):
    "With its own loss, and `len(learn.dl)` counts them; a window has one rate and one step"
    bs,n,n_batches,*_ = layouts[layout]
    own = []
    def note(self): own.extend(map(mse, self.pred.detach().split(bs), self.y.split(bs)))
    def make(): return [*[Sees(o, [e]) for o in ORDERS for e in ('before_batch','after_batch')], rates_used()]
    big = run(layout, lambda: [*make(), at('after_pred', note)], True, method='fit_one_cycle')
    small = run(layout, make, method='fit_one_cycle', accum_kwargs=dict(log_accum_batch=False))
    assert_same(weights(small), weights(big), ROUNDING)
    assert_same(flat(small.others[-1].rows), flat(big.others[-2].rows))
    counts = [-(-len(idxs)//bs) for idxs,_ in windows(n, bs, 32, 'drop' if layout == 'dropped' else 'step', 2)]
    def repeated(o): return [v for v,k in zip(o, counts, strict=True) for _ in range(k)]
    assert_same(small.recorder.lrs, repeated(big.recorder.lrs))
    assert len(own) == 2*n_batches == sum(counts)
    for a,b in zip(small.others[:-1], big.others):
        event, = b.seen
        rows = [o for o in a.seen[event] if o[0]]  # in training
        pcts = repeated([o[5] for o in b.seen[event] if o[0]])
        counters = [(epoch, i, n_batches, epoch*n_batches+i) for epoch in range(2) for i in range(n_batches)]
        is_counted = event == 'after_batch' and a.order > -10  # by fastai
        assert [o[1:5] for o in rows] == [(*o[:3], o[3]+is_counted) for o in counters]
        assert {o[6] for o in rows} == {n_batches}
        if event == 'before_batch': assert_same([o[5] for o in rows], pcts)
        else: assert_same([loss for (loss,_),o in zip(a.losses, a.seen[event]) if o[0]], own, FLOAT32)

@pytest.mark.parametrize('layout', ['whole','ragged','both'])
@pytest.mark.parametrize('name', [*[f'rate by pct_train in {o}' for o in once_a_window], 'average in after_step, 0'])
def test_what_acts_once_a_window_where_loader_batches_are_logged(name, layout):
    big = run(layout, cases[name], True)
    small = run(layout, cases[name], accum_kwargs=dict(log_accum_batch=False))
    assert_same(weights(small), weights(big), ROUNDING)
    assert_same(flat(small.others[-1].rows), flat(big.others[-1].rows), FLOAT32)

@pytest.mark.parametrize('order', ORDERS)
@pytest.mark.parametrize('event', ['before_batch','after_batch'])
def test_a_step_has_the_rate_of_its_first_loader_batch(event, order):
    "Where a scheduler counts loader batches, it goes on in mid-window"
    def rate(self): return .1-.003*self.train_iter
    scheduler,rates = sets_rate(event, order, rate)()
    learn = make_learner(8, n=100, cbs=[GradientAccumulation(32, log_accum_batch=False), scheduler, rates])
    fit(learn, 2)
    is_late = event == 'after_batch' and order < -10  # before fastai counts
    assert_same(flat(rates.rows), [.1-.003*max(i-is_late, 0) for i in (0, 4, 8, 12, 13, 17, 21, 25)], ROUNDING)

@pytest.mark.parametrize('event', ['before_batch','after_pred','after_batch'])
def test_a_fit_that_is_stopped_where_loader_batches_are_logged(event):
    "Has the steps of the windows that are over"
    cbs = [GradientAccumulation(32, log_accum_batch=False), at(event, stops(CancelFitException, 6))]
    learn = fit(make_learner(8, cbs=cbs), 2)
    assert_same(weights(learn), reference([(range(32), 0)], 96, sgd)[0], ROUNDING)
    assert len(losses(learn)) == 6-(event == 'after_batch') and not any(g.any() for g in grads(learn))

# What else others put beside the model and its optimizer

class CenterLoss(nn.Module):
    def __init__(self): super().__init__(); self.center = nn.Parameter(torch.full((1, 1), .5, dtype=torch.float64))
    def forward(self, pred, targ): return (F.mse_loss(pred, targ)+.5*(pred-self.center).pow(2).mean()).float()

def steps_loss(self):
    self.own = getattr(self, 'own', None) or torch.optim.SGD(self.loss_func.parameters(), lr=.3)
    self.own.step()
    self.own.zero_grad()
    self.rows.append([self.loss_func.center.item()])

@pytest.mark.parametrize('layout', any_kind)
@pytest.mark.parametrize('event', ['before_step','after_step'])
def test_an_optimizer_of_the_loss(event, layout):
    small,_ = both(layout, lambda: at(event, steps_loss), loss_func=CenterLoss)
    assert abs(small.loss_func.center-.5) > .1

@pytest.mark.parametrize('exc', [KeyboardInterrupt, CancelFitException])
@pytest.mark.parametrize('bs,nth,cb', [
    (8, 6, GradientAccumulation(32)), (32, 7, GradientAccumulation(micro_batch_size=8))])
def test_a_window_that_is_cut_off_leaves_no_gradient(bs, nth, cb, exc):
    "Neither in the model nor in the loss: the next fit begins after the first step"
    def strike(self):
        self.n += self.training
        if self.n == self.nth: raise exc
    def twice(bs, nth, *cbs):
        learn = make_learner(bs, cbs=[*cbs, at('after_step', steps_loss)], loss_func=CenterLoss())
        with contextlib.suppress(KeyboardInterrupt): fit(learn, 2, cbs=at('after_loss', strike, n=0, nth=nth))
        assert len(losses(learn)) == 1
        return fit(learn, 2)
    big,small = twice(32, 2),twice(bs, nth, cb)
    assert_same(weights(small), weights(big), ROUNDING)
    assert_same(small.loss_func.center, big.loss_func.center, ROUNDING)

def test_a_loss_that_is_set_later_is_checked():
    "When the check of the first one is over"
    def root(pred, targ): return mse(pred, targ).sqrt()
    def switch(self):
        if self.epoch == 6: self.learn.loss_func = root
    with pytest.warns(UserWarning, match='not exact for this loss'):
        fit(make_learner(8, cbs=[GradientAccumulation(32), Callback(before_epoch=switch)]), 8)

def test_a_method_that_is_set_as_the_loss_in_each_epoch_is_one_loss():
    class Sets(Callback):
        def loss(self, pred, targ): return mse(pred, targ)
        def before_epoch(self): self.learn.loss_func = self.loss
        def after_epoch(self): lefts.append(accum.loop.fit.loss_check.windows_left)
    accum,lefts = GradientAccumulation(32),[]
    fit(make_learner(8, cbs=[accum, Sets()]), 3)
    assert lefts == [13, 10, 7]

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enc,self.dec,self.head = nn.Linear(5, 8),nn.Linear(5, 8),nn.Linear(8, 1)
        self.double().dec.weight = self.enc.weight
    def forward(self, x): return self.head(torch.tanh(self.enc(x))*torch.tanh(self.dec(x.flip(1))))

@pytest.mark.parametrize('layout', any_kind)
def test_a_weight_in_two_groups(layout):
    both(layout, list, m=Tied, splitter=lambda m: [params(m.enc), params(m.dec)+params(m.head)])

@pytest.mark.parametrize('drop_last', [False, True])
def test_a_batch_sampler_of_pytorch(drop_last):
    "It has a size, and drops the last batch or not; here of some samples of the data"
    tud = torch.utils.data
    def go(bs, *cbs):
        sampler = tud.SubsetRandomSampler(range(8, 92), torch.Generator().manual_seed(0))
        train = tud.DataLoader([*zip(*data(104))], batch_sampler=tud.BatchSampler(sampler, bs, drop_last))
        return fit(Learner(DataLoaders(train, train), model(), mse, opt_func=SGD, cbs=cbs), 2)
    big,small = go(32),go(8, GradientAccumulation(32))
    assert_moved(big)
    assert_same(weights(small), weights(big), ROUNDING)
    assert len(losses(small)) == len(losses(big)) == 2*(2+(not drop_last))
