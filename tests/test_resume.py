"AutoResume in one process: a fit that is interrupted goes on. `test_resume_kills.py` kills"
import cProfile
import zipfile

import pytest

from common import *
from fastxtend_accum import resume
from resume_layouts import WIDTH, accum, fastai_data, make, samples, with_valid
from same_fit import TrainingFault


def stop(nth):
    "Interrupts training after its `nth` window"
    return TrainingFault(KeyboardInterrupt, 'after_batch', nth, order=300)


def seeded(*cbs, seed=1, **kwargs):
    set_seed(seed)
    return make(accum(), *cbs, **kwargs)


def train(learn, *cbs, n_epoch=3, lr=.02, **kwargs):
    return fit(learn, n_epoch, lr, 'fit_one_cycle', cbs=[AutoResume(every=2, verbose=False, **kwargs), *cbs])


def interrupt(*cbs, nth=17, **kwargs):
    "In the second of three epochs, each of which has 13 windows, and one window after a save"
    learn = seeded(*cbs, **kwargs)
    with pytest.raises(KeyboardInterrupt): train(learn, stop(nth))
    return learn


def plain_fit():
    return fit(seeded(), 3, .02, 'fit_one_cycle')


def files():
    return sorted(Path('models').glob('resume-0*.pth'))


def assert_same_end(learn, expected):
    assert len(expected.recorder.losses) > 30
    assert_same(weights(learn), weights(expected))
    assert_same(losses(learn), losses(expected))
    assert learn.recorder.lrs == expected.recorder.lrs


def test_the_callback_changes_nothing(): assert_same_end(train(seeded()), plain_fit())


def test_the_callback_changes_nothing_in_fastais_own_loop():
    set_seed(1)
    expected = fit(make(), 3, .02, 'fit_one_cycle')
    set_seed(1)
    assert_same_end(train(make()), expected)


def test_it_saves_every_so_many_steps(monkeypatch):
    "Before the first of 39 steps, after each two, and at the end of the fit"
    save = resume.ResumeFile.save
    places = []

    def save_and_note(self, state):
        places.append(state['processes'][0]['place'])
        save(self, state)
    monkeypatch.setattr(resume.ResumeFile, 'save', save_and_note)
    train(seeded())
    *between_windows, end = places
    assert [o['counts'][0] for o in between_windows] == list(range(0, 39, 2))
    assert end is None


def test_after_ctrl_c_the_same_cell_goes_on():
    learn = interrupt()
    assert_same_end(train(learn), plain_fit())


def test_a_new_learner_with_another_seed_goes_on():
    interrupt()
    assert_same_end(train(seeded(seed=9)), plain_fit())


class Counts(list):
    "Counts the samples that are loaded"
    n = 0

    def __getitem__(self, i):
        self.n += 1
        return super().__getitem__(i)


def test_without_workers_nothing_is_loaded_again():
    "Saved after 16 steps: an epoch of 100 samples, and 3 windows of 8"
    interrupt()
    data = Counts(samples())
    train(seeded(dls=with_valid(DataLoader(data, bs=4, shuffle=True))))
    assert data.n == 3*100-(100+3*8)


class Heard(list):
    "Data that no file holds"


class Hears(Callback):
    "Notes epochs and batches"
    def __init__(self): self.heard = Heard()
    def before_epoch(self): self.heard.append(('epoch', self.epoch))

    def after_batch(self):
        if self.training: self.heard.append((self.epoch, self.iter))


@pytest.mark.filterwarnings('ignore:.*does not keep Hears.heard')
def test_callbacks_hear_nothing_of_what_is_left_out():
    whole = Hears()
    fit(seeded(whole), 3, .02, 'fit_one_cycle')
    interrupt()
    hears = Hears()
    train(seeded(hears))
    epoch, *batches = hears.heard
    assert epoch == ('epoch', 1)
    assert batches[0] == (1, 3)
    assert batches == whole.heard[-len(batches):]


def test_nothing_is_saved_twice():
    interrupt(SaveModelCallback(every_epoch=True))
    first = Path('models/model_0.pth')
    first.unlink()
    train(seeded(SaveModelCallback(every_epoch=True)))
    assert not first.exists()
    assert Path('models/model_1.pth').exists()


def table_of_epochs():
    "Returns the lines of CSVLogger's file without their times"
    return [line.rpartition(',')[0] for line in Path('history.csv').read_text().splitlines()]


def test_the_table_of_epochs_is_whole():
    fit(seeded(CSVLogger()), 3, .02, 'fit_one_cycle')
    expected = table_of_epochs()
    assert len(expected) == 4
    interrupt(CSVLogger())
    train(seeded(CSVLogger()))
    assert table_of_epochs() == expected


def test_settings_of_callbacks_may_change():
    interrupt(EarlyStoppingCallback(patience=5))
    learn = train(seeded(EarlyStoppingCallback(patience=7)))
    assert learn.early_stopping.patience == 7
    assert_same_end(learn, plain_fit())


class Begins(Callback):
    "Learns plain data before the first batch"
    def __init__(self): self.first_epoch = None

    def before_train(self):
        if self.first_epoch is None: self.first_epoch = self.epoch


class Watches(Begins): pass


class Waits(Begins):
    def before_epoch(self): self.next_epoch = self.epoch+1


@pytest.mark.parametrize('kind', [Begins, Watches, Waits])
def test_a_callback_that_is_added_keeps_what_it_has_learned(kind):
    "The killed process did not have it, so nothing is set back"
    interrupt()
    added = kind()
    learn = train(seeded(added))
    assert added.first_epoch == 1
    assert_same_end(learn, plain_fit())


def test_a_callback_that_was_there_has_what_it_had_learned():
    interrupt(Begins())
    again = Begins()
    train(seeded(again))
    assert again.first_epoch == 0


class LongRun(Callback):
    "Lets the Recorder have the values of `n` steps, and counts the calls of a save"
    order = 20_000
    def __init__(self, n): self.n = n

    def after_train(self):
        recorder = self.learn.recorder
        recorder.losses[:] = [torch.tensor(float(i)) for i in range(self.n)]
        recorder.lrs[:] = [float(i) for i in range(self.n)]
        recorder.iters[:] = list(range(self.n))
        fit = self.learn.auto_resume.saved_fit
        place = fit.leader.loop.state()
        profile = cProfile.Profile()
        profile.runcall(fit.save, place)
        self.n_calls = sum(o.callcount for o in profile.getstats())
        self.n_parts = len(zipfile.ZipFile(fit.file.path).namelist())
        self.n_bytes = fit.file.path.stat().st_size


def save_after(n):
    run = LongRun(n)
    train(seeded(run), n_epoch=1)
    return run


def test_a_save_after_many_steps_is_cheap():
    "At most 20 calls and 40 bytes a step, and no tensor for each: 50 ms for 20,000 steps on an idle CPU"
    few, many = save_after(1_000), save_after(20_000)
    assert many.n_parts == few.n_parts
    assert many.n_calls-few.n_calls < 20*19_000
    assert 4*19_000 < many.n_bytes-few.n_bytes < 40*19_000


class Holds(Callback):
    "Has what no file can hold"
    def __init__(self):
        self.one = object()
        self.other = SimpleNamespace(n=1)


def test_what_is_not_kept_is_named_once():
    learn = seeded(Holds())
    with pytest.warns(UserWarning) as caught: train(learn)
    message, = (str(o.message) for o in caught)
    assert 'does not keep Holds.one, Holds.other' in message


class Exports(Callback):
    "After the first batch of an epoch that goes on"
    order = 70  # after the Recorder, since `export` leaves no loss
    def after_batch(self):
        if not Path('exported.pkl').exists(): self.learn.export('exported.pkl')


class Exportable(list):
    def new_empty(self): return Exportable()


def test_a_learner_that_is_exported_in_mid_epoch():
    interrupt()
    train_dl = DataLoader(Exportable(samples()), bs=4, shuffle=True)
    valid_dl = DataLoader(Exportable(samples(30, 1)), bs=16)
    learn = train(seeded(Exports(), dls=DataLoaders(train_dl, valid_dl)))
    assert_same_end(learn, plain_fit())
    exported = load_learner('exported.pkl')
    assert (weights(exported)-weights(learn)).abs().max() > 0


class Copies(Callback):
    "Before the first batch of an epoch that goes on, since PyTorch cannot copy the output of a batch"
    order = 20_000
    def before_train(self):
        if self.epoch == 1: self.copied = deepcopy(self.learn)


@pytest.mark.filterwarnings('ignore:.*does not keep Copies.copied')
def test_a_learner_that_is_copied_in_an_epoch_that_goes_on():
    interrupt()
    copies = Copies()
    learn = train(seeded(copies))
    assert_same_end(learn, plain_fit())
    assert (weights(copies.copied)-weights(learn)).abs().max() > 0


OTHER_LEARNERS = {
    'samples': dict(dls=fastai_data(n=90)),
    'bs': dict(dls=with_valid(DataLoader(samples(), bs=5, shuffle=True))),
    'workers': dict(dls=fastai_data(num_workers=1)),
    'weights': dict(m=nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, 1)))}


@pytest.mark.parametrize('name', OTHER_LEARNERS)
def test_another_learner_is_an_error_that_names_the_difference(name):
    interrupt()
    with pytest.raises(ValueError, match=f'{name} .*restart=True'): train(seeded(**OTHER_LEARNERS[name]))


def test_other_windows_are_an_error_that_names_them():
    interrupt()
    with pytest.raises(ValueError, match='windows 12, not 8'): train(make(accum(12)))


@pytest.mark.parametrize('changed, name', [(dict(n_epoch=4), 'epochs'), (dict(lr=.05), 'schedule of lr')])
def test_other_settings_are_an_error_that_names_them(changed, name):
    interrupt()
    before = [o.read_bytes() for o in files()]
    with pytest.raises(ValueError, match=f'{name}.*restart=True'): train(seeded(), **changed)
    assert [o.read_bytes() for o in files()] == before


def test_restart_starts_over():
    interrupt()
    assert_same_end(train(seeded(), restart=True), plain_fit())


def half(content): return content[:len(content)//2]
def empty(content): return b''
def garbage(content): return b'hello'*100


def flipped(content):
    "With one other bit"
    res = bytearray(content)
    res[len(res)//2] ^= 1
    return bytes(res)


@pytest.mark.parametrize('damage', [half, empty, garbage, flipped])
def test_a_damaged_file(damage):
    "The one before stands in"
    interrupt()
    path = Path('models/resume-0.pth')
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match='damaged'): learn = train(seeded(seed=9))
    assert_same_end(learn, plain_fit())


@pytest.mark.filterwarnings('ignore:.*damaged')
def test_two_damaged_files_are_an_error():
    interrupt()
    for path in files(): path.write_bytes(half(path.read_bytes()))
    with pytest.raises(ValueError, match='restart=True'): train(seeded())


def test_a_first_save_that_is_impossible_is_an_error():
    Path('models').write_text('no folder')
    with pytest.raises(OSError, match='cannot save'): train(seeded())


def test_a_later_save_that_is_impossible_is_a_warning(monkeypatch):
    "Training goes on"
    save = resume.ResumeFile.save
    n_saves = []

    def save_once(self, state):
        n_saves.append(1)
        if len(n_saves) > 1: raise OSError('disk full')
        save(self, state)
    monkeypatch.setattr(resume.ResumeFile, 'save', save_once)
    with pytest.warns(UserWarning, match='disk full'): learn = train(seeded())
    assert_same_end(learn, plain_fit())


class Evil:
    def __reduce__(self): return os.mkdir, ('code-has-run',)


@pytest.mark.filterwarnings('ignore:.*damaged')
def test_a_file_cannot_run_code():
    interrupt()
    for path in files(): torch.save(dict(x=Evil()), path)
    with pytest.raises(ValueError, match='delete them'): train(seeded())
    assert not Path('code-has-run').exists()
