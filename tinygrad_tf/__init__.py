"""tinygrad_tf: the Transformer textbook that runs. An autograd library from scratch on NumPy, under PyTorch's names.

    import tinygrad_tf as torch
    import tinygrad_tf.nn as nn
    import tinygrad_tf.nn.functional as F

make a tensor      tensor arange zeros ones full eye rand randn randint from_numpy
its numbers        + - * / ** @, exp log sqrt tanh clamp round, comparisons, where, isfinite
its shape          reshape transpose permute flatten cat stack split chunk triu, and x[...] with slices, None, tensors
sums and order     sum mean var norm amax cumsum, softmax logsumexp, max sort topk argsort
choose             gather scatter index_add masked_fill index_select
multiply           matmul bmm outer einsum
differentiate      Tensor.backward, no_grad, gradcheck
random             manual_seed rand randn randperm bernoulli multinomial: PyTorch's streams, number for number
keep               save load: tensors and plain values, never pickle
layers             nn.Linear nn.Embedding nn.LayerNorm nn.MultiHeadAttention nn.TransformerBlock; nn.functional
train              optim.AdamW optim.lr_scheduler, autocast amp.GradScaler; tinygrad_tf.training.Trainer
models             tinygrad_tf.models.MiniGPT; tinygrad_tf.generation

    >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> (w * w).sum().backward()
    >>> w.grad
    tensor([2., 4.])

The source is written to be read: autograd.py is the engine, ops/ holds each operation with its backward below its
forward, and docs/README.md has the reading order. docs/names.md says which of PyTorch's names there are, and what differs.
"""
from math import e, inf, nan, pi
from types import ModuleType as _ModuleType

from . import backend, dtypes, random
from ._version import __version__
from .anomaly import is_anomaly_check_nan_enabled, is_anomaly_enabled
from .arguments import absent, publish
from .autograd import Function, enable_grad, inference_mode, is_grad_enabled, no_grad, set_grad_enabled
from .backend import device, get_default_device, set_default_device, set_flush_denormal
from .dtypes import (bfloat16, dtype, float16, float32, float64, get_default_dtype, int8, int16, int32, int64, set_default_dtype, uint8)
from .random import Generator, default_generator, initial_seed, manual_seed, seed
from .size import Size
from .tensor import Tensor
from .creation import (allclose, arange, as_tensor, bernoulli, can_cast, empty, empty_like, equal, eye, finfo, from_numpy, full, full_like,
                       get_rng_state, iinfo, is_floating_point, is_tensor, isclose, linspace, max, min, multinomial, normal, numel, ones,
                       ones_like, promote_types, rand, rand_like, randint, randint_like, randn, randn_like, randperm, result_type,
                       set_rng_state, sort, tensor, topk, zeros, zeros_like)
from .ops.activation import erf, relu
from .ops.arithmetic import (abs_ as abs, add, addcdiv, addcmul, bitwise_and, bitwise_not, bitwise_or, bitwise_xor, ceil, clamp, clamp_max,
                             clamp_min, cos, div, eq, exp, floor, floor_divide, ge, gt, isfinite, isinf, isnan, le, lerp, log, log1p,
                             logical_and, logical_not, logical_or, logical_xor, lt, maximum, minimum, mul, ne, neg, pow, reciprocal,
                             remainder, round, rsqrt, sigmoid, sign, sin, sqrt, square, sub, tanh, trunc)
from .ops.index import (argsort, bincount, gather, index_add, index_select, isin, masked_fill, masked_select, nonzero, scatter,
                        scatter_add_ as scatter_add, searchsorted, take_along_dim, unique, where)
from .ops.linear import bmm, dot, einsum, matmul, mm, mv, outer
from .ops.quantize import fake_quantize_per_channel_affine, fake_quantize_per_tensor_affine
from .ops.reduce import (all_ as all, amax, amin, any_ as any, argmax, argmin, count_nonzero, cumsum, mean, norm, prod, std, sum, var)
from .ops.sdpa import sdpa_backend
from .ops.shape import (broadcast_to, cat, chunk, clone, diagonal, flatten, flip, meshgrid, movedim, permute, repeat_interleave, reshape,
                        roll, split, squeeze, stack, t, tile, transpose, tril, triu, unbind, unflatten, unsqueeze)
from .ops.softmax import log_softmax, logsumexp, softmax
from . import amp, cuda, nn, optim, utils
from .amp import autocast, clear_autocast_cache, get_autocast_dtype, is_autocast_cache_enabled, is_autocast_enabled
from .gradcheck import gradcheck
from .serialization import load, save

bool, int, long, short, float, double, half = (dtypes.bool_, dtypes.int32, dtypes.int64, dtypes.int16, dtypes.float32, dtypes.float64,
                                               dtypes.float16)
concat, concatenate, absolute, negative, multiply, subtract, divide = cat, cat, abs, neg, mul, sub, div
greater_equal, greater, less_equal, less, not_equal, true_divide = ge, gt, le, lt, ne, div
swapaxes, swapdims, moveaxis = transpose, transpose, movedim
newaxis = None

publish(globals())
__all__ = [name for name, thing in globals().items() if not name.startswith("_") and thing not in (absent, publish)
           and (thing in (amp, cuda, nn, optim, utils) or not isinstance(thing, _ModuleType))]

__getattr__ = absent(__name__)
