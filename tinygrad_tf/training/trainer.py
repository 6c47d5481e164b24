"""The training loop of MiniGPT: batch → loss → gradients → clip → AdamW → schedule; evaluate, save, resume (guide 16)."""
import hashlib
import time
from pathlib import Path

import numpy as np

from .. import random
from ..autograd import constant
from ..data import BatchSampler, CharTokenizer, baselines, load_text, require_length, split_train_validation
from ..models import MiniGPT
from ..nn.utils import clip_grad_norm_
from ..optim import AdamW, decay_groups
from ..optim.lr_scheduler import LambdaLR, warmup_cosine
from .checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from .config import TrainConfig
from .evaluation import evaluate
from .metrics import Metrics

CHECKPOINT = "checkpoint.safetensors"
FINAL_LR = 0.1                                  # the cosine ends at this share of the peak


class Trainer:
    """One run: a model, its optimizer, a text, and the folder that everything is written to.

    Two trainers with one configuration, text and seed compute the same numbers, bit for bit on one machine, also when one
    of them is stopped and resumed: the checkpoint holds all that decides the next step.
    """

    def __init__(self, config, sources, folder):
        """sources: names of corpora and paths of UTF-8 files, as `data.load_text` takes them."""
        self.config, self.sources, self.folder = config, sources, Path(folder)
        self.tokenizer, self.train_ids, self.validation_ids = encode_split(load_text(sources))
        require_length(self.train_ids, config.context, "training text")
        random.manual_seed(config.seed)
        self.model = build_model(config, self.tokenizer.vocab_size)
        self.optimizer = AdamW(decay_groups(self.model, config.weight_decay), lr=config.lr, betas=(0.9, 0.99))
        self.scheduler = LambdaLR(self.optimizer, lambda step: warmup_cosine(step + 1, config.warmup, config.steps + 1, FINAL_LR))
        self.sampler = BatchSampler(self.train_ids, config.context, config.batch_size, seed=config.seed)
        self.metrics, self.step = Metrics(self.folder), 0

    def baselines(self):
        """{n: nats per token} of the n-gram models on the same split."""
        return baselines(self.train_ids, self.validation_ids, self.tokenizer.vocab_size)

    def train_step(self):
        """One update. Returns (loss, gradient norm before clipping) as numbers."""
        inputs, targets = self.sampler.next()
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        _, loss = self.model(constant(inputs), constant(targets))
        loss.backward()
        norm = clip_grad_norm_(self.model.parameters(), self.config.clip)
        self._check_finite(loss.item())
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        return loss.item(), norm.item()

    def _check_finite(self, loss):
        """Stops before a NaN reaches the weights."""
        if not np.isfinite(loss):
            raise FloatingPointError(f"the loss became {loss} at step {self.step + 1}; the last checkpoint is intact: "
                                     f"try a smaller --lr, or a longer --warmup")

    def run(self, should_stop=lambda: False, report=lambda **numbers: None):
        """Trains up to config.steps, or until should_stop() after a step. Returns True when the run is complete.

        report(step=…, loss=…, lr=…, tokens_per_second=…, validation_loss=… or None) is called after each step.
        """
        started, first = time.perf_counter(), self.step
        while self.step < self.config.steps:
            lr = self.scheduler.get_last_lr()[0]
            loss, norm = self.train_step()
            validation_loss = self._evaluate_when_due()
            self.metrics.add(step=self.step, learning_rate=lr, train_loss=loss, gradient_norm=norm, validation_loss=validation_loss)
            tokens = (self.step - first) * self.config.batch_size * self.config.context
            report(step=self.step, loss=loss, lr=lr, validation_loss=validation_loss,
                   tokens_per_second=tokens / (time.perf_counter() - started))
            stop = should_stop()
            if validation_loss is not None or stop:
                self.save()
            if stop and self.step < self.config.steps:
                return False
        return True

    def _evaluate_when_due(self):
        if self.step % self.config.eval_every and self.step != self.config.steps:
            return None
        return self.evaluate()

    def evaluate(self):
        """Validation loss in nats per token."""
        return evaluate(self.model, self.validation_ids, self.config.context)

    # --- the checkpoint ---------------------------------------------------------------------------------------------

    def save(self):
        """Metrics first: whatever they hold beyond the checkpoint's step is dropped when the run is resumed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.metrics.write()
        tensors = {f"model.{k}": v.array for k, v in self._weights().items()}
        moments, optimizer = split_tensors(self.optimizer.state_dict())
        tensors.update({f"optimizer.{k}": v for k, v in moments.items()}, rng=random.get_rng_state())
        save_checkpoint(self.folder / CHECKPOINT, tensors, {
            "step": self.step, "config": self.config.to_dict(), "tokenizer": self.tokenizer.to_dict(), "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(), "sampler": self.sampler.state_dict(),
            "sources": self.sources, "text": fingerprint(self.train_ids, self.validation_ids)})

    def _weights(self):
        return dict(self.model.named_parameters())              # a tied weight once

    @classmethod
    def resume(cls, folder, sources=None):
        """The run in a folder, as it was when its checkpoint was written; the text is read again. Raises CheckpointError."""
        tensors, state = load_checkpoint(Path(folder) / CHECKPOINT)
        try:
            self = cls(TrainConfig.from_dict(state["config"]), sources or state["sources"], folder)
            if self.tokenizer.to_dict() != state["tokenizer"] or fingerprint(self.train_ids, self.validation_ids) != state["text"]:
                raise CheckpointError(f"the run in {folder} was trained on another text than {self.sources} now is; "
                                      f"resume it with the same text")
            load_weights(self.model, tensors)
            self.optimizer.load_state_dict(join_tensors(state["optimizer"], tensors, "optimizer."))
            self.scheduler.load_state_dict(state["scheduler"])
            self.sampler.load_state_dict(state["sampler"])
            random.set_rng_state(tensors["rng"])
            self.step = state["step"]
        except (KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"the checkpoint in {folder} lacks something that a resumed run needs ({error})") from None
        self.metrics = Metrics.resume(folder, self.step)
        return self


def encode_split(text, tokenizer=None):
    """(tokenizer, training ids, held-out ids: the last 10 % of the text); by default the tokenizer of all its characters."""
    tokenizer = tokenizer or CharTokenizer.from_text(text)
    train, validation = split_train_validation(text)
    return tokenizer, tokenizer.encode(train), tokenizer.encode(validation)


def build_model(config, vocab_size):
    return MiniGPT(vocab_size, config.context, config.dim, config.heads, 4 * config.dim, config.layers, config.dropout,
                   norm_first=config.norm == "pre")


def load_weights(model, tensors):
    """Copies the arrays "model.…" of a checkpoint into a model; the tied head is stored once, under the embedding's name."""
    weights = {k.removeprefix("model."): constant(a) for k, a in tensors.items() if k.startswith("model.")}
    weights["lm_head.weight"] = weights["embedding.token.weight"]
    model.load_state_dict(weights)


def load_model(folder):
    """(model in eval mode, tokenizer, config) of a run's checkpoint. Raises CheckpointError."""
    tensors, state = load_checkpoint(Path(folder) / CHECKPOINT)
    try:
        config, tokenizer = TrainConfig.from_dict(state["config"]), CharTokenizer.from_dict(state["tokenizer"])
        model = build_model(config, tokenizer.vocab_size)
        load_weights(model, tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint in {folder} does not fit this version ({error})") from None
    return model.eval(), tokenizer, config


def split_tensors(state):
    """An optimizer's state dict as ({"0.exp_avg": array, …}, the rest with plain numbers), so that JSON can hold the rest."""
    arrays, rest = {}, {"param_groups": state["param_groups"], "state": {}}
    for index, entries in state["state"].items():
        arrays.update({f"{index}.{k}": v.array for k, v in entries.items() if hasattr(v, "array")})
        rest["state"][str(index)] = {k: v for k, v in entries.items() if not hasattr(v, "array")}
    return arrays, rest


def join_tensors(rest, tensors, prefix):
    """The reverse of `split_tensors`."""
    state = {int(i): dict(entries) for i, entries in rest["state"].items()}
    for name, array in tensors.items():
        if name.startswith(prefix):
            index, key = name.removeprefix(prefix).split(".", 1)
            state[int(index)][key] = constant(array)
    return {"param_groups": rest["param_groups"], "state": state}


def fingerprint(*ids):
    """SHA-256 of token ids: resuming on another text would be another run."""
    digest = hashlib.sha256()
    for part in ids:
        digest.update(np.ascontiguousarray(part, dtype=np.int64))
    return digest.hexdigest()
