"""PyTorch's names: each one that the guide's code uses, and those recommended beyond, with PyTorch's value; and their errors.

Values: cases in record_names.py, answered by PyTorch. Errors: every public function that takes a tensor is called with
a list, an array, a string and None in the place of each of its tensors.
"""
import inspect
import re

import pytest
import record_names
import tensorcases
from device import host

import tinygrad_tf as torch
import tinygrad_tf.generation  # noqa: F401
import tinygrad_tf.models  # noqa: F401
import tinygrad_tf.nn.functional as F
import tinygrad_tf.training  # noqa: F401
from tinygrad_tf import arguments

RECORDED = record_names.recorded()


@pytest.mark.parametrize("name", record_names.CASES)
def test_as_recorded_from_pytorch(name):
    case = record_names.CASES[name]
    tensorcases.assert_same(record_names.answer(torch, case), RECORDED[name], case)


@pytest.mark.torch
def test_as_pytorch_here():
    pytorch = pytest.importorskip("torch")
    for case in record_names.CASES.values():
        tensorcases.assert_same(record_names.answer(torch, case), record_names.answer(pytorch, case), case)


@pytest.mark.parametrize("path", record_names.NAMES)
def test_the_name_is_where_pytorch_has_it(path):
    assert record_names.reached(torch, path)


def test_the_names_of_the_public_list_exist_and_are_listed_by_help():
    assert len(set(torch.__all__)) == len(torch.__all__) > 200 and all(hasattr(torch, name) for name in torch.__all__)
    assert {path for path in record_names.NAMES if "." not in path} <= set(torch.__all__)


def test_help_names_what_exists_and_its_example_runs():
    table, _, example = torch.__doc__.partition(">>>")
    words = [w for line in table.split("\n\n")[2].splitlines() for w in re.findall(r"[A-Za-z_][\w.]*[\w]", line[19:].partition(":")[0])]
    names = [w.removeprefix("tinygrad_tf.") for w in words if w not in ("and", "with", "slices", "None", "tensors", "comparisons")]
    assert len(names) > 60 and [name for name in names if not record_names.reached(torch, name)] == []
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    (w * w).sum().backward()
    assert repr(w.grad.cpu()) in example


def test_every_public_function_says_what_it_does():
    """In words of its own, or with the formula of the operation that it runs."""
    public = {name: getattr(torch, name) for name in torch.__all__} | vars(F)
    assert [name for name, thing in public.items() if inspect.isfunction(thing) and not thing.__doc__] == []


# --- a list, an array or None where a tensor is due -----------------------------------------------------------------

# How to call each function: x, y are floats [2, 3], z a bool [2, 3], i int64 [2, 3], v floats [3], m floats [3, 3], p [2, 3] in (0, 1).
CALLS = dict(line.strip().split(": ", 1) for line in """
    addcdiv: x, y, y; addcmul: x, y, y; bernoulli: p; bincount: i[0]; bitwise_and: i, i; bitwise_not: i; bitwise_or: i, i; bitwise_xor: i, i
    bmm: x[None], m[None]; broadcast_to: x, (2, 3); chunk: x, 2; clamp: x, 0; clamp_max: x, 0; clamp_min: x, 0; cumsum: x, 0; dot: v, v
    fake_quantize_per_tensor_affine: x, 0.1, 0, -8, 7; fake_quantize_per_channel_affine: x, p[0], i[0], 1, -8, 7
    flip: x, 0; full_like: x, 1; gather: x, 0, i; index_add: x, 0, i[0], x[i[0]]; index_select: x, 0, i[0]; isin: x, y; lerp: x, y, 0.5
    log_softmax: x, 0; logsumexp: x, 0; masked_fill: x, z, 0.0; masked_select: x, z; matmul: x, m; mm: x, m; moveaxis: x, 0, 1
    movedim: x, 0, 1; multinomial: p, 1; mv: m, v; normal: x, p; outer: v, v; permute: x, (1, 0); pow: p, 2; randint_like: x, 5
    repeat_interleave: x, 2; reshape: x, (3, 2); result_type: x, y; roll: x, 1; scatter: x, 0, i[:, :2], y; scatter_add: x, 0, i, y
    searchsorted: v, y; softmax: x, 0; split: x, 1; swapaxes: x, 0, 1; swapdims: x, 0, 1; t: x; take_along_dim: x, i, 0; tile: x, (2, 1)
    topk: x, 1; transpose: x, 0, 1; unflatten: x, 1, (3, 1); unsqueeze: x, 0; where: z, x, y
    F.embedding: i, m; F.one_hot: i; F.linear: x, m, v; F.layer_norm: x, (3,), v, v; F.rms_norm: x, (3,), v; F.pad: x, (1, 1)
    F.cross_entropy: x, i[:, 0], v; F.nll_loss: x, i[:, 0], v; F.mse_loss: x, y; F.softmax: x, 0; F.log_softmax: x, 0; F.glu: x[:, :2]
    F.binary_cross_entropy_with_logits: x, p, v, None, None, 'mean', v; F.scaled_dot_product_attention: x[None], x[None], x[None], z[:, :2]
    F.rotary: x[:, :2], x[:, :1], x[:, :1]; F.attention: x[None, None], x[None, None], x[None, None]
    F.flash_attention: x[None, None], x[None, None], x[None, None]
""".replace("\n", ";").split(";") if line.strip())


def scope():
    torch.manual_seed(0)
    x, i = torch.randn(2, 3), torch.tensor([[0, 1, 1], [1, 0, 1]])
    return {"x": x, "y": torch.randn(2, 3), "z": x > 0, "i": i, "v": torch.tensor([0.1, 0.2, 0.7]), "m": torch.randn(3, 3),
            "p": torch.rand(2, 3)}


def public_functions():
    """(name, function, names of its arguments that are tensors)"""
    for prefix, module in (("", torch), ("F.", F)):
        for name, function in sorted(vars(module).items()):
            if inspect.isfunction(function) and name not in ("absent", "publish", "public"):
                tensors = [p for p in inspect.signature(function).parameters if p in arguments.TENSORS and
                           (function.__name__, p) not in arguments.NO_TENSORS]
                if tensors:
                    yield prefix + name, function, tensors


FUNCTIONS = {name: (function, tensors) for name, function, tensors in public_functions()}


def call_of(name, parameters):
    """The arguments of a sound call."""
    wanted = [p for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    text = CALLS.get(name, CALLS.get(name.removeprefix("F."))) or ", ".join("xy"[:len(wanted)])
    return eval(f"[{text}]", scope())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_tensor_is_refused_by_name_place_and_type(name):
    function, tensors = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters
    sound = call_of(name, parameters)
    function(*sound)
    tried = 0
    for place, (parameter, value) in enumerate(zip(parameters, sound)):
        if parameter not in tensors or not isinstance(value, torch.Tensor):
            continue
        for wrong in (value.tolist(), host(value), "text", None, object()):
            if wrong is None and parameters[parameter].default is None:
                continue
            tried += 1
            with pytest.raises(TypeError) as caught:
                function(*sound[:place], wrong, *sound[place + 1:])
            assert f"argument '{parameter}' (position {place + 1}) must be Tensor, not " in str(caught.value), str(caught.value)
            assert type(wrong).__name__ in str(caught.value) and str(caught.value).startswith(function.__name__.rstrip("_") + "()")
            if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
                continue
            with pytest.raises(TypeError, match=f"argument '{parameter}' must be Tensor"):
                function(*sound[:place], **{parameter: wrong, **dict(list(zip(parameters, sound))[place + 1:])})
    assert tried


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("number", [7, 2.5, True])
def test_a_number_in_a_tensors_place_is_welcome_or_refused_by_name(name, number):
    function, tensors = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters
    sound = call_of(name, parameters)
    for place, (parameter, value) in enumerate(zip(parameters, sound)):
        if parameter in tensors and isinstance(value, torch.Tensor):
            try:
                function(*sound[:place], number, *sound[place + 1:])
            except TypeError as error:
                assert parameter in str(error) or "tensor" in str(error), str(error)
            except RuntimeError as error:       # bitwise_and(i, 2.5): welcome, but not of this kind
                assert parameter in arguments.NUMBERS_TOO | {"input"}, str(error)


@pytest.mark.parametrize("method", ["expand_as", "view_as", "reshape_as", "type_as", "equal", "mm", "matmul", "copy_"])
@pytest.mark.parametrize("wrong", [7, 2.5, None, "text", [1.0]])
def test_methods_of_two_tensors_say_so(method, wrong):
    with pytest.raises(TypeError, match="[Tt]ensor"):
        getattr(torch.ones(2, 2), method)(wrong)


@pytest.mark.parametrize("name", [name for name, (function, _) in FUNCTIONS.items() if "dim" in inspect.signature(function).parameters])
def test_dim_and_axis_together_are_one_too_many(name):
    function, _ = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters
    sound = dict(zip(parameters, call_of(name, parameters)))
    with pytest.raises(TypeError, match="give one of them"):
        function(**{**sound, "dim": 0, "axis": 1})
    if "keepdim" in parameters:
        with pytest.raises(TypeError, match="give one of them"):
            function(**{**sound, "dim": 0, "keepdim": True, "keepdims": False})


@pytest.mark.parametrize("error", [AttributeError, TypeError, ValueError, KeyError])
def test_an_error_of_a_sound_call_is_not_explained_away(error):
    def op(input, dim):
        raise error("a bug")
    with pytest.raises(error, match="a bug"):
        arguments.public(op)(torch.ones(2), [0])
    with pytest.raises(error, match="a bug"):
        arguments.public(op)(torch.ones(2), axis=0)


def test_the_error_keeps_what_caused_it_and_a_method_counts_without_its_tensor():
    with pytest.raises(TypeError, match="exp.*not list") as caught:
        torch.exp([1.0])
    assert caught.value.__cause__ is not None
    with pytest.raises(TypeError, match=r"matmul\(\): argument 'other' \(position 1\) must be Tensor, not list"):
        torch.ones(2).matmul([1.0])


# --- what PyTorch users paste first, and what is not here ------------------------------------------------------------------

def test_no_gpu_is_said_without_an_error():
    assert torch.cuda.is_available() in (False, True)
    assert torch.cuda.device_count() >= 0
    torch.cuda.synchronize()
    assert "cuda" if torch.cuda.is_available() else "cpu"


def test_inference_mode_is_no_grad():
    with torch.inference_mode():
        assert not torch.is_grad_enabled()
    with torch.no_grad(), torch.inference_mode(mode=False):
        assert torch.is_grad_enabled()
    assert torch.inference_mode()(torch.is_grad_enabled)() is False and torch.inference_mode(torch.is_grad_enabled)() is False


def test_options_that_choose_among_implementations_of_pytorch_are_accepted():
    p = torch.nn.Parameter(torch.ones(2))
    for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        assert "fused" not in make([p], lr=0.1, fused=False, foreach=True).param_groups[0]


def test_gradients_of_gradients_are_refused_by_name():
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.ones(1, requires_grad=True).backward(create_graph=True)


@pytest.mark.parametrize("layer", [torch.nn.ReLU, torch.nn.SiLU, torch.nn.LeakyReLU])
def test_activations_in_place(layer):
    x = torch.tensor([-1.0, 2.0])
    expected = layer()(x).tolist()
    assert x.tolist() == [-1, 2] and "inplace" not in repr(layer())
    assert layer(inplace=True)(x) is x and x.tolist() == expected and "inplace=True" in repr(layer(inplace=True))


def test_a_missing_name_says_where_the_list_is():
    with pytest.raises(AttributeError, match="'vmap'.*docs/names.md"):
        getattr(torch, "vm" + "ap")
    with pytest.raises(AttributeError, match="'Conv2d'.*docs/names.md"):
        getattr(torch.nn, "Conv" + "2d")
    with pytest.raises(AttributeError, match="'kl_div'.*docs/names.md"):
        getattr(F, "kl_" + "div")
    with pytest.raises(AttributeError, match="'RMSprop'.*docs/names.md"):
        getattr(torch.optim, "RMS" + "prop")
