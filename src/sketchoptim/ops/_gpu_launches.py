"""The kernels that a step launches, their order and their arguments."""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..moments import Average
from ._gpu_moment import GpuMoment
from ._rule import FusedRule
from ._triton import blocks, moves, ordered, prepare, rows
from .reference import LARGEST_GRADIENT

# Numbers of a tile: 8 for each of the 128 threads of a program keeps all kernels free of spills.
TILE = 1024
MOST_COLUMNS = 1024
# Columns that a program takes where rows move one after the other: 4 for each thread of a warp.
COLUMNS_IN_ORDER = 128
# All counters are rescaled once in thousands of steps; in the others these programs do nothing.
COUNTERS_AT_ONCE = 1024
MOST_PROGRAMS_OF_COUNTERS = 256
# Without fusion a * b + c is rounded twice, as in the reference. Without a limit NVIDIA's assembler
# spills a register or two for the sake of more programs at a time; AMD's takes no limit.
_COMMON: dict[str, Any] = {"enable_fp_fusion": False}
if torch.version.hip is None:
    _COMMON["maxnreg"] = 128
OPTIONS = {"num_warps": 4, **_COMMON}
OPTIONS_IN_ORDER = {"num_warps": 1, **_COMMON}

_UNMOVED = Average(1.0, 0.0)
Grid = tuple[int, int, int]


class Shape(NamedTuple):
    """How kernels cut rows into tiles."""

    stride: int
    """Columns that a tile covers."""
    block: int
    """The next power of two."""
    rows: int
    """Rows of a tile."""

    @classmethod
    def of(cls, dim: int, first: GpuMoment, second: GpuMoment) -> "Shape":
        coded = max(first.block, second.block)
        stride = min(coded, dim) if coded else triton.next_power_of_2(dim)
        if stride > MOST_COLUMNS:
            # A loop over the columns of a row needs registers of its own.
            return cls(MOST_COLUMNS // 2, MOST_COLUMNS // 2, 1)
        block = triton.next_power_of_2(stride)
        return cls(stride, block, max(1, TILE // block))


class Launch:
    """One kernel of a step, kept from step to step.

    Args:
        kernel: Of Triton.
        grid: How many programs; the first number may change with the count of positions.
        arguments: Of the kernel, by name.
        options: Of the compiler.
        rows: Positions that a program takes, if their count changes the grid.
        others: Programs beside those.
        kept: Tensors that the kernel finds by addresses among its numbers.
    """

    __slots__ = (
        "arguments", "compiled", "grid", "inputs", "kept", "kernel", "options", "others", "rows",
    )  # fmt: skip

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: dict[str, Any],
        options: dict[str, Any],
        *,
        rows: int = 0,
        others: int = 0,
        kept: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        self.kernel, self.options, self.kept = kernel, options, kept
        self.grid: Grid = (*grid, 1, 1)[:3]  # type: ignore[assignment]
        self.rows, self.others = rows, others
        self.arguments = {name: arguments[name] for name in kernel.arg_names}
        self.inputs = [name for name in INPUTS if name in self.arguments]
        self.compiled: Any = None
        """What Triton made of it: types and alignment of its arguments do not change."""

    def give_(self, inputs: dict[str, Any]) -> None:
        """Takes what changes from step to step, by the names of `INPUTS`."""
        arguments = self.arguments
        for name in self.inputs:
            arguments[name] = inputs[name]
        if self.rows:
            self.grid = (self.programs(inputs["count"]), 1, 1)

    def release_(self) -> None:
        """Lets go of the tensors of a step."""
        for name in self.inputs:
            self.arguments[name] = None
        self.kept = ()

    def programs(self, positions: int) -> int:
        """The first number of the grid for a count of positions."""
        return -(-positions // self.rows) + self.others if self.rows else self.grid[0]

    def run_(self) -> None:
        """Launches it; later launches leave out Triton's search for what it has compiled."""
        if self.compiled is None:
            self.compiled = self.kernel[self.grid](**self.arguments, **self.options)
        else:
            self.compiled[self.grid](*self.arguments.values())


class Bound(NamedTuple):
    """A parameter and its moments, as kernels take them."""

    parameter: Tensor
    first_row: int
    ledger: Tensor
    flag: Tensor
    report: Tensor
    first: GpuMoment
    second: GpuMoment
    shape: Shape

    @property
    def rows(self) -> int:
        return self.parameter.shape[:1].numel()

    @property
    def dim(self) -> int:
        return self.parameter.shape[1:].numel()


class Kind(NamedTuple):
    """The parts of a step, besides its rule, that decide which kernels it launches."""

    is_dense: bool
    is_sorted: bool
    """Whether the ids of a sparse gradient ascend strictly, as coalesced ones do."""
    is_empty: bool
    has_pieces: bool
    """Whether equal ids may be so many that they are summed in pieces."""
    parts: int
    """Parts that the buckets of a hash row are divided among, where rows are added in order."""
    is_checked: bool
    is_stochastic: bool
    is_aligned: bool
    """Whether ids and values begin at multiples of 16 bytes."""


# Arguments that change from step to step: tensors, their size, numbers, or all of them as words.
INPUTS = (
    "entries", "ids", "keys", "order", "partials", "row_values", "count", "expected_step",
    "weights_key", "step_size", "shrink", "words",
)  # fmt: skip


def launches(bound: Bound, rule: FusedRule, kind: Kind) -> list[Launch]:
    """The kernels of a step in their order, with all arguments but `INPUTS`."""
    return _Launches(bound, rule, kind).all()


class _Launches:
    """Arguments that several kernels of a step share."""

    def __init__(self, bound: Bound, rule: FusedRule, kind: Kind) -> None:
        self.bound, self.rule, self.kind = bound, rule, kind
        self.first = bound.first if rule.first is not None else bound.first.unused()
        self.second = bound.second if rule.second is not None else bound.second.unused()
        shape = bound.shape
        self.given: dict[str, Any] = {
            **dict.fromkeys(INPUTS), **_numbers(rule),
            "parameter": bound.parameter, "ledger": bound.ledger, "flag": bound.flag,
            "report": bound.report, "first_row": bound.first_row, "row_count": bound.rows,
            "least_id": 0, **self.second.column_pointers(),
            "HAS_COLUMNS": self.second.columns is not None,
            **self.first.pointers("first"), **self.second.pointers("second"),
            "LAYOUT": _layout(kind), "DIM": bound.dim, "IS_MAXIMIZING": rule.maximize,
            "DECAYS": rule.weight_decay != 0.0, "STRIDE": shape.stride, "BLOCK": shape.block,
            "ROWS": shape.rows,
            **self.first.constants("FIRST", rule.first),
            **self.second.constants("SECOND", rule.second),
        }  # fmt: skip

    def _launch(self, kernel: Any, options: dict[str, Any], **own: Any) -> Launch:
        grid, rows, others = own.pop("grid", (1,)), own.pop("rows", 0), own.pop("others", 0)
        return Launch(kernel, grid, {**self.given, **own}, options, rows=rows, others=others)

    def all(self) -> list[Launch]:
        if self.kind.is_empty:
            return [self._begin(), *self._forget(), self._finish()]
        moving = [*self._forget(), *self._add(), self._move()]
        return [self._begin(), *self._inspect(), *moving, self._finish()]

    def _begin(self) -> Launch:
        has_pieces = self.kind.has_pieces
        return self._launch(
            prepare.begin, OPTIONS, CORRECTION=_correction(self.rule), HAS_PIECES=has_pieces,
            rows=self.bound.shape.rows if has_pieces else 0, others=1,
        )  # fmt: skip

    def _inspect(self) -> list[Launch]:
        kind = self.kind
        if not (kind.is_checked or self.second.is_by_row or not kind.is_dense):
            return []
        arguments = {"LARGEST": LARGEST_GRADIENT, "IS_CHECKED": kind.is_checked}
        return [self._launch(prepare.inspect, OPTIONS, **arguments, rows=self.bound.shape.rows)]

    def _forget(self) -> list[Launch]:
        if not (self.given["FIRST_FORGETS"] or self.given["SECOND_FORGETS"]):
            return []
        return [self._launch(prepare.forget, OPTIONS, **self._counters())]

    def _add(self) -> list[Launch]:
        """What has to be in the sketches before rows move, in ascending order of rows."""
        first, second = self.first, self.second
        found = []
        first_depth = first.depth if first.is_added_to else 0
        second_depth = second.depth if second.is_added_to else 0
        if first_depth or second_depth:
            block = min(triton.next_power_of_2(self.bound.dim), COLUMNS_IN_ORDER)
            parts = self.kind.parts
            depths = {"FIRST_DEPTH": first_depth, "SECOND_DEPTH": second_depth}
            tile = {"PARTS": parts, "BLOCK": block, **depths}
            grid = (triton.cdiv(self.bound.dim, block), parts * max(first_depth, second_depth), 2)
            found.append(self._launch(ordered.add_rows, OPTIONS_IN_ORDER, **tile, grid=grid))
        if second.is_by_row and second.is_in_order:
            found.append(self._launch(ordered.move_by_row, OPTIONS_IN_ORDER))
        return found

    def _move(self) -> Launch:
        rule, first, second, shape = self.rule, self.first, self.second, self.bound.shape
        is_after_eps = rule.schedule is not None and rule.schedule.is_after_eps is True
        self.given |= {
            "HAS_NESTEROV": rule.nesterov is not None,
            "HAS_ROOT": is_after_eps or rule.second_root != 1.0,
            "HAS_CLIP": rule.clip is not None, "IS_STOCHASTIC": self.kind.is_stochastic,
            "IS_RAISED": second.is_raised_at_once, "IS_RATIO": rule.is_ratio,
        }  # fmt: skip
        block_rows = max(first.block_rows, second.block_rows)
        if block_rows > 1:
            return self._move_blocks(block_rows)
        if any(it.is_in_order and not it.is_by_row for it in (first, second)):
            block = stride = min(triton.next_power_of_2(self.bound.dim), COLUMNS_IN_ORDER)
            if first.block or second.block:  # a program takes whole blocks of codes
                block, stride = shape.block, shape.stride
            grid = (triton.cdiv(self.bound.dim, stride),)
            kernel, tile = moves.move_rows_in_order, {"STRIDE": stride, "BLOCK": block, "ROWS": 1}
            return self._launch(kernel, OPTIONS_IN_ORDER, **tile, grid=grid)
        # The ratio form divides in every hash row, which takes more registers.
        rows = max(1, shape.rows // 2) if rule.is_ratio else shape.rows
        return self._launch(moves.move_rows, OPTIONS, ROWS=rows, rows=rows)

    def _move_blocks(self, block_rows: int) -> Launch:
        block = triton.next_power_of_2(self.bound.dim)
        groups = max(1, TILE // (block * triton.next_power_of_2(block_rows)))
        tile = {"BLOCK_ROWS": block_rows, "BLOCK": block, "ROWS": groups}
        rows = groups * block_rows if self.kind.is_dense else groups
        return self._launch(blocks.move_blocks, OPTIONS, **tile, rows=rows)

    def _finish(self) -> Launch:
        has = {"HAS_FIRST": self.rule.first is not None, "HAS_SECOND": self.rule.second is not None}
        return self._launch(prepare.finish, OPTIONS, **self._counters(), **has)

    def _counters(self) -> dict[str, Any]:
        sizes = (self.first.counters, self.second.counters)
        programs = triton.cdiv(max(sizes), COUNTERS_AT_ONCE)
        return {
            "first_size": sizes[0], "second_size": sizes[1], "BLOCK": COUNTERS_AT_ONCE,
            "grid": (max(1, min(programs, MOST_PROGRAMS_OF_COUNTERS)),),
        }  # fmt: skip


def _numbers(rule: FusedRule) -> dict[str, int]:
    """The numbers of a rule that its steps have in common, as the 64 bits of float64 numbers.

    Triton takes Python's floats as float32.
    """
    schedule, first, second = rule.schedule, rule.first or _UNMOVED, rule.second or _UNMOVED
    betas = (0.0, 0.0)
    if schedule is not None:
        is_rate = schedule.is_after_eps is None
        betas = (schedule.rate_decay if is_rate else schedule.first_decay, schedule.second_decay)
    names = (
        "second_root", "clip", "first_beta", "second_beta", "eps", "weight_decay", "nesterov",
        "first_weight", "first_decay", "second_weight", "second_decay",
    )  # fmt: skip
    numbers = (
        rule.second_root, rule.clip or 0.0, *betas, rule.eps, rule.weight_decay,
        rule.nesterov or 0.0, first.weight, first.decay, second.weight, second.decay,
    )  # fmt: skip
    return dict(zip(names, bits_of(*numbers), strict=True))


def bits_of(*numbers: float) -> tuple[int, ...]:
    """The 64 bits of float64 numbers, as integers."""
    return struct.unpack(f"{len(numbers)}q", struct.pack(f"{len(numbers)}d", *numbers))


def _layout(kind: Kind) -> int:
    """How positions stand for rows."""
    if kind.is_dense:
        return int(rows.DENSE.value)
    return int((rows.UNIQUE if kind.is_sorted else rows.REPEATED).value)


def _correction(rule: FusedRule) -> int:
    """How the number of a step changes its numbers."""
    schedule = rule.schedule
    if schedule is None:
        return int(prepare.PLAIN.value)
    if schedule.is_after_eps is None:
        return int(prepare.RATE_DECAY.value)
    return int((prepare.BIAS_AFTER_EPS if schedule.is_after_eps else prepare.BIAS_BEFORE_EPS).value)
