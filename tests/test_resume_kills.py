"Scripts that are killed and go on: each layout many times, and what the harness sees if a part of the state is missing"
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from fastai.distributed import *

from common import *
from fastxtend_accum.callback import WindowCallback
from fastxtend_accum.resuming.graph import Graph
from kill_harness import Whole, kill_at, kill_layout, named_differences, start
from resume_layouts import accum, auto, make, schedule
from resume_situations import LAYOUTS
from resumed import leave_out

# `KILLS=8` kills each layout 8 times, or more. By default, one kill has to do, of 20 layouts: others with each commit
KILLS = int(os.environ.get('KILLS', 0))
COMMIT = run(['git', '-C', str(Path(__file__).parent), 'rev-parse', 'HEAD'], ignore_ex=True)
TRIED = LAYOUTS if KILLS else random.Random(str(COMMIT)).sample(list(LAYOUTS), 20)
N_KILLS = KILLS or 1  # at least: a trial kills up to four times


REPORTS = []  # of the layouts that this process has run


def assert_mostly_in_mid_epoch():
    "Once there are enough resumes, since a kill between two epochs proves little"
    kills = sum(o.kills for o in REPORTS)
    resumes = sum(o.resumes for o in REPORTS)
    in_mid_epoch = sum(o.in_mid_epoch for o in REPORTS)
    print(f'{kills} kills in {len(REPORTS)} layouts, {in_mid_epoch} of {resumes} resumes in mid-epoch')
    assert resumes < 40 or in_mid_epoch >= .7*resumes


@pytest.mark.long
@pytest.mark.parametrize('name', TRIED)
def test_a_script_that_was_killed_ends_as_one_that_was_not(name, tmp_path):
    report = kill_layout(name, LAYOUTS[name], tmp_path, N_KILLS)
    print(report)
    REPORTS.append(report)
    assert report.differences == []
    assert report.lost == 0
    assert report.kills >= N_KILLS
    assert_mostly_in_mid_epoch()


# Mutations: each takes a part of the state away, in the process that goes on, and the verification with it

def without(is_left_out):
    return partial(leave_out, is_left_out, verifies=False)


def without_carried_batches():
    begin_at = WindowCallback.begin_epoch_at

    def begin_without(self, place):
        begin_at(self, dict(place, batches=dict(place['batches'], waiting=[])))
    WindowCallback.begin_epoch_at = begin_without


def without_beginning_of_epoch():
    "The DataLoader begins with the generators of the process that goes on"
    restore = Graph.restore

    def restore_all(self, rest, weights=None):
        if weights: restore(self, rest, weights)  # at the place where the fit was saved
    Graph.restore = restore_all


def end_of(script, whole, folder, mutate=noop):
    "Returns what differs from the whole, after the script went on in `folder`"
    def prepare():
        mutate()
        return kill_at()
    run = start(script, folder, 1000, prepare)
    if run.code: return [(folder/'error.txt').read_text()]
    return whole.differences_in(folder)


@pytest.mark.long
@pytest.mark.parametrize('mutation, name', [
    (without(lambda path, name: path.startswith('generators')), 'noisy_samples'),
    (without(lambda path, name: path.startswith('model')), 'unused_layer'),
    (without(lambda path, name: name == 'frozen_idx'), 'unfreezes'),
    (without(lambda path, name: name == 'p'), 'dropout_rises'),
    (without(lambda path, name: path == 'AvgMetric'), 'training_metrics'),
    (without(lambda path, name: path == 'Remembers'), 'plain_data_of_callback'),
    (without_carried_batches, 'carry_with_saves_between_epochs'),
    (without_beginning_of_epoch, 'torch_workers_and_carry')])
def test_the_harness_sees_what_is_missing(mutation, name, tmp_path):
    """After the same kill, nothing differs with the whole state, and something does without a part of it: at one place
    of the fit, or at the next one that is tried"""
    script = LAYOUTS[name]
    whole = Whole(script, tmp_path/'whole')
    for percent in (52, 34, 58, 70, 40, 28, 46, 64, 76):
        folder = tmp_path/f'killed-{percent}'
        folder.mkdir()
        killed = start(script, folder, 1, partial(kill_at, whole.n_events*percent//100))
        assert killed.code < 0
        mutated = tmp_path/f'mutated-{percent}'
        shutil.copytree(folder, mutated)
        assert end_of(script, whole, folder) == []
        found = end_of(script, whole, mutated, mutation)
        if found: break
    print(percent, found[:3])
    assert found != []
    assert not any('Traceback' in o for o in found)


# Two processes

def broadcast_on_cpu(self, numbers, rank):
    "fastai's goes by the GPU"
    numbers = LongTensor(numbers)
    dist.broadcast(numbers, rank)
    return numbers.tolist()


def script_of(rank, port, windows):
    "Returns what one of two processes does; their Learners share the files of a folder"
    def script():
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='2', LOCAL_WORLD_SIZE='2')
        os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), ACCELERATE_USE_CPU='true')
        DistributedDL._broadcast = broadcast_on_cpu
        dist.init_process_group('gloo')
        learn = make(windows())
        learn.path = Path('..')
        with learn.no_bar(), learn.distrib_ctx(cpu=True, sync_bn=False):
            learn.fit_one_cycle(1, .02, cbs=auto())
            learn.fit_one_cycle(2, .02, cbs=auto())
        return learn
    return script


def start_both(folder, seed, windows, killed=None, event=0, number=signal.SIGKILL):
    "Starts two processes, of which one may be `killed` by a signal at an event; returns their exit codes"
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]

    def start_one(rank):
        own = folder/f'{rank}'
        own.mkdir(parents=True, exist_ok=True)
        prepare = partial(kill_at, event, number=number) if rank == killed else kill_at
        return start(script_of(rank, port, windows), own, seed+rank, prepare).code
    with ThreadPoolExecutor(2) as threads: return list(threads.map(start_one, range(2)))


@pytest.mark.long
@pytest.mark.parametrize('windows,killed,number', [
    (partial(schedule, 8, 24), 0, signal.SIGKILL),
    (partial(schedule, 8, 24), 1, signal.SIGTERM),
    (partial(accum, 24, remainder='carry'), 1, signal.SIGKILL)])
def test_one_of_two_processes_is_killed(windows, killed, number, tmp_path):
    """In the second fit: the other process fails, both are started again, the first fit goes on at its end, and both
    processes end as those that nobody has killed"""
    assert start_both(tmp_path/'whole', 1, windows) == [0, 0]
    whole = [torch.load(tmp_path/f'whole/{rank}/result.pt', weights_only=False) for rank in range(2)]
    n_events = whole[killed]['counts'][0]
    codes = start_both(tmp_path/'killed', 1, windows, killed, n_events*6//10, number)
    assert codes[killed] == -number
    assert 0 not in codes
    assert start_both(tmp_path/'killed', 1000, windows) == [0, 0]
    for rank in range(2):
        found = torch.load(tmp_path/f'killed/{rank}/result.pt', weights_only=False)
        assert int((tmp_path/f'killed/{rank}/first_batch.txt').read_text()) > 0
        assert named_differences(whole[rank]['results'], found['results']) == []


@pytest.mark.long
def test_each_process_finds_that_the_file_is_damaged(tmp_path):
    "None waits for the others"
    start_both(tmp_path, 1, accum, killed=1, event=100)
    for path in tmp_path.glob('models/resume/*.pth'): path.write_bytes(path.read_bytes()[:-100])
    assert start_both(tmp_path, 1000, accum) == [1, 1]
    for rank in range(2): assert 'is damaged' in (tmp_path/f'{rank}/error.txt').read_text()
