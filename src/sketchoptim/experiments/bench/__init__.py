"""The benchmark: the time of an optimizer's step, ours against the others'.

sketchoptim bench
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..machine import load_average, machine, peak_memory_bytes, versions
from . import report as reports
from .cases import Case, Settings, default_counts
from .gradients import WordLaw
from .measure import threads
from .methods import absent, chosen
from .plots import save_plots
from .report import Report
from .runs import Bench

__all__ = ["Settings", "run_bench", "selected"]


def selected(
    *,
    quick: bool = False,
    parts: Sequence[str] | None = None,
    cases: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    threads: int = 1,
    clock: str = "wall",
    seconds: float | None = None,
) -> Settings:
    """The default or the quick settings, narrowed to what was asked for."""
    asked: dict[str, Any] = {
        "parts": None if not parts else tuple(parts),
        "cases": None if not cases else tuple(Case.parse(case) for case in cases),
        "methods": None if not methods else tuple(rival.name for rival in chosen(methods)),
        "threads": threads,
        "clock": clock,
        "seconds": seconds,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    return dataclasses.replace(Settings.quick() if quick else Settings(), **given)


def run_bench(
    settings: Settings, *, counts: Path | None = None, output: Path, console: Console
) -> Report:
    """The report, after printing it and writing it as JSON and pictures into `output`."""
    if not console.is_terminal:
        console.width = max(console.width, 150)
    output.mkdir(parents=True, exist_ok=True)
    missing = absent(chosen(settings.methods))
    law = _law(settings, counts, console)
    _warn(settings, missing, console)
    with (
        threads(settings.threads),
        torch.sparse.check_sparse_tensor_invariants(False),  # torch.optim warns until told
        console.status("reading") as status,
    ):
        bench = Bench(settings, law, absent=missing, say=status.update)
        report = Report(
            settings=settings,
            ids=law.source,
            machine=machine(),
            versions=versions(),
            absent=missing,
        )
        if "steps" in settings.parts:
            for comparison in bench.steps():
                report.steps.append(comparison)
                console.print(reports.comparison_table(comparison, report))
            report.fixed_costs += bench.fixed_costs()
            console.print(reports.fixed_cost_table(report.fixed_costs))
        if "scaling" in settings.parts:
            for sweep in bench.scaling():
                report.scaling.append(sweep)
                console.print(reports.sweep_table(sweep))
        if "training" in settings.parts:
            for results in bench.training():
                report.training.append(results)
                console.print(reports.training_table(results))
    if report.steps:
        console.print(reports.ratio_table(report))
    report.peak_memory_bytes = peak_memory_bytes()
    report.load_average_at_the_end = load_average()
    report.save(output / "bench.json")
    for path in (output / "bench.json", *save_plots(report, output)):
        console.print(f"wrote {path}")
    return report


def _law(settings: Settings, counts: Path | None, console: Console) -> WordLaw:
    path = counts or default_counts()
    if path.exists():
        return WordLaw.from_file(path, rows=settings.most_rows())
    console.print(
        f"[bold red]{path} is not there: ids are drawn by Zipf's law instead of the counts of "
        "LM1B's words. Name the file with --counts[/]"
    )
    return WordLaw.zipf(rows=settings.most_rows())


def _warn(settings: Settings, missing: dict[str, str], console: Console) -> None:
    for name, reason in missing.items():
        console.print(f"[bold red]{name} takes no part: {reason}[/]; see benchmarks/README.md")
    load = load_average()
    if load > settings.cores / 4:
        console.print(
            f"[bold red]the machine is busy (load {load:.1f} on {settings.cores} cores): "
            "neither times nor ratios can be trusted[/]"
            + (", although others' turns are not counted" if settings.clock == "cpu" else "")
        )
