"""Evaluation: sums over tokens, where means of means mislead; bits per byte, standard errors, choices, samples."""
import math

import numpy as np
import pytest
from device import host

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.data import ByteTokenizer, CharTokenizer, TokenFile, evaluation_batches, pack_sequences, pad_sequences
from tinygrad_tf.generation import Sampler, complete
from tinygrad_tf.models import Decoder, MiniGPT
from tinygrad_tf.training import Evaluation, evaluate, evaluate_ids, evaluate_text, multiple_choice, perplexity, summed_loss, write_samples
from tinygrad_tf.training.evaluation import log_likelihoods, token_losses

V, T, C = 30, 8, 16
IDS = np.random.default_rng(0).integers(0, V, 100)


def model(make=MiniGPT, vocab_size=V):
    """In float64, and far from uniform."""
    found = make(vocab_size, T, C, 4, 24, 2, dropout=0.0).double()
    with torch.no_grad():
        for p in found.parameters():
            p.add_(0.4 * torch.randn(p.shape, dtype=torch.float64))
    return found


class Uniform(nn.Module):
    """All tokens equally likely: ln V a token."""

    def __init__(self, vocab_size):
        super().__init__()
        self.max_seq_len, self.scores = T, nn.Parameter(torch.zeros(vocab_size, dtype=torch.float64))

    def forward(self, token_ids, targets=None, valid_tokens=None):
        return self.scores.expand(*token_ids.shape, -1), None


def by_hand(found, ids, context=T):
    """−ln p of every token but the first, one window at a time, from the logits."""
    nats = []
    for start in range(0, len(ids) - 1, context):
        part = ids[start:start + context + 1]
        with torch.no_grad():
            logits = host(found(torch.tensor(part[None, :-1]))[0])[0]
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        nats.append(-log_p[np.arange(len(part) - 1), part[1:]])
    return nats


# --- sums -------------------------------------------------------------------------------------------------------------------

TEXTS = [[3, 7, 1, 9, 4, 2], [5, 2], [8, 8, 2], [6, 4, 4, 2], [1, 2, 3, 4, 5, 6, 7, 2]]


def gradients(found):
    taken = [host(p.grad) for p in found.parameters()]
    found.zero_grad(set_to_none=True)
    return taken


@pytest.mark.parametrize("make", [MiniGPT, Decoder])
@pytest.mark.parametrize("parts", [[[0, 1, 2, 3, 4]], [[0], [1], [2], [3], [4]], [[4], [1, 2], [0, 3]]], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_in_parts_weighted_by_tokens_is_the_whole_batch(make, parts, side):
    """Sums and counts of unequal parts: the loss and the gradients of the whole."""
    found = model(make)
    whole = pad_sequences(TEXTS, 0, side)
    _, loss = found(**whole)
    loss.backward()
    expected, count, total = gradients(found), whole.num_targets, 0.0
    for part in parts:
        nats, tokens = summed_loss(found, pad_sequences([TEXTS[i] for i in part], 0, side))
        assert tokens == sum(len(TEXTS[i]) - 1 for i in part)
        (nats / count).backward()
        total += nats.item() / count
    np.testing.assert_allclose(total, loss.item(), rtol=1e-12)
    for a, b in zip(gradients(found), expected):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_the_mean_of_means_is_another_number():
    """The counter-example: a batch of 7 targets and one of 1 weigh the same in it, and a token does not."""
    found = model()
    batches = [pad_sequences([TEXTS[4]], 0), pad_sequences([TEXTS[1]], 0)]
    means = [found(**batch)[1].item() for batch in batches]
    sums = [summed_loss(found, batch) for batch in batches]
    weighted = sum(nats.item() for nats, _ in sums) / sum(tokens for _, tokens in sums)
    assert weighted == pytest.approx((7 * means[0] + 1 * means[1]) / 8, rel=1e-12)
    assert abs(weighted - np.mean(means)) > 0.1
    single = [summed_loss(found, pad_sequences([text], 0)) for text in (TEXTS[4], TEXTS[1])]
    assert weighted == pytest.approx(sum(n.item() for n, _ in single) / 8, rel=1e-12)


def test_a_part_in_which_nothing_counts_adds_nothing():
    found, batch = model(), pad_sequences(TEXTS, 0)
    batch.targets[:] = -100
    nats, tokens = summed_loss(found, batch)
    nats.backward()
    assert (nats.item(), tokens) == (0.0, 0) and all((g == 0).all() for g in gradients(found))


def test_the_losses_of_tokens_are_those_of_the_texts_alone():
    found = model()
    packed = pack_sequences(TEXTS, T)
    losses = host(token_losses(found, packed))
    assert (losses[host(packed.targets) == -100] == 0).all()
    for p in packed.pieces:
        expected = by_hand(found, np.array(TEXTS[p.text]))[0]
        np.testing.assert_allclose(losses[p.row, p.column:p.column + p.length - 1], expected, rtol=1e-10)
    named = {name: packed[name] for name in packed.keys()}
    assert (host(token_losses(found, named)) == losses).all()


# --- a text -------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("batch_size", [1, 5, 64])
@pytest.mark.parametrize("length", [2, 8, 9, 10, 100])
def test_the_evaluation_of_ids_is_the_mean_over_all_tokens(length, batch_size):
    found, ids = model(), IDS[:length]
    nats = by_hand(found, ids)
    result = evaluate_ids(found, ids, T, batch_size)
    assert (result.tokens, result.windows) == (length - 1, len(nats))
    assert result.loss == pytest.approx(np.concatenate(nats).mean(), rel=1e-12) == evaluate(found, ids, T, batch_size)
    assert result.nats == pytest.approx(np.concatenate(nats).sum(), rel=1e-12)
    assert result.perplexity == perplexity(result.loss) and result.bits_per_byte is None


def test_ids_in_a_file_are_evaluated_where_they_lie(tmp_path):
    tokenizer, found = ByteTokenizer(), model(vocab_size=260)
    file = TokenFile.write(tmp_path / "a", [tokenizer.encode("the cat sat on the mat")], tokenizer)
    assert evaluate_ids(found, file, T) == evaluate_ids(found, np.array(file.ids), T)
    assert evaluate(found, file, T) == evaluate(found, file.ids.tolist(), T)


def test_batches_weigh_what_their_tokens_weigh():
    """The last window is short: the mean of the batches' means is not the mean over tokens."""
    found, ids = model(), IDS[:10]
    means = [found(torch.tensor(inputs), torch.tensor(targets))[1].item() for inputs, targets in evaluation_batches(ids, T, 1)]
    assert len(means) == 2 and evaluate_ids(found, ids, T).loss == pytest.approx((8 * means[0] + means[1]) / 9, rel=1e-12)
    assert abs(np.mean(means) - evaluate(found, ids, T)) > 0.05


def test_the_standard_error_by_hand():
    result = Evaluation.of_windows([10.0, 14.0, 12.0, 16.0], [8, 8, 8, 8])
    assert result.standard_error == pytest.approx(np.std([10 / 8, 14 / 8, 12 / 8, 16 / 8], ddof=1) / 2, rel=1e-12)     # equal windows
    assert Evaluation.of_windows([8.0, 16.0, 2.0], [8, 16, 2]).standard_error == 0                                     # equal losses
    unequal = Evaluation.of_windows([10.0, 3.0], [8, 1])
    assert unequal.standard_error == pytest.approx(math.sqrt(2 * ((10 - 8 * 13 / 9)**2 + (3 - 13 / 9)**2)) / 9, rel=1e-12)
    assert math.isnan(Evaluation.of_windows([5.0], [3]).standard_error)


def test_the_standard_error_is_the_spread_of_the_loss():
    """Of 400 texts of 25 windows, the losses spread as the standard errors say, within a fifth."""
    rng = np.random.default_rng(0)
    tokens = np.array([8] * 24 + [3])
    results = [Evaluation.of_windows(rng.gamma(2, 1, 25) * tokens, tokens) for _ in range(400)]
    assert np.mean([r.standard_error for r in results]) == pytest.approx(np.std([r.loss for r in results]), rel=0.2)


def test_bits_per_byte_do_not_depend_on_the_tokenizer():
    """A byte costs as much, whether it is a token or a part of one; bits per token do differ."""
    text = "né " * 40                                           # 3 characters, 4 bytes
    bytes_, chars = ByteTokenizer(), CharTokenizer.from_text(text)
    in_bytes, in_chars = evaluate_text(Uniform(260), bytes_, text), evaluate_text(Uniform(chars.vocab_size), chars, text)
    assert (in_bytes.tokens, in_bytes.num_bytes, in_chars.tokens, in_chars.num_bytes) == (159, 159, 119, 159)
    assert in_bytes.bits_per_byte == pytest.approx(math.log2(260), rel=1e-12)
    assert in_chars.bits_per_byte == pytest.approx(math.log2(chars.vocab_size) * 119 / 159, rel=1e-12)
    assert in_bytes.perplexity == pytest.approx(260) and in_chars.perplexity == pytest.approx(chars.vocab_size)
    halves = Evaluation(nats=200 * math.log(16), tokens=200, windows=1, standard_error=0.0, num_bytes=100)      # half a byte each
    wholes = Evaluation(nats=100 * math.log(256), tokens=100, windows=1, standard_error=0.0, num_bytes=100)
    assert halves.bits_per_byte == pytest.approx(8) == wholes.bits_per_byte and halves.perplexity < wholes.perplexity / 15
    assert str(halves) == "2.7726 ± 0.0000 nats a token over 200 tokens (perplexity 16.00), 8.0000 bits per byte"
    assert str(evaluate_ids(Uniform(V), IDS[:2], T)).endswith("over 1 tokens (perplexity 30.00)")


def test_the_bytes_of_the_first_token_are_not_predicted():
    chars = CharTokenizer.from_text("éa")
    assert evaluate_text(Uniform(chars.vocab_size), chars, "éa").num_bytes == 1
    assert evaluate_text(Uniform(chars.vocab_size), chars, "aé").num_bytes == 2
    assert evaluate_text(Uniform(260), ByteTokenizer(), "éa").num_bytes == 2                # the first token is half of the é


def test_a_text_with_unknown_characters_has_no_bits_per_byte():
    chars = CharTokenizer.from_text("abc")
    result = evaluate_text(Uniform(chars.vocab_size), chars, "abcabd")
    assert result.bits_per_byte is None and result.loss == pytest.approx(math.log(7))


def test_the_model_gets_its_modes_back_and_no_graph_is_kept():
    found = model().train()
    for look in (lambda: evaluate_ids(found, IDS, T), lambda: log_likelihoods(found, [1], [[2]]),
                 lambda: write_samples(found, CharTokenizer("abcdefghijklmnopqrstuvwxyz"), ["ab"], 3)):
        look()
        assert all(m.training for m in found.modules()) and all(p.grad is None for p in found.parameters())


# --- multiple choice ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("make", [MiniGPT, Decoder])
def test_log_likelihoods_by_hand(make):
    found, prompt, choices = model(make), [3, 4, 5], [[7], [8, 9, 1, 2], [7, 7]]
    scores = log_likelihoods(found, prompt, choices)
    for score, choice in zip(scores, choices, strict=True):
        nats = by_hand(found, np.array(prompt + choice))[0]
        assert score == pytest.approx(-nats[len(prompt) - 1:].sum(), rel=1e-10)
        assert score == pytest.approx(log_likelihoods(found, prompt, [choice])[0], rel=1e-10)       # the others change nothing
    one_token = np.exp(log_likelihoods(found, [3], [[i] for i in range(V)]))
    assert one_token.sum() == pytest.approx(1, rel=1e-10)                                           # all there are


def test_length_is_a_handicap_unless_it_is_divided_by():
    """A model of which we know the probabilities: every token of a choice costs the same."""
    uniform = Uniform(V)
    questions = [([1], [[2, 3], [4]], 0), ([1], [[2], [3, 4, 5]], 0), ([1], [[2, 3], [4, 5]], 1)]
    plain = multiple_choice(uniform, questions)
    assert plain.chosen == [1, 0, 0] and plain.accuracy == 1 / 3                    # the shorter one; of equals the first
    assert plain.standard_error == pytest.approx(math.sqrt(1 / 3 * 2 / 3 / 3))
    per_token = multiple_choice(uniform, questions, length_of=len)
    assert per_token.chosen == [0, 0, 0] and per_token.accuracy == 2 / 3
    per_thing = multiple_choice(uniform, questions, length_of=lambda ids: 10 if 3 in ids else 1)
    assert per_thing.chosen == [0, 1, 0]


def test_the_likeliest_choice_is_taken():
    found = model()
    order = np.argsort(log_likelihoods(found, [3, 4], [[i] for i in range(V)]))
    best, worst = int(order[-1]), int(order[0])
    assert multiple_choice(found, [([3, 4], [[worst], [best]], 1), ([3, 4], [[best], [worst]], 1)])[::2] == (0.5, [1, 0])


@pytest.mark.parametrize("prompt, choices", [([], [[1]]), ([1], []), ([1], [[1], []])])
def test_choices_that_nothing_predicts_are_refused(prompt, choices):
    with pytest.raises(ValueError, match="log_likelihoods: a prompt, .* and choices need a token each"):
        log_likelihoods(model(), prompt, choices)


def test_questions_that_are_none_are_refused():
    with pytest.raises(ValueError, match="there are no questions"):
        multiple_choice(model(), [])
    for answer in -1, 2:
        with pytest.raises(ValueError, match=rf"question 0 has 2 choices, and answer {answer} \(int\) is none of them"):
            multiple_choice(model(), [([1], [[2], [3]], answer)])
    with pytest.raises(TypeError, match="sequence 0: token ids must be integers, got float64"):
        multiple_choice(model(), [([1], [[2.5], [3]], 0)])
    with pytest.raises(ValueError, match="9 positions are needed but max_seq_len is 8"):
        multiple_choice(model(), [([1], [[2], [3] * 9], 0)])


# --- samples ------------------------------------------------------------------------------------------------------------------

def test_samples_are_what_the_generator_writes():
    tokenizer, found = CharTokenizer("abcdefghijklmnopqrstuvwxyz"), model()
    prompts = ["ab", "c", "hello"]
    texts = write_samples(found, tokenizer, prompts, 12, temperature=1.0, seed=3, top_k=5)
    rows = complete(found, prompts, 12, tokenizer=tokenizer, sampler=Sampler(1.0, top_k=5), seed=3)
    assert texts == [row.text for row in rows] and len(texts) == 3 and all(texts)
    assert texts == write_samples(found, tokenizer, prompts, 12, temperature=1.0, seed=3, top_k=5)
    greedy = [row.text for row in complete(found, prompts, 12, tokenizer=tokenizer)]
    assert write_samples(found, tokenizer, prompts, 12, temperature=0) == greedy
