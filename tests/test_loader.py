"The training DataLoader in windows: what callbacks find in it, what it holds, and for how long"
import gc, weakref

import pytest

from common import *

remainders = 'step','carry','drop'

def stopping(exc):
    def stop(self):
        if self.epoch == 1 and self.training: raise exc
    return Callback(after_step=stop)

@pytest.mark.parametrize('exc', [None, KeyboardInterrupt, CancelTrainException])
@pytest.mark.parametrize('remainder', remainders)
def test_workers_end_with_their_epoch(remainder, exc):
    "Without the garbage collector: the workers of a loader that is forgotten in a cycle take seconds to end"
    samples,left = list(zip(*data(40))),[]
    def count(self): left.append(len(multiprocessing.active_children()))
    dls = DataLoaders(DataLoader(samples, bs=8, num_workers=1), DataLoader(samples[:8], bs=8))
    learn = Learner(dls, model(), mse, opt_func=SGD, cbs=GradientAccumulation(32, remainder=remainder))
    gc.disable()
    try: fit(learn, 2, cbs=[Callback(after_epoch=count), *([stopping(exc)] if exc else [])])
    except KeyboardInterrupt: pass
    finally: gc.enable()
    count(None)
    assert len(left) == 3-(exc is KeyboardInterrupt) and not any(left) and learn.gradient_accumulation.opt_steps >= 2

@pytest.mark.parametrize('remainder', remainders)
def test_batches_are_let_go(remainder):
    "Also those that the epoch before has carried"
    learn,batches,alive = make_learner(8, n=88, cbs=GradientAccumulation(48, remainder=remainder)),[],[]
    def keep(b):
        batches.append(weakref.ref(b[0]))
        return b
    def count(self=None): alive.append(sum(o() is not None for o in batches))
    learn.dls.train.after_batch = keep
    fit(learn, 2, cbs=Callback(after_batch=lambda self: count() if self.epoch == 1 and self.training else None))
    gc.collect()
    count()
    assert len(batches) == (12 if remainder == 'drop' else 22) and alive[-1] == 0 and max(alive[1:]) <= 3

@pytest.mark.parametrize('event', ['before_train','after_train'])
@pytest.mark.parametrize('remainder', remainders)
def test_a_callback_looks_at_the_data(remainder, event):
    "Before and after training it finds the loader batches of the whole epoch, and the fit is as ever"
    def learner(*cbs): return make_learner(8, n=112, cbs=[GradientAccumulation(32, remainder=remainder), *cbs])
    seen = []
    a,b = fit(learner(), 2),fit(learner(Callback(**{event:lambda self: seen.append(sum(len(o[0]) for o in self.learn.dl))})), 2)
    assert seen == [112]*2
    assert_same(weights(a), weights(b))
    assert a.recorder.accum_bs == b.recorder.accum_bs and sum(a.recorder.accum_bs) == (192 if remainder == 'drop' else 224)

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self): return zip(*data(88))

@pytest.mark.parametrize('announced', [88, 104])
def test_the_length_of_a_stream_is_only_announced(announced):
    "fastai's DataLoader takes it as `n`"
    dl = DataLoader(Stream(), bs=8, n=announced)
    learn = Learner(DataLoaders(dl, dl), model(), mse, opt_func=SGD, cbs=GradientAccumulation(32, remainder='carry'))
    fit(learn, 3)
    assert learn.recorder.accum_bs == [32]*8 + [8]

def test_a_second_set_is_validated_in_a_fit():
    "It is no new fit: batches are carried on, and counters go on"
    def learner(*cbs): return make_learner(8, n=88, cbs=[GradientAccumulation(32, remainder='carry'), *cbs])
    a = fit(learner())
    for f in lambda self: self.learn.validate(dl=self.dls.valid), lambda self: self.learn.get_preds(ds_idx=1):
        seen = []
        b = fit(learner(Callback(after_train=f), Callback(after_step=lambda self: seen.append(self.gradient_accumulation.runner.window.samples))))
        assert seen == a.recorder.accum_bs == [32]*8 + [8] and b.gradient_accumulation.opt_steps == 9
        assert_same(weights(a), weights(b))

class Bar(GetAttr):
    "Such as a progress bar around a DataLoader"
    _default = 'dl'
    def __init__(self, dl): self.dl = dl
    def __len__(self): return len(self.dl)
    def __iter__(self): yield from self.dl

@pytest.mark.parametrize('order', [0, 60])
def test_a_callback_that_replaces_the_loader(order, recwarn):
    "Before the windows it is part of the data; after them nothing can be accumulated, and a warning says so"
    def wrap(self): self.learn.dl = Bar(self.learn.dl)
    cb = Callback(before_train=wrap)
    cb.order = order
    learn = fit(make_learner(8, cbs=[GradientAccumulation(32), cb]))
    says = [str(o.message) for o in recwarn if 'has replaced learn.dl' in str(o.message)]
    assert (len(losses(learn)), len(says)) == ((9, 0) if order == 0 else (36, 1))
    if says: assert 'with an order below 12' in says[0]
