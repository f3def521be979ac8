"Whether a fit is the one that was saved: what differs is named in one error, before anything is overwritten"
import pytest
from fastai.vision.augment import RandTransform

from common import *
from resume_layouts import WIDTH, Noisy, accum, fastai_data, make, mlp, samples, with_valid
from resumed import Stops, assert_goes_on, assert_same_end, learner, steps, stop, train, whole


class Scaled(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(n))

    def forward(self, x): return self.scale*x


def scaled(n): return nn.Sequential(Scaled(n), nn.Linear(WIDTH, 1))


def other_names():
    m = mlp()
    m[0] = nn.Sequential(collections.OrderedDict(first=m[0][0], norm=m[0][1], act=m[0][2], drop=m[0][3]))
    return m


def split(seed):
    "Returns 100 of 130 samples, by a random split"
    items = samples(130)
    order = torch.randperm(130, generator=torch.Generator().manual_seed(seed)).tolist()
    train_dl = DataLoader([items[i] for i in order[:100]], bs=4, shuffle=True)
    return DataLoaders(train_dl, DataLoader([items[i] for i in order[100:]], bs=16))


class Shifts(RandTransform):
    "Has drawn a number when the data were made, as fastai's crops have"
    def __init__(self):
        super().__init__()
        self.shift = random.random()

    def encodes(self, x): return x


def test_what_a_random_transform_has_drawn_may_differ():
    def script(): return train(learner(dls=fastai_data(after_item=Shifts())))
    with pytest.warns(UserWarning, match='earlier value.*shift'): assert_goes_on(script)


def weighted(pred, targ, weight): return (weight*(pred-targ)**2).mean()


def weighted_loss(weight):
    "Returns arguments for a Learner, with a loss that is also a metric"
    loss = partial(weighted, weight=torch.tensor(weight))
    return dict(loss_func=loss, metrics=loss)


DIFFERENCES = {
    'epochs': (dict(), dict(n_epoch=4), r'n_epoch 4, not 3'),
    'rate': (dict(), dict(lr=.05), 'lr'),
    'momentum': (dict(), dict(opt_func=partial(Adam, mom=.5)), 'mom|opt'),
    'optimizer': (dict(opt_func=SGD), dict(opt_func=Adam), 'opt'),
    'loss': (dict(), dict(loss_func=F.l1_loss), 'loss_func'),
    'weights of classes': (weighted_loss(1.), weighted_loss(2.), 'AvgMetric.func'),
    'metrics': (dict(), dict(metrics=mse), 'metrics|AvgMetric'),
    'shape of a weight': (dict(m=lambda: scaled(1)), dict(m=lambda: scaled(WIDTH)), r'scale.class Parameter \[6\]'),
    'names of layers': (dict(), dict(m=other_names), 'model'),
    'batch size': (dict(), dict(dls=lambda: with_valid(DataLoader(samples(), bs=5, shuffle=True))), 'bs 5, not 4'),
    'split': (dict(dls=lambda: split(1)), dict(dls=lambda: split(2)), 'dls.train.*seed'),
    'callbacks': (dict(), dict(cbs=SaveModelCallback), 'SaveModelCallback|cbs')}


def run(cbs=None, n_epoch=3, lr=.02, **kwargs):
    "Makes what is to be made anew, and trains"
    for name in ('m', 'dls'):
        if name in kwargs: kwargs[name] = kwargs[name]()
    more = [cbs()] if cbs else []
    return train(learner(*more, **kwargs), n_epoch=n_epoch, lr=lr)


@pytest.mark.thin(5)
@pytest.mark.parametrize('name', DIFFERENCES)
def test_a_difference_is_an_error_that_names_it(name):
    before, after, text = DIFFERENCES[name]
    stop(partial(run, **before), at=10)
    content = Path('models/resume/0.pth').read_bytes()
    with pytest.raises(ValueError, match=rf'cannot be resumed .*({text}).*restart=True'): run(**after)
    assert steps.n == 0
    assert Path('models/resume/0.pth').read_bytes() == content


def test_another_hyper_parameter_is_named_by_its_group():
    stop(run, at=10)
    with pytest.raises(ValueError, match='; wd of group 0 0.1, not 0.01;'): run(wd=.1)


def test_other_windows_are_an_error_that_names_them():
    stop(run, at=10)
    with pytest.raises(ValueError, match='accum_bs 12, not 8'): train(make(accum(12), Stops()))


@pytest.mark.long
def test_a_text_of_a_callback_goes_on_with_the_earlier_value():
    stop(lambda: train(learner(EarlyStoppingCallback(patience=5))))
    learn = learner(EarlyStoppingCallback(patience=7))
    with pytest.warns(UserWarning, match='EarlyStoppingCallback.patience 7, not 5'): train(learn)
    assert learn.early_stopping.patience == 5


class Extended(Callback): pass


def test_an_attribute_that_is_new_in_the_script_stays():
    stop(lambda: train(learner(Extended())))
    learn = learner(Extended())
    learn.extended.extra = .5
    train(learn)
    assert learn.extended.extra == .5


class Files:
    "Has each sample in a file"
    def __init__(self, folder): self.files = sorted(folder.glob('*.pt'))
    def __len__(self): return len(self.files)
    def __getitem__(self, i): return torch.load(self.files[i])


def test_a_folder_may_have_been_moved():
    "With its data and the saved fit"
    def script(folder):
        learn = learner(dls=with_valid(DataLoader(Files(folder), bs=4, shuffle=True)))
        learn.path = folder
        return train(learn)
    old, new = Path('first/run').absolute(), Path('second/run').absolute()
    old.mkdir(parents=True)
    for i, sample in enumerate(samples()): torch.save(sample, old/f'{i:03}.pt')
    expected = whole(partial(script, old))
    stop(partial(script, old))
    old.parent.rename(new.parent)
    learn = script(new)
    assert_same_end(learn, expected)
    assert learn.path == new


@pytest.mark.long
def test_another_number_of_workers_goes_on_with_the_earlier_one():
    numbers = iter([1, 1, 0])  # of the whole fit, the one that stops, and the one that goes on
    def script(): return train(learner(dls=fastai_data(Noisy, num_workers=next(numbers))))
    with pytest.warns(UserWarning, match='num_workers 0, not 1'): learn = assert_goes_on(script)
    assert learn.dls.train.fake_l.num_workers == 1
