"The line that a fit prints: how a window is made up, and what differs from one batch of its size"
import pytest
from torch.nn.utils import parametrizations

from common import *
from limited_memory import MemoryLimit, OutOfMemory
from stateful import *
from fastxtend_accum.windows import forward_backward
from fastxtend_accum.windows.description import Differences, how_made_up, log_message
from fastxtend_accum.windows.loader import WindowShape
from fastxtend_accum.windows.state import Snapshot


def around(*layers):
    "Returns a model with `layers` between two layers that are the same in each pass"
    torch.manual_seed(0)
    first_layer = nn.Linear(5, 4)
    last_layer = nn.Linear(4, 1)
    return nn.Sequential(first_layer, *layers, last_layer).double()


def with_batch_norm():
    return around(nn.BatchNorm1d(4))


def with_both():
    return around(nn.BatchNorm1d(4), nn.Dropout(.3))


def fit_and_read(capsys, learn, n_epoch=1):
    "Trains, and returns what was printed"
    capsys.readouterr()
    set_seed(0)
    fit_aloud(learn, n_epoch)
    return capsys.readouterr().out


def line_of(capsys, bs, *cbs, m=None, n=128, n_epoch=1, **kwargs):
    "Returns what the fit of a new Learner prints"
    return fit_and_read(capsys, make_learner(bs, n=n, m=m, cbs=cbs, **kwargs), n_epoch)


# The words

def batches(n): return WindowShape(n, 1)
def pieces(n): return WindowShape(1, n)


@pytest.mark.parametrize('shapes, bs, micro_bs, n_processes, words', [
    ([batches(8)], 32, 32, 1, '256 samples per step, at most 32 at a time'),
    ([batches(2)], 32, 7, 1, '64 samples per step, at most 7 at a time'),
    ([batches(4)], 32, 16, 2, '256 samples per step, at most 16 at a time in each of 2 processes'),
    ([pieces(8)], 256, 32, 1, '32 samples per step, at most 32 at a time'),
    ([pieces(3)], 256, 86, 2, '170 to 172 samples per step, at most 86 at a time in each of 2 processes'),
    ([batches(1), batches(16)], 32, 16, 1, '32 to 512 samples per step, at most 16 at a time'),
    ([pieces(8), batches(2)], 256, 256, 1, '32 to 512 samples per step, at most 256 at a time')])
def test_how_a_window_is_made_up(shapes, bs, micro_bs, n_processes, words):
    assert how_made_up(shapes[0], shapes[-1], bs, micro_bs, n_processes) == words


def test_changes_are_named_by_the_class_of_the_layer():
    m = nn.Sequential(nn.BatchNorm1d(5), nn.BatchNorm1d(5), nn.Dropout())
    before = Snapshot(m)
    assert Differences(m, before).described(m) == ''
    m(torch.randn(8, 5))
    assert Differences(m, before).described(m) == (
        '. Same as one batch, except: layers with buffers (BatchNorm1d), random numbers (dropout).')


def test_half_precision_is_named_if_gradients_cannot_add_up_in_float32(monkeypatch):
    "As with PyTorch before 2.10"
    m = model().bfloat16()
    differences = Differences(m, Snapshot(m))
    assert differences.described(m) == ''
    monkeypatch.setattr('fastxtend_accum.windows.description.can_sum_in_float32', False)
    assert 'except: gradients add up in half precision' in differences.described(m)


@pytest.mark.parametrize('kind', [*STATISTICS, AttributeInPlace, *SHARED_NOISE])
def test_which_modules_have_changed_and_whether_random_numbers_were_drawn(kind):
    "Buffers count, but neither those of modules around them, nor other attributes"
    changed = kind()
    m = nn.Sequential(nn.Sequential(changed), SparseBuffer(), nn.LayerNorm(5).double())
    before = Snapshot(m)
    assert Differences(m, before).changed == []
    assert not Differences(m, before).draws
    m(data(6)[0])
    assert Differences(m, before).changed == ([changed] if kind in STATISTICS else [])
    assert Differences(m, before).draws == (kind in SHARED_NOISE)


# The line of a fit

CACHE = 'GradientCache: Sequential sees at most '
NOT_SPLIT = '; validation batches are not split'


DIFFERENCES = '. Same as one batch, except: layers with buffers (BatchNorm1d), random numbers (dropout).'


def size_words(batch, size):
    return f'{batch} samples per step, at most {size} at a time'


@pytest.mark.parametrize('bs, cb, line', [
    (8, GradientAccumulation(32), size_words(32, 8)+DIFFERENCES),
    (32, GradientAccumulation(64, micro_batch_size=8), size_words(64, 8)+DIFFERENCES),
    (32, GradientAccumulation(8), size_words(8, 8)),
    (32, GradientCache(8), CACHE+'8 of 32 samples at a time'+NOT_SPLIT+DIFFERENCES),
    (32, GradientAccumulation(micro_batch_size='auto'), size_words(32, 32)),
    (32, GradientCache('auto'), CACHE+'32 of 32 samples at a time'+NOT_SPLIT),
    (32, ActivationCheckpointing(), 'ActivationCheckpointing: each batch of 32 fits with 0 of 1 blocks recomputed')])
def test_a_model_with_batch_norm_and_dropout(capsys, bs, cb, line):
    assert line_of(capsys, bs, cb, m=with_both()) == line+'\n'


@pytest.mark.parametrize('bs, cb, line', [
    (32, GradientAccumulation(64, micro_batch_size=7), size_words(64, 7)),
    (8, GradientAccumulationSchedule(8, 32), size_words('8 to 32', 8)),
    (32, GradientCache(8), CACHE+'8 of 32 samples at a time'+NOT_SPLIT)])
def test_a_model_that_differs_in_nothing(capsys, bs, cb, line):
    assert line_of(capsys, bs, cb) == line+'\n'


@pytest.mark.parametrize('bs, start, at_once', [(8, 8, 8), (16, 4, 16)])
def test_a_schedule_names_what_differs_in_later_windows(capsys, bs, start, at_once):
    "It begins with one loader batch, or with pieces of one"
    line = line_of(capsys, bs, GradientAccumulationSchedule(start, 32), m=with_batch_norm())
    sizes = size_words(f'{start} to 32', at_once)
    assert line == f'{sizes}. Same as one batch, except: layers with buffers (BatchNorm1d).\n'


@pytest.mark.parametrize('bs, limit, micro_bs', [(48, 30, 24), (50, 13, 13)])
def test_auto_says_what_fits_of_a_batch(capsys, bs, limit, micro_bs):
    "Once, however often smaller ones fit: a shorter last batch gives no further line"
    m = with_both()
    MemoryLimit(m, limit)
    said = line_of(capsys, bs, GradientAccumulation(micro_batch_size='auto'), m=m, n=2*bs+7, n_epoch=3)
    assert said == size_words(bs, micro_bs)+DIFFERENCES+'\n'


@pytest.mark.parametrize('cb_type, times', [
    (GradientAccumulation, (1, 2, 3)),
    (GradientAccumulation, (1, 2, 11)),  # the last one in the first pass of the third batch
    (GradientCache, (1, 2, 3)),
    (GradientCache, (1, 2, 5))])
def test_the_line_has_the_size_that_was_found_at_last(capsys, cb_type, times):
    "Not that of an earlier pass, which has shown what differs; here it is 8, and then 4"
    said = line_of(capsys, 32, OutOfMemory('after_pred', *times), cb_type(micro_batch_size='auto'), m=with_both())
    last = said.splitlines()[-1]
    assert 'at most 4 ' in last
    assert DIFFERENCES in last


# What differs

SPLITS = {  # how 32 samples are split into 4 micro-batches: the size of a loader batch, and a callback
    'windows': (8, lambda: GradientAccumulation(32)),
    'micro-batches': (32, lambda: GradientAccumulation(micro_batch_size=8)),
    'cache': (32, lambda: GradientCache(8))}
each_split = pytest.mark.parametrize('split', SPLITS)


def except_for(capsys, m, split):
    "Returns what differs in a split of 32 samples, as the line says"
    bs, make_cb = SPLITS[split]
    said = line_of(capsys, bs, make_cb(), m=m)
    assert said.count('\n') == 1
    return said.partition('. Same as one batch, except: ')[2].removesuffix('\n')


@each_split
def test_layers_of_ones_own_are_named_if_they_keep_statistics_or_draw_random_numbers(capsys, split):
    m = nn.Sequential(BufferInPlace(), TorchNoise(), model())
    assert except_for(capsys, m, split) == 'layers with buffers (BufferInPlace), random numbers (dropout).'


@pytest.mark.parametrize('make_layer, says', [
    (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), 'layers with buffers (_SpectralNorm).'),
    (lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), 'layers with buffers (Linear).'),
    (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), ''),
    (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=.1), 'random numbers (dropout).'),
    (lambda: nn.Dropout(0.), '')])
def test_layers_of_pytorch(capsys, make_layer, says):
    assert except_for(capsys, around(make_layer()), 'windows') == says


@pytest.mark.parametrize('part,is_named', [(None, True), (lambda m: m[0], False)])
def test_only_the_part_that_is_split_differs(capsys, part, is_named):
    said = line_of(capsys, 32, GradientCache(8, part=part), m=with_batch_norm())
    assert ('BatchNorm1d' in said) == is_named


# When it is printed

def fit_silently(learn):
    fit(learn, 1)


def find_rate_aloud(learn):
    with learn.no_bar(): learn.lr_find(num_it=5, show_plot=False)


@pytest.mark.parametrize('cb, train', [
    (GradientAccumulation(32, micro_batch_size=8), fit_silently),
    (GradientAccumulation(micro_batch_size='auto'), find_rate_aloud),
    (GradientCache('auto'), fit_silently),
    (ActivationCheckpointing(), find_rate_aloud)])
def test_the_fit_after_a_silent_one_prints_it(capsys, cb, train):
    learn = make_learner(32, cbs=cb)
    train(learn)
    assert '32' not in capsys.readouterr().out
    assert '32' in fit_and_read(capsys, learn)


@pytest.mark.parametrize('verbose, n_looks', [(False, 0), (True, 1)])
@pytest.mark.parametrize('make_cb', [
    partial(GradientAccumulation, 32),
    partial(GradientAccumulation, micro_batch_size='auto'),
    partial(GradientAccumulationSchedule, 8, 32)])
def test_without_verbose_nothing_is_printed_and_no_pass_observed(capsys, monkeypatch, make_cb, verbose, n_looks):
    "With it, one line is printed, and one pass of a fit is observed"
    looks = []

    def look(m):
        looks.append(m)
        return Snapshot(m)

    monkeypatch.setattr(forward_backward, 'Snapshot', look)
    said = line_of(capsys, 8, make_cb(verbose=verbose), m=with_both(), n_epoch=2)
    assert said.count('\n') == len(looks) == n_looks


@pytest.mark.parametrize('cbs, n_lines', [
    ([GradientAccumulation(32), GradientCache(4)], 2),
    ([GradientAccumulation(32), ActivationCheckpointing()], 2),
    ([GradientAccumulation(32), all_blocks()], 1),
    ([GradientCache(4), ActivationCheckpointing()], 2),
    ([GradientAccumulationSchedule(4, 32)], 1)])
def test_each_callback_prints_one_line_and_one_of_them_what_differs(capsys, cbs, n_lines):
    learn = make_learner(8, n=128, m=with_both(), cbs=cbs)
    said = fit_and_read(capsys, learn, 2)
    assert said.count('\n') == n_lines
    assert said.count('BatchNorm1d') == 1
    assert fit_and_read(capsys, learn, 2) == ''


@pytest.mark.parametrize('logger, says', [(noop, False), (print, True)])
def test_a_message_goes_to_the_logger_if_there_is_one(capsys, logger, says):
    learn = make_learner(8)
    learn.logger = logger
    assert log_message(learn, 'a line') == says
    assert capsys.readouterr().out == ('a line\n' if says else '')


class LogsTable(Callback):
    "As ProgressCallback does: its method is the logger"
    def log(self, row): pytest.fail('this is no row of the table')


def test_a_message_covers_the_text_of_the_progress_bar(capsys):
    learn = make_learner(8)
    learn.logger = LogsTable().log
    assert log_message(learn, 'a line')
    assert capsys.readouterr().out == '\r'+'a line'.ljust(80)+'\n'
