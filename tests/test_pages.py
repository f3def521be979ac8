"Every page as far as it can be checked without Quarto; each check is first seen to find a fault"
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fastai.learner import Learner, Recorder
from fastcore.docments import docments

import fastxtend_accum.all as public
import pages as checks
from cells import read, root, source
from pages import badge, cfg, copy_repository, html_name, is_for_users, notebooks, page_name

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
    for check in (checks.directive_faults, checks.output_faults, checks.picture_faults):
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


# The meaning of each argument

def own_functions(kind):
    "Returns the functions that this package has added to a class of fastai's"
    functions = [f for f in vars(kind).values() if inspect.isfunction(f)]
    return [f for f in functions if f.__module__.startswith('fastxtend_accum') and f.__name__ != 'all_batches']


def undocumented(f):
    "Returns the arguments of a function or class without a comment"
    if not inspect.isfunction(f) and not inspect.isclass(f):
        return []
    comments = docments(f, returns=False)
    function = f.__init__ if inspect.isclass(f) else f
    res = []
    for name, param in inspect.signature(function).parameters.items():
        is_several = param.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if name != 'self' and not is_several and not comments.get(name):
            res.append(name)
    return res


public_functions = [getattr(public, o) for o in public.__all__]
fastais_methods = [*own_functions(Learner), *own_functions(Recorder)]


@pytest.mark.parametrize('f', [*public_functions, *fastais_methods], ids=lambda f: getattr(f, '__name__', 'value'))
def test_every_argument_says_what_it_means(f):
    assert undocumented(f) == []


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
    assert faults(checks.directive_faults, cells) == []
    assert f'output-file: {Path(html_name(name)).name}\n' in source(cells[0])


@pytest.mark.long
def test_public_names_stand_on_user_pages(pages):
    "With the meaning of each argument; and so do the methods that this package adds to fastai's classes"
    texts = []
    for name in user_pages: texts += checks.prose(pages[name])
    text = '\n'.join(texts)
    described = set(re.findall(r'^#+ (?:\[)?([\w.]+)', text, re.M))
    on_module_pages = {'loss_items', 'AccumWarning'}  # the FAQ says what to do with warnings
    assert {*public.__all__} - on_module_pages <= described
    assert {f.__qualname__ for f in own_functions(Recorder)} <= {'plot_accum_bs', 'Recorder.plot_accum_bs'}
    assert 'Recorder.plot_accum_bs' in described
    arguments = re.findall(r'^\| (?:\*\*)?\w+.*', text, re.M)
    assert len(arguments) > 25


@pytest.mark.long
def test_pages_are_short(pages):
    counts = {name: checks.words(pages[name]) for name in user_pages}
    readme = checks.words([md((root/'README.md').read_text())])
    assert 5_000 < sum(counts.values()) <= 11_500, counts
    assert 300 < readme <= 505


@pytest.mark.long
@each_page
def test_links_lead_to_what_is_there(pages, proc, name):
    files = {o.relative_to(proc).as_posix() for o in proc.rglob('*') if o.is_file()}
    assert list(checks.link_faults(name, pages, files)) == []


# The site

def test_the_sidebar_has_every_page_once():
    assert list(checks.site_faults(site['website'], names)) == []


@pytest.mark.long
def test_files_of_the_site_are_there(proc):
    website = site['website']
    html = site['format']['html']
    image = website['open-graph']['image']
    paths = [website['favicon'], image, website['twitter-card']['image'], html['css'], html['include-after-body']]
    paths += site['project']['resources']
    paths += site['metadata-files']
    for path in paths: assert (proc/path.lstrip('/')).is_file(), path
    assert (proc/image.lstrip('/')).stat().st_size < 100_000


def test_links_to_the_source_lead_there():
    "nbdev adds repo-url and repo-branch"
    website = site['website']
    assert 'source' in website['repo-actions']
    assert (root/website['repo-subdir']/'index.ipynb').is_file()


def workflow_faults(*paths):
    "Returns what GitHub would refuse; the schema comes with check-jsonschema"
    check = [sys.executable, '-m', 'check_jsonschema', '--builtin-schema', 'vendor.github-workflows']
    command = [*check, *map(str, paths)]
    out = subprocess.run(command, capture_output=True, text=True)
    return out.stdout+out.stderr if out.returncode else ''


def test_workflows_are_valid():
    "Actions of others are named by a commit; our own are of the same commit"
    paths = sorted((root/'.github/workflows').glob('*.y*ml'))
    assert len(paths) > 1
    assert workflow_faults(*paths) == ''
    for path in paths:
        uses = re.findall(r'uses: (\S+)', path.read_text())
        assert uses
        for o in uses:
            assert re.search(r'@[0-9a-f]{40}$', o) or (root/o).is_file()


# The checks find faults

title_cell = md('# T\n\n> promise')
colab = code('#| hide\n#| eval: false\n! [ -e /content ] && pip install x')


@pytest.mark.parametrize('name,cells', {
    'no promise': ('a.ipynb', [md('# T'), md(badge('a.ipynb')), colab]),
    'wrong badge': ('guides/a.ipynb', [title_cell, md(badge('a.ipynb')), colab]),
    'shown install': ('a.ipynb', [title_cell, md(badge('a.ipynb')), code('#| eval: false\n! pip install x')]),
    'wrong module': ('01_a.ipynb', [
        title_cell, md(badge('01_a.ipynb')), code('#| default_exp b'), colab, code('#| export\nx = 1')]),
}.values())
def test_faults_of_a_head_are_found(name, cells):
    assert len(list(checks.head_faults(cells, name))) == 1


@pytest.mark.parametrize('text', [
    '#| hide\n#| echo: false\n1',
    '#| hide\n#| fig-alt: "x"\n1',
    '1\n#| echo: false',
    '\n#| echo: false\n1',
    '#| fig-atl: "x"\n1',
    '#| echo: false\n#| echo: true\n1'])
def test_faults_of_directives_are_found(text):
    assert list(checks.directive_faults(code(text)))


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
    assert len(list(checks.reading_faults([title_cell, md(text)]))) == n


@pytest.mark.parametrize('diff,n', {
    '-a = f(1)\n+a = f(2,\n+    b)\n c = a': 0,
    '-a = f(1)\n+a = f(2,\n c = a': 1,
    '-a = 1\nb = 2': 1}.items())
def test_faults_of_a_diff_are_found(diff, n):
    text = md(f'Change:\n\n```diff\n{diff}\n```\n\nIt runs.')
    assert len(list(checks.diff_faults([text]))) == n


@pytest.mark.parametrize('contents,fault', [
    (['a.ipynb'], 'b.ipynb is not in the sidebar'),
    (['a.ipynb', 'b.ipynb', 'c.ipynb'], 'c.ipynb is in the sidebar or the navbar, and no page'),
    ([dict(section='S', contents=['a.ipynb', dict(text='B', href='b.ipynb')]), 'a.ipynb'],
     'a.ipynb is in the sidebar twice')])
def test_faults_of_the_sidebar_are_found(contents, fault):
    website = dict(sidebar=dict(contents=contents), navbar={})
    assert list(checks.site_faults(website, ['a.ipynb', 'b.ipynb'])) == [fault]
