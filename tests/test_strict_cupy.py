"""The stand-in for CuPy: what CuPy allows passes, and every planted mix-up of host and device is refused as CuPy refuses it."""
import copy
import importlib.machinery
import math
import pickle
import sys
from unittest import mock

import numpy as np
import pytest
import strict_cupy as cp


def device(shape=(2, 3), dtype=np.float32):
    return cp.asarray(np.arange(math.prod(shape)).reshape(shape).astype(dtype))


def host(shape=(2, 3)):
    return np.ones(shape, np.float32)


def changed(x, write):
    write(x)
    return x


X = np.arange(6, dtype=np.float32).reshape(2, 3)

# What runs on both libraries, and the value that it has.
ALLOWED = {
    "array + array": (lambda x: x + x, X + X),
    "array + number": (lambda x: x + 2, X + 2),
    "number - array": (lambda x: 2 - x, 2 - X),
    "numpy scalar * array": (lambda x: np.float32(2) * x, 2 * X),
    "array * numpy scalar": (lambda x: x * np.float32(2), 2 * X),
    "array @ array": (lambda x: x @ x.T, X @ X.T),
    "comparison": (lambda x: x > 2, X > 2),
    "in place": (lambda x: changed(x, lambda y: y.__iadd__(1)), X + 1),
    "one element": (lambda x: x[0, 1], np.float32(1)),
    "slices, None and ...": (lambda x: x[None, ..., ::-1], X[None, :, ::-1]),
    "index by a device array": (lambda x: x[cp.asarray([1, 0, 1])], X[[1, 0, 1]]),
    "index by a device mask": (lambda x: x[x > 2], X[X > 2]),
    "index by a list": (lambda x: x[:, [0, 2]], X[:, [0, 2]]),
    "store a device array": (lambda x: changed(x, lambda y: y.__setitem__(0, y[1] * 2)), np.array([[6, 8, 10], [3, 4, 5]])),
    "store a number": (lambda x: changed(x, lambda y: y.__setitem__((slice(None), 0), 7)), np.array([[7, 1, 2], [7, 4, 5]])),
    "one number, twice in a cell": (lambda x: changed(x, lambda y: y.__setitem__(cp.asarray([1, 1]), 7)), np.array([[0, 1, 2], [7] * 3])),
    "exp": (lambda x: cp.exp(x), np.exp(X)),
    "maximum into out": (lambda x: cp.maximum(x, 2, out=x), np.maximum(X, 2)),
    "where": (lambda x: cp.where(x > 2, x, 0), np.where(X > 2, X, 0)),
    "einsum": (lambda x: cp.einsum("ij,kj->ik", x, x), X @ X.T),
    "add.at": (lambda x: changed(x, lambda y: cp.add.at(y, cp.asarray([0, 0]), 1.0)), X + [[2], [0]]),
    "maximum.reduce": (lambda x: cp.maximum.reduce(x, axis=1), X.max(axis=1)),
    "concatenate": (lambda x: cp.concatenate([x, x], axis=1), np.concatenate([X, X], axis=1)),
    "stack": (lambda x: cp.stack((x, x)), np.stack((X, X))),
    "take_along_axis": (lambda x: cp.take_along_axis(x, cp.argmax(x, axis=1)[:, None], axis=1), X[:, 2:]),
    "sum with axis and keepdims": (lambda x: x.sum(axis=-1, keepdims=True), X.sum(axis=-1, keepdims=True)),
    "mean in float64, asked for": (lambda x: x.mean(dtype=np.float64), X.mean()),
    "argsort, stable": (lambda x: cp.argsort(-x, axis=1, kind="stable"), np.argsort(-X, axis=1)),
    "transpose and reshape": (lambda x: x.transpose(1, 0).reshape(-1), X.T.reshape(-1)),
    "astype": (lambda x: x.astype(np.float64), X.astype(np.float64)),
    "view as other bits": (lambda x: x.view(np.uint32), X.view(np.uint32)),
    "broadcast_to": (lambda x: cp.broadcast_to(x[0], (4, 3)), np.broadcast_to(X[0], (4, 3))),
    "ogrid": (lambda x: cp.ogrid[0:2, 0:3][1] + cp.ogrid[0:2, 0:3][0], np.add.outer(np.arange(2), np.arange(3))),
    "zeros of a dtype": (lambda x: cp.zeros((2, 2), dtype=x.dtype), np.zeros((2, 2))),
    "an array of device numbers": (lambda x: cp.asarray([x.sum(), x.max()]), np.array([15, 5])),
    "norm": (lambda x: cp.linalg.norm(x), np.linalg.norm(X)),
    "allclose stays on the device": (lambda x: cp.allclose(x, x), True),
    "copy": (lambda x: copy.copy(x), X),
    "deepcopy": (lambda x: copy.deepcopy(x), X),
    "pickle": (lambda x: pickle.loads(pickle.dumps(x)), X),
    "iteration": (lambda x: cp.stack(list(x)), X),
}


@pytest.mark.parametrize("idiom", ALLOWED)
def test_what_cupy_allows_passes_and_stays_on_the_device(idiom):
    run, expected = ALLOWED[idiom]
    result = run(device())
    assert type(result) is cp.ndarray
    np.testing.assert_allclose(result.get(), expected, rtol=1e-6)


# Mix-ups of host and device, and what CuPy does not have: (exception of CuPy, what is done).
REFUSED = {
    "np.asarray(x)": (TypeError, lambda x: np.asarray(x)),
    "np.array(x)": (TypeError, lambda x: np.array(x)),
    "np.array([x, x])": (TypeError, lambda x: np.array([x, x])),
    "np.float32(x)": (TypeError, lambda x: np.float32(x)),
    "np.exp(x)": (TypeError, lambda x: np.exp(x)),
    "np.sum(x)": (TypeError, lambda x: np.sum(x)),
    "np.isnan(x).any()": (TypeError, lambda x: np.isnan(x).any()),
    "np.concatenate([x, x])": (TypeError, lambda x: np.concatenate([x, x])),
    "np.where(x > 0, x, 0)": (TypeError, lambda x: np.where(x > 0, x, 0)),
    "x + np": (TypeError, lambda x: x + host()),
    "np + x": (TypeError, lambda x: host() + x),
    "np += x": (TypeError, lambda x: host().__iadd__(x)),
    "x += np": (TypeError, lambda x: x.__iadd__(host())),
    "x @ np": (TypeError, lambda x: x @ host((3, 2))),
    "x > np": (TypeError, lambda x: x > host()),
    "np < x": (TypeError, lambda x: host() < x),
    "x + list": (TypeError, lambda x: x + [1, 2, 3]),
    "np 0-d + x": (TypeError, lambda x: np.array(2.0) + x),
    "cp.exp(np)": (TypeError, lambda x: cp.exp(host())),
    "cp.exp(list)": (TypeError, lambda x: cp.exp([1.0, 2.0])),
    "cp.add(x, np)": (TypeError, lambda x: cp.add(x, host())),
    "cp.add(x, x, out=np)": (TypeError, lambda x: cp.add(x, x, out=host())),
    "cp.sum(np)": (TypeError, lambda x: cp.sum(host())),
    "cp.where(np, x, x)": (TypeError, lambda x: cp.where(host() > 0, x, x)),
    "cp.where(x > 0, np, x)": (TypeError, lambda x: cp.where(x > 0, host(), x)),
    "cp.concatenate([x, np])": (TypeError, lambda x: cp.concatenate([x, host()])),
    "cp.stack of numbers": (TypeError, lambda x: cp.stack([1.0, 2.0])),
    "cp.matmul(x, np)": (TypeError, lambda x: cp.matmul(x, host((3, 2)))),
    "cp.einsum with np": (TypeError, lambda x: cp.einsum("ij,ij->", x, host())),
    "x[np ids]": (TypeError, lambda x: x[np.array([0, 1])]),
    "x[np mask]": (TypeError, lambda x: x[host() > 0]),
    "x.take(np ids)": (TypeError, lambda x: x.take(np.array([0, 1]))),
    "np[x ids]": (TypeError, lambda x: host((9,))[cp.asarray([1, 2])]),
    "x[...] = np": (ValueError, lambda x: x.__setitem__(Ellipsis, host())),
    "x[0] = list": (TypeError, lambda x: x.__setitem__(0, [1, 2, 3])),
    "x.fill(np)": (ValueError, lambda x: x.fill(host())),
    "x[:, n of the device]": (TypeError, lambda x: x[:, :cp.asarray(2)]),
    "cp.arange(n of the device)": (TypeError, lambda x: cp.arange(x.sum())),
    "cp.zeros(shape of the device)": (TypeError, lambda x: cp.zeros(cp.asarray(3))),
    "x.reshape(n of the device)": (TypeError, lambda x: x.reshape(cp.asarray(6))),
    "range(n of the device)": (TypeError, lambda x: range(cp.asarray(3))),
    "list[n of the device]": (TypeError, lambda x: [1, 2, 3][cp.asarray(1)]),
    "repeats of the device": (ValueError, lambda x: cp.repeat(x, cp.asarray([1, 2]), axis=0)),
    "number in x": (TypeError, lambda x: 3 in x),
    "math.sqrt of an array": (ValueError, lambda x: math.sqrt(x)),
    "bool of an array": (ValueError, lambda x: bool(x)),
    "hash": (TypeError, lambda x: hash(x)),
    "index out of bounds": (IndexError, lambda x: x[cp.asarray([0, 5])]),
    "take out of bounds": (IndexError, lambda x: x.take(cp.asarray([0, 9]))),
    "float index": (IndexError, lambda x: x[cp.asarray([0.0])]),
    "one cell, two values": (cp.RepeatedIndex, lambda x: x.__setitem__((0, cp.asarray([1, 1])), x[0, :2])),
    "multiply.at": (NotImplementedError, lambda x: cp.multiply.at(x, cp.asarray([0]), 2.0)),
    "add.at on int64": (TypeError, lambda x: cp.add.at(x.astype(np.int64), cp.asarray([0]), 1)),
    "strings": (ValueError, lambda x: cp.asarray(["a"])),
    "objects": (ValueError, lambda x: cp.asarray([None])),
    "sum(where=)": (TypeError, lambda x: cp.sum(x, where=x > 1)),
    "x.max(initial=)": (TypeError, lambda x: x.max(initial=0)),
    "exp(where=)": (TypeError, lambda x: cp.exp(x, where=x > 1)),
    "cp.errstate": (AttributeError, lambda x: cp.errstate),
    "cp.insert": (AttributeError, lambda x: cp.insert),
    "cp.vecdot": (AttributeError, lambda x: cp.vecdot),
    "x.argwhere": (AttributeError, lambda x: x.argwhere),
    "x.ctypes": (AttributeError, lambda x: x.ctypes),
    "x.flags.writeable": (AttributeError, lambda x: x.flags.writeable),
    "sort(kind='quicksort')": (ValueError, lambda x: cp.sort(x, kind="quicksort")),
    "rng.normal": (AttributeError, lambda x: cp.random.default_rng(0).normal(0, 1)),
    "rng.permutation": (AttributeError, lambda x: cp.random.default_rng(0).permutation(3)),
    "float32 * np.float64": (cp.Float64Alarm, lambda x: x * np.float64(2)),
    "float32 * int64 array": (cp.Float64Alarm, lambda x: x * cp.arange(3)),
    "a GPU that is not there": (cp.CUDARuntimeError, lambda x: cp.cuda.Device(1).use()),
}


@pytest.mark.parametrize("mix_up", REFUSED)
def test_a_planted_mix_up_is_refused(mix_up):
    error, run = REFUSED[mix_up]
    x = device()
    with pytest.raises(error):
        run(x)
    np.testing.assert_array_equal(x.get(), X)


def test_arrays_of_two_gpus_do_not_meet():
    with cp.changed(devices=2):
        x = device()
        with cp.cuda.Device(1):
            y = device()
            assert y.device == cp.cuda.Device(1) and y.device.id == 1
            with pytest.raises(ValueError, match="array device = 0 while current = 1"):
                x + y
            assert cp.asarray(x).device.id == 1         # the door from one GPU to another
        assert cp.cuda.get_device_id() == 0


WAITS = {
    "get": lambda x: x.get(), "item": lambda x: x.sum().item(), "float": lambda x: float(x.sum()), "int": lambda x: int(x.sum()),
    "bool": lambda x: bool((x > 1).any()), "tolist": lambda x: x.tolist(), "print": lambda x: str(x), "mask": lambda x: x[x > 1],
    "store by a mask": lambda x: x.__setitem__(x > 1, 0), "nonzero": lambda x: x.nonzero(), "unique": lambda x: cp.unique(x),
    "where of one argument": lambda x: cp.where(x > 1), "bincount": lambda x: cp.bincount(x.astype(int).reshape(-1)),
    "synchronize": lambda x: cp.cuda.Device().synchronize(), "if": lambda x: 1 if x.sum() > 3 else 0,
}


@pytest.mark.parametrize("what", WAITS)
def test_waiting_for_the_device_is_counted_and_can_be_forbidden(what):
    x, before = device(), cp.counts.syncs
    WAITS[what](x)
    assert cp.counts.syncs == before + 1
    with cp.cupyx.allow_synchronize(False), pytest.raises(cp.DeviceSynchronized):
        WAITS[what](x)


def test_what_stays_on_the_device_waits_for_nothing():
    x = device()
    with cp.cupyx.allow_synchronize(False):
        cp.where((x > 1).any(), cp.exp(x).sum(axis=0), x[0])
        x[cp.asarray([0, 1])], x.max(), cp.allclose(x, x), cp.argsort(x, axis=1), len(x), x.shape


def test_uploads_and_downloads_are_counted():
    up, down = cp.counts.uploads, cp.counts.downloads
    x = cp.asarray(host())
    for use in (lambda: cp.asarray(x), lambda: x + 1, lambda: x[[0, 1]], lambda: x.set(host()), lambda: cp.asnumpy(x)):
        use()
    assert (cp.counts.uploads - up, cp.counts.downloads - down) == (3, 1)       # asarray, the list of ids, set; asnumpy


def test_views_know_whose_memory_they_are():
    x = device()
    for view in (x[0], x.T, x.reshape(-1), x[:, 1:][0], x.view(np.int32), cp.broadcast_to(x, (4, 2, 3)), x[0, 0]):
        assert view.base is x and not view.flags.owndata
    for new in (x.copy(), x + 1, x[cp.asarray([0])], x.T.reshape(-1), x.sum(axis=1)):
        assert new.base is None and new.flags.owndata
    assert x.astype(np.float32, copy=False) is x and cp.asarray(x) is x and cp.array(x) is not x
    assert x[1].data.ptr - x.data.ptr == x.strides[0]
    assert (x.flags.c_contiguous, x.T.flags.c_contiguous, x.T.flags["F_CONTIGUOUS"]) == (True, False, True)


def test_the_memory_pool_counts_what_is_alive():
    pool, before = cp.get_default_memory_pool(), cp.get_default_memory_pool().used_bytes()
    x = cp.zeros((10, 10), dtype=np.float32)
    view = x[2:]
    assert pool.used_bytes() == before + 400
    del x
    assert pool.used_bytes() == before + 400            # the view keeps it
    del view
    assert pool.used_bytes() == before


def test_installed_it_is_what_import_cupy_finds():
    with mock.patch.dict(sys.modules):
        cp.install()
        import cupy
        import cupy.cuda
        import cupyx
        assert cupy is cp and cupyx is cp.cupyx and cupy.cuda.is_available() and cupy.cuda.runtime.getDeviceCount() == 1


def test_what_cupy_has_and_the_stand_in_does_not_says_so():
    with pytest.raises(NotImplementedError, match="add it here"):
        cp.trapz()
    assert cp.__version__.partition(".")[0] == "14"


@pytest.mark.host("the real CuPy, where it is installed, gives the names")
def test_the_recorded_names_are_those_of_cupy():
    if importlib.machinery.PathFinder.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    import record_cupy_names
    now = record_cupy_names.names()
    if now["version"] != cp.NAMES["version"]:
        pytest.skip(f"recorded from CuPy {cp.NAMES['version']}, installed is {now['version']}")
    assert {place for place in now if now[place] != cp.NAMES[place]} == set()
