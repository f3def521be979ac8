"The repository holds together: README and home page, what PyPI shows, one place for each fact"
import ast, json, os, re, runpy, subprocess, sys
from configparser import ConfigParser
from itertools import combinations
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import mistune, pytest, yaml

from pages import *

ini = ConfigParser()
ini.read(root/'settings.ini', encoding='utf-8')
version = ini['DEFAULT']['version']

def test_readme_is_the_home_page():
    import make_readme
    text,pictures = make_readme.readme()
    assert (root/'README.md').read_text() == text
    assert pictures and all((root/path).read_bytes() == data for path,data in pictures.items())

def test_readme_is_for_github():
    "Its viewer of notebooks knows no sections: links to those lead to the site"
    from make_readme import for_github
    text = '[a](guides/04_x.ipynb#b-c) [d](guides/04_x.ipynb)\n\n::: {.callout-note}\n**e** f\n:::\n'
    assert for_github(text, 'https://g.org/') == '[a](https://g.org/guides/x.html#b-c) [d](nbs/guides/04_x.ipynb)\n\n> **e** f\n'
    readme = (root/'README.md').read_text()
    assert not re.search(r'\.ipynb#|:::', readme) and f'{cfg.doc_url}guides/evidence.html#' in readme

def test_badges_lead_to_what_is_there():
    readme = (root/'README.md').read_text()
    badges = re.findall(r'\[!\[([^\]]+)\]\((https://[^)]+)\)\]\(([^)]+)\)', readme)
    assert [o[0] for o in badges] == ['Open in Colab', 'tests', 'PyPI', 'Python', 'license', 'docs']
    assert all(re.match('https://', o[2]) or (root/o[2]).is_file() for o in badges)
    assert (root/'.github/workflows/test.yml').is_file() and all('/workflows/test.yml' in o for o in badges[1][1:])

def test_figures_of_the_home_page_are_measured():
    "The table of other callbacks has what `benchmarks/comparison.py` has found, and the costs those of `results.json`"
    results,text = json.loads((root/'benchmarks/results.json').read_text()),(root/'README.md').read_text()
    found = results['comparison']['callbacks']
    forms = dict(whole='.0e', ragged='.0e', padded='.0%', ones='g', syncs='g', entries='g')
    rows = re.findall(r'^\| \w[^|]+ \| (\S+) \| (\S+) \| (\S+) \|$', text, re.M)
    assert len(rows) == len(forms) and found['fastai'] == found['fastxtend']
    assert rows == [tuple(f'{found[o][what]:{form}}' for o in ('ours', 'fastai', 'own')) for what,form in forms.items()]
    costs = {k:median(a/b for a,b in zip(o['time'], results['costs']['by_opt']['adam']['plain 1']['time'])) for k,o in results['costs']['by_opt']['adam'].items()}
    assert f"{costs['windows 1']-1:.0%} to a step" in text and f"{costs['windows 8']:.0%} of the time of 8 steps" in text

def test_readme_has_the_two_commands():
    commands = re.findall(r'^pip install -e .*$', (root/'README.md').read_text(), re.M)
    assert commands == ['pip install -e . && python -m fastxtend_accum', "pip install -e '.[dev]' && pytest -q"]

def test_ci_leaves_no_test_out():
    "Whatever marks a test has, but those for which a GPU or another library has to be there"
    toml,ci = ((root/o).read_text() for o in ('pyproject.toml', '.ci/run'))
    marks = re.findall(r'"(\w+): ', re.search(r'^markers = \[(.+?)\]$', toml, re.M | re.S)[1])
    here,*others = re.findall(r""" -m ["']?([\w ]+)""", toml[toml.index('addopts'):] + '\n'.join(re.findall('^pytest .*', ci, re.M)))
    assert len(marks) > 3 and len(others) >= 3 and "$command" in ci
    for n in range(len(marks)+1):
        for has in combinations(set(marks) - {'gpu', 'libraries'}, n):
            assert any(eval(o, {}, {m:m in has for m in [*marks, 'hypothesis']}) for o in [here, *others]), f'.ci/run does not run what is marked {has}'

turns = []

@pytest.mark.parametrize('turn', range(2))
def test_one_process_runs_this_file_and_its_environment_stays(turn):
    "W&B leaves the address of its process there, which writes to the folder of the test that has started it: a page did not find its file"
    turns.append(turn)
    assert turns == [*range(turn+1)]
    assert 'LEFT_BY_A_TEST' not in os.environ
    os.environ['LEFT_BY_A_TEST'] = 'here'

# The address of the repository

def test_home_of_the_repository_stands_in_one_place():
    "And in the badges and the site's GitHub sign, which must be what follows from it"
    written = [o for o in repository_files() if not o.startswith('fastxtend_accum/')]  # generated: nbdev derives their links from pyproject.toml
    repeats = {page_name(o):badge(page_name(o)) for o in notebooks} | {'_quarto.yml':f'href: {cfg.git_url},'}
    import make_readme
    def text(name):
        page = 'index.ipynb' if name == 'README.md' else name.removeprefix('nbs/')
        read = (root/name).read_text(errors='ignore').replace(repeats.get(page, '\0'), '', 1).replace(f'{cfg.git_url}/blob/{cfg.branch}/', '')
        return read.replace(make_readme.badges(), '').replace(cfg.doc_url, '') if name == 'README.md' else read
    assert [o for o in written if cfg.user in text(o)] == ['pyproject.toml']

def test_links_of_the_project_agree():
    urls = re.findall(r'^\w+ = "(https:.+)"$', (root/'pyproject.toml').read_text(), re.M)
    assert urls == [cfg.git_url, cfg.doc_url, f'{cfg.git_url}/blob/{cfg.branch}/CHANGELOG.md', f'{cfg.git_url}/issues']
    assert (root/'CHANGELOG.md').is_file()

@pytest.mark.long
def test_another_address_is_one_place_and_one_command(tmp_path):
    "The new one stands wherever the old one did, and nothing is left of that"
    copy_repository(tmp_path)
    def run(*command): subprocess.run([sys.executable, *command], cwd=tmp_path, check=True, capture_output=True)
    def holding(text): return [o for o in tmp_path.rglob('*') if o.is_file() and text in o.read_text(errors='ignore')]
    old,new,toml = holding(cfg.user),cfg.user[::-1],tmp_path/'pyproject.toml'
    toml.write_text(toml.read_text().replace(cfg.git_url, f'https://github.com/{new}/accum').replace(cfg.doc_url, f'https://{new}.github.io/accum/'))
    run('tests/make_links.py')
    assert len(old) > len(notebooks) and sorted(holding(new)) == sorted(old) and holding(cfg.user) == []
    run('-m', 'pytest', '-q', '-n', '0', 'tests/test_project.py', 'tests/test_pages.py', '-k', 'readme_is or agree or head')

# What PyPI shows; `pytest -m release` builds it

@pytest.fixture
def setup(monkeypatch):
    "What setup.py defines, and in `said` what it tells setuptools"
    said = {}
    monkeypatch.setitem(sys.modules, 'setuptools', SimpleNamespace(setup=said.update, find_packages=lambda **kwargs: []))
    return SimpleNamespace(**runpy.run_path(str(root/'setup.py')), said=said)

def test_links_on_pypi(setup):
    "All lead into the web; those to GitHub are README's own, pictures to the file itself, the rest to its page"
    text,readme = setup.said['long_description'],(root/'README.md').read_text()
    blob,raw = f'{cfg.git_url}/blob/v{version}/',f'{cfg.git_url}/raw/v{version}/'
    html = mistune.html(text)
    links,pictures = re.findall(r'\bhref="([^"]+)"', html),re.findall(r'\bsrc="([^"]+)"', html)
    assert all(o.startswith('https://') for o in links+pictures)
    ours,shown = [o for o in links if o.startswith(blob)],[o for o in pictures if o.startswith(raw)]
    assert len(ours) > 5 and all((root/o.removeprefix(blob).partition('#')[0]).is_file() for o in ours)
    assert shown and all((root/o.removeprefix(raw)).is_file() for o in shown)
    assert text != readme and text.replace(blob, '').replace(raw, '') == readme

@pytest.mark.parametrize('text,there', {
    '[a](nbs/index.ipynb)': '[a]({}/blob/v{}/nbs/index.ipynb)', '[a](nbs/index.ipynb#b)': '[a]({}/blob/v{}/nbs/index.ipynb#b)',
    '[![a](nbs/images/card.png)](LICENSE)': '[![a]({0}/raw/v{1}/nbs/images/card.png)]({0}/blob/v{1}/LICENSE)',
    '[a](https://b.org/nbs/index.ipynb)': None, '[a](#nbs)': None, '`f[0](1)`': None, '[a](no/file.md)': None}.items())
def test_absolute_links(setup, text, there):
    assert setup.absolute_links(text) == (there or text).format(cfg.git_url, version)

def test_pythons_are_those_that_are_tested(setup):
    tested = yaml.safe_load((root/'.github/workflows/test.yml').read_text())['jobs']['test']['strategy']['matrix']['python']
    said = [m[1] for o in setup.said['classifiers'] if (m := re.fullmatch(r'Programming Language :: Python :: (3\.\d+)', o))]
    assert said == tested and setup.said['python_requires'] == f'>={tested[0]}'
    assert f'Python {tested[0]} or newer' in (root/'README.md').read_text()

# One place for each fact

def test_docs_configuration_is_one_file():
    "Here by a link, in an sdist by a copy"
    assert (root/'nbs/_quarto.yml').read_bytes() == (root/'_quarto.yml').read_bytes()

def test_version_is_that_of_the_settings():
    import fastxtend_accum
    assert fastxtend_accum.__version__ == version
    assert version in re.search(r'^## (.*)', (root/'CHANGELOG.md').read_text(), re.M)[1].split()
