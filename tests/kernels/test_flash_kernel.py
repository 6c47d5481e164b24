"""flash_attention.cu on the emulator, which checks every access to memory, against the definition in float64."""
import math
import shutil
from types import SimpleNamespace

import mutants
import numpy as np
import pytest
from kernels.flash_cases import CAUSAL, FULL, OUTPUTS, Case, errors, inputs, reference

from tinygrad_tf import tensor
from tinygrad_tf.autograd import backward, constant
from tinygrad_tf.kernels import compile, flash
from tinygrad_tf.nn import functional as F
from tinygrad_tf.ops.flash_attention import Band
from tinygrad_tf.ops.kernel_attention import KernelAttention, refusal

pytestmark = [pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: the emulator compiles kernels with it"),
              pytest.mark.host("runs the kernels on the emulator, with NumPy arrays")]
TOLERANCE = 3e-6

CASES = [
    Case(1, 1, 16), Case(1, 133, 32), Case(133, 1, 16), Case(63, 65, 32), Case(65, 63, 16), Case(64, 64, 64, CAUSAL),
    Case(77, 77, 32, CAUSAL), Case(77, 133, 16, CAUSAL), Case(133, 77, 32, CAUSAL), Case(65, 65, 64, CAUSAL, padding=True),
    Case(77, 133, 32, Band(56, None, 0)), Case(5, 257, 32, Band(252, None, 0), padding=True), Case(133, 77, 16, Band(-56, None, 0)),
    Case(133, 133, 32, Band(0, 9, 0)), Case(257, 257, 16, Band(0, 63, 0), B=1), Case(133, 65, 32, Band(-10, 20, 0), padding=True),
    Case(133, 133, 16, Band(0, 5, 5)), Case(65, 257, 32, Band(100, 30, 30), B=1), Case(77, 65, 32, Band(3, 0, 0)),
    Case(65, 133, 16, Band(0, None, 17)), Case(65, 133, 16, Band(0, 17, None)), Case(65, 133, 16, Band(40, -3, 70)),
    Case(40, 50, 16, Band(1000, 3, 0)), Case(40, 50, 16, Band(-1000, None, 0)), Case(40, 50, 16, Band(1000, None, 0)),
    Case(65, 77, 16, heads=(4, 4)), Case(65, 77, 16, CAUSAL, heads=(4, 2), padding=True), Case(65, 77, 16, Band(12, 9, 4), heads=(3, 1)),
    Case(77, 133, 64, padding=True), Case(133, 65, 64, Band(-4, 70, 1)), Case(65, 77, 128, Band(12, None, 0)),
    Case(33, 65, 128, Band(0, 20, 3), padding=True, B=1), Case(65, 63, 5, CAUSAL), Case(63, 65, 24, padding=True),
    Case(33, 40, 80, CAUSAL, B=1), Case(33, 40, 10, CAUSAL, Dv=30), Case(33, 40, 30, CAUSAL, Dv=10),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


@pytest.fixture(autouse=True)
def unset_outputs(monkeypatch):
    """What a kernel forgets to write stays NaN."""
    def poisoned(shape, dtype):
        return np.full(shape, np.nan, dtype)
    monkeypatch.setattr(flash._Run, "_new", lambda self, heads, rows: poisoned((self.B, heads, rows, self.head_dim), self.dtype))
    monkeypatch.setattr(flash._Run, "_statistic", lambda self: poisoned((self.B, self.H, self.Tq), np.float32))


def computed(case, given):
    """(o, lse, dq, dk, dv)"""
    o, lse = flash.forward(given.q, given.k, given.v, given.valid_tokens, case.band, case.scale)
    return o, lse, *flash.backward(given.q, given.k, given.v, o, lse, given.d_o, given.valid_tokens, case.band, case.scale)


def require(case, given, got):
    want = reference(case, given)
    assert [(name, x.shape, x.dtype) for name, x in zip(OUTPUTS, got)] == [(name, x.shape, np.float32) for name, x in zip(OUTPUTS, want)]
    assert max(errors(got, want)) <= TOLERANCE, dict(zip(OUTPUTS, errors(got, want)))


# --- right numbers --------------------------------------------------------------------------------------------------

@every_case
def test_outputs_and_gradients(case):
    given = inputs(case)
    require(case, given, computed(case, given))


@pytest.mark.parametrize("seed", [1, 7])
@pytest.mark.parametrize("case", [c for c in CASES if c.name in (
    "Tq 77, Tk 133, Dh 16, heads (2, 1), right 0", "Tq 133, Tk 65, Dh 32, heads (2, 1), query_offset -10, left 20, right 0, padding",
    "Tq 65, Tk 65, Dh 64, heads (2, 1), right 0, padding", "Tq 33, Tk 65, Dh 128, heads (2, 1), left 20, right 3, padding")],
    ids=lambda c: c.name)
def test_the_order_of_threads_and_blocks_changes_no_bit(case, seed):
    from tinygrad_tf.kernels.cpu_emulator import schedule
    given = inputs(case)
    want = computed(case, given)
    with schedule(seed=seed):
        got = computed(case, given)
    assert all(np.array_equal(a, b) for a, b in zip(want, got))


def test_the_orders_above_are_four_cases():
    assert len({c.name for c in CASES}) == len(CASES)
    assert len(test_the_order_of_threads_and_blocks_changes_no_bit.pytestmark[0].args[1]) == 4


def test_two_runs_agree_bit_for_bit():
    case = Case(77, 133, 32, CAUSAL, padding=True)
    given = inputs(case)
    assert all(np.array_equal(a, b) for a, b in zip(computed(case, given), computed(case, given)))


@pytest.mark.parametrize("case", [Case(77, 101, 64, CAUSAL, B=1), Case(33, 50, 128, Band(17, 20, 0), B=1)], ids=lambda c: c.name)
def test_the_smaller_tiles_of_a_gpu_with_little_shared_memory(case, monkeypatch):
    monkeypatch.setattr(flash, "shared_limit", lambda xp: 64 << 10)
    given = inputs(case)
    require(case, given, computed(case, given))


def test_large_scores_do_not_overflow():
    case = Case(40, 50, 16, CAUSAL)
    given = inputs(case)
    given = given._replace(q=given.q * 30, k=given.k * 30)
    assert max(errors(computed(case, given), reference(case, given))) <= 2e-4         # lse is about 1000: its last bit is 6e-5


def test_threads_do_not_queue_for_banks_of_shared_memory(monkeypatch):
    case, passes, seen = Case(64, 64, 32, B=1, heads=(1, 1)), {}, []

    def counting(kernel, *args, **options):
        monkeypatch.setattr(kernel, "count_traffic", True)
        launched(kernel, *args, **options)
        seen.append(kernel.name)
        passes[kernel.name] = [(line.passes, line.ideal) for line in kernel.traffic if line.space == "shared"]
    launched = flash.launch
    monkeypatch.setattr(flash, "launch", counting)
    computed(case, inputs(case))
    assert seen == ["flash_forward", "flash_delta", "flash_dkdv", "flash_dq"] and not passes.pop("flash_delta")
    assert all(lines and sum(p for p, _ in lines) <= 1.01 * sum(ideal for _, ideal in lines) for lines in passes.values())


# --- arrays in any form ---------------------------------------------------------------------------------------------

def views(x):
    """The same numbers in other places of memory."""
    wide = np.full((*x.shape[:2], 2 * x.shape[2], x.shape[3] + 8), np.nan, x.dtype)
    wide[:, :, ::2, :-8] = x
    odd = np.full((*x.shape[:3], x.shape[3] + 1), np.nan, x.dtype)
    odd[..., 1:] = x
    return {"gaps between rows": wide[:, :, ::2, :-8], "rows at odd addresses": odd[..., 1:],
            "[B, T, H, Dh]": x.swapaxes(1, 2).copy().swapaxes(1, 2), "columns apart": np.asfortranarray(x),
            "backwards": x[:, :, ::-1].copy()[:, :, ::-1], "read-only": np.broadcast_to(x, x.shape)}


@pytest.mark.parametrize("form", views(np.zeros((1, 1, 1, 4))))
def test_strided_inputs(form):
    case = Case(33, 40, 32, CAUSAL, padding=True)
    given = inputs(case)
    strided = given._replace(**{name: views(getattr(given, name))[form] for name in ("q", "k", "v", "d_o")})
    if given.valid_tokens is not None:
        strided = strided._replace(valid_tokens=np.asfortranarray(given.valid_tokens))
    assert all(np.array_equal(a, b) for a, b in zip(computed(case, given), computed(case, strided)))


def test_one_head_read_by_all_through_a_stride_of_0():
    case = Case(33, 40, 32, heads=(2, 2))
    given = inputs(case)
    shared = given._replace(k=np.broadcast_to(given.k[:, :1], given.k.shape), v=np.broadcast_to(given.v[:, :1], given.v.shape))
    require(case, shared, computed(case, shared))


def test_inputs_are_not_written():
    case = Case(33, 40, 24, CAUSAL, padding=True)
    given = inputs(case)
    before = [x.copy() for x in given]
    computed(case, given)
    assert all(np.array_equal(a, b) for a, b in zip(before, given))


@pytest.mark.parametrize("sizes", [dict(Tq=0, Tk=5), dict(Tq=5, Tk=0), dict(Tq=3, Tk=3, B=0), dict(Tq=3, Tk=3, heads=(0, 1)),
                                   dict(Tq=3, Tk=3, heads=(0, 0)), dict(Tq=3, Tk=3, Dv=0)], ids=str)
def test_nothing_to_do(sizes):
    if sizes.get("Dv") == 0:
        given = inputs(Case(3, 3, 16))
        given = given._replace(v=given.v[..., :0], d_o=given.d_o[..., :0])
        o, _, dq, dk, dv = computed(Case(3, 3, 16), given)
        assert o.shape == (2, 2, 3, 0) and dv.shape == (2, 1, 3, 0) and not dq.any() and not dk.any()
        return
    case = Case(**sizes)
    given = inputs(case)
    o, lse, *gradients = computed(case, given)
    assert o.shape == given.d_o.shape and not o.any() and lse.shape == o.shape[:3] and (lse == -np.inf).all()
    assert [g.shape for g in gradients] == [x.shape for x in given[:3]] and not any(g.any() for g in gradients)


# --- NaN in hidden places -------------------------------------------------------------------------------------------

def spoiled(given, name, batch, rows, value):
    x = getattr(given, name).copy()
    x[batch, :, rows] = value
    return given._replace(**{name: x})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_padding_may_hold_anything(value):
    case = Case(65, 77, 32, CAUSAL, padding=True)
    given = inputs(case)
    bad = given
    for name in ("k", "v"):
        bad = spoiled(bad, name, 0, slice(2 * case.Tk // 3, None), value)
    assert all(np.array_equal(a, b) for a, b in zip(computed(case, given), computed(case, bad)))


@pytest.mark.parametrize("band", [CAUSAL, Band(4, 20, 3)], ids=str)
def test_a_nan_reaches_those_who_see_it_and_nobody_else(band):
    case = Case(65, 77, 32, band, B=1)
    given = inputs(case)
    for name, row in (("k", 40), ("v", 40), ("q", 30), ("d_o", 30)):
        got, want = computed(case, spoiled(given, name, 0, row, np.nan)), dense(case, spoiled(given, name, 0, row, np.nan))
        assert all(np.array_equal(np.isnan(a), np.isnan(b)) for a, b in zip(got[:1] + got[2:], want)), name


def dense(case, given):
    """(o, dq, dk, dv) of the op that keeps the whole matrix of weights."""
    q, k, v = (tensor(x, requires_grad=True) for x in given[:3])
    p, j = np.arange(case.Tq)[:, None] + case.band.query_offset, np.arange(case.Tk)
    seen = (p - (math.inf if case.band.left is None else case.band.left) <= j) & (j <= p + case.band.right)
    o = F.scaled_dot_product_attention(q, k, v, tensor(seen), enable_gqa=True)
    backward(o, constant(given.d_o))
    return [x.array for x in (o, q.grad, k.grad, v.grad)]


# --- host code ------------------------------------------------------------------------------------------------------

def call(q=(2, 2, 3, 16), k=(2, 1, 4, 16), v=None, dtype=np.float32, valid_tokens=None, band=FULL):
    return flash.forward(np.zeros(q, dtype), np.zeros(k, np.float32), np.zeros(v or k, np.float32), valid_tokens, band, 1.0)


@pytest.mark.parametrize("error, words, given", [
    (TypeError, "float64, float32", dict(dtype=np.float64)), (TypeError, "int64", dict(dtype=np.int64)),
    (ValueError, "4 axes", dict(q=(2, 3, 16))), (ValueError, "do not fit", dict(k=(1, 1, 4, 16))),
    (ValueError, "do not fit", dict(k=(2, 1, 4, 8))), (ValueError, "multiple of Hkv", dict(q=(2, 3, 3, 16), k=(2, 2, 4, 16))),
    (ValueError, "do not fit", dict(v=(2, 1, 5, 16))), (ValueError, "do not fit", dict(k=(2, 0, 4, 16))),
    (ValueError, "Dh up to 128", dict(q=(2, 2, 3, 129), k=(2, 1, 4, 129))), (ValueError, "Dh up to 128", dict(v=(2, 1, 4, 200))),
    (ValueError, "split the batch", dict(q=(65536, 1, 1, 1), k=(65536, 1, 1, 1))),
    (ValueError, "valid_tokens", dict(valid_tokens=np.ones((2, 3), bool))),
    (ValueError, "valid_tokens", dict(valid_tokens=np.ones((2, 4)))),
    (ValueError, "query_offset", dict(band=Band(1 << 30)))], ids=lambda x: x if isinstance(x, str) else None)
def test_what_cannot_be_computed_says_why(error, words, given):
    with pytest.raises(error, match=words):
        call(**given)


def test_refusal_has_the_same_words():
    q, k = tensor(np.zeros((1, 1, 2, 16), np.float32)).array, np.zeros((1, 1, 2, 129), np.float32)
    assert refusal(q, q, q) is None
    assert "Dh up to 128" in refusal(k, k, k) and "float64" in refusal(q.astype(np.float64), q, q) and "4 axes" in refusal(q[0], q[0], q[0])
    assert "bias" in refusal(q, q, q, bias=q) and "boolean" in refusal(q, q, q, allowed=q) and "dropout" in refusal(q, q, q, dropout_p=0.1)


def test_arrays_of_several_devices_are_refused(monkeypatch):
    monkeypatch.setattr(flash, "check_one_device", lambda op, arrays: (_ for _ in ()).throw(RuntimeError(f"{op}: one device")))
    with pytest.raises(RuntimeError, match="one device"):
        call()


def test_too_little_shared_memory_for_any_tile(monkeypatch):
    monkeypatch.setattr(flash, "shared_limit", lambda xp: 1000)
    with pytest.raises(RuntimeError, match="1000"):
        call()


@pytest.mark.parametrize("head_dim", flash.Float32.tiles)
@pytest.mark.parametrize("limit", [64, 96, 99, 163, 227])
def test_every_gpu_has_a_tile(head_dim, limit, monkeypatch):
    monkeypatch.setattr(flash, "shared_limit", lambda xp: limit << 10)
    for kernel in ("flash_forward", "flash_dkdv", "flash_dq"):
        tile, size = flash.choose_tile(flash.Float32, kernel, head_dim, np)
        assert size <= limit << 10 and (limit < 227 or tile == flash.Float32.tiles[head_dim][0])


def test_numbers_go_as_four_bytes():
    assert [compile.argument(x).dtype for x in (1, True, 0.5)] == [np.int32, np.int32, np.float32]
    assert compile.argument(None) is None and compile.argument(np.int64(1)).dtype == np.int64
    with pytest.raises(OverflowError):
        compile.argument(1 << 31)


def test_more_than_48_kb_is_asked_for_before_the_launch():
    asked = []

    class Kernel(SimpleNamespace):
        def __call__(self, grid, block, args, shared_mem):
            asked.append((self.max_dynamic_shared_size_bytes, shared_mem))
    for size in (100, 60000):
        compile.launch(Kernel(max_dynamic_shared_size_bytes=48 << 10), (1,), 32, (), size)
    assert asked == [(48 << 10, 100), (60000, 60000)]


def test_a_file_is_compiled_once_for_each_device(monkeypatch):
    made, current = [], [0]

    def raw_module(code, options):
        made.append(options)
        return SimpleNamespace(get_function=lambda name: object())
    cupy = SimpleNamespace(RawModule=raw_module, cuda=SimpleNamespace(Device=lambda: SimpleNamespace(id=current[0])))
    cupy = type("cupy", (), {"__hash__": lambda self: 1})()
    cupy.RawModule, cupy.cuda = raw_module, SimpleNamespace(Device=lambda: SimpleNamespace(id=current[0]))
    first = compile.function("flash_attention.cu", ("-DHEAD_DIM=16",), "flash_dq", cupy)
    assert compile.function("flash_attention.cu", ("-DHEAD_DIM=16",), "flash_dq", cupy) is first and len(made) == 1
    compile.function("flash_attention.cu", ("-DHEAD_DIM=16",), "flash_delta", cupy)
    assert len(made) == 1
    current[0] = 1
    assert compile.function("flash_attention.cu", ("-DHEAD_DIM=16",), "flash_dq", cupy) is not first and len(made) == 2


# --- the op ---------------------------------------------------------------------------------------------------------
#
# Central differences need float64, and the kernels have float32. So gradcases.py leaves this op out, and here its gradients
# are compared with those of the dense formula in float64; the wrong backwards of mutants.py show that this notices.

OP_CASE = Case(20, 24, 16, Band(4, None, 0), padding=True)


def op_errors():
    """Of out, dq, dk, dv, each input wanting a gradient."""
    given = inputs(OP_CASE)
    q, k, v = (tensor(x, requires_grad=True) for x in given[:3])
    try:
        out = KernelAttention.apply(q, k, v, tensor(given.valid_tokens), OP_CASE.band, OP_CASE.scale)
        backward(out, constant(given.d_o))
    except RuntimeError as error:
        return mutants.refused(error) and [np.inf]
    o, _, *gradients = reference(OP_CASE, given)
    return errors([out.array, *(np.zeros_like(x.array) if x.grad is None else x.grad.array for x in (q, k, v))], [o, *gradients])


def test_gradients_of_the_op_are_those_of_the_dense_formula():
    assert max(op_errors()) <= TOLERANCE


@pytest.mark.parametrize("name", [n for n in mutants.GENERIC if n != "no sum over broadcast axes"])
def test_a_wrong_backward_of_the_op_is_noticed(name):
    with mutants.replaced(KernelAttention, mutants.GENERIC[name]):
        assert max(op_errors()) > 1e-3


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_one_gradient_alone_launches_what_it_needs(wanted, monkeypatch):
    given, names, launched = inputs(OP_CASE), [], flash.launch
    monkeypatch.setattr(flash, "launch", lambda kernel, *args, **options: (names.append(kernel.name), launched(kernel, *args, **options)))
    tensors = {name: tensor(getattr(given, name), requires_grad=name == wanted) for name in "qkv"}
    backward(KernelAttention.apply(*tensors.values(), tensor(given.valid_tokens), OP_CASE.band, OP_CASE.scale), constant(given.d_o))
    want = dict(zip(OUTPUTS, reference(OP_CASE, given)))["d" + wanted]
    assert max(errors([tensors[wanted].grad.array], [want])) <= TOLERANCE
    assert names == ["flash_forward", "flash_delta", "flash_dq" if wanted == "q" else "flash_dkdv"]


def test_the_op_keeps_no_weights_and_frees_what_it_kept():
    given = inputs(OP_CASE)
    q, k, v = (tensor(x, requires_grad=True) for x in given[:3])
    out = KernelAttention.apply(q, k, v, None, FULL, 1.0)
    kept = [x.shape for x in out.node.saved if x is not None]
    assert kept == [x.shape for x in (q, k, v, out)] + [(2, 2, 20)]
    q.detach().zero_()
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


def test_the_op_refuses_float64():
    with pytest.raises(TypeError, match="float64"):
        KernelAttention.apply(*(tensor(np.zeros((1, 1, 2, 16))),) * 3, None, FULL, 1.0)


@pytest.mark.parametrize("scale", [-1.0, 0.0, -0.0, 1e-3])
def test_any_scale_with_something_hidden(scale):
    """−∞ stands for a hidden score, and a scale of 0 or below it must not turn it into NaN or +∞."""
    import tinygrad_tf as torch
    from tinygrad_tf.nn import functional as F

    def run(backend):
        torch.manual_seed(0)
        x = [torch.randn(1, 2, 9, 16, device="cpu", requires_grad=True) for _ in range(3)]
        with torch.sdpa_backend(backend):
            out = F.scaled_dot_product_attention(*x, is_causal=True, scale=scale)
        out.sum().backward()
        return [a.detach().numpy() for a in (out, *(t.grad for t in x))]
    for got, want in zip(run("emulator"), run("dense")):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_numbers_of_another_byte_order_are_refused():
    x = np.ones((1, 1, 4, 16), np.float32)
    for other in (x.astype(x.dtype.newbyteorder()), x.astype(np.dtype(np.float16).newbyteorder())):
        with pytest.raises(TypeError, match=">f"):
            flash.forward(other, other, other, None, FULL, 0.25)
