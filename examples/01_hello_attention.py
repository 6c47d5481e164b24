"""Hello, attention: three tokens look at each other, one step at a time.      python examples/01_hello_attention.py

    X → Q, K, V → scores → scaled → masked → softmax → out        out = softmax(Q Kᵀ / √Dh + mask) V        (guide 4.1)

Letters: B sentences in the batch, T tokens, C features of a token, Dh features of a query or key. Every line prints the
shape in letters and in numbers, and stops if the two disagree.
"""
import argparse
import math

import tinygrad_tf as torch
import tinygrad_tf.nn as nn
import tinygrad_tf.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--device", help="cpu, cuda or cuda:N")
parser.add_argument("--quick", action="store_true", help="makes no difference here: it takes a moment")
torch.set_default_device(parser.parse_args().device)

SENTENCE = ["I", "love", "AI"]
SIZES = {"B": 1, "T": len(SENTENCE), "C": 4, "Dh": 4, "V_vocab": 3}


def show(name, letters, x):
    """Prints a tensor under its shape in letters, after checking that the letters tell the truth."""
    expected = tuple(SIZES[letter] for letter in letters.split())
    assert tuple(x.shape) == expected, f"{name}: [{letters}] means {expected}, but the tensor has {tuple(x.shape)}"
    print(f"\n{name}   [{', '.join(letters.split())}] = {list(expected)}")
    for row in x.detach().reshape(-1, x.shape[-1]).tolist():
        print("   ", "  ".join(f"{value:7.3f}" for value in row))


torch.manual_seed(0)
B, T, C, Dh = (SIZES[letter] for letter in ("B", "T", "C", "Dh"))
print("The sentence:", " ".join(SENTENCE))

# 1. Words become rows of a table. A row of X is all that the model knows of a token so far.
embedding = nn.Embedding(SIZES["V_vocab"], C)
ids = torch.tensor([[0, 1, 2]])
X = embedding(ids)
show("the table", "V_vocab C", embedding.weight)
show("X = table[ids]", "B T C", X)

# 2. Three views of each token: what it looks for (Q), what it offers (K), what it passes on (V). y = x Wᵀ.
W_q, W_k, W_v = (torch.randn(Dh, C) / math.sqrt(C) for _ in range(3))
Q, K, V = X @ W_q.T, X @ W_k.T, X @ W_v.T
show("Q = X W_Qᵀ", "B T Dh", Q)
show("K = X W_Kᵀ", "B T Dh", K)
show("V = X W_Vᵀ", "B T Dh", V)

# 3. Row i, column j: how well what token i looks for fits what token j offers.
scores = Q @ K.transpose(-2, -1)
show("scores = Q Kᵀ", "B T T", scores)

# 4. A dot product of Dh terms grows like √Dh; divided by it, softmax stays in the region where it has a slope.
scaled = scores / math.sqrt(Dh)
show("scaled = scores / √Dh", "B T T", scaled)

# 5. A language model must not look ahead: token i sees tokens 0 … i. −inf becomes weight 0 in the next step.
allowed = torch.ones(T, T, dtype=torch.bool).tril()
masked = scaled.masked_fill(~allowed, -math.inf)
show("masked: −inf above the diagonal", "B T T", masked)

# 6. Each row becomes shares that sum to 1.
weights = F.softmax(masked, dim=-1)
show("weights = softmax(masked)", "B T T", weights)
assert torch.allclose(weights.sum(dim=-1), torch.ones(B, T)), "a row of weights must sum to 1"
assert (weights.masked_select(~allowed) == 0).all(), "no weight may fall on a later token"
assert weights[0, 0, 0] == 1, "the first token sees itself alone"

# 7. Each token takes that mixture of the values.
out = weights @ V
show("out = weights V", "B T Dh", out)
assert torch.allclose(out[0, 0], V[0, 0]), "and so its output is its own value"

# The same in one call.
in_one_call = F.scaled_dot_product_attention(Q, K, V, is_causal=True)
assert torch.allclose(out, in_one_call, atol=1e-6)

# The same as a layer: one head, the matrices from above, an output projection that changes nothing.
layer = nn.MultiHeadAttention(C, num_heads=1, bias=False)
with torch.no_grad():
    for linear, W in [(layer.q_proj, W_q), (layer.k_proj, W_k), (layer.v_proj, W_v), (layer.out_proj, torch.eye(C))]:
        linear.weight.copy_(W)
layer_out, layer_weights = layer(X, causal=True, return_weights=True)
assert torch.allclose(out, layer_out, atol=1e-6)
assert torch.allclose(weights, layer_weights[:, 0], atol=1e-6)      # [B, H, T, T] with H = 1

# What "causal" buys: change the last word, and nothing before it moves.
other = X.detach().clone()
other[0, -1] += 1
changed = layer(other, causal=True)
assert torch.equal(changed[0, :-1], layer(X, causal=True)[0, :-1])
assert not torch.allclose(changed[0, -1], layer_out[0, -1])

print("\nEach row of weights sums to 1, and the future weighs 0.")
print("By hand = scaled_dot_product_attention = MultiHeadAttention (H = 1).")
