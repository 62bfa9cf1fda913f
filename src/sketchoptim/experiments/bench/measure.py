"""How time is taken: one process, cold caches, everybody in turn, medians."""

import gc
import heapq
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch

from ...ops import native
from .cases import Clock
from .gradients import Batch
from .methods import Method

Key = TypeVar("Key", bound=Hashable)

_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PACKAGES = ("sketchoptim", "torch", "numpy", "fbgemm-gpu-cpu", "fbgemm-gpu")
_CLOCKS: dict[Clock, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of many repetitions: the median, what a quarter of them stays below or above."""

    median: float
    lower_quartile: float
    upper_quartile: float
    least: float
    repetitions: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Timing":
        """The summary of single measurements."""
        lower, median, upper = (
            statistics.quantiles(seconds, n=4, method="inclusive")
            if len(seconds) > 1
            else [seconds[0]] * 3
        )
        return cls(
            median=median,
            lower_quartile=lower,
            upper_quartile=upper,
            least=min(seconds),
            repetitions=len(seconds),
        )


class CacheFlusher:
    """Two buffers, each as large as the last-level cache twice over.

    One is written, so that it takes the place of whatever was cached; then the other is read, so
    that what is left needs no writing back while the next step is timed.
    """

    def __init__(self, cache_bytes: int | None = None) -> None:
        size = 2 * (cache_bytes or last_level_cache_bytes()) // 4
        self.written, self.read = torch.zeros(size), torch.zeros(size)

    def flush_(self) -> None:
        """Leaves nothing of value in the caches."""
        self.written.add_(1.0)
        self.read.sum()


class StreamAddition:
    """The other yardstick: ``a += s b`` over arrays that together are thrice the last-level cache.

    In place, because STREAM's ``a = b + s c`` makes most processors read `a` too, uncounted.
    """

    def __init__(self, cache_bytes: int | None = None) -> None:
        size = 3 * (cache_bytes or last_level_cache_bytes()) // 8
        self.a, self.b = torch.zeros(2, size).unbind()

    def prepare(self, batch: Batch) -> None:
        """Nothing: it has its own arrays."""

    def step(self) -> None:
        self.a.add_(self.b, alpha=0.5)

    def moved_bytes(self) -> int:
        return 3 * 4 * self.a.numel()

    def state_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class Entrant:
    """A method with the gradients that it takes in turn, and its number of threads."""

    method: Method
    batches: Sequence[Batch]
    threads: int


def interleaved(
    entrants: Mapping[Key, Entrant],
    *,
    seconds: float,
    least: int,
    clock: Clock = "wall",
    flusher: CacheFlusher | None,
) -> dict[Key, Timing]:
    """The time of a step of each entrant, in `seconds` an entrant altogether.

    Next is always the one that has had the least time so far, flushing included. So the fast and
    the slow share every moment of the run, and what disturbs the machine disturbs them all. Slow
    ones get `least` repetitions even when that takes longer.
    """
    measured: dict[Key, list[float]] = {key: [] for key in entrants}
    keys = list(entrants)

    def take_turn(key: Key) -> float:
        begin = time.perf_counter()
        entrant = entrants[key]
        torch.set_num_threads(entrant.threads)
        entrant.method.prepare(entrant.batches[len(measured[key]) % len(entrant.batches)])
        if flusher is not None:
            flusher.flush_()
        measured[key] += laps([entrant.method.step], clock=clock)
        return time.perf_counter() - begin

    with threads(torch.get_num_threads()), _no_garbage_collection():
        for key in keys:  # builds state, and does not count
            take_turn(key)
            measured[key].clear()
        stop = time.perf_counter() + seconds * len(keys)
        queue = [(0.0, number) for number in range(len(keys))]
        while time.perf_counter() < stop:
            spent, number = queue[0]
            heapq.heapreplace(queue, (spent + take_turn(keys[number]), number))
        for key in keys:
            while len(measured[key]) < least:
                take_turn(key)
    return {key: Timing.of(times) for key, times in measured.items()}


def laps(tasks: Sequence[Callable[[], object]], *, clock: Clock = "wall") -> list[float]:
    """The times of tasks that follow each other."""
    now = _CLOCKS[clock]
    marks = [now()]
    for task in tasks:
        task()
        marks.append(now())
    return [after - before for before, after in pairwise(marks)]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for torch and the kernels, and then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def last_level_cache_bytes() -> int:
    """The size that Linux reports, else 64 MB."""
    text = _CACHE.read_text().strip() if _CACHE.exists() else ""
    return int(text[:-1]) * 1024 if text.endswith("K") else 64 * 2**20


def peak_memory_bytes() -> int:
    """The most memory that the process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def load_average() -> float:
    """Processes that wanted a core over the last minute."""
    return os.getloadavg()[0]


def machine() -> dict[str, object]:
    """What the numbers depend on besides the code."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "huge_pages": _HUGE_PAGES.read_text().strip() if _HUGE_PAGES.exists() else "unknown",
        "system": platform.platform(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "kernels": "reference" if native.library() is None else native.level(),
        "load_average": load_average(),
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that are compared; those not installed are left out."""
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
