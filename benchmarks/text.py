"""A language model for text that every machine has: the docstrings of Python's standard library, in the same order in
the same Python"""
import ast
import inspect
from importlib import import_module

from fastai.basics import *

text_modules = """
    argparse ast bdb calendar cmd collections configparser contextlib copy csv dataclasses difflib dis doctest enum
    fileinput fractions functools gettext heapq imaplib inspect ipaddress json locale logging mailbox mimetypes optparse
    pdb pickle pickletools platform plistlib poplib pprint pstats pydoc queue random sched selectors shelve shlex shutil
    smtplib socket socketserver statistics string subprocess tarfile tempfile textwrap threading timeit tokenize
    traceback typing unittest.case unittest.mock urllib.parse urllib.request uuid warnings weakref webbrowser
    zipfile""".split()


def docstrings(modules=text_modules):
    "Returns the docstrings of `modules`, their classes and functions, with an empty line between two"
    found = []
    for name in modules:
        source = inspect.getsource(import_module(name))
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)): continue
            text = ast.get_docstring(node)
            if text: found.append(text)
    return '\n\n'.join(found)


def text_dls(bs, seed=42):
    "Returns sequences of 32 characters from docstrings, 4096 to train on and 512 to validate"
    text = docstrings().encode('ascii', 'replace')
    codes = torch.tensor(list(text))
    set_seed(seed)
    n_seqs = len(codes)//33
    seqs = codes[:n_seqs*33].view(n_seqs, 33)
    order = torch.randperm(n_seqs)
    chosen = seqs[order[:4096+512]]
    samples = [(o[:-1], o[1:]) for o in chosen]
    train = DataLoader(samples[:4096], bs=bs, shuffle=True)
    valid = DataLoader(samples[4096:], bs=256)
    return DataLoaders(train, valid)


class NGram(Module):
    """Predicts the next character of each position from the last `n` (Bengio et al., 2003), by a convolution that does
    not look ahead"""
    def __init__(self, n=8, n_codes=128):
        self.n = n
        self.embed = nn.Embedding(n_codes, 16)
        self.conv = nn.Conv1d(16, 96, n)
        self.out = nn.Linear(96, n_codes)

    def forward(self, x):
        x = F.pad(self.embed(x).transpose(1, 2), (self.n-1, 0))
        features = F.relu(self.conv(x)).transpose(1, 2)
        return self.out(features)


def text_learner(bs, cbs=None):
    "Returns a small language model for docstrings, with the same weights each time"
    dls = text_dls(bs)
    return Learner(dls, NGram(), CrossEntropyLossFlat(), metrics=accuracy, cbs=cbs)
