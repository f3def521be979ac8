"""A table of losses, with outputs and targets for them: `EXACT`, each a mean over samples or over items that are known,
and `INEXACT`, which no weights of micro-batches make exact. They are PyTorch's, fastai's, and in short those of tsai,
MONAI and fastMONAI"""
from typing import NamedTuple

from fastai.basics import *
from fastai.losses import *
from fastxtend_accum.all import loss_items


class LossCase(NamedTuple):
    loss_func: Callable
    pred: Tensor
    targets: tuple
    items: Callable | None  # what the loss of a micro-batch averages over, by its first target; None: it is a sum


def case(loss_func, pred, *targets, items=len):
    return LossCase(loss_func, pred, targets, items)


# Outputs and targets of 16 samples

generator = torch.Generator().manual_seed(3)


def randn(*shape):
    return torch.randn(*shape, generator=generator)


def randint(n, *shape):
    return torch.randint(n, shape, generator=generator)


def rand(*shape):
    return torch.rand(*shape, generator=generator)


N = 16
LOGITS = randn(N, 5)
VALUES = randn(N, 7)
TARGETS = randn(N, 7)
LABELS = randint(5, N)
IS_IGNORED = torch.arange(N)%5 < 2
SOME_IGNORED = LABELS.where(~IS_IGNORED, -100)
BINARY = randint(2, N, 7).float()
PROBABILITIES = randn(N, 5).softmax(1)
MAPS = randn(N, 3, 6, 6)
MASKS = randint(3, N, 6, 6)
ROWS = randn(N, 4)
OTHER_ROWS = randn(N, 4)
CLASS_WEIGHTS = randn(5).exp()
PENALTY = 0.1*CLASS_WEIGHTS.pow(2).sum()
UNEVEN = tensor([1., 9., 45.])
SHARES = torch.linspace(0.02, 0.7, N)[:, None, None]
RARE = (rand(N, 6, 6) < SHARES).long()
HOLE_SHARES = torch.linspace(0, 0.8, N)[:, None]
HOLES = TARGETS.where(rand(N, 7) > HOLE_SHARES, torch.nan)
SIGNS = randint(2, N)*2.-1
IS_FIRST = torch.arange(N) < 1
FIRST_ROW = IS_FIRST[:, None].expand(N, 7)


# Losses that are exact

def wrapped(loss_func):
    "As in fastMONAI's CustomLoss"
    return lambda pred, targ: loss_func(pred, targ)


def monai_dice(pred, targ, axes=(2, 3)):
    pred = pred.softmax(1)
    targ = F.one_hot(targ, 3).movedim(-1, 1)
    overlap = 2*(pred*targ).sum(axes)
    sizes = (pred+targ).sum(axes)
    score = (overlap+1e-5)/(sizes+1e-5)
    return (1-score).mean()


def tsai_focal(pred, targ):
    class_weights = CLASS_WEIGHTS.to(pred.dtype)
    errors = F.cross_entropy(pred, targ, reduction='none')
    return (class_weights[targ]*errors**2).mean()


def mean_error(pred, targ):
    return (pred-targ).abs().mean()


def penalty(pred, targ):
    return F.mse_loss(pred, targ)+PENALTY


def float32_only(pred, targ):
    "Raises an error on float64, as a kernel may"
    if pred.dtype != torch.float32:
        raise TypeError('float32, please')
    return F.mse_loss(pred, targ)


def in_place(pred, targ):
    targ[targ == -100] = 0
    return F.cross_entropy(pred.mul_(2), targ)


class OwnWeights(nn.MSELoss):
    "Does not average by itself, and so has no rule"
    def __init__(self, average):
        super().__init__(reduction='none')
        self.average = average

    def forward(self, pred, targ):
        errors = super().forward(pred, targ)
        return self.average(errors, weights_of_elements(targ))


def weights_of_elements(targ):
    return torch.where(targ > 0.5, 1.1, 0.1)


def sum_of_weights(targ):
    return weights_of_elements(targ).sum()


def weighted_mean(errors, weights):
    return (errors*weights).sum()/weights.sum()


def mean_of_weighted(errors, weights):
    return (errors*weights).mean()


class OwnRule(OwnWeights):
    pass


loss_items.register(OwnRule, lambda loss_func, pred, targ: sum_of_weights(targ))


# Losses that are not

def combined(pred, targ):
    "Of fastai's documentation"
    focal = FocalLossFlat(axis=1)
    dice = DiceLoss()
    return focal(pred, targ)+dice(pred, targ)


def tsai_masked(pred, targ):
    is_known = ~targ.isnan()
    return F.mse_loss(pred[is_known], targ[is_known])


def info_nce(pred, targ):
    "Compares each row with all others"
    return F.cross_entropy(pred@targ.T, torch.arange(len(pred)))


def masked(pred, targ):
    is_large = targ > 0.5
    errors = (pred-targ)**2
    return (errors*is_large).sum()/is_large.sum()


def rmse(pred, targ):
    return F.mse_loss(pred, targ).sqrt()


def hard_examples(pred, targ):
    errors = F.cross_entropy(pred, targ, reduction='none')
    return errors.topk(2).values.mean()


def balanced(pred, targ):
    "Weights classes by their counts in the batch"
    counts = targ.bincount(minlength=5)
    weights = 1/(counts+1)
    return F.cross_entropy(pred, targ, weights.to(pred.dtype))


def centred(pred, targ):
    return F.mse_loss(pred-pred.mean(0), targ)


def nan_without(pred, targ):
    "Is 0/0 for samples without a target"
    sums = (pred**2*targ).sum(0)
    return (sums/targ.sum(0)).mean()


def plain_sum(pred, targ):
    return ((pred-targ)**2).sum()


def penalized_sum(pred, targ):
    return plain_sum(pred, targ)+PENALTY


penalized_sum.reduction = 'sum'


ignores_2 = partial(F.cross_entropy, weight=CLASS_WEIGHTS, ignore_index=2)


# What losses average over

def n_kept(targ):
    return (targ >= 0).sum()


def weight_of_kept(targ):
    return CLASS_WEIGHTS[targ[targ >= 0]].sum()


def weight_but_for_2(targ):
    return CLASS_WEIGHTS[targ[targ != 2]].sum()


# The table

EXACT = dict(
    bce_flat=case(BCEWithLogitsLossFlat(), VALUES, BINARY),
    penalty=case(penalty, VALUES, TARGETS),
    float32_only=case(float32_only, VALUES, TARGETS),
    unknown=case(mean_error, VALUES, TARGETS),
    function_sum=case(partial(F.l1_loss, reduction='sum'), VALUES, TARGETS, items=None),
    own_rule=case(OwnRule(weighted_mean), VALUES, TARGETS, items=sum_of_weights),
    own_mean=case(OwnWeights(mean_of_weighted), VALUES, TARGETS),
    in_place=case(in_place, LOGITS, SOME_IGNORED),
    flat=case(CrossEntropyLossFlat(), LOGITS, SOME_IGNORED, items=n_kept),
    flat_weights=case(CrossEntropyLossFlat(weight=CLASS_WEIGHTS), LOGITS, SOME_IGNORED, items=weight_of_kept),
    sum=case(nn.CrossEntropyLoss(reduction='sum'), LOGITS, SOME_IGNORED, items=None),
    weights=case(nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.1), LOGITS, SOME_IGNORED, items=weight_of_kept),
    tsai_focal=case(tsai_focal, LOGITS, LABELS),
    smoothed=case(LabelSmoothingCrossEntropyFlat(), LOGITS, LABELS),
    nll=case(nn.NLLLoss(weight=CLASS_WEIGHTS), LOGITS, LABELS, items=weight_of_kept),
    margin=case(nn.MultiMarginLoss(), LOGITS, LABELS),
    function=case(ignores_2, LOGITS, LABELS, items=weight_but_for_2),
    probabilities=case(nn.CrossEntropyLoss(), LOGITS, PROBABILITIES),
    kl_div=case(nn.KLDivLoss(reduction='batchmean'), LOGITS, PROBABILITIES),
    monai_dice=case(monai_dice, MAPS, MASKS),
    axis=case(CrossEntropyLossFlat(axis=1), MAPS, MASKS),
    focal=case(FocalLossFlat(axis=1), MAPS, MASKS),
    dice=case(DiceLoss(), MAPS, MASKS, items=None),
    mean_dice=case(DiceLoss(reduction='mean'), MAPS, MASKS),
    wrapped=case(wrapped(nn.CrossEntropyLoss()), MAPS, MASKS),
    cosine=case(nn.CosineEmbeddingLoss(), ROWS, OTHER_ROWS, SIGNS),
    triplets=case(nn.TripletMarginLoss(), ROWS, OTHER_ROWS, randn(N, 4)),
    gaussian=case(nn.GaussianNLLLoss(), VALUES, TARGETS, VALUES.exp()))

ELEMENTWISE = nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCEWithLogitsLoss, nn.HingeEmbeddingLoss
for kind in ELEMENTWISE:
    EXACT[kind.__name__] = case(kind(), VALUES, BINARY)
EXACT['l1_function'] = case(F.l1_loss, VALUES, BINARY)

INEXACT = dict(
    masked=case(masked, VALUES, TARGETS),
    rmse=case(rmse, VALUES, TARGETS),
    centred=case(centred, VALUES, TARGETS),
    plain_sum=case(plain_sum, VALUES, TARGETS),
    penalized_sum=case(penalized_sum, VALUES, TARGETS, items=None),
    own_weights=case(OwnWeights(weighted_mean), VALUES, TARGETS),
    tsai_masked=case(tsai_masked, VALUES, HOLES),
    nan_without=case(nan_without, VALUES, FIRST_ROW),
    info_nce=case(info_nce, ROWS, OTHER_ROWS),
    hard_examples=case(hard_examples, LOGITS, LABELS),
    balanced=case(balanced, LOGITS, LABELS),
    smoothed_weights=case(LabelSmoothingCrossEntropyFlat(weight=CLASS_WEIGHTS), LOGITS, LABELS),
    combined=case(combined, MAPS, MASKS),
    wrapped_sum=case(wrapped(nn.CrossEntropyLoss(reduction='sum')), MAPS, MASKS),
    wrapped_weights=case(wrapped(nn.CrossEntropyLoss(weight=UNEVEN)), MAPS, MASKS),
    batch_dice=case(partial(monai_dice, axes=(0, 2, 3)), MAPS, RARE),
    wrapped_ignore_index=case(wrapped(nn.CrossEntropyLoss(ignore_index=0)), MAPS, RARE))


def parts_of(pred, targets, sizes=(8, 5)):
    "Returns outputs and targets of two micro-batches of these sizes"
    first, second = sizes
    tensors = pred, *targets
    return [
        tuple(o[:first] for o in tensors),
        tuple(o[first:first+second] for o in tensors)]
