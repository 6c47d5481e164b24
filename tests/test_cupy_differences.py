"""Where CuPy differs from NumPy, one test a difference; and tensors of two devices in one call, planted through the public API.

An ordinary run takes the strict stand-in for CuPy; `pytest --device cuda` runs the same on a GPU.
"""
import contextlib
import copy
import io
import re
from pathlib import Path

import numpy as np
import pytest
import strict_cupy
from device import host

import tinygrad_tf as torch
from tinygrad_tf import backend, nn
from tinygrad_tf.autograd import constant
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.nn import functional as F
from tinygrad_tf.optim import AdamW

pytestmark = pytest.mark.usefixtures("gpu")
SOURCES = sorted(Path(torch.__file__).parent.rglob("*.py"))


def cupy():
    return backend.require_cupy()


def pair(*shape):
    """The same random numbers on the CPU and on the GPU."""
    x = torch.randn(*shape)
    return x, x.to("cuda")


@contextlib.contextmanager
def no_waiting():
    """Inside, a wait of the host for the GPU raises. CuPy cannot watch downloads, the stand-in does."""
    import cupyx
    with cupyx.allow_synchronize(False):
        yield


# --- one test for each difference -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
                                   torch.uint8])
def test_add_at_knows_few_types(dtype):
    """`add.at` adds repeated indices up; CuPy's knows no int64 and nothing narrower than 32 bits but float16."""
    ids = torch.tensor([2, 0, 2, 2])
    for negative in (1, -1)[:2 - (dtype is torch.uint8)]:
        x, source = torch.ones(3, dtype=dtype), negative * torch.arange(1, 5).to(dtype)
        want = x.index_add(0, ids, source)
        got = x.to("cuda").index_add(0, ids.to("cuda"), source.to("cuda"))
        assert got.dtype == dtype and got.tolist() == want.tolist()


CHOICES = {"x[ids]": lambda w, ids: w[ids], "x[ids, 1:]": lambda w, ids: w[ids, 1:], "embedding": lambda w, ids: F.embedding(ids, w),
           "index_select": lambda w, ids: w.index_select(0, ids.reshape(-1)), "gather": lambda w, ids: w.gather(0, ids)}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_gradients_of_repeated_indices_add_up(choose):
    grads = []
    for device in ("cpu", "cuda"):
        w = torch.ones(4, 3, device=device, requires_grad=True)
        choose(w, torch.tensor([[3, 0, 3], [3, 1, 0]], device=device)).sum().backward()
        grads.append(host(w.grad))
    assert (grads[0] == grads[1]).all() and grads[0].max() >= 2


def test_repeated_indices_in_an_assignment():
    """Which value stays is undefined on a GPU, so no operation of the package does it; one number for all of them is sound."""
    x = torch.zeros(4, device="cuda")
    x[torch.tensor([1, 1, 3])] = 7.0
    assert x.tolist() == [0, 7, 0, 7]
    x.scatter_(0, torch.tensor([2, 2], device="cuda"), 5.0)
    assert x.tolist() == [0, 7, 5, 7]


BEYOND = {
    "x[ids]": lambda ids: torch.randn(3, 4, device="cuda")[ids],
    "x[:, ids]": lambda ids: torch.randn(4, 3, device="cuda")[:, ids],
    "x[..., ids, 0]": lambda ids: torch.randn(4, 3, 2, device="cuda")[..., ids, 0],
    "x[ids] = 0": lambda ids: torch.randn(3, 4, device="cuda").__setitem__(ids, 0.0),
    "embedding": lambda ids: F.embedding(ids, torch.randn(3, 4, device="cuda")),
    "gather": lambda ids: torch.randn(3, device="cuda").gather(0, ids),
    "scatter": lambda ids: torch.randn(3, device="cuda").scatter(0, ids, 0.0),
    "index_select": lambda ids: torch.randn(3, device="cuda").index_select(0, ids),
    "index_add": lambda ids: torch.randn(3, device="cuda").index_add(0, ids, torch.ones(2, device="cuda")),
    "cross_entropy": lambda ids: F.cross_entropy(torch.randn(2, 3, device="cuda"), ids),
    "nll_loss": lambda ids: F.nll_loss(torch.randn(2, 3, device="cuda"), ids),
    "one_hot": lambda ids: F.one_hot(ids, 3),
}


@pytest.mark.parametrize("made", ["uploaded", "computed"])
@pytest.mark.parametrize("bad", [3, 9, -7])
@pytest.mark.parametrize("call", BEYOND)
def test_ids_out_of_bounds_raise_and_never_wrap(call, bad, made):
    ids = torch.tensor([1, bad], device="cuda") + 0 if made == "computed" else torch.tensor([1, bad], device="cuda")
    with pytest.raises((IndexError, RuntimeError), match=rf"-?{abs(bad)}\b"):
        BEYOND[call](ids)


def test_ids_from_the_host_are_checked_there():
    """An upload notes their range, and so the host does not wait to check them; a write on the GPU makes it look again."""
    w, x = torch.randn(5, 4, device="cuda"), torch.randn(2, 3, 5, device="cuda")
    ids = torch.tensor([[0, 4, 2], [1, 1, 3]]).to("cuda")
    labels = torch.tensor([[0, 4, -100], [1, -100, 3]], device="cuda")
    with no_waiting():
        F.embedding(ids, w), F.embedding(ids[:, 1:].reshape(-1), w), w.index_select(0, ids[0]), w.gather(0, ids)
        F.cross_entropy(x.reshape(-1, 5), labels.reshape(-1)), F.nll_loss(x.movedim(-1, 1), labels)
    ids[0, 0] = 5
    with pytest.raises(IndexError, match="5"):
        F.embedding(ids, w)
    with pytest.raises(IndexError, match="-100"):       # a label that is ignored is no id
        F.embedding(labels, w)
    with pytest.raises(IndexError, match="-100"):       # and none for who ignores another
        F.cross_entropy(x.reshape(-1, 5), labels.reshape(-1), ignore_index=4)


def test_the_generator_has_few_methods_and_another_stream():
    """Random numbers are drawn on the host and uploaded: the same on every device, and no `xp.random` in the package."""
    for draw in (lambda d: torch.randn(33, device=d), lambda d: torch.randint(0, 9, (7,), device=d), lambda d: torch.randperm(9, device=d),
                 lambda d: torch.rand(5, device=d), lambda d: torch.bernoulli(torch.full((9,), 0.4, device=d)),
                 lambda d: torch.multinomial(torch.ones(9, device=d), 4), lambda d: torch.empty(20, device=d).normal_(),
                 lambda d: nn.Linear(3, 4).to(d).weight):
        drawn = []
        for device in ("cpu", "cuda"):
            torch.manual_seed(5)
            drawn.append(draw(device))
        assert drawn[1].device.type == "cuda" and (host(drawn[0]) == host(drawn[1])).all()
    assert not [path.name for path in SOURCES if re.search(r"\bxp\.random|cupy\.random", path.read_text())]


def model_and_step():
    model = MiniGPT(11, 8, 16, 4, 32, 2, dropout=0.0).to("cuda")
    optimizer = AdamW(model.parameters(), lr=1e-3)
    ids, targets = (torch.randint(0, 11, (2, 8)).to("cuda") for _ in range(2))

    def step():
        optimizer.zero_grad()
        _, loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        return loss
    return model, step


def test_float64_is_the_default_of_cupy_and_never_ours():
    """In the stand-in float32 that becomes float64 raises, inside every operation of the step too."""
    model, step = model_and_step()
    loss = step()
    assert {x.dtype for x in (loss, *model.parameters(), *(p.grad for p in model.parameters()))} == {torch.float32}
    made = [f(2, device="cuda") for f in (torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn, torch.eye)]
    made += [torch.tensor([1.5], device="cuda"), torch.linspace(0, 1, 3, device="cuda"), torch.arange(0.0, 2, device="cuda"),
             torch.arange(3, device="cuda") / 2, torch.arange(3, device="cuda") * 0.5, torch.ones(2, device="cuda") * np.float64(2)]
    assert {x.dtype for x in made} == {torch.float32}


def test_reductions_give_arrays_without_axes():
    """CuPy's sum is a 0-d array, no number: nothing is downloaded until `.item()`."""
    _, x = pair(3, 4)
    with no_waiting():
        results = [x.sum(), x.mean(), x.max(), x.amin(), x.var(), x.norm(), x.argmax(), (x > 0).all(), (x > 0).any(), x[1, 2],
                   x.sum() * 2 + 1, F.mse_loss(x, x), x.logsumexp((0, 1))]
    for y in results:
        assert isinstance(y.array, cupy().ndarray) and y.shape == ()
    assert isinstance(results[0].item(), float)


def test_a_training_step_waits_for_nothing():
    """`if condition.any()`, `float(x)`, masks, nonzero: each makes the host wait. A step does none of it, but for dense attention,
    which looks whether a blocked NaN got through.
    """
    _, step = model_and_step()
    with F.sdpa_backend("cuda"):
        step()                                  # kernels are compiled, the optimizer has its state
        with no_waiting():
            loss = step()
    assert np.isfinite(loss.item())


def names_used(pattern):
    return {name for path in SOURCES for name in re.findall(pattern, path.read_text())}


def test_functions_and_keywords_that_cupy_lacks():
    """No errstate, insert, vecdot, where=, initial=: whatever the sources take from `xp`, CuPy has."""
    used = names_used(r"\bxp\.([a-z]\w*)")
    assert len(used) > 40 and used - set(strict_cupy.NAMES["cupy"]) == set()
    assert not [line for path in SOURCES for line in path.read_text().splitlines() if re.search(r"\bxp\.\w+\([^()]*(where|initial)=", line)
                and "copyto" not in line]


def test_a_host_array_is_not_stored_and_not_added():
    """NumPy arrays come in by one door; a tensor of the CPU may be written into a slice, as copy_ does."""
    x, array = torch.zeros(2, 3, device="cuda"), np.ones((2, 3), np.float32)
    for wrong in (lambda: x + array, lambda: array + x, lambda: x @ array.T, lambda: torch.maximum(x, array), lambda: x.copy_(array)):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(TypeError, match=r"cuda:0.*\.cpu\(\)"):
        x.numpy()
    with pytest.raises(TypeError, match=r"cuda:0.*\.cpu\(\)"):
        np.asarray(x)
    x[...] = torch.from_numpy(array)
    x[0, 1:] = torch.from_numpy(array)[0, :2] * 2
    assert x.device.type == "cuda" and x.tolist() == [[1, 2, 2], [1, 1, 1]]
    assert x.copy_(torch.full((2, 3), 4.0)).tolist() == [[4] * 3] * 2


def test_products_are_true_float32():
    """CuPy multiplies float32 in float32 unless CUPY_TF32=1; the package does not ask for less."""
    x, y = pair(64, 256)
    want = host(x).astype(np.float64) @ host(x).astype(np.float64).T
    assert np.abs(host(y @ y.T) - want).max() < 1e-6 * np.abs(want).max()
    assert not names_used(r"(CUPY_TF32|set_compute_type)")


def test_argpartition_is_a_full_sort():
    """So is `percentile`: the package sorts where it sorts, and says so."""
    assert not names_used(r"(argpartition|percentile|quantile|xp\.partition)\(")
    x, y = pair(5, 9)
    for a, b in zip(x.topk(4), y.topk(4)):
        assert (host(a) == host(b)).all()


def test_kernels_take_memory_in_another_order():
    """A raw kernel ignores strides: what is transposed, sliced or expanded gives the same numbers."""
    functions = {"softmax": lambda x: F.softmax(x, -1), "layer_norm": lambda x: F.layer_norm(x, (x.shape[-1],)),
                 "rms_norm": lambda x: F.rms_norm(x, (x.shape[-1],)), "gelu": F.gelu, "silu": F.silu,
                 "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)),
                 "attention": lambda x: F.scaled_dot_product_attention(*[x.expand(1, 2, *x.shape)] * 3)}
    x, y = pair(12, 16)
    for name, function in functions.items():
        for view in (lambda t: t.T, lambda t: t[::2, ::4], lambda t: t[:1].expand(4, 16), lambda t: t[:, 3:]):
            np.testing.assert_allclose(host(function(view(y))), host(function(view(x))), rtol=2e-5, atol=2e-6, err_msg=name)


def test_results_may_lie_in_another_order():
    """Nothing relies on the strides of a result; `contiguous` and `view` look at them."""
    _, x = pair(3, 4)
    for y in (x.T + x.T, x.T.exp(), x.T @ x, x.T.reshape(2, 6), x.T.contiguous(), x.T.clone()):
        assert y.contiguous().is_contiguous()
    with pytest.raises(RuntimeError, match="view"):
        x.T.view(12)
    y = x.view(12)
    y[0] = 5
    assert x[0, 0].item() == 5


def test_errors_surface_where_the_host_waits():
    torch.cuda.synchronize()
    torch.cuda.synchronize("cuda:0")


def test_uploads_may_be_asynchronous():
    """`non_blocking` is taken, and the numbers are those of the moment of the call."""
    x = torch.arange(6.0)
    y = x.to("cuda", non_blocking=True)
    x.zero_()
    torch.cuda.synchronize()
    assert y.tolist() == [0, 1, 2, 3, 4, 5]


def test_files_hold_host_arrays():
    """A pickled CuPy array needs a GPU to be read; what `save` wrote of a model on the GPU is read without one, and back on it."""
    model, step = model_and_step()
    step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "x": torch.arange(3, device="cuda")}, file)
    for where in (None, "cpu", "cuda"):
        file.seek(0)
        read = torch.load(file, map_location=where)
        assert {v.device.type for v in (*read["model"].values(), read["x"])} == {where or "cpu"}
        assert all((host(v) == host(model.state_dict()[name])).all() for name, v in read["model"].items())
    copied = copy.deepcopy(model)
    assert {p.device.type for p in copied.parameters()} == {"cuda"}
    assert not {p.data_ptr() for p in copied.parameters()} & {p.data_ptr() for p in model.parameters()}


def test_casts_that_have_a_value_agree():
    """NaN → integer, and −1.0 → unsigned, are what the hardware makes of them; whole numbers wrap everywhere."""
    for values, dtype in (([-1, 300, 7], torch.uint8), ([2**40 + 5, -3], torch.int32), ([1.9, -1.9, 0.0], torch.int64), ([0.0, 2.5], bool)):
        x = torch.tensor(values)
        assert x.to(dtype=dtype).tolist() == x.to("cuda").to(dtype=dtype).tolist()


def test_half_precision_keeps_its_type():
    """16-bit floats are computed in float32 where statistics need it, and come back as what they were."""
    for device in ("cpu", "cuda"):
        x = torch.randn(2, 8, device=device).half()
        for y in (x + 1, x @ x.T, F.softmax(x, -1), F.layer_norm(x, (8,)), F.gelu(x), x.mean(), F.cross_entropy(x, x.argmax(-1))):
            assert y.dtype == torch.float16 and y.device.type == device


def test_expanded_memory_is_not_written():
    """CuPy's flags have no `writeable`, and it writes wherever it is told to: strides of 0 tell."""
    x = torch.zeros(1, 3, device="cuda").expand(4, 3)
    with pytest.raises(RuntimeError, match="expanded"):
        x.add_(1)
    assert x[:1].clone().add_(1).tolist() == [[1] * 3]


def test_a_device_prints():
    x = torch.tensor([1.0, 2.0], device="cuda", requires_grad=True)
    assert repr(x) == "tensor([1., 2.], device='cuda:0', requires_grad=True)"
    assert f"{x.sum():.1f}" == "3.0" and str(x.device) == "cuda:0" and x.is_cuda


@pytest.mark.skipif("config.getoption('--device') == 'cuda'", reason="needs two GPUs")
def test_a_second_gpu_needs_no_more_than_its_name():
    with strict_cupy.changed(devices=2):
        x = torch.randn(3, 4, device="cuda:1", requires_grad=True)
        y = (torch.softmax(x, -1) @ x.T + 1).relu()
        (y.sum() * 2).backward()
        assert str(y.device) == str(x.grad.device) == "cuda:1"
        with pytest.raises(RuntimeError, match="Add.*cuda:1 and cuda:0"):
            x + torch.ones(3, 4, device="cuda:0")
        assert str((x.to("cuda:0") + torch.ones(3, 4, device="cuda:0")).device) == "cuda:0"


# --- two devices in one call ------------------------------------------------------------------------------------------------

def c(*shape): return torch.randn(*shape)
def g(*shape): return torch.randn(*shape, device="cuda")
def ids(device="cpu"): return torch.tensor([[0, 1, 1], [1, 0, 1]], device=device)
def mask(device="cpu"): return torch.ones(2, 3, device=device) > 0


BOTH_WAYS = {name: lambda a, b, name=name: getattr(torch, name)(a, b) for name in (
    "add sub mul div pow maximum minimum remainder eq ne lt le gt ge floor_divide logical_and logical_or logical_xor isclose allclose "
    "equal").split()}
BOTH_WAYS |= {
    "x += y": lambda a, b: a.add_(b), "clamp": lambda a, b: a.clamp(b), "lerp": lambda a, b: torch.lerp(a, a, b),
    "addcmul": lambda a, b: torch.addcmul(a, b, a), "addcdiv": lambda a, b: torch.addcdiv(a, b, a),
    "where": lambda a, b: torch.where(a > 0, a, b), "where's condition": lambda a, b: torch.where(a > 0, b, b),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 0.0), "matmul": lambda a, b: a @ b.T, "mm": lambda a, b: torch.mm(a, b.T),
    "bmm": lambda a, b: torch.bmm(a[None], b.T[None]), "mv": lambda a, b: torch.mv(a, b[0]), "dot": lambda a, b: torch.dot(a[0], b[0]),
    "outer": lambda a, b: torch.outer(a[0], b[0]), "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "cat": lambda a, b: torch.cat([a, b]), "stack": lambda a, b: torch.stack([a, b]), "isin": lambda a, b: torch.isin(a, b),
    "searchsorted": lambda a, b: torch.searchsorted(a[0], b), "linear": lambda a, b: F.linear(a, b),
    "linear's bias": lambda a, b: F.linear(a, a, b[0, :2]), "layer_norm": lambda a, b: F.layer_norm(a, (3,), b[0], b[0]),
    "rms_norm": lambda a, b: F.rms_norm(a, (3,), b[0]), "cross_entropy's weight": lambda a, b: F.cross_entropy(a, a.argmax(1), b[0]),
    "cross_entropy's target": lambda a, b: F.cross_entropy(a, b.argmax(1)), "nll_loss": lambda a, b: F.nll_loss(a, b.argmax(1)),
    "mse_loss": lambda a, b: F.mse_loss(a, b), "bce": lambda a, b: F.binary_cross_entropy_with_logits(a, b),
    "bce's pos_weight": lambda a, b: F.binary_cross_entropy_with_logits(a, a, pos_weight=b),
    "sdpa's key": lambda a, b: F.scaled_dot_product_attention(a[None], b[None], a[None]),
    "sdpa's value": lambda a, b: F.scaled_dot_product_attention(a[None], a[None], b[None]),
    "sdpa's bool mask": lambda a, b: F.scaled_dot_product_attention(a[None], a[None], a[None], b[:, :2] > 0),
    "sdpa's float mask": lambda a, b: F.scaled_dot_product_attention(a[None], a[None], a[None], b[:, :2]),
    "flash_attention": lambda a, b: F.flash_attention(a[None, None], b[None, None], a[None, None]),
    "rotary": lambda a, b: F.rotary(a[:, :2], b[:, :1], b[:, :1]), "embedding": lambda a, b: F.embedding(b.long().clamp(0, 1), a),
    "gather": lambda a, b: a.gather(0, b.argmax(0, keepdim=True)), "scatter": lambda a, b: a.scatter(0, b.argmax(0, keepdim=True), 1),
    "scatter's src": lambda a, b: a.scatter(0, a.argmax(0, keepdim=True), b),
    "scatter_add": lambda a, b: a.scatter_add(0, a.argmax(0, keepdim=True), b), "index_select": lambda a, b: a.index_select(0, b.argmax(0)),
    "index_add": lambda a, b: a.index_add(0, b.argmax(0), torch.ones(3, 3, device=a.device)),
    "index_add's source": lambda a, b: a.index_add(0, a.argmax(1), b),
    "take_along_dim": lambda a, b: a.take_along_dim(b.argmax(0)[None], 0),
    "backward": lambda a, b: a.requires_grad_().mul(2).backward(b), "grad": lambda a, b: setattr(a, "grad", b),
    "a 0-d tensor that is not the CPU's": lambda a, b: (c(2, 3) + g(), a + b), "nn.Linear": lambda a, b: nn.Linear(3, 2).to(a.device)(b),
    "nn.Embedding": lambda a, b: nn.Embedding(4, 3).to(a.device)(b.argmax(1)),
    "MiniGPT's ids": lambda a, b: MiniGPT(4, 3, 4, 2, 6, 1).to(a.device)(b.argmax(1)[None]),
    "MiniGPT's targets": lambda a, b: MiniGPT(4, 3, 4, 2, 6, 1).to(a.device)(a.argmax(1)[None], b.argmax(1)[None]),
}


@pytest.mark.parametrize("left, right", [("cpu", "cuda"), ("cuda", "cpu")])
@pytest.mark.parametrize("call", BOTH_WAYS)
def test_two_devices_in_one_call_are_named(call, left, right):
    a, b = torch.randn(2, 3, device=left), torch.randn(2, 3, device=right)
    with pytest.raises(RuntimeError, match=r"^\w.*: all tensors must be on one device, got (cpu and cuda:0|cuda:0 and cpu); move one"):
        BOTH_WAYS[call](a, b)


AN_INDEX_ON_THE_GPU = {
    "x[ids]": lambda: c(2, 3)[ids("cuda")[0]], "x[mask]": lambda: c(2, 3)[mask("cuda")], "x[:, ids]": lambda: c(2, 3)[:, ids("cuda")[0]],
    "x[ids] = 0": lambda: c(2, 3).__setitem__(ids("cuda")[0], 0.0), "x[mask] = 0": lambda: c(2, 3).__setitem__(mask("cuda"), 0.0),
    "masked_select": lambda: c(2, 3).masked_select(mask("cuda")),
}


@pytest.mark.parametrize("call", AN_INDEX_ON_THE_GPU)
def test_an_index_on_the_gpu_of_a_tensor_on_the_cpu_is_refused(call):
    with pytest.raises(RuntimeError, match="the index is on a GPU and the tensor on the CPU"):
        AN_INDEX_ON_THE_GPU[call]()


def test_values_of_the_cpu_for_an_index_of_tensors_are_refused():
    with pytest.raises(RuntimeError, match="setitem.*cuda:0 and cpu"):
        g(2, 3)[ids("cuda")[0, :2]] = c(2, 3)


# PyTorch lets these pass: one number of the CPU, an index of the CPU, and whatever copies.
MAY_MEET = {
    **{name: lambda name=name: getattr(torch, name)(g(2, 3), torch.tensor(2.0)) for name in (
        "add sub mul div pow maximum minimum remainder eq ne lt le gt ge floor_divide logical_and isclose").split()},
    "number first": lambda: torch.tensor(2.0) - g(2, 3), "in place": lambda: g(2, 3).mul_(torch.tensor(2.0)),
    "where": lambda: torch.where(mask("cuda"), g(2, 3), torch.tensor(0.0)), "clamp": lambda: g(2, 3).clamp(torch.tensor(0.0)),
    "masked_fill": lambda: g(2, 3).masked_fill(mask("cuda"), torch.tensor(0.0)), "lerp": lambda: torch.lerp(g(3), g(3), torch.tensor(0.5)),
    "x[ids]": lambda: g(2, 3)[ids()[0]], "x[:, ids]": lambda: g(2, 3)[:, ids()], "x[mask]": lambda: g(2, 3)[mask()],
    "x[list]": lambda: g(2, 3)[[0, 1, 1]], "x[0, ids]": lambda: g(2, 3)[0, ids()], "masked_select": lambda: g(2, 3).masked_select(mask()),
    "repeat_interleave": lambda: g(2, 3).repeat_interleave(torch.tensor([1, 2]), 0),
}


@pytest.mark.parametrize("call", MAY_MEET)
def test_what_pytorch_lets_meet_meets_on_the_gpu(call):
    torch.manual_seed(0)
    y = MAY_MEET[call]()
    assert y.device.type == "cuda"


def test_writes_that_copy_take_values_of_the_cpu():
    x = torch.zeros(2, 3, device="cuda")
    x[0] = torch.tensor([1.0, 2.0, 3.0])
    x[ids()[0, :2], 0] = torch.tensor(9.0)
    x[mask() & (torch.arange(3) > 1)] = 5.0
    assert x.tolist() == [[9, 2, 5], [9, 0, 5]]
    layer = nn.Linear(3, 2).to("cuda")
    other = nn.Linear(3, 2)
    layer.load_state_dict(other.state_dict())
    assert layer.weight.device.type == "cuda" and (host(layer.weight) == host(other.weight)).all()


def test_gradients_go_back_to_where_their_tensors_are():
    scale, x = torch.tensor(2.0, requires_grad=True), g(2, 3).requires_grad_()
    (x * scale).sum().backward()
    assert scale.grad.device.type == "cpu" and x.grad.device.type == "cuda"
    assert scale.grad.item() == pytest.approx(x.sum().item(), rel=1e-5) and x.grad.tolist() == [[2.0] * 3] * 2
    y = c(3).requires_grad_()
    (y.to("cuda") * 3).cpu().sum().backward()
    assert y.grad.device.type == "cpu" and y.grad.tolist() == [3, 3, 3]


def test_the_result_of_a_constant_is_where_it_was_made():
    assert constant(g(2).array).device.type == "cuda" and (g(2) > 0).device.type == "cuda" and torch.zeros_like(g(2)).is_cuda
