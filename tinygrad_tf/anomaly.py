"""Anomaly mode: the operation that makes the first NaN is named, with the line of yours that called it.               (guide 17.3)

    with torch.autograd.detect_anomaly():
        loss = F.cross_entropy(model(x), y)         # AnomalyWarning: the first Inf or NaN of forward, and of what
        loss.backward()                             # RuntimeError: the first NaN among the gradients

An operation is told on if what it makes is worse than all that it was given; finite, Inf, NaN are the three grades. Raised is what
PyTorch raises, NaN in backward. The rest is a warning, since it may be meant, such as log(0) = −∞ for a mask: what runs there
runs here. warnings.simplefilter("error", torch.anomaly.AnomalyWarning) stops at it.

Off, it costs nothing: forward is watched as a trace watches it (`autograd.observing`), backward takes another step (`autograd._walk`).
"""
import math
import threading
import warnings
from typing import NamedTuple

import numpy as np

from . import autograd
from .arguments import require_bools
from .autograd import Mode, _mode, _user_line, _where, array_of, node_backward
from .backend import beside, quiet
from .dtypes import is_float, widened

FINITE, INF, NAN = range(3)
GRADES = "finite numbers", "Inf", "NaN"
HINTS = {
    "Div": "Is a denominator 0? Add a small number to it, or put another in its place first: torch.where differentiates both branches",
    "Log": "log(0) is −Inf, its slope Inf, and below 0 there is none: clamp(min=…) first, or take log_softmax of the logits",
    "Sqrt": "The slope of √x at 0 is Inf, and Inf · 0 is NaN: add a small number under the root",
    "Pow": "A power below 1 has no finite slope at 0, one below 0 no value there, and a broken one none below 0",
    "Exp": "Subtract the maximum first, as softmax does",
    "Softmax": "A row of nothing but −Inf: all its keys are masked. F.attention gives zeros there",
}
HINTS |= {"Log1p": HINTS["Log"], "Rsqrt": HINTS["Div"], "Norm": HINTS["Sqrt"], "LogSoftmax": HINTS["Softmax"]}
OF_INF = {"Mul": "0 · Inf is NaN: multiplying by 0 does not mask; take masked_fill or torch.where", "Sub": "Inf − Inf is NaN: find the Inf"}
OF_INF |= {"Add": OF_INF["Sub"], "Sum": OF_INF["Sub"]}
TOO_NARROW = "float16 ends at 65504: take bfloat16, or, for gradients, a GradScaler"


class AnomalyWarning(RuntimeWarning):
    """Forward made Inf or NaN, or backward Inf."""


class AnomalyError(RuntimeError):
    """Backward made NaN: PyTorch's RuntimeError, under a name of its own."""


def first_anomaly(compute):
    """What anomaly mode says first while compute() runs, which then ends; None where it says nothing.

        first_anomaly(lambda: model(x, y)[1].backward())
    """
    with warnings.catch_warnings(), detect_anomaly():
        warnings.simplefilter("error", AnomalyWarning)
        try:
            compute()
        except (AnomalyWarning, AnomalyError) as said:
            return str(said)


# --- on and off -----------------------------------------------------------------------------------------------------------

class _State(threading.local):
    def __init__(self):
        self.now, self.before, self.told = (False, True), [], set()     # (enabled, check_nan); what `with` blocks return to


_state = _State()


def is_anomaly_enabled():
    """Whether this thread is in anomaly mode."""
    return _state.now[0]


def is_anomaly_check_nan_enabled():
    """Whether anomaly mode looks for NaN; with False it does nothing, since errors in backward name their line without it too."""
    return _state.now[1]


def _switch(enabled, check_nan):
    if enabled and not _state.now[0]:
        _state.told = set()
    _state.now, watch = (enabled, check_nan), enabled and check_nan
    _mode.step = _checked_backward if watch else None
    _mode.observers = (*(other for other in _mode.observers if other is not _watch), *[_watch] * watch)


class detect_anomaly(Mode):
    """Inside, the first operation to make NaN or Inf is named. A `with` block or a decorator, for this thread."""

    def __init__(self, check_nan=True):
        require_bools("detect_anomaly", check_nan=check_nan)
        self.check_nan = check_nan

    def __enter__(self):
        _state.before.append(_state.now)
        _switch(True, self.check_nan)

    def __exit__(self, *error):
        _switch(*_state.before.pop())


class set_detect_anomaly:
    """Switches anomaly mode on or off: at once and for good; as a `with` block, until the block ends."""

    def __init__(self, mode, check_nan=True):
        require_bools("set_detect_anomaly", mode=mode, check_nan=check_nan)
        self.before = _state.now
        _switch(mode, check_nan)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        _switch(*self.before)


autograd.detect_anomaly, autograd.set_detect_anomaly = detect_anomaly, set_detect_anomaly      # where PyTorch has them


# --- what is told -----------------------------------------------------------------------------------------------------------

class Held(NamedTuple):
    """What an array holds: its lowest and highest number say whether there is Inf or NaN among them."""
    shape: tuple
    dtype: np.dtype
    low: float = 0.0
    high: float = 0.0

    @classmethod
    @quiet
    def of(cls, x):
        """Of an array of floats, or of a number; None of anything else."""
        if isinstance(x, float):
            return cls((), np.dtype(float), x, x)
        if not is_float(getattr(x, "dtype", np.dtype(int))):
            return None
        wide = widened(x)
        return cls(x.shape, x.dtype, *(beside(x, f).item() for f in (wide.min, wide.max))) if x.size else cls(x.shape, x.dtype)

    @property
    def grade(self):
        return NAN if math.isnan(self.low) else INF if math.isinf(self.low) or math.isinf(self.high) else FINITE

    def __str__(self):
        return f"{list(self.shape)} {self.dtype} " + ("with NaN" if self.grade == NAN else f"from {self.low:g} to {self.high:g}")


def _worst(held):
    return max((h.grade for h in held if h), default=FINITE)


def _listed(held):
    return ", ".join(f"{h} as argument {i}" if len(held) > 1 else str(h) for i, h in enumerate(held) if h)


def _hint(name, made):
    """The usual reason, and what to do about it."""
    hint = HINTS.get(name) or (OF_INF.get(name) if made.grade == NAN else TOO_NARROW if made.dtype == np.float16 else None)
    return f". {hint}" if hint else ""


def _warn(node, line, message):
    """Once for an operation and a line, while the mode is on."""
    if (node.name, line) not in _state.told:
        _state.told.add((node.name, line))
        warnings.warn_explicit(message, AnomalyWarning, *line)


def _watch(node, args, out):
    """After each operation of forward. Its node, where there is one, remembers what it was given and who made the first of it odd."""
    if not is_anomaly_enabled():                # switched off inside `observing`, which still has it on its list
        return
    given, made = [Held.of(array_of(a)) for a in args], Held.of(out.array)
    worst, source = _worst(given), _source(node, args, given)
    if made and made.grade > worst:
        line = _user_line()
        source = f"{node.name} (called at {line[0]}:{line[1]}) made {GRADES[made.grade]} of {GRADES[worst]}"
        _warn(node, line, f"{source}: it was given {_listed(given)}, and made {made}{_hint(node.name, made)}")
    if out.node is node:
        node.anomaly = given, source


def _source(node, args, given):
    """Where the worst that an operation was given comes from: "" where all of it is finite."""
    worst = _worst(given)
    if worst == FINITE:
        return ""
    i = next(i for i, held in enumerate(given) if held and held.grade == worst)
    return _remembered(getattr(args[i], "node", None))[1] or f"argument {i} of {node.name} held {GRADES[worst]} from the start"


def _remembered(node):
    """(what an operation was given, where the worst of it was made): None and "" where forward was not watched."""
    return getattr(node, "anomaly", (None, ""))


def _checked_backward(node, dy):
    """One step of backward. AnomalyError for NaN, AnomalyWarning for Inf where all was finite."""
    gradients, came = node_backward(node, dy), Held.of(dy)
    for i, g in enumerate(gradients):
        made = None if g is None else Held.of(g)
        if made and made.grade == NAN:
            raise AnomalyError(f"Function '{node.name}Backward' returned nan values in its {i}th output. {_story(node, came, made)}")
        if made and made.grade > came.grade and not _remembered(node)[1]:       # else forward has told of it
            _warn(node, node.line, f"Function '{node.name}Backward' returned inf values in its {i}th output. {_story(node, came, made)}")
    return gradients


def _story(node, came, made):
    """What went into an operation on both ways, and where the first NaN or Inf of that was made."""
    given, source = _remembered(node)
    told = f"which was given {_listed(given)}" if given else "whose forward ran outside anomaly mode: inside, its numbers are told too"
    return (f"It belongs to {_where(node)}, {told}; the gradient that came in was {came}, the one that went out is {made}"
            f"{f'; in forward, {source}' if source else ''}{_hint(node.name, made)}")
