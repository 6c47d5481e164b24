"""Mixture of experts, the layer: sparse = dense, routers, capacity, balance, and a MiniGPT that is made of it."""
import copy
import dataclasses
import gc
import itertools
import weakref

import numpy as np
import pytest
import runs
from device import host, placed

import tinygrad_tf as torch
from tinygrad_tf import amp, nn
from tinygrad_tf.generation import KVCache, Sampler, complete, token_path
from tinygrad_tf.gradcheck import gradcheck, gradcheck_module
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.nn import moe
from tinygrad_tf.nn.moe import ROUTERS, DenseMoE, Experts, MoE, Router, routings, update_biases
from tinygrad_tf.ops.moe import plan_dispatch
from tinygrad_tf.trace import count_flops
from tinygrad_tf.training import TrainConfig, Trainer, load_checkpoint, save_checkpoint
from tinygrad_tf.training.metrics import FIELDS
from tinygrad_tf.training.parts import build_model
from tinygrad_tf.training.state import load_model

C, CFF = 4, 6
every_router = pytest.mark.parametrize("router", ROUTERS)


def pair(*args, dtype=torch.float32, **options):
    """(MoE, DenseMoE) with the same weights: both make their networks in one order."""
    made = []
    for form in (MoE, DenseMoE):
        torch.manual_seed(3)
        made.append(form(C, CFF, *args, **options).to(dtype))
    return made


def tokens(*size, dtype=torch.float32):
    return torch.tensor(np.random.default_rng(sum(size)).standard_normal(size), dtype=dtype)


# --- sparse = dense ---------------------------------------------------------------------------------------------------

def gradients(layer, x):
    """{name: gradient}; those of the experts stacked, whatever the form."""
    found = {"x": host(x.grad), "router": host(layer.router.weight.grad)}
    if layer.router.noise_weight is not None and layer.training:
        found["noise"] = host(layer.router.noise_weight.grad)
    if isinstance(layer, MoE):
        parts = [(name, host(p.grad)) for name, p in layer.experts.named_parameters()]
        return found | {name.replace(".", "_"): g for name, g in parts}
    first = layer.experts[0]
    names = {"net.0": "up_proj", "net.3": "down_proj"}
    for name, _ in first.named_parameters():
        layer_name, kind = name.rpartition(".")[::2]
        parts = [host(dict(expert.named_parameters())[name].grad) for expert in layer.experts]
        found[f"{names.get(layer_name, layer_name)}_{kind}"] = np.stack(parts)
    return found


def assert_same(sparse, dense, x, tolerance, **call):
    """Outputs, routings and gradients for a random upstream gradient."""
    results, dy = [], tokens(*x.shape, dtype=x.dtype)
    for layer in (sparse, dense):
        layer.zero_grad()
        torch.manual_seed(1)                    # of the noise
        given = x.detach().requires_grad_()
        y, routing = layer(given, return_routing=True, **call)
        (y * dy).sum().backward()
        results.append((host(y), routing, gradients(layer, given)))
    (y, routing, found), (z, other, wanted) = results
    assert y.shape == x.shape and routing.plan.counts == other.plan.counts
    for a, b in [(y, z), (host(routing.weights), host(other.weights)), *((found[name], wanted[name]) for name in wanted)]:
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    assert found.keys() == wanted.keys()
    return routing


TOKENS, EXPERTS, RANKS = [(0,), (1,), (2, 1), (7,), (3, 11)], (1, 2, 5, 8), (1, 2, 3, "all")
OPTIONS = [{}, {"ffn": "gelu", "bias": True, "shared_experts": 2}, {"capacity_factor": 0.5, "bias_rate": 0.1}]
LAYERS = [(E, k, options) for E, ranks, options in itertools.product(EXPERTS, RANKS, OPTIONS)
          for k in [E if ranks == "all" else ranks] if k <= E and (ranks != "all" or E > 3)]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=["float32", "float64"])
@every_router
def test_sparse_is_dense(router, dtype, tolerance):
    """Over tokens × experts × ranks × options, forward and backward; experts without a token are among them."""
    compared = empty = dropped = 0
    for E, k, options in LAYERS:
        sparse, dense = pair(E, k, router=router, dtype=dtype, **options)
        for size in TOKENS:
            routing = assert_same(sparse, dense, tokens(*size, C, dtype=dtype), tolerance)
            compared += 1
            empty += sum(count == 0 for count in routing.plan.counts)
            dropped += routing.num_dropped
    assert compared == 165 and empty > 100 and dropped > 100


@every_router
def test_sparse_is_dense_with_padding_in_evaluation_and_with_ties(router):
    for E, k in [(1, 1), (4, 2), (5, 5)]:
        sparse, dense = pair(E, k, router=router, dtype=torch.float64, capacity_factor=0.75)
        x, valid = tokens(3, 5, C, dtype=torch.float64), torch.tensor([[True] * 5, [True] * 2 + [False] * 3, [False] * 5])
        assert_same(sparse, dense, x, 1e-12, valid_tokens=valid)
        same = torch.ones(6, C, dtype=torch.float64)                    # one token six times: one choice
        assert_same(sparse, dense, same, 1e-12)
        for layer in (sparse, dense):
            layer.eval()
            with torch.no_grad():
                layer.router.weight.zero_()                             # all experts alike
        assert_same(sparse, dense, x, 1e-12)
        assert sparse(x, return_routing=True)[1].num_dropped == 0


@pytest.mark.torch
@pytest.mark.parametrize("E, k", [(4, 2), (3, 1), (5, 5)])
def test_it_is_the_guides_layer_in_pytorch(E, k):
    """The dense form of guide 11.1 there, with the same seed: the layers are made, and their weights drawn, in the same order."""
    theirs = pytest.importorskip("torch")

    class Gated(theirs.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = (theirs.nn.Linear(a, b, bias=False) for a, b in ((C, CFF), (C, CFF), (CFF, C)))

        def forward(self, x):
            return self.down(theirs.nn.functional.silu(self.gate(x)) * self.up(x))
    torch.manual_seed(5)
    ours = MoE(C, CFF, E, k)
    theirs.manual_seed(5)
    router = theirs.nn.Linear(C, E, bias=False)
    experts = [Gated() for _ in range(E)]
    x = np.random.default_rng(0).standard_normal((2, 5, C)).astype(np.float32)
    a, b = torch.tensor(x, requires_grad=True), theirs.tensor(x, requires_grad=True)
    best, ids = router(b).topk(k, dim=-1)
    g = theirs.softmax(best, dim=-1)
    wanted = sum((ids[..., rank] == i)[..., None] * g[..., rank, None] * expert(b) for rank in range(k)
                 for i, expert in enumerate(experts))
    found, routing = ours(a, return_routing=True)
    assert (tuple(found.shape), tuple(routing.logits.shape)) == ((2, 5, C), (2, 5, E))
    np.testing.assert_allclose(host(found), wanted.detach().numpy(), atol=1e-6)
    assert host(routing.experts).tolist() == ids.tolist()
    (found ** 2).sum().backward()
    (wanted ** 2).sum().backward()
    np.testing.assert_allclose(host(a.grad), b.grad.numpy(), atol=1e-6)
    np.testing.assert_allclose(host(ours.router.weight.grad), router.weight.grad.numpy(), atol=1e-6)


def test_one_expert_is_the_network_itself():
    torch.manual_seed(3)
    layer = MoE(C, CFF, 1, 1)
    torch.manual_seed(3)
    Router(C, 1, 1)                             # draws as the layer's does
    network, x = nn.SwiGLU(C, CFF), tokens(2, 3, C)
    np.testing.assert_allclose(host(layer(x)), host(network(x)), atol=1e-6)


def test_sparse_computes_what_was_routed_and_no_more():
    sparse, dense = pair(8, 2)
    x = tokens(16, C)
    router, network = 2 * 16 * 8 * C, 2 * 3 * C * CFF
    assert count_flops(sparse, x).total == router + 16 * 2 * network
    assert count_flops(dense, x).total == router + 16 * 8 * network


# --- gradients --------------------------------------------------------------------------------------------------------

@every_router
@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.6, "shared_experts": 1, "ffn": "gelu", "bias": True}], ids=["plain", "more"])
def test_gradients_of_router_and_experts_through_choice_dispatch_and_combine(router, options, monkeypatch):
    noise = tokens(6, 5, dtype=torch.float64)
    monkeypatch.setattr(moe, "randn_like", lambda r: noise)
    layer, _ = pair(5, 2, router=router, dtype=torch.float64, **options)
    x = tokens(6, C, dtype=torch.float64)
    scores = np.sort(host(layer(x, return_routing=True)[1].logits), axis=-1)
    assert np.diff(scores, axis=-1).min() > 1e-4                        # no ties within a step of the check
    assert gradcheck_module(layer, x.requires_grad_())
    layer(x).square().sum().backward()
    assert all((host(p.grad) != 0).any() for p in layer.router.parameters())


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("loss", ["balance_loss", "z_loss"])
def test_gradients_of_the_losses(loss, k):
    layer, _ = pair(4, k, dtype=torch.float64)
    x, valid = tokens(5, C, dtype=torch.float64).requires_grad_(), torch.tensor([True, True, False, True, True])
    assert gradcheck(lambda x, w: getattr(layer(x, valid, return_routing=True)[1], loss)(), (x, layer.router.weight))


# --- routers ----------------------------------------------------------------------------------------------------------

def softmax(r):
    e = np.exp(r - r.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@every_router
def test_the_weights_of_each_router_by_hand(router):
    layer = Router(C, 5, 3, router).double().eval()
    r, ids, g = (host(t) for t in layer(tokens(7, C, dtype=torch.float64)))
    assert ids.tolist() == np.argsort(-r, axis=-1, kind="stable")[:, :3].tolist()
    p = np.take_along_axis(softmax(r), ids, -1)
    wanted = p if router == "softmax_topk" else p / p.sum(-1, keepdims=True)
    np.testing.assert_allclose(g, wanted, rtol=1e-12)
    assert ((g.sum(-1) < 1) == (router == "softmax_topk")).all() or np.allclose(g.sum(-1), 1)


def test_softmax_topk_renormalised_is_topk_softmax():
    (a, _), (b, _) = (pair(5, 2, router=router, dtype=torch.float64) for router in ("topk_softmax", "softmax_topk_renormalized"))
    x = tokens(9, C, dtype=torch.float64)
    np.testing.assert_allclose(host(a(x)), host(b(x)), rtol=1e-12, atol=1e-14)


def test_with_one_chosen_only_softmax_topk_teaches_the_router():
    for router, learns in ("topk_softmax", False), ("softmax_topk", True):
        layer, _ = pair(4, 1, router=router)
        layer(tokens(5, C)).square().sum().backward()
        assert (host(layer.router.weight.grad) != 0).any() == learns


@pytest.mark.parametrize("E", [4, 64])
def test_among_equals_the_lower_expert_wins(E):
    layer = Router(C, E, 3)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[2:4] = 1.0
    assert layer(torch.ones(2, C))[1].tolist() == [[2, 3, 0]] * 2
    assert layer(-torch.ones(2, C))[1].tolist() == [[0, 1, 4 if E > 4 else 2]] * 2


def test_noise_is_for_training_has_the_size_it_learns_and_follows_the_seed():
    layer, x = Router(C, 3, 1, "noisy_topk"), torch.zeros(4000, C) + torch.tensor([1.0, 0, 0, 0])
    with torch.no_grad():
        layer.weight.zero_()
        layer.noise_weight[:, 0] = torch.tensor([-3.0, 0.0, 3.0])
    r = host(layer(x)[0])
    np.testing.assert_allclose(r.std(axis=0), np.log1p(np.exp([-3.0, 0.0, 3.0])), rtol=0.05)
    torch.manual_seed(7)
    first = host(layer(x)[0])
    torch.manual_seed(7)
    assert (host(layer(x)[0]) == first).all() and (first != r).any()
    assert (host(layer.eval()(x)[0]) == 0).all()


def test_noise_starts_at_softplus_of_zero_and_is_trained():
    layer = MoE(C, CFF, 4, 2, router="noisy_topk")
    assert layer.router.noise_weight.abs().sum().item() == 0
    layer(tokens(9, C)).square().sum().backward()
    assert (host(layer.router.noise_weight.grad) != 0).any()


# --- low precision ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("form", [MoE, DenseMoE])
@every_router
def test_the_router_computes_in_float32(form, router):
    """In float16, 12 + 2⁻⁸ is 12, and the lower expert would win."""
    layer = form(2, CFF, 2, 1, router=router).half().eval()
    with torch.no_grad():
        layer.router.weight[...] = torch.tensor([[12.0, 0.0], [12.0, 2.0 ** -8]])
    y, routing = layer(torch.ones(3, 2).half(), return_routing=True)
    assert y.dtype == torch.float16 and routing.logits.dtype == routing.weights.dtype == torch.float32
    assert routing.experts.tolist() == [[1]] * 3
    assert routing.balance_loss().dtype == torch.float32


def test_half_precision_sparse_is_dense():
    sparse, dense = pair(4, 2, dtype=torch.float16, shared_experts=1)
    x = tokens(9, C).half()
    np.testing.assert_allclose(host(sparse(x)), host(dense(x)), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("form", [MoE, DenseMoE])
def test_bfloat16_forward_and_backward(form):
    pytest.importorskip("ml_dtypes")
    layer, x = form(C, CFF, 4, 2), tokens(9, C)
    wanted = layer(x)
    y, routing = layer.to(torch.bfloat16)(x.to(torch.bfloat16), return_routing=True)
    assert y.dtype == torch.bfloat16 and routing.weights.dtype == torch.float32
    np.testing.assert_allclose(host(y.float()), host(wanted), rtol=5e-2, atol=2e-2)
    y.float().square().sum().backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.float().abs().sum().item() > 0 for p in layer.parameters() if p.grad is not None)


@pytest.mark.parametrize("form", [MoE, DenseMoE])
def test_under_autocast_experts_are_low_and_the_router_is_not(form):
    layer, x = form(C, CFF, 4, 2), tokens(9, C)
    wanted, before = layer(x, return_routing=True)
    with amp.autocast(x.device.type, dtype=torch.float16):
        y, routing = layer(x, return_routing=True)
    assert y.dtype == torch.float16 and routing.logits.dtype == torch.float32
    assert (host(routing.logits) == host(before.logits)).all()
    np.testing.assert_allclose(host(y), host(wanted), rtol=1e-2, atol=1e-3)


# --- capacity and padding ---------------------------------------------------------------------------------------------

def biased(*args, toward=0, by=20.0, **options):
    """A layer whose router prefers one expert, for tokens whose first feature is 1."""
    layer = MoE(C, CFF, *args, **options)
    with torch.no_grad():
        layer.router.weight[:, 0] = 0.0
        layer.router.weight[toward, 0] = by
    return layer


def preferring(n):
    x = tokens(n, C)
    x[:, 0] = 1.0
    return x


def test_what_is_over_capacity_is_dropped_in_order_and_reported():
    layer = biased(4, 1, capacity_factor=1.5)
    y, routing = layer(preferring(8), return_routing=True)
    assert routing.plan.wanted == (8, 0, 0, 0) and routing.plan.counts == (3, 0, 0, 0)          # ⌈1.5 · 8 / 4⌉
    assert routing.dropped.tolist() == [[False]] * 3 + [[True]] * 5 and routing.num_dropped == 5
    assert (host(y)[3:] == 0).all() and (host(y)[:3] != 0).any(axis=1).all()
    assert routing.load.tolist() == [1, 0, 0, 0] and routing.max_load == 4                      # dropped ones count: they wanted it
    layer.eval()
    y, routing = layer(preferring(8), return_routing=True)
    assert routing.num_dropped == 0 and not routing.dropped.any() and (host(y) != 0).any(axis=1).all()


@pytest.mark.parametrize("factor, n, rows", [(1.1, 10, 11), (1.15, 20, 23), (1.0, 7, 7), (0.01, 3, 1), (2.3, 10, 23), (1.01, 10, 11)])
def test_the_capacity_is_not_rounded_up_by_rounding_errors(factor, n, rows):
    layer = MoE(C, CFF, 1, 1, capacity_factor=factor)
    assert layer._capacity(torch.zeros(n, C), None) == rows


def test_a_second_choice_is_dropped_before_any_first_choice():
    layer = biased(2, 2, capacity_factor=0.75)
    x = preferring(4)
    x[2:, 0] = -1.0                                                     # 0 and 1 choose (0, 1), 2 and 3 choose (1, 0)
    routing = layer(x, return_routing=True)[1]
    assert routing.experts.tolist() == [[0, 1], [0, 1], [1, 0], [1, 0]] and routing.plan.counts == (3, 3)
    assert routing.dropped.tolist() == [[False, False], [False, True], [False, False], [False, True]]


def test_padding_is_not_routed_counted_nor_given_room():
    layer, x = biased(4, 2, capacity_factor=1.0, bias_rate=0.1), preferring(12).reshape(2, 6, C)
    valid = torch.tensor([[True] * 6, [True, False] * 3])
    y, routing = layer(x, valid, return_routing=True)
    alone, other = layer(x.reshape(12, C)[valid.reshape(-1)], return_routing=True)
    assert (host(y)[~host(valid)] == 0).all() and (host(layer(x, valid.float())) == host(y)).all()
    np.testing.assert_allclose(host(y)[host(valid)], host(alone), atol=1e-6)
    assert sum(routing.plan.wanted) == 18 and routing.plan[2:] == other.plan[2:]          # counts, and wanted
    assert not (routing.dropped & ~valid.unsqueeze(-1)).any() and routing.num_dropped == int(routing.dropped.sum())
    for loss in ("balance_loss", "z_loss"):
        assert getattr(routing, loss)().item() == pytest.approx(getattr(other, loss)().item(), rel=1e-5)


# --- balance ----------------------------------------------------------------------------------------------------------

def routing_of(r, ids, E, valid=None):
    """What a router with these logits, which chose these, would have said."""
    r, ids = np.asarray(r, float), np.asarray(ids)
    valid = None if valid is None else torch.tensor(valid)
    plan = plan_dispatch(placed(ids), E, None, None if valid is None else valid.array)
    return moe.Routing(torch.tensor(r, requires_grad=True), torch.tensor(ids), torch.tensor(np.ones(ids.shape)), plan, valid)


@pytest.mark.parametrize("E, k", [(E, k) for E in (2, 3, 4, 8) for k in (1, 2, 3) if k < E])
def test_the_balance_loss_is_one_at_balance_and_E_at_collapse(E, k):
    even = np.arange(E)[:, None] + np.arange(k)                         # token t chooses t, …, t + k − 1
    balanced = routing_of(np.random.default_rng(0).standard_normal((E, E)), even % E, E)
    assert balanced.balance_loss().item() == 1 and balanced.max_load == pytest.approx(1)
    r = np.full((6, E), -1e9)
    r[:, :k] = np.random.default_rng(1).standard_normal((6, k))         # whichever of the k it prefers
    collapsed = routing_of(r, [list(range(k))] * 6, E)
    assert collapsed.balance_loss().item() == pytest.approx(E, rel=1e-12) and collapsed.max_load == pytest.approx(E / k)


def test_for_one_chosen_it_is_the_switch_transformers_loss():
    r = np.random.default_rng(0).standard_normal((20, 5))
    ids = r.argmax(-1)[:, None]
    f, P = np.bincount(ids[:, 0], minlength=5) / 20, softmax(r).mean(0)
    assert routing_of(r, ids, 5).balance_loss().item() == pytest.approx(5 * (f * P).sum(), rel=1e-12)


def test_the_z_loss_by_hand():
    r, valid = np.random.default_rng(0).standard_normal((6, 4)), np.arange(6) != 2
    wanted = np.log(np.exp(r[valid]).sum(-1)) ** 2
    assert routing_of(r, np.zeros((6, 1), int), 4, valid).z_loss().item() == pytest.approx(wanted.mean(), rel=1e-12)


def test_a_step_against_the_loss_takes_probability_from_the_fullest():
    routing = routing_of(np.zeros((6, 3)), [[0]] * 4 + [[1]] * 2, 3)
    routing.balance_loss().backward()
    g = host(routing.logits.grad).sum(0)
    assert g[0] > 0 > g[2] and g[0] > g[1]


@pytest.mark.parametrize("valid", [None, False])
def test_losses_of_no_token_are_those_of_balance_and_of_nothing(valid):
    n = 0 if valid is None else 3
    routing = routing_of(np.zeros((n, 4)), np.zeros((n, 2), int), 4, None if valid is None else [False] * n)
    assert (routing.balance_loss().item(), routing.z_loss().item(), routing.max_load, routing.num_dropped) == (1, 0, 0, 0)
    (routing.balance_loss() + routing.z_loss()).backward()
    assert np.isfinite(host(routing.logits.grad)).all()


def test_where_all_experts_are_chosen_there_is_nothing_to_balance():
    routing = routing_of(np.random.default_rng(0).standard_normal((5, 2)), [[0, 1]] * 5, 2)
    routing.balance_loss().backward()
    assert routing.balance_loss().item() == 1 and (host(routing.logits.grad) == 0).all()


@every_router
def test_the_bias_changes_the_choice_and_not_the_weights(router):
    layer = Router(C, 4, 2, router, bias_rate=0.5).eval()
    x = tokens(9, C)
    r, before, _ = layer(x)
    with torch.no_grad():
        layer.expert_bias[...] = torch.tensor([0.0, 0.0, 0.0, 2.0])     # beyond any probability
    again, ids, g = layer(x)
    assert (host(again) == host(r)).all() and (host(ids)[:, 0] == 3).all() and (host(before)[:, 0] != 3).any()
    p = np.take_along_axis(softmax(host(r)), host(ids), -1)
    np.testing.assert_allclose(host(g), p if router == "softmax_topk" else p / p.sum(-1, keepdims=True), rtol=1e-5)


@every_router
def test_a_bias_may_choose_who_has_no_probability_at_all(router):
    layer = Router(1, 3, 1, router, bias_rate=0.5).eval()
    with torch.no_grad():
        layer.weight[...] = torch.tensor([[500.0], [0.0], [0.0]])
        layer.expert_bias[...] = torch.tensor([-2.0, 0.0, 0.0])
    _, ids, g = layer(torch.ones(2, 1))
    assert ids.tolist() == [[1], [1]] and np.isfinite(host(g)).all()


def test_the_bias_moves_against_the_load_of_all_passes_since_the_last_step():
    layer = biased(4, 1, bias_rate=0.25)
    layer.update_bias()
    assert layer.router.expert_bias.tolist() == [0, 0, 0, 0]            # nobody has come yet
    layer.eval()(preferring(8))
    layer.update_bias()
    assert layer.router.expert_bias.tolist() == [0, 0, 0, 0]            # evaluation does not count
    layer.train()
    layer(preferring(8))
    layer(preferring(4))
    layer.update_bias()
    assert layer.router.expert_bias.tolist() == [-0.25, 0.25, 0.25, 0.25]
    layer.update_bias()
    assert layer.router.expert_bias.tolist() == [-0.25, 0.25, 0.25, 0.25]
    assert "router.expert_bias" in layer.state_dict() and not layer.router.expert_bias.requires_grad
    MoE(C, CFF).update_bias()                                           # without bias_rate: nothing to do


def test_the_bias_alone_brings_a_fixed_router_to_balance():
    layer, x = biased(4, 1, by=2.0, bias_rate=0.005), preferring(256)
    assert layer(x, return_routing=True)[1].max_load > 3.5
    for _ in range(300):
        with torch.no_grad():
            _, routing = layer(x, return_routing=True)
        update_biases(layer)
    assert routing.max_load < 1.5


# --- in a model -------------------------------------------------------------------------------------------------------

V_VOCAB, T, H, L = 11, 12, 2, 2


def model(**options):
    torch.manual_seed(0)
    made = []

    def ffn():
        made.append(MoE(8, 16, **{"num_experts": 4, **options}))
        return made[-1]
    gpt = MiniGPT(V_VOCAB, T, 8, H, 16, L, dropout=0.0, norm_first=True, ffn=ffn)
    assert [block.ffn for block in gpt.blocks] == made and len(made) == L
    return gpt


def ids(B=4, t=T, seed=0):
    return torch.tensor(np.random.default_rng(seed).integers(0, V_VOCAB, (B, t)))


def test_the_first_weights_are_those_of_every_layer():
    gpt = model(ffn="gelu", bias=True)
    for p in (gpt.blocks[0].ffn.router.weight, gpt.blocks[1].ffn.experts.up_proj.weight):
        assert 0.012 < host(p).std() < 0.028
    assert not gpt.blocks[0].ffn.experts.down_proj.bias.any()
    decayed, others = torch.optim.decay_groups(gpt, 0.1)
    assert any(p is gpt.blocks[0].ffn.experts.up_proj.weight for p in decayed["params"])
    assert any(p is gpt.blocks[0].ffn.experts.up_proj.bias for p in others["params"])       # [E, Cff], and a bias


@pytest.mark.parametrize("options", [{}, {"router": "noisy_topk", "capacity_factor": 1.0, "shared_experts": 1}, {"bias_rate": 0.01}],
                         ids=str)
def test_a_minigpt_of_mixtures_trains(options):
    gpt, x = model(**options), ids()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        with routings() as routed:
            _, loss = gpt(x[:, :-1], x[:, 1:])
        assert [r.experts.shape for r in routed] == [(4, T - 1, 2)] * L
        (loss + 0.01 * sum(r.balance_loss() + 0.1 * r.z_loss() for r in routed)).backward()
        optimizer.step()
        update_biases(gpt)
    assert loss.item() < 0.9 and all(p.grad is not None for p in gpt.parameters())


def test_layers_keep_no_graph():
    gpt, x = model(), ids()
    with routings() as routed:
        logits, loss = gpt(x[:, :-1], x[:, 1:])
    (loss + routed[0].balance_loss()).backward()
    nodes = [weakref.ref(r.logits.node) for r in routed]
    del routed, logits, loss
    gc.collect()
    assert [node() for node in nodes] == [None] * L
    copy.deepcopy(gpt)(x)                       # of tensors with a history it would raise


def test_routings_are_those_of_this_block_alone():
    layer, x = MoE(C, CFF), tokens(3, C)
    with routings() as outer:
        layer(x)
        with routings() as inner:
            layer(x)
        layer(x)
    layer(x)
    assert (len(outer), len(inner)) == (3, 1)
    with pytest.raises(KeyError), routings() as broken:
        layer(x)
        raise KeyError
    layer(x)
    assert len(broken) == 1


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.5, "shared_experts": 1}], ids=str)
def test_cached_and_padded_are_whole_in_evaluation(options):
    gpt, x = model(**options).double().eval(), ids()
    with torch.no_grad():
        whole, _ = gpt(x)
        cache = KVCache(L, T)
        parts = [gpt(x[:, a:b], cache=cache)[0] for a, b in ((0, 5), (5, 6), (6, T))]
        np.testing.assert_allclose(host(torch.cat(parts, dim=1)), host(whole), atol=1e-12)
        padded, valid = torch.cat([torch.zeros(4, 2, dtype=torch.int64), x[:, :7]], dim=1), torch.ones(4, 9, dtype=torch.bool)
        valid[:, :2] = False
        with routings() as routed:
            found, _ = gpt(padded, valid_tokens=valid)
        np.testing.assert_allclose(host(found)[:, 2:], host(whole)[:, :7], atol=1e-12)
        assert [sum(r.plan.wanted) for r in routed] == [4 * 7 * 2] * L
        cache = KVCache(L, T)
        gpt(padded, valid_tokens=valid, cache=cache)
        np.testing.assert_allclose(host(gpt(x[:, 7:8], cache=cache)[0])[:, 0], host(whole)[:, 7], atol=1e-12)


@pytest.mark.host("the path is for NumPy arrays alone")
def test_the_short_path_for_a_token_does_not_serve_a_mixture():
    gpt = model().eval()
    prompt, cache = [1, 2, 3], KVCache(L, T)
    with torch.no_grad():
        gpt(torch.tensor([prompt]), cache=cache)
    assert not token_path.serves(gpt, cache)
    written = complete(gpt, [prompt], 6, sampler=Sampler(0))[0].ids[len(prompt):]
    for n in range(6):
        with torch.no_grad():
            assert written[n] == gpt(torch.tensor([prompt + written[:n]]))[0][0, -1].argmax().item()


@pytest.mark.parametrize("options", [{}, {"router": "noisy_topk", "bias_rate": 0.1}], ids=str)
def test_recomputed_activations_give_the_same_gradients_of_the_balance_loss_too(options):
    found = []
    for recomputed in (False, True):
        gpt, x = model(**options), ids()
        gpt.checkpoint_blocks = recomputed
        with routings() as routed:
            _, loss = gpt(x[:, :-1], x[:, 1:])
        (loss + sum(r.balance_loss() for r in routed)).backward()
        update_biases(gpt)
        found.append([host(p.grad) for p in gpt.parameters()] + [host(b) for b in gpt.buffers()])
    assert all((a == b).all() for a, b in zip(*found))


def test_a_block_takes_any_module():
    network = nn.Linear(8, 8)
    block, x = nn.TransformerBlock(8, 2, 16, 0.0, ffn=network), tokens(2, 3, 8)
    assert block.ffn is network and block(x, valid_tokens=torch.ones(2, 3, dtype=torch.bool)).shape == (2, 3, 8)


def test_in_a_block_with_a_cache_the_tokens_of_the_cache_are_not_routed():
    block, x = nn.TransformerBlock(8, 2, 16, 0.0, ffn=MoE(8, 16)).eval(), tokens(2, 5, 8)
    valid = torch.tensor([[False, True, True, True, True], [True] * 5])
    cache = KVCache(1, 5)

    class Cache:
        length, kv = 0, None

        def update(self, k, v):
            self.kv = (k, v) if self.kv is None else tuple(torch.cat([a, b], dim=2) for a, b in zip(self.kv, (k, v)))
            self.length = self.kv[0].shape[2]
            return self.kv
    whole, cache = block(x, causal=True, valid_tokens=valid), Cache()
    parts = [block(x[:, :3], causal=True, valid_tokens=valid[:, :3], cache=cache),
             block(x[:, 3:], causal=True, valid_tokens=valid, cache=cache)]
    np.testing.assert_allclose(host(torch.cat(parts, dim=1)), host(whole), atol=1e-5)


# --- the trainer ------------------------------------------------------------------------------------------------------

MIXED = {"experts": 4, "experts_per_token": 2, "steps": 8, "eval_every": 4, "dropout": 0.1}


@pytest.mark.parametrize("settings", [{"balance": "loss"}, {"balance": "bias"}, {"balance": "none"}, {"experts_per_token": 1},
                                      {"activations": "recomputed"}], ids=str)
def test_a_run_with_experts_is_resumed_where_it_was(tmp_path, settings):
    settings = {**MIXED, **settings}
    whole = runs.trainer(tmp_path, out="whole", **settings)
    assert whole.run()
    parts = runs.trainer(tmp_path, out="parts", **settings)
    parts.run(should_stop=runs.stop_at(3, parts))
    parts = Trainer.resume(tmp_path / "parts")
    assert parts.step == 3 and parts.run()
    for name in ("metrics.csv",):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    state = whole.model.state_dict()
    assert all((host(a) == host(state[name])).all() for name, a in parts.model.state_dict().items())
    assert ("blocks.0.ffn.router.expert_bias" in state) == (settings.get("balance") == "bias")
    model, _, _ = load_model(tmp_path / "whole")
    assert all((host(a) == host(state[name])).all() for name, a in model.state_dict().items())


def test_the_load_of_the_fullest_expert_is_a_metric(tmp_path):
    trainer = runs.trainer(tmp_path, **MIXED)
    trainer.run()
    steps, load = trainer.metrics.column("expert_load")
    assert steps.tolist() == list(range(1, 9)) and (load >= 1).all() and (load <= 4 / 2).all()
    assert (tmp_path / "run" / "metrics.csv").read_text().startswith(",".join(FIELDS) + ",expert_load,")
    trainer.metrics.draw()
    dense = runs.trainer(tmp_path, out="dense", steps=2)
    dense.run()
    assert (tmp_path / "dense" / "metrics.csv").read_text().startswith(",".join(FIELDS) + ",gradient_norm/")
    assert "expert_load" not in dense.metrics.fields and "expert_load" not in dense.observed


def test_the_loss_that_is_told_is_that_of_the_text(tmp_path):
    """With another weight of the balance loss the first step tells the same, and the gradients differ."""
    told = {balance: runs.trainer(tmp_path, out=balance, **{**MIXED, "balance": balance}).train_step() for balance in ("loss", "none")}
    assert told["loss"][0] == told["none"][0] and told["loss"][1] != told["none"][1]


def test_evaluation_has_no_balance_loss(tmp_path):
    trainer = runs.trainer(tmp_path, **{**MIXED, "dropout": 0.0})
    found = []
    for balance in ("loss", "none"):
        trainer.config = dataclasses.replace(trainer.config, balance=balance)
        found.append(trainer.evaluate())
    assert found[0] == found[1]


def test_checkpoints_from_before_there_were_experts_are_read(tmp_path):
    """Their configuration lacks the fields."""
    trainer = runs.trainer(tmp_path, steps=4)
    trainer.run(should_stop=runs.stop_at(2, trainer))
    path = tmp_path / "run" / "checkpoint.safetensors"
    tensors, state = load_checkpoint(path)
    for name in ("experts", "experts_per_token", "balance"):
        del state["config"][name]
    save_checkpoint(path, tensors, state)
    assert load_model(tmp_path / "run")[0].blocks[0].ffn.net is not None
    assert Trainer.resume(tmp_path / "run").run()


def test_the_configuration_of_experts():
    for bad in ({"experts": -1}, {"experts": 2, "experts_per_token": 3}, {"experts_per_token": 0}, {"experts": 1}, {"balance": "hope"}):
        with pytest.raises(ValueError):
            TrainConfig(**bad)
    config = TrainConfig(dim=16, heads=2, layers=1, experts=3, experts_per_token=1)
    assert TrainConfig.from_dict(config.to_dict()) == config
    mixture = build_model(config, 20).blocks[0].ffn
    assert isinstance(mixture, MoE) and mixture.router.kind == "softmax_topk" and mixture.experts.up_proj.weight.shape == (3, 64, 16)
    assert isinstance(build_model(TrainConfig(dim=16, heads=2, layers=1), 20).blocks[0].ffn, nn.FeedForward)


@pytest.mark.parametrize("change", [{"experts": 0}, {"experts": 5}, {"experts": 10**7}, {"balance": "bias"}, {"experts_per_token": 5}],
                         ids=str)
def test_a_configuration_that_is_not_that_of_the_weights_is_refused(tmp_path, change):
    trainer = runs.trainer(tmp_path, **{**MIXED, "steps": 1})
    trainer.run()
    path = tmp_path / "run" / "checkpoint.safetensors"
    tensors, state = load_checkpoint(path)
    state["config"].update(change)
    save_checkpoint(path, tensors, state)
    for load in (Trainer.resume, load_model):
        with pytest.raises(ValueError, match="does not fit this version"):
            load(tmp_path / "run")


# --- errors and looks -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("form", [MoE, DenseMoE])
@pytest.mark.parametrize("arguments, options, error, words", [
    ((4, 0), {}, ValueError, ["top_k", "1 to num_experts = 4", "0"]), ((4, 5), {}, ValueError, ["top_k", "5"]),
    ((0, 1), {}, ValueError, ["num_experts", "at least 1"]), ((2.0, 1), {}, TypeError, ["num_experts", "whole number"]),
    ((4, "2"), {}, TypeError, ["top_k"]), ((4, 2), {"router": "best"}, ValueError, ["'best'", "topk_softmax", "noisy_topk"]),
    ((4, 2), {"ffn": "swish"}, ValueError, ["'swish'", "swiglu"]),
    ((4, 2), {"capacity_factor": 0}, ValueError, ["capacity_factor", "positive"]),
    ((4, 2), {"capacity_factor": "1"}, TypeError, ["capacity_factor"]), ((4, 2), {"capacity_factor": float("nan")}, ValueError, ["finite"]),
    ((4, 2), {"bias_rate": -1.0}, ValueError, ["bias_rate"]), ((4, 2), {"shared_experts": -1}, ValueError, ["shared_experts"]),
    ((4, 2), {"shared_experts": 0.5}, TypeError, ["shared_experts"])])
def test_what_cannot_be_is_refused(form, arguments, options, error, words):
    with pytest.raises(error) as caught:
        form(C, CFF, *arguments, **options)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("form", [MoE, DenseMoE])
def test_inputs_that_do_not_fit_are_refused(form):
    layer, x = form(C, CFF), torch.zeros(2, 3, C)
    for call, error, words in [
            (lambda: layer([1.0]), TypeError, "x must be a Tensor"), (lambda: layer(torch.zeros(2, 5)), RuntimeError, r"\(2, 5\)"),
            (lambda: layer(x, [True]), TypeError, "valid_tokens must be a Tensor"),
            (lambda: layer(x, torch.ones(2, 4, dtype=torch.bool)), ValueError, r"\(2, 3, 4\), got a tensor \(2, 4\)"),
            (lambda: layer(x, torch.ones(2, 3) / 2), ValueError, "boolean.*or 0 and 1.*float32"),
            (lambda: layer(x, return_routing="yes"), TypeError, "return_routing")]:
        with pytest.raises(error, match=words):
            call()


def test_it_prints_what_it_is():
    text = repr(MoE(C, CFF, 8, 2, capacity_factor=1.25, router="noisy_topk", bias_rate=0.1, shared_experts=1))
    for part in ("num_experts=8, top_k=2, kind='noisy_topk', bias_rate=0.1", "GroupedLinear(num_experts=8, in_features=4, out_features=6",
                 "capacity_factor=1.25", "GatedFeedForward"):
        assert part in text


def test_experts_copy_the_weights_that_they_stack():
    networks = [nn.FeedForward(C, CFF) for _ in range(3)]
    experts = Experts(networks)
    with torch.no_grad():
        networks[1].net[0].weight.zero_()
    assert experts.up_proj.weight[1].any() and experts.up_proj.bias.shape == (3, CFF)


@pytest.mark.parametrize("networks", [[], [nn.FeedForward(C, CFF), nn.FeedForward(C, CFF, activation="relu")],
                                      [nn.SwiGLU(C, CFF), nn.SwiGLU(C, CFF + 1)], [nn.SwiGLU(C, CFF), nn.FeedForward(C, CFF)]], ids=len)
def test_experts_of_several_kinds_are_refused(networks):
    with pytest.raises(ValueError, match="one kind"):
        Experts(networks)


def test_one_network_for_all_blocks_is_refused():
    with pytest.raises(TypeError, match="function that makes a network for each block.*lambda: nn.MoE.*share"):
        MiniGPT(V_VOCAB, T, 8, H, 16, L, ffn=MoE(8, 16))


def test_a_single_token_and_no_batch():
    sparse, dense = pair(4, 2)
    x = tokens(C)
    y, routing = sparse(x, return_routing=True)
    assert y.shape == (C,) and routing.experts.shape == routing.dropped.shape == (2,)
    np.testing.assert_allclose(host(y), host(dense(x)), atol=1e-6)
    assert sparse(torch.zeros(2, 0, C)).shape == (2, 0, C) and sparse(torch.zeros(0, 3, C)).shape == (0, 3, C)
