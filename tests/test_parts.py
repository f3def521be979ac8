"Attributes and content of objects"
import pytest

from common import *
from fastxtend_accum.resuming.parts import content_of, set_attribute, set_content

GENERATORS = {
    'python': (random.Random, lambda o: o.random()),
    'numpy': (np.random.default_rng, lambda o: o.random()),
    'legacy numpy': (np.random.RandomState, lambda o: o.rand()),
    'torch': (torch.Generator, lambda o: torch.rand([], generator=o))}


@pytest.mark.parametrize('name', GENERATORS)
def test_a_generator_goes_back(name):
    make, draw = GENERATORS[name]
    generator = make()
    before = content_of(generator)
    drawn = draw(generator)
    assert draw(generator) != drawn
    set_content(generator, before)
    assert draw(generator) == drawn


def test_a_callback_gets_a_list_of_its_own():
    "The list that the script passed to it stays as it was"
    passed = [1]
    cb = SimpleNamespace(seen=passed)
    set_attribute(cb, 'seen', [1, 2])
    assert cb.seen == [1, 2]
    assert passed == [1]


@pytest.mark.parametrize('grad', [None, torch.zeros(2), torch.ones(2)])
def test_a_weight_gets_its_values_and_its_gradient(grad):
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(3))
    weight.grad = grad
    weight.requires_grad_(False)
    set_content(other, content_of(weight))
    assert torch.equal(other, weight)
    assert not other.requires_grad
    if grad is None: assert other.grad is None
    else: assert torch.equal(other.grad, grad)
