"The passes of a micro-batch: the loss that is used is the one that is weighted, and each gradient has its weight"
import pytest

from common import *
from labels import *
from layouts import each_layout
from our_warnings import warnings_of
from fastxtend_accum.windows.forward_backward import note_replaced_loss, weigh_own_gradient
from fastxtend_accum.windows.losses import loss_rules
from fastxtend_accum.windows.window import Window

FLOAT32 = 1e-6
REPLACES_LOSS = 'a callback replaces the loss (learn.loss_grad), but micro-batches keep the weights'


# A callback changes the loss in `after_loss`

class ReplacesLoss(Callback):
    "Uses `loss_of(learn)` in the place of the loss function's"
    def __init__(self, loss_of):
        self.loss_of = loss_of

    def after_loss(self):
        loss = self.loss_of(self.learn).float()  # since the Recorder averages that
        self.learn.loss_grad = loss
        self.learn.loss = loss.detach().clone()


class AddsToLoss(Callback):
    def __init__(self, term_of, in_place=False):
        self.term_of = term_of
        self.in_place = in_place

    def after_loss(self):
        term = self.term_of(self.learn).float()
        if self.in_place: self.learn.loss_grad += term
        else: self.learn.loss_grad = self.learn.loss_grad+term


def n_positives(learn):
    return (learn.y < 2).sum()


def loss_of_detector(learn):
    "Summed over all samples, divided by the positives"
    errors = F.cross_entropy(learn.pred, learn.y, reduction='none')
    return errors.sum()/n_positives(learn)


def square_of_positives(learn):
    is_positive = learn.y < 2
    return (learn.pred[is_positive]**2).mean()


def cross_entropy(pred, targ):
    "Of the labels that are not ignored; in float32, since the Recorder averages that"
    return F.cross_entropy(pred, targ).float()


def mse_of_positives(pred, targ):
    "Has no rule"
    is_positive = targ < 2
    return F.mse_loss(pred[is_positive, 0], targ[is_positive].double()).float()


def n_labels(settings, pred, targ):
    return int((targ != MISSING).sum())


loss_rules[cross_entropy] = n_labels


def classifier(bs, *cbs, missing_share=.3, loss_func=cross_entropy):
    "Returns a Learner whose loss function averages over the labels that are not ignored"
    inputs, labels = labelled(96, missing_share)
    return learner_of((inputs, labels.long()), bs, cbs, loss_func)


@each_layout
@pytest.mark.parametrize('change, loss_func, num_items', [
    (ReplacesLoss(loss_of_detector), cross_entropy, n_positives),
    (AddsToLoss(square_of_positives), mse_of_positives, n_positives)])
def test_a_changed_loss_is_exact_with_num_items(change, loss_func, num_items, bs, settings):
    "And there is nothing to warn of: a warning would be an error here"
    args = dict(missing_share=0., loss_func=loss_func)
    big = fit(classifier(32, change, **args), 2)
    assert_apart(big, classifier_model())
    small = fit(classifier(bs, change, GradientAccumulation(num_items=num_items, **settings), **args), 2)
    assert_same_weights(small, big, FLOAT32)
    assert_same(losses(small), losses(big), 1e-5)


def autoencoder(learn):
    return F.mse_loss(learn.pred, learn.x[:, :4])
def l1_of_weights(learn):
    return sum(p.abs().sum() for p in learn.model.parameters())/100


def z_loss(learn):
    "Of the samples that have a label"
    log_z = learn.pred.logsumexp(1)
    return (log_z[learn.y != MISSING]**2).mean()


@each_layout
@pytest.mark.parametrize('change, missing_share, n_warnings', [
    (ReplacesLoss(autoencoder), 0., 1),
    (AddsToLoss(z_loss), .3, 1),
    (AddsToLoss(l1_of_weights, in_place=True), .3, 0)])
def test_a_changed_loss_keeps_its_weight(change, missing_share, n_warnings, bs, settings):
    """It is exact if it averages over the same items, or over none. One warning says so if it is another loss, and not
    the same one with a term that a callback added in place, as fastai's RNNRegularizer does"""
    big = fit(classifier(32, change, missing_share=missing_share), 2)
    assert_apart(big, fit(classifier(32, missing_share=missing_share), 2))
    small = classifier(bs, change, GradientAccumulation(**settings), missing_share=missing_share)
    said = warnings_of(small, 2, .1)
    assert len(said) == n_warnings
    assert all(REPLACES_LOSS in o for o in said)
    assert_same_weights(small, big, FLOAT32)


# Changes whose items are known

class CausalLMOutput(dict): "As Transformers names it"


class LanguageModel(nn.Module):
    "Computes its loss by itself: each token predicts the next one"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Embedding(11, 8), nn.Tanh(), nn.Linear(8, 4)
        self.layers = nn.Sequential(*layers).double()

    def forward(self, batch):
        logits = self.layers(batch['input_ids'])
        labels = batch['labels'][:, 1:]
        predictions = logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(predictions, labels.flatten())
        return CausalLMOutput(loss=loss.float(), logits=logits)


def loss_without_shift(out, targ):
    return cross_entropy(out['logits'].flatten(0, 1), targ.flatten())
def loss_of_model(learn):
    return learn.pred['loss']


@each_layout
def test_a_callback_that_uses_the_loss_of_a_transformer_is_exact(bs, settings):
    "The labels of the model count, although the loss function sees others; nothing is to be warned of"
    ids, labels = tokens()
    batches = [dict(input_ids=a, labels=b) for a, b in zip(ids, labels)]
    samples = batches*4, labels.repeat(4, 1)
    def train(bs, *cbs):
        cbs = [ReplacesLoss(loss_of_model), *cbs]
        return weights(fit(learner_of(samples, bs, cbs, loss_without_shift, LanguageModel()), 2))
    big = train(32)
    assert_apart(big, LanguageModel())
    assert_same(train(bs, GradientAccumulation(**settings)), big, FLOAT32)


def test_the_weight_of_a_replaced_loss_matters_to_other_processes():
    "Also if it is the only one in this process"
    said = []
    window = Window()
    window.begin(None, is_single=True, n_processes=2)
    fit = SimpleNamespace(
        learn=SimpleNamespace(pred=None),
        cb=GradientAccumulation(),
        loss_check=LossCheck(mse),
        warn_once=said.append)
    note_replaced_loss(fit, window)
    assert said


# A callback runs the backward pass itself, or leaves it out

class RunsBackward(Callback):
    "Makes the gradient itself from micro-batch `begin` on"

    def __init__(self, how, begin=0):
        self.how = how
        self.begin = begin
        self.n = 0

    def before_backward(self):
        self.n += 1
        if self.n <= self.begin:
            return
        self.how(self.learn.loss_grad, list(self.learn.model.parameters()))
        raise CancelBackwardException


def by_backward(loss, params):
    loss.backward()


def by_new_tensors(loss, params):
    for p, grad in zip(params, torch.autograd.grad(loss, params)):
        p.grad = grad.clone()


def in_place(loss, params):
    for p, grad in zip(params, torch.autograd.grad(loss, params)):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad.copy_(grad)


def uneven(learn):
    "Items that batches and windows do not share"
    return float(1+learn.train_iter%3*len(learn.y))


ONE_MICRO_BATCH = dict(
    windows=lambda: GradientAccumulation(32),
    blocks=ActivationCheckpointing,
    auto=lambda: GradientAccumulation(micro_batch_size='auto'),
    skip_nonfinite=lambda: GradientAccumulation(32, skip_nonfinite=True),
    num_items=lambda: GradientAccumulation(32, num_items=uneven))


@pytest.mark.parametrize('dtype, how, opt_func', [
    (torch.float64, by_backward, partial(SGD, mom=.9)),
    (torch.float64, in_place, partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9)),
    (torch.bfloat16, in_place, partial(SGD, mom=.9))])
def test_a_backward_pass_of_ones_own_in_a_window_of_one(dtype, how, opt_func):
    "The plain fit, bit for bit"
    def train(*cbs):
        cbs = [*cbs, RunsBackward(how)]
        return fit(make_learner(32, n=88, m=model().to(dtype), cbs=cbs, opt_func=opt_func), 2)
    big = train()
    assert_apart(big, model().to(dtype), 1e-2)
    for make in ONE_MICRO_BATCH.values():
        learn = train(make())
        assert_same_weights(learn, big)
        assert_same(losses(learn), losses(big))


@pytest.mark.parametrize('bs, settings, how, begin', [
    (8, dict(accum_bs=32), by_backward, 0),
    (32, dict(micro_batch_size=8), by_new_tensors, 0),
    (32, dict(micro_batch_size=8), in_place, 2),
    (8, dict(accum_bs=24, remainder='carry'), by_new_tensors, 2)])
def test_a_backward_pass_of_ones_own_in_a_window_of_several_is_an_error(bs, settings, how, begin):
    "Before the first step, also if it comes in the middle of the window"
    learn = make_learner(bs, n=88, cbs=[GradientAccumulation(**settings), RunsBackward(how, begin)])
    assert_refused(learn, RuntimeError, 'changed a gradient.*, or use windows of one batch')


@pytest.mark.parametrize('weight, before, after', [(.5, 4., 2.), (0, 4., 0.), (tensor(0.), math.nan, 0.)])
def test_a_gradient_of_ones_own_gets_the_weight_of_this_process(weight, before, after):
    "0 in a process whose micro-batch has no items"
    p = nn.Parameter(torch.zeros(1))
    p.grad = tensor([before])
    fit = SimpleNamespace(params=SimpleNamespace(summed=[p]))
    weigh_own_gradient(fit, weight)
    assert p.grad.item() == after


class SkipsBackward(Callback):
    "Cancels the backward pass of the `nth` micro-batch of the fit, or of each"

    def __init__(self, nth=None):
        self.nth = nth
        self.n = 0

    def before_backward(self):
        self.n += 1
        if self.nth in (None, self.n):
            raise CancelBackwardException


@pytest.mark.parametrize('nth', [1, 3])
@pytest.mark.parametrize('bs, settings, first_size', [
    (8, dict(accum_bs=32), 32),
    (32, dict(micro_batch_size=8), 24)])
def test_a_micro_batch_without_a_backward_pass_is_left_out_with_one_warning(bs, settings, first_size, nth):
    "Windows close up, and a batch that is split is the rest of itself"
    learn = make_learner(bs, cbs=[GradientAccumulation(**settings), SkipsBackward(nth)])
    said = warnings_of(learn, 1, .1)
    assert said == ['a callback cancels backward passes (CancelBackwardException): their micro-batches are left out of '
                    'the window']
    kept = [i for i in range(96) if i//8 != nth-1]
    second = first_size+32
    parts = kept[:first_size], kept[first_size:second], kept[second:]
    steps = [(samples, 0) for samples in parts]
    assert_steps(learn, steps)
    # Of a batch that is split, the samples that are left out count, so that its window waits for no others
    sizes = [len(samples) for samples in parts] if bs == 8 else [32, 32, 32]
    assert learn.recorder.accum_bs == sizes
