"""Mixture of experts: E feed-forward networks, of which each token passes k, chosen by a router.       (guide 11.1)

`DenseMoE` lets every expert compute every token and multiplies most of it by 0: to read. `MoE` is the same function, and
computes only what was routed: to use. What a router decided is a `Routing`; `routings()` collects those of a whole model.
"""
import contextlib
import math
import numbers
import threading
from typing import NamedTuple

import numpy as np

from ..arguments import described, require_bools, require_tensors, whole_number
from ..autograd import FLOAT32, constant, no_grad, under_autocast
from ..creation import as_tensor, empty, randn_like, zeros, zeros_like
from ..dtypes import bool_
from ..ops.moe import Plan, combine, dispatch, grouped_linear, plan_dispatch
from ..ops.shape import stack
from ..tensor import Tensor
from . import functional as F
from . import init
from .blocks import feed_forward
from .containers import ModuleList
from .feedforward import GatedFeedForward
from .module import Module, Parameter

# --- what was decided -----------------------------------------------------------------------------------------------

class Routing(NamedTuple):
    """What a router decided about tokens of shape […], and who computes them.

    logits   [..., E]   r, at least float32; with the noise, where there was some
    experts  [..., k]   ids of the chosen, best first; among equals the lower id
    weights  [..., k]   what their outputs are multiplied by
    plan                `ops.moe.Plan`: rows of each expert, and which pairs (token, rank) have none
    valid_tokens [...]  or None, where all are real
    """
    logits: Tensor
    experts: Tensor
    weights: Tensor
    plan: Plan
    valid_tokens: Tensor | None

    @property
    def load(self):
        """[E]: the share of the pairs that chose each expert, dropped or not; NumPy."""
        return np.array(self.plan.wanted) / max(sum(self.plan.wanted), 1)

    @property
    def max_load(self):
        """The load of the fullest expert in units of its fair share: 1 at balance, E / k where all tokens choose the same k."""
        return float(self._shares.max())

    @property
    def _shares(self):
        """E · load: exactly 1 for who has exactly the fair share."""
        return len(self.plan.wanted) * np.array(self.plan.wanted) / max(sum(self.plan.wanted), 1)

    @property
    def num_dropped(self):
        """Pairs whose expert was full."""
        return sum(self.plan.wanted) - sum(self.plan.counts)

    @property
    def dropped(self):
        """[..., k]: True where the expert was full, so that the token goes without it."""
        without = constant(self.plan.places == len(self.plan.pairs)).reshape(self.experts.shape)
        return without if self.valid_tokens is None else without & self.valid_tokens.unsqueeze(-1)

    def balance_loss(self):
        """1 + s · Σ_i (E f_i − 1) P_i,   f_i: share of the pairs that chose i,  P_i: mean of softmax(r)_i,  s = k (E − 1) / (E − k)

        1 at balance, E where all tokens choose the same k. For k = 1 it is E · Σ f_i P_i (Switch, arXiv 2101.03961); for more, that
        would end at E / k, and s stretches it. f is counted, so the gradient flows through P: down where f_i > 1 / E.
        """
        E, k = self.logits.shape[-1], self.experts.shape[-1]
        if k == E:                                                      # all choose all
            return 1 + 0 * self._mean(F.softmax(self.logits, dim=-1)).sum()
        excess = as_tensor(self._shares - 1, dtype=self.logits.dtype, device=self.logits.device)
        return 1 + k * (E - 1) / (E - k) * (excess * self._mean(F.softmax(self.logits, dim=-1))).sum()

    def z_loss(self):
        """mean (ln Σ_i e^(r_i))²: keeps logits small, where float32 is fine enough for softmax       (ST-MoE, arXiv 2202.08906)"""
        return self._mean(self.logits.logsumexp(dim=-1, keepdim=True).square()).sum()

    def _mean(self, values):
        """The mean over the real tokens of values [..., m]; 0 where there is none.    [m]"""
        if self.valid_tokens is not None:
            values = values.masked_fill(~self.valid_tokens.unsqueeze(-1), 0.0)
        tokens = sum(self.plan.wanted) // self.experts.shape[-1]
        return values.reshape(-1, values.shape[-1]).sum(dim=0) / max(tokens, 1)


_open = threading.local()
_counting = threading.Lock()            # shards of a batch count in the same layer


@contextlib.contextmanager
def routings():
    """Inside, this thread's mixtures add what they decide to the list that is yielded. The layers themselves keep no graph.

        with nn.moe.routings() as routed:
            logits, loss = model(ids, targets)
        loss = loss + 0.01 * sum(r.balance_loss() for r in routed)
    """
    before, routed = getattr(_open, "lists", ()), []
    _open.lists = (*before, routed)
    try:
        yield routed
    finally:
        _open.lists = before


def is_collecting():
    """Whether this thread is within `routings`."""
    return bool(getattr(_open, "lists", ()))


# --- the router -----------------------------------------------------------------------------------------------------

def _softmax_of_chosen(r, experts):
    return F.softmax(r.gather(-1, experts), dim=-1)


def _chosen_of_softmax(r, experts):
    return F.softmax(r, dim=-1).gather(-1, experts)


def _renormalized(r, experts):
    g = _chosen_of_softmax(r, experts)
    return g / g.sum(dim=-1, keepdim=True).clamp_min(np.finfo(np.float32).tiny)     # a bias may choose those whose softmax is 0


ROUTERS = {"topk_softmax": _softmax_of_chosen, "softmax_topk": _chosen_of_softmax, "softmax_topk_renormalized": _renormalized,
           "noisy_topk": _softmax_of_chosen}


class Router(Module):
    """r = W_r x, the k experts with the largest r, and their weights g.    x: [..., C] → r [..., E], ids and g [..., k]

    topk_softmax                g = softmax of the k chosen r                                                    (guide 11.1)
    softmax_topk                g = the k chosen of softmax(r): a sum below 1, from which the router learns also with k = 1
    softmax_topk_renormalized   the same, divided by its sum: equals topk_softmax
    noisy_topk                  topk_softmax of r + ε · softplus(W_noise x), ε ~ N(0, 1), in training       (arXiv 1701.06538)

    With `bias_rate` the choice is by softmax(r) + expert_bias, and g as without: balance without a loss (arXiv 2408.15664).
    float16 is computed in float32: whom a token goes to should not depend on rounding.
    """

    def __init__(self, dim, num_experts, top_k, kind="topk_softmax", bias_rate=None):
        super().__init__()
        self.num_experts, self.top_k = _checked_sizes(num_experts, top_k)
        if kind not in ROUTERS:
            raise ValueError(f"Router: kind {kind!r} is unknown; there are {', '.join(ROUTERS)}")
        self.kind, self.bias_rate = kind, _positive("bias_rate", bias_rate)
        self.weight = Parameter(empty(num_experts, dim))
        self.register_parameter("noise_weight", Parameter(zeros(num_experts, dim)) if kind == "noisy_topk" else None)
        self.register_buffer("expert_bias", None if bias_rate is None else zeros(num_experts))
        init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    @under_autocast(FLOAT32)
    def forward(self, x):
        x = _at_least_float32(x)
        r = F.linear(x, _at_least_float32(self.weight))
        if self.noise_weight is not None and self.training:
            r = r + F.softplus(F.linear(x, _at_least_float32(self.noise_weight))) * randn_like(r)
        scores = r if self.expert_bias is None else F.softmax(r, dim=-1) + self.expert_bias
        experts = scores.detach().topk(self.top_k, dim=-1)[1]           # gradients flow through the weights, not the choice
        return r, experts, ROUTERS[self.kind](r, experts)

    @no_grad
    def update_bias(self, wanted):
        """expert_bias_i += bias_rate · sign(mean load − load_i): who was chosen too often is chosen less.    wanted: E numbers"""
        wanted = np.asarray(wanted, dtype=np.float64)
        step = self.bias_rate * np.sign(wanted.mean() - wanted)
        self.expert_bias += as_tensor(step, dtype=self.expert_bias.dtype, device=self.expert_bias.device)

    def extra_repr(self):
        return f"num_experts={self.num_experts}, top_k={self.top_k}, kind={self.kind!r}" + (
            "" if self.bias_rate is None else f", bias_rate={self.bias_rate}")


# --- the experts ----------------------------------------------------------------------------------------------------

class GroupedLinear(Module):
    """y = x W_eᵀ + b_e for the rows of each expert e.    x: [N, in], counts[e] rows each  W: [E, out, in]  b: [E, out]"""

    def __init__(self, layers):
        """layers: E `Linear` of one size, whose weights are copied."""
        super().__init__()
        self.weight = Parameter(stack([layer.weight.detach() for layer in layers]))
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.register_parameter("bias", Parameter(stack([b.detach() for b in biases])) if biases else None)

    def forward(self, x, counts):
        return grouped_linear(x, self.weight, self.bias, counts)

    def extra_repr(self):
        E, n, m = self.weight.shape
        return f"num_experts={E}, in_features={m}, out_features={n}, bias={self.bias is not None}"


class Experts(Module):
    """E feed-forward networks of one kind, each for its own rows.    x, y: [N, C], counts[e] rows of expert e, one after the other"""

    def __init__(self, networks):
        """networks: E `FeedForward` or E `GatedFeedForward`, whose weights are copied. ValueError where they are not alike."""
        super().__init__()
        if len({repr(network) for network in networks}) != 1:
            raise ValueError(f"Experts: the networks must be of one kind and size, got {len(networks)}: "
                             f"{', '.join(sorted({repr(network) for network in networks})) or 'none'}")
        first, self.gate_proj = networks[0], None
        if isinstance(first, GatedFeedForward):
            self.gate_proj = GroupedLinear([network.gate_proj for network in networks])
            self.up_proj = GroupedLinear([network.up_proj for network in networks])
            self.down_proj = GroupedLinear([network.down_proj for network in networks])
            self.activation, self.dropout = first.activation, first.dropout
        else:
            self.up_proj = GroupedLinear([network.net[0] for network in networks])
            self.down_proj = GroupedLinear([network.net[3] for network in networks])
            self.activation, self.dropout = first.net[1], first.net[2]

    def forward(self, x, counts):
        h = self.up_proj(x, counts)
        h = self.activation(h) if self.gate_proj is None else self.activation(self.gate_proj(x, counts)) * h
        return self.down_proj(self.dropout(h), counts)


# --- the layer ------------------------------------------------------------------------------------------------------

class _Mixture(Module):
    """What the two forms share: the router, shared experts, and the plan. `mix` is where they differ."""
    routes_tokens = True                        # `TransformerBlock` tells such a network which tokens are real

    def __init__(self, dim, hidden_dim, num_experts=4, top_k=2, *, ffn="swiglu", bias=False, dropout=0.0, router="topk_softmax",
                 capacity_factor=None, shared_experts=0, bias_rate=None):
        super().__init__()
        self.capacity_factor = _positive("capacity_factor", capacity_factor)
        self.router = Router(dim, num_experts, top_k, router, bias_rate)

        def networks(how_many):
            return [feed_forward(ffn, dim, hidden_dim, dropout, bias) for _ in range(how_many)]
        self.experts = self._gathered(networks(num_experts))
        self.shared = ModuleList(networks(whole_number("MoE", "shared_experts", shared_experts, least=0)))
        self._wanted = np.zeros(num_experts)

    def forward(self, x, valid_tokens=None, return_routing=False):
        """y: […, C], or (y, `Routing`) if return_routing.    x: […, C], valid_tokens […]: the others are not routed and not counted"""
        require_bools("MoE", return_routing=return_routing)
        valid_tokens = _checked_tokens(x, valid_tokens)
        routing = self._route(x, valid_tokens)
        rows = x.reshape(-1, x.shape[-1])
        y = self.mix(rows, routing)
        for network in self.shared:
            y = y + network(rows)
        y = y.reshape(x.shape)
        return (y, routing) if return_routing else y

    def _route(self, x, valid_tokens):
        r, experts, weights = self.router(x)
        k, valid = self.router.top_k, None if valid_tokens is None else valid_tokens.array.reshape(-1)
        plan = plan_dispatch(experts.array.reshape(-1, k), self.router.num_experts, self._capacity(x, valid), valid)
        routing = Routing(r, experts, weights, plan, valid_tokens)
        if self.training and self.router.expert_bias is not None:
            with _counting:
                self._wanted += plan.wanted
        for routed in getattr(_open, "lists", ()):
            routed.append(routing)
        return routing

    def _capacity(self, x, valid):
        """Rows of one expert at most. In evaluation nothing is dropped, so that no token depends on its neighbours."""
        if self.capacity_factor is None or not self.training:
            return None
        tokens = math.prod(x.shape[:-1]) if valid is None else int(valid.sum())
        share = self.capacity_factor * tokens * self.router.top_k / self.router.num_experts
        return math.ceil(round(share, 6))       # 1.1 · 10 is a little more than 11, and not 12

    def update_bias(self):
        """Once a step: moves the router's bias against the load of all training passes since the last call. Nothing without bias_rate."""
        if self.router.expert_bias is not None:
            self.router.update_bias(self._wanted)
            self._wanted = np.zeros_like(self._wanted)

    def extra_repr(self):
        return "" if self.capacity_factor is None else f"capacity_factor={self.capacity_factor}"


class DenseMoE(_Mixture):
    """y = Σ_{i ∈ I} g_i Expert_i(x) + Σ Shared_j(x), every expert for every token.    x, y: [..., C]       (guide 11.1)

    The options are those of `MoE`, the experts a `ModuleList` of feed-forward networks.
    """

    def _gathered(self, networks):
        return ModuleList(networks)

    def mix(self, x, routing):
        places = routing.plan.places
        has_row = constant(places < len(routing.plan.pairs))                            # [n, k]
        experts, weights = (a.reshape(places.shape) for a in (routing.experts, routing.weights))
        y = zeros_like(x, dtype=weights.dtype)
        for i, expert in enumerate(self.experts):
            gate = (weights * (has_row & (experts == i))).sum(dim=-1, keepdim=True)     # 0 for who did not choose it
            out = expert(x)
            y = y + gate * out
        return y.to(out.dtype)


class MoE(_Mixture):
    """y = Σ_{i ∈ I} g_i Expert_i(x) + Σ Shared_j(x), each expert only for the tokens that chose it.    x, y: [..., C]

    ffn, bias, dropout   the kind of each network, as in `TransformerBlock`; hidden_dim is the Cff of one of them
    router               "topk_softmax", "softmax_topk", "softmax_topk_renormalized" or "noisy_topk": see `Router`
    capacity_factor      in training an expert takes at most ⌈factor · n k / E⌉ pairs, earlier ranks first, then earlier tokens; the
                         others are dropped: their token goes without. None: no limit
    shared_experts       networks that every token passes, besides (arXiv 2401.06066)
    bias_rate            step of the router's bias against unequal load; call `update_bias()` after each step of the optimizer
    """

    def _gathered(self, networks):
        return Experts(networks)

    def mix(self, x, routing):
        rows = dispatch(x, routing.plan)                                                # [N, C], by expert
        rows = self.experts(rows, routing.plan.counts)
        return combine(rows, routing.weights.reshape(routing.plan.places.shape), routing.plan)


def update_biases(model):
    """`update_bias()` of every mixture in a model."""
    for module in model.modules():
        if isinstance(module, _Mixture):
            module.update_bias()


# --- checks ---------------------------------------------------------------------------------------------------------

def _at_least_float32(x):
    return x.float() if x.array.dtype.itemsize < 4 else x


def _checked_sizes(num_experts, top_k):
    num_experts, top_k = whole_number("MoE", "num_experts", num_experts, least=1), whole_number("MoE", "top_k", top_k)
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"MoE: top_k must be from 1 to num_experts = {num_experts}, got {top_k}")
    return num_experts, top_k


def _positive(name, value):
    """value, or an error where it is neither None nor a positive number."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise TypeError(f"MoE: {name} must be a number or None, got {value!r}")
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"MoE: {name} must be positive and finite, or None, got {value!r}")
    return value


def _checked_tokens(x, valid_tokens):
    """valid_tokens as booleans beside x, or None."""
    require_tensors("MoE", x=x)
    if valid_tokens is None:
        return None
    require_tensors("MoE", valid_tokens=valid_tokens)
    if valid_tokens.shape != x.shape[:-1] or not (valid_tokens.dtype is bool_ or ((valid_tokens == 0) | (valid_tokens == 1)).all()):
        raise ValueError(f"MoE: valid_tokens must be boolean, True = a real token, or 0 and 1, one for each token of x {tuple(x.shape)}, "
                         f"got {described(valid_tokens)}")
    return valid_tokens.to(device=x.device, dtype=bool_)
