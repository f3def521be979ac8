"""The page "Which callback?": what it says of fastai's learners, and the command that measures them"""
import json, sys

import pytest, torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pages import *

sys.path.insert(0, str(root))
from benchmarks import learners, report

results = json.loads((root/'benchmarks/results.json').read_text())

def kinds(model):
    "Which of what differs in micro-batches is in a model"
    modules = [*model.modules()]
    rates = [getattr(o, name) for o in modules for name in ('p', 'embed_p', 'weight_p') if isinstance(getattr(o, name, None), float)]
    return {k for k,has in dict(BatchNorm=any(isinstance(o, _BatchNorm) for o in modules), dropout=any(rates)).items() if has}

@pytest.mark.parametrize('name', learners.names)
def test_what_differs_in_micro_batches(name):
    "The table names what is in the model, and no more"
    said = report.which[name][1]
    model = learners.make(name, 'whole').model
    assert kinds(model) == {o for o in ('BatchNorm', 'dropout') if o in said}
    head,body = model[-1] if isinstance(model, nn.Sequential) else None,model[0] if isinstance(model, nn.Sequential) else None
    if 'BatchNorm and dropout in the head' in said: assert kinds(head) == {'BatchNorm', 'dropout'} and kinds(body) == set()
    elif 'dropout in the head' in said: assert 'dropout' in kinds(head) and kinds(body) == {'BatchNorm'}
    elif 'BatchNorm in the head' in said: assert 'BatchNorm' in kinds(head) and kinds(body) == {'dropout'}

def test_measured():
    "Sums for a model that takes a moment: exact=True has the gradient of the whole batch, quarters have another one, and less memory"
    threads = torch.get_num_threads()
    res = learners.measure('tabular', 1)
    torch.set_num_threads(threads)
    assert res['off']['whole'] == 0 and res['off']['exact'] < 1e-6 and res['off']['pieces'] > .01
    assert res['live']['pieces'] < res['live']['whole']/2 and res['live']['exact'] < res['live']['whole']
    assert {way:len(o) for way,o in res['time'].items()} == dict.fromkeys(learners.ways, 1)

def test_stored_figures():
    assert tuple(report.which) == report.learner_names == learners.names
    for o in results['learners']['cpu']['models'].values(): assert o['off']['exact'] < 1e-5 < 1e-2 < o['off']['pieces'] and o['live']['exact'] < o['live']['whole']

def test_there_is_a_gpu_column_once_it_is_measured():
    cpu = results['learners']['cpu']
    rows = report.which_table(dict(learners=dict(cpu=cpu))).splitlines()
    assert len(rows) == 2+7 and 'GPU' not in rows[0] and {o.count('|') for o in rows} == {6}
    rows = report.which_table(dict(learners=dict(cpu=cpu, gpu=cpu))).splitlines()
    assert rows[0].endswith('| exact, GPU |')
    assert [o.count(report.needs(cpu['models'][name], 'exact')) for o,name in zip(rows[2:], report.which)] == [2]*7

def test_page_shows_the_stored_figures():
    "Whoever measures again runs both pages again"
    def shown(name): return [o for c in read(root/'nbs'/name) for o in c.get('outputs', [])]
    which = [''.join(o['data']['text/markdown']) for o in shown('guides/11_which_callback.ipynb') if 'text/markdown' in o.get('data', {})]
    assert report.which_table(results) in which
    printed = ''.join(''.join(o.get('text', '')) for o in shown('reference/02_benchmarks.ipynb'))
    assert report.learners_in_words(results) in printed
