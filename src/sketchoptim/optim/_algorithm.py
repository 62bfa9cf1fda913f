"""What an optimizer is apart from its step: its moments, its options, its rule and its groups."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from .._validation import check_choice, check_flag, check_number
from ..deferred import is_row_sparse
from ..moments import Name
from ..ops import AnyRule
from ..storage import PRESETS, Memory, Storage
from . import _checks
from ._state import State, parts_of, starts_anew

Group = dict[str, Any]
# By an optimizer of torch.optim with the same algorithm: its keys of the moments.
Twins = dict[type[torch.optim.Optimizer], dict[Name, str]]

EXACT = PRESETS["exact"]
# Options of torch.optim's groups that ours do not have.
REFUSED_FLAGS = ("amsgrad", "centered", "foreach", "fused", "capturable", "differentiable")


class ExactParameter(Protocol):
    """A parameter with exact moments and a dense gradient, for a function of torch.optim."""

    @property
    def local(self) -> Tensor:
        """The rows that this process holds."""

    @property
    def gradient(self) -> Tensor:
        """The gradient of these rows."""

    @property
    def state(self) -> State: ...

    @property
    def began_after(self) -> int:
        """Steps before its moments were switched on."""

    def exact_values(self, name: Name) -> Tensor:
        """The tensor of a moment."""


class Algorithm(torch.optim.Optimizer):
    """The part of an optimizer that its subclasses give, and the meaning of groups and states."""

    moment_names: ClassVar[tuple[Name, ...]]
    """The moments that the algorithm has."""
    late_moments: ClassVar[tuple[Name, ...]] = ()
    """Moments that an option may switch on in the middle of a run."""
    torch_twins: ClassVar[Twins] = {}
    """What `from_torch` and `to_torch` convert from and to."""
    torch_step_: Callable[[Group, Sequence[ExactParameter]], None] | None = None
    """Steps parameters with dense gradients and exact moments; None if torch has no such."""

    def rule(self, group: Group, step: int, *, memory: Memory, is_sparse: bool) -> AnyRule:
        """What step number `step` of a parameter does whose moments are kept as `memory` says."""
        raise NotImplementedError

    def check_options(self, group: Group) -> None:
        """Raises if an option is out of range; called for new groups and when they change."""
        check_number("lr", group["lr"], allow_tensor=True)
        check_number("weight_decay", group["weight_decay"], allow_tensor=True)
        check_flag("maximize", group["maximize"])
        check_choice("nonfinite", group["nonfinite"], ("raise", "skip", "unchecked"))
        check_choice("rounding", group["rounding"], (None, "stochastic", "nearest"))
        _checks.check_is_memory(group["memory"])

    def storages(self, group: Group, memory: Memory) -> dict[Name, Storage]:
        """The moments to keep, with where they live."""
        found = {name: getattr(memory, name) for name in self.moment_names}
        return {name: storage for name, storage in found.items() if storage is not None}

    def fill(self, group: Group) -> float:
        """The number that moments start from."""
        return 0.0

    def settle_(self) -> None:
        """Waits for devices that count steps by themselves, and raises what they have refused."""
        raise NotImplementedError

    # -- groups and states -------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group; if it names a `memory`, dense-gradient parameters are compressed too."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a group must be a dict, got {type(param_group).__name__}")
        group = dict(param_group)
        group.setdefault("compress_dense", "memory" in group)
        group["memory"] = Memory.of(group.get("memory", self.defaults["memory"]))
        options = {**self.defaults, **group}
        _checks.check_group(type(self).__name__, self.moment_names, REFUSED_FLAGS, options)
        self.check_options(options)
        super().add_param_group(group)

    def option_names(self) -> set[str]:
        """The options that a group must have."""
        # torch.optim adds flags of its own to the defaults of a copied or loaded optimizer.
        return set(self.defaults).difference(REFUSED_FLAGS)

    def memory_in_force(self, parameter: Tensor, group: Group) -> Memory:
        """The memory of a parameter that has state or a gradient: its group's, or exact."""
        state, gradient = self.state.get(parameter), parameter.grad
        if state and not starts_anew(state, gradient):
            is_compressed = state.get("is_compressed")
        else:
            assert gradient is not None
            is_compressed = is_row_sparse(gradient) or group["compress_dense"]
        memory: Memory = group["memory"]
        return memory if is_compressed and memory != EXACT else EXACT

    def stored_moments(self, group: Group, memory: Memory, state: State) -> dict[Name, Storage]:
        """The storages of the moments that a state must have by now."""
        wanted = self.storages(group, memory)
        found: dict[Name, Storage] = {}
        for name in self.moment_names:
            is_due = name in wanted and name not in self.late_moments
            if is_due or (getattr(memory, name) is not None and parts_of(state, name)):
                found[name] = getattr(memory, name)
        return found

    def steps_by_torch(self, group: Group, memory: Memory) -> bool:
        """Whether a parameter's dense gradients go to torch.optim's own function."""
        return (
            self.torch_step_ is not None
            and memory.is_exact
            and memory.clip is None
            and self.storages(group, memory) == self.storages(group, EXACT)
        )
