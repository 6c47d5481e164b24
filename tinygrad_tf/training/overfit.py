"""Overfit one batch: the first test of a model, its data and its optimizer.                                        (guide 17.3)

A few dozen tokens can be learnt by heart. A model that cannot is broken, or its data, or its optimizer; it is not too small.
"""
import copy
import math
from dataclasses import dataclass

from ..arguments import whole_number
from ..autograd import enable_grad
from ..nn.module import Module
from ..optim import AdamW

LEARNT = 0.1                                    # of the first loss: what is left of it at the end
FALLING, RISEN = 0.5, 0.1                       # of its size: by how much it fell, or rose


@dataclass(frozen=True)
class Overfit:
    """losses: of each step, before its update; and the model as it then was. `model` is the copy that learnt the batch."""
    losses: list
    model: Module

    @property
    def learnt(self):
        """Whether a tenth of the first loss is left, or less. Of one that begins at 0 or below, nobody knows where it ends: False."""
        return 0 < self.losses[0] and self.losses[-1] <= LEARNT * self.losses[0]

    @property
    def verdict(self):
        """`learnt`, `falling`, `stuck`, or `diverged`, and what that says."""
        first, last = self.losses[0], self.losses[-1]
        if not math.isfinite(last) or last > first + RISEN * abs(first):
            return "diverged: the rate is too high, or an operation makes NaN (autograd.detect_anomaly names it)"
        if self.learnt:
            return "learnt: model, targets and optimizer work together"
        if last < first and last <= first - FALLING * abs(first):
            return "falling: give it more steps; if it stops there, two rows ask for different answers to the same question"
        return "stuck: suspect the implementation, the targets or the optimizer, and not the size of the model"

    def __str__(self):
        marks = sorted({0, len(self.losses) - 1, *(s for s in (10, 50, 100, 200, 500, 1000) if s < len(self.losses))})
        return f"loss {', '.join(f'{self.losses[step]:.3f} at step {step}' for step in marks)}: {self.verdict}"


def overfit_one_batch(model, batch, steps=200, lr=3e-3, *, loss=None, make_optimizer=AdamW, training=False, inplace=False):
    """The `Overfit` of a copy of the model, trained on one small batch: losses[0] is that before any update. It ends early at NaN.

    batch            an `LMBatch` or a dict of the model's arguments, or a tuple of them; the model returns (logits, loss), or a loss
    loss             a function of (model, batch) → one number, for other models
    make_optimizer   (parameters, lr=…) → optimizer
    training         False: in evaluation mode, since dropout hides what is learnt; gradients flow as in training
    inplace          True trains the model itself

    ValueError for a batch whose loss does not depend on a parameter. Random numbers are drawn in training mode alone. Modes are afterwards
    as before, also after an error.
    """
    steps = whole_number("overfit_one_batch", "steps", steps, least=1)
    learner = model if inplace else copy.deepcopy(model)
    before = [(module, module.training) for module in learner.modules()]
    optimizer, loss, losses = make_optimizer(learner.parameters(), lr=lr), loss or _own_loss, []
    learner.train(training)
    try:
        with enable_grad():
            while len(losses) < steps and math.isfinite(sum(losses)):
                losses.append(_update(learner, batch, loss, optimizer))
    finally:
        optimizer.zero_grad()
        for module, mode in before:
            module.training = mode
    return Overfit(losses, learner)


def _update(model, batch, loss, optimizer):
    optimizer.zero_grad()
    value = loss(model, batch)
    if not value.requires_grad:
        raise ValueError("overfit_one_batch: the loss does not depend on any parameter: requires_grad is False, or something on the way "
                         "was detached")
    value.backward()
    optimizer.step()
    return value.item()


def _own_loss(model, batch):
    """Of what the model returns the single number: the loss, alone or beside the logits."""
    out = model(**batch) if hasattr(batch, "keys") else model(*batch)
    found = [x for x in (out if isinstance(out, tuple) else (out,)) if getattr(x, "ndim", None) == 0]
    if not found:
        raise ValueError("overfit_one_batch: the model returns no loss, a single number; give a function (model, batch) → number as loss=…")
    return found[0]
