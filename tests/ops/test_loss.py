import itertools
import math
import warnings

import numpy as np
import pytest
from device import host
from record_ops_fused import assert_close, names, ours, recorded, replay
from twins import assert_leaves_memory_alone, assert_twins

from tinygrad_tf import float16, int32, nan, ones, randn, tensor, uint8, zeros
from tinygrad_tf.ops.embedding import one_hot
from tinygrad_tf.ops.loss import binary_cross_entropy_with_logits, cross_entropy, mse_loss, nll_loss
from tinygrad_tf.ops.softmax import log_softmax

pytestmark = pytest.mark.filterwarnings("error")
RANDOM = np.random.default_rng(0)
REDUCTIONS = ("mean", "sum", "none")


@pytest.mark.parametrize("name", names("loss"))
def test_pytorchs_numbers(name):
    assert_close(ours(name), recorded(name), name)


@pytest.mark.torch
@pytest.mark.parametrize("name", names("loss"))
def test_live(name):
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")         # PyTorch warns of its old flags
        wanted = replay(name, torch, torch.nn.functional)
    assert_close(ours(name), wanted, name)


# --- fused = composed, over the product of the options ----------------------------------------------------------------

def composed(x, target, weight, ignore_index, reduction, smoothing):
    """Cross entropy from log_softmax and one-hot rows, by the formula: the classes are moved to the last axis."""
    classes = x.shape[1] if x.ndim > 1 else x.shape[0]
    x, target = (x.movedim(1, -1) if x.ndim > 1 else x).reshape(-1, classes), target.reshape(-1)
    counted = target != ignore_index
    chosen = one_hot(target.masked_fill(~counted, 0), classes).double()
    w = ones(classes).double() if weight is None else tensor(weight)
    w_t = (chosen * w).sum(-1) * counted
    log_p = log_softmax(x, -1)
    loss = -(1 - smoothing) * w_t * (chosen * log_p).sum(-1) - smoothing / classes * (w * log_p).sum(-1) * counted
    return loss if reduction == "none" else loss.sum() / (w_t.sum() if reduction == "mean" else 1)


SHAPES = [((6, 5), (6,)), ((2, 5, 3), (2, 3)), ((2, 5, 2, 2), (2, 2, 2)), ((5,), ())]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("reduction, smoothing, weighted, ignore_index",
                         list(itertools.product(REDUCTIONS, (0.0, 0.3, 1.0), (False, True), (-100, 2))))
def test_fused_equals_composed(shapes, reduction, smoothing, weighted, ignore_index):
    x, target = RANDOM.normal(size=shapes[0]), RANDOM.integers(0, 5, shapes[1])
    if shapes[1] == ():
        target = np.array(1)                    # a single ignored row has no mean
    elif ignore_index < 0:
        target[..., 0] = ignore_index
    weight = np.array([0.5, 2, 1, 0.1, 1.5]) if weighted else None
    assert_twins(lambda x, t: cross_entropy(x, t, None if weight is None else tensor(weight), ignore_index=ignore_index,
                                            reduction=reduction, label_smoothing=smoothing),
                 lambda x, t: composed(x, t, weight, ignore_index, reduction, smoothing).reshape(shapes[1] if reduction == "none" else ()),
                 x, target)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_is_nll_of_log_softmax(shapes, reduction):
    x, target = RANDOM.normal(size=shapes[0]), RANDOM.integers(0, 5, shapes[1])
    dim = 1 if len(shapes[0]) > 1 else 0
    assert_twins(lambda x, t: cross_entropy(x, t, reduction=reduction), lambda x, t: nll_loss(log_softmax(x, dim), t, reduction=reduction),
                 x, target)


@pytest.mark.parametrize("reduction, smoothing, weighted", list(itertools.product(REDUCTIONS, (0.0, 0.1), (False, True))))
def test_classes_equal_one_hot_probabilities(reduction, smoothing, weighted):
    x, target = RANDOM.normal(size=(6, 5)), RANDOM.integers(0, 5, 6)
    weight = tensor([0.5, 2, 1, 0.1, 1.5]).double() if weighted and reduction != "mean" else None     # the mean is over rows there
    options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
    assert_twins(lambda x, t: cross_entropy(x, t, **options), lambda x, t: cross_entropy(x, one_hot(t, 5).double(), **options), x, target)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_memory(reduction):
    target = np.array([2, 0, -100, 4])
    for loss in (cross_entropy, nll_loss):
        assert_leaves_memory_alone(lambda x, t, f=loss: f(x, t, reduction=reduction), RANDOM.normal(size=(4, 5)), target)
        assert_leaves_memory_alone(lambda x, t, f=loss: f(x, t, reduction=reduction), RANDOM.normal(size=(5, 4)).T, target)


# --- what counts ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("loss", [cross_entropy, nll_loss])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_ignored_row_changes_nothing_whatever_it_holds(loss, smoothing):
    options = {"label_smoothing": smoothing} if loss is cross_entropy else {}
    for reduction in ("mean", "sum"):
        for junk in (0.0, nan, math.inf, -math.inf):
            rows = RANDOM.normal(size=(3, 4))
            alone, beside = tensor(rows, requires_grad=True), tensor(np.vstack([rows, np.full(4, junk)]), requires_grad=True)
            wanted = loss(alone, tensor([1, 2, 0]), reduction=reduction, **options)
            found = loss(beside, tensor([1, 2, 0, -100]), reduction=reduction, **options)
            assert found.item() == pytest.approx(wanted.item(), rel=1e-12)
            wanted.backward(), found.backward()
            np.testing.assert_allclose(host(beside.grad), np.vstack([host(alone.grad), np.zeros(4)]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("loss", [cross_entropy, nll_loss])
def test_nothing_counts(loss):
    for target in (tensor([-100, -100]), zeros(0).long()):
        x = randn(len(target), 3, requires_grad=True)
        for reduction, wanted in (("mean", nan), ("sum", 0.0)):
            x.grad = None
            y = loss(x, target, reduction=reduction)
            y.backward()
            np.testing.assert_array_equal(y.item(), wanted)
            np.testing.assert_array_equal(host(x.grad), np.zeros(x.shape))
        assert loss(x, target, reduction="none").tolist() == [0.0] * len(target)


def test_uniform_scores_cost_log_of_classes():
    assert cross_entropy(zeros(4, 100), tensor([0, 3, 99, 7])).item() == pytest.approx(math.log(100))


def test_scores_may_be_large_or_infinite():
    x = tensor([[1e4, 0.0], [-math.inf, 0.0]], requires_grad=True)
    y = cross_entropy(x, tensor([1, 1]), reduction="none")
    assert y.tolist() == [1e4, 0.0]
    y.sum().backward()
    assert x.grad.tolist() == [[1, -1], [0, 0]]
    assert cross_entropy(x, tensor([0, 0]), reduction="none").tolist() == [0.0, math.inf]


def test_a_large_vocabulary_in_float32():
    x, target = RANDOM.normal(size=(4, 50_257)), RANDOM.integers(0, 50_257, 4)
    exact = cross_entropy(tensor(x), tensor(target)).item()
    assert cross_entropy(tensor(x.astype(np.float32)), tensor(target)).item() == pytest.approx(exact, rel=1e-6)


def test_dtypes():
    x = randn(2, 3)
    assert cross_entropy(x.to(float16), tensor([0, 1])).dtype == float16 and cross_entropy(x.double(), tensor([0, 1])).item() > 0
    for dtype in (int32, uint8):
        assert cross_entropy(x, tensor([0, 1]).to(dtype)).item() == cross_entropy(x, tensor([0, 1])).item()


# --- wrong calls ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("bad", [-1, 3, -99, 10**12])
def test_targets_never_wrap(bad):
    for call in (cross_entropy, nll_loss, lambda x, t: cross_entropy(x, t, label_smoothing=0.1),
                 lambda x, t: cross_entropy(x, t, reduction="none", weight=ones(3))):
        with pytest.raises(IndexError, match=rf"target {bad} of row 1 is out of bounds: classes are 0 to 2.*ignore_index = -100"):
            call(randn(2, 3), tensor([0, bad]))


@pytest.mark.parametrize("error, text, call", [
    (ValueError, r"batch_size \(2\).*batch_size \(3\)", lambda: cross_entropy(randn(2, 3), tensor([0, 1, 2]))),
    (ValueError, r"batch_size \(2\).*batch_size \(6\).*reshape", lambda: cross_entropy(randn(2, 3, 4), zeros(6).long())),
    (RuntimeError, r"\(2, 4\).*\(2, 5\)", lambda: cross_entropy(randn(2, 3, 4), zeros(2, 5).long())),
    (RuntimeError, r"float32.*long\(\)", lambda: cross_entropy(randn(2, 3), tensor([0.0, 1.0]))),
    (RuntimeError, "bool", lambda: cross_entropy(randn(2, 3), tensor([True, False]))),
    (RuntimeError, r"\(2,\).*\(2, 3\)", lambda: cross_entropy(randn(2, 3), zeros(2, 3).long())),
    (RuntimeError, "int64", lambda: cross_entropy(tensor([[1, 2]]), tensor([0]))),
    (RuntimeError, r"shape \(\)", lambda: cross_entropy(tensor(1.0), tensor(0))),
    (RuntimeError, r"each class, got shape \(2,\)", lambda: cross_entropy(randn(2, 3), tensor([0, 1]), weight=ones(2))),
    (RuntimeError, "detach", lambda: cross_entropy(randn(2, 3), tensor([0, 1]), weight=ones(3).requires_grad_())),
    (RuntimeError, "label_smoothing.*1.5", lambda: cross_entropy(randn(2, 3), tensor([0, 1]), label_smoothing=1.5)),
    (RuntimeError, "ignore_index 1", lambda: cross_entropy(randn(2, 3), randn(2, 3), ignore_index=1)),
    (ValueError, "'foo'.*'mean'", lambda: cross_entropy(randn(2, 3), tensor([0, 1]), reduction="foo")),
    (ValueError, "'foo'", lambda: nll_loss(randn(2, 3), tensor([0, 1]), reduction="foo")),
    (ValueError, "'foo'", lambda: mse_loss(randn(2), randn(2), reduction="foo")),
    (ValueError, r"\(3,\).*\(2, 3\)", lambda: binary_cross_entropy_with_logits(randn(2, 3), randn(3)))])
def test_wrong_calls(error, text, call):
    with pytest.raises(error, match=text):
        call()


# --- the composed losses ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_binary_cross_entropy_equals_its_formula(reduction):
    x, y = RANDOM.normal(size=(3, 4)), RANDOM.uniform(size=(3, 4))
    assert_twins(lambda x: binary_cross_entropy_with_logits(x, tensor(y), pos_weight=tensor(2.5).double(), reduction="none").sum(),
                 lambda x: -(2.5 * tensor(y) * x.sigmoid().log() + (1 - tensor(y)) * (1 - x.sigmoid()).log()).sum(), x)


def test_binary_cross_entropy_at_zero_and_far_out():
    x = tensor([0.0, 1e4, -1e4], requires_grad=True)
    loss = binary_cross_entropy_with_logits(x, tensor([1.0, 0.0, 1.0]), reduction="sum")
    loss.backward()
    assert loss.item() == pytest.approx(2e4 + math.log(2)) and x.grad.tolist() == [-0.5, 1.0, -1.0]


def test_mse_warns_where_it_broadcasts():
    with pytest.warns(UserWarning, match=r"\(2, 3\).*\(3,\)"):
        assert mse_loss(ones(2, 3), zeros(3)).item() == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mse_loss(ones(2, 3), zeros(2, 3), reduction="sum").item() == 6


@pytest.mark.parametrize("loss", [cross_entropy, nll_loss])
@pytest.mark.parametrize("weight", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignore_index", [-100, 0, 2])
def test_the_weight_of_no_counted_class_does_not_matter(loss, weight, reduction, ignore_index):
    """An ignored row takes no weight: 0 · ∞ is NaN. (With label smoothing every weight counts, so that it does matter.)"""
    results = []
    for w in (weight, 7.0):
        x = tensor(np.arange(6, dtype=np.float32).reshape(2, 3) / 3, requires_grad=True)
        y = loss(x, tensor([ignore_index, 1]), weight=tensor([w, 1.0, w]), reduction=reduction, ignore_index=ignore_index)
        y.sum().backward()
        results.append((y.tolist(), x.grad.tolist()))
    assert results[0] == results[1] and np.isfinite(results[0][1]).all()
