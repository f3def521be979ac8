"The line that a first step prints: how a window is made up, and what differs from one batch"
import pytest
import fastai.callback.schedule

from common import *

def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(.3), nn.Linear(4, 1)).double()

def said(capsys, bs, cbs, m=None, loss_func=mse, n=128, **kwargs):
    "What a fit of one epoch prints"
    capsys.readouterr()
    learn = make_learner(bs, n=n, cbs=cbs, m=m, loss_func=loss_func, **kwargs)
    fit_aloud(learn, 1)
    return capsys.readouterr().out

averaged,differs = '; losses are averaged as in one batch','; statistics are of {} at a time in 1 BatchNorm1d; random numbers differ'
remedy = '; ActivationCheckpointing() avoids this'
alone = '32 samples are one batch: a smaller micro_batch_size splits it'
accum,schedule = GradientAccumulation,GradientAccumulationSchedule

@pytest.mark.parametrize('bs, cb, m, line', [
    (8, lambda: accum(32), model, '32 = 4 x 8 samples'+averaged),
    (8, lambda: accum(32), normed, '32 = 4 x 8 samples'+averaged+differs.format(8)),
    (32, lambda: accum(32, micro_batch_size=8), normed, '32 = 4 x 8 samples'+averaged+differs.format(8)+remedy),
    (32, lambda: accum(64, micro_batch_size=7), model, '64 = 10 x up to 7 samples'+averaged),
    (32, lambda: accum(32), normed, alone),
    (32, lambda: accum(64, micro_batch_size='auto'), model, "micro_batch_size='auto': each batch of 32 fits in memory; 64 = 2 x 32 samples"+averaged),
    (32, lambda: accum(micro_batch_size='auto'), normed, "micro_batch_size='auto': each batch of 32 fits in memory"),
    (8, lambda: schedule(8, 32), normed, '8 to 32 samples, 8 at a time'+differs.format(8)),
    (32, lambda: [accum(64), GradientCache(8)], normed, '64 = 2 x 32 samples'+averaged+differs.format(8)),
    (32, lambda: accum(exact=True), normed, 'exact=True: each batch of 32 fits in memory'),
    (32, lambda: [accum(exact=True), ActivationCheckpointing()], normed, 'ActivationCheckpointing: each batch of 32 fits in memory')])
def test_a_line(capsys, bs, cb, m, line): assert said(capsys, bs, cb(), m()) == line+'\n'

def test_layers_that_do_not_train_differ_in_nothing(capsys):
    class Frozen(Callback):
        order = GradientAccumulation.order-1
        def before_train(self): self.model.eval()
    assert said(capsys, 8, [accum(32), Frozen()], normed()) == f'32 = 4 x 8 samples{averaged}\n'

@pytest.mark.parametrize('layer', [nn.Dropout(0.), nn.PairwiseDistance, nn.LayerNorm(4), nn.InstanceNorm1d(4)])
def test_what_is_neither_batchnorm_nor_dropout(capsys, layer):
    m = nn.Sequential(nn.Linear(5, 4), layer if isinstance(layer, nn.Module) else nn.Identity(), nn.Linear(4, 1)).double()
    m.distance = nn.Identity()
    if not isinstance(layer, nn.Module): m[1].distance = layer(2)  # its p is no rate
    assert said(capsys, 8, accum(32), m) == f'32 = 4 x 8 samples{averaged}\n'

@pytest.mark.parametrize('module', [nn.Dropout(.1), nn.AlphaDropout(.1), nn.LSTM(4, 4, 2, dropout=.1), nn.TransformerEncoderLayer(4, 2, 8, dropout=.1)])
def test_modules_with_dropout(capsys, module):
    class First(nn.Module):
        def forward(self, x): return x[0] if isinstance(x, tuple) else x
    def m(): return nn.Sequential(nn.Linear(5, 4), module, First(), nn.Linear(4, 1)).double()
    class Frozen(Callback):
        order = GradientAccumulation.order-1
        def before_train(self): self.model.eval()
    assert said(capsys, 8, accum(32), m()) == f'32 = 4 x 8 samples{averaged}; random numbers differ\n'
    assert said(capsys, 8, [accum(32), Frozen()], m()) == f'32 = 4 x 8 samples{averaged}\n'

def test_a_loss_that_is_not_a_mean(capsys):
    def spread(pred, targ): return (pred-targ).std().float()
    with pytest.warns(match='accumulation is not exact for this loss'):
        assert '; losses are not averaged as in one batch' in said(capsys, 8, accum(32), loss_func=spread)

def test_a_loss_that_cannot_be_checked(capsys):
    "It is said that its mean is unknown, or that `num_items` tells it"
    def noisy(pred, targ): return F.mse_loss(pred+torch.rand(()), targ).float()
    with pytest.warns(match='could not check'): assert '; losses may not be averaged as in one batch' in said(capsys, 8, accum(32), loss_func=noisy)
    assert '; losses are averaged by num_items' in said(capsys, 8, accum(32, num_items=lambda learn: len(learn.yb[0])), loss_func=noisy)

def test_num_items_are_checked(capsys):
    "A count that fits the loss, and one that does not: the mean over two of three samples"
    def some(pred, targ): return ((pred-targ)**2)[targ > -.5].mean().float()
    for count,line in ((lambda learn: (learn.y > -.5).sum(), averaged), (lambda learn: len(learn.y), '; losses are not averaged as in one batch')):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore', UserWarning)
            assert line in said(capsys, 8, accum(32, num_items=count), loss_func=some)

def test_once_for_each_setting(capsys):
    learn = make_learner(32, n=128, cbs=accum(32, micro_batch_size=8))
    for change,size in ((None, 8), (None, None), (16, 16), (None, None)):
        if change: learn.gradient_accumulation.micro_batch_size = change
        fit_aloud(learn, 2)
        assert capsys.readouterr().out == (f'32 = {32//size} x {size} samples{averaged}\n' if size else '')

def test_silence(capsys):
    "With `no_logging` and `verbose=False`; the next fit aloud says it"
    assert said(capsys, 8, accum(32, verbose=False)) == ''
    assert said(capsys, 32, accum(exact=True, verbose=False)) == said(capsys, 32, accum(micro_batch_size='auto', verbose=False)) == ''
    learn = make_learner(8, cbs=accum(32))
    fit(learn, 1)
    assert capsys.readouterr().out == ''
    fit_aloud(learn, 1)
    assert capsys.readouterr().out.startswith('32 = 4 x 8')
    with pytest.raises(TypeError, match='verbose must be True or False'): accum(32, verbose=1)

def test_lr_find_prints_nothing(capsys):
    learn = make_learner(8, n=400, cbs=accum(32))
    with learn.no_bar(): learn.lr_find(show_plot=False)
    assert ' = 4 x 8' not in capsys.readouterr().out
    fit_aloud(learn, 1)
    assert capsys.readouterr().out.startswith('32 = 4 x 8')

def test_it_is_printed_for_a_larger_image_that_needs_smaller_pieces(capsys):
    "A later batch of the same fit changes the size"
    class Area(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(1, 1).double()
        def forward(self, x):
            if torch.is_grad_enabled() and x.numel() > 200: raise torch.OutOfMemoryError('CUDA out of memory')
            return self.lin(x.mean(1, keepdim=True))
    class Grow(Callback):
        def before_batch(self):
            if self.training and self.iter > 1: self.learn.xb = tuple(torch.cat([x, x, x], 1) for x in self.xb)
    out = said(capsys, 32, [Grow(), accum(micro_batch_size='auto')], Area())
    assert out.splitlines() == ["micro_batch_size='auto': each batch of 32 fits in memory", "micro_batch_size='auto': each batch of 32 is split into 4 micro-batches of 8"+averaged]
