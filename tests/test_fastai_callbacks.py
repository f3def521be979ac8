"Each of fastai's own callbacks does beside windows what it does beside the large batch"
import ast
import pkgutil

import fastai.callback
import pytest
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.preds import MCDropoutCallback
from fastai.callback.rnn import ModelResetter, RNNCallback, RNNRegularizer
from fastai.callback.tensorboard import TensorBoardCallback
from fastai.callback.training import BnFreeze

from callback_fits import *

ANY_KIND = ['ragged', 'both', 'carry']  # of layout
WHOLE_BATCHES = ['ragged', 'carry']  # with `micro_batch_size`, validation has more batches
OF_RNN = ['ragged', 'step']  # its state begins with an epoch, and no batch is carried into the next one


# What they need

def notes(cls, get_rows, event='after_fit'):
    "Returns a subclass of `cls` that notes what `get_rows` returns of it after `event`"
    def note(self):
        getattr(cls, event, noop)(self)
        self.rows = [*rows_of(self), *get_rows(self)]
    return type(cls.__name__, (cls,), {event: note, 'rows': []})


class Frozen(Scaled):
    "Its BatchNorm is not trained"
    def __init__(self):
        m = model()
        super().__init__(m[0], nn.BatchNorm1d(8).double(), *m[1:])
        self[1].requires_grad_(False)


class DropsInValidation(nn.Dropout):
    "Draws numbers where MCDropoutCallback lets it, and none in training"
    def forward(self, x):
        return F.dropout(x, .5, self.training and not torch.is_grad_enabled())


class Recurrent(nn.Module):
    "Returns what fastai's RNNCallback needs"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.GRU(1, 4, batch_first=True)
        self.head = nn.Linear(4, 1)
        self.n_resets = 0
        self.double()

    def reset(self):
        self.n_resets += 1

    def forward(self, x):
        hidden, _ = self.rnn(x[..., None])
        return self.head(hidden[:, -1]), [hidden], [hidden*.9]


def convolutions():
    return Scaled(nn.Unflatten(1, (1, 1, 5)), nn.Conv2d(1, 4, (1, 3)), nn.Flatten(), nn.Linear(12, 1)).double()


def make_images(self):
    "CutMix needs them"
    self.learn.xb = (self.x[:, None, None],)


def spoil_loss(self):
    if self.train_iter == 2:
        self.learn.loss = self.loss*math.nan


def hook_outputs():
    "Returns a HookCallback, and a callback that notes how many samples its hook has seen"
    seen = []
    hook = HookCallback(hook=lambda m, i, o: seen.append(len(o)), every=2)
    return [hook, At('after_fit', lambda self: self.rows.append([sum(seen)]))]


def drop_in_validation():
    seed = At('before_validate', lambda self: torch.manual_seed(0), order=-30)
    return [MCDropoutCallback(), seed]


def mean_of_activations(cb):
    means = [stats[0]['mean'] for stats in cb.stats]
    return [[np.mean(means)]]


# The layouts in which each is tried, what makes it, and arguments

MAKES_BATCHES = dict(  # mixes the samples of a loader batch, and needs a loss of fastai's
    make_args=lambda: dict(m=Scaled(nn.Flatten(), *model().float()), loss_func=MSELossFlat()), tol=FLOAT32)
CNN = dict(make_args=lambda: dict(m=convolutions()))
RNN = dict(make_args=lambda: dict(m=Recurrent()))
IN_FIT = dict(in_fit=True)  # `no_bar` takes it out of the Learner

TRIED = dict(
    Callback=(ANY_KIND, lambda: Callback(before_step=noop), {}),
    ChannelsLast=(ANY_KIND, ChannelsLast, CNN),
    FetchPredsCallback=(
        ANY_KIND, notes(FetchPredsCallback, lambda cb: [cb.preds[0].flatten()], 'after_validate'), {}),
    CollectDataCallback=(WHOLE_BATCHES, notes(CollectDataCallback, lambda cb: [[batch[-1]] for batch in cb.data]), {}),
    HookCallback=(ANY_KIND, hook_outputs, {}),
    ActivationStats=(['whole'], notes(ActivationStats, mean_of_activations), {}),
    MixUp=(['split'], MixUp, MAKES_BATCHES),
    CutMix=(['split'], lambda: [CutMix(), At('before_batch', make_images, order=-1)], MAKES_BATCHES),
    MCDropoutCallback=(
        ANY_KIND, drop_in_validation, dict(make_args=lambda: dict(m=Scaled(*model(), DropsInValidation())))),
    ProgressCallback=(WHOLE_BATCHES, notes(ProgressCallback, lambda cb: [[cb.pbar.total]], 'after_batch'), IN_FIT),
    ShowGraphCallback=(ANY_KIND, lambda: [ProgressCallback(), ShowGraphCallback()], IN_FIT),
    CSVLogger=(ANY_KIND, notes(CSVLogger, lambda cb: cb.read_log().values[:, :3]), {}),
    ModelResetter=(
        OF_RNN, lambda: [notes(ModelResetter, lambda cb: [[cb.model.n_resets]])(), RNNCallback()], RNN),
    RNNCallback=(OF_RNN, RNNCallback, RNN),
    RNNRegularizer=(OF_RNN, lambda: [RNNCallback(), RNNRegularizer(2., 1.)], dict(RNN, tol=FLOAT32)),
    ParamScheduler=(ANY_KIND, lambda: ParamScheduler(dict(lr=SchedCos(.2, .01))), {}),
    LRFinder=(CONSTANT, lambda: LRFinder(1e-3, 1, 5, stop_div=False), dict(moves=False)),
    TensorBoardCallback=(ANY_KIND, lambda: TensorBoardCallback('tb', False, False), {}),
    TerminateOnNaNCallback=(ANY_KIND, lambda: [TerminateOnNaNCallback(), At('after_loss', spoil_loss)], {}),
    TrackerCallback=(ANY_KIND, notes(TrackerCallback, lambda cb: [[cb.best]]), {}),
    EarlyStoppingCallback=(ANY_KIND, lambda: EarlyStoppingCallback('train_loss', min_delta=10.), {}),
    SaveModelCallback=(ANY_KIND, lambda: SaveModelCallback('train_loss', comp=np.greater), {}),
    ReduceLROnPlateau=(ANY_KIND, lambda: ReduceLROnPlateau(min_delta=10.), {}),
    ShortEpochCallback=(CONSTANT, lambda: ShortEpochCallback(.4, short_valid=False), {}),
    GradientClip=(ANY_KIND, lambda: GradientClip(.1), {}),
    BnFreeze=(ANY_KIND, BnFreeze, dict(make_args=lambda: dict(m=Frozen()))))

NOT_TRIED = dict(
    TrainEvalCallback='is in every Learner',
    GatherPredsCallback='is the base of FetchPredsCallback',
    MixHandler='is the base of MixUp and CutMix',
    TensorBoardBaseCallback='is the base of TensorBoardCallback',
    TensorBoardProjectorCallback='works in prediction only',
    WandbCallback='has tests of its own, for logging',
    MixedPrecision='has tests of its own, for precision',
    ModelToHalf='works with NonNativeMixedPrecision only',
    NonNativeMixedPrecision='is refused, in the tests of checks',
    GradientAccumulation='is refused, in the tests of checks',
    AzureMLCallback='needs its service',
    CometCallback='needs its service')


def base_names(folder):
    "Returns the names of the bases of each class in the modules of `folder`, whether these can be imported or not"
    res = {}
    for module in pkgutil.iter_modules([folder]):
        tree = ast.parse((Path(folder)/f'{module.name}.py').read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                res[node.name] = [ast.unparse(o) for o in node.bases]
    return res


def is_callback(name, bases):
    return name == 'Callback' or any(is_callback(o, bases) for o in bases.get(name, ()))


def test_every_callback_of_fastai_is_tried_or_has_a_reason_why_not():
    bases = base_names(fastai.callback.__path__[0])
    names = {name for name in bases if is_callback(name, bases)}
    assert names == TRIED.keys() | NOT_TRIED.keys()
    assert not TRIED.keys() & NOT_TRIED.keys()


CASES = []
for i, (name, (layouts, _, _)) in enumerate(TRIED.items()):
    CASES.append((name, layouts[i%len(layouts)]))


@pytest.mark.parametrize('name,layout', CASES)
def test_a_callback_of_fastai_leaves_behind_what_it_leaves_beside_the_large_batch(name, layout, capsys):
    _, make, args = TRIED[name]
    small, _ = fit_both(layout, make, **args)
    has_notes = hasattr(type(small.others[0]), 'rows')
    assert rows_of(small.others[0]) or not has_notes
