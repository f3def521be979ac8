"""All that a Learner reaches, and its state"""
from __future__ import annotations
from contextlib import suppress
import io

from fastai.basics import *
from torch.serialization import safe_globals

from ..windows.processes import inner_model
from .parts import *
from .pickles import *

# Where the search begins

def shared_generators()->list:
    "Returns the random generators of Python, NumPy and PyTorch that all code shares"
    res = [random.getstate.__self__, np.random.get_state.__self__]  # these functions belong to them
    res += [torch.default_generator, *torch.cuda.default_generators]
    if torch.backends.mps.is_available():
        res.append(torch.mps._get_default_mps_generator())
    return res

def roots_of(learn)->dict:
    "Returns the objects from which all others are reached, by path. Callbacks and metrics have the names of their classes"
    res = {f'generators[{i}]':o for i,o in enumerate(shared_generators())}
    for o in [*learn.cbs, *learn.metrics]:
        name = type(o).__name__
        while name in res: name += "'"
        res[name] = o
    res.update(zip(('dls.train','dls.valid'), learn.dls.loaders))
    return dict(res, dls=learn.dls, model=inner_model(learn.model), opt=learn.opt, learn=learn)

def is_of_data(path:str)->bool:
    return path.startswith(('dls','generators'))

def is_no_weight(path:str)->bool:
    return not path.startswith(('model','opt'))

def parts_of(path:str, o)->dict:
    "Returns attributes and content of an object, by its `path` and a name, which is '' for the content"
    res = {(path,name):value for name,value in sorted(attributes_of(o).items())}
    content = content_of(o)
    if content is not None:
        res[path,''] = content
    if isinstance(o, Recorder) and o.losses:
        res[path,'losses'] = torch.stack(o.losses)  # one tensor instead of many
    return res

class Graph(Comparing):
    """The objects that a Learner reached when its fit began, by path. A part of them is called by the path of the object
    and the name of the attribute"""
    def __init__(self, learn):
        super().__init__()
        self.objects = {}
        self.paths = {}
        self.names = safe_names()
        self.begun = {}  # digests of parts when the fit began
        self.place = ''  # of the part that is pickled while objects are found
        self.waiting = []
        for path,o in roots_of(learn).items(): self.add(path, o)
        for path in self.waiting:  # grows in the loop
            for part,value in parts_of(path, self.objects[path]).items():
                self.place = '.'.join(part)
                with suppress(Exception): self.begun[part] = self.digest(path, value)
        self.place = None
        known = dict(paths=self.paths, names=self.names)
        self.pickling = SimpleNamespace(__name__='pickle', Pickler=type('Pickler', (PartPickler,), known))

    def add(self, path:str, o):
        "Gives a path to an object and, if it is a model, to its layers and weights"
        found = [(path, o)]
        if isinstance(o, nn.Module):
            for named in (o.named_modules(), o.named_parameters(), o.named_buffers()):
                found += [(f'{path}.{name}', value) for name,value in named]
        for path,o in found:
            if id(o) in self.paths: continue
            self.names.update([type(o), *named_by(type(o))])
            self.objects[path] = o
            self.paths[id(o)] = path
            self.waiting.append(path)

    def path_of(self, o)->str|None:
        path = super().path_of(o)
        if path or self.place is None or is_value(type(o)) or is_found_by_name(o):
            return path
        path = self.place
        while path in self.objects: path += "'"
        self.add(path, o)
        return path

    def check_name(self, o):
        if self.place is None: super().check_name(o)
        else: self.names.add(o)

# State

@patch
def compare(self:Graph, wanted:Callable=lambda path: True)->tuple:
    "Returns the present parts of the objects whose path is `wanted`, their digests, and why some have none"
    parts = {}
    digests = {}
    lost = {}
    for path in filter(wanted, self.objects): parts.update(parts_of(path, self.objects[path]))
    for part,value in parts.items():
        try: digests[part] = self.digest(part[0], value)
        except Exception as e: lost[part] = str(e)
    return parts,digests,lost

@patch
def state(self:Graph, *wanted)->dict:
    """Returns the state of these parts: `weights` and the optimizer, which are the same in all processes, and the `rest`
    as bytes; with the `digests` of all parts, and why some are `lost`"""
    parts,digests,lost = self.compare(*wanted)
    weights = {}
    rest = {}
    for part,digest in digests.items():
        path,_ = part
        if path == 'opt' or isinstance(self.objects[path], nn.Parameter):
            weights[part] = parts[part]
        elif digest[-1] is not True: rest[part] = parts[part]
        elif digest != self.begun.get(part): lost[part] = 'it is large'
    file = io.BytesIO()
    self.write(rest, file)
    rest = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    return dict(weights=weights, rest=rest, digests=digests, lost=lost)

@patch
def write(self:Graph, o, file):
    torch.save(o, file, self.pickling)

@patch
def read(self:Graph, content:bytes):
    "Runs no code that the content names: it may name what this fit has, and what PyTorch calls safe"
    objects.clear()
    objects.update(self.objects)
    missing.clear()
    with safe_globals(list(self.names)):
        return torch.load(io.BytesIO(content), moved, weights_only=True)

def moved(storage, location:str):
    "Lets what was on a GPU go to the GPU of this process"
    return storage if location == 'cpu' else storage.to(default_device())

@patch
def restore(self:Graph, rest:Tensor, weights:dict={}):
    "Sets parts to those of a state"
    for (path,name),value in {**self.read(rest.numpy().tobytes()), **weights}.items():
        o = self.objects[path]
        if isinstance(o, Recorder) and name == 'losses':
            value = [v.clone() for v in value]
        if name: set_attribute(o, name, value)
        else: set_content(o, value)
