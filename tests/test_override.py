"Attributes that are replaced for a while, such as the forward pass of a module (memory/override.py)"
import pickle
from copy import deepcopy

import pytest

from common import *
from fastxtend_accum.memory.override import ForwardOverride, override_attr, override_forward


class Config:
    size = 1  # of the class


def test_an_attribute_is_as_before_after_the_context():
    config = Config()
    config.size = 2
    with override_attr(config, 'size', 3): assert config.size == 3
    assert vars(config) == dict(size=2)


def test_an_attribute_that_only_the_class_had_is_removed():
    config = Config()
    with override_attr(config, 'size', 3): assert config.size == 3
    assert vars(config) == {}
    assert config.size == 1


def test_contexts_of_one_attribute_may_be_nested():
    config = Config()
    with override_attr(config, 'size', 3):
        with override_attr(config, 'size', 4): assert config.size == 4
        assert config.size == 3
    assert vars(config) == {}


@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt, CancelFitException])
def test_an_exception_leaves_nothing_behind(error):
    config = Config()
    with pytest.raises(error), override_attr(config, 'size', 3): raise error
    assert vars(config) == {}


def test_a_module_runs_another_forward_pass():
    "Its hooks see the arguments and the output of that"
    layer = nn.Linear(2, 2)
    seen = []
    layer.register_forward_hook(lambda m, args, output: seen.append((args, output)))

    def forward(x, scale=1): return x*scale
    with override_forward(layer, forward): assert layer(3, scale=2) == 6
    assert seen == [((3,), 6)]
    assert 'forward' not in vars(layer)
    assert layer(torch.zeros(1, 2)).shape == (1, 2)


def copied(m): return deepcopy(m)
def pickled(m): return pickle.loads(pickle.dumps(m))
def copied_in_a_model(m): return deepcopy(nn.Sequential(m))[0]


@pytest.mark.parametrize('make_copy', [copied, pickled, copied_in_a_model])
def test_a_copy_made_in_the_context_has_the_forward_pass_of_its_class(make_copy):
    "It does not refer to the module that it was copied from"
    layer = nn.Linear(2, 1)

    def forward(x): return 'replaced'
    with override_forward(layer, forward):
        other = make_copy(layer)
        assert layer(None) == 'replaced'
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    assert not isinstance(other.forward, ForwardOverride)
    assert other(torch.ones(1, 2)).item() != 0
    assert not any(o is layer for o in other.forward.__self__.modules())
