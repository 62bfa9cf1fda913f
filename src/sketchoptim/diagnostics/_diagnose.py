"""The state of an optimizer at one moment: spread of mass, load and error of every sketch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from .._rows import row_chunks
from ..moments import Moment, SketchedMoment
from ..moments._sketch_error import SketchError, estimate_error, occupied
from ..optim._names import named_parameters
from ..optim._opened import opened_moments
from ..optim.base import Group, Optimizer
from ..storage import Memory, RowWise, Sketched, Storage
from ._plan import described_storage
from ._power_law import PowerLaw, power_law, power_law_of
from ._text_table import text_table

Quantity = Literal["tensor", "gradient", "first", "second"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was seen of one gradient or moment of one parameter; None where it does not apply."""

    parameter: str
    quantity: Quantity
    power_law: PowerLaw
    kept: str = ""
    """Where a moment lives; empty for a gradient or a tensor."""
    top_kept: float | None = None
    """The share of the heaviest rows of the last look that still are among them."""
    occupied: float | None = None
    """The share of a sketch's buckets into which something was written, over all hash rows."""
    load: float | None = None
    """Active rows a bucket a step: rows of the gradient there is now over the width."""
    limit: float | None = None
    """The load above which a sketched first moment drowns: 2 / (1 - its decay)."""
    error: SketchError | None = None
    """What the sketch says of its own error."""

    @property
    def is_overflowing(self) -> bool:
        """Whether the load is past the limit, where a first moment drowns in collisions."""
        return self.load is not None and self.limit is not None and self.load > self.limit

    def scalars(self) -> dict[str, float]:
        """The numbers there are, by name, for a log."""
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
    """What was seen of an optimizer or a tensor; printing it gives a table."""

    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        header = (
            "parameter", "quantity", "kept", "half in rows", "half in elements", "top kept",
            "occupied", "load", "relative error", "",
        )  # fmt: skip
        lines: list[tuple[str, ...]] = [header]
        for found in self.findings:
            law = found.power_law
            error = None if found.error is None else found.error.relative
            overflow = f"load above {found.limit:.0f}" if found.is_overflowing else ""
            lines.append(
                (
                    *(found.parameter, found.quantity, found.kept),
                    *(_share(law.row_midpoint), _share(law.element_midpoint)),
                    *(_share(found.top_kept), _share(found.occupied)),
                    "" if found.load is None else f"{found.load:.3g}",
                    _share(error),
                    overflow,
                )
            )
        return text_table(lines, left=3)


@torch.no_grad()
def diagnose(subject: Optimizer | Tensor, *, since: Diagnosis | None = None) -> Diagnosis:
    """What is to be known of an optimizer's gradients and moments, or of one tensor, as it stands.

    For each gradient there is now and for each moment: the share of rows, and of elements, that
    holds half of the mass (small is good: `PowerLaw`), and the share of the 100 heaviest rows that
    still are among them. For each sketch: how full it is, active rows a bucket a step (while there
    is a gradient), whether that is past the limit of a first moment, and its own error, estimated
    from the table alone (`estimate_error`).

    Goes over all rows in chunks: time grows with the parameters, memory does not, and nothing is
    changed. `watch` does the same every so many steps of a run.

    Args:
        subject: One of our optimizers, or a tensor of any shape, sparse or dense.
        since: What an earlier call gave, to compare the heaviest rows with.

    >>> table = torch.nn.Embedding(10_000, 64, sparse=True)
    >>> optimizer = so.Adam([("table", table.weight)])
    >>> table(torch.arange(300)).square().sum().backward()
    >>> optimizer.step()
    >>> for found in diagnose(optimizer).findings:
    ...     print(found.quantity, found.kept, found.load)
    gradient  None
    second by row, 3 x 416 0.7211538461538461
    """
    if isinstance(subject, Tensor):
        found = [Finding(parameter="tensor", quantity="tensor", power_law=power_law(subject))]
    elif isinstance(subject, Optimizer):
        found = list(_findings(subject))
    else:
        kind = type(subject).__name__
        raise TypeError(f"subject must be an optimizer of sketchoptim or a tensor, got {kind}")
    earlier = {} if since is None else {(it.parameter, it.quantity): it for it in since.findings}
    return Diagnosis(tuple(_compared(it, earlier) for it in found))


def _findings(optimizer: Optimizer) -> Iterator[Finding]:
    for name, parameter, group in named_parameters(optimizer):
        if not parameter.numel():
            continue  # of which there is nothing to know
        gradient = parameter.grad
        if gradient is not None:
            yield Finding(parameter=name, quantity="gradient", power_law=power_law(gradient))
        if not optimizer.state.get(parameter):
            continue
        memory = optimizer._memory(parameter, group)
        storages = optimizer.storages(group, memory)
        for moment_name, moment in opened_moments(optimizer, parameter, group).items():
            storage = storages[moment_name]
            width = moment.sketch.width if isinstance(moment, SketchedMoment) else None
            found = Finding(
                parameter=name,
                quantity=moment_name,
                power_law=_law_of(moment, storage, parameter),
                kept=described_storage(storage, width),
            )
            if isinstance(moment, SketchedMoment):
                found = _with_sketch(found, moment, parameter)
                if moment_name == "first":
                    found = replace(found, limit=_limit(optimizer, group, memory))
            yield found


def _law_of(moment: Moment, storage: Storage, parameter: Tensor) -> PowerLaw:
    is_by_row = isinstance(storage, RowWise) or (
        isinstance(storage, Sketched) and storage.granularity == "row"
    )
    dim = parameter.shape[1:].numel()
    rows = row_chunks(parameter, dim=1 if is_by_row else dim)
    chunks = ((ids, moment.estimate(ids)) for _, ids in rows)
    return power_law_of(chunks, rows=_rows(parameter), dim=dim)


def _with_sketch(found: Finding, moment: SketchedMoment, parameter: Tensor) -> Finding:
    sketch = moment.sketch
    touched = _touched(parameter)
    return replace(
        found,
        occupied=occupied(sketch),
        load=None if touched is None else touched / sketch.width,
        error=estimate_error(sketch, _rows(parameter)),
    )


def _touched(parameter: Tensor) -> int | None:
    """How many rows the gradient there is now moves."""
    gradient = parameter.grad
    if gradient is None:
        return None
    return int(gradient._indices()[0].unique().numel()) if gradient.is_sparse else _rows(parameter)


def _limit(optimizer: Optimizer, group: Group, memory: Memory) -> float | None:
    average = optimizer._rule(group, 1, memory=memory, is_sparse=True).first
    return None if average is None or average.decay == 1 else 2 / (1 - average.decay)


def _compared(found: Finding, earlier: Mapping[tuple[str, Quantity], Finding]) -> Finding:
    last = earlier.get((found.parameter, found.quantity))
    if last is None:
        return found
    return replace(found, top_kept=found.power_law.kept_since(last.power_law))


def _rows(parameter: Tensor) -> int:
    return parameter.shape[0] if parameter.dim() else 1


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
