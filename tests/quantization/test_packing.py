"""Numbers of a few bits as bytes: the layout, bit by bit, and the way back."""
import numpy as np
import pytest
from device import host, placed
from hypothesis import given
from hypothesis import strategies as st

from tinygrad_tf.quantization import pack, unpack
from tinygrad_tf.quantization.packing import packed_size


def numbers(bits, signed, shape, seed=0):
    low = -(2 ** (bits - 1)) if signed else 0
    return np.random.default_rng(seed).integers(low, low + 2 ** bits, shape).astype(np.int8 if signed else np.uint8)


@given(st.integers(1, 8), st.booleans(), st.lists(st.integers(0, 3), max_size=2), st.integers(0, 40), st.integers(0, 99))
def test_there_and_back(bits, signed, rows, n, seed):
    q = numbers(bits, signed, (*rows, n), seed)
    packed = pack(placed(q), bits)
    assert packed.shape == (*rows, packed_size(n, bits)) and packed.dtype.itemsize == 1
    back = host(unpack(packed, bits, n, signed))
    assert back.dtype == q.dtype and np.array_equal(back, q)


@pytest.mark.parametrize("bits", range(1, 9))
def test_bit_i_of_a_row_is_bit_i_of_its_bytes(bits):
    """NumPy's own bits: those of the codes in a row, then filled with zeros, are those of the bytes in a row."""
    q = numbers(bits, False, (5, 11))
    digits = np.unpackbits(q[..., None], axis=-1, bitorder="little")[..., :bits].reshape(5, -1)
    assert np.array_equal(host(pack(placed(q), bits)), np.packbits(digits, axis=-1, bitorder="little"))


def test_two_nibbles_in_a_byte_the_first_below():
    assert host(pack(placed(np.array([1, 2, 3], np.uint8)), 4)).tolist() == [0x21, 0x03]
    assert host(pack(placed(np.array([-8, 7, 0], np.int8)), 4)).tolist() == [0xF0, 0x08]


@pytest.mark.parametrize("signed", [True, False])
def test_eight_bits_are_bytes_already(signed):
    q = placed(numbers(8, signed, (3, 4)))
    assert pack(q, 8) is q and unpack(q, 8, 4, signed) is q


@pytest.mark.parametrize("bits, n, size", [(4, 7, 4), (4, 8, 4), (3, 8, 3), (3, 9, 4), (2, 5, 2), (8, 5, 5), (5, 1, 1), (7, 0, 0)])
def test_not_a_byte_is_wasted_but_behind_the_last_code(bits, n, size):
    assert packed_size(n, bits) == size == pack(placed(np.zeros((2, n), np.uint8)), bits).shape[-1]


def test_the_input_stays_and_strides_do_not_matter():
    q = placed(numbers(3, True, (6, 10)))
    before = host(q).copy()
    assert np.array_equal(host(pack(q[::2, ::2], 3)), host(pack(placed(before[::2, ::2].copy()), 3)))
    assert np.array_equal(host(q), before)
