"Layers that change something of their own in each forward pass in training. It shows if a pass runs twice, or in parts"
from common import *


class Adds(nn.Module):
    "In training, adds to its input what `step` returns; the base class of all layers here"
    def __init__(self):
        super().__init__()
        self.set_up()

    def set_up(self): pass
    def step(self, x): return 0.

    def forward(self, x):
        return x+self.step(x) if self.training else x


# A running mean of the inputs, in a tensor

def zeros():
    return torch.zeros(5, dtype=torch.float64)


class BufferInPlace(Adds):
    def set_up(self): self.register_buffer('mean', zeros())

    def step(self, x):
        with torch.no_grad(): self.mean.lerp_(x.mean(0), .1)
        return self.mean.clone()


class BufferOfSubclass(BufferInPlace):
    "As fastai's tensors of images"
    def set_up(self): self.register_buffer('mean', zeros().as_subclass(TensorBase))

    def step(self, x): return super().step(x).as_subclass(Tensor)


class BufferByData(BufferInPlace):
    def step(self, x):
        self.mean.data.lerp_(x.detach().mean(0), .1)
        return self.mean.clone()


class NewBuffer(BufferInPlace):
    "Replaces the buffer"
    def step(self, x):
        self.mean = .9*self.mean + .1*x.detach().mean(0)
        return self.mean


class AttributeInPlace(BufferInPlace):
    def set_up(self): self.mean = zeros()


class OnlyInTuple(Adds):
    "The tensor is an item of a tuple, and nothing else refers to it"
    def set_up(self): self.means = (zeros(),)

    def step(self, x):
        with torch.no_grad(): self.means[0].lerp_(x.mean(0), .1)
        return self.means[0].clone()


class BufferOfTwo(BufferInPlace):
    "Reads the buffer from another module, which shares it"
    def set_up(self):
        super().set_up()
        self.reader = nn.Module()
        self.reader.register_buffer('mean', self.mean)

    def step(self, x):
        super().step(x)
        return self.reader.mean.clone()


class KeptForBackward(BufferInPlace):
    "The backward pass needs the buffer, which the next pass changes in place"
    def step(self, x):
        super().step(x)
        return x*self.mean


class LastInputs(Adds):
    "Keeps what it has computed last, in a tuple in a list"
    def set_up(self): self.hidden = None

    def step(self, x):
        before = self.hidden[0][0] if self.hidden else 0.
        self.hidden = [((x+before).detach().tanh(),)]
        return before


class SparseBuffer(Adds):
    "Its tensor cannot be copied as others are. It is the only one here that nothing changes"
    def set_up(self):
        graph = torch.eye(5, dtype=torch.float64).to_sparse()
        self.register_buffer('graph', graph, persistent=False)

    def step(self, x): return .1*(self.graph @ x.detach().T).T


class Number(Adds):
    "Counts its passes"
    def set_up(self): self.n = 0

    def step(self, x):
        self.n += 1
        return .01*self.n


# Random numbers

class TorchNoise(Adds):
    def step(self, x): return torch.randn_like(x)


class PythonNoise(Adds):
    def step(self, x): return random.random()


class NumpyNoise(Adds):
    def step(self, x): return np.random.rand()


class ItemsInList(Adds):
    "Appends to a list in each pass"
    def set_up(self): self.items = []

    def step(self, x):
        self.items.append(1.)
        return .01*len(self.items)


STATISTICS = [BufferInPlace, BufferOfSubclass, BufferByData, NewBuffer]
OTHER_TENSORS = [AttributeInPlace, BufferOfTwo, KeptForBackward, LastInputs]
SHARED_NOISE = [TorchNoise, PythonNoise, NumpyNoise]  # from generators that all code shares
STATEFUL = [*STATISTICS, *OTHER_TENSORS, Number, *SHARED_NOISE]  # what a Snapshot holds
OUT_OF_REACH = [OnlyInTuple, ItemsInList]  # what it does not
