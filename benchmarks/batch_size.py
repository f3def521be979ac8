"""`python -m benchmarks.batch_size` measures what the page "Evidence" shows of batch sizes, and writes `batch_size.json` beside this file:
the samples that each batch size needs to reach a loss, and its time per sample. Some 20 minutes on one core.

The searches for learning rates need hundreds of runs, so those that count samples are plain PyTorch loops; the steps of
`GradientAccumulation` are the same, as its tests show"""
import functools, json, sys, time
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
base_bs,loader_bs = 16,64 # Of the base recipe; of the DataLoader: larger sizes accumulate

def new_learner(bs, model, xs, ys, n_valid, loss_func=None):
    samples = list(zip(xs, ys))
    dls = DataLoaders(DataLoader(samples[:-n_valid], bs=bs, shuffle=True), DataLoader(samples[-n_valid:], bs=256))
    return Learner(dls, model, loss_func or nn.CrossEntropyLoss())

def table_learner(bs):
    "Two classes of 20 made numbers, 4096 rows to train on and 1024 to validate"
    x,y = make_classification(5120, 20, n_informative=12, n_redundant=4, n_clusters_per_class=8, flip_y=.02, random_state=0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))
    return new_learner(bs, model, tensor(x).float(), tensor(y), 1024)

class Shapes(Module):
    "A small U-Net: one class for each pixel"
    def __init__(self): self.fine,self.coarse,self.deep,self.out = [nn.Conv2d(*o, 3, padding=1) for o in ((1, 8), (8, 16), (16, 16), (24, 3))]
    def forward(self, x):
        x = F.relu(self.fine(x))
        y = F.relu(self.deep(F.relu(self.coarse(F.max_pool2d(x, 2)))))
        return self.out(torch.cat([x, F.interpolate(y, scale_factor=2)], 1))

def shapes_learner(bs):
    "Discs, squares or ground, for each pixel of noisy images of 16x16; 1024 to train on and 128 to validate"
    g = torch.Generator().manual_seed(0)
    def draw(*shape): return torch.rand(*shape, generator=g)
    n,at = 1152,torch.arange(16.)
    (y,x,r),square = draw(3, n, 1, 1)*tensor(8, 8, 4).view(3, 1, 1, 1)+tensor(4, 4, 2).view(3, 1, 1, 1),draw(n, 1, 1) < .5
    dy,dx = (at[:,None]-y).abs(),(at-x).abs()
    inside = torch.where(square, torch.maximum(dy, dx) < .9*r, dy**2+dx**2 < r**2)
    return new_learner(bs, Shapes(), (inside+torch.randn(n, 16, 16, generator=g))[:,None], inside*(1+square.long()), 128)

def pixels_learner(bs):
    "Handwritten digits as 64 numbers, 1408 to train on and 389 to validate"
    x,y = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(y))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return new_learner(bs, model, tensor(x[order]/16).float(), tensor(y[order]), 389)

def photos_learner(bs):
    "From which of two photographs a part of 12x12 is, 3072 parts to train on and 512 to validate"
    g = np.random.RandomState(0)
    def part(im):
        y,x = g.randint(im.shape[0]-12),g.randint(im.shape[1]-12)
        return im[y:y+12,x:x+12]
    ys,images = g.randint(2, size=3584),load_sample_images().images
    xs = tensor(np.stack([part(images[i]) for i in ys])).permute(0, 3, 1, 2).float()/255
    def layer(i, o): return nn.Sequential(nn.Conv2d(i, o, 3, 2, 1), nn.ReLU())
    model = nn.Sequential(layer(3, 16), layer(16, 32), nn.Flatten(), nn.Linear(288, 2))
    return new_learner(bs, model, xs-.5, tensor(ys), 512)

def topics_learner(bs):
    "From which of six modules 96 characters of docstrings are, by their trigrams: 1480 passages to train on and 256 to validate"
    texts = sorted((docstrings([o]).encode('ascii', 'replace') for o in text_modules), key=len)[-6:]
    passages = [(text[i:i+96], k) for k,text in enumerate(texts) for i in range(0, len(text)-95, 96)]
    chosen = [passages[i] for i in np.random.RandomState(0).permutation(len(passages))[:1736]]
    xs = tensor([[(a*961+b*31+c)%4096 for a,b,c in zip(o, o[1:], o[2:])] for o,_ in chosen])
    model = nn.Sequential(nn.EmbeddingBag(4096, 32), nn.ReLU(), nn.Linear(32, 6))
    return new_learner(bs, model, xs, tensor([k for _,k in chosen]), 256)

def friedman_learner(bs):
    "A function of ten numbers (Friedman, 1991), 4096 rows to train on and 1024 to validate"
    x,y = make_friedman1(5120, noise=1., random_state=0)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
    return new_learner(bs, model, tensor(x).float(), tensor((y-y.mean())/y.std()).float(), 1024, nn.MSELoss())

@dataclass
class Task:
    make:Callable # `make(bs)` is a Learner, on samples in memory
    sgd:bool # SGD with momentum, not Adam
    lr:float # Learning rate of the base recipe: batches of 16, a constant rate
    targets:dict # By start, in epochs of the base recipe: after how many more epochs of it the target is reached

    def rate(self, bs): return (linear_scale if self.sgd else sqrt_scale)(self.lr, bs/base_bs)

    def learner(self, bs, cbs=None, seed=0):
        "With weights and an order of samples of its own"
        learn = self.make(bs)
        learn.opt_func = partial(SGD, mom=.9) if self.sgd else Adam
        set_seed(seed)
        learn.model.apply(lambda m: m.reset_parameters() if hasattr(m, 'reset_parameters') else None)
        for dl in learn.dls.loaders: dl.rng.seed(seed)
        learn.add_cbs(cbs).remove_cb(ProgressCallback)
        learn.logger = noop
        return learn

tasks = dict(digits=Task(digits_learner, True, .016, {0:2, 1:3}), text=Task(text_learner, False, 8e-3, {0:2, 1:2}),
             table=Task(table_learner, False, 4e-3, {0:2, 1:3}), shapes=Task(shapes_learner, True, .03, {0:2, 1:3}))
tasks |= dict(pixels=Task(pixels_learner, False, 8e-3, {0:2, 1:3}), photos=Task(photos_learner, True, .03, {0:2, 1:3}),
              topics=Task(topics_learner, False, .016, {0:2, 1:3}), friedman=Task(friedman_learner, True, .016, {0:2, 1:3}))

def torch_opt(task, model):
    "fastai's SGD or Adam as PyTorch's, with weight decay of all but biases"
    if task.sgd: return torch.optim.SGD(model.parameters(), momentum=.9)
    biases = set(norm_bias_params(model, True))
    groups = [dict(params=[p for p in model.parameters() if (p in biases) == o], weight_decay=0. if o else .01) for o in (False, True)]
    return torch.optim.AdamW(groups, betas=(.9, .99), eps=1e-5)

class Run:
    "Training in a plain loop; `data` has inputs and targets of the training set, then of the validation set"
    def __init__(self, task, data, loss_func, model, state=None):
        self.data,self.model = data,deepcopy(model)
        self.loss,self.opt = lambda x, y: loss_func(self.model(x), y),torch_opt(task, self.model)
        if state: self.opt.load_state_dict(state)

    def train(self, bs, lr, seed, most, target=0.):
        "Until the validation loss, averaged over the last fifth of the samples, is down at `target`: samples (inf at `most`) and that loss"
        (x,y),valid = self.data
        g,todo,seen,losses,next_look = torch.Generator().manual_seed(seed),torch.empty(0, dtype=torch.long),0,[],0
        for group in self.opt.param_groups: group['lr'] = lr
        while seen < most:
            while len(todo) < bs: todo = torch.cat([todo, torch.randperm(len(x), generator=g)])
            idxs,todo = todo[:bs],todo[bs:]
            self.opt.zero_grad()
            self.loss(x[idxs], y[idxs]).backward()
            self.opt.step()
            seen += bs
            if seen < next_look: continue
            with torch.no_grad(): losses.append((seen, self.loss(*valid).item()))
            next_look,mean = max(seen*1.08, 256),np.mean([loss for at,loss in losses if at >= .8*seen])
            if mean <= target or not np.isfinite(mean): return seen if mean <= target else math.inf,mean
        return math.inf,mean

def best_factor(cost, k=0):
    "The integer with the least `cost`, downhill from `k`: by how many factors of two a learning rate changes"
    cost = functools.cache(cost)
    while (better := min((k, k-1, k+1), key=cost)) != k: k = better
    return k

def samples_needed(task, start, n, horizon):
    "That each size needs, at its best learning rate, to come where the base recipe comes after `horizon` epochs from `start()`"
    target = float(np.mean([start().train(base_bs, task.lr, seed, horizon*n)[1] for seed in range(5)]))
    k,res,most = 0,{},6*horizon*n
    for bs in sizes:
        def runs(k, seeds): return [start().train(bs, task.rate(bs)*2.**k, seed, most, target)[0] for seed in seeds]
        k = best_factor(lambda k: np.mean(runs(k, (20, 21))), k)  # other seeds choose the rate
        res[bs] = dict(lr=task.rate(bs)*2.**k, samples=[o if math.isfinite(o) else None for o in runs(k, range(4))])
    return dict(target=target, most=most, sizes=res)

def needed(task):
    "From each start of one run of the base recipe"
    learn,now,res = task.learner(base_bs),0,{}
    data = [tuple(torch.stack(o) for o in zip(*dl.dataset)) for dl in learn.dls.loaders]
    run = Run(task, data, learn.loss_func, learn.model)
    for point,horizon in task.targets.items():
        if point > now: run.train(base_bs, task.lr, 100, (point-now)*len(data[0][0]))
        now,start = point,partial(Run, task, data, learn.loss_func, deepcopy(run.model), deepcopy(run.opt.state_dict()))
        res[point] = samples_needed(task, start, len(data[0][0]), horizon)
    return res

class Clock(Callback):
    "Microseconds of CPU time per sample of each epoch's training"
    def __init__(self): self.us = []
    def before_train(self): self.began = time.process_time()
    def after_train(self):
        self.us.append((time.process_time()-self.began)/len(self.dls.train_ds)*1e6)
        raise CancelEpochException

def times(task, n_rounds=8):
    """Microseconds per sample in a Learner's `fit`, by batch size: in one batch, and accumulated; the least of interleaved
    rounds"""
    learners = {('whole', bs):task.learner(bs, Clock()) for bs in sizes}
    learners |= {('accumulated', bs):task.learner(loader_bs, [GradientAccumulation(bs), Clock()]) for bs in sizes if bs > loader_bs}
    for _,learn in itertools.product(range(n_rounds), learners.values()): learn.fit(1, 1e-5)
    least = {k:round(min(o.clock.us), 2) for k,o in learners.items()}
    return {kind:{bs:us for (o,bs),us in least.items() if o == kind} for kind in ('whole', 'accumulated')}

parts = dict(times=times, needed=needed)

def main(names):
    torch.set_num_threads(1)
    results = json.loads(file.read_text()) if file.exists() else {}
    for (name,task),part in itertools.product(tasks.items(), names):
        began = time.process_time()
        results.setdefault(name, {})[part] = parts[part](task)
        file.write_text(json.dumps(results, indent=1)+'\n')
        print(f"{name}, {part}: {time.process_time()-began:.0f} s", file=sys.stderr)

if __name__ == '__main__': main(sys.argv[1:] or parts)
