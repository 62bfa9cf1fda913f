"""Checkpoints: an optimizer's state as plain values, and back, checked before anything changes."""

from collections import defaultdict
from copy import deepcopy
from typing import Any

from torch import Tensor

from .. import moments
from .._names import keyed_parameters
from .._validation import check_keys, is_dtensor
from .._warning import warn
from ..moments import Part, Table
from ..storage import PRESETS, Memory
from . import _digests, _shards, _state
from ._algorithm import EXACT, Algorithm, Group
from ._checks import TORCH_FLAGS

Packed = dict[str, Any]


def pack(optimizer: Algorithm) -> Packed:
    """The state in tensors, numbers and strings, with the numbers of parameters as keys."""
    numbers: dict[Tensor, int] = {}
    for number, (_, parameter, _) in enumerate(keyed_parameters(optimizer)):
        numbers.setdefault(parameter, number)
    groups = [
        {
            **group,
            "memory": group["memory"].to_dict(),
            "params": [numbers[parameter] for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    # State by another key than a parameter's stays, as in torch.optim.
    state: dict[Any, Any] = {
        key: it for key, it in optimizer.state.items() if not isinstance(key, Tensor)
    }
    for key, parameter, group in keyed_parameters(optimizer):
        if parameter in optimizer.state:
            entries = dict(optimizer.state[parameter])
            if is_dtensor(parameter):
                table = _shards.table_of(parameter, key, entries)
                for entry, part in _parts(optimizer, group, table, entries).items():
                    entries[entry] = _shards.as_global(parameter, part, entries[entry])
            if entries:
                entries[_digests.DIGEST] = _digests.digest(entries)
            state[numbers[parameter]] = entries
    # Not in the groups, whose options some libraries build optimizers from.
    digest = [_digests.group_digest(group) for group in groups]
    return {"state": state, "param_groups": groups, _digests.DIGEST: digest}


def check_is_dict(packed: object) -> None:
    """Raises unless this may be a checkpoint."""
    if not isinstance(packed, dict):
        raise TypeError(f"the checkpoint must be a dict as state_dict() gives it, got {packed!r}")


def load_(optimizer: Algorithm, packed: Packed) -> None:
    """Restores what `pack` gave, or raises with the differences and changes nothing."""
    check_keys("the checkpoint", packed, required=("state", "param_groups"), optional=None)
    groups = _checked_groups(optimizer, packed["param_groups"])
    changed = _digests.changed_options(packed["param_groups"], packed.get(_digests.DIGEST))
    if changed:  # no error: a rate may be edited on purpose, as in torch.optim
        warn(
            f"options of the checkpoint are not those it was saved with: {', '.join(changed)}. "
            "If you did not change them, load another copy of the checkpoint"
        )
    states = _checked_states(optimizer, groups, packed["state"])
    restored: defaultdict[Tensor | str, Any] = defaultdict(dict)
    # torch.distributed.checkpoint numbers parameters by strings: what is left is not ours.
    numbers = {number for group in groups for number in group["params"]}
    restored |= {key: deepcopy(it) for key, it in packed["state"].items() if key not in numbers}
    for key, parameter, group in keyed_parameters(optimizer):
        state = states.get(parameter)
        if state:
            storages = _stored_moments(optimizer, groups[_index(optimizer, group)], state)
            table = _shards.table_of(parameter, key, state)
            restored[parameter] = _state.restore(table, state, storages)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        saved["params"] = group["params"]
        for flag in TORCH_FLAGS.keys() & group.keys():
            saved.setdefault(flag, group[flag])
        if "param_names" in group:
            saved.setdefault("param_names", group["param_names"])
    optimizer.__setstate__({"state": restored, "param_groups": groups})


def _checked_groups(optimizer: Algorithm, saved_groups: Any) -> list[Group]:
    """Copies of the saved groups, their memory as an object, where they fit the optimizer's."""
    if not isinstance(saved_groups, list | tuple):
        raise TypeError(
            f"param_groups of the checkpoint must be a list, got {saved_groups!r}; "
            "load what state_dict() gave"
        )
    if len(saved_groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the checkpoint must have {len(optimizer.param_groups)} parameter groups, got "
            f"{len(saved_groups)}; build the optimizer with the checkpoint's groups"
        )
    groups = []
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        where = f"group {number}"
        check_keys(f"{where} of the checkpoint", saved, required=("params",), optional=None)
        if "compress_dense" in saved:  # as version 0.1 had it
            saved = {**saved, "compress": "all" if saved["compress_dense"] else "sparse"}
            del saved["compress_dense"]
        _check_options(where, optimizer.option_names(), set(saved))
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"{where} of the checkpoint must have {len(group['params'])} parameters, got "
                f"{len(saved['params'])}; load it into the optimizer of such a model"
            )
        try:
            memory = saved["memory"]  # as it is, where a wrapper has saved the groups
            memory = memory if isinstance(memory, Memory) else Memory.from_dict(memory)
            optimizer.check_options({**optimizer.defaults, **saved, "memory": memory})
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where} of the checkpoint: {error}") from None
        copied = {**deepcopy({k: it for k, it in saved.items() if k != "memory"}), "memory": memory}
        _check_memory(where, group, copied)
        groups.append(copied)
    return groups


def _check_options(where: str, expected: set[str], saved: set[str]) -> None:
    missing = sorted(expected - saved)
    if missing:
        raise ValueError(
            f"{where} of the checkpoint lacks the options {missing}: it was saved by another kind "
            "of optimizer; load it into one of that kind. from_torch() makes one of torch.optim's "
            "ours, with its state"
        )


def _check_memory(where: str, group: Group, saved: Group) -> None:
    """Raises, naming each difference, unless the saved group stores its moments as this one."""
    ours, theirs = (
        {**it["memory"].to_dict(), "compress": it.get("compress", "sparse")}
        for it in (group, saved)
    )
    found = [
        f"{key} is {here} here and {there} in the checkpoint"
        for key, (here, there) in differences(ours, theirs).items()
    ]
    if found:
        preset = next(
            (f', memory="{it}",' for it, kept in PRESETS.items() if kept == saved["memory"]), ""
        )
        raise ValueError(
            f"the memory of {where} differs from the checkpoint's: {'; '.join(found)}. "
            f"Build the optimizer with the checkpoint's memory{preset} to load it"
        )


def _checked_states(
    optimizer: Algorithm, groups: list[Group], saved: Any
) -> dict[Tensor, dict[str, Any]]:
    """The saved state of each parameter, where all of them are sound."""
    if not isinstance(saved, dict):
        raise TypeError(f"the state of the checkpoint must be a dict, got {saved!r}")
    numbers = [number for group in groups for number in group["params"]]
    foreign = [key for key in saved if key not in numbers and not isinstance(key, str)]
    if foreign:
        raise ValueError(
            f"the checkpoint must have state for its own parameters alone, {numbers}, got "
            f"{foreign}; load what state_dict() gave"
        )
    found: dict[Tensor, dict[str, Any]] = {}
    for (key, parameter, group), number in zip(keyed_parameters(optimizer), numbers, strict=True):
        state = saved.get(number, {})
        if state == {}:
            continue
        where = f"parameter {number} of the checkpoint"
        if not isinstance(state, dict):
            raise TypeError(f"the state of {where} must be a dict, got {state!r}")
        table = _shards.table_of(parameter, key, state)
        saved_group = groups[_index(optimizer, group)]
        whole, state = state, dict(state)
        for entry, part in _parts(optimizer, saved_group, table, state).items():
            state[entry] = _shards.as_held(parameter, part, state[entry])
        _state.check_saved(where, table, state, _stored_moments(optimizer, saved_group, state))
        _digests.check_digest(where, whole)
        found[parameter] = state
    return found


def _stored_moments(optimizer: Algorithm, group: Group, state: dict[str, Any]) -> Any:
    memory = group["memory"] if state.get("is_compressed") else EXACT
    return optimizer.stored_moments({**optimizer.defaults, **group}, memory, state)


def _parts(
    optimizer: Algorithm, group: Group, table: Table, state: dict[str, Any]
) -> dict[str, Part]:
    """The parts of moments among the entries of a state."""
    found = {
        _state.entry(name, part.name): part
        for name, storage in _stored_moments(optimizer, group, state).items()
        for part in moments.declare(storage, name, table)
    }
    return {key: part for key, part in found.items() if key in state}


def _index(optimizer: Algorithm, group: Group) -> int:
    return next(i for i, other in enumerate(optimizer.param_groups) if other is group)


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
