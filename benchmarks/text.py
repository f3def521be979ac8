"A language model for text that every machine has: the docstrings of Python's standard library, in the same order in the same Python"
from importlib import import_module
import ast, inspect

from fastai.basics import *

text_modules = """argparse ast bdb calendar cmd collections configparser contextlib copy csv dataclasses difflib dis doctest enum fileinput fractions
functools gettext heapq imaplib inspect ipaddress json locale logging mailbox mimetypes optparse pdb pickle pickletools platform plistlib poplib pprint pstats pydoc
queue random sched selectors shelve shlex shutil smtplib socket socketserver statistics string subprocess tarfile tempfile textwrap threading timeit tokenize
traceback typing unittest.case unittest.mock urllib.parse urllib.request uuid warnings weakref webbrowser zipfile""".split()

def docstrings(modules:list[str]=text_modules)->str:
    "The docstrings of `modules`, their classes and functions, an empty line between two"
    trees = [ast.parse(inspect.getsource(import_module(o))) for o in modules]
    nodes = [o for tree in trees for o in ast.walk(tree) if isinstance(o, (ast.Module,ast.ClassDef,ast.FunctionDef))]
    return '\n\n'.join(filter(None, map(ast.get_docstring, nodes)))

def text_dls(bs:int, seed:int=42)->DataLoaders:
    "Sequences of 32 characters from docstrings, 4096 to train on and 512 to validate"
    codes = torch.tensor(list(docstrings().encode('ascii', 'replace')))
    set_seed(seed)
    seqs = codes[:len(codes)//33*33].view(-1, 33)
    samples = [(o[:-1],o[1:]) for o in seqs[torch.randperm(len(seqs))[:4096+512]]]
    return DataLoaders(DataLoader(samples[:4096], bs=bs, shuffle=True), DataLoader(samples[4096:], bs=256))

class NGram(Module):
    "Predicts the next character of each position from the last `n` (Bengio et al., 2003), by a convolution that does not look ahead"
    def __init__(self, n:int=8, n_codes:int=128):
        self.n,self.embed,self.conv,self.out = n,nn.Embedding(n_codes, 16),nn.Conv1d(16, 96, n),nn.Linear(96, n_codes)

    def forward(self, x):
        x = F.pad(self.embed(x).transpose(1, 2), (self.n-1, 0))
        return self.out(F.relu(self.conv(x)).transpose(1, 2))

def text_learner(bs:int, cbs=None)->Learner:
    "A small language model for docstrings, the same weights each time"
    dls = text_dls(bs)
    return Learner(dls, NGram(), CrossEntropyLossFlat(), metrics=accuracy, cbs=cbs)
