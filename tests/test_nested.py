"Nested batches: their samples are counted, they are sliced, and outputs are joined (windows/nested.py)"
import weakref
from collections import UserDict, namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from common import *
from fastxtend_accum.windows.nested import (CannotJoin, children, each_tensor, join, n_rows, rebuilt,
                                            rows_of_first_tensor, slice_batch, tensors_in)


class Encoding(UserDict):
    "Like Hugging Face's BatchEncoding: a mapping that is no dict"


Pair = namedtuple('Pair', 'a b')


def zeros(*rows):
    "Returns a tensor for each of these numbers of rows"
    return [torch.zeros(n) for n in rows]


def part_of(batch, start, end):
    return slice_batch((batch,), start, end, n_rows(batch))[0]


# Structures

@pytest.mark.parametrize('batch', [
    (1, 2),
    [1, 2],
    dict(a=1, b=2),
    Encoding(a=1, b=2),
    Pair(1, 2)])
def test_a_batch_is_rebuilt_in_its_own_type(batch):
    res = rebuilt(batch, [3, 4])
    assert type(res) is type(batch)
    assert children(res) == [3, 4]
    assert children(batch) == [1, 2]


def test_an_output_of_transformers_is_rebuilt_with_its_tensors_alone():
    "It leaves out what is None"
    from transformers.modeling_outputs import TokenClassifierOutput
    output = TokenClassifierOutput(logits=torch.zeros(2, 3))
    res = each_tensor(lambda t: t+1, output)
    assert type(res) is TokenClassifierOutput
    assert [*res] == ['logits']
    assert_same(res.logits, torch.ones(2, 3))


def test_a_packed_sequence_is_no_tuple():
    "No tensor in it has a row for each sample"
    packed = pack_sequence(zeros(2))
    assert children(packed) is None


def test_tensors_are_found_in_order_and_without_single_numbers():
    a, b = zeros(1, 2)
    batch = [a, {'deep': (b, 'text', tensor(1.))}, None, Pair(torch.zeros(3), 1)]
    assert [len(o) for o in tensors_in(batch)] == [1, 2, 3]


# Rows

@pytest.mark.parametrize('targets_rows,expected,rows', [
    (6, None, 6),
    (6, 6, 6),
    (12, 6, 12)])  # a callback has made two rows of each sample
def test_rows_are_those_of_the_targets(targets_rows, expected, rows):
    assert n_rows(zeros(12, targets_rows), expected) == rows


@pytest.mark.parametrize('batch', [
    zeros(3, 6, 4),  # the first tensor is a setting, and the last one the boxes of one image
    [zeros(3, 4, 3, 4, 3, 4), zeros(5)],  # a list of six images of many sizes
    [[*'abcdef']]])
def test_rows_are_the_expected_number_if_something_in_the_batch_has_it(batch):
    assert n_rows(batch, 6) == 6


def test_without_targets_that_are_a_tensor_the_first_tensor_shows_the_rows():
    assert n_rows({'ids': torch.zeros(4, 2)}) == 4
    assert n_rows([tensor(1.), torch.zeros(4), ['a']]) == 4


def test_a_batch_without_tensors_whose_samples_nobody_knows_is_an_error():
    with pytest.raises(ValueError, match='cannot find the samples of a batch without tensors'):
        n_rows(('a', None))
    assert n_rows(('a', None), 3) == 3


@pytest.mark.parametrize('args,kwargs', [
    (zeros(3), {}),
    ((), dict(x=torch.zeros(3))),  # keyword arguments alone
    ((), dict(use_cache=False, inputs=dict(ids=torch.zeros(3)))),
    ((tensor(1.), None), dict(x=zeros(3)))])
def test_rows_of_the_arguments_of_a_forward_pass(args, kwargs):
    assert rows_of_first_tensor((args, kwargs)) == 3


def test_arguments_without_tensors_have_no_rows():
    assert rows_of_first_tensor((('abc',), dict(n=1))) == 0


# Slices

def test_a_slice_has_the_structure_and_types_of_the_batch():
    x = torch.arange(12.).reshape(6, 2)
    y = torch.arange(6)
    encoding = Encoding(ids=x, deep=[x, (y,)])
    res = part_of([encoding, Pair(x, y)], 2, 5)
    assert type(res) is list
    encoding, pair = res
    assert type(encoding) is Encoding
    assert type(pair) is Pair
    assert_same(encoding['ids'], x[2:5])
    assert_same(encoding['deep'][1][0], y[2:5])
    assert_same(pair.b, y[2:5])


@pytest.mark.parametrize('for_all', ['name', b'name', None, 3, 2.5, tensor(1.)])
def test_what_is_the_same_for_all_samples_is_not_sliced(for_all):
    _, res = part_of((torch.zeros(6), for_all), 2, 5)
    assert res == for_all


def test_a_list_with_an_entry_for_each_sample_is_sliced():
    names = [*'abcdef']
    boxes = zeros(4, 1, 2, 5, 3, 3)
    batch = torch.zeros(6), names, boxes
    _, some_names, some_boxes = part_of(batch, 2, 5)
    assert some_names == ['c', 'd', 'e']
    assert [len(o) for o in some_boxes] == [2, 5, 3]


def test_inputs_and_targets_are_no_list_of_samples_though_they_are_as_many():
    x, y = part_of(zeros(2, 2), 0, 1)
    assert len(x) == 1
    assert len(y) == 1


@pytest.mark.parametrize('field,says', [
    (torch.zeros(3), r'split a tensor of shape \(3,\) in a batch of 6 samples'),
    (object(), 'split a object'),
    (pack_sequence(zeros(2, 2, 2, 2, 2, 2)), 'split a PackedSequence'),
    (torch.eye(6).to_sparse(), 'split a Tensor')])
def test_what_cannot_be_sliced_is_an_error_that_names_it(field, says):
    batch = field, torch.zeros(6)
    with pytest.raises(ValueError, match=f'cannot {says}'): part_of(batch, 0, 3)


# Joined outputs

def rows_of(shape): return torch.rand(12, *shape)


def structures_of(parts):
    tuples = st.lists(parts, min_size=1, max_size=3).map(tuple)
    dicts = st.dictionaries(st.sampled_from('abc'), parts, min_size=1)
    pairs = st.builds(Pair, parts, parts)
    return tuples | dicts | pairs


tensors = st.lists(st.integers(1, 3), max_size=2).map(rows_of)
same_for_all = st.sampled_from(['name', None, 3, False])


def structure_of(batch): return each_tensor(lambda t: 'tensor', batch)


@draws
@given(st.recursive(tensors | same_for_all, structures_of, max_leaves=8), st.integers(1, 12))
def test_the_slices_of_any_batch_are_joined_to_that_batch(whole, size):
    bounds = [(i, min(i+size, 12)) for i in range(0, 12, size)]
    parts = []
    for start, end in bounds: parts += slice_batch((whole,), start, end, 12)
    res = join(parts, [end-start for start, end in bounds])
    assert structure_of(res) == structure_of(whole)
    for a, b in zip(tensors_in(res), tensors_in(whole), strict=True): assert_same(a, b)


def copied_part(batch, start, end): return each_tensor(torch.clone, part_of(batch, start, end))


def test_each_output_is_freed_once_it_is_joined(monkeypatch):
    pair = Pair(torch.rand(8), [torch.rand(8), None])
    whole = dict(a=torch.rand(8, 3), b=pair, c='kind')
    outputs = [copied_part(whole, i, i+2) for i in range(0, 8, 2)]
    refs = [weakref.ref(t) for t in tensors_in(outputs)]
    alive = []
    cat = torch.cat

    def count_and_cat(tensors):
        alive.append(sum(o() is not None for o in refs))
        return cat(tensors)
    monkeypatch.setattr(torch, 'cat', count_and_cat)
    join(outputs, [2, 2, 2, 2])
    assert alive == [12, 8, 4]  # of four outputs with three tensors each
    assert not outputs
    assert all(o() is None for o in refs)


def test_one_output_is_returned_as_it_is():
    output = object()
    assert join([output], [3]) is output


@pytest.mark.parametrize('n', [1, 2, 3])
def test_numbers_that_are_the_same_in_all_micro_batches_are_those_of_the_batch(n):
    outputs = [Pair(tensor(1.), tensor(2.)) for _ in range(2)]
    assert join(outputs, [n, n]) == Pair(1., 2.)


@pytest.mark.parametrize('n', [1, 2, 3])
def test_lists_with_an_entry_for_each_sample_are_joined(n):
    boxes_of_samples = range(n)
    outputs = [zeros(*boxes_of_samples) for _ in range(2)]
    res = join(outputs, [n, n])
    assert [len(o) for o in res] == [*boxes_of_samples, *boxes_of_samples]


@pytest.mark.parametrize('first_one,second', [
    (tensor(1.), tensor(2.)),  # a number of each micro-batch, such as its loss
    (torch.zeros(2), torch.zeros(2)),  # the first micro-batch has 1 sample
    (torch.zeros(1, 3), torch.zeros(2, 4)),
    (Pair(1, tensor(1.)), Pair(1, tensor(2.))),
    ('a', 'b'),
    (object(), object()),
    # outputs of two types
    (1., torch.zeros(2)),
    (torch.zeros(1), 1.),
    ('a', torch.zeros(2)),
    (None, torch.zeros(2)),
    (Pair('a', torch.zeros(1)), ('a', torch.zeros(2)))])
def test_what_is_no_output_of_the_batch_cannot_be_joined(first_one, second):
    with pytest.raises(CannotJoin, match='cannot join'): join([first_one, second], [1, 2])


@pytest.mark.parametrize('entries,says', [
    ([2, 3, 3], '2 and 3'),
    ([2, 2, 1], '2 and 1'),
    ([3, 3, 1, 2], '3 and 1')])
def test_the_error_names_the_numbers_of_entries_that_differ(entries, says):
    outputs = [tuple(range(n)) for n in entries]
    sizes = [4 for _ in entries]
    with pytest.raises(CannotJoin, match=f'outputs of {says} entries'): join(outputs, sizes)


def test_the_error_names_the_keys_that_differ():
    outputs = [dict(a=torch.zeros(2)), dict(b=torch.zeros(2))]
    with pytest.raises(CannotJoin, match=r"outputs of \('a',\) and \('b',\) entries"): join(outputs, [2, 2])


def test_the_error_names_the_shapes_that_differ():
    outputs = [torch.zeros(2, 3), torch.zeros(1, 4)]
    with pytest.raises(CannotJoin, match=r'\(1, 4\) from a micro-batch of 1 samples and \(2, 3\) from one of 2'):
        join(outputs, [2, 1])
