"""Every notebook runs, but for its cells with `#| long`, which show what they stored: `pytest -m colab` computes that anew.
`nbdev-test` does the same for a notebook or a folder: `nbdev-test --path nbs/guides`, and `--flags long` runs all cells"""
import gc, multiprocessing
from concurrent.futures import ProcessPoolExecutor

import nbformat, pytest
from nbdev.test import test_nb as run_notebook

from pages import cfg, copy_repository, notebooks, page_name, root

SECONDS = 3600  # that a cell may take; 20 on a machine that does nothing else

@pytest.fixture(scope='module')
def fresh():
    "Makes processes that have imported fastai and done nothing else. Forks of this one could not use autograd where there is a GPU"
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['fastai.vision.all', 'fastai.text.all', 'fastai.tabular.all', 'nbdev.test'])
    return context

@pytest.fixture(scope='module')
def copy(tmp_path_factory):
    "The repository once more: what notebooks write beside them, other tests should not find"
    return copy_repository(tmp_path_factory.mktemp('notebooks'))

def run(path, home):
    "Whether notebook `path` ran through"
    gc.freeze()  # as in conftest.py
    multiprocessing.set_start_method(None, force=True)  # the processes that it starts are forks again, where that is the default
    return run_notebook(path, skip_flags=cfg.tst_flags.split(), basepath=home, cell_timeout=SECONDS)[0]

def passes(path, fresh, home):
    with ProcessPoolExecutor(1, mp_context=fresh) as pool: return pool.submit(run, path, home).result()

@pytest.mark.parametrize('path', notebooks, ids=page_name)
def test_notebook(path, fresh, copy):
    assert passes(copy/path.relative_to(root), fresh, copy), f'what went wrong stands above; to see it again: nbdev-test --path {path}'

def test_an_error_is_noticed(tmp_path, fresh, copy):
    for name,code in dict(right='assert 1', wrong='assert 0').items():
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)]), tmp_path/f'{name}.ipynb')
    assert passes(tmp_path/'right.ipynb', fresh, copy) and not passes(tmp_path/'wrong.ipynb', fresh, copy)
