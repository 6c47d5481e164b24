"""Training: the loop, checkpoints that survive, metrics and the loss curve."""
from .checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from .config import PRESETS, TrainConfig
from .evaluation import Evaluation, evaluate, evaluate_ids, evaluate_text, multiple_choice, perplexity, summed_loss, write_samples
from .trainer import Trainer
