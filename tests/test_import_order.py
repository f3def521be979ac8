"fastai imported after this package: its `GradientAccumulation` says that it is fastai's, and is fastai's all the same"
import pickle, runpy, subprocess, sys
from itertools import permutations
import pytest

from common import *
import fastai.callback.all, fastai.tabular.all, fastai.text.all, fastai.vision.all
import fastxtend_accum.all as ours
from fastai.callback.training import GradientAccumulation as Own
from test_life import whole_learner

Later = fastai.callback.all.GradientAccumulation
ALL = fastai.callback.all,fastai.vision.all,fastai.text.all,fastai.tabular.all

@pytest.fixture(autouse=True)
def not_warned_yet(monkeypatch): monkeypatch.setattr(Later, 'warned', False, raising=False)

def said(f):
    "What `f` warns about"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        f()
    return [str(o.message) for o in said]

@pytest.mark.parametrize('module', ALL, ids=lambda o: o.__name__)
def test_a_fit_warns_once_and_trains_as_fastai_does(module):
    learners = [make_learner(8, cbs=[Counts(), *cbs]) for cbs in ([Own(32)], [module.GradientAccumulation(32)], [module.GradientAccumulation(n_acc=32)])]
    found = [said(lambda: (learn.validate(), fit(learn, 1), fit(learn, 1))) for learn in learners]
    assert found[0] == found[2] == [] and len(found[1]) == 1 and '\n' not in found[1][0]
    assert 'import fastxtend_accum.all after' in found[1][0] and 'fastai.callback.training' in found[1][0]
    assert_moved(learners[0])
    for o in learners[1:]:
        assert_same(weights(o), weights(learners[0]))
        assert_same(losses(o), losses(learners[0]))
        assert o.counts.steps == learners[0].counts.steps == 6 and type(o.gradient_accumulation) is Later

class Counts(Callback):
    steps = 0
    def after_step(self): self.steps += 1

def test_no_warning_without_a_fit():
    "A look at the data or the losses is none, and a validation of a Learner that was trained with it neither"
    learn = make_learner(8, cbs=Later(32))
    with quiet(learn): assert said(learn.validate) == [] and said(lambda: learn.get_preds()) == [] and said(lambda: Later()) == []

@pytest.mark.parametrize('kwargs', [dict(micro_batch_size=8), dict(accum_bs=32), dict(n_acc=32, exact=True), dict(remainder='step'), dict(drop_last=True)])
def test_an_unknown_argument_names_the_import_order(kwargs):
    with pytest.raises(TypeError, match=f'{[*kwargs][-1]}.*import fastxtend_accum.all after') as e: Later(**kwargs)
    assert '\n' not in str(e.value)
    with pytest.raises(TypeError, match='import fastxtend_accum.all after'): Later(32, None, False)
    with pytest.raises(TypeError, match='unexpected keyword') as e: Own(**kwargs)
    assert 'import' not in str(e.value)

def test_it_is_fastais_class():
    "Both ways: a callback of a loaded Learner may be of either"
    assert issubclass(Later, Own) and isinstance(Later(), Own) and isinstance(Own(), Later)
    assert not isinstance(GradientAccumulation(32), Later) and not isinstance(Callback(), Later)
    class Mine(Later):
        def __init__(self, n, more): super().__init__(n); self.more = more
    assert isinstance(Mine(8, 2), Mine) and Mine(8, 2).n_acc == 8 and not isinstance(Later(), Mine) and not isinstance(Own(), Mine)
    assert str(inspect.signature(Later)) == str(inspect.signature(Own)) and repr(Later()) == repr(Own()) and Later().order == Own().order
    for make in Own,Later:
        learn = make_learner(8, cbs=make(16))
        assert not learn.remove_cb(Later).cbs.filter(lambda o: isinstance(o, Own)) and not hasattr(learn, 'gradient_accumulation')

def loaded(learn):
    learn.export('l.pkl')
    return load_learner('l.pkl')

@pytest.mark.parametrize('make', [Own, Later])
@pytest.mark.parametrize('copy', [deepcopy, loaded])
def test_copies(make, copy):
    learn = whole_learner(make(16))
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        other = copy(learn)
        assert type(other.gradient_accumulation) is make and other.gradient_accumulation.n_acc == 16
        other.dls = learn.dls
        assert_same(weights(fit(other, 1, reset_opt=True)), weights(fit(learn, 1, reset_opt=True)))
        assert not other.remove_cb(Later).cbs.filter(risinstance(Own))

def test_it_loads_where_this_package_is_not():
    Path('cbs.pkl').write_bytes(pickle.dumps([Own(8), Later(16)]))
    code = "import pickle, sys; sys.modules['fastxtend_accum'] = None\nfor o in pickle.load(open('cbs.pkl', 'rb')): print(type(o), o.n_acc)"
    out = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, timeout=SECONDS)
    assert out.stdout == f'{Own} 8\n{Own} 16\n', out.stderr[-2000:]

def test_any_order_of_imports():
    "The last one wins: fastai's says so, whatever was imported before"
    statements = ['from fastxtend_accum.all import *','from fastai.callback.all import *','from fastai.vision.all import *','from fastai.basics import *']
    for lines in permutations(statements):
        names = {}
        for o in lines: exec(o, names)
        accumulators = [o for o in lines if 'basics' not in o]
        assert names['GradientAccumulation'] is (GradientAccumulation if 'fastxtend' in accumulators[-1] else Later)
        assert names['GradientClip'] is fastai.callback.training.GradientClip and 'LaterImport' not in names and 'wraps' not in names

def test_modules_that_were_imported_before(monkeypatch):
    "As in a new process that imports them first"
    for o in ALL: monkeypatch.setattr(o, 'GradientAccumulation', Own)
    again = runpy.run_module('fastxtend_accum.all')
    assert {o.GradientAccumulation for o in ALL} == {again['LaterImport']} and again['LaterImport'] not in (Own, Later)
    assert fastai.callback.training.GradientAccumulation is Own

def test_two_that_accumulate_are_told_apart():
    with pytest.raises(ValueError, match='2 callbacks that accumulate .*fastxtend_accum.*fastai.callback'):
        fit(make_learner(8, cbs=[GradientAccumulation(16), Later(16)]), 1)

def test_what_the_module_exports():
    assert not {'LaterImport','LikeFastais','import_order','Fastais','wraps','warn','sys','fastai'} & {*ours.__all__} and 'GradientAccumulation' in ours.__all__
