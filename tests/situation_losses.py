"Losses as other people write them that no sum over parts of a batch equals; `loss_table.py` has more of all kinds"
from situations import *


def over_positives(pred, targets):
    "Divides the sum by the number of positive targets"
    is_positive = targets > 0
    losses = F.binary_cross_entropy_with_logits(pred, is_positive.double(), reduction='sum')
    n = is_positive.sum().clamp_min(1)
    return (losses/n).float()


def worst(pred, targets):
    return (pred-targets).abs().max().float()


def ranking(pred, targets):
    "Counts pairs in the wrong order, in a smooth way"
    is_larger = targets > targets.T
    losses = F.softplus(pred.T-pred)*is_larger
    return losses.mean().float()


INEXACT = [over_positives, worst, ranking]


def learner_with(loss_func):
    "Returns a situation: a Learner with this loss"
    samples = list(zip(*data(N)))
    def learner(bs, cbs): return learner_of(samples, loss_func, model(), bs, cbs)
    return learner
