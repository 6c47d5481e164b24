"""Initial values, written into a tensor in place and not recorded; each function returns the tensor.

fan_in is the number of inputs that one output sums over, fan_out the reverse: for a weight [out, in], `in` and `out`.
A sum of fan_in terms with independent weights of variance σ² has fan_in · σ² times the variance of one input: Xavier
(Glorot and Bengio, 2010) and Kaiming (He et al., 2015) choose σ so that signals, or gradients, keep their size.
"""
import contextlib
import math
import threading
import warnings

from ..arguments import publish
from ..autograd import no_grad
from ..creation import eye, ones_like

_skipping = threading.local()


@contextlib.contextmanager
def skipped():
    """Inside, this thread draws no first weights: they hold anything until they are loaded, and the random stream stays where it is.

        with nn.init.skipped():
            model = MiniGPT(…)
        model.load_state_dict(…)                # of every weight
    """
    before, _skipping.now = getattr(_skipping, "now", False), True
    try:
        yield
    finally:
        _skipping.now = before


@no_grad
def uniform_(tensor, a=0.0, b=1.0, generator=None):
    """Uniform in [a, b)."""
    return tensor if getattr(_skipping, "now", False) else tensor.uniform_(a, b, generator=generator)


@no_grad
def normal_(tensor, mean=0.0, std=1.0, generator=None):
    return tensor if getattr(_skipping, "now", False) else tensor.normal_(mean, std, generator=generator)


@no_grad
def constant_(tensor, val):
    return tensor.fill_(val)


def ones_(tensor):
    return constant_(tensor, 1.0)


def zeros_(tensor):
    return constant_(tensor, 0.0)


@no_grad
def eye_(tensor):
    """The identity matrix, or as much of it as a [rows, columns] tensor holds."""
    if tensor.ndim != 2:
        raise ValueError(f"eye_: only tensors with 2 dimensions are supported, got shape {tuple(tensor.shape)}")
    return tensor.copy_(eye(*tensor.shape))


@no_grad
def trunc_normal_(tensor, mean=0.0, std=1.0, a=-2.0, b=2.0, generator=None):
    """Normal, with the values outside [a, b] drawn again until none is left; a, b are values and not multiples of std."""
    if not (std > 0 and a < b):
        raise ValueError(f"trunc_normal_: expected std > 0 and a < b, got std={std}, a={a}, b={b}")
    if mean < a - 2 * std or mean > b + 2 * std:
        warnings.warn("mean is more than 2 std from [a, b] in nn.init.trunc_normal_. "
                      "The distribution of values may be incorrect.", stacklevel=2)
    share = _normal_cdf((b - mean) / std) - _normal_cdf((a - mean) / std)
    fill = _redraw_normal if share > 0.3 else _redraw_uniform      # of normals, too few would fall inside
    on_host = fill(tensor.detach().cpu(), mean, std, a, b, generator)       # a GPU's logarithm would accept other candidates
    return tensor.copy_(on_host) if tensor.is_cuda else tensor


def _normal_cdf(x):
    return (1 + math.erf(x / math.sqrt(2))) / 2


def _redraw_normal(tensor, mean, std, a, b, generator):
    tensor.normal_(mean, std, generator=generator)
    while (outside := (tensor < a) | (tensor > b)).any():
        again = tensor.detach().clone().normal_(mean, std, generator=generator)
        tensor.copy_(again.where(outside, tensor))
    return tensor


def _redraw_uniform(tensor, mean, std, a, b, generator):
    """Candidates uniform in [a, b], each kept with probability density(candidate) / density(the mode within [a, b])."""
    def log_density(x):
        return -0.5 * ((x - mean) / std) ** 2

    peak = log_density(max(a, min(mean, b)))
    waiting = ones_like(tensor, dtype=bool)
    while waiting.any():
        candidate = tensor.detach().clone().uniform_(a, b, generator=generator)
        tensor.copy_(candidate.where(waiting, tensor))
        coin = tensor.detach().clone().uniform_(generator=generator).log()
        waiting = waiting & (coin > log_density(candidate) - peak)
    return tensor


def _calculate_fan_in_and_fan_out(tensor):
    """(fan_in, fan_out) of a weight [out, in, *kernel]: both times the kernel's size."""
    if tensor.ndim < 2:
        raise ValueError(f"fan in and fan out can not be computed for a tensor with fewer than 2 dimensions, "
                         f"got shape {tuple(tensor.shape)}")
    kernel = math.prod(tensor.shape[2:])
    return tensor.shape[1] * kernel, tensor.shape[0] * kernel


def calculate_gain(nonlinearity, param=None):
    """What to multiply std by before a nonlinearity that shrinks the signal; `param` is LeakyReLU's negative slope."""
    gains = {"linear": 1, "sigmoid": 1, "tanh": 5 / 3, "relu": math.sqrt(2), "selu": 3 / 4,
             **{f"conv{'_transpose' * t}{n}d": 1 for n in (1, 2, 3) for t in (0, 1)}}
    if nonlinearity == "leaky_relu":
        slope = 0.01 if param is None else param
        if isinstance(slope, bool) or not isinstance(slope, (int, float)):
            raise ValueError(f"negative_slope {param} not a valid number")
        return math.sqrt(2 / (1 + slope ** 2))
    if nonlinearity not in gains:
        raise ValueError(f"Unsupported nonlinearity {nonlinearity}; there are {', '.join([*gains, 'leaky_relu'])}")
    return gains[nonlinearity]


def xavier_normal_(tensor, gain=1.0, generator=None):
    """Normal with std = gain · √(2 / (fan_in + fan_out))."""
    return normal_(tensor, 0.0, _xavier_std(tensor, gain), generator)


def xavier_uniform_(tensor, gain=1.0, generator=None):
    """Uniform with the same std: in [−√3 · std, √3 · std)."""
    bound = math.sqrt(3.0) * _xavier_std(tensor, gain)
    return uniform_(tensor, -bound, bound, generator)


def _xavier_std(tensor, gain):
    return gain * math.sqrt(2.0 / max(sum(_calculate_fan_in_and_fan_out(tensor)), 1))


def kaiming_normal_(tensor, a=0, mode="fan_in", nonlinearity="leaky_relu", generator=None):
    """Normal with std = gain / √fan, where a is LeakyReLU's negative slope."""
    return normal_(tensor, 0.0, _kaiming_std(tensor, a, mode, nonlinearity), generator)


def kaiming_uniform_(tensor, a=0, mode="fan_in", nonlinearity="leaky_relu", generator=None):
    """Uniform with the same std. `Linear` uses a = √5, which makes it uniform in ±1/√fan_in."""
    bound = math.sqrt(3.0) * _kaiming_std(tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound, generator)


def _kaiming_std(tensor, a, mode, nonlinearity):
    fans = dict(zip(("fan_in", "fan_out"), _calculate_fan_in_and_fan_out(tensor)))
    if str(mode).lower() not in fans:
        raise ValueError(f"Mode {mode} not supported, please use one of ['fan_in', 'fan_out']")
    return calculate_gain(nonlinearity, a) / math.sqrt(max(fans[str(mode).lower()], 1))


publish(globals())
