"What can be said of a page without Quarto: each function yields its faults, as lines that say what to do"
import json
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urljoin

from nbdev.config import get_config

from cells import root, source

notebooks = sorted(o for o in (root/'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in o.parts)
cfg = get_config(root)


# The repository

def page_name(path):
    return Path(path).relative_to(root/'nbs').as_posix()


def repository_files():
    "Returns the files that git has, or would take; in an unpacked sdist, where there is no git, those of the sdist"
    if (root/'.git').exists():
        command = ['git', 'ls-files', '--cached', '--others', '--exclude-standard']
        names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    else: names = (root/'fastxtend_accum.egg-info/SOURCES.txt').read_text()
    return [o for o in names.splitlines() if (root/o).is_file() and '.egg-info/' not in o]


def copy_repository(folder):
    "Copies these files to `folder`, without an environment that somebody has made in the repository; returns `folder`"
    for name in repository_files():
        (folder/name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root/name, folder/name, follow_symlinks=False)
    return folder


# The head of a page

INSTALL = '#| hide\n#| eval: false\n! [ -e /content ] && pip install -Uqq "fastxtend_accum[loggers]"'


def badge(name):
    "Returns the line that opens page `name` in Colab. Its comment keeps Quarto from making a figure of the picture"
    home = f'https://colab.research.google.com/github/{cfg.user}/{cfg.repo}/blob/{cfg.branch}/nbs/{name}'
    return f'[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({home}) <!-- -->'


def head_faults(cells, name):
    "A page begins with a title and a promise, the badge, and the installation in Colab"
    if not re.match(r'# \S.*\n\n> .+', source(cells[0])):
        yield 'begin with "# Title", an empty line, "> promise in a line"'
    if source(cells[1]).strip() != badge(name):
        yield f'let the second cell be {badge(name)}'
    if INSTALL not in map(source, cells[2:4]):
        yield f'let one of the next two cells be {INSTALL}'


# Cells

OUTPUT_FAULTS = {
    'there is an error': r'"output_type": "error"|Traceback \(',
    'something is on stderr': r'"name": "stderr"',
    'there is a warning': r'\b(?!AccumWarning)\w*Warning\b|\bWARN',
    'there is a path of a machine': r'(?<![\w.:/])/(home|root|tmp|usr|Users|var|work|content)/'}

# Pandoc takes a table or a list that follows a line of a paragraph for more of the paragraph, and nbdev links code
TEXT_FAULTS = {
    'an empty line is missing': r'^(?![|\s>#-]|\d+\. |:::).*\n(?=(?:\||- ).*)',
    'leave the backticks out of the text of a link': r'\[[^\]\[]*`[^\]\[]*\]\([^)]*\)',
    'a picture wants a text that stands for it': r'!\[\s*\]\('}


def faults_in(text, kinds):
    for fault, pattern in kinds.items():
        for match in re.finditer(pattern, text, re.M): yield f'{fault}: {match[0]}'


def output_faults(cell):
    "There is no error, nothing on stderr, no warning, and no path of a machine; and each picture has a text"
    outputs = json.dumps(cell.get('outputs', []))
    text, n_pictures = re.subn(r'"image/\w+": ".*?"', '', outputs)
    yield from faults_in(text, OUTPUT_FAULTS)
    n_texts = len(re.findall(r'^#\| fig-alt: ".{20,}"', source(cell), re.M))
    if n_texts != n_pictures: yield f'{n_pictures} pictures want #| fig-alt: "what is to be seen"'


def text_faults(cell):
    for text in prose([cell]): yield from faults_in(text, TEXT_FAULTS)


# Links

def prose(cells):
    "Returns the Markdown of processed cells, with that of show_doc, and without code"
    texts = [source(c) for c in cells if c['cell_type'] == 'markdown']
    for c in cells:
        for out in c.get('outputs', []):
            if 'text/markdown' in out.get('data', {}):
                texts.append(''.join(out['data']['text/markdown']))
    return [re.sub(r'^(```|~~~).*?^\1', '', o, flags=re.M | re.S) for o in texts]


def anchor(heading):
    "Returns the id that Pandoc gives a heading"
    explicit = re.search(r'\{[^}]*#([\w.-]+)[^}]*\}\s*$', heading)
    if explicit: return explicit[1]
    text = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', heading).lower()
    text = re.sub(r'[^\w\s.-]', '', text).strip()
    text = re.sub(r'\s+', '-', text)
    return re.sub(r'^[^a-z]+', '', text) or 'section'


def anchors(cells):
    "Returns the ids of the headings of a page"
    headings = re.findall(r'^#{1,6}\s+(.+?)\s*$', '\n'.join(prose(cells)), re.M)
    return {anchor(o) for o in headings}


def links(cells):
    "Returns the targets of all links of a page"
    without_code = re.sub(r'(?<!\[)`[^`\n]+`', '', '\n'.join(prose(cells)))
    return re.findall(r'\]\(([^()\s]+)\)', without_code)


def html_name(name):
    "Returns the file that nbdev has Quarto write for page `name`"
    path = Path(name)
    stem = re.sub(r'^\d+[a-zA-Z0-9]*_', '', path.name.lower())
    return (path.parent/stem).with_suffix('.html').as_posix()


def link_faults(name, pages):
    "Links of page `name` lead to pages, headings and files that are there. `pages` are processed cells by name"
    site = f'{cfg.doc_host}{cfg.doc_baseurl}'.rstrip('/') + '/'
    by_html = {html_name(o): o for o in pages}
    for link in links(pages[name]):
        target, _, where = urljoin(name, link).partition('#')
        if target.startswith(site):
            target = by_html.get(target.removeprefix(site) or 'index.html', 'nowhere')
        if re.match(r'\w+:', target): continue  # the rest of the web
        if target in pages:
            if where and where not in anchors(pages[target]): yield f'{link}: no such heading'
        elif not (root/'nbs'/target).is_file(): yield f'{link}: no such page'
