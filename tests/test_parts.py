"Attributes and content of objects"
import pytest

from common import *
from fastxtend_accum.resuming.parts import attributes_of, content_of, hooks_of, set_content

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


def test_a_variable_of_a_closure_goes_back():
    n = None
    def count(): return n
    cell, = count.__closure__
    before = content_of(cell)
    n = 1
    set_content(cell, before)
    assert count() is None
    del n
    assert content_of(cell) is None


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


def test_the_file_systems_of_a_stream_are_no_part():
    "Each process of Hugging Face's datasets makes its own, with a token"
    stream = type('IterableDataset', (), {})()
    system = type('FileSystem', (), dict(__module__='fsspec.spec'))()
    vars(stream).update(epoch=1, fs=system, _IterableDataset__hffs_cache={})
    assert attributes_of(stream) == dict(epoch=1)


def test_hooks_of_all_kinds_are_found():
    layer = nn.Linear(1, 1)
    for kind in ('forward_pre', 'forward', 'full_backward_pre', 'full_backward'):
        getattr(layer, f'register_{kind}_hook')(noop)
    layer.weight.register_post_accumulate_grad_hook(noop)
    assert sum(len(o) for o in hooks_of(layer)+hooks_of(layer.weight) if o) == 5
