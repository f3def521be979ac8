"The three folders of the package: which modules import which, and which code a fit runs"
import ast, inspect, re, sys
from graphlib import TopologicalSorter

import pytest

from common import *

package = Path(__file__).parent.parent/'fastxtend_accum'
folders = ['window', 'learner', 'ways', '']  # a module imports from its own folder, and from those to the left
paths = {o.relative_to(package).with_suffix('').as_posix():o for o in package.rglob('*.py') if not o.name.startswith('_')}

def folder(module): return module.rpartition('/')[0]
def imports(module):
    "The modules of the package that `module` imports"
    nodes = [o for o in ast.walk(ast.parse(paths[module].read_text())) if isinstance(o, ast.ImportFrom) and o.level]
    return {(paths[module].parent/('../'*(o.level-1))/o.module.replace('.', '/')).resolve().relative_to(package).as_posix() for o in nodes}

def test_arrows_point_down():
    needs = {o:imports(o) for o in paths}
    assert {folder(o) for o in needs} == {*folders} and sum(map(len, needs.values())) > 50
    order = [*TopologicalSorter(needs).static_order()]  # raises CycleError
    assert sorted(order) == sorted(paths)
    for module,others in needs.items():
        assert all(folders.index(folder(o)) <= folders.index(folder(module)) for o in others), module

def functions_run(*cbs, **kwargs):
    "The code objects of the package that run in a fit of two epochs, by module"
    seen = {}
    def profile(frame, event, arg):
        code = frame.f_code
        if event == 'call' and code.co_filename.startswith(str(package)): seen[code] = Path(code.co_filename).relative_to(package).as_posix()
    learn = make_learner(8, n=64, cbs=[*cbs], **kwargs)
    sys.setprofile(profile)
    try: fit(learn, 2)
    finally: sys.setprofile(None)
    return seen

def source_of(codes):
    "The lines of functions and lambdas, each once"
    blocks = [(o.co_filename, *inspect.getsourcelines(o)) for o in codes]
    lines = {(file, start+i):line for file,block,start in blocks for i,line in enumerate(block)}
    return sum(map(len, lines.values()))

def test_plain_windows_know_no_ways():
    "What runs is the arithmetic of windows and what fastai's loop asks for; a quarter of it looks at the first windows"
    ran = functions_run(GradientAccumulation(32))
    assert {Path(o).parts[0] for o in ran.values()} == {'window', 'learner', 'accumulation.py'}
    assert 10_000 < source_of(ran) <= 60_300 and len({*ran.values()}) <= 15

@pytest.mark.parametrize('kwargs', [dict(exact=True), dict(micro_batch_size=4), dict(micro_batch_size='auto')])
def test_a_way_runs_in_the_loop(kwargs):
    assert {'ways/loop.py', 'ways/way.py'} <= {*functions_run(GradientAccumulation(**kwargs)).values()}

def test_modules_are_no_rooms_for_everything():
    assert max(len(o.read_text()) for o in paths.values()) <= 18_800
    assert len(paths['accumulation'].read_text()) <= 16_000
