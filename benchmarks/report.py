"What the figures of `results.json` say: a table, the goals, and the pictures"
from statistics import median

labels = dict(plain='Learner, no accumulation', ours='GradientAccumulation', ours_split='with micro_batch_size',
              ours_cache='GradientCache', ours_schedule='GradientAccumulationSchedule',
              fastai="fastai's GradientAccumulation", fastxtend="fastxtend's GradientAccumulation",
              lightning='Lightning', accelerate='Accelerate', by_hand='loop by hand')
colors = dict(ours='#0072B2', ours_split='#0072B2', ours_cache='#56B4E9', ours_schedule='#009E73', fastai='#E69F00',
              fastxtend='#D55E00')  # all others grey

def ratios(results, case, k):
    "Time per micro-batch as a ratio to the plain Learner of the same round, one a round"
    base = results['time']['plain']['1']
    return [a/b for a,b in zip(results['time'][case].get(str(k), base), base)]

def pure_cost(results, case):
    "Microseconds beyond the plain Learner of the same round where a window is one micro-batch, one a round"
    return [a-b for a,b in zip(results['time'][case]['1'], results['time']['plain']['1'])]

def spread(values, digits=2): return f'{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})'

def counted(results, case, name, k=8): return results['counts'][case][str(k)][name]

def shares(results):
    "Percent of a backward pass that the division at the end of a window takes, by number of parameters; one a round"
    return {int(n):[100*a/b for a,b in zip(o['division'], o['backward'])] for n,o in results['division'].items()}

def split_cost(results):
    """Time of a micro-batch that is split from a loader batch, as a ratio to one that is a loader batch; one a round"""
    return [a/b for a,b in zip(results['loading']['128'], results['loading']['16'])]

def split_costs(results): return f'{spread(split_cost(results))} of the time of a micro-batch from the DataLoader'

def cache_cost(results):
    """Time of GradientCache as a ratio to accumulation of the same micro-batches by number of parameters, one a round,
    and its peak memory likewise"""
    times = {int(n):[a/b for a,b in zip(o['ours_cache'], o['ours_split'])] for n,o in results['stack'].items()}
    return times,max(a/b for a,b in zip(*(results['memory'][o].values() for o in ('ours_cache', 'ours_split'))))

def cache_costs(results):
    "In words"
    times,memory = cache_cost(results)
    lines = [f'{n:9,} parameters: {spread(o)} of the time of accumulation' for n,o in times.items()]
    return '\n'.join([*lines, f'peak memory: at most {memory:.2f} of the peak of accumulation'])

def run_on(results):
    "The machine, the versions, and how much one and the same Learner differs from round to round"
    m,base = results['machine'],results['time']['plain']['1']
    packages = ', '.join(f'{k} {v}' for k,v in m['packages'].items())
    return (f"{m['cpu']}, {m['cores']} cores, {m['system']}, Python {m['python']}, {m['date']}\n{packages}\n"
            f"rounds: {results['rounds']}; the Learner without accumulation took {spread(base, 0)} us per loader batch")

learner_names = 'resnet34','convnext','unet','text','language','tabular','contrastive'
learner_kinds = dict(checkpointing='as needed', all_blocks='all blocks', offloaded='offloaded', split='quarters')

def ratio(o, kind): return median(a/b for a,b in zip(o['time'][kind], o['time']['whole']))

def needs(o, kind):
    "Memory and time of a kind of training, relative to the whole batch"
    return f"{o['live'][kind]/o['live']['whole']:.0%}, {ratio(o, kind):.2f}x"

def learners_table(results, kinds=(*learner_kinds,), on='cpu'):
    "Memory and time of a step of fastai's learners, relative to the whole batch"
    import pandas as pd
    models = results['learners'][on]['models']
    return pd.DataFrame({name:{learner_kinds[k]:needs(o, k) for k in kinds} for name,o in models.items()}).T

def learners_lines(results):
    "The tables of all devices"
    tables = {on:learners_table(results, on=on).to_string() for on in results['learners']}
    return '\n\n'.join(f'{learners_run_on(results, on)}\n{o}' for on,o in tables.items())

def learners_in_words(results):
    "The range over fastai's learners of what each kind of training needs"
    models = results['learners']['cpu']['models'].values()
    def line(kind):
        live,time = [o['live'][kind]/o['live']['whole'] for o in models],[ratio(o, kind) for o in models]
        return f'{learner_kinds[kind]:<10}  {min(live):.0%} to {max(live):.0%}, {min(time):.1f}x to {max(time):.1f}x'
    return '\n'.join(map(line, learner_kinds))

def learners_off(results):
    "How far the gradient is off with ActivationCheckpointing, at most, and in quarters"
    models = [o for on in results['learners'].values() for o in on['models'].values()]
    blocks,split = ([o['off'][kind] for o in models] for kind in ('checkpointing', 'split'))
    same = f'off by {max(blocks):.0e} at most' if any(blocks) else 'that of the whole batch, bit for bit'
    quarters = f'in quarters of the batch, it is off by {min(split):.0%} to {max(split):.0%}'
    return f'with ActivationCheckpointing, the gradient is {same}; {quarters}'

def learners_run_on(results, on='cpu'): return ran_on(results['learners'][on], on)
def ways_run_on(results): return ran_on(results['ways'])

def ran_on(o, on='cpu'):
    "The machine of these figures"
    m = o['machine']
    device,torch = m['cpu'] if on == 'cpu' else m['device'],m['packages']['torch']
    return f"{device}, {m['system']}, Python {m['python']}, torch {torch}, {m['date']}; rounds: {o['rounds']}"

way_models = 'resnet34','vit','unet'

def ways_table(results):
    """Time of a step with ActivationCheckpointing as a ratio to the whole batch, with room for a share of its
    activations; beside all blocks recomputed"""
    import pandas as pd
    names = {'0.9':'90% of the activations', '0.75':'75%', '0.5':'50%', 'blocks':'all blocks'}
    def cell(times, k): return f"{median(a/b for a,b in zip(times[k], times['whole'])):.2f}"
    models = results['ways']['models']
    return pd.DataFrame({model:{name:cell(o['times'], k) for k,name in names.items()} for model,o in models.items()}).T

def ways_in_words(results):
    "What finding the blocks takes"
    failed = [n for o in results['ways']['models'].values() for n in o['failed'].values()]
    return f'until the number of blocks was settled, {min(failed)} to {max(failed)} passes ran out of memory'

def costs_run_on(results): return ran_on(results['costs'])
def lengths_run_on(results): return ran_on(results['lengths'])

cost_labels = dict(windows='GradientAccumulation', split='with micro_batch_size',
                   schedule='GradientAccumulationSchedule', checkpointing='ActivationCheckpointing, all fits')
optimizers = dict(sgd="torch's SGD", adam="fastai's Adam")

def costs_table(results):
    "Time and calls of a micro-batch as ratios to the plain Learner with the same optimizer"
    import pandas as pd
    rows = {}
    for opt,cells in results['costs']['by_opt'].items():
        base = cells['plain 1']['time']
        for cell,o in cells.items():
            kind,k = cell.split()
            if kind == 'plain': continue
            row = rows.setdefault(f'{cost_labels[kind]}, K={k}', {})
            row[f'{optimizers[opt]}, time'] = spread([a/b for a,b in zip(o['time'], base)])
            row['calls' if opt == 'sgd' else 'calls '] = f"{o['calls']:.2f}"
    return pd.DataFrame(rows).T

def costs_in_words(results):
    "What the first windows take beyond later ones"
    def line(kind, check, looks):
        return f'{cost_labels[kind]}: {check:.1f} for the check of the loss, {looks:.1f} for the looks'
    return '\n'.join(line(o, **results['costs']['first'][o]) for o in ('windows', 'split'))

def lengths_table(results):
    "Passes and time of an epoch of texts of many lengths"
    import pandas as pd
    o = results['lengths']
    names = dict(whole='whole batches, memory for all', auto="micro_batch_size='auto'",
                 checkpointing='ActivationCheckpointing', fixed='micro_batch_size=8')
    def row(k):
        time = spread([a/b for a,b in zip(o['times'][k], o['times']['whole'])])
        return {'passes, first epoch':o['first'][k], 'passes, later':o['passes'][k], 'time':time}
    return pd.DataFrame({name:row(k) for k,name in names.items()}).T

contestants = dict(ours='GradientAccumulation', fastai="fastai's", fastxtend="fastxtend's", own='20 lines of your own')
comparison_labels = dict(whole=('weights off, whole windows', '.0e'), ragged=('weights off, ragged epochs', '.0e'),
                         padded=('gradient off, padded texts', '.0%'),
                         ones=('mean of 512 bfloat16 gradients of 1', 'g'),
                         syncs=('syncs per step, two processes', 'g'),
                         entries=("entries of another's logger, 15 steps", 'g'))

class Markdown(str):
    "Text that a notebook shows as Markdown"
    def _repr_markdown_(self): return str(self)

def comparison_table(results):
    "What `comparison.py` has found: a row for each figure, and a column for each callback, in Markdown"
    found = results['comparison']['callbacks']
    rows = [['', *(contestants[o] for o in found)], ['---']*(len(found)+1)]
    rows += [[label, *(f'{o[k]:{form}}' for o in found.values())] for k,(label,form) in comparison_labels.items()]
    return Markdown('\n'.join(f"| {' | '.join(o)} |" for o in rows))

def memory_saved(results):
    "The two ends of the curves, in words"
    one,many = (results['memory'][o] for o in ('plain', 'ours'))
    first,last = min(map(int, one)),max(map(int, one))
    return (f"from {first} to {last} samples: {one[str(first)]:.0f} to {one[str(last)]:.0f} MB as one batch, "
            f"{many[str(first)]:.0f} to {many[str(last)]:.0f} MB accumulated")

def table(results, columns=slice(None)):
    "One row a contestant: times in columns 0 to 2, then counts per micro-batch at 8 micro-batches a window"
    import pandas as pd
    names = {'host syncs':'syncs', 'operations':'ops', 'Python calls':'calls', 'bytes kept':'kept'}
    rows = {}
    for case in results['counts']:
        row = {f'time, K={k}':spread(ratios(results, case, k)) for k in (1, 8, 64)} if 'time' in results else {}
        rows[labels[case]] = row | {title:f'{counted(results, case, name):.5g}' for title,name in names.items()}
    return pd.DataFrame(rows).T.iloc[:, columns]

def goals(results):
    "Each goal, whether it is met, and the figure"
    lines = [(n <= 1/k, f'host syncs per micro-batch at most 1/K: {n:.3f} at K={k}')
             for k in (1, 8) for n in [counted(results, 'ours', 'syncs', k)]]
    kept = counted(results, 'ours', 'kept')-counted(results, 'plain', 'kept')
    params = counted(results, 'ours', 'parameters')
    lines.append((kept < params, f'no buffer of the size of the parameters, {params} bytes: {kept:+} bytes kept'))
    split = counted(results, 'ours_split', 'calls')/counted(results, 'ours', 'calls')
    syncs = counted(results, 'ours_split', 'syncs')
    lines += [(split <= .86, 'Python calls of a micro-batch that is split from a loader batch at most .86 of those of '
                             f'one that is a loader batch: {split:.3f}'),
              (syncs <= counted(results, 'ours', 'syncs'), f'splitting adds no host sync: {syncs:.3f} at K=8')]
    if 'costs' in results:
        first = sum(results['costs']['first']['windows'].values())
        lines.append((first <= 3, "the check of the loss and the looks of a fit at most three windows' worth of calls "
                                  f'at K=8: {first:.1f}'))
    if 'time' in results: lines += timed_goals(results)
    return '\n'.join(f'{"met    " if met else "NOT MET"} {text}' for met,text in lines)

def timed_goals(results):
    ours,fastai = (median(pure_cost(results, o)) for o in ('ours', 'fastai'))
    eight = median(ratios(results, 'ours', 8))
    flat = median(a/b for a,b in zip(results['windows']['1024'], results['windows']['64']))
    share = max(median(v) for n,v in shares(results).items() if n >= 1e6)
    split,(cache,memory) = median(split_cost(results)),cache_cost(results)
    cache = median(cache[max(cache)])
    both = f'{ours:.0f} and {fastai:.0f} us'
    return [(ours <= fastai, f"cost at one micro-batch a window at or below that of fastai's callback: {both}"),
            (eight <= .9, f'at K=8 at or below .90 of the Learner without accumulation: {eight:.3f}'),
            (flat <= 1.05, f'cost per micro-batch flat, at K=1024 at most 1.05 of K=64: {flat:.3f}'),
            (split <= 1, f'a micro-batch split from a loader batch at or below one that is one: {split:.3f}'),
            (cache <= 1.4, f'GradientCache at most 1.40 of the time of accumulation where models compute: {cache:.3f}'),
            (memory <= 1.05, f'GradientCache at most 1.05 of the peak memory of accumulation: {memory:.3f}'),
            (share < 2, f'division under 2% of a backward pass from a million parameters on: {share:.2f}%')]

def axes(**kwargs):
    from matplotlib import pyplot as plt
    fig,ax = plt.subplots(figsize=(5.2, 3.4), layout='constrained')
    ax.set(**kwargs)
    return fig,ax

def cost_picture(results):
    "Ratio to the plain Learner, with the range over the rounds"
    fig,ax = axes(xlabel='time per loader batch / that of the plain Learner')
    others = [o for o in labels if o != 'plain']
    for j,(k,marker) in enumerate({1:'o', 8:'s', 64:'^'}.items()):
        for i,case in enumerate(others):
            values,color = ratios(results, case, k),colors.get(case, '#999999')
            y = i+.22*(j-1)
            ax.plot([min(values), max(values)], [y, y], color=color, lw=1)
            ax.plot(median(values), y, marker, color=color, ms=5)
        ax.plot([], [], marker, color='black', ms=5, label=f'K = {k}')
    ax.axvline(1, color='#999999', lw=1, ls=':')
    ax.set_yticks(range(len(others)), [labels[o] for o in others])
    ax.invert_yaxis()
    fig.legend(loc='outside upper right', ncols=3)
    return fig

def band(ax, by_x, **kwargs):
    "Medians, and the range over the rounds"
    xs = sorted(by_x)
    ax.fill_between(xs, [min(by_x[x]) for x in xs], [max(by_x[x]) for x in xs], color='#0072B2', alpha=.2, lw=0)
    ax.plot(xs, [median(by_x[x]) for x in xs], 'o-', color='#0072B2', ms=4, **kwargs)

def windows_picture(results):
    "Cost against micro-batches in a window"
    fig,ax = axes(xlabel='loader batches in a window, K', ylabel='time per loader batch (us)', xscale='log')
    band(ax, {int(k):v for k,v in results['windows'].items()}, label='GradientAccumulation')
    plain = median(results['time']['plain']['1'])
    ax.axhline(plain, color='#999999', ls='--', label='Learner, a step every loader batch')
    ax.set_xscale('log', base=2)
    ax.set_ylim(0)
    ax.legend(loc='lower left')
    return fig

def division_picture(results):
    "Cost against parameters"
    fig,ax = axes(xlabel='parameters', ylabel='division / one backward pass (%)', xscale='log', yscale='log')
    band(ax, shares(results), label='division at the end of a window')
    ax.axhline(2, color='#999999', ls='--', label='2%')
    ax.set_yticks([.1, .2, .5, 1, 2, 5, 10], ['0.1', '0.2', '0.5', '1', '2', '5', '10'])
    ax.minorticks_off()
    ax.legend()
    return fig

def memory_picture(results):
    "Peak memory against the effective batch"
    fig,ax = axes(xlabel='effective batch (samples)', ylabel='peak memory of training (MB)')
    lines = dict(plain=('#E69F00', 'one batch'), ours=('#0072B2', 'accumulated, 16 samples at a time'),
                 ours_cache=('#009E73', 'GradientCache, micro-batches of 16'))
    for case,(color,label) in lines.items():
        sizes,peaks = zip(*results['memory'][case].items())
        ax.plot([*map(int, sizes)], peaks, 'o-', color=color, ms=4, label=label)
    ax.set_ylim(0)
    ax.legend()
    return fig

pictures = dict(cost=cost_picture, windows=windows_picture, division=division_picture, memory=memory_picture)
