"The repository holds together: README and home page, one place for each fact"
import re, subprocess

from pages import *

def test_readme_is_the_home_page():
    import make_readme
    text,pictures = make_readme.readme()
    assert (root/'README.md').read_text() == text
    assert pictures and all((root/path).read_bytes() == data for path,data in pictures.items())

def test_readme_has_the_two_commands():
    commands = re.findall(r'^pip install .*$', (root/'README.md').read_text(), re.M)
    assert commands == ['pip install -e . && python -m fastxtend_accum', "pip install -e '.[dev]' && nbdev-test && pytest -q"]

def test_home_of_the_repository_stands_in_one_place():
    "And in the badges and the site's GitHub sign, which must be what follows from it"
    files = subprocess.run(['git', 'ls-files'], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    written = [f for f in files if not f.startswith('fastxtend_accum/')]  # generated: nbdev derives their links from pyproject.toml
    repeats = {page_name(o):badge(page_name(o)) for o in notebooks} | {'_quarto.yml':f'href: {cfg.git_url},'}
    def text(f):
        name = 'index.ipynb' if f == 'README.md' else f.removeprefix('nbs/')
        return (root/f).read_text(errors='ignore').replace(repeats.get(name, '\0'), '', 1)
    assert [f for f in written if cfg.user in text(f)] == ['pyproject.toml']

def test_docs_configuration_is_one_file():
    assert (root/'nbs/_quarto.yml').is_symlink() and (root/'nbs/_quarto.yml').resolve() == root/'_quarto.yml'

def test_version_is_that_of_the_settings():
    import fastxtend_accum
    assert f'version = {fastxtend_accum.__version__}\n' in (root/'settings.ini').read_text()
