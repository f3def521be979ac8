"""fastai's own notebooks: each fit ends with the same weights if every Learner in them has a callback of ours

    git clone https://github.com/fastai/fastai
    FASTAI_NOTEBOOKS=fastai/nbs RECORD=1 python -m pytest -m libraries tests/libraries/test_fastai.py

What needs a GPU or a download fails with and without a callback, and is not compared. By itself, this file runs one notebook."""
import contextlib, importlib, io, re, signal, subprocess, sys
import nbformat, pytest
from large_batch import *
from fastai.test_utils import *

pytestmark = pytest.mark.libraries

kinds = dict(
    plain=lambda bs: None, again=lambda bs: None,
    window=lambda bs: GradientAccumulation(bs), auto=lambda bs: GradientAccumulation(micro_batch_size='auto'),
    checkpointing=lambda bs: ActivationCheckpointing(),
    all_blocks=lambda bs: ActivationCheckpointing(blocks=lambda m: [m], adapt=False))
notebooks = """12_optimizer 13_callback.core 13a_learner 13b_metrics 14_callback.schedule 14a_callback.data
    15_callback.hook 16_callback.progress 17_callback.tracker 18_callback.fp16 18a_callback.training 19_callback.mixup
    20_interpret""".split()
both = 'accumulates, too'  # a Learner of 18a has fastai's GradientAccumulation: the error says to keep one
SECONDS = 120  # for a cell

def state(learn):
    return torch.cat([o.detach().double().flatten() for o in (*learn.model.parameters(), *learn.model.buffers())])

def run(path, kind):
    "Runs the cells of a notebook; returns the error of each, or None, and the weights after each fit by cell"
    init,fit,errors,fits,cell = Learner.__init__,Learner.fit,{},{},0
    def with_callback(self, dls, *args, **kwargs):
        init(self, dls, *args, **kwargs)
        if bs := getattr(getattr(dls, 'train', None), 'bs', None): self.add_cbs(L(kinds[kind](bs)).filter())
    def noted(self, *args, **kwargs):
        try: fit(self, *args, **kwargs)
        finally: fits.setdefault(cell, []).append(state(self))
    def too_long(*args): raise TimeoutError
    signal.signal(signal.SIGALRM, too_long)
    sources = [o.source for o in nbformat.read(path, 4).cells if o.cell_type == 'code']
    module = first(re.findall(r'#\|\s*default_exp\s+(\S+)', '\n'.join(sources)))
    names = globals() | vars(importlib.import_module(f'fastai.{module}')) | dict(show_doc=noop, slow=noop)
    Learner.__init__,Learner.fit = with_callback,noted
    for cell,source in enumerate(sources):
        if re.match(r'#\|\s*(export|eval|default_exp|cuda)|.*nbdev|.*untar_data', source): continue
        set_seed(cell)
        signal.alarm(SECONDS)
        try:
            with contextlib.redirect_stdout(io.StringIO()): exec(compile(source, f'cell {cell}', 'exec'), names)
            errors[cell] = None
        except Exception as e: errors[cell] = str(e)
        signal.alarm(0)
        plt.close('all')
    return errors,fits

@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    "What `run` returns, by notebook and kind; each in a process of its own"
    folder,res = tmp_path_factory.mktemp('runs'),{}
    for name,kind in itertools.product(notebooks, kinds):
        path = Path(os.environ['FASTAI_NOTEBOOKS']).absolute()/f'{name}.ipynb'
        command = [sys.executable, __file__, path, kind, folder/'run.pt']
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        res[name,kind] = torch.load(folder/'run.pt')
    return res

@pytest.mark.parametrize('kind,what', [
    ('again', 'no callback'), ('window', 'GradientAccumulation(bs)'), ('auto', "micro_batch_size='auto'"),
    ('checkpointing', 'ActivationCheckpointing'), ('all_blocks', 'ActivationCheckpointing(adapt=False)')])
def test_fits_are_equal_bit_for_bit(runs, kind, what):
    differences,n_both = [],0
    for name in notebooks:
        (errors,fits),(errors2,fits2) = runs[name,'plain'],runs[name,kind]
        for cell in [k for k,e in errors.items() if e is None]:
            is_both = errors2[cell] is not None and both in errors2[cell]
            n_both += is_both
            assert errors2[cell] is None or is_both, f'{name}, cell {cell}: {errors2[cell]}'
            for a,b in zip(fits.get(cell, []), fits2.get(cell, []), strict=True) if not is_both else ():
                differences.append(float((a.nan_to_num(7.)-b.nan_to_num(7.)).abs().max()))
    record('fastai', f'{len(differences)} fits of its own notebooks, {what}', max(differences))
    assert max(differences) == 0 and len(differences) > 60 and n_both == (0 if kind == 'again' else 3)

if __name__ == '__main__': torch.save(run(*sys.argv[1:3]), sys.argv[3])
