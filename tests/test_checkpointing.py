"""Gradient checkpointing changes memory and time and nothing else: numbers, bit for bit, hooks, errors; and what it refuses.

(Checkpoints of training runs, files, are in test_checkpoint.py.)
"""
import functools
import gc
import itertools
import threading
import tracemalloc
import weakref

import numpy as np
import pytest
import runs
from device import host
from hypothesis import given
from hypothesis import strategies as st

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.amp import autocast
from tinygrad_tf.autograd import observing
from tinygrad_tf.models import Decoder, MiniGPT
from tinygrad_tf.nn import functional as F
from tinygrad_tf.trace import saved_bytes, trace
from tinygrad_tf.utils.checkpoint import checkpoint, checkpoint_sequential, recomputing

host_only = pytest.mark.host("on a GPU the host does not wait for numbers, so that none are compared")


def counted(function):
    """The function, which counts its calls in `.calls`."""
    @functools.wraps(function)
    def run(*args, **kwargs):
        run.calls += 1
        return function(*args, **kwargs)
    run.calls = 0
    return run


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def same_bits(a, b):
    a, b = host(a), host(b)
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


# --- the same numbers -------------------------------------------------------------------------------------------------

MODELS = {
    "pre-norm": lambda dropout: MiniGPT(11, 8, 12, 3, 24, 3, dropout, norm_first=True),
    "post-norm": lambda dropout: MiniGPT(11, 8, 12, 3, 24, 3, dropout),
    "modern": lambda dropout: Decoder(11, 8, 12, 3, 24, 3, dropout, num_kv_heads=1),
    "experts": lambda dropout: MiniGPT(11, 8, 12, 3, 24, 3, dropout, ffn=lambda: nn.MoE(12, 8, num_experts=3, dropout=dropout)),
}


def train(make, dropout, checkpoint_blocks):
    """Losses and gradients, weights and the state of the generator after three steps."""
    torch.manual_seed(3)
    model = make(dropout)
    model.checkpoint_blocks = checkpoint_blocks
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for _ in range(3):
        ids = torch.randint(0, 11, (2, 9))
        optimizer.zero_grad()
        _, loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        found += [loss, *(p.grad for p in model.parameters())]
        optimizer.step()
    return [host(t).copy() for t in [*found, *model.parameters()]] + [host(torch.get_rng_state())]


@pytest.mark.parametrize("dropout", (0.0, 0.3))
@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_to_the_same_bits(model, dropout):
    plain, checkpointed = (train(MODELS[model], dropout, flag) for flag in (False, True))
    assert len(plain) == len(checkpointed) > 60 and all(map(same_bits, plain, checkpointed))


def test_padding_reaches_the_blocks():
    valid_tokens = torch.tensor([[True] * 8, [True] * 5 + [False] * 3])
    ids = torch.randint(0, 11, (2, 8))
    targets = ids.masked_fill(~valid_tokens, -100)
    found = []
    for flag in (False, True):
        torch.manual_seed(1)
        model = MODELS["pre-norm"](0.2)
        model.checkpoint_blocks = flag
        model(ids, targets, valid_tokens)[1].backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(same_bits, *found))


@pytest.mark.parametrize("settings", ({}, {"experts": 3, "balance": "bias"}, {"precision": "float16"}), ids=str)
def test_the_trainer_computes_the_same(tmp_path, settings):
    kept, recomputed = (runs.trainer(tmp_path, out=how, steps=3, layers=2, dropout=0.2, activations=how, **settings)
                        for how in ("kept", "recomputed"))
    assert [kept.train_step() for _ in range(3)] == [recomputed.train_step() for _ in range(3)]
    assert recomputed.model.checkpoint_blocks and not kept.model.checkpoint_blocks


# A chain of six functions of x [4, 6] and two weights, some of which draw random numbers, cut into checkpoints in any way, nested too.
CHAIN = (lambda x, w: x @ w, lambda x, w: F.dropout(F.gelu(x), 0.4), lambda x, w: F.layer_norm(x, (6,)) + x,
         lambda x, w: F.softmax(x @ w.T, -1) * w.sum(), lambda x, w: x + 0.1 * torch.randn(4, 6),
         lambda x, w: F.dropout(x, 0.2) / (1 + x * x))
cuts = st.recursive(st.just(1), lambda part: st.lists(part, min_size=1, max_size=4), max_leaves=6)


def run_cut(cut, steps, x, w):
    """The next functions of the chain, one for each 1; a list is one checkpoint."""
    if cut == 1:
        return next(steps)(x, w)
    for part in cut:
        x = run_cut(part, steps, x, w)
    return x


def run_checkpointed(cut, first, x, w):
    if cut == 1:
        return CHAIN[first % 6](x, w)

    def parts(x, w):
        at = first
        for part in cut:
            x, at = run_checkpointed(part, at, x, w), at + leaves(part)
        return x
    return checkpoint(parts, x, w)


def leaves(cut):
    return 1 if cut == 1 else sum(map(leaves, cut))


@given(cuts)
def test_any_nest_of_checkpoints_gives_the_same_bits(cut):
    torch.manual_seed(5)
    x, w, dy = leaf(4, 6), leaf(6, 6), torch.randn(4, 6)
    found = []
    for run in (lambda: run_cut(cut, itertools.cycle(CHAIN), x, w), lambda: run_checkpointed(cut, 0, x, w)):
        torch.manual_seed(6)
        x.grad = w.grad = None
        y = run()
        y.backward(dy)
        found.append([y, x.grad, w.grad, torch.get_rng_state()])
    assert all(map(same_bits, *found))


def test_gradcheck():
    w = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.gradcheck(lambda x, w: checkpoint(lambda x: F.softmax(x @ w, -1).square(), x), (x, w))


@pytest.mark.torch
def test_as_pytorch():
    """The same script in both: an MLP with dropout, its first half a checkpoint, two steps of accumulation."""
    pytorch = pytest.importorskip("torch")
    import torch.utils.checkpoint as theirs

    def gradients(torch, checkpoint):
        torch.manual_seed(0)
        first, second = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)
        half = torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Dropout(0.3))
        for _ in range(2):
            x = torch.randn(4, 5).requires_grad_()
            second(checkpoint(half, x, use_reentrant=False)).square().sum().backward()
        return [x.grad, *(p.grad for p in (first.weight, first.bias, second.weight, second.bias))]
    torch.set_default_device("cpu")             # whose dropout is PyTorch's
    for ours, others in zip(gradients(torch, checkpoint), gradients(pytorch, theirs.checkpoint), strict=True):
        np.testing.assert_allclose(host(ours), others.numpy(), rtol=2e-5, atol=1e-6)


# --- the graph is the first run's -----------------------------------------------------------------------------------------

def test_backward_runs_the_function_once_more_and_inference_does_not():
    f = counted(lambda x: x.exp().sin().exp())
    x = leaf(3)
    y = checkpoint(f, x)
    assert f.calls == 1
    y.sum().backward()
    assert f.calls == 2
    with torch.no_grad():
        assert not checkpoint(f, x).requires_grad
    assert f.calls == 3


def test_without_a_gradient_to_compute_nothing_is_kept():
    x = torch.randn(3)
    y = checkpoint(lambda x: x.exp(), x)
    assert not y.requires_grad and y.node is None


def test_parameters_that_the_function_finds_by_itself_get_their_gradient_once():
    w, seen = leaf(3, 3), []
    w.register_hook(lambda g: seen.append(g))
    x = torch.randn(2, 3)
    y = checkpoint(lambda x: (x @ w).tanh() @ w, x) + checkpoint(lambda x: x @ w, x)
    y.sum().backward()
    found, w.grad = w.grad, None
    ((x @ w).tanh() @ w + x @ w).sum().backward()
    assert same_bits(found, w.grad) and len(seen) == 2 and same_bits(*seen)


def test_gradients_add_up_over_several_passes():
    w, found = leaf(3), []
    for run in (lambda f, x: f(x), checkpoint):
        w.grad = None
        first, second = (run(lambda x: (x * w).exp(), torch.full((3,), n)).sum() for n in (1.0, 2.0))
        first.backward()
        second.backward()
        found.append(w.grad)
    assert same_bits(*found)


def test_arguments_of_any_kind_and_results_in_a_nest():
    class Options:
        power = 2

    def f(x, pair, flag, *, scale, options, text="mean"):
        (a, b), y = pair, x * scale             # the power and the flag are no tensors
        return {"y": getattr(y ** options.power, text)(), "ab": (a * b, [a + b]), "flag": flag, "none": None}

    def total(run):
        x, a, b = leaf(3), leaf(3), leaf(3)
        out = run(x, (a, b), True, scale=3.0, options=Options())
        assert out["flag"] is True and out["none"] is None
        (out["y"] + out["ab"][0].sum() + out["ab"][1][0].exp().sum()).backward()
        return [x.grad, a.grad, b.grad]
    torch.manual_seed(2)
    plain = total(f)
    torch.manual_seed(2)
    assert all(map(same_bits, plain, total(lambda *args, **kwargs: checkpoint(f, *args, **kwargs))))


def test_of_two_results_one_may_be_used_or_both_one_after_the_other():
    f, x = counted(lambda x: (x.exp(), x.sin())), leaf(4)
    a, b = checkpoint(f, x)
    a.sum().backward()
    assert same_bits(x.grad, x.detach().exp()) and f.calls == 2
    b.sum().backward()
    assert f.calls == 2
    np.testing.assert_array_equal(host(x.grad), host(x.detach().exp() + x.detach().cos()))


def test_hooks_and_kept_gradients_inside_see_one_gradient():
    seen, inner = [], []

    def f(x):
        h = x.exp()
        h.register_hook(lambda g: seen.append(g))
        if not inner:
            h.retain_grad()
            inner.append(h)
        return h * h
    x = leaf(3)
    y = checkpoint(f, x)
    y.sum().backward()
    assert len(seen) == 1 and same_bits(seen[0], inner[0].grad)
    np.testing.assert_allclose(host(seen[0]), 2 * np.exp(host(x)), rtol=1e-6)


def test_a_second_backward_needs_retain_graph():
    f, x = counted(lambda x: x.exp().square()), leaf(3)
    y = checkpoint(f, x).sum()
    y.backward(retain_graph=True)
    once = host(x.grad).copy()
    y.backward()
    assert f.calls == 2 and same_bits(host(x.grad), 2 * once)
    with pytest.raises(RuntimeError, match="a second time.*retain_graph=True"):
        y.backward()


def test_nested_checkpoints_run_the_inner_function_twice_more():
    inner = counted(lambda x: x.exp().sin())
    outer = counted(lambda x: checkpoint(inner, checkpoint(inner, x)))
    x = leaf(3)
    checkpoint(outer, x).sum().backward()
    assert (outer.calls, inner.calls) == (2, 2 + 2 + 2)         # forward; again, each forgetting; each again
    found, x.grad = x.grad, None
    x.exp().sin().exp().sin().sum().backward()
    assert same_bits(found, x.grad)


def test_modules_functions_methods_and_partials():
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    for f in (layer, layer.forward, functools.partial(F.linear, weight=layer.weight, bias=layer.bias), lambda x: layer(x)):
        layer.zero_grad()
        checkpoint(f, x).square().sum().backward()
        found = layer.weight.grad
        layer.zero_grad()
        layer(x).square().sum().backward()
        assert same_bits(found, layer.weight.grad)


def test_backward_in_another_thread():
    x = leaf(3)
    y = checkpoint(lambda x: F.dropout(x.exp(), 0.5), x)
    worker = threading.Thread(target=y.sum().backward)
    worker.start()
    worker.join()
    np.testing.assert_allclose(host(x.grad), host(y), rtol=1e-6)


# --- random numbers -------------------------------------------------------------------------------------------------------

def test_the_stream_goes_on_as_if_nothing_had_been_drawn_again():
    x = leaf(50)
    torch.manual_seed(0)
    y = checkpoint(lambda x: F.dropout(x, 0.5), x)
    between = torch.rand(3)
    y.sum().backward()
    after = torch.rand(3)
    torch.manual_seed(0)
    F.dropout(x, 0.5)
    assert same_bits(between, torch.rand(3)) and same_bits(after, torch.rand(3))
    assert same_bits(x.grad, (y.detach() != 0) * 2.0)


def test_generators_of_ones_own_are_replayed_and_one_that_is_seeded_inside():
    own = torch.Generator().manual_seed(4)

    def f(x):
        noisy = x * torch.randn(6, generator=own) * torch.randn(1)
        torch.manual_seed(9)
        return noisy * torch.rand(6)
    x = leaf(6)
    y = checkpoint(f, x)
    states = own.get_state(), torch.get_rng_state()
    own.manual_seed(5)
    y.sum().backward()
    np.testing.assert_allclose(host(x.grad), host(y / x), rtol=1e-5)
    assert same_bits(own.get_state(), torch.Generator().manual_seed(5).get_state()) and same_bits(torch.get_rng_state(), states[1])


def test_a_generator_is_put_back_when_the_second_run_fails():
    calls = []

    def f(x):
        calls.append(1)
        y = F.dropout(x, 0.5)
        if len(calls) == 2:
            raise KeyError("the second run")
        return y.exp()
    x = leaf(4)
    y = checkpoint(f, x)
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="checkpoint: f failed when backward ran it again"):
        y.sum().backward(retain_graph=True)
    assert same_bits(state, torch.get_rng_state()) and x.grad is None
    y.sum().backward()                          # the third run is a second chance
    assert len(calls) == 3 and x.grad is not None


def test_preserve_rng_state_false_is_for_functions_that_draw_nothing():
    x = leaf(4)
    checkpoint(lambda x: x.exp(), x, preserve_rng_state=False).sum().backward()
    with pytest.raises(RuntimeError, match="draws random numbers.*leave preserve_rng_state=False out"):
        checkpoint(lambda x: F.dropout(x, 0.5), x, preserve_rng_state=False)


def test_dropout_of_tiled_attention():
    x, found = leaf(1, 2, 8, 4), []
    for run in (lambda f: f(x), lambda f: checkpoint(f, x)):
        torch.manual_seed(1)
        x.grad = None
        run(lambda x: F.flash_attention(x, x, x, dropout_p=0.3, is_causal=True, tile=(4, 4))).square().sum().backward()
        found.append(x.grad)
    assert same_bits(*found)


# --- what surrounds the call ------------------------------------------------------------------------------------------------

def test_the_attention_backend_of_the_first_run_is_that_of_the_second():
    x, found = leaf(1, 2, 8, 4), []
    for checkpointed in (False, True):
        x.grad = None
        with torch.sdpa_backend("tiled"):
            y = checkpoint(F.scaled_dot_product_attention, x, x, x) if checkpointed else F.scaled_dot_product_attention(x, x, x)
        y.square().sum().backward()
        found.append(x.grad)
    assert same_bits(*found)


@pytest.mark.parametrize("cache_enabled", (True, False))
def test_autocast_is_that_of_the_first_run(cache_enabled):
    """The weight is used before, twice inside, and once in an autocast of the function's own."""
    w, x, kind = leaf(4, 4), leaf(3, 4), torch.get_default_device().type

    def f(x):
        with autocast(kind, enabled=False):
            y = x.float() @ w
        with autocast(kind):
            return ((y @ w) @ w).float() @ w
    found = []
    for run in (f, lambda x: checkpoint(f, x)):
        x.grad = w.grad = None
        with autocast(kind, dtype=torch.float16, cache_enabled=cache_enabled):
            y = run(x @ w)
        assert y.dtype == torch.float16
        with autocast(kind, dtype=torch.float16, enabled=False):
            y.sum().backward()
        found.append((y, x.grad, w.grad))
    assert same_bits(found[0][0], found[1][0]) and same_bits(found[0][1], found[1][1])
    np.testing.assert_allclose(*(host(g) for _, _, g in found), rtol=2e-3, atol=2e-3 * float(host(w.grad).max()))


def test_grad_mode_inside_the_function_is_its_own():
    def f(x):
        with torch.no_grad():
            frozen = x.exp()
        return frozen * x.sin()
    x = leaf(3)
    y = checkpoint(f, x).sum()
    with torch.no_grad():
        y.backward()
    np.testing.assert_allclose(host(x.grad), np.exp(host(x)) * np.cos(host(x)), rtol=1e-5)


def test_a_trace_shows_what_the_first_run_did_and_nobody_is_told_of_the_second():
    model, ids = MODELS["pre-norm"](0.0), torch.randint(0, 11, (1, 8))
    plain = trace(model, ids, ids)
    model.checkpoint_blocks = True
    seen = trace(model, ids, ids)
    assert str(plain) == str(seen) and len(plain.rows) > 30
    told, x = [], leaf(3)
    y = checkpoint(lambda x: x.exp(), x)
    with observing(lambda node, args, out: told.append(node.name)):
        y.sum().backward()
    assert told == ["Sum"]


# --- what is refused ------------------------------------------------------------------------------------------------------

def test_an_argument_that_was_written_to():
    x = leaf(3)
    h = x * 2
    y = checkpoint(lambda h: (h + 1).exp().sum(), h)        # nothing here saves h, but the second run reads it
    h.add_(1)
    with pytest.raises(RuntimeError, match=r"a tensor of shape \(3,\) that <lambda> read was modified by an inplace operation after the "
                                           r"forward pass: backward, which runs it again, would compute with other numbers"):
        y.backward()


def test_a_parameter_that_an_optimizer_has_changed_since():
    """Without a checkpoint a bias may change, for nothing saves it; the second run would compute with the new one."""
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    optimizer = torch.optim.SGD([layer.bias], lr=0.1)
    y = checkpoint(lambda x: layer(x).exp(), x).sum()
    layer(x).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"a tensor of shape \(3,\) that <lambda> read was modified"):
        y.backward()


def test_results_and_what_the_function_made_may_be_written_to():
    def f(x):
        out = torch.zeros(3, 2, device=x.device)
        for i in range(3):
            out[i] = x * (out[i - 1] + i)
        h = out + 1
        return h, (h * 2).exp()
    x, found = leaf(2), []
    for run in (f, lambda x: checkpoint(f, x)):
        x.grad = None
        h, y = run(x)
        h += 1
        y.sum().backward()
        found.append(x.grad)
    assert same_bits(*found)


def test_in_place_writes_inside_that_would_be_refused_are_refused():
    def f(x):
        h = x.exp()
        y = h * 1
        h.add_(1)                               # exp saved it
        return y
    for run in (f, lambda x: checkpoint(f, x)):
        with pytest.raises(RuntimeError, match="Exp.*was modified by an inplace operation"):
            run(leaf(3)).sum().backward()


def differing(make):
    """A function whose second run is not its first: make(run number, x)."""
    runs = itertools.count()
    return lambda x: make(next(runs), x)


@pytest.mark.parametrize("make, message", {
    "another operation": (lambda n, x: (x.exp() if n == 0 else x.sin()) * 2, r"operation 1 was Exp .*test_checkpointing.*and is now Sin"),
    "one more": (lambda n, x: x.exp() if n == 0 else x.exp() * 1, "there were 1 operations, now there are 2"),
    "one fewer": (lambda n, x: x.exp() * 1 if n == 0 else x.exp(), "there were 2 operations, now there are 1"),
    "another shape": (lambda n, x: x[n:].exp(), r"operation 1 was .*\[4\].*and is now .*\[3\]"),
    "another number": (lambda n, x: (x * float(n + 1)).exp(), r"operation 1 was Mul, 1.0 .*and is now Mul, 2.0"),
    "a number without a graph": (lambda n, x: x.exp() * torch.tensor(1.0 + n), "its results are other numbers"),
}.values())
def test_a_function_that_does_not_do_the_same_again(make, message):
    if "other numbers" in message and torch.get_default_device().type != "cpu":
        pytest.skip("on a GPU numbers are not compared")
    x = leaf(4)
    y = checkpoint(differing(make), x).sum()
    with pytest.raises(RuntimeError, match="checkpoint: <lambda> drew another graph when backward ran it again: " + message):
        y.backward()
    assert x.grad is None


@host_only
def test_determinism_check_none_trusts_the_numbers_but_not_the_graph():
    x = leaf(4)
    checkpoint(differing(lambda n, x: x.exp() * torch.tensor(1.0 + n)), x, determinism_check="none").sum().backward()
    with pytest.raises(RuntimeError, match="drew another graph"):
        checkpoint(differing(lambda n, x: (x.exp() if n else x.sin())), x, determinism_check="none").sum().backward()


@host_only
def test_random_numbers_that_are_not_this_librarys():
    numbers = np.random.default_rng(0)
    y = checkpoint(lambda x: x * torch.tensor(numbers.random(4, np.float32)), leaf(4)).sum()
    with pytest.raises(RuntimeError, match="its results are other numbers"):
        y.backward()


def test_eval_between_the_runs():
    layer, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), leaf(2, 3)
    y = checkpoint(layer, x).sum()
    layer.eval()
    with pytest.raises(RuntimeError, match="model.training"):
        y.backward()


def test_a_weight_that_was_frozen_between_the_runs():
    layer, x = nn.Linear(3, 3), leaf(2, 3)
    y = checkpoint(layer, x).sum()
    layer.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"Linear for arguments \[0, 1, 2\].*Linear for arguments \[0, 2\]"):
        y.backward()


def test_an_exception_of_the_first_run_is_the_callers():
    x = leaf(3)

    def f(x):
        x.exp()
        raise LookupError("mine")
    with pytest.raises(LookupError, match="^mine$"):
        checkpoint(f, x)
    checkpoint(lambda x: x.exp(), x).sum().backward()           # the next one is not inside it
    assert x.grad is not None


def test_backward_inside_the_function():
    def f(x):
        y = x.exp()
        y.sum().backward()
        return y
    with pytest.raises(RuntimeError, match="backward came before f had ended"):
        checkpoint(f, leaf(3))


@pytest.mark.parametrize("call, error, message", [
    (lambda x: checkpoint(x, x), TypeError, "the function comes first"),
    (lambda x: checkpoint(torch.exp, x, use_reentrant=True), ValueError, "use_reentrant must be False"),
    (lambda x: checkpoint(torch.exp, x, preserve_rng_state=1), TypeError, "preserve_rng_state must be a bool"),
    (lambda x: checkpoint(torch.exp, x, determinism_check="all"), ValueError, '"default" or "none"'),
    (lambda x: checkpoint(torch.exp, x, no_such=1), TypeError, "no_such"),
    (lambda x: checkpoint_sequential([torch.exp], 2, x), ValueError, "1 functions cannot be cut into 2 segments; expected 1 to 1"),
    (lambda x: checkpoint_sequential([torch.exp], 0, x), ValueError, "cannot be cut into 0"),
    (lambda x: checkpoint_sequential([torch.exp], 1.5, x), TypeError, "segments must be a whole number"),
])
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(leaf(3))


# --- state ----------------------------------------------------------------------------------------------------------------

class Counting(nn.Module):
    """Counts its runs in Python, and in a buffer that its result does not depend on, or does."""

    def __init__(self, matters):
        super().__init__()
        self.matters, self.runs = matters, 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.runs += 1
        with torch.no_grad():
            self.count += 1
        return x.exp() * self.count.detach().clone() if self.matters else x.exp()


def test_state_that_forward_changes_is_changed_twice():
    module, x = Counting(matters=False), leaf(3)
    y = checkpoint(module, x).sum()
    y.backward()
    assert module.runs == 2 and module.count == 2 and same_bits(x.grad, x.detach().exp())


def test_a_function_can_ask_whether_it_runs_again():
    runs = []

    def f(x):
        runs.append(recomputing())
        return x.exp()
    x = leaf(3)
    y = checkpoint(lambda x: checkpoint(f, f(x)), x).sum()
    y.backward()
    assert runs == [False, False, True, True, True] and not recomputing()


@host_only
def test_state_that_changes_the_result_is_refused():
    y = checkpoint(Counting(matters=True), leaf(3)).sum()
    with pytest.raises(RuntimeError, match="its results are other numbers"):
        y.backward()


# --- memory -----------------------------------------------------------------------------------------------------------------

def test_a_checkpointed_graph_keeps_the_inputs_of_its_functions():
    model, ids = MODELS["pre-norm"](0.1), torch.randint(0, 11, (2, 8))
    plain = saved_bytes(model(ids, ids)[1])
    model.checkpoint_blocks = True
    kept = saved_bytes(model(ids, ids)[1])
    outside = {"Dropout", "Embedding", "LayerNorm", "Linear", "CrossEntropy"}          # of the embedding, the final norm and the head
    assert {"Attention", "Gelu"} <= set(plain) and set(kept) - {""} <= outside and 4 * kept.total < plain.total


def peak_bytes(blocks, layers):
    """The most that a pass forward and backward over `layers` blocks allocates at once, without gradients of weights."""
    x = leaf(8, 64, 32)
    gc.collect()
    tracemalloc.start()
    try:
        y = x * 1
        for _ in range(layers):
            y = blocks(y)
        y.sum().backward()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_over_depth():
    """[8, 64, 32] in float32 is 64 KiB: a block keeps ten times as much, a checkpoint of it the input alone."""
    block = nn.TransformerBlock(32, 2, 128, 0.1, norm_first=True).requires_grad_(False)
    unit = 8 * 64 * 32 * 4
    for run in (block, lambda x: checkpoint(block, x)):
        peak_bytes(run, 1)                      # what is allocated once
    plain, kept = ([min(peak_bytes(run, layers) for _ in range(3)) / unit for layers in (4, 12)]     # others in this process only add to it
                   for run in (block, lambda x: checkpoint(block, x)))
    assert (plain[1] - plain[0]) / 8 > 10
    assert 1 <= (kept[1] - kept[0]) / 8 < 2.5                   # the input, and the small objects of the graph


@pytest.mark.host("ctypes, by which the emulator calls kernels there, makes cycles of its own")
def test_nothing_stays_when_the_graph_dies():
    gc.collect()
    gc.disable()
    try:
        x, layer = leaf(4, 3), nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        for use in (lambda y: None, lambda y: y.sum().backward(), lambda y: y.sum().backward(retain_graph=True)):
            h = x * 1
            y = checkpoint(lambda h: checkpoint(layer, layer(h)), h)
            dead = weakref.ref(h), weakref.ref(y), weakref.ref(y.node)
            use(y)
            del h, y
            assert [ref() for ref in dead] == [None] * 3
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_the_arguments_are_let_go_of_as_soon_as_backward_has_run_the_function():
    class Big:
        pass
    x, big = leaf(3), Big()
    gone = weakref.ref(big)
    y = checkpoint(lambda x, big: x.exp(), x, big)
    del big
    assert gone() is not None
    y.sum().backward(retain_graph=True)
    assert gone() is None


# --- a chain of functions -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("segments", range(1, 8))
def test_checkpoint_sequential(segments):
    torch.manual_seed(0)
    functions = [counted((nn.Linear(4, 4) if i % 2 else nn.Dropout(0.3)).forward) for i in range(7)]
    x, found = leaf(2, 4), []
    for run in (lambda: checkpoint_sequential(functions, segments, x), lambda: checkpoint_sequential(functions, 1, x)):
        torch.manual_seed(1)
        x.grad = None
        run().square().sum().backward()
        found.append((x.grad, [f.calls for f in functions]))
    assert same_bits(found[0][0], found[1][0])
    last = 7 - 7 // segments * (segments - 1)                   # the last segment is no checkpoint
    assert found[0][1] == [2] * (7 - last) + [1] * last


def test_checkpoint_sequential_of_a_module():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), leaf(2, 4)
    checkpoint_sequential(model, 2, x).sum().backward()
    found, x.grad = x.grad, None
    model(x).sum().backward()
    assert same_bits(found, x.grad)
