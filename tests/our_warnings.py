"What this package warns of in a fit"
from common import *
from fastxtend_accum.windows.checks import AccumWarning


def warnings_of(learn, n_epoch=1, lr=0.01):
    "Trains, and returns what this package warns of; its warnings are no errors here"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        fit(learn, n_epoch, lr)
    return [str(o.message) for o in caught if issubclass(o.category, AccumWarning)]
