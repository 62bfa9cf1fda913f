"""The step in plain torch operations: the definition of correct, and the fallback."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .. import _rounding
from .._rows import Chunk
from .._sketch import LARGEST_VALUE
from .._torch_private import entries
from ..deferred import DeferredGradient, rows_of
from ..moments import Drive, Moments, Move
from ._rule import AnyRule

# Its square is the largest value that a sketch takes, which leaves room in float32 for 2^48 of them
# in any sum (a row's mean, a factor of rank one).
LARGEST_GRADIENT = math.sqrt(LARGEST_VALUE)


class Reference:
    """Steps one parameter by torch's operations, on any device, for any storage and rule.

    `first_row` is the number of the parameter's first row in the table that it is a part of.
    """

    def __init__(self, parameter: Tensor, moments: Moments, *, first_row: int = 0) -> None:
        self.parameter, self.moments, self.first_row = parameter, moments, first_row

    @torch.no_grad()
    def prepare(
        self,
        gradient: Tensor,
        rule: AnyRule,
        *,
        is_checked: bool,
        rounding_key: int | None,
        number: int = 1,
    ) -> "ReferenceStep":
        """The step of this number, along a gradient of rows of the parameter.

        Nothing has changed yet.
        """
        if rule.reads_before and rule.weight_decay:
            raise ValueError(
                "weight_decay of a rule with reads_before=True must be 0, got "
                f"{rule.weight_decay}; shrink the rows in its update instead"
            )
        check_ids(self.parameter, gradient)
        if rule.reads_before and isinstance(gradient, DeferredGradient):
            # Its rows move in a first pass, after which none could be computed from them again.
            gradient = gradient.to_plain()
        step = ReferenceStep(self, gradient, rule, rounding_key, number)
        step.is_finite = not is_checked or step.has_finite_gradient()
        return step


class ReferenceStep:
    """A prepared step of one parameter. Temporaries are a few chunks of rows."""

    is_finite: bool

    def __init__(
        self,
        reference: Reference,
        gradient: Tensor,
        rule: AnyRule,
        rounding_key: int | None,
        number: int,
    ) -> None:
        self.parameter, self.moments = reference.parameter, reference.moments
        self.first_row, self.rule, self.rounding_key = reference.first_row, rule, rounding_key
        self.gradient, self.number = gradient, number
        self.rows = rows_of(gradient)
        self.touched = len(self.rows)
        self._drive: Drive | None = None

    def has_finite_gradient(self) -> bool:
        """Whether every gradient that would reach the moments is finite, and its square is too."""
        if isinstance(self.gradient, DeferredGradient) and self._is_bounded(self.gradient):
            return True
        extremes = [
            torch.stack(torch.aminmax(chunk.gradient))
            for chunk in self._chunks()
            if chunk.gradient.numel()
        ]
        # One test at the end, since a test waits for a GPU; false for NaN.
        return not extremes or torch.stack(extremes).abs().amax().item() <= LARGEST_GRADIENT

    def _is_bounded(self, gradient: DeferredGradient) -> bool:
        """Whether bounds show that it is finite, without a pass over its rows."""
        bound = gradient.bound()
        if self.rule.weight_decay and self.touched and self.parameter.numel():
            weights = self.parameter.detach()
            largest = torch.stack(torch.aminmax(weights)).abs().amax()
            bound = bound + largest * abs(self.rule.weight_decay)
        return bool(bound <= LARGEST_GRADIENT)

    def _moves(self) -> tuple[Move | None, Move | None]:
        rule, (first, second) = self.rule, self.moments
        return (
            Move(first, rule.first, lambda it: it) if first and rule.first else None,
            Move(second, rule.second, torch.square) if second and rule.second else None,
        )

    @torch.no_grad()
    def gather_(self) -> None:
        """The first half of `run_`: processes that divide rows sum what moments then gathered."""
        moves = [move for move in self._moves() if move is not None]
        if self.rule.reads_before:
            for chunk in self._chunks():
                dtype = chunk.gradient.dtype
                self._visit_(chunk, [it.moment.estimate(chunk.ids).to(dtype) for it in moves])
        self._drive = Drive(moves, self.rows, self._chunks, self.number)
        self._drive.gather_()

    @torch.no_grad()
    def run_(self) -> None:
        """Moves the moments and the touched rows of the parameter."""
        if self._drive is None:
            self.gather_()
        assert self._drive is not None
        visit = None if self.rule.reads_before else self._visit_
        self._drive.update_(visit, as_readings=self.rule.is_ratio)

    def _visit_(self, chunk: Chunk, estimates: list[Tensor]) -> None:
        """Moves the rows of a chunk, whose estimates are those of the moments that move."""
        remaining = iter(estimates)
        first, second = (None if move is None else next(remaining) for move in self._moves())
        rows = self._read(chunk)
        self._write_(chunk, self.rule.update(rows, chunk.gradient, first, second))

    def _chunks(self) -> Iterator[Chunk]:
        """The touched rows with the gradients that reach the moments."""
        for chunk in self.rows.chunks():
            gradient = -chunk.gradient if self.rule.maximize else chunk.gradient
            if self.rule.weight_decay:
                gradient = gradient + self._read(chunk) * self.rule.weight_decay
            yield chunk._replace(gradient=gradient)

    def _read(self, chunk: Chunk) -> Tensor:
        rows = self.parameter[chunk.at] if self.parameter.dim() else self.parameter
        return rows.reshape(chunk.gradient.shape).to(chunk.gradient.dtype)

    def _write_(self, chunk: Chunk, rows: Tensor) -> None:
        dtype = self.parameter.dtype
        if self.rounding_key is None:
            rounded = rows.to(dtype)
        else:
            ids = chunk.ids + self.first_row
            noise = _rounding.noise(self.rounding_key, ids, rows.shape[1])
            rounded = _rounding.to_half(rows.float(), dtype, noise)
        if self.parameter.dim():
            self.parameter[chunk.at] = rounded.view(-1, *self.parameter.shape[1:])
        else:
            self.parameter.copy_(rounded.view(()))


def check_ids(parameter: Tensor, gradient: Tensor) -> None:
    """Raises where a gradient names a row that the parameter does not have."""
    if isinstance(gradient, DeferredGradient):
        gradient.check_ids()
    if not gradient.is_sparse:
        return
    ids, _ = entries(gradient)
    if ids.numel():
        low, high = torch.stack(torch.aminmax(ids)).tolist()
        if low < 0 or high >= parameter.shape[0]:
            raise ids_error(parameter, low, high)


def ids_error(parameter: Tensor, low: int, high: int) -> ValueError:
    return ValueError(
        f"the gradient of the parameter of shape {list(parameter.shape)} must have row ids "
        f"between 0 and {parameter.shape[0] - 1}, got {low} to {high}"
    )
