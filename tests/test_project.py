"The repository holds together: README and home page, what PyPI shows, one place for each fact"
import json
import re
import runpy
import sys
from configparser import ConfigParser
from types import SimpleNamespace

import pytest
import yaml

import make_readme
from cells import root
from pages import cfg

ini = ConfigParser()
ini.read(root/'settings.ini', encoding='utf-8')
settings = ini['DEFAULT']


def text_of(name):
    return (root/name).read_text(encoding='utf-8')


# README

def test_readme_is_the_home_page():
    text, pictures = make_readme.readme()
    assert text_of('README.md') == text
    assert pictures
    for path, data in pictures.items(): assert (root/path).read_bytes() == data


@pytest.mark.parametrize('key,form', [('whole', '.0e'), ('entries', 'g')])
def test_the_table_of_other_callbacks_is_measured(key, form):
    found = json.loads(text_of('benchmarks/results.json'))['comparison']['callbacks']
    ours, fastais = [format(found[name][key], form) for name in ('ours', 'fastai')]
    assert found['fastai'] == found['fastxtend']
    assert f' | {ours} | {fastais} |\n' in text_of('README.md')


# What PyPI shows; `pytest -m release` builds it

def test_links_on_pypi_lead_into_the_web(monkeypatch):
    "Pictures to the file itself, and other links of README to their page on GitHub"
    said = {}
    fake = SimpleNamespace(setup=said.update, find_packages=lambda **kwargs: [])
    monkeypatch.setitem(sys.modules, 'setuptools', fake)
    runpy.run_path(str(root/'setup.py'))
    text = said['long_description']
    blob, raw = [f"{cfg.git_url}/{kind}/v{settings['version']}/" for kind in ('blob', 'raw')]
    links = re.findall(r'\]\(([^()\s]+)\)', text)
    for o in links:
        assert o.startswith('https://')
        assert o.endswith('.png') == o.startswith(raw), o
    assert f'{blob}LICENSE' in links
    assert text.replace(blob, '').replace(raw, '') == text_of('README.md')


# One place for each fact

def test_pythons_are_those_that_are_tested():
    workflow = yaml.safe_load(text_of('.github/workflows/test.yml'))
    tested = workflow['jobs']['test']['strategy']['matrix']['python']
    assert settings['pythons'].split() == tested
    assert f'Python {tested[0]} to {tested[-1]}' in text_of('README.md')


def test_readme_says_which_versions_are_the_oldest():
    oldest = dict(re.findall(r'(\w+)>=([\d.]+)', settings['requirements']))
    assert f'fastai {oldest["fastai"]}+, PyTorch {oldest["torch"]}+' in text_of('README.md')


def test_the_version_is_that_of_the_settings():
    heading = re.search(r'^## (.*)', text_of('CHANGELOG.md'), re.M)[1]
    assert settings['version'] in heading.split()
