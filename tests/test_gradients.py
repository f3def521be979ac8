"Whatever else makes or changes gradients: a callback's own backward pass, hooks, networks that take turns"
import math, weakref
import pytest
from fastai.vision.gan import AdaptiveGANSwitcher, FixedGANSwitcher, GANLearner

from common import *

OPTS = dict(fastai=partial(SGD, mom=.9), torch=partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9))

class Makes(Callback):
    "Makes the gradient itself from micro-batch `begin` on"
    run_valid = False
    def __init__(self, how, begin=0): self.how,self.begin,self.n = how,begin,0
    def before_backward(self):
        self.n += 1
        if self.n <= self.begin: return
        params,loss = [*self.learn.model.parameters()],self.learn.loss_grad
        if self.how == 'backward': loss.backward()
        for p,g in zip(params, torch.autograd.grad(loss, params) if self.how != 'backward' else ()):
            if self.how == 'other tensor': p.grad = g.clone()
            else:
                if p.grad is None: p.grad = torch.zeros_like(p)
                if self.how == 'in place': p.grad.copy_(g)
                else: p.grad.data = g  # unseen by PyTorch's version counter
        raise CancelBackwardException

HOW = ['backward','other tensor','in place','data']

def uneven(learn): return float(1+learn.train_iter%3*len(learn.yb[0]))  # items that batches and windows do not share

ONE = [lambda: GradientAccumulation(32), ActivationCheckpointing, lambda: GradientAccumulation(micro_batch_size='auto'),
       lambda: GradientAccumulation(32, skip_nonfinite=True), lambda: GradientAccumulation(32, num_items=uneven)]
WINDOWS,SPLIT = (8, dict(accum_bs=32)),(32, dict(micro_batch_size=8))
SEVERAL = [WINDOWS, SPLIT, (16, dict(accum_bs=32, micro_batch_size=5)), (8, dict(accum_bs=32, skip_nonfinite=True)),
           (8, dict(accum_bs=32, num_items=lambda learn: len(learn.yb[0]))), (8, dict(accum_bs=24, remainder='carry'))]

@pytest.mark.parametrize('opt', OPTS.values(), ids=OPTS)
@pytest.mark.parametrize('how', HOW)
@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16], ids=str)
def test_a_backward_pass_of_ones_own_in_a_window_of_one(dtype, how, opt):
    "The plain fit, bit for bit"
    def run(*cbs): return fit(make_learner(32, n=88, m=model().to(dtype), cbs=[*cbs, Makes(how)], opt_func=opt), 2)
    big = run()
    assert (weights(big)-weights(model().to(dtype))).abs().max() > 1e-2
    for make in ONE:
        learn = run(make())
        assert_same(weights(learn), weights(big))
        assert_same(losses(learn), losses(big))

@pytest.mark.parametrize('bs, kwargs', SEVERAL)
@pytest.mark.parametrize('how, begin', [*[(o, 0) for o in HOW], *[(o, 2) for o in HOW[:3]]])
def test_a_backward_pass_of_ones_own_in_a_window_of_several(how, begin, bs, kwargs):
    "An error in whichever micro-batch, before the step"
    learn = make_learner(bs, n=88, cbs=[GradientAccumulation(**kwargs), Makes(how, begin)])
    with pytest.raises(RuntimeError, match='ran the backward pass itself .*let fastai run it, or use windows of one'):
        fit(learn, 2)
    assert_same(weights(learn), weights(model()))

@pytest.mark.parametrize('event', ['after_pred','after_loss','after_cancel_backward'])
@pytest.mark.parametrize('make', ONE)
def test_it_may_be_run_before_or_afterwards(make, event):
    "Here with a loss of its own"
    def run(*cbs):
        class Own(Callback):
            run_valid = False
            def before_backward(self): raise CancelBackwardException
        setattr(Own, event, lambda self: ((self.pred-self.y).abs().mean()).backward())
        return fit(make_learner(32, n=88, cbs=[*cbs, Own()]), 2)
    assert_moved(big := run())
    assert_same(weights(run(make())), weights(big))

@pytest.mark.parametrize('nth', [0, 2])
@pytest.mark.parametrize('bs, kwargs', [WINDOWS, SPLIT])
def test_a_micro_batch_without_a_backward_pass(bs, kwargs, nth):
    "It is left out: windows close up, and a batch that is split is the rest of itself"
    seen = []
    def skip(self):
        seen.append(len(self.pred))
        if len(seen) == nth+1: raise CancelBackwardException
    learn = fit(make_learner(bs, cbs=[GradientAccumulation(**kwargs), Callback(before_backward=skip)]), 1)
    kept = [i for i in range(96) if i//8 != nth]
    steps = [kept[:32], kept[32:64], kept[64:]] if bs == 8 else [kept[:24], kept[24:56], kept[56:]]
    assert_same(weights(learn), reference([(o, 0) for o in steps], 96, sgd)[0], ROUNDING)
    assert learn.recorder.accum_bs == [*map(len, steps)]

# Changes in mid-window

def zeroed(learn): learn.opt.zero_grad()
def set_to_none(learn): learn.model.zero_grad()
def replaced_by_centred(learn):
    for p in learn.model.parameters():
        if p.ndim > 1: p.grad = p.grad-p.grad.mean(0)
def clipped(learn): nn.utils.clip_grad_norm_(learn.model.parameters(), 1e-3)
def clipped_by_value(learn): nn.utils.clip_grad_value_(learn.model[-1].parameters(), 1e-3)
def attacked(learn): F.mse_loss(learn.model(learn.x+.01), learn.y).backward()
def frozen(learn): learn.model[0].requires_grad_(False)

@pytest.mark.parametrize('bs, kwargs', SEVERAL[:3])
@pytest.mark.parametrize('change', [zeroed, set_to_none, replaced_by_centred, clipped, clipped_by_value, attacked,
                                    frozen])
def test_a_gradient_changed_in_mid_window(change, bs, kwargs):
    "An error in the first window; a window of one batch is the plain fit"
    def run(bs, *cbs):
        changes = Callback(after_backward=lambda self: change(self.learn))
        learn = make_learner(bs, cbs=[*cbs, changes], opt_func=OPTS['torch'])
        try: fit(learn, 1)
        except RuntimeError as e: learn.error = str(e)
        return learn
    learn = run(bs, GradientAccumulation(**kwargs))
    assert re.search('zeroed, replaced or changed.*frozen.*in the middle of a window.*before_step.*one batch', learn.error)
    assert_same(weights(learn), weights(model()))
    for cb in GradientAccumulation(32),ActivationCheckpointing(): assert_same(weights(run(32, cb)), weights(run(32)))

@pytest.mark.parametrize('bs, kwargs', [WINDOWS, SPLIT])
def test_a_gradient_changed_after_the_last_micro_batch(bs, kwargs):
    "It is not averaged yet: a sum of four would be clipped as if it were the mean"
    n = []
    def clip_fourth(self):
        n.append(1)
        if len(n) == 4: nn.utils.clip_grad_norm_(self.model.parameters(), .1)
    with pytest.raises(RuntimeError, match='in mid-window'):
        fit(make_learner(bs, cbs=[GradientAccumulation(**kwargs), Callback(after_backward=clip_fourth)]), 1)

# Hooks, and gradients of samples

@pytest.mark.parametrize('bs, cb, warns', [
    (8, GradientAccumulation(32), True), (32, GradientAccumulation(micro_batch_size=8), True),
    (32, GradientAccumulation(32), False), (32, ActivationCheckpointing(), False)])
def test_hooks_on_parameters(bs, cb, warns):
    "A warning where they act on several micro-batches; masks are exact"
    def run(bs, *cbs):
        m = model()
        for p in m.parameters(): p.register_hook(lambda g: g*(g.shape[0] > 1))
        return fit(make_learner(bs, m=m, cbs=[*cbs]), 1)
    big = run(32)
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        learn = run(bs, cb)
    assert_moved(learn)
    assert_same(weights(learn), weights(big), ROUNDING if warns else 0)
    assert [str(o.message)[:20] for o in w if 'register_hook' in str(o.message)] == ['parameters have hook']*warns

@pytest.mark.parametrize('bs, cb', [(8, GradientAccumulation(32)), (32, GradientAccumulation(micro_batch_size=8)),
                                    (32, GradientCache(8))])
def test_gradients_of_samples(bs, cb):
    "As Opacus keeps them; a window of one batch is the plain fit"
    def keep(self):
        for p in self.learn.model.parameters(): p.grad_sample = [p.grad]
    def run(bs, *cbs):
        learn = make_learner(bs, cbs=[*cbs, Callback(after_backward=keep)])
        for p in learn.model.parameters(): p.grad_sample = None
        return fit(learn, 2)
    with pytest.raises(ValueError, match='grad_sample.*whole batches'): run(bs, cb)
    assert_same(weights(run(32, GradientAccumulation(32))), weights(run(32)))

# Networks that take turns

def gan(bs, *cbs, switcher):
    (x,_),(y,_) = data(96),data(96, 2)
    torch.manual_seed(1)
    nets = [nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, o)) for o in (5, 1)]
    dls = DataLoaders(*[DataLoader([*zip(x.float(), y.float()+1)], bs=bs)]*2)
    learn = GANLearner.wgan(dls, *nets, switcher=switcher(), clip=.05, opt_func=SGD, cbs=L(cbs), show_img=False)
    learn.recorder.train_metrics = False
    learn.before = weights(learn)
    return learn

@pytest.mark.parametrize('switcher', [partial(FixedGANSwitcher, 1, 1), partial(FixedGANSwitcher, 1, 2),
                                      partial(AdaptiveGANSwitcher, .7, .7)])
def test_a_gan(switcher, capsys):
    "Its networks take turns by windows, as by batches of that size; float32. It says once how windows are made up"
    big = fit(gan(32, switcher=switcher), 2)
    for bs,cb,tol in ((32, GradientAccumulation(32), 0.), (32, GradientAccumulation(micro_batch_size='auto'), 0.),
                      (8, GradientAccumulation(32), 1e-7), (32, GradientAccumulation(micro_batch_size=8), 1e-7)):
        learn = fit_aloud(gan(bs, cb, switcher=switcher), 2)
        assert_same(weights(learn), weights(big), tol)
        assert len(losses(learn)) == len(losses(big)) == 6 and len(capsys.readouterr().out.splitlines()) == 1
    assert (weights(learn)-learn.before).abs().max() > 1e-3

# Models of other kinds

class Bag(nn.Module):
    "A sparse embedding, a frozen parameter, and some without any gradient"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.e,self.head,self.unused = nn.Embedding(20, 4, sparse=True),nn.Linear(4, 1),nn.Linear(3, 3)
        self.double().head.bias.requires_grad_(False)
    def forward(self, x): return self.head(self.e((x.abs()*6).long().clamp(max=19)).mean(1))

def lazy(): return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1)).double()

@pytest.mark.parametrize('make', [Bag, lazy])
def test_models_of_other_kinds(make):
    opt = partial(OptimWrapper, opt=torch.optim.SGD)
    def run(bs, *cbs):
        m = make()
        learn = Learner(DataLoaders(*[DataLoader([*zip(*data(88))], bs=bs)]*2), m, mse, opt_func=opt, cbs=[*cbs])
        torch.manual_seed(1)
        return fit(learn, 2, .1)
    big = run(32)
    for bs,kwargs in SEVERAL[:4]: assert_same(weights(run(bs, GradientAccumulation(**kwargs))), weights(big), ROUNDING)
    for cb in ONE if make is Bag else ONE[:1]: assert_same(weights(run(32, cb())), weights(big))
    assert (weights(run(8))-weights(big)).abs().max() > 1e-3

# Added and removed in a fit

@pytest.mark.parametrize('event', [*EVENTS[2:10], 'after_batch', 'after_epoch'])
def test_added_in_a_fit(event):
    "It runs from the next epoch on"
    def add(self):
        if not hasattr(self.learn, 'gradient_accumulation'): self.learn.add_cb(GradientAccumulation(32))
    learn = fit(make_learner(8), 3, cbs=Callback(**{event:add}))
    steps = windows(96, 8, 8, 'step', 1)+windows(96, 8, 32, 'step', 2)
    assert_same(weights(learn), reference(steps, 96, sgd)[0], ROUNDING)

@pytest.mark.parametrize('order', [-5, 7, 99])
@pytest.mark.parametrize('event', [*EVENTS[3:10], 'after_batch'])
def test_removed_in_a_fit(event, order):
    "The window that has begun gets its step, and all others are batches"
    class Removes(Callback): pass
    def remove(self):
        if self.training: self.learn.remove_cbs(self.learn._grab_cbs(GradientAccumulation))
    setattr(Removes, event, remove)
    Removes.order = order
    first,rest = [(list(range(32)), 0)],windows(96, 8, 8, 'step', 1)
    steps = [*first, *rest[4:], *rest] if event != 'before_batch' else rest*2
    learn = fit(make_learner(8, cbs=GradientAccumulation(32)), 2, cbs=Removes())
    assert_same(weights(learn), reference(steps, 96, sgd)[0], ROUNDING)
    for cb in GradientAccumulation(32),GradientAccumulation(micro_batch_size='auto'):
        assert_same(weights(fit(make_learner(32, cbs=cb), 2, cbs=Removes())), weights(fit(make_learner(32), 2)))

@pytest.mark.parametrize('make', [None, partial(GradientAccumulation, 32), partial(GradientAccumulation, micro_batch_size=8)])
def test_gradients_are_let_go_after_the_step(make):
    "PyTorch's optimizers set them to None: the next window makes new ones in the memory of the old"
    bs,refs,alive = 32 if make is None or 'micro_batch_size' in make.keywords else 8,[],[]
    def note(self): refs.extend(weakref.ref(g) for g in grads(self.learn))
    def look(self): alive.append(any(o() is not None for o in refs))
    learn = make_learner(bs, cbs=make and make(), opt_func=OPTS['torch'])
    fit(learn, 1, cbs=[Callback(before_step=note), Callback(after_step=lambda self: self.opt.zero_grad()), Callback(after_loss=look)])
    alive.append(any(o() is not None for o in refs))
    assert len(refs) == 12 and len(alive) > 3 and not any(alive)
