"""One sequence of launches for several tables: what they share, and their words of arguments."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._gpu_launches import OPTIONS, Call, Launch, launches
from ._triton import moves, prepare, together

# The kernels that take several tables, and the pointers whose type differs between calls.
_KERNELS: dict[Any, tuple[Any, dict[str, str]]] = {
    prepare.begin: (together.begin, {"PARAMETER": "entries"}),
    prepare.inspect: (together.inspect, {"PARAMETER": "entries", "SECOND": "second"}),
    moves.move_rows: (
        together.move_rows,
        {"PARAMETER": "entries", "FIRST": "first", "SECOND": "second"},
    ),
    prepare.finish: (together.finish, {"FIRST": "first", "SECOND": "second"}),
}
_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
    torch.uint8: tl.uint8,
}
# Addresses of rows are taken to be multiples of this many bytes, as torch allocates them.
_ALIGNMENT = 16
_KEYS_AT_ONCE = 1024


def groups_of(calls: Sequence[Call]) -> list[list[int]]:
    """The numbers of calls that can be launched together, two at least in a group."""
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for number, call in enumerate(calls):
        if call.positions and _is_aligned(call):
            planned = launches(call, is_sorted=True)
            if all(launch.kernel in _KERNELS for launch in planned):
                shared = (call.ledger.device, *map(_shared, planned))
                groups[shared].append(number)
    return [group for group in groups.values() if len(group) > 1]


class SortKeys(NamedTuple):
    """The one sort of the ids of several tables."""

    keys: Tensor
    sorted_keys: Tensor
    order: Tensor

    def run_(self) -> None:
        torch.sort(self.keys, stable=True, out=(self.sorted_keys, self.order))


def launches_together(calls: Sequence[Call]) -> list[Launch | SortKeys]:
    """The launches for a group: keys, a sort, and each kernel once for all tables."""
    planned = [launches(call, is_sorted=True) for call in calls]
    found: list[Launch | SortKeys] = []
    rows: list[list[int]] = []
    typed = [_types(launch) for launch in planned[0]]
    if calls[0].ids is not None:
        keys, rows = _sort_together_(calls, planned)
        blocks = max(triton.cdiv(call.positions, _KEYS_AT_ONCE) for call in calls)
        arguments = {"keys": keys.keys, "BLOCK": _KEYS_AT_ONCE, **OPTIONS}
        ids = tuple(call.ids for call in calls if call.ids is not None)
        found = [Launch(together.collect_keys, (blocks, len(calls)), arguments, ids), keys]
    for own, types in zip(zip(*planned, strict=True), typed, strict=True):
        launch = own[0]
        names = [name for name in launch.kernel.arg_names if not name.isupper()]
        rows += [[_word(it.arguments[name]) for name in names] for it in own]
        grid = (max(it.grid[0] for it in own), len(calls))
        arguments = {**_constants(launch), **types}
        addressed = (value for it in own for value in it.arguments.values())
        kept = [value for value in addressed if isinstance(value, Tensor)]
        kept += [call.values for call in calls]
        found.append(Launch(_KERNELS[launch.kernel][0], grid, arguments, tuple(kept)))
    words = _matrix(rows, calls[0].ledger.device)
    parts = iter(words.split(len(calls)))
    for launch in found:
        if isinstance(launch, Launch):
            launch.arguments.update(words=next(parts), stride=words.shape[1])
    return found


def _sort_together_(
    calls: Sequence[Call], planned: Sequence[list[Launch]]
) -> tuple[SortKeys, list[list[int]]]:
    """The sort, and the words of `collect_keys`; planned launches read each its part of the list.

    Positions count from the beginning of the whole list, so the address of a table's entries is
    moved back by those before it.
    """
    counts = [call.positions for call in calls]
    begins = [0, *accumulate(counts)]
    lists = [calls[0].flag.new_empty(begins[-1], dtype=torch.int64) for _ in range(3)]
    sort = SortKeys(*lists)
    words = []
    for call, launched, begin in zip(calls, planned, begins, strict=False):
        words.append([_word(call.ids), call.positions, begin])
        entries = call.values.data_ptr() - begin * call.dim * call.values.element_size()
        own = {"ids": sort.sorted_keys[begin:], "order": sort.order[begin:], "entries": entries}
        for launch in launched:
            launch.arguments.update(
                (name, it) for name, it in own.items() if name in launch.arguments
            )
    return sort, words


def _is_aligned(call: Call) -> bool:
    tensors = (call.values, call.parameter, call.first.data, call.second.data)
    row_bytes = call.dim * call.values.element_size()
    return row_bytes % _ALIGNMENT == 0 and not any(it.data_ptr() % _ALIGNMENT for it in tensors)


def _types(launch: Launch) -> dict[str, Any]:
    """The types of those pointers that are not the same in all calls of a kernel."""
    _, names = _KERNELS[launch.kernel]
    return {name: _TYPES[launch.arguments[it].dtype] for name, it in names.items()}


def _constants(launch: Launch) -> dict[str, Any]:
    """What a kernel is compiled for, its arguments in capitals, and with what options."""
    names = [name for name in launch.kernel.arg_names if name.isupper()]
    return {name: launch.arguments[name] for name in (*names, *OPTIONS)}


def _shared(launch: Launch) -> Hashable:
    """What tables must have in common to be taken by one launch."""
    types = tuple(_types(launch).items())
    return launch.kernel, tuple(_constants(launch).items()), types


def _word(argument: Any) -> int:
    return argument.data_ptr() if isinstance(argument, Tensor) else int(argument)


def _matrix(rows: list[list[int]], device: torch.device) -> Tensor:
    """The words on the device, each row filled up with zeros."""
    longest = max(map(len, rows))
    words = torch.tensor(
        [row + [0] * (longest - len(row)) for row in rows], dtype=torch.int64, device="cpu"
    )
    if device.type == "cpu":
        return words
    return words.pin_memory().to(device, non_blocking=True)
