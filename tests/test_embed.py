"""Sentences as vectors: a tiny encoder for the mechanics, and the published one where it is installed."""
import json

import numpy as np
import pytest
from device import host

import tinygrad_tf as torch
from tinygrad_tf import cli
from tinygrad_tf.data import WordPieceTokenizer
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.pretrained import Pretrained, PretrainedError, from_pretrained, save_pretrained
from tinygrad_tf.pretrained.bert import bert
from tinygrad_tf.pretrained.embed import draw, embed, similarities, table
from tinygrad_tf.pretrained.packages import PACKAGES, file_of

minilm = pytest.mark.skipif(file_of(PACKAGES["minilm"]) is None, reason=PACKAGES["minilm"].command)
SENTENCES = [
    "A man is eating food.", "The girl is carrying a baby.", "¿Dónde está la biblioteca?", "x",
    "Stocks fell sharply on Monday; bonds did not.", "The quick brown fox jumps over the lazy dog. " * 3, "I love attention.",
    "你好，世界", "😀 emoji are tokens too", "E = mc²",
    "a-b-c-d", "WHY ARE YOU SHOUTING?", "3.14159 2.71828", "naïve café", "He said \"no\".", "   spaces   ", "\ttabs\nand lines", "s",
    "supercalifragilisticexpialidocious", "To be, or not to be: that is the question."]


@pytest.fixture(scope="module")
def known():
    special = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
    tokenizer = WordPieceTokenizer([*special, *"abcdefgh", *(f"##{c}" for c in "abcdefgh")], {name: i for i, name in enumerate(special)})
    torch.manual_seed(0)
    return Pretrained(bert(tokenizer.vocab_size, 12, 16, 2, 32, 2).eval(), {"model_type": "bert"}, tokenizer)


TEXTS = ["ab cd", "a", "", "abcdefgh abcdefgh", "h h h h h h h h h h h h h h h", "zzz"]


def test_a_vector_is_the_mean_state_of_its_own_tokens(known):
    """However it is padded, and whoever is read with it."""
    vectors = embed(known, TEXTS)
    assert vectors.shape == (6, 16) and vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    for text, vector in zip(TEXTS, vectors):
        ids = [2, *known.tokenizer.encode(text)[:10].tolist(), 3]
        mean = host(known.model(torch.as_tensor([ids])).mean(dim=1))[0]
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), rtol=1e-5, atol=1e-6)
    for batch_size in 1, 2, 5:
        np.testing.assert_allclose(embed(known, TEXTS, batch_size), vectors, atol=1e-6)
    assert embed(known, []).shape == (0, 16)


def test_similarities_are_cosines(known):
    scores = similarities(embed(known, TEXTS))
    np.testing.assert_allclose(np.diag(scores), 1, rtol=1e-5)
    assert (scores == scores.T).all() and (np.abs(scores) <= 1 + 1e-6).all()
    lines = table(TEXTS, embed(known, TEXTS)).splitlines()
    assert len(lines) == 7 and "1.000" in lines[1] and "ab cd" in lines[1]


def test_what_cannot_be_embedded(known):
    with pytest.raises(TypeError, match="a list of texts"):
        embed(known, "abc")
    with pytest.raises(PretrainedError, match="an encoder with a tokenizer"):
        embed(Pretrained(MiniGPT(11, 8, 8, 2, 16, 1), {}, known.tokenizer), ["a"])
    with pytest.raises(PretrainedError, match="an encoder with a tokenizer"):
        embed(Pretrained(known.model, {}), ["a"])


@pytest.mark.parametrize("batch_size, error", [(-1, ValueError), (0, ValueError), (2.0, TypeError), (True, TypeError)])
def test_a_batch_has_a_size(known, batch_size, error):
    with pytest.raises(error, match="embed: batch_size must be"):
        embed(known, ["a"], batch_size)


def test_texts_are_cut_where_the_model_learned_to(known, tmp_path):
    """The limit comes with the weights, and stays with them where they are saved."""
    saved = Pretrained(known.model, known.config, known.tokenizer, longest_text=6)
    save_pretrained(saved, tmp_path)
    again = from_pretrained(tmp_path)
    assert again.longest_text == 6
    long, cut = "a b c d e f g h", "a b c d"
    np.testing.assert_allclose(embed(again, [long]), embed(known, [cut]), atol=1e-6)
    assert np.abs(embed(known, [long]) - embed(known, [cut])).max() > 1e-3


@pytest.mark.parametrize("N", [1, 3, 41, 300])
def test_a_picture_fits_on_a_screen(tmp_path, N):
    """Whatever stands in the texts, and however many there are."""
    vectors = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
    draw(["$x^{$", "_hidden", "\\frac{1}$ $"] * (N // 3) + ["$"] * (N % 3), vectors, tmp_path / "s.png")
    header = (tmp_path / "s.png").read_bytes()[16:24]
    assert all(int.from_bytes(side, "big") <= 20 * 130 for side in (header[:4], header[4:]))


def test_another_pooling_is_refused(known, tmp_path):
    save_pretrained(known, tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    mean, cls = "pooling_mode_mean_tokens", "pooling_mode_cls_token"
    for modes, well in ({mean: True, cls: False}, True), ({cls: True}, False), ({mean: True, cls: True}, False), ({}, False):
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
        if well:
            assert embed(from_pretrained(tmp_path), ["ab"]).shape == (1, 16)
        else:
            with pytest.raises(PretrainedError, match="embed takes the mean"):
                embed(from_pretrained(tmp_path), ["ab"])


def test_the_command(known, tmp_path, monkeypatch, capsys):
    save_pretrained(known, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.txt").write_text("ab\n\ncd ef\n")
    assert cli.main(["embed", "--model", "model", "ab", "cd", "--out", "s.png"]) == 0
    assert "1.000" in capsys.readouterr().out and (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["embed", "--model", "model", "--file", "lines.txt"]) == 0
    assert "cd ef" in capsys.readouterr().out
    for said, wrong in {"is empty": ["a", ""], "not by both": ["a", "--file", "lines.txt"],
                        "no such folder": ["a", "--out", "no/where.png"], "does not exist": ["--file", "missing"],
                        "there is no nowhere": ["a", "--model", "nowhere"]}.items():
        assert cli.main(["embed", "--model", "model", *wrong]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


# --- the published model ------------------------------------------------------------------------------------------------------------

@minilm
def test_likeness_is_meaning():
    vectors = embed(from_pretrained("minilm"), ["The cat sits on the mat.", "A kitten rests on a rug.", "Stocks fell sharply on Monday."])
    near, far, _ = similarities(vectors)[np.triu_indices(3, 1)]
    assert near > 0.5 > 0.2 > far


@minilm
@pytest.mark.torch
def test_the_vectors_are_those_of_transformers():
    """20 sentences in one padded batch, ids and vectors: within 1e-5."""
    transformers = pytest.importorskip("transformers")
    import torch as pytorch
    known = from_pretrained("minilm")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(known.path))
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    for text, ids, mask in zip(SENTENCES, batch["input_ids"].tolist(), batch["attention_mask"].tolist()):
        assert [101, *known.tokenizer.encode(text).tolist(), 102] == ids[:sum(mask)], text
    with pytorch.no_grad():
        states = transformers.AutoModel.from_pretrained(str(known.path)).eval()(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    expected = pytorch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1).numpy()
    assert np.abs(embed(known, SENTENCES) - expected).max() < 1e-5
