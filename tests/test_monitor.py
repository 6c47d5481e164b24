"""metrics.jsonl, speed.csv and monitor.png: what a run shows while it trains, and that looking changes nothing."""
import contextlib
import errno
import io
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import runs

import tinygrad_tf as torch
from tinygrad_tf.training import Trainer
from tinygrad_tf.training import monitor as module
from tinygrad_tf.training.metrics import FIELDS, Metrics, read_metrics
from tinygrad_tf.training.monitor import Monitor, draw_runs, memory_bytes, resident_bytes

CPU = torch.device("cpu")


class Run:
    """In the place of a trainer: it makes up its numbers, and calls a monitor as a trainer does."""

    def __init__(self, folder, monitor, step=0, fields=(*FIELDS, "gradient_norm/blocks.0", "gradient_norm/final_norm")):
        self.folder, self.step, self.monitor, self.device = folder, step, monitor, CPU
        self.metrics = Metrics(folder, fields=fields)
        for made in range(1, step + 1):
            self.metrics.add(**self.row(made))

    def row(self, step):
        evaluated = 1 + 2 / step if step % 5 == 0 else None
        return {"step": step, "learning_rate": 0.1 / step, "train_loss": 1 + 1 / step, "gradient_norm": math.sqrt(step),
                "validation_loss": evaluated, "expert_load": None, "gradient_norm/blocks.0": 0.5, "gradient_norm/final_norm": 0.0}

    def train(self, steps, **more):
        self.monitor.on_start(self)
        for _ in range(steps):
            self.step += 1
            row = {**self.row(self.step), **more}
            self.metrics.add(**row)
            self.monitor.on_step(self, {**row, "tokens": 32, "seconds": 0.25})
            if self.step % 5 == 0:
                self.save()
        return self

    def save(self):
        self.monitor.on_save(self, Path(self.folder) / "checkpoint.safetensors")

    def end(self):
        self.save()
        self.monitor.on_end(self, True)


@pytest.fixture
def figures(monkeypatch):
    """What is drawn, as figures."""
    drawn = []
    monkeypatch.setattr(module, "write_png", lambda figure, path: drawn.append(figure))
    return drawn


def lines(folder):
    return [json.loads(line, parse_constant=pytest.fail) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


# --- the lines -----------------------------------------------------------------------------------------------------------

def test_each_step_is_a_line_at_once(tmp_path):
    run = Run(tmp_path, Monitor())
    run.train(3)
    for step, row in enumerate(lines(tmp_path), 1):
        assert {name: row[name] for name in run.row(step)} == run.row(step)
        assert row["tokens_per_second"] == 128 and row["seconds"] == 0.25 and row["memory_bytes"] > 10**6
    assert len(lines(tmp_path)) == 3 and read_metrics(tmp_path) == lines(tmp_path)
    run.train(2)
    assert len(lines(tmp_path)) == 5


def test_what_is_no_number_is_null(tmp_path):
    Run(tmp_path, Monitor()).train(1, gradient_norm=math.inf, train_loss=math.nan, learning_rate=np.float32(0.5), expert_load=np.int64(2))
    row, = lines(tmp_path)
    assert row["gradient_norm"] is None and row["train_loss"] is None and row["learning_rate"] == 0.5 and row["expert_load"] == 2


def test_numbers_may_be_tensors_of_any_device(tmp_path):
    Run(tmp_path, Monitor()).train(1, train_loss=torch.tensor(0.5), gradient_norm=torch.tensor(math.nan))
    assert lines(tmp_path)[0]["train_loss"] == 0.5 and lines(tmp_path)[0]["gradient_norm"] is None


def test_a_step_of_no_time_has_no_rate(tmp_path):
    run = Run(tmp_path, Monitor()).train(0)
    run.monitor.on_step(run, {**run.row(1), "tokens": 32, "seconds": 0.0})
    run.monitor.on_step(run, run.row(2))
    assert [row["tokens_per_second"] for row in lines(tmp_path)] == [None, None]


@pytest.mark.parametrize("after", [0, 3, 5, 7, 9])
@pytest.mark.parametrize("torn", [b"", b'{"step": 8, "train_l', b'{"step": 8}', b"\0" * 50, b"\xff\n", b"[1]\n", b"\n",
                                  b"[" * 50_000 + b"\n", b'{"step": 8, "tokens_per_second": "a"}\n'], ids=range(9))
def test_a_run_that_goes_on_drops_the_lines_of_steps_to_come(tmp_path, figures, after, torn):
    """Seven steps were made and a line was half written; the run goes on from an earlier checkpoint, or from that very step."""
    Run(tmp_path, Monitor()).train(7)
    first = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(torn)
    run = Run(tmp_path, Monitor(), step=after).train(0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(first[:after])
    assert len(read_metrics(tmp_path / "speed.csv")) == min(after, 7)
    run.train(2).end()
    assert [row["step"] for row in lines(tmp_path)] == [*range(1, min(after, 7) + 1), after + 1, after + 2]
    assert [row["step"] for row in read_metrics(tmp_path / "speed.csv")] == [row["step"] for row in lines(tmp_path)]
    assert not list(tmp_path.glob(".*"))


def test_steps_written_twice_are_kept_once(tmp_path):
    Run(tmp_path, Monitor()).train(3)
    first = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(first + first)
    Run(tmp_path, Monitor(), step=9).train(0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == first


@pytest.mark.parametrize("foreign", [
    b'{"step": 6, "tokens_per_second": 1, "memory_bytes": 1}', b'{"step": 2, "tokens_per_second": ' + b"9" * 400 + b', "memory_bytes": 1}',
    b'{"step": 2, "tokens_per_second": 1e999, "memory_bytes": 1}', b'{"step": 2, "tokens_per_second": 1, "memory_bytes": 1, "note": "x"}',
    b'{"step": 2, "tokens_per_second": true, "memory_bytes": 1}', b'{"step": -3, "tokens_per_second": 1, "memory_bytes": 1}', b"[2]"],
    ids=range(7))
@pytest.mark.parametrize("first", [True, False])
def test_a_foreign_line_takes_no_line_of_ours_with_it(tmp_path, figures, foreign, first):
    Run(tmp_path, Monitor()).train(6)
    ours = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(foreign + b"\n" + ours if first else ours + foreign + b"\n")
    Run(tmp_path, Monitor(), step=6).train(1).end()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 7]
    assert first is False or (tmp_path / "metrics.jsonl").read_bytes().startswith(ours)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are pipes on POSIX")
def test_a_pipe_of_that_name_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(FileExistsError):
        Run(tmp_path, Monitor()).train(1)


def test_speed_is_written_at_saves(tmp_path):
    run = Run(tmp_path, Monitor()).train(6)
    rows = read_metrics(tmp_path / "speed.csv")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5] and list(rows[0]) == ["step", "tokens_per_second", "memory_bytes"]
    assert rows[2] == {name: lines(tmp_path)[2][name] for name in rows[2]}
    assert (tmp_path / "speed.csv").read_text().splitlines()[3].startswith("3,128,")
    run.end()
    assert len(read_metrics(tmp_path / "speed.csv")) == 6


# --- memory --------------------------------------------------------------------------------------------------------------

@pytest.mark.host("about the memory of the process")
def test_memory_is_what_the_process_holds():
    before = resident_bytes()
    held = np.ones(2**23)                               # 64 MiB, written to
    assert 0.9 * held.nbytes < resident_bytes() - before < 1.5 * held.nbytes and memory_bytes(CPU) > held.nbytes


def test_memory_where_there_is_no_proc(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError(errno.ENOENT, "No such file", "/proc/self/statm")
    monkeypatch.setattr(module, "open", missing, raising=False)
    assert resident_bytes() > 10**6
    monkeypatch.setitem(module.sys.modules, "resource", None)
    assert resident_bytes() is None


def test_memory_of_a_device_is_that_of_its_arrays(gpu):
    before, x = memory_bytes(torch.device("cuda")), torch.ones(1000, 1000, device="cuda")
    assert memory_bytes(torch.device("cuda")) == torch.cuda.memory_allocated() >= before and x.is_cuda


# --- when a picture is drawn ---------------------------------------------------------------------------------------------

def drawn_at(monkeypatch, steps, seconds_a_step, cost, **options):
    """The steps after which a picture is drawn, in a run that saves at each fifth, where a picture takes `cost` seconds."""
    clock, drawn = [1000.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])

    def draw(fill, path):
        clock[0] += cost
        drawn.append(run.step)
    monkeypatch.setattr(module, "_draw", draw)
    run = Run("nowhere", Monitor(**options))
    run.monitor.on_start(run)
    for run.step in range(1, steps + 1):
        clock[0] += seconds_a_step
        run.monitor.on_step(run, run.row(run.step))
        if run.step % 5 == 0:
            run.save()
    return drawn


@pytest.fixture
def unwritten(monkeypatch):
    """No files: only the pictures are looked at."""
    monkeypatch.setattr(module, "replacing", lambda path: contextlib.nullcontext(io.BytesIO()))
    monkeypatch.setattr(module, "_append", lambda path, line: None)
    monkeypatch.setattr(Metrics, "write", lambda self: None)
    monkeypatch.setattr(module, "_whole_lines", lambda path, last: [])


@pytest.mark.parametrize("seconds_a_step, cost, expected", [
    (2.0, 0.1, [5, 10, 15, 20, 25, 30]),                # every 10 s
    (2.5, 0.1, [4, 5, 9, 10, 14, 15, 19, 20, 24, 25, 29, 30]),      # and every checkpoint
    (60.0, 1.0, list(range(1, 31))),                    # slow steps: each
    (0.1, 0.1, []),                                     # 3 s in all
    (1.0, 0.8, [10, 26]),                               # every 5 s would be 16 % of the time: the next one after 16 s
])
def test_a_picture_after_checkpoints_and_now_and_then(monkeypatch, unwritten, seconds_a_step, cost, expected):
    assert drawn_at(monkeypatch, 30, seconds_a_step, cost) == expected


@pytest.mark.parametrize("seconds_a_step", [0.5, 7.0])
@pytest.mark.parametrize("cost", [0.05, 0.5, 3.0])
@pytest.mark.parametrize("share", [0.05, 0.2])
def test_drawing_takes_no_more_than_its_share(monkeypatch, unwritten, seconds_a_step, cost, share):
    steps = round(200 / seconds_a_step)
    drawn = drawn_at(monkeypatch, steps, seconds_a_step, cost, share=share)
    assert drawn and len(drawn) * cost <= share * steps * seconds_a_step + cost


@pytest.mark.parametrize("options", [{"seconds": -1}, {"seconds": math.nan}, {"share": 0}, {"share": 1.5}])
def test_options(options):
    with pytest.raises(ValueError, match="seconds must be at least 0 and share in"):
        Monitor(**options)


# --- the pictures --------------------------------------------------------------------------------------------------------

def panels(figure):
    return dict(zip(module.PANELS, figure.axes))


def curves(axes):
    """{label: (steps, values)} of the lines that have a name."""
    return {line.get_label(): tuple(map(list, line.get_data())) for line in axes.lines if not line.get_label().startswith("_")}


@pytest.mark.parametrize("steps", [0, 1, 2, 12])
def test_six_panels(tmp_path, steps):
    from matplotlib.image import imread
    Run(tmp_path, Monitor()).train(steps).end()
    assert imread(tmp_path / "monitor.png").shape[:2] == (700, 1300)


def test_what_the_panels_show(tmp_path, figures):
    run = Run(tmp_path, Monitor())
    run.train(12).end()
    found = panels(figures[-1])
    assert list(found) == ["loss", "gradient_norm", "learning_rate", "tokens_per_second", "memory_bytes", "expert_load"]
    losses = curves(found["loss"])
    assert losses["training, each batch"] == (list(range(1, 13)), [1 + 1 / step for step in range(1, 13)])
    assert losses["validation"] == ([5, 10], [1.4, 1.2])
    assert list(curves(found["gradient_norm"])) == ["blocks.0", "final_norm", "all"] and found["gradient_norm"].get_yscale() == "log"
    assert found["gradient_norm"].lines[0].get_ydata().tolist() == [math.sqrt(step) for step in range(1, 13)]
    assert found["learning_rate"].lines[0].get_ydata().tolist() == [0.1 / step for step in range(1, 13)]
    assert set(found["tokens_per_second"].lines[0].get_ydata()) == {128}
    memory = [row["memory_bytes"] / 2**20 for row in lines(tmp_path)]
    assert found["memory_bytes"].lines[0].get_ydata().tolist() == memory and found["memory_bytes"].get_ylim()[0] == 0
    assert [text.get_text() for text in found["expert_load"].texts] == ["no experts in this model"]


def test_the_load_of_experts_has_its_panel(tmp_path, figures):
    run = Run(tmp_path, Monitor(), fields=(*FIELDS, "expert_load"))
    run.train(4, expert_load=1.5).end()
    load = panels(figures[-1])["expert_load"]
    assert load.lines[0].get_ydata().tolist() == [1.5] * 4 and not load.texts


def test_of_many_blocks_some_are_named(tmp_path, figures):
    fields = (*FIELDS, *(f"gradient_norm/blocks.{i}" for i in range(40)))
    run = Run(tmp_path, Monitor(), fields=fields)
    run.train(4, **{name: 0.5 for name in fields[5:]}).end()
    axes = panels(figures[-1])["gradient_norm"]
    assert len(axes.lines) == 42 and len(curves(axes)) == 9
    assert {"blocks.0", "blocks.39", "all"} <= curves(axes).keys()


def test_a_resumed_run_shows_all_of_it(tmp_path, figures):
    Run(tmp_path, Monitor()).train(7)
    Run(tmp_path, Monitor(), step=5).train(3).end()
    for name in "learning_rate", "tokens_per_second", "memory_bytes":
        assert panels(figures[-1])[name].lines[0].get_xdata().tolist() == list(range(1, 9))


def test_runs_side_by_side(tmp_path, figures):
    for i, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        Run(tmp_path / name, Monitor()).train(10 + i)
    (tmp_path / "no monitor").mkdir()
    old = Run(tmp_path / "no monitor", None, step=6)
    old.metrics.write()
    draw_runs([tmp_path / "one", tmp_path / "two", tmp_path / "no monitor"], tmp_path / "runs.png")
    found = panels(figures[0])
    assert list(curves(found["loss"])) == ["one", "two", "no monitor"]
    assert curves(found["loss"])["two"] == ([5, 10], [1.4, 1.2])
    assert [len(line.get_xdata()) for line in found["learning_rate"].lines] == [10, 11, 6]
    assert [len(line.get_xdata()) for line in found["memory_bytes"].lines] == [10, 11, 0]
    assert len({line.get_color() for line in found["memory_bytes"].lines}) == 3


def test_runs_of_one_name_go_by_their_paths(tmp_path, figures):
    folders = [tmp_path / parent / "run" for parent in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
        Run(folder, Monitor()).train(5)
    draw_runs(folders, tmp_path / "runs.png")
    assert list(curves(panels(figures[0])["loss"])) == list(map(str, folders))
    with pytest.raises(FileNotFoundError, match="metrics.csv"):
        draw_runs([tmp_path], tmp_path / "runs.png")


def test_the_name_of_a_run_is_a_text(tmp_path):
    """No formula where it holds dollars, and not hidden where it begins with a line."""
    folders = [tmp_path / name for name in ("_first", "$x^{$")]
    for folder in folders:
        folder.mkdir()
        Run(folder, Monitor()).train(5)
    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tinygrad_tf.training.monitor.write_png", lambda figure, path: shown.append(panels(figure)["loss"].get_legend()))
        draw_runs(folders, tmp_path / "runs.png")
    assert [text.get_text() for text in shown[0].get_texts()] == [" _first", "$x^{$"]
    draw_runs(folders, tmp_path / "runs.png")


def test_the_picture_of_runs_is_a_file(tmp_path):
    from matplotlib.image import imread
    Run(tmp_path, Monitor()).train(5)
    draw_runs([tmp_path], tmp_path / "runs.png")
    assert imread(tmp_path / "runs.png").shape[:2] == (700, 1300)


# --- a real run ----------------------------------------------------------------------------------------------------------

def files_of(folder):
    """What two equal runs must have in common."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())
            if path.name not in ("metrics.jsonl", "speed.csv", "monitor.png", "config.toml")}


@pytest.fixture
def drawing_always(monkeypatch):
    monkeypatch.setattr(module, "FIRST_PICTURE", 0.0)


def monitored(folder, **settings):
    trainer = runs.trainer(folder, **settings)
    trainer.callbacks.append(Monitor())
    return trainer


@pytest.mark.parametrize("settings", [{}, {"experts": 2, "dropout": 0.1}, {"precision": "float16"}])
def test_a_monitor_changes_nothing(tmp_path, drawing_always, settings):
    """Bytes of the checkpoints and of metrics.csv, random streams among them."""
    watched, alone = monitored(tmp_path, out="watched", **settings), runs.trainer(tmp_path, out="alone", **settings)
    assert watched.run() and alone.run()
    found = files_of(watched.folder)
    assert found == files_of(alone.folder) and "checkpoint.safetensors" in found and "metrics.csv" in found
    rows = read_metrics(watched.folder / "metrics.jsonl")
    computed = read_metrics(watched.folder / "metrics.csv")
    assert [{name: row[name] for name in computed[0]} for row in rows] == computed and len(rows) == 12
    assert all(row["tokens_per_second"] > 0 and row["memory_bytes"] is not None for row in rows)
    assert (watched.folder / "monitor.png").stat().st_size > 10_000
    assert len(read_metrics(watched.folder / "speed.csv")) == 12


def test_a_stopped_run_goes_on_with_its_lines(tmp_path):
    stopped = monitored(tmp_path, out="stopped")
    assert not stopped.run(should_stop=runs.stop_at(6, stopped))
    with open(stopped.folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 7, "learning_rate": 0.0, "tokens_per_second": 1.0, "memory_bytes": 1}\n{"step": 8, "lea')
    resumed = Trainer.resume(stopped.folder, callbacks=[Monitor()])
    assert resumed.run()
    through = monitored(tmp_path, out="through")
    assert through.run()
    names = through.fields
    one, other = ([{name: row[name] for name in names} for row in read_metrics(t.folder)] for t in (resumed, through))
    assert one == other and [row["step"] for row in one] == list(range(1, 13))


class FullFile:
    """A file on a disk on which there is room for ten more bytes."""

    def __init__(self, path, mode):
        self.file = open(path, mode, buffering=0)
        self.read = self.file.read

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, data):
        self.file.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device", "monitor.png")


@pytest.mark.parametrize("name, broken", [("open", FullFile), ("write_png", full)])
def test_a_full_disk_ends_the_run_and_leaves_its_checkpoint(tmp_path, monkeypatch, drawing_always, name, broken):
    """All is saved at step 8. From then on one kind of file cannot be written: an OSError that names it, and the run can be resumed."""
    trainer = monitored(tmp_path)
    def fill(step, **_):
        if step == 8:
            monkeypatch.setattr(module, name, broken, raising=False)
    with pytest.raises(OSError, match=r"No space left on device: '.*(metrics.jsonl|monitor.png)'"):
        trainer.run(report=fill)
    monkeypatch.undo()
    resumed = Trainer.resume(trainer.folder, callbacks=[Monitor()])
    assert resumed.step >= 8 and resumed.run()
    assert [row["step"] for row in read_metrics(trainer.folder)] == list(range(1, 13))
