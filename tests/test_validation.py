"Validation and prediction in micro-batches are those of whole batches (memory/micro_batches.py, memory/auto.py)"
import pytest

from common import *
from comparing import assert_nothing_left
from fastxtend_accum.memory.micro_batches import MicroBatches, SplitLoader
from limited_memory import MemoryLimit
from small_learners import classifier, image_learner, over_all, seeded, spread


def split(n): return GradientAccumulation(micro_batch_size=n)


each_saver = pytest.mark.parametrize('saver', [split, GradientCache])


class Elementwise(nn.Module):
    "Its arithmetic is the same for any number of samples"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(2, 5))

    def forward(self, x):
        factor, shift = self.scale
        return (x.float()*factor+shift).tanh().cumsum(1)[:, -1:]


def spread_mse(pred, targ, reduction='mean'):
    "A loss of the whole batch: over micro-batches, it would be another one"
    return F.mse_loss(pred, targ.float(), reduction=reduction)*pred.std()


def validated(learn, **kwargs):
    with quiet(learn): return list(learn.validate(**kwargs))


def predicted(learn):
    "Returns inputs, predictions and targets of both loaders, and of a batch"
    res = []
    with quiet(learn):
        for dl in (*learn.dls, [learn.dls.valid.one_batch()]):
            res += learn.get_preds(dl=dl, with_input=True, act=noop)
    return res


def limited_elementwise(limit, *cbs):
    m = nn.Sequential(Elementwise())
    memory = MemoryLimit(m[0], limit)
    learn = make_learner(32, m=m, loss_func=spread_mse, metrics=[spread, over_all()], cbs=cbs)
    return learn, memory


@pytest.mark.parametrize('saver,micro,limit,sizes', [
    (split, 8, math.inf, [8, 8, 4]),
    (split, 'auto', math.inf, [16, 4]),
    (split, 'auto', 9, [16, 8, 8, 4]),
    (GradientCache, 'auto', 9, [16, 8, 8, 4])])
def test_validation_and_prediction_are_those_of_whole_batches(saver, micro, limit, sizes):
    "Bit for bit: a loss of the whole batch, metrics, inputs, predictions and targets"
    plain, _ = limited_elementwise(math.inf)
    ours, memory = limited_elementwise(limit, saver(micro))
    expected = validated(plain)+predicted(plain)
    seen = validated(ours)
    assert memory.in_validation == sizes
    seen += predicted(ours)
    assert_nothing_left(ours)
    assert len(expected) == 3+9
    for a, b in zip(seen, expected, strict=True): assert_same(as_tensor(a), as_tensor(b))


@pytest.mark.filterwarnings('ignore:accumulation is not exact')
@each_saver
def test_validation_within_a_fit_is_that_of_whole_batches(saver):
    "With a rate of 0, since over micro-batches the loss is another one in training"
    plain, _ = limited_elementwise(math.inf)
    ours, _ = limited_elementwise(math.inf, saver(8))
    _, *expected = floats(fit(plain, 1, lr=0.).recorder.values)[0]
    _, *seen = floats(fit(ours, 1, lr=0.).recorder.values)[0]
    assert len(expected) == 3
    assert_same(seen, expected)
    assert_nothing_left(ours)


class Interrupts(nn.Module):
    "Is interrupted in its `nth` pass in validation"
    def __init__(self, nth):
        super().__init__()
        self.nth = nth

    def forward(self, x):
        if not self.training: self.nth -= 1
        if not self.nth: raise KeyboardInterrupt
        return x


@pytest.mark.parametrize('method,args', [
    ('validate', ()),
    ('get_preds', ()),
    ('fit', (1,))])
@pytest.mark.parametrize('saver,micro,nth', [
    (split, 8, 2),
    (split, 'auto', 1),
    (GradientCache, 8, 2)])
def test_an_interrupt_in_validation_leaves_nothing(saver, micro, nth, method, args):
    "Not even while the error is kept, as in a notebook"
    saver = saver(micro)
    learn = image_learner(saver)
    learn.model.append(Interrupts(nth))
    with quiet(learn), pytest.raises(KeyboardInterrupt) as kept: getattr(learn, method)(*args)
    assert_nothing_left(learn)
    assert kept.value.__traceback__
    learn.remove_cb(saver)
    learn.model = classifier()
    learn.opt = None
    assert_same(weights(seeded(learn, 1)), weights(seeded(image_learner(), 1)))


def test_a_loader_whose_batches_are_split_is_the_loader_to_others():
    "In a copy of the Learner there is none, since an iterator cannot be copied"
    dl = make_learner(16).dls.valid
    split_loader = SplitLoader(dl, model(), MicroBatches(4))
    assert len(split_loader) == len(dl) == 2
    assert split_loader.bs == dl.bs
    assert deepcopy(split_loader) is None
    inputs, _ = zip(*split_loader)
    expected, _ = zip(*dl)
    assert_same(torch.cat(inputs), torch.cat(expected))


# Forward passes with keyword arguments alone

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Elementwise()

    def forward(self, x): return self.inner(x)


class CallsPartByName(Whole):
    "GradientCache splits a part of it"
    def __init__(self):
        super().__init__()
        self.part = Whole()
        self.inner = self.part.inner

    def forward(self, x): return self.part(x=x)


class CallsItselfByName(Whole):
    "Takes the batch apart, as models do that are made for batches of Transformers"
    def __call__(self, x): return super().__call__(x=x)


class CallsWithSettings(Whole):
    "Its first argument has no samples"
    def __call__(self, x): return super().__call__(scale=2, inputs=dict(x=x))
    def forward(self, scale, inputs): return self.inner(inputs['x'])*scale


def cache_of_part(n): return GradientCache(n, part=lambda m: m.part)


@pytest.mark.parametrize('micro,limit,sizes', [
    (8, math.inf, [8, 8, 4]),
    ('auto', 9, [16, 8, 8, 4])])
@pytest.mark.parametrize('make_model,saver', [
    (CallsPartByName, cache_of_part),
    (CallsItselfByName, split),
    (CallsWithSettings, split)])
def test_validation_is_split_if_a_forward_pass_gets_keyword_arguments_alone(make_model, saver, micro, limit, sizes):
    plain = validated(make_learner(32, m=make_model(), loss_func=spread_mse))
    m = make_model()
    memory = MemoryLimit(m.inner, limit)
    assert_same(validated(make_learner(32, m=m, loss_func=spread_mse, cbs=saver(micro))), plain)
    assert memory.in_validation == sizes


# Outputs that cannot be joined in validation

class ReturnsSum(nn.Module):
    "In validation, it returns the sum over the batch beside its output until that is repaired"
    def __init__(self):
        super().__init__()
        self.inner = Elementwise()
        self.is_repaired = False

    def forward(self, x):
        res = self.inner(x)
        if self.training or self.is_repaired: return res
        return res, res.sum()


def mse_of_output(pred, targ):
    if isinstance(pred, tuple): pred, _ = pred
    return F.mse_loss(pred, targ.float())


def repair(learn): learn.model.is_repaired = True


def replace_model(learn):
    learn.model = Whole()
    learn.opt = None


@each_saver
@pytest.mark.parametrize('make_whole_again', [repair, replace_model])
def test_validation_is_split_again_once_outputs_can_be_joined(make_whole_again, saver):
    "A warning says that they cannot, in which case whole batches run"
    learn = make_learner(32, m=ReturnsSum(), loss_func=mse_of_output, cbs=saver(8))
    memory = MemoryLimit(learn.model.inner)
    with pytest.warns(match='^validation batches are not split: cannot join outputs'): fit(learn, 1)
    assert memory.in_validation == [8, 8, 16, 4]
    make_whole_again(learn)
    memory = MemoryLimit(learn.model.inner)
    fit(learn, 1)
    assert memory.in_validation == [8, 8, 4]


@each_saver
def test_auto_splits_validation_again_once_outputs_can_be_joined(saver):
    "In the size that it had found before"
    learn = make_learner(32, m=ReturnsSum(), loss_func=mse_of_output, cbs=saver('auto'))
    memory = MemoryLimit(learn.model.inner, 9)
    with quiet(learn), pytest.warns(match='^validation batches are not split: cannot join outputs'):
        with pytest.raises(torch.OutOfMemoryError): learn.validate()
    repair(learn)
    memory.in_validation.clear()
    validated(learn)
    assert memory.in_validation == [8, 8, 4]
