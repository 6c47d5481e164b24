"""The tokenizer that came with published weights, and the template of its chats."""
import json
import warnings
from contextlib import suppress
from pathlib import Path

from ..data import Tokenizer, load_gpt2, load_huggingface
from ..data.gguf_tokenizer import tokenizer_from_gguf
from ..serialization import one_line, write_atomically
from .config import PretrainedError, read_json, read_text, require
from .gguf_names import is_gguf

OURS, TEMPLATE, SENTENCES = "tokenizer.tinygrad_tf.json", "chat_template.jinja", "sentence_bert_config.json"


def tokenizer_in(path, weights):
    """That of a GGUF, or of the files beside the weights; None where there is none, and with a warning where it is of an unknown kind."""
    try:
        if is_gguf(weights):
            return tokenizer_from_gguf(weights.metadata)
        return _tokenizer_of(path if path.is_dir() else path.parent)
    except (ValueError, OSError, ImportError) as error:
        warnings.warn(f"the tokenizer of {path} cannot be used, the model can: {one_line(error)}", stacklevel=3)
        return None


def _tokenizer_of(folder):
    if (folder / OURS).is_file():
        return Tokenizer.load(folder / OURS)
    if (folder / "tokenizer.json").is_file():
        return load_huggingface(folder / "tokenizer.json")
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return load_gpt2(folder / "vocab.json", folder / "merges.txt")
    return None


def chat_template_in(path, weights):
    """The Jinja text of a template, or None. Of several, the one called "default"."""
    if is_gguf(weights):
        return text_or_none(weights.metadata.get("tokenizer.chat_template"))
    folder = path if path.is_dir() else path.parent
    with suppress(FileNotFoundError):
        return read_text(folder / TEMPLATE)
    with suppress(FileNotFoundError):
        found = read_json(folder / "tokenizer_config.json").get("chat_template")
        if isinstance(found, list):
            found = next((entry.get("template") for entry in found if isinstance(entry, dict) and entry.get("name") == "default"), None)
        return text_or_none(found)
    return None


def text_or_none(value):
    return value if isinstance(value, str) else None


def require_mean(path):
    """PretrainedError where the files beside the weights say that a sentence is another thing than the mean of its states."""
    said = Path(path) / "1_Pooling" / "config.json"
    if said.is_file():
        found = [name for name, value in read_json(said).items() if name.startswith("pooling_mode_") and value is True]
        if found != ["pooling_mode_mean_tokens"]:
            raise PretrainedError(f"{said} asks for {', '.join(found) or 'nothing'}, and embed takes the mean of the tokens")


def longest_text_in(path):
    """How many tokens sentences had when the model learned to embed them, as a file beside the weights says; None where none does."""
    with suppress(FileNotFoundError):
        found = read_json((path if path.is_dir() else path.parent) / SENTENCES)
        return None if found.get("max_seq_length") is None else require(found, "max_seq_length", int)
    return None


def save_companions(folder, tokenizer, chat_template, longest_text):
    """What came with a model, in the library's own form, beside its weights. What there is not, an earlier model left there: it goes."""
    folder = Path(folder)
    if tokenizer is not None:
        tokenizer.save(folder / OURS)
    else:
        (folder / OURS).unlink(missing_ok=True)
    for name, text in {TEMPLATE: chat_template, SENTENCES: longest_text and json.dumps({"max_seq_length": longest_text})}.items():
        if text is not None:
            write_atomically(folder / name, text)
        else:
            (folder / name).unlink(missing_ok=True)
