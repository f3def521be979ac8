"Attributes that are replaced for a while, such as the forward pass of a module (memory/override.py)"
import pytest

from common import *
from fastxtend_accum.memory.override import override_attr


class Config:
    size = 1  # of the class


@pytest.mark.parametrize('before', [{}, dict(size=2), dict(size=None)])
def test_an_object_has_what_it_had_after_the_context(before):
    "An attribute that only its class has is removed. Contexts may be nested"
    config = Config()
    vars(config).update(before)
    with override_attr(config, 'size', 3):
        with override_attr(config, 'size', 4): assert config.size == 4
        assert config.size == 3
    assert vars(config) == before


def test_an_exception_leaves_nothing_behind():
    config = Config()
    with pytest.raises(KeyboardInterrupt), override_attr(config, 'size', 3): raise KeyboardInterrupt
    assert vars(config) == {}


def test_hooks_see_the_arguments_and_the_output_of_another_forward_pass():
    layer = nn.Linear(2, 2)
    seen = []

    def note(m, args, output): seen.append((args, output))
    def forward(x, scale=1): return x*scale
    layer.register_forward_hook(note)
    with override_attr(layer, 'forward', forward): assert layer(3, scale=2) == 6
    assert seen == [((3,), 6)]
    assert layer(torch.zeros(1, 2)).shape == (1, 2)
