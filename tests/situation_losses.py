"Losses as other people write them, each in a few lines; `loss_table.py` has those that one function says"
from situations import *

CONTINUOUS, TARGETS = data(N)
LABELS = torch.stack([label for _, label in labelled()])


# Means over samples or elements

class InTwoTasks(nn.Module):
    "Adds the loss of two heads"
    def forward(self, pred, labels, targets):
        logits, values = pred
        of_labels = F.cross_entropy(logits, labels)
        return (of_labels+2*F.mse_loss(values, targets)).float()


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


def decorrelated(pred, views):
    "Lets the columns of two views correlate with each other alone"
    pred = (pred-pred.mean(0))/(pred.std(0)+.1)
    views = (views-views.mean(0))/(views.std(0)+.1)
    matrix = pred.T@views/len(pred)
    identity = torch.eye(len(matrix))
    return (matrix-identity).pow(2).sum().float()


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


def reader():
    "Returns a model with an output of seven steps of four letters"
    return nn.Sequential(net(28), nn.Unflatten(1, (7, 4)))


class Case:
    "A loss, and the targets and the model that it takes"
    def __init__(self, make_loss, *targets, make_model=net, num_items=None):
        self.make_loss = make_loss
        self.targets = targets or (TARGETS,)
        self.make_model = make_model
        self.num_items = num_items

    def learner(self, bs, cbs):
        samples = list(zip(CONTINUOUS, *self.targets))
        loss = self.make_loss()
        own_params = getattr(loss, 'parameters', list)
        def splitter(m):
            return [[*m.parameters()], [*own_params()]]
        return learner_of(samples, loss, self.make_model(), bs, cbs, splitter=splitter)


def of_function(loss, *targets, **kwargs):
    return Case(lambda: loss, *targets, **kwargs)
