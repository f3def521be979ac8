"""How parts are pickled: a path stands for each object that the new process has, too"""
from __future__ import annotations
from collections import Counter,OrderedDict,deque
from fractions import Fraction
from functools import lru_cache
from pathlib import PurePath
import io,pickle,zlib

from fastai.basics import *
from torch._weights_only_unpickler import _get_allowed_globals
from torch.storage import TypedStorage,UntypedStorage
from torch.utils.hooks import RemovableHandle

# What is pickled by its value

_plain = type(None),bool,int,float,str
_containers = tuple,list,dict,set,frozenset,deque,OrderedDict,defaultdict,Counter,partial
_values = (*_plain,complex,bytes,tuple,range,slice,PurePath,types.MethodType,np.ndarray,np.generic,torch.dtype,
           torch.device,TypedStorage,UntypedStorage,Tensor)

@lru_cache(None)
def is_value(kind:type)->bool:
    "Returns whether objects of this class are pickled as they are. All others have a path"
    if issubclass(kind, nn.Parameter):
        return False
    return kind in _containers or issubclass(kind, _values)

@lru_cache(None)
def named_by(kind:type)->list:
    "Returns the classes and functions that methods of a class use, if it is not installed, but the user's own code"
    path = getattr(sys.modules.get(kind.__module__), '__file__', None)
    if '-packages' in str(path) or kind.__module__.partition('.')[0] in sys.stdlib_module_names and kind.__module__ != '__main__':
        return []
    res = []
    for f in vars(kind).values():
        if not isinstance(f, types.FunctionType): continue
        used = [f.__globals__.get(name) for name in f.__code__.co_names]
        res += [o for o in used if isinstance(o, (type,types.FunctionType))]
    return res

def is_found_by_name(o)->bool:
    "Returns whether `o` is a class or a function, which pickle finds by its name"
    is_named = isinstance(o, (type,types.FunctionType))
    return is_named and nested_attr(sys.modules.get(o.__module__), o.__qualname__) is o

# What a pickle may call

# While a file is loaded: the objects of the Learner by path, and what it does not have
objects = {}
missing = []

def object_at(path:str, kind:str):
    "Returns the object of this process that a path stands for"
    o = objects.get(path)
    if type(o).__qualname__ != kind: missing.append(f'no {kind} at {path}')
    return o

def method_of(o, name:str):
    "Returns a method that `o` has from its class"
    return getattr(type(o), name).__get__(o)

def made_array(values:Tensor)->np.ndarray:
    return values.numpy()

def subclasses(kind:type)->list:
    res = kind.__subclasses__()
    for o in list(res): res += subclasses(o)
    return res

def safe_names()->set:
    "Returns the classes and functions that any pickle may name, besides those that PyTorch calls safe"
    return {object_at, method_of, made_array, np.array, *_containers, *np.ScalarType, *subclasses(Tensor), random.Random,
            object, range, slice, Fraction, L, SimpleNamespace, type(Path()), RemovableHandle}

# Into a pickle

class PartPickler(pickle.Pickler):
    "Pickles parts of the objects of a Learner"
    paths = {}  # of the objects, by id
    names = set()  # classes and functions that the pickle may name

    def path_of(self, o)->str|None:
        return self.paths.get(id(o))

    def reducer_override(self, o):
        "Called for all but Python's numbers, texts and containers. Returns a function that makes `o`, and arguments"
        kind = type(o)
        path = self.path_of(o)
        if path:
            return object_at,(path, kind.__qualname__)
        if isinstance(o, (type,types.FunctionType)): self.check_name(o)
        if hasattr(kind, '__next__'): raise pickle.PicklingError('it is an iterator')
        if kind is types.MethodType:
            return method_of,(o.__self__, o.__name__)
        # PyTorch's `load` appends to lists and dicts only
        if kind is deque:
            return deque,(list(o), o.maxlen)
        if kind is defaultdict:
            return defaultdict,(o.default_factory, dict(o))
        # NumPy's own pickles depend on its version
        if isinstance(o, np.generic):
            return kind,(o.item(),)
        return reduced_array(o) if isinstance(o, np.ndarray) else NotImplemented

    def check_name(self, o):
        name = f'{o.__module__}.{o.__qualname__}'
        if o not in self.names and name not in _get_allowed_globals():
            raise pickle.PicklingError(f'it has {name}')

def reduced_array(o:np.ndarray)->tuple:
    try: return made_array,(torch.tensor(o),)
    except TypeError:  # texts, records or objects
        return np.array,(o.tolist(), o.dtype.descr if o.dtype.names else o.dtype.str)

# Large data are not written, and compared by a sample
LONG = 1000 # items
LARGE = 2**20 # elements
SAMPLE = 2**16 # bytes

class Comparing(PartPickler):
    "Makes digests of parts, which are the same in another process"
    def __init__(self):
        self.file = io.BytesIO()
        super().__init__(self.file)
        self.fast = True  # equal parts have equal bytes, also if they consist of other objects
        # Of the part that is pickled
        self.is_data = False  # whether it is of the data
        self.n_bytes = 0  # in its tensors

    def digest(self, path:str, value)->str|tuple:
        "Returns the text of a number or a text; a checksum of anything else, and whether it is large data"
        if type(value) in _plain:
            return repr(value)[:100]
        self.is_data = path.startswith('dls')
        self.n_bytes = 0
        self.file.seek(0)
        self.file.truncate()
        self.dump(value)
        return zlib.crc32(self.file.getvalue()),self.is_data and self.n_bytes > LARGE

    def persistent_id(self, o):
        "Called for all that a part contains"
        if type(o) in _plain:
            return None
        if isinstance(o, (TypedStorage,UntypedStorage)):
            return self.digest_of_memory(getattr(o, '_untyped_storage', o))
        if isinstance(o, PurePath):
            return o.name  # a folder may have been moved
        if isinstance(o, (set,frozenset)):
            return tuple(sorted(o, key=str))
        return self.sample_of(o) if self.is_data else None

    def digest_of_memory(self, storage:UntypedStorage)->int:
        self.n_bytes += storage.nbytes()
        memory = torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)
        return zlib.crc32(memory[::storage.nbytes()//SAMPLE+1].cpu().contiguous().numpy())

    def sample_of(self, o):
        "Returns a part of large data; None of anything else"
        if isinstance(o, (Tensor,np.ndarray)) and math.prod(o.shape) > LARGE: res = str(o)
        elif isinstance(o, list) and len(o) > LONG and not isinstance(o[0], int): res = (len(o), o[::len(o)//100])
        else: return None
        self.n_bytes = math.inf
        return res
