"""Evaluation: the mean loss over held-out tokens, in eval mode and without gradients (guide 17.1)."""
import numpy as np

from ..autograd import constant, no_grad
from ..data import evaluation_batches


@no_grad()
def evaluate(model, ids, context, batch_size=64):
    """Mean cross entropy in nats a token over ids [N]: Σ loss · tokens / Σ tokens.

    Weighted by tokens: a mean of batch means would count a token of a short last batch more than the others.
    """
    was_training, total, tokens = model.training, 0.0, 0
    model.eval()
    try:
        for inputs, targets in evaluation_batches(np.asarray(ids), context, batch_size):
            _, loss = model(constant(inputs), constant(targets))
            total, tokens = total + loss.item() * targets.size, tokens + targets.size
    finally:
        model.train(was_training)
    return total / tokens
