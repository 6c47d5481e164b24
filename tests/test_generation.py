"""Generation: cached = uncached, sliding windows, sampling, the cache itself, and what training must not notice."""
import math

import numpy as np
import pytest
from test_minigpt import T_MAX, V_VOCAB, both_norms, ids, model

import tinygrad_tf as torch
from tinygrad_tf.autograd import no_grad
from tinygrad_tf.generation import KVCache, generate, inference, sample, stream
from tinygrad_tf.models import MiniGPT


def drawing(seed=3, **options):
    return {"generator": torch.Generator().manual_seed(seed), **options}


# --- the loop -------------------------------------------------------------------------------------------------------------

@both_norms
@pytest.mark.parametrize("length", [1, 2, 5, T_MAX - 1, T_MAX, T_MAX + 1, 3 * T_MAX])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_cached_is_uncached(norm_first, length, temperature):
    """Token for token, far beyond the context too, for a batch of prompts."""
    gpt, prompt = model(norm_first), ids(3, length)
    one, other = (generate(gpt, prompt, 3 * T_MAX, temperature=temperature, use_cache=use_cache, **drawing())
                  for use_cache in (True, False))
    assert torch.equal(one, other)
    assert one.shape == (3, length + 3 * T_MAX) and torch.equal(one[:, :length], prompt)
    assert len({tuple(row) for row in one[:, length:].tolist()}) > 1


def seen_by(gpt, prompt, steps, **options):
    """The token ids that each step reads, and the logits that it draws from."""
    calls, forward = [], gpt.forward

    def recorded(token_ids, cache=None):
        logits, loss = forward(token_ids, cache=cache)
        calls.append((token_ids.tolist(), logits[:, -1].clone()))
        return logits, loss
    gpt.forward = recorded
    text = generate(gpt, prompt, steps, temperature=0, **options)
    gpt.forward = forward
    return text.tolist(), calls


@both_norms
def test_cached_logits_are_uncached_logits(norm_first):
    gpt, prompt = model(norm_first), ids(2, 3)
    cached, uncached = (seen_by(gpt, prompt, 30, use_cache=use_cache)[1] for use_cache in (True, False))
    for (_, one), (_, other) in zip(cached, uncached):
        assert torch.allclose(one, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize("length", [3, T_MAX, T_MAX + 5])
def test_the_windows(length):
    """Everything up to the context, then the newer half; with a cache, only what it has not seen."""
    text, calls = seen_by(model(), ids(1, length), 3 * T_MAX, use_cache=False)
    end, size = length, min(length, T_MAX)
    for window, _ in calls:
        assert window == [text[0][end - size:end]]
        end, size = end + 1, size + 1 if size < T_MAX else T_MAX // 2 + 1
    text, calls = seen_by(model(), ids(1, length), 3 * T_MAX, use_cache=True)
    sizes = [len(window[0]) for window, _ in calls]
    assert sizes.count(1) >= len(sizes) - 7 and set(sizes) == {min(length, T_MAX), 1, T_MAX // 2 + 1}


@pytest.mark.parametrize("context", [1, 2, 3, 4])
def test_small_contexts(context):
    gpt = MiniGPT(V_VOCAB, context, 8, 2, 16, 1).eval()
    one, other = (generate(gpt, ids(1, 1) * 0, 12, temperature=0, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(one, other) and one.shape == (1, 13)


def test_streaming_is_lazy():
    gpt, calls = model(), []
    forward = gpt.forward
    gpt.forward = lambda *args, **options: calls.append(1) or forward(*args, **options)
    tokens = stream(gpt, ids(2, 3), 10**9, temperature=0)
    assert calls == []
    first = next(tokens)
    assert first.shape == (2, 1) and len(calls) == 1
    next(tokens), next(tokens)
    assert len(calls) == 3


def test_streamed_is_generated():
    gpt, prompt = model(), ids(2, 4)
    streamed = torch.cat([prompt, *stream(gpt, prompt, 9, **drawing())], dim=1)
    assert torch.equal(streamed, generate(gpt, prompt, 9, **drawing()))
    assert torch.equal(generate(gpt, prompt, 0), prompt)


def test_rows_of_a_batch_do_not_mix():
    gpt, prompt = model(), ids(3, 4)
    together = generate(gpt, prompt, 20, temperature=0)
    for row in range(3):
        assert torch.equal(generate(gpt, prompt[row:row + 1], 20, temperature=0)[0], together[row])


def test_the_generator_alone_decides():
    gpt, prompt = model(), ids(1, 3)
    before = torch.get_rng_state()
    one, same, other = (generate(gpt, prompt, 40, **drawing(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert (np.asarray(torch.get_rng_state()) == np.asarray(before)).all()


def test_training_goes_on_between_two_tokens():
    """Modes and grad mode are as before, while a stream is open, abandoned, or ended by an error."""
    gpt = model(dropout=0.5).train()
    gpt.blocks[0].eval()
    before = [module.training for module in gpt.modules()]

    def unchanged():
        return [module.training for module in gpt.modules()] == before and torch.is_grad_enabled()
    tokens = stream(gpt, ids(1, 3), 9, temperature=0)
    assert unchanged()
    next(tokens)
    assert unchanged()
    gpt(ids(1, 3), ids(1, 3))[1].backward()
    tokens.close()
    assert unchanged()
    with pytest.raises(IndexError):
        next(stream(gpt, ids(1, 3) + V_VOCAB, 9))
    assert unchanged()
    assert list(generate(gpt, ids(1, 3), 5, temperature=0).shape) == [1, 8] and unchanged()


def test_tokens_have_no_history():
    token = next(stream(model(), ids(1, 3), 1))
    assert not token.requires_grad and token.dtype == torch.int64


def test_inference_restores_after_an_error():
    gpt = model().train()
    with pytest.raises(KeyError), inference(gpt):
        assert not gpt.training and not torch.is_grad_enabled()
        raise KeyError
    assert gpt.training and gpt.blocks[1].ffn.training and torch.is_grad_enabled()


@pytest.mark.parametrize("prompt, options, what", [
    ((3,), {}, "prompt"), ((1, 0), {}, "prompt"), ((1, 2, 3), {}, "prompt"), ((1, 2), {"max_new_tokens": -1}, "max_new_tokens"),
    ((1, 2), {"temperature": -1.0}, "temperature"), ((1, 2), {"temperature": math.nan}, "temperature"),
    ((1, 2), {"temperature": math.inf}, "temperature"), ((1, 2), {"top_k": 0}, "top_k"),
])
def test_bad_options_are_refused_before_the_first_token(prompt, options, what):
    with pytest.raises(ValueError, match=what):
        stream(model(), ids(*prompt), **{"max_new_tokens": 1, **options})


@pytest.mark.parametrize("options", [
    {"prompt_ids": [[1, 2]]}, {"prompt_ids": np.array([[1, 2]])}, {"prompt_ids": 1}, {"prompt_ids": "the"}, {"max_new_tokens": 2.5},
    {"max_new_tokens": "3"}, {"max_new_tokens": None}, {"max_new_tokens": True}, {"temperature": "1"}, {"temperature": None},
    {"temperature": 1j}, {"temperature": [1.0]}, {"top_k": 2.5}, {"top_k": "2"}, {"top_k": True}, {"top_k": [2]},
], ids=str)
def test_options_of_another_type_are_refused_by_name(options):
    (name,) = options
    for function in stream, generate:
        with pytest.raises(TypeError, match=f"(generate|sample): {name} must be"):
            function(model(), **{"prompt_ids": ids(1, 2), "max_new_tokens": 3, **options})
    if name in ("temperature", "top_k"):
        with pytest.raises(TypeError, match=f"sample: {name} must be"):
            sample(torch.zeros(2, 5), **options)


def test_numpy_numbers_are_numbers():
    gpt, prompt = model(), ids(1, 3)
    plain = generate(gpt, prompt, 5, temperature=0.5, top_k=3, **drawing())
    assert torch.equal(plain, generate(gpt, prompt, np.int64(5), temperature=np.float32(0.5), top_k=np.int32(3), **drawing()))


# --- sampling ---------------------------------------------------------------------------------------------------------------

INF = float("inf")


def frequencies(logits, n=20_000, **options):
    """How often each id is drawn, from n equal rows."""
    drawn = sample(torch.tensor([logits] * n), **drawing(**options))
    assert drawn.shape == (n, 1)
    return np.bincount(drawn.cpu().numpy().ravel(), minlength=len(logits)) / n


def softmax(logits):
    e = np.exp(np.array(logits) - max(logits))
    return e / e.sum()


LOGITS = [1.0, -0.5, 2.0, 0.3, -1.2]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_are_the_softmax(temperature):
    expected = softmax(np.array(LOGITS) / temperature)
    assert np.abs(frequencies(LOGITS, temperature=temperature) - expected).max() < 4 * math.sqrt(0.25 / 20_000)


def test_top_k_keeps_the_k_largest():
    for k in 1, 2, 3:
        kept = sorted(LOGITS)[-k:]
        expected = softmax([x if x in kept else -INF for x in LOGITS])
        found = frequencies(LOGITS, top_k=k)
        assert np.abs(found - expected).max() < 4 * math.sqrt(0.25 / 20_000)
        assert ((found > 0) == (expected > 0)).all()
    for k in 5, 6, 10**9:
        assert (frequencies(LOGITS, top_k=k) == frequencies(LOGITS)).all()
    assert frequencies([1.0, 1.0, 1.0, 1.0], top_k=2).astype(bool).sum() == 2           # of equals, no more than k


def test_minus_infinity_is_never_drawn():
    found = frequencies([0.0, -INF, -30.0, -INF, 0.0])
    assert found[1] == found[3] == 0 and found[0] > 0.4
    assert (frequencies([-INF, -INF, 0.5], temperature=1e-30) == [0, 0, 1]).all()
    assert frequencies([0.0, -INF, -INF], top_k=2)[1:].sum() == 0


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-320, 1e-45, 1e-30, 1e-4])
def test_cold_is_greedy(temperature):
    logits = torch.tensor([LOGITS, [3e38, -3e38, 1.0, 2.0, 3.0], [-1e30, -2e30, -3e30, -INF, -INF]])
    assert sample(logits, temperature).tolist() == [[2], [0], [0]]
    assert sample(logits.double(), temperature, top_k=2).tolist() == [[2], [0], [0]]


def test_greedy_takes_the_first_of_equals():
    assert sample(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), temperature=0).tolist() == [[1], [0]]


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("row", [[math.nan, 1.0], [1.0, math.nan], [-INF, -INF], [INF, 1.0], [math.nan, -INF]])
def test_rows_from_which_nothing_can_be_drawn(row, temperature):
    with pytest.raises(ValueError, match="logits"):
        sample(torch.tensor([[0.0, 1.0], row]), temperature)


@pytest.mark.parametrize("shape", [(), (5,), (2, 0), (0, 0), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_of_another_shape_are_refused(shape, temperature):
    with pytest.raises(ValueError, match=r"sample: logits must have shape \[B, V_vocab\]"):
        sample(torch.zeros(shape), temperature)
    with pytest.raises(TypeError, match="sample: logits must be a Tensor, got numpy.ndarray"):
        sample(np.zeros(shape), temperature)


def test_sampling_leaves_the_logits_alone():
    logits = torch.tensor([LOGITS])
    sample(logits, 0.5, top_k=2)
    assert logits.tolist() == torch.tensor([LOGITS]).tolist()


# --- the cache --------------------------------------------------------------------------------------------------------------

def keys(B=2, Hkv=3, T=1, Dh=4, dtype=torch.float32):
    return torch.randn(B, Hkv, T, Dh).to(dtype)


def test_the_cache_holds_what_came():
    layer, parts = KVCache(1, 10).layer(0), [(keys(T=n), keys(T=n)) for n in (3, 1, 1, 5)]
    for i, (k, v) in enumerate(parts, 1):
        all_k, all_v = layer.update(k, v)
        assert torch.equal(all_k, torch.cat([k for k, _ in parts[:i]], dim=2))
        assert torch.equal(all_v, torch.cat([v for _, v in parts[:i]], dim=2))


@pytest.mark.parametrize("new", [
    keys(T=5), keys(B=1), keys(B=3), keys(Hkv=1), keys(Dh=1), keys(Dh=8), keys(dtype=torch.float64), keys(T=9),
], ids=["too many", "B=1", "B=3", "Hkv=1", "Dh=1", "Dh=8", "float64", "far too many"])
def test_what_does_not_fit_changes_nothing(new):
    cache = KVCache(1, 6)
    layer = cache.layer(0)
    layer.update(keys(T=2), keys(T=2))
    before = layer.k.copy(), layer.v.copy()
    for k, v in (new, new), (keys(T=new.shape[2]), new), (new, keys(T=new.shape[2])):
        if new.shape[2] > 4 or k is new or v is new:
            with pytest.raises(ValueError, match="KVCache"):
                layer.update(k, v)
    assert cache.length == 2
    assert (layer.k == before[0]).all() and (layer.v == before[1]).all()


def test_keys_and_values_of_two_lengths_are_refused():
    with pytest.raises(ValueError, match="KVCache"):
        KVCache(1, 6).layer(0).update(keys(T=2), keys(T=1))


def test_a_model_that_overflows_its_cache_changes_no_layer():
    gpt, cache = model(), KVCache(2, 4)
    with no_grad():
        gpt(ids(1, 3), cache=cache)
        before = [layer.k.copy() for layer in cache.layers]
        with pytest.raises(ValueError, match="capacity of 4"):
            gpt(ids(1, 2), cache=cache)
    assert cache.length == 3
    assert all((layer.k == k).all() for layer, k in zip(cache.layers, before))


def test_bytes_are_those_of_the_formula():
    """2 · L · B · capacity · Hkv · Dh · itemsize (guide 9.8), from the first token to the last."""
    gpt, cache = model(), KVCache(2, T_MAX)
    assert cache.nbytes == 0
    with no_grad():
        for n in 1, 4, 7:
            gpt(ids(3, n), cache=cache)
            assert cache.nbytes == 2 * 2 * 3 * T_MAX * 4 * 4 * 8
    cache.reset()
    assert cache.length == 0 and cache.nbytes > 0


def test_a_cache_can_be_used_again():
    gpt, cache, first, second = model(), KVCache(2, T_MAX), ids(2, 9), ids(2, 4)
    with no_grad():
        gpt(first, cache=cache)
        cache.reset()
        assert torch.allclose(gpt(second, cache=cache)[0], gpt(second)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("where", ["attention", "ffn"])
@pytest.mark.parametrize("read_before", [0, 3])
def test_an_interrupted_pass_leaves_no_trace(where, read_before):
    """Wherever in the last layer it breaks off: the cache holds what it held, and the next pass is right."""
    gpt, cache, tokens = model(), KVCache(2, T_MAX), ids(1, 6)
    part = getattr(gpt.blocks[1], where)
    with no_grad():
        gpt(tokens[:, :read_before], cache=cache)
        forward, part.forward = part.forward, lambda *args, **kwargs: 1 / 0
        with pytest.raises(ZeroDivisionError):
            gpt(ids(1, 2), cache=cache)
        part.forward = forward
        assert cache.length == read_before
        assert torch.allclose(gpt(tokens[:, read_before:], cache=cache)[0], gpt(tokens)[0][:, read_before:], rtol=0, atol=1e-12)


def test_layers_that_were_filled_one_by_one_and_disagree_are_noticed():
    gpt, cache = model(), KVCache(2, T_MAX)
    cache.layer(0).update(keys(T=3), keys(T=3))
    with no_grad(), pytest.raises(RuntimeError, match="did not reach all of them"):
        gpt(ids(2, 1), cache=cache)
    cache.reset()
    assert cache.length == 0


def test_gradients_through_a_cache_are_refused():
    with pytest.raises(RuntimeError, match="no_grad"):
        model()(ids(1, 2), cache=KVCache(2, T_MAX))


@pytest.mark.parametrize("sizes", [(0, 4), (2, 0), (-1, 4), (2, -1)])
def test_a_cache_of_no_size_is_refused(sizes):
    with pytest.raises(ValueError, match="KVCache"):
        KVCache(*sizes)


@pytest.mark.parametrize("sizes", [(1, 2.5), (1.0, 2), ("1", 2), (1, None), (True, 2)])
def test_sizes_of_a_cache_are_whole_numbers(sizes):
    with pytest.raises(TypeError, match="KVCache: .* must be an integer"):
        KVCache(*sizes)


@pytest.mark.parametrize("cache", [KVCache(2, T_MAX).layer(0), [], [None, None], (), True, KVCache], ids=lambda cache: type(cache).__name__)
def test_what_is_no_cache_of_all_layers_is_refused(cache):
    with no_grad(), pytest.raises((TypeError, ValueError), match="KVCache"):
        model()(ids(1, 2), cache=cache)


@both_norms
def test_no_new_tokens_after_cached_ones(norm_first):
    gpt, cache = model(norm_first), KVCache(2, T_MAX)
    with no_grad():
        gpt(ids(2, 3), valid_tokens=torch.ones(2, 3).bool(), cache=cache)
        assert gpt(ids(2, 0), valid_tokens=torch.ones(2, 3).bool(), cache=cache)[0].shape == (2, 0, V_VOCAB)
    assert cache.length == 3
