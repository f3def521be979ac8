"Assertions that several files share, beside those of common.py"
from common import *


def assert_nothing_left(learn):
    "Asserts that neither the Learner nor a module has a method of ours any more"
    for name in ('all_batches', 'one_batch', '_do_one_batch', '_do_grad_opt', '_backward'):
        assert name not in vars(learn)
    for m in learn.model.modules(): assert 'forward' not in vars(m)
