"""What PyPI gets: an sdist, and a wheel made from it. Building takes a network, so it is a step of its own in
`.ci/run`: `pytest -q -m release`. `pytest -m colab` installs such a wheel"""
import os
import subprocess
import sys
import tarfile
import zipfile

import pytest

from cells import root
from pages import copy_repository, repository_files

pytestmark = pytest.mark.release


def run(*command, cwd, **env):
    "Returns what `command` prints"
    out = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert out.returncode == 0, out.stdout[-3000:]
    return out.stdout


LEFT_BY_COMMANDS = 'nbs/nbdev.yml', 'nbs/.ipynb_checkpoints/a.ipynb', 'tests/__pycache__/a.pyc', 'benchmarks/time.png'


@pytest.fixture(scope='module')
def release(tmp_path_factory):
    "Returns a folder with the sdist and the wheel"
    there = tmp_path_factory.mktemp('release')
    repository = copy_repository(there/'source')
    for name in LEFT_BY_COMMANDS:
        (repository/name).parent.mkdir(exist_ok=True)
        (repository/name).touch()
    run(sys.executable, '-m', 'build', repository, '--outdir', there, cwd=there)
    return there


@pytest.fixture(scope='module')
def unpacked(release, tmp_path_factory):
    "Returns the folder in the sdist"
    there = tmp_path_factory.mktemp('sdist')
    [sdist] = release.glob('*.tar.gz')
    with tarfile.open(sdist) as f: f.extractall(there, filter='data')
    [folder] = there.iterdir()
    return folder


def test_the_sdist_is_the_repository(unpacked):
    "All of it, so that whoever packages it can run the tests, and nothing that git ignores"
    here = set(repository_files())
    files = {o.relative_to(unpacked).as_posix() for o in unpacked.rglob('*') if not o.is_dir()}
    there = {o for o in files if not o.startswith('fastxtend_accum.egg-info/')}
    assert 'settings.ini' in here
    assert there - {'PKG-INFO', 'setup.cfg'} == here
    for name in here: assert (unpacked/name).read_bytes() == (root/name).read_bytes()


def test_the_wheel_is_the_package(release):
    [wheel] = release.glob('*.whl')
    with zipfile.ZipFile(wheel) as f: files = f.namelist()
    package = {o for o in repository_files() if o.startswith('fastxtend_accum/')}
    assert 'fastxtend_accum/__main__.py' in package
    assert {o for o in files if not o.startswith('fastxtend_accum-')} == package
    assert any(o.endswith('licenses/LICENSE') for o in files)


def test_pypi_takes_it(release):
    said = run(sys.executable, '-m', 'twine', 'check', '--strict', *release.glob('fastxtend_accum*'), cwd=release)
    assert said.count('PASSED') == 2


def test_tests_run_from_the_sdist(unpacked):
    "All find their helpers, and those of the project the files that they look at"
    pytest_ = [sys.executable, '-m', 'pytest', '-q']
    run(*pytest_, '--collect-only', cwd=unpacked, PYTHONPATH='')
    run(*pytest_, 'tests/test_project.py', cwd=unpacked, PYTHONPATH='')
