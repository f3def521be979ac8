"Language models in micro-batches: each row continues from its own hidden state (memory/hidden_state.py)"
from contextlib import nullcontext

import pytest
from fastai.callback.rnn import ModelResetter
from fastai.text.all import (AWD_LSTM, LMDataLoader, LMTensorText, awd_lstm_clas_config, awd_lstm_lm_config,
                             get_text_classifier, language_model_learner)

from common import *
from fastxtend_accum.memory.hidden_state import state_owners
from limited_memory import OutOfMemory, run_out_of_memory

FLOAT32 = 2e-5  # rounding of float32 weights
RECORDER = 1e-5  # and of the averages of losses
N_TRAIN = 16  # rows; no width of the model is a multiple of a micro-batch
N_VALID = 12
VOCAB = 41


def split(n, accum_bs=None): return GradientAccumulation(accum_bs, micro_batch_size=n)


each_saver = pytest.mark.parametrize('saver', [split, GradientCache])


# Texts

def texts(n):
    "Returns a text of `n` rows of 41 tokens, each of which often follows from the one before"
    torch.manual_seed(n)
    tokens = torch.randint(2, VOCAB, (n*41,))
    for i in range(1, len(tokens)):
        follows = torch.rand(()) < .6
        if not follows: continue
        next_one = tokens[i-1]*7+3
        tokens[i] = next_one%(VOCAB-2)+2
    return [(LMTensorText(tokens),)]


def text_loaders():
    dls = DataLoaders(*[LMDataLoader(texts(n), bs=n, seq_len=10) for n in (N_TRAIN, N_VALID)])
    setattr(dls, 'vocab', [str(i) for i in range(VOCAB)])
    return dls


# fastai's AWD_LSTM

def states_of(learn):
    "Returns copies of the hidden states, layer by layer"
    res = []
    for hidden, cell in learn.model[0].hidden: res += [hidden.clone(), cell.clone()]
    return res


class States(Callback):
    "Keeps the hidden states of all rows before and after each batch in training"
    run_valid = False
    order = 45  # it sees each loader batch

    def before_fit(self):
        self.before = []
        self.after = []

    def before_batch(self): self.before.append(states_of(self.learn))
    def after_batch(self): self.after.append(states_of(self.learn))


def turn_dropout_off(m):
    for o in m.modules():
        for name in ('p', 'embed_p'):
            if name in vars(o): setattr(o, name, 0.)
        if 'weight_p' in vars(o): setattr(o, 'weight_p', 1e-12)  # with 0, other weights would be dropped out


SIZES = dict(emb_sz=8, n_hid=16, n_layers=2)


def lm(*cbs, has_dropout=False, **kwargs):
    set_seed(0)
    config = awd_lstm_lm_config | SIZES
    learn = language_model_learner(
        text_loaders(), AWD_LSTM, config=config, pretrained=False, opt_func=SGD, metrics=accuracy,
        cbs=[States(), *cbs], **kwargs)
    for p in learn.model.parameters(): p.data.mul_(3)  # so that the state and the regularizers count
    if not has_dropout: turn_dropout_off(learn.model)
    return learn


def trained(*cbs, **kwargs):
    learn = lm(*cbs, **kwargs)
    set_seed(1)
    return fit(learn, 2, 1.)


@pytest.fixture(scope='module')
def plain(): return trained()


def assert_equal_fits(a, b, tol=FLOAT32, loss_tol=RECORDER):
    "Asserts the same weights, losses, metrics and hidden states"
    assert_same_weights(a, b, tol)
    assert_same_logs(a, b, loss_tol)
    for states, expected in zip(a.states.after, b.states.after, strict=True): assert_states(states, expected, tol)


def assert_states(states, expected, tol=0.):
    for state, other in zip(states, expected, strict=True):
        assert_same(state, other, tol)
        assert state.shape[1] == N_TRAIN
        assert state.any()


@pytest.mark.parametrize('n', [8, 5])
@each_saver
def test_the_fit_is_that_of_whole_batches(plain, saver, n):
    "With fastai's regularizers, which change the loss in `after_loss`"
    assert_equal_fits(trained(saver(n)), plain)
    assert_apart(plain, lm())


@pytest.mark.parametrize('setting', ['alpha', 'beta'])
def test_the_regularizers_count(plain, setting):
    "Else the test before this one would not notice if they were left out"
    assert_apart(trained(**{setting: 0.}), plain)


@each_saver
def test_without_states_of_its_own_for_each_row_the_fit_is_another_one(plain, saver, monkeypatch):
    def no_owners(module): return []
    monkeypatch.setattr('fastxtend_accum.memory.hidden_state.state_owners', no_owners)
    assert_apart(trained(saver(8)), plain)


def test_windows_of_several_loader_batches():
    ours = trained(split(5, 32))
    whole = trained(GradientAccumulation(32))
    assert_equal_fits(ours, whole)
    assert ours.recorder.accum_bs == whole.recorder.accum_bs == [32, 32, 32, 32]


# Memory runs out

class FailsInDecoder(Callback):
    "Lets memory run out in a pass of the decoder, when the encoder's state has moved on, at each of these times"
    run_valid = False

    def __init__(self, where, times):
        self.where = where
        self.times = times
        self.count = 0

    def before_fit(self): self.learn.model[1].register_forward_hook(self.after_decoder)

    def after_decoder(self, m, args, output):
        if not m.training: return
        if self.where == 'forward': self.strike()
        elif output[0].requires_grad: output[0].register_hook(self.strike)

    def strike(self, *args):
        self.count += 1
        if self.count in self.times: run_out_of_memory()


@pytest.mark.parametrize('where,times,saver', [
    ('forward', (1,), split),
    ('backward', (2, 5, 6), split),
    ('forward', (3, 4), GradientCache)])
def test_memory_runs_out(plain, saver, where, times):
    fails = FailsInDecoder(where, times)
    saver = saver('auto')
    assert_equal_fits(trained(fails, saver), plain)
    assert fails.count > 8
    assert saver.micro_bs < N_TRAIN


@pytest.mark.parametrize('where', ['forward', 'backward'])
def test_memory_runs_out_with_recomputed_blocks(where):
    "Bit for bit, with all of fastai's dropout"
    fails = FailsInDecoder(where, (2, 5, 6))
    saver = ActivationCheckpointing()
    ours = trained(fails, saver, has_dropout=True)
    assert fails.count > 8
    assert saver.n_recomputed
    assert_equal_fits(ours, trained(has_dropout=True), 0., 0.)


# Batches that end in between

@pytest.mark.parametrize('nth', [3, 4])  # the two micro-batches of the second batch
@pytest.mark.parametrize('error,event', [
    (KeyboardInterrupt, 'after_pred'),
    (CancelFitException, 'after_backward'),
    (CancelBatchException, 'before_backward')])
def test_a_batch_that_ends_early_leaves_the_states_from_before_it(error, event, nth):
    learn = lm(split(8), Fault(error, event, nth, 100))
    learn.remove_cb(ModelResetter)  # which acts at the end of an epoch
    is_cancelled = error is CancelBatchException
    expected = nullcontext()
    if error is KeyboardInterrupt: expected = pytest.raises(error)
    if is_cancelled and nth == 4: expected = pytest.warns(UserWarning, match='its whole window is left out')
    with expected: fit(learn, 1, 1.)
    left = learn.states.before[2] if is_cancelled else states_of(learn)
    assert_states(left, learn.states.before[1])


# Which models carry a state

class OwnLSTM(AWD_LSTM): pass


def test_a_text_classifier_carries_none():
    """It resets its encoder in each batch, but a model around an AWD_LSTM, or around what derives from one, carries its
    state, though nothing resets it"""
    classifier = get_text_classifier(AWD_LSTM, VOCAB, 2, config=awd_lstm_clas_config | SIZES)
    assert state_owners(classifier) == []
    encoder = OwnLSTM(VOCAB, **SIZES)
    assert state_owners(nn.Sequential(encoder, nn.Linear(8, VOCAB))) == [encoder]


class Stream(nn.Module):
    "Continues from a state of its own"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(VOCAB, 8)
        self.rnn = nn.GRU(8, VOCAB, batch_first=True)
        self.reset()

    def reset(self): self.state = None

    def forward(self, x):
        output, state = self.rnn(self.emb(x), self.state)
        self.state = state.detach()
        return output


class StreamWithHead(nn.Sequential):
    "The head has no state"
    def __init__(self): super().__init__(Stream(), nn.Linear(VOCAB, VOCAB))
    def reset(self): self[0].reset()


def test_a_part_without_a_state_can_be_split():
    def learner(*cbs):
        set_seed(0)
        return Learner(text_loaders(), StreamWithHead(), CrossEntropyLossFlat(), cbs=[ModelResetter(), *cbs])
    plain = fit(learner(), 1)
    assert_apart(plain, StreamWithHead())
    assert_same_weights(fit(learner(GradientCache(8, part=lambda m: m[1])), 1), plain, FLOAT32)
    with pytest.raises(ValueError, match='Stream carries its state .* no micro-batches'):
        fit(learner(GradientCache(8, part=lambda m: m[0])), 1)


@pytest.mark.parametrize('micro', [8, 'auto'])
@each_saver
def test_another_state_is_an_error_before_a_step_once_a_batch_is_split(saver, micro):
    "With 'auto' that is when memory runs out"
    def learner(*cbs): return Learner(text_loaders(), Stream(), CrossEntropyLossFlat(), cbs=[ModelResetter(), *cbs])
    learn = learner(saver(micro), OutOfMemory('after_pred', 1))
    assert_refused(learn, ValueError, 'Stream carries its state .* use a smaller bs')
    assert_apart(fit(learner(GradientAccumulation(N_TRAIN)), 1), Stream())
