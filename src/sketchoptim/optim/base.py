"""What the optimizers share: groups, state, the checks before a step, and the step."""

import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar, overload

import torch
from torch import Tensor

# The public torch.compiler.disable is the same, but takes two seconds to import.
from torch._compile import _disable_dynamo
from torch.compiler import is_compiling
from torch.optim import optimizer as torch_optimizer

from .. import moments, ops
from .._warning import warn
from ..moments import Name, Table
from ..ops import Rule
from ..storage import PRESETS, Memory, Sketched, Storage
from . import _checkpoint, _checks
from ._names import name_of
from ._slot import Slot, State, Work, parts

Group = dict[str, Any]
Options = tuple[object, ...]

_EXACT = PRESETS["exact"]
# Of torch.optim's groups; ours have none of them.
REFUSED_FLAGS = ("amsgrad", "centered", "foreach", "fused", "capturable", "differentiable")


class Optimizer(torch.optim.Optimizer):
    """Base of the optimizers; a subclass gives its moments, its rule and its torch.optim twin.

    Each parameter group has a `memory`. It applies to parameters whose gradients are sparse, and
    to every parameter of a group that names a `memory` itself; all others are kept exact and are
    stepped by torch.optim's own functions. Which it is, is settled by the first gradient.
    """

    moment_names: ClassVar[tuple[Name, ...]]
    """The moments that the algorithm has."""
    late_moments: ClassVar[tuple[Name, ...]] = ()
    """Those among them that an option may switch on in the middle of a run."""

    def __init__(self, params: Any, *, memory: str | Memory, **options: Any) -> None:
        self._forget_()
        super().__init__(params, {**options, "memory": Memory.of(memory)})

    # -- what a subclass gives ---------------------------------------------------------------

    def _check_options(self, group: Group) -> None:
        """Raises where an option is out of range; called for new groups and before each step."""
        _checks.check_number("lr", group["lr"])
        _checks.check_number("weight_decay", group["weight_decay"])
        _checks.check_flag("maximize", group["maximize"])
        if not isinstance(group["memory"], Memory):
            raise TypeError(
                f"memory of a group must be a Memory, got {group['memory']!r}; "
                "presets have names in add_param_group() and in constructors"
            )
        if group["nonfinite"] not in ("raise", "skip"):
            raise ValueError(f'nonfinite must be "raise" or "skip", got {group["nonfinite"]!r}')

    def storages(self, group: Group, memory: Memory) -> dict[Name, Storage]:
        """The moments to keep, with where they live."""
        chosen: dict[Name, Storage] = {}
        for name in self.moment_names:
            storage = getattr(memory, name)
            if storage is not None:
                chosen[name] = storage
        return chosen

    def _rule(self, group: Group, step: int, *, memory: Memory, is_sparse: bool) -> Rule:
        """The numbers of step number `step` of moments that are kept as `memory` says."""
        raise NotImplementedError

    def _torch_step_(self, group: Group, parameters: list[Tensor], states: list[State]) -> None:
        """Steps parameters with dense gradients and exact moments by torch.optim's function."""
        raise NotImplementedError

    def _fill(self, group: Group) -> float:
        """The number that moments start from."""
        return 0.0

    # -- groups and state --------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group; where it names a `memory`, dense-gradient parameters are compressed too."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a group must be a dict, got {type(param_group).__name__}")
        group = dict(param_group)
        group.setdefault("compress_dense", "memory" in group)
        group["memory"] = Memory.of(group.get("memory", self.defaults["memory"]))
        options = {**self.defaults, **group}
        for flag in REFUSED_FLAGS:
            if options.get(flag):
                raise ValueError(f"{flag} is not supported by {type(self).__name__}; leave it out")
        self._check_memory(group["memory"])
        self._check_options(options)
        super().add_param_group(group)

    def _check_memory(self, memory: Memory) -> None:
        name = type(self).__name__
        if "second" in self.moment_names and memory.second is None:
            raise ValueError(f"memory.second must be a storage for {name}, got None")
        if memory.form == "ratio" and len(self.moment_names) < 2:
            raise ValueError(f'form="ratio" divides two moments, but {name} has one')

    def _memory(self, parameter: Tensor, group: Group) -> Memory:
        """The memory in force for a parameter that has a gradient."""
        state = self.state.get(parameter)
        if state:
            is_compressed = state.get("is_compressed")
        else:
            assert parameter.grad is not None
            is_compressed = parameter.grad.is_sparse or group["compress_dense"]
        return group["memory"] if is_compressed else _EXACT

    def _state_of(self, parameter: Tensor, group: Group, memory: Memory) -> State:
        """The parameter's state with all that `memory` asks for, in place only if it was there."""
        state: State = self.state.get(parameter) or {}
        fresh: State = {}
        if not state:
            fresh |= {
                "step": torch.zeros((), dtype=torch.float32, device="cpu"),
                "is_compressed": memory != _EXACT,
                "shape": torch.tensor(parameter.shape, dtype=torch.int64, device="cpu"),
            }
        for name, storage in self.storages(group, memory).items():
            if not parts(state, name):
                if state:  # it was switched on later
                    fresh["began_after"] = int(state["step"])
                tensors = moments.create(storage, self._table(parameter), fill=self._fill(group))
                fresh |= {f"{name}_{part}": tensor for part, tensor in tensors.items()}
        return {**state, **fresh} if fresh else state

    def _expected(self, state: State, storages: dict[Name, Storage]) -> dict[Name, Storage]:
        """The storages of the moments that a state must have by now."""
        return {
            name: storage
            for name, storage in storages.items()
            if parts(state, name) or name not in self.late_moments
        }

    def _table(self, parameter: Tensor) -> Table:
        everything = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        number = next(i for i, other in enumerate(everything) if other is parameter)
        return Table(parameter.shape, parameter.dtype, parameter.device, number)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_()

    def _forget_(self) -> None:
        """Begins anew with what steps remember of the ones before."""
        self._warned: set[Tensor] = set()
        self._slots: dict[int, Slot] = {}  # by the id of the parameter, which a slot keeps alive
        self._passed: dict[int, Options] = {}  # by the id of the group

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
        if is_compiling():
            self._uncompiled_step_()
        else:
            self._step_()
        return loss

    def _step_(self) -> None:
        checked = [self._checked(group) for group in self.param_groups]
        for group, (exact, works) in zip(self.param_groups, checked, strict=True):
            for slot in exact:
                self._keep_(slot)
            for work in works:
                self._keep_(work.slot)
            if exact:
                with torch.no_grad():
                    parameters, states = [it.parameter for it in exact], [it.state for it in exact]
                    self._torch_step_(group, parameters, states)
            for work in works:
                work.run_()
        if len(self._slots) > len(self.state):  # which the user has emptied, in part at least
            kept = [slot for slot in self._slots.values() if slot.parameter in self.state]
            self._slots = {id(slot.parameter): slot for slot in kept}
        # Last of all, since a warning may be an error, and a step must not stop halfway.
        for _, works in checked:
            for work in works:
                self._warn_of_load(work)
                self._warn_of_exactness(work)

    def _keep_(self, slot: Slot) -> None:
        if slot.is_new:
            self.state[slot.parameter] = slot.state
            self._slots[id(slot.parameter)] = slot
            slot.is_new = False

    # Where torch.compile breaks the graph of a training step, to go on behind it. Eager steps do
    # not go through it: the wrapper takes as long as a small step.
    _uncompiled_step_ = _disable_dynamo(_step_)

    @staticmethod
    def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
        """torch's wrapper around `step` of a class, for the calls that it has something to do in.

        It opens a record for the profiler even when none is there, which with cold caches takes
        as long as all the rest of a small step.
        """
        recorded = torch.optim.Optimizer.profile_hook_step(step)

        @functools.wraps(step)
        def wrapper(self: "Optimizer", *args: Any, **kwargs: Any) -> Any:
            is_watched = (
                torch.autograd.profiler._is_profiler_enabled
                or self._optimizer_step_pre_hooks
                or self._optimizer_step_post_hooks
                or torch_optimizer._global_optimizer_pre_hooks
                or torch_optimizer._global_optimizer_post_hooks
            )
            return (recorded if is_watched else step)(self, *args, **kwargs)

        return wrapper

    def _checked(self, group: Group) -> tuple[list[Slot], list[Work]]:
        """The group's parameters with a gradient: those for torch.optim, and those for `ops`."""
        options = self._passing(group)
        exact, works = [], []
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            slot = self._slots.get(id(parameter))
            state = self.state.get(parameter)
            try:
                if slot is not None and slot.options is options and slot.is_in_place(state):
                    _checks.check_gradient(slot, gradient)
                else:
                    _checks.check_parameter(parameter)
                    _checks.check_gradient(parameter, gradient)
                    slot = self._slot(parameter, group, options)
                if gradient.is_sparse or not slot.is_for_torch:
                    works.append(self._work(slot, group, gradient))
                else:
                    exact.append(slot)
            except (TypeError, ValueError) as error:
                error.add_note(f"It is {name_of(parameter, self)}.")
                raise
        return exact, works

    def _passing(self, group: Group) -> Options:
        """The options of a group, which pass its checks: the same object while they are the same.

        All but the rate, which may well change with every step.
        """
        _checks.check_number("lr", group["lr"])
        options, before = self._options_of(group), self._passed.get(id(group))
        if before is not None and all(map(operator.is_, options, before)):
            return before
        self._check_options(group)
        # What can change and stay the same object is not known by looking at it.
        if all(_checks.is_fixed(option) for option in options):
            self._passed[id(group)] = options
        return options

    @functools.cached_property
    def _options_of(self) -> Callable[[Group], Options]:
        names = {*self.defaults, "compress_dense"}.difference(REFUSED_FLAGS, ["lr"])
        return operator.itemgetter(*sorted(names))

    def _slot(self, parameter: Tensor, group: Group, options: Options) -> Slot:
        """The slot of the step before, or a new one for what has changed since then."""
        memory = self._memory(parameter, group)
        storages = self.storages(group, memory)
        slot, state = self._slots.get(id(parameter)), self.state.get(parameter)
        if slot is not None and slot.is_in_place(state):
            _checks.check_memory(slot.group_memory, group["memory"])
        if slot is None or not slot.keeps(memory, storages) or not slot.is_in_place(state):
            if state:
                _checks.check_live_state(parameter, state, self._expected(state, storages))
            slot = Slot(parameter, memory, storages, self._state_of(parameter, group, memory))
        slot.options, slot.group_memory = options, group["memory"]
        slot.is_as_meant = not storages or memory == group["memory"]
        slot.is_for_torch = memory.clip is None and storages == self.storages(group, _EXACT)
        return slot

    def _work(self, slot: Slot, group: Group, gradient: Tensor) -> Work:
        number = int(slot.count.value) + 1
        rule = self._rule(
            group, number - slot.began_after, memory=slot.memory, is_sparse=gradient.is_sparse
        )
        step = slot.prepare(gradient, rule)
        is_refused = not (slot.is_exact or step.is_finite())
        if is_refused and group["nonfinite"] == "raise":
            decayed = ", with the weights that decay into it," if rule.weight_decay else ""
            raise ValueError(
                f"the gradient of the parameter of shape {list(slot.parameter.shape)}{decayed} "
                f"must be finite and within {ops.LARGEST_GRADIENT:.2g}, got NaN, inf or more; the "
                'step is refused and nothing has changed. nonfinite="skip" skips and counts such '
                "steps"
            )
        return Work(slot, rule, step, number, is_refused)

    def _warn_of_load(self, work: Work) -> None:
        """Warns once for a parameter whose sketched first moment is too small to be stable."""
        slot, parameter = work.slot, work.slot.parameter
        if not isinstance(slot.storages.get("first"), Sketched) or work.rule.first is None:
            return
        width = slot.state["first_table"].shape[1]
        load, decay = work.step.touched / width, work.rule.first.decay
        limit = 2 / (1 - decay) if decay < 1 else math.inf
        if load > limit and parameter not in self._warned:
            self._warned.add(parameter)
            warn(
                f"{load:.0f} active rows a bucket a step in the first moment of the parameter of "
                f"shape {list(parameter.shape)}: above {limit:.0f} a sketched first moment "
                "drowns in collisions, and training may diverge. Use a larger ratio, "
                "or Memory(first=None)"
            )

    def _warn_of_exactness(self, work: Work) -> None:
        """Warns once for a table that is not compressed, since its first gradient was dense."""
        parameter = work.slot.parameter
        if work.slot.is_as_meant or parameter in self._warned:
            return
        self._warned.add(parameter)
        warn(
            f"the parameter of shape {list(parameter.shape)} has a sparse gradient, but is kept "
            "exactly, because its first gradient was dense. Put it into a group that names its "
            "memory to compress it from the beginning"
        )

    # -- checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state in tensors, numbers and strings, which `torch.load` reads by default."""

        def describe(_: torch.optim.Optimizer, packed: dict[str, Any]) -> None:
            for group in packed["param_groups"]:
                group["memory"] = group["memory"].to_dict()

        # Before the user's own hooks, so that they see what will be saved.
        handle = self.register_state_dict_post_hook(describe, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` gave, bit for bit, or says what differs and changes nothing.

        torch.optim casts state to the parameter's dtype and shares it with the given dict; here
        tables keep their own dtype, and everything is copied.
        """
        final: dict[str, Any] = {}

        def check(_: torch.optim.Optimizer, hooked: dict[str, Any]) -> None:
            self._check_loaded(hooked)
            final.update(hooked)

        def restore(_: torch.optim.Optimizer) -> None:
            self._restore_(final)

        # The check runs behind the user's own hooks, the restoring before them.
        handles = [
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _check_loaded(self, loaded: dict[str, Any]) -> None:
        saved_groups = loaded["param_groups"]
        if len(saved_groups) != len(self.param_groups):
            return  # torch.optim says so
        for number, (group, saved) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
            # torch.optim adds a flag of its own to the defaults of a copied or loaded optimizer.
            expected = set(self.defaults).difference(REFUSED_FLAGS)
            _checkpoint.check_options(f"group {number}", expected, set(saved))
            try:
                memory = Memory.from_dict(saved["memory"])
                self._check_options({**self.defaults, **saved, "memory": memory})
            except (TypeError, ValueError) as error:
                raise type(error)(f"group {number} of the checkpoint: {error}") from None
            _checkpoint.check_plan(f"group {number}", group, {**saved, "memory": memory})
            for parameter, key in zip(group["params"], saved["params"], strict=False):
                state = loaded["state"].get(key)
                if state:
                    in_force = memory if state.get("is_compressed") else _EXACT
                    storages = self.storages({**self.defaults, **saved}, in_force)
                    storages = self._expected(state, storages)
                    where = f"parameter {key}"
                    _checkpoint.check_saved_state(where, state, storages, parameter.shape)

    def _restore_(self, loaded: dict[str, Any]) -> None:
        for group, saved in zip(self.param_groups, loaded["param_groups"], strict=True):
            group["memory"] = Memory.from_dict(saved["memory"])
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                state = loaded["state"].get(key)
                if state:
                    self.state[parameter] = _checkpoint.restored(parameter, state)
