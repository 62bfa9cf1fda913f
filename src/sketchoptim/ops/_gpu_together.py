"""One sequence of launches for several tables: what they share, and their words of arguments."""

import struct
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from .._locks import fork_safe_lock
from ._gpu_launches import OPTIONS, Launch
from ._gpu_plan import KEYS_AT_ONCE, NUMBERS, ROWS_ALIGNED, Plan
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
# The words of a step, in their order at the beginning of a row; the others stay.
_OF_A_STEP = ("ids", "order", "entries", "partials", "row_values", "count", "unsorted_ids", "keys")
_STEP_WORDS = struct.Struct(f"{len(_OF_A_STEP) + len(NUMBERS)}q")
assert together.WORDS[: len(_OF_A_STEP) + len(NUMBERS)] == _OF_A_STEP + NUMBERS
_ROW_BYTES = 8 * len(together.WORDS)
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
    def places(self) -> tuple[int, int, int]: ...
    @property
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
        self.lock = fork_safe_lock()
        self.numbers: list[int] = []
        """Of the plans that were launched last."""
        self.found: list[tuple[int, Part]] = []
        """How they were divided. Nothing here keeps a table in memory."""
        self.sort = Launch(together.collect_keys, (1,), given, OPTIONS, rows=KEYS_AT_ONCE)

    @property
    def key(self) -> Hashable:
        """Equal for tables of one kind."""
        constants = [(it.kernel, *it.arguments.values()) for it in self.launches]
        return self.device, self.is_sorting, self.keys, *constants

    def parts(self, steps: Sequence[AnyStep]) -> Iterator[tuple["Part", Sequence[AnyStep]]]:
        """Divides steps so that the keys of each part are small enough."""
        numbers = [step.plan.number for step in steps]
        if numbers != self.numbers:  # they mostly are those of the step before
            self.found = list(self._parts([step.plan for step in steps]))
            self.numbers = numbers
        for begin, part in self.found:
            yield part, steps[begin : begin + part.tables]

    def _parts(self, plans: Sequence[Plan]) -> Iterator[tuple[int, "Part"]]:
        least_ids: list[int] = []
        begin = least_id = 0
        for number, plan in enumerate(plans):
            rows = -(-(plan.bound.rows + 1) // ROWS_ALIGNED) * ROWS_ALIGNED
            if least_ids and least_id + rows > _LARGEST_KEY[self.keys]:
                yield begin, Part(self, plans[begin:number], least_ids)
                begin, least_ids, least_id = number, [], 0
            least_ids.append(least_id if self.is_sorting else 0)
            least_id += rows
        yield begin, Part(self, plans[begin:], least_ids)


class Part:
    """The launches of tables whose keys are sorted together."""

    def __init__(self, family: Family, plans: Sequence[Plan], least_ids: Sequence[int]) -> None:
        self.family, self.tables = family, len(plans)
        rows = [plan.shifted_words(it) for plan, it in zip(plans, least_ids, strict=True)]
        self.words = bytearray().join(rows)
        self.entry_bytes = plans[0].row_bytes["parameter"]
        self.programs = [
            max([plan.launches[index].grid[0] for plan in plans])
            for index in range(len(family.launches))
        ]

    def run_(self, steps: Sequence[Step]) -> None:
        """Launches the steps of its tables."""
        family, lists = self.family, None
        kept: list[Sequence[Tensor]] = [step.plan.kept for step in steps]
        counts = [step.places[2] for step in steps]
        if family.is_sorting:
            total = sum(counts)
            empty = steps[0].values.new_empty
            lists = (
                empty(total, dtype=family.keys), empty(total, dtype=family.keys),
                empty(total, dtype=torch.int64),
            )  # fmt: skip
            kept.append(lists)
        words, floats = self._step_words(steps, lists)
        kept += [(step.values,) if step.ids is None else (step.values, step.ids) for step in steps]
        kept.append((words, floats))
        most = max(counts)
        if lists is not None:
            self._launch(family.sort, words, family.sort.programs(most), kept)
            torch.sort(lists[0], stable=True, out=(lists[1], lists[2]))
        for launch, programs in zip(family.launches, self.programs, strict=True):
            self._launch(launch, words, launch.programs(most) if launch.rows else programs, kept)

    def _step_words(
        self, steps: Sequence[Step], lists: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, Tensor]:
        """The words of all tables on the device, a row for each, and memory for partial sums.

        Positions in the sorted list count from the beginning of the whole, so the address of a
        table's entries is moved back by those before it.
        """
        device = self.family.device
        sizes = [_sizes(step.plan, step.places[2]) for step in steps]
        floats = torch.empty(sum(map(sum, sizes)), dtype=torch.float32, device=device)
        address = floats.data_ptr()
        keys, ids, order = (it.data_ptr() for it in lists) if lists is not None else (0, 0, 0)
        key_bytes, entry_bytes = self.family.keys.itemsize, self.entry_bytes
        pack, rows = _STEP_WORDS.pack_into, self.words
        begin = offset = 0
        for step, (partials, row_values) in zip(steps, sizes, strict=True):
            given, values, count = step.places
            key = begin * key_bytes
            pack(
                rows, offset, given if lists is None else ids + key, order + 8 * begin,
                values - begin * entry_bytes, address, address + 4 * partials, count, given,
                keys + key, *step.numbers,
            )  # fmt: skip
            address += 4 * (partials + row_values)
            offset += _ROW_BYTES
            if lists is not None:
                begin += count
        words = torch.frombuffer(rows, dtype=torch.int64)
        if device.type == "cpu":
            return words.clone(), floats
        return words.pin_memory().to(device, non_blocking=True), floats

    def _launch(
        self, launch: Launch, words: Tensor, programs: int, kept: Sequence[Sequence[Tensor]]
    ) -> None:
        launch.arguments["words"] = words
        launch.grid, launch.kept = (programs, self.tables, 1), kept
        launch.run_()
        launch.release_()


def _sizes(plan: Plan, count: int) -> tuple[int, int]:
    """How many numbers a step needs besides, each a multiple of 16 bytes."""
    row_values = -(-count // _FLOATS_ALIGNED) * _FLOATS_ALIGNED if plan.has_row_values else 0
    return plan.partials_of(count), row_values


_families: dict[Hashable, Family] = {}


def family_of(plan: Plan) -> Family | None:
    """The family of a plan; None if its table is launched by itself."""
    if plan.kind.is_empty or not plan.is_aligned:
        return None
    if not all(launch.kernel in _KERNELS for launch in plan.launches):
        return None
    family = Family(plan)
    return _families.setdefault(family.key, family)
