"AutoResume in one process: a fit that is interrupted goes on. `test_resume_kills.py` kills"
import pytest

from common import *
from fastxtend_accum import resume
from resume_layouts import accum, make


class Stop(Callback):
    "Interrupts training after its `nth` window"
    order = 300
    def __init__(self, nth): self.left = nth

    def after_batch(self):
        if not self.training: return
        self.left -= 1
        if not self.left: raise KeyboardInterrupt


def seeded(*cbs, seed=1):
    set_seed(seed)
    return make(accum(), *cbs)


def train(learn, *cbs, n_epoch=3, lr=.02, **kwargs):
    return fit(learn, n_epoch, lr, 'fit_one_cycle', cbs=[AutoResume(every=2, verbose=False, **kwargs), *cbs])


def interrupt(nth=17):
    learn = seeded()
    with pytest.raises(KeyboardInterrupt): train(learn, Stop(nth))
    return learn


def plain_fit():
    return fit(seeded(), 3, .02, 'fit_one_cycle')


def files():
    return sorted(Path('models').glob('resume-0*.pth'))


def assert_same_end(learn, expected):
    assert len(expected.recorder.losses) > 30
    assert_same(weights(learn), weights(expected))
    assert_same(losses(learn), losses(expected))
    assert learn.recorder.lrs == expected.recorder.lrs


def test_the_callback_changes_nothing(): assert_same_end(train(seeded()), plain_fit())


def test_after_ctrl_c_the_same_cell_goes_on():
    learn = interrupt()
    assert_same_end(train(learn), plain_fit())


def test_a_new_learner_with_another_seed_goes_on():
    interrupt()
    assert_same_end(train(seeded(seed=9)), plain_fit())


@pytest.mark.parametrize('changed, name', [(dict(n_epoch=4), 'epochs'), (dict(lr=.05), 'schedule of lr')])
def test_other_settings_are_an_error_that_names_them(changed, name):
    interrupt()
    before = [o.read_bytes() for o in files()]
    with pytest.raises(ValueError, match=f'{name}.*restart=True'): train(seeded(), **changed)
    assert [o.read_bytes() for o in files()] == before


def test_restart_starts_over():
    interrupt()
    assert_same_end(train(seeded(), restart=True), plain_fit())


def half(content): return content[:len(content)//2]
def empty(content): return b''
def garbage(content): return b'hello'*100


def flipped(content):
    "With one other bit"
    res = bytearray(content)
    res[len(res)//2] ^= 1
    return bytes(res)


@pytest.mark.parametrize('damage', [half, empty, garbage, flipped])
def test_a_damaged_file(damage):
    "The one before stands in"
    interrupt()
    path = Path('models/resume-0.pth')
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match='damaged'): learn = train(seeded(seed=9))
    assert_same_end(learn, plain_fit())


@pytest.mark.filterwarnings('ignore:.*damaged')
def test_two_damaged_files_are_an_error():
    interrupt()
    for path in files(): path.write_bytes(half(path.read_bytes()))
    with pytest.raises(ValueError, match='restart=True'): train(seeded())


def test_a_first_save_that_is_impossible_is_an_error():
    Path('models').write_text('no folder')
    with pytest.raises(OSError, match='cannot save'): train(seeded())


def test_a_later_save_that_is_impossible_is_a_warning(monkeypatch):
    "Training goes on"
    save = resume.ResumeFile.save
    n_saves = []

    def save_once(self, state):
        n_saves.append(1)
        if len(n_saves) > 1: raise OSError('disk full')
        save(self, state)
    monkeypatch.setattr(resume.ResumeFile, 'save', save_once)
    with pytest.warns(UserWarning, match='disk full'): learn = train(seeded())
    assert_same_end(learn, plain_fit())


class Evil:
    def __reduce__(self): return os.mkdir, ('code-has-run',)


@pytest.mark.filterwarnings('ignore:.*damaged')
def test_a_file_cannot_run_code():
    interrupt()
    for path in files(): torch.save(dict(x=Evil()), path)
    with pytest.raises(ValueError, match='delete them'): train(seeded())
    assert not Path('code-has-run').exists()
