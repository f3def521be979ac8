"What is in `.grad` counts: backward passes that callbacks run themselves, gradients that others change, hooks, networks that take turns"
import math
import pytest
from fastai.vision.gan import AdaptiveGANSwitcher, FixedGANSwitcher, GANLearner

from common import *

torch_sgd = partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9)
OPTS = dict(fastai=partial(SGD, mom=.9), torch=torch_sgd)

class Makes(Callback):
    "Makes the gradient itself, in one of the ways that others do, and cancels the backward pass"
    run_valid = False
    def __init__(self, how, event='before_backward', order=0): self.how,self.order = how,order; setattr(self, event, self.make)
    def make(self):
        params = [*self.learn.model.parameters()]
        if self.how == 'backward': self.learn.loss_grad.backward()
        for p,g in zip(params, torch.autograd.grad(self.learn.loss_grad, params) if self.how != 'backward' else ()):
            if self.how == 'other tensor': p.grad = g.clone()
            else:
                if p.grad is None: p.grad = torch.zeros_like(p)
                if self.how == 'in place': p.grad.copy_(g)
                else: p.grad.data = g  # unseen by PyTorch's version counter
        raise CancelBackwardException

def uneven(learn): return float(1+learn.train_iter%3*len(learn.yb[0]))  # items that batches and windows do not share

def mean_of(learn): return len(learn.yb[0])

ONE = dict(window=dict(accum_bs=32), exact=dict(exact=True), auto=dict(micro_batch_size='auto'), skips=dict(accum_bs=32, skip_nonfinite=True),
           items=dict(accum_bs=32, num_items=uneven))
SEVERAL = dict(windows=(8, dict(accum_bs=32)), windows_by_items=(8, dict(accum_bs=32, num_items=mean_of)), pieces=(32, dict(micro_batch_size=8)), uneven_pieces=(32, dict(micro_batch_size=5)),
               windows_of_pieces=(16, dict(accum_bs=32, micro_batch_size=5)), carried=(8, dict(accum_bs=24, remainder='carry')), skips=(8, dict(accum_bs=32, skip_nonfinite=True)))

@pytest.fixture(scope='module')
def plain():
    made = {}
    def f(opt, how='backward'):
        if (opt,how) not in made: made[opt,how] = fit(make_learner(32, n=88, cbs=Makes(how), opt_func=OPTS[opt]), 2)
        return made[opt,how]
    return f

@pytest.mark.parametrize('opt', OPTS)
@pytest.mark.parametrize('how', ['backward','other tensor','in place','data'])
@pytest.mark.parametrize('way', ONE)
def test_a_backward_pass_of_ones_own_in_a_window_of_one(plain, way, how, opt):
    "The plain fit, bit for bit"
    learn,big = fit(make_learner(32, n=88, cbs=[GradientAccumulation(**ONE[way]), Makes(how)], opt_func=OPTS[opt]), 2),plain(opt, how)
    assert_moved(learn)
    assert_same(weights(learn), weights(big))
    assert_same(losses(learn), losses(big))
    assert learn.gradient_accumulation.opt_steps == 6 and '_with_events' not in vars(learn)

@pytest.mark.parametrize('opt', OPTS)
@pytest.mark.parametrize('how', ['backward','other tensor','in place','data'])
@pytest.mark.parametrize('way', SEVERAL)
def test_a_backward_pass_of_ones_own_in_each_micro_batch(way, how, opt):
    "As if fastai had run it"
    def run(*cbs):
        bs,kwargs = SEVERAL[way]
        return fit(make_learner(bs, n=88, cbs=[GradientAccumulation(**kwargs), *cbs], opt_func=OPTS[opt]), 2)
    own,usual = run(Makes(how)),run()
    assert_moved(own)
    assert_same(weights(own), weights(usual), ROUNDING)
    assert_same(losses(own), losses(usual))
    assert own.gradient_accumulation.opt_steps == usual.gradient_accumulation.opt_steps > 3

@pytest.mark.parametrize('event', ['after_pred', 'after_loss'])
def test_it_may_be_run_before(plain, event):
    "Here with a loss of its own"
    class Early(Makes):
        def make(self): F.mse_loss(self.learn.pred, self.learn.y).backward()
        def before_backward(self): raise CancelBackwardException
    for cbs in [GradientAccumulation(32)],[GradientAccumulation(exact=True)]:
        learn = fit(make_learner(32, n=88, cbs=[*cbs, Early('', event)], opt_func=OPTS['fastai']), 2)
        assert_same(weights(learn), weights(plain('fastai')), 1e-7)  # mse is rounded to float32

@pytest.mark.parametrize('order', [0, 7, 99])
def test_it_may_be_run_afterwards(plain, order):
    class Late(Callback):
        def before_backward(self): raise CancelBackwardException
        def after_cancel_backward(self): self.learn.loss_grad.backward()
    Late.order = order
    for way in ONE: assert_same(weights(fit(make_learner(32, n=88, cbs=[GradientAccumulation(**ONE[way]), Late()], opt_func=OPTS['fastai']), 2)), weights(plain('fastai')))
    for bs,kwargs in SEVERAL['windows'],SEVERAL['pieces']:
        assert_same(weights(fit(make_learner(bs, n=88, cbs=[GradientAccumulation(**kwargs), Late()], opt_func=OPTS['fastai']), 2)), weights(plain('fastai')), ROUNDING)

def test_weights_in_half_precision():
    def run(*cbs): return fit(make_learner(8, m=model().bfloat16(), cbs=[GradientAccumulation(32), *cbs]), 1)
    own,usual = run(Makes('backward')),run()
    assert (weights(own)-weights(model().bfloat16())).abs().max() > 1e-3
    assert_same(weights(own), weights(usual))

@pytest.mark.parametrize('bs,kwargs', [SEVERAL['windows'], SEVERAL['pieces']])
@pytest.mark.parametrize('skipped', [1, 3])
def test_a_skipped_batch_has_no_gradient(bs, kwargs, skipped):
    "Beside batches whose gradient a callback makes: the windows close up, as where fastai runs the backward pass"
    class Skips(Callback):
        order,own = -1,False
        def before_fit(self): self.n = 0
        def before_backward(self):
            self.n += 1
            if self.n == skipped: raise CancelBackwardException
            if self.own: Makes.make(SimpleNamespace(learn=self.learn, how='backward'))
    class Own(Skips): own = True
    a,b = (fit(make_learner(bs, cbs=[GradientAccumulation(**kwargs), cb()]), 1) for cb in (Own, Skips))
    assert_moved(a)
    assert_same(weights(a), weights(b), ROUNDING)
    assert_same(losses(a), losses(b))

def test_a_gradient_that_cannot_be_told_from_others():
    class Later(Makes):
        def make(self):
            if self.train_iter: super().make()
    learn = make_learner(8, cbs=[GradientAccumulation(32), Later('backward')])
    with pytest.raises(RuntimeError, match='ran the backward pass itself .*let fastai run it, or use windows of one batch'): fit(learn, 1)
    assert_same(weights(learn), weights(model()))

# Changed by others in mid-window

def zeroed(learn): learn.opt.zero_grad()
def set_to_none(learn): learn.model.zero_grad()
def replaced_by_centred(learn):
    for p in learn.model.parameters():
        if p.ndim > 1: p.grad = p.grad-p.grad.mean(0)
def clipped(learn): nn.utils.clip_grad_norm_(learn.model.parameters(), 1e-3)
def clipped_by_value(learn): nn.utils.clip_grad_value_(learn.model[-1].parameters(), 1e-3)
def clipped_data(learn):
    for p in learn.model.parameters(): p.grad.data.clamp_(-1e-3, 1e-3)
def attacked(learn): F.mse_loss(learn.model(learn.x+.01), learn.y).backward()
CHANGES = zeroed,set_to_none,replaced_by_centred,clipped,clipped_by_value,clipped_data,attacked

@pytest.mark.parametrize('bs,kwargs', [SEVERAL['windows'], SEVERAL['pieces'], (16, dict(accum_bs=32, micro_batch_size=8))])
@pytest.mark.parametrize('change', CHANGES)
def test_a_gradient_changed_in_mid_window(change, bs, kwargs):
    "An error in the first window; in half precision, too; a window of one batch is the plain fit"
    def run(bs, *cbs, m=None): return fit(make_learner(bs, m=m, cbs=[*cbs, Callback(after_backward=lambda self: change(self.learn))], opt_func=torch_sgd), 1)
    for m in model(),model().bfloat16():
        before = weights(m).clone()
        with pytest.raises(RuntimeError, match='zeroed, replaced or changed in mid-window.*before_step.*one batch'): run(bs, GradientAccumulation(**kwargs), m=m)
        assert_same(weights(m), before)
    for cb in GradientAccumulation(32),GradientAccumulation(exact=True): assert_same(weights(run(32, cb)), weights(run(32)))

def test_what_changes_them_once_a_window():
    "In `before_step`, as fastai's own callback does"
    for cb in GradientClip(.1),Callback(before_step=lambda self: replaced_by_centred(self.learn)):
        a,b = fit(make_learner(32, cbs=cb), 1),fit(make_learner(8, cbs=[GradientAccumulation(32), cb]), 1)
        assert_same(weights(a), weights(b), ROUNDING)
        assert_moved(a)

# Hooks, and gradients of samples

def hooked(f):
    m = model()
    for p in m.parameters(): p.register_hook(f)
    return m

@pytest.mark.parametrize('bs,kwargs,warns', [(8, dict(accum_bs=32), True), (32, dict(micro_batch_size=8), True), (32, dict(accum_bs=32), False), (32, dict(exact=True), False),
                                             (32, dict(micro_batch_size='auto'), False), (32, dict(micro_batch_size=32), False)])
def test_hooks_on_parameters(bs, kwargs, warns):
    "A warning, where they act on several micro-batches; masks are exact"
    big = fit(make_learner(32, m=hooked(lambda g: g*(g.shape[0] > 1))), 1)
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        learn = fit(make_learner(bs, m=hooked(lambda g: g*(g.shape[0] > 1)), cbs=GradientAccumulation(**kwargs)), 1)
    assert [str(o.message)[:20] for o in w if 'register_hook' in str(o.message)] == ['parameters have hook']*warns
    assert_same(weights(learn), weights(big), ROUNDING if warns else 0)
    assert_moved(learn)

@pytest.mark.parametrize('when', ['before', 'from the first backward pass on'])
@pytest.mark.parametrize('bs,cb', [(8, GradientAccumulation(32)), (32, GradientAccumulation(micro_batch_size=8)), (8, GradientAccumulationSchedule(8, 32)), (32, GradientCache(8))])
def test_gradients_of_samples(bs, cb, when):
    "As Opacus keeps them; a window of one batch is the plain fit"
    def of_samples():
        m = model()
        if when == 'before':
            for p in m.parameters(): p.grad_sample = None
        return m
    def keep(self):
        for p in self.learn.model.parameters(): p.grad_sample = [p.grad]
    def run(bs, *cbs): return fit(make_learner(bs, m=of_samples(), cbs=[*cbs, Callback(after_backward=keep)]), 2)
    with pytest.raises(ValueError, match='grad_sample.*whole batches'): run(bs, deepcopy(cb))
    assert_same(weights(run(32, GradientAccumulation(32))), weights(run(32)))

# Networks that take turns

def gan(bs, *cbs, switcher=None, **kwargs):
    g = torch.Generator().manual_seed(0)
    ds = list(zip(torch.randn(96, 4, generator=g), torch.randn(96, 6, generator=g)+1))
    torch.manual_seed(1)
    nets = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)),nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    learn = GANLearner.wgan(DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds[:16], bs=bs)), *nets, switcher=switcher or FixedGANSwitcher(1, 1), clip=.05, opt_func=SGD, cbs=L(cbs), show_img=False)
    learn.recorder.train_metrics = False
    learn.before = weights(learn)
    return learn

@pytest.mark.parametrize('kwargs', [dict(accum_bs=32), dict(exact=True), dict(micro_batch_size='auto'), dict(micro_batch_size=8)])
def test_a_gan_in_windows_of_one_batch(kwargs, capsys):
    "Is the plain one, and says how windows are made up at most once"
    big,learn = fit(gan(32), 2),gan(32, GradientAccumulation(**kwargs))
    fit_aloud(learn, 2)
    assert (weights(learn)-learn.before).abs().max() > 1e-3
    assert_same(weights(learn), weights(big), 1e-7 if kwargs.get('micro_batch_size') == 8 else 0)  # float32, in pieces
    assert len(capsys.readouterr().out.splitlines()) == 1

@pytest.mark.parametrize('switcher', [lambda: FixedGANSwitcher(1, 1), lambda: FixedGANSwitcher(5, 1), lambda: AdaptiveGANSwitcher(math.inf, math.inf)])
def test_a_window_that_would_mix_two_networks(switcher):
    with pytest.raises(RuntimeError, match='frozen or unfrozen in mid-window .*GANTrainer.*one batch'): fit(gan(8, GradientAccumulation(32), switcher=switcher()), 2)

def test_turns_of_whole_windows():
    assert_same(weights(fit(gan(8, GradientAccumulation(32), switcher=FixedGANSwitcher(4, 4)), 2)), weights(fit(gan(32), 2)), 1e-7)  # float32

# Models of other kinds

class Bag(nn.Module):
    "A sparse embedding"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.e,self.head = nn.Embedding(20, 4, sparse=True),nn.Linear(4, 1)
        self.double()
    def forward(self, x): return self.head(self.e((x.abs()*6).long().clamp(max=19)).mean(1))

@pytest.mark.parametrize('bs,kwargs', [*SEVERAL.values(), (32, dict(accum_bs=32, skip_nonfinite=True)), (32, dict(exact=True))])
@pytest.mark.parametrize('own', [False, True])
def test_sparse_gradients(bs, kwargs, own):
    size = kwargs.get('accum_bs', 32)
    if size == 24: return
    opt = partial(OptimWrapper, opt=torch.optim.SGD)
    big = fit(make_learner(32, n=88, m=Bag(), opt_func=opt), 2)
    learn = fit(make_learner(bs, n=88, m=Bag(), opt_func=opt, cbs=[GradientAccumulation(**kwargs)]+[Makes('backward')]*own), 2)
    assert (weights(learn)-weights(Bag())).abs().max() > 1e-3
    assert_same(weights(learn), weights(big), ROUNDING)

def lazy():
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1)).double()

def test_lazy_modules():
    "Windows are those of the plain fit; what runs again or in pieces needs a model that has had a batch"
    def run(bs, m, *cbs):
        learn = Learner(DataLoaders(*[DataLoader([*zip(*data(96))], bs=bs)]*2), m, mse, opt_func=SGD, cbs=[*cbs])
        torch.manual_seed(1)
        return fit(learn, 1)
    assert_same(weights(run(8, lazy(), GradientAccumulation(32))), weights(run(32, lazy())), ROUNDING)
    for make in (lambda: GradientAccumulation(micro_batch_size=8), lambda: GradientAccumulation(micro_batch_size='auto'), lambda: GradientAccumulation(exact=True), lambda: GradientCache(8),
                 ActivationCheckpointing):
        with pytest.raises(ValueError, match='0.weight has no shape yet .*lazy.*before the fit'): run(32, lazy(), make())
        ms = lazy(),lazy()
        for m in ms:
            torch.manual_seed(2)
            m(data(2)[0])
        assert_same(weights(run(32, ms[0], make())), weights(run(32, ms[1])), ROUNDING)

class Runs(nn.Module):
    def __init__(self): super().__init__(); self.parts = nn.ModuleList(model())
    def forward(self, x): return self.parts[2](self.parts[1](self.parts[0](x)))

@pytest.mark.parametrize('part,m', [(lambda m: None, model), (lambda m: model(), model), (lambda m: [m[0]], model), (lambda m: m[:2], model), (lambda m: m.parts, Runs), (lambda m: type(m), model)])
def test_a_part_that_is_no_part(part, m):
    with pytest.raises(ValueError, match='part must return a module of the model that has a forward'): fit(make_learner(32, m=m(), cbs=GradientCache(8, part=part)), 1)

# Added and removed in a fit

@pytest.mark.parametrize('event', ['before_epoch','before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_batch'])
@pytest.mark.parametrize('make', [lambda: GradientAccumulation(64), lambda: GradientAccumulation(exact=True), lambda: GradientCache(8)])
def test_added_in_a_fit(make, event):
    def add(self):
        if not hasattr(self.learn, make().name): self.learn.add_cb(make())
    learn = make_learner(32)
    with pytest.raises(RuntimeError, match='was added in a fit: .*before the fit'): fit(learn, 1, cbs=Callback(**{event:add}))
    assert '_with_events' not in vars(learn)

class Removes(Callback):
    def __init__(self, event, order): self.order = order; setattr(self, event, self.remove)
    def remove(self):
        if self.training: self.learn.remove_cbs(self.learn._grab_cbs(GradientAccumulation))

IN_BATCH = ['before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step','after_batch']

@pytest.mark.parametrize('event', IN_BATCH)
@pytest.mark.parametrize('order', [-5, 7])
@pytest.mark.parametrize('kwargs', [dict(accum_bs=32), dict(exact=True)])
def test_removed_in_a_window_of_one(kwargs, event, order):
    "The fit is the plain one"
    learn = fit(make_learner(32, cbs=GradientAccumulation(**kwargs)), 2, cbs=Removes(event, order))
    big = fit(make_learner(32), 2)
    assert_same(weights(learn), weights(big))
    assert_same(losses(learn), losses(big))
    assert '_with_events' not in vars(learn)

@pytest.mark.parametrize('bs,kwargs', [(8, dict(accum_bs=32)), (32, dict(micro_batch_size=8))])
def test_removed_in_mid_window(bs, kwargs):
    with pytest.warns(UserWarning, match='removed in mid-window: 8 samples are left out'):
        fit(make_learner(bs, cbs=GradientAccumulation(**kwargs)), 1, cbs=Removes('after_batch' if bs == 8 else 'after_backward', 7))

@pytest.mark.parametrize('event', IN_BATCH)
@pytest.mark.parametrize('order', [-5, 7])
def test_pieces_whose_callback_is_removed(event, order):
    "The fit goes on, and the next one is plain"
    learn = fit(make_learner(32, cbs=GradientAccumulation(micro_batch_size=8)), 1, cbs=Removes(event, order))
    assert '_with_events' not in vars(learn) and len(losses(learn)) == 3
    learn.model.load_state_dict(model().state_dict())
    assert_same(weights(fit(learn, 1, reset_opt=True)), weights(fit(make_learner(32), 1)))

class ClipsAbove(Callback):
    "Changes only large gradients, and so only the sum that a window ends with"
    run_valid = False
    def __init__(self, most, order): self.most,self.order = most,order
    def after_backward(self):
        norm = nn.utils.get_total_norm(grads(self.learn))
        if norm > self.most: nn.utils.clip_grads_with_norm_(self.learn.model.parameters(), self.most, norm)

@pytest.mark.parametrize('bs,kwargs', [SEVERAL['windows'], SEVERAL['pieces']])
def test_a_gradient_changed_after_the_last_micro_batch(bs, kwargs):
    "It is not averaged yet"
    sizes = []
    class Norms(Callback):
        run_valid = False
        def after_backward(self): sizes.append(nn.utils.get_total_norm(grads(self.learn)).item())
    fit(make_learner(bs, cbs=[GradientAccumulation(**kwargs), Norms()]), 1)
    assert sizes[3] > 1.01*max(sizes[:3])
    with pytest.raises(RuntimeError, match='in mid-window'): fit(make_learner(bs, cbs=[GradientAccumulation(**kwargs), ClipsAbove(max(sizes[:3])*1.005, 0)]), 1)
