"Fits with recomputed blocks, and the plain fits that they equal bit for bit"
from common import *
from limited_memory import auto_cache, split_auto
from stateful import Adds
from fastxtend_accum.demo import Activations


# Fits

def state(learn):
    "Returns copies of weights and buffers by name"
    return {name: value.clone() for name, value in learn.model.state_dict().items()}


def trained(make, *cbs, n_epoch=1, method='fit', fit=fit, **kwargs):
    "Returns a Learner that `make` has made, after a fit that has changed its weights"
    set_seed(0)
    learn = make(cbs=list(cbs), **kwargs)
    before = state(learn)
    set_seed(7)
    fit(learn, n_epoch, 1e-2, method=method)
    after = state(learn)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) > 3
    return learn


def trained_in_less(make, share, *cb_types, ours=ActivationCheckpointing, **kwargs):
    "Returns the plain Learner, and one with `ours` where memory runs out above `share` of what the plain one takes"
    def new_callbacks(): return [cb_type() for cb_type in cb_types]
    plain = trained(make, Activations(), *new_callbacks(), **kwargs)
    most = plain.activations.mb
    assert most > 0
    saving = trained(make, Activations(share*most), *new_callbacks(), ours(), **kwargs)
    cb = saving.activation_checkpointing
    assert cb.n_recomputed, 'no block was recomputed'
    return plain, saving


def assert_same_fit(ours, plain):
    "Asserts the same weights, buffers, losses and metrics, bit for bit, and that the model has its own forward pass"
    state_of_ours = state(ours)
    state_of_plain = state(plain)
    assert state_of_ours.keys() == state_of_plain.keys()
    for name, value in state_of_plain.items():
        assert torch.equal(state_of_ours[name], value), f'{name} differs'
    assert losses(plain)
    assert_same_logs(ours, plain)
    assert_own_forward(ours)


def assert_own_forward(learn):
    "Asserts that all modules have the forward pass of their class"
    replaced = [m for m in learn.model.modules() if 'forward' in vars(m)]
    assert not replaced


# Callbacks

class Passes(Callback):
    "The samples of each forward pass in training, those of passes that fail included"
    def before_fit(self):
        self.sizes = []
        self.hook = self.model.register_forward_pre_hook(self.note)

    def note(self, module, args):
        if module.training: self.sizes.append(len(args[0]))

    def after_fit(self): self.hook.remove()


# Models of blocks

class Contrast(nn.Module):
    "A loss that compares each sample with all others of the batch"
    def forward(self, pred, targ):
        normed = F.normalize(pred, dim=1)
        partners = torch.arange(len(normed)).roll(1)
        return F.cross_entropy(2*normed@normed.T, partners)


def mlp(*kinds, loss_func=None, n=64, n_layers=4, **kwargs):
    "Returns a Learner for `n` samples. Its blocks are a linear layer, a module of each of `kinds`, and a ReLU"
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(n, 20, generator=generator)
    labels = torch.randint(4, (n,), generator=generator)
    samples = list(zip(inputs, labels))
    dls = DataLoaders(DataLoader(samples, bs=32, shuffle=True), DataLoader(samples[:16], bs=16))
    blocks = []
    for _ in range(n_layers):
        others = [kind() for kind in kinds]
        blocks.append(nn.Sequential(nn.Linear(20, 20), *others, nn.ReLU()))
    m = nn.Sequential(*blocks, nn.Linear(20, 4))
    return Learner(dls, m, loss_func or CrossEntropyLossFlat(), **kwargs)


batch_norm = partial(nn.BatchNorm1d, 20)
some_dropout = partial(nn.Dropout, .3)


def with_batch_norm(**kwargs):
    return mlp(batch_norm, **kwargs)


def with_dropout(**kwargs):
    return mlp(some_dropout, **kwargs)


def contrastive(**kwargs):
    return mlp(some_dropout, loss_func=Contrast(), **kwargs)


class Deep(nn.Module):
    "A residual network of `n` blocks with BatchNorm and dropout, for the regression in tests/common.py"
    def __init__(self, width=16, n=4, p=.2):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(n):
            layer = nn.Linear(width, width)
            norm = nn.BatchNorm1d(width)
            self.layers.append(nn.Sequential(layer, norm, nn.Tanh(), nn.Dropout(p)))
        self.stem = nn.Linear(5, width)
        self.head = nn.Linear(width, 1)
        self.double()

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers: x = x+layer(x)
        return self.head(x)


def layers(m):
    return m.layers


def regression(make_model, bs=32, n=96):
    "Returns a function that makes a Learner of the model that `make_model` makes"
    def make(**kwargs):
        return make_learner(bs, n=n, m=make_model(), opt_func=Adam, **kwargs)
    return make


deep = regression(Deep)


# Blocks in a row

class Block(nn.Sequential):
    "What `kind` adds to the input, and two layers"
    def __init__(self, kind=Adds):
        super().__init__(kind(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))


class Chain(nn.Module):
    "Three blocks in a row. Their inputs are nothing that a layer keeps anyway"
    def __init__(self, make_block):
        super().__init__()
        self.layers = nn.ModuleList(make_block() for _ in range(3))
        self.head = nn.Linear(5, 1)
        self.double()

    def call_layer(self, layer, x): return layer(x)

    def forward(self, x):
        for layer in self.layers: x = self.call_layer(layer, x+1)
        return self.head(x)

