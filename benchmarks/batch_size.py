"""`python -m benchmarks.batch_size` measures what the page "Evidence" shows of batch sizes, and writes
`batch_size.json` beside this file: the samples that each batch size needs to reach a loss, and its time per sample.
Some 20 minutes on one core.

The searches for learning rates need hundreds of runs, so those that count samples are plain PyTorch loops; the steps of
`GradientAccumulation` are the same, as its tests show"""
import functools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from fastai.basics import *
from fastai.callback.all import *
from sklearn.datasets import load_digits, load_sample_images, make_classification, make_friedman1
from fastxtend_accum.all import *
from fastxtend_accum.demo import digits_learner

from .text import docstrings, text_learner, text_modules

file = Path(__file__).with_suffix('.json')
sizes = [8, 16, 32, 64, 128, 256, 512]
base_bs = 16  # of the base recipe
loader_bs = 64  # of the DataLoader: larger sizes accumulate


# Small data sets, in memory

def new_learner(bs, model, inputs, targets, n_valid, loss_func=None):
    "Returns a Learner that validates on the last `n_valid` samples"
    samples = list(zip(inputs, targets))
    train = DataLoader(samples[:-n_valid], bs=bs, shuffle=True)
    valid = DataLoader(samples[-n_valid:], bs=256)
    return Learner(DataLoaders(train, valid), model, loss_func or nn.CrossEntropyLoss())


def table_learner(bs):
    "Two classes of 20 made numbers, 4096 rows to train on and 1024 to validate"
    settings = dict(n_informative=12, n_redundant=4, n_clusters_per_class=8, flip_y=.02)
    x, y = make_classification(5120, 20, random_state=0, **settings)
    model = nn.Sequential(
        nn.Linear(20, 64),
        nn.ReLU(),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Linear(32, 2))
    return new_learner(bs, model, tensor(x).float(), tensor(y), 1024)


class Shapes(Module):
    "A small U-Net: one class for each pixel"
    def __init__(self):
        self.fine = nn.Conv2d(1, 8, 3, padding=1)
        self.coarse = nn.Conv2d(8, 16, 3, padding=1)
        self.deep = nn.Conv2d(16, 16, 3, padding=1)
        self.out = nn.Conv2d(24, 3, 3, padding=1)

    def forward(self, x):
        fine = F.relu(self.fine(x))
        coarse = F.relu(self.coarse(F.max_pool2d(fine, 2)))
        deep = F.relu(self.deep(coarse))
        enlarged = F.interpolate(deep, scale_factor=2)
        return self.out(torch.cat([fine, enlarged], 1))


def shapes_learner(bs):
    "Discs, squares or ground, for each pixel of noisy images of 16x16; 1024 to train on and 128 to validate"
    n = 1152
    generator = torch.Generator().manual_seed(0)
    y, x, radius = torch.rand(3, n, 1, 1, generator=generator)
    y = y*8+4
    x = x*8+4
    radius = radius*4+2
    is_square = torch.rand(n, 1, 1, generator=generator) < .5
    at = torch.arange(16.)
    dy = (at[:,None]-y).abs()
    dx = (at-x).abs()
    in_square = torch.maximum(dy, dx) < .9*radius
    in_disc = dy**2+dx**2 < radius**2
    inside = torch.where(is_square, in_square, in_disc)
    images = inside+torch.randn(n, 16, 16, generator=generator)
    classes = inside*(1+is_square.long())
    return new_learner(bs, Shapes(), images[:,None], classes, 128)


def pixels_learner(bs):
    "Handwritten digits as 64 numbers, 1408 to train on and 389 to validate"
    x, y = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(y))
    model = nn.Sequential(
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Linear(128, 10))
    inputs = tensor(x[order]/16).float()
    return new_learner(bs, model, inputs, tensor(y[order]), 389)


def photos_learner(bs):
    "From which of two photographs a part of 12x12 is, 3072 parts to train on and 512 to validate"
    random = np.random.RandomState(0)
    images = load_sample_images().images
    classes = random.randint(2, size=3584)
    parts = []
    for i in classes:
        height, width, _ = images[i].shape
        y = random.randint(height-12)
        x = random.randint(width-12)
        parts.append(images[i][y:y+12,x:x+12])
    inputs = tensor(np.stack(parts)).permute(0, 3, 1, 2)
    inputs = inputs.float()/255
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 2))
    return new_learner(bs, model, inputs-.5, tensor(classes), 512)


def trigrams(codes):
    "Returns a number below 4096 for each three characters"
    res = []
    for a, b, c in zip(codes, codes[1:], codes[2:]):
        number = a*31**2 + b*31 + c
        res.append(number%4096)
    return res


def topics_learner(bs):
    """From which of six modules 96 characters of docstrings are, by their trigrams: 1480 passages to train on and 256
    to validate"""
    texts = [docstrings([o]).encode('ascii', 'replace') for o in text_modules]
    passages = []
    for k, text in enumerate(sorted(texts, key=len)[-6:]):
        for i in range(0, len(text)-95, 96):
            passages.append((text[i:i+96], k))
    order = np.random.RandomState(0).permutation(len(passages))
    chosen = [passages[i] for i in order[:1736]]
    inputs = tensor([trigrams(text) for text, _ in chosen])
    targets = tensor([k for _, k in chosen])
    model = nn.Sequential(
        nn.EmbeddingBag(4096, 32),
        nn.ReLU(),
        nn.Linear(32, 6))
    return new_learner(bs, model, inputs, targets, 256)


def friedman_learner(bs):
    "A function of ten numbers (Friedman, 1991), 4096 rows to train on and 1024 to validate"
    x, y = make_friedman1(5120, noise=1., random_state=0)
    y = (y-y.mean())/y.std()
    model = nn.Sequential(
        nn.Linear(10, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 1),
        nn.Flatten(0))
    inputs = tensor(x).float()
    targets = tensor(y).float()
    return new_learner(bs, model, inputs, targets, 1024, nn.MSELoss())


# Tasks

def reset_parameters(m):
    if hasattr(m, 'reset_parameters'): m.reset_parameters()


@dataclass
class Task:
    make: Callable  # `make(bs)` returns a Learner, on samples in memory
    is_sgd: bool  # SGD with momentum, not Adam
    lr: float  # learning rate of the base recipe: batches of 16, a constant rate
    targets: dict  # by start, in epochs of the base recipe: after how many more epochs of it the target is reached

    def rate(self, bs):
        scale = linear_scale if self.is_sgd else sqrt_scale
        return scale(self.lr, bs/base_bs)

    def learner(self, bs, cbs=None, seed=0):
        "Returns a Learner with weights and an order of samples by `seed`"
        learn = self.make(bs)
        learn.opt_func = partial(SGD, mom=.9) if self.is_sgd else Adam
        set_seed(seed)
        learn.model.apply(reset_parameters)
        for dl in learn.dls.loaders: dl.rng.seed(seed)
        learn.add_cbs(cbs).remove_cb(ProgressCallback)
        learn.logger = noop
        return learn


tasks = dict(
    digits=Task(digits_learner, True, .016, {0: 2, 1: 3}),
    text=Task(text_learner, False, 8e-3, {0: 2, 1: 2}),
    table=Task(table_learner, False, 4e-3, {0: 2, 1: 3}),
    shapes=Task(shapes_learner, True, .03, {0: 2, 1: 3}),
    pixels=Task(pixels_learner, False, 8e-3, {0: 2, 1: 3}),
    photos=Task(photos_learner, True, .03, {0: 2, 1: 3}),
    topics=Task(topics_learner, False, .016, {0: 2, 1: 3}),
    friedman=Task(friedman_learner, True, .016, {0: 2, 1: 3}))


# The samples that a batch size needs

def torch_opt(task, model):
    "Returns fastai's SGD or Adam as PyTorch's, with weight decay of all but biases"
    if task.is_sgd: return torch.optim.SGD(model.parameters(), momentum=.9)
    biases = set(norm_bias_params(model, True))
    others = [p for p in model.parameters() if p not in biases]
    groups = [
        dict(params=others, weight_decay=.01),
        dict(params=[p for p in model.parameters() if p in biases], weight_decay=0.)]
    return torch.optim.AdamW(groups, betas=(.9, .99), eps=1e-5)


def draw_batches(n, bs, seed):
    "Yields the indices of batches of `bs`, each sample once before any comes again"
    generator = torch.Generator().manual_seed(seed)
    left = torch.empty(0, dtype=torch.long)
    while True:
        while len(left) < bs:
            left = torch.cat([left, torch.randperm(n, generator=generator)])
        yield left[:bs]
        left = left[bs:]


class Run:
    "Training in a plain loop; `data` has inputs and targets of the training set, then of the validation set"
    def __init__(self, task, data, loss_func, model, state=None):
        self.data = data
        self.model = deepcopy(model)
        self.loss_func = loss_func
        self.opt = torch_opt(task, self.model)
        if state: self.opt.load_state_dict(state)

    def loss(self, inputs, targets): return self.loss_func(self.model(inputs), targets)

    def train(self, bs, lr, seed, most, target=0.):
        """Trains until the validation loss, averaged over the last fifth of the samples, is down at `target`. Returns
        the samples that it took (inf at `most`), and that loss"""
        (inputs, targets), valid = self.data
        for group in self.opt.param_groups: group['lr'] = lr
        n_seen = 0
        losses = []
        next_look = 0
        for idxs in draw_batches(len(inputs), bs, seed):
            if n_seen >= most: return math.inf, mean
            self.opt.zero_grad()
            self.loss(inputs[idxs], targets[idxs]).backward()
            self.opt.step()
            n_seen += bs
            if n_seen < next_look: continue
            next_look = max(n_seen*1.08, 256)
            with torch.no_grad(): loss = self.loss(*valid).item()
            losses.append((n_seen, loss))
            recent = [loss for at, loss in losses if at >= .8*n_seen]
            mean = np.mean(recent)
            if mean <= target: return n_seen, mean
            if not np.isfinite(mean): return math.inf, mean


def best_factor(cost, k=0):
    "Returns the integer with the least `cost`, downhill from `k`: by how many factors of two a learning rate changes"
    cost = functools.cache(cost)
    while True:
        better = min((k, k-1, k+1), key=cost)
        if better == k: return k
        k = better


def samples_needed(task, start, n, horizon):
    """Returns what each size needs, at its best learning rate, to come where the base recipe comes after `horizon`
    epochs of `n` samples from `start()`"""
    losses = []
    for seed in range(5):
        _, loss = start().train(base_bs, task.lr, seed, horizon*n)
        losses.append(loss)
    target = float(np.mean(losses))
    most = 6*horizon*n
    def needed(bs, factor, seeds):
        "Returns the samples of runs with a learning rate that is `factor` factors of two off"
        lr = task.rate(bs)*2.**factor
        return [start().train(bs, lr, seed, most, target)[0] for seed in seeds]
    factor = 0
    res = {}
    for bs in sizes:
        def cost(factor): return np.mean(needed(bs, factor, (20, 21)))  # other seeds choose the rate
        factor = best_factor(cost, factor)
        samples = needed(bs, factor, range(4))
        samples = [o if math.isfinite(o) else None for o in samples]
        res[bs] = dict(lr=task.rate(bs)*2.**factor, samples=samples)
    return dict(target=target, most=most, sizes=res)


def stacked(dl): return tuple(torch.stack(o) for o in zip(*dl.dataset))


def needed(task):
    "Returns the samples needed from each start of one run of the base recipe"
    learn = task.learner(base_bs)
    data = [stacked(dl) for dl in learn.dls.loaders]
    n = len(data[0][0])
    run = Run(task, data, learn.loss_func, learn.model)
    now = 0  # epochs
    res = {}
    for point, horizon in task.targets.items():
        if point > now: run.train(base_bs, task.lr, 100, (point-now)*n)
        now = point
        state = deepcopy(run.opt.state_dict())
        start = partial(Run, task, data, learn.loss_func, deepcopy(run.model), state)
        res[point] = samples_needed(task, start, n, horizon)
    return res


# The time per sample

class Clock(Callback):
    "Notes the microseconds of CPU time per sample of each epoch's training"
    def __init__(self): self.micros = []
    def before_train(self): self.began = time.process_time()
    def after_train(self):
        seconds = time.process_time()-self.began
        self.micros.append(seconds/len(self.dls.train_ds)*1e6)
        raise CancelEpochException


def times(task, n_rounds=8):
    """Returns microseconds per sample in a Learner's `fit`, by batch size: in one batch, and accumulated; the least of
    interleaved rounds"""
    learners = {}
    for bs in sizes:
        learners['whole',bs] = task.learner(bs, Clock())
        if bs > loader_bs:
            learners['accumulated',bs] = task.learner(loader_bs, [GradientAccumulation(bs), Clock()])
    for _ in range(n_rounds):
        for learn in learners.values(): learn.fit(1, 1e-5)
    res = dict(whole={}, accumulated={})
    for (kind, bs), learn in learners.items():
        res[kind][bs] = round(min(learn.clock.micros), 2)
    return res


# The command

parts = dict(times=times, needed=needed)


def main(names):
    torch.set_num_threads(1)
    results = json.loads(file.read_text()) if file.exists() else {}
    for task_name, task in tasks.items():
        for name in names:
            began = time.process_time()
            results.setdefault(task_name, {})[name] = parts[name](task)
            file.write_text(json.dumps(results, indent=1)+'\n')
            seconds = time.process_time()-began
            print(f'{task_name}, {name}: {seconds:.0f} s', file=sys.stderr)


if __name__ == '__main__': main(sys.argv[1:] or parts)
