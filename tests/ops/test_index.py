"""Choosing elements: every kind of index as PyTorch reads it, in both directions; gather, scatter, sort."""
import itertools

import numpy as np
import pytest
from device import host, share_memory
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tinygrad_tf as torch


def positive_steps(index):
    return all(not isinstance(i, slice) or (i.step or 1) > 0 for i in (index if isinstance(index, tuple) else (index,)))


@given(hnp.array_shapes(min_dims=1, max_dims=4, max_side=4), st.data())
def test_basic_indices_are_numpys_and_views(shape, data):
    index = data.draw(hnp.basic_indices(shape, allow_newaxis=True).filter(positive_steps))
    array = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    x = torch.tensor(array, requires_grad=True)
    y = x[index]
    np.testing.assert_array_equal(host(y), array[index])
    assert share_memory(y, x) or not y.numel()
    y.sum().backward()
    want = np.zeros(shape)
    want[index] = 1
    np.testing.assert_array_equal(host(x.grad), want)


@given(st.lists(st.integers(-4, 3), max_size=6), st.lists(st.integers(-3, 2), max_size=6), st.booleans())
def test_the_gradient_counts_repeated_indices(rows, columns, both):
    x = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    n = min(len(rows), len(columns))
    index = (torch.tensor(rows[:n], dtype=torch.int64), torch.tensor(columns[:n],
                                                                     dtype=torch.int64)) if both else torch.tensor(rows, dtype=torch.int64)
    x[index].sum().backward()
    want = np.zeros((4, 3))
    np.add.at(want, tuple(host(i) for i in index) if both else host(index), 1)
    np.testing.assert_array_equal(host(x.grad), want)


@given(hnp.arrays(bool, (3, 4)))
def test_a_mask_takes_and_puts_what_nonzero_names(chosen):
    x = torch.tensor(np.arange(12.0).reshape(3, 4), requires_grad=True)
    valid_tokens = torch.tensor(chosen)
    assert torch.equal(x[valid_tokens], x[torch.nonzero(valid_tokens, as_tuple=True)])
    assert torch.equal(x[valid_tokens], x.masked_select(valid_tokens))
    y = x * 1
    y[valid_tokens] = y[valid_tokens] * 10
    y.sum().backward()
    np.testing.assert_array_equal(host(x.grad), np.where(chosen, 10, 1))
    np.testing.assert_array_equal(host(y), np.where(chosen, 10, 1) * host(x))


@given(hnp.array_shapes(min_dims=1, max_dims=3, max_side=4), st.data())
def test_what_is_assigned_is_read_back_and_gets_its_gradient(shape, data):
    index = data.draw(hnp.basic_indices(shape).filter(positive_steps))
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    value = torch.tensor(np.random.default_rng(0).standard_normal(np.zeros(shape)[index].shape), requires_grad=True)
    y = x + 1
    y[index] = value
    assert torch.equal(y[index], value)
    y.sum().backward()
    taken = np.ones(shape)
    taken[index] = 0
    np.testing.assert_array_equal(host(x.grad), taken)
    np.testing.assert_array_equal(host(value.grad), np.ones(value.shape))


@pytest.mark.parametrize("index, shape", [((0, slice(None), [0, 1]), (3, 2)), (([0, 1], slice(None), 0), (2, 3)), ((0, [0, 1]), (2, 4)),
                                          ((slice(None), 0, [1, 2]), (2, 2)), ((0, ..., [0, 3, 1]), (3, 3)), ((None, 0, slice(None),
                                                                                                               [1]), (1, 3, 1)),
                                          (([0, 1], slice(None), [0, 1]), (2, 3))])
def test_ints_beside_arrays_are_taken_first(index, shape):
    """NumPy counts an int among the arrays and moves axes; PyTorch does not."""
    x = torch.tensor(np.arange(24.0).reshape(2, 3, 4))
    assert x[index].shape == shape
    first = x[index].clone()
    x[index] = first * 2
    assert torch.equal(x[index], first * 2)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 1))
def test_gather_takes_what_scatter_put(rows, columns, dim):
    random = np.random.default_rng(rows * 10 + columns)
    source = torch.tensor(random.standard_normal((rows, columns)))
    order = torch.tensor(np.argsort(random.random((rows, columns)), axis=dim))
    put = torch.zeros(rows, columns, dtype=torch.float64).scatter(dim, order, source)
    assert torch.equal(put.gather(dim, order), source) and torch.allclose(put.sum(dim), source.sum(dim))
    twice = torch.ones(rows, columns, dtype=torch.float64).scatter_add(dim, order * 0, source)
    assert torch.allclose(twice[(slice(None),) * dim + (0,)], source.sum(dim) + 1)


@given(hnp.arrays(np.float64, hnp.array_shapes(max_dims=2, max_side=6), elements=st.sampled_from([1.0, 2.0, np.nan, np.inf, -np.inf,
                                                                                                  0.0, -1.5])),
       st.booleans())
def test_sorting_orders_keeps_ties_and_puts_nan_on_top(array, descending):
    x = torch.tensor(array)
    values, indices = x.sort(descending=descending, stable=True)
    np.testing.assert_array_equal(host(values), host(x.gather(-1, indices)))
    key = np.where(np.isnan(host(values)), np.inf, host(values)) * (-1 if descending else 1)
    assert (key[..., 1:] >= key[..., :-1]).all()
    top = x.topk(array.shape[-1], largest=descending)
    np.testing.assert_array_equal(host(top.values), host(values))
    same = host(values)[..., 1:] == host(values)[..., :-1]
    assert (np.diff(host(indices), axis=-1)[same] > 0).all()


def test_an_unselected_nan_never_gets_through_where():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = torch.where(torch.tensor([True, False]), x * 3, x * float("nan"))
    y[0].backward()
    z = torch.tensor([float("nan"), 2.0], requires_grad=True)
    torch.where(torch.tensor([False, True]), z, 0.0).sum().backward()
    assert y[0].item() == 3 and z.grad.tolist() == [0, 1]


def test_in_place_parts_of_a_tensor_in_a_graph():
    w = torch.ones(3, requires_grad=True)
    y = torch.zeros(2, 3)
    y[0] += w
    y[1] += 2 * w
    y[0] *= 3
    y[:, 1:] -= 1
    assert y.tolist() == [[3, 2, 2], [2, 1, 1]]
    y.sum().backward()
    assert w.grad.tolist() == [5, 5, 5]


def test_a_part_written_through_another_view_still_raises():
    y = torch.ones(2, 3, requires_grad=True) * 1
    part, other = y[0], y[1]
    part += 1
    y[0] = part
    with pytest.raises(RuntimeError, match="in place"):
        other.sum()
    other = y[0]
    other += 1
    with pytest.raises(RuntimeError, match="in place"):
        y[1] = other                            # not where it lies


@pytest.mark.parametrize("expression, error, words", [
    ("x[2]", IndexError, ["index", "2", "(2, 3)"]),
    ("x[0, 0, 0]", IndexError, ["index", "(2, 3)"]),
    ("x[torch.tensor([0, 5])]", IndexError, ["index", "5", "(2, 3)"]),
    ("x[torch.tensor([0.5])]", IndexError, ["integers or booleans", "float32"]),
    ("x[1.0]", IndexError, ["ints", "1.0"]),
    ("x['rows']", TypeError, ["'rows'"]),
    ("x[::-1]", ValueError, ["step", "-1", "flip"]),
    ("x.__setitem__(0, torch.ones(4))", RuntimeError, ["setitem", "(4,)", "(3,)", "(2, 3)"]),
    ("torch.where(x, x, x)", TypeError, ["where", "bool", "float32", "x > 0"]),
    ("torch.where(x > 0, x, torch.ones(4))", RuntimeError, ["where", "(2, 3)", "(4,)"]),
    ("x.masked_fill(x, 0)", RuntimeError, ["masked_fill", "bool", "float32"]),
    ("x.masked_fill(x > 0, torch.ones(2))", RuntimeError, ["masked_fill", "number", "(2,)"]),
    ("x.masked_select(x)", RuntimeError, ["masked_select", "bool"]),
    ("x.gather(0, torch.tensor([[9]]))", RuntimeError, ["gather", "9", "size 2"]),
    ("x.gather(0, torch.tensor([0]))", RuntimeError, ["gather", "number of dimensions", "(1,)", "(2, 3)"]),
    ("x.scatter(0, torch.tensor([[0]]), x.double())", RuntimeError, ["scatter", "float32", "float64"]),
    ("x.scatter_add(0, torch.tensor([[0]]), 1)", TypeError, ["scatter_add", "Tensor", "int"]),
    ("x.index_select(0, torch.tensor([-1]))", IndexError, ["index_select", "-1"]),
    ("x.index_add(0, torch.tensor([0]), x)", RuntimeError, ["index_add", "(1, 3)", "(2, 3)"]),
    ("x.topk(4)", RuntimeError, ["topk", "3", "4"]),
    ("x.bincount()", RuntimeError, ["bincount", "integers", "(2, 3)"]),
    ("x.topk(True)", TypeError, ["topk", "int", "bool"]),
    ("x.topk(1.0)", TypeError, ["topk", "int", "float"]),
    ("(x > 0).topk(1)", RuntimeError, ["topk", "bool"]),
    ("torch.tensor(1.0).gather(0, torch.tensor([0]))", RuntimeError, ["gather", "number of dimensions", "(1,)"]),
    ("torch.searchsorted(x, x)", RuntimeError, ["searchsorted", "one row", "(2, 3)"]),
    ("x.copy_([1])", TypeError, ["copy_", "Tensor", "list"]),
])
def test_errors_say_what_came_and_what_would_do(expression, error, words):
    with pytest.raises(error) as caught:
        eval(expression, {"x": torch.ones(2, 3), "torch": torch})
    assert not [w for w in words if w not in str(caught.value)], str(caught.value)


WRITERS = {"setitem": lambda x, value: x.__setitem__(0, value), "fill_": lambda x, value: x.fill_(value),
           "masked_fill": lambda x, value: x.masked_fill(x == x, value),
           "pad": lambda x, value: torch.nn.functional.pad(x, (1, 1), value=value),
           "scatter": lambda x, value: x.scatter(0, torch.tensor([0]), value)}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_number_that_is_written_is_one_that_the_dtype_holds(write):
    nan, inf = float("nan"), float("inf")
    beyond = {torch.int8: [300, -129, nan, inf], torch.uint8: [256, nan], torch.int64: [2**63, nan, -inf],
              torch.float16: [1e6, -1e9, 65505], torch.float32: [1e39, -1e300, 10**400], torch.float64: [10**400]}
    within = {torch.int8: [127, -128, 1.5, True], torch.uint8: [255, -1], torch.int64: [2**63 - 1],
              torch.float16: [65504, -inf, nan, 1e-30], torch.float32: [3e38, inf, nan, 2**70], torch.float64: [1e308],
              torch.bool: [True, 0]}
    for dtype, values in beyond.items():
        for value in values:
            with pytest.raises(RuntimeError, match="without overflow"):
                write(torch.ones(2, dtype=dtype), value)
    for dtype, values in within.items():
        for value in values:
            write(torch.ones(2, dtype=dtype), value)
    for wrong in ("a", [1], 1j, object()):
        with pytest.raises(TypeError, match="Tensor"):
            write(torch.ones(2), wrong)


def test_index_add_of_single_numbers():
    assert torch.tensor(1.0).index_add(0, torch.tensor(0), torch.tensor(2.0)).item() == 3
    x, source = torch.zeros(3, requires_grad=True), torch.tensor([2.0], requires_grad=True)
    y = x.index_add(0, torch.tensor(1), source, alpha=5)
    (y * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert y.tolist() == [0, 10, 0] and x.grad.tolist() == [1, 2, 3] and source.grad.tolist() == [10]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint8, torch.bool, torch.float32])
def test_ids_are_int64_or_int32(dtype):
    x, i = torch.ones(2), torch.zeros(1, dtype=dtype)
    for run in (lambda i: x.gather(0, i), lambda i: x.scatter(0, i, 1.0), lambda i: x.scatter_add(0, i, x), lambda i: x.index_select(0, i),
                lambda i: x.index_add(0, i, x[:1])):
        run(i.long()), run(i.int())
        with pytest.raises(RuntimeError, match="int64 or int32"):
            run(i)


def test_no_nan_is_another_one():
    x = torch.tensor([float("nan"), 1.0, float("nan"), 1.0])
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    assert len(torch.unique(x)) == 3 and counts.tolist() == [2, 1, 1] and inverse[1].item() == inverse[3].item() == 0


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("kind", ["different", "tied", "NaN", "infinite", "all equal"])
def test_topk_of_long_rows_is_the_beginning_of_a_sort(dtype, kind):
    """Beyond 2,048 elements it does not sort: the same ids, equals in their order and NaN the largest, along either axis."""
    if kind in ("NaN", "infinite") and dtype is np.int64:
        pytest.skip("no such integer")
    rng = np.random.default_rng(0)
    x = rng.integers(-9, 9, (3, 2500)) if kind == "tied" else rng.standard_normal((3, 2500)) * 1000
    x = np.zeros((3, 2500), dtype) if kind == "all equal" else x.astype(dtype)
    if kind == "NaN":
        x[0, ::7], x[1, :30] = np.nan, np.nan
    if kind == "infinite":
        x[0, :2450], x[1, ::3], x[2, 5] = -np.inf, np.inf, np.inf
    for k, largest, dim in itertools.product((1, 50, 624), (True, False), (0, 1)):
        data = torch.tensor(x.T.copy() if dim == 0 else x)
        values, ids = data.topk(k, dim=dim, largest=largest)
        expected = data.argsort(dim=dim, descending=largest)[(slice(None),) * dim + (slice(k),)]
        assert torch.equal(ids, expected)
        assert np.array_equal(host(values), host(data.gather(dim, expected)), equal_nan=True)
