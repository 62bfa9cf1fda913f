"""The step in plain torch operations: the definition of correct, and the fallback."""

import torch
from torch import Tensor

from ..moments import LinearMoment, Moment
from ..rows import Chunk, Rows
from ..sketch import median
from .rule import Rule

# Squares up to here leave room in float32, which is what tables are made of: for 2^48 of them in
# a sum (a row's mean, a bucket, a factor of rank one), or for 2^24 under the smallest lazy scale.
LARGEST_GRADIENT = 2.0**40


def step_(
    parameter: Tensor, rows: Rows, first: Moment | None, second: Moment | None, *, rule: Rule
) -> None:
    """Moves the moments and the touched rows of the parameter; `end_` is left to the caller.

    Temporaries are a few chunks of rows, whatever the number of rows.
    """
    for moment, average in ((first, rule.first), (second, rule.second)):
        if moment is not None and average is not None:
            moment.begin_(average, touched=len(rows))
    if any(moment is not None and moment.gathers for moment in (first, second)):
        for chunk in rows.chunks():
            gradient = rule.gradient(chunk.gradient, _read(parameter, chunk))
            if first is not None:
                first.gather_(chunk.ids, gradient)
            if second is not None:
                second.gather_(chunk.ids, gradient.square())
    for chunk in rows.chunks():
        old = _read(parameter, chunk)
        gradient = rule.gradient(chunk.gradient, old)
        direction = _direction(rule, chunk.ids, gradient, first, second)
        _write_(parameter, chunk, old * rule.shrink - direction * rule.step_size)


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


def _read(parameter: Tensor, chunk: Chunk) -> Tensor:
    rows = parameter[chunk.at] if parameter.dim() else parameter
    return rows.reshape(chunk.gradient.shape).to(chunk.gradient.dtype)


def _write_(parameter: Tensor, chunk: Chunk, rows: Tensor) -> None:
    if parameter.dim():
        parameter[chunk.at] = rows.to(parameter.dtype).view(-1, *parameter.shape[1:])
    else:
        parameter.copy_(rows.view(()))


def is_finite(parameter: Tensor, rows: Rows, *, rule: Rule) -> bool:
    """Whether every gradient that would reach the moments is finite, and its square is too."""
    for chunk in rows.chunks():
        gradient = rule.gradient(chunk.gradient, _read(parameter, chunk))
        if gradient.numel():
            low, high = torch.aminmax(gradient)
            if not (low >= -LARGEST_GRADIENT and high <= LARGEST_GRADIENT):
                return False
    return True
