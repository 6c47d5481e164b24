"""The training loop of MiniGPT: batch → loss → gradients → clip → AdamW → schedule; evaluate, save, resume (guide 16)."""
import hashlib
import os
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from .. import dtypes, random
from ..amp import GradScaler, autocast
from ..autograd import constant
from ..backend import CPU, get_default_device, module_of, to_device
from ..backend import device as make_device
from ..creation import as_tensor
from ..data import CORPORA, BatchSampler, CharTokenizer, CorpusError, baselines, load_text, require_length, split_train_validation
from ..models import MiniGPT
from ..nn.moe import MoE, routings, update_biases
from ..nn.utils import clip_grad_norm_
from ..optim import AdamW, decay_groups
from ..optim.lr_scheduler import LambdaLR, warmup_cosine
from ..serialization import one_line
from .checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from .config import TrainConfig
from .evaluation import evaluate
from .folder import CHECKPOINT, locked, remove_leftovers
from .metrics import FIELDS, WITH_EXPERTS, Metrics
from .validation import as_json, check_equal, check_metrics, check_moments, check_scaler, check_sizes, check_state, check_weights

TIED = "lm_head.weight"         # the embedding's, under whose name it is stored
FINAL_LR = 0.1                  # the cosine ends at this share of the peak
BALANCE_WEIGHT = 0.01           # of the balance loss of each mixture of experts, beside the loss of the text
MOST_SKIPPED = 32               # batches in a row: from 2¹⁶ the scale has then gone down to 2⁻¹⁶
BIAS_RATE = 0.001               # step of the bias of a router, where that keeps the balance


class Trainer:
    """One run: a model, its optimizer, a text, and the folder that everything is written to.

    Two trainers with one configuration, text and seed compute the same numbers, bit for bit on one machine, also when one
    of them is stopped and resumed: the checkpoint holds all that decides the next step. It does not hold the device: a run
    may go on on another one, with numbers that differ in their last bits.
    """

    def __init__(self, config, sources, folder, device=None):
        """sources: names of corpora and paths of UTF-8 files, as `data.load_text` takes them. device: by default the default one."""
        self.device = make_device(get_default_device() if device is None else device)
        module_of(self.device)                          # a GPU that is not there is told before the work
        self.config, self.sources, self.folder = config, absolute(sources), Path(folder)
        text = load_text(sources)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        self.tokenizer, self.train_ids, self.validation_ids = encode_split(text)
        require_length(self.train_ids, config.context, "training text")
        require_length(self.validation_ids, 1, "held-out text")
        random.manual_seed(config.seed)
        self.model = build_model(config, self.tokenizer.vocab_size).to(self.device)
        self.optimizer = AdamW(decay_groups(self.model, config.weight_decay), lr=config.lr, betas=(0.9, 0.99))
        self.autocast = autocast(self.device.type, dtypes.as_dtype(config.precision), enabled=config.precision != "float32")
        self.scaler = GradScaler(self.device.type, enabled=config.precision == "float16")
        self.scheduler = LambdaLR(self.optimizer, lambda step: warmup_cosine(step + 1, config.warmup, config.steps + 1, FINAL_LR))
        self.sampler = BatchSampler(self.train_ids, config.context, config.batch_size, seed=config.seed)
        self.fields = WITH_EXPERTS if config.experts else FIELDS
        self.metrics, self.step, self.random_state = Metrics(self.folder, fields=self.fields), 0, random.get_rng_state()
        self.expert_load = None                         # of the last step: that of the fullest expert, in units of its fair share

    def baselines(self):
        """{n: nats per token} of the n-gram models on the same split."""
        return baselines(self.train_ids, self.validation_ids, self.tokenizer.vocab_size)

    def train_step(self):
        """One update. Returns (loss, gradient norm before clipping) as numbers.

        With float16 a batch whose gradients overflow is left out, and the scale of the loss halved. It counts nowhere: the schedule,
        like `step`, counts updates. FloatingPointError where that does not end.
        """
        for _ in range(MOST_SKIPPED):
            loss, norm = self._backward()
            if self._update(loss, norm):
                return loss, norm
        raise FloatingPointError(f"the gradients of {MOST_SKIPPED} batches in a row left the range of float16 after {self.step} steps, the "
                                 f"last of them with the loss times {self.scaler.get_scale() * 2:g}; the last checkpoint is intact: try a "
                                 f"smaller --lr, a longer --warmup, or --precision bfloat16")

    def _backward(self):
        """The gradients of the next batch, clipped. Returns (loss, gradient norm before clipping)."""
        random.set_rng_state(self.random_state)         # whoever drew random numbers since the last step changes nothing here
        inputs, targets = (as_tensor(ids, device=self.device) for ids in self.sampler.next())
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast, routings() as routed:
            _, loss = self.model(inputs, targets)
            minimised = self._with_balance(loss, routed)
        self.scaler.scale(minimised).backward()
        self.scaler.unscale_(self.optimizer)
        return loss.item(), clip_grad_norm_(self.model.parameters(), self.config.clip).item()

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
        self.expert_load = max((routing.max_load for routing in routed), default=None)
        if not routed or self.config.balance != "loss":
            return loss
        return loss + BALANCE_WEIGHT * sum(routing.balance_loss() for routing in routed)

    def _check_finite(self, name, value):
        """Stops before a NaN reaches the weights, or a checkpoint."""
        if not np.isfinite(value):
            raise FloatingPointError(f"the {name} became {value} after {self.step} steps; the last checkpoint is intact: try a smaller "
                                     f"--lr, or a longer --warmup")

    def run(self, should_stop=lambda: False, report=lambda **numbers: None):
        """Trains up to config.steps, or until should_stop() after a step. Returns True when the run is complete.

        Saves at the start, at each evaluation and when it stops. report(step=…, loss=…, lr=…, tokens_per_second=…,
        validation_loss=… or None) is called after each step; the rate does not count evaluations. BlockingIOError where another
        process trains in the folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder), np.errstate(over="ignore", invalid="ignore"):         # what overflows is found by _check_finite
            remove_leftovers(self.folder)
            self.save()                                 # a folder that cannot be written to shows before the work is done
            return self._loop(should_stop, report)

    def _loop(self, should_stop, report):
        seconds, first = 0.0, self.step
        while self.step < self.config.steps:
            lr, started = self.scheduler.get_last_lr()[0], time.perf_counter()
            loss, norm = self.train_step()
            seconds += time.perf_counter() - started
            validation_loss = self.evaluate() if self._evaluation_is_due() else None
            self.metrics.add(step=self.step, learning_rate=lr, train_loss=loss, gradient_norm=norm, validation_loss=validation_loss,
                             expert_load=self.expert_load)
            stop = should_stop()
            if stop or validation_loss is not None:
                self.save()
            report(step=self.step, loss=loss, lr=lr, validation_loss=validation_loss,
                   tokens_per_second=(self.step - first) * self.config.batch_size * self.config.context / seconds)
            if stop and self.step < self.config.steps:
                return False
        return True

    def _evaluation_is_due(self):
        return self.step % self.config.eval_every == 0 or self.step == self.config.steps

    def evaluate(self):
        """Validation loss in nats per token, in float32: what `tinygrad-tf evaluate` says of the weights, however they were trained."""
        loss = evaluate(self.model, self.validation_ids, self.config.context)
        self._check_finite("validation loss", loss)
        return loss

    # --- the checkpoint ---------------------------------------------------------------------------------------------

    def save(self):
        """The checkpoint, and metrics.csv from the numbers that are also in it."""
        tensors = stored_weights(self.model)
        self._check_finite("weights", sum(float(abs(a).max()) for a in tensors.values()))
        moments, optimizer = split_tensors(self.optimizer.state_dict())
        tensors.update({f"optimizer.{k}": v for k, v in moments.items()}, rng=self.random_state, metrics=self.metrics.table())
        save_checkpoint(self.folder / CHECKPOINT, tensors, {
            "step": self.step, "config": self.config.to_dict(), "tokenizer": self.tokenizer.to_dict(), "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(), "scaler": self.scaler.state_dict(), "sampler": self.sampler.state_dict(),
            "sources": self.sources, "text": self.fingerprint})
        self.metrics.write()

    @classmethod
    def resume(cls, folder, sources=None, device=None):
        """The run in a folder, as it was when its checkpoint was written; the text is read again. Raises CheckpointError."""
        with locked(folder):                            # whoever trains there now will write a newer one
            tensors, state = load_checkpoint(Path(folder) / CHECKPOINT)
        with fitting(folder):
            config, tokenizer = check_record(tensors, state)
            self = cls(config, sources or state["sources"], folder, device)
            if self.fingerprint != state["text"]:
                raise CheckpointError(f"the run in {folder} was trained on another text than {', '.join(self.sources)} holds now; "
                                      f"resume it with the same text")
            self._load(tensors, state)
        return self

    def _load(self, tensors, state):
        """Puts a new trainer where the checkpoint's was."""
        check_equal(state["tokenizer"], self.tokenizer.to_dict(), "tokenizer")
        self.step, self.random_state = state["step"], tensors["rng"]
        check_metrics(tensors["metrics"], self.step, self.fields)
        self.metrics = Metrics(self.folder, tensors["metrics"], self.fields)
        load_weights(self.model, tensors)
        self._load_optimizer(tensors, state)
        check_scaler(state.get("scaler", {}), self.scaler.state_dict())
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        self.sampler.load_state_dict(state["sampler"])
        random.set_rng_state(self.random_state)

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


@contextmanager
def fitting(folder):
    """Turns whatever a checkpoint lacks, or has too much of, into one CheckpointError."""
    try:
        yield
    except (CheckpointError, CorpusError):
        raise
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"the checkpoint in {folder} does not fit this version of tinygrad_tf "
                              f"({type(error).__name__}: {one_line(error)})") from None


def absolute(sources):
    """A list of sources that means the same from any folder: paths become absolute, names of corpora stay."""
    sources = [sources] if isinstance(sources, (str, os.PathLike)) else sources
    return [source if source in CORPORA else os.path.abspath(source) for source in sources]


def encode_split(text, tokenizer=None):
    """(tokenizer, training ids, held-out ids: the last 10 % of the text); by default the tokenizer of all its characters."""
    tokenizer = tokenizer or CharTokenizer.from_text(text)
    train, validation = split_train_validation(text)
    return tokenizer, tokenizer.encode(train), tokenizer.encode(validation)


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


def check_record(tensors, state):
    """(configuration, tokenizer) of a checkpoint, when it holds what it must and its sizes are those of its weights."""
    check_state(state)
    config, tokenizer = TrainConfig.from_dict(state["config"]), CharTokenizer.from_dict(state["tokenizer"])
    check_sizes(config, tokenizer.vocab_size, tensors)
    return config, tokenizer


def stored_weights(model):
    """{"model.…": NumPy array} of all parameters and buffers; the tied head is left out."""
    return {f"model.{k}": to_device(v.array, CPU) for k, v in model.state_dict().items() if k != TIED}


def load_weights(model, tensors):
    """Copies the arrays "model.…" of a checkpoint into a model; the tied head is stored once, under the embedding's name."""
    check_weights(tensors)
    weights = {k.removeprefix("model."): constant(a) for k, a in tensors.items() if k.startswith("model.")}
    weights[TIED] = weights["embedding.token.weight"]
    model.load_state_dict(weights)


def load_model(folder, device=None):
    """(model in eval mode, tokenizer, state) of a run's checkpoint; state holds "config", "sources", "step". CheckpointError.

    The checkpoint may have been written on any device; the model comes to `device`, by default the default one.
    """
    device = make_device(get_default_device() if device is None else device)
    module_of(device)
    tensors, state = load_checkpoint(Path(folder) / CHECKPOINT)
    with fitting(folder):
        config, tokenizer = check_record(tensors, state)
        model = build_model(config, tokenizer.vocab_size)
        load_weights(model, tensors)
    return model.to(device).eval(), tokenizer, state


def split_tensors(state):
    """An optimizer's state dict as ({"0.exp_avg": NumPy array, …}, the rest with plain numbers), so that JSON can hold the rest."""
    arrays, rest = {}, {"param_groups": state["param_groups"], "state": {}}
    for index, entries in state["state"].items():
        arrays.update({f"{index}.{k}": to_device(v.array, CPU) for k, v in entries.items() if hasattr(v, "array")})
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
