"""On a device, operations take the fused kernels and dropout its own stream. The device is the strict stand-in for CuPy."""
import shutil

import numpy as np
import pytest
import strict_cupy
from device import host

import tinygrad_tf as torch
from tinygrad_tf import philox
from tinygrad_tf.kernels import fused
from tinygrad_tf.models.minigpt import MiniGPT
from tinygrad_tf.nn import functional as F

pytestmark = [pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: the emulator compiles kernels with it"),
              pytest.mark.host("puts the stand-in in CuPy's place by itself")]


FREE = {"empty", "empty_like", "reshape", "ravel", "view", "squeeze", "swapaxes", "moveaxis", "transpose", "broadcast_to",
        "broadcast_arrays", "ascontiguousarray", "asarray", "astype"}         # views and memory; the copies among them are left out


@pytest.fixture(autouse=True)
def stand_in(monkeypatch, gpu):
    """CuPy is the stand-in, and what launches nothing is not counted as a launch."""
    run = strict_cupy._run

    def counted(function, place, name, self, args, kwargs):
        strict_cupy.counts.launches -= name in FREE
        return run(function, place, name, self, args, kwargs)
    monkeypatch.setattr(strict_cupy, "_run", counted)


def tensor(*shape, seed=0, **options):
    x = np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)
    return torch.tensor(x, device="cuda", requires_grad=True, **options)


def forward_and_backward(function, *shapes):
    """[y, gradients], and the launches of forward and of backward."""
    arguments = [tensor(*shape) for shape in shapes]
    counts = [strict_cupy.counts.launches]
    y = function(*arguments)
    counts.append(strict_cupy.counts.launches)
    dy = torch.tensor(np.random.default_rng(1).normal(size=tuple(y.shape)).astype(np.float32), device="cuda")
    counts.append(strict_cupy.counts.launches)
    y.backward(dy)
    counts.append(strict_cupy.counts.launches)
    return host([y.detach(), *(a.grad for a in arguments)]), (counts[1] - counts[0], counts[3] - counts[2])


def both_ways(function, monkeypatch):
    """What it returns with the kernels, and by the array forms."""
    with_kernels = function()
    with monkeypatch.context() as without:
        without.setattr(fused, "serves", lambda *args: False)
        return with_kernels, function()


TARGETS = np.arange(6) % 5
OPS = {                                         # name → function, shapes, launches (forward, backward) at most
    "softmax": (lambda x: F.softmax(x, -1), [(6, 5)], (2, 2)),
    "log_softmax": (lambda x: F.log_softmax(x, -1), [(6, 5)], (2, 2)),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor(TARGETS, device="cuda")), [(6, 5)], (20, 20)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, 5, w, b), [(6, 5), (5,), (5,)], (4, 7)),
    "rms_norm": (lambda x, w: F.rms_norm(x, 5, w), [(6, 5), (5,)], (4, 7)),
    "gelu": (F.gelu, [(6, 5)], (3, 1)),
    "gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), [(6, 5)], (3, 1)),
    "silu": (F.silu, [(6, 5)], (3, 1)),
}


@pytest.mark.parametrize("name", OPS)
def test_operations_launch_less_and_give_the_same(name, monkeypatch):
    function, shapes, most = OPS[name]
    (got, fewer), (want, more) = both_ways(lambda: forward_and_backward(function, *shapes), monkeypatch)
    for g, w in zip(got, want):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)
    assert sum(fewer) < sum(more) and fewer[0] <= most[0] and fewer[1] <= most[1]


def train(steps=2):
    """(losses, launches a step, parameters afterwards)"""
    torch.manual_seed(0)
    model = MiniGPT(11, 8, 16, 2, 32, 2, dropout=0.1).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.tensor(np.arange(18).reshape(2, 9) * 5 % 11, device="cuda")
    losses = []
    for _ in range(steps):
        start = strict_cupy.counts.launches
        optimizer.zero_grad()
        loss = model(ids[:, :-1], ids[:, 1:])[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, strict_cupy.counts.launches - start, host([p.detach() for p in model.parameters()])


def test_a_training_step_launches_a_third_and_gives_the_same_losses(monkeypatch):
    (losses, fewer, parameters), (same, more, others) = both_ways(train, monkeypatch)
    np.testing.assert_allclose(losses, same, rtol=1e-5)
    for a, b in zip(parameters, others):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    assert losses[1] < losses[0] and 3 * fewer < more, (fewer, more)


def test_what_kernels_do_not_serve():
    x = tensor(3, 4)
    assert fused.serves(x.array) and fused.serves(x.array, 1) and fused.can_step(x.array, x.array)
    assert not any((fused.serves(x.array, 0), fused.serves(x.double().array), fused.serves(x.half().array), fused.serves(x.array[:0]),
                    fused.serves(host(x)), fused.serves(np.float32(1)), fused.can_step(x.array, x.array.T)))


@pytest.mark.parametrize("call", [
    lambda x, y: fused.softmax_backward(x, y), lambda x, y: fused.log_softmax_backward(x, y),
    lambda x, y: fused.cross_entropy(x, np.zeros(4, int)), lambda x, y: fused.norm(x, y[0], None, 1e-5, True),
    lambda x, y: fused.norm_backward(x, x, x[:, :1], y[0], True), lambda x, y: fused.norm_columns(x, y, (4,)),
    lambda x, y: fused.adam(x, y, x, x, None, 1.0, 1e-3, (0.9, 0.99), 1e-8)])
def test_operands_of_two_devices(call):
    with pytest.raises(RuntimeError, match="fused.*: all tensors must be on one device, got cuda:0 and cpu"):
        call(tensor(4, 4).array, np.zeros((4, 4), np.float32))


# --- dropout's stream on the device --------------------------------------------------------------------------------------

def mask(*shape, p=0.3, dtype=np.float32, device="cuda"):
    return host(F.dropout(torch.ones(shape, dtype=torch.tensor(np.zeros(1, dtype)).dtype, device=device), p))


def test_seeds_and_checkpoints_cover_the_device():
    torch.manual_seed(4)
    first, state = mask(3, 50), torch.get_rng_state()
    second = mask(3, 50)
    torch.manual_seed(4)
    assert np.array_equal(mask(3, 50), first) and not np.array_equal(first, second)
    torch.set_rng_state(state)
    assert np.array_equal(mask(3, 50), second)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (7,), (3, 50), (2, 3, 4, 9)])
def test_the_mask_is_the_one_of_philox(shape, dtype):
    torch.manual_seed(4)
    got = mask(*shape, dtype=dtype)
    torch.manual_seed(4)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, philox.keep(np.ones(shape, dtype), 0.3))


def test_the_cpu_keeps_pytorchs_stream_and_the_device_has_its_own():
    torch.manual_seed(4)
    on_cpu = mask(40, 50, device="cpu")
    torch.manual_seed(4)
    np.testing.assert_array_equal(on_cpu > 0, torch.default_generator.dropout_keep((40, 50), 0.3))
    torch.manual_seed(4)
    on_device = mask(40, 50)
    assert not np.array_equal(on_cpu, on_device) and abs((on_device == 0).mean() - 0.3) < 0.05


@pytest.mark.parametrize("p, value", [(1.0, 0), (0.0, 1)])
def test_certain_outcomes(p, value):
    assert (mask(3, 4, p=p) == value).all()


def test_rand_and_bernoulli_draw_on_the_host():
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(2)
        found.append([host(torch.rand(5, device=device)), host(torch.bernoulli(torch.full((9,), 0.4, device=device))),
                      host(torch.randn(20, device=device)), host(torch.empty(3, device=device).bernoulli_(0.5))])
    for a, b in zip(*found):
        np.testing.assert_array_equal(a, b)


def test_backward_multiplies_by_the_mask_of_forward():
    x = tensor(6, 9)
    y = F.dropout(x, 0.4)
    y.sum().backward()
    np.testing.assert_allclose(host(x.grad) * host(x), host(y), rtol=1e-6)
