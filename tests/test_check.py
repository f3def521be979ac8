"Learner.check_accum: no false alarm, the right reason, and everything as it was afterwards"
import os

import pytest
import torch.distributed as dist
import wandb
from fastai.distributed import *

from ordinary_learners import *


def check(learn, **kwargs):
    return learn.check_accum(verbose=False, **kwargs)


# Ordinary Learners

SLOW = 'W&B', 'language model', 'text classifier', 'vision'


def marked(name): return pytest.param(name, marks=pytest.mark.long) if name in SLOW else name


@pytest.fixture(autouse=True)
def no_run_is_left():
    "A copy of this process, in which other tests end a fit by a signal, cannot read a run of W&B that is still open"
    yield
    wandb.finish()


@pytest.mark.parametrize('name', list(map(marked, ORDINARY)))
def test_ordinary_learners_give_no_false_alarm(name):
    reasons = REASONS.get(name, [])
    result = check(ORDINARY[name]())
    assert result.reasons == reasons, str(result)
    assert result.equal == (not reasons), str(result)


def test_logs_of_each_batch_are_finer_as_was_asked_for():
    result = check(learner(GradientAccumulation(32, log_accum_batch=False)))
    assert result.differences.keys() == {'logged losses', 'train_loss'}


def check_in_process(rank, path):
    "Returns whether a check in one of two processes finds no difference"
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE='2', LOCAL_WORLD_SIZE='2', ACCELERATE_USE_CPU='true')
    dist.init_process_group('gloo', init_method=f'file://{path}', rank=int(rank), world_size=2)
    learn = learner(GradientAccumulation(64))
    with learn.distrib_ctx(cpu=True, sync_bn=False): result = check(learn)
    dist.destroy_process_group()
    return result.equal


def test_two_processes_give_no_false_alarm(tmp_path):
    path = tmp_path/'store'
    with multiprocessing.get_context('fork').Pool(2) as pool:
        found = pool.starmap_async(check_in_process, [('0', path), ('1', path)])
        assert found.get(300) == [True, True]


def test_a_callback_that_keeps_a_tensor_of_the_last_batch():
    class KeepsInputs(Callback):
        run_valid = False
        def before_batch(self): self.inputs = self.x
    assert check(learner(KeepsInputs(), GradientAccumulation(32))).equal


def test_a_callback_that_keeps_other_numbers_of_another_shape_in_each_training():
    fits = []
    class CountsFits(Callback):
        def before_fit(self):
            fits.append(1)
            length = 1 if len(fits) < 3 else 2  # two trainings can be compared, the third one has another shape
            self.count = torch.full([length], float(len(fits)))
    assert check(learner(CountsFits(), GradientAccumulation(32))).equal


def test_a_loader_whose_last_epoch_was_not_read_to_its_end():
    "fastai keeps the iterator of its data set: of `Datasets` a generator, which cannot be copied"
    learn = learner(GradientAccumulation(32))
    learn.dls.train.it = (o for o in learn.dls.train.dataset)
    state = learn.dls.train.rng.getstate()  # by which it draws the order of the next epoch
    assert check(learn).equal
    assert learn.dls.train.rng.getstate() == state


# The reason

class SharedMean(Callback):
    "Keeps the mean of the batch, and uses it in the next step"
    run_valid = False
    def before_fit(self): self.center = torch.zeros(1)
    def before_batch(self): self.mean = self.y.mean(0)
    def after_pred(self): self.learn.pred = self.pred-self.center
    def after_step(self): self.center = .5*self.center+.5*self.mean


def hooked():
    learn = learner(GradientAccumulation(32))
    learn.model[0].weight.register_hook(torch.sign)
    return learn


DIFFERENT = {
    'BatchNorm1d': lambda: learner(GradientAccumulation(32), layers=[nn.BatchNorm1d(8)]),
    'the model in training mode': lambda: learner(GradientAccumulation(32), layers=[nn.Dropout()]),
    'the model in training mode, of rows that are split': lambda: learner(
        GradientAccumulation(micro_batch_size=8), bs=32, layers=[nn.Dropout()]),
    'SharedMean': lambda: learner(SharedMean(), GradientAccumulation(32)),
    'hooks on parameters': hooked}


@pytest.mark.parametrize('name', DIFFERENT)
def test_the_reason_is_named(name):
    result = check(DIFFERENT[name]())
    assert 'weights' in result.differences
    assert len(result.reasons) == 1
    assert result.reasons[0].startswith(name.split(', of ')[0])


class TrainsSpread(Callback):
    "Trains a parameter of its own by a statistic of the batch"
    run_valid = False
    def before_fit(self):
        self.spread = torch.ones(1, requires_grad=True)
        self.sgd = torch.optim.SGD([self.spread], lr=.1)

    def after_pred(self): (self.spread*self.y.std()).sum().backward()

    def after_step(self):
        self.sgd.step()
        self.sgd.zero_grad()


def test_weights_of_other_optimizers_are_compared():
    result = check(learner(TrainsSpread(), GradientAccumulation(32)))
    assert 'parameters of the loss or of other optimizers' in result.differences
    assert 'weights' not in result.differences
    assert result.reasons == ['TrainsSpread acts on 3 samples at a time']


def test_what_no_seed_sets_is_said():
    def noisy(pred, targ): return F.mse_loss(pred, targ)*int.from_bytes(os.urandom(1), 'big')
    result = check(learner(GradientAccumulation(32), loss=noisy))
    assert not result.equal
    assert result.reasons == []
    assert 'something draws numbers that no seed sets' in str(result)


@pytest.mark.parametrize('sizes,reasons', [
    ((2, 3, 5, 6), []),
    ((6,), []),
    ((3,), ['the losses of 3 samples at a time do not add up to the loss of all samples'])])
def test_weights_that_become_nan_are_not_equal(sizes, reasons):
    "Where the loss is NaN for batches of these sizes; there is a reason if that happens in windows alone"
    def loss(pred, targ):
        if len(pred) in sizes: return pred.mean()*math.nan
        return F.mse_loss(pred, targ)
    result = check(learner(GradientAccumulation(32), loss=loss))
    assert result.differences['weights'] == math.inf
    assert result.reasons == reasons


# Everything is as it was

def reachable(learn):
    "Returns everything that a check could change, as plain values"
    attributes = {}
    for cb in learn.cbs:
        attributes[type(cb).__name__] = {name: repr(o) for name, o in vars(cb).items() if name != 'learn'}
    own = {name: repr(o) for name, o in vars(learn).items()}
    weights = {name: o.tolist() for name, o in learn.model.state_dict().items()}
    gradients = [None if p.grad is None else p.grad.tolist() for p in learn.model.parameters()]
    optimizer = repr(learn.opt.state_dict()) if learn.opt else None
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    modes = [m.training for m in learn.model.modules()]
    return attributes, own, weights, gradients, optimizer, states, modes


@pytest.mark.parametrize('name,is_fitted', [('SharedMean', True), ('BatchNorm1d', False)])
def test_everything_is_as_it_was(name, is_fitted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learn = DIFFERENT[name]()
    if is_fitted: fit(learn, 1)
    before = reachable(learn)
    check(learn)
    assert reachable(learn) == before
    assert list(tmp_path.iterdir()) == []


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

def test_a_learner_whose_only_windows_are_of_a_callback_that_is_left_out_is_an_error():
    with pytest.raises(ValueError, match='has no callback that makes windows'): learner(AutoResume()).check_accum()


def test_callbacks_of_the_fit_are_checked():
    result = check(learner(), cbs=[SharedMean(), GradientAccumulation(32)])
    assert result.reasons[0].startswith('SharedMean')


def test_the_number_and_size_of_windows():
    result = check(learner(GradientAccumulation(32)), n_steps=8, size=4)
    assert str(result).startswith('8 steps of up to 8 samples, 4 at a time')
    with pytest.raises(ValueError, match='n_steps'): check(learner(GradientAccumulation(32)), n_steps=0)


def test_one_window_in_an_epoch_has_fewer_samples_than_validation_asks_for():
    assert check(learner(GradientAccumulation(8)), n_steps=2).equal
    assert check(learner(GradientAccumulation(8)), n_steps=2, size=1).equal


def test_another_seed_draws_other_numbers():
    first, other = [check(DIFFERENT['the model in training mode'](), seed=seed).differences for seed in (1, 2)]
    assert first != other


def test_it_prints_a_report_unless_told_otherwise(capsys):
    learn = DIFFERENT['BatchNorm1d']()
    learn.check_accum(verbose=False)
    assert capsys.readouterr().out == ''
    result = learn.check_accum()
    assert capsys.readouterr().out.endswith(f'{result}\n')  # after what it does, if it takes long


class CountsPasses(nn.Module):
    passes = []  # the samples of each, also in copies
    def forward(self, x):
        self.passes.append(len(x))
        return x


@pytest.mark.parametrize('layers,n_trainings', [([], 2), ([nn.BatchNorm1d(8)], 5)])
def test_the_samples_that_pass_through_the_model(layers, n_trainings, monkeypatch):
    """Of each training: two epochs with a window of 6 and 5 more samples, and 3 of validation. There are two trainings
    if nothing differs. If something does, whole batches train once more, and both train without the likely reason"""
    passes = []
    monkeypatch.setattr(CountsPasses, 'passes', passes)
    result = check(learner(GradientAccumulation(32), layers=[CountsPasses(), *layers]))
    assert result.equal == (not layers)
    assert sum(passes) == n_trainings*2*(6+5+3)
