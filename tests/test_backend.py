"""Devices, memory and the import itself."""
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tinygrad_tf as torch
from tinygrad_tf import backend


def python(program, **environment):
    """What a fresh interpreter prints, and its exit status."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment})
    return done.stdout, done.stderr, done.returncode


def test_the_import_loads_numpy_alone_and_prints_nothing():
    out, err, status = python("import sys, tinygrad_tf; print(sorted(set(m.partition('.')[0] for m in sys.modules) & {'cupy', "
                              "'matplotlib', 'tqdm', 'safetensors', 'torch', 'scipy', 'jax', 'pandas', 'PIL', "
                              "'regex', 'numpy', 'tinygrad_tf'}))")
    assert (out, err, status) == ("['numpy', 'tinygrad_tf']\n", "", 0)


def test_cuda_without_cupy_says_what_to_install():
    with mock.patch.dict(sys.modules, {"cupy": None}):
        for request in (lambda: torch.zeros(2, device="cuda"), lambda: torch.ones(2).to("cuda"), lambda: torch.ones(2).cuda(),
                        lambda: torch.ones(2).cuda(1),
                        lambda: torch.tensor([1.0], device="cuda:1"), lambda: torch.randn(2, device="cuda")):
            with pytest.raises(RuntimeError) as caught:
                request()
            assert "pip install cupy-cuda12x[ctk]" in str(caught.value)
            assert "cupy-cuda13x[ctk]" in str(caught.value)
            assert "\n" not in str(caught.value)


def test_cuda_without_a_gpu_says_where_to_look():
    cupy = mock.MagicMock()
    cupy.cuda.is_available.return_value = False
    cupy.ndarray = type("ndarray", (), {})
    with mock.patch.dict(sys.modules, {"cupy": cupy}), pytest.raises(RuntimeError, match="nvidia-smi"):
        torch.zeros(2, device="cuda")


def test_devices_have_names_numbers_and_equality():
    device = torch.device
    assert device("cpu") == torch.ones(1, device="cpu").device
    assert device("cuda", 1) == device("cuda:1") == device(device("cuda:1")) != device("cuda")
    assert str(device("cuda:1")) == "cuda:1"
    assert repr(device("cuda:1")) == "device(type='cuda', index=1)"
    assert repr(device("cpu")) == "device(type='cpu')"
    assert {device("cpu"): 1}[device("cpu")] == 1 and device("cpu") != "cpu"


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:-1", "", "cuda:1:2", "mps"])
def test_unknown_devices_are_named_beside_the_known_ones(name):
    with pytest.raises(RuntimeError) as caught:
        torch.device(name)
    assert repr(name) in str(caught.value) and "'cpu', 'cuda' and 'cuda:N'" in str(caught.value)


@pytest.mark.host("sets the default device")
def test_the_default_device_comes_from_the_program_then_the_environment(monkeypatch):
    monkeypatch.setenv("TINYGRAD_TF_DEVICE", "tpu")
    with pytest.raises(RuntimeError, match="TINYGRAD_TF_DEVICE.*'tpu'.*'cpu'"):
        torch.zeros(2)
    torch.set_default_device("cpu")
    assert torch.zeros(2).device == torch.device("cpu")
    torch.set_default_device(None)
    monkeypatch.setenv("TINYGRAD_TF_DEVICE", "")
    assert torch.get_default_device() == torch.device("cpu")
    with mock.patch.dict(sys.modules, {"cupy": None}), pytest.raises(RuntimeError, match="CuPy"):
        monkeypatch.setenv("TINYGRAD_TF_DEVICE", "cuda")
        torch.zeros(2)


def test_moving_to_where_it_is_already_moves_nothing():
    x = torch.ones(2, device="cpu")
    assert x.to("cpu") is x and x.to("cpu:0") is x and x.cpu() is x and torch.zeros(1, device="cpu:0").device == torch.device("cpu")


@given(hnp.mutually_broadcastable_shapes(num_shapes=1, base_shape=(2, 3, 4), max_dims=3))
def test_sum_to_is_the_reverse_of_broadcasting(shapes):
    shape = shapes.input_shapes[0]
    x = np.random.default_rng(0).standard_normal(np.broadcast_shapes(shape, (2, 3, 4)))
    y = backend.sum_to(x, shape)
    assert y.shape == shape
    other = np.random.default_rng(1).standard_normal(shape)
    np.testing.assert_allclose((y * other).sum(), (x * np.broadcast_to(other, x.shape)).sum(), atol=1e-10)


@given(hnp.arrays(np.float32, hnp.array_shapes(min_side=0, max_side=5), elements=st.integers(-9, 9)))
def test_sum_rows_of_any_shape_and_type(x):
    for kind in (np.float32, np.float64, np.float16, np.int64):
        rows = x.astype(kind)
        np.testing.assert_allclose(backend.sum_rows(rows), rows.reshape(int(np.prod(x.shape[:-1])), x.shape[-1]).sum(0), rtol=1e-2,
                                   atol=1e-2)


@pytest.mark.parametrize("n", [0, 1, 5, 1 << 14, (1 << 14) + 1])
def test_few_ones_are_made_once_and_cannot_be_written(n):
    for dtype in (np.float32, np.float64, np.int64):
        ones, again = (backend.ones_beside(np.zeros(3, dtype), n) for _ in range(2))
        assert ones.dtype == dtype and ones.shape == (n,) and (ones == 1).all()
        assert (ones is again) == (not ones.flags.writeable) == (n <= 1 << 14)


def test_rows_are_not_copied():
    x = np.arange(24.0).reshape(2, 3, 4)
    for axes, shape in ((0, (24, 1)), (1, (6, 4)), (2, (2, 12)), (3, (1, 24))):
        assert backend.as_rows(x, axes).shape == shape and backend.owner(backend.as_rows(x, axes)) is backend.owner(x)
    assert [backend.as_rows(part).shape for part in (x[0], x[:, :0], x[..., :0])] == [(3, 4), (0, 4), (6, 0)]


def test_owner_finds_who_holds_the_memory():
    x = np.zeros((4, 6))
    for view in (x[1:], x.T, x[1:].T[::2], x.reshape(-1), np.broadcast_to(x, (2, 4, 6)), x[0, 0:1]):
        assert backend.owner(view) is x
    assert backend.owner(x) is x and backend.owner(x.copy()) is not x


def test_scatter_add_adds_up_where_an_index_repeats():
    x = np.zeros(3)
    backend.scatter_add(x, np.array([0, 2, 2]), np.array([1.0, 2, 3]))
    assert x.tolist() == [1, 0, 5]


@pytest.mark.parametrize("failure", [OSError("no C library"), TypeError("Windows"), AttributeError("musl, macOS")])
def test_tuning_the_allocator_is_refused_quietly_where_the_c_library_cannot(failure):
    with mock.patch.object(backend.ctypes, "CDLL", side_effect=failure):
        assert backend.tune_allocator() is False


def test_tuning_the_allocator_where_there_is_no_mallopt_or_it_refuses():
    with mock.patch.object(backend.ctypes, "CDLL", return_value=object()):
        assert backend.tune_allocator() is False
    with mock.patch.object(backend.ctypes, "CDLL", return_value=mock.Mock(mallopt=lambda *_: 0)):
        assert backend.tune_allocator() is False
    assert python("from tinygrad_tf.backend import tune_allocator; print(type(tune_allocator()).__name__)")[0] == "bool\n"


# --- subnormal numbers --------------------------------------------------------------------------------------------------------

@pytest.fixture
def flushing():
    """Where subnormal numbers can be 0; afterwards they are what they were."""
    before = backend.flushes_denormal()
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot")
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(before)


def in_a_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def smallest(x):
    """1e-38 / 10 for every element of a tensor."""
    return (x * 1e-38 / 10).tolist()


@pytest.mark.host("the processor's own setting")
def test_subnormal_numbers_are_zero_while_asked_for(flushing):
    x = torch.ones(40)
    assert not backend.flushes_denormal() and smallest(x)[0] > 0
    assert torch.set_flush_denormal(True) is True
    assert backend.flushes_denormal() and smallest(x) == [0] * 40 and (x * 2e-38).tolist() == [np.float32(2e-38)] * 40
    assert (torch.eye(40) @ (x.reshape(40, 1) * 2e-38) * 0.1).tolist() == [[0]] * 40
    assert in_a_thread(backend.flushes_denormal)                    # it was begun afterwards
    assert torch.set_flush_denormal(False) is True
    assert not backend.flushes_denormal() and smallest(x)[0] > 0


@pytest.mark.host("the processor's own setting")
def test_another_thread_keeps_its_own_setting(flushing):
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(backend.flushes_denormal).result()
        torch.set_flush_denormal(True)
        assert backend.flushes_denormal() and not pool.submit(backend.flushes_denormal).result()


@pytest.mark.host("the processor's own setting")
@pytest.mark.parametrize("before", [False, True])
def test_within_a_block_subnormal_numbers_are_zero_and_then_what_they_were(flushing, before):
    torch.set_flush_denormal(before)
    with pytest.raises(ZeroDivisionError), backend.flushing_denormal():
        with backend.flushing_denormal():
            assert backend.flushes_denormal()
        assert backend.flushes_denormal()
        1 / 0  # noqa: B018
    assert backend.flushes_denormal() == before


def test_where_the_machine_cannot_nothing_changes():
    before = backend.flushes_denormal()
    patch = mock.patch.object
    for change in (patch(backend.sys, "platform", "darwin"), patch(backend.platform, "machine", lambda: "aarch64"),
                   patch(backend.ctypes, "CDLL", side_effect=OSError), patch(backend.ctypes, "CDLL", return_value=object())):
        with change:
            assert torch.set_flush_denormal(True) is False
            with backend.flushing_denormal():
                assert backend.flushes_denormal() == before
    assert backend.flushes_denormal() == before


@pytest.mark.parametrize("mode", [1, 0, None, "yes", np.True_])
def test_whether_subnormal_numbers_are_zero_is_a_bool(mode):
    with pytest.raises(RuntimeError, match="set_flush_denormal: expected True or False, got"):
        torch.set_flush_denormal(mode)
