"""Huge pages for tables whose rows a step meets in no order.

In pages of 4 KiB nearly every row lies in one that the processor has to look up in memory first,
and under a hypervisor that takes longer than to fetch the row. A page of 2 MiB has room for
thousands of rows.
"""

import ctypes
import functools
import mmap
from pathlib import Path

from torch import Tensor

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1, which this Python's mmap may not know
# What the translations that a processor keeps reach over in small pages; less needs no help.
_LEAST_BYTES = 8 << 20


@functools.cache
def setting() -> str:
    """Linux's word on huge pages: "always", "madvise" or "never"; "absent" elsewhere."""
    try:
        words = _SETTING.read_text().split()
    except OSError:
        return "absent"
    return next((word.strip("[]") for word in words if word.startswith("[")), "absent")


def use_huge_pages(tensor: Tensor) -> None:
    """Moves a large tensor's memory to huge pages, under the addresses that it has.

    Its numbers stay what they are. It takes about as long as to copy them, once. Where the system
    has no such pages, or none left, everything works as before and only takes longer.
    """
    if tensor.nbytes < _LEAST_BYTES or setting() in ("never", "absent"):
        return
    page = mmap.PAGESIZE
    begin = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    advise = ctypes.CDLL(None).madvise
    for advice in (mmap.MADV_HUGEPAGE, _COLLAPSE):
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
