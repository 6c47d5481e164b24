"""What a training run is made of: one flat record, saved with every checkpoint."""
import dataclasses
import sys

from ..optim.lr_scheduler import SCHEDULES

LARGEST = sys.float_info.max
PRECISIONS = "float32", "float16", "bfloat16"
SAMPLINGS = "random", "epochs"
SMALLEST_BPE = 260              # four special tokens and the bytes


def setting(default, what):
    """A field with the words that --help says of it."""
    return dataclasses.field(default=default, metadata={"help": what})


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Sizes of the model in the guide's letters, and the schedule. Field names are the command line's flags."""
    tokenizer: str = setting("char", "char, byte, bpe (subwords, learned from the part that is trained on), or a file of a tokenizer")
    vocab_size: int = setting(1024, "tokens of a bpe tokenizer, fewer where the text is too short for them")
    context: int = setting(64, "T, tokens that the model sees at once")
    dim: int = setting(128, "C, features of a token")
    layers: int = setting(4, "Transformer blocks")
    heads: int = setting(4, "H, attention heads; a divisor of dim")
    dropout: float = setting(0.0, "share of activations set to zero while training")
    norm: str = setting("pre", "pre or post (the guide's MiniGPT): the norm before or after each sublayer")
    experts: int = setting(0, "E, feed-forward networks in each block, of which a token passes some; 0: one network, for all")
    experts_per_token: int = setting(2, "k, how many of the experts a token passes")
    balance: str = setting("loss", "what keeps the experts equally loaded: loss (an auxiliary one), bias (in the router) or none")
    batch_size: int = setting(12, "B, windows of text a step")
    accumulation: int = setting(1, "parts of a batch, one after another, whose gradients add up to those of the whole: less memory")
    threads: int = setting(1, "shards of a batch that are computed at once, on as many cores; another number rounds and drops otherwise")
    sampling: str = setting("random", "random: windows from anywhere; epochs: windows side by side, each once, then all in a new order")
    steps: int = setting(1200, "updates")
    lr: float = setting(4e-3, "peak learning rate")
    warmup: int = setting(100, "steps up to the peak")
    schedule: str = setting("cosine", "from the peak towards a tenth of it, which the step after the last would have: cosine, linear, wsd "
                                      "(flat, and down in the last fifth), or constant")
    weight_decay: float = setting(0.1, "AdamW's, on matrices only")
    clip: float = setting(1.0, "largest gradient norm")
    eval_every: int = setting(200, "steps between evaluations, each of which saves")
    patience: int = setting(0, "evaluations without a better validation loss after which a run ends; 0: never")
    keep: int = setting(2, "checkpoints that are kept, the newest ones; the best is kept beside them")
    precision: str = setting("float32", "float32; float16 or bfloat16: matrix products in 16 bits, the weights stay float32")
    activations: str = setting("kept", "kept or recomputed, for backward: the latter needs less memory, and a second forward pass")
    seed: int = setting(0, "of the first weights, the batches and dropout")

    def __post_init__(self):
        self._check_types()
        for name in ("context", "dim", "layers", "heads", "batch_size", "threads", "steps", "eval_every", "keep"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("lr", "clip"):
            self._require(name, 0 < getattr(self, name) <= LARGEST, "positive and finite")
        for name in ("warmup", "patience"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        self._require("tokenizer", self.tokenizer, "char, byte, bpe or a file")
        self._require("vocab_size", self.vocab_size >= SMALLEST_BPE, f"at least {SMALLEST_BPE}")
        self._require("accumulation", 1 <= self.accumulation <= self.batch_size, f"from 1 to batch_size = {self.batch_size}")
        self._require_one_of("sampling", SAMPLINGS)
        self._require_one_of("schedule", SCHEDULES)
        self._require("weight_decay", 0 <= self.weight_decay <= LARGEST, "at least 0")
        self._require("dropout", 0 <= self.dropout < 1, "in [0, 1)")
        self._require_one_of("precision", PRECISIONS)
        self._require_one_of("activations", ("kept", "recomputed"))
        self._require_one_of("norm", ("pre", "post"))
        self._require("heads", self.dim % self.heads == 0, f"a divisor of dim = {self.dim}")
        self._require("experts", self.experts >= 0, "at least 0")
        most = self.experts or type(self).experts_per_token
        self._require("experts_per_token", 1 <= self.experts_per_token <= most, f"from 1 to {most}")
        self._require_one_of("balance", ("loss", "bias", "none"))

    def _check_types(self):
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
                raise ValueError(f"{field.name} must be of type {kind.__name__}, got {value!r}")

    def _require(self, name, holds, what):
        if not holds:
            raise ValueError(f"{name} must be {what}, got {getattr(self, name)}")

    def _require_one_of(self, name, values):
        self._require(name, getattr(self, name) in values, f"one of {', '.join(map(repr, values))}")

    def to_dict(self):
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values):
        """What an older version did not know yet has its default; ValueError for what this one does not know."""
        unknown = set(values) - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"the configuration has other fields than this version's: {sorted(unknown)}")
        return cls(**values)


PRESETS = {
    "tiny": TrainConfig(),
    "small": TrainConfig(context=128, dim=192, layers=4, heads=6, dropout=0.1, batch_size=8, steps=2500, lr=3e-3, eval_every=250),
}
