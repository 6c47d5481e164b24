"""Stochastic gradient descent."""
from ..autograd import constant
from ..backend import array_module
from .optimizer import Optimizer


class SGD(Optimizer):
    """g ← g + weight_decay · p
    b ← momentum · b + (1 − dampening) · g,  b = g at the first step
    p ← p − lr · b,  with nesterov p ← p − lr · (g + momentum · b)

    `maximize` turns the sign of g. State: "momentum_buffer". (Sutskever et al., 2013; PyTorch's form of momentum.)
    """

    def __init__(self, params, lr=1e-3, momentum=0, dampening=0, weight_decay=0, nesterov=False, *, maximize=False,
                 foreach=None, fused=None):
        super().__init__(params, dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
                                      nesterov=nesterov, maximize=maximize))

    def check_options(self, group):
        self.check_range(group, "lr", "momentum", "weight_decay")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("SGD: Nesterov momentum requires a momentum and zero dampening, got "
                             f"momentum={group['momentum']}, dampening={group['dampening']}")

    def rule(self, p, state, group):
        lr, momentum, dampening, decay = (float(group[name]) for name in ("lr", "momentum", "dampening", "weight_decay"))
        share = 1 - dampening
        if momentum and state.get("momentum_buffer") is None:
            state["momentum_buffer"], share = constant(array_module(p).zeros_like(p)), 1.0
        b = state["momentum_buffer"].array if momentum else None
        return sgd_step, (b,), (lr, momentum, share, decay, group["nesterov"], group["maximize"])


def sgd_step(p, g, b, lr, momentum, share, decay, nesterov, maximize):
    """The step as array operations, written into p and b (None without momentum); at the first step b is 0 and the share of g is 1."""
    g = -g if maximize else g
    g = g + decay * p if decay else g
    if b is not None:
        b *= momentum
        b += g if share == 1 else share * g
        g = g + momentum * b if nesterov else b
    p -= lr * g
