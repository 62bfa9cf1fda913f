"""First and second moments behind one interface, whatever they are stored in.

A storage (`storage.py`) has one file here with one `Moment` class. The class declares the tensors
it keeps, its parts; everything else in the library reads that declaration.
"""

from typing import Any

import torch
from torch import Tensor

from .. import _pages
from ..storage import Storage
from . import _exact, _quantized, _rank_one, _row_wise, _top_singular  # noqa: F401 (they register)
from ._moment import (
    ArrayView,
    Average,
    CodesView,
    ColumnsView,
    Drive,
    KernelView,
    Moment,
    Moments,
    Move,
    Name,
    Part,
    Parts,
    SketchView,
    Table,
    drive_,
)
from ._sketch_error import SketchError, estimate_error, occupied_share
from ._sketched import load_limit

__all__ = [
    "ArrayView",
    "Average",
    "CodesView",
    "ColumnsView",
    "Drive",
    "KernelView",
    "Moment",
    "Moments",
    "Move",
    "Name",
    "Part",
    "Parts",
    "SketchError",
    "SketchView",
    "Table",
    "copy_saved",
    "create",
    "declare",
    "drive_",
    "empty",
    "estimate_error",
    "grow",
    "load_limit",
    "occupied_share",
    "open_moment",
    "state_damage",
    "state_mismatch",
]


def declare(storage: Storage, name: Name, table: Table, fill: float = 0.0) -> tuple[Part, ...]:
    """The parts of a moment in this storage whose every estimate starts as `fill`."""
    kept = storage.for_rows(table.first_rows)
    return _class_of(kept).declare(kept, name, table, fill)


def create(storage: Storage, name: Name, table: Table, fill: float = 0.0) -> Parts:
    """The tensors of a fresh moment, by the name of their part."""
    parts = declare(storage, name, table, fill)
    return {part.name: _fresh(part, table) for part in parts}


def grow(
    storage: Storage, name: Name, table: Table, tensors: Parts, *, added: range, fill: float
) -> Parts:
    """Copies of the tensors of a moment for a table that has got more rows.

    Sketches keep their counters; everywhere else, added rows are those of a fresh moment.
    """
    grown: Parts = {}
    for part in declare(storage, name, table, fill):
        old = tensors[part.name]
        grown[part.name] = old.clone()
        if part.by != "bucket" and tuple(old.shape) != part.shape:
            grown[part.name] = _fresh(part, table)
            grown[part.name][: len(old)] = old
    open_moment(storage.for_rows(table.first_rows), name, grown).start_rows_(added, fill)
    return grown


def empty(part: Part, shape: torch.Size, table: Table) -> Tensor:
    """Uninitialised memory for a part of the given shape, on the device where it belongs."""
    device = torch.device("cpu") if part.is_on_host else table.device
    # A step reads buckets in random order, so they gain from huge pages.
    allocate = _pages.empty if part.by == "bucket" else torch.empty
    return allocate(shape, dtype=part.dtype or table.dtype, device=device)


def _fresh(part: Part, table: Table) -> Tensor:
    tensor = empty(part, torch.Size(part.held_shape(table)), table)
    if tensor.is_meta:
        return tensor
    if isinstance(part.initial, Tensor):
        return tensor.copy_(part.initial)
    return tensor.fill_(part.initial)


def open_moment(
    storage: Storage, name: Name, tensors: Parts, *, held: range | None = None
) -> Moment:
    """The moment over tensors that `create` made, in the storage that the table has (`for_rows`).

    Where this process holds some rows of a larger table, rows keep their numbers within the part
    that it holds; sketches hash the numbers that they have in the table.
    """
    return _class_of(storage)(storage, name, tensors, held)


def state_mismatch(
    storage: Storage, name: Name, table: Table, tensors: dict[str, Any], *, is_live: bool = True
) -> str | None:
    """Why these tensors are not a moment of that parameter in this storage, or None.

    Parts in the parameter's dtype may have another one where they are not live: they are cast when
    they are loaded.
    """
    parts = _matching_parts(storage, name, table, tensors)
    if parts is None:
        expected = [f"{name}_{part.name}" for part in declare(storage, name, table)]
        found = [f"{name}_{part}" for part in sorted(tensors)]
        return f"it has {found or 'nothing'}, not {expected}"
    for part in parts:
        tensor = tensors[part.name]
        if not isinstance(tensor, Tensor):
            return f"its {name}_{part.name} is a {type(tensor).__name__}, not a tensor"
        mismatch = part.mismatch(tensor, table, is_live=is_live)
        if mismatch is not None:
            return f"its {name}_{part.name} {mismatch}"
    return None


def state_damage(storage: Storage, name: Name, table: Table, tensors: dict[str, Any]) -> str | None:
    """Why values in these tensors, which match otherwise, cannot be a moment's, or None."""
    for part in _matching_parts(storage, name, table, tensors) or ():
        damage = part.damage(tensors[part.name])
        if damage is not None:
            return f"its {name}_{part.name} {damage}"
    return None


def copy_saved(storage: Storage, name: Name, table: Table, saved: Parts) -> Parts:
    """Copies of saved tensors that match, each in the dtype and on the device where it belongs."""
    parts = _matching_parts(storage, name, table, saved)
    assert parts is not None  # state_mismatch() has looked
    # Contiguous, whatever strides were saved: kernels read memory, not strides.
    return {
        part.name: empty(part, saved[part.name].shape, table).copy_(saved[part.name].detach())
        for part in parts
    }


def _matching_parts(
    storage: Storage, name: Name, table: Table, tensors: dict[str, Any]
) -> tuple[Part, ...] | None:
    storage = storage.for_rows(table.first_rows)
    fill = 0.0 if _class_of(storage).starts_from_zero(tensors) else 1.0
    parts = declare(storage, name, table, fill)
    return parts if {part.name for part in parts} == tensors.keys() else None


def _class_of(storage: Storage) -> type[Moment]:
    return Moment._by_storage[type(storage)].form_of(storage)
