"The repository holds together: README and home page, what PyPI shows, one place for each fact"
import json
import re
import runpy
import sys
from configparser import ConfigParser
from types import SimpleNamespace

import mistune
import pytest
import yaml

import make_readme
from cells import root
from pages import cfg

ini = ConfigParser()
ini.read(root/'settings.ini', encoding='utf-8')
version = ini['DEFAULT']['version']


def text_of(name):
    return (root/name).read_text(encoding='utf-8')


# README

def test_readme_is_the_home_page():
    text, pictures = make_readme.readme()
    assert text_of('README.md') == text
    assert pictures
    for path, data in pictures.items(): assert (root/path).read_bytes() == data


def test_badges_lead_to_what_is_there():
    badges = re.findall(r'\[!\[([^\]]+)\]\((https://[^)]+)\)\]\(([^)]+)\)', text_of('README.md'))
    names = [o[0] for o in badges]
    assert names == ['Open in Colab', 'tests', 'PyPI', 'Python', 'license', 'docs']
    for _, _, target in badges: assert target.startswith('https://') or (root/target).is_file()
    assert (root/'.github/workflows/test.yml').is_file()
    for o in badges[1][1:]: assert '/workflows/test.yml' in o


def test_readme_has_the_two_commands():
    commands = re.findall(r'^pip install -e .*$', text_of('README.md'), re.M)
    assert commands == ['pip install -e . && python -m fastxtend_accum', "pip install -e '.[dev]' && pytest -q"]


# The figures of README are measured

results = json.loads(text_of('benchmarks/results.json'))


def test_the_table_of_other_callbacks_is_measured():
    found = results['comparison']['callbacks']
    forms = dict(whole='.0e', entries='g')
    rows = re.findall(r'^\| \w[^|]+ \| (\S+) \| (\S+) \|$', text_of('README.md'), re.M)
    assert found['fastai'] == found['fastxtend']
    assert len(rows) == len(forms)
    for (ours, fastais), (key, form) in zip(rows, forms.items()):
        assert ours == format(found['ours'][key], form)
        assert fastais == format(found['fastai'][key], form)


# The address of the repository


def test_links_of_the_project_agree():
    urls = re.findall(r'^\w+ = "(https:.+)"$', text_of('pyproject.toml'), re.M)
    changelog = f'{cfg.git_url}/blob/{cfg.branch}/CHANGELOG.md'
    assert urls == [cfg.git_url, cfg.doc_url, changelog, f'{cfg.git_url}/issues']
    assert (root/'CHANGELOG.md').is_file()


# What PyPI shows; `pytest -m release` builds it

@pytest.fixture
def setup(monkeypatch):
    "Returns what setup.py defines, and in `said` what it tells setuptools"
    said = {}
    fake = SimpleNamespace(setup=said.update, find_packages=lambda **kwargs: [])
    monkeypatch.setitem(sys.modules, 'setuptools', fake)
    return SimpleNamespace(**runpy.run_path(str(root/'setup.py')), said=said)


def test_links_on_pypi_lead_into_the_web(setup):
    "Pictures to the file itself, and other links of README to their page on GitHub"
    text = setup.said['long_description']
    blob = f'{cfg.git_url}/blob/v{version}/'
    raw = f'{cfg.git_url}/raw/v{version}/'
    html = mistune.html(text)
    links = re.findall(r'\bhref="([^"]+)"', html)
    pictures = re.findall(r'\bsrc="([^"]+)"', html)
    files = [o.removeprefix(blob).partition('#')[0] for o in links if o.startswith(blob)]
    shown = [o.removeprefix(raw) for o in pictures if o.startswith(raw)]
    for o in links+pictures: assert o.startswith('https://')
    assert files and shown
    for o in files+shown: assert (root/o).is_file()
    assert text != text_of('README.md')
    assert text.replace(blob, '').replace(raw, '') == text_of('README.md')


def test_pythons_are_those_that_are_tested(setup):
    workflow = yaml.safe_load(text_of('.github/workflows/test.yml'))
    tested = workflow['jobs']['test']['strategy']['matrix']['python']
    classifiers = '\n'.join(setup.said['classifiers'])
    assert re.findall(r'^Programming Language :: Python :: (3\.\d+)$', classifiers, re.M) == tested
    assert setup.said['python_requires'] == f'>={tested[0]}'
    assert f'Python {tested[0]} to {tested[-1]}' in text_of('README.md')


def test_readme_says_which_versions_are_the_oldest():
    oldest = dict(re.findall(r'(\w+)>=([\d.]+)', ini['DEFAULT']['requirements']))
    assert f'fastai {oldest["fastai"]}+, PyTorch {oldest["torch"]}+' in text_of('README.md')


# One place for each fact

def test_the_configuration_of_the_docs_is_one_file():
    "Here by a link, in an sdist by a copy"
    assert (root/'nbs/_quarto.yml').read_bytes() == (root/'_quarto.yml').read_bytes()


def test_the_version_is_that_of_the_settings():
    import fastxtend_accum
    heading = re.search(r'^## (.*)', text_of('CHANGELOG.md'), re.M)[1]
    assert fastxtend_accum.__version__ == version
    assert version in heading.split()
