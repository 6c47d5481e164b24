"""What a training run is made of: one flat record, saved with every checkpoint."""
import dataclasses
import sys

LARGEST = sys.float_info.max


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Sizes of the model in the guide's letters, and the schedule. Field names are the command line's flags."""
    context: int = 64               # T
    dim: int = 128                  # C
    layers: int = 4
    heads: int = 4                  # H
    dropout: float = 0.0
    norm: str = "pre"               # "pre" or "post" (the guide's MiniGPT)
    batch_size: int = 12            # B
    steps: int = 1200
    lr: float = 4e-3
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    eval_every: int = 200
    seed: int = 0

    def __post_init__(self):
        self._check_types()
        for name in ("context", "dim", "layers", "heads", "batch_size", "steps", "eval_every"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("lr", "clip"):
            self._require(name, 0 < getattr(self, name) <= LARGEST, "positive and finite")
        self._require("warmup", self.warmup >= 0, "at least 0")
        self._require("weight_decay", 0 <= self.weight_decay <= LARGEST, "at least 0")
        self._require("dropout", 0 <= self.dropout < 1, "in [0, 1)")
        self._require("norm", self.norm in ("pre", "post"), "'pre' or 'post'")
        self._require("heads", self.dim % self.heads == 0, f"a divisor of dim = {self.dim}")

    def _check_types(self):
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
                raise ValueError(f"{field.name} must be of type {kind.__name__}, got {value!r}")

    def _require(self, name, holds, what):
        if not holds:
            raise ValueError(f"{name} must be {what}, got {getattr(self, name)}")

    def to_dict(self):
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values):
        known = {f.name for f in dataclasses.fields(cls)}
        if set(values) != known:
            raise ValueError(f"the configuration has other fields than this version's: {sorted(set(values) ^ known)}")
        return cls(**values)


PRESETS = {
    "tiny": TrainConfig(),
    "small": TrainConfig(context=128, dim=192, layers=4, heads=6, dropout=0.1, batch_size=8, steps=2500, lr=3e-3, eval_every=250),
}
