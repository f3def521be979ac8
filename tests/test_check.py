"Learner.check_accum: no false alarm, the right reason, and everything as it was afterwards"
import os

import pytest

from common import *


def regression(n=64, n_out=1):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(n, 5, generator=generator)
    targets = torch.randn(n, n_out, generator=generator)
    return list(zip(inputs, targets))


def learner(*cbs, bs=8, layers=(), loss=None, **kwargs):
    set_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), *layers, nn.Tanh(), nn.Linear(8, 1))
    samples = regression()
    dls = DataLoaders(DataLoader(samples, bs=bs, shuffle=True), DataLoader(samples[:20], bs=16))
    return Learner(dls, net, loss or MSELossFlat(), cbs=cbs, **kwargs)


def check(learn, **kwargs):
    return learn.check_accum(verbose=False, **kwargs)


# No false alarm

def adamw_of_torch(params, **kwargs): return OptimWrapper(params, torch.optim.AdamW, **kwargs)


EQUAL = {
    'windows': lambda: learner(GradientAccumulation(32)),
    'one batch': lambda: learner(GradientAccumulation(8)),
    'smaller windows': lambda: learner(GradientAccumulation(8), bs=32),
    'micro-batches': lambda: learner(GradientAccumulation(micro_batch_size=8), bs=32),
    'windows of micro-batches': lambda: learner(GradientAccumulation(32, micro_batch_size=4)),
    'auto': lambda: learner(GradientAccumulation(micro_batch_size='auto'), bs=32),
    'carry': lambda: learner(GradientAccumulation(32, remainder='carry')),
    'drop': lambda: learner(GradientAccumulation(32, remainder='drop')),
    'schedule': lambda: learner(GradientAccumulationSchedule(8, 32)),
    'each batch is logged': lambda: learner(GradientAccumulation(32, log_accum_batch=False), metrics=mae),
    'gradient cache': lambda: learner(GradientCache(8), bs=32),
    'clipping': lambda: learner(GradientClip(.1), GradientAccumulation(32), opt_func=SGD),
    'optimizer of torch': lambda: learner(GradientAccumulation(32), opt_func=adamw_of_torch),
    'recomputed dropout': lambda: learner(all_blocks(lambda m: [m[0]]), bs=32, layers=[nn.Dropout()])}


@pytest.mark.thin(5, 1)
@pytest.mark.parametrize('name', EQUAL)
def test_no_false_alarm(name):
    result = check(EQUAL[name]())
    if name == 'each batch is logged': assert 'weights' not in result.differences  # logs are finer, as was asked for
    else: assert result.equal, str(result)


# The reason

class SharedMean(Callback):
    "Keeps the mean of the batch, and uses it in the next step"
    run_valid = False
    def before_fit(self): self.center = torch.zeros(1)
    def before_batch(self): self.mean = self.y.mean(0)
    def after_pred(self): self.learn.pred = self.pred-self.center
    def after_step(self): self.center = .5*self.center+.5*self.mean


class InTurn(Callback):
    "Trains with one factor, then with another"
    run_valid = False
    def before_fit(self): self.n = 0
    def before_batch(self):
        self.learn.xb = (self.x*(1+self.n%2),)
        self.n += 1


class NeededByTheModel(Callback):
    "Nothing trains without what it sets"
    run_valid = False
    def before_fit(self): self.learn.model[0].teacher = torch.zeros(1)
    def before_batch(self): self.learn.model[0].teacher += self.x.mean()


class Taught(nn.Module):
    def forward(self, x): return x+self.teacher.to(x)


def worst(pred, targ): return F.mse_loss(pred, targ, reduction='none').max()


def hooked():
    learn = learner(GradientAccumulation(32))
    learn.model[0].weight.register_hook(torch.sign)
    return learn


def taught():
    learn = learner(NeededByTheModel(), GradientAccumulation(32))
    learn.model = nn.Sequential(Taught(), *learn.model)
    return learn


DIFFERENT = {
    'BatchNorm1d': lambda: learner(GradientAccumulation(32), layers=[nn.BatchNorm1d(8)]),
    'Dropout': lambda: learner(GradientAccumulation(32), layers=[nn.Dropout()]),
    'SharedMean': lambda: learner(SharedMean(), GradientAccumulation(32)),
    'InTurn': lambda: learner(InTurn(), GradientAccumulation(32)),
    'hooks on parameters': hooked,
    'the loss': lambda: learner(GradientAccumulation(micro_batch_size=8), bs=32, loss=worst)}


@pytest.mark.thin(3, 1)
@pytest.mark.parametrize('name', DIFFERENT)
def test_the_reason_is_named(name):
    result = check(DIFFERENT[name]())
    assert 'weights' in result.differences
    assert len(result.reasons) == 1
    assert result.reasons[0].startswith(name)


def test_a_callback_without_which_nothing_trains_is_named_as_a_candidate():
    result = check(taught())
    assert result.reasons == []
    assert 'perhaps NeededByTheModel acts on 3 samples at a time, without which nothing trains' in str(result)


@pytest.mark.long
def test_several_reasons_are_named():
    result = check(learner(SharedMean(), GradientAccumulation(32), layers=[nn.BatchNorm1d(8), nn.Dropout()]))
    names = [o.split()[0] for o in result.reasons]
    assert sorted(names) == ['BatchNorm1d', 'Dropout', 'SharedMean']


def test_what_no_seed_sets_is_said():
    def noisy(pred, targ): return F.mse_loss(pred, targ)*int.from_bytes(os.urandom(1), 'big')
    result = check(learner(GradientAccumulation(32), loss=noisy))
    assert not result.equal
    assert 'no seed' in result.reasons[0]


class Cancels(Callback):
    "Cancels batches that have a sample above a limit, and counts them"
    run_valid = False
    def __init__(self, limit):
        self.limit = limit

    def before_batch(self):
        if self.x[:, 0].max() > self.limit: raise CancelBatchException


def test_batches_that_a_callback_cancels():
    "A loader batch in windows, all of them in whole batches; if none is, there is no difference"
    result = check(learner(Cancels(1.), GradientAccumulation(32)))
    assert 'weights' in result.differences
    assert result.reasons == ['Cancels acts on 3 samples at a time']
    assert check(learner(Cancels(99.), GradientAccumulation(32))).equal


# Everything is as it was

def reachable(learn):
    "Returns everything that a check could change, as plain values"
    attributes = {}
    for cb in learn.cbs:
        attributes[type(cb).__name__] = {name:repr(o) for name, o in vars(cb).items() if name != 'learn'}
    own = {name:repr(o) for name, o in vars(learn).items()}
    weights = {name:o.tolist() for name, o in learn.model.state_dict().items()}
    gradients = [None if p.grad is None else p.grad.tolist() for p in learn.model.parameters()]
    optimizer = repr(learn.opt.state_dict()) if learn.opt else None
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    modes = [m.training for m in learn.model.modules()]
    return attributes, own, weights, gradients, optimizer, states, modes


@pytest.mark.thin(3, 1)
@pytest.mark.parametrize('is_fitted', [False, True])
@pytest.mark.parametrize('name', ['windows', 'gradient cache', 'SharedMean', 'BatchNorm1d'])
def test_everything_is_as_it_was(name, is_fitted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learn = (EQUAL | DIFFERENT)[name]()
    if is_fitted: fit(learn, 1)
    before = reachable(learn)
    check(learn)
    assert reachable(learn) == before
    assert list(tmp_path.iterdir()) == []


def test_the_fit_is_the_same_after_a_check():
    fitted = []
    for is_checked in (False, True):
        learn = DIFFERENT['Dropout']()
        if is_checked: check(learn)
        fitted.append(fit(learn, 2, .1))
    assert_same(weights(fitted[0]), weights(fitted[1]))
    assert_same(losses(fitted[0]), losses(fitted[1]))


def test_an_interrupt_restores_too():
    class Interrupts(Callback):
        def before_step(self): raise KeyboardInterrupt
    learn = learner(Interrupts(), GradientAccumulation(32))
    before = reachable(learn)
    with pytest.raises(KeyboardInterrupt): check(learn)
    assert reachable(learn) == before


def test_callbacks_that_write_files_are_left_out_and_named(tmp_path):
    learn = learner(CSVLogger(), SaveModelCallback(), GradientAccumulation(32), path=tmp_path)
    result = check(learn)
    assert result.equal
    assert 'left out: CSVLogger, SaveModelCallback' in str(result)
    assert list(tmp_path.iterdir()) == []


# Arguments and the result

def test_callbacks_of_the_fit_are_checked():
    result = check(learner(), cbs=[SharedMean(), GradientAccumulation(32)])
    assert result.reasons[0].startswith('SharedMean')
    with pytest.raises(ValueError, match='no callback that makes windows'): check(learner())


def test_the_number_and_size_of_windows():
    result = check(learner(GradientAccumulation(32)), n_steps=8, size=16)
    assert str(result).startswith('8 steps of up to 16 samples, 4 at a time')
    for kwargs, error in ((dict(size=10), 'multiple of 4'), (dict(n_steps=0), 'n_steps')):
        with pytest.raises(ValueError, match=error): check(learner(GradientAccumulation(32)), **kwargs)


@pytest.mark.long
def test_another_seed_draws_other_numbers():
    make = DIFFERENT['Dropout']
    first, same, other = [check(make(), seed=seed).differences for seed in (1, 1, 2)]
    assert first == same
    assert first != other


def test_it_prints_a_report_unless_told_otherwise(capsys):
    learn = DIFFERENT['BatchNorm1d']()
    result = learn.check_accum(verbose=False)
    assert capsys.readouterr().out == ''
    learn.check_accum()
    printed = capsys.readouterr().out
    assert 'named by elimination: BatchNorm1d sees 3 samples at a time' in printed
    assert 'weights' in printed
    assert repr(result).startswith('AccumCheck(equal=False, differences=[')


class CountsPasses(nn.Module):
    passes = []  # the samples of each, also in copies
    def forward(self, x):
        self.passes.append(len(x))
        return x


@pytest.mark.parametrize('layers,n_trainings', [([], 2), ([nn.BatchNorm1d(8)], 4)])
def test_the_samples_that_pass_through_the_model(layers, n_trainings, monkeypatch):
    """Of each training: two epochs with a window of 12 and 5 more samples, and 3 of validation. There are two if
    nothing differs, and two more without the most likely reason"""
    passes = []
    monkeypatch.setattr(CountsPasses, 'passes', passes)
    result = check(learner(GradientAccumulation(32), layers=[CountsPasses(), *layers]))
    assert result.equal == (not layers)
    assert sum(passes) == n_trainings*2*(12+5+3)
    assert len(passes) == n_trainings//2*2*(3+7)  # whole: 12, 5, 3; in windows: 5 of 3, one of 2, ...
