"""The state of one parameter: its keys, and whether it is sound, live or saved."""

import ctypes
import zlib
from typing import Any, get_args

import torch
from torch import Tensor

from .. import moments
from .._validation import PLAIN_TENSORS, check_count, check_flag, check_keys, check_storage
from ..deferred import is_row_sparse
from ..moments import Name, Parts, Table
from ..storage import Storage

State = dict[str, Any]

# Keys beside the parts of moments, which are named "first_..." and "second_...".
_REQUIRED = ("step", "is_compressed", "shape")
_OPTIONAL = ("began_after", "sized_for", "skipped")
# A checkpoint has one more: the checksums of the others.
DIGEST = "digest"
_NO_CHECKSUM = -1


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
    known = {*_REQUIRED, *_OPTIONAL, DIGEST}
    for name, storage in storages.items():
        tensors = parts_of(state, name)
        known |= state_entries(name, tensors).keys()
        damage = moments.state_damage(storage, name, table, tensors)
        if damage is not None:
            raise ValueError(f"the {name} moment of {where} is damaged: {damage}; {remedy}")
    check_keys(f"the state of {where}", state, optional=known, remedy=remedy)
    for key in _OPTIONAL:
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


def digest(state: State) -> Tensor:
    """The checksums (CRC-32) of the entries of a state, in the order of their sorted keys.

    Entries that are not all here have none: of DTensors and on the meta device. `skipped` has none
    either, since `torch.distributed.checkpoint` leaves out what a state without steps does not
    have. So the number of checksums is the same on any number of processes.
    """
    checksums = [checksum(key, state) for key in _digested(state)]
    return torch.tensor(checksums, dtype=torch.int64, device="cpu")


def check_digest(where: str, state: State) -> None:
    """Raises unless the entries of a saved state are those that it was saved with.

    A state without a digest is taken as it is.
    """
    if DIGEST not in state:
        return
    remedy = (
        f"load another copy of the checkpoint, or, if you changed the state, remove {DIGEST!r} "
        "from it"
    )
    saved, keys = state[DIGEST], _digested(state)
    is_digest = isinstance(saved, Tensor) and saved.dtype == torch.int64
    if not is_digest or saved.shape != (len(keys),):
        raise ValueError(
            f"the state of {where} is damaged: {DIGEST} is not for the entries {keys}; {remedy}"
        )
    for key, expected in zip(keys, saved.tolist(), strict=True):
        if _NO_CHECKSUM not in (expected, found := checksum(key, state)) and found != expected:
            raise ValueError(
                f"{key} of {where} is damaged: its checksum is {found:08x}, and was {expected:08x} "
                f"when it was saved; {remedy}"
            )


def _digested(state: State) -> list[str]:
    return sorted(state.keys() - {DIGEST, *_OPTIONAL})


def checksum(key: str, state: State) -> int:
    """The checksum of one entry; -1 if it is not all here."""
    value = state[key]
    if key == "step":  # wrappers turn it into a number, and the shape into a list
        value = float(value), state.get("began_after", 0)
    elif key == "shape":
        value = value.tolist() if isinstance(value, Tensor) else list(value)
    if not isinstance(value, Tensor):
        return zlib.crc32(repr((key, value)).encode())
    if type(value) not in PLAIN_TENSORS or value.is_meta:
        return _NO_CHECKSUM
    start = zlib.crc32(repr((key, str(value.dtype), list(value.shape))).encode())
    # Not by way of numpy(), after which torch never resizes the tensor's memory again.
    numbers = value.detach().cpu().contiguous()
    if not numbers.nbytes:
        return start
    read = (ctypes.c_char * numbers.nbytes).from_address(numbers.data_ptr())
    return zlib.crc32(read, start)


def restore(table: Table, state: State, storages: dict[Name, Storage]) -> State:
    """A copy of a checked state on the parameter's device, each part in its own dtype."""
    copied: State = {
        "step": torch.tensor(float(state["step"]), dtype=torch.float64, device="cpu"),
        "is_compressed": state["is_compressed"],
        "shape": torch.tensor(table.shape, dtype=torch.int64, device="cpu"),
    }
    copied |= {name: state[name] for name in _OPTIONAL if name in state}
    for name, storage in storages.items():
        copied |= state_entries(
            name, moments.copy_saved(storage, name, table, parts_of(state, name))
        )
    return copied
