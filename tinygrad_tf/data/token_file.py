"""A text as token ids in a file that is larger than the memory: written in chunks, mapped, and read where it is looked at.

bytes 0 … 511      one line of JSON, filled up with spaces: format, dtype, count, vocab_size, tokenizer, sha256
from byte 512 on   the ids, uint16 where the vocabulary has at most 65,536 tokens, else uint32; little-endian

`tokenizer` is the fingerprint of the one that made the ids; sha256 is over the ids and all that the line says.
"""
import hashlib
import json
import os
from pathlib import Path

import numpy as np

from ..serialization import replacing
from .tokenizers import as_ids

FORMAT = "tinygrad_tf.tokens 1"
HEADER = 512                                    # bytes
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
CHUNK = 1 << 22                                 # tokens that are looked at together, when a file is checked


class TokenFileError(ValueError):
    """A file that holds no tokens, or not those that were written; its message is one sentence."""


class TokenFile:
    """The ids of a file, [N], on disk until they are read:    file.ids[a:b], len(file), BatchSampler(file, …)

    TokenFile.write(path, chunks, tokenizer) makes one. `ids` is a read-only np.memmap; a slice of it, such as each part of
    split_train_validation(file.ids), stays on disk too.
    """

    def __init__(self, path, tokenizer=None, verify=True):
        """Raises FileNotFoundError, and TokenFileError for a file that is torn, damaged or none of ours, or of another tokenizer.

        verify: all of it is read once, in chunks, for its SHA-256 (two or three seconds a gigabyte); False trusts what stands in it.
        """
        self.path = Path(path)
        header = self._read_header()
        self.dtype, self.vocab_size = header["dtype"], header["vocab_size"]
        self.tokenizer, self.sha256 = header["tokenizer"], header["sha256"]
        self.ids = np.memmap(self.path, DTYPES[self.dtype], "r", offset=HEADER, shape=(header["count"],))
        if tokenizer is not None and tokenizer.fingerprint != self.tokenizer:
            raise TokenFileError(f"the tokens in {path} were made by another tokenizer than this {type(tokenizer).__name__}: use that one, "
                                 f"or write the file again")
        if verify:
            self._verify()

    @classmethod
    def write(cls, path, chunks, tokenizer):
        """The file of all ids in chunks, an iterable of integers [n], such as tokenizer.encode(part) for the parts of a text.

        It appears under its name when it is whole: a crash or a full disk leaves what was there before. IndexError for ids outside
        the vocabulary, ValueError where there is not a single one; OSError.
        """
        dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        count, digest = 0, hashlib.sha256()
        with replacing(path) as file:
            file.write(bytes(HEADER))
            for chunk in chunks:
                data = as_ids(chunk, tokenizer.vocab_size).astype(DTYPES[dtype])
                file.write(data)
                digest.update(data)
                count += len(data)
            if not count:
                raise ValueError(f"TokenFile.write: there are no tokens to write to {path}")
            said = _said(dtype, count, tokenizer.vocab_size, tokenizer.fingerprint)
            file.seek(0)
            file.write(_as_header({**said, "sha256": _with_header(digest, said)}))
        return cls(path, verify=False)

    def __len__(self):
        return len(self.ids)

    def __repr__(self):
        return f"TokenFile({str(self.path)!r}, {len(self):,} tokens, {self.dtype})"

    def _read_header(self):
        """What the first line says, when it fits the size of the file; no more than that line is read."""
        if not self.path.is_file():             # a pipe would be waited for
            if not self.path.exists():
                raise FileNotFoundError(f"there is no file {self.path}: write it with TokenFile.write(path, chunks, tokenizer)")
            raise TokenFileError(f"{self.path} is no token file, but a folder or a device")
        with self.path.open("rb") as file:
            header, size = _parsed(file.read(HEADER)), os.fstat(file.fileno()).st_size
        if header is None:
            raise TokenFileError(f"{self.path} is no token file: it does not begin with the line that TokenFile.write puts there")
        wanted = HEADER + header["count"] * DTYPES[header["dtype"]].itemsize
        if size != wanted:
            raise TokenFileError(f"{self.path} is torn: it says that it holds {header['count']} tokens, which takes {wanted} bytes, and "
                                 f"has {size}")
        return header

    def _verify(self):
        digest, largest = hashlib.sha256(), 0
        for start in range(0, len(self), CHUNK):
            part = self.ids[start:start + CHUNK]
            digest.update(part)
            largest = max(largest, int(part.max()))
        if _with_header(digest, _said(self.dtype, len(self), self.vocab_size, self.tokenizer)) != self.sha256:
            raise TokenFileError(f"{self.path} is damaged: its content does not have the SHA-256 that was stored with it")
        if largest >= self.vocab_size:
            raise TokenFileError(f"{self.path} holds the token {largest}, and says that its vocabulary has {self.vocab_size}")


def held(ids):
    """ids [N] for a sampler: the array of a file stays where it is, since nobody can change it; of anything else a copy, int64."""
    ids = ids.ids if isinstance(ids, TokenFile) else ids
    on_disk = isinstance(ids, np.memmap) and not ids.flags.writeable and ids.ndim == 1 and ids.dtype in DTYPES.values()
    return ids if on_disk else as_ids(ids)


def _said(dtype, count, vocab_size, tokenizer):
    return {"format": FORMAT, "dtype": dtype, "count": count, "vocab_size": vocab_size, "tokenizer": tokenizer}


def _with_header(digest, said):
    digest.update(json.dumps(said, sort_keys=True).encode())
    return digest.hexdigest()


def _as_header(entries):
    return json.dumps(entries).encode().ljust(HEADER - 1) + b"\n"


def _parsed(line):
    """The entries of the first line; None where it is not one that `write` makes."""
    try:
        entries = json.loads(line) if len(line) == HEADER else None
    except (ValueError, RecursionError):
        return None
    kinds = {"format": str, "dtype": str, "count": int, "vocab_size": int, "tokenizer": str, "sha256": str}
    if not isinstance(entries, dict) or {name: type(value) for name, value in entries.items()} != kinds:
        return None
    known = entries["format"] == FORMAT and entries["dtype"] in DTYPES and entries["count"] > 0 and entries["vocab_size"] > 0
    return entries if known else None
