"""Evaluation: the mean loss over held-out tokens, in eval mode and without gradients (guide 17.1)."""
import math

import numpy as np

from ..creation import as_tensor
from ..data import evaluation_batches
from ..generation import inference
from ..models.common import device_of_model


def evaluate(model, ids, context, batch_size=64):
    """Mean cross entropy in nats a token over ids [N]: Σ loss · tokens / Σ tokens.

    Weighted by tokens: a mean of batch means would count a token of a short last batch more than the others. Batches go to
    where the model is.
    """
    total, tokens, device = 0.0, 0, device_of_model(model)
    with inference(model):
        for inputs, targets in evaluation_batches(np.asarray(ids), context, batch_size):
            _, loss = model(as_tensor(inputs, device=device), as_tensor(targets, device=device))
            total, tokens = total + loss.item() * targets.size, tokens + targets.size
    return total / tokens


def perplexity(nats):
    """exp(loss): among how many equally likely tokens the model is, on average, undecided (guide 13.4)."""
    return math.exp(nats) if nats < 700 else math.inf           # exp(710) is beyond a float
