"What may be the reason for a difference"
import pytest
from fastai.callback.tensorboard import TensorBoardCallback

from common import *
from fastxtend_accum.checking.suspects import copies_leave_out, in_evaluation


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
    assert copies_leave_out(make()) == expected


class Residual(nn.Module):
    "Adds its outputs to its inputs. Without BatchNorm, these grow by a factor"
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())

    def forward(self, x): return x+8*self.layers(x)


def test_a_deep_network_that_was_never_trained_does_not_explode_without_batchnorm():
    set_seed(0)
    deep = nn.Sequential(*[Residual() for _ in range(30)])
    in_evaluation(SimpleNamespace(model=deep), {'BatchNorm1d'})
    inputs = torch.randn(4, 8)
    assert deep(inputs).abs().max() < 1000
    torch.testing.assert_close(deep(inputs)[:2], deep(inputs[:2]))  # no sample acts on another
