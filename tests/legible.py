"""How hard code is to read, counted from its syntax tree: names, comments, docstrings and line breaks cost nothing.

`python tests/legible.py FILE ...` prints the figures of all files together"""
import ast
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
DENSE_LINE = 20  # nodes of the syntax tree


class Legibility(NamedTuple):
    nodes: int
    density: float  # nodes per line
    dense_share: float  # lines with more than 20 nodes, per line


def parse(path):
    "Returns the syntax tree of a file, without docstrings"
    tree = ast.parse(Path(path).read_text(encoding='utf-8'))
    for node in ast.walk(tree):
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module)): continue
        if ast.get_docstring(node) is not None: del node.body[0]
    return tree


def nodes_by_line(tree):
    return Counter(node.lineno for node in ast.walk(tree) if hasattr(node, 'lineno'))


def measure(paths):
    "Returns the figures of all files together"
    n_nodes = 0
    counts = []  # of nodes in each line
    for path in paths:
        tree = parse(path)
        n_nodes += len(list(ast.walk(tree)))
        counts += nodes_by_line(tree).values()
    n_dense = sum(n > DENSE_LINE for n in counts)
    return Legibility(n_nodes, n_nodes/len(counts), n_dense/len(counts))


def functions(path):
    "Returns the name and the lines of code of each function"
    res = []
    for node in ast.walk(parse(path)):
        if isinstance(node, FUNCTIONS): res.append((node.name, len(nodes_by_line(node))))
    return res


if __name__ == '__main__':
    figures = measure(sys.argv[1:])
    print(f'{figures.nodes} nodes, {figures.density:.1f} per line')
    print(f'{figures.dense_share:.1%} of lines have more than {DENSE_LINE} nodes')
