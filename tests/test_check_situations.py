"Where a training differs from the one with the large batch, check_accum names the reason"
from situation_callbacks import *
from test_situations_loaders import OF_WHOLE_BATCHES, learner_on


class MovesTeacher(OnTargets):
    "Moves a second model for each batch, and adds its outputs to the targets"
    def before_fit(self): self.teacher = deepcopy(self.model)

    def before_batch(self):
        with torch.no_grad():
            for slow, p in zip(self.teacher.parameters(), self.params): slow.lerp_(p, .3)
            self.learn.yb = (self.y+self.teacher(self.x),)


def worst(pred, targets):
    return (pred-targets).abs().max().float()


class SwitchesLoss(OnTargets):
    "Trains on the worst sample from the third batch on"
    def before_batch(self):
        if self.learn.train_iter == 2: self.learn.loss_func = worst


class MixesLater(MixesNeighbours):
    "Does so from the second epoch on"
    def before_batch(self):
        if self.epoch: super().before_batch()


# Callbacks: check_accum names them
FOUND = [
    *[(cls, 'windows') for cls in (
        MixesNeighbours, MixesLater, SharpnessAware, ClassCounts, SchedulesByLoader, NotesHits, NotesNorms,
        BalancesBatch, HooksGradientsLater, MovesTeacher, SwitchesLoss)],
    *[(cls, 'split') for cls in (PerturbsWeights, NotesNorms)]]


def check(situation, way='windows', **kwargs):
    bs, cbs = WAYS[way]()
    return situation(bs, cbs).check_accum(verbose=False, **kwargs)


@pytest.mark.thin(2)
@pytest.mark.parametrize('cls,way', FOUND)
def test_the_callback_that_makes_another_training_is_named(cls, way):
    assert check(cls.learner, way).reasons == [f'{cls.__name__} acts on 3 samples at a time']


class DividesByAverage(MSE):
    "A loss that keeps an average of itself"
    average = 1.
    def forward(self, *args):
        loss = super().forward(*args)
        self.average += .1*(loss.item()-self.average)
        return loss/self.average


def regression(m, loss_func):
    "Returns a situation: a Learner that trains `m` by this loss"
    return partial(learner_of, samples(N), loss_func, m)


@pytest.mark.parametrize('loss_func,way', [(worst, 'windows'), (DividesByAverage(), 'split')])
def test_a_loss_that_is_no_sum_of_its_parts_is_named(loss_func, way):
    result = check(regression(model(), loss_func), way)
    assert result.reasons == ['the losses of 3 samples at a time do not add up to the loss of all samples']


class KeepsMean(nn.Module):
    "Takes from its inputs what it keeps of earlier batches"
    mean = 0.
    def forward(self, x):
        res = x-self.mean
        if self.training: self.mean = .9*self.mean+.1*x.detach().mean(0)
        return res


class AddsSpread(nn.Module):
    "Lets samples act on each other, in validation, too"
    def forward(self, x): return x+x.std(0)


def normalizing():
    return nn.Sequential(nn.BatchNorm1d(8), torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))


@pytest.mark.parametrize('make_layer,reasons', [
    (normalizing, ['BatchNorm1d, _SpectralNorm can only see 3 samples at a time']),
    (KeepsMean, ['the model in training mode, for example dropout']),
    (AddsSpread, [])])
def test_layers_in_which_samples_act_on_each_other_are_found(make_layer, reasons):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(5, 8), make_layer(), nn.Tanh(), nn.Linear(8, 1)).double()
    result = check(regression(m, MSE()))
    assert not result.equal
    assert result.reasons == reasons
    has_reason = 'was not found' not in str(result)
    assert has_reason == bool(reasons)


@pytest.mark.parametrize('cls', [
    DropsEasySamples, Repeats, ChoosesBatches, CountsCorrect])
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
