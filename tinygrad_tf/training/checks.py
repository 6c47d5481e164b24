"""What the doctor looks for in a model and a batch: labels, masks, gradients, layers, modes, ties, tokens, NaN.       (guide 17.3)

Each function performs one test, which its docstring tells, and returns what it measured, or None. See `doctor.check`.
"""
import contextlib
import math
import warnings
from typing import NamedTuple

import numpy as np

from ..anomaly import AnomalyError, AnomalyWarning, detect_anomaly
from ..autograd import IGNORED, no_grad, observing
from ..creation import as_tensor, ones, zeros_like
from ..dtypes import bool_
from ..models import Decoder, EncoderDecoder, MiniGPT
from ..nn import Embedding, Linear
from ..nn.moe import DenseMoE
from ..ops.sdpa import sdpa_backend
from ..optim import AdamW
from .doctor import AGREE, ERROR, NOT_FINITE, PADDING, SHIFTS, STUCK, TARGETS, TOO_LOW, VALID, WORSE, check, host

FEW_ROWS = 4                    # of a batch, where each is computed by itself
FEW_STEPS = 3                   # of an optimizer, after which a layer that can learn shows it
RATES = (1e-3, 1e-4, 1e-5)      # one of them lowers the loss of a batch, if it can be lowered
MANY_STEPS = 12                 # so many at each rate
FALLEN = 0.02                   # by this share of itself the loss has to fall
LEARNT = 0.1                    # of ln V_vocab: below it there is nothing left to fall
LARGEST_SCALE = 1e3             # root mean square of an output; norms keep it near 1, and logits of a trained model below 20
NO_KEY = -1e4                   # a score below it is a mask
UNKNOWN = 0.01                  # share of <unk> from which on a tokenizer does not fit a text
ALIKE = 0.9                     # cosine of two matrices that were one; those of strangers are near 0
ROUND_UP = (8, 16, 32, 64, 128, 256)    # tables of embeddings are often padded to a multiple of one of these


def tolerance(x):
    """By how much equal results may differ, in units of their spread: ten times what rounding in the type of x was seen to do, or more."""
    return {2: 2e-2, 4: 1e-4}.get(x.array.itemsize, 1e-9)


def distance(a, b):
    """max |a − b| / std(a) of arrays, NaN being equal to NaN, and infinitely far from a number; 0 for none."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    spread = float(np.std(a, where=np.isfinite(a))) if np.isfinite(a).any() else 0.0
    return float(np.nan_to_num(np.abs(np.where(same, 0, a - b)), nan=np.inf).max(initial=0)) / (spread or 1.0)


def listed(names, most=3):
    """`a, b, c and 4 more`"""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# --- does it run? -----------------------------------------------------------------------------------------------------

@check("does not run", ERROR, needs=(), explained_by=("tokenizer does not fit",),
       advice="read the error: it names the shapes or the ids that do not fit")
def runs(case):
    """The model raises nothing, evaluated and trained. `CannotLook` passes: that is no fault of it."""
    if case.error is not None:
        return f"{type(case.error).__name__}: {' '.join(str(case.error).split())}"


# --- labels -----------------------------------------------------------------------------------------------------------

@check("shifted labels", STUCK, needs=("targets", "ids", "logits"),
       advice="the target of a token is the one after it: inputs, targets = ids[:, :-1], ids[:, 1:], once, in the data or in the model")
def labels(case):
    """targets[t] = ids[t + k], and a model that shifts by itself compares logits[t] with targets[t + m]: k + m has to be 1."""
    agreements = {shift: case.agreement(shift) or 0.0 for shift in SHIFTS}
    best, own = max(agreements, key=agreements.get), _shift_of_the_model(case)
    if agreements[best] < AGREE or agreements.get(1 - own, 0.0) >= AGREE:
        return None
    what = {0: "the token itself, which it need only copy", 1: "the next token"}.get(best + own)
    what = what or (f"the token {best + own} places ahead" if best + own > 0 else f"a token {-best - own} places back, which it has read")
    return (f"{agreements[best]:.0%} of the targets are the id {best:+d} places from theirs, {agreements[1]:.0%} the one at +1"
            f"{f'; the model shifts by {own:+d} more' if own else ''}: it learns to say {what}")


def _shift_of_the_model(case):
    """m, where the model's own loss is that of logits[t] against targets[t + m]; 0 where it is none of these."""
    if case.loss is None or not case.targets.shape == case.ids.shape == case.logits.shape[:-1]:
        return 0
    logits, targets = host(case.logits).astype(np.float64), host(case.targets)
    losses = {m: _cross_entropy(logits[:, :logits.shape[1] - m], targets[:, m:]) for m in (0, 1, 2) if logits.shape[1] > m}
    return next((m for m, loss in losses.items() if math.isclose(loss, case.loss, rel_tol=1e-5)), 0)


def _cross_entropy(logits, targets):
    """Mean of ln Σ e^z − z[target] over the targets that count; NaN where none does.    logits: [B, T, V_vocab]"""
    counted = targets != IGNORED
    if not counted.any() or targets.max() >= logits.shape[-1]:
        return math.nan
    z, y = logits[counted], targets[counted]
    top = z.max(-1)
    return float((np.log(np.exp(z - top[:, None]).sum(-1)) + top - z[np.arange(len(y)), y]).mean())


@check("padding in the loss", PADDING, needs=("targets", "padded"), of_model=False,
       advice="targets are −100 (ignore_index) wherever the input or the target is padding: data.make_lm_batch makes them so")
def padding_counts(case):
    """No target counts at a place of padding, and none that counts is the pad_id of the tokenizer."""
    if case.targets.shape != case.ids.shape:
        return None
    targets = host(case.targets)
    counted = targets != IGNORED
    at_padding = counted & (case.texts < 0)
    pad = getattr(case.tokenizer, "pad_id", None)
    is_padding = counted & (targets == pad) if pad is not None and pad != case.tokenizer.eos_id else np.zeros_like(counted)
    if (wrong := at_padding | is_padding).any():
        return f"{wrong.sum()} of the {counted.sum()} targets that count stand at padding, or are padding"


# --- who sees whom --------------------------------------------------------------------------------------------------------

@check("leak of future tokens", TOO_LOW, needs=("is_language_model",),
       advice="a token may attend j ≤ i alone: pass causal=True, and look for a mask that is transposed, or off by one")
def leak(case):
    """logits[≤ t] stay as they are when ids[> t] become others."""
    rows = np.argsort((case.texts < 0).sum(1), kind="stable")[:FEW_ROWS]                        # those with the least padding
    some, T, real = _rows(case, rows), case.ids.shape[1], case.texts[rows] >= 0
    ids, logits, found = host(some[case.ids_name]), host(case.run(**some)[0]), [(0.0, 0)]
    for t in sorted({0, T // 4, T // 2, 3 * T // 4, T - 2} & set(range(T - 1))):
        other = np.where(np.arange(T) > t, (ids + 1) % logits.shape[-1], ids)
        changed, past = host(case.run(**{**some, **_as_ids(case, case.ids_name, other)})[0]), real & (np.arange(T) <= t)
        found.append((distance(logits[past], changed[past]), t))
    by, t = max(found)
    if by > tolerance(case.logits):
        return f"with other tokens after place {t}, logits at or before it change by {by:.2g} of their spread"


def _as_ids(case, name, ids):
    return {name: as_tensor(ids, device=case.arguments[name].device)}


def _rows(case, index):
    """All arguments, for some rows of the batch alone. Targets, on which logits do not depend, are class 0: one that counts at least."""
    some = {name: x[index] if _has_rows(case, name, x) else x for name, x in case.arguments.items()}
    return some | {name: zeros_like(some[name]) for name in TARGETS if some.get(name) is not None}


def _has_rows(case, name, x):
    """Whether the first axis of an argument is that of the batch, and not one of tokens: position_ids [T], allowed [T, T]."""
    return x is not None and x.ndim > {"position_ids": 1, "allowed": 2}.get(name, 0) and len(x) == len(case.ids)


@check("all-masked row", NOT_FINITE, needs=("ids",),
       advice="leave rows without a real token out; each real query needs a key, at least itself; where there is none, give zeros "
              "(nn.functional.attention does), not softmax of −∞")
def all_masked(case):
    """Each row has a real token; in each attention each real query has a key whose score is no mask, and nobody a softmax of −∞."""
    if (empty := np.flatnonzero((case.texts < 0).all(1))).size and case.texts.size:
        return f"row {listed(map(str, empty))} of {len(case.ids)} has no real token"
    if case.logits is not None and (at := dict.fromkeys(_without_keys(case))):
        return f"{listed(at)}: all keys of a query are blocked"


def _without_keys(case):
    """Of the first rows of the batch, each softmax and each attention in which a query has no key."""
    found = []

    def observe(node, args, out):
        place = {"Softmax": 0, "Attention": 3, "AttentionWeights": 2}.get(node.name)
        if place is None or getattr(args[place], "ndim", 0) < 2:
            return
        scores = host(args[place])
        makes_nan = node.name == "Softmax" and (scores == -math.inf).all(-1).any()
        if makes_nan or _is_real(case, (scores <= NO_KEY).all(-1)):
            found.append(f"{node.name} of scores {list(scores.shape)}{', which becomes NaN' if makes_nan else ''}")
    with observing(observe, alone=True), sdpa_backend("dense"):
        case.run(**_rows(case, slice(FEW_ROWS)))
    return found


def _is_real(case, rows):
    """Whether one of these queries [B, …, Tq] is a real token. Who has Tq = 1 speaks for all queries of the row."""
    rows = rows[None] if rows.ndim == 1 else rows
    rows = rows.all(axis=tuple(range(1, rows.ndim - 1)))                                        # of all heads; [B, Tq]
    for real in case.real.values():
        if rows.shape[1] == real.shape[1]:
            rows = rows & real[:FEW_ROWS]
    return bool(rows.any())


@check("padding is read", PADDING, needs=("padded", "logits"), explained_by=("train/eval mode",),
       advice="pass valid_tokens (True = a real token) to every attention, as a mask of keys [B, 1, 1, Tk]; count positions from the "
              "first real token; tell the texts of packed rows apart with segment_ids")
def padding_is_read(case):
    """Logits of real tokens stay when padding becomes other ids, and are those of their text alone, without padding."""
    logits, limit = host(case.logits), tolerance(case.logits)
    for name, real in case.real.items():
        ids = host(case.arguments[name])
        changed = _as_ids(case, name, np.where(real, ids, (ids + 1) % max(int(ids.max(initial=0)), 2)))
        if (by := distance(_of_real(case, logits), _of_real(case, host(case.run(**changed)[0])))) > limit:
            return f"with other ids at the padding of {name}, logits of real tokens change by {by:.2g} of their spread"
    by, where = max(((distance(a, b), where) for where, a, b in _alone(case, logits)), default=(0.0, ""))
    if by > limit:
        return f"{where}: the logits in the batch and those of the text alone differ by {by:.2g} of their spread"


def _of_real(case, logits):
    """The logits of real tokens; of rows with some, where logits stand at rows."""
    real = case.texts >= 0
    return logits[real] if logits.shape[:2] == real.shape else logits[real.any(1)]


def _alone(case, logits):
    """(where, logits in the batch, logits of the text by itself) for some texts, those of the rows with the most padding first."""
    some = np.argsort(-(case.texts < 0).sum(1), kind="stable")[:FEW_ROWS]
    texts = [(r, text) for r in some for text in np.unique(case.texts[r]) if text >= 0]
    for row, text in texts[:2 * FEW_ROWS]:
        places = np.flatnonzero(case.texts[row] == text)
        together = logits[row, places] if logits.shape[:2] == case.texts.shape else logits[row]
        yield f"row {row}, places {places[0]} to {places[-1]}", together, host(case.run(**_text(case, row, places))[0])[0]


def _text(case, row, places):
    """The arguments for one text of a row: its ids, all of them real, at the positions that the model counts by itself."""
    arguments = {**_rows(case, slice(row, row + 1)), "position_ids": None, "segment_ids": None}
    kept = {name: np.flatnonzero(real[row]) for name, real in case.real.items()} | {case.ids_name: places}
    for name, where in kept.items():
        arguments.update(_as_ids(case, name, host(case.arguments[name])[row:row + 1, where]))
    for name in TARGETS:
        if arguments.get(name) is not None and case.targets.shape == case.ids.shape:
            arguments[name] = zeros_like(arguments[case.ids_name])
    for name, about in VALID.items():
        if arguments.get(name) is not None:
            arguments[name] = ones(*arguments[about or case.ids_name].shape, dtype=bool_, device=case.ids.device)
    return arguments


# --- numbers ------------------------------------------------------------------------------------------------------------------

@check("NaN or infinity", NOT_FINITE, needs=("logits",), explained_by=("all-masked row", "exploding layer"),
       advice="a division by 0, a logarithm or root of 0, float16 beyond 65504, or a rate that is too high; "
              "autograd.detect_anomaly() stops where it first happens")
def not_finite(case):
    """Weights, loss and gradients are numbers; else the operation that anomaly mode names, forward or backward."""
    if bad := [name for name, p in case.model.named_parameters() if not np.isfinite(host(p)).all()]:
        return f"{listed(bad)}: the weights hold NaN or infinity"
    bad = [name for name, g in (case.gradients or {}).items() if g is not None and not np.isfinite(host(g)).all()]
    if case.loss is not None and not math.isfinite(case.loss) or np.isnan(host(case.logits)).any():
        return f"the loss is {'not there' if case.loss is None else case.loss}; {_origin(case)}"
    if bad:
        return f"the loss is {case.loss:.4g}, and the gradients of {listed(bad)} hold NaN or infinity; {_origin(case)}"


def _origin(case):
    """What anomaly mode tells of a pass forward and backward: the first infinity, and the first NaN."""
    with warnings.catch_warnings(record=True) as told, detect_anomaly():
        warnings.simplefilter("always", AnomalyWarning)
        try:
            loss = case.run(case.copy(training=True))[1]
            said = [] if loss is None or not loss.requires_grad else loss.backward() or []
        except AnomalyError as error:
            said = [str(error)]
    said = [str(one.message) for one in told if issubclass(one.category, AnomalyWarning)] + said
    said = dict.fromkeys([*said[:1], *[one for one in said if "NaN of" in one or "nan values" in one][:1]])
    return "; ".join(said) or "no operation makes it of numbers: the batch holds it"


# --- gradients --------------------------------------------------------------------------------------------------------------

@check("no gradient", STUCK, needs=("loss",),
       explained_by=("dead layer", "exploding layer", "NaN or infinity", "does not run", "all-masked row", "untied weights"),
       advice="requires_grad=True, and no .detach(), .data, .item() or no_grad() on the way from the parameter to the loss")
def no_gradient(case):
    """Each parameter gets a gradient, and not one of zeros throughout, at first and after a few steps."""
    named = dict(case.model.named_parameters())
    if case.gradients is None:
        yield f"the loss has no graph: none of the {len(named)} parameters gets a gradient"
        return
    frozen = [name for name, p in named.items() if not p.requires_grad]
    without = [name for name, g in case.gradients.items() if g is None and name not in frozen]
    zero = _always_zero(case) if case.ids is None or case.ids.shape[1] > 1 else []      # a single token attends itself, whatever q is
    if frozen:
        yield f"{listed(frozen)}: requires_grad is False"
    if without:
        yield f"{listed(without)}: not reached by backward"
    if zero:
        yield f"{listed(zero)}: the gradient is 0 throughout, also after {FEW_STEPS} steps"


def _always_zero(case):
    """Parameters with a gradient of zeros, at first and after a few steps: what starts from zeros moves. Experts may be without tokens."""
    idle = {id(p) for m in case.model.modules() if isinstance(m, DenseMoE) for p in m.experts.parameters()}
    zero = [name for name, g in case.gradients.items() if g is not None and not host(g).any()]
    if not zero:
        return []
    model = stepped(case)
    case.run(model)[1].backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and host(p.grad).any()}
    return [name for name, p in case.model.named_parameters() if name in zero and name not in moved and id(p) not in idle]


@check("not in the optimizer", STUCK, needs=("optimizer",), explained_by=("untied weights",),
       advice="make the optimizer of model.parameters(), after the model is complete: layers that are replaced later are not in it")
def not_in_the_optimizer(case):
    """The parameters of the optimizer are those of the model."""
    known = {id(p) for group in case.optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in case.model.named_parameters() if p.requires_grad and id(p) not in known]
    strangers = len(known - {id(p) for p in case.model.parameters()})
    if missing:
        return (f"{listed(missing)}: in no group of the optimizer"
                + (f", which holds {strangers} tensors that are not the model's" if strangers else ""))


def stepped(case, steps=FEW_STEPS, lr=RATES[0]):
    """A copy in training mode after a few steps of AdamW on the batch, without gradients."""
    model = learner(case)
    for _ in descent(case, model, steps, lr):
        pass
    return model


def learner(case):
    """A copy in training mode, its weights at least float32: those of 16 bits are too coarse for AdamW, whose eps is 0 there."""
    model = case.copy(training=True)
    return model.float() if any(p.array.itemsize < 4 for p in model.parameters()) else model


def descent(case, model, steps, lr):
    """Takes steps of AdamW on the batch; yields the loss before each."""
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = case.run(model)[1]
        loss.backward()
        optimizer.step()
        yield loss.item()
    optimizer.zero_grad()


@check("does not learn", STUCK, needs=("gradients", "loss", "logits"),
       explained_by=("no gradient", "NaN or infinity", "dead layer", "exploding layer", "does not run", "softmax before the loss",
                     "all-masked row", "shifted labels"),
       advice="the gradient does not point where the loss falls: check hand-written backwards with gradcheck, and the sign of the loss")
def does_not_learn(case):
    """Some steps of AdamW, at one of three rates, lower the loss of this very batch. At ln V_vocab is every model at first."""
    if case.loss < LEARNT * (know_nothing := math.log(max(case.logits.shape[-1], 2))):
        return None
    ends = {}
    for lr in RATES:
        model = learner(case)
        for _ in descent(case, model, MANY_STEPS, lr):
            if (now := _evaluated(case, model)) < case.loss * (1 - FALLEN):
                return None
        ends[lr] = now
    tried = ", ".join(f"{loss:.3f} at {lr:g}" for lr, loss in ends.items())
    return (f"the loss of this batch is {case.loss:.3f}, ln V_vocab is {know_nothing:.3f}; after {MANY_STEPS} steps of AdamW on this batch "
            f"alone it is {tried}")


def _evaluated(case, model):
    """The loss of the batch, in evaluation mode."""
    model.eval()
    with no_grad():
        loss = case.run(model)[1].item()
    model.train()
    return loss


@check("softmax before the loss", STUCK, needs=("loss", "logits"),
       advice="cross_entropy takes logits, and computes the softmax itself: remove the softmax (or log_softmax) at the end of the model")
def probabilities(case):
    """Logits are no probabilities: not all rows are positive and sum to 1."""
    p, V = host(case.logits).astype(np.float64), case.logits.shape[-1]
    if V < 2 or not p.size or not np.isfinite(p).all():
        return None
    if (p >= 0).all() and np.abs(p.sum(-1) - 1).max() < 1e-3:
        return f"all {p[..., 0].size} rows of logits are positive and sum to 1; of such the loss cannot fall below " \
               f"{math.log(math.e + V - 1) - 1:.3f}, and ln V_vocab is {math.log(V):.3f}"


# --- layers -----------------------------------------------------------------------------------------------------------------

class Layer(NamedTuple):
    """What came in and what went out of a module: root mean squares, and how much the output differs from place to place."""
    name: str
    kind: str
    scale_in: float
    scale: float
    varies_in: bool
    varies: bool


def layers(case, model):
    """A `Layer` for each call of a module without children, and of each block: what is in a list. In the order of the pass."""
    found, handles = [], []
    for name, module in model.named_modules():
        if name and (not module._modules or name.rpartition(".")[2].isdigit()):
            handles.append(module.register_forward_hook(_noting(name, found)))
    try:
        with no_grad():
            case.run(model)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _noting(name, found):
    def hook(module, args, out):
        out = out[0] if isinstance(out, tuple) else out
        x = next((a for a in args if hasattr(a, "array")), None)
        if x is not None and hasattr(out, "array") and out.ndim > 1 and out.array.dtype.kind in "fV" and out.numel():
            x, out = host(x).astype(np.float64), host(out).astype(np.float64)
            found.append(Layer(name, type(module).__name__, _scale(x), _scale(out), _varies(x), _varies(out)))
    return hook


def _scale(x):
    return float(np.sqrt(np.square(x).mean()))


def _varies(x):
    """Whether the rows of x […, n] differ by more than rounding."""
    rows = x.reshape(-1, x.shape[-1])
    return bool((np.ptp(rows, axis=0) > 1e-6 * max(_scale(x), 1e-30)).any())


@check("exploding layer", NOT_FINITE, needs=("logits",),
       advice="look at the first weights of this layer and at what comes before it; norm_first=True, a smaller rate, a longer warm-up and "
              "clipping keep scales bounded")
def exploding(case):
    """The root mean square of each output is below 1000: norms keep it near 1, and a residual path adds a little in each block.

    And so is the norm of each gradient, per nat of the loss.
    """
    large = [layer for layer in layers(case, case.copy()) if LARGEST_SCALE < layer.scale < math.inf]
    if large:
        first, worst = large[0], max(large, key=lambda layer: layer.scale)
        return (f"{first.name} ({first.kind}) makes outputs of {first.scale:.3g} of inputs of {first.scale_in:.3g}"
                + (f"; the largest are {worst.scale:.3g}, in {worst.name}" if worst is not first else ""))
    norms = {name: float(np.linalg.norm(host(g).astype(np.float64))) for name, g in (case.gradients or {}).items() if g is not None}
    worst = max((name for name in norms if math.isfinite(norms[name])), key=norms.get, default=None)
    if worst and norms[worst] > LARGEST_SCALE * max(abs(case.loss), 1):
        return f"the outputs are of ordinary size, but the gradient of {worst} has the norm {norms[worst]:.3g}; the loss is {case.loss:.3g}"


@check("dead layer", STUCK, needs=("logits", "gradients"), explained_by=("NaN or infinity", "exploding layer", "all-masked row"),
       advice="its units are saturated, or its weights are 0: start it anew, with a smaller bias, a smaller rate, or GELU in place of ReLU")
def dead(case):
    """Outputs differ from place to place where inputs do, if not at first then after a few steps."""
    still = {layer.name for layer in layers(case, case.copy()) if layer.varies_in and not layer.varies}
    if still:
        after = {layer.name: layer for layer in layers(case, stepped(case).eval())}
        still = [name for name in after if name in still and not after[name].varies]
    if still:
        layer = after[still[0]]
        return (f"{listed(f'{name} ({after[name].kind})' for name in still)}: the output is {'0' if layer.scale == 0 else 'the same'} at "
                f"all places, also after {FEW_STEPS} steps")


# --- modes, ties, tokens ------------------------------------------------------------------------------------------------------

@check("train/eval mode", WORSE, needs=("logits",), explained_by=("NaN or infinity",),
       advice="model.train() before each step, model.eval() before evaluation and generation; dropout reads self.training "
              "(F.dropout acts always, unless it is told)")
def modes(case):
    """Evaluation draws nothing; all modules are in one mode, that of what the model is said to do. Where the mode matters."""
    if (by := _by_another_seed(case)) > tolerance(case.logits):
        yield f"in evaluation mode two passes with different random numbers differ by {by:.2g} of the spread: dropout is active"
        return
    said = case.trains
    odd = [name for name, m in case.model.named_modules() if name and m.training != case.model.training]
    if odd and _mode_matters(case, case.model.training, odd):
        yield f"{listed(odd)}: training={not case.model.training}, and the model has training={case.model.training}"
    elif said is not None and case.model.training != said and _mode_matters(case, said):
        yield f"it is said to {'train' if said else 'be evaluated'}, and has training={case.model.training}"


def _by_another_seed(case):
    seed, case.seed = case.seed, case.seed ^ 1
    try:
        return distance(host(case.logits), host(case.run()[0]))
    finally:
        case.seed = seed


def _mode_matters(case, mode, odd=None):
    """Whether the outputs differ between the mode and the other one, of the whole model or of some modules."""
    one, other = case.copy(training=mode), case.copy(training=mode if odd else not mode)
    for name in odd or ():
        other.get_submodule(name).training = not mode
    with no_grad():
        a, b = (host(case.run(model)[0]) for model in (one, other))
    return distance(a, b) > tolerance(case.logits)


@check("untied weights", WORSE, needs=(),
       advice="tie them again: model.lm_head.weight = model.embedding.token.weight; load with load_state_dict, which keeps ties, and make "
              "the optimizer afterwards")
def untied(case):
    """A head and an embedding of one shape are one Parameter, or strangers; in our language models they are one."""
    tables = {f"{name}.weight": m.weight for name, m in case.model.named_modules() if isinstance(m, Embedding)}
    heads = {f"{name}.weight": m.weight for name, m in case.model.named_modules() if isinstance(m, Linear)}
    for head, w in heads.items():
        others = {name: table for name, table in tables.items() if table.shape == w.shape}
        if any(table is w for table in others.values()):
            continue
        for name, table in others.items():
            by_design = isinstance(case.model, (MiniGPT, Decoder, EncoderDecoder)) and head == "lm_head.weight"
            if (cosine := _cosine(host(w), host(table))) > ALIKE or by_design:
                yield f"{head} and {name} are two parameters of shape {list(w.shape)}, and their cosine is {cosine:.3f}"
                break


def _cosine(a, b):
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-30))


@check("tokenizer does not fit", WORSE, needs=("tokenizer",),
       advice="use the tokenizer that the model was trained with (its fingerprint is in the checkpoint), for training, evaluation and "
              "generation alike")
def tokenizer(case):
    """V_vocab is the embedding's number of rows, or that rounded up; ids are below it; <unk> is rare; decode(encode(text)) = text."""
    V, rows = case.tokenizer.vocab_size, _rows_of_the_table(case)
    if rows is not None and rows not in {V, *(-(-V // m) * m for m in ROUND_UP)}:
        yield f"it has {V} tokens, and the model's embedding {rows} rows"
    for name, ids in _known_ids(case):
        if ids.size and not 0 <= ids.min() <= ids.max() < V:
            yield f"{name} has ids from {ids.min()} to {ids.max()}, and the tokenizer {V} tokens"
        elif (share := _share(ids, case.tokenizer.unk_id)) > UNKNOWN:
            yield f"{share:.1%} of {name} is unknown to it"
    for name in ("train_text", "validation_text"):
        if (text := getattr(case, name)) is not None:
            yield from _of_text(case, name, text[:100_000])


def _rows_of_the_table(case):
    """How many rows the table has in which the model looks ids up: told by ids that no positions are like, 1, 0, 1, …; or None."""
    if case.ids is None:
        return None
    found, marks = [], (np.arange(case.ids.numel()) + 1).reshape(case.ids.shape) % 2

    def observe(node, args, out):
        if node.name == "Embedding" and args[0].shape == marks.shape and (host(args[0]) == marks).all():
            found.append(len(args[1]))
    with observing(observe, alone=True), contextlib.suppress(Exception):            # the model may be broken behind the table
        case.run(**_as_ids(case, case.ids_name, marks))
    return found[0] if found else None


def _known_ids(case):
    if case.ids is not None:
        yield "the batch", host(case.ids)[case.texts >= 0]
    for name in ("train_ids", "validation_ids"):
        if getattr(case, name) is not None:
            yield name, np.asarray(getattr(case, name)[:1_000_000])


def _share(ids, unknown):
    return 0.0 if unknown is None or not ids.size else float((ids == unknown).mean())


def _of_text(case, name, text):
    ids = case.tokenizer.encode(text)
    if (share := _share(ids, case.tokenizer.unk_id)) > UNKNOWN:
        yield f"{share:.1%} of the tokens of {name} are unknown to it"
    elif not share and getattr(case.tokenizer, "kind", None) != "wordpiece" and (back := case.tokenizer.decode(ids)) != text:
        place = next((i for i, (a, b) in enumerate(zip(text, back)) if a != b), min(len(text), len(back)))
        was, became = (s[place:place + 12] for s in (text, back))
        yield f"decode(encode({name})) is another text from character {place} on: {was!r} became {became!r}"
