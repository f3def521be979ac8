"""The code that pages give for Colab, on stand-ins with the structure of the real data: nothing is downloaded. Its
models are small and have random weights"""
import random
import re

import numpy as np
import pandas as pd
import pytest
import timm
import torch
import transformers
from fastai.basics import Learner, defaults, merge
from fastai.layers import ResBlock
from fastai.text.all import awd_lstm_clas_config, text_classifier_learner
from fastai.vision.all import Image, Resize, aug_transforms, unet_learner, vision_learner
from fastai.vision.models.xresnet import XResNet
from tokenizers import Tokenizer, models, trainers

from cells import read, root, source
from fastxtend_accum.all import GradientAccumulation
from pages import copied

WORDS = 'a film that nobody who has seen it will ever forget'.split()


@pytest.fixture(autouse=True)
def in_one_process(monkeypatch):
    "To start workers takes longer than what they would do"
    monkeypatch.setattr(defaults, 'cpus', 0)


def narrow(pretrained=False):
    return XResNet(ResBlock, 1, [1, 1, 1, 1], stem_szs=(4, 4, 64), widen=.125)


def page_sources(name):
    return [source(o) for o in read(root/'nbs'/name)]


def recipe(name):
    "Returns the code that page `name` gives for Colab"
    [text] = [o for o in page_sources(name) if 'In Colab, ' in o and '```py' in o]
    return re.search(r'In Colab, .*?```py\n(.*?)```', text, re.S)[1]


def run(code, **stand_ins):
    "Runs the code of a page, with `stand_ins` in the place of what it would download; returns its variables"
    names = {}
    for library in ('fastai.vision', 'fastai.text', 'fastai.tabular', 'fastxtend_accum'):
        exec(f'from {library}.all import *', names)
    names.update(stand_ins)
    exec(code, names)
    return names


def save_image(path, size=16):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = random.randbytes(3*size*size)
    Image.frombytes('RGB', (size, size), pixels).save(path)


def small_vision_learner(dls, arch, **kwargs):
    return vision_learner(dls, narrow, pretrained=False, **kwargs)


def test_readme_trains_on_a_folder_of_classes(tmp_path):
    for i in range(330):
        label = 'cat' if i%2 else 'dog'
        save_image(tmp_path/label/f'{i}.png')
    [diff] = re.findall(r'```diff\n(.*?)```', (root/'README.md').read_text(), re.S)
    without_imports = re.sub(r'^from .*', '', copied(diff), flags=re.M)
    names = run(without_imports, path=tmp_path, vision_learner=small_vision_learner)
    assert set(names['learn'].recorder.accum_bs) == {256}


@pytest.mark.long
def test_vision(tmp_path):
    "All photographs are in one folder, and named after the breed"
    for i in range(165):
        breed = 'Abyssinian' if i%2 else 'great_pyrenees'
        save_image(tmp_path/'images'/f'{breed}_{i}.jpg')

    def small_learner(dls, arch, **kwargs):
        assert arch in timm.list_pretrained()
        return small_vision_learner(dls, arch, **kwargs)

    names = run(
        recipe('applications/00_vision.ipynb'),
        untar_data=lambda url: tmp_path,
        Resize=lambda size: Resize(size//16),
        aug_transforms=lambda size, **kwargs: aug_transforms(size=size//16, **kwargs),
        vision_learner=small_learner)
    assert [*names['dls'].vocab] == ['Abyssinian', 'great_pyrenees']
    assert set(names['learn'].recorder.accum_bs) == {128}


@pytest.mark.long
def test_text(tmp_path):
    "IMDB also has a folder of texts without labels"
    for split, label in [('train', 'pos'), ('train', 'neg'), ('train', 'unsup'), ('test', 'pos'), ('test', 'neg')]:
        folder = tmp_path/'imdb'/split/label
        folder.mkdir(parents=True)
        for i in range(40):
            words = random.choices(WORDS, k=12)
            (folder/f'{i}.txt').write_text(' '.join(words))
    small = merge(awd_lstm_clas_config, dict(emb_sz=8, n_hid=12, n_layers=2))

    def small_learner(dls, arch, **kwargs):
        return text_classifier_learner(dls, arch, config=small, pretrained=False, **kwargs)

    names = run(
        recipe('applications/01_text.ipynb'),
        untar_data=lambda url: tmp_path/'imdb',
        text_classifier_learner=small_learner)
    assert len(names['dls'].valid_ds) == 80
    assert {'neg', 'pos'} <= {*names['dls'].vocab[1]}
    assert len(names['learn'].recorder.losses) > 0


@pytest.mark.long
def test_tabular(tmp_path):
    "The columns of adult.csv; an epoch fills one window"
    n = 5200
    rng = np.random.default_rng(0)
    pd.DataFrame({
        'age': rng.integers(17, 90, n),
        'workclass': rng.choice([' Private', ' State-gov', ' ?'], n),
        'fnlwgt': rng.integers(10_000, 900_000, n),
        'education': rng.choice([' HS-grad', ' Masters'], n),
        'education-num': rng.choice([9., 14., np.nan], n),
        'marital-status': rng.choice([' Divorced', ' Never-married'], n),
        'occupation': rng.choice([' Sales', np.nan], n),
        'relationship': rng.choice([' Wife', ' Unmarried'], n),
        'race': rng.choice([' White', ' Black'], n),
        'sex': rng.choice([' Male', ' Female'], n),
        'capital-gain': 0,
        'capital-loss': 0,
        'hours-per-week': 40,
        'native-country': ' United-States',
        'salary': rng.choice(['<50k', '>=50k'], n)}).to_csv(tmp_path/'adult.csv', index=False)
    names = run(recipe('applications/02_tabular.ipynb'), untar_data=lambda url: tmp_path)
    assert [*names['dls'].vocab] == ['<50k', '>=50k']
    assert set(names['learn'].recorder.accum_bs) == {4096}


@pytest.mark.long
def test_segmentation(tmp_path):
    "CamVid has its classes in codes.txt, and a mask beside each photograph"
    (tmp_path/'codes.txt').write_text('Animal\nBuilding\nTrafficLight\nVoid\nWall\n')
    for i in range(41):
        save_image(tmp_path/'images'/f'0001TP_{i:06}.png', 32)
        mask = tmp_path/'labels'/f'0001TP_{i:06}_P.png'
        mask.parent.mkdir(exist_ok=True)
        Image.new('L', (32, 32), color=i%5).save(mask)

    def small_learner(dls, arch, **kwargs):
        return unet_learner(dls, narrow, pretrained=False, last_cross=False, **kwargs)

    names = run(
        recipe('applications/03_segmentation.ipynb'),
        untar_data=lambda url: tmp_path,
        Resize=lambda size: Resize(32),
        unet_learner=small_learner)
    learn = names['learn']
    assert set(learn.recorder.accum_bs) == {32}
    void = torch.full((1, 32, 32), 3)
    assert learn.loss_func(torch.randn(1, 5, 32, 32), void).isnan()  # nothing is left to average over


def tiny_gpt2(folder):
    "Saves a model and a tokenizer without a padding token"
    bpe = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(special_tokens=['<|endoftext|>'], show_progress=False)
    bpe.train_from_iterator(WORDS, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token='<|endoftext|>').save_pretrained(folder)
    config = transformers.GPT2Config(vocab_size=len(bpe.get_vocab()), n_positions=48, n_embd=8, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


@pytest.mark.long
def test_hugging_face(tmp_path, monkeypatch):
    "The cells below the recipe take its tokenizer and its model"
    tiny_gpt2(tmp_path)
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        load = kind.from_pretrained
        monkeypatch.setattr(kind, 'from_pretrained', lambda name, load=load: load(tmp_path))
    page = 'applications/04_hugging_face.ipynb'
    [imports] = [o for o in page_sources(page) if o.startswith('import ast')]
    [samples] = [o for o in page_sources(page) if o.startswith('samples = ')]
    [wrapper] = [o for o in page_sources(page) if o.startswith('class HuggingFace')]
    texts = [' '.join(WORDS[:i%10+2]) for i in range(42)]
    names = run('\n'.join([imports, recipe(page), samples, wrapper]), texts=texts)
    assert names['tokenizer'].pad_token == '<|endoftext|>'
    learn = Learner(
        names['get_dls'](8),
        names['HuggingFace'](names['model']),
        names['model_loss'],
        cbs=GradientAccumulation(16))
    learn.fit(1)
    assert learn.recorder.accum_bs[0] == 16
