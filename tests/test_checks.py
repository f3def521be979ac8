"Mistakes are errors in one line before training; gradients that are no numbers; loaders that lie"
import importlib
import pytest
from fastai.callback.training import GradientAccumulation as FastaiAccumulation

import fastxtend_accum.all as ours
from common import *

G,S,NAN = GradientAccumulation,partial(GradientAccumulationSchedule, 16, 64),float('nan')

@pytest.mark.parametrize('make, says', [
    (lambda: G(0), 'accum_bs must be at least 1 sample, not 0'),
    (lambda: G(32.), 'accum_bs counts samples, so it must be an int, not 32.0'),
    (lambda: G(True), 'not True'),
    (lambda: G(64, 8), 'accum_bs=64 and n_acc=8 both set'),
    (lambda: G(32, False), 'n_acc counts samples'),  # log_accum_batch, one place too early
    (lambda: G(32, None, 16), 'log_accum_batch must be True or False, not 16'),
    (lambda: GradientCache(0), 'micro_batch_size must be at least 1'),
    (lambda: GradientCache(None), 'not None'),
    (lambda: GradientCache(8, rows=0), 'rows must be at least 1'),
    (lambda: GradientCache(8, 'body'), "part must be a function of the model, not 'body'"),
    (lambda: G(32, micro_batch_size='half'), "micro_batch_size must be a number of samples or 'auto', not 'half'"),
    (lambda: G(32, remainder='keep'), "remainder must be one of ('step', 'carry', 'drop') or None, not 'keep'"),
    (lambda: G(micro_batch_size=8, remainder='carry'), "remainder='carry' is for windows of several batches"),
    (lambda: G(32, skip_nonfinite=1), 'skip_nonfinite must be True or False'),
    (lambda: G(32, num_items=5), 'num_items must be a function of the Learner'),
    (lambda: G(32, accum=3), 'accum=3 is no argument of GradientAccumulation'),
    (lambda: G(32, exact=True), 'exact=True is a callback now'),
    (lambda: S(drop_last=True), "use remainder='drop'"),
    (lambda: GradientAccumulationSchedule(16, 64.), 'final_accum_bs counts samples'),
    (lambda: S(.25, .75, SchedCos, 32), 'log_accum_batch must be True'),  # fastxtend's order
    (lambda: S(start=-1), 'start=-1 is outside of training: use a fraction'),
    (lambda: S(finish=NAN), 'finish=nan is outside of training: use a fraction'),
    (lambda: S(start=None), 'start must be a float'),
    (lambda: S(start=.5, finish=.2), 'start=0.5 is after finish=0.2'),
    (lambda: S(schedule={1: 2}), 'sizes by point as GradientAccumulationSchedule(**SchedSteps('),
    (lambda: S(schedule=lambda a,b: b), 'must return a function of the position, not 64')])
def test_at_once(make, says):
    with pytest.raises((TypeError, ValueError)) as e: make()
    assert says in str(e.value) and '\n' not in str(e.value)

class Unsized:
    "Batches of 8; it does not say so, and may say another length"
    def __init__(self, n=32, says=None): self.data,self.says = [o.split(8) for o in data(n)],says
    def __iter__(self): return zip(*self.data)
    def __len__(self): return self.says or len(self.data[0])

def on(train, cb): return Learner(DataLoaders(train, Unsized()), model(), mse, opt_func=SGD, cbs=cb)

class OldFp16(NonNativeMixedPrecision): before_fit = noop  # which wants a GPU

def hooked():
    learn = make_learner(8, cbs=G(32))
    learn.model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    return learn

def compiled(in_place):
    m = model()
    if in_place: m.compile(options={'triton.cudagraphs':True})
    else: m[0] = torch.compile(m[0], mode='reduce-overhead')
    return make_learner(8, m=m, cbs=G(32))

def learner(cbs, n=96, bs=8, **kwargs): return make_learner(bs, n=n, cbs=cbs, **kwargs)

@pytest.mark.parametrize('make, says', [
    (lambda: learner(G(20)), "accum_bs=20 counts samples, and is not a multiple of the DataLoader's batch of 8"),
    (lambda: learner(G(32), bs=64), 'for 32 batches of 64, write 2048, or change'),
    (lambda: learner(GradientAccumulationSchedule(16, 60)), 'final_accum_bs=60'),
    (lambda: learner(S(finish=3)), 'finish=3 is outside of training in a fit of 2 epochs'),
    (lambda: learner(S(schedule=lambda a,b: lambda pos: NAN)), 'batch size of nan'),
    (lambda: learner(G(32, num_items=lambda learn: -1)), 'num_items must return a count'),
    (lambda: learner([G(32), FastaiAccumulation(32)]), 'training.GradientAccumulation accumulates, too'),
    (lambda: learner([G(32), S()]), 'GradientAccumulationSchedule accumulates, too: remove it'),
    (lambda: learner([G(32), OldFp16()]), 'use learn.to_fp16()'),
    (lambda: learner(G(48, remainder='drop'), 44), 'an epoch has 44 samples, which do not fill'),
    (lambda: learner(G(8), 5, drop_last=True), 'an epoch has 0 samples'),
    (lambda: on(Unsized(), G(32)), 'cannot find the batch size of Unsized'),
    (hooked, 'parameters have post-accumulate-grad hooks'),
    *[(partial(compiled, o), 'CUDA graphs, which can corrupt accumulated gradients') for o in (False, True)]])
def test_before_training(make, says):
    learn = make()
    before = weights(learn)
    with pytest.raises(ValueError) as e: fit(learn, 2)
    assert says in str(e.value) and '\n' not in str(e.value).split(':\n\t')[-1]
    assert_same(weights(learn), before)

def test_what_is_no_mistake():
    "fastai's calls, NumPy's integers, a hook on a frozen parameter"
    assert G().accum_bs == 32 and G(n_acc=64).accum_bs == G(np.int64(64)).accum_bs == 64
    learn = fit(on(Unsized(), G(np.int32(16), micro_batch_size=np.int64(8))), 1)
    assert learn.recorder.accum_bs == [16,16]
    learn = hooked()
    learn.model[0].weight.requires_grad_(False)
    assert len(losses(fit(learn, 1))) == 3

@pytest.mark.parametrize('module', ['vision','text','tabular'])
def test_the_only_name_that_is_replaced(module):
    theirs = vars(importlib.import_module(f'fastai.{module}.all'))
    assert [k for k in ours.__all__ if theirs.get(k, vars(ours)[k]) is not vars(ours)[k]] == ['GradientAccumulation']

def poisoned(value, struck, cb, n_epoch=2, lr=.1, **kwargs):
    n = itertools.count()
    def poison(self): self.learn.loss_grad = self.loss_grad*(value if next(n) in struck else 1)
    return fit(make_learner(8, cbs=[cb, Callback(before_backward=poison)], **kwargs), n_epoch, lr)

@pytest.mark.parametrize('value', [NAN, math.inf, -math.inf])
@pytest.mark.parametrize('make', [G, partial(GradientAccumulationSchedule, 32)])
def test_skip_nonfinite(value, make):
    "Two of six windows are struck, one of them twice; the others are as ever, and it is said once"
    cb = make(32, skip_nonfinite=True, remainder='step')
    with pytest.warns(UserWarning, match='NaN or infinity') as said: learn = poisoned(value, (4, 6, 19), cb)
    assert cb.n_skipped == 2 and cb.opt_steps == len(losses(learn)) == 4 and len(said) == 1
    steps = [o for i,o in enumerate(windows(96, 8, 32, 'step', 2)) if i not in (1, 4)]
    assert_same(weights(learn), reference(steps, 96, sgd)[0], ROUNDING)
    fit(learn, 1)
    assert cb.n_skipped == 0  # counted anew

def test_one_look_at_the_gradient_a_window(monkeypatch):
    "Large gradients are no infinities; without it, a step is as in fastai"
    looks,f,skip = [],torch.nn.utils.get_total_norm,partial(G, 32, skip_nonfinite=True)
    monkeypatch.setattr(torch.nn.utils, 'get_total_norm', lambda *args: looks.append(1) or f(*args))
    plain,looking = (fit(make_learner(8, cbs=cb)) for cb in (G(32), skip()))
    assert_same(weights(looking), weights(plain))
    large = poisoned(1e30, (2,), skip(), 1, 1e-30, m=model().float(), loss_func=MSELossFlat())
    assert len(looks) == 9+3 and large.gradient_accumulation.n_skipped == 0
    assert weights(poisoned(NAN, (4,), G(32))).isnan().any()

@pytest.mark.parametrize('says', [1, 5, 40])
@pytest.mark.parametrize('remainder', ['step','carry','drop'])
def test_a_loader_whose_length_lies(says, remainder):
    train = Unsized(88, says)
    train.bs = 8
    learn,steps = fit(on(train, G(32, remainder=remainder)), 2),windows(88, 8, 32, remainder, 2)
    assert learn.recorder.accum_bs == [len(o) for o,_ in steps]
    assert_same(weights(learn), reference(steps, 88, sgd)[0], ROUNDING)

@pytest.mark.parametrize('remainder', ['step','carry'])
def test_an_empty_loader(remainder):
    plain,learn = [fit(make_learner(8, n=5, drop_last=True, cbs=o), 2) for o in (None, G(32, remainder=remainder))]
    assert losses(learn) == losses(plain) == [] and repr(learn.recorder.values) == repr(plain.recorder.values)
    assert_same(weights(learn), weights(model()))

@pytest.mark.parametrize('order, bs, also, warns', [(65, 8, (), True), (45, 8, (), False), (65, 32, (), False),
                                                    (65, 8, ('after_batch',), False)])
def test_a_late_callback_that_may_prepare_batches(order, bs, also, warns):
    "Sees the first loader batch of each window"
    cb = Callback(**{o:noop for o in ('before_batch', *also)})
    cb.order = order
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        fit(make_learner(bs, cbs=[cb, G(32)]), 1)
    assert [str(o.message)[:46] for o in w if 'order' in str(o.message)] == ['before_batch of Callback is called once per wi']*warns

# The callback and its Learner

def test_a_callback_that_was_removed_says_so():
    "By a fit of another Learner that it was passed to; fastai leaves it in the list of the first"
    cb = G(32)
    a,b = make_learner(8, cbs=cb),make_learner(8)
    fit(b, 1, cbs=cb)
    with pytest.warns(UserWarning, match='GradientAccumulation was removed from its Learner, and does nothing'): fit(a, 1)

@pytest.mark.parametrize('again', [lambda learn, cb: fit(learn.add_cb(cb), 1), lambda learn, cb: fit(learn, 1, cbs=cb)])
def test_a_callback_that_is_added_twice(again):
    cb = G(32)
    with pytest.raises(ValueError, match='was added to its Learner twice'): again(make_learner(8, cbs=cb), cb)

@pytest.mark.parametrize('name', ['_do_one_batch','_backward','_do_grad_opt'])
def test_a_patch_of_the_learner_is_not_ignored(name, monkeypatch):
    f,calls = getattr(Learner, name),[]
    def patched(self): calls.append(f(self))
    monkeypatch.setattr(Learner, name, patched)
    with pytest.raises(ValueError, match=f'Learner has its own {name}'): fit(make_learner(8, cbs=G(32)), 1)
    fit(make_learner(32, cbs=G(32)), 1)
    assert len(calls) == (5 if name == '_do_one_batch' else 3)  # two in validation

def test_a_callback_that_is_switched_off():
    "By fastai's `run`, until the end of the fit; others go on"
    def run(off, *cbs):
        off.run,passes = False,[]
        learn = make_learner(8, m=nn.Sequential(model()), cbs=cbs)
        learn.model[0][0].register_forward_hook(lambda *_: passes.append(learn.training))
        fit(learn, 1)
        return sum(passes),len(losses(learn))
    cb,blocks = G(32),all_blocks()
    assert run(cb, cb, blocks) == (24, 12) and run(blocks, cb, blocks) == (12, 3)
    assert run(cb, cb, GradientCache(4)) == (2*24-12, 12) and run(cb, cb) == (12, 12)

class Own(Learner):
    def _do_grad_opt(self): super()._do_grad_opt()

def nan(self): self.learn.loss_grad = self.learn.loss_grad*NAN
def cancel(self): raise CancelStepException

@pytest.mark.parametrize('learner,event', [
    (Own, {}), (Learner, dict(before_backward=nan)), (Learner, dict(before_step=cancel))])
def test_windows_that_are_filled_are_not_said_to_be_none(learner, event, recwarn):
    "Nor are those that are left out steps"
    learn = learner(make_learner(32, drop_last=True).dls, model(), mse, opt_func=SGD, cbs=[Callback(**event)])
    fit(learn.add_cb(cb := G(32, skip_nonfinite=True)), 1)
    assert not (event and cb.opt_steps)
    assert not [o for o in recwarn if 'no optimizer step' in str(o.message)]

def test_layers_without_a_shape_yet():
    "They get it in the first pass"
    def run(cb=None):
        (m := model())[1] = nn.LazyBatchNorm1d(dtype=torch.float64)
        return weights(fit(make_learner(32, m=m, cbs=cb), 1))
    assert_same(run(G(32)), run())
