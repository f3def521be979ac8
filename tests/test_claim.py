"What `check_loss` says of the losses that fastai's users have: fastai's, PyTorch's, those of tsai, MONAI and fastMONAI in short, and bad ones"
import random
from collections import deque

import pytest
from fastai.callback.mixup import MixUp
from fastai.losses import *

from common import *
from fastxtend_accum.windows.loss_check import LossCheck
from fastxtend_accum.windows.losses import has_rule,n_items
from fastxtend_accum.windows.nested import each_tensor

# Data: 16 samples; some labels are ignored, some values are missing, masks have rare classes

g = torch.Generator().manual_seed(3)
def randn(*shape): return torch.randn(*shape, generator=g)
def randint(n, *shape): return torch.randint(n, shape, generator=g)

logits,values,targets,labels = randn(16, 5),randn(16, 7),randn(16, 7),randint(5, 16)
ignored = labels.where(torch.arange(16)%5 > 1, -100)
maps,masks,rare = randn(16, 3, 6, 6),randint(3, 16, 6, 6),(torch.rand(16, 6, 6, generator=g) < torch.linspace(.02, .7, 16)[:,None,None]).long()
binary,probs,signs = randint(2, 16, 7).float(),randn(16, 5).softmax(1),randint(2, 16, 7)*2.-1
holes = targets.where(torch.rand(16, 7, generator=g) > torch.linspace(0, .8, 16)[:,None], torch.nan)
anchors,others,names = randn(16, 4),randn(16, 4),randint(4, 16)
w = tensor([1.,2.,3.,4.,5.])

# tsai's, in short

class MaskedLossWrapper(nn.Module):
    "tsai: targets that are NaN are left out"
    def __init__(self, crit): super().__init__(); self.loss = crit
    def forward(self, inp, targ):
        mask = ~torch.isnan(targ)
        return self.loss(inp[mask], targ[mask])

class LogCosh(nn.Module):
    "tsai's LogCoshLoss"
    def forward(self, inp, targ): return torch.mean(torch.log(torch.cosh(inp-targ+1e-12)))

class TweedieLoss(nn.Module):
    "tsai"
    def forward(self, inp, targ, p=1.5, eps=1e-8):
        inp = inp.flatten().exp().clamp_min(eps)
        return (-targ.flatten().abs()*inp**(1-p)/(1-p) + inp**(2-p)/(2-p)).mean()

class CenterLoss(nn.Module):
    "tsai: the distance from a learned centre of the class"
    def __init__(self): super().__init__(); self.centers = nn.Parameter(torch.linspace(-1, 1, 25).reshape(5, 5))
    def forward(self, x, labels): return ((x-self.centers[labels])**2).sum(1).clamp(1e-12, 1e12).mean()

class TsaiFocal(nn.Module):
    "tsai's FocalLoss: class weights, and a mean over samples"
    def forward(self, x, y):
        log_p,p = F.log_softmax(x, 1),F.softmax(x, 1)
        at = torch.arange(len(x)),y
        return (w.to(x.dtype)[y]*(1-p[at])**2*-log_p[at]).mean()

# MONAI's and fastMONAI's, in short

def monai_dice(batch=False):
    "MONAI's DiceLoss: the mean over samples and classes, or with `batch` one Dice of the whole batch"
    def loss(pred, targ):
        pred,targ = pred.softmax(1),F.one_hot(targ, 3).movedim(-1, 1)
        axes = (0,2,3) if batch else (2,3)
        return (1 - (2*(pred*targ).sum(axes)+1e-5)/((pred+targ).sum(axes)+1e-5)).mean()
    return loss

def dice_ce(pred, targ): return monai_dice()(pred, targ) + F.cross_entropy(pred, targ)

def tversky(exponent=1., batch=False):
    "MONAI's TverskyLoss under fastMONAI's exponent: (1 - index)**exponent of the mean, which is no mean"
    def loss(pred, targ):
        p,axes = pred.softmax(1)[:,1],(0,1,2) if batch else (1,2)
        tp,fp,fn = (p*targ).sum(axes),(p*(1-targ)).sum(axes),((1-p)*targ).sum(axes)
        return (1 - (tp+1)/(tp+.3*fp+.7*fn+1)).mean()**exponent
    return loss

class CustomLoss:
    "fastMONAI's wrapper"
    def __init__(self, loss_func): self.loss_func = loss_func
    def __call__(self, pred, targ): return self.loss_func(pred, targ)

# Bad ones

class CombinedLoss:
    "Of fastai's documentation"
    def __init__(self): self.focal,self.dice = FocalLossFlat(axis=1),DiceLoss()
    def __call__(self, pred, targ): return self.focal(pred, targ) + self.dice(pred, targ)

def info_nce(pred, targ): return F.cross_entropy(pred@targ.T, torch.arange(len(pred)))
def masked(pred, targ): return ((pred-targ)**2*(targ > .5)).sum()/(targ > .5).sum()
def rmse(pred, targ): return F.mse_loss(pred, targ).sqrt()
def pearson(pred, targ): return 1 - torch.corrcoef(torch.stack([pred.flatten(), targ.flatten()]))[0,1]
def hard_examples(pred, targ): return F.cross_entropy(pred, targ, reduction='none').topk(2).values.mean()
def balanced(pred, targ): return F.cross_entropy(pred, targ, weight=(torch.bincount(targ, minlength=5)+1.).reciprocal().to(pred.dtype))
def soft_f1(pred, targ): p = pred.sigmoid(); return 1 - 2*(p*targ).sum()/(p+targ).sum()
def variance(pred, targ): return F.mse_loss(pred, targ) + F.relu(1-pred.std(0)).mean()
def batch_hard(pred, targ):
    d,same = torch.cdist(pred, pred),targ[:,None] == targ
    return F.relu(d.masked_fill(~same, 0).amax(1) - d.masked_fill(same, 1e3).amin(1) + 1).mean()
def centred(pred, targ): return ((pred-pred.mean(0)-targ)**2).mean()
def plain_sum(pred, targ): return ((pred-targ)**2).sum()
def hinge_sum(pred, targ): return F.relu(1-pred*targ).sum()/7

# Losses that have a state, or draw

class Counts:
    def __init__(self): self.calls,self.history = 0,deque(maxlen=2)
    def __call__(self, pred, targ):
        self.calls += 1; self.history.append(self.calls)
        return F.cross_entropy(pred, targ)*(1 + 1/self.calls)

class RunningMean(nn.Module):
    "Divides by a running mean of itself"
    def __init__(self): super().__init__(); self.register_buffer('mean', tensor(1.))
    def forward(self, pred, targ):
        loss = F.mse_loss(pred, targ)
        self.mean.lerp_(loss.detach().to(self.mean.dtype), .1)
        return loss/self.mean

class OwnGenerator:
    def __init__(self): self.g = torch.Generator().manual_seed(0)
    def __call__(self, pred, targ): return (pred-targ)[:,torch.randperm(7, generator=self.g)[:3]].pow(2).mean()

def dropped(pred, targ): return F.cross_entropy(F.dropout(pred, .5), targ)
def python_random(pred, targ): return F.cross_entropy(pred, targ)*random.random()

def in_place(pred, targ):
    targ[targ == -100] = 0
    return F.cross_entropy(pred.mul_(2), targ)

def counted(pred, targ):
    "By itself a mean over samples, with a counter in a closure"
    nonlocal_counter[0] += 1
    return F.l1_loss(pred, targ)
nonlocal_counter = [0]

exact = {
    'CrossEntropyLossFlat':(CrossEntropyLossFlat(), logits, labels), '... ignore_index':(CrossEntropyLossFlat(), logits, ignored),
    '... weight':(CrossEntropyLossFlat(weight=w), logits, labels), '... axis':(CrossEntropyLossFlat(axis=1), maps, masks),
    'FocalLossFlat':(FocalLossFlat(axis=1), maps, masks), 'LabelSmoothingCrossEntropyFlat':(LabelSmoothingCrossEntropyFlat(), logits, labels),
    'BCEWithLogitsLossFlat':(BCEWithLogitsLossFlat(), values, binary), 'MSELossFlat':(MSELossFlat(), values, targets),
    'L1LossFlat':(L1LossFlat(), values, targets), 'DiceLoss':(DiceLoss(), maps, masks), "DiceLoss('mean')":(DiceLoss(reduction='mean'), maps, masks),
    'label smoothing, weights':(nn.CrossEntropyLoss(weight=w, label_smoothing=.1), logits, ignored), 'probabilities':(nn.CrossEntropyLoss(), logits, probs),
    "reduction='sum'":(nn.CrossEntropyLoss(reduction='sum'), logits, ignored), 'NLLLoss':(nn.NLLLoss(weight=w), logits, labels),
    'pos_weight':(nn.BCEWithLogitsLoss(pos_weight=tensor(3.)), values, binary), 'SmoothL1Loss':(nn.SmoothL1Loss(), values, targets),
    'HuberLoss':(nn.HuberLoss(), values, targets), 'KLDivLoss':(nn.KLDivLoss(), logits, probs), 'batchmean':(nn.KLDivLoss(reduction='batchmean'), logits, probs),
    'PoissonNLLLoss':(nn.PoissonNLLLoss(), values, binary), 'SoftMarginLoss':(nn.SoftMarginLoss(), values, signs),
    'HingeEmbeddingLoss':(nn.HingeEmbeddingLoss(), values, signs), 'MultiMarginLoss':(nn.MultiMarginLoss(), logits, labels),
    'MultiLabelSoftMarginLoss':(nn.MultiLabelSoftMarginLoss(), values, binary), 'CosineEmbeddingLoss':(nn.CosineEmbeddingLoss(), anchors, others, signs[:,0]),
    'TripletMarginLoss':(nn.TripletMarginLoss(), anchors, others, randn(16, 4)), 'GaussianNLLLoss':(nn.GaussianNLLLoss(), values, targets, values.exp()),
    'F.cross_entropy, weight':(partial(F.cross_entropy, weight=w, ignore_index=2), logits, labels), 'F.mse_loss':(F.mse_loss, values, targets),
    "F.l1_loss, 'sum'":(partial(F.l1_loss, reduction='sum'), values, targets), 'lambda':(lambda p,t: (p-t).abs().mean(), values, targets),
    'tsai LogCosh':(LogCosh(), values, targets), 'tsai Tweedie':(TweedieLoss(), values[:,:1], targets[:,:1]), 'tsai CenterLoss':(CenterLoss(), logits, labels),
    'tsai FocalLoss':(TsaiFocal(), logits, labels), 'MONAI DiceLoss':(CustomLoss(monai_dice()), maps, masks), 'MONAI DiceCELoss':(CustomLoss(dice_ce), maps, masks),
    'MONAI TverskyLoss':(CustomLoss(tversky()), maps, rare), 'wrapped cross-entropy':(CustomLoss(nn.CrossEntropyLoss()), maps, masks),
    'in place':(in_place, logits, labels), 'a counter':(counted, values, targets),
}
inexact = {
    'CombinedLoss':(CombinedLoss(), maps, masks), 'Dice over the batch':(CustomLoss(monai_dice(batch=True)), maps, rare),
    'Tversky, exponent':(CustomLoss(tversky(.75)), maps, rare), 'Tversky over the batch':(tversky(1., True), maps, rare),
    'tsai MaskedLossWrapper':(MaskedLossWrapper(nn.MSELoss()), values, holes), 'masked':(masked, values, targets),
    "wrapped 'sum'":(CustomLoss(nn.CrossEntropyLoss(reduction='sum')), maps, masks), 'a sum':(plain_sum, values, targets), 'hinge sum':(hinge_sum, values, signs),
    'wrapped weights':(CustomLoss(nn.CrossEntropyLoss(weight=tensor([1.,10.,45.]))), maps, masks),
    'wrapped ignore_index':(CustomLoss(nn.CrossEntropyLoss(ignore_index=0)), maps, rare), 'InfoNCE':(info_nce, anchors, others), 'RMSE':(rmse, values, targets),
    'label smoothing of fastai, weights':(LabelSmoothingCrossEntropyFlat(weight=w), logits, labels),
    'pearson':(pearson, values, targets), 'hard examples':(hard_examples, logits, labels), 'weights of the batch':(balanced, logits, labels),
    'soft F1':(soft_f1, values, binary), 'variance':(variance, values, targets), 'batch-hard triplets':(batch_hard, anchors, names), 'centred':(centred, values, targets),
}
stateful = {'counts its calls':(Counts(), logits, labels), 'running mean':(RunningMean(), values, targets), 'generator of its own':(OwnGenerator(), values, targets),
            'dropout':(dropped, logits, labels), 'random':(python_random, logits, labels)}
assert len(exact)+len(inexact) >= 60

splits = {'even':(8, 8), 'ragged':(8, 5), 'small':(3, 2)}

def two(args, sizes): return list(zip(*([o[:sizes[0]], o[sizes[0]:sum(sizes)]] for o in args)))

def half(args):
    "As the model gives them under autocast: rounded, then in float32 as fastai does"
    return args[0].bfloat16().float(),*args[1:]

def verdict(case, sizes, autocasts):
    loss_func,*args = case
    with autocast('cpu', dtype=torch.bfloat16, enabled=autocasts): return check_loss(loss_func, two(half(args) if autocasts else args, sizes))

def truth(case, sizes):
    "Whether the gradient of both equals the weighted sum of the gradients of the two, without any of the code that is tested but the weights"
    loss_func,*args = case
    args = [o.clone() for o in args]
    pred = args[0].requires_grad_()
    parts = [(p*1,*[o.clone() for o in rest]) for p,*rest in two(args, sizes)]
    items = [n_items(SimpleNamespace(loss_func=loss_func, pred=p, yb=y)) for p,*y in parts]
    values = [loss_func(p, *y) for p,*y in parts]
    made = sum(values) if items[0] is None else sum(v*n for v,n in zip(values, items))/sum(items)
    whole = loss_func(pred[:sum(sizes)]*1, *[o[:sum(sizes)].clone() for o in args[1:]])
    a,b = (torch.autograd.grad(o, pred, retain_graph=True)[0] for o in (made, whole))
    return float((a-b).norm()/b.norm()) < 1e-4

@pytest.mark.parametrize('autocasts', [False, True], ids=['float32', 'autocast'])
@pytest.mark.parametrize('split', splits)
def test_no_wrong_verdict(split, autocasts):
    verdicts = {name:verdict(case, splits[split], autocasts) for name,case in {**exact, **inexact}.items()}
    assert [name for name,v in verdicts.items() if v.says == 'cannot tell'] == []
    assert [name for name,v in verdicts.items() if v.says == 'differs'] == [*inexact]
    assert max(verdicts[o].by for o in exact) < 3e-7
    assert min(verdicts[o].by for o in inexact) > 1e-4

@pytest.mark.parametrize('name', [*exact, *inexact])
def test_the_table_is_true(name): assert truth((exact | inexact)[name], (8, 5)) == (name in exact)

@pytest.mark.parametrize('name', ['generator of its own', 'dropout', 'random'])
def test_of_a_loss_that_draws_it_cannot_tell(name):
    v = verdict(stateful[name], (8, 5), False)
    assert v.says == 'cannot tell' and 'called again' in v.why

def micro_batch(loss_func, args): return SimpleNamespace(loss_func=loss_func, pred=args[0], yb=args[1:])

def random_states(): return torch.get_rng_state().tolist(),random.getstate(),np.random.get_state()[1].tolist()

@pytest.mark.parametrize('autocasts', [False, True])
@pytest.mark.parametrize('name', stateful)
def test_nothing_has_changed(name, autocasts):
    "Attributes, buffers, generators of the loss and of the process, autocast, and the graph of the outputs"
    loss_func,pred,targ = stateful[name]
    def state():
        held = vars(loss_func) | dict(getattr(loss_func, '_buffers', {}))
        return str(held),[o.get_state().tolist() for o in held.values() if isinstance(o, torch.Generator)],random_states()
    layer,check = nn.Linear(pred.shape[1], pred.shape[1]),LossCheck()
    with autocast('cpu', dtype=torch.bfloat16, enabled=autocasts):
        before,out = state(),layer(pred)
        version = out._version
        for p,t in two((out, targ), (8, 5)): check.add(micro_batch(loss_func, (p, t)), len(t))
        assert len(check.compare()) == 2
        assert torch.is_autocast_enabled('cpu') == autocasts
    assert state() == before and out._version == version
    out.sum().backward()
    assert layer.weight.grad is not None and pred.grad is None

def test_a_method_of_a_callback_leaves_its_learner_alone():
    "The loss of tsai's MVP or of CLIP is a method of a callback, which holds the Learner"
    class Lossy(Callback):
        def before_fit(self): self.learn.loss_func,self.calls = self.lf,0
        def lf(self, pred, targ): self.calls += 1; return F.mse_loss(pred, targ)
    learn = make_learner(8, cbs=Lossy())
    learn.model.register_buffer('big', torch.zeros(3))
    learn.lossy.before_fit()
    learn.model.big.add_(1)
    version,x,y = learn.model.big._version,*data(16)
    assert check_loss(learn.loss_func, two((x[:,:1], y), (8, 8)), items=[8, 8]).says == 'same'
    assert learn.lossy.calls == 0 and learn.model.big._version == version

def test_in_place_losses_see_copies():
    pred,targ = logits.clone(),labels.clone()
    check_loss(in_place, two((pred, targ), (8, 8)))
    assert_same(pred, logits)

# What one number for a whole gradient would not show

def contrasts(z): return F.cross_entropy(z@z.T, torch.arange(len(z)))

@pytest.mark.parametrize('weight', [1e-2, 1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize('joined', [False, True])
def test_a_small_head_beside_a_large_loss(joined, weight):
    "In an output or in columns of its own. One that is a mean over samples is exact"
    def loss(of_head):
        def f(pred, targ):
            a,b = pred.split([7, 5], 1) if joined else pred
            return F.mse_loss(a, targ) + weight*of_head(b)
        return f
    pred = torch.cat([values, logits], 1) if joined else (values, logits)
    parts = [(each_tensor(lambda o: o[rows], pred), targets[rows]) for rows in (slice(8), slice(8, 16))]
    assert check_loss(loss(contrasts), parts).says == 'differs'
    assert check_loss(loss(lambda o: o.pow(2).mean()), parts).says == 'same'

@pytest.mark.parametrize('reduction,says', [('sum', 'differs'), ('mean', 'same')])
def test_a_penalty_on_weights(reduction, says):
    "It is not seen in the gradient of the outputs; a sum of micro-batches has it several times"
    w = nn.Parameter(torch.ones(3))
    def loss(pred, targ): return F.mse_loss(pred, targ, reduction=reduction) + .1*w.pow(2).sum()
    loss.reduction = reduction
    assert check_loss(loss, two((values, targets), (8, 8))).says == says

class OwnWeights(nn.MSELoss):
    def __init__(self, f): super().__init__(reduction='none'); self.f = f
    def forward(self, pred, targ): return self.f(super().forward(pred, targ), (targ > 0)+.1)

@pytest.mark.parametrize('f,says', [(lambda o,w: (o*w).sum()/w.sum(), 'differs'), (lambda o,w: (o*w).mean(), 'same'), (lambda o,w: o*w, 'cannot tell')])
def test_no_rule_for_a_loss_that_does_not_average_by_itself(f, says):
    loss_func = OwnWeights(f)
    assert not has_rule(loss_func) and not has_rule(MSELossFlat(reduction='none')) and not has_rule(partial(F.mse_loss, reduction='none'))
    assert check_loss(loss_func, two((values, targets), (8, 8))).says == says

def test_a_rule_of_ones_own_holds_whatever_the_reduction():
    class Own(OwnWeights): pass
    loss_items.register(Own, lambda f, pred, targ: ((targ > 0)+.1).sum())
    loss_func = Own(lambda o,w: (o*w).sum()/w.sum())
    assert has_rule(loss_func) and check_loss(loss_func, two((values, targets), (8, 5))).says == 'same'

def test_a_part_that_is_nan_is_a_difference():
    "The whole is finite"
    def loss(pred, targ): known = targ > .5; return (((pred-targ)**2*known).sum(0)/known.sum(0)).mean()
    found = check_loss(loss, two((values, torch.eye(16)[:,:7]), (8, 8)))
    assert found.says == 'differs' and not math.isfinite(found.by)

# What it costs

class Counting(list):
    "A list that counts how often it is read"
    reads = 0
    def __iter__(self): Counting.reads += 1; return super().__iter__()

def test_many_small_lists_are_not_walked():
    lists = [Counting([1, 2, 3]) for _ in range(30_000)]
    check = LossCheck()
    for _ in range(2): check.add(micro_batch(lambda p,t,lists: F.mse_loss(p, t), (values, targets, lists)), 16)
    assert Counting.reads < 5000 and check.compare() == [] and 'too large' in check.found[0].why

@pytest.mark.parametrize('is_moved', [False, True])
def test_what_a_loss_holds_is_copied_if_it_moves(is_moved, monkeypatch):
    "And only if it is little; the fit's own calls of the loss show what moves"
    class Holds:
        def __init__(self): self.bank = torch.zeros(300_000)
        def __call__(self, pred, targ): self.bank.add_(is_moved) if is_moved else None; return F.mse_loss(pred, targ)
    monkeypatch.setattr(LossCheck, 'most', 1_000_000)
    loss_func,check = Holds(),LossCheck()
    for _ in range(2):
        loss_func(values, targets)
        check.add(micro_batch(loss_func, (values, targets)), 16)
    said = check.compare()
    assert (said == [] and 'too large' in check.found[0].why and check.left == 0) if is_moved else check.judge(*said) is None and check.found[0].says == 'same'

# Outputs

def test_nested_outputs():
    def loss(pred, targ): return F.mse_loss(pred['a'], targ['a']) + F.l1_loss(pred['b'][0], targ['b'])
    parts = [(dict(a=values[o], b=(logits[o],)), dict(a=targets[o], b=probs[o])) for o in (slice(8), slice(8, 13))]
    assert check_loss(loss, parts, items=[8, 5]).says == 'same'
    assert check_loss(loss, parts, items=[1, 5]).says == 'differs'

def chunked(pred, targ): a,b = pred.chunk(2); return ((a-b)**2).mean()
def paired(pred, targ): return ((pred[::2]-pred[1::2])**2).mean()
def nt_xent(pred, targ): return F.cross_entropy(pred@pred.T - 1e3*torch.eye(len(pred)), torch.arange(len(pred)).roll(len(pred)//2))

@pytest.mark.parametrize('loss_func', [chunked, paired, nt_xent, lambda p,t: (p**2).mean()])
def test_several_rows_a_sample(loss_func):
    "Their order is not known, and what compares the rows of a sample may be exact in one order only"
    found = check_loss(loss_func, [(randn(16, 4), labels[:8]),(randn(10, 4), labels[:5])])
    assert found.says == 'cannot tell' and 'first dimension must be the samples' in found.why

@pytest.mark.parametrize('pred,why', [((tensor(1.), tensor(2.)), 'cannot'), ((randn(3, 8), randn(3, 5)), ''), ((torch.zeros(8, 5), torch.zeros(5, 5)*torch.nan), 'NaN')])
def test_what_cannot_be_joined_or_compared(pred, why):
    v = check_loss(lambda p,t: (p**2).mean(), list(zip(pred, (labels[:8], labels[:5]))))
    assert v.says == 'cannot tell' and why in v.why

def test_large_outputs_are_not_kept(monkeypatch):
    monkeypatch.setattr(LossCheck, 'most', 100)
    check = LossCheck()
    for _ in range(2): check.add(micro_batch(F.mse_loss, (values, targets)), 16)
    assert check.micro_batches == check.compare() == [] and 'too large' in check.found[0].why

def test_it_calls_the_loss_four_times():
    "In each of the first 16 windows, whatever their micro-batches"
    class Seen: calls = []  # of the class: what an object holds is put back
    def loss(pred, targ): Seen.calls.append(len(pred)); return F.mse_loss(pred, targ)
    check = LossCheck()
    for _ in range(5): check.add(micro_batch(loss, (values, targets)), 16)
    assert check.judge(*check.compare()) is None and Seen.calls == [80, 80, 40, 40] and check.left == 15

def test_a_loss_of_its_own_precision():
    "A loss that takes float32 only is compared in float32; one that runs under autocast only cannot be"
    def cast(pred, targ, f=.999, needs_autocast=False):
        if pred.dtype != torch.float32 or needs_autocast and not torch.is_autocast_enabled('cpu'): raise TypeError('not in this precision')
        return F.mse_loss(pred*(f if len(pred) > 8 else 1), targ)
    for autocasts in False,True: assert verdict((cast, values, targets), (8, 8), autocasts).says == 'differs'
    for f in .999,.9,1.:
        found = verdict((partial(cast, f=f, needs_autocast=True), values, targets), (8, 8), True)
        assert found.says == 'cannot tell' and 'not in this precision' in found.why

# In a fit

def learner(loss_func, bs, cbs, pred=maps, targ=masks, net=None):
    "A Learner whose model is a convolution, for the losses of masks"
    torch.manual_seed(0)
    ds = list(zip(pred, targ))
    net = net or nn.Conv2d(3, 3, 3, padding=1)
    return Learner(DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds[:4], bs=4)), net, loss_func, opt_func=SGD, cbs=cbs)

def said(learn, n_epoch=2, **kwargs):
    "What the package warns of in a fit"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        fit(learn, n_epoch, .01, **kwargs)
    return [str(o.message) for o in caught if 'fastxtend_accum' in o.filename]

ways = {'micro-batches':lambda: (4, GradientAccumulation(16)), 'pieces':lambda: (16, GradientAccumulation(16, micro_batch_size=4)),
        'ragged pieces':lambda: (16, GradientAccumulation(16, micro_batch_size=6)), 'a schedule':lambda: (4, GradientAccumulationSchedule(4, 16, finish=1.)),
        'float16':lambda: (4, [GradientAccumulation(16), CpuMixedPrecision()]), 'bfloat16':lambda: (4, [GradientAccumulation(16), CpuMixedPrecision(AMPMode.BF16)])}

@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('name', ['CombinedLoss', 'Dice over the batch', 'Tversky, exponent', "wrapped 'sum'", 'wrapped weights'])
def test_a_fit_warns_once(name, way):
    loss_func,pred,targ = inexact[name]
    warned = said(learner(loss_func, *ways[way](), pred, targ))
    assert len(warned) == 1 and 'not exact' in warned[0] and 'GradientCache' in warned[0], warned

@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('name', ['FocalLossFlat', 'DiceLoss', 'MONAI DiceCELoss', 'wrapped cross-entropy'])
def test_a_fit_says_nothing_of_exact_losses(name, way):
    loss_func,pred,targ = exact[name]
    assert said(learner(loss_func, *ways[way](), pred, targ)) == []

@pytest.mark.parametrize('bs,cbs', [(16, lambda: GradientAccumulation(16)), (16, lambda: GradientCache(4)), (16, lambda: [])])
def test_without_accumulation_nothing_is_compared(bs, cbs): assert said(learner(CombinedLoss(), bs, cbs())) == []

def test_num_items_is_checked_too():
    def kept(learn): return learn.y.count_nonzero()
    loss_func,pred,targ = inexact['wrapped ignore_index']
    assert said(learner(loss_func, 4, GradientAccumulation(16, num_items=kept), pred, targ)) == []
    assert len(said(learner(nn.CrossEntropyLoss(), 4, GradientAccumulation(16, num_items=kept), pred, targ))) == 1

@pytest.mark.parametrize('cbs', [[MixUp()], []])
def test_the_fit_is_the_same(cbs, monkeypatch):
    "Weights, losses and random numbers, with the check and without it"
    def run():
        set_seed(3)
        learn = fit(learner(CrossEntropyLossFlat(), 4, [GradientAccumulation(16), *cbs], logits, labels, nn.Sequential(nn.Linear(5, 5), nn.Dropout(.3))), 2)
        return weights(learn),losses(learn),random_states()
    checked = run()
    monkeypatch.setattr(LossCheck, 'windows', 0)
    (w,l,states),(w2,l2,states2) = checked,run()
    assert_same(w, w2)
    assert (l, states) == (l2, states2)

def test_a_fit_after_an_interrupt_compares_its_own():
    learn = learner(CombinedLoss(), 4, GradientAccumulation(16))
    def stop(cb):
        if cb.iter == 1: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): fit(learn, 1, cbs=Callback(after_pred=stop))
    learn.loss_func = CrossEntropyLossFlat(axis=1)
    assert said(learn) == [] and learn.gradient_accumulation.now is None

def test_lr_find_says_nothing():
    "The fit that follows does"
    learn = learner(CombinedLoss(), 4, GradientAccumulation(16))
    with warnings.catch_warnings(record=True) as caught, quiet(learn):
        warnings.simplefilter('always')
        learn.lr_find(num_it=12, show_plot=False)
    assert [o for o in caught if 'not exact' in str(o.message)] == [] and len(said(learn)) == 1

def test_a_loss_inside_the_model_cannot_be_checked():
    class Inside(nn.Module):
        def __init__(self): super().__init__(); self.m = nn.Conv2d(3, 3, 3, padding=1)
        def forward(self, x): out = self.m(x); return dict(loss=out.mean()**2, logits=out)
    warned = said(learner(lambda out,y: out['loss'], 4, GradientAccumulation(16), net=Inside()))
    assert len(warned) == 1 and 'could not check' in warned[0]
    assert said(learner(lambda out,y: out['loss'], 4, GradientAccumulation(16, num_items=lambda learn: 4), net=Inside())) == []
