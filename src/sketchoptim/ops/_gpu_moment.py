"""A moment as the GPU's kernels take it: constants, pointers, and the numbers that it keeps."""

import ctypes
import math
from typing import Any, NamedTuple, assert_never

import torch
from torch import Tensor

from .._sketch import SMALLEST_SCALE, Sketch
from ..moments import ArrayView, Average, CodesView, ColumnsView, Moment, SketchView
from ._triton import moments as kinds

_FORMS = {
    "linear": kinds.LINEAR.value,
    "paper": kinds.PAPER.value,
    "bucket": kinds.BUCKET.value,
    "conservative": kinds.CONSERVATIVE.value,
}


class Blank(NamedTuple):
    """Pointers that stand for those a kernel does not read, with the types of those it reads.

    A kernel is compiled with both branches of what only its counts decide, so types must agree.
    """

    numbers: Tensor
    """float32."""
    words: Tensor
    """int64."""

    @classmethod
    def over(cls, ledger: Tensor) -> "Blank":
        return cls(ledger.view(torch.float32), ledger.view(torch.int64))


class GpuMoment:
    """The arguments of launches for one moment; with None, for a moment that is not kept."""

    def __init__(self, moment: Moment | None, blank: Blank) -> None:
        self.kind, self.form, self.depth, self.width = kinds.NONE.value, 0, 0, 1
        self.blank = blank
        self.data = self.scales = self.book = self.borders = blank.numbers
        self.words = blank.words
        self.sketch: Sketch | None = None
        # In the memory of the state: torch takes longer to get at it.
        self.scale, self.writes = ctypes.c_float(1.0), ctypes.c_int64(0)
        self.expected = (1.0, 0)
        """What the device will have after the steps that were launched."""
        self.counts_writes = False
        self.decays = False
        self.block = self.block_rows = 0
        self.columns: Tensor | None = None
        self.factors, self.shares = blank.numbers, blank.words
        view = None if moment is None else moment.kernel_view()
        if isinstance(view, ColumnsView):
            self.columns, view = view.columns, view.rows
            self.factors = self.columns.new_empty(2, *self.columns.shape)
            self.shares = torch.empty_like(self.columns, dtype=torch.int64)
        match view:
            case None:
                pass
            case ArrayView(values, is_by_row):
                self.data = values
                self.kind = (kinds.ROW_WISE if is_by_row else kinds.EXACT).value
            case CodesView(codes, block=0):
                self.kind, self.data = kinds.EXACT.value, codes
            case CodesView():
                self.kind, self.data, self.scales = kinds.CODES.value, view.codes, view.scales
                self.book, self.borders = view.book, view.borders
                self.block, self.block_rows = view.block, view.rows
            case SketchView(sketch, form, is_by_row):
                self.sketch, self.form = sketch, _FORMS[form]
                self.kind = (kinds.ROW_SKETCH if is_by_row else kinds.SKETCH).value
                self.depth, self.width = sketch.depth, sketch.width
                self.data, self.words = sketch.counters, sketch.words
                self.decays = form in ("linear", "conservative")
                self.scale = ctypes.c_float.from_address(sketch.scale.data_ptr())
                if sketch.writes is not None:
                    self.writes = ctypes.c_int64.from_address(sketch.writes.data_ptr())
                    self.counts_writes = True
            case _:
                assert_never(view)

    @property
    def is_linear(self) -> bool:
        """Whether all its rows are added before any is read."""
        return self.sketch is not None and self.form == kinds.LINEAR.value

    @property
    def is_in_order(self) -> bool:
        """Whether its rows move one after the other."""
        return self.sketch is not None and not self.decays

    @property
    def is_by_row(self) -> bool:
        return self.kind in (kinds.ROW_WISE.value, kinds.ROW_SKETCH.value)

    @property
    def is_conservative(self) -> bool:
        return self.sketch is not None and self.form == kinds.CONSERVATIVE.value

    def lasting(self) -> tuple[float, int]:
        """Scale and number of writes, as the host has them."""
        return self.scale.value, self.writes.value

    def set_lasting_(self, scale: float, writes: int) -> None:
        self.scale.value = scale
        if self.counts_writes:
            self.writes.value = writes
        self.expected = self.lasting()

    def predict_(self, average: Average) -> None:
        """Moves scale and writes on the host as the device will, unless it refuses the step.

        Only a sum has a start, and a sum does not decay; so the start stays as it is.
        """
        if self.decays:
            scale = self.expected[0] * average.decay
            if scale == 0.0:
                scale = 1.0
            elif scale < SMALLEST_SCALE:
                scale, _ = math.frexp(scale)
            self.scale.value = scale
        writes = self.expected[1]
        if self.counts_writes:
            self.writes.value = writes = writes + 1
        self.expected = self.scale.value, writes

    def unused(self) -> "GpuMoment":
        """What stands for it in a step whose rule does not move it."""
        return GpuMoment(None, self.blank)

    @property
    def is_raised_at_once(self) -> bool:
        """Whether its counters are raised by atomic instructions, which take 32 bits."""
        return self.is_conservative and self.data.dtype == torch.float32

    @property
    def is_added_to(self) -> bool:
        """Whether rows are added to it in order before any row of the parameter moves."""
        return self.is_linear or (self.is_conservative and not self.is_raised_at_once)

    @property
    def counters(self) -> int:
        """Counters that a decay of the whole may have to rescale."""
        return self.data.numel() if self.decays else 0

    def pointers(self, name: str) -> dict[str, Any]:
        return {
            name: self.data,
            f"{name}_hash": self.words,
            f"{name}_width": self.width,
            f"{name}_units": self.scales,
            f"{name}_book": self.book,
            f"{name}_borders": self.borders,
        }

    def column_pointers(self) -> dict[str, Any]:
        """What the factors of columns follow from, they and their inverses, and a step's shares."""
        columns = self.blank.numbers if self.columns is None else self.columns
        return {"columns": columns, "factors": self.factors, "shares": self.shares}

    def constants(self, name: str, average: Average | None) -> dict[str, int]:
        return {
            f"{name}_KIND": self.kind,
            f"{name}_FORM": self.form,
            f"{name}_MODE": _mode_of(average),
            f"{name}_DEPTH": self.depth,
            f"{name}_DECAYS": self.decays,
            # Whether a step starts by forgetting everything.
            f"{name}_FORGETS": self.decays and average is not None and average.decay == 0.0,
        }

    def row_bytes(self, name: str, dim: int) -> dict[str, int]:
        """The bytes from a row's numbers to those of the next, by pointer."""
        numbers = {kinds.EXACT.value: dim, kinds.CODES.value: dim, kinds.ROW_WISE.value: 1}
        found = {name: numbers.get(self.kind, 0) * self.data.element_size()}
        if self.kind == kinds.CODES.value:
            found[f"{name}_units"] = -(-dim // self.block) * self.scales.element_size()
        return found


def _mode_of(average: Average | None) -> int:
    """The way to move that `Average.delta` takes."""
    mode = kinds.GENERAL
    if average is None or average.weight == 1 - average.decay:
        mode = kinds.AVERAGE
    elif average.decay == 1:
        mode = kinds.SUM
    return int(mode.value)
