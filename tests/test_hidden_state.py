"Language models in pieces: each row keeps its own hidden state, against the same Learner with whole batches"
import io
from contextlib import nullcontext, redirect_stdout

import pytest
from fastai.text.all import (AWD_LSTM, LMDataLoader, LMTensorText, ModelResetter, Perplexity, RNNRegularizer, awd_lstm_lm_config,
                             language_model_learner)

from common import *
from fastxtend_accum.demo import Activations
from fastxtend_accum.ways.hidden_state import HiddenState, hidden_state

FLOAT32 = 2e-5
N,VALID,VOCAB = 16,12,41  # rows in training and in validation; no width of the model is a multiple of a piece

class Texts(list):
    def new_empty(self): return self  # `export` asks for it

def streams(n, seed):
    "A text of `n` rows of 41 tokens, each of which often follows from the one before"
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(2, VOCAB, (n*41,), generator=g)
    follows = torch.rand(len(x), generator=g) < .6
    for i in range(1, len(x)):
        if follows[i]: x[i] = (x[i-1]*7+3)%(VOCAB-2)+2
    return Texts([(LMTensorText(x),)])

class States(Callback):
    "The hidden state of all rows after each batch, in training and in validation"
    order = 100
    def before_fit(self): self.seen = []
    def after_batch(self): self.seen.append(torch.cat([t.flatten() for pair in self.learn.model[0].hidden for t in pair]))

def lm(*cbs, dropout=False, seed=0, **kwargs):
    dls = DataLoaders(*[LMDataLoader(streams(n, n), bs=n, seq_len=10) for n in (N, VALID)])
    dls.vocab = [str(i) for i in range(VOCAB)]
    set_seed(seed)
    learn = language_model_learner(dls, AWD_LSTM, config=awd_lstm_lm_config | dict(emb_sz=8, n_hid=16, n_layers=2), pretrained=False,
                                   opt_func=SGD, metrics=[accuracy, Perplexity()], cbs=[States(), *cbs], **kwargs)
    for p in learn.model.parameters(): p.data.mul_(3)  # so that the state and the regularizers count
    for o in learn.model.modules() if not dropout else []:
        for k in {'p','embed_p','weight_p'} & vars(o).keys(): setattr(o, k, 1e-12 if k == 'weight_p' else 0.)
    return learn

def trained(*cbs, n_epoch=2, **kwargs):
    learn = lm(*cbs, **kwargs)
    set_seed(1)
    with redirect_stdout(io.StringIO()): return fit(learn, n_epoch, 1.)

@pytest.fixture(scope='module')
def whole(): return {dropout:trained(dropout=dropout) for dropout in (False, True)}

def assert_equal_fits(a, b, tol=FLOAT32, loss_tol=1e-5):
    assert_same(weights(a), weights(b), tol)
    assert_same(losses(a), losses(b), loss_tol)
    assert_same([o[:2] for o in floats(a.recorder.values)], [o[:2] for o in floats(b.recorder.values)], loss_tol)
    assert len(a.states.seen) == len(b.states.seen)
    for s,t in zip(a.states.seen, b.states.seen): assert_same(s, t, tol)

ways = {'accumulation':GradientAccumulation, 'cache':GradientCache,
        'both':lambda n, **kwargs: [GradientAccumulation(micro_batch_size=n), GradientCache(max(2, n//2), **kwargs)]}
def way(name, n, **kwargs): return L(ways[name](micro_batch_size=n, **kwargs) if name != 'both' else ways[name](n, **kwargs))

# The same fit

@pytest.mark.parametrize('n', [8, 5, 4, 1])
@pytest.mark.parametrize('name', ways)
def test_pieces_are_the_whole_batch(whole, name, n):
    "Weights, losses, hidden states; also with the regularizers, which fastai leaves out for a batch of one row"
    assert_equal_fits(trained(*way(name, n)), whole[False])
    assert (weights(whole[False])-weights(lm())).abs().max() > .01

@pytest.mark.parametrize('share', [1., .97, .9])
def test_exact(whole, share):
    "With all its dropout, bit for bit: no row begins anew, and recomputed blocks leave the states as they are"
    act = Activations()
    trained(act, dropout=True)
    limited = trained(Activations(share*act.mb), cb := GradientAccumulation(exact=True), dropout=True)
    assert (cb.way.level > 0) == (share < 1)
    assert_equal_fits(limited, whole[True], 0., 0.)
    assert (weights(whole[True])-weights(whole[False])).abs().max() > .01

@pytest.mark.parametrize('name', ['accumulation', 'cache'])
def test_auto(whole, name):
    act = Activations()
    trained(act)
    limited = trained(Activations(.6*act.mb), *way(name, 'auto'))
    assert {o.micro_bs for o in limited.cbs if hasattr(o, 'micro_bs')} == {8}
    assert_equal_fits(limited, whole[False])

def test_a_fit_that_forgets_differs(whole, monkeypatch):
    "All of the above would notice"
    monkeypatch.setattr(HiddenState, 'piece', lambda self, start, end: None)
    for name in 'accumulation','cache':
        learn = trained(*way(name, 8))
        assert (weights(learn)-weights(whole[False])).abs().max() > 50*FLOAT32
        assert abs(learn.recorder.values[-1][1]-whole[False].recorder.values[-1][1]) > 1e-4

@pytest.mark.parametrize('without', [dict(alpha=0.), dict(beta=0.)])
def test_a_regularizer_counts(whole, without):
    assert (weights(trained(**without))-weights(whole[False])).abs().max() > 50*FLOAT32

def test_a_batch_of_one_row_is_as_in_fastai():
    "Where it is the whole batch, TAR is left out there, too"
    def one(*cbs):
        learn = lm(*cbs)
        learn.dls = DataLoaders(*[LMDataLoader(streams(1, 3), bs=1, seq_len=10)]*2)
        return fit(learn, 1, 1.)
    assert_same(weights(one(GradientAccumulation(micro_batch_size=1))), weights(one()), FLOAT32)

@pytest.mark.parametrize('accum', [32, 64])
def test_several_loader_batches_in_a_window(accum):
    a,b = trained(GradientAccumulation(accum, micro_batch_size=5)),trained(GradientAccumulation(accum))
    assert_equal_fits(a, b)
    assert a.recorder.accum_bs == b.recorder.accum_bs == [accum]*(128//accum)

# Memory runs out

class RunsOut(Callback):
    "Memory runs out once at each of `at`, in a pass of the decoder, when the encoder's state has moved on: forward or backward, training or validation"
    def __init__(self, where, *at): self.where,self.at,self.n,self.hook = where,at,0,None
    def before_fit(self): self.hook = self.learn.model[1].register_forward_hook(self.after_forward)
    def after_fit(self): self.hook.remove()
    def fail(self, *args):
        self.n += 1
        if self.n in self.at: raise torch.OutOfMemoryError('out of memory')
    def after_forward(self, m, args, out):
        if self.where == 'validation' and self.training or self.where != 'validation' and (not self.training or not hasattr(self, 'train_iter')): return
        if self.where != 'backward': self.fail()
        elif out[0].requires_grad: out[0].register_hook(self.fail)

@pytest.mark.parametrize('at', [(1,), (2,), (3,4), (2,5,6)])
@pytest.mark.parametrize('where', ['forward', 'backward', 'validation'])
@pytest.mark.parametrize('name', ['accumulation', 'cache'])
def test_memory_runs_out(whole, name, where, at):
    "In the first batch, too, where it is no surprise"
    warns = where != 'validation' and at != (1,)
    with pytest.warns(UserWarning, match='out of memory in training') if warns else nullcontext(): learn = trained(RunsOut(where, *at), *way(name, 'auto'))
    assert learn.runs_out.n > max(at)
    cb = first(learn.cbs, risinstance((GradientAccumulation,GradientCache)))
    cb = getattr(cb, 'way', cb)
    assert (cb.valid_budget if where == 'validation' else cb.budget).most < math.inf and (where == 'validation' or cb.micro_bs < N)
    assert_equal_fits(learn, whole[False])

@pytest.mark.parametrize('at', [(1,), (3,), (2,3), (4,6)])
@pytest.mark.parametrize('where', ['forward', 'backward'])
def test_memory_runs_out_with_dropout(whole, where, at):
    "The pass that follows draws the same numbers from the same states: bit for bit the plain fit, also where blocks run again from then on"
    with pytest.warns(UserWarning, match='out of memory in training') if at != (1,) else nullcontext():
        learn = trained(RunsOut(where, *at), cb := GradientAccumulation(exact=True), dropout=True)
    assert learn.runs_out.n > max(at) and cb.way.level >= len(at)
    assert_equal_fits(learn, whole[True], 0., 0.)

class Fails(Callback):
    order = 100
    def __init__(self, event, error, at): self.event,self.error,self.at,self.n = event,error,at,0
    def __call__(self, event):
        if event == self.event and self.training:
            self.n += 1
            if self.n == self.at: raise self.error
        return super().__call__(event)

def now(learn): return [t.clone() for pair in learn.model[0].hidden for t in pair]

@pytest.mark.parametrize('error', [KeyboardInterrupt, CancelBatchException, CancelFitException, RuntimeError])
@pytest.mark.parametrize('at', [3, 4])
@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'after_backward'])
def test_a_batch_that_ends_in_between(event, at, error):
    "It is left out: all rows have the state from before it, and not that of a piece"
    before = []
    learn = lm(GradientAccumulation(micro_batch_size=8), Fails(event, error, at), Callback(before_batch=lambda self: before.append(now(learn))))
    learn.remove_cb(ModelResetter)
    with nullcontext() if issubclass(error, (CancelBatchException, CancelFitException)) else pytest.raises(error): fit(learn, 1, 1.)
    left = before[2] if error is CancelBatchException else now(learn)
    assert learn.model[0].bs == (VALID if error is CancelBatchException else N)
    assert all(t.shape[1] == N and t.any() for t in left)
    for t,o in zip(left, before[1], strict=True): assert_same(t, o)

@pytest.mark.parametrize('name', ['accumulation', 'cache'])
def test_outputs_that_cannot_be_joined_in_validation(name):
    "The batch runs whole, from the states that it began with, and so do the batches after it"
    class Unjoined(Registered):
        def forward(self, x):
            y = super().forward(x)
            return y if self.training else (y, y.sum())
    hidden_state.register(Unjoined, hidden_state.dispatch(Registered))
    def run(*cbs):
        learn = own(make('pair', Unjoined), n_epoch=0)
        learn.loss_func = lambda pred, targ: F.cross_entropy((pred if isinstance(pred, Tensor) else pred[0]).flatten(0, 1), targ.flatten())
        learn.remove_cb(ModelResetter)
        learn.add_cbs(cbs)
        with quiet(learn): return learn.validate()[0],learn.model.state
    (a,states),(b,expected) = run(),run()
    with pytest.warns(UserWarning, match='validation batches are not split'): b,expected = run(*way(name, 5))
    assert_same(a, b, 1e-6)
    for s,t in zip(states, expected, strict=True): assert_same(s, t, 1e-6); assert s.any()

# What is no part of training leaves the state alone

@pytest.mark.parametrize('micro', [5, 'auto'])
def test_prediction_and_validation_in_pieces(whole, micro):
    learn = lm(GradientAccumulation(micro_batch_size=micro))
    learn.model.load_state_dict(whole[False].model.state_dict())
    for dl in learn.dls:
        with quiet(learn), quiet(whole[False]): a,b = ([*o.get_preds(dl=dl, reorder=False), o.validate(dl=dl)[0]] for o in (learn, whole[False]))
        for p,q in zip(a, b): assert_same(torch.as_tensor(p), torch.as_tensor(q), 1e-5)
    with learn.no_bar():
        for o in learn,whole[False]: o.model.reset()
        for tokens in [[3, 8, 5]],[[4]]:  # as `LMLearner.predict` asks for one word after another
            a,b = (o.get_preds(dl=[(torch.tensor(tokens),)])[0] for o in (learn, whole[False]))
            assert_same(a, b, 1e-6)

def test_export_in_mid_fit(tmp_path):
    "The exported model has the states of all rows"
    class InMidFit(Callback):
        def after_batch(self):
            if self.training and self.train_iter == 2: self.learn.export(tmp_path/'lm.pkl')
    learn = lm(GradientAccumulation(micro_batch_size=8))
    learn.remove_cb(States)
    fit(learn, 1, 1., cbs=InMidFit())
    loaded = load_learner(tmp_path/'lm.pkl')
    assert loaded.model[0].bs == N and all(t.shape[1] == N and t.any() for t in now(loaded))

# Models of one's own

class Stream(nn.Module):
    "Predicts the next token from its state, which it keeps in one of four ways"
    def __init__(self, kind):
        super().__init__()
        self.kind,self.emb,self.out = kind,nn.Embedding(VOCAB, 8),nn.Linear(16, VOCAB)
        self.rnn = (nn.LSTM if kind in ('pair', 'list') else nn.GRU)(8, 16, batch_first=True, num_layers=2)
        if kind == 'buffer': self.register_buffer('state', None)
        self.reset()
    def reset(self): self.state = None
    def forward(self, x):
        state = self.state
        if state is not None and self.kind == 'buffer': state = state.transpose(0, 1).contiguous()
        if state is not None and self.kind == 'list': state = tuple(state)
        y,state = self.rnn(self.emb(x), state)
        state = to_detach(state, cpu=False)
        self.state = state.transpose(0, 1) if self.kind == 'buffer' else list(state) if self.kind == 'list' else state
        return self.out(y)

class Registered(Stream): pass
hidden_state.register(Registered, lambda m, n: dict(state=0 if m.kind == 'buffer' else 1))

def own(m, *cbs, n_epoch=2):
    dls = DataLoaders(*[LMDataLoader(streams(n, n), bs=n, seq_len=10) for n in (N, VALID)])
    learn = Learner(dls, m, CrossEntropyLossFlat(), opt_func=SGD, cbs=[ModelResetter(), *cbs])
    with redirect_stdout(io.StringIO()): return fit(learn, n_epoch, 1.)

def make(kind, cls=Registered):
    torch.manual_seed(0)
    return cls(kind)

@pytest.mark.parametrize('kind', ['pair', 'list', 'tensor', 'buffer'])
@pytest.mark.parametrize('name, n', [('accumulation', 5), ('accumulation', 'auto'), ('cache', 5)])
def test_a_model_of_ones_own(kind, name, n):
    "In an `nn.Sequential`, too, which has no `reset` itself"
    big,small = own(make(kind)),own(make(kind), *way(name, n), *([RunsOut2(5)] if n == 'auto' else []))
    assert_same(weights(small), weights(big), FLOAT32)
    assert_same([o[:2] for o in floats(small.recorder.values)], [o[:2] for o in floats(big.recorder.values)], 1e-5)
    class Forgets(Registered):
        def forward(self, x): self.reset(); return super().forward(x)
    assert (weights(own(make(kind, Forgets)))-weights(big)).abs().max() > 50*FLOAT32

class RunsOut2(Callback):
    "Memory runs out at the pass number `at`, once the state has moved on"
    def __init__(self, at): self.at,self.n = at,0
    def after_pred(self):
        self.n += self.training
        if self.training and self.n == self.at: raise torch.OutOfMemoryError('out of memory')

@pytest.mark.parametrize('name', ['accumulation', 'cache'])
@pytest.mark.parametrize('n', [8, 'auto'])
def test_an_unknown_state_is_an_error(name, n):
    "It says what to register; a part with a `reset` beside a known one is found as well"
    class Unknown(Stream): pass
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b = Registered('pair'),Unknown('pair')
        def reset(self): self.a.reset(); self.b.reset()
        def forward(self, x): return self.a(x)+self.b(x)
    for m in Unknown('pair'),Both():
        with pytest.raises(ValueError, match=r'Unknown carries its state .* hidden_state\.register\(Unknown, lambda m, n: dict\(state=1\)\)'):
            own(m, *way(name, n))

@pytest.mark.parametrize('dims, says', [(0, r'Wrong\.state has shape \(2, 8, 16\) for 8 rows, which should be dimension 0'),
                                        (5, r'for 8 rows, which should be dimension 5')])
def test_a_wrong_entry(dims, says):
    class Wrong(Stream): pass
    hidden_state.register(Wrong, lambda m, n: dict(state=dims))
    with pytest.raises((ValueError, IndexError), match=says): own(Wrong('tensor'), GradientAccumulation(micro_batch_size=8))
