"A save and what is restored: each part is verified"
import pytest

from common import *
from fastxtend_accum.resuming.graph import Graph
from fastxtend_accum.resuming.identity import text_of
from fastxtend_accum.resuming.parts import CONTENT
from fastxtend_accum.resuming.signals import HeldSignals, held_signals
from resumed import assert_same_end, learner, leave_out, new_process, stop, train, whole


class Counts(Callback):
    def __init__(self): self.n = 0
    def after_step(self): self.n += 1


PARTS = {
    'a callback': ('Counts', 'n'),
    'the Recorder': ('Recorder', CONTENT),
    'a weight': ('model.0.0.weight', CONTENT),
    'a buffer': ('model.0.1.running_mean', CONTENT),
    'the optimizer': ('opt', 'state'),
    'a generator': ('generators', CONTENT),
    'the order of samples': ('dls.train', 'rng')}


@pytest.mark.thin(5)
@pytest.mark.parametrize('name', PARTS)
def test_a_part_that_is_left_out_is_named(name, monkeypatch):
    "Whatever `restore` forgets, the digests find"
    part = PARTS[name]
    def script(): return train(learner(Counts()))
    stop(script)
    monkeypatch.setattr(Graph, 'restore', Graph.restore)  # is undone after the test
    leave_out(lambda *o: o == part)
    text = text_of('.'.join(part))
    with pytest.raises(ValueError, match=f'could not restore .*{re.escape(text)}'): script()


def test_a_first_save_that_is_impossible_is_an_error():
    Path('models').write_text('no folder')
    with pytest.raises(OSError, match='models'): train(learner())


@pytest.mark.long
def test_a_later_save_that_is_impossible_is_a_warning(monkeypatch):
    "It says the system's reason; training goes on"
    expected = whole(lambda: train(learner()))
    write = Graph.write
    n_saves = itertools.count()

    def fail(self, o, file):
        is_file = not isinstance(file, io.BytesIO)
        if is_file and next(n_saves): raise OSError('no space left on device')
        write(self, o, file)
    monkeypatch.setattr(Graph, 'write', fail)
    monkeypatch.setattr(held_signals, 'waiting', 15)  # it is also saved in validation
    monkeypatch.setattr(HeldSignals, 'deliver', noop)
    new_process(seed=1)
    with pytest.warns(UserWarning, match='no space left.*since the last save is lost'): learn = train(learner())
    assert_same_end(learn, expected)


def test_the_first_save_is_read_back(monkeypatch):
    def unreadable(self, content): raise ValueError('unreadable')
    monkeypatch.setattr(Graph, 'read', unreadable)
    with pytest.raises(OSError, match='unreadable'): train(learner())


def size_after(learn, n):
    "Returns how many bytes the state has after `n` steps"
    recorder = learn.recorder
    recorder.losses = [torch.tensor(float(i)) for i in range(n)]
    recorder.lrs = [float(i) for i in range(n)]
    recorder.iters = list(range(n))
    return len(Graph(learn).state()['rest'])


def test_a_save_after_many_steps_is_small():
    "At most 60 bytes for each step"
    learn = fit(learner(), 1)
    few, many = [size_after(learn, n) for n in (1_000, 20_000)]
    assert 4*19_000 < many-few < 60*19_000
