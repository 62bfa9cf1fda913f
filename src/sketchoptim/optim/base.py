"""The base of the optimizers: the step, checkpoints and copies."""

import math
import operator
from collections.abc import Callable
from functools import cached_property
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .. import _torch_private, ops
from .._locks import fork_safe_lock
from .._names import keys_of, name_of
from .._param_groups import param_groups
from .._validation import check_count, check_number
from ..deferred import DeferredGradient, is_row_sparse, plain_if_it_exists
from ..ops import AnyRule, FusedRule
from ..storage import Memory
from . import _advice, _agreement, _blank_state, _checkpoint, _checks, _counting, _exchange
from ._algorithm import Algorithm, Group
from ._binding import Binding, Key, Options, bind
from ._repetition import Repetition, is_repeatable
from ._row_blocks import torch_calls
from ._signals import SignalsWait
from ._step import Step

__all__ = ["Group", "Optimizer"]

# What torch's function for one exact parameter allocates at a time, in copies of the parameter.
_TEMPORARIES = 4


class Optimizer(Algorithm):
    """Base of the optimizers; a subclass gives its moments, its options and its rule.

    Each parameter group has a `memory`. It applies to parameters whose gradients are sparse, and
    to every parameter of a group that names a `memory` itself; all others are kept exact. The first
    gradient of a parameter decides. Exact parameters with dense gradients are stepped by
    torch.optim's own function where the subclass names one in `torch_step_`.

    A step from several threads at once is serialised.
    """

    def __init__(self, params: Any, *, memory: str | Memory, **options: Any) -> None:
        self._reset_caches_()
        defaults = {**options, "memory": Memory.of(memory)}
        self.check_group(defaults)  # before the parameters, as torch.optim does
        if isinstance(params, nn.Module):
            params = param_groups(params, defaults["memory"])
        super().__init__(params, defaults)

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
    _divided: _exchange.Divided

    def _step_(self) -> None:
        with self._lock:
            lists = [group["params"] for group in self.param_groups]
            # accelerate puts sharded parameters into an optimizer that was built with whole ones.
            is_new = len(lists) != len(self._lists) or any(map(operator.is_not, lists, self._lists))
            if is_new:
                _agreement.check_meshes(self)
            if not self.state and _blank_state.is_asked_for(self):
                return _blank_state.create_(self)
            if is_new:
                _agreement.check_replicas(self)
                self._lists = lists
                self._stepped.clear()
                self._repetitions.clear()
                self._divided = _exchange.divided_parameters(self.param_groups)
            try:
                prepared = self._checked()
                is_one_call = prepared.is_one_call
                if not is_one_call:
                    prepared.reserve_memory()
            except Exception:
                self._calls.clear_()
                _exchange.refuse(self._divided)
                raise
            if self._divided:
                _exchange.agree_(self._divided, prepared.steps)
            # Everything is checked: from here on nothing raises, and signals wait.
            if is_one_call and not self._divided:
                self._calls.run_()
                self._calls.clear_()
            else:
                with SignalsWait():
                    self._run_(prepared)
            if len(self._bindings) > len(self.state):  # the user has removed state
                kept = [it for it in self._bindings.values() if it.parameter in self.state]
                self._bindings = {id(binding.parameter): binding for binding in kept}
            if not self._divided:  # where one process may repeat what another one cannot
                self._note_repetitions_(prepared)
            # Last of all, since a warning may be an error, and a step must not stop halfway.
            _advice.warn_(self, prepared.steps, prepared.fresh, self._warned)

    # Where torch.compile breaks the graph of a training step, to go on behind it. Eager steps do
    # not go through it: the wrapper takes as long as a small step.
    _uncompiled_step_ = _torch_private.disable_dynamo(_step_)

    def _checked(self) -> "_Prepared":
        """What all parameters will do, once nothing of it is refused."""
        prepared = self._prepared()
        if self._calls.check_(prepared.native, prepared.repeated):
            return prepared
        if prepared.repeated:  # step by step, to name or to skip what is not fit to run
            self._repetitions.clear()
            self._calls.clear_()
            prepared = self._prepared()
            self._calls.check_(prepared.native)
        for step in prepared.steps:
            try:
                step.settle_()
            except ValueError as error:
                error.add_note(f"It is {name_of(step.parameter, self)}.")
                raise
        return prepared

    def _prepared(self) -> "_Prepared":
        prepared = _Prepared()
        for group in self.param_groups:
            options = self._validated_options(group)
            repetition = self._repetitions.pop(id(group), None)
            if repetition is not None and repetition.prepare(self, options):
                self._repetitions[id(group)] = repetition
                prepared.repeated.append(repetition.calls)
            else:
                first = len(prepared.steps)
                self._prepare(group, options, prepared)
                prepared.by_group.append((group, options, prepared.steps[first:]))
        return prepared

    def _prepare(self, group: Group, options: Options, prepared: "_Prepared") -> None:
        """Adds what the parameters of a group will do; nothing changes, whatever is refused."""
        nonfinite = group.get("nonfinite", "raise")
        rule: AnyRule | None = None
        known: tuple[int, Memory, bool] | None = None
        by_torch: list[Binding] = []
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if type(gradient) is DeferredGradient:
                gradient = plain_if_it_exists(gradient)
                is_sparse = is_row_sparse(gradient)
            else:
                is_sparse = gradient.is_sparse
            try:
                binding = self._bindings.get(id(parameter))
                if binding is None or not binding.is_current(self.state.get(parameter), options):
                    binding = self._bind(parameter, group, options, binding, prepared)
                if binding.counting is not None:
                    _counting.settle_(binding, group, waits=False)
                count = binding.step_count.value
                if not 0.0 <= count < math.inf:
                    check_count("step in its state", count, remedy="load a checkpoint")
                if binding.steps_by_torch and not is_sparse:
                    _checks.check_gradient(parameter, gradient)
                    if type(gradient) is DeferredGradient:
                        gradient.check_ids()
                    by_torch.append(binding)
                    continue
                number = int(count) + 1
                of_rule = (number - binding.began_after, binding.memory, is_sparse)
                if rule is None or of_rule != known:  # most parameters of a group share one
                    known = of_rule
                    rule = self.rule(group, known[0], memory=known[1], is_sparse=is_sparse)
                if binding.counting is not None and type(rule) is not FusedRule:
                    _counting.settle_(binding, group)  # the reference steps it
                step = Step(binding, gradient, rule, number, nonfinite)
                prepared.steps.append(step)
                if type(step.prepared) is ops.CpuKernels:
                    prepared.native.append(step.prepared)
                elif not step.prepared.is_finite:
                    step.settle_()
            except (TypeError, ValueError) as error:
                error.add_note(f"It is {name_of(parameter, self)}.")
                raise
        if by_torch:
            prepared.by_torch.append((group, by_torch))

    def _bind(
        self,
        parameter: Tensor,
        group: Group,
        options: Options,
        previous: Binding | None,
        prepared: "_Prepared",
    ) -> Binding:
        _counting.settle_(previous, group)
        if prepared.keys is None:
            prepared.keys = keys_of(self)
        binding = bind(self, parameter, group, options, prepared.keys[parameter], previous)
        prepared.fresh.append(binding)
        return binding

    def _run_(self, prepared: "_Prepared") -> None:
        for binding in prepared.fresh:
            self.state[binding.parameter] = binding.state
            self._bindings[id(binding.parameter)] = binding
        steps = prepared.steps
        if self._divided:
            _exchange.sum_gathered_(steps)
        elif len(steps) > len(prepared.native):
            _counting.launch_together_(steps)
        self._calls.run_()
        self._calls.clear_()
        if len(prepared.native) < len(steps):
            for step in steps:
                step.run_()
        if self._divided:
            _exchange.unify_(steps)
        for step in steps:
            if step.is_skipped:
                step.count_skip_()
            elif step.binding.maintained:
                step.maintain_()
        for group, bindings in prepared.by_torch:
            assert self.torch_step_ is not None  # steps_by_torch
            with torch.no_grad():
                for parameters in torch_calls(bindings):
                    self.torch_step_(group, parameters)

    def _note_repetitions_(self, prepared: "_Prepared") -> None:
        """Keeps the steps of groups that were twice the same, to repeat them."""
        by_torch = {id(group) for group, _ in prepared.by_torch}
        for group, options, steps in prepared.by_group:
            bindings = [step.binding for step in steps]
            before, self._stepped[id(group)] = self._stepped.get(id(group)), bindings
            if bindings == before and id(group) not in by_torch and is_repeatable(steps):
                self._repetitions[id(group)] = Repetition(group, options, steps)

    def _validated_options(self, group: Group) -> Options:
        """The options of a group, all but the rate: the same object while they are the same.

        Kept because a step on four short rows that validates them takes twice as long. The rate may
        change with every step.
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
        # Two names at least, since of one it would get no tuple.
        return operator.itemgetter("memory", *sorted(self.option_names() - {"lr"}))

    def settle_(self) -> None:
        """Waits for GPUs, which count steps by themselves, and raises what they have refused."""
        for group in self.param_groups:
            for parameter in group["params"]:
                _counting.settle_(self._bindings.get(id(parameter)), group)

    # -- checkpoints and copies --------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state in tensors, numbers and strings, which `torch.load` reads by default."""
        _torch_private.before_state_dict(self)
        with self._lock:
            self.settle_()
            packed = _checkpoint.pack(self)
        return _torch_private.after_state_dict(self, packed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` gave, bit for bit, or raises with the differences.

        torch.optim casts state to the parameter's dtype and shares it with the given dict; here
        counters keep their own dtype, and everything is copied.
        """
        _checkpoint.check_is_dict(state_dict)
        packed = _torch_private.before_load(self, dict(state_dict))
        with self._lock:
            _checkpoint.load_(self, packed)
        _torch_private.after_load(self)

    def __getstate__(self) -> dict[str, Any]:
        self.settle_()
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        defaults = state.get("defaults", self.__dict__.get("defaults", {}))
        has_flag = "differentiable" in defaults
        super().__setstate__(state)
        if not has_flag:  # which torch.optim adds; a constructor need not take it
            del self.defaults["differentiable"]
        self._reset_caches_()

    def _reset_caches_(self) -> None:
        if not hasattr(self, "_lock"):
            self._lock = fork_safe_lock()
        self._warned: set[tuple[int, str]] = set()
        self._bindings, self._lists, self._divided = {}, [], {}
        self._calls = ops.Calls()
        self._validated: dict[int, Options] = {}  # by id of the group, as are the next two
        self._stepped: dict[int, list[Binding]] = {}
        self._repetitions: dict[int, Repetition] = {}


class _Prepared:
    """What the parameters of all groups will do in one step."""

    def __init__(self) -> None:
        self.fresh: list[Binding] = []
        """Bindings that the optimizer does not have yet."""
        self.steps: list[Step] = []
        self.native: list[ops.CpuKernels] = []
        """The steps that the CPU's kernels take, all in one call."""
        self.by_torch: list[tuple[Group, list[Binding]]] = []
        """What goes to torch.optim's own function, by group."""
        self.repeated: list[ops.RepeatedCalls] = []
        """The steps of groups that do once more what they did before; they are no `Step`."""
        self.by_group: list[tuple[Group, Options, list[Step]]] = []
        """The steps of each other group."""
        self.keys: dict[Tensor, Key] | None = None
        """The keys of all parameters, once one of them is bound."""

    @property
    def is_one_call(self) -> bool:
        """Whether one call of C++ does all that changes, so that no signal comes within."""
        return not (
            self.fresh
            or self.by_torch
            or len(self.native) < len(self.steps)
            or any(it.is_skipped or it.binding.maintained for it in self.steps)
        )

    def reserve_memory(self) -> None:
        """Raises if there is no memory for what steps allocate while they run.

        What torch's functions need is freed again: what is there now will be there in a moment.
        They step one parameter after the other, so the largest need counts.
        """
        for step in self.steps:
            step.reserve_()
        needs: dict[torch.device, int] = {}
        for _, bindings in self.by_torch:
            for it in bindings:
                device = it.local.device
                needs[device] = max(needs.get(device, 0), _TEMPORARIES * it.local.nbytes)
        for device, size in needs.items():
            torch.empty(size, dtype=torch.uint8, device=device)
