"What the figures of `batch_size.json` say: tables and pictures for the page \"Find the batch size\""
import math
from statistics import geometric_mean, mean, median, stdev

titles = dict(digits='digits', text='docstrings')

def tolerances(results):
    "What `bs_find` would have said with other tolerances"
    import pandas as pd
    from fastxtend_accum.bs_find import critical_size
    rows = []
    for name,o in results.items():
        for point in o['predicted'][0]:
            said = [{int(k):v for k,v in run[point]['losses'].items()} for run in o['predicted']]
            rows.append({'task':titles[name], 'from epoch':point} | {f'{t:.0%}':', '.join(str(critical_size(losses, t)) for losses in said) for t in (.01, .02, .05)})
    return pd.DataFrame(rows)

def error(values): return stdev(values)/len(values)**.5

def ratios(case):
    "The fewest epochs that a batch size needs on average, and how many times as many each needs; more than 4 times counts as 4"
    epochs = {int(bs):math.inf if None in o['samples'] else mean(o['samples'])/case['epoch'] for bs,o in case['sizes'].items()}
    least = min(epochs.values())
    return least,{bs:min(o/least, 4) for bs,o in epochs.items()}

def size_at(case, times):
    "The batch size that needs `times` as many samples as the best one, between two measured sizes by the logarithm; inf beyond the last"
    _,needed = ratios(case)
    best = min(needed, key=needed.get)
    (a,low),*rest = [(bs, o) for bs,o in needed.items() if bs >= best]
    for b,high in rest:
        if high > times: return a*(b/a)**((times-low)/(high-low))
        a,low = b,high
    return math.inf

def cases(results, rate):
    "Each task with each of its targets, at the best learning rates or those of the rule, and what was predicted where the runs to that target start"
    for name,o in results.items():
        for case in o['needed']:
            if case['rate'] == rate: yield titles[name],case,[p[str(case['point'])] for p in o['predicted']]

def where(name, case): return {'task':name, 'from epoch':case['point'], 'to loss':f"{case['target']:.3g}"}

def needed_table(results, rate='best'):
    "One row a target: the fewest epochs that a batch size needs, and how many times as many each needs"
    import pandas as pd
    rows = []
    for name,case,_ in cases(results, rate):
        least,times = ratios(case)
        rows.append(where(name, case) | {'epochs':f'{least:.2f}'} | {str(bs):f'{times[bs]:.2f}' if bs in times else '' for bs in (16, 32, 64, 128, 256, 512)})
    return pd.DataFrame(rows)

def off(said, true): return f'{geometric_mean(said)/true:.1f}'

def predicted_table(results):
    "What `bs_find` found in three runs, beside the size that needs 1.25 times as many samples as the best one"
    import pandas as pd
    rows = []
    for (name,best,said),(_,rule,_) in zip(cases(results, 'best'), cases(results, 'rule')):
        found,(by_rule,at_best) = [o['bs_find'] for o in said],(size_at(o, 1.25) for o in (rule, best))
        rows.append(where(name, best) | {'bs_find':', '.join(map(str, found)), "measured, the rule's rates":f'{by_rule:.0f}', 'factor':off(found, by_rule),
                                         'measured, best rates':f'{at_best:.0f}', 'factor ':off(found, at_best)})
    return pd.DataFrame(rows)

def noise_table(results):
    "The noise scale in three runs, beside the size that needs twice as many samples as the best one"
    import pandas as pd
    rows = []
    for name,case,said in cases(results, 'best'):
        noise,twice = [o['noise_scale'] for o in said],size_at(case, 2)
        rows.append(where(name, case) | {'noise scale':', '.join(f'{o:.0f}' for o in noise), 'measured':f'{twice:.0f}', 'factor':off(noise, twice)})
    return pd.DataFrame(rows)

def cost(results):
    "Of one bs_find, in epochs of training"
    lines = []
    for name,o in results.items():
        epochs = [p['epochs'] for run in o['predicted'] for p in run.values()]
        lines.append(f'{titles[name]}: a bs_find trained for {min(epochs):g} to {max(epochs):g} epochs, {median(epochs):g} in the median')
    return '\n'.join(lines)

def compared_table(results):
    "Validation loss and optimizer steps of the fits, five seeds each"
    import pandas as pd
    rows = []
    for name,o in results.items():
        found = o['compared']
        steps = ' → '.join(map(str, found['steps'].values()))
        fits = {**{f'batch of {bs}':fit for bs,fit in found['constant'].items()}, f'bs_schedule, {steps}':found['schedule'],
                'adaptive, 32 to 256':found['adaptive']}
        for label,fit in fits.items():
            losses,n = [r['loss'] for r in fit['runs']],[r['steps'] for r in fit['runs']]
            rows.append({'task':titles[name], 'batch':label, 'learning rate':f"{fit['lr']:.3g}", 'optimizer steps':f'{median(n):g}',
                         'validation loss':f'{mean(losses):.3f} ± {error(losses):.3f}'})
    return pd.DataFrame(rows)

def panels():
    from matplotlib import pyplot as plt
    return plt.subplots(2, 1, figsize=(5, 6.4), layout='constrained')

def needed_picture(results):
    "Samples against the batch size, one line a target"
    fig,axs = panels()
    colors = '#56B4E9','#0072B2','#E69F00','#009E73'
    for ax,(name,o) in zip(axs, results.items()):
        for color,case in zip(colors, (case for case in o['needed'] if case['rate'] == 'best')):
            least,times = ratios(case)
            times = {bs:o for bs,o in times.items() if o < 4}
            errors = [error(case['sizes'][str(bs)]['samples'])/case['epoch']/least for bs in times]
            ax.errorbar(list(times), list(times.values()), errors, color=color, marker='o', ms=4, capsize=3,
                        label=f"from epoch {case['point']} to loss {case['target']:.3g}")
        for times in 1.25,2: ax.axhline(times, color='#999999', lw=1, ls=':')
        ax.set(title=titles[name], ylabel='samples / least', ylim=(0.8, 4))
        log_sizes(ax)
        ax.legend()
    axs[1].set_xlabel('batch size (samples)')
    return fig

def log_sizes(ax):
    ax.set_xscale('log', base=2)
    ax.set_xticks([16, 32, 64, 128, 256, 512], [16, 32, 64, 128, 256, 512])

def compared_picture(results):
    "Validation loss against optimizer steps"
    fig,axs = panels()
    for ax,(name,o) in zip(axs, results.items()):
        found = o['compared']
        groups = ('constant batch, 256 to 16', '#999999', '-', found['constant'].values()),('bs_schedule', '#0072B2', '', [found['schedule']]),('adaptive', '#E69F00', '', [found['adaptive']])
        for label,color,ls,fits in groups:
            losses = [[r['loss'] for r in fit['runs']] for fit in fits]
            steps = [median(r['steps'] for r in fit['runs']) for fit in fits]
            ax.errorbar(steps, list(map(mean, losses)), list(map(error, losses)), color=color, ls=ls, marker='o', capsize=3, label=label)
        ax.set_xscale('log')
        ax.set_xticks([100, 200, 400, 800, 1600], [100, 200, 400, 800, 1600])
        ax.minorticks_off()
        ax.set(title=titles[name], ylabel='validation loss')
        ax.legend()
    axs[1].set_xlabel('optimizer steps')
    return fig
