"""The memories that a parameter may get, from the smallest to one without collisions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .. import moments
from ..moments import Name, Table
from ..storage import PRESETS, Exact, Granularity, Memory, RowWise, Sketched, Storage
from .plan import PlannedParameter
from .prediction import NO_ERROR, PredictedError, Workload, predicted_error
from .shapes import ParameterShape

# Sketches that are offered: from 512 numbers of a row or element a counter, finer by a 25th each,
# to where an array without collisions is no larger; errors are predicted at every 32nd.
_SMALLEST_RATIO, _RUNGS_AN_OCTAVE = 2.0**-9, 16
_SMALLEST_WIDTH = 16
_PREDICTED_EVERY = 32
_NEGLIGIBLE = 1e-12


@dataclass(frozen=True)
class Ladder:
    """The memories that one parameter may get, from the smallest to the one without collisions."""

    parameter: ParameterShape
    memories: tuple[Memory | None, ...]
    bytes: tuple[int, ...]
    workload: Workload | None = None
    """Of a table."""

    @classmethod
    def of(
        cls,
        parameter: ParameterShape,
        names: Sequence[Name],
        granularity: Granularity,
        first: Storage | None,
        workload: Workload | None,
    ) -> "Ladder":
        """What a parameter may get, whose optimizer has the moments `names`."""
        if workload is None:
            return cls(parameter, (None,), (exact_bytes(parameter, names),))
        if "second" not in names:
            memory = Memory(first=first)
            return cls(parameter, (memory,), (_bytes(parameter, memory, names),), workload)
        finest = Memory(first=first, second=RowWise() if granularity == "row" else Exact())
        largest = _bytes(parameter, finest, names)
        sketches = (
            Memory(first=first, second=sketch) for sketch in _sketches(parameter, granularity)
        )
        sized = [(memory, _bytes(parameter, memory, names)) for memory in sketches]
        sized = [(memory, size) for memory, size in sized if size < largest]
        memories, sizes = zip(*sized, (finest, largest), strict=True)
        return cls(parameter, memories, sizes, workload)

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
        if last == 0:
            return np.zeros(1)
        at = sorted({*range(0, last, _PREDICTED_EVERY), last - 1})
        found = [(self.error(rung) or NO_ERROR).relative for rung in at]
        curve = np.interp(np.arange(last), at, np.log(np.maximum(found, _NEGLIGIBLE)))
        return np.append(np.minimum.accumulate(np.exp(curve)), 0.0)

    def planned(self, rung: int, names: Sequence[Name]) -> PlannedParameter:
        """The parameter with the memory at one rung."""
        parameter, memory = self.parameter, self.memories[rung]
        return PlannedParameter(
            name=parameter.name,
            shape=parameter.shape,
            parameter_bytes=exact_bytes(parameter, ("second",)),
            moment_bytes=_moment_bytes(parameter, memory or PRESETS["exact"], names),
            exact_bytes=exact_bytes(parameter, names),
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
            return "no collisions"
        return f"{self.parameter.shape[0] / (memory.second.width or 1):,.0f} rows a bucket"


def _sketches(parameter: ParameterShape, granularity: Granularity) -> list[Sketched]:
    """Sketches of rising width for a table."""
    rungs = range(round(-math.log2(_SMALLEST_RATIO) * _RUNGS_AN_OCTAVE))
    ratios = (_SMALLEST_RATIO * 2.0 ** (rung / _RUNGS_AN_OCTAVE) for rung in rungs)
    shapes = (Sketched(ratio=ratio).table_shape(parameter.shape[0], 1) for ratio in ratios)
    widths = sorted({max(_SMALLEST_WIDTH, width) for _, width, _ in shapes})
    return [Sketched(width=width, granularity=granularity, conservative=True) for width in widths]


def _on_meta(parameter: ParameterShape) -> Table:
    shape = torch.Size(parameter.shape)
    return Table(shape, parameter.dtype, torch.device("meta"), 0)


def _moment_bytes(
    parameter: ParameterShape, memory: Memory, names: Sequence[Name]
) -> dict[str, int]:
    """What the tensors of each moment take: made as an optimizer makes them, but without memory."""
    found: dict[str, int] = {}
    for name in names:
        storage: Storage | None = getattr(memory, name)
        tensors = {} if storage is None else moments.create(storage, _on_meta(parameter))
        found[name] = sum(tensor.nbytes for tensor in tensors.values())
    return found


def _bytes(parameter: ParameterShape, memory: Memory, names: Sequence[Name]) -> int:
    return sum(_moment_bytes(parameter, memory, names).values())


def exact_bytes(parameter: ParameterShape, names: Sequence[Name]) -> int:
    """What the moments take in the parameter's shape and dtype."""
    return len(names) * parameter.dtype.itemsize * math.prod(parameter.shape)
