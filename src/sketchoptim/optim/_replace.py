"""New parameters in place of old ones, with their state, after a table has grown."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import moments
from .._names import keyed_parameters, trained_parameters
from .._validation import is_dtensor
from . import _checks, _shards, _state
from ._algorithm import EXACT, Group
from ._state import State
from .base import Optimizer


@torch.no_grad()
def replace_parameters(
    optimizer: Optimizer, replacements: nn.Module | Mapping[Tensor, Tensor]
) -> list[str | int]:
    """Puts the parameters that a model has now into its optimizer, with the state of the old ones.

    For tables that got more rows, as `resize_token_embeddings` of transformers gives them: it makes
    new parameters, which the optimizer does not have, or puts longer tensors into those that it
    has. Old rows keep their state, new rows start as fresh ones. A sketch keeps its counters and
    its width, since the buckets of a row depend on its id and the width alone; new rows share them.
    All step counts go on. If anything is refused, nothing has changed.

    Args:
        optimizer: One of ours.
        replacements: The model, whose parameters are found by their names in the optimizer, as
            `so.param_groups` and `model.named_parameters()` give them. Otherwise a dict from old
            parameters to new ones. A new parameter has the dtype and the device of the old one, and
            as many columns and at least as many rows.

    Returns:
        The names of the replaced parameters, or their numbers in the optimizer.

    >>> import sketchoptim as so
    >>> model = nn.Sequential(nn.Embedding(5000, 16))
    >>> optimizer = so.Adam(model)
    >>> model[0] = nn.Embedding.from_pretrained(torch.zeros(6000, 16), freeze=False)
    >>> replace_parameters(optimizer, model)
    ['0.weight']
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be one of sketchoptim's, got {type(optimizer).__name__}")
    if isinstance(replacements, nn.Module):
        replacements = _by_name(optimizer, replacements)
    optimizer.settle_()
    members = {parameter: key for key, parameter, _ in keyed_parameters(optimizer)}
    for old, new in replacements.items():
        _check(old, new, members, _known_shape(optimizer, old))
    states: dict[Any, State] = dict(optimizer.state)
    for key, old, group in keyed_parameters(optimizer):
        if old in replacements and old in states:
            grown = _grown_state(optimizer, old, replacements[old], group, key)
            states.pop(old)
            states[replacements[old]] = grown
    groups = [
        {**group, "params": [replacements.get(it, it) for it in group["params"]]}
        for group in optimizer.param_groups
    ]
    optimizer.__setstate__({"state": states, "param_groups": groups})
    return [key for parameter, key in members.items() if parameter in replacements]


def _by_name(optimizer: Optimizer, model: nn.Module) -> dict[Tensor, Tensor]:
    """The parameters that another one has replaced in the model."""
    found = trained_parameters(model)
    named = [(key, it) for key, it, _ in keyed_parameters(optimizer) if isinstance(key, str)]
    if not any(name in found for name, _ in named):
        raise ValueError(
            "the optimizer must have parameters with names of the model, as param_groups(model) "
            f"gives them, got {[name for name, _ in named[:3]]}; give a dict from old to new ones"
        )
    return {
        it: found[name]
        for name, it in named
        if name in found
        and (found[name] is not it or _known_shape(optimizer, it) != list(it.shape))
    }


def _known_shape(optimizer: Optimizer, parameter: Tensor) -> list[int]:
    """The shape that the state of a parameter is for; its own if it has none."""
    state = optimizer.state.get(parameter)
    return state["shape"].tolist() if state else list(parameter.shape)


def _check(old: Tensor, new: Tensor, members: Mapping[Tensor, str | int], shape: list[int]) -> None:
    if old not in members:
        raise ValueError(
            f"the parameter of shape {list(old.shape)} must be one of the optimizer, and is not"
        )
    owner = f"the parameter in place of {members[old]!r}"
    if new is not old and new in members:
        raise ValueError(f"{owner} must not be in the optimizer, but is {members[new]!r}")
    if not (isinstance(new, Tensor) and new.is_leaf):
        raise TypeError(f"{owner} must be a parameter, got {type(new).__name__}")
    if is_dtensor(old) or is_dtensor(new):
        raise ValueError(f"{owner} must not be divided among processes; resize before sharding")
    _checks.check_parameter(new)
    if new.dtype != old.dtype or new.device != old.device:
        raise ValueError(
            f"{owner} must be {old.dtype} on {old.device}, got {new.dtype} on {new.device}"
        )
    is_longer = new.dim() == len(shape) and (not shape or len(new) >= shape[0])
    if not is_longer or list(new.shape[1:]) != shape[1:]:
        raise ValueError(
            f"{owner} must have its shape, {shape}, or more rows, got {list(new.shape)}"
        )


def _grown_state(
    optimizer: Optimizer, old: Tensor, new: Tensor, group: Group, key: str | int
) -> State:
    """A state for the new parameter; the old one does not change."""
    state = dict(optimizer.state[old])
    shape = state["shape"].tolist()
    if shape and shape[0] < len(new):
        state.setdefault("sized_for", shape[0])
    state["shape"] = torch.tensor(new.shape, dtype=torch.int64, device="cpu")
    state["step"] = state["step"].clone()
    added = range(shape[0], len(new)) if shape else range(0)
    memory = group["memory"] if state["is_compressed"] else EXACT
    table, fill = _shards.table_of(new, key, state), optimizer.fill(group)
    for name, storage in optimizer.stored_moments(group, memory, state).items():
        kept = _state.parts_of(state, name)
        if kept:
            tensors = moments.grow(storage, name, table, kept, added=added, fill=fill)
            state |= _state.state_entries(name, tensors)
    return state
