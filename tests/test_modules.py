"The modules of the package: how hard they are to read, and which import which"
import ast
from graphlib import TopologicalSorter

import legible
from common import *

root = Path(__file__).parent.parent
MAX_NODES = 46_500  # of the syntax trees; with AutoResume and check_accum
package = root/'fastxtend_accum'
paths = sorted(o for o in package.rglob('*.py') if not o.name.startswith('_'))
test_paths = sorted((root/'tests').rglob('*.py'))
benchmark_paths = sorted((root/'benchmarks').rglob('*.py'))


def name_of(path):
    "Returns the name of a module, such as 'windows/loop'"
    return path.relative_to(package).with_suffix('').as_posix()


modules = {name_of(path):path for path in paths}


# How hard the code is to read

def test_the_package_is_easy_to_read():
    "For comparison: fastai's learner and callbacks have 11.0 nodes a line, torchtitan's trainer has 6.6"
    figures = legible.measure(paths)
    assert figures.nodes <= MAX_NODES
    assert figures.density <= 9.8
    assert figures.dense_share <= .003


def test_tests_and_benchmarks_are_easy_to_read():
    figures = legible.measure([*test_paths, *benchmark_paths])
    assert figures.density <= 10.5
    assert figures.dense_share <= .006


def test_functions_fit_on_a_screen():
    for path in (*paths, *test_paths, *benchmark_paths):
        too_long = [name for name, lines in legible.functions(path) if lines > 40]
        assert too_long == [], path
        is_generated = path in paths
        for line in path.read_text().splitlines():
            is_of_nbdev = is_generated and line.startswith(('__all__', '           ', '"""', 'Docs:', '# '))
            assert len(line) <= 120 or is_of_nbdev, line


def test_the_tests_of_a_module_can_be_found_by_its_name():
    for module in modules:
        if module == 'all': continue
        name = module.split('/')[-1]
        path = root/'tests'/f'test_{name}.py'
        assert 'def test_' in path.read_text()


# Imports

def imports(module):
    "Returns the modules of the package that `module` imports"
    path = modules[module]
    res = set()
    for node in ast.walk(legible.parse(path)):
        if not isinstance(node, ast.ImportFrom) or not node.level: continue
        folder = path.parents[node.level-1]
        res.add(name_of(folder/f"{node.module.replace('.', '/')}.py"))
    return res


def test_imports_lead_in_one_direction():
    "`windows` knows nothing of `memory` and `resuming`, these nothing of the callbacks, and all nothing of `check`"
    needs = {module:imports(module) for module in modules}
    assert sum(map(len, needs.values())) > 50
    assert sorted(TopologicalSorter(needs).static_order()) == sorted(modules)  # raises CycleError
    folders = ['windows', 'memory', 'resuming', '.', 'checking', 'check', 'all']
    def level(module): return folders.index(module if module in folders else str(Path(module).parent))
    for module, others in needs.items():
        for other in others: assert level(other) <= level(module), (module, other)
