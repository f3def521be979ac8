"Learners of images"
from common import *


def images(n):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(n, 3, 8, 8, generator=generator)
    labels = torch.randint(4, (n,), generator=generator)
    return list(zip(inputs, labels))


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 4))


def image_learner(*cbs):
    dls = DataLoaders(DataLoader(images(96), bs=32), DataLoader(images(24), bs=24))
    return Learner(dls, classifier(), CrossEntropyLossFlat(), opt_func=SGD, cbs=cbs)


def seeded(learn, n_epoch=2):
    set_seed(5)
    return fit(learn, n_epoch)
