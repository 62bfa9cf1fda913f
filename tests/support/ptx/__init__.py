"""Kernels that Triton compiled to PTX, executed on the CPU.

The interpreter executes a kernel's Python, one program at a time. This executes what the compiler
made of it: warps of 32 lanes, branches that lanes take differently, barriers, shared memory,
shuffles, atomic instructions, and arithmetic that is rounded as IEEE 754 says. Every access to
memory is checked for alignment, for bounds and for races (`machine.c`).

What it does not show: times; the order in which a GPU's memory makes writes visible, since here a
write is visible at once; lanes of a warp that go apart without a branch; what the assembler makes
of PTX; the driver; and any instruction that is not in `machine.c`, which is refused by name.
"""

from ._assembler import Program, assemble
from ._machine import Counts, Fault, Memory, execute

__all__ = ["Counts", "Fault", "Memory", "Program", "assemble", "execute"]
