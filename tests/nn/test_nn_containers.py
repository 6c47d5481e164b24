"""Sequential, ModuleList, ModuleDict, ParameterList."""
from collections import OrderedDict

import pytest

import tinygrad_tf as torch
from tinygrad_tf import nn


def test_sequential_runs_in_order_and_slices():
    f = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    x = torch.randn(4, 2)
    assert (f(x) == f[2](f[1](f[0](x)))).all() and len(f) == 3 and f[-1] is f[2]
    assert isinstance(f[:2], nn.Sequential) and (f[:2](x) == f[1](f[0](x))).all()
    assert (f[:1] + f[1:])(x).shape == (4, 1)
    named = nn.Sequential(OrderedDict(first=nn.Linear(2, 2), second=nn.Tanh()))
    assert named.first is named[0] and list(named.state_dict()) == ["first.weight", "first.bias"]
    assert (nn.Sequential()(x) == x).all()


@pytest.mark.parametrize("make", [lambda *m: nn.Sequential(*m), lambda *m: nn.ModuleList(m)])
def test_numbered_containers_change_like_lists(make):
    a, b, c, d = (nn.Linear(1, 1) for _ in range(4))
    m = make(a, b)
    assert m.append(c) is m and list(m) == [a, b, c]
    m.insert(1, d)
    assert list(m) == [a, d, b, c] and list(m._modules) == ["0", "1", "2", "3"]
    m[1] = c
    del m[3]
    assert list(m) == [a, c, b]
    assert m.pop() is b and m.pop(0) is a and list(m) == [c] and list(m._modules) == ["0"]
    m.extend([a, b])
    del m[1:]
    assert list(m) == [c] and list(make(a) + make(b)) == [a, b]
    m += [d]
    assert list(m) == [c, d]
    for wrong in (3, -3):
        with pytest.raises(IndexError, match="length 2"):
            m[wrong]
        with pytest.raises(IndexError, match="length 2"):
            m.insert(wrong, a)
    with pytest.raises(TypeError, match="Module"):
        m.append(torch.ones(1))
    with pytest.raises(TypeError, match="Module"):
        m.insert(0, print)
    assert list(m) == [c, d]


@pytest.mark.parametrize("make", [lambda *m: nn.Sequential(*m), lambda *m: nn.ModuleList(m)])
@pytest.mark.parametrize("index", [-3, -2, -1, 0, 1, 2, 3, 5])
def test_insertion_is_that_of_a_list_within_the_length(make, index):
    a, b, new = (nn.Linear(1, 1) for _ in range(3))
    m, wanted = make(a, b), [a, b]
    if abs(index) > 2:
        with pytest.raises(IndexError, match=f"index {index}.*length 2"):
            m.insert(index, new)
    else:
        m.insert(index, new)
        wanted.insert(index, new)
    assert list(m) == wanted and list(m._modules) == [str(i) for i in range(len(wanted))]


def test_module_list_has_no_forward_and_finds_parameters():
    m = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
    assert len(list(m.parameters())) == 4 and isinstance(m[:1], nn.ModuleList)
    with pytest.raises(NotImplementedError):
        m(1)


def test_module_dict():
    m = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.ReLU()})
    assert list(m) == ["a", "b"] == list(m.keys()) and "a" in m and len(m) == 2 and m["a"] is list(m.values())[0]
    m.update({"c": nn.Tanh()})
    assert m.pop("b").__class__ is nn.ReLU and [k for k, _ in m.items()] == ["a", "c"]
    del m["c"]
    with pytest.raises(KeyError):
        m["keys"] = nn.ReLU()                   # would hide the method
    with pytest.raises(TypeError):
        m["x"] = 3
    m.clear()
    assert len(m) == 0 and list(m.parameters()) == []


def test_parameter_list():
    p = nn.ParameterList([torch.ones(2), nn.Parameter(torch.zeros(1))])
    p.append(torch.ones(3))
    p[0] = torch.zeros(2)
    assert len(p) == 3 and all(isinstance(x, nn.Parameter) for x in p) and len(p[1:]) == 2 and p[-1].shape == (3,)
    assert list(p.state_dict()) == ["0", "1", "2"] and "(3,)" in repr(p) and p[0].tolist() == [0.0, 0.0]
    with pytest.raises(TypeError, match="Parameter"):
        p.append([1.0])
