"Inputs, targets and losses that callbacks set are those of the large batch; whoever sets them too late is named"
import pytest

from callback_fits import *

pytestmark = pytest.mark.filterwarnings('ignore:.* is called once per micro-batch')  # which is not the point here


# Whoever has the targets, or the loss, in after_loss only

class HidesTargets(Callback):
    "Hides the targets from the loss function, and computes the loss by itself"
    per_sample = 'kept',
    def before_batch(self):
        self.kept = self.yb
        self.learn.yb = ()

    def after_loss(self):
        self.learn.yb = self.kept
        self.learn.loss_grad = mse(self.pred, self.y)
        self.learn.loss = self.learn.loss_grad.clone()


class GivesTargetsToModel(Callback):
    "Gives the targets to the model, which returns outputs and loss, as detectors and language models do"
    def before_batch(self):
        self.learn.xb = *self.xb, *self.yb
        self.learn.yb = ()

    def after_pred(self):
        self.learn.pred, self.learn.loss_grad = self.pred

    def after_loss(self):
        _, *self.learn.yb = self.xb
        self.learn.loss = self.learn.loss_grad.clone()


class ReturnsLoss(nn.Module):
    "Returns its loss beside its outputs"
    def __init__(self):
        super().__init__()
        self.model = model()

    def forward(self, inputs, targets):
        outputs = self.model(inputs)
        return outputs, mse(outputs, targets)


class OnlyReturnsLoss(ReturnsLoss):
    "Returns nothing but its loss"
    def forward(self, inputs, targets): return mse(self.model(inputs), targets)


class TakesOutputForLoss(GivesTargetsToModel):
    def after_pred(self): self.learn.loss_grad = self.pred


class Reconstructs(Callback):
    "Makes a target of the inputs, of a loader that yields nothing else"
    def after_loss(self):
        self.learn.yb = self.x[:, :1],
        self.learn.loss_grad = mse(self.pred, self.y)
        self.learn.loss = self.learn.loss_grad.clone()


def learner_of_inputs(bs, cbs):
    samples = [(x,) for x in data(100)[0]]
    dls = DataLoaders(DataLoader(samples, bs=bs), DataLoader(samples[:20], bs=16))
    return Learner(dls, model(), loss_func=mse, opt_func=SGD, cbs=cbs)


WHO_HAS_THE_LOSS = dict(
    callback=lambda bs, cbs: make_learner(bs, n=100, cbs=[HidesTargets(), *cbs]),
    model=lambda bs, cbs: make_learner(bs, n=100, m=ReturnsLoss(), cbs=[GivesTargetsToModel(), *cbs]),
    output=lambda bs, cbs: make_learner(bs, n=100, m=OnlyReturnsLoss(), cbs=[TakesOutputForLoss(), *cbs]),
    inputs=lambda bs, cbs: learner_of_inputs(bs, [Reconstructs(), *cbs]))


def fit_large(who):
    big = fit(WHO_HAS_THE_LOSS[who](32, []), 2)
    assert_moved(big)
    return big


@pytest.mark.filterwarnings('ignore:validation batches are not split')  # since outputs are losses
@pytest.mark.parametrize('bs,args', [
    (8, dict(accum_bs=32)), (32, dict(micro_batch_size=8)), (16, dict(accum_bs=32, micro_batch_size=5))])
@pytest.mark.parametrize('who', WHO_HAS_THE_LOSS)
def test_targets_and_losses_that_come_in_after_loss_train_as_with_the_large_batch(who, bs, args):
    "A warning says that their weights are rows"
    learn = WHO_HAS_THE_LOSS[who](bs, [GradientAccumulation(**args)])
    with pytest.warns(UserWarning, match='a callback replaces the loss in after_loss'): fit(learn, 2)
    big = fit_large(who)
    assert_same(weights(learn), weights(big), ROUNDING)
    assert_same(losses(learn), losses(big), FLOAT32)


@pytest.mark.parametrize('make_cb', [ActivationCheckpointing, all_blocks, partial(GradientAccumulation, 32)])
@pytest.mark.parametrize('who', WHO_HAS_THE_LOSS)
def test_targets_and_losses_that_come_in_after_loss_train_where_batches_run_whole(who, make_cb):
    learn = fit(WHO_HAS_THE_LOSS[who](32, [make_cb()]), 2)
    big = fit_large(who)
    assert_same(weights(learn), weights(big))
    assert_same(losses(learn), losses(big))


def labels_of(bs, cbs):
    "Returns a Learner of sequences of labels, most of which its loss function ignores"
    inputs, labels = tokens()
    samples = list(zip(inputs, labels))
    torch.manual_seed(0)
    tagger = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 4)).double()
    dls = DataLoaders(DataLoader(samples, bs=bs), DataLoader(samples, bs=12))
    return Learner(dls, tagger, loss_func=CrossEntropyLossFlat(), opt_func=SGD, cbs=cbs)


def replace_loss(self): self.learn.loss_grad = self.pred.square().mean()


@pytest.mark.filterwarnings('ignore:a callback replaces the loss in after_loss')
@pytest.mark.parametrize('make_cb', [
    partial(At, 'after_loss', replace_loss),
    partial(Callback, after_loss=replace_loss)])
def test_a_loss_that_replaces_one_over_labels_is_weighed_by_rows(make_cb):
    "Also if it is a function in a plain Callback"
    learn = fit(labels_of(3, [make_cb(), GradientAccumulation(12)]), lr=1.)
    first = weights(labels_of(12, []))
    big = fit(labels_of(12, [make_cb()]), lr=1.)
    assert (weights(big)-first).abs().max() > 1e-3
    assert_same(weights(learn), weights(big), ROUNDING)


# Late callbacks, which see the first loader batch of a window only

class RestoresInputs(Callback):
    "Changes the inputs, and puts them back after the batch"
    def before_batch(self):
        self.kept = self.xb
        self.learn.xb = self.x*2-1,

    def after_batch(self): self.learn.xb = self.kept


class SmoothsTargets(Callback):
    "Makes targets smaller; counts batches"
    n = 0
    def before_batch(self): self.learn.yb = .9*self.y,
    def after_batch(self): self.n += 1


class Shuffles(Callback):
    "Changes the order of the samples, in inputs and targets"
    def before_batch(self):
        self.learn.xb = self.x.flip(0),
        self.learn.yb = self.y.flip(0),

    def after_batch(self): self.learn.pred = self.pred.flip(0)


class AddsTargets(Callback):
    "Adds the targets to the inputs, and looks at the loss, an event of each pass"
    n = 0
    def before_batch(self): self.learn.xb = self.x+self.y,
    def after_loss(self): self.n += 1
    def after_batch(self): self.n = 0


PREPARING = [RestoresInputs, SmoothsTargets, Shuffles, AddsTargets]


def with_order(cls, order):
    cb = cls()
    cb.order = order
    return cb


@pytest.mark.parametrize('micro_batch_size', [None, 3, 'auto'])
@pytest.mark.parametrize('cls', PREPARING)
def test_a_late_callback_that_prepares_batches_is_named_in_each_fit(cls, micro_batch_size):
    "By its own class, also where batches may run again"
    cbs = [with_order(cls, 50), GradientAccumulation(32, micro_batch_size=micro_batch_size)]
    learn = make_learner(8, cbs=cbs)
    for _ in range(2):
        with pytest.warns(UserWarning, match=f'before_batch of {cls.__name__} changes the batch') as said: fit(learn, 1)
        assert len(of_late_callbacks(said)) == 1


def of_late_callbacks(said):
    return [o for o in said if 'changes the batch' in str(o.message)]


def test_several_late_callbacks_are_named_together():
    cbs = [with_order(Shuffles, 90), with_order(SmoothsTargets, 55), GradientAccumulation(32)]
    learn = make_learner(8, cbs=cbs)
    with pytest.warns(UserWarning, match='before_batch of SmoothsTargets, Shuffles changes'): fit(learn, 1)


@pytest.mark.parametrize('micro_batch_size', [None, 'auto'])
@pytest.mark.parametrize('cls', PREPARING)
def test_with_the_order_that_the_warning_advises_the_batches_are_prepared_as_the_large_one(cls, micro_batch_size):
    "And nothing is said"
    cbs = [with_order(cls, 45), GradientAccumulation(32, micro_batch_size=micro_batch_size)]
    learn = fit(make_learner(8, cbs=cbs))
    big = fit(make_learner(32, cbs=with_order(cls, 45)))
    assert_moved(big)
    assert_same(weights(learn), weights(big), ROUNDING)


@pytest.mark.parametrize('cls', PREPARING)
def test_where_a_window_is_one_loader_batch_no_callback_is_late(cls):
    learn = fit(make_learner(32, cbs=[with_order(cls, 90), GradientAccumulation(32)]))
    big = fit(make_learner(32, cbs=with_order(cls, 90)))
    assert_moved(big)
    assert_same(weights(learn), weights(big))
