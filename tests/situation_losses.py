"Losses as other people write them, each in a few lines; `loss_table.py` has those that one function says"
from situations import *

CONTINUOUS, TARGETS = data(N)
LABELS = torch.stack([label for _, label in labelled()])


# Means over samples or elements

def in_two_tasks(pred, labels, targets):
    "Adds the loss of two heads"
    logits, values = pred
    of_labels = F.cross_entropy(logits, labels)
    return (of_labels+2*F.mse_loss(values, targets)).float()


def ctc(pred, texts, lengths):
    "The likelihood of texts of several lengths, averaged over texts"
    time_first = pred.permute(1, 0, 2).log_softmax(2)
    n_steps = torch.full((len(texts),), len(time_first))
    return F.ctc_loss(time_first, texts, n_steps, lengths).float()


# What averages over something else

def over_positives(pred, targets):
    "Divides the sum by the number of positive targets"
    is_positive = targets > 0
    losses = F.binary_cross_entropy_with_logits(pred, is_positive.double(), reduction='sum')
    n = is_positive.sum().clamp_min(1)
    return (losses/n).float()


def positives(learn): return (learn.y > 0).sum()


# What no sum over parts of a batch equals

def worst(pred, targets):
    return (pred-targets).abs().max().float()


def ranking(pred, targets):
    "Counts pairs in the wrong order, in a smooth way"
    is_larger = targets > targets.T
    losses = F.softplus(pred.T-pred)*is_larger
    return losses.mean().float()


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
    def __init__(self, loss_func, *targets, make_model=net):
        self.loss_func = loss_func
        self.targets = targets or (TARGETS,)
        self.make_model = make_model

    def learner(self, bs, cbs):
        samples = list(zip(CONTINUOUS, *self.targets))
        return learner_of(samples, self.loss_func, self.make_model(), bs, cbs)
