"What can be said of a page without Quarto: each function returns its faults, as lines that say what to do"
import ast, json, re, shutil, subprocess
from pathlib import Path

import yaml
from nbdev.config import get_config

from cells import *

notebooks = sorted(o for o in (root/'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in o.parts)
cfg = get_config(root)

def page_name(path): return Path(path).relative_to(root/'nbs').as_posix()

def repository_files():
    "The files that git has, or would take; in an unpacked sdist, where there is no git, those that it came with"
    command = 'git', 'ls-files', '--cached', '--others', '--exclude-standard'
    if (root/'.git').exists(): names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    else: names = (root/'fastxtend_accum.egg-info/SOURCES.txt').read_text()
    return [o for o in names.splitlines() if (root/o).is_file() and '.egg-info/' not in o]

def copy_repository(folder):
    "Those files once more, in `folder`: an environment that someone made in the repository stays where it is"
    for name in repository_files():
        (folder/name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root/name, folder/name, follow_symlinks=False)
    return folder

def badge(name):
    "The line that opens page `name` in Colab; of a picture alone Quarto would make a figure"
    home = f'https://colab.research.google.com/github/{cfg.user}/{cfg.repo}/blob/{cfg.branch}/nbs/{name}'
    return f'[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({home}) <!-- -->'

# The head of a page

def head_faults(cells, name):
    "A title with a promise, the badge, the module of the same name, the installation in Colab"
    if not re.match(r'# \S.*\n\n> .+', source(cells[0])): yield 'begin with "# Title", an empty line, "> promise in a line"'
    if source(cells[1]).strip() != badge(name): yield f'let the second cell be {badge(name)}'
    code = [source(c) for c in cells if c['cell_type'] == 'code']
    if not any('pip install' in o and '#| hide' in o and '#| eval: false' in o for o in code[:2]): yield 'install the package in Colab, hidden'
    module = '.'.join([*Path(name).parts[:-1], re.sub(r'^\d+_', '', Path(name).stem)])
    exports = any(re.match(r'#\|\s*export', o) for o in code)
    if exports and code[0] != f'#| default_exp {module}': yield f'let the first code cell be #| default_exp {module}'

# Directives

nbdev_directives = {'default_exp', 'export', 'exporti', 'exports', 'exec_doc', 'hide', 'hide_line', 'colab', 'long'}
quarto_options = {'echo', 'eval', 'output', 'include', 'warning', 'error', 'label', 'fig-alt', 'fig-cap', 'code-fold', 'code-summary', 'classes',
                  'exports', 'long'}  # as nbdev passes them on

def options(text):
    "The Quarto options above a cell's code, as a dict"
    lines = re.match(r'(?:#\|.*(?:\n|$))*', text)[0].splitlines()
    return yaml.safe_load('\n'.join(o[2:] for o in lines if ': ' in o)) or {}

def directive_faults(cell):
    "Directives are the first lines of a cell, known, said once, and do not contradict each other"
    if cell['cell_type'] != 'code': return
    lines = source(cell).splitlines()
    n = next((i for i,o in enumerate(lines) if not o.startswith('#|')), len(lines))
    if any(re.match(r'\s*#\s*\|', o) for o in lines[n:]): yield 'a directive below the top of the cell is a comment to Quarto'
    words = [re.match(r'#\|\s*([\w-]+)(: |(?= |$))', o) for o in lines[:n]]
    if None in words: yield f'no directive: {lines[words.index(None)]}'; return
    names = [o[1] for o in words]
    for word in words:
        if word[1] not in (quarto_options if word[2] else nbdev_directives): yield f'unknown directive: {word.string}'
    if len(names) != len(set(names)): yield f'said twice: {names}'
    if 'hide' in names and set(names) - {'hide', 'eval', 'long', 'export'}: yield f'nbdev drops a hidden cell with its output, so these say nothing: {names}'
    try: options(source(cell))
    except yaml.YAMLError as e: yield f'no YAML: {e}'

# Outputs and pictures

def output_faults(cell):
    "No error, no word on stderr, no warning, no path of a machine"
    for out in cell.get('outputs', []):
        text = json.dumps({k:v for k,v in out.get('data', out).items() if not k.startswith('image/')})
        if out['output_type'] == 'error' or 'Traceback (' in text: yield f'an error: {text[:200]}'
        if out.get('name') == 'stderr': yield f'a word on stderr: {text[:200]}'
        if re.search(r'\b\w*Warning\b|\bWARN', text): yield f'a warning: {text[:200]}'
        if re.search(r'(?<![\w.:/])/(home|root|tmp|usr|Users|var|work|content)/', text): yield f"a machine's path: {text[:200]}"

def picture_faults(cell):
    "Each picture has a text that stands for it"
    if cell['cell_type'] == 'code':
        n = sum(any(k.startswith('image/') for k in o.get('data', {})) for o in cell.get('outputs', []))
        alt = options(source(cell)).get('fig-alt', [])
        alts = [alt] if isinstance(alt, str) else alt
        if len(alts) != n or any(len(o) < 20 for o in alts): yield f'{n} pictures want #| fig-alt: "what is to be seen", not {alts}'
    else:
        for alt,target in re.findall(r'!\[(.*?)\]\((.*?)\)', source(cell)):
            if not alt.strip(): yield f'![]({target}) wants a text'
        for tag in re.findall(r'<img\b[^>]*>', source(cell)):
            if not re.search(r'\balt="[^"]+"', tag): yield f'{tag} wants alt="..."'

# Links

def prose(cells):
    "The Markdown of processed cells, what show_doc wrote too, without code"
    texts = [source(c) for c in cells if c['cell_type'] == 'markdown']
    texts += [''.join(o['data']['text/markdown']) for c in cells for o in c.get('outputs', []) if 'text/markdown' in o.get('data', {})]
    return [re.sub(r'^(```|~~~).*?^\1', '', o, flags=re.M | re.S) for o in texts]

def anchor(heading):
    "The id that Pandoc gives a heading"
    explicit = re.search(r'\{[^}]*#([\w.-]+)[^}]*\}\s*$', heading)
    if explicit: return explicit[1]
    text = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', heading).lower()
    text = re.sub(r'[^\w\s.-]', '', text).strip()
    return re.sub(r'^[^a-z]+', '', re.sub(r'\s+', '-', text)) or 'section'

def anchors(cells):
    "The ids on a page"
    headings = [o for text in prose(cells) for o in re.findall(r'^#{1,6}\s+(.+?)\s*$', text, re.M)]
    return {anchor(o) for o in headings} | {o for text in prose(cells) for o in re.findall(r'\bid="([^"]+)"', text)}

def links(cells):
    "The targets of all links of a page"
    texts = [re.sub(r'(?<!\[)`[^`\n]+`', '', o) for o in prose(cells)]
    return [o for text in texts for o in re.findall(r'\]\(([^()\s]+)\)', text) + re.findall(r'href="([^"]+)"', text)]

def link_faults(name, pages, files=()):
    "Links of page `name` to a page, an anchor or a file that is not there; `pages` are processed cells by name, `files` other names"
    site = f'{cfg.doc_host}{cfg.doc_baseurl}'.rstrip('/') + '/'
    by_html = {html_name(o):o for o in pages}
    for link in links(pages[name]):
        path,_,where = link.removeprefix(site).partition('#')
        if link.startswith(site): target = by_html.get(path or 'index.html')
        elif re.match(r'\w+:', link): continue  # the rest of the web
        else: target = (Path('/', name).parent/path).resolve().relative_to('/').as_posix() if path else name
        if target not in pages and target not in files: yield f'{link}: no such page'
        elif where and where not in anchors(pages[target]): yield f'{link}: no such heading'

# Pages for users

def is_for_users(name): return not re.match(r'windows/|memory/|0[567]_', name)

def words(cells):
    "How many words a reader of processed cells reads, without code, addresses and the entries of generated signatures"
    text = re.sub(r'\]\([^)]*\)|<[^>]*>|^(?:#### |\[source\]|>).*|^\|.*\*\*.*', ' ', '\n'.join(prose(cells)), flags=re.M)
    return len(re.findall(r"[A-Za-z0-9][\w'.,-]*", text))

other_words = re.compile(r"\b(way of running|house|told|mend\w*|verdict|seam|names? a difference|the same fit|pieces?)\b", re.I)

def word_faults(text):
    "Words for which the pages have another: window, loader batch, micro-batch, accum_bs, optimizer step"
    yield from (f'another word for {o[0]}: {text[max(0, o.start()-40):o.end()+40]!r}' for o in other_words.finditer(text))

def title(cells): return re.match(r'# (.+)', source(cells[0]))[1].strip()
def headings(cells): return {anchor(o):o.replace('`', '') for text in prose(cells) for o in re.findall(r'^#{1,6}\s+(.+?)\s*$', text, re.M)}

def first_block(cells):
    "The lines of the first code that a page shows, in Markdown or in a cell"
    for c in cells:
        if c['cell_type'] == 'markdown': found = re.search(r'^```[^\n]*\n(.*?)^```', source(c), re.M | re.S)
        else: found = None if re.search(r'^#\| (hide|echo: false)', source(c), re.M) else re.search(r'((?:.|\n)*)', source(c))
        if found: return [o for o in found[1].splitlines() if not o.startswith('#|')]
    return []

def copied(diff):
    "What a reader copies from a diff: the site's after_body.html leaves out signs and removed lines"
    return '\n'.join(o[1:] for o in diff.splitlines() if not o.startswith('-'))

def diff_faults(cells):
    "Diffs that lead to code which Python cannot read"
    for diff in re.findall(r'^```diff\n(.*?)^```', '\n'.join(source(c) for c in cells if c['cell_type'] == 'markdown'), re.M | re.S):
        if any(o and o[0] not in '+- ' for o in diff.splitlines()):
            yield f'begin each line with +, - or a space: {diff}'
            continue
        try: ast.parse(copied(diff))
        except SyntaxError as e: yield f'{e} in {copied(diff)}'

def reading_faults(cells, width=75):
    "Links that nbdev would link again, code that a phone cuts off where the page opens or that does not run, and a next page, which Quarto shows already"
    yield from diff_faults(cells)
    for text in prose(cells):  # pandoc takes a table or a list that follows a paragraph's line for more of the paragraph
        for o in re.findall(r'^(?![|\s>#-]|\d+\. |:::).*\n(?=(?:\||- ).*)', text, re.M): yield f'an empty line is missing after: {o.strip()[-60:]}'
    for text in prose(cells):
        for o in re.findall(r'\[[^\]\[]*`[^\]\[]*\]\([^)]*\)', text): yield f'{o}: leave the backticks out of the text of a link'
        for o in re.findall(r'^Next: .*', text, re.M): yield f'{o[:60]}: leave the next page to the navigation'
    for o in first_block(cells):
        if len(o) > width: yield f'{o}: {len(o)} characters, in the first code {width} at most'

def name_faults(name, pages):
    "Links of page `name` whose text is a title, since it begins with a capital, and not that of the page or the heading they lead to"
    for text in prose(pages[name]):
        for words,path,_,where in re.findall(r'(?<!!)\[([^\]\[]+)\]\(([^()\s#:]*\.ipynb)(#([^()\s]+))?\)', text):
            target = pages.get((Path('/', name).parent/path).resolve().relative_to('/').as_posix())
            if target is None or not words[0].isupper() or re.fullmatch(r'([A-Z][a-z]+){2,}', words): continue  # a sentence's words, a class
            names = [title(target), headings(target).get(where)]
            if ' '.join(words.split()) not in names: yield f'[{words}]({path}): the page is called "{names[0]}"'

def html_name(name):
    "The file that nbdev has Quarto write for page `name`"
    path = Path(name)
    return (path.parent/(re.sub(r'^\d+[a-zA-Z0-9]*_', '', path.name.lower()))).with_suffix('.html').as_posix()

# The site

def hrefs(contents):
    "The pages in a list of a sidebar or a navbar, sections within sections"
    for o in contents:
        if isinstance(o, str): yield o
        else:
            if 'href' in o: yield o['href']
            yield from hrefs(o.get('contents', []) + o.get('menu', []))

def site_faults(site, pages):
    "What the sidebar and the navbar of `site`, a website's configuration, have too much, twice, or not"
    listed = list(hrefs(site['sidebar']['contents']))
    for name in sorted(set(pages)-set(listed)): yield f'{name} is not in the sidebar'
    for name in sorted({o for o in listed if listed.count(o) > 1}): yield f'{name} is in the sidebar twice'
    navbar = [o for o in hrefs(site['navbar'].get('left', []) + site['navbar'].get('right', [])) if not re.match(r'\w+:', o)]
    for name in [*listed, *navbar]:
        if name not in pages: yield f'{name} is in the sidebar or the navbar, and no page'
