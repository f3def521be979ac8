"Every notebook runs. `nbdev-test` does the same for a notebook or a folder: `nbdev-test --path nbs/guides`"
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import nbformat, pytest
from nbdev.test import test_nb as run_notebook

from pages import notebooks, page_name, root

@pytest.fixture(scope='module')
def fresh():
    "Makes processes that have imported fastai and done nothing else. Forks of this one could not use autograd where there is a GPU"
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['fastai.vision.all', 'fastai.text.all', 'fastai.tabular.all', 'nbdev.test'])
    return context

def run(path):
    "Whether notebook `path` ran through"
    multiprocessing.set_start_method(None, force=True)  # the processes that it starts are forks again, where that is the default
    return run_notebook(path, basepath=root)[0]

def passes(path, fresh):
    with ProcessPoolExecutor(1, mp_context=fresh) as pool: return pool.submit(run, path).result()

@pytest.mark.parametrize('path', notebooks, ids=page_name)
def test_notebook(path, fresh): assert passes(path, fresh), f'what went wrong stands above; to see it again: nbdev-test --path {path}'

def test_an_error_is_noticed(tmp_path, fresh):
    for name,code in dict(right='assert 1', wrong='assert 0').items():
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)]), tmp_path/f'{name}.ipynb')
    assert passes(tmp_path/'right.ipynb', fresh) and not passes(tmp_path/'wrong.ipynb', fresh)
