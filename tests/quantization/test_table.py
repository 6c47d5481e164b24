"""The table: its statistics by hand, bytes that are counted, and a text that says what was measured."""
import math

import numpy as np
import pytest
from device import host

import tinygrad_tf as torch
from tinygrad_tf.data import evaluation_batches
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.quantization import Scheme, quantize_model, table
from tinygrad_tf.quantization.table import COLUMNS, as_text, compare, file_bytes, mean_and_error, memory_bytes
from tinygrad_tf.training import evaluate

CHANNEL = Scheme(4, granularity="channel")
IDS = np.random.default_rng(0).integers(0, 20, 150)


@pytest.fixture
def models():
    torch.manual_seed(0)
    model = MiniGPT(20, 16, 16, 2, 32, 1).eval()
    return {"float32": model, "int4": quantize_model(model, CHANNEL), "int2": quantize_model(model, Scheme(2, granularity="channel"))}


def batches(rows=4):
    return list(evaluation_batches(IDS, 16, rows))


# --- statistics -------------------------------------------------------------------------------------------------------

def test_windows_of_one_length_give_the_usual_standard_error():
    losses = np.array([1.0, 2.0, 4.0, 5.0])
    mean, error = mean_and_error(losses * 16, np.full(4, 16))
    assert mean == 3 and math.isclose(error, losses.std(ddof=1) / 2)


def test_a_shorter_window_counts_by_its_tokens():
    sums, tokens = np.array([16.0, 32.0, 3.0]), np.array([16, 16, 2])
    mean, error = mean_and_error(sums, tokens)
    assert math.isclose(mean, 51 / 34)
    assert math.isclose(error, math.sqrt(1.5 * sum((s - 1.5 * n) ** 2 for s, n in zip(sums, tokens))) / 34)
    assert math.isnan(mean_and_error(sums[:1], tokens[:1])[1])


def test_the_standard_error_is_the_spread_of_repeated_measurements():
    random, means, errors = np.random.default_rng(0), [], []
    for _ in range(2000):
        tokens = np.where(random.random(40) < 0.9, 16, 5)
        mean, error = mean_and_error(tokens * (2 + 0.5 * random.standard_normal(40)), tokens)
        means.append(mean), errors.append(error)
    assert 0.93 < np.mean(errors) / np.std(means) < 1.07


@pytest.mark.parametrize("rows", [1, 4, 100])
def test_losses_are_those_of_evaluate_whatever_the_batch(models, rows):
    found = compare(models, batches(rows))
    assert [row.name for row in found] == list(models)
    for row, model in zip(found, models.values()):
        assert math.isclose(row.loss[0], evaluate(model, IDS, 16), rel_tol=1e-5)
        assert row.perplexity == (math.exp(row.loss[0]), math.exp(row.loss[0]) * row.loss[1])
        assert math.isclose(row.difference[0], row.loss[0] - found[0].loss[0], abs_tol=1e-9)
    assert found[0].difference == (0, 0) and found[0].error == 0


def test_differences_are_of_the_same_windows_and_errors_of_all_logits(models):
    row = compare(models, batches())[1]
    losses, changes, size = [], 0, 0
    for x, y in evaluation_batches(IDS, 16, 1):
        logits = [host(model(torch.tensor(x))[0]).astype(np.float64) for model in (models["float32"], models["int4"])]
        p = [np.exp(z - np.log(np.exp(z).sum(-1, keepdims=True))) for z in logits]
        losses.append([-np.log(np.take_along_axis(q, y[..., None], -1)).sum() for q in p])
        changes, size = changes + np.square(logits[1] - logits[0]).sum(), size + np.square(logits[0]).sum()
    tokens = np.array([16] * 9 + [5])
    assert np.allclose(row.difference, mean_and_error(np.diff(losses, axis=1)[:, 0], tokens), atol=1e-6)
    assert math.isclose(row.error, math.sqrt(changes / size), rel_tol=1e-4)
    assert row.difference[1] < row.loss[1] / 2, "a paired difference is known much better than either loss"


# --- bytes and speeds ---------------------------------------------------------------------------------------------------

def test_bytes_are_counted(models):
    C, floats = 16, 4 * (20 * 16 + 16 * 16 + 4 * 16 + 32 + 16 + 6 * 16)         # tables, biases of the linears, norms
    weights = 4 * C * C + 2 * C * 32
    rows = compare(models, batches())
    assert [row.memory for row in rows] == [floats + 4 * weights, floats + weights // 2 + 2 * (5 * C + 32),
                                            floats + weights // 4 + 2 * (5 * C + 32)]
    assert [row.memory for row in rows] == [memory_bytes(model) for model in models.values()]
    assert [row.bits for row in rows] == [32, 4 + 16 * (5 * C + 32) / weights, 2 + 16 * (5 * C + 32) / weights]
    assert all(0 < row.file - row.memory < 20_000 for row in rows)


def test_the_file_is_as_large_as_it_says(models, tmp_path):
    torch.save(models["int4"].state_dict(), tmp_path / "int4")
    assert file_bytes(models["int4"]) == (tmp_path / "int4").stat().st_size


def test_all_models_take_turns(models, monkeypatch):
    order, original = [], table._read

    def watched(model, *args):
        order.append(next(name for name, m in models.items() if m is model))
        return original(model, *args)
    monkeypatch.setattr(table, "_read", watched)
    rows = compare(models, batches(), write_speed=lambda model: 7.0)
    assert order == list(models) * len(batches()) and all(row.reads > 0 and row.writes == 7 for row in rows)


def test_models_are_measured_in_eval_mode(models):
    models["float32"].train(), models["int4"].train()
    once, twice = compare(models, batches()), compare(models, batches())
    assert [row.loss for row in once] == [row.loss for row in twice]


# --- the text -----------------------------------------------------------------------------------------------------------

def row(name, memory, reads, writes, loss=1.0):
    return table.Row(name, 4.5, memory, memory + 9, 0.0123, (loss, 0.01), (loss - 1, 0.001), reads, writes)


def test_the_text_is_a_markdown_table():
    lines = as_text([row("float32", 4000, 100.0, 50.0), row("int4", 1000, 90.0, 20.0, loss=1.0055)]).split("\n")
    assert [len(line) for line in lines[:4]] == [len(lines[0])] * 4
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:4]]
    assert cells[0] == list(COLUMNS) and all(set(cell) <= set("-:") for cell in cells[1])
    assert cells[3] == ["int4", "4.50", "1,000", "1,009", "0.0123", "2.7333 ± 0.0273", "+0.0055 ± 0.0010", "90", "20"]
    assert lines[5] == ("Smaller is not faster by itself: int4 takes 0.25 times the bytes of float32, and reads at 0.90 times its speed, "
                        "writes at 0.40. Each product unpacks its weights first.")


def test_the_text_without_a_measured_speed_of_writing():
    text = as_text([row("float32", 4000, 100.0, None), row("int4", 1000, 90.0, None)])
    assert "writes at" not in text and "0.90 times its speed." in text


def test_wrong_calls(models):
    with pytest.raises(ValueError, match="at least one model and one batch are needed, got 0 and 1"):
        compare({}, batches()[:1])
    with pytest.raises(ValueError, match="got 3 and 0"):
        compare(models, [])
