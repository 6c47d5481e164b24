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

    def update(self, p, g, state, group):
        lr, momentum, dampening, decay = (float(group[name]) for name in ("lr", "momentum", "dampening", "weight_decay"))
        g = -g if group["maximize"] else g
        if decay:
            g = g + decay * p
        if momentum:
            b = self.accumulate(g, state, momentum, 1 - dampening)
            g = g + momentum * b if group["nesterov"] else b
        p -= lr * g

    def accumulate(self, g, state, momentum, share):
        """b ← momentum · b + share · g in place; returns b."""
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = constant(array_module(g).array(g))       # of a 0-d array, −g is a scalar: an array again
            return state["momentum_buffer"].array
        b = state["momentum_buffer"].array
        b *= momentum
        b += share * g
        return b
