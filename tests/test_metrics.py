"""metrics.csv and loss.png."""
import csv
import re

import numpy as np
import pytest

from tinygrad_tf.training.metrics import FIELDS, Metrics, moving_mean


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
    metrics._draw_losses(axes)
    mean = axes.lines[1]
    around = (int(re.search(r"mean of (\d+)", mean.get_label())[1]) - 1) // 2
    assert mean.get_xdata().tolist() == list(range(1 + around, steps + 1 - around))
    np.testing.assert_allclose(mean.get_ydata(), 5 - 0.01 * mean.get_xdata(), rtol=1e-12)
