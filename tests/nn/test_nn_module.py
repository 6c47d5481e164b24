"""Module and Parameter: tables, names, saving and loading, ties, hooks, printing."""
import copy

import numpy as np
import pytest

import tinygrad_tf as torch
from tinygrad_tf import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, ids):
        return self.head(self.body(self.emb(ids) * self.scale))


KEYS = ["scale", "emb.weight", "body.0.weight", "body.0.bias", "head.weight"]


# --- names --------------------------------------------------------------------------------------------------------

def test_names_come_once_under_the_first_name():
    net = Net()
    assert [n for n, _ in net.named_parameters()] == ["emb.weight", "body.0.weight", "body.0.bias"]
    assert [n for n, _ in net.named_parameters(remove_duplicate=False)] == ["emb.weight", "body.0.weight", "body.0.bias", "head.weight"]
    assert [n for n, _ in net.named_parameters(prefix="net", recurse=False)] == []
    assert [n for n, _ in net.named_buffers(prefix="net")] == ["net.scale", "net.scratch"]
    assert [n for n, _ in net.named_modules()] == ["", "emb", "body", "body.0", "body.1", "head"]
    assert [n for n, _ in net.named_children()] == ["emb", "body", "head"]
    assert list(net.state_dict()) == KEYS
    assert net.get_submodule("body.0") is net.body[0] and net.get_submodule("") is net
    assert net.get_parameter("head.weight") is net.emb.weight and net.get_buffer("scale") is net.scale
    for wrong in (lambda: net.get_submodule("body.7"), lambda: net.get_parameter("head.bias"), lambda: net.get_buffer("emb.weight"),
                  lambda: net.get_submodule("emb.weight")):
        with pytest.raises(AttributeError, match="no "):
            wrong()


def test_a_module_used_twice_is_listed_once():
    shared = nn.Linear(2, 2)
    both = nn.Sequential(shared, nn.ReLU(), shared)
    assert len(list(both.parameters())) == 2 and len(list(both.children())) == 2
    assert list(both.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_attributes_move_between_tables():
    m = nn.Module()
    m.x = 3
    m.x = nn.Parameter(torch.ones(2))
    assert "x" not in m.__dict__ and list(m.state_dict()) == ["x"]
    m.x = nn.Linear(1, 1)
    assert list(m.state_dict()) == ["x.weight", "x.bias"]
    del m.x
    assert not hasattr(m, "x") and list(m.state_dict()) == []
    m.register_buffer("b", torch.ones(1), persistent=False)
    m.b = nn.Parameter(torch.ones(1))
    assert list(m.state_dict()) == ["b"]
    m.b = None
    assert m.b is None and list(m.parameters()) == []
    m.plain = torch.ones(3)
    assert list(m.state_dict()) == []           # a bare tensor is an attribute like any other
    with pytest.raises(AttributeError):
        del m.missing


def test_wrong_assignments_are_refused():
    m = nn.Linear(2, 2)
    m.register_buffer("b", torch.zeros(1))
    m.child = nn.ReLU()
    for name, value in (("weight", torch.zeros(2, 2)), ("weight", 1.0), ("b", [1.0]), ("child", torch.zeros(1)), ("child", "x")):
        with pytest.raises(TypeError, match=name):
            setattr(m, name, value)
    with pytest.raises(TypeError, match="weight"):
        nn.Linear(2, 2).register_parameter("weight", torch.zeros(2, 2))
    for call, error in ((lambda: m.register_buffer("weight", torch.zeros(1)), KeyError),
                        (lambda: m.register_buffer("in_features", None), KeyError),
                        (lambda: m.register_buffer("a.b", torch.zeros(1)), KeyError), (lambda: m.add_module("", nn.ReLU()), KeyError),
                        (lambda: m.add_module("f", print), TypeError), (lambda: m.register_buffer("c", 1.0), TypeError),
                        (lambda: m.register_buffer(3, None), TypeError), (lambda: nn.Parameter([1.0]), TypeError),
                        (lambda: nn.Parameter(torch.tensor([1])), RuntimeError), (lambda: m.train("yes"), ValueError)):
        with pytest.raises(error):
            call()
    assert not nn.Parameter(torch.tensor([1]), requires_grad=False).requires_grad


def test_a_forgotten_super_init_is_named():
    class Forgetful(nn.Module):
        def __init__(self, what):
            self.part = what

    for what in (nn.Linear(1, 1), nn.Parameter(torch.ones(1))):
        with pytest.raises(AttributeError, match=r"super\(\).__init__\(\)"):
            Forgetful(what)
    late = Forgetful(3)                         # plain attributes may come first
    with pytest.raises(AttributeError, match=r"super\(\).__init__\(\)"):
        late(1)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = nn.Linear(1, 1).nothing
    with pytest.raises(NotImplementedError, match="forward"):
        nn.Module()(1)


def test_dir_names_what_is_registered():
    names = dir(Net())
    assert {"emb", "head", "scale", "training", "parameters"} <= set(names) and "0" not in dir(nn.Sequential(nn.ReLU()))


# --- parameters ---------------------------------------------------------------------------------------------------

def test_parameter_shares_memory_and_prints_as_one():
    data = torch.tensor([1.0, 2.0])
    p = nn.Parameter(data)
    assert isinstance(p, torch.Tensor) and p.requires_grad and p.is_leaf
    data[0] = 5.0
    assert p.tolist() == [5.0, 2.0]
    assert repr(p) == f"Parameter containing:\n{data.clone().requires_grad_()!r}" and "5., 2." in repr(p)
    assert nn.Parameter().shape == (0,)
    computed = nn.Parameter(p * 2)
    assert computed.is_leaf and computed.node is None
    (p * p).sum().backward()
    assert type(p.grad) is torch.Tensor and p.grad.tolist() == [10.0, 4.0]


def test_deepcopy_keeps_ties_and_shares_nothing():
    net = Net()
    net(torch.tensor([1])).sum().backward()
    twin = copy.deepcopy(net)
    assert twin.head.weight is twin.emb.weight and isinstance(twin.emb.weight, nn.Parameter)
    assert twin.emb.weight.grad is None and net.emb.weight.grad is not None
    for (name, a), b in zip(net.state_dict().items(), twin.state_dict().values()):
        assert (a == b).all() and not np.shares_memory(a.cpu().numpy(), b.cpu().numpy()), name
    frozen = copy.deepcopy(nn.Linear(1, 1).requires_grad_(False))
    assert not frozen.weight.requires_grad


# --- modes and conversions ----------------------------------------------------------------------------------------

def test_train_eval_requires_grad_zero_grad_apply():
    net = Net()
    assert net.eval() is net and not any(m.training for m in net.modules())
    assert all(m.training for m in net.train().modules())
    net(torch.tensor([1])).sum().backward()
    net.zero_grad(set_to_none=False)
    assert all((p.grad == 0).all() for p in net.parameters())
    net.zero_grad()
    assert all(p.grad is None for p in net.parameters())
    assert not any(p.requires_grad for p in net.requires_grad_(False).parameters())
    order = []
    assert net.apply(lambda m: order.append(type(m).__name__)) is net
    assert order == ["Embedding", "Linear", "ReLU", "Sequential", "Linear", "Net"]


@pytest.mark.parametrize("convert, dtype", [(lambda m: m.double(), torch.float64), (lambda m: m.half(), torch.float16),
                                            (lambda m: m.to(torch.float64), torch.float64), (lambda m: m.to("cpu"), torch.float32),
                                            (lambda m: m.double().float(), torch.float32), (lambda m: m.cpu(), torch.float32),
                                            (lambda m: m.to(torch.ones(1, dtype=torch.float64)), torch.float64),
                                            (lambda m: m.to("cpu", torch.float64), torch.float64)])
def test_conversions_are_in_place_and_leave_integers(convert, dtype):
    net = Net()
    net.register_buffer("steps", torch.tensor([3]))
    net(torch.tensor([1])).sum().backward()
    before = list(net.parameters())
    assert convert(net) is net
    assert all(a is b for a, b in zip(before, net.parameters())) and net.head.weight is net.emb.weight
    assert {t.dtype for t in net.parameters()} == {dtype} == {p.grad.dtype for p in net.parameters()}
    assert net.scale.dtype == dtype and net.steps.dtype == torch.int64
    assert all(p.requires_grad for p in net.parameters())


def test_conversions_refuse_what_they_cannot_do():
    for wrong in (lambda m: m.to(torch.int64), lambda m: m.to(dtype=int), lambda m: m.to(colour="red")):
        with pytest.raises(TypeError):
            wrong(nn.Linear(1, 1))


def test_a_graph_made_before_a_conversion_still_runs_backward():
    layer = nn.Linear(2, 1)
    y = layer(torch.ones(1, 2)).sum()
    layer.double()
    y.backward()
    assert layer.weight.grad.tolist() == [[1.0, 1.0]]


# --- saving and loading -------------------------------------------------------------------------------------------

def test_state_dict_is_live_and_detached():
    net = Net()
    state = net.state_dict()
    assert not any(t.requires_grad for t in state.values())
    with torch.no_grad():
        net.emb.weight.fill_(7.0)
    assert (state["head.weight"] == 7).all()
    assert net.state_dict(keep_vars=True)["emb.weight"] is net.emb.weight
    assert list(net.state_dict(prefix="net."))[:2] == ["net.scale", "net.emb.weight"]
    into = {"kept": 1}
    assert net.state_dict(destination=into) is into and into["kept"] == 1


def test_loading_copies_and_keeps_identity_dtype_and_ties():
    source, target = Net().double(), Net()
    before = dict(target.named_parameters())
    result = target.load_state_dict(source.state_dict())
    assert repr(result) == "<All keys matched successfully>" and result.missing_keys == [] == result.unexpected_keys
    assert all(p is before[n] and p.dtype == torch.float32 and p.requires_grad for n, p in target.named_parameters())
    for a, b in zip(source.state_dict().values(), target.state_dict().values()):
        assert np.array_equal(a.cpu().numpy().astype("float32"), b.cpu().numpy())
    with torch.no_grad():
        target.emb.weight.add_(1.0)
    assert not (target.emb.weight == source.emb.weight.float()).any()


def test_every_fault_is_named_and_nothing_is_loaded():
    net = Net()
    good = {k: v.clone() for k, v in net.state_dict().items()}
    bad = {**{k: v + 1 for k, v in good.items() if k not in ("scale", "body.0.bias")}, "body.0.weight": torch.ones(3),
           "extra.w": torch.ones(1), "other": torch.ones(1)}
    with pytest.raises(RuntimeError) as error:
        net.load_state_dict(bad)
    text = str(error.value)
    for part in ('Missing key(s) in state_dict: "scale", "body.0.bias"', 'Unexpected key(s) in state_dict: "extra.w", "other"',
                 "size mismatch for body.0.weight", "(3,)", "(3, 3)", "Net"):
        assert part in text
    assert all((good[k] == v).all() for k, v in net.state_dict().items())


@pytest.mark.parametrize("bad", [torch.ones(1), torch.ones(3, 1), torch.ones(()), torch.ones(1, 3), np.ones(3), 1.0, None])
def test_a_value_that_does_not_fit_is_refused_even_if_not_strict(bad):
    net = nn.Linear(2, 3)
    weight = net.weight.detach().clone()
    with pytest.raises(RuntimeError, match="bias"):
        net.load_state_dict({"weight": torch.zeros(3, 2), "bias": bad}, strict=False)
    assert (net.weight == weight).all()


@pytest.mark.parametrize("where", ["weight", "bias", "ones"])
@pytest.mark.parametrize("how", ["expanded", pytest.param("read-only", marks=pytest.mark.host("CuPy knows no read-only memory"))])
def test_memory_that_cannot_be_written_is_named_and_nothing_is_loaded(where, how):
    net = nn.Linear(2, 2)
    net.register_buffer("ones", torch.ones(2))
    state = {k: v + 1 for k, v in net.state_dict().items()}
    fixed = np.broadcast_to(np.float32(3), net.state_dict()[where].shape)
    fixed = torch.zeros(1).expand(net.state_dict()[where].shape) if how == "expanded" else torch.zeros(1).new_tensor(fixed)
    if how == "read-only":
        fixed.array.flags.writeable = False
    setattr(net, where, fixed if where == "ones" else nn.Parameter(fixed))
    before = {k: v.clone() for k, v in net.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=f"(?s)Linear.*{where}: .*cannot be written.*clone"):
            net.load_state_dict(state, strict=strict)
    assert all((before[k] == v).all() for k, v in net.state_dict().items())


def test_strict_false_reports_and_loads_the_rest():
    net = nn.Linear(2, 1)
    result = net.load_state_dict({"weight": torch.zeros(1, 2), "x": torch.ones(1)}, strict=False)
    assert result == (["bias"], ["x"]) and "bias" in repr(result) and net.weight.tolist() == [[0.0, 0.0]]
    with pytest.raises(TypeError, match="dict-like"):
        net.load_state_dict([1])


def test_tied_names_with_different_values_are_refused():
    net = Net()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    state["emb.weight"][0, 0] = float("nan")
    state["head.weight"][0, 0] = float("nan")
    net.load_state_dict(state)                  # NaN in both is the same value
    state["head.weight"] = state["head.weight"] + 1
    with pytest.raises(RuntimeError, match="head.weight and emb.weight are one tied tensor"):
        net.load_state_dict(state, strict=False)


# --- hooks --------------------------------------------------------------------------------------------------------

def test_hooks_see_and_replace():
    layer, seen = nn.Linear(2, 2), []
    before = layer.register_forward_pre_hook(lambda m, args: seen.append(("pre", args[0].shape)))
    after = layer.register_forward_hook(lambda m, args, out: seen.append(("post", out.shape)))
    x = torch.ones(1, 2)
    plain = layer(x)
    assert seen == [("pre", (1, 2)), ("post", (1, 2))]
    before.remove(), after.remove(), after.remove()
    with layer.register_forward_hook(lambda m, args, out: out * 2):
        assert (layer(x) == plain * 2).all()
    with layer.register_forward_pre_hook(lambda m, args: args[0] * 0):
        assert (layer(x) == layer.bias).all()
    with layer.register_forward_pre_hook(lambda m, args: (args[0] * 0,)):
        assert (layer(x) == layer.bias).all()
    assert (layer(x) == plain).all() and len(seen) == 2


def test_hooks_with_keywords_and_in_order():
    class Scale(nn.Module):
        def forward(self, x, by=1.0):
            return x * by

    m, order = Scale(), []
    m.register_forward_pre_hook(lambda m, args, kwargs: (args, {"by": kwargs["by"] + 1}), with_kwargs=True)
    m.register_forward_hook(lambda m, args, kwargs, out: order.append(kwargs["by"]), with_kwargs=True)
    m.register_forward_hook(lambda m, args, out: order.append("first"), prepend=True)
    assert m(torch.ones(1), by=2.0).tolist() == [3.0] and order == ["first", 3.0]
    m.register_forward_pre_hook(lambda m, args, kwargs: 3, with_kwargs=True)
    with pytest.raises(RuntimeError, match="args, kwargs"):
        m(torch.ones(1), by=2.0)


# --- printing -----------------------------------------------------------------------------------------------------

PRINTED = {
    "Linear(2, 3, bias=False)": "Linear(in_features=2, out_features=3, bias=False)",
    "LayerNorm((2, 3), bias=False)": "LayerNorm((2, 3), eps=1e-05, elementwise_affine=True, bias=False)",
    "RMSNorm(3)": "RMSNorm((3,), eps=None, elementwise_affine=True)",
    "Embedding(3, 2, padding_idx=-1)": "Embedding(3, 2, padding_idx=2)",
    "Dropout(0.3)": "Dropout(p=0.3, inplace=False)",
    "GELU('tanh')": "GELU(approximate='tanh')",
    "Softmax(dim=-1)": "Softmax(dim=-1)",
    "Sequential()": "Sequential()",
    "Sequential(nn.Linear(1, 1), nn.ReLU())": "Sequential(\n  (0): Linear(in_features=1, out_features=1, bias=True)\n  (1): ReLU()\n)",
    "ModuleList([nn.ReLU(), nn.ReLU(), nn.Tanh()])": "ModuleList(\n  (0-1): 2 x ReLU()\n  (2): Tanh()\n)",
    "ModuleList([nn.Sequential(nn.ReLU()) for _ in range(2)])": "ModuleList(\n  (0-1): 2 x Sequential(\n    (0): ReLU()\n  )\n)",
    "ModuleDict({'a': nn.ReLU()})": "ModuleDict(\n  (a): ReLU()\n)",
}


@pytest.mark.parametrize("source", PRINTED)
def test_repr(source):
    assert repr(eval("nn." + source)) == PRINTED[source]


@pytest.mark.torch
@pytest.mark.parametrize("source", PRINTED)
def test_repr_is_that_of_pytorch(source):
    theirs = pytest.importorskip("torch")
    assert repr(eval("nn." + source, {"nn": theirs.nn})) == PRINTED[source]
