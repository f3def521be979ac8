"The command `python -m benchmarks`: what it measures, and that tables and pages show the stored figures"
import json
import statistics
import sys
from copy import deepcopy
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from benchmarks import __main__ as command, costs, fits, growing, learners, lengths, report
from benchmarks.cases import cases
from benchmarks.measure import time_division
from fastai.basics import Callback

root = Path(__file__).parents[1]
results = json.loads((root/'benchmarks/results.json').read_text())


# What is measured

def test_each_contestant_has_a_label():
    assert list(report.labels) == list(cases)


def test_a_step_of_a_learner():
    "Blocks that run again give the gradient of the whole batch, quarters another one; both take less memory"
    res = learners.measure('tabular', 1)
    off = res['off']
    assert off.pop('whole') == 0
    assert off.pop('split') > .01
    assert max(off.values()) < 1e-6
    live = res['live']
    assert live['split'] < live['whole']/2
    assert live['checkpointing'] < live['whole']
    assert 'blocks are recomputed' in res['how']
    assert [len(res['time'][kind]) for kind in learners.kinds] == [1, 1, 1, 1, 1]


def test_texts_of_many_lengths(monkeypatch):
    "What adapts runs short texts whole; a fixed size takes four times the passes"
    monkeypatch.setattr(lengths, 'lengths', [8, 64, 8, 64])
    res = lengths.measure(0)
    n = res['batches']
    assert res['first']['whole'] == n
    assert res['first']['fixed'] == 4*n
    for kind in 'auto', 'checkpointing': assert n < res['first'][kind] < 4*n


class CountSteps(Callback):
    def before_fit(self): self.n = 0
    def after_step(self): self.n += 1


@pytest.mark.parametrize('model', report.fit_models)
def test_whole_fits_take_a_step_for_each_window(model, monkeypatch):
    "Measured are steps in the place of seconds"
    def count_steps(learn):
        steps = CountSteps()
        with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=steps)
        return steps.n
    monkeypatch.setattr(fits, 'seconds', count_steps)
    res = fits.measure(model, rounds=1, n=8)
    assert res == {'batches': 8, 'times': {'plain': [8], '1': [8], '8': [1]}}


def test_times_of_whole_fits():
    "Once a round, in a table with a row for each model"
    res = fits.measure('linear', rounds=2, n=8)
    for times in res['times'].values():
        assert len(times) == 2
        assert min(times) > 0
    models = {name: res for name in report.fit_models}
    table = report.fits_table(dict(fits=dict(models=models)))
    assert list(table.columns) == ['K=1', 'K=8']
    assert list(table.index) == list(report.fit_models.values())
    ratios = report.divided(res['times']['8'], res['times']['plain'])
    assert list(table['K=8']) == [report.spread(ratios) for _ in models]


def test_the_division_at_the_end_of_a_window():
    times = time_division('ours', 10**4)
    assert times['parameters'] == 10**4
    assert 0 < times['division'] < times['backward']


# The stored figures, and what shows them

def test_stored_figures_of_learners():
    "They are of what is measured now"
    models = results['learners']['cpu']['models']
    assert tuple(models) == report.learner_names
    for o in models.values():
        assert tuple(o['live']) == learners.kinds
        assert o['live']['checkpointing'] < o['live']['whole']
        assert o['off']['checkpointing'] < 1e-5
        assert o['off']['split'] > 1e-2


def test_stored_figures_of_contestants_and_costs():
    assert list(results['counts']) == list(report.labels)
    cells = {'plain 1'}
    for kind, ks in costs.sizes.items():
        cells.update(f'{kind} {k}' for k in ks)
    for o in results['costs']['by_opt'].values(): assert set(o) == cells


def test_stored_figures_of_other_callbacks():
    found = results['comparison']['callbacks']
    assert list(found) == list(report.contestants)
    for o in found.values(): assert list(o) == list(report.comparison_labels)
    for name in 'whole', 'ragged', 'padded': assert found['ours'][name] < 1e-6
    assert found['fastai']['whole'] > 1e-3


def test_stored_figures_of_whole_fits():
    assert list(results['fits']['models']) == list(report.fit_models)
    table = report.fits_table(results)
    assert table.shape == (3, 2)


def test_stored_figures_of_a_batch_that_grows():
    "Over ten seeds it is as accurate as small batches, in a quarter of their steps; a constant large batch is not"
    runs = results['growing']['runs']
    assert list(runs) == growing.run_names()
    for o in runs.values(): assert len(o['accuracy']) == growing.n_seeds
    mean = {name: statistics.mean(o['accuracy']) for name, o in runs.items()}
    assert mean['32 to 512'] > mean['batches of 32']-.005
    assert mean['batches of 512'] < mean['batches of 32']-.01
    steps = {name: o['steps'][0] for name, o in runs.items()}
    assert steps['32 to 512']/steps['batches of 32'] < .27


def test_a_fit_of_each_run():
    res = growing.measure(n_epoch=1, seeds=[0])
    assert list(res['runs']) == growing.run_names()
    assert res['runs']['16 x 32']['steps'] == res['runs']['batches of 512']['steps'] == [3]


def test_stored_figures_of_the_first_windows():
    calls = results['costs']['first']
    assert list(calls) == ['windows', 'split']
    assert max(calls.values()) < .4


tables = dict(  # rows
    table=10, fits_table=3, growing_table=5, costs_table=7, learners_table=7, ways_table=3, lengths_table=4)


@pytest.mark.parametrize('name', tables)
def test_tables_are_complete(name):
    table = getattr(report, name)(results)
    assert len(table) == tables[name]
    assert not table.isna().any().any()


def test_table_of_other_callbacks():
    "In Markdown, with a row for each figure and a column for each callback"
    table = report.comparison_table(results)
    assert table._repr_markdown_() == table
    lines = table.splitlines()
    assert len(lines) == 2+len(report.comparison_labels)
    n_columns = 1+len(report.contestants)
    for line in lines: assert line.count('|') == n_columns+1
    assert lines[-1].endswith('| 15 | 120 | 120 | 120 |')


@pytest.mark.parametrize('name', report.pictures)
def test_pictures_have_lines_and_a_label(name):
    fig = report.pictures[name](results)
    ax = fig.axes[0]
    assert ax.lines
    assert ax.get_xlabel()
    plt.close(fig)


def test_goals_say_what_is_not_met():
    counts = deepcopy(results['counts'])
    first, *others = report.goals(dict(counts=counts)).splitlines()
    assert first == 'met     K=1: host syncs per micro-batch at most 1: 1.000'
    counts['ours']['1']['syncs'] = 1.5
    assert report.goals(dict(counts=counts)).splitlines() == [
        'NOT MET K=1: host syncs per micro-batch at most 1: 1.500', *others]


def test_page_shows_the_stored_figures():
    "Who measures again runs the page again"
    page = json.loads((root/'nbs/03_checkpointing.ipynb').read_text())
    shown = json.dumps([cell.get('outputs') for cell in page['cells']])
    figures = report.learners_table(results).to_numpy().flatten()
    assert len(figures) == 28
    for o in figures: assert f'<td>{o}</td>' in shown


# The options

def figures_of_lengths():
    passes = {kind: 12345 for kind in report.length_labels}
    times = {kind: [1., 2.] for kind in report.length_labels}
    return dict(first=passes, passes=passes, times=times)


def figures_of_comparison():
    figures = {name: 12345 for name in report.comparison_labels}
    return {name: figures for name in report.contestants}


parts = [  # what a process is asked for, and what it returns
    ('lengths', ('lengths', '-', 2), figures_of_lengths),
    ('comparison', ('comparison', '-'), figures_of_comparison)]


@pytest.mark.parametrize('part,asked,make_figures', parts)
def test_an_option_measures_its_part_alone(part, asked, make_figures, tmp_path, monkeypatch, capsys):
    file = tmp_path/'results.json'
    file.write_text(json.dumps(results))
    requests = []
    def measure(*args):
        requests.append(args)
        return make_figures()
    monkeypatch.setattr(command, 'here', tmp_path)
    monkeypatch.setattr(command, 'is_installed', lambda name: name != 'lightning')
    monkeypatch.setattr(command, 'version', lambda name: '1.0')
    monkeypatch.setattr(command, 'measure', measure)
    monkeypatch.setattr(sys, 'argv', ['benchmarks', f'--{part}', '--rounds', '2'])
    command.main()
    assert requests == [asked]
    now = json.loads(file.read_text())
    measured = now.pop(part)
    others = {name: o for name, o in results.items() if name != part}
    assert now == others
    assert 'lightning' not in measured['machine']['packages']
    assert '12345' in json.dumps(measured)
    assert '12345' in capsys.readouterr().out
