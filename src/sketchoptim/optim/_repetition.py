"""A step of a group once more, of whose parameters the gradients alone are new."""

import math
from collections.abc import Sequence
from itertools import chain
from operator import is_

from torch import Tensor

from .. import _rounding, ops
from .._torch_private import has_tensor_guards, tensor_guard
from .._validation import PLAIN_TENSORS
from ..deferred import is_row_sparse
from ._algorithm import Algorithm, Group
from ._binding import Options
from ._step import Step

# Of fewer steps, what `Repetition` does once takes longer than what it saves for each.
_FEWEST = 4


def is_repeatable(steps: Sequence[Step]) -> bool:
    """Whether steps that were just taken are of those that `Repetition` repeats."""
    return (
        len(steps) >= _FEWEST
        and all(
            type(step.prepared) is ops.CpuKernels
            and type(step.binding.parameter) in PLAIN_TENSORS
            and not (step.is_skipped or step.binding.maintained or step.binding.is_watched)
            for step in steps
        )
        and ops.RepeatedCalls.of_kind([step.binding.parameter.grad for step in steps]) is not None
        and has_tensor_guards()
    )


class Repetition:
    """The steps of a group, as long as parameters, state and options are what they were.

    It looks at all of them, as `Binding.is_current` does at one, but for many tensors in one call.

    Args:
        group: All of whose steps were taken by the CPU's kernels.
        options: Of the group.
        steps: As they were taken, in the order of its parameters.
    """

    def __init__(self, group: Group, options: Options, steps: Sequence[Step]) -> None:
        self._group, self._options = group, options
        self._nonfinite = group.get("nonfinite", "raise")
        self._all = list(group["params"])
        steps = sorted(steps, key=lambda step: step.gradient.is_sparse)
        gradients = [step.gradient for step in steps]
        bindings = [step.binding for step in steps]
        self._parameters = [it.parameter for it in bindings]
        stepped = set(map(id, self._parameters))
        self._idle = [it for it in self._all if id(it) not in stepped]
        self._is_same_kind = tensor_guard(self._parameters)
        self._states = [it.state for it in bindings]
        self._entries = [*chain.from_iterable(map(dict.values, self._states))]
        tensors = [tensor for it in bindings for _, tensor, address in it.places.tensors if address]
        self._placed = [*self._parameters, *tensors]
        self._addresses = [*map(Tensor.data_ptr, self._placed)]
        self._counts = [it.step_count for it in bindings]
        self._seeds = [it.rounding_seed for it in bindings]
        self._is_rounded = any(seed is not None for seed in self._seeds)
        first = self._counts[0].value
        self._ahead = [it.value - first for it in self._counts]
        of_rules = [
            (ahead - it.binding.began_after, it.binding.memory, is_row_sparse(it.gradient))
            for ahead, it in zip(self._ahead, steps, strict=True)
        ]
        self._of_rules = list(dict.fromkeys(of_rules))
        calls_of = ops.RepeatedCalls.of_kind(gradients)
        assert calls_of is not None  # is_repeatable() has looked
        self.calls = calls_of(
            [it.prepared for it in steps if isinstance(it.prepared, ops.CpuKernels)],
            gradients,
            [self._of_rules.index(it) for it in of_rules],
        )

    def prepare(self, optimizer: Algorithm, options: Options) -> bool:
        """Whether `calls` are the next steps of the group; nothing has changed in either case."""
        group, parameters = self._group, self._parameters
        counts = [it.value for it in self._counts]
        first = counts[0]
        if not (
            options is self._options
            and group.get("nonfinite", "raise") == self._nonfinite
            and _are_same(group["params"], self._all)
            and all(it.grad is None for it in self._idle)
            and all(map(is_, map(optimizer.state.get, parameters), self._states))
            and _are_same([*chain.from_iterable(map(dict.values, self._states))], self._entries)
            and self._is_same_kind(*parameters)
            and [*map(Tensor.data_ptr, self._placed)] == self._addresses
            and 0.0 <= first < math.inf
            and [count - first for count in counts] == self._ahead
        ):
            return False
        number = int(first) + 1
        rules = [
            optimizer.rule(group, number + int(ahead), memory=memory, is_sparse=is_sparse)
            for ahead, memory, is_sparse in self._of_rules
        ]
        keys = self._rounding_keys(counts) if self._is_rounded else None
        return self.calls.take([it.grad for it in parameters], rules, keys)

    def _rounding_keys(self, counts: Sequence[float]) -> list[int | None]:
        return [
            None if seed is None else _rounding.weights_key(seed, int(count) + 1)
            for seed, count in zip(self._seeds, counts, strict=True)
        ]


def _are_same(found: Sequence[object], expected: Sequence[object]) -> bool:
    return len(found) == len(expected) and all(map(is_, found, expected))
