"Memory that ran out is recognized, and what is not needed is freed (memory/out_of_memory.py)"
import weakref

import pytest

from common import *
from fastxtend_accum.memory.out_of_memory import free_memory, is_out_of_memory
from fastxtend_accum.memory.retry import try_once
from limited_memory import run_out_of_memory


# What errors say

@pytest.mark.parametrize('error', [torch.OutOfMemoryError('CUDA'), MemoryError(), *map(RuntimeError, [
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
    'could not create a memory object'])])
def test_errors_of_memory_that_ran_out(error): assert is_out_of_memory(error)


@pytest.mark.parametrize('error', [
    ValueError('CUDA out of memory'),
    RuntimeError('CUDA error: device-side assert'),
    RuntimeError('memory format'),
    RuntimeError('out of memory with a')])
def test_other_errors(error): assert not is_out_of_memory(error)


# What is not needed is freed

def fail(tensors):
    "Memory runs out in a frame that holds a tensor"
    held = torch.zeros(3)
    tensors.append(weakref.ref(held))
    run_out_of_memory()


def while_another_is_handled(tensors):
    try: fail(tensors)
    except RuntimeError: fail(tensors)


def caused_by_another(tensors):
    try: fail(tensors)
    except RuntimeError as error: raise MemoryError from error


@pytest.mark.parametrize('raise_error', [fail, while_another_is_handled, caused_by_another])
def test_an_error_that_is_reported_holds_no_tensor(raise_error):
    tensors = []
    said = try_once(lambda: raise_error(tensors))
    assert said
    assert tensors
    assert all(o() is None for o in tensors)


def test_tensors_in_a_cycle_are_freed():
    cycle = [torch.zeros(3)]
    cycle.append(cycle)
    held = weakref.ref(cycle[0])
    del cycle
    free_memory()
    assert held() is None
