"""fused.cu on the emulator, which checks every access to memory, against the array forms of the same operations in float64."""
import functools
import shutil

import numpy as np
import pytest

import tinygrad_tf as torch
from tinygrad_tf import philox
from tinygrad_tf.autograd import constant
from tinygrad_tf.kernels import compile, fused
from tinygrad_tf.nn import functional as F
from tinygrad_tf.optim.adam import adam_step

pytestmark = [pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: the emulator compiles kernels with it"),
              pytest.mark.host("runs the kernels on the emulator, with NumPy arrays")]

COLUMNS, ROWS, SEEDS = (1, 2, 31, 33, 127, 128, 1000, 1025), (0, 1, 3, 130), (0, 1, 7)
TOLERANCE = 5e-6                                # max|Δ| / max|reference|, or / 0.3 where sums cancel to less
SOURCE = (compile.FOLDER / "fused.cu").read_text(encoding="utf-8")


def cross_entropy(x, w):
    targets = np.arange(len(x)) * 7 % x.shape[1]
    targets[2::5] = -100
    return F.cross_entropy(x, torch.tensor(targets), weight=w.detach() + 3, reduction="none")


OPS = {                                         # name → (function, the shapes of its arguments, how many kernels forward and backward are)
    "softmax": (lambda x: F.softmax(x, -1), "x", 2),
    "log_softmax": (lambda x: F.log_softmax(x, 1), "x", 2),
    "cross_entropy": (cross_entropy, "xc", 2),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, x.shape[1:], w, b, eps=0.5), "xcc", 3),
    "layer_norm without w and b": (lambda x: F.layer_norm(x, x.shape[1:], eps=0.5), "x", 2),
    "layer_norm without b": (lambda x, w: F.layer_norm(x, x.shape[1:], w, eps=0.5), "xc", 3),
    "layer_norm without w": (lambda x, b: F.layer_norm(x, x.shape[1:], None, b, eps=0.5), "xc", 3),
    "rms_norm": (lambda x, w: F.rms_norm(x, x.shape[1:], w, eps=0.5), "xc", 3),
    "rms_norm without w": (lambda x: F.rms_norm(x, x.shape[1:], eps=0.5), "x", 2),
    "gelu": (F.gelu, "x", 1),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), "x", 1),
    "silu": (F.silu, "x", 1),
}


def serves_numpy(x, axis=-1):
    """`fused.serves`, but for arrays of NumPy, and empty ones too."""
    return x.dtype == np.float32 and axis in (-1, x.ndim - 1)


@pytest.fixture(autouse=True)
def on_numpy(monkeypatch):
    """Operations on float32 take the kernels; what a kernel forgets to write is NaN; names of the kernels launched."""
    launched, launch = [], fused.launch
    monkeypatch.setattr(fused, "serves", serves_numpy)
    monkeypatch.setattr(fused, "_like", lambda x: np.full(x.shape, np.nan, np.float32))
    monkeypatch.setattr(fused, "launch", lambda kernel, *args: (launched.append(kernel.name), launch(kernel, *args)))
    return launched


def arguments(kinds, rows, n, seed=0, scale=2.0):
    """x [rows, n], parameters [n], and dy."""
    rng = np.random.default_rng((rows, n, seed))
    return [rng.normal(0, scale, (rows, n) if kind == "x" else n) for kind in kinds], rng.normal(size=(rows, n))


def outcome(name, arrays, dy, dtype):
    """[y, the gradients] of one operation."""
    tensors = [torch.tensor(a.astype(dtype), requires_grad=True) for a in arrays]
    y = OPS[name][0](*tensors)
    y.backward(torch.tensor(dy.reshape(-1)[:y.numel()].reshape(y.shape).astype(dtype)))
    return [y.detach().numpy(), *(t.grad.numpy() for t in tensors if t.grad is not None)]


def require_close(got, want, tolerance=TOLERANCE):
    assert [g.shape for g in got] == [w.shape for w in want]
    for place, (g, w) in enumerate(zip(got, want)):
        assert g.dtype == np.float32
        error = abs(g - w).max() / max(abs(w).max(), 0.3) if w.size else 0
        assert error <= tolerance, (place, error)


def emulator():
    from tinygrad_tf.kernels import cpu_emulator
    return cpu_emulator


@functools.cache
def module(code=SOURCE, check=True):
    return emulator().RawModule(code=code, check=check)


def use_module(monkeypatch, **choice):
    monkeypatch.setattr(fused, "function", lambda file, options, name, xp: module(**choice).get_function(name))


# --- right numbers --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", OPS)
def test_kernels_are_the_array_forms(name, rows, on_numpy, monkeypatch):
    """Many long rows without the emulator's checks, which take their time; they have looked at the shorter ones."""
    for n in COLUMNS:
        arrays, dy = arguments(OPS[name][1], rows, n)
        want = outcome(name, arrays, dy, np.float64)
        for seed in SEEDS if rows < 130 else SEEDS[n % 3:n % 3 + 1]:
            use_module(monkeypatch, check=rows * n < 10_000)
            on_numpy.clear()
            with emulator().schedule(seed=seed):
                require_close(outcome(name, arrays, dy, np.float32), want)
            assert len(on_numpy) == (OPS[name][2] if rows else 0)


@pytest.mark.parametrize("name", OPS)
def test_few_blocks_for_many_rows(name, monkeypatch):
    monkeypatch.setattr(fused, "MAX_BLOCKS", 2)
    arrays, dy = arguments(OPS[name][1], 67, 40)
    require_close(outcome(name, arrays, dy, np.float32), outcome(name, arrays, dy, np.float64))


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_many_chunks_of_rows(name, monkeypatch):
    monkeypatch.setattr(fused, "CHUNK", 5)
    monkeypatch.setattr(fused, "MAX_CHUNKS", 7)
    for rows in (4, 34, 35, 36, 61):
        arrays, dy = arguments(OPS[name][1], rows, 70)
        require_close(outcome(name, arrays, dy, np.float32), outcome(name, arrays, dy, np.float64))


@pytest.mark.parametrize("name", OPS)
def test_the_same_bits_in_every_order(name):
    arrays, dy = arguments(OPS[name][1], 130, 70)
    found = []
    for seed in SEEDS:
        with emulator().schedule(seed=seed):
            found.append(outcome(name, arrays, dy, np.float32))
    assert all(np.array_equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


SPECIAL = [np.inf, -np.inf, np.nan, 3e38, -3e38, 1e20, -1e20, 1e10, 100.0, -100.0, 1e-30, 0.0, -0.0]


@pytest.mark.parametrize("name", OPS)
def test_nan_inf_and_overflow_come_out_as_in_the_array_form(name, monkeypatch):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(2 * len(SPECIAL) + 1, 37)).astype(np.float32)
    for i, value in enumerate(SPECIAL):
        x[2 * i, 5], x[2 * i + 1] = value, value        # one of the row, all of the row
        if np.isfinite(value):
            x[2 * i + 1] *= np.sign(x[-1])              # equal ones would leave μ − x to rounding alone
    others, dy = arguments(OPS[name][1][1:], *x.shape)
    got = outcome(name, [x, *others], dy, np.float32)
    monkeypatch.setattr(fused, "serves", lambda *args: False)
    for g, w in zip(got, outcome(name, [x, *others], dy, np.float32)):
        assert np.array_equal(np.isnan(g), np.isnan(w))
        np.testing.assert_array_equal(g[np.isinf(w)], w[np.isinf(w)])
        np.testing.assert_allclose(g[np.isfinite(w)], w[np.isfinite(w)], rtol=1e-4, atol=1e-5)


def test_nan_inf_and_overflow_are_where_they_should_be():
    wide = torch.tensor([[1e30, -1e30, 0.0]])
    assert F.layer_norm(wide, 3).isnan().all() and (F.rms_norm(wide, 3) == 0).all()
    assert F.softmax(torch.full((1, 3), -torch.inf), -1).isnan().all()
    x = torch.tensor([[1.0, 2.0], [np.nan, 0.0]], requires_grad=True)
    F.cross_entropy(x, torch.tensor([1, -100])).backward()                  # what stands in an ignored row does not count
    assert x.grad[0].isfinite().all() and (x.grad[1] == 0).all()


def test_rows_that_are_not_contiguous_and_more_axes():
    x = np.random.default_rng(0).normal(size=(3, 10, 4, 2)).astype(np.float32)
    for view in (x.swapaxes(1, 3), x[:, ::2, 1:], x.transpose(2, 0, 3, 1), x[0, :, 0, 0]):
        y = F.softmax(constant(view), -1).numpy()
        np.testing.assert_allclose(y, np.exp(view) / np.exp(view).sum(-1, keepdims=True), rtol=1e-5)
    w = np.random.default_rng(1).normal(size=(4, 2))
    got = F.layer_norm(constant(x), (4, 2), constant(w.astype(np.float32))).numpy()
    want = F.layer_norm(constant(x.astype(float)), (4, 2), constant(w)).numpy()
    require_close([got], [want])


def test_half_precision_takes_the_kernels_in_float32(on_numpy):
    x = torch.tensor(np.random.default_rng(0).normal(size=(3, 40)).astype(np.float16))
    for function in (lambda v: F.softmax(v, -1), F.gelu, lambda v: F.rms_norm(v, 40, eps=1e-6), lambda v: F.layer_norm(v, 40)):
        on_numpy.clear()
        y = function(x)
        assert y.dtype == torch.float16 and len(on_numpy) == 1
        np.testing.assert_allclose(y.numpy(), function(x.double()).numpy(), rtol=2e-3, atol=1e-3)


def test_other_dtypes_axes_and_smoothing_keep_the_array_form(on_numpy):
    x = torch.randn(3, 4, dtype=torch.float64)
    F.softmax(x, -1), F.gelu(x), F.layer_norm(x, 4), F.softmax(x.float(), 0)
    F.cross_entropy(x.float(), torch.tensor([0, 1, 2]), label_smoothing=0.1)
    assert on_numpy == []


def test_without_a_gradient_no_slope_is_written(on_numpy):
    x = torch.randn(3, 5)
    nodes = []
    with torch.autograd.observing(lambda node, args, out: nodes.append(node)):
        assert F.gelu(x).isfinite().all() and F.silu(x).isfinite().all()
    assert [node.saved for node in nodes[::3]] == [None] * len(nodes[::3]) and on_numpy == ["gelu", "silu"]


# --- Adam -----------------------------------------------------------------------------------------------------------------

def adam_state(dtype, n, amsgrad):
    rng = np.random.default_rng(n)
    p, g = rng.normal(size=(2, n))
    m, v, largest = np.zeros((3, n), dtype)
    return [p.astype(dtype), g.astype(dtype), m, v, largest if amsgrad else None]


@pytest.mark.parametrize("options", [dict(), dict(amsgrad=True), dict(maximize=True), dict(penalty=0.3), dict(shrink=0.9),
                                     dict(penalty=0.1, maximize=True, amsgrad=True)], ids=str)
@pytest.mark.parametrize("n", COLUMNS)
def test_adam(n, options):
    options = dict(options)
    amsgrad, found = options.pop("amsgrad", False), []
    for step, dtype in ((fused.adam, np.float32), (adam_step, np.float64)):
        p, g, m, v, largest = state = adam_state(dtype, n, amsgrad)
        for t in range(1, 5):
            step(p, g * (t % 2), m, v, largest, float(t), 1e-2, (0.8, 0.9), 1e-3, **options)        # v falls at even steps
        found.append([a for a in state if a is not None])
    require_close(*found)


def test_adam_keeps_nan_where_it_is_and_a_square_that_shrinks():
    p, g, m, v, largest = adam_state(np.float32, 6, True)
    g[2], largest[3], largest[4], v[4] = np.nan, np.nan, 5, 1
    want = [a.copy() for a in (p, g, m, v, largest)]
    fused.adam(p, g, m, v, largest, 1.0, 1e-2, (0.9, 0.999), 1e-8)
    adam_step(*want, 1.0, 1e-2, (0.9, 0.999), 1e-8)
    for a, b in zip((p, m, v, largest), (want[0], *want[2:])):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert np.isnan(p).tolist() == [False, False, True, True, False, False] and largest[4] == 5


def test_what_the_optimizer_may_write_into():
    p = np.zeros((4, 6), np.float32)
    assert fused.can_step(p, p, None) and not fused.can_step(p[:, ::2], p, None)
    assert not fused.can_step(p, p.T, None) and not fused.can_step(p.astype(np.float64))


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_optimizers_take_the_kernel(optimizer, on_numpy, monkeypatch):
    found = []
    for forced in (True, False):
        monkeypatch.setattr(fused, "serves", serves_numpy if forced else lambda *args: False)
        torch.manual_seed(1)
        p = torch.randn(5, 7, requires_grad=True)
        opt = optimizer([p], lr=1e-2, weight_decay=0.1, amsgrad=True)
        for _ in range(3):
            opt.zero_grad()
            (p * p * p).sum().backward()
            opt.step()
        found.append(p.detach().numpy())
    assert on_numpy == ["adam"] * 3
    np.testing.assert_allclose(*found, rtol=1e-5)


# --- dropout's mask ------------------------------------------------------------------------------------------------------

TILES = [(range(1), range(1), range(1)), (range(3), range(5), range(33)), (range(2, 4), range(7, 9), range(6, 131)),
         (range(2**32 - 1, 2**32), range(2**32 - 2, 2**32), range(2**34 - 7, 2**34)), (range(1), range(3), range(4, 5)),
         (range(2), range(0), range(3)), (range(1), range(40), range(1000))]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_philox_keeps_what_the_array_form_keeps(tile, seed):
    key = (0xA4093822, 0x299F31D0)
    with emulator().schedule(seed=seed):
        kept = fused.philox_keep(key, *tile, philox.below(0.3), np)
    assert kept.dtype == bool
    np.testing.assert_array_equal(kept, philox.keep_tile(key, *tile, 0.3, np.float32) > 0)


# --- arguments ----------------------------------------------------------------------------------------------------------

ROW, TABLE, COLUMN = (5,), (4, 5), (4,)
OPERANDS = {                                    # name → the shapes of the operands by name, and the other arguments
    "softmax": (dict(x=TABLE), ()), "softmax_backward": (dict(dy=TABLE, y=TABLE), ()),
    "log_softmax": (dict(x=TABLE), ()), "log_softmax_backward": (dict(dy=TABLE, y=TABLE), ()),
    "cross_entropy": (dict(x=TABLE, target=COLUMN), ()),
    "cross_entropy_backward": (dict(p=TABLE, target=COLUMN, counted=COLUMN, a=COLUMN), ()),
    "norm": (dict(x=TABLE, w=ROW, b=ROW), (1e-5, True)), "norm_backward": (dict(dy=TABLE, x_hat=TABLE, r=(4, 1), w=ROW), (True,)),
    "norm_columns": (dict(dy=TABLE, x_hat=TABLE), (ROW,)), "activation": (dict(x=TABLE), ("gelu", True)),
    "adam": (dict(p=TABLE, g=TABLE, m=TABLE, v=TABLE, largest=TABLE), (1.0, 1e-3, (0.9, 0.99), 1e-8)),
}
every_operand = pytest.mark.parametrize("name, operand", [(name, operand) for name, (shapes, _) in OPERANDS.items() for operand in shapes])


def call(name, **changed):
    shapes, others = OPERANDS[name]
    arrays = {o: np.zeros(shape, {"target": np.int64, "counted": bool}.get(o, np.float32)) for o, shape in shapes.items()}
    return getattr(fused, name)(*(arrays | changed).values(), *others)


def refused(error, words, launched, name, **changed):
    """What it says; nothing is launched."""
    with pytest.raises(error, match=words) as caught:
        call(name, **changed)
    assert str(caught.value).startswith(f"fused.{name}: ") and launched == []
    return str(caught.value)


def test_every_function_with_arrays_is_among_them(on_numpy):
    hosts = [name for name, f in vars(fused).items() if hasattr(f, "__wrapped__")]
    assert sorted(hosts) == sorted(OPERANDS)
    for name in OPERANDS:
        call(name)
        assert len(on_numpy) == 1 and not on_numpy.clear()


@every_operand
@pytest.mark.parametrize("stranger", [None, [1.0], 1.5, "x", torch.zeros(4, 5)], ids=type)
def test_what_is_no_array(name, operand, stranger, on_numpy):
    if stranger is None and operand in fused.OPTIONAL:
        call(name, **{operand: None})
        assert len(on_numpy) == 1
        return
    refused(TypeError, f"{operand} must be an array of NumPy or CuPy, got ", on_numpy, name, **{operand: stranger})


FREE = {("norm", "x"): 0, ("cross_entropy", "x"): 1, ("cross_entropy_backward", "p"): 1}       # the axis that no other operand has


def other_shapes(shape, free=None):
    for axis in {*range(len(shape))} - {free}:
        for step in (1, -1):
            yield (*shape[:axis], shape[axis] + step, *shape[axis + 1:])
    yield from (shape[1:], (*shape, 2))


@every_operand
def test_operands_that_do_not_fit(name, operand, on_numpy):
    """A kernel would read past the end of the shorter one."""
    shapes, _ = OPERANDS[name]
    if len(shapes) == 1:                        # fits whatever it is
        return
    for shape in other_shapes(shapes[operand], FREE.get((name, operand))):
        said = refused(ValueError, "got ", on_numpy, name, **{operand: np.zeros(shape, np.int64 if operand == "target" else np.float32)})
        assert str(shape) in said and (operand == next(iter(shapes)) or f": {operand} must have " in said)


@pytest.mark.parametrize("name, operand", [("softmax", "x"), ("log_softmax", "x"), ("norm", "x"), ("cross_entropy", "x")])
def test_rows_have_an_axis(name, operand, on_numpy):
    refused(ValueError, r"got the shape \(\)", on_numpy, name, **{operand: np.zeros((), np.float32)})


@pytest.mark.parametrize("name", ["cross_entropy", "cross_entropy_backward"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, bool, complex])
def test_targets_are_whole_numbers(name, dtype, on_numpy):
    refused(TypeError, f"target must be integers, got {np.dtype(dtype)}", on_numpy, name, target=np.zeros(COLUMN, dtype))


@pytest.mark.parametrize("operand", ["p", "m", "v", "largest"])
@pytest.mark.parametrize("form", ["float64", "gaps", "read-only"])
def test_adam_writes_only_into_what_it_can(operand, form, on_numpy):
    x = np.zeros((4, 10), np.float32)[:, ::2] if form == "gaps" else np.zeros(TABLE, form if form == "float64" else np.float32)
    x.flags.writeable = form != "read-only"
    refused(ValueError, "float32, writable, without gaps", on_numpy, "adam", **{operand: x})


@pytest.mark.parametrize("given", ["relu", None, "softmax_forward"])
def test_the_name_of_an_activation(given, on_numpy):
    with pytest.raises(ValueError, match="fused.activation: name must be one of gelu, gelu_tanh, silu, got "):
        fused.activation(np.zeros(3, np.float32), given, True)
    assert on_numpy == []


def test_the_shape_of_columns(on_numpy):
    dy = np.zeros((4, 6), np.float32)
    assert [d.shape for d in fused.norm_columns(dy, dy, (2, 3))] == [(2, 3)] * 2
    on_numpy.clear()
    with pytest.raises(ValueError, match=r"fused.norm_columns: `shape` must have 6 elements.*got \(5,\)"):
        fused.norm_columns(dy, dy, (5,))
    assert on_numpy == []


@pytest.mark.parametrize("rows", ROWS)
def test_columns_without_a_bias(rows):
    dy, x_hat = np.random.default_rng(rows).normal(size=(2, rows, 40)).astype(np.float32)
    (dw, db), (alone, nothing) = fused.norm_columns(dy, x_hat, (40,)), fused.norm_columns(dy, x_hat, (40,), bias=False)
    assert nothing is None and db.shape == (40,) and np.array_equal(dw, alone)


# --- mistakes are noticed ------------------------------------------------------------------------------------------------

def replaced(old, new, which=0):
    """A change of the source: its which-th `old` becomes `new`."""
    def change(code):
        parts = code.split(old)
        return old.join(parts[:which + 1]) + new + old.join(parts[which + 1:])
    return change


MUTANTS = {
    **{f"barrier {i + 1} removed": replaced("__syncthreads();", ";", i) for i in range(3)},
    "a barrier that idle threads skip": replaced("__syncthreads();", "if (i < n) __syncthreads();", 2),
    "a barrier in a branch": replaced("square = 0.f;\n        if (centred)", "square = 0.f;\n        if (threadIdx.x < n)"),
    "sum over half a warp": replaced("far = LANES / 2", "far = LANES / 4"),
    "the first warp alone": replaced("warp < blockDim.x / LANES", "warp < 1"),
    "a warp that nobody wrote": replaced("warp < blockDim.x / LANES", "warp <= blockDim.x / LANES"),
    "one column too many": replaced("i = threadIdx.x; i < n;", "i = threadIdx.x; i <= n;"),
    "the last column forgotten": replaced("i = threadIdx.x; i < n;", "i = threadIdx.x; i < n - 1;"),
    "columns one further": replaced("i = threadIdx.x; i", "i = threadIdx.x + 1; i"),
    "one row too many": replaced("row = blockIdx.x; row < rows", "row = blockIdx.x; row <= rows"),
    "rows that no block takes": replaced("row += gridDim.x", "row += rows"),
    "one element too many": replaced("threadIdx.x; i < n; i += (long", "threadIdx.x; i <= n; i += (long"),
    "elements that no thread takes": replaced("i += (long long)gridDim.x * blockDim.x", "i += n"),
    "the maximum not subtracted": replaced("expf(x[i] - top)", "expf(x[i])"),
    "the maximum subtracted in the sum only": replaced("expf(x_row[i] - top) / total", "expf(x_row[i]) / total"),
    "a maximum that starts at 0": replaced("__int_as_float(0xff800000)", "0.f"),
    "a maximum that is never reset": replaced("    float top = __int_as_float(0xff800000);     // −inf",
                                              "    static float top = __int_as_float(0xff800000);"),
    "a sum that is not reset for the next row": replaced("float dot = 0.f;\n        MY", "static float dot = 0.f;\n        MY"),
    "the statistics of the next row": replaced("const float* x_row = x + row * n;", "const float* x_row = x + (row + 1) * n;"),
    "softmax: Σ dy · y forgotten": replaced("(dy_row[i] - dot)", "dy_row[i]"),
    "log_softmax: the logarithm forgotten": replaced("log_total = logf(", "log_total = ("),
    "log_softmax: Σ dy forgotten": replaced("expf(y_row[i]) * total", "expf(y_row[i])"),
    "cross entropy: the next target": replaced("x_row[target[row]]", "x_row[target[row] + 1]"),
    "cross entropy: every thread writes the loss": replaced("if (threadIdx.x == 0) loss[row] =", "loss[row] = threadIdx.x + "),
    "cross entropy: the one of the target forgotten": replaced("(i == target[row] ? weight : 0.f)", "0.f"),
    "cross entropy: ignored rows count": replaced("counted[row] ?", "true ?"),
    "norm: the mean not subtracted": replaced("(x_row[i] - mean) * scale", "x_row[i] * scale"),
    "norm: the sum for the mean": replaced("mean = block_reduce(SUM, mean) / n;\n        }", "mean = block_reduce(SUM, mean);\n        }"),
    "norm: eps forgotten": replaced(" / n + eps", " / n"),
    "norm: zeros for an overflow": replaced("if (centred && scale == 0.f)", "if (false)"),
    "norm: RMSNorm centred too": replaced("if (centred) {", "{"),
    "norm: mean(g) forgotten": replaced("mean = centred ? block_reduce", "mean = false ? block_reduce"),
    "norm: mean(g · x̂) forgotten": replaced("- x_row[i] * dot", ""),
    "norm: another row's scale": replaced("* r[row];", "* r[0];"),
    "columns: a row counted twice": replaced("end = min(first + chunk, rows)", "end = min(first + chunk + 1, rows)"),
    "columns: rows past the end": replaced("end = min(first + chunk, rows)", "end = first + chunk"),
    "columns: past the last column": replaced("if (i < n) {\n        for", "{\n        for"),
    "columns: one warp not added": replaced("other = 1; other", "other = 2; other"),
    "columns: chunks that overwrite each other": replaced("dw[blockIdx.y * n + i]", "dw[i]"),
    "columns: lanes that share a cell": replaced("of_warp[0][warp][lane] = w_sum", "of_warp[0][warp][lane / 2] = w_sum"),
    "columns: a bias that nobody wants": replaced("if (db) db[", "db["),
    "gelu: φ without its constant": replaced("* 0.39894228f", ""),
    "gelu_tanh: no cube": replaced("(cubic * square + c)", "(c)"),
    "silu: σ(−x)": replaced("expf(-x[i])", "expf(x[i])"),
    "adam: 1 − β₂ for 1 − β₁": replaced("rest1 * (slope", "rest2 * (slope"),
    "adam: m not kept": replaced("m[i] = mean;", ""),
    "adam: eps inside the root": replaced("sqrtf(square) / root + eps", "sqrtf(square + eps) / root"),
    "adam: the square of now, not the largest": replaced("largest[i] > square ||", ""),
    "adam: the decay forgotten": replaced("shrink * weight", "weight"),
    "philox: nine rounds": replaced("round < 10", "round < 9"),
    "philox: the key not raised": replaced("k1 += 0xBB67AE85u;", ""),
    "philox: words past the end": replaced("j >= 0 && j < keys", "j >= 0"),
    "philox: words before the start": replaced("j >= 0 && j < keys", "j < keys"),
    "philox: heads and rows exchanged": replaced("line % rows", "line / rows"),
    "philox: a block too few": replaced("(j0 + keys + 3) / 4", "(j0 + keys) / 4"),
}


def test_the_list_names_every_barrier():
    assert SOURCE.count("__syncthreads();") == 3
    assert [name for name, change in MUTANTS.items() if change(SOURCE) == SOURCE] == []


@functools.cache
def expected(name, rows, n, shift):
    arrays, dy = arguments(OPS[name][1], rows, n)
    arrays[0] += shift
    return arrays, dy, outcome(name, arrays, dy, np.float64)


def run_everything():
    """AssertionError for a wrong number; the emulator raises for the rest."""
    for name in OPS:
        for rows, n, shift in ((1, 1, 0), (9, 70, 0), (2, 33, 90), (1, 33, -200)):      # e^90 is inf, e^−200 is 0
            arrays, dy, want = expected(name, rows, n, shift)
            require_close(outcome(name, arrays, dy, np.float32), want, 1e-3)
    test_nan_inf_and_overflow_are_where_they_should_be()
    test_columns_without_a_bias(9)
    test_adam(33, dict(shrink=0.9, amsgrad=True))
    test_philox_keeps_what_the_array_form_keeps((range(2, 5), range(7, 9), range(6, 25)), 0)


@pytest.mark.parametrize("name", [None, *MUTANTS])
def test_a_planted_mistake_is_noticed(name, monkeypatch):
    monkeypatch.setattr(fused, "MAX_BLOCKS", 2)
    monkeypatch.setattr(fused, "CHUNK", 5)
    use_module(monkeypatch, code=MUTANTS[name](SOURCE) if name else SOURCE)
    if name is None:
        return run_everything()
    with pytest.raises((AssertionError, emulator().KernelError)):
        run_everything()
