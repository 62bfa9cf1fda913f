"""Models and optimizers on several ranks: whether all of them are in the same state."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sketchoptim as so


def check_same_on_every_rank(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Raises unless weights and state have the same bits on every rank."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[name] = parameter.detach()
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{name}.{key}"] = torch.as_tensor(value)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, tensors)
    for other in everywhere:
        assert other.keys() == tensors.keys()
        differing = [name for name in tensors if not torch.equal(tensors[name], other[name])]
        assert not differing


def local_part(batch: Tensor) -> Tensor:
    """The rows of a batch that this rank trains on."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def train(
    model: Callable[..., Tensor],
    optimizer: so.optim.Optimizer,
    batches: list[tuple[Any, ...]],
) -> None:
    """A step on each batch; calling the model gives the loss."""
    for batch in batches:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
