"""Checksums in checkpoints: of the entries of a parameter's state, and of a group's options."""

import ctypes
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._validation import PLAIN_TENSORS

# The key of the checksums, in the saved state of a parameter and, for groups, in a checkpoint.
DIGEST = "digest"
# Entries that not every state has.
OPTIONAL = ("began_after", "sized_for", "skipped")
_NO_CHECKSUM = -1


def digest(state: Mapping[str, Any]) -> Tensor:
    """The checksums (CRC-32) of the entries of a state, in the order of their sorted keys.

    Entries that are not all here have none: of DTensors and on the meta device. `skipped` has none
    either, since `torch.distributed.checkpoint` leaves out what a state without steps does not
    have. So the number of checksums is the same on any number of processes.
    """
    checksums = [checksum(key, state) for key in _digested(state)]
    return torch.tensor(checksums, dtype=torch.int64, device="cpu")


def check_digest(where: str, state: Mapping[str, Any]) -> None:
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


def _digested(state: Mapping[str, Any]) -> list[str]:
    return sorted(state.keys() - {DIGEST, *OPTIONAL})


def checksum(key: str, state: Mapping[str, Any]) -> int:
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


def group_digest(group: Mapping[str, Any]) -> dict[str, int]:
    """The checksum of each option of a group, but for the memory, which is no plain value here."""
    return {
        key: zlib.crc32(repr((key, _plain(value))).encode())
        for key, value in group.items()
        if key not in ("params", "param_names", "memory")
    }


def changed_options(groups: Sequence[Mapping[str, Any]], saved: Any) -> list[str]:
    """Which options of saved groups are not those that they were saved with, in words."""
    if saved is None:
        return []
    found = [group_digest(group) for group in groups]
    if not isinstance(saved, list) or list(map(type, saved)) != [dict] * len(found):
        return [DIGEST]
    return [
        f"{key} of group {number} is now {groups[number].get(key)}"
        for number, checksums in enumerate(saved)
        for key, expected in checksums.items()
        if found[number].get(key) != expected
    ]


def _plain(value: Any) -> Any:
    """The same for each form in which wrappers save an option: numbers, flags, words and lists."""
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str) else type(value).__name__
