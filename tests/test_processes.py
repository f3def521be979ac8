"Several processes against one: the same weights, and what they exchange. `workers.py` has what each process does"
import os, re, signal, socket, subprocess, sys

import pytest

from common import *
from fastxtend_accum.windows.processes import Processes

here = Path(__file__).parent
launchers = {'torchrun':'torch.distributed.run', 'accelerate launch':'accelerate.commands.launch'}

def start(command):
    "Start `command` with this Python"
    for program,module in launchers.items(): command = command.replace(program, f'{sys.executable} -m {module}')
    env = dict(os.environ, OMP_NUM_THREADS='1', PYTHONWARNINGS='ignore')
    pipe = subprocess.PIPE
    return subprocess.Popen(command.split(), env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)

def finish(process):
    "Return code, output and error of `process`, which is killed with its children when time is up"
    try: out,err = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode,out,err

def launch(n, *args):
    "Run `workers.py` in `n` processes"
    return finish(start(' '.join(map(str, ['torchrun --standalone --nproc-per-node', n, here/'workers.py', *args]))))

@pytest.fixture(scope='module', params=[2, pytest.param(3, marks=pytest.mark.long)])
def world(request, tmp_path_factory):
    "How many processes, and what each of them got in each case"
    n,folder = request.param,tmp_path_factory.mktemp('processes')
    code,_,err = launch(n, folder)
    assert code == 0, err[-3000:]
    return n,[torch.load(folder/f'{rank}.pt', weights_only=False) for rank in range(n)]

def shares(n, n_proc):
    "The samples of each process; the last one may have the first ones once more"
    return [o.tolist() for o in np.split(np.arange(n + -n%n_proc)%n, n_proc)]

def join(steps, of): return [([share[i] for share in of for i in idxs],pct) for idxs,pct in steps]

def check(world, name, steps, n=96, tol=ROUNDING, skipped=(), logged=True):
    "Case `name` gave every process the weights and losses of one that steps on `steps`"
    results = [o[name] for o in world[1]]
    expected,expected_losses = reference(steps, n, sgd, skipped=skipped)
    for res in results:
        assert_same(res['weights'].double(), expected, tol)
        assert_same(res['weights'], results[0]['weights'])
        assert res['accum_bs'] == [len(idxs) for idxs,_ in steps]*logged and res['grads'] == 0
        if logged: assert_same(res['losses'], smoothed(expected_losses), max(tol, 1e-5))  # float32 losses
        assert res['moved'] > 1e-2

def messages(world, name):
    "Gradient all-reduces as (passes so far, bytes), and the bytes of the others: the same in all processes"
    results = [(o[name]['buckets'],o[name]['others']) for o in world[1]]
    assert all(o == results[0] for o in results)
    return results[0]

def schedule(n): return lambda pct: math.floor(SchedCos(4*n, 16*n)(pct)/(4*n) + .5 + 1e-6)*4

# By case: samples of all processes, samples of each that fill a window, remainder
cases = dict.fromkeys('constant float16 loader_batches auto auto_later find_unused_parameters bucket_view '
                      'by_hand sharded nonfinite nonfinite_sharded'.split(), (96, 16, 'step'))
cases |= dict(one_batch=(96, 4, 'step'), scheduled=(96, schedule, 'carry'), skip_step=(96, 8, 'step'),
              ragged=(101, 12, 'step'), ragged_split=(101, 12, 'step'), drop=(101, 12, 'drop'),
              carry=(101, 12, 'carry'))

@pytest.mark.parametrize('name', cases)
def test_weights_are_those_of_one_process(world, name):
    "A window with a NaN in one process has no step in any; one whose step is cancelled is logged"
    (n,share,remainder),of = cases[name],shares(cases[name][0], world[0])
    steps = windows(len(of[0]), 4, share(world[0]) if callable(share) else share, remainder, 2)
    assert name != 'scheduled' or {len(idxs) for idxs,_ in steps} >= {4, 8, 12}
    if 'nonfinite' in name: del steps[1]
    tol,skipped = 1e-2 if name == 'float16' else ROUNDING,(0, len(steps)//2)*(name == 'skip_step')
    check(world, name, join(steps, of), n, tol, skipped, name != 'loader_batches')

@pytest.mark.parametrize('name,nth,share', [('skip_before', 1, 8), ('skip_last', -1, 16)])
def test_a_batch_that_all_cancel(world, name, nth, share):
    "In mid-epoch, or the last one, which would have averaged the gradients"
    n,of = world[0],shares(96, world[0])
    left = [*range(96//n)]
    del left[4*nth:4*nth+4 or None]
    steps = windows(len(left), 4, share, 'step', 2)
    check(world, name, join([([left[i] for i in idxs],pct) for idxs,pct in steps], of))

def test_the_position_is_the_large_batchs(world):
    "The learning rates are those of one process with the large batch, bit for bit"
    n,results = world
    big = fit(make_learner(12*n, n=101 + -101%n), 2, method='fit_one_cycle')
    for res in results: assert_same(res['one_cycle']['lrs'], big.recorder.lrs)

def test_each_process_takes_what_it_needs(world):
    "In micro-batches, or in blocks, from the first batch on or later"
    n,results = world
    def adapted(name): return [o[name]['adapted'][0] for o in results]
    assert adapted('auto') == adapted('cached_auto') == [8] + [4]*(n-1)
    assert adapted('auto_later') == [16]*(n-1) + [4]
    blocks,later = adapted('blocks'),adapted('blocks_later')
    assert 0 < blocks[0] < blocks[1] == blocks[-1] and later[:-1] == [0]*(n-1) and later[-1] > 0

def test_the_line_of_the_first_window_counts_processes(world):
    n,(first,*others) = world
    line = f'{4*n} = {n} processes x 2 x 2 samples'
    differs = 'BatchNorm1d (2 layers) sees 2 samples at a time; dropout draws different random numbers'
    normed = f'{line}. As in one batch of {4*n}, except: {differs}.'
    assert first['lines'] == [line, f'{normed} ActivationCheckpointing() avoids this.']
    assert first['lines_sharded'] == [line, normed]
    assert all(o['lines'] == o['lines_sharded'] == [] for o in others)

@pytest.mark.parametrize('name,plain,tol', [
    ('all_blocks', 'normed', 0), ('blocks', 'normed', 1e-11), ('blocks_later', 'normed', 1e-11),
    ('synced_blocks', 'synced', 0), ('cached', 'whole', ROUNDING), ('cached_auto', 'whole', ROUNDING),
    ('carries_split', 'carries', ROUNDING), ('carries_cached', 'carries', ROUNDING)])
def test_the_plain_fit(world, name, plain, tol):
    "Weights, losses and buffers are those of whole batches; the messages, too, unless something adapts"
    n,results = world
    if 'blocks' in name and n == 2: tol = 0  # DDP adds up three gradients in another order
    for res in results:
        ours,whole = res[name],res[plain]
        assert_same(ours['weights'], whole['weights'], tol)
        assert_same(ours['losses'], whole['losses'], tol and 1e-6)
        for a,b in zip(ours['buffers'], whole['buffers'], strict=True): assert_same(a, b, tol)
        assert whole['moved'] > 1e-2 and (res['forgets']['weights']-res['carries']['weights']).abs().max() > 1e-4
    if name in ('all_blocks','cached'): assert messages(world, name)[0] == messages(world, plain)[0] != []

@pytest.mark.parametrize('name', ['sums','tokens','tokens_weighted','tokens_auto'])
def test_every_item_counts_the_same(world, name):
    "With very different numbers of labels, class weights, losses that are sums, and where one process splits"
    n,results = world
    if name == 'sums': m,(x,y),share = model(),data(96),16
    else:
        from workers import token_model
        m,(x,y),share = token_model(),tokens(),8
    weight = tensor([1., 2., 3., .5]).double() if name == 'tokens_weighted' else None
    def loss_func(pred, targ):
        if name == 'sums': return ((pred-targ)**2).sum()/64
        return F.cross_entropy(pred.flatten(0, 1), targ.flatten(), weight)
    opt,of = sgd(m.parameters()),shares(len(x), n)
    for idxs,_ in join(windows(len(of[0]), 4, share, 'step', 2), of):
        opt.zero_grad()
        loss_func(m(x[idxs]), y[idxs]).backward()
        opt.step()
    for res in results:
        assert_same(res[name]['weights'], weights(m), 1e-6 if name == 'sums' else ROUNDING)  # its loss is float32
        assert res[name]['moved'] > 5e-3

def test_gradients_that_only_some_have(world):
    n,results = world
    for everywhere,once,nowhere in (res['some_without_gradient'] for res in results):
        assert_same(everywhere, [(n-1)/2]*2, 1e-6)
        assert_same(once, [1/n]*2, 1e-6)
        assert nowhere is None

@pytest.mark.parametrize('name', ['clip','norm','norm_synced'])
def test_gradient_clip_and_norms(world, name):
    "Clipped is the mean gradient; a SyncBatchNorm sees the micro-batches of all processes, another norm its own"
    n,results = world
    from workers import norm_model
    class Norm(nn.Module):
        def forward(self, x): return (x-x.mean(0))/(x.var(0, unbiased=False)+1e-5).sqrt()
    m,(x,y),of = model() if name == 'clip' else norm_model(Norm()),data(96),shares(96, n)
    opt = sgd(m.parameters())
    for idxs,_ in windows(96//n, 4, 16, 'step', 2):
        opt.zero_grad()
        for i in range(0, len(idxs), 4):
            batches = [[share[j] for j in idxs[i:i+4]] for share in of]
            for o in batches if name == 'norm' else [sum(batches, [])]:
                (((m(x[o])-y[o])**2).sum()/len(idxs)/n).backward()
        if name == 'clip': nn.utils.clip_grad_norm_(m.parameters(), .05)
        opt.step()
    for res in results: assert_same(res[name]['weights'], weights(m), ROUNDING)
    assert results[0][name]['moved'] > 5e-3

@pytest.mark.parametrize('name,share', [('bfloat16', 16), ('bfloat16_one_batch', 4)])
def test_bfloat16_weights(world, name, share):
    "The float32 sums of all processes, rounded once; DDP averages single batches. Sums of three have an order"
    n,results = world
    m,(x,y),of = model().bfloat16(),(o.bfloat16() for o in data(96)),shares(96, n)
    opt = sgd(m.parameters())
    for idxs,_ in windows(96//n, 4, share, 'step', 2):
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in m.parameters()]
        for micro in [[s[j] for j in idxs[i:i+4]] for s in of for i in range(0, len(idxs), 4)]:
            opt.zero_grad()
            F.mse_loss(m(x[micro]).float(), y[micro].float()).backward()
            for s,p in zip(sums, m.parameters()): s += p.grad
        for s,p in zip(sums, m.parameters()): p.grad = (s/(len(idxs)//4*n)).bfloat16()
        opt.step()
    for res in results:
        assert_same(res[name]['weights'], results[0][name]['weights'])
        assert_same(res[name]['weights'].double(), weights(m).double(), 0. if n == 2 and share == 16 else .01)
        assert res[name]['moved'] > 5e-3
    assert len(messages(world, name)[0]) == len(results[0][name]['accum_bs'])*(share == 4)

def test_512_bfloat16_gradients_of_1(world):
    for res in world[1]: assert res['ones'] == [-1., -1.]

def test_ddp_averages_again_after_an_interrupt(world):
    "In the fit, only in the last micro-batch of each window"
    for res in world[1]: assert res['interrupted'] == ([False, False, False, True, False, False], True)

def test_what_is_refused(world):
    n,results = world
    for res in results:
        *said,synced,synced_auto = res['errors']
        for o,expected in zip(said, [
            f'accum_bs=4 counts samples, and is not a multiple of {4*n}, {n} processes', f'final_accum_bs={4*n+4} co',
            'static_graph=True averages', 'GradientCache cannot split the forward pass of a sharded',
            'a sharded FSDPSequential cannot adapt to memory', 'ActivationCheckpointing cannot run parts of a sharded'],
            strict=True): assert o.startswith(expected)
        assert f'use {4*n} or {8*n}' in said[1] and synced == synced_auto and 'SyncBatchNorm waits' in synced

def test_what_cannot_average_or_sum_in_half_precision():
    "FSDP 1 has a `no_sync`, as DDP has"
    class FullyShardedDataParallel(nn.Module):
        def no_sync(self): pass
    def check(m, has_half):
        learn = SimpleNamespace(model=m)
        processes = SimpleNamespace(learn=learn, n=2, passes_are_local=False)
        Processes.check_model(processes, has_half)
    with pytest.raises(ValueError, match='FullyShardedDataParallel sums gradients in the precision of the weights'):
        check(FullyShardedDataParallel(), True)
    check(FullyShardedDataParallel(), False)
    with pytest.raises(ValueError, match='a Sequential that does not average its gradients'): check(model(), False)

apart = {'sharded','nonfinite','nonfinite_sharded','auto','auto_later','loader_batches'}

@pytest.mark.parametrize('name', sorted(cases.keys()-apart | {'sums','tokens','clip','cached'}))
def test_one_all_reduce_a_step(world, name):
    "One bucket, in the last micro-batch of a window; 24 bytes beside it, and 8 bytes once, for the unit"
    buckets,others = messages(world, name)
    n_steps = len(world[1][0][name]['losses'])
    assert len(buckets) == n_steps > 1
    assert len({passes for passes,_ in buckets}) == n_steps and len({n_bytes for _,n_bytes in buckets}) == 1
    assert others == [8]*(name != 'sums') + [24]*n_steps

@pytest.mark.long
def test_a_process_that_fails_ends_all():
    code,_,err = launch(2, 'folder', 'one_fails')
    assert code != 0 and 'the disk is full' in err

@pytest.mark.long
@pytest.mark.parametrize('name', ['no_items','validation'])
def test_one_process_that_runs_more_passes(name, tmp_path):
    "They agree on the unit of a window without labels, and on buffers in validation"
    code,_,err = launch(2, tmp_path, name)
    assert code == 0, err[-3000:]
    a,b = (torch.load(tmp_path/f'{rank}.pt', weights_only=False)[name] for rank in range(2))
    if name == 'no_items':
        assert_same(a['weights'], b['weights'])
        assert a['moved'] > 1e-2
    else: assert_same(a, b)

def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

accelerate = 'accelerate launch --multi_gpu --num_processes 2 --main_process_port PORT'
machine = f'{accelerate} --num_machines 2 --main_process_ip 127.0.0.1 --machine_rank'

@pytest.mark.long
@pytest.mark.parametrize('commands', [['torchrun --standalone --nproc-per-node 2'], [accelerate],
                                      [f'{machine} 0', f'{machine} 1']])
def test_example(commands):
    port = str(free_port())
    started = [start(f'{o} {here.parent}/examples/distributed.py'.replace('PORT', port)) for o in commands]
    done = [finish(o) for o in started]
    assert not any(code for code,_,_ in done), done[0][2][-3000:]
    out = done[0][1]
    assert '2 processes: 100 steps' in out and 'the weights are equal' in out
    assert float(re.search(r'difference of the weights: (\S+)', out)[1]) < 1e-6
