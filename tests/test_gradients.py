"""Every operation's gradient against central differences, and the proof that this check catches wrong ones.

The cases stand in gradcases.py, the wrong backwards in mutants.py; `python tests/gradient_report.py` prints the figures.
"""
from pathlib import Path

import gradcases
import mutants
import numpy as np
import pytest
from device import host, placed, xp

import tinygrad_tf as tt
from tinygrad_tf.autograd import Function, backward, constant
from tinygrad_tf.backend import array_module, is_writable
from tinygrad_tf.gradcheck import gradcheck, gradcheck_module, gradient_error
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.ops.flash_attention import Band
from tinygrad_tf.tensor import Tensor

OPS = gradcases.differentiable_ops()
every_case = pytest.mark.parametrize("case", gradcases.CASES, ids=lambda c: c.name)
every_op = pytest.mark.parametrize("op", OPS)


# --- the table is complete ------------------------------------------------------------------------------------------

@every_op
def test_the_op_has_cases_with_one_element_with_none_and_with_several(op):
    sizes = {x.array.size for c in gradcases.cases_of(op) for x in c.inputs() if isinstance(x, Tensor) and x.requires_grad}
    assert {0, 1} <= sizes and max(sizes) > 1, f"{op} needs cases in gradcases.py: sizes so far {sorted(sizes)}"


def test_no_case_is_of_an_unknown_op_and_no_op_hides_behind_the_name_of_another():
    assert {c.op for c in gradcases.CASES} <= set(OPS)

    def subclasses(cls):
        return [cls, *(s for sub in cls.__subclasses__() for s in subclasses(sub))]
    ours = [c for c in subclasses(Function) if c.__module__.startswith("tinygrad_tf.") and c.backward is not Function.backward]
    assert sorted(c.__name__ for c in ours) == sorted({*OPS, *gradcases.ELSEWHERE})


@pytest.mark.parametrize("op", gradcases.ELSEWHERE)
def test_an_op_that_is_tested_elsewhere_refuses_float64_and_meets_the_generic_mutants_there(op):
    x = tt.zeros(1, 1, 2, 16, dtype=tt.float64)
    with pytest.raises(TypeError, match="float64"):
        Function.registry[op].apply(x, x, x, None, Band(), 1.0)
    text = (Path(__file__).parent / gradcases.ELSEWHERE[op]).read_text(encoding="utf-8")
    assert f"{op}.apply(" in text and f"mutants.replaced({op}, mutants.GENERIC" in text


@every_case
def test_the_case_runs_its_op(case):
    seen = []

    def watching(node, dy, original):
        seen.append(type(node).__name__)
        return original(dy)
    with mutants.replaced(OPS[case.op], watching):
        mutants.delivered(case)
    assert case.op in seen


# --- the gradients are right ----------------------------------------------------------------------------------------

@every_case
def test_gradient(case):
    assert gradcheck(case.function, case.inputs())
    assert gradient_error(case.function, case.inputs()) <= 1e-6


def gradients(case, inputs):
    """(output, gradients of the inputs that require one), for a random upstream gradient."""
    y = case.function(*inputs)
    upstream = np.random.default_rng(1).standard_normal(y.array.shape)
    backward(y, constant(placed(upstream, y)))
    return y, [host(x.grad) for x in inputs if isinstance(x, Tensor) and x.requires_grad]


def strided(x):
    """The same values in memory with gaps and another order of axes."""
    if x.ndim == 0:
        return x
    wide = np.full(tuple(2 * n for n in x.array.shape[::-1]), np.nan if x.array.dtype.kind == "f" else 0).astype(x.array.dtype)
    view = placed(wide)[(slice(None, None, 2),) * x.ndim].T
    view[...] = x.array
    return Tensor._wrap(view, None, tt.autograd.Version()).requires_grad_(x.requires_grad)


@every_case
def test_the_layout_of_memory_changes_nothing(case):
    y, want = gradients(case, case.inputs())
    z, got = gradients(case, [strided(x) for x in case.inputs()])
    assert np.allclose(host(y), host(z), rtol=1e-12, atol=1e-12)
    assert all(np.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(want, got))


@every_case
def test_one_input_alone_gets_the_gradient_it_gets_among_others(case):
    _, want = gradients(case, case.inputs())
    wanting = [i for i, x in enumerate(case.inputs()) if x.requires_grad]
    for i, g in zip(wanting, want):
        inputs = [x if j == i else x.detach() for j, x in enumerate(case.inputs())]
        _, (got,) = gradients(case, inputs)
        assert np.allclose(got, g, rtol=1e-12, atol=1e-12)


@every_case
def test_gradients_own_their_memory(case):
    inputs = case.inputs()
    y = case.function(*inputs)
    upstream = constant(placed(np.ones(y.array.shape), y))
    y.backward(upstream)
    grads = [x.grad.array for x in inputs if x.requires_grad]
    others = [upstream.array, y.array, *(x.array for x in inputs)]
    for i, g in enumerate(grads):
        assert type(g) is type(inputs[0].array) and is_writable(g)
        assert not any(array_module(g).shares_memory(g, other) for other in grads[i + 1:] + others if type(other) is type(g))


@every_case
def test_a_write_between_forward_and_backward_raises_or_changes_nothing(case):
    _, want = gradients(case, case.inputs())
    for i in range(len(case.inputs()) + 1):     # each input, and the result
        inputs = case.inputs()
        y = case.function(*inputs)
        written = y if i == len(inputs) else inputs[i]
        with tt.no_grad():
            if is_writable(written.array):
                written.zero_()
        try:
            backward(y, constant(placed(np.random.default_rng(1).standard_normal(y.array.shape), y)))
        except RuntimeError as error:
            assert "inplace operation" in str(error)
        else:
            got = [host(x.grad) for x in inputs if x.requires_grad]
            assert all(np.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(want, got))


def nodes_below(node):
    """The nodes of a graph."""
    found, todo = {}, [node]
    while todo:
        node = todo.pop()
        if isinstance(node, Function) and id(node) not in found:
            found[id(node)] = node
            todo += node.inputs
    return list(found.values())


@every_case
def test_arrays_that_backward_needs_are_freed_after_it(case):
    y = case.function(*case.inputs())
    for node in nodes_below(y.node):
        kept = [name for name, value in vars(node).items() if isinstance(value, xp().ndarray) and value.dtype.kind == "f"]
        assert not kept, f"{node.name} keeps arrays in attributes: {kept}; put them into self.saved"
        assert node.saved is None or not isinstance(node.saved, (list, dict)), f"{node.name}: saved must be an array or a tuple"


# --- the check is proved --------------------------------------------------------------------------------------------

proof = pytest.mark.host("mutants of backward are NumPy formulas; what they prove is the checker")


@proof
@every_op
def test_generic_mutants_are_caught(op):
    verdicts = [v for v in mutants.generic_verdicts(op) if v.applies]
    assert not [v.name for v in verdicts if not v.caught]
    slopeless = all(not np.any(g) for c in gradcases.cases_of(op) for g in mutants.delivered(c))
    assert slopeless or {"zero", "× 1.01", "sign flipped", "reversed", "another shape",
        "a gradient forgotten"} <= {v.name for v in verdicts}


@proof
@pytest.mark.parametrize("op", mutants.HAND_MADE)
def test_hand_made_mutants_are_caught(op):
    assert not [v.name for v in mutants.hand_made_verdicts(op) if not v.caught]


@proof
@pytest.mark.parametrize("op", mutants.HAND_MADE)
def test_a_hand_made_formula_with_nothing_dropped_passes(op):
    with mutants.replaced(OPS[op], mutants.dropping(op, None)):
        assert all(gradcheck(c.function, c.inputs()) for c in gradcases.cases_of(op))


def test_every_fused_operation_has_hand_made_mutants():
    fused = [name for name, cls in OPS.items() if cls.__module__.rpartition(".")[2] in (
        "activation", "softmax", "norm", "embedding", "loss", "attention", "flash_attention", "dropout", "rotary", "quantize")]
    assert set(fused) <= set(mutants.HAND_MADE)


# --- layers ---------------------------------------------------------------------------------------------------------

def normal(*size):
    return tt.randn(*size, dtype=tt.float64, requires_grad=True)


IDS = tt.tensor([[0, 3, 3], [1, 2, 0]])
LAYERS = {                                      # name → (layer, inputs)
    "Linear": lambda nn: (nn.Linear(3, 2), normal(2, 3)),
    "Linear without bias": lambda nn: (nn.Linear(3, 2, bias=False), normal(2, 2, 3)),
    "Embedding": lambda nn: (nn.Embedding(4, 3), IDS),
    "LayerNorm": lambda nn: (nn.LayerNorm(4), normal(2, 3, 4)),
    "RMSNorm": lambda nn: (nn.RMSNorm(4), normal(2, 3, 4)),
    "activations": lambda nn: (nn.Sequential(nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Tanh(), nn.Sigmoid(), nn.Softmax(dim=-1)),
    normal(2, 3)),
    "losses": lambda nn: (nn.CrossEntropyLoss(label_smoothing=0.1), normal(2, 3), tt.tensor([0, 2])),
    "FeedForward": lambda nn: (nn.FeedForward(3, 5, dropout=0.0), normal(2, 2, 3)),
    "attention": lambda nn: (nn.MultiHeadAttention(4, 2), normal(2, 3, 4)),
    "causal attention": lambda nn: (nn.MultiHeadAttention(4, 2), normal(2, 3, 4), None, True),
    "cross-attention": lambda nn: (nn.MultiHeadAttention(4, 2), normal(2, 3, 4), normal(2, 2, 4)),
    "grouped attention": lambda nn: (nn.MultiHeadAttention(4, 2, num_kv_heads=1), normal(2, 3, 4)),
    "PyTorch's attention": lambda nn: (nn.MultiheadAttention(4, 2, batch_first=True), normal(1, 3, 4), normal(1, 2, 4), normal(1, 2, 4)),
    "post-norm block": lambda nn: (nn.TransformerBlock(4, 2, 6, dropout=0.0), normal(1, 3, 4), True),
    "pre-norm block": lambda nn: (nn.TransformerBlock(4, 2, 6, dropout=0.0, norm_first=True), normal(1, 3, 4), True),
    "MiniGPT": lambda nn: (MiniGPT(4, 3, 4, 2, 6, 1, dropout=0.0), IDS, IDS.roll(1, 1)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_right_gradients(name):
    layer, *inputs = LAYERS[name](tt.nn)
    assert gradcheck_module(layer.double(), *inputs)
