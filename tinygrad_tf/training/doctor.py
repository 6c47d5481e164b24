"""The doctor: what is wrong with a model and a batch, by name.                                                     (guide 17.3)

    print(examine(model, batch, tokenizer=tokenizer, optimizer=optimizer))

A check is a short function of a `Case` that measures one thing and returns its evidence, in words, or None. `@check` puts it into
CHECKS under the name of the cause that it looks for. training/checks.py looks at a model and a batch, training/checks_of_runs.py at
texts, samples and what a run has done. Whoever writes another one registers it in the same way.

The model is never changed: checks work on copies, and the random streams go back to where they were.
"""
import copy
import inspect
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from .. import random
from ..arguments import described, tensors_in
from ..autograd import IGNORED, enable_grad, no_grad
from ..backend import CPU, to_device
from ..dtypes import widened
from ..nn import functional as F
from ..nn.module import Module
from ..tensor import Tensor

# The rows of the guide's table 17.3, and two for what shows in none of them.
STUCK = "the loss stays near ln V_vocab"
TOO_LOW = "the loss is near 0, too soon"
NOT_FINITE = "NaN or infinity"
REPEATS = "the output repeats"
PADDING = "padding changes results"
SLOW = "training is slow"
WORSE = "the results are worse than they should be"
ERROR = "an error"

TARGETS = ("targets", "labels")                                         # what models call them
VALID = {"valid_tokens": None, "source_valid": "source_ids", "target_valid": "target_ids"}      # → the ids they are about; None: the first

SHIFTS = range(-2, 4)                           # places by which targets may be off
AGREE = 0.95                                    # share of equal targets from which on this is no chance
IN_WORDS = {"ids": "token ids [B, T]", "texts": "token ids [B, T]", "padded": "padding in the batch", "targets": "targets",
            "is_language_model": "targets that are the tokens that follow", "logits": "a model that runs", "loss": "a loss",
            "gradients": "a loss with a graph", "splits": "ids or texts of training and validation", "corpus": "train_ids or train_text"}


@dataclass(frozen=True)
class Finding:
    """cause: its standard name;  symptom: the row of the table that it shows in;  evidence: what was measured;  advice: what to do"""
    cause: str
    symptom: str
    evidence: str
    advice: str


@dataclass(frozen=True)
class Check:
    """A registered check; `needs` are the attributes of a `Case` that it cannot do without."""
    look: Any
    cause: str
    symptom: str
    advice: str
    needs: tuple
    explained_by: tuple

    def findings(self, case):
        """What `look` says of a case, as a list: all str together are the evidence of what stands here, a `Finding` stands for itself."""
        said = self.look(case)
        said = [said] if said is None or isinstance(said, (str, Finding)) else [s for s in said if s]
        evidence = "; ".join(s for s in said if isinstance(s, str))
        own = [Finding(self.cause, self.symptom, evidence, self.advice)] if evidence else []
        return own + [s for s in said if isinstance(s, Finding)]


CHECKS = []


def check(cause, symptom, advice, needs=("logits",), explained_by=()):
    """Registers a function look(case) → evidence: str, or None; also several, or a `Finding` of its own.

    needs: names of attributes of `Case`; where one is None, the check is left out, and the report says so.
    explained_by: causes that bring this finding with them. Where one of them was found, this one is not reported.
    """
    def register(look):
        CHECKS.append(Check(look, cause, symptom, advice, tuple(needs), tuple(explained_by)))
        return look
    return register


# --- what is examined ---------------------------------------------------------------------------------------------------

@dataclass(eq=False)
class Case:
    """A model and a batch, all else that is known, and what several checks measure, once.

    batch            an `LMBatch`, a dict of the model's arguments, or (inputs, targets); all tensors where the model is
    loss_of          a function (logits, targets) → number, where the model returns none; by default cross entropy
    training         whether the model is said to train now; by default it is if an optimizer is given, else nothing is said
    causal           whether a token may see those before it alone; by default it is if the targets are ids of the batch, moved
    sampler          a `generation.Sampler` that it writes with;  samples: what it has written, lists of ids
    loading          a function that makes the next batch, to be timed; or (seconds for a batch, seconds for a step), as measured
    seed             of the random numbers of all that is measured
    """
    model: Module
    batch: Any
    tokenizer: Any = None
    optimizer: Any = None
    train_ids: Any = None
    validation_ids: Any = None
    train_text: str | None = None
    validation_text: str | None = None
    loss_of: Any = None
    training: bool | None = None
    causal: bool | None = None
    scheduler: Any = None
    sampler: Any = None
    samples: Any = None
    loading: Any = None
    seed: int = 0

    def __post_init__(self):
        if not isinstance(self.model, Module):
            raise TypeError(f"examine: model must be an nn.Module, got {described(self.model)}")
        self.arguments, self.targets = _arguments(self.model, self.batch)

    # --- the batch ---

    @property
    def ids_name(self):
        """The argument with the ids [B, T]: the last one of whole numbers, and of the shape of the targets if there is one; or None."""
        names = [name for name, x in self.arguments.items() if _is_ids(name, x)]
        like_targets = [name for name in names if self.targets is not None and self.arguments[name].shape == self.targets.shape]
        return (like_targets or names or [None])[-1]

    @property
    def ids(self):
        return self.arguments.get(self.ids_name)

    @cached_property
    def real(self):
        """{name of ids: bool [B, T], NumPy: where a real token stands} of all ids that something tells of."""
        found = {}
        for name, about in VALID.items():
            ids, valid = self.arguments.get(about or self.ids_name), self.arguments.get(name)
            if ids is not None and valid is not None and valid.shape == ids.shape:
                found[about or self.ids_name] = host(valid).astype(bool)
        if self.ids is not None and self.ids_name not in found:
            segments = self.arguments.get("segment_ids")
            found[self.ids_name] = ~self._filled_up() if segments is None else host(segments) >= 0
        return found

    @cached_property
    def texts(self):
        """int [B, T], NumPy: the number of the text of a row that each of `ids` belongs to, −1 at padding; None for other inputs.

        Where no argument tells of padding, it is what the tokenizer's pad_id fills a row up with, at either end.
        """
        if self.ids is None:
            return None
        segments = self.arguments.get("segment_ids")
        return np.where(self.real[self.ids_name], 0 if segments is None else host(segments), -1)

    def _filled_up(self):
        """bool [B, T]: the runs of pad_id at the beginning and at the end of the rows; none where it also ends texts."""
        pad = getattr(self.tokenizer, "pad_id", None)
        if pad is None or pad == self.tokenizer.eos_id:
            return np.zeros(self.ids.shape, bool)
        is_pad = host(self.ids) == pad
        return np.logical_and.accumulate(is_pad, 1) | np.logical_and.accumulate(is_pad[:, ::-1], 1)[:, ::-1]

    @property
    def padded(self):
        """True where there is padding, else None."""
        return True if any(not real.all() for real in self.real.values()) else None

    def agreement(self, shift):
        """The share of targets that equal the id `shift` places further in their text; None where none has one.        right: 1 at 1"""
        if self.ids is None or self.targets is None or self.targets.shape != self.ids.shape:
            return None
        T = self.ids.shape[1]
        here, there = (slice(max(0, by), min(T, max(0, T + by))) for by in (-shift, shift))
        ids, targets, texts = host(self.ids), host(self.targets), self.texts
        pairs = (targets != IGNORED)[:, here] & (texts[:, here] == texts[:, there]) & (texts[:, here] >= 0)
        return float((targets[:, here] == ids[:, there])[pairs].mean()) if pairs.any() else None

    @property
    def trains(self):
        """Whether the model is said to train now; None where nothing is said."""
        return (True if self.optimizer is not None else None) if self.training is None else self.training

    @property
    def is_language_model(self):
        """True where a token is to see those before it alone: as `causal` says, or where the targets are the ids, moved; else None."""
        if self.logits is None or self.ids is None or self.logits.shape[:-1] != self.ids.shape or self.causal is False:
            return None
        return self.causal or max(self.agreement(shift) or 0 for shift in SHIFTS) >= AGREE or None

    # --- the texts ---

    @property
    def splits(self):
        """(training, validation) as ids, or as the bytes of texts; None where one of them is missing."""
        ids, texts = (self.train_ids, self.validation_ids), (self.train_text, self.validation_text)
        if all(part is not None for part in ids):
            return ids
        return tuple(map(_bytes, texts)) if all(part is not None for part in texts) else None

    @property
    def corpus(self):
        """What is trained on, as ids, or as the bytes of a text; None where nothing is known of it."""
        return _bytes(self.train_text) if self.train_ids is None and self.train_text is not None else self.train_ids

    # --- the model ---

    def copy(self, training=False):
        """A copy of the model, without gradients, to do anything with; in training mode, or in evaluation mode."""
        return _copied(self.model).train(training)

    def copies(self, training=True):
        """(a copy of the model, the copy of the optimizer that trains it, or None)"""
        model, optimizer = _copied((self.model, self.optimizer))
        return model.train(training), optimizer

    @cached_property
    def evaluated(self):
        """One copy in evaluation mode, which all checks share: to be called, and not to be changed."""
        return self.copy()

    def run(self, model=None, **changes):
        """(logits, loss) of the batch with some arguments changed; loss is None without targets. By default of `evaluated`, no graph.

        What is changed to None is left out. The random numbers are the same in each call.
        """
        if model is None:
            with no_grad():
                return self.run(self.evaluated, **changes)
        random.manual_seed(self.seed)
        out = model(**{name: x for name, x in {**self.arguments, **changes}.items() if x is not None})
        return self._read(out, changes.get(self._targets_name, self.targets))

    @property
    def _targets_name(self):
        return next((name for name in TARGETS if name in self.arguments), TARGETS[0])

    def _read(self, out, targets):
        """(logits, loss) of what a model returns: logits alone, or among others; the loss is a single number."""
        found = tensors_in(out)
        logits = next((x for x in found if x.ndim), None)
        loss = next((x for x in found if not x.ndim), None)
        if self.loss_of is not None and targets is not None:
            loss = self.loss_of(logits, targets)
        elif loss is None and logits is not None and targets is not None and logits.shape[:-1] == targets.shape:
            loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        return logits, loss

    @cached_property
    def _plain(self):
        """(logits, loss, error) of the batch as it is, in evaluation mode; (None, None, error) where the model raises."""
        try:
            return *self.run(), None
        except Exception as error:
            return None, None, error

    @property
    def logits(self):
        """[…, V_vocab], in evaluation mode; None where the model raises."""
        return self._plain[0]

    @property
    def loss(self):
        """The loss of the batch in evaluation mode, a float; None where there is none."""
        return None if self._plain[1] is None else self._plain[1].item()

    @cached_property
    def _step(self):
        """({name: gradient, or None}, error) after one backward pass in training mode; (None, None) without a loss that has a graph."""
        if self._plain[1] is None:
            return None, None
        try:
            model = self.copy(training=True)
            loss = self.run(model)[1]
            if not loss.requires_grad:
                return None, None
            loss.backward()
            return {name: p.grad for name, p in model.named_parameters()}, None
        except Exception as error:
            return None, error

    @property
    def gradients(self):
        """{name: gradient, or None} of all parameters, in training mode; None where the loss has none, or training raises."""
        return self._step[0]

    @property
    def error(self):
        """What the model raised, evaluated or trained; or None."""
        return self._plain[2] or self._step[1]


def _copied(what):
    """A deep copy; RuntimeError where something in it cannot be copied, such as a tensor that was computed."""
    try:
        return copy.deepcopy(what)
    except (RuntimeError, TypeError) as error:
        raise RuntimeError(f"examine: works on copies, and the model cannot be copied: {error}") from error


def _bytes(text):
    return np.frombuffer(text.encode(), np.uint8)


def host(x):
    """The numbers of a tensor as a NumPy array; bfloat16 as float32."""
    return widened(to_device(x.array, CPU))


def _is_ids(name, x):
    return name not in (*TARGETS, "position_ids", "segment_ids") and x is not None and x.ndim == 2 and x.array.dtype.kind in "iu"


def _arguments(model, batch):
    """({name: tensor} to call the model with, the targets or None) of any kind of batch. TypeError for what is none."""
    parameters = inspect.signature(model.forward).parameters
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        named = dict(zip([*parameters][:1] + [next((n for n in TARGETS if n in parameters), TARGETS[0])], batch))
    elif hasattr(batch, "keys"):
        named = {name: batch[name] for name in batch.keys()}
    else:
        raise TypeError(f"examine: batch must be an LMBatch, a dict of the model's arguments, or (inputs, targets), got {described(batch)}")
    if wrong := [name for name, x in named.items() if x is not None and not isinstance(x, Tensor)]:
        raise TypeError(f"examine: what a batch holds must be tensors, but {wrong[0]} is {described(named[wrong[0]])}")
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    targets = next((named[name] for name in TARGETS if name in named), None)
    return {name: x for name, x in named.items() if takes_all or name in parameters or name not in TARGETS}, targets


# --- the report -----------------------------------------------------------------------------------------------------------

@dataclass
class Report:
    """What the checks found: iterable, and printed as a table.

    skipped: {cause: what its check needs, or what it follows from};  failed: {cause: the error of its check}. What was not looked at is
    not known to be well.
    """
    findings: list = field(default_factory=list)
    looked_at: list = field(default_factory=list)
    skipped: dict = field(default_factory=dict)
    failed: dict = field(default_factory=dict)

    @property
    def healthy(self):
        """Nothing was found, and every check that had what it needs came to its end."""
        return not self.findings and not self.failed

    @property
    def causes(self):
        """The names of what was found, each once."""
        return list(dict.fromkeys(finding.cause for finding in self.findings))

    def __iter__(self):
        return iter(self.findings)

    def __len__(self):
        return len(self.findings)

    def __bool__(self):
        return True                             # one without findings is a report too

    def __str__(self):
        number = {0: "Nothing found", 1: "1 finding"}.get(len(self), f"{len(self)} findings")
        lines = [f"{number} by {len(self.looked_at)} checks."]
        for f in self:
            lines += ["", f.cause.upper(), f"  symptom   {f.symptom}", f"  evidence  {f.evidence}", f"  advice    {f.advice}"]
        for title, rest in ("Not looked at", self.skipped), ("Could not be looked at", self.failed):
            if rest:
                lines += ["", f"{title}:", *(f"  {cause:32s}{why}" for cause, why in rest.items())]
        return "\n".join(lines)


def examine(model, batch, *, checks=None, **known):
    """The `Report` of all checks that have what they need. checks: causes to look for alone; known: the other fields of `Case`.

    Nothing of the model, the optimizer or the random streams is changed. TypeError for a model or a batch that is none,
    ValueError for the name of a cause that no check looks for.
    """
    case, report = Case(model, batch, **known), Report()
    with _as_before(), enable_grad(), np.errstate(all="ignore"):
        for one in _chosen(checks):
            _look(one, case, report)
    follows = {one.cause: _explained(one, report) for one in CHECKS}       # also what was found before its explanation
    report.skipped |= {cause: follows[cause] for cause in report.causes if follows.get(cause)}
    report.findings = [f for f in report if not follows.get(f.cause)]
    return report


def _explained(one, report):
    """What the finding of a check would follow from, of what was found; or None."""
    return next((f"follows from: {cause}" for cause in one.explained_by if cause in report.causes), None)


def _chosen(causes):
    names = [one.cause for one in CHECKS]
    if wrong := [cause for cause in causes or () if cause not in names]:
        raise ValueError(f"examine: no check looks for {wrong[0]!r}; there are: {', '.join(names)}")
    return [one for one in CHECKS if causes is None or one.cause in causes]


def _look(one, case, report):
    """Adds to the report what one check says. One that stumbles over a broken model does not hide what the others see."""
    try:
        if missing := [name for name in one.needs if getattr(case, name) is None]:
            report.skipped[one.cause] = f"needs {', '.join(IN_WORDS.get(name, name) for name in missing)}"
            return
        if explanation := _explained(one, report):
            report.skipped[one.cause] = explanation
            return
        report.findings += one.findings(case)
        report.looked_at.append(one.cause)
    except Exception as error:
        report.failed[one.cause] = f"{type(error).__name__}: {' '.join(str(error).split())}"


@contextmanager
def _as_before():
    """Whatever is drawn inside, all random streams then go on as if nothing had been drawn."""
    with random.states_at_first_use() as states:
        try:
            yield
        finally:
            for generator, state in list(states.items()):
                generator.set_state(state)
