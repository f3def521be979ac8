"Learners with methods in the place of fastai's: in the class, in the object, or by a patch, also one before the import"
import importlib
import sys

from common import *
from fastxtend_accum.windows import loop


# Each puts `method` in the place of the method `name` of `learn`; `patch` takes it back

def in_class(learn, name, method, patch):
    learn.__class__ = type('OwnLearner', (Learner,), {name: method})


def in_object(learn, name, method, patch):
    setattr(learn, name, types.MethodType(method, learn))


def as_patch(learn, name, method, patch):
    patch.setattr(Learner, name, method)


PLACES = [in_class, in_object, as_patch]


def import_after_patch(name, method):
    """Patches the Learner, and imports this package as if nobody had done so before; returns it. To be called in a
    process of its own"""
    Learner.all_batches = loop.fastai_all_batches
    setattr(Learner, name, method)
    for module in list(sys.modules):
        if module.startswith('fastxtend_accum'): del sys.modules[module]
    return importlib.import_module('fastxtend_accum.all')
