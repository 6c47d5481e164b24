"""The doctor of a run: its newest checkpoint, a batch of its text, and the text itself."""
from ..creation import as_tensor
from ..data import load_text, split_train_validation
from ..models.common import device_of_model
from .config import TrainConfig
from .doctor import examine
from .parts import encode_split, make_optimizer, make_sampler
from .quantized import load_any
from .state import fitting, join_tensors, read_run


def examine_run(run, sources=None, device=None, **known):
    """The `Report` of a run's folder, of one of its checkpoints, or of a file of `save_quantized`. CheckpointError, CorpusError.

    sources: a text in place of the run's own, as `data.load_text` takes them;  known: other fields of `Case`.
    """
    model, tokenizer, state = load_any(run, device)
    text = load_text(sources or state["sources"])
    _, train_ids, validation_ids = encode_split(text, tokenizer)
    train_text, validation_text = split_train_validation(text)
    config = TrainConfig.from_dict(state["config"])
    sampler = make_sampler(config, train_ids)
    batch = tuple(as_tensor(ids, device=device_of_model(model)) for ids in sampler.next())
    return examine(model, batch, **{"tokenizer": tokenizer, "train_ids": train_ids, "validation_ids": validation_ids,
                                    "train_text": train_text, "validation_text": validation_text, "training": False,
                                    "optimizer": optimizer_of(run, config, model, state), **known})


def optimizer_of(run, config, model, state):
    """That of the run, as its checkpoint left it; None for a file of weights alone."""
    if "optimizer" not in state:
        return None
    tensors, _ = read_run(run)
    with fitting(run):
        optimizer = make_optimizer(config, model)
        optimizer.load_state_dict(join_tensors(state["optimizer"], tensors, "optimizer."))
    return optimizer
