"""What a run can be told: its tokenizer, schedule, parts of a batch, patience, callbacks; and a file that tells it."""
import dataclasses
import math
import sys

import numpy as np
import pytest
import runs
from device import host
from hypothesis import given
from hypothesis import strategies as st

import tinygrad_tf as torch
from tinygrad_tf import cli
from tinygrad_tf.backend import flushes_denormal, flushing_denormal
from tinygrad_tf.data import BPETokenizer, ByteTokenizer, CharTokenizer, CorpusError, pack_sequences, pad_sequences, split_train_validation
from tinygrad_tf.models import Decoder, MiniGPT
from tinygrad_tf.optim.lr_scheduler import SCHEDULES
from tinygrad_tf.training import Callback, CheckpointError, TrainConfig, Trainer, evaluate_text, load_checkpoint, load_model
from tinygrad_tf.training.checkpoint import CHECKPOINT
from tinygrad_tf.training.config_file import ConfigError, read_config, write_config

NAMES = [field.name for field in dataclasses.fields(TrainConfig)]


def same_weights(one, other):
    return all(torch.equal(p, q) for p, q in zip(one.model.parameters(), other.model.parameters()))


# --- tokenizers -----------------------------------------------------------------------------------------------------------------

def settings_of(kind, folder):
    if kind != "file":
        return {"tokenizer": kind, "vocab_size": 280}
    BPETokenizer.train(runs.write_text(folder).read_text(), 270).save(folder / "tokenizer.json")
    return {"tokenizer": str(folder / "tokenizer.json")}


KINDS = {"char": CharTokenizer, "byte": ByteTokenizer, "bpe": BPETokenizer, "file": BPETokenizer}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_each_tokenizer_stops_and_goes_on(tmp_path, kind):
    settings = settings_of(kind, tmp_path)
    whole, trainer = runs.trainer(tmp_path, out="whole", **settings), runs.trainer(tmp_path, **settings)
    assert type(trainer.tokenizer) is KINDS[kind]
    whole.run()
    trainer.run(should_stop=runs.stop_at(7, trainer))
    resumed = Trainer.resume(trainer.folder)
    assert resumed.tokenizer == trainer.tokenizer and resumed.run() is True
    assert same_weights(whole, resumed)
    model, tokenizer, _ = load_model(trainer.folder)
    assert tokenizer == trainer.tokenizer and model.vocab_size == tokenizer.vocab_size
    assert load_checkpoint(trainer.folder / CHECKPOINT)[1]["tokenizer_sha256"] == tokenizer.fingerprint


def test_subwords_are_learned_from_what_is_trained_on_alone(tmp_path):
    trainer = runs.trainer(tmp_path, tokenizer="bpe", vocab_size=300)
    train, held_out = split_train_validation((tmp_path / "text.txt").read_text())
    assert trainer.tokenizer == BPETokenizer.train(train, 300)
    assert trainer.tokenizer.decode(trainer.train_ids) == train and trainer.tokenizer.decode(trainer.validation_ids) == held_out
    assert trainer.validation_bytes == len(held_out) - len(trainer.tokenizer.decode(trainer.validation_ids[:1]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_per_byte_of_a_run_are_those_of_its_text(tmp_path, kind):
    trainer = runs.trainer(tmp_path, **settings_of(kind, tmp_path), steps=2)
    trainer.run()
    held_out = split_train_validation((tmp_path / "text.txt").read_text())[1]
    bits = trainer.metrics.column("validation_loss")[1][-1] * (len(trainer.validation_ids) - 1) / math.log(2) / trainer.validation_bytes
    assert bits == pytest.approx(evaluate_text(trainer.model, trainer.tokenizer, held_out).bits_per_byte, rel=1e-5)


def test_another_tokenizer_is_refused(tmp_path):
    settings = settings_of("file", tmp_path)
    runs.trainer(tmp_path, **settings, steps=2).run()
    path, other = tmp_path / "tokenizer.json", BPETokenizer.train("quite another text, of the same length " * 9, 270)
    other.save(path)
    with pytest.raises(CheckpointError, match="tokenizer"):
        Trainer.resume(tmp_path / "run")
    path.unlink()
    with pytest.raises(CorpusError, match="there is no tokenizer"):
        Trainer.resume(tmp_path / "run")
    assert load_model(tmp_path / "run")[1] != other     # the checkpoint holds it: to use the model, no file is needed


def test_a_tokenizer_is_found_from_any_folder(tmp_path, monkeypatch):
    settings_of("file", tmp_path)
    monkeypatch.chdir(tmp_path)
    runs.trainer(tmp_path, tokenizer="tokenizer.json", steps=2).run()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert Trainer.resume(tmp_path / "run").run() is True


def test_a_tokenizer_without_blanks_trains_and_writes(tmp_path, monkeypatch, capsys):
    """A WordPiece has no token for a line break: the sample begins with one that there is."""
    from tinygrad_tf.data import WordPieceTokenizer
    special = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*special, *letters, *(f"##{c}" for c in letters)]
    WordPieceTokenizer(tokens, {name: i for i, name in enumerate(special)}).save(tmp_path / "w.json")
    runs.write_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--text", "text.txt", "--tokenizer", "w.json", *runs.TINY_FLAGS, "--steps", "2", "--out", "run"]) == 0
    assert (tmp_path / "run/sample.txt").read_text()
    assert cli.main(["generate", "--run", "run", "--max-new-tokens", "5"]) == 0
    capsys.readouterr()
    assert cli.main(["generate", "--run", "run", "--prompt", "  "]) == 2
    assert "has no tokens for this model" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{}", "[]", "not json", '{"type": "bpe"}', '{"model": {"type": "Unigram"}}', "[" * 100_000])
def test_a_file_that_is_no_tokenizer(tmp_path, content):
    (tmp_path / "odd.json").write_text(content)
    with pytest.raises(CorpusError, match="odd.json"):
        runs.trainer(tmp_path, tokenizer=str(tmp_path / "odd.json"))
    with pytest.raises(CorpusError):
        runs.trainer(tmp_path, tokenizer=str(tmp_path))


# --- schedules, windows ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rates_are_those_of_the_schedule(tmp_path, name):
    trainer = runs.trainer(tmp_path, schedule=name)
    trainer.run(should_stop=runs.stop_at(5, trainer))
    resumed = Trainer.resume(trainer.folder)
    resumed.run()
    rates = resumed.metrics.column("learning_rate")[1]
    assert rates == pytest.approx([4e-3 * SCHEDULES[name](step, 3, 13, 0.1) for step in range(1, 13)], rel=1e-12)
    assert rates[2] == 4e-3 and (rates[-1] < 2e-3 or name == "constant")


def test_windows_of_epochs_go_on_at_the_exact_one(tmp_path):
    whole, trainer = (runs.trainer(tmp_path, out=out, sampling="epochs", dropout=0.2) for out in ("whole", "run"))
    whole.run()
    trainer.run(should_stop=runs.stop_at(5, trainer))
    resumed = Trainer.resume(trainer.folder)
    assert resumed.sampler.drawn == 5 * 4
    resumed.run()
    assert same_weights(whole, resumed) and not same_weights(whole, ran(runs.trainer(tmp_path, out="other", dropout=0.2)))


def ran(trainer):
    trainer.run()
    return trainer


@pytest.mark.parametrize("schedule", ["constant", "wsd"])
def test_a_run_that_is_made_longer_is_one_that_was_so_long(tmp_path, schedule):
    """Stopped before its decline: the learning rates up to there do not depend on the length."""
    whole = ran(runs.trainer(tmp_path, out="whole", steps=20, schedule=schedule, dropout=0.2))
    trainer = runs.trainer(tmp_path, steps=12, schedule=schedule, dropout=0.2)
    trainer.run(should_stop=runs.stop_at(6, trainer))
    resumed = Trainer.resume(trainer.folder, steps=20)
    assert resumed.config == whole.config and resumed.run() is True
    assert same_weights(whole, resumed)
    assert resumed.metrics.column("learning_rate")[1].tolist() == whole.metrics.column("learning_rate")[1].tolist()


def test_a_complete_run_is_made_longer(tmp_path):
    trainer = ran(runs.trainer(tmp_path, steps=4))
    with pytest.raises(ValueError, match="has made 4 steps already"):
        Trainer.resume(trainer.folder, steps=3)
    longer = Trainer.resume(trainer.folder, steps=9)
    assert not longer.is_complete() and longer.run() is True and longer.step == 9
    assert Trainer.resume(trainer.folder).config.steps == 9
    rates = longer.metrics.column("learning_rate")[1]
    assert rates[4:] == pytest.approx([4e-3 * SCHEDULES["cosine"](step, 3, 10, 0.1) for step in range(5, 10)])


# --- a batch in parts -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("settings", [{}, {"tokenizer": "byte"}, {"sampling": "epochs"}], ids=str)
def test_accumulated_steps_are_those_of_the_whole_batch(tmp_path, parts, settings):
    whole, trainer = (runs.trainer(tmp_path, out=str(n), batch_size=5, accumulation=n, lr=1e-3, **settings) for n in (1, parts))
    for _ in range(4):
        (loss, norm), (loss2, norm2) = whole.train_step(), trainer.train_step()
        assert (loss2, norm2) == pytest.approx((loss, norm), rel=1e-5)
    for p, q in zip(whole.model.parameters(), trainer.model.parameters()):
        np.testing.assert_allclose(p.detach().cpu().numpy(), q.detach().cpu().numpy(), rtol=1e-3, atol=1e-4)


LENGTHS = [9, 2, 5, 7, 3, 9, 2]
LAYOUTS = {
    "padded on the right": lambda ids: pad_sequences(ids, 0),
    "padded on the left": lambda ids: pad_sequences(ids, 0, "left"),
    "packed": lambda ids: pack_sequences(ids, 10, order="given"),
    "rows that count nothing": lambda ids: pad_sequences([ids[0], ids[1][:1], [], ids[2], [], [], ids[3]], 0),
}


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7, 20])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", [MiniGPT, Decoder])
def test_parts_of_unequal_lengths_add_up_to_the_whole(family, layout, parts):
    """Weighted by targets, to 1e-12 in float64; a mean over parts, as of equal ones, is another gradient."""
    torch.manual_seed(0)
    model = family(11, 10, 8, 2, 16, 2, dropout=0.0).double()
    batch = LAYOUTS[layout]([torch.randint(1, 11, (n,)).tolist() for n in LENGTHS])
    loss = model(**batch)[1]
    loss.backward()
    expected = [host(p.grad).copy() for p in model.parameters()]
    model.zero_grad()
    losses = []
    for part, share in batch.parts(parts):
        losses.append(share * model(**part)[1])
        losses[-1].backward()
    assert sum(one.item() for one in losses) == pytest.approx(loss.item(), rel=1e-12)
    for p, g in zip(model.parameters(), expected):
        np.testing.assert_allclose(host(p.grad), g, rtol=1e-9, atol=1e-12)
    shares = [share for _, share in batch.parts(parts)]
    assert sum(shares) == pytest.approx(1) and len(shares) <= len(batch.token_ids)


def test_a_mean_of_means_is_another_loss():
    batch = pad_sequences([list(range(1, 10)), [1, 2]], 0)
    torch.manual_seed(0)
    model = MiniGPT(11, 10, 8, 2, 16, 1, dropout=0.0)
    whole, parts = model(**batch)[1].item(), [(model(**part)[1].item(), share) for part, share in batch.parts(2)]
    assert [share for _, share in parts] == [8 / 9, 1 / 9]
    assert sum(loss * share for loss, share in parts) == pytest.approx(whole, rel=1e-6)
    assert abs(np.mean([loss for loss, _ in parts]) - whole) > 1e-3


# --- the end ----------------------------------------------------------------------------------------------------------------------

def stale(trainer, losses):
    """A trainer whose evaluations say these losses."""
    given_losses = iter(losses)
    trainer.evaluate = lambda: next(given_losses)
    return trainer


@pytest.mark.parametrize("patience, steps", [(0, 12), (1, 6), (2, 10), (3, 12)])
def test_patience(tmp_path, patience, steps):
    """Losses after steps 2, 4, … 12: the third is worse than the second, and so are the fifth and the sixth than the fourth."""
    losses = [3.0, 2.9, 3.1, 2.8, 2.9, 3.0] if patience != 2 else [3.0, 2.9, 2.8, 2.9, 2.85, 2.0]
    trainer = stale(runs.trainer(tmp_path, eval_every=2, patience=patience), losses)
    assert trainer.run() is True
    assert trainer.step == steps
    again = stale(Trainer.resume(trainer.folder), [])
    assert again.is_complete() and again.run() is True and again.step == trainer.step


def test_a_resumed_run_counts_from_where_it_was(tmp_path):
    trainer = stale(runs.trainer(tmp_path, eval_every=2, patience=3), [3.0, 3.1, 3.2])
    trainer.run(should_stop=runs.stop_at(6, trainer))
    resumed = stale(Trainer.resume(trainer.folder), [3.3])
    assert not resumed.is_complete() and resumed.evaluations_since_best() == 2
    assert resumed.run() is True and resumed.step == 8


# --- callbacks ----------------------------------------------------------------------------------------------------------------------

class Diary(Callback):
    def __init__(self, stop_at=None):
        self.lines, self.stop_at = [], stop_at

    def on_start(self, trainer):
        self.lines.append(("start", trainer.step))

    def on_step(self, trainer, numbers):
        torch.rand(3)                                   # changes nothing in the run
        self.lines.append(("step", numbers["step"]))
        assert numbers["step"] == trainer.step and numbers["tokens"] == 32 and numbers["seconds"] > 0
        parts = [value for name, value in numbers.items() if name.startswith("gradient_norm/")]
        assert math.sqrt(sum(part**2 for part in parts)) == pytest.approx(numbers["gradient_norm"], rel=1e-5)
        if self.stop_at == trainer.step:
            trainer.stop()

    def on_evaluation(self, trainer, loss):
        self.lines.append(("evaluation", loss))

    def on_save(self, trainer, path):
        assert load_checkpoint(path)[1]["step"] == trainer.step
        self.lines.append(("save", trainer.step))

    def on_end(self, trainer, complete):
        self.lines.append(("end", complete))


def with_callbacks(folder, *callbacks, **settings):
    trainer = runs.trainer(folder, **settings)
    trainer.callbacks += callbacks
    return trainer


def test_callbacks_are_told_in_order_and_change_nothing(tmp_path):
    diary, plain = Diary(), runs.trainer(tmp_path, out="plain", steps=4, eval_every=2, dropout=0.3)
    plain.run()
    trainer = with_callbacks(tmp_path, diary, steps=4, eval_every=2, dropout=0.3)
    trainer.run()
    losses = trainer.metrics.column("validation_loss")[1].tolist()
    assert diary.lines == [("save", 0), ("start", 0), ("step", 1), ("evaluation", losses[0]), ("step", 2), ("save", 2), ("step", 3),
                           ("evaluation", losses[1]), ("step", 4), ("save", 4), ("end", True)]
    assert same_weights(plain, trainer)


@pytest.mark.host("the processor's own setting")
def test_subnormal_numbers_are_zero_while_a_run_lasts_and_no_longer(tmp_path):
    seen = []

    class Asking(Callback):
        def on_step(self, trainer, numbers):
            seen.append(flushes_denormal())
            if trainer.step == 3:
                1 / 0  # noqa: B018
    with flushing_denormal():
        can = flushes_denormal()
    with pytest.raises(ZeroDivisionError):
        with_callbacks(tmp_path, Asking()).run()
    assert seen == [can] * 3 and not flushes_denormal()


def test_a_callback_stops_a_run_and_it_goes_on(tmp_path):
    whole = ran(runs.trainer(tmp_path, out="whole", dropout=0.3))
    diary = Diary(stop_at=5)
    trainer = with_callbacks(tmp_path, diary, dropout=0.3)
    assert trainer.run() is False
    assert diary.lines[-2:] == [("save", 5), ("end", False)]
    resumed = Trainer.resume(trainer.folder, callbacks=[Diary(stop_at=5)])
    assert resumed.run() is True and same_weights(whole, resumed)


def test_an_error_in_a_callback_leaves_the_last_checkpoint(tmp_path):
    class Broken(Callback):
        def on_step(self, trainer, numbers):
            if trainer.step == 7:
                raise RuntimeError("of the callback")
    with pytest.raises(RuntimeError, match="of the callback"):
        with_callbacks(tmp_path, Broken()).run()
    assert Trainer.resume(tmp_path / "run").step == 4


def test_what_a_callback_does_to_its_numbers_is_its_own_affair(tmp_path):
    class Vandal(Callback):
        def on_step(self, trainer, numbers):
            numbers.update(validation_loss=None, step=99)
            numbers.clear()
    trainer = with_callbacks(tmp_path, Vandal(), Diary())
    assert trainer.run() is True
    assert Trainer.resume(trainer.folder).step == 12 and (trainer.folder / "best.safetensors").exists()


@pytest.mark.parametrize("event, step", [("on_start", 0), ("on_save", 0), ("on_evaluation", 4), ("on_step", 1), ("on_save at 4", 4)])
def test_a_run_is_stopped_from_any_event(tmp_path, event, step):
    class Stopper(Callback):
        pass

    def stop(self, trainer, *_):
        if "at 4" not in event or trainer.step == 4:
            trainer.stop()
    setattr(Stopper, event.partition(" ")[0], stop)
    trainer = with_callbacks(tmp_path, Stopper())
    assert trainer.run() is False and trainer.step == step
    assert Trainer.resume(trainer.folder).step == step


@pytest.mark.parametrize("callbacks", [[print], [Callback], ["x"], [None]], ids=str)
def test_what_is_no_callback_is_refused(tmp_path, callbacks):
    with pytest.raises(TypeError, match="callbacks must be a list of training.Callback"):
        Trainer(TrainConfig(**runs.TINY), [str(runs.write_text(tmp_path))], tmp_path / "run", callbacks=callbacks)


# --- the configuration as a file ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("field, value", [
    ("accumulation", 0), ("accumulation", 13), ("patience", -1), ("keep", 0), ("schedule", "cosin"), ("sampling", "all"), ("tokenizer", ""),
    ("vocab_size", 259), ("vocab_size", "1024"), ("tokenizer", 5)])
def test_the_configuration_refuses(field, value):
    with pytest.raises(ValueError, match=field):
        TrainConfig(**{field: value})


values = st.one_of(st.integers(-2**62, 2**62), st.floats(allow_nan=False, allow_infinity=False),
                   st.text(st.characters(codec="utf-8")), st.lists(st.text(st.characters(codec="utf-8"))))


@given(st.dictionaries(st.sampled_from(NAMES), values))
def test_what_is_written_is_read(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("toml") / "config.toml"
    write_config(path, content)
    assert read_config(path, NAMES) == content


def test_the_file_is_equal_to_the_flags(tmp_path, monkeypatch):
    """Every setting, by either: one configuration. Flags go before the file, the file before the preset."""
    runs.write_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    flags = {"context": 8, "dim": 24, "layers": 1, "heads": 3, "dropout": 0.25, "norm": "post", "batch_size": 6, "accumulation": 2,
             "threads": 2, "sampling": "epochs", "steps": 7, "lr": 0.001, "warmup": 2, "schedule": "wsd", "weight_decay": 0.2, "clip": 2.0,
             "eval_every": 3, "patience": 2, "keep": 3, "precision": "float32", "activations": "recomputed", "seed": 5, "experts": 4,
             "experts_per_token": 3, "balance": "bias", "tokenizer": "bpe", "vocab_size": 300}
    assert flags.keys() == set(NAMES)                   # a new setting belongs into this test
    started = []
    monkeypatch.setattr(cli, "Trainer", lambda config, *args, **kwargs: started.append((config, *args[:2])) or sys.exit(0))

    def config_of(*arguments):
        with pytest.raises(SystemExit):
            cli.main(["train", *arguments])
        return started.pop()
    by_flags = config_of("--text", "text.txt", "--out", "there", *(word for name, value in flags.items()
                                                                   for word in (f"--{name.replace('_', '-')}", str(value))))
    for dash in "-_":
        (tmp_path / "run.toml").write_text('text = "text.txt"\nout = "there"\n' + "".join(
            f"{name.replace('_', dash)} = {value!r}\n".replace("'", '"') for name, value in flags.items()))
        assert config_of("--config", "run.toml") == by_flags
    assert by_flags == (TrainConfig(**flags), ["text.txt"], tmp_path.relative_to(tmp_path) / "there")
    assert config_of("--config", "run.toml", "--steps", "9", "--preset", "small")[0] == dataclasses.replace(TrainConfig(**flags), steps=9)
    (tmp_path / "run.toml").write_text('preset = "small"\nsteps = 3\n')
    assert config_of("--config", "run.toml")[0] == dataclasses.replace(cli.PRESETS["small"], steps=3)


def test_a_run_writes_the_file_that_repeats_it(tmp_path, monkeypatch, capsys):
    trainer = ran(runs.trainer(tmp_path, tokenizer="byte", steps=3))
    assert read_config(trainer.folder / "config.toml", ["text", *NAMES]) == {"text": trainer.sources, **trainer.config.to_dict()}
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--config", "run/config.toml", "--out", "again"]) == 0
    assert (tmp_path / "again/metrics.csv").read_bytes() == (tmp_path / "run/metrics.csv").read_bytes()


WRONG = {
    "stesp = 3": ["'stesp'", "did you mean steps?"],
    "steps = 3\nsteps = 4": ["cannot be read"],
    "eval-every = 3\neval_every = 3": ["eval_every twice"],
    "steps = ": ["cannot be read"],
    'steps = "3"': ["steps must be of type int"],
    "steps = 3.5": ["steps must be of type int"],
    "lr = true": ["lr must be of type float"],
    "lr = nan": ["lr must be positive"],
    "steps = 0": ["steps must be at least 1"],
    "[train]\nsteps = 3": ["'train'", "no flag"],
    "text = 5": ["text must be a string or a list"],
    "text = []": ["text must be a string or a list"],
    "out = 5": ["out must be a string"],
    "device = 5": ["device must be a string"],
    "threads = 1.5": ["threads must be a whole number"],
    'preset = "huge"': ["preset must be one of small, tiny"],
    "preset = []": ["preset must be one of"],
    'device = "tpu"': ["tpu"],
    "\x00": ["cannot be read"],
    "steps = 2024-01-01": ["steps must be of type int"],
    "context = {a = 1}": ["context must be of type int"],
}


@pytest.mark.parametrize("content", WRONG)
def test_a_wrong_file_is_one_sentence(tmp_path, monkeypatch, capsys, content):
    runs.write_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(content)
    assert cli.main(["train", "--text", "text.txt", "--config", "run.toml", "--out", "x"]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and all(part in error for part in WRONG[content]), error
    assert not (tmp_path / "x").exists()


def test_files_that_are_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'tokenizer = "\xff"')
    for path in "missing.toml", ".", "latin.toml":
        with pytest.raises(ConfigError, match="cannot be read"):
            read_config(path, NAMES)
        assert cli.main(["train", "--config", path]) == 2 and capsys.readouterr().err.count("\n") == 1
    (tmp_path / "good.toml").write_text("steps = 3")
    assert cli.main(["train", "--resume", "run", "--config", "good.toml"]) == 2
    assert "leave out --config" in capsys.readouterr().err
