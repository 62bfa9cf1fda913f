"""State before the first step, for checkpoints to be loaded into.

`torch.distributed.checkpoint` makes it by a step with a rate of zero along gradients of zero,
and loads into the tensors that it then finds.
"""

import torch
from torch import Tensor

from .._group_options import compresses_dense
from .._names import keyed_parameters
from ..deferred import DeferredGradient
from . import _exchange, _shards
from ._algorithm import EXACT, Algorithm
from ._binding import fresh_state


def is_asked_for(optimizer: Algorithm) -> bool:
    """Whether a step could move nothing in any process: rates and gradients are zero, and dense."""
    if not all(_is_zero(group["lr"]) for group in optimizer.param_groups):
        return False  # in every process, since `_agreement` has compared them
    gradients = [it.grad for it in _parameters(optimizer) if it.grad is not None]
    may_move = not gradients or any(map(_may_move, gradients))
    return not _exchange.is_anywhere(may_move, _parameters(optimizer))


def _may_move(gradient: Tensor) -> bool:
    if gradient.is_sparse or isinstance(gradient, DeferredGradient):
        return True
    return bool(torch.any(_shards.local(gradient)))


def create_(optimizer: Algorithm) -> None:
    """Gives every parameter that has a gradient the state of one step along zeros.

    It is compressed if the group names its memory. Otherwise it is exact, as for any dense
    gradient; the first step starts anew if its gradient is sparse (`_state.starts_anew`).
    """
    for key, parameter, group in keyed_parameters(optimizer):
        if parameter.grad is not None:
            memory = group["memory"] if compresses_dense(group, parameter) else EXACT
            state = fresh_state(optimizer, parameter, group, memory, key)
            state["step"] += 1  # as torch.optim counts it
            optimizer.state[parameter] = state


def _is_zero(rate: object) -> bool:
    if isinstance(rate, Tensor):
        return rate.numel() == 1 and rate.item() == 0
    return isinstance(rate, float | int) and rate == 0


def _parameters(optimizer: Algorithm) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
