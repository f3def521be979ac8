import re
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages,setup

here = Path(__file__).parent
def read(name): return (here/name).read_text(encoding='utf-8')

ini = ConfigParser()
ini.read_string(read('settings.ini'))
cfg = ini['DEFAULT']
pythons,loggers,examples = [cfg[o].split() for o in ('pythons','loggers_requirements','examples_requirements')]

def absolute_links(text):
    "`text` for PyPI: links to files of the repository lead to GitHub, pictures to the file itself, at the tag of this version"
    home = re.search(r'^Repository = "(.+)"$', read('pyproject.toml'), re.M)[1]
    def absolute(m):
        if not (here/m[1].partition('#')[0]).is_file(): return m[0]  # a link into the web or into the page, or code
        return f"]({home}/{'raw' if m[1].endswith(('.png', '.svg')) else 'blob'}/v{cfg['version']}/{m[1]})"
    return re.sub(r'\]\(([^()\s]+)\)', absolute, text)

setup(
    version=cfg['version'],
    author=cfg['author'],
    keywords=cfg['keywords'].split(),
    classifiers=[f'Development Status :: {cfg["status"]}', 'Intended Audience :: Developers', 'Intended Audience :: Science/Research',
                 'Operating System :: OS Independent', *(f'Programming Language :: Python :: {o}' for o in ['3', *pythons]),
                 'Topic :: Scientific/Engineering :: Artificial Intelligence'],
    long_description=absolute_links(read('README.md')),
    long_description_content_type='text/markdown',
    python_requires='>='+pythons[0],
    packages=find_packages(include=['fastxtend_accum*']),
    package_data={'fastxtend_accum': ['py.typed']},
    install_requires=cfg['requirements'].split(),
    extras_require=dict(loggers=loggers, examples=examples, dev=cfg['dev_requirements'].split()+loggers+examples,
                        ci=cfg['ci_requirements'].split(), bench=cfg['bench_requirements'].split()),
)
