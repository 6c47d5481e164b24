"""Whole numbers of a few bits, as bytes: two of 4 bits in one byte, four of 2 in one, eight of 3 in three."""
import math

import numpy as np

from ..backend import array_module


def packed_size(count, bits):
    """Bytes of a row of `count` codes: ⌈count · bits / 8⌉."""
    return -(-count * bits // 8)


def pack(q, bits):
    """Whole numbers [..., n] as bytes [..., ⌈n · bits / 8⌉], row by row. uint8: 0 … 2^bits − 1. int8: −2^(bits − 1) … 2^(bits − 1) − 1.

    8 bits are bytes already. Of fewer, int8 is first shifted by 2^(bits − 1), up to where 0 is the smallest. The fewest codes that fill
    whole bytes then make a word, Σ codeᵢ · 2^(bits · i), of which the bytes are kept, the lowest first.
    """
    if bits == 8:
        return q
    xp, (per_word, word_bytes, word) = array_module(q), _word(bits)
    rows, n = q.shape[:-1], q.shape[-1]
    count = -(-n // per_word)
    codes = xp.zeros((*rows, count * per_word), word)               # zeros after the last code
    codes[..., :n] = q + np.int8(2 ** (bits - 1)) if q.dtype == np.int8 else q
    codes = codes.reshape(*rows, count, per_word)
    words = sum(codes[..., i] << word.type(bits * i) for i in range(per_word))
    split = xp.stack([words >> word.type(8 * j) & word.type(255) for j in range(word_bytes)], axis=-1)
    return split.astype(np.uint8).reshape(*rows, count * word_bytes)[..., :packed_size(n, bits)]


def unpack(packed, bits, count, signed):
    """The first `count` numbers of each row, int8 if signed, else uint8: the reverse of `pack`."""
    if bits == 8:
        return packed
    xp, (per_word, word_bytes, word) = array_module(packed), _word(bits)
    rows, words = packed.shape[:-1], -(-count // per_word)
    split = _whole_words(packed, words * word_bytes).reshape(*rows, words, word_bytes)
    joined = split[..., 0] if word_bytes == 1 else sum(split[..., j].astype(word) << word.type(8 * j) for j in range(word_bytes))
    codes = xp.empty((*rows, words, per_word), np.int8 if signed else np.uint8)
    for i in range(per_word):
        codes[..., i] = joined >> word.type(bits * i) & word.type(2 ** bits - 1)
    if signed:
        codes -= np.int8(2 ** (bits - 1))
    return codes.reshape(*rows, words * per_word)[..., :count]


def _whole_words(packed, size):
    """The bytes that were cut off behind the last code, put back."""
    if packed.shape[-1] == size:
        return packed
    whole = array_module(packed).zeros((*packed.shape[:-1], size), np.uint8)
    whole[..., :packed.shape[-1]] = packed
    return whole


def _word(bits):
    """(codes of a word, its bytes, a dtype that holds it)"""
    whole = math.lcm(bits, 8)
    return whole // bits, whole // 8, np.dtype(np.uint8 if whole == 8 else np.uint32 if whole <= 32 else np.uint64)
