"The command `python -m benchmarks`: what it measures, and that tables and pages show the stored figures"
import json, sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from benchmarks import __main__ as command, costs, learners, lengths, report

root = Path(__file__).parents[1]
results = json.loads((root/'benchmarks/results.json').read_text())

def test_a_step_of_a_learner():
    "Blocks that run again give the gradient of the whole batch, quarters another one; both take less memory"
    res = learners.measure('tabular', 1)
    off,live = res['off'],res['live']
    assert off.pop('whole') == 0 and off.pop('split') > .01 and max(off.values()) < 1e-6
    assert live['split'] < live['whole']/2 and live['checkpointing'] < live['whole']
    assert [len(res['time'][o]) for o in learners.kinds] == [1]*5 and 'blocks are recomputed' in res['how']

def test_texts_of_many_lengths(monkeypatch):
    "What adapts runs short texts whole; a fixed size takes four times the passes"
    monkeypatch.setattr(lengths, 'lengths', [8, 64]*2)
    res = lengths.measure(0)
    assert res['first']['whole'] == res['batches'] and res['first']['fixed'] == 4*res['batches']
    for kind in 'auto','checkpointing': assert res['batches'] < res['first'][kind] < res['first']['fixed']

def test_stored_figures():
    "They are of what is measured now"
    models = results['learners']['cpu']['models']
    assert tuple(models) == report.learner_names == learners.names
    assert learners.kinds == ('whole', *report.learner_kinds)
    for o in models.values():
        assert tuple(o['live']) == learners.kinds and o['live']['checkpointing'] < o['live']['whole']
        assert o['off']['checkpointing'] < 1e-5 < 1e-2 < o['off']['split']
    cells = {'plain 1', *(f'{kind} {k}' for kind,ks in costs.sizes.items() for k in ks)}
    for o in results['costs']['by_opt'].values(): assert set(o) == cells
    assert list(results['counts']) == list(report.labels)
    found = results['comparison']['callbacks']
    assert list(found) == list(report.contestants)
    assert all(list(o) == list(report.comparison_labels) for o in found.values())
    assert max(found['ours'][o] for o in ('whole', 'ragged', 'padded')) < 1e-6 < 1e-3 < found['fastai']['whole']

@pytest.mark.parametrize('table,n', [('learners', 7), ('ways', 3), ('lengths', 4), ('costs', 7), ('', 10)])
def test_tables(table, n):
    res = getattr(report, f'{table}_table'.strip('_'))(results)
    assert len(res) == n and not res.isna().any().any()

def test_table_of_other_callbacks():
    "In Markdown, with a row for each figure and a column for each callback"
    table = report.comparison_table(results)
    assert table._repr_markdown_() == table
    lines = table.splitlines()
    assert len(lines) == 2+len(report.comparison_labels)
    assert {o.count('|') for o in lines} == {2+len(report.contestants)}
    assert lines[-1].endswith('| 15 | 120 | 120 | 120 |')

@pytest.mark.parametrize('name', report.pictures)
def test_pictures(name):
    fig = report.pictures[name](results)
    assert fig.axes[0].lines and fig.axes[0].get_xlabel()
    plt.close(fig)

times,callbacks = results['lengths']['times'],results['comparison']['callbacks']

@pytest.mark.parametrize('kind,measured,figures', [
    ('lengths', ('lengths', '-', 2), dict(times=times, passes=results['lengths']['passes'], batches=48,
                                          first=dict.fromkeys(times, 12345))),
    ('comparison', ('comparison', '-'), {k:o | dict(entries=12345) for k,o in callbacks.items()})])
def test_an_option_measures_its_part_alone(kind, measured, figures, tmp_path, monkeypatch, capsys):
    (tmp_path/'results.json').write_text(json.dumps(results))
    monkeypatch.setattr(command, 'here', tmp_path)
    monkeypatch.setattr(command, 'needs', lambda *names: None)
    monkeypatch.setattr(command, 'measure', lambda *args: figures if args == measured else None)
    monkeypatch.setattr(sys, 'argv', ['benchmarks', f'--{kind}', '--rounds', '2'])
    command.main()
    now = json.loads((tmp_path/'results.json').read_text())
    assert now[kind].get('callbacks', now[kind]).items() >= figures.items() and now == results | {kind:now[kind]}
    assert '12345' in capsys.readouterr().out

def test_page_shows_the_stored_figures():
    "Who measures again runs the page again"
    page = json.loads((root/'nbs/03_checkpointing.ipynb').read_text())
    shown = json.dumps([c.get('outputs') for c in page['cells']])
    for o in report.learners_table(results).to_numpy().flatten(): assert f'<td>{o}</td>' in shown
