"""As in Colab: the wheel with its extras loggers and examples in a new environment, and every notebook run there from
an empty folder, without a network. It installs PyTorch once more, so it is a step of its own in `.ci/run`:
`pytest -q -m colab`"""
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
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
whole_number = re.compile(r'[-+]?\d+')
address = re.compile(r' at 0x[0-9a-f]+')  # nbdev-clean drops it
duration = re.compile(r'\b\d\d:\d\d\b')  # of an epoch, which fastai prints in minutes and seconds
markup = re.compile(r'<style.*?</style>|</?(?:table|thead|tbody|t[hdr]|div)\b[^>]*>', re.S)  # pandas gives it new ids


def normalized(text):
    "Returns `text` without addresses, durations, the tags of tables, and differences in spaces"
    text = duration.sub('', address.sub('', text))
    return ' '.join(markup.sub(' ', text).split())


def is_same_number(a, b):
    if whole_number.fullmatch(a) and whole_number.fullmatch(b): return int(a) == int(b)
    difference = abs(float(a)-float(b))
    return difference <= ATOL + RTOL*abs(float(a))


def is_same_text(a, b):
    "Returns whether two texts are equal, apart from numbers with a fraction that lie close to each other"
    a, b = normalized(a), normalized(b)
    if number.sub('#', a) != number.sub('#', b): return False
    return all(map(is_same_number, number.findall(a), number.findall(b)))


def printed(cell):
    "Returns what a cell has printed. Of stderr, only what this package says: other packages may warn"
    res = ''
    for out in cell.get('outputs', []):
        if out['output_type'] != 'stream': continue
        text = ''.join(out['text'])
        if out['name'] == 'stdout' or 'fastxtend_accum' in text: res += text
    return res


def shown(cell):
    "Returns the outputs of a cell as pairs of kind and text; of a picture just that there is one"
    text = printed(cell)
    res = [('stream', text)] if text else []
    for out in cell.get('outputs', []):
        if out['output_type'] == 'error':
            res.append(('error', f'{out["ename"]}: {out["evalue"]}'))
        for kind, data in out.get('data', {}).items():
            is_image = kind.startswith('image/')
            res.append((kind, '' if is_image else ''.join(data)))
    return sorted(res)


def changes(stored, new):
    "Yields in lines where the outputs of two runs of a notebook differ"
    for a, b in zip_longest(stored, new, fillvalue={}):
        if VARIES in a.get('metadata', {}).get('tags', []): continue
        for before, now in zip_longest(shown(a), shown(b), fillvalue=('nothing', '')):
            old_kind, old = before
            kind, text = now
            is_same = old_kind == kind and is_same_text(old, text)
            if is_same: continue
            where = a.get('id')
            yield f'{where}: {old_kind} {old[:300]!r} is now {kind} {text[:300]!r}'


# Changes are found

def stream(text, name='stdout'):
    return dict(output_type='stream', name=name, text=text)


def display(**data):
    return dict(output_type='display_data', data=data)


def cells(*outputs):
    return [dict(id='x', source='', metadata={}, outputs=list(outputs))]


def tagged(tag, *outputs):
    return [dict(id='x', source='', metadata=dict(tags=[tag]), outputs=list(outputs))]


def html(text):
    return display(**{'text/html': text})


png = display(**{'image/png': 'a', 'text/plain': '<Figure>'})
other_png = display(**{'image/png': 'b', 'text/plain': '<Figure>'})
error = dict(output_type='error', ename='E', evalue='')
own_warning = stream('site-packages/fastxtend_accum/step.py:1: UserWarning: hm', 'stderr')
other_warning = stream('site-packages/torch/jit.py:1: FutureWarning: hm', 'stderr')


@pytest.mark.parametrize('stored,new', [
    (cells(stream('accuracy 0.93')), cells(stream('accuracy 0.95'))),
    (cells(stream('23 steps')), cells(stream('24 steps'))),
    (cells(png), cells(png, png)),
    (cells(stream('a')), cells(error)),
    (cells(), cells(own_warning))])
def test_changes_are_found(stored, new):
    assert list(changes(stored, new))


@pytest.mark.parametrize('stored,new', [
    (cells(stream('loss 0.9300, 23 steps')), cells(stream('loss 0.9312, 23 steps'))),
    (cells(html('<td>0</td><td>00:00</td>')), cells(html('<td>0</td><td>00:01</td>'))),
    (cells(html('<table id="T_1"><td class="T_1">2</td>')), cells(html('<table id="T_2"><td class="T_2">2</td>'))),
    (cells(png), cells(other_png)),
    (cells(), cells(other_warning)),
    (tagged(VARIES, stream('1.0 s')), cells(stream('2.0 s')))])
def test_no_change_is_found(stored, new):
    assert not list(changes(stored, new))


# The environment

@pytest.fixture(scope='module')
def colab():
    "Yields a folder with an environment in `env`: the wheel, its extras, and the ipykernel that Colab has, too"
    with TemporaryDirectory() as name:  # pytest would keep 6 GB of it
        folder = Path(name)
        env = dict(os.environ)
        env.pop('PYTHONPATH', None)  # pip takes what lies there for installed

        def run(*command):
            subprocess.run([str(o) for o in command], cwd=folder, env=env, check=True, stdout=subprocess.PIPE)

        copy_repository(folder/'source')
        run(sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '-w', folder, folder/'source')
        [wheel] = folder.glob('*.whl')
        run(sys.executable, '-m', 'venv', folder/'env')
        python = folder/'env'/'bin'/'python'
        run(python, '-m', 'pip', 'install', '-q', f'{wheel}[loggers,examples]', 'ipykernel')
        yield folder


def install_kernel(folder, command):
    spec = dict(argv=[str(o) for o in command], display_name='Colab', language='python')
    folder.mkdir(parents=True)
    (folder/'kernel.json').write_text(json.dumps(spec))


@pytest.fixture(scope='module')
def kernels(colab, in_colab):
    "Lets notebooks find a kernel `colab`: a fork of a process of that environment"
    python = colab/'env'/'bin'/'python'
    script = Path(__file__).with_name('forked_kernels.py')
    address = colab/'kernels'
    install_kernel(colab/'share/jupyter/kernels/colab', [python, script, 'start', address, '{connection_file}'])
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
    stored = json.loads(json.dumps(nb.cells))
    with TemporaryDirectory() as folder:
        client = NotebookClient(
            nb,
            kernel_name='colab',
            resources={'metadata': {'path': folder}},
            timeout=SECONDS,
            startup_timeout=SECONDS,
            iopub_timeout=SECONDS)
        client.execute()
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
    python = colab/'env'/'bin'/'python'
    out = subprocess.run([python, '-c', code], cwd=colab, capture_output=True, text=True, check=True)
    [path] = out.stdout.split()
    assert Path(path).is_relative_to(colab/'env')


@pytest.mark.colab
@pytest.mark.parametrize('path', notebooks, ids=page_name)
def test_a_notebook_shows_what_is_stored_in_it(path, runs):
    stored, new = runs[path].result()
    assert list(changes(stored, new)) == []
