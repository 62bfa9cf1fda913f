"""Whether a saved state fits an optimizer, and the state it restores to."""

from typing import Any

import torch
from torch import Tensor

from .. import moments, pages
from ..moments import Name, Table
from ..storage import Sketched, Storage


def check_options(where: str, expected: set[str], saved: set[str]) -> None:
    """Raises unless the saved group has the options of this optimizer."""
    missing = sorted(expected - saved)
    if missing:
        raise ValueError(
            f"{where} of the checkpoint lacks the options {missing}: it was saved by another kind "
            "of optimizer; load it into one of that kind. from_torch() makes one of torch.optim's "
            "ours, with its state"
        )


def check_plan(where: str, group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises, naming each difference, unless the saved group stores its moments as this one."""
    ours, theirs = (
        {**it["memory"].to_dict(), "compress_dense": it.get("compress_dense")}
        for it in (group, saved)
    )
    found = [
        f"{key} is {here} here and {there} in the checkpoint"
        for key, (here, there) in differences(ours, theirs).items()
    ]
    if found:
        raise ValueError(
            f"the memory of {where} differs from the checkpoint's: {'; '.join(found)}. "
            "Build the optimizer with the checkpoint's memory to load it"
        )


def check_state(
    where: str, storages: dict[Name, Storage], table: Table, saved: dict[str, Any]
) -> None:
    """Raises unless the saved tensors are those that the storages have for such a parameter."""
    shape = saved.get("shape")
    if not isinstance(shape, Tensor) or shape.tolist() != list(table.shape):
        found = shape.tolist() if isinstance(shape, Tensor) else "none"
        raise ValueError(
            f"{where} has shape {list(table.shape)} here and {found} in the checkpoint"
        )
    on_meta = Table(table.shape, table.dtype, torch.device("meta"), table.number)
    for name, storage in storages.items():
        for part, expected in moments.create(storage, on_meta).items():
            tensor = saved.get(f"{name}_{part}")
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{where} of the checkpoint has no {name}_{part}")
            if not _fits(storage, part, expected.shape, tensor.shape):
                raise ValueError(
                    f"{name}_{part} of {where} has shape {list(tensor.shape)} in the checkpoint, "
                    f"but {list(expected.shape)} fits the parameter of shape {list(table.shape)}"
                )
            if part != "values" and tensor.dtype != expected.dtype:
                raise ValueError(
                    f"{name}_{part} of {where} is {tensor.dtype} in the checkpoint, "
                    f"but must be {expected.dtype}; save the state_dict without casting it"
                )


def restored(parameter: Tensor, saved: dict[str, Any]) -> dict[str, Any]:
    """A copy of the saved state on the parameter's device; only exact moments take its dtype."""
    state: dict[str, Any] = {}
    for key, value in saved.items():
        if not isinstance(value, Tensor):
            state[key] = value
            continue
        part = key.split("_", 1)[-1]
        is_host = key in ("step", "shape") or part in moments.HOST_PARTS
        device = torch.device("cpu") if is_host else parameter.device
        dtype = {"values": parameter.dtype, "step": torch.float32}.get(part, value.dtype)
        # Laid out in order, whatever layout was saved: kernels read memory, not strides.
        state[key] = pages.empty(value.shape, dtype=dtype, device=device).copy_(value.detach())
    return state


def _fits(storage: Storage, part: str, expected: torch.Size, found: torch.Size) -> bool:
    if not (isinstance(storage, Sketched) and part == "table"):
        return expected == found
    depth, width, dim = expected
    return tuple(found) in {(depth, allowed, dim) for allowed in storage.widths(width)}


def differences(
    one: dict[str, Any], other: dict[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Both values of what differs in two nested dicts, by dotted name; of another kind, that alone.

    Example:
        >>> differences({"lr": 1, "second": {"depth": 3}}, {"lr": 1, "second": {"depth": 2}})
        {'second.depth': (3, 2)}
    """
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(one.keys() | other.keys()):
        left, right = one.get(key), other.get(key)
        kinds = tuple(
            value.get("kind") if isinstance(value, dict) else None for value in (left, right)
        )
        if kinds[0] != kinds[1]:
            found[f"{prefix}{key}.kind"] = kinds[0], kinds[1]
        elif isinstance(left, dict) and isinstance(right, dict):
            found |= differences(left, right, f"{prefix}{key}.")
        elif left != right:
            found[f"{prefix}{key}"] = left, right
    return found
