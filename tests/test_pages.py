"Every page as far as it can be checked without Quarto; each check is first seen to find a fault"
import inspect, json, subprocess, sys
from pathlib import Path

import pytest, yaml
from fastai.learner import Learner, Recorder
from fastcore.docments import docments

import fastxtend_accum.all as public

from pages import *

names = [page_name(o) for o in notebooks]
site = yaml.safe_load((root/'_quarto.yml').read_text())

def faults(check, cells): return [f'{c.get("id")}: {o}' for c in cells for o in check(c)]
def md(text): return dict(cell_type='markdown', source=text)
def code(text, *outputs): return dict(cell_type='code', source=text, outputs=list(outputs))
def shown(**data): return dict(output_type='display_data', data=data)
png = shown(**{'image/png':'', 'text/plain':'<Figure>'})

# Each page

@pytest.mark.parametrize('name', names)
def test_head(name): assert list(head_faults(read(root/'nbs'/name), name)) == []

@pytest.mark.parametrize('name', names)
def test_cells(name):
    cells = read(root/'nbs'/name)
    ids = [c.get('id') for c in cells]
    assert None not in ids and len(ids) == len(set(ids))
    assert (root/'nbs'/name).stat().st_size < 500_000
    exported = [source(c) for c in cells if c['cell_type'] == 'code' and source(c).startswith('#| export')]
    assert max((len(o.splitlines()) for o in exported), default=0) <= 45

@pytest.mark.parametrize('name', names)
def test_directives(name): assert faults(directive_faults, read(root/'nbs'/name)) == []

@pytest.mark.parametrize('name', names)
def test_outputs(name): assert faults(output_faults, read(root/'nbs'/name)) == []

@pytest.mark.parametrize('name', names)
def test_pictures_have_a_text(name): assert faults(picture_faults, read(root/'nbs'/name)) == []

@pytest.mark.parametrize('name', names)
def test_needs_no_developers_tools(name):
    "In Colab there are the package and its extras loggers and examples only"
    text = '\n'.join(source(c) for c in read(root/'nbs'/name) if c['cell_type'] == 'code')
    assert not re.search(r'^\s*(import|from) (nbdev|pytest|hypothesis|nbconvert|accelerate|fastxtend)\b', text, re.M)

# Pages for users

user_pages = [o for o in names if is_for_users(o)]
sources = {o:read(root/'nbs'/o) for o in names}

@pytest.mark.parametrize('name', user_pages)
def test_reading(name): assert list(reading_faults(sources[name])) == []

@pytest.mark.parametrize('name', user_pages)
def test_one_name_a_page(name): assert list(name_faults(name, sources)) == []

def test_titles_differ():
    titles = [title(sources[o]) for o in names]
    assert sorted(titles) == sorted(set(titles))

@pytest.mark.parametrize('name', user_pages)
def test_the_sidebar_takes_the_title(name):
    "Entries are paths, without a text of their own"
    assert name in listed_by_path(site['website']['sidebar']['contents'])

def listed_by_path(contents): return [o for c in contents for o in ([c] if isinstance(c, str) else listed_by_path(c.get('contents', [])))]

def ours(kind): return [f for f in vars(kind).values() if inspect.isfunction(f) and f.__module__.startswith('fastxtend_accum')]

@pytest.mark.parametrize('f', [*[getattr(public, o) for o in public.__all__], *ours(Learner), *ours(Recorder)], ids=lambda f: getattr(f, '__name__', 'value'))
def test_every_argument_says_what_it_means(f): assert undocumented(f) == []

def undocumented(f):
    "Arguments of a function or class without a comment"
    if not (inspect.isfunction(f) or inspect.isclass(f)): return []
    comments,several = docments(f, returns=False),(inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    params = inspect.signature(f.__init__ if inspect.isclass(f) else f).parameters
    return [k for k,p in params.items() if k != 'self' and p.kind not in several and not comments.get(k)]

def test_undocumented_arguments_are_found():
    def f(a, # What it is
          b): pass
    class C:
        def __init__(self, a, # What it is
                     b): pass
    assert undocumented(f) == undocumented(C) == ['b']

def test_figures_of_other_libraries_are_those_of_their_tests():
    results = json.loads((root/'tests/libraries/results.json').read_text())
    shown = ''.join(''.join(o['data'].get('text/html', '')) for c in sources['guides/05_evidence.ipynb'] for o in c.get('outputs', []) if 'data' in o)
    for library,entry in results.items():
        assert (root/f'tests/libraries/test_{library.lower().replace("-", "_")}.py').is_file() and library in shown and f"{max(entry['differences'].values()):.1e}" in shown

# What nbdev makes of the pages, all that comes before Quarto

@pytest.fixture(scope='module')
def built(tmp_path_factory):
    "The folder that nbdev gives to Quarto, and what nbdev had to say"
    here = copy_repository(tmp_path_factory.mktemp('site'))
    script = '''
from nbdev.quarto import refresh_quarto_yml, nbdev_sidebar
from nbdev.serve import proc_nbs
refresh_quarto_yml(); nbdev_sidebar.__wrapped__()
print(proc_nbs('nbs', n_workers=0))'''
    out = subprocess.run([sys.executable, '-c', script], cwd=here, capture_output=True, text=True, timeout=1800)
    assert out.returncode == 0, out.stderr[-2000:]
    return here/'_proc',out.stderr

@pytest.fixture(scope='module')
def proc(built): return built[0]

@pytest.fixture(scope='module')
def pages(proc):
    res = {o.relative_to(proc).as_posix():read(o) for o in proc.rglob('*.ipynb')}
    assert sorted(res) == sorted(names)
    return res

def test_nothing_runs_beside_an_import(built):
    "The docs build runs cells with imports: there must be nothing else in them"
    assert re.findall(r'Found cells containing imports.*?\n---\n(.*?)\n---\n', built[1], re.S) == []

@pytest.mark.parametrize('name', names)
def test_processed(pages, name):
    cells = pages[name]
    assert faults(output_faults, cells) == faults(picture_faults, cells) == faults(directive_faults, cells) == []
    assert f'output-file: {Path(html_name(name)).name}\n' in source(cells[0])

def test_api(pages):
    "All public names stand on a user page, with the meaning of each argument, and so do the methods that this package adds to classes"
    text = '\n'.join(o for name,cells in pages.items() if is_for_users(name) for o in prose(cells))
    shown = re.findall(r'^#+ (?:\[)?([\w.]+)', text, re.M)
    assert {*public.__all__} - {'loss_items', 'hidden_state'} <= {*shown}  # these two are on pages of modules, where rules are registered
    assert {f'{k.__name__}.{f.__name__}' for k in (Learner,Recorder) for f in ours(k) if f.__name__ in vars(k)} <= {*shown}
    lines = re.findall(r'^\| (?:\*\*)?\w+.*', text, re.M)
    assert len(lines) > 25

def test_pages_are_short(pages):
    user = {o:words(pages[o]) for o in user_pages}
    assert 5_000 < sum(user.values()) <= 12_000, user
    assert 300 < words([md((root/'README.md').read_text())]) <= 550

@pytest.mark.parametrize('name', names)
def test_one_word_for_one_thing(name):
    assert list(word_faults('\n'.join(prose(sources[name])))) == []

@pytest.mark.parametrize('path', sorted((root/cfg.lib_name).rglob('*.py')), ids=lambda o: o.stem)
def test_one_word_for_one_thing_in_code(path): assert list(word_faults(path.read_text())) == []

@pytest.mark.parametrize('name', names)
def test_links(pages, proc, name):
    files = {o.relative_to(proc).as_posix() for o in proc.rglob('*') if o.is_file()}
    assert list(link_faults(name, pages, files)) == []

def test_every_page_but_the_last_leads_on(pages):
    assert [o for o in names if o != names[-1] and not links(pages[o])] == []

# The site

def test_sidebar_has_every_page_once(): assert list(site_faults(site['website'], names)) == []

def test_files_of_the_site(proc):
    web,html = site['website'],site['format']['html']
    for path in web['favicon'], web['open-graph']['image'], web['twitter-card']['image'], html['css'], html['include-after-body'], *site['project']['resources'], \
                *site['metadata-files']:
        assert (proc/path.lstrip('/')).is_file(), path
    assert (proc/web['open-graph']['image'].lstrip('/')).stat().st_size < 100_000

def test_links_to_the_source_lead_there():
    web = site['website']
    assert 'source' in web['repo-actions'] and (root/web['repo-subdir']/'index.ipynb').is_file()  # nbdev adds repo-url and repo-branch

def workflow_faults(*paths):
    "What GitHub would refuse; the schema comes with check-jsonschema"
    command = [sys.executable, '-m', 'check_jsonschema', '--builtin-schema', 'vendor.github-workflows', *map(str, paths)]
    out = subprocess.run(command, capture_output=True, text=True)
    return out.stdout+out.stderr if out.returncode else ''

def test_workflows():
    paths = sorted((root/'.github/workflows').glob('*.y*ml'))
    assert len(paths) > 1 and workflow_faults(*paths) == ''
    for path in paths:
        uses = re.findall(r'uses: (\S+)', path.read_text())
        assert uses and all(re.search(r'@[0-9a-f]{40}$', o) or (root/o).is_file() for o in uses)  # ours are of the same commit

# The checks find faults

title_cell,colab = md('# T\n\n> promise'),code('#| hide\n#| eval: false\n! [ -e /content ] && pip install x')

@pytest.mark.parametrize('name,cells', {
    'no promise':   ('a.ipynb', [md('# T'), md(badge('a.ipynb')), colab]),
    'no badge':     ('a.ipynb', [title_cell, colab, code('1')]),
    'wrong badge':  ('guides/a.ipynb', [title_cell, md(badge('a.ipynb')), colab]),
    'no install':   ('a.ipynb', [title_cell, md(badge('a.ipynb')), code('1'), code('2'), colab]),
    'shown install':('a.ipynb', [title_cell, md(badge('a.ipynb')), code('#| eval: false\n! pip install x')]),
    'wrong module': ('01_a.ipynb', [title_cell, md(badge('01_a.ipynb')), code('#| default_exp b'), colab, code('#| export\nx = 1')]),
}.values())
def test_head_faults(name, cells): assert len(list(head_faults(cells, name))) == 1

def test_a_head_without_a_fault():
    assert not list(head_faults([title_cell, md(badge('01_a.ipynb')), code('#| default_exp a'), colab, code('#| export\nx = 1')], '01_a.ipynb'))

@pytest.mark.parametrize('text', ['#| hide\n#| echo: false\n1', '#| hide\n#| fig-alt: "x"\n1', '1\n#| echo: false', '\n#| echo: false\n1',
                                  '#| fig-atl: "x"\n1', '#| echo: false\n#| echo: true\n1', '#| exprot\n1', '#| fig-alt: "a" b\n1',
                                  '# | echo: false\n1', '#|\n1', '#| echo:false\n1'])
def test_directive_faults(text): assert list(directive_faults(code(text)))

@pytest.mark.parametrize('text', ['1', '#| export\ndef f(): pass', '#| echo: false\n#| fig-alt: "a: b, \'c\'"\n1', '#| hide\n#| eval: false\n1'])
def test_directives_without_a_fault(text): assert not list(directive_faults(code(text)))

@pytest.mark.parametrize('output', [
    dict(output_type='error', ename='ValueError', evalue='', traceback=[]), dict(output_type='stream', name='stderr', text='hm'),
    dict(output_type='stream', name='stdout', text='Traceback (most recent call last):'), shown(**{'text/plain':'UserWarning: hm'}),
    shown(**{'text/html':'<b>FutureWarning</b>'}), dict(output_type='stream', name='stdout', text=['/home/me/run.py'])])
def test_output_faults(output): assert len(list(output_faults(code('1', output)))) == 1

def test_outputs_without_a_fault():
    assert not list(output_faults(code('1', png, shown(**{'text/plain':'warned once, at https://x.org/home/'}))))

@pytest.mark.parametrize('cell', [code('1', png), code('#| fig-alt: ""\n1', png), code('#| fig-alt: "two pictures and only one text"\n1', png, png),
                                  code('1\n#| fig-alt: "not at the top, so it is not for Quarto"', png),
                                  code('#| fig-alt: "a picture that was not stored"\n1'), md('![](x.png)'), md('<img src="x.png">'), md('<img src="x.png" alt="">')])
def test_picture_faults(cell): assert len(list(picture_faults(cell))) == 1

@pytest.mark.parametrize('cell', [code('1'), code('#| fig-alt: "a curve that falls, and then rises"\n1', png), md('![a](x.png) <img alt="b" src="c">'),
                                  code('#| fig-alt: ["the first of two curves", "the second of two curves"]\n1', png, png)])
def test_pictures_without_a_fault(cell): assert not list(picture_faults(cell))

home = f'{cfg.doc_host}{cfg.doc_baseurl}'
made_up = {'index.ipynb': [md('## A `code` heading, and more\n\n```sh\n## no heading\n```')],
           'guides/01_b.ipynb': [code('show_doc(f)', shown(**{'text/markdown':'### Class.f\n\nIt does.'}))]}

@pytest.mark.parametrize('link,n', {
    'guides/01_b.ipynb': 0, '#a-code-heading-and-more': 0, 'guides/01_b.ipynb#class.f': 0, f'{home}/guides/b.html#class.f': 0, f'{home}/': 0,
    'images/a.svg': 0, 'https://pytorch.org/': 0, '01_b.ipynb': 1, '#no-heading': 1, '#a-code-heading': 1, 'guides/01_b.ipynb#f': 1,
    f'{home}/b.html': 1, f'{home}/guides/b.html#f': 1, 'images/b.svg': 1}.items())
def test_link_faults(link, n):
    pages = {**made_up, 'index.ipynb': [*made_up['index.ipynb'], md(f'Read [this]({link}), not `[that](nowhere)`.')]}
    assert len(list(link_faults('index.ipynb', pages, {'images/a.svg'}))) == n

def test_links_start_from_the_folder_of_the_page():
    pages = {**made_up, 'guides/02_c.ipynb': [md('[up](../index.ipynb) [beside](01_b.ipynb) [wrong](index.ipynb)')]}
    assert list(link_faults('guides/02_c.ipynb', pages)) == ['index.ipynb: no such page']

@pytest.mark.parametrize('text,n', {
    'A [link](a.ipynb).': 0, 'A [`link`](a.ipynb).': 1, 'A [`link` of code](a.ipynb).': 1, 'In code: `[`x`](y)`.': 1, 'Next: [b](b.ipynb)': 1,
    'A table:\n\n| a |\n|---|': 0, 'A table:\n| a |\n|---|': 1, 'A list:\n\n- a\n  b\n- c': 0, 'A list:\n- a': 1,
    'What to do next: read.': 0, f"```python\n{'x'*75}\n```": 0, f"```python\n{'x'*76}\n```": 1, f"```python\nx\n```\n```\n{'x'*76}\n```": 0}.items())
def test_reading_faults(text, n): assert len(list(reading_faults([title_cell, md(text)]))) == n

@pytest.mark.parametrize('diff,n', {'-a = f(1)\n+a = f(2,\n+    b)\n c = a': 0, '-a = f(1)\n+a = f(2,\n c = a': 1, '-a = 1\nb = 2': 1}.items())
def test_diff_faults(diff, n): assert len(list(diff_faults([md(f'Change:\n\n```diff\n{diff}\n```\n\nIt runs.')]))) == n

def test_the_first_block_may_be_a_cell():
    wide = 'x'*76
    assert len(list(reading_faults([title_cell, code(wide)]))) == 1
    assert not list(reading_faults([title_cell, code(f'#| hide\n{wide}'), code(f'#| echo: false\n{wide}'), code('#| fig-alt: "a long text for a picture, not code"\nx'), code(wide)]))

@pytest.mark.parametrize('link,n', {
    '[T](01_b.ipynb)': 0, '[Other](01_b.ipynb)': 1, '[the other](01_b.ipynb)': 0, '[A `code` part](01_b.ipynb)': 1, '[Part one](01_b.ipynb#part-one)': 0,
    '[Part two](01_b.ipynb#part-one)': 1, '[Other](#part-one)': 0, '[T](#part-one)': 0, '[Other](https://x.org/a.ipynb)': 0,
    '[Other](c.ipynb)': 0, '![Picture](01_b.ipynb)': 0, '`[Other](01_b.ipynb)`': 1}.items())
def test_name_faults(link, n):
    pages = {'guides/01_b.ipynb': [title_cell, md('## Part one')], 'guides/a.ipynb': [title_cell, md(f'## Part one\n\nSee {link}.')]}
    assert len(list(name_faults('guides/a.ipynb', pages))) == n

@pytest.mark.parametrize('contents,said', [
    (['a.ipynb'], 'b.ipynb is not in the sidebar'), (['a.ipynb', 'b.ipynb', 'c.ipynb'], 'c.ipynb is in the sidebar or the navbar, and no page'),
    ([dict(section='S', contents=['a.ipynb', dict(text='B', href='b.ipynb')]), 'a.ipynb'], 'a.ipynb is in the sidebar twice')])
def test_site_faults(contents, said):
    assert list(site_faults(dict(sidebar=dict(contents=contents), navbar={}), ['a.ipynb', 'b.ipynb'])) == [said]

def test_workflow_faults(tmp_path):
    (tmp_path/'w.yml').write_text('on: push\njobs: {a: {runs-on: x, steps: [{usse: actions/checkout}]}}')
    assert 'usse' in workflow_faults(tmp_path/'w.yml')
