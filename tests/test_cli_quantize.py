"""`tinygrad-tf quantize`: the table, the file and what takes it, and one sentence for what is wrong."""
import os
import re

import numpy as np
import pytest
import runs

import tinygrad_tf as torch
from tinygrad_tf import cli
from tinygrad_tf.quantization import INT4, Scheme, quantize_model, quantized_linears
from tinygrad_tf.training import Trainer, load_checkpoint, save_checkpoint
from tinygrad_tf.training.checkpoint import CheckpointError
from tinygrad_tf.training.quantized import calibration_batch, load_quantized, save_quantized, title, variants, write_speed
from tinygrad_tf.training.state import load_model

MODELS = ["float32", "int8, per tensor, rtn", "int8, per channel, rtn",
          *(f"int{bits}, groups of 8, {method}" for bits in (4, 3, 2) for method in ("rtn", "awq", "gptq"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run that was trained for a few steps; nobody writes to it."""
    folder = tmp_path_factory.mktemp("trained")
    runs.trainer(folder, steps=4, eval_every=4).run()
    return folder


@pytest.fixture
def command(folder, tmp_path, monkeypatch, capsys):
    """command(*arguments) in an empty folder: (exit status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status = cli.main(["quantize", "--run", str(folder / "run"), *map(str, arguments)])
        return status, *capsys.readouterr()
    return run


# --- the table --------------------------------------------------------------------------------------------------------

def test_the_table_has_all_ways_and_their_measures(command):
    status, out, error = command("--group", 8, "--tokens", 60, "--calibration", 4)
    lines = out.splitlines()
    assert status == 0 and [line.strip("|").split("|")[0].strip() for line in lines[2:-2]] == MODELS
    assert "perplexity" in lines[0] and set(lines[1]) <= set("|-: ")
    assert all(re.search(r"\| +\d+\.\d{4} ± \d+\.\d{4} \| +[+-]\d\.\d{4} ± \d\.\d{4} \|", line) for line in lines[2:-2])
    assert lines[-1].startswith("Smaller is not faster by itself: int2, groups of 8")
    assert "making int4, groups of 8, gptq" in error and "measuring on 61 held-out tokens" in error


@pytest.mark.host("the same table with a row more; on a device: the one above")
def test_a_choice_of_ones_own_stands_in_the_table_too(command):
    status, out, _ = command("--bits", 5, "--group", "channel", "--method", "awq", "--asymmetric", "--tokens", 20, "--calibration", 2)
    assert status == 0 and "| uint5, per channel, awq" in out and "| uint4, per channel, gptq" in out and "| int8, per tensor, rtn" in out


def test_each_way_is_made_once():
    chosen = (Scheme(4, granularity="group", group_size=16), "gptq")
    assert variants(*chosen).count(chosen) == 1 and len(variants(*chosen)) == 11
    odd = (Scheme(6), "awq")
    assert variants(*odd)[-1] == odd and len(set(variants(*odd))) == len(variants(*odd)) == 12
    assert title(*odd) == "int6, per tensor, awq" and title(INT4, "rtn") == "int4, groups of 32, rtn"


# --- the file ---------------------------------------------------------------------------------------------------------

def test_the_file_writes_and_is_evaluated(command, folder, capsys):
    status, out, _ = command("--group", 8, "--out", "q.safetensors", "--no-table")
    assert status == 0 and re.match(r"q\.safetensors: [\d,]+ bytes, int4, groups of 8, gptq\. Let it write with:  .*generate --run "
                                    r"q\.safetensors\n$", out)
    assert os.listdir() == ["q.safetensors"], "nothing half-written beside it"
    for run in ("q.safetensors", folder / "run"):
        assert cli.main(["generate", "--run", str(run), "--max-new-tokens", "5"]) == 0
        assert cli.main(["evaluate", "--run", str(run)]) == 0
        texts = capsys.readouterr().out
        assert "MiniGPT, validation" in texts
    assert cli.main(["generate", "--run", str(folder / "run"), "--draft", "q.safetensors", "--max-new-tokens", "5"]) == 0


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
@pytest.mark.parametrize("scheme", [Scheme(4, granularity="group", group_size=8), Scheme(3, False, "channel"), Scheme(8)], ids=str)
def test_what_is_read_back_is_what_was_written(folder, tmp_path, method, scheme):
    model, tokenizer, state = load_model(folder / "run")
    batch = torch.tensor(calibration_batch(np.arange(200) % 10, 8, rows=4))
    quantised = quantize_model(model, scheme, method, batch, keep=["blocks.0.ffn.net.0"])
    save_quantized(tmp_path / "q", quantised, state)
    read, same_tokenizer, read_state = load_quantized(tmp_path / "q")
    assert torch.equal(read(batch)[0], quantised(batch)[0]) and same_tokenizer == tokenizer and read_state["sources"] == state["sources"]
    assert list(quantized_linears(read)) == list(quantized_linears(quantised)) and not read.training
    assert [t.dtype for t in read.state_dict().values()] == [t.dtype for t in quantised.state_dict().values()]
    assert read.lm_head.weight is read.embedding.token.weight
    assert write_speed(read, tokens=3) > 0


def test_keep_keeps(command):
    status, _, _ = command("--group", 8, "--method", "rtn", "--keep", "blocks.0.attention", "--out", "q", "--no-table")
    assert status == 0 and list(quantized_linears(load_quantized("q")[0])) == ["blocks.0.ffn.net.0", "blocks.0.ffn.net.3"]


def test_a_full_disk_leaves_no_file(command, monkeypatch):
    runs.fill_disk(monkeypatch, "replace")
    status, _, error = command("--group", 8, "--out", "q", "--no-table")
    assert status == 2 and "No space left" in error and os.listdir() == []


# --- what is wrong ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments, said", [
    (["--no-table"], "--no-table leaves nothing to do; name a file with --out"),
    (["--out", "no/such/q"], "there is no folder"),
    (["--out", "."], "exists already"),
    (["--bits", "9"], "bits must be 2 to 8, got 9"),
    (["--bits", "four"], "invalid int value: 'four'"),
    (["--group", "half"], "--group must be a number, channel or tensor, got 'half'"),
    (["--group", "0"], "group_size must be at least 1, got 0"),
    (["--group", "32"], "blocks.0.attention.q_proj.weight: quantisation by group: the last axis of shape (16, 16) does not divide into "
                        "groups of 32; choose a divisor of 16"),
    (["--method", "exl2"], "invalid choice: 'exl2'"),
    (["--group", "8", "--keep", "head"], "keep names 'head', and MiniGPT has no module of that name"),
    (["--calibration", "0"], "--calibration must be at least 1, got 0"),
    (["--tokens", "-1"], "--tokens must be at least 1, got -1"),
    (["--run", "elsewhere"], "there is no checkpoint at elsewhere"),
    (["--text", "missing.txt"], "missing.txt")])
def test_one_sentence(command, arguments, said):
    status, out, error = command(*arguments)
    last = error.splitlines()[-1]
    assert status == 2 and out == "" and last.startswith("tinygrad-tf: ") and said in last, error
    assert os.listdir() == []


def test_a_file_that_there_is_stays(command, folder):
    checkpoint = folder / "run" / "checkpoint.safetensors"
    before = checkpoint.read_bytes()
    status, _, error = command("--out", checkpoint)
    assert status == 2 and "exists already; name a new file" in error and checkpoint.read_bytes() == before


def written(folder, path):
    model, _, state = load_model(folder / "run")
    save_quantized(path, quantize_model(model, Scheme(4, granularity="group", group_size=8)), state)
    return load_checkpoint(path)


@pytest.mark.parametrize("damage, said", [
    (lambda tensors, state: tensors.update({"model.blocks.0.attention.q_proj.scale": np.full((16, 2), np.nan, np.float16)}),
     "scale must be finite numbers of type float16"),
    (lambda tensors, state: tensors.update({"model.blocks.0.attention.q_proj.packed": np.zeros((16, 8), np.float32)}),
     "packed must be finite numbers of type uint8, not float32"),
    (lambda tensors, state: tensors.update({"model.blocks.0.attention.q_proj.packed": np.zeros((16, 7), np.uint8)}), "size mismatch"),
    (lambda tensors, state: tensors.pop("model.blocks.0.attention.q_proj.scale"), "KeyError"),
    (lambda tensors, state: tensors.update(more=np.zeros(3)), "more"),
    (lambda tensors, state: state["layers"].update({"blocks.7": {"scheme": {}, "input_scale": False}}), "blocks.7"),
    (lambda tensors, state: state["layers"]["blocks.0.ffn.net.0"]["scheme"].update(bits=40), "bits must be 2 to 8"),
    (lambda tensors, state: state["config"].update(dim=32), "embedding"),
    (lambda tensors, state: state.update(kind="a song"), "holds no quantised weights"),
    (lambda tensors, state: state.pop("tokenizer"), "tokenizer")])
def test_a_file_that_does_not_fit_is_one_error(folder, tmp_path, damage, said):
    tensors, state = written(folder, tmp_path / "q")
    damage(tensors, state)
    save_checkpoint(tmp_path / "q", tensors, {k: v for k, v in state.items() if k != "format"})
    with pytest.raises(CheckpointError, match=said):
        load_quantized(tmp_path / "q")


def test_a_damaged_file_is_one_sentence(folder, tmp_path, capsys):
    written(folder, tmp_path / "q")
    data = bytearray((tmp_path / "q").read_bytes())
    data[-1] ^= 1
    (tmp_path / "q").write_bytes(data)
    assert cli.main(["generate", "--run", str(tmp_path / "q")]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_a_model_without_low_bits_is_not_saved(folder, tmp_path):
    model, _, state = load_model(folder / "run")
    with pytest.raises(ValueError, match="MiniGPT has no QuantizedLinear; make them with quantize_model"):
        save_quantized(tmp_path / "q", model, state)
    assert Trainer.resume(folder / "run").step == 4, "the run is as it was"
