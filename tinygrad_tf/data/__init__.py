"""Corpora, tokenizers, n-gram baselines, and batches: all of it NumPy, until padding and packing make tensors."""

from .batches import BatchSampler, EpochOrder, EpochSampler, evaluation_batches
from .bpe import BPETokenizer
from .collate import LMBatch, make_lm_batch, pad_sequences
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
from .huggingface import load_gpt2, load_huggingface
from .ngram import WittenBell, baselines
from .packing import pack_sequences
from .token_file import TokenFile, TokenFileError
from .tokenizers import SPECIAL_TOKENS, ByteTokenizer, CharTokenizer, Tokenizer
from .wordpiece import WordPieceTokenizer

__all__ = [
    "CORPORA",
    "DEFAULT_CORPUS",
    "SHAKESPEARE_COMMAND",
    "SPECIAL_TOKENS",
    "BPETokenizer",
    "BatchSampler",
    "ByteTokenizer",
    "CharTokenizer",
    "CorpusError",
    "EpochOrder",
    "EpochSampler",
    "LMBatch",
    "TokenFile",
    "TokenFileError",
    "Tokenizer",
    "WittenBell",
    "WordPieceTokenizer",
    "baselines",
    "evaluation_batches",
    "load_gpt2",
    "load_huggingface",
    "load_text",
    "make_lm_batch",
    "pack_sequences",
    "pad_sequences",
    "read_files",
    "require_length",
    "split_train_validation",
]
