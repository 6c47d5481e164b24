"""Autocast: which operation runs in which type, what the blocks do, and what becomes of a weight that was cast.

The lists are those of PyTorch for CUDA: from its header where it is installed, and here as expressions. Where PyTorch itself
differs between CUDA and the CPU, the test that runs it on the CPU says so.
"""
import contextlib
import gc
import re
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from device import host

import tinygrad_tf as torch
import tinygrad_tf.nn.functional as F
from tinygrad_tf import nn
from tinygrad_tf.autograd import FLOAT32, LOW, WIDEST, Function, observing
from tinygrad_tf.backend import casting
from tinygrad_tf.models import MiniGPT

LOWS = [torch.float16, *([torch.bfloat16] if hasattr(torch, "bfloat16") else [])]
pytestmark = pytest.mark.filterwarnings("error")


def kind():
    """Of the device under test."""
    return torch.get_default_device().type


def autocast(dtype=torch.float16, **options):
    return torch.autocast(kind(), dtype=dtype, **options)


def inputs(low=None):
    """Floats x, y, z [4, 6] with z > 0, w [3, 6], b [3], c [6], q [2, 2, 5, 4] of float32, or of `low`; ids t [4] < 6."""
    random = np.random.default_rng(0)
    shapes = {"x": (4, 6), "y": (4, 6), "w": (3, 6), "b": (3,), "c": (6,), "q": (2, 2, 5, 4), "z": (4, 6)}
    made = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    made = {name: torch.tensor(abs(a) + 0.25 if name == "z" else a) for name, a in made.items()}
    made = {name: (tensor if low is None else tensor.to(low)).requires_grad_() for name, tensor in made.items()}
    return {**made, "t": torch.tensor([0, 5, 2, 2]), "allowed": torch.tensor(np.tri(5, dtype=bool))}


# What stands on which list.
LISTS = {
    LOW: """x @ w.T; torch.matmul(x, w.T); torch.mm(x, w.T); torch.mv(x, c); torch.bmm(x[None], w.T[None])
        torch.einsum("ij,kj->ik", x, w); F.linear(x, w, b); F.linear(x, w); F.scaled_dot_product_attention(q, q, q, is_causal=True)
        F.scaled_dot_product_attention(q, q, q, allowed); F.flash_attention(q, q, q, is_causal=True, tile=(2, 2))
        F.attention(q, q, q, causal=True); F.attention(q, q, q, return_weights=True)[0]; F.attention(q, q, q, return_weights=True)[1]
        F.attention(q, q, q, causal=True, window=2)""",
    FLOAT32: """x.exp(); z.log(); torch.log1p(z); z.rsqrt(); x.reciprocal(); 2.0 / x; x ** 2; x ** 3; 2.0 ** x; z ** y
        torch.pow(z, 0.5); x.square(); x.sum(); x.sum(dim=0); x.sum(dim=1, keepdim=True); x.cumsum(1); x.prod(dim=1); x.norm()
        torch.norm(x, 1, 1); F.softplus(x); F.softmax(x, -1); x.softmax(0); F.log_softmax(x, -1); torch.logsumexp(x, 1)
        F.layer_norm(x, (6,)); F.layer_norm(x, (6,), c, c); F.rms_norm(x, (6,), c); F.cross_entropy(x, t)
        F.cross_entropy(x, t, weight=c.detach().exp()); F.cross_entropy(x, y.softmax(-1)); F.nll_loss(x, t); F.mse_loss(x, y)
        F.binary_cross_entropy_with_logits(x, z)""",
    WIDEST: """torch.dot(c, c); torch.addcmul(x, y, y); torch.addcdiv(x, y, z); torch.scatter_add(x, 1, t[None], y)""",
    None: """x + y; x - y; x * y; x / y; -x; x.abs(); x.tanh(); x.sigmoid(); z.sqrt(); x.sin(); x.cos(); x.clamp(-1, 1)
        torch.maximum(x, y); F.relu(x); F.gelu(x); F.gelu(x, approximate="tanh"); F.silu(x); F.leaky_relu(x); x.mean(); x.mean(0)
        x.amax(); x.var(0); x.std(0); x.reshape(6, 4); x.T; x[1:]; torch.cat([x, y]); torch.stack([x, y]); torch.where(x > 0, x, y)
        x.masked_fill(x > 0, 1.0); x.gather(1, t[:, None]); torch.lerp(x, y, 0.5); F.embedding(t.clamp(max=3), x); torch.outer(c, c)
        F.glu(x); x.tril(); x.round()""",
}
CASES = [(how, text.strip()) for how, texts in LISTS.items() for text in texts.replace("\n", ";").split(";") if text.strip()]


def evaluate(text, names):
    return eval(text, {"torch": torch, "F": F, **names})


def go_back(y):
    """Backward from y under a fixed gradient of its type."""
    y.backward(torch.tensor(np.random.default_rng(1).normal(size=tuple(y.shape)), dtype=y.dtype))
    return y


def floats(names):
    return {name: t for name, t in names.items() if t.is_floating_point()}


def cast(names, dtype):
    """The same tensors by hand in another type."""
    return {**names, **{name: t.to(dtype) for name, t in floats(names).items()}}


def assert_same(found, expected):
    assert (found is None) == (expected is None)
    if found is not None:
        assert found.dtype is expected.dtype
        np.testing.assert_array_equal(host(found.double()), host(expected.double()))


def assert_as_by_hand(text, names, dtype, low):
    """Result and gradients, bit for bit: under autocast, and with the tensors cast by hand before."""
    leaves = {**names, **{name: t.detach().requires_grad_() for name, t in floats(names).items()}}
    with autocast(low):
        found = evaluate(text, names)
    assert_same(go_back(found), go_back(evaluate(text, cast(leaves, dtype))))
    for name, t in floats(names).items():
        assert_same(t.grad, leaves[name].grad)
    return found


@pytest.mark.parametrize("low", LOWS, ids=str)
@pytest.mark.parametrize("text", [text for how, text in CASES if how == LOW])
def test_products_are_those_of_operands_that_were_cast_by_hand(text, low):
    assert assert_as_by_hand(text, inputs(), low, low).dtype is low


@pytest.mark.parametrize("low", LOWS, ids=str)
@pytest.mark.parametrize("text", [text for how, text in CASES if how == FLOAT32])
def test_delicate_operations_are_those_of_floats(text, low):
    assert assert_as_by_hand(text, inputs(low), torch.float32, low).dtype is torch.float32
    assert_as_by_hand(text, inputs(), torch.float32, low)


@pytest.mark.parametrize("low", LOWS, ids=str)
@pytest.mark.parametrize("text", [text for how, text in CASES if how in (None, WIDEST)])
def test_all_else_runs_in_the_type_of_its_arguments(text, low):
    assert assert_as_by_hand(text, inputs(low), low, low).dtype is low
    assert assert_as_by_hand(text, inputs(), torch.float32, low).dtype is torch.float32


MIXED = ["x + y", "x * y", "torch.maximum(x, y)", "torch.cat([x, y])", "torch.stack([x, y])", "torch.where(x > 0, x, y)",
         "torch.dot(x[0], y[0])", "torch.addcmul(x, y, y)", "torch.addcdiv(y, x, y)", "torch.scatter_add(x, 1, t[None], y)",
         "torch.lerp(x, y, 0.5)"]


@pytest.mark.parametrize("low", LOWS, ids=str)
@pytest.mark.parametrize("text", MIXED)
def test_the_widest_of_mixed_types(text, low):
    names = {**inputs(), "y": inputs(low)["y"]}
    assert assert_as_by_hand(text, names, torch.float32, low).dtype is torch.float32


@pytest.mark.parametrize("how, text", CASES)
def test_float64_is_left_alone(how, text):
    assert_as_by_hand(text, inputs(torch.float64), torch.float64, torch.float16)


@pytest.mark.parametrize("how, text", CASES)
def test_outside_nothing_is_cast(how, text):
    assert evaluate(text, inputs(torch.float16)).dtype is torch.float16
    with autocast(enabled=False):
        assert evaluate(text, inputs()).dtype is torch.float32


def test_every_operation_stands_on_a_list_or_on_none():
    on = {how: {name for name, op in Function.registry.items() if op.autocast == how} for how in (LOW, FLOAT32, WIDEST, None)}
    assert sum(map(len, on.values())) == len(Function.registry)
    assert {"Matmul", "Linear", "Einsum"} <= on[LOW]
    assert {"Softmax", "LogSoftmax", "LogSumExp", "LayerNorm", "RMSNorm", "CrossEntropy", "NLLLoss", "Sum", "Prod", "Norm", "Cumsum",
            "Pow", "Exp", "Log", "Log1p", "Rsqrt", "Softplus"} <= on[FLOAT32]


@pytest.mark.parametrize("text, dtype", [
    ("x.sum(dtype=torch.float16)", torch.float16), ("F.softmax(x, -1, dtype=torch.float16)", torch.float16), ("t.sum()", torch.int64),
    ("F.log_softmax(x, -1, dtype=torch.float64)", torch.float64), ("x.prod(dim=0, dtype=torch.float16)", torch.float16),
    ("x.cumsum(0, dtype=torch.float16)", torch.float16)])
def test_a_dtype_that_is_asked_for_is_kept(text, dtype):
    with autocast():
        assert evaluate(text, inputs()).dtype is dtype
        assert evaluate(text, inputs(torch.float16)).dtype is dtype


def test_what_is_written_in_place_keeps_its_type_and_is_computed_in_it():
    x, y = inputs(torch.float16)["x"].detach(), inputs(torch.float16)["x"].detach()
    with autocast():
        x.exp_()
    assert_same(x, y.exp())


def test_an_added_mask_is_not_rounded():
    """PyTorch rounds it too. ALiBi's bias of far tokens, and scores from a score_mod, would lose what they say."""
    q, bias = inputs()["q"].detach(), torch.tensor(np.random.default_rng(2).normal(0, 100, (5, 5)).astype(np.float32))
    with autocast():
        found = F.scaled_dot_product_attention(q, q, q, bias), F.attention(q, q, q, bias=bias)
    for y in found:
        assert_same(y, F.scaled_dot_product_attention(q.half(), q.half(), q.half(), bias))


def test_a_score_mod_sees_float32():
    seen = []

    def score_mod(score, b, h, i, j):
        seen.append(score)
        return score * 0.5
    q = inputs()["q"]
    with autocast():
        y = F.attention(q, q, q, score_mod=score_mod)
    assert y.dtype is torch.float16 and seen[0].dtype is torch.float32
    half = q.detach().half()
    assert_same(seen[0], half.float() * 0.5 @ half.float().transpose(-1, -2))


@pytest.mark.parametrize("backend", ["dense", "tiled", "emulator"])
def test_attention_on_every_backend(backend):
    if backend == "emulator" and kind() != "cpu":
        backend = "cuda"
    q = inputs()["q"].detach()
    q = torch.cat([q, q, q, q], dim=-1)
    with torch.sdpa_backend(backend):
        with autocast():
            found = F.scaled_dot_product_attention(q, q, q)
        assert_same(found, F.scaled_dot_product_attention(q.half(), q.half(), q.half()))


# --- in float32 inside ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("low", LOWS, ids=str)
@pytest.mark.parametrize("text", [text for how, text in CASES if how == LOW and "weights" not in text])
def test_low_operands_are_multiplied_in_float32_and_the_result_is_rounded(text, low):
    """NumPy's own product of float16 adds up in float16, and takes 50 to 290 times as long."""
    rounded = inputs(low)
    assert_same(evaluate(text, rounded), evaluate(text, cast(rounded, torch.float32)).to(low))


@pytest.mark.parametrize("low", LOWS, ids=str)
def test_gradients_of_a_product_are_products_in_float32(low):
    random = np.random.default_rng(0)
    x, w, b = (torch.tensor(random.normal(size=shape)).to(low).requires_grad_() for shape in ((3000, 6), (3, 6), (3,)))
    dy = torch.tensor(random.normal(size=(3000, 3))).to(low)
    F.linear(x, w, b).backward(dy)
    for found, expected in (x, dy.float() @ w.detach().float()), (w, dy.float().T @ x.detach().float()), (b, dy.float().sum(0)):
        assert found.grad.dtype is low
        rounding = 2 * float(torch.finfo(low).eps)
        np.testing.assert_allclose(host(found.grad.float()), host(expected.to(low).float()), rtol=rounding, atol=1e-4)


@pytest.mark.parametrize("low", LOWS, ids=str)
def test_a_gradient_that_many_elements_share_is_summed_in_float32(low):
    """Ones end at 2048 in float16 and at 256 in bfloat16, where 1 more rounds to nothing."""
    for shape in (3,), (1, 3), (3000, 1):
        b = torch.zeros(*shape, dtype=low, requires_grad=True)
        (torch.ones(3000, 3, dtype=low) * b).backward(torch.ones(3000, 3, dtype=low))
        expected = torch.full(shape, 3000.0 if shape[-1] == 3 else 3.0).to(low)
        assert_same(b.grad, expected)


@pytest.mark.parametrize("low", LOWS, ids=str)
@pytest.mark.parametrize("text", ["x.sum(0)", "x.sum()", "x.mean(0)", "x.mean()", "x.var(0)", "x.std(0)", "x.norm()", "x.norm(3, 0)",
                                  "x.cumsum(0)"])
def test_many_numbers_are_added_up_in_float32(text, low):
    """3,000 rows, of float16 numbers near 1 that end at 2048 when they are added up in float16; and what backward divides by."""
    results = []
    for dtype in low, torch.float64:
        x = torch.tensor(np.random.default_rng(0).normal(1, 0.25, (3000, 3))).to(low).to(dtype).requires_grad_()
        y = eval(text, {"x": x})
        y.backward(torch.ones(*y.shape, dtype=dtype))
        results.append([host(y.double()), host(x.grad.double())])
    eps, tiny = float(torch.finfo(low).eps), float(torch.finfo(low).tiny) * float(torch.finfo(low).eps)
    rough = 4 if "std" in text else 1                   # made of other operations: x − x̄ is rounded
    for found, expected in zip(*results):
        np.testing.assert_allclose(found, expected, rtol=rough * eps, atol=tiny + 1e-3 * eps * abs(expected).max())


ROWS = np.random.default_rng(0).normal(1, 3, (5, 40))
NORMS = {
    "layer_norm": (lambda x, w: F.layer_norm(x, (40,), w, w * 0.5), ROWS),
    "layer_norm far from 0": (lambda x, w: F.layer_norm(x, (40,), w), ROWS + 300),
    "rms_norm": (lambda x, w: F.rms_norm(x, (40,), w, 1e-5), ROWS),
    "rms_norm of large rows": (lambda x, w: F.rms_norm(x, (40,), w, 1e-5), ROWS * 4000),       # their squares leave float16
    "softmax": (lambda x, w: F.softmax(x, -1), ROWS),
    "log_softmax": (lambda x, w: F.log_softmax(x, -1), ROWS),
    "logsumexp": (lambda x, w: torch.logsumexp(x, -1), ROWS),
    "cross_entropy": (lambda x, w: F.cross_entropy(x, torch.tensor([0, 3, 5, 7, 39])), ROWS),
    "cross_entropy of far scores": (lambda x, w: F.cross_entropy(x, torch.tensor([0, 3, 5, 7, 39])), ROWS * 1000),
}


@pytest.mark.parametrize("low", LOWS, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_half_precision_against_float64_within_its_rounding(name, low):
    """Norms, softmax and losses of float16 are those of float64 but for the rounding of the result, and of the gradient."""
    function, x = NORMS[name]
    x, w = torch.tensor(x).to(low), torch.tensor(np.linspace(0.5, 1.5, 40)).to(low)
    results = []
    for dtype in low, torch.float64:
        x_, w_ = x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()
        y = function(x_, w_)
        upstream = torch.tensor(np.random.default_rng(1).normal(size=tuple(y.shape))).to(low).to(dtype)
        y.backward(upstream)
        results.append([host(a.double()) for a in (y, x_.grad, w_.grad) if a is not None])
    half = float(torch.finfo(low).eps) / 2 * 1.01
    for found, expected in zip(*results):
        smallest = float(torch.finfo(low).tiny) * half                  # below tiny float16 has fewer digits
        np.testing.assert_allclose(found, expected, rtol=half, atol=smallest + 1e-6 * abs(expected).max())


# --- blocks -----------------------------------------------------------------------------------------------------------

def is_low():
    x = torch.ones(2, 2)
    return (x @ x).dtype is not torch.float32


def test_blocks_nest_and_end_with_an_error_too():
    assert not is_low() and not torch.is_autocast_enabled(kind())
    with pytest.raises(ZeroDivisionError), autocast() as block:
        assert isinstance(block, torch.autocast) and is_low() and torch.is_autocast_enabled(kind())
        with autocast(enabled=False):
            assert not is_low() and not torch.is_autocast_enabled(kind())
            with autocast():
                assert is_low()
            assert not is_low()
        assert is_low()
        raise ZeroDivisionError
    assert not is_low() and vars(casting) == {"dtypes": {}, "named": {}, "casts": None, "blocks": []}


def test_one_object_may_be_entered_again_and_within_itself():
    block = autocast()
    for _ in range(2):
        with block, block:
            assert is_low()
        assert not is_low()


def test_as_a_decorator_of_functions_and_generators():
    @autocast()
    def function():
        return is_low()

    @autocast()
    def generator():
        for _ in range(3):
            yield is_low()
    assert function() and not is_low()
    for low in generator():
        assert low and not is_low()             # on in the body, and not in who reads from it


def test_the_dtype_is_that_of_the_block_around():
    with autocast(torch.float16):
        assert torch.get_autocast_dtype(kind()) is torch.float16
        with torch.autocast(kind()):
            assert torch.get_autocast_dtype(kind()) is torch.float16 and is_low()
        with autocast(torch.float16, enabled=False), torch.autocast(kind()):
            assert is_low()
    assert torch.get_autocast_dtype("cuda") is torch.float16


@pytest.mark.skipif(len(LOWS) == 1, reason="needs bfloat16")
def test_on_the_cpu_bfloat16_is_the_default():
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    x = torch.ones(2, 2, device="cpu")
    with torch.autocast("cpu"):
        assert (x @ x).dtype is torch.bfloat16
        with torch.autocast("cpu", torch.float16):
            assert (x @ x).dtype is torch.float16
        assert (x.half() @ x).dtype is torch.bfloat16


def test_a_block_is_for_one_kind_of_device(gpu):
    there, here = torch.ones(2, 2, device="cuda"), torch.ones(2, 2, device="cpu")
    with torch.autocast("cuda", torch.float16):
        assert (there @ there).dtype is torch.float16 and (here @ here).dtype is torch.float32
        assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda:0") and not torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", torch.float16):
            assert (there @ there).dtype is (here @ here).dtype is torch.float16
        with torch.autocast("cuda", enabled=False):
            assert (there @ there).dtype is torch.float32
    with torch.cuda.amp.autocast():
        assert (there @ there).dtype is torch.float16
    with torch.cuda.amp.autocast(False):
        assert (there @ there).dtype is torch.float32


def test_it_holds_for_this_thread():
    seen = []
    with autocast():
        other = threading.Thread(target=lambda: seen.append(is_low()))
        other.start(), other.join()
        assert seen == [False] and is_low()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8], ids=str)
def test_another_dtype_is_a_warning_and_no_autocast(dtype):
    with pytest.warns(UserWarning, match=rf"float16 and bfloat16, got {dtype}.*disabled") as caught:
        block = autocast(dtype)
    assert caught[0].filename == __file__
    with block:
        assert not is_low()


@pytest.mark.host("on the CPU there may be no GPU")
def test_without_a_gpu_a_block_for_it_is_a_warning_and_does_nothing():
    with pytest.warns(UserWarning, match=r"no GPU; autocast is disabled.*autocast\('cpu'"), torch.autocast("cuda"):
        assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("call, error, message", [
    (lambda: torch.autocast(), TypeError, "device_type"),
    (lambda: torch.autocast("tpu"), RuntimeError, "'tpu' is unknown"),
    (lambda: torch.autocast(torch.device("cpu")), ValueError, "expected device_type as a str"),
    (lambda: torch.autocast("cpu", torch.float16, enabled="no"), TypeError, "enabled must be a bool"),
    (lambda: torch.autocast("cpu", torch.float16, cache_enabled=1), TypeError, "cache_enabled must be a bool"),
    (lambda: torch.autocast("cpu", "float17"), TypeError, "float17"),
    (lambda: torch.is_autocast_enabled("tpu"), RuntimeError, "'tpu' is unknown"),
    (lambda: torch.get_autocast_dtype(0), ValueError, "expected device_type as a str"),
])
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message) if message[0] == "'" else message):
        call()


@pytest.mark.parametrize("text, message", [
    ("F.linear(x.double(), w)", "linear: input float64, weight float16"), ("x.double() @ w.T", "one dtype, got float64 and float16"),
    ("torch.einsum('ij,kj', x.double(), w)", "'ij,kj->ik': all operands must have one dtype, got float64, float16"),
    ("F.scaled_dot_product_attention(q.double(), q, q)", "got torch.float64 and torch.float16")])
def test_float64_among_others_is_still_an_error(text, message):
    with autocast(), pytest.raises(RuntimeError, match=message):
        evaluate(text, inputs())


# --- the cast of a weight ---------------------------------------------------------------------------------------------

@contextlib.contextmanager
def casts_of(weight):
    """The results of each operation that casts this tensor."""
    found = []
    with observing(lambda node, args, out: found.append(out) if node.name == "Cast" and args[0] is weight else None):
        yield found


def test_a_weight_is_cast_once_in_the_outermost_block():
    w, x = inputs()["w"], inputs()["x"]
    with casts_of(w) as casts:
        for _ in range(2):
            with autocast():
                F.linear(x, w), F.linear(x, w)
                with autocast():
                    F.linear(x, w)
                with autocast(enabled=False):
                    F.linear(x, w)
                F.linear(x, w)
        assert len(casts) == 2
    with casts_of(x.detach()), casts_of(x) as casts, autocast():
        F.linear(x, w), F.linear(x * 1, w), F.linear(x * 1, w)
        assert len(casts) == 1


def test_its_gradient_is_the_sum_over_all_uses_in_the_type_of_the_weight():
    w, x = inputs()["w"], inputs()["x"].detach()
    with autocast():
        (F.linear(x, w) + F.linear(x, w) + F.linear(x, w)).backward(torch.ones(4, 3, dtype=torch.float16))
    assert w.grad.dtype is torch.float32
    np.testing.assert_allclose(host(w.grad), host(3 * torch.ones(4, 3).T @ x), rtol=4e-3)


def test_nothing_of_a_block_outlives_it():
    w, x = inputs()["w"], inputs()["x"]
    with casts_of(w) as casts, autocast():
        F.linear(x.detach(), w.detach() * 1)
        y = F.linear(x, w)
        cast, = (weakref.ref(c) for c in casts)
        casts.clear()
        gc.disable()
        try:
            del y
            assert cast() is not None
        finally:
            gc.enable()
    assert cast() is None and casting.casts is None


@pytest.mark.parametrize("change", [
    lambda w: w.mul_(2), lambda w: w.detach().fill_(1.0), lambda w: w.__setitem__(0, 5.0), lambda w: setattr(w, "data", torch.ones(3, 6)),
    lambda w: torch.optim.SGD([w], lr=0.1).step(), lambda w: torch.optim.AdamW([w]).step(), lambda w: w.detach()[0].zero_()])
def test_a_weight_that_was_written_to_is_cast_again(change):
    w, x = inputs()["w"], inputs()["x"].detach()
    w.grad = torch.ones(3, 6)
    with autocast():
        before = F.linear(x, w)
        with torch.no_grad():
            change(w)
        after = F.linear(x, w)
    assert not torch.equal(before, after)
    assert_same(after, F.linear(x.half(), w.half()))


def test_written_to_behind_the_back_of_the_library():
    w, x = inputs()["w"], inputs()["x"].detach()
    with autocast():
        before = F.linear(x, w)
        w.array[...] = 1
        assert_same(F.linear(x, w), before)
        torch.clear_autocast_cache()
        assert_same(F.linear(x, w), F.linear(x.half(), w.half()))


def test_a_cast_without_gradient_is_not_taken_where_one_is_wanted():
    w, x = inputs()["w"], inputs()["x"].detach()
    with autocast():
        with torch.no_grad():
            F.linear(x, w)
        F.linear(x, w).sum().backward()
        with casts_of(w) as casts, torch.no_grad():
            F.linear(x, w)
    assert w.grad is not None and casts == []


def test_two_dtypes_in_one_block():
    w, x = inputs()["w"], inputs()["x"].detach()
    for low in LOWS:
        with autocast():
            F.linear(x, w)
            with autocast(low):
                assert_same(F.linear(x, w), F.linear(x.to(low), w.to(low)))
            assert_same(F.linear(x, w), F.linear(x.half(), w.half()))


def test_the_casts_are_not_kept_where_that_is_off():
    w, x = inputs()["w"], inputs()["x"]
    assert torch.is_autocast_cache_enabled()
    with casts_of(w) as casts, autocast(cache_enabled=False):
        assert not torch.is_autocast_cache_enabled()
        F.linear(x, w), F.linear(x, w)
        assert len(casts) == 2
        with autocast():                        # as around it
            F.linear(x, w), F.linear(x, w)
            assert len(casts) == 4
        with autocast(cache_enabled=True):
            F.linear(x, w), F.linear(x, w)
            assert len(casts) == 5


def test_backward_may_run_inside_and_outside():
    names = []
    for inside in False, True:
        w, x = inputs()["w"], inputs()["x"]
        with autocast():
            loss = F.linear(x, w).exp().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        names.append((w.grad, x.grad))
    for one, other in zip(*names):
        assert_same(one, other)


# --- models -----------------------------------------------------------------------------------------------------------

def small(dropout=0.0):
    torch.manual_seed(0)
    return MiniGPT(50, 16, 32, 4, 64, 2, dropout, norm_first=True)


@pytest.mark.parametrize("low", LOWS, ids=str)
def test_a_model_keeps_float32_weights_and_gradients(low):
    ids = torch.randint(0, 50, (4, 16))
    losses, gradients = [], []
    for model, options in (small(), {}), (small(), {"dtype": low}):
        with autocast(**options) if options else contextlib.nullcontext():
            logits, loss = model(ids, ids)
        assert logits.dtype is (low if options else torch.float32) and loss.dtype is torch.float32
        loss.backward()
        losses.append(loss.item()), gradients.append(host(torch.cat([p.grad.reshape(-1) for p in model.parameters()])))
        assert all(p.dtype is p.grad.dtype is torch.float32 for p in model.parameters())
    eps = float(torch.finfo(low).eps)
    assert abs(losses[1] - losses[0]) < eps
    one, other = gradients
    assert np.linalg.norm(one - other) < 4 * eps * np.linalg.norm(one)


def test_layers_of_all_kinds_run():
    x, blocked = torch.randn(2, 5, 16), torch.tensor(~np.tri(5, dtype=bool))
    added = torch.zeros(5, 5).masked_fill(blocked, -np.inf)
    rope = nn.RotaryEmbedding(4)
    layers = [lambda: nn.MultiHeadAttention(16, 4, 2, rope=rope)(x, causal=True),
              lambda: nn.MultiHeadAttention(16, 4)(x, return_weights=True)[1],
              lambda: nn.MultiHeadAttention(16, 4, relative_bias=nn.ALiBi(4))(x, causal=True),
              lambda: nn.MultiheadAttention(16, 4, batch_first=True)(x, x, x, attn_mask=blocked)[0],
              lambda: nn.MultiheadAttention(16, 4, batch_first=True, add_bias_kv=True)(x, x, x, attn_mask=added, need_weights=False)[0],
              lambda: nn.SwiGLU(16, 32)(x), lambda: nn.GEGLU(16, 32)(x)]
    for layer in layers:
        with autocast():
            assert layer().dtype is torch.float16
    with autocast():
        assert nn.TransformerBlock(16, 4, 32)(x).dtype is torch.float32             # the residual path


def test_a_checkpoint_runs_again_under_the_same_autocast():
    from tinygrad_tf.utils.checkpoint import checkpoint
    ids, found = torch.randint(0, 50, (4, 16)), []
    for run in (lambda model: model(ids, ids), lambda model: checkpoint(model, ids, ids)):
        model = small(dropout=0.1)
        torch.manual_seed(1)
        with autocast():
            F.linear(torch.randn(2, 32), model.lm_head.weight)          # a weight that is cast already
            _, loss = run(model)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for one, other in zip(*found):
        assert_same(one, other)


def test_generating_under_autocast_is_the_model_under_autocast():
    """The fast path of single tokens, which knows nothing of autocast, is not taken."""
    from tinygrad_tf.generation import KVCache, token_path
    model, ids = small().eval(), torch.randint(0, 50, (1, 9))
    cache = KVCache(2, 16)
    with torch.no_grad():
        model(ids, cache=cache)
    assert token_path.serves(model, cache) == (kind() == "cpu")
    with autocast(), torch.no_grad():
        assert not token_path.serves(model, cache)
        cache = KVCache(2, 16)
        model(ids[:, :8], cache=cache)
        stepped, _ = model(ids[:, 8:], cache=cache)
        whole, _ = model(ids)
    assert stepped.dtype is torch.float16
    np.testing.assert_allclose(host(stepped[0, -1].float()), host(whole[0, -1].float()), atol=2e-3)


# --- beside PyTorch ---------------------------------------------------------------------------------------------------

# How to call what stands in PyTorch's header and exists here.
CALLS = dict(line.strip().split(": ", 1) for line in """
    matmul: torch.matmul(x, w.T); mm: torch.mm(x, w.T); mv: torch.mv(x, c); bmm: torch.bmm(x[None], w.T[None]); linear: F.linear(x, w)
    einsum: torch.einsum('ij,kj->ik', x, w); scaled_dot_product_attention: F.scaled_dot_product_attention(q, q, q)
    exp: torch.exp(z); log: torch.log(z); log1p: torch.log1p(z); reciprocal: torch.reciprocal(z); rsqrt: torch.rsqrt(z)
    pow: torch.pow(z, 2.0)
    softplus: F.softplus(x); layer_norm: F.layer_norm(x, (6,)); rms_norm: F.rms_norm(x, (6,)); nll_loss: F.nll_loss(x, t)
    mse_loss: F.mse_loss(x, x); binary_cross_entropy_with_logits: F.binary_cross_entropy_with_logits(x, x); logsumexp: torch.logsumexp(x, 1)
    softmax: torch.softmax(x, 1); log_softmax: torch.log_softmax(x, 1); cumsum: torch.cumsum(x, 1); prod: torch.prod(x); sum: torch.sum(x)
    norm: torch.norm(x); addcdiv: torch.addcdiv(x, x, z); addcmul: torch.addcmul(x, x, x); dot: torch.dot(c, c)
    scatter_add: torch.scatter_add(x, 1, t[None], x)
""".replace("\n", ";").split(";") if line.strip())
MACROS = {"LOWER_PRECISION_FP": LOW, "FP32": FLOAT32, "FP32_SET_OPT_DTYPE": FLOAT32, "DIFFERENT_REDISPATCH_SIGNATURE": FLOAT32,
          "PROMOTE": WIDEST}


def names_in_header(macro):
    pytorch = pytest.importorskip("torch")
    text = (Path(pytorch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    body = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*?\n)\n", text, re.DOTALL)[1]
    return set(re.findall(r"_\((?:ADD_NS\()?(\w+)", body))


@pytest.mark.torch
@pytest.mark.parametrize("macro", MACROS)
def test_the_lists_are_those_of_pytorchs_header(macro):
    how = MACROS[macro]
    ours = {name for name in names_in_header(macro) if hasattr(torch, name) or hasattr(F, name) or hasattr(torch.Tensor, name)}
    assert ours and ours <= CALLS.keys()
    for name in ours:
        for low in LOWS:
            with autocast(low):
                mixed, halves = evaluate(CALLS[name], inputs()), evaluate(CALLS[name], inputs(low))
            assert mixed.dtype is (low if how == LOW else torch.float32), name
            assert halves.dtype is (torch.float32 if how == FLOAT32 else low), name


# PyTorch's list for the CPU is shorter: these run in the type of their arguments there, and in float32 here, as on CUDA.
ONLY_ON_CUDA = """x.exp(); z.log(); torch.log1p(z); z.rsqrt(); x.reciprocal(); 2.0 / x; x ** 2; x ** 3; 2.0 ** x; z ** y
    torch.pow(z, 0.5); x.square(); x.sum(); x.sum(dim=0); x.sum(dim=1, keepdim=True); x.cumsum(1); x.norm(); torch.norm(x, 1, 1)
    F.softplus(x); F.softmax(x, -1); x.softmax(0); F.log_softmax(x, -1); torch.logsumexp(x, 1); F.layer_norm(x, (6,))
    F.layer_norm(x, (6,), c, c); F.rms_norm(x, (6,), c)"""


@pytest.mark.torch
@pytest.mark.parametrize("how, text", [case for case in CASES if not re.search(r"F\.(flash_)?attention|torch.mv", case[1])])
def test_the_types_of_results_are_pytorchs_on_the_cpu_but_for_its_shorter_list(how, text):
    pytorch = pytest.importorskip("torch")
    for dtype in "float16", "bfloat16":
        for low in "float32", dtype:
            names = {name: pytorch.tensor(host(t)).to(getattr(pytorch, low)) if t.is_floating_point() else pytorch.tensor(host(t))
                     for name, t in inputs().items() for t in [t.detach()]}
            with pytorch.autocast("cpu", dtype=getattr(pytorch, dtype)):
                theirs = eval(text, {"torch": pytorch, "F": pytorch.nn.functional, **names}).dtype
            expected = {LOW: dtype, FLOAT32: "float32"}.get(how, low)
            if low == dtype and text in {t.strip() for t in ONLY_ON_CUDA.replace("\n", ";").split(";")}:
                expected = dtype
            assert str(theirs) == f"torch.{expected}", (text, low)
