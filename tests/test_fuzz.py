"""Fifty damaged files of each kind, the same ones each time: each is read or refused with the documented error, soon, in little memory."""
import sys

import fuzz
import pytest

pytest.importorskip("regex")
MOST = 2**30                    # bytes that the memory may grow by


@pytest.mark.host("files, read on the CPU")
@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_a_damaged_file_is_read_or_refused(tmp_path, kind):
    before = fuzz.peak_bytes() if sys.platform != "win32" else 0
    read, refused = fuzz.survive(kind, tmp_path, 50)
    assert read + refused == 50 and refused > 0
    if sys.platform != "win32":
        assert fuzz.peak_bytes() - before < MOST


@pytest.mark.parametrize("reader, said", [
    (lambda path: {}["x"], "KeyError"), (lambda path: (_ for _ in ()).throw(ValueError("two\nlines")), "more than one line"),
    (lambda path: [None for _ in iter(int, 1)], "TimeoutError")],
    ids=["an error that is not documented", "two lines", "a reader that hangs"])
@pytest.mark.skipif(sys.platform == "win32", reason="there is no alarm on Windows")
def test_what_no_reader_should_do_is_found(tmp_path, monkeypatch, reader, said):
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    monkeypatch.setitem(fuzz.KINDS, "faulty", (lambda path: path.write_text("a b c"), reader, (ValueError,)))
    with pytest.raises(AssertionError, match=said):
        fuzz.survive("faulty", tmp_path, 3)


def test_the_damage_is_the_same_each_time():
    content = (b"{}", b'{"a": [1, 2, {"b": "c"}], "d": 1.5}', b"", b"\x00\xff" * 200)
    made = [[fuzz.damaged(data, fuzz.random.Random(seed)) for seed in range(40)] for data in content for _ in range(2)]
    assert made[::2] == made[1::2] and all(len(set(files)) > 10 or data == b"" for files, data in zip(made[::2], content))
