"""From logits to the next token (guide 12.1): steps, each logits [B, V] → logits [B, V], and the sampler that puts them in order.

A step writes −inf for an id that it removes, and such an id has probability 0. The steps work on the device of the logits,
leave their argument as it is (one that removes nothing may return it), and record no graph. A row that holds NaN or +inf, or
−inf alone, has no distribution: `Sampler` refuses it, the steps do not look. V is the size of the vocabulary.
"""
import math
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np

from .. import creation
from ..arguments import require_tensors, type_name
from ..autograd import Tensor, array_of, constant
from ..backend import CPU, device_of, first_outside, to_device
from ..dtypes import float32, float64
from ..ops.index import where
from ..ops.shape import cat
from ..ops.softmax import softmax

INF = float("inf")
# The smallest normal float32 and the largest: a temperature below would round to 0, one above to inf, and 0 / 0 and inf / inf are NaN.
COLDEST, HOTTEST = 2.0 ** -126, (2 - 2.0 ** -23) * 2.0 ** 127
ROUNDING = 1e-12               # what a sum of float64 shares may be short of p by rounding: ten equal tokens, p = 0.8, are eight

# option → its type, in words; whether a number is in range, in words
_FINITE = Real, "a number", lambda x: -INF < x < INF, "finite"
OPTIONS = {
    "temperature": (Real, "a number", lambda x: 0 <= x < INF, "0 (greedy) or positive and finite"),
    "top_k": (Integral, "an integer, or None to keep all", lambda k: k >= 1, "at least 1, or None to keep all"),
    "top_p": (Real, "a number, or None to keep all", lambda p: 0 < p <= 1, "in (0, 1], or None to keep all"),
    "min_p": (Real, "a number, or None to keep all", lambda p: 0 <= p <= 1, "in [0, 1], or None to keep all"),
    "repetition_penalty": (Real, "a number", lambda x: 0 < x < INF, "positive and finite; 1 changes nothing"),
    "presence_penalty": _FINITE,
    "frequency_penalty": _FINITE,
}
_BIAS = Real, "a number", lambda x: x < INF, "finite, or -inf to forbid the id"


# --- the steps --------------------------------------------------------------------------------------------------------------

def add_bias(logits, bias):
    """z_i + b_i, with b a dict {id: number} or a Tensor [V]; −inf forbids the id. float16 logits become float32.

    IndexError for an id outside [0, V), ValueError for a Tensor of another shape and for numbers that are NaN or +inf.
    """
    return _biased(_rows("add_bias", logits), _checked_bias("add_bias", "bias", bias))


def penalize(logits, history, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0):
    """For an id that occurs n_i > 0 times in its row's history:  (z_i / r where z_i > 0, else z_i · r) − presence − n_i · frequency.

    history: for each row a list of ids, or an integer array or tensor, of any length; or ids [B, T]. float16 logits become float32.
    r is that of Keskar et al. 2019 (CTRL), the others are OpenAI's. IndexError for an id outside [0, V).
    """
    for name, penalty in (("repetition_penalty", repetition_penalty), ("presence_penalty", presence_penalty),
                          ("frequency_penalty", frequency_penalty)):
        _check_option("penalize", name, penalty)
    logits = _rows("penalize", logits)
    n = constant(to_device(_occurrences(history, *logits.shape), logits.device))
    z, r = logits.to(float64), float(repetition_penalty)        # float64: neither r nor n · frequency overflows to 0 · inf
    repeated = where(z > 0, z / r, z * r) - float(presence_penalty) - n * float(frequency_penalty)
    return where(n > 0, repeated, z).to(_wide(logits).dtype)


def temper(logits, temperature):
    """(z_i − max z) / τ: the same distribution as z_i / τ, and no e^z overflows. τ = 0 keeps the first of the largest alone.

    The difference has the dtype of the logits, the quotient is float32: what seeds have drawn so far rests on these bits.
    """
    _check_option("temper", "temperature", temperature)
    logits = _rows("temper", logits)
    if temperature == 0:
        logits, temperature = keep_top_k(logits, 1), 1
    return (logits - logits.amax(dim=-1, keepdim=True)).to(float32) / min(max(float(temperature), COLDEST), HOTTEST)


def keep_top_k(logits, k):
    """The k largest logits of a row, and exactly k; of equals those with the smallest ids, as `topk` does. A k beyond V keeps all."""
    _check_option("keep_top_k", "top_k", k, "k")
    logits = _rows("keep_top_k", logits)
    if k >= logits.shape[1]:
        return logits
    values, ids = logits.topk(k, dim=-1)
    return _only(logits, ids, values)


def keep_top_p(logits, p):
    """The smallest set of ids, most probable first, whose probability Σ softmax(z)_i reaches p; of equals the smaller id comes first.

    At least one id stays, and p = 1 keeps all. Sums are float64, and one that is short of p by less than 1e-12 reaches it.
    (Nucleus sampling: Holtzman et al. 2020)
    """
    _check_option("keep_top_p", "top_p", p, "p")
    logits = _rows("keep_top_p", logits)
    if p == 1:
        return logits                           # a share of 1e-20 is lost in the sum, and kept here
    values, ids = logits.sort(dim=-1, descending=True)
    reached = softmax(values.to(float64), dim=-1).cumsum(dim=-1)
    size = (reached < float(p) - ROUNDING).sum(dim=-1, keepdim=True) + 1        # all that fall short, and the one that reaches p
    beyond = creation.arange(logits.shape[1], device=logits.device) >= size
    return _only(logits, ids, values.masked_fill(beyond, -INF))


def keep_min_p(logits, min_p):
    """The ids with p_i ≥ min_p · p_max, as e^(z_i − max z) ≥ min_p, in float64: a small share counts as what it is. (Nguyen et al. 2024)"""
    _check_option("keep_min_p", "min_p", min_p)
    logits = _rows("keep_min_p", logits)
    z = logits.to(float64)
    return logits.masked_fill((z - z.amax(dim=-1, keepdim=True)).exp() < float(min_p), -INF)


# --- the sampler ------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, eq=False)               # eq: two tensors of biases have no == that is one bool
class Sampler:
    """How to draw the next id from logits [B, V]. In this order, and a step whose option is at its default is left out:

    1. `logit_bias`: add_bias, a dict {id: number} or a Tensor [V], of which the sampler keeps a copy
    2. `repetition_penalty`, `presence_penalty`, `frequency_penalty`: penalize, over the `history` of each row
    3. `temperature`: temper; 0 is greedy, the first of the largest, and steps 4 to 6 change nothing then
    4. `top_k`: keep_top_k
    5. `top_p`: keep_top_p, of what top_k has left, whose probabilities sum to 1 again
    6. `min_p`: keep_min_p

    TypeError or ValueError for an option of another type or out of range. The logits are downloaded once, and all is done on the host.
    """
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict | Tensor | None = None     # kept as (id, number) pairs or as a tensor of the host

    def __post_init__(self):
        for name in OPTIONS:
            value = getattr(self, name)
            if value is not getattr(Sampler, name):             # its default
                _check_option("sample", name, value)
        if self.logit_bias is not None:
            bias = _checked_bias("sample", "logit_bias", self.logit_bias)
            object.__setattr__(self, "logit_bias", bias if isinstance(bias, tuple) else bias.cpu().clone())

    @property
    def is_greedy(self):
        """Whether nothing is left to chance."""
        return self.temperature == 0

    @property
    def uses_history(self):
        """Whether a penalty is on, so that `history` is needed; without one it is not looked at."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def __call__(self, logits, history=None, generator=None):
        """ids [B, 1], drawn with `probabilities`, on the device of the logits.

        generator: one for all rows, None for the default one; or a list of one for each row, whose draw then depends on no
        other row. ValueError for a list of another length, and as `probabilities`.
        """
        scores = self._scores(logits, history)
        ids = constant(scores.array.argmax(axis=-1)[:, None]) if self.is_greedy else _drawn(self._kept(scores), generator)
        return ids if device_of(logits.array) is CPU else ids.to(logits.device)

    def probabilities(self, logits, history=None):
        """With what probability each id is drawn: a float64 NumPy array [B, V] whose rows sum to 1; 0 for what a step removed.

        ValueError for logits of another shape, for a missing history, and for a row that after steps 1 and 2 holds NaN or
        +inf or is all −inf; TypeError for what is no tensor.
        """
        return softmax(self._kept(self._scores(logits, history)).to(float64), dim=-1).numpy()

    def _scores(self, logits, history):
        """Steps 1 and 2, on the host."""
        logits = _rows("sample", logits)
        logits = logits if device_of(logits.array) is CPU else logits.cpu()
        if self.logit_bias is not None:
            logits = _biased(logits, self.logit_bias)
        if self.uses_history:
            if history is None:
                raise ValueError("sample: a penalty is set, so the sampler needs history, the ids so far of each row")
            logits = penalize(logits, history, self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        if not all(map(math.isfinite, logits.array.max(axis=-1).tolist())):
            raise ValueError("sample: a row of logits holds NaN or +inf, or is all -inf; nothing can be drawn from it")
        return logits

    def _kept(self, scores):
        """Steps 3 to 6."""
        logits = temper(scores, self.temperature)
        for step, option in (keep_top_k, self.top_k), (keep_top_p, self.top_p), (keep_min_p, self.min_p):
            if option is not None:
                logits = step(logits, option)
        return logits


def sample(logits, temperature=1.0, top_k=None, generator=None, history=None, **options):
    """logits [B, V] → ids [B, 1], drawn from softmax(logits / temperature); options, order and errors as in `Sampler`."""
    return Sampler(temperature, top_k, **options)(logits, history, generator)


def _drawn(logits, generator):
    """ids [B, 1]. The softmax of one row alone, and of that row in a batch, may differ in the last digit."""
    if not isinstance(generator, (list, tuple)):
        return creation.multinomial(softmax(logits, dim=-1), 1, generator=generator)
    if len(generator) != len(logits):
        raise ValueError(f"sample: a list of generators must hold one for each of the {len(logits)} rows, got {len(generator)}")
    return cat([_drawn(logits[row:row + 1], own) for row, own in enumerate(generator)]) if generator else _drawn(logits, None)


# --- what the steps share ---------------------------------------------------------------------------------------------------

def _rows(op, logits):
    """The logits [B, V] without their history; integers as floats, for −inf is one."""
    require_tensors(op, logits=logits)
    if logits.array.ndim != 2 or logits.array.shape[1] == 0:
        raise ValueError(f"{op}: logits must have shape [B, V_vocab] with at least one id to draw, got {tuple(logits.shape)}")
    return logits.detach() if logits.is_floating_point() else logits.to(float32)


def _wide(logits):
    """float32 at least: a bias of 0.001 is nothing beside a float16 logit of 10."""
    return logits if logits.dtype in (float32, float64) else logits.to(float32)


def _only(logits, ids, values):
    """−inf everywhere but for these values at these ids."""
    return creation.full_like(logits, -INF).scatter_(-1, ids, values)


def _biased(logits, bias):
    V = logits.shape[1]
    if isinstance(bias, tuple):
        bias = constant(_vector(bias, V))
    elif bias.shape != (V,):
        raise ValueError(f"add_bias: the bias of logits {tuple(logits.shape)} must have shape ({V},), got {tuple(bias.shape)}")
    logits = _wide(logits)
    return logits + bias.to(logits)


def _vector(pairs, V):
    """[V]: the number of each id, and 0."""
    vector = np.zeros(V)
    for i, number in pairs:
        if not 0 <= i < V:
            raise IndexError(f"add_bias: the bias has a number for the id {i}, and the logits are of the ids 0 to {V - 1}")
        vector[i] = number
    return vector


def _occurrences(history, B, V):
    """n [B, V], on the host: how often each id occurs in the history of its row."""
    history, n = _on_host(history), np.zeros((B, V))
    if np.isscalar(history) or not hasattr(history, "__len__") or getattr(history, "ndim", 1) == 0:
        raise TypeError(f"penalize: history must be a list with the ids of each row, got {type_name(history)}")
    if len(history) != B:
        raise ValueError(f"penalize: history must hold one list of ids for each of the {B} rows of logits, got {len(history)}")
    for row, ids in enumerate(history):
        ids = np.asarray(_on_host(ids))
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise TypeError(f"penalize: the history of row {row} must be a list of integer ids, got {ids.dtype} of shape {ids.shape}")
        if (bad := first_outside(ids, V)) is not None:
            raise IndexError(f"penalize: the history of row {row} has the id {bad}, and the logits are of the ids 0 to {V - 1}")
        n[row] = np.bincount(ids.astype(np.int64), minlength=V)
    return n


def _on_host(x):
    x = array_of(x)
    return to_device(x, CPU) if hasattr(x, "dtype") else x


# --- what is checked --------------------------------------------------------------------------------------------------------

def _check_option(op, option, value, name=None):
    _check(op, name or option, value, *OPTIONS[option])


def _check(op, name, value, kind, what, is_in_range, range_in_words):
    check_number(op, name, value, kind, what)
    try:
        number = float(value)                   # a NumPy number overflows in comparisons with a Python one
    except OverflowError:
        number = INF if value > 0 else -INF
    if not is_in_range(number):
        raise ValueError(f"{op}: {name} must be {range_in_words}, got {value}")


def _checked_bias(op, name, bias):
    """A tensor, or pairs (id, number), which nobody can change."""
    if isinstance(bias, Tensor):
        if not (bias < INF).all():
            raise ValueError(f"{op}: {name} must be {_BIAS[-1]}; the tensor holds NaN or +inf")
        return bias.detach()
    try:
        pairs = tuple(dict(bias).items())
    except (TypeError, ValueError):
        raise TypeError(f"{op}: {name} must be a dict {{id: number}} or a Tensor [V], got {type_name(bias)}") from None
    for i, number in pairs:
        check_number(op, f"an id of {name}", i, Integral, "an integer")
        _check(op, f"{name}[{i}]", number, *_BIAS)
    return pairs


def check_number(name, option, value, kind, what):
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name}: {option} must be {what}, got {value!r} of type {type(value).__name__}")
