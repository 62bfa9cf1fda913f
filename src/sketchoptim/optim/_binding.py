"""A parameter bound to its state and its group's options: what its steps have in common."""

import ctypes
import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _rounding, moments, ops
from .._validation import PLAIN_TENSORS
from ..deferred import plain_if_it_exists
from ..moments import Moment, Moments, Name, Parts
from ..storage import Memory, Storage
from . import _checks, _shards, _state
from ._algorithm import EXACT, Algorithm, Group
from ._shards import Shard
from ._state import State

Options = tuple[object, ...]
Key = str | int


@dataclass(frozen=True, eq=False, slots=True)
class Binding:
    """One parameter with its state and options; immutable, and built again when they change.

    Kept from step to step, because building it takes longer than a small step: without it a step on
    four short rows takes 8 times as long.
    """

    parameter: Tensor
    local: Tensor
    """The rows of it that this process holds: a plain tensor, usually the parameter itself."""
    shard: Shard | None
    """The place of these rows in the parameter, if it is a DTensor."""
    state: State
    options: Options
    group_memory: Memory
    memory: Memory
    """The memory in force: the group's, or exact."""
    moments: Moments
    kernels: ops.Kernels | None
    fallback_reason: str | None
    """Why there are no kernels, if a user can change that."""
    steps_by_torch: bool
    """Whether its dense gradients go to torch.optim's own function."""
    rounding_seed: int | None
    """Seeds the stochastic rounding of its weights; None if they are rounded to nearest."""
    step_count: ctypes.c_double
    """The memory of the state's `step`: torch and NumPy take longer to get at it."""
    began_after: int
    """Steps before its moments were switched on."""
    counting: ops.CountingKernels | None
    """The kernels, if their device counts the steps."""
    maintained: tuple[Moment, ...]
    """The moments for which something may be due between two steps."""
    refuses_nonfinite: bool
    """Whether gradients must be finite: a compressed moment would carry a NaN to other rows."""
    is_watched: bool
    """Whether a step of it may call for a warning."""
    places: "_Places"
    """The addresses of parameter and state when it was built."""

    @property
    def storages(self) -> dict[Name, Storage]:
        """The storages of its moments."""
        return {moment.name: moment.storage for moment in self.moments if moment is not None}

    @property
    def gradient(self) -> Tensor:
        """The gradient of the local rows."""
        assert self.parameter.grad is not None  # only such parameters are stepped
        return _shards.local(plain_if_it_exists(self.parameter.grad))

    def exact_values(self, name: Name) -> Tensor:
        """The tensor of an exact moment."""
        moment: Moment = getattr(self.moments, name)
        return moment.exact_values()

    def is_current(self, state: State | None, options: Options | None) -> bool:
        """Whether parameter, state and options are those it was built for, in the same memory.

        Without options, whether parameter and state are.
        """
        if state is not self.state or (options is not self.options and options is not None):
            return False
        local = self.parameter if self.shard is None else _shards.local(self.parameter)
        shape, dtype, is_contiguous, address, tensors = self.places
        if (
            local.shape != shape
            or local.dtype is not dtype
            or local.is_contiguous() is not is_contiguous
            or (address and local.data_ptr() != address)
        ):
            return False
        for key, tensor, address in tensors:
            if state.get(key) is not tensor or (address and tensor.data_ptr() != address):
                return False
        return True


class _Places(NamedTuple):
    """The addresses of the tensors of a parameter and its state."""

    shape: torch.Size
    dtype: torch.dtype
    is_contiguous: bool
    address: int
    tensors: tuple[tuple[str, Tensor, int], ...]
    """The tensors of the state that steps change, and where their numbers are."""

    @classmethod
    def of(cls, local: Tensor, state: State) -> "_Places":
        tensors = tuple(
            (key, tensor, _address(tensor))
            for key, tensor in state.items()
            if isinstance(tensor, Tensor) and key != "shape"
        )
        return cls(local.shape, local.dtype, local.is_contiguous(), _address(local), tensors)


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if type(tensor) in PLAIN_TENSORS else 0


def bind(
    optimizer: Algorithm,
    parameter: Tensor,
    group: Group,
    options: Options,
    key: Key,
    previous: Binding | None,
) -> Binding:
    """The binding of a parameter that has a gradient; nothing of the optimizer changes.

    New state is in the binding alone until the optimizer takes it over.
    """
    _checks.check_parameter(parameter)
    state = optimizer.state.get(parameter)
    memory = optimizer.memory_in_force(parameter, group)
    storages = optimizer.storages(group, memory)
    derived: dict[str, Any] = {
        "options": options,
        "group_memory": group["memory"],
        "rounding_seed": _rounding_seed(parameter, key, group, memory),
        "steps_by_torch": optimizer.steps_by_torch(group, memory),
    }
    if previous is not None and previous.is_current(state, None):
        _checks.check_memory(previous.group_memory, group["memory"])
        if memory is previous.memory and storages == previous.storages:
            is_watched = _is_watched(previous.moments, memory, group["memory"])
            return dataclasses.replace(previous, is_watched=is_watched, **derived)
    table = _shards.table_of(parameter, key, state)
    fill = optimizer.fill(group)
    if state and not _state.starts_anew(state, parameter.grad, fill):
        _state.check_live(table, state, optimizer.stored_moments(group, memory, state))
    for name, storage in storages.items():
        _shards.check_parts(table, moments.declare(storage, name, table), storage)
    state = fresh_state(optimizer, parameter, group, memory, key)
    opened = open_moments(storages, state, table.held)
    local, shard = _shards.local(parameter), Shard.of(parameter)
    first_row = 0 if shard is None else shard.rows.start
    kernels, reason = ops.find_kernels(local, opened, first_row=first_row, step_count=state["step"])
    return Binding(
        parameter=parameter,
        local=local,
        shard=shard,
        state=state,
        memory=memory,
        moments=opened,
        kernels=kernels,
        fallback_reason=reason,
        places=_Places.of(local, state),
        step_count=ctypes.c_double.from_address(state["step"].data_ptr()),
        began_after=state.get("began_after", 0),
        counting=kernels if kernels is not None and ops.counts_steps(kernels) else None,
        maintained=tuple(it for it in opened if it is not None and it.has_maintenance),
        refuses_nonfinite=not memory.is_exact,
        is_watched=_is_watched(opened, memory, group["memory"]),
        **derived,
    )


def _is_watched(opened: Moments, memory: Memory, group_memory: Memory) -> bool:
    is_kept_otherwise = memory is not group_memory and memory != group_memory
    return is_kept_otherwise or (opened.first is not None and opened.first.storage.collides)


def fresh_state(
    optimizer: Algorithm, parameter: Tensor, group: Group, memory: Memory, key: Key
) -> State:
    """The parameter's state with all that `memory` needs: the old one if nothing is missing."""
    state: State = optimizer.state.get(parameter) or {}
    steps_done = 0.0
    if _state.starts_anew(state, parameter.grad, optimizer.fill(group)):
        steps_done, state = state["step"].item(), {}
    fresh: State = {}
    if not state:
        fresh |= {
            "step": torch.tensor(steps_done, dtype=torch.float64, device="cpu"),
            "is_compressed": memory is not EXACT,
            "shape": torch.tensor(parameter.shape, dtype=torch.int64, device="cpu"),
        }
    for name, storage in optimizer.storages(group, memory).items():
        if not _state.parts_of(state, name):
            if state:  # it was switched on later
                fresh["began_after"] = int(state["step"])
            table = _shards.table_of(parameter, key, state)
            tensors = moments.create(storage, name, table, optimizer.fill(group))
            fresh |= _state.state_entries(name, tensors)
    return {**state, **fresh} if fresh else state


def open_moments(storages: dict[Name, Storage], state: State, held: range | None) -> Moments:
    """The moments over the tensors of a state; None for one that it does not have."""
    found: dict[Name, Moment] = {}
    shape = state["shape"].tolist()
    rows = state.get("sized_for", shape[0] if shape else 1)
    for name, storage in storages.items():
        tensors: Parts = _state.parts_of(state, name)
        if tensors:  # SGD's momentum may have been switched on since the last step
            kept = storage.for_rows(rows)
            found[name] = moments.open_moment(kept, name, tensors, held=held)
    return Moments(found.get("first"), found.get("second"))


def live_moments(optimizer: Algorithm, parameter: Tensor, group: Group) -> Moments:
    """The moments of a parameter that has state, to read or to fill."""
    optimizer.settle_()
    storages = optimizer.storages(group, optimizer.memory_in_force(parameter, group))
    return open_moments(storages, optimizer.state[parameter], _shards.held_rows(parameter))


def _rounding_seed(parameter: Tensor, key: Key, group: Group, memory: Memory) -> int | None:
    if (
        memory.is_exact
        or group.get("rounding") == "nearest"
        or parameter.dtype not in _rounding.ROUNDED_DTYPES
    ):
        return None
    return _rounding.weights_seed(key)
