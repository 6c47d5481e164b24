"""`Tensor`: an array, its gradient, and the node that made it. Each method is one line onto an operation."""

import numpy as np

from . import autograd, dtypes
from .arguments import public, require_tensors
from .autograd import Version, constant
from .backend import array_module, check_one_device, device_of, is_writable, on_one_device, same_place, to_device
from .backend import device as Device
from .display import tensor_repr
from .dtypes import is_bfloat16, is_float
from .ops import activation, arithmetic, index, linear, reduce, softmax
from .ops import shape as shapes
from .random import chosen
from .size import Size, namedtuple_of


@autograd.register_tensor
class Tensor:
    """array: the numbers (NumPy or CuPy);  grad: a Tensor once backward has been here;  node: what made it, None for a leaf.

    `version` knows of in-place writes to the memory and is shared by all tensors that view it; `seen` is how many recorded
    ones this tensor knows of (autograd.py, "in-place writes"), None for one that has no history.
    """
    __slots__ = ("array", "_grad", "node", "_requires_grad", "version", "seen", "hooks", "__weakref__")
    __array_ufunc__ = None                      # so that np.float64(2) * tensor asks the tensor, not NumPy
    __hash__ = object.__hash__

    def __init__(self, data=(), dtype=None, requires_grad=False):
        from .creation import as_array
        self._set(as_array(data, dtype).copy(), None, Version())
        self.requires_grad_(requires_grad)

    def _set(self, array, node, version):
        self.array, self.node, self.version = array, node, version
        self.seen, self._requires_grad = version.recorded, node is not None
        self._grad = self.hooks = None
        return self

    @staticmethod
    def _wrap(array, node, version):
        """A tensor around this very array."""
        return object.__new__(Tensor)._set(array, node, version)

    # --- what it is ---------------------------------------------------------------------------------------------------
    shape = property(lambda self: Size(self.array.shape))
    dtype = property(lambda self: dtypes.of_array(self.array))
    device = property(lambda self: device_of(self.array))
    ndim = property(lambda self: self.array.ndim)
    itemsize = property(lambda self: self.array.itemsize)
    nbytes = property(lambda self: self.array.nbytes)
    is_leaf = property(lambda self: self.node is None)
    grad_fn = property(lambda self: self.node)
    is_cuda = property(lambda self: self.device.type == "cuda")
    T = property(lambda self: shapes.permute(self, *range(self.ndim)[::-1]))
    mT = property(lambda self: shapes.transpose_matrices(self))

    @property
    def data(self):
        """The same memory without history."""
        return self.detach()

    @data.setter
    def data(self, other):
        if other.array.shape != self.array.shape or other.array.dtype != self.array.dtype:
            raise RuntimeError(f"data: expected shape {tuple(self.shape)} and {self.dtype}, got {tuple(other.shape)} and {other.dtype}")
        self.take_memory(other)

    def take_memory(self, other):
        """From now on this tensor lies where `other` does; what it was computed from stays."""
        self.array, self.version, self.seen = other.array, other.version, other.version.recorded
        if self.requires_grad and self.node is None:
            self.version.add_leaf(self)

    @property
    def grad(self):
        """The gradient that backward has added up here; None before."""
        return self._grad

    @grad.setter
    def grad(self, grad):
        if grad is not None and not isinstance(grad, Tensor):
            raise TypeError(f"grad: expected a Tensor or None, got {type(grad).__name__}")
        if grad is not None and (grad.array.shape != self.array.shape or grad.array.dtype != self.array.dtype):
            raise RuntimeError(f"grad: a gradient has the shape and dtype of its tensor, {tuple(self.shape)} and {self.dtype}; "
                               f"assigned was one of {tuple(grad.shape)} and {grad.dtype}")
        if grad is not None:
            check_one_device("grad", [self.array, grad.array])
        self._grad = grad

    def size(self, dim=None): return self.shape if dim is None else self.array.shape[reduce.normalize_dim("size", dim, self.ndim)]
    def dim(self): return self.array.ndim
    def numel(self): return self.array.size
    def nelement(self): return self.array.size
    def element_size(self): return self.array.itemsize
    def stride(self, dim=None):
        strides = tuple(s // self.array.itemsize for s in self.array.strides)
        return strides if dim is None else strides[dim]
    def is_contiguous(self): return self.array.flags.c_contiguous
    def is_floating_point(self): return is_float(self.array.dtype)
    def data_ptr(self): return self.array.ctypes.data if device_of(self.array).type == "cpu" else self.array.data.ptr
    def __repr__(self): return tensor_repr(self)
    def __format__(self, spec): return format(self.item(), spec) if self.ndim == 0 else object.__format__(self, spec)

    def __len__(self):
        if self.ndim == 0:
            raise TypeError("len() of a 0-d tensor")
        return self.array.shape[0]

    def __iter__(self):
        if self.ndim == 0:
            raise TypeError("iteration over a 0-d tensor")
        return iter(shapes.unbind(self, 0))

    # --- as a Python value or a NumPy array ---------------------------------------------------------------------------
    def item(self):
        if self.array.size != 1:
            raise RuntimeError(f"item: a Tensor with {self.array.size} elements cannot be converted to a number "
                               f"(shape {tuple(self.shape)})")
        return self.array.item()

    def tolist(self): return self.array.tolist()
    def __float__(self): return float(self._only("float"))
    def __int__(self): return int(self._only("int"))

    def _only(self, kind):
        if self.array.size != 1:
            raise ValueError(f"{kind}: only one element tensors can be converted to Python scalars, this one has shape {tuple(self.shape)}")
        return self.array.item()

    def __index__(self):
        if self.array.dtype.kind not in "iub" or self.array.size != 1:
            raise TypeError(f"only integer tensors of a single element can be converted to an index, got {self.dtype} {tuple(self.shape)}")
        return int(self.array.item())

    def __bool__(self):
        if self.array.size != 1:
            raise RuntimeError(f"bool: a Tensor with {self.array.size} values is ambiguous; use .any() or .all()")
        return bool(self.item())

    def __contains__(self, value): return bool((self == value).any())

    def numpy(self):
        """The memory itself as a NumPy array, shared; CPU tensors without grad only."""
        if self.requires_grad:
            raise RuntimeError("numpy: can't be called on a Tensor that requires grad; use tensor.detach().numpy()")
        if self.device.type != "cpu":
            raise TypeError(f"numpy: can't convert a {self.device} tensor; use tensor.cpu().numpy()")
        if is_bfloat16(self.array):
            raise TypeError("numpy: got unsupported ScalarType BFloat16, which NumPy does not have; use tensor.float().numpy()")
        return self.array

    def __array__(self, dtype=None, copy=None):
        array = self.numpy()
        return array.astype(dtype) if dtype is not None and array.dtype != dtype else array.copy() if copy else array

    # --- the graph ----------------------------------------------------------------------------------------------------
    def backward(self, gradient=None, retain_graph=False, create_graph=False):
        """Adds the gradient of this tensor (a single number, or weighted by `gradient`) to `.grad` of every leaf below."""
        if create_graph:
            raise RuntimeError("backward: create_graph=True is not supported: gradients have no graph here, so there are no gradients of "
                               "gradients")
        autograd.backward(self, gradient, retain_graph)

    def detach(self):
        """The same memory, cut off from the graph."""
        alias = constant(self.array)
        alias.version, alias.seen = self.version, None      # it has no history that could go out of date
        return alias

    @property
    def requires_grad(self):
        """True where backward is to reach this tensor; assigning is `requires_grad_`."""
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, requires_grad):
        self.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad=True):
        if requires_grad and not is_float(self.array.dtype):
            raise RuntimeError(f"requires_grad: only Tensors of floating point dtype can require gradients, got {self.dtype}")
        if not requires_grad and self.node is not None:
            raise RuntimeError("requires_grad: can only be switched off for leaf tensors; use .detach()")
        self._requires_grad = bool(requires_grad)
        if requires_grad and self.node is None:
            self.version.add_leaf(self)
        return self

    def retain_grad(self):
        """Keeps `.grad` of a non-leaf tensor too."""
        if not self.requires_grad:
            raise RuntimeError("retain_grad: can't retain_grad on a Tensor that does not require grad")
        if self.node is not None:
            autograd.retain(self)

    def register_hook(self, hook):
        """`hook(grad)` runs whenever a gradient reaches this tensor; what it returns, if anything, replaces the gradient."""
        if not self.requires_grad:
            raise RuntimeError("register_hook: can't be used on a Tensor that does not require grad")
        holder = self if self.node is None else self.node
        holder.hooks = (holder.hooks or []) + [hook]
        return autograd.RemovableHook(holder, hook)

    def check_history(self):
        """Raises when a recorded in-place write through another tensor made this one's history untrue."""
        if self.seen is not None and self.seen != self.version.recorded:
            raise RuntimeError("this tensor shares memory with one that was written in place as part of a graph, so its own "
                               "history no longer holds; write through the tensor itself (x[i] = …), take the view after the write, or "
                               "write to a .clone()")

    # --- writing in place ---------------------------------------------------------------------------------------------
    def _write(self, op, *args, **kwargs):
        """This memory becomes op(self, …), and the history that of the result."""
        recording = autograd.is_grad_enabled()
        if recording and self.requires_grad and self.node is None:
            raise RuntimeError("a leaf Tensor that requires grad is being used in an in-place operation; "
                               "do it inside no_grad(), or on a .clone()")
        before = self
        if recording:
            self.check_history()
        if recording and any(isinstance(t, Tensor) and t.requires_grad for t in (self, *args)):
            before = Tensor._wrap(self.array.copy(), self.node, Version())      # what the node saves must be the old numbers
        result = autograd.without_autocast(op, before, *args, **kwargs)          # as in PyTorch: what is written keeps its type
        self._check_result(result)
        if result.node is not None and self.version.has_leaf():
            raise RuntimeError("a view of a leaf Tensor that requires grad is being used in an in-place operation; "
                               "do it inside no_grad(), or on a .clone() of the leaf")
        self._store(result.array)
        if result.node is not None:
            self._adopt(result.node)
        elif self.node is not None and recording:        # an operation without gradient: a constant from now on
            self._set_history(None)
        return self

    def _check_result(self, result):
        """A result fits into this memory if it has the same shape and no higher kind of number."""
        if result.array.shape != self.array.shape:
            raise RuntimeError(f"in-place: output with shape {tuple(self.shape)} doesn't match the broadcast shape {tuple(result.shape)}")
        if dtypes.category(result.array.dtype) > dtypes.category(self.array.dtype):
            raise RuntimeError(f"in-place: result type {result.dtype} can't be cast to the desired output type {self.dtype}")

    def _store(self, values):
        self._check_writable()
        self.array[...] = values
        self.version.wrote(self.array)

    def _check_writable(self):
        if not is_writable(self.array):
            raise RuntimeError("in-place: more than one element of this (expanded) tensor refers to one memory location, or the "
                               "memory is read-only; .clone() it first")

    def _adopt(self, node):
        if self.node is not None and self.node.retained:        # retain_grad means this tensor as it is at the end
            node.retained, self.node.retained = self.node.retained, None
        self._set_history(node)

    def _set_history(self, node):
        """This tensor is the result of `node` from now on; every other tensor of this memory has a history that is out of date."""
        self.node, self._requires_grad = node, node is not None
        self.version.recorded += 1
        self.seen = self.version.recorded

    def __setitem__(self, key, value):
        key = index.beside(self.array, index.as_index(key))
        if isinstance(value, Tensor) and not on_one_device([self.array, value.array]):
            if value.ndim and not index.is_basic(key):
                check_one_device("setitem with an index of tensors", [self.array, value.array])
            value = _move(value, self.device)           # as copy_ does; see docs/gpu.md
        if isinstance(value, Tensor) and self._just_written_through(value, key):
            self.seen = value.seen
        wants_gradient = self.requires_grad or isinstance(value, Tensor) and value.requires_grad
        if wants_gradient and autograd.is_grad_enabled():
            self._write(index.set_item, value, key)
        else:
            self._check_writable()
            index.write(self.array, autograd.array_of(value), key)
            self.version.wrote(self.array)

    def _just_written_through(self, part, key):
        """True when `part` is self[key] after an in-place write: Python runs x[key] += 1 as part = x[key]; part += 1; x[key] = part."""
        if part.version is not self.version or part.seen is None or self.seen != part.seen - 1 or not index.is_basic(key):
            return False
        mine = self.detach()[key]
        return (mine.data_ptr(), mine.shape, mine.stride()) == (part.data_ptr(), part.shape, part.stride())

    def copy_(self, other):
        require_tensors("copy_", other=other)
        self[...] = _move(other, self.device)
        return self
    def zero_(self): return self.fill_(0)
    def fill_(self, value):
        return self._write(index.masked_fill, constant(array_module(self.array).ones((), bool)), value)
    def _fill_with(self, numbers):
        """Random numbers drawn on the host, written in place."""
        self[...] = constant(to_device(np.asarray(numbers), self.device))
        return self

    def uniform_(self, a=0.0, b=1.0, *, generator=None):
        return self._fill_with(chosen(generator).uniform(self.array.shape, a, b, self.array.dtype))
    def normal_(self, mean=0.0, std=1.0, *, generator=None):
        return self._fill_with(chosen(generator).normal(self.array.shape, mean, std, self.array.dtype))
    def bernoulli_(self, p=0.5, *, generator=None):
        return self._fill_with(chosen(generator).bernoulli(p, self.array.shape))
    def exponential_(self, lambd=1.0, *, generator=None):
        return self._fill_with(chosen(generator).exponential(self.array.shape, lambd, self.array.dtype))
    def random_(self, low=0, high=None, *, generator=None):
        low, high = (0, low) if high is None else (low, high)
        return self._fill_with(chosen(generator).randint(low, high, self.array.shape))

    # --- copies and other types ---------------------------------------------------------------------------------------
    def to(self, *args, device=None, dtype=None, copy=False, non_blocking=False):
        """Another dtype, another device, or both: `.to("cuda")`, `.to(float16)`, `.to(other_tensor)`."""
        device, dtype = device_and_dtype(args, device, dtype)
        y = self if dtype is None else arithmetic.cast(self, dtypes.numpy_dtype(dtype))
        if device is not None:
            y = _move(y, Device(device))
        return y.clone() if copy and y is self else y

    def type(self, dtype=None):
        """PyTorch's name of this kind of tensor, `torch.FloatTensor`; with a dtype, the tensor in that dtype."""
        return f"torch.{dtypes.TENSOR_NAMES[self.dtype.name]}Tensor" if dtype is None else self.to(dtype)
    def type_as(self, other): return self.to(other.dtype)
    def float(self): return self.to(dtypes.float32)
    def double(self): return self.to(dtypes.float64)
    def half(self): return self.to(dtypes.float16)
    def bfloat16(self): return self.to(dtypes.bfloat16)
    def long(self): return self.to(dtypes.int64)
    def int(self): return self.to(dtypes.int32)
    def bool(self): return self.to(dtypes.bool_)
    def cpu(self): return self.to("cpu")
    def cuda(self, device=None): return self.to(f"cuda:{device}" if isinstance(device, (int,)) else device or "cuda")

    def __copy__(self):
        """Another tensor of the same memory, without history."""
        return self.detach().requires_grad_(self.requires_grad and self.node is None)

    def __deepcopy__(self, memo):
        if self.node is not None:
            raise RuntimeError("deepcopy: only leaf tensors can be copied; use .detach().clone() of a computed tensor")
        copied = self._wrap(self.array.copy(), None, Version())
        copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        copied.grad = None if self.grad is None else self.grad.__deepcopy__(memo)
        return copied

    def __reduce_ex__(self, protocol):
        raise TypeError("tensors are not pickled: use tinygrad_tf.save / load or safetensors, which hold numbers and run no code")

    def new_zeros(self, *size, dtype=None): return self._new(np.zeros, size, dtype)
    def new_ones(self, *size, dtype=None): return self._new(np.ones, size, dtype)
    def new_full(self, size, fill_value, dtype=None):
        from .creation import full
        return full(size, fill_value, dtype=dtype or self.dtype, device=self.device)
    def new_tensor(self, data, dtype=None):
        from .creation import tensor
        return tensor(data, dtype=dtype or self.dtype, device=self.device)
    def _new(self, make, size, dtype):
        made = constant(make(shapes.as_shape("new", size), dtypes.numpy_dtype(dtype) or self.array.dtype))
        return _move(made, self.device)

    # --- order (these return a pair) ----------------------------------------------------------------------------------
    def max(self, dim=None, keepdim=False): return _extreme(self, dim, keepdim, "argmax", arithmetic.maximum, reduce.amax)
    def min(self, dim=None, keepdim=False): return _extreme(self, dim, keepdim, "argmin", arithmetic.minimum, reduce.amin)
    def sort(self, dim=-1, descending=False, stable=False): return namedtuple_of("sort", *index.sort_pair(self, dim, descending))
    def topk(self, k, dim=-1, largest=True, sorted=True): return namedtuple_of("topk", *index.topk_pair(self, k, dim, largest))
    def view_as(self, other): return shapes.view(self, other.array.shape)
    def reshape_as(self, other): return shapes.reshape(self, other.array.shape)
    def allclose(self, other, rtol=1e-05, atol=1e-08, equal_nan=False):
        from .creation import allclose
        return allclose(self, other, rtol, atol, equal_nan)
    def equal(self, other):
        check_one_device("equal", [self.array, other.array])
        return self.array.shape == other.array.shape and bool((self.array == other.array).all())
    def multinomial(self, num_samples, replacement=False, *, generator=None):
        from .creation import multinomial
        return multinomial(self, num_samples, replacement, generator=generator)

    # --- operators ----------------------------------------------------------------------------------------------------
    def __pos__(self): return self


def _operator(op, reflected=False):
    """An operator that leaves operands it does not know to the other side, so that Python raises its usual TypeError.

    op: the class of the operation, or a function.
    """
    run, name = (op.apply, op.__name__.lower()) if isinstance(op, type) else (op, op.__name__.rstrip("_"))

    def method(self, other):
        if isinstance(other, _OPERANDS):
            return run(other, self) if reflected else run(self, other)
        if isinstance(other, np.ndarray):
            raise TypeError(f"{name}: a tensor and a NumPy array do not mix; make a tensor of the array with tinygrad_tf.from_numpy(...)")
        return NotImplemented
    return method


_OPERANDS = (Tensor, bool, int, float, np.generic)
for _name, _op in {"add": arithmetic.Add, "sub": arithmetic.Sub, "mul": arithmetic.Mul, "truediv": arithmetic.Div,
                   "floordiv": arithmetic.floor_divide, "mod": arithmetic.Remainder, "pow": arithmetic.Pow, "matmul": linear.matmul,
                   "eq": arithmetic.eq, "ne": arithmetic.ne, "lt": arithmetic.lt, "le": arithmetic.le, "gt": arithmetic.gt,
                   "ge": arithmetic.ge, "and": arithmetic.bitwise_and, "or": arithmetic.bitwise_or, "xor": arithmetic.bitwise_xor}.items():
    setattr(Tensor, f"__{_name}__", _operator(_op))
    if _name not in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(Tensor, f"__r{_name}__", _operator(_op, reflected=True))

Tensor.__rtruediv__ = _operator(autograd.under_autocast(autograd.FLOAT32)(arithmetic.div), reflected=True)
Tensor.__neg__, Tensor.__abs__, Tensor.__invert__ = arithmetic.neg, arithmetic.abs_, arithmetic.bitwise_not
Tensor.__getitem__ = index.getitem

# Methods that are an operation with the tensor as its first argument, by the room they live in.
_METHODS = {
    arithmetic: "add sub mul div pow neg exp log log1p sqrt rsqrt tanh sigmoid sin cos clamp clamp_min clamp_max square reciprocal maximum "
                "minimum round floor ceil trunc sign remainder lerp eq ne lt le gt ge floor_divide logical_not logical_and "
                "logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_not isnan isinf isfinite addcmul addcdiv",
    reduce: "sum mean prod amax amin var std norm cumsum argmax argmin count_nonzero",
    shapes: "reshape view flatten unflatten squeeze unsqueeze transpose t permute movedim expand broadcast_to expand_as contiguous clone "
            "split chunk unbind tril triu flip roll repeat tile repeat_interleave diagonal",
    index: "masked_fill masked_select gather take_along_dim scatter index_select index_add argsort nonzero unique bincount",
    linear: "matmul mm bmm mv dot outer",
    activation: "relu erf",
    softmax: "softmax log_softmax logsumexp",
}
for _room, _names in _METHODS.items():
    for _name in _names.split():
        setattr(Tensor, _name, public(getattr(_room, _name), method=True))
for _name, _op in {"abs": arithmetic.abs_, "any": reduce.any_, "all": reduce.all_, "scatter_add": index.scatter_add_}.items():
    setattr(Tensor, _name, public(_op, method=True))
for _name in ("max", "min", "sort", "topk", "equal", "allclose", "view_as", "reshape_as", "type_as"):
    setattr(Tensor, _name, public(getattr(Tensor, _name), method=True))
Tensor.swapaxes = Tensor.transpose
Tensor.where = lambda self, condition, other: index.where(condition, self, other)


def _in_place(op):
    def method(self, *args, **kwargs):
        return self._write(op, *args, **kwargs)
    return method


_IN_PLACE = {
    arithmetic: "add sub mul div pow neg exp log sqrt rsqrt tanh sigmoid sin cos clamp clamp_min clamp_max round floor ceil trunc sign "
                "lerp addcmul addcdiv reciprocal square remainder floor_divide bitwise_and bitwise_or bitwise_xor",
    index: "masked_fill scatter index_add",
    shapes: "tril triu",
    activation: "relu",
}
for _room, _names in _IN_PLACE.items():
    for _name in _names.split():
        setattr(Tensor, _name + "_", _in_place(public(getattr(_room, _name), method=True)))
Tensor.scatter_add_, Tensor.abs_ = _in_place(Tensor.scatter_add), _in_place(Tensor.abs)
for _name, _method in {"add": "add_", "sub": "sub_", "mul": "mul_", "truediv": "div_", "floordiv": "floor_divide_", "mod": "remainder_",
                       "pow": "pow_", "and": "bitwise_and_", "or": "bitwise_or_", "xor": "bitwise_xor_"}.items():
    setattr(Tensor, f"__i{_name}__", getattr(Tensor, _method))


class ToDevice(shapes.Moving):
    """The same numbers on another device.    dx = dy moved back"""

    def forward(self, x, target):
        self.source = device_of(x)
        return to_device(x, target)

    def backward(self, dy):
        return to_device(dy, self.source)


def device_and_dtype(args, device=None, dtype=None):
    """What the arguments of `.to` ask for: a device, a dtype, or a tensor that has both; None for what they leave as it is."""
    for a in args:
        if isinstance(a, Tensor):
            device, dtype = a.device, a.dtype
        elif isinstance(a, (str, Device)):
            device = a
        elif a is not None:
            dtype = a
    return device, dtype


def _move(x, target):
    if same_place(x.device, target):
        return x
    moved = ToDevice.apply(x, target)
    moved.version.note_bounds(x.array)
    return moved


def _extreme(x, dim, keepdim, which, pairwise, over_all):
    """max and min: over everything, along one axis (values, indices), or of two tensors."""
    if isinstance(dim, Tensor):
        return pairwise(x, dim)
    if dim is None:
        if keepdim:
            raise TypeError(f"{which[3:]}: keepdim=True needs a dim; amax and amin take it without")
        return over_all(x)
    return namedtuple_of(which[3:], *index.extreme_pair(x, dim, keepdim, which))
