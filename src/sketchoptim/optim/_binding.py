"""A parameter bound to its state and its group's options: what its steps have in common."""

import ctypes
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from .. import _rounding, moments, ops
from .._validation import PLAIN_TENSORS
from ..moments import Moment, Moments, Name, Parts, Table
from ..ops import AnyRule
from ..storage import PRESETS, Memory, Storage
from . import _checks, _sharding, _state
from ._names import key_of
from ._sharding import Shard

if TYPE_CHECKING:
    from .base import Group, Optimizer

State = dict[str, Any]
Options = tuple[object, ...]

EXACT = PRESETS["exact"]


@dataclass(frozen=True, eq=False, slots=True)
class Binding:
    """One parameter with its state and options; immutable, and built again when they change.

    Kept from step to step, because building it takes longer than a small step: without it a step on
    four short rows takes 8 times as long (`python -m experiments.studies.small_steps`).
    """

    parameter: Tensor
    local: Tensor
    """The rows of it that this process holds: a plain tensor, the parameter itself as a rule."""
    shard: Shard | None
    """Where these rows are in the parameter, if it is a DTensor."""
    state: State
    options: Options
    group_memory: Memory
    memory: Memory
    """The memory in force: the group's, or exact."""
    storages: dict[Name, Storage]
    moments: Moments
    kernels: ops.Kernels | None
    counting: ops.CountingKernels | None
    """The kernels, if their device counts the steps."""
    fallback_reason: str | None
    """Why there are no kernels, where a user can change that."""
    delegates_to_torch: bool
    """Whether its dense gradients go to torch.optim's own function."""
    refuses_nonfinite: bool
    """Whether gradients must be finite: a compressed moment would carry a NaN to other rows."""
    rounding_seed: int | None
    """Seeds the stochastic rounding of its weights; None where they are rounded to nearest."""
    is_watched: bool
    """Whether a step of it may call for a warning."""
    step_count: ctypes.c_double
    """The memory of the state's `step`: torch and NumPy take longer to get at it."""
    began_after: int
    """Steps before its moments were switched on."""
    maintained: tuple[tuple[Name, Moment], ...]
    """The moments that have something to do between steps."""
    raised_parts: tuple[tuple[Name, str], ...]
    """The parts whose maximum over processes, which each have raised them, is the moment's."""
    layout: tuple[torch.Size, torch.dtype, bool, int]
    """Shape and dtype of the local rows, whether they are contiguous, and their address."""
    addresses: tuple[tuple[str, Tensor, int], ...]
    """The tensors of the state that steps change, and where their numbers are."""

    @property
    def gradient(self) -> Tensor:
        """That of the local rows."""
        assert self.parameter.grad is not None  # only such parameters are stepped
        return _sharding.local(self.parameter.grad)

    def exact_values(self, name: Name) -> Tensor:
        """The tensor of an exact moment."""
        moment: Moment = getattr(self.moments, name)
        return moment.exact_values()

    def is_current(self, state: State | None, options: Options | None) -> bool:
        """Whether parameter, state and options are those it was built for, where they were.

        Without options, whether parameter and state are.
        """
        shape, dtype, is_contiguous, address = self.layout
        local = self.parameter if self.shard is None else _sharding.local(self.parameter)
        if (
            state is not self.state
            or (options is not self.options and options is not None)
            or local.dtype is not dtype
            or local.shape != shape
            or local.is_contiguous() is not is_contiguous
            or (address and local.data_ptr() != address)
        ):
            return False
        for key, tensor, place in self.addresses:
            if state.get(key) is not tensor or (place and tensor.data_ptr() != place):
                return False
        return True

    def prepare(
        self,
        gradient: Tensor,
        rule: AnyRule,
        number: int,
        nonfinite: Literal["raise", "skip", "unchecked"],
    ) -> "BoundStep":
        """Step number `number` along a gradient, checked; nothing has changed yet."""
        if self.shard is not None:
            gradient = _sharding.local(gradient)
        is_checked = self.refuses_nonfinite and nonfinite != "unchecked"
        seed = self.rounding_seed
        key = None if seed is None else _rounding.weights_key(seed, number)
        reason: str | None = None
        step: ops.PreparedStep | None = None
        if self.kernels is not None:
            step = self.kernels.prepare(gradient, rule, is_checked=is_checked, rounding_key=key)
        if step is None:
            reason = self.fallback_reason
            if self.kernels is not None:
                reason = self.kernels.unsupported_reason(gradient, rule)
            first_row = 0 if self.shard is None else self.shard.rows.start
            reference = ops.Reference(self.local, self.moments, first_row=first_row)
            step = reference.prepare(gradient, rule, is_checked=is_checked, rounding_key=key)
        if not step.is_finite and nonfinite == "raise":
            decayed = ", with the weights that decay into it," if rule.weight_decay else ""
            raise ValueError(
                f"the gradient of the parameter of shape {list(self.parameter.shape)}{decayed} "
                f"must be finite and within {ops.LARGEST_GRADIENT:.2g}, got NaN, inf or more; the "
                'step is refused and nothing has changed. nonfinite="skip" skips and counts such '
                "steps"
            )
        return BoundStep(self, rule, step, number, not step.is_finite, reason)


class BoundStep(NamedTuple):
    """One parameter's step, checked and ready to run."""

    binding: Binding
    rule: AnyRule
    step: ops.PreparedStep
    number: int
    is_skipped: bool
    fallback_reason: str | None

    def run_(self, *, maintains: bool = True) -> None:
        """Moves the parameter and its moments, or counts a step that is skipped."""
        binding = self.binding
        if self.is_skipped:
            binding.state["skipped"] = binding.state.get("skipped", 0) + 1
            return
        binding.step_count.value = self.number
        if binding.parameter.numel():
            self.step.run_()
        if maintains and binding.maintained:
            self.maintain_()

    def gather_(self) -> None:
        """The first half of `run_`, for moments whose estimates need the rows of all processes."""
        assert isinstance(self.step, ops.ReferenceStep)  # no kernel stops halfway
        self.step.gather_()

    def maintain_(self) -> None:
        """Does what is due between this step and the next."""
        if not self.is_skipped:
            for name, moment in self.binding.maintained:
                if moment.maintain_(self.number):
                    self.binding.state.update(_state.state_entries(name, moment.tensors))


def bind(
    optimizer: "Optimizer",
    parameter: Tensor,
    group: "Group",
    options: Options,
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
        "refuses_nonfinite": not memory.is_exact,
        "rounding_seed": _rounding_seed(optimizer, parameter, group, memory),
        "delegates_to_torch": (
            optimizer.torch_step_ is not None
            and memory.is_exact
            and memory.clip is None
            and storages == optimizer.storages(group, EXACT)
        ),
    }
    if previous is not None and previous.is_current(state, None):
        _checks.check_memory(previous.group_memory, group["memory"])
        if memory is previous.memory and storages == previous.storages:
            return dataclasses.replace(previous, **derived)
    table = _sharding.table_of(parameter, key_of(parameter, optimizer))
    if state:
        _state.check_live(table, state, optimizer.stored_moments(group, memory, state))
    parts = {name: moments.declare(storage, name, table) for name, storage in storages.items()}
    for name, storage in storages.items():
        _sharding.check_parts(table, parts[name], storage)
    state = fresh_state(optimizer, parameter, group, memory)
    opened = open_moments(storages, state, table)
    local, shard = _sharding.local(parameter), _sharding.Shard.of(parameter)
    first_row = 0 if shard is None else shard.rows.start
    kernels, reason = ops.find_kernels(local, opened, first_row=first_row)
    is_plain = type(local) in PLAIN_TENSORS
    return Binding(
        parameter=parameter,
        local=local,
        shard=shard,
        state=state,
        memory=memory,
        storages=storages,
        moments=opened,
        kernels=kernels,
        counting=kernels if isinstance(kernels, ops.CountingKernels) else None,
        fallback_reason=reason,
        is_watched=memory != group["memory"]
        or (opened.first is not None and opened.first.storage.collides),
        step_count=ctypes.c_double.from_address(state["step"].data_ptr()),
        began_after=state.get("began_after", 0),
        maintained=tuple(
            (moment.name, moment) for moment in opened if moment and moment.has_maintenance
        ),
        raised_parts=tuple(
            (name, part.name) for name in parts for part in parts[name] if part.combine == "max"
        ),
        layout=(
            local.shape,
            local.dtype,
            local.is_contiguous(),
            local.data_ptr() if is_plain else 0,
        ),
        addresses=_addresses(state),
        **derived,
    )


def fresh_state(optimizer: "Optimizer", parameter: Tensor, group: "Group", memory: Memory) -> State:
    """The parameter's state with all that `memory` asks for: the old one if nothing is missing."""
    state: State = optimizer.state.get(parameter) or {}
    fresh: State = {}
    if not state:
        fresh |= {
            "step": torch.zeros((), dtype=torch.float64, device="cpu"),
            "is_compressed": memory is not EXACT,
            "shape": torch.tensor(parameter.shape, dtype=torch.int64, device="cpu"),
        }
    for name, storage in optimizer.storages(group, memory).items():
        if not _state.parts_of(state, name):
            if state:  # it was switched on later
                fresh["began_after"] = int(state["step"])
            table = _sharding.table_of(parameter, key_of(parameter, optimizer))
            tensors = moments.create(storage, name, table, optimizer.fill(group))
            fresh |= _state.state_entries(name, tensors)
    return {**state, **fresh} if fresh else state


def open_moments(storages: dict[Name, Storage], state: State, table: Table) -> Moments:
    """The moments over the tensors of a state; None for one that it does not have."""
    found: dict[Name, Moment] = {}
    for name, storage in storages.items():
        tensors: Parts = _state.parts_of(state, name)
        if tensors:  # SGD's momentum may have been switched on since the last step
            found[name] = moments.open_moment(storage, name, tensors, held=table.held)
    return Moments(found.get("first"), found.get("second"))


def live_moments(optimizer: "Optimizer", parameter: Tensor, group: "Group") -> Moments:
    """The moments of a parameter that has state, to look at or to fill."""
    optimizer.settle_()
    storages = optimizer.storages(group, optimizer.memory_in_force(parameter, group))
    table = _sharding.table_of(parameter, key_of(parameter, optimizer))
    return open_moments(storages, optimizer.state[parameter], table)


def _rounding_seed(
    optimizer: "Optimizer", parameter: Tensor, group: "Group", memory: Memory
) -> int | None:
    if (
        memory.is_exact
        or group["rounding"] == "nearest"
        or parameter.dtype not in _rounding.ROUNDED_DTYPES
    ):
        return None
    return _rounding.weights_seed(key_of(parameter, optimizer))


def _addresses(state: State) -> tuple[tuple[str, Tensor, int], ...]:
    found = []
    for key, tensor in state.items():
        if isinstance(tensor, Tensor) and key != "shape":
            is_plain = type(tensor) in PLAIN_TENSORS
            found.append((key, tensor, tensor.data_ptr() if is_plain else 0))
    return tuple(found)
