"""The training loop of MiniGPT: batch → loss → gradients → clip → AdamW → schedule; evaluate, save, resume (guide 16)."""
import dataclasses
import hashlib
import time
import warnings
from pathlib import Path

import numpy as np

from .. import dtypes, random
from ..amp import GradScaler, autocast
from ..arguments import described
from ..backend import flushing_denormal
from ..creation import as_tensor
from ..data import LMBatch, baselines, load_text, require_length, split_train_validation
from ..nn.moe import routings, update_biases
from ..nn.utils import clip_grad_norm_
from ..optim.lr_scheduler import SCHEDULES, LambdaLR
from .callbacks import Callback
from .checkpoint import (
    CHECKPOINT,
    CheckpointError,
    CheckpointWarning,
    checkpoints_in,
    keep_as_before,
    keep_as_best,
    load_newest,
    remove_old,
    save_checkpoint,
)
from .config_file import write_config
from .evaluation import evaluate, predicted_bytes
from .folder import locked, remove_leftovers
from .metrics import Metrics, fields_of, norms_by_module
from .parts import absolute, build_model, encode_split, make_optimizer, make_sampler, make_tokenizer, with_absolute_paths
from .shards import Shards
from .state import check_record, checked_device, fitting, join_tensors, load_weights, split_tensors, stored_weights, upgraded, versions
from .validation import as_json, check_equal, check_metrics, check_moments, check_scaler

FINAL_LR = 0.1                  # the schedule ends at this share of the peak
BALANCE_WEIGHT = 0.01           # of the balance loss of each mixture of experts, beside the loss of the text
MOST_SKIPPED = 32               # batches in a row: from 2¹⁶ the scale has then gone down to 2⁻¹⁶


class Trainer:
    """One run: a model, its optimizer, a text, and the folder that everything is written to.

    Two trainers with one configuration, text and seed compute the same numbers, bit for bit on one machine, also when one
    of them is stopped and resumed: the checkpoint holds all that decides the next step. It does not hold the device: a run
    may go on on another one, with numbers that differ in their last bits.
    """

    def __init__(self, config, sources, folder, device=None, callbacks=()):
        """sources: names of corpora and paths of UTF-8 files, as `data.load_text` takes them. device: by default the default one.

        callbacks: of `training.Callback`, what looks on.
        """
        self.device = checked_device(device)            # a GPU that is not there is told before the work
        check_threads(config, self.device)
        self.config, self.sources, self.folder = with_absolute_paths(config), absolute(sources), Path(folder)
        self.shards = Shards(config.threads)
        text = load_text(sources)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        tokenizer = make_tokenizer(config.tokenizer, text, config.vocab_size)
        self.tokenizer, self.train_ids, self.validation_ids = encode_split(text, tokenizer)
        require_length(self.train_ids, config.context, "training text")
        require_length(self.validation_ids, 1, "held-out text")
        self.validation_bytes = predicted_bytes(tokenizer, self.validation_ids, split_train_validation(text)[1])
        random.manual_seed(config.seed)
        self.model = build_model(config, self.tokenizer.vocab_size).to(self.device)
        self.optimizer = make_optimizer(config, self.model)
        self.autocast = autocast(self.device.type, dtypes.as_dtype(config.precision), enabled=config.precision != "float32")
        self.scaler = GradScaler(self.device.type, enabled=config.precision == "float16")
        self.scheduler = LambdaLR(self.optimizer, rate_of(config))
        self.sampler = make_sampler(config, self.train_ids)
        self.fields = fields_of(self.model, config.experts)
        self.metrics, self.step, self.random_state = Metrics(self.folder, fields=self.fields), 0, random.get_rng_state()
        self.observed = {}                              # in the last step, beside its loss: load of the experts, norms by module
        self.callbacks, self.stopping = checked_callbacks(callbacks), False
        self.saved_step = None                          # of the newest checkpoint in the folder, as far as it is known to be whole
        self.known_file = None                          # which file that is: what somebody else has put there is not written over

    def baselines(self):
        """{n: nats per token} of the n-gram models on the same split."""
        return baselines(self.train_ids, self.validation_ids, self.tokenizer.vocab_size)

    def train_step(self):
        """One update. Returns (loss, gradient norm before clipping) as numbers.

        With float16 a batch whose gradients overflow is left out, and the scale of the loss halved. It counts nowhere: the schedule,
        like `step`, counts updates. FloatingPointError where that does not end.
        """
        before = self.sampler.state_dict()
        try:
            for _ in range(MOST_SKIPPED):
                loss, norm = self._backward()
                if self._update(loss, norm):
                    return loss, norm
        except BaseException:
            self.sampler.load_state_dict(before)        # a step that was interrupted is made again with the same batch
            raise
        raise FloatingPointError(f"the gradients of {MOST_SKIPPED} batches in a row left the range of float16 after {self.step} steps, the "
                                 f"last of them with the loss times {self.scaler.get_scale() * 2:g}; the last checkpoint is intact: try a "
                                 f"smaller --lr, a longer --warmup, or --precision bfloat16")

    def _backward(self):
        """The gradients of the next batch, clipped. Returns (loss, gradient norm before clipping).

        In parts, one after another, they add up to the same: each counts by its share of the targets.
        """
        random.set_rng_state(self.random_state)         # whoever drew random numbers since the last step changes nothing here
        batch, loss, self.observed = LMBatch(*map(as_tensor, self.sampler.next())), 0.0, {}
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        for part, share in batch.parts(self.config.accumulation):
            shards = [(shard.to(self.device), share * of_part) for shard, of_part in part.parts(self.config.threads)]
            losses, loads = zip(*self.shards.map(self._backward_of, shards))
            loss += sum(losses)
            self._note_load(loads)
        self.scaler.unscale_(self.optimizer)
        self.observed.update(norms_by_module(self.model))
        return loss, clip_grad_norm_(self.model.parameters(), self.config.clip).item()

    def _backward_of(self, part, share):
        """Adds the gradients of share · loss. Returns share · loss, and the load of the fullest expert."""
        with self.autocast, routings() as routed:
            _, loss = self.model(**part)
            minimised = self._with_balance(loss, routed)
        self.scaler.scale(minimised * share).backward()
        return share * loss.item(), max((routing.max_load for routing in routed), default=None)

    def _update(self, loss, norm):
        """Moves the weights and the schedule by one step. False, and all stays, where the scaler leaves the step out."""
        scale = self.scaler.get_scale()
        if not self.scaler.is_enabled():                # else the scaler looks at the gradients
            self._check_finite("loss", loss)
            self._check_finite("gradient norm", norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.random_state = random.get_rng_state()
        if self.scaler.get_scale() < scale:
            return False
        update_biases(self.model)
        self.scheduler.step()
        self.step += 1
        return True

    def _with_balance(self, loss, routed):
        """What is minimised: the loss of the text and, where the configuration says so, the balance loss of each mixture of experts."""
        if not routed or self.config.balance != "loss":
            return loss
        return loss + BALANCE_WEIGHT * sum(routing.balance_loss() for routing in routed)

    def _note_load(self, loads):
        """Of the fullest expert in any part, in units of its fair share; None where there are no experts."""
        if None not in loads:
            self.observed["expert_load"] = max(self.observed.get("expert_load", 0), *loads)

    def _check_finite(self, name, value):
        """Stops before a NaN reaches the weights, or a checkpoint."""
        if not np.isfinite(value):
            raise FloatingPointError(f"the {name} became {value} after {self.step} steps; the last checkpoint is intact: try a smaller "
                                     f"--lr, or a longer --warmup")

    def run(self, should_stop=lambda: False, report=lambda **numbers: None):
        """Trains to the end (`is_complete`), or until should_stop() after a step. Returns True when the run is complete.

        Saves at the start, at each evaluation and when it stops. report(step=…, loss=…, lr=…, tokens_per_second=…,
        validation_loss=… or None) is called after each step; the rate does not count evaluations. BlockingIOError where another
        process trains in the folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder), flushing_denormal(), self.shards, np.errstate(over="ignore", invalid="ignore"):   # _check_finite finds it
            remove_leftovers(self.folder)
            self.stopping = False
            self.save()                                 # a folder that cannot be written to shows before the work is done
            write_config(self.folder / "config.toml", {"text": self.sources, **self.config.to_dict()})
            self._tell("on_start")
            complete = self._loop(should_stop, report)
            self._tell("on_end", complete)
            return complete

    def stop(self):
        """For callbacks: the run ends after this step, saved."""
        self.stopping = True

    def _tell(self, event, *args):
        for callback in self.callbacks:
            getattr(callback, event)(self, *(dict(arg) if isinstance(arg, dict) else arg for arg in args))

    def _loop(self, should_stop, report):
        seconds, first = 0.0, self.step
        while not self.is_complete():
            if self.stopping:                           # since it began, or was saved
                return False
            numbers = self._measured_step()
            seconds += numbers["seconds"]
            stop = should_stop() or self.stopping
            if stop or numbers["validation_loss"] is not None:
                self.save()
            report(step=self.step, loss=numbers["train_loss"], lr=numbers["learning_rate"], validation_loss=numbers["validation_loss"],
                   tokens_per_second=(self.step - first) * numbers["tokens"] / seconds)
            if stop and not self.is_complete():
                return False
        return True

    def _measured_step(self):
        """One step, its evaluation if one is due, and its row; returns what callbacks get."""
        lr, started = self.scheduler.get_last_lr()[0], time.perf_counter()
        loss, norm = self.train_step()
        seconds = time.perf_counter() - started
        row = {"step": self.step, "learning_rate": lr, "train_loss": loss, "gradient_norm": norm, "validation_loss": None,
               "expert_load": None, **self.observed}
        self.metrics.add(**row)
        if self._evaluation_is_due():
            row["validation_loss"] = self.evaluate()
            self.metrics.complete(validation_loss=row["validation_loss"])
            self._tell("on_evaluation", row["validation_loss"])
        numbers = {**row, "tokens": self.config.batch_size * self.config.context, "seconds": seconds}
        self._tell("on_step", numbers)
        return numbers

    def is_complete(self):
        """All steps are made, or the validation loss has not become better for config.patience evaluations."""
        return self.step >= self.config.steps or 0 < self.config.patience <= self.evaluations_since_best()

    def evaluations_since_best(self):
        losses = self.metrics.column("validation_loss")[1]
        return len(losses) - 1 - int(np.argmin(losses)) if len(losses) else 0

    def _evaluation_is_due(self):
        return self.step % self.config.eval_every == 0 or self.step == self.config.steps

    def evaluate(self):
        """Validation loss in nats per token, in float32: what `tinygrad-tf evaluate` says of the weights, however they were trained."""
        loss = evaluate(self.model, self.validation_ids, self.config.context)
        self._check_finite("validation loss", loss)
        return loss

    # --- the checkpoint ---------------------------------------------------------------------------------------------

    def save(self):
        """The checkpoint, and metrics.csv from the numbers that are also in it. The one before it stays, as many as config.keep says.

        CheckpointError where the folder holds a run already, or this one has gone on elsewhere since it was resumed.
        """
        self._check_owner()
        tensors = stored_weights(self.model)
        self._check_finite("weights", sum(float(abs(a).max()) for a in tensors.values()))
        moments, optimizer = split_tensors(self.optimizer.state_dict())
        tensors.update({f"optimizer.{k}": v for k, v in moments.items()}, rng=self.random_state, metrics=self.metrics.table())
        if self.config.keep > 1 and self.saved_step not in (None, self.step):
            keep_as_before(self.folder, self.saved_step)
        save_checkpoint(self.folder / CHECKPOINT, tensors, {
            "step": self.step, "config": self.config.to_dict(), "tokenizer": self.tokenizer.to_dict(),
            "tokenizer_sha256": self.tokenizer.fingerprint, "optimizer": optimizer, "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(), "sampler": self.sampler.state_dict(), "fields": list(self.fields), "sources": self.sources,
            "text": self.fingerprint, "versions": versions()})
        self.saved_step, self.known_file = self.step, identity(self.folder / CHECKPOINT)
        remove_old(self.folder, self.step, self.config.keep)
        if self._is_best():
            keep_as_best(self.folder)
        self.metrics.write()
        self._tell("on_save", self.folder / CHECKPOINT)

    def _check_owner(self):
        found = identity(self.folder / CHECKPOINT)
        if self.known_file is None and checkpoints_in(self.folder):
            raise CheckpointError(f"{self.folder} already holds a run: continue it with Trainer.resume, or name another folder")
        if found is not None and found != self.known_file:
            raise CheckpointError(f"the run in {self.folder} has gone on since it was resumed here: resume it again")

    def _is_best(self):
        """Whether the weights of now were just evaluated, and lost less than all before them."""
        steps = self.metrics.column("validation_loss")[0]
        return len(steps) > 0 and steps[-1] == self.step and self.evaluations_since_best() == 0

    @classmethod
    def resume(cls, folder, sources=None, device=None, callbacks=(), steps=None, threads=None):
        """The run in a folder, as it was when its newest checkpoint was written; the text is read again. Raises CheckpointError.

        steps: how many it is to have in all, where that is to change: its schedule is then the one of that length. threads: of a batch,
        where they are to be others from here on.
        A CheckpointWarning says where that checkpoint is damaged, and the one before it is used, or where versions differ.
        """
        with locked(folder):                            # whoever trains there now will write a newer one
            tensors, state, path = load_newest(folder)
            known = identity(Path(folder) / CHECKPOINT)
        with fitting(folder):
            state = upgraded(state)
            config, _ = check_record(tensors, state)
            config = config if threads is None else dataclasses.replace(config, threads=threads)
            self = cls(config, sources or state["sources"], folder, device, callbacks)
            if self.fingerprint != state["text"]:
                raise CheckpointError(f"the run in {folder} was trained on another text than {', '.join(self.sources)} holds now; "
                                      f"resume it with the same text")
            self._load(tensors, state)
        if path.name == CHECKPOINT:
            self.saved_step = self.step
        self.known_file = known or path                 # a path where the newest one is gone: nobody's file is written over
        if steps is not None:
            self.change_length(steps)
        warn_of_versions(state["versions"])
        return self

    def _load(self, tensors, state):
        """Puts a new trainer where the checkpoint's was."""
        check_equal(state["tokenizer"], self.tokenizer.to_dict(), "tokenizer")
        self.step, self.random_state = state["step"], tensors["rng"]
        check_metrics(tensors["metrics"], self.step, state["fields"], list(self.fields))
        self.metrics = Metrics(self.folder, with_columns(tensors["metrics"], state["fields"], self.fields), self.fields)
        load_weights(self.model, tensors)
        self._load_optimizer(tensors, state)
        check_scaler(state.get("scaler", {}), self.scaler.state_dict())
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        self.sampler.load_state_dict(state["sampler"])
        random.set_rng_state(self.random_state)

    def change_length(self, steps):
        """From here on the run has so many steps in all. ValueError where more were made."""
        if steps < self.step:
            raise ValueError(f"the run has made {self.step} steps already: it cannot end after {steps}")
        self.config = dataclasses.replace(self.config, steps=steps)
        self.scheduler.lr_lambdas = [rate_of(self.config)] * len(self.scheduler.lr_lambdas)
        self.scheduler.last_epoch = self.step - 1
        self.scheduler.step()

    def _load_optimizer(self, tensors, state):
        """The schedule, and with it the optimizer's options, follow from the step; the moments are taken over."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        check_moments(tensors, self.step, params)
        self.scheduler.last_epoch = self.step - 1
        self.scheduler.step()
        check_equal(state["scheduler"], as_json(self.scheduler.state_dict()), "scheduler")
        options = {**self.optimizer.state_dict(), "state": {str(i): {} for i in range(len(params)) if self.step}}
        check_equal(state["optimizer"], as_json(options), "optimizer")
        self.optimizer.load_state_dict(join_tensors(state["optimizer"], tensors, "optimizer."))


def check_threads(config, device):
    if config.threads > 1 and device.type != "cpu":
        raise ValueError(f"threads must be 1 on {device}, got {config.threads}: they share the cores of a CPU, and a GPU computes many "
                         f"rows at once by itself")


def rate_of(config):
    """step → the learning rate after that many updates, as a share of its peak."""
    schedule = SCHEDULES[config.schedule]
    return lambda step: schedule(step + 1, config.warmup, config.steps + 1, FINAL_LR)


def identity(path):
    """What tells a file from another one of its name; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def checked_callbacks(callbacks):
    callbacks = list(callbacks or ())
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise TypeError(f"Trainer: callbacks must be a list of training.Callback, got {described(callback)}")
    return callbacks


def with_columns(table, names, wanted):
    """The columns of a table in the order that is wanted, NaN where there is none.    table: [N, len(names)] → [N, len(wanted)]"""
    columns = dict(zip(names, table.T))
    return np.stack([columns.get(name, np.full(len(table), np.nan)) for name in wanted], axis=1)


def warn_of_versions(saved):
    """A run goes on with other versions than it was saved with: that is no mistake, and its numbers may be others."""
    now = versions()
    if differing := [f"{name} {version}, now {now[name]}" for name, version in saved.items() if now.get(name, version) != version]:
        warnings.warn(f"the run was saved with {'; '.join(differing)}: its numbers may differ in their last digits from those of a run "
                      f"without a stop", CheckpointWarning, stacklevel=3)
