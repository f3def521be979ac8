"Every notebook runs. `nbdev-test` does the same for a notebook or a folder: `nbdev-test --path nbs/guides`"
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
from nbdev.test import test_nb as run_notebook

from pages import notebooks, page_name, root

@pytest.fixture(scope='module')
def fresh():
    "Makes processes that have imported fastai and done nothing else. Forks of this one could not use autograd where there is a GPU"
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['fastai.vision.all', 'fastai.text.all', 'fastai.tabular.all', 'nbdev.test'])
    return context

@pytest.mark.parametrize('path', notebooks, ids=page_name)
def test_notebook(path, fresh):
    with ProcessPoolExecutor(1, mp_context=fresh) as pool:
        passed,_ = pool.submit(run_notebook, path, basepath=root).result()
    assert passed, f'what went wrong stands above; to see it again: nbdev-test --path {path}'
