"The files of fits: whole, in a folder of their own, locked while a process has fits there"
import pytest

from common import *
from fastxtend_accum.resuming.files import Folder, read_file, remove_files_at_exit, whole_file
from resumed import assert_same_end, learner, new_process, stop, train, whole


class Fails(Callback):
    order = 60
    def __init__(self, error): self.error = error

    def after_batch(self):
        if self.training and self.epoch == 1: raise self.error('in epoch 1')


def script(): return train(learner())
def files(): return sorted(o.name for o in Path('models/resume').iterdir())


def flipped(content):
    "With one other bit"
    res = bytearray(content)
    res[len(res)//2] ^= 1
    return bytes(res)


def no_name(content):
    "With a byte that no text has, in each place that names the data"
    return content.replace(b'data.pkl', b'dat\xff.pkl')


def write_archive(path):
    "Writes an archive in an archive, as the state of a process is inside of a file"
    inner = io.BytesIO()
    torch.save([1], inner)
    torch.save(inner.getvalue(), path, pickle_protocol=4)  # which writes bytes as they are


@pytest.mark.parametrize('damage', [flipped, no_name])
def test_a_damaged_file_is_an_error(damage):
    path = Path('0.pth')
    write_archive(path)
    assert read_file(path) == path.read_bytes()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match='is damaged: .*restart=True'): read_file(path)


def test_a_file_whose_end_is_lost_is_damaged():
    "Also if what is left ends with the inner archive"
    path = Path('0.pth')
    write_archive(path)
    content = path.read_bytes()
    for n in range(len(content)):
        path.write_bytes(content[:n])
        with pytest.raises(ValueError, match='is damaged'): read_file(path)


def test_a_write_that_fails_leaves_the_file_before():
    path = Path('0.pth')
    path.write_bytes(b'before')
    with pytest.raises(OSError), whole_file(path) as f:
        f.write(b'half')
        raise OSError('disk full')
    assert path.read_bytes() == b'before'
    assert list(Path().iterdir()) == [path]


def takes_lock(path):
    "In another process: exits with 0 if an error tells it what to do"
    folder = Folder(path)
    acquire = folder.lock.acquire
    folder.lock.acquire = lambda timeout: acquire(timeout=.1)
    try: folder.take()
    except RuntimeError as e: os._exit(0 if 'fname=' in str(e) else 1)
    os._exit(3)


def test_another_process_with_fits_in_the_folder_is_an_error():
    path = Path('models/resume')
    folder = Folder(path)
    folder.take()
    assert forked(takes_lock, path) == 0
    assert forked(takes_lock, Path('models/other')) == 3


def test_a_fit_is_new_unless_the_same_learner_was_interrupted():
    folder = Folder(Path())
    first, other = learner(), learner()
    assert folder.begin(first) == 0
    assert folder.begin(other) == 1
    assert folder.begin(first) == 0
    folder.count_from(1)  # its file is older than the other fit
    folder.end(first)
    assert folder.begin(first) == 2


@pytest.mark.long
def test_a_finished_fit_keeps_one_file_until_the_process_ends():
    script()
    script()
    assert files() == ['0.pth', '1.pth', 'lock']
    remove_files_at_exit()
    assert files() == ['lock']


def has_error(patch): patch.setattr(sys, 'last_value', ValueError(), raising=False)


@pytest.mark.long
@pytest.mark.parametrize('before,after,left', [
    (noop, has_error, ['0.pth', 'lock']),
    (has_error, noop, ['lock'])])  # as in a notebook, in which a cell had an error
def test_nothing_is_removed_if_the_script_ends_with_an_error(before, after, left, monkeypatch):
    before(monkeypatch)
    script()
    after(monkeypatch)
    remove_files_at_exit()
    assert files() == left


@pytest.mark.parametrize('error', [KeyboardInterrupt, ValueError])
def test_nothing_is_removed_after_a_fit_that_failed(error):
    "Also if the script handles the error, and ends by `sys.exit(1)`"
    new_process()
    with pytest.raises(error): train(learner(Fails(error)))
    remove_files_at_exit()
    assert files() == ['0.pth', 'lock']


def test_models_that_you_save_are_left_alone():
    learn = script()
    learn.save('resume')
    learn.save('resume-0')
    learn.save('resume/3-epochs')
    remove_files_at_exit()
    assert {o.name for o in Path('models').iterdir()} == {'resume', 'resume.pth', 'resume-0.pth'}
    assert files() == ['3-epochs.pth', 'lock']


@pytest.mark.long
def test_restart_starts_over():
    expected = whole(script)
    stop(script)
    new_process(seed=1)
    assert_same_end(train(learner(), restart=True), expected)
