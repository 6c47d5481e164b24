"""decay_groups: matrices decay, biases and norm scales do not."""
import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.optim import AdamW, decay_groups


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.block = nn.TransformerBlock(4, 2, 8)
        self.theirs = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.plane = nn.LayerNorm((3, 4))
        self.rms = nn.RMSNorm((3, 4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.emb.weight


def test_who_decays():
    model = Model()
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, others = decay_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0.0
    assert {names[id(p)] for p in decayed["params"]} == {
        "emb.weight", "theirs.in_proj_weight", "theirs.out_proj.weight", "block.ffn.net.0.weight", "block.ffn.net.3.weight",
        *(f"block.attention.{p}_proj.weight" for p in ("q", "k", "v", "out"))}
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))
    assert any(names[id(p)] == "plane.weight" for p in others["params"])


def test_an_optimizer_takes_them():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.bias.fill_(1.0)
    before = model.weight.tolist()
    optimizer = AdamW(decay_groups(model, 0.5), lr=0.1)
    for p in model.parameters():
        p.grad = torch.zeros(*p.shape)
    optimizer.step()
    assert model.bias.tolist() == [1.0, 1.0] and model.weight.tolist() != before
    AdamW(decay_groups(nn.ReLU(), 0.1))         # a model without parameters makes two empty groups
