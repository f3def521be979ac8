"Callbacks as other people write them, each in a few lines"
from situations import *


class OnTargets(Callback):
    "Acts in training only, on a regression"
    run_valid = False
    args = {}  # of the Learner
    make_loss = MSE

    @classmethod
    def learner(cls, bs, cbs):
        cbs = [*cls.callbacks(), *cbs]
        return learner_of(samples(N), cls.make_loss(), model(), bs, cbs, **cls.args)

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


class MixesNeighbours(OnTargets):
    "Mixes each sample with the next one of its batch"
    def before_batch(self):
        self.learn.xb = (self.x.lerp(self.x.roll(1, 0), .3),)
        self.learn.yb = (self.y.lerp(self.y.roll(1, 0), .3),)


# They change outputs or loss


class BalancesBatch(OnLabels):
    "Lets the mean prediction of the batch be even"
    def after_loss(self):
        mean = self.pred.softmax(1).mean(0)
        self.use(self.loss_grad+(mean*mean.log()).sum())


class PenalizesSlope(OnTargets):
    "Adds the size of the gradient of the loss by the inputs"
    def before_batch(self):
        self.learn.xb = (self.x.clone().requires_grad_(),)

    def after_loss(self):
        slope, = torch.autograd.grad(self.loss_grad, self.x, create_graph=True)
        self.learn.loss_grad = self.loss_grad+slope.norm(dim=1).sum()


# They change gradients, weights and rates


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


class ClassCounts(OnLabels):
    "Weighs classes by how often they have come, which it counts in after_batch"
    def before_fit(self):
        self.counts = torch.ones(3, dtype=torch.float64)

    def after_batch(self):
        self.counts += torch.bincount(self.y, minlength=3)
        self.learn.loss_func.weight = self.counts.sum()/(3*self.counts)


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
