"What the first pass moves is named, and what a failed pass moves is undone, or is an error. Against fits of whole batches"
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

import pytest
from fastai.layers import ConvLayer, NormType
from torch.ao.quantization import MinMaxObserver, MovingAverageMinMaxObserver
from torch.nn.utils import parametrizations, spectral_norm

from common import *

class Moves(nn.Module):
    "Adds to its input what `step(self, x)` gives, in training"
    def __init__(self, init, step): super().__init__(); init(self); self.step = step
    def forward(self, x): return x+self.step(self, x) if self.training else x

def buffer(m): m.register_buffer('mean', torch.zeros(5).double())
def frozen(m): m.mean = nn.Parameter(torch.zeros(5).double(), requires_grad=False)
def plain(m): m.mean = torch.zeros(5).double()
@torch.no_grad()
def in_place(m, x): m.mean.lerp_(x.detach().mean(0), .1); return m.mean.clone()
def in_data(m, x): m.mean.data.lerp_(x.detach().mean(0), .1); return m.mean.clone()
def replaced_by(m, x): m.mean = .9*m.mean+.1*x.detach().mean(0); return m.mean
def new_data(m, x): m.mean.data = .9*m.mean.data+.1*x.detach().mean(0); return m.mean.clone()

@dataclass
class Meter: n:int = 0
class Slotted:
    __slots__ = 'n',
    def __init__(self): self.n = 0
class Hook(Meter):
    def __call__(self, m, args): pass
def hook_of(m): return first(m._forward_pre_hooks.values())
def held_in(make, get, put):
    "A number of calls, in what `make` makes"
    def init(m): m.state = make()
    def step(m, x): put(m.state, get(m.state)+1); return .01*get(m.state)
    return init,step
def set_n(o, n): o.n = n
def set_item(k): return lambda o, n: o.__setitem__(k, n)

states = dict(
    buffer=(buffer, in_place), buffer_data=(buffer, in_data), new_buffer=(buffer, replaced_by), frozen=(frozen, in_place), frozen_data=(frozen, in_data),
    frozen_new_data=(frozen, new_data), attribute=(plain, in_place), new_attribute=(plain, replaced_by),
    number=(lambda m: set_n(m, 0), lambda m, x: (set_n(m, m.n+1), .01*m.n)[1]), dict=held_in(lambda: dict(n=0), lambda o: o['n'], set_item('n')),
    nested=held_in(lambda: dict(a=[dict(n=0)]), lambda o: o['a'][0]['n'], lambda o, n: set_item('n')(o['a'][0], n)), list=held_in(lambda: [0], lambda o: o[0], set_item(0)),
    counter=held_in(lambda: Counter(n=0), lambda o: o['n'], set_item('n')), ordered=held_in(lambda: OrderedDict(a=0, n=0), lambda o: (o.move_to_end('a'), o['n'])[1], set_item('n')),
    flag=(lambda m: set_n(m, False), lambda m, x: (set_n(m, not m.n), .01*m.n)[1]),
    list_then_new=(lambda m: setattr(m, 'n', [0]), lambda m, x: (set_item(0)(m.n, m.n[0]+1), set_n(m, [*m.n]), .01*m.n[0])[2]),
    deque=held_in(lambda: deque([0], 3), lambda o: o[-1], deque.append), set=held_in(set, len, set.add), array=held_in(lambda: np.zeros(1), lambda o: float(o[0]), set_item(0)),
    object=held_in(Meter, attrgetter('n'), set_n), namespace=held_in(lambda: SimpleNamespace(n=0), attrgetter('n'), set_n), slots=held_in(Slotted, attrgetter('n'), set_n),
    hook=(lambda m: m.register_forward_pre_hook(Hook()), lambda m, x: (set_n(hook_of(m), hook_of(m).n+1), .01*hook_of(m).n)[1]))
noise = dict(
    torch=(noop, lambda m, x: torch.randn_like(x)), dropout=(noop, lambda m, x: F.dropout(F.dropout(x, .5), .5)), python=(noop, lambda m, x: random.random()),
    numpy=(noop, lambda m, x: np.random.rand()), own=(lambda m: set_n(m, torch.Generator()), lambda m, x: torch.rand(1, generator=m.n).double()),
    own_numpy=(lambda m: set_n(m, np.random.default_rng(0)), lambda m, x: m.n.random()), own_python=(lambda m: set_n(m, random.Random(0)), lambda m, x: m.n.random()))

def moving(init, step): torch.manual_seed(0); return nn.Sequential(Moves(init, step), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
def said(capsys, m, bs, *cbs, **kwargs):
    capsys.readouterr()
    learn = make_learner(bs, n=96, m=m, cbs=[*cbs], **kwargs)
    set_seed(0)
    return fit_aloud(learn, 1),capsys.readouterr().out

ways = {'pieces':(32, lambda: GradientAccumulation(micro_batch_size=8), '; ActivationCheckpointing() avoids this'), 'windows':(8, lambda: GradientAccumulation(32), ''), 'cache':(32, lambda: GradientCache(8), '')}
each_way = pytest.mark.parametrize('way', ways)

@pytest.mark.thin(3)
@each_way
@pytest.mark.parametrize('kind', [*states, *noise])
def test_what_moves_is_named(capsys, kind, way):
    "And the weights do differ from those of whole batches"
    bs,cb,end = ways[way]
    word = '; statistics are of 8 at a time in 1 Moves' if kind in states else '; random numbers differ'
    make = (states|noise)[kind]
    ours,line = said(capsys, moving(*make), bs, cb())
    assert line.endswith(word+end+'\n') and line.count('\n') == 1
    whole,line = said(capsys, moving(*make), 32)
    assert line == '' and len(losses(ours)) == len(losses(whole)) == 3 and (weights(ours)-weights(whole)).abs().max() > 1e-4

def images(m): return nn.Sequential(nn.Unflatten(1, (1, 1, 5)), m, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1)).double()
def rows(m): return nn.Sequential(nn.Linear(5, 4), m, nn.Linear(4, 1)).double()
@each_way
@pytest.mark.parametrize('make,name', [
    (lambda: images(ConvLayer(1, 4, norm_type=NormType.Spectral)), 'SpectralNorm'), (lambda: rows(spectral_norm(nn.Linear(4, 4))), 'SpectralNorm'),
    (lambda: rows(parametrizations.spectral_norm(nn.Linear(4, 4))), 'SpectralNorm'), (lambda: rows(MinMaxObserver()), 'MinMaxObserver'),
    (lambda: rows(MovingAverageMinMaxObserver()), 'MovingAverageMinMaxObserver'), (lambda: images(nn.Sequential(nn.Conv2d(1, 4, 1), nn.InstanceNorm2d(4, track_running_stats=True))), 'InstanceNorm2d'),
    (lambda: rows(nn.BatchNorm1d(4, momentum=None)), 'BatchNorm1d'), (lambda: rows(nn.BatchNorm1d(4, track_running_stats=False)), 'BatchNorm1d')])
def test_layers_that_move(capsys, make, name, way):
    bs,cb,end = ways[way]
    assert said(capsys, make(), bs, cb())[1].endswith(f'; statistics are of 8 at a time in 1 {name}{end}\n')

@pytest.mark.parametrize('step', [
    lambda m, x: set_n(m, x.detach()) or 0, lambda m, x: set_n(m, (x.requires_grad_()*2).mean()) or 0, lambda m, x: set_n(m, [x.detach()]*3) or 0, lambda m, x: set_n(m, len(x)) or 0,
    lambda m, x: set_n(m, dict(shape=x.shape, of=x)) or 0, lambda m, x: set_n(m, x.detach().numpy()) or 0, lambda m, x: 0])
@each_way
def test_what_is_kept_of_the_samples_is_no_state(capsys, step, way):
    bs,cb,_ = ways[way]
    def init(m): m.n = None
    out = said(capsys, moving(init, step), bs, cb())[1]
    assert 'statistics' not in out and 'random' not in out

@pytest.mark.parametrize('layer', [lambda: nn.utils.weight_norm(nn.Linear(4, 4)), lambda: parametrizations.weight_norm(nn.Linear(4, 4)), lambda: nn.GroupNorm(2, 4), lambda: nn.BatchNorm1d(4).eval()])
@each_way
def test_layers_that_move_nothing(capsys, layer, way):
    class Eval(Callback):
        order = GradientAccumulation.order-1
        def before_train(self): [m.eval() for m in self.model.modules() if isinstance(m, nn.BatchNorm1d)]
    bs,cb,_ = ways[way]
    assert 'statistics' not in said(capsys, rows(layer()), bs, cb(), Eval())[1]

def test_a_loss_with_a_state(capsys):
    "It is the whole batch's with a GradientCache"
    class Centered(nn.Module):
        def __init__(self): super().__init__(); self.register_buffer('center', torch.zeros(1).double())
        def forward(self, pred, targ):
            self.center = .9*self.center+.1*pred.detach().mean(0)
            return mse(pred-self.center, targ)
    for way,(bs,cb,end) in ways.items():
        out = said(capsys, model(), bs, cb(), loss_func=Centered())[1]
        assert ('in 1 Centered' in out) == (way != 'cache')

@pytest.mark.parametrize('cb', [lambda: GradientAccumulation(32, verbose=False), lambda: GradientAccumulation(32)])
def test_one_look_a_fit_and_none_in_silence(monkeypatch, cb):
    looks = []
    monkeypatch.setattr('fastxtend_accum.learner.events.all_held', lambda *o: looks.extend(o) or [])
    learn = make_learner(8, cbs=cb())
    fit(learn, 2)
    assert not looks
    for n in 1,2:
        fit_aloud(learn, 2)
        assert len(looks) == 2*n*learn.gradient_accumulation.verbose  # model and loss

# A failed pass

class Fails(Callback):
    "Memory runs out once, in this batch of all"
    def __init__(self, at): self.at,self.n = at,0
    def after_loss(self):
        if not self.training: return
        self.n += 1
        if self.n == self.at+1: raise torch.OutOfMemoryError('out of memory')
class Begins(Callback):
    "The state moves from batch `at` on"
    def __init__(self, at): self.at = at
    def before_batch(self): self.model[0].on = self.training and self.train_iter >= self.at

def from_later_on(init, step):
    def begin(m): init(m); m.on = False
    return moving(begin, lambda m, x: step(m, x) if m.on else 0.)
def blocks_of(model): return list(model[1:])
autos = dict(exact=lambda: ActivationCheckpointing(), blocks=lambda: ActivationCheckpointing(blocks_of))

@pytest.mark.thin(15)
@pytest.mark.parametrize('auto', autos)
@pytest.mark.parametrize('begins,fails', [(0, 0), (0, 2), (0, 3), (3, 2), (3, 3), (3, 4), (3, 5), (3, 6), (5, 6), (5, 8), (5, 11), (6, 6), (6, 7), (6, 9), (7, 13)])
@pytest.mark.parametrize('kind', ['buffer', 'buffer_data', 'new_buffer', 'frozen', 'frozen_data', 'frozen_new_data', 'number', 'nested', 'list_then_new', 'array', 'slots'])
def test_a_failed_pass_is_undone_or_an_error(kind, begins, fails, auto):
    "Two epochs of 8 batches; an error only if the state began to move after the batches that were looked at"
    def run(*cbs):
        learn = make_learner(8, n=64, m=from_later_on(*states[kind]), cbs=[Begins(begins), *cbs])
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            try: return fit(learn, 2)
            except RuntimeError as e: learn.error = str(e)
        return learn
    cb = autos[auto]()
    if auto == 'exact': cb.way = ActivationCheckpointing(blocks_of)
    whole,ours = run(),run(Fails(fails), cb)
    before = [o for o in range(fails) if o >= begins and o%8 in (0,1,2,4)]  # looks that have seen it move
    if hasattr(ours, 'error'):
        assert ours.error.startswith('memory ran out in a pass that cannot be undone, since Moves had not changed its state in earlier ones') and begins and not before
        return
    assert before or fails < begins or fails == 0 or fails%8 in (0,1,2,4) and not kind.startswith('frozen')
    assert_same(weights(ours), weights(whole))
    assert losses(ours) == losses(whole) and len(losses(whole)) == 16

# Blocks

@pytest.mark.thin(2)
@pytest.mark.parametrize('begins', [0, 2])
@pytest.mark.parametrize('kind', states)
def test_a_block_runs_again_from_its_state(kind, begins):
    "Whatever holds it; a frozen parameter that begins to move later is an error"
    def run(*cbs):
        def begin(m): states[kind][0](m); m.on = False
        torch.manual_seed(0)
        m = nn.Sequential(nn.Sequential(Moves(begin, lambda m, x: states[kind][1](m, x) if m.on else 0.), nn.Linear(5, 8), nn.Tanh()), nn.Linear(8, 1)).double()
        class InBlock(Begins):
            def before_batch(self): self.model[0][0].on = self.training and self.train_iter >= self.at
        return fit(make_learner(8, n=64, m=m, cbs=[InBlock(begins), *cbs]), 2)
    whole,cb = run(),ActivationCheckpointing(lambda m: [m[0]], adapt=False)
    if kind.startswith('frozen') and begins:
        with pytest.raises(RuntimeError, match='changes a frozen parameter, and did not before'): run(cb)
        return
    ours = run(cb)
    assert_same(weights(ours), weights(whole))
    assert losses(ours) == losses(whole) and len(losses(whole)) == 16 and cb.level == 1
