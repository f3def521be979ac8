"What the loggers see, against what a large batch shows them"
import pickle
from types import MethodType
import pytest, wandb
from packaging.version import Version
from fastai.callback.tensorboard import TensorBoardCallback
from fastai.callback.wandb import WandbCallback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common import *
from fastxtend_accum.learner.logging import mend_wandb
from test_life import EVENTS, whole_learner

def big_and_small(cbs=noop, n_epoch=3, method='fit_one_cycle', **kwargs):
    "The same fit with batches of 32, and of 4x8"
    cbs = [L(cbs(o)).filter() for o in ('big', 'small')]
    return (fit(make_learner(32, cbs=cbs[0], **kwargs), n_epoch, method=method),
            fit(make_learner(8, cbs=[GradientAccumulation(32), *cbs[1]], **kwargs), n_epoch, method=method))

# Recorder

def test_train_metrics_see_every_sample():
    def mae(pred, targ): return (pred-targ).abs().mean().float()
    big,small = big_and_small(lambda o: Recorder(train_metrics=True), metrics=mae, n_epoch=1)
    assert len(big.recorder.values[0]) == 4
    frozen = [fit(make_learner(bs, cbs=[Recorder(train_metrics=True), *cbs], metrics=mae), 2, lr=0.)
              for bs,cbs in ((32, []), (8, [GradientAccumulation(32)]), (8, [GradientAccumulation(32, remainder='drop')]))]
    for o in frozen[1:]: assert_same(floats(o.recorder.values), floats(frozen[0].recorder.values), 1e-6)

def test_log_accum_batch_false_is_as_fastai():
    small = fit(make_learner(8, cbs=GradientAccumulation(32, log_accum_batch=False)))
    assert len(losses(small)) == 36 and small.recorder.iters == [12,24,36]
    assert_same(weights(small), weights(fit(make_learner(32))), 1e-12)

def test_an_epoch_without_a_window():
    "24 samples an epoch, a window of 48: the progress bar and its graph, CSVLogger and all, without NaN"
    learn = make_learner(8, n=24, cbs=[GradientAccumulation(48, remainder='carry'), CSVLogger(), ShowGraphCallback()])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        learn.fit(3)
    said = [o for o in said if 'no optimizer step' in str(o.message)]
    assert len(learn.recorder.values) == 3 and not np.isnan(losses(learn)).any()
    trained = [o[0] for o in learn.recorder.values]
    assert trained[0] is None and trained[1] == trained[2] > 0 and losses(learn) == [trained[1]] and not said

def test_a_fit_without_a_window_warns():
    learn = make_learner(8, n=24, cbs=GradientAccumulation(48, remainder='carry'))
    with pytest.warns(UserWarning, match="no optimizer step was taken in this fit: its 3 batches did not fill a window of 48 .* not 'carry'"): fit(learn, 1)
    assert_same(weights(learn), weights(model()))
    assert losses(learn) == []

def test_progress_bar_moves_with_every_micro_batch():
    class Probe(Callback):
        order,run_valid = 61,False
        def before_fit(self): self.seen = []
        def after_batch(self): self.seen.append(self.learn.progress.pbar.last_v)
    bars = []
    for cbs in [], [GradientAccumulation(32)], [GradientAccumulation(96)]:
        learn = make_learner(8, cbs=[Probe(), *cbs])
        with learn.no_logging(): learn.fit(1)
        bars.append(learn.probe.seen)
    assert len(bars[0]) == 12 and bars[0][:4] == [1,2,3,4]  # fastprogress then skips some that come too soon
    assert all(o[:4] == bars[0][:4] and len(o) == 12 for o in bars[1:])

def test_show_graph_has_steps_on_its_axis():
    graphs = {}
    for bs,cbs in (32, []), (8, [GradientAccumulation(32)]):
        learn = make_learner(bs, cbs=[ShowGraphCallback(), *cbs])
        seen = graphs[bs] = []
        class Probe(Callback):
            order = 64
            def before_train(self): self.learn.progress.mbar.update_graph = lambda *args: seen.append(args)
        learn.add_cb(Probe())
        learn.fit(2)
    assert len(graphs[8]) == len(graphs[32]) == 2
    for a,b in zip(graphs[8], graphs[32]):
        assert a[1] == b[1] and [list(xs) for xs,_ in a[0]] == [list(xs) for xs,_ in b[0]]

def test_csv_and_plots():
    learn = fit(make_learner(8, cbs=[GradientAccumulation(32), CSVLogger()]), method='fit_one_cycle')
    assert len(learn.csv_logger.read_log()) == 3
    learn.recorder.plot_loss(); learn.recorder.plot_sched()

@pytest.mark.parametrize('log_accum_batch', [True, False])
def test_a_window_of_one_loader_batch_in_pieces(monkeypatch, log_accum_batch):
    "All loggers show what they do without the callback, whether they are told of windows or not"
    seen = []
    for folder,cbs in ('big', []), ('small', [GradientAccumulation(32, micro_batch_size=8, log_accum_batch=log_accum_batch)]):
        graphs = []
        class Probe(Callback):
            order = 64
            def before_train(self): self.learn.progress.mbar.update_graph = lambda *args: graphs.append(args)
        learn = make_learner(32, n=100, cbs=[WandbCallback(log_preds=False), TensorBoardCallback(folder, trace_model=False, log_preds=False), CSVLogger(f'{folder}.csv'), *cbs],
                             metrics=AccumMetric(lambda p,t: (p*t).sum().float(), flatten=False))
        mend_wandb()
        rows,_ = wandb_history(monkeypatch, learn)
        learn.remove_cb(WandbCallback)
        learn.add_cbs([ShowGraphCallback(), Probe()])
        learn.fit(2)
        points = [o for tag in ('train_loss','valid_loss','lr_0','mom_0') for o in dict(scalars(folder, tag)).items()]  # fastai writes in validation, too, at the same step
        wandb_rows = [[step, *(float(o[k]) for k in ('raw_loss','train_loss','epoch','lr_0','mom_0'))] for step,o in rows.items()]
        seen.append((wandb_rows, points, floats(learn.recorder.values), [losses(learn)], [learn.recorder.lrs], [learn.recorder.iters], [[*xs, *ys] for o in graphs for xs,ys in o[0]],
                     [[float(o) for o in row[:4]] for row in learn.csv_logger.read_log().values]))
    assert len(seen[0][0]) == 8 and len(seen[0][6]) == 4
    for a,b in zip(*seen, strict=True): assert_same(*(torch.tensor([v for row in o for v in row], dtype=torch.float64) for o in (a, b)), 1e-6)

# lr_find

@pytest.mark.parametrize('n', [96, 160])
def test_lr_find(n):
    found = []
    for bs,cbs in (32, []), (8, [GradientAccumulation(32)]), (8, [GradientAccumulationSchedule(32, 96)]):
        learn = make_learner(bs, n=n, cbs=cbs)
        before = weights(learn)
        with learn.no_bar(): suggested = learn.lr_find(num_it=40, show_plot=True)
        assert_same(weights(learn), before)
        found.append((suggested.valley, learn.recorder.lrs, losses(learn)))
    for valley,lrs,ls in found[1:]:
        assert valley == found[0][0] and len(lrs) == len(ls) > 30
        assert_same(lrs, found[0][1], 1e-12)
        assert_same(ls, found[0][2], 1e-4)  # relative to losses that grow to 1e1: float32

@pytest.mark.parametrize('remainder', ['step', 'carry', 'drop'])
def test_lr_find_gives_all_points_whatever_the_epoch(remainder):
    learn = make_learner(8, n=44, cbs=GradientAccumulation(32, remainder=remainder))
    with learn.no_bar(): learn.lr_find(num_it=20, stop_div=False, show_plot=False)
    assert len(learn.recorder.lrs) == len(losses(learn)) == 20
    assert_same(learn.recorder.lrs, [SchedExp(1e-7, 10)(i/20) for i in range(20)], 1e-9)
    fit(learn, 2)
    assert learn.gradient_accumulation.opt_steps == len(losses(learn)) == dict(step=4, carry=2, drop=2)[remainder]

def test_lr_find_gives_all_points_where_windows_are_dropped():
    "Every other window has no items: each learning rate belongs to a window that is recorded"
    learn = make_learner(8, cbs=GradientAccumulation(32, num_items=lambda learn: 0 if learn.iter//4 == 1 else 8))
    with learn.no_bar(), pytest.warns(match='no item in a whole window'): learn.lr_find(num_it=20, stop_div=False, show_plot=False)
    assert_same(learn.recorder.lrs, [SchedExp(1e-7, 10)(i/20) for i in range(20)], 1e-9)

# Weights and Biases

def wandb_history(monkeypatch, learn, n_epoch=2):
    "Rows by step of a real run, offline"
    rows = {}
    run = wandb.init(project='test', dir='.')
    real = wandb.log
    def log(d, step=None):
        if step is not None: rows.setdefault(step, {}).update(d)
        real(d, step=step)
    monkeypatch.setattr(wandb, 'log', log)
    fit(learn, n_epoch, method='fit_one_cycle')
    assert run.step == len(rows)
    config = dict(run.config)
    wandb.finish()
    monkeypatch.setattr(wandb, 'log', real)
    return rows,config

@pytest.mark.thin(5)
@pytest.mark.parametrize('remainder', ['step', 'carry', 'drop'])
@pytest.mark.parametrize('n', [96, 88])
def test_wandb(monkeypatch, n, remainder):
    def learner(bs, *cbs): return make_learner(bs, n=n, cbs=[WandbCallback(log_preds=False), *cbs])
    small,config = wandb_history(monkeypatch, learner(8, GradientAccumulation(32, remainder=remainder)))
    steps = windows(n, 8, 32, remainder, 2)
    assert list(small) == list(range(len(steps)))
    assert [o['accumulation_batch_size'] for o in small.values()] == [len(idxs) for idxs,_ in steps]
    ends = [i for i,(idxs,_) in enumerate(steps) if i+1 == len(steps) or steps[i+1][0][0] < idxs[0]]
    assert small[ends[-1]]['epoch'] == 2
    assert (np.diff([o['epoch'] for o in small.values()]) > 0).all()
    assert all(o['train_samples_per_sec'] > 0 for o in small.values())
    assert config['GradientAccumulation']['accum_bs'] == 32
    if n != 96: return
    mend_wandb()
    big,_ = wandb_history(monkeypatch, learner(32))
    for k in 'raw_loss','train_loss','epoch','lr_0','mom_0': assert_same(*([float(o[k]) for o in h.values()] for h in (small, big)), 1e-6)

def test_wandb_counts_the_windows_samples_over_its_time(monkeypatch):
    class Slow(Callback):
        run_valid = False
        def after_pred(self): time.sleep(.02)
    learn = make_learner(8, cbs=[WandbCallback(log_preds=False), GradientAccumulation(32), Slow()])
    rows,_ = wandb_history(monkeypatch, learn, 1)
    rates = [o['train_samples_per_sec'] for o in rows.values()]
    assert len(rates) == 3 and all(100 < o < 400 for o in rates)  # 8 samples in 20 ms and a little

def test_wandb_mend_is_needed():
    "From fastai 2.8.9 on, with fastcore 2. When this fails, fastai has mended it: take `mend_wandb` out, and the versions that need it out of settings.ini"
    import fastai, importlib, fastai.callback.wandb as fw
    importlib.reload(fw)
    if Version(fastai.__version__) >= Version('2.8.9'):
        with pytest.raises(TypeError): fw._format_config_value(1)
    mend_wandb()
    assert fw._format_config_value(1) == 1

# TensorBoard

def scalars(path, tag):
    "Steps and values that were written under `tag`"
    acc = EventAccumulator(str(path))
    acc.Reload()
    return [(o.step, o.value) for o in acc.Scalars(tag)]

def test_tensorboard():
    big_and_small(lambda o: TensorBoardCallback(o, trace_model=False, log_preds=False))
    assert scalars('small', 'accumulation_batch_size') == [(i, 32.) for i in range(1, 10)]
    for tag in 'train_loss','lr_0','mom_0':
        small,big = scalars('small', tag),dict(scalars('big', tag))
        assert [step for step,_ in small] == [*big] == [*range(1, 10)]
        assert_same([v for _,v in small], list(big.values()), 1e-6)
    assert len(scalars('big', 'train_loss')) > 9  # fastai writes in validation too
    small,big = (scalars(o, 'valid_loss') for o in ('small','big'))
    assert [step for step,_ in small] == [step for step,_ in big] == [3,6,9]
    assert_same([v for _,v in small], [v for _,v in big], 1e-6)

def test_tensorboard_of_a_short_last_window_and_a_traced_model():
    fit(make_learner(8, cbs=[GradientAccumulation(32), TensorBoardCallback('tb', log_preds=False)], n=88), 2)
    assert [step for step,_ in scalars('tb', 'train_loss')] == [1,2,3,4,5,6]

# The position in training

LAST_BIT = 0.

class Positions(Callback):
    "`pct_train` in `after_batch`, once a window, as a callback of this order sees it"
    run_valid = False
    def __init__(self, order): self.order,self.seen = order,[]
    def after_batch(self):
        accum = first(o for o in self.learn.cbs if isinstance(o, GradientAccumulation))
        if accum is None or accum.window.result: self.seen.append(self.learn.pct_train)

kinds = dict(four=(8, lambda **o: GradientAccumulation(32, **o)), one=(32, lambda **o: GradientAccumulation(32, **o)),
             pieces=(32, lambda **o: GradientAccumulation(micro_batch_size=8, **o)), both=(16, lambda **o: GradientAccumulation(32, micro_batch_size=8, **o)))

@pytest.mark.parametrize('kwargs', [{}, dict(log_accum_batch=False)])
@pytest.mark.parametrize('kind', kinds)
def test_every_callback_sees_the_large_batchs_position(kind, kwargs):
    "At any order after fastai has counted the batch, and before it"
    orders = -100,-11,-9,-1,0,5,6,7,60,100
    bs,accum = kinds[kind]
    def positions(bs, *cbs):
        probes = [Positions(o) for o in orders]
        fit(make_learner(bs, n=112, cbs=[*probes, *cbs]), 3)
        return [o.seen for o in probes]
    big,small = positions(32),positions(bs, accum(**kwargs))
    assert_same(small, big, LAST_BIT)
    assert all(len(o) == 12 and len(set(o)) == 12 for o in big)

@pytest.mark.parametrize('order', [-9, 0, 5, 7, 61])
@pytest.mark.parametrize('kind', kinds)
def test_a_scheduler_of_ones_own_after_the_batch(kind, order):
    "It sets the next rate from `pct_train`: the large batch's rates and weights, at any order"
    class Own(Callback):
        run_valid = False
        def before_fit(self): self.opt.set_hyper('lr', .1)
        def after_batch(self): self.opt.set_hyper('lr', .1*(1-self.learn.pct_train))
    def run(bs, *cbs):
        own = Own()
        own.order = order
        return fit(make_learner(bs, cbs=[own, *cbs]), 3)
    bs,accum = kinds[kind]
    big,small = run(32),run(bs, accum())
    assert_same(small.recorder.lrs, big.recorder.lrs, LAST_BIT)
    assert len(set(big.recorder.lrs)) == 9
    assert_same(weights(small), weights(big), 1e-12)
    assert_moved(small)

@pytest.mark.parametrize('n,remainder', [(96, None), (100, None), (100, 'drop'), (32, None)])
@pytest.mark.parametrize('kind', [*kinds, 'schedule'])
def test_lr_find_is_as_long_as_the_large_batchs(kind, n, remainder):
    "Epochs, positions and learning rates are those of the same Learner with the large batch"
    def find(bs, *cbs, **kwargs):
        probe = Positions(0)
        learn = make_learner(bs, n=n, cbs=[probe, *cbs], **kwargs)
        with learn.no_bar(): learn.lr_find(num_it=20, stop_div=False, show_plot=False)
        return learn.n_epoch,learn.recorder.lrs,probe.seen
    bs,accum = kinds.get(kind, (8, lambda **o: GradientAccumulationSchedule(32, 96, **(dict(remainder='step')|o))))
    big,small = find(32, drop_last=remainder == 'drop'),find(bs, accum(**({'remainder':remainder} if remainder else {})))
    assert small[:2] == big[:2] and len(big[1]) == 20
    assert len(small[2]) == len(big[2]) and small[2][-1] <= 1
    if kind != 'schedule': assert_same(small[2], big[2], LAST_BIT)  # a schedule counts samples, not windows

# During a fit, and after it

class Copies(Callback):
    "Copies its Learner by pickle at `event`, as an export in mid-fit does; of the copies it keeps what stands in for methods of callbacks"
    order,run_valid = 70,False
    def __init__(self, event): self.found,self.n = [],0; setattr(self, event, self.copy)
    def copy(self):
        def replaced_in(learn): return [(type(cb).__name__, k, o) for cb in learn.cbs for k,o in vars(cb).items() if k in EVENTS and cb.name != 'copies']
        found,self.found = self.found,[]
        copies = pickle.loads(pickle.dumps(self.learn))
        self.found,self.n = found,len(replaced_in(self.learn))
        self.found += [name for name,k,o in replaced_in(copies) if type(o.__self__).__name__ != name]

@pytest.mark.parametrize('event', ['after_batch', 'after_step', 'before_validate', 'after_epoch'])
@pytest.mark.parametrize('kind', kinds)
def test_a_learner_that_is_pickled_in_mid_fit(kind, event):
    "Its loggers have methods of their own, not those of this fit; after the fit, so have those of the Learner"
    bs,accum = kinds[kind]
    learn = make_learner(bs, cbs=[accum(), Copies(event), ParamScheduler(dict(lr=SchedCos(.1, .01)))])
    fit(learn, 1)
    assert learn.copies.n >= 4 and learn.copies.found == []
    assert not any(k in EVENTS for cb in learn.cbs if cb.name != 'copies' for k in vars(cb))

@pytest.mark.parametrize('make', [lambda: GradientAccumulation(32), lambda: GradientAccumulation(16, micro_batch_size=4), lambda: GradientAccumulationSchedule(16, 32)])
def test_an_export_in_mid_fit_trains_on(make, tmp_path):
    "As one that is made after the fit: with methods of its own, and a fit of its own"
    class Exports(Callback):
        order = 70
        def after_epoch(self): self.learn.export(tmp_path/'in_fit.pkl')
    learn,fits = whole_learner([make(), ParamScheduler(dict(lr=SchedCos(.1, .01)))]),[]
    fit(learn, 1, cbs=Exports()).export(tmp_path/'after.pkl')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for name in 'after','in_fit':
            loaded = load_learner(tmp_path/f'{name}.pkl')
            loaded.remove_cb(Exports)
            assert all(v == MethodType(getattr(type(cb), k), cb) for cb in loaded.cbs for k,v in vars(cb).items() if k in EVENTS)
            loaded.dls,before = learn.dls,weights(loaded)
            with loaded.no_bar(): loaded.validate()
            fits.append(fit(loaded, 1, reset_opt=True))
            assert (weights(loaded)-before).abs().max() > 1e-4
    a,b = fits
    assert_same(weights(b), weights(a), 0.)
    assert b.recorder.accum_bs == a.recorder.accum_bs and losses(a) == losses(b) and len(losses(a)) < 8
