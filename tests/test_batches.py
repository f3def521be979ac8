"A batch is what the loader yields, and its samples are what the loader counts: whatever rows its tensors have, the steps, positions, learning rates and logs are those of the plain fit"
import pytest
import torch.utils.data as tud

from common import *

X,Y = data(50)
SAMPLES = list(zip(X, Y))

class Positions(Callback):
    "Where each epoch begins and ends"
    order = Recorder.order+10
    def before_fit(self): self.seen = []
    def before_train(self): self.seen.append(self.learn.pct_train)
    def after_epoch(self): self.seen.append(self.learn.pct_train)

def run(train, *cbs, n_epoch=3, loss_func=mse, m=None):
    learn = Learner(DataLoaders(train, DataLoader(SAMPLES[:16], bs=8)), model() if m is None else m, loss_func=loss_func, opt_func=partial(SGD, mom=.9), cbs=[*cbs, Positions()])
    return fit(learn, n_epoch, .1, method='fit_one_cycle')

def assert_same_fit(small, big, moved=True, tol=ROUNDING):
    assert_same(small.recorder.lrs, big.recorder.lrs, 1e-15)  # windows add up the same positions
    assert_same(small.positions.seen, big.positions.seen, 1e-15)
    assert_same(weights(small), weights(big), tol)
    assert_same(losses(small), losses(big), 1e-6)  # the Recorder averages in float32
    assert_same(floats(small.recorder.values), floats(big.recorder.values), 1e-6)
    assert not moved or (weights(small)-weights(model())).abs().max() > 1e-3

# Rows

def stack(b): return [torch.stack(o) for o in zip(*b)]
def views(b): return [torch.cat([o, o*.9]) for o in stack(b)]
def repeats(b): return [o.repeat_interleave(3, 0) for o in stack(b)]
def nodes(b): return [torch.cat([o[i].repeat(1+j%4, 1) for j,o in enumerate(b)]) for i in (0, 1)]
def without_broken(b): return stack([o for o in b if o[0][0] > -.5] or b[:1])
def half(b): return stack(b[::2])
rows = dict(views=views, repeats=repeats, nodes=nodes, broken=without_broken, half=half)

def fastai_loader(bs, f): return DataLoader(SAMPLES, bs=bs, create_batch=lambda b: tuple(f(b)))
def torch_loader(bs, f): return tud.DataLoader(SAMPLES, batch_size=bs, collate_fn=lambda b: tuple(f(b)))
loaders = dict(fastai=fastai_loader, torch=torch_loader)

ways = dict(exact=lambda: [GradientAccumulation(exact=True)], split=lambda: [GradientAccumulation(micro_batch_size=3)], auto=lambda: [GradientAccumulation(micro_batch_size='auto')],
            large=lambda: [GradientAccumulation(micro_batch_size=99)], cache=lambda: [GradientCache(4)], both=lambda: [GradientAccumulation(micro_batch_size=4), GradientCache(2)])
no_warning = pytest.mark.filterwarnings('ignore:micro_batch_size=99')

@pytest.mark.thin(7)
@no_warning
@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('f', rows.values(), ids=rows)
@pytest.mark.parametrize('loader', loaders.values(), ids=loaders)
def test_a_window_of_one_batch(loader, f, way):
    assert_same_fit(run(loader(8, f), *ways[way]()), run(loader(8, f)))

@pytest.mark.thin(5)
@pytest.mark.parametrize('micro', [None, 3])
@pytest.mark.parametrize('f', [views, repeats, nodes, without_broken], ids=['views', 'repeats', 'nodes', 'broken'])
@pytest.mark.parametrize('loader', loaders.values(), ids=loaders)
def test_windows_of_several_batches(loader, f, micro):
    "4 batches of 4 are one of 16, except for `nodes`, whose number depends on the place in a batch, and is the same in each 4"
    assert_same_fit(run(loader(4, f), GradientAccumulation(16, micro_batch_size=micro)), run(loader(16, f)))

class Graphs:
    "Graphs in one batch, as PyTorch Geometric has them: an object, whose nodes are concatenated"
    def __init__(self, b):
        n_nodes = torch.tensor([2+i%5 for i in range(len(b))])
        self.x,self.y = torch.stack([o[0] for o in b]).repeat_interleave(n_nodes, 0),torch.stack([o[1] for o in b])
        self.batch = torch.arange(len(b)).repeat_interleave(n_nodes)
    def to(self, *args, **kwargs): return self
class GraphNet(nn.Module):
    def __init__(self): super().__init__(); self.m = model()
    def forward(self, g): return self.m(torch.zeros(len(g.y), 5, dtype=g.x.dtype).index_add(0, g.batch, g.x)/5)

def graph_fit(bs, *cbs):
    dl = tud.DataLoader(SAMPLES[:48], batch_size=bs, collate_fn=lambda b: (g := Graphs(b), g.y))
    learn = Learner(DataLoaders(dl, dl), GraphNet(), loss_func=mse, opt_func=SGD, cbs=[*cbs, Positions()])
    return fit(learn, 3, .1, method='fit_one_cycle')

@pytest.mark.parametrize('bs, cb', [(8, lambda: GradientAccumulation(exact=True)), (8, lambda: GradientAccumulation(micro_batch_size='auto')), (8, lambda: GradientAccumulation(8)),
                                    (8, lambda: GradientAccumulation(micro_batch_size=8))])
def test_graphs(bs, cb): assert_same_fit(graph_fit(bs, cb()), graph_fit(8))

def test_graphs_are_not_split():
    with pytest.raises(ValueError, match='cannot split a Graphs'): graph_fit(8, GradientAccumulation(micro_batch_size=4))

# Loaders

class Budget:
    "A batch sampler: 2 to 9 samples a batch"
    def __init__(self):
        r,self.all,i = random.Random(0),[],0
        while i < 50:
            k = r.randint(2, 9)
            self.all.append([*range(i, min(50, i+k))])
            i += k
    def __iter__(self): return iter(self.all)
    def __len__(self): return len(self.all)

class Stream(tud.IterableDataset):
    "50 samples, of which `n` are announced"
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __iter__(self): return iter(SAMPLES)

class Own:
    "A loader of its own, which may state a batch size"
    def __init__(self, sizes, n, **kwargs): self.sizes,self.n = sizes,n; vars(self).update(kwargs)
    def __len__(self): return self.n
    def __iter__(self):
        start = 0
        for o in self.sizes:
            yield X[start:start+o],Y[start:start+o]
            start += o

def sampler(): return tud.DataLoader(SAMPLES, batch_sampler=Budget())
def prebatched():
    "fastai's, of whole batches"
    all = Budget().all
    return DataLoader(all, bs=None, create_item=lambda i: (X[all[i]], Y[all[i]]))
def skips(i):
    if i%7 == 3: raise SkipItemException
    return SAMPLES[i]
odd = dict(sampler=sampler, prebatched=prebatched, skipped=lambda: DataLoader(SAMPLES, bs=8, create_item=skips), stream=lambda: tud.DataLoader(Stream(50), batch_size=8),
           longer=lambda: tud.DataLoader(Stream(40), batch_size=8), shorter=lambda: tud.DataLoader(Stream(64), batch_size=8), dropped=lambda: tud.DataLoader(Stream(50), batch_size=8, drop_last=True),
           own=lambda: Own([8,3,8,8,1,8], 6), own_stated=lambda: Own([8,3,8,8,1,8], 6, bs=8), own_longer=lambda: Own([8,3,8,8,1,8], 4, batch_size=8))

@pytest.mark.thin(7)
@no_warning
@pytest.mark.filterwarnings('ignore:Length of IterableDataset')
@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('loader', odd.values(), ids=odd)
def test_a_window_of_one_odd_batch(loader, way):
    assert_same_fit(run(loader(), *ways[way]()), run(loader()))

@pytest.mark.filterwarnings('ignore:Length of IterableDataset')
@pytest.mark.parametrize('small, big', [
    (lambda: DataLoader(SAMPLES, bs=4, create_item=skips), lambda: DataLoader(SAMPLES, bs=16, create_item=skips)),
    *[(lambda o=o: tud.DataLoader(Stream(o), batch_size=4), lambda o=o: tud.DataLoader(Stream(o), batch_size=16)) for o in (50, 64, 40)],
    (lambda: Own([4,3,4,4,2], 5, bs=4), lambda: Own([15,2], 2, bs=16)), (lambda: Own([4]*12, 12), lambda: Own([16]*3, 3, bs=16))], ids=['skipped', 'stream', 'shorter', 'longer', 'own', 'unsized'])
def test_windows_of_odd_loaders(small, big):
    "At the end of an epoch of another length than was announced, too"
    assert_same_fit(run(small(), GradientAccumulation(16, micro_batch_size=4)), run(big()))

def test_windows_of_batches_of_any_size():
    "The samples of `accum_bs` or more, as the rows tell; positions go by batches"
    learn = run(sampler(), GradientAccumulation(18, micro_batch_size=9))
    sizes,filled = [],0
    for o in Budget().all:
        filled += len(o)
        if filled >= 18: sizes,filled = [*sizes, filled],0
    assert learn.recorder.accum_bs == (sizes + [filled]*(filled > 0))*3
    assert_same(learn.positions.seen, [0, 1/3, 1/3, 2/3, 2/3, 1], 1e-15)

# A size that changes at an epoch

class SetBs(Callback):
    order = -100
    def __init__(self, *sizes): self.sizes = sizes
    def before_epoch(self): self.learn.dls.train.bs = self.sizes[self.epoch]
class SwapLoader(SetBs):
    def before_epoch(self): self.learn.dls.loaders[0] = fastai_loader(self.sizes[self.epoch], stack)
class SwapLoaders(SetBs):
    def before_epoch(self): self.learn.dls = DataLoaders(torch_loader(self.sizes[self.epoch], stack), self.learn.dls.valid)
class SwapDl(SetBs):
    def before_epoch(self): pass
    def before_train(self): self.learn.dl = torch_loader(self.sizes[self.epoch], stack)
changes = pytest.mark.parametrize('change', [SetBs, SwapLoader, SwapLoaders, SwapDl])

@pytest.mark.thin(7)
@no_warning
@pytest.mark.parametrize('sizes', [(16, 16, 8), (4, 8, 12)])
@pytest.mark.parametrize('way', ways)
@changes
def test_a_size_that_changes(change, way, sizes):
    def fitted(*cbs): return run(fastai_loader(sizes[0], stack), change(*sizes), *cbs)
    assert_same_fit(fitted(*ways[way]()), fitted())

@pytest.mark.thin(5)
@pytest.mark.parametrize('micro', [None, 2])
@pytest.mark.parametrize('sizes', [(4, 8, 16), (16, 8, 4), (4, 4, 2)])
@changes
def test_windows_of_a_size_that_changes(change, sizes, micro):
    small = run(fastai_loader(sizes[0], stack), change(*sizes), GradientAccumulation(16, micro_batch_size=micro))
    assert_same_fit(small, run(fastai_loader(16, stack), change(16, 16, 16)))

def test_a_size_that_no_longer_fits():
    with pytest.raises(ValueError, match="accum_bs=16 is not a multiple of the DataLoader's batch of 12 samples"):
        run(fastai_loader(8, stack), SetBs(8, 12, 12), GradientAccumulation(16))

def test_each_size_is_told(capsys):
    learn = Learner(DataLoaders(fastai_loader(4, stack), DataLoader(SAMPLES[:16], bs=8)), model(), loss_func=mse, opt_func=SGD, cbs=[SetBs(4, 8, 8), GradientAccumulation(16)])
    fit_aloud(learn)
    assert [o.split(';')[0] for o in capsys.readouterr().out.splitlines()] == ['16 = 4 x 4 samples', '16 = 2 x 8 samples']
