"Memory that ran out is recognized, and what is not needed is freed (memory/out_of_memory.py)"
import weakref

import pytest

from common import *
from fastxtend_accum.memory.out_of_memory import NothingFits, free_memory, is_out_of_memory, without_tracebacks
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


@pytest.mark.parametrize('message', ['CUDA error: device-side assert', 'memory format', 'out of memory with a'])
def test_messages_of_other_errors(message):
    assert not is_out_of_memory(RuntimeError(message))


@pytest.mark.parametrize('error', [torch.OutOfMemoryError('CUDA'), MemoryError()])
def test_some_errors_are_known_by_their_type(error):
    assert is_out_of_memory(error)


# Errors that led to another

def fail(tensors):
    "Memory runs out in a frame that holds a tensor"
    held = torch.zeros(3)
    tensors.append(weakref.ref(held))
    run_out_of_memory()


def alone(tensors): fail(tensors)


def while_it_is_handled(tensors):
    try: fail(tensors)
    except RuntimeError: raise ValueError


def while_another_is_handled(tensors):
    try: while_it_is_handled(tensors)
    except ValueError: fail(tensors)


def caused_by_it(tensors):
    try: fail(tensors)
    except RuntimeError as error: raise ValueError from error


def caused_by_one_while_another_is_handled(tensors):
    try: fail(tensors)
    except RuntimeError as error: cause = error
    try: fail(tensors)
    except RuntimeError: raise ValueError from cause


def caused_by_a_cause(tensors):
    try: caused_by_it(tensors)
    except ValueError as error: cause = error
    raise ValueError from cause


@pytest.mark.parametrize('raise_error,n', [
    (alone, 1),
    (while_it_is_handled, 1),
    (while_another_is_handled, 2),
    (caused_by_it, 1),
    (caused_by_one_while_another_is_handled, 2),
    (caused_by_a_cause, 1)])
def test_an_error_that_memory_led_to_says_so_and_holds_no_tensor(raise_error, n):
    tensors = []
    try: raise_error(tensors)
    except Exception as error: kept = without_tracebacks(error)
    assert is_out_of_memory(kept)
    assert len(tensors) == n
    assert all(o() is None for o in tensors)


def test_errors_that_led_to_each_other():
    "Python allows a cycle. Its own functions, such as those that print a traceback, stop there"
    tensors = []
    try: while_it_is_handled(tensors)
    except ValueError as error: kept = error
    memory_error = kept.__context__
    memory_error.__cause__ = kept
    assert is_out_of_memory(kept)
    assert is_out_of_memory(memory_error)
    without_tracebacks(kept)
    assert tensors[0]() is None
    kept.__context__ = kept.__cause__ = KeyError()
    kept.__cause__.__cause__ = kept
    assert not is_out_of_memory(kept)


def test_an_exception_of_fastai_that_led_to_another_error():
    "It has an `==` that fails"
    try:
        try: raise CancelBatchException('on purpose')
        except CancelBatchException: raise ValueError
    except ValueError as error: assert not is_out_of_memory(error)


def from_none():
    try: run_out_of_memory()
    except RuntimeError: raise ValueError from None


def caused_by_a_key():
    try: run_out_of_memory()
    except RuntimeError: raise ValueError from KeyError()


def nothing_fits():
    try: run_out_of_memory()
    except RuntimeError as error: raise NothingFits from error


def handles_that_nothing_fits():
    try: nothing_fits()
    except NothingFits: raise ValueError


@pytest.mark.parametrize('raise_error', [from_none, caused_by_a_key, nothing_fits, handles_that_nothing_fits])
def test_an_error_with_another_reason_is_none_of_memory(raise_error):
    "Somebody has said so, or nothing fits: a retry within a retry does not try again"
    with pytest.raises(Exception) as error: raise_error()
    assert not is_out_of_memory(error.value)


def test_tensors_in_a_cycle_are_freed():
    cycle = [torch.zeros(3)]
    cycle.append(cycle)
    held = weakref.ref(cycle[0])
    del cycle
    free_memory()
    assert held() is None
