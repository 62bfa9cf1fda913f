"""The step in plain torch operations: the definition of correct, and the fallback."""

import math

import torch
from torch import Tensor

from .._rows import Chunk, of_gradient
from .._sketch import LARGEST_VALUE, median
from ..moments import LinearMoment, Moment, Moments
from ._rule import Rule

# Its square is the largest value that a sketch takes, which leaves room in float32 for 2^48 of them
# in any sum (a row's mean, a factor of rank one).
LARGEST_GRADIENT = math.sqrt(LARGEST_VALUE)


class ReferenceStepper:
    """What steps need to know of a parameter; nothing is worth keeping between them."""

    def __init__(self, parameter: Tensor, moments: Moments) -> None:
        self.parameter, self.moments = parameter, moments

    def takes(self, gradient: Tensor) -> bool:
        """False: the next gradient may be one for a faster backend."""
        return False

    @torch.no_grad()
    def prepare(self, gradient: Tensor, rule: Rule) -> "ReferenceStep":
        """The step along a gradient, once its rows are known to exist."""
        check_ids(self.parameter, gradient)
        return ReferenceStep(self.parameter, self.moments, gradient, rule)


class ReferenceStep:
    """A step of one parameter: first looked at, then done. Temporaries are a few chunks of rows."""

    def __init__(self, parameter: Tensor, moments: Moments, gradient: Tensor, rule: Rule) -> None:
        self.parameter, self.moments, self.rule = parameter, moments, rule
        self.rows = of_gradient(gradient)
        self.touched = len(self.rows)

    @torch.no_grad()
    def is_finite(self) -> bool:
        """Whether every gradient that would reach the moments is finite, and its square is too."""
        for chunk in self.rows.chunks():
            gradient = self._gradient(chunk)
            if gradient.numel():
                low, high = torch.aminmax(gradient)
                if not (low >= -LARGEST_GRADIENT and high <= LARGEST_GRADIENT):
                    return False
        return True

    @torch.no_grad()
    def run_(self) -> None:
        """Moves the moments and the touched rows of the parameter."""
        rule, (first, second) = self.rule, self.moments
        for moment, average in zip(self.moments, (rule.first, rule.second), strict=True):
            if moment is not None and average is not None:
                moment.begin_(average, self.touched)
        if any(moment is not None and moment.gathers for moment in (first, second)):
            for chunk in self.rows.chunks():
                gradient = self._gradient(chunk)
                if first is not None:
                    first.gather_(chunk.ids, gradient)
                if second is not None:
                    second.gather_(chunk.ids, gradient.square())
        for chunk in self.rows.chunks():
            direction = _direction(rule, chunk.ids, self._gradient(chunk), first, second)
            self._write_(chunk, self._read(chunk) * rule.shrink - direction * rule.step_size)
        for moment in (first, second):
            if moment is not None:
                moment.end_()

    def _gradient(self, chunk: Chunk) -> Tensor:
        gradient = -chunk.gradient if self.rule.maximize else chunk.gradient
        decay = self.rule.weight_decay
        return gradient + self._read(chunk) * decay if decay else gradient

    def _read(self, chunk: Chunk) -> Tensor:
        rows = self.parameter[chunk.at] if self.parameter.dim() else self.parameter
        return rows.reshape(chunk.gradient.shape).to(chunk.gradient.dtype)

    def _write_(self, chunk: Chunk, rows: Tensor) -> None:
        if self.parameter.dim():
            shaped = rows.to(self.parameter.dtype).view(-1, *self.parameter.shape[1:])
            self.parameter[chunk.at] = shaped
        else:
            self.parameter.copy_(rows.view(()))


def check_ids(parameter: Tensor, gradient: Tensor) -> None:
    """Raises where a sparse gradient names a row that the parameter does not have."""
    if gradient.is_sparse and gradient._nnz():
        low, high = torch.aminmax(gradient._indices())
        if low < 0 or high >= parameter.shape[0]:
            raise ids_error(parameter, int(low), int(high))


def ids_error(parameter: Tensor, low: int, high: int) -> ValueError:
    return ValueError(
        f"the gradient of the parameter of shape {list(parameter.shape)} must have row ids "
        f"between 0 and {parameter.shape[0] - 1}, got {low} to {high}"
    )


def _direction(
    rule: Rule, ids: Tensor, gradient: Tensor, first: Moment | None, second: Moment | None
) -> Tensor:
    if rule.is_ratio:
        assert isinstance(first, LinearMoment)
        assert isinstance(second, LinearMoment)
        return median(rule.direction(gradient, first.readings(ids), second.readings(ids)))
    mean = None if first is None else first.update_(ids, gradient)
    square = None if second is None else second.update_(ids, gradient.square())
    return rule.direction(gradient, mean, square)
