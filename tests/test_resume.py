"AutoResume in one process, as if there were several. `test_resume_kills.py` kills"
import subprocess

import pytest
from fastai.text.models.awdlstm import WeightDropout

from common import *
from fastxtend_accum.resuming.fit import SavedFit
from resume_layouts import WIDTH, accum, fastai_data, make, mlp, samples, two_classes, with_valid
from resumed import Stops, assert_goes_on, assert_same_end, learner, new_process, steps, stop, train, whole


def script(*cbs, **kwargs):
    return lambda: train(learner(*cbs, **kwargs))


plain = script()


def test_the_callback_changes_nothing():
    "Also nothing of a fit without windows"
    set_seed(1)
    expected = fit(make(), 3, .02, 'fit_one_cycle')
    set_seed(1)
    learn = train(make())
    assert_same(weights(learn), weights(expected))
    assert_same(losses(learn), losses(expected))


def test_it_saves_every_so_many_steps(monkeypatch):
    "Before the first of 39 steps, after each eight, and at the end of the fit"
    save = SavedFit.save
    places = []

    def save_and_note(self, place, *args):
        places.append(place)
        save(self, place, *args)
    monkeypatch.setattr(SavedFit, 'save', save_and_note)
    plain()
    *between_windows, end = places
    assert [o['counts'][0] for o in between_windows] == list(range(0, 39, 8))
    assert end is None


@pytest.mark.thin(6)
@pytest.mark.parametrize('at', [17, 1, 13, 14, 26, 38])
def test_a_script_that_starts_again_goes_on(at): assert_goes_on(plain, at)


def windows_in_a_batch():
    "Three windows in each loader batch, and a save after each four"
    dls = with_valid(DataLoader(samples(), bs=16, shuffle=True))
    return train(make(accum(5), Stops(), dls=dls), n_epoch=2, every=4)


@pytest.mark.thin(3)
@pytest.mark.parametrize('at', [5, 9, 13])
def test_a_fit_goes_on_in_the_middle_of_a_loader_batch(at): assert_goes_on(windows_in_a_batch, at, every=4)


class WithHiddenState(nn.Sequential):
    "Replaces its hidden state by one with a row for each sample, as AWD_LSTM does"
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        self.hidden = torch.zeros(1, WIDTH)

    def forward(self, x):
        self.hidden = 0.5*self.hidden.detach().mean(0) + x.detach()
        return super().forward(x+0.1*self.hidden)


def classifier(): return learner(dls=two_classes(), m=mlp(n_out=2), loss_func=CrossEntropyLossFlat())


def with_torch_optimizer(): return learner(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW))


@pytest.mark.parametrize('make_learner,cbs,at', [
    (learner, noop, 17),
    (learner, noop, 3),  # the file is that from the beginning of the fit
    (with_torch_optimizer, noop, 3),
    (lambda: learner(m=WithHiddenState()), noop, 17),  # of another shape
    (classifier, MixUp, 17)])  # an error leaves its loss in the Learner
def test_after_an_error_the_same_learner_goes_on(make_learner, cbs, at):
    expected = whole(lambda: train(make_learner(), *L(cbs())))
    new_process(seed=1)
    learn = make_learner()
    steps.at = at
    with pytest.raises(KeyboardInterrupt): train(learn, *L(cbs()))
    assert_same_end(train(learn, *L(cbs())), expected)


class Doubles(Callback):
    "Doubles the outputs of the model as long as a fit runs"
    def before_fit(self):
        forward = self.model.forward
        def doubled(x): return 2*forward(x)
        self.model.forward = doubled

    def after_fit(self): del self.model.forward


def two_fits():
    learn = learner(Doubles())
    train(learn, n_epoch=1)
    return train(learn, n_epoch=2)


def test_a_callback_may_delete_in_after_fit_what_it_has_made_in_before_fit():
    "Also if the script starts again after this fit has ended"
    assert_goes_on(two_fits, at=20)


class Cancels(Callback):
    "Ends the fit before an epoch, as a limit of time does"
    now = False
    def before_epoch(self):
        if Cancels.now: raise CancelFitException


def test_a_fit_that_is_cancelled_before_its_place_ends_with_the_state_of_the_file():
    new_process(seed=1)
    steps.at = 16
    expected = learner()
    with pytest.raises(KeyboardInterrupt): fit(expected, 3, .02, 'fit_one_cycle')
    cancelling = script(Cancels(), CSVLogger())
    stop(cancelling, at=17)  # the file has 16 steps
    Cancels.now = True
    try: assert_same(weights(cancelling()), weights(expected))
    finally: Cancels.now = False
    new_process()
    assert_same(weights(cancelling()), weights(expected))  # it has ended
    assert steps.n == 0
    assert len(Path('history.csv').read_text().splitlines()) == 2  # the names, and the first epoch


def l1(pred, targ): return F.l1_loss(pred, targ)


class SetsLoss(Callback):
    def before_epoch(self):
        self.learn.loss_func = l1
        raise CancelFitException


def test_a_loss_that_a_callback_sets_stays():
    "Also if it ends the fit before training"
    assert train(learner(SetsLoss())).loss_func is l1


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = WeightDropout(nn.LSTM(WIDTH, WIDTH, batch_first=True), .5)

    def forward(self, x): return self.rnn(x[:, None])[0][:, 0]


def test_a_recurrent_layer_of_a_script_without_a_seed_goes_on_before_its_second_save():
    """WeightDropout has drawn a tensor that is no weight, which the layer also holds in a list. No file can hold its
    weak references, which cause no warning"""
    assert_goes_on(lambda: train(learner(m=nn.Sequential(Recurrent(), nn.Linear(WIDTH, 1)))), at=3)


@pytest.mark.long
def test_a_fold_that_fails_leaves_the_others_alone():
    "In one process, a fit never goes on from the file of another Learner"
    def folds(fails):
        new_process(seed=1)
        steps.at = 17 if fails else None
        try: train(learner())
        except KeyboardInterrupt: pass
        set_seed(2)
        return train(learner())
    assert_same_end(folds(fails=True), folds(fails=False))


@pytest.mark.long
def test_a_fit_within_a_fit_is_another_one():
    class Fits(Callback):
        def after_epoch(self): fit(make(), 1, .01, cbs=AutoResume(every=20, verbose=False))
    assert_goes_on(lambda: train(learner(Fits())))


@pytest.mark.parametrize('kwargs', [
    dict(every=.5), dict(every=0), dict(every='10'), dict(minutes=math.nan), dict(minutes='5'), dict(fname=''),
    dict(fname='..'), dict(fname=None)])
def test_a_wrong_argument_is_an_error_that_names_it(kwargs):
    name, = kwargs
    with pytest.raises(ValueError, match=f'{name} must be'): AutoResume(**kwargs)


class Lazy(nn.Sequential):
    def __init__(self): super().__init__(nn.LazyLinear(3), nn.Linear(3, 1))


class OwnLoop(Learner):
    def one_batch(self, i, b): super().one_batch(i, b)


def own(kind):
    return kind(fastai_data(), nn.Linear(6, 1), F.mse_loss, path=Path())


@pytest.mark.parametrize('make_learner,text', [
    (lambda: make(m=Lazy()), 'layers have sizes'),
    (lambda: own(OwnLoop), 'one_batch'),
    (lambda: learner(AutoResume()), 'second AutoResume')])
def test_what_cannot_go_on_is_an_error_before_training(make_learner, text):
    with pytest.raises(ValueError, match=text): train(make_learner())


copied = []  # a global, because no file holds it


class Copies(Callback):
    "Before the first batch of an epoch that goes on, since PyTorch cannot copy the output of a batch"
    order = 20_000
    def before_train(self): copied.append(deepcopy(self.learn))


@pytest.mark.long
def test_a_learner_that_is_copied_in_an_epoch_that_goes_on():
    learn = assert_goes_on(lambda: train(learner(Copies())))
    assert_apart(copied[-1], learn)


@pytest.mark.long
def test_a_fit_runs_after_the_module_is_loaded_again():
    "As %autoreload does; a Learner without callbacks of this package, too"
    script = """
import importlib, warnings
warnings.simplefilter('ignore')
import fastxtend_accum.resume
from fastai.basics import *
for _ in range(2): importlib.reload(fastxtend_accum.resume)
samples = [(torch.ones(1), torch.ones(1))]*4
dls = DataLoaders(DataLoader(samples, bs=2), DataLoader(samples, bs=2))
learn = Learner(dls, nn.Linear(1, 1), nn.MSELoss())
with learn.no_bar(): learn.fit(1)
print(learn.recorder.values)"""
    out = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr[-500:]
    assert '[[' in out.stdout
