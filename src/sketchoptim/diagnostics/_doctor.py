"""Which backend runs, and why."""

import mmap
import os
import platform
from importlib.metadata import version

import torch

from .. import _pages
from ..ops import _native


def findings() -> dict[str, str]:
    """What the speed of a step depends on: versions, the backend with its reason, threads."""
    return {
        "sketchoptim": version("sketchoptim"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        "cpu backend": _cpu_backend(),
        "huge pages": _huge_pages(),
        "tables in files": _tables_in_files(),
        "gpu backend": "reference kernels, on the GPU's own torch operations",
        "SKETCHOPTIM_REQUIRE_NATIVE": os.environ.get("SKETCHOPTIM_REQUIRE_NATIVE", "not set"),
    }


def _cpu_backend() -> str:
    try:
        loaded = _native.load(_native.level())
    except OSError as error:
        return f"reference kernels, many times slower: {error}"
    return f"native kernels, level {_native.level()}: {loaded._name}"


def _huge_pages() -> str:
    setting = _pages.setting()
    if setting in ("always", "madvise"):
        return f"{setting}: large sketches use them"
    return f"{setting}: steps on large sketches by element take up to a third longer"


def _tables_in_files() -> str:
    """What `so.nn.FileEmbedding` finds here."""
    advice = "rows are read alone" if hasattr(mmap, "MADV_RANDOM") else "neighbours are read ahead"
    reserve = "works" if hasattr(os, "posix_fallocate") else "is refused: no posix_fallocate here"
    return f"pages of {mmap.PAGESIZE:,} bytes; {advice}; reserve=True {reserve}"
