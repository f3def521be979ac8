"The signatures of the public names are typed, so that a type checker finds wrong arguments"
import pytest
from mypy import api

pytestmark = pytest.mark.long  # mypy reads fastai and PyTorch

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


def errors_in(text, tmp_path):
    "Returns the errors that mypy finds in `text`, a list of lines"
    script = tmp_path/'script.py'
    script.write_text(text)
    out, err, _ = api.run(['--ignore-missing-imports', '--cache-dir', str(tmp_path/'cache'), str(script)])
    assert not err
    return [o for o in out.splitlines() if ': error: ' in o]


def test_right_arguments_have_no_error(tmp_path):
    assert errors_in(RIGHT, tmp_path) == []


def test_each_wrong_argument_has_an_error(tmp_path):
    lines = ['from fastxtend_accum.all import *', *WRONG]
    errors = errors_in('\n'.join(lines), tmp_path)
    assert len(errors) == len(WRONG)
    for error, expected in zip(errors, WRONG.values()): assert expected in error
