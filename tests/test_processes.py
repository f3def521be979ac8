"Several processes against one: the same weights, and what they tell each other. `workers.py` has what each process does"
import json, os, re, signal, socket, subprocess, sys

import pytest

from common import *
from fastxtend_accum.window.processes import check_wrapped

here = Path(__file__).parent
launchers = {'torchrun':'torch.distributed.run', 'accelerate launch':'accelerate.commands.launch'}  # the modules behind the programs

def start(command):
    "Start `command`, words with spaces between them, with this Python"
    for program,module in launchers.items(): command = command.replace(program, f'{sys.executable} -m {module}')
    env = dict(os.environ, OMP_NUM_THREADS='1', PYTHONWARNINGS='ignore')
    return subprocess.Popen(command.split(), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)

def finish(process):
    "Return code, standard output and error of what `start` started; kills it with all that it started when time is up"
    try: out,err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode,out,err

def launch(n, *args):
    "Run `workers.py` in `n` processes on this machine"
    return finish(start(' '.join([f'torchrun --standalone --nproc-per-node {n} {here}/workers.py', *map(str, args)])))

@pytest.fixture(scope='module', params=[2, pytest.param(3, marks=pytest.mark.long)])
def world(request, tmp_path_factory):
    "How many processes, and what each of them got in each case"
    n,folder = request.param,tmp_path_factory.mktemp('processes')
    code,_,err = launch(n, folder)
    assert code == 0, err[-3000:]
    return n,[torch.load(folder/f'{rank}.pt', weights_only=False) for rank in range(n)]

def dealt(n, n_proc):
    "The samples of each process: contiguous shares, the first samples once more if they would not be equal"
    idxs = list(range(n + -n % n_proc))
    share = len(idxs)//n_proc
    return [[i % n for i in idxs[rank*share:(rank+1)*share]] for rank in range(n_proc)]

def together(steps, shares): return [([share[i] for share in shares for i in idxs],pct) for idxs,pct in steps]

def adam(params): return torch.optim.Adam(params, lr=0.1, betas=(0.9, 0.99), eps=1e-5)  # fastai's, without weight decay

# Case: samples, samples that fill a share, remainder, tolerance
plain = dict(constant=(96, 16, 'step'), float32=(96, 16, 'step'), adam=(96, 16, 'step'), ragged=(101, 12, 'step'), carry=(101, 12, 'carry'),
             drop=(101, 12, 'drop'), one_micro_batch=(96, 4, 'step'), pieces=(96, 16, 'step'), auto=(96, 16, 'step'), auto_later=(96, 16, 'step'), ragged_pieces=(101, 12, 'step'), static_graph=(96, 16, 'step'), float16=(96, 16, 'step'),
             find_unused_parameters=(96, 16, 'step'), gradient_as_bucket_view=(96, 16, 'step'), by_hand=(96, 16, 'step'), sharded=(96, 16, 'step'))
tolerances = dict(float32=1e-6, float16=1e-2)

def check(world, name, steps, n=96, tol=ROUNDING, make_opt=sgd, skipped=()):
    "Case `name` gave every process the weights and the losses of one process that steps on `steps`"
    results = [o[name] for o in world[1]]
    expected,expected_losses = reference(steps, n, make_opt, skipped=skipped)
    for res in results:
        assert_same(res['weights'].double(), expected, tol)
        assert_same(res['weights'], results[0]['weights'])
        assert res['accum_bs'] == [len(idxs) for idxs,_ in steps]
        assert_same(res['losses'], smoothed(expected_losses), max(tol, 1e-5))  # float32 losses
        assert res['grads'] == 0
    assert (expected-weights(model())).abs().max() > 1e-2

def messages(world, name):
    "Gradient all-reduces as (micro-batch, bytes), and the bytes of the others: the same in all processes"
    results = [(o[name]['buckets'],o[name]['scalars']) for o in world[1]]
    assert all(o == results[0] for o in results)
    return results[0]

@pytest.mark.parametrize('name', plain)
def test_weights_are_those_of_one_process(world, name):
    n,share,remainder = plain[name]
    shares = dealt(n, world[0])
    steps = together(windows(len(shares[0]), 4, share, remainder, 2), shares)
    check(world, name, steps, n, tolerances.get(name, ROUNDING), adam if name == 'adam' else sgd)

def test_the_position_is_the_large_batchs(world):
    "The learning rates are those of one process with the large batch, bit for bit; the samples are rounded up to equal shares"
    n,results = world
    big = fit(make_learner(12*n, n=101 + -101 % n), 2, method='fit_one_cycle')
    for res in results: assert_same(res['one_cycle']['lrs'], big.recorder.lrs)

def test_the_smallest_size_that_fits(world):
    "Process 0 could train on 8 samples at a time, the others on 4"
    for res in world[1]: assert res['auto']['micro_bs'] == 4

def test_the_line_of_the_first_step_counts_processes(world):
    n,results = world
    averaged = '; losses are averaged as in one batch'
    assert results[0]['verdicts'] == [
        f'{16*n} = {n} processes x 4 x 4 samples{averaged}', f'{4*n} = {n} processes x 1 x 4 samples; statistics are of 4 at a time in 2 BatchNorm1d; random numbers differ',
        f'{4*n} = {n} processes x 2 x 2 samples{averaged}; statistics are of 2 at a time in 2 BatchNorm1d; random numbers differ; exact=True avoids this']
    halves = f'{4*n} = {n} processes x 2 x 2 samples{averaged}'
    assert results[0]['verdicts_sharded'] == [halves, f'{halves}; statistics are of 2 at a time in 2 BatchNorm1d; random numbers differ']
    assert all(res[o] == [] for res in results[1:] for o in ('verdicts','verdicts_sharded'))

@pytest.mark.parametrize('name,plain', [('exact','whole_normed'), ('exact_later','whole_normed'), ('blocks_alone','whole_normed'), ('synced_exact','synced_whole')])
def test_recomputed_blocks_where_memory_runs_out_in_one_process(world, name, plain):
    "From the first batch on, or later; the weights and buffers of the plain fit, and as many blocks in each process"
    n,results = world
    for res in results:
        ours,whole = res[name],res[plain]
        tol,tol32 = (0., 0.) if n == 2 else (1e-11, 1e-6)  # DDP adds up three gradients in another order
        assert_same(ours['weights'], whole['weights'], tol)
        assert_same(ours['losses'], whole['losses'], tol32)
        for a,b in zip(ours.get('buffers', ()), whole.get('buffers', ()), strict=True): assert_same(a, b, tol)
        if name != 'exact_later': assert ours['blocks'] == results[0][name]['blocks'] > 0

def test_memory_for_micro_batches_that_runs_out_later_in_one_process(world):
    for res in world[1]: assert res['auto_later']['micro_bs'] == 4

def test_a_loss_over_the_batch_of_each_process(world):
    "In pieces it is what it is at once, with one set of buckets a step"
    n,results = world
    for res in results:
        assert_same(res['gradient_cache']['weights'], res['whole_batch']['weights'], ROUNDING)
        assert_same(res['gradient_cache']['losses'], res['whole_batch']['losses'], 1e-6)
        assert (res['whole_batch']['weights']-weights(model())).abs().max() > 1e-2
        assert 'cannot split the forward pass of a sharded' in res['gradient_cache_sharded']
    (cached,_),(whole,_) = (messages(world, o) for o in ('gradient_cache', 'whole_batch'))
    assert cached == whole and len(cached) == len(results[0]['gradient_cache']['losses']) > 3

def test_a_hidden_state(world):
    "Each row of each process keeps its own"
    for res in world[1]:
        for name in 'carries_pieces','carries_cache':
            assert_same(res[name]['weights'], res['carries_whole']['weights'], ROUNDING)
            assert_same(res[name]['losses'], res['carries_whole']['losses'], 1e-6)
        assert (res['forgets']['weights']-res['carries_whole']['weights']).abs().max() > 1e-4

def test_checkpointing(world):
    "Weights and buffers are those of the plain fit in each process, bit for bit, with as many messages"
    n,results = world
    for res in results:
        ours,plain = res['checkpointed'],res['whole_normed']
        assert_same(ours['weights'], plain['weights'])
        assert_same(ours['losses'], plain['losses'])
        for a,b in zip(ours['buffers'], plain['buffers'], strict=True): assert_same(a, b)
        assert (ours['buffers'][0] != 0).all()
        for name in 'checkpointed_sharded','exact_sharded': assert 'sharded or replicated' in res[name]
        assert "micro_batch_size='auto' cannot try sizes on a sharded" in res['auto_sharded']
    assert messages(world, 'checkpointed') == messages(world, 'whole_normed')

def test_schedule(world):
    n,_ = world
    def size(pct): return math.floor(SchedCos(4*n, 16*n)(pct)/(4*n) + 0.5 + 1e-6)*4
    shares = dealt(96, n)
    steps = together(windows(96//n, 4, size, 'step', 2), shares)
    assert {len(idxs) for idxs,_ in steps} >= {4*n, 8*n, 12*n}
    check(world, 'scheduled', steps)

@pytest.mark.parametrize('name', ['sums','tokens_ignored','tokens_weighted'])
def test_every_item_counts_the_same(world, name):
    "Shares with very different numbers of labels, class weights, and losses that are sums"
    n,results = world
    if name == 'sums': m,(x,y),share,micro = model(),data(96),16,4
    else:
        from workers import token_model
        m,(x,y),share,micro = token_model(),tokens(),8,4
    weight = tensor([1., 2., 3., 0.5]).double() if name == 'tokens_weighted' else None
    def loss_func(pred, targ):
        if name == 'sums': return ((pred-targ)**2).sum()/64
        return F.cross_entropy(pred.flatten(0, 1), targ.flatten(), weight)
    before,opt = weights(m),sgd(m.parameters())
    shares = dealt(len(x), n)
    for idxs,_ in together(windows(len(shares[0]), micro, share, 'step', 2), shares):
        opt.zero_grad()
        loss_func(m(x[idxs]), y[idxs]).backward()
        opt.step()
    for res in results: assert_same(res[name]['weights'], weights(m), 1e-6 if name == 'sums' else ROUNDING)
    assert (before-weights(m)).abs().max() > 1e-2

def test_an_epoch_that_is_cut_short(world):
    "By a callback, in the middle of a window: the gradients are averaged by hand"
    n,_ = world
    n_micro = 96//n//4
    ran = 1 + next(i for i in range(n_micro) if i/n_micro >= 0.4)
    steps = together(windows(ran*4, 4, 16, 'step', 2), dealt(96, n))
    assert len(steps) == 4 and len(steps[1][0]) < len(steps[0][0])
    for name,opt in dict(cut_short=sgd, cut_short_adam=adam).items(): check(world, name, steps, make_opt=opt)

def test_gradients_that_only_some_have(world):
    n,results = world
    for res in results:
        everywhere,once,nowhere = res['some_without_gradient']
        assert_same(everywhere, [(n-1)/2]*2, 1e-6)
        assert_same(once, [1/n]*2, 1e-6)
        assert nowhere is None

def test_cancelled_micro_batches(world):
    "Before its backward pass it is left out; cancelled at the step, its window is skipped, and logged"
    n,_ = world
    shares = dealt(96, n)
    left_out = [shares[0].index(i) for i in shares[0] if not 4 <= i < 8]
    steps = [([left_out[i] for i in idxs],pct) for idxs,pct in windows(len(left_out), 4, 8, 'step', 2)]
    check(world, 'skip_before', together(steps, shares))
    steps = together(windows(96//n, 4, 8, 'step', 2), shares)
    check(world, 'skip_after', steps, skipped=(0, len(steps)//2))

def test_gradient_clip_and_batch_norm(world):
    "Clipped is the window's mean gradient; a norm that talks sees the micro-batches of all processes, one that does not its own"
    n,results = world
    shares = dealt(96, n)
    from workers import norm_model
    class Norm(nn.Module):
        def forward(self, x): return (x-x.mean(0))/(x.var(0, unbiased=False)+1e-5).sqrt()
    for name in 'clip','norm_with_sync','norm_without_sync':
        m,(x,y) = model() if name == 'clip' else norm_model(Norm()),data(96)
        opt = sgd(m.parameters())
        for idxs,_ in windows(96//n, 4, 16, 'step', 2):
            opt.zero_grad()
            for micro in [idxs[i:i+4] for i in range(0, len(idxs), 4)]:
                batches = [[share[i] for i in micro] for share in shares]
                if name != 'norm_without_sync': batches = [sum(batches, [])]
                for batch in batches: (((m(x[batch])-y[batch])**2).sum()/len(idxs)/n).backward()
            if name == 'clip': nn.utils.clip_grad_norm_(m.parameters(), 0.05)
            opt.step()
        for res in results: assert_same(res[name]['weights'], weights(m), ROUNDING)

@pytest.mark.parametrize('name', ['nonfinite','sharded_nonfinite'])
def test_one_nan_in_one_process(world, name):
    "None steps on that window; the second of the fit"
    shares = dealt(96, world[0])
    steps = together(windows(96//world[0], 4, 16, 'step', 2), shares)
    check(world, name, steps[:1]+steps[2:])

@pytest.mark.parametrize('name', ['bfloat16','bfloat16_cut_short','bfloat16_one_micro_batch'])
def test_bfloat16_weights_are_averaged_in_float32(world, name):
    "The float32 sums of all processes, rounded once; for three processes, whose sums have an order, but for their last digit"
    n,results = world
    m,(x,y),shares = model().bfloat16(),(o.bfloat16() for o in data(96)),dealt(96, n)
    opt = sgd(m.parameters())
    n_micro = 96//n//4
    ran = 1 + next(i for i in range(n_micro) if i/n_micro >= 0.4) if 'cut_short' in name else n_micro
    for idxs,_ in windows(ran*4, 4, 4 if 'one_micro' in name else 16, 'step', 2):
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in m.parameters()]
        for share in shares:
            for i in range(0, len(idxs), 4):
                micro = [share[j] for j in idxs[i:i+4]]
                opt.zero_grad()
                F.mse_loss(m(x[micro]).float(), y[micro].float()).backward()
                for s,p in zip(sums, m.parameters()): s += p.grad
        for s,p in zip(sums, m.parameters()): p.grad = (s/(len(idxs)//4*n)).bfloat16()
        opt.step()
    for res in results:
        assert_same(res[name]['weights'], results[0][name]['weights'])
        assert_same(res[name]['weights'].double(), weights(m).double(), 0. if n == 2 and 'one_micro' not in name else .01)
        assert not torch.equal(weights(m), weights(model().bfloat16()))
    buckets,_ = messages(world, name)
    assert len(buckets) == (len(results[0][name]['accum_bs']) if 'one_micro' in name else 0)

def test_512_bfloat16_gradients_of_1(world):
    for res in world[1]: assert res['bfloat16_ones'] == [-1., -1.]

def test_ddp_averages_again_after_an_interrupt(world):
    "In the fit, only in the last micro-batch of each window"
    for res in world[1]: assert res['interrupted'] == ([False, False, False, True, False, False], True)

def test_a_static_graph_cannot_add_up_in_float32(world):
    for res in world[1]: assert res['bfloat16_static_graph'].startswith('static_graph=True adds up gradients in the precision of the weights')

def test_what_adds_up_in_bfloat16_is_refused():
    "FSDP 1, which has a `no_sync` as DDP has; FSDP 2 has none"
    class FullyShardedDataParallel(nn.Module):
        def no_sync(self): pass
    class FSDPModule(nn.Module):
        def set_requires_gradient_sync(self): pass
    with pytest.raises(ValueError, match='FullyShardedDataParallel adds up gradients in the precision of the weights'):
        check_wrapped(FullyShardedDataParallel(), None, in_float32=True)
    check_wrapped(FullyShardedDataParallel(), None)
    check_wrapped(FSDPModule(), None, in_float32=True)

def test_sizes_count_all_processes(world):
    n,results = world
    for res in results:
        first,second,_ = res['errors']
        assert first == (f"accum_bs=4 is not a multiple of {4*n}, {n} processes times the DataLoader's batch of 4 samples: "
                         f"use {4*n}, or change its batch size" + f' to {4//n}'*(4%n == 0))
        assert second.startswith(f'final_accum_bs={4*n+4} is not') and f'use {4*n} or {8*n}' in second

def test_what_is_refused(world):
    for res in world[1]: assert res['errors'][2].startswith("gradient_as_bucket_view=True does not work with fastai's optimizers")

def test_a_model_that_averages_nothing_is_refused():
    with pytest.raises(ValueError, match=r'several processes train a Sequential that does not average its gradients: train inside `with learn.distrib_ctx\(\):`'):
        check_wrapped(model(), None)

# What they tell each other

@pytest.mark.parametrize('name', sorted(set(plain)-{'static_graph','sharded','auto','auto_later'} | {'scheduled','sums','tokens_ignored','clip'}))
def test_one_all_reduce_a_step(world, name):
    "One bucket, in the micro-batch that steps; 24 bytes beside it, and 8 bytes once, for the unit"
    n,results = world
    buckets,scalars = messages(world, name)
    n_steps = len(results[0][name]['accum_bs'])
    assert len(buckets) == n_steps > 1
    assert len({micro for micro,_ in buckets}) == n_steps and len({nbytes for _,nbytes in buckets}) == 1
    assert scalars == [24]*n_steps if name == 'sums' else scalars == [8] + [24]*n_steps

def test_a_static_graph_talks_once_more(world):
    buckets,scalars = messages(world, 'static_graph')
    assert [micro for micro,_ in buckets][:2] == [0, 3] and len(buckets) == len(scalars)

def test_table_of_the_page(world):
    "The page shows what is measured here, in float32"
    if world[0] != 2: return
    rows = []
    for name in 'fastai','float32':
        buckets,scalars = messages(world, name)
        scalars = [o for o in scalars if o != 8]
        steps = 6
        gathers = world[1][0][name]['gathers']  # of the Recorder, which logs their mean
        rows.append([len(buckets)/steps, sum(nbytes for _,nbytes in buckets)/steps, len(scalars)/steps, sum(scalars)/steps, len(gathers)/steps, sum(gathers)/steps])
    page = ''.join(sum([c['source'] for c in json.loads((here.parent/'nbs/source/window/03_processes.ipynb').read_text())['cells']], []))
    table = re.findall(r'^\| (?:fastai\'s )?`GradientAccumulation` \|(.*)\|$', page, re.M)
    assert [[float(o) for o in row.split('|')] for row in table] == rows
    assert f'model of {len(weights(model()))} parameters' in page

@pytest.mark.long
def test_a_process_that_fails_ends_all():
    code,_,err = launch(2, 'folder', 'one_fails')
    assert code != 0 and 'the disk is full' in err

# The commands of the page

def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

machines = '--multi_gpu --num_machines 2 --num_processes 2 --main_process_ip 127.0.0.1 --main_process_port PORT --machine_rank'

@pytest.mark.long  # the page Several GPUs runs its script with torchrun, each time
@pytest.mark.parametrize('commands', [['torchrun --standalone --nproc-per-node 2'], ['accelerate launch --multi_gpu --num_processes 2 --main_process_port PORT'],
                                      [f'accelerate launch {machines} {rank}' for rank in range(2)]], ids=['torchrun','accelerate','two machines'])
def test_example(commands):
    port = str(free_port())
    started = [start(f'{o} {here.parent}/examples/distributed.py'.replace('PORT', port)) for o in commands]
    done = [finish(o) for o in started]
    assert not any(code for code,_,_ in done), done[0][2][-3000:]
    out = done[0][1]
    assert '2 processes: 100 steps' in out and 'the weights are equal' in out
    assert float(re.search(r'difference of the weights: (\S+)', out)[1]) < 1e-6
