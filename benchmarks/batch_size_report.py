"What the figures of `batch_size.json` say: tables and a picture for the page \"Evidence\""
from dataclasses import dataclass
from statistics import mean

names = dict(digits='digits, SGD', text='docstrings, Adam', table='table, Adam', shapes='shapes, SGD',
             pixels='pixels, Adam', photos='photos, SGD', topics='topics, Adam', friedman='friedman, SGD')

@dataclass
class Case:
    "Training from one point of a run to one loss"
    task:str
    start:int # In epochs of the run
    target:float # The loss
    samples:dict[int,float] # Needed on average, by batch size; a seed that did not come there counts with all that it trained on
    micros:dict[tuple[int,int],float] # Microseconds per sample, by batch size and micro-batch

    @property
    def where(self): return f'{self.start} → {self.target:.2f}'

    def time(self, bs:int)->float:
        "Seconds to the target, whole or accumulated, whichever is faster"
        return self.samples[bs]*min(us for (size,_),us in self.micros.items() if size == bs)/1e6

    def best(self)->int: return min(self.samples, key=self.time)

    def lost(self, bs:int)->float:
        "Time with this size over time with the best one"
        return self.time(bs)/self.time(self.best())

def cases(results):
    for task,o in results.items():
        times = o['times']
        micros = {(int(bs), int(bs)):us for bs,us in times['whole'].items()} | {(int(bs), 64):us for bs,us in times['accumulated'].items()}
        for start,case in o['needed'].items():
            samples = {int(bs):mean(o or case['most'] for o in v['samples']) for bs,v in case['sizes'].items()}
            yield Case(names[task], int(start), case['target'], samples, micros)

def summary(losses): return f'{mean(losses):.2f}',f'{max(losses):.2f}'

def table(rows, *columns):
    import pandas as pd
    return pd.DataFrame(rows, columns=columns).style.hide(axis='index')

def lost_table(results):
    "The size that is best, and those that take at most a quarter more time"
    rows = [(o.task, o.where, o.best(), ', '.join(str(bs) for bs in o.samples if o.lost(bs) <= 1.25)) for o in cases(results)]
    return table(rows, 'task', 'epoch → loss', 'best', 'at most 1.25 times its time')

def lost_with(results):
    "Time lost in each case with each size"
    every = list(cases(results))
    return {bs:[o.lost(bs) for o in every] for bs in every[0].samples}

def summary_table(results): return table([(bs, *summary(o)) for bs,o in lost_with(results).items()], 'batch size', 'mean', 'worst')

def time_picture(results):
    "Time to the target against the batch size"
    from matplotlib import pyplot as plt
    fig,axs = plt.subplots(4, 2, figsize=(5.2, 10), layout='constrained', sharex=True, sharey=True)
    for ax,name in zip(axs.flat, names.values()):
        for color,o in zip(('#0072B2', '#E69F00'), (o for o in cases(results) if o.task == name)):
            sizes = list(o.samples)
            ax.plot(sizes, [o.lost(bs) for bs in sizes], color=color, marker='o', ms=4, label=f'from epoch {o.start} to loss {o.target:.2f}')
        ax.set_xscale('log', base=2)
        ax.set_xticks(sizes, sizes)
        ax.minorticks_off()
        ax.set_title(name, pad=38)
        ax.set(ylim=(.8, 4), xlim=(sizes[0]/1.2, sizes[-1]*1.2))
        ax.legend(fontsize=9, frameon=False, loc='lower center', bbox_to_anchor=(.5, 1))
    fig.supxlabel('batch size (samples)')
    fig.supylabel('time / best')
    return fig
