"""The CPU's step along a gradient that is computed block by block, while each block is in cache."""

from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..deferred import DeferredGradient
from . import _native
from ._rule import FusedRule, kernel_numbers

if TYPE_CHECKING:
    from .cpu import CpuKernels


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

    @torch.no_grad()
    def run_(self) -> None:
        """Moves the moments and the rows of the parameter."""
        kernels, library, step = self.kernels, self.kernels.library, self.kernels.call
        blocks = self.gradient.chunks()
        first = next(blocks)  # its memory is allocated before anything changes, and used by all
        rows = first.ids.numel()
        numbers = kernel_numbers(self.rule)
        call = _native.Call(
            kernels.address, numbers.buffer_info()[0], 0, 0, 0, rows, False, self.key
        )
        is_large = first.gradient.numel() >= _native.ELEMENTS_FOR_THREADS
        threads = torch.get_num_threads() if is_large else 1
        library.sketchoptim_prepare_blocks(call, threads)
        row_values = torch.empty(rows, dtype=torch.float32, device="cpu")
        step.row_values = row_values.data_ptr() if step.second.is_by_row else None
        size = library.sketchoptim_workspace(step)
        workspace = torch.empty(size, dtype=torch.uint8, device="cpu")
        step.workspace = workspace.data_ptr()
        before: Tensor | None = None
        if kernels.counters is not None:
            before = torch.empty_like(kernels.counters)
        library.sketchoptim_begin_blocks(call)
        if before is not None and kernels.counters is not None:
            before.copy_(kernels.counters)
        for chunk in chain([first], blocks):
            values = chunk.gradient.to(kernels.dtype)
            assert isinstance(chunk.at, slice)  # all rows move
            library.sketchoptim_move_block(
                step,
                None if before is None else before.data_ptr(),
                values.data_ptr(),
                chunk.at.start,
                values.shape[0],
            )
        # Autograd sees writes by torch only, and must refuse graphs of the weights as they were.
        increment_version(kernels.parameter)
