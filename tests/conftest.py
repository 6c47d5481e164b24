"""What every test has: one BLAS thread, random numbers from a known state, Hypothesis without chance; and the device under test."""
import os

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")            # before NumPy is imported: pytest-xdist runs a process per core

import importlib.util  # noqa: E402
import sys  # noqa: E402

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile("same-every-time", derandomize=True, deadline=None, database=None, max_examples=50,
                          suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
settings.load_profile("same-every-time")


def pytest_addoption(parser):
    parser.addoption("--device", choices=("cpu", "strict", "cuda"), default="cpu",
                     help="where tensors are made: cpu; strict, the stand-in for CuPy of strict_cupy.py; cuda, a GPU through CuPy")


def pytest_configure(config):
    """The device is the default one before any test is imported."""
    if config.getoption("--device") == "strict":
        import strict_cupy
        strict_cupy.install()
    if config.getoption("--device") != "cpu":
        try:
            use_device(config)
        except RuntimeError as error:           # no CuPy, or no GPU
            raise pytest.UsageError(f"--device {config.getoption('--device')}: {error}") from None


def use_device(config):
    import tinygrad_tf
    wanted = None if config.getoption("--device") == "cpu" else "cuda"
    tinygrad_tf.set_default_device(wanted)
    if wanted:
        tinygrad_tf.backend.require_cupy()      # says what is missing


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("torch") and importlib.util.find_spec("torch") is None:
            item.add_marker(pytest.mark.skip(reason="PyTorch is not installed"))
        if config.getoption("--device") != "cpu" and (about := item.get_closest_marker("host")):
            item.add_marker(pytest.mark.skip(reason=f"about the CPU: {about.args[0]}"))


@pytest.fixture(autouse=True)
def same_start(pytestconfig):
    """Every test starts from the same random numbers and on the device under test, alone or in any order."""
    import tinygrad_tf
    use_device(pytestconfig)
    tinygrad_tf.manual_seed(0)


@pytest.fixture
def gpu(monkeypatch, pytestconfig):
    """"cuda" is there, on the CPU run as the strict stand-in, and the default device is the CPU: such a test says where it works."""
    import tinygrad_tf
    if pytestconfig.getoption("--device") == "cpu":
        import strict_cupy
        for name, module in strict_cupy.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    tinygrad_tf.set_default_device("cpu")
