"The passes of a micro-batch: the loss that is used is the one that is weighted, and each gradient has its weight"
import pytest
from fastai.callback.rnn import RNNCallback, RNNRegularizer

from common import *
from labels import *
from layouts import each_layout
from our_warnings import warnings_of
from fastxtend_accum.windows.forward_backward import callback_that_raised, is_summand


# A callback replaces the loss in `after_loss`

class ReplacesLoss(Callback):
    "Uses `loss_of(learn)` in the place of the loss function's"
    def __init__(self, loss_of):
        self.loss_of = loss_of

    def after_loss(self):
        loss = self.loss_of(self.learn).float()  # since the Recorder averages that
        self.learn.loss_grad = loss
        self.learn.loss = loss.detach().clone()


def n_positives(learn):
    return (learn.y < 2).sum()


def loss_of_detector(learn):
    "Summed over all samples, divided by the positives"
    errors = F.cross_entropy(learn.pred, learn.y, reduction='none')
    return errors.sum()/n_positives(learn)


def hardness(learn):
    "Returns 1 - the probability of the true class"
    probabilities = learn.pred.detach().softmax(1)
    rows = torch.arange(len(learn.y))
    return 1-probabilities[rows, learn.y]


def total_hardness(learn):
    return hardness(learn).sum()


def loss_of_hard_samples(learn):
    errors = F.cross_entropy(learn.pred, learn.y, reduction='none')
    return (errors*hardness(learn)).sum()/total_hardness(learn)


def is_masked(learn):
    return learn.x[:, :4] > 0.5


def n_masked(learn):
    return is_masked(learn).sum()


def loss_of_masked_autoencoder(learn):
    "Of the inputs that are masked, as many as there are"
    errors = (learn.pred-learn.x[:, :4])**2
    return (errors*is_masked(learn)).sum()/n_masked(learn)


OVER_OTHER_ITEMS = pytest.mark.parametrize('loss_of, num_items', [
    (loss_of_detector, n_positives),
    (loss_of_hard_samples, total_hardness),
    (loss_of_masked_autoencoder, n_masked)])


def cross_entropy(pred, targ):
    "Of the labels that are not ignored; in float32, since the Recorder averages that"
    return F.cross_entropy(pred, targ).float()


@loss_items.register(cross_entropy)
def n_labels(settings, pred, targ):
    return int((targ != MISSING).sum())


def classifier(bs, *cbs, missing_share=0.3, loss_func=cross_entropy):
    "Returns a Learner whose loss function has a rule: it averages over the labels that are not ignored"
    inputs, labels = labelled(96, missing_share)
    return learner_of((inputs, labels.long()), bs, cbs, loss_func)


@each_layout
@OVER_OTHER_ITEMS
def test_a_replaced_loss_is_exact_with_num_items(loss_of, num_items, bs, settings):
    "And there is nothing to warn of: a warning would be an error here"
    big = fit(classifier(32, ReplacesLoss(loss_of), missing_share=0.), 2)
    assert_apart(weights(big), weights(classifier_model()))
    accum = GradientAccumulation(num_items=num_items, **settings)
    small = fit(classifier(bs, ReplacesLoss(loss_of), accum, missing_share=0.), 2)
    assert_same(weights(small), weights(big), 1e-6)  # float32
    assert_same(losses(small), losses(big), 1e-5)


@each_layout
@OVER_OTHER_ITEMS
def test_a_replaced_loss_is_announced_without_num_items(loss_of, num_items, bs, settings, capsys):
    "Once in a fit, and in the line that it prints; samples are the weight"
    replaces = ReplacesLoss(loss_of)
    learn = classifier(bs, replaces, GradientAccumulation(**settings), missing_share=0.)
    with pytest.warns(UserWarning, match='a callback replaces the loss in after_loss') as caught:
        fit_aloud(learn, 2)
    assert len(caught) == 1
    assert 'except: the loss that a callback sets is averaged by samples' in capsys.readouterr().out
    by_samples = GradientAccumulation(num_items=lambda learn: len(learn.y), **settings)
    expected = fit(classifier(bs, replaces, by_samples, missing_share=0.), 2)
    assert_same(weights(learn), weights(expected))
    big = fit(classifier(32, replaces, missing_share=0.), 2)
    assert_apart(weights(learn), weights(big), 1e-4)


TEACHER = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4)


def distillation(learn):
    "All samples have a teacher, also those without a label"
    probabilities = (learn.x@TEACHER).softmax(1)
    return F.kl_div(learn.pred.log_softmax(1), probabilities, reduction='batchmean')


def consistency(learn):
    return F.mse_loss(learn.pred, learn.model(-learn.x))


def autoencoder(learn):
    return F.mse_loss(learn.pred, learn.x[:, :4])


@each_layout
@pytest.mark.parametrize('loss_of', [distillation, consistency, autoencoder])
def test_a_replaced_loss_that_is_a_mean_over_samples_is_exact(loss_of, bs, settings):
    "The labels that are ignored are those of the loss function, and have no part in it"
    big = fit(classifier(32, ReplacesLoss(loss_of)), 2)
    assert_apart(weights(big), weights(classifier_model()))
    small = classifier(bs, ReplacesLoss(loss_of), GradientAccumulation(**settings))
    with pytest.warns(UserWarning, match='replaces the loss'):
        fit(small, 2)
    assert_same(weights(small), weights(big), ROUNDING)


def test_a_window_of_one_batch_has_nothing_to_warn_of():
    "It is the plain fit, bit for bit"
    big = fit(classifier(32, ReplacesLoss(loss_of_detector)), 2)
    one = fit(classifier(32, ReplacesLoss(loss_of_detector), GradientAccumulation(32)), 2)
    assert_apart(weights(big), weights(classifier_model()))
    assert_same(weights(one), weights(big))


# A callback adds to the loss

class AddsToLoss(Callback):
    def __init__(self, term_of):
        self.term_of = term_of

    def after_loss(self):
        term = self.term_of(self.learn).float()
        self.learn.loss_grad = self.learn.loss_grad+term


def l1_of_weights(learn):
    "Parameter by parameter"
    total = 0
    for p in learn.model.parameters():
        total = total+p.abs().sum()
    return total/100


def z_loss(learn):
    "Of the samples that have a label"
    log_z = learn.pred.logsumexp(1)
    return (log_z[learn.y != MISSING]**2).mean()


def confidence_penalty(learn):
    "Of the samples that have a label"
    log_p = learn.pred.log_softmax(1)[learn.y != MISSING]
    return (log_p.exp()*log_p).sum(1).mean()


@each_layout
@pytest.mark.parametrize('term_of', [l1_of_weights, z_loss, confidence_penalty])
def test_an_added_term_has_the_weight_of_the_loss(term_of, bs, settings, capsys):
    "It is exact if it averages over the same items, or over none; a warning and the printed line say so"
    big = fit(classifier(32, AddsToLoss(term_of)), 2)
    without = fit(classifier(32), 2)
    assert_apart(weights(big), weights(without))
    small = classifier(bs, AddsToLoss(term_of), GradientAccumulation(**settings))
    with pytest.warns(UserWarning, match='a callback adds to the loss in after_loss') as caught:
        fit_aloud(small, 2)
    assert len(caught) == 1
    assert 'except: what a callback adds to the loss is weighted like the loss' in capsys.readouterr().out
    assert_same(weights(small), weights(big), 1e-6)  # float32


def auxiliary_of_positives(learn):
    is_positive = learn.y < 2
    return (learn.pred[is_positive]**2).mean()


def mse_of_positives(pred, targ):
    "Has no rule"
    is_positive = targ < 2
    return F.mse_loss(pred[is_positive, 0], targ[is_positive].double()).float()


@each_layout
def test_a_term_over_other_items_is_announced(bs, settings):
    small = classifier(bs, AddsToLoss(auxiliary_of_positives), GradientAccumulation(**settings))
    assert [o.partition(':')[0] for o in warnings_of(small)] == ['a callback adds to the loss in after_loss']


@each_layout
def test_a_loss_and_a_term_over_the_same_items_are_exact_with_num_items(bs, settings):
    def train(bs, *cbs):
        aux = AddsToLoss(auxiliary_of_positives)
        return weights(fit(classifier(bs, aux, *cbs, missing_share=0., loss_func=mse_of_positives), 2))

    big = train(32)
    assert_apart(big, weights(classifier_model()))
    small = train(bs, GradientAccumulation(num_items=n_positives, **settings))
    assert_same(small, big, 1e-6)  # float32


# What is no change of the loss, or one whose items are known

class ReadsLoss(Callback):
    def after_loss(self):
        self.seen = self.learn.loss_grad.item()


def test_a_callback_that_only_reads_the_loss_causes_no_warning():
    assert warnings_of(classifier(8, ReadsLoss(), GradientAccumulation(32))) == []


class States(nn.Module):
    "Gives scores, raw states and states for each of 6 steps, as RNNCallback needs them"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(5, 8).double()
        self.head = nn.Linear(8, 4).double()

    def forward(self, inputs):
        states = self.body(inputs).tanh()
        return self.head(states), states, states


def loss_of_steps(pred, targ):
    return cross_entropy(pred.flatten(0, 1), targ.flatten())


@each_layout
def test_a_callback_of_fastai_that_adds_to_the_loss_causes_no_warning(bs, settings):
    "RNNRegularizer adds to the loss in place, a mean over the same samples"
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, 6, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(4, (96, 6), generator=generator)

    def train(bs, *cbs):
        cbs = [RNNCallback(), *cbs]
        return weights(fit(learner_of((inputs, targets), bs, cbs, loss_of_steps, States()), 2))

    big = train(32, RNNRegularizer(alpha=2, beta=1))
    assert_apart(big, train(32))
    small = train(bs, RNNRegularizer(alpha=2, beta=1), GradientAccumulation(**settings))
    assert_same(small, big, 1e-6)  # float32


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


class LossWithRule(nn.CrossEntropyLoss):
    "Has a rule, so that it need not be checked"
    def forward(self, out, targ):
        return loss_without_shift(out, targ)


def loss_of_model(learn):
    return learn.pred['loss']


@each_layout
@pytest.mark.parametrize('loss_func', [
    pytest.param(LossWithRule(), id='rule'),
    pytest.param(loss_without_shift, id='no_rule')])
def test_a_callback_that_uses_the_loss_of_a_transformer_is_exact(loss_func, bs, settings):
    "The labels of the model count, although the loss function sees others; nothing is to be warned of"
    ids, labels = tokens()
    batches = [dict(input_ids=a, labels=b) for a, b in zip(ids, labels)]
    samples = batches*4, labels.repeat(4, 1)

    def train(bs, *cbs):
        cbs = [ReplacesLoss(loss_of_model), *cbs]
        return weights(fit(learner_of(samples, bs, cbs, loss_func, LanguageModel()), 2))

    big = train(32)
    assert_apart(big, weights(LanguageModel()))
    assert_same(train(bs, GradientAccumulation(**settings)), big, 1e-6)  # float32


class HidesTargets(Callback):
    "Takes the targets away until `after_loss`, and computes the loss itself, so that no loss function is called"
    def before_batch(self):
        self.targets = self.learn.yb
        self.learn.yb = ()

    def after_loss(self):
        self.learn.yb = self.targets
        loss = cross_entropy(self.pred, *self.targets)
        self.learn.loss_grad = loss
        self.learn.loss = loss.detach()


@pytest.mark.parametrize('num_items', [None, lambda learn: len(learn.y)], ids=['samples', 'num_items'])
def test_targets_that_are_set_in_after_loss_are_targets(num_items):
    "As in fastai, which asks for them there"
    big = fit(classifier(32, HidesTargets(), missing_share=0.), 2)
    assert_apart(weights(big), weights(classifier_model()))
    small = classifier(8, HidesTargets(), GradientAccumulation(32, num_items=num_items), missing_share=0.)
    said = warnings_of(small, 2, 0.1)
    assert len(said) == (0 if num_items else 1)
    assert all(o.startswith('a callback replaces the loss in after_loss') for o in said)
    assert_same(weights(small), weights(big), ROUNDING)


# Where a loss is in the graph

W = torch.ones(2, requires_grad=True)


@pytest.mark.parametrize('use, expected', [
    (lambda loss: loss, True),
    (lambda loss: loss+1, True),
    (lambda loss: W.sum()+(loss+W.norm()), True),
    (lambda loss: 2*loss, False),
    (lambda loss: 2*loss+W.sum(), False),
    (lambda loss: W.sum(), False)])
def test_which_losses_are_parts_of_a_sum(use, expected):
    loss = (W**2).sum()
    assert is_summand(loss.grad_fn, use(loss).grad_fn) == expected


def test_a_loss_may_be_a_part_of_a_sum_of_thousands():
    "Such as a penalty for each of the parameters of a large model"
    loss = (W**2).sum()
    total = loss
    for _ in range(3000):
        total = total+W.sum()
    assert is_summand(loss.grad_fn, total.grad_fn)
    assert not is_summand((W**2).sum().grad_fn, total.grad_fn)


# A callback runs the backward pass itself

class RunsBackward(Callback):
    "Makes the gradient itself from micro-batch `begin` on"
    run_valid = False

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


def by_data(loss, params):
    "Unseen by PyTorch's version counter"
    for p, grad in zip(params, torch.autograd.grad(loss, params)):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad.data = grad


WAYS = [by_backward, by_new_tensors, in_place, by_data]
OPTIMIZERS = dict(
    fastai=partial(SGD, mom=0.9),
    torch=partial(OptimWrapper, opt=torch.optim.SGD, momentum=0.9))


def uneven(learn):
    "Items that batches and windows do not share"
    return float(1 + learn.train_iter%3*len(learn.y))


ONE_MICRO_BATCH = dict(
    windows=lambda: GradientAccumulation(32),
    blocks=ActivationCheckpointing,
    auto=lambda: GradientAccumulation(micro_batch_size='auto'),
    skip_nonfinite=lambda: GradientAccumulation(32, skip_nonfinite=True),
    num_items=lambda: GradientAccumulation(32, num_items=uneven))
SEVERAL = dict(
    windows=(8, dict(accum_bs=32)),
    split=(32, dict(micro_batch_size=8)),
    both=(16, dict(accum_bs=32, micro_batch_size=5)),
    skip_nonfinite=(8, dict(accum_bs=32, skip_nonfinite=True)),
    num_items=(8, dict(accum_bs=32, num_items=lambda learn: len(learn.y))),
    carry=(8, dict(accum_bs=24, remainder='carry')))


@pytest.mark.parametrize('opt_func', OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize('how', WAYS)
@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16], ids=str)
def test_a_backward_pass_of_ones_own_in_a_window_of_one(dtype, how, opt_func):
    "The plain fit, bit for bit"
    def train(*cbs):
        cbs = [*cbs, RunsBackward(how)]
        learn = make_learner(32, n=88, m=model().to(dtype), cbs=cbs, opt_func=opt_func)
        return fit(learn, 2)

    big = train()
    assert_apart(weights(big), weights(model().to(dtype)), 1e-2)
    for make in ONE_MICRO_BATCH.values():
        learn = train(make())
        assert_same(weights(learn), weights(big))
        assert_same(losses(learn), losses(big))


@pytest.mark.parametrize('bs, settings', SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize('how', WAYS)
def test_a_backward_pass_of_ones_own_in_a_window_of_several(how, bs, settings):
    "An error before the first step"
    cbs = [GradientAccumulation(**settings), RunsBackward(how)]
    learn = make_learner(bs, n=88, cbs=cbs)
    with pytest.raises(RuntimeError, match='ran the backward pass itself .*let fastai run it, or use windows of one'):
        fit(learn, 2)
    assert_same(weights(learn), weights(model()))


@each_layout
@pytest.mark.parametrize('how', [by_backward, by_new_tensors, in_place])
def test_a_backward_pass_of_ones_own_in_mid_window(how, bs, settings):
    "Is noticed, too"
    cbs = [GradientAccumulation(**settings), RunsBackward(how, begin=2)]
    learn = make_learner(bs, n=88, cbs=cbs)
    with pytest.raises(RuntimeError, match='ran the backward pass itself'):
        fit(learn, 2)
    assert_same(weights(learn), weights(model()))


class CancelsBackward(Callback):
    run_valid = False
    def before_backward(self): raise CancelBackwardException


@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'after_cancel_backward'])
@pytest.mark.parametrize('make', ONE_MICRO_BATCH.values(), ids=ONE_MICRO_BATCH)
def test_a_backward_pass_of_ones_own_may_run_before_or_afterwards(make, event):
    "Here with a loss of its own"
    def run_backward(self):
        if self.training:
            (self.pred-self.y).abs().mean().backward()

    def train(*cbs):
        own = Callback(**{event: run_backward})
        return fit(make_learner(32, n=88, cbs=[*cbs, CancelsBackward(), own]), 2)

    big = train()
    assert_moved(big)
    assert_same(weights(train(make())), weights(big))


class SkipsBackward(Callback):
    "Cancels the backward pass of the `nth` micro-batch"
    run_valid = False

    def __init__(self, nth):
        self.nth = nth
        self.n = 0

    def before_backward(self):
        self.n += 1
        if self.n == self.nth:
            raise CancelBackwardException


@pytest.mark.parametrize('nth', [1, 3])
@pytest.mark.parametrize('bs, settings, first_size', [
    (8, dict(accum_bs=32), 32),
    (32, dict(micro_batch_size=8), 24)], ids=['windows', 'split'])
def test_a_micro_batch_without_a_backward_pass_is_left_out(bs, settings, first_size, nth):
    "Windows close up, and a batch that is split is the rest of itself"
    cbs = [GradientAccumulation(**settings), SkipsBackward(nth)]
    learn = fit(make_learner(bs, cbs=cbs), 1)
    kept = [i for i in range(96) if i//8 != nth-1]
    second = first_size+32
    parts = kept[:first_size], kept[first_size:second], kept[second:]
    steps = [(samples, 0) for samples in parts]
    assert_same(weights(learn), reference(steps, 96, sgd)[0], ROUNDING)
    assert learn.recorder.accum_bs == [len(samples) for samples in parts]


# A callback accumulates by itself, and cancels batches after their backward pass

class AccumulatesItself(Callback):
    "Keeps gradients over three batches, as fastai lets it"
    run_valid = False

    def before_fit(self): self.n = 0

    def after_backward(self):
        self.n += 1
        if self.n%3:
            raise CancelBatchException


@each_layout
def test_a_callback_that_accumulates_itself_sees_windows(bs, settings):
    "As it sees batches of their size: each of its steps has the gradients of three windows"
    def train(bs, *cbs):
        return fit(make_learner(bs, n=192, cbs=[AccumulatesItself(), *cbs]), 2)

    big = train(32)
    small = train(bs, GradientAccumulation(**settings))
    assert_moved(big)
    assert_same(weights(small), weights(big), ROUNDING)
    assert_same(losses(small), losses(big), 1e-6)  # float32


class SendsItself(Learner):
    def __call__(self, event):
        super().__call__(event)


def test_a_callback_that_accumulates_itself_is_named_where_events_are_somebody_elses():
    "A Learner that sends events in its own way cannot hold them back"
    learn = SendsItself(make_learner(8).dls, model(), mse, opt_func=SGD)
    with pytest.raises(RuntimeError, match='AccumulatesItself cancels batches after their backward pass.*remove it'):
        fit(learn, 1, cbs=[AccumulatesItself(), GradientAccumulation(32)])
    assert_same(weights(learn), weights(model()))


def test_who_has_raised_an_exception_in_an_event():
    def fail(self): raise CancelBatchException
    cb = Callback(after_backward=fail)
    with pytest.raises(CancelBatchException) as caught:
        cb('after_backward')
    assert callback_that_raised(caught.value) is cb
    with pytest.raises(CancelBatchException) as caught:
        fail(cb)
    assert callback_that_raised(caught.value) is None
