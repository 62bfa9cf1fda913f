"""The state of one parameter: its keys, and whether it is sound, live or saved."""

from typing import Any, get_args

import torch
from torch import Tensor

from .. import moments
from .._validation import check_count, check_flag, check_keys, check_storage
from ..deferred import is_row_sparse
from ..moments import Name, Parts, Table
from ..storage import Storage
from ._digests import DIGEST, OPTIONAL

State = dict[str, Any]

# Keys beside the parts of moments, which are named "first_..." and "second_...".
_REQUIRED = ("step", "is_compressed", "shape")


def entry(name: Name, part: str) -> str:
    """The key of a part of a moment in a state."""
    return f"{name}_{part}"


def state_entries(name: Name, tensors: Parts) -> State:
    """The tensors of a moment under their keys in a state."""
    return {entry(name, part): tensor for part, tensor in tensors.items()}


def parts_of(state: State, name: Name) -> Parts:
    """The tensors of one moment, by the name of their part."""
    prefix = f"{name}_"
    return {
        key.removeprefix(prefix): tensor
        for key, tensor in state.items()
        if isinstance(key, str) and key.startswith(prefix)
    }


def starts_anew(state: State, gradient: Tensor | None, fill: float) -> bool:
    """Whether a state is exact only because no gradient came into it, and may be compressed.

    State is made before the first step for checkpoints to be loaded into, by a step along zeros.
    The gradient that decides is that of the next step. `fill` is what moments start from.
    """
    return (
        gradient is not None
        and is_row_sparse(gradient)
        and state.get("is_compressed") is False
        and isinstance(step := state.get("step"), Tensor)
        and step.numel() == 1
        and step.data_ptr() != 0  # its memory may have been freed
        and step.item() <= 1
        and all(
            bool((tensor == fill).all())
            for name in get_args(Name)
            for tensor in parts_of(state, name).values()
        )
    )


def check_live(table: Table, state: State, storages: dict[Name, Storage]) -> None:
    """Raises unless steps of the parameter can go on from the state as it is."""
    owner = f"the parameter of shape {list(table.shape)}"
    remedy = (
        "build the optimizer after the model is resized or converted, and put state into it with "
        "load_state_dict()"
    )
    for key, tensor in state.items():
        if isinstance(tensor, Tensor):
            check_storage(f"{key} of {owner}", tensor)
    step = state.get("step")
    if not (isinstance(step, Tensor) and step.dtype == torch.float64 and step.is_cpu):
        raise TypeError(
            f"step of {owner} must be torch.float64 on the CPU, got {step!r}; "
            "fill the tensor that is there, or use load_state_dict()"
        )
    _check(owner, table, state, storages, remedy=remedy, is_live=True)


def check_saved(where: str, table: Table, state: Any, storages: dict[Name, Storage]) -> None:
    """Raises unless a state from a checkpoint is sound and one for such a parameter."""
    remedy = "load what state_dict() gave, uncast, into the optimizer of such a model"
    _check(where, table, state, storages, remedy=remedy, is_live=False)
    known = {*_REQUIRED, *OPTIONAL, DIGEST}
    for name, storage in storages.items():
        tensors = parts_of(state, name)
        known |= state_entries(name, tensors).keys()
        damage = moments.state_damage(storage, name, table, tensors)
        if damage is not None:
            raise ValueError(f"the {name} moment of {where} is damaged: {damage}; {remedy}")
    check_keys(f"the state of {where}", state, optional=known, remedy=remedy)
    for key in OPTIONAL:
        check_count(f"{key} of {where}", state.get(key, 0), remedy=remedy)


def _check(
    owner: str,
    table: Table,
    state: Any,
    storages: dict[Name, Storage],
    *,
    remedy: str,
    is_live: bool,
) -> None:
    check_keys(f"the state of {owner}", state, required=_REQUIRED, optional=None, remedy=remedy)
    check_count(f"step of {owner}", state["step"], remedy=remedy)
    check_flag(f"is_compressed of {owner}", state["is_compressed"], remedy=remedy)
    known = state["shape"]
    found = known.tolist() if isinstance(known, Tensor) else known
    if found != list(table.shape):
        raise ValueError(
            f"the state of {owner} must be for shape {list(table.shape)}, got {found}; {remedy}"
        )
    for name, storage in storages.items():
        mismatch = moments.state_mismatch(
            storage, name, table, parts_of(state, name), is_live=is_live
        )
        if mismatch is not None:
            raise ValueError(
                f"the {name} moment of {owner} must be kept in {storage}, but {mismatch}; {remedy}"
            )


def restore(table: Table, state: State, storages: dict[Name, Storage]) -> State:
    """A copy of a checked state on the parameter's device, each part in its own dtype."""
    copied: State = {
        "step": torch.tensor(float(state["step"]), dtype=torch.float64, device="cpu"),
        "is_compressed": state["is_compressed"],
        "shape": torch.tensor(table.shape, dtype=torch.int64, device="cpu"),
    }
    copied |= {name: state[name] for name in OPTIONAL if name in state}
    for name, storage in storages.items():
        copied |= state_entries(
            name, moments.copy_saved(storage, name, table, parts_of(state, name))
        )
    return copied
