"""Gradients and moments of an optimizer as they are now: spread of mass, load and error."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from .._formatting import text_table
from .._names import named_parameters
from .._rows import row_chunks
from .._sketch import Sketch
from ..deferred import DeferredGradient, gradient_bytes, is_row_sparse, rows_of
from ..moments import Moment, SketchError, estimate_error, load_limit, occupied_share
from ..optim._binding import live_moments
from ..optim.base import Group, Optimizer
from ..theory import error_verdict
from ._power_law import PowerLaw, power_law, power_law_of

Quantity = Literal["tensor", "gradient", "first", "second"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The spread, load and error of one gradient or moment; None if a number does not apply."""

    parameter: str
    quantity: Quantity
    power_law: PowerLaw
    kept: str = ""
    """The storage of a moment, or the bytes of a gradient; empty for a tensor."""
    top_kept: float | None = None
    """The share of the earlier heaviest rows that are among the heaviest now."""
    occupied: float | None = None
    """The share of a sketch's buckets into which something was written, over all hash rows."""
    load: float | None = None
    """Active rows per bucket per step: rows of the current gradient over the width."""
    limit: float | None = None
    """The load above which a sketched first moment is mostly collisions: 2 / (1 - its decay)."""
    error: SketchError | None = None
    """The sketch's own estimate of its error."""

    @property
    def is_overflowing(self) -> bool:
        """Whether the load is above the limit of a first moment."""
        return self.load is not None and self.limit is not None and self.load > self.limit

    @property
    def verdict(self) -> str:
        """ "fine", "wide", or "too narrow" with the reason; empty for what is not sketched."""
        if self.is_overflowing:
            return f"too narrow: load above {self.limit:.0f}"
        return "" if self.error is None else error_verdict(self.error.relative)

    def scalars(self) -> dict[str, float]:
        """The numbers that apply, by name, for a log."""
        found = {
            "row_midpoint": self.power_law.row_midpoint,
            "element_midpoint": self.power_law.element_midpoint,
            "top_kept": self.top_kept,
            "occupied": self.occupied,
            "load": self.load,
            "load_over_limit": self.load / self.limit if self.load and self.limit else None,
            "error": None if self.error is None else self.error.absolute,
            "relative_error": None if self.error is None else self.error.relative,
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Diagnosis:
    """The findings for an optimizer or a tensor; printing it gives a table."""

    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        header = (
            "parameter", "quantity", "kept", "half in rows", "half in elements", "top kept",
            "occupied", "load", "relative error", "verdict",
        )  # fmt: skip
        lines: list[tuple[str, ...]] = [header]
        for found in self.findings:
            law = found.power_law
            error = None if found.error is None else found.error.relative
            lines.append(
                (
                    *(found.parameter, found.quantity, found.kept),
                    *(_share(law.row_midpoint), _share(law.element_midpoint)),
                    *(_share(found.top_kept), _share(found.occupied)),
                    "" if found.load is None else f"{found.load:.3g}",
                    _share(error),
                    found.verdict,
                )
            )
        return text_table(lines, left=3)


@torch.no_grad()
def diagnose(subject: Optimizer | Tensor, *, since: Diagnosis | None = None) -> Diagnosis:
    """Findings on an optimizer's gradients and moments, or on one tensor, as they are now.

    For each current gradient and each moment: the share of rows, and of elements, that holds half
    of the mass (small is good: `PowerLaw`), and the share of the earlier 100 heaviest rows that are
    among them now. For each sketch: how full it is, active rows per bucket per step (while there is
    a gradient), its error, estimated from the counters alone (`estimate_error`), and a verdict:
    "fine", "wide", or "too narrow" with the reason (`sketchoptim.theory.error_verdict`; a first
    moment is too narrow also if its load is above `Finding.limit`).

    A deferred gradient that a step has used has no finding, because its weight has moved.

    `diagnose` reads all rows in chunks: time grows with the parameters, memory does not, and
    nothing is modified. `watch` calls it at regular intervals during a run.

    Args:
        subject: One of our optimizers, or a tensor of any shape, sparse or dense.
        since: The result of an earlier call, to compare the heaviest rows with.

    >>> table = torch.nn.Embedding(10_000, 64, sparse=True)
    >>> optimizer = so.Adam([("table", table.weight)])
    >>> table(torch.arange(300)).square().sum().backward()
    >>> optimizer.step()
    >>> for found in diagnose(optimizer).findings:
    ...     print(found.quantity, found.kept, found.load)
    gradient 79,200 bytes None
    second by row x column, 3 x 416 0.7211538461538461
    """
    if isinstance(subject, Tensor):
        found = [Finding(parameter="tensor", quantity="tensor", power_law=power_law(subject))]
    elif isinstance(subject, Optimizer):
        found = list(_findings(subject))
    else:
        kind = type(subject).__name__
        raise TypeError(f"subject must be an optimizer of sketchoptim or a tensor, got {kind}")
    earlier = {} if since is None else {(it.parameter, it.quantity): it for it in since.findings}
    return Diagnosis(tuple(_compare(it, earlier) for it in found))


def _findings(optimizer: Optimizer) -> Iterator[Finding]:
    for name, parameter, group in named_parameters(optimizer):
        if not parameter.numel():
            continue
        gradient = parameter.grad
        is_stepped = isinstance(gradient, DeferredGradient) and not gradient.is_current
        if gradient is not None and not is_stepped:
            yield Finding(
                parameter=name,
                quantity="gradient",
                power_law=power_law(gradient),
                kept=f"{gradient_bytes(gradient):,} bytes",
            )
        if not optimizer.state.get(parameter):
            continue
        for moment in live_moments(optimizer, parameter, group):
            if moment is not None:
                yield _of_moment(name, moment, optimizer, parameter, group)


def _of_moment(
    name: str, moment: Moment, optimizer: Optimizer, parameter: Tensor, group: Group
) -> Finding:
    dim = parameter.shape[1:].numel()
    rows = row_chunks(parameter, dim=1 if moment.granularity == "row" else dim)
    chunks = ((ids, moment.estimate(ids)) for _, ids in rows)
    found = Finding(
        parameter=name,
        quantity=moment.name,
        power_law=power_law_of(chunks, rows=_row_count(parameter), dim=dim),
        kept=moment.describe(),
    )
    if moment.sketch is None:
        return found
    found = _with_sketch(found, moment.sketch, parameter)
    is_first = moment.name == "first"
    return replace(found, limit=_limit(optimizer, parameter, group)) if is_first else found


def _with_sketch(found: Finding, sketch: Sketch, parameter: Tensor) -> Finding:
    touched = _touched_rows(parameter)
    return replace(
        found,
        occupied=occupied_share(sketch),
        load=None if touched is None else touched / sketch.width,
        error=estimate_error(sketch, _row_count(parameter)),
    )


def _touched_rows(parameter: Tensor) -> int | None:
    """How many rows the current gradient moves; None without a gradient."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if not is_row_sparse(gradient):
        return _row_count(parameter)
    return len(rows_of(gradient))


def _limit(optimizer: Optimizer, parameter: Tensor, group: Group) -> float | None:
    memory = optimizer.memory_in_force(parameter, group)
    average = optimizer.rule(group, 1, memory=memory, is_sparse=True).first
    limit = math.inf if average is None else load_limit(average.decay)
    return limit if math.isfinite(limit) else None


def _compare(found: Finding, earlier: Mapping[tuple[str, Quantity], Finding]) -> Finding:
    last = earlier.get((found.parameter, found.quantity))
    if last is None:
        return found
    return replace(found, top_kept=found.power_law.kept_since(last.power_law))


def _row_count(parameter: Tensor) -> int:
    return parameter.shape[0] if parameter.dim() else 1


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
