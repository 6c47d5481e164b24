"""Every case of the table in tensorcases.py: PyTorch's recorded result, and PyTorch's own where it is installed."""
import pytest
import tensorcases

import tinygrad_tf as torch

GROUPS = ("arithmetic", "reduce", "shape", "index", "linear", "creation", "tensor", "display")
DISPLAY = pytest.mark.host("x.device and repr name the device, x.numpy() is of the CPU")
CASES = {f"{group}: {name}": (group, name, case) for group in GROUPS for name, case in tensorcases.cases(group).items()}
OF_THE_CPU = ("display", "tensor: x.device", "tensor: x.detach().numpy()")
RECORDED = {group: tensorcases.recorded(group) for group in GROUPS}


@pytest.mark.parametrize("title", [pytest.param(t, marks=DISPLAY) if t.startswith(OF_THE_CPU) else t for t in CASES])
def test_as_recorded_from_pytorch(title):
    group, name, case = CASES[title]
    tensorcases.assert_same(tensorcases.outcome(torch, case), RECORDED[group][name], case)


@pytest.mark.torch
@pytest.mark.parametrize("group", [pytest.param(g, marks=DISPLAY) if g in ("display", "tensor") else g for g in GROUPS])
def test_as_pytorch_here(group):
    pytorch = pytest.importorskip("torch")
    for case in tensorcases.cases(group).values():
        tensorcases.assert_same(tensorcases.outcome(torch, case), tensorcases.outcome(pytorch, case), case)
