"Settings of all tests"
import gc
import os
from collections import Counter
from pathlib import Path
from unittest.mock import patch

os.environ['OMP_NUM_THREADS'] = '1'  # before torch is imported: on small models, threads only wait for each other

import matplotlib
import pytest
from fastcore.basics import num_cpus
from hypothesis import settings

matplotlib.use('agg')

# How many cases a property test draws: `-m hypothesis --hypothesis-profile=long`, a step of .ci/run, has more
for name, n in dict(quick=10, long=20).items():
    settings.register_profile(name, max_examples=int(os.environ.get('DRAWS', n)))
settings.load_profile('quick')

# One process runs such a file: its tests share what takes long
TOGETHER = 'processes', 'pages', 'project', 'demo', 'cost', 'release', 'colab'
ALONE = 'libraries', 'gpu'  # one environment or one GPU for all tests of a mark


def pytest_xdist_auto_num_workers(config):
    "Returns as many as `nbdev-test` has"
    if config.option.markexpr in ALONE: return 0
    return min(num_cpus(), 8)


def pytest_xdist_make_scheduler(config, log):
    """The files of TOGETHER come first, each in one process. `--dist loadgroup` does nothing with pytest 9.2:
    https://github.com/pytest-dev/pytest-xdist/issues/1386"""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split('::')[0]
            is_together = Path(file).stem.removeprefix('test_') in TOGETHER
            return file if is_together else nodeid

    return Scheduler(config, log)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
    "`thin(n)`: of a test's cases, every `n`th runs always, and the others are `long`"
    seen = Counter()
    for item in items:
        mark = item.get_closest_marker('thin')
        if mark is None: continue
        [n] = mark.args
        test = item.parent, item.originalname
        if seen[test] % n: item.add_marker('long')
        seen[test] += 1


def pytest_collection_finish():
    "Collecting garbage need not go through a million objects of PyTorch, which takes longer than most tests"
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    "Whatever a test or a logger writes, it writes there"
    from fastai.torch_core import set_seed
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('WANDB_SILENT', 'true')
    set_seed(0)
    with patch.dict(os.environ): yield  # W&B leaves the address of a process there, which writes into this folder


@pytest.fixture(scope='module')
def cuda():
    "Without a GPU there is one message, and no success"
    import torch
    if not torch.cuda.is_available():
        pytest.exit('pytest -m gpu needs a GPU, and torch.cuda.is_available() is False here', returncode=1)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
