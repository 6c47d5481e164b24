"""Mixed precision: products of matrices in 16 bits, weights and everything delicate in float32 (guide 16.3).

`autocast` decides in which type an operation runs, by the list that the operation stands on (autograd.py, "autocast"). The weights
stay float32, and so do their gradients, for the cast of a weight is an operation like any other. `GradScaler` keeps small gradients
above the smallest number of float16: the loss is multiplied by a factor, and the gradients are divided by it again.

    with autocast("cuda", dtype=float16):
        loss = model(x, targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)              # only where gradients are looked at, as clipping does
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)                  # left out where a gradient is infinite or NaN
    scaler.update()
"""
import math
from functools import cached_property
from types import SimpleNamespace

import numpy as np

from . import cuda, dtypes
from .arguments import absent, described, require_bools, warn_caller, whole_number
from .autograd import Mode
from .backend import array_module, beside, casting, device
from .creation import tensor
from .tensor import Tensor

__all__ = ["GradScaler", "autocast", "is_autocast_available"]
__getattr__ = absent(__name__)


# --- autocast ---------------------------------------------------------------------------------------------------------

class autocast(Mode):
    """Inside, on tensors of one kind of device: products of matrices run in `dtype`; sums, exponentials, powers, norms and losses in
    float32; all else in the type of its arguments, the widest of them. A `with` block, or a decorator; blocks nest.

    The lists are PyTorch's for CUDA, on the CPU too. float64 is left alone, and so is what is written in place. dtype: float16 or
    bfloat16; by default that of the block around, else bfloat16 on the CPU and float16 on a GPU. cache_enabled: a weight is cast
    once in the outermost block, unless it is written to. It holds for this thread.

    As in PyTorch another dtype, or a GPU that is not there, is told by a warning, and nothing is cast.
    """

    def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        self.device_type = _kind("autocast", device_type)
        self.cache_enabled = is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
        require_bools("autocast", enabled=enabled, cache_enabled=self.cache_enabled)
        self.enabled = enabled and _is_there("autocast", self.device_type)
        self.dtype = dtypes.as_dtype(dtype) if dtype is not None else get_autocast_dtype(device_type) if self.enabled else None
        if self.enabled and not _is_low(self.dtype):
            warn_caller(f"autocast: the dtypes are float16 and bfloat16, got {self.dtype}; autocast is disabled")
            self.enabled = False
        self.low = self.dtype.numpy if self.enabled else None           # here it is told if bfloat16 is not installed

    def __enter__(self):
        casting.blocks.append((casting.dtypes, casting.named, casting.casts))
        casting.dtypes = {kind: low for kind, low in casting.dtypes.items() if kind != self.device_type}
        if self.dtype is not None:
            casting.named = {**casting.named, self.device_type: self.dtype}
        if self.enabled:
            casting.dtypes[self.device_type] = self.low
        casting.casts = None if not self.cache_enabled else {} if casting.casts is None else casting.casts
        return self

    def __exit__(self, *error):
        casting.dtypes, casting.named, casting.casts = casting.blocks.pop()


def is_autocast_enabled(device_type="cuda"):
    """Whether autocast is on in this thread, for tensors of a GPU (PyTorch's default) or of the CPU."""
    return _kind("is_autocast_enabled", device_type) in casting.dtypes


def get_autocast_dtype(device_type):
    """The dtype of autocast here; where no block names one, what a block would take: bfloat16 for "cpu", float16 for "cuda"."""
    kind = _kind("get_autocast_dtype", device_type)
    return casting.named.get(kind) or (dtypes.bfloat16 if kind == "cpu" else dtypes.float16)


def is_autocast_cache_enabled():
    """Whether the casts of weights are kept, here or in a block that would begin here."""
    return casting.casts is not None or not casting.blocks


def clear_autocast_cache():
    """Forgets the weights that were cast: where one was written to behind the back of the library."""
    if casting.casts:
        casting.casts.clear()


def is_autocast_available(device_type):
    """Whether autocast knows this kind of device, there or not."""
    return bool(_kind("is_autocast_available", device_type))


def _kind(op, device_type):
    """"cpu" or "cuda"; RuntimeError for a name that is unknown."""
    if not isinstance(device_type, str):
        raise ValueError(f"{op}: expected device_type as a str, 'cpu' or 'cuda', got {described(device_type)}")
    return device(device_type).type


def _is_there(what, kind):
    if kind == "cpu" or cuda.is_available():
        return True
    warn_caller(f"{what}: there is no GPU; {what} is disabled. On the CPU it is {what}('cpu', …)")
    return False


def _is_low(dtype):
    return dtype.is_floating_point and dtype.itemsize == 2


# --- the scale of the loss --------------------------------------------------------------------------------------------

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class GradScaler:
    """loss · s backward, gradients / s; a step in which one is infinite or NaN is left out, and s ← s · backoff_factor.

    After growth_interval steps in a row that were made s ← s · growth_factor, so that s stays near the largest that fits: below
    it gradients underflow, above it they overflow. Gradients are float32, as the weights must be; where s is a power of two,
    scaling rounds nothing.       (Micikevicius et al., arXiv 1710.03740; the rules and the error of each wrong order are PyTorch's)

    enabled=False, or a GPU that is not there: `scale` returns its argument, `step` is optimizer.step, all else does nothing.
    """

    def __init__(self, device="cuda", init_scale=2.0 ** 16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True):
        require_bools("GradScaler", enabled=enabled)
        self._enabled = enabled and _is_there("GradScaler", _kind("GradScaler", device))
        self._state = _checked(scale=init_scale, growth_factor=growth_factor, backoff_factor=backoff_factor,
                               growth_interval=growth_interval, _growth_tracker=0)
        self._has_scaled, self._unscaled = False, {}            # {optimizer: what is known of its gradients since the last update}

    def scale(self, outputs):
        """outputs · s: a tensor, or tensors in lists and tuples. A single number of float16 becomes float32, in which s has room."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            self._has_scaled = True
            return outputs * tensor(self.get_scale(), dtype=dtypes.float32, device=outputs.device)
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(map(self.scale, outputs))
        raise ValueError(f"GradScaler.scale: expected a Tensor, or a list or tuple of them, got {described(outputs)}")

    def unscale_(self, optimizer):
        """g ← g / s for the gradients of this optimizer, and notes whether all are finite. `step` does it if nobody has."""
        if not self._enabled:
            return
        self._check_scaled("unscale_")
        if optimizer in self._unscaled:
            raise RuntimeError("GradScaler.unscale_: it is being called after step()" if self._unscaled[optimizer].stepped else
                               "GradScaler.unscale_: it has already been called on this optimizer since the last update(): its gradients "
                               "would be divided twice")
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if any(g.dtype is dtypes.float16 for g in gradients):
            raise ValueError("GradScaler.unscale_: attempting to unscale float16 gradients, in which small ones are lost: keep the weights "
                             "float32 and let autocast cast them, without model.half()")
        for g in gradients:
            g.mul_(1 / self.get_scale())
        self._unscaled[optimizer] = _Unscaled(gradients)

    def step(self, optimizer, *args, **kwargs):
        """optimizer.step(), unless one of its gradients is infinite or NaN. Returns what that returns, or None."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if args or "closure" in kwargs:
            raise RuntimeError("GradScaler.step: a closure is not supported: the loss that it computes would not be scaled")
        self._check_scaled("step")
        if optimizer not in self._unscaled:
            self.unscale_(optimizer)
        unscaled = self._unscaled[optimizer]
        if unscaled.stepped:
            raise RuntimeError("GradScaler.step: it has already been called for this optimizer since the last update()")
        if not unscaled.flags:
            raise RuntimeError("GradScaler.step: the optimizer has no gradient; was scaler.scale(loss).backward() called, and after "
                               "zero_grad()?")
        unscaled.stepped = True
        return optimizer.step(**kwargs) if unscaled.all_finite else None

    def update(self, new_scale=None):
        """The end of an iteration: s for the next one, by what was found in the gradients, or new_scale."""
        if not self._enabled:
            return
        self._check_scaled("update")
        if new_scale is not None:
            self._change(scale=new_scale.item() if isinstance(new_scale, Tensor) else new_scale)
        elif not any(unscaled.flags for unscaled in self._unscaled.values()):
            raise RuntimeError("GradScaler.update: no gradients were looked at since the last update(): call step(optimizer) before it")
        elif all(unscaled.all_finite for unscaled in self._unscaled.values()):
            self._count_step()
        else:
            self._change(scale=max(self.get_scale() * self.get_backoff_factor(), _SMALLEST), _growth_tracker=0)
        self._unscaled = {}

    def _count_step(self):
        steps = self._state["_growth_tracker"] + 1
        if steps < self.get_growth_interval():
            self._change(_growth_tracker=steps)
        else:
            larger = self.get_scale() * self.get_growth_factor()
            self._change(_growth_tracker=0, scale=larger if larger <= _LARGEST else self.get_scale())

    def _check_scaled(self, what):
        if not self._has_scaled:
            raise RuntimeError(f"GradScaler.{what}: nothing was scaled yet: backward must come from scaler.scale(loss).backward()")

    def _change(self, **numbers):
        self._state = _checked(**{**self._state, **numbers})

    def is_enabled(self):
        """False: it does nothing."""
        return self._enabled

    def get_scale(self):
        """s; 1 where it is not enabled."""
        return self._state["scale"] if self._enabled else 1.0

    def get_growth_factor(self): return self._state["growth_factor"]
    def get_backoff_factor(self): return self._state["backoff_factor"]
    def get_growth_interval(self): return self._state["growth_interval"]
    def set_growth_factor(self, new_factor): self._change(growth_factor=new_factor)
    def set_backoff_factor(self, new_factor): self._change(backoff_factor=new_factor)
    def set_growth_interval(self, new_interval): self._change(growth_interval=new_interval)

    def state_dict(self):
        """All that decides what it does next, under PyTorch's names; {} where it is not enabled. Taken after `update`."""
        return dict(self._state) if self._enabled else {}

    def load_state_dict(self, state_dict):
        """Takes over a state. RuntimeError for {}, which a scaler that was not enabled has saved; ValueError for one that is no state."""
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError("GradScaler.load_state_dict: the state dict is empty: was it saved from a scaler that was not enabled?")
        if state_dict.keys() != self._state.keys():
            raise ValueError(f"GradScaler.load_state_dict: expected {', '.join(self._state)}, got {', '.join(map(str, state_dict))}")
        self._state = _checked(**state_dict)


def _checked(scale, growth_factor, backoff_factor, growth_interval, _growth_tracker):
    """The state of a GradScaler; ValueError for a number that is out of its range. The scale is rounded to float32, in which it acts."""
    _require("the scale", scale, 0 < scale <= _LARGEST, "positive, and within float32")
    _require("growth_factor", growth_factor, 1 < growth_factor < math.inf, "above 1")
    _require("backoff_factor", backoff_factor, 0 < backoff_factor < 1, "between 0 and 1")
    return {"scale": float(np.float32(scale)), "growth_factor": float(growth_factor), "backoff_factor": float(backoff_factor),
            "growth_interval": whole_number("GradScaler", "growth_interval", growth_interval, least=1),
            "_growth_tracker": whole_number("GradScaler", "_growth_tracker", _growth_tracker, least=0)}


def _require(name, value, holds, what):
    if not holds:
        raise ValueError(f"GradScaler: {name} must be {what}, got {described(value)}")


class _Unscaled:
    """Whether gradients are finite, and whether a step was made with them."""

    def __init__(self, gradients):
        self.flags, self.stepped = {}, False            # {device: 0-d bools}: nobody has waited for a GPU yet
        for g in gradients:
            self.flags.setdefault(g.device, []).append(beside(g.array, _is_finite, g.array))

    @cached_property
    def all_finite(self):
        return all(beside(flags[0], _all_of, flags) for flags in self.flags.values())


def _is_finite(array):
    xp = array_module(array)
    return xp.asarray(xp.isfinite(array).all())


def _all_of(flags):
    return bool(array_module(*flags).stack(flags).all())


# --- torch.cuda.amp: PyTorch's older names ------------------------------------------------------------------------------

class _CudaAutocast(autocast):
    """autocast("cuda")"""

    def __init__(self, enabled=True, dtype=dtypes.float16, cache_enabled=True):
        super().__init__("cuda", dtype, enabled, cache_enabled)


class _CudaGradScaler(GradScaler):
    """GradScaler("cuda")"""

    def __init__(self, init_scale=2.0 ** 16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True):
        super().__init__("cuda", init_scale, growth_factor, backoff_factor, growth_interval, enabled)


cuda.amp = SimpleNamespace(autocast=_CudaAutocast, GradScaler=_CudaGradScaler)
