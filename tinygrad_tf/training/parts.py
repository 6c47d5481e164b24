"""What a run is built from, by its configuration: text, tokenizer, batches, model."""
import dataclasses
import os
from pathlib import Path

from ..data import (
    CORPORA,
    BatchSampler,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    CorpusError,
    EpochSampler,
    Tokenizer,
    load_huggingface,
    split_train_validation,
)
from ..models import MiniGPT
from ..nn.moe import MoE
from ..optim import AdamW, decay_groups

KINDS = "char", "byte", "bpe"   # of tokenizers that are made; any other name is a file
SAMPLERS = {"random": BatchSampler, "epochs": EpochSampler}
BIAS_RATE = 0.001               # step of the bias of a router, where that keeps the balance


def absolute(sources):
    """A list of sources that means the same from any folder: paths become absolute, names of corpora stay."""
    sources = [sources] if isinstance(sources, (str, os.PathLike)) else sources
    for source in sources:
        if any("\ud800" <= c <= "\udfff" for c in os.fspath(source)):      # as Python has bytes that are no UTF-8
            raise CorpusError(f"the name {os.fspath(source)!a} is not UTF-8, and no configuration can hold it: rename the file")
    return [source if source in CORPORA else os.path.abspath(source) for source in sources]


def with_absolute_paths(config):
    """The configuration with the tokenizer, where it is a file, by a path that means the same from any folder."""
    return config if config.tokenizer in KINDS else dataclasses.replace(config, tokenizer=os.path.abspath(config.tokenizer))


def make_tokenizer(name, text, vocab_size):
    """The tokenizer that `TrainConfig.tokenizer` names. CorpusError where it is a file, and none of a tokenizer.

    char: of all characters of the text;  byte;  bpe: learned from the part that is trained on, since what is held out is not known yet.
    """
    if name == "char":
        return CharTokenizer.from_text(text)
    if name == "byte":
        return ByteTokenizer()
    if name == "bpe":
        return BPETokenizer.train(split_train_validation(text)[0], vocab_size)
    return read_tokenizer(name)


def read_tokenizer(path):
    """The tokenizer of a file that `save` wrote, or of a Hugging Face one."""
    if not Path(path).is_file():
        raise CorpusError(f"there is no tokenizer {path}: give char, byte, bpe or a file")
    try:
        return Tokenizer.load(path)
    except ValueError as error:
        try:
            return load_huggingface(path)
        except ValueError:
            raise CorpusError(str(error)) from None


def encode_split(text, tokenizer=None):
    """(tokenizer, training ids, held-out ids: the last 10 % of the text); by default the tokenizer of all its characters."""
    tokenizer = tokenizer or CharTokenizer.from_text(text)
    train, validation = split_train_validation(text)
    return tokenizer, tokenizer.encode(train), tokenizer.encode(validation)


def make_optimizer(config, model):
    return AdamW(decay_groups(model, config.weight_decay), lr=config.lr, betas=(0.9, 0.99))


def make_sampler(config, ids):
    return SAMPLERS[config.sampling](ids, config.context, config.batch_size, seed=config.seed)


def build_model(config, vocab_size):
    model = MiniGPT(vocab_size, config.context, config.dim, config.heads, 4 * config.dim, config.layers, config.dropout,
                    norm_first=config.norm == "pre", ffn=(lambda: build_experts(config)) if config.experts else None)
    model.checkpoint_blocks = config.activations == "recomputed"
    return model


def build_experts(config):
    """The feed-forward network of a block: E times that of a model without experts. With k = 1 a softmax of the chosen would be 1,
    and teach the router nothing.
    """
    return MoE(config.dim, 4 * config.dim, config.experts, config.experts_per_token, ffn="gelu", bias=True, dropout=config.dropout,
               router="softmax_topk" if config.experts_per_token == 1 else "topk_softmax",
               bias_rate=BIAS_RATE if config.balance == "bias" else None)
