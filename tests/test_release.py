"""What PyPI gets: an sdist, and a wheel made from it. Building and installing takes a minute and a network, so it has a step of its own in
`.ci/run`: `pytest -q -m release`"""
import os, re, subprocess, sys, sysconfig, tarfile, zipfile
from pathlib import Path

import pytest

from pages import copy_repository, repository_files, root

pytestmark = pytest.mark.release

def run(*command, cwd, **env):
    "What `command` prints"
    out = subprocess.run([str(o) for o in command], cwd=cwd, env={**os.environ, **env}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert out.returncode == 0, out.stdout[-3000:]
    return out.stdout

@pytest.fixture(scope='module')
def release(tmp_path_factory):
    "A folder with the sdist, the wheel, in `direct` a wheel made without the sdist, and `build.log`"
    there = tmp_path_factory.mktemp('release')
    source = copy_repository(there/'source')
    for name in 'nbs/nbdev.yml','nbs/.ipynb_checkpoints/a.ipynb','tests/__pycache__/a.pyc','benchmarks/time.png':  # what our commands leave there
        (source/name).parent.mkdir(exist_ok=True)
        (source/name).touch()
    build = sys.executable,'-m','build',source,'--outdir'
    log = run(*build, there, cwd=there) + run(*build, there/'direct', '--wheel', cwd=there)
    (there/'build.log').write_text(log)
    return there

@pytest.fixture(scope='module')
def sdist(release):
    [path] = release.glob('*.tar.gz')
    return path

@pytest.fixture(scope='module')
def unpacked(sdist, tmp_path_factory):
    "The folder in the sdist"
    there = tmp_path_factory.mktemp('sdist')
    with tarfile.open(sdist) as f: f.extractall(there, filter='data')
    [folder] = there.iterdir()
    return folder

def contents(folder):
    "The files of the wheel in `folder`, a dict of name to bytes"
    [wheel] = folder.glob('*.whl')
    with zipfile.ZipFile(wheel) as f: return {o:f.read(o) for o in f.namelist()}

def test_sdist_is_the_repository(unpacked):
    "All of it, so whoever packages it can run the tests, and nothing that git ignores"
    here,there = set(repository_files()),{o.relative_to(unpacked).as_posix():o for o in unpacked.rglob('*') if not o.is_dir()}
    assert {o for o in there if not o.startswith('fastxtend_accum.egg-info/')} - {'PKG-INFO', 'setup.cfg'} == here
    assert 'settings.ini' in here and all(not there[o].is_symlink() and there[o].read_bytes() == (root/o).read_bytes() for o in here)

def test_wheel_is_the_package(release):
    files = contents(release)
    package = {o for o in repository_files() if o.startswith('fastxtend_accum/')}
    assert 'fastxtend_accum/__main__.py' in package and {o for o in files if not o.startswith('fastxtend_accum-')} == package
    assert any(o.endswith('licenses/LICENSE') for o in files)

def test_wheel_does_not_need_the_repository(release):
    "The sdist gives the same wheel, metadata included"
    assert contents(release) == contents(release/'direct')

def test_nothing_is_deprecated(release):
    log = (release/'build.log').read_text()
    assert 'Successfully built' in log and re.findall(r'.*deprecat.*', log, re.I) == []

def test_pypi_takes_it(release, sdist):
    assert run(sys.executable, '-m', 'twine', 'check', '--strict', sdist, *release.glob('*.whl'), cwd=release).count('PASSED') == 2
    [metadata] = (v.decode() for k,v in contents(release).items() if k.endswith('/METADATA'))
    assert 'License-Expression: Apache-2.0\n' in metadata
    assert dict(re.findall('^Project-URL: (.+), (.+)$', metadata, re.M)).keys() == {'Documentation', 'Changelog', 'Issues', 'Repository'}

def test_sdist_installs_and_runs(sdist, tmp_path):
    "In a new environment, to which this one then lends the requirements: it is imported from there, the demo runs in an empty folder"
    empty,python = tmp_path/'empty',tmp_path/'env/bin/python'
    empty.mkdir()
    run(sys.executable, '-m', 'venv', tmp_path/'env', cwd=empty)
    [site] = (tmp_path/'env').glob('lib/python3*/site-packages')
    run(python, '-m', 'pip', 'install', '-q', '--no-deps', sdist, cwd=empty, PYTHONPATH='')
    (site/'rest.pth').write_text(f'import site; site.addsitedir({sysconfig.get_path("purelib")!r})')
    said = run(python, '-c', 'import fastxtend_accum.all as o; print(o.__file__)', cwd=empty, PYTHONPATH='')
    assert said.splitlines()[-1] == str(site/'fastxtend_accum/all.py')
    said = run(python, '-m', 'fastxtend_accum', cwd=empty, PYTHONPATH='', MPLBACKEND='agg')
    assert 'largest difference of a weight between 16 x 32 and batches of 512' in said and (empty/'accumulation.png').stat().st_size > 10_000

def test_tests_run_from_the_sdist(unpacked):
    "All find their helpers, and those of the project and the pages the files that they look at"
    pytest_ = sys.executable,'-m','pytest','-q'
    tests = {o.name for o in (root/'tests').glob('test_*.py')}
    said = run(*pytest_, '--collect-only', cwd=unpacked, PYTHONPATH='')
    assert {Path(o).name for o in re.findall(r'^(\S+\.py)::', said, re.M)} == tests - {'test_release.py', 'test_gpu.py'}  # all of their tests have a mark
    run(*pytest_, 'tests/test_project.py', 'tests/test_pages.py', cwd=unpacked, PYTHONPATH='')
