"The repository holds together: README and home page, notebooks and the rules for them, one place for each fact"
import json, re, shutil, subprocess, sys
from pathlib import Path

import pytest

root = Path(__file__).parent.parent
notebooks = sorted((root/'nbs').rglob('*.ipynb'))

def test_readme_is_the_home_page():
    import make_readme
    text,pictures = make_readme.readme()
    assert (root/'README.md').read_text() == text
    assert pictures and all((root/path).read_bytes() == data for path,data in pictures.items())

def test_readme_has_the_two_commands():
    commands = re.findall(r'^pip install .*$', (root/'README.md').read_text(), re.M)
    assert commands == ['pip install -e . && python -m fastxtend_accum', "pip install -e '.[dev]' && nbdev-test && pytest -q"]

def test_home_of_the_repository_stands_in_one_place():
    files = subprocess.run(['git', 'ls-files'], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    written = [f for f in files if not f.startswith('fastxtend_accum/')]  # generated: nbdev derives their links from pyproject.toml
    assert [f for f in written if 'fastxtend-accum' in (root/f).read_text(errors='ignore') and f != 'tests/test_project.py'] == ['pyproject.toml']

def test_docs_configuration_is_one_file():
    assert (root/'nbs/_quarto.yml').is_symlink() and (root/'nbs/_quarto.yml').resolve() == root/'_quarto.yml'

@pytest.mark.parametrize('nb', notebooks, ids=lambda p: p.stem)
def test_notebook(nb):
    "Cell ids, a title with a promise, the module of the same name, outputs without errors or warnings, a modest size"
    assert nb.stat().st_size < 500_000
    cells = json.loads(nb.read_text())['cells']
    assert all('id' in c for c in cells) and len({c['id'] for c in cells}) == len(cells)
    assert re.match(r'# \w[\w ]*\n\n> .+', ''.join(cells[0]['source']))
    name = re.sub(r'^\d+_', '', nb.stem)
    code = [''.join(c['source']) for c in cells if c['cell_type'] == 'code']
    if '#| export' in '\n'.join(code): assert f'#| default_exp {name}' in code[0] and (root/'fastxtend_accum'/f'{name}.py').exists()
    assert any('pip install' in c and '#| eval: false' in c for c in code[:2])  # Colab
    for c in cells:
        out = json.dumps(c.get('outputs', []))
        assert 'Traceback' not in out and 'Warning' not in out and '"stderr"' not in out
        source = ''.join(c['source'])
        for target in re.findall(r'\]\(([\w./]+\.ipynb)\)', source): assert (nb.parent/target).exists()
        if c['cell_type'] == 'code' and source.startswith('#| export'): assert len(source.splitlines()) <= 40

def test_version_is_that_of_the_settings():
    import fastxtend_accum
    assert f'version = {fastxtend_accum.__version__}\n' in (root/'settings.ini').read_text()

def test_nbdev_makes_a_page_of_every_notebook(tmp_path):
    "All that comes before Quarto: what nbdev makes of each notebook, with the tables of parameters filled in"
    here = Path(shutil.copytree(root, tmp_path/'copy', symlinks=True, ignore=shutil.ignore_patterns('.git', '_proc', '_docs')))
    script = '''
from nbdev.quarto import refresh_quarto_yml, nbdev_sidebar
from nbdev.serve import proc_nbs
refresh_quarto_yml(); nbdev_sidebar.__wrapped__()
print(proc_nbs('nbs', n_workers=0))'''
    out = subprocess.run([sys.executable, '-c', script], cwd=here, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr[-2000:]
    pages = {p.stem:json.loads(p.read_text())['cells'] for p in (here/'_proc').rglob('*.ipynb')}
    assert set(pages) == {nb.stem for nb in notebooks}
    assert not [name for name,cells in pages.items() for c in cells for o in c.get('outputs', []) if o.get('name') == 'stderr']
    shown = [o for cells in pages.values() for c in cells if 'show_doc(' in ''.join(c['source']) for o in c['outputs']]
    assert len(shown) > 30 and all('text/markdown' in o['data'] for o in shown)

@pytest.mark.parametrize('nb', notebooks, ids=lambda p: p.stem)
def test_notebook_needs_no_developers_tools(nb):
    "In Colab there are the package and its loggers only"
    code = [''.join(c['source']) for c in json.loads(nb.read_text())['cells'] if c['cell_type'] == 'code']
    assert not re.search(r'^\s*(import|from) (nbdev|pytest|hypothesis|nbconvert)', '\n'.join(code), re.M)
