"What loggers see: once a window what they see of a large batch, or each loader batch"
import importlib.util
import fastai, pytest, wandb
from packaging.version import Version
from fastai.callback.tensorboard import TensorBoardCallback
from fastai.callback.wandb import WandbCallback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common import *
from fastxtend_accum.logging import fix_wandb

def sizes(learn): return learn.recorder.accum_bs

def wandb_rows(train):
    "What W&B has after a real run, offline, by its step"
    rows = {}
    fix_wandb()  # also for a Learner without our callbacks
    with wandb.init(project='test', dir='.') as run:
        send = wandb.log
        def log(row, step=None):
            if step is not None: rows.setdefault(step, {}).update(row)
            send(row, step=step)
        with override_attr(wandb, 'log', log): train()
        assert run.step == len(rows) == max(rows)+1
    return [*rows.values()]

def scalars(path, tag):
    "Steps and values that TensorBoard has of `tag`"
    board = EventAccumulator(path).Reload()
    return [(o.step, o.value) for o in (board.Scalars(tag) if tag in board.Tags()['scalars'] else [])]

class Drawn(Callback):
    "What the progress bar and its graph show"
    order,run_valid = 64,False
    def before_fit(self): self.bars,self.graphs = [],[]
    def before_train(self): self.learn.progress.mbar.update_graph = lambda graphs,*args: self.graphs.extend(graphs)
    def after_batch(self): self.bars.append([self.learn.progress.pbar.total])

class Position(Callback):
    "What a callback of this order sees after a batch"
    run_valid = False
    def __init__(self, order): self.order,self.seen = order,[]
    def after_batch(self): self.seen.append([self.learn.pct_train, self.iter, self.train_iter, len(self.dl)])

def logged(folder, bs, *cbs, n=100):
    "All that loggers show of a fit, by name; and the samples of its steps"
    board = TensorBoardCallback(folder, trace_model=bs == 16, log_preds=False)
    probes = [Position(o) for o in (-100, -9, 0, 7, 49, 61)]
    cbs = [*probes, WandbCallback(log_preds=False), board, CSVLogger('a.csv'), ShowGraphCallback(), Drawn(), *cbs]
    learn = make_learner(bs, n=n, cbs=cbs, metrics=AccumMetric(lambda p,t: (p*t).sum().float(), flatten=False))
    rows = wandb_rows(lambda: learn.fit_one_cycle(2, .1))
    rec,res = learn.recorder,{o:scalars(folder, o) for o in ('train_loss','valid_loss','lr_0')}
    res |= {f'wandb {k}':[[float(o[k])] for o in rows] for k in ('raw_loss','train_loss','epoch','lr_0')}
    res |= dict(recorder=floats(rec.values), losses=[losses(learn)], lrs=[rec.lrs], iters=[rec.iters],
                bars=learn.drawn.bars, graphs=[o for xy in learn.drawn.graphs for o in xy],
                positions=[o for probe in probes for o in probe.seen],
                csv=[o[:4] for o in learn.csv_logger.read_log().values.tolist()])
    samples = [o['accumulation_batch_size'] for o in rows if 'accumulation_batch_size' in o]
    assert samples == [v for _,v in scalars(folder, 'accumulation_batch_size')] == getattr(rec, 'accum_bs', [])
    return {k:torch.tensor([v for row in o for v in row], dtype=torch.float64) for k,o in res.items()},samples

kinds = dict(windows=(8, partial(GradientAccumulation, 32, remainder='step')),
             split=(32, partial(GradientAccumulation, micro_batch_size=8)),
             both=(16, partial(GradientAccumulation, 32, remainder='step', micro_batch_size=8)),
             schedule=(32, partial(GradientAccumulationSchedule, 32, 32, remainder='step', micro_batch_size=5)),
             cache=(32, partial(GradientCache, 8)))

@pytest.mark.parametrize('kind,log', [('windows', True), ('split', True), ('both', True), ('split', False)])
def test_all_loggers_show_the_large_batch(kind, log):
    "Recorder, W&B, TensorBoard, CSV, progress bar, graph and callbacks of any order; and the samples of each step"
    bs,accum = kinds[kind]
    (big,_),(small,samples) = logged('big', 32),logged('small', bs, accum(log_accum_batch=log))
    for k,o in big.items(): assert_same(small[k], o, 0. if k == 'positions' else 1e-6)
    assert len(big['losses']) == 8 and all(map(len, big.values())) and samples == [32, 32, 32, 4]*2*log

def test_log_accum_batch_false():
    "Each loader batch is logged, with its own loss and the window's learning rate; steps are the same"
    raw = []
    def note(self): self.training and raw.extend(map(mse, self.pred.detach().split(8), self.y.split(8)))
    big,_ = logged('big', 32, Callback(after_pred=note))
    small,samples = logged('small', 8, GradientAccumulation(32, remainder='step', log_accum_batch=False))
    assert_same(small['wandb raw_loss'], raw, 1e-6)
    for k in 'losses','wandb train_loss': assert_same(small[k], smoothed(raw), 1e-6)
    counts = torch.tensor([4, 4, 4, 1]*2)
    for k in 'lrs','wandb lr_0': assert_same(small[k], big['lrs'].repeat_interleave(counts), 1e-9)
    assert_same(small['recorder'][1::3], big['recorder'][1::3], 1e-6)  # in validation
    assert_same(small['wandb epoch'], np.arange(1, 27)/13, 1e-9)
    assert small['iters'].tolist() == [13, 26] and not samples

def test_loggers_show_the_rate_of_the_step():
    "That of `scale`, and not the one before it"
    def accum(scale): return GradientAccumulationSchedule(32, 64, start=.5, finish=.5, scale=scale)
    (plain,_),(scaled,samples) = (logged(str(o), 8, accum(o), n=96) for o in (None, dict(lr=linear_scale)))
    assert_same(scaled['lrs'], plain['lrs']*torch.tensor(samples)/32, ROUNDING)
    assert_same(scaled['wandb lr_0'], scaled['lrs'])
    assert_same(scaled['lr_0'][1::2].unique(), scaled['lrs'].unique(), 1e-6)
    assert_same(scaled['wandb epoch'], np.cumsum(samples)/96, 1e-9)
    assert samples == [32]*3 + [64, 32]

@pytest.mark.parametrize('remainder,samples,epochs', [
    ('step', [32, 32, 24]*2, [1/3, 2/3, 1, 4/3, 5/3, 2]), ('drop', [32]*4, [.5, 1, 1.5, 2]),
    ('carry', [32]*5+[16], [32/88, 1, 96/88, 128/88, 160/88, 2])])  # fastai rounds at the end of an epoch
def test_wandb_at_the_end_of_epochs(remainder, samples, epochs):
    "Positions, and samples over the time of their window"
    def slowly(self): time.sleep(.02*self.training)
    learn = make_learner(8, n=88, cbs=[WandbCallback(log_preds=False), GradientAccumulation(32, remainder=remainder)])
    rows = wandb_rows(lambda: fit(learn, 2, cbs=Callback(after_pred=slowly)))
    assert [o['accumulation_batch_size'] for o in rows] == samples
    assert_same([o['epoch'] for o in rows], epochs, 1e-9)
    assert all(100 < o['train_samples_per_sec'] < 400 for o in rows)  # 8 samples in 20 ms and a little

def test_fix_wandb_is_needed(monkeypatch):
    "From fastai 2.8.9 on. When this fails, fastai has fixed it: take `fix_wandb` out"
    fw = importlib.util.module_from_spec(spec := importlib.util.find_spec('fastai.callback.wandb'))
    spec.loader.exec_module(fw)
    monkeypatch.setitem(sys.modules, 'fastai.callback.wandb', fw)
    if Version(fastai.__version__) >= Version('2.8.9'):
        with pytest.raises(TypeError): fw._format_config_value(1)
    fix_wandb()
    assert fw._format_config_value(1) == 1

@pytest.mark.parametrize('bs,accum', [(8, GradientAccumulation(32)), (32, GradientAccumulation(micro_batch_size=8))])
def test_samples_in_the_steps_of_a_stream(bs, accum):
    "Its loader knows no more than that 43 are announced"
    class Stream(torch.utils.data.IterableDataset):
        def __len__(self): return 43
        def __iter__(self): return iter(list(zip(*data(43))))
    learn = make_learner(8, cbs=[accum, TensorBoardCallback('tb', trace_model=False, log_preds=False)])
    learn.dls = DataLoaders(torch.utils.data.DataLoader(Stream(), batch_size=bs), learn.dls.valid)
    assert sizes(fit(learn, 2)) == [32, 11]*2
    assert scalars('tb', 'accumulation_batch_size') == [*zip(range(1, 5), sizes(learn))]

# Recorder

def test_train_metrics_see_every_sample():
    def mae(pred, targ): return (pred-targ).abs().mean().float()
    def values(bs, *cbs):
        learn = make_learner(bs, cbs=[Recorder(train_metrics=True), *cbs], metrics=mae)
        return floats(fit(learn, 2, 0.).recorder.values)
    for bs,accum in kinds.values(): assert_same(values(bs, accum()), values(32), 1e-6)
    assert len(values(32)[0]) == 4

def test_an_epoch_without_a_window():
    "To fastai it is one without a batch"
    learn = fit(make_learner(8, n=24, cbs=GradientAccumulation(48, remainder='carry')))
    first,*trained = [o[0] for o in learn.recorder.values]
    assert math.isnan(first) and trained == losses(learn) and not np.isnan(trained).any() and sizes(learn) == [48, 24]

def test_a_skipped_window_is_not_logged():
    "As if its samples were not there"
    def spoil(self):
        if self.training and self.x[0,0] == data(112)[0][40,0]: self.learn.pred = self.pred*math.nan
    accum = GradientAccumulation(32, skip_nonfinite=True, remainder='step')
    learn,plain = make_learner(8, n=112, cbs=[accum, WandbCallback(log_preds=False)]),make_learner(32, n=112)
    with pytest.warns(match='skipped'): rows = wandb_rows(lambda: fit(learn, 2, cbs=Callback(after_pred=spoil)))
    samples = [o for i,o in enumerate(plain.dls.train.dataset) if not 32 <= i < 64]
    plain.dls = DataLoaders(DataLoader(samples, bs=32), plain.dls.valid)
    fit(plain, 2)
    assert sizes(learn) == [o['accumulation_batch_size'] for o in rows] == [32, 32, 16]*2 and accum.n_skipped == 2
    assert_same(losses(learn), losses(plain), 1e-6)
    assert_same(weights(learn), weights(plain), ROUNDING)

def test_plot_accum_bs():
    "Of the last fit, if that has recorded any"
    learn = make_learner(8, cbs=GradientAccumulation(32))
    with pytest.raises(ValueError, match='has no batch sizes: fit'): learn.recorder.plot_accum_bs()
    ax = fit(learn, 1).recorder.plot_accum_bs()
    assert [[*o] for o in ax.patches[0].get_data()[:2]] == [[32]*3, [*range(4)]] and 'step' in ax.get_xlabel()
    learn.remove_cb(GradientAccumulation)
    for cbs in [], GradientAccumulation(32, log_accum_batch=False):
        with pytest.raises(ValueError, match='log_accum_batch=True'): fit(learn, 1, cbs=cbs).recorder.plot_accum_bs()

# lr_find

@pytest.mark.parametrize('n,drop_last', [(96, False), (100, False), (100, True), (32, False)])
@pytest.mark.parametrize('kind', kinds)
def test_lr_find_is_the_large_batchs(kind, n, drop_last):
    "Rates, losses, suggestion and length; and weights are put back"
    def find(bs, *cbs):
        learn = make_learner(bs, n=n, cbs=cbs, drop_last=drop_last)
        with learn.no_bar(): found = learn.lr_find(num_it=40, stop_div=False, show_plot=False)
        assert_same(weights(learn), weights(model()))
        return [found.valley, learn.n_epoch, *learn.recorder.lrs],torch.tensor(losses(learn)).log()
    bs,accum = kinds[kind]
    (big,loss),(small,loss_) = find(32),find(bs, accum())
    assert_same(small, big)
    assert_same(loss_, loss, 1e-4)  # in float32, of losses that grow
    assert len(loss) == 40

def few(learn): return 0 if learn.x[0,0] == data(44)[0][8,0] else 8

@pytest.mark.parametrize('accum', [GradientAccumulation(16, remainder='carry'), GradientAccumulation(8, num_items=few)])
def test_lr_find_gives_all_points(accum):
    "Whatever the epoch, and where a window has no items"
    learn = make_learner(8, n=44, cbs=accum)
    with learn.no_bar(): learn.lr_find(num_it=20, stop_div=False, show_plot=False)
    assert_same(learn.recorder.lrs, [SchedExp(1e-7, 10)(i/20) for i in range(20)], 1e-9)
    assert len(losses(learn)) == 20
