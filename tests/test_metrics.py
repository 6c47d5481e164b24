"""metrics.csv and loss.png; the norms of the parts of a model."""
import csv
import math
import re

import numpy as np
import pytest
from device import strict_counts

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.nn.utils import clip_grad_norm_
from tinygrad_tf.training.metrics import (
    FIELDS,
    WITH_EXPERTS,
    Metrics,
    draw_losses,
    fields_of,
    moving_mean,
    norms_by_module,
    part_of,
    read_metrics,
    smoothed,
    thinned,
)


def filled(folder, steps=40):
    metrics = Metrics(folder)
    for step in range(1, steps + 1):
        metrics.add(step=step, learning_rate=1e-3 / 3, train_loss=3 / step, gradient_norm=1e-300 / step,
                    validation_loss=2 / step if step % 10 == 0 else None)
    return metrics


def test_the_file_holds_every_digit(tmp_path):
    metrics = filled(tmp_path)
    metrics.write()
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == FIELDS
    assert [int(row["step"]) for row in rows] == list(range(1, 41))
    assert [float(row["train_loss"]) for row in rows] == [3 / step for step in range(1, 41)]
    assert [float(row["gradient_norm"]) for row in rows] == [1e-300 / step for step in range(1, 41)]
    assert [row["validation_loss"] for row in rows] == [repr(2 / step) if step % 10 == 0 else "" for step in range(1, 41)]
    assert b"\r" not in (tmp_path / "metrics.csv").read_bytes()


def test_the_table_is_the_whole_content(tmp_path):
    metrics = filled(tmp_path)
    metrics.write()
    before = (tmp_path / "metrics.csv").read_bytes()
    Metrics(tmp_path, metrics.table()).write()
    assert (tmp_path / "metrics.csv").read_bytes() == before
    steps, values = metrics.column("validation_loss")
    assert steps.tolist() == [10, 20, 30, 40] and values.tolist() == [0.2, 0.1, 2 / 30, 0.05]


def test_a_table_of_another_width_is_refused(tmp_path):
    with pytest.raises(ValueError):
        Metrics(tmp_path, np.zeros((3, 4)))


def test_a_run_without_a_step(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.write()
    metrics.draw()
    assert (tmp_path / "metrics.csv").read_text() == ",".join(FIELDS) + "\n"
    assert metrics.table().shape == (0, 5)


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_the_picture_shows_every_curve(tmp_path, steps):
    from matplotlib.image import imread
    filled(tmp_path, steps).draw({1: 3.2, 2: 2.3})
    picture = imread(tmp_path / "loss.png")
    assert picture.shape[0] > 400 and picture.shape[1] > 800

    def pixels(colour):
        return (np.abs(picture[:, :, :3] - np.array(colour) / 255).max(axis=-1) < 0.02).sum()
    assert pixels((255, 255, 255)) > picture[:, :, 0].size / 2                  # mostly paper
    assert pixels((0x08, 0x51, 0x9c)) > 20                                      # training
    assert (pixels((0xd9, 0x5f, 0x02)) > 20)                                    # validation, or its name
    assert not list(tmp_path.glob(".*"))


def test_drawing_needs_no_display_and_leaves_pyplot_alone(tmp_path, monkeypatch):
    import sys
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("MPLBACKEND", "TkAgg")
    before = "matplotlib.pyplot" in sys.modules
    filled(tmp_path).draw()
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_moving_mean():
    values = np.random.default_rng(0).normal(size=23)
    for around in 0, 1, 5, 11:
        expected = [values[i - around:i + around + 1].mean() for i in range(around, 23 - around)]
        np.testing.assert_allclose(moving_mean(values, around), expected, rtol=1e-12, atol=1e-14)
    for size in 0, 1, 6:
        assert moving_mean(np.ones(size), 3).shape == (0,)
    assert moving_mean(np.ones(7), 3).tolist() == [1.0]


@pytest.mark.parametrize("steps", [1, 2, 3, 40, 250])
def test_the_drawn_mean_lies_on_a_straight_line_from_end_to_end(tmp_path, steps):
    """A window that leans to one side would begin below a falling line and end above it."""
    from matplotlib.figure import Figure
    metrics = Metrics(tmp_path)
    for step in range(1, steps + 1):
        metrics.add(step=step, train_loss=5 - 0.01 * step)
    axes = Figure().subplots()
    draw_losses(axes, metrics.column("train_loss"), metrics.column("validation_loss"))
    mean = axes.lines[1]
    around = (int(re.search(r"mean of (\d+)", mean.get_label())[1]) - 1) // 2
    assert mean.get_xdata().tolist() == list(range(1 + around, steps + 1 - around))
    np.testing.assert_allclose(mean.get_ydata(), 5 - 0.01 * mean.get_xdata(), rtol=1e-12)


# --- the file, read back -------------------------------------------------------------------------------------------------

def test_what_was_written_is_read_back(tmp_path):
    metrics = filled(tmp_path)
    metrics.write()
    rows = read_metrics(tmp_path / "metrics.csv")
    assert rows == read_metrics(tmp_path) and [type(row["step"]) for row in rows] == [int] * 40 and tuple(rows[0]) == FIELDS
    again = Metrics(tmp_path)
    for row in rows:
        again.add(**row)
    np.testing.assert_array_equal(again.table(), metrics.table())


def test_whole_numbers_are_written_as_such(tmp_path):
    table = Metrics(tmp_path, fields=("step", "memory_bytes"), name="speed.csv")
    table.add(step=1, memory_bytes=53248000)
    table.add(step=2, memory_bytes=None)
    table.add(step=3, memory_bytes=0.5)
    table.write()
    assert (tmp_path / "speed.csv").read_text() == "step,memory_bytes\n1,53248000\n2,\n3,0.5\n"


@pytest.mark.parametrize("name, content", [
    ("metrics.csv", b""), ("metrics.csv", b"loss\n1\n"), ("metrics.csv", b"step,loss\n1\n"), ("metrics.csv", b"step,loss\n1,2,3\n"),
    ("metrics.csv", b"step,loss\n1,cat\n"), ("metrics.csv", b"step,loss\n,1\n"), ("metrics.csv", b"step,loss\n1e999,1\n"),
    ("metrics.csv", b"\xff\xfe"), ("metrics.csv", b'step,loss\n1,"2'), ("metrics.csv", b"step\n" + b"1" * 200_000 + b"\n"),
    ("metrics.jsonl", b"cat\n"), ("metrics.jsonl", b"[1]\n"), ("metrics.jsonl", b"{}\n"), ("metrics.jsonl", b'{"step": "1"}\n'),
    ("metrics.jsonl", b'{"step": null}\n'), ("metrics.jsonl", b'{"step": NaN}\n'), ("metrics.jsonl", b'{"step": 1e999}\n'),
    ("metrics.jsonl", b"\0\0\n"), ("metrics.jsonl", b'{"step": 1, "loss": ' + b"[" * 100_000 + b"\n"),
    ("metrics.jsonl", b'{"step": ' + b"1" * 100_000 + b"}\n"), ("metrics.jsonl", b'{"step": 1, "loss": true}\n')])
def test_a_file_that_holds_something_else(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} holds no metrics of a run"):
        read_metrics(tmp_path / name)


def test_a_live_file_may_end_in_half_a_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "train_loss": 2.5}\n{"step": 2, "train_loss": null}\n{"step": 3, "tr')
    assert read_metrics(tmp_path) == [{"step": 1, "train_loss": 2.5}, {"step": 2, "train_loss": None}]
    with pytest.raises(FileNotFoundError, match="metrics.csv"):
        read_metrics(tmp_path / "metrics.csv")


# --- norms of the parts --------------------------------------------------------------------------------------------------

def trained(scale=1.0, dtype=torch.float32):
    """A MiniGPT with gradients."""
    torch.manual_seed(0)
    model = MiniGPT(11, 8, 16, 2, 32, num_layers=3).to(dtype)
    ids = torch.randint(0, 11, (2, 9))
    model(ids[:, :-1], ids[:, 1:])[1].backward()
    for p in model.parameters():
        p.grad.mul_(scale)
    return model


def test_parts_are_named_from_the_input_on():
    model = trained()
    parts = ["embedding", "blocks.0", "blocks.1", "blocks.2", "final_norm"]
    assert list(norms_by_module(model)) == [f"gradient_norm/{part}" for part in parts]
    assert fields_of(model) == (*FIELDS, *norms_by_module(model)) and fields_of(model, 4) == (*WITH_EXPERTS, *norms_by_module(model))
    assert [part_of(name) for name in ("0.weight", "weight", "blocks.10.ffn.bias", "head.bias")] == ["0", "weight", "blocks.10", "head"]


@pytest.mark.parametrize("dtype, scale", [(torch.float32, 1.0), (torch.float32, 1e-25), (torch.float32, 1e25), (torch.float64, 1e-60),
                                          (torch.float64, 1e60), (torch.float16, 1.0)])
def test_the_squares_of_the_parts_add_up_to_what_clipping_sees(dtype, scale):
    """Also where squares leave the range; the tied weight counts once."""
    model = trained(scale, dtype)
    norms = norms_by_module(model)
    total = clip_grad_norm_(model.parameters(), math.inf).item()
    assert math.sqrt(sum((norm / total) ** 2 for norm in norms.values())) == pytest.approx(1, rel=1e-6)
    assert all(type(norm) is float and norm > 0 for norm in norms.values())
    alone = clip_grad_norm_(model.blocks[1].parameters(), math.inf).item()
    assert norms["gradient_norm/blocks.1"] == pytest.approx(alone, rel=1e-6)


def test_norms_leave_the_gradients_alone_and_say_what_is_not_there():
    model = trained()
    before = [p.grad.clone() for p in model.parameters()]
    for p in model.blocks[0].parameters():
        p.grad = None
    model.final_norm.weight.grad.fill_(math.nan)
    norms = norms_by_module(model)
    assert norms["gradient_norm/blocks.0"] == 0 and math.isnan(norms["gradient_norm/final_norm"])
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before) if p.grad is not None and not b.isnan().any()
               and p is not model.final_norm.weight)
    model.zero_grad()
    assert set(norms_by_module(model).values()) == {0.0}
    assert norms_by_module(nn.Identity()) == {} and fields_of(nn.Identity()) == FIELDS


def test_a_device_is_waited_for_once(gpu):
    """Two launches a parameter at most, and all the numbers in one transfer."""
    torch.set_default_device("cuda")
    model = trained()
    if (counts := strict_counts()) is None:
        pytest.skip("nobody counts here")
    before = vars(counts).copy()
    norms_by_module(model)
    made = {name: getattr(counts, name) - before[name] for name in before}
    assert made["downloads"] == made["syncs"] == 1 and made["uploads"] == 0
    assert made["launches"] <= 2 * len(list(model.parameters())) + 1


# --- curves of many points -----------------------------------------------------------------------------------------------

def test_a_long_curve_keeps_its_spikes_and_its_ends():
    values = np.random.default_rng(0).normal(size=123_457)
    values[[777, 100_000]] = 50, -50
    steps, kept = thinned(np.arange(len(values)), values)
    assert len(kept) <= 2000 and (np.diff(steps) > 0).all() and (values[steps] == kept).all()
    assert {777, 100_000} <= set(steps.tolist()) and steps[0] < 130 and steps[-1] > 123_457 - 130
    few = np.arange(2000), values[:2000]
    assert thinned(*few)[1] is few[1]


def test_smoothed():
    (steps, means), window = smoothed(np.arange(100), np.arange(100.0))
    assert window == 5 and steps.tolist() == means.tolist() == list(range(2, 98))
    assert smoothed(np.arange(0), np.arange(0.0))[0][1].shape == (0,)


def test_a_long_run_is_drawn(tmp_path):
    """A curve of 200,000 points with noise is more than Matplotlib draws in one piece."""
    rng = np.random.default_rng(0)
    table = np.full((200_000, len(FIELDS)), np.nan)
    table[:, 0], table[:, 2] = np.arange(1, 200_001), rng.normal(size=200_000)
    Metrics(tmp_path, table).draw()
    assert (tmp_path / "loss.png").stat().st_size > 10_000


@pytest.mark.parametrize("arguments, said", [({}, "loss (nats per character)"), ({"unit": "token"}, "loss (nats per token)")])
def test_the_axis_says_what_is_counted(tmp_path, monkeypatch, arguments, said):
    from tinygrad_tf.training import metrics as module
    drawn = []
    monkeypatch.setattr(module, "write_png", lambda figure, path: drawn.append(figure.axes[0]))
    filled(tmp_path).draw(**arguments)
    filled(tmp_path).draw(bytes_per_unit=4.0, **arguments)
    plain, with_bits = drawn
    assert plain.get_ylabel() == with_bits.get_ylabel() == said and not plain.child_axes
    right, = with_bits.child_axes
    with_bits.figure.draw_without_rendering()
    assert right.get_ylabel() == "bits per byte"
    np.testing.assert_allclose(right.get_ylim(), np.array(with_bits.get_ylim()) / (4 * math.log(2)))
