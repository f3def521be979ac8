"What may be the reason for a difference"
from common import *
from fastxtend_accum.checking.suspects import silence, suspects


def test_a_silent_callback_still_begins_the_fit():
    seen = []
    class Notes(Callback):
        def before_fit(self): seen.append('before_fit')
        def before_batch(self): seen.append('before_batch')
    learn = make_learner(32, cbs=Notes())
    silence(learn, Notes)
    fit(learn, 1)
    assert seen == ['before_fit']


def test_the_whole_model_comes_last():
    names = [o.name for o in suspects(make_learner(8), [], [], is_random=False, n=3)]
    assert names == ['the loss', 'the model']
