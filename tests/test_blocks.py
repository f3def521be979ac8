"Which parts of a model are its blocks: those that are found, and those that a user names"
from collections import Counter

import pytest
import timm
from fastai.text.all import AWD_LSTM, awd_lstm_lm_config, get_language_model
from fastai.vision.all import create_vision_model, resnet18
from torch.nn.utils.parametrizations import weight_norm
from torchvision.models import vgg11

from common import *
from library_models import Residual
from fastxtend_accum.memory.blocks import check_blocks, find_blocks, grouped


def kinds_of_blocks(m):
    "Returns the class names of the blocks of `m`, which are separate, and have no weights but those of `m`"
    found, _ = find_blocks(m)
    inside = []
    for block in found: inside += block.modules()
    assert len(inside) == len(set(inside)), 'a block is inside of another'
    own = set(m.parameters())
    for block in found: assert own.issuperset(block.parameters())
    return [type(block).__name__ for block in found]


def count_kinds(make, *args, **kwargs):
    "Counts the blocks of the model that `make` makes, without memory for its weights, by class"
    with torch.device('meta'): m = make(*args, **kwargs)
    return Counter(kinds_of_blocks(m))


# Small models

def two_layers():
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))


def residual(): return Residual(*two_layers())


@pytest.mark.parametrize('layer', [noop, weight_norm])
def test_a_parametrization_is_no_block(layer):
    "It makes a weight; the blocks are those of the same model without it"
    body = two_layers()
    head = nn.Linear(5, 1)
    for m in (body[0], body[1], head): layer(m)
    assert kinds_of_blocks(nn.Sequential(body, nn.Sequential(head))) == ['Sequential', 'Sequential']


def test_a_layer_and_what_follows_it_without_a_matrix_are_grouped():
    m = nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.Tanh(), *two_layers())
    first_group, *others = grouped(m)
    assert list(first_group) == list(m[:3])
    assert others == list(m[3:])
    inputs = torch.randn(4, 5)
    assert_same(grouped(m)(inputs), m(inputs))


def test_a_sequential_with_a_forward_pass_of_its_own_is_not_grouped():
    "It is a block, and so are the children of a large one"
    m = nn.Sequential(residual(), residual())
    _, groups = find_blocks(m)
    assert list(groups) == [m]
    assert kinds_of_blocks(m) == ['Residual', 'Residual']
    assert kinds_of_blocks(Residual(two_layers(), two_layers())) == ['Sequential', 'Sequential']
    with override_attr(m, 'forward', noop): assert find_blocks(m)[1] == {}


def test_a_module_that_occurs_twice_is_one_block():
    shared = two_layers()
    found, _ = find_blocks(nn.Sequential(shared, shared, nn.Linear(5, 1)))
    assert found == [shared]


class WithIdentity(nn.Linear):
    "A layer whose only child is an empty shortcut"
    def __init__(self):
        super().__init__(5, 5)
        self.shortcut = nn.Sequential()

    def forward(self, x): return self.shortcut(x)+torch.tanh(super().forward(x))


def test_a_module_whose_only_child_is_empty_is_a_block():
    assert kinds_of_blocks(nn.ModuleList([WithIdentity(), WithIdentity()])) == ['WithIdentity', 'WithIdentity']


# Models of libraries


def small_bert():
    from transformers import BertConfig
    from transformers import BertModel
    return BertModel(BertConfig(num_hidden_layers=3, hidden_size=24, num_attention_heads=2, intermediate_size=32))


def small_language_model():
    config = awd_lstm_lm_config | dict(emb_sz=8, n_hid=12, n_layers=3)
    return get_language_model(AWD_LSTM, 20, config)


MODELS = dict(
    resnet=(partial(create_vision_model, resnet18, 3, pretrained=False), dict(BasicBlock=8, Sequential=2)),
    language_model=(small_language_model, dict(WeightDropout=3, LinearDecoder=1)),
    bert=(small_bert, dict(BertLayer=3)))


@pytest.mark.parametrize('name', MODELS)
def test_blocks_of_models_by_class(name):
    make, expected = MODELS[name]
    assert count_kinds(make) == expected


@pytest.mark.parametrize('name,kind,n', [
    ('convnext_atto', 'ConvNeXtBlock', 2+2+6+2),
    ('vit_tiny_patch16_224', 'Block', 12),
    ('densenet121', 'DenseLayer', 6+12+24+16),
    ('hrnet_w18_small', 'ModuleList', 0)])  # its branches are lists that are never called
def test_stages_of_timm_are_taken_apart(name, kind, n):
    counts = count_kinds(timm.create_model, name)
    assert counts
    assert counts[kind] == n


def test_a_long_list_of_layers_is_taken_apart():
    assert sum(count_kinds(vgg11).values()) == 8+2  # convolutions, linear layers; the last of these keeps nothing


# Blocks that a user names

@pytest.fixture
def nested():
    return nn.Sequential(two_layers(), residual(), nn.Linear(5, 1))


@pytest.mark.parametrize('choose,expected', [
    (lambda m: m[0], lambda m: [m[0][0], m[0][1]]),  # a list means its children
    (lambda m: nn.ModuleList([m[0], m[2]]), lambda m: [m[0], m[2]]),
    (lambda m: m[2], lambda m: [m[2]]),
    (lambda m: iter([m[0], m[2], m[0]]), lambda m: [m[0], m[2]])])
def test_blocks_that_a_user_names(nested, choose, expected):
    assert check_blocks(choose(nested), nested) == expected(nested)


@pytest.mark.parametrize('choose,name', [
    (lambda m: [m[0], []], 'list'),  # it has no hash
    (lambda m: [nn.Linear(1, 1)], 'Linear'),
    (lambda m: [m[:2]], 'Sequential')])
def test_what_is_no_module_of_the_model_is_an_error(nested, choose, name):
    with pytest.raises(ValueError, match=f'blocks must return modules of the model, not a {name}: a slice'):
        check_blocks(choose(nested), nested)
