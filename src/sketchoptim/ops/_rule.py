"""What one step does to the rows of a parameter, given their gradient and their moments."""

import math
from array import array
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .._sketch import median
from ..moments import Average
from ._schedule import Numbers, Schedule

# rows [k, dim], gradient [k, dim], first and second moment ([k, dim], [k, 1] or None) -> new rows
Update = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


class AnyRule(Protocol):
    """The rule of a step, as the reference runs it."""

    @property
    def first(self) -> Average | None: ...
    @property
    def second(self) -> Average | None: ...
    @property
    def maximize(self) -> bool: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def is_ratio(self) -> bool: ...
    @property
    def reads_before(self) -> bool: ...
    @property
    def update(self) -> Update: ...


class Rule(NamedTuple):
    """A rule of your own: how the moments move, and a function from them to the new rows.

    Args:
        update: ``update(rows, gradient, first, second)`` gives the new rows. All are ``[k, dim]``;
            a moment is ``[k, 1]`` where one number stands for a row, and None where there is none.
            It must not write into them: they may be the parameter and its gradient themselves.
        first: How the first moment, a mean of gradients, moves; None where it is dropped.
        second: How the second moment, a mean or sum of squared gradients, moves.
        maximize: Whether to climb: the gradient changes its sign before anything else.
        weight_decay: Coupled: this times the row joins the gradient.
        reads_before: Hand the moments to `update` as they were before this step.
    """

    update: Update
    first: Average | None = None
    second: Average | None = None
    maximize: bool = False
    weight_decay: float = 0.0
    reads_before: bool = False

    @property
    def is_ratio(self) -> bool:
        """False: the ratio form is one that fused rules have."""
        return False


class FusedRule(NamedTuple):
    """The rules that fused kernels understand, as numbers. A row ``p`` with gradient ``g``::

        g <- (-g if maximize else g) + weight_decay * p
        m <- first(g),  v <- second(g^2)
        direction <- (g + nesterov * m  or  m  or  g) / (sqrt(v) / second_root + eps  or  1)
        p <- shrink * p - step_size * direction

    Args:
        step_size: The learning rate, before what `schedule` makes of it.
        first: How the first moment moves; None where there is none, or where it is dropped.
        second: How the second moment moves, or None.
        second_root: Divides the root of the second moment, unless `schedule` has a correction.
        schedule: What the number of the step makes of step size, root and clip (`numbers`). Devices
            that count steps by themselves apply it themselves. None if they stay as they are.
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
    schedule: Schedule | None = None
    eps: float = 0.0
    weight_decay: float = 0.0
    shrink: float = 1.0
    nesterov: float | None = None
    maximize: bool = False
    clip: float | None = None
    is_ratio: bool = False

    @property
    def reads_before(self) -> bool:
        """False: a fused rule uses the moments as they are after the step."""
        return False

    def numbers(self) -> Numbers:
        """Step size, root and clip of this step."""
        given = Numbers(self.step_size, self.second_root, self.clip)
        return given if self.schedule is None else self.schedule.applied(given)

    def direction(self, gradient: Tensor, first: Tensor | None, second: Tensor | None) -> Tensor:
        """The direction of the rows, element by element; in the ratio form, for each hash row."""
        _, second_root, clip = self.numbers()
        numerator = gradient if first is None else first
        if self.nesterov is not None and first is not None:
            numerator = gradient + first * self.nesterov
        if second is not None:
            root = second.sqrt()
            root = root if second_root == 1.0 else root / second_root
            numerator = numerator / (root + self.eps)
        return numerator if clip is None else torch.clamp(numerator, -clip, clip)

    def update(
        self, rows: Tensor, gradient: Tensor, first: Tensor | None, second: Tensor | None
    ) -> Tensor:
        """The rows after the step: the definition that every kernel is compared with."""
        direction = self.direction(gradient, first, second)
        if self.is_ratio:
            direction = median(direction)
        return rows * self.shrink - direction * self.numbers().step_size


def kernel_numbers(rule: FusedRule) -> "array[float]":
    """The rule as a `Rule` of csrc/abi.h."""
    step_size, second_root, clip = rule.numbers()
    first, second = rule.first, rule.second
    return array(
        "d",
        (
            step_size,
            second_root,
            rule.eps,
            rule.weight_decay,
            rule.shrink,
            math.nan if rule.nesterov is None else rule.nesterov,
            math.nan if clip is None else clip,
            *((math.nan, 0.0) if first is None else first),
            *((math.nan, 0.0) if second is None else second),
            rule.maximize,
            rule.is_ratio,
        ),
    )
