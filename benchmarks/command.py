"`python -m benchmarks` measures parts, each in a process of its own, and writes them into `results.json`"
import argparse
import json
import os
import platform
import re
import warnings
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from importlib import import_module
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import pandas as pd

from . import report

file = Path(__file__).with_name('results.json')
packages = 'torch', 'fastai'
parts = 'growing', 'seesaw', 'fits', 'costs', 'comparison', 'memory', 'learners'  # modules with a `measure`


def in_own_process(f, *args):
    "Returns what `f` returns in a new process, which knows nothing of what was measured before"
    with ProcessPoolExecutor(1, get_context('spawn')) as pool: return pool.submit(f, *args).result()


def measure_part(part, rounds):
    import torch
    torch.set_num_threads(1)  # the models are so small that threads only wait for each other
    warnings.simplefilter('ignore')
    module = import_module(f'benchmarks.{part}')
    if part == 'comparison': return module.measure()  # which is the same each time
    return module.measure(rounds)


def n_measured(part, rounds):
    "Returns in how many rounds a part is measured: the comparison is the same each time, and growing has ten seeds"
    if part == 'growing': return max(rounds, 10)
    return 1 if part == 'comparison' else rounds


def run_on(rounds):
    "Returns the machine, the versions of what it ran, and the date"
    info = Path('/proc/cpuinfo')
    names = re.findall(r'^model name\s*: (.*)', info.read_text(), re.M) if info.exists() else []
    cpu = names[0] if names else platform.processor()
    versions = [f'{name} {version(name)}' for name in packages]
    words = [cpu, f'{os.cpu_count()} cores', platform.system(), f'Python {platform.python_version()}', *versions]
    return ', '.join([*words, str(date.today()), f'rounds: {rounds}'])


def main():
    parser = argparse.ArgumentParser('python -m benchmarks', description=__doc__)
    parser.add_argument('parts', nargs='*', metavar='PART', help=f"{', '.join(parts)}; all of them if none is given")
    parser.add_argument('--rounds', type=int, default=7, help='how often times are measured')
    args = parser.parse_args()
    pd.set_option('display.width', 200, 'display.max_columns', None)
    for part in args.parts:
        if part not in parts: parser.error(f"there is no part {part!r}: choose from {', '.join(parts)}")
    results = json.loads(file.read_text())
    chosen = args.parts or parts
    for part in chosen:
        figures = in_own_process(measure_part, part, args.rounds)
        results[part] = dict(run_on=run_on(n_measured(part, args.rounds)), **figures)
        text = json.dumps(results, indent=1)
        file.write_text(text+'\n')  # as soon as it is there
        for table in report.shown[part]: print(table(json.loads(text)), end='\n\n', flush=True)
