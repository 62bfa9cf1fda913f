"""The backends that run here, with the reasons."""

import mmap
import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from .. import _pages
from ..ops import describe_cpu_kernels


@dataclass(frozen=True)
class Checkup:
    """What `doctor` found, by name; printing it gives a line for each."""

    findings: dict[str, str]

    def __str__(self) -> str:
        return "\n".join(f"{name}: {finding}" for name, finding in self.findings.items())


def doctor() -> Checkup:
    """The things that the speed of a step depends on: versions, backends with reasons, threads.

    The command `sketchoptim doctor` prints the same.

    >>> print(doctor())  # doctest: +ELLIPSIS
    sketchoptim: ...
    """
    findings = {
        "sketchoptim": version("sketchoptim"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        "cpu backend": describe_cpu_kernels(),
        "huge pages": _huge_pages(),
        "tables in files": _tables_in_files(),
        "gpu": _gpu(),
        "gpu backend": _gpu_backend(),
        "SKETCHOPTIM_REQUIRE_NATIVE": os.environ.get("SKETCHOPTIM_REQUIRE_NATIVE", "not set"),
    }
    return Checkup(findings)


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "none that torch finds"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _gpu_backend() -> str:
    """The kernels that step tables on a GPU, or would if there was one."""
    prefix = "" if torch.cuda.is_available() else "on a GPU it would be "
    try:
        return f"{prefix}kernels in Triton, version {version('triton')}"
    except PackageNotFoundError:
        return f"{prefix}reference kernels, many times slower: triton is not installed"


def _huge_pages() -> str:
    setting = _pages.setting()
    if setting in ("always", "madvise"):
        return f"{setting}: large sketches use them"
    return f"{setting}: steps on large sketches by element take up to a third longer"


def _tables_in_files() -> str:
    """What this system offers to `so.nn.FileEmbedding`."""
    advice = "rows are read alone" if hasattr(mmap, "MADV_RANDOM") else "neighbours are read ahead"
    reserve = "works" if hasattr(os, "posix_fallocate") else "is refused: no posix_fallocate here"
    return f"pages of {mmap.PAGESIZE:,} bytes; {advice}; reserve=True {reserve}"
