"""fastai's own notebooks: each fit ends with the same weights if every Learner in them has a callback of ours

    git clone https://github.com/fastai/fastai
    FASTAI_NOTEBOOKS=fastai/nbs RECORD=1 python -m pytest -m libraries tests/libraries/test_fastai.py

What needs a GPU or a download fails with and without a callback. This file by itself runs one notebook."""
import importlib, re, signal, subprocess, sys
import nbformat
from large_batch import *
from fastai.test_utils import *

def none(bs): pass
callbacks = {'':none, 'no callback':none, 'GradientAccumulation(bs)':GradientAccumulation,
             "micro_batch_size='auto'":lambda bs: GradientAccumulation(micro_batch_size='auto'),
             'ActivationCheckpointing':lambda bs: ActivationCheckpointing(),
             'ActivationCheckpointing(adapt=False)':lambda bs: ActivationCheckpointing(lambda m: [m], adapt=False)}
notebooks = """12_optimizer 13_callback.core 13a_learner 13b_metrics 14_callback.schedule 14a_callback.data
    15_callback.hook 16_callback.progress 17_callback.tracker 18_callback.fp16 18a_callback.training 19_callback.mixup
    20_interpret""".split()

def run(path, kind):
    "Runs the cells of a notebook; returns the error of each, or None, and the weights after its fits"
    init,fit,errors,fits = Learner.__init__,Learner.fit,{},{}
    def with_callback(self, dls, *args, **kwargs):
        init(self, dls, *args, **kwargs)
        bs = getattr(getattr(dls, 'train', None), 'bs', None)
        self.add_cbs(L(bs and callbacks[kind](bs)))
    def noted(self, *args, **kwargs):
        try: fit(self, *args, **kwargs)
        finally:
            state = *self.model.parameters(),*self.model.buffers()
            fits.setdefault(cell, []).append(torch.cat([o.detach().double().flatten() for o in state]))
    signal.signal(signal.SIGALRM, lambda *args: stop(TimeoutError))
    sources = [o.source for o in nbformat.read(path, 4).cells if o.cell_type == 'code']
    module = re.search(r'#\|\s*default_exp\s+(\S+)', '\n'.join(sources))[1]
    names = globals() | vars(importlib.import_module(f'fastai.{module}')) | dict(show_doc=noop, slow=noop)
    Learner.__init__,Learner.fit = with_callback,noted
    for cell,source in enumerate(sources):
        if re.match(r'#\|\s*(export|eval|default_exp|cuda)|.*nbdev|.*untar_data', source): continue
        set_seed(cell)
        signal.alarm(120)
        try: errors[cell] = exec(compile(source, f'cell {cell}', 'exec'), names)
        except Exception as e: errors[cell] = str(e)
        signal.alarm(0)
    return errors,fits

@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    "What `run` returns, by notebook and kind; each in a process of its own"
    folder,res = tmp_path_factory.mktemp('runs'),{}
    nbs = Path(os.environ['FASTAI_NOTEBOOKS']).absolute()
    for name,kind in itertools.product(notebooks, callbacks):
        command = [sys.executable, __file__, nbs/f'{name}.ipynb', kind, folder/'run.pt']
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        res[name,kind] = torch.load(folder/'run.pt')
    return res

@pytest.mark.parametrize('kind', [*callbacks][1:])
def test_fits_are_equal_bit_for_bit(runs, kind):
    differences,n_both = [],0
    for name in notebooks:
        (errors,fits),(errors2,fits2) = runs[name,''],runs[name,kind]
        for cell in [k for k,e in errors.items() if e is None]:
            is_both = 'accumulates, too' in str(errors2[cell])  # a Learner of 18a has fastai's GradientAccumulation
            n_both += is_both
            assert is_both or errors2[cell] is None, (name, cell, errors2[cell])
            for a,b in zip(fits.get(cell, []), fits2.get(cell, []), strict=True) if not is_both else ():
                differences.append(float((a.nan_to_num(7.)-b.nan_to_num(7.)).abs().max()))
    assert len(differences) > 60 and n_both == 3*(kind != 'no callback')
    measured('fastai', f'{len(differences)} fits of its own notebooks, {kind}', max(differences), 0)

if __name__ == '__main__': torch.save(run(*sys.argv[1:3]), sys.argv[3])
