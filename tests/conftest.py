"""What every test has: one BLAS thread, random numbers from a known state, Hypothesis without chance."""
import os

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")            # before NumPy is imported: pytest-xdist runs a process per core

import importlib.util  # noqa: E402

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile("same-every-time", derandomize=True, deadline=None, database=None, max_examples=50,
                          suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
settings.load_profile("same-every-time")


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("torch") is None:
        for item in items:
            if item.get_closest_marker("torch"):
                item.add_marker(pytest.mark.skip(reason="PyTorch is not installed"))


@pytest.fixture(autouse=True)
def same_seed():
    """Every test starts from the same random numbers, alone or in any order."""
    import tinygrad_tf
    tinygrad_tf.manual_seed(0)
