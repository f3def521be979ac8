"What a loss averages over: windows of any loss equal the large batch, and each rule counts the items of its loss"
import pytest
import transformers
from fastai.callback.mixup import CutMix, MixUp
from fastai.losses import *
from hypothesis import given, strategies as st

from common import *
from labels import *
from layouts import each_layout
from loss_table import *
from our_warnings import warnings_of
from fastxtend_accum.windows.losses import check_items, loss_rules, n_model_labels

transformers.utils.logging.set_verbosity_error()


# Labels that are ignored, weighted or smoothed

class TokenLoss(nn.CrossEntropyLoss):
    "Cross-entropy over all tokens, known by the class it derives from; in float32, since the Recorder averages that"
    def forward(self, pred, targ):
        return super().forward(pred.flatten(0, 1), targ.flatten()).float()


TOKEN_LOSSES = dict(
    plain=TokenLoss(),
    smoothed=TokenLoss(label_smoothing=0.1),
    sum=TokenLoss(reduction='sum'))


def token_samples(n, seed=3, empty=()):
    "Returns `n` sequences of 6 tokens and their labels. Some labels of each are ignored, and all of those in `empty`"
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 6, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(4, (n, 6), generator=generator)
    n_kept = torch.randint(7, (n,), generator=generator)
    n_kept[list(empty)] = 0
    for row, n_in_row in zip(labels, n_kept):
        row[n_in_row:] = MISSING
    labels[-1, 0] = 1
    return inputs, labels


def train_on_tokens_by_hand(samples, name, steps):
    "Trains in plain PyTorch on each of `steps`, but for those without labels; returns weights, and sizes of windows"
    inputs, labels = samples
    loss_func = TOKEN_LOSSES[name]
    settings = dict(reduction=loss_func.reduction, label_smoothing=loss_func.label_smoothing)
    m = classifier_model()
    opt = torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9)
    sizes = []
    for window, _ in steps:
        targ = labels[window].flatten()
        is_empty = (targ == MISSING).all()
        if is_empty and name != 'sum':
            continue  # a sum of nothing is 0
        opt.zero_grad()
        pred = m(inputs[window]).flatten(0, 1)
        F.cross_entropy(pred, targ, **settings).backward()
        opt.step()
        sizes.append(len(window))
    return weights(m), sizes


@draws
@given(
    n=st.integers(2, 24),
    micro=st.integers(1, 5),
    k=st.integers(1, 4),
    n_epoch=st.integers(1, 2),
    name=st.sampled_from(['plain', 'smoothed', 'sum']),
    remainder=st.sampled_from(['step', 'carry', 'drop']),
    seed=st.integers(0, 10**6),
    drop_last=st.booleans())
def test_any_tokens(n, micro, k, n_epoch, name, remainder, seed, drop_last):
    "Each window is one batch in plain PyTorch, however ragged the data; one without labels is skipped, with a warning"
    size = k*micro
    samples = token_samples(n, seed, empty=range(seed%n))
    cb = GradientAccumulation(size, remainder=remainder)
    learn = learner_of(samples, micro, cb, TOKEN_LOSSES[name])
    learn.dls.train.drop_last = drop_last
    n_used = n-n%micro if drop_last else n
    if remainder == 'drop' and n_used < size:
        with pytest.raises(ValueError, match='has too few samples for one window'):
            fit(learn, n_epoch)
        return
    steps = windows(n, micro, size, remainder, n_epoch, drop_last)
    expected, sizes = train_on_tokens_by_hand(samples, name, steps)
    said = warnings_of(learn, n_epoch)
    assert len(said) == int(len(sizes) < len(steps))
    assert all('nothing to average over' in o for o in said)
    assert learn.recorder.accum_bs == sizes
    assert cb.n_skipped == len(steps)-len(sizes)
    assert_same(weights(learn), expected, ROUNDING)


# A micro-batch without items whose loss is 0/0, and whose gradient is, too

def mean_of_known(pred, targ):
    "Of two outputs, and of targets that are not missing"
    is_known = targ != MISSING
    res = 0.
    for output in pred.values():
        errors = (output-targ)**2*is_known
        res = res+errors.sum()/is_known.sum()
    return res.float()


class ScaledMean(nn.Module):
    "Has a weight of its own"
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(1).double())

    def forward(self, pred, targ):
        return mean_of_known(pred, targ)*self.log_scale.exp().float().sum()


def return_loss(m):
    "Makes a model take the targets, too, and return its loss alone"
    outputs_of = m.forward
    def forward(inputs, targets): return mean_of_known(outputs_of(inputs), targets)
    m.forward = forward


def loss_alone(pred, targ): return pred


def two_outputs(scores):
    first, second = scores.chunk(2, dim=1)
    return dict(first=first, second=second)


def train_on_missing(samples, bs, cb, loss_func):
    "Returns the weights after training, those of the loss function last"
    m = nn.Sequential(classifier_model(), Lambda(two_outputs))
    if loss_func is loss_alone:
        return_loss(m)
        samples = (*samples, samples[1])
    own = loss_func.parameters() if isinstance(loss_func, nn.Module) else ()
    params = [*m.parameters(), *own]
    learn = learner_of(samples, bs, cb, loss_func, m, splitter=lambda m: [params])
    fit(learn, 2)
    return torch.cat([p.detach().flatten() for p in params])


def test_a_batch_whose_labels_are_all_ignored_has_a_loss_of_0_in_the_log():
    "Although its mean is 0/0"
    inputs = torch.randn(32, 5)
    targets = torch.arange(32)%3
    targets[8:16] = -100
    cb = GradientAccumulation(16, log_accum_batch=False)
    learn = learner_of((inputs, targets), 8, cb, nn.CrossEntropyLoss(), nn.Linear(5, 3))
    fit(learn, 1)
    first, second, *_ = losses(learn)
    assert 0 < second < first


class NotesGradients(Callback):
    "The largest gradient before and after the sum of a window becomes a mean"
    def after_backward(self): self.in_sum = max(g.abs().max() for g in grads(self.learn))
    def before_step(self): self.ratio = float(self.in_sum/max(g.abs().max() for g in grads(self.learn)))


def test_a_sum_of_gradients_is_about_as_large_as_their_mean():
    "Also with many items in a sample. A sum that is many times larger overflows in float16"
    notes = NotesGradients()
    samples = token_samples(16)
    fit(learner_of(samples, 4, [notes, GradientAccumulation(16)], TokenLoss()), 1)
    assert .5 < notes.ratio < 2


@pytest.mark.parametrize('as_tensor', [False, True])
@each_layout
@pytest.mark.parametrize('make', [lambda: mean_of_known, ScaledMean, lambda: loss_alone])
def test_a_micro_batch_without_items_adds_nothing(make, bs, settings, as_tensor, monkeypatch):
    "Also if its loss is 0/0. On a GPU the count stays a tensor; the NaN of a sample is seen"
    if as_tensor:
        monkeypatch.setattr('fastxtend_accum.windows.losses.as_count', noop)
    inputs, targets = labelled(64, missing_share=0.3, width=[2])
    targets[8:16] = MISSING
    targets[-8:] = MISSING

    def train_accumulated():
        cb = GradientAccumulation(num_items=lambda learn: (learn.y != MISSING).sum(), **settings)
        return train_on_missing((inputs, targets), bs, cb, make())

    big = train_on_missing((inputs, targets), 32, None, make())
    assert big.isfinite().all()
    assert big[-1].abs() > 1e-3, 'the last weight, which may be that of the loss, has moved'
    assert_same(train_accumulated(), big, 1e-6)  # float32
    inputs[0] = math.nan
    assert train_accumulated().isnan().any()


def test_a_weight_that_the_loss_takes_from_the_model_itself_gets_no_nan():
    inputs, targets = labelled(32, missing_share=0.3, width=[2])
    targets[8:16] = MISSING
    def train(bs, cbs=()):
        m = nn.Sequential(classifier_model(), Lambda(two_outputs))
        m.scale = nn.Parameter(torch.ones(1).double())
        def scaled(pred, targ): return (mean_of_known(pred, targ)*m.scale.float()).sum()
        return weights(fit(learner_of((inputs, targets), bs, cbs, scaled, m), 2))
    plain = train(32)
    assert plain[0] != 1  # the scale
    ours = train(8, GradientAccumulation(32, num_items=lambda learn: (learn.y != MISSING).sum()))
    assert_same(ours, plain, 1e-6)  # float32


# MixUp and CutMix

class SameMix:
    "The same pairs and proportions for loader batches of 8 as for batches of 32"
    def before_batch(self):
        n = len(self.y)
        rows = torch.arange(n)
        in_group = rows%8
        partners = rows-in_group+7-in_group
        self.lam = 0.5+in_group/16
        self.yb1 = (self.y[partners],)
        shares = self.lam[:, None]
        mixed = torch.lerp(self.x[partners], self.x, shares)
        self.learn.xb = (mixed,)


class SameMixUp(SameMix, MixUp): pass
class SameCutMix(SameMix, CutMix): pass


@pytest.mark.parametrize('make_loss, mix', paired([
    FocalLossFlat,
    partial(CrossEntropyLossFlat, weight=tensor([1., 2., 3., 4.])),
    partial(CrossEntropyLossFlat, reduction='sum')
], [SameMixUp, SameCutMix]))
def test_mixed_labels_equal_the_large_batch(make_loss, mix):
    "88 samples: the last window is short"
    inputs, labels = labelled(88)

    def train(bs, *cbs):
        samples = inputs.float(), labels.long()
        m = classifier_model().float()
        learn = learner_of(samples, bs, [mix(), *cbs], make_loss(), m)
        return weights(fit(learn, 2, 0.01))

    big = train(32)
    assert_apart(train(8), big, 1e-4)
    in_windows = train(8, GradientAccumulation(32))
    split = train(32, GradientAccumulation(micro_batch_size=8))
    assert_same(in_windows, big, 1e-5)  # float32
    assert_same(split, big, 1e-5)


# Models that compute their own loss

SIZES = dict(
    vocab_size=11, num_labels=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
BART_SIZES = dict(d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
                  encoder_ffn_dim=8, decoder_ffn_dim=8)
DROPOUTS = ['dropout', 'attention_dropout', 'hidden_dropout_prob', 'attention_probs_dropout_prob', 'resid_pdrop',
            'embd_pdrop', 'attn_pdrop']


def transformer(kind):
    "Returns a small model without dropout, which takes its dict as one argument"
    torch.manual_seed(0)
    settings = SIZES | dict.fromkeys(DROPOUTS, 0.)
    if kind.startswith('Bart'): settings.update(BART_SIZES)
    m = getattr(transformers, kind)
    m = m(m.config_class(**settings))
    m.forward = partial(forward_of_dict, m.forward)
    return m


def forward_of_dict(forward, batch):
    return forward(**batch)


def loss_of_model(out, targ): return out.loss


def train_transformer(kind, bs, cb=None):
    "Trains without a warning of the package, which would be an error"
    inputs, labels = tokens()
    if kind == 'BertForSequenceClassification':
        labels = inputs[:, 0]%4
    batches = [dict(input_ids=ids, labels=label) for ids, label in zip(inputs, labels)]
    learn = learner_of((batches, labels), bs, cb, loss_of_model, transformer(kind))
    return weights(fit(learn, 2))


# The first predicts the next token, and so not the first one; the others predict the label of each token, or of a text
OF_TOKENS = ['GPT2LMHeadModel', 'BartForConditionalGeneration', 'BertForTokenClassification']


@pytest.mark.thin(2)
@pytest.mark.parametrize('kind', [*OF_TOKENS, 'BertForSequenceClassification'])
def test_the_labels_of_a_transformer_count_without_num_items(kind):
    "It computes its loss, for which the loss function has no rule, and there is nothing to warn of"
    big = train_transformer(kind, 12)
    assert_apart(big, weights(transformer(kind)), 1e-2)
    split = train_transformer(kind, 12, GradientAccumulation(12, micro_batch_size=3))
    in_windows = train_transformer(kind, 3, GradientAccumulation(12))
    assert_same(split, big, 1e-6)  # float32
    assert_same(in_windows, big, 1e-6)
    if kind not in OF_TOKENS: return
    by_samples = GradientAccumulation(12, micro_batch_size=3, num_items=lambda learn: 3)
    assert_apart(train_transformer(kind, 12, by_samples), big, 1e-4)  # labels are unevenly ignored


LOGITS_OF_4 = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
SOME_LABELS = tensor([[1, 2, MISSING], [3, MISSING, MISSING]])


def labelled_pass(loss, labels, **outputs):
    "Returns what a Learner holds after a pass of a model that takes labels, and returns its loss"
    out = dict(loss=loss, **outputs)
    return SimpleNamespace(pred=out, loss_grad=loss, xb=(dict(labels=labels),))


@pytest.mark.parametrize('labels, outputs', [
    (SOME_LABELS, dict(boxes=LOGITS_OF_4)),
    (SOME_LABELS, dict(logits=[LOGITS_OF_4])),
    ([dict(boxes=LOGITS_OF_4)], dict(logits=LOGITS_OF_4)),
    (tensor([1, 2]), dict(logits=LOGITS_OF_4)),
    (torch.zeros(2, 3), dict(logits=LOGITS_OF_4))])
def test_labels_do_not_count_unless_they_are_classes_of_the_logits(labels, outputs):
    "Not those of a model without logits, lists of boxes, labels of another shape, or real numbers"
    learn = labelled_pass(tensor(1.), labels, **outputs)
    assert n_model_labels(learn) is None


def test_labels_do_not_count_for_another_loss_than_that_of_the_model():
    learn = labelled_pass(tensor(1.), SOME_LABELS, logits=LOGITS_OF_4)
    learn.loss_grad = tensor(1.)
    assert n_model_labels(learn) is None


# The table of losses, and the rules

@pytest.mark.parametrize('name', [*EXACT, *INEXACT])
def test_the_table_is_true(name):
    "Exact: two micro-batches, weighted by what the table says they average over, have the loss and gradient of both"
    row = (EXACT | INEXACT)[name]
    pred = row.pred[:13].clone().requires_grad_()
    targets = [o[:13] for o in row.targets]

    def loss_of(pred, *targets):
        copies = [o.clone() for o in targets]
        return row.loss_func(pred*1, *copies)  # a loss may work in place

    total = 0
    total_weight = 0
    for part, *part_targets in parts_of(pred, targets):
        weight = row.items(part_targets[0]) if row.items else 1
        total = total+loss_of(part, *part_targets)*weight
        total_weight = total_weight+weight
    made_up = total/total_weight if row.items else total
    whole = loss_of(pred, *targets)
    grad_made_up, = torch.autograd.grad(made_up, pred, retain_graph=True)
    grad_of_whole, = torch.autograd.grad(whole, pred, retain_graph=True)
    loss_error = (made_up-whole).abs()/whole.abs()
    grad_error = (grad_made_up-grad_of_whole).norm()/grad_of_whole.norm()
    errors = torch.stack([loss_error, grad_error]).detach()
    if name in EXACT:
        assert errors.max() < 1e-6
    else:
        assert errors.isnan().any() or errors.max() > 1e-3


COUNTED = dict(
    MSELoss=7*N,
    l1_function=7*N,
    bce_flat=7*N,
    flat=n_kept(SOME_IGNORED),
    probabilities=N,
    kl_div=N,
    axis=36*N,
    focal=36*N,
    unknown=N,
    sum=None,
    function_sum=None)


@pytest.mark.parametrize('name', COUNTED)
def test_a_rule_counts_the_items_of_its_loss(name):
    "Samples if there is no rule; nothing if the loss is a sum"
    row = EXACT[name]
    assert loss_items(row.loss_func, row.pred, *row.targets) == COUNTED[name]


@pytest.mark.parametrize('name', ['flat_weights', 'weights', 'nll', 'function', 'own_rule'])
def test_a_rule_adds_up_the_weights_of_classes(name):
    row = EXACT[name]
    expected = float(row.items(row.targets[0]))
    found = float(loss_items(row.loss_func, row.pred, *row.targets))
    assert found == pytest.approx(expected, rel=1e-6)  # float32, in another order


@pytest.mark.parametrize('loss_func', [
    plain_sum,
    partial(plain_sum),
    DiceLoss(reduction='mean'),
    partial(F.l1_loss, reduction='none'),
    CrossEntropyLossFlat(reduction='none'),
    OwnWeights(weighted_mean)])
def test_a_loss_without_a_rule_goes_by_rows(loss_func):
    "Those without a reduction do not average by themselves, and nobody knows over what they do"
    assert loss_items(loss_func, VALUES, BINARY, rows=5) == 5


class Unsqueezes(nn.MSELoss):
    def forward(self, pred, targ): return super().forward(pred, targ[:, None])


def test_targets_need_not_have_the_shape_of_the_outputs():
    "A loss of a user's class may reshape them"
    assert loss_items(Unsqueezes(), torch.zeros(8, 1), torch.zeros(8)) == 8


@pytest.mark.parametrize('args', [(VALUES, TARGETS, TARGETS), ((VALUES, VALUES), TARGETS)])
def test_a_built_in_rule_counts_no_other_arguments_than_two_tensors(args):
    class OfSeveral(nn.MSELoss): "May take more, or tuples"
    assert loss_items(OfSeveral(), *args, rows=8) == 8


def test_a_rule_for_a_function_holds_for_a_partial_of_it(monkeypatch):
    def kept(pred, targ, weight=None): pass
    monkeypatch.setitem(loss_rules, kept, lambda settings, pred, targ: len(settings.weight))
    loss_func = partial(kept, weight=[1., 2.])  # settings need not be hashable
    assert loss_items(loss_func, LOGITS, LABELS) == 2


@pytest.mark.parametrize('items', [0, 2.5, np.float32(2.5), tensor([[3.]])])
def test_num_items_may_return_any_count(items):
    "It becomes a number, unless it is on a GPU"
    found = check_items(items)
    assert found == float(items)
    assert not isinstance(found, Tensor)


@pytest.mark.parametrize('items', [-1, math.nan, tensor([3, 3]), None])
def test_num_items_that_returns_no_count_is_an_error(items):
    with pytest.raises(ValueError, match='num_items must return a count of 0 or more'):
        check_items(items)


def test_an_unknown_loss_of_a_target_that_is_one_number_goes_by_rows():
    assert loss_items(mean_error, VALUES[:8], tensor(1.5), rows=8) == 8
