"Layouts of what fastai's users have beside the loop itself: its applications, loaders, optimizers and callbacks"
from fastai.callback.data import CollectDataCallback, PartialDL, WeightedDL
from fastai.callback.hook import ActivationStats
from fastai.callback.training import BnFreeze, ShortEpochCallback
from fastai.callback.training import GradientAccumulation as FastaiAccumulation
from fastai.text.all import SortedDL
from fastai.vision.all import CategoryBlock, DataBlock, ImageBlock, RandomResizedCrop, aug_transforms

from common import *
from library_models import category, language_model, random_image
from ordinary_learners import tabular
from resume_layouts import LAYOUTS, accum, auto, layout, make, samples, schedule, train, with_valid


# Loaders

class WeighsSamples(Callback):
    "Samples that the model has not learned come more often"
    order = 70

    def after_epoch(self):
        *_, errors = self.learn.get_preds(0, with_loss=True, inner=True)
        errors = errors.double().flatten()
        self.dls.train.wgts = (errors/errors.sum()).numpy()


@layout
def weighted_samples():
    return train(WeighsSamples(), dls=with_valid(WeightedDL(samples(), bs=4, shuffle=True)), n_epoch=3)


@layout
def partial_epochs(): return train(dls=with_valid(PartialDL(samples(150), bs=4, partial_n=70)), n_epoch=3)


@layout
def short_epochs(): return train(ShortEpochCallback(.6), accum(remainder='step'), n_epoch=3)


@layout
def sorted_samples_and_gradual_unfreezing():
    learn = make(dls=with_valid(SortedDL(samples(), bs=4, shuffle=True)))
    for n_groups in (1, 2):
        learn.freeze_to(-n_groups)
        learn.fit_one_cycle(1, slice(.002, .02), cbs=auto())
    return learn


# Applications

def train_on_images(*cbs, n_workers):
    block = DataBlock(
        (ImageBlock, CategoryBlock), get_x=random_image, get_y=category, splitter=IndexSplitter(range(64, 80)),
        item_tfms=RandomResizedCrop(16), batch_tfms=aug_transforms())
    dls = block.dataloaders(range(80), bs=4, num_workers=n_workers)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(.2), nn.Linear(6, 3))
    return train(*cbs, dls=dls, m=nn.Sequential(ConvLayer(3, 6), head), loss_func=CrossEntropyLossFlat())


@layout
def images_in_workers(): return train_on_images(schedule(4, 12), n_workers=2)


@layout
def cutmix(): return train_on_images(CutMix(), accum(remainder='step'), n_workers=0)


@layout
def tables():
    with no_random(): learn = tabular()  # its split has no seed
    learn.dls.train.bs = 2
    learn.remove_cb(GradientAccumulation)
    learn.fit_one_cycle(2, .02, cbs=auto())
    return learn


@layout
def texts():
    learn = language_model(cbs=[accum()], metrics=[accuracy, Perplexity()])
    learn.fit(3, .02, cbs=auto())
    return learn


# Optimizers and losses

@layout
def ranger_and_flat_rate(): return train(accum(), opt_func=ranger, method='fit_flat_cos', n_epoch=3)


@layout
def clipped_steps_of_lamb():
    return train(GradientClip(.1), accum(12, log_accum_batch=False, remainder='step'), opt_func=Lamb, n_epoch=3)


@layout
def amsgrad():
    opt_func = partial(OptimWrapper, opt=torch.optim.AdamW, amsgrad=True)
    return train(BnFreeze(), opt_func=opt_func, lr=slice(.002, .02))


@layout
def loss_with_own_optimizer(): return train(TrainsLoss(), accum(), loss_func=CenterLoss())


@layout
def loss_of_whole_batch():
    def spread(pred, targ): return (pred-targ).std()
    return train(GradientCache(2), loss_func=spread)


@layout
def gradient_is_not_finite():
    return train(MultiplyLoss(math.nan, {4, 30}), accum(skip_nonfinite=True), n_epoch=3)


# Models

class RaisesDropout(Callback):
    def after_step(self): self.model[0][3].p += .01


@layout
def dropout_rises(): return train(RaisesDropout(), accum())


@layout
def recomputed_blocks(): return train(all_blocks(list), accum(12, remainder='carry'), n_epoch=3)


@layout
def bfloat16(): return train(CpuMixedPrecision(AMPMode.BF16), accum(micro_batch_size='auto'))


# Callbacks

class Distills(Callback):
    "The student learns what a teacher says"
    def __init__(self, teacher): self.teacher = teacher
    def before_batch(self): self.learn.yb = (self.teacher(self.x).detach(),)


@layout
def teacher_and_student(): return train(Distills(train().model), accum())


@layout
def accumulation_of_fastai(): return train(FastaiAccumulation(12), n_epoch=3)


@layout
def collected_batches(): return train(CollectDataCallback(), accum())


@layout
def statistics_of_layers(): return train(ActivationStats(), accum())


@layout
def appended_history():
    learn = make(CSVLogger(append=True), accum(remainder='step'))
    for _ in range(2): learn.fit(1, .02, cbs=auto())
    return learn


@layout
def begins_with_a_later_epoch():
    learn = make(accum())
    learn.fit_one_cycle(4, .02, start_epoch=1, cbs=auto())
    return learn
