"""The moments of a live optimizer, to look at or to fill, whatever they are stored in."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import moments
from ..moments import Moment, Name
from ..rows import CHUNK_ELEMENTS
from .base import Group, Optimizer
from .slot import parts


def opened_moments(optimizer: Optimizer, parameter: Tensor, group: Group) -> dict[Name, Moment]:
    """The moments of a parameter that has state, over its tensors."""
    state = optimizer.state[parameter]
    storages = optimizer.storages(group, optimizer._memory(parameter, group))
    opened: dict[Name, Moment] = {}
    for name, storage in storages.items():
        kept = parts(state, name)
        if kept:  # SGD's momentum may have been switched on since the last step
            opened[name] = moments.open_moment(storage, name, kept)
    return opened


def named_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor, Group]]:
    """Every parameter with a name, its own or its number, and with its group."""
    number = 0
    for group in optimizer.param_groups:
        names = group.get("param_names") or [""] * len(group["params"])
        for name, parameter in zip(names, group["params"], strict=True):
            yield name or f"parameter {number}", parameter, group
            number += 1


def row_parts(parameter: Tensor, *, dim: int | None = None) -> Iterator[tuple[Any, Tensor]]:
    """All rows in turn, some `CHUNK_ELEMENTS` numbers at a time: where they are, and their ids."""
    if not parameter.dim():
        yield ..., torch.zeros(1, dtype=torch.int64, device=parameter.device)
        return
    width = parameter.shape[1:].numel() if dim is None else dim
    size = max(1, CHUNK_ELEMENTS // max(1, width))
    for start in range(0, parameter.shape[0], size):
        stop = min(start + size, parameter.shape[0])
        yield slice(start, stop), torch.arange(start, stop, device=parameter.device)
