"""Quantisation-aware training: the forward pass sees rounded weights, the optimizer the ones that are not (guide 11.3).

    model = prepare_qat(model, Scheme(3, granularity="group", group_size=32))
    …train as ever: the straight-through estimator brings gradients to the weights in float…
    model = convert(model)              # plain layers again, with rounded weights
"""
import copy

from .. import nn
from ..arguments import described
from ..autograd import no_grad
from ..nn import functional as F
from ..ops.quantize import Scheme, fake_quantize, limits, parts_shape, scale_and_zero
from .modules import is_kept, kept_names, replaced
from .observers import MovingAverageMinMaxObserver, Observer


class FakeQuantize(nn.Module):
    """x rounded to the levels that an observer finds, with the gradient of `tinygrad_tf.ops.quantize.FakeQuantize`.

    In training mode the observer looks at each x first; in evaluation its scale stays. PyTorch's has switches for the two instead.
    """

    def __init__(self, observer):
        super().__init__()
        if not isinstance(observer, Observer):
            raise TypeError(f"FakeQuantize: expected an Observer, got {described(observer)}")
        self.observer = observer

    def forward(self, x):
        if self.training:
            self.observer(x)
        return fake_quantize(x, self.observer.scheme, *self.observer.calculate_qparams()) if x.numel() else x


class _Rounded:
    """A layer whose weight is rounded in each forward pass, by its own limits of that moment: there is nothing to remember or to save."""

    def weight_qparams(self):
        """(scale, zero point) of the weight as it is now: two arrays."""
        return scale_and_zero(*self.limits_of(self.weight.array, self.scheme), self.scheme, self.scale_dtype)

    def rounded_weight(self):
        """s · (q − z), of which the gradient goes straight through to the weight."""
        return fake_quantize(self.weight, self.scheme, *self.weight_qparams())

    def extra_repr(self):
        return f"{super().extra_repr()}, {self.scheme}"


class QATLinear(_Rounded, nn.Linear):
    """y = x̂ Ŵᵀ + b,  Ŵ = W rounded,  x̂ = x, rounded where there is an `input_quantizer`."""

    def forward(self, x):
        x = x if self.input_quantizer is None else self.input_quantizer(x)
        return F.linear(x, self.rounded_weight(), self.bias)


class QATEmbedding(_Rounded, nn.Embedding):
    """y = Ŵ[ids],  Ŵ = W rounded."""

    def forward(self, ids):
        return F.embedding(ids, self.rounded_weight(), self.padding_idx)


ROUNDED = {nn.Linear: QATLinear, nn.Embedding: QATEmbedding}
PLAIN = {rounded: plain for plain, rounded in ROUNDED.items()}


def prepare_qat(model, scheme, activations=None, *, limits_of=limits, scale_dtype=None, keep=(), inplace=False):
    """The model with each Linear and Embedding replaced by one that rounds its weight in every forward pass.

    activations: None, or a Scheme or an Observer for the inputs of each Linear, which are then rounded too.
    limits_of: `limits`, `mse_limits`, or another function (x, scheme) → (low, high). scale_dtype: what scales are rounded to.
    keep: names of modules that stay as they are, with all below them: `["lm_head", "embedding"]`.
    inplace=False copies the model first. Parameters, their names and ties stay: an optimizer made before goes on working in place, and
    a state dict of the float model fits where activations is None. Subclasses of Linear and Embedding stay as they are,
    and so do weights outside of them, as in nn.MultiheadAttention.
    ValueError where a weight does not divide into groups, where nothing is to be replaced, and where `keep` parts tied weights.
    """
    _check_arguments(model, scheme, activations, limits_of)
    model = model if inplace else copy.deepcopy(model)
    found = _found(model, ROUNDED, kept_names("prepare_qat", model, keep))
    _check_weights(model, found, scheme)
    return replaced(model, {id(layer): _as_rounded(layer, scheme, activations, limits_of, scale_dtype) for layer in found.values()})


def convert(model, inplace=False):
    """Plain layers again, whose weights are the rounded ones, once and for all; activations are no longer rounded.

    inplace=False copies the model first. ValueError where `prepare_qat` has not been.
    """
    model = model if inplace else copy.deepcopy(model)
    found = _found(model, PLAIN, ())
    if not found:
        raise ValueError(f"convert: {type(model).__name__} has no layer of prepare_qat, so there is nothing to convert")
    rounded = {id(layer.weight): layer for layer in found.values()}         # a tied weight once: rounding twice may go further
    with no_grad():
        for layer in rounded.values():
            layer.weight.copy_(layer.rounded_weight())
    return replaced(model, {id(layer): _as_plain(layer) for layer in found.values()})


def _as_rounded(layer, scheme, activations, limits_of, scale_dtype):
    rounded = _twin(layer, ROUNDED[type(layer)])
    rounded.scheme, rounded.limits_of, rounded.scale_dtype = scheme, limits_of, scale_dtype
    if isinstance(rounded, QATLinear):
        rounded.input_quantizer = None if activations is None else _input_quantizer(activations).train(layer.training)
        if activations is not None:
            rounded.input_quantizer.to(layer.weight.device)
    return rounded


def _input_quantizer(activations):
    return FakeQuantize(MovingAverageMinMaxObserver(activations) if isinstance(activations, Scheme) else copy.deepcopy(activations))


def _as_plain(layer):
    plain = _twin(layer, PLAIN[type(layer)])
    for name in "scheme", "limits_of", "scale_dtype", "input_quantizer":
        plain.__dict__.pop(name, None)
    return plain


def _twin(layer, cls):
    """The layer as one of another class: the same parameters, hooks and mode, and no children."""
    twin = cls.__new__(cls)
    twin.__dict__.update(layer.__dict__, _modules={})
    return twin


def _found(model, kinds, kept):
    """{dotted name: layer} of the layers of these kinds, one with several names under each."""
    return {path: module for path, module in model.named_modules(remove_duplicate=False)
            if type(module) in kinds and not is_kept(path, kept)}


# --- checks -----------------------------------------------------------------------------------------------------------

def _check_arguments(model, scheme, activations, limits_of):
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepare_qat: expected a Module, got {described(model)}")
    if not isinstance(scheme, Scheme):
        raise TypeError(f"prepare_qat: expected a Scheme for the weights, got {described(scheme)}; e.g. Scheme(4, granularity='channel')")
    if not (activations is None or isinstance(activations, (Scheme, Observer))):
        raise TypeError(f"prepare_qat: activations must be None, a Scheme or an Observer, got {described(activations)}")
    if not callable(limits_of):
        raise TypeError(f"prepare_qat: limits_of must be a function of an array and a scheme, got {described(limits_of)}")


def _check_weights(model, found, scheme):
    """ValueError, before anything is replaced."""
    if not found:
        raise ValueError(f"prepare_qat: {type(model).__name__} has no Linear and no Embedding to replace; was it prepared before?")
    for path, layer in found.items():
        try:
            parts_shape(layer.weight.array.shape, scheme)
        except ValueError as error:
            raise ValueError(f"prepare_qat: {path}.weight: {error}") from None
    rounded = {id(layer.weight): f"{path}.weight" for path, layer in found.items()}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, p in module._parameters.items():
            if id(p) in rounded and path not in found:
                raise ValueError(f"prepare_qat: {rounded[id(p)]} is to be rounded, but it is tied to {path}.{name}, which is not; "
                                 f"keep both or neither")
