"The contestants: one function each, that makes the training of the same model on the same batches"
import logging, time

import torch
from torch import nn

class Batches:
    "Batches that wait in memory, so that the loop is timed and not a loader; calls `ask` for each that is asked for"
    def __init__(self, batches:list, n:int):
        self.batches,self.n,self.per,self.bs,self.ask = batches,n,1,len(batches[0][1]) if batches else 1,lambda: None

    def join(self, k):
        "Yield `k` batches as one from now on, and call `ask` once for each of them"
        whole = [[self.batches[(i+j)%len(self.batches)] for j in range(k)] for i in range(0, len(self.batches), k)]
        self.batches,self.per = [tuple(map(torch.cat, zip(*o))) for o in whole],k
        self.bs *= k

    def to(self, device): "Nothing to do: they are made on the device"

    def __len__(self): return self.n//self.per
    def __iter__(self):
        for i in range(len(self)):
            for _ in range(self.per): self.ask()
            yield self.batches[i%len(self.batches)]
        self.ask()

class Task:
    "What is learned: a model, its loss function, and `n` batches of 16 samples"
    def __init__(self, n:int, device:str='cpu', seed:int=0):
        torch.manual_seed(seed)
        layers = nn.Linear(32, 64),nn.ReLU(),nn.Linear(64, 64),nn.ReLU(),nn.Linear(64, 10)
        self.model = nn.Sequential(*layers).to(device)
        self.loss_func,self.lr,self.device,self.opt = nn.CrossEntropyLoss(),1e-3,device,None
        def batch(): return torch.randn(16, 32, device=device),torch.randint(10, (16,), device=device)
        self.batches = Batches([batch() for _ in range(64)], n)

    def torch_adam(self):
        self.opt = torch.optim.Adam(self.model.parameters(), self.lr)
        return self.opt

    def is_step(self, o:torch.Tensor):
        "Whether `o` is a step counter of PyTorch's Adam, which it keeps on the CPU on every machine"
        return self.opt is not None and any(o is state['step'] for state in self.opt.state.values())

class Stack(Task):
    "Four square layers with `n_params` parameters in all, and batches of 16 samples of 64 tokens"
    def __init__(self, n_params:int, n:int):
        super().__init__(n)
        width = round((n_params/4)**.5)
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
        self.batches.batches = [(torch.randn(16, 64, width), torch.randn(16, 64, width))]
        self.loss_func = nn.MSELoss()

def learner(task, *cbs, **kwargs):
    "A Learner with its defaults, Adam among them; no progress bar, nothing to validate on"
    import fastai.callback.progress, fastai.callback.schedule  # they patch Learner
    from fastai.basics import DataLoaders, Learner
    dls = DataLoaders(task.batches, Batches([], 0), device=task.device)
    return Learner(dls, task.model, task.loss_func, lr=task.lr, cbs=cbs, **kwargs)

def training(task, *cbs, **kwargs):
    "A function that trains for one epoch, in silence"
    learn = learner(task, *cbs, **kwargs)
    def train():
        with learn.no_bar(), learn.no_logging(): learn.fit(1)
    return train

def plain(task, k): return training(task)

def ours(task, k):
    from fastxtend_accum.all import GradientAccumulation
    return training(task, GradientAccumulation(k*task.batches.bs))

def ours_split(task, k):
    "The loader yields the whole window, which is split"
    from fastxtend_accum.all import GradientAccumulation
    bs = task.batches.bs
    task.batches.join(k)
    return training(task, GradientAccumulation(micro_batch_size=bs))

def ours_cache(task, k):
    "The same micro-batches, and one loss over all of them"
    from fastxtend_accum.all import GradientCache
    bs = task.batches.bs
    task.batches.join(k)
    return training(task, GradientCache(bs))

def ours_schedule(task, k):
    "The schedule is asked for a size at every window, but keeps to one: the windows are those of the others"
    from fastxtend_accum.all import GradientAccumulationSchedule
    return training(task, GradientAccumulationSchedule(k*task.batches.bs, k*task.batches.bs, finish=1.))

def fastai(task, k):
    from fastai.callback.training import GradientAccumulation
    return training(task, GradientAccumulation(k*task.batches.bs))

def fastxtend(task, k):
    from fastxtend.callback.gradaccum import GradientAccumulation
    return training(task, GradientAccumulation(k*task.batches.bs))

def lightning(task, k):
    import lightning as L
    logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
    class Module(L.LightningModule):
        def __init__(self): super().__init__(); self.model = task.model
        def training_step(self, batch, i): return task.loss_func(self.model(batch[0]), batch[1])
        def configure_optimizers(self): return task.torch_adam()
    def train():
        trainer = L.Trainer(max_epochs=1, accumulate_grad_batches=k, devices=1, logger=False,
                            accelerator='gpu' if task.device == 'cuda' else 'cpu', enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(Module(), task.batches)
    return train

def accelerate(task, k):
    from accelerate import Accelerator
    accelerator = Accelerator(gradient_accumulation_steps=k, cpu=task.device == 'cpu')
    model,opt = accelerator.prepare(task.model, task.torch_adam())
    def train():
        for x,y in task.batches:
            with accelerator.accumulate(model):
                accelerator.backward(task.loss_func(model(x), y))
                opt.step()
                opt.zero_grad()
    return train

def by_hand(task, k):
    opt = task.torch_adam()
    def train():
        for i,(x,y) in enumerate(task.batches):
            (task.loss_func(task.model(x), y)/k).backward()
            if (i+1)%k == 0:
                opt.step()
                opt.zero_grad()
    return train

contestants = plain,ours,ours_split,ours_cache,ours_schedule,fastai,fastxtend,lightning,accelerate,by_hand
cases = {f.__name__:f for f in contestants}
