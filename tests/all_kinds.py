"Learners with each kind of our callbacks, with all that fastai offers; and what has to work after whatever happened"
import pickle

import cloudpickle
from fastai.optimizer import sgd_step

from common import *
from fastxtend_accum.callback import WindowCallback
from limited_memory import run_out_of_memory

N = 64  # samples to train on, in batches of 8


# A Learner in which something may fail, other than a callback

class Trap:
    "Raises `exc` at the `nth` time that something passes `where`; counts how often it does"
    def __init__(self): self.set(None, None, 0)

    def set(self, where, exc, nth):
        self.where = where
        self.exc = exc
        self.nth = nth
        self.count = 0

    def pass_by(self, where):
        if where != self.where: return
        self.count += 1
        if self.count == self.nth: raise self.exc('on purpose')


trap = Trap()
PLACES = ['forward', 'loss', 'backward', 'step']


class PassesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()

    @staticmethod
    def backward(ctx, grad):
        trap.pass_by('backward')
        return grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        h = self.body(x)
        if self.training:
            trap.pass_by('forward')
            h = PassesInBackward.apply(h)
        return self.head(h)


class Loss(BaseLoss):
    def __init__(self): super().__init__(nn.MSELoss, floatify=True, is_2d=False)

    def __call__(self, *args, **kwargs):
        trap.pass_by('loss')
        return super().__call__(*args, **kwargs)


def pass_in_step(p, **kwargs): trap.pass_by('step')
def opt_func(params, lr=.1, **kwargs): return Optimizer(params, [pass_in_step, sgd_step], lr=lr)


class Pick:
    "Returns an input or a target, from data that travels with the Learner"
    def __init__(self, which): self.data = data(96)[which].float()
    def __call__(self, i): return self.data[i]


# Kinds

def body(m): return m.body
def rows_of_targets(learn): return len(learn.y)


class NeedsBlocks(Callback):
    "Memory runs out as long as no block is recomputed"
    def after_loss(self):
        adapting = self.learn._grab_cbs(ActivationCheckpointing)
        if self.training and not all(o.n_recomputed for o in adapting): run_out_of_memory()


KINDS = dict(
    plain=list,
    windows=lambda: [GradientAccumulation(32, num_items=rows_of_targets)],
    carry=lambda: [GradientAccumulation(24, remainder='carry')],
    drop=lambda: [GradientAccumulation(24, remainder='drop')],
    raw=lambda: [GradientAccumulation(32, log_accum_batch=False)],
    micro=lambda: [GradientAccumulation(32, micro_batch_size=3)],
    auto=lambda: [GradientAccumulation(16, micro_batch_size='auto')],
    schedule=lambda: [GradientAccumulationSchedule(8, 32)],
    adapts=lambda: [NeedsBlocks(), ActivationCheckpointing()],
    blocks=lambda: [GradientAccumulation(16), all_blocks(body)],
    cache=lambda: [GradientCache(3), all_blocks(body)],
    part=lambda: [GradientAccumulation(16), GradientCache(3, part=body)])
OURS = [kind for kind in KINDS if kind != 'plain']


def new_learner(kind='plain'):
    splits = list(range(N)), list(range(N, N+16))
    dsets = Datasets(list(range(N+16)), [[Pick(0)], [Pick(1)]], splits=splits)
    dls = dsets.dataloaders(bs=8, shuffle=False, num_workers=0)
    return Learner(dls, Net(), loss_func=Loss(), opt_func=opt_func, cbs=KINDS[kind]())


def our_callbacks(learn): return [cb for cb in learn.cbs if isinstance(cb, WindowCallback)]


# What has to hold

def assert_whole(learn):
    "Asserts that nothing hides a method of its class, and that nothing stands in the place of something else"
    assert type(learn.dls.train) is TfmdDL
    assert type(learn.dls.valid) is TfmdDL
    assert isinstance(learn.loss_func, Loss)
    assert learn.logger is print
    others = [cb for cb in learn.cbs if cb not in our_callbacks(learn)]
    for o in [learn, learn.opt, *others, *learn.model.modules()]:
        hidden = [name for name in vars(o) if inspect.isfunction(getattr(type(o), name, None))] if o else []
        assert not hidden, o


def fit_from_start(learn):
    "Trains from the first weights on; returns weights, losses and rates in one vector"
    learn.model.load_state_dict(Net().state_dict())
    fit(learn, 1, method='fit_one_cycle', reset_opt=True)
    assert_no_gradients(learn)
    return torch.cat([weights(learn), tensor(losses(learn)), tensor(learn.recorder.lrs)])


@pytest.fixture(scope='module')
def fresh():
    "Returns what a fit of a new Learner leaves, by kind"
    return {kind: fit_from_start(new_learner(kind)) for kind in KINDS}


def assert_works(learn, expected):
    "Asserts that validation, prediction and the next fit are those of a new Learner, whose fit has left `expected`"
    with quiet(learn):
        preds, _ = learn.get_preds()
        with torch.no_grad(): outputs = learn.model.eval()(data(96)[0].float()[N:N+16])
        assert_same(preds, outputs, 1e-6)
        i = 6
        assert_same(learn.predict(N+i)[2], preds[i], 1e-6)
    assert_same(fit_from_start(learn), expected)
    assert_whole(learn)


def load_exported():
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # fastai's, that pickle is not safe
        return load_learner('learner.pkl')


# By each way to go on: asserts that it works, if a fit with our callbacks leaves `expected`, and one without them
# `plain`

def go_on(learn, expected, plain): assert_works(learn, expected)
def go_on_without(learn, expected, plain): assert_works(learn.remove_cbs(our_callbacks(learn)), plain)


def go_on_with_exports(learn, expected, plain):
    learn.export('learner.pkl')
    with_cbs = load_exported()
    without_cbs = load_exported()
    with quiet(with_cbs), quiet(learn): assert_same(with_cbs.predict(3)[2], learn.predict(3)[2])
    for o in (with_cbs, without_cbs): o.dls = learn.dls
    go_on(with_cbs, expected, plain)
    go_on_without(without_cbs, expected, plain)


def go_on_with_copies(learn, expected, plain):
    "Copies by `deepcopy` and by pickle, without what fastai's own Learner cannot copy in the middle of a fit"
    for dl in learn.dls: vars(dl).pop('it', None)
    learn._end_cleanup()
    learn.loss_grad = None
    go_on(deepcopy(learn), expected, plain)
    for cb in our_callbacks(learn):
        copied = pickle.loads(cloudpickle.dumps(cb))
        go_on_without(copied.learn, expected, plain)


WAYS_TO_GO_ON = [go_on, go_on_without, go_on_with_exports, go_on_with_copies]
