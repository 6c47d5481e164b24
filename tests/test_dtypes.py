"""Dtypes and promotion: PyTorch's table, all pairs of kinds."""
import copy
import pickle

import numpy as np
import pytest
import tensorcases
from hypothesis import given
from hypothesis import strategies as st

import tinygrad_tf as torch
from tinygrad_tf import dtypes

PROMOTIONS = tensorcases.promotions()
RECORDED = tensorcases.recorded("promotion")
kinds = st.sampled_from(dtypes.DTYPES)
operands = st.tuples(kinds, st.sampled_from([(2,), (), (3, 1)])).map(lambda o: torch.zeros(o[1], dtype=o[0]))


@pytest.mark.parametrize("left", [f"{d} {k}" for d in tensorcases.DTYPES.values() for k in tensorcases.PROMOTION_OPERANDS])
def test_promotion_as_recorded_from_pytorch(left):
    wrong = {name: (got, RECORDED[name]) for name, text in PROMOTIONS.items() if name.startswith(left + " +")
             if (got := eval(text, {"torch": torch}).name) != RECORDED[name]}
    assert not wrong


@pytest.mark.torch
def test_promotion_as_pytorch_here():
    pytorch = pytest.importorskip("torch")
    assert {n: f"torch.{d}" for n, d in RECORDED.items()} == {n: str(eval(t, {"torch": pytorch})) for n, t in PROMOTIONS.items()}


@given(operands, operands)
def test_results_have_the_promised_dtype_in_either_order(x, y):
    wanted = torch.result_type(x, y)
    assert torch.result_type(y, x) == wanted == (x + y).dtype == (x * y).dtype == torch.maximum(x, y).dtype == torch.where(x == y,
                                                                                                                           x, y).dtype


@given(kinds, kinds, kinds)
def test_promote_types_is_commutative_associative_and_idempotent(a, b, c):
    promote = torch.promote_types
    assert promote(a, b) == promote(b, a) and promote(a, a) == a
    if {a, b, c}.isdisjoint({dtypes.uint8}):    # uint8 with int8 is int16: not so for three
        assert promote(promote(a, b), c) == promote(a, promote(b, c))


@pytest.mark.parametrize("name, dtype", [(np.float32, "float32"), ("float32", "float32"), (float, "float64"), (int, "int64"), (bool,
                                                                                                                               "bool"),
                                         (np.dtype("int8"), "int8"), (torch.half, "float16"), (torch.long, "int64"), (torch.double,
                                                                                                                      "float64")])
def test_a_dtype_has_many_names(name, dtype):
    assert dtypes.as_dtype(name).name == dtype and torch.zeros(1, dtype=name).dtype is dtypes.as_dtype(name)


@pytest.mark.parametrize("bad", ["float31", np.complex64, object, 3.5, "nothing", np.uint16])
def test_other_types_are_refused_with_the_list_of_dtypes(bad):
    with pytest.raises(TypeError, match="bool, uint8, int8, int16, int32, int64, float16, float32, float64"):
        torch.zeros(1, dtype=bad)


@pytest.mark.parametrize("dtype", dtypes.DTYPES, ids=str)
def test_there_is_one_object_of_each_dtype(dtype):
    assert copy.deepcopy(dtype) is dtype
    assert copy.copy(dtype) is dtype
    assert dtypes.as_dtype(dtype.numpy) is dtype
    assert repr(dtype) == f"torch.{dtype.name}"
    assert dtype.itemsize == dtype.numpy.itemsize and torch.zeros(1, dtype=dtype).dtype is dtype
    assert pickle.loads(pickle.dumps(dtype)) is dtype


@given(st.sampled_from([d for d in dtypes.DTYPES if d.numpy.kind in "iu"]), st.integers(-2**70, 2**70))
def test_fits_says_what_an_integer_type_holds(dtype, number):
    info = np.iinfo(dtype.numpy)
    assert dtypes.fits(float("nan"), dtype.numpy) is False and dtypes.fits(info.max, dtype.numpy) and dtypes.fits(info.min, dtype.numpy)
    low = -info.max if info.min == 0 and -2**63 <= number < 2**63 else info.min
    assert dtypes.fits(number, dtype.numpy) == (low <= number <= info.max)


@given(st.sampled_from([d for d in dtypes.DTYPES if d.is_floating_point]), st.floats() | st.integers(-10**320, 10**320))
def test_fits_says_what_a_float_type_holds(dtype, number):
    largest = float(np.finfo(dtype.numpy).max)
    assert dtypes.fits(number, dtype.numpy) == (not largest < abs(number) != np.inf)
