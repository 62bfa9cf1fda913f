"""The CPU's steps of several parameters: checked in three calls of C++, and run in one."""

import ctypes
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .._torch_private import stored_ids, stored_values, tensor_guard
from .._validation import PLAIN_TENSORS
from ..deferred import DeferredGradient, SharedLookups, TableLookups
from . import _native, cpu
from ._rule import AnyRule, FusedRule, kernel_numbers

# Memory of up to this many bytes is kept between steps. With cold caches torch takes as long to
# allocate some as the kernel takes for a hundred rows.
_BYTES_KEPT = 1 << 20
# The 64-bit words of a `Call` in csrc/abi.h, and which of them are what.
_WORDS = 10
_RULE, _VALUES, _IDS, _ENTRIES, _LOOKUPS, _TABLE, _SCALE, _KEY = 1, 2, 3, 4, 5, 6, 7, 9


class RepeatedCalls:
    """The calls of several parameters, of which gradients and rules are new in each step.

    What a gradient is, torch compares for all of them in one call. To look at each of its
    attributes takes several times as long as a small step.

    Args:
        steps: As they were prepared, those along dense gradients first.
        gradients: Of these steps; none of them deferred, but in a subclass.
        rule_of: Which of the rules each step has.
    """

    @staticmethod
    def of_kind(gradients: Sequence[Tensor | None]) -> "type[RepeatedCalls] | None":
        """The class for gradients of one kind; None for others."""
        if all(type(it) in PLAIN_TENSORS for it in gradients):
            return RepeatedCalls
        return RepeatedLookups if all(map(_table_lookups, gradients)) else None

    def __init__(
        self, steps: Sequence[cpu.CpuKernels], gradients: Sequence[Tensor], rule_of: Sequence[int]
    ) -> None:
        self.library = steps[0].library
        self.parameters = [step.parameter for step in steps]
        self.words = array(_native.WORD, chain.from_iterable(step.words for step in steps))
        self._rules = [kernel_numbers(FusedRule(0.0)) for _ in range(1 + max(rule_of))]
        addresses = [numbers.buffer_info()[0] for numbers in self._rules]
        self.words[_RULE::_WORDS] = array(_native.WORD, [addresses[rule] for rule in rule_of])
        self._expect(steps, gradients)

    def _expect(self, steps: Sequence[cpu.CpuKernels], gradients: Sequence[Tensor]) -> None:
        """Notes what gradients have in common with those of the next step."""
        self._is_same_kind = tensor_guard(gradients)
        self._dense = sum(not gradient.is_sparse for gradient in gradients)
        self._dims = [step.dim for step in steps[self._dense :]]
        sparse, tables = gradients[self._dense :], self.parameters[self._dense :]
        self._are_entries = tensor_guard(
            [*map(stored_ids, sparse), *map(stored_values, sparse)],
            shapes=[[1, None] for _ in tables] + [[None, *it.shape[1:]] for it in tables],
            strides=[[None, 1] for _ in tables] + [[*it.stride()] for it in tables],
        )

    def take(
        self,
        gradients: Sequence[Tensor | None],
        rules: Sequence[AnyRule],
        keys: Sequence[int | None] | None,
    ) -> bool:
        """Takes in what is new; returns False if a gradient is not what it was in all but numbers.

        Args:
            gradients: One for each step.
            rules: Of this step.
            keys: Of the rounding of each step; None if all are rounded to nearest.
        """
        if any(type(it) is not FusedRule for it in rules) or not self._take_gradients(gradients):
            return False
        if keys is not None:
            words = array(_native.WORD, map(cpu.rounding_word, keys))
            self.words[_KEY::_WORDS] = words
        for numbers, rule in zip(self._rules, cast("Sequence[FusedRule]", rules), strict=True):
            numbers[:] = kernel_numbers(rule)
        return True

    def _take_gradients(self, gradients: Sequence[Tensor | None]) -> bool:
        if not self._is_same_kind(*gradients):
            return False
        gradients = cast("Sequence[Tensor]", gradients)
        with_values, words = gradients, self.words
        if self._dims:
            dense, sparse = gradients[: self._dense], gradients[self._dense :]
            ids, values = [*map(stored_ids, sparse)], [*map(stored_values, sparse)]
            counts, sizes = [*map(Tensor.numel, ids)], [*map(Tensor.numel, values)]
            ids_at = [*map(Tensor.data_ptr, ids)]
            if (
                not self._are_entries(*ids, *values)
                or sizes != [count * dim for count, dim in zip(counts, self._dims, strict=True)]
                or 0 in ids_at  # no ids, or freed
            ):
                return False
            begin = self._dense * _WORDS
            words[begin + _IDS :: _WORDS] = array(_native.WORD, ids_at)
            words[begin + _ENTRIES :: _WORDS] = array(_native.WORD, counts)
            with_values = [*dense, *values]
        values_at = [*map(Tensor.data_ptr, with_values)]
        if 0 in values_at:
            return False
        words[_VALUES::_WORDS] = array(_native.WORD, values_at)
        return True


class RepeatedLookups(RepeatedCalls):
    """The same along the gradients of tables that were looked up together."""

    def _expect(self, steps: Sequence[cpu.CpuKernels], gradients: Sequence[Tensor]) -> None:
        self._dtypes = [step.dtype for step in steps]

    def _take_gradients(self, gradients: Sequence[Tensor | None]) -> bool:
        shared: SharedLookups | None = None
        values_at, lookups_at, tables, scales = [], [], [], []
        for gradient, dtype in zip(gradients, self._dtypes, strict=True):
            part = _table_lookups(gradient)
            if part is None:
                return False
            if part.shared is not shared:
                shared = part.shared
                if not part.is_current or shared.output_gradient.dtype is not dtype:
                    return False
                call = cpu.call_of_shared(shared)
            assert isinstance(gradient, DeferredGradient)
            values_at.append(call.values_at + shared.columns[part.table] * dtype.itemsize)
            lookups_at.append(call.address)
            tables.append(part.table)
            scales.append(cpu.scale_word(gradient.scale))
        for at, numbers in (
            (_VALUES, values_at),
            (_LOOKUPS, lookups_at),
            (_TABLE, tables),
            (_SCALE, scales),
        ):
            self.words[at::_WORDS] = array(_native.WORD, numbers)
        return True


def _table_lookups(gradient: Tensor | None) -> TableLookups | None:
    """The lookups that a gradient is made of, if they are those of one of several tables."""
    if type(gradient) is not DeferredGradient:
        return None
    terms = gradient.terms
    if len(terms) != 1 or terms[0].scale != 1.0:
        return None
    part = terms[0].part
    return part if type(part) is TableLookups else None


class Calls:
    """The steps of one optimizer that the CPU's kernels take, one optimizer step at a time."""

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        self._words = array(_native.WORD)
        self._parameters: list[Tensor] = []
        self._rules: list[array[float]] = []
        self._kept = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2
        self._memory: list[Tensor] = []

    def check_(
        self, steps: Sequence[cpu.CpuKernels], repeated: Sequence[RepeatedCalls] = ()
    ) -> bool:
        """Looks at ids and numbers; allocates all that the step needs. Nothing has changed yet.

        Returns whether all steps are fit to run; each of them has what was found.
        """
        self._fill_in(steps, repeated)
        if not self._parameters:
            return True
        self._library = library = (repeated[0] if repeated else steps[0]).library
        calls = self._calls()
        needed = library.sketchoptim_check_ids(calls)
        if needed < 0:
            return False
        room = self._allocated(0, needed)
        memory = self._allocated(1, library.sketchoptim_group_ids(calls, room.data_ptr()))
        self._memory += [room, memory]
        return not library.sketchoptim_check_values(calls, memory.data_ptr())

    def run_(self) -> None:
        """Counts the steps and moves parameters and moments, but for what is not `is_finite`."""
        if self._library is None:
            return
        # Autograd notices writes by torch only, and must refuse graphs of the weights as they were.
        increment_version(self._parameters)
        self._library.sketchoptim_run(self._calls())

    def clear_(self) -> None:
        """Lets go of gradients and memory, after the step or if it is refused."""
        self._library, self._parameters, self._memory = None, [], []

    def _fill_in(self, steps: Sequence[cpu.CpuKernels], repeated: Sequence[RepeatedCalls]) -> None:
        words: list[int] = []
        rules: dict[int, array[float]] = {}
        for step in steps:
            words += step.words
            if step.copies:
                self._memory += step.copies
                step.copies = ()
            if id(step.rule) not in rules:  # most parameters of a group have the same
                rules[id(step.rule)] = kernel_numbers(step.rule)
        addresses = {rule: numbers.buffer_info()[0] for rule, numbers in rules.items()}
        words[_RULE::_WORDS] = [addresses[id(step.rule)] for step in steps]
        self._words, self._rules = array(_native.WORD, words), list(rules.values())
        self._parameters = [step.parameter for step in steps]
        for calls in repeated:
            self._words += calls.words
            self._parameters += calls.parameters

    def _calls(self) -> _native.Calls:
        return _native.Calls(
            self._words.buffer_info()[0],
            len(self._parameters),
            torch.get_num_threads(),
            _native.ELEMENTS_FOR_THREADS,
        )

    def _allocated(self, slot: int, size: int) -> Tensor:
        """Memory of at least so many bytes."""
        memory = self._kept[slot]
        if memory.numel() < size:
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
            if size <= _BYTES_KEPT:
                self._kept[slot] = memory
        return memory
