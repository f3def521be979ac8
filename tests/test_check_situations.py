"Where a training differs from the one with the large batch, check_accum names the reason"
from situation_callbacks import *
from situation_losses import INEXACT, learner_with, worst
from test_situations_loaders import OF_WHOLE_BATCHES, learner_on


class TwoModes(nn.Module):
    "Two networks, of which a callback chooses one"
    def __init__(self):
        super().__init__()
        self.networks = nn.ModuleList([model(0), model(1)])
        self.chosen = 0

    def forward(self, x): return self.networks[self.chosen](x)


class OnTwoModes(OnTargets):
    @classmethod
    def learner(cls, bs, cbs): return learner_of(list(zip(*data(N))), MSE(), TwoModes(), bs, [cls(), *cbs])


class DrawsMode(OnTwoModes):
    def before_batch(self): self.learn.model.chosen = np.random.randint(2)


class ModesInTurn(OnTwoModes):
    def before_batch(self): self.learn.model.chosen = 1-self.learn.model.chosen


class MovesTeacher(OnTargets):
    "Moves a second model for each batch, and adds its outputs to the targets"
    def before_fit(self): self.teacher = deepcopy(self.model)

    def before_batch(self):
        with torch.no_grad():
            for slow, p in zip(self.teacher.parameters(), self.params): slow.lerp_(p, .3)
            self.learn.yb = (self.y+self.teacher(self.x),)


class SwitchesLoss(OnTargets):
    "Trains on the worst sample from the third batch on"
    def before_batch(self):
        if self.learn.train_iter == 2: self.learn.loss_func = worst


class Centers(OnTargets):
    "Keeps the mean of the batch, and uses it after the step"
    def before_fit(self): self.center = torch.zeros(1)
    def before_batch(self): self.mean = self.y.mean(0)
    def after_pred(self): self.learn.pred = self.pred-self.center
    def after_step(self): self.center = .5*self.center+.5*self.mean


class MixesLater(MixesNeighbours):
    "Does so from the second epoch on"
    def before_batch(self):
        if self.epoch: super().before_batch()


# Callbacks: check_accum names them. A fit warns of those that are marked
FOUND = [
    *[(cls, 'windows') for cls in (
        MixesNeighbours, MixesLater, SharpnessAware, ClassCounts, SchedulesByLoader, NotesHits, NotesNorms,
        BalancesBatch, HooksGradientsLater, DrawsMode, ModesInTurn, MovesTeacher, SwitchesLoss, Centers)],
    *[(cls, 'split') for cls in (PerturbsWeights, NotesNorms, SwitchesLoss)]]


def name_of(o): return o.__name__ if isinstance(o, type) else None


def check(situation, way='windows', **kwargs):
    bs, cbs = WAYS[way]()
    return situation(bs, cbs).check_accum(verbose=False, **kwargs)


@pytest.mark.thin(2)
@pytest.mark.parametrize('cls,way', FOUND, ids=name_of)
def test_the_callback_that_makes_another_training_is_named(cls, way):
    assert check(cls.learner, way).reasons == [f'{cls.__name__} acts on 3 samples at a time']


@pytest.mark.thin(2)
@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('loss_func', INEXACT)
def test_a_loss_that_is_no_sum_of_its_parts_is_named(loss_func, way):
    result = check(learner_with(loss_func), way)
    assert result.reasons == ['the losses of 3 samples at a time do not add up to the loss of all samples']


class KeepsMean(nn.Module):
    "Takes from its inputs what it keeps of earlier batches, in a buffer, or in a plain attribute"
    def __init__(self, is_buffer):
        super().__init__()
        if is_buffer: self.register_buffer('mean', torch.zeros(8).double())
        else: self.mean = torch.zeros(8).double()

    def forward(self, x):
        res = x-self.mean
        if self.training: self.mean = self.mean.lerp(x.detach().mean(0), .1)
        return res


class AddsSpread(nn.Module):
    "Lets samples act on each other, in validation, too"
    def forward(self, x): return x+x.std(0)


class DividesByAverage(MSE):
    "A loss that keeps an average of itself"
    average = 1.
    def forward(self, *args):
        loss = super().forward(*args)
        self.average += .1*(loss.item()-self.average)
        return loss/self.average


def layers(*others): return nn.Sequential(nn.Linear(5, 8), *others, nn.Tanh(), nn.Linear(8, 1)).double()


def spectral(): return torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))


@pytest.mark.thin(2)
@pytest.mark.parametrize('make_model,loss,reasons', [
    (lambda: layers(KeepsMean(True)), MSE, ['KeepsMean sees 3 samples at a time']),
    (lambda: layers(KeepsMean(True), nn.BatchNorm1d(8)), MSE, ['BatchNorm1d, KeepsMean see 3 samples at a time']),
    (lambda: layers(KeepsMean(False)), MSE, ['the model in training mode, for example dropout']),
    (lambda: layers(spectral()), MSE, ['_SpectralNorm sees 3 samples at a time']),
    (layers, DividesByAverage, ['the losses of 3 samples at a time do not add up to the loss of all samples']),
    (lambda: layers(AddsSpread()), MSE, [])])
def test_what_a_model_or_a_loss_keeps_is_found(make_model, loss, reasons):
    torch.manual_seed(0)
    samples = list(zip(*data(N)))
    result = check(lambda bs, cbs: learner_of(samples, loss(), make_model(), bs, cbs))
    assert not result.equal
    assert result.reasons == reasons
    has_reason = 'was not found' not in str(result)
    assert has_reason == bool(reasons)


@pytest.mark.parametrize('cls', [
    DropsEasySamples, Repeats, StepsTwice, SkipsStep, ChoosesBatches, CountsCorrect], ids=name_of)
def test_callbacks_that_train_as_with_the_large_batch_give_no_false_alarm(cls):
    result = check(cls.learner)
    assert result.equal, str(result)


# Limits that the page names. If one of these tests fails, that limit is gone: take it off the page, too

@pytest.mark.parametrize('make_loader', OF_WHOLE_BATCHES)
def test_limit_on_the_page_samples_are_those_that_the_loader_has_put_together(make_loader):
    assert check(learner_on(make_loader)).equal


@pytest.mark.parametrize('cls', [MasksInputs, KeepsMasked])
def test_limit_on_the_page_of_few_samples_none_may_be_left(cls):
    assert not check(cls.learner, n_steps=6).equal
    assert check(cls.learner, n_steps=6, size=12).equal
