"""The doctor: what is wrong with a model and a batch, by name.                                                     (guide 17.3)

    print(examine(model, batch, tokenizer=tokenizer, optimizer=optimizer))

A check is a short function of a `Case` that measures one thing and returns its evidence, in words, or None. `@check` puts it into
CHECKS under the name of the cause that it looks for. training/checks.py looks at a model and a batch, training/checks_of_runs.py at
texts, samples and what a run has done. Whoever writes another one registers it in the same way.

Neither model nor batch are ever changed: checks work on copies, and the random streams go back to where they were.
"""
import copy
import inspect
import itertools
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from .. import random
from ..anomaly import set_detect_anomaly
from ..arguments import described, optional_functions, tensors_in, whole_number
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

NOTHING = inspect.Parameter.empty               # the default of an argument that has none
SHIFTS = range(-2, 4)                           # places by which targets may be off
AGREE = 0.95                                    # share of equal targets from which on this is no chance
IN_WORDS = {"ids": "token ids [B, T]", "texts": "token ids [B, T]", "padded": "padding in the batch", "targets": "targets",
            "is_language_model": "targets that are the tokens that follow", "logits": "a model that runs", "loss": "a loss",
            "gradients": "a loss with a graph", "splits": "ids or texts of training and validation", "corpus": "train_ids or train_text"}
GIVEN = {"optimizer": (("param_groups", "state", "step"), "an optimizer, such as optim.AdamW(model.parameters())"),
         "tokenizer": (("encode", "decode", "vocab_size"), "a tokenizer, such as data.ByteTokenizer()"),
         "scheduler": (("optimizer", "get_last_lr"), "a schedule of optim.lr_scheduler")}      # → what it has, and what it is


class CannotLook(RuntimeError):
    """What keeps the doctor from a model that may well run: it cannot be copied, or returns nothing that can be read."""


@dataclass(frozen=True)
class Finding:
    """cause: its standard name;  symptom: the row of the table that it shows in;  evidence: what was measured;  advice: what to do"""
    cause: str
    symptom: str
    evidence: str
    advice: str


@dataclass(frozen=True)
class Check:
    """A registered check; `needs` are the attributes of a `Case` that it cannot do without, `of_model` is whether it is about the model."""
    look: Any
    cause: str
    symptom: str
    advice: str
    needs: tuple
    explained_by: tuple
    of_model: bool

    def findings(self, case):
        """What `look` says of a case, as a list: all str together are the evidence of what stands here, a `Finding` stands for itself."""
        said = self.look(case)
        said = [said] if said is None or isinstance(said, (str, Finding)) else [s for s in said if s]
        evidence = "; ".join(s for s in said if isinstance(s, str))
        own = [Finding(self.cause, self.symptom, evidence, self.advice)] if evidence else []
        return own + [s for s in said if isinstance(s, Finding)]


CHECKS = []


def check(cause, symptom, advice, needs=("logits",), explained_by=(), of_model=True):
    """Registers a function look(case) → evidence: str, or None; also several, or a `Finding` of its own.

    needs: names of attributes of `Case`; where one is None, the check is left out, and the report says so.
    explained_by: causes that bring this finding with them. Where one of them was found, this one is not reported.
    of_model: False for one that looks at texts, targets, times or rates alone, which say nothing of the model's health.
    """
    def register(look):
        CHECKS.append(Check(look, cause, symptom, advice, tuple(needs), tuple(explained_by), of_model))
        return look
    return register


# --- what is examined ---------------------------------------------------------------------------------------------------

@dataclass(eq=False)
class Case:
    """A model and a batch, all else that is known, and what several checks measure, once.

    batch            an `LMBatch`, a dict of the model's arguments, or (inputs, targets); all tensors where the model is. A forward(*args)
                     is given both of the latter, or the inputs alone if it does not run with both
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
        for name, (parts, what) in GIVEN.items():
            given = getattr(self, name)
            if given is not None and (isinstance(given, type) or not all(hasattr(given, part) for part in parts)):
                raise TypeError(f"examine: {name} must be {what}, got {described(given)}")
        optional_functions("examine", loss_of=self.loss_of, sampler=self.sampler)
        self.seed = whole_number("examine", "seed", self.seed)
        random.Generator().manual_seed(self.seed)           # ValueError for one that no stream begins with
        self.arguments, self.targets, self._places = _arguments(self.model, self.batch)

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

        What is changed to None is left out. The random numbers are the same in each call; the model may write into what it is given.
        """
        if model is None:
            with no_grad():
                return self.run(self.evaluated, **changes)
        random.manual_seed(self.seed)
        given = {name: _own(x) for name, x in {**self.arguments, **changes}.items() if x is not None}
        places = [given.pop(name, default) for name, default in self._places.items()]
        out = model(*itertools.takewhile(lambda x: x is not NOTHING, places), **given)
        return self._read(out, _own(changes.get(self._targets_name, self.targets)))

    @property
    def _targets_name(self):
        return next((name for name in TARGETS if name in self.arguments), TARGETS[0])

    def _read(self, out, targets):
        """(logits, loss) of what a model returns: logits alone, or among others; the loss is a single number. `CannotLook` for neither."""
        found = tensors_in(out)
        if not found:
            raise CannotLook(f"forward returned {described(out)}, in which no tensor was found: let it return logits, or (logits, loss)")
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
        whole, first = self.arguments, None
        for way in self._ways():
            self.arguments = way
            try:
                return *self.run(), None
            except CannotLook:
                raise
            except Exception as error:
                first = first or error
        self.arguments = whole
        return None, None, first

    def _ways(self):
        """The arguments; and those without the targets where forward(*args) does not say whether it takes them."""
        yield self.arguments
        if self._targets_name in self._places:
            yield {name: x for name, x in self.arguments.items() if name != self._targets_name}

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
        except CannotLook:
            raise
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
    """A deep copy; `CannotLook` where something in it cannot be copied, such as a tensor that was computed, or a lock."""
    try:
        return copy.deepcopy(what)
    except Exception as error:
        raise CannotLook(f"the model cannot be copied, and checks work on copies: {type(error).__name__}: {error}") from error


def _own(x):
    """A copy of a tensor, without its history, to do anything with; None stays."""
    return None if x is None else x.detach().clone().requires_grad_(x.requires_grad)


def _bytes(text):
    return np.frombuffer(text.encode(), np.uint8)


def host(x):
    """The numbers of a tensor as a NumPy array; bfloat16 as float32."""
    return widened(to_device(x.array, CPU))


def _is_ids(name, x):
    return name not in (*TARGETS, "position_ids", "segment_ids") and x is not None and x.ndim == 2 and x.array.dtype.kind in "iu"


def _arguments(model, batch):
    """({name: tensor} to call the model with, the targets or None, {name: default} of what has a place and no name) of any batch.

    TypeError for what is none.
    """
    parameters = inspect.signature(model.forward).parameters
    places = {name: p.default for name, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)}
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        first, targets = _names(model, parameters)
        named = dict(zip((first, targets), batch))
        if parameters[first].kind is inspect.Parameter.VAR_POSITIONAL and targets not in parameters:
            places[targets] = NOTHING
    elif hasattr(batch, "keys"):
        named = {name: batch[name] for name in batch.keys()}
    else:
        raise TypeError(f"examine: batch must be an LMBatch, a dict of the model's arguments, or (inputs, targets), got {described(batch)}")
    if wrong := [name for name, x in named.items() if x is not None and not isinstance(x, Tensor)]:
        raise TypeError(f"examine: what a batch holds must be tensors, but {wrong[0]} is {described(named[wrong[0]])}")
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    targets = next((named[name] for name in TARGETS if name in named), None)
    taken = {name: x for name, x in named.items() if takes_all or name in parameters or name in places or name not in TARGETS}
    return taken, targets, places


def _names(model, parameters):
    """The arguments of forward that (inputs, targets) are: the first, and the one that is called so."""
    first = next(iter(parameters.values()), None)
    if first is None or first.kind is first.VAR_KEYWORD:
        raise TypeError(f"examine: {type(model).__name__}.forward has no first argument, which the inputs of (inputs, targets) would be: "
                        f"give a dict of its arguments as batch")
    return first.name, next((name for name in TARGETS if name in parameters), TARGETS[0])


# --- the report -----------------------------------------------------------------------------------------------------------

@dataclass
class Report:
    """What the checks found: iterable, and printed as a table.

    skipped: {cause: what its check needs, or what it follows from};  failed: {cause: the error of its check};  of_model: whether some
    check looked at the model itself, and not at texts, targets, times or rates alone. What was not looked at is not known to be well.
    """
    findings: list = field(default_factory=list)
    looked_at: list = field(default_factory=list)
    skipped: dict = field(default_factory=dict)
    failed: dict = field(default_factory=dict)
    of_model: bool = False

    @property
    def healthy(self):
        """The model was looked at, nothing was found, and every check that had what it needs came to its end."""
        return self.of_model and not self.findings and not self.failed

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
                lines += ["", f"{title}:", *_lines(rest)]
        return "\n".join(lines)


def _lines(reasons):
    """A line for each cause, with the reason where it is another than that of the line above."""
    for (cause, why), before in zip(reasons.items(), [None, *reasons.values()]):
        yield f"  {cause:32s}{'as above' if why == before else why}"


def examine(model, batch, *, checks=None, **known):
    """The `Report` of all checks that have what they need. checks: causes to look for alone; known: the other fields of `Case`.

    Nothing of the model, the batch, the optimizer or the random streams is changed. TypeError for a model, a batch, or what else is given
    that is none, ValueError for the name of a cause that no check looks for.
    """
    chosen, case, report = _chosen(checks), Case(model, batch, **known), Report()
    with _as_before(), enable_grad(), set_detect_anomaly(False), np.errstate(all="ignore"):     # the doctor asks anomaly mode by itself
        for one in chosen:
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
    if isinstance(causes, str) or causes is not None and not isinstance(causes, Iterable):
        meant = next((name for name in names if str(causes) in name), causes)
        raise TypeError(f"examine: checks must be a list of causes, got {described(causes)}; write checks=[{meant!r}]")
    causes = names if causes is None else list(causes)
    if wrong := [cause for cause in causes if cause not in names]:
        raise ValueError(f"examine: no check looks for {wrong[0]!r}; there are: {', '.join(names)}")
    return [one for one in CHECKS if one.cause in causes]


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
        report.of_model |= one.of_model
    except Exception as error:
        kind = "" if isinstance(error, CannotLook) else f"{type(error).__name__}: "
        report.failed[one.cause] = kind + " ".join(str(error).split())


@contextmanager
def _as_before():
    """Whatever is drawn inside, all random streams then go on as if nothing had been drawn."""
    with random.states_at_first_use() as states:
        try:
            yield
        finally:
            for generator, state in list(states.items()):
                generator.set_state(state)
