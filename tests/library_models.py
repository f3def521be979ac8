"Learners of models of libraries, small and for random data"
import timm
from fastai.callback.rnn import rnn_cbs
from fastai.text.all import AWD_LSTM, LMDataLoader, awd_lstm_lm_config, get_language_model
from fastai.vision.all import (CategoryBlock, DataBlock, ImageBlock, MaskBlock, PILImage, PILMask, aug_transforms,
                               resnet18, unet_learner, vision_learner)
from fastai.vision.models.xresnet import ResBlock, XResNet

from common import *


class Residual(nn.Sequential):
    "A list of layers with a forward pass of its own"
    def forward(self, x): return x+super().forward(x)


def random_pixels(seed, n_values, *channels):
    generator = np.random.default_rng(seed)
    return generator.integers(0, n_values, (32, 32, *channels), dtype=np.uint8)


def random_image(i): return PILImage.create(random_pixels(i, 255, 3))
def random_mask(i): return PILMask.create(random_pixels(i, 3))
def category(i): return 'abc'[i%3]


def image_dls(target_block, get_target):
    "Returns 16 images to train on, and 8 to validate"
    block = DataBlock(
        (ImageBlock, target_block), get_x=random_image, get_y=get_target,
        splitter=IndexSplitter(range(16, 24)), batch_tfms=aug_transforms(size=32))
    return block.dataloaders(range(24), bs=8, num_workers=0)


def categories(): return image_dls(CategoryBlock, category)
def masks(): return image_dls(MaskBlock(codes=list('abc')), random_mask)


def resnet(**kwargs):
    return vision_learner(categories(), resnet18, pretrained=False, **kwargs)


def narrow_body(pretrained):
    return XResNet(ResBlock, 1, [1, 1, 1, 1], stem_szs=(8, 8, 64), widen=.25)


def unet(**kwargs):
    return unet_learner(masks(), narrow_body, pretrained=False, n_out=3, **kwargs)


def densenet(**kwargs):
    return Learner(categories(), timm.create_model('densenet121', num_classes=3), **kwargs)


def convnext(**kwargs):
    "With dropout and stochastic depth"
    m = timm.create_model(
        'convnext_atto', num_classes=3, drop_path_rate=.3, drop_rate=.2, depths=(2, 2, 2, 2), dims=(8, 16, 24, 32))
    return Learner(categories(), m, **kwargs)


def vit(**kwargs):
    m = timm.create_model(
        'vit_tiny_patch16_224', num_classes=3, img_size=32, patch_size=8, embed_dim=24, depth=4, num_heads=2,
        proj_drop_rate=.2)
    return Learner(categories(), m, **kwargs)


def language_model(n_layers=2, cbs=(), **kwargs):
    "With fastai's regularizers, dropout of weights, and a hidden state"
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(20, (120,), generator=generator) for _ in range(4)]
    train = LMDataLoader(texts, bs=4, seq_len=10, shuffle=False)
    valid = LMDataLoader(texts[:2], bs=4, seq_len=10, shuffle=False)
    config = awd_lstm_lm_config | dict(n_layers=n_layers, emb_sz=8, n_hid=12)
    m = get_language_model(AWD_LSTM, 20, config)
    dls = DataLoaders(train, valid)
    return Learner(dls, m, CrossEntropyLossFlat(), cbs=[*rnn_cbs(2, 1), *cbs], **kwargs)
