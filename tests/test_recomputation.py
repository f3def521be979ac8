"Recomputed blocks change nothing: weights, buffers, losses and metrics are those of the plain fit, bit for bit"
import pytest
from fastai.callback.mixup import MixUp

from common import *
from library_models import *
from recomputed import *
from stateful import *


# Models of libraries, and small ones

bf16 = partial(CpuMixedPrecision, 'bf16')
fp16 = partial(CpuMixedPrecision, 'fp16')
fine_tune = dict(method='fine_tune')  # first with a frozen body
one_cycle = dict(method='fit_one_cycle', n_epoch=2)

MODELS = {  # a Learner, its callbacks, and how it is trained
    'resnet': (resnet, [MixUp], fine_tune),
    'unet': (unet, [], one_cycle),
    'densenet': (densenet, [], {}),
    'convnext': (convnext, [MixUp], {}),
    'vit': (vit, [], {}),
    'text': (language_model, [], {}),
    'text of one layer': (partial(language_model, 1), [], {}),
    'batch norm': (with_batch_norm, [], one_cycle),
    'fp16': (with_dropout, [fp16], {}),
    'bf16': (with_dropout, [MixUp, bf16], one_cycle),
    'contrastive': (contrastive, [], one_cycle)}


@pytest.mark.thin(4)
@pytest.mark.parametrize('name,share', paired(MODELS, [1., .8, .6]))
def test_as_many_blocks_as_a_share_of_the_memory_requires(name, share):
    ours = all_blocks if share == 1 else ActivationCheckpointing
    make, cb_types, training = MODELS[name]
    plain, saving = trained_in_less(make, share, *cb_types, ours=ours, **training)
    assert_same_fit(saving, plain)
    cb = saving.activation_checkpointing
    assert cb.n_recomputed == len(cb.found) or cb.adapt


# Decoders of Transformers, to whose cache of keys and values both runs of a block would add

SIZES = dict(vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16)
DECODERS = dict(
    GPT2LMHeadModel=dict(vocab_size=11, n_positions=16, n_embd=8, n_layer=2, n_head=2),
    Qwen2ForCausalLM=dict(SIZES, intermediate_size=12, num_key_value_heads=1),
    T5ForConditionalGeneration=dict(
        vocab_size=11, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, decoder_start_token_id=0))


class Decoder(nn.Module):
    "A small model of Transformers, which takes numbers for tokens, some of them padded"
    def __init__(self, name, attention, use_cache=True):
        super().__init__()
        import transformers
        kind = getattr(transformers, name)
        config = kind.config_class(**DECODERS[name], attn_implementation=attention, use_cache=use_cache)
        self.m = kind(config).double()

    def forward(self, x):
        tokens = (x.abs()*7).long()%11
        mask = torch.ones_like(tokens)
        mask[::2, 3:] = 0
        inputs = dict(input_ids=tokens, attention_mask=mask)
        if self.m.config.is_encoder_decoder: inputs['decoder_input_ids'] = tokens.flip(1)
        return self.m(**inputs).logits.mean((1, 2))[:, None]


@pytest.mark.parametrize('name,attention', [
    ('GPT2LMHeadModel', 'eager'),
    ('Qwen2ForCausalLM', 'sdpa'),
    ('T5ForConditionalGeneration', 'eager')])
def test_a_decoder_keeps_no_cache_while_its_layers_are_recomputed(name, attention):
    def make(use_cache): return regression(partial(Decoder, name, attention, use_cache), bs=12, n=36)
    ours = trained(make(use_cache=True), all_blocks())
    assert_same_fit(ours, trained(make(use_cache=False)))
    assert len(ours.activation_checkpointing.found) >= 2
    assert ours.model.m.config.use_cache, 'it is as before once the fit has ended'


# Blocks with a state

class SpectralBlock(Block):
    "Its weight comes from buffers that each pass changes"
    def __init__(self, norm):
        super().__init__()
        self[1] = norm(self[1])


class TransposedBlock(Block):
    "Its output is not contiguous, and the order in which PyTorch adds numbers depends on that"
    def forward(self, x):
        scaled = x/(1+x.var())
        return super().forward(scaled).T.contiguous().T


# What a block is given

class DenseBlock(nn.Module):
    "Takes the list of all outputs so far, to which it adds its own for a while"
    def __init__(self, n):
        super().__init__()
        self.layer = nn.Linear(n, 5)

    def forward(self, outputs):
        outputs.append(self.layer(torch.cat(outputs, 1)).tanh())
        return outputs.pop()


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(DenseBlock(n) for n in (5, 10, 15))
        self.head = nn.Linear(20, 1)
        self.double()

    def forward(self, x):
        outputs = [x]
        for layer in self.layers: outputs.append(layer(outputs))
        return self.head(torch.cat(outputs, 1))


class ScaledBlock(Block):
    "Its argument is also one of PyTorch's `checkpoint`, and its configuration a dict with attributes"
    config = AttrDict(use_cache=True)

    def forward(self, x, debug=1): return super().forward(x)*debug


class ChainOfScaled(Chain):
    def call_layer(self, layer, x): return layer(x, debug=2)


class NestedBlock(Block):
    "Is given a dict of tuples, and returns one"
    def forward(self, inputs): return dict(states=(super().forward(inputs['states'][0]), inputs['states'][0]))


class ChainOfNested(Chain):
    def call_layer(self, layer, x): return sum(layer(dict(states=(x, None)))['states'])


# All these blocks

BLOCKS = dict(
    {kind.__name__: partial(Chain, partial(Block, kind)) for kind in (
        BufferInPlace, BufferByData, NewBuffer, AttributeInPlace, KeptForBackward, LastInputs,
        SparseBuffer,
        Number, TorchNoise, PythonNoise, NumpyNoise)},
    nested_state=partial(Chain, lambda: nn.Sequential(Block(Number), Block(TorchNoise))),
    transposed=partial(Chain, TransposedBlock),
    spectral=partial(Chain, partial(SpectralBlock, nn.utils.parametrizations.spectral_norm)),
    old_spectral=partial(Chain, partial(SpectralBlock, nn.utils.spectral_norm)),
    keyword=partial(ChainOfScaled, ScaledBlock),
    list=Dense,
    nested_argument=partial(ChainOfNested, NestedBlock))


@pytest.mark.parametrize('name,offload', paired(BLOCKS, [False, True]))
def test_a_block_runs_again_from_the_state_in_which_it_began_with_what_it_was_given(name, offload):
    "And leaves its state as it was: what changes twice in a batch would show in the next one"
    make = regression(BLOCKS[name])
    assert_same_fit(trained(make, all_blocks(layers, offload), n_epoch=2), trained(make, n_epoch=2))
    assert ScaledBlock.config == dict(use_cache=True)


# Beside other callbacks

BESIDE = dict(
    windows=lambda: [GradientAccumulation(32)],
    micro_batches=lambda: [GradientAccumulation(32, micro_batch_size=5)],
    schedule=lambda: [GradientAccumulationSchedule(16, 64)],
    cache_of_a_part=lambda: [GradientCache(5, part=lambda m: m.layers[0])],
    auto_cache=lambda: [auto_cache()],
    cache_and_windows=lambda: [GradientCache(5), GradientAccumulation(32)])


@pytest.mark.thin(2)
@pytest.mark.parametrize('name', BESIDE)
def test_beside_others_it_changes_nothing_either(name):
    "Whichever was added first"
    make = regression(Deep, bs=16, n=64)
    plain = trained(make, *BESIDE[name](), n_epoch=2)
    assert_same_fit(trained(make, all_blocks(), *BESIDE[name](), n_epoch=2), plain)
    assert_same_fit(trained(make, *BESIDE[name](), all_blocks(), n_epoch=2), plain)


@pytest.mark.parametrize('ours', [all_blocks, ActivationCheckpointing])
def test_lr_find_and_the_fit_after_it(ours):
    found = []

    def find_and_fit(learn, *args, **kwargs):
        find_rate(learn, 6)
        found.append(losses(learn))
        set_seed(3)
        fit(learn, *args, **kwargs)

    plain, saving = trained_in_less(with_batch_norm, .6, ours=ours, fit=find_and_fit)
    assert_same_fit(saving, plain)
    losses_of_plain, losses_of_ours = found
    assert_same(losses_of_ours, losses_of_plain)
    assert len(losses_of_ours) == 6
