"The command `python -m benchmarks`: what its parts measure, and that README and pages show the stored figures"
import json
from statistics import mean

import pytest
from benchmarks import growing, learners, report, seesaw

from cells import root


def text_of(name):
    return (root/name).read_text(encoding='utf-8')


results = json.loads(text_of('benchmarks/results.json'))
evidence = text_of('nbs/guides/05_evidence.ipynb')


# What is measured

@pytest.mark.long
def test_a_step_of_a_learner():
    "Blocks that run again, and quarters, take less memory than the whole batch"
    live = learners.measure_learner('tabular', 1)['live']
    assert live['split'] < live['whole']/2
    assert live['checkpointing'] < live['whole']


@pytest.mark.long
def test_each_run_has_the_best_rate_of_the_grid():
    "Where the grid has a way to fall: a constant rate has none"
    expected = growing.expected()
    assert expected == results['growing']['expected']
    del expected['batches of 32, constant rate']
    for o in expected.values(): assert o['loss'] == pytest.approx(o['least'], rel=1e-3)


def test_the_rule_of_seesaw():
    "The size times the rate that falls along half a cosine is constant, until the batch is largest"
    curve = seesaw.falls(32, 256)
    assert curve(0) == 32
    assert curve(.5) == pytest.approx(64)
    assert curve(.9) == 256


# What the figures say

def test_growing_beats_a_constant_batch_with_as_many_steps_beyond_the_spread():
    runs = results['growing']['linear']
    grown, as_many, small = [runs[name] for name in ('32 to 512', 'batches of 123', 'batches of 32')]
    assert abs(as_many['steps']-grown['steps']) <= 1
    assert mean(grown['loss']) < mean(small['loss'])*1.05
    assert report.gain(grown['loss'], as_many['loss']) > 5


def test_growing_does_not_replace_a_falling_rate_with_adam():
    "As the page What was tried and left out says"
    beside_one_cycle, beside_constant = report.seesaw_in_words(results).splitlines()
    assert beside_one_cycle.endswith('better in 0 of 9 rows and worse in 6')
    assert beside_constant.endswith('better in 0 of 9 rows and worse in 3')


# Pages show them. Who measures again runs the pages again

@pytest.mark.parametrize('table', [
    report.growing_table, report.digits_table, report.fits_table, report.costs_table, report.comparison_table,
    report.learners_table, report.seesaw_table])
def test_the_page_of_evidence_shows_the_stored_figures(table):
    figures = table(results)
    assert len(figures) >= 3
    for o in figures.to_numpy().flatten(): assert f'<td>{o}</td>' in evidence


def test_the_page_of_evidence_shows_the_figures_of_the_tests_of_other_libraries():
    for library, entry in json.loads(text_of('tests/libraries/results.json')).items():
        largest = max(entry['differences'].values())
        assert library in evidence
        assert f'{largest:.1e}' in evidence


def test_the_table_of_the_schedule_page_has_the_stored_figures():
    rows = []
    for _, row in report.growing_table(results).iterrows():
        time, _ = row['time'].split()
        rows.append(f"| {row['optimizer steps']} | {row['forward passes']} | {time} | {row['validation loss']} |")
    page = text_of('nbs/01_schedule.ipynb')
    assert sum(o in page for o in rows) == 6


def test_readme_has_the_stored_shares_of_steps_and_time():
    table = report.growing_table(results)
    grown, on_small, small = [table.loc[name] for name in ('32 to 512', '32 to 512, loader of 32', 'batches of 32')]
    share = grown['optimizer steps']/small['optimizer steps']
    of_512, of_32 = [float(o['time'].split()[0]) for o in (grown, on_small)]
    text = f'after {share:.0%} of the steps ({of_512:.0%} of the time with `bs=512`, {of_32:.0%} with `bs=32`)'
    assert text in text_of('README.md')
