"""Published models: their files, their tokenizers, and their weights in this library's own blocks."""

from .config import PretrainedError
from .loading import Pretrained, from_pretrained, save_pretrained
from .mapped import WeightsError
from .weights import Weights, open_weights

__all__ = [
    "Pretrained",
    "PretrainedError",
    "Weights",
    "WeightsError",
    "from_pretrained",
    "open_weights",
    "save_pretrained",
]
