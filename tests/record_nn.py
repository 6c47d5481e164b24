"""Values of `nn` and `optim`, computed by any framework with PyTorch's names: recorded from PyTorch, compared by the tests.

    python tests/record_nn.py        writes tests/data/nn.npz (needs PyTorch)
"""
from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "data" / "nn.npz"


def _flat(name, module):
    return {f"{name}.{key}": np.array(value.tolist()) for key, value in module.state_dict().items()}


def initial_values(torch):
    """What layers and init functions start from under one seed."""
    nn, values = torch.nn, {}
    layers = {
        "linear": lambda: nn.Linear(5, 3), "linear_wide": lambda: nn.Linear(11, 7), "linear_no_bias": lambda: nn.Linear(4, 6, bias=False),
        "linear64": lambda: nn.Linear(5, 4, dtype=torch.float64), "embedding": lambda: nn.Embedding(7, 3),
        "embedding_padding": lambda: nn.Embedding(5, 2, padding_idx=-2), "multihead": lambda: nn.MultiheadAttention(4, 2),
        "multihead_widths": lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True),
        "sequential": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
    }
    for name, make in layers.items():
        torch.manual_seed(7)
        values.update(_flat(name, make()))
    init = nn.init
    functions = {
        "uniform": lambda t: init.uniform_(t, -2.0, 3.0), "normal": lambda t: init.normal_(t, 0.5, 0.02),
        "xavier_uniform": lambda t: init.xavier_uniform_(t, gain=1.5), "xavier_normal": init.xavier_normal_,
        "kaiming_uniform": lambda t: init.kaiming_uniform_(t, mode="fan_out", nonlinearity="relu"),
        "kaiming_normal": lambda t: init.kaiming_normal_(t, a=0.3), "eye": init.eye_,
        "trunc_normal": init.trunc_normal_, "trunc_normal_scaled": lambda t: init.trunc_normal_(t, 0.1, 0.02, 0.09, 0.13),
        "trunc_normal_tail": lambda t: init.trunc_normal_(t, 0.0, 1.0, 1.5, 1.9),
    }
    for name, fill in functions.items():
        torch.manual_seed(7)
        tensor = torch.zeros(6, 5)
        fill(tensor)
        values[name] = np.array(tensor.tolist())
    return values


ATTENTION = {                                   # layer options, forward options, layout of the inputs
    "plain": ({}, {}, "TBC"),
    "heads": ({"batch_first": True}, {"average_attn_weights": False}, "BTC"),
    "no_weights": ({"bias": False, "batch_first": True}, {"need_weights": False}, "BTC"),
    "causal": ({"batch_first": True}, {"attn_mask": "causal"}, "BTC"),
    "causal_fast": ({"batch_first": True}, {"attn_mask": "causal", "need_weights": False, "is_causal": True}, "BTC"),
    "padding": ({"batch_first": True}, {"key_padding_mask": "bool"}, "BTC"),
    "padding_and_causal": ({"batch_first": True}, {"key_padding_mask": "bool", "attn_mask": "causal"}, "BTC"),
    "float_masks": ({}, {"key_padding_mask": "float_padding", "attn_mask": "float"}, "TBC"),
    "mask_per_head": ({}, {"attn_mask": "per_head", "need_weights": False}, "TBC"),
    "extra_keys": ({"add_bias_kv": True, "add_zero_attn": True, "batch_first": True}, {"key_padding_mask": "bool"}, "BTC"),
    "widths": ({"kdim": 3, "vdim": 5, "batch_first": True}, {}, "cross"),
    "unbatched": ({}, {}, "TC"),
}


def attention_values(torch):
    """Outputs, weights and gradients of MultiheadAttention in float64."""
    values = {}
    for name, (layer_options, forward_options, layout) in ATTENTION.items():
        torch.manual_seed(3)
        layer = torch.nn.MultiheadAttention(4, 2, dtype=torch.float64, **layer_options)
        query, key, value = _attention_inputs(torch, layout)
        out, weights = layer(query, key, value, **{k: _mask(torch, v) for k, v in forward_options.items()})
        upstream = torch.tensor(np.random.default_rng(1).normal(size=tuple(out.shape)))
        (out * upstream).sum().backward()
        values[f"attention.{name}.out"] = np.array(out.detach().tolist())
        values[f"attention.{name}.dquery"] = np.array(query.grad.tolist())
        if weights is not None:
            values[f"attention.{name}.weights"] = np.array(weights.detach().tolist())
        for key_name, p in layer.named_parameters():
            values[f"attention.{name}.d{key_name}"] = np.array(p.grad.tolist())
    return values


def _attention_inputs(torch, layout):
    rng = np.random.default_rng(0)
    if layout == "cross":
        return [torch.tensor(rng.normal(size=s), requires_grad=True) for s in ((2, 3, 4), (2, 5, 3), (2, 5, 5))]
    x = torch.tensor(rng.normal(size={"TBC": (3, 2, 4), "BTC": (2, 3, 4), "TC": (3, 4)}[layout]), requires_grad=True)
    return x, x, x


def _mask(torch, name):
    if name == "bool":
        return torch.tensor([[False, False, True], [False, False, False]])
    if name == "causal":
        return torch.ones(3, 3, dtype=torch.bool).triu(1)
    shape = {"float": (3, 3), "float_padding": (2, 3), "per_head": (4, 3, 3)}.get(name)
    return name if shape is None else torch.tensor(np.random.default_rng(4).normal(size=shape))


OPTIMIZERS = {
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd_decay": ("SGD", {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "sgd_momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01}),
    "sgd_nesterov": ("SGD", {"lr": 0.05, "momentum": 0.8, "nesterov": True}),
    "adam": ("Adam", {}),
    "adam_options": ("Adam", {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}),
    "adam_amsgrad": ("Adam", {"lr": 0.02, "amsgrad": True, "maximize": True}),
    "adamw": ("AdamW", {"lr": 0.01}),
    "adamw_options": ("AdamW", {"lr": 0.03, "betas": (0.7, 0.9), "weight_decay": 0.3, "amsgrad": True}),
}


def optimizer_values(torch, dtype="float64", steps=50):
    """Two parameters after some steps on given gradients; the second has none every third time."""
    values = {}
    for name, (kind, options) in OPTIMIZERS.items():
        rng = np.random.default_rng(5)
        p, q = (torch.nn.Parameter(torch.tensor(rng.normal(size=s).astype(dtype))) for s in ((3, 4), (5,)))
        optimizer = getattr(torch.optim, kind)([p, q], **options)
        for step in range(steps):
            optimizer.zero_grad()
            for x in (p, q) if step % 3 else (p,):
                x.grad = torch.tensor((rng.normal(size=tuple(x.shape)) * np.exp(step / 10)).astype(dtype))
            optimizer.step()
        values[f"{name}.p"], values[f"{name}.q"] = np.array(p.tolist()), np.array(q.tolist())
    return values


def block_values(torch):
    """torch.nn.TransformerEncoderLayer in float64, evaluation mode: its parameters, an output, and the input's gradient."""
    values = {}
    for name, norm_first in (("post_norm", False), ("pre_norm", True)):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True, norm_first=norm_first,
                                                 dtype=torch.float64).eval()
        x = torch.tensor(np.random.default_rng(0).normal(size=(2, 5, 8)), requires_grad=True)
        out = layer(x, src_mask=torch.ones(5, 5, dtype=torch.bool).triu(1))
        (out ** 2).sum().backward()
        values.update({f"block.{name}.{key}": value.numpy() for key, value in layer.state_dict().items()})
        values[f"block.{name}.out"], values[f"block.{name}.dx"] = out.detach().numpy(), x.grad.numpy()
    return values


if __name__ == "__main__":
    import torch
    recorded = {**initial_values(torch), **attention_values(torch), **optimizer_values(torch), **block_values(torch)}
    np.savez_compressed(FILE, **recorded)
    print(f"{len(recorded)} arrays, {FILE.stat().st_size} bytes")
