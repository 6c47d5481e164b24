"""A model as a tool: no dropout, no graph."""
from contextlib import contextmanager

from ..autograd import no_grad


@contextmanager
def inference(model):
    """Within it the model is in eval mode and no graph is recorded; then each module gets back the mode that it had."""
    training = [module for module in all_modules(model) if module.training]
    if training:
        model.eval()
    try:
        with no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def all_modules(model):
    """What model.modules() yields, as a list, a shared one as often as it is there: a third of its time, and this is done every token."""
    found = [model]
    for module in found:
        found += [child for child in module.__dict__["_modules"].values() if child is not None]
    return found
