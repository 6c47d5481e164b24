"""The doctor of a run: its newest checkpoint, a batch of its text, and the text itself."""
from ..creation import as_tensor
from ..data import load_text, split_train_validation
from ..models.common import device_of_model
from .config import TrainConfig
from .doctor import examine
from .parts import encode_split, make_sampler
from .state import load_model


def examine_run(run, sources=None, device=None, **known):
    """The `Report` of a run's folder, or of one of its checkpoints. CheckpointError, CorpusError.

    sources: a text in place of the run's own, as `data.load_text` takes them;  known: other fields of `Case`.
    """
    model, tokenizer, state = load_model(run, device)
    text = load_text(sources or state["sources"])
    _, train_ids, validation_ids = encode_split(text, tokenizer)
    train_text, validation_text = split_train_validation(text)
    sampler = make_sampler(TrainConfig.from_dict(state["config"]), train_ids)
    batch = tuple(as_tensor(ids, device=device_of_model(model)) for ids in sampler.next())
    return examine(model, batch, **{"tokenizer": tokenizer, "train_ids": train_ids, "validation_ids": validation_ids,
                                    "train_text": train_text, "validation_text": validation_text, **known})
