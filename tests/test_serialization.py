"""`save` and `load`: what went in comes out to the last bit, nothing else goes in, and no file can do harm."""
import io
import json
import math
import os
import pickle
import threading
import zipfile
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import runs
from device import host
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file, save_file

import tinygrad_tf as torch
from tinygrad_tf import nn, serialization
from tinygrad_tf.models import MiniGPT


def through_memory(obj, **options):
    file = io.BytesIO()
    torch.save(obj, file)
    file.seek(0)
    return torch.load(file, **options)


def written(obj):
    file = io.BytesIO()
    torch.save(obj, file)
    return file.getvalue()


def assert_equal(a, b):
    """Equal in types, order, bits and flags."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        assert host(a).tobytes() == host(b).tobytes()
    elif isinstance(a, dict):
        assert [repr(key) for key in a] == [repr(key) for key in b]
        for x, y in zip(a.values(), b.values()):
            assert_equal(x, y)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_equal(x, y)
    else:
        assert repr(a) == repr(b)               # 1 and 1.0, 0.0 and -0.0, nan and nan


DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
TENSORS = [torch.ones(2, 3, dtype=getattr(torch, d)) for d in DTYPES] + [torch.tensor(2.5), torch.zeros(0, 3), torch.ones(2, 3).T * 2,
                                                                         torch.tensor([math.nan, math.inf, -0.0]), torch.arange(9)[::2]]
PLAIN = [None, True, False, 0, -1, 2**70, 1 / 3, -0.0, 5e-324, math.inf, -math.inf, math.nan, "", "é\n\"\\", "\ud800", "sha256"]
OBJECTS = [*TENSORS, *PLAIN, [], (), {}, TENSORS, tuple(PLAIN), torch.Size([2, 3]), [[[]], ({},)],
           {"": torch.ones(1), "a.b": torch.ones(2)}, {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1), "__metadata__": torch.ones(3)},
           {"__metadata__": 1, "dict": {"list": [1]}}, {0: 1, "0": 2, None: 3, True: 4, 0.5: 5, "None": torch.ones(1)},
           {"\udc00": torch.ones(1), "?": torch.zeros(1)},
           {"tensor": "a", "requires_grad": True}, nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False),
           torch.ones(2, requires_grad=True)]


@pytest.mark.parametrize("number", range(len(OBJECTS)))
def test_everything_that_may_be_saved_comes_back_as_it_was(number):
    assert_equal(through_memory(OBJECTS[number]), OBJECTS[number])


plain = st.none() | st.booleans() | st.integers(-2**80, 2**80) | st.floats() | st.text(max_size=5)
shapes = hnp.array_shapes(min_dims=0, max_side=3, min_side=0)
tensors = hnp.arrays(st.sampled_from([np.float32, np.float16, np.int64, np.bool_]), shapes).map(torch.tensor)
trees = st.recursive(plain | tensors, lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
                     | st.dictionaries(plain, inner, max_size=3), max_leaves=8)


@given(trees)
def test_any_nesting_comes_back(obj):
    assert_equal(through_memory(obj), obj)
    assert written(obj) == written(obj)


def test_dicts_of_other_kinds_become_dicts():
    assert_equal(through_memory(OrderedDict(b=1, a=2)), {"b": 1, "a": 2})


# --- states of models and optimizers ----------------------------------------------------------------------------------

def trained(seed):
    torch.manual_seed(seed)
    model = MiniGPT(vocab_size=11, max_seq_len=8, dim=8, num_heads=2, hidden_dim=16, num_layers=2, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.99))
    return model, optimizer


def step(model, optimizer):
    tokens = torch.randint(0, 11, (2, 5))
    optimizer.zero_grad()
    model(tokens[:, :-1], tokens[:, 1:])[1].backward()
    optimizer.step()


def test_a_run_goes_on_from_a_file_bit_for_bit(tmp_path):
    model, optimizer = trained(0)
    for _ in range(3):
        step(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(),
        "step": 3}, tmp_path / "run")
    step(model, optimizer)
    other, its_optimizer = trained(1)
    state = torch.load(tmp_path / "run", map_location="cpu", weights_only=True)
    other.load_state_dict(state["model"])
    its_optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    step(other, its_optimizer)
    assert state["step"] == 3 and 0 in state["optimizer"]["state"]
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))
    assert_equal(its_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_every_optimizer_state_comes_back(make):
    p = nn.Parameter(torch.ones(3))
    optimizer = make([p], lr=0.1, **({"momentum": 0.9} if make is torch.optim.SGD else {}))
    (p * p).sum().backward()
    optimizer.step()
    assert_equal(through_memory(optimizer.state_dict()), optimizer.state_dict())


def test_other_programs_read_a_state_dict_by_its_names(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    torch.save(model.state_dict(), tmp_path / "m.safetensors")
    arrays = load_file(tmp_path / "m.safetensors")
    assert sorted(arrays) == sorted(model.state_dict()) and (arrays["0.weight"] == host(model[0].weight)).all()


@pytest.mark.torch
def test_pytorch_reads_the_file_through_safetensors(tmp_path):
    pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch
    torch.save({"w": torch.arange(6).reshape(2, 3), "n": 1}, tmp_path / "f")
    assert load_torch(tmp_path / "f")["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


# --- memory -----------------------------------------------------------------------------------------------------------

def test_what_shares_memory_is_stored_once_and_shares_it_again():
    w = torch.ones(1000)
    p = nn.Parameter(w)
    obj = {"a": w, "b": [w, w.detach()], "p": p, "row": w[:500]}
    back = through_memory(obj)
    assert len(written(obj)) < 1.9 * w.nbytes
    assert back["a"] is back["b"][0] and type(back["p"]) is nn.Parameter
    with torch.no_grad():
        back["p"][0] = 7
    assert back["a"][0].item() == back["b"][1][0].item() == 7 and back["row"][0].item() == 1


def test_a_write_through_one_alias_is_noticed_by_the_graph_of_another():
    back = through_memory([nn.Parameter(torch.ones(2)), 0])
    w = torch.ones(2)
    p, alias = through_memory([nn.Parameter(w), w])
    loss = (p * p).sum()
    alias.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
    assert back[0].requires_grad


def test_what_is_loaded_is_independent_of_what_was_saved_and_can_be_written():
    w = torch.ones(3)
    back = through_memory([w])[0]
    back += 1
    assert w.tolist() == [1, 1, 1] and back.tolist() == [2, 2, 2]


def test_history_is_not_saved():
    x = torch.ones(2, requires_grad=True)
    y = through_memory(x * 3)
    assert y.is_leaf and y.requires_grad and y.tolist() == [3, 3]


def test_map_location():
    assert through_memory([torch.ones(1)], map_location=torch.device("cpu"))[0].device == torch.device("cpu")
    with pytest.raises(RuntimeError, match="unknown"):
        through_memory(1, map_location="nowhere")
    with pytest.raises(TypeError, match="device"):
        through_memory(1, map_location=lambda storage, place: storage)


# --- what is not saved ------------------------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


@pytest.mark.parametrize("bad, words", [
    (object(), ["obj is a object"]), ({"a": [0, {1}]}, ["obj['a'][1] is a set"]),
        ([np.ones(2)], ["obj[0]", "numpy.ndarray", "from_numpy"]),
    ({"lr": np.float64(1)}, ["obj['lr']", "float64", ".item()"]), ({"m": nn.Linear(1, 1)}, ["obj['m']", "Linear", "state_dict()"]),
    ({"f": len}, ["obj['f']", "builtin_function"]), ({"b": b"x"}, ["bytes"]), ({"z": 1j}, ["complex"]), (Point(1, 2), ["Point"]),
    ({(1, 2): 3}, ["the dict obj", "(1, 2)", "tuple"]), ({"a": {torch.float32: 3}}, ["obj['a']", "dtype"]), ([torch.float32], ["dtype"]),
    ({"o": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)}, ["obj['o']", "SGD", "state_dict()"]),
])
def test_anything_else_is_refused_with_its_place(tmp_path, bad, words):
    with pytest.raises(TypeError) as caught:
        torch.save(bad, tmp_path / "f")
    assert not [w for w in words if w not in str(caught.value)] and "\n" not in str(caught.value), str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_contains_itself_or_is_too_deep_is_refused(tmp_path):
    loop = []
    loop.append({"again": loop})
    deep = 1
    for _ in range(100_000):
        deep = [deep]
    for bad in (loop, deep):
        with pytest.raises(ValueError, match="contains itself"):
            torch.save(bad, tmp_path / "f")
    fits = 1
    for _ in range(200):
        fits = (fits,)
    assert_equal(through_memory(fits), fits)
    twice = [1]
    assert through_memory([twice, twice]) == [[1], [1]]
    while isinstance(deep, list):               # Python frees nested lists by recursion
        deep = deep[0]


@pytest.mark.parametrize("where", ["replace", "fsync", "open"])
def test_a_failure_while_writing_leaves_the_old_file(tmp_path, monkeypatch, where):
    path = tmp_path / "f"
    torch.save(1, path)
    runs.fill_disk(monkeypatch, where)
    with pytest.raises(OSError, match="No space left"):
        torch.save(2, path)
    assert torch.load(path) == 1 and os.listdir(tmp_path) == ["f"]


def test_threads_that_write_one_file_never_spoil_it(tmp_path):
    path, failures, sizes = tmp_path / "f", [], (10, 50_000)
    torch.save(torch.ones(10), path)

    def work(size):
        try:
            for _ in range(30):
                torch.save(torch.ones(size), path)
                assert torch.load(path).numel() in sizes
        except Exception as error:
            failures.append(error)
    threads = [threading.Thread(target=work, args=(size,)) for size in sizes * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and os.listdir(tmp_path) == ["f"]


def test_a_file_that_happens_to_have_the_temporary_name_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(serialization.secrets, "token_hex", lambda n: "00" * n)
    theirs = tmp_path / f".f.{os.getpid()}.00000000.tmp"
    theirs.write_text("precious")
    with pytest.raises(FileExistsError):
        torch.save(1, tmp_path / "f")
    assert theirs.read_text() == "precious" and os.listdir(tmp_path) == [theirs.name]


@pytest.mark.skipif(os.name != "posix", reason="links and permissions of POSIX")
def test_a_link_and_permissions_survive(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to("real")
    torch.save(1, link)                         # a link to what is not there yet
    old = os.umask(0o027)
    try:
        torch.save(1, tmp_path / "new")
        for mode in (0o600, 0o666):
            real.chmod(mode)
            torch.save(mode, link)
            assert link.is_symlink() and torch.load(real) == mode and real.stat().st_mode & 0o777 == mode
    finally:
        os.umask(old)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["link", "new", "real"]


def test_what_is_no_file_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    for path in ("", ".", tmp_path / "folder", *([os.devnull] if os.name == "posix" else [])):
        with pytest.raises(FileExistsError, match="no file that could be replaced"):
            torch.save(1, path)
    assert os.listdir(tmp_path) == ["folder"] and os.listdir(tmp_path / "folder") == []


@pytest.mark.parametrize("wrap", [lambda a: [a, a], lambda a: (a, a), lambda a: {"x": a, "y": a}])
def test_containers_that_double_at_each_level_are_refused_at_once(wrap):
    a = [1]
    for _ in range(60):
        a = wrap(a)
    with pytest.raises(ValueError, match="again and again"):
        torch.save(a, io.BytesIO())
    row = list(range(100))
    assert through_memory([row] * 50) == [row] * 50 and len(through_memory([[] for _ in range(1000)])) == 1000


# --- what is not loaded -----------------------------------------------------------------------------------------------

def refused(data, *words):
    """load raises one sentence that says these things."""
    with pytest.raises(ValueError) as caught:
        torch.load(io.BytesIO(data))
    assert "\n" not in str(caught.value) and str(caught.value).startswith("load: ")
    assert not [w for w in words if w not in str(caught.value)], str(caught.value)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_and_not_run(protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(pickle.dumps(Bomb(), protocol), "pickle" if protocol >= 2 else "no safetensors file")
    assert not os.path.exists("exploded")


def test_pytorchs_zip_file_is_refused_with_what_to_do():
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Bomb()))
    refused(data.getvalue(), "PyTorch", "pickle", "safetensors.torch.save_file")


@pytest.mark.torch
@pytest.mark.parametrize("new_format", [True, False])
def test_files_of_pytorch_here(new_format):
    pytorch = pytest.importorskip("torch")
    data = io.BytesIO()
    pytorch.save({"w": pytorch.ones(2)}, data, _use_new_zipfile_serialization=new_format)
    refused(data.getvalue(), "pickle")


def forged(tree, tensors=None, digest=None, **changes):
    """A file whose digest is right, around any tree."""
    tensors = tensors or {}
    document = {"format": 1, "sha256": serialization._sha256(tensors, tree) if digest is None else digest, "object": tree, **changes}
    header = {name: described("F32", list(a.shape), 0, a.nbytes) for name, a in tensors.items()}
    return raw({"__metadata__": {"tinygrad_tf.save": json.dumps(document)}, **header}, b"".join(a.tobytes() for a in tensors.values()))


def described(dtype, shape, start, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def raw(header, data=b""):
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


ONE = {"w": np.ones(2, np.float32)}
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("data", [
    b"", b"{}", b"\0" * 7, b"\0" * 8, b"\xff" * 8 + b"{}", (2**40).to_bytes(8, "little") + b"{}", (10**8).to_bytes(8, "little") + b"{}",
    b"PK", raw("{}"), raw("[]"), raw("null"), raw(DEEP), raw({"__metadata__": {}}), raw({"__metadata__": {"tinygrad_tf.save": "{"}}),
    raw({"__metadata__": {"tinygrad_tf.save": "[]"}}), raw({"__metadata__": {"tinygrad_tf.save": DEEP}}), raw({"__metadata__": 5}),
    raw({"w": described("F32", [2**40], 0, 2**42)}), raw({"w": described("F32", [2**62, 4], 0, 0)}),
    raw({"w": described("F32", [0, 2**62], 0, 0)}), raw({"w": described("F32", [-1], 0, 4)}, b"abcd"),
    raw({"w": described("F32", [1], 4, 8)}, b"abcdabcd"), raw({"w": described("X", [1], 0, 4)}, b"abcd"),
    raw({"w": described("BF16", [2], 0, 4)}, b"abcd"), raw({"w": described("U64", [1], 0, 8)}, b"a" * 8),
    raw({"w": described("C64", [1], 0, 8)}, b"a" * 8),
    forged(1, digest="0" * 64), forged(1, format=2), forged(1, format=None), forged([1]), forged({}), forged({"set": [1]}),
    forged({"list": 5}),
    forged({"dict": [1]}), forged({"dict": [[[1], 2]]}), forged({"dict": [[{}, 2]]}), forged({"dict": {"a": 1}}), forged({"tensor": "w"}),
    forged({"tensor": "w", "requires_grad": False}), forged({"tensor": ["w"], "requires_grad": False}, ONE), forged({"tensor": "w"}, ONE),
    forged({"parameter": {}, "requires_grad": True}, ONE), forged({"Size": ["a"]}),
    forged({"list": [{"list": [[]]}]}), forged({"list": "ab", "x": {}})[:-3],
    forged({"tensor": "w", "requires_grad": True}, ONE)[:-1], forged({"tensor": "w", "requires_grad": True}, ONE) + b"\0",
    written([torch.ones(3)])[:40], written([torch.ones(3)])[:-1], written([torch.ones(3)]) + b"x",
], ids=lambda data: repr(data[8:60]))
def test_hostile_and_broken_files_get_one_sentence(data):
    refused(data)


def test_the_forger_of_these_tests_can_write_sound_files():
    x = torch.load(io.BytesIO(forged({"tensor": "w", "requires_grad": True}, ONE)))
    assert x.tolist() == [1, 1] and x.requires_grad


def test_every_flipped_byte_is_seen():
    data, sound = bytearray(written({"w": torch.arange(4), "lr": 0.1})), {"w": [0, 1, 2, 3], "lr": 0.1}
    for i in range(len(data)):
        data[i] ^= 1 << i % 8
        try:
            back = torch.load(io.BytesIO(bytes(data)))
            assert {"w": back["w"].tolist(), "lr": back["lr"]} == sound, i
        except ValueError as error:
            assert "\n" not in str(error)
        data[i] ^= 1 << i % 8
    for length in range(len(data)):
        refused(bytes(data[:length]))


def test_files_that_are_not_there_or_not_ours(tmp_path):
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(FileNotFoundError, match="no file"):
            torch.load(path)
    save_file({"w": np.ones(2)}, tmp_path / "other")
    refused((tmp_path / "other").read_bytes(), "tinygrad_tf.save", "load_file")
    (tmp_path / "text").write_text("{}")
    with open(tmp_path / "text") as file, pytest.raises(TypeError, match="binary"):
        torch.load(file)
    with pytest.raises(TypeError):
        torch.save(1, 5)
    with pytest.raises(ValueError, match="other"):
        torch.load(str(tmp_path / "other"))


@pytest.mark.parametrize("header", [b"", b"\x02" + b"\0" * 7 + b"{}", b"\xff" * 8, b"PK\x03\x04", b"\x80\x04",
                                    (10).to_bytes(8, "little") + b"[5]       "])
def test_a_file_larger_than_any_memory_is_refused_unread(tmp_path, header):
    with open(tmp_path / "sparse", "wb") as file:
        file.write(header)
        file.truncate(2**42)
    with pytest.raises(ValueError, match="zip file|pickle|no safetensors file"):
        torch.load(tmp_path / "sparse")


def test_a_file_without_room_for_it_is_named():
    class Large(io.BytesIO):
        name = "weights"

        def read(self, size=-1):
            raise MemoryError
    with pytest.raises(MemoryError, match="weights is larger"):
        torch.load(Large())


def test_an_open_file_is_read_from_where_it_stands(tmp_path):
    with open(tmp_path / "two", "wb") as file:
        file.write(b"before")
        torch.save([1], file)
    with open(tmp_path / "two", "rb") as file:
        file.seek(6)
        assert torch.load(file) == [1]
