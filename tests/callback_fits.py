"Fits beside other people's callbacks: one in windows and one with the large batch, which have to leave the same behind"
from dataclasses import dataclass
from typing import NamedTuple

from common import *

FLOAT32 = 2e-6  # the Recorder averages losses in float32
ORDERS = [-20, 0, 8, 55, 90]  # of callbacks: from 50 on, the Recorder's, they see windows
N_EPOCH = 2
N_VALID = 2  # batches in validation
LARGE = 32  # samples in a window; of a schedule, in its largest ones
SCHEDULE = {0: 8, .3: 32, .7: 24}  # samples in a window from each fraction of training on
CANCELLED = [*CANCELS, CancelStepException, CancelValidException]


# How windows are made up

def scheduled_size(pct):
    "Returns the samples of a window that begins at this fraction of training"
    return [size for start, size in SCHEDULE.items() if pct >= start-1e-9][-1]


class Layout(NamedTuple):
    "Two epochs of `n` samples in loader batches of `bs`; the model sees at most `micro_bs` samples at a time"
    make_cb: Callable
    bs: int
    n: int
    micro_bs: int
    remainder: str = 'step'
    drop_last: bool = False
    size: int|Callable = LARGE  # of a window

    @property
    def is_constant(self): return not callable(self.size)

    @property
    def n_used(self):
        "Samples of an epoch that the loader yields"
        return self.n//self.bs*self.bs if self.drop_last else self.n

    @property
    def batch_sizes(self): return [min(self.bs, self.n_used-i) for i in range(0, self.n_used, self.bs)]

    @property
    def n_batches(self): return len(self.batch_sizes)

    @property
    def n_micro(self): return sum(math.ceil(o/self.micro_bs) for o in self.batch_sizes)

    def epochs(self):
        "Returns the windows that end in each epoch, each as its samples"
        res = [[] for _ in range(N_EPOCH)]
        n_seen = 0
        for samples, _ in windows(self.n, self.bs, self.size, self.remainder, N_EPOCH, self.drop_last):
            n_seen += len(samples)
            epoch = (n_seen-1)//self.n_used
            res[epoch].append(samples)
        return res


accumulation = partial(GradientAccumulation, LARGE)
scheduled = partial(GradientAccumulationSchedule, **SchedSteps(SCHEDULE))
LAYOUTS = dict(
    whole=Layout(accumulation, bs=8, n=96, micro_bs=8),
    ragged=Layout(accumulation, bs=8, n=100, micro_bs=8),
    dropped=Layout(accumulation, bs=8, n=100, micro_bs=8, remainder='drop', drop_last=True),
    split=Layout(partial(GradientAccumulation, micro_batch_size=8), bs=32, n=100, micro_bs=8),
    both=Layout(partial(accumulation, micro_batch_size=5), bs=16, n=88, micro_bs=5),
    carry=Layout(scheduled, bs=8, n=88, micro_bs=8, remainder='carry', size=scheduled_size),
    step=Layout(partial(scheduled, remainder='step'), bs=8, n=88, micro_bs=8, size=scheduled_size))
CONSTANT = [name for name, layout in LAYOUTS.items() if layout.is_constant]


# Callbacks

class At(Callback):
    "Calls `f(self)` at `event`, in training only; keeps `rows` of what it notes"
    run_valid = False
    def __init__(self, event, f, order=0):
        self.order = order
        self.rows = []
        setattr(self, event, partial(f, self))


def rates_used():
    "Returns a callback that notes the learning rates of each step"
    def note(self): self.rows.append([h['lr'] for h in self.opt.hypers])
    return At('before_step', note, order=1000)


def count_by_samples(n):
    "Returns callbacks that let a plain Learner measure its position in samples, as if its batches differed in size"
    seen = []
    def begin(self): self.learn.pct_train = sum(seen)/(N_EPOCH*n)
    def advance(self):
        seen.append(len(self.x))
        fastais_increment = 1/(self.n_iter*self.n_epoch)  # comes next
        self.learn.pct_train = sum(seen)/(N_EPOCH*n)-fastais_increment
    return [At('before_train', begin, order=12), At('after_batch', advance, order=-30)]


# Fits

class Scaled(nn.Sequential):
    "Multiplies its output by a number that callbacks may change"
    scale = 1.
    def forward(self, x): return super().forward(x)*self.scale


@dataclass
class Run:
    "A fit that is over"
    learn: Learner
    others: list  # other people's callbacks
    first_weights: Tensor
    error: type|None = None  # that came out of it

    @property
    def recorder(self): return self.learn.recorder

    def has_moved(self):
        difference = weights(self.learn)-self.first_weights
        return bool(difference.abs().max() > 1e-3)


def new_learner(layout, is_large, make_args):
    "Returns a Learner without our callback; `make_args` returns arguments for it"
    args = dict(m=Scaled(*model()), opt_func=partial(SGD, mom=.5))
    args.update(make_args())
    bs = LARGE if is_large else layout.bs
    learn = make_learner(bs, n=layout.n, drop_last=layout.drop_last, **args)
    if is_large and not layout.is_constant: use_batches(learn, layout.epochs())
    return learn


def run(layout, make_others, is_large=False, in_fit=False, make_args=dict, lr=.1, method='fit', **cb_args):
    """Trains for two epochs beside the callbacks that `make_others` returns: in windows, by our callback with
    `cb_args`, or with the large batch. The others are callbacks of the Learner, or those of the fit"""
    layout = LAYOUTS[layout]
    torch.manual_seed(1)
    others = list(L(make_others()))
    if not is_large: own = [layout.make_cb(**cb_args)]
    elif layout.is_constant: own = []
    else: own = count_by_samples(layout.n)
    learn = new_learner(layout, is_large, make_args)
    learn.add_cbs(own if in_fit else [*others, *own])
    res = Run(learn, others, weights(learn))
    try: fit(learn, N_EPOCH, lr, method, cbs=others if in_fit else None)
    except tuple(CANCELLED) as e: res.error = type(e)
    return res


def fit_both(layout, make_others, tol=ROUNDING, moves=True, **kwargs):
    """Returns the fit in windows and the one with the large batch, which have left the same behind. `moves`: whether
    the weights have moved, None if they may have"""
    small = run(layout, make_others, **kwargs)
    big = run(layout, make_others, is_large=True, **kwargs)
    rate_tol = 0. if LAYOUTS[layout].is_constant else ROUNDING  # the position of a schedule goes by samples
    assert_same_fit(small, big, tol, rate_tol)
    if moves is not None: assert big.has_moved() == moves
    return small, big


# Comparisons

def flat(rows):
    "Returns all numbers of `rows` in one list"
    res = []
    for row in rows: res += [float(o) for o in row if o is not None]
    return res


def hypers(learn):
    "Returns all hyper-parameters in one list"
    return flat(o.values() for o in learn.opt.hypers)


def rows_of(cb): return getattr(cb, 'rows', [])


def assert_same_fit(small, big, tol=ROUNDING, rate_tol=0.):
    "Asserts the same error, weights, log, hyper-parameters, and rows that the other callbacks have noted"
    assert small.error is big.error
    assert_same_weights(small.learn, big.learn, tol)
    assert_same(hypers(small.learn), hypers(big.learn), rate_tol)
    assert_same_log(small.recorder, big.recorder, rate_tol)
    for a, b in zip(small.others, big.others, strict=True):
        lengths = [len(row) for row in rows_of(a)]
        assert lengths == [len(row) for row in rows_of(b)]
        assert_same(flat(rows_of(a)), flat(rows_of(b)), FLOAT32)


def assert_same_log(a, b, rate_tol):
    "Asserts that two Recorders have logged the same"
    assert a.iters == b.iters
    assert_same(a.lrs, b.lrs, rate_tol)
    assert_same(flat([a.losses]), flat([b.losses]), FLOAT32)
    assert_same(flat(a.values), flat(b.values), FLOAT32)
