"""Learning rate schedulers that go from one optimizer to another."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from .. import _torch_private


def checked_schedulers(
    optimizer: torch.optim.Optimizer, schedulers: Sequence[LRScheduler] | None
) -> list[LRScheduler]:
    """Every scheduler of the optimizer to hand over, those inside others too."""
    if schedulers is None:
        # Schedulers mark the step of what they steer; one that is forgotten would steer nothing.
        if _torch_private.has_scheduler(optimizer):
            raise ValueError(
                "the optimizer has a learning rate scheduler, which must be handed over: "
                "give schedulers=[scheduler], or schedulers=[] to leave it behind"
            )
        return []
    found = list(schedulers)
    for scheduler in found:  # which grows on the way
        if scheduler.optimizer is not optimizer:
            raise ValueError(
                f"schedulers must steer the given optimizer; {type(scheduler).__name__} does not"
            )
        found += getattr(scheduler, "_schedulers", [])
    return found


def hand_over_(
    schedulers: list[LRScheduler], old: torch.optim.Optimizer, new: torch.optim.Optimizer
) -> None:
    """Makes schedulers steer the new optimizer, which has the groups of the old one."""
    if schedulers:
        _Mark(new)
        _torch_private.mark_as_stepped_(new, _torch_private.was_stepped(old))
    for scheduler in schedulers:
        scheduler.optimizer = new


class _Mark(LRScheduler):
    """Marks an optimizer's step as schedulers expect it, and changes no learning rate."""

    def get_lr(self) -> list[float | Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]
