"""tinygrad_tf: the Transformer textbook that runs. An autograd library from scratch on NumPy, under PyTorch's names.

    import tinygrad_tf as torch
    import tinygrad_tf.nn as nn
    import tinygrad_tf.nn.functional as F

Reading order: backend, dtypes, autograd (the engine), ops/ (forward above backward), tensor, nn/, models/.
"""
from math import e, inf, nan, pi

from . import backend, dtypes, random
from ._version import __version__
from .autograd import Function, enable_grad, is_grad_enabled, no_grad, set_grad_enabled
from .backend import device, get_default_device, set_default_device
from .dtypes import (dtype, float16, float32, float64, get_default_dtype, int8, int16, int32, int64, set_default_dtype, uint8)
from .random import Generator, default_generator, get_rng_state, initial_seed, manual_seed, seed, set_rng_state
from .tensor import Tensor
from .creation import (allclose, arange, as_tensor, bernoulli, can_cast, empty, empty_like, equal, eye, finfo, from_numpy, full, full_like,
                       iinfo, is_floating_point, is_tensor, isclose, linspace, max, min, multinomial, normal, numel, ones, ones_like,
                       promote_types, rand, rand_like, randint, randint_like, randn, randn_like, randperm, result_type, sort, tensor,
                       topk, zeros, zeros_like)
from .ops.activation import erf, relu
from .ops.arithmetic import (abs_ as abs, add, addcdiv, addcmul, bitwise_and, bitwise_not, bitwise_or, bitwise_xor, ceil, clamp, clamp_max,
                             clamp_min, cos, div, eq, exp, floor, floor_divide, ge, gt, isfinite, isinf, isnan, le, lerp, log, log1p,
                             logical_and, logical_not, logical_or, logical_xor, lt, maximum, minimum, mul, ne, neg, pow, reciprocal,
                             remainder, round, rsqrt, sigmoid, sign, sin, sqrt, square, sub, tanh, trunc)
from .ops.index import (argsort, bincount, gather, getitem, index_add, index_select, isin, masked_fill, masked_select, nonzero, scatter,
                        scatter_add_ as scatter_add, searchsorted, take_along_dim, unique, where)
from .ops.linear import bmm, dot, einsum, matmul, mm, mv, outer
from .ops.reduce import (all_ as all, amax, amin, any_ as any, argmax, argmin, count_nonzero, cumsum, mean, norm, prod, std, sum, var)
from .ops.shape import (broadcast_to, cat, chunk, clone, diagonal, flatten, flip, meshgrid, movedim, permute, repeat_interleave, reshape,
                        roll, split, squeeze, stack, t, tile, transpose, tril, triu, unbind, unflatten, unsqueeze)
from .ops.softmax import log_softmax, logsumexp, softmax
from .size import Size
from . import nn, optim
from .gradcheck import gradcheck

bool, int, long, short, float, double, half = (dtypes.bool_, dtypes.int32, dtypes.int64, dtypes.int16, dtypes.float32, dtypes.float64,
                                               dtypes.float16)
concat, concatenate, absolute, negative, multiply, subtract, divide = cat, cat, abs, neg, mul, sub, div
ge, greater_equal, gt, greater, le, less_equal, lt, less, ne, not_equal = ge, ge, gt, gt, le, le, lt, lt, ne, ne
swapaxes = transpose
newaxis = None

