"Fits that are interrupted, and go on as if in a new process"
import pytest

from common import *
from fastxtend_accum.resuming.files import folders
from fastxtend_accum.resuming.fit import SavedFit
from fastxtend_accum.resuming.graph import Graph
from resume_layouts import accum, make

N_STEPS = 39  # of a fit: 3 epochs of 13 windows


steps = SimpleNamespace(n=0, at=None)  # of this process; a global, because no file holds it


class Stops(Callback):
    "Raises an error after the step whose number is `steps.at`"
    order = 60

    def after_step(self):
        steps.n += 1
        if steps.n == steps.at: raise KeyboardInterrupt


def new_process(seed=9):
    "As if this process had just begun: it has no fits yet"
    for folder in folders.values(): folder.lock.release(force=True)
    folders.clear()
    set_seed(seed)
    steps.n = 0
    steps.at = None


def learner(*cbs, **kwargs):
    return make(accum(), Stops(), *cbs, **kwargs)


def train(learn, *cbs, n_epoch=3, lr=.02, every=8, **kwargs):
    return fit(learn, n_epoch, lr, 'fit_one_cycle', cbs=[AutoResume(every, verbose=False, **kwargs), *cbs])


def stop(script, at=17):
    "Runs `script()` until an error, one step after a save. What follows is like a new process"
    new_process(seed=1)
    steps.at = at
    with pytest.raises(KeyboardInterrupt): script()
    new_process()


def whole(script):
    "Runs `script()` without saving anything"
    new_process(seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoResume, 'run', False)
        return script()


def assert_same_end(learn, expected):
    assert len(losses(expected)) >= 15
    assert_same(weights(learn), weights(expected))
    assert_same(losses(learn), losses(expected))
    assert learn.recorder.lrs == expected.recorder.lrs


def assert_goes_on(script, at=17, every=8):
    "Returns the Learner that went on, by a script that returns one"
    expected = whole(script)
    n_steps = steps.n
    stop(script, at)
    learn = script()
    assert steps.n <= n_steps-at+every  # it has not begun again
    assert_same_end(learn, expected)
    return learn


# Mutations: a part of the state is left out

def leave_out(is_left_out, verifies=True):
    "Makes `Graph.restore` leave out the parts of which `is_left_out(path, name)` is true, in this process"
    original = Graph.restore

    def without(parts):
        return {part: value for part, value in parts.items() if not is_left_out(*part.rsplit('.', 1))}

    def restore(self, rest, weights={}):
        read = self.read
        self.read = lambda content: without(read(content))
        try: original(self, rest, without(weights))
        finally: del self.read

    def restore_unverified(self):
        self.graph.restore(self.found['rest'], self.found['weights'])
    Graph.restore = restore
    if not verifies: SavedFit.restore = restore_unverified
