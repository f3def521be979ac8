"The signatures of the public names are typed, so that a type checker finds wrong arguments"
import pytest

pytestmark = pytest.mark.long  # mypy reads fastai

RIGHT = '''
from fastxtend_accum.all import *
GradientAccumulation(256, log_accum_batch=False, micro_batch_size='auto')
GradientAccumulationSchedule(32, 512, finish=1/3, scale={'lr': sqrt_scale})
GradientAccumulationSchedule(**SchedSteps({0: 32, 4: 128}))
ActivationCheckpointing()
GradientCache(32)
AutoResume()
'''
WRONG = {
    "GradientAccumulation('256')": 'expected "int | None"',
    "GradientAccumulation(256, log_accum_batch='no')": 'expected "bool"',
    "GradientAccumulation(256, size=32)": 'Unexpected keyword argument "size"',
    "GradientCache(None)": 'expected "int | str"',
    "ActivationCheckpointing(adapt='no')": 'expected "bool"'}

# Types of PyTorch play no role here, and mypy would read it for half a minute
SETTINGS = '''
[mypy]
ignore_missing_imports = True
cache_dir = cache
[mypy-torch.*]
follow_imports = skip
'''


def test_each_wrong_argument_has_an_error_and_right_ones_have_none(tmp_path):
    script = tmp_path/'script.py'
    script.write_text(RIGHT + '\n'.join(WRONG))
    settings = tmp_path/'mypy.ini'
    settings.write_text(SETTINGS)
    from mypy import api  # of the extra `ci`
    out, err, _ = api.run(['--config-file', str(settings), str(script)])
    assert not err
    errors = [o for o in out.splitlines() if ': error: ' in o]
    assert len(errors) == len(WRONG)
    first_line = RIGHT.count('\n')+1
    for line, (error, expected) in enumerate(zip(errors, WRONG.values()), first_line):
        assert f'script.py:{line}: ' in error
        assert expected in error
