"""Is a backward right? `gradcheck` compares it with central differences, in float64.

With a random upstream gradient u the check looks at one number, L = Σ u · func(inputs), whose slope along an element
x_i is (L(x_i + eps) − L(x_i − eps)) / 2 eps. An upstream gradient of ones would not do: softmax and LayerNorm have
outputs whose sum does not move, and would pass with a backward that returns zeros. The error of one input is

    max|Δ| / max|reference|,    Δ = gradient from backward − reference,    reference = central differences

Inputs of at most `EVERY_ELEMENT` elements are checked at every element, larger ones at some random elements, and all of
them along a random direction. Works on any function of tensors and, with `gradcheck_module`, on the parameters of a Module.
"""
import numpy as np

from .autograd import backward, constant, enable_grad, no_grad
from .backend import CPU, array_module, to_device
from .tensor import Tensor

EVERY_ELEMENT = 200                             # inputs up to this size are checked element by element
SAMPLE = 20                                     # of larger ones, so many elements
ZERO = 1e-7                                     # references below this are rounding: their errors count as they are


class GradcheckError(RuntimeError):
    """A gradient is wrong; the message names the input, the worst element, both values, and what the mistake may be."""


def gradcheck(func, inputs, *, eps=1e-6, atol=1e-5, rtol=1e-3, raise_exception=True, fast_mode=False, seed=0):
    """True if backward gives the gradients of `func(*inputs)` that central differences with step `eps` give.

    An element passes if |Δ| ≤ atol + rtol · |reference|. Checked are the tensors among `inputs` with requires_grad=True, which
    must be float64; all others are constants. `func` returns a tensor or a tuple of tensors. `fast_mode=True` looks
    along random directions alone. Also checked: two backward passes agree bit for bit, the inputs are
    as before, each gradient has its input's shape and dtype, and `func` gives the same output twice.

    Central differences are wrong across a kink (relu at 0, max at a tie, clamp at a limit, round): choose inputs at
    least `eps` away from it. Seed random functions inside: `lambda x: (manual_seed(0), dropout(x))[1]`.
    Raises GradcheckError where a gradient is wrong, or returns False with raise_exception=False; ValueError for inputs that
    cannot be checked.
    """
    inputs = _leaves(inputs)
    names = _named(inputs)
    return _passes(lambda: func(*inputs), names, _name_of(func), eps, atol, rtol, raise_exception, fast_mode, seed)


def gradcheck_module(module, *inputs, eps=1e-6, atol=1e-5, rtol=1e-3, raise_exception=True, fast_mode=False, seed=0):
    """`gradcheck` of `module(*inputs)` for the module's parameters, and for those inputs that require a gradient.

    Parameters must be float64: call `module.double()` first. A frozen parameter is a constant.
    """
    names = [(f"parameter {name!r}", p) for name, p in module.named_parameters()]
    inputs = _leaves(inputs)
    names += _named(inputs)
    return _passes(lambda: module(*inputs), names, type(module).__name__, eps, atol, rtol, raise_exception, fast_mode, seed)


def gradient_error(func, inputs, *, eps=1e-6, fast_mode=False, seed=0):
    """The largest error max|Δ| / max|reference| over the inputs of `func`; 0.0 where there is nothing to differ."""
    inputs = _leaves(inputs)
    names = _named(inputs)
    return max(c.error for c in _compare(lambda: func(*inputs), names, _name_of(func), eps, fast_mode, seed))


def _passes(run, names, what, eps, atol, rtol, raise_exception, fast_mode, seed):
    try:
        for comparison in _compare(run, names, what, eps, fast_mode, seed):
            comparison.require(what, atol, rtol)
    except GradcheckError:
        if raise_exception:
            raise
        return False
    return True


def _name_of(func):
    return getattr(func, "__name__", type(func).__name__).replace("<lambda>", "the function")


def _leaves(inputs):
    """The inputs as a tuple; results of other operations become leaves on the same memory, so that backward stops there."""
    inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    return tuple(x.detach().requires_grad_() if isinstance(x, Tensor) and not x.is_leaf else x for x in inputs)


def _named(inputs):
    return [(f"input {i}", x) for i, x in enumerate(inputs) if isinstance(x, Tensor)]


def _host(x):
    """The array of a tensor as a NumPy array of its own."""
    return to_device(x.array, CPU).copy()


# --- the comparison -----------------------------------------------------------------------------------------------

class _Comparison:
    """What backward and central differences say about one input: at all elements, at some, or along a direction."""

    def __init__(self, name, x, gradient, reference, where, scale=0.0):
        self.name, self.x, self.where = name, x, where
        self.gradient, self.reference = gradient, reference
        largest = max(np.max(abs(reference), initial=0.0), scale)
        self.error = np.max(abs(gradient - reference), initial=0.0) / (largest if not largest < ZERO else 1.0)
        self.error = float("inf") if np.isnan(self.error) else float(self.error)

    def require(self, what, atol, rtol):
        """Raises GradcheckError unless each element is within atol + rtol · |reference|."""
        difference = abs(self.gradient - self.reference)
        wrong = ~(difference <= atol + rtol * abs(self.reference))      # also true for NaN
        if wrong.any():
            excess = np.where(wrong, np.nan_to_num(difference, nan=np.inf), -1)
            raise GradcheckError(self.sentence(what, int(np.argmax(excess)), int(wrong.sum())))

    def sentence(self, what, worst, count):
        place = self.where if isinstance(self.where, str) else f"at index {_index(self.where[worst], self.x.shape)}"
        return (f"gradcheck of {what}: the gradient of {self.name}, shape {tuple(self.x.shape)}, is wrong. The worst is {place}: "
                f"backward says {self.gradient[worst]:.8g}, central differences say {self.reference[worst]:.8g} "
                f"({count} of {len(self.gradient)} compared values differ; max|Δ| / max|reference| = {self.error:.2g}). "
                f"{_likely_mistake(self.gradient, self.reference, tuple(self.x.shape))}")


def _index(flat, shape):
    return tuple(int(i) for i in np.unravel_index(flat, shape))


def _compare(run, names, what, eps, fast_mode, seed):
    """Yields the comparisons, and raises GradcheckError for what else must hold."""
    leaves = _checked_leaves(names)
    before = [(name, x, _host(x)) for name, x in names]
    upstream, gradients = _gradients(run, leaves, what, seed)
    _require_unchanged(before, what)
    for (name, x), g in zip(leaves, gradients):
        yield from _compare_one(run, upstream, name, x, g, eps, fast_mode, seed)
    _require_unchanged(before, what)


def _compare_one(run, upstream, name, x, g, eps, fast_mode, seed):
    """Compares at every element of a small input or at some of a large one, and along a random direction."""
    random = np.random.default_rng(seed)
    if not fast_mode:
        where = np.arange(g.size) if g.size <= EVERY_ELEMENT else np.sort(random.choice(g.size, SAMPLE, replace=False))
        reference = np.array([_slope_at(run, upstream, x, _index(i, g.shape), eps) for i in where])
        yield _Comparison(name, x, g.reshape(-1)[where], reference, where)
    direction = random.standard_normal(g.shape)
    slope = _slope_along(run, upstream, x, direction, eps)
    yield _Comparison(name, x, np.array([np.vdot(g, direction)]), np.array([slope]), "along a random direction",
                      scale=np.linalg.norm(g))


def _slope_at(run, upstream, x, index, eps):
    value = x.array[index].item()
    try:
        x.array[index] = value + eps
        above = _outputs(run)
        x.array[index] = value - eps
        return _difference(upstream, above, _outputs(run)) / (2 * eps)
    finally:
        x.array[index] = value


def _slope_along(run, upstream, x, direction, eps):
    value, direction = x.array.copy(), array_module(x.array).asarray(direction)
    try:
        x.array[...] = value + eps * direction
        above = _outputs(run)
        x.array[...] = value - eps * direction
        return _difference(upstream, above, _outputs(run)) / (2 * eps)
    finally:
        x.array[...] = value


def _difference(upstream, above, below):
    """Σ u · (above − below): subtracting first keeps the digits."""
    with np.errstate(invalid="ignore"):         # inf − inf: the comparison says so
        return sum(float((u * (a - b)).sum()) for u, a, b in zip(upstream, above, below))


def _outputs(run):
    """The float results of a run without graph, as NumPy arrays."""
    with no_grad():
        return [_host(out) for out in _as_tuple(run())]


def _as_tuple(outputs):
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    return [out for out in outputs if isinstance(out, Tensor) and out.is_floating_point()]


# --- what backward says -------------------------------------------------------------------------------------------

def _gradients(run, leaves, what, seed):
    """(upstream gradients of the outputs, gradients of the leaves), after the checks that need no differences."""
    kept = [x.grad for _, x in leaves]
    try:
        with enable_grad():
            outputs = _as_tuple(run())
        if not any(out.requires_grad for out in outputs):
            raise ValueError(f"gradcheck of {what}: no output requires a gradient; it returned no float tensor, or the graph was "
                             f"cut on the way (.detach(), .data, .item(), no_grad, or a new tensor made from numbers)")
        random = np.random.default_rng(seed)
        upstream = [np.asarray(random.standard_normal(out.array.shape)) for out in outputs]
        first = _backward(outputs, upstream, leaves, what, retain_graph=True)
        second = _backward(outputs, upstream, leaves, what, retain_graph=False)
        _require_same_output(run, outputs, what)
    finally:
        for (_, x), g in zip(leaves, kept):
            x.grad = g
    for (name, _), a, b in zip(leaves, first, second):
        if not np.array_equal(a, b, equal_nan=True):
            raise GradcheckError(f"gradcheck of {what}: two backward passes over one graph give different gradients of {name}: "
                                 f"backward writes into its upstream gradient or into what it saved, or is random")
    return upstream, first


def _backward(outputs, upstream, leaves, what, retain_graph):
    for _, x in leaves:
        x.grad = None
    last = max(i for i, out in enumerate(outputs) if out.requires_grad)
    for i, (out, u) in enumerate(zip(outputs, upstream)):
        if out.requires_grad:
            given = constant(array_module(out.array).array(u))
            backward(out, given, retain_graph=retain_graph or i < last)
            if not (_host(given) == u).all():
                raise GradcheckError(f"gradcheck of {what}: backward wrote into the upstream gradient that it was given; "
                                     f"it may be shared with other operations, so work on a copy")
    return [_gradient_of(x, name, what) for name, x in leaves]


def _gradient_of(x, name, what):
    """The gradient as an array of x's shape and dtype; no gradient at all means zeros."""
    if x.grad is None:
        return np.zeros(x.array.shape)
    g = x.grad.array
    if g.shape != x.array.shape or g.dtype != x.array.dtype:
        raise GradcheckError(f"gradcheck of {what}: the gradient of {name} has shape {g.shape} and dtype {g.dtype}, the input has "
                             f"shape {x.array.shape} and dtype {x.array.dtype}; they must be equal")
    return _host(x.grad)


def _require_same_output(run, outputs, what):
    for out, again in zip(outputs, _outputs(run)):
        if not np.array_equal(_host(out), again, equal_nan=True):
            raise GradcheckError(f"gradcheck of {what}: the same inputs gave two different outputs, and differences of them mean "
                                 f"nothing; seed randomness inside the function (manual_seed(0)), or switch dropout off with eval()")


def _require_unchanged(before, what):
    for name, x, value in before:
        if not np.array_equal(_host(x), value, equal_nan=True):
            raise GradcheckError(f"gradcheck of {what}: {name} was changed by forward or backward; an operation must not write into "
                                 f"its inputs, work on a copy")


def _checked_leaves(names):
    """The (name, tensor) pairs to differentiate, each tensor once; ValueError where there is none or one cannot be checked."""
    leaves = list({id(x): (name, x) for name, x in reversed(names) if x.requires_grad}.values())[::-1]
    if not leaves:
        raise ValueError("gradcheck: expected at least one input with requires_grad=True, got none; "
                         "make one with randn(3, 4, dtype=float64, requires_grad=True)")
    for name, x in leaves:
        if x.array.dtype != np.float64:
            raise ValueError(f"gradcheck: {name} has dtype {x.dtype}; differences with a step of 1e-6 need float64, in float32 they are "
                             f"mostly rounding. Make it with dtype=float64, or call .double() on the tensor or module")
        if x.array.size and any(n > 1 and step == 0 for n, step in zip(x.array.shape, x.array.strides)):
            raise ValueError(f"gradcheck: elements of {name} share memory (it was expanded), so that one cannot be moved "
                             f"alone; pass .contiguous() or expand inside the function")
    return leaves


# --- what may be wrong ---------------------------------------------------------------------------------------------

def _likely_mistake(gradient, reference, shape):
    """One sentence on the mistakes that give this pair of arrays."""
    if not np.isfinite(gradient).all() or not np.isfinite(reference).all():
        return "There are NaN or infinite values: look for 0/0, log(0), or inf − inf; mask before exp and not after."
    if not gradient.any():
        return ("Backward gives zeros: is the graph cut (.detach(), .data, no_grad), or does backward return None or "
                "zeros for this input?")
    ratio = gradient @ reference / (reference @ reference or 1)
    if _same(ratio, -1) and _same(gradient, -reference):
        return "It is the negative of the right one: a sign is flipped."
    if len(reference) > 1 and _same(gradient, ratio * reference):
        return f"It is {ratio:.6g} times the right one: a constant factor, such as a mean for a sum, a missing scale or ½."
    if len(reference) > 1 and _same(np.sort(gradient), np.sort(reference)):
        return "It holds the right numbers in other places: an axis is transposed, flipped or reshaped the wrong way."
    if _misses_a_sum(gradient - reference, shape):
        return ("It is off by the same amount along an axis: a term with a sum or mean over that axis is missing (as the −Σ of "
                "softmax or the means of LayerNorm).")
    if 0 < np.mean(abs(gradient - reference) > 1e-3 * abs(reference) + 1e-5) < 0.5:
        return ("Only some elements are wrong: look for a kink near the input, for repeated indices that overwrite and do not add, or "
                "for a wrong mask.")
    return ("Look for a wrong derivative, a missing product-rule term, a missing factor dy, or gradients returned "
            "in the wrong order.")


def _same(a, b):
    return np.allclose(a, b, rtol=1e-3, atol=1e-6)


def _misses_a_sum(difference, shape):
    """True if the difference is constant along some axis."""
    if difference.size != np.prod(shape):       # a sample or a direction tells nothing of axes
        return False
    difference = difference.reshape(shape)
    return any(n > 1 and _same(difference, difference.mean(axis=i, keepdims=True)) for i, n in enumerate(shape))
