"""bfloat16: its numbers, PyTorch's results, gradients, training; and what is said where the package for it is missing."""
import copy
import importlib.util
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import record_names
import tensorcases
from device import host, placed, share_memory
from hypothesis import given
from hypothesis import strategies as st

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.dtypes import widened
from tinygrad_tf.kernels import cpu_emulator
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
MISSING = "ml_dtypes is not installed: pip install 'tinygrad_tf[lowbit]'"
THERE = importlib.util.find_spec("ml_dtypes") is not None
needed = pytest.mark.skipif(not THERE, reason=MISSING)
EPS = 2.0 ** -8                                 # the largest relative error of rounding to 8 bits


def low(*shape, seed=0):
    """Random numbers that bfloat16 holds, as float32 arrays, and the tensors of them."""
    numbers = torch.tensor(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).bfloat16()
    return host(numbers.float()), numbers


def rounded(x):
    """float32 numbers rounded to the upper 16 bits, half to even, in integers: the definition."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    up = ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), up)


def bits_of(x):
    """The 16 bits of each number of a bfloat16 tensor; one pattern for all NaN."""
    x = host(x)
    return np.where(np.isnan(x.astype(np.float32)), np.uint16(0x7FC0), x.view(np.uint16))


# --- without the package ------------------------------------------------------------------------------------------------

def run_without_package(tmp_path, code):
    """stdout of Python code in a process of its own, in which ml_dtypes cannot be imported."""
    (tmp_path / "ml_dtypes.py").write_text("raise ImportError('as if it were not installed')", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.host("a process of its own")
def test_asking_for_it_without_the_package_says_what_to_install(tmp_path):
    ways = ["x.bfloat16()", "x.to(torch.bfloat16)", "x.type(torch.bfloat16)", "torch.zeros(2, dtype=torch.bfloat16)",
            "torch.tensor([1.0], dtype='bfloat16')", "torch.randn(2, dtype=torch.bfloat16)", "torch.finfo(torch.bfloat16)",
            "torch.nn.Linear(2, 2).bfloat16()", "torch.nn.Linear(2, 2).to(torch.bfloat16)", "torch.set_default_dtype(torch.bfloat16)",
            "torch.promote_types(torch.bfloat16, torch.float16)", "torch.arange(3, dtype=torch.bfloat16)"]
    printed = run_without_package(tmp_path, f"""
import sys
import tinygrad_tf as torch
assert "ml_dtypes" not in sys.modules
x, d = torch.ones(2), torch.bfloat16
print(d, d.is_floating_point, d.itemsize, d == torch.float16, (x * x).sum().item())
for way in {ways!r}:
    try:
        eval(way)
        print("no error:", way)
    except RuntimeError as error:
        print(error)
""").splitlines()
    sentence = "torch.bfloat16 needs the package ml_dtypes, which is not installed: pip install 'tinygrad_tf[lowbit]'"
    assert printed == ["torch.bfloat16 True 2 False 2.0"] + [sentence] * len(ways)


@pytest.mark.host("a process of its own")
def test_importing_the_library_does_not_import_the_package():
    code = "import sys, tinygrad_tf; tinygrad_tf.bfloat16; tinygrad_tf.ones(2).half(); assert 'ml_dtypes' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=60)


# --- the type -----------------------------------------------------------------------------------------------------------

@needed
def test_one_dtype_under_all_its_names():
    import ml_dtypes
    for name in ("bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), torch.bfloat16):
        assert torch.zeros(1, dtype=name).dtype is torch.bfloat16
    for again in (copy.copy(torch.bfloat16), copy.deepcopy(torch.bfloat16), pickle.loads(pickle.dumps(torch.bfloat16))):
        assert again is torch.bfloat16
    x = torch.zeros(2, dtype=torch.bfloat16)
    assert (repr(x.dtype), x.type(), x.element_size(), x.is_floating_point()) == ("torch.bfloat16", "torch.BFloat16Tensor", 2, True)
    assert (x.nbytes, x.bfloat16() is x, x.float().dtype, torch.ones(2).type_as(x).dtype) == (4, True, torch.float32, torch.bfloat16)


@needed
def test_the_range_of_the_number_formats():
    """The guide's table 11.3: exponent bits make the range, mantissa bits the precision; int4 is what int8's nibbles hold."""
    table = {"float32": (32, 3.4028235e38, 1.1754944e-38, 2.0 ** -23), "bfloat16": (16, 3.3895314e38, 1.1754944e-38, 2.0 ** -7),
             "float16": (16, 65504.0, 6.1035156e-05, 2.0 ** -10)}
    for name, (bits, largest, smallest, eps) in table.items():
        found = torch.finfo(getattr(torch, name))
        assert (found.bits, found.eps, found.min) == (bits, eps, -found.max)
        assert found.max == pytest.approx(largest) and found.tiny == found.smallest_normal == pytest.approx(smallest)
    assert (torch.iinfo(torch.int8).min, torch.iinfo(torch.int8).max) == (-128, 127)
    assert sorted({(byte & 15) - 16 * (byte & 15 > 7) for byte in range(256)}) == list(range(-8, 8))


@needed
@pytest.mark.torch
def test_its_limits_are_pytorchs():
    pytorch = pytest.importorskip("torch")
    ours, theirs = torch.finfo(torch.bfloat16), pytorch.finfo(pytorch.bfloat16)
    assert all(getattr(ours, name) == getattr(theirs, name) for name in ("min", "max", "eps", "tiny", "smallest_normal", "bits"))


@needed
def test_it_prints_as_pytorch_prints_it():
    assert repr(torch.tensor([1.0, 2.5], dtype=torch.bfloat16).cpu()) == "tensor([1.0000, 2.5000], dtype=torch.bfloat16)"
    assert repr(torch.tensor(0.1).bfloat16().cpu()) == "tensor(0.1001, dtype=torch.bfloat16)"
    assert repr(torch.tensor([1e-3, 123456.0, 0.1]).bfloat16().cpu()) == ("tensor([9.9945e-04, 1.2339e+05, 1.0010e-01], "
                                                                          "dtype=torch.bfloat16)")
    assert repr(torch.tensor([[1.0, float("nan")], [-2.0, float("inf")]]).bfloat16().cpu()) == (
        "tensor([[ 1., nan],\n        [-2., inf]], dtype=torch.bfloat16)")


@needed
def test_it_becomes_python_numbers_and_no_numpy_array():
    x = torch.tensor([[0.1, 2.0]]).bfloat16()
    assert x.tolist() == [[0.10009765625, 2.0]] and type(x[0, 0].item()) is float and float(x[0, 1]) == 2.0 and bool(x[0, 0])
    x = x.cpu()
    for call in (x.numpy, lambda: np.asarray(x)):
        with pytest.raises(TypeError, match="unsupported ScalarType BFloat16.*float\\(\\).numpy"):
            call()
    assert x.float().numpy().dtype == np.float32


@needed
@pytest.mark.host("arrays of the host")
def test_arrays_of_the_package_are_taken():
    import ml_dtypes
    array = np.arange(4).astype(ml_dtypes.bfloat16)
    x = torch.from_numpy(array)
    x += 1
    assert array.astype(np.float32).tolist() == [1, 2, 3, 4]
    assert torch.tensor(array).dtype is torch.bfloat16 and torch.tensor([array[0], array[1]]).tolist() == [1, 2]


@needed
def test_a_cupy_that_does_not_know_it_is_told(gpu, monkeypatch):
    cupy = sys.modules["cupy"]
    monkeypatch.setattr(cupy, "__version__", "13.6.0")
    there = torch.ones(2, device="cuda")
    for call in (lambda: torch.ones(2, dtype=torch.bfloat16).to("cuda"), there.bfloat16,
                 lambda: torch.zeros(2, dtype="bfloat16", device="cuda")):
        with pytest.raises(RuntimeError, match=r"CuPy 14 or later, this is CuPy 13\.6\.0: pip install"):
            call()
    monkeypatch.setattr(cupy, "__version__", "14.0.1")
    assert there.bfloat16().dtype is torch.bfloat16


# --- casts --------------------------------------------------------------------------------------------------------------

@needed
def test_every_bfloat16_survives_float32_and_back():
    every = np.arange(2 ** 16, dtype=np.uint32)
    x = torch.tensor((every << np.uint32(16)).view(np.float32))
    y = x.bfloat16()
    assert (bits_of(y) == rounded(host(x))).all()
    assert (bits_of(y.float().bfloat16()) == bits_of(y)).all()
    same = host(y.float())
    assert ((same == host(x)) | np.isnan(same)).all()


@needed
@given(st.lists(st.integers(0, 2 ** 32 - 1), min_size=1, max_size=50), st.sampled_from([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]))
def test_float32_is_rounded_half_to_even(patterns, end):
    """Random upper halves with the lower halves around a tie, and random ones."""
    patterns = np.array([p & ~0xFFFF | end for p in patterns] + patterns, np.uint32)
    numbers = patterns.view(np.float32)
    assert (bits_of(torch.tensor(numbers).bfloat16()) == rounded(numbers)).all()


@needed
@pytest.mark.parametrize("dtype", ("float64", "float16", "int64", "int32", "uint8", "bool"))
def test_from_and_to_other_types(dtype):
    numbers = np.array([0, 1, 2, 77, 200, 255] if dtype == "uint8" else [0, 1, -3, 257, 300, 65500, -12345])
    x = torch.tensor(numbers, dtype=dtype)
    with np.errstate(over="ignore"):
        assert (bits_of(x.bfloat16()) == rounded(host(x).astype(np.float32))).all()
    back = x.bfloat16().to(x.dtype)
    assert back.dtype == x.dtype and same(back, x.float().bfloat16().float().to(x.dtype))


def same(a, b):
    return np.array_equal(host(a), host(b), equal_nan=host(a).dtype.kind == "f")


@needed
@pytest.mark.torch
def test_casts_are_pytorchs():
    pytorch = pytest.importorskip("torch")
    numbers = np.concatenate([np.random.default_rng(0).standard_normal(5000) * 10.0 ** np.random.default_rng(1).integers(-42, 40, 5000),
                              [np.inf, -np.inf, np.nan, 0.0, -0.0, 1 + 2.0 ** -8, 1 + 3 * 2.0 ** -8, 1 + 2.0 ** -8 + 2.0 ** -40, 1e39]])
    with np.errstate(over="ignore"):
        for array in (numbers, numbers.astype(np.float32), numbers.astype(np.float16), np.arange(-70000, 70000, 7)):
            theirs = pytorch.from_numpy(array).bfloat16()
            ours = torch.tensor(array).bfloat16()
            np.testing.assert_array_equal(host(ours.float()), theirs.float().numpy())
            with np.errstate(invalid="ignore"):
                whole = np.abs(theirs.float().numpy()) < 2 ** 31
            np.testing.assert_array_equal(host(ours.long())[whole], theirs.long().numpy()[whole])


# --- promotion ------------------------------------------------------------------------------------------------------------

PROMOTED = {"bool": "bfloat16", "uint8": "bfloat16", "int8": "bfloat16", "int16": "bfloat16", "int32": "bfloat16", "int64": "bfloat16",
            "bfloat16": "bfloat16", "float16": "float32", "float32": "float32", "float64": "float64"}


@needed
@pytest.mark.parametrize("other", PROMOTED)
def test_promotion(other):
    x, y, wanted = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=other), getattr(torch, PROMOTED[other])
    assert torch.promote_types(torch.bfloat16, other) is torch.promote_types(other, torch.bfloat16) is wanted
    for result in (x + y, y + x, x * y, x / y, torch.maximum(x, y), torch.where(x > 0, x, y), x ** y, torch.cat([x, y])):
        assert result.dtype is wanted
    number = torch.ones((), dtype=other)
    assert (x + number).dtype is torch.bfloat16                 # a 0-d tensor of the same category does not widen
    assert (x + 2).dtype is (x * 2.5).dtype is (x + np.float64(1)).dtype is (1 / x).dtype is torch.bfloat16
    assert (torch.ones((), dtype=torch.bfloat16) + y).dtype is (y.dtype if y.is_floating_point() else torch.bfloat16)
    assert (x == y).dtype is torch.bool and (x == y).all()


@needed
@pytest.mark.torch
def test_promotion_is_pytorchs():
    pytorch = pytest.importorskip("torch")
    for other in PROMOTED:
        pairs = [[(torch, getattr(torch, n)), (pytorch, getattr(pytorch, n))] for n in ("bfloat16", other)]
        for shapes in ((2,), (2,)), ((2,), ()), ((), (2,)), ((), ()):
            ours, theirs = ([lib.ones(shape, dtype=d) for shape, (lib, d) in zip(shapes, kinds)] for kinds in zip(*pairs))
            for f in (lambda a, b: a + b, lambda a, b: b * a, lambda a, b: a / b):
                assert str(f(*ours).dtype) == str(f(*theirs).dtype), (other, shapes)
        assert torch.can_cast(torch.bfloat16, other) == pytorch.can_cast(pytorch.bfloat16, getattr(pytorch, other))
        assert torch.can_cast(other, torch.bfloat16) == pytorch.can_cast(getattr(pytorch, other), pytorch.bfloat16)


@needed
def test_it_can_be_the_default_type():
    torch.set_default_dtype(torch.bfloat16)
    try:
        for x in (torch.zeros(2), torch.tensor(1.5), torch.tensor([1]) / 2, nn.Linear(2, 2).weight):
            assert x.dtype is torch.bfloat16
        assert repr(torch.ones(2).cpu()) == "tensor([1., 1.])"
    finally:
        torch.set_default_dtype(torch.float32)


# --- operations: float32, rounded -------------------------------------------------------------------------------------------

@needed
@given(st.sampled_from(["a + b", "a - b", "a * b", "a / b", "torch.maximum(a, b)", "a // b", "a % b", "torch.where(a > b, a, b)"]),
       st.integers(0, 1000))
def test_an_operation_is_that_of_float32_rounded_once(expression, seed):
    (x, a), (y, b) = low(3, 4, seed=seed), low(4, seed=seed + 1)
    found = eval(expression, {"torch": torch, "a": a, "b": b})
    wide = eval(expression, {"torch": torch, "a": torch.tensor(x), "b": torch.tensor(y)})
    assert found.dtype is torch.bfloat16 and (bits_of(found) == rounded(host(wide))).all()


@needed
def test_sums_are_made_in_float32():
    """In bfloat16, counting ends at 256."""
    ones = torch.ones(1000, dtype=torch.bfloat16)
    assert ones.sum().item() == 1000 and ones.mean().item() == 1 and ones.norm().item() == 31.625 and ones.cumsum(0)[-1].item() == 1000
    assert (ones @ ones).item() == 1000 and torch.einsum("i,i->", ones, ones).item() == 1000 and ones.var().item() == 0
    assert ones.sum(dtype=torch.bfloat16).item() == 1000 and torch.sum(ones, dtype=torch.float32).dtype is torch.float32
    w = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    w.expand(1000, 3).sum().backward()
    assert w.grad.tolist() == [1000] * 3                        # also where the engine sums over what was broadcast
    table = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    F.embedding(torch.zeros(600, dtype=torch.int64), table).sum().backward()
    table.grad, by_index = None, table.grad
    table[torch.zeros(600, dtype=torch.int64)].sum().backward()
    assert by_index.tolist() == table.grad.tolist() == [[600] * 3, [0] * 3]


@needed
def test_moving_elements_makes_views():
    x = torch.randn(2, 3, dtype=torch.bfloat16)
    for y in (x.reshape(3, 2), x.T, x[0], x[:, 1:], x.expand(4, 2, 3), x.detach(), x.unbind(0)[1]):
        assert y.dtype is torch.bfloat16 and share_memory(x, y)
    y = x.T
    y[0] = 7
    assert x[:, 0].tolist() == [7, 7]
    x += 0.5
    x[0, 0] = torch.tensor(2.0)
    assert x.dtype is torch.bfloat16 and y[0].tolist() == [2, 7.5]


@needed
def test_writing_to_what_was_saved_is_still_noticed_where_it_matters():
    x = torch.randn(3, dtype=torch.bfloat16, requires_grad=True)
    y = x * 1
    z = torch.where(y > 0, y, -y)
    y.mul_(2)                                   # z was computed with a copy in float32: its gradient is that of the old numbers
    z.sum().backward()
    assert x.grad.abs().tolist() == [1, 1, 1]


@needed
def test_choosing_and_order():
    numbers = [0.5, float("nan"), -3.0, 7.0, 7.0, float("-inf")]
    x = torch.tensor(numbers).bfloat16()
    wide = torch.tensor(numbers)
    assert x.argmax().item() == wide.argmax().item() and x.argsort().tolist() == wide.argsort().tolist()
    assert x.sort(descending=True).indices.tolist() == wide.sort(descending=True).indices.tolist()
    assert x.topk(3).indices.tolist() == wide.topk(3).indices.tolist() and x.topk(2).values.dtype is torch.bfloat16
    assert x[2:].max(0).indices.item() == 1 and x[2:].min().item() == float("-inf")
    assert torch.isin(x, x[2:4]).tolist() == [False, False, True, True, True, False]
    values, places = torch.unique(x[2:5], return_inverse=True)
    assert values.dtype is torch.bfloat16 and values.tolist() == [-3, 7] and places.tolist() == [0, 1, 1]
    assert torch.searchsorted(values, x[3:5]).tolist() == [1, 1] and torch.nonzero(x[:1]).tolist() == [[0]]
    assert torch.isnan(x).tolist() == torch.isnan(wide).tolist() and torch.isfinite(x).sum().item() == 4 and x[2:5].any()
    long = torch.randn(3000, dtype=torch.bfloat16)
    assert long.topk(5).indices.tolist() == long.float().topk(5).indices.tolist()


@needed
def test_numbers_out_of_range():
    assert torch.full((1,), 3.3e38, dtype=torch.bfloat16).item() > 3e38
    with pytest.raises(RuntimeError, match="without overflow"):
        torch.full((1,), 3.4e38, dtype=torch.bfloat16)
    x = torch.tensor([3e38], dtype=torch.bfloat16)
    assert (x * 2).item() == float("inf") and (x * 1e-30 * 1e30).item() == pytest.approx(3e38, rel=0.02)


@needed
def test_an_operation_of_ones_own_gets_float32():
    seen = []

    class Double(torch.Function):
        def forward(self, x, dtype):
            seen.append((x.dtype, dtype))
            return 2 * x

        def backward(self, dy):
            seen.append(dy.dtype)
            return 2 * dy
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    y = Double.apply(x, np.dtype(x.array.dtype))
    y.sum().backward()
    del torch.Function.registry["Double"]
    assert seen == [(np.float32, np.float32), np.float32] and y.dtype is x.grad.dtype is torch.bfloat16 and x.grad.tolist() == [2, 2]


# --- PyTorch, live --------------------------------------------------------------------------------------------------------

def in_bfloat16(library, recipe):
    """The tensor of a recipe of tensorcases.py, its float32 ones in bfloat16."""
    array, transposed = tensorcases.values(recipe)
    x = library.from_numpy(np.ascontiguousarray(array.T).T if transposed else array).to(library.get_default_device())
    x = x.to(library.bfloat16) if recipe.startswith("f4") else x
    return x.requires_grad_() if x.is_floating_point() else x


def all_digits(y, library):
    if not isinstance(y, library.Tensor):
        return y if isinstance(y, (bool, int, float, str)) else repr(y)
    return [str(y.dtype), list(y.shape), y.detach().reshape(-1).tolist(), y.requires_grad]


# 299 is no bfloat16: PyTorch rounds it to an even exponent, and its gradient has another sign. It draws with weights of 16 bits.
APART = {"x ** 300", "torch.multinomial(torch.softmax(x.detach(), dim=-1), num_samples=1)"}
LIVE = {f"{group}: {name}": case for group in tensorcases.GROUPS for name, case in tensorcases.cases(group).items()}
LIVE.update({f"names: {name}": case for name, case in record_names.CASES.items()})
LIVE = {name: case for name, case in LIVE.items() if any(r.startswith("f4") for r in case[1:]) and case[0] not in APART}


@needed
@pytest.mark.torch
@pytest.mark.host("other tests compare devices")
@pytest.mark.parametrize("part", range(4))
def test_the_operations_are_pytorchs(part, monkeypatch):
    """Each case of two tables, its float32 tensors in bfloat16: most numbers are equal, and others differ by a unit in the last place.

    PyTorch rounds within an operation (tanh and softmax keep a rounded y for backward), and its gradients are off by as much.
    """
    pytorch = pytest.importorskip("torch")
    monkeypatch.setattr(tensorcases, "make", in_bfloat16)
    monkeypatch.setattr(tensorcases, "entry", all_digits)
    equal, numbers = 0, 0
    for case in list(LIVE.values())[part::4]:
        outcomes = []
        for library in (torch, pytorch):
            library.manual_seed(0)
            outcomes.append(tensorcases.outcome(library, case))
        (ours, theirs), message = outcomes, f"{case}: {outcomes}"
        if "error" in theirs or "error" in ours:
            assert ours == theirs, message
            continue
        for kind in ("out", "grad"):
            for a, b in zip(ours[kind], theirs[kind], strict=True):
                if not isinstance(b, list) or "float" not in b[0]:
                    assert a == b or isinstance(b, float) and math.isclose(a, b, rel_tol=2 * EPS), message
                    continue
                assert a[:2] == b[:2] and a[3:] == b[3:], message
                a, b = np.array(a[2]), np.array(b[2])
                size = np.abs(b[np.isfinite(b)]).max(initial=0.25)          # the upstream gradient is of size 1
                with np.errstate(invalid="ignore"):
                    assert np.allclose(a, b, rtol=2 * EPS, atol=EPS * size, equal_nan=True), message
                equal, numbers = equal + ((a == b) | np.isnan(b)).sum(), numbers + b.size
    assert numbers > 500 and equal > 0.9 * numbers


@needed
@pytest.mark.torch
@pytest.mark.host("the streams of the CPU")
@pytest.mark.parametrize("n", (1, 5, 15, 16, 17, 40, 100, 1000))
def test_random_numbers_are_pytorchs(n):
    """Float32 draws, rounded; normal ones to a unit in the last place, as the logarithm and the cosine are not those of one library."""
    pytorch = pytest.importorskip("torch")
    draws = {"rand": lambda t: t.rand(n, dtype=t.bfloat16), "uniform_": lambda t: t.empty(n, dtype=t.bfloat16).uniform_(-1, 3),
             "bernoulli": lambda t: t.bernoulli(t.full((n,), 0.3, dtype=t.bfloat16)),
             "randint": lambda t: t.randint(0, 100, (n,), dtype=t.bfloat16),
             "dropout": lambda t: t.nn.functional.dropout(t.ones(n, dtype=t.bfloat16), 0.3),
             "randn": lambda t: t.randn(n, dtype=t.bfloat16), "normal_": lambda t: t.empty(n, dtype=t.bfloat16).normal_(1, 2),
             "exponential_": lambda t: t.empty(n, dtype=t.bfloat16).exponential_()}
    for name, draw in draws.items():
        found = []
        for library in (torch, pytorch):
            library.manual_seed(n)
            found += [draw(library).float(), library.rand(2)]               # and what comes next
        ours, after, theirs, after_theirs = (t.cpu().numpy() for t in found)
        assert np.array_equal(after, after_theirs), name
        if name in ("randn", "normal_", "exponential_"):
            np.testing.assert_allclose(ours, theirs, rtol=2 * EPS, atol=1e-5, err_msg=name)
            assert (ours == theirs).mean() > 0.95 or n < 20
        else:
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


@needed
def test_random_numbers_without_pytorch():
    for draw in (lambda d: torch.rand(40, dtype=d), lambda d: torch.randn(12, dtype=d), lambda d: torch.zeros(5, dtype=d).uniform_(2, 5)):
        torch.manual_seed(3)
        narrow = draw(torch.bfloat16)
        torch.manual_seed(3)
        assert narrow.dtype is torch.bfloat16 and same(narrow.float(), draw(torch.float32).bfloat16().float())


# --- layers: statistics in float32, against float64 ---------------------------------------------------------------------------

NORMS = {"layer_norm": lambda x, w, b: F.layer_norm(x, (w.shape[0],), w, b),
         "rms_norm": lambda x, w, b: F.rms_norm(x, (w.shape[0],), w, 1e-5)}
HALVES = {"float16": 2.0 ** -11, "bfloat16": EPS}       # the largest relative error of one rounding


def gradients(function, dtype, arrays, dy):
    tensors = [torch.tensor(a, dtype=dtype).requires_grad_() for a in arrays]
    y = function(*tensors)
    y.backward(torch.tensor(dy, dtype=dtype))
    assert all(t.dtype == getattr(torch, dtype) for t in (y, *(t.grad for t in tensors if t.grad is not None)))
    return [host(t.double().detach()) for t in (y, *(t.grad for t in tensors if t.grad is not None))]


@needed
@pytest.mark.parametrize("shape", ((4, 16), (2, 3, 64), (1, 4), (50, 8)))
@pytest.mark.parametrize("scale", (1.0, 30.0), ids=lambda s: f"scale {s}")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("norm", NORMS)
def test_norms_are_within_one_rounding_of_float64(norm, dtype, shape, scale):
    """Inputs that 16 bits hold; float64 of the same numbers. y, dx, dw and db each are rounded once; the rest is float32's error."""
    r = np.random.default_rng(3)
    drawn = [r.standard_normal(shape) * scale + scale / 2, 1 + r.standard_normal(shape[-1]) / 4, r.standard_normal(shape[-1]),
             r.standard_normal(shape)]
    *arrays, dy = (host(torch.tensor(a, dtype=dtype).double()) for a in drawn)
    found, exact = (gradients(NORMS[norm], d, arrays, dy) for d in (dtype, "float64"))
    assert len(found) == len(exact) == (4 if norm == "layer_norm" else 3)
    for a, b in zip(found, exact):
        assert (np.abs(a - b) <= HALVES[dtype] * np.abs(b) * 1.001 + 2e-6 * np.abs(b).max()).all()


ROWS = {"softmax": lambda x: F.softmax(x, -1), "log_softmax": lambda x: F.log_softmax(x, -1), "gelu": F.gelu, "silu": F.silu,
        "tanh": torch.tanh, "logsumexp": lambda x: torch.logsumexp(x, -1), "var": lambda x: x.var(-1),
        "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(x.shape[0])), "mse": lambda x: F.mse_loss(x, 0 * x),
        "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None] * 0.5, x[None], is_causal=True),
        "tiled": lambda x: F.flash_attention(x[None], x[None], x[None], tile=(2, 4))}


@needed
@pytest.mark.parametrize("name", ROWS)
def test_other_operations_are_near_float64(name):
    """One rounding of the result; what is composed rounds between its operations."""
    x, dy = np.random.default_rng(1).standard_normal((2, 6, 8)).astype(np.float32)
    x = host(torch.tensor(x).bfloat16().double())
    upstream = torch.tensor(dy)
    shape = ROWS[name](torch.tensor(x)).shape
    upstream = host(upstream.reshape(-1)[:math.prod(shape)].reshape(shape).bfloat16().double())
    found, exact = (gradients(ROWS[name], d, [x], upstream) for d in ("bfloat16", "float64"))
    for a, b in zip(found, exact):
        np.testing.assert_allclose(a, b, rtol=3 * EPS, atol=2 * EPS * np.abs(b).max())


@needed
@pytest.mark.host("the kernels run there, on the emulator")
@pytest.mark.skipif(cpu_emulator.refusal() is not None, reason="the emulator needs a compiler")
def test_the_kernel_for_bfloat16_serves_tensors():
    x = torch.randn(1, 2, 20, 16, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for backend in ("emulator", "dense"):
        x.grad = None
        with torch.sdpa_backend(backend):
            y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        y.square().sum().backward()
        found.append([host(t.float()) for t in (y, x.grad)])
        assert y.dtype is x.grad.dtype is torch.bfloat16
    for a, b in zip(*found):
        np.testing.assert_allclose(a, b, rtol=0.03, atol=0.03 * np.abs(b).max())


@needed
def test_mixed_operands_are_refused_where_pytorch_refuses_them():
    x, w = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(3, 3)
    for call in (lambda: x @ w, lambda: F.linear(x, w), lambda: torch.einsum("ij,jk->ik", x, w),
                 lambda: F.scaled_dot_product_attention(x, w[:2], w[:2])):
        with pytest.raises(RuntimeError, match="dtype"):
            call()


# --- training ---------------------------------------------------------------------------------------------------------------

STEPS = {"SGD": lambda lib, p: lib.optim.SGD(p, lr=0.1),
         "momentum": lambda lib, p: lib.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
         "Adam": lambda lib, p: lib.optim.Adam(p, lr=0.02), "AdamW": lambda lib, p: lib.optim.AdamW(p, lr=0.02, amsgrad=True)}


def optimize(lib, make, steps=10):
    numbers = np.random.default_rng(0)
    parameters = [lib.tensor(numbers.standard_normal(s).astype(np.float32)).bfloat16().requires_grad_() for s in ((4, 3), (3,), ())]
    optimizer = make(lib, parameters)
    for _ in range(steps):
        for p in parameters:
            p.grad = lib.tensor(numbers.standard_normal(tuple(p.shape)).astype(np.float32)).bfloat16()
        optimizer.step()
    return parameters, optimizer


@needed
@pytest.mark.parametrize("name", STEPS)
def test_optimizers_step_in_float32_and_round(name):
    parameters, optimizer = optimize(torch, STEPS[name])
    for p in parameters:
        state = optimizer.state[p]
        assert p.dtype is torch.bfloat16
        assert all(value.dtype is (torch.float32 if key == "step" else torch.bfloat16) for key, value in state.items() if value is not None)
    again = torch.optim.AdamW(parameters) if name == "AdamW" else STEPS[name](torch, parameters)
    again.load_state_dict(optimizer.state_dict())
    assert all(same(a, b) for p in parameters for a, b in zip(optimizer.state[p].values(), again.state[p].values()) if a is not None)


@needed
@pytest.mark.torch
@pytest.mark.parametrize("name", STEPS)
def test_optimizers_are_pytorchs_but_for_rounding(name):
    """PyTorch rounds after each operation of a step, this library after the step."""
    pytorch = pytest.importorskip("torch")
    for ours, theirs in zip(optimize(torch, STEPS[name])[0], optimize(pytorch, STEPS[name])[0]):
        theirs = theirs.detach().float().numpy()
        np.testing.assert_allclose(host(ours.detach().float()), theirs, rtol=0.03, atol=0.03)


@needed
def test_small_updates_are_lost_without_master_weights():
    """1 − 0.001 is nearer to 1 than to the next bfloat16: what float32 adds up to 0.1, bfloat16 does not see."""
    for dtype, wanted in (torch.float32, 0.9), (torch.bfloat16, 1.0):
        w = torch.ones(1, dtype=dtype, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=0.001)
        for _ in range(100):
            w.grad = torch.ones(1, dtype=dtype)
            optimizer.step()
        assert w.item() == pytest.approx(wanted, abs=1e-5)


@needed
def test_a_model_in_bfloat16_learns_and_writes():
    from tinygrad_tf.generation import generate
    ids, found = torch.randint(0, 7, (4, 13)), {}
    for dtype in ("float32", "bfloat16"):
        torch.manual_seed(1)
        model = MiniGPT(7, 12, 16, 2, 32, 2, dropout=0.0, norm_first=True).to(getattr(torch, dtype))
        assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
        for _ in range(15):
            optimizer.zero_grad()
            logits, loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        assert logits.dtype is loss.dtype is getattr(torch, dtype)
        assert generate(model.eval(), ids[:1, :3], 5).shape == (1, 8)
        found[dtype] = losses
    np.testing.assert_allclose(found["bfloat16"][0], found["float32"][0], rtol=0.01)
    assert found["bfloat16"][-1] < 0.7 * found["bfloat16"][0]
    np.testing.assert_allclose(found["bfloat16"], found["float32"], rtol=0.15)


@needed
def test_a_checkpointed_block_in_bfloat16_has_the_same_bits():
    from tinygrad_tf.utils.checkpoint import checkpoint
    block, x = nn.TransformerBlock(8, 2, 16, dropout=0.2).bfloat16(), torch.randn(2, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for run in (block, lambda x: checkpoint(block, x)):
        torch.manual_seed(0)
        x.grad = None
        run(x).sum().backward()
        found.append(bits_of(x.grad))
    assert (found[0] == found[1]).all()


# --- files ------------------------------------------------------------------------------------------------------------------

@needed
def test_it_is_saved_and_loaded(tmp_path):
    model = nn.Linear(3, 2).bfloat16()
    everything = {"model": model.state_dict(), "empty": torch.zeros(0, 3, dtype=torch.bfloat16), "number": torch.tensor(1.5).bfloat16(),
                  "float": torch.ones(2)}
    torch.save(everything, tmp_path / "file.safetensors")
    assert b'"BF16"' in (tmp_path / "file.safetensors").read_bytes()[:2000]
    loaded = torch.load(tmp_path / "file.safetensors")
    for name, x in (("weight", model.weight), ("bias", model.bias)):
        assert loaded["model"][name].dtype is torch.bfloat16 and (bits_of(loaded["model"][name]) == bits_of(x)).all()
    assert loaded["empty"].shape == (0, 3) and loaded["number"].item() == 1.5 and loaded["float"].dtype is torch.float32
    nn.Linear(3, 2).bfloat16().load_state_dict(loaded["model"])


@needed
@pytest.mark.host("a process of its own")
def test_loading_it_without_the_package_says_what_to_install(tmp_path):
    torch.save([torch.ones(2, dtype=torch.bfloat16)], tmp_path / "x")
    printed = run_without_package(tmp_path, f"""
import tinygrad_tf as torch
try:
    torch.load({str(tmp_path / 'x')!r})
except RuntimeError as error:
    print(error)
""")
    assert "pip install 'tinygrad_tf[lowbit]'" in printed


@needed
def test_the_helper_widens_bfloat16_alone():
    x = torch.ones(2, dtype=torch.bfloat16).array
    assert widened(x).dtype == widened(x.dtype) == np.float32
    for other in (placed(np.ones(2, np.float16)), np.dtype(np.int8), "bfloat16", None, (1, 2), 3.5):
        assert widened(other) is other
