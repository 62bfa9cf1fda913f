"""Huge pages for the counters of sketches, which a step accesses at random.

In pages of 4 KiB nearly every row lies in one that the processor has to look up in memory first,
and under a hypervisor that takes about as long as to fetch the row. A page of 2 MiB has room for
thousands of rows.
"""

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# What the translations that a processor keeps reach over in small pages; less needs no help.
_LEAST_BYTES = 8 << 20


def empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, in huge pages where it is large, on the CPU, and Linux has them to give.

    They are asked for before anything is written, so that it takes no time to get them, and for a
    mapping of the tensor's own: what malloc hands on to others would still be advised then.
    """
    size = math.prod(shape) * dtype.itemsize
    if sys.platform != "linux" or device.type != "cpu" or size < _LEAST_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # for lack of memory, of which torch speaks in its own words
        return torch.empty(shape, dtype=dtype, device=device)
    # Advice: where it is not taken, nothing is different but the time that steps take.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def setting() -> str:
    """Linux's word on huge pages: "always", "madvise" or "never"; "absent" elsewhere."""
    try:
        words = _SETTING.read_text().split()
    except OSError:
        return "absent"
    return next((word.strip("[]") for word in words if word.startswith("[")), "absent")
