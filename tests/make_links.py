"""`python tests/make_links.py` writes the repository's URLs of pyproject.toml wherever they have to be repeated: in the badges and the links to files, in
_quarto.yml, in README.md, and in the modules"""
import re

from nbdev.doclinks import nbdev_export

from make_readme import write_readme
from pages import *

def replace(path, pattern, new):
    text,n = re.subn(pattern, lambda _: new, path.read_text(encoding='utf-8'), count=1)
    assert n == 1, f'{path} has no {pattern}'
    path.write_text(text, encoding='utf-8')

if __name__ == '__main__':
    for o in notebooks:
        replace(o, r'\[!\[Open in Colab\].*?\)\]\(.*?\)(?: <!-- -->)?', badge(page_name(o)))
        o.write_text(re.sub(rf'https://github\.com/[^/]+/[^/]+/blob/{cfg.branch}/', f'{cfg.git_url}/blob/{cfg.branch}/', o.read_text(encoding='utf-8')), encoding='utf-8')
    for o in '_quarto.yml','nbs/_quarto.yml': replace(root/o, r'(?<=icon: github, href: )[^,]+', cfg.git_url)  # a link; in an sdist a copy
    write_readme()
    nbdev_export()
