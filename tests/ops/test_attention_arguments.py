"""Arguments of attention that are none: one answer on every backend, with the name of the call and of the argument."""
import asyncio
import gc
import inspect
import itertools
import re
import threading

import numpy as np
import pytest
from device import host

import tinygrad_tf as torch
import tinygrad_tf.nn.functional as F
from tinygrad_tf import nn
from tinygrad_tf.kernels.flash import LONGEST
from tinygrad_tf.nn import masks
from tinygrad_tf.ops import sdpa
from tinygrad_tf.ops.attention import attention_weights
from tinygrad_tf.ops.flash_attention import keep_mask
from tinygrad_tf.ops.sdpa import sdpa_backend

B, H, T, DH = 2, 2, 5, 4
BACKENDS = {"dense": None, "tiled": (2, 3)}
Q, X = (torch.randn(*shape, dtype=torch.float64) for shape in ((B, H, T, DH), (B, T, H * DH)))
HOLES = torch.tensor([[True, False, True, True, True], [True] * 5])
TABLE = torch.tensor(np.random.default_rng(0).random((T, T)) > 0.4)
BOOL = torch.ones(T, T, dtype=torch.bool)


def same_scores(score, b, h, q_idx, kv_idx):
    return score


def layer(**options):
    torch.manual_seed(1)
    return nn.MultiHeadAttention(H * DH, H, **options).double()


def sdpa_call(**options):
    return F.scaled_dot_product_attention(Q, Q, Q, **options)


def flash_call(**options):
    return F.flash_attention(Q, Q, Q, **options)


def attention_call(**options):
    return F.attention(Q, Q, Q, **options)


def pytorchs_layer(dropout):
    return nn.MultiheadAttention(H * DH, H, dropout)


# --- positions beyond counting --------------------------------------------------------------------------------------------------

AT = {
    "sdpa": lambda at: sdpa_call(query_offset=at), "sdpa, causal": lambda at: sdpa_call(query_offset=at, is_causal=True),
    "flash": lambda at: flash_call(query_offset=at, window=2),
    "attention": lambda at: attention_call(query_offset=at), "causal": lambda at: attention_call(query_offset=at, causal=True),
    "window": lambda at: attention_call(query_offset=at, window=(1, 1)),
    "mask_mod": lambda at: attention_call(query_offset=at, mask_mod=masks.causal_mod),
    "score_mod": lambda at: attention_call(query_offset=at, score_mod=same_scores),
    "weights": lambda at: attention_call(query_offset=at, causal=True, return_weights=True)[0],
    "causal_mask": lambda at: masks.causal_mask(T, query_offset=at), "local_mask": lambda at: masks.local_mask(T, 1, query_offset=at),
    "create_mask": lambda at: masks.create_mask(masks.causal_mod, 1, 1, T, T, at)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", AT)
def test_an_offset_beyond_all_sequences_is_refused_alike(name, backend):
    with sdpa_backend(backend, BACKENDS[backend]):
        for size in (LONGEST + 1, 2**62, 2**63 - 1, 2**63, 10**400, 10**5000):
            for at in (size, -size):
                with pytest.raises(ValueError, match=f"query_offset must lie within ±{LONGEST}, got"):
                    AT[name](at)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{"causal": True}, {"mask_mod": masks.causal_mod}], ids=["causal", "mask_mod"])
def test_the_farthest_offsets_mean_what_they_say(options, backend):
    with sdpa_backend(backend, BACKENDS[backend]):
        np.testing.assert_allclose(host(attention_call(query_offset=LONGEST, **options)), host(attention_call()))
        assert (attention_call(query_offset=-LONGEST, **options) == 0).all()
        assert (attention_call(query_offset=LONGEST, window=2) == 0).all()


@pytest.mark.parametrize("far", [2**31, 2**62, 2**63 - 1, 2**63, 10**400], ids=lambda n: f"{n.bit_length()} bits")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_distance_may_be_of_any_size(far, backend):
    with sdpa_backend(backend, BACKENDS[backend]):
        for at in (None, -3, 3, LONGEST, -LONGEST):
            np.testing.assert_allclose(host(attention_call(window=(far, far), query_offset=at)), host(attention_call()))
            assert masks.local_mask(T, far, query_offset=at).all()
            for found, mod in (attention_call(window=far, query_offset=at), masks.causal_mod), (
                    attention_call(mask_mod=masks.sliding_window_mod(far), query_offset=at), masks.causal_mod):
                np.testing.assert_allclose(host(found), host(attention_call(mask_mod=mod, query_offset=at)))
        np.testing.assert_allclose(host(layer(window=far)(X, valid_tokens=HOLES)), host(layer()(X, causal=True, valid_tokens=HOLES)))
    assert masks.block_sparse_mask(T, far, BOOL[:1, :1]).all()
    with pytest.raises(ValueError, match="beyond the 5 tokens"):
        masks.global_token_mask(T, 1, far)
    assert masks.create_mask(masks.global_token_mod(0, far), 1, 1, T, T).all()


# --- a mask_mod that returns a table ---------------------------------------------------------------------------------------------

def all_keys(b, h, q_idx, kv_idx):
    """Rows by index, keys not."""
    return TABLE[q_idx.squeeze(-1)]


TABLES = {
    "a table": lambda *where: TABLE, "with axes": lambda *where: TABLE[None, None], "rows": lambda *where: TABLE[:, :1],
    "keys": lambda *where: TABLE[0], "all keys": all_keys, "one answer": lambda *where: torch.tensor(True),
    "and_masks": masks.and_masks(masks.causal_mod, lambda *where: TABLE),
    "nested": masks.or_masks(lambda *where: TABLE[0], masks.and_masks(lambda *where: TABLE, masks.local_mod(1)))}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_means_the_same_in_tiles(name):
    """Forward and backward of F.attention, and of a layer whose window is another mod beside it."""
    found = []
    for backend, tile in BACKENDS.items():
        q = Q.clone().requires_grad_()
        with sdpa_backend(backend, tile):
            out = F.attention(q, Q, Q, mask_mod=TABLES[name], query_offset=0)
            in_layer = layer(window=3)(X, valid_tokens=HOLES, mask_mod=TABLES[name])
        (out * Q).sum().backward()
        found.append([host(t.detach()) for t in (out, q.grad, in_layer)])
    for dense, tiled in zip(*found):
        np.testing.assert_allclose(tiled, dense, atol=1e-14)


@pytest.mark.parametrize("shape", [(T, T + 1), (T - 1, T), (3, 1, T, T), (1, B, H, T, T), (7,)], ids=str)
def test_an_answer_that_is_no_mask_is_refused_alike(shape):
    wrong, words = torch.ones(*shape, dtype=torch.bool), rf" \[B, H, Tq, Tk\] .*{re.escape(str(shape))}"
    for backend, asked in ("dense", "asked for"), ("tiled", "asked tile by tile, here for queries 0 to 1 and keys 0 to 2 of"):
        for mod in (lambda *where: wrong), masks.and_masks(masks.causal_mod, lambda *where: wrong):
            with sdpa_backend(backend, BACKENDS[backend]), pytest.raises(ValueError, match="mask_mod: " + asked + words):
                attention_call(mask_mod=mod)


def test_a_function_that_mixes_a_table_with_indices_is_told_of_tiles():
    def mixed(b, h, q_idx, kv_idx):
        return TABLE & (q_idx >= kv_idx)
    with sdpa_backend("tiled", (2, 3)):
        with pytest.raises(RuntimeError, match="asked tile by tile, here for queries 0 to 1 and keys 0 to 2 .*read at q_idx and kv_idx"):
            attention_call(mask_mod=mixed)
        with pytest.raises(ZeroDivisionError):
            attention_call(mask_mod=lambda *where: 1 / 0)


# --- flags, probabilities, numbers -----------------------------------------------------------------------------------------------

NO_FLAGS = ["no", 1, 0, None, [True], 0.5, BOOL]
FLAGS = {
    "scaled_dot_product_attention: is_causal": lambda x: sdpa_call(is_causal=x),
    "scaled_dot_product_attention: enable_gqa": lambda x: sdpa_call(enable_gqa=x),
    "flash_attention: is_causal": lambda x: flash_call(is_causal=x), "flash_attention: enable_gqa": lambda x: flash_call(enable_gqa=x),
    "attention_weights: is_causal": lambda x: attention_weights(Q, Q, is_causal=x),
    "attention_weights: enable_gqa": lambda x: attention_weights(Q, Q, enable_gqa=x),
    "attention: causal": lambda x: attention_call(causal=x), "attention: return_weights": lambda x: attention_call(return_weights=x),
    "MultiHeadAttention: causal": lambda x: layer()(X, causal=x),
    "MultiHeadAttention: return_weights": lambda x: layer()(X, return_weights=x)}


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_true_or_false(name):
    for x in NO_FLAGS:
        with pytest.raises(TypeError, match=f"^{name} must be a bool, True or False, got "):
            FLAGS[name](x)
    FLAGS[name](True), FLAGS[name](False)


PROBABILITIES = {
    "scaled_dot_product_attention: dropout_p": lambda p: sdpa_call(dropout_p=p),
    "flash_attention: dropout_p": lambda p: flash_call(dropout_p=p),
    "attention: dropout_p": lambda p: attention_call(dropout_p=p),
    "attention: dropout_p, weights": lambda p: attention_call(dropout_p=p, return_weights=True),
    "attention: dropout_p, score_mod": lambda p: attention_call(dropout_p=p, score_mod=same_scores),
    "MultiHeadAttention: dropout": lambda p: layer(dropout=p), "MultiheadAttention: dropout": pytorchs_layer,
    "MultiHeadAttention: dropout, in a block": lambda p: nn.TransformerBlock(H * DH, H, 8, attention_dropout=p)}


@pytest.mark.parametrize("name", PROBABILITIES)
def test_a_probability_is_a_number(name):
    call, words = PROBABILITIES[name], name.split(",")[0]
    for p in (True, False, np.True_, "0.5", None, [0.5], (0.5,), torch.tensor(0.5), torch.tensor([0.5, 0.5]), 1j):
        with pytest.raises(TypeError, match=f"^{words} must be a number from 0 to 1, got "):
            call(p)
    for p in (-0.1, 1.5, float("nan"), float("inf"), np.float32(2), 10**400, 10**5000):
        with pytest.raises(ValueError, match=f"^{words.split(':')[0]}: dropout probability has to be between 0 and 1"):
            call(p)
    for p in (0, 1, 0.5, np.float16(0.5), np.float32(0.5), np.float64(0.5), np.int64(1)):
        call(p)


@pytest.mark.parametrize("call", [lambda s: sdpa_call(scale=s), lambda s: flash_call(scale=s), lambda s: attention_call(scale=s),
                                  lambda s: attention_call(scale=s, return_weights=True),
                                  lambda s: attention_call(scale=s, score_mod=same_scores),
                                  lambda s: attention_weights(Q, Q, scale=s)],
                         ids=["scaled_dot_product_attention", "flash_attention", "attention", "attention, weights", "attention, score_mod",
                              "attention_weights"])
def test_a_scale_is_a_number_that_a_float_can_be(call, request):
    name = request.node.callspec.id.split(",")[0]
    if name == "attention" and "weights" in request.node.callspec.id:
        name = "attention_weights"
    for scale in (10**400, -10**400, 10**5000):
        with pytest.raises(ValueError, match=f"^{name}: scale must lie within the range of a float, got a number of"):
            call(scale)
    with pytest.raises(TypeError, match=f"^{name}: scale must be a number, got 'x'"):
        call("x")


@pytest.mark.torch
@pytest.mark.parametrize("name", ["is_causal", "enable_gqa"])
def test_flags_are_those_of_pytorch(name):
    theirs = pytest.importorskip("torch")
    for x in ("no", 1, 0, None, [True], 0.5, np.True_):
        for framework in (theirs, torch):
            q = framework.ones(1, 2, 3, 4)
            with pytest.raises(TypeError, match=name):
                framework.nn.functional.scaled_dot_product_attention(q, q, q, **{name: x})


# --- functions, and what they return ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("no_function", [5, "causal", [masks.causal_mod], BOOL], ids=lambda x: type(x).__name__)
def test_a_mod_is_a_function(no_function, backend):
    calls = [("attention", attention_call), ("MultiHeadAttention", lambda **wrong: layer()(X, **wrong)),
             ("MultiHeadAttention", lambda **wrong: layer(window=2)(X, valid_tokens=HOLES, **wrong))]
    with sdpa_backend(backend, BACKENDS[backend]):
        for name, (op, call) in itertools.product(("mask_mod", "score_mod"), calls):
            with pytest.raises(TypeError, match=f"^{op}: {name} must be a function, got "):
                call(**{name: no_function})
    for call in (lambda: masks.create_mask(no_function, 1, 1, 2, 2), lambda: masks.and_masks(masks.causal_mod, no_function),
                 lambda: masks.or_masks(no_function), lambda: masks.create_mask(None, 1, 1, 2, 2)):
        with pytest.raises(TypeError, match="mod must be a function"):
            call()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("answer", [1, True, None, np.ones((T, T), bool), TABLE.long(), TABLE.float()], ids=lambda x: type(x).__name__)
def test_what_a_mask_mod_returns_is_a_bool_tensor(answer, backend):
    def mod(b, h, q_idx, kv_idx):
        return answer
    padded = {"valid_tokens": HOLES}
    with sdpa_backend(backend, BACKENDS[backend]):
        for call in (lambda: attention_call(mask_mod=mod), lambda: attention_call(mask_mod=masks.or_masks(masks.causal_mod, mod)),
                     lambda: attention_call(mask_mod=mod, return_weights=True), lambda: layer()(X, mask_mod=mod),
                     lambda: layer(window=2)(X, mask_mod=mod, **padded), lambda: masks.create_mask(mod, B, H, T, T)):
            with pytest.raises(TypeError, match=r"mask_mod: what it returns must be a bool tensor .* got .*\)"):
                call()


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("query, answer", [("float32", "float64"), ("float32", "float16"), ("float16", "float64")])
def test_a_score_mod_keeps_the_dtype_of_its_scores(query, answer, weights):
    q, bias = Q.to(getattr(torch, query)), torch.zeros(T, T)
    for options in ({}, {"bias": bias}):
        with pytest.raises(RuntimeError, match=f"attention: score_mod must return scores of the dtype that it gets, torch.float32, got "
                                               f"torch.{answer}; convert with .to"):
            F.attention(q, q, q, score_mod=lambda score, *where: score.to(getattr(torch, answer)), return_weights=weights, **options)


@pytest.mark.parametrize("options", [{}, {"return_weights": True}, {"score_mod": same_scores},
                                     {"return_weights": True, "score_mod": same_scores}], ids=lambda o: "+".join(o) or "plain")
@pytest.mark.parametrize("wrong", ["query", "key", "value", "all"])
def test_dtypes_are_told_of_what_was_passed(wrong, options):
    given = {name: Q.long() if wrong == "all" else Q.float() if name == wrong else Q for name in ("query", "key", "value")}
    with pytest.raises(RuntimeError, match="^attention: expected query, key and value to have the same float dtype, got torch"):
        F.attention(**given, **options)


@pytest.mark.parametrize("output", [5, "x", None, np.ones((2, 2))], ids=lambda x: type(x).__name__)
def test_keep_mask_is_asked_of_a_tensor(output):
    with pytest.raises(TypeError, match="keep_mask: output must be a Tensor, got"):
        keep_mask(output)


# --- whose line is it? -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("call", [lambda q: F.scaled_dot_product_attention(q, q, q), lambda q: F.attention(q, q, q),
                                  lambda q: F.attention(q, q, q, window=1),
                                  lambda q: nn.MultiHeadAttention(129, 1).to(q.device)(q[0])], ids=["sdpa", "attention", "window", "layer"])
def test_a_warning_shows_the_line_of_the_caller(call, gpu, monkeypatch):
    monkeypatch.setattr(sdpa, "_warned", set())
    monkeypatch.setattr(sdpa, "DENSE_SCORES_ON_GPU", 0)
    q = torch.randn(1, 1, 2, 129).to("cuda")
    with pytest.warns(UserWarning, match="heads of 129 features are too wide") as told:
        call(q)
    lines, first = inspect.getsourcelines(call)
    assert told[0].filename == __file__ and first <= told[0].lineno < first + len(lines)


# --- backends that overlap -------------------------------------------------------------------------------------------------------

def holding(name):
    with sdpa_backend(name):
        yield


def chosen():
    q = torch.randn(1, 1, 3, 2, requires_grad=True)
    return F.attention(q, q, q).node.name


def test_generators_that_interleave_leave_nothing_behind():
    first, second = holding("tiled"), holding("dense")
    assert chosen() == "Attention"
    next(first)
    next(second)
    assert chosen() == "Attention"              # the later one
    first.close()
    assert chosen() == "Attention"              # its end does not bring back the one that ended
    third = holding("tiled")
    next(third)
    second.close()
    assert chosen() == "TiledAttention"
    third.close()
    assert chosen() == "Attention" and sdpa._forced.get() == ()


@pytest.mark.parametrize("end", ["close", "collect"])
def test_one_that_another_thread_ends_is_over_everywhere(end):
    held, found = [holding("tiled")], []
    next(held[0])
    assert chosen() == "TiledAttention"

    def work():
        try:
            held[0].close() if end == "close" else held.clear()
            gc.collect()
            found.append(chosen())
        except BaseException as error:
            found.append(error)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == ["Attention"] and chosen() == "Attention"
    with sdpa_backend("tiled"):
        assert chosen() == "TiledAttention" and len(sdpa._forced.get()) == 1
    assert sdpa._forced.get() == ()


def test_a_task_that_was_begun_inside_stays_inside():
    async def inner(gate):
        await gate.wait()
        return chosen()

    async def outer():
        gate = asyncio.Event()
        with sdpa_backend("tiled"):
            task = asyncio.ensure_future(inner(gate))
            await asyncio.sleep(0)
        gate.set()
        return await task, chosen()
    assert asyncio.run(outer()) == ("TiledAttention", "Attention")


@pytest.mark.parametrize("p", ["x", None, [0.5], True, 1j], ids=str)
@pytest.mark.parametrize("make", [nn.Dropout, lambda p: nn.TransformerBlock(8, 2, 16, dropout=p), lambda p: nn.FeedForward(8, 16, p),
                                  lambda p: F.dropout(torch.ones(3), p)], ids=["Dropout", "TransformerBlock", "FeedForward", "F.dropout"])
def test_a_probability_of_dropout_is_a_number(make, p):
    with pytest.raises(TypeError, match="[Dd]ropout: p must be a number from 0 to 1"):
        make(p)
