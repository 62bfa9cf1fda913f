"""Runs the cases in a process of their own, which is started again after one that kills it."""

import importlib.util
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

import torch

from ._cases import Finding, Skipped, cases
from ._place import Place
from ._report import Outcome, Report, Timing, fact_lines, facts
from ._timing import timings

Task = tuple[str, Callable[[Place], Finding | Timing | None]]
# Of one case. Compiling its kernels takes a few seconds.
_MOST_SECONDS = 120.0
# That a case may take beyond the deadline of all.
_GRACE_SECONDS = 5.0


def check_gpu(
    device: str = "cuda", *, is_quick: bool = False, most_seconds: float = 290.0
) -> Iterator[str | Report]:
    """Yields lines as they are known, and the report at last.

    Args:
        device: As torch names it; or "interpreter", Triton's, which is slow and checks no GPU.
        is_quick: Fewer storages, dtypes and widths.
        most_seconds: After which the cases that are left are skipped.
    """
    place = Place(device, is_quick)
    _check_place(place)
    begin = time.monotonic()
    report = Report(facts(place))
    yield from fact_lines(report.facts)
    yield ""
    yield "| case | verdict | units of the last place | |"
    yield "| --- | --- | --- | --- |"
    tasks = [*cases(place), *timings(place)]
    for found in results(place, tasks, begin + most_seconds):
        if isinstance(found, Outcome):
            report.outcomes.append(found)
            yield found.line()
        else:
            report.timings.append(found)
    yield ""
    yield "| method | tables x columns | us, device | us, host | operations | MB kept |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for timing in report.timings:
        yield timing.line()
    report.seconds = time.monotonic() - begin
    yield ""
    yield report.verdict()
    yield report


def _check_place(place: Place) -> None:
    if importlib.util.find_spec("triton") is None:
        raise ValueError("the check needs triton, which torch's builds for GPUs bring along")
    if place.is_interpreted:
        return
    if not place.name.startswith("cuda"):
        raise ValueError(f"device must be cuda, cuda:N or interpreter, got {place.name}")
    if not torch.cuda.is_available():
        raise ValueError(f"torch finds no GPU, but device is {place.name}; see sketchoptim doctor")
    if (place.device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"there are {torch.cuda.device_count()} GPUs, but device is {place.name}")


def results(place: Place, tasks: Sequence[Task], deadline: float) -> Iterator[Outcome | Timing]:
    """What each task found; a worker does them until one of them kills it."""
    done = 0
    while done < len(tasks):
        if time.monotonic() > deadline:
            for name, _ in tasks[done:]:
                yield Outcome(name, "skipped", 0.0, message="out of time")
            return
        with _Worker(place, tasks[done:]) as worker:
            while done < len(tasks) and time.monotonic() < deadline:
                found = worker.receive(tasks[done][0], deadline)
                done += 1
                yield found
                if worker.is_dead:
                    break


class _Worker:
    """A process that does tasks one after the other."""

    def __init__(self, place: Place, tasks: Sequence[Task]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, remote = context.Pipe()
        self.process = context.Process(target=_work, args=(place, tasks, remote), daemon=True)
        self.remote = remote
        self.place = place
        self.is_dead = False

    def __enter__(self) -> "_Worker":
        before = os.environ.get("TRITON_INTERPRET")
        if self.place.is_interpreted:
            os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is imported
        self.process.start()
        self.remote.close()
        if self.place.is_interpreted and before is None:
            del os.environ["TRITON_INTERPRET"]
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.join()
        self.connection.close()

    def receive(self, name: str, deadline: float) -> Outcome | Timing:
        """What a task found; or that it killed the worker, or takes too long."""
        begin = time.monotonic()
        left = max(1.0, deadline - begin + _GRACE_SECONDS)
        self.is_dead = True
        try:
            if self.connection.poll(min(left, _MOST_SECONDS)):
                found, self.is_dead = self.connection.recv()
                assert isinstance(found, Outcome | Timing)
                return found
        except EOFError:
            self.process.join()
            message = f"the process died, exit code {self.process.exitcode}"
            return Outcome(name, "failed", time.monotonic() - begin, message=message)
        if left < _MOST_SECONDS:
            return Outcome(name, "skipped", left, message="out of time")
        message = f"it takes more than {_MOST_SECONDS:.0f} s"
        return Outcome(name, "failed", _MOST_SECONDS, message=message)


def _work(place: Place, tasks: Sequence[Task], connection: Connection) -> None:
    """Does tasks, and sends what each found and whether the device can go on."""
    warnings.simplefilter("error", UserWarning)  # such as a step by the reference
    torch.set_num_threads(min(4, torch.get_num_threads()))
    for name, task in tasks:
        begin = time.monotonic()
        is_broken = False
        found: Outcome | Timing
        try:
            result = task(place)
            place.synchronize()
        except Skipped as reason:
            found = Outcome(name, "skipped", time.monotonic() - begin, message=str(reason))
        except Exception as error:  # each case by itself
            found = Outcome(name, "failed", time.monotonic() - begin, message=_described(error))
            is_broken = _is_broken(place)
        else:
            found = result if isinstance(result, Timing) else _passed(name, result, begin)
        connection.send((found, is_broken))
        if is_broken:
            return


def _passed(name: str, finding: Finding | None, begin: float) -> Outcome:
    seconds = time.monotonic() - begin
    if finding is None:
        return Outcome(name, "passed", seconds)
    return Outcome(name, "passed", seconds, finding.units, finding.limit)


def _described(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}".replace("|", "/")


def _is_broken(place: Place) -> bool:
    """Whether an error of the device makes every later call in this process fail."""
    try:
        place.synchronize()
    except Exception:
        return True
    return False
