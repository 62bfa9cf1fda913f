"""The memories that a parameter may get, from the smallest to the largest that is offered."""

import math
import mmap
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from .._validation import check_choice
from ..moments import Name, Table
from ..storage import FEW_ROWS, PRESETS, Exact, Granularity, Memory, RowWise, Sketched, Storage
from ._plan import PlannedParameter
from ._prediction import NO_ERROR, PredictedError, Workload, predicted_error
from ._ranks import RankBytes, rank_bytes, rows_of_rank
from ._shapes import ParameterShape

Finest = Literal["default", "array"]

# Sketches that are offered: the smallest has a counter for 512 rows or elements, each next one is
# wider by a factor of 2^(1/16), up to the finest, or up to an array without collisions if that is
# no larger. Errors are predicted at every 32nd.
_SMALLEST_RATIO, _RUNGS_PER_OCTAVE = 2.0**-9, 16
_SMALLEST_WIDTH = 16
_PREDICTED_EVERY = 32
_NEGLIGIBLE = 1e-12
_EXACT = PRESETS["exact"]


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What tables may choose from, the same for all tables of an optimizer.

    Args:
        names: The moments that the algorithm has.
        granularity, fold_when: Of the sketches.
        finest: The upper limit for every table.
        first: A storage for the first moment.
        fill: The number that moments start from.
        ranks: Processes that divide the rows of every parameter; bytes are those of one of them.
    """

    names: tuple[Name, ...]
    granularity: Granularity
    first: Storage | None
    fold_when: float | None
    finest: Finest
    fill: float
    ranks: int = 1

    def __post_init__(self) -> None:
        check_choice("finest", self.finest, get_args(Finest))

    def sketches(self, rows: int) -> list[Sketched]:
        """Sketches of increasing width for a table of `rows` rows."""
        rungs = range(round(-math.log2(_SMALLEST_RATIO) * _RUNGS_PER_OCTAVE))
        ratios = (_SMALLEST_RATIO * 2.0 ** (rung / _RUNGS_PER_OCTAVE) for rung in rungs)
        by_ratio = (Sketched(ratio=ratio, fold_when=self.fold_when) for ratio in ratios)
        widths = {max(_SMALLEST_WIDTH, sketch.counters_shape(rows, 1)[1]) for sketch in by_ratio}
        if self.finest == "default":
            default = self.default_width(rows)
            widths = {default, *(width for width in widths if width < default)}
        return [
            Sketched(
                width=width,
                granularity=self.granularity,
                conservative=True,
                fold_when=self.fold_when,
                columns=self.granularity == "row",
            )
            for width in sorted(widths)
        ]

    def default_width(self, rows: int) -> int:
        """The width of a sketch that is given neither a width nor a ratio."""
        default = Sketched(granularity=self.granularity, fold_when=self.fold_when)
        return max(_SMALLEST_WIDTH, default.counters_shape(rows, 1)[1])

    def array(self) -> Storage:
        """Storage without collisions, in the granularity of the sketches."""
        return RowWise(columns=True) if self.granularity == "row" else Exact()

    def moment_bytes(self, parameter: ParameterShape, memory: Memory) -> dict[str, int]:
        """The bytes of each moment on a rank, as its storage declares them."""
        return {name: found.state for name, found in self._rank_bytes(parameter, memory).items()}

    def sent_bytes(self, parameter: ParameterShape, memory: Memory) -> int:
        """The bytes that a rank sends in a step so that all ranks keep the same moments."""
        return sum(found.sent for found in self._rank_bytes(parameter, memory).values())

    def parameter_bytes(self, parameter: ParameterShape) -> int:
        """The bytes of the weights on a rank."""
        if not parameter.shape:
            return parameter.nbytes
        rows = rows_of_rank(parameter.shape[0], self.ranks)
        return rows * math.prod(parameter.shape[1:]) * parameter.dtype.itemsize

    def _rank_bytes(self, parameter: ParameterShape, memory: Memory) -> dict[str, RankBytes]:
        table = Table(torch.Size(parameter.shape), parameter.dtype, torch.device("meta"))
        found: dict[str, RankBytes] = {}
        for name in self.names:
            storage: Storage | None = getattr(memory, name)
            found[name] = RankBytes(0, 0)
            if storage is not None:
                found[name] = rank_bytes(storage, name, table, ranks=self.ranks, fill=self.fill)
        return found

    def exact_bytes(self, parameter: ParameterShape) -> int:
        """The bytes of all moments in the parameter's shape and dtype."""
        return sum(self.moment_bytes(parameter, _EXACT).values())


class Rung(NamedTuple):
    """One memory that a parameter may get."""

    memory: Memory | None
    """None for a parameter that is kept exact because its gradients are dense."""
    sketch: Sketched | None = None
    """The sketch of the second moment; None if it has no collisions."""
    state_bytes: int = 0


@dataclass(frozen=True)
class Ladder:
    """The memories that one parameter may get, from the smallest to the largest."""

    parameter: ParameterShape
    offer: Offer
    rungs: tuple[Rung, ...]
    workload: Workload | None = None
    """How training touches a table; None for other parameters."""

    @classmethod
    def of(cls, parameter: ParameterShape, offer: Offer, workload: Workload | None) -> "Ladder":
        """The ladder of a parameter; a table has a workload."""
        rungs = [Rung(None)]
        if workload is not None and "second" in offer.names:
            sketches = offer.sketches(parameter.shape[0])
            rungs = [Rung(Memory(first=offer.first, second=sketch), sketch) for sketch in sketches]
            rungs.append(Rung(Memory(first=offer.first, second=offer.array())))
        elif workload is not None:
            rungs = [Rung(Memory(first=offer.first))]
        *below, last = (
            rung._replace(
                state_bytes=sum(offer.moment_bytes(parameter, rung.memory or _EXACT).values())
            )
            for rung in rungs
        )
        kept = [rung for rung in below if rung.state_bytes < last.state_bytes]
        if offer.finest == "array" or not kept or parameter.shape[0] < FEW_ROWS:
            kept.append(last)
        return cls(parameter, offer, tuple(kept), workload)

    @property
    def state_bytes(self) -> list[int]:
        """The bytes at every rung, increasing."""
        return [rung.state_bytes for rung in self.rungs]

    def error(self, number: int) -> PredictedError | None:
        """The predicted error at one rung; None without a second moment to compress."""
        memory, sketch, _ = self.rungs[number]
        if self.workload is None or memory is None or memory.second is None:
            return None
        if sketch is None:
            return NO_ERROR
        return predicted_error(sketch, self.workload, dim=math.prod(self.parameter.shape[1:]))

    def errors(self) -> NDArray[np.float64]:
        """The relative error at every rung, decreasing: predicted at some, a power law between."""
        last = len(self.rungs) - 1
        widest = max((at for at, rung in enumerate(self.rungs) if rung.sketch), default=0)
        predicted = sorted({*range(0, last, _PREDICTED_EVERY), widest, last})
        found = [(self.error(number) or NO_ERROR).relative for number in predicted]
        curve = np.interp(np.arange(last + 1), predicted, np.log(np.maximum(found, _NEGLIGIBLE)))
        return np.minimum.accumulate(np.exp(curve))

    def plan_at(self, number: int) -> PlannedParameter:
        """The parameter with the memory at one rung."""
        parameter, memory = self.parameter, self.rungs[number].memory
        return PlannedParameter(
            name=parameter.name,
            shape=parameter.shape,
            parameter_bytes=self.offer.parameter_bytes(parameter),
            moment_bytes=self.offer.moment_bytes(parameter, memory or _EXACT),
            exact_bytes=self.offer.exact_bytes(parameter),
            memory=memory,
            error=self.error(number),
            exponent=None if self.workload is None else self.workload.frequencies.exponent,
            reason=self._reason(number),
            sent_bytes=self.offer.sent_bytes(parameter, memory or _EXACT),
            file_bytes=parameter.nbytes if parameter.is_in_file else 0,
            paged_bytes=self._paged_bytes(),
        )

    def _paged_bytes(self) -> int:
        """The bytes of a file's pages that hold the rows of a step, if no two rows share a page."""
        if self.workload is None or not self.parameter.is_in_file:
            return 0
        size = self.parameter.nbytes // self.parameter.shape[0]
        # A row may begin anywhere in a page, at multiples of this.
        pages = 1 + (size - math.gcd(size, mmap.PAGESIZE)) / mmap.PAGESIZE
        touched = self.workload.distinct_rows()
        return min(self.parameter.nbytes, math.ceil(touched * pages) * mmap.PAGESIZE)

    def _reason(self, number: int) -> str:
        memory, sketch, _ = self.rungs[number]
        if memory is None:
            return "dense gradients"
        if memory.second is None:
            return "no second moment"
        if sketch is None:
            # As SparseAdam's state; a sketch decays as a whole in each step.
            forgets = self.workload is not None and self.workload.decay < 1
            return f"no collisions{', decays when touched' if forgets else ''}"
        rows, width = self.parameter.shape[0], sketch.width or 1
        is_default = width == self.offer.default_width(rows)
        return f"{rows / width:,.0f} rows a bucket{', the default' if is_default else ''}"
