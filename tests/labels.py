"Samples with labels, of which some are ignored or missing; and a model and a Learner for them"
from common import *

MISSING = -100  # PyTorch's `ignore_index`


class SkipValidation(Callback):
    def before_validate(self): raise CancelValidException


def classifier_model():
    "Returns a model that gives scores for 4 classes"
    torch.manual_seed(0)
    body = nn.Linear(5, 8)
    head = nn.Linear(8, 4)
    return nn.Sequential(body, nn.Tanh(), head).double()


def labelled(n, missing_share=0., seed=0, width=()):
    "Returns `n` inputs and their labels in 4 classes, as numbers; of these, `missing_share` are `MISSING`"
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(4, (n, *width), generator=generator).double()
    is_missing = torch.rand(labels.shape, generator=generator) < missing_share
    return inputs, labels.masked_fill(is_missing, MISSING)


def learner_of(samples, bs, cbs, loss_func, m=None, **kwargs):
    "Returns a Learner that sees `samples`, inputs and targets, in order, and does not validate"
    if m is None:
        m = classifier_model()
    pairs = list(zip(*samples))
    train = DataLoader(pairs, bs=bs)
    valid = DataLoader(pairs[:4], bs=4)
    opt_func = partial(SGD, mom=0.9)
    cbs = [*L(cbs), SkipValidation()]
    return Learner(DataLoaders(train, valid), m, loss_func, opt_func=opt_func, cbs=cbs, **kwargs)
