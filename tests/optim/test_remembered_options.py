"""Options that passed are not checked again, unless they may have changed."""

import pytest
import torch
from torch import Tensor

import sketchoptim as so


def trained(**options: object) -> tuple[torch.nn.Parameter, so.Adam]:
    parameter = torch.nn.Parameter(torch.ones(10, 3))
    optimizer = so.Adam([parameter], **options)
    for _ in range(2):
        step(parameter, optimizer)
    return parameter, optimizer


def step(parameter: torch.nn.Parameter, optimizer: so.Adam) -> None:
    ids = torch.tensor([[1, 4]])
    parameter.grad = torch.sparse_coo_tensor(ids, torch.ones(2, 3), (10, 3), check_invariants=True)
    optimizer.step()


def refused(parameter: torch.nn.Parameter, optimizer: so.Adam, error: str) -> None:
    before = parameter.detach().clone()
    with pytest.raises(ValueError, match=error):
        step(parameter, optimizer)
    assert torch.equal(parameter, before)


def test_what_passed_is_not_checked_again(monkeypatch):
    parameter, optimizer = trained()
    calls: list[object] = []
    monkeypatch.setattr(optimizer, "check_options", calls.append)
    for rate in (0.1, 0.2):  # as a scheduler does
        optimizer.param_groups[0]["lr"] = rate
        step(parameter, optimizer)
    assert not calls
    optimizer.param_groups[0]["eps"] = 1e-6
    step(parameter, optimizer)
    assert calls == [optimizer.param_groups[0]]


def test_a_list_that_changes_in_place_is_checked():
    betas = [0.9, 0.99]
    parameter, optimizer = trained(betas=betas)
    betas[1] = 1.5
    refused(parameter, optimizer, r"betas\[1\] must be in \[0, 1\), got 1.5")


@pytest.mark.parametrize("name", ["lr", "eps"])
def test_a_tensor_that_changes_in_place_is_checked(name):
    number = torch.tensor(0.5)
    parameter, optimizer = trained(**{name: number})
    number.fill_(-1.0)
    refused(parameter, optimizer, f"{name} must be finite and >= 0, got tensor")


def test_a_rate_is_checked_in_every_step():
    parameter, optimizer = trained()
    optimizer.param_groups[0]["lr"] = float("nan")
    refused(parameter, optimizer, "lr must be finite and >= 0, got nan")


def test_another_option_reaches_the_next_step():
    one, one_optimizer = trained(lr=0.1)
    other, other_optimizer = trained(lr=0.1)
    other_optimizer.param_groups[0]["eps"] = 1.0
    step(one, one_optimizer)
    step(other, other_optimizer)
    moved: list[Tensor] = [it.detach()[1] for it in (one, other)]
    assert (moved[0] < moved[1]).all()  # a larger epsilon is a smaller step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["native", "reference"])
def test_a_tensor_that_changes_in_place_reaches_the_next_step(dtype):
    decay = torch.tensor(0.0)
    parameter = torch.nn.Parameter(torch.ones(10, 3, dtype=dtype))
    optimizer = so.SGD([parameter], lr=1.0, momentum=0.0, weight_decay=decay)
    values = torch.zeros(1, 3, dtype=dtype)
    parameter.grad = torch.sparse_coo_tensor([[1]], values, (10, 3), check_invariants=True)
    optimizer.step()
    decay.fill_(0.5)
    optimizer.step()
    assert (parameter[1] == 0.5).all()
