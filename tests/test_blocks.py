"Which parts of a model are its blocks: those that are found, and those that a user names"
from collections import Counter

import pytest
import timm
from fastai.text.all import AWD_LSTM
from fastai.text.all import awd_lstm_lm_config
from fastai.text.all import get_language_model
from fastai.vision.all import DynamicUnet
from fastai.vision.all import create_vision_model
from fastai.vision.all import resnet18
from torch.nn.utils.parametrizations import weight_norm
from torchvision.models import vgg11

from common import *
from fastxtend_accum.memory.blocks import check_blocks
from fastxtend_accum.memory.blocks import find_blocks
from fastxtend_accum.memory.blocks import grouped
from fastxtend_accum.memory.blocks import n_layers


def kinds_of_blocks(m):
    "Returns the class names of the blocks of `m`, which are separate, and have no weights but those of `m`"
    blocks, _ = find_blocks(m)
    inside = []
    for block in blocks: inside += block.modules()
    assert len(inside) == len(set(inside)), 'a block is inside of another'
    own = set(m.parameters())
    for block in blocks: assert own.issuperset(block.parameters())
    return [type(block).__name__ for block in blocks]


def count_kinds(make, *args, **kwargs):
    "Counts the blocks of the model that `make` makes, without memory for its weights, by class"
    with torch.device('meta'): m = make(*args, **kwargs)
    return Counter(kinds_of_blocks(m))


# Small models

def two_layers():
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))


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


def test_a_module_that_occurs_twice_is_one_block():
    shared = two_layers()
    blocks, _ = find_blocks(nn.Sequential(shared, shared, nn.Linear(5, 1)))
    assert blocks == [shared]


def test_a_layer_has_a_matrix_of_its_own():
    m = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Conv2d(3, 4, 1))
    assert n_layers(m) == 2


def test_a_single_layer_has_no_blocks():
    assert not kinds_of_blocks(nn.Linear(5, 1))


# Models of libraries

def test_a_resnet_has_its_residual_blocks_between_stem_and_head():
    assert count_kinds(create_vision_model, resnet18, 3, pretrained=False) == dict(BasicBlock=8, Sequential=2)


def test_a_long_list_of_layers_is_taken_apart():
    assert sum(count_kinds(vgg11).values()) == 8+2  # convolutions, linear layers; the last of these keeps nothing


def test_a_unet_has_the_blocks_of_its_decoder():
    encoder = create_vision_model(resnet18, 3, pretrained=False)[0]
    kinds = kinds_of_blocks(DynamicUnet(encoder, 3, (32, 32)))
    assert kinds.count('UnetBlock') == 4
    assert kinds[-3:] == ['PixelShuffle_ICNR', 'ResBlock', 'ConvLayer']


def test_a_language_model_has_a_block_for_each_layer_and_for_its_decoder():
    config = awd_lstm_lm_config | dict(emb_sz=8, n_hid=12, n_layers=3)
    assert count_kinds(get_language_model, AWD_LSTM, 20, config) == dict(WeightDropout=3, LinearDecoder=1)


def test_a_transformer_has_its_layers():
    from transformers import BertConfig
    from transformers import BertModel
    config = BertConfig(num_hidden_layers=3, hidden_size=24, num_attention_heads=2, intermediate_size=32)
    assert count_kinds(BertModel, config) == dict(BertLayer=3)


@pytest.mark.parametrize('name,kind,n', [
    ('convnext_atto', 'ConvNeXtBlock', 2+2+6+2),
    ('vit_tiny_patch16_224', 'Block', 12),
    ('densenet121', 'DenseLayer', 6+12+24+16)])
def test_stages_of_timm_are_taken_apart(name, kind, n):
    assert count_kinds(timm.create_model, name)[kind] == n


def test_a_stage_with_a_single_block_is_a_block():
    assert count_kinds(timm.create_model, 'regnetx_002') == dict(RegStage=2, Bottleneck=11)


def test_modules_of_several_classes_are_blocks():
    counts = count_kinds(timm.create_model, 'inception_v3')
    assert counts == dict(InceptionA=3, InceptionB=1, InceptionC=4, InceptionD=1, InceptionE=2)


def test_a_list_that_is_never_called_is_no_block():
    "As those of the branches of an HRNet"
    counts = count_kinds(timm.create_model, 'hrnet_w18_small')
    assert counts
    assert 'ModuleList' not in counts


# Blocks that a user names

@pytest.fixture
def nested():
    return nn.Sequential(two_layers(), two_layers(), nn.Linear(5, 1))


def test_a_list_means_its_children(nested):
    first_layer, second_layer = nested[0]
    assert check_blocks(nested[0], nested) == [first_layer, second_layer]
    named = nn.ModuleDict(dict(body=nested[0], head=nested[2]))
    assert check_blocks(named, nested) == [nested[0], nested[2]]


def test_an_iterator_may_name_blocks_more_than_once(nested):
    body, _, head = nested
    assert check_blocks(iter([body, head, body]), nested) == [body, head]


def test_a_single_module_is_one_block(nested):
    assert check_blocks(nested[2], nested) == [nested[2]]


@pytest.mark.parametrize('choose,name', [
    (lambda m: None, 'NoneType'),
    (lambda m: [1], 'int'),
    (lambda m: [m[0], []], 'list'),  # it has no hash
    (lambda m: [m[0], {}], 'dict'),
    (lambda m: [nn.Linear(1, 1)], 'Linear'),
    (lambda m: [m[0], m[0][0]], 'Sequential'),
    (lambda m: [m[:2]], 'Sequential')])
def test_what_is_not_a_list_of_separate_modules_of_the_model_is_an_error(nested, choose, name):
    with pytest.raises(ValueError, match=f'modules of the model, none inside another, not {name}: as lambda m'):
        check_blocks(choose(nested), nested)
