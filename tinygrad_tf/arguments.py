"""The public face of the operations: PyTorch's error where an argument is no tensor, and NumPy's `axis` for `dim`.

`public(op)` runs op and looks at the arguments only after the call has failed, so that a call that succeeds pays for one
more Python call (about 0.1 µs) and for nothing else. An operation therefore reads a tensor's numbers as `x.array`, which
no list, NumPy array or None has. Where numbers are welcome too, as in `add(x, 2)`, NumPy arrays are looked for first.
"""
import functools
import inspect
import numbers
import operator
import warnings

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
            if isinstance(error, TypeError):
                ours = _in_our_words(args, kwargs, parameters)
                if ours != (args, kwargs):      # the same objects under other names: no tensor is compared with another
                    return call(*ours[0], **ours[1])
            complaint = _complaint(op.__name__.rstrip("_"), parameters, args, kwargs, method, getattr(error, "obj", None))
            if complaint:
                raise TypeError(complaint) from error
            raise
    call.__doc__ = op.__doc__ or _formula(op)
    return call


def _formula(op):
    """What the class says that the body names: `def exp(input): return Exp.apply(input)` has the formula of Exp, and no own words."""
    op = inspect.unwrap(op)
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
    """The call with `axis` as `dim`, and with a name behind a star, as in permute(x, dims=(1, 0)), in its place. `out=None` is
    left out: np.sum(x) passes it.
    """
    words = {_our_word(name, parameters): value for name, value in kwargs.items() if name != "out" or value is not None}
    for theirs, ours in NUMPY_NAMES.items():
        if theirs in kwargs and ours in kwargs:
            raise TypeError(f"{theirs!r} is NumPy's name of {ours!r}: give one of them")
    names = list(parameters)
    star = next((name for name in names if parameters[name].kind is inspect.Parameter.VAR_POSITIONAL), None)
    if star in words:
        before = [name for name in names[len(args):names.index(star)] if name in words]
        args = (*args, *(words.pop(name) for name in (*before, star)))
    return args, words


def _our_word(name, parameters):
    known = NUMPY_NAMES.get(name)
    return known if known in parameters and name not in parameters else name


def _complaint(op, parameters, args, kwargs, method, misused):
    """What is wrong with the first argument that should be a tensor and is none; None where all are what they should be.

    misused: the object that lacked an attribute, where that was the error.
    """
    given = [(name, x, i - method + 1) for i, (name, x) in enumerate(zip(parameters, args))]
    given += [(name, x, None) for name, x in kwargs.items()]
    for name, x, position in given:
        if name in TENSORS and (op, name) not in NO_TENSORS and not _may_stand_for_a_tensor(x, name, parameters, misused):
            place = f" (position {position})" if position else ""
            return f"{op}(): argument {name!r}{place} must be Tensor, not {type_name(x)}; make one with tinygrad_tf.tensor(...)"
    return None


def _may_stand_for_a_tensor(x, name, parameters, misused):
    """None where it is the default; a number as one of two operands, `add(2, x)`, unless the operation took it for a tensor."""
    if x is None:
        return parameters[name].default is None
    if isinstance(x, numbers.Number):
        return x is not misused and (name != "input" or "other" in parameters or "exponent" in parameters)
    return isinstance(x, autograd.Tensor)


def tensors_in(value, around=()):
    """The tensors in a nest of tuples, lists and dicts; `around` holds those that lead here, so that no circle is walked twice."""
    if isinstance(value, autograd.Tensor):
        return [value]
    if any(value is outer for outer in around):
        return []
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in values for tensor in tensors_in(item, (*around, value))]


def require_tensors(op, **arguments):
    """TypeError for what is no tensor, where a layer or a function takes x under a name that `public` does not know."""
    for name, x in arguments.items():
        if not isinstance(x, autograd.Tensor):
            raise TypeError(f"{op}: {name} must be a Tensor, got {type_name(x)}; make one with tinygrad_tf.tensor(...)")


def optional_tensors(op, **arguments):
    """The same where None is allowed."""
    require_tensors(op, **{name: x for name, x in arguments.items() if x is not None})


def require_bools(op, **flags):
    """TypeError for what is neither True nor False: "no" would count as True."""
    for name, flag in flags.items():
        if flag is not True and flag is not False:
            raise TypeError(f"{op}: {name} must be a bool, True or False, got {described(flag)}")


def checked_probability(op, name, p):
    """p as a float; TypeError for what is no number (True is none: it would drop everything), ValueError outside [0, 1]."""
    if type(p) is not float and (isinstance(p, bool) or not isinstance(p, numbers.Real)):
        raise TypeError(f"{op}: {name} must be a number from 0 to 1, got {described(p)}")
    if not 0 <= p <= 1:
        raise ValueError(f"{op}: dropout probability has to be between 0 and 1, but got {described(p)}")
    return float(p)


def require_functions(op, **functions):
    """TypeError for what cannot be called."""
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{op}: {name} must be a function, got {described(function)}")


def optional_functions(op, **functions):
    """The same where None is allowed."""
    for name, function in functions.items():
        if function is not None:
            require_functions(op, **{name: function})


def whole_number(op, name, value, least=None):
    """The int that value is; TypeError where it is none (True is none), ValueError below `least`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{op}: {name} must be a whole number, got {described(value)}")
    if least is not None and number < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {described(number)}")
    return number


def described(x):
    """What x is, in an error: `5 (int)`, `a tensor (2, 3) of torch.bool`."""
    if isinstance(x, tuple):
        return f"({', '.join(map(described, x))})"
    if isinstance(x, autograd.Tensor):
        return f"a tensor {tuple(x.shape)} of {x.dtype}"
    if isinstance(x, int) and x.bit_length() > 64:          # Python does not write those of more than 4300 digits
        return f"a number of {x.bit_length()} bits"
    return f"{' '.join(repr(x).split()):.40} ({type(x).__name__})"


def warn_caller(message):
    """A warning that shows the nearest line outside this package, however many calls lie in between."""
    warnings.warn_explicit(message, UserWarning, *autograd._user_line())


def type_name(x):
    """`list`, `numpy.ndarray`: the type of x with its module, for errors."""
    cls = type(x)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"


def absent(module):
    """A module's `__getattr__`: a name of PyTorch that is not here says where the list of names is."""
    def missing(name):
        """Raises for a name that the module does not have."""
        raise AttributeError(f"module {module!r} has no attribute {name!r}; docs/names.md lists what is here, and what is not")
    return missing
