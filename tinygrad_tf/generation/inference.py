"""A model as a tool: no dropout, no graph; and moments in which Ctrl-C waits."""
import signal
from contextlib import contextmanager

from ..autograd import no_grad


@contextmanager
def inference(model):
    """Within it the model is in eval mode and no graph is recorded; then each module gets back the mode that it had.

    The modes are the model's: threads that share one should put it into eval mode before they begin.
    """
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


@contextmanager
def uninterrupted():
    """Within it Ctrl-C waits, for what it would leave half done; for microseconds. Where threads hold no signals (Windows) it does not."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
