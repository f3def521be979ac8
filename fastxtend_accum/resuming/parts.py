"""What an object consists of: attributes, and a content"""
from __future__ import annotations
import copyreg,io

from fastai.basics import *
from fastai.data.load import _FakeLoader

generators = random.Random,np.random.RandomState,np.random.Generator,torch.Generator

# Attributes

# Libraries that show, or that log to somewhere else
_outside = {'fastprogress','tqdm','rich','matplotlib','IPython','wandb','tensorboard','tensorboardX','comet_ml','mlflow',
            'neptune','clearml','optuna'}

# Attributes that a process sets by itself, or that may differ
_left_out = {
    Learner:('dl','xb','yb','pred','loss_grad'),
    DataLoader:('it','_DataLoader__idxs'),
    Callback:('start_epoch','is_new_fit','accum_bs_of'),
    (_FakeLoader,torch.utils.data.DataLoader):('num_workers','prefetch_factor')}

def library_of(kind:type)->str:
    return kind.__module__.partition('.')[0]

def is_of_package(o)->bool:
    "Returns whether `o` is a callback that runs the batches as windows"
    return 'loop' in getattr(type(o), '_stateattrs', ())

def has_no_state(o, name:str, value)->bool:
    "Returns whether nothing of an attribute is of use in another process"
    if isinstance(value, io.IOBase) or library_of(type(value)) in _outside:
        return True
    if is_of_package(o) and name in o._stateattrs:
        return True
    return any(isinstance(o, kind) and name in names for kind,names in _left_out.items())

def attributes_of(o)->dict:
    "Returns the attributes of an object by name; of a function, also the variables of the function around it"
    kind = type(o)
    res = dict(getattr(o, '__dict__', {}))
    if kind is types.FunctionType:
        res.update({name:cell.cell_contents for name,cell in cells_of(o).items()})
        return res
    is_pythons = library_of(kind) in sys.stdlib_module_names  # such as a lock or a pool
    if is_pythons and kind is not SimpleNamespace:
        return {}
    for name in copyreg._slotnames(kind):
        if hasattr(o, name): res[name] = getattr(o, name)
    return {name:value for name,value in res.items() if not has_no_state(o, name, value)}

def cells_of(f)->dict:
    "Returns the places of the variables that `f` has of the function around it"
    cells = dict(zip(f.__code__.co_freevars, f.__closure__ or ()))
    return {name:cell for name,cell in cells.items() if cell != types.CellType()}  # which is empty

def set_attribute(o, name:str, value):
    present = attributes_of(o).get(name)
    # In place, since your script may have a list, too, that it has passed to a callback
    if type(present) is type(value) and type(value) in (list,dict):
        set_content(present, value)
    elif isinstance(o, types.FunctionType) and name in cells_of(o):
        cells_of(o)[name].cell_contents = value
    else: object.__setattr__(o, name, value)  # not `setattr`, which callbacks and modules have changed

# Content

def content_of(o):
    "Returns what a weight, a random generator, or a list or dict with attributes contains; None if nothing"
    if isinstance(o, Tensor):
        return content_of_weight(o)
    if isinstance(o, random.Random):
        return o.getstate()
    if isinstance(o, np.random.Generator):
        return o.bit_generator.state
    if isinstance(o, generators):
        return o.get_state()
    if isinstance(o, dict):
        return dict(o)
    return list(list.__iter__(o)) if isinstance(o, list) else None

def set_content(o, content):
    "Sets, in place, what `content_of` has returned"
    if isinstance(o, Tensor): set_weight(o, *content)
    elif isinstance(o, random.Random): o.setstate(content)
    elif isinstance(o, np.random.Generator):
        o.bit_generator.state = content
    elif isinstance(o, generators): o.set_state(content)
    elif isinstance(o, list):
        o[:] = content
    else:
        o.clear()
        o.update(content)

def content_of_weight(o:Tensor)->tuple:
    "Returns its values, whether it is trained, and its gradient: None, 0 for zeros, or its values"
    # Where a gradient is 0, an optimizer takes a step, by momentum and weight decay; where there is none, it does not
    has_zeros = o.grad is not None and not o.grad.any()
    return o.detach(),o.requires_grad,0 if has_zeros else o.grad

def set_weight(o:Tensor, values:Tensor, requires_grad:bool, grad:Tensor|int|None):
    # By `data`, since a backward pass refuses tensors that were changed otherwise
    if o.shape != values.shape or o.layout != torch.strided:
        o.data = values
    elif not torch.equal(o, values): o.data.copy_(values)  # a tensor that was expanded cannot be written to
    o.requires_grad_(requires_grad)
    o.grad = torch.zeros_like(o) if isinstance(grad, int) else grad
