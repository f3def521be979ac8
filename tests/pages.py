"What can be said of a page without Quarto: each function yields its faults, as lines that say what to do"
import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import yaml
from nbdev.config import get_config

from cells import read, root, source

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


def badge(name):
    "Returns the line that opens page `name` in Colab. Its comment keeps Quarto from making a figure of the picture"
    home = f'https://colab.research.google.com/github/{cfg.user}/{cfg.repo}/blob/{cfg.branch}/nbs/{name}'
    return f'[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({home}) <!-- -->'


def code_sources(cells):
    return [source(c) for c in cells if c['cell_type'] == 'code']


def markdown_sources(cells):
    return [source(c) for c in cells if c['cell_type'] == 'markdown']


# The head of a page

def head_faults(cells, name):
    "A page begins with a title and a promise, the badge, the module of its name, and the installation in Colab"
    if not re.match(r'# \S.*\n\n> .+', source(cells[0])):
        yield 'begin with "# Title", an empty line, "> promise in a line"'
    if source(cells[1]).strip() != badge(name):
        yield f'let the second cell be {badge(name)}'
    code = code_sources(cells)
    installs = [o for o in code[:2] if 'pip install' in o]
    is_hidden = any('#| hide' in o and '#| eval: false' in o for o in installs)
    if not is_hidden: yield 'install the package in Colab, hidden'
    stem = re.sub(r'^\d+_', '', Path(name).stem)
    module = '.'.join([*Path(name).parts[:-1], stem])
    exports = any(re.match(r'#\|\s*export', o) for o in code)
    if exports and code[0] != f'#| default_exp {module}':
        yield f'let the first code cell be #| default_exp {module}'


# Directives


def options(text):
    "Returns the Quarto options above the code of a cell, as a dict"
    lines = re.match(r'(?:#\|.*(?:\n|$))*', text)[0].splitlines()
    return yaml.safe_load('\n'.join(o[2:] for o in lines if ': ' in o)) or {}


# Outputs and pictures

def output_faults(cell):
    "There is no error, nothing on stderr, no warning, and no path of a machine"
    for out in cell.get('outputs', []):
        data = out.get('data', out)
        text = json.dumps({k: v for k, v in data.items() if not k.startswith('image/')})
        start = text[:200]
        if out['output_type'] == 'error' or 'Traceback (' in text:
            yield f'an error: {start}'
        if out.get('name') == 'stderr':
            yield f'something on stderr: {start}'
        if re.search(r'\b(?!AccumWarning)\w*Warning\b|\bWARN', text): yield f'a warning: {start}'
        if re.search(r'(?<![\w.:/])/(home|root|tmp|usr|Users|var|work|content)/', text):
            yield f"a machine's path: {start}"


def n_pictures(cell):
    res = 0
    for out in cell.get('outputs', []):
        kinds = out.get('data', {})
        if any(o.startswith('image/') for o in kinds): res += 1
    return res


def picture_faults(cell):
    "Each picture has a text that stands for it"
    text = source(cell)
    if cell['cell_type'] == 'code':
        alt = options(text).get('fig-alt', [])
        alts = [alt] if isinstance(alt, str) else alt
        is_short = any(len(o) < 20 for o in alts)
        n = n_pictures(cell)
        if len(alts) != n or is_short:
            yield f'{n} pictures want #| fig-alt: "what is to be seen", not {alts}'
        return
    for alt, target in re.findall(r'!\[(.*?)\]\((.*?)\)', text):
        if not alt.strip(): yield f'![]({target}) wants a text'
    for tag in re.findall(r'<img\b[^>]*>', text):
        if not re.search(r'\balt="[^"]+"', tag):
            yield f'{tag} wants alt="..."'


# Links

def prose(cells):
    "Returns the Markdown of processed cells, with that of show_doc, and without code"
    texts = markdown_sources(cells)
    for c in cells:
        for out in c.get('outputs', []):
            if 'text/markdown' in out.get('data', {}):
                texts.append(''.join(out['data']['text/markdown']))
    return [re.sub(r'^(```|~~~).*?^\1', '', o, flags=re.M | re.S) for o in texts]


def heading_texts(cells):
    res = []
    for text in prose(cells):
        res += re.findall(r'^#{1,6}\s+(.+?)\s*$', text, re.M)
    return res


def anchor(heading):
    "Returns the id that Pandoc gives a heading"
    explicit = re.search(r'\{[^}]*#([\w.-]+)[^}]*\}\s*$', heading)
    if explicit: return explicit[1]
    text = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', heading).lower()
    text = re.sub(r'[^\w\s.-]', '', text).strip()
    text = re.sub(r'\s+', '-', text)
    return re.sub(r'^[^a-z]+', '', text) or 'section'


def anchors(cells):
    "Returns the ids on a page"
    res = {anchor(o) for o in heading_texts(cells)}
    for text in prose(cells):
        res.update(re.findall(r'\bid="([^"]+)"', text))
    return res


def links(cells):
    "Returns the targets of all links of a page"
    res = []
    for text in prose(cells):
        without_code = re.sub(r'(?<!\[)`[^`\n]+`', '', text)
        res += re.findall(r'\]\(([^()\s]+)\)', without_code)
        res += re.findall(r'href="([^"]+)"', without_code)
    return res


def target_of(path, name):
    "Returns the page or file to which a relative link of page `name` leads"
    return (Path('/', name).parent/path).resolve().relative_to('/').as_posix()


def link_faults(name, pages, files=()):
    """Links of page `name` lead to pages, headings and files that are there. `pages` are processed cells by name, and
    `files` the names of other files"""
    site = f'{cfg.doc_host}{cfg.doc_baseurl}'.rstrip('/') + '/'
    by_html = {html_name(o): o for o in pages}
    for link in links(pages[name]):
        path, _, where = link.removeprefix(site).partition('#')
        if link.startswith(site):
            target = by_html.get(path or 'index.html')
        elif re.match(r'\w+:', link): continue  # the rest of the web
        elif path: target = target_of(path, name)
        else: target = name
        if target not in pages and target not in files:
            yield f'{link}: no such page'
        elif where and where not in anchors(pages[target]):
            yield f'{link}: no such heading'


# Pages for users

def is_for_users(name):
    return not re.match(r'windows/|memory/|resuming/|checking/|0[578]_|guides/06_', name)


def words(cells):
    "Returns how many words a reader reads, without code, pictures, addresses and the entries of generated signatures"
    text = '\n'.join(prose(cells))
    text = re.sub(r'!\[[^\]]*\]\([^)]*\)', ' ', text)
    text = re.sub(r'\]\([^)]*\)|<[^>]*>|^(?:#### |\[source\]|>).*|^\|.*\*\*.*', ' ', text, flags=re.M)
    return len(re.findall(r"[A-Za-z0-9][\w'.,-]*", text))


def title(cells):
    return re.match(r'# (.+)', source(cells[0]))[1].strip()


def copied(diff):
    "Returns what a reader copies from a diff: the site leaves out signs and removed lines"
    return '\n'.join(o[1:] for o in diff.splitlines() if not o.startswith('-'))


def diff_faults(cells):
    "Diffs lead to code that Python can read"
    text = '\n'.join(markdown_sources(cells))
    for diff in re.findall(r'^```diff\n(.*?)^```', text, re.M | re.S):
        if any(o and o[0] not in '+- ' for o in diff.splitlines()):
            yield f'begin each line with +, - or a space: {diff}'
            continue
        try: ast.parse(copied(diff))
        except SyntaxError as e: yield f'{e} in {copied(diff)}'


def reading_faults(cells):
    "Diffs are code, tables and lists stand apart, and nbdev links code by itself"
    yield from diff_faults(cells)
    for text in prose(cells):
        # Pandoc takes a table or a list that follows a line of a paragraph for more of the paragraph
        for line in re.findall(r'^(?![|\s>#-]|\d+\. |:::).*\n(?=(?:\||- ).*)', text, re.M):
            yield f'an empty line is missing after: {line.strip()[-60:]}'
        for link in re.findall(r'\[[^\]\[]*`[^\]\[]*\]\([^)]*\)', text):
            yield f'{link}: leave the backticks out of the text of a link'


def html_name(name):
    "Returns the file that nbdev has Quarto write for page `name`"
    path = Path(name)
    stem = re.sub(r'^\d+[a-zA-Z0-9]*_', '', path.name.lower())
    return (path.parent/stem).with_suffix('.html').as_posix()


# The site

def hrefs(contents):
    "Yields the pages in a list of a sidebar or a navbar, those of sections within sections, too"
    for o in contents:
        if isinstance(o, str):
            yield o
            continue
        if 'href' in o: yield o['href']
        yield from hrefs(o.get('contents', []) + o.get('menu', []))


def site_faults(site, pages):
    "The sidebar of `site`, the configuration of a website, has each page once; sidebar and navbar lead to pages"
    listed = list(hrefs(site['sidebar']['contents']))
    for name in sorted(set(pages)-set(listed)):
        yield f'{name} is not in the sidebar'
    twice = {o for o in listed if listed.count(o) > 1}
    for name in sorted(twice): yield f'{name} is in the sidebar twice'
    navbar = hrefs(site['navbar'].get('left', []) + site['navbar'].get('right', []))
    for name in [*listed, *navbar]:
        is_of_web = re.match(r'\w+:', name)
        if name not in pages and not is_of_web:
            yield f'{name} is in the sidebar or the navbar, and no page'
