"How parts are pickled: no file can run code, and digests are those of values"
import pickle
import subprocess
from subprocess import Popen

import pytest

from common import *
from fastxtend_accum.resuming.graph import Graph
from fastxtend_accum.resuming.pickles import Digest, bound
from resume_layouts import make


class HoldsPython(Callback):
    "Has an object of a class, and functions, that could run code, and an array that no file can hold"
    def __init__(self): self.calls = [subprocess.getoutput, os.system, exec, np.ma.masked_array([1])]
    def before_fit(self): self.process = Popen(['true'])


@pytest.fixture(scope='module')
def graph(): return Graph(fit(make(HoldsPython()), 1))


def digest(graph, value, part='learn.x'): return graph.digest(part, value)


class Evil:
    def __init__(self, *reduced): self.reduced = reduced
    def __reduce__(self): return self.reduced


@pytest.mark.parametrize('call, arg', [
    (os.mkdir, 'code-has-run'),
    (Popen, ['mkdir', 'code-has-run']),
    (subprocess.getoutput, 'mkdir code-has-run'),
    (os.system, 'mkdir code-has-run'),
    (np.memmap, 'code-has-run'),  # makes a file
    (exec, 'os.mkdir("code-has-run")')])
def test_a_file_cannot_run_code(call, arg, graph):
    "Also what a callback holds"
    content = io.BytesIO()
    torch.save(dict(x=Evil(call, (arg,))), content, pickle_protocol=4)
    with pytest.raises(pickle.UnpicklingError, match=f'cannot name .*{call.__name__}'): graph.read(content.getvalue())
    assert not Path('code-has-run').exists()


@pytest.mark.parametrize('method', [Path.unlink, Learner.load, Learner.export])
def test_a_file_cannot_have_a_method_that_no_callback_has(method, graph):
    content = io.BytesIO()
    graph.write(Evil(bound, (method, graph.objects['learn'])), content)
    found = graph.read(content.getvalue())
    with pytest.raises(pickle.UnpicklingError, match=f'cannot name .*{method.__name__}'): found()


def test_files_of_numpy_1_and_2_are_the_same(graph):
    "They name the function that makes an array by different modules"
    found = [graph.find_class(module, '_reconstruct') for module in ('numpy.core.multiarray', 'numpy._core.multiarray')]
    assert found[0] is found[1]


@pytest.mark.parametrize('value', [np.float32(.5), np.full(1, .5, np.float32)])
def test_digests_of_numpy_1_and_2_are_the_same(graph, value):
    "They have its numbers, and not the name of the module that makes an array"
    assert Digest(graph, 'learn.x', adds=False).persistent_id(value) == ('float32', value.shape, .5)


def test_an_array_of_the_data_is_kept_unless_it_is_large(graph):
    assert digest(graph, np.zeros(5000), 'dls.x').not_kept is None
    assert digest(graph, np.zeros(500_000), 'dls.x').not_kept == 'it is large'


@pytest.mark.parametrize('kind', [int, np.int64])
def test_an_order_of_the_data_is_kept_whatever_its_length(graph, kind):
    order = [kind(i) for i in range(2000)]
    before = digest(graph, order, 'dls.x')
    order[1], order[2] = order[2], order[1]
    assert before.not_kept is None
    assert digest(graph, order, 'dls.x').value != before.value


VALUES = {
    'text': ('a', 'b'),
    'list': ([1, 2], [1, 3]),
    'set': ({'a', 'b'}, {'a', 'c'}),
    'tensor': (torch.ones(3), torch.tensor([1., 1., 2.])),
    'long tensor': (torch.zeros(70_000), torch.ones(70_000)),
    'shape': (torch.ones(4), torch.ones(2, 2)),
    'array': (np.ones(3), np.zeros(3)),
    'reversed array': (np.arange(3)[::-1], np.arange(3)),
    'texts': (np.array(['a']), np.array(['b'])),
    'records': (np.zeros(1, [('a', 'i4')]), np.ones(1, [('a', 'i4')])),
    'objects': (np.array([None, 1]), np.array([None, 2])),
    'numpy number': (np.float32(1), np.float32(2)),
    'defaultdict': (defaultdict(int, a=1), defaultdict(int, a=2)),
    'deque': (collections.deque([1], 2), collections.deque([1], 3))}


@pytest.mark.parametrize('name', VALUES)
def test_values_come_back(name, graph):
    "With the same digest, and another value has another one"
    value, other = VALUES[name]
    file = io.BytesIO()
    graph.write(value, file)
    found = graph.read(file.getvalue())
    assert type(found) is type(value)
    digests = [digest(graph, o).value for o in (value, found, other)]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


class Item:
    "Prints its address"


class Point:
    "Prints as a text does, and has its hash, so that a set of both keeps them in the order in which they came"
    def __hash__(self): return hash('point')
    def __repr__(self): return 'point'


def test_a_set_has_the_same_digest_in_whatever_order_it_is(graph):
    both = [Point(), 'point']
    in_reverse = both[::-1]
    assert [*{*both}] != [*{*in_reverse}]
    sets = [{frozenset(order), frozenset('q')} for order in (both, in_reverse)]
    assert digest(graph, sets[0]).value == digest(graph, sets[1]).value


def test_a_set_of_objects_without_an_order_is_not_kept(graph):
    "Their addresses differ in the next process. A set of layers, which have paths, is kept"
    assert digest(graph, {Item(), Item()}).not_kept == 'it is a set of objects that have no order'
    layers = {*graph.objects['model'].modules()}
    assert digest(graph, layers).not_kept is None


class OwnSet(set): pass


class Silent:
    "Raises an error without a text when it is pickled"
    def __reduce__(self): raise RuntimeError


@pytest.mark.parametrize('value, text', [
    (np.ma.masked_array([1, 2], [True, False]), 'numpy.ma.*MaskedArray'),
    (OwnSet([1]), 'test_pickles.OwnSet'),
    (Silent(), 'RuntimeError')])
def test_what_could_not_be_read_again_is_not_kept(value, text, graph):
    assert re.search(text, digest(graph, value).not_kept)
