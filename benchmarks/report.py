"What the figures of `results.json` say: tables and a picture, which pages show, too"
from statistics import mean, median, stdev

import pandas as pd
from matplotlib import pyplot as plt


# Ratios, which are taken within a round

def divided(values, base): return [a/b for a, b in zip(values, base)]


def spread(values):
    "Returns the median, and the range over the rounds"
    return f'{median(values):.2f} ({min(values):.2f}-{max(values):.2f})'


def with_deviation(values, unit):
    return f'{mean(values):{unit}} ± {stdev(values):{unit}}'


def as_table(rows):
    "Returns a table with a row for each item of a dict of dicts"
    return pd.DataFrame(rows).T


def run_on(results):
    "Returns on which machine, when and in how many rounds each part was measured"
    parts = {}
    for name, o in results.items(): parts.setdefault(o['run_on'], []).append(name)
    return '\n'.join(f"{', '.join(names)}: {words}" for words, names in parts.items())


# A batch that grows

on_small_loader = '32 to 512, loader of 32'


def time_ratios(runs, name, base):
    "Returns the time of a fit as a ratio to the fit `base`, one a round"
    return divided(runs[name]['seconds'], runs[base]['seconds'])


def growing_table(results, task='linear'):
    "Returns steps, passes, time relative to batches of 32, and what was reached, with the deviation over the seeds"
    part = results['growing']
    runs = part[task]
    rows = {}
    for name, o in runs.items():
        rows[name] = {
            'optimizer steps': o['steps'],
            'forward passes': o['passes'],
            'time': spread(time_ratios(runs, name, 'batches of 32')),
            'validation loss': with_deviation(o['loss'], '.4f')}
        if o['accuracy']: rows[name]['accuracy'] = with_deviation(o['accuracy'], '.1%')
        else: rows[name]['expected loss'] = format(part['expected'][name]['loss'], '.4f')
    return as_table(rows)


def digits_table(results): return growing_table(results, 'digits')


def growing_in_words(results):
    "Returns what the larger loader saves"
    lines = []
    for task, label in dict(linear='linear model', digits='digits').items():
        runs = results['growing'][task]
        on_large = runs['32 to 512']
        on_small = runs[on_small_loader]
        time = spread(time_ratios(runs, '32 to 512', on_small_loader))
        passes = on_large['passes']/on_small['passes']
        steps = on_large['steps']/on_small['steps']
        lines.append(f'{label}: {time} of the time, {passes:.0%} of the forward passes, {steps:.0%} of the steps')
    return '\n'.join(lines)


def seesaw_cells(results):
    "Returns the figures of each way, by task and size of the batch at the start"
    res = {}
    for task, cells in results['seesaw']['cells'].items():
        for bs, cell in cells.items(): res[f'{task}, {bs}'] = cell
    return res


def seesaw_table(results):
    rows = {}
    for name, cell in seesaw_cells(results).items():
        rows[name] = {
            'steps': cell['one_cycle']['steps'],
            'one-cycle': with_deviation(cell['one_cycle']['losses'], '.4f'),
            'steps ': cell['seesaw']['steps'],
            'growing': with_deviation(cell['seesaw']['losses'], '.4f'),
            'constant, as many steps': with_deviation(cell['as_many']['losses'], '.4f')}
    return as_table(rows)


def gain(a, b):
    "Returns by how many standard errors the mean of losses `a` is below that of `b`"
    error = (stdev(a)**2/len(a) + stdev(b)**2/len(b))**.5
    return (mean(b)-mean(a))/error


def seesaw_in_words(results):
    "Returns in how many cells the growing batch is better, and worse, by more than two standard errors"
    lines = []
    for way, label in dict(one_cycle='one-cycle', as_many='a constant batch with as many steps').items():
        gains = [gain(cell['seesaw']['losses'], cell[way]['losses']) for cell in seesaw_cells(results).values()]
        n_better = sum(o > 2 for o in gains)
        n_worse = sum(o < -2 for o in gains)
        of_all = f'better in {n_better} of {len(gains)} rows and worse in {n_worse}'
        lines.append(f'compared with {label}, growing is {of_all}')
    return '\n'.join(lines)


# Whole fits

fit_models = dict(
    linear='three linear layers',
    tabular="fastai's tabular learner",
    resnet34='resnet34, images of 32x32 pixels')
fit_sizes = 1, 8  # loader batches in a window


def fits_table(results):
    "Returns the time of a fit as a ratio to the plain Learner"
    rows = {}
    for model, label in fit_models.items():
        times = results['fits']['models'][model]['times']
        rows[label] = {f'K={k}': spread(divided(times[str(k)], times['plain'])) for k in fit_sizes}
    return as_table(rows)


# Costs of a micro-batch

cost_labels = dict(
    windows='GradientAccumulation',
    split='with micro_batch_size',
    schedule='GradientAccumulationSchedule',
    checkpointing='ActivationCheckpointing, whole batch fits')
optimizers = dict(sgd="torch's SGD", adam="fastai's Adam")


def costs_table(results):
    "Returns time and calls of a micro-batch as ratios to the plain Learner with the same optimizer"
    rows = {}
    for opt, cells in results['costs']['by_opt'].items():
        base = cells['plain 1']['time']
        calls_title = 'calls' if opt == 'sgd' else 'calls '  # titles differ
        for cell, o in cells.items():
            kind, k = cell.split()
            if kind == 'plain': continue
            row = rows.setdefault(f'{cost_labels[kind]}, K={k}', {})
            row[f'{optimizers[opt]}, time'] = spread(divided(o['time'], base))
            row[calls_title] = f"{o['calls']:.2f}"
    return as_table(rows)


# Other callbacks

contestants = dict(ours='GradientAccumulation', fastai="fastai's", fastxtend="fastxtend's", own='20 lines of your own')
comparison_labels = dict(  # and the format of the figures
    whole=('largest weight difference, full windows', '.0e'),
    ragged=('largest weight difference, incomplete last window', '.0e'),
    padded=('gradient error, padded texts', '.0%'),
    entries=('entries of a custom logger in 15 steps', 'd'))


def comparison_table(results):
    "Returns a row for each figure, and a column for each callback"
    found = results['comparison']['callbacks']
    rows = {}
    for key, (label, form) in comparison_labels.items():
        rows[label] = {contestants[name]: format(o[key], form) for name, o in found.items()}
    return as_table(rows)


# Memory

def memory_in_words(results):
    "Returns the ends of the curves of memory, and the cost of GradientCache beside accumulation of its micro-batches"
    peaks = results['memory']['peaks']
    first, *_, last = peaks['plain']
    whole = peaks['plain']
    accumulated = peaks['ours']
    most = max(divided(peaks['ours_cache'].values(), peaks['ours_split'].values()))
    lines = [
        f'from {first} to {last} samples as one batch: {whole[first]:.0f} to {whole[last]:.0f} MB',
        f'from {first} to {last} samples accumulated: {accumulated[first]:.0f} to {accumulated[last]:.0f} MB',
        f"GradientCache's peak memory: at most {most:.2f} times the peak of accumulation"]
    for n, times in results['memory']['times'].items():
        ratios = spread(divided(times['ours_cache'], times['ours_split']))
        lines.append(f'GradientCache, {int(n):,} parameters: {ratios} times the time of accumulation')
    return '\n'.join(lines)


def memory_picture(results):
    "Peak memory against the effective batch"
    fig, ax = plt.subplots(figsize=(5.2, 3.4), layout='constrained')
    lines = dict(
        plain=('#E69F00', 'one batch'),
        ours=('#0072B2', 'accumulated, 16 samples at a time'),
        ours_cache=('#009E73', 'GradientCache, micro-batches of 16'))
    for case, (color, label) in lines.items():
        peaks = results['memory']['peaks'][case]
        ax.plot([int(size) for size in peaks], peaks.values(), 'o-', color=color, ms=4, label=label)
    ax.set(xlabel='effective batch (samples)', ylabel='peak memory of training (MB)', ylim=(0, None))
    ax.legend()
    return fig


# fastai's learners

learner_names = 'resnet34', 'convnext', 'unet', 'text', 'language', 'tabular', 'contrastive'
learner_kinds = dict(checkpointing='as needed', all_blocks='all blocks', offloaded='offloaded', split='quarters')


def memory_of(o, kind): return o['live'][kind]/o['live']['whole']
def time_of(o, kind): return median(divided(o['time'][kind], o['time']['whole']))


def learners_table(results):
    "Returns memory and time of a step of fastai's learners, relative to the whole batch"
    rows = {}
    for name, o in results['learners']['models'].items():
        rows[name] = {}
        for kind, label in learner_kinds.items():
            rows[name][label] = f'{memory_of(o, kind):.0%}, {time_of(o, kind):.2f}x'
    return as_table(rows)


def learners_in_words(results):
    "Returns the range over fastai's learners of what each kind of training needs"
    models = results['learners']['models'].values()
    lines = []
    for kind, label in learner_kinds.items():
        memory = sorted(memory_of(o, kind) for o in models)
        time = sorted(time_of(o, kind) for o in models)
        of_memory = f'{memory[0]:.0%} to {memory[-1]:.0%}'
        of_time = f'{time[0]:.1f}x to {time[-1]:.1f}x'
        lines.append(f'{label:<10}  {of_memory}, {of_time}')
    return '\n'.join(lines)


shown = dict(  # what the command prints of each part
    growing=(growing_table, digits_table, growing_in_words),
    seesaw=(seesaw_table, seesaw_in_words),
    fits=(fits_table,),
    costs=(costs_table,),
    comparison=(comparison_table,),
    memory=(memory_in_words,),
    learners=(learners_table, learners_in_words))
