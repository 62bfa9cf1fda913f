"""A whole run of the benchmark, from its options to its tables and JSON file.

experiments bench
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..data import DATA_VARIABLE
from ..locks import locked
from ..machine import load_average, machine_facts, peak_memory_bytes, versions
from .cases import COUNTS_NAME, Case, DenseShape, HeadShape, Settings, default_counts
from .gradients import WordFrequencies
from .measure import threads
from .methods import BY_NAME, absence_reasons, select_rivals
from .report import Report
from .runs import Bench
from .tables import (
    bags_table,
    comparison_table,
    fixed_cost_table,
    head_table,
    ratio_table,
    sweep_table,
    training_table,
    update_table,
)
from .updates import DENSE_METHODS


def bench_settings(
    *,
    quick: bool = False,
    parts: Sequence[str] | None = None,
    cases: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    threads: int = 1,
    clock: str = "wall",
    seconds: float | None = None,
    least: int | None = None,
) -> Settings:
    """The default or the quick settings, with the given values in place of theirs."""
    parsed = [Case.parse(case) for case in cases or ()]
    options: dict[str, Any] = {
        "parts": None if not parts else tuple(parts),
        "cases": tuple(parsed) or None,
        "dense": tuple(shape for case in parsed for shape in DenseShape.of(case)) or None,
        "heads": tuple(shape for case in parsed for shape in HeadShape.of(case)) or None,
        "methods": _known_methods(methods or ()) or None,
        "threads": threads,
        "clock": clock,
        "seconds": seconds,
        "least": least,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return dataclasses.replace(Settings.quick() if quick else Settings(), **given)


def _known_methods(names: Sequence[str]) -> tuple[str, ...]:
    known = dict.fromkeys((*BY_NAME, *DENSE_METHODS))
    for name in names:
        if name not in known:
            raise ValueError(f"method must be one of {', '.join(known)}, got {name!r}")
    return tuple(names)


def run_bench(
    settings: Settings, *, counts: Path | None = None, output: Path, console: Console
) -> Report:
    """The report, after printing it and writing it as JSON into `output`."""
    frequencies = _word_frequencies(settings, counts, console)
    with locked(output):
        report = Report(
            settings=settings,
            ids=frequencies.source,
            machine=machine_facts(),
            versions=versions(),
            absent=absence_reasons(select_rivals(settings.methods)),
        )
        _warn(report, console)
        _measure(report, frequencies, console)
        report.peak_memory_bytes = peak_memory_bytes()
        report.load_average_at_the_end = load_average()
        report.save(output / "bench.json")
        console.print(f"wrote {output / 'bench.json'}", markup=False)
    return report


def _measure(report: Report, frequencies: WordFrequencies, console: Console) -> None:
    """Fills in the report and prints each table as soon as its numbers are there."""
    settings = report.settings
    with (
        threads(settings.threads),
        torch.sparse.check_sparse_tensor_invariants(False),  # torch.optim warns otherwise
        console.status("reading") as status,
    ):
        bench = Bench(settings, frequencies, absent=report.absent, say=status.update)
        if "steps" in settings.parts:
            for comparison in bench.steps():
                report.steps.append(comparison)
                console.print(comparison_table(comparison, report, console))
            report.fixed_costs += bench.fixed_costs()
            console.print(fixed_cost_table(report, console))
        if "scaling" in settings.parts:
            for sweep in bench.scaling():
                report.scaling.append(sweep)
                console.print(sweep_table(sweep, report, console))
        if "training" in settings.parts:
            for results in bench.training():
                report.training.append(results)
                console.print(training_table(results, report, console))
        if "tables" in settings.parts:
            for results in bench.tables():
                report.tables.append(results)
                console.print(training_table(results, report, console))
        for part, measure, kept in (
            ("many", bench.many, report.many),
            ("dense", bench.dense, report.dense),
        ):
            if part in settings.parts:
                for times in measure():
                    kept.append(times)
                    console.print(update_table(times, report, console))
        if "heads" in settings.parts:
            for heads in bench.heads():
                report.heads.append(heads)
                console.print(head_table(heads, report, console))
        if "bags" in settings.parts:
            for bags in bench.bags():
                report.bags.append(bags)
                console.print(bags_table(bags, report, console))
    if report.steps:
        console.print(ratio_table(report, console))


def _word_frequencies(settings: Settings, counts: Path | None, console: Console) -> WordFrequencies:
    path = counts or default_counts()
    if path is not None and path.exists():
        return WordFrequencies.from_file(path, rows=settings.most_rows())
    console.print(
        "LM1B's word counts are missing, so ids follow Zipf's law instead; name them with "
        f"--counts, or set {DATA_VARIABLE} to a folder that has {str(COUNTS_NAME)!r} in it",
        style="bold red",
        markup=False,
    )
    return WordFrequencies.zipf(rows=settings.most_rows())


def _warn(report: Report, console: Console) -> None:
    settings = report.settings
    for name, reason in report.absent.items():
        console.print(
            f"{name} is left out: {reason}; see experiments/README.md",
            style="bold red",
            markup=False,
        )
    load = load_average()
    if load > settings.cores / 4:
        is_cpu = settings.clock == "cpu"
        console.print(
            f"the machine is busy (load {load:.1f} on {settings.cores} cores): "
            "neither times nor ratios can be trusted"
            + (", although the time of other processes is not counted" if is_cpu else ""),
            style="bold red",
        )
