"""`python tests/make_links.py` writes the repository's URLs of pyproject.toml wherever they have to be repeated: in the
badges and the links to files, in _quarto.yml, CITATION.cff, README.md and an issue template, and in the modules"""
import re

from nbdev.doclinks import nbdev_export

from cells import root
from make_readme import write_readme
from pages import badge, cfg, notebooks, page_name


def replace(path, pattern, new):
    "Replaces the first match of `pattern` in a file"
    text, n = re.subn(pattern, lambda match: new, path.read_text(encoding='utf-8'), count=1)
    assert n == 1, f'{path} has no {pattern}'
    path.write_text(text, encoding='utf-8')


def replace_links(path):
    "Lets all links to files of the repository lead to its present address"
    link = rf'https://github\.com/[^/]+/[^/]+/blob/{cfg.branch}/'
    text = re.sub(link, f'{cfg.git_url}/blob/{cfg.branch}/', path.read_text(encoding='utf-8'))
    text = re.sub(r'https://github\.com/[^/]+/[^/]+/issues(?=\))', f'{cfg.git_url}/issues', text)
    path.write_text(text, encoding='utf-8')


def main():
    for path in notebooks:
        replace(path, r'\[!\[Open in Colab\].*?\)\]\(.*?\)(?: <!-- -->)?', badge(page_name(path)))
        replace_links(path)
    for name in ('_quarto.yml', 'nbs/_quarto.yml'):  # a link; in an sdist a copy
        replace(root/name, r'(?<=icon: github, href: )[^,]+', cfg.git_url)
    replace(root/'CITATION.cff', r'(?<=repository-code: ")[^"]+', cfg.git_url)
    replace(root/'CITATION.cff', r'(?<=\nurl: ")[^"]+', cfg.doc_url)
    replace(root/'.github/ISSUE_TEMPLATE/config.yml', r'https://\S+(?=guides/faq)', cfg.doc_url)
    write_readme()
    nbdev_export()


if __name__ == '__main__': main()
