"""Every case of the table in tensorcases.py: PyTorch's recorded result, and PyTorch's own where it is installed."""
import pytest
import tensorcases

import tinygrad_tf as torch

GROUPS = ("arithmetic", "reduce", "shape", "index", "linear", "creation", "tensor", "display")
CASES = {f"{group}: {name}": (group, name, case) for group in GROUPS for name, case in tensorcases.cases(group).items()}
RECORDED = {group: tensorcases.recorded(group) for group in GROUPS}


@pytest.mark.parametrize("title", CASES)
def test_as_recorded_from_pytorch(title):
    group, name, case = CASES[title]
    tensorcases.assert_same(tensorcases.outcome(torch, case), RECORDED[group][name], case)


@pytest.mark.torch
@pytest.mark.parametrize("group", GROUPS)
def test_as_pytorch_here(group):
    pytorch = pytest.importorskip("torch")
    for case in tensorcases.cases(group).values():
        tensorcases.assert_same(tensorcases.outcome(torch, case), tensorcases.outcome(pytorch, case), case)
