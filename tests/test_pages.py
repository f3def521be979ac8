"Every page as far as it can be checked without Quarto; each check is first seen to find a fault"
import re
import subprocess
import sys
from collections import Counter

import pytest

import fastxtend_accum.all as public
import pages as checks
from cells import read, root, source
from pages import cfg, copy_repository, notebooks, page_name

names = [page_name(o) for o in notebooks]
user_pages = [o for o in names if not re.match(r'windows/|memory/|resuming/|checking/|0[578]_|guides/06_', o)]
sources = {o: read(root/'nbs'/o) for o in names}

MAX_LINES = 85  # of an exported cell: a class, or the functions of one idea

each_page = pytest.mark.parametrize('name', names)


def faults(check, cells):
    "Returns the faults that `check` finds in any of the cells"
    res = []
    for c in cells:
        for fault in check(c): res.append((c.get('id'), fault))
    return res


# Each page

@each_page
def test_a_page_is_in_order(name):
    cells = sources[name]
    assert list(checks.head_faults(cells, name)) == []
    assert faults(checks.output_faults, cells) == []
    assert name not in user_pages or faults(checks.text_faults, cells) == []


def test_exported_cells_are_small():
    for cells in sources.values():
        for text in map(source, cells):
            assert not text.startswith('#| export') or text.count('\n') < MAX_LINES, text


def test_the_sidebar_has_every_page_once():
    site = (root/'_quarto.yml').read_text()
    _, sidebar = site.split('  sidebar:\n')
    assert Counter(re.findall(r'- (\S+\.ipynb)', sidebar)) == Counter(names)
    assert set(re.findall(r'href: (\S+\.ipynb)', site)) <= set(names)


# What nbdev makes of the pages, before Quarto

@pytest.fixture(scope='module')
def pages(tmp_path_factory):
    "Returns the cells that nbdev gives to Quarto, by page"
    here = copy_repository(tmp_path_factory.mktemp('site'))
    script = '''
from nbdev.quarto import refresh_quarto_yml, nbdev_sidebar
from nbdev.serve import proc_nbs
refresh_quarto_yml()
nbdev_sidebar.__wrapped__()
proc_nbs('nbs', n_workers=0)'''
    out = subprocess.run([sys.executable, '-c', script], cwd=here, capture_output=True, text=True, timeout=1800)
    assert out.returncode == 0, out.stderr[-2000:]
    return {name: read(here/'_proc'/name) for name in names}


@pytest.mark.long
def test_public_names_stand_on_user_pages(pages):
    "And so does the method that this package adds to fastai's Recorder"
    described = set()
    for name in user_pages:
        text = '\n'.join(checks.prose(pages[name]))
        described.update(re.findall(r'^#+ (?:\[)?([\w.]+)', text, re.M))
    on_module_pages = {'loss_items', 'AccumWarning'}  # the FAQ says what to do with warnings
    assert {*public.__all__, 'Recorder.plot_accum_bs'} - on_module_pages <= described


@pytest.mark.long
@each_page
def test_links_lead_to_what_is_there(pages, name):
    assert list(checks.link_faults(name, pages)) == []


def test_user_pages_are_short():
    texts = []
    for name in user_pages: texts += checks.prose(sources[name])
    words = '\n'.join(texts).split()
    assert 5_000 < len(words) <= 12_500


# The checks find faults

def md(text):
    return dict(cell_type='markdown', source=text)


def code(output):
    return dict(cell_type='code', source='1', outputs=[output])


def shown(kind, data):
    return dict(output_type='display_data', data={kind: data})


@pytest.mark.parametrize('output', [
    dict(output_type='error', ename='E'),
    dict(output_type='stream', name='stderr', text='hm'),
    dict(output_type='stream', name='stdout', text=['/home/me/run.py']),
    shown('text/html', '<b>FutureWarning</b>'),
    shown('image/png', 'a')])
def test_faults_of_outputs_are_found(output):
    assert len(list(checks.output_faults(code(output)))) == 1


@pytest.mark.parametrize('text,n', {
    'A [link](a.ipynb).\n\n- a\n  b\n- c\n\n| a |\n|---|': 0,
    'A [`link` of code](a.ipynb).': 1,
    'In code: `[`x`](y)`.': 1,
    'A table:\n| a |\n|---|': 1,
    'A list:\n- a': 1,
    '![](x.png)': 1}.items())
def test_faults_of_texts_are_found(text, n):
    assert len(list(checks.text_faults(md(text)))) == n


home = f'{cfg.doc_host}{cfg.doc_baseurl}'
made_up = {
    'index.ipynb': [md('## A `code` heading, and more\n\n```sh\n## no heading\n```')],
    'guides/01_b.ipynb': [code(shown('text/markdown', '### Class.f\n\nIt does.'))]}


@pytest.mark.parametrize('link,n', {
    '#a-code-heading-and-more': 0,
    'guides/01_b.ipynb#class.f': 0,
    f'{home}/guides/b.html#class.f': 0,
    f'{home}/': 0,
    'images/card.png': 0,
    'https://pytorch.org/': 0,
    '01_b.ipynb': 1,
    '#no-heading': 1,
    f'{home}/b.html': 1,
    f'{home}/guides/b.html#f': 1}.items())
def test_faults_of_links_are_found(link, n):
    text = md(f'Read [this]({link}), not `[that](nowhere)`.')
    pages = {**made_up, 'index.ipynb': [*made_up['index.ipynb'], text]}
    assert len(list(checks.link_faults('index.ipynb', pages))) == n
