"""Batches and outputs of any layout in micro-batches: several views of each sample, time first, nested
outputs. They are those of whole batches, or there is an error; nothing is split along another dimension than samples"""
import pytest
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from common import *

FLOAT32 = 1e-6  # rounding of float32 weights, and of the Recorder


def split(n): return GradientAccumulation(micro_batch_size=n)


def validated(learn):
    with quiet(learn): return list(learn.validate())


# Several views of each sample

class SumsViews(nn.Module):
    "Sums over its views, however they come; those after the first count less"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(5, 1).double()

    def forward(self, *views): return self.sum_of(views)

    def sum_of(self, views):
        if isinstance(views, Tensor): return self.lin(views).tanh()
        if isinstance(views, dict): views = views.values()
        return sum(self.sum_of(view)/(i+1) for i, view in enumerate(views))


# Functions of a list of views and of the sample itself, which return the inputs
def in_a_list(views, x): return (views,)
def in_a_tuple(views, x): return (tuple(views),)
def one_by_one(views, x): return tuple(views)
def in_a_list_with_another(views, x): return views, x
def in_a_dict(views, x): return ({str(i): view for i, view in enumerate(views)},)
def nested(views, x): return (dict(views=views, one=x),)


@pytest.mark.parametrize('layout,saver,n_views,bs,micro', [
    (in_a_list, split, 3, 8, 2),
    (in_a_tuple, GradientCache, 2, 2, 1),
    (one_by_one, split, 2, 2, 1),
    (in_a_list_with_another, split, 2, 2, 1),
    (in_a_dict, GradientCache, 3, 8, 2),
    (nested, GradientCache, 2, 2, 1)])
def test_views_are_split_along_their_samples(layout, saver, n_views, bs, micro):
    "Also where there are as many views as samples: in the last batch, or in all"
    def run(*cbs):
        learn = view_learner(layout, n_views, bs, *cbs)
        values = validated(learn)
        fit(learn, 2)
        values += validated(learn)
        with quiet(learn): preds, _ = learn.get_preds()
        return learn, values, preds
    plain, expected, expected_preds = run()
    assert_apart(plain, SumsViews())
    ours, values, preds = run(saver(micro))
    assert_same_weights(ours, plain, ROUNDING)
    assert_same(preds, expected_preds, ROUNDING)
    assert_same(values, expected, FLOAT32)


def view_learner(layout, n_views, bs, *cbs):
    "Has two batches, and one of as many samples as there are views"
    samples = []
    for x, y in zip(*data(2*bs+n_views)):
        views = [x.roll(i)/(i+1) for i in range(n_views)]
        samples.append((*layout(views, x), y))
    dl = DataLoader(samples, bs=bs)
    dls = DataLoaders(dl, dl)
    dls.n_inp = len(samples[0])-1
    return Learner(dls, SumsViews(), mse, opt_func=SGD, cbs=cbs)


# Outputs of texts

BS = 16
MICRO = 4


def text_learner(n_steps, m, collate, loss_func, *cbs, ragged=False, **kwargs):
    "A Learner of texts of `n_steps` and their labels; if `ragged`, most are shorter, and padded"
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(48, n_steps, 5, generator=generator)
    is_positive = (inputs > 0).long()
    labels = is_positive[..., 0] + 2*is_positive[..., 1]
    lengths = torch.full((48,), n_steps)
    if ragged:
        for i in range(48):
            if i%8: lengths[i] = 2+i%3
    is_padding = torch.arange(n_steps) >= lengths[:, None]
    labels[is_padding] = -100
    samples = list(zip(inputs, lengths, labels))
    train = DataLoader(samples, bs=BS, create_batch=collate)
    valid = DataLoader(samples[:BS], bs=BS, create_batch=collate)
    return Learner(DataLoaders(train, valid), m, loss_func, opt_func=SGD, cbs=cbs, **kwargs)


class Tagger(nn.Module):
    "Gives `wrap` the scores as [samples, steps, 4], and the last states as [layers, samples, 4]"
    def __init__(self, wrap, n_layers):
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.GRU(5, 4, n_layers, batch_first=True)
        self.out = nn.Linear(4, 4)
        self.wrap = wrap

    def forward(self, batch):
        packed = pack_padded_sequence(batch['x'], batch['n'], batch_first=True, enforce_sorted=False)
        states, last = self.rnn(packed)
        states, _ = pad_packed_sequence(states, batch_first=True)
        return self.wrap(self.out(states), last)


def samples_first(scores, last): return scores
def time_first(scores, last): return scores.transpose(0, 1)


def with_states(scores, last): return scores, last


def of_transformers(scores, last):
    from transformers.modeling_outputs import TokenClassifierOutput
    return TokenClassifierOutput(logits=scores, hidden_states=(scores, scores*2))


read_scores = {
    samples_first: noop,
    time_first: lambda pred: pred.transpose(0, 1),
    with_states: lambda pred: pred[0],
    of_transformers: lambda pred: pred.logits}


def collate_named(samples):
    inputs, lengths, labels = zip(*samples)
    return dict(x=torch.stack(inputs), n=torch.stack(lengths)), torch.stack(labels)


def tagging_learner(wrap, n_steps, *cbs, ragged=False, has_train_metrics=False):
    read = read_scores[wrap]

    def scores_and_labels(pred, targ):
        "Without the padding that none of them has"
        scores = read(pred)
        return scores, targ[:, :scores.shape[1]]

    def loss(pred, targ):
        scores, labels = scores_and_labels(pred, targ)
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())

    def share_right(pred, targ):
        scores, labels = scores_and_labels(pred, targ)
        return (scores.argmax(2) == labels).float().mean()
    n_layers = MICRO if n_steps == MICRO else 2  # the states could be samples, too
    m = Tagger(wrap, n_layers)
    learn = text_learner(n_steps, m, collate_named, loss, *cbs, ragged=ragged, metrics=share_right)
    learn.recorder.train_metrics = has_train_metrics
    return learn


def split_by_labels(micro_batch_size):
    def n_labels(learn): return (learn.y != -100).sum()
    return GradientAccumulation(micro_batch_size=micro_batch_size, num_items=n_labels)


def assert_equal_fits(ours, plain):
    n_layers = plain.model.rnn.num_layers
    assert_apart(plain, Tagger(None, n_layers))
    assert_same_weights(ours, plain, FLOAT32)
    assert_same(floats(ours.recorder.values), floats(plain.recorder.values), FLOAT32)


@pytest.mark.parametrize('wrap,n_steps,saver', [
    (samples_first, 6, split_by_labels),
    (samples_first, MICRO, GradientCache),  # as many steps as a micro-batch has samples
    (of_transformers, 6, GradientCache),
    (of_transformers, MICRO, split_by_labels)])
def test_outputs_with_a_row_for_each_sample_are_joined(wrap, n_steps, saver):
    "Metrics in training and validation, and the loss of the cache, get those of the whole batch"
    plain = fit(tagging_learner(wrap, n_steps, has_train_metrics=True), 2, .5)
    ours = fit(tagging_learner(wrap, n_steps, saver(MICRO), has_train_metrics=True), 2, .5)
    assert_equal_fits(ours, plain)


# Micro-batches that are padded to other lengths

def ragged_learner(*cbs, **kwargs):
    return tagging_learner(of_transformers, 6, *cbs, ragged=True, **kwargs)


def test_other_outputs_are_not_joined_if_batches_are_split():
    "The loss does not need them"
    plain = fit(ragged_learner(), 2, .5)
    ours = fit(ragged_learner(split_by_labels(MICRO)), 2, .5)
    assert_apart(plain, Tagger(None, 2))
    assert_same_weights(ours, plain, FLOAT32)


@pytest.mark.parametrize('saver, has_train_metrics', [
    (split_by_labels, True),
    (GradientCache, False)])  # its loss gets those of the whole batch
def test_other_outputs_are_an_error_where_they_are_needed(saver, has_train_metrics):
    learn = ragged_learner(saver(MICRO), has_train_metrics=has_train_metrics)
    with pytest.raises(ValueError, match='the outputs of micro-batches'): fit(learn, 1)


@pytest.mark.parametrize('saver', [split_by_labels, GradientCache])
@pytest.mark.parametrize('wrap', [time_first, with_states])
def test_outputs_whose_first_dimension_is_not_the_samples_are_an_error(wrap, saver):
    with pytest.raises(ValueError, match='its first dimension must index the samples'):
        fit(tagging_learner(wrap, 6, saver(MICRO)), 1)
