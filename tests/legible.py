"""How hard code is to read, counted from its syntax tree: names, comments, docstrings and line breaks cost nothing.

`python tests/legible.py FILE ...` prints each place that `marked_places` finds, and the figures"""
import ast
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp
CONDITIONS = ast.Compare, ast.BoolOp, ast.IfExp
DENSE_LINE = 20  # nodes of the syntax tree


@dataclass
class Legibility:
    nodes: int
    lines: int
    dense_lines: int
    marked: int

    @property
    def density(self):
        "Nodes per line"
        return self.nodes/self.lines

    @property
    def dense_share(self):
        "Lines with more than 20 nodes, per line"
        return self.dense_lines/self.lines

    @property
    def marked_share(self):
        "Marked places per line"
        return self.marked/self.lines


def without_docstrings(tree):
    "Removes all docstrings of `tree`, and returns it"
    for node in ast.walk(tree):
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module)) or not node.body: continue
        first = node.body[0]
        is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        if is_text and isinstance(first.value.value, str): del node.body[0]
    return tree


def parse(path):
    return without_docstrings(ast.parse(Path(path).read_text(encoding='utf-8')))


def nodes_by_line(tree):
    return Counter(node.lineno for node in ast.walk(tree) if hasattr(node, 'lineno'))


def is_text_or_list(node):
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text or isinstance(node, (ast.List, ast.JoinedStr))


def inner_nodes(node):
    return [o for o in ast.walk(node) if o is not node]


def mark_of(node):
    "Returns why a reader looks twice at `node`, or None"
    if isinstance(node, ast.BinOp):
        sides = node.left, node.right
        if isinstance(node.op, ast.Mult) and any(map(is_text_or_list, sides)): return 'a text or list times a condition'
        if any(isinstance(o, CONDITIONS) for o in sides): return 'arithmetic with a condition'
    if isinstance(node, ast.Assign):
        if isinstance(node.value, ast.Lambda): return 'a lambda with a name'
        for target in node.targets:
            is_parallel = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            if is_parallel and len(target.elts) > 2: return 'a parallel assignment of more than two values'
    if isinstance(node, ast.Expr) and isinstance(node.value, (ast.BoolOp, ast.IfExp)):
        return 'and, or, if as control flow'
    if isinstance(node, COMPREHENSIONS):
        is_nested = any(isinstance(o, COMPREHENSIONS) for o in inner_nodes(node))
        if is_nested or len(node.generators) > 1: return 'a nested comprehension'
    if isinstance(node, ast.BoolOp):
        is_mixed = any(isinstance(o, ast.BoolOp) for o in node.values)
        if is_mixed or len(node.values) > 3: return 'long logic'
    if isinstance(node, (ast.IfExp, ast.JoinedStr)):
        has_inner = any(isinstance(o, ast.IfExp) for o in inner_nodes(node))
        if has_inner: return 'a conditional expression inside an expression'
    return None


def marked_places(tree):
    "Returns the line of each marked place, and why it is marked"
    heads = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.While)): heads.update(ast.walk(node.test))
    places = []
    for node in ast.walk(tree):
        mark = mark_of(node)
        if isinstance(node, ast.NamedExpr) and node not in heads: mark = 'a walrus outside of an if or while'
        if mark: places.append((node.lineno, mark))
    return sorted(places)


def measure(paths):
    "Returns the figures of all files together"
    total = Legibility(0, 0, 0, 0)
    for path in paths:
        tree = parse(path)
        counts = nodes_by_line(tree)
        total.nodes += len(list(ast.walk(tree)))
        total.lines += len(counts)
        total.dense_lines += sum(n > DENSE_LINE for n in counts.values())
        total.marked += len(marked_places(tree))
    return total


def functions(path):
    "Returns the name and the lines of code of each function"
    res = []
    for node in ast.walk(parse(path)):
        if not isinstance(node, FUNCTIONS): continue
        lines = {o.lineno for o in ast.walk(node) if hasattr(o, 'lineno')}
        res.append((node.name, len(lines)))
    return res


if __name__ == '__main__':
    files = sys.argv[1:]
    for file in files:
        for line, why in marked_places(parse(file)):
            print(f'{file}:{line}: {why}')
    figures = measure(files)
    print(f'{figures.nodes} nodes, {figures.density:.1f} per line')
    print(f'{figures.dense_share:.1%} of lines have more than {DENSE_LINE} nodes')
    print(f'{100*figures.marked_share:.1f} marked places per 100 lines')
