"How parts are pickled: no file can run code, and digests are those of values"
import pytest

from common import *
from fastxtend_accum.resuming.graph import Graph
from resumed import learner, train


class Evil:
    def __reduce__(self): return os.mkdir, ('code-has-run',)


def test_a_file_cannot_run_code():
    graph = Graph(train(learner(), n_epoch=1))
    content = io.BytesIO()
    torch.save(dict(x=Evil()), content)
    with pytest.raises(Exception, match='Unsupported|not allowed|Weights only'): graph.read(content.getvalue())
    assert not Path('code-has-run').exists()


VALUES = {
    'text': ('a', 'b'),
    'list': ([1, 2], [1, 3]),
    'set': ({'a', 'b'}, {'a', 'c'}),
    'tensor': (torch.ones(3), torch.tensor([1., 1., 2.])),
    'long tensor': (torch.zeros(70_000), torch.ones(70_000)),
    'shape': (torch.ones(4), torch.ones(2, 2)),
    'array': (np.ones(3), np.zeros(3)),
    'texts': (np.array(['a']), np.array(['b'])),
    'records': (np.zeros(1, [('a', 'i4')]), np.ones(1, [('a', 'i4')])),
    'numpy number': (np.float32(1), np.float32(2)),
    'defaultdict': (defaultdict(int, a=1), defaultdict(int, a=2)),
    'deque': (collections.deque([1], 2), collections.deque([1], 3))}


@pytest.mark.thin(3, 1)
@pytest.mark.parametrize('name', VALUES)
def test_equal_values_have_equal_digests_and_others_do_not(name):
    value, other = VALUES[name]
    comparing = Graph(train(learner(), n_epoch=1))
    digests = [comparing.digest('cb', o) for o in (value, deepcopy(value), other)]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


@pytest.mark.thin(3, 1)
@pytest.mark.parametrize('name', VALUES)
def test_values_come_back(name):
    graph = Graph(train(learner(), n_epoch=1))
    value = VALUES[name][0]
    file = io.BytesIO()
    graph.write(value, file)
    found = graph.read(file.getvalue())
    assert type(found) is type(value)
    assert graph.digest('cb', found) == graph.digest('cb', value)
