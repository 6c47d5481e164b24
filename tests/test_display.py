"""How tensors print: letter for letter as PyTorch."""
import ast
import math

import numpy as np
import pytest
import tensorcases
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tinygrad_tf as torch

pytestmark = pytest.mark.host("a tensor elsewhere prints its device too")
shapes = hnp.array_shapes(min_dims=0, max_dims=4, max_side=5)
arrays = st.one_of(hnp.arrays(st.sampled_from(list(tensorcases.DTYPES.values())), shapes, elements=st.sampled_from([0, 1])),
                   hnp.arrays(st.sampled_from(["int8", "int64", "float32"]), shapes, elements=st.sampled_from([0, -1, 7, 100])),
                   hnp.arrays(np.float32, shapes, elements=st.floats(width=32)))


@pytest.mark.torch
@given(arrays)
def test_any_tensor_as_pytorch(array):
    pytorch = pytest.importorskip("torch")
    assert repr(torch.tensor(array)) == repr(pytorch.tensor(array))


@given(arrays)
def test_what_is_printed_can_be_read_back(array):
    """The printed numbers are the numbers, to four decimals."""
    text = repr(torch.tensor(array)).removeprefix("tensor(").partition(", dtype=")[0].partition(",\n       dtype=")[0].rstrip(")")
    for word, number in [("inf", "1e999"), ("nan", "None")]:
        text = text.replace(word, number)
    printed = np.array(ast.literal_eval(text), dtype=np.float64)
    assert printed.shape == array.shape
    np.testing.assert_allclose(printed, array.astype(np.float64), rtol=6e-5, atol=6e-5)


def test_large_tensors_show_their_edges():
    text = repr(torch.arange(3000).reshape(3, 1000))
    assert text == ("tensor([[   0,    1,    2,  ...,  997,  998,  999],\n        [1000, 1001, 1002,  ..., 1997, 1998, 1999],\n"
                    "        [2000, 2001, 2002,  ..., 2997, 2998, 2999]])")
    assert "..." not in repr(torch.arange(1000)) and "..." in repr(torch.arange(1001))


def test_notes_name_history_dtype_and_shape():
    x = torch.ones(2, requires_grad=True)
    assert repr(x) == "tensor([1., 1.], requires_grad=True)" and repr(x * 2) == "tensor([2., 2.], grad_fn=<MulBackward0>)"
    assert repr(x.sum()) == "tensor(2., grad_fn=<SumBackward0>)" and repr(x.detach().half()) == "tensor([1., 1.], dtype=torch.float16)"
    assert repr(torch.zeros(0, 3)) == "tensor([], size=(0, 3))" and repr(torch.tensor(math.nan)) == "tensor(nan)"
