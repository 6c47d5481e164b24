"""Mixture of experts, the operations: who stands where, and each step against the same made of smaller ones."""
import numpy as np
import pytest
from device import host, placed, strict_counts
from hypothesis import given
from hypothesis import strategies as st
from twins import assert_leaves_memory_alone, assert_twins

import tinygrad_tf as torch
import tinygrad_tf.nn.functional as F
from tinygrad_tf.ops.moe import combine, dispatch, grouped_linear, plan_dispatch
from tinygrad_tf.trace import count_flops


def plan_of(ids, E, capacity=None, valid=None):
    """(plan, the same with NumPy arrays)"""
    plan = plan_dispatch(placed(ids), E, capacity, None if valid is None else placed(valid))
    return plan, plan._replace(pairs=host(plan.pairs), places=host(plan.places))


def by_hand(ids, E, capacity, valid):
    """Rows as (expert, rank, token), and how many wanted each expert, one pair after the other."""
    n, k = ids.shape
    rows, wanted = [[] for _ in range(E)], [0] * E
    for rank in range(k):
        for t in range(n):
            if valid is None or valid[t]:
                e = ids[t, rank]
                wanted[e] += 1
                if capacity is None or len(rows[e]) < capacity:
                    rows[e].append((e, rank, t))
    return [row for expert in rows for row in expert], wanted, [len(expert) for expert in rows]


def chosen(random, n, E, k):
    return np.array([random.permutation(E)[:k] for _ in range(n)], dtype=np.int64).reshape(n, k)


@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 5), st.none() | st.integers(0, 4), st.booleans(), st.integers(0, 99))
def test_the_plan_is_what_one_finds_pair_by_pair(n, E, k, capacity, padded, seed):
    random = np.random.default_rng(seed)
    k = min(k, E)
    ids, valid = chosen(random, n, E, k), random.random(n) < 0.6 if padded else None
    rows, wanted, counts = by_hand(ids, E, capacity, valid)
    _, plan = plan_of(ids, E, capacity, valid)
    assert (list(plan.wanted), list(plan.counts)) == (wanted, counts) and all(type(c) is int for c in (*plan.wanted, *plan.counts))
    assert [(p // max(n, 1), t) for p, t in zip(plan.pairs.tolist(), plan.tokens.tolist())] == [(rank, t) for _, rank, t in rows]
    places = np.full((n, k), len(rows))
    for i, (_, rank, t) in enumerate(rows):
        places[t, rank] = i
    assert plan.places.shape == (n, k) and (plan.places == places).all()


def test_a_full_expert_drops_later_ranks_first_and_later_tokens_first():
    _, plan = plan_of(np.array([[0, 1], [1, 0], [0, 1], [1, 0]]), 2, capacity=3)
    assert list(zip(plan.pairs // 4, plan.tokens)) == [(0, 0), (0, 2), (1, 1), (0, 1), (0, 3), (1, 0)]
    assert (plan.places == 6).tolist() == [[False, False], [False, False], [False, True], [False, True]]
    assert plan.wanted == (4, 4) and plan.counts == (3, 3)


# --- each step, and its twin of smaller ones --------------------------------------------------------------------------

SETTINGS = {"plain": (6, 4, 2, None, None), "one expert": (5, 1, 1, None, None), "all experts": (4, 3, 3, None, None),
            "capacity": (9, 3, 2, 4, None), "padding": (7, 4, 2, None, np.arange(7) % 3 > 0),
            "both": (9, 3, 2, 2, np.arange(9) % 2 > 0), "nobody real": (3, 2, 1, None, np.zeros(3, bool)),
            "no token": (0, 3, 2, None, None)}
every_setting = pytest.mark.parametrize("n, E, k, capacity, valid", SETTINGS.values(), ids=SETTINGS)


@every_setting
def test_dispatch_combine_and_grouped_linear_equal_their_twins(n, E, k, capacity, valid):
    random = np.random.default_rng(0)
    plan, known = plan_of(chosen(random, n, E, k), E, capacity, valid)
    N, C, out = len(known.pairs), 3, 4
    x, rows, g = (random.standard_normal(size) for size in ((n, C), (N, C), (n, k)))
    w, b = random.standard_normal((E, out, C)), random.standard_normal((E, out))
    tokens = torch.tensor(known.tokens)
    assert_twins(lambda x: dispatch(x, plan), lambda x: x.index_select(0, tokens), x)

    def looked_up(rows, g):
        padded = torch.cat([rows, torch.zeros(1, C, dtype=rows.dtype)])
        return (padded[torch.tensor(known.places)] * g.unsqueeze(-1)).sum(1)
    assert_twins(lambda rows, g: combine(rows, g, plan), looked_up, rows, g)

    def one_by_one(rows, w, b):
        return torch.cat([F.linear(part, w[e], b[e]) for e, part in enumerate(rows.split(list(known.counts)))])
    assert_twins(lambda rows, w, b: grouped_linear(rows, w, b, known.counts), one_by_one, rows, w, b)
    for function, arrays in ((lambda x: dispatch(x, plan), [x]), (lambda rows, g: combine(rows, g, plan), [rows, g]),
                             (lambda rows, w, b: grouped_linear(rows, w, b, known.counts), [rows, w, b])):
        assert_leaves_memory_alone(function, *arrays)


@every_setting
def test_there_and_back_is_the_identity_for_who_has_a_row(n, E, k, capacity, valid):
    random = np.random.default_rng(1)
    plan, known = plan_of(chosen(random, n, E, k), E, capacity, valid)
    x = torch.tensor(random.standard_normal((n, 3)))
    back = combine(dispatch(x, plan), torch.ones(n, k, dtype=torch.float64), plan)
    rows = (known.places < len(known.pairs)).sum(axis=1)
    np.testing.assert_allclose(host(back), host(x) * rows[:, None], rtol=1e-15)


def test_what_has_no_row_adds_nothing_even_where_there_is_infinity():
    """0 · ∞ would be NaN."""
    plan, _ = plan_of(np.array([[0], [0]]), 1, capacity=1)
    rows = torch.tensor([[np.inf, np.nan]], requires_grad=True)
    y = combine(rows, torch.ones(2, 1), plan)
    assert y[0].tolist()[0] == np.inf and y[1].tolist() == [0, 0]
    y.sum().backward()
    assert rows.grad.tolist() == [[1, 1]]


def test_half_precision_is_summed_in_float32():
    """2048 + 1 is 2048 in float16: summed one by one there, nothing would be added. Forward, and backward to x."""
    plan, _ = plan_of(np.array([[0, 1, 2]]), 3)
    rows = torch.tensor([[2048.0], [1.0], [1.0]]).half()
    y = combine(rows, torch.ones(1, 3), plan)
    assert y.dtype == torch.float16 and y.item() == 2050
    x = torch.ones(1, 1).half().requires_grad_()
    (dispatch(x, plan) * rows).sum().backward()
    assert x.grad.dtype == torch.float16 and x.grad.item() == 2050


@pytest.mark.parametrize("counts", [(3, 0, 2), (0, 0, 5)])
def test_half_precision_is_multiplied_in_float32(counts):
    random = np.random.default_rng(0)
    x, w, b = (random.standard_normal(size).astype(np.float16) for size in ((5, 64), (3, 8, 64), (3, 8)))
    half = [torch.tensor(a, requires_grad=True) for a in (x, w, b)]
    single = [torch.tensor(a.astype(np.float32), requires_grad=True) for a in (x, w, b)]
    found, wanted = (grouped_linear(*tensors, counts) for tensors in (half, single))
    assert found.dtype == torch.float16
    np.testing.assert_allclose(host(found), host(wanted), rtol=2e-3, atol=2e-2)
    found.sum().backward()
    wanted.sum().backward()
    for a, b in zip(half, single):
        assert a.grad.dtype == torch.float16
        np.testing.assert_allclose(host(a.grad), host(b.grad), rtol=2e-3, atol=2e-2)


def test_only_what_is_wanted_is_computed():
    x, w, b = torch.randn(4, 3), torch.randn(2, 5, 3), torch.randn(2, 5)
    for i in range(3):
        tensors = [t.detach().requires_grad_(i == j) for j, t in enumerate((x, w, b))]
        grouped_linear(*tensors, (1, 3)).sum().backward()
        assert [t.grad is not None for t in tensors] == [i == j for j in range(3)]


def test_the_host_waits_once_for_a_plan():
    """For the sizes of the products."""
    ids, valid = placed(np.array([[0, 2], [1, 0], [2, 1]])), placed(np.array([True, True, False]))
    x, w = torch.randn(3, 4), torch.randn(3, 4, 4)
    if (counts := strict_counts()) is None:
        pytest.skip("nobody counts here")
    before = counts.syncs
    plan = plan_dispatch(ids, 3, 1, valid)
    assert counts.syncs == before + 1
    combine(grouped_linear(dispatch(x, plan), w, None, plan.counts), torch.ones(3, 2), plan)
    assert counts.syncs == before + 1


def test_flops_are_those_of_the_rows():
    class Layer(torch.nn.Module):
        def forward(self, x):
            return grouped_linear(x, torch.randn(2, 5, 3), None, (1, 3))
    assert count_flops(Layer(), torch.randn(4, 3)).total == 2 * 4 * 3 * 5


# --- errors -----------------------------------------------------------------------------------------------------------

def test_errors_name_shapes_and_what_was_expected():
    plan, _ = plan_of(np.array([[0], [1], [1]]), 2)
    x, w, b = torch.zeros(3, 4), torch.zeros(2, 5, 4), torch.zeros(2, 5)
    for call, words in [
            (lambda: dispatch(torch.zeros(1, 3, 4), plan), ["dispatch", "n = 3", "(1, 3, 4)", "reshape"]),
            (lambda: dispatch(torch.zeros(2, 4), plan), ["dispatch", "n = 3", "(2, 4)"]),
            (lambda: combine(torch.zeros(2, 4), torch.zeros(3, 1), plan), ["combine", "N = 3", "(2, 4)"]),
            (lambda: combine(x, torch.zeros(3), plan), ["combine", "(3, 1)", "(3,)"]),
            (lambda: grouped_linear(x, torch.zeros(5, 4), None, (3,)), ["grouped_linear", "(3, 4)", "(5, 4)", "[E, out, in]"]),
            (lambda: grouped_linear(torch.zeros(3, 7), w, None, (1, 2)), ["grouped_linear", "(3, 7)", "(2, 5, 4)"]),
            (lambda: grouped_linear(x, w, torch.zeros(5), (1, 2)), ["bias (5,)", "(2, 5)"]),
            (lambda: grouped_linear(x, w, b, (1, 1)), ["3 rows", "2 experts", "[1, 1]"]),
            (lambda: grouped_linear(x, w, b, (3,)), ["3 rows", "2 experts", "[3]"]),
            (lambda: grouped_linear(x, w, b, (4, -1)), ["[4, -1]"]),
            (lambda: grouped_linear(x.double(), w, b, (1, 2)), ["float64", "float32", "one dtype"])]:
        with pytest.raises(RuntimeError) as caught:
            call()
        assert [word for word in words if word not in str(caught.value)] == []
