"""What goes into the layers of a model: the statistics that rounding a weight well asks for."""
import numpy as np

from ..arguments import described, require_tensors
from ..autograd import no_grad
from ..backend import array_module, as_rows
from ..tensor import Tensor


class InputStatistics:
    """Of all inputs x: [n, in] that a layer got: G = Σ xᵀ x [in, in] and a = Σ |x| [in], in float64, and n."""

    def __init__(self, name="layer"):
        self.name, self.count, self.gram, self.absolute = name, 0, 0, 0

    def add(self, x):
        """ValueError for NaN or infinity: one of them would be in every sum from here on."""
        xp, rows = array_module(x), as_rows(x).astype(np.float64)
        if not xp.isfinite(rows).all():
            raise ValueError(f"calibration: the input of {self.name}, {tuple(x.shape)}, holds NaN or infinity; look at the ids, and at the "
                             f"model: does its forward pass give finite numbers?")
        self.gram, self.absolute = self.gram + rows.T @ rows, self.absolute + xp.abs(rows).sum(axis=0)
        self.count += rows.shape[0]

    def error(self, change):
        """Mean over x of |x · changeᵀ|²: what a change of W [out, in] does to the outputs. As Σ (change · G) ⊙ change / n."""
        change = change.astype(np.float64)
        return float((change @ self.gram * change).sum()) / self.count


def collect(model, layers, calibration):
    """{name: InputStatistics} of {name: layer} over forward passes of the model, in eval mode, over a batch of ids or several."""
    found = {name: InputStatistics(name) for name in layers}
    handles = [layer.register_forward_pre_hook(lambda _, args, name=name: found[name].add(args[0].array)) for name, layer in layers.items()]
    training = [module for module in model.modules() if module.training]
    try:
        with no_grad():
            model.eval()
            for batch in batches(calibration):
                model(batch)
    finally:
        for handle in handles:
            handle.remove()
        for module in training:
            module.training = True
    return found


def batches(calibration):
    """One batch or several as a list of Tensors."""
    found = [calibration] if isinstance(calibration, Tensor) else calibration
    if not isinstance(found, (list, tuple)) or not found:
        raise TypeError(f"calibration must be a batch of ids as a Tensor [B, T], or a list of such batches, got {described(calibration)}")
    require_tensors("calibration", **{f"batch {i}": batch for i, batch in enumerate(found)})
    return found
