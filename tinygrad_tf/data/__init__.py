"""Corpora, tokenizers, n-gram baselines, and batches: all of it NumPy, none of it needs a Tensor."""

from .batches import BatchSampler, evaluation_batches
from .corpora import (
    CORPORA,
    DEFAULT_CORPUS,
    SHAKESPEARE_COMMAND,
    CorpusError,
    load_text,
    read_files,
    require_length,
    split_train_validation,
)
from .ngram import WittenBell, baselines
from .tokenizers import SPECIAL_TOKENS, ByteTokenizer, CharTokenizer

__all__ = [
    "CORPORA",
    "DEFAULT_CORPUS",
    "SHAKESPEARE_COMMAND",
    "SPECIAL_TOKENS",
    "BatchSampler",
    "ByteTokenizer",
    "CharTokenizer",
    "CorpusError",
    "WittenBell",
    "baselines",
    "evaluation_batches",
    "load_text",
    "read_files",
    "require_length",
    "split_train_validation",
]
