"""The experiments of examples/10_experiments.py as tests: each finding, and that its measurement can tell right from wrong."""
import importlib.util
import math
from pathlib import Path

import pytest

import tinygrad_tf as torch
import tinygrad_tf.nn as nn

PATH = Path(__file__).resolve().parent.parent / "examples" / "10_experiments.py"
spec = importlib.util.spec_from_file_location("experiments", PATH)
experiments = importlib.util.module_from_spec(spec)
spec.loader.exec_module(experiments)


@pytest.mark.parametrize("experiment", ["layers_needed", "variance", "saturation", "exercises", "hand_check"])
def test_the_finding_holds(experiment, capsys):
    getattr(experiments, experiment)()
    assert len(capsys.readouterr().out.splitlines()) > 4


def test_norms_by_depth_hold_for_another_seed_too():
    assert list(experiments.norms_by_depth(depths=(1, 6, 24), seeds=1)) == [1, 6, 24]
    post, pre = experiments.gradient_norms(24, False, seed=7), experiments.gradient_norms(24, True, seed=7)
    assert len(post) == len(pre) == 24
    assert pre[-1] < 0.5 * post[-1]


@pytest.mark.parametrize("T, W", [(2, 2), (5, 2), (6, 3), (7, 3), (10, 4), (11, 11), (11, 12)])
def test_layers_needed_for_every_kind_of_rest(T, W):
    assert experiments.layers_by_paths(T, W) == experiments.layers_by_gradient(T, W) == math.ceil((T - 1) / (W - 1))


def test_without_scaling_a_wide_head_is_one_hot_and_learns_slowly():
    (entropy, largest, slope), scaled = experiments.entropy_of_weights(1024, 1.0), experiments.entropy_of_weights(1024, 1 / 32)
    assert entropy < 0.05 * scaled[0] and largest > 0.9 and slope < 0.1 * scaled[2]
    even = experiments.entropy_of_weights(16, 0.0)
    assert math.isclose(even[0], math.log(64), rel_tol=1e-5) and math.isclose(even[1], 1 / 64, rel_tol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_key_bias_gets_no_gradient_whatever_the_loss(causal):
    """softmax(z + c) = softmax(z): b_K adds q · b_K to a whole row. In float64 what is left is rounding."""
    torch.manual_seed(0)
    layer = nn.MultiHeadAttention(12, num_heads=3).double()
    weights = torch.randn(2, 5, 12, dtype=torch.float64)
    (layer(torch.randn(2, 5, 12, dtype=torch.float64), causal=causal) * weights).sum().backward()
    grads = {name: p.grad.abs().max().item() for name, p in layer.named_parameters()}
    assert grads.pop("k_proj.bias") < 1e-13
    assert min(grads.values()) > 1e-3


def test_paper_and_library_would_disagree_on_a_wrong_mask():
    Q = K = [[1.0], [2.0], [3.0]]
    causal = [[j <= i for j in range(3)] for i in range(3)]
    transposed = [list(column) for column in zip(*causal)]
    right, wrong = experiments.on_paper(Q, K, causal), experiments.on_paper(Q, K, transposed)
    assert all(math.isclose(sum(row), 1) for row in right + wrong)
    assert right[0] == [1, 0, 0] and wrong[2] == [0, 0, 1]
