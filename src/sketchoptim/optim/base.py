"""The base of the optimizers: groups, the step, and what a subclass gives."""

import operator
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import _torch_private
from .._validation import check_choice, check_flag, check_number
from ..moments import Name
from ..ops import AnyRule, FusedRule
from ..storage import Memory, Storage
from . import _advice, _binding, _blank_state, _checkpoint, _checks, _counting, _sharding
from ._binding import EXACT, Binding, BoundStep, Options, State
from ._names import name_of
from ._state import parts_of

Group = dict[str, Any]
# By an optimizer of torch.optim with the same algorithm: its keys of the moments.
Twins = dict[type[torch.optim.Optimizer], dict[Name, str]]

# Options of torch.optim's groups that ours do not have.
REFUSED_FLAGS = ("amsgrad", "centered", "foreach", "fused", "capturable", "differentiable")


class Optimizer(torch.optim.Optimizer):
    """Base of the optimizers; a subclass gives its moments, its options and its rule.

    Each parameter group has a `memory`. It applies to parameters whose gradients are sparse, and
    to every parameter of a group that names a `memory` itself; all others are kept exact. The first
    gradient of a parameter decides. Exact parameters with dense gradients are stepped by
    torch.optim's own function where the subclass names one in `torch_step_`.

    A step from several threads at once is serialised.
    """

    moment_names: ClassVar[tuple[Name, ...]]
    """The moments that the algorithm has."""
    late_moments: ClassVar[tuple[Name, ...]] = ()
    """Those among them that an option may switch on in the middle of a run."""
    torch_twins: ClassVar[Twins] = {}
    """What `from_torch` and `to_torch` convert from and to."""
    torch_step_: Callable[[Group, list[Binding]], None] | None = None
    """Steps parameters with dense gradients and exact moments; None where torch has no such."""

    def __init__(
        self, params: Any, *, memory: str | Memory, rounding: str | None = None, **options: Any
    ) -> None:
        self._reset_caches_()
        super().__init__(params, {**options, "memory": Memory.of(memory), "rounding": rounding})

    # -- what a subclass gives ---------------------------------------------------------------

    def rule(self, group: Group, step: int, *, memory: Memory, is_sparse: bool) -> AnyRule:
        """What step number `step` of a parameter does whose moments are kept as `memory` says."""
        raise NotImplementedError

    def check_options(self, group: Group) -> None:
        """Raises where an option is out of range; called for new groups and when they change."""
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

    # -- groups ------------------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group; where it names a `memory`, dense-gradient parameters are compressed too."""
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
        state = self.state.get(parameter)
        if state:
            is_compressed = state.get("is_compressed")
        else:
            assert parameter.grad is not None
            is_compressed = parameter.grad.is_sparse or group["compress_dense"]
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

    # -- the step ----------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Moves every parameter that has a gradient; returns what the closure, if any, returned.

        Everything is checked first: where a check raises, no parameter and no state has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if is_dynamo_compiling():
            self._uncompiled_step_()
        else:
            self._step_()
        return loss

    profile_hook_step = staticmethod(_torch_private.hooked_when_needed)  # type: ignore[assignment]

    _bindings: dict[int, Binding]  # by id of the parameter, which a binding keeps alive
    _lists: list[list[Tensor]]  # the parameters of the groups, when these were found:
    _divided: _sharding.Divided

    def _step_(self) -> None:
        with self._lock:
            if not self.state and _blank_state.is_asked_for(self):
                return _blank_state.create_(self)
            fresh: list[Binding] = []
            steps: list[BoundStep] = []
            lists = [group["params"] for group in self.param_groups]
            # accelerate puts sharded parameters into an optimizer that was built with whole ones.
            if len(lists) != len(self._lists) or any(map(operator.is_not, lists, self._lists)):
                self._lists, self._divided = lists, _sharding.divided_parameters(self)
            try:
                delegated = [self._prepare(group, fresh, steps) for group in self.param_groups]
            except Exception:
                _sharding.refuse(self._divided)
                raise
            if self._divided:
                steps = _sharding.agree(self._divided, steps)
            # Everything is checked: from here on nothing raises.
            for binding in fresh:
                self.state[binding.parameter] = binding.state
                self._bindings[id(binding.parameter)] = binding
            if self._divided:
                _sharding.run_(steps)
            else:
                if len(steps) > 1:
                    _counting.launch_together_(steps)
                for step in steps:
                    step.run_()
            for group, bindings in zip(self.param_groups, delegated, strict=True):
                if bindings:
                    assert self.torch_step_ is not None  # delegates_to_torch
                    with torch.no_grad():
                        self.torch_step_(group, bindings)
            if len(self._bindings) > len(self.state):  # the user has removed state
                kept = [it for it in self._bindings.values() if it.parameter in self.state]
                self._bindings = {id(binding.parameter): binding for binding in kept}
            # Last of all, since a warning may be an error, and a step must not stop halfway.
            if fresh or any(it.fallback_reason or it.binding.is_watched for it in steps):
                _advice.warn_(self, steps, fresh, self._warned)

    # Where torch.compile breaks the graph of a training step, to go on behind it. Eager steps do
    # not go through it: the wrapper takes as long as a small step.
    _uncompiled_step_ = _torch_private.disable_dynamo(_step_)

    def _prepare(self, group: Group, fresh: list[Binding], steps: list[BoundStep]) -> list[Binding]:
        """Appends new bindings and checked steps; returns what is left to torch's function."""
        options = self._validated_options(group)
        delegated = []
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            try:
                binding = self._bindings.get(id(parameter))
                if binding is None or not binding.is_current(self.state.get(parameter), options):
                    _counting.settle_(binding, group)
                    binding = _binding.bind(self, parameter, group, options, binding)
                    fresh.append(binding)
                _checks.check_gradient(parameter, gradient)
                if binding.delegates_to_torch and not gradient.is_sparse:
                    delegated.append(binding)
                else:
                    if binding.counting is not None:
                        _counting.settle_(binding, group, waits=False)
                    number = int(binding.step_count.value) + 1
                    rule = self.rule(
                        group,
                        number - binding.began_after,
                        memory=binding.memory,
                        is_sparse=gradient.is_sparse,
                    )
                    if binding.counting is not None and type(rule) is not FusedRule:
                        _counting.settle_(binding, group)  # the reference steps it
                    steps.append(binding.prepare(gradient, rule, number, group["nonfinite"]))
            except (TypeError, ValueError) as error:
                error.add_note(f"It is {name_of(parameter, self)}.")
                raise
        return delegated

    def _validated_options(self, group: Group) -> Options:
        """The options of a group, all but the rate: the same object while they are the same.

        Kept because a step on four short rows that validates them takes twice as long
        (`python -m experiments.studies.small_steps`). The rate may change with every step.
        """
        if type(group["lr"]) is not float or not 0.0 <= group["lr"] < float("inf"):
            check_number("lr", group["lr"], allow_tensor=True)
        options, before = self._options_of(group), self._validated.get(id(group))
        if before is not None and all(map(operator.is_, options, before)):
            return before
        self.check_options(group)
        if all(map(_checks.is_fixed, options)):
            self._validated[id(group)] = options
        return options

    @cached_property
    def _options_of(self) -> Callable[[Group], Options]:
        return operator.itemgetter(*sorted({*self.option_names(), "compress_dense"} - {"lr"}))

    def settle_(self) -> None:
        """Waits for GPUs, which count steps by themselves, and raises what they have refused."""
        _counting.settle_all_(self)

    # -- checkpoints and copies --------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state in tensors, numbers and strings, which `torch.load` reads by default."""
        self.settle_()
        return _checkpoint.pack(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` gave, bit for bit, or says what differs and changes nothing.

        torch.optim casts state to the parameter's dtype and shares it with the given dict; here
        counters keep their own dtype, and everything is copied.
        """
        _checkpoint.load_(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        self.settle_()
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset_caches_()

    def _reset_caches_(self) -> None:
        self._lock = threading.Lock()
        self._warned: set[tuple[int, str]] = set()
        self._bindings, self._lists, self._divided = {}, [], {}
        self._validated: dict[int, Options] = {}  # by id of the group
