"""The contents of a checkpoint: parameters, moments, bytes, and the sketches' own error."""

import dataclasses
import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import moments
from .._formatting import text_table
from .._validation import check_count, check_flag, check_int, check_keys, check_tensor
from ..moments import Moment, Name, SketchError, Table, estimate_error, occupied_share
from ..optim._digests import check_digest
from ..optim._state import parts_of
from ..storage import PRESETS, Memory

# What the unpickler raises on a file that is no checkpoint depends on the file's bytes.
_UNREADABLE = (
    pickle.UnpicklingError,
    EOFError,
    RuntimeError,
    LookupError,
    ValueError,
    struct.error,
    AssertionError,
)


@dataclass(frozen=True)
class FoundMoment:
    """One moment of one parameter in a checkpoint."""

    where: str
    """The optimizer's place in the file, such as "optimizer"; empty if it is the whole file."""
    parameter: str
    shape: tuple[int, ...]
    steps: int
    moment: str
    storage: str
    state_bytes: int
    rows_per_bucket: float | None = None
    filled: float | None = None
    """The share of a sketch's buckets into which something was written."""
    error: SketchError | None = None
    """A sketch's own estimate of its error."""


@dataclass(frozen=True)
class Inspection:
    """All moments in a checkpoint; printing it gives a table."""

    moments: tuple[FoundMoment, ...]

    @property
    def state_bytes(self) -> int:
        return sum(moment.state_bytes for moment in self.moments)

    def __str__(self) -> str:
        header = ("optimizer", "parameter", "moment", "storage", "shape", "steps", "bytes")
        lines: list[tuple[str, ...]] = [(*header, "rows/bucket", "filled", "error")]
        for found in self.moments:
            shape = " x ".join(f"{size:,}" for size in found.shape)
            load = "" if found.rows_per_bucket is None else f"{found.rows_per_bucket:,.1f}"
            filled = "" if found.filled is None else f"{found.filled:.1%}"
            error = "" if found.error is None else f"{found.error.relative:.2%}"
            numbers = (f"{found.steps:,}", f"{found.state_bytes:,}", load, filled, error)
            lines.append(
                (found.where, found.parameter, found.moment, found.storage, shape, *numbers)
            )
        lines.append(("total", *[""] * 5, f"{self.state_bytes:,}", "", "", ""))
        columns = list(zip(*lines, strict=True))
        if not any(found.where for found in self.moments):
            columns = [("parameter", *columns[1][1:-1], "total"), *columns[2:]]
        return text_table(list(zip(*columns, strict=True)), left=len(columns) - 5)


def inspect_checkpoint(path: str | Path) -> Inspection:
    """The moments that our optimizers saved in a checkpoint, at any depth of its dicts and lists.

    The file is read with the default `torch.load`, which runs no code. A sketch's error is
    estimated from the sketch alone: the l2 norm of (estimate - truth) over that of the truth, over
    all rows.
    """
    loaded = read_checkpoint(path)
    optimizers = list(_optimizers(loaded))
    if not optimizers:
        kind = ", ".join(map(str, loaded)) if isinstance(loaded, dict) else type(loaded).__name__
        raise ValueError(
            f"{Path(path).name} must hold the state_dict() of an optimizer of sketchoptim, "
            f"found only: {kind[:200]}"
        )
    try:
        found = [moment for where, packed in optimizers for moment in _moments(where, packed)]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{Path(path).name}: {error}; the checkpoint is damaged") from error
    return Inspection(tuple(found))


def read_checkpoint(path: str | Path, *, device: str = "cpu") -> Any:
    """The contents of a file of `torch.save`, read by the default `torch.load`.

    Raises:
        ValueError: `torch.load` cannot read the file.
        OSError: The file does not exist or cannot be opened.
    """
    try:
        return torch.load(path, map_location=device)
    except _UNREADABLE as error:
        raise ValueError(
            f"{Path(path).name} must be a checkpoint that torch.load reads by default, "
            "with tensors, numbers, strings, lists and dicts in it; save a state_dict()"
        ) from error


def _optimizers(thing: Any, where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The state dicts of optimizers in nested dicts and lists, with their places."""
    if isinstance(thing, dict):
        if _is_optimizer(thing):
            yield where, thing
            return
        items = list(thing.items())
    elif isinstance(thing, list | tuple):
        items = list(enumerate(thing))
    else:
        return
    for key, value in items:
        yield from _optimizers(value, f"{where}.{key}" if where else str(key))


def _is_optimizer(thing: dict[str, Any]) -> bool:
    """Whether a dict is the state dict of one of our optimizers, whose groups have a memory."""
    groups = thing.get("param_groups")
    if "state" not in thing or not isinstance(groups, list) or not groups:
        return False
    return isinstance(groups[0], dict) and "memory" in groups[0]


def _moments(where: str, packed: dict[str, Any]) -> Iterator[FoundMoment]:
    states = check_keys("state", packed["state"], optional=None)
    for number, group in enumerate(packed["param_groups"]):
        memory, named = _checked_group(f"group {number}", group)
        for name, key in named:
            state = states.get(key, {})
            check_keys(f"the state of {name}", state, optional=None)
            if state:
                yield from _moments_of(where, name, memory, state)


def _checked_group(where: str, group: Any) -> tuple[Memory, list[tuple[str, Any]]]:
    """The memory of a group, and the names of its parameters with their keys in the state."""
    check_keys(where, group, required=("params", "memory"), optional=None)
    params, names = group["params"], group.get("param_names")
    if not isinstance(params, list):
        raise ValueError(f"params of {where} must be a list, got {params!r}")
    names = names or [f"parameter {key}" for key in params]
    if len(names) != len(params):
        raise ValueError(
            f"param_names of {where} must be as many as its params, got {len(names)} for "
            f"{len(params)}"
        )
    try:
        return Memory.from_dict(group["memory"]), list(zip(names, params, strict=True))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def _checked_shape(name: str, state: dict[str, Any]) -> torch.Size:
    shape = check_tensor(f"shape of {name}", state["shape"], remedy="")
    if shape.is_floating_point() or shape.dim() != 1 or (shape < 0).any():
        raise ValueError(f"shape of {name} must be whole numbers >= 0, got {shape}")
    return torch.Size(shape.tolist())


def _moments_of(
    where: str, parameter: str, memory: Memory, state: dict[str, Any]
) -> Iterator[FoundMoment]:
    check_keys(
        f"the state of {parameter}",
        state,
        required=("step", "shape", "is_compressed"),
        optional=None,
    )
    steps = check_count(f"step of {parameter}", state["step"])
    is_compressed = check_flag(f"is_compressed of {parameter}", state["is_compressed"])
    shape = _checked_shape(parameter, state)
    check_digest(parameter, state)
    # The parameter's dtype is not in a checkpoint, and parts in that dtype may have any.
    table = Table(shape, torch.float32, torch.device("cpu"), parameter)
    if "sized_for" in state:
        sized_for = check_int(f"sized_for of {parameter}", state["sized_for"], least=1)
        table = dataclasses.replace(table, sized_for=sized_for)
    kept = memory if is_compressed else PRESETS["exact"]
    names: tuple[Name, ...] = ("first", "second")
    for name in names:
        tensors = parts_of(state, name)
        if not tensors:
            continue
        moment = _checked_moment(parameter, name, kept, table, tensors)
        details: dict[str, Any] = {}
        rows = shape[0] if shape else 1
        if moment.sketch is not None and rows:
            details = {
                "rows_per_bucket": rows / moment.sketch.width,
                "filled": occupied_share(moment.sketch),
                "error": estimate_error(moment.sketch, rows),
            }
        yield FoundMoment(
            where,
            parameter,
            tuple(shape),
            steps,
            name,
            moment.describe(),
            sum(tensor.nbytes for tensor in tensors.values()),
            **details,
        )


def _checked_moment(
    parameter: str, name: Name, memory: Memory, table: Table, tensors: dict[str, Any]
) -> Moment:
    """The moment over saved tensors; they must fit the memory."""
    storage = getattr(memory, name)
    if storage is None:
        raise ValueError(
            f"{parameter} must have no {name} moment, as its group has none, got {sorted(tensors)}"
        )
    mismatch = moments.state_mismatch(storage, name, table, tensors, is_live=False)
    if mismatch is not None:
        raise ValueError(
            f"the {name} moment of {parameter} must be kept in {storage}, the storage of its "
            f"group, but {mismatch}"
        )
    damage = moments.state_damage(storage, name, table, tensors)
    if damage is not None:
        raise ValueError(f"the {name} moment of {parameter} is damaged: {damage}")
    return moments.open_moment(storage.for_rows(table.first_rows), name, tensors)
