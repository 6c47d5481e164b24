"""Activations as layers."""
from . import functional as F
from .module import Module


class _InPlace(Module):
    """An activation that may write its result over x."""

    def __init__(self, inplace=False):
        super().__init__()
        self.inplace = inplace

    def extra_repr(self):
        return "inplace=True" if self.inplace else ""


class ReLU(_InPlace):
    """y = max(x, 0)"""

    def forward(self, x):
        return F.relu(x, self.inplace)


class ReLUSquared(Module):
    """y = max(x, 0)²"""

    def forward(self, x):
        return F.relu_squared(x)


class LeakyReLU(_InPlace):
    """y = x where x > 0, else negative_slope · x"""

    def __init__(self, negative_slope=0.01, inplace=False):
        super().__init__(inplace)
        self.negative_slope = negative_slope

    def forward(self, x):
        return F.leaky_relu(x, self.negative_slope, self.inplace)

    def extra_repr(self):
        return f"negative_slope={self.negative_slope}" + (", inplace=True" if self.inplace else "")


class GELU(Module):
    """y = x · Φ(x), exact or by its tanh approximation.   (guide 9.2)"""

    def __init__(self, approximate="none"):
        super().__init__()
        self.approximate = approximate

    def forward(self, x):
        return F.gelu(x, self.approximate)

    def extra_repr(self):
        return f"approximate={self.approximate!r}"


class SiLU(_InPlace):
    """y = x · σ(x)   (guide 10.3)"""

    def forward(self, x):
        return F.silu(x, self.inplace)


class GLU(Module):
    """y = a · σ(b), a and b the halves of x along one axis: PyTorch's layer, which has no weights.   (guide 9.2)

    The feed-forward network around it is `GatedFeedForward`.
    """

    def __init__(self, dim=-1):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return F.glu(x, self.dim)

    def extra_repr(self):
        return f"dim={self.dim}"


class Tanh(Module):
    """y = tanh x"""

    def forward(self, x):
        return F.tanh(x)


class Sigmoid(Module):
    """y = 1 / (1 + e⁻ˣ)"""

    def forward(self, x):
        return F.sigmoid(x)


class Softmax(Module):
    """y_i = e^(x_i) / Σ_j e^(x_j) along one axis   (guide 4.2)"""

    def __init__(self, dim=None):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return F.softmax(x, self.dim)

    def extra_repr(self):
        return f"dim={self.dim}"


class LogSoftmax(Softmax):
    """y_i = x_i − ln Σ_j e^(x_j) along one axis"""

    def forward(self, x):
        return F.log_softmax(x, self.dim)


ACTIVATIONS = {"gelu": GELU, "gelu_tanh": lambda: GELU("tanh"), "silu": SiLU, "relu": ReLU, "relu_squared": ReLUSquared,
               "sigmoid": Sigmoid}      # what a feed-forward network can be told by name
