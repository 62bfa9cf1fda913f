"""What the parameters of an optimizer are called."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def named_parameters(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Every parameter with a name, its own or its number, and with its group."""
    number = 0
    for group in optimizer.param_groups:
        names = group.get("param_names") or [""] * len(group["params"])
        for name, parameter in zip(names, group["params"], strict=True):
            yield name or f"parameter {number}", parameter, group
            number += 1


def name_of(parameter: Tensor, optimizer: torch.optim.Optimizer) -> str:
    """The name of one of them."""
    return next(name for name, other, _ in named_parameters(optimizer) if other is parameter)
