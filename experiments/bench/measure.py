"""How time is measured: in one process, from cold caches, all methods in turn, by medians."""

import gc
import heapq
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch

from ..machine import last_level_cache_bytes
from .cases import Clock
from .gradients import Batch

Key = TypeVar("Key", bound=Hashable)

_CLOCKS: dict[Clock, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of many repetitions: median, quartiles and minimum."""

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
    """Two buffers, each twice as large as the last-level cache.

    One is written, which evicts everything else; then the other is read, so that no dirty lines
    are left, whose writing back would fall into the next step.
    """

    def __init__(self, cache_bytes: int | None = None) -> None:
        size = 2 * (cache_bytes or last_level_cache_bytes()) // 4
        self.written, self.read = torch.zeros(size), torch.zeros(size)

    def flush_(self) -> None:
        """Evicts everything else from the caches."""
        self.written.add_(1.0)
        self.read.sum()


class StreamAddition:
    """The streaming bandwidth: ``a += s b`` over arrays of three times the last-level cache.

    In place, because most processors also read `a` in STREAM's ``a = b + s c``, uncounted.
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


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A method: its step, and what comes before each turn with the number of the turn, untimed."""

    step: Callable[[], object]
    prepare: Callable[[int], object] = lambda _: None
    threads: int
    loops: int = 1
    """Steps of a turn, whose mean is measured: more than one for steps of microseconds."""

    def run(self) -> None:
        """The steps of a turn."""
        for _ in range(self.loops):
            self.step()


def measure_in_turn(
    entrants: Mapping[Key, Entrant],
    *,
    seconds: float,
    least: int,
    clock: Clock = "wall",
    flusher: CacheFlusher | None,
) -> dict[Key, Timing]:
    """The time of a step of each entrant, measured for `seconds` an entrant.

    The entrant with the least time so far, flushing included, is always next. So fast and slow
    methods run throughout, and a disturbance of the machine affects all of them. Every method
    gets `least` repetitions, even where that takes longer.
    """
    measured: dict[Key, list[float]] = {key: [] for key in entrants}
    keys = list(entrants)

    def take_turn(key: Key) -> float:
        begin = time.perf_counter()
        entrant = entrants[key]
        torch.set_num_threads(entrant.threads)
        entrant.prepare(len(measured[key]))
        if flusher is not None:
            flusher.flush_()
        (elapsed,) = lap_seconds([entrant.run], clock=clock)
        measured[key].append(elapsed / entrant.loops)
        return time.perf_counter() - begin

    with threads(torch.get_num_threads()), no_garbage_collection():
        for key in keys:  # the first turn creates the state, and is not counted
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


def lap_seconds(tasks: Sequence[Callable[[], object]], *, clock: Clock = "wall") -> list[float]:
    """The seconds of each task, which follow one another."""
    now = _CLOCKS[clock]
    marks = [now()]
    for task in tasks:
        task()
        marks.append(now())
    return [after - before for before, after in pairwise(marks)]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Leaves Python's cycles uncollected for a while."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets the number of threads of torch and the kernels for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
