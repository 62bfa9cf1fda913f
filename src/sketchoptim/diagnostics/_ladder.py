"""The memories that a parameter may get, from the smallest to the finest that is offered."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from .. import moments
from ..moments import Name, Table
from ..storage import PRESETS, Exact, Granularity, Memory, RowWise, Sketched, Storage
from ._plan import PlannedParameter
from ._prediction import NO_ERROR, PredictedError, Workload, predicted_error
from ._shapes import ParameterShape

Finest = Literal["default", "array"]

# Sketches that are offered: from 512 numbers of a row or element a counter, finer by a 25th each,
# to the finest, or where an array without collisions is no larger; errors are predicted at every
# 32nd.
_SMALLEST_RATIO, _RUNGS_AN_OCTAVE = 2.0**-9, 16
_SMALLEST_WIDTH = 16
# Tables of so few rows may have an array in any case: there is nothing to save.
_FEW_ROWS = 1024
_PREDICTED_EVERY = 32
_NEGLIGIBLE = 1e-12


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What tables may choose from, the same for all of an optimizer.

    Args:
        names: The moments that the algorithm has.
        granularity, fold_when: Of the sketches.
        finest: What no table gets more than.
        first: A storage for the first moment.
        fill: What second moments start from.
    """

    names: tuple[Name, ...]
    granularity: Granularity
    first: Storage | None
    fold_when: float | None
    finest: Finest
    fill: float

    def __post_init__(self) -> None:
        if self.finest not in get_args(Finest):
            raise ValueError(f"finest must be one of {list(get_args(Finest))}, got {self.finest!r}")

    def sketches(self, rows: int) -> list[Memory]:
        """Sketches of rising width for a table of so many rows."""
        rungs = range(round(-math.log2(_SMALLEST_RATIO) * _RUNGS_AN_OCTAVE))
        ratios = (_SMALLEST_RATIO * 2.0 ** (rung / _RUNGS_AN_OCTAVE) for rung in rungs)
        by_ratio = (Sketched(ratio=ratio, fold_when=self.fold_when) for ratio in ratios)
        widths = {max(_SMALLEST_WIDTH, sketch.table_shape(rows, 1)[1]) for sketch in by_ratio}
        if self.finest == "default":
            default = self.default_width(rows)
            widths = {default, *(width for width in widths if width < default)}
        return [
            self._with(
                Sketched(
                    width=width,
                    granularity=self.granularity,
                    conservative=True,
                    fold_when=self.fold_when,
                )
            )
            for width in sorted(widths)
        ]

    def default_width(self, rows: int) -> int:
        """The width of a sketch that is given neither a width nor a ratio."""
        default = Sketched(granularity=self.granularity, fold_when=self.fold_when)
        return max(_SMALLEST_WIDTH, default.table_shape(rows, 1)[1])

    def without_collisions(self) -> Memory:
        """An array in the granularity of the sketches."""
        return self._with(RowWise() if self.granularity == "row" else Exact())

    def _with(self, second: Storage) -> Memory:
        return Memory(first=self.first, second=second)

    def moment_bytes(self, parameter: ParameterShape, memory: Memory) -> dict[str, int]:
        """What the tensors of each moment take: made as an optimizer makes them, on no device."""
        shape, meta = torch.Size(parameter.shape), torch.device("meta")
        found: dict[str, int] = {}
        for name in self.names:
            storage: Storage | None = getattr(memory, name)
            table = Table(shape, parameter.dtype, meta, 0)
            fill = self.fill if name == "second" else 0.0
            tensors = {} if storage is None else moments.create(storage, table, fill=fill)
            found[name] = sum(tensor.nbytes for tensor in tensors.values())
        return found

    def exact_bytes(self, parameter: ParameterShape) -> int:
        """What the moments take in the parameter's shape and dtype."""
        return sum(self.moment_bytes(parameter, PRESETS["exact"]).values())


@dataclass(frozen=True)
class Ladder:
    """The memories that one parameter may get, from the smallest to the finest."""

    parameter: ParameterShape
    offer: Offer
    memories: tuple[Memory | None, ...]
    bytes: tuple[int, ...]
    workload: Workload | None = None
    """Of a table."""

    @classmethod
    def of(cls, parameter: ParameterShape, offer: Offer, workload: Workload | None) -> "Ladder":
        """What a parameter may get; a table has a workload."""
        memories: list[Memory | None] = [None]
        if workload is not None and "second" in offer.names:
            memories = [*offer.sketches(parameter.shape[0]), offer.without_collisions()]
        elif workload is not None:
            memories = [Memory(first=offer.first)]
        sizes = [
            sum(offer.moment_bytes(parameter, memory or PRESETS["exact"]).values())
            for memory in memories
        ]
        kept = [rung for rung, size in enumerate(sizes) if size < sizes[-1]]
        if offer.finest == "array" or not kept or parameter.shape[0] <= _FEW_ROWS:
            kept.append(len(sizes) - 1)
        return cls(
            parameter,
            offer,
            tuple(memories[rung] for rung in kept),
            tuple(sizes[rung] for rung in kept),
            workload,
        )

    def error(self, rung: int) -> PredictedError | None:
        """The error at one rung, predicted; None where there is no second moment to compress."""
        memory = self.memories[rung]
        if self.workload is None or memory is None or memory.second is None:
            return None
        if not isinstance(memory.second, Sketched):
            return NO_ERROR
        dim = math.prod(self.parameter.shape[1:])
        return predicted_error(memory.second, self.workload, dim=dim)

    def errors(self) -> NDArray[np.float64]:
        """The relative error at every rung, falling: predicted at some, a power law in between."""
        last = len(self.memories) - 1
        widest = max(rung for rung in range(last + 1) if rung == 0 or self._is_sketch(rung))
        at = sorted({*range(0, last, _PREDICTED_EVERY), widest, last})
        found = [(self.error(rung) or NO_ERROR).relative for rung in at]
        curve = np.interp(np.arange(last + 1), at, np.log(np.maximum(found, _NEGLIGIBLE)))
        return np.minimum.accumulate(np.exp(curve))

    def _is_sketch(self, rung: int) -> bool:
        memory = self.memories[rung]
        return memory is not None and isinstance(memory.second, Sketched)

    def planned(self, rung: int) -> PlannedParameter:
        """The parameter with the memory at one rung."""
        parameter, memory = self.parameter, self.memories[rung]
        return PlannedParameter(
            name=parameter.name,
            shape=parameter.shape,
            parameter_bytes=parameter.nbytes,
            moment_bytes=self.offer.moment_bytes(parameter, memory or PRESETS["exact"]),
            exact_bytes=self.offer.exact_bytes(parameter),
            memory=memory,
            error=self.error(rung),
            exponent=None if self.workload is None else self.workload.frequencies.exponent,
            reason=self._reason(rung),
        )

    def _reason(self, rung: int) -> str:
        memory = self.memories[rung]
        if memory is None:
            return "dense gradients"
        if memory.second is None:
            return "no second moment"
        if not isinstance(memory.second, Sketched):
            # as SparseAdam's state, and unlike a sketch, which decays as a whole in each step
            forgets = self.workload is not None and self.workload.decay < 1
            return f"no collisions{', decays when touched' if forgets else ''}"
        rows, width = self.parameter.shape[0], memory.second.width or 1
        is_default = width == self.offer.default_width(rows)
        return f"{rows / width:,.0f} rows a bucket{', the default' if is_default else ''}"
