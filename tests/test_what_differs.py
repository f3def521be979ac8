"""Where small batches cannot be one large batch: layers that normalize over a batch, and whatever draws random numbers.

Dropout and augmentation of each sample have the same distribution; fastai's applications, with all of that, have the
same schedule and learn; and where nothing normalizes or draws, or where a whole batch is split, weights are the same,
too"""
import pytest
from fastai.callback.mixup import MixUp
from fastai.callback.training import BnFreeze
from fastai.text.all import (AWD_LSTM, TextBlock, awd_lstm_clas_config, awd_lstm_lm_config, language_model_learner,
                             text_classifier_learner)
from fastai.vision.all import (CategoryBlock, ImageBlock, PILImage, RandomErasing, Resize, TensorImage, aug_transforms,
                               vision_learner)
from sklearn.datasets import load_digits

from common import *


# Layers that normalize

def transfer_model(norm):
    "Returns a body with BatchNorm and a head with a layer `norm`"
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8))
    head = nn.Sequential(norm(8), nn.Tanh(), nn.Linear(8, 1))
    return nn.Sequential(body, head).double()


def transfer_fit(bs, *cbs, norm=nn.LayerNorm, train_bn=False, freeze_to=-1):
    "Trains with BnFreeze; by default the body is frozen with its BatchNorm"
    def body_and_head(m): return [params(m[0]), params(m[1])]
    m = transfer_model(norm)
    learn = make_learner(bs, m=m, cbs=[BnFreeze(), *cbs], train_bn=train_bn, splitter=body_and_head)
    learn.freeze_to(freeze_to)
    return fit(learn, 2)


def test_a_frozen_batchnorm_is_exact():
    "BnFreeze lets it use the statistics of pretraining, if `train_bn=False` has frozen its weights"
    large = transfer_fit(32)
    small = transfer_fit(8, GradientAccumulation(32))
    assert_apart(large, transfer_model(nn.LayerNorm))
    assert_same_weights(small, large, ROUNDING)


@pytest.mark.parametrize('kwargs', [
    dict(train_bn=True),
    dict(freeze_to=0),
    dict(norm=nn.BatchNorm1d)])
def test_a_batchnorm_that_trains_is_not(kwargs):
    "In a frozen body whose BatchNorm trains, in one that is not frozen, or in the head"
    large = transfer_fit(32, **kwargs)
    small = transfer_fit(8, GradientAccumulation(32), **kwargs)
    assert_apart(small, large, least=1e-4)


# Random numbers

class KeepsFirstGradient(Callback):
    "Keeps the gradient of the first step of each fit, and ends the fit before it is taken"
    order = 20
    def __init__(self):
        self.gradients = []

    def before_step(self):
        of_layers = [grad.flatten() for grad in grads(self.learn)]
        self.gradients.append(torch.cat(of_layers))
        self.opt.zero_grad()
        raise CancelFitException


def gradients_of(make, bs, n_seeds, *cbs):
    "Returns the gradient of the first step, a row for each seed, of the Learner that `make(bs, cbs)` returns"
    keeps = KeepsFirstGradient()
    learn = make(bs, [keeps, *cbs])
    for seed in range(n_seeds):
        torch.manual_seed(seed)
        random.seed(seed)
        fit(learn, 1)
    return torch.stack(keeps.gradients)


def relative_variance(small, large):
    "Returns the variance of the rows of `small` over that of `large`"
    return small.var(0).sum()/large.var(0).sum()


def assert_same_distribution(small, large):
    "Asserts that means and variances are the same, as far as so many draws can tell, while single draws differ"
    standard_error = ((small.var(0)+large.var(0))/len(small)).sqrt()
    difference = (small.mean(0)-large.mean(0)).abs()
    assert (difference <= 5*standard_error+1e-12).all()
    assert 0.8 < relative_variance(small, large) < 1.25
    assert_apart(small[0], large[0])


def learner_with_dropout(bs, cbs):
    torch.manual_seed(0)
    m = nn.Sequential(
        nn.Dropout(0.2),
        nn.Linear(5, 8),
        nn.Dropout(0.5),
        nn.Tanh(),
        nn.Linear(8, 1))
    return make_learner(bs, n=32, m=m.double(), cbs=cbs)


def learner_of_images(tfms, bs, cbs):
    "Transforms batches of images at random, as fastai's loaders do"
    torch.manual_seed(0)
    samples = list(zip(torch.rand(32, 3, 6, 6), torch.randn(32, 1)))
    pipeline = Pipeline(tfms, split_idx=0)
    def transform(batch):
        images, targets = batch
        return pipeline(TensorImage(images)), targets
    train = DataLoader(samples, bs=bs, after_batch=transform)
    valid = DataLoader(samples[:8], bs=8)
    m = nn.Sequential(nn.Flatten(), nn.Linear(108, 1))
    return Learner(DataLoaders(train, valid), m, MSELossFlat(), opt_func=SGD, cbs=cbs)


@pytest.mark.long
@pytest.mark.parametrize('make', [learner_with_dropout, partial(learner_of_images, aug_transforms(max_warp=0.))])
def test_dropout_and_augmentation_of_each_sample_have_the_same_distribution(make):
    large = gradients_of(make, 32, 100)
    small = gradients_of(make, 8, 100, GradientAccumulation(32))
    assert_same_distribution(small, large)


@pytest.mark.long
def test_augmentation_that_draws_once_a_batch_varies_less():
    "RandomErasing does: the mean of four draws varies less than one draw"
    make = partial(learner_of_images, [RandomErasing(p=1.)])
    large = gradients_of(make, 32, 50)
    small = gradients_of(make, 8, 50, GradientAccumulation(32))
    assert 0.1 < relative_variance(small, large) < 0.5


class CountsOwnPartners(Callback):
    "Notes which share of samples MixUp has mixed with themselves"
    order = MixUp.order+1
    run_valid = False
    def __init__(self):
        self.shares = []

    def before_batch(self):
        partners = self.mix_up.yb1[0]
        is_own = partners == self.y
        self.shares.append(is_own.float().mean().item())


def share_of_own_partners(bs, *cbs):
    torch.manual_seed(0)
    counts = CountsOwnPartners()
    cbs = [MixUp(), counts, *cbs]
    learn = make_learner(bs, n=1600, m=model().float(), loss_func=MSELossFlat(), cbs=cbs)
    fit(learn, 1)
    return np.mean(counts.shares)


@pytest.mark.long
def test_mixup_mixes_within_the_loader_batch():
    "There one sample in 8 is its own partner. A GradientCache splits the batch after it was mixed: one in 32"
    assert abs(share_of_own_partners(8, GradientAccumulation(32))-1/8) < 0.02
    assert abs(share_of_own_partners(32)-1/32) < 0.01
    assert abs(share_of_own_partners(32, GradientCache(8))-1/32) < 0.01


# Applications as they come: augmentation, dropout, BatchNorm, in random order, incomplete batches dropped

FLOAT32_WEIGHTS = 5e-6


def train_as_it_comes(make, bs, method, n_epoch, lr, *cbs):
    "Trains the Learner that `make(bs, cbs)` returns, with all random generators at a seed"
    set_seed(0)  # Python's, too: fastai's loaders and augmentation draw from it
    learn = make(bs, list(cbs))
    before = weights(learn)
    fit(learn, n_epoch, lr, method)
    assert_apart(learn, before)
    return learn


def assert_same_schedule(small, large):
    "Asserts the same steps, rates and momenta, and values of epochs"
    assert len(losses(small)) == len(losses(large)) > 3
    for name in ('lr', 'mom'): assert_same(small.recorder.hps[name], large.recorder.hps[name])
    n_values = [len(row) for row in small.recorder.values]
    assert n_values == [len(row) for row in large.recorder.values]


def assert_learned(learn):
    assert losses(learn)[-1] < losses(learn)[0]


def seeded(make, *args, **kwargs):
    torch.manual_seed(0)
    return make(*args, metrics=accuracy, **kwargs)


def learner_of_digits(bs, cbs, augments=False, **kwargs):
    "Returns a small convnext for 150 pictures, with fastai's augmentation or none"
    digits = load_digits()
    def image_at(i):
        grey = digits.images[i]*15
        return PILImage.create(np.stack([grey, grey, grey], -1).astype(np.uint8))
    tfms = aug_transforms(do_flip=False) if augments else []
    block = DataBlock((ImageBlock, CategoryBlock), get_x=image_at, get_y=lambda i: digits.target[i]//5,
                      item_tfms=Resize(32), batch_tfms=tfms, splitter=IndexSplitter(range(150, 200)))
    dls = block.dataloaders(list(range(200)), bs=bs, num_workers=0)
    tiny = dict(pretrained=False, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))
    return seeded(vision_learner, dls, 'convnext_atto', cbs=cbs, **tiny, **kwargs)


# Neither BatchNorm nor dropout
learner_with_plain_head = partial(learner_of_digits, lin_ftrs=[], first_bn=False, ps=0., opt_func=SGD)


@pytest.mark.long
@pytest.mark.parametrize('augments, bs, settings', [
    (False, 8, dict(accum_bs=32)),
    (True, 32, dict(micro_batch_size=7))])
def test_a_vision_learner_where_nothing_is_drawn_or_whose_batches_are_split(augments, bs, settings):
    "Augmentation and MixUp have drawn for the whole batch before it is split"
    def train(bs, *cbs):
        make = partial(learner_with_plain_head, augments=augments)
        mixes = [MixUp()] if augments else []
        return train_as_it_comes(make, bs, 'fine_tune', 2, 0.1, *mixes, *cbs)
    large = train(32)
    small = train(bs, GradientAccumulation(**settings))
    assert_same_schedule(small, large)
    assert_same_weights(small, large, FLOAT32_WEIGHTS)


LM_CONFIG = merge(awd_lstm_lm_config, dict(emb_sz=8, n_hid=12, n_layers=2))
CLASSIFIER_CONFIG = {name: LM_CONFIG[name] for name in awd_lstm_clas_config if name in LM_CONFIG}
WORDS = 'a learner has data a model and a loss each batch goes through the model once its loss is a mean'.split()


def texts():
    "Returns 130 texts of 5 to 29 words, and as a label whether they are of a loss"
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(130):
        words = rng.choice(WORDS, rng.integers(5, 30))
        rows.append((' '.join(words), 'yes' if 'loss' in words else 'no'))
    return pd.DataFrame(rows, columns=['text', 'label'])


def loaders_of_texts(bs, is_lm=False):
    text_block = TextBlock.from_df('text', is_lm=is_lm, seq_len=8, min_freq=1, n_workers=0)
    blocks = [text_block] if is_lm else [text_block, CategoryBlock]
    get_y = None if is_lm else ColReader('label')
    block = DataBlock(blocks, get_x=ColReader('text'), get_y=get_y, splitter=RandomSplitter(0.2, seed=0))
    return block.dataloaders(texts(), bs=bs, num_workers=0)


def language_learner(bs, cbs):
    dls = loaders_of_texts(bs, is_lm=True)
    return seeded(language_model_learner, dls, AWD_LSTM, config=LM_CONFIG, pretrained=False, drop_mult=0.3, cbs=cbs)


def classifier(bs, cbs):
    dls = loaders_of_texts(bs)
    kwargs = dict(config=CLASSIFIER_CONFIG, pretrained=False, drop_mult=0.3, cbs=cbs)
    return seeded(text_classifier_learner, dls, AWD_LSTM, **kwargs)


@pytest.mark.long
@pytest.mark.parametrize('make, n_epoch', [(language_learner, 1), (classifier, 6)])
def test_a_text_learner_as_it_comes(make, n_epoch):
    "A language model carries its state from batch to batch, so a large batch also reads other text"
    large = train_as_it_comes(make, 16, 'fit_one_cycle', n_epoch, 0.01)
    small = train_as_it_comes(make, 4, 'fit_one_cycle', n_epoch, 0.01, GradientAccumulation(16))
    assert_same_schedule(small, large)
    assert_learned(small)
    assert_learned(large)
    assert_apart(small, large, least=1e-4)


def order_of_texts(bs):
    "Returns the training texts in the order of the loader, as numbers of words without padding"
    set_seed(0)
    res = []
    for inputs, _ in loaders_of_texts(bs).train:
        for text in inputs:
            words = text[text != 1]
            res.append(words.tolist())
    return res


@pytest.mark.long
def test_the_order_of_texts_depends_on_the_batch_size():
    "fastai's loader sorts them by length"
    large = order_of_texts(32)
    small = order_of_texts(8)
    assert len(small) >= len(large) > 60
    assert small[:len(large)] != large
