"""Token files: what is written is read, window by window; a torn, damaged or hostile one is refused in one sentence."""
import errno
import hashlib
import json
import os
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinygrad_tf.data import (
    BatchSampler,
    ByteTokenizer,
    CharTokenizer,
    EpochSampler,
    TokenFile,
    TokenFileError,
    evaluation_batches,
    split_train_validation,
)
from tinygrad_tf.data.token_file import HEADER

ROOT = Path(__file__).resolve().parent.parent
TEXT = "the cat sat on the mat. " * 20
TOKENIZER = CharTokenizer.from_text(TEXT)
IDS = TOKENIZER.encode(TEXT)


class Large:
    """A tokenizer of so many tokens."""
    def __init__(self, vocab_size): self.vocab_size, self.fingerprint = vocab_size, f"{vocab_size:064x}"


@pytest.fixture
def file(tmp_path):
    return TokenFile.write(tmp_path / "text.tokens", [IDS], TOKENIZER)


def refused(path, words, **options):
    """It raises TokenFileError with these words, in one sentence on one line."""
    with pytest.raises(TokenFileError, match=words) as raised:
        TokenFile(path, **options)
    assert "\n" not in str(raised.value) and str(path) in str(raised.value)


# --- what is written is read ------------------------------------------------------------------------------------------------

@given(st.lists(st.lists(st.integers(0, 299), max_size=20), max_size=6).filter(any), st.sampled_from([300, 65536, 65537]))
def test_chunks_of_any_size_are_one_text(tmp_path_factory, chunks, vocab_size):
    path = tmp_path_factory.mktemp("tokens") / "a"
    TokenFile.write(path, (np.array(chunk, dtype=np.int64) for chunk in chunks), Large(vocab_size))
    file = TokenFile(path, Large(vocab_size))
    assert file.ids.tolist() == [i for chunk in chunks for i in chunk] and len(file) == len(file.ids)
    assert file.ids.dtype == file.dtype == ("uint16" if vocab_size <= 65536 else "uint32")
    assert path.stat().st_size == HEADER + len(file) * file.ids.itemsize


def test_the_largest_token_of_each_width(tmp_path):
    for vocab_size in 65536, 65537, 2**32:
        file = TokenFile.write(tmp_path / "a", [[0, vocab_size - 1]], Large(vocab_size))
        assert file.ids.tolist() == [0, vocab_size - 1] and TokenFile(file.path).vocab_size == vocab_size


def test_the_first_line_tells_a_reader_what_it_is(file):
    line = file.path.read_bytes()[:HEADER]
    assert line.endswith(b" \n") and json.loads(line) == {
        "format": "tinygrad_tf.tokens 1", "dtype": "uint16", "count": len(IDS), "vocab_size": TOKENIZER.vocab_size,
        "tokenizer": TOKENIZER.fingerprint, "sha256": file.sha256}
    assert repr(file) == f"TokenFile({str(file.path)!r}, 480 tokens, uint16)"


def test_one_text_gives_one_file_however_it_was_cut(tmp_path):
    whole = TokenFile.write(tmp_path / "a", [IDS], TOKENIZER)
    parts = TokenFile.write(tmp_path / "b", np.array_split(IDS, 7), TOKENIZER)
    assert whole.path.read_bytes() == parts.path.read_bytes()


# --- samplers read it where it lies -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("make", [BatchSampler, EpochSampler])
def test_a_sampler_draws_from_a_file_what_it_draws_from_an_array(file, make):
    train, held_out = split_train_validation(file.ids)
    for on_disk, ids in (file, IDS), (file.ids, IDS), (train, IDS[:-48]), (held_out, IDS[-48:]):
        one, other = make(on_disk, 8, 5, seed=3), make(ids, 8, 5, seed=3)
        assert np.shares_memory(one.ids, file.ids) and one.state_dict() == other.state_dict()
        for _ in range(4):
            for a, b in zip(one.next(), other.next()):
                assert (a == b).all() and a.dtype == np.int64 and type(a) is np.ndarray


def test_evaluation_reads_a_file_as_an_array(file):
    for on_disk, ids in (file, IDS), (split_train_validation(file.ids)[1], IDS[-48:]):
        pairs = zip(evaluation_batches(on_disk, 7, 3), evaluation_batches(ids, 7, 3), strict=True)
        for batch, other in pairs:
            for a, b in zip(batch, other):
                assert (a == b).all() and a.dtype == np.int64 and type(a) is np.ndarray and not np.shares_memory(a, file.ids)


def test_nobody_can_change_it(file):
    with pytest.raises(ValueError, match="read-only"):
        file.ids[0] = 1
    writable = np.memmap(file.path, "<u2", "c", offset=HEADER)
    assert not np.shares_memory(BatchSampler(writable, 8, 5).ids, writable)        # a copy, as of any array


@pytest.mark.skipif(sys.platform != "linux", reason="a file with holes")
def test_a_text_larger_than_the_memory_is_sampled_without_it(tmp_path):
    """40 GB of which nothing is on the disk: the windows that are read, and the order of the epoch, are all that is in memory."""
    path, count = tmp_path / "huge", 20 * 10**9
    line = json.loads(TokenFile.write(path, [[1]], Large(50000)).path.read_bytes()[:HEADER]) | {"count": count}
    path.write_bytes(json.dumps(line).encode().ljust(HEADER - 1) + b"\n")
    os.truncate(path, HEADER + 2 * count)
    tracemalloc.start()
    file = TokenFile(path, verify=False)
    sampler, epochs = BatchSampler(file, 1024, 8), EpochSampler(split_train_validation(file.ids)[0], 1 << 20, 2)
    for source in sampler, epochs:
        assert all((ids == 0).all() for ids in source.next())
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()


# --- written whole, or not at all ----------------------------------------------------------------------------------------------

def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def failing(error):
    yield IDS[:10]
    raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "the disk is broken", "elsewhere"), ValueError("no such text")])
def test_an_error_on_the_way_leaves_the_file_before(file, error):
    before = file.path.read_bytes()
    with pytest.raises(type(error)) as raised:
        TokenFile.write(file.path, failing(error), TOKENIZER)
    assert raised.value.args == error.args and getattr(raised.value, "filename", None) == getattr(error, "filename", None)
    assert file.path.read_bytes() == before and left_in(file.path.parent) == ["text.tokens"]


@pytest.mark.parametrize("chunks, error, words", [
    ([[1, 2], [TOKENIZER.vocab_size]], IndexError, "outside the vocabulary"),
    ([[1, 2], [-1]], IndexError, "token id -1 is outside the vocabulary"),
    ([[1.5]], TypeError, "must be integers"),
    ([1, 2, 3], ValueError, "one axis"),
    ([], ValueError, "no tokens to write"),
    ([[], []], ValueError, "no tokens to write"),
])
def test_what_is_no_text_of_tokens_is_not_written(tmp_path, chunks, error, words):
    with pytest.raises(error, match=words):
        TokenFile.write(tmp_path / "a", chunks, TOKENIZER)
    assert left_in(tmp_path) == []


def run(code, *arguments):
    """The exit status and stderr of a script in a process of its own."""
    script = "import sys\nimport numpy as np\nfrom tinygrad_tf.data import *\npath = sys.argv[1]\n" + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", script, *map(str, arguments)], env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=60)


@pytest.mark.host("a process of its own, on the CPU")
@pytest.mark.skipif(os.name != "posix", reason="limits and signals of POSIX")
def test_a_full_disk_and_a_kill_leave_the_file_before(file):
    before = file.path.read_bytes()
    full = run("""
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
        try:
            TokenFile.write(path, [np.ones(4000, int)] * 3, ByteTokenizer())
        except OSError as error:
            print(error, file=sys.stderr)
    """, file.path)
    assert full.returncode == 0 and "File too large" in full.stderr and str(file.path) in full.stderr
    assert file.path.read_bytes() == before and left_in(file.path.parent) == ["text.tokens"]
    killed = run("""
        import os, signal
        def chunks():
            yield np.ones(100000, int)
            os.kill(os.getpid(), signal.SIGKILL)
        TokenFile.write(path, chunks(), ByteTokenizer())
    """, file.path)
    assert killed.returncode == -9 and file.path.read_bytes() == before and TokenFile(file.path, TOKENIZER).ids.tolist() == IDS.tolist()


# --- what is refused ----------------------------------------------------------------------------------------------------------

def test_a_file_that_ends_too_early_or_late_is_torn(file):
    content = file.path.read_bytes()
    for length in (0, 1, 100, HEADER - 1):
        file.path.write_bytes(content[:length])
        refused(file.path, "is no token file: it does not begin with the line")
    for length in (HEADER, HEADER + 1, len(content) - 2, len(content) - 1):
        file.path.write_bytes(content[:length])
        refused(file.path, f"is torn: it says that it holds 480 tokens, which takes {len(content)} bytes, and has {length}", verify=False)
    file.path.write_bytes(content + b"\0\0")
    refused(file.path, "is torn", verify=False)


def test_another_tokenizer_is_refused(file):
    assert TokenFile(file.path, CharTokenizer.from_text(TEXT)).tokenizer == TOKENIZER.fingerprint
    refused(file.path, "made by another tokenizer than this ByteTokenizer", tokenizer=ByteTokenizer())
    refused(file.path, "made by another tokenizer than this CharTokenizer", tokenizer=CharTokenizer.from_text(TEXT + "z"))


def test_every_changed_byte_is_noticed(file):
    """Of 500 seeded changes each is refused, or changes nothing: a space of the first line may become a tab."""
    content, rng, damaged = file.path.read_bytes(), np.random.default_rng(0), 0
    for turn in range(500):
        changed = bytearray(content)
        place = int(rng.integers(HEADER)) if turn % 2 else int(rng.integers(HEADER, len(content)))
        changed[place] ^= int(rng.integers(1, 256))
        file.path.write_bytes(changed)
        try:
            found = TokenFile(file.path)
        except TokenFileError as error:
            assert "\n" not in str(error) and str(file.path) in str(error)
            damaged += 1
        else:
            assert place < HEADER and found.ids.tolist() == IDS.tolist() and vars(found).keys() == vars(file).keys()
            assert (found.tokenizer, found.vocab_size, found.sha256) == (file.tokenizer, file.vocab_size, file.sha256)
    assert damaged > 480


def with_line(file, **entries):
    content = file.path.read_bytes()
    line = {name: value for name, value in {**json.loads(content[:HEADER]), **entries}.items() if value is not None}
    file.path.write_bytes(json.dumps(line).encode().ljust(HEADER - 1) + b"\n" + content[HEADER:])
    return file.path


@pytest.mark.parametrize("entries, words", [
    ({"count": 10**30}, "is torn: it says that it holds 1000000000000000000000000000000 tokens"),
    ({"count": 0}, "is no token file"), ({"count": -480}, "is no token file"), ({"count": 480.0}, "is no token file"),
    ({"count": True}, "is no token file"), ({"count": None}, "is no token file"), ({"dtype": "uint32"}, "is torn"),
    ({"dtype": "object"}, "is no token file"), ({"dtype": "float16"}, "is no token file"), ({"dtype": ["uint16"]}, "is no token file"),
    ({"format": "tinygrad_tf.tokens 2"}, "is no token file"), ({"vocab_size": 0}, "is no token file"), ({"more": 1}, "is no token file"),
    ({"sha256": "0" * 64}, "is damaged"), ({"tokenizer": "0" * 64}, "is damaged"), ({"vocab_size": 99}, "is damaged"),
])
def test_a_first_line_that_nobody_writes_is_refused(file, entries, words):
    refused(with_line(file, **entries), words)


def test_a_file_that_was_made_to_look_right_holds_no_token_beyond_its_vocabulary(tmp_path):
    path = TokenFile.write(tmp_path / "a", [[5, 300]], Large(301)).path
    other = TokenFile.write(tmp_path / "b", [[5, 5]], Large(5 + 1))
    content = path.read_bytes()
    said = {**json.loads(content[:HEADER]), "vocab_size": other.vocab_size}
    said.pop("sha256")
    digest = hashlib.sha256(content[HEADER:] + json.dumps(said, sort_keys=True).encode()).hexdigest()
    path.write_bytes(json.dumps({**said, "sha256": digest}).encode().ljust(HEADER - 1) + b"\n" + content[HEADER:])
    refused(path, "holds the token 300, and says that its vocabulary has 6")


@pytest.mark.parametrize("content", [b"", b"\n" * 600, b"[" * 600, b'{"a":' * 200, b"\xff" * 600, b"null".ljust(600), b"\x80\x04" * 300,
                                     b"9" * 600, b"{}".ljust(600), b"NaN".ljust(600)])
def test_what_is_no_token_file_is_refused(tmp_path, content):
    path = tmp_path / "a"
    path.write_bytes(content)
    refused(path, "is no token file")


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file .*TokenFile.write"):
        TokenFile(tmp_path / "a")
    refused(tmp_path, "is no token file, but a folder or a device")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        refused(tmp_path / "pipe", "is no token file, but a folder or a device")
