"""Which kernels a step launches, in which order, and with what."""

import struct
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..moments import Average
from ._gpu_moment import GpuMoment, mode_of
from ._rule import FusedRule
from ._triton import blocks, moves, ordered, prepare, rows
from .reference import LARGEST_GRADIENT

# Numbers of a tile: 8 for each of the 128 threads of a program keeps all kernels free of spills.
TILE = 1024
MOST_COLUMNS = 1024
# Columns that a program takes where rows move one after the other: 4 for each thread of a warp.
COLUMNS_IN_ORDER = 128
# Parts that the buckets of a hash row are divided among, where rows are added in order.
MOST_PARTS = 64
ROWS_OF_A_PART = 64
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


class Launch(NamedTuple):
    """One kernel of a step: what a trace of calls records."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    kept: tuple[Tensor, ...] = ()
    """Tensors that the kernel finds by addresses among its numbers."""

    def run_(self) -> None:
        self.kernel[self.grid](**self.arguments)


class Call(NamedTuple):
    """What the launches of one step need to know."""

    parameter: Tensor
    first_row: int
    ledger: Tensor
    flag: Tensor
    report: Tensor
    first: GpuMoment
    second: GpuMoment
    shape: Shape
    rule: FusedRule
    ids: Tensor | None
    values: Tensor
    is_checked: bool
    rounding_key: int | None

    @property
    def rows(self) -> int:
        return self.parameter.shape[:1].numel()

    @property
    def dim(self) -> int:
        return self.parameter.shape[1:].numel()

    @property
    def positions(self) -> int:
        """Positions that kernels go through: entries of a sparse gradient, rows of a dense one."""
        return self.rows if self.ids is None else self.ids.numel()


def launches(call: Call, *, is_sorted: bool = False) -> list[Launch]:
    """The kernels of a step in their order; sorts the ids of a sparse gradient first.

    Unless they are to be sorted later: then the arguments `ids` and `order` are to be replaced.
    """
    return _Plan(call, is_sorted).launches()


class _Plan:
    """Arguments that several kernels of a step share."""

    def __init__(self, call: Call, is_sorted: bool) -> None:
        self.call, self.rule = call, call.rule
        self.first = call.first if call.rule.first is not None else call.first.unused()
        self.second = call.second if call.rule.second is not None else call.second.unused()
        blank = call.first.blank
        ids = order = blank.words
        partials = row_values = blank.numbers
        if call.ids is not None:
            ids, order = (call.ids, call.ids) if is_sorted else call.ids.sort(stable=True)
            pieces = triton.cdiv(call.positions, rows.PIECE.value)
            if pieces > 1:
                partials = call.ledger.new_empty(pieces * call.dim, dtype=torch.float32)
        if self.second.is_by_row:
            row_values = call.ledger.new_empty(call.positions, dtype=torch.float32)
        self.has_pieces = partials is not blank.numbers
        self.gradient = {
            "entries": call.values, "ids": ids, "order": order, "partials": partials,
            "count": call.positions, "DIM": call.dim,
        }  # fmt: skip
        self.read = {
            **self.gradient, "parameter": call.parameter, "ledger": call.ledger, "flag": call.flag,
            "first_row": call.first_row, "IS_DENSE": call.ids is None,
            "IS_MAXIMIZING": self.rule.maximize, "DECAYS": self.rule.weight_decay != 0.0,
        }  # fmt: skip
        self.row_values = {"row_values": row_values}
        shape = call.shape
        self.tile = {"STRIDE": shape.stride, "BLOCK": shape.block, "ROWS": shape.rows}
        self.forgets = {
            "FIRST_FORGETS": self.first.forgets(self.rule.first),
            "SECOND_FORGETS": self.second.forgets(self.rule.second),
        }

    def launches(self) -> list[Launch]:
        if not self.call.positions:
            return [self._begin(), *self._forget(), self._finish()]
        moving = [*self._forget(), *self._add(), *self._move()]
        return [self._begin(), *self._inspect(), *moving, self._finish()]

    def _begin(self) -> Launch:
        call, rule = self.call, self.rule
        correction, first_beta, second_beta = _correction(rule)
        first, second = (rule.first or Average(1.0, 0.0)), (rule.second or Average(1.0, 0.0))
        numbers = {
            "step_size": rule.step_size, "second_root": rule.second_root, "clip": rule.clip or 0.0,
            "first_beta": first_beta, "second_beta": second_beta, "eps": rule.eps,
            "weight_decay": rule.weight_decay, "shrink": rule.shrink,
            "nesterov": rule.nesterov or 0.0, "first_weight": first.weight,
            "first_decay": first.decay, "second_weight": second.weight,
            "second_decay": second.decay,
        }  # fmt: skip
        programs = triton.cdiv(call.positions, call.shape.rows) if self.has_pieces else 0
        return Launch(
            prepare.begin,
            (1 + programs,),
            {
                "ledger": call.ledger,
                "flag": call.flag,
                **self.gradient,
                "expected_step": -1 if rule.schedule is None else rule.schedule.step,
                "weights_key": call.rounding_key or 0,
                **{name: _bits(number) for name, number in numbers.items()},
                "CORRECTION": correction,
                "FIRST_DECAYS": self.first.decays,
                "SECOND_DECAYS": self.second.decays,
                "HAS_PIECES": self.has_pieces,
                **self.forgets,
                **self.tile,
                **OPTIONS,
            },
        )

    def _inspect(self) -> list[Launch]:
        call, second = self.call, self.second
        if not (call.is_checked or second.is_by_row or call.ids is not None):
            return []
        arguments = {
            **self.read, **self.row_values, **self.tile, **second.pointers("second"),
            **second.constants("SECOND", self.rule.second), "row_count": call.rows,
            "LARGEST": LARGEST_GRADIENT, "IS_CHECKED": call.is_checked,
            "SECOND_FORGETS": self.forgets["SECOND_FORGETS"], **OPTIONS,
        }  # fmt: skip
        return [Launch(prepare.inspect, (triton.cdiv(call.positions, call.shape.rows),), arguments)]

    def _forget(self) -> list[Launch]:
        if not any(self.forgets.values()):
            return []
        arguments = {"flag": self.call.flag, **self._counters(), **self.forgets, **OPTIONS}
        return [Launch(prepare.forget, self._counters_grid(), arguments)]

    def _add(self) -> list[Launch]:
        """What has to be in the sketches before rows move, in ascending order of rows."""
        call, first, second = self.call, self.first, self.second
        found = []
        first_depth = first.depth if first.is_linear else 0
        is_raised_in_order = second.is_conservative and not second.is_raised_at_once
        second_depth = second.depth if second.is_linear or is_raised_in_order else 0
        if first_depth or second_depth:
            block = min(triton.next_power_of_2(call.dim), COLUMNS_IN_ORDER)
            parts = max(1, min(MOST_PARTS, call.positions // ROWS_OF_A_PART))
            grid = (triton.cdiv(call.dim, block), parts * max(first_depth, second_depth), 2)
            arguments = {
                **self.read, **self.row_values, **first.pointers("first"),
                **second.pointers("second"), "PARTS": parts, "FIRST_DEPTH": first_depth,
                "SECOND_DEPTH": second_depth, "SECOND_KIND": second.kind,
                "SECOND_FORM": second.form, "BLOCK": block, **OPTIONS_IN_ORDER,
            }  # fmt: skip
            found.append(Launch(ordered.add_rows, grid, arguments))
        if second.is_by_row and second.is_in_order:
            arguments = {
                "ids": self.gradient["ids"], "count": call.positions, "ledger": call.ledger,
                "flag": call.flag, "first_row": call.first_row, "IS_DENSE": call.ids is None,
                **self.row_values, **second.pointers("second"),
                **second.constants("SECOND", self.rule.second), **OPTIONS_IN_ORDER,
            }  # fmt: skip
            del arguments["SECOND_KIND"]
            found.append(Launch(ordered.move_by_row, (1,), arguments))
        return found

    def _move(self) -> list[Launch]:
        call, rule, first, second = self.call, self.rule, self.first, self.second
        shape = call.shape
        is_after_eps = rule.schedule is not None and rule.schedule.is_after_eps is True
        has_root = is_after_eps or rule.second_root != 1.0
        flags = {
            "HAS_NESTEROV": rule.nesterov is not None, "HAS_ROOT": has_root,
            "HAS_CLIP": rule.clip is not None, "IS_STOCHASTIC": call.rounding_key is not None,
        }  # fmt: skip
        block_rows = max(first.block_rows, second.block_rows)
        if block_rows > 1:
            return self._move_blocks(flags, block_rows)
        arguments = {
            **self.read, **self.row_values, **flags, **self.tile,
            **first.pointers("first"), **first.codes("first"),
            **second.pointers("second"), **second.codes("second"),
            **first.constants("FIRST", rule.first), **second.constants("SECOND", rule.second),
            "IS_RAISED": second.is_raised_at_once, "IS_RATIO": rule.is_ratio,
        }  # fmt: skip
        if any(it.is_in_order and not it.is_by_row for it in (first, second)):
            block = stride = min(triton.next_power_of_2(call.dim), COLUMNS_IN_ORDER)
            if first.block or second.block:  # a program takes whole blocks of codes
                block, stride = shape.block, shape.stride
            arguments |= {"STRIDE": stride, "BLOCK": block, "ROWS": 1, **OPTIONS_IN_ORDER}
            grid = (triton.cdiv(call.dim, stride),)
            return [Launch(moves.move_rows_in_order, grid, arguments)]
        # The ratio form divides in every hash row, which takes more registers.
        tile_rows = max(1, shape.rows // 2) if rule.is_ratio else shape.rows
        arguments |= {"ROWS": tile_rows, **OPTIONS}
        return [Launch(moves.move_rows, (triton.cdiv(call.positions, tile_rows),), arguments)]

    def _move_blocks(self, flags: dict[str, bool], block_rows: int) -> list[Launch]:
        call, first, second = self.call, self.first, self.second
        block = triton.next_power_of_2(block_rows * call.dim)
        tile_rows = max(1, TILE // block)
        groups = call.positions if call.ids is not None else triton.cdiv(call.rows, block_rows)
        arguments = {
            **self.read, **flags, "first": first.data, **first.codes("first"),
            "second": second.data, **second.codes("second"), "row_count": call.rows,
            "FIRST_KIND": first.kind, "FIRST_MODE": mode_of(self.rule.first),
            "SECOND_KIND": second.kind, "SECOND_MODE": mode_of(self.rule.second),
            "BLOCK_ROWS": block_rows, "BLOCK": block, "ROWS": tile_rows, **OPTIONS,
        }  # fmt: skip
        return [Launch(blocks.move_blocks, (triton.cdiv(groups, tile_rows),), arguments)]

    def _finish(self) -> Launch:
        call = self.call
        arguments = {
            "ledger": call.ledger, "flag": call.flag, "report": call.report, **self._counters(),
            "HAS_FIRST": self.rule.first is not None, "HAS_SECOND": self.rule.second is not None,
            "FIRST_DECAYS": self.first.decays, "SECOND_DECAYS": self.second.decays, **OPTIONS,
        }  # fmt: skip
        return Launch(prepare.finish, self._counters_grid(), arguments)

    def _counters(self) -> dict[str, Any]:
        return {
            "first": self.first.data, "first_size": self.first.counters,
            "second": self.second.data, "second_size": self.second.counters,
            "BLOCK": COUNTERS_AT_ONCE,
        }  # fmt: skip

    def _counters_grid(self) -> tuple[int]:
        most = max(self.first.counters, self.second.counters)
        programs = triton.cdiv(most, COUNTERS_AT_ONCE)
        return (max(1, min(programs, MOST_PROGRAMS_OF_COUNTERS)),)


def _correction(rule: FusedRule) -> tuple[int, float, float]:
    """The kind of correction, and the decays that it needs."""
    schedule = rule.schedule
    if schedule is None:
        return prepare.PLAIN.value, 0.0, 0.0
    if schedule.is_after_eps is None:
        return prepare.RATE_DECAY.value, schedule.rate_decay, 0.0
    kind = prepare.BIAS_AFTER_EPS if schedule.is_after_eps else prepare.BIAS_BEFORE_EPS
    return kind.value, schedule.first_decay, schedule.second_decay


def _bits(number: float) -> int:
    """The 64 bits of a float64 as an integer: Triton takes Python's floats as float32."""
    bits: int = struct.unpack("q", struct.pack("d", number))[0]
    return bits
