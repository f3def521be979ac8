"What loggers have outside of the process: files and runs"
import pytest

from common import *
from fastxtend_accum.resuming.outside import restore_loggers, state_of_loggers
from resumed import learner, new_process, stop, train, whole


def rows():
    "Returns the lines of CSVLogger's file without their times"
    return [line.rpartition(',')[0] for line in Path('history.csv').read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize('append', [False, True])
def test_the_table_of_epochs_is_whole(append):
    "With `append`, the rows of an earlier fit stay, and none is there twice"
    def script(): return train(learner(CSVLogger(append=append)))
    whole(script)
    expected = rows()
    assert len(expected) == 4
    Path('history.csv').unlink()
    if append: Path('history.csv').write_text('earlier,0\n')
    stop(script, at=30)
    script()
    earlier = ['earlier']*append
    assert rows() == earlier+expected


def test_a_row_has_no_time_if_the_recorder_adds_none():
    def script():
        learn = learner(CSVLogger())
        learn.recorder.add_time = False
        return train(learn)
    whole(script)
    expected = Path('history.csv').read_text()
    stop(script, at=30)
    script()
    assert Path('history.csv').read_text() == expected


@pytest.mark.long
def test_the_row_of_an_epoch_that_ends_the_fit_is_kept():
    "EarlyStoppingCallback cancels the fit once the epoch has been logged"
    def script():
        new_process(seed=1)
        train(learner(CSVLogger(), EarlyStoppingCallback(min_delta=9., patience=1)))
        return rows()
    expected = script()
    assert len(expected) == 3
    assert script() == expected


def test_the_progress_bar_goes_on():
    "Its clock starts with epoch 0, which does not run again"
    def script(): learner().fit_one_cycle(3, .02, cbs=AutoResume(every=8))
    stop(script, at=30)
    script()


class Run(SimpleNamespace): pass


def test_the_run_of_wandb_goes_on(monkeypatch):
    calls = []
    wandb = SimpleNamespace(
        run=Run(id='first', project='p', entity='e'),
        finish=lambda: calls.append('finish'),
        init=lambda **kwargs: calls.append(kwargs))
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    learn = fit(learner(), 1)
    state = state_of_loggers(learn)
    restore_loggers(learn, state)
    assert calls == []
    wandb.run = Run(id='second', project='p', entity='e')
    restore_loggers(learn, state)
    assert calls == ['finish', dict(resume='must', id='first', project='p', entity='e')]


@pytest.mark.long
def test_a_fit_goes_on_without_its_log():
    "CSVLogger remembers the logger before it, which is another one"
    stop(lambda: train(learner(CSVLogger())))
    learn = learner(CSVLogger())
    with learn.no_bar(): learn.fit_one_cycle(3, .02, cbs=AutoResume(every=8, verbose=False))
    assert len(rows()) == 4
