"""Adam and AdamW: steps scaled by running estimates of each gradient's mean and square."""
import math

from ..autograd import constant
from ..backend import array_module
from ..creation import tensor
from ..kernels import fused
from .optimizer import Optimizer


class Adam(Optimizer):
    """g ← g + weight_decay · p                                          an L2 penalty: it is part of m and v
    m ← β₁ m + (1 − β₁) g              v ← β₂ v + (1 − β₂) g²            t ← t + 1; all start at 0
    p ← p − lr · m̂ / (√v̂ + eps),      m̂ = m / (1 − β₁ᵗ),  v̂ = v / (1 − β₂ᵗ)

    `amsgrad` divides by the largest v so far; `maximize` turns the sign of g. State: "step" (t), "exp_avg" (m),
    "exp_avg_sq" (v), "max_exp_avg_sq". (Kingma and Ba, 2015; Reddi et al., 2018 for amsgrad.)
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, amsgrad=False, *, maximize=False,
                 foreach=None, fused=None):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
                                      maximize=maximize))

    def check_options(self, group):
        self.check_range(group, "lr", "eps", "weight_decay")
        for i, beta in enumerate(group["betas"]):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"{self._name()}: Invalid beta parameter at index {i}: {beta}, expected 0 <= beta < 1")

    def rule(self, p, state, group):
        if not state:
            self.start(p, state, group)
        t, m, v = float(state["step"].array) + 1, state["exp_avg"].array, state["exp_avg_sq"].array
        largest = state["max_exp_avg_sq"].array if group["amsgrad"] else None
        state["step"].array.fill(t)
        lr, betas, eps = float(group["lr"]), tuple(map(float, group["betas"])), float(group["eps"])
        step = fused.adam if fused.can_step(p, m, v, largest) else adam_step
        return step, (m, v, largest), (t, lr, betas, eps, group["maximize"], *self.decay(lr, float(group["weight_decay"])))

    def start(self, p, state, group):
        """The state of a parameter's first step: t, m and v are zero."""
        zeros = array_module(p).zeros_like
        state["step"] = tensor(0.0, device="cpu")
        state["exp_avg"], state["exp_avg_sq"] = constant(zeros(p)), constant(zeros(p))
        if group["amsgrad"]:
            state["max_exp_avg_sq"] = constant(zeros(p))

    def decay(self, lr, weight_decay):
        """(penalty, shrink): g ← g + penalty · p,  p ← shrink · p."""
        return weight_decay, 1.0


def adam_step(p, g, m, v, largest, t, lr, betas, eps, maximize=False, penalty=0.0, shrink=1.0):
    """Adam's step as array operations, written into p, m, v and `largest` (None without amsgrad)."""
    xp, (beta1, beta2) = array_module(p), betas
    g = -g if maximize else g
    g = g + penalty * p if penalty else g
    if shrink != 1:
        p *= shrink
    work = xp.multiply(g, 1 - beta1, out=xp.empty_like(p))  # one temporary, used for every term in turn; an array also in 0-d
    m *= beta1
    m += work                                   # β₁ m + (1 − β₁) g
    xp.square(g, out=work)
    work *= 1 - beta2
    v *= beta2
    v += work
    if largest is not None:
        v = xp.maximum(largest, v, out=largest)
    xp.sqrt(v, out=work)
    work *= 1 / math.sqrt(1 - beta2 ** t)       # a product costs half of a division
    work += eps                                 # √v̂ + eps
    xp.divide(m, work, out=work)
    work *= lr / (1 - beta1 ** t)
    p -= work


class AdamW(Adam):
    """p ← p − lr · weight_decay · p, and then Adam's step without a penalty in g.

    The decay is decoupled: it does not pass through m and v, so that it shrinks every weight at the same rate.
    (Loshchilov and Hutter, 2019; guide 16.1.)
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, *, maximize=False,
                 foreach=None, fused=None):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)

    def decay(self, lr, weight_decay):
        return 0.0, 1 - lr * weight_decay
