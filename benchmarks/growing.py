"""The runs of the demo over ten seeds: what a batch that grows reaches at a constant learning rate, and in how many
steps"""
from fastxtend_accum.demo import demo_runs, train

n_seeds = 10
left_out = 'log_accum_batch=False'  # the same fit, logged in another way


def run_names(): return [name for name in demo_runs() if name != left_out]


def measure(n_epoch=12, seeds=range(n_seeds)):
    "Returns for each run the accuracy, validation loss and optimizer steps of each seed"
    res = {name: dict(accuracy=[], loss=[], steps=[]) for name in run_names()}
    for seed in seeds:
        runs = demo_runs()  # anew, since a callback belongs to one Learner
        for name, figures in res.items():
            bs, cb = runs[name]
            learn = train(bs, cb, n_epoch, seed)
            _, loss, accuracy = learn.recorder.values[-1]
            figures['accuracy'].append(accuracy)
            figures['loss'].append(loss)
            figures['steps'].append(learn.loss_log.n_steps)
    return dict(runs=res)
