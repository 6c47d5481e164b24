"""Layers: parameters, their initial values, and one line of `functional` each."""
import math
import numbers

from ..arguments import checked_probability
from ..creation import empty, ones, zeros
from ..tensor import Tensor
from . import functional as F
from . import init
from .module import Module, Parameter


class Identity(Module):
    """y = x. Takes and ignores any arguments, so that it can stand in for any layer."""

    def __init__(self, *args, **kwargs):
        super().__init__()

    def forward(self, x):
        return x


class Linear(Module):
    """y = x Wᵀ + b.    x: [..., in]  W: [out, in]  b: [out]  y: [..., out]; both uniform in ±1/√in at first.   (guide 3)"""

    def __init__(self, in_features, out_features, bias=True, device=None, dtype=None):
        super().__init__()
        self.in_features, self.out_features = _size("in_features", in_features), _size("out_features", out_features)
        self.weight = Parameter(empty(out_features, in_features, device=device, dtype=dtype))
        self.register_parameter("bias", Parameter(empty(out_features, device=device, dtype=dtype)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self):
        init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
            init.uniform_(self.bias, -bound, bound)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self):
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Embedding(Module):
    """y = W[ids].    ids: integers [...]  W: [num_embeddings, embedding_dim], normal at first  y: [..., embedding_dim]

    The row of `padding_idx` starts at zero and never gets a gradient. Ids out of range raise IndexError.   (guide 9.1)
    """

    def __init__(self, num_embeddings, embedding_dim, padding_idx=None, *, device=None, dtype=None):
        super().__init__()
        self.num_embeddings, self.embedding_dim = _size("num_embeddings", num_embeddings), _size("embedding_dim", embedding_dim)
        self.padding_idx = _row("padding_idx", padding_idx, num_embeddings)
        self.weight = Parameter(empty(num_embeddings, embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def from_pretrained(cls, embeddings, freeze=True, padding_idx=None):
        """A layer around a given table [num_embeddings, embedding_dim], which is not copied."""
        if embeddings.ndim != 2:
            raise ValueError(f"Embedding: a table [num_embeddings, embedding_dim] is expected, got shape {tuple(embeddings.shape)}")
        layer = cls(0, embeddings.shape[1])
        layer.num_embeddings, layer.weight = embeddings.shape[0], Parameter(embeddings, requires_grad=not freeze)
        layer.padding_idx = _row("padding_idx", padding_idx, layer.num_embeddings)
        return layer

    def reset_parameters(self):
        init.normal_(self.weight)
        if self.padding_idx is not None:
            init.zeros_(self.weight.detach()[self.padding_idx])

    def forward(self, ids):
        return F.embedding(ids, self.weight, self.padding_idx)

    def extra_repr(self):
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


class LayerNorm(Module):
    """y = (x − mean) / √(var + eps) · γ + β over the last axes, those of `normalized_shape`.   (guide 9.3)"""

    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, bias=True, device=None, dtype=None):
        super().__init__()
        self.normalized_shape, self.eps, self.elementwise_affine = _shape(normalized_shape), eps, elementwise_affine
        options = {"device": device, "dtype": dtype}
        self.register_parameter("weight", Parameter(ones(self.normalized_shape, **options)) if elementwise_affine else None)
        self.register_parameter("bias", Parameter(zeros(self.normalized_shape, **options)) if elementwise_affine and bias else None)

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self):
        return (f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}, "
                f"bias={self.bias is not None}")


class RMSNorm(Module):
    """y = x / √(mean(x²) + eps) · w over the last axes; eps=None is the dtype's machine epsilon.   (guide 10.2)"""

    def __init__(self, normalized_shape, eps=None, elementwise_affine=True, device=None, dtype=None):
        super().__init__()
        self.normalized_shape, self.eps, self.elementwise_affine = _shape(normalized_shape), eps, elementwise_affine
        weight = Parameter(ones(self.normalized_shape, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self):
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class Dropout(Module):
    """In training: each element is 0 with probability p, else x / (1 − p). In evaluation: y = x.   (guide 9.6)"""

    def __init__(self, p=0.5, inplace=False):
        super().__init__()
        self.p, self.inplace = checked_probability("Dropout", "p", p), inplace

    def forward(self, x):
        return F.dropout(x, self.p, self.training, self.inplace)

    def extra_repr(self):
        return f"p={self.p}, inplace={self.inplace}"


class Flatten(Module):
    """The axes from start_dim to end_dim become one."""

    def __init__(self, start_dim=1, end_dim=-1):
        super().__init__()
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, x):
        return x.flatten(self.start_dim, self.end_dim)

    def extra_repr(self):
        return f"start_dim={self.start_dim}, end_dim={self.end_dim}"


# --- checks -------------------------------------------------------------------------------------------------------

def _size(name, size):
    if isinstance(size, Tensor) or isinstance(size, bool) or not isinstance(size, numbers.Integral):
        raise TypeError(f"{name} must be an int, got {type(size).__name__} {size!r}")
    if size < 0:
        raise RuntimeError(f"{name} must not be negative, got {size}")
    return int(size)


def _shape(normalized_shape):
    """The sizes of the axes that a norm runs over, as a tuple; an int is the last axis alone."""
    sizes = (normalized_shape,) if isinstance(normalized_shape, numbers.Integral) else normalized_shape
    return tuple(_size("normalized_shape", size) for size in sizes)


def _row(name, index, rows):
    """A row number, where negative ones count from the end; None stays None."""
    if index is None:
        return None
    if not -rows <= index < rows:
        raise ValueError(f"Embedding: {name.capitalize()} must be within num_embeddings, got {name}={index} for {rows} rows")
    return index % rows
