"""What a check found: facts, one line for each case, times, and a verdict."""

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

from ._place import Place

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """One case."""

    name: str
    status: Status
    seconds: float
    units: float | None = None
    """The largest difference from the reference, in units of the last place."""
    limit: float | None = None
    message: str = ""

    def line(self) -> str:
        difference = "" if self.units is None else f"{self.units:.2f} of at most {self.limit:g}"
        return f"| {self.name} | {self.status} | {difference} | {self.message} |"


@dataclass(frozen=True)
class Timing:
    """The steps of one method on tables of one width."""

    method: str
    tables: int
    columns: int
    device_us: float | None
    """Between two events of the stream, behind a wait: the host is ahead."""
    host_us: float
    """Of the call of the step, which waits for nothing."""
    launches: int | None
    state_mb: float
    """What the method keeps beside parameters and gradients."""

    def line(self) -> str:
        device = "-" if self.device_us is None else f"{self.device_us:.0f}"
        launches = "-" if self.launches is None else str(self.launches)
        return (
            f"| {self.method} | {self.tables} x {self.columns} | {device} | {self.host_us:.0f} | "
            f"{launches} | {self.state_mb:.1f} |"
        )


@dataclass
class Report:
    """All that was found."""

    facts: dict[str, str]
    outcomes: list[Outcome] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_passed(self) -> bool:
        """Whether something was checked, and nothing failed."""
        statuses = {outcome.status for outcome in self.outcomes}
        return "passed" in statuses and "failed" not in statuses

    def count(self, status: Status) -> int:
        return sum(outcome.status == status for outcome in self.outcomes)

    def verdict(self) -> str:
        """One line to paste."""
        facts = self.facts
        counts = ", ".join(f"{self.count(it)} {it}" for it in ("passed", "failed", "skipped"))
        lean = [it for it in self.timings if it.method == "lean"]
        times = "".join(f"; lean {it.tables} x {it.columns}: {_times(it)}" for it in lean)
        return (
            f"{'PASSED' if self.is_passed else 'FAILED'}: sketchoptim {facts['sketchoptim']} on "
            f"{facts['device']}, driver {facts['driver']}, torch {facts['torch']}, triton "
            f"{facts['triton']}: {counts}{times}"
        )

    def to_json(self) -> str:
        """Everything, to send."""
        found = {**asdict(self), "is_passed": self.is_passed, "verdict": self.verdict()}
        return json.dumps(found, indent=1) + "\n"


def _times(timing: Timing) -> str:
    if timing.device_us is None:
        return f"{timing.host_us:.0f} us host"
    return f"{timing.device_us:.0f} us device, {timing.host_us:.0f} us host"


def facts(place: Place) -> dict[str, str]:
    """What a verdict depends on."""
    name = place.name if place.is_interpreted else torch.cuda.get_device_name(place.device)
    found = {"device": name, "driver": "none" if place.is_interpreted else _driver()}
    found |= {package: _version(package) for package in ("sketchoptim", "torch", "triton")}
    found["sketchoptim"] += _commit()
    if not place.is_interpreted:
        properties = torch.cuda.get_device_properties(place.device)
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["cuda"] = str(torch.version.cuda or torch.version.hip)
    found["date"] = time.strftime("%Y-%m-%d")
    return found


def fact_lines(found: dict[str, str]) -> Iterator[str]:
    for name, value in found.items():
        yield f"{name}: {value}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The commit of a clone that the package is imported from."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return ""
    return " " + _printed("git", "-C", str(root), "rev-parse", "--short", "HEAD")


def _driver() -> str:
    found = _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0] if found else "unknown"


def _printed(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except OSError:
        return ""
    return done.stdout.strip()
