"Several processes against one: the same weights, and what they exchange. `workers.py` has what each process does"
import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from common import *
from fastxtend_accum.windows.processes import is_sharded, n_processes

FLOAT32 = 1e-6  # rounding of float32 losses
TESTS = Path(__file__).parent
LAUNCHERS = {'torchrun': 'torch.distributed.run', 'accelerate launch': 'accelerate.commands.launch'}


# Processes

def start(command):
    "Starts `command` with this Python"
    for program, module in LAUNCHERS.items():
        command = command.replace(program, f'{sys.executable} -m {module}')
    env = dict(os.environ, OMP_NUM_THREADS='1', PYTHONWARNINGS='ignore')
    pipe = subprocess.PIPE
    words = command.split()
    return subprocess.Popen(words, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def finish(process):
    "Returns the code, output and error of `process`, which is killed with its children when time is up"
    try: out, err = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return SimpleNamespace(code=process.returncode, out=out, err=err)


def launch(n_processes, *args):
    "Runs `workers.py` in several processes"
    words = ['torchrun --standalone --nproc-per-node', n_processes, TESTS/'workers.py', *args]
    command = ' '.join(str(o) for o in words)
    return finish(start(command))


def results_of(n_processes, folder, *args):
    "Returns what each process got, by case"
    done = launch(n_processes, folder, *args)
    assert done.code == 0, done.err[-3000:]
    res = []
    for rank in range(n_processes):
        file = folder/f'{rank}.pt'
        res.append(torch.load(file, weights_only=False))
    return res


class World:
    "What each of `n` processes got, by case"
    def __init__(self, n, results):
        self.n = n
        self.results = results

    def each(self, case): return [o[case] for o in self.results]
    def first(self, case): return self.results[0][case]

    def messages(self, case):
        "Returns gradient all-reduces as (passes so far, bytes), and the bytes of the others: the same in all processes"
        seen = [(o['buckets'], o['others']) for o in self.each(case)]
        for o in seen: assert o == seen[0]
        return seen[0]

    def assert_moved(self, case, least):
        for o in self.each(case): assert o['moved'] > least

    def assert_weights(self, case, expected, tol=ROUNDING):
        for o in self.each(case): assert_same(o['weights'], expected, tol)


@pytest.fixture(scope='module', params=[pytest.param(n, marks=pytest.mark.long) for n in (2, 3)])
def world(request, tmp_path_factory):
    n = request.param
    folder = tmp_path_factory.mktemp('processes')
    return World(n, results_of(n, folder))


# The samples of one process with the large batch

def shares(n, n_processes):
    "Returns the samples of each process; the last one may have the first ones once more"
    n_padded = n + -n%n_processes
    samples = np.arange(n_padded)%n
    return [o.tolist() for o in np.split(samples, n_processes)]


def joined(window, samples_of_each):
    "Returns the samples of a window over all processes, each of which takes these of its own"
    res = []
    for samples in samples_of_each: res += [samples[i] for i in window]
    return res


def joined_steps(steps, samples_of_each):
    return [(joined(window, samples_of_each), pct) for window, pct in steps]


def assert_as_one_process(world, case, steps, n=96, tol=ROUNDING, is_logged=True):
    "Asserts that `case` gave every process the weights and losses of one that takes these steps"
    expected, expected_losses = reference(steps, n, sgd)
    sizes = [len(samples) for samples, _ in steps] if is_logged else []
    for result in world.each(case):
        assert_same(result['weights'].double(), expected, tol)
        assert_same(result['weights'], world.first(case)['weights'])
        assert result['accum_bs'] == sizes
        assert result['grads'] == 0
        if is_logged: assert_same(result['losses'], smoothed(expected_losses), max(tol, 1e-5))  # float32
    world.assert_moved(case, 1e-2)


def growing(n_processes):
    "Returns the samples of a process in a window, by position, as the schedule of `workers.py` has them"
    size_of_all = SchedCos(4*n_processes, 16*n_processes)

    def size(pct):
        n_batches = size_of_all(pct)/(4*n_processes)
        return 4*math.floor(n_batches+.5+1e-6)
    return size


class Case:
    "Samples of all processes, samples of each that fill a window, and what becomes of the remainder"
    def __init__(self, n=96, share=16, remainder='step'):
        self.n = n
        self.share = share
        self.remainder = remainder

    def steps(self, n_processes):
        samples_of_each = shares(self.n, n_processes)
        share = self.share(n_processes) if callable(self.share) else self.share
        steps = windows(len(samples_of_each[0]), 4, share, self.remainder, 2)
        return joined_steps(steps, samples_of_each)


CASES = dict(
    constant=Case(),
    float16=Case(),
    loader_batches=Case(),
    auto=Case(),
    find_unused_parameters=Case(),
    by_hand=Case(),
    sharded=Case(),
    nonfinite=Case(),
    nonfinite_sharded=Case(),
    one_batch=Case(share=4),
    own_backward=Case(share=4),
    pieces=Case(share=4),
    scheduled=Case(share=growing, remainder='carry'),
    ragged=Case(101, 12),
    carry=Case(101, 12, 'carry'))


@pytest.mark.parametrize('case', CASES)
def test_weights_are_those_of_one_process(world, case):
    "A window with a NaN in one process has no step in any"
    steps = CASES[case].steps(world.n)
    if case.startswith('nonfinite'): del steps[1]
    tol = 1e-2 if case == 'float16' else ROUNDING
    is_logged = case != 'loader_batches'
    assert_as_one_process(world, case, steps, CASES[case].n, tol, is_logged)


def test_a_batch_that_all_cancel(world):
    samples_of_one = torch.arange(96//world.n)
    batches = [o.tolist() for o in samples_of_one.split(4)]
    del batches[1]
    left = sum(batches, [])
    samples_of_each = []
    for samples in shares(96, world.n):
        kept = [samples[i] for i in left]
        samples_of_each.append(kept)
    steps = windows(len(left), 4, 8, 'step', 2)
    assert_as_one_process(world, 'skip_before', joined_steps(steps, samples_of_each))


def test_the_position_is_the_large_batchs(world):
    "The learning rates are those of one process with the large batch, bit for bit"
    n_padded = 101 + -101%world.n
    large = fit(make_learner(12*world.n, n=n_padded), 2, method='fit_one_cycle')
    for result in world.each('one_cycle'): assert_same(result['lrs'], large.recorder.lrs)


# Memory

def adapted(world, case):
    "Returns the size of micro-batches, or the share of blocks, that each process has found"
    return [o['adapted'][0] for o in world.each(case)]


def test_each_process_finds_the_micro_batches_that_it_needs(world):
    others = [4 for _ in range(world.n-1)]
    assert adapted(world, 'auto') == [8, *others]


def test_each_process_recomputes_the_blocks_that_it_needs(world):
    first, *others = adapted(world, 'blocks')
    assert 0 < first < others[0]
    assert len(set(others)) == 1


def test_the_line_of_the_first_window_counts_processes(world):
    "The first process prints it"
    n = world.n
    line = f'{4*n} samples per step, at most 2 at a time in each of {n} processes'
    normed = f'{line}. Same as one batch, except: layers with buffers (BatchNorm1d), random numbers (dropout).'
    first, *others = world.each('lines')
    assert first == [line, normed]
    for said in others: assert said == []


@pytest.mark.parametrize('case,plain,tol', [
    ('all_blocks', 'normed', 0),
    ('blocks', 'normed', 1e-11),  # DDP adds up three gradients in another order
    ('cached', 'whole', ROUNDING)])
def test_weights_losses_and_buffers_are_those_of_whole_batches(world, case, plain, tol):
    if 'blocks' in case and world.n == 2: tol = 0
    tol_of_losses = FLOAT32 if tol else 0
    ours_of_each = world.each(case)
    whole_of_each = world.each(plain)
    for ours, whole in zip(ours_of_each, whole_of_each, strict=True):
        assert_same(ours['weights'], whole['weights'], tol)
        assert_same(ours['losses'], whole['losses'], tol_of_losses)
        buffers = zip(ours['buffers'], whole['buffers'], strict=True)
        for a, b in buffers: assert_same(a, b, tol)
    world.assert_moved(plain, 1e-2)


@pytest.mark.parametrize('case,plain', [('all_blocks', 'normed'), ('cached', 'whole')])
def test_gradients_are_exchanged_as_those_of_whole_batches(world, case, plain):
    "Unless something adapts"
    buckets, _ = world.messages(case)
    assert len(buckets) > 1
    assert buckets == world.messages(plain)[0]


# What the loss averages over

def assert_as_large_batches(world, case, m, samples, share, loss_func, tol=ROUNDING, max_norm=math.inf):
    "Asserts that every process has the weights of `m` after it has trained on windows of all processes' samples"
    inputs, targets = samples
    samples_of_each = shares(len(inputs), world.n)
    opt = sgd(m.parameters())
    for window, _ in windows(len(samples_of_each[0]), 4, share, 'step', 2):
        idxs = joined(window, samples_of_each)
        opt.zero_grad()
        loss_func(m(inputs[idxs]), targets[idxs]).backward()
        nn.utils.clip_grad_norm_(m.parameters(), max_norm)
        opt.step()
    world.assert_weights(case, weights(m), tol)
    world.assert_moved(case, 5e-3)


def test_a_loss_that_is_a_sum(world):
    def loss_func(pred, targ): return ((pred-targ)**2).sum()/64
    assert_as_large_batches(world, 'sums', model(), data(96), 16, loss_func, FLOAT32)


@pytest.mark.parametrize('case', ['tokens', 'tokens_auto'])
def test_every_label_counts_the_same(world, case):
    "With very different numbers of labels, and where one process splits"
    from workers import token_model  # which changes fastai for processes without a GPU
    def loss_func(pred, targ): return F.cross_entropy(pred.flatten(0, 1), targ.flatten())
    assert_as_large_batches(world, case, token_model(), tokens(), 8, loss_func)


def test_a_window_without_labels_has_no_step_in_any_process(world):
    "Also if one of them runs more passes"
    first = world.first('no_items')
    world.assert_weights('no_items', first['weights'], 0)
    if world.n == 2: world.assert_moved('no_items', 1e-2)  # three have only windows without labels
    assert len(first['losses']) < len(world.first('tokens_auto')['losses'])


# Gradients

def test_gradients_that_only_some_have(world):
    mean_of_ranks = (world.n-1)/2
    mean_of_one = 1/world.n
    for everywhere, once, nowhere in world.each('some_without_gradient'):
        assert_same(everywhere, [mean_of_ranks, mean_of_ranks], FLOAT32)
        assert_same(once, [mean_of_one, mean_of_one], FLOAT32)
        assert nowhere is None


def test_gradient_clip_clips_the_mean_gradient(world):
    assert_as_large_batches(world, 'clip', model(), data(96), 16, F.mse_loss, max_norm=.05)


def test_ddp_averages_again_after_an_interrupt(world):
    "In the fit, only in the last micro-batch of each window"
    for in_passes, afterwards in world.each('interrupted'):
        assert in_passes == [False, False, False, True, False, False]
        assert afterwards


# Errors

def test_what_is_refused(world):
    n = world.n
    expected = [
        f'accum_bs={6*n} (samples) is not a multiple of {4*n}, {n} processes',
        'DistributedDataParallel(static_graph=True)',
        'GradientCache cannot split the forward pass of a sharded',
        'a sharded FSDPSequential cannot adapt to memory',
        'ActivationCheckpointing cannot',
        'a sharded FSDPSequential sums gradients in the precision of the weights',
        'SyncBatchNorm waits',
        'SyncBatchNorm waits']
    for said in world.each('errors'):
        for message, beginning in zip(said, expected, strict=True): assert message.startswith(beginning)


class HasNoSync(nn.Module):
    "A wrapper of another library may have a `no_sync`, as DDP and FSDP 1 have"
    def no_sync(self): pass


def test_a_model_with_a_no_sync_trains_in_one_process():
    learn = SimpleNamespace(model=HasNoSync(), cbs=L())
    assert n_processes(learn) == 1
    assert not is_sharded(learn.model)


@pytest.mark.parametrize('kind', [FullyShardedDataParallel, FSDPModule])
def test_models_that_are_sharded_are_known_by_their_classes(kind):
    model = object.__new__(type('Model', (kind,), {}))
    assert is_sharded(model)
    assert not is_sharded(DistributedDataParallel.__new__(DistributedDataParallel))


# What the processes exchange

OTHERWISE = {'sharded', 'nonfinite', 'nonfinite_sharded', 'auto', 'loader_batches', 'own_backward'}
BY_ALL_REDUCE = {'sums', 'tokens', 'clip', 'cached', *CASES}-OTHERWISE


@pytest.mark.parametrize('case', sorted(BY_ALL_REDUCE))
def test_one_all_reduce_a_step(world, case):
    """One bucket, in the last micro-batch of a window, and 24 bytes beside it. In the first one, 8 more bytes tell the
    items of a sample, unless losses are sums"""
    buckets, others = world.messages(case)
    n_steps = len(world.first(case)['losses'])
    assert len(buckets) == n_steps > 1
    passes = {n_passes for n_passes, _ in buckets}
    sizes = {n_bytes for _, n_bytes in buckets}
    assert len(passes) == n_steps
    assert len(sizes) == 1
    in_first = [] if case == 'sums' else [8]
    assert others == [*in_first, *[24 for _ in range(n_steps)]]


# Started for a case of their own

@pytest.mark.long
def test_a_process_that_fails_ends_all():
    done = launch(2, 'folder', 'one_fails')
    assert done.code != 0
    assert 'the disk is full' in done.err


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        _, port = s.getsockname()
        return port


@pytest.mark.long
@pytest.mark.parametrize('command', [
    'torchrun --standalone --nproc-per-node 2',
    'accelerate launch --multi_gpu --num_processes 2 --main_process_port PORT'])
def test_the_example_trains_as_one_process(command):
    with_port = command.replace('PORT', str(free_port()))
    example = TESTS.parent/'examples/distributed.py'
    done = finish(start(f'{with_port} {example}'))
    assert done.code == 0, done.err[-3000:]
    assert '2 processes: 100 steps' in done.out
    assert 'the weights are equal' in done.out
    difference = re.search(r'difference of the weights: (\S+)', done.out)[1]
    assert float(difference) < 1e-6
