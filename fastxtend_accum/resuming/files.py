"""The files of the fits of a process: a folder that no other process uses, and in it one file for each fit"""
from __future__ import annotations
import atexit,io,zipfile

from fastai.basics import *
from filelock import FileLock,Timeout

@contextmanager
def whole_file(path:Path):
    "Opens a file to write. At whatever moment the process is killed, `path` is the last one that was written as a whole"
    unfinished = path.with_suffix('.new')
    try:
        with open(unfinished, 'wb') as f:
            yield f
            f.flush()
            os.fsync(f)
        unfinished.replace(path)
    finally: unfinished.unlink(missing_ok=True)  # it would take the last space of a full disk

def read_file(path:Path)->bytes|None:
    "Returns the content; None if there is no file"
    if not path.exists():
        return None
    content = path.read_bytes()
    if is_whole(content):
        return content
    raise ValueError(f'AutoResume: {path} is damaged: to start over, delete it or pass restart=True')

def is_whole(content:bytes)->bool:
    "Returns whether a file of PyTorch's has the checksums that stand in it, at which `torch.load` does not look"
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as f: return f.testzip() is None
    except zipfile.BadZipFile: return False

class Folder:
    "The fits of this process that have the same `fname`, by their numbers"
    def __init__(self, path:Path):
        self.path = path
        self.lock = FileLock(path/'lock')
        self.n_begun = 0
        self.interrupted = {}  # numbers of fits that an error has ended, by the Learner

    def begin(self, learn)->int:
        """Returns the number of the fit that begins. It is a new one, which never goes on from a file that this process
        wrote, unless the same Learner was interrupted in a fit"""
        if learn in self.interrupted:
            return self.interrupted.pop(learn)
        self.n_begun += 1
        return self.n_begun-1

    def take(self):
        "Raises an error if another process has fits here"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # Until the process ends: a job that begins later must not take an ended fit for its own. Workers of a
            # process that was killed hold its lock for some seconds
            self.lock.acquire(timeout=10)
        except Timeout as e:
            raise RuntimeError(f'another process has fits in {self.path}: pass AutoResume(fname=...), or end that '
                               'process') from e
        except OSError as e: raise OSError(f'AutoResume cannot save in {self.path}: {e}') from e

folders = {}  # of this process, by path

@atexit.register
def remove_files_at_exit():
    "Removes the files if the process ends without an error, so that the next process begins with its first fit"
    for folder in folders.values():
        is_done = folder.lock.is_locked and not folder.interrupted and not hasattr(sys, 'last_value')
        if not is_done: continue
        for path in folder.path.glob('*.pth'): path.unlink()  # the lock stays: somebody may wait for it
