"""Steps through Triton's own code, with a driver whose launches are executed as PTX."""

import pytest
import torch
from gpu_steps import IS_INTERPRETED, stepping_by_reference

if IS_INTERPRETED:
    pytest.skip("the interpreter's process cannot compile", allow_module_level=True)

from gpu_ptx import PtxDriver
from gradients import sparse
from torch import Tensor

import sketchoptim as so

driver = PtxDriver()  # Triton keeps what it has compiled, with the driver of that time


def trained(tables: int) -> list[Tensor]:
    """Tables after three steps: with other rates, other entries and an address that is odd."""
    parameters = [torch.nn.Parameter(torch.ones(40, 8)) for _ in range(tables)]
    optimizer = so.Adam([{"params": parameters, "memory": "row-wise"}], lr=0.125)
    generator = torch.Generator().manual_seed(0)
    for count in (45, 50, 20, 50):
        for parameter in parameters:
            ids = torch.randint(40, (count,), generator=generator)
            values = torch.randint(-8, 9, (count * 8 + 1,), generator=generator) / 8
            is_odd = count == 20
            rows = values[int(is_odd) :][: count * 8].view(count, 8)
            parameter.grad = sparse(ids, rows, parameter.shape)
        optimizer.param_groups[0]["lr"] /= 2
        optimizer.step()
    states = optimizer.state_dict()["state"].values()
    return [*parameters, *(it for kept in states for it in kept.values() if torch.is_tensor(it))]


@pytest.mark.parametrize("tables", [1, 2])
def test_steps_by_tritons_own_launches_equal_the_reference(tables):
    """Later steps launch what the first has compiled; alignment is part of what is compiled."""
    driver.launched.clear()
    with driver.driving():
        found = trained(tables)
    with stepping_by_reference():
        expected = trained(tables)
    assert all(map(torch.equal, found, expected))
    kernels = ["collect_keys", "begin", "inspect", "move_rows", "finish"]
    assert driver.launched == kernels * (4 if tables == 1 else 5)  # unaligned tables go one by one
