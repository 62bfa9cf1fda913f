"""The CPU's steps of several parameters: checked in three calls of C++, and run in one."""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import _native, cpu
from ._rule import kernel_numbers

# Memory of up to this many bytes is kept between steps. With cold caches torch takes as long to
# allocate some as the kernel takes for a hundred rows.
_BYTES_KEPT = 1 << 20
# The 64-bit words of a `Call` in csrc/abi.h, and which of them is its rule.
_WORDS, _RULE = 8, 1
# Such words in an array: "L" is the faster one to fill where it has 64 bits.
_WORD = "L" if array("L").itemsize == 8 else "Q"


class Calls:
    """The steps of one optimizer that the CPU's kernels take, one optimizer step at a time."""

    def __init__(self) -> None:
        self._steps: Sequence[cpu.CpuKernels] = ()
        self._words = array(_WORD)
        self._rules: list[array[float]] = []
        self._kept = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2
        self._memory: list[Tensor] = []

    def check_(self, steps: Sequence[cpu.CpuKernels]) -> bool:
        """Looks at ids and numbers; allocates all that the step needs. Nothing has changed yet.

        Returns whether all steps are fit to run; each of them has what was found.
        """
        self._steps = steps
        if not steps:
            return True
        self._fill_in(steps)
        calls = self._calls(len(steps))
        library = steps[0].library
        needed = library.sketchoptim_check_ids(calls)
        if needed < 0:
            return False
        room = self._allocated(0, needed)
        memory = self._allocated(1, library.sketchoptim_group_ids(calls, room.data_ptr()))
        self._memory += [room, memory]
        return not library.sketchoptim_check_values(calls, memory.data_ptr())

    def run_(self) -> None:
        """Counts the steps and moves parameters and moments, but for what is not `is_finite`."""
        steps = self._steps
        if not steps:
            return
        # Autograd sees writes by torch only, and must refuse graphs of the weights as they were.
        increment_version([step.parameter for step in steps])
        steps[0].library.sketchoptim_run(self._calls(len(steps)))

    def clear_(self) -> None:
        """Lets go of gradients and memory, after the step or if it is refused."""
        self._steps, self._memory = (), []

    def _fill_in(self, steps: Sequence[cpu.CpuKernels]) -> None:
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
        self._words, self._rules = array(_WORD, words), list(rules.values())

    def _calls(self, count: int) -> _native.Calls:
        return _native.Calls(
            self._words.buffer_info()[0],
            count,
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
