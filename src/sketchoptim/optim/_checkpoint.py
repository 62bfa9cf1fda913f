"""Whether a checkpoint fits an optimizer, and the state it restores to."""

from typing import Any

import torch
from torch import Tensor

from .. import _pages, moments
from ..moments import Name
from ..storage import Storage
from . import _checks


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


def check_saved_state(
    where: str, saved: dict[str, Any], storages: dict[Name, Storage], shape: torch.Size
) -> None:
    """Raises unless the saved state is one for a parameter of such a shape."""
    name = f"{where} of the checkpoint"
    remedy = "load what state_dict() gave, uncast, into the optimizer of such a model"
    _checks.check_state(name, saved, storages, shape, remedy=remedy)


def restored(parameter: Tensor, saved: dict[str, Any]) -> dict[str, Any]:
    """A copy of the saved state on the parameter's device; only exact moments take its dtype."""
    state = dict(saved)
    state["step"] = torch.tensor(float(saved["step"]), dtype=torch.float32, device="cpu")
    for key, value in saved.items():
        if key == "step" or not isinstance(value, Tensor):
            continue
        part = key.split("_", 1)[-1]
        is_host = key == "shape" or part in moments.HOST_PARTS
        device = torch.device("cpu") if is_host else parameter.device
        dtype = parameter.dtype if part == "values" else value.dtype
        # Laid out in order, whatever layout was saved: kernels read memory, not strides.
        empty = _pages.empty if part == "table" else torch.empty  # as fresh state is made
        state[key] = empty(value.shape, dtype=dtype, device=device).copy_(value.detach())
    return state


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
