"""`python -m benchmarks` measures everything, prints a table and the goals, writes `results.json` and the pictures.

About 45 minutes on two cores, on which nothing else should run. `--quick` only counts, and writes nothing: what CI can
do. The options `--fits`, `--growing`, `--costs`, `--learners`, `--ways`, `--lengths` and `--comparison` each measure a
part alone, and leave the rest of `results.json` as it is."""
import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from . import report  # without torch, since the peak memory of a process begins with that of its parent

here = Path(__file__).parent
packages = 'torch', 'fastai', 'fastxtend', 'lightning', 'accelerate'
other_packages = 'fastxtend', 'lightning', 'accelerate'  # each is a contestant
stack_sizes = 10**4, 10**5, 10**6
division_sizes = 10**4, 10**5, 10**6, 10**7, 10**8
batch_sizes = 16, 32, 64, 128, 256

parts = dict(
    fits='the time of whole fits',
    growing='the runs of the demo over ten seeds',
    costs='what the callbacks add, with two optimizers',
    learners="fastai's learners",
    ways='ActivationCheckpointing with less and less room',
    lengths='texts of many lengths',
    comparison='how far other callbacks are from the large batch')
models_of_part = dict(
    fits=report.fit_models,
    ways=report.way_models,
    learners=report.learner_names)


# Processes

def measure(*args):
    "Returns what a measurement in a process of its own prints"
    args = [str(o) for o in args]
    env = dict(os.environ)
    if args[0] == 'memory': env['MALLOC_MMAP_THRESHOLD_'] = '65536'  # no holes in the heap
    command = [sys.executable, '-m', 'benchmarks.measure', *args]
    run = subprocess.run(command, capture_output=True, text=True, cwd=here.parent, env=env)
    if run.returncode:
        error = run.stderr[-3000:]
        sys.exit(f"python -m benchmarks.measure {' '.join(args)} failed:\n{error}")
    return json.loads(run.stdout.splitlines()[-1])


def note_progress(text): print(text, file=sys.stderr)


def is_installed(name):
    try: version(name)
    except PackageNotFoundError: return False
    return True


def check_installed(*names):
    missing = [name for name in names if not is_installed(name)]
    if missing: sys.exit(f"not installed: {', '.join(missing)}; pip install -e '.[bench]'")


def machine():
    "Returns what it was run on"
    info = Path('/proc/cpuinfo')
    lines = info.read_text().splitlines() if info.exists() else []
    names = [o.split(':')[1].strip() for o in lines if o.startswith('model name')]
    return dict(
        cpu=names[0] if names else platform.processor(),
        cores=len(names),
        python=platform.python_version(),
        system=platform.system(),
        date=str(date.today()),
        packages={name: version(name) for name in packages if is_installed(name)})


# Parts, each with the machine, since it may be measured without the rest

def measure_models(part, rounds):
    res = {}
    for model in models_of_part[part]:
        note_progress(f'{part}: {model}')
        res[model] = measure(part, model, rounds)
    return res


def measure_learners(rounds, on):
    "`on` holds the figures of another device, which stay"
    device = measure('device', '-')
    figures = dict(machine=machine() | device, rounds=rounds, models=measure_models('learners', rounds))
    return on | {device['kind']: figures}


def measure_part(part, rounds, before=None):
    "Returns the figures of a part; `before` are those that there were"
    if part == 'learners': return measure_learners(rounds, before or {})
    if part == 'comparison': return dict(machine=machine(), callbacks=measure('comparison', '-'))
    if part == 'growing': return dict(machine=machine(), **measure('growing', '-'))
    if part in models_of_part: return dict(machine=machine(), rounds=rounds, models=measure_models(part, rounds))
    note_progress(part)
    return dict(machine=machine(), rounds=rounds, **measure(part, '-', rounds))


def describe_part(part, results):
    if part == 'learners': return report.learners_lines(results)
    if part == 'comparison': return report.comparison_table(results)
    text = getattr(report, f'{part}_table')(results).to_string()
    if part == 'ways': text += f'\n\n{report.ways_in_words(results)}'
    if part == 'costs': text += f'\n\n{report.costs_in_words(results)}'
    return text


# All

def gather(into, new):
    "Adds the figures of a round to the lists of those before"
    for key, value in new.items(): into.setdefault(str(key), []).append(value)


def division_sizes_of_round(i):
    "Returns the numbers of parameters to measure: models are large, so the largest has one round, and the rest three"
    if i == 0: return division_sizes
    return division_sizes[:-1] if i < 3 else ()


def measure_times(rounds):
    "Times every case once, then every case again"
    time = {case: {} for case in report.labels}
    stack = {str(n): {} for n in stack_sizes}
    windows = {}
    loading = {}
    division = {}
    for i in range(rounds):
        note_progress(f'round {i+1} of {rounds}')
        for case in report.labels:
            gather(time[case], measure('time', case))
        gather(windows, measure('windows', 'ours'))
        for bs in 16, 128:
            gather(loading, {bs: measure('loading', 'ours', bs)})
        for n in stack_sizes:
            for case in 'ours', 'ours_split', 'ours_cache':
                gather(stack[str(n)], {case: measure('stack', case, n)})
        for n in division_sizes_of_round(i):
            gather(division.setdefault(str(n), {}), measure('division', 'ours', n))
    return dict(time=time, windows=windows, stack=stack, loading=loading, division=division)


def measure_memory():
    res = {}
    for case in 'plain', 'ours', 'ours_split', 'ours_cache':
        res[case] = {str(n): measure('memory', case, n)['megabytes'] for n in batch_sizes}
    return res


def count_cases(cases): return {case: measure('counts', case) for case in cases}


def measure_all(rounds):
    results = dict(machine=machine(), rounds=rounds, counts=count_cases(report.labels))
    results.update(measure_times(rounds))
    results['memory'] = measure_memory()
    for part in parts: results[part] = measure_part(part, rounds)
    return results


# The command

def parse_args():
    parser = argparse.ArgumentParser('python -m benchmarks', description=__doc__)
    parser.add_argument('--quick', action='store_true', help='only count, and only what needs no other framework')
    parser.add_argument('--rounds', type=int, default=7, help='how often everything is timed')
    for part, what in parts.items():
        parser.add_argument(f'--{part}', action='store_true', help=f'measure only {what}')
    return parser.parse_args()


def count_quickly():
    "Counts what needs no other framework, and prints it"
    results = dict(counts=count_cases(case for case in report.labels if case not in other_packages))
    print(report.table(results).to_string(), report.goals(results), sep='\n\n')


def write(results): (here/'results.json').write_text(json.dumps(results, indent=1)+'\n')


def run_part(part, rounds):
    "Measures a part, writes it beside the rest, and prints it"
    if part == 'comparison': check_installed('fastxtend')
    results = json.loads((here/'results.json').read_text())
    results[part] = measure_part(part, rounds, results.get(part))
    write(results)
    print(describe_part(part, results))


def run_all(rounds):
    check_installed(*packages)
    results = measure_all(rounds)
    write(results)
    for name, picture in report.pictures.items():
        picture(results).savefig(here/f'{name}.png', dpi=110)
    print(report.table(results).to_string(), report.goals(results), report.learners_lines(results), sep='\n\n')


def main():
    args = parse_args()
    chosen = [part for part in parts if getattr(args, part)]
    if args.quick: count_quickly()
    elif chosen:
        for part in chosen: run_part(part, args.rounds)
    else: run_all(args.rounds)


if __name__ == '__main__': main()
