"""As in Colab: the wheel with its extras loggers and examples in a new environment, and every notebook run there from an empty folder, without a network.
It installs PyTorch once more, so it has a step of its own in `.ci/run`: `pytest -q -m colab`"""
import json, os, re, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat, pytest
from nbclient import NotebookClient

from pages import copy_repository, notebooks, page_name, root, source

SECONDS = 3600       # that a cell may take; 20 on a machine that does nothing else
RTOL,ATOL = .01,1e-6  # between numbers with a fraction in stored outputs and in new ones; whole numbers are equal
VARIES = 'varies'   # tag of a cell whose output is another each time: timings, versions

# Outputs

number = re.compile(r'(?<![\w.])[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?(?!\w)', re.I)

address = re.compile(r' at 0x[0-9a-f]+')  # nbdev-clean drops it
markup = re.compile(r'<style.*?</style>|</?(?:table|thead|tbody|t[hdr]|div)\b[^>]*>', re.S)  # pandas gives it new ids each time

def same_text(a, b):
    "Equal but for spaces, addresses, the tags of tables, and numbers with a fraction that lie close to each other"
    a,b = (' '.join(markup.sub(' ', address.sub('', o)).split()) for o in (a, b))
    xs,ys = number.findall(a),number.findall(b)
    return number.sub('#', a) == number.sub('#', b) and len(xs) == len(ys) and all(map(same_number, xs, ys))

def same_number(a, b):
    whole = re.fullmatch(r'[-+]?\d+', a) and re.fullmatch(r'[-+]?\d+', b)
    return int(a) == int(b) if whole else abs(float(a)-float(b)) <= ATOL + RTOL*abs(float(a))

def shown(cell):
    "The outputs of `cell`: what was printed, in one piece, other text, and of a picture just that there is one"
    outs = cell.get('outputs', [])
    texts = [(o['name'], ''.join(o['text'])) for o in outs if o['output_type'] == 'stream']
    said = ''.join(text for name,text in texts if name == 'stdout' or 'fastxtend_accum' in text)  # other packages may warn
    res = [('stream', said)] if said else []
    for o in outs:
        if o['output_type'] == 'error': res.append(('error', f'{o["ename"]}: {o["evalue"]}'))
        for kind,data in o.get('data', {}).items(): res.append((kind, '' if kind.startswith('image/') else ''.join(data)))
    return sorted(res)

def changes(stored, new):
    "Where outputs of two runs of a notebook differ, in lines"
    for a,b in zip_longest(stored, new, fillvalue={}):
        if VARIES in a.get('metadata', {}).get('tags', []): continue
        for (kind,old),(kind2,now) in zip_longest(shown(a), shown(b), fillvalue=('nothing', '')):
            if kind != kind2 or not same_text(old, now): yield f'{a.get("id")}: {kind} {old[:300]!r} is now {kind2} {now[:300]!r}'

def out(*outputs): return [dict(id='x', source='', metadata={}, outputs=list(outputs))]
def stream(text): return dict(output_type='stream', name='stdout', text=text)
def display(**data): return dict(output_type='display_data', data=data)
png = display(**{'image/png':'a', 'text/plain':'<Figure>'})

@pytest.mark.parametrize('a,b', [
    (out(stream('accuracy 0.93')), out(stream('accuracy 0.95'))), (out(stream('23 steps')), out(stream('24 steps'))),
    (out(stream('a')), out(stream('b'))), (out(stream('1.5')), out(stream('1.5 1.5'))), (out(stream('a')), out()), (out(), out(stream('a'))),
    (out(png), out()), (out(png), out(png, png)), (out(stream('nan')), out(stream('1.0'))), (out(stream('-1.5')), out(stream('1.5'))),
    (out(stream('a')), out(dict(output_type='error', ename='E', evalue=''))), (out(), out()+out(stream('a'))),
    (out(display(**{'text/html':'<td>2</td>'})), out(display(**{'text/html':'<td>3</td>'}))),
    (out(), out(dict(output_type='stream', name='stderr', text='site-packages/fastxtend_accum/step.py:1: UserWarning: hm')))])
def test_changes_are_found(a, b): assert list(changes(a, b))

@pytest.mark.parametrize('a,b', [
    (out(stream('loss 0.9300, 23 steps')), out(stream('loss 0.9312, 23 steps'))), (out(stream('7.8e-08')), out(stream('1e-07'))),
    (out(stream('a\n'), stream('b')), out(stream('a\nb'))), (out(stream('<f at 0x7f7187c7cf40>')), out(stream('<f>'))),
    (out(display(**{'text/html':'<table id="T_1"><td class="T_1">2</td>'})), out(display(**{'text/html':'<table id="T_2"><td class="T_2">2</td>'}))),
    (out(png), out(display(**{'image/png':'b', 'text/plain':'<Figure>'}))),
    (out(), out(dict(output_type='stream', name='stderr', text='site-packages/torch/jit.py:1: FutureWarning: hm'))),
    ([dict(metadata=dict(tags=[VARIES]), outputs=[stream('1.0 s')])], [dict(outputs=[stream('2.0 s')])])])
def test_no_change_is_found(a, b): assert not list(changes(a, b))

# The environment

@pytest.fixture(scope='module')
def colab():
    "A folder with an environment in `env`: the wheel, its extras, and the ipykernel that Colab has, too"
    with TemporaryDirectory() as d:  # pytest would keep 6 GB of it
        d = Path(d)
        env = {k:v for k,v in os.environ.items() if k != 'PYTHONPATH'}  # pip takes what lies there for installed
        def run(*command): subprocess.run([str(o) for o in command], cwd=d, env=env, check=True, stdout=subprocess.PIPE)
        copy_repository(d/'source')
        run(sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '-w', d, d/'source')
        [wheel] = d.glob('*.whl')
        run(sys.executable, '-m', 'venv', d/'env')
        python = d/'env'/'bin'/'python'
        run(python, '-m', 'pip', 'install', '-q', f'{wheel}[loggers,examples]', 'ipykernel')
        run(python, '-m', 'ipykernel', 'install', '--prefix', d, '--name', 'colab')
        yield d

@pytest.fixture(scope='module')
def in_colab(colab):
    "Nothing of the developer's environment, one thread, and no way into the network"
    with pytest.MonkeyPatch.context() as m:
        for name in 'PYTHONPATH','MPLBACKEND','VIRTUAL_ENV','WANDB_MODE','WANDB_SILENT': m.delenv(name, raising=False)
        for name in 'http_proxy','https_proxy','HTTP_PROXY','HTTPS_PROXY': m.setenv(name, 'http://127.0.0.1:9')
        m.setenv('OMP_NUM_THREADS', '1')  # on a busy machine two threads wait for each other
        m.setenv('JUPYTER_PATH', str(colab/'share'/'jupyter'))
        yield

def run_notebook(path):
    "Its cells as stored, and as they are after a run in an empty folder; the seconds that took"
    nb = nbformat.read(path, 4)
    stored = json.loads(json.dumps(nb.cells))
    start = time.perf_counter()
    limits = dict(timeout=SECONDS, startup_timeout=SECONDS, iopub_timeout=SECONDS)
    with TemporaryDirectory() as d: NotebookClient(nb, kernel_name='colab', resources={'metadata':{'path':d}}, **limits).execute()
    return stored,nb.cells,time.perf_counter()-start

@pytest.fixture(scope='module')
def runs(in_colab):
    "All notebooks by path, two at a time"
    with ThreadPoolExecutor(2) as pool:
        yield {o:pool.submit(run_notebook, o) for o in notebooks}
        pool.shutdown(cancel_futures=True)

@pytest.mark.colab
def test_only_the_wheel_is_there(colab, in_colab):
    code = '''
import fastxtend_accum.all as a
from importlib.util import find_spec
print(a.__file__, *(o for o in ("nbdev", "pytest", "hypothesis", "accelerate") if find_spec(o)))'''
    said = subprocess.run([colab/'env'/'bin'/'python', '-c', code], cwd=colab, capture_output=True, text=True, check=True).stdout.split()
    assert len(said) == 1 and Path(said[0]).is_relative_to(colab/'env')

@pytest.mark.colab
@pytest.mark.parametrize('path', notebooks, ids=page_name)
def test_notebook(path, runs, capsys):
    "It runs, and shows what is stored in it"
    stored,new,seconds = runs[path].result()
    with capsys.disabled(): print(f' {page_name(path)} {seconds:.0f} s', end='', flush=True)
    assert list(changes(stored, new)) == []
