"""Evaluation: losses over held-out tokens, choices by likelihood, samples; in eval mode and without gradients (guide 17.1)."""
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..arguments import described
from ..autograd import IGNORED
from ..creation import as_tensor
from ..data import LMBatch, evaluation_batches, make_lm_batch
from ..generation import Sampler, complete, inference
from ..models.common import device_of_model
from ..nn import functional as F


def evaluate(model, ids, context, batch_size=64):
    """Mean cross entropy in nats a token over ids [N]: Σ loss · tokens / Σ tokens.

    Weighted by tokens: a mean of batch means would count a token of a short last batch more than the others. Batches go to
    where the model is.
    """
    total, tokens, device = 0.0, 0, device_of_model(model)
    with inference(model):
        for inputs, targets in evaluation_batches(ids, context, batch_size):
            _, loss = model(as_tensor(inputs, device=device), as_tensor(targets, device=device))
            total, tokens = total + loss.item() * targets.size, tokens + targets.size
    return total / tokens


def perplexity(nats):
    """exp(loss): among how many equally likely tokens the model is, on average, undecided (guide 13.4)."""
    return math.exp(nats) if nats < 700 else math.inf           # exp(710) is beyond a float


# --- sums, which can be added up as means cannot ------------------------------------------------------------------------

def token_losses(model, batch):
    """−ln p of each target, in the graph; 0 where it is −100.    batch: an `LMBatch`, or a dict of the model's arguments → [B, T]"""
    logits, _ = model(**{name: batch[name] for name in batch.keys() if name != "targets"})
    targets = batch["targets"]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="none").reshape(targets.shape)


def summed_loss(model, batch):
    """(Σ −ln p over the targets that count, in the graph; how many count): a batch in parts, of whatever sizes, is Σ sums / Σ counts.

    A part in which nothing counts is (0, 0), where the model's own mean would be 0 / 0.                      (guide 16.2)
    """
    return token_losses(model, batch).sum(), int((batch["targets"] != IGNORED).sum())


# --- a text ---------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Evaluation:
    """What a model loses on a text: Σ −ln p over its tokens, and what is made of it.

    loss             Σ nats / tokens                    of one tokenizer alone, as perplexity, exp(loss), is
    bits_per_byte    Σ nats / (ln 2 · num_bytes)        of all tokenizers; None where the bytes are not known
    standard_error   of loss, over W windows: √(W / (W − 1) · Σ_w (nats_w − loss · tokens_w)²) / tokens; NaN for one
    """
    nats: float
    tokens: int
    windows: int
    standard_error: float
    num_bytes: int | None = None                # of the text that these tokens are

    @classmethod
    def of_windows(cls, nats, tokens, num_bytes=None):
        """nats, tokens: [W], the sum and the count of each window"""
        nats, tokens, W = np.asarray(nats, np.float64), np.asarray(tokens), len(nats)
        beside = nats - nats.sum() / tokens.sum() * tokens
        error = math.sqrt(W / (W - 1) * (beside**2).sum()) / tokens.sum() if W > 1 else math.nan
        return cls(float(nats.sum()), int(tokens.sum()), W, float(error), num_bytes)

    @property
    def loss(self):
        return self.nats / self.tokens

    @property
    def perplexity(self):
        return perplexity(self.loss)

    @property
    def bits_per_byte(self):
        return None if self.num_bytes is None else self.nats / math.log(2) / self.num_bytes

    def __str__(self):
        said = f"{self.loss:.4f} ± {self.standard_error:.4f} nats a token over {self.tokens:,} tokens (perplexity {self.perplexity:.2f})"
        return said if self.num_bytes is None else f"{said}, {self.bits_per_byte:.4f} bits per byte"


def evaluate_ids(model, ids, context, batch_size=64, num_bytes=None):
    """The `Evaluation` of ids [N], or a TokenFile, in windows of `context`: each token but the first is predicted once.

    num_bytes: of the text of ids[1:], for bits per byte.
    """
    nats, tokens, device = [], [], device_of_model(model)
    with inference(model):
        for arrays in evaluation_batches(ids, context, batch_size):
            batch = LMBatch(*(as_tensor(x, device=device) for x in arrays))
            nats += token_losses(model, batch).double().sum(dim=-1).tolist()
            tokens += [arrays[0].shape[1]] * len(arrays[0])
    return Evaluation.of_windows(nats, tokens, num_bytes)


def evaluate_text(model, tokenizer, text, context=None, batch_size=64):
    """The `Evaluation` of a text, with bits per byte: of UTF-8, without the bytes of the first token, which nothing predicts.

    They are None where the tokens do not say all of the text, such as an <unk>, or a tokenizer that lowers letters: they cost too little.
    """
    ids = tokenizer.encode(text)
    return evaluate_ids(model, ids, model.max_seq_len if context is None else context, batch_size, predicted_bytes(tokenizer, ids, text))


def predicted_bytes(tokenizer, ids, text):
    """Of UTF-8, in all of the text but its first token; None where the ids do not say all of it."""
    return len(text.encode()) - _bytes_of(tokenizer, ids[:1]) if tokenizer.decode(ids) == text else None


def _bytes_of(tokenizer, ids):
    if hasattr(tokenizer, "decode_bytes"):      # a token may be a part of a character
        return len(tokenizer.decode_bytes(ids))
    return len(tokenizer.decode(ids).encode())


# --- multiple choice ------------------------------------------------------------------------------------------------------

class Choices(NamedTuple):
    """accuracy, its standard error √(a (1 − a) / n) over n questions, and the number of the choice that was taken, for each."""
    accuracy: float
    standard_error: float
    chosen: list


def log_likelihoods(model, prompt, choices):
    """Σ ln p(token | the prompt and what comes before it) over the tokens of each choice, as floats.

    prompt: ids, at least one;  choices: lists of ids, none empty. They are read together, in one padded batch. ValueError.
    """
    prompt, choices = list(prompt), [list(choice) for choice in choices]
    if not prompt or not choices or not all(choices):
        raise ValueError(f"log_likelihoods: a prompt, which the first token of a choice is predicted from, and choices need a token each; "
                         f"got a prompt of {len(prompt)} and choices of {[len(choice) for choice in choices]}")
    inputs, targets, valid_tokens = make_lm_batch([prompt + choice for choice in choices], 0, device=device_of_model(model))
    targets[:, :len(prompt) - 1] = IGNORED
    with inference(model):
        losses = token_losses(model, LMBatch(inputs, targets, valid_tokens))
    return [-nats for nats in losses.double().sum(dim=-1).tolist()]


def multiple_choice(model, questions, length_of=None):
    """The `Choices` for (prompt ids, [choice ids, …], number of the right one), the likeliest taken; of equals the first.

    length_of: what a log-likelihood is divided by, since each further token makes a choice less likely: a function of the ids
    of a choice, such as len, or lambda ids: len(tokenizer.decode(ids).encode()) for bytes. By default nothing.
    """
    chosen, right = [], []
    for prompt, choices, answer in questions:
        if not 0 <= answer < len(choices):
            raise ValueError(f"multiple_choice: question {len(chosen)} has {len(choices)} choices, and answer {described(answer)} is none "
                             f"of them; they are counted from 0")
        scores = log_likelihoods(model, prompt, choices)
        chosen.append(int(np.argmax(scores if length_of is None else [s / length_of(c) for s, c in zip(scores, choices)])))
        right.append(chosen[-1] == answer)
    if not chosen:
        raise ValueError("multiple_choice: there are no questions")
    accuracy = sum(right) / len(right)
    return Choices(accuracy, math.sqrt(accuracy * (1 - accuracy) / len(right)), chosen)


# --- what it writes -------------------------------------------------------------------------------------------------------

def write_samples(model, tokenizer, prompts, max_new_tokens=100, temperature=0.8, seed=0, **options):
    """What the model writes after each prompt, as texts: for a look at what no loss says. options: of `generation.Sampler`."""
    rows = complete(model, prompts, max_new_tokens, tokenizer=tokenizer, sampler=Sampler(temperature, **options), seed=seed)
    return [row.text for row in rows]
