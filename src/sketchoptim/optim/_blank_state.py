"""State before the first step, for checkpoints to be loaded into.

`torch.distributed.checkpoint` asks for it by a step with a rate of zero along gradients of zero,
and loads into the tensors that it then finds.
"""

import gc
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from . import _sharding
from ._binding import EXACT, fresh_state

if TYPE_CHECKING:
    from .base import Optimizer


def is_asked_for(optimizer: "Optimizer") -> bool:
    """Whether a step could move nothing: all rates and all gradients are zero, and dense."""
    if not all(_is_zero(group["lr"]) for group in optimizer.param_groups):
        return False
    gradients = [it.grad for it in _parameters(optimizer) if it.grad is not None]
    if not gradients or any(it.is_sparse for it in gradients):
        return False
    is_moving = any(bool(torch.any(_sharding.local(it))) for it in gradients)
    return not _sharding.is_anywhere(is_moving, _parameters(optimizer))


def create_(optimizer: "Optimizer") -> None:
    """Gives every parameter that has a gradient the state of no steps.

    The gradient does not say whether later ones are sparse, but the layer of a table does.
    """
    sparse = _weights_of_sparse_layers()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                is_compressed = group["compress_dense"] or parameter in sparse
                memory = group["memory"] if is_compressed else EXACT
                optimizer.state[parameter] = fresh_state(optimizer, parameter, group, memory)


def _is_zero(rate: object) -> bool:
    if isinstance(rate, Tensor):
        return rate.numel() == 1 and rate.item() == 0
    return isinstance(rate, float | int) and rate == 0


def _parameters(optimizer: "Optimizer") -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _weights_of_sparse_layers() -> set[Tensor]:
    """The weights of all layers in this process that give sparse gradients.

    An optimizer sees parameters and not the layers that use them.
    """
    layers = (nn.Embedding, nn.EmbeddingBag)
    return {it.weight for it in gc.get_objects() if issubclass(type(it), layers) and it.sparse}
