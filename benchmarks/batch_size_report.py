"What the figures of `batch_size.json` say: tables and a picture for the page \"Evidence\""
from dataclasses import dataclass
from statistics import mean

names = dict(
    digits='digits, SGD',
    text='docstrings, Adam',
    table='table, Adam',
    shapes='shapes, SGD',
    pixels='pixels, Adam',
    photos='photos, SGD',
    topics='topics, Adam',
    friedman='friedman, SGD')


@dataclass
class Case:
    "Training from one point of a run to one loss"
    task: str
    start: int  # in epochs of the run
    target: float  # the loss
    samples: dict  # needed on average, by batch size
    micros: dict  # microseconds per sample, whole or accumulated, whichever is faster; by batch size

    def time(self, bs):
        "Returns the seconds to the target"
        return self.samples[bs]*self.micros[bs]/1e6

    def best(self): return min(self.samples, key=self.time)

    def lost(self, bs):
        "Returns the time with this size over the time with the best one"
        return self.time(bs)/self.time(self.best())


def fastest(times):
    "Returns the microseconds per sample by batch size, whole or accumulated, whichever is faster"
    res = {}
    for by_size in times['whole'], times['accumulated']:
        for bs, micros in by_size.items():
            before = res.get(int(bs), micros)
            res[int(bs)] = min(micros, before)
    return res


def samples_by_size(case):
    "Returns the samples needed on average. A seed that did not reach the loss counts with all that it trained on"
    res = {}
    for bs, o in case['sizes'].items():
        res[int(bs)] = mean(n or case['most'] for n in o['samples'])
    return res


def cases(results):
    res = []
    for task, o in results.items():
        micros = fastest(o['times'])
        for start, case in o['needed'].items():
            res.append(Case(names[task], int(start), case['target'], samples_by_size(case), micros))
    return res


def lost_with(results):
    "Returns the time lost in each case, by batch size"
    all_cases = cases(results)
    res = {}
    for bs in all_cases[0].samples:
        res[bs] = [case.lost(bs) for case in all_cases]
    return res


def summary_table(results):
    import pandas as pd
    rows = []
    for bs, lost in lost_with(results).items():
        average = format(mean(lost), '.2f')
        worst = format(max(lost), '.2f')
        rows.append((bs, average, worst))
    return pd.DataFrame(rows, columns=['batch size', 'mean', 'worst']).style.hide(axis='index')


def time_picture(results):
    "Time to the target against the batch size"
    from matplotlib import pyplot as plt
    fig, axs = plt.subplots(4, 2, figsize=(5.2, 10), layout='constrained', sharex=True, sharey=True)
    all_cases = cases(results)
    for ax, name in zip(axs.flat, names.values()):
        plot_task(ax, name, [case for case in all_cases if case.task == name])
    fig.supxlabel('batch size (samples)')
    fig.supylabel('time / best')
    return fig


def plot_task(ax, name, cases):
    for color, case in zip(('#0072B2', '#E69F00'), cases):
        sizes = list(case.samples)
        lost = [case.lost(bs) for bs in sizes]
        label = f'from epoch {case.start} to loss {case.target:.2f}'
        ax.plot(sizes, lost, color=color, marker='o', ms=4, label=label)
    ax.set_xscale('log', base=2)
    ax.set_xticks(sizes, sizes)
    ax.minorticks_off()
    ax.set_title(name, pad=38)
    ax.set_ylim(.8, 4)
    ax.set_xlim(sizes[0]/1.2, sizes[-1]*1.2)
    ax.legend(fontsize=9, frameon=False, loc='lower center', bbox_to_anchor=(.5, 1))
