"""An experiment of the paper: each method at its own best learning rates, then several seeds.

Every run is an `experiments train` in its own process, so that the peak memory is that of the run,
and in its own folder, so that a reproduction that was stopped continues where it was.
"""

import datetime
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from .checkpoints import write_json
from .errors import StoppedError
from .recipes import Contestant, Recipe, Setting, Size, SweepSettings
from .runs import about_run, read_result, run_settings
from .settings import TrainSettings
from .stopping import StopRequest
from .sweep import best_rate, tune

# wall time over processor time: one thread hardly waits on an idle machine
_BUSY = 1.2
_STOPPED = 130  # the status of a process that Ctrl-C ended

Launch = Callable[[Contestant, float, float, int], dict[str, Any]]
"""The result of training a contestant at (table_lr, body_lr) with a seed."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The findings about one method: its best rates, and one result a seed."""

    name: str
    title: str
    paper: dict[str, float]
    table_lr: float
    body_lr: float
    valid_by_rate: list[tuple[float, float, float | None]]
    """(table_lr, body_lr, quality on validation data) of each run of the sweep."""
    results: list[dict[str, Any]]

    def values(self, key: str) -> list[float]:
        """A number of each seed's result; infinite where the training diverged."""
        found = (result.get(key) for result in self.results)
        return [math.inf if value is None else float(value) for value in found]

    def median(self, key: str) -> float:
        """The median over the seeds."""
        return statistics.median(self.values(key))


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """All findings of a recipe, and how they were obtained."""

    recipe: Recipe
    size: Size
    command: str
    date: str
    findings: list[Findings]

    @property
    def is_measured(self) -> bool:
        """Whether quality was measured, not memory and speed alone."""
        return self.recipe.sizes[self.size].test_words > 0

    @property
    def has_validation(self) -> bool:
        """Whether quality was measured on validation data at the end of some run."""
        return any(
            result["valid"] is not None for finding in self.findings for result in finding.results
        )

    @property
    def clock(self) -> str:
        """Which times to show: "seconds", or "cpu_seconds" where the machine was busy.

        A busy machine slows down each run by another factor.
        """
        shares = [
            result["seconds"] / result["cpu_seconds"]
            for finding in self.findings
            for result in finding.results
            if result["cpu_seconds"]
        ]
        return "cpu_seconds" if max(shares) > _BUSY else "seconds"

    def to_dict(self) -> dict[str, Any]:
        """The same in dicts, lists, numbers and strings."""
        setting = self.recipe.sizes[self.size]
        return {
            "recipe": self.recipe.name,
            "size": self.size,
            "command": self.command,
            "date": self.date,
            "about": setting.about,
            "data": asdict(setting.data),
            "model": asdict(setting.model),
            "train": setting.train.to_dict(),
            "findings": [asdict(finding) for finding in self.findings],
        }


def reproduce(
    recipe: Recipe,
    size: Size,
    *,
    methods: list[str] | None = None,
    seeds: Sequence[int] | None = None,
    command: str,
    launch: Launch,
    output: Path,
    console: Console,
) -> Reproduction:
    """The findings of the methods, after writing them to `output/results.json`."""
    setting = recipe.sizes[size]
    first, *others = seeds or setting.seeds
    findings: list[Findings] = []
    for contestant in recipe.select(methods):
        rates = recipe.sweep(contestant, size)
        finding = _tune_rates(contestant, rates, setting.train, first, launch)
        findings.append(finding)
        valid = finding.values("valid")[0]
        quality = f", validation {recipe.metric} {valid:.2f}" if valid < math.inf else ""
        console.print(
            escape(f"{finding.title}: table_lr {finding.table_lr:g}, body_lr {finding.body_lr:g}")
            + escape(quality)
        )
    # one seed of every method, then the next, so that a disturbance of the machine affects all
    for seed in others:
        for finding in findings:
            contestant = recipe.contestants[finding.name]
            finding.results.append(launch(contestant, finding.table_lr, finding.body_lr, seed))
    reproduction = Reproduction(
        recipe=recipe,
        size=size,
        command=command,
        date=datetime.date.today().isoformat(),
        findings=findings,
    )
    write_json(output / "results.json", reproduction.to_dict())
    return reproduction


def _tune_rates(
    contestant: Contestant, sweep: SweepSettings, start: TrainSettings, seed: int, launch: Launch
) -> Findings:
    """One contestant at its best rates: those of the tables are swept first, then the body's."""
    results: dict[tuple[float, float], dict[str, Any]] = {}

    def valid_quality(table_lr: float, body_lr: float) -> float:
        if (table_lr, body_lr) not in results:
            results[table_lr, body_lr] = launch(contestant, table_lr, body_lr, seed)
        valid = results[table_lr, body_lr]["valid"]
        return math.inf if valid is None else float(valid)

    table_lr, body_lr = start.table_lr, start.body_lr
    if len(sweep.table_lr) == 1:
        table_lr = sweep.table_lr[0]
    elif sweep.table_lr:
        by_rate = tune(lambda rate: valid_quality(rate, start.body_lr), rates=sweep.table_lr)
        table_lr = best_rate(by_rate)
    if sweep.body_lr:
        body_lr = best_rate({rate: valid_quality(table_lr, rate) for rate in sweep.body_lr})
    valid_quality(table_lr, body_lr)
    return Findings(
        name=contestant.method.name,
        title=contestant.method.title,
        paper=dict(contestant.paper),
        table_lr=table_lr,
        body_lr=body_lr,
        valid_by_rate=[(*rates, result["valid"]) for rates, result in sorted(results.items())],
        results=[results[table_lr, body_lr]],
    )


def train_launcher(
    recipe: str,
    setting: Setting,
    size: Size,
    *,
    steps: int | None = None,
    data: Path | None = None,
    device: str = "cpu",
    threads: int = 1,
    output: Path,
    console: Console,
) -> Launch:
    """Launches each run as `python -m experiments train`, in a folder below `output/runs`."""
    options = ["--small"] if size == "small" else []
    options += ["--threads", str(threads), "--device", device]
    options += ["--data", str(data)] if data is not None else []
    options += ["--steps", str(steps)] if steps is not None else []
    sha256 = setting.data.sha256(data)

    def launch(
        contestant: Contestant, table_lr: float, body_lr: float, seed: int
    ) -> dict[str, Any]:
        method = contestant.method_in(size)
        folder = run_folder(output, contestant, table_lr, body_lr, seed)
        settings = run_settings(
            setting,
            method,
            table_lr=table_lr,
            body_lr=body_lr,
            seed=seed,
            steps=steps,
            device=device,
        )
        about = about_run(setting, settings, data_sha256=sha256)
        result = read_result(folder, about)
        if result is None:
            rates = ["--table-lr", repr(table_lr), "--body-lr", repr(body_lr)]
            command = [sys.executable, "-m", "experiments", "train", recipe, *options, *rates]
            command += ["--method", method.name, "--seed", str(seed), "--output", str(folder)]
            status = _run_process([*command, "--part-of-reproduction"])
            result = read_result(folder, about)
            if result is None:
                raise ValueError(f"{folder.name} ended with status {status}; see above")
        outcome = "diverged" if "diverged" in result else "trained"
        if result["valid"] is not None:
            outcome = f"{result['valid']:.2f}"
        console.print(f"{folder.name}: {outcome}", style="dim", markup=False)
        return result

    return launch


def _run_process(command: list[str]) -> int:
    """The exit status of a command; it is waited for on Ctrl-C too, while it saves its work.

    Raises:
        StoppedError: Ctrl-C or SIGTERM ended it.
    """
    with StopRequest() as stop, subprocess.Popen(command) as process:
        stop.is_immediate = True
        try:
            status = process.wait()
        except KeyboardInterrupt:
            process.terminate()  # whoever sent us the signal may not have sent it to the run
            status = process.wait()
    if stop.is_made or status == _STOPPED:
        raise StoppedError("stopped; finished runs are kept")
    return status


def run_folder(
    output: Path, contestant: Contestant, table_lr: float, body_lr: float, seed: int
) -> Path:
    """The folder of a run of `train_launcher`."""
    return output / "runs" / f"{contestant.method.name}-{table_lr:g}-{body_lr:g}-seed{seed}"
