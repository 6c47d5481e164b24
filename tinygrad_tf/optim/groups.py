"""Which parameters decay."""
from ..nn.layers import LayerNorm, RMSNorm


def decay_groups(model, weight_decay):
    """Two parameter groups: matrices with `weight_decay`, biases and norm scales without.    (guide 16.1)

    A bias or a scale has one number for each channel and no size to keep small: decay would only pull it to zero.
    `AdamW(decay_groups(model, 0.1), lr=3e-4)`
    """
    scales = {id(p) for m in model.modules() if isinstance(m, (LayerNorm, RMSNorm)) for p in m.parameters()}
    decayed, others = [], []
    for name, p in model.named_parameters():
        plain = p.ndim < 2 or id(p) in scales or "bias" in name.rpartition(".")[2]
        (others if plain else decayed).append(p)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
