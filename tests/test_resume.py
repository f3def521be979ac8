"Resume a run in a new process after SIGKILL, and repeat a run on a smaller card"
import signal, subprocess, sys

import pytest

from cells import *
from common import *
from fastxtend_accum.demo import Activations
from fastxtend_accum.memory.out_of_memory import NothingFits

# Each fit runs in a process of its own; `resumed` has another seed than the run that was killed
SCRIPT = '''
import signal, sys
sys.path.insert(0, TESTS)
from common import *
from fastxtend_accum.demo import Activations

CALLBACK

class Kill(Callback):
    "In epoch 3, and in the middle of a window"
    def before_epoch(self): self.n = 0
    def after_backward(self):
        self.n += 1
        if self.n_epoch == 6 and self.epoch == 3 and self.n == 5: os.kill(os.getpid(), signal.SIGKILL)

class Noise(list):
    "Samples with random numbers of the worker that loads them"
    def __getitem__(self, i):
        x,y = super().__getitem__(i)
        return x+random.random()+np.random.rand()+torch.rand([]).double(), y

def learner(name, seed, *cbs, bs=8, norm=nn.Identity, kind=list, num_workers=0):
    set_seed(seed)
    body,samples = nn.Sequential(nn.Linear(5, 32), norm(32), nn.Tanh(), nn.Dropout(.3)),list(zip(*data(88)))
    m = nn.Sequential(body, nn.Linear(32, 1)).double()
    train = DataLoader(kind(samples), bs=bs, shuffle=True, num_workers=num_workers)
    def note(self):
        if self.training: seen.setdefault(self.epoch, []).extend(self.x[:,0].tolist())
    seen,cbs = {},[*cbs, Callback(before_batch=note)]
    learn = Learner(DataLoaders(train, DataLoader(samples[:20], bs=16)), m, mse, Adam, cbs=cbs, path=Path(name),
                    splitter=lambda m: [params(o) for o in m])
    learn.seen = seen
    return learn

def saver(): return SaveModelCallback(every_epoch=True, with_opt=True)
def again(learn, *args, method='fit_one_cycle', **kwargs):
    return fit(learn.load('model_2', with_opt=True), 6, *args, method=method, start_epoch=3, **kwargs)

def process(name, f):
    "What is left of the fit that `f` runs in a new process"
    def run():
        learn = f()
        r,state = learn.recorder,torch.cat([o.flatten().double() for o in learn.model.state_dict().values()])
        res = dict(state=state, sizes=getattr(r, 'accum_bs', None), values=floats(r.values), lrs=r.lrs, seen=learn.seen)
        torch.save(res | {k:v for cb in learn.cbs for k,v in vars(cb).items() if k in ('mb', 'level')}, f'{name}.pt')
    print(name, forked(run), flush=True)

def three(name, make, method='fit_one_cycle', resume=again):
    "A whole fit, one that is killed, and one that resumes it"
    process(f'{name} whole', lambda: fit(make('w', 0), 6, method=method))
    process(f'{name} killed', lambda: fit(make(name, 0, saver(), RandomStates(), Kill()), 6, method=method))
    shutil.copytree(name, f'{name} files')
    process(f'{name} resumed', lambda: resume(make(name, 1, saver(), RandomStates(3))))

def schedule(name, seed, *cbs):
    return learner(name, seed, GradientAccumulationSchedule(16, 32, finish=.9, remainder='step'), *cbs)
def carry(name, seed, *cbs): return learner(name, seed, GradientAccumulation(32, remainder='carry'), *cbs)
def workers(name, seed, *cbs): return learner(name, seed, GradientAccumulation(16), *cbs, kind=Noise, num_workers=2)
def blocks(name, seed, *cbs):
    limit = math.inf if name == 'w' else .6*torch.load('blocks whole.pt', weights_only=False)['mb']
    saves = [] if name == 'w' else [ActivationCheckpointing()]
    return learner(name, seed, Activations(limit), *saves, *cbs, bs=11, norm=nn.BatchNorm1d)

def second_part(learn):
    learn.unfreeze()
    lr = .1
    return again(learn, slice(lr/200, lr/2), pct_start=.3, div=5.)

three('schedule', schedule)
process('same seed', lambda: again(schedule('schedule files', 0)))
process('flat', lambda: again(schedule('schedule files', 0), method='fit_flat_cos'))
three('carry', carry)
three('fine_tune', schedule, 'fine_tune', second_part)
process('fine_tune again', lambda: again(schedule('fine_tune files', 1, RandomStates(3)), method='fine_tune'))
three('blocks', blocks)
three('workers', workers)
'''

@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    "What each process has left, by name, unless it was killed"
    here,page = tmp_path_factory.mktemp('resume'),read(root/'nbs/guides/02_resume.ipynb')
    callback = next(source(c) for c in page if source(c).startswith('class RandomStates'))
    script = SCRIPT.replace('TESTS', repr(str(Path(__file__).parent))).replace('CALLBACK', callback)
    command = sys.executable, '-W', 'ignore', '-c', script
    out = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=SECONDS)
    codes = dict(o.rsplit(' ', 1) for o in out.stdout.splitlines())
    expected = {k:str(-signal.SIGKILL if k.endswith('killed') else 0) for k in codes}
    assert codes == expected and len(codes) == 18, out.stdout+out.stderr[-3000:]
    return dict(folder=here, **{k:torch.load(here/f'{k}.pt', weights_only=False) for k,v in codes.items() if v == '0'})

def saved(runs, name):
    "The weights of the last layer in each file"
    files = (runs['folder']/name/'models').glob('*.pth')
    return {o.stem:torch.load(o, weights_only=False)['model']['1.weight'] for o in files}

@pytest.mark.parametrize('name', ['schedule','fine_tune','blocks','workers'])
def test_with_random_states_the_weights_are_the_same(runs, name):
    "Bit for bit, BatchNorm's statistics, too"
    whole,resumed = runs[f'{name} whole'],runs[f'{name} resumed']
    n = len(resumed['lrs'])
    assert 0 < n < len(whole['lrs'])
    assert_same(resumed['state'], whole['state'])
    assert_same(resumed['lrs'], whole['lrs'][-n:])
    assert list(resumed['seen']) == [3, 4, 5] and all(v == whole['seen'][k] for k,v in resumed['seen'].items())
    assert (saved(runs, f'{name} files')['model_2']-saved(runs, name)['model_5']).abs().max() > 1e-3

def test_what_was_saved_when_the_process_was_killed(runs):
    "The last whole epoch; the resumed fit writes earlier files anew"
    before,after = saved(runs, 'schedule files'),saved(runs, 'schedule')
    assert sorted(before) == ['model_0','model_1','model_2'] and sorted(after) == [f'model_{i}' for i in range(6)]
    for name in before: assert_same(after[name], before['model_2'])
    assert not torch.equal(before['model_0'], before['model_2'])

def test_a_schedule_continues_at_its_size_and_the_recorder_begins_anew(runs):
    "Skipped epochs are empty, `valid_loss` is that of the whole fit, `train_loss` is a running mean"
    (whole,values),(resumed,later) = ((o['sizes'], o['values']) for o in (runs['schedule whole'], runs['schedule resumed']))
    assert resumed == whole[-len(resumed):] and whole[0] < resumed[0] < max(resumed) == 32
    assert later[:3] == [[]]*3 and [o[1] for o in later[3:]] == [o[1] for o in values[3:]]
    assert all(a[0] != b[0] for a,b in zip(later[3:], values[3:]))

def test_without_random_states_the_numbers_are_others(runs):
    "With the same seed, the orders of the first epochs come again"
    whole,same = runs['schedule whole'],runs['same seed']
    assert [same['seen'][i] for i in (3, 4, 5)] == [whole['seen'][i] for i in (0, 1, 2)]
    assert (same['state']-whole['state']).abs().max() > 1e-3

def test_fit_flat_cos_begins_at_epoch_0(runs): assert list(runs['flat']['seen']) == list(range(6))

def test_carried_batches_are_lost(runs):
    "After 3 epochs of 88 samples, 8 wait for the next: the resumed fit goes on without them"
    whole,resumed = runs['carry whole'],runs['carry resumed']
    assert whole['sizes'] == [32]*16 + [16] and resumed['sizes'] == [32]*8 + [8]
    assert sum(resumed['seen'].values(), []) == sum(whole['seen'].values(), [])[-3*88:]
    assert (whole['state']-resumed['state']).abs().max() > 1e-6

def test_fine_tune_forgets_the_optimizer(runs):
    "It freezes and unfreezes, which clears Adam's averages"
    assert runs['fine_tune again']['seen'].keys() == runs['fine_tune resumed']['seen'].keys()
    assert (runs['fine_tune again']['state']-runs['fine_tune whole']['state']).abs().max() > 1e-6

def test_checkpointing_finds_its_blocks_again(runs): assert runs['blocks resumed']['level'] > 0

def test_a_file_that_was_not_written_to_its_end():
    learn = make_learner(8, path=Path())
    file = learn.save('model_2')
    file.write_bytes(file.read_bytes()[:file.stat().st_size//2])
    with pytest.raises((RuntimeError, OSError)): learn.load('model_2')

def test_the_loss_scale_begins_at_its_default():
    "It was halved after a step that was skipped; the resumed fit skips one again"
    def scales(*files, **kwargs):
        def note(self): seen.append(self.scaler.get_scale())
        cbs,seen = [CpuMixedPrecision('fp16'), SaveModelCallback(every_epoch=True, with_opt=True)],[]
        learn = make_learner(8, n=16, m=model().float(), loss_func=MSELossFlat(), path=Path(), cbs=cbs)
        for o in files: learn.load(o, with_opt=True)
        fit(learn, 4, cbs=Callback(before_backward=note), **kwargs)
        return seen
    whole,resumed = scales(),scales('model_1', start_epoch=2)
    assert whole[:2] == resumed[:2] == [2**16, 2**15] and len(resumed) == 4 and whole[4] == 2**15

def test_distrib_ctx_hides_the_generator():
    "`DistributedDL` shuffles with that of the DataLoader inside it"
    from fastai.distributed import DistributedDL
    inside = DataLoader(list(range(88)), bs=8, shuffle=True)
    dl,before = DistributedDL(inside, rank=0, world_size=1),inside.rng
    dl.randomize()
    assert inside.rng is not before and not hasattr(dl, 'rng')

# The same run on a smaller card

class Augmented(list):
    "Samples with noise from the worker that loads them"
    def __getitem__(self, i): return i,random.random()+np.random.rand()+float(torch.rand([]))

def test_workers_have_their_own_random_numbers():
    "The order is the same with any number of workers"
    def seen(num_workers):
        set_seed(42, reproducible=True)
        batches = list(DataLoader(Augmented(range(24)), bs=4, shuffle=True, num_workers=num_workers))
        return [torch.cat(o).tolist() for o in zip(*batches)]
    (order,noise),again,(other_order,other) = seen(1),seen(1),seen(2)
    assert again == [order, noise] and other_order == order != sorted(order) and other != noise

def on_card(mb, *cbs, drop=.2, compiled=noop):
    "A Learner after two epochs with room for `mb` MB of activations"
    set_seed(42, reproducible=True)
    m = nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Dropout(drop)) for _ in range(6)], nn.Linear(5, 1))
    return fit(make_learner(32, m=compiled(m), loss_func=MSELossFlat(), cbs=[Activations(mb), *cbs]), 2)

@pytest.mark.parametrize('cbs', [[], [CpuMixedPrecision('bf16')]])
@pytest.mark.parametrize('drop', [.2, 0.])
def test_a_smaller_card(cbs, drop):
    "The same weights, bit for bit; in micro-batches only without dropout, up to rounding"
    large = on_card(math.inf, *cbs, drop=drop)
    small,split = (on_card(.6*large.activations.mb, *cbs, o, drop=drop)
                   for o in (ActivationCheckpointing(), GradientAccumulation(micro_batch_size='auto')))
    assert_same(weights(small), weights(large))
    off = (weights(split)-weights(large)).abs().max()
    assert off > 1e-3 if drop else 0 < off < (1e-2 if cbs else 1e-6)

def test_a_compiled_net():
    "Where it fits, it is the plain fit; else the error says what to leave out"
    run = partial(on_card, compiled=partial(torch.compile, backend='eager'))
    large = run(math.inf)
    mb = large.activations.mb
    assert_same(weights(run(mb, ActivationCheckpointing())), weights(large))
    with pytest.raises(NothingFits, match='leave out torch.compile.*micro_batch_size'):
        run(.6*mb, ActivationCheckpointing())

def test_pytorch_allows_tf32_in_convolutions_only():
    assert torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
