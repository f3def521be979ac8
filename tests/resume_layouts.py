"Scripts that train with AutoResume, one for each way in which a fit may go on wrongly. Data and models are tiny"
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset as TorchIterable

from common import *

WIDTH = 6
N = 100  # samples
EVERY = 2  # optimizer steps from save to save


# Data

def table(n=N, seed=0):
    "Returns inputs and targets in float32"
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, WIDTH, generator=generator)
    noise = torch.randn(n, generator=generator)
    targets = (inputs.sum(1)+.1*noise).tanh()
    return inputs, targets[:, None]


def samples(n=N, seed=0):
    return list(zip(*table(n, seed)))


class Noisy(list):
    "Samples with numbers of all three global generators, drawn where they are loaded"
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        noise = random.random()+np.random.rand()+torch.rand([])
        return x+.1*noise.float(), y


class Stream(TorchIterable):
    "Samples in a random order, of a number that nobody knows"
    def __iter__(self):
        items = samples()
        for i in torch.randperm(N).tolist(): yield items[i]


class Understated(TorchLoader):
    "Says that it has fewer batches than come"
    def __len__(self): return 20


def with_valid(train):
    return DataLoaders(train, DataLoader(samples(30, 1), bs=16))


def fastai_data(kind=list, **kwargs):
    return with_valid(DataLoader(kind(samples()), bs=4, shuffle=True, **kwargs))


def torch_data(kind=Noisy, **kwargs):
    return with_valid(TorchLoader(kind(samples()), 4, shuffle=True, **kwargs))


def two_classes():
    inputs, targets = table()
    labels = (targets[:, 0] > 0).long()
    items = list(zip(inputs, labels))
    return DataLoaders(DataLoader(items, bs=4, shuffle=True), DataLoader(items[:30], bs=16))


# Models

def two_groups(m):
    return [params(m[0]), params(m[1])]


def mlp(dropout=.2, n_out=1):
    body = nn.Sequential(nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(dropout))
    return nn.Sequential(body, nn.Linear(12, n_out))


class Carries(nn.Module):
    "Has states from batch to batch that are in no state_dict"
    def __init__(self):
        super().__init__()
        self.hidden = None
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer('seen', torch.zeros(WIDTH), persistent=False)

    def reset(self): self.hidden = None

    def forward(self, x):
        before = 0. if self.hidden is None else self.hidden
        if self.training:
            self.hidden = (.5*before+x.mean(0)).detach()
            self.seen += x.detach().mean(0)
        return self.linear(x+before)+.01*self.seen


class Carrying(nn.Sequential):
    def reset(self): self[0].reset()


class Sometimes(nn.Module):
    "A layer has a gradient in two of the first batches, and in none of the later ones"
    def __init__(self):
        super().__init__()
        self.always = nn.Linear(WIDTH, 1)
        self.rarely = nn.Linear(WIDTH, 1)
        self.n = 0

    def forward(self, x):
        if self.training: self.n += 1
        res = self.always(x)
        return res+self.rarely(x) if self.n in (2, 3) else res


# Callbacks

class Average(Callback):
    "Averages the weights, which are used at the end; adds numbers of a generator of its own to inputs"
    def before_fit(self):
        self.average = deepcopy(self.learn.model)
        self.rng = np.random.default_rng(4)
        self.n = 0

    def before_batch(self):
        if self.training: self.learn.xb = (self.x+.1*float(self.rng.normal()),)

    def after_step(self):
        self.n += 1
        for mean, p in zip(self.average.parameters(), self.learn.model.parameters()): mean.data.lerp_(p.data, 1/self.n)

    def after_fit(self):
        if not self.learn.lock.locked(): self.learn.model.load_state_dict(self.average.state_dict())


class Unfreezes(Callback):
    def before_epoch(self):
        if self.epoch == 1 and not self.learn.lock.locked(): self.learn.opt.unfreeze()


class Remembers(Callback):
    "Multiplies inputs by what it has learned from earlier batches, in plain data of several kinds"
    def __init__(self):
        self.seen = []
        self.means = dict(x=0.)

    def before_batch(self):
        if not self.training: return
        mean = float(self.x.mean())
        self.seen.append(mean)
        self.means['x'] += mean
        self.learn.xb = (self.x*(1+.01*len(self.seen)+.01*self.means['x']),)


class SaveIsDue(Callback):
    "As if the time for a save were over between two epochs"
    def before_epoch(self):
        fit = self.learn.auto_resume.saved_fit
        if fit: fit.next_save = min(fit.next_save, 1)


class Slow(Callback):
    "Lets saves be due by time in a small fit"
    def after_step(self): time.sleep(.02)


class BFloat16(CpuMixedPrecision):
    "With a scale that grows fast"
    def __init__(self): super().__init__(amp_mode=AMPMode.FP16, init_scale=2.**10, growth_interval=3)


# Learners

def auto(**kwargs):
    return AutoResume(every=EVERY, **kwargs)


def accum(accum_bs=8, **kwargs):
    return GradientAccumulation(accum_bs, verbose=False, **kwargs)


def schedule(start=8, end=20, **kwargs):
    return GradientAccumulationSchedule(start, end, finish=.8, verbose=False, **kwargs)


def make(*cbs, dls=None, m=None, loss_func=F.mse_loss, splitter=two_groups, **kwargs):
    if dls is None: dls = fastai_data()
    if m is None: m = mlp()
    return Learner(dls, m, loss_func, cbs=cbs, splitter=splitter, path=Path(), **kwargs)


def train(*cbs, n_epoch=2, lr=.02, resume=None, method='fit_one_cycle', **kwargs):
    "Makes a Learner and trains it"
    learn = make(*cbs, **kwargs)
    getattr(learn, method)(n_epoch, lr, cbs=resume or auto())
    return learn


def train_classifier(*cbs):
    m = mlp(n_out=2)
    learn = Learner(two_classes(), m, CrossEntropyLossFlat(), cbs=cbs, metrics=accuracy, path=Path())
    learn.fit_one_cycle(2, .02, cbs=auto())
    return learn


# The layouts, by the name of the function

LAYOUTS = {}


def layout(f):
    LAYOUTS[f.__name__] = f
    return f


@layout
def plain(): return train()


@layout
def pieces_of_loader_batches():
    "A file may be saved in the middle of a loader batch"
    return train(schedule(2, 12), n_epoch=3, resume=AutoResume(every=1))


@layout
def schedule_shrinks():
    "More batches are carried than a window takes"
    def falls(start, end): return lambda pct: start if pct < .3 else end
    sizes = GradientAccumulationSchedule(36, 4, finish=1., schedule=falls, verbose=False)
    return train(sizes, n_epoch=3, resume=AutoResume(every=1))


@layout
def schedule_scales_rates():
    rules = dict(lr=sqrt_scale, mom=half_life_scale)
    return train(schedule(4, 12, scale=rules), CSVLogger(), n_epoch=3)


@layout
def carry_with_saves_between_epochs():
    "A first window does not take all batches that are carried, and the files before it are those that hold them"
    return train(SaveIsDue(), accum(12, remainder='carry'), n_epoch=5, resume=AutoResume(every=3))


@layout
def by_minutes(): return train(Slow(), accum(), resume=AutoResume(minutes=.0002))


@layout
def logs_batches_of_schedule(): return train(schedule(8, 16, log_accum_batch=False))


@layout
def micro_batches(): return train(accum(micro_batch_size=3), n_epoch=3)


@layout
def noisy_samples(): return train(dls=fastai_data(Noisy))


@layout
def workers(): return train(dls=fastai_data(Noisy, num_workers=2))


@layout
def torch_loader(): return train(dls=torch_data())


@layout
def torch_generator():
    generator = torch.Generator().manual_seed(5)
    return train(accum(), dls=torch_data(generator=generator), n_epoch=3)


@layout
def torch_workers_and_carry():
    return train(accum(12, remainder='carry'), dls=torch_data(num_workers=1), n_epoch=3, resume=AutoResume(every=2))


@layout
def torch_iterable_and_carry():
    return train(accum(12, remainder='carry'), dls=with_valid(Understated(Stream(), 4)), n_epoch=3)


@layout
def fastai_iterable(): return train(accum(), dls=with_valid(DataLoader(Stream(), bs=4, n=N)), n_epoch=3)


@layout
def fine_tune_and_save():
    learn = make(SaveModelCallback(), ReduceLROnPlateau(patience=1), CSVLogger())
    learn.fine_tune(2, .05, cbs=auto())
    return learn


@layout
def several_fits():
    learn = make(auto(), CSVLogger())
    learn.lr_find(num_it=10, show_plot=False)
    learn.fit_one_cycle(2, .02)
    learn.save('stage-1')
    learn.validate()
    learn.get_preds()
    learn.lr_find(num_it=10, show_plot=False)
    learn.fit(2, .01)
    return learn


@layout
def folds():
    "Three Learners, and the same line for each"
    for fold in range(3):
        learn = train()
        learn.save(f'fold-{fold}')
    return learn


@layout
def mixup_and_carry(): return train_classifier(MixUp(), accum(remainder='carry'))


@layout
def best_and_early():
    return train(SaveModelCallback(with_opt=True), EarlyStoppingCallback(patience=2), n_epoch=6, lr=.3)


@layout
def saves_every_epoch(): return train(SaveModelCallback(every_epoch=True, with_opt=True))


@layout
def scaler_and_windows(): return train(BFloat16(), accum(), n_epoch=3)


@layout
def hidden_state_and_schedule():
    return train(ModelResetter(), schedule(4, 12), m=Carrying(Carries(), nn.Linear(WIDTH, 1)))


@layout
def training_metrics():
    def error(pred, targ): return (pred-targ).abs().mean()
    learn = make(CSVLogger(), metrics=error)
    learn.recorder.train_metrics = True
    learn.fit_one_cycle(3, .02, cbs=auto())
    return learn


@layout
def average(): return train(Average())


@layout
def plain_data_of_callback(): return train(Remembers())


@layout
def torch_optimizer():
    opt_func = partial(OptimWrapper, opt=torch.optim.AdamW)
    return train(accum(), n_epoch=3, opt_func=opt_func)


@layout
def unfreezes():
    learn = make(Unfreezes())
    learn.freeze()
    learn.fit_one_cycle(3, .02, cbs=auto())
    return learn


@layout
def unused_layer():
    learn = Learner(fastai_data(), Sometimes(), F.mse_loss, path=Path())
    learn.fit_one_cycle(3, .02, cbs=auto())
    return learn
