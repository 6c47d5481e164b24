"""Who is to blame for an answer: tokens that are replaced, and attention weights times their gradient. Weights alone say who was read."""
from contextlib import ExitStack, contextmanager
from numbers import Integral

import numpy as np

from ..arguments import require_tensors
from ..autograd import enable_grad, observing
from ..generation.inference import all_modules, inference
from ..ops.sdpa import sdpa_backend
from ..ops.shape import cat
from ..tensor import Tensor
from .capture import first, host, one_axis, pattern
from .points import attentions


def log_probability(target, position=-1):
    """score(output) = ln p(target) of each row, at `position` where there is one.    logits: [B, T, V_vocab] or [B, classes] → [B]"""
    if not isinstance(target, Integral) or target < 0:
        raise ValueError(f"log_probability: target must be the id of a token or a class, got {target!r}")

    def score(output):
        logits = output[0] if isinstance(output, tuple) else output
        logits = logits[:, position] if logits.ndim == 3 else logits
        return logits.float().log_softmax(-1)[:, target]
    return score


def occlusion(model, ids, score, replacements, batch_size=32, **kwargs):
    """Σ_r (score(ids) − score(ids with token t replaced by r)) / R for each t: how much the answer needs it.    ids: [1, T] → float64 [T]

    score: a function of the model's output that has a number for each row, as `log_probability` makes it. replacements: the ids that are
    tried in turn, as far as they differ from what stands there: several that are likely there, for one may happen to say the same, or to
    be a surprise by itself. NaN where none differs. kwargs, for one row, are given to the model for each. ValueError for other shapes.
    """
    require_tensors("occlusion", ids=ids)
    if ids.ndim != 2 or ids.shape[0] != 1:
        raise ValueError(f"occlusion: ids must be one text, [1, T], got {list(ids.shape)}; take texts[i:i + 1]")
    here = host(ids.array)[0].tolist()
    changes = [(t, int(r)) for t in range(len(here)) for r in replacements if int(r) != here[t]]
    with inference(model):
        whole = _scores(model, [ids], score, kwargs)[0]
        rows = [_with(ids, t, r) for t, r in changes]
        found = np.concatenate([np.zeros(0), *(_scores(model, rows[i:i + batch_size], score, kwargs)
                                               for i in range(0, len(rows), batch_size))])
    drops, at = whole - found, np.array([t for t, _ in changes], dtype=int)
    return np.array([drops[at == t].mean() if (at == t).any() else np.nan for t in range(len(here))])


def _with(ids, t, token):
    changed = ids.clone()
    changed[0, t] = token
    return changed


def _scores(model, rows, score, kwargs):
    """The score of each of some texts [1, T], in one batch."""
    repeated = {name: x.expand(len(rows), *x.shape[1:]) if hasattr(x, "expand") and x.ndim > 1 else x for name, x in kwargs.items()}
    found = score(model(cat(rows, dim=0), **repeated))
    if found.ndim != 1 or found.shape[0] != len(rows):
        raise ValueError(f"occlusion: score must return one number for each of {len(rows)} rows, got shape {list(found.shape)}")
    return host(found.detach().double().array)


def attention_gradient(model, *inputs, score, **kwargs):
    """{"blocks.0.attn": A ⊙ ∂score/∂A, …}, arrays [B, H, Tq, Tk] on the host: to first order, what each weight adds to the score.

    ∂score/∂A = dO Vᵀ, since O = A V: no weight needs to be in the graph. score: a function of the model's output, whose sum is taken.
    In evaluation mode; the model's own gradients and flags are left as they were. It asks for a bit more of a weight, not for another
    token, and where p is nearly 1 nothing moves ln p: take a difference of logits. ValueError with `checkpoint_blocks`: there is no graph.
    """
    if any(getattr(module, "checkpoint_blocks", False) for module in all_modules(model)):
        raise ValueError("attention_gradient: with checkpoint_blocks there is no graph to look at; set it to False for this call")
    seen, current = {}, []
    with inference(model), enable_grad(), ExitStack() as stack:
        stack.enter_context(_frozen(model))
        stack.enter_context(sdpa_backend("dense"))
        for name, attention in attentions(model).items():
            stack.enter_context(attention.register_forward_pre_hook(_begin(name, current), with_kwargs=True))

        def observe(node, args, out):
            if node.name == "Attention":
                out.retain_grad()
                seen[current[-1]] = args, out
        with observing(observe):
            total = score(model(*inputs, **kwargs)).sum()
        total.backward()
    return {name: _weighted(*found) for name, found in seen.items()}


def _begin(name, current):
    def hook(module, args, kwargs):
        """The name of the attention that runs; and its input is where the graph begins, if no parameter began it."""
        current.append(name)
        x = first(args, kwargs)
        if x.requires_grad:
            return None
        x = x.detach().requires_grad_()
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "x": x})
    return hook


@contextmanager
def _frozen(model):
    """Within it no parameter gets a gradient; then each gets back its flag."""
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in trained:
            p.requires_grad_(False)
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


def _weighted(args, out):
    """A ⊙ dO Vᵀ of one attention, 0 where the score does not depend on it.    [B, H, Tq, Tk]"""
    q, k, v, bias, _, scale = (x.array if isinstance(x, Tensor) else x for x in args)
    A = pattern(q, k, bias, scale)
    return host(A * (0 if out.grad is None else one_axis(out.grad.array @ v.swapaxes(-1, -2))))
