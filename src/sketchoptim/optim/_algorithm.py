"""What an optimizer is apart from its step: its moments, its options, its rule and its groups."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from .._group_options import COMPRESS, KNOWN_OPTIONS, compresses_dense
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
NONFINITE = ("raise", "skip", "unchecked")


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

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        KNOWN_OPTIONS.update(
            name
            for name, parameter in inspect.signature(cls).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and name != "params"
        )

    def rule(self, group: Group, step: int, *, memory: Memory, is_sparse: bool) -> AnyRule:
        """The rule of step number `step` for a parameter with this memory."""
        raise NotImplementedError

    def check_options(self, group: Group) -> None:
        """Raises if an option is out of range; called for new groups and when they change."""
        check_number("lr", group["lr"], allow_tensor=True)
        # A subclass may do without the others.
        check_number("weight_decay", group.get("weight_decay", 0.0), allow_tensor=True)
        check_flag("maximize", group.get("maximize", False))
        check_choice("nonfinite", group.get("nonfinite", "raise"), NONFINITE)
        check_choice("rounding", group.get("rounding"), (None, "stochastic", "nearest"))
        check_choice("compress", group.get("compress", "sparse"), COMPRESS)
        _checks.check_is_memory(group["memory"])

    def storages(self, group: Group, memory: Memory) -> dict[Name, Storage]:
        """The moments to keep, with their storages."""
        found = {name: getattr(memory, name) for name in self.moment_names}
        return {name: storage for name, storage in found.items() if storage is not None}

    def fill(self, group: Group) -> float:
        """The number that moments start from."""
        return 0.0

    def void_option(self, group: Group, memory: Memory) -> str | None:
        """A warning about an option of a group that has no effect in this memory, or None."""
        return None

    def settle_(self) -> None:
        """Waits for devices that count steps by themselves, and raises what they have refused."""
        raise NotImplementedError

    # -- groups and states -------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group; if it names a `memory`, dense-gradient parameters are compressed too."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a group must be a dict, got {type(param_group).__name__}")
        group = dict(param_group)
        _checks.check_spelling(group, {*self.defaults, "params", "param_names", "compress"})
        if "memory" in group:
            group.setdefault("compress", "all")
        group["memory"] = Memory.of(group.get("memory", self.defaults["memory"]))
        self.check_group({**self.defaults, **group})
        super().add_param_group(group)

    def check_group(self, options: Group) -> None:
        """Raises unless the options are those of a group of this optimizer."""
        _checks.check_group(type(self).__name__, self.moment_names, options)
        self.check_options(options)

    def option_names(self) -> set[str]:
        """The options that a group must have."""
        # Copied and loaded optimizers, and groups from elsewhere, may lack flags of torch.optim.
        return set(self.defaults).difference(_checks.TORCH_FLAGS)

    def memory_in_force(self, parameter: Tensor, group: Group) -> Memory:
        """The memory of a parameter: its group's, or exact.

        Without state and without a gradient, it is the memory that a dense gradient would get.
        """
        state, gradient = self.state.get(parameter), parameter.grad
        if state and not starts_anew(state, gradient, self.fill(group)):
            is_compressed = state.get("is_compressed")
        else:
            is_sparse = gradient is not None and is_row_sparse(gradient)
            is_compressed = is_sparse or compresses_dense(group, parameter)
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
