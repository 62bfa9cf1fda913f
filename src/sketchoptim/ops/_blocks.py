"""The CPU's step along a gradient that is computed block by block, while each block is in cache."""

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import increment_version

from .._rows import Chunk
from ..deferred import DeferredGradient
from . import _native
from ._rule import FusedRule, kernel_numbers

if TYPE_CHECKING:
    from .cpu import CpuKernels

_FLOAT32 = 0  # as csrc/abi.h has it


class BlockStep:
    """A step of all rows along a deferred gradient; a block moves before the next is computed.

    Args:
        kernels: Of the parameter, which take blocks.
        gradient: Not sparse in rows.
        rule: What the step does.
        key: Of stochastic rounding, as a word of a `Call` in csrc/abi.h.
        is_finite: Whether every gradient that would reach the moments is finite.
    """

    def __init__(
        self,
        kernels: "CpuKernels",
        gradient: DeferredGradient,
        rule: FusedRule,
        key: int,
        *,
        is_finite: bool,
    ) -> None:
        self.kernels, self.gradient, self.rule, self.key = kernels, gradient, rule, key
        self.is_finite = is_finite
        self.touched = kernels.rows
        self._blocks: Iterator[Chunk] = iter(())
        self._workspace = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._threads = 1

    @torch.no_grad()
    def reserve_(self) -> None:
        """Computes the first block, and allocates what the step needs; nothing has changed yet.

        Later blocks take the memory of the first one and of its temporaries.
        """
        step = self.kernels.call
        blocks = self.gradient.chunks()
        first = next(blocks)
        self._blocks = chain([first], blocks)
        is_large = first.gradient.numel() >= _native.ELEMENTS_FOR_THREADS
        step.threads = self._threads = torch.get_num_threads() if is_large else 1
        step.gradient.ids = None  # of an earlier step
        size = self.kernels.library.sketchoptim_workspace(step)
        self._workspace = torch.empty(size, dtype=torch.uint8, device="cpu")

    @torch.no_grad()
    def run_(self) -> None:
        """Moves the moments and the rows of the parameter."""
        kernels, library, step = self.kernels, self.kernels.library, self.kernels.call
        numbers = kernel_numbers(self.rule)
        rule = numbers.buffer_info()[0]
        call = _native.Call(
            step=kernels.address, rule=rule, entries=kernels.rows, rounding_key=self.key
        )
        library.sketchoptim_begin_rows(call, self._workspace.data_ptr())
        for chunk in self._blocks:
            values = chunk.gradient.contiguous()
            assert isinstance(chunk.at, slice)  # all rows move
            assert values.dtype == torch.float32
            library.sketchoptim_move_rows(
                step, values.data_ptr(), _FLOAT32, chunk.at.start, values.shape[0], self._threads
            )
        library.sketchoptim_end_rows(call)
        # Autograd notices writes by torch only, and must refuse graphs of the weights as they were.
        increment_version(kernels.parameter)
