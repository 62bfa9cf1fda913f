"""The one update rule that all the optimizers are cases of, as plain numbers."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..moments import Average


class Rule(NamedTuple):
    """What one step does to a row ``p`` with gradient ``g``::

        g <- (-g if maximize else g) + weight_decay * p
        m <- first(g),  v <- second(g^2)
        direction <- (g + nesterov * m  or  m  or  g) / (sqrt(v) / second_root + eps  or  1)
        p <- shrink * p - step_size * direction

    Args:
        step_size: With the learning rate and the first moment's bias correction in it.
        first: How the first moment moves; None where there is none, or where it is dropped.
        second: How the second moment moves, or None.
        second_root: The square root of the second moment's bias correction.
        eps: Keeps the quotient finite.
        weight_decay: Coupled: joins the gradient.
        shrink: Decoupled weight decay as a factor.
        nesterov: The momentum to look ahead with, or None.
        maximize: Whether to climb.
        clip: A bound for each element of the direction, or None.
        is_ratio: Divide in each hash row and take the median of the quotients.
    """

    step_size: float
    first: Average | None = None
    second: Average | None = None
    second_root: float = 1.0
    eps: float = 0.0
    weight_decay: float = 0.0
    shrink: float = 1.0
    nesterov: float | None = None
    maximize: bool = False
    clip: float | None = None
    is_ratio: bool = False

    def direction(self, gradient: Tensor, first: Tensor | None, second: Tensor | None) -> Tensor:
        """Where the row goes, element by element; moments may have leading dimensions more."""
        numerator = gradient if first is None else first
        if self.nesterov is not None and first is not None:
            numerator = gradient + first * self.nesterov
        if second is not None:
            root = second.sqrt()
            root = root if self.second_root == 1.0 else root / self.second_root
            numerator = numerator / (root + self.eps)
        return numerator if self.clip is None else torch.clamp(numerator, -self.clip, self.clip)
