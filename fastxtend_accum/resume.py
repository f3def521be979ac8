"""If your script is killed, run it again: the fit continues in the middle of the epoch, and ends with the same weights"""
from __future__ import annotations

from fastai.basics import *
from torch.nn.parameter import is_lazy

from .windows.checks import check_flags,is_number
from .windows.loop import replaced_method
from .windows.processes import is_sharded
from .callback import WindowCallback,leader_of
from .resuming.fit import SavedFit
from .resuming.signals import held_signals

class AutoResume(WindowCallback):
    """Save a fit while it runs. If the process is killed, run the script again: the same line continues the fit in
    mid-epoch, and the final weights are the same"""
    order = 10_000  # after all others: what they have done is in the file
    run_valid = True
    lead_rank = 3
    _stateattrs = ('loop','place','saved_fit')
    saved_fit = None  # in a copy, too
    def __init__(self,
        every:int|None=None, # Optimizer steps between saves; None: go by `minutes`
        minutes:Real=5, # Minutes between saves; more if saving takes more than 5% of the time
        fname:str='resume', # Folder of the files, in `learn.path/learn.model_dir`: a different one for each script
        restart:bool=False, # Start over, whatever the files contain
        verbose:bool=True, # Print where a fit resumes
    ):
        store_attr()
        self.saved_fit = None  # while a fit runs
        self.read_settings()

    def read_settings(self):
        for value in (self.every or 1, self.minutes):
            if not is_number(value) or not 0 < value < math.inf:
                raise ValueError(f'every and minutes must be numbers above 0, not {value!r}')
        check_flags(restart=self.restart, verbose=self.verbose)

    def is_in_fit(self)->bool:
        return self.saved_fit is not None and self.learn and not self.learn.lock.locked()

    def before_fit(self):
        super().before_fit()
        if self.is_in_fit(): self.saved_fit = None  # of a fit that was interrupted

    def before_train(self):
        super().before_train()
        if not self.learn or hasattr(self.learn, 'lr_finder'): return  # it was removed; or it is no fit
        if not self.saved_fit:
            raise ValueError('the Learner has its own _do_fit, or a second AutoResume: leave one of them out')
        self.saved_fit.begin_training()

    def after_train(self):
        if self.is_in_fit(): self.saved_fit.trained = self.saved_fit.graph.state()

    def after_batch(self):
        if not self.learn.training and self.is_in_fit(): self.saved_fit.save_in_validation()

    def after_epoch(self):
        if self.is_in_fit(): self.saved_fit.rows += [list(rec.log) for rec in self.learn._grab_cbs(Recorder)]

    def after_fit(self):
        if not self.is_in_fit(): return
        fit = self.saved_fit
        self.saved_fit = None
        fit.end()
        del fit.folder.interrupted[self.learn]

fastai_do_fit = Learner._do_fit

def do_fit(self:Learner):
    "Runs the epochs of a fit. With an `AutoResume`, skips epochs that have already run in a killed process"
    resume = first(o for o in self._grab_cbs(AutoResume) if o.run and o.learn)
    if not resume or hasattr(self, 'lr_finder') or not self.n_epoch:
        fastai_do_fit(self)
        return
    loss_func = self.loss_func
    fit = resume.start()
    held_signals.begin()
    try:
        for epoch in range(fit.begin(), self.n_epoch):
            self.epoch = epoch
            fit.begin_epoch()
            self._with_events(fit.run_epoch, 'epoch', CancelEpochException)
    except BaseException:
        self.loss_func = loss_func  # a callback may have replaced it
        raise
    finally:
        fit.folder.interrupted[self] = fit.number
        held_signals.end()

Learner._do_fit = do_fit

@patch
def start(self:AutoResume)->SavedFit:
    "Begins a fit. Raises ValueError if it cannot go on in mid-epoch"
    learn = self.learn
    replaced = replaced_method(learn)
    if replaced:
        raise ValueError(f"{type(learn).__name__} has its own {replaced}, which cannot go on in mid-epoch: leave "
                         "AutoResume out")
    if is_sharded(learn.model):
        raise ValueError('AutoResume cannot save a sharded model: use DistributedDataParallel')
    if any(map(is_lazy, learn.model.parameters())):
        raise ValueError('AutoResume needs a model whose layers have sizes: run a batch through it before the fit')
    self.saved_fit = SavedFit(self, leader_of(learn))
    return self.saved_fit
