"""The promise: accumulated batches train as one large batch does.

Each test trains with the large batch, or in plain PyTorch, and again with windows of small batches; then it compares
all that the two fits have left"""
import pytest
from hypothesis import assume, example, given, strategies as st

from common import *
from same_fit import FLOAT32, assert_same_fit


def test_four_batches_of_8_train_as_one_of_32():
    "Weights, learning rates, losses and values of epochs are those of the large batch"
    large = fit(make_learner(bs=32))
    small = fit(make_learner(bs=8, cbs=GradientAccumulation(32)))
    alone = fit(make_learner(bs=8))
    assert_moved(large)
    assert_same_fit(small, large)
    assert_apart(alone, large, least=0.01)


# fastai's own fits, with nothing switched off

METHODS = 'fit', 'fit_one_cycle', 'fit_flat_cos', 'fit_sgdr', 'fine_tune', 'fit_with_a_jump'
BEGIN_AT_EPOCH_0 = 'fine_tune', 'fit_flat_cos'  # they ignore `start_epoch`

OPT_FUNCS = dict(
    sgd=partial(SGD, mom=0.9),
    adam=Adam,
    radam=RAdam,
    adamw=partial(OptimWrapper, opt=torch.optim.AdamW),
    torch_sgd=partial(OptimWrapper, opt=torch.optim.SGD, momentum=0.9))


def two_groups(m):
    "Splits the parameters of `model()`, as transfer learning does"
    return [params(m[0]), params(m[2])]


def falls_at_half(pct):
    return 0.02 if pct < 0.5 else 0.002


def train_by(method, learn, n_epoch, start_epoch):
    "Trains by one of METHODS"
    kwargs = {} if method in BEGIN_AT_EPOCH_0 else dict(start_epoch=start_epoch)
    with quiet(learn):
        if method == 'fit_sgdr': learn.fit_sgdr(2, n_epoch, 0.01, **kwargs)
        elif method == 'fit_with_a_jump': learn.fit(n_epoch, cbs=ParamScheduler({'lr': falls_at_half}), **kwargs)
        else: getattr(learn, method)(n_epoch, 0.01, **kwargs)


@pytest.mark.filterwarnings('ignore:.*mom')  # PyTorch's optimizers know none, and fastai schedules it
@draws
@given(
    n=st.integers(2, 90),
    bs=st.integers(1, 9),
    k=st.integers(1, 5),  # loader batches in a window
    drop_last=st.booleans(),
    method=st.sampled_from(METHODS),
    opt=st.sampled_from(sorted(OPT_FUNCS)),
    n_epoch=st.integers(1, 3),
    start_epoch=st.integers(0, 1),
    wd=st.sampled_from([None, 0.01]))
def test_any_fit_is_that_of_the_large_batch(n, bs, k, drop_last, method, opt, n_epoch, start_epoch, wd):
    "Learning rates and momenta bit for bit; what is dropped follows the loader's `drop_last`"
    has_large_batches = n >= k*bs or not drop_last
    assume(has_large_batches)
    kwargs = dict(n=n, drop_last=drop_last, opt_func=OPT_FUNCS[opt], splitter=two_groups, wd=wd)
    start_epoch = min(start_epoch, n_epoch-1)
    large = make_learner(k*bs, **kwargs)
    small = make_learner(bs, cbs=GradientAccumulation(k*bs), **kwargs)
    train_by(method, large, n_epoch, start_epoch)
    train_by(method, small, n_epoch, start_epoch)
    tol = ROUNDING if k > 1 else 0.  # a window of one batch adds nothing up
    assert_same_fit(small, large, tol)
    assert_apart(large, model(), least=1e-4)
    assert small.gradient_accumulation.opt_steps == len(small.recorder.accum_bs) == len(losses(large))


@draws
@given(
    n=st.integers(2, 90),
    size=st.integers(1, 9),
    n_pieces=st.integers(1, 6),  # windows in a loader batch
    method=st.sampled_from(METHODS),
    opt=st.sampled_from(['sgd', 'adam']),
    n_epoch=st.integers(1, 3),
    log_accum_batch=st.booleans(),
    is_torch=st.booleans())
@example(  # its pieces share memory, in which they begin at other places than batches do
    n=5, size=3, n_pieces=2, method='fit', opt='adam', n_epoch=1, log_accum_batch=False, is_torch=False)
def test_any_windows_in_a_loader_batch_are_the_batches_of_a_small_loader(
        n, size, n_pieces, method, opt, n_epoch, log_accum_batch, is_torch):
    "Bit for bit: nothing adds up. The last loader batch may be incomplete"
    kwargs = dict(n=n, opt_func=OPT_FUNCS[opt], splitter=two_groups)
    bs = n_pieces*size
    small = make_learner(size, **kwargs)
    cut = make_learner(bs, cbs=GradientAccumulation(size, remainder='step', log_accum_batch=log_accum_batch), **kwargs)
    if is_torch:
        train = torch.utils.data.DataLoader(cut.dls.train.dataset, batch_size=bs)
        cut.dls = DataLoaders(train, cut.dls.valid)
    train_by(method, small, n_epoch, start_epoch=0)
    train_by(method, cut, n_epoch, start_epoch=0)
    assert_same_fit(cut, small, tol=0.)
    assert_apart(small, model(), least=1e-4)


# Windows of any shape, in plain PyTorch

TORCH_OPTS = dict(
    sgd=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    adamw=lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.01))


def constant_rate(pct):
    return 0.01  # small enough that differences by rounding do not grow


def has_steps(n, bs, k, drop_last, remainder):
    "Returns whether an epoch fills a window or, if that is all it takes, has a batch"
    n_used = n//bs*bs if drop_last else n
    n_needed = k*bs if remainder == 'drop' else 1
    return n_used >= n_needed


@draws
@given(
    n=st.integers(1, 60),
    bs=st.integers(1, 9),
    k=st.integers(1, 6),  # loader batches in a window
    n_epoch=st.integers(1, 3),
    drop_last=st.booleans(),
    remainder=st.sampled_from(['step', 'carry', 'drop']),
    log_accum_batch=st.booleans(),
    opt=st.sampled_from(sorted(TORCH_OPTS)),
    rate=st.sampled_from([constant_rate, SchedCos(0.02, 0.001)]))
def test_any_windows_are_the_batches_of_a_loop_in_pytorch(
        n, bs, k, n_epoch, drop_last, remainder, log_accum_batch, opt, rate):
    "Whatever their size, and whatever becomes of a window that the epoch does not fill"
    assume(has_steps(n, bs, k, drop_last, remainder))
    steps = windows(n, bs, k*bs, remainder, n_epoch, drop_last)
    expected, expected_losses = reference(steps, n, TORCH_OPTS[opt], rate)
    accum = GradientAccumulation(k*bs, remainder=remainder, log_accum_batch=log_accum_batch)
    learn = make_learner(bs, n=n, cbs=accum, drop_last=drop_last, opt_func=OPT_FUNCS[opt])
    fit(learn, n_epoch, cbs=ParamScheduler({'lr': rate}))
    assert_apart(learn, model())
    assert_same(weights(learn), expected, ROUNDING)
    assert accum.opt_steps == len(steps)
    assert not any(grad.any() for grad in grads(learn))
    if not log_accum_batch: return
    assert learn.recorder.accum_bs == [len(samples) for samples, _ in steps]
    assert_same(learn.recorder.lrs, [rate(pct) for _, pct in steps], ROUNDING)
    assert_same(losses(learn), smoothed(expected_losses), FLOAT32)
