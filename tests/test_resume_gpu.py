"AutoResume on a GPU: `pytest -m gpu`. Each fit is interrupted in mid-epoch, and a new Learner with other seeds goes on"
from itertools import chain

import pytest
from fastai.vision.all import CategoryBlock, DataBlock, ImageBlock, IndexSplitter, PILImage
from fastai.vision.all import aug_transforms, resnet18, vision_learner

from common import *
from resumed import Stops, new_process, steps

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures('cuda')]
device = torch.device('cuda')


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    "Else two plain fits differ, too: PyTorch's notes on reproducibility name what this takes"
    monkeypatch.setenv('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Draws(Callback):
    "Notes a random number of the GPU at the end"
    def after_fit(self): self.drawn = float(torch.rand([], device=device))


def train(make, *cbs, seed=1, at=None):
    "Two epochs of `make(cbs)`, in a process that has just begun"
    new_process(seed)
    steps.at = at
    learn = make([Draws(), Stops(), *cbs])
    return fit(learn, 2, .01, 'fit_one_cycle')


def resume(*cbs):
    return [AutoResume(every=1, verbose=False), *cbs]


def state(learn):
    "Returns weights, buffers, losses, metrics and the GPU's next random number"
    tensors = [o.double().flatten().cpu() for o in learn.model.state_dict().values()]
    values = [*losses(learn), *chain.from_iterable(floats(learn.recorder.values)), learn.draws.drawn]
    return torch.cat([*tensors, torch.tensor(values, dtype=torch.float64)])


def assert_goes_on(make, nth):
    "Returns the Learner that has gone on after `nth` windows, which is within the second epoch"
    expected = train(make)
    assert_same(state(train(make)), state(expected))  # without AutoResume: the machine itself is deterministic
    with pytest.raises(KeyboardInterrupt): train(make, *resume(), at=nth)
    learn = train(make, *resume(), seed=9)
    n_windows = len(losses(learn))//2
    assert n_windows < nth < 2*n_windows
    assert_same(state(learn), state(expected))
    with torch.no_grad(): assert_apart(learn, make([Draws()]))
    return learn


def table_learner(cbs, **kwargs):
    "Dropout draws from the generator of the GPU"
    inputs = torch.randn(160, 10, generator=torch.Generator().manual_seed(0))
    samples = list(zip(inputs, inputs.sum(1, keepdim=True).tanh()))
    train_dl = DataLoader(samples, bs=8, shuffle=True, device=device, **kwargs)
    valid_dl = DataLoader(samples[:32], bs=16, device=device)
    m = nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(.3), nn.Linear(64, 1))
    return Learner(DataLoaders(train_dl, valid_dl), m.to(device), MSELossFlat(), cbs=cbs)


def test_generators_of_the_gpu():
    assert_goes_on(lambda cbs: table_learner([GradientAccumulation(16), *cbs]), 15)


class Scale(Callback):
    "Notes the scale of the loss"
    def after_batch(self):
        if self.training: self.last = self.learn.scaler.get_scale()


def test_the_scale_of_mixed_precision():
    "It grows after three steps, so it is another one at each place"
    def make(cbs):
        scaled = MixedPrecision(init_scale=2.**10, growth_interval=3)
        return table_learner([scaled, Scale(), GradientAccumulation(16), *cbs])
    learn = assert_goes_on(make, 15)
    assert learn.scale.last == train(make).scale.last
    assert learn.scale.last > 2**12


def picture(i):
    pixels = np.random.default_rng(i).integers(0, 255, (48, 48, 3), dtype=np.uint8)
    return PILImage.create(pixels)


def label(i):
    return 'abc'[i%3]


def image_learner(cbs):
    "Workers load, the GPU augments"
    block = DataBlock(
        (ImageBlock, CategoryBlock), get_x=picture, get_y=label, splitter=IndexSplitter(range(64, 80)),
        batch_tfms=aug_transforms(size=32))
    dls = block.dataloaders(range(80), bs=8, num_workers=2, device=device)
    return vision_learner(dls, resnet18, pretrained=False, metrics=accuracy, cbs=cbs)


def test_images_that_workers_load():
    assert_goes_on(lambda cbs: image_learner([GradientAccumulation(16), *cbs]), 6)
