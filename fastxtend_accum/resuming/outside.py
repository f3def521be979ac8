"""What loggers have outside of the process: files and runs"""
from __future__ import annotations
from fastai.basics import *
from fastai.callback.progress import CSVLogger

def state_of_loggers(learn)->dict:
    "Returns the run of W&B, and the sizes of the files that `CSVLogger` has begun to write or to append to"
    sizes = []
    for cb in learn._grab_cbs(CSVLogger):
        cb.file.flush()
        sizes.append(cb.file.tell())
    run = getattr(sys.modules.get('wandb'), 'run', None)
    ids = {name:getattr(run, name, None) for name in ('id','project','entity')}
    return dict(sizes=sizes, run=ids)

def restore_loggers(learn, state:dict, rows:list):
    "Goes on in the run of W&B, and gives loggers the rows of epochs that have ended"
    wandb = sys.modules.get('wandb')
    run_id = state['run']['id']
    if run_id and getattr(wandb, 'run', None) and wandb.run.id != run_id:
        wandb.finish()
        wandb.init(resume='must', **state['run'])
    for cb,size in zip(learn._grab_cbs(CSVLogger), state['sizes']):
        cb.file.flush()
        cb.file.truncate(size)  # it may have these rows already
    bar = nested_attr(learn, 'progress.mbar')
    if bar: bar.update(0)  # where a bar of fastprogress has to begin
    for row in rows: learn.logger(L(row))
