"""`python -m benchmarks` measures everything, prints a table and the goals, writes `results.json` and the pictures.

About 40 minutes on two cores, on which nothing else should run. `--quick` only counts, and writes nothing: what CI can
do. `--learners` measures only fastai's learners, on a GPU if there is one, `--ways` only what ActivationCheckpointing
costs, `--costs` only what the callbacks add with two optimizers, `--lengths` only texts of many lengths,
`--comparison` only what other callbacks give; these leave the rest of `results.json` as it is."""
import argparse, json, os, platform, subprocess, sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from . import report  # no torch in this process: the peak memory of a process begins with its parent's

here = Path(__file__).parent
packages = 'torch','fastai','fastxtend','lightning','accelerate'
stack_sizes = 10**4,10**5,10**6
division_sizes = 10**4,10**5,10**6,10**7,10**8
batch_sizes = 16,32,64,128,256

def measure(*args):
    "What a measurement in a process of its own prints"
    args = [*map(str, args)]
    env = os.environ | {'MALLOC_MMAP_THRESHOLD_':'65536'} if args[0] == 'memory' else None  # no holes in the heap
    out = subprocess.run([sys.executable, '-m', 'benchmarks.measure', *args], capture_output=True, text=True,
                         cwd=here.parent, env=env)
    if out.returncode: sys.exit(f"python -m benchmarks.measure {' '.join(args)} failed:\n{out.stderr[-3000:]}")
    return json.loads(out.stdout.splitlines()[-1])

def gather(into, new):
    "Add the figures of a round to the lists of those before"
    for k,v in new.items(): into.setdefault(str(k), []).append(v)

def missing(names=packages):
    "Those of the packages `names` that are not installed"
    def is_missing(name):
        try: version(name)
        except PackageNotFoundError: return True
    return [o for o in names if is_missing(o)]

def needs(*names):
    if missing(names): sys.exit(f"not installed: {', '.join(missing(names))}; pip install -e '.[bench]'")

def machine():
    "What it was run on"
    info = Path('/proc/cpuinfo')
    lines = info.read_text().splitlines() if info.exists() else []
    names = [o.split(':')[1].strip() for o in lines if o.startswith('model name')]
    return dict(cpu=names[0] if names else platform.processor(), cores=len(names), python=platform.python_version(),
                system=platform.system(), date=str(date.today()),
                packages={o:version(o) for o in packages if o not in missing()})

def learners(rounds, on):
    """What a step of each of fastai's learners needs; `on` holds the figures of another device, which stay. With the
    machine, since they may be measured without the rest"""
    device,res = measure('device', '-'),{}
    for o in report.learner_names:
        print(f"{o}, {device['device']}", file=sys.stderr)
        res[o] = measure('learners', o, rounds)
    return on | {device['kind']:dict(machine=machine() | device, rounds=rounds, models=res)}

def ways(rounds):
    """Times of a step with ActivationCheckpointing, and the passes that fail first; with the machine, since they may be
    measured without the rest"""
    return dict(machine=machine(), rounds=rounds, models={o:measure('ways', o, rounds) for o in report.way_models})

def comparison():
    "What other callbacks give; with the machine, since it may be measured without the rest"
    return dict(machine=machine(), callbacks=measure('comparison', '-'))

def part(kind, rounds):
    "All figures of a kind, from one process; with the machine, since they may be measured without the rest"
    return dict(machine=machine(), rounds=rounds, **measure(kind, '-', rounds))

def full(rounds):
    "All measurements, those of time in rounds: every case once, then every case again"
    results = dict(machine=machine(), rounds=rounds, counts={o:measure('counts', o) for o in report.labels},
                   time={o:{} for o in report.labels}, windows={}, stack={}, loading={}, division={},
                   memory={o:{} for o in ('plain', 'ours', 'ours_split', 'ours_cache')})
    for i in range(rounds):
        print(f'round {i+1} of {rounds}', file=sys.stderr)
        for case in report.labels: gather(results['time'][case], measure('time', case))
        gather(results['windows'], measure('windows', 'ours'))
        gather(results['loading'], {bs:measure('loading', 'ours', bs) for bs in (16, 128)})
        for n in stack_sizes:
            times = {o:measure('stack', o, n) for o in ('ours', 'ours_split', 'ours_cache')}
            gather(results['stack'].setdefault(str(n), {}), times)
        for n in division_sizes if i == 0 else division_sizes[:-1] if i < 3 else ():
            gather(results['division'].setdefault(str(n), {}), measure('division', 'ours', n))
    for case,peaks in results['memory'].items():
        for n in batch_sizes: peaks[str(n)] = measure('memory', case, n)['megabytes']
    parts = {kind:part(kind, rounds) for kind in ('costs', 'lengths')}
    return results | dict(learners=learners(rounds, {}), ways=ways(rounds), comparison=comparison(), **parts)

def main():
    parser = argparse.ArgumentParser('python -m benchmarks', description=__doc__)
    parser.add_argument('--quick', action='store_true', help="only count, and only what needs no other framework")
    parser.add_argument('--rounds', type=int, default=7, help="how often everything is timed")
    parser.add_argument('--learners', action='store_true', help="measure only fastai's learners")
    parser.add_argument('--ways', action='store_true', help="measure only ActivationCheckpointing")
    parser.add_argument('--costs', action='store_true', help="measure only what the callbacks add, with two optimizers")
    parser.add_argument('--lengths', action='store_true', help="measure only texts of many lengths")
    parser.add_argument('--comparison', action='store_true', help="measure only what other callbacks give")
    args = parser.parse_args()
    if args.quick:
        results = dict(counts={o:measure('counts', o) for o in report.labels if o not in packages or o == 'fastai'})
        print(report.table(results).to_string(), report.goals(results), sep='\n\n')
        return
    file = here/'results.json'
    def keep(name, figures):
        results = json.loads(file.read_text()) | {name:figures}
        file.write_text(json.dumps(results, indent=1)+'\n')
        return results
    if args.learners:
        print(report.learners_lines(keep('learners', learners(args.rounds, json.loads(file.read_text())['learners']))))
    if args.ways:
        results = keep('ways', ways(args.rounds))
        print(report.ways_table(results).to_string(), report.ways_in_words(results), sep='\n\n')
    for kind in ('costs',)*args.costs + ('lengths',)*args.lengths:
        print(getattr(report, f'{kind}_table')(keep(kind, part(kind, args.rounds))).to_string())
    if args.comparison:
        needs('fastxtend')
        print(report.comparison_table(keep('comparison', comparison())))
    if args.learners or args.ways or args.costs or args.lengths or args.comparison: return
    needs(*packages)
    results = full(args.rounds)
    file.write_text(json.dumps(results, indent=1)+'\n')
    for name,picture in report.pictures.items(): picture(results).savefig(here/f'{name}.png', dpi=110)
    print(report.table(results).to_string(), report.goals(results), report.learners_lines(results), sep='\n\n')

if __name__ == '__main__': main()
