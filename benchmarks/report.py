"What the figures of `results.json` say: tables, the goals, and the pictures"
from statistics import mean, median, stdev

# pandas and matplotlib are imported where they are needed, so that `python -m benchmarks` needs little memory itself

labels = dict(
    plain='Learner, no accumulation',
    ours='GradientAccumulation',
    ours_split='with micro_batch_size',
    ours_cache='GradientCache',
    ours_schedule='GradientAccumulationSchedule',
    fastai="fastai's GradientAccumulation",
    fastxtend="fastxtend's GradientAccumulation",
    lightning='Lightning',
    accelerate='Accelerate',
    by_hand='loop by hand')

gold = '#E69F00'
blue = '#0072B2'
green = '#009E73'
gray = '#999999'
colors = dict(ours=blue, ours_split=blue, ours_cache='#56B4E9', ours_schedule=green, fastai=gold, fastxtend='#D55E00')


# Ratios, which are taken within a round

def divided(values, base): return [a/b for a, b in zip(values, base)]


def spread(values, digits=2):
    "Returns the median, and the range over the rounds"
    form = f'.{digits}f'
    middle = format(median(values), form)
    least = format(min(values), form)
    most = format(max(values), form)
    return f'{middle} ({least}-{most})'


def as_table(rows):
    "Returns a table with a row for each item of a dict of dicts"
    import pandas as pd
    return pd.DataFrame(rows).T


def ran_on(o, on='cpu'):
    "Returns the machine and the date of these figures"
    machine = o['machine']
    parts = [
        machine['cpu'] if on == 'cpu' else machine['device'],
        machine['system'],
        f"Python {machine['python']}",
        f"torch {machine['packages']['torch']}",
        machine['date']]
    return f"{', '.join(parts)}; rounds: {o['rounds']}"


# Contestants: times and counts of a micro-batch

def plain_time(results): return results['time']['plain']['1']


def ratios(results, case, k):
    "Returns the time per micro-batch as a ratio to the plain Learner, one a round"
    base = plain_time(results)
    if case == 'plain': return divided(base, base)
    return divided(results['time'][case][str(k)], base)


def counted(results, case, name, k=8): return results['counts'][case][str(k)][name]


def row_of_case(results, case):
    row = {}
    if 'time' in results:
        for k in 1, 8, 64: row[f'time, K={k}'] = spread(ratios(results, case, k))
    columns = {'host syncs': 'syncs', 'operations': 'ops', 'Python calls': 'calls', 'bytes kept': 'kept'}
    for title, name in columns.items():
        row[title] = f'{counted(results, case, name):.5g}'
    return row


def table(results):
    "Returns a row for each contestant: times, then counts per micro-batch at 8 micro-batches a window"
    return as_table({labels[case]: row_of_case(results, case) for case in results['counts']})


def run_on(results):
    "Returns the machine, the versions, and how much one and the same Learner differs from round to round"
    machine = results['machine']
    parts = [
        machine['cpu'],
        f"{machine['cores']} cores",
        machine['system'],
        f"Python {machine['python']}",
        machine['date']]
    packages = [f'{name} {version}' for name, version in machine['packages'].items()]
    time = spread(plain_time(results), 0)
    return '\n'.join([
        ', '.join(parts),
        ', '.join(packages),
        f"rounds: {results['rounds']}; the Learner without accumulation took {time} us per loader batch"])


# Costs with two optimizers

cost_labels = dict(
    windows='GradientAccumulation',
    split='with micro_batch_size',
    schedule='GradientAccumulationSchedule',
    checkpointing='ActivationCheckpointing, all fits')
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


def costs_in_words(results):
    "Returns what the first windows of a fit take"
    first = results['costs']['first']
    lines = []
    for kind, calls in first.items():
        lines.append(f"{cost_labels[kind]}: in the first 16 windows, in which the loss is checked, {calls:.2f} of the "
                     "calls of the plain Learner")
    return '\n'.join(lines)


# Whole fits

fit_models = dict(
    linear='three linear layers',
    tabular="fastai's tabular learner",
    resnet34='resnet34, images of 32x32 pixels')
fit_sizes = 1, 8  # loader batches in a window


def fit_ratios(results, model, k):
    "Returns the time of a fit as a ratio to the plain Learner, one a round"
    times = results['fits']['models'][model]['times']
    return divided(times[str(k)], times['plain'])


def fits_table(results):
    rows = {}
    for model, label in fit_models.items():
        rows[label] = {f'K={k}': spread(fit_ratios(results, model, k)) for k in fit_sizes}
    return as_table(rows)


# The runs of the demo over ten seeds

def mean_and_deviation(values, unit):
    return f'{mean(values):{unit}} \u00b1 {stdev(values):{unit}}'


def growing_table(results):
    "Returns optimizer steps, accuracy and validation loss of each run, with the standard deviation over the seeds"
    rows = {}
    for name, o in results['growing']['runs'].items():
        rows[name] = {
            'optimizer steps': str(o['steps'][0]),
            'accuracy': mean_and_deviation(o['accuracy'], '.1%'),
            'validation loss': mean_and_deviation(o['loss'], '.3f')}
    return as_table(rows)


# fastai's learners

learner_names = 'resnet34', 'convnext', 'unet', 'text', 'language', 'tabular', 'contrastive'
learner_kinds = dict(checkpointing='as needed', all_blocks='all blocks', offloaded='offloaded', split='quarters')


def memory_of(o, kind): return o['live'][kind]/o['live']['whole']
def time_of(o, kind): return median(divided(o['time'][kind], o['time']['whole']))


def learners_table(results, on='cpu'):
    "Returns memory and time of a step of fastai's learners, relative to the whole batch"
    rows = {}
    for name, o in results['learners'][on]['models'].items():
        rows[name] = {}
        for kind, label in learner_kinds.items():
            memory = memory_of(o, kind)
            time = time_of(o, kind)
            rows[name][label] = f'{memory:.0%}, {time:.2f}x'
    return as_table(rows)


def learners_lines(results):
    "Returns the tables of all devices"
    parts = []
    for on in results['learners']:
        table = learners_table(results, on).to_string()
        parts.append(f'{learners_run_on(results, on)}\n{table}')
    return '\n\n'.join(parts)


def learners_in_words(results):
    "Returns the range over fastai's learners of what each kind of training needs"
    models = results['learners']['cpu']['models'].values()
    lines = []
    for kind, label in learner_kinds.items():
        memory = sorted(memory_of(o, kind) for o in models)
        time = sorted(time_of(o, kind) for o in models)
        of_memory = f'{memory[0]:.0%} to {memory[-1]:.0%}'
        of_time = f'{time[0]:.1f}x to {time[-1]:.1f}x'
        lines.append(f'{label:<10}  {of_memory}, {of_time}')
    return '\n'.join(lines)


def learners_run_on(results, on='cpu'): return ran_on(results['learners'][on], on)


# ActivationCheckpointing with less and less room

way_models = 'resnet34', 'vit', 'unet'
way_labels = {
    '0.9': '90% of the activations',
    '0.75': '75%',
    '0.5': '50%',
    'blocks': 'all blocks'}


def ways_table(results):
    """Returns the time of a step with ActivationCheckpointing as a ratio to the whole batch, with room for a share of
    its activations; beside all blocks recomputed"""
    rows = {}
    for model, o in results['ways']['models'].items():
        times = o['times']
        rows[model] = {}
        for kind, label in way_labels.items():
            time = median(divided(times[kind], times['whole']))
            rows[model][label] = f'{time:.2f}'
    return as_table(rows)


def ways_in_words(results):
    "Returns what finding the blocks takes"
    failed = []
    for o in results['ways']['models'].values(): failed += o['failed'].values()
    return f'until the number of blocks was settled, {min(failed)} to {max(failed)} passes ran out of memory'


# Texts of many lengths

length_labels = dict(
    whole='whole batches, memory for all',
    auto="micro_batch_size='auto'",
    checkpointing='ActivationCheckpointing',
    fixed='micro_batch_size=8')


def lengths_table(results):
    "Returns passes and time of an epoch"
    o = results['lengths']
    rows = {}
    for kind, label in length_labels.items():
        rows[label] = {
            'passes, first epoch': o['first'][kind],
            'passes, later': o['passes'][kind],
            'time': spread(divided(o['times'][kind], o['times']['whole']))}
    return as_table(rows)


# Other callbacks

contestants = dict(ours='GradientAccumulation', fastai="fastai's", fastxtend="fastxtend's", own='20 lines of your own')
comparison_labels = dict(  # and the format of the figures
    whole=('largest weight difference, full windows', '.0e'),
    ragged=('largest weight difference, incomplete last window', '.0e'),
    padded=('gradient error, padded texts', '.0%'),
    ones=('mean of 512 bfloat16 gradients of 1', 'g'),
    syncs=('syncs per step, two processes', 'g'),
    entries=("entries of a custom logger in 15 steps", 'g'))


class Markdown(str):
    "Text that a notebook shows as Markdown"
    def _repr_markdown_(self): return str(self)


def comparison_table(results):
    "Returns what `comparison.py` has found: a row for each figure, and a column for each callback, in Markdown"
    found = results['comparison']['callbacks']
    rows = [
        ['', *[contestants[name] for name in found]],
        ['---' for _ in range(len(found)+1)]]
    for name, (label, form) in comparison_labels.items():
        rows.append([label, *[format(o[name], form) for o in found.values()]])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return Markdown('\n'.join(lines))


# What single measurements say

def shares(results):
    "Returns the percent of a backward pass that the division at the end of a window takes, by number of parameters"
    res = {}
    for n, o in results['division'].items():
        res[int(n)] = [100*share for share in divided(o['division'], o['backward'])]
    return res


def split_cost(results):
    "Returns the time of a micro-batch that is split from a loader batch, as a ratio to one that is a loader batch"
    return divided(results['loading']['128'], results['loading']['16'])


def cache_times(results):
    """Returns the time of GradientCache as a ratio to accumulation of the same micro-batches, one a round, by number of
    parameters"""
    res = {}
    for n, times in results['stack'].items():
        res[int(n)] = divided(times['ours_cache'], times['ours_split'])
    return res


def cache_memory(results):
    "Returns the peak memory of GradientCache as a ratio to accumulation of the same micro-batches, at most"
    memory = results['memory']
    return max(divided(memory['ours_cache'].values(), memory['ours_split'].values()))


def cache_costs(results):
    "In words"
    lines = []
    for n, times in cache_times(results).items():
        lines.append(f'{n:9,} parameters: {spread(times)} of the time of accumulation')
    memory = cache_memory(results)
    lines.append(f'peak memory: at most {memory:.2f} of the peak of accumulation')
    return '\n'.join(lines)


def memory_saved(results):
    "Returns the two ends of the curves, in words"
    sizes = [*results['memory']['plain']]
    whole = [*results['memory']['plain'].values()]
    accumulated = [*results['memory']['ours'].values()]
    as_one = f'{whole[0]:.0f} to {whole[-1]:.0f} MB as one batch'
    in_parts = f'{accumulated[0]:.0f} to {accumulated[-1]:.0f} MB accumulated'
    return f'from {sizes[0]} to {sizes[-1]} samples: {as_one}, {in_parts}'


# Goals: whether each is met, and a text with the figure

def at_most(limit, value, what):
    "Returns the goal that a value is at most `limit`"
    return value <= limit, f'{what} at most {limit:.3g}: {value:.3f}'


def counted_goals(results):
    syncs_of_one = counted(results, 'ours', 'syncs', 1)
    syncs = counted(results, 'ours', 'syncs')
    syncs_of_split = counted(results, 'ours_split', 'syncs')
    params = counted(results, 'ours', 'parameters')
    kept = counted(results, 'ours', 'kept')-counted(results, 'plain', 'kept')
    split = counted(results, 'ours_split', 'calls')/counted(results, 'ours', 'calls')
    return [
        at_most(1, syncs_of_one, 'K=1: host syncs per micro-batch'),
        at_most(1/8, syncs, 'K=8: host syncs per micro-batch'),
        at_most(1/8, syncs_of_split, 'K=8: host syncs per micro-batch that is split from a loader batch'),
        at_most(.9, split, 'Python calls of a micro-batch split from a loader batch, relative to a loader batch,'),
        (kept < params, f'no buffer of the size of the parameters, {params} bytes: {kept:+} bytes kept')]


def cost_goals(results):
    res = []
    limits = {1: .43, 8: .28}
    for opt, cells in results['costs']['by_opt'].items():
        for k, most in limits.items():
            calls = cells[f'windows {k}']['calls']
            res.append(at_most(most, calls, f"K={k}: calls relative to the plain Learner with {optimizers[opt]}"))
    for kind, calls in results['costs']['first'].items():
        what = f'{cost_labels[kind]}: calls in the first 16 windows relative to the plain Learner'
        res.append(at_most(.43, calls, what))
    return res


def fit_goals(results):
    res = []
    for model, label in fit_models.items():
        for k in fit_sizes:
            time = median(fit_ratios(results, model, k))
            res.append(at_most(1, time, f'K={k}: time of a fit relative to the plain Learner, {label},'))
    return res


def timed_goals(results):
    one = median(ratios(results, 'ours', 1))
    eight = median(ratios(results, 'ours', 8))
    flat = median(divided(results['windows']['1024'], results['windows']['64']))
    split = median(split_cost(results))
    times = cache_times(results)
    cache = median(times[max(times)])
    share = max(median(values) for n, values in shares(results).items() if n >= 1e6)
    return [
        at_most(1, one, 'K=1: time relative to the Learner without accumulation'),
        at_most(.6, eight, 'K=8: time relative to the Learner without accumulation'),
        at_most(1.05, flat, 'time per micro-batch at K=1024, relative to K=64,'),
        at_most(1, split, 'time of a micro-batch split from a loader batch, relative to a loader batch,'),
        at_most(1.4, cache, 'time of GradientCache where models compute, relative to accumulation,'),
        at_most(1.05, cache_memory(results), 'peak memory of GradientCache, relative to accumulation,'),
        at_most(2, share, 'percent of a backward pass that the division takes from a million parameters on')]


def goals(results):
    "Returns a line for each goal of which there are figures"
    res = counted_goals(results)
    if 'costs' in results: res += cost_goals(results)
    if 'fits' in results: res += fit_goals(results)
    if 'time' in results: res += timed_goals(results)
    lines = []
    for is_met, text in res:
        verdict = 'met' if is_met else 'NOT MET'
        lines.append(f'{verdict:<7} {text}')
    return '\n'.join(lines)


# Pictures

def axes(**kwargs):
    from matplotlib import pyplot as plt
    fig, ax = plt.subplots(figsize=(5.2, 3.4), layout='constrained')
    ax.set(**kwargs)
    return fig, ax


def cost_picture(results):
    "Ratio to the plain Learner, with the range over the rounds"
    fig, ax = axes(xlabel='time per loader batch / that of the plain Learner')
    others = [case for case in labels if case != 'plain']
    for j, (k, marker) in enumerate({1: 'o', 8: 's', 64: '^'}.items()):
        for i, case in enumerate(others):
            values = ratios(results, case, k)
            color = colors.get(case, gray)
            y = i+.22*(j-1)
            ax.plot([min(values), max(values)], [y, y], color=color, lw=1)
            ax.plot(median(values), y, marker, color=color, ms=5)
        ax.plot([], [], marker, color='black', ms=5, label=f'K = {k}')
    ax.axvline(1, color=gray, lw=1, ls=':')
    ax.set_yticks(range(len(others)), [labels[case] for case in others])
    ax.invert_yaxis()
    fig.legend(loc='outside upper right', ncols=3)
    return fig


def band(ax, by_x, **kwargs):
    "Medians, and the range over the rounds"
    xs = sorted(by_x)
    low = [min(by_x[x]) for x in xs]
    high = [max(by_x[x]) for x in xs]
    middle = [median(by_x[x]) for x in xs]
    ax.fill_between(xs, low, high, color=blue, alpha=.2, lw=0)
    ax.plot(xs, middle, 'o-', color=blue, ms=4, **kwargs)


def windows_picture(results):
    "Cost against micro-batches in a window"
    fig, ax = axes(xlabel='loader batches in a window, K', ylabel='time per loader batch (us)', xscale='log')
    band(ax, {int(k): values for k, values in results['windows'].items()}, label='GradientAccumulation')
    ax.axhline(median(plain_time(results)), color=gray, ls='--', label='Learner, a step every loader batch')
    ax.set_xscale('log', base=2)
    ax.set_ylim(0)
    ax.legend(loc='lower left')
    return fig


def division_picture(results):
    "Cost against parameters"
    fig, ax = axes(xlabel='parameters', ylabel='division / one backward pass (%)', xscale='log', yscale='log')
    band(ax, shares(results), label='division at the end of a window')
    ax.axhline(2, color=gray, ls='--', label='2%')
    ticks = .1, .2, .5, 1, 2, 5, 10
    ax.set_yticks(ticks, [f'{o:g}' for o in ticks])
    ax.minorticks_off()
    ax.legend()
    return fig


def memory_picture(results):
    "Peak memory against the effective batch"
    fig, ax = axes(xlabel='effective batch (samples)', ylabel='peak memory of training (MB)')
    lines = dict(
        plain=(gold, 'one batch'),
        ours=(blue, 'accumulated, 16 samples at a time'),
        ours_cache=(green, 'GradientCache, micro-batches of 16'))
    for case, (color, label) in lines.items():
        peaks = results['memory'][case]
        ax.plot([int(size) for size in peaks], peaks.values(), 'o-', color=color, ms=4, label=label)
    ax.set_ylim(0)
    ax.legend()
    return fig


pictures = dict(cost=cost_picture, windows=windows_picture, division=division_picture, memory=memory_picture)
