"""What measured numbers depend on besides the code: the machine, its memory, the versions."""

import ctypes
import gc
import os
import platform
import resource
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from sketchoptim import _pages
from sketchoptim.ops import _native

_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_PACKAGES = ("sketchoptim", "torch", "numpy", "fbgemm-gpu-cpu", "fbgemm-gpu")
_STATUS = Path("/proc/self/status")


def last_level_cache_bytes() -> int:
    """The size that Linux reports, else 64 MB."""
    text = _CACHE.read_text().strip() if _CACHE.exists() else ""
    return int(text[:-1]) * 1024 if text.endswith("K") else 64 * 2**20


def peak_memory_bytes() -> int:
    """The most memory that this process has had resident since it started its program.

    On Linux from the status of the process: getrusage() also counts the memory of the process that
    launched this program, of which it was a copy at first.
    """
    if _STATUS.exists():
        return _status_bytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def extra_memory_bytes(task: Callable[[], object]) -> int:
    """The most memory that a task has resident beyond what is resident before it. Linux only.

    Memory that was freed before is given back to the system first, so the task cannot reuse it
    uncounted.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status_bytes("VmRSS")
    (_STATUS.parent / "clear_refs").write_text("5")  # the peak begins anew
    task()
    return _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> int:
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def load_average() -> float:
    """The mean number of processes that wanted a core over the last minute."""
    return os.getloadavg()[0]


def machine_facts() -> dict[str, object]:
    """What measured numbers depend on besides the code."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "huge_pages": _pages.setting(),
        "system": platform.platform(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "kernels": "reference" if _native.library() is None else _native.level(),
        "load_average": load_average(),
    }


def versions() -> dict[str, str]:
    """The versions of Python and of the installed packages that are compared."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
