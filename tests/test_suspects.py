"What may be the reason for a difference"
import pytest
from fastai.callback.tensorboard import TensorBoardCallback

from common import *
from fastxtend_accum.checking.suspects import is_left_out


def tracker():
    "Returns a callback that uses the package of an experiment tracker, which need not be installed"
    names = dict(Callback=Callback, mlflow=types.ModuleType('mlflow'))
    exec("""class Tracks(Callback):
    def after_batch(self): mlflow.log_metric('loss', self.loss)""", names)
    return names['Tracks']()


class ClaimModel(Callback):
    "Its name contains that of a tracker"


@pytest.mark.parametrize('make,expected', [
    (tracker, True), (TensorBoardCallback, True), (AutoResume, True),
    (ClaimModel, False), (EarlyStoppingCallback, False)])
def test_what_uses_an_experiment_tracker_or_writes_files_is_left_out(make, expected):
    assert is_left_out(make()) == expected
