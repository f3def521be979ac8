"""aim, SwanLab and ClearML without a server: the rows that they log of windows are those of the large batch

    python -m venv loggers && loggers/bin/pip install fastai aim swanlab clearml pytest pytest-xdist hypothesis
    loggers/bin/python -m pytest -m libraries tests/libraries/test_loggers.py"""
import swanlab as swan
from aim.fastai import AimCallback
from clearml import Task
from large_batch import *
from swanlab.integration.fastai import SwanLabCallback

def maker(*cbs):
    "The last window of an epoch has 4 samples"
    def make(bs):
        m = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        return Learner(random_loaders(bs, 100, (5,), 1), m, MSELossFlat(), opt_func=SGD, metrics=mae, cbs=cbs)
    return make

def aim(*args):
    cb = AimCallback(repo='.', system_tracking_interval=None, log_system_params=False, capture_terminal_logs=False)
    train(maker(cb), *args)
    rows = {}
    for metric in cb.experiment.metrics():
        steps,(values,*_) = metric.data.items_list()
        subset = metric.context.to_dict().get('subset', 'epoch')
        rows |= {(f'{subset} {metric.name}', step):value for step,value in zip(steps, values)}
    cb.experiment.close()
    return rows

def swanlab(*args):
    rows,send = {},swan.log
    def log(row, step=None):
        rows.update({(k, step):v for k,v in row.items()})
        return send(row, step=step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swan, 'log', log)
        train(maker(SwanLabCallback(project='test', mode='offline', log_dir='.')), *args)
    swan.finish()
    return rows

def clearml(*args):
    "It adds a Recorder of its own to each fit, which has training metrics, too"
    Task.set_offline(True)
    others = dict(tensorboard=False, matplotlib=False, pytorch=False, detect_repository=False)
    task = Task.init('test', 'fit', reuse_last_task_id=False, auto_connect_frameworks=others,
                     auto_resource_monitoring=False, auto_connect_streams=False)
    train(maker(), *args)
    task.flush(wait_for_uploads=True)
    lines = (Path(task.get_offline_mode_folder())/'metrics.jsonl').read_text().splitlines()
    task.close()
    found = [o for line in lines for o in json.loads(line) if o['type'] == 'training_stats_scalar']
    return {(re.sub('_[0-9]+$', '', o['metric']) + ' ' + o['variant'], o['iter']):o['value'] for o in found}

@pytest.mark.parametrize('logger,name', [
    (aim, 'train train_loss'), (swanlab, 'train/loss'), (clearml, 'metrics train_mae')])
def test_rows(logger, name, tmp_path, monkeypatch):
    for o in 'HOME','CLEARML_CACHE_DIR': monkeypatch.setenv(o, str(tmp_path))
    large = logger(32)
    assert [step for k,step in large if k == name] == [*range(1, 9)]
    for kind in kinds.values():
        rows = logger(*kind())
        assert {*rows} == {*large} and max(abs(rows[k]-v) for k,v in large.items()) < 1e-5
