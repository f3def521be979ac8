"Language models in micro-batches: each row continues from its own hidden state"
from contextlib import nullcontext

import pytest
from fastai.text.all import AWD_LSTM, LMDataLoader, LMTensorText, awd_lstm_lm_config, language_model_learner
from fastai.callback.rnn import ModelResetter

from common import *
from fastxtend_accum.memory.hidden_state import hidden_state

FLOAT32 = 2e-5
N,VALID,VOCAB = 16,12,41  # rows in training and in validation; no width of the model is a multiple of a micro-batch
def split(n, accum=None): return GradientAccumulation(accum, micro_batch_size=n)
each = pytest.mark.parametrize('make', [split, GradientCache])

class Texts(list):
    def new_empty(self): return self  # `export` asks for it

def streams(n):
    "A text of `n` rows of 41 tokens, each of which often follows from the one before"
    torch.manual_seed(n)
    x = torch.randint(2, VOCAB, (n*41,))
    for i in range(1, len(x)): x[i] = (x[i-1]*7+3)%(VOCAB-2)+2 if torch.rand(()) < .6 else x[i]
    return Texts([(LMTensorText(x),)])

def loaders(*rows): return DataLoaders(*[LMDataLoader(streams(n), bs=n, seq_len=10) for n in rows or (N, VALID)])

class States(Callback):
    "The hidden state of all rows after each batch"
    order = 100
    def before_fit(self): self.seen = []
    def after_batch(self): self.seen.append(torch.cat([t.flatten() for t in now(self.learn)]))
def now(learn): return [t.clone() for pair in learn.model[0].hidden for t in pair]

def lm(*cbs, dropout=False, **kwargs):
    dls = loaders()
    dls.vocab = [str(i) for i in range(VOCAB)]
    set_seed(0)
    config = awd_lstm_lm_config | dict(emb_sz=8, n_hid=16, n_layers=2)
    learn = language_model_learner(dls, AWD_LSTM, config=config, pretrained=False, opt_func=SGD, metrics=accuracy,
                                   cbs=[States(), *cbs], **kwargs)
    for p in learn.model.parameters(): p.data.mul_(3)  # so that the state and the regularizers count
    for o in learn.model.modules() if not dropout else []:
        for k in {'p','embed_p','weight_p'} & vars(o).keys(): setattr(o, k, 1e-12 if k == 'weight_p' else 0.)
    return learn

def trained(*cbs, **kwargs):
    learn = lm(*cbs, **kwargs)
    set_seed(1)
    return fit(learn, 2, 1.)

@pytest.fixture(scope='module')
def whole(): return [trained(dropout=o) for o in (False, True)]

def assert_equal_fits(a, b, tol=FLOAT32, loss_tol=1e-5):
    assert_same(weights(a), weights(b), tol)
    assert_same(losses(a), losses(b), loss_tol)
    assert_same([o[:2] for o in floats(a.recorder.values)], [o[:2] for o in floats(b.recorder.values)], loss_tol)
    for s,t in zip(a.states.seen, b.states.seen, strict=True): assert_same(s, t, tol)

def differ(a, b): return (weights(a)-weights(b)).abs().max() > 50*FLOAT32

# The same fit

@pytest.mark.parametrize('n', [8, 5, 4])
@each
def test_equals_the_whole_batch(whole, make, n):
    "Weights, losses, hidden states; also with fastai's regularizers"
    assert_equal_fits(trained(make(n)), whole[0])
    assert differ(whole[0], lm())

def test_the_check_notices(whole, monkeypatch):
    "States that are not those of the rows, and regularizers that are left out"
    for o in dict(alpha=0.),dict(beta=0.): assert differ(trained(**o), whole[0])
    for o in 'memory.micro_batches','cache': monkeypatch.setattr(f'fastxtend_accum.{o}.state_owners', lambda m: [])
    for make in split,GradientCache: assert differ(trained(make(8)), whole[0])

def test_several_loader_batches_in_a_window():
    a,b = trained(split(5, 32)),trained(GradientAccumulation(32))
    assert_equal_fits(a, b)
    assert a.recorder.accum_bs == b.recorder.accum_bs == [32]*4

# Memory runs out

class RunsOut(Callback):
    "At each of `at`, in a pass of the decoder, when the encoder's state has moved on"
    def __init__(self, where, *at): self.where,self.at,self.n = where,at,0
    def before_fit(self): self.learn.model[1].register_forward_hook(self.after_forward)
    def fail(self, *args):
        self.n += 1
        if self.n in self.at: raise torch.OutOfMemoryError('out of memory')
    def after_forward(self, m, args, out):
        if self.training == (self.where == 'validation'): return
        if self.where != 'backward': self.fail()
        elif out[0].requires_grad: out[0].register_hook(self.fail)

@pytest.mark.thin(5)
@pytest.mark.parametrize('at', [(1,), (2,3), (3,4), (2,5,6)])
@pytest.mark.parametrize('where,make', [('validation', split), ('validation', GradientCache), *[
    (o, make) for o in ('forward','backward') for make in (split, GradientCache, lambda n: ActivationCheckpointing())]])
def test_memory_runs_out(whole, make, where, at):
    "Recomputed blocks have all the dropout, bit for bit"
    ran_out,cb,is_valid = RunsOut(where, *at),make('auto'),where == 'validation'
    is_exact = isinstance(cb, ActivationCheckpointing)
    with nullcontext() if is_valid or at == (1,) else pytest.warns(UserWarning, match='out of memory in training'):
        learn = trained(ran_out, cb, dropout=is_exact)
    assert ran_out.n > 8 and (is_valid or (cb.level if is_exact else cb.micro_bs < N))
    assert_equal_fits(learn, whole[is_exact], *[0., 0.]*is_exact)

@pytest.mark.thin(5)
@pytest.mark.parametrize('error', [KeyboardInterrupt, CancelBatchException, CancelFitException])
@pytest.mark.parametrize('at', [3, 4])
@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'after_backward'])
def test_a_batch_that_ends_in_between(event, at, error):
    "It is left out: all rows have the state from before it"
    before = []
    see = Callback(before_batch=lambda self: before.append(now(self.learn)))
    learn = lm(split(8), Fault(error, event, at, 100), see)
    learn.remove_cb(ModelResetter)
    with pytest.raises(error) if error is KeyboardInterrupt else nullcontext(): fit(learn, 1, 1.)
    left = before[2] if error is CancelBatchException else now(learn)
    for t,o in zip(left, before[1], strict=True): assert_same(t, o); assert t.shape[1] == N and t.any()

# Prediction, and models of one's own

@pytest.mark.parametrize('micro', [5, 'auto'])
def test_prediction_and_validation(whole, micro):
    learn,plain = lm(split(micro)),whole[0]
    learn.model.load_state_dict(plain.model.state_dict())
    with quiet(learn), quiet(plain):
        for dl in learn.dls:
            a,b = ([*o.get_preds(dl=dl, reorder=False), *o.validate(dl=dl)] for o in (learn, plain))
            for p,q in zip(a, b, strict=True): assert_same(torch.as_tensor(p), torch.as_tensor(q), 1e-5)
        for o in learn,plain: o.model.reset()
        for tokens in [[3, 8, 5]],[[4]]:  # as `LMLearner.predict` asks for one word after another
            a,b = (o.get_preds(dl=[(torch.tensor(tokens),)])[0] for o in (learn, plain))
            assert_same(a, b, 1e-6)

def test_export_in_mid_fit():
    "The exported model has the states of all rows, and the fit goes on"
    class Exports(Callback):
        order = 100
        def after_batch(self):
            if self.training and self.train_iter == 1: self.learn.export(Path('lm.pkl').absolute())
    def run(*cbs):
        learn = lm(split(8, 32), *cbs)
        learn.remove_cb(States)
        return fit(learn, 1, 1.)
    learn,loaded = run(Exports()),load_learner('lm.pkl')
    assert loaded.model[0].bs == N and all(t.shape[1] == N and t.any() for t in now(loaded))
    assert_same(weights(learn), weights(run()))

class Stream(nn.Module):
    "Predicts the next token from its state, which it keeps in one of four forms"
    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.form,self.emb,self.out = form,nn.Embedding(VOCAB, 8),nn.Linear(16, VOCAB)
        self.rnn = (nn.LSTM if form in ('pair', 'list') else nn.GRU)(8, 16, batch_first=True, num_layers=2)
        if form == 'buffer': self.register_buffer('state', None)
        self.reset()
    def reset(self): self.state = None
    def forward(self, x):
        forms = dict(buffer=[lambda o: o.transpose(0, 1).contiguous()]*2, list=[tuple, list])
        state,(before,after) = self.state,forms.get(self.form, [noop]*2)
        y,state = self.rnn(self.emb(x), state if state is None else before(state))
        self.state = after(to_detach(state, cpu=False))
        return self.out(y)

class Registered(Stream): pass
hidden_state.register(Registered, lambda m, n: dict(state=0 if m.form == 'buffer' else 1))

def own(m, *cbs, n_epoch=2):
    return fit(Learner(loaders(), m, CrossEntropyLossFlat(), opt_func=SGD, cbs=[ModelResetter(), *cbs]), n_epoch, 1.)

@pytest.mark.filterwarnings('ignore:out of memory in training')
@pytest.mark.thin(5)
@pytest.mark.parametrize('form', ['pair', 'list', 'tensor', 'buffer'])
@pytest.mark.parametrize('make,n', [(split, 5), (split, 'auto'), (GradientCache, 5)])
def test_a_model_of_ones_own(form, make, n):
    fails = [Fault(torch.OutOfMemoryError, 'after_pred', 3, 0)]*(n == 'auto')
    big,small = own(Registered(form)),own(Registered(form), make(n), *fails)
    assert_same(weights(small), weights(big), FLOAT32)
    assert_same(floats(small.recorder.values), floats(big.recorder.values), 1e-5)
    class Forgets(Registered):
        def forward(self, x): self.reset(); return super().forward(x)
    assert differ(own(Forgets(form)), big)

@each
def test_outputs_that_cannot_be_joined_in_validation(make):
    "It runs whole, from the states that it began with, and so do those after it"
    class Unjoined(Registered):
        def forward(self, x): return (y := super().forward(x)),y.sum()
    def run(*cbs):
        learn = own(Unjoined('pair'), n_epoch=0)
        learn.loss_func = lambda pred, targ: F.cross_entropy(pred[0].flatten(0, 1), targ.flatten())
        learn.remove_cb(ModelResetter)
        learn.add_cbs(cbs)
        with quiet(learn): return [learn.validate()[0], *learn.model.state]
    whole = run()
    with pytest.warns(UserWarning, match='validation batches are not split'): ours = run(make(5))
    for a,b in zip(ours, whole, strict=True): assert_same(torch.as_tensor(a), torch.as_tensor(b), 1e-6)
    assert whole[1].any()

@each
def test_an_unknown_state_is_an_error(make):
    "It says what to register; also for a part beside a known one. Whole batches are fine"
    class Unknown(Stream): pass
    class Both(nn.Module):
        def __init__(self): super().__init__(); self.a,self.b = Registered('pair'),Unknown('pair')
        def reset(self): self.a.reset(); self.b.reset()
        def forward(self, x): return self.a(x)+self.b(x)
    says = r'Unknown carries its state .* hidden_state\.register\(Unknown, lambda m, n: dict\(state=1\)\)'
    for m in Unknown('pair'),Both():
        for n in 8,'auto':
            with pytest.raises(ValueError, match=says): own(m, make(n))
        own(m, GradientAccumulation(N), n_epoch=1)

def test_a_wrong_entry():
    class Wrong(Stream): pass
    hidden_state.register(Wrong, lambda m, n: dict(state=0))
    with pytest.raises(ValueError, match=r'Wrong\.state has shape .*, where 16 rows should be dimension 0: correct'):
        own(Wrong('tensor'), split(8))
