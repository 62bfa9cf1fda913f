"""One sequence of launches for several tables: what they share, and their words of arguments."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from ._gpu_launches import OPTIONS, Launch
from ._gpu_plan import KEYS_AT_ONCE, NUMBERS, ROWS_ALIGNED, WORD, Plan
from ._triton import moves, prepare, together

# The kernels that take several tables.
_KERNELS: dict[Any, Any] = {
    prepare.begin: together.begin,
    prepare.inspect: together.inspect,
    moves.move_rows: together.move_rows,
    prepare.finish: together.finish,
}
_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.uint8: tl.uint8,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}
_LARGEST_KEY = {torch.int32: 2**31 - 1, torch.int64: 2**62}
_ENTRIES, _IDS, _ORDER, _COUNT = WORD["entries"], WORD["ids"], WORD["order"], WORD["count"]
_PARTIALS, _ROW_VALUES = WORD["partials"], WORD["row_values"]
_UNSORTED_IDS, _KEYS = WORD["unsorted_ids"], WORD["keys"]
_NUMBERS = [WORD[name] for name in NUMBERS]
_FLOATS_ALIGNED = 4


class Step(Protocol):
    """What is launched of one table."""

    @property
    def plan(self) -> Plan: ...
    @property
    def ids(self) -> Tensor | None: ...
    @property
    def values(self) -> Tensor: ...
    @property
    def count(self) -> int: ...
    def numbers(self) -> tuple[int, ...]: ...


AnyStep = TypeVar("AnyStep", bound=Step)


class Family:
    """The launches for tables of one kind, which have the same constants and types."""

    def __init__(self, plan: Plan) -> None:
        self.keys, self.is_sorting, self.device = plan.keys, plan.is_sorting, plan.bound.flag.device
        types = {
            "ELEMENT": _TYPES[plan.bound.parameter.dtype],
            "KEY": _TYPES[plan.keys if plan.is_sorting else torch.int64],
            "FIRST_NUMBER": _TYPES[plan.bound.first.data.dtype],
            "SECOND_NUMBER": _TYPES[plan.bound.second.data.dtype],
        }
        self.launches = []
        for it in plan.launches:
            given = {"words": None, **types, **it.arguments}
            kernel = _KERNELS[it.kernel]
            self.launches.append(
                Launch(kernel, it.grid, given, OPTIONS, rows=it.rows, others=it.others)
            )
        given = {"words": None, **types, "BLOCK": KEYS_AT_ONCE}
        self.sort = Launch(together.collect_keys, (1,), given, OPTIONS, rows=KEYS_AT_ONCE)

    @property
    def key(self) -> Hashable:
        """Equal for tables of one kind."""
        constants = [(it.kernel, *it.arguments.values()) for it in self.launches]
        return self.device, self.is_sorting, self.keys, *constants

    def parts(self, steps: Sequence[AnyStep]) -> Iterator[list[AnyStep]]:
        """Divides steps so that the keys of each part are small enough; gives ids a beginning."""
        part: list[AnyStep] = []
        begin = 0
        for step in steps:
            rows = -(-(step.plan.bound.rows + 1) // ROWS_ALIGNED) * ROWS_ALIGNED
            if part and begin + rows > _LARGEST_KEY[self.keys]:
                yield part
                part, begin = [], 0
            step.plan.shift_(begin if self.is_sorting else 0)
            part.append(step)
            begin += rows
        yield part

    def run_(self, steps: Sequence[Step]) -> None:
        """Launches the steps of several tables."""
        kept: list[Tensor] = []
        lists = None
        if self.is_sorting:
            total = sum([step.count for step in steps])
            empty = steps[0].values.new_empty
            lists = (
                empty(total, dtype=self.keys), empty(total, dtype=self.keys),
                empty(total, dtype=torch.int64),
            )  # fmt: skip
            kept += lists
        words = self._words(steps, lists, kept)
        most = max([step.count for step in steps])
        if lists is not None:
            self._launch(self.sort, words, self.sort.programs(most), len(steps), kept)
            torch.sort(lists[0], stable=True, out=(lists[1], lists[2]))
        for index, launch in enumerate(self.launches):
            programs = launch.programs(most)
            if not launch.rows:
                programs = max([step.plan.launches[index].grid[0] for step in steps])
            self._launch(launch, words, programs, len(steps), kept)

    def _words(
        self, steps: Sequence[Step], lists: tuple[Tensor, ...] | None, kept: list[Tensor]
    ) -> Tensor:
        """The words of all tables on the device, a row for each.

        Positions in the sorted list count from the beginning of the whole, so the address of a
        table's entries is moved back by those before it.
        """
        sizes = [_sizes(step) for step in steps]
        floats = torch.empty(sum(map(sum, sizes)), dtype=torch.float32, device=self.device)
        address = floats.data_ptr()
        begin = 0
        keys, ids, order = (it.data_ptr() for it in lists) if lists is not None else (0, 0, 0)
        key_bytes = self.keys.itemsize
        for step, (partials, row_values) in zip(steps, sizes, strict=True):
            plan, values = step.plan, step.values
            row = plan.words
            row[_COUNT], row[_ENTRIES] = step.count, values.data_ptr()
            row[_PARTIALS], row[_ROW_VALUES] = address, address + 4 * partials
            address += 4 * (partials + row_values)
            if step.ids is not None:
                row[_IDS] = row[_UNSORTED_IDS] = step.ids.data_ptr()
                kept.append(step.ids)
            if lists is not None:
                row[_ENTRIES] -= begin * plan.row_bytes["parameter"]
                row[_KEYS], row[_IDS] = keys + begin * key_bytes, ids + begin * key_bytes
                row[_ORDER] = order + begin * 8
                begin += step.count
            for word, number in zip(_NUMBERS, step.numbers(), strict=True):
                row[word] = number
            kept.append(values)
            kept += plan.kept
        kept.append(floats)
        joined = bytearray().join([step.plan.words for step in steps])
        words = torch.frombuffer(joined, dtype=torch.int64)
        if self.device.type == "cpu":
            return words.clone()
        return words.pin_memory().to(self.device, non_blocking=True)

    def _launch(
        self, launch: Launch, words: Tensor, programs: int, tables: int, kept: list[Tensor]
    ) -> None:
        launch.arguments["words"] = words
        launch.grid, launch.kept = (programs, tables, 1), kept
        launch.run_()
        launch.release_()


def _sizes(step: Step) -> tuple[int, int]:
    """How many numbers a step needs besides, each a multiple of 16 bytes."""
    partials = step.plan.partials_of(step.count)
    row_values = step.count if step.plan.has_row_values else 0
    return partials, -(-row_values // _FLOATS_ALIGNED) * _FLOATS_ALIGNED


_families: dict[Hashable, Family] = {}


def family_of(plan: Plan) -> Family | None:
    """The family of a plan; None if its table is launched by itself."""
    if plan.kind.is_empty or not plan.is_aligned:
        return None
    if not all(launch.kernel in _KERNELS for launch in plan.launches):
        return None
    family = Family(plan)
    return _families.setdefault(family.key, family)
