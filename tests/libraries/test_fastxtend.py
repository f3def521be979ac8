"""fastxtend: averages of the weights; what mixes or resizes images fails beside fasttransform

    pip install -e '.[bench]'
    RECORD=1 python -m pytest -m libraries tests/libraries/test_fastxtend.py"""
from large_batch import *
from fastxtend.callback.ema import EMACallback, EMASchedule

def maker(*callbacks):
    def make(bs):
        m = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        cbs = [cb() for cb in callbacks]
        return Learner(random_loaders(bs, 96, (5,), 1), m, MSELossFlat(), opt_func=SGD, metrics=mae, cbs=cbs)
    return make

def average(learn): return weights(SimpleNamespace(model=learn.model_ema))
def values(learn): return np.array([row[:3] for row in learn.recorder.values])

averages = {'EMACallback':partial(EMACallback, .9), 'EMACallback, start=1':partial(EMACallback, .9, start=1),
            'EMASchedule':partial(EMASchedule, .5, .9, finish=1.)}

@pytest.mark.parametrize('name', averages)
@pytest.mark.parametrize('kind', kinds)
def test_average_of_the_weights(name, kind):
    "And its metrics. EMASchedule plans its steps by the length of the training loader"
    a,b = both(maker(averages[name]), kind, lr=.1)
    assert (average(a)-weights(a)).abs().max() > 1e-3
    d = float((average(b)-average(a)).abs().max())
    if (name, kind) == ('EMASchedule', small): assert d > 1e-3
    else:
        measured('fastxtend', f'{name}, {kind}', d, 1e-6)
        assert abs(values(b)-values(a)).max() < 1e-5
