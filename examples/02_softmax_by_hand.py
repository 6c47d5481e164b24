"""Softmax by hand: the numbers, the pitfalls, and its gradient.      python examples/02_softmax_by_hand.py

    p_i = e^(z_i) / Σ_j e^(z_j)          dp_i/dz_j = p_i (δ_ij − p_j)          (guide 4.2)
"""
import argparse
import math

import tinygrad_tf as torch
import tinygrad_tf.nn.functional as F
from tinygrad_tf.gradcheck import GradcheckError
from tinygrad_tf.ops.softmax import Softmax

parser = argparse.ArgumentParser()
parser.add_argument("--device", help="cpu, cuda or cuda:N")
parser.add_argument("--quick", action="store_true", help="makes no difference here: it takes a moment")
torch.set_default_device(parser.parse_args().device)


def numbers(x):
    return "[" + ", ".join(f"{value:.3f}" for value in x.tolist()) + "]"


print("1. Step by step")
z = torch.tensor([2.0, 1.0, 0.0])
shifted = z - z.max()
powers = shifted.exp()
total = powers.sum()
p = powers / total
print(f"   z = {numbers(z)}\n   z − max z = {numbers(shifted)}\n   e^… = {numbers(powers)}")
print(f"   Σ = {total.item():.3f}\n   p = {numbers(p)}")
assert numbers(shifted) == "[0.000, -1.000, -2.000]"
assert numbers(powers) == "[1.000, 0.368, 0.135]" and f"{total.item():.3f}" == "1.503"
assert numbers(p) == "[0.665, 0.245, 0.090]"
assert torch.allclose(p, F.softmax(z, dim=-1))

print("\n2. Only differences count: z + 100 gives the same p")
print(f"   p = {numbers(F.softmax(z + 100, dim=-1))}")
assert torch.allclose(F.softmax(z + 100, dim=-1), p)

print("\n3. That is why the maximum may be taken off first, and it must be: e^1000 is no float32")
large = torch.tensor([1000.0, 999.0, 998.0])
naive = large.exp() / large.exp().sum()
print(f"   e^z / Σ e^z = {numbers(naive)}\n   softmax     = {numbers(F.softmax(large, dim=-1))}")
assert naive.isnan().all()                                      # inf / inf
assert torch.allclose(F.softmax(large, dim=-1), p)

print("\n4. A score of −inf gets the weight 0, exactly, and the others share the rest")
masked = F.softmax(torch.tensor([2.0, -math.inf, 0.0]), dim=-1)
print(f"   p = {numbers(masked)}")
assert masked[1] == 0 and math.isclose(masked.sum().item(), 1, rel_tol=1e-6)

print("\n5. A row of −inf alone is 0/0. Plain softmax says NaN, as PyTorch's; attention gives such a row zeros")
nothing = F.softmax(torch.tensor([-math.inf, -math.inf]), dim=-1)
q, k, v = torch.randn(1, 4), torch.randn(2, 4), torch.randn(2, 4)
blind = F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(1, 2, dtype=torch.bool))
print(f"   softmax: {numbers(nothing)}   attention: {numbers(blind[0])}")
assert nothing.isnan().all() and (blind == 0).all()

print("\n6. The Jacobian J_ij = p_i (δ_ij − p_j): by the formula, and a row at a time by autograd")
z = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64, requires_grad=True)
p = F.softmax(z, dim=-1)
by_formula = (p.unsqueeze(1) * (torch.eye(3, dtype=torch.float64) - p.unsqueeze(0))).detach()
rows = []
for i in range(3):
    z.grad = None
    upstream = torch.eye(3, dtype=torch.float64)[i]             # 1 for p_i, 0 for the others
    p.backward(upstream, retain_graph=True)
    rows.append(z.grad.clone())
by_autograd = torch.stack(rows)
for left, right in zip(by_formula, by_autograd):
    print(f"   {numbers(left):26s}  {numbers(right)}")
assert torch.allclose(by_formula, by_autograd, atol=1e-12)

print("\n7. The columns of J sum to 0: more for one is less for the others. An upstream gradient of ones asks nothing")
z.grad = None
F.softmax(z, dim=-1).sum().backward()
print(f"   gradient of Σ p = {numbers(z.grad.abs())}")
assert z.grad.abs().max() < 1e-12


class BrokenSoftmax(Softmax):
    """The right forward, and a backward that returns zeros."""

    def backward(self, dy):
        return dy - dy


def broken(x):
    return BrokenSoftmax.apply(x, -1)


z.grad = None
broken(z).sum().backward()
assert z.grad.abs().max() == 0                                  # with ones, zeros look right
print("   a backward of zeros passes a check with ones …")

print("\n8. … and fails one with a random upstream gradient, which is what gradcheck uses")
assert torch.gradcheck(lambda x: F.softmax(x, dim=-1), [z])
print("   softmax: right")
try:
    torch.gradcheck(broken, [z])
except GradcheckError as error:
    print(f"   broken: {error}")
else:
    raise AssertionError("gradcheck must not let a zero backward pass")
