"""What the first step of a model with many parameters costs."""

import pytest
import torch

import sketchoptim as so
from sketchoptim import _names


@pytest.mark.parametrize("count", [10, 1600])
def test_a_first_step_goes_through_the_parameters_once_to_name_them(count, monkeypatch):
    named = 0
    original = _names.keyed_parameters

    def counted(optimizer):
        nonlocal named
        for entry in original(optimizer):
            named += 1
            yield entry

    monkeypatch.setattr(_names, "keyed_parameters", counted)
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]
    optimizer = so.Adam(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    optimizer.step()
    assert named == count
