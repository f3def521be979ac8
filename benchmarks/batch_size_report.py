"What the figures of `batch_size.json` say: tables and pictures for the page \"Find the batch size\""
import math
from dataclasses import dataclass
from statistics import geometric_mean, mean, median, stdev

titles = dict(digits='digits', text='docstrings')
sizes = 16,32,64,128,256,512

def error(values): return stdev(values)/len(values)**.5
def table(rows, *columns):
    import pandas as pd
    return pd.DataFrame(rows, columns=columns).style.hide(axis='index')

# Predicted and measured sizes

@dataclass
class Case:
    "Fits of each size from one point of a run to one loss, and what was predicted at that point"
    task:str
    point:int # In epochs of the run
    target:float # The loss
    epochs:dict[int,list[float]] # Needed, by batch size and seed; only sizes with which all seeds came there
    losses:list[dict] # Of the branches of `bs_find`, by batch size and seed, in three runs
    noise:list[float] # The noise scale in three runs

    @property
    def where(self): return f'{self.point} → {self.target:.2f}'

    def ratios(self)->dict[int,float]:
        "Samples that each size needs, as a ratio to those of the best size; the first that is not known counts as 4"
        means = {bs:mean(o) for bs,o in self.epochs.items()}
        least = min(means.values())
        return {bs:min(means[bs]/least, 4) if bs in means else 4. for bs in sizes[:len(means)+1]}

    def size_at(self, ratio:float)->float:
        "The largest size that needs at most `ratio` times the samples of the best; between two measured ones by the logarithm"
        ratios = self.ratios()
        last = max(bs for bs,o in ratios.items() if o <= ratio)
        if last == max(ratios): return math.inf
        a,b = ratios[last],ratios[2*last]
        return last*2**((ratio-a)/(b-a))

    def found(self, tolerance:float=.02)->list[int]:
        "What `bs_find` says"
        from fastxtend_accum.bs_find import critical_size
        return [critical_size(o, tolerance) for o in self.losses]

    def noise_size_at(self, ratio:float)->list[float]:
        "The same by theory, where B samples a step need E·(1+B/N) samples, and 16 is the best size measured"
        return [ratio*16+(ratio-1)*n for n in self.noise]

def cases(results, rates:str):
    "All of them, at the `rates` that were 'best' or those of the 'rule'"
    for task,o in results.items():
        for case in o['needed']:
            if case['rate'] != rates: continue
            epochs = {int(bs):[s/case['epoch'] for s in v['samples']] for bs,v in case['sizes'].items() if None not in v['samples']}
            said = [p[str(case['point'])] for p in o['predicted']]
            losses = [{int(bs):v for bs,v in p['losses'].items()} for p in said]
            yield Case(titles[task], case['point'], case['target'], epochs, losses, [p['noise_scale'] for p in said])

def shown(size): return f'{size:.0f}' if size < math.inf else f'> {sizes[-1]}'

def sizes_table(results, rates, ratio=1.25):
    "What `bs_find` and the noise scale said in three runs, and the size measured"
    rows = [(o.task, o.where, ', '.join(map(str, o.found())), ', '.join(map(shown, o.noise_size_at(ratio))), shown(o.size_at(ratio)))
            for o in cases(results, rates)]
    return table(rows, 'task', 'epoch → loss', 'bs_find', 'noise scale', 'measured')

def factors(results, rates, ratio=1.25, tolerance=.02):
    """How far off `bs_find`, the noise scale, and the one size that is best for all cases are: the factor between the predicted and the
    measured size, up or down, one a case"""
    measured = [o.size_at(ratio) for o in cases(results, rates)]
    said = [(geometric_mean(o.found(tolerance)), geometric_mean(o.noise_size_at(ratio)), geometric_mean(measured)) for o in cases(results, rates)]
    return [[max(a/b, b/a) for a,b in zip(predicted, measured)] for predicted in zip(*said)]

def factors_table(results):
    "The typical factor and the largest"
    rows = [(rates, f'{ratio:g}', *(f'{geometric_mean(o):.1f} ({max(o):.1f})' for o in factors(results, rates, ratio)))
            for rates in ('best', 'rule') for ratio in (1.1, 1.25, 1.5, 2)]
    return table(rows, 'rates', 'limit', 'bs_find', 'noise scale', 'one size')

def panels(results):
    from matplotlib import pyplot as plt
    fig,axs = plt.subplots(2, 1, figsize=(5, 6.4), layout='constrained')
    for ax,name in zip(axs, results): ax.set_title(titles[name])
    return fig,axs

def samples_picture(results, rates):
    "Samples against the batch size, one line a case"
    fig,axs = panels(results)
    for ax,name in zip(axs, titles.values()):
        for color,o in zip(('#0072B2', '#56B4E9', '#E69F00', '#009E73'), (o for o in cases(results, rates) if o.task == name)):
            least = min(map(mean, o.epochs.values()))
            ax.errorbar(list(o.epochs), [mean(e)/least for e in o.epochs.values()], [error(e)/least for e in o.epochs.values()], color=color,
                        marker='o', ms=4, capsize=3, label=f'from epoch {o.point} to loss {o.target:.2f}')
        ax.axhline(1.25, color='#999999', lw=1, ls=':')
        ax.set_xscale('log', base=2)
        ax.set_xticks(sizes, sizes)
        ax.set(ylabel='samples / least', ylim=(.8, 4.8))
        ax.legend()
    axs[-1].set_xlabel('batch size (samples)')
    return fig

def cost_table(results):
    "Of one `bs_find`, in epochs of training"
    epochs = {name:[p['epochs'] for run in o['predicted'] for p in run.values()] for name,o in results.items()}
    return table([(titles[name], f'{min(o):g} to {max(o):g}', f'{median(o):g}') for name,o in epochs.items()], 'task', 'epochs', 'median')

# What schedules make of it

def loss_and_steps(fit): return [r['loss'] for r in fit['runs']],median(r['steps'] for r in fit['runs'])

def constant_loss(found, steps):
    "Of a constant batch with so many steps; between two measured ones by the logarithm of the steps"
    import numpy as np
    losses,at = zip(*map(loss_and_steps, reversed(found['constant'].values())))
    return float(np.interp(math.log(steps), [math.log(o) for o in at], list(map(mean, losses))))

def fits(found):
    "The best constant batch, the schedule, the adaptive batch"
    best = min(found['constant'], key=lambda bs: mean(loss_and_steps(found['constant'][bs])[0]))
    return {f'constant, {best}':found['constant'][best], 'bs_schedule, '+' → '.join(map(str, found['steps'].values())):found['schedule'],
            'adaptive, 32 to 256':found['adaptive']}

def schedules_table(results):
    "Validation loss of five seeds, and that of a constant batch with as many steps"
    rows = []
    for name,o in results.items():
        found = o['compared']
        for label,fit in fits(found).items():
            losses,steps = loss_and_steps(fit)
            rows.append((titles[name], label, f'{steps:g}', f'{mean(losses):.3f} ± {error(losses):.3f}', f'{constant_loss(found, steps):.3f}'))
    return table(rows, 'task', 'batch', 'steps', 'loss', 'loss, constant')

def schedules_picture(results):
    "Validation loss against optimizer steps"
    fig,axs = panels(results)
    for ax,o in zip(axs, results.values()):
        found = o['compared']
        for label,color,ls,group in (('constant, 256 to 16', '#E69F00', '-', found['constant'].values()),
                                     ('bs_schedule', '#0072B2', '', [found['schedule']]), ('adaptive', '#009E73', '', [found['adaptive']])):
            losses,steps = zip(*map(loss_and_steps, group))
            ax.errorbar(steps, list(map(mean, losses)), list(map(error, losses)), color=color, ls=ls, marker='o', capsize=3, label=label)
        ax.set_xscale('log')
        ticks = [50, 100, 200, 400, 800, 1600]
        ax.set_xticks(ticks, ticks)
        ax.minorticks_off()
        ax.set_ylabel('validation loss')
        ax.legend()
    axs[-1].set_xlabel('optimizer steps')
    return fig
