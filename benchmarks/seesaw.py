"""Does `seesaw` pay? `python -m benchmarks.seesaw` trains the four tasks with Adam of `batch_size`, six epochs each: with a cosine in batches of 16,
with `seesaw` of that cosine (16 to 128), and with a cosine in constant batches that take as many optimizer steps as `seesaw`. It writes
`seesaw.json` beside this file, in a quarter of an hour on two cores.

Each has its best learning rate of five, by the mean validation loss over three seeds; the losses shown are of four other seeds.
The rule, set before the first run: `seesaw` stays only if its loss is below that of the constant batches on at least three of the four tasks."""
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from fastai.basics import *
from fastai.callback.all import *
from fastxtend_accum.all import *

from .batch_size import tasks

file = Path(__file__).with_suffix('.json')
EPOCHS,START,END,FACTORS = 6,16,128,(.5, 1, 2, 4, 8)

def fit(task, lr, bs, final, seed):
    "Validation loss and optimizer steps"
    cos = SchedCos(lr, 0.)
    accum = GradientAccumulationSchedule(**seesaw(cos, bs, final), remainder='carry', verbose=False) if final else None
    learn = task.learner(bs, L(ParamScheduler({'lr':cos}), accum).filter(), seed)
    with learn.no_bar(), learn.no_logging(): learn.fit(EPOCHS, lr)
    return learn.recorder.values[-1][1],len(learn.recorder.losses)

def best(task, bs, final):
    "Losses of four seeds with the best learning rate, that rate as a multiple of the task's, and the steps"
    def loss(k): return np.nan_to_num(np.mean([fit(task, k*task.lr, bs, final, 100+s)[0] for s in range(3)]), nan=np.inf)
    k = min(FACTORS, key=loss)
    runs = [fit(task, k*task.lr, bs, final, s) for s in range(4)]
    return [o for o,_ in runs],k,runs[0][1]

def measure(name):
    torch.set_num_threads(1)
    task = tasks[name]
    res = dict(cosine=best(task, START, None), seesaw=best(task, START, END))
    steps,n = res['seesaw'][2],task.make(START).dls.train.n
    res['constant'] = best(task, max(1, round(EPOCHS*n/steps)), None)
    return name,res

if __name__ == '__main__':
    names = [k for k,o in tasks.items() if not o.sgd]
    with ProcessPoolExecutor(2, mp_context=get_context('spawn')) as pool: results = dict(o.result() for o in [pool.submit(measure, o) for o in names])
    file.write_text(json.dumps(results, indent=1)+'\n')
