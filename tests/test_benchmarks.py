"The command `python -m benchmarks`: what its parts measure, and that tables and pages show the stored figures"
import json
import sys
from pathlib import Path
from statistics import mean

import matplotlib.pyplot as plt
import pytest
from benchmarks import command, growing, learners, report, seesaw

root = Path(__file__).parents[1]
results = json.loads((root/'benchmarks/results.json').read_text())


# What is measured

@pytest.mark.long
def test_a_step_of_a_learner():
    "Blocks that run again, and quarters, take less memory than the whole batch"
    res = learners.measure_learner('tabular', 1)
    live = res['live']
    assert live['split'] < live['whole']/2
    assert live['checkpointing'] < live['whole']
    assert [len(res['time'][kind]) for kind in learners.kinds] == [1, 1, 1, 1, 1]


@pytest.mark.long
def test_each_run_has_the_best_rate_of_the_grid():
    "Where the grid has a way to fall: a constant rate has none"
    for name, expected in growing.expected().items():
        if name == 'batches of 32, constant rate': continue
        assert expected['loss'] == pytest.approx(expected['least'], rel=1e-3)
        assert expected == results['growing']['expected'][name]


def test_the_rule_of_seesaw():
    "The size times the rate that falls along half a cosine is constant, until the batch is largest"
    curve = seesaw.falls(32, 256)
    assert curve(0) == 32
    assert curve(.5) == pytest.approx(64)
    assert curve(.9) == 256


# The stored figures, and what shows them

def test_every_part_is_stored():
    assert set(results) == set(command.parts)
    for o in results.values(): assert 'torch' in o['run_on']


def test_growing_beats_a_constant_batch_with_as_many_steps_beyond_the_spread():
    runs = results['growing']['linear']
    grown = runs['32 to 512']
    as_many = runs['batches of 123']
    assert abs(as_many['steps']-grown['steps']) <= 1
    assert max(grown['loss']) < min(as_many['loss'])
    assert mean(grown['loss']) < mean(runs['batches of 32']['loss'])*1.05
    assert report.gain(grown['loss'], as_many['loss']) > 5


def test_growing_does_not_replace_a_falling_rate_with_adam():
    "As the page What was tried and left out says"
    beside_one_cycle, beside_constant = report.seesaw_in_words(results).splitlines()
    assert beside_one_cycle.endswith('better in 0 of 9 rows and worse in 6')
    assert beside_constant.endswith('better in 0 of 9 rows and worse in 3')


TABLES = [
    report.growing_table, report.digits_table, report.fits_table, report.costs_table, report.comparison_table,
    report.learners_table, report.seesaw_table]


@pytest.mark.parametrize('table', TABLES)
def test_tables_are_complete(table):
    figures = table(results)
    assert len(figures) >= 3
    assert not figures.isna().any().any()


def test_the_picture_of_memory_has_a_line_for_each_way():
    ax, = report.memory_picture(results).axes
    assert len(ax.lines) == 3
    plt.close(ax.figure)


PAGES = {
    'nbs/guides/05_evidence.ipynb': TABLES,
    'nbs/03_checkpointing.ipynb': [report.learners_table]}


@pytest.mark.parametrize('path', PAGES)
def test_pages_show_the_stored_figures(path):
    "Who measures again runs the page again"
    page = json.loads((root/path).read_text())
    shown = json.dumps([cell.get('outputs') for cell in page['cells']], ensure_ascii=False)
    for table in PAGES[path]:
        for o in table(results).to_numpy().flatten(): assert f'<td>{o}</td>' in shown


@pytest.mark.parametrize('name', [
    'batches of 32', 'batches of 123', 'batches of 512', '32 to 512', '32 to 512, loader of 32',
    'batches of 32, constant rate'])
def test_the_table_of_the_schedule_page_has_the_stored_figures(name):
    text = (root/'nbs/01_schedule.ipynb').read_text(encoding='utf-8')
    row = report.growing_table(results).loc[name]
    time, _ = row['time'].split()
    assert f"| {row['optimizer steps']} | {row['forward passes']} | {time} | {row['validation loss']} |" in text


def test_readme_has_the_stored_shares_of_steps_and_time():
    table = report.growing_table(results)
    steps = table['optimizer steps']
    share = steps['32 to 512']/steps['batches of 32']
    of_512, of_32 = [float(table['time'][name].split()[0]) for name in ('32 to 512', '32 to 512, loader of 32')]
    text = f'after {share:.0%} of the steps ({of_512:.0%} of the time with `bs=512`, {of_32:.0%} with `bs=32`)'
    assert text in (root/'README.md').read_text(encoding='utf-8')


# The command


def test_a_part_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['benchmarks', 'speed'])
    with pytest.raises(SystemExit): command.main()
    assert "there is no part 'speed'" in capsys.readouterr().err
