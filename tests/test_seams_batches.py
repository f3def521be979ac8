"Seams: what is not guessed (the layout of a batch), not overruled (a Learner's own methods), and put back (a piece that did not fit)"
import pytest
from fastai.callback.mixup import MixUp, CutMix

from common import *

split = dict(
    pieces=lambda n: GradientAccumulation(micro_batch_size=n),
    cache=lambda n: GradientCache(n))

# Layouts of batches

class Views(nn.Module):
    "Sums over all the views that it gets, however they come; inputs after the first are divided"
    def __init__(self): super().__init__(); torch.manual_seed(0); self.lin = nn.Linear(5, 1).double()
    def one(self, o):
        if isinstance(o, Tensor): return self.lin(o).tanh()
        return sum(self.one(v)/(i+1) for i,v in enumerate(o.values() if isinstance(o, dict) else o))
    def forward(self, *xs): return sum(self.one(o)/(i+1) for i,o in enumerate(xs))

def views(k, i, x): return [x[i].roll(j)/(1+j) for j in range(k)]
layouts = dict(
    list=lambda k, i, x: (views(k, i, x),),
    tuple=lambda k, i, x: (tuple(views(k, i, x)),),
    inputs=lambda k, i, x: tuple(views(k, i, x)),
    dict=lambda k, i, x: ({str(j):o for j,o in enumerate(views(k, i, x))},),
    nested=lambda k, i, x: ({'views':views(k, i, x), 'one':x[i]},),
    lists=lambda k, i, x: ([views(k, i, x), views(k, i, -x)],),
    list_and_tensor=lambda k, i, x: (views(k, i, x), x[i]))

def layout_learner(layout, k, bs, n, cbs=None):
    x,y = data(n)
    samples = [(*layouts[layout](k, i, x), y[i]) for i in range(n)]
    dls = DataLoaders(DataLoader(samples, bs=bs), DataLoader(samples, bs=bs))
    dls.n_inp = len(samples[0])-1
    return Learner(dls, Views(), mse, opt_func=SGD, cbs=cbs)

def valid(learn):
    with quiet(learn): return learn.validate()

@pytest.mark.parametrize('way', split)
@pytest.mark.parametrize('layout', layouts)
def test_as_many_views_as_samples(layout, way):
    "In the last batch: the views stay, and each is cut along its samples. In training, validation and prediction"
    for k,bs,micro in (2, 8, 1), (3, 8, 2), (4, 6, 3):
        n = 2*bs+k
        big,small = (layout_learner(layout, k, bs, n, cbs) for cbs in ([], [split[way](micro)]))
        assert_same(valid(small), valid(big), 1e-6)
        assert_same(weights(fit(small, 2)), weights(fit(big, 2)), ROUNDING)
        assert (weights(big)-weights(Views())).abs().max() > 1e-3
        assert_same(valid(small), valid(big), 1e-6)
        with quiet(small), quiet(big): assert_same(small.get_preds()[0], big.get_preds()[0], ROUNDING)

@pytest.mark.parametrize('way', split)
@pytest.mark.parametrize('layout', layouts)
def test_as_many_views_as_samples_in_every_batch(layout, way):
    "Where no batch tells views from samples: exact, or a ValueError that says so, and never another training"
    for k,micro in (2, 1), (4, 3), (3, 1):
        big,small = (layout_learner(layout, k, k, 4*k, cbs) for cbs in ([], [split[way](micro)]))
        try:
            assert_same(valid(small), valid(big), 1e-6)
            assert_same(weights(fit(small, 2)), weights(fit(big, 2)), ROUNDING)
        except ValueError as e: assert 'samples' in str(e) and str(k) in str(e)

# The samples are not the first dimension: row 3

class Transformer(nn.Module):
    "`nn.TransformerEncoder` as it is by default: the tokens come first"
    def __init__(self, batch_first=False):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0., batch_first=batch_first)
        self.batch_first,self.emb,self.encoder,self.head = batch_first,nn.Linear(1, 8),nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),nn.Linear(8, 1)
        self.double()
    def forward(self, x):
        x = self.emb(x[...,None])
        return self.head(self.encoder(x).mean(1) if self.batch_first else self.encoder(x.transpose(0, 1)).mean(0))

def text_learner(tokens, bs=8, cbs=None, n=32, **kwargs):
    x = torch.randn(n, tokens, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    dls = DataLoaders(*[DataLoader(list(zip(x, data(n)[1])), bs=bs) for _ in range(2)])
    return Learner(dls, Transformer(**kwargs), mse, opt_func=SGD, cbs=cbs)

def encoder(m): return m.encoder

@pytest.mark.parametrize('how', ['fit', 'validate', 'get_preds'])
@pytest.mark.parametrize('tokens', [3, 5, 16, 24, 64])
def test_a_part_whose_first_dimension_are_the_tokens(tokens, how):
    "Also twice, three times and eight times as many tokens as samples: an error with the shape and a remedy"
    learn = text_learner(tokens, cbs=GradientCache(4, part=encoder))
    with pytest.raises(ValueError, match=rf'\({tokens}, 8, 8\).*8 samples.*first dimension') as e, quiet(learn): getattr(learn, how)(*([1] if how == 'fit' else []))
    assert 'forward' not in vars(learn.model.encoder) and '_with_events' not in vars(learn)
    assert 'rows' in str(e.value) or 'batch_first' in str(e.value) or 'must be the samples' in str(e.value)

@pytest.mark.parametrize('tokens', [3, 5, 16])
@pytest.mark.parametrize('micro', ['auto', 8, 9])
def test_where_the_whole_batch_fits_nothing_is_cut(tokens, micro):
    big,small = text_learner(tokens),text_learner(tokens, cbs=GradientCache(micro, part=encoder))
    try: assert_same(weights(fit(small, 2)), weights(fit(big, 2)), ROUNDING)
    except ValueError as e: assert f'({tokens}, 8, 8)' in str(e)

@pytest.mark.parametrize('tokens', [3, 8, 16])
def test_a_part_whose_first_dimension_are_the_samples(tokens):
    "The check above can pass, and one part of a whole model can have the tokens first"
    big,small,whole = (fit(text_learner(tokens, cbs=cbs, batch_first=b), 2) for cbs,b in
                       (([], True), ([GradientCache(3, part=encoder)], True), ([GradientCache(3)], False)))
    assert_same(weights(small), weights(big), ROUNDING)
    assert_same(weights(whole), weights(fit(text_learner(tokens), 2)), ROUNDING)

# Views in one tensor: `rows`

class TwoViews(nn.Module):
    "Two views of each sample in one tensor, which `body` sees"
    def __init__(self): super().__init__(); torch.manual_seed(0); self.body,self.head = nn.Sequential(nn.Linear(5, 8), nn.Tanh()).double(),nn.Linear(8, 1).double()
    def forward(self, x):
        a,b = self.body(torch.cat([x, x.flip(1)])).chunk(2)
        return self.head(a*b)

def body(m): return m.body

@pytest.mark.parametrize('bs, micro', [(32, 8), (32, 64), (7, 3)])
def test_rows_of_a_part(bs, micro):
    "ADAPT: `rows` names the rows that `part` sees for each sample. With it, exact in training and validation; without it, an error that names it"
    big,small = make_learner(bs, m=TwoViews()),make_learner(bs, m=TwoViews(), cbs=GradientCache(micro, part=body, rows=2))
    assert_same(weights(fit(small)), weights(fit(big)), ROUNDING)
    assert (weights(big)-weights(TwoViews())).abs().max() > 1e-3
    assert_same(valid(small), valid(big), 1e-7)
    assert_same(floats(small.recorder.values), floats(big.recorder.values), 1e-6)
    if micro < bs:
        with pytest.raises(ValueError, match=rf'\({2*bs}, 5\).*{bs} samples.*rows'): fit(make_learner(bs, m=TwoViews(), cbs=GradientCache(micro, part=body)))

@pytest.mark.parametrize('rows', [3, 4])
def test_other_rows_than_it_says(rows):
    with pytest.raises(ValueError, match=r'\(64, 5\)'): fit(make_learner(32, m=TwoViews(), cbs=GradientCache(8, part=body, rows=rows)))
    for wrong in 0,-1,1.5,'2',True:
        with pytest.raises((TypeError, ValueError), match='rows'): GradientCache(8, rows=wrong)

# A Learner's own methods: row 2

class SAM(Learner):
    "Sharpness-aware minimization: two passes a step"
    def _do_one_batch(self):
        if not self.training: return super()._do_one_batch()
        super_step,self._step = self._step,noop
        ps = list(self.model.parameters())
        self.pred = self.model(*self.xb)
        self.loss_grad = self.loss_func(self.pred, *self.yb)
        grads = torch.autograd.grad(self.loss_grad, ps)
        with torch.no_grad(): [p.add_(.05*g) for p,g in zip(ps, grads)]
        del self._step
        try: super()._do_one_batch()
        finally:
            with torch.no_grad(): [p.sub_(.05*g) for p,g in zip(ps, grads)]

class RDrop(Learner):
    def _backward(self): (self.loss_grad+.3*self.model(*self.xb).square().mean()).backward()
class TwoSteps(Learner):
    def _do_grad_opt(self): super()._do_grad_opt(); [p.data.mul_(.9) for p in self.model.parameters()]

def one_block(m): return m[0]
overruling = dict(
    pieces=lambda: [GradientAccumulation(micro_batch_size=8)],
    auto=lambda: [GradientAccumulation(micro_batch_size='auto')],
    schedule=lambda: [GradientAccumulationSchedule(32, 64, micro_batch_size=8)],
    cache=lambda: [GradientCache(8)],
    auto_cache=lambda: [GradientCache('auto')],
    checkpointing=lambda: [all_blocks(blocks=lambda m: [m[0]])])

def learner_of(cls, cbs=None, own=None):
    learn = make_learner(32)
    learn = cls(learn.dls, model(), mse, opt_func=SGD, cbs=cbs)
    if own: setattr(learn, own, partial(getattr(cls, own), learn))
    return learn

@pytest.mark.parametrize('way', overruling)
def test_a_learner_with_a_loop_of_its_own(way):
    "Of its class, or its own: an error that names it and leaves everything as it was"
    for cls,name,own in (SAM, '_do_one_batch', None), (RDrop, '_backward', None), (TwoSteps, '_do_grad_opt', None), *[(Learner, o, o) for o in ('_do_one_batch', '_backward', '_do_grad_opt')]:
        learn = learner_of(cls, overruling[way](), own)
        with pytest.raises(ValueError, match=rf'{name}\b'): fit(learn, 1)
        assert_same(weights(learn), weights(model()))
        assert '_with_events' not in vars(learn) and 'forward' not in vars(learn.model)
        plain = learner_of(cls, own=own)
        learn.remove_cbs([cb for cb in learn.cbs if type(cb).__module__.startswith('fastxtend_accum')])
        assert_same(weights(fit(learn)), weights(fit(plain)))
        if not own: assert (weights(learn)-weights(fit(learner_of(Learner)))).abs().max() > 1e-3

def test_windows_of_loader_batches_with_a_loop_of_its_own():
    "Accumulation over whole loader batches: exact or an error; where a window is one batch, it is the plain training"
    for cls in SAM,RDrop,TwoSteps:
        assert_same(weights(fit(learner_of(cls, GradientAccumulation(32)))), weights(fit(learner_of(cls))))
        with pytest.raises(ValueError, match='_do_one_batch|_backward|_do_grad_opt'): fit(learner_of(cls, GradientAccumulation(64)))

@pytest.mark.parametrize('way', overruling)
def test_a_learner_whose_other_methods_are_its_own(way):
    "`_step` and `one_batch` are not overruled"
    class Own(Learner):
        n = 0
        def _step(self): self.n += 1; super()._step(); [p.data.mul_(.99) for p in self.model.parameters()]
        def one_batch(self, i, b): super().one_batch(i, (b[0]*2, b[1]))
    if way == 'schedule': return
    plain,learn = fit(learner_of(Own)),fit(learner_of(Own, overruling[way]()))
    assert_same(weights(learn), weights(plain), ROUNDING)
    assert learn.n == plain.n == 9

# A retry after out-of-memory: row 14

class Boom(torch.autograd.Function):
    "Its backward pass calls `f`"
    @staticmethod
    def forward(ctx, x, f): ctx.f = f; return x.clone()
    @staticmethod
    def backward(ctx, grad): ctx.f(); return grad,None

class Fragile(nn.Module):
    """Runs out of memory once: at `where`, in the `nth` piece of the `at`th batch. With BatchNorm, dropout, and noise of NumPy and Python. What counts
    the failures is the class's: what the module holds is as before the pass that failed"""
    struck,nth,at = 0,1,2
    def __init__(self, where=None, at=2, nth=1, flag=False):
        super().__init__()
        torch.manual_seed(0)
        self.body,self.norm,self.head = nn.Linear(5, 8),nn.BatchNorm1d(8),nn.Linear(8, 1)
        self.register_buffer('n', torch.zeros(1, dtype=torch.long))
        self.register_buffer('flag', torch.zeros(1, dtype=torch.bool) if flag else None)
        self.double()
        self.where,self.batch = where,None
        Fragile.at,Fragile.nth,Fragile.struck = at,nth,0
    def strike(self, where):
        if not self.training or where != self.where or self.batch != self.at: return
        Fragile.struck += 1
        if self.struck == self.nth: raise torch.OutOfMemoryError('CUDA out of memory')
    def forward(self, x):
        self.strike('start')
        if self.training: self.n += 1
        if self.training and self.flag is not None: self.flag.logical_not_()
        h = F.dropout(self.norm(self.body(x)), .5, self.training)
        if self.training: h = Boom.apply(h*(1+np.random.rand()+random.random()), partial(self.strike, 'backward'))
        self.strike('forward')
        return self.head(h)

def seed_all(i): torch.manual_seed(i); np.random.seed(i); random.seed(i)
def states(): return torch.get_rng_state().sum().item(),float(np.random.get_state()[1].sum()),hash(random.getstate())

class Seeds(Callback):
    "The same random numbers in each batch, and their state after it"
    order,run_valid = -20,False
    def before_fit(self): self.states = []
    def before_batch(self): self.model.batch = self.train_iter; seed_all(self.train_iter)
    def before_step(self): self.states.append(states())

def by_hand(sizes, cached=False, flag=False, n=96, n_epoch=2):
    "The training in plain PyTorch: `sizes(i)` of the pieces of batch `i`"
    m,(x,y),seen = Fragile(flag=flag),data(n),[]
    opt = torch.optim.SGD(m.parameters(), lr=.03)
    for i in range(n_epoch*n//32):
        seed_all(i)
        pieces = [o for o in zip(*(t[i*32%n:i*32%n+32].split(sizes(i)) for t in (x, y)))]
        if cached: F.mse_loss(torch.cat([m(a) for a,_ in pieces]), torch.cat([b for _,b in pieces])).backward()
        else:
            for a,b in pieces: (F.mse_loss(m(a), b)*len(a)/32).backward()
        seen.append(states())
        opt.step()
        opt.zero_grad()
    return m,seen

def fragile(where, make, flag=False, at=2, n=96):
    def loss(pred, targ): learn.model.strike('loss'); return mse(pred, targ)
    learn = make_learner(32, n, m=Fragile(where, at, flag=flag), loss_func=loss, cbs=[Seeds(), make()])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return fit(learn, 2, .03)

def same_training(learn, m, seen):
    assert_same(weights(learn), weights(m), ROUNDING)
    for (name,a),b in zip(learn.model.named_buffers(), m.buffers(), strict=True): assert (a.double()-b.double()).abs().max() <= ROUNDING, f'{name} is {a}, not {b}'
    assert learn.seeds.states == seen, 'the random state is another'
    assert (weights(learn)-weights(Fragile())).abs().max() > 1e-3

@pytest.mark.parametrize('at', [0, 2, 3])
@pytest.mark.parametrize('where', ['start', 'forward', 'loss', 'backward'])
def test_a_retry_is_as_if_the_pieces_had_been_smaller_from_that_batch_on(where, at):
    "Weights, buffers and random states, after each batch; in the first, in one that is looked at and in one that is not"
    learn = fragile(where, lambda: GradientAccumulation(32, micro_batch_size='auto'), at=at, n=160)
    assert learn.model.struck and learn.gradient_accumulation.micro_bs == 16
    same_training(learn, *by_hand(lambda i: [32] if i < at else [16,16], n=160))

@pytest.mark.parametrize('make', [lambda: GradientAccumulation(32, micro_batch_size='auto'), lambda: GradientCache('auto')])
def test_a_retry_puts_boolean_buffers_back(make):
    learn = fragile('loss', make, flag=True)
    same_training(learn, *by_hand(lambda i: [32] if i < 2 else [16,16], hasattr(learn, 'gradient_cache'), flag=True))

@pytest.mark.parametrize('where', ['start', 'forward', 'loss', 'backward'])
@pytest.mark.parametrize('nth', [1, 2])
def test_a_second_retry(where, nth):
    "In batch 1, whole, and in the `nth` half of batch 2: from there on in quarters; a half that has been trained on may stay"
    def again(self):
        if self.train_iter == 2: Fragile.at,Fragile.nth,Fragile.struck = 2,nth,0
    m = Fragile(where, at=1)
    learn = make_learner(32, m=m, cbs=[Seeds(), cb := GradientAccumulation(32, micro_batch_size='auto'), Callback(before_batch=again)],
                         loss_func=lambda pred, targ: m.strike('loss') or mse(pred, targ))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        fit(learn, 2, .03)
    assert cb.micro_bs == 8 and m.struck >= nth
    faults = []
    for sizes in [[16, 8, 8], [8]*4][nth == 1:]:
        try: return same_training(learn, *by_hand(lambda i: [32] if i < 1 else [16,16] if i == 1 else sizes if i == 2 else [8]*4))
        except AssertionError as e: faults.append(str(e))
    pytest.fail('; '.join(faults))

@pytest.mark.parametrize('where', ['start', 'forward', 'loss', 'backward'])
def test_a_retry_of_the_cache(where):
    learn = fragile(where, lambda: GradientCache('auto'))
    assert learn.model.struck and learn.gradient_cache.micro_bs == 16
    same_training(learn, *by_hand(lambda i: [32] if i < 2 else [16,16], cached=True))

# fastai's own notebooks: faults a, b and c, and where 'auto' prints

previewed = dict(overruling, accum=lambda: [GradientAccumulation(64)])

@pytest.mark.parametrize('mix', [MixUp, CutMix])
@pytest.mark.parametrize('way', previewed)
def test_fastais_preview_of_mixup(way, mix):
    "`with learn: learn('before_train')` on a new Learner, as fastai documents it; the fit after it is as without it"
    def fitted(look):
        x,y = (o.float() for o in data(96))
        dls = DataLoaders(*[DataLoader(list(zip(x[:,None,None] if mix is CutMix else x, y)), bs=32) for _ in range(2)])
        m = nn.Sequential(nn.Flatten(), *model().float()) if mix is CutMix else model().float()
        learn = Learner(dls, m, MSELossFlat(), opt_func=SGD, cbs=[mix(1.), *(previewed[way]() if mix is MixUp or way != 'checkpointing' else [])])
        if look:
            with learn:
                learn.epoch,learn.training = 0,True
                learn.dl = dls.train
                learn._split(first(dls.train))
                learn('before_train')
                if mix is MixUp: learn('before_batch')
                assert learn.xb[0].shape == first(dls.train)[0].shape
            learn.training = False
            assert '_with_events' not in vars(learn) and 'forward' not in vars(learn.model) and learn.opt is None
            assert learn.dl is dls.train
        seed_all(1)
        return weights(fit(learn, 1))
    assert_same(fitted(True), fitted(False))

@pytest.mark.parametrize('way', previewed)
def test_batches_without_targets(way):
    "fastai takes no step either: the same position, log and data, and no warning"
    def fitted(bs, cbs):
        def see(cb): pcts.append((cb.train_iter, cb.pct_train)) if cb.training else None
        pcts,logged = [],[]
        dls = DataLoaders(*[DataLoader([(o,) for o in data(96)[0]], bs=bs) for _ in range(2)])
        learn = Learner(dls, model(), mse, opt_func=SGD, cbs=[CollectDataCallback(), Callback(after_batch=see), *cbs])
        learn.logger = logged.append
        with warnings.catch_warnings(record=True) as said, learn.no_bar():
            warnings.simplefilter('always')
            learn.fit(2)
        return pcts,[o[:3] for o in logged if not isinstance(o, str)],learn,[str(o.message) for o in said]
    bs = 16 if way == 'accum' else 32
    pcts,logged,plain,_ = fitted(bs, [])
    pcts2,logged2,learn,said = fitted(bs, previewed[way]())
    assert said == []
    assert str(logged2) == str(logged)  # NaN is not equal to itself
    assert_same([o[1] for o in pcts2][-1], pcts[-1][1], 1e-9)
    assert_same(weights(learn), weights(model()))
    assert [len(o) for o in learn.collect_data.data] == [len(o) for o in plain.collect_data.data]
    assert_same(torch.cat([o[0][0] for o in learn.collect_data.data]), torch.cat([o[0][0] for o in plain.collect_data.data]))
    if way not in ('accum', 'schedule'): assert pcts2 == pcts

@pytest.mark.parametrize('make', [lambda: [GradientAccumulation(32)], lambda: [GradientAccumulation(32, micro_batch_size=8)], lambda: [GradientCache(8)],
                                  lambda: [GradientAccumulation(32, log_accum_batch=False)], lambda: [GradientAccumulationSchedule(32, 32)]])
@pytest.mark.parametrize('num_it', [6, 20])
def test_the_position_in_lr_find(make, num_it):
    "With one loader batch a window, it is that of a plain Learner"
    def found(cbs):
        pcts = []
        learn = make_learner(32, cbs=[Callback(after_batch=lambda self: pcts.append((self.pct_train, self.n_epoch))), *cbs])
        with quiet(learn): learn.lr_find(num_it=num_it, stop_div=False, show_plot=False)
        return pcts
    plain,ours = found([]),found(make())
    assert_same([o[0] for o in ours], [o[0] for o in plain], ROUNDING)
    assert [o[1] for o in ours] == [o[1] for o in plain]

@pytest.mark.parametrize('make', [lambda: GradientAccumulation(32, micro_batch_size='auto'), lambda: GradientCache('auto'), lambda: GradientAccumulationSchedule(32, 64, micro_batch_size='auto')])
def test_what_auto_finds_goes_to_the_logger(make, capsys):
    "Nothing is printed inside `no_logging()`, and a logger of one's own gets the line"
    learn = make_learner(32, cbs=make())
    fit(learn, 2)
    assert capsys.readouterr().out == ''
    learn,lines = make_learner(32, cbs=make()),[]
    learn.logger = lines.append
    with learn.no_bar(): learn.fit(1)
    assert capsys.readouterr().out == '' and [o for o in lines if isinstance(o, str) and '32' in o]
