"""The code that pages give for Colab, on stand-ins with the structure of the real data: nothing is downloaded. Its
models are small and have random weights"""
import itertools
import random
import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import timm
import torch
import transformers
from fastai.basics import defaults, merge
from fastai.layers import ResBlock
from fastai.text.all import awd_lstm_clas_config, text_classifier_learner
from fastai.vision.all import Image, Resize, aug_transforms, unet_learner, vision_learner
from fastai.vision.models.xresnet import XResNet

from cells import read, root, source

WORDS = 'a film that nobody who has seen it will ever forget'.split()


@pytest.fixture(autouse=True)
def in_one_process(monkeypatch):
    "To start workers takes longer than what they would do"
    monkeypatch.setattr(defaults, 'cpus', 0)


def narrow(pretrained=False):
    return XResNet(ResBlock, 1, [1, 1, 1, 1], stem_szs=(4, 4, 64), widen=.125)


def recipe(page):
    "Returns the code that a page gives for Colab"
    text = '\n'.join(map(source, read(root/'nbs/applications'/page)))
    return re.search(r'^In Colab, .*?```py\n(.*?)```', text, re.S | re.M)[1]


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
    for i in range(330): save_image(tmp_path/'ab'[i%2]/f'{i}.png')
    [diff] = re.findall(r'```diff\n(.*?)```', (root/'README.md').read_text(), re.S)
    lines = [o[1:] for o in diff.splitlines() if not o.startswith('-') and 'import' not in o]
    names = run('\n'.join(lines), path=tmp_path, vision_learner=small_vision_learner)
    assert set(names['learn'].recorder.accum_bs) == {256}


@pytest.mark.long
def test_vision(tmp_path):
    "All photographs are in one folder, and named after the breed"
    breeds = 'Abyssinian', 'great_pyrenees'
    for i in range(165): save_image(tmp_path/'images'/f'{breeds[i%2]}_{i}.jpg')

    def small_learner(dls, arch, **kwargs):
        assert arch in timm.list_pretrained()
        return small_vision_learner(dls, arch, **kwargs)

    names = run(
        recipe('00_vision.ipynb'),
        untar_data=lambda url: tmp_path,
        Resize=lambda size: Resize(size//16),
        aug_transforms=lambda size, **kwargs: aug_transforms(size=size//16, **kwargs),
        vision_learner=small_learner)
    assert tuple(names['dls'].vocab) == breeds
    assert set(names['learn'].recorder.accum_bs) == {128}


@pytest.mark.long
def test_text(tmp_path):
    for split, label, i in itertools.product(['train', 'test'], ['neg', 'pos'], range(40)):
        path = tmp_path/split/label/f'{i}.txt'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(' '.join(random.choices(WORDS, k=12)))
    small = merge(awd_lstm_clas_config, dict(emb_sz=8, n_hid=12, n_layers=2))

    def small_learner(dls, arch, **kwargs):
        return text_classifier_learner(dls, arch, config=small, pretrained=False, **kwargs)

    names = run(
        recipe('01_text.ipynb'),
        untar_data=lambda url: tmp_path,
        text_classifier_learner=small_learner)
    assert len(names['dls'].valid_ds) == 80
    assert [*names['dls'].vocab[1]] == ['neg', 'pos']
    assert len(names['learn'].recorder.losses) > 0


@pytest.mark.long
def test_tabular(tmp_path):
    "Columns of adult.csv; an epoch fills one window"
    n = 5200
    rng = np.random.default_rng(0)
    columns = {name: rng.choice([' a', ' b', ' ?'], n) for name in ('workclass', 'education', 'marital-status')}
    columns |= {name: rng.integers(17, 90, n) for name in ('age', 'fnlwgt')}
    columns['occupation'] = rng.choice([' Sales', np.nan], n)
    columns['education-num'] = rng.choice([9., 14., np.nan], n)
    columns['salary'] = rng.choice(['<50k', '>=50k'], n)
    pd.DataFrame(columns).to_csv(tmp_path/'adult.csv', index=False)
    names = run(recipe('02_tabular.ipynb'), untar_data=lambda url: tmp_path)
    assert [*names['dls'].vocab] == ['<50k', '>=50k']
    assert set(names['learn'].recorder.accum_bs) == {4096}


@pytest.mark.long
def test_segmentation(tmp_path):
    "CamVid has its classes in codes.txt, and a mask beside each photograph"
    (tmp_path/'codes.txt').write_text('Animal\nBuilding\nTrafficLight\nVoid\nWall\n')
    (tmp_path/'labels').mkdir()
    for i in range(41):
        save_image(tmp_path/'images'/f'{i}.png', 32)
        Image.new('L', (32, 32), color=i%5).save(tmp_path/'labels'/f'{i}_P.png')

    def small_learner(dls, arch, **kwargs):
        return unet_learner(dls, narrow, pretrained=False, last_cross=False, **kwargs)

    names = run(
        recipe('03_segmentation.ipynb'),
        untar_data=lambda url: tmp_path,
        Resize=lambda size: Resize(32),
        unet_learner=small_learner)
    learn = names['learn']
    assert set(learn.recorder.accum_bs) == {32}
    void = torch.full((1, 32, 32), 3)
    assert learn.loss_func(torch.randn(1, 5, 32, 32), void).isnan()  # nothing is left to average over


def test_hugging_face(monkeypatch):
    "The tokenizer has no padding token; the page trains another model"
    tokenizer = SimpleNamespace(eos_token='<|endoftext|>')
    monkeypatch.setattr(transformers.AutoTokenizer, 'from_pretrained', lambda name: tokenizer)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, 'from_pretrained', lambda name: name)
    names = run(recipe('04_hugging_face.ipynb'))
    assert names['model'] == 'distilgpt2'
    assert names['tokenizer'].pad_token == '<|endoftext|>'
