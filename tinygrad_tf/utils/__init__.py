"""PyTorch's `torch.utils`, as far as there is something of it here."""
from . import checkpoint
