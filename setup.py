from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

ini = ConfigParser()
ini.read(Path(__file__).parent/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']
loggers = cfg['loggers_requirements'].split()

setup(
    version=cfg['version'],
    author=cfg['author'],
    license=cfg['license'],
    keywords=cfg['keywords'],
    classifiers=[f'Development Status :: {cfg["status"]}', 'Intended Audience :: Developers',
                 'Programming Language :: Python :: 3', 'Topic :: Scientific/Engineering :: Artificial Intelligence'],
    long_description=Path('README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    python_requires='>='+cfg['min_python'],
    packages=find_packages(include=['fastxtend_accum']),
    install_requires=cfg['requirements'].split(),
    extras_require=dict(loggers=loggers, dev=cfg['dev_requirements'].split()+loggers,
                        bench=cfg['bench_requirements'].split()),
)
