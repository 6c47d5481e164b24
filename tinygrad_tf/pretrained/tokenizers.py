"""The tokenizer that came with published weights, and the template of its chats."""
import json
import warnings
from pathlib import Path

from ..data import Tokenizer, load_gpt2, load_huggingface
from ..data.gguf_tokenizer import tokenizer_from_gguf
from ..serialization import one_line, write_atomically
from .config import PretrainedError
from .gguf_names import is_gguf

OURS = "tokenizer.tinygrad_tf.json"


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
        return weights.metadata.get("tokenizer.chat_template")
    folder = path if path.is_dir() else path.parent
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise PretrainedError(f"{folder / 'tokenizer_config.json'} cannot be read: {one_line(error)}") from None
    if isinstance(found, list):
        found = next((entry.get("template") for entry in found if isinstance(entry, dict) and entry.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def save_tokenizer(tokenizer, folder, chat_template):
    """In the library's own form, beside the weights."""
    tokenizer.save(Path(folder) / OURS)
    if chat_template is not None:
        write_atomically(Path(folder) / "chat_template.jinja", chat_template)
