"Nested batches: their samples are counted, they are sliced, and outputs are joined (windows/nested.py)"
from collections import UserDict, namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from common import *
from fastxtend_accum.windows.nested import (NotBySample, NotSamplesFirst, children, join, map_tensors, n_rows,
                                            part_bounds, rebuilt, slice_rows, tensors_in)


class Encoding(UserDict):
    "Like Hugging Face's BatchEncoding: a mapping that is no dict"


Pair = namedtuple('Pair', 'a b')


def zeros(*rows):
    "Returns a tensor for each of these numbers of rows"
    return [torch.zeros(n) for n in rows]


# Structures

@pytest.mark.parametrize('batch', [
    (1, 2),
    L(1, 2),
    defaultdict(list, a=1, b=2),
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
    res = map_tensors(lambda t: t+1, output)
    assert type(res) is TokenClassifierOutput
    assert [*res] == ['logits']
    assert_same(res.logits, torch.ones(2, 3))


def test_tensors_are_found_in_order_and_without_single_numbers():
    a, b = zeros(1, 2)
    batch = [a, {'deep': (b, 'text', tensor(1.))}, None, Pair(torch.zeros(3), 1)]
    assert [len(o) for o in tensors_in(batch)] == [1, 2, 3]


# Rows

@pytest.mark.parametrize('batch, expected, rows', [
    (zeros(12, 6), None, 6),
    (zeros(12, 6), 6, 6),
    (zeros(12, 12), 6, 12),  # a callback has made two rows of each sample
    (zeros(3, 6, 4), 6, 6),  # the first tensor is a setting, and the last one the boxes of one image
    ([zeros(3, 4, 3, 4, 3, 4), zeros(5)], 6, 6),  # a list of six images of many sizes
    ([[*'abcdef']], 6, 6),
    ({'ids': torch.zeros(4, 2)}, None, 4),
    ([tensor(1.), torch.zeros(4), ['a']], None, 4),  # targets are no tensor
    (('a', None), 3, 3),
    ((torch.zeros(9, 6, 3), torch.zeros(9, 6)), 6, 6),  # time comes first
    ([torch.zeros(5, 3), zeros(2, 2, 2, 2, 2)], 6, 5),  # the boxes of five images, in the last batch
    (zeros(1, 1), 2, 1)])  # as many fields as samples in a full batch
def test_rows_are_those_of_the_targets_or_the_expected_number_if_something_has_it(batch, expected, rows):
    assert n_rows(batch, expected) == rows


def test_a_batch_without_tensors_whose_samples_nobody_knows_is_an_error():
    with pytest.raises(ValueError, match='cannot count the samples in a batch without tensors'):
        n_rows(('a', None))


# Slices

@pytest.mark.parametrize('n, n_parts', [(12, 3), (13, 5), (4, 4), (5, 1)])
def test_parts_are_of_nearly_equal_size_and_none_is_larger_than_the_first(n, n_parts):
    bounds = part_bounds(n, n_parts)
    sizes = [end-start for start, end in bounds]
    assert sum([[*range(*o)] for o in bounds], []) == [*range(n)]
    assert len(bounds) == n_parts
    assert sizes[0] == max(sizes) <= min(sizes)+1


@pytest.mark.parametrize('for_all', ['name', b'name', None, 2.5, tensor(1.)])
def test_what_is_the_same_for_all_samples_is_not_sliced(for_all):
    assert slice_rows(for_all, 2, 5, 6) == for_all


def test_a_list_with_an_entry_for_each_sample_is_sliced():
    assert slice_rows([*'abcdef'], 2, 5, 6) == ['c', 'd', 'e']
    boxes = slice_rows(zeros(4, 1, 2, 5, 3, 3), 2, 5, 6)
    assert [len(o) for o in boxes] == [2, 5, 3]


def test_inputs_and_targets_are_no_list_of_samples_though_they_are_as_many():
    res = slice_rows(zeros(2, 2), 0, 1, 2)
    assert [len(o) for o in res] == [1, 1]


@pytest.mark.parametrize('field, says', [
    (torch.zeros(3), r'split a tensor of shape \(3,\) for 6 samples: its first dimension must index'),
    (pack_sequence(zeros(2, 2, 2, 2, 2, 2)), r'split a tensor of shape \(12,\)'),
    (object(), 'split a object: use dense tensors')])
def test_what_cannot_be_sliced_is_an_error_that_names_it(field, says):
    with pytest.raises(ValueError, match=f'cannot {says}'): slice_rows([field, torch.zeros(6)], 0, 3, 6)


# Joined outputs

def rows_of(shape): return torch.rand(12, *shape)


def structures_of(parts):
    tuples = st.lists(parts, min_size=1, max_size=3).map(tuple).filter(tensors_in)  # others are lists of samples
    dicts = st.dictionaries(st.sampled_from('abc'), parts, min_size=1)
    pairs = st.builds(Pair, parts, parts)
    return tuples | dicts | pairs


tensors = st.lists(st.integers(1, 3), max_size=2).map(rows_of)
same_for_all = st.sampled_from([None, 3, False])


def structure_of(batch): return map_tensors(lambda t: 'tensor', batch)


@draws
@given(st.recursive(tensors | same_for_all, structures_of, max_leaves=8), st.integers(1, 12))
def test_the_slices_of_any_batch_are_joined_to_that_batch(whole, n_parts):
    bounds = part_bounds(12, n_parts)
    parts = [slice_rows(whole, start, end, 12) for start, end in bounds]
    res = join(parts, [end-start for start, end in bounds])
    assert structure_of(res) == structure_of(whole)
    for a, b in zip(tensors_in(res), tensors_in(whole), strict=True): assert_same(a, b)


@pytest.mark.parametrize('n', [1, 2, 3])
def test_numbers_that_are_the_same_in_all_micro_batches_are_those_of_the_batch(n):
    outputs = [Pair(tensor(1.), tensor(2.)) for _ in range(2)]
    assert join(outputs, [n, n]) == Pair(1., 2.)


@pytest.mark.parametrize('n, kind', [(1, tuple), (2, list), (3, L)])
def test_lists_with_an_entry_for_each_sample_are_joined(n, kind):
    boxes_of_samples = range(n)
    outputs = [kind(zeros(*boxes_of_samples)) for _ in range(2)]
    res = join(outputs, [n, n])
    assert type(res) is kind
    assert [len(o) for o in res] == [*boxes_of_samples, *boxes_of_samples]


def test_a_list_of_samples_may_look_like_several_outputs_beside_others_that_do_not():
    "Its two images have two boxes each"
    parts = [zeros(2, 2), zeros(5, 5)]
    assert [len(o) for o in join(parts, [2, 2])] == [2, 2, 5, 5]


def test_texts_of_samples_are_joined():
    assert join([('cat', 'dog'), ('cat', 'dog')], [2, 2]) == ('cat', 'dog', 'cat', 'dog')
    assert join([Pair('a', 'b'), Pair('a', 'b')], [2, 2]) == Pair('a', 'b')  # their names say that they are no samples


def test_lists_of_samples_are_joined_inside_of_an_output():
    outputs = [dict(boxes=zeros(i, 5), scores=torch.zeros(2)) for i in (1, 2)]
    res = join(outputs, [2, 2])
    assert [len(o) for o in res['boxes']] == [1, 5, 2, 5]
    assert len(res['scores']) == 4


@pytest.mark.parametrize('first_one, second', [
    (tensor(1.), tensor(2.)),  # a number of each micro-batch, such as its loss
    (tensor(1.), torch.zeros(2)),  # the model has squeezed the output for one sample
    (None, torch.zeros(2)),
    ('a', 'b'),
    (object(), object()),
    ((1, 2), (1, 2, 3)),
    (['a'], ['b', 'c', 'd']),  # only the first one lists samples
    ((torch.zeros(1), 1), torch.zeros(2)),
    (dict(a=torch.zeros(1), b=torch.ones(1)), dict(b=torch.ones(2), a=torch.zeros(2)))])
def test_what_is_no_output_of_the_batch_cannot_be_joined(first_one, second):
    with pytest.raises(NotBySample, match='cannot join a|differ in structure'): join([first_one, second], [1, 2])


def test_an_output_whose_first_dimension_is_not_the_samples_is_an_error():
    layers_first = torch.zeros(1, 4, 2)
    output = dict(logits=torch.zeros(4, 2), hidden=(layers_first,))
    with pytest.raises(NotSamplesFirst, match='for 4 samples: its first dimension must index the samples'):
        join([output, output], [4, 4])


def test_the_error_names_the_sizes_that_differ():
    "Not only those of the first two micro-batches"
    outputs = [torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(1, 4)]
    with pytest.raises(NotBySample, match='cannot be concatenated: .* Expected size 3 but got size 4'):
        join(outputs, [2, 2, 1])
