"""MiniGPT: the guide's printed numbers, padding, causality, the tied head, and what it refuses."""
import pytest

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.autograd import no_grad
from tinygrad_tf.generation import KVCache
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.nn.positions import InputEmbedding

T_MAX, V_VOCAB = 12, 20


def model(norm_first=False, dropout=0.0, num_layers=2):
    """A small model in float64, whose weights are large enough for every token to matter."""
    gpt = MiniGPT(V_VOCAB, T_MAX, dim=16, num_heads=4, hidden_dim=32, num_layers=num_layers, dropout=dropout, norm_first=norm_first)
    with no_grad():
        for p in gpt.parameters():
            p.mul_(10.0) if p.ndim > 1 else p.add_(0.1 * torch.randn(p.shape))
    return gpt.double().eval()


def ids(*shape):
    return torch.randint(0, V_VOCAB, shape)


both_norms = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])


def close(a, b, tolerance=1e-12):
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.host("dropout on a GPU has a stream of its own")
def test_the_numbers_that_the_guide_prints():
    """Guide 13.3: one training step from seed 0, with dropout. Initial weights, dropout masks and formulas all take part."""
    torch.manual_seed(0)
    gpt = MiniGPT(vocab_size=100, max_seq_len=32, dim=24, num_heads=4, hidden_dim=96, num_layers=2, dropout=0.1)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-4)
    tokens = torch.randint(0, 100, (4, 9))
    logits, loss = gpt(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    norm = nn.utils.clip_grad_norm_(gpt.parameters(), max_norm=1.0)
    optimizer.step()
    assert logits.shape == (4, 8, 100)
    assert loss.item() == pytest.approx(4.616761684417725, abs=2e-6)
    assert norm.item() == pytest.approx(1.3932006359100342, abs=2e-6)


@both_norms
def test_padding_on_either_side_changes_nothing(norm_first):
    gpt, tokens, length = model(norm_first), ids(1, 5), 8
    expected, _ = gpt(tokens)
    for pad_id in 0, 7:
        pad = torch.full((1, length - 5), pad_id)
        valid, invalid = torch.ones(1, 5, dtype=torch.bool), torch.zeros(1, length - 5, dtype=torch.bool)
        left, _ = gpt(torch.cat([pad, tokens], dim=1), valid_tokens=torch.cat([invalid, valid], dim=1))
        right, _ = gpt(torch.cat([tokens, pad], dim=1), valid_tokens=torch.cat([valid, invalid], dim=1))
        assert close(left[:, -5:], expected) and close(right[:, :5], expected)


@both_norms
def test_padded_targets_do_not_count(norm_first):
    gpt, tokens, targets = model(norm_first), ids(2, 5), ids(2, 5)
    _, expected = gpt(tokens, targets)
    pad = torch.zeros(2, 3, dtype=torch.int64)
    valid = torch.cat([torch.ones(2, 5), torch.zeros(2, 3)], dim=1).bool()
    _, loss = gpt(torch.cat([tokens, pad], dim=1), torch.cat([targets, pad - 100], dim=1), valid_tokens=valid)
    assert close(loss, expected)


@both_norms
def test_a_later_token_changes_no_earlier_logits(norm_first):
    gpt, tokens = model(norm_first), ids(2, 9)
    before, _ = gpt(tokens)
    for place in range(9):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % V_VOCAB
        after, _ = gpt(changed)
        assert torch.equal(after[:, :place], before[:, :place])
        assert not (after[:, place:] == before[:, place:]).any(dim=-1).any()          # and every later one sees it


@both_norms
def test_the_cache_gives_the_logits_of_the_whole(norm_first):
    """In pieces of every size: past keys, positions and the causal mask fit together."""
    gpt, tokens = model(norm_first), ids(3, T_MAX)
    expected, _ = gpt(tokens)
    for pieces in [1] * 12, [5, 1, 1, 5], [11, 1], [1, 11], [4, 4, 4], [12]:
        cache, logits, seen = KVCache(2, T_MAX), [], 0
        with no_grad():
            for n in pieces:
                logits.append(gpt(tokens[:, seen:seen + n], cache=cache)[0])
                seen += n
                assert cache.length == seen
        assert close(torch.cat(logits, dim=1), expected, 1e-9), pieces


def test_the_cache_works_for_left_padded_rows():
    """Prompts of 5 and 3 tokens, continued together, get the logits that each gets alone."""
    gpt, long, short, more = model(), ids(1, 5), ids(1, 3), ids(2, 4)
    tokens = torch.cat([torch.cat([long, torch.cat([torch.zeros(1, 2, dtype=torch.int64), short], dim=1)]), more], dim=1)
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[1, :2] = False
    cache, logits = KVCache(2, T_MAX), []
    with no_grad():
        for start, stop in (0, 5), (5, 6), (6, 9):
            logits.append(gpt(tokens[:, start:stop], valid_tokens=valid[:, :stop], cache=cache)[0])
        logits = torch.cat(logits, dim=1)
        assert close(logits[0], gpt(torch.cat([long, more[:1]], dim=1))[0][0], 1e-9)
        assert close(logits[1, 2:], gpt(torch.cat([short, more[1:]], dim=1))[0][0], 1e-9)


def padded_rows():
    """tokens [2, 9] and valid_tokens, whose second row has two places of padding at the left."""
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[1, :2] = False
    return ids(2, 9), valid


@pytest.mark.parametrize("later", ["all real", "other padding", "no padding in either row"])
def test_a_cache_remembers_what_was_padding(later):
    """Later tokens must not take for real what was padding when it was read, nor the reverse; a refusal changes nothing."""
    gpt, cache, (tokens, valid) = model(), KVCache(2, T_MAX), padded_rows()
    wrong = valid.clone()
    wrong[:, :2] = torch.tensor([[False, False], [True, False]]) if later == "other padding" else True
    first, second = (valid, wrong) if later != "no padding in either row" else (torch.ones(2, 9, dtype=torch.bool), valid)
    with no_grad():
        gpt(tokens[:, :5], valid_tokens=first[:, :5], cache=cache)
        for start, stop in (5, 6), (5, 8):
            with pytest.raises(ValueError, match="KVCache: valid_tokens says of the 5 cached tokens something else"):
                gpt(tokens[:, start:stop], valid_tokens=second[:, :stop], cache=cache)
        assert cache.length == 5
        logits, _ = gpt(tokens[:, 5:], valid_tokens=first, cache=cache)
        assert close(logits, gpt(tokens, valid_tokens=first)[0][:, 5:], 1e-9)
        cache.reset()
        gpt(tokens[:, :5], cache=cache)
        with pytest.raises(ValueError, match="KVCache: valid_tokens"):
            gpt(tokens[:, 5:6], valid_tokens=valid[:, :6], cache=cache)


@pytest.mark.parametrize("stop", [6, 8])
def test_a_mask_may_speak_of_the_new_tokens_alone(stop):
    """The cache knows by itself what was padding; None: all new tokens are real."""
    gpt, (tokens, valid) = model(), padded_rows()
    with no_grad():
        expected = gpt(tokens[:, :stop], valid_tokens=valid[:, :stop])[0][:, 5:]
        for later in None, valid[:, 5:stop], valid[:, :stop]:
            cache = KVCache(2, T_MAX)
            gpt(tokens[:, :5], valid_tokens=valid[:, :5], cache=cache)
            assert close(gpt(tokens[:, 5:stop], valid_tokens=later, cache=cache)[0], expected, 1e-9)
            assert cache.length == stop and cache.lengths.tolist() == [stop, stop - 2]


def test_masks_that_say_the_same_fit_a_cache():
    """None and all True are one thing; a mask may be of numbers; a caller may reuse its memory; a refused pass leaves no trace."""
    gpt, cache, (tokens, valid) = model(), KVCache(2, T_MAX), padded_rows()
    all_real = torch.ones(2, 9, dtype=torch.bool)
    with no_grad():
        for first, second in (None, all_real), (all_real, None), (valid.float(), valid), (valid, valid):
            first, second = (mask if mask is None else mask[:, :n].clone() for mask, n in ((first, 5), (second, 6)))
            cache.reset()
            gpt(tokens[:, :5], valid_tokens=first, cache=cache)
            if first is not None:
                first.fill_(0)
            with pytest.raises(IndexError):
                gpt(tokens[:, 5:6] + V_VOCAB, valid_tokens=second, cache=cache)
            logits, _ = gpt(tokens[:, 5:6], valid_tokens=second, cache=cache)
            assert close(logits, gpt(tokens[:, :6], valid_tokens=second)[0][:, 5:], 1e-9)


def test_the_head_is_the_embedding():
    gpt = model()
    assert gpt.lm_head.weight is gpt.embedding.token.weight
    names = [name for name, _ in gpt.named_parameters()]
    assert "embedding.token.weight" in names and "lm_head.weight" not in names
    _, loss = gpt(ids(2, 4), torch.full((2, 4), 3))
    loss.backward()
    assert (gpt.lm_head.weight.grad.abs().sum(dim=-1) > 0).all()            # rows of ids that no input holds get the head's part
    copy = MiniGPT(V_VOCAB, T_MAX, 16, 4, 32, 2).double()
    copy.load_state_dict(gpt.state_dict())
    assert copy.lm_head.weight is copy.embedding.token.weight


def test_the_initial_weights():
    """N(0, 0.02²) for matrices and tables, zero for biases, one for the scales of norms (guide 13.2)."""
    gpt = MiniGPT(200, 64, 64, 4, 256, 2)
    for name, p in gpt.named_parameters():
        if p.ndim == 2:
            assert p.std().item() == pytest.approx(0.02, rel=0.1) and abs(p.mean().item()) < 2e-3, name
        else:
            assert (p == (1.0 if "norm" in name and name.endswith("weight") else 0.0)).all(), name


def test_dropout_acts_in_training_only():
    gpt, tokens = model(dropout=0.5), ids(2, 6)
    assert torch.equal(gpt(tokens)[0], gpt(tokens)[0])
    gpt.train()
    assert not torch.equal(gpt(tokens)[0], gpt(tokens)[0])


@both_norms
def test_gradients_reach_every_parameter(norm_first):
    gpt = model(norm_first, dropout=0.1).train()
    _, loss = gpt(ids(3, T_MAX), ids(3, T_MAX))
    loss.backward()
    for name, p in gpt.named_parameters():
        assert p.grad is not None and (p.grad != 0).any(), name


def test_position_ids_replace_the_count():
    gpt, tokens = model(), ids(2, 4)
    counted, _ = gpt(tokens)
    same, _ = gpt(tokens, position_ids=torch.arange(4).expand(2, 4))
    moved, _ = gpt(tokens, position_ids=torch.arange(4).expand(2, 4) + 1)
    assert torch.equal(counted, same) and not close(counted, moved)
    table = InputEmbedding(V_VOCAB, 16, T_MAX)
    assert torch.equal(table(tokens), table.token(tokens) + table.position.weight[:4])


# --- what is refused ------------------------------------------------------------------------------------------------------

def test_targets_without_one_that_counts_are_refused():
    for targets in torch.full((2, 4), -100), ids(2, 3), ids(2, 4, 1), ids(4, 2), ids(8):
        with pytest.raises(ValueError, match="targets"):
            model()(ids(2, 4), targets)
    with pytest.raises(ValueError, match="MiniGPT: targets are all -100"):
        model()(ids(2, 4), torch.full((2, 4), -100))
    for shape in (0, 4), (2, 0), (0, 0):
        with pytest.raises(ValueError, match=r"MiniGPT: a mean over targets needs at least one, got shape \(. *"):
            model()(ids(*shape), ids(*shape))
        assert model()(ids(*shape))[0].shape == (*shape, V_VOCAB)
    mixed = torch.full((2, 4), -100)
    mixed[1, 2] = 5
    assert model()(ids(2, 4), mixed)[1].isfinite()


@pytest.mark.parametrize("target", [V_VOCAB, -1, -101])
def test_targets_outside_the_vocabulary_are_refused(target):
    with pytest.raises(IndexError):
        model()(ids(1, 2), torch.tensor([[3, target]]))


@pytest.mark.parametrize("token", [V_VOCAB, -1, -100])
def test_ids_outside_the_vocabulary_are_refused(token):
    with pytest.raises(IndexError):
        model()(torch.tensor([[3, token]]))


def test_more_positions_than_the_table_has_are_refused():
    gpt, cache = model(), KVCache(2, 100)
    assert gpt(ids(1, T_MAX))[0].shape == (1, T_MAX, V_VOCAB)
    with pytest.raises(ValueError, match=f"{T_MAX + 1} positions .* max_seq_len is {T_MAX}"):
        gpt(ids(1, T_MAX + 1))
    with no_grad():
        gpt(ids(1, T_MAX), cache=cache)
        with pytest.raises(ValueError, match="positions"):
            gpt(ids(1, 1), cache=cache)
    assert cache.length == T_MAX
    for position in T_MAX, -1:
        with pytest.raises(IndexError):
            gpt(ids(1, 2), position_ids=torch.tensor([[0, position]]))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 1)])
def test_ids_of_another_rank_are_refused(shape):
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        model()(ids(*shape))
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        InputEmbedding(V_VOCAB, 16, T_MAX)(ids(*shape))


@pytest.mark.parametrize("argument", ["token_ids", "targets", "valid_tokens", "position_ids"])
@pytest.mark.parametrize("kind", [torch.Tensor.tolist, lambda x: x.cpu().numpy(), lambda _: 3, str], ids=["list", "array", "int", "str"])
def test_what_is_no_tensor_is_refused_by_name(argument, kind):
    with pytest.raises(TypeError, match=f"MiniGPT: {argument} must be a Tensor, got .*; make one with"):
        model()(**{"token_ids": ids(1, 2), argument: kind(ids(1, 2))})


def test_masks_and_positions_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="valid_tokens"):
        model()(ids(2, 4), valid_tokens=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="position_ids"):
        model()(ids(2, 4), position_ids=torch.zeros(2, 3, dtype=torch.int64))
    with no_grad(), pytest.raises(ValueError, match="valid_tokens"):
        cache, gpt = KVCache(2, T_MAX), model()
        gpt(ids(2, 4), cache=cache)
        gpt(ids(2, 1), valid_tokens=torch.ones(2, 2, dtype=torch.bool), cache=cache)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_cache_of_another_depth_is_refused(num_layers):
    cache = KVCache(num_layers, T_MAX)
    with no_grad(), pytest.raises(ValueError, match=f"cache has {num_layers} layers, the model 2"):
        model()(ids(1, 2), cache=cache)
    assert cache.length == 0
