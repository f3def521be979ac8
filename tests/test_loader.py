"The training DataLoader in windows: what callbacks find in it, what it holds, and for how long"
import gc, weakref

import pytest

from common import *

each_remainder = pytest.mark.parametrize('remainder', ['step','carry','drop'])
def learner(remainder, *cbs, n=88, accum=32):
    return make_learner(8, n=n, cbs=[GradientAccumulation(accum, remainder=remainder), *cbs])

@pytest.mark.parametrize('exc', [None, KeyboardInterrupt, CancelTrainException])
@each_remainder
def test_workers_end_with_their_epoch(remainder, exc):
    "Without the garbage collector, which may take seconds to come"
    left,learn = [],learner(remainder)
    def count(self): left.append(len(multiprocessing.active_children()))
    stop = Fault(exc, 'after_step', 3 if remainder == 'step' else 2, 0)  # in the second epoch
    learn.dls = DataLoaders(DataLoader(list(zip(*data(40))), bs=8, num_workers=1), learn.dls.valid)
    gc.disable()
    try: fit(learn, 2, cbs=[Callback(after_epoch=count), *[stop]*bool(exc)])
    except KeyboardInterrupt: pass
    finally: gc.enable()
    count(None)
    assert len(left) == 3-(exc is KeyboardInterrupt) and not any(left) and learn.gradient_accumulation.opt_steps >= 2

@each_remainder
def test_batches_are_let_go(remainder):
    "Also those that the epoch before has carried"
    learn,batches,alive = learner(remainder, accum=48),[],[]
    def keep(b): batches.append(weakref.ref(b[0])); return b
    def count(self=None):
        if not self or self.epoch and self.training: alive.append(sum(o() is not None for o in batches))
    learn.dls.train.after_batch = keep
    fit(learn, 2, cbs=Callback(after_batch=count))
    gc.collect()
    count()
    assert len(batches) == (12 if remainder == 'drop' else 22) and alive[-1] == 0 and max(alive[1:]) <= 3

@pytest.mark.parametrize('event', ['before_train','after_train'])
@each_remainder
def test_a_callback_looks_at_the_data(remainder, event):
    "Before and after training it finds the loader batches of the whole epoch, and the fit is as ever"
    seen = []
    def look(self): seen.append(sum(len(o[0]) for o in self.learn.dl))
    a,b = (fit(learner(remainder, *cbs, n=112), 2) for cbs in ([], [Callback(**{event:look})]))
    assert seen == [112]*2
    assert_same(weights(a), weights(b))
    assert a.recorder.accum_bs == b.recorder.accum_bs and sum(a.recorder.accum_bs) == (192 if remainder == 'drop' else 224)

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): return zip(*data(88))

@pytest.mark.parametrize('announced', [88, 104])
def test_the_length_of_a_stream_is_only_announced(announced):
    "fastai's DataLoader takes it as `n`"
    learn = learner('carry')
    learn.dls = DataLoaders(*[DataLoader(Stream(), bs=8, n=announced)]*2)
    assert fit(learn, 3).recorder.accum_bs == [32]*8 + [8]

def test_a_second_set_is_validated_in_a_fit():
    "It is no new fit: batches are carried on, and counters go on"
    a = fit(learner('carry'))
    for f in lambda self: self.learn.validate(dl=self.dls.valid), lambda self: self.learn.get_preds(ds_idx=1):
        seen = []
        def see(self): seen.append(self.gradient_accumulation.window.samples)
        b = fit(learner('carry', Callback(after_train=f, after_step=see)))
        assert seen == a.recorder.accum_bs == [32]*8 + [8] and b.gradient_accumulation.opt_steps == 9
        assert_same(weights(a), weights(b))

class Bar(GetAttr):
    "Such as a progress bar around a DataLoader"
    _default = 'dl'
    def __init__(self, dl): self.dl = dl
    def __len__(self): return len(self.dl)
    def __iter__(self): yield from self.dl

@each_remainder
@pytest.mark.parametrize('order,n_losses', [(0, 9), (60, 36)])
def test_a_callback_that_replaces_the_loader(order, n_losses, remainder, recwarn):
    "Before the windows it is part of the data; after them nothing can be accumulated, and a warning says so"
    def wrap(self): self.learn.dl = Bar(self.learn.dl)
    cb = Callback(before_train=wrap)
    cb.order = order
    assert len(losses(fit(learner(remainder, cb, n=96)))) == n_losses
    says = [o for o in recwarn if 'has replaced learn.dl' in str(o.message)]
    assert len(says) == (order > 12) and all('with an order below 12' in str(o.message) for o in says)
    assert not [o for o in recwarn if 'no optimizer step' in str(o.message)]
