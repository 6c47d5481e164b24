import numpy as np
import pytest
from device import host
from hypothesis import given
from hypothesis import strategies as st
from record_ops_fused import assert_close, names, ours, recorded, replay
from twins import assert_leaves_memory_alone, assert_twins

import tinygrad_tf
from tinygrad_tf import int32, no_grad, randn, tensor, uint8, zeros
from tinygrad_tf.ops._rows import scatter_rows
from tinygrad_tf.ops.dropout import dropout
from tinygrad_tf.ops.embedding import embedding, one_hot

pytestmark = pytest.mark.filterwarnings("error")
IDS = np.array([[3, 0, 3], [6, 3, 1]])


HOST = pytest.mark.host("dropout on another device has a counter-based stream of its own")
NAMES = names("embedding") + [pytest.param(name, marks=HOST) for name in names("dropout")]


@pytest.mark.parametrize("name", NAMES)
def test_pytorchs_numbers(name):
    assert_close(ours(name), recorded(name), name)


@pytest.mark.torch
@pytest.mark.parametrize("name", NAMES)
def test_live(name):
    torch = pytest.importorskip("torch")
    assert_close(ours(name), replay(name, torch, torch.nn.functional), name)


@pytest.mark.parametrize("ids", [IDS, IDS.T, IDS[0], np.array(2), np.zeros((0, 3), np.int64)], ids=lambda i: str(np.shape(i)))
def test_equals_one_hot_times_table(ids):
    weight = np.random.default_rng(0).normal(size=(7, 4))
    assert_twins(embedding, lambda i, w: one_hot(i, 7).double() @ w, ids, weight)
    assert_leaves_memory_alone(embedding, ids, weight)


@given(st.integers(1, 6), st.integers(1, 4), st.lists(st.integers(0, 5), max_size=30))
def test_repeated_ids_add_up(rows, columns, ids):
    """scatter_rows against a plain loop: sums of small whole numbers are exact in any order."""
    ids = np.array([i % rows for i in ids], dtype=np.int64)
    values = np.arange(ids.size * columns, dtype=np.float32).reshape(-1, columns)
    wanted = np.zeros((rows, columns), np.float32)
    for i, row in zip(ids, values):
        wanted[i] += row
    np.testing.assert_array_equal(scatter_rows(rows, ids, values), wanted)


@pytest.mark.host("the order of the sums varies on a GPU")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("columns", [0, 1, 2, 7, 8])
@pytest.mark.parametrize("ids", [[], [2], [0, 1, 2, 3], [3, 3, 3, 3, 3], [1, 0, 3, 1, 0, 3, 3]], ids=str)
@pytest.mark.parametrize("layout", [lambda a: a, lambda a: a.T.copy().T, lambda a: np.stack([a, a], -1)[..., 0]], ids=["C", "F", "steps"])
def test_rows_are_added_in_their_order_also_where_they_are_not_finite(dtype, columns, ids, layout):
    """Exactly the sums of a loop: nothing passes from one number to its neighbour, and no row that has no id is touched."""
    rng = np.random.default_rng(0)
    values, ids = layout(rng.normal(size=(len(ids), columns)).astype(dtype)), np.array(ids, dtype=np.int32)
    for bad, place in zip((np.nan, np.inf, -np.inf), rng.permutation(values.size)):
        values[np.unravel_index(place, values.shape)] = bad
    wanted = np.zeros((5, columns), dtype)
    for i, row in zip(ids, values):
        wanted[i] += row
    found = scatter_rows(5, ids, values)
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == dtype and found.base is None


def test_small_id_types_do_not_overflow():
    ids = np.full(3, 200, np.uint8)             # 200 · 4 does not fit into uint8
    w = randn(256, 4, requires_grad=True)
    embedding(tensor(ids), w).sum().backward()
    assert w.grad[200].tolist() == [3, 3, 3, 3] and w.grad.sum().item() == 12
    for dtype in (uint8, int32):
        np.testing.assert_array_equal(host(embedding(tensor([1, 0]).to(dtype), w)), host(w)[[1, 0]])


@pytest.mark.parametrize("bad", [-1, 7, -7, 10**12])
def test_ids_never_wrap(bad):
    with pytest.raises(IndexError, match=f"id {bad} is out of range for a table of 7 rows: ids are 0 to 6"):
        embedding(tensor([[0, bad]]), zeros(7, 2))


def test_wrong_calls():
    with pytest.raises(RuntimeError, match=r"float32.*long"):
        embedding(tensor([1.0]), zeros(3, 2))
    with pytest.raises(RuntimeError, match="bool"):
        embedding(tensor([True]), zeros(3, 2))
    with pytest.raises(RuntimeError, match="2-D"):
        embedding(tensor([1]), zeros(3))
    for padding_idx in (3, -4):
        with pytest.raises(ValueError, match=f"padding_idx {padding_idx}.*3 rows"):
            embedding(tensor([1]), zeros(3, 2), padding_idx=padding_idx)


@pytest.mark.parametrize("padding_idx", [1, -2, 0, -3])
def test_padding_row_is_returned_and_gets_no_gradient(padding_idx):
    w = randn(3, 2, requires_grad=True)
    y = embedding(tensor([0, 1, 2, 2]), w, padding_idx=padding_idx)
    np.testing.assert_array_equal(host(y), host(w)[[0, 1, 2, 2]])
    y.sum().backward()
    wanted = np.array([[1, 1], [1, 1], [2, 2]])
    wanted[padding_idx] = 0
    np.testing.assert_array_equal(host(w.grad), wanted)


def test_ids_that_change_before_backward_are_noticed():
    ids, w = tensor([0, 1]), randn(3, 2, requires_grad=True)
    y = embedding(ids, w)
    ids[0] = 2
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


def test_max_norm_shortens_the_rows_that_are_used():
    w = tensor([[3.0, 4.0], [0.3, 0.4], [30.0, 40.0]], requires_grad=True)
    y = embedding(tensor([0, 1, 0]), w, max_norm=1.0)
    np.testing.assert_allclose(host(w), [[0.6, 0.8], [0.3, 0.4], [30, 40]], rtol=1e-6)
    y.sum().backward()
    assert w.grad.tolist() == [[2, 2], [1, 1], [0, 0]]


def test_one_hot():
    assert one_hot(tensor([[1], [0]])).tolist() == [[[0, 1]], [[1, 0]]]
    assert one_hot(zeros(0, 2).long(), 3).shape == (0, 2, 3) and one_hot(tensor(1), 3).tolist() == [0, 1, 0]
    for ids, classes, text in ((tensor([1, 2]), 2, "smaller than num_classes 2, got 2"), (tensor([-1]), -1, "non-negative, got -1"),
                               (zeros(0).long(), -1, "num_classes"), (tensor([1.0]), -1, "integers")):
        with pytest.raises(RuntimeError, match=text):
            one_hot(ids, classes)


def test_dropout_keeps_the_mean_and_the_gradient_goes_where_the_value_went():
    x = tinygrad_tf.ones(200, 200).requires_grad_()
    y = dropout(x, 0.25)
    kept = host(y) != 0
    assert abs(kept.mean() - 0.75) < 0.01
    np.testing.assert_allclose(host(y)[kept], 1 / 0.75, rtol=1e-6)
    dy = randn(200, 200)
    y.backward(dy)
    np.testing.assert_allclose(host(x.grad), host(dy) * host(y), rtol=1e-6)


def test_dropout_edges():
    x = randn(3, 4)
    for same in (dropout(x, 0.0), dropout(x, 0.5, training=False), dropout(x, 1.0, False)):
        assert same is x
    assert dropout(x, 1.0).tolist() == [[0] * 4] * 3
    assert dropout(zeros(0, 3)).shape == (0, 3) and dropout(x.double(), 0.5).dtype == tinygrad_tf.float64
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1"):
            dropout(x, p)
    with pytest.raises(RuntimeError, match="int64"):
        dropout(tensor([1, 2]))
    with no_grad():
        assert dropout(x, 0.5, inplace=True) is x and (x == 0).any()
