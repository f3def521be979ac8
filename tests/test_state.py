"What running a model can change is found, copied and restored"
from collections import Counter
from collections import deque
from collections import namedtuple
from threading import Lock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import *
from stateful import *
from fastxtend_accum.windows import state
from fastxtend_accum.windows.nested import each_tensor
from fastxtend_accum.windows.nested import tensors_in
from fastxtend_accum.windows.state import Snapshot
from fastxtend_accum.windows.state import StateChanges
from fastxtend_accum.windows.state import copy_content
from fastxtend_accum.windows.state import find_mutable_state
from fastxtend_accum.windows.state import restore_content


def inputs():
    return data(6)[0]


# What is found

def is_found(o, *objects):
    return any(found is o for found in find_mutable_state(*objects))


def test_buffers_are_found_and_trained_weights_are_not():
    norm = nn.BatchNorm1d(5)
    m = nn.Sequential(nn.Linear(5, 5), norm)
    assert is_found(norm.running_mean, m)
    assert is_found(norm.num_batches_tracked, m)
    assert not is_found(norm.weight, m)


@pytest.mark.parametrize('n,may_change', [(1024, True), (1025, False)])
def test_frozen_parameters_are_found_if_they_are_small(n, may_change):
    "Large ones are weights, which nothing changes, and a copy would take as much memory"
    m = nn.Module()
    m.weight = nn.Parameter(torch.zeros(n), requires_grad=False)
    assert is_found(m.weight, m) == may_change


def test_tensors_that_cannot_be_copied_are_not_found():
    sparse = SparseBuffer()
    without_values = nn.LazyBatchNorm1d()
    m = nn.Sequential(sparse, without_values)
    assert not is_found(sparse.graph, m)
    assert not is_found(without_values.running_mean, m)
    assert is_found(without_values.num_batches_tracked, m)


class Keeps:
    "Keeps an object, and has a method"
    def __init__(self, kept): self.kept = kept
    def method(self): return self.kept


@pytest.mark.parametrize('wrap', [
    lambda o: [o],
    lambda o: (o,),
    lambda o: {o},
    lambda o: deque([o]),
    lambda o: dict(key=o),
    lambda o: SimpleNamespace(o=o),
    lambda o: Keeps(o).method,
    lambda o: partial(noop, o),
    lambda o: partial(noop, key=o),
    lambda o: partial(Keeps(o).method)])
def test_what_other_objects_refer_to_is_found_at_any_depth(wrap):
    buffer = zeros()
    m = nn.Module()
    m.attribute = [wrap(Keeps(buffer))]
    assert is_found(buffer, m)


@pytest.mark.parametrize('make', [
    lambda o: make_learner(8, m=o),
    lambda o: DataLoader([o]),
    lambda o: torch.utils.data.DataLoader([o]),
    lambda o: SGD([o.weight], lr=1.)])
def test_data_optimizers_and_learners_are_not_searched(make):
    inner = nn.BatchNorm1d(5)
    m = nn.Module()
    m.attribute = [make(inner)]
    assert not [o for o in find_mutable_state(m) if isinstance(o, Tensor)]


def test_objects_that_refer_to_each_other_are_found_once():
    a = []
    b = [a]
    a.append(b)
    found = find_mutable_state(a)
    assert len(found) == 2


# Copy and restore

def change_shape(t):
    t.data = torch.ones(3)


CHANGES = [  # how to make an object, and to change it
    (lambda: dict(a=1, b=2), lambda o: o.update(a=3, c=4)),
    (lambda: dict(a=1, b=2), dict.clear),
    (lambda: Counter(a=1), lambda o: o.update(a=1)),
    (lambda: [1, 2], list.pop),
    (lambda: {1, 2}, lambda o: o.add(3)),
    (lambda: deque([1, 2], maxlen=2), lambda o: o.append(3)),
    (lambda: torch.zeros(2), lambda o: o.add_(1)),
    (lambda: torch.zeros(2), change_shape),
    (lambda: random.Random(0), random.Random.random),
    (lambda: np.random.default_rng(0), lambda o: o.random()),
    (lambda: np.random.RandomState(0), lambda o: o.rand()),
    (torch.Generator, lambda o: torch.rand(1, generator=o))]


def as_text(o):
    "Returns what `o` contains, in a form that can be compared"
    content = o.get_state() if isinstance(o, torch.Generator) else copy_content(o)
    if isinstance(content, Tensor): content = content.tolist()
    return repr(content)


@pytest.mark.parametrize('make,change', CHANGES)
def test_content_is_restored_in_place(make, change):
    o = make()
    before = as_text(o)
    content = copy_content(o)
    change(o)
    assert as_text(o) != before
    restore_content(o, content)
    assert as_text(o) == before
    change(o)
    assert as_text(o) != before, 'the copy shares something with the object'


@pytest.mark.parametrize('make', [lambda: {1, 2}, lambda: deque([1, 2])])
def test_somebody_may_iterate_over_what_has_not_changed(make):
    "Python raises an error if a set or deque is changed meanwhile"
    o = make()
    content = copy_content(o)
    seen = []
    for item in o:
        restore_content(o, content)
        seen.append(item)
    assert seen == [1, 2]


def test_an_expanded_tensor_is_not_written_to():
    "PyTorch refuses that, since several of its numbers are one in memory"
    expanded = torch.zeros(1).expand(3)
    with pytest.raises(RuntimeError): expanded.add_(1)
    restore_content(expanded, copy_content(expanded))


def test_a_backward_pass_may_need_a_tensor_that_is_restored():
    buffer = zeros()
    content = copy_content(buffer)
    buffer.data.add_(1)
    x = inputs().requires_grad_()
    output = x*buffer
    restore_content(buffer, content)
    output.sum().backward()
    assert_same(x.grad, torch.zeros_like(x))


# Snapshots

def two_runs(kind):
    "Returns a new layer of `kind`, and what it returns in two runs one after the other, as it should"
    set_seed(0)
    layer = kind()
    expected = [layer(inputs()), layer(inputs())]
    assert not torch.equal(*expected), 'nothing has changed'
    set_seed(0)
    return kind(), *expected


@pytest.mark.parametrize('kind', STATEFUL)
def test_a_layer_begins_again_once_its_state_is_restored(kind):
    layer, first_output, second_output = two_runs(kind)
    snapshot = Snapshot(layer)
    assert_same(layer(inputs()), first_output)
    snapshot.restore()
    assert_same(layer(inputs()), first_output)
    assert_same(layer(inputs()), second_output)


@pytest.mark.parametrize('kind', STATEFUL)
def test_a_further_run_equals_the_first_and_leaves_no_trace(kind):
    "However often: PyTorch's `checkpoint` enters the same context in each backward pass"
    layer, first_output, second_output = two_runs(kind)
    snapshot = Snapshot(layer)
    assert_same(layer(inputs()), first_output)
    for _ in range(2):
        with snapshot: assert_same(layer(inputs()), first_output)
    assert_same(layer(inputs()), second_output)


def test_the_graph_of_the_first_run_outlives_a_further_run():
    "It needs the buffer as the first run has left it, and PyTorch would notice that somebody has written to it"
    layer, *_ = two_runs(KeptForBackward)
    snapshot = Snapshot(layer)
    x = inputs().requires_grad_()
    output = layer(x)
    with snapshot: layer(x).sum().backward()
    expected = x.grad.clone()
    x.grad = None
    output.sum().backward()
    assert_same(x.grad, expected)


Pair = namedtuple('Pair', 'a b')
tensors = st.integers(-9, 9).map(lambda n: torch.tensor([n]))


def lists_of(items):
    pairs = st.builds(Pair, items, items)
    return st.lists(items) | st.tuples(items) | pairs | st.dictionaries(st.text(), items)


@draws
@given(st.recursive(tensors | st.integers(), lists_of, max_leaves=8))
def test_tensors_are_restored_in_any_structure(structure):
    holder = SimpleNamespace(structure=structure)

    def run(amount):
        for o in tensors_in(holder.structure): o.add_(amount)

    def values():
        return each_tensor(Tensor.tolist, holder.structure)

    before = values()
    snapshot = Snapshot(holder)
    run(amount=1)
    after_run = values()
    with snapshot:
        assert values() == before
        run(amount=2)
    assert values() == after_run
    snapshot.restore()
    assert values() == before


def test_arguments_may_be_lists_to_which_a_run_adds_but_their_tensors_are_inputs():
    "A copy of an input would not be part of the graph"
    x = inputs()
    given_list = [x]
    snapshot = Snapshot(given=(given_list,))
    given_list.append(2)
    with snapshot:
        assert len(given_list) == 1
        assert given_list[0] is x
    assert len(given_list) == 2


def test_what_a_partial_holds_is_restored():
    "As of a loss function with settings"
    seen = [1]
    counts = dict(n=1)
    snapshot = Snapshot(partial(noop, seen, counts=counts))
    seen.append(2)
    counts['n'] = 2
    snapshot.restore()
    assert seen == [1]
    assert counts == dict(n=1)


@pytest.mark.parametrize('kept', [random.SystemRandom(), Lock(), lambda: 1])
def test_a_model_may_hold_what_has_no_state_to_copy(kept):
    "The generator of the operating system, for example, raises an error if asked for its state"
    layer = Number()
    layer.kept = kept
    snapshot = Snapshot(layer)
    layer(inputs())
    with snapshot: assert layer.n == 0
    assert layer.n == 1
    snapshot.restore()
    assert layer.n == 0


def test_an_interrupt_while_a_further_run_begins_leaves_everything_as_it_was(monkeypatch):
    layer = nn.Sequential(Number(), Number())
    snapshot = Snapshot(layer)
    layer(inputs())
    n_restored = itertools.count()

    def interrupt_once(o, content):
        restore_content(o, content)
        if next(n_restored) == 5: raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(state, 'restore_content', interrupt_once)
        with pytest.raises(KeyboardInterrupt):
            with snapshot: pytest.fail('the context has begun')
    assert next(n_restored) > 6, 'nothing was put back'
    assert [o.n for o in layer] == [1, 1]


# What a pass has changed

@pytest.mark.parametrize('kind', STATISTICS)
def test_the_layers_that_have_changed_their_statistics_are_named(kind):
    "But not the modules around them"
    changed = kind()
    m = nn.Sequential(nn.Sequential(changed), SparseBuffer(), nn.LayerNorm(5).double())
    changes = StateChanges(m)
    assert changes.changed_modules() == []
    m(inputs())
    assert changes.changed_modules() == [changed]


def test_nan_in_a_buffer_is_no_change():
    m = nn.Module()
    m.register_buffer('mask', torch.tensor([math.nan, 1.]))
    changes = StateChanges(m)
    assert changes.changed_modules() == []
    m.mask[1] = math.nan
    assert changes.changed_modules() == [m]


@pytest.mark.parametrize('kind', [*SHARED_NOISE, nn.Dropout])
def test_random_numbers_are_noticed_that_a_pass_has_drawn(kind):
    layer = kind()
    changes = StateChanges(layer)
    assert not changes.has_drawn_random_numbers()
    layer(inputs())
    assert changes.has_drawn_random_numbers()
