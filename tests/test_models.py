"""The three architectures: who sees whom, padding, the cache, gradients, sizes, and what each refuses."""
import numpy as np
import pytest

import tinygrad_tf as torch
from tinygrad_tf import generation, nn
from tinygrad_tf.generation import KVCache, Sampler, generate, greedy_decode, stream
from tinygrad_tf.models import Decoder, Encoder, EncoderClassifier, EncoderDecoder, MiniGPT

V, T_MAX, C, H, HKV, CFF, L = 20, 12, 16, 4, 2, 24, 2
PAD = 0


def large(model):
    """The model in float64 and eval mode, its weights so large that every token matters."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8.0) if p.ndim > 1 else p.add_(0.1 * torch.randn(p.shape))
    return model.double().eval()


def encoder(norm_first=True):
    return Encoder(V, T_MAX, C, H, CFF, L, dropout=0.0, norm_first=norm_first)


def classifier(pooling="mean"):
    return EncoderClassifier(encoder(), 5, pooling)


def decoder():
    return Decoder(V, T_MAX, C, H, CFF, L, num_kv_heads=HKV)


def minigpt():
    return MiniGPT(V, T_MAX, C, H, CFF, L, dropout=0.0, norm_first=True)


def translator(norm_first=True):
    return EncoderDecoder(V, V + 3, T_MAX, T_MAX - 2, C, H, CFF, L, dropout=0.0, norm_first=norm_first)


def ids(*shape, high=V):
    return torch.randint(1, high, shape)


def close(a, b, tolerance=1e-10):
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def changed(before, after):
    """[T]: True where the outputs [1, T, …] differ."""
    difference = (before - after).abs().reshape(before.shape[0], before.shape[1], -1).amax(dim=-1)
    return (difference[0] > 1e-9).tolist()


def with_another(tokens, place):
    other = tokens.clone()
    other[:, place] = tokens[:, place] % (V - 1) + 1
    return other


def padded(tokens, left=0, right=0):
    """(ids, valid_tokens) with padding on either side."""
    B, T = tokens.shape
    together = torch.cat([torch.full((B, left), PAD), tokens, torch.full((B, right), PAD)], dim=1)
    valid = torch.tensor([[False] * left + [True] * T + [False] * right] * B)
    return together, valid


both_norms = pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
both_sides = pytest.mark.parametrize("left, right", [(3, 0), (0, 3), (2, 1)], ids=["left", "right", "both"])
language_models = pytest.mark.parametrize("make", [minigpt, decoder], ids=["MiniGPT", "Decoder"])


# --- visibility: change one token, and see what moves --------------------------------------------------------------------

@both_norms
@pytest.mark.parametrize("place", [0, 3, 5])
def test_every_state_of_the_encoder_sees_every_token(norm_first, place):
    model, tokens = large(encoder(norm_first)), ids(1, 6)
    assert changed(model(tokens), model(with_another(tokens, place))) == [True] * 6


def test_the_encoder_does_not_see_padding():
    model, tokens = large(encoder()), ids(1, 6)
    valid = torch.tensor([[True, False, True, True, False, True]])
    for place, seen in enumerate(valid[0].tolist()):
        moved = changed(model(tokens, valid), model(with_another(tokens, place), valid))
        assert moved == (valid[0].tolist() if seen else [i == place for i in range(6)])         # padding moves itself alone


@language_models
@pytest.mark.parametrize("place", [0, 3, 5])
def test_a_decoder_sees_the_past_and_never_the_future(make, place):
    model, tokens = large(make()), ids(1, 6)
    assert changed(model(tokens)[0], model(with_another(tokens, place))[0]) == [i >= place for i in range(6)]


@both_norms
@pytest.mark.parametrize("place", [0, 2, 4])
def test_an_encoder_decoder_sees_the_whole_source_and_the_past_of_the_target(norm_first, place):
    model, source, target = large(translator(norm_first)), ids(1, 7), ids(1, 5)
    logits, _ = model(source, target)
    assert changed(logits, model(source, with_another(target, place))[0]) == [i >= place for i in range(5)]
    assert changed(logits, model(with_another(source, place), target)[0]) == [True] * 5


# --- padding changes nothing ------------------------------------------------------------------------------------------------

@both_norms
@both_sides
def test_padding_changes_no_state_of_the_encoder(norm_first, left, right):
    model, tokens = large(encoder(norm_first)), ids(2, 5)
    states = model(*padded(tokens, left, right))
    assert close(states[:, left:left + 5], model(tokens))


@pytest.mark.parametrize("pooling", ["mean", "first"])
@both_sides
def test_padding_changes_no_class(pooling, left, right):
    model, tokens, labels = large(classifier(pooling)), ids(2, 5), torch.tensor([1, 4])
    together, valid = padded(tokens, left, right)
    for found, expected in zip(model(together, labels, valid), model(tokens, labels)):
        assert close(found, expected)


@language_models
@both_sides
def test_padding_changes_no_logits_of_a_decoder(make, left, right):
    model, tokens, targets = large(make()), ids(2, 5), ids(2, 5)
    together, valid = padded(tokens, left, right)
    padded_targets = padded(targets, left, right)[0].masked_fill(~valid, -100)
    logits, loss = model(together, padded_targets, valid_tokens=valid)
    expected, expected_loss = model(tokens, targets)
    assert close(logits[:, left:left + 5], expected) and close(loss, expected_loss)


@both_norms
@both_sides
def test_padding_changes_no_logits_of_an_encoder_decoder(norm_first, left, right):
    model, source, target = large(translator(norm_first)), ids(2, 5), ids(2, 4)
    (long_source, source_valid), (long_target, target_valid) = padded(source, left, right), padded(target, left, right)
    expected, expected_loss = model(source, target, target)
    logits, loss = model(long_source, long_target, long_target.masked_fill(~target_valid, -100), source_valid, target_valid)
    assert close(logits[:, left:left + 4], expected) and close(loss, expected_loss)


def test_pooling_by_hand():
    tokens = ids(2, 5)
    valid = torch.tensor([[True] * 5, [False, True, True, True, False]])
    for pooling, reduce in ("mean", lambda h: h.mean(dim=0)), ("first", lambda h: h[0]):
        model = large(classifier(pooling))
        states = model.encoder(tokens, valid)
        expected = torch.stack([reduce(states[0]), reduce(states[1, 1:4])])
        assert close(model(tokens, valid_tokens=valid)[0], model.head(expected))
    nothing = torch.zeros(2, 5, dtype=torch.bool)
    assert close(model(tokens, valid_tokens=nothing)[0], model.head.bias.expand(2, 5))


# --- cached = uncached ------------------------------------------------------------------------------------------------------

SPLITS = [(5,), (1, 1, 1, 1, 1), (2, 3), (3, 1, 1)]


@language_models
@pytest.mark.parametrize("lengths", SPLITS, ids=str)
@pytest.mark.parametrize("left", [0, 2])
def test_a_decoder_read_in_parts_from_a_cache_is_the_whole(make, lengths, left):
    model, (tokens, valid) = large(make()), padded(ids(2, 5), left)
    cache, parts, start = KVCache(L, T_MAX), [], 0
    with torch.no_grad():
        expected, _ = model(tokens, valid_tokens=valid)
        for length in (left + lengths[0], *lengths[1:]):
            stop = start + length
            parts.append(model(tokens[:, start:stop], valid_tokens=valid[:, :stop], cache=cache)[0])
            start = stop
    assert close(torch.cat(parts, dim=1)[:, left:], expected[:, left:])


@both_norms
@pytest.mark.parametrize("lengths", SPLITS, ids=str)
@pytest.mark.parametrize("left", [0, 2])
def test_an_encoder_decoder_read_in_parts_from_a_cache_is_the_whole(norm_first, lengths, left):
    model = large(translator(norm_first))
    (source, source_valid), (target, target_valid) = padded(ids(2, 6), 1, 2), padded(ids(2, 5), left)
    cache, parts, start = KVCache(L, T_MAX), [], 0
    with torch.no_grad():
        encoded = model.encode(source, source_valid)
        expected, weights = model.decode(target, encoded, target_valid, return_weights=True)
        for length in (left + lengths[0], *lengths[1:]):
            stop = start + length
            parts.append(model.decode(target[:, start:stop], encoded, target_valid[:, :stop], cache=cache))
            start = stop
    assert close(torch.cat(parts, dim=1)[:, left:], expected[:, left:])
    assert [w.shape for w in weights] == [(2, H, 5 + left, 9)] * L
    for w in weights:                               # each token's look at the source: sums to 1, and none at padding
        assert close(w.sum(dim=-1), torch.ones(2, H, 5 + left, dtype=torch.float64)) and (w[..., ~source_valid[0]] == 0).all()


@language_models
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_generation_with_a_cache_is_generation_without(make, temperature):
    """Also beyond the context, where the window slides."""
    model, prompt = large(make()), ids(2, 4)
    cached, uncached = (generate(model, prompt, 2 * T_MAX, temperature=temperature, use_cache=use_cache,
                                 generator=torch.Generator().manual_seed(3)) for use_cache in (True, False))
    assert cached.shape == (2, 4 + 2 * T_MAX) and torch.equal(cached, uncached)
    assert [t.shape for t in stream(model, prompt, 2)] == [(2, 1)] * 2


@both_norms
def test_greedy_decoding_with_a_cache_is_decoding_without_and_alone(norm_first):
    model, (source, valid) = large(translator(norm_first)), padded(ids(4, 6), 0, 2)
    options = {"bos_id": 1, "eos_id": 2, "max_new_tokens": T_MAX - 2}
    cached, uncached = (greedy_decode(model, source, source_valid=valid, use_cache=use_cache, **options) for use_cache in (True, False))
    assert torch.equal(cached, uncached)
    for row in range(4):
        alone = greedy_decode(model, source[row:row + 1, :6], **options)
        assert torch.equal(alone, cached[row:row + 1, :alone.shape[1]])


def test_greedy_decoding_takes_the_likeliest_and_stops_at_the_end():
    model, source = large(translator()), ids(8, 6)
    first = model(source, torch.full((8, 1), 1))[0][:, 0].argmax(dim=-1)
    second = model(source, torch.stack([torch.full((8,), 1), first], dim=1))[0][:, 1].argmax(dim=-1)
    row = (first != second).tolist().index(True)    # this row ends at once, and would go on with something else
    eos = first[row].item()
    found = greedy_decode(model, source, bos_id=1, eos_id=eos, max_new_tokens=4)
    assert found.shape == (8, 4) and torch.equal(found[:, 0], first) and (found[row] == eos).all()
    going_on = first != eos
    assert torch.equal(found[going_on, 1], second[going_on])
    assert greedy_decode(model, source[row:row + 1], 1, eos, 4).shape == (1, 1)
    assert greedy_decode(model, source, 1, eos, 0).shape == (8, 0)
    model.train()
    assert torch.equal(greedy_decode(model, source, 1, eos, 4), found) and model.training       # its mode is given back
    for wrong in -1, T_MAX - 1:
        with pytest.raises(ValueError, match=f"between 0 and the model's max_seq_len={T_MAX - 2}, got {wrong}"):
            greedy_decode(model, source, 1, 2, wrong)


def lockstep(model, source, bos_id, eos_id, max_new_tokens, source_valid=None):
    """greedy_decode by its definition: every row is read anew at each step, to the end, together with all others."""
    written, ended = torch.full((len(source), 1), bos_id), torch.zeros(len(source), 1, dtype=torch.bool)
    with torch.no_grad():
        while written.shape[1] <= max_new_tokens and not ended.all():
            best = model(source, written, source_valid=source_valid)[0][:, -1].argmax(dim=-1, keepdim=True).masked_fill(ended, eos_id)
            written, ended = torch.cat([written, best], dim=1), ended | (best == eos_id)
    return written[:, 1:]


CACHES = {
    "no cache": {"use_cache": False},
    "default": {},
    "KVCache": KVCache,
    "concatenating": lambda layers, T: generation.ConcatKVCache(layers),
    "paged": lambda layers, T: generation.PagedKVCache(layers, 60, block_size=3),
    "a small pool": lambda layers, T: generation.PagedKVCache(layers, 7, block_size=2),
    "rolling": generation.RollingKVCache,
    "8 bits": generation.QuantizedKVCache,
}


@pytest.mark.parametrize("how", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("n", [1, 4, T_MAX - 2])
def test_greedy_decoding_is_its_definition_with_every_cache(how, n):
    """Rows end at different steps and leave the cache, which is empty afterwards; in a small pool they take turns."""
    model, (source, valid) = large(translator()), padded(ids(6, 6), 0, 2)
    first = model(source, torch.full((6, 1), 1), source_valid=valid)[0][:, 0].argmax(dim=-1).tolist()
    eos = max(first, key=lambda token: (first.count(token) < 6, first.count(token)))               # ends some rows at once, not all
    assert 0 < first.count(eos) < 6
    options = how if isinstance(how, dict) else {"cache": how(L, T_MAX)}
    found = greedy_decode(model, source, 1, eos, n, valid, **options)
    expected = lockstep(model, source, 1, eos, n, valid)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert how is generation.QuantizedKVCache or torch.equal(found, expected)
    assert "cache" not in options or options["cache"].length == 0


def test_greedy_decoding_refuses_a_cache_that_is_too_short():
    """Not a text that ends early, as if the model had written <eos>."""
    with pytest.raises(ValueError, match="places for 4 tokens of a row, and max_new_tokens=5"):
        greedy_decode(translator(), ids(2, 4), 1, 2, 5, cache=KVCache(L, 4))
    assert greedy_decode(large(translator()), ids(2, 4), 1, 2, 4, cache=KVCache(L, 4)).shape[1] == 4
    with pytest.raises(TypeError, match="a cache of tinygrad_tf.generation"):
        greedy_decode(translator(), ids(2, 4), 1, 2, 4, cache=[])


def test_decoding_with_a_sampler():
    """Row i draws with seed + i, whoever is beside it; temperature 0 is greedy, and a penalty changes what is written."""
    model, source = large(translator()), ids(4, 6)
    drawn = greedy_decode(model, source, 1, 2, 8, sampler=Sampler(temperature=5.0), seed=3)
    assert torch.equal(drawn, greedy_decode(model, source, 1, 2, 8, sampler=Sampler(temperature=5.0), seed=3, use_cache=False))
    for row in range(4):
        alone = greedy_decode(model, source[row:row + 1], 1, 2, 8, sampler=Sampler(temperature=5.0), seed=3 + row)
        assert torch.equal(alone, drawn[row:row + 1, :alone.shape[1]])
    greedy = greedy_decode(model, source, 1, 2, 8)
    assert torch.equal(greedy_decode(model, source, 1, 2, 8, sampler=Sampler(temperature=0)), greedy) and not torch.equal(drawn, greedy)
    new = greedy_decode(model, source, 1, 2, 8, sampler=Sampler(temperature=0, presence_penalty=1e6)).tolist()
    assert all(len(set(row)) == len(row) for row in new)                            # nothing twice


@pytest.mark.parametrize("name", ["bos_id", "eos_id"])
def test_greedy_decoding_takes_ids_of_the_target_vocabulary(name):
    model = translator()
    options = {"bos_id": 1, "eos_id": 2, "max_new_tokens": 3}
    greedy_decode(model, ids(1, 4), **{**options, name: V + 2})
    for wrong in -1, V + 3, 99:
        with pytest.raises(ValueError, match=f"{name} must be one of the {V + 3} ids .* got {wrong}"):
            greedy_decode(model, ids(1, 4), **{**options, name: wrong})
    for wrong in 1.5, 1.0, True, None, "1", torch.tensor(1):
        with pytest.raises(TypeError, match=f"{name} must be an integer"):
            greedy_decode(model, ids(1, 4), **{**options, name: wrong})


def test_keys_and_values_of_a_source_are_projected_once():
    model, source, target = large(translator()), ids(1, 6), ids(1, 5)
    with torch.no_grad():
        encoded = model.encode(source)
        for block in model.blocks:                  # whoever projects again now gets zeros
            block.cross_attention.k_proj.weight.zero_()
            block.cross_attention.v_proj.weight.zero_()
        assert not close(model.decode(target, encoded), model.decode(target, model.encode(source)))
        assert all(k.shape == v.shape == (1, H, 6, C // H) for k, v in encoded.keys_values)


# --- gradients, sizes, state --------------------------------------------------------------------------------------------------

ATTENTION, FFN, NORM = 4 * C * C + 4 * C, 2 * C * CFF + CFF + C, 2 * C          # with biases; a gain and a shift
GQA, SWIGLU = 2 * C * C + 2 * C * (C // H * HKV), 3 * C * CFF                   # without
MODELS = {
    "encoder": (encoder, (V + T_MAX) * C + L * (ATTENTION + FFN + 2 * NORM) + NORM),
    "encoder, post-norm": (lambda: encoder(False), (V + T_MAX) * C + L * (ATTENTION + FFN + 2 * NORM)),
    "classifier": (classifier, (V + T_MAX) * C + L * (ATTENTION + FFN + 2 * NORM) + NORM + 5 * C + 5),
    "decoder": (decoder, V * C + L * (GQA + SWIGLU + 2 * C) + C),
    "encoder-decoder": (translator, (V + T_MAX + V + 3 + T_MAX - 2) * C + L * (3 * ATTENTION + 2 * FFN + 5 * NORM) + 2 * NORM),
}
every_model = pytest.mark.parametrize("make, parameters", MODELS.values(), ids=MODELS)


def loss_of(model):
    """A loss in which every token and every row of every table takes part."""
    everything = torch.arange(V).repeat(2)[:3 * T_MAX].reshape(3, T_MAX)
    if isinstance(model, Encoder):
        return (model(everything) * torch.randn(3, T_MAX, C)).sum()
    if isinstance(model, EncoderClassifier):
        return model(everything, torch.tensor([0, 4, 2]))[1]
    if isinstance(model, EncoderDecoder):
        target = torch.arange(V + 3).repeat(2)[:3 * (T_MAX - 2)].reshape(3, T_MAX - 2)
        return model(everything, target, target.roll(-1, 1))[1]
    return model(everything, everything.roll(-1, 1))[1]


@every_model
def test_a_gradient_reaches_every_parameter(make, parameters):
    model = make()
    loss_of(model).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and (p.grad != 0).any(), name


@every_model
def test_the_number_of_parameters(make, parameters):
    """4C² + 4C for attention with biases, 2·C·Cff + Cff + C for the feed-forward network, 2C for a LayerNorm (guide 6.1)."""
    assert sum(p.numel() for p in make().parameters()) == parameters


@every_model
def test_the_state_makes_an_equal_model(make, parameters):
    torch.manual_seed(1)
    model, copy = make(), make()
    copy.load_state_dict(model.state_dict())
    torch.manual_seed(2)
    expected = loss_of(model.eval())
    torch.manual_seed(2)
    assert torch.equal(loss_of(copy.eval()), expected)


@every_model
def test_the_first_loss_is_that_of_guessing(make, parameters):
    """Small first weights make all outcomes about equally likely: ln of their number."""
    model = make()
    if not isinstance(model, Encoder):
        outcomes = {EncoderClassifier: 5, EncoderDecoder: V + 3, Decoder: V}[type(model)]
        assert loss_of(model).item() == pytest.approx(np.log(outcomes), rel=0.05)


def test_tokens_of_another_kind():
    """Rows of an image instead of ids: the embedding is a module of one's own."""
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.projection = nn.Linear(8, C)

        def forward(self, rows, position_ids):
            return self.projection(rows) + position_ids[..., None]
    model = EncoderClassifier(Encoder(None, 8, C, H, CFF, L, embedding=Rows()), 5)
    logits, loss = model(torch.randn(3, 8, 8), torch.tensor([0, 1, 2]))
    assert logits.shape == (3, 5) and loss.isfinite()


# --- what is refused ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("make", [encoder, classifier, decoder, minigpt])
def test_ids_are_needed(make):
    for no_ids in None, [[1, 2]]:
        with pytest.raises(TypeError, match="(tokens|token_ids) must be a Tensor"):
            make()(no_ids)


def test_what_the_encoder_refuses():
    model = encoder()
    for wrong in ids(3), torch.tensor(1), ids(2, 3, 2):
        with pytest.raises(ValueError, match=r"\[B, T\]"):
            model(wrong)
    with pytest.raises(ValueError, match=f"{T_MAX + 1} positions are needed but max_seq_len is {T_MAX}"):
        model(ids(1, T_MAX + 1))
    with pytest.raises(ValueError, match="valid_tokens"):
        model(ids(2, 4), torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(IndexError):
        model(torch.tensor([[1, V]]))
    with pytest.raises(ValueError, match='"mean" or "first", got \'max\''):
        EncoderClassifier(model, 3, "max")


def test_what_the_decoder_refuses():
    model = decoder()
    with pytest.raises(ValueError, match="Decoder: token_ids"):
        model(ids(3))
    with pytest.raises(ValueError, match=f"Decoder: {T_MAX + 1} positions"):
        model(ids(1, T_MAX + 1))
    with pytest.raises(ValueError, match="Decoder: the cache has 1 layers, the model 2"):
        model(ids(1, 2), cache=KVCache(1, T_MAX))
    with pytest.raises(ValueError, match="Decoder: targets"):
        model(ids(1, 2), torch.full((1, 2), -100))
    for dim, num_heads in (12, 5), (12, 0), (12, -3), (6, 2):
        with pytest.raises(ValueError, match="num_heads|even"):
            Decoder(V, T_MAX, dim, num_heads, CFF, L)


def test_what_the_encoder_decoder_refuses():
    model, source, target = translator(), ids(2, 5), ids(2, 4)
    with pytest.raises(ValueError, match="Encoder: tokens"):
        model(ids(5), target)
    with pytest.raises(ValueError, match="EncoderDecoder: token_ids"):
        model(source, ids(4))
    with pytest.raises(ValueError, match="batch of 3, got a batch of 2"):
        model(source, ids(3, 4))
    with pytest.raises(ValueError, match="what encode"):
        model.decode(target, source)
    for layers in L - 1, L + 1, 0:
        other = EncoderDecoder(V, V + 3, T_MAX, T_MAX - 2, C, H, CFF, layers)
        with pytest.raises(ValueError, match=f"for {layers} layers, the decoder has {L}"):
            model.decode(target, other.encode(source))
    for cache in KVCache(L, T_MAX).layer(0), [], [None] * L:
        with torch.no_grad(), pytest.raises(TypeError, match="must be a generation.KVCache"):
            model.decode(target, model.encode(source), cache=cache)
    with pytest.raises(ValueError, match="targets"):
        model(source, target, ids(2, 3))
    with pytest.raises(ValueError, match="valid_tokens"):
        model(source, target, None, torch.ones(2, 4, dtype=torch.bool))


def test_only_differences_of_rotary_positions_matter():
    model, tokens = large(decoder()), ids(2, 5)
    logits, _ = model(tokens)
    for moved in torch.arange(5) + 7, torch.arange(5).expand(2, 5) + torch.tensor([[3], [900]]):
        assert close(model(tokens, position_ids=moved)[0], logits, 1e-8)
    assert not close(model(tokens, position_ids=2 * torch.arange(5))[0], logits, 1e-3)


def test_fewer_key_heads_make_a_smaller_cache():
    bytes_of = {}
    for num_kv_heads in (None, 2, 1):
        model, cache = Decoder(V, T_MAX, C, H, CFF, L, num_kv_heads=num_kv_heads), KVCache(L, T_MAX)
        with torch.no_grad():
            model(ids(3, 2), cache=cache)
        bytes_of[num_kv_heads] = cache.nbytes
    assert bytes_of == {None: 2 * L * 3 * T_MAX * C * 4, 2: 2 * L * 3 * T_MAX * C * 2, 1: 2 * L * 3 * T_MAX * C}     # guide 9.8
