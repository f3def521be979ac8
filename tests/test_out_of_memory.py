"Memory that ran out is recognized, and what is not needed is freed (memory/out_of_memory.py)"
import weakref

import pytest

from common import *
from fastxtend_accum.memory.out_of_memory import (NothingFits, free_memory, has_state, is_out_of_memory, n_elements,
                                                  reserve_for_step, without_tracebacks)
from limited_memory import run_out_of_memory


# What errors say

@pytest.mark.parametrize('message', [
    'CUDA out of memory',
    'cuda runtime error (2) : out of memory',
    'MPS backend out of memory',
    'Triton Error [CUDA]: out of memory',
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes",
    'DefaultCPUAllocator: not enough memory: you tried to allocate 12 bytes',
    'std::bad_alloc',
    'cuFFT error: CUFFT_ALLOC_FAILED',
    'cuDNN error: CUDNN_STATUS_NOT_SUPPORTED',
    'Unable to find a valid cuDNN algorithm to run convolution',
    'FIND was unable to find an engine to execute this computation',
    'could not execute a primitive',
    'could not create a primitive',
    'could not create a memory object'])
def test_messages_of_memory_that_ran_out(message):
    assert is_out_of_memory(RuntimeError(message))
    assert not is_out_of_memory(ValueError(message))


@pytest.mark.parametrize('message', ['CUDA error: device-side assert triggered', 'memory format', 'out of memory with a'])
def test_messages_of_other_errors(message):
    assert not is_out_of_memory(RuntimeError(message))


@pytest.mark.parametrize('error', [torch.OutOfMemoryError('CUDA'), MemoryError()])
def test_some_errors_are_known_by_their_type(error):
    assert is_out_of_memory(error)


def test_an_error_that_memory_has_caused_says_so():
    error = ValueError('in a callback')
    error.__cause__ = RuntimeError('CUDA out of memory')
    assert is_out_of_memory(error)


def test_that_nothing_fits_is_final():
    "A retry within a retry does not try again"
    error = NothingFits('CUDA out of memory')
    error.__cause__ = RuntimeError('CUDA out of memory')
    assert not is_out_of_memory(error)


# Frames of errors hold tensors

def fail(tensors):
    "Memory runs out in a frame that holds a tensor"
    held = torch.zeros(3)
    tensors.append(weakref.ref(held))
    run_out_of_memory()


def alone(tensors): fail(tensors)


def while_another_is_handled(tensors):
    try: fail(tensors)
    except RuntimeError: fail(tensors)


def caused_by_another(tensors):
    try: fail(tensors)
    except RuntimeError as error: raise RuntimeError from error


def caused_by_one_while_another_is_handled(tensors):
    try: fail(tensors)
    except RuntimeError as error: cause = error
    try: fail(tensors)
    except RuntimeError: raise RuntimeError from cause


def caused_by_a_cause(tensors):
    try: while_another_is_handled(tensors)
    except RuntimeError as error: cause = error
    try: caused_by_one_while_another_is_handled(tensors)
    except RuntimeError: raise RuntimeError from cause


@pytest.mark.parametrize('raise_error,n', [
    (alone, 1),
    (while_another_is_handled, 2),
    (caused_by_another, 1),
    (caused_by_one_while_another_is_handled, 2),
    (caused_by_a_cause, 4)])
def test_an_error_without_tracebacks_holds_no_tensor(raise_error, n):
    "The error is still there, and all those that led to it"
    tensors = []
    try: raise_error(tensors)
    except RuntimeError as error: kept = without_tracebacks(error)
    assert isinstance(kept, RuntimeError)
    assert len(tensors) == n
    assert all(o() is None for o in tensors)


def test_tensors_in_a_cycle_are_freed():
    cycle = [torch.zeros(3)]
    cycle.append(cycle)
    held = weakref.ref(cycle[0])
    del cycle
    free_memory()
    assert held() is None


def test_elements_of_a_nested_batch():
    batch = torch.zeros(4, 3), dict(a=[torch.zeros(4, 2)]), 'text', tensor(1.)
    assert n_elements(batch) == 12+8


# Room for the optimizer

def learner_with_optimizer(opt_func):
    learn = make_learner(16, opt_func=opt_func)
    learn.create_opt()
    return learn


def shapes(tensors): return [o.shape for o in tensors]


torch_adam = partial(OptimWrapper, opt=torch.optim.Adam)


@pytest.mark.parametrize('opt_func', [Adam, torch_adam])
def test_adam_gets_room_for_two_tensors_of_each_weight_until_it_has_them(opt_func):
    learn = learner_with_optimizer(opt_func)
    expected = []
    for p in learn.model.parameters(): expected += [p.shape, p.shape]
    assert shapes(reserve_for_step(learn.opt)) == expected
    fit(learn, 1)
    assert reserve_for_step(learn.opt) == []


def test_frozen_weights_need_no_room():
    learn = learner_with_optimizer(Adam)
    first_layer, last_layer = learn.model[0], learn.model[2]
    first_layer.requires_grad_(False)
    found = shapes(reserve_for_step(learn.opt))
    assert found == [last_layer.weight.shape, last_layer.weight.shape, last_layer.bias.shape, last_layer.bias.shape]


def test_a_state_of_numbers_is_no_state_of_the_size_of_a_weight():
    p = torch.zeros(3)
    assert not has_state(p, dict(step=2, t=tensor(1.)))
    assert has_state(p, dict(step=2, avg=torch.zeros(3)))


def test_where_not_even_the_room_fits_there_is_none(monkeypatch):
    monkeypatch.setattr(torch, 'empty_like', run_out_of_memory)
    assert reserve_for_step(learner_with_optimizer(Adam).opt) == []


def test_another_error_is_raised(monkeypatch):
    def raise_error(*args): raise KeyError('on purpose')
    learn = learner_with_optimizer(Adam)
    monkeypatch.setattr(torch, 'empty_like', raise_error)
    with pytest.raises(KeyError, match='on purpose'): reserve_for_step(learn.opt)
