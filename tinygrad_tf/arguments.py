"""The public face of the operations: PyTorch's error where an argument is no tensor, and NumPy's `axis` for `dim`.

`public(op)` runs op and looks at the arguments only after the call has failed, so that a call that succeeds pays for one
more Python call (about 0.1 µs) and for nothing else. An operation therefore reads a tensor's numbers as `x.array`, which
no list, NumPy array or None has. Where numbers are welcome too, as in `add(x, 2)`, NumPy arrays are looked for first.
"""
import functools
import inspect
import numbers

import numpy as np

from . import autograd

# What PyTorch's signatures call an argument that must be a tensor.
TENSORS = frozenset("input other weight bias target mask index indices src source mat2 vec vec2 tensor tensor1 tensor2 end exponent "
                    "query key value attn_mask condition elements test_elements sorted_sequence values mean std pos_weight".split())
# Where such a name means something else; and the names beside which a number is welcome too.
NO_TENSORS = {("movedim", "source"), ("arange", "end"), ("linspace", "end")}
NUMBERS_TOO = frozenset("other exponent end tensor1 min max value values src std test_elements pos_weight".split())
NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim"}


@functools.cache
def public(op, method=False):
    """The operation with PyTorch's TypeError for lists, arrays and None in a tensor's place; any other error stays as it is."""
    parameters = inspect.signature(op).parameters
    run = op if NUMBERS_TOO.isdisjoint(parameters) else _without_arrays(op)

    @functools.wraps(op)
    def call(*args, **kwargs):
        try:
            return run(*args, **kwargs)
        except Exception as error:
            if isinstance(error, TypeError) and (args, kwargs) != (known := _in_our_words(args, kwargs, parameters)):
                return call(*known[0], **known[1])
            complaint = _complaint(op.__name__.rstrip("_"), parameters, args, kwargs, method)
            if complaint:
                raise TypeError(complaint) from error
            raise
    call.__doc__ = op.__doc__ or _formula(op)
    return call


def _formula(op):
    """What the class says that the body names: `def exp(input): return Exp.apply(input)` has the formula of Exp, and no own words."""
    named = (op.__globals__.get(name) for name in op.__code__.co_names)
    return next((cls.__doc__ for cls in named if isinstance(cls, type) and issubclass(cls, autograd.Function)), None)


def publish(namespace):
    """Every operation of a module's namespace, made public in place."""
    for name, op in namespace.items():
        if inspect.isfunction(op) and not (TENSORS | {"tensors"}).isdisjoint(inspect.signature(op).parameters):
            namespace[name] = public(op)


def _without_arrays(op):
    def run(*args, **kwargs):
        if np.ndarray in map(type, (*args, *kwargs.values())):
            raise TypeError(f"{op.__name__.rstrip('_')}(): expected tensors and numbers, got a NumPy array; make a tensor with "
                            f"tinygrad_tf.from_numpy(...)")
        return op(*args, **kwargs)
    return run


def _in_our_words(args, kwargs, parameters):
    """The call with `axis` as `dim`, and with a name behind a star, as in permute(x, dims=(1, 0)), in its place."""
    words = {_our_word(name, parameters): value for name, value in kwargs.items()}
    names = list(parameters)
    star = next((name for name in names if parameters[name].kind is inspect.Parameter.VAR_POSITIONAL), None)
    if star in words:
        before = [name for name in names[len(args):names.index(star)] if name in words]
        args = (*args, *(words.pop(name) for name in (*before, star)))
    return args, words


def _our_word(name, parameters):
    known = NUMPY_NAMES.get(name)
    return known if known in parameters and name not in parameters else name


def _complaint(op, parameters, args, kwargs, method):
    """What is wrong with the first argument that should be a tensor and is none; None where all are what they should be."""
    given = [(name, x, i - method + 1) for i, (name, x) in enumerate(zip(parameters, args))]
    given += [(name, x, None) for name, x in kwargs.items()]
    for name, x, position in given:
        if name in TENSORS and (op, name) not in NO_TENSORS and not _may_stand_for_a_tensor(x, name, parameters):
            place = f" (position {position})" if position else ""
            return f"{op}(): argument {name!r}{place} must be Tensor, not {_type_name(x)}; make one with tinygrad_tf.tensor(...)"
    return None


def _may_stand_for_a_tensor(x, name, parameters):
    """None where it is the default; a number as one of two operands, `add(2, x)`."""
    if x is None:
        return parameters[name].default is None
    if isinstance(x, numbers.Number):
        return name != "input" or "other" in parameters or "exponent" in parameters
    return isinstance(x, autograd.Tensor)


def _type_name(x):
    cls = type(x)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"
