"""Optimizers under PyTorch's names, and learning-rate schedules."""
from ..arguments import absent
from . import lr_scheduler
from .adam import Adam, AdamW
from .groups import decay_groups
from .optimizer import Optimizer
from .sgd import SGD

__all__ = ["Adam", "AdamW", "Optimizer", "SGD", "decay_groups", "lr_scheduler"]
__getattr__ = absent(__name__)
