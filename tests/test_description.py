"The line that a first step prints: how a window is made up, and what differs from one batch"
import pytest
from fastai.layers import ConvLayer, NormType
from torch.ao.quantization import MovingAverageMinMaxObserver
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from common import *
from fastxtend_accum.windows import description,passes
from test_checkpointing import Adds, buffer, in_data, states

accum,schedule = GradientAccumulation,GradientAccumulationSchedule

def rows(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), *layers, nn.Linear(4, 1)).double()

def images(*layers): return rows(nn.Unflatten(1, (1, 2, 2)), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
def normed(): return rows(nn.BatchNorm1d(4), nn.Dropout(.3))

def said(capsys, bs, *cbs, m=None, n=128, n_epoch=1, **kwargs):
    "The Learner, and what its fit prints"
    capsys.readouterr()
    learn = make_learner(bs, n=n, cbs=[*cbs], m=m, **kwargs)
    set_seed(0)
    return fit_aloud(learn, n_epoch),capsys.readouterr().out

class Frozen(Callback):
    "No layer trains"
    order = accum.order-1
    def before_train(self):
        for m in self.model.modules():
            if not isinstance(m, nn.Sequential): m.eval()

class Largest(nn.Module):
    "Runs out of memory in training above `limit` numbers"
    def __init__(self, m, limit): super().__init__(); self.m,self.limit = m,limit
    def forward(self, x):
        if torch.is_grad_enabled() and x.numel() > self.limit: raise torch.OutOfMemoryError('CUDA out of memory')
        return self.m(x)

# How a window is made up

averaged,remedy = '; losses are averaged as in one batch','; ActivationCheckpointing() avoids this'
line_of_4,split_in_4 = '32 = 4 x 8 samples'+averaged,'each batch of 32 is split into 4 micro-batches of 8'
def differs(n): return f'; statistics are of {n} at a time in 1 BatchNorm1d; random numbers differ'
fits = "micro_batch_size='auto': each batch of 32 fits in memory"

@pytest.mark.parametrize('bs, cbs, m, line', [
    (8, lambda: [accum(32)], model, line_of_4),
    (8, lambda: [accum(32)], normed, line_of_4+differs(8)),
    (8, lambda: [accum(32), Frozen()], normed, line_of_4),
    (32, lambda: [accum(32, micro_batch_size=8)], normed, line_of_4+differs(8)+remedy),
    (32, lambda: [accum(64, micro_batch_size=7)], model, '64 = 10 x up to 7 samples'+averaged),
    (32, lambda: [accum(32)], normed, '32 samples are one batch: a smaller micro_batch_size splits it'),
    (32, lambda: [accum(64, micro_batch_size='auto')], model, fits+'; 64 = 2 x 32 samples'+averaged),
    (32, lambda: [accum(micro_batch_size='auto')], normed, fits),
    (8, lambda: [schedule(8, 32)], normed, '8 to 32 samples, 8 at a time'+differs(8)),
    (32, lambda: [schedule(32, 128, micro_batch_size='auto')], model, fits+'; 32 to 128 samples, 32 at a time'),
    (32, lambda: [accum(64), GradientCache(8)], normed, '64 = 2 x 32 samples'+averaged+differs(8)),
    (32, lambda: [GradientCache(8)], normed, f'GradientCache: {split_in_4}{differs(8)}'),
    (32, lambda: [GradientCache(8)], model, ''),
    (32, lambda: [ActivationCheckpointing()], normed, 'ActivationCheckpointing: each batch of 32 fits in memory')])
def test_a_line(capsys, bs, cbs, m, line): assert said(capsys, bs, *cbs(), m=m())[1] == line+'\n'*bool(line)

@pytest.mark.parametrize('bs,limit,size', [(48, 150, '2 micro-batches of 24'), (48, 45, '8 micro-batches of 6'),
                                           (50, 65, '4 micro-batches of up to 13')])
@pytest.mark.parametrize('cb,how,end', [(accum, averaged, remedy), (GradientCache, '', '')])
def test_what_fits(capsys, cb, how, end, bs, limit, size):
    "Of a batch that memory does not hold; a short last batch gives no further line"
    line = f"micro_batch_size='auto': each batch of {bs} is split into {size}{how}{differs(size.split()[-1])}{end}\n"
    cb,m = cb(micro_batch_size='auto'),Largest(normed(), limit)
    assert said(capsys, bs, cb, m=m, n=2*bs+7, n_epoch=3)[1] == line

# What differs from one batch

moving = dict({k:states[k] for k in ('buffer','new_buffer','frozen','frozen_data')}, buffer_data=(buffer, in_data))
drawing = dict({k:states[k] for k in ('torch','python','numpy')}, dropout=(noop, lambda m,x: F.dropout(F.dropout(x))))

splits = {'micro-batches':(32, lambda: accum(micro_batch_size=8), remedy), 'windows':(8, lambda: accum(32), ''),
          'GradientCache':(32, lambda: GradientCache(8), '')}
each_split = pytest.mark.parametrize('split', splits)

@each_split
@pytest.mark.parametrize('kind', [*moving, *drawing])
def test_what_moves_is_named(capsys, kind, split):
    "In a layer of one's own; and the weights do differ from those of whole batches"
    bs,cb,end = splits[split]
    word = '; statistics are of 8 at a time in 1 Adds' if kind in moving else '; random numbers differ'
    def make(): return nn.Sequential(Adds(*(moving | drawing)[kind]), rows()).double()
    (ours,line),(whole,none) = said(capsys, bs, cb(), m=make()),said(capsys, 32, m=make())
    assert line.endswith(word+end+'\n') and line.count('\n') == 1 and none == ''
    assert len(losses(ours)) == len(losses(whole)) == 4 and (weights(ours)-weights(whole)).abs().max() > 1e-4

@each_split
@pytest.mark.parametrize('make,name', [
    (lambda: rows(nn.BatchNorm1d(4, momentum=None)), 'BatchNorm1d'),
    (lambda: rows(MovingAverageMinMaxObserver()), 'MovingAverageMinMaxObserver'),
    (lambda: rows(spectral_norm(nn.Linear(4, 4))), 'SpectralNorm'),
    (lambda: rows(parametrizations.spectral_norm(nn.Linear(4, 4))), 'SpectralNorm'),
    (lambda: images(ConvLayer(1, 4, norm_type=NormType.Spectral)), 'SpectralNorm'),
    (lambda: images(nn.InstanceNorm2d(1, track_running_stats=True), nn.Conv2d(1, 4, 1)), 'InstanceNorm2d')])
def test_layers_that_keep_statistics(capsys, make, name, split):
    bs,cb,end = splits[split]
    assert said(capsys, bs, cb(), m=make())[1].endswith(f'; statistics are of 8 at a time in 1 {name}{end}\n')

class Head(nn.Module):
    "The output of a module that may give a tuple"
    def __init__(self, m): super().__init__(); self.m = m
    def forward(self, x): return o[0] if isinstance(o := self.m(x), tuple) else o

@pytest.mark.parametrize('layer', [nn.Dropout(.1), nn.AlphaDropout(.1), nn.LSTM(4, 4, 2, dropout=.1),
                                   nn.TransformerEncoderLayer(4, 2, 8, dropout=.1)])
def test_layers_with_dropout(capsys, layer):
    for cbs,end in ([], '; random numbers differ'),([Frozen()], ''):
        assert said(capsys, 8, accum(32), *cbs, m=rows(Head(layer)))[1] == f'{line_of_4}{end}\n'

class Keeps(nn.Module):
    "Keeps its input, or something of it, as an attribute"
    def __init__(self, of): super().__init__(); self.of,self.kept,self.distance = of,None,nn.PairwiseDistance(2)
    def forward(self, x): self.kept = self.of(x); return x

@each_split
@pytest.mark.parametrize('make', [
    lambda: nn.Dropout(0.), lambda: nn.LayerNorm(4), lambda: nn.GroupNorm(2, 4), lambda: weight_norm(nn.Linear(4, 4)),
    lambda: parametrizations.weight_norm(nn.Linear(4, 4)), lambda: Keeps(len), lambda: Keeps(torch.detach)])
def test_layers_that_differ_in_nothing(capsys, make, split):
    bs,cb,_ = splits[split]
    assert said(capsys, bs, cb(), m=rows(make()))[1] == (line_of_4+'\n')*(split != 'GradientCache')

def test_layers_outside_of_the_part(capsys):
    "A `GradientCache` runs its `part` in micro-batches, and the rest whole"
    for part,is_named in (lambda m: m[0], False),(None, True):
        m = nn.Sequential(nn.Linear(5, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))).double()
        assert ('1 BatchNorm1d' in said(capsys, 32, GradientCache(8, part=part), m=m)[1]) == is_named

def spread(pred, targ): return (pred-targ).std().float()
def noisy(pred, targ): return F.mse_loss(pred+torch.rand(()), targ).float()
def some(pred, targ): return ((pred-targ)**2)[targ > -.5].mean().float()
class Root(nn.MSELoss):
    "Is no mean, whatever the rule of its class"
    def forward(self, pred, targ): return super().forward(pred, targ).sqrt().float()

@pytest.mark.parametrize('loss_func,num_items,line,warns', [
    (spread, None, 'are not averaged as in one batch', 'not exact'),
    (Root(), None, 'are not averaged as in one batch', 'not exact'),
    (noisy, None, 'may not be averaged as in one batch', 'could not check'),
    (noisy, lambda o: len(o.y), 'are averaged by num_items', None),
    (some, lambda o: (o.y > -.5).sum(), 'are averaged as in one batch', None),
    (some, lambda o: len(o.y), 'are not averaged as in one batch', 'not exact')])
def test_losses(capsys, recwarn, loss_func, num_items, line, warns):
    "One that is no mean, one that draws, a count that fits, and one that does not; once each"
    _,out = said(capsys, 8, accum(32, num_items=num_items), loss_func=loss_func, n_epoch=2)
    assert out == f'32 = 4 x 8 samples; losses {line}\n'
    warned = [str(o.message) for o in recwarn if 'fastxtend_accum' in o.filename]
    assert len(warned) == (warns is not None) and all(warns in o for o in warned), warned

# When it is printed

def test_once_for_each_setting(capsys):
    learn = make_learner(32, n=128, cbs=accum(32, micro_batch_size=8))
    for size,line in (32, line_of_4+'\n'),(32, ''),(64, f'64 = 8 x 8 samples{averaged}\n'),(64, ''):
        learn.gradient_accumulation.accum_bs = size
        fit_aloud(learn, 2)
        assert capsys.readouterr().out == line

@pytest.mark.parametrize('silent', ['no_logging', 'lr_find'])
@pytest.mark.parametrize('cb', [lambda: accum(32, micro_batch_size=8), lambda: accum(micro_batch_size='auto'),
                                lambda: GradientCache('auto'), ActivationCheckpointing])
def test_the_fit_after_silence_says_it(capsys, cb, silent):
    learn = make_learner(32, cbs=cb())
    with learn.no_bar(): learn.lr_find(num_it=5, show_plot=False) if silent == 'lr_find' else fit(learn, 1)
    assert '32' not in capsys.readouterr().out
    fit_aloud(learn, 1)
    assert '32' in capsys.readouterr().out

@pytest.mark.parametrize('verbose', [False, True])
def test_silence(capsys, monkeypatch, verbose):
    "With `verbose=False`, which does not even look; else it looks once in a fit"
    looks,real = [],description.Moves
    monkeypatch.setattr(passes, 'Moves', lambda model: looks.append(model) or real(model))
    for cb in partial(accum, 32),partial(accum, micro_batch_size='auto'),partial(schedule, 8, 32):
        looks.clear()
        assert bool(said(capsys, 8, cb(verbose=verbose), m=normed(), n_epoch=2)[1]) == len(looks) == verbose
    with pytest.raises(TypeError, match='verbose must be True or False'): accum(32, verbose=1)

def test_a_larger_image(capsys):
    "Wider batches from the third on change the size"
    def grow(self):
        if self.training and self.iter > 1: self.learn.xb = (torch.cat([self.x]*3, 1),)
    m = Largest(nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Linear(1, 1)).double(), 200)
    out = said(capsys, 32, Callback(before_batch=grow), accum(micro_batch_size='auto'), m=m)[1].splitlines()
    assert out == [fits, "micro_batch_size='auto': "+split_in_4+averaged]
