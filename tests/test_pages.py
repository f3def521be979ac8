"Every page as far as it can be checked without Quarto; each check is first seen to find a fault"
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import fastxtend_accum.all as public
import pages as checks
from cells import read, root, source
from pages import cfg, copy_repository, html_name, is_for_users, notebooks, page_name

names = [page_name(o) for o in notebooks]
user_pages = [o for o in names if is_for_users(o)]
sources = {o: read(root/'nbs'/o) for o in names}
site = yaml.safe_load((root/'_quarto.yml').read_text())

MAX_LINES = 85  # of an exported cell: a class, or the functions of one idea

each_page = pytest.mark.parametrize('name', names)
each_user_page = pytest.mark.parametrize('name', user_pages)


def faults(check, cells):
    "Returns the faults that `check` finds in any of the cells"
    res = []
    for c in cells:
        for fault in check(c):
            res.append(f'{c.get("id")}: {fault}')
    return res


def md(text):
    return dict(cell_type='markdown', source=text)


def code(text, *outputs):
    return dict(cell_type='code', source=text, outputs=list(outputs))


def shown(**data):
    return dict(output_type='display_data', data=data)


def stream(text, name='stdout'):
    return dict(output_type='stream', name=name, text=text)


png = shown(**{'image/png': '', 'text/plain': '<Figure>'})


# Each page

@each_page
def test_a_page_is_in_order(name):
    cells = sources[name]
    assert list(checks.head_faults(cells, name)) == []
    for check in (checks.output_faults, checks.picture_faults):
        assert faults(check, cells) == []


@each_page
def test_cells_are_small_and_have_ids(name):
    cells = sources[name]
    ids = [c.get('id') for c in cells]
    exported = [o for o in checks.code_sources(cells) if o.startswith('#| export')]
    lengths = [len(o.splitlines()) for o in exported]
    assert None not in ids
    assert len(ids) == len(set(ids))
    assert (root/'nbs'/name).stat().st_size < 500_000
    assert max(lengths, default=0) <= MAX_LINES


def test_pages_need_no_tools_of_developers():
    "In Colab there are the package and its extras loggers and examples only"
    tools = r'^\s*(import|from) (nbdev|pytest|hypothesis|nbconvert|accelerate|fastxtend)\b'
    for name in names:
        text = '\n'.join(checks.code_sources(sources[name]))
        assert not re.search(tools, text, re.M), name


# Pages for users

@each_user_page
def test_a_page_can_be_read(name):
    assert list(checks.reading_faults(sources[name])) == []


# Figures

def test_figures_of_other_libraries_are_those_of_their_tests():
    results = json.loads((root/'tests/libraries/results.json').read_text())
    tables = ''
    for c in sources['guides/05_evidence.ipynb']:
        for out in c.get('outputs', []):
            tables += ''.join(out.get('data', {}).get('text/html', ''))
    for library, entry in results.items():
        stem = library.lower().replace('-', '_')
        largest = max(entry['differences'].values())
        assert (root/f'tests/libraries/test_{stem}.py').is_file()
        assert library in tables
        assert f'{largest:.1e}' in tables


# What nbdev makes of the pages, before Quarto

@pytest.fixture(scope='module')
def built(tmp_path_factory):
    "Returns the folder that nbdev gives to Quarto, and what nbdev had to say"
    here = copy_repository(tmp_path_factory.mktemp('site'))
    script = '''
from nbdev.quarto import refresh_quarto_yml, nbdev_sidebar
from nbdev.serve import proc_nbs
refresh_quarto_yml()
nbdev_sidebar.__wrapped__()
print(proc_nbs('nbs', n_workers=0))'''
    out = subprocess.run([sys.executable, '-c', script], cwd=here, capture_output=True, text=True, timeout=1800)
    assert out.returncode == 0, out.stderr[-2000:]
    return here/'_proc', out.stderr


@pytest.fixture(scope='module')
def proc(built):
    return built[0]


@pytest.fixture(scope='module')
def pages(proc):
    "Returns the processed cells of each page"
    res = {o.relative_to(proc).as_posix(): read(o) for o in proc.rglob('*.ipynb')}
    assert sorted(res) == sorted(names)
    return res


@pytest.mark.long
def test_nothing_runs_beside_an_import(built):
    "The docs build runs cells with imports: there must be nothing else in them"
    assert re.findall(r'Found cells containing imports.*?\n---\n(.*?)\n---\n', built[1], re.S) == []


@pytest.mark.long
@each_page
def test_processed_pages_have_no_faults(pages, name):
    cells = pages[name]
    assert faults(checks.output_faults, cells) == []
    assert faults(checks.picture_faults, cells) == []
    assert f'output-file: {Path(html_name(name)).name}\n' in source(cells[0])


@pytest.mark.long
def test_public_names_stand_on_user_pages(pages):
    "With the meaning of each argument; and so does the method that this package adds to fastai's Recorder"
    texts = []
    for name in user_pages: texts += checks.prose(pages[name])
    text = '\n'.join(texts)
    described = set(re.findall(r'^#+ (?:\[)?([\w.]+)', text, re.M))
    on_module_pages = {'loss_items', 'AccumWarning'}  # the FAQ says what to do with warnings
    assert {*public.__all__} - on_module_pages <= described
    assert 'Recorder.plot_accum_bs' in described
    arguments = re.findall(r'^\| (?:\*\*)?\w+.*', text, re.M)
    assert len(arguments) > 25


@pytest.mark.long
def test_pages_are_short(pages):
    counts = {name: checks.words(pages[name]) for name in user_pages}
    readme = checks.words([md((root/'README.md').read_text())])
    assert 5_000 < sum(counts.values()) <= 11_500, counts
    assert 300 < readme <= 500


@pytest.mark.long
@each_page
def test_links_lead_to_what_is_there(pages, proc, name):
    files = {o.relative_to(proc).as_posix() for o in proc.rglob('*') if o.is_file()}
    assert list(checks.link_faults(name, pages, files)) == []


# The site

def test_the_sidebar_has_every_page_once():
    assert list(checks.site_faults(site['website'], names)) == []


# The checks find faults


@pytest.mark.parametrize('output', [
    stream('hm', 'stderr'),
    shown(**{'text/plain': 'UserWarning: hm'}),
    shown(**{'text/html': '<b>FutureWarning</b>'}),
    stream(['/home/me/run.py'])])
def test_faults_of_outputs_are_found(output):
    assert len(list(checks.output_faults(code('1', output)))) == 1


@pytest.mark.parametrize('cell', [
    code('1', png),
    md('![](x.png)'),
    md('<img src="x.png">'),
    md('<img src="x.png" alt="">')])
def test_faults_of_pictures_are_found(cell):
    assert len(list(checks.picture_faults(cell))) == 1


home = f'{cfg.doc_host}{cfg.doc_baseurl}'
made_up = {
    'index.ipynb': [md('## A `code` heading, and more\n\n```sh\n## no heading\n```')],
    'guides/01_b.ipynb': [code('show_doc(f)', shown(**{'text/markdown': '### Class.f\n\nIt does.'}))]}


@pytest.mark.parametrize('link,n', {
    'guides/01_b.ipynb': 0,
    '#a-code-heading-and-more': 0,
    'guides/01_b.ipynb#class.f': 0,
    f'{home}/guides/b.html#class.f': 0,
    f'{home}/': 0,
    'images/a.svg': 0,
    'https://pytorch.org/': 0,
    '01_b.ipynb': 1,
    '#no-heading': 1,
    '#a-code-heading': 1,
    'guides/01_b.ipynb#f': 1,
    f'{home}/b.html': 1,
    f'{home}/guides/b.html#f': 1,
    'images/b.svg': 1}.items())
def test_faults_of_links_are_found(link, n):
    text = md(f'Read [this]({link}), not `[that](nowhere)`.')
    pages = {**made_up, 'index.ipynb': [*made_up['index.ipynb'], text]}
    assert len(list(checks.link_faults('index.ipynb', pages, {'images/a.svg'}))) == n


@pytest.mark.parametrize('text,n', {
    'A [link](a.ipynb).': 0,
    'A [`link`](a.ipynb).': 1,
    'A [`link` of code](a.ipynb).': 1,
    'In code: `[`x`](y)`.': 1,
    'A table:\n\n| a |\n|---|': 0,
    'A table:\n| a |\n|---|': 1,
    'A list:\n\n- a\n  b\n- c': 0,
    'A list:\n- a': 1}.items())
def test_faults_of_reading_are_found(text, n):
    assert len(list(checks.reading_faults([md('# T\n\n> promise'), md(text)]))) == n
