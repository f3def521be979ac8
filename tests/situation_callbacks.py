"Callbacks as other people write them, each in a few lines"
from situations import *


class OnTargets(Callback):
    "Acts in training only, on a regression"
    run_valid = False
    args = {}  # of the Learner
    make_loss = MSE

    @classmethod
    def learner(cls, bs, cbs):
        samples = list(zip(*data(N)))
        cbs = [*cls.callbacks(), *cbs]
        return learner_of(samples, cls.make_loss(), model(), bs, cbs, **cls.args)

    @classmethod
    def callbacks(cls): return [cls()]

    @property
    def params(self): return list(self.model.parameters())

    def use(self, loss):
        "Trains on this loss. The Recorder averages it in float32"
        self.learn.loss_grad = loss
        self.learn.loss = loss.detach().float()


class OnLabels(OnTargets):
    "The same, on a classification"
    make_loss = CrossEntropy

    @classmethod
    def learner(cls, bs, cbs):
        cbs = [*cls.callbacks(), *cbs]
        return learner_of(labelled(), cls.make_loss(), classifier(), bs, cbs, **cls.args)


# They change the batch

class AddsNoise(OnTargets):
    "Adds noise to the inputs, which depends on nothing but the sample"
    def before_batch(self):
        self.learn.xb = (self.x+.1*torch.sin(1e3*self.x),)


class MasksInputs(OnLabels):
    "Hides large inputs, and lets the model predict these alone"
    def before_batch(self):
        is_masked = self.x > .5
        self.learn.xb = (self.x.masked_fill(is_masked, 0.),)
        labels = is_masked[:, :3].long().argmax(1)
        self.learn.yb = (labels.masked_fill(~is_masked[:, 0], -100),)


class KeepsMasked(OnTargets):
    "Cuts outputs and targets down to some of the samples once the model has run"
    def after_pred(self):
        is_kept = self.x[:, 0] > 0
        self.learn.pred = self.pred[is_kept]
        self.learn.yb = (self.y[is_kept],)


class DropsEasySamples(OnTargets):
    "Takes out samples before the model runs"
    def before_batch(self):
        is_kept = self.x[:, 0] > -.3
        self.learn.xb = (self.x[is_kept],)
        self.learn.yb = (self.y[is_kept],)


class Repeats(OnTargets):
    "Repeats each sample with two views, one beside the other"
    def before_batch(self):
        views = torch.stack([self.x, self.x*.9], 1)
        self.learn.xb = (views.flatten(0, 1),)
        self.learn.yb = (self.y.repeat_interleave(2, 0),)


class Attacks(OnTargets):
    "Moves the inputs along the sign of the gradient of the loss, before the model is trained on them"
    def before_batch(self):
        inputs = self.x.clone().requires_grad_()
        loss = F.mse_loss(self.model(inputs), self.y)
        slope, = torch.autograd.grad(loss, inputs)
        self.learn.xb = (self.x+.05*slope.sign(),)


class MixesNeighbours(OnTargets):
    "Mixes each sample with the next one of its batch"
    def before_batch(self):
        self.learn.xb = (self.x.lerp(self.x.roll(1, 0), .3),)
        self.learn.yb = (self.y.lerp(self.y.roll(1, 0), .3),)


class Standardizes(OnTargets):
    "Takes the mean of the batch from the inputs"
    def before_batch(self):
        self.learn.xb = (self.x-self.x.mean(0),)


class WithTeacher(nn.Module):
    "Adds the distance to the outputs of a teacher"
    def forward(self, pred, labels, outputs):
        return (F.cross_entropy(pred, labels)+F.mse_loss(pred, outputs)).float()


class GivesTeacher(OnLabels):
    "Appends the outputs of a teacher to the targets"
    run_valid = True
    make_loss = WithTeacher
    def before_fit(self): self.teacher = classifier(seed=5)

    def before_batch(self):
        with torch.no_grad():
            outputs = self.teacher(self.x)
        self.learn.yb = (*self.yb, outputs)


# They change outputs or loss

class RunsTwice(OnTargets):
    "Adds the distance to a second pass of the model"
    def after_pred(self):
        self.second = self.model(self.x*.9)

    def after_loss(self):
        distance = F.mse_loss(self.pred, self.second)
        self.use(self.loss_grad+distance)


class Distils(OnLabels):
    "Adds the divergence from the outputs of a teacher"
    def before_fit(self): self.teacher = classifier(seed=5)

    def after_loss(self):
        with torch.no_grad():
            targets = self.teacher(self.x).softmax(1)
        shares = self.pred.log_softmax(1)
        divergence = F.kl_div(shares, targets, reduction='batchmean')
        self.learn.loss_grad += .5*divergence
        self.learn.loss += .5*divergence.detach()


class BalancesBatch(OnLabels):
    "Lets the mean prediction of the batch be even"
    def after_loss(self):
        mean = self.pred.softmax(1).mean(0)
        self.use(self.loss_grad+(mean*mean.log()).sum())


class PenalizesActivations(OnTargets):
    "Adds the square of what a hook finds in a layer"
    def before_fit(self):
        self.hook = self.model[0].register_forward_hook(self.keep)

    def keep(self, module, args, output): self.activations = output

    def after_loss(self):
        self.learn.loss_grad += 1e-2*self.activations.pow(2).mean()

    def after_fit(self): self.hook.remove()


class MinesHardSamples(OnLabels):
    "Takes the mean over the harder half of the batch"
    def after_loss(self):
        losses = F.cross_entropy(self.pred, self.y, reduction='none')
        hardest = losses.topk(len(losses)//2).values
        self.use(hardest.mean())


class Reduces(OnTargets):
    "Takes the mean of the losses that a loss function has returned for each sample"
    run_valid = True
    make_loss = partial(MSE, reduction='none')
    def after_loss(self): self.use(self.loss_grad.mean())


class NormalizesLoss(OnTargets):
    "Divides the loss by a moving average of it"
    def before_fit(self): self.mean = 1.

    def after_loss(self):
        self.mean = .9*self.mean+.1*self.loss.item()
        self.learn.loss_grad = self.loss_grad/self.mean


class ChangesLossLate(OnTargets):
    "Adds the size of all weights in before_backward"
    def before_backward(self):
        size = sum(p.pow(2).sum() for p in self.params)
        self.learn.loss_grad = self.loss_grad+1e-2*size


class ReplacesLossLate(OnTargets):
    "Puts the mean over positive samples in the place of the loss in before_backward"
    def before_backward(self):
        is_positive = self.y[:, 0] > 0
        errors = (self.pred-self.y).pow(2)[is_positive]
        self.learn.loss_grad = errors.sum()/is_positive.sum().clamp_min(1)


class ScalesLoss(OnTargets):
    "Multiplies the loss before the backward pass, and divides the gradients before the step"
    def before_backward(self): self.learn.loss_grad = self.loss_grad*1024

    def before_step(self):
        for p in self.params:
            p.grad /= 1024


class ShowsOtherLoss(OnTargets):
    "Lets loggers see another loss than the one that is trained"
    def after_loss(self):
        self.learn.loss = (self.pred-self.y).abs().mean().detach().float()


class PenalizesSlope(OnTargets):
    "Adds the size of the gradient of the loss by the inputs"
    def before_batch(self):
        self.learn.xb = (self.x.clone().requires_grad_(),)

    def after_loss(self):
        slope, = torch.autograd.grad(self.loss_grad, self.x, create_graph=True)
        self.learn.loss_grad = self.loss_grad+slope.norm(dim=1).sum()


# They change gradients, weights and rates

class AdaptiveClip(OnTargets):
    "Clips each gradient to a share of its weight before the step"
    def before_step(self):
        for p in self.params:
            most = .02*p.detach().norm()+1e-3
            p.grad.mul_((most/p.grad.norm()).clamp(max=1))


class SharpnessAware(OnTargets):
    "Computes the gradient once more before the step, at weights that are worse"
    def before_step(self):
        moves = []
        norm = torch.stack([p.grad.norm() for p in self.params]).norm()
        for p in self.params:
            move = .05*p.grad/norm
            p.data.add_(move)
            p.grad.zero_()
            moves.append(move)
        self.learn.loss_func(self.model(*self.xb), *self.yb).backward()
        for p, move in zip(self.params, moves):
            p.data.sub_(move)


class StepsTwice(OnTargets):
    "Takes a step with an optimizer of its own for the last layer, in place of the Learner's"
    def before_fit(self):
        self.own = torch.optim.SGD(self.model[2].parameters(), lr=.05)

    def before_step(self):
        self.own.step()
        for p in self.model[2].parameters():
            p.grad.zero_()


class PerturbsWeights(OnTargets):
    "Moves the weights for the two passes of a batch, and back"
    def before_batch(self): self.move(1.1)
    def after_backward(self): self.move(1/1.1)

    def move(self, factor):
        for p in self.params:
            p.data.mul_(factor)


class HooksGradientsLater(OnTargets):
    "Limits the gradients of all weights by hooks after the first batch"
    def after_batch(self):
        if self.train_iter != 1: return
        limit = partial(torch.clamp, min=-.02, max=.02)
        for p in self.params:
            p.register_hook(limit)


class SchedulesByLoader(OnTargets):
    "Advances a scheduler, which is to end with the last batch that `dls.train` announces"
    def before_fit(self):
        n = len(self.dls.train)*self.learn.n_epoch
        self.rates = iter(np.linspace(.1, .01, n+1).tolist())

    def after_step(self):
        self.opt.set_hyper('lr', next(self.rates))


class SchedulesAndTimes(OnTargets):
    "Lowers the rate after each batch, and times batches, too"
    def before_batch(self): self.start = time.perf_counter()

    def after_batch(self):
        self.seconds = time.perf_counter()-self.start
        self.opt.set_hyper('lr', self.opt.hypers[-1]['lr']*.9)


class ChoosesBatches(OnTargets):
    "Trains on the first batches of a loader, by one of its own"
    def before_train(self):
        self.learn.dl = FirstSamples(self.learn.dl, 64)


class FirstSamples(GetAttr):
    "The batches with the first `n` samples of `dl`"
    _default = 'dl'
    def __init__(self, dl, n):
        self.dl = dl
        self.n = n

    def __len__(self): return self.n//self.dl.bs

    def __iter__(self):
        return itertools.islice(iter(self.dl), len(self))


class ChoosesBatchesLate(ChoosesBatches):
    "Does so after everybody else"
    order = 20


class DecaysByPosition(OnTargets):
    "Sets weight decay and momentum by the fraction of training"
    args = dict(opt_func=partial(SGD, mom=.5))

    def before_batch(self):
        self.opt.set_hyper('wd', .1*(1-self.learn.pct_train))
        self.opt.set_hyper('mom', .5*self.learn.pct_train)


class MeanTeacher(OnTargets):
    "Adds the distance to the outputs of a moving average of the model"
    def before_fit(self): self.teacher = deepcopy(self.model)

    def after_loss(self):
        with torch.no_grad():
            targets = self.teacher(self.x)
        self.learn.loss_grad += F.mse_loss(self.pred, targets)

    def after_step(self):
        for slow, p in zip(self.teacher.parameters(), self.params):
            slow.data.lerp_(p.data, .5)


class DualVariable(OnTargets):
    "Raises the weight of a penalty while the loss is above a bound"
    def before_fit(self): self.weight = .1

    def after_loss(self):
        self.learn.loss_grad += self.weight*self.model[0].weight.pow(2).sum()

    def after_batch(self):
        self.weight = max(0., self.weight+.1*(self.loss.item()-.8))


class ClassCounts(OnLabels):
    "Weighs classes by how often they have come, which it counts in after_batch"
    def before_fit(self):
        self.counts = torch.ones(3, dtype=torch.float64)

    def after_batch(self):
        self.counts += torch.bincount(self.y, minlength=3)
        self.learn.loss_func.weight = self.counts.sum()/(3*self.counts)


# They stop

class FewBatches(OnTargets):
    "Trains on two batches of each epoch"
    def before_batch(self):
        if self.iter >= 2: raise CancelTrainException


class SkipsStep(OnTargets):
    "Leaves out the step if the gradient is large"
    def before_step(self):
        if self.model[0].weight.grad.norm() > .6: raise CancelStepException


class SwitchesOff(OnTargets):
    "Switches another callback off from the second epoch on"
    @classmethod
    def callbacks(cls): return [AddsNoise(), cls()]

    def before_epoch(self): self.learn.adds_noise.run = self.epoch == 0


# They note

class NotesHits(OnTargets):
    "Notes how good the outputs are, after the step"
    def before_fit(self): self.rows = []

    def after_step(self):
        self.rows.append([(self.pred-self.y).abs().mean().item()])


class NotesNorms(OnTargets):
    "Notes the norm of the gradient after the backward pass"
    def before_fit(self): self.rows = []
    def after_backward(self): self.rows.append([p.grad.norm().item() for p in self.params])


class CountsCorrect(OnLabels):
    "Adds up the hits of each epoch after the model has run"
    def before_fit(self): self.rows = []
    def before_train(self): self.hits = 0

    def after_pred(self):
        self.hits += int((self.pred.argmax(1) == self.y).sum())

    def after_train(self): self.rows.append([self.hits])


class CountsSamples(OnTargets):
    "Adds up the samples of each batch in after_batch"
    def before_fit(self): self.rows = []
    def before_train(self): self.n = 0
    def after_batch(self): self.n += len(self.x)
    def after_train(self): self.rows.append([self.n])


class Times(OnTargets):
    "Notes how many batches it has timed, last of all"
    order = 70
    def before_fit(self): self.rows = []
    def before_batch(self): self.start = time.perf_counter()

    def after_batch(self):
        self.rows.append([float(time.perf_counter() >= self.start)])


class WatchesActivations(OnTargets):
    "Notes the mean output of a layer by a hook"
    def before_fit(self):
        self.rows = []
        self.hook = self.model[0].register_forward_hook(self.note)

    def note(self, module, args, output):
        if module.training: self.rows.append([output.mean().item()])

    def after_fit(self): self.hook.remove()
