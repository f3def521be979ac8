"ActivationCheckpointing: weights and buffers of the plain fit, bit for bit, in less memory"
import gc,weakref

import pytest, timm
from fastai.callback.mixup import MixUp
from fastai.text.models.awdlstm import WeightDropout
from fastai.vision.all import DataBlock, ImageBlock, MaskBlock, CategoryBlock, PILImage, PILMask, aug_transforms, create_timm_model, create_vision_model, resnet18, resnet34, unet_learner, vision_learner, xresnet18
from fastai.vision.models.xresnet import ResBlock, XResNet

from common import *
from fastxtend_accum.cache import GradientCache
from fastxtend_accum.checkpointing import ActivationCheckpointing, checkpointed, find_blocks
from fastxtend_accum.windows.nested import tensors_in
from benchmarks.counts import LiveBytes
from test_life import CANCELS, EVENTS, Fault
from test_observed import Fails

def state(learn): return {k:v.clone() for k,v in learn.model.state_dict().items()}

def assert_same_state(a, b):
    "Weights and buffers, bit for bit"
    a,b = state(a),state(b)
    assert a.keys() == b.keys() and len(a) > 3
    for k in a: assert torch.equal(a[k], b[k]), f'{k} differs by {(a[k].double()-b[k].double()).abs().max()}'

class Runs:
    "Counts how often the forward pass of a module's children of a kind is run"
    def __init__(self, model, kind=nn.BatchNorm2d):
        self.n = 0
        for m in model.modules():
            if isinstance(m, kind): m.register_forward_hook(self.count)
    def count(self, *args): self.n += 1

# Learners as they come

def image(i):
    rng = np.random.default_rng(i)
    return PILImage.create(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8))
def label(i): return 'abc'[i%3]
def mask(i): return PILMask.create(np.random.default_rng(i).integers(0, 3, (32, 32), dtype=np.uint8))

def image_dls(masks=False, n=24, bs=8):
    blocks = (ImageBlock, MaskBlock(codes=list('abc'))) if masks else (ImageBlock, CategoryBlock)
    block = DataBlock(blocks, get_x=image, get_y=mask if masks else label, splitter=lambda o: (list(range(16)), list(range(16, n))),
                      batch_tfms=aug_transforms(size=32))
    return block.dataloaders(list(range(n)), bs=bs, num_workers=0)

def learner_of(make, cbs=(), **kwargs):
    set_seed(42)
    return make(cbs=cbs, **kwargs)

def resnet(**kwargs): return vision_learner(image_dls(), resnet18, pretrained=False, **kwargs)
def xresnet(**kwargs): return vision_learner(image_dls(), xresnet18, pretrained=False, normalize=False, n_in=3, **kwargs)
def unet(**kwargs): return unet_learner(image_dls(True), resnet34, pretrained=False, n_out=3, **kwargs)
def narrow_xresnet(pretrained=False): return XResNet(ResBlock, 1, [1,1,1,1], stem_szs=(8, 8, 64), widen=.25)
def narrow_unet(**kwargs): return unet_learner(image_dls(True), narrow_xresnet, pretrained=False, n_out=3, **kwargs)
def of_timm(name, **kwargs): return Learner(image_dls(), timm.create_model(name, num_classes=3), CrossEntropyLossFlat(), **kwargs)
def regnet(**kwargs): return of_timm('regnetx_002', **kwargs)
def densenet(**kwargs): return of_timm('densenet121', **kwargs)
def convnext(**kwargs):
    m = timm.create_model('convnext_atto', num_classes=3, drop_path_rate=.3, drop_rate=.2, depths=(2, 2, 2, 2), dims=(8, 16, 24, 32))
    return Learner(image_dls(), m, CrossEntropyLossFlat(), **kwargs)
class Vit(nn.Module):
    "A small transformer of PyTorch's own layers, with dropout in its attention"
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)
    def forward(self, x): return self.head(self.encoder(self.patches(x).flatten(2).transpose(1, 2)).mean(1))
def transformer(**kwargs): return Learner(image_dls(), Vit(), CrossEntropyLossFlat(), **kwargs)

def trained(make, *cbs, method='fit_one_cycle', n_epoch=2, **kwargs):
    learn = learner_of(make, [*cbs], **kwargs)
    before = state(learn)
    set_seed(7)
    with quiet(learn): getattr(learn, method)(n_epoch)
    assert sum(not torch.equal(a, b) for a,b in zip(before.values(), state(learn).values())) > 3
    return learn

@pytest.mark.thin(5)
@pytest.mark.parametrize('make,cbs,method', [(resnet, [MixUp], 'fine_tune'), (xresnet, [], 'fit_one_cycle'), (narrow_unet, [], 'fit_one_cycle'),
                                            pytest.param(unet, [], 'fit_one_cycle', marks=pytest.mark.long), (convnext, [MixUp], 'fit_one_cycle'), (transformer, [], 'fit_one_cycle'), (regnet, [], 'fit_one_cycle'), (densenet, [], 'fit')])
def test_equals_the_plain_fit(make, cbs, method):
    "Adam, augmentation, dropout, BatchNorm; fine_tune freezes the body first"
    n_epoch = 1 if make in (resnet, unet, regnet, densenet) else 2
    plain,ours = (trained(make, *[o() for o in cbs], *more, method=method, n_epoch=n_epoch) for more in ([], [all_blocks()]))
    assert_same_state(ours, plain)
    assert losses(ours) == losses(plain) and len(losses(ours)) == len(ours.dls.train)*n_epoch
    assert not any('forward' in vars(m) for m in ours.model.modules())

# Blocks

def is_sound(blocks, model):
    "Blocks are modules of the model, or groups of its simple layers, and none is inside of another"
    inside = [o for b in blocks for o in b.modules()]
    assert len(inside) == len({*inside})
    assert {p for b in blocks for p in b.parameters()} <= {*model.parameters()}

def kinds(model):
    blocks,_ = find_blocks(model)
    is_sound(blocks, model)
    return [type(o).__name__ for o in blocks]

def test_blocks():
    from torchvision import models as tv
    from transformers import BertConfig, BertModel
    assert kinds(create_vision_model(resnet18, 3, pretrained=False)) == ['Sequential']+['BasicBlock']*8+['Sequential']
    assert kinds(learner_of(unet).model) == ['Sequential']+['BasicBlock']*16+['Sequential']+['UnetBlock']*4+['PixelShuffle_ICNR','ResBlock','ConvLayer']
    with torch.device('meta'):
        assert kinds(timm.create_model('convnext_atto')).count('ConvNeXtBlock') == 12
        assert kinds(timm.create_model('vit_tiny_patch16_224')) == ['Block']*12
        assert kinds(tv.resnet18()) == ['BasicBlock']*8
        assert kinds(tv.convnext_tiny()).count('CNBlock') == 18
        assert len(kinds(tv.vgg11())) == 8+2
        assert kinds(BertModel(BertConfig(num_hidden_layers=3, hidden_size=24, num_attention_heads=2, intermediate_size=32))) == ['BertLayer']*3
    assert kinds(model()) == ['Sequential']

def test_blocks_without_a_list():
    "Stages that name their blocks, and lists of single layers inside of blocks; a list that is never called is no block"
    def of(name):
        with torch.device('meta'): return kinds(timm.create_model(name))
    assert of('regnetx_002') == ['RegStage']*2+['Bottleneck']*11  # the first two stages have one each
    assert kinds(create_timm_model('regnetx_002', 3, pretrained=False)[0]) == ['RegStage']*2+['Bottleneck']*11+['Sequential']  # as one child of a list
    assert of('inception_v3') == ['InceptionA']*3+['InceptionB']+['InceptionC']*4+['InceptionD']+['InceptionE']*2
    assert of('densenet121').count('DenseLayer') == 6+12+24+16
    assert of('skresnet18') == ['SelectiveKernelBasic']*8
    assert of('dla34').count('DlaBasic') == 12
    assert 'ModuleList' not in of('hrnet_w18_small')+of('crossvit_9_240')

class Plain(nn.Module):
    "No list of blocks"
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(5, 8).double(),nn.Linear(8, 1).double()
    def forward(self, x): return self.b(self.a(x).tanh())

class Deep(nn.Module):
    "Blocks with BatchNorm and dropout, for the regression in tests/common.py"
    def __init__(self, seed=0, width=16, n=4, p=.2):
        super().__init__()
        torch.manual_seed(seed)
        def block(): return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(p), nn.Linear(width, width), nn.Tanh())
        self.stem,self.layers,self.head = nn.Linear(5, width),nn.ModuleList(block() for _ in range(n)),nn.Linear(width, 1)
        self.double()
    def forward(self, x):
        x = self.stem(x)
        for o in self.layers: x = x+o(x)
        return self.head(x)

def deep(*cbs, bs=32, n_epoch=2, m=None, seed=5, **kwargs):
    learn = make_learner(bs, m=m or Deep(), cbs=[*cbs], opt_func=kwargs.pop('opt_func', Adam), **kwargs)
    torch.manual_seed(seed)
    return fit(learn, n_epoch, .01)

@pytest.mark.parametrize('blocks,error,says', [
    (lambda m: [], ValueError, 'finds no blocks'), (lambda m: None, TypeError, 'must return modules, not None'), (lambda m: [1], TypeError, 'must return modules, not 1'),
    (lambda m: [nn.Linear(1, 1)], ValueError, 'modules of the model itself, not Linear'),
    (lambda m: [m.layers[0], m.layers[0][0]], ValueError, 'must not contain one another, and Linear is inside another block')])
def test_own_blocks_are_checked(blocks, error, says):
    learn = make_learner(32, m=Deep(), cbs=all_blocks(blocks))
    before = weights(learn)
    with pytest.raises(error, match=says): fit(learn, 1)
    assert_same(weights(learn), before)

def test_errors():
    with pytest.raises(TypeError, match="blocks must be a function of the model, or 'auto', not 3"): ActivationCheckpointing(3)
    with pytest.raises(TypeError, match='offload must be True or False, not 1'): ActivationCheckpointing(offload=1)
    with pytest.raises(ValueError, match='finds no blocks in Plain'): fit(make_learner(32, m=Plain(), cbs=all_blocks()), 1)
    with pytest.raises(ValueError, match='replicated DataParallel again'): fit(make_learner(32, m=nn.DataParallel(Deep()), cbs=all_blocks()), 1)
    with pytest.raises(ValueError, match='leave out torch.compile'): fit(make_learner(32, m=torch.compile(Deep()), cbs=all_blocks()), 1)

@pytest.mark.parametrize('blocks', [lambda m: m.layers, lambda m: list(m.layers[1:3]), lambda m: (o[0] for o in m.layers), lambda m: m])
def test_own_blocks(blocks): assert_same_state(deep(all_blocks(blocks)), deep())

class Named(Deep):
    "The same blocks in an nn.ModuleDict"
    def __init__(self): super().__init__(); self.layers = nn.ModuleDict({f'block{i}':o for i,o in enumerate(self.layers)})
    def forward(self, x):
        x = self.stem(x)
        for o in self.layers.values(): x = x+o(x)
        return self.head(x)

def test_blocks_of_a_module_dict():
    ours = deep(all_blocks(lambda m: m.layers), m=Named())
    assert ours.activation_checkpointing.found == list(ours.model.layers.values())
    assert_same_state(ours, deep(m=Named()))

# With other callbacks

@pytest.mark.thin(5)
@pytest.mark.parametrize('cbs', [
    lambda: [GradientAccumulation(32)], lambda: [GradientAccumulation(16, micro_batch_size=8)], lambda: [GradientAccumulation(16, micro_batch_size=5)],
    lambda: [GradientAccumulation(16, micro_batch_size='auto')],
    lambda: [GradientCache(5)], lambda: [GradientCache(5, part=lambda m: m.layers[0])], lambda: [GradientCache('auto')],
    lambda: [GradientCache(5), GradientAccumulation(16, micro_batch_size=8)],
    lambda: [GradientClip(.01)]], ids=range(9))
@pytest.mark.parametrize('first', [True, False])
def test_beside_others(cbs, first):
    "Equal to the fit with the other callbacks alone, in whichever order they are added"
    ours = [all_blocks()]
    runs = deep(*(ours+cbs() if first else cbs()+ours), bs=16)
    assert_same_state(runs, deep(*cbs(), bs=16))
    assert not any('forward' in vars(m) for m in runs.model.modules())

@pytest.mark.parametrize('amp', ['bf16', 'fp16'])
def test_mixed_precision(amp):
    cbs = lambda: [CpuMixedPrecision(amp)]
    def run(*more): return deep(*cbs(), *more, m=Deep().float())
    assert_same_state(run(all_blocks()), run())

class Block(nn.Module):
    "Two layers; the kinds below have more that the second run must find as the first one did"
    def __init__(self, n=5): super().__init__(); self.m = nn.Sequential(nn.Linear(n, 5), nn.Tanh(), nn.Linear(5, 5))
    def forward(self, x): return self.m(x)
class Spectral(Block):
    "A buffer that the forward pass changes in place, and uses"
    def __init__(self): super().__init__(); self.m[0] = nn.utils.parametrizations.spectral_norm(self.m[0])
class NewBuffer(Block):
    "A buffer that the forward pass replaces, and uses"
    def __init__(self): super().__init__(); self.register_buffer('scale', torch.ones(5))
    def forward(self, x):
        if self.training: self.scale = .9*self.scale + .1*x.detach().abs().mean(0)
        return self.m(x/self.scale)
class SharedBuffer(Block):
    "A buffer of two modules: one changes it, the other uses it"
    def __init__(self):
        super().__init__()
        self.register_buffer('scale', torch.ones(5, dtype=torch.float64))
        self.reads = nn.Module()
        self.reads.register_buffer('scale', self.scale)
    def forward(self, x):
        if self.training: self.scale.lerp_(x.detach().abs().mean(0), .1)
        return self.m(x/self.reads.scale)
class RunningNorm(Block):
    "A norm that uses its running mean in training, too, as Batch Renormalization does"
    def __init__(self): super().__init__(); self.register_buffer('running_mean', torch.zeros(5))
    def forward(self, x):
        if self.training: self.running_mean.lerp_(x.detach().mean(0), .1)
        return self.m((x-self.running_mean).tanh())
class PythonRandom(Block):
    def forward(self, x): return self.m(x*(1+random.random()))
class NumpyRandom(Block):
    def forward(self, x): return self.m(x*(1+np.random.rand()))

class SmallMask(Block):
    "A boolean buffer that the forward pass changes, and uses"
    def __init__(self): super().__init__(); self.register_buffer('on', torch.tensor([True, False, True, False, True]))
    def forward(self, x):
        y = self.m(torch.where(self.on.clone(), x, -x))
        if self.training: self.on.logical_not_()
        return y
class LargeMask(Block):
    "A large one, as a mask of attention"
    def __init__(self): super().__init__(); self.register_buffer('on', torch.ones(300, 300, dtype=torch.bool))
    def forward(self, x):
        y = self.m(torch.where(self.on[0,:5].clone(), x, -x))
        if self.training: self.on.logical_not_()
        return y
class Flag(Block):
    "A boolean buffer that the first forward pass sets"
    def __init__(self): super().__init__(); self.register_buffer('started', torch.tensor(False))
    def forward(self, x):
        scale = 1. if self.started else 2.
        self.started.fill_(True)
        return self.m(x*scale)
class NewFlag(Flag):
    def forward(self, x):
        scale = 1. if self.started else 2.
        self.started = torch.tensor(True)
        return self.m(x*scale)

class OwnGenerator(Block):
    "A generator of its own"
    def __init__(self): super().__init__(); self.g = torch.Generator().manual_seed(1)
    def forward(self, x): return self.m(x+torch.randn(x.shape, generator=self.g, dtype=x.dtype))
class OwnNumpy(Block):
    def __init__(self): super().__init__(); self.g = np.random.default_rng(1)
    def forward(self, x): return self.m(x*self.g.uniform(1, 2))
class OwnNumpyState(OwnNumpy):
    def __init__(self): super().__init__(); self.g = np.random.RandomState(1)
class OwnPython(OwnNumpy):
    def __init__(self): super().__init__(); self.g = random.Random(1)
class ListedGenerator(Block):
    def __init__(self): super().__init__(); self.gs = [np.random.default_rng(1)]
    def forward(self, x): return self.m(x*self.gs[0].uniform(1, 2))
class InnerGenerator(Block):
    "A generator of a module inside"
    def __init__(self): super().__init__(); self.m = nn.Sequential(OwnGenerator(), OwnNumpy())

class Counter(Block):
    "A number in an attribute"
    n = 0
    def forward(self, x):
        if self.training: self.n += 1
        return self.m(x*(1+1/self.n if self.n else 1))
class Average(Block):
    "An average in an attribute that is no buffer, made anew"
    def __init__(self): super().__init__(); self.mean = torch.zeros(5).double()
    def forward(self, x):
        if self.training: self.mean = .9*self.mean + .1*x.detach().mean(0)
        return self.m(x-self.mean)
class Hidden(Block):
    "A state in nested lists, carried from batch to batch, as an RNN's"
    def forward(self, x):
        h = self.hidden[0][0] if hasattr(self, 'hidden') else 0.
        y = self.m(x+h).tanh()
        if self.training: self.hidden = [(y.detach().mean(0),)]
        return y
class Lazy(Block):
    "An attribute that the first forward pass adds"
    def forward(self, x):
        if not hasattr(self, 'scale'): self.scale = x.detach().abs().mean()
        else: x = x/self.scale
        return self.m(x)

class InPlaceAverage(Average):
    "Not a buffer, and changed in place"
    def forward(self, x):
        if self.training: self.mean.lerp_(x.detach().mean(0), .1)
        return self.m(x-self.mean)
class Appends(Block):
    "A counter in a list"
    def __init__(self): super().__init__(); self.seen = []
    def forward(self, x):
        if self.training: self.seen.append(1)
        return self.m(x/(1+len(self.seen)))
class CountsInDict(Block):
    def __init__(self): super().__init__(); self.n = {'calls': 0}
    def forward(self, x):
        if self.training: self.n['calls'] += 1
        return self.m(x/(1+self.n['calls']))
class Meter: n = 0
class CountsInObject(Block):
    "In an object of a class of its own, inside of a list"
    def __init__(self): super().__init__(); self.meters = [Meter()]
    def forward(self, x):
        if self.training: self.meters[0].n += 1
        return self.m(x/(1+self.meters[0].n))
class AverageInDict(Block):
    "A tensor in a dict, changed in place"
    def __init__(self): super().__init__(); self.state = dict(mean=torch.zeros(5).double())
    def forward(self, x):
        if self.training: self.state['mean'].lerp_(x.detach().mean(0), .1)
        return self.m(x-self.state['mean'])
class FrozenMaximum(Block):
    "A running maximum in a parameter that is not trained"
    def __init__(self): super().__init__(); self.top = nn.Parameter(torch.ones(5).double(), requires_grad=False)
    def forward(self, x):
        if self.training:
            with torch.no_grad(): self.top.copy_(torch.maximum(self.top, x.detach().abs().amax(0)))
        return self.m(x/self.top)

class Transposed(Block):
    "Its output, the input of the next block, is not contiguous, and the order of a sum depends on that"
    def forward(self, x): return self.m(x/(1+x.var())).T.contiguous().T

class Chain(nn.Module):
    "Blocks in a row"
    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.layers,self.head = nn.ModuleList(make() for _ in range(3)),nn.Linear(5, 1)
        self.double()
    def forward(self, x):
        for o in self.layers: x = o(x)
        return self.head(x)
class DenseBlock(Block):
    def forward(self, outputs): return self.m(torch.cat(outputs, 1))
class AppendsBlock(DenseBlock):
    "Adds its output to the list that it got"
    def forward(self, outputs):
        outputs.append(super().forward(outputs))
        return outputs.pop()
class Dense(Chain):
    "Blocks that get the list of all outputs so far, which then gets theirs"
    def __init__(self, make=DenseBlock):
        super().__init__(map(make, (5, 10, 15)).__next__)
        self.head = nn.Linear(20, 1).double()
    def forward(self, x):
        outputs = [x]
        for o in self.layers: outputs.append(o(outputs))
        return self.head(torch.cat(outputs, 1))

@pytest.mark.parametrize('offload', [False, True])
@pytest.mark.parametrize('make', [
    Spectral, NewBuffer, SharedBuffer, RunningNorm, SmallMask, LargeMask, Flag, NewFlag, PythonRandom, NumpyRandom, OwnGenerator, OwnNumpy, OwnNumpyState,
    OwnPython, ListedGenerator, InnerGenerator, Counter, Average, InPlaceAverage, Appends, CountsInDict, CountsInObject, AverageInDict, FrozenMaximum, Hidden, Lazy, DenseBlock, AppendsBlock, Transposed])
def test_the_second_run_finds_what_the_first_did(make, offload):
    def run(*cbs):
        m = (Dense if issubclass(make, DenseBlock) else Chain)(make)
        set_seed(3)
        return deep(*cbs, m=m)
    assert_same_state(run(all_blocks(lambda m: m.layers, offload)), run())

@pytest.mark.parametrize('make,state', [
    (OwnGenerator, lambda b: b.g.get_state().tolist()), (OwnNumpy, lambda b: b.g.bit_generator.state), (OwnPython, lambda b: b.g.getstate()),
    (Counter, lambda b: b.n), (Average, lambda b: b.mean.tolist()), (Hidden, lambda b: b.hidden[0][0].tolist()), (Flag, lambda b: bool(b.started)),
    (CountsInDict, lambda b: b.n['calls']), (CountsInObject, lambda b: b.meters[0].n), (AverageInDict, lambda b: b.state['mean'].tolist()), (FrozenMaximum, lambda b: b.top.tolist())])
def test_the_second_run_leaves_the_block_as_it_is(make, state):
    def after(*cbs): return [state(b) for b in deep(*cbs, m=Chain(make)).model.layers]
    ours,plain = after(all_blocks(lambda m: m.layers)),after()
    assert ours == plain != [state(make()) for _ in plain] if make is not Hidden else ours == plain

@pytest.mark.parametrize('n_layers', [1, 2])
def test_a_state_that_a_language_model_carries(n_layers):
    "AWD_LSTM of one layer is one block; the decoder is another"
    from fastai.text.all import AWD_LSTM, LMDataLoader, rnn_cbs, get_language_model, awd_lstm_lm_config
    texts = [torch.randint(20, (120,), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    def run(*cbs):
        set_seed(1)
        dls = DataLoaders(LMDataLoader(texts, bs=4, seq_len=10, shuffle=False), LMDataLoader(texts[:2], bs=4, seq_len=10))
        m = get_language_model(AWD_LSTM, 20, {**awd_lstm_lm_config, 'n_layers':n_layers, 'emb_sz':8, 'n_hid':12})
        learn = Learner(dls, m, CrossEntropyLossFlat(), cbs=[*rnn_cbs(2, 1), *cbs])
        set_seed(7)
        return fit(learn, 2, 1e-2)
    ours,plain = run(all_blocks()),run()
    assert len(ours.activation_checkpointing.found) == n_layers+1 and len(losses(ours)) > 10
    assert_same_state(ours, plain)
    assert losses(ours) == losses(plain)

def test_what_a_block_keeps_is_not_kept_for_ever():
    "An output with its graph in an attribute: that of one batch at a time is alive"
    class Keeps(Block):
        seen = []
        def forward(self, x):
            self.out = self.m(x)
            if self.training: Keeps.seen.append(weakref.ref(self.out))
            return self.out
    learn = deep(all_blocks(lambda m: m.layers), m=Chain(Keeps), n_epoch=4)
    assert len(Keeps.seen) >= 4*3*3
    assert sum(o() is not None for o in Keeps.seen) <= 2*3

# What cannot be repeated

class Outside(Block):
    "A counter that is no part of the model"
    n = 0
    def forward(self, x):
        Outside.n += 1
        return self.m(x/Outside.n)
class HiddenGenerator(Block):
    "A generator that no attribute of the module shows"
    gs = [np.random.default_rng(1)]
    def forward(self, x): return self.m(x*self.gs[0].uniform(1, 2))
not_repeated = [Outside, HiddenGenerator]

@pytest.mark.parametrize('offload', [False, True])
@pytest.mark.parametrize('make', not_repeated)
def test_what_cannot_be_repeated_is_an_error(make, offload):
    "In the first backward pass, before a step is taken"
    m = Chain(make)
    before = weights(m)
    deep(m=Chain(make))  # the plain fit runs
    with pytest.raises(RuntimeError, match=r"^\w+ layers\.2 gives other outputs .* leave .* out with blocks=\S+$") as e:
        deep(all_blocks(lambda m: m.layers, offload), m=m)
    assert type(m.layers[2]).__name__ in str(e.value) and e.value.__cause__ is None
    assert_same(weights(m), before)

@pytest.mark.parametrize('cbs', [lambda: [GradientAccumulation(32)], lambda: [GradientAccumulation(16, micro_batch_size=8)], lambda: [GradientCache(8)], lambda: [CpuMixedPrecision('bf16')]])
def test_what_cannot_be_repeated_is_an_error_beside_others(cbs):
    with pytest.raises(RuntimeError, match='gives other outputs when it is run again'):
        deep(all_blocks(lambda m: m.layers), *cbs(), m=Chain(Outside).float() if 'Mixed' in str(cbs()) else Chain(Outside), bs=16)

def test_what_the_model_changes_between_the_runs():
    "The blocks read what only the model changes"
    class Reads(Block):
        def forward(self, x): return self.m(x*scale[0])
    class Scales(Chain):
        def forward(self, x):
            for i,o in enumerate(self.layers): scale[0] = 1.+i; x = o(x)
            return self.head(x)
    scale = [1.]
    with pytest.raises(RuntimeError, match='Reads layers.1 gives other outputs'): deep(all_blocks(lambda m: m.layers), m=Scales(Reads))

def test_blocks_are_checked_again_in_later_batches(monkeypatch):
    "In batches 1, 2, 3, 5 and 9 of the 12 of an epoch, and in those of the next fit"
    from fastxtend_accum.ways import checkpointing
    n,checked = [],checkpointing.checked
    learn = make_learner(8, m=Deep(), cbs=all_blocks())
    monkeypatch.setattr(checkpointing, 'checked', lambda *args: n.append(learn.iter+1) or checked(*args))
    for _ in range(2):
        n.clear()
        fit(learn, 1)
        assert n == [o for o in (1,2,3,5,9) for _ in range(4)]

@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16])
def test_repeated_bit_for_bit(dtype):
    from fastxtend_accum.checkpointing import is_repeated
    a = torch.tensor([1, -3, 0, float('nan'), float('inf')], dtype=dtype)
    b = a.clone()
    assert is_repeated(a, b)
    b[0] += torch.finfo(dtype).eps
    assert not is_repeated(a, b) and not is_repeated(a, a[:3]) and is_repeated(a[:0], b[:0])

# Operations in place

class ReluFirst(nn.Module):
    "Begins with an operation on its input, which is its residual, too"
    def __init__(self): super().__init__(); self.m = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    def forward(self, x): return x+self.m(x)
class FunctionFirst(Block):
    def forward(self, x): return self.m(F.relu_(x))
class InPlaceList(Block):
    "An input in a list"
    def forward(self, xs): return self.m(xs[0].mul_(1.5))
class Shifted(Chain):
    "Its blocks get what no layer keeps, and what no parameter is behind"
    def forward(self, x):
        for o in self.layers: x = o([x+1.] if isinstance(o, InPlaceList) else x+1.)
        return self.head(x)

@pytest.mark.parametrize('make', [ReluFirst, FunctionFirst, InPlaceList])
def test_a_block_that_begins_in_place(make):
    "An error that names the remedy, before anything is trained on; with the remedy the plain fit"
    plain = deep(m=Shifted(make))
    m = Shifted(make)
    before = weights(m)
    with pytest.raises(RuntimeError, match=fr'input of {make.__name__} layers.0 is modified by an inplace operation in it.*inplace=False there, or offload=True$'):
        deep(all_blocks(lambda m: m.layers), m=m)
    assert_same(weights(m), before)
    assert_same_state(deep(all_blocks(lambda m: m.layers, offload=True), m=Shifted(make)), plain)

# Decoders of Transformers, which keep keys and values by default

class Decoder(nn.Module):
    "A small random model, with a padding mask; sees the samples of tests/common.py as tokens"
    def __init__(self, name, padded, attention):
        super().__init__()
        import transformers
        torch.manual_seed(0)
        self.padded,self.config = padded,getattr(transformers, f'{name}Config')(**small[name], attn_implementation=attention)
        self.m = getattr(transformers, f'{name}{"ForConditionalGeneration" if name == "T5" else "ForCausalLM" if name != "GPT2" else "LMHeadModel"}')(self.config)
        self.double()
    def forward(self, x):
        ids = (x.abs()*7).long()%11
        mask = torch.ones_like(ids)
        if self.padded: mask[::2,3:] = 0
        more = dict(decoder_input_ids=ids.flip(1)) if self.config.is_encoder_decoder else {}
        return self.m(input_ids=ids, attention_mask=mask, **more).logits.mean((1, 2))[:,None]

sizes = dict(vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16)
small = {'GPT2': dict(vocab_size=11, n_positions=16, n_embd=8, n_layer=2, n_head=2), 'Llama': dict(sizes, intermediate_size=12), 'Qwen2': dict(sizes, intermediate_size=12, num_key_value_heads=1),
         'OPT': dict(sizes, ffn_dim=12, word_embed_proj_dim=8), 'GPTNeoX': dict(sizes, intermediate_size=12),
         'T5': dict(vocab_size=11, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, decoder_start_token_id=0)}

@pytest.mark.parametrize('name', small)
@pytest.mark.parametrize('padded', [True, False])
@pytest.mark.parametrize('attention', ['eager', 'sdpa'])
def test_decoders_that_keep_keys_and_values(name, padded, attention):
    def run(*cbs, use_cache=True):
        m = Decoder(name, padded, attention)
        assert m.config.use_cache
        if not use_cache:
            for o in m.modules(): getattr(o, 'config', m.config).use_cache = False
        learn = make_learner(12, n=36, m=m, cbs=[*cbs], opt_func=Adam)
        before = weights(learn)
        torch.manual_seed(5)
        fit(learn, 1, .01)
        assert not torch.equal(weights(learn), before)
        return learn
    ours = run(all_blocks())
    assert len(ours.activation_checkpointing.found) >= 2 and ours.model.config.use_cache
    assert_same_state(ours, run(use_cache=False))
    assert all(m.config.use_cache for m in ours.model.modules() if getattr(getattr(m, 'config', None), 'is_decoder', False))

@pytest.mark.parametrize('make,draw', [(PythonRandom, random.random), (NumpyRandom, np.random.rand)])
def test_the_second_run_leaves_the_generators_as_they_are(make, draw):
    def after(*cbs):
        set_seed(3)
        deep(*cbs, m=Chain(make))
        return draw()
    assert after(all_blocks(lambda m: m.layers)) == after()

def test_a_block_whose_input_changes_afterwards():
    "Offloaded it has a copy, also where everything is on the CPU; else PyTorch raises an error"
    class Changes(Block):
        def forward(self, x): return self.m(x.mul_(1.1) if x.grad_fn else x)
    class Linear(Changes):  # its own output may change: no layer has kept it
        def __init__(self): super().__init__(); self.m = self.m[1:]
    blocks = lambda m: m.layers
    assert_same_state(deep(all_blocks(blocks, offload=True), m=Chain(Linear)), deep(m=Chain(Linear)))
    with pytest.raises(RuntimeError, match='modified by an inplace operation'): deep(all_blocks(blocks), m=Chain(Linear))

def test_blocks_run_twice_and_frozen_ones_once():
    for freeze,per_batch in (False, 2), (True, 1):
        m = Deep()
        if freeze:
            for p in [*m.stem.parameters(), *m.layers.parameters()]: p.requires_grad_(False)
        runs = Runs(m, nn.BatchNorm1d)
        learn = deep(all_blocks(), m=m, n_epoch=1)
        n_valid = 4*len(learn.dls.valid)
        assert runs.n == 4*3*per_batch+n_valid
        with quiet(learn): learn.validate()
        assert runs.n == 4*3*per_batch+2*n_valid

def test_lr_find():
    plain,ours = (make_learner(32, m=Deep(), opt_func=Adam, cbs=cbs) for cbs in (None, all_blocks()))
    for learn in plain,ours:
        torch.manual_seed(3)
        with quiet(learn): learn.lr_find(num_it=6, show_plot=False)
    assert losses(plain) == losses(ours)
    assert_same_state(ours, plain)

def test_export_after_an_interrupt(tmp_path):
    learn = learner_of(transformer, [all_blocks(), Fault(KeyboardInterrupt, 'before_backward', 2, 0)], path=tmp_path)
    with pytest.raises(KeyboardInterrupt): fit(learn, 1)
    learn.remove_cb(Fault)
    learn.export('ours.pkl')
    loaded,x = load_learner(tmp_path/'ours.pkl'),torch.randn(2, 3, 32, 32)
    assert_same(loaded.model.eval()(x), learn.model.eval()(x))
    assert not any('forward' in vars(m) for m in loaded.model.modules())

@pytest.mark.thin(7)
@pytest.mark.parametrize('event', EVENTS)
@pytest.mark.parametrize('exc', [KeyboardInterrupt, ZeroDivisionError, *CANCELS, CancelStepException, CancelBackwardException])
def test_a_fault_leaves_nothing(exc, event):
    def run(*cbs):
        learn = make_learner(32, n=64, m=Deep(p=0, n=2), opt_func=Adam, cbs=[*cbs, Fault(exc, event, 2, 7)])
        try: fit(learn, 1)
        except BaseException: pass
        assert '_do_one_batch' not in vars(learn) and not any('forward' in vars(m) for m in learn.model.modules())
        learn.remove_cb(Fault)
        return fit(learn, 1)
    assert_same_state(run(all_blocks()), run())

def test_an_error_in_the_second_run_leaves_nothing():
    class Fails(nn.Tanh):
        n = 0
        def forward(self, x):
            Fails.n += self.training
            if Fails.n == 7: raise ZeroDivisionError('on purpose')
            return super().forward(x)
    m = Deep()
    for o in m.layers: o[2] = Fails()
    learn = make_learner(32, m=m, cbs=all_blocks())
    with pytest.raises(ZeroDivisionError): fit(learn, 1)
    assert '_do_one_batch' not in vars(learn) and not any('forward' in vars(m) for m in learn.model.modules())

# Memory

class Measured(Callback):
    "Bytes that are alive at the end of the forward pass of the first batch, and the most in it, without the model's own"
    def before_batch(self):
        if not self.training: return
        self.live = LiveBytes(self.model).__enter__()
    def after_loss(self):
        if self.training: self.kept = self.live.now
    def before_step(self): self.live.__exit__(None, None, None); raise CancelFitException

@pytest.mark.thin(5)
@pytest.mark.parametrize('make,at_most', [(resnet, .25), (unet, .5), (convnext, .3), (transformer, .3), (regnet, .5), (densenet, .3)])
def test_live_bytes(make, at_most):
    def run(*cbs): return learner_of(make, [Measured(), *cbs])
    (plain,peak),(ours,our_peak) = ((o.measured.kept, o.measured.live.peak) for o in [fit_once(run(*cbs)) for cbs in ([], [all_blocks()])])
    assert ours < at_most*plain and our_peak < peak, (ours/plain, our_peak/peak)

def fit_once(learn): return fit(learn, 1, 1e-3)

@pytest.mark.parametrize('cb', [lambda: GradientAccumulation(64, micro_batch_size='auto'), lambda: GradientCache('auto')])
def test_auto_finds_more_samples(cb):
    from fastxtend_accum.demo import Activations
    def run(*cbs):
        learn = make_learner(64, n=64, m=Deep(width=64, n=8), cbs=[Activations(limit=.2), cb(), *cbs])
        fit(learn, 1)
        return (learn._grab_cbs(GradientAccumulation)+learn._grab_cbs(GradientCache))[0].micro_bs
    plain,ours = run(),run(all_blocks())
    assert plain < ours <= 64

class Wide(nn.Module):
    "Blocks that keep `widths` values for each sample"
    widths = 8,64,16,32
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, n), nn.Tanh(), nn.Linear(n, 5)) for n in self.widths)
        self.head = nn.Linear(5, 1)
        self.double()
    def forward(self, x):
        for o in self.layers: x = x+o(x)
        return self.head(x)

def test_as_few_blocks_as_fit_are_recomputed():
    "From the first on, also where a callback counts what is kept; the same fit"
    from fastxtend_accum.demo import Activations
    def run(*cbs):
        learn = make_learner(32, m=Wide(), cbs=[*cbs])
        return fit(learn, 1)
    whole = run(Activations())
    for share,used in (1.01, []), (.8, [8, 64]), (.5, [8, 64, 16]):
        ours = run(Activations(whole.activations.mb*share), cb := ActivationCheckpointing('auto'))
        assert [o[0].out_features for o in cb.found[:cb.level]] == used
        assert_same_state(ours, whole)

def test_offload(monkeypatch):
    "The blocks' inputs are copied to the CPU, pinned for a GPU, in their memory layout; nothing that is inside of the blocks is"
    from fastxtend_accum.ways import checkpointing
    seen = []
    def to_cpu(t):
        copied,device = checkpointing_to_cpu(t)
        assert device == t.device and copied.device.type == 'cpu' and copied.is_pinned() == t.is_cuda
        assert torch.equal(copied, t) and copied.stride() == t.stride() and copied.untyped_storage()._cdata != t.untyped_storage()._cdata
        seen.append(tuple(t.shape))
        return copied,device
    checkpointing_to_cpu = checkpointing.to_cpu
    monkeypatch.setattr(checkpointing, 'to_cpu', to_cpu)
    ours = deep(all_blocks(offload=True))
    assert_same_state(ours, deep())
    assert seen == [(32,16)]*4*3*2

class Inputs(Callback):
    "Whether the inputs of the blocks are alive after the forward pass, in tensors or in lists"
    def before_fit(self):
        self.seen,self.alive = [],None
        for m in self.model.layers: m.register_forward_pre_hook(self.see)
    def see(self, m, args): self.seen += [weakref.ref(o.untyped_storage()) for o in tensors_in(args) if o.grad_fn]
    def after_loss(self):
        if self.training: self.alive = [o() is not None for o in self.seen]; raise CancelFitException

@pytest.mark.parametrize('make,n', [(Deep, 4), (Dense, 0+1+2)])
def test_offload_leaves_no_input_on_the_device(make, n):
    "Nothing refers to what a block got, but its copy on the CPU; without `offload` all of it is kept"
    def alive(offload):
        return deep(all_blocks(lambda m: m.layers, offload), Inputs(), m=make()).inputs.alive
    assert alive(False) == [True]*n and alive(True) == [False]*n

class Recurrent(nn.Module):
    "Makes a new weight in each forward pass, as fastai's AWD-LSTM does, and a new list of weights, as PyTorch's RNNs do"
    def __init__(self): super().__init__(); self.rnn = WeightDropout(nn.LSTM(5, 5, batch_first=True), .5)
    def forward(self, x): return self.rnn(x[:,None])[0][:,0]

class Weights(Callback):
    "How many weights of earlier batches are alive before each batch"
    def before_fit(self): self.weights,self.alive = [],[]
    def before_batch(self):
        gc.collect()
        if self.training: self.alive.append(len([o for o in self.weights if o() is not None]))
    def after_pred(self):
        if self.training: self.weights += [weakref.ref(m.weight_hh_l0) for m in self.model.modules() if isinstance(m, nn.LSTM)]

def recurrent_blocks(m): return list(m[0])
@pytest.mark.parametrize('cb', [
    lambda: ActivationCheckpointing(), lambda: ActivationCheckpointing(recurrent_blocks), lambda: ActivationCheckpointing(recurrent_blocks, adapt=False),
    lambda: GradientCache(4), lambda: GradientCache('auto'), lambda: GradientAccumulation(micro_batch_size=4), lambda: GradientAccumulation(16)],
    ids=['exact', 'blocks', 'all_blocks', 'cache', 'auto_cache', 'pieces', 'windows'])
def test_nothing_of_earlier_batches_is_kept(cb):
    "In an epoch of 20 batches, of which 1, 2, 3, 5, 9 and 17 are looked at"
    torch.manual_seed(0)
    m = nn.Sequential(nn.Sequential(Recurrent(), Recurrent()), nn.Linear(5, 1)).double()
    cb = cb()
    adapts = getattr(cb, 'exact', False) or getattr(cb, 'adapt', False) or cb.micro_batch_size == 'auto'
    learn = fit_aloud(make_learner(8, n=160, m=m, cbs=[cb, Weights(), *[Fails(0)]*adapts]), 1)  # it prints what the first pass has moved
    assert len(learn.weights.alive) == 20 and max(learn.weights.alive) == (4 if adapts else 2)  # the last two, and those of the batch before, to be put back

class Ends(Weights):
    "An error, in the third batch, that is not about memory"
    order = -100
    def after_loss(self):
        if self.training and self.iter == 2: raise ValueError('ends')

every_batch = [lambda: ActivationCheckpointing(), lambda: ActivationCheckpointing(recurrent_blocks, adapt=False), lambda: GradientCache(4)]
@pytest.mark.parametrize('cb', every_batch, ids=['exact', 'all_blocks', 'cache'])
def test_a_fit_that_ends_with_an_error_is_freed(cb):
    "But for the last weights, which the two modules hold"
    m = nn.Sequential(nn.Sequential(Recurrent(), Recurrent()), nn.Linear(5, 1)).double()
    learn = make_learner(8, n=64, m=m, cbs=[cb(), Ends(), *[Fails(0)]*hasattr(cb(), 'exact')])
    with pytest.raises(ValueError, match='ends'): fit(learn, 1)
    learn.pred = learn.loss_grad = learn.loss = None
    gc.collect()
    assert len(learn.ends.weights) >= 6 and len([o for o in learn.ends.weights if o() is not None]) == 2

class FailsTwice(Fails):
    "Memory runs out in the first passes; notes how many weights of passes before are alive in each"
    order = -100
    def before_fit(self): self.n,self.weights,self.alive = 0,[],[]
    def after_pred(self):
        if not self.training: return
        gc.collect()
        self.alive.append(len([o for o in self.weights if o() is not None]))
        self.weights += [weakref.ref(m.weight_hh_l0) for m in self.model.modules() if isinstance(m, nn.LSTM)]
    def after_loss(self):
        self.n += self.training
        if self.training and self.n <= 2: raise torch.OutOfMemoryError('out of memory')

@pytest.mark.parametrize('cb', [lambda: ActivationCheckpointing(recurrent_blocks), lambda: GradientCache('auto'), lambda: GradientAccumulation(micro_batch_size='auto')],
                         ids=['blocks', 'cache', 'pieces'])
def test_a_pass_that_fails_is_freed_before_the_next_one(cb):
    "Else that could fail, too: a block keeps the lists in which RNNs put their weights, and the graph of the weights keeps what the block keeps"
    torch.manual_seed(0)
    m = nn.Sequential(nn.Sequential(Recurrent(), Recurrent()), nn.Linear(5, 1)).double()
    learn = fit(make_learner(8, n=64, m=m, cbs=[cb(), FailsTwice(0)]), 1)
    assert learn.fails_twice.n > 8 and learn.fails_twice.alive[:3] == [0, 0, 0]
