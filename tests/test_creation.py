"""Making tensors: PyTorch's values, dtypes and errors; what is copied and what is shared."""
import numpy as np
import pytest
import tensorcases
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tinygrad_tf as torch


@pytest.fixture(autouse=True)
def default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


def test_tensor_copies_and_from_numpy_and_as_tensor_share():
    array = np.zeros(3, np.float32)
    copied, shared, viewed = torch.tensor(array), torch.from_numpy(array), torch.as_tensor(array, device="cpu")
    array[0] = 5
    assert copied[0].item() == 0 and shared[0].item() == viewed[0].item() == 5
    assert torch.as_tensor(shared) is shared and torch.tensor(shared).data_ptr() != shared.data_ptr()
    assert torch.as_tensor(array, dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("make", [lambda **o: torch.zeros(2, **o), lambda **o: torch.ones(2, **o), lambda **o: torch.empty(2, **o),
                                  lambda **o: torch.rand(2, **o),
                                  lambda **o: torch.randn(2, **o), lambda **o: torch.full((2,), 1.5, **o),
                                  lambda **o: torch.linspace(0, 1, 2, **o),
                                  lambda **o: torch.arange(0.0, 2, **o), lambda **o: torch.eye(2, **o),
                                  lambda **o: torch.tensor([1.5], **o),
                                  lambda **o: torch.zeros_like(torch.ones(2), **o), lambda **o: torch.randn_like(torch.ones(2), **o)])
def test_every_maker_takes_dtype_device_and_requires_grad(make):
    for options in ({}, {"dtype": torch.float64}, {"device": "cpu"}, {"device": "cpu:0"}, {"requires_grad": True}):
        x = make(**options)
        assert x.dtype == options.get("dtype", torch.float32)
        assert x.requires_grad == ("requires_grad" in options)
        assert x.is_leaf
        wanted = torch.device(options["device"]) if "device" in options else torch.get_default_device()
        assert x.device.type == wanted.type


def test_the_default_dtype_is_that_of_floats_and_not_of_integers():
    torch.set_default_dtype(torch.float64)
    for x in (torch.zeros(1), torch.tensor(1.5), torch.randn(1), torch.ones(1, dtype=torch.int64) / 2, torch.arange(0.5, 2),
              torch.linspace(0, 1, 2),
              torch.tensor([1, 2]).exp(), torch.tensor(1) * 0.5):
        assert x.dtype == torch.float64
    assert torch.arange(3).dtype == torch.tensor([1]).dtype == torch.int64 and str(torch.tensor(1.5, device="cpu")) == "tensor(1.5000)"


@given(st.integers(-20, 20), st.integers(-20, 20), st.integers(-5, 5).filter(bool))
def test_arange_is_pythons_range(start, end, step):
    if (end - start) * step >= 0:
        assert torch.arange(start, end, step).tolist() == list(range(start, end, step))
    else:
        with pytest.raises(RuntimeError, match="arange"):
            torch.arange(start, end, step)


@given(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.integers(2, 20))
def test_linspace_begins_and_ends_where_it_was_told(start, end, steps):
    x = torch.linspace(start, end, steps, dtype=torch.float64)
    assert len(x) == steps and x[0].item() == start and x[-1].item() == end


@given(hnp.arrays(st.sampled_from(list(tensorcases.DTYPES.values())), hnp.array_shapes(max_side=3), elements=st.sampled_from([0, 1])))
def test_nested_lists_and_arrays_give_the_same_numbers(array):
    x = torch.tensor(array)
    assert x.dtype.name == str(array.dtype) and torch.equal(torch.tensor(array.tolist(), dtype=x.dtype), x)
    assert torch.zeros_like(x).dtype == x.dtype and torch.full_like(x, 1).tolist() == np.ones_like(array).tolist()


def test_lists_take_the_widest_dtype_inside_them():
    for data, dtype in [([torch.tensor(1.5), 2], torch.float32), ([np.float64(1), 2.5], torch.float64), ([2.5, np.float64(1)],
                                                                                                         torch.float64),
                        ([torch.tensor(1.0, dtype=torch.float64), 1], torch.float64), ([True, 2], torch.int64), ([torch.tensor(1),
                                                                                                                  2.5], torch.float32)]:
        assert torch.tensor(data).dtype == dtype


@pytest.mark.parametrize("expression, error, words", [
    ("torch.tensor([[1, 2], [3]])", ValueError, ["rectangle"]),
    ("torch.tensor(None)", RuntimeError, ["dtype", "NoneType", "numbers"]),
    ("torch.tensor(['a'])", TypeError, ["<U1", "not supported"]),
    ("torch.tensor([2**64])", ValueError, ["int64", str(2**64)]),
    ("torch.tensor([1, 300], dtype=torch.uint8)", RuntimeError, ["uint8", "300", "overflow"]),
    ("torch.tensor(float('nan'), dtype=torch.int64)", RuntimeError, ["nan", "int64"]),
    ("torch.tensor([1], dtype=torch.float32, requires_grad=True).long().requires_grad_()", RuntimeError, ["floating point"]),
    ("torch.tensor([1], dtype='float31')", TypeError, ["float31", "float32", "int64"]),
    ("torch.zeros(-1)", RuntimeError, ["zeros", "≥ 0", "-1"]),
    ("torch.zeros(2.5)", TypeError, ["zeros", "ints"]),
    ("torch.full(2, 2)", TypeError, ["full", "(2,)"]),
    ("torch.full((2, ), 300, dtype=torch.uint8)", RuntimeError, ["full", "300", "uint8"]),
    ("torch.full((2, ), 1e6, dtype=torch.float16)", RuntimeError, ["full", "1000000", "float16"]),
    ("torch.full((2, ), -1e39)", RuntimeError, ["full", "1e+39", "float32"]),
    ("torch.full_like(torch.ones(2).half(), 1e6)", RuntimeError, ["full", "float16"]),
    ("torch.ones(2).half().new_full((2, ), 1e6)", RuntimeError, ["full", "float16"]),
    ("torch.zeros_like([1])", TypeError, ["zeros_like", "Tensor", "list"]),
    ("torch.arange(0, 5, -1)", RuntimeError, ["arange", "step", "arange(0, 5, -1)"]),
    ("torch.linspace(0, 1, -1)", RuntimeError, ["linspace", "-1"]),
    ("torch.from_numpy([1])", TypeError, ["from_numpy", "ndarray", "list"]),
    ("torch.isclose(torch.ones(2), 1)", TypeError, ["isclose", "tensors", "int"]),
    ("torch.isclose(torch.ones(2), torch.ones(3))", RuntimeError, ["isclose", "(2,)", "(3,)"]),
    ("torch.isclose(torch.ones(2), torch.ones(2).double())", RuntimeError, ["isclose", "float32", "float64"]),
    ("torch.finfo(torch.int8)", TypeError, ["finfo", "int8", "iinfo"]),
    ("torch.iinfo(torch.float32)", TypeError, ["iinfo", "float32", "finfo"]),
    ("torch.set_default_dtype(torch.int64)", TypeError, ["default", "floating-point", "int64"]),
    ("torch.randint(5, 5, (2, ))", RuntimeError, ["randint", "5"]),
])
def test_errors_say_what_came_and_what_would_do(expression, error, words):
    with pytest.raises(error) as caught:
        eval(expression, {"torch": torch})
    assert not [w for w in words if w not in str(caught.value)], str(caught.value)
