"""A fit, and its state in a file"""
from __future__ import annotations

import torch.distributed as dist
from fastai.basics import *

from ..windows.processes import all_reduce_scalar,n_processes
from .files import Folder,folders,read_file,whole_file
from .graph import Graph,is_no_weight
from .identity import differences,draws_numbers,is_of_hooks,may_differ,n_workers,settings_of,text_of
from .outside import restore_loggers,state_of_loggers
from .pickles import missing
from .reader import Reader
from .signals import held_signals

class SavedFit:
    "A fit, and its state in a file"
    def __init__(self, cb, leader):
        learn = cb.learn
        self.cb = cb
        self.learn = learn
        self.leader = leader  # runs the windows
        self.n_processes = n_processes(learn)
        self.rank = dist.get_rank() if self.n_processes > 1 else 0
        path = (learn.path/learn.model_dir/cb.fname).absolute()
        self.folder = folders.setdefault(path, Folder(path))
        if self.rank == 0: self.folder.take()
        self.number = self.folder.begin(learn)
        self.path = path/f'{self.number}.pth'
        if cb.restart: self.path.unlink(missing_ok=True)
        self.graph = Graph(learn)
        self.graph.begun = {**settings_of(learn), **self.graph.begun}
        self.loggers = state_of_loggers(learn)
        self.found = {}  # the content of the file, until the fit goes on
        self.at_epoch = None  # the state when the epoch began
        self.trained = None  # and when its training part had ended
        self.reader = None
        self.next_save = 0  # when to save, by optimizer steps or seconds; 0: it has not been saved
        self.rows = []  # of the epoch table

# Into the file

@patch
def save(self:SavedFit, place:dict|str, state:dict|None=None):
    "Writes the state at a `place`. Raises OSError if the first save is impossible, and warns if a later one is"
    start = time.monotonic()
    try:
        content = self.content(place, state or self.graph.state())
        if self.rank == 0:
            with whole_file(self.path) as f: self.graph.write(content, f)
            if not self.next_save: self.graph.read(read_file(self.path))  # what cannot be read is an error now
    except Exception as e:
        reason = e.__context__ or e  # PyTorch hides that a disk is full, for example
        text = f'AutoResume cannot save {self.path}: {reason}'
        if not self.next_save: raise OSError(text) from e
        warn(f'{text}; a kill would lose what has run since the last save')
    most = 20*(time.monotonic()-start)  # so that saving takes at most 5% of the time
    self.next_save = self.clock()+(self.cb.every or max(60*self.cb.minutes, most))

@patch
def content(self:SavedFit, place:dict|str, state:dict)->dict:
    "Returns what the file contains: process 0 writes for all"
    lost = state['lost']
    if lost:
        names = [f'{text_of(part)} ({reason})' for part,reason in lost.items()]
        warn(f"AutoResume does not keep {'; '.join(names)}")  # Python shows it once
    own = dict(
        place=place,
        rest=state['rest'],
        digests=state['digests'],
        at_epoch=self.at_epoch,
        reader=self.reader and self.reader.state())
    of_all = [own]*self.n_processes
    if self.n_processes > 1: dist.all_gather_object(of_all, own)
    return dict(
        begun=self.graph.begun,
        n_begun=self.folder.n_begun,
        n_workers=n_workers(self.learn.dls.train),
        epoch=self.learn.epoch,
        rows=self.rows,
        loggers=self.loggers,
        weights=state['weights'],
        processes=of_all)

@patch
def clock(self:SavedFit)->Real:
    "Returns what `next_save` is compared with"
    return self.leader.loop.n_steps if self.cb.every else time.monotonic()

@patch
def save_if_due(self:SavedFit):
    "Between two windows. The first save is due at once, to see whether saving is possible"
    loop = self.leader.loop
    is_told = held_signals.received is not None
    is_due = self.clock() >= self.next_save
    if self.n_processes > 1:
        if loop.n_steps%10 and not self.cb.every: return  # asking makes them wait for each other
        is_told = all_reduce_scalar(self.learn, is_told)
        is_due = all_reduce_scalar(self.learn, is_due)
    if is_told or is_due: self.save(loop.state())
    if is_told: held_signals.let_through()

@patch
def save_in_validation(self:SavedFit):
    "After a batch: saves what there was before validation, if the process is told to end"
    if held_signals.received is None: return
    self.save('validation', self.trained)
    held_signals.let_through()

# Out of the file

@patch
def begin(self:SavedFit)->int:
    "Runs before the first epoch of this process, and returns the number of that epoch"
    contents = [read_file(self.path) if self.rank == 0 else None]
    if self.n_processes > 1: dist.broadcast_object_list(contents, 0)
    if contents[0] is None:
        return 0
    found = self.graph.read(contents[0])
    self.found = {**found, **found['processes'][self.rank%len(found['processes'])]}
    self.check()
    self.rows,self.loggers = found['rows'],found['loggers']
    self.folder.n_begun = found['n_begun']
    place,epoch = self.found['place'],found['epoch']
    if self.cb.verbose and self.rank == 0:
        where = 'at the end of' if place == 'end' else 'in'
        print(f'AutoResume goes on {where} epoch {epoch}, from {self.path}')
    restore_loggers(self.learn, self.loggers, self.rows)
    if place == 'end':
        self.leader.begin_fit()
        self.restore()
        return self.learn.n_epoch
    self.graph.restore(self.found['at_epoch'])  # callbacks are going to begin the epoch once more
    if place != 'validation': self.leader.begin_epoch_at(place)
    return epoch

@patch
def check(self:SavedFit):
    "Raises ValueError if this fit is not the one that was saved. Warns of other numbers and texts of callbacks"
    differ = differences(self.graph, self.found['begun'], self.found['digests'])
    for part in [part for part in differ if may_differ(self.graph, part)]:
        warn(f'AutoResume goes on with the earlier value: this fit has {differ.pop(part)}')
    errors = [*missing, *differ.values()]
    dl = self.learn.dls.train
    workers = self.found['n_workers']
    if n_workers(dl) != workers and draws_numbers(self.graph, dl):
        errors.append(f'{n_workers(dl)} workers, not {workers}, which draw random numbers')
    if errors:
        raise ValueError(f"this fit cannot go on from {self.path}, since it has {'; '.join(errors[:8])}: use the same settings, seed "
                         "the split of the data and lr_find, or pass AutoResume(restart=True) to start over, or another fname")

@patch
def restore(self:SavedFit):
    "Restores the state of the file, and makes sure that it is the same"
    found = self.found
    self.graph.restore(found['rest'], found['weights'])
    _,now,_ = self.graph.compare()
    differ = [part for part,digest in found['digests'].items() if now.get(part) != digest and not is_of_hooks(part)]
    if differ: raise ValueError(f"AutoResume could not restore {', '.join(map(text_of, differ[:8]))}")

@patch
def begin_epoch(self:SavedFit):
    "Notes the state, since a process that goes on lets callbacks begin the epoch once more"
    self.at_epoch = self.found.get('at_epoch')
    if self.at_epoch is None: self.at_epoch = self.graph.state(is_no_weight)['rest']

@patch
def run_epoch(self:SavedFit):
    "Takes the place of `_do_epoch`"
    if self.found.get('place') != 'validation':
        self.learn._do_epoch()
        return
    self.restore()
    self.found = {}
    self.learn._do_epoch_validate()

@patch
def begin_training(self:SavedFit):
    "After all callbacks have begun the training part of an epoch, hooks into the loop"
    loop = self.leader.loop
    if self.found: self.restore()
    self.reader = Reader(self.graph, loop.batches.n_loaded, *self.found.get('reader', ()))
    self.found = {}
    loop.hook_in(self.save_if_due, self.reader)

@patch
def end(self:SavedFit):
    "After the fit, saves the final state, in case the process is killed in a later fit; or restores that state"
    if not self.found: self.save('end')
    else:
        self.found.update(self.graph.read(read_file(self.path)))
        self.restore()
