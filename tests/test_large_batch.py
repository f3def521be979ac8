"The accumulated batch against the large one: fits, loaders, layers that normalize or draw, and fastai's applications"
import pytest
import torch.utils.data as tud
from fastai.callback.mixup import MixUp
from fastai.callback.training import BnFreeze
from fastai.text.all import (AWD_LSTM, TextBlock, awd_lstm_clas_config, awd_lstm_lm_config, language_model_learner,
                             text_classifier_learner)
from fastai.vision.all import (CategoryBlock, ImageBlock, PILImage, RandomErasing, Resize, TensorImage, aug_transforms,
                               vision_learner)
from hypothesis import given, strategies as st
from sklearn.datasets import load_digits

from common import *

FLOAT32 = 1e-5  # the Recorder averages in float32

opt_funcs = dict(sgd=partial(SGD, mom=0.9), adam=Adam, radam=RAdam, adamw=partial(OptimWrapper, opt=torch.optim.AdamW),
                 torch_sgd=partial(OptimWrapper, opt=torch.optim.SGD, momentum=0.9))
torch_opts = dict(sgd=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
                  adamw=lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.01))

def both(make):
    "`make` a fit with the large batch, and with windows of four loader batches"
    return make(32),make(8, GradientAccumulation(32))

def apart(a, b): return (weights(a)-weights(b)).abs().max()

class Positions(Callback):
    "Where each epoch begins and ends"
    order = Recorder.order+10
    def before_fit(self): self.seen = []
    def before_train(self): self.seen.append(self.learn.pct_train)
    def after_epoch(self): self.seen.append(self.learn.pct_train)

def assert_same_fit(small, big, tol=ROUNDING, lr_tol=0.):
    "All that a fit leaves behind"
    assert_same(weights(small), weights(big), tol)
    assert_same(small.recorder.lrs, big.recorder.lrs, lr_tol)
    assert_same(small.recorder.iters, big.recorder.iters)
    assert_same(losses(small), losses(big), FLOAT32)
    assert_same(sum(floats(small.recorder.values), []), sum(floats(big.recorder.values), []), FLOAT32)
    for k,v in getattr(big.recorder, 'hps', {}).items():
        assert_same(*(torch.tensor(np.array(o)) for o in (small.recorder.hps[k], v)), lr_tol)
    if hasattr(big, 'positions'): assert_same(small.positions.seen, big.positions.seen, lr_tol)

# fastai's own fits, nothing switched off

methods = 'fit','fit_one_cycle','fit_flat_cos','fit_sgdr','fine_tune','own'
start_at_0 = 'fine_tune','fit_flat_cos'  # fastai's ignore `start_epoch`

def run(bs, *cbs, n=100, drop_last=True, method='fit_one_cycle', n_epoch=2, opt='sgd', start_epoch=0, **kwargs):
    learn = make_learner(bs, n=n, drop_last=drop_last, opt_func=opt_funcs[opt], cbs=[*cbs], m=nn.Sequential(*model()),
                         splitter=lambda m: [params(m[0]), params(m[2])], **kwargs)
    args = (2, n_epoch, .01) if method == 'fit_sgdr' else (n_epoch, .01)
    more = {} if method in start_at_0 else dict(start_epoch=start_epoch)
    if method == 'own': method,more['cbs'] = 'fit',ParamScheduler({'lr':lambda pos: .02 if pos < .5 else .002})
    with quiet(learn): getattr(learn, method)(*args, **more)
    return learn

@draws
@given(n=st.integers(2, 90), bs=st.integers(1, 9), k=st.integers(1, 5), drop_last=st.booleans(),
       method=st.sampled_from(methods), opt=st.sampled_from(sorted(opt_funcs)), n_epoch=st.integers(1, 3),
       start=st.integers(0, 1), wd=st.sampled_from([None, .01]))
def test_any_fit(n, bs, k, start, **kwargs):
    "Learning rates and momenta bit for bit, windows of one wholly; what is dropped follows the loader's `drop_last`"
    if kwargs['drop_last'] and n < k*bs: return  # no batch at all: an error
    kwargs.update(n=n, start_epoch=min(start, kwargs['n_epoch']-1))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # PyTorch's optimizers know no `mom` under fastai's scheduler of it
        small,big = run(bs, GradientAccumulation(k*bs), **kwargs),run(k*bs, **kwargs)
    assert_same_fit(small, big, ROUNDING*(k > 1))  # a window of one is no accumulation
    assert apart(big, model()) > 1e-4
    assert small.gradient_accumulation.opt_steps == len(losses(big)) == len(small.recorder.accum_bs) > 0

@draws
@given(n=st.integers(1, 60), bs=st.integers(1, 9), k=st.integers(1, 6), n_epoch=st.integers(1, 3),
       drop_last=st.booleans(), remainder=st.sampled_from(['step','carry','drop']), log=st.booleans(),
       opt=st.sampled_from(sorted(torch_opts)), cosine=st.booleans())
def test_any_shape(n, bs, k, n_epoch, drop_last, remainder, log, opt, cosine):
    "Against a loop in plain PyTorch: samples, sizes, remainder, epochs, optimizer, learning rate as they come"
    if drop_last and n < bs: return
    lr = SchedCos(0.02, 0.001) if cosine else lambda pct: 0.01  # small enough that rounding does not grow
    steps = windows(n, bs, k*bs, remainder, n_epoch, drop_last)
    if not steps and remainder == 'drop': return  # an error: see test_checks
    expected,expected_losses = reference(steps, n, torch_opts[opt], lr)
    learn = make_learner(bs, n=n, drop_last=drop_last, opt_func=opt_funcs[opt],
                         cbs=GradientAccumulation(k*bs, remainder=remainder, log_accum_batch=log))
    fit(learn, n_epoch, cbs=ParamScheduler({'lr':lr}))
    assert_same(weights(learn), expected, ROUNDING)
    assert learn.gradient_accumulation.opt_steps == len(steps) > 0
    assert all((g == 0).all() for g in grads(learn))
    if not log: return
    assert learn.recorder.accum_bs == [len(idxs) for idxs,_ in steps]
    assert_same(learn.recorder.lrs, [lr(pct) for _,pct in steps], ROUNDING)
    assert_same(losses(learn), smoothed(expected_losses), FLOAT32)

def test_a_compiled_model():
    big = make_learner(32)
    small = make_learner(8, m=torch.compile(model(), backend='aot_eager'), cbs=GradientAccumulation(32))
    assert_same(weights(fit(small)), weights(fit(big)), ROUNDING)
    assert_moved(big)

# Incomplete windows

@pytest.mark.parametrize('remainder', ['step','carry','drop'])
def test_an_epoch_that_ends_early(remainder):
    "After two windows of three; the second is none to the Recorder, which comes after the callback that ends it"
    def short(bs, *cbs): return fit(make_learner(bs, cbs=[*cbs, ShortEpochCallback(pct=.3, short_valid=False)]), 2)
    big,small = short(32),short(8, GradientAccumulation(32, remainder=remainder))
    assert small.gradient_accumulation.opt_steps == 4 and small.recorder.accum_bs == [32]*2
    assert_same_fit(small, big)

@pytest.mark.parametrize('make', [GradientAccumulation, partial(GradientAccumulationSchedule, 32)])
def test_what_is_dropped_is_not_computed(make):
    "100 samples, windows of 32: 12 loader batches, and the rest of the epoch is not even loaded; bars count windows"
    loaded,ran,bars = [],[],[]
    class Probe(Callback):
        order,run_valid = 61,False  # after the progress bar
        def after_pred(self): ran.append(len(self.pred))
        def after_train(self): bars.append((self.learn.progress.pbar.total, self.n_iter, self.iter+1, self.train_iter))
    learn = make_learner(8, n=100, cbs=[make(32, remainder='drop'), Probe()])
    learn.dls.train.after_batch = lambda b: loaded.append(find_bs(b)) or b
    with learn.no_logging(): learn.fit(2, .1)
    assert loaded == ran == [8]*24 and bars == [(3, 3, 3, 3), (3, 3, 3, 6)]

# What callbacks see and change

@pytest.mark.parametrize('order', [0, 9])
def test_a_callback_that_changes_the_batch(order):
    "Samples are those of the loader, whether it is doubled before or after the accumulation sees it"
    class TwoViews(Callback):
        run_valid = False
        def before_batch(self): self.learn.xb,self.learn.yb = [(torch.cat([o, o*.9]),) for o in (self.x, self.y)]
    TwoViews.order = order
    big,small = both(lambda bs, *cbs: fit(make_learner(bs, cbs=[TwoViews(), *cbs]), 2))
    assert small.recorder.accum_bs == [32]*6
    assert_same_fit(small, big)

def clip(self): nn.utils.clip_grad_norm_(self.model.parameters(), .1)

class Penalty(Callback):
    "Adds to the loss, as fastai's RNNRegularizer does"
    run_valid = False
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad+self.learn.pred.pow(2).mean()

def summed(pred, *targs): return sum(((pred-o)**2).sum() for o in targs).float()
summed.reduction = 'sum'

@pytest.mark.parametrize('cb, loss_func, is_equal', [(partial(Callback, before_step=clip), mse, True), (Penalty, mse, True),
                                                     (Penalty, summed, False)])
def test_what_changes_loss_or_gradient(cb, loss_func, is_equal):
    "A mean that is added to a sum is no mean over the window"
    lr = .1 if loss_func is mse else .01
    def make(bs, *cbs): return fit(make_learner(bs, loss_func=loss_func, cbs=[*cbs]), 3, lr)
    big,small = both(lambda bs, *cbs: make(bs, cb(), *cbs))
    assert apart(big, make(32)) > 1e-3
    assert apart(small, big) < ROUNDING if is_equal else apart(small, big) > 1e-4

class Fault(Fault): run_valid = False
EXCEPTIONS = CancelStepException,CancelBackwardException,*CANCELS

@pytest.mark.thin(7)
@pytest.mark.parametrize('order', [-5, 7, 20, 99])
@pytest.mark.parametrize('event', EVENTS[3:10] + ['after_batch'])
@pytest.mark.parametrize('exc', EXCEPTIONS)
def test_a_fault_is_logged_as_in_the_large_batch(exc, event, order):
    "Anywhere in a window of one loader batch; in one of four at the events that come once a window"
    def struck(bs, nth, *cbs):
        learn = make_learner(bs, cbs=[Fault(exc, event, nth, order), *cbs])
        try: return fit(learn, 2)
        except EXCEPTIONS: return None
    for nth in range(1, 6):
        big = struck(32, nth)
        for bs in (32, 8) if event in ('before_step','after_step','after_batch') else (32,):
            small = struck(bs, nth, GradientAccumulation(32))
            assert (small is None) == (big is None)
            if big is None: continue
            assert [len(o) for o in small.recorder.values] == [len(o) for o in big.recorder.values]
            assert_same_fit(small, big, ROUNDING if bs == 8 else 0.)

# Losses that sum

with_attribute = partial(lambda *args, factor: factor*summed(*args), factor=.5)
with_attribute.reduction = 'sum'
class Summed:
    reduction = 'sum'
    def __call__(self, *args): return summed(*args)

@pytest.mark.parametrize('loss_func', [summed, with_attribute, partial(Summed()),
                                       partial(lambda *args, reduction: summed(*args), reduction='sum')])
def test_sums_by_their_reduction(loss_func):
    "Over two targets"
    x,y = data(96)
    def make(bs, *cbs):
        dls = DataLoaders(*[DataLoader([*zip(x, y, y+1)], bs=bs)]*2)
        dls.n_inp = 1
        return fit(Learner(dls, model(), loss_func, opt_func=SGD, cbs=[*cbs]), 2, 1e-3)
    big,small = both(make)
    assert_moved(big)
    assert_same(weights(small), weights(big), ROUNDING)
    assert_same(tensor(losses(small))/tensor(losses(big)), torch.ones(6), FLOAT32)

# Batches of any rows, and loaders of any kind

X,Y = data(50)
SAMPLES = [*zip(X, Y)]

def fitted(train, *cbs):
    learn = Learner(DataLoaders(train, DataLoader(SAMPLES[:16], bs=8)), model(), mse, opt_func=partial(SGD, mom=.9),
                    cbs=[*cbs, Positions()])
    fit(learn, method='fit_one_cycle')
    assert_moved(learn)
    return learn

same_fit = partial(assert_same_fit, lr_tol=1e-15)  # windows add up the same positions

def stack(b): return [torch.stack(o) for o in zip(*b)]
def views(b): return [torch.cat([o, o*.9]) for o in stack(b)]
def repeats(b): return [o.repeat_interleave(3, 0) for o in stack(b)]
def nodes(b): return [torch.cat([o[i].repeat(1+j%4, 1) for j,o in enumerate(b)]) for i in (0, 1)]
def without_broken(b): return stack([o for o in b if o[0][0] > -.5] or b[:1])
def half(b): return stack(b[::2])

def fastai_loader(bs, f=stack): return DataLoader(SAMPLES, bs=bs, create_batch=lambda b: tuple(f(b)))
def torch_loader(bs, f=stack): return tud.DataLoader(SAMPLES, batch_size=bs, collate_fn=lambda b: tuple(f(b)))
both_loaders,kinds = (fastai_loader, torch_loader),(views, repeats, nodes, without_broken)

class Budget:
    "A batch sampler: 2 to 9 samples a batch"
    def __init__(self):
        r,self.all,i = random.Random(0),[],0
        while i < 50: self.all.append([*range(i, i := min(50, i+r.randint(2, 9)))])
    def __iter__(self): return iter(self.all)
    def __len__(self): return len(self.all)
class Stream(tud.IterableDataset):
    "50 samples, of which `n` are announced"
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __iter__(self): return iter(SAMPLES)
class Own:
    "A loader of one's own, which may state a batch size"
    def __init__(self, sizes, n, **kwargs): self.sizes,self.n = [*sizes, 50-sum(sizes)],n; vars(self).update(kwargs)
    def __len__(self): return self.n
    def __iter__(self): return zip(X.split(self.sizes)[:-1], Y.split(self.sizes))

def sampler(): return tud.DataLoader(SAMPLES, batch_sampler=Budget())
def prebatched():
    return DataLoader(Budget().all, bs=None, create_item=lambda i: (X[Budget().all[i]], Y[Budget().all[i]]))
def skips(i): return SAMPLES[i] if i%7 != 3 else stop(SkipItemException())
def skipped(bs=8): return DataLoader(SAMPLES, bs=bs, create_item=skips)
def stream(n, bs=8, **kwargs): return tud.DataLoader(Stream(n), batch_size=bs, **kwargs)
odd = [sampler, prebatched, skipped, *[partial(stream, n) for n in (50, 40, 64)], partial(stream, 50, drop_last=True),
       *[partial(Own, [8,3,8,8,1,8], n, **kwargs) for n,kwargs in ((6, {}), (6, dict(bs=8)), (4, dict(batch_size=8)))]]
whole = [ActivationCheckpointing, partial(GradientCache, 4),
         *[partial(GradientAccumulation, micro_batch_size=o) for o in (3, 'auto')]]

@pytest.mark.thin(7)
@pytest.mark.filterwarnings('ignore:Length of IterableDataset')
@pytest.mark.parametrize('make', whole)
@pytest.mark.parametrize('loader', [*[partial(o, 8, f) for o in both_loaders for f in (*kinds, half)], *odd])
def test_a_window_of_one_batch_of_any_kind(loader, make): same_fit(fitted(loader(), make()), fitted(loader()))

@pytest.mark.thin(5)
@pytest.mark.filterwarnings('ignore:Length of IterableDataset')
@pytest.mark.parametrize('micro', [None, 3, 4])
@pytest.mark.parametrize('loader', [
    skipped, *[partial(o, f=f) for o in both_loaders for f in kinds], *[partial(stream, o) for o in (50, 64, 40)],
    lambda bs: Own(*([4,3,4,4,2], 5) if bs == 4 else ([15,2], 2), bs=bs)])
def test_windows_of_batches_of_any_kind(loader, micro):
    "Samples are what the loader counts; also at the end of an epoch of another length than was announced"
    same_fit(fitted(loader(4), GradientAccumulation(16, micro_batch_size=micro)), fitted(loader(16)))

def test_windows_of_batches_of_any_size():
    "The samples of `accum_bs` or more, as the rows tell; positions go by batches"
    learn = fitted(sampler(), GradientAccumulation(18, micro_batch_size=9))
    sizes = [0]
    for o in Budget().all: sizes = [*sizes, len(o)] if sizes[-1] >= 18 else [*sizes[:-1], sizes[-1]+len(o)]
    assert learn.recorder.accum_bs == sizes*3
    assert_same(learn.positions.seen, [0, 1/3, 1/3, 2/3, 2/3, 1], 1e-15)

class SetBs(Callback):
    "A size that changes at an epoch"
    order = -100
    def __init__(self, *sizes): self.sizes = sizes
    def before_epoch(self): self.learn.dls.train.bs = self.sizes[self.epoch]
class SwapLoaders(SetBs):
    def before_epoch(self): self.learn.dls = DataLoaders(torch_loader(self.sizes[self.epoch]), self.learn.dls.valid)
class SwapDl(SetBs):
    before_epoch = noop
    def before_train(self): self.learn.dl = torch_loader(self.sizes[self.epoch])

@pytest.mark.thin(7)
@pytest.mark.parametrize('make, sizes, like', [
    *[(make, o, o) for make in whole for o in ((16, 16, 8), (4, 8, 12))],
    *[(partial(GradientAccumulation, 16, micro_batch_size=micro), o, (16, 16, 16))
      for micro in (None, 2) for o in ((4, 8, 16), (16, 8, 4), (4, 4, 2))]])
@pytest.mark.parametrize('change', [SetBs, SwapLoaders, SwapDl])
def test_a_size_that_changes(change, make, sizes, like):
    same_fit(*(fitted(fastai_loader(o[0]), change(*o), *cbs) for o,*cbs in ((sizes, make()), (like,))))

def test_a_size_that_no_longer_fits():
    with pytest.raises(ValueError, match="accum_bs=16 .* not a multiple of the DataLoader's batch of 12: use 12 or 24"):
        fitted(fastai_loader(8), SetBs(8, 12, 12), GradientAccumulation(16))

# Layers, noise and augmentation

@pytest.mark.parametrize('train_bn, unfrozen, head, is_equal', [
    (False, False, nn.LayerNorm, True), (True, False, nn.LayerNorm, False), (False, True, nn.LayerNorm, False),
    (False, False, nn.BatchNorm1d, False)])
def test_bn_freeze(train_bn, unfrozen, head, is_equal):
    "It acts on layers without gradient only: a frozen body with `train_bn=False` is exact"
    def make(bs, *cbs):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)),
                          nn.Sequential(head(8), nn.Tanh(), nn.Linear(8, 1))).double()
        learn = make_learner(bs, m=m, cbs=[BnFreeze(), *cbs], train_bn=train_bn,
                             splitter=lambda m: [params(m[0]), params(m[1])])
        learn.freeze_to(0 if unfrozen else -1)
        return fit(learn, 2)
    big,small = both(make)
    assert apart(small, big) < ROUNDING if is_equal else apart(small, big) > 1e-4

def gradients_of(make, n):
    "The gradients of the first step of 32 samples, for `n` seeds, in batches of 8 and of 32"
    class First(Callback):
        order = 20
        def before_step(self):
            res.append(torch.cat([p.grad.flatten().clone() for p in self.model.parameters()]))
            self.opt.zero_grad()
            raise CancelFitException
    for bs,cbs in (8, [GradientAccumulation(32)]), (32, []):
        learn,res = make(bs, [First(), *cbs]),[]
        for seed in range(n):  # each fit ends before its step, so all begin with the same weights
            torch.manual_seed(seed); random.seed(seed)
            fit(learn, 1)
        yield torch.stack(res)

def assert_same_distribution(a, b):
    "Means within 5 of their standard errors, and variances within a fifth; while single draws differ"
    va,vb = a.var(0),b.var(0)
    assert ((a.mean(0)-b.mean(0)).abs() <= 5*((va+vb)/len(a)).sqrt()+1e-12).all()
    assert .8 < va.sum()/vb.sum() < 1.25 and (a[0]-b[0]).abs().max() > 1e-3

def test_dropout():
    "The draws are others, their mean and their spread are not"
    torch.manual_seed(0)
    m = nn.Sequential(nn.Dropout(.2), nn.Linear(5, 8), nn.Dropout(.5), nn.Tanh(), nn.Linear(8, 1)).double()
    assert_same_distribution(*gradients_of(lambda bs, cbs: make_learner(bs, n=32, m=deepcopy(m), cbs=cbs), 150))

def images_learner(tfms, bs, cbs):
    "Random transforms of a batch of images, as fastai's loaders make them"
    torch.manual_seed(0)
    ds,tfms = list(zip(torch.rand(32, 3, 6, 6), torch.randn(32, 1))),Pipeline(tfms, split_idx=0)
    train = DataLoader(ds, bs=bs, after_batch=lambda b: (tfms(TensorImage(b[0])), b[1]))
    m = nn.Sequential(nn.Flatten(), nn.Linear(108, 1))
    return Learner(DataLoaders(train, DataLoader(ds[:8], bs=8)), m, MSELossFlat(), opt_func=SGD, cbs=cbs)

@pytest.mark.long
def test_augmentation():
    "`aug_transforms` draws for each sample; `RandomErasing` once a batch, so the mean of four varies less"
    assert_same_distribution(*gradients_of(partial(images_learner, aug_transforms(max_warp=0.)), 200))
    small,big = gradients_of(partial(images_learner, [RandomErasing(p=1.)]), 200)
    assert .1 < small.var(0).sum()/big.var(0).sum() < .5

@pytest.mark.long
def test_mixup_mixes_within_the_loader_batch():
    "So one sample in 8, not one in 32, is its own partner; with `GradientCache` it mixes the whole batch"
    def own(bs, *cbs):
        shares = []
        class Count(Callback):
            order,run_valid = MixUp.order+1,False
            def before_batch(self): shares.append(float((self.mix_up.yb1[0] == self.yb[0]).float().mean()))
        torch.manual_seed(0)
        fit(make_learner(bs, n=3200, m=model().float(), loss_func=MSELossFlat(), cbs=[MixUp(), Count(), *cbs]), 2)
        return np.mean(shares)
    assert abs(own(8, GradientAccumulation(32))-1/8) < .02
    for share in own(32), own(32, GradientCache(8)): assert abs(share-1/32) < .01

# Applications as they come: augmentation, dropout, BatchNorm, shuffled, `drop_last`

def as_it_comes(make, bs, fit_it, *cbs, tol=None):
    "With the large batch and with others: steps, rates and momenta are the same, and weights if `tol`; and it learns"
    def trained(bs, *cbs):
        set_seed(0)  # Python's generator, too: fastai's loaders and augmentation draw from it
        learn = make(bs, [*cbs])
        before = weights(learn)
        with quiet(learn): fit_it(learn)
        assert (weights(learn)-before).abs().max() > 1e-3 and (tol or losses(learn)[-1] < losses(learn)[0])
        return learn
    big = trained(bs)
    for small in [trained(bs, o) for o in cbs] or [trained(bs//4, GradientAccumulation(bs))]:
        for o in 'lr','mom': assert_same(small.recorder.hps[o], big.recorder.hps[o])
        assert len(losses(small)) == len(losses(big)) > 3
        assert [len(o) for o in small.recorder.values] == [len(o) for o in big.recorder.values]
        assert apart(small, big) <= tol if tol else apart(small, big) > 1e-4

def seeded(make, *args, **kwargs):
    torch.manual_seed(0)
    return make(*args, metrics=accuracy, **kwargs)

plain_head = dict(lin_ftrs=[], first_bn=False, ps=0., opt_func=SGD)  # neither BatchNorm nor dropout

@pytest.mark.parametrize('augments, lr, kwargs, cbs, tol', [
    (True, .01, {}, (), None), (False, .1, plain_head, (), 5e-6),
    (True, .1, plain_head, [GradientAccumulation(micro_batch_size=7), GradientCache(8)], 5e-6)])  # float32
def test_vision_learner(augments, lr, kwargs, cbs, tol):
    "150 samples, of which the loader drops 22; equal where nothing is drawn, or where whole batches are split"
    digits = load_digits()
    images = [PILImage.create(np.stack([o*15]*3, -1).astype(np.uint8)) for o in digits.images[:200]]
    block = DataBlock((ImageBlock, CategoryBlock), get_x=lambda i: images[i], get_y=lambda i: digits.target[i]//5,
                      item_tfms=Resize(32), batch_tfms=aug_transforms(do_flip=False)[:9*augments],
                      splitter=IndexSplitter(range(150, 200)))
    def make(bs, others):
        dls = block.dataloaders(list(range(200)), bs=bs, num_workers=0)
        return seeded(vision_learner, dls, 'convnext_atto', pretrained=False, depths=(1,1,1,1), dims=(8,8,16,16),
                      cbs=[MixUp()]*len(cbs[:1])+others, **kwargs)
    as_it_comes(make, 32, lambda learn: learn.fine_tune(2, lr), *cbs, tol=tol)

lm_config = merge(awd_lstm_lm_config, dict(emb_sz=8, n_hid=12, n_layers=2))
clas_config = {k:v for k,v in lm_config.items() if k in awd_lstm_clas_config}

def text_dls(bs, is_lm=False):
    words = 'a learner has data a model and a loss each batch goes through the model once its loss is a mean'.split()
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(text=[' '.join(rng.choice(words, rng.integers(5, 30))) for _ in range(130)]))
    df = df.assign(label=np.where(df.text.str.contains('loss'), 'yes', 'no'))
    blocks = TextBlock.from_df('text', is_lm=is_lm, seq_len=8, min_freq=1, n_workers=0),CategoryBlock
    block = DataBlock(blocks[:2-is_lm], get_x=ColReader('text'), get_y=None if is_lm else ColReader('label'),
                      splitter=RandomSplitter(.2, seed=0))
    return block.dataloaders(df, bs=bs, num_workers=0)

@pytest.mark.parametrize('learner, config, n_epoch', [(language_model_learner, lm_config, 1),
                                                      (text_classifier_learner, clas_config, 6)])
def test_text_learners(learner, config, n_epoch):
    "The recurrent state of a language model is carried on, so a large batch reads other text"
    def make(bs, cbs):
        dls = text_dls(bs, config is lm_config)
        return seeded(learner, dls, AWD_LSTM, config=config, pretrained=False, drop_mult=.3, cbs=cbs)
    as_it_comes(make, 16, lambda learn: learn.fit_one_cycle(n_epoch, 1e-2))

def test_texts_sorted_by_length():
    "The order of the loader depends on `bs`; a batch that is split keeps it"
    def order(bs):
        set_seed(0)
        return [tuple(o[o != 1].tolist()) for b in text_dls(bs).train for o in b[0]]
    assert order(32) != order(8)[:len(order(32))]
    def make(bs, cbs):
        m = nn.Sequential(nn.EmbeddingBag(50, 8), nn.Linear(8, 2))
        return Learner(text_dls(bs), m, CrossEntropyLossFlat(), opt_func=SGD, cbs=cbs)
    as_it_comes(make, 32, lambda learn: learn.fit_one_cycle(3, 1.), GradientAccumulation(micro_batch_size=7), tol=5e-6)
