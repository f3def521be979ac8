"""What PyPI gets: an sdist, and a wheel made from it. Building and installing takes a minute and a network, so it is a
step of its own in `.ci/run`: `pytest -q -m release`"""
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from cells import root
from pages import copy_repository, repository_files

pytestmark = pytest.mark.release


def run(*command, cwd, **env):
    "Returns what `command` prints"
    out = subprocess.run(
        [str(o) for o in command],
        cwd=cwd,
        env={**os.environ, **env},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT)
    assert out.returncode == 0, out.stdout[-3000:]
    return out.stdout


LEFT_BY_COMMANDS = 'nbs/nbdev.yml', 'nbs/.ipynb_checkpoints/a.ipynb', 'tests/__pycache__/a.pyc', 'benchmarks/time.png'


@pytest.fixture(scope='module')
def release(tmp_path_factory):
    "Returns a folder with the sdist, the wheel, in `direct` a wheel made without the sdist, and `build.log`"
    there = tmp_path_factory.mktemp('release')
    repository = copy_repository(there/'source')
    for name in LEFT_BY_COMMANDS:
        (repository/name).parent.mkdir(exist_ok=True)
        (repository/name).touch()
    build = [sys.executable, '-m', 'build', repository, '--outdir']
    log = run(*build, there, cwd=there)
    log += run(*build, there/'direct', '--wheel', cwd=there)
    (there/'build.log').write_text(log)
    return there


@pytest.fixture(scope='module')
def sdist(release):
    [path] = release.glob('*.tar.gz')
    return path


@pytest.fixture(scope='module')
def unpacked(sdist, tmp_path_factory):
    "Returns the folder in the sdist"
    there = tmp_path_factory.mktemp('sdist')
    with tarfile.open(sdist) as f: f.extractall(there, filter='data')
    [folder] = there.iterdir()
    return folder


def wheel_files(folder):
    "Returns the files of the wheel in `folder`, a dict of name to bytes"
    [wheel] = folder.glob('*.whl')
    with zipfile.ZipFile(wheel) as f: return {o: f.read(o) for o in f.namelist()}


def test_the_sdist_is_the_repository(unpacked):
    "All of it, so that whoever packages it can run the tests, and nothing that git ignores"
    here = set(repository_files())
    files = {o.relative_to(unpacked).as_posix(): o for o in unpacked.rglob('*') if not o.is_dir()}
    there = {o for o in files if not o.startswith('fastxtend_accum.egg-info/')}
    assert 'settings.ini' in here
    assert there - {'PKG-INFO', 'setup.cfg'} == here
    for name in here:
        assert not files[name].is_symlink()
        assert files[name].read_bytes() == (root/name).read_bytes()


def test_the_wheel_is_the_package(release):
    files = wheel_files(release)
    package = {o for o in repository_files() if o.startswith('fastxtend_accum/')}
    assert 'fastxtend_accum/__main__.py' in package
    assert {o for o in files if not o.startswith('fastxtend_accum-')} == package
    assert any(o.endswith('licenses/LICENSE') for o in files)


def test_the_sdist_gives_the_wheel_of_the_repository(release):
    "Metadata included"
    assert wheel_files(release) == wheel_files(release/'direct')


def test_nothing_is_deprecated(release):
    log = (release/'build.log').read_text()
    assert 'Successfully built' in log
    assert re.findall(r'.*deprecat.*', log, re.I) == []


def test_pypi_takes_it(release, sdist):
    said = run(sys.executable, '-m', 'twine', 'check', '--strict', sdist, *release.glob('*.whl'), cwd=release)
    [metadata] = [v.decode() for k, v in wheel_files(release).items() if k.endswith('/METADATA')]
    urls = dict(re.findall('^Project-URL: (.+), (.+)$', metadata, re.M))
    assert said.count('PASSED') == 2
    assert 'License-Expression: Apache-2.0\n' in metadata
    assert urls.keys() == {'Documentation', 'Changelog', 'Issues', 'Repository'}


def test_the_sdist_installs(sdist, tmp_path):
    "In a new environment, to which this one then lends the requirements, and from an empty folder"
    empty = tmp_path/'empty'
    empty.mkdir()
    python = tmp_path/'env/bin/python'
    run(sys.executable, '-m', 'venv', tmp_path/'env', cwd=empty)
    [site] = (tmp_path/'env').glob('lib/python3*/site-packages')
    run(python, '-m', 'pip', 'install', '-q', '--no-deps', sdist, cwd=empty, PYTHONPATH='')
    here = sysconfig.get_path('purelib')
    (site/'rest.pth').write_text(f'import site; site.addsitedir({here!r})')

    code = 'import fastxtend_accum.all as o, fastxtend_accum.demo; print(o.__file__)'
    said = run(python, '-c', code, cwd=empty, PYTHONPATH='')
    assert said.splitlines()[-1] == str(site/'fastxtend_accum/all.py')


def test_tests_run_from_the_sdist(unpacked):
    "All find their helpers, and those of the project the files that they look at"
    pytest_ = [sys.executable, '-m', 'pytest', '-q']
    tests = {o.name for o in (root/'tests').glob('test_*.py')}
    with_marks_only = {'test_release.py', 'test_gpu.py', 'test_resume_gpu.py', 'test_resume_kills.py', 'test_types.py'}
    said = run(*pytest_, '--collect-only', cwd=unpacked, PYTHONPATH='')
    collected = {Path(o).name for o in re.findall(r'^(\S+\.py)::', said, re.M)}
    assert collected == tests - with_marks_only
    run(*pytest_, 'tests/test_project.py', cwd=unpacked, PYTHONPATH='')
