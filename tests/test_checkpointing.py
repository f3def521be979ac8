"ActivationCheckpointing: weights, buffers and losses of whole batches, bit for bit, in less memory"
import gc, weakref
from collections import Counter, deque

import pytest, timm
from fastai.callback.mixup import MixUp
from fastai.callback.rnn import rnn_cbs
from fastai.text.all import (AWD_LSTM, LMDataLoader, awd_lstm_clas_config, awd_lstm_lm_config, get_language_model,
                             get_text_classifier)
from fastai.text.models.awdlstm import WeightDropout
from fastai.vision.all import (CategoryBlock, DataBlock, ImageBlock, MaskBlock, PILImage, PILMask, aug_transforms,
                               create_vision_model, resnet18, unet_learner, vision_learner)
from fastai.vision.models.xresnet import ResBlock, XResNet

from common import *
from benchmarks.counts import LiveBytes
from fastxtend_accum.checkpointing import repeated
from fastxtend_accum.demo import Activations
from fastxtend_accum.memory.blocks import find_blocks

def state(learn): return {k:v.clone() for k,v in learn.model.state_dict().items()}

def assert_same_fit(a, b):
    "Weights and buffers, losses and metrics, bit for bit; and nothing is left on the model"
    x,y = state(a),state(b)
    assert x.keys() == y.keys() and len(x) > 3
    for k in x: assert torch.equal(x[k], y[k]), f'{k} differs'
    assert losses(a) == losses(b) and len(losses(b)) > 0
    assert_same(floats(a.recorder.values), floats(b.recorder.values))
    assert_as_it_was(a)

def assert_as_it_was(learn):
    assert not any('forward' in vars(m) for m in learn.model.modules()) and '_do_one_batch' not in vars(learn)

def run(make, *cbs, method='fit', n_epoch=1, fit=fit, **kwargs):
    "A Learner after a fit that has changed it"
    set_seed(0)
    learn = make(cbs=[*cbs], **kwargs)
    before = state(learn)
    set_seed(7)
    fit(learn, n_epoch, 1e-2, method=method)
    assert [*map(torch.equal, before.values(), state(learn).values())].count(False) > 3
    return learn

def limited(make, share, *cbs, ours=ActivationCheckpointing, **kwargs):
    "The plain fit, and ours in `share` of its memory"
    big = run(make, Activations(), *[o() for o in cbs], **kwargs)
    small = run(make, Activations(big.activations.mb*share), *[o() for o in cbs], ours(), **kwargs)
    assert 0 < small.activations.mb <= share*big.activations.mb < math.inf
    return big,small

class Passes(Callback):
    "The samples of each forward pass in training, those that fail included"
    def before_fit(self): self.sizes,self.hook = [],self.model.register_forward_pre_hook(self.count)
    def after_fit(self): self.hook.remove()
    def count(self, m, args): self.sizes += [len(args[0])]*m.training

class Fails(Callback):
    "Memory runs out in the `event` of these passes"
    def __init__(self, event, *passes):
        self.passes,self.n = passes,0
        setattr(self, event, self.fail)
    def fail(self):
        self.n += self.training
        if self.training and self.n-1 in self.passes: raise torch.OutOfMemoryError('out of memory')

# Learners as they come

def pixels(i, n, *size): return np.random.default_rng(i).integers(0, n, (32, 32, *size), dtype=np.uint8)
def image(i): return PILImage.create(pixels(i, 255, 3))
def mask(i): return PILMask.create(pixels(i, 3))
def image_dls(masks=False):
    blocks = (ImageBlock, MaskBlock(codes=list('abc'))) if masks else (ImageBlock, CategoryBlock)
    block = DataBlock(blocks, get_x=image, get_y=mask if masks else lambda i: 'abc'[i%3],
                      splitter=IndexSplitter(range(16, 24)), batch_tfms=aug_transforms(size=32))
    return block.dataloaders(list(range(24)), bs=8, num_workers=0)

def of_timm(name, **args):
    def make(**kwargs): return Learner(image_dls(), timm.create_model(name, num_classes=3, **args), **kwargs)
    return make
def fastai(make, body, masks=False, **more):
    return lambda **kwargs: make(image_dls(masks), body, pretrained=False, **more, **kwargs)
def narrow(pretrained=False): return XResNet(ResBlock, 1, [1,1,1,1], stem_szs=(8, 8, 64), widen=.25)
resnet,unet = fastai(vision_learner, resnet18),fastai(unet_learner, narrow, n_out=3, masks=True)
regnet,densenet = of_timm('regnetx_002'),of_timm('densenet121')
convnext = of_timm('convnext_atto', drop_path_rate=.3, drop_rate=.2, depths=(2,2,2,2), dims=(8,16,24,32))
vit = of_timm('vit_tiny_patch16_224', img_size=32, patch_size=8, embed_dim=24, depth=4, num_heads=2, proj_drop_rate=.2)

def language_model(n_layers, cbs=(), **kwargs):
    texts = [torch.randint(20, (120,), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    dls = DataLoaders(*[LMDataLoader(o, bs=4, seq_len=10, shuffle=False) for o in (texts, texts[:2])])
    m = get_language_model(AWD_LSTM, 20, {**awd_lstm_lm_config, 'n_layers':n_layers, 'emb_sz':8, 'n_hid':12})
    return Learner(dls, m, CrossEntropyLossFlat(), cbs=[*rnn_cbs(2, 1), *cbs], **kwargs)

class Contrast(nn.Module):
    "Compares each sample with all others of the batch"
    n = 0
    def forward(self, pred, targ):
        z = F.normalize(pred, dim=1)
        return F.cross_entropy(z@z.T*2, torch.arange(len(z)).roll(1))

def mlp(*extra, loss=CrossEntropyLossFlat, n=64, n_layers=4, **kwargs):
    "Layers of 20 with what `extra` makes after each"
    g = torch.Generator().manual_seed(0)
    ds = list(zip(torch.randn(n, 20, generator=g), torch.randint(4, (n,), generator=g)))
    layers = [nn.Sequential(nn.Linear(20, 20), *[o() for o in extra], nn.ReLU()) for _ in range(n_layers)]
    dls = DataLoaders(DataLoader(ds, bs=32, shuffle=True), DataLoader(ds[:16], bs=16))
    return Learner(dls, nn.Sequential(*layers, nn.Linear(20, 4)), loss(), **kwargs)
dropped,normed = partial(mlp, partial(nn.Dropout, .3)),partial(mlp, partial(nn.BatchNorm1d, 20))
contrastive = partial(mlp, partial(nn.Dropout, .3), loss=Contrast)
class Counts(CrossEntropyLossFlat):
    "Counts its calls, and is scaled by them"
    n = 0
    def __call__(self, pred, targ):
        self.n += pred.requires_grad
        return super().__call__(pred, targ)*(1+1/(1+self.n))
bf16,fp16 = (partial(CpuMixedPrecision, o) for o in ('bf16', 'fp16'))

def rows(make, bs=32, n=96):
    "A Learner of `make()` for the regression in tests/common.py"
    return lambda **kwargs: make_learner(bs, n=n, m=make(), **{'opt_func':Adam, **kwargs})
one_cycle,fine_tune = dict(method='fit_one_cycle', n_epoch=2),dict(method='fine_tune')  # it freezes first
learners = dict(
    resnet=(resnet, [MixUp], fine_tune), normed=(normed, [], one_cycle), unet=(unet, [], one_cycle), vit=(vit, [], {}),
    text=(partial(language_model, 2), [], {}), dropped=(dropped, [fp16], {}), convnext=(convnext, [MixUp], {}),
    regnet=(regnet, [], {}), contrastive=(contrastive, [], one_cycle), short=(partial(language_model, 1), [], {}),
    densenet=(densenet, [], {}), mixed=(dropped, [MixUp, bf16], one_cycle))

@pytest.mark.thin(5)
@pytest.mark.parametrize('share', [None, .85, .7, .6])
@pytest.mark.parametrize('name', learners)
def test_bit_for_bit(name, share):
    "In a share of the memory, or with all blocks recomputed"
    make,cbs,kwargs = learners[name]
    big,small = limited(make, share or 1., *cbs, ours=ActivationCheckpointing if share else all_blocks, **kwargs)
    assert_same_fit(small, big)
    assert small.activation_checkpointing.level > 0

# Find blocks

def kinds(model):
    "The blocks of `model`: its modules, or groups of its layers, none inside of another"
    blocks,_ = find_blocks(model)
    inside = [o for b in blocks for o in b.modules()]
    assert len(inside) == len({*inside}) and {p for b in blocks for p in b.parameters()} <= {*model.parameters()}
    return [type(o).__name__ for o in blocks]

def test_blocks():
    from torchvision.models import vgg11
    from transformers import BertConfig, BertModel
    from torch.nn.utils.parametrizations import weight_norm
    def wrapped(f): return nn.Sequential(nn.Sequential(f(nn.Linear(5, 5)), nn.Tanh(), f(nn.Linear(5, 5))), f(nn.Linear(5, 1)))
    assert kinds(wrapped(noop)) == kinds(wrapped(weight_norm)) == ['Sequential']
    assert kinds(model()) == ['Sequential'] and len(kinds(language_model(1).model)) == 1+1  # the decoder is one
    upper = ['UnetBlock']*4+['PixelShuffle_ICNR','ResBlock','ConvLayer']
    assert kinds(unet().model)[-len(upper):] == upper
    with torch.device('meta'):
        resnet = create_vision_model(resnet18, 3, pretrained=False)
        assert kinds(resnet) == ['Sequential']+['BasicBlock']*8+['Sequential']
        assert len(kinds(vgg11())) == 8+2
        config = BertConfig(num_hidden_layers=3, hidden_size=24, num_attention_heads=2, intermediate_size=32)
        assert kinds(BertModel(config)) == ['BertLayer']*3

def test_blocks_of_timm():
    "Stages that name their blocks; a list that is never called is none"
    def of(name):
        with torch.device('meta'): return kinds(timm.create_model(name))
    assert of('regnetx_002') == ['RegStage']*2+['Bottleneck']*11  # the first two stages have one each
    assert [*dict.fromkeys(of('inception_v3'))] == [f'Inception{o}' for o in 'ABCDE']
    for name,kind,n in (('convnext_atto', 'ConvNeXtBlock', 12), ('vit_tiny_patch16_224', 'Block', 12),
                        ('densenet121', 'DenseLayer', 6+12+24+16)):
        assert of(name).count(kind) == n
    assert 'ModuleList' not in of('hrnet_w18_small')

class Deep(nn.Module):
    "Blocks with BatchNorm and dropout"
    def __init__(self, width=16, n=4, p=.2):
        super().__init__()
        def block(): return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(p))
        self.layers = nn.ModuleList(block() for _ in range(n))
        self.stem,self.head = nn.Linear(5, width),nn.Linear(width, 1)
        self.double()
    def forward(self, x):
        x = self.stem(x)
        for o in self.layers: x = x+o(x)
        return self.head(x)
deep = rows(Deep)
def layers(m): return m.layers
def flat(): return nn.Linear(5, 1).double()

@pytest.mark.parametrize('blocks', [layers, lambda m: m.layers[1:3], lambda m: m, lambda m: (o[0] for o in m.layers),
                                    lambda m: nn.ModuleDict(dict(a=m.layers[0], b=m.layers[2]))])
def test_own_blocks(blocks): assert_same_fit(run(deep, all_blocks(blocks)), run(deep))

@pytest.mark.parametrize('make,blocks,says', [
    (flat, None, 'finds no blocks in Linear'), (Deep, lambda m: [], 'no blocks in Deep: name modules with blocks='),
    (lambda: nn.DataParallel(Deep()), None, 'replicated DataParallel'), (Deep, lambda m: None, 'not NoneType'),
    (lambda: torch.compile(Deep()), None, 'leave out torch.compile'), (Deep, lambda m: [1], 'not int'),
    (Deep, lambda m: [nn.Linear(1, 1)], 'modules of the model, none inside another, not Linear'),
    (Deep, lambda m: [m.layers[0], m.layers[0][0]], 'not Seq'), (Deep, lambda m: [m.layers[0][:2]], 'is a new module')])
def test_errors(make, blocks, says):
    learn = rows(make)(cbs=all_blocks(blocks))
    before = weights(learn)
    with pytest.raises(ValueError, match=says): fit(learn, 1)
    assert_same(weights(learn), before)

@pytest.mark.parametrize('name', ['blocks', 'offload', 'adapt'])
def test_arguments(name):
    with pytest.raises(TypeError, match=f'{name} must be .*, not 3'): ActivationCheckpointing(**{name:3})

@pytest.mark.parametrize('is_frozen', [False, True])
def test_a_block_runs_twice_unless_it_is_frozen(is_frozen):
    learn,runs = deep(cbs=all_blocks(layers)),[]
    for o in learn.model.stem,learn.model.layers: o.requires_grad_(not is_frozen)
    for o in learn.model.layers: o[0].register_forward_hook(lambda m, *args: runs.append(m.training))
    fit(learn, 1)
    assert sum(runs) == 4*3*(2-is_frozen)

# With other callbacks

autos = partial(GradientAccumulation, micro_batch_size='auto'),partial(GradientCache, 'auto')

@pytest.mark.thin(5)
@pytest.mark.parametrize('cbs', [
    lambda: [GradientAccumulation(32)], lambda: [GradientAccumulation(32, micro_batch_size=5)], lambda: [autos[0]()],
    lambda: [GradientCache(5)], lambda: [GradientCache(5, part=lambda m: m.layers[0])], lambda: [autos[1]()],
    lambda: [GradientCache(5), GradientAccumulation(32)], lambda: [GradientAccumulationSchedule(16, 64)]])
@pytest.mark.parametrize('first', [True, False])
def test_beside_others(cbs, first):
    "Equal to the fit with the others alone, in any order"
    ours,make = [all_blocks()],rows(Deep, bs=16)
    assert_same_fit(run(make, *(ours+cbs() if first else cbs()+ours), n_epoch=2), run(make, *cbs(), n_epoch=2))

@pytest.mark.parametrize('first', [True, False])
@pytest.mark.parametrize('cb', autos)
def test_auto_finds_more_samples(cb, first):
    "Recomputed blocks come before smaller micro-batches, in any order"
    def micro_bs(*cbs):
        cbs = [ours := cb(), *cbs]
        run(rows(partial(Deep, 64, 8), 64, 64), Activations(limit=.2), *cbs[::1 if first else -1])
        return ours.micro_bs
    assert micro_bs() < micro_bs(all_blocks()) <= micro_bs(adapting := ActivationCheckpointing()) <= 64
    assert adapting.level >= 8

# A block runs again from the state in which it began

def buffer(m): m.register_buffer('mean', torch.zeros(5).double())
def frozen(m): m.mean = nn.Parameter(torch.zeros(5).double(), requires_grad=False)
def attribute(m): m.mean = torch.zeros(5).double()
@torch.no_grad()
def in_place(m, x): m.mean.lerp_(x.detach().mean(0), .1); return m.mean.clone()
def in_data(m, x): m.mean.data.lerp_(x.detach().mean(0), .1); return m.mean.clone()
def anew(m, x): m.mean = .9*m.mean+.1*x.detach().mean(0); return m.mean
def counted(make, get, put):
    "A number of calls, in what `make` makes"
    def init(m): m.state = make()
    def step(m, x): put(m.state, get(m.state)+1); return .01*get(m.state)
    return init,step
def set_n(o, n): o.n = n
def drawing(make, draw): return (lambda m: setattr(m, 'g', make())),lambda m,x: draw(m.g)
def hidden(m, x):
    h = m.hidden[0][0] if hasattr(m, 'hidden') else 0.
    m.hidden = [((x+h).detach().tanh(),)]
    return h
def shared(m): buffer(m); m.reads = nn.Module(); m.reads.register_buffer('mean', m.mean)
def graph(m): m.register_buffer('graph', torch.eye(5).double().to_sparse(), persistent=False)

states = dict(
    buffer=(buffer, in_place), new_buffer=(buffer, anew), frozen=(frozen, in_place),
    frozen_data=(frozen, in_data), attribute=(attribute, in_place), new_attribute=(attribute, anew),
    of_two_modules=(shared, lambda m,x: (in_place(m, x), m.reads.mean.clone())[1]), hidden=(noop, hidden),
    saved=(buffer, lambda m,x: x*(in_place(m, x), m.mean)[1]),
    list=counted(lambda: [1], len, list.append), deque=counted(lambda: deque([0], 3), itemgetter(-1), deque.append),
    number=(partial(set_n, n=0), lambda m,x: (set_n(m, m.n+1), .01*m.n)[1]),
    counter=counted(lambda: Counter(n=0), itemgetter('n'), lambda o,n: o.update(n=n-o['n'])),
    set=counted(set, len, set.add), namespace=counted(partial(SimpleNamespace, n=0), attrgetter('n'), set_n),
    sparse=(graph, lambda m,x: .1*(m.graph@x.detach().T).T),
    objects=counted(lambda: [Contrast()], lambda o: o[0].n, lambda o,n: set_n(o[0], n)),
    torch=(noop, lambda m,x: torch.randn_like(x)), python=(noop, lambda m,x: random.random()),
    numpy=(noop, lambda m,x: np.random.rand()), own_python=drawing(lambda: random.Random(0), lambda g: g.random()),
    own_torch=drawing(torch.Generator, lambda g: torch.rand(1, generator=g).double()),
    own_numpy=drawing(lambda: [np.random.default_rng(0)], lambda g: g[0].random()))

class Adds(nn.Module):
    "In training adds to its input what `step` gives"
    def __init__(self, init=noop, step=lambda m,x: 0.): super().__init__(); self.step = step; init(self)
    def forward(self, x): return x+self.step(self, x) if self.training else x
class Moves(Adds):
    "And has two layers"
    def __init__(self, *args, n=5):
        super().__init__(*args)
        self.m = nn.Sequential(nn.Linear(n, 5), nn.Tanh(), nn.Linear(5, 5))
    def forward(self, x): return self.m(super().forward(x))
class Spectral(Moves):
    def __init__(self, norm): super().__init__(); self.m[0] = norm(self.m[0])
def inner(): return nn.Sequential(Moves(*states['number']), Moves(*states['own_torch']))
class Transposed(Moves):
    "Its output is not contiguous, and the order of a sum depends on that"
    def forward(self, x): return super().forward(x/(1+x.var())).T.contiguous().T
class Chain(nn.Module):
    "Blocks in a row, which get what no layer keeps"
    def __init__(self, make):
        super().__init__()
        self.layers,self.head = nn.ModuleList(make() for _ in range(3)),nn.Linear(5, 1)
        self.double()
    def forward(self, x):
        for o in self.layers: x = o(x+1.)
        return self.head(x)
class DenseBlock(Moves):
    "Gets a list, to which it adds for a while"
    def forward(self, outputs):
        outputs.append(super().forward(torch.cat(outputs, 1)))
        return outputs.pop()
class Dense(nn.Module):
    "Blocks that get the list of all outputs so far"
    def __init__(self):
        super().__init__()
        self.layers,self.head = nn.ModuleList(DenseBlock(n=n) for n in (5,10,15)),nn.Linear(20, 1)
        self.double()
    def forward(self, x):
        outputs = [x]
        for o in self.layers: outputs.append(o(outputs))
        return self.head(torch.cat(outputs, 1))
chains = {k:partial(Moves, *o) for k,o in states.items()}
chains |= dict(spectral=partial(Spectral, nn.utils.parametrizations.spectral_norm), inner=inner, transposed=Transposed,
               old_spectral=partial(Spectral, nn.utils.spectral_norm))
chains = {k:partial(Chain, o) for k,o in chains.items()} | dict(dense=Dense)

@pytest.mark.parametrize('offload', [False, True])
@pytest.mark.parametrize('kind', chains)
def test_a_block_runs_again_from_its_state(kind, offload):
    "And leaves it as it was: what moves twice in a batch changes the next one"
    make = rows(chains[kind])
    assert_same_fit(run(make, all_blocks(layers, offload), n_epoch=2), run(make, n_epoch=2))

# What cannot run again

class Outside(Moves):
    "A counter that is no part of the model, from epoch `since` on"
    n = since = epoch = 0
    def forward(self, x):
        Outside.n += Outside.since <= Outside.epoch
        return super().forward(x/(1+Outside.n))
class InPlace(Moves):
    "Changes its input, which is its residual, too"
    def forward(self, x): return x+super().forward(F.relu_(x))
depends = 'gives other outputs when it is run again, since it depends on what it changes outside of itself'
changes = 'cannot be run again, since it changes its input in place: set inplace=False there'

@pytest.mark.parametrize('offload', [False, True])
@pytest.mark.parametrize('kind,says', [(Outside, depends), (InPlace, changes)])
def test_what_cannot_run_again_is_an_error(kind, says, offload):
    "Before a step is taken, with what to do"
    run(make := rows(partial(Chain, kind)))
    learn = make(cbs=all_blocks(layers, offload))
    before = weights(learn)
    with pytest.raises(RuntimeError, match=f'^{kind.__name__} {says}.*, or leave it out with blocks='): fit(learn, 1)
    assert_same(weights(learn), before)

def test_each_epoch_is_checked(monkeypatch):
    "A block that can run again in the first epoch only"
    monkeypatch.setattr(Outside, 'since', 1)
    def begin(self): Outside.epoch = self.epoch
    learn = rows(partial(Chain, Outside))(cbs=[all_blocks(layers), Callback(before_epoch=begin)])
    with pytest.raises(RuntimeError, match=depends): fit(learn, 3)
    assert (learn.epoch, learn.iter, len(losses(learn))) == (1, 0, 3)

def test_outputs_are_compared_bit_for_bit():
    "On the CPU, NaN and infinity included"
    a = torch.tensor([1, -3, 0, math.nan, math.inf])
    def runs(*outputs):
        f = repeated(nn.Tanh(), partial(next, iter(outputs)))
        for _ in outputs: f()
    runs(a, a.clone(), a.clone())
    for o in torch.where(a == 1, 1+torch.finfo(a.dtype).eps, a),a[:3]:
        with pytest.raises(RuntimeError, match=f'Tanh {depends}'): runs(a, a.clone(), o)

# Decoders of Transformers, which keep keys and values by default

sizes = dict(vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16)
decoders = dict(GPT2LMHeadModel=dict(vocab_size=11, n_positions=16, n_embd=8, n_layer=2, n_head=2),
                Qwen2ForCausalLM=dict(sizes, intermediate_size=12, num_key_value_heads=1),
                T5ForConditionalGeneration=dict(vocab_size=11, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2,
                                                decoder_start_token_id=0))
class Decoder(nn.Module):
    "A small model, with a padding mask; sees numbers as tokens"
    def __init__(self, name, attention, keeps=True):
        super().__init__()
        import transformers
        kind = getattr(transformers, name)
        self.m = kind(kind.config_class(**decoders[name], attn_implementation=attention)).double()
        for o in () if keeps else self.m.modules(): getattr(o, 'config', self.m.config).use_cache = False
    def forward(self, x):
        ids = (x.abs()*7).long()%11
        args = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
        args['attention_mask'][::2,3:] = 0
        if self.m.config.is_encoder_decoder: args['decoder_input_ids'] = ids.flip(1)
        return self.m(**args).logits.mean((1, 2))[:,None]

@pytest.mark.parametrize('attention', ['eager', 'sdpa'])
@pytest.mark.parametrize('name', decoders)
def test_decoders_that_keep_keys_and_values(name, attention):
    def make(**args): return rows(partial(Decoder, name, attention, **args), 12, 36)
    ours = run(make(), all_blocks())
    assert len(ours.activation_checkpointing.found) >= 2 and ours.model.m.config.use_cache
    assert_same_fit(ours, run(make(keeps=False)))

# As few blocks as memory requires

@pytest.mark.thin(3)
@pytest.mark.parametrize('share', [.97, .9, .8, .7, .6, .5, .2])
def test_ladder(share):
    "The first of 0, 1, 2, 4, ... of 20 blocks that suffices, after a failed pass for each before; then the CPU"
    make = partial(mlp, partial(nn.BatchNorm1d, 20), nn.Tanh, n_layers=20)
    big,small = limited(make, share, Passes)
    assert_same_fit(small, big)
    level,limit = small.activation_checkpointing.level,big.activations.mb*share
    tried = [0, 1, 2, 4, 8, 16, 20, 21].index(level)
    assert len(small.passes.sizes) == 2+tried and tried > 0 and (level == 21) == (share == .2)
    def fits(k):
        try: return run(make, Activations(limit), *[all_blocks(lambda m: list(m)[:k])]*(k > 0))
        except torch.OutOfMemoryError: return None
    assert not fits(small.activation_checkpointing.levels[tried-1]) and (level == 21 or fits(level))

@pytest.mark.thin(7)
@pytest.mark.parametrize('window', [32, 128])
@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'after_backward'])
@pytest.mark.parametrize('passes,level', [([1], 1), ([3], 1), ([4], 1), ([2,3,4,5], 5), ([6,7,9], 4)])
def test_memory_runs_out_later(passes, level, event, window):
    "In any loader batch of a window: it runs again, with more blocks, and counts once"
    make = partial(mlp, partial(nn.BatchNorm1d, 20), partial(nn.Dropout, .3), loss=Counts, n=256)
    big = run(make, GradientAccumulation(window, verbose=False))
    where = ', and what they keep is on the CPU'*(level > 4)
    says = f'^out of memory in training: from now on, {min(level, 4)} of 4 blocks are recomputed{where}$'
    with pytest.warns(match=says):
        small = run(make, GradientAccumulation(window, verbose=False), Fails(event, *passes), ActivationCheckpointing())
    assert_same_fit(small, big)
    assert small.activation_checkpointing.level == level and small.loss_func.n == big.loss_func.n
    assert small.recorder.accum_bs == [window]*(256//window)

def test_texts_of_many_lengths():
    "In half of the memory of the longest: short ones run without recomputation"
    def make(**kwargs):
        batches = [(torch.randint(50, (32, n)), torch.randint(3, (32, n))) for n in (64, 8, 32, 16, 64, 8)]
        dls = DataLoaders(*[torch.utils.data.DataLoader(batches, batch_size=None)]*2)
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(8)]
        m = nn.Sequential(nn.Embedding(50, 16), *blocks, nn.Linear(16, 3))
        return Learner(dls, m, CrossEntropyLossFlat(), **kwargs)
    levels,cb = {},ActivationCheckpointing()
    def see(self): levels[self.x.shape[1]] = cb.level
    big,small = limited(make, .45, lambda: Callback(before_step=see), ours=lambda: cb)
    assert_same_fit(small, big)
    assert levels[8] == levels[16] == 0 < levels[64]

@pytest.mark.parametrize('cb', [ActivationCheckpointing, *autos])
@pytest.mark.parametrize('make', [normed, contrastive, convnext])
def test_where_all_fits_nothing_changes(make, cb):
    "As many passes as in the plain fit, and the same random numbers afterwards"
    def fitted(*cbs): return run(make, Passes(), *cbs, n_epoch=2),torch.rand(1).item(),random.random(),np.random.rand()
    (big,*drawn),(small,*same) = fitted(),fitted(cb())
    assert_same_fit(small, big)
    assert same == drawn and small.passes.sizes == big.passes.sizes and len(big.passes.sizes) == 4

@pytest.mark.parametrize('share,own,says', [
    (1.1, None, 'fits in memory'), (.6, None, r'fits if [24] of 4 blocks are recomputed'),
    (.9, lambda m: [m[2], m[3]], 'fits if 1 of 2 blocks are recomputed'),
    (.3, None, 'fits if 4 of 4 blocks are recomputed, and what they keep is on the CPU')])
def test_one_line(share, own, says, capsys):
    "In the first of equal fits, which searches; later ones do if other weights are trained"
    limit = run(normed, Activations()).activations.mb*share
    learn = normed(cbs=[Activations(limit), ActivationCheckpointing(own), passes := Passes()],
                   splitter=lambda m: [params(m[:2]), params(m[2:])])
    def said():
        fit_aloud(learn, 2)
        return len(passes.sizes)-4,capsys.readouterr().out
    failed,line = said()
    assert re.fullmatch(f'ActivationCheckpointing: each batch of 32 {says}\n', line) and (failed > 0) == ('if' in says)
    assert said() == (0, '')
    learn.freeze()
    assert said()[0] <= failed and said()[0] == 0
    learn.unfreeze()
    assert said()[0] == failed and said()[0] == 0

@pytest.mark.parametrize('make,says', [
    (normed, 'not even with all blocks recomputed and their inputs on the CPU'),
    (rows(flat), r'ActivationCheckpointing finds no blocks in Linear: name modules with blocks=lambda model: \[...\]')])
def test_what_does_not_fit_even_so(make, says):
    "The error comes before the first step, says what does, and leaves nothing"
    learn = make(cbs=[Activations(1e-6), ActivationCheckpointing()])
    before = [*state(learn).values()]
    does = r"GradientAccumulation\(micro_batch_size='auto'\) splits it"
    with pytest.raises(RuntimeError, match=f'a batch of 32 does not fit in memory: {says}; {does}') as e: fit(learn, 1)
    assert type(e.value.__cause__) is torch.OutOfMemoryError
    assert all(map(torch.equal, before, state(learn).values()))
    assert_as_it_was(learn)

class Kept(Callback):
    "Bytes alive after a forward pass, and the most in it, without the model's own"
    run_valid = False
    def before_batch(self): self.live = LiveBytes(self.model).__enter__()
    def after_loss(self):
        self.now = self.live.now
        self.live.__exit__(None, None, None)
        raise CancelFitException

@pytest.mark.thin(3)
@pytest.mark.parametrize('make,at_most', [(resnet, .25), (convnext, .3), (regnet, .5), (densenet, .3)])
def test_live_bytes(make, at_most):
    plain,ours = (fit(make(cbs=[Kept(), *cbs]), 1).kept for cbs in ([], [all_blocks()]))
    assert ours.now < at_most*plain.now and ours.live.peak < plain.live.peak

@pytest.mark.parametrize('offload', [False, True])
def test_offload_leaves_no_input_on_the_device(offload):
    "Nothing refers to what a block got but its copy on the CPU"
    seen,alive = [],[]
    def see(m, args): seen.append(weakref.ref(args[0].untyped_storage()))
    def look(self): alive.extend(o() is not None for o in seen); raise CancelFitException
    learn = deep(cbs=[all_blocks(layers, offload), Callback(after_loss=look)])
    for m in layers(learn.model): m.register_forward_pre_hook(see)
    fit(learn, 1)
    assert alive == [not offload]*4

class Recurrent(nn.Module):
    "Makes a new weight in each forward pass"
    def __init__(self): super().__init__(); self.rnn = WeightDropout(nn.LSTM(5, 5, batch_first=True), .5)
    def forward(self, x): return self.rnn(x[:,None])[0][:,0]
class Weights(Callback):
    "How many weights of earlier passes are alive in each"
    run_valid = False
    def before_fit(self): self.weights,self.alive = [],[]
    def after_pred(self):
        gc.collect()
        self.alive.append(len([o for o in self.weights if o() is not None]))
        self.weights += [weakref.ref(m.weight_hh_l0) for m in self.model.modules() if isinstance(m, nn.LSTM)]
def recurrent(m): return list(m[0])

@pytest.mark.parametrize('cb', [
    ActivationCheckpointing, partial(ActivationCheckpointing, recurrent), partial(all_blocks, recurrent), *autos,
    partial(GradientCache, 4), partial(GradientAccumulation, micro_batch_size=4), partial(GradientAccumulation, 16)])
def test_nothing_of_earlier_passes_is_kept(cb):
    "But for the weights to put back; of a pass that fails nothing"
    def make(**kwargs):
        m = nn.Sequential(nn.Sequential(Recurrent(), Recurrent()), nn.Linear(5, 1)).double()
        return make_learner(8, n=64, m=m, **kwargs)
    gc.freeze()  # or each `gc.collect` goes through all of PyTorch
    cb = cb()
    adapts = getattr(cb, 'adapts', cb.micro_batch_size == 'auto')
    learn = run(make, cb, Weights(), *[Fails('after_loss', 0, 1)]*adapts)
    alive = learn.weights.alive
    assert len(alive) >= 8 and max(alive) <= (4 if adapts else 2) and (alive[:3] == [0, 0, 0] or not adapts)
    with pytest.raises(ValueError): fit(learn, 1, cbs=Fault(ValueError, 'after_loss', 5, 100))
    learn.pred = learn.loss_grad = learn.loss = None
    learn.weights.after_pred()
    assert len(learn.weights.weights) > 10 and learn.weights.alive[-1] <= 4

# Beside the batches of a fit

@pytest.mark.parametrize('ours', [all_blocks, ActivationCheckpointing])
def test_lr_find(ours):
    found = []
    def find_and_fit(learn, *args, **kwargs):
        with quiet(learn): learn.lr_find(num_it=6, show_plot=False)
        found.append(losses(learn))
        set_seed(3)
        fit(learn, *args, **kwargs)
    assert_same_fit(*reversed(limited(normed, .6, ours=ours, fit=find_and_fit)))
    assert found[0] == found[1] and len(found[0]) == 6

def test_an_interrupt_in_a_second_run():
    learn,runs = deep(cbs=all_blocks(layers)),itertools.count()
    def interrupt(*args):
        if next(runs): raise KeyboardInterrupt
    learn.model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt): fit(learn, 1)
    assert_as_it_was(learn)

class Zeroes(Callback):
    "fastai leaves the gradients of a batch that is cancelled"
    def before_batch(self): self.opt.zero_grad()

@pytest.mark.thin(5)
@pytest.mark.parametrize('event', EVENTS)
@pytest.mark.parametrize('exc', [KeyboardInterrupt, *CANCELS, CancelStepException, CancelBackwardException])
def test_a_fault_leaves_nothing(exc, event):
    def after_a_fault(*cbs):
        set_seed(0)
        learn = rows(partial(Deep, p=0., n=2), n=64)(cbs=[*cbs, Fault(exc, event, 1+(event in EVENTS[3:10]), 7)])
        try: fit(learn, 1)
        except BaseException: pass
        assert_as_it_was(learn)
        assert learn.fault.count >= learn.fault.nth or event == 'after_cancel_batch'
        learn.remove_cb(Fault)
        return fit(learn, 1)
    assert_same_fit(after_a_fault(all_blocks()), after_a_fault(Zeroes()))

# What a model may hold

def test_validation_and_prediction_of_a_text_classifier():
    "In smaller micro-batches if memory runs out. It has a `reset`, and puts its own state in order"
    def run(most):
        torch.manual_seed(0)
        samples = [(torch.randint(2, 20, (12,)), torch.tensor(i%2)) for i in range(32)]
        m = get_text_classifier(AWD_LSTM, 20, 2, 6, {**awd_lstm_clas_config, 'n_layers':1, 'emb_sz':8, 'n_hid':12})
        def limit(module, args):
            if not module.training and len(args[0][0]) > most: raise torch.OutOfMemoryError('CUDA out of memory')
        m[1].register_forward_pre_hook(limit)
        dls = DataLoaders(DataLoader(samples, bs=8), DataLoader(samples, bs=16))
        return fit(Learner(dls, m, CrossEntropyLossFlat(), cbs=[*rnn_cbs(2, 1), ActivationCheckpointing()]), 1)
    big,small = run(16),run(8)
    assert_same(floats(small.recorder.values), floats(big.recorder.values), 1e-6)
    with quiet(small), quiet(big): assert_same(small.get_preds()[0], big.get_preds()[0], 1e-6)

def test_other_blocks_in_the_next_fit():
    learn = mlp(cbs=(cb := ActivationCheckpointing()), n_layers=8)
    for blocks,fails in (None, range(4)),(lambda m: m[:2].children(), [0]):
        cb.blocks = blocks
        fit(learn, 1, cbs=Fails('after_loss', *fails))
    assert cb.level == 1 and len(cb.found) == 2

class Debugs(Moves):
    "Its argument is also one of `checkpoint`, and its configuration a dict with attributes"
    config = AttrDict(use_cache=True)
    def forward(self, x, debug=False): return super().forward(x)*(1+debug)
class Calls(Chain):
    def forward(self, x): return self.head(self.layers[0](x, debug=True))

def test_a_block_with_any_argument_and_configuration():
    make = rows(partial(Calls, Debugs))
    assert_same_fit(run(make, all_blocks(layers)), run(make))
    assert Debugs.config == dict(use_cache=True)
