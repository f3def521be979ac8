"What a fit keeps: the state of all that its Learner reaches, in whatever place"
import queue
import weakref
from argparse import Namespace

import pytest
from fastai.vision.all import Image, ImageDataLoaders, aug_transforms
from torch.utils.data import DataLoader as TorchLoader

from common import *
from fastxtend_accum.resuming.graph import Graph, moved
from fastxtend_accum.resuming.parts import root_of
from resume_layouts import WIDTH, fastai_data, make, mlp, samples, with_valid
from resumed import Stops, assert_goes_on, learner, new_process, steps, train

SITUATIONS = {}


def situation(f):
    SITUATIONS[f.__name__] = f
    return f


def fit_beside(kind): return train(learner(kind()))


def callback_situation(kind):
    "The situation is a fit beside a callback of this class"
    SITUATIONS[kind.__name__] = partial(fit_beside, kind)
    return kind


# Callbacks

def move_weights(cb, n):
    for p in cb.model.parameters(): p.data += .001*n


class Weighs(Callback):
    def __init__(self, weight): self.weight = weight
    def after_step(self): self.weight *= 1.01


def weighted(pred, targ, weight): return (weight*(pred-targ)**2).mean()


@situation
def tensor_shared_with_the_loss():
    weight = torch.ones(1)
    return train(learner(Weighs(weight), loss_func=partial(weighted, weight=weight)))


@callback_situation
class Clips(Callback):
    "Holds the weights, as WGAN does"
    def before_fit(self): self.weights = [p.data for p in self.model.parameters()]

    def after_step(self):
        for o in self.weights: o.clamp_(-.3, .3)


@callback_situation
class SetsDecay(Callback):
    "Holds hyper-parameters of the optimizer, as schedulers of users do"
    def before_fit(self): self.hypers = self.opt.hypers[-1]
    def after_step(self): self.hypers['wd'] += .01


class Stages(Callback):
    "Trains on other loaders in each epoch"
    def __init__(self): self.stages = [fastai_data(), fastai_data()]
    def before_epoch(self): self.learn.dls = self.stages[self.epoch%2]


@situation
def loaders_of_several_stages():
    cb = Stages()
    return train(learner(cb, dls=cb.stages[0]))


class OwnOptimizer(Callback):
    "A trained tensor with an optimizer, which has the name of the Learner's own"
    def __init__(self):
        self.center = torch.zeros(1, requires_grad=True)
        self.opt = torch.optim.SGD([self.center], lr=.1, momentum=.9)

    def after_loss(self):
        if self.training: self.learn.loss_grad = self.learn.loss_grad+(self.pred.mean()-self.center).pow(2).sum()

    def after_step(self):
        self.opt.step()
        self.opt.zero_grad()


@situation
def optimizer_of_a_callback():
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of a loss that a callback changes
        return train(learner(OwnOptimizer()))


class Slotted: __slots__ = 'mean',


class Total(Slotted):
    "An object with slots and other attributes"
    def __init__(self):
        self.mean = 0.
        self.n = 0


class Seen:
    "Of which the callback makes objects during the fit"
    def __init__(self, mean): self.mean = mean


class Newest(collections.deque): pass


@callback_situation
class Recent(Callback):
    "Multiplies inputs by what an object with slots, a deque and a defaultdict have counted"
    def __init__(self):
        self.total = Total()
        self.recent = Newest(maxlen=3)
        self.counts = defaultdict(int)

    def before_batch(self):
        if not self.training: return
        mean = float(self.x.mean())
        self.total.mean += mean
        self.total.n += 1
        self.recent.append(Seen(mean))
        self.counts['n'] += 1
        seen = self.total.mean+self.total.n+sum(o.mean for o in self.recent)
        self.learn.xb = (self.x*(1+.01*seen+.01*self.counts['n']),)


@callback_situation
class Marked(Callback):
    "A tensor with an attribute, a sparse one, texts in an array"
    def __init__(self):
        self.mean = torch.zeros(())
        self.mean.origin = Path('data')
        self.sparse = torch.eye(3).to_sparse()
        self.names = np.array(['a', 'b'])

    def before_batch(self):
        if not self.training: return
        self.mean += self.x.mean()
        self.sparse = self.sparse*1.1
        self.learn.xb = (self.x+.01*self.mean+.001*self.sparse.to_dense().sum(),)


@callback_situation
class ChangesInputs(Callback):
    "By two models in a list, each of which has a second layer"
    def __init__(self): self.nets = [nn.Sequential(nn.Linear(WIDTH, WIDTH), act) for act in (nn.ReLU(), nn.Tanh())]

    def before_batch(self):
        with torch.no_grad(): self.learn.xb = (self.x+sum(net(self.x) for net in self.nets),)


class TwoOfAKind(Callback):
    def __init__(self, factor):
        self.factor = factor
        self.n = 0

    def before_batch(self):
        self.n += self.training
        self.learn.xb = (self.x*(1+self.n*self.factor),)


@situation
def two_callbacks_of_a_class(): return train(learner(TwoOfAKind(.01), TwoOfAKind(-.005)))


class Switches(Callback):
    "Sets another DataLoader, loss and rate, and remembers what was there"
    def __init__(self): self.other = F.l1_loss  # a file may name what the Learner has before the fit

    def before_epoch(self):
        if self.epoch != 1: return
        self.before = self.learn.loss_func
        self.learn.loss_func = self.other
        self.learn.dls.train.bs = 2

    def after_epoch(self):
        if self.epoch == 1: self.learn.loss_func = self.before


@situation
def settings_that_change_in_an_epoch():
    return train(learner(Switches()), n_epoch=3)


# Loss, modules and data

class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = 0.

    def forward(self, pred, targ):
        loss = F.mse_loss(pred, targ)
        self.mean = .9*self.mean+.1*loss.item()
        return loss*(1+self.mean)


@situation
def loss_with_memory():
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # a loss that is no mean of its samples
        return train(learner(loss_func=Remembering()))


class AfterStep(Callback):
    def __init__(self, f): self.f = f
    def after_step(self): self.f()


@situation
def weight_in_a_closure():
    scale = nn.Parameter(torch.ones(1))
    def move(): scale.data += .01
    def scaled_loss(pred, targ): return F.mse_loss(pred*scale.detach(), targ)
    return train(learner(AfterStep(move), loss_func=scaled_loss))


class Adds:
    def __init__(self):
        self.rng = np.random.default_rng(3)
        self.noise = .1

    def __call__(self, x): return x+self.noise*float(self.rng.normal())


class Transformed(list):
    def __init__(self, items):
        super().__init__(items)
        self.transform = Adds()

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return self.transform(x), y


class Fades(Callback):
    "Holds a transform of the data, and weakens it"
    def __init__(self, transform): self.transform = transform
    def after_epoch(self): self.transform.noise *= .5


@situation
def transform_that_a_callback_has_too():
    dls = fastai_data(Transformed)
    return train(learner(Fades(dls.train.dataset.transform), dls=dls))


@situation
def generator_of_a_collate_function():
    rng = np.random.default_rng(4)
    def collate(items): return tuple(torch.stack(o)+.1*float(rng.normal()) for o in zip(*items))
    dl = TorchLoader(samples(), 4, shuffle=True, collate_fn=collate)
    return train(learner(dls=with_valid(dl)))


class EpochSampler(torch.utils.data.Sampler):
    "Shuffles by the number of the epoch, which somebody sets"
    epoch = 0
    def __init__(self): pass
    def __len__(self): return 100
    def __iter__(self): return iter(torch.randperm(100, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class SetsEpoch(Callback):
    def before_epoch(self): self.learn.dls.train.sampler.epoch += 1


@situation
def sampler_that_counts_epochs():
    dl = TorchLoader(samples(), 4, sampler=EpochSampler())
    return train(learner(SetsEpoch(), dls=with_valid(dl)))


def doubled(self, x): return 2*nn.Sequential.forward(self, x)


@situation
def method_that_no_class_has():
    m = mlp()
    m.forward = types.MethodType(doubled, m)
    return train(learner(m=m))


def folder_of_images():
    for i in range(125):
        file = Path(f'images/{i % 2}/{i}.png')
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.RandomState(i).randint(0, 255, (8, 8, 3), dtype=np.uint8)).save(file)
    return Path('images')


@situation
def images_of_a_folder():
    "fastai opens them by a method of a class, `PILImage.create`"
    tfms = aug_transforms(size=8)
    dls = ImageDataLoaders.from_folder(folder_of_images(), valid_pct=.2, seed=42, bs=4, num_workers=0, batch_tfms=tfms)
    accum = GradientAccumulation(8, remainder='step', verbose=False)
    m = nn.Sequential(nn.Flatten(), nn.Linear(3*8*8, 2))
    return train(Learner(dls, m, CrossEntropyLossFlat(), cbs=[accum, Stops()]))


@callback_situation
class CountsFromStart(Callback):
    "Moves the weights by an attribute that has the name of one of the Recorder's"
    def before_fit(self): self.start_epoch = 0

    def after_step(self):
        self.start_epoch += 1
        move_weights(self, self.start_epoch)


class HoldsLayers(Callback):
    "A set of layers, of which two print the same"
    def before_fit(self): self.layers = {*self.model.modules()}


@situation
def set_of_layers():
    m = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1))
    return train(learner(HoldsLayers(), m=m))


@callback_situation
class MovesByArguments(Callback):
    "Moves the weights by a count in an object of Python's library, and by one in a hook"
    def __init__(self): self.args = Namespace(n=0)
    def before_fit(self): self.handle = self.model[0].register_forward_hook(Noise())
    def after_fit(self): self.handle.remove()

    def after_step(self):
        self.args.n += 1
        move_weights(self, self.args.n)


class Noise:
    "A hook with a generator of its own"
    def __init__(self): self.generator = torch.Generator().manual_seed(1)
    def __call__(self, m, args, out): return out+torch.rand(out.shape, generator=self.generator)


@callback_situation
class Forgets(Callback):
    "Deletes an attribute in the first step, and moves the weights if it is there"
    def __init__(self): self.first = True

    def after_step(self):
        if hasattr(self, 'first'): del self.first
        else: move_weights(self, 1)


@callback_situation
class RenamesFolder(Callback):
    "Changes the folder of a path in each step, and moves the weights by it"
    def __init__(self): self.file = Path('0/model.pth')

    def after_step(self):
        n = int(self.file.parent.name)+1
        self.file = Path(f'{n}/model.pth')
        move_weights(self, n)


def doubled_loss(f):
    @functools.wraps(f)
    def doubled(*args): return 2*f(*args)
    return doubled


def halved(pred, targ): return F.mse_loss(pred, targ)/2


class MovesByLoss(Callback):
    "Moves the weights by a function whose name another one has"
    def __init__(self, f): self.f = f

    def after_step(self):
        move_weights(self, self.f(self.pred, self.y).item())


@situation
def function_with_the_name_of_another_one():
    return train(learner(MovesByLoss(halved), loss_func=doubled_loss(halved)))


@pytest.mark.thin(5)
@pytest.mark.parametrize('name', SITUATIONS)
def test_a_fit_goes_on(name): assert_goes_on(SITUATIONS[name])


# What is not kept

class Holds(Callback):
    "What no file can hold"
    def __init__(self):
        self.numbers = iter(range(1000))
        self.cycle = []
        self.cycle.append(self.cycle)

    def before_batch(self): next(self.numbers)


class Unnamed: pass
def made(): return Unnamed()


class MakesObjects(Callback):
    "Of a class that nothing had when the fit began, and that no method of the callback names"
    def before_batch(self): self.last = made()


class HoldsMethods(Callback):
    "Of lists, which pickle would make again as methods of other lists"
    def __init__(self):
        self.losses = []
        self.add = self.losses.append

    def after_batch(self): self.add(self.loss.item())


class HoldsSet(Callback):
    "Whose objects have another order in each process"
    def __init__(self): self.things = {Unnamed(), Unnamed()}


class KeepsOutside(Callback):
    "Keeps its state in a class, in a queue and by the address of the optimizer, and writes to a file of its own"
    n_batches = 0
    def __init__(self):
        self.queue = queue.SimpleQueue()
        self.file = open(os.devnull, 'w')
        self.counts = Counter()

    def after_step(self):
        KeepsOutside.n_batches += 1
        self.counts[id(self.opt)] += 1


class AddsWeight(Callback):
    "Adds a weight to the model in the fit"
    def before_train(self): self.model.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize('kind, text', [
    (KeepsOutside, r'test_graph.KeepsOutside.n_batches \(an attribute of a class'),
    (KeepsOutside, 'KeepsOutside.queue '),
    (KeepsOutside, 'KeepsOutside.file '),
    (KeepsOutside, r'KeepsOutside.counts \(it has the id\(\) of opt'),
    (AddsWeight, r'model._parameters \(it has a weight that was added during the fit'),
    (HoldsMethods, r'HoldsMethods.add \(it has builtins.getattr'),
    (HoldsSet, r'HoldsSet.things \(it is a set of objects'),
    (Holds, r'Holds.numbers \(it is an iterator'),
    (Holds, 'Holds.cycle '),
    (MakesObjects, r'MakesObjects.last \(it has test_graph.Unnamed')])
def test_what_is_not_kept_is_named(kind, text):
    with pytest.warns(UserWarning, match=f'does not keep .*{text}'): train(learner(kind()), n_epoch=2, every=26)


def sees(*args): pass


class HooksAtStart(Callback):
    "Adds hooks where a process that continues adds them again"
    def before_fit(self): self.model[0].register_forward_hook(sees)
    def before_train(self): self.handle = self.model[1].register_forward_hook(sees)
    def after_train(self): self.handle.remove()


class HoldsPython(Callback):
    "Has functions of Python's library, which do not change, a cache, as fastai's loaders of texts, and no generator"
    def __init__(self): self.calls = [os.system, Path().unlink, functools.lru_cache(len), random.SystemRandom()]
    def before_fit(self): self.owner = weakref.ref(self)


@pytest.mark.filterwarnings('error:AutoResume')
def test_what_needs_no_warning():
    """`learn.logger` is no state: a progress bar sets it, and takes it back after the fit. The fit that has ended is
    restored"""
    def script():
        learn = make(Stops(), HooksAtStart(), HoldsPython())
        learn.fit(1, cbs=AutoResume(every=10, verbose=False))
        return learn
    new_process(seed=1)
    expected = script()
    new_process()
    learn = script()
    assert steps.n == 0
    assert_same(weights(learn), weights(expected))


class GrowsLarge(Callback):
    def before_fit(self): self.learn.dls.train.dataset.noise = torch.zeros(2**21)
    def after_step(self): self.learn.dls.train.dataset.noise += 1


class WithNoise(list): pass


def test_large_data_that_change_are_named():
    learn = learner(GrowsLarge(), dls=fastai_data(WithNoise))
    with pytest.warns(UserWarning, match='noise .*it is large'): train(learn, n_epoch=1)


class model_average(Callback): pass


def test_paths_of_shared_objects_and_of_callbacks():
    "A shared object has one path, and a callback is no weight, whatever its name"
    learn = fit(make(model_average()), 1)
    shared = [1]
    learn.one = SimpleNamespace(items=shared)
    learn.other = learn.one
    graph = Graph(learn)
    assert [path for path, o in graph.objects.items() if o is learn.one] == ['learn.one']
    assert root_of('model_average') != 'model'
    assert graph.objects['model_average'] is learn.model_average


class Sees(Callback):
    def __init__(self, seen): self.seen = seen


def test_a_callback_gets_a_list_of_its_own():
    "The list that the script passed to it stays as it was"
    passed = [1]
    learn = fit(make(Sees(passed)), 1)
    graph = Graph(learn)
    rest = graph.state()['rest']
    passed.append(2)
    graph.restore(rest)
    assert learn.sees.seen == [1]
    assert passed == [1, 2]


def test_the_memory_of_a_tensor_moves_to_the_device_of_this_process():
    "As that of a file from a machine with a GPU does on one without"
    memory = tensor([1., 2.]).untyped_storage()
    assert moved(memory, 'cuda:0').device == default_device()
    assert moved(memory, 'cpu') is memory


def test_the_state_of_the_optimizer_is_not_among_what_each_process_saves():
    "In the second fit of a Learner, it is there from the beginning"
    state = Graph(fit(make(), 1)).state()
    assert len(state['weights']) > 10
    assert b'exp_avg' not in state['rest']
