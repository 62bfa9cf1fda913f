"""Names of the parameters of an optimizer and of a model."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# An attribute of a parameter: its name, for optimizers that are given parameters without names.
NAME_ATTRIBUTE = "sketchoptim_name"

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def keyed_parameters(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[str | int, Tensor, dict[str, Any]]]:
    """Every parameter with its key, a name where it has one, else its number, and its group."""
    number = 0
    for group in optimizer.param_groups:
        names = group.get("param_names") or [""] * len(group["params"])
        for name, parameter in zip(names, group["params"], strict=True):
            yield name or getattr(parameter, NAME_ATTRIBUTE, "") or number, parameter, group
            number += 1


def named_parameters(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Every parameter with a name for people, and its group."""
    for key, parameter, group in keyed_parameters(optimizer):
        yield key if isinstance(key, str) else f"parameter {key}", parameter, group


def name_of(parameter: Tensor, optimizer: torch.optim.Optimizer) -> str:
    """The name of one parameter."""
    return next(name for name, other, _ in named_parameters(optimizer) if other is parameter)


def keys_of(optimizer: torch.optim.Optimizer) -> dict[Tensor, str | int]:
    """The keys of all parameters, from which their hashes are seeded."""
    found: dict[Tensor, str | int] = {}
    for key, parameter, _ in keyed_parameters(optimizer):
        found.setdefault(parameter, key)
    return found


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model that are not frozen, by name.

    Names are those of the model itself, without what `torch.compile` or `DistributedDataParallel`
    adds to them.
    """
    while isinstance(bare := getattr(model, "_orig_mod", model), _WRAPPERS):
        model = bare.module
    return {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
