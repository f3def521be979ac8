"The cells of notebooks, also where nbdev is not installed"
import json
from pathlib import Path

root = Path(__file__).parent.parent


def read(path):
    return json.loads(Path(path).read_text(encoding='utf-8'))['cells']


def source(cell):
    return ''.join(cell['source'])
