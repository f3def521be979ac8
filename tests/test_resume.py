"What the pages \"Save and resume\", where SIGKILL ends a process inside an epoch and a new one resumes, and \"The same run on another machine\" say"
import signal, subprocess, sys

import pytest

from cells import *
from common import *
from fastxtend_accum.demo import Activations
from fastxtend_accum.ways.memory import NothingFits

PAGE = root/'nbs/guides/09_resume.ipynb'
KILLED = 3  # the epoch that does not end

# Each fit runs in a process of its own; `resumed` and the like have another seed than the run that was killed
SCRIPT = '''
import signal, sys, warnings
sys.path.insert(0, {tests!r})
from common import *
from fastxtend_accum.demo import Activations

{callback}

class Kill(Callback):
    def after_backward(self):
        if self.n_epoch == 6 and self.epoch == {epoch} and self.iter == 5: os.kill(os.getpid(), signal.SIGKILL)

class Order(Callback):
    "The samples of each batch, by their first feature"
    def before_fit(self): self.seen = dict()
    def before_batch(self):
        if self.training: self.seen.setdefault(self.epoch, []).extend(self.x[:,0].tolist())

class Noise:
    "Samples with random numbers of the worker that loads them"
    def __init__(self): self.samples = list(zip(*data(88)))
    def __len__(self): return 88
    def __getitem__(self, i):
        x,y = self.samples[i]
        return x+random.random()+np.random.rand()+torch.rand([]).double(), y

def learner(name, seed, *cbs, bs=8, norm=nn.Identity, ds=None, num_workers=0):
    set_seed(seed)
    body = nn.Sequential(nn.Linear(5, 32), norm(32), nn.Tanh(), nn.Dropout(.3))
    m = nn.Sequential(body, nn.Sequential(nn.Linear(32, 1))).double()
    samples = list(zip(*data(88)))
    dls = DataLoaders(DataLoader(ds or samples, bs=bs, shuffle=True, num_workers=num_workers), DataLoader(samples[:20], bs=16))
    return Learner(dls, m, mse, Adam, splitter=lambda m: [params(o) for o in m], path=Path(name), cbs=[*cbs, Order()])

def saves(): return [SaveModelCallback(every_epoch=True, with_opt=True), RandomStates()]
def load(learn, epoch={epoch}-1): return learn.load(f'model_{{epoch}}', with_opt=True)

def process(name, f):
    "What is left of the fit that `f` runs in a new process"
    def run():
        with warnings.catch_warnings(record=True) as said: learn = f()
        r = learn.recorder
        way = getattr(getattr(learn, 'gradient_accumulation', None), 'way', None)
        res = dict(weights=weights(learn), buffers=list(learn.model.buffers()), sizes=list(getattr(r, 'accum_bs', [])), values=floats(r.values), losses=losses(learn), lrs=list(r.lrs),
                   seen=learn.order.seen, said=[str(o.message) for o in said], level=getattr(way, 'level', None))
        if hasattr(learn, 'activations'): res['mb'] = learn.activations.mb
        torch.save(res, f'{{name}}.pt')
    print(name, forked(run), flush=True)

def three(name, make, method='fit_one_cycle', resume=None):
    "A whole fit, one that is killed, and one that resumes it"
    process(f'{{name}} whole', lambda: fit(make('w', 0), 6, method=method))
    process(f'{{name}} killed', lambda: fit(make(name, 0, *saves(), Kill()), 6, method=method))
    shutil.copytree(name, f'{{name}} files')
    resume = resume or (lambda learn: fit(load(learn), 6, method=method, start_epoch={epoch}))
    process(f'{{name}} resumed', lambda: resume(make(name, 1, SaveModelCallback(every_epoch=True, with_opt=True), RandomStates({epoch}))))

def schedule(name, seed, *cbs): return learner(name, seed, GradientAccumulationSchedule(16, 32, finish=.9), *cbs)
def carry(name, seed, *cbs): return learner(name, seed, GradientAccumulation(32, remainder='carry'), *cbs)
def exact(name, seed, *cbs):
    if name == 'w': limited = [Activations()]
    else: limited = [Activations(.6*torch.load('exact whole.pt', weights_only=False)['mb']), GradientAccumulation(exact=True)]
    return learner(name, seed, *limited, *cbs, bs=11, norm=nn.BatchNorm1d)

def workers(name, seed, *cbs): return learner(name, seed, GradientAccumulation(16), *cbs, ds=Noise(), num_workers=2)

def second_part(learn):
    learn.unfreeze()
    lr = .1
    return fit(load(learn), 6, slice(lr/200, lr/2), method='fit_one_cycle', pct_start=.3, div=5., start_epoch={epoch})

three('schedule', schedule)
process('schedule other seed', lambda: fit(load(schedule('schedule files', 1)), 6, method='fit_one_cycle', start_epoch={epoch}))
process('schedule same seed', lambda: fit(load(schedule('schedule files', 0)), 6, method='fit_one_cycle', start_epoch={epoch}))
process('flat', lambda: fit(load(schedule('schedule files', 0)), 6, method='fit_flat_cos', start_epoch={epoch}))
three('carry', carry)
three('fine_tune', schedule, 'fine_tune', second_part)
process('fine_tune again', lambda: fit(load(schedule('fine_tune files', 1, RandomStates({epoch}))), 6, method='fine_tune', start_epoch={epoch}))
three('exact', exact)
three('workers', workers)
'''

@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    "What each process has left, by name, unless it was killed"
    here = tmp_path_factory.mktemp('resume')
    callback = next(source(c) for c in read(PAGE) if source(c).startswith('class RandomStates'))
    script = SCRIPT.format(tests=str(Path(__file__).parent), callback=callback, epoch=KILLED)
    out = subprocess.run([sys.executable, '-W', 'ignore', '-c', script], cwd=here, capture_output=True, text=True, timeout=SECONDS)
    codes = dict(o.rsplit(' ', 1) for o in out.stdout.splitlines())
    assert codes == {k:str(-signal.SIGKILL if k.endswith('killed') else 0) for k in codes} and len(codes) > 12, out.stdout+out.stderr[-3000:]
    return dict(folder=here, **{k:torch.load(here/f'{k}.pt', weights_only=False) for k,v in codes.items() if v == '0'})

def saved(runs, name): return {o.stem:torch.load(o, weights_only=False)['model'] for o in (runs['folder']/name/'models').glob('*.pth')}

@pytest.mark.parametrize('name', ['schedule','fine_tune','exact','workers'])
def test_with_random_states_the_weights_are_the_same(runs, name):
    "Bit for bit, BatchNorm's statistics too, though the new process began with another seed"
    whole,resumed = runs[f'{name} whole'],runs[f'{name} resumed']
    n = len(resumed['losses'])
    assert 0 < n < len(whole['losses'])
    assert_same(resumed['weights'], whole['weights'])
    for a,b in zip(resumed['buffers'], whole['buffers'], strict=True): assert_same(a.double(), b.double())
    assert_same(resumed['lrs'], whole['lrs'][-n:])
    assert list(resumed['seen']) == [3, 4, 5] and all(v == whole['seen'][k] for k,v in resumed['seen'].items())
    assert (saved(runs, f'{name} files')['model_2']['1.0.weight']-saved(runs, name)['model_5']['1.0.weight']).abs().max() > 1e-3

def test_what_was_saved_when_the_process_was_killed(runs):
    "The last whole epoch, and nothing of the one that did not end; the resumed fit writes earlier files anew, with the weights that it began with"
    before,after = saved(runs, 'schedule files'),saved(runs, 'schedule')
    assert sorted(before) == ['model_0','model_1','model_2'] and sorted(after) == [f'model_{i}' for i in range(6)]
    for name in before: assert all(torch.equal(after[name][k], v) for k,v in before['model_2'].items())
    assert not torch.equal(before['model_0']['1.0.weight'], before['model_2']['1.0.weight'])

def test_a_schedule_continues_at_its_size(runs):
    whole,resumed = runs['schedule whole']['sizes'],runs['schedule resumed']['sizes']
    assert resumed == whole[-len(resumed):] and resumed[0] == 24 and max(resumed) == 32 and min(whole[:6]) < 16 < resumed[0]

def test_the_recorder_begins_anew(runs):
    "Skipped epochs are empty, `valid_loss` is that of the whole fit, `train_loss` is a running mean"
    whole,resumed = runs['schedule whole']['values'],runs['schedule resumed']['values']
    assert resumed[:3] == [[]]*3 and [o[1] for o in resumed[3:]] == [o[1] for o in whole[3:]]
    assert all(a[0] != b[0] for a,b in zip(resumed[3:], whole[3:]))

def test_without_random_states_the_numbers_are_others(runs):
    "With the same seed, the orders of the first epochs come again"
    whole,other,same = (runs[f'schedule {o}'] for o in ('whole','other seed','same seed'))
    for o in other,same: assert (o['weights']-whole['weights']).abs().max() > 1e-3 and o['sizes'] == whole['sizes'][-len(o['sizes']):]
    assert [same['seen'][i] for i in (3, 4, 5)] == [whole['seen'][i] for i in (0, 1, 2)]
    assert not any(other['seen'][i] in whole['seen'].values() for i in (3, 4, 5))

def test_fit_flat_cos_begins_at_epoch_0(runs): assert list(runs['flat']['seen']) == list(range(6))

def test_carry_loses_the_open_window(runs):
    "After 3 epochs of 88 samples, 8 of them are in a window of 32: the resumed fit sees the same samples, but these are in no step"
    whole,resumed = runs['carry whole'],runs['carry resumed']
    assert set(whole['sizes']+resumed['sizes']) == {32} and all(v == whole['seen'][k] for k,v in resumed['seen'].items())
    assert (whole['weights']-resumed['weights']).abs().max() > 1e-6

def test_fine_tune_forgets_the_optimizer(runs):
    "`fine_tune(start_epoch=)` freezes and unfreezes, which clears Adam's averages"
    assert runs['fine_tune again']['seen'].keys() == runs['fine_tune resumed']['seen'].keys()
    assert (runs['fine_tune again']['weights']-runs['fine_tune whole']['weights']).abs().max() > 1e-6

def test_exact_finds_its_blocks_again(runs): assert runs['exact resumed']['level'] > 0 and runs['exact whole']['level'] is None

def test_a_file_that_was_not_written_to_its_end(runs):
    "It does not load, and the one before does"
    folder = Path(shutil.copytree(runs['folder']/'schedule files', 'damaged'))
    whole = (folder/'models/model_2.pth').read_bytes()
    (folder/'models/model_2.pth').write_bytes(whole[:len(whole)//2])
    m = nn.Sequential(nn.Sequential(nn.Linear(5, 32), nn.Identity(), nn.Tanh(), nn.Dropout(.3)), nn.Sequential(nn.Linear(32, 1))).double()
    learn = make_learner(8, m=m, path=folder, opt_func=Adam, splitter=lambda m: [params(o) for o in m])
    with pytest.raises((RuntimeError, OSError)): learn.load('model_2', with_opt=True)
    learn.load('model_1', with_opt=True)
    assert torch.equal(m[1][0].weight, saved(runs, 'schedule files')['model_1']['1.0.weight'])

def test_the_size_of_a_file():
    "Adam keeps two numbers for each weight"
    learn = fit(make_learner(8, n=8, m=nn.Sequential(nn.Linear(5, 5000), nn.Linear(5000, 1)), opt_func=Adam, loss_func=MSELossFlat(), path=Path()), 1)
    sizes = [learn.save(str(o), with_opt=o).stat().st_size for o in (False, True)]
    assert 2.95 < sizes[1]/sizes[0] < 3.05

def test_the_loss_scale_begins_at_its_default():
    "`to_fp16()` has halved it after a step that it skipped; it is in no file, so the resumed fit skips one again"
    class Scales(Callback):
        order = CpuMixedPrecision.order+1
        def before_batch(self):
            if self.training: self.all_scales.append(self.scaler.get_scale())
        def before_fit(self): self.all_scales = []
    def scales(load=None, **kwargs):
        cbs = [CpuMixedPrecision('fp16'), SaveModelCallback(every_epoch=True, with_opt=True), Scales()]
        learn = make_learner(8, n=16, m=model().float(), loss_func=MSELossFlat(), path=Path(), cbs=cbs)
        if load: learn.load(load, with_opt=True)
        return fit(learn, 4, **kwargs).scales.all_scales
    whole = scales()
    files = torch.load('models/model_1.pth', weights_only=False)
    resumed = scales('model_1', start_epoch=2)
    assert len(resumed) == 4 and whole[:2] == resumed[:2] == [2**16, 2**15] and whole[4] == 2**15 and files.keys() == {'model','opt'}

def test_distrib_ctx_hides_the_generator():
    "`DistributedDL` has none, and shuffles with that of the DataLoader inside it"
    from fastai.distributed import DistributedDL
    inside = DataLoader(list(range(88)), bs=8, shuffle=True)
    dl = DistributedDL(inside, rank=0, world_size=1)
    with pytest.raises(AttributeError): dl.rng
    before = inside.rng
    dl.randomize()
    assert inside.rng is not before and not hasattr(dl, 'rng')

# The same run on another machine

class Augmented:
    "Samples with noise from the worker that loads them"
    def __len__(self): return 24
    def __getitem__(self, i): return i,random.random()+np.random.rand()+float(torch.rand([]))

def test_workers_have_their_own_random_numbers():
    "The order is the same with any number of workers; fastai's default depends on the number of cores"
    def seen(num_workers):
        set_seed(42, reproducible=True)
        batches = list(DataLoader(Augmented(), bs=4, shuffle=True, num_workers=num_workers))
        return [torch.cat(o).tolist() for o in zip(*batches)]
    (order,noise),again,(other_order,other) = seen(1),seen(1),seen(2)
    assert again == [order, noise] and other_order == order != sorted(order) and other != noise
    cores = defaults.cpus
    try:
        for defaults.cpus in 2,5: assert DataLoaders.from_dsets([1, 2], [1], bs=1, device='cpu').train.fake_l.num_workers == defaults.cpus
    finally: defaults.cpus = cores

@pytest.mark.parametrize('drop', [0., .2])
def test_blocks_of_a_compiled_net_cannot_be_recomputed(drop):
    "Where it fits, exact=True is the plain fit; else the error says what to leave out, and micro-batches are exact without dropout"
    def train(*cbs):
        set_seed(42, reproducible=True)
        layers = [nn.Sequential(nn.Linear(5, 20), nn.Dropout(drop)), *[nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Dropout(drop)) for _ in range(5)]]
        m = torch.compile(nn.Sequential(*layers, nn.Linear(20, 1)).double(), backend='eager')
        return fit(make_learner(32, m=m, cbs=cbs), 2)
    whole = train(Activations())
    mb = whole.activations.mb
    assert_same(weights(train(Activations(mb), GradientAccumulation(exact=True))), weights(whole))
    with pytest.raises(NothingFits, match='a batch of 32 does not fit in memory.*leave out torch.compile.*micro_batch_size'):
        train(Activations(.6*mb), GradientAccumulation(exact=True))
    split = train(Activations(.6*mb), GradientAccumulation(micro_batch_size='auto'))
    off = (weights(split)-weights(whole)).abs().max()
    assert split.gradient_accumulation.micro_bs == 16 and (off > 1e-3 if drop else off < ROUNDING)

def page_net(card, *cbs, drop=.2):
    "The weights of the net on the page, after its three epochs"
    set_seed(42, reproducible=True)
    samples = list(zip(torch.randn(64, 20), torch.randint(4, (64,))))
    layers = [nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Dropout(drop)) for _ in range(6)]
    dls = DataLoaders(DataLoader(samples, bs=32, shuffle=True), DataLoader(samples[:16], bs=16))
    return weights(fit(Learner(dls, nn.Sequential(*layers, nn.Linear(20, 4)), nn.CrossEntropyLoss(), SGD, cbs=[card, *cbs]), 3, .1))

def test_bfloat16():
    "Recomputed blocks are equal bit for bit; micro-batches, without dropout, are as far off as bfloat16 is from float32"
    def bf16(): return CpuMixedPrecision('bf16')
    def small(): return GradientAccumulation(micro_batch_size=8)
    def off(a, b): return (a-b).abs().max().item()
    card = Activations()
    whole = page_net(card, bf16())
    assert_same(page_net(Activations(.6*card.mb), bf16(), GradientAccumulation(exact=True)), whole)
    net = partial(page_net, drop=0.)
    whole,whole32 = net(Activations(), bf16()),net(Activations())
    assert 0 < off(net(Activations(), small()), whole32) < 1e-7
    assert 1e-5 < off(net(Activations(), bf16(), small()), whole) < 2*off(whole, whole32) < 2e-3

def test_room_for_three_samples():
    "Where blocks keep their inputs only, and these are small, exact=True fits a batch of 32 into it"
    def run(card, *cbs):
        torch.manual_seed(0)
        m = nn.Sequential(*[nn.Sequential(nn.Linear(5, 500), nn.Dropout(.2), nn.Linear(500, 5)) for _ in range(2)], nn.Linear(5, 1)).double()
        return weights(fit(make_learner(32, m=m, cbs=[card, *cbs]), 2, .01))
    card = Activations()
    whole = run(card)
    small = Activations(card.mb*3/32)
    assert_same(run(small, GradientAccumulation(exact=True)), whole)
    assert 0 < small.mb <= small.limit

def test_pytorch_allows_tf32_in_convolutions_only(): assert torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
