"""Losses as layers: they hold the options, `functional` the formulas."""
from . import functional as F
from .module import Module


class CrossEntropyLoss(Module):
    """−ln softmax(logits)[target], averaged. See `functional.cross_entropy`.   (guide 13.4)"""

    def __init__(self, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0):
        super().__init__()
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing

    def forward(self, logits, target):
        return F.cross_entropy(logits, target, weight=self.weight, ignore_index=self.ignore_index, reduction=self.reduction,
                               label_smoothing=self.label_smoothing)


class NLLLoss(Module):
    """−log_probabilities[target], averaged. See `functional.nll_loss`."""

    def __init__(self, weight=None, ignore_index=-100, reduction="mean"):
        super().__init__()
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(self, log_probabilities, target):
        return F.nll_loss(log_probabilities, target, weight=self.weight, ignore_index=self.ignore_index, reduction=self.reduction)


class MSELoss(Module):
    """(x − target)², averaged. See `functional.mse_loss`."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.reduction = reduction

    def forward(self, x, target):
        return F.mse_loss(x, target, reduction=self.reduction)


class BCEWithLogitsLoss(Module):
    """−(y · ln σ(x) + (1 − y) · ln(1 − σ(x))), averaged. See `functional.binary_cross_entropy_with_logits`."""

    def __init__(self, weight=None, reduction="mean", pos_weight=None):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("pos_weight", pos_weight)
        self.reduction = reduction

    def forward(self, logits, target):
        return F.binary_cross_entropy_with_logits(logits, target, self.weight, reduction=self.reduction, pos_weight=self.pos_weight)
