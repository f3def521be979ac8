"What users put beside `learn.opt`, the loader, the loss and the model: other optimizers, readers of the loader, losses that change, hooks, objects, autocast"
import contextlib
import pytest
from torch.utils.data import BatchSampler
import torch.utils.data as tud

from common import *
from fastxtend_accum.demo import Activations

def run(*cbs, bs=32, n_epoch=3, **kwargs):
    torch.manual_seed(1)
    return fit(make_learner(bs, cbs=[*cbs], **kwargs), n_epoch)

def assert_same_weights(a, b, tol=1e-12):
    assert len(a.recorder.losses) == len(b.recorder.losses) > 5
    assert_same(weights(a), weights(b), tol)

WAYS = dict(windows=(8, lambda: GradientAccumulation(32)), pieces=(32, lambda: GradientAccumulation(micro_batch_size=5)),
            grows=(8, lambda: GradientAccumulationSchedule(32, 32)), cache=(32, lambda: GradientCache(5)))
ways = pytest.mark.parametrize('bs,cb', WAYS.values(), ids=[*WAYS])
BACKWARD = dict(exact=lambda: ActivationCheckpointing(), auto=lambda: GradientAccumulation(micro_batch_size='auto'), cache=lambda: GradientCache('auto'))

# Gradients that `learn.opt` does not hold, or holds twice

class CenterLoss(nn.Module):
    def __init__(self): super().__init__(); self.center = nn.Parameter(torch.full((1, 1), .5, dtype=torch.float64))
    def forward(self, pred, targ): return (F.mse_loss(pred, targ)+.5*(pred-self.center).pow(2).mean()).float()

class OwnOptimizer(Callback):
    run_valid = False
    def __init__(self, event): setattr(self, event, self.step)
    def before_fit(self):
        self.held = self.learn.loss_func  # twice among what may have gradients
        self.own = torch.optim.SGD(self.held.parameters(), lr=.3)
    def step(self): self.own.step(); self.own.zero_grad()

class FailsBackward(Callback):
    "Memory runs out once, in the backward pass of batch `at` of the fit, behind the gradients of the loss and of the last layer"
    run_valid = False
    order = -1
    def __init__(self, at): self.at = at
    def before_fit(self): self.n = -1
    def before_batch(self): self.n += 1
    def after_pred(self):
        if self.n == self.at: first(o for o,_ in self.learn.pred.grad_fn.next_functions if o and o.next_functions).register_prehook(self.fail)
    def fail(self, *args):
        if self.n != self.at: return
        self.at = None
        raise torch.OutOfMemoryError('out of memory')

@ways
@pytest.mark.parametrize('event', ['before_step', 'after_step'])
def test_an_optimizer_of_the_loss(event, bs, cb):
    big,small = run(OwnOptimizer(event), loss_func=CenterLoss()),run(cb(), OwnOptimizer(event), bs=bs, loss_func=CenterLoss())
    assert_same_weights(big, small)
    assert_same(big.loss_func.center, small.loss_func.center, 1e-12)
    assert abs(big.loss_func.center-.5) > .1

@pytest.mark.parametrize('at', [0, 3, 5])
@pytest.mark.parametrize('cb', BACKWARD.values(), ids=[*BACKWARD])
def test_memory_runs_out_behind_the_gradient_of_the_loss(cb, at):
    big,small = run(OwnOptimizer('after_step'), loss_func=CenterLoss()),run(cb(), OwnOptimizer('after_step'), fails := FailsBackward(at), loss_func=CenterLoss())
    assert fails.at is None
    assert_same_weights(big, small)
    assert_same(big.loss_func.center, small.loss_func.center, 1e-12)

class Keeps(OwnOptimizer):
    "Its steps use the gradients of two batches"
    def step(self):
        if self.learn.train_iter%2: super().step()

@pytest.mark.parametrize('at', [0, 1, 4])
def test_a_gradient_of_earlier_batches_is_put_back(at):
    big,small = run(Keeps('after_step'), loss_func=CenterLoss()),run(ActivationCheckpointing(), Keeps('after_step'), FailsBackward(at), loss_func=CenterLoss())
    assert_same_weights(big, small, 0)
    assert_same(big.loss_func.center, small.loss_func.center)

@ways
def test_an_optimizer_that_steps_every_second_step(bs, cb):
    "What it has kept from the step before is no part of this window's mean"
    class Second(OwnOptimizer):
        n = 0
        def step(self):
            self.n += 1
            if self.n%2 == 0: super().step()
    big,small = run(Second('after_step'), loss_func=CenterLoss()),run(cb(), Second('after_step'), bs=bs, loss_func=CenterLoss())
    assert_same_weights(big, small)
    assert_same(big.loss_func.center, small.loss_func.center, 1e-12)
    assert abs(big.loss_func.center-.5) > .1

def head(m): return [params(m[2])]

@ways
def test_clipping_of_what_nobody_zeroes(bs, cb):
    "The norm of all gradients of the model, where the optimizer has those of the head"
    big,small = run(GradientClip(.2), splitter=head),run(cb(), GradientClip(.2), bs=bs, splitter=head)
    assert_same_weights(big, small)
    assert (weights(big)-weights(model())).abs().max() > 1e-2 and (weights(big)-weights(run(splitter=head))).abs().max() > 1e-3

class NaNOnce(Callback):
    run_valid,order,n = False,-1,0
    def before_batch(self):
        if self.n == 4: self.learn.xb = (self.x*math.nan,)
        self.n += 1

@pytest.mark.parametrize('bs,cb', [(8, lambda **k: GradientAccumulation(32, **k)), (32, lambda **k: GradientAccumulation(micro_batch_size=5, **k)),
                                   (32, lambda **k: GradientAccumulation(exact=True, **k))], ids=['windows','pieces','exact'])
@pytest.mark.parametrize('kwargs,cbs', [(dict(splitter=head), ()), (dict(loss_func=CenterLoss()), (OwnOptimizer('after_step'),))], ids=['head','center'])
def test_one_step_is_skipped_for_one_nan(kwargs, cbs, bs, cb):
    "The gradients that nobody zeroes do not keep the NaN"
    learn = run(cb(skip_nonfinite=True), NaNOnce(), *cbs, bs=bs, **kwargs)
    assert learn.gradient_accumulation.n_skipped == 1 and learn.gradient_accumulation.opt_steps == 8 and weights(learn).isfinite().all()

@pytest.mark.parametrize('exc', [KeyboardInterrupt, CancelFitException])
@pytest.mark.parametrize('bs,cb', [WAYS['windows'], WAYS['pieces']], ids=['windows', 'pieces'])
def test_a_window_that_is_cut_off_leaves_no_gradient(exc, bs, cb):
    def twice(bs, at, event, *cbs):
        class Stops(Callback):
            run_valid,order,n = False,50,0
            def stop(self):
                self.n += 1
                if self.n == at: raise exc
        setattr(Stops, event, Stops.stop)
        torch.manual_seed(1)
        learn = make_learner(bs, cbs=[*cbs, OwnOptimizer('after_step')], loss_func=CenterLoss())
        with contextlib.suppress(KeyboardInterrupt): fit(learn, 2, cbs=Stops())
        assert len(learn.recorder.losses) == 4
        return fit(learn, 2)
    big,small = twice(32, 5, 'before_batch'),twice(bs, *(18, 'before_batch') if bs == 8 else (31, 'after_loss'), cb())
    assert_same_weights(big, small)
    assert_same(big.loss_func.center, small.loss_func.center, 1e-12)

class Combined:
    "A loss that is no module"
    def __init__(self): self.center_loss = CenterLoss()
    def __call__(self, pred, targ): return self.center_loss(pred, targ)
    parameters = property(lambda self: self.center_loss.parameters)
def closure():
    loss = CenterLoss()
    def f(pred, targ): return loss(pred, targ)
    f.parameters = loss.parameters
    return f
class Shifts(OwnOptimizer):
    "Adds a loss of its own, whose parameter is found by its optimizer, PyTorch's or fastai's"
    def __init__(self, optimizer): super().__init__('after_step'); self.shift,self.optimizer = nn.Parameter(torch.full((1, 1), .5, dtype=torch.float64)),optimizer
    def __deepcopy__(self, memo): return self
    def before_fit(self): self.own = self.optimizer([self.shift], lr=.3)
    def after_loss(self):
        self.learn.loss_grad = self.learn.loss_grad+.5*(self.pred-self.shift).pow(2).mean().float()
        self.learn.loss = self.learn.loss_grad.clone()

@ways
@pytest.mark.parametrize('make', [Combined, lambda: partial(CenterLoss()), closure])
def test_parameters_of_a_loss_that_is_no_module(make, bs, cb):
    def params_of(learn): return list(getattr(learn.loss_func, 'func', learn.loss_func).parameters())
    class Own(OwnOptimizer):
        def before_fit(self): self.own = torch.optim.SGD(params_of(self.learn), lr=.3)
    big,small,exact = run(Own('after_step'), loss_func=make()),run(cb(), Own('after_step'), bs=bs, loss_func=make()),\
        run(ActivationCheckpointing(), FailsBackward(3), Own('after_step'), loss_func=make())
    for o,tol in (small, 1e-12),(exact, 0):
        assert_same_weights(big, o, tol)
        assert_same(params_of(big)[0], params_of(o)[0], tol)
    assert abs(params_of(big)[0]-.5) > .1

@ways
@pytest.mark.parametrize('optimizer', [torch.optim.SGD, SGD], ids=['torch','fastai'])
def test_parameters_of_a_callback(optimizer, bs, cb):
    big,small = run(a := Shifts(optimizer)),run(cb(), b := Shifts(optimizer), bs=bs)
    assert_same_weights(big, small)
    assert_same(a.shift, b.shift, 1e-12)
    assert abs(a.shift-.5) > .1

class Probe(Callback):
    "Trains a layer of its own on what the model gives"
    run_valid = False
    def __init__(self, event, zero_first): self.zero_first = zero_first; setattr(self, event, self.step)
    def before_fit(self): self.probe = nn.Linear(1, 1).double(); self.own = torch.optim.SGD(self.probe.parameters(), lr=.1)
    def step(self):
        if self.zero_first: self.own.zero_grad()
        self.probe(self.pred.detach()).pow(2).mean().backward()
        self.own.step()
        if not self.zero_first: self.own.zero_grad()

@ways
@pytest.mark.parametrize('event', ['after_pred','after_loss','after_batch'])
@pytest.mark.parametrize('zero_first', [False, True])
def test_a_probe_does_not_touch_the_model(event, zero_first, bs, cb): assert_same_weights(run(), run(cb(), Probe(event, zero_first), bs=bs))

class Tied(nn.Module):
    def __init__(self):
        super().__init__(); torch.manual_seed(0)
        self.enc,self.dec,self.head = nn.Linear(5, 8),nn.Linear(5, 8),nn.Linear(8, 1)
        self.dec.weight = self.enc.weight
    def forward(self, x): return self.head(torch.tanh(self.enc(x))*torch.tanh(self.dec(x.flip(1))))
def two_groups(m): return [params(m.enc), params(m.dec)+params(m.head)]

@ways
@pytest.mark.parametrize('opt_func', [SGD, Adam])
def test_a_weight_in_two_groups(opt_func, bs, cb):
    assert_same_weights(run(m=Tied().double(), splitter=two_groups, opt_func=opt_func), run(cb(), bs=bs, m=Tied().double(), splitter=two_groups, opt_func=opt_func))

# Rates, losses and loaders

class Rates(Callback):
    run_valid = False
    def __init__(self, event, order): self.order = order; setattr(self, event, self.set)
    def set(self): self.opt.set_hyper('lr', .1*(1-self.pct_train))

@ways
@pytest.mark.parametrize('event,order', [('after_loss', 20), ('before_backward', 0), ('before_backward', 20), ('after_backward', 0)])
def test_rates_set_around_the_backward_pass(event, order, bs, cb): assert_same_weights(run(Rates(event, order)), run(cb(), Rates(event, order), bs=bs))

def spread(pred, targ): return F.mse_loss(pred, targ).sqrt().float()
class Switches(Callback):
    "Another loss from epoch 6 on, when the check of the first one is over"
    run_valid = False
    def before_epoch(self):
        if self.epoch == 6: self.learn.loss_func = spread

@pytest.mark.parametrize('bs,cb', [WAYS['windows'], WAYS['pieces']], ids=['windows', 'pieces'])
def test_a_loss_that_is_set_later_is_checked(bs, cb):
    with pytest.warns(UserWarning, match='not exact for this loss'): run(cb(), Switches(), bs=bs, n_epoch=8)

class Peeks(Callback):
    order,run_valid = 20,False
    def before_train(self): next(iter(self.dl))
class Reads(Peeks):
    def before_train(self): assert sum(len(x) for x,_ in self.dl)
class PeeksLater(Peeks):
    def before_train(self): pass
    def before_batch(self):
        if self.learn.iter == 1: next(iter(self.learn.dl))

@pytest.mark.parametrize('bs,cb', [WAYS['windows'], WAYS['pieces']], ids=['windows', 'pieces'])
@pytest.mark.parametrize('reader', [Peeks, Reads, PeeksLater])
@pytest.mark.parametrize('drop_last', [False, True])
def test_a_callback_that_reads_the_loader(reader, drop_last, bs, cb):
    assert_same_weights(run(reader(), n=104, drop_last=drop_last), run(cb(), reader(), bs=bs, n=104, **dict(drop_last=drop_last)))

@pytest.mark.parametrize('bs,cb', [WAYS['windows'], WAYS['pieces']], ids=['windows', 'pieces'])
@pytest.mark.parametrize('drop_last', [False, True])
@pytest.mark.parametrize('some', [range(100), range(8, 92)])
def test_a_batch_sampler(some, drop_last, bs, cb):
    "Of some samples of a data set; it has a size, and drops the last batch or not"
    def go(bs, *cbs):
        learn = make_learner(bs, n=104, cbs=[*cbs])
        ds = [learn.dls.train.dataset[i] for i in range(104)]
        learn.dls = DataLoaders(tud.DataLoader(ds, batch_sampler=BatchSampler(tud.SubsetRandomSampler(some, torch.Generator().manual_seed(0)), bs, drop_last)), learn.dls.valid)
        return fit(learn, 3)
    big,small = go(32),go(bs, cb())
    assert_same_weights(big, small)
    assert big.recorder.lrs == small.recorder.lrs and len(big.recorder.losses) == 3*(len(some)//32+(not drop_last))

@pytest.mark.parametrize('cb', [None, GradientAccumulation(32), GradientAccumulation(micro_batch_size=8)])
def test_a_batch_of_nothing_is_an_error(cb):
    "As without the callback: the epoch does not end"
    learn = make_learner(8, cbs=cb)
    learn.dls.train.create_batch = lambda samples: None
    with pytest.raises(Exception) as e: fit(learn, 1)
    assert type(e.value) in (TypeError,AttributeError)

# What the line says

def said(capsys, *args, **kwargs):
    torch.manual_seed(0)
    fit_aloud(make_learner(*args, **kwargs), 1)
    return capsys.readouterr().out

def test_a_rule_that_does_not_hold_is_said(capsys):
    "A subclass of a loss with a rule, which is no mean"
    class Root(nn.MSELoss):
        def forward(self, pred, targ): return super().forward(pred, targ).sqrt().float()
    with pytest.warns(UserWarning, match='not exact'): assert 'losses are not averaged as in one batch' in said(capsys, 8, cbs=GradientAccumulation(32), loss_func=Root())

@pytest.mark.parametrize('bs,cb', [WAYS['windows'], WAYS['pieces'], WAYS['cache']], ids=['windows', 'pieces', 'cache'])
def test_frequencies_of_a_batch_are_named(capsys, bs, cb):
    class Counts(nn.Module):
        def __init__(self): super().__init__(); self.e,self.l = nn.Embedding(4, 3, scale_grad_by_freq=True),nn.Linear(3, 1)
        def forward(self, x): return self.l(self.e(x[:,0].gt(0).long()))
    assert '1 Embedding' in said(capsys, bs, m=Counts().double(), cbs=cb())

# Outputs, labels and items

class Temperature(nn.Module):
    "CLIP's output: features, and one number for all samples"
    def __init__(self): super().__init__(); torch.manual_seed(0); self.l,self.t = nn.Linear(5, 8),nn.Parameter(torch.tensor(.5))
    def forward(self, x): return F.normalize(self.l(x), dim=1),self.t.exp()
def contrastive(out, targ):
    pred,scale = out
    return F.cross_entropy(scale*pred@pred.T, torch.arange(len(pred))).float()

@pytest.mark.parametrize('cb', [lambda: GradientCache(8), lambda: ActivationCheckpointing(), lambda: GradientCache('auto')])
def test_one_number_for_all_samples(cb):
    assert_same_weights(run(m=Temperature().double(), loss_func=contrastive), run(cb(), m=Temperature().double(), loss_func=contrastive))

class Warms(nn.Module):
    "A second output, which is 0 for all samples in the first epoch, and differs between pieces later on"
    def __init__(self): super().__init__(); self.m,self.weight = model(),0.
    def forward(self, x): return (o := self.m(x)),o.pow(2).mean()*self.weight
class Warmup(Callback):
    def before_epoch(self): self.model.weight = float(self.epoch > 0)

def test_one_number_that_differs_later_on():
    "Training metrics see all samples of the batch in which it does"
    seen = []
    def rows(pred, targ): seen.append(len(pred[0])); return 0.
    def counted(*cbs):
        learn = make_learner(32, m=Warms(), cbs=[*cbs, Warmup()], metrics=rows, loss_func=lambda o, t: (F.mse_loss(o[0], t)+o[1]).float())
        learn.recorder.train_metrics,learn.recorder.valid_metrics = True,False
        seen.clear()
        fit(learn, 3)
        return sum(seen)
    assert counted() == counted(GradientAccumulation(micro_batch_size=8)) == 3*96

@pytest.mark.parametrize('cb', [lambda: GradientCache('auto'), lambda: GradientAccumulation(micro_batch_size='auto')])
def test_a_smaller_last_batch_gives_no_further_lines(cb, capsys):
    learn = make_learner(32, n=100, cbs=[cb(), Activations(.004)])
    fit_aloud(learn, 4)
    lines = [o for o in capsys.readouterr().out.splitlines() if o.startswith('micro_batch_size')]
    assert 0 < len(lines) == len({*lines}), lines

def test_a_method_that_is_set_as_the_loss_in_each_epoch_is_one_loss():
    class Sets(Callback):
        def loss(self, pred, targ): return mse(pred, targ)
        def before_epoch(self): self.learn.loss_func = self.loss
    learn = make_learner(8, cbs=[accum := GradientAccumulation(32), Sets()])
    lefts = []
    fit(learn, 3, cbs=Callback(after_epoch=lambda self: lefts.append(accum.now.loss_check.left)))
    assert lefts == [13, 10, 7]

def test_labels_of_eight_bits():
    "As PyTorch takes them, with class weights"
    weight,pred,targ = torch.tensor([1., 2., 3.]),torch.randn(6, 3),torch.tensor([0, 1, 2, 2, 1, 1])
    loss_func = nn.CrossEntropyLoss(weight)
    assert loss_items(loss_func, pred, targ.byte()) == loss_items(loss_func, pred, targ) == 13

def test_items_are_one_number():
    with pytest.raises(ValueError, match='one-element tensor'): run(GradientAccumulation(32, num_items=lambda learn: torch.ones(3)), bs=8)

# Passes that are undone, and blocks that run again

class Installs(nn.Module):
    "Adds its hooks in its first pass, as Transformers' models do for `output_hidden_states`"
    def __init__(self):
        super().__init__(); torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(3)])
        self.head,self.installed,self.seen = nn.Linear(5, 1),False,[]
    def forward(self, x):
        if not self.installed:
            for o in self.layers: o.register_forward_hook(self.keep)
            self.installed = True
        self.seen = []
        for o in self.layers: x = x+o(x)
        return self.head(x+sum(self.seen))
    def keep(self, m, args, out): self.seen.append(out)

@pytest.mark.parametrize('cb', [lambda: ActivationCheckpointing(), lambda: GradientAccumulation(micro_batch_size='auto'), lambda: GradientCache('auto'), lambda: GradientCache(8)],
                         ids=['exact', 'auto', 'auto_cache', 'cache'])
def test_hooks_that_the_first_pass_installs(cb):
    whole = run(memory := Activations(), m=Installs().double())
    learn = run(cb(), Activations(memory.mb*.8), m=Installs().double())
    assert [len(o._forward_hooks) for o in learn.model.layers] == [1, 1, 1]
    assert_same_weights(whole, learn)

class Erases(nn.Module):
    "Changes its input in place, in some batches"
    def __init__(self, batches): super().__init__(); self.batches,self.n = batches,0
    def forward(self, x):
        if self.training:
            if self.n in self.batches: x[:,0] *= .5
            self.n += 1
        return x

@pytest.mark.parametrize('batches,is_undone', [({1, 3}, True), ({3}, False)])
def test_an_input_that_changes_in_some_batches(batches, is_undone):
    "Batches 0, 1, 2 and 4 are looked at: copied once that has been seen; else an error"
    def go(*cbs): torch.manual_seed(0); return run(*cbs, n=192, m=nn.Sequential(Erases(batches), nn.Sequential(nn.Linear(5, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1)).double())
    if is_undone: assert_same_weights(go(), go(ActivationCheckpointing(), FailsBackward(3)))
    else:
        with pytest.raises(RuntimeError, match='changed its input in place'): go(ActivationCheckpointing(), FailsBackward(3))

class Graph:
    def __init__(self, x): self.x = x
class Block(nn.Module):
    "Changes the object that it is given, as torch_geometric's layers may"
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(8, 8),nn.Linear(8, 8)
    def forward(self, g): g.x = g.x+torch.tanh(self.b(torch.relu(self.a(g.x)))); return g
class GraphNet(nn.Module):
    def __init__(self): super().__init__(); torch.manual_seed(0); self.inp,self.blocks,self.head = nn.Linear(5, 8),nn.ModuleList([Block() for _ in range(4)]),nn.Linear(8, 1)
    def forward(self, x):
        g = Graph(self.inp(x))
        for b in self.blocks: g = b(g)
        return self.head(g.x)
class Given(nn.Module):
    "A block that runs a norm of the model, which it is given"
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(8, 8),nn.Linear(8, 8)
    def forward(self, x, norm): return x+self.b(norm(torch.tanh(self.a(x))))
class Gives(GraphNet):
    def __init__(self): super().__init__(); self.blocks,self.norm = nn.ModuleList([Given() for _ in range(4)]),nn.BatchNorm1d(8)
    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks: x = b(x, self.norm)
        return self.head(x)

class Adds(nn.Module):
    "Adds up in place what it is given, new in each batch, as a mixture of experts does with its auxiliary loss"
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(8, 8),nn.Linear(8, 8)
    def forward(self, x, context):
        h = torch.tanh(self.a(x))
        context.aux += h.pow(2).mean()
        context.total.add_(h.detach().mean())
        context.mask[:,0] = False
        return x+self.b(h*context.mask)
class Sums(GraphNet):
    def __init__(self): super().__init__(); self.blocks = nn.ModuleList([Adds() for _ in range(4)])
    def forward(self, x):
        context = SimpleNamespace(aux=x.new_zeros(()), total=x.new_zeros(()), mask=torch.ones(len(x), 8, dtype=torch.bool))
        x = self.inp(x)
        for b in self.blocks: x = b(x, context)
        return self.head(x)+.1*(context.aux+context.total)

@pytest.mark.parametrize('cb', [all_blocks, lambda: all_blocks(offload=True), lambda: ActivationCheckpointing()])
@pytest.mark.parametrize('make', [GraphNet, Gives, Sums])
def test_objects_that_blocks_are_given(make, cb):
    whole = run(memory := Activations(), m=make().double())
    learn = run(cb(), Activations(memory.mb*.7) if 'Accum' in type(cb()).__name__ else Activations(), m=make().double())
    assert learn.activations.mb < memory.mb
    for k,v in whole.model.state_dict().items(): assert_same(learn.model.state_dict()[k], v)
    assert losses(whole) == losses(learn)

def test_a_scripted_part_of_a_model_that_fits():
    def go(*cbs):
        torch.manual_seed(0)
        return run(*cbs, m=nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))), nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)), nn.Linear(5, 1)).double())
    assert_same_weights(go(), go(ActivationCheckpointing()), 0)

class Autocasts(Callback):
    "As one writes it for a CPU, which fastai's MixedPrecision does not know"
    def before_batch(self): self.context = torch.autocast('cpu', torch.bfloat16); self.context.__enter__()
    def after_pred(self): self.context.__exit__(None, None, None); self.learn.pred = self.pred.float()

def single(): torch.manual_seed(0); return nn.Sequential(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5)), nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5)), nn.Linear(5, 1))
def in_single(learn): learn.dls.train.after_item = learn.dls.valid.after_item = lambda b: tuple(o.float() for o in b); return learn

@pytest.mark.parametrize('cbs', [lambda: [GradientAccumulation(micro_batch_size=8)], lambda: [ActivationCheckpointing(), FailsBackward(2)]], ids=['pieces', 'exact'])
def test_autocast_that_has_ended(cbs):
    with pytest.raises(RuntimeError, match='autocast has ended'): fit(in_single(make_learner(32, m=single(), cbs=[Autocasts(), *cbs()])), 1)
    assert not torch.is_autocast_enabled('cpu')

def test_autocast_of_a_batch_in_one_pass():
    def go(*cbs): return fit(in_single(make_learner(32, m=single(), cbs=[Autocasts(), *cbs])), 2)
    assert_same(weights(go()), weights(go(ActivationCheckpointing())))
