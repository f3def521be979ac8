"""`python -m benchmarks.batch_size` measures what the page "Find the batch size" compares, and writes `batch_size.json` beside this file:
what `bs_find` and the noise scale predict, how many samples each batch size needs, and what schedules make of it. About 20 minutes on one core.

The searches for learning rates need hundreds of runs, so those that count samples are plain PyTorch loops; the steps of
`GradientAccumulation` are the same, as its tests show"""
import functools, json, sys, time
from dataclasses import dataclass
from pathlib import Path

from fastai.basics import *
from fastai.callback.all import *
from fastxtend_accum.all import *
from fastxtend_accum.demo import digits_learner
from fastxtend_accum.snapshot import unchanged

from .text import text_learner

here = Path(__file__).parent
sizes = [16, 32, 64, 128, 256, 512]

@dataclass
class Task:
    learner:Callable # `learner(bs)`, on samples in memory
    lr:float # Learning rate of the base recipe: batches of 16, Adam, a constant rate
    targets:dict # By point, in epochs of the base recipe: after how many more epochs of it the targets are reached
    branch:float # Length of a branch of `bs_find`, in epochs
    n_epoch:int # Length of the fits that are compared, in epochs
    seeds:int # Seeds of each measurement
    trials:int # Other seeds, which choose the learning rate

tasks = dict(digits=Task(digits_learner, 4e-3, {0:[1, 4], 1:[1.5], 3:[3]}, branch=1, n_epoch=10, seeds=5, trials=2),
             text=Task(text_learner, 8e-3, {0:[1, 2], 1:[1], 3:[1.5]}, branch=.5, n_epoch=6, seeds=3, trials=1))

def best_factor(cost, k=0):
    "The integer with the least `cost`, downhill from `k`: by how many factors of two a learning rate changes"
    cost = functools.cache(cost)
    while (better := min((k, k-1, k+1), key=cost)) != k: k = better
    return k

# What is predicted

def new_learner(task, bs, seed, cbs=None):
    "With weights and an order of samples of its own"
    learn = task.learner(bs, cbs=cbs)
    set_seed(seed)
    learn.model.apply(lambda m: m.reset_parameters() if hasattr(m, 'reset_parameters') else None)
    for dl in learn.dls.loaders: dl.rng.seed(seed)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def measure_noise(learn, lr):
    "The median of the noise scale over the next epoch, with batches of 64"
    with unchanged(learn):
        learn.fit(1, sqrt_scale(lr, 4), cbs=[GradientAccumulation(64), GradientNoiseScale()])
        return float(np.median([o.noise_scale for o in learn.recorder.noise_scale]))

def predict(task, seed):
    "What `bs_find` and the noise scale say at the points of one run of the base recipe, and how many epochs `bs_find` trains"
    learn,now,found = new_learner(task, 16, seed),0,{}
    for point in task.targets:
        if point > now: learn.fit(point-now, task.lr)
        now = point
        bs = learn.bs_find(sizes, task.branch, lr=task.lr, show_plot=False)
        found[point] = dict(bs_find=bs.critical, losses=bs.losses, epochs=sum(map(len, bs.losses.values()))*task.branch,
                            noise_scale=measure_noise(learn, task.lr))
    return found

# What each size needs

class Data:
    "The samples of a Learner as tensors"
    def __init__(self, learn):
        self.train,self.valid = (tuple(torch.stack([o[i] for o in dl.dataset]) for i in (0, 1)) for dl in learn.dls.loaders)

def loss_of(model, x, y): return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

def adam(model, lr):
    "fastai's Adam as PyTorch's, with weight decay of all but biases"
    biases = set(norm_bias_params(model, True))
    groups = [dict(params=[p for p in model.parameters() if (p in biases) == o], weight_decay=0. if o else .01) for o in (False, True)]
    return torch.optim.AdamW(groups, lr=lr, betas=(.9, .99), eps=1e-5)

def run(model, opt, data, bs, lr, seed, most, target=0.):
    "Train until the validation loss, averaged over the last fifth of the samples, is down at `target`; the samples, inf at `most`, and that loss"
    g,todo,seen,losses,next_look = torch.Generator().manual_seed(seed),torch.empty(0, dtype=torch.long),0,[],0
    for group in opt.param_groups: group['lr'] = lr
    while seen < most:
        while len(todo) < bs: todo = torch.cat([todo, torch.randperm(len(data.train[0]), generator=g)])
        idxs,todo = todo[:bs],todo[bs:]
        opt.zero_grad()
        loss_of(model, *(o[idxs] for o in data.train)).backward()
        opt.step()
        seen += bs
        if seen < next_look: continue
        with torch.no_grad(): losses.append((seen, loss_of(model, *data.valid).item()))
        next_look,mean = max(seen*1.08, 256),np.mean([loss for at,loss in losses if at >= .8*seen])
        if mean <= target: return seen,mean
        if not np.isfinite(mean): break
    return math.inf,mean

def base_runs(task, data):
    "The model and the state of the optimizer at each point of the base recipe"
    model,now,res = task.learner(16).model,0,{}
    opt = adam(model, task.lr)
    for point in task.targets:
        if point > now: run(model, opt, data, 16, task.lr, 100+now, (point-now)*len(data.train[0]))
        now,res[point] = point,deepcopy((model, opt.state_dict()))
    return res

def start(checkpoint):
    model,state = deepcopy(checkpoint)
    opt = adam(model, 0.)
    opt.load_state_dict(state)
    return model,opt

def needed(task, checkpoint, data, horizon, trials):
    """Samples that each size needs to come where the base recipe comes after `horizon` epochs: at the rule's learning rate or,
    with `trials`, at the best one. Ends with the first size that needs more than three times the least"""
    n,k,res = len(data.train[0]),0,{}
    target = float(np.mean([run(*start(checkpoint), data, 16, task.lr, seed, horizon*n)[1] for seed in range(3)]))
    most = 4*horizon*n
    for bs in sizes:
        def rate(k): return sqrt_scale(task.lr, bs/16)*2.**k
        def runs(k, seeds): return [run(*start(checkpoint), data, bs, rate(k), seed, most, target)[0] for seed in seeds]
        if trials: k = best_factor(lambda k: np.mean(runs(k, range(20, 20+trials))), k)
        samples = runs(k, range(task.seeds))
        res[bs] = dict(lr=rate(k), samples=[o if math.isfinite(o) else None for o in samples])  # None: not within four times the least
        most = min(most, 4*np.mean(samples))
        if 4*np.mean(samples) > 3*most: break
    return dict(target=target, epoch=n, sizes=res)

# What schedules make of it

def fit_once(task, seed, lr, bs=16, cbs=lambda: None):
    learn = new_learner(task, bs, seed, cbs=cbs())
    learn.fit_flat_cos(task.n_epoch, lr)
    return dict(loss=learn.recorder.values[-1][1], steps=len(learn.recorder.losses))

def fits(task, lr, **kwargs):
    "Five seeds at the best learning rate, which others have chosen"
    def loss(k): return np.mean([fit_once(task, seed, lr*2.**k, **kwargs)['loss'] for seed in range(20, 20+task.trials)])
    lr *= 2.**best_factor(loss)
    return dict(lr=lr, runs=[fit_once(task, seed, lr, **kwargs) for seed in range(5)])

def compare(task):
    "Constant batches, the schedule of `bs_schedule`, and the adaptive batch, over the same epochs"
    learn = new_learner(task, 16, 0)
    schedule = learn.bs_schedule(max_bs=256, n_epoch=task.branch, lr=task.lr)
    windows = GradientAccumulationSchedule(**schedule).preview(task.n_epoch, learn.dls)
    steps = {point:next(size for opened,size in windows if opened >= point) for point in task.targets}
    adaptive = lambda: [AdaptiveGradientAccumulation(32, 256, scale={'lr':sqrt_scale}), GradientNoiseScale()]
    return dict(steps=steps, constant={bs:fits(task, sqrt_scale(task.lr, bs/16), bs=bs) for bs in sizes[:-1]},
                schedule=fits(task, task.lr, cbs=lambda: GradientAccumulationSchedule(**schedule)),
                adaptive=fits(task, sqrt_scale(task.lr, 2), cbs=adaptive))

def measure(task):
    data = Data(task.learner(16))
    checkpoints = base_runs(task, data)
    return dict(predicted=[predict(task, seed) for seed in range(3)],
                needed=[dict(point=point, horizon=o, rate=rate, **needed(task, checkpoints[point], data, o, trials))
                        for point,horizons in task.targets.items() for o in horizons
                        for rate,trials in (('best', task.trials), ('rule', 0))],
                compared=compare(task))

def main():
    torch.set_num_threads(1)
    results = {}
    for name,task in tasks.items():
        began = time.process_time()
        results[name] = measure(task) | dict(cpu_seconds=round(time.process_time()-began))
        print(f"{name}: {results[name]['cpu_seconds']} s", file=sys.stderr)
    (here/'batch_size.json').write_text(json.dumps(results, indent=1)+'\n')

if __name__ == '__main__': main()
