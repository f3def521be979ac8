"""As in Colab: the wheel with its extras loggers and examples in a new environment, and every notebook run there from
an empty folder, without a network. It installs PyTorch once more, so it is a step of its own in `.ci/run`:
`pytest -q -m colab`"""
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
import pytest
from nbclient import NotebookClient

from pages import copy_repository, notebooks, page_name

SECONDS = 3600  # that a cell may take; 20 on a machine that does nothing else
RTOL, ATOL = .01, 1e-6  # between numbers with a fraction in stored outputs and in new ones; whole numbers are equal
VARIES = 'varies'  # tag of a cell whose output is another each time: timings, versions


# Compare outputs

number = re.compile(r'(?<![\w.])[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?(?!\w)', re.I)

varying = re.compile('|'.join([
    r'\b\d\d:\d\d\b',  # what an epoch takes, in minutes and seconds
    r'<style.*?</style>|</?(?:table|thead|tbody|t[hdr]|div)\b[^>]*>',  # pandas gives tables new ids
    r'(?: at 0x[0-9a-f]+)?>']), re.S)  # nbdev-clean drops addresses


def is_close(a, b):
    "Returns whether two numbers, as texts, are equal or, if they have a fraction, close to each other"
    if not re.search('[.e]', a, re.I): return a == b
    return math.isclose(float(a), float(b), rel_tol=RTOL, abs_tol=ATOL)


def is_same_text(a, b):
    "Returns whether two texts are equal, apart from spaces and from numbers that are close to each other"
    a, b = [' '.join(varying.sub(' ', o).split()) for o in (a, b)]
    if number.sub('#', a) != number.sub('#', b): return False
    return all(map(is_close, number.findall(a), number.findall(b)))


def text_of(output):
    "Returns what an output shows; of a picture just that there is one, and of stderr only what this package says"
    if output['output_type'] == 'stream':
        text = ''.join(output['text'])
        return text if output['name'] == 'stdout' or 'fastxtend_accum' in text else ''
    texts = []
    for kind, data in sorted(output['data'].items()):
        is_image = kind.startswith('image/')
        texts.append(kind if is_image else f'{kind} {"".join(data)}')
    return '\n'.join(['', *texts])


def shown(cell):
    "Returns what a cell shows; first what it prints, which may come late"
    outputs = sorted(cell.get('outputs', []), key=lambda o: o['output_type'] != 'stream')
    return ''.join(map(text_of, outputs))


# Changes are found

@pytest.mark.parametrize('a,b,is_same', [
    ('<Styler>', '<Styler at 0x7f63>', True),
    ('loss 0.9300, 23 steps', 'loss 0.9312, 23 steps', True),
    ('loss 0.9300, 23 steps', 'loss 0.9500, 23 steps', False),
    ('loss 0.9300, 23 steps', 'loss 0.9300, 24 steps', False),
    ('<td>0</td><td>00:00</td>', '<td>0</td><td>00:01</td>', True),
    ('<table id="T_1"><td class="T_1">2</td>', '<table id="T_2"><td class="T_2">2</td>', True)])
def test_texts_are_compared(a, b, is_same):
    assert is_same_text(a, b) == is_same


def test_what_a_cell_shows():
    outputs = [
        dict(output_type='display_data', data={'image/png': 'a', 'text/plain': ['<Fig', 'ure>']}),
        dict(output_type='stream', name='stderr', text='site-packages/torch/jit.py:1: FutureWarning: hm'),
        dict(output_type='stream', name='stderr', text=['site-packages/fastxtend_accum/step.py:1: hm']),
        dict(output_type='stream', name='stdout', text='printed')]
    expected = 'site-packages/fastxtend_accum/step.py:1: hmprinted\nimage/png\ntext/plain <Figure>'
    assert shown(dict(outputs=outputs)) == expected


# The environment

@pytest.fixture(scope='module')
def colab():
    "Yields a folder with an environment in `env`: the wheel, its extras, and the ipykernel that Colab has, too"
    with TemporaryDirectory() as name:  # pytest would keep 6 GB of it
        folder = Path(name)
        env = dict(os.environ)
        env.pop('PYTHONPATH', None)  # pip takes what lies there for installed

        def run(*command):
            subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.PIPE)

        copy_repository(folder/'source')
        run(sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '-w', folder, folder/'source')
        [wheel] = folder.glob('*.whl')
        run(sys.executable, '-m', 'venv', folder/'env')
        python = folder/'env'/'bin'/'python'
        run(python, '-m', 'pip', 'install', '-q', f'{wheel}[loggers,examples]', 'ipykernel')
        yield folder


@pytest.fixture(scope='module')
def kernels(colab, in_colab):
    "Lets notebooks find a kernel `colab`: a fork of a process of that environment"
    python = str(colab/'env/bin/python')
    script = str(Path(__file__).with_name('forked_kernels.py'))
    address = colab/'kernels'
    argv = [python, script, 'start', str(address), '{connection_file}']
    spec = colab/'share/jupyter/kernels/colab/kernel.json'
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps(dict(argv=argv, display_name='Colab', language='python')))
    server = subprocess.Popen([python, script, 'serve', address], cwd=colab, start_new_session=True)
    while not address.exists():
        assert server.poll() is None
        time.sleep(.1)
    yield
    os.killpg(server.pid, signal.SIGKILL)


@pytest.fixture(scope='module')
def in_colab(colab):
    "Nothing of the developer's environment, one thread, and no way into the network"
    with pytest.MonkeyPatch.context() as m:
        for name in ('PYTHONPATH', 'MPLBACKEND', 'VIRTUAL_ENV', 'WANDB_MODE', 'WANDB_SILENT'):
            m.delenv(name, raising=False)
        for name in ('http_proxy', 'https_proxy', 'HTTP_PROXY', 'HTTPS_PROXY'):
            m.setenv(name, 'http://127.0.0.1:9')
        m.setenv('OMP_NUM_THREADS', '1')  # on a busy machine two threads wait for each other
        m.setenv('JUPYTER_PATH', str(colab/'share'/'jupyter'))
        yield


def run_notebook(path):
    "Returns the cells of a notebook as stored, and after a run in an empty folder"
    nb = nbformat.read(path, 4)
    stored = deepcopy(nb.cells)
    with TemporaryDirectory() as folder:
        client = NotebookClient(
            nb,
            kernel_name='colab',
            resources={'metadata': {'path': folder}},
            timeout=SECONDS,
            startup_timeout=SECONDS,
            iopub_timeout=SECONDS)
        # An environment for the process that asks for a kernel. Without it, `os.environ` would be copied, which fails
        # if pytest changes it at the same moment, as it does for each test
        client.execute(env={})
    return stored, nb.cells


@pytest.fixture(scope='module')
def runs(kernels):
    "Runs all notebooks, two at a time; yields the futures by path"
    with ThreadPoolExecutor(2) as pool:
        yield {o: pool.submit(run_notebook, o) for o in notebooks}
        pool.shutdown(cancel_futures=True)


@pytest.mark.colab
def test_only_the_wheel_is_there(colab, in_colab):
    code = '''
import fastxtend_accum.all as a
from importlib.util import find_spec
tools = ["nbdev", "pytest", "hypothesis", "accelerate"]
print(a.__file__, *[o for o in tools if find_spec(o)])'''
    python = colab/'env/bin/python'
    out = subprocess.run([python, '-c', code], cwd=colab, capture_output=True, text=True, check=True)
    [path] = out.stdout.split()
    assert Path(path).is_relative_to(colab/'env')


@pytest.mark.colab
@pytest.mark.parametrize('path', notebooks, ids=page_name)
def test_a_notebook_shows_what_is_stored_in_it(path, runs):
    for stored, new in zip(*runs[path].result(), strict=True):
        before, now = shown(stored), shown(new)
        varies = VARIES in stored.metadata.get('tags', [])
        assert varies or is_same_text(before, now), f'{stored.id}: {before} is now {now}'
