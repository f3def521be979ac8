"Losses as other people write them, each in a few lines"
from situations import *

CONTINUOUS, TARGETS = data(N)
LABELS = torch.stack([label for _, label in labelled()])


class HuberLoss(InFloat32, nn.HuberLoss): "The mean over elements"
class BCEWithLogits(InFloat32, nn.BCEWithLogitsLoss): "The mean over elements"
class KLDiv(InFloat32, nn.KLDivLoss): "The mean over elements or samples"


# Means over samples or elements

class InTwoTasks(nn.Module):
    "Adds the loss of two heads"
    def forward(self, pred, labels, targets):
        logits, values = pred
        of_labels = F.cross_entropy(logits, labels)
        return (of_labels+2*F.mse_loss(values, targets)).float()


def focal(pred, labels):
    losses = F.cross_entropy(pred, labels, reduction='none')
    chances = torch.exp(-losses)
    return ((1-chances)**2*losses).mean().float()


def pinball(pred, targets):
    errors = targets-pred
    return torch.maximum(.9*errors, -.1*errors).mean().float()


def margin(pred, labels):
    "Lets the right class win by a margin"
    return F.multi_margin_loss(pred, labels).float()


def dice_of_samples(pred, masks):
    "One minus the overlap of each sample, on average"
    shares = pred.sigmoid()
    overlap = (shares*masks).sum(1)
    sizes = shares.sum(1)+masks.sum(1)
    return (1-2*overlap/(sizes+1)).mean().float()


def log_cosh(pred, targets):
    return torch.log(torch.cosh(pred-targets)).mean().float()


def gaussian(pred, targets):
    "The likelihood of targets, if the model predicts mean and variance"
    mean, log_variance = pred.chunk(2, 1)
    return F.gaussian_nll_loss(mean, targets, log_variance.exp()).float()


def triplets(pred, positive, negative):
    return F.triplet_margin_loss(pred, positive, negative).float()


class Balanced(nn.Module):
    "Weighs the parts of a loss by parameters of its own"
    def __init__(self):
        super().__init__()
        self.log_scales = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, pred, targets):
        parts = torch.stack([F.mse_loss(pred, targets), F.l1_loss(pred, targets)])
        weighted = parts*torch.exp(-self.log_scales)
        return (weighted+self.log_scales).sum().float()


class Ctc(nn.Module):
    "The likelihood of texts of several lengths, averaged over texts"
    def forward(self, pred, texts, lengths):
        time_first = pred.permute(1, 0, 2).log_softmax(2)
        n_steps = torch.full((len(texts),), len(time_first))
        return F.ctc_loss(time_first, texts, n_steps, lengths).float()


# Sums

def total(pred, targets):
    return F.mse_loss(pred, targets, reduction='sum').float()/32


class StatesThatItSums(nn.MSELoss):
    "A sum that says so"
    def forward(self, pred, targets):
        return super().forward(pred, targets).float()/32


# What averages over something else

def over_positives(pred, targets):
    "Divides the sum by the number of positive targets"
    is_positive = targets > 0
    losses = F.binary_cross_entropy_with_logits(pred, is_positive.double(), reduction='sum')
    n = is_positive.sum().clamp_min(1)
    return (losses/n).float()


def positives(learn): return (learn.y > 0).sum()


def over_observed(pred, targets):
    "The mean over targets that are no NaN"
    is_known = ~targets.isnan()
    return F.mse_loss(pred[is_known], targets[is_known]).float()


def observed(learn): return (~learn.y.isnan()).sum()


def by_importance(pred, targets, importance):
    "The mean of errors by the importance of samples"
    errors = (pred-targets).pow(2)
    total = (importance*errors).sum()
    return (total/importance.sum()).float()


def importance(learn): return learn.yb[1].sum()


# What no sum over parts of a batch equals

def root_of_mean(pred, targets):
    return F.mse_loss(pred, targets).sqrt().float()


def perplexity(pred, labels):
    return F.cross_entropy(pred, labels).exp().float()


def dice_of_batch(pred, masks):
    shares = pred.sigmoid()
    overlap = (shares*masks).sum()
    sizes = shares.sum()+masks.sum()
    return (1-2*overlap/(sizes+1)).float()


def correlation(pred, targets):
    "One minus the correlation"
    pred = F.normalize(pred-pred.mean(), dim=0)
    targets = F.normalize(targets-targets.mean(), dim=0)
    return (1-(pred*targets).sum()).float()


def hardest(pred, targets):
    "The mean of the larger half of the errors"
    errors = (pred-targets).pow(2).flatten()
    return errors.topk(len(errors)//2).values.mean().float()


def worst(pred, targets):
    return (pred-targets).abs().max().float()


def ranking(pred, targets):
    "Counts pairs in the wrong order, in a smooth way"
    is_larger = targets > targets.T
    losses = F.softplus(pred.T-pred)*is_larger
    return losses.mean().float()


def diverse(pred, labels):
    "Lets predictions be certain, and their mean even"
    mean = pred.softmax(1).mean(0)
    evenness = (mean*mean.log()).sum()
    return (F.cross_entropy(pred, labels)+evenness).float()


def info_nce(pred, views):
    "Lets each output be nearest to that of its own view"
    pred = F.normalize(pred, dim=1)
    views = F.normalize(views, dim=1)
    own = torch.arange(len(pred))
    return F.cross_entropy(pred@views.T/.5, own).float()


def decorrelated(pred, views):
    "Lets the columns of two views correlate with each other alone"
    pred = (pred-pred.mean(0))/(pred.std(0)+.1)
    views = (views-views.mean(0))/(views.std(0)+.1)
    matrix = pred.T@views/len(pred)
    identity = torch.eye(len(matrix))
    return (matrix-identity).pow(2).sum().float()


def standardized(pred, targets):
    "The error in units of the deviation of the batch"
    return (F.mse_loss(pred, targets)/targets.var()).float()


# What changes from call to call

class ByMovingAverage(nn.Module):
    "Divides the loss by its moving average"
    def __init__(self):
        super().__init__()
        self.register_buffer('mean', torch.ones((), dtype=torch.float64))

    def forward(self, pred, targets):
        loss = F.mse_loss(pred, targets)
        self.mean.lerp_(loss.detach(), .1)
        return (loss/self.mean.clone()).float()


class CountsCalls:
    "Grows with each call"
    def __init__(self): self.n = 0
    def __call__(self, pred, targets):
        self.n += 1
        return (F.mse_loss(pred, targets)*(1+.1*self.n)).float()


class DrawsNegatives(nn.Module):
    "Compares with random others of the batch"
    def forward(self, pred, targets):
        others = pred[torch.randperm(len(pred))]
        nearness = F.softplus(-(pred-others).abs())
        return (F.mse_loss(pred, targets)+nearness.mean()).float()


class KeepsCenter(nn.Module):
    "Takes a moving average of its inputs from them"
    def __init__(self):
        super().__init__()
        self.center = nn.Buffer(torch.zeros(1, dtype=torch.float64))

    def forward(self, pred, targets):
        loss = F.mse_loss(pred-self.center, targets).float()
        if torch.is_grad_enabled(): self.center.mul_(.9).add_(.1*pred.detach().mean(0))
        return loss


# Models and samples for them

def net(n_outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, n_outputs)).double()


class TwoHeads(nn.Module):
    "Returns the outputs of a classification and of a regression"
    def __init__(self):
        super().__init__()
        self.model = net(4)

    def forward(self, inputs):
        outputs = self.model(inputs)
        return outputs[:, :3], outputs[:, 3:]


class ReadsText(nn.Module):
    "Returns seven steps of four letters"
    def __init__(self):
        super().__init__()
        self.model = net(28)

    def forward(self, inputs):
        return self.model(inputs).view(-1, 7, 4)


class LogShares(nn.Sequential):
    "Returns logarithms of shares"
    def __init__(self):
        super().__init__(*classifier(), nn.LogSoftmax(1))


class Case:
    "A loss, and the targets and the model that it takes"
    def __init__(self, make_loss, *targets, make_model=net, num_items=None):
        self.make_loss = make_loss
        self.targets = targets or (TARGETS,)
        self.make_model = make_model
        self.num_items = num_items

    def learner(self, bs, cbs):
        inputs, _ = data(len(self.targets[0]))
        samples = list(zip(inputs, *self.targets))
        return learner_of(samples, self.make_loss(), self.make_model(), bs, cbs)


def of_function(loss, *targets, **kwargs):
    return Case(lambda: loss, *targets, **kwargs)


def of_labels(loss, **kwargs):
    return of_function(loss, LABELS, make_model=classifier, **kwargs)


class CaseOfTrainedLoss(Case):
    "A loss whose parameters are trained, too"
    def learner(self, bs, cbs):
        loss = self.make_loss()
        def splitter(m):
            return [[*m.parameters()], [*loss.parameters()]]
        samples = list(zip(CONTINUOUS, *self.targets))
        return learner_of(samples, loss, net(), bs, cbs, splitter=splitter)
