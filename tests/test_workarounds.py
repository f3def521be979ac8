"Each workaround for a bug elsewhere is still needed. If a test fails here, the bug is mended: remove the workaround"
import fastai
import pytest
from fastai.callback import wandb as fastai_wandb
from fastai.learner import init_args


def test_fastais_wandb_callback_asks_numbers_for_their_arguments(monkeypatch):
    "https://github.com/fastai/fastai/pull/4173: `fix_wandb` in logging"
    version = tuple(int(o) for o in fastai.__version__.split('.'))
    assert hasattr(fastai_wandb, '_format_config_value') == (version >= (2, 8, 9))
    if version < (2, 8, 9): return
    monkeypatch.setattr(fastai_wandb, 'init_args', init_args)
    with pytest.raises(TypeError): fastai_wandb._format_config_value(1)
