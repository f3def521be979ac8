"Rows are the batch's: outputs and inputs whose first dimension is not the samples are not joined or cut, also where it has as many entries by coincidence"
from dataclasses import dataclass

import pytest
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from common import *

BS,MICRO = 16,4

def texts(T, ragged=False, n=48):
    "Sequences of `T` steps and their labels; `ragged`: most are shorter, and padded"
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, T, 5, generator=g)
    y,n_steps = (x[...,0] > 0).long()+2*(x[...,1] > 0).long(),torch.full((n,), T)
    if ragged: n_steps = torch.tensor([T if i%8 == 0 else 2+i%3 for i in range(n)])
    return list(zip(x, n_steps, torch.where(torch.arange(T) < n_steps[:,None], y, -100)))

class Tagger(nn.Module):
    "Its outputs are those of `wrap`, given the scores as [samples, steps, 4] and the last states as [layers, samples, 4]"
    def __init__(self, wrap, layers=1): super().__init__(); self.r,self.o,self.wrap = nn.GRU(5, 4, layers, batch_first=True),nn.Linear(4, 4),wrap
    def forward(self, x, n):
        h,last = self.r(pack_padded_sequence(x, n.cpu(), batch_first=True, enforce_sorted=False))
        return self.wrap(self.o(pad_packed_sequence(h, batch_first=True)[0]), last)

@dataclass
class Output: scores:Tensor

def hugging_face(h, last):
    from transformers.modeling_outputs import TokenClassifierOutput
    return TokenClassifierOutput(loss=None, logits=h, hidden_states=(h, h*2))
def with_loss(h, last):
    out = hugging_face(h, last)
    out['loss'] = h.mean()
    return out
def steps(h): return h.transpose(0, 1)
kinds = dict(
    samples_first=(lambda h, last: h, lambda p: p), time_first=(lambda h, last: steps(h), steps), steps=(lambda h, last: list(steps(h)), lambda p: torch.stack(p, 1)),
    tuple_of_steps=(lambda h, last: tuple(steps(h)), lambda p: torch.stack(p, 1)), states=(lambda h, last: (h, last), lambda p: p[0]),
    number=(lambda h, last: (h, float(h.sum())), lambda p: p[0]), scalar=(lambda h, last: (h, h.mean()), lambda p: p[0]), nothing=(lambda h, last: dict(h=h, extra=None), lambda p: p['h']),
    per_sample=(lambda h, last: list(h), torch.stack), object=(lambda h, last: Output(h), lambda p: p.scores), hugging_face=(hugging_face, lambda p: p.logits), with_loss=(with_loss, lambda p: p.logits))
joined = 'samples_first','steps','tuple_of_steps','per_sample','nothing','hugging_face'  # with texts of one length

def run(kind, T, *cbs, ragged=False, layers=1, bs=BS, n_epoch=2):
    wrap,scores = kinds[kind]
    def loss(pred, targ):
        pred = scores(pred)
        return F.cross_entropy(pred.flatten(0, 1), targ[:,:pred.shape[1]].flatten())
    def right(pred, targ): return (scores(pred).argmax(2) == targ[:,:scores(pred).shape[1]])[targ[:,:scores(pred).shape[1]] >= 0].float().mean()
    torch.manual_seed(0)
    ds = texts(T, ragged)
    dls = DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds[:BS], bs=BS))
    dls.n_inp = 2
    learn = Learner(dls, Tagger(wrap, layers), loss_func=loss, opt_func=SGD, cbs=cbs, metrics=right)
    learn.recorder.train_metrics = not ragged  # else the mean of pieces is not that of their batch
    preds = []
    learn.add_cb(Callback(after_batch=lambda self: self.training and preds.append(scores(self.pred).detach())))
    with learn.no_bar(), learn.no_logging(): learn.fit(n_epoch, .5)
    learn.preds = preds
    return learn

cases = pytest.mark.parametrize('kind,ragged', [(k, o) for k in kinds for o in (False, True) if not (o and k == 'per_sample')])
def count(learn): return (learn.y != -100).sum()

@pytest.mark.thin(3)
@pytest.mark.filterwarnings('ignore:validation batches are not split', 'ignore:could not check', 'ignore:accumulation is not exact')
@pytest.mark.parametrize('T', [4, 6])
@cases
def test_pieces(kind, ragged, T):
    "4 steps are as many as the samples of a piece; 4 layers of states, too"
    layers = 4 if kind == 'states' else 1
    learn,whole = (run(kind, T, *cbs, ragged=ragged, layers=layers) for cbs in ([GradientAccumulation(micro_batch_size=MICRO, num_items=count)], []))
    assert_same(weights(learn), weights(whole), 1e-6)
    assert (weights(learn)-weights(Tagger(None, layers))).abs().max() > 1e-3
    assert_same(floats(learn.recorder.values), floats(whole.recorder.values), 1e-6)  # validation, and the metrics of training
    assert len(floats(learn.recorder.values)[0]) == (3 if ragged else 4)
    if kind in joined and not ragged: assert_same(torch.cat(learn.preds), torch.cat(whole.preds), 1e-6)
    elif not ragged: assert all(len(o) < BS for o in learn.preds)

@pytest.mark.thin(4)
@pytest.mark.parametrize('T', [4, 6])
@cases
def test_gradient_cache(kind, ragged, T):
    "The loss needs the outputs of the whole batch: these are right, or an error"
    layers = 4 if kind == 'states' else 1
    whole = run(kind, T, ragged=ragged, layers=layers)
    try: learn = run(kind, T, GradientCache(MICRO), ragged=ragged, layers=layers)
    except ValueError as e: assert 'cannot join outputs' in str(e) and (ragged or kind not in joined) and '\n' not in str(e).split(':\n\t')[-1]
    else:
        assert kind in joined
        assert_same(weights(learn), weights(whole), 1e-6)
        assert_same(floats(learn.recorder.values), floats(whole.recorder.values), 1e-6)

# Inputs

class TimeFirst(nn.Module):
    "Takes [steps, samples, 5], and gives scores for each sample, or for each step"
    def __init__(self, per_step): super().__init__(); self.r,self.o,self.per_step = nn.GRU(5, 8),nn.Linear(8, 4),per_step
    def forward(self, x):
        h = self.o(self.r(x)[0])
        return h if self.per_step else h[-1]

def time_first(T, per_step, *cbs, bs=BS, swap=True):
    torch.manual_seed(0)
    ds = [(x, y if per_step else y[-1]) for x,_,y in texts(T)]
    def collate(b):
        x,y = (torch.stack(o, 1) if o[0].ndim else torch.stack(o) for o in zip(*b))
        return (x, y) if swap else (x.transpose(0, 1), y.transpose(0, 1))
    dls = DataLoaders(DataLoader(ds, bs=bs, create_batch=collate), DataLoader(ds[:BS], bs=BS, create_batch=collate))
    return fit(Learner(dls, TimeFirst(per_step), loss_func=CrossEntropyLossFlat(), opt_func=SGD, cbs=cbs), 2, .5)

@pytest.mark.parametrize('T', [6, BS])
@pytest.mark.parametrize('per_step', [False, True])
@pytest.mark.parametrize('cb', [lambda: GradientAccumulation(micro_batch_size=MICRO), lambda: GradientAccumulation(2*BS, micro_batch_size=MICRO), lambda: GradientCache(MICRO)])
def test_time_first_is_not_split(cb, per_step, T):
    with pytest.raises(ValueError, match='cannot split a tensor of shape|cannot split a .*dimension must be the samples'): time_first(T, per_step, cb())

@pytest.mark.parametrize('T', [6, BS])
@pytest.mark.parametrize('per_step', [False, True])
@pytest.mark.parametrize('cb,bs', [(lambda: ActivationCheckpointing(), BS), (lambda: GradientAccumulation(micro_batch_size='auto'), BS), (lambda: GradientAccumulation(micro_batch_size=BS), BS),
                                   (lambda: GradientAccumulation(BS), BS//2), (lambda: GradientCache('auto'), BS)])
def test_time_first_as_a_whole(cb, bs, per_step, T):
    small,big = time_first(T, per_step, cb(), bs=bs),time_first(T, per_step)
    assert_same(weights(small), weights(big), 1e-6)
    assert_same(floats(small.recorder.values), floats(big.recorder.values), 1e-6)
