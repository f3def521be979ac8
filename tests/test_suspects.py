"What may be the reason for a difference"
import pytest
from fastai.callback.tensorboard import TensorBoardCallback

from common import *
from fastxtend_accum.checking.suspects import drops_out, reaches_outside, suspects


def test_the_whole_model_comes_last():
    names = [o.name for o in suspects(make_learner(8), [], {}, n=3)]
    assert names == ['the loss', 'the model']


def test_a_pooling_with_an_exponent_is_no_dropout():
    pooling = nn.Identity()
    pooling.p = 3.
    assert not drops_out(pooling)
    assert drops_out(nn.Dropout(.1))


def tracker():
    "Returns a callback that uses the package of an experiment tracker, which need not be installed"
    names = dict(Callback=Callback, mlflow=types.ModuleType('mlflow'))
    exec("""class Tracks(Callback):
    def after_batch(self): mlflow.log_metric('loss', self.loss)""", names)
    return names['Tracks']()


class ClaimModel(Callback):
    "Its name contains that of a tracker"


@pytest.mark.parametrize('make,expected', [
    (tracker, True), (TensorBoardCallback, True), (CSVLogger, True), (SaveModelCallback, True), (AutoResume, True),
    (ClaimModel, False), (GradientClip, False), (MixUp, False), (EarlyStoppingCallback, False)])
def test_what_reaches_outside_is_known_by_what_it_uses(make, expected):
    assert reaches_outside(make()) == expected
