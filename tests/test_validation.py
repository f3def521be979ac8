"Validation in batches as small as the model sees in training: fastai's own loaders yield them, others stay whole"
import pytest

from common import *
from fastxtend_accum.accumulation import can_be_smaller
from labels import MISSING, classifier_model
from limited_memory import MemoryLimit
from ordinary_learners import tabular

FLOAT32 = 1e-6  # of the Recorder
WHOLE = [16, 4]  # 20 samples in batches of 16


def mean_error(pred, targ): return (pred-targ).abs().mean()


def over_all(): return AccumMetric(lambda pred, targ: (pred*targ).sum().float(), flatten=False)


def learner_of(micro=None, limit=math.inf):
    "Returns a Learner that splits batches of 32, and what notes the sizes of its passes"
    cbs = [] if micro is None else GradientAccumulation(micro_batch_size=micro)
    learn = make_learner(32, metrics=[mean_error, over_all()], cbs=cbs)
    learn.dls.train = learn.dls.train.new(shuffle=True)
    return learn, MemoryLimit(learn.model, limit)


def predicted(learn):
    "Returns validation losses and metrics; and inputs, predictions and targets"
    with quiet(learn): return [*learn.validate(), *learn.get_preds(with_input=True, act=noop)]


@pytest.mark.parametrize('micro, limit, sizes', [
    (8, math.inf, [8, 8, 4]),
    (7, math.inf, [7, 7, 6]),
    ('auto', math.inf, WHOLE),
    ('auto', 9, [8, 8, 4])])
def test_validation_and_prediction_are_those_of_whole_batches(micro, limit, sizes):
    "In a fit, which shuffles the same samples, and after it"
    results = []
    for args in ([], [micro, limit]):
        set_seed(1)
        learn, memory = learner_of(*args)
        fit(learn, 2)
        results.append([*floats(learn.recorder.values), *predicted(learn), weights(learn)])
    plain, ours = results
    assert_moved(learn)
    for a, b in zip(ours, plain, strict=True): assert_same(as_tensor(a), as_tensor(b), FLOAT32)
    memory.in_validation.clear()
    with quiet(learn): learn.validate()
    assert memory.in_validation == sizes
    assert_nothing_left(learn)
    assert learn.dls.valid.bs == 16


def loss_with_missing_labels(bs, cbs=None):
    "Returns the validation loss of 8 samples, of which only the first 5 have labels"
    inputs, _ = data(8)
    labels = torch.tensor([0, 1, 2, 3, 0, MISSING, MISSING, MISSING])
    dl = DataLoader(list(zip(inputs, labels)), bs=bs)
    learn = Learner(DataLoaders(dl, dl), classifier_model(), CrossEntropyLossFlat(ignore_index=MISSING), cbs=cbs)
    with quiet(learn): learn.fit(1, 1e-9)
    return learn.recorder.values[-1][1]


def test_smaller_batches_change_the_validation_loss_if_the_loss_ignores_labels():
    "It is as in fastai with batches of that size, since fastai weights each of them by its samples"
    whole = loss_with_missing_labels(8, GradientAccumulation(8))
    pieces = loss_with_missing_labels(8, GradientAccumulation(8, micro_batch_size=4))
    assert abs(whole-loss_with_missing_labels(8)) < 1e-6
    assert abs(pieces-loss_with_missing_labels(4)) < 1e-6
    assert abs(pieces-whole) > 1e-3
    assert math.isnan(loss_with_missing_labels(8, GradientAccumulation(8, micro_batch_size=2)))  # 2 without labels


def carry_state(learn): learn.model.reset = noop
def leave_out_samples(learn): learn.dls.valid.n = 18  # of 20


@pytest.mark.parametrize('change, sizes', [(carry_state, WHOLE), (leave_out_samples, [16, 2])])
def test_batches_stay_whole_if_others_would_be_different(change, sizes):
    learn, memory = learner_of(8)
    fit(learn, 1)
    change(learn)
    memory.in_validation.clear()
    with quiet(learn): learn.validate()
    assert memory.in_validation == sizes


def test_a_loader_of_tables_is_smaller_if_it_does_not_draw_by_weights():
    "A shuffled loader of `TabularPandas` does, and `new` forgets the weights"
    dl = tabular().dls.valid
    assert can_be_smaller(dl, 4)
    assert not can_be_smaller(dl.new(shuffle=True), 4)


def test_a_learner_validates_that_shares_its_callback_with_one_made_later():
    learn, _ = learner_of(8)
    fit(learn, 1)
    expected = predicted(learn)[0]
    make_learner(8, cbs=learn.gradient_accumulation)
    assert abs(predicted(learn)[0]-expected) < FLOAT32


class ValidationFault(Fault): run_train = False


@pytest.mark.parametrize('method', ['validate', 'get_preds', 'fit'])
def test_an_interrupt_in_validation_leaves_nothing(method):
    learn, memory = learner_of(8)
    fit(learn, 1)
    args = [1] if method == 'fit' else []
    interrupts = ValidationFault(KeyboardInterrupt, 'after_pred', 2, 0)
    learn.add_cb(interrupts)
    with quiet(learn), pytest.raises(KeyboardInterrupt): getattr(learn, method)(*args)
    assert_nothing_left(learn)
    learn.remove_cb(interrupts)
    memory.in_validation.clear()
    fit(learn, 1)
    assert memory.in_validation == [8, 8, 4]
    assert learn.dls.valid.bs == 16


class ValidatesOnTraining(Callback):
    "After the training of an epoch, validates on the batches that `learn.dl` still holds"
    def after_train(self):
        self.learn._do_epoch_validate(dl=self.learn.dl)
        self.loss_of_training = float(self.learn.recorder.loss.value)


def test_the_training_batches_serve_for_validation_in_a_fit():
    "They run in fastai's loop, without a step"
    large = fit(make_learner(32, cbs=ValidatesOnTraining()), 2)
    small = fit(make_learner(8, cbs=[GradientAccumulation(32), ValidatesOnTraining()]), 2)
    assert_trained_as(small, large)
    loss = large.validates_on_training.loss_of_training
    assert abs(small.validates_on_training.loss_of_training-loss) < FLOAT32 < loss
