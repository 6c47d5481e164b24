"""Training: the loop, checkpoints that survive, metrics and the loss curve."""
from .checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from .config import PRESETS, TrainConfig
from .evaluation import evaluate, perplexity
from .trainer import Trainer
