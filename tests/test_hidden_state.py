"Language models in micro-batches: each row continues from its own hidden state (memory/hidden_state.py)"
from contextlib import nullcontext

import pytest
from fastai.callback.rnn import ModelResetter
from fastai.text.all import AWD_LSTM, LMDataLoader, LMTensorText, awd_lstm_lm_config, language_model_learner

from common import *
from fastxtend_accum.memory.hidden_state import HiddenState, hidden_state, state_owners
from limited_memory import OutOfMemory, run_out_of_memory

FLOAT32 = 2e-5  # rounding of float32 weights
RECORDER = 1e-5  # and of the averages of losses
N_TRAIN = 16  # rows; no width of the model is a multiple of a micro-batch
N_VALID = 12
VOCAB = 41


def split(n, accum_bs=None): return GradientAccumulation(accum_bs, micro_batch_size=n)


each_saver = pytest.mark.parametrize('saver', [split, GradientCache])
warns_later = pytest.mark.filterwarnings('ignore:out of memory in training')


# Texts

class Texts(list):
    def new_empty(self): return self  # `export` asks for it


def texts(n):
    "Returns a text of `n` rows of 41 tokens, each of which often follows from the one before"
    torch.manual_seed(n)
    tokens = torch.randint(2, VOCAB, (n*41,))
    for i in range(1, len(tokens)):
        follows = torch.rand(()) < .6
        if not follows: continue
        next_one = tokens[i-1]*7+3
        tokens[i] = next_one%(VOCAB-2)+2
    return Texts([(LMTensorText(tokens),)])


def text_loaders():
    loaders = [LMDataLoader(texts(n), bs=n, seq_len=10) for n in (N_TRAIN, N_VALID)]
    dls = DataLoaders(*loaders)
    dls.vocab = [str(i) for i in range(VOCAB)]
    return dls


# fastai's AWD_LSTM

class States(Callback):
    "Keeps the hidden state of all rows after each batch"
    order = 100

    def before_fit(self): self.seen = []
    def after_batch(self): self.seen.append(torch.cat([o.flatten() for o in states_of(self.learn)]))


def states_of(learn):
    "Returns copies of the hidden states, layer by layer"
    res = []
    for hidden, cell in learn.model[0].hidden: res += [hidden.clone(), cell.clone()]
    return res


def lm(*cbs, has_dropout=False, **kwargs):
    set_seed(0)
    config = dict(awd_lstm_lm_config, emb_sz=8, n_hid=16, n_layers=2)
    learn = language_model_learner(
        text_loaders(), AWD_LSTM, config=config, pretrained=False, opt_func=SGD, metrics=accuracy,
        cbs=[States(), *cbs], **kwargs)
    for p in learn.model.parameters(): p.data.mul_(3)  # so that the state and the regularizers count
    if not has_dropout: turn_dropout_off(learn.model)
    return learn


def turn_dropout_off(m):
    for o in m.modules():
        for name in ('p', 'embed_p'):
            if name in vars(o): setattr(o, name, 0.)
        if 'weight_p' in vars(o): o.weight_p = 1e-12  # with 0, the weights that are dropped out would be others


def trained(*cbs, **kwargs):
    learn = lm(*cbs, **kwargs)
    set_seed(1)
    return fit(learn, 2, 1.)


@pytest.fixture(scope='module')
def plain(): return trained()


@pytest.fixture(scope='module')
def plain_with_dropout(): return trained(has_dropout=True)


def logged_losses(learn):
    "Returns the losses in training and validation of each epoch"
    return [row[:2] for row in floats(learn.recorder.values)]


def assert_equal_fits(a, b, tol=FLOAT32, loss_tol=RECORDER):
    assert_same(weights(a), weights(b), tol)
    assert_same(losses(a), losses(b), loss_tol)
    assert_same(logged_losses(a), logged_losses(b), loss_tol)
    for state_a, state_b in zip(a.states.seen, b.states.seen, strict=True): assert_same(state_a, state_b, tol)


def assert_other_fits(a, b):
    difference = weights(a)-weights(b)
    assert difference.abs().max() > 50*FLOAT32


@pytest.mark.parametrize('n', [8, 5, 4])
@each_saver
def test_the_fit_is_that_of_whole_batches(plain, saver, n):
    "Weights, losses and hidden states, with fastai's regularizers"
    assert_equal_fits(trained(saver(n)), plain)
    assert_other_fits(plain, lm())


@pytest.mark.parametrize('setting', ['alpha', 'beta'])
def test_the_regularizers_count(plain, setting):
    "Else the test before this one would not notice if they were left out"
    assert_other_fits(trained(**{setting: 0.}), plain)


@each_saver
def test_without_states_of_its_own_for_each_row_the_fit_is_another_one(plain, saver, monkeypatch):
    def no_owners(m): return []
    monkeypatch.setattr('fastxtend_accum.memory.micro_batches.state_owners', no_owners)
    monkeypatch.setattr('fastxtend_accum.cache.state_owners', no_owners)
    assert_other_fits(trained(saver(8)), plain)


def test_windows_of_several_loader_batches():
    ours = trained(split(5, 32))
    whole = trained(GradientAccumulation(32))
    assert_equal_fits(ours, whole)
    assert ours.recorder.accum_bs == whole.recorder.accum_bs == [32, 32, 32, 32]


# Memory runs out

class FailsInDecoder(Callback):
    "Lets memory run out in a pass of the decoder, when the encoder's state has moved on, at each of these times"
    def __init__(self, where, times):
        self.where = where
        self.times = times
        self.count = 0

    def before_fit(self): self.learn.model[1].register_forward_hook(self.after_decoder)

    def after_decoder(self, m, args, output):
        is_counted = self.training == (self.where != 'validation')
        if not is_counted: return
        if self.where != 'backward': self.strike()
        elif output[0].requires_grad: output[0].register_hook(self.strike)

    def strike(self, *args):
        self.count += 1
        if self.count in self.times: run_out_of_memory()


@warns_later
@pytest.mark.filterwarnings('ignore:outputs have hooks')  # by which memory runs out in the backward pass
@pytest.mark.thin(5)
@pytest.mark.parametrize('times', [(1,), (2, 3), (3, 4), (2, 5, 6)])
@pytest.mark.parametrize('where', ['forward', 'backward', 'validation'])
@each_saver
def test_memory_runs_out(plain, saver, where, times):
    fails = FailsInDecoder(where, times)
    saver = saver('auto')
    assert_equal_fits(trained(fails, saver), plain)
    assert fails.count > 8
    if where != 'validation': assert saver.micro_bs < N_TRAIN


@warns_later
@pytest.mark.thin(5)
@pytest.mark.parametrize('times', [(1,), (2, 3), (2, 5, 6)])
@pytest.mark.parametrize('where', ['forward', 'backward'])
def test_memory_runs_out_with_recomputed_blocks(plain_with_dropout, where, times):
    "Bit for bit, with all of fastai's dropout"
    fails = FailsInDecoder(where, times)
    saver = ActivationCheckpointing()
    ours = trained(fails, saver, has_dropout=True)
    assert fails.count > 8
    assert saver.level
    assert_equal_fits(ours, plain_with_dropout, 0., 0.)


# Batches that end in between

def lm_that_keeps_states(*cbs):
    "fastai resets them at the end of an epoch"
    learn = lm(split(8), *cbs)
    learn.remove_cb(ModelResetter)
    return learn


class StatesBefore(Callback):
    def before_fit(self): self.seen = []
    def before_batch(self): self.seen.append(states_of(self.learn))


def assert_states_of_all_rows(states, expected):
    for state, other in zip(states, expected, strict=True):
        assert_same(state, other)
        assert state.shape[1] == N_TRAIN
        assert state.any()


each_micro_batch = pytest.mark.parametrize('nth', [3, 4])  # the two of the second batch


@each_micro_batch
@pytest.mark.parametrize('event', ['after_pred', 'before_backward', 'after_backward'])
@pytest.mark.parametrize('error', [KeyboardInterrupt, CancelFitException])
def test_an_interrupted_batch_leaves_the_states_from_before_it(error, event, nth):
    learn = lm_that_keeps_states(Fault(error, event, nth, 100), StatesBefore())
    expects_error = pytest.raises(error) if error is KeyboardInterrupt else nullcontext()
    with expects_error: fit(learn, 1, 1.)
    assert_states_of_all_rows(states_of(learn), learn.states_before.seen[1])


@each_micro_batch
@pytest.mark.parametrize('event', ['after_pred', 'before_backward'])
def test_a_cancelled_batch_leaves_the_states_from_before_it(event, nth):
    learn = lm_that_keeps_states(Fault(CancelBatchException, event, nth, 100), StatesBefore())
    fit(learn, 1, 1.)
    _, before, after, *_ = learn.states_before.seen
    assert_states_of_all_rows(after, before)


class LooksAtLoss(Callback):
    def after_loss(self): self.learn.loss.item()


def test_a_callback_beside_the_regularizers_that_leaves_the_loss_alone_causes_no_warning():
    "They change the loss in `after_loss`, which the other callback has, too"
    fit(lm(split(8), LooksAtLoss()), 1, 1.)


# Prediction and export

@pytest.mark.parametrize('micro', [5, 'auto'])
def test_prediction_and_validation_are_those_of_whole_batches(plain, micro):
    learn = lm(split(micro))
    learn.model.load_state_dict(plain.model.state_dict())
    for dl in learn.dls:
        seen, expected = results(learn, dl), results(plain, dl)
        for a, b in zip(seen, expected, strict=True): assert_same(as_tensor(a), as_tensor(b), RECORDER)


def results(learn, dl):
    with quiet(learn): return [*learn.get_preds(dl=dl, reorder=False), *learn.validate(dl=dl)]


def test_one_word_is_predicted_after_another(plain):
    "As `LMLearner.predict` asks for them: a batch of one row, which continues from the one before"
    def predicted(learn):
        learn.model.reset()
        res = []
        with quiet(learn):
            for words in ([3, 8, 5], [4]):
                batch = (torch.tensor([words]),)
                preds, _ = learn.get_preds(dl=[batch])
                res.append(preds[:, -1])
        return torch.cat(res)
    learn = lm(split(5))
    learn.model.load_state_dict(plain.model.state_dict())
    assert_same(predicted(learn), predicted(plain), 1e-6)


class Exports(Callback):
    "Exports the Learner in the middle of a fit"
    order = 100

    def after_batch(self):
        if self.training and self.train_iter == 1: self.learn.export(Path('lm.pkl').absolute())


@pytest.mark.filterwarnings("ignore:load_learner. uses Python's insecure pickle")
def test_a_model_that_is_exported_in_a_fit_has_the_states_of_all_rows():
    "And the fit goes on"
    def run(*cbs):
        learn = lm(split(8, 32), *cbs)
        learn.remove_cb(States)
        return fit(learn, 1, 1.)
    learn = run(Exports())
    loaded = load_learner('lm.pkl')
    assert loaded.model[0].bs == N_TRAIN
    assert all(o.shape[1] == N_TRAIN and o.any() for o in states_of(loaded))
    assert_same(weights(learn), weights(run()))


# Models of one's own

class Stream(nn.Module):
    "Predicts the next token from its state, which is one tensor"
    rnn_class = nn.GRU

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(VOCAB, 8)
        self.rnn = self.rnn_class(8, 16, batch_first=True, num_layers=2)
        self.out = nn.Linear(16, VOCAB)
        self.reset()

    def reset(self): self.state = None
    def as_kept(self, state): return state
    def as_used(self, state): return state

    def forward(self, x):
        state = None if self.state is None else self.as_used(self.state)
        outputs, state = self.rnn(self.emb(x), state)
        self.state = self.as_kept(to_detach(state, cpu=False))
        return self.out(outputs)


class PairStream(Stream):
    rnn_class = nn.LSTM


class ListStream(PairStream):
    def as_kept(self, state): return list(state)
    def as_used(self, state): return tuple(state)


class BufferStream(Stream):
    "Keeps rows first, in a buffer"
    def __init__(self):
        super().__init__()
        del self.state
        self.register_buffer('state', None)

    def as_kept(self, state): return state.transpose(0, 1).contiguous()
    def as_used(self, state): return state.transpose(0, 1).contiguous()


def rows_second(m, n): return dict(state=1)
def rows_first(m, n): return dict(state=0)


class Tensors(Stream): pass
class Pairs(PairStream): pass
class Lists(ListStream): pass
class Buffers(BufferStream): pass


hidden_state.register(Tensors, rows_second)
hidden_state.register(Pairs, rows_second)
hidden_state.register(Lists, rows_second)
hidden_state.register(Buffers, rows_first)
own_streams = [Tensors, Pairs, Lists, Buffers]


def stream_learner(m, *cbs):
    return Learner(text_loaders(), m, CrossEntropyLossFlat(), opt_func=SGD, cbs=[ModelResetter(), *cbs])


@warns_later
@pytest.mark.parametrize('make_cbs', [
    lambda: [split(5)],
    lambda: [split('auto'), OutOfMemory('after_pred', 3)],
    lambda: [GradientCache(5)]])
@pytest.mark.parametrize('stream', own_streams)
def test_a_model_of_ones_own_whose_state_is_registered(stream, make_cbs):
    plain = fit(stream_learner(stream()), 2, 1.)
    ours = fit(stream_learner(stream(), *make_cbs()), 2, 1.)
    assert_same(weights(ours), weights(plain), FLOAT32)
    assert_same(floats(ours.recorder.values), floats(plain.recorder.values), RECORDER)


@pytest.mark.parametrize('stream', own_streams)
def test_the_states_of_these_models_count(stream):
    "Else the test before this one would not notice if they were wrong"
    class Forgets(stream):
        def forward(self, x):
            self.reset()
            return super().forward(x)
    plain = fit(stream_learner(stream()), 2, 1.)
    assert_other_fits(fit(stream_learner(Forgets()), 2, 1.), plain)


class Unjoined(Pairs):
    "Returns a number of the batch beside its output"
    def forward(self, x):
        res = super().forward(x)
        return res, res.sum()


def loss_of_first(pred, targ): return F.cross_entropy(pred[0].flatten(0, 1), targ.flatten())


@each_saver
def test_outputs_that_cannot_be_joined_in_validation_run_whole(saver):
    "From the states that they began with, and so do those after them"
    def run(*cbs):
        learn = Learner(text_loaders(), Unjoined(), loss_of_first, opt_func=SGD, cbs=cbs)
        with quiet(learn): loss, = learn.validate()
        return torch.tensor(loss), *learn.model.state
    expected = run()
    with pytest.warns(match='^validation batches are not split'): ours = run(saver(5))
    assert expected[1].any()
    for a, b in zip(ours, expected, strict=True): assert_same(a, b, 1e-6)


# The states of rows, at the level of the module

class Holder(nn.Module):
    "Has the states of 3 rows in dimension 1, and their number"
    def __init__(self):
        super().__init__()
        self.state = torch.arange(6.).reshape(2, 3)
        self.n = 3


hidden_state.register(Holder, lambda m, n: dict(state=1, n=0))


def test_a_model_sees_the_states_of_its_rows_and_leaves_those_of_all():
    holder = Holder()
    hidden = HiddenState([holder], 3)
    with hidden.at(0, 2):
        assert holder.state.tolist() == [[0, 1], [3, 4]]
        assert holder.n == 2
        holder.state = holder.state*10
    with hidden.at(2, 3):
        assert holder.state.tolist() == [[2], [5]]
        assert holder.n == 1
    assert holder.state.tolist() == [[0, 10, 2], [30, 40, 5]]
    assert holder.n == 3


class RowsFirst(Holder): "Has its rows in dimension 0, where a part of them is a view"


hidden_state.register(RowsFirst, lambda m, n: dict(state=0, n=0))


@pytest.mark.parametrize('kind,n', [(Holder, 3), (RowsFirst, 2)])
@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt])
def test_an_exception_restores_the_states_from_before(error, kind, n):
    "Also if the model has changed its states in place"
    holder = kind()
    holder.n = n
    before = holder.state
    values = before.tolist()
    hidden = HiddenState([holder], n)
    with pytest.raises(error), hidden.at(0, n-1):
        holder.state += 1
        raise error
    assert holder.state is before
    assert holder.state.tolist() == values
    assert holder.n == n


def test_a_registered_class_and_its_subclasses_own_states():
    m = nn.Sequential(Tensors(), nn.Linear(1, 1), Pairs())
    assert state_owners(m) == [m[0], m[2]]


# Errors

class Unknown(Stream):
    "Nobody has registered its state"


class PartUnknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.known = Pairs()
        self.unknown = Unknown()

    def reset(self):
        self.known.reset()
        self.unknown.reset()

    def forward(self, x): return self.known(x)+self.unknown(x)


@pytest.mark.parametrize('micro', [8, 'auto'])
@pytest.mark.parametrize('make_model', [Unknown, PartUnknown])
@each_saver
def test_an_unknown_state_is_an_error_that_says_what_to_register(saver, make_model, micro):
    says = r'Unknown carries its state .* hidden_state\.register\(Unknown, lambda m, n: dict\(state=1\)\)'
    with pytest.raises(ValueError, match=says): fit(stream_learner(make_model(), saver(micro)), 1)


@pytest.mark.parametrize('make_model', [Unknown, PartUnknown])
def test_an_unknown_state_is_fine_in_whole_batches(make_model):
    learn = fit(stream_learner(make_model(), GradientAccumulation(N_TRAIN)), 1, 1.)
    assert_other_fits(learn, make_model())


class Wrong(Stream): pass


hidden_state.register(Wrong, rows_first)


def test_a_wrong_entry_is_an_error_that_names_the_state():
    with pytest.raises(ValueError, match=r'Wrong\.state has shape .*, where 16 rows should be dimension 0: correct'):
        fit(stream_learner(Wrong(), split(8)), 2)
