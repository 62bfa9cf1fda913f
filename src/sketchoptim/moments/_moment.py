"""What a moment is to an optimizer: a thing that takes rows and gives back their estimates."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .._rows import Rows

Name = Literal["first", "second"]
# The tensors of a moment, by the name of their part.
Parts = dict[str, Tensor]

# torch shares a sum out between threads from 2^15 elements on, and its bits then depend on them.
SUMMED_AT_ONCE = 1 << 14


class Average(NamedTuple):
    """How a moment moves: ``moment <- decay * moment + weight * value``."""

    decay: float
    weight: float

    def delta(self, old: Tensor, value: Tensor) -> Tensor:
        """What to add to `old`; for a moving average the form of SparseAdam and of Algorithm 4."""
        if self.weight == 1 - self.decay:
            return (value - old) * self.weight
        if self.decay == 1:  # an overflowed sum stays as it is, where inf * 0 would spoil it
            return value * self.weight
        return old * (self.decay - 1) + value * self.weight

    def moved(self, old: Tensor, value: Tensor) -> Tensor:
        """The moment after the value."""
        return old + self.delta(old, value)


@dataclass(frozen=True)
class Table:
    """What a moment knows of its parameter: ``[rows, dim]`` after flattening a row."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    number: int
    """The parameter's place in its optimizer, from which its hash is seeded."""

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def dim(self) -> int:
        return self.shape[1:].numel()


class Moment:
    """One moment of one parameter, over tensors that live in the optimizer's state.

    A step calls `begin_`, then `gather_` with all rows if `gathers`, then `update_` with all rows,
    then `end_`. Rows come in chunks of unique ids, ascending over the whole step.
    """

    gathers = False
    """Whether a row's estimate depends on rows that come after it."""

    average: Average

    def __init__(self, tensors: Parts) -> None:
        self.tensors = tensors

    def begin_(self, average: Average, touched: int) -> None:
        """Starts a step that will touch so many rows; decays what decays as a whole."""
        self.average = average

    def gather_(self, ids: Tensor, values: Tensor) -> None:
        """Takes in ``values[k, dim]`` of ``ids[k]`` before any estimate is asked for."""

    def update_(self, ids: Tensor, values: Tensor) -> Tensor:
        """The estimates after the step, ``[k, dim]`` or ``[k, 1]`` when one stands for a row."""
        raise NotImplementedError

    def estimate(self, ids: Tensor) -> Tensor:
        """The estimates as they stand, shaped as `update_` gives them, between two steps."""
        raise NotImplementedError

    def end_(self) -> None:
        """Finishes the step, after all rows."""

    def load_(self, rows: Rows, *, start: float) -> None:
        """Takes in a whole exact moment, while still as `create` left it, filled with `start`."""
        self.begin_(Average(1.0, 1.0), len(rows))
        if self.gathers:
            for chunk in rows.chunks():
                self.gather_(chunk.ids, chunk.gradient - start)
        for chunk in rows.chunks():
            self.update_(chunk.ids, chunk.gradient - start)
        self.end_()

    def maintain_(self, step: int) -> bool:
        """Does what is due after step number `step`; returns whether a tensor has been replaced."""
        return False


class Moments(NamedTuple):
    """The moments of one parameter; None for one that is not kept."""

    first: Moment | None
    second: Moment | None


def row_sums(values: Tensor) -> Tensor:
    """The sums ``[k, 1]`` over ``values[k, dim]``, the same bits for any number of threads."""
    parts = [part.sum(1, keepdim=True) for part in values.split(SUMMED_AT_ONCE, 1)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1).sum(1, keepdim=True)
