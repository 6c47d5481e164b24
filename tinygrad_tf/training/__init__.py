"""Training: the loop, checkpoints that survive, metrics and the loss curve."""
from . import checks, checks_of_runs
from .callbacks import Callback
from .checkpoint import CheckpointError, CheckpointWarning, load_checkpoint, load_newest, save_checkpoint
from .config import PRESETS, TrainConfig
from .doctor import Case, Finding, Report, examine
from .evaluation import Evaluation, evaluate, evaluate_ids, evaluate_text, multiple_choice, perplexity, summed_loss, write_samples
from .overfit import Overfit, overfit_one_batch
from .shards import Shards
from .state import load_model
from .trainer import Trainer
