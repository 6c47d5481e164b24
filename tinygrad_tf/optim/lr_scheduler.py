"""Learning-rate schedules. `scheduler.step()` follows `optimizer.step()`, once an update (or once an epoch)."""
import math

from ..tensor import Tensor
from .optimizer import Optimizer


def _groups_of(optimizer):
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"lr_scheduler: {type(optimizer).__name__} is not an Optimizer")
    return optimizer.param_groups


class LRScheduler:
    """Subclasses define `get_lr()`: the learning rate of each group at step `self.last_epoch`, from `self.base_lrs`.

    Construction takes step 0, so that the first update already has its scheduled rate.
    """

    def __init__(self, optimizer, last_epoch=-1):
        self.optimizer, self.last_epoch, self._last_lr = optimizer, last_epoch, None
        for i, group in enumerate(_groups_of(optimizer)):
            if last_epoch == -1:
                group.setdefault("initial_lr", float(group["lr"]))  # a second scheduler starts from the same rates
            elif "initial_lr" not in group:
                raise KeyError(f"param 'initial_lr' is not specified in param_groups[{i}] when resuming the scheduler with "
                               f"last_epoch={last_epoch}")
        self.base_lrs = [float(group["initial_lr"]) for group in optimizer.param_groups]
        self.step()

    def get_lr(self):
        raise NotImplementedError(f"{type(self).__name__} defines no get_lr()")

    def step(self):
        """Sets the learning rates of the next step. A rate that is a tensor stays one and is written in place.

        ValueError where there is no rate for a group that was added since.
        """
        self.last_epoch += 1
        groups, lrs = self.optimizer.param_groups, self.get_lr()
        if len(lrs) != len(groups):
            raise ValueError(f"{type(self).__name__}: {len(lrs)} learning rates for {len(groups)} parameter groups; a group that is added "
                             f"after the scheduler needs a new scheduler")
        for group, lr in zip(groups, lrs):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._last_lr = lrs

    def get_last_lr(self):
        """The learning rates now in use, one for each group."""
        return list(self._last_lr)

    def state_dict(self):
        """Everything but the optimizer and functions: {"last_epoch": …, "base_lrs": …, …}."""
        return {name: list(value) if isinstance(value, list) else value
                for name, value in self.__dict__.items() if name not in ("optimizer", "lr_lambdas")}

    def load_state_dict(self, state_dict):
        """Continues from a state; the optimizer's own state dict brings back the learning rates in use."""
        known = self.state_dict()
        self.__dict__.update({name: value for name, value in state_dict.items() if name in known})


class LambdaLR(LRScheduler):
    """lr = initial lr · lr_lambda(step). One function, or a list with one for each parameter group."""

    def __init__(self, optimizer, lr_lambda, last_epoch=-1):
        groups = len(_groups_of(optimizer))
        self.lr_lambdas = list(lr_lambda) if isinstance(lr_lambda, (list, tuple)) else [lr_lambda] * groups
        if len(self.lr_lambdas) != groups:
            raise ValueError(f"LambdaLR: expected {groups} lr_lambdas, one for each parameter group, got {len(self.lr_lambdas)}")
        super().__init__(optimizer, last_epoch)

    def get_lr(self):
        return [base * f(self.last_epoch) for base, f in zip(self.base_lrs, self.lr_lambdas)]


class CosineAnnealingLR(LRScheduler):
    """lr = eta_min + (initial lr − eta_min) · (1 + cos(π · t / T_max)) / 2 at step t, reached from the rate in use:

    lr ← eta_min + (lr − eta_min) · (1 + cos(π · t / T_max)) / (1 + cos(π · (t − 1) / T_max))

    A rate that was changed in between stays changed, and a group that was added later takes part. One step after a lowest
    point this is 0/0, and lr ← lr + (initial lr − eta_min) · (1 − cos(π / T_max)) / 2: a group that was added later has no
    initial lr here, which is a ValueError. The first step leaves lr as it is.
    (Loshchilov and Hutter, 2017; PyTorch's recursive form.)
    """

    def __init__(self, optimizer, T_max, eta_min=0.0, last_epoch=-1):
        if not T_max > 0:
            raise ValueError(f"CosineAnnealingLR: T_max must be positive, got {T_max}")
        self.T_max, self.eta_min = T_max, eta_min
        super().__init__(optimizer, last_epoch)

    def get_lr(self):
        rates, t = [float(group["lr"]) for group in self.optimizer.param_groups], self.last_epoch
        if self._last_lr is None:
            return rates
        if (t - 1 - self.T_max) % (2 * self.T_max) == 0:
            rise = (1 - math.cos(math.pi / self.T_max)) / 2
            return [lr + (base - self.eta_min) * rise for lr, base in zip(rates, self.base_lrs)]
        shrink = (1 + math.cos(math.pi * t / self.T_max)) / (1 + math.cos(math.pi * (t - 1) / self.T_max))
        return [self.eta_min + (lr - self.eta_min) * shrink for lr in rates]


def warmup_cosine(step, warmup, total, floor=0.0):
    """A factor for LambdaLR: linear from 0 to 1 over `warmup` steps, then half a cosine to `floor` at step `total`.

    (guide 16.1.)  `LambdaLR(optimizer, lambda step: warmup_cosine(step, 100, 1000))`
    """
    if step < warmup:
        return step / warmup
    return floor + (1 - floor) * (1 + math.cos(math.pi * _progress(step, warmup, total))) / 2


def warmup_linear(step, warmup, total, floor=0.0):
    """The same with a straight line from 1 to `floor` in the place of the cosine (guide 16.1)."""
    if step < warmup:
        return step / warmup
    return floor + (1 - floor) * (1 - _progress(step, warmup, total))


def warmup_stable_decay(step, warmup, total, floor=0.0, decay=0.2):
    """WSD: linear from 0 to 1 over `warmup` steps, 1 until the last `decay` share of the `total` steps, a straight line to `floor` there.

    A run can be made longer from any step before its decline: nothing up to there depends on `total`. (Hu et al., MiniCPM, 2024, where
    the decline is exponential.)  decay: 0, no decline, to 1, as warmup_linear.
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"warmup_stable_decay: decay is the share of the steps in which the rate declines, 0 to 1, got {decay}")
    start = max(warmup, total - decay * total)
    return warmup_linear(step, start, total, floor) if step > start and decay else warmup_constant(step, warmup, total, floor)


def warmup_constant(step, warmup, total, floor=0.0):
    """Linear from 0 to 1 over `warmup` steps, then 1; `total` and `floor` are there for the sake of the others' signature."""
    return step / warmup if step < warmup else 1.0


def _progress(step, start, total):
    """The share of the way from step `start` to step `total`; where that is no way, one step long."""
    return min((step - start) / max(1, total - start), 1.0)


SCHEDULES = {"cosine": warmup_cosine, "linear": warmup_linear, "wsd": warmup_stable_decay, "constant": warmup_constant}
